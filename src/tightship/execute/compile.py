"""A plan's steps -> a flat list of instructions, each a function of the environment alone.

Everything that can be decided beforehand is: which places hold an op's arguments, which results are kept,
which views have to be derived and which places are emptied. A place is emptied with its storage, so nothing
outlives its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tightship.errors import BadInput, Unsupported
from tightship.execute.arguments import Environment, constants_of, keywords, positional
from tightship.execute.device_codecs import PACKED
from tightship.execute.moves import Moves, Pool, with_state
from tightship.execute.script import device_of
from tightship.execute.views import derivation
from tightship.frontends.torch import compat
from tightship.frontends.torch.optimizer.updates import Updater
from tightship.frontends.torch.program import Call, Program, flat, refs_in
from tightship.plan import Plan, Step

__all__ = ["Code", "Instruction", "compile_plan", "updater_of"]

Action = Callable[[list[Any]], None]


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
    ``results`` after it. ``constants`` tells, by op and whether it is a recomputation, from which places on the
    constants among a call's arguments lie."""

    instructions: list[Instruction] = field(default_factory=list)
    initial: list[Any] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    constants: dict[tuple[int, bool], list[int]] = field(default_factory=dict)

    def change(self, call: Call, op: int, again: bool) -> None:
        """From now on, run ``op`` with the numbers of ``call``, which has the same tensors."""
        values = constants_of(call)
        for start in self.constants.get((op, again), ()):
            self.initial[start : start + len(values)] = values


def updater_of(call: Call) -> Updater | None:
    """The call's updater if it is an optimizer's update of a parameter."""
    return call.fn if isinstance(call.fn, Updater) else None


def compile_plan(
    program: Program, plan: Plan, aside: Callable[[], None] | None = None, spill: Pool | None = None
) -> Code:
    """``aside`` keeps the requests of an op's run away from the arena: optimizer state, which some make, outlives
    the step. ``spill`` is the host pool, for plans that offload.

    Raises ``BadInput`` for steps that do not fit the program, ``Unsupported`` for packing and copying out beside ops
    on several devices, or on others than CPU and CUDA, and for a codec that is not there on CUDA.
    """
    return _Compiler(program, plan, aside, spill).run(plan.steps)


class _Compiler:
    def __init__(
        self, program: Program, plan: Plan, aside: Callable[[], None] | None, spill: Pool | None
    ) -> None:
        self.program, self.graph = program, program.graph
        self.aside = aside
        self.environment = Environment(len(self.graph.values))
        self.there: dict[int, dict[int, None]] = {}  # storage -> values of it that have a tensor now
        self.compiled: dict[tuple[int, bool, tuple[int, ...]], Action] = {}
        self.states: dict[int, int] = {}  # op -> place of its saved random state
        self.moves = Moves(program, plan, self.environment, spill)
        self.code = Code()

    def run(self, steps: Sequence[Step]) -> Code:
        for slot in self.program.slots:
            self.appears(slot.value)
        self.refuse_elsewhere(steps)
        for i, step in enumerate(steps):
            wait = self.moves.waits(i, step)
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

    def refuse_elsewhere(self, steps: Sequence[Step]) -> None:
        """Packing and copying out are written for the memory of the CPU and of one GPU."""
        moving = [s for s in steps if s.kind not in ("compute", "recompute", "free")]
        device = device_of(self.graph) or "several devices"
        if not moving or device == "cpu":
            return
        if not device.startswith("cuda"):
            what = f"a step of kind {moving[0].kind!r} on {device}"
            why = "bytes are packed and copied out on CPU and CUDA only, and of one device"
            raise Unsupported(what, why, "allow recompute only")
        unknown = next((s.codec for s in moving if s.codec and s.codec not in PACKED), None)
        if unknown is not None:
            raise Unsupported(f"packing with {unknown!r} on {device}", "it would wait for the device")

    def appears(self, value: int) -> None:
        self.there.setdefault(self.graph.values[value].storage, {})[value] = None

    def view(self, i: int, value: int) -> None:
        """Derives the tensor of ``value`` if it has none in this residence of its storage."""
        info = self.graph.values[value]
        held = self.there.get(info.storage)
        if not held:
            name = self.graph.storages[info.storage].name
            raise BadInput("a storage is resident when it is used", name, f"step {i} of the plan")
        if value in held:
            return
        base = self.program.bases[info.storage]
        if base not in held:
            base = next(iter(held))
        derive = derivation(info, self.graph.values[base], movable=info.storage in self.graph.static)

        def run(env: list[Any]) -> None:
            env[value] = derive(env[base])

        self.code.instructions.append(Instruction(i, -1, run))
        self.appears(value)

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
            self.compiled[key] = self.action(call, results)
        made = tuple(v for v in results if v >= 0)
        action = self.compiled[key]
        if step.saves or (again and self.graph.ops[step.op].random):
            if step.saves:
                self.states[step.op] = self.environment.constant(None)
            elif step.op not in self.states:
                name = self.graph.ops[step.op].name
                raise BadInput("a random op runs again from its saved state", name, f"step {i} of the plan")
            op = self.graph.ops[step.op]
            action = with_state(action, self.states[step.op], again=again, device=op.device, nbytes=op.state)
        if step.stream:
            raise BadInput("ops run on stream 0", step.stream, f"step {i} of the plan")
        self.code.instructions.append(Instruction(i, step.op, action, made, asks=True))
        if step.reuses:
            self.empty(i, tuple(v for a, _ in step.reuses for v in self.there.pop(a, ())))
        for v in made:
            self.appears(v)

    def move(self, i: int, step: Step) -> None:
        if step.kind in ("offload", "compress"):
            for s in step.storages:
                self.view(i, self.program.bases[s])
        self.code.instructions.append(Instruction(i, -1, self.moves.move(i, step), asks=True))
        if step.kind in ("fetch", "decompress"):
            for s in step.storages:
                self.appears(self.program.bases[s])

    def free(self, i: int, step: Step) -> None:
        if step.form == "full":
            places = tuple(v for s in step.storages for v in self.there.pop(s, ()))
        elif step.form == "state":
            places = (self.states.pop(step.op),)
        else:
            places = self.moves.forget(step)
        self.empty(i, places)

    def empty(self, i: int, places: tuple[int, ...]) -> None:
        def several(env: list[Any]) -> None:
            for v in places:
                env[v] = None

        def one(env: list[Any]) -> None:
            env[place] = None

        if places:
            place = places[0]
            self.code.instructions.append(Instruction(i, -1, one if len(places) == 1 else several))

    def action(self, call: Call, results: tuple[int, ...]) -> Action:
        get = positional(call, self.environment)
        more = keywords(call.kwargs, self.environment)
        fn = compat.direct(call.fn)
        updater = updater_of(call)
        if updater is not None and self.aside is not None:
            return _update(updater, get, self.aside)
        pairs = tuple((k, v) for k, v in enumerate(results) if v >= 0)
        shape = compat.returns_tensors(call.fn)
        if not pairs:
            return _nothing(fn, get, more)
        if shape == 1:
            return _one(fn, get, more, pairs[0][1])
        return _some(fn, get, more, pairs, nested=shape < 0)


def _nothing(fn: Any, get: Any, more: Any) -> Action:
    if more is None:

        def run(env: list[Any]) -> None:
            fn(*get(env))
    else:

        def run(env: list[Any]) -> None:
            fn(*get(env), **more(env))

    return run


def _one(fn: Any, get: Any, more: Any, place: int) -> Action:
    if more is None:

        def run(env: list[Any]) -> None:
            env[place] = fn(*get(env))
    else:

        def run(env: list[Any]) -> None:
            env[place] = fn(*get(env), **more(env))

    return run


def _some(fn: Any, get: Any, more: Any, pairs: tuple[tuple[int, int], ...], *, nested: bool) -> Action:
    def run(env: list[Any]) -> None:
        out = fn(*get(env)) if more is None else fn(*get(env), **more(env))
        if nested:
            out = flat(out)
        for k, v in pairs:
            env[v] = out[k]

    return run


def _update(fn: Updater, get: Any, aside: Callable[[], None]) -> Action:
    def run(env: list[Any]) -> None:
        if fn.keeps or not fn.materialized:
            aside()
        fn(*get(env))

    return run
