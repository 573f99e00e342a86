"""Tape -> Program: names, numbers, and which results may be written over which inputs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from tightship.errors import Unsupported
from tightship.frontends.builder import UniqueNames
from tightship.frontends.torch import compat
from tightship.frontends.torch.capture.readings import READ
from tightship.frontends.torch.capture.tape import Record, Tape, TapeStorage, TapeValue
from tightship.frontends.torch.program import Call, Program, Ref, Slot, refs_in, substitute
from tightship.graph import Graph, Op, Storage, Value

__all__ = ["Numbers", "elementwise", "finish", "in_place_operands", "live_records", "overwrites"]


# --- ops that may write over an input -------------------------------------------------------------------------
# PyTorch tags ops that look at one element of each input at a time, and runs them with one kernel whether the
# result is new, ``out=`` or the input itself. Results are as before where input and result are laid out alike and
# this value is all the op reads of the storage: each element is read before it is written, and never again. So they
# are where an op reduces each row before it writes it, and reads no other row afterwards. The profile tries every
# such op with its result over the input before the claim is used.

_MORE = (
    "elu_backward", "hardsigmoid_backward", "hardswish", "hardswish_backward", "hardtanh_backward",
    "huber_loss_backward", "leaky_relu_backward", "mish_backward", "mse_loss_backward", "smooth_l1_loss_backward",
    "softplus_backward",
)  # fmt: skip
"""Elementwise in the same way, without the tag."""
_NOT = ("clone", "frexp", "ldexp", "mvlgamma")
"""With the tag, but made of several kernels, or copies."""

_BY_ROW = {
    # aten/src/ATen/native/cpu/SoftMaxKernel.cpp and LogSoftmaxKernelImpl.h: a row (along any other dimension than
    # the last: a block of columns) is reduced to its maximum and sum, then mapped element by element; what is
    # written first is read again as the result (exponentials), or kept in a buffer (16-bit types).
    "_softmax": (0,),
    "_log_softmax": (0,),
    "_softmax_backward_data": (0, 1),
    "_log_softmax_backward_data": (0, 1),
    # native/cpu/layer_norm_kernel.cpp: moments of a row, then the row. Backward: what a row adds to the gradients of
    # weight and bias, its sums, then the row; later passes read buffers.
    "native_layer_norm": (0,),
    "native_layer_norm_backward": (0, 1),
    # native/cpu/group_norm_kernel.cpp: the same by groups of channels, backward after the sums of them all.
    "native_group_norm": (0,),
    "native_group_norm_backward": (0, 1),
    # native/cpu/batch_norm_kernel.cpp: sums of a channel (channels last: of all of them), then one map. Tensors of
    # unlike layout go through native/Normalization.cpp in two passes, which may not lie over the gradient: tried.
    "native_batch_norm_backward": (0, 1),
}
"""Ops that compute their first result row by row, and the arguments whose places it may take."""


def elementwise(fn: Any) -> bool:
    """Whether an op makes one new tensor, each element of it from the elements at the same place of its inputs."""
    if not _functional(fn):
        return False
    name = _name(fn)
    if len(fn._schema.returns) != 1 or name in _NOT:
        return False
    return torch.Tag.pointwise in fn.tags or name in _MORE


def in_place_operands(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Values among the arguments of an op whose places its first result may take, as far as the op goes: where the
    two are laid out alike, and it reads nothing else of their storages."""
    every = tuple(dict.fromkeys(refs_in((tuple(args), dict(kwargs)))))
    if elementwise(fn):
        return every
    rows = _BY_ROW.get(_name(fn), ()) if _functional(fn) else ()
    given = [x.value for i in rows if i < len(args) and type(x := args[i]) is Ref]
    others = set(refs_in(([x for i, x in enumerate(args) if i not in rows], dict(kwargs))))
    return tuple(v for v in dict.fromkeys(given) if v not in others)


def _functional(fn: Any) -> bool:
    return isinstance(fn, torch._ops.OpOverload) and fn.namespace == "aten" and not fn._schema.is_mutable


def _name(fn: Any) -> str:
    return str(fn._schema.name.removeprefix("aten::"))


def overwrites(tape: Tape, r: Record) -> tuple[tuple[int, int], ...]:
    """``Op.overwrites`` of a record, in storages of the tape."""
    if r.writes or r.random or r.effect or not r.results or r.results[0] < 0:
        return ()
    if r.device.startswith("cuda"):  # torch's pluggable allocator takes two tensors at one address for one
        return ()
    operands = in_place_operands(r.fn, r.args, r.kwargs)
    made = tape.values[r.results[0]]
    if not operands or not _whole(tape, made):
        return ()
    home = tape.storages[made.storage]
    pairs = []
    for s in dict.fromkeys(tape.storage(v) for v in operands):
        there = tape.storages[s]
        read = [v for v in r.reads if tape.storage(v) == s]
        alike = all(v in operands and tape.values[v] == replace(made, storage=s) for v in read)
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
    whole_batch: bool = True,
) -> Program:
    """The program of everything on the tape that matters: ops nobody needs are left out.

    ``results`` are values handed back; ``losses`` those among them to be called outputs. ``sums``: take sums of
    gradients in place, as eager does. Without ``whole_batch``, tensors of the batch that nothing reads are left out.
    """
    records = live_records(tape, results)
    if sums:
        records, moved = _in_place_sums(tape, records, [*results, *losses])
        results, losses = moved[: len(results)], moved[len(results) :]
    given = tape.slots if whole_batch else _read_slots(tape, records, [*results, *losses], guards)
    number = Numbers.of(tape, records, results, given)
    names = _op_names(records)
    storages = _storages(tape, records, names, number, {tape.storage(v) for v in losses})
    calls = [_renumbered(Call(r.fn, r.args, r.kwargs, r.results), number) for r in records]
    replays = {k: _renumbered(r.replay, number) for k, r in enumerate(records) if r.replay is not None}
    owned = _owned_values(tape, number)
    by_base = {values[0]: values for values in owned.values()}
    checks = [k for k, r in enumerate(records) if r.checks]
    reads = [k for k, r in enumerate(records) if r.target == READ]
    ops = tuple(
        _op(
            r,
            n,
            c,
            by_base,
            number,
            overwrites(tape, r),
            tape.on_cuda,
            _earlier(tape, r, checks[: bisect_left(checks, k)], reads[: bisect_left(reads, k)]),
        )
        for k, (r, n, c) in enumerate(zip(records, names, calls, strict=True))
    )
    slots = tuple(Slot(number.value[v], role, key) for v, role, key in given)
    inputs = [s.value for s in slots]
    callers = {tape.storage(v) for v, _, _ in given}
    known = set(inputs)
    inputs += [v for s in callers for v in owned[s] if v not in known]
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
        samples={k: r.samples for k, r in enumerate(records) if r.samples},
    )  # fmt: skip


_Given = tuple[int, str, Any]


def _read_slots(
    tape: Tape, records: Sequence[Record], results: Sequence[int], guards: Sequence[Any]
) -> list[_Given]:
    """The caller's tensors without those of the batch that nothing needs."""
    asked = {source for g in guards for source in g.sources}
    needed = {tape.storage(v) for r in records for v in (*r.reads, *(v for v in r.results if v >= 0))}
    needed |= {tape.storage(v) for v in results} | {s for r in records for s in r.writes}
    return [
        (v, role, key)
        for v, role, key in tape.slots
        if role != "input" or tape.storage(v) in needed or (role, key) in asked
    ]


def live_records(tape: Tape, results: Sequence[int]) -> list[Record]:
    """Records somebody needs, in order. Random ops stay: without them later draws would differ; and what the code
    itself sends, of which another rank may need what it gets."""
    needed = {tape.storage(v) for v in results} | {tape.storage(v) for v, _, _ in tape.slots}
    live = []
    for r in reversed(tape.records):
        touched = {tape.storage(v) for v in r.results if v >= 0} | set(r.writes)
        if r.random or r.effect or r.stays or touched & needed:
            live.append(r)
            needed |= {tape.storage(v) for v in r.reads} | set(r.writes)
    return live[::-1]


@dataclass(frozen=True)
class Numbers:
    """Indices in the graph by index on the tape, in order of first appearance."""

    storage: dict[int, int]
    value: dict[int, int]

    @staticmethod
    def of(
        tape: Tape, records: Sequence[Record], results: Sequence[int], slots: Sequence[_Given] | None = None
    ) -> Numbers:
        used: dict[int, None] = {}
        for v, _, _ in tape.slots if slots is None else slots:
            used.setdefault(v)
        for r in records:
            for v in (*(v for v in r.results if v >= 0), *r.reads):
                used.setdefault(v)
        for v in results:
            used.setdefault(v)
        storages = dict.fromkeys(tape.storage(v) for v in used)
        for s in storages:
            used.setdefault(tape.storages[s].base)
        return Numbers({s: k for k, s in enumerate(storages)}, {v: k for k, v in enumerate(used)})


def _owned_values(tape: Tape, number: Numbers) -> dict[int, list[int]]:
    """Graph values by tape storage, each storage's base first."""
    owned: dict[int, list[int]] = {s: [number.value[tape.storages[s].base]] for s in number.storage}
    for v, k in number.value.items():
        if k != owned[tape.storage(v)][0]:
            owned[tape.storage(v)].append(k)
    return owned


def _renumbered(call: Call, number: Numbers) -> Call:
    args, kwargs = substitute((call.args, call.kwargs), lambda v: Ref(number.value[v]))
    return Call(call.fn, args, kwargs, tuple(number.value[v] if v >= 0 else -1 for v in call.results))


_TRAINED = ("parameter", "state", "gradient")


def _trains(tape: Tape, r: Record) -> bool:
    """Whether it changes what is trained: not before the checks, which leave that as it was where they fail, as an
    error in eager's forward pass does."""
    return r.phase == "update" or any(tape.storages[s].role in _TRAINED for s in r.writes)


def _earlier(tape: Tape, r: Record, checks: Sequence[int], reads: Sequence[int]) -> list[int]:
    """What has to run before a record although no value says so. The code of the step has not asked for it before it
    was told what the reading before it says."""
    return sorted({*(checks if _trains(tape, r) else ()), *reads[-1:]})


def _op(
    r: Record, name: str, call: Call, by_base: Mapping[int, list[int]], number: Numbers,
    over: tuple[tuple[int, int], ...], on_cuda: bool, after: Sequence[int],
) -> Op:  # fmt: skip
    defined = [v for v in r.results if v >= 0]
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
        control=tuple(after),
        flops=r.flops,
        phase=r.phase,
        device=r.device,
        module=r.origin.module,
        source=r.origin.source,
    )


# --- names ----------------------------------------------------------------------------------------------------


def _op_names(records: Sequence[Record]) -> list[str]:
    unique = UniqueNames()
    return [unique(":".join(x for x in (r.origin.module, _short(r)) if x)) for r in records]


def _short(r: Record) -> str:
    return r.target.removeprefix("aten.").split(".")[0] if r.target.startswith("aten.") else r.target


def _storages(
    tape: Tape, records: Sequence[Record], names: Sequence[str], number: Numbers, losses: set[int]
) -> tuple[Storage, ...]:
    unique = UniqueNames()
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
    if any(s not in label for s in number.storage):
        raise Unsupported(
            "a tensor whose origin is not known", "code has kept it, or made it where no op is seen",
            "keep what steps hand on in buffers, or hand it back as a result and into the next batch",
        )  # fmt: skip
    return tuple(_storage(tape.storages[s], *label[s], tape.on_cuda) for s in number.storage)


def _storage(known: TapeStorage, name: str, kind: str, on_cuda: bool) -> Storage:
    """Where ops run on a GPU, tensors on the CPU (seeds, scalars) take none of the bytes that are planned."""
    if on_cuda and known.device == "cpu":
        return Storage(name, 0, kind, "host")
    return Storage(name, known.size, kind)


def _values(tape: Tape, number: Numbers, storages: Sequence[Storage]) -> tuple[Value, ...]:
    unique = UniqueNames()
    values = []
    for v in number.value:
        i = tape.values[v]
        s = number.storage[i.storage]
        dtype = str(i.dtype).removeprefix("torch.")
        is_base = v == tape.storages[i.storage].base
        name = storages[s].name if is_base else unique(f"{storages[s].name}/view")
        values.append(Value(name, s, dtype, i.shape, i.stride, i.offset))
    return tuple(values)


# --- sums of gradients ----------------------------------------------------------------------------------------
# Autograd adds in place when nobody else holds one of the two summands. While a step is recorded it cannot tell, and
# adds out of place, which would cost a tensor more than eager.


def _in_place_sums(
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

    def renamed(v: int) -> Ref:
        return Ref(_value(tape, v, moved))

    replay = r.replay
    if replay is not None:
        replay = replace(
            replay, args=substitute(replay.args, renamed), kwargs=substitute(replay.kwargs, renamed)
        )
    return replace(
        r,
        args=substitute(r.args, renamed),
        kwargs=substitute(r.kwargs, renamed),
        reads=tuple(dict.fromkeys(_value(tape, v, moved) for v in r.reads)),
        writes=tuple(dict.fromkeys(moved.get(s, s) for s in r.writes)),
        updates=tuple(dict.fromkeys(moved.get(s, s) for s in r.updates)),
        replay=replay,
    )


def _value(tape: Tape, v: int, moved: dict[int, int]) -> int:
    s = tape.storage(v)
    return tape.intern(replace(tape.values[v], storage=moved[s])) if s in moved else v
