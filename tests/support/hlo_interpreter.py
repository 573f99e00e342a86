"""Runs small HLO modules over NumPy, as an oracle: what an instruction means, written down plainly and slowly.

Source of the semantics: https://openxla.org/xla/operation_semantics. Arrays of 32-bit floats stay 32-bit.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tightship.hlo.module import Computation, Instruction, Module
from tightship.hlo.shape import Shape

__all__ = ["arguments", "run"]

DTYPES = {
    "pred": np.bool_, "s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64, "u8": np.uint8,
    "u16": np.uint16, "u32": np.uint32, "u64": np.uint64, "f16": np.float16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum,
    "minimum": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "power": np.power,
    "divide": lambda a, b: np.divide(a, b) if a.dtype.kind == "f" else np.floor_divide(a, b),
    "shift-left": np.left_shift, "shift-right-logical": np.right_shift, "remainder": np.fmod,
}  # fmt: skip
UNARY: dict[str, Callable[..., Any]] = {
    "negate": np.negative, "abs": np.abs, "exponential": np.exp, "log": np.log, "tanh": np.tanh, "sqrt": np.sqrt,
    "rsqrt": lambda a: (1 / np.sqrt(a)).astype(a.dtype), "sign": np.sign, "floor": np.floor, "ceil": np.ceil,
    "not": lambda a: ~a, "is-finite": np.isfinite, "copy": np.copy, "cosine": np.cos, "sine": np.sin,
    "exponential-minus-one": np.expm1, "log-plus-one": np.log1p,
    "logistic": lambda a: (1 / (1 + np.exp(-a))).astype(a.dtype),
}  # fmt: skip
COMPARE = {"EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater}
COMPARE["GE"] = np.greater_equal


def arguments(module: Module, seed: int = 0) -> list[Any]:
    """Random arguments of a module's parameters."""
    random = np.random.default_rng(seed)
    return [_random(p.shape, random) for p in module.entry.parameters]


def _random(shape: Shape, random: np.random.Generator) -> Any:
    if shape.is_tuple:
        return tuple(_random(part, random) for part in shape.parts)
    kind = np.dtype(DTYPES[shape.dtype])
    if kind.kind in "iu":
        return random.integers(0, 3, shape.dims).astype(kind)
    if kind.kind == "b":
        return random.integers(0, 2, shape.dims).astype(kind)
    return random.uniform(0.1, 1.0, shape.dims).astype(kind)


def run(module: Module, given: Sequence[Any]) -> Any:
    """The result of the entry computation, tuples as tuples."""
    with np.errstate(all="ignore"):
        return _Machine(module).call(module.entry.name, list(given))


class _Machine:
    def __init__(self, module: Module) -> None:
        self.module = module

    def call(self, name: str, given: Sequence[Any]) -> Any:
        inside = self.module.by_name[name]
        values: dict[str, Any] = {}
        for i in inside.instructions:
            values[i.name] = self.one(inside, i, [values[o] for o in i.operands], given)
        return values[inside.root.name]

    def one(self, inside: Computation, i: Instruction, x: list[Any], given: Sequence[Any]) -> Any:
        if i.opcode == "parameter":
            return given[i.parameter_number]
        if i.opcode in ("fusion", "call"):
            return self.call(i.called[0], x)
        if i.opcode == "bitcast":
            memory = np.transpose(x[0], _order(inside.by_name[i.operands[0]].shape)).ravel()
            order = _order(i.shape)
            return memory.reshape([i.shape.dims[d] for d in order]).transpose(np.argsort(order))
        if i.opcode in BINARY:
            return BINARY[i.opcode](x[0], x[1]).astype(x[0].dtype)
        if i.opcode in UNARY:
            return UNARY[i.opcode](x[0])
        found = getattr(self, "_" + i.opcode.replace("-", "_"), None)
        if found is None:
            raise NotImplementedError(i.opcode)
        return found(i, *x)

    # -- structure -------------------------------------------------------------------------------------------

    def _tuple(self, i: Instruction, *x: Any) -> Any:
        return tuple(x)

    def _get_tuple_element(self, i: Instruction, x: Any) -> Any:
        return x[i.tuple_index]

    def _copy_start(self, i: Instruction, x: Any) -> Any:
        return np.copy(x), x, np.uint32(0)

    def _copy_done(self, i: Instruction, x: Any) -> Any:
        return x[0]

    def _opt_barrier(self, i: Instruction, x: Any) -> Any:
        return x

    def _while(self, i: Instruction, x: Any) -> Any:
        test, body = (i.attribute(k).lstrip("%") for k in ("condition", "body"))
        while bool(self.call(test, [x])):
            x = self.call(body, [x])
        return x

    def _conditional(self, i: Instruction, which: Any, *x: Any) -> Any:
        branches = re.findall(r"[\w.\-]+", i.attribute("branch_computations"))
        if not branches:
            branches = [i.attribute(f"{side}_computation").lstrip("%") for side in ("false", "true")]
            x = (x[1], x[0])
        k = int(which)
        k = k if 0 <= k < len(branches) else len(branches) - 1
        return self.call(branches[k], [x[k]])

    # -- making and moving -----------------------------------------------------------------------------------

    def _constant(self, i: Instruction) -> Any:
        text = i.payload.replace("{", " ").replace("}", " ").replace(",", " ")
        words = {"true": 1, "false": 0, "inf": np.inf, "-inf": -np.inf, "nan": np.nan}
        numbers = [words.get(t, t) for t in text.split()]
        kind = DTYPES[i.shape.dtype]
        return np.array([kind(n) for n in numbers], dtype=kind).reshape(i.shape.dims)

    def _iota(self, i: Instruction) -> Any:
        d = int(i.attribute("iota_dimension"))
        row = np.arange(i.shape.dims[d], dtype=DTYPES[i.shape.dtype])
        return np.broadcast_to(
            row.reshape([-1 if k == d else 1 for k in range(len(i.shape.dims))]), i.shape.dims
        )

    def _broadcast(self, i: Instruction, x: Any) -> Any:
        dims = _numbers(i.attribute("dimensions"))
        shape = [1] * len(i.shape.dims)
        for d, n in zip(dims, x.shape, strict=True):
            shape[d] = n
        return np.broadcast_to(x.reshape(shape), i.shape.dims)

    def _reshape(self, i: Instruction, x: Any) -> Any:
        return x.reshape(i.shape.dims)

    def _transpose(self, i: Instruction, x: Any) -> Any:
        return np.transpose(x, _numbers(i.attribute("dimensions")))

    def _reverse(self, i: Instruction, x: Any) -> Any:
        return np.flip(x, _numbers(i.attribute("dimensions")))

    def _convert(self, i: Instruction, x: Any) -> Any:
        return x.astype(DTYPES[i.shape.dtype])

    def _slice(self, i: Instruction, x: Any) -> Any:
        rows = re.findall(r"\[([\d:]+)\]", i.attribute("slice"))
        return x[tuple(slice(*map(int, row.split(":"))) for row in rows)]

    def _concatenate(self, i: Instruction, *x: Any) -> Any:
        return np.concatenate(x, axis=_numbers(i.attribute("dimensions"))[0])

    def _pad(self, i: Instruction, x: Any, value: Any) -> Any:
        out = np.full(i.shape.dims, value, dtype=x.dtype)
        where, part = [], []
        for row, n, m in zip(i.attribute("padding").split("x"), x.shape, i.shape.dims, strict=True):
            low, _, inner, *_ = [*map(int, row.split("_")), 0]
            at = low + (inner + 1) * np.arange(n)
            part.append((at >= 0) & (at < m))
            where.append(at[part[-1]])
        out[np.ix_(*where)] = x[np.ix_(*[np.flatnonzero(p) for p in part])]
        return out

    def _dynamic_slice(self, i: Instruction, x: Any, *at: Any) -> Any:
        sizes = _numbers(i.attribute("dynamic_slice_sizes"))
        start = [min(max(int(a), 0), n - m) for a, n, m in zip(at, x.shape, sizes, strict=True)]
        return x[tuple(slice(a, a + m) for a, m in zip(start, sizes, strict=True))].copy()

    def _dynamic_update_slice(self, i: Instruction, x: Any, new: Any, *at: Any) -> Any:
        start = [min(max(int(a), 0), n - m) for a, n, m in zip(at, x.shape, new.shape, strict=True)]
        out = x.copy()
        out[tuple(slice(a, a + m) for a, m in zip(start, new.shape, strict=True))] = new
        return out

    # -- arithmetic ------------------------------------------------------------------------------------------

    def _compare(self, i: Instruction, a: Any, b: Any) -> Any:
        return COMPARE[i.attribute("direction")](a, b)

    def _select(self, i: Instruction, which: Any, a: Any, b: Any) -> Any:
        return np.where(which, a, b)

    def _clamp(self, i: Instruction, low: Any, x: Any, high: Any) -> Any:
        return np.clip(x, low, high)

    def _dot(self, i: Instruction, a: Any, b: Any) -> Any:
        batch, batch_b = (_numbers(i.attribute(f"{side}_batch_dims")) for side in ("lhs", "rhs"))
        deep, deep_b = (_numbers(i.attribute(f"{side}_contracting_dims")) for side in ("lhs", "rhs"))
        letters = iter("abcdefghijklmnopqrstuvwxyz")
        left = [next(letters) for _ in a.shape]
        right = [next(letters) for _ in b.shape]
        for d, e in (*zip(batch, batch_b, strict=True), *zip(deep, deep_b, strict=True)):
            right[e] = left[d]
        free = [x for d, x in enumerate(left) if d not in (*batch, *deep)]
        free += [x for d, x in enumerate(right) if d not in (*batch_b, *deep_b)]
        out = "".join([*(left[d] for d in batch), *free])
        return np.einsum(f"{''.join(left)},{''.join(right)}->{out}", a, b, optimize=True).astype(a.dtype)

    def _reduce(self, i: Instruction, *x: Any) -> Any:
        dims = _numbers(i.attribute("dimensions"))
        n = len(x) // 2
        if n == 1 and (function := self._binary(i)) is not None:
            return function(function.reduce(x[0], axis=tuple(dims)), x[1]).astype(x[0].dtype)
        kept = [d for d in range(x[0].ndim) if d not in dims]
        out = [np.empty([x[0].shape[d] for d in kept], a.dtype) for a in x[:n]]
        for at in itertools.product(*(range(x[0].shape[d]) for d in kept)):
            state = list(x[n:])
            for inner in itertools.product(*(range(x[0].shape[d]) for d in dims)):
                place = dict(zip(kept, at, strict=True)) | dict(zip(dims, inner, strict=True))
                where = tuple(place[d] for d in range(x[0].ndim))
                made = self.call(i.called[0], [*state, *(a[where] for a in x[:n])])
                state = list(made) if isinstance(made, tuple) else [made]
            for o, s in zip(out, state, strict=True):
                o[at] = s
        return tuple(out) if i.shape.is_tuple else out[0]

    def _binary(self, i: Instruction) -> Any:
        """The function of two numbers a computation is, if it is one that NumPy can reduce by."""
        inside = self.module.by_name[i.called[0]]
        root = inside.root
        plain = all(inside.by_name[o].opcode == "parameter" for o in root.operands)
        named = {"add": np.add, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum}
        return named.get(root.opcode) if plain and len(inside.instructions) == 3 else None

    def _sort(self, i: Instruction, *x: Any) -> Any:
        d = _numbers(i.attribute("dimensions"))[0]
        order = np.argsort(x[0], axis=d, kind="stable")
        out = tuple(np.take_along_axis(a, order, axis=d) for a in x)
        return out if i.shape.is_tuple else out[0]

    # -- windows and indices ---------------------------------------------------------------------------------

    def _reduce_window(self, i: Instruction, x: Any, first: Any) -> Any:
        rows = dict(re.findall(r"(\w+)=([\dx_]+)", i.attribute("window")))
        size = _numbers(rows["size"])
        step = _numbers(rows["stride"]) if "stride" in rows else [1] * x.ndim
        pads = rows.get("pad", "x".join(["0_0"] * x.ndim)).split("x")
        x = np.pad(x, [tuple(map(int, row.split("_"))) for row in pads], constant_values=first)
        function = self._binary(i)
        out = np.empty(i.shape.dims, x.dtype)
        for at in np.ndindex(*i.shape.dims):
            part = x[tuple(slice(a * s, a * s + n) for a, s, n in zip(at, step, size, strict=True))]
            out[at] = function.reduce(part.ravel(), initial=first)
        return out

    def _gather(self, i: Instruction, x: Any, indices: Any) -> Any:
        offsets, collapsed = (_numbers(i.attribute(k)) for k in ("offset_dims", "collapsed_slice_dims"))
        mapped, sizes = _numbers(i.attribute("start_index_map")), _numbers(i.attribute("slice_sizes"))
        indices = _vectors(indices, int(i.attribute("index_vector_dim")))
        out = np.empty(i.shape.dims, x.dtype)
        batch = [d for d in range(out.ndim) if d not in offsets]
        for at in np.ndindex(*indices.shape[:-1]):
            start = [0] * x.ndim
            for d, v in zip(mapped, indices[at], strict=True):
                start[d] = min(max(int(v), 0), x.shape[d] - sizes[d])
            part = x[tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))]
            where: list[Any] = [slice(None)] * out.ndim
            for d, k in zip(batch, at, strict=True):
                where[d] = k
            out[tuple(where)] = part.reshape([n for d, n in enumerate(part.shape) if d not in collapsed])
        return out

    def _scatter(self, i: Instruction, x: Any, indices: Any, updates: Any) -> Any:
        windows, inserted = (_numbers(i.attribute(k)) for k in ("update_window_dims", "inserted_window_dims"))
        mapped = _numbers(i.attribute("scatter_dims_to_operand_dims"))
        indices = _vectors(indices, int(i.attribute("index_vector_dim")))
        out = x.copy()
        batch = [d for d in range(updates.ndim) if d not in windows]
        inside = [d for d in range(x.ndim) if d not in inserted]
        for at in np.ndindex(*updates.shape):
            start = [0] * x.ndim
            for d, v in zip(mapped, indices[tuple(at[d] for d in batch)], strict=True):
                start[d] = int(v)
            for d, w in zip(inside, windows, strict=True):
                start[d] += at[w]
            where = tuple(start)
            if all(0 <= a < n for a, n in zip(where, x.shape, strict=True)):
                out[where] = self.call(i.called[0], [out[where], updates[at]])
        return out


def _vectors(indices: Any, d: int) -> Any:
    """The vectors of indices along the last dimension."""
    return indices[..., None] if d == indices.ndim else np.moveaxis(indices, d, -1)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _order(shape: Shape) -> list[int]:
    """Dimensions from major to minor."""
    minor = _numbers((shape.layout or "").partition(":")[0])
    return minor[::-1] if minor else list(range(len(shape.dims)))
