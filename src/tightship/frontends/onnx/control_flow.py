"""Nodes with graphs inside: the types of what If, Loop and Scan make, by those of their graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import onnx

from tightship.errors import BadInput, UnknownSize, Unsupported
from tightship.frontends.onnx.constants import FOR_SHAPES, MOST
from tightship.frontends.onnx.lists import merged
from tightship.frontends.onnx.nested import label
from tightship.frontends.onnx.turns import turns_of
from tightship.frontends.onnx.types import MOST_TENSORS, NO_TENSOR, Dim, TensorType, sequence_of

__all__ = ["BODIES"]

_INT64, _BOOL = onnx.TensorProto.INT64, onnx.TensorProto.BOOL


class Scope(Protocol):
    """What is known of the values of a graph."""

    proto: Any

    def type(self, name: str) -> TensorType | None: ...
    def value(self, name: str) -> Any: ...


class Walk(Protocol):
    """The walk through a model's graphs (`infer`)."""

    place: str
    unknown: dict[str, str]
    notes: list[str]
    opsets: dict[str, int]

    def known(self, scope: Any, name: str, where: str) -> TensorType: ...
    def body(
        self, scope: Any, k: int, name: str, node: Any, types: Sequence[TensorType], where: str
    ) -> Any: ...
    def drop(self, scope: Any, k: int, name: str, unknown: dict[str, str], notes: int) -> None: ...
    def outputs(self, inner: Any, count: int, where: str) -> list[TensorType]: ...


def _if(walk: Walk, scope: Scope, k: int, node: Any, where: str) -> list[TensorType]:
    """Results of the branch that runs, where that is known. A branch that makes no sense for these sizes is one that
    they never take, as long as the other does: it is left out of ``scope.bodies``."""
    condition = scope.value(node.input[0]) if node.input else None
    known = None if condition is None or condition.size != 1 else bool(condition.reshape(()))
    found: dict[str, list[TensorType]] = {}
    faults: dict[str, BadInput] = {}
    for name, runs in (("then_branch", known), ("else_branch", None if known is None else not known)):
        before, notes = dict(walk.unknown), len(walk.notes)
        try:
            inner = walk.body(scope, k, name, node, (), where)
            found[name] = walk.outputs(inner, len(node.output), where)
        except (UnknownSize, Unsupported):
            raise
        except BadInput as error:
            faults[name] = error
        if runs is False and (name in faults or len(walk.unknown) > len(before)):
            walk.drop(scope, k, name, before, notes)
            found.pop(name, None)
        elif name in faults:
            walk.drop(scope, k, name, before, notes)
            said = str(faults[name]).removeprefix(f"{walk.place}: ")
            walk.notes.append(
                f"If {label(node, k)!r}: {name} cannot run at these sizes and is not counted: {said}"
            )
    if not found or (known is not None and ("then_branch" if known else "else_branch") not in found):
        raise next(iter(faults.values()))
    if known is not None:
        return found["then_branch" if known else "else_branch"]
    one, *rest = found.values()
    return [merged(a, b) for a, b in zip(one, rest[0], strict=True)] if rest else one


def _loop(walk: Walk, scope: Scope, k: int, node: Any, where: str) -> list[TensorType]:
    carried = [
        replace(t, steady=False) if t.is_list else t for t in map(_known(walk, scope, where), node.input[2:])
    ]
    unknown, notes = dict(walk.unknown), len(walk.notes)

    def once(given: Sequence[TensorType]) -> tuple[Scope, list[TensorType]]:
        types = [TensorType(_INT64, ()), TensorType(_BOOL, ()), *given]
        inner = walk.body(scope, k, "body", node, types, where)
        return inner, walk.outputs(inner, 1 + len(node.output), where)[1:]

    inner, made = once(carried)
    turns = turns_of(node, scope, inner, lambda n: _may_be_computed(n, inner), walk.opsets)
    if any(_grows(a, b) for a, b in zip(carried, made, strict=False)):
        _check_carried(carried, made, where, walk)
        last, made_ = _after_turns(carried, made, turns, where)
        if last != carried:  # what a turn needs is counted of the last one
            walk.drop(scope, k, "body", unknown, notes)
            inner, stacked = once(last)
            made = [*made_, *stacked[len(carried) :]]
        else:
            made = [*made_, *made[len(carried) :]]
    elif turns == 0 or not _changes(carried, made):
        _check_carried(carried, made, where, walk)
    elif turns != 1:
        first = ends = made[: len(carried)]
        walk.drop(scope, k, "body", unknown, notes)
        inner, made = once(first)
        if turns is not None and _changes(first, made):  # what a turn needs is counted of the last one
            last, ends = (
                [_grown(a, b, n) for a, b in zip(carried, first, strict=True)] for n in (turns - 1, turns)
            )
            walk.drop(scope, k, "body", unknown, notes)
            inner, made = once(last)
        if _changes(ends, made):
            _check_carried(carried, first, where, walk)
    count: Dim = "" if turns is None else turns
    return [*made[: len(carried)], *(_stacked(t, 0, count) for t in made[len(carried) :])]


def _known(walk: Walk, scope: Scope, where: str) -> Callable[[str], TensorType]:
    return lambda name: walk.known(scope, name, where)


def _grows(before: TensorType, after: TensorType) -> bool:
    """Whether a turn of a loop changes how many tensors there are in a sequence."""
    return before.is_list and after.is_list and before.items != after.items


def _after_turns(
    before: Sequence[TensorType], after: Sequence[TensorType], turns: int | None, where: str
) -> tuple[list[TensorType], list[TensorType]]:
    """Of what a loop carries the types before its last turn and after it, where sequences grow by as many tensors of
    one type in every turn, or become shorter. Of a number of turns that is not known, that of the sequence is not."""
    last, result = [], []
    for n, (a, b) in enumerate(zip(before, after, strict=False)):
        if not _grows(a, b):
            last.append(a)
            result.append(a)
            continue
        if a.items is None or b.items is None:
            last.append(a)
            result.append(replace(b, steady=True))
            continue
        if len({*a.items, *b.items}) > 1:
            raise Unsupported(
                f"{where}: sequence {n} that it carries", "a turn adds or takes out tensors of several sizes",
                "carry sequences of tensors of one size",
            )  # fmt: skip
        element, more = (*a.items, *b.items)[0], len(b.items) - len(a.items)
        if turns is None:
            last.append(a)
            result.append(TensorType(NO_TENSOR, element=element))
            continue
        begins, ends = (max(0, len(a.items) + more * k) for k in (max(0, turns - 1), turns))
        if ends > MOST_TENSORS:
            raise Unsupported(
                f"{where}: sequence {n} that it carries", f"it would have {ends} tensors of at most {MOST_TENSORS}",
                "stack what turns make (scan outputs)",
            )  # fmt: skip
        last.append(sequence_of((element,) * (begins if more > 0 else len(a.items)), element, steady=False))
        result.append(sequence_of((element,) * ends, element))
    return last, result


def _changes(before: Sequence[TensorType], after: Sequence[TensorType]) -> bool:
    """Whether a turn of a loop changes the shape of a tensor, all of whose sizes are known."""
    pairs = [(a, b) for a, b in zip(before, after, strict=False) if not a.is_list]
    known = all(a.known and b.known and a.dtype == b.dtype for a, b in pairs)
    return known and any(a.shape != b.shape for a, b in pairs)


def _grown(before: TensorType, after: TensorType, turns: int) -> TensorType:
    """What a loop carries after so many turns that add what the first one does."""
    if before.is_list or before.shape is None or after.shape is None or len(before.shape) != len(after.shape):
        return before
    pairs = zip(before.sizes, after.sizes, strict=True)
    return replace(before, shape=tuple(max(0, a + (b - a) * turns) for a, b in pairs))


def _may_be_computed(node: Any, inner: Scope) -> bool:
    """Whether a node of a body is one of those that shapes are computed with, and gives few elements."""
    types = [t for n in node.output if n and (t := inner.type(n)) is not None]
    few = all(t.known and t.count <= MOST for t in types)
    return few and node.domain in ("", "ai.onnx") and node.op_type in FOR_SHAPES and node.op_type != "Range"


def _scan(walk: Walk, scope: Scope, k: int, node: Any, where: str) -> list[TensorType]:
    given = {a.name: a for a in node.attribute}
    types = [walk.known(scope, n, where) for n in node.input]
    scans = int(given["num_scan_inputs"].i) if "num_scan_inputs" in given else 0
    states = len(types) - scans
    if scans < 1 or states < 0 or len(node.output) < states:
        raise BadInput(f"num_scan_inputs is {scans}, with {len(types)} inputs", place=where)
    axes = list(given["scan_input_axes"].ints) if "scan_input_axes" in given else [0] * scans
    slices, length = [], None
    for t, axis in zip(types[states:], axes, strict=False):
        if t.shape is None or not -len(t.shape) <= axis < len(t.shape):
            raise BadInput(f"axis {axis} to scan along is not one of the input's", place=where)
        axis %= len(t.shape)
        length = t.shape[axis]
        slices.append(TensorType(t.dtype, t.shape[:axis] + t.shape[axis + 1 :]))
    inner = walk.body(scope, k, "body", node, [*types[:states], *slices], where)
    made = walk.outputs(inner, len(node.output), where)
    _check_carried(types[:states], made, where, walk)
    many = len(node.output) - states
    stacked = list(given["scan_output_axes"].ints) if "scan_output_axes" in given else [0] * many
    rest = [_stacked(t, axis, length or 0) for t, axis in zip(made[states:], stacked, strict=False)]
    return [*made[:states], *rest]


def _check_carried(before: Iterable[TensorType], after: Iterable[TensorType], where: str, walk: Walk) -> None:
    """Sizes that are not known yet, and are asked for, may turn out to be the same once they are given."""
    for n, (a, b) in enumerate(zip(before, after, strict=False)):
        if a.is_list and b.is_list:
            continue
        if a != b and not (walk.unknown and _may_be_equal(a, b)):
            raise Unsupported(
                f"{where}: value {n} that it carries", f"its type is {a.shape} before and {b.shape} after a turn",
                "carry values of a fixed shape, or that grow by as much in each of a number of turns that is known",
            )  # fmt: skip


def _may_be_equal(a: TensorType, b: TensorType) -> bool:
    if a.dtype != b.dtype or a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
        return a.dtype == b.dtype and (a.shape is None or b.shape is None)
    return all(
        x == y or isinstance(x, str) or isinstance(y, str) for x, y in zip(a.shape, b.shape, strict=True)
    )


def _stacked(t: TensorType, axis: int, count: Dim) -> TensorType:
    if t.shape is None:
        return t
    axis = axis % (len(t.shape) + 1)
    return TensorType(t.dtype, (*t.shape[:axis], count, *t.shape[axis:]))


BODIES: Final[dict[str, Callable[[Walk, Scope, int, Any, str], list[TensorType]]]] = {
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
}
