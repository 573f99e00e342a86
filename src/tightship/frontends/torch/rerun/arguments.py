"""Arguments and answers of torch functions: their tensors, and whether they are the same as recorded ones."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from operator import is_
from typing import Any

import torch

from tightship.frontends.torch import compat_calls

__all__ = [
    "Arguments",
    "map_tensors",
    "name_of",
    "own_containers",
    "plainly_same",
    "same_plain",
]


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """``tree`` with ``fn`` applied to its tensors; the same object where ``fn`` changes none."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, (list, tuple)) and type(tree) is not torch.Size:
        new = [map_tensors(fn, x) for x in tree]
        if all(map(is_, new, tree)):
            return tree
        named = isinstance(tree, tuple) and hasattr(tree, "_fields")
        return type(tree)._make(new) if named else type(tree)(new)  # type: ignore[union-attr]
    if isinstance(tree, dict):
        new_items = {k: map_tensors(fn, x) for k, x in tree.items()}
        return tree if all(new_items[k] is tree[k] for k in tree) else new_items
    if isinstance(tree, slice):
        bounds = tree.start, tree.stop, tree.step
        parts = [map_tensors(fn, x) for x in bounds]
        return tree if all(map(is_, parts, bounds)) else slice(*parts)
    return tree


def own_containers(tree: Any) -> Any:
    """``tree`` in lists, dicts and arrays of its own, which the caller's code cannot change."""
    if isinstance(tree, (list, tuple)) and type(tree) is not torch.Size:
        new = [own_containers(x) for x in tree]
        if isinstance(tree, tuple) and all(map(is_, new, tree)):
            return tree
        named = hasattr(tree, "_fields")
        return type(tree)._make(new) if named else type(tree)(new)  # type: ignore[union-attr]
    if isinstance(tree, dict):
        return type(tree)((k, own_containers(x)) for k, x in tree.items())
    return tree.copy() if type(tree).__module__ == "numpy" and hasattr(tree, "copy") else tree


def same_plain(a: Any, b: Any) -> bool:
    """Whether two answers are alike where they are no tensors."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same_plain, a, b))
    if isinstance(a, (int, float, bool, str)):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    return True


def name_of(func: Any) -> str:
    """The function's bare name, also of getters and setters."""
    owner = getattr(func, "__self__", None)
    name = getattr(func, "__name__", "") or type(func).__name__
    if name in ("__get__", "__set__", "__delete__") and owner is not None:
        return f"{getattr(owner, '__name__', '')}.{name}"
    return str(name)


_SHAPED_BY_NUMBERS = {
    "arange", "range", "interpolate", "upsample", "upsample_nearest", "upsample_bilinear", "fractional_max_pool2d",
    "fractional_max_pool3d", "fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices",
}  # fmt: skip


_ARITHMETIC = {
    "add", "add_", "__add__", "__iadd__", "__radd__", "sub", "sub_", "__sub__", "__isub__", "__rsub__", "rsub",
    "mul", "mul_", "__mul__", "__imul__", "__rmul__", "div", "div_", "__div__", "__truediv__", "__rtruediv__",
    "__rdiv__", "true_divide", "multiply", "divide", "subtract", "pow", "pow_", "__pow__", "__rpow__",
    "clamp", "clamp_", "clamp_min", "clamp_max", "clip", "masked_fill", "masked_fill_", "fill_", "full_like",
    "lerp", "lerp_", "addcmul", "addcmul_", "addcdiv", "addcdiv_", "leaky_relu", "eq", "ne", "lt", "le", "gt", "ge",
}  # fmt: skip


def plainly_same(
    args: tuple[Any, ...], kwargs: dict[str, Any], known: tuple[Any, ...], known_kwargs: dict[str, Any]
) -> bool:
    """Whether arguments are the same objects or equal whole numbers, names and shapes; most are, and this is quick.
    Where it is False, ``Arguments`` tells."""
    if len(args) != len(known) or len(kwargs) != len(known_kwargs):
        return False
    for a, b in zip(args, known, strict=True):
        if a is not b and not _plainly_equal(a, b):
            return False
    for k, a in kwargs.items():
        b = known_kwargs.get(k, _NOTHING)
        if a is not b and not _plainly_equal(a, b):
            return False
    return True


_NOTHING = object()


def _plainly_equal(a: Any, b: Any) -> bool:
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is int or kind is str:
        return bool(a == b)
    if kind is tuple or kind is list or kind is torch.Size:
        return len(a) == len(b) and all(
            x is y or (type(x) is int and type(y) is int and x == y) for x, y in zip(a, b, strict=True)
        )
    return False


class Arguments:
    """Compares arguments of a call with those of a recorded one. ``number`` gives the number of a tensor of the
    former, or None; after ``alike`` was true, ``differs`` says whether numbers are other ones."""

    __slots__ = ("differs", "integers", "number")

    def __init__(self, number: Callable[[int], int | None]) -> None:
        self.number = number
        self.differs = False
        self.integers = False

    def structural(self, func: Any) -> bool:
        """Whether a number that differs may change the shape of the answer."""
        if not self.differs:
            return False
        name = name_of(func)
        if self.integers:
            return name not in _ARITHMETIC
        if isinstance(func, compat_calls.Special):  # what it makes of another number is found out
            return not func.keys or None in func.keys
        module = str(getattr(func, "__module__", None) or "torch")
        return name in _SHAPED_BY_NUMBERS or not (module.startswith("torch") or _is_method(func))

    def alike(self, now: Any, known: Any, number_of_known: Callable[[int], int | None]) -> bool:
        if isinstance(known, torch.Tensor) or isinstance(now, torch.Tensor):
            if not (isinstance(known, torch.Tensor) and isinstance(now, torch.Tensor)):
                return False
            n = self.number(id(now))
            return n is not None and n == number_of_known(id(known))
        if now is known:
            return True
        kind = type(now)
        if kind is not type(known):
            return False
        if kind is float or kind is int or kind is complex:
            return self._numbers(now, known)
        if kind is bool or kind is str or now is None:
            return bool(now == known)
        if issubclass(kind, (list, tuple)):
            return len(now) == len(known) and all(
                self.alike(a, b, number_of_known) for a, b in zip(now, known, strict=True)
            )
        if issubclass(kind, dict):
            return list(now) == list(known) and all(
                self.alike(a, known[k], number_of_known) for k, a in now.items()
            )
        if kind is slice:
            return self.alike(
                (now.start, now.stop, now.step), (known.start, known.stop, known.step), number_of_known
            )
        return self._others(now, known)

    def _numbers(self, now: Any, known: Any) -> bool:
        same = now == known or (now != now and known != known)
        if same and not (now == 0 and math.copysign(1, now.real) != math.copysign(1, known.real)):
            return True
        self.differs = True
        self.integers = self.integers or type(now) is int
        return True

    def _others(self, now: Any, known: Any) -> bool:
        if _is_numpy_number(now):
            return self._numbers(now.item(), known.item())
        if hasattr(now, "dtype") and hasattr(now, "tobytes"):
            return bool(
                now.dtype == known.dtype and now.shape == known.shape and now.tobytes() == known.tobytes()
            )
        if isinstance(now, types.FunctionType):
            return now.__code__ is known.__code__  # a call with functions among its arguments repeats
        if isinstance(now, types.MethodType):
            return now.__func__ is known.__func__ and now.__self__ is known.__self__
        try:
            return bool(now == known)
        except Exception:  # an object of somebody else's that cannot say
            return False


def _is_method(func: Any) -> bool:
    return isinstance(func, _METHODS)


_METHODS = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
)  # fmt: skip


def _is_numpy_number(x: Any) -> bool:
    """Whether this is a scalar of NumPy's that is a number, and no array."""
    kind = getattr(getattr(x, "dtype", None), "kind", None)
    return type(x).__module__ == "numpy" and kind in ("f", "i", "u", "c") and not hasattr(x, "__setitem__")
