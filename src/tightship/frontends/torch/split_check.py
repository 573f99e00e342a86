"""What is checked of every program in slices, by other means than those that made it: two rules.

``S1`` Each element of a whole that slices write is written once.
``S2`` A row that a slice writes is that row of the whole: rows are followed forward through the recorded calls, from
what they read of wholes, by the strides and the padding that each call was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from tightship.analysis.patches import DIM
from tightship.errors import Rule, VerificationFailed, Violation
from tightship.frontends.torch.capture.tape import Record, Tape, TapeValue
from tightship.frontends.torch.program import Program, Ref, refs_in
from tightship.frontends.torch.split_rules import merged, name_of

__all__ = ["SPLIT_RULES", "check_slices"]

aten = torch.ops.aten


def check_slices(old: Program, tape: Tape, records: Sequence[Record], made_from: Mapping[int, int]) -> None:
    """Raise ``VerificationFailed`` unless the records keep both rules. ``made_from``: by the identity of a record of
    a region in patches, the op of ``old`` it is a slice of."""
    given = _Given(old, tape, records, made_from)
    faults = [x for rule in SPLIT_RULES.values() for x in rule.check(given)]
    if faults:
        raise VerificationFailed(faults, place=f"{old.graph.name} in slices")


def _written(tape: Tape, r: Record) -> TapeValue | None:
    """The value that a record writes into a storage that is there."""
    if "out" in r.kwargs:
        return tape.values[r.kwargs["out"].value]
    if r.fn is aten.copy_.default and isinstance(r.args[0], Ref):
        return tape.values[r.args[0].value]
    return None


@dataclass(frozen=True)
class _Given:
    """The arguments of `check_slices`."""

    old: Program
    tape: Tape
    records: Sequence[Record]
    made_from: Mapping[int, int]


def _covered(given: _Given) -> Iterator[Violation]:
    tape, records = given.tape, given.records
    wholes = {
        tape.storage(r.results[0]): tape.values[r.results[0]]
        for r in records
        if r.fn is aten.empty_strided.default
    }
    parts: dict[int, list[TapeValue]] = {s: [] for s in wholes}
    for r in records:
        value = _written(tape, r)
        if value is not None and value.storage in parts:
            parts[value.storage].append(value)
    for s, whole in wholes.items():
        lead = len(whole.shape) - min((len(v.shape) for v in parts[s]), default=len(whole.shape)) + 1
        whole = merged(whole, lead, len(whole.shape)) or whole
        if any(len(v.shape) != len(whole.shape) for v in parts[s]):
            name = tape.storages[s].name
            yield Violation("S1", -1, (name,), f"{name}: slices of it have other dimensions")
            continue
        dims = {
            d for v in parts[s] for d, (n, m) in enumerate(zip(v.shape, whole.shape, strict=True)) if n != m
        }
        ends = 0
        if len(dims) == 1:
            (d,) = dims
            for v in sorted(parts[s], key=lambda v: v.offset):
                if v.stride != whole.stride or v.offset != whole.offset + ends * whole.stride[d]:
                    break
                ends += v.shape[d]
        if (
            len(dims) != 1
            or ends != whole.shape[d]
            or sum(prod(v.shape) for v in parts[s]) != prod(whole.shape)
        ):
            name = tape.storages[s].name
            yield Violation(
                "S1", -1, (name,), f"{name}: {len(parts[s])} slices do not lie side by side in it"
            )


@dataclass(frozen=True)
class _Part:
    """A tensor whose first row is row ``start`` of the whole; from ``first`` up to ``last`` rows are right."""

    start: int
    first: int
    last: int


def _rows_kept(given: _Given) -> Iterator[Violation]:
    old, tape, records, made_from = given.old, given.tape, given.records, given.made_from
    parts: dict[int, _Part] = {}
    for r in records:
        k = made_from.get(id(r))
        if k is None:
            continue
        whole = _written(tape, r)
        if whole is not None and whole.storage not in parts and r.fn is aten.copy_.default:
            start = (whole.offset - _base(tape, whole).offset) // whole.stride[DIM]
            rows, stop = _part(tape, parts, tape.values[r.args[1].value]), start + whole.shape[DIM]
            if rows.start != start or not rows.first <= start <= stop <= rows.last:
                name = tape.storages[whole.storage].name
                said = f"{name}: rows {start} to {start + whole.shape[DIM]} are written from others"
                yield Violation("S2", -1, (name,), said)
            continue
        made = next((tape.storage(v) for v in r.results if v >= 0), None)
        found = _followed(old, k, tape, parts, r)
        if made is not None and found is not None:
            parts[made] = found
        elif found is not None:
            parts |= {
                s: replace(parts[s], first=found.first, last=found.last) for s in r.writes if s in parts
            }
        else:
            name = old.graph.ops[k].name
            yield Violation("S2", -1, (name,), f"{name}: a slice reads rows that do not belong together")


def _base(tape: Tape, v: TapeValue) -> TapeValue:
    return tape.values[tape.storages[v.storage].base]


def _part(tape: Tape, parts: Mapping[int, _Part], v: TapeValue) -> _Part:
    """The rows that a value has: of a part, or of a whole."""
    skipped = (v.offset - _base(tape, v).offset) // v.stride[DIM]
    if v.storage in parts:
        p = parts[v.storage]
        start = p.start + skipped
        return _Part(start, max(p.first, start), min(p.last, start + v.shape[DIM]))
    return _Part(skipped, skipped, skipped + v.shape[DIM])


def _followed(old: Program, k: int, tape: Tape, parts: Mapping[int, _Part], r: Record) -> _Part | None:
    """The rows of what a record of op ``k`` makes; None where its operands do not fit together."""
    graph, call, name = old.graph, old.calls[k], name_of(r.fn)
    given = [tape.values[v] for v in refs_in(r.args)]
    if name in ("convolution", "constant_pad_nd") or "_pool" in name:
        operand = _part(tape, parts, given[0])
        height = graph.values[call.args[0].value].shape[DIM]
        kernel, stride, dilation, here, there = _sliding(name, r, call.args, [v.shape for v in given])
        lowest = operand.start - here + there  # where the first window begins, in padded rows of the whole
        if lowest % stride:
            return None
        start, extent = lowest // stride, (kernel - 1) * dilation + 1
        rows = range(start, start + tape.values[next(v for v in r.results if v >= 0)].shape[DIM])
        right = [
            q for q in rows
            if max(0, q * stride - there) >= operand.first
            and min(height, q * stride - there + extent) <= operand.last
            and (q * stride - there >= operand.start or operand.start == 0)
        ]  # fmt: skip
        return _Part(start, right[0], right[-1] + 1) if right else None
    tall = [_part(tape, parts, v) for v in given if v.storage in parts or _sliced(old, k, _base(tape, v))]
    if len({p.start for p in tall}) != 1:
        return None
    return _Part(tall[0].start, max(p.first for p in tall), min(p.last for p in tall))


def _sliced(old: Program, k: int, v: TapeValue) -> bool:
    """Whether a whole has a row for each of the result, and is not broadcast."""
    made = next((x for x in old.calls[k].results if x >= 0), None)
    out = old.graph.values[old.calls[k].args[0].value if made is None else made].shape
    return len(v.shape) == len(out) and v.shape[DIM] == out[DIM] > 1


def _sliding(
    name: str, r: Record, args: Sequence[Any], shapes: Sequence[Any]
) -> tuple[int, int, int, int, int]:
    """Kernel, stride and dilation along rows; padding before the first row here, and of the whole."""
    if name == "convolution":
        return shapes[1][DIM], r.args[3][0], r.args[5][0], r.args[4][0], args[4][0]
    if name == "constant_pad_nd":
        place = 2 * (len(shapes[0]) - 1 - DIM)
        return 1, 1, 1, r.args[1][place], (*args[1], 0, 0)[place]
    stride = r.args[2][0] if len(r.args) > 2 and r.args[2] else r.args[1][0]
    dilation = r.args[4][0] if name.startswith("max") and len(r.args) > 4 else 1
    here, there = (a[3][0] if len(a) > 3 else 0 for a in (r.args, args))
    return r.args[1][0], stride, dilation, here, there


SPLIT_RULES = {
    rule.code: rule
    for rule in (
        Rule("S1", "each element of a whole that slices write is written once", _covered),
        Rule("S2", "a row that a slice writes is that row of the whole", _rows_kept),
    )
}
