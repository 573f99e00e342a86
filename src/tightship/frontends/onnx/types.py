"""Types of ONNX values as far as they are known, and the sizes users give to dimensions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import onnx

from tightship.errors import BadInput, UnknownSize, Unsupported
from tightship.frontends.builder import bounded
from tightship.units import MAX_BYTES

__all__ = ["Dim", "Shapes", "TensorType", "bits_of", "nbytes_of", "type_of"]

Dim = int | str
"""A size, or the name under which the user can give it."""

_NAMES: Final = {number: name for name, number in onnx.TensorProto.DataType.items()}
_BITS: Final = {"FLOAT4E2M1": 4, "INT4": 4, "UINT4": 4, "INT2": 2, "UINT2": 2}
_TORCH: Final = {"FLOAT": "float32", "DOUBLE": "float64"}
_ENTRY: Final = re.compile(r"(.+?)=(\d+(?:x\d+)*|scalar)")


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type (a number of ``TensorProto.DataType``) and shape; without a shape not even the rank is known."""

    dtype: int
    shape: tuple[Dim, ...] | None = None

    @property
    def known(self) -> bool:
        return self.shape is not None and all(isinstance(d, int) for d in self.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape, of a type that is known."""
        assert self.shape is not None
        return tuple(d for d in self.shape if isinstance(d, int))

    @property
    def count(self) -> int:
        """Elements, of a type that is known."""
        return math.prod(self.sizes)

    @property
    def name(self) -> str:
        """The element type as people know it: ``float32``, ``int64``."""
        text = _NAMES.get(self.dtype, "unknown")
        return _TORCH.get(text, text.lower())


def bits_of(dtype: int, place: str) -> int:
    """Bits of one element. Raises ``UnknownSize`` for strings and types that do not exist."""
    name = _NAMES.get(dtype, "")
    if name in _BITS:
        return _BITS[name]
    if name in ("", "UNDEFINED", "STRING"):
        raise UnknownSize(
            f"elements of type {name.lower() or dtype} have no fixed size in bytes", place=place
        )
    return int(onnx.helper.tensor_dtype_to_np_dtype(dtype).itemsize) * 8


def nbytes_of(known: TensorType, place: str) -> int:
    """Bytes of a tensor whose shape is known (elements below a byte are packed)."""
    return bounded(-(-known.count * bits_of(known.dtype, place) // 8), place)


def _open_vector(shape: tuple[Dim, ...]) -> bool:
    return len(shape) == 1 and isinstance(shape[0], str)


def type_of(proto: Any, place: str) -> TensorType:
    """The type a ``TypeProto`` declares; names of dimensions stay names, nameless ones become ``""``."""
    kind = proto.WhichOneof("value")
    if kind is None:
        return TensorType(0)
    if kind != "tensor_type":
        raise Unsupported(
            f"{place}, a {kind.removesuffix('_type')},", "only tensors have bytes that can be planned",
            "export the model without it",
        )  # fmt: skip
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return TensorType(tensor.elem_type)
    dims: list[Dim] = []
    for d in tensor.shape.dim:
        if not d.HasField("dim_value"):
            dims.append(d.dim_param)
            continue
        if not 0 <= d.dim_value <= MAX_BYTES:
            raise BadInput(f"dimension {d.dim_value} is not from 0 to 2^63-1", place=place)
        dims.append(int(d.dim_value))
    return TensorType(tensor.elem_type, tuple(dims))


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
        found = self.dims.get(name)
        if found is not None:
            self.used.add(name)
        return found

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
