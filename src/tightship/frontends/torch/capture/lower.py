"""Tape or fx graph -> Program.

Which results may be written over which inputs: ops that look at one element of each input at a time.

PyTorch marks such ops with a tag, and runs them with one kernel whether the result is new, ``out=`` or the input
itself. Their results are as before where input and result are laid out alike and all the op reads of that storage is
this one value: then each element is read before it is written, and never again. What is claimed here is tried before
it is used: the profile runs each such op with its result laid over the input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from tightship.errors import BadInput, UnknownSize, Unsupported
from tightship.frontends.torch import compat
from tightship.frontends.torch.capture.tape import Origin, Record, Tape, TapeStorage, TapeValue
from tightship.frontends.torch.program import Call, Program, Ref, Slot, refs_in
from tightship.graph import Graph, Op, Storage, Value

__all__ = ["elementwise", "finish", "in_place_sums", "lower", "overwrites"]


_MORE = (
    "elu_backward", "hardsigmoid_backward", "hardswish", "hardswish_backward", "hardtanh_backward",
    "leaky_relu_backward", "mish_backward", "softplus_backward",
)  # fmt: skip
"""Elementwise in the same way, without the tag."""
_NOT = ("clone", "frexp", "ldexp", "mvlgamma")
"""With the tag, but made of several kernels, or copies."""


def elementwise(fn: Any) -> bool:
    """Whether an op makes one new tensor, each element of it from the elements at the same place of its inputs."""
    if not isinstance(fn, torch._ops.OpOverload) or fn.namespace != "aten" or fn._schema.is_mutable:
        return False
    name = fn._schema.name.removeprefix("aten::")
    if len(fn._schema.returns) != 1 or name in _NOT:
        return False
    return torch.Tag.pointwise in fn.tags or name in _MORE


def overwrites(tape: Tape, r: Record) -> tuple[tuple[int, int], ...]:
    """``Op.overwrites`` of a record, in storages of the tape."""
    if not elementwise(r.fn) or r.writes or r.random or r.effect or len(r.results) != 1 or r.results[0] < 0:
        return ()
    if r.device.startswith("cuda"):  # torch's pluggable allocator takes two tensors at one address for one
        return ()
    made = tape.values[r.results[0]]
    if not _whole(tape, made):
        return ()
    home = tape.storages[made.storage]
    pairs = []
    for s in dict.fromkeys(tape.storage(v) for v in r.reads):
        there = tape.storages[s]
        alike = all(tape.values[v] == replace(made, storage=s) for v in r.reads if tape.storage(v) == s)
        if alike and not there.role and (there.nbytes, there.device) == (home.nbytes, home.device):
            pairs.append((s, made.storage))
    return tuple(pairs)


def _whole(tape: Tape, v: TapeValue) -> bool:
    """Whether a value is all of its storage, without gaps."""
    count = prod(v.shape)
    extent = 1 + sum((n - 1) * s for n, s in zip(v.shape, v.stride, strict=True))
    return (
        count > 0
        and not v.offset
        and count == extent
        and count * v.dtype.itemsize == tape.storages[v.storage].nbytes
    )


# --- tape -> Program ------------------------------------------------------------------------------------------


def finish(
    tape: Tape,
    results: Sequence[int],
    *,
    result_spec: Any = None,
    name: str = "step",
    guards: Sequence[Any] = (),
    batch: Any = None,
    notes: Sequence[str] = (),
    losses: Sequence[int] = (),
    sums: bool = False,
) -> Program:
    """The program of everything on the tape that matters: ops nobody needs are left out.

    ``results`` are values handed back; ``losses`` those among them to be called outputs. ``sums``: take sums of
    gradients in place, as eager does.
    """
    records = _live(tape, results)
    if sums:
        records, moved = in_place_sums(tape, records, [*results, *losses])
        results, losses = moved[: len(results)], moved[len(results) :]
    number = _Numbers.of(tape, records, results)
    names = _op_names(records)
    storages = _storages(tape, records, names, number, {tape.storage(v) for v in losses})
    calls = [_renumbered(Call(r.fn, r.args, r.kwargs, r.results), number) for r in records]
    replays = {k: _renumbered(r.replay, number) for k, r in enumerate(records) if r.replay is not None}
    owned = _owned_values(tape, number)
    ops = tuple(
        _op(r, n, c, owned, number, overwrites(tape, r), tape.on_cuda)
        for r, n, c in zip(records, names, calls, strict=True)
    )
    slots = tuple(Slot(number.value[v], role, key) for v, role, key in tape.slots)
    inputs = [s.value for s in slots]
    callers = {tape.storage(v) for v, _, _ in tape.slots}
    inputs += [v for s in callers for v in owned[s] if v not in set(inputs)]
    graph = Graph(
        ops,
        _values(tape, number, storages),
        storages,
        tuple(inputs),
        tuple(number.value[v] for v in results),
        name,
    )
    bases = tuple(number.value[tape.storages[s].base] for s in number.storage)
    return Program(
        graph, tuple(calls), replays, bases, slots, graph.outputs, result_spec, tuple(tape.constants),
        tuple(notes), tuple(guards), batch, asked=tuple(r.asked for r in records),
    )  # fmt: skip


def _live(tape: Tape, results: Sequence[int]) -> list[Record]:
    """Records somebody needs, in order. Random ops stay: without them later draws would differ."""
    needed = {tape.storage(v) for v in results} | {tape.storage(v) for v, _, _ in tape.slots}
    live = []
    for r in reversed(tape.records):
        touched = {tape.storage(v) for v in r.results if v >= 0} | set(r.writes)
        if r.random or r.effect or touched & needed:
            live.append(r)
            needed |= {tape.storage(v) for v in r.reads} | set(r.writes)
    return live[::-1]


@dataclass(frozen=True)
class _Numbers:
    """Indices in the graph by index on the tape, in order of first appearance."""

    storage: dict[int, int]
    value: dict[int, int]

    @staticmethod
    def of(tape: Tape, records: Sequence[Record], results: Sequence[int]) -> _Numbers:
        used: dict[int, None] = {}
        for v, _, _ in tape.slots:
            used.setdefault(v)
        for r in records:
            for v in (*(v for v in r.results if v >= 0), *r.reads):
                used.setdefault(v)
        for v in results:
            used.setdefault(v)
        storages = dict.fromkeys(tape.storage(v) for v in used)
        for s in storages:
            used.setdefault(tape.storages[s].base)
        return _Numbers({s: k for k, s in enumerate(storages)}, {v: k for k, v in enumerate(used)})


def _owned_values(tape: Tape, number: _Numbers) -> dict[int, list[int]]:
    """Graph values by tape storage, each storage's base first."""
    owned: dict[int, list[int]] = {s: [number.value[tape.storages[s].base]] for s in number.storage}
    for v, k in number.value.items():
        if k not in owned[tape.storage(v)]:
            owned[tape.storage(v)].append(k)
    return owned


def _renumbered(call: Call, number: _Numbers) -> Call:
    def walk(tree: Any) -> Any:
        if type(tree) is Ref:
            return Ref(number.value[tree.value])
        if isinstance(tree, (list, tuple)):
            return type(tree)(walk(x) for x in tree)
        if isinstance(tree, dict):
            return {k: walk(x) for k, x in tree.items()}
        return tree

    results = tuple(number.value[v] if v >= 0 else -1 for v in call.results)
    return Call(call.fn, walk(call.args), walk(call.kwargs), results)


def _op(
    r: Record, name: str, call: Call, owned: Mapping[int, list[int]], number: _Numbers,
    over: tuple[tuple[int, int], ...], on_cuda: bool,
) -> Op:  # fmt: skip
    defined = [v for v in r.results if v >= 0]
    by_base = {values[0]: values for values in owned.values()}
    saved = r.random and not r.effect and not (on_cuda and r.device == "cpu")  # there, no bytes are planned
    return Op(
        name,
        r.target,
        inputs=tuple(dict.fromkeys(refs_in((call.args, call.kwargs)))),
        outputs=tuple(v for d in defined for v in by_base[number.value[d]]),
        mutates=tuple(number.storage[s] for s in r.writes),
        updates=tuple(number.storage[s] for s in r.updates),
        random=r.random,
        overwrites=tuple((number.storage[a], number.storage[b]) for a, b in over),
        state=compat.random_state(r.device) if saved else 0,
        effect=r.effect,
        flops=r.flops,
        phase=r.phase,
        device=r.device,
        module=r.origin.module,
        source=r.origin.source,
    )


# --- names ----------------------------------------------------------------------------------------------------


class _Unique:
    """``name``, ``name#2``, ``name#3``, …"""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def __call__(self, name: str) -> str:
        n = self._seen[name] = self._seen.get(name, 0) + 1
        return name if n == 1 else f"{name}#{n}"


def _op_names(records: Sequence[Record]) -> list[str]:
    unique = _Unique()
    return [unique(":".join(x for x in (r.origin.module, _short(r)) if x)) for r in records]


def _short(r: Record) -> str:
    return r.target.removeprefix("aten.").split(".")[0] if r.target.startswith("aten.") else r.target


def _storages(
    tape: Tape, records: Sequence[Record], names: Sequence[str], number: _Numbers, losses: set[int]
) -> tuple[Storage, ...]:
    unique = _Unique()
    label: dict[int, tuple[str, str]] = {}
    for s in number.storage:
        if tape.storages[s].role:
            label[s] = (unique(tape.storages[s].name), tape.storages[s].role)
    for r, name in zip(records, names, strict=True):
        made = [tape.storage(v) for v in r.results if v >= 0]
        for k, s in enumerate(made):
            kind = "output" if s in losses else "gradient" if r.phase == "backward" else "activation"
            given = tape.storages[s].name
            label[s] = (unique(given or (name if len(made) == 1 else f"{name}.{k}")), kind)
    return tuple(_storage(tape.storages[s], *label[s], tape.on_cuda) for s in number.storage)


def _storage(known: TapeStorage, name: str, kind: str, on_cuda: bool) -> Storage:
    """Where ops run on a GPU, tensors on the CPU (seeds, scalars) take none of the bytes that are planned."""
    if on_cuda and known.device == "cpu":
        return Storage(name, 0, kind, "host")
    return Storage(name, known.size, kind)


def _values(tape: Tape, number: _Numbers, storages: Sequence[Storage]) -> tuple[Value, ...]:
    unique = _Unique()
    values = []
    for v in number.value:
        i = tape.values[v]
        s = number.storage[i.storage]
        dtype = str(i.dtype).removeprefix("torch.")
        is_base = v == tape.storages[i.storage].base
        name = storages[s].name if is_base else unique(f"{storages[s].name}/view")
        values.append(Value(name, s, dtype, i.shape, i.stride, i.offset))
    return tuple(values)


# --- fx graph -> Program --------------------------------------------------------------------------------------


def lower(
    gm: torch.fx.GraphModule,
    slots: Sequence[tuple[str, Any]] | None = None,
    *,
    phase: str | Callable[[torch.fx.Node], str] = "forward",
    name: str = "graph",
) -> Program:
    """The program of an fx graph of ATen ops with fake tensors in ``meta["val"]``.

    ``slots`` gives (role, key) of each placeholder; the default is ("input", position). ``phase`` names the
    phase of each node. Placeholders and results that are not tensors keep no value; the program's results are
    the tensors among the output node's arguments, and ``result_spec`` a ``Results`` that puts the others back.

    Raises ``UnknownSize`` for a tensor without a fake value or of a dynamic size, ``Unsupported`` for what a tape
    does not take (sparse tensors, calls that are not ops), ``BadInput`` when ``slots`` does not fit.
    """
    from tightship.frontends.torch.structure import Results

    tape = Tape()
    env: dict[torch.fx.Node, Any] = {}
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    if slots is not None and len(slots) != len(placeholders):
        raise BadInput("slots has one entry per placeholder", len(slots), f"{len(placeholders)} placeholders")
    which = phase if callable(phase) else lambda _node: phase
    for n in gm.graph.nodes:
        if n.op == "placeholder":
            k = placeholders.index(n)
            role, key = slots[k] if slots is not None else ("input", k)
            val = _fake_value(n)
            env[n] = Ref(tape.input(val, role, key, n.name)) if isinstance(val, torch.Tensor) else val
        elif n.op == "get_attr":
            env[n] = _attribute(tape, gm, n)
        elif n.op == "call_function":
            env[n] = _node(tape, env, n, which(n))
        elif n.op == "output":
            return _finish_fx(tape, env, n, name, Results)
        else:
            raise Unsupported(
                f"the fx node {n.format_node()}", f"{n.op} is not an ATen op", "trace to ATen first"
            )
    raise BadInput("an fx graph has an output node", name, "lower")


def _finish_fx(tape: Tape, env: Mapping[Any, Any], node: torch.fx.Node, name: str, results: Any) -> Program:
    tree = torch.fx.node.map_arg(node.args[0], lambda a: env[a])
    spec, values = results.of_refs(tree)
    return finish(tape, values, result_spec=spec, name=name)


def _fake_value(n: torch.fx.Node) -> Any:
    val = n.meta.get("val")
    if val is None and n.meta.get("tensor_meta") is not None:
        raise UnknownSize("every tensor of an fx graph has a fake tensor in meta['val']", n.name, "lower")
    if isinstance(val, torch.Tensor) and not all(isinstance(d, int) for d in (*val.shape, *val.stride())):
        raise UnknownSize("every size is a number", tuple(val.shape), f"fx node {n.name!r}")
    return val


def _attribute(tape: Tape, gm: torch.fx.GraphModule, n: torch.fx.Node) -> Any:
    real: Any = gm
    for part in str(n.target).split("."):
        real = getattr(real, part)
    val = n.meta.get("val", real)
    if not isinstance(real, torch.Tensor):
        return real
    return Ref(tape.constant(val, real))


def _node(tape: Tape, env: Mapping[Any, Any], n: torch.fx.Node, phase: str) -> Any:
    import operator

    args = tuple(torch.fx.node.map_arg(n.args, lambda a: env[a]))
    kwargs = dict(torch.fx.node.map_arg(n.kwargs, lambda a: env[a]))
    if n.target is operator.getitem:
        return args[0][args[1]]
    if not isinstance(n.target, torch._ops.OpOverload):
        raise Unsupported(
            f"the fx node {n.format_node()}", "its target is not an ATen op", "trace to ATen first"
        )
    val = _fake_value(n)
    fakes = torch.fx.node.map_arg((n.args, n.kwargs), lambda a: a.meta.get("val"))
    count = compat.flop_formula(n.target)
    flops = int(count(*fakes[0], **fakes[1], out_val=val)) if count else 0
    tape.record(n.target, _listed(args), _listed(kwargs), val, phase=phase, origin=_fx_origin(n), flops=flops)
    return tape.refs(val)


def _listed(tree: Any) -> Any:
    """fx keeps immutable lists and dicts; ops want plain ones."""
    if isinstance(tree, tuple):
        return tuple(_listed(x) for x in tree)
    if isinstance(tree, list):
        return [_listed(x) for x in tree]
    if isinstance(tree, dict):
        return {k: _listed(x) for k, x in tree.items()}
    return tree


def _fx_origin(n: torch.fx.Node) -> Origin:
    stack = n.meta.get("nn_module_stack") or n.meta.get("fwd_nn_module_stack") or {}
    module = str(list(stack.values())[-1][0]) if stack else ""
    module = module.removeprefix("L['self'].").removeprefix("L__self___").removeprefix("self.")
    source = ""
    for line in str(n.meta.get("stack_trace") or "").splitlines():
        if line.strip().startswith('File "'):
            path, rest = line.strip()[6:].split('", line ')
            source = f"{path.rsplit('/', 1)[-1]}:{rest.split(',')[0]}"
    return Origin(module, source)


def in_place_sums(
    tape: Tape, records: Sequence[Record], results: Sequence[int]
) -> tuple[list[Record], list[int]]:
    """``records`` and ``results`` with sums of gradients written into a summand that is read for the last time.

    The sum's storage vanishes; its values become values of the summand's storage. The bits are the same.
    """
    last: dict[int, int] = {}
    for k, r in enumerate(records):
        last.update({tape.storage(v): k for v in r.reads})
        last.update({s: k for s in r.writes})
    kept = {tape.storage(v) for v in results}
    made = {tape.storage(v) for r in records if r.phase == "backward" for v in r.results if v >= 0}
    moved: dict[int, int] = {}  # storage of a sum -> storage it is written into
    done: list[Record] = []
    for k, r in enumerate(records):
        r = _moved(tape, r, moved)
        operand = _operand(tape, r, k, last, made - kept) if _is_sum(r) else None
        if operand is not None:
            total, target = tape.storage(r.results[0]), tape.storage(operand)
            moved[total] = target
            last[target] = last.get(total, k)
            if total in kept:
                kept.add(target)
            tape.storages[target].name = tape.storages[target].name or tape.storages[total].name
            r = _in_place(tape, r, operand)
        done.append(r)
    return done, [_value(tape, v, moved) for v in results]


def _is_sum(r: Record) -> bool:
    return r.phase == "backward" and r.fn is torch.ops.aten.add.Tensor and not r.kwargs


def _operand(tape: Tape, r: Record, k: int, last: dict[int, int], allowed: set[int]) -> int | None:
    """The summand that may be overwritten: a gradient not needed later, and laid out like the sum."""
    total = tape.values[r.results[0]]
    size = tape.storages[total.storage].nbytes
    a, b = r.args[0], r.args[1]
    if type(a) is not Ref or type(b) is not Ref or tape.storage(a.value) == tape.storage(b.value):
        return None
    for ref in (a, b):
        info = tape.values[ref.value]
        free = last[info.storage] == k and info.storage in allowed
        if (
            free
            and info == replace(total, storage=info.storage)
            and tape.storages[info.storage].nbytes == size
        ):
            return int(ref.value)
    return None


def _in_place(tape: Tape, r: Record, operand: int) -> Record:
    other = next(x for x in r.args if x != Ref(operand))
    return replace(
        r,
        fn=torch.ops.aten.add_.Tensor,
        target=str(torch.ops.aten.add_.Tensor),
        args=(Ref(operand), other),
        results=(-1,),
        writes=(tape.storage(operand),),
    )


def _moved(tape: Tape, r: Record, moved: dict[int, int]) -> Record:
    if not any(tape.storage(v) in moved for v in r.reads) and not any(s in moved for s in r.writes):
        return r
    replay = r.replay
    if replay is not None:
        replay = Call(
            replay.fn, _tree(tape, replay.args, moved), _tree(tape, replay.kwargs, moved), replay.results
        )
    return replace(
        r,
        args=_tree(tape, r.args, moved),
        kwargs=_tree(tape, r.kwargs, moved),
        reads=tuple(dict.fromkeys(_value(tape, v, moved) for v in r.reads)),
        writes=tuple(dict.fromkeys(moved.get(s, s) for s in r.writes)),
        updates=tuple(dict.fromkeys(moved.get(s, s) for s in r.updates)),
        replay=replay,
    )


def _value(tape: Tape, v: int, moved: dict[int, int]) -> int:
    s = tape.storage(v)
    return tape.intern(replace(tape.values[v], storage=moved[s])) if s in moved else v


def _tree(tape: Tape, tree: Any, moved: dict[int, int]) -> Any:
    if type(tree) is Ref:
        return Ref(_value(tape, tree.value, moved))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_tree(tape, x, moved) for x in tree)
    if isinstance(tree, dict):
        return {k: _tree(tape, x, moved) for k, x in tree.items()}
    return tree
