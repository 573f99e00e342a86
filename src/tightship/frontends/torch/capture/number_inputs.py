"""Numbers among ops' arguments as inputs of a compiled step, so that another number needs no other code.

A loss weight that is annealed, or a count that the data say (``loss / mask.sum().item()``), is a Python number
when an op gets it, and would be a constant of the compiled code. Here it is a tensor of one double, and its op is
arithmetic that takes one: in the precision in which the op computes by itself, with a result of its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from tightship.frontends.torch.program import Call, Program, Ref, dtype_of, map_tree
from tightship.frontends.torch.rerun.numbers import numbers_of, written

__all__ = ["OpNumber", "changed_places", "computed", "places_said_by_data", "takes"]


@dataclass(frozen=True, order=True)
class OpNumber:
    """The number at that place among those of the arguments of an op of the program (`numbers_of`)."""

    op: int
    place: int

    def of(self, program: Program) -> Any:
        """What it is in ``program``."""
        return numbers_of(program.calls[self.op])[self.place]


def changed_places(known: Program, numbers: Mapping[int, tuple[Any, ...]]) -> frozenset[OpNumber]:
    """Where ``numbers``, by op, are others than those of ``known``."""
    return frozenset(
        OpNumber(k, place)
        for k, new in numbers.items()
        for place, (a, b) in enumerate(zip(numbers_of(known.calls[k]), new, strict=True))
        if written((a,)) != written((b,))
    )


def places_said_by_data(program: Program) -> frozenset[OpNumber]:
    """Where the program has numbers that its data have said: other data say others. A number that comes about
    otherwise, too, is taken for one of them, at the price of a constant."""
    said = {g.expected for g in program.guards if type(g.expected) in (int, float)} - _EVERYWHERE
    if not said:
        return frozenset()
    places = (OpNumber(k, n) for k, call in enumerate(program.calls) for n in range(len(numbers_of(call))))
    return frozenset(p for p in places if p.of(program) in said and takes(program, p))


_EVERYWHERE: Final = frozenset({-1, 0, 1, 2})
"""Numbers that stand in programs whatever their data say."""


def takes(program: Program, number: OpNumber) -> bool:
    """Whether compiled code can take the number as an input."""
    call, value = program.calls[number.op], number.of(program)
    formula = _formula(call.fn)
    if formula is None or isinstance(value, complex) or (isinstance(value, int) and abs(value) > _WHOLE):
        return False
    if formula.compares and not _dtype(program, call.args[0]).is_floating_point:
        return False
    return _argument(call, number.place) in formula.numbers


_WHOLE: Final = 2**53
"""Up to here a double tells whole numbers apart."""


def _dtype(program: Program, x: Any) -> torch.dtype:
    return dtype_of(program.graph.values[x.value].dtype) if isinstance(x, Ref) else torch.bool


def _argument(call: Call, place: int) -> str:
    """The name of the argument that a number is; empty where it stands in a list."""
    named = zip((a.name for a in _schema(call.fn).arguments), call.args, strict=False)
    for name, x in (*named, *call.kwargs.items()):
        count = 1 if type(x) in (int, float, complex) else len(numbers_of(Call(call.fn, (x,), {}, ())))
        if place < count:
            return name if not isinstance(x, (list, tuple)) else ""
        place -= count
    return ""


def _schema(fn: Any) -> Any:
    return fn._schema


def computed(
    call: Call, inputs: Mapping[int, torch.Tensor], like: torch.dtype, read: Callable[[int], torch.Tensor]
) -> Any:
    """The result of ``call`` with ``inputs`` for the numbers at those places, of dtype ``like``. ``read`` gives the
    tensors that it refers to."""
    formula, count = _formula(call.fn), iter(range(len(numbers_of(call))))
    assert formula is not None

    def given(x: Any) -> Any:
        if type(x) in (int, float, complex):
            return inputs.get(next(count), x)
        return read(x.value) if isinstance(x, Ref) else x

    args, kwargs = map_tree(given, call.args), map_tree(given, call.kwargs)
    if formula is _BATCH_NORM:
        return _with_momentum(call.fn, *args)
    named = dict(zip((a.name for a in _schema(call.fn).arguments), args, strict=False)) | kwargs
    precision = named["self"].dtype if formula.compares else like
    precision = _IN_SINGLE.get(precision, precision)
    made = formula.compute(
        {n: _in(precision, x) if n in formula.operands else x for n, x in named.items()}
    ).to(like)
    return named["self"].copy_(made) if call.fn.__name__.partition(".")[0].endswith("_") else made


_IN_SINGLE: Final = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Ops on half a float compute on whole ones."""


def _in(precision: torch.dtype, x: Any) -> Any:
    return x.to(precision) if isinstance(x, torch.Tensor) else x


def _with_momentum(
    norm: Any, x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: Any, eps: float
) -> Any:
    """A batch norm whose statistics move by a tensor: what the batch has takes their place, and they are mixed."""
    before = [t.clone() for t in (mean, var)]
    out = norm(x, weight, bias, mean, var, training, 1.0, eps)
    for old, t in zip(before, (mean, var), strict=True):
        t.copy_((1 - momentum).to(t.dtype) * old + momentum.to(t.dtype) * t)
    return out


# --- what ops are -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Formula:
    """An op as ``compute`` of its arguments by name, of which ``operands`` come in the precision of the result, or,
    where it ``compares``, in that of what is compared. ``numbers``: those that may be tensors of one double."""

    numbers: tuple[str, ...]
    operands: tuple[str, ...]
    compute: Callable[[dict[str, Any]], torch.Tensor]
    compares: bool = False


def _linear(fn: Callable[[Any, Any], torch.Tensor]) -> Callable[[dict[str, Any]], torch.Tensor]:
    return lambda a: fn(a["self"], a["other"] * a["alpha"] if "alpha" in a else a["other"])


def _limited(a: dict[str, Any]) -> torch.Tensor:
    x, low, high = a["self"], a.get("min"), a.get("max")
    x = x if low is None else torch.where(x < low, low, x)
    return x if high is None else torch.where(x > high, high, x)


def _compared(fn: Callable[[Any, Any], torch.Tensor]) -> _Formula:
    return _Formula(("other",), _TWO, lambda a: fn(a["self"], a["other"]), compares=True)


_TWO: Final = ("self", "other")
_BATCH_NORM: Final = _Formula(("momentum",), (), lambda _: torch.empty(()))
_FORMULAS: Final[dict[str, _Formula]] = {
    "mul": _Formula(("other",), _TWO, lambda a: a["self"] * a["other"]),
    "div": _Formula(("other",), _TWO, lambda a: a["self"] / a["other"]),
    "add": _Formula(("other", "alpha"), (*_TWO, "alpha"), _linear(lambda x, y: x + y)),
    "sub": _Formula(("other", "alpha"), (*_TWO, "alpha"), _linear(lambda x, y: x - y)),
    "rsub": _Formula(
        ("other", "alpha"), (*_TWO, "alpha"),
        lambda a: a["other"] - (a["self"] * a["alpha"] if "alpha" in a else a["self"]),
    ),
    "pow": _Formula(("self", "exponent"), ("self", "exponent"), lambda a: torch.pow(a["self"], a["exponent"])),
    "lerp": _Formula(
        ("weight",), ("self", "end", "weight"), lambda a: torch.lerp(a["self"], a["end"], a["weight"])
    ),
    "addcmul": _Formula(
        ("value",), ("self", "tensor1", "tensor2", "value"),
        lambda a: a["self"] + a["value"] * a["tensor1"] * a["tensor2"],
    ),
    "addcdiv": _Formula(
        ("value",), ("self", "tensor1", "tensor2", "value"),
        lambda a: a["self"] + a["value"] * a["tensor1"] / a["tensor2"],
    ),
    "masked_fill": _Formula(
        ("value",), ("self", "value"), lambda a: torch.where(a["mask"], a["value"], a["self"])
    ),
    "clamp": _Formula(("min", "max"), ("self", "min", "max"), _limited),
    "clamp_min": _Formula(("min",), ("self", "min"), _limited),
    "clamp_max": _Formula(("max",), ("self", "max"), _limited),
    "fill": _Formula(("value",), ("value",), lambda a: torch.ones_like(a["self"]) * a["value"]),
    "full_like": _Formula(
        ("fill_value",), ("fill_value",),
        lambda a: torch.ones_like(a["self"], dtype=a["fill_value"].dtype) * a["fill_value"],
    ),
    "full": _Formula(
        ("fill_value",), ("fill_value",),
        lambda a: torch.ones(a["size"], dtype=a["fill_value"].dtype, device=a.get("device")) * a["fill_value"],
    ),
    **{name: _compared(getattr(torch, name)) for name in ("gt", "ge", "lt", "le", "eq", "ne")},
    "native_batch_norm": _BATCH_NORM,
    "_native_batch_norm_legit": _BATCH_NORM,
}  # fmt: skip
"""By the names of ops, in place or not."""

_OVERLOADS: Final = frozenset({"Tensor", "Scalar", "Tensor_Scalar", "default"})


def _formula(fn: Any) -> _Formula | None:
    if not isinstance(fn, torch._ops.OpOverload) or fn.namespace != "aten":
        return None
    name, _, overload = fn.__name__.partition(".")
    return _FORMULAS.get(name.removesuffix("_")) if overload in _OVERLOADS else None
