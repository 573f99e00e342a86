"""A plan's steps -> a flat list of instructions, each a function of the environment alone.

Everything that can be decided beforehand is: which indices hold an op's arguments, which results are kept,
which views have to be derived and which entries are emptied. An entry is emptied with its storage, so nothing
outlives its last use.

The environment is one flat list: an entry for every value of the graph, then one for every constant argument. With
the constants in it, nearly every argument tuple is one ``itemgetter`` call, and no template ever holds a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from tightship.errors import BadInput, Unsupported
from tightship.execute.away import Fetch, FetchPiece, Lent, Store, StorePiece
from tightship.execute.codecs import ON_DEVICE
from tightship.execute.host_pool import HostPool
from tightship.execute.script import device_of
from tightship.execute.transfers import Action, Environment, Transfers, with_state
from tightship.frontends.torch import compat_ops
from tightship.frontends.torch.collectives import Collective
from tightship.frontends.torch.optimizer.updates import Updater
from tightship.frontends.torch.program import Call, Program, Ref, derivation, flat, refs_in
from tightship.plan import Plan, Step

__all__ = ["Code", "Instruction", "compile_plan", "updater_of"]

Getter = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Instruction:
    """``run(environment)`` is what step ``step`` does, or a view or a wait it needs first (``op`` is then -1).
    ``asks``: it makes the requests of its step."""

    step: int
    op: int
    run: Action
    made: tuple[int, ...] = ()
    asks: bool = False


@dataclass
class Code:
    """Compiled steps. ``initial`` is the environment before a run; inputs go to ``inputs``, results lie in
    ``results`` after it; ``running`` is that of a run that has begun. ``constants`` tells, by op and whether it is a
    recomputation, from which indices on the constants among a call's arguments lie; ``copies``, where streamed copies
    that run beside ops are."""

    instructions: list[Instruction] = field(default_factory=list)
    initial: list[Any] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    constants: dict[tuple[int, bool], list[int]] = field(default_factory=dict)
    copies: list[int] = field(default_factory=list)
    running: list[Any] = field(default_factory=list)

    def change(self, call: Call, op: int, again: bool) -> None:
        """From now on, run ``op`` with the numbers of ``call``, which has the same tensors."""
        values = constants_of(call)
        for start in self.constants.get((op, again), ()):
            for environment in filter(None, (self.initial, self.running)):
                environment[start : start + len(values)] = values


def updater_of(call: Call) -> Updater | None:
    """The call's updater if it is an optimizer's update of a parameter."""
    return call.fn if isinstance(call.fn, Updater) else None


def compile_plan(program: Program, plan: Plan, serving: Any = None, pool: HostPool | None = None) -> Code:
    """``serving`` (the allocator's functions) keeps requests of updates away from the arena, which optimizer
    state that some make outlives, or together in one block of it. ``pool`` is the host pool, for plans that offload.

    Raises ``BadInput`` for steps that do not fit the program, ``Unsupported`` for transfers where ops run on several
    devices, or on others than CPU and CUDA, and for a codec that is not there on CUDA.
    """
    return _Compiler(program, plan, serving, pool).run(plan.steps)


class _Compiler:
    def __init__(self, program: Program, plan: Plan, serving: Any, pool: HostPool | None) -> None:
        self.program, self.graph = program, program.graph
        self.serving = serving
        self.environment = Environment(len(self.graph.values))
        self.resident: dict[int, dict[int, None]] = {}  # storage -> values of it that have a tensor now
        self.compiled: dict[tuple[int, bool, tuple[int, ...]], Action] = {}
        self.states: dict[int, int] = {}  # op -> index of its saved random state
        self.transfers = Transfers(program, plan, self.environment, pool)
        self.code = Code()

    def run(self, steps: Sequence[Step]) -> Code:
        for slot in self.program.slots:
            self.add(slot.value)
        self.check_device(steps)
        for i, step in enumerate(steps):
            wait = self.transfers.waits(i, step)
            if wait is not None:
                self.code.instructions.append(Instruction(i, -1, wait))
            if step.kind in ("compute", "recompute"):
                self.call(i, step)
            elif step.kind == "free":
                self.free(i, step)
            else:
                self.move(i, step)
        for v in self.program.results:
            self.view(len(steps) - 1, v)
        self.code.inputs = tuple(s.value for s in self.program.slots)
        self.code.results = tuple(self.program.results)
        self.code.initial = self.environment.initial
        return self.code

    def check_device(self, steps: Sequence[Step]) -> None:
        """Transfers are written for the memory of the CPU and of one GPU."""
        transfers = [s for s in steps if s.kind not in ("compute", "recompute", "free")]
        device = device_of(self.graph) or "several devices"
        if not transfers or device == "cpu":
            return
        if not device.startswith("cuda"):
            what = f"a step of kind {transfers[0].kind!r} on {device}"
            why = "bytes are compressed and offloaded on CPU and CUDA only, and of one device"
            raise Unsupported(what, why, "allow recompute only")
        unknown = next((s.codec for s in transfers if s.codec and s.codec not in ON_DEVICE), None)
        if unknown is not None:
            raise Unsupported(f"compressing with {unknown!r} on {device}", "it would wait for the device")

    def add(self, value: int) -> None:
        self.resident.setdefault(self.graph.values[value].storage, {})[value] = None

    def view(self, i: int, value: int) -> None:
        """Derives the tensor of ``value`` if it has none in this residence of its storage."""
        info = self.graph.values[value]
        held = self.resident.get(info.storage)
        if not held:
            name = self.graph.storages[info.storage].name
            raise BadInput(f"storage {name!r} is used while not resident", place=f"step {i} of the plan")
        if value in held:
            return
        base = self.program.bases[info.storage]
        if base not in held:
            base = next(iter(held))
        derive = derivation(info, self.graph.values[base], movable=info.storage in self.graph.static)

        def run(env: list[Any]) -> None:
            env[value] = derive(env[base])

        self.code.instructions.append(Instruction(i, -1, run))
        self.add(value)

    def call(self, i: int, step: Step) -> None:
        again = step.kind == "recompute"
        call = self.program.calls[step.op]
        if again:
            call = self.program.replays.get(step.op, call)
        for v in dict.fromkeys(refs_in((call.args, call.kwargs))):
            self.view(i, v)
        kept = set(step.storages) if again else set(self.graph.uses.defines[step.op])
        results = tuple(v if v >= 0 and self.graph.values[v].storage in kept else -1 for v in call.results)
        key = (step.op, again, results)
        if key not in self.compiled:
            self.code.constants.setdefault((step.op, again), []).append(len(self.environment.initial))
            self.compiled[key] = self.action(step.op, call, results)
        made = tuple(v for v in results if v >= 0)
        action = self.compiled[key]
        if step.saves or (again and self.graph.ops[step.op].random):
            if step.saves:
                self.states[step.op] = self.environment.constant(None)
            elif step.op not in self.states:
                rule = f"random op {self.graph.ops[step.op].name!r} recomputed without a saved state"
                raise BadInput(rule, place=f"step {i} of the plan")
            op = self.graph.ops[step.op]
            action = with_state(action, self.states[step.op], again=again, device=op.device, nbytes=op.state)
        if step.stream:
            action = self.begun(i, step, call, made)
        self.code.instructions.append(Instruction(i, step.op, action, made, asks=True))
        if step.reuses:
            self.empty(i, tuple(v for a, _ in step.reuses for v in self.resident.pop(a, ())))
        for v in made:
            self.add(v)

    def begun(self, i: int, step: Step, call: Call, made: tuple[int, ...]) -> Action:
        """A gather, or a copy of what streams, that is waited for where a step says so."""
        fn = call.fn
        if (
            not isinstance(fn, Collective | Fetch | FetchPiece | Store | StorePiece)
            or call.kwargs
            or len(made) > 1
        ):
            rule = f"op on stream {step.stream}: only gathers between ranks and streamed copies may run beside others"
            raise BadInput(rule, place=f"step {i} of the plan")
        begin: Callable[..., tuple[Any, Any]] = fn.begun
        get = positional(call, self.environment)
        sent = self.transfers.sent(i, step)
        if not isinstance(fn, Collective):
            self.code.copies.append(sent)

        def run(env: list[Any]) -> None:
            result, waiting = begin(*get(env))
            for index in made:
                env[index] = result
            env[sent] = (waiting,)

        return run

    def move(self, i: int, step: Step) -> None:
        if step.kind in ("offload", "compress"):
            for s in step.storages:
                self.view(i, self.program.bases[s])
        self.code.instructions.append(Instruction(i, -1, self.transfers.move(i, step), asks=True))
        if step.kind in ("fetch", "decompress"):
            for s in step.storages:
                self.add(self.program.bases[s])

    def free(self, i: int, step: Step) -> None:
        if step.form == "full":
            indices = tuple(v for s in step.storages for v in self.resident.pop(s, ()))
        elif step.form == "state":
            indices = (self.states.pop(step.op),)
        else:
            indices = self.transfers.forget(step)
        self.empty(i, indices)

    def empty(self, i: int, indices: tuple[int, ...]) -> None:
        def several(env: list[Any]) -> None:
            for v in indices:
                env[v] = None

        def one(env: list[Any]) -> None:
            env[index] = None

        if indices:
            index = indices[0]
            self.code.instructions.append(Instruction(i, -1, one if len(indices) == 1 else several))

    def action(self, op: int, call: Call, results: tuple[int, ...]) -> Action:
        updater = updater_of(call)
        if updater is not None and self.serving is not None:
            sizes = [r.size for r in self.graph.ops[op].requests]
            inputs = {s.value for s in self.program.slots}
            return _lending(updater, _update(updater, call, self.serving, sizes, inputs))
        if updater is not None:
            return _lending(updater, _nothing(updater, positional(call, self.environment), None))
        get = positional(call, self.environment)
        more = keywords(call.kwargs, self.environment)
        fn = compat_ops.direct(call.fn)
        if self.serving is not None and compat_ops.asks_by_row(call.fn):
            fn = _in_one_block(fn, self.serving)
        pairs = tuple((k, v) for k, v in enumerate(results) if v >= 0)
        shape = compat_ops.returns_tensors(call.fn)
        if not pairs:
            return _nothing(fn, get, more)
        if shape == 1:
            return _one(fn, get, more, pairs[0][1])
        return _some(fn, get, more, pairs, nested=shape < 0)


def _in_one_block(fn: Any, serving: Any) -> Any:
    """``fn`` with its temporaries, however many, in the block that is planned for all of them."""

    def run(*args: Any, **kwargs: Any) -> Any:
        serving.open_room(False)
        try:
            return fn(*args, **kwargs)
        finally:
            serving.settle()

    return run


def _nothing(fn: Any, get: Any, more: Any) -> Action:
    if more is None:

        def run(env: list[Any]) -> None:
            fn(*get(env))
    else:

        def run(env: list[Any]) -> None:
            fn(*get(env), **more(env))

    return run


def _one(fn: Any, get: Any, more: Any, index: int) -> Action:
    if more is None:

        def run(env: list[Any]) -> None:
            env[index] = fn(*get(env))
    else:

        def run(env: list[Any]) -> None:
            env[index] = fn(*get(env), **more(env))

    return run


def _some(fn: Any, get: Any, more: Any, pairs: tuple[tuple[int, int], ...], *, nested: bool) -> Action:
    def run(env: list[Any]) -> None:
        out = fn(*get(env)) if more is None else fn(*get(env), **more(env))
        if nested:
            out = flat(out)
        for k, v in pairs:
            env[v] = out[k]

    return run


def _update(fn: Updater, call: Call, serving: Any, sizes: list[int], inputs: set[int]) -> Action:
    """State is let go of first: what an update puts in its place ends there, as in eager."""
    refs = [ref.value for ref in call.args]
    gradients, states = [refs[k] for k in fn.gradients], [refs[k] for k in fn.states]
    sparse = [refs[k] for k in fn.sparse]
    nbytes, slack = sum(sizes), fn.state_bytes
    ending = [k for k, v in enumerate(gradients) if fn.takes and v not in inputs]

    def step(given: list[Any], rest: list[Any]) -> None:
        """What the optimizer keeps of gradients are copies: theirs is the arena's memory."""
        for k in ending:
            given[k] = given[k].clone()
        fn.step(given, rest)
        given.clear()

    def run(env: list[Any]) -> None:
        for v in states:
            env[v] = None
        given, rest = [env[v] for v in gradients], [env[v] for v in sparse]
        if not fn.materialized or not (sizes or fn.exact):
            serving.aside(-1, 0)
            step(given, rest)
        elif fn.keeps:
            serving.aside(nbytes, slack)
            step(given, rest)
            serving.settle()
        elif len(sizes) == 1:
            serving.open_room(not fn.exact)
            fn.step(given, rest)
            if serving.settle():
                fn.settle()
        else:
            fn.step(given, rest)

    return run


def _lending(fn: Updater, update: Action) -> Action:
    """An update of tensors that stream works on the caller's, which have memory while it runs."""
    if not isinstance(fn, Lent):
        return update

    def run(env: list[Any]) -> None:
        fn.ready()
        for v, away in fn.lends:
            away.lend(env[v])
        try:
            update(env)
        finally:
            for v, away in fn.lends:
                env[v] = away.take_back()

    return run


# --- arguments ---


def _has_refs(tree: Any) -> bool:
    return next(refs_in(tree), None) is not None


def constants_of(call: Call) -> list[Any]:
    """What the getters of the call's arguments put into the environment, in order."""
    environment = Environment(0)
    positional(call, environment)
    keywords(call.kwargs, environment)
    return environment.initial


def _flat(tree: Any, environment: Environment) -> int | None:
    """The index of an argument in the environment; None if it has to be put together."""
    if isinstance(tree, Ref):
        return tree.value
    return None if _has_refs(tree) else environment.constant(tree)


def _tree(tree: Any, environment: Environment) -> Getter:
    index = _flat(tree, environment)
    if index is not None:
        return itemgetter(index)
    if isinstance(tree, dict):
        return keywords(tree, environment) or (lambda env: {})
    parts = [_flat(x, environment) for x in tree]
    if len(parts) > 1 and None not in parts:
        get = itemgetter(*parts)  # type: ignore[arg-type]
        return get if isinstance(tree, tuple) else lambda env: list(get(env))
    getters = [_tree(x, environment) for x in tree]
    if isinstance(tree, tuple):
        return lambda env: tuple([get(env) for get in getters])
    return lambda env: [get(env) for get in getters]


def positional(call: Call, environment: Environment) -> Getter:
    """Fetches the tuple of the call's positional arguments."""
    if not call.args:
        return lambda env: ()
    if len(call.args) == 1:
        get = _tree(call.args[0], environment)
        return lambda env: (get(env),)
    # A tuple subclass would be rebuilt as itself by nobody; calls take plain tuples.
    return _tree(tuple(call.args), environment)


def keywords(tree: dict[str, Any], environment: Environment) -> Getter | None:
    """Fetches the dict of keyword arguments; None if there are none."""
    if not tree:
        return None
    if not _has_refs(tree):
        return itemgetter(environment.constant(dict(tree)))
    names = tuple(tree)
    getters = [_tree(x, environment) for x in tree.values()]
    return lambda env: {name: get(env) for name, get in zip(names, getters, strict=True)}
