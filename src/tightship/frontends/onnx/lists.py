"""Sequences and optionals: which tensors are in them, from op to op.

What onnxruntime does (1.32, its CPU, by the bytes that its nodes request): a tensor is copied where it goes into a
sequence and where it is taken out of one, and sequences share the tensors that they have in common. An optional is
what is in it. A sequence that an op only hands on is there to the end. Maps lie outside of the runtime's arena.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import onnx

from tightship.errors import BadInput, Unsupported
from tightship.frontends.onnx.types import MOST_TENSORS, NO_TENSOR, Dim, TensorType, sequence_of, type_of

__all__ = ["handles", "kept", "merged", "results", "value_of", "with_items"]

_INT64, _BOOL = onnx.TensorProto.INT64, onnx.TensorProto.BOOL
Given = Sequence[TensorType | None]
"""Types of a node's inputs, None for one that is left out."""
Value = Callable[[str], np.ndarray | None]
"""What is known of the contents of a value, by its name."""


def handles(node: Any, given: Given) -> bool:
    """Whether `results` knows what a node makes."""
    op = (node.domain, node.op_type)
    return op in _OPS and (op != ("", "Identity") or bool(given and given[0] and given[0].is_list))


def results(node: Any, given: Given, value: Value, where: str) -> list[TensorType]:
    """The types of what such a node makes."""
    least, rule = _OPS[node.domain, node.op_type]
    if len(given) < least or None in given[:least]:
        raise BadInput(f"{len(given)} inputs of an op that has {least} at least", place=where)
    first = given[0] if given else None
    if first is not None and not first.is_list and node.op_type in _OF_SEQUENCES:
        raise BadInput(f"{node.input[0]!r} is a tensor, where the op reads a sequence", place=where)
    return [rule(node, given, value, where)]


def kept(node: Any, given: Given, value: Value) -> list[int | None] | None:
    """Of each tensor of the sequence that a node makes the place in the sequence that it reads, where both share it;
    None for a copy, and altogether where all are copies."""
    first = given[0] if given else None
    if first is None or first.items is None or node.domain:
        return None
    places: list[int | None] = list(range(len(first.items)))
    if node.op_type == "SequenceInsert":
        at = _place(node, 2, len(places), len(places), value)
        places.insert(len(places) if at is None else at, None)
        return places
    if node.op_type == "SequenceErase":
        at = _place(node, 1, len(places), len(places) - 1, value)
        return None if at is None else places[:at] + places[at + 1 :]
    return places if node.op_type in ("Identity", "Optional", "OptionalGetElement") else None


def value_of(node: Any, given: Given) -> np.ndarray | None:
    """What a node says of a sequence or an optional, where that is the same in every run."""
    first = given[0] if given else None
    if node.op_type == "SequenceLength" and first is not None and first.items is not None and first.steady:
        return np.array(len(first.items), np.int64)
    if node.op_type == "OptionalHasElement" and (first is None or first.absent):
        return np.array(False)
    return None


def with_items(t: TensorType, items: tuple[TensorType, ...]) -> TensorType:
    """The type of the same sequence, of whose tensors more is known."""
    return sequence_of(items, None if items else t.element, steady=t.steady)


def merged(one: TensorType, other: TensorType) -> TensorType:
    """What two types have in common; of sequences of one length, tensor by tensor."""
    if one == other:
        return one
    if one.is_list and other.is_list:
        element = one.element or other.element  # an optional of nothing has none
        if one.element and other.element:
            element = merged(one.element, other.element)
        if one.items is None or other.items is None or len(one.items) != len(other.items):
            return TensorType(NO_TENSOR, element=element, steady=False)
        items = tuple(merged(a, b) for a, b in zip(one.items, other.items, strict=True))
        return TensorType(NO_TENSOR, items=items, element=element, steady=one.steady and other.steady)
    if one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return TensorType(one.dtype)
    dims = tuple(x if x == y else "" for x, y in zip(one.shape, other.shape, strict=True))
    return TensorType(one.dtype, dims)


def _place(node: Any, k: int, count: int, default: int, value: Value) -> int | None:
    """The place in a sequence of ``count`` tensors that input ``k`` says, ``default`` where it is left out; None
    where that is not known."""
    name = node.input[k] if len(node.input) > k else ""
    if not name:
        return default
    known = value(name)
    if known is None or known.size != 1:
        return None
    at = int(known.reshape(()))
    return at if at >= 0 else at + count


def _checked(at: int, many: int, count: int, where: str) -> int:
    if not 0 <= at < many:
        raise BadInput(f"place {at} of a sequence of {count} tensors", place=where)
    return at


# --- what each op makes ---


def _list(given: Given) -> TensorType:
    assert given[0] is not None
    return given[0]


def _tensor(given: Given, k: int) -> TensorType:
    found = given[k]
    assert found is not None
    return found


def _empty(node: Any, given: Given, value: Value, where: str) -> TensorType:
    dtype = next((int(a.i) for a in node.attribute if a.name == "dtype"), onnx.TensorProto.FLOAT)
    return sequence_of((), TensorType(dtype))


def _construct(node: Any, given: Given, value: Value, where: str) -> TensorType:
    return sequence_of(tuple(t for t in given if t is not None))


def _insert(node: Any, given: Given, value: Value, where: str) -> TensorType:
    seq, x = _list(given), _tensor(given, 1)
    if seq.items is None:
        element = merged(seq.element, x) if seq.element else x
        return TensorType(NO_TENSOR, element=element, steady=False)
    at = _place(node, 2, len(seq.items), len(seq.items), value)
    items, steady = list(seq.items), seq.steady and (at is not None or {*seq.items} <= {x})
    items.insert(len(items) if at is None else _checked(at, len(items) + 1, len(items), where), x)
    return sequence_of(tuple(items), steady=steady)


def _erase(node: Any, given: Given, value: Value, where: str) -> TensorType:
    seq = _list(given)
    if seq.items is None:
        return seq
    at = _place(node, 1, len(seq.items), len(seq.items) - 1, value)
    if at is None or not seq.steady:
        if len({*seq.items}) > 1:
            raise Unsupported(
                f"{where}: erasing one of {len(seq.items)} tensors of several sizes",
                "which one it is follows from data", "erase by a constant place",
            )  # fmt: skip
        at = 0
    _checked(at, len(seq.items), len(seq.items), where)
    return sequence_of(seq.items[:at] + seq.items[at + 1 :], seq.element, steady=seq.steady)


def _at(node: Any, given: Given, value: Value, where: str) -> TensorType:
    seq = _list(given)
    if seq.items is None:
        return seq.element or TensorType(0)
    at = _place(node, 1, len(seq.items), 0, value)
    if at is not None and seq.steady:
        return seq.items[_checked(at, len(seq.items), len(seq.items), where)]
    if not seq.items and seq.steady:
        raise BadInput("a tensor of an empty sequence", place=where)
    return seq.element or TensorType(0)


def _length(node: Any, given: Given, value: Value, where: str) -> TensorType:
    return TensorType(_INT64, ())


def _split(node: Any, given: Given, value: Value, where: str) -> TensorType:
    x, about = _tensor(given, 0), {a.name: int(a.i) for a in node.attribute}
    axis = about.get("axis", 0)
    if x.is_list or x.shape is None:
        return TensorType(NO_TENSOR, element=TensorType(x.dtype))
    if not -len(x.shape) <= axis < len(x.shape):
        raise BadInput(f"axis {axis} of a tensor of {len(x.shape)} dimensions", place=where)
    axis %= len(x.shape)
    whole, sizes = x.shape[axis], value(node.input[1]) if len(node.input) > 1 and node.input[1] else None
    squeezed = (len(node.input) < 2 or not node.input[1]) and not about.get("keepdims", 1)

    def part(size: Dim) -> TensorType:
        middle = () if squeezed else (size,)
        return TensorType(x.dtype, (*x.shape[:axis], *middle, *x.shape[axis + 1 :]))  # type: ignore[index]

    if len(node.input) > 1 and node.input[1]:
        rows = None if sizes is None else [int(n) for n in sizes.ravel()]
    else:
        rows = [1]
    if rows is None or not isinstance(whole, int):
        return TensorType(NO_TENSOR, element=part("" if rows is None or len({*rows}) > 1 else rows[0]))
    if any(n < 0 for n in rows) or ((sizes is None or not sizes.ndim) and rows[0] < 1):
        raise BadInput(f"parts of {min(rows)} elements", place=where)
    if sizes is None or not sizes.ndim:
        size = rows[0]
        if whole // size > MOST_TENSORS:
            return sequence_of((part(size),) * (MOST_TENSORS + 1))
        rows = [size] * (whole // size) + ([whole % size] if whole % size else [])
    if sum(rows) != whole:
        raise BadInput(f"parts of {sum(rows)} elements of {whole} along axis {axis}", place=where)
    return sequence_of(tuple(map(part, rows)), part(""))


def _concat(node: Any, given: Given, value: Value, where: str) -> TensorType:
    seq, about = _list(given), {a.name: int(a.i) for a in node.attribute}
    first = seq.element
    if seq.items:
        first = seq.items[0]
        for t in seq.items[1:]:
            first = merged(first, t)
    if first is None or first.shape is None or "axis" not in about:
        return TensorType(first.dtype if first else 0)
    new = bool(about.get("new_axis", 0))
    rank = len(first.shape) + new
    if not -rank <= about["axis"] < rank:
        raise BadInput(f"axis {about['axis']} of {rank} dimensions", place=where)
    axis = about["axis"] % rank
    count: Dim = ""
    if new:
        count = "" if seq.items is None else len(seq.items)
        return TensorType(first.dtype, (*first.shape[:axis], count, *first.shape[axis:]))
    along = [t.shape[axis] for t in seq.items or () if t.shape is not None]
    if seq.items is not None and all(isinstance(n, int) for n in along):
        count = sum(n for n in along if isinstance(n, int))
    return TensorType(first.dtype, (*first.shape[:axis], count, *first.shape[axis + 1 :]))


def _optional(node: Any, given: Given, value: Value, where: str) -> TensorType:
    if given and given[0] is not None:
        return given[0]
    about = next((a.tp for a in node.attribute if a.name == "type"), None)
    if about is None:
        raise BadInput("an Optional without an input and without a type", place=where)
    type_of(about, where)
    return TensorType(NO_TENSOR, items=())  # of nothing


def _element(node: Any, given: Given, value: Value, where: str) -> TensorType:
    found = _list(given)
    if found.absent:
        raise BadInput("the element of an optional that has none", place=where)
    return found


def _has(node: Any, given: Given, value: Value, where: str) -> TensorType:
    return TensorType(_BOOL, ())


def _maps(node: Any, given: Given, value: Value, where: str) -> TensorType:
    return sequence_of((), TensorType(0))


_OPS: Final[dict[tuple[str, str], tuple[int, Callable[[Any, Given, Value, str], TensorType]]]] = {
    ("", "SequenceEmpty"): (0, _empty),
    ("", "SequenceConstruct"): (1, _construct),
    ("", "SequenceInsert"): (2, _insert),
    ("", "SequenceErase"): (1, _erase),
    ("", "SequenceAt"): (2, _at),
    ("", "SequenceLength"): (1, _length),
    ("", "SplitToSequence"): (1, _split),
    ("", "ConcatFromSequence"): (1, _concat),
    ("", "Identity"): (1, lambda node, given, value, where: _list(given)),
    ("", "Optional"): (0, _optional),
    ("", "OptionalGetElement"): (1, _element),
    ("", "OptionalHasElement"): (0, _has),
    ("ai.onnx.ml", "ZipMap"): (1, _maps),
}
"""Inputs of an op, at least, and the type of what it makes."""
_OF_SEQUENCES: Final = frozenset(
    "SequenceInsert SequenceErase SequenceAt SequenceLength ConcatFromSequence".split()
)
