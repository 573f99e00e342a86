"""Types of ONNX values as far as they are known, and the sizes users give to dimensions.

And what onnx leaves to the runtime: which results share bytes with an input, what draws random numbers, what ops
cost.

The tables of views and of results written over an input are those of onnxruntime's CPU kernels (1.31, its own ops:
1.32), found by asking them: a node of each op was run alone, and did or did not request memory.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import onnx

from tightship.errors import BadInput, UnknownSize, Unsupported
from tightship.frontends.builder import bounded
from tightship.units import MAX_BYTES

__all__ = [
    "IN_PLACE",
    "MOST_TENSORS",
    "NO_TENSOR",
    "STRING",
    "Dim",
    "Shapes",
    "TensorType",
    "bits_of",
    "element_type",
    "flops_of",
    "is_random",
    "may_overwrite",
    "nbytes_of",
    "not_a_tensor",
    "parts_of",
    "sequence_of",
    "type_of",
    "viewed",
]


Dim = int | str
"""A size, or the name under which the user can give it."""

STRING: Final = 32
"""Bytes of an element of type string in onnxruntime's arena. Characters beyond the 15 that fit in are elsewhere."""
NO_TENSOR: Final = -1
"""Stands for the element type of what is no tensor: a sequence, an optional that is empty, maps."""

MOST_TENSORS: Final = 1 << 16
"""Tensors of a sequence, at most."""

_NAMES: Final = {number: name for name, number in onnx.TensorProto.DataType.items()}
_BITS: Final = {"FLOAT4E2M1": 4, "INT4": 4, "UINT4": 4, "INT2": 2, "UINT2": 2, "STRING": 8 * STRING}
_TORCH: Final = {"FLOAT": "float32", "DOUBLE": "float64"}
_NAMELESS: Final = ("?", "-1", "None")
"""Names that exporters give to any unknown dimension, whichever."""
_ENTRY: Final = re.compile(r"(.+?)=(\d+(?:x\d+)*|scalar)")


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type (a number of ``TensorProto.DataType``) and shape; without a shape not even the rank is known.

    Of a sequence the types of the tensors in it: ``items``, None while it is not known how many there are, and what
    they have in common, ``element``; ``steady``: the same ones in every turn of a loop. An optional has the type of
    what is in it; one of nothing is a sequence of nothing without an ``element``.
    """

    dtype: int
    shape: tuple[Dim, ...] | None = None
    items: tuple[TensorType, ...] | None = None
    element: TensorType | None = None
    steady: bool = True

    @property
    def is_list(self) -> bool:
        return self.dtype == NO_TENSOR

    @property
    def absent(self) -> bool:
        return self.is_list and self.element is None and self.items == ()

    @property
    def known(self) -> bool:
        if self.is_list:
            return self.items is not None and all(t.known for t in self.items)
        return self.shape is not None and all(isinstance(d, int) for d in self.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape, of a type that is known; of a sequence how many tensors there are."""
        if self.items is not None:
            return (len(self.items),)
        assert self.shape is not None
        return tuple(d for d in self.shape if isinstance(d, int))

    @property
    def count(self) -> int:
        """Elements, of a type that is known."""
        if self.items is not None:
            return sum(t.count for t in self.items)
        return math.prod(self.sizes)

    @property
    def name(self) -> str:
        """The element type as people know it: ``float32``, ``int64``."""
        text = "no tensor" if self.dtype == NO_TENSOR else _NAMES.get(self.dtype, "unknown")
        return _TORCH.get(text, text.lower())


def element_type(name: str) -> int:
    """The number of an element type that `TensorType.name` names."""
    return next(number for number, text in _NAMES.items() if _TORCH.get(text, text.lower()) == name)


def bits_of(dtype: int, place: str) -> int:
    """Bits of one element. Raises ``UnknownSize`` for types that do not exist."""
    name = _NAMES.get(dtype, "")
    if name in _BITS:
        return _BITS[name]
    if name in ("", "UNDEFINED"):
        raise UnknownSize(
            f"elements of type {name.lower() or dtype} have no fixed size in bytes", place=place
        )
    return int(onnx.helper.tensor_dtype_to_np_dtype(dtype).itemsize) * 8


def nbytes_of(known: TensorType, place: str) -> int:
    """Bytes of a tensor whose shape is known (elements below a byte are packed), or of all those in a sequence."""
    if known.items is not None:
        return bounded(sum(nbytes_of(t, place) for t in known.items), place)
    return bounded(-(-known.count * bits_of(known.dtype, place) // 8), place)


def _open_vector(shape: tuple[Dim, ...]) -> bool:
    return len(shape) == 1 and isinstance(shape[0], str)


def sequence_of(
    items: tuple[TensorType, ...], element: TensorType | None = None, *, steady: bool = True
) -> TensorType:
    """The type of a sequence of tensors; ``element``: what they have in common, where there may be none."""
    if items and (element is None or len({*items}) == 1):
        shapes = {t.shape for t in items}
        element = items[0] if len({*items}) == 1 else TensorType(items[0].dtype, _common(shapes))
    return TensorType(NO_TENSOR, items=items, element=element, steady=steady)


def _common(shapes: set[tuple[Dim, ...] | None]) -> tuple[Dim, ...] | None:
    """What shapes have in common, ``""`` for sizes that differ."""
    rows = [s for s in shapes if s is not None]
    if len(rows) < len(shapes) or len({len(s) for s in rows}) > 1:
        return None
    return tuple(sizes[0] if len({*sizes}) == 1 else "" for sizes in zip(*rows, strict=True))


_KINDS = {"map_type": "a map", "sparse_tensor_type": "a sparse tensor"}


def type_of(proto: Any, place: str) -> TensorType:
    """The type a ``TypeProto`` declares; names of dimensions stay names, nameless ones become ``""``."""
    kind = proto.WhichOneof("value")
    if kind is None:
        return TensorType(0)
    if kind == "optional_type":
        return type_of(proto.optional_type.elem_type, place)
    if kind == "sequence_type":
        element = type_of(proto.sequence_type.elem_type, place)
        if element.is_list:
            raise not_a_tensor(f"{place}, a sequence of sequences")
        return TensorType(NO_TENSOR, element=element)
    if kind != "tensor_type":
        raise not_a_tensor(f"{place}, {_KINDS.get(kind, 'a ' + kind.removesuffix('_type'))}")
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return TensorType(tensor.elem_type)
    dims: list[Dim] = []
    for d in tensor.shape.dim:
        if not d.HasField("dim_value"):
            dims.append("" if d.dim_param in _NAMELESS else d.dim_param)
            continue
        if d.dim_value == -1:  # Paddle's way to say that it is not known
            dims.append("")
            continue
        if not 0 <= d.dim_value <= MAX_BYTES:
            raise BadInput(f"dimension {d.dim_value} is not from 0 to 2^63-1", place=place)
        dims.append(int(d.dim_value))
    return TensorType(tensor.elem_type, tuple(dims))


def not_a_tensor(what: str) -> Unsupported:
    """The error for a value that is neither a tensor nor a sequence of tensors, where it is given or read."""
    return Unsupported(
        f"{what},",
        "only tensors, and sequences of them, have bytes that can be planned",
        "export the model without it (of scikit-learn: zipmap=False), or cut off the nodes around it "
        "(onnx.utils.extract_model)",
    )


@dataclass
class Shapes:
    """Sizes that the user gives: ``dims`` by the dimension's name (``batch``, or ``value[axis]``), ``whole`` shapes
    by the value's name. Remembers which of them were of use."""

    dims: dict[str, int] = field(default_factory=dict)
    whole: dict[str, tuple[int, ...]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    @staticmethod
    def of(given: str | Iterable[str] | Mapping[str, Any] | None, place: str = "--shape") -> Shapes:
        """Read ``batch=4,seq=128`` or ``x=1x3x224x224`` (``scalar`` for no dimensions), or a mapping of names to
        numbers or shapes. Raises ``BadInput``."""
        found = Shapes()
        if given is None:
            return found
        if isinstance(given, Mapping):
            for name, value in given.items():
                found._add(str(name), (value,) if isinstance(value, int) else tuple(value), value, place)
            return found
        for text in [given] if isinstance(given, str) else given:
            for entry in re.split(r",(?=[^,]*=)", text):
                match = _ENTRY.fullmatch(entry.strip())
                if match is None:
                    raise BadInput(f"invalid shape {entry!r}; write name=N or name=NxMxK", place=place)
                sizes = [] if match[2] == "scalar" else match[2].split("x")
                if any(len(n) > 19 for n in sizes):
                    raise BadInput(f"dimension too large in {match[2]}; the largest is 2^63-1", place=place)
                found._add(match[1].strip(), tuple(int(n) for n in sizes), match[2], place)
        return found

    def _add(self, name: str, sizes: tuple[Any, ...], given: Any, place: str) -> None:
        for n in sizes:
            if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= MAX_BYTES:
                raise BadInput(
                    f"invalid dimension {n!r}; give a number from 0 to 2^63-1", place=f"{place} {name}"
                )
        if name in self.dims or name in self.whole:
            raise BadInput(f"duplicate dimension {name!r}", place=place)
        single = len(sizes) == 1 and (isinstance(given, int) or "x" not in str(given))
        if single:
            self.dims[name] = sizes[0]
        else:
            self.whole[name] = sizes

    def size(self, name: str) -> int | None:
        """The size of a dimension, also of one that is named by how it follows from others: ``past + seq``. Raises
        ``BadInput`` for one below 0."""
        found = self.dims.get(name)
        if found is not None:
            self.used.add(name)
            return found
        parts = parts_of(name)
        if not parts or not parts <= self.dims.keys():
            return None
        found = _computed(ast.parse(name, mode="eval").body, self.dims)
        if found is not None:
            self.used |= parts
            if not 0 <= found <= MAX_BYTES:
                raise BadInput(f"dimension {name!r} is {found}, not from 0 to 2^63-1", place="--shape")
        return found

    def says(self, name: str) -> bool:
        """Whether the user gives sizes under a name."""
        return name in self.whole or name in self.dims

    def counted(self, value: str, t: TensorType) -> TensorType:
        """A sequence with as many tensors as the user says (``q=3``), or gives shapes for (``q[0]=2x3,q[1]=4x3``).
        Raises ``BadInput`` where the model has another number of them."""
        given = self.dims.get(value)
        if given is not None:
            self.used.add(value)
        if t.items is not None:
            if given is not None and given != len(t.items):
                raise BadInput(
                    f"{value} has {len(t.items)} tensors in the model, not {given}", place="--shape"
                )
            return t
        if given is None:
            places = re.compile(re.escape(value) + r"\[(\d{1,9})\]")
            found = [m for name in (*self.dims, *self.whole) if (m := places.match(name))]
            if not found or t.element is None:
                return t
            given = 1 + max(int(m[1]) for m in found)
        dims = None if t.element is None else t.element.shape
        if dims is not None:  # a name is of any of them, which may differ
            known = (self.size(d) if isinstance(d, str) and d else None for d in dims)
            dims = tuple(
                d if isinstance(d, int) else "" if n is None else n for d, n in zip(dims, known, strict=True)
            )
        kind = t.element.dtype if t.element else 0
        return replace(t, items=(TensorType(kind, dims),) * min(given, MOST_TENSORS + 1))

    def applied(self, value: str, t: TensorType) -> TensorType:
        """The type of ``value`` with what the user gave filled in. Raises ``BadInput`` where both disagree."""
        whole = self.whole.get(value)
        if whole is None and value in self.dims and (t.shape is None or _open_vector(t.shape)):
            whole = (self.dims[value],)
        if whole is not None:
            self.used.add(value)
            return TensorType(t.dtype, self._fitted(value, t, whole))
        if t.shape is None:
            return t
        dims: list[Dim] = []
        for axis, d in enumerate(t.shape):
            place = f"{value}[{axis}]"
            given = self.size(place)
            if given is not None and isinstance(d, int) and d != given:
                raise BadInput(f"{place} is {d} in the model, not {given}", place="--shape")
            if given is None and isinstance(d, str) and d:
                given = self.size(d)
            dims.append(d if given is None else given)
        return TensorType(t.dtype, tuple(dims))

    def _fitted(self, value: str, t: TensorType, whole: tuple[int, ...]) -> tuple[int, ...]:
        if t.shape is None:
            return whole
        if len(t.shape) != len(whole):
            raise BadInput(
                f"{len(whole)} dimensions for {value!r}, which has {len(t.shape)}", place="--shape"
            )
        for axis, (d, n) in enumerate(zip(t.shape, whole, strict=True)):
            known = self.dims.get(d) if isinstance(d, str) else d
            if known is not None and known != n:
                raise BadInput(f"{value}[{axis}] is {known}, not {n}", place="--shape")
            if isinstance(d, str) and d:
                self.dims[d] = n
                self.used.add(d)
        return whole

    def check_used(self, known: Iterable[str], place: str) -> None:
        """Raise ``BadInput`` for a name that nothing in the model has."""
        for name in (*self.dims, *self.whole):
            if name not in self.used:
                names = ", ".join(dict.fromkeys(known)) or "none"
                raise BadInput(f"unknown dimension {name!r}; the model has {names}", place=place)


# --- dimensions that follow from others ---

_OPERATORS: Final[dict[type, Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: Final = {"max": max, "min": min}
_LONGEST: Final = 300
"""Characters of a dimension's name that is read as an expression."""


def parts_of(name: str) -> frozenset[str]:
    """The dimensions that one follows from, by a name that is an expression, as exporters write it (``past + seq``,
    ``2*batch``, ``Max(1, s0)``); none for a plain name."""
    if len(name) > _LONGEST or name.isidentifier():
        return frozenset()
    try:
        tree = ast.parse(name, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    every = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name)}
    calls = {x.func.id for x in ast.walk(tree) if isinstance(x, ast.Call) and isinstance(x.func, ast.Name)}
    names = frozenset(every - calls)
    return names if _computed(tree, dict.fromkeys(names, 1 << 20)) is not None else frozenset()


def _computed(x: ast.expr, sizes: Mapping[str, int]) -> int | None:
    """An expression of sizes; None where it is none."""
    if isinstance(x, ast.Name):
        return sizes.get(x.id)
    if isinstance(x, ast.Constant):
        return x.value if type(x.value) is int else None
    if isinstance(x, ast.BinOp):
        a, b = _computed(x.left, sizes), _computed(x.right, sizes)
        if a is None or b is None:
            return None
        if isinstance(x.op, ast.Div):  # of symbols, where it is known to leave nothing
            return a // b if b and a % b == 0 else None
        if type(x.op) not in _OPERATORS or (isinstance(x.op, (ast.FloorDiv, ast.Mod)) and not b):
            return None
        return int(_OPERATORS[type(x.op)](a, b))
    if isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and x.args and not x.keywords:
        values = [_computed(y, sizes) for y in x.args]
        function, known = _FUNCTIONS.get(x.func.id.lower()), [v for v in values if v is not None]
        return int(function(known)) if function is not None and len(known) == len(values) else None
    return None


_VIEWS: Final = frozenset("Identity Reshape Squeeze Unsqueeze Flatten Optional OptionalGetElement".split())

_OVERWRITES: Final = frozenset(
    "Tanh Sigmoid Relu LeakyRelu Elu Selu Celu HardSigmoid Softplus Softsign ThresholdedRelu Softmax LogSoftmax Clip "
    "Shrink Trilu Cast ScatterElements".split()
)
"""Ops that write over their first input."""

_ELEMENTWISE: Final = frozenset(
    "Abs Neg Floor Ceil Round Reciprocal Sqrt Exp Log Erf Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh "
    "Gelu Sign HardSwish Mish Not BitwiseNot Add Sub Mul Div Pow Min Max Sum Mean PRelu Mod And Or Xor Where "
    "BatchNormalization".split()
)
"""Ops that could as well: each element of the result needs the same element of an input, and no other of it."""

_SUMS: Final = frozenset({("com.microsoft", "FusedConv"), ("com.microsoft.nchwc", "Conv")})
_SUMMAND: Final = 3
"""The runtime's convolutions add this input to the result, and write over it."""

IN_PLACE: Final = ("onnxruntime", "elementwise", "none")

_RANDOM: Final = frozenset(
    "RandomNormal RandomNormalLike RandomUniform RandomUniformLike Multinomial Bernoulli".split()
)


def _standard(node: Any) -> bool:
    return node.domain in ("", "ai.onnx")


def viewed(node: Any) -> int | None:
    """The input whose bytes the first result is a view of; None for none."""
    return 0 if _standard(node) and node.op_type in _VIEWS and node.input else None


def may_overwrite(node: Any, policy: str) -> tuple[int, ...]:
    """Inputs that the first result may be written over, when nobody else needs them and the bytes are as many.

    ``policy``: what onnxruntime does, what an element-wise op allows, or none.
    """
    if policy == "none":
        return ()
    if (node.domain, node.op_type) in _SUMS and len(node.input) > _SUMMAND:
        return (_SUMMAND,)
    if not _standard(node):
        return ()
    if node.op_type in _OVERWRITES:
        return (0,)
    if policy == "elementwise" and node.op_type in _ELEMENTWISE:
        return (0,) if node.op_type == "BatchNormalization" else tuple(range(len(node.input)))
    return ()


def is_random(node: Any, inputs: Sequence[Any]) -> bool:
    """Whether a node draws random numbers; ``inputs``: known contents of its inputs, or None."""
    if not _standard(node):
        return False
    if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
        training = inputs[2]
        return training is None or bool(training.any())
    return node.op_type in _RANDOM


def flops_of(node: Any, inputs: Sequence[TensorType | None], outputs: Sequence[TensorType | None]) -> int:
    """Floating-point operations, a multiplication and an addition counted as two."""
    made = sum(t.count for t in outputs if t is not None and t.known)
    shapes = [t.sizes if t is not None and t.known else () for t in inputs]
    number = {a.name: a for a in node.attribute}
    op = node.op_type
    if op in ("Conv", "ConvInteger", "QLinearConv", "FusedConv"):
        kernel = shapes[3 if op == "QLinearConv" and len(shapes) > 3 else 1] if len(shapes) > 1 else ()
        return 2 * made * math.prod(kernel[1:])
    if op == "ConvTranspose" and len(shapes) > 1:
        return 2 * math.prod(shapes[0]) * math.prod(shapes[1][1:])
    if op in ("MatMul", "MatMulInteger", "QLinearMatMul", "FusedMatMul"):
        return 2 * made * (shapes[0][-1] if shapes and shapes[0] else 1)
    if op in ("Gemm", "FusedGemm") and shapes and len(shapes[0]) == 2:
        return 2 * made * shapes[0][0 if "transA" in number and number["transA"].i else 1]
    if op == "Einsum":
        return 2 * _einsum(number["equation"].s.decode() if "equation" in number else "", shapes) or made
    if op in ("LSTM", "GRU", "RNN") and len(shapes) > 2 and len(shapes[0]) == 3:
        return 2 * math.prod(shapes[0][:2]) * (math.prod(shapes[1]) + math.prod(shapes[2]))
    if op == "Attention" and len(shapes) > 1 and shapes[0] and shapes[1]:
        keys = shapes[1][-2]
        return 4 * math.prod(shapes[0]) * keys
    if op in ("MaxPool", "AveragePool", "LpPool"):
        return made * math.prod(number["kernel_shape"].ints if "kernel_shape" in number else ())
    return max(made, math.prod(shapes[0]) if shapes else 0)


def _einsum(equation: str, shapes: Sequence[tuple[int, ...]]) -> int:
    sizes: dict[str, int] = {}
    for term, shape in zip(equation.replace(" ", "").split("->")[0].split(","), shapes, strict=False):
        letters = list(term) if "..." not in term else []
        if len(letters) != len(shape):
            return 0
        sizes.update(zip(letters, shape, strict=True))
    return math.prod(sizes.values())
