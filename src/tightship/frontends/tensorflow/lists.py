"""Lists and arrays of tensors in a GraphDef: how many tensors they hold, and of which shape.

A list (``TensorList…``, an optional) is a value that says what it holds; an array of v1 (``TensorArrayV3``) is a
resource, whose elements are what is written into it anywhere, if it does not say itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import tensorflow as tf

from tightship.errors import BadInput
from tightship.frontends.builder import bounded
from tightship.frontends.tensorflow.functions import BRANCHES, LOOPS
from tightship.frontends.tensorflow.nodes import name_of
from tightship.frontends.tensorflow.shapes import static_value

__all__ = [
    "FORWARDS_LISTS",
    "GROWS",
    "READS_ARRAY",
    "STRING",
    "WRITES_ARRAY",
    "Items",
    "Lists",
    "Made",
    "first_name",
]

STRING = 24  # bytes of an element of a string tensor, whose text lies elsewhere


@dataclass(frozen=True, slots=True)
class Items:
    """A list of tensors: how many, and the bytes and the shape of each; none where it is not known yet."""

    count: int | None = None
    nbytes: int | None = None
    shape: tuple[int, ...] | None = None

    def total(self) -> int | None:
        return None if self.count is None or self.nbytes is None else self.count * self.nbytes

    def or_else(self, other: Items | None) -> Items:
        """What is known of either."""
        if other is None:
            return self
        return Items(
            other.count if self.count is None else self.count,
            other.nbytes if self.nbytes is None else self.nbytes,
            other.shape if self.shape is None else self.shape,
        )


@dataclass(frozen=True, slots=True)
class Made:
    """One result of a node: element type, shape, bytes. ``handle``: it is a variable's handle, ``variable`` its
    shape, where that is known; ``ref``: a variable's own bytes; ``items``: of a list of tensors."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    handle: bool = False
    ref: bool = False
    items: Items | None = None
    variable: tuple[int, ...] | None = None


class Lists:
    """What a graph's lists hold, as far as the results of nodes before are known: the part of inference that is about
    them. ``said``: shapes of results that users say, ``open`` results without a shape, ``back`` by Merge what the
    next turn gives, ``around`` what names of the graph's nodes begin with for users."""

    def __init__(self, place: str, around: str, said: Mapping[str, tuple[int, ...]]) -> None:
        self.place, self.around, self.said = place, around, said
        self.nodes: dict[str, Any] = {}
        self.ops: dict[str, Any] = {}
        self.back: dict[str, str] = {}
        self.results: dict[str, tuple[Made, ...]] = {}
        self.arrays: dict[str, tuple[int, ...]] = {}  # by array of v1, the shape of what is written into it
        self.vague: dict[str, str] = {}  # arrays of unknown size, and what to do
        self.open: set[str] = set()  # results that have no shape, or have just been given one
        self.counted: set[str] = set()  # lists whose length was said

    def _input(self, text: str) -> Made:
        name, _, port = text.partition(":")
        row = self.results.get(name, ())
        if int(port or 0) >= len(row):
            raise BadInput(f"unknown result {text}", place=self.place)
        return row[int(port or 0)]

    def _held(self, node: Any, where: str) -> int:
        """Bytes of the tensors that a resource holds for the graph's own use (``TensorArray`` of v1, ``Stack``)."""
        self.vague.pop(node.name, None)
        if node.op not in ("TensorArrayV3", "StackV2"):
            return 0
        count, shape = self._array(node)
        if count is None or shape is None:
            fault = f"unknown size of what {node.op} holds; use control flow of v2"
            if node.op == "TensorArrayV3":
                fault = f"unknown length of an array; give --shape {self.around}{node.name}:0=N, or its size"
            if node.op == "TensorArrayV3" and shape is None:
                fault = "unknown size of an array's elements; give them a shape (element_shape=)"
            self.vague[node.name] = fault
            return 0
        size = int(tf.dtypes.as_dtype(node.attr["dtype"].type).size)
        return bounded(count * math.prod(shape) * size, where)

    def _array(self, node: Any) -> tuple[int | None, tuple[int, ...] | None]:
        """How many tensors an array of v1 holds, and of which shape: what it was made with, or what is written."""
        said = self.said.get(f"{node.name}:0", ())
        if len(said) == 1:
            self.counted.add(f"{node.name}:0")
        noted = tf.TensorShape(node.attr["element_shape"].shape)
        shape = tuple(noted.as_list()) if noted.is_fully_defined() else self.arrays.get(node.name)
        count = self._number(node.input[0]) if node.op == "TensorArrayV3" else None
        return (said[0] if len(said) == 1 else count or None), shape

    def _array_of(self, text: str) -> Any:
        """The node that made the array of v1 of a handle."""
        node = self.nodes[name_of(text)]
        while node.op in FORWARDS_LISTS and node.input:
            node = self.nodes[name_of(node.input[0])]
        return node

    def _array_learns(self, node: Any) -> bool:
        """Whether the elements of an array of v1 have a shape by what is written into it, which was not known."""
        data = [i for i in node.input if not i.startswith("^")]
        name, value = self._array_of(data[0]).name, self._input(data[2])
        if name in self.arrays or first_name(data[2]) in self.open:
            return False
        self.arrays[name] = value.shape if node.op == "TensorArrayWriteV3" else value.shape[1:]
        return True

    def _array_shape(self, node: Any, data: list[str]) -> tuple[int, ...] | None:
        """What is taken out of an array of v1."""
        made = self._array_of(data[0])
        count, shape = self._array(made) if made.op == "TensorArrayV3" else (None, None)
        if node.op == "TensorArrayGatherV3" and first_name(data[1]) not in self.open:
            count = math.prod(self._input(data[1]).shape)
        if shape is None or node.op == "TensorArrayReadV3":
            return shape
        if count is None or (node.op == "TensorArrayConcatV3" and not shape):
            return None
        return (count * shape[0], *shape[1:]) if node.op == "TensorArrayConcatV3" else (count, *shape)

    def _list(self, node: Any, k: int, bodies: list[Any]) -> Items | None:
        """What is known of the list that a node hands on or makes."""
        data = [i for i in node.input if not i.startswith("^")]
        if node.op == "TensorListReserve":
            count = self._number(data[1]) or None  # of none: how many there will be is not known yet
            return Items(count, self._element(data[0], node.attr["element_dtype"].type))
        if node.op == "EmptyTensorList":
            most = self._number(data[1])
            return Items(
                None if most is None or most < 0 else most,
                self._element(data[0], node.attr["element_dtype"].type),
            )
        if node.op == "TensorListFromTensor":
            made = self._input(data[0])
            return (
                Items(made.shape[0], made.nbytes // made.shape[0], made.shape[1:])
                if made.shape and made.shape[0]
                else Items(0, 0)
            )
        if node.op == "TensorListSplit":  # into rows of several lengths
            count = math.prod(self._input(data[2]).shape)
            return Items(count, -(-self._input(data[0]).nbytes // max(1, count)))
        if node.op in ("OptionalFromValue", "OptionalNone"):
            held = [self._input(i) for i in data]
            shape = held[0].shape if len(held) == 1 else None
            return Items(1, sum(m.nbytes for m in held), shape) if held else Items()
        given = [m.items for m in map(self._input, data) if m.items is not None]
        if node.op in ("TensorListSetItem", "TensorListPushBack"):
            item, count = self._input(data[-1]), given[0].count if given else None
            known = first_name(data[-1]) not in self.open
            return Items(count, item.nbytes, item.shape) if known else Items(count)
        if node.op in LOOPS and k < len(data):
            before = self._input(data[k]).items or Items()
            later = bodies[0][k] if bodies and k < len(bodies[0]) else None
            return (later.items or Items()).or_else(before) if later is not None else before
        if node.op in BRANCHES:
            found = [row[k].items for row in bodies if k < len(row) and row[k] is not None and row[k].items]
            return reduce(Items.or_else, found) if found else None
        if node.op in FORWARDS_LISTS | {"AddN", "IdentityN", "TensorListPopBack", "ZerosLike"}:
            first = self._input(data[k]).items if node.op == "IdentityN" else given[0] if given else None
            back = self._items_of(self.back[node.name]) if node.name in self.back else None
            return (first or Items()).or_else(back)
        return None

    def _items_of(self, name: str) -> Items | None:
        row = self.results.get(name, ())
        return row[0].items if row else None

    def _number(self, text: str) -> int | None:
        node = self.nodes[name_of(text)]
        while node.op == "Identity":
            node = self.nodes[name_of(node.input[0])]
        if node.op == "TensorListLength":
            items = self._input(node.input[0]).items
            return None if items is None else items.count
        value = self._constant(text)
        return int(value.reshape(())) if value is not None and value.size == 1 else None

    def _element(self, text: str, dtype: int) -> int | None:
        """Bytes of an element of this shape, if all of it is known."""
        shape = self._constant(text)
        if shape is None or shape.ndim != 1 or (shape < 0).any():
            return None
        base = tf.dtypes.as_dtype(dtype)
        return math.prod(map(int, shape)) * (STRING if base == tf.string else int(base.size))

    def _constant(self, text: str) -> Any:
        """What a small tensor holds, where it is known before anything runs."""
        name, _, port = text.partition(":")
        outputs = self.ops[name].outputs
        return static_value(outputs[int(port or 0)]) if int(port or 0) < len(outputs) else None


FORWARDS_LISTS: Final = frozenset(
    "Identity Enter RefEnter Exit RefExit Merge RefMerge Switch RefSwitch NextIteration RefNextIteration "
    "StopGradient Placeholder".split()
)
READS_ARRAY: Final = frozenset("TensorArrayReadV3 TensorArrayGatherV3 TensorArrayConcatV3".split())
WRITES_ARRAY: Final = frozenset(("TensorArrayWriteV3", "TensorArrayScatterV3"))
GROWS: Final = frozenset(("TensorListReserve", "EmptyTensorList"))
"""Lists that hold nothing when they are made."""


def first_name(text: str) -> str:
    """One name for a result: the first one has no number."""
    return text.removesuffix(":0")
