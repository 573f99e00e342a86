"""Composite functions that take another path on stand-ins than in eager, where the two round otherwise.

ATen asks of some arguments whether they are "like a subclass" of tensors, which everything is under a dispatch mode,
and then avoids what subclasses do not do. ``matmul`` of a batch of matrices and one matrix in three dimensions
multiplies by one matrix then, and in eager, where that matrix requires no gradient, by a batch of it. The gradient
of ``prod`` is then made of products of all others, and in eager, where nothing is zero, by dividing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch

from tightship.errors import Unplannable

__all__ = ["FUNCTIONS", "as_in_eager", "on_methods"]

FUNCTIONS: Final = ("matmul", "prod")
"""Of torch, by name."""
_METHODS: Final = ("matmul", "__matmul__", "__rmatmul__")


def as_in_eager(func: Any) -> Any:
    """What is called on stand-ins in the place of ``func``: mostly itself."""
    name = getattr(func, "__name__", "")
    if name == "prod":
        return lambda *args, **kwargs: _prod(func, *args, **kwargs)
    if name not in _METHODS:
        return func
    turned = name == "__rmatmul__"

    def matmul(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 2 or kwargs or not all(isinstance(x, torch.Tensor) for x in args):
            return func(*args, **kwargs)
        a, b = reversed(args) if turned else args
        if not _is_batch_in_eager(a, b):
            return func(*args)
        return torch.bmm(a, _as_autocast_has_it(b).expand(a.shape[0], -1, -1))

    return matmul


def _is_batch_in_eager(a: torch.Tensor, b: torch.Tensor) -> bool:
    batches = a.dim() == b.dim() == 3 and b.shape[0] == 1 != a.shape[0]
    return (
        batches and not b.requires_grad and a.shape[2] == b.shape[1] and a.layout is b.layout is torch.strided
    )


def _as_autocast_has_it(tensor: torch.Tensor) -> torch.Tensor:
    """Cast before it is expanded, as ``matmul`` casts it: so it is not copied for each matrix."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def _prod(
    func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **others: Any
) -> Any:
    x = input
    named = {k: v for k, v in (("keepdim", keepdim), ("dtype", dtype)) if v}
    plain = isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled() and x.dim() > 0
    if not plain or others or not (dim is None or type(dim) is int) or not x.is_floating_point():
        return func(x, *(() if dim is None else (dim,)), **named, **others)
    if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:
        x = x.float()
    if dtype is not None:
        if not dtype.is_floating_point:
            return func(x, *(() if dim is None else (dim,)), **named)
        x = x.to(dtype)
    return _Prod.apply(x, dim, keepdim)  # type: ignore[no-untyped-call]


class _Prod(torch.autograd.Function):
    """A product whose gradient is eager's, which looks for zeros: both of its ways, and a choice by the data."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
        aten = torch.ops.aten
        result = aten.prod.default(x) if dim is None else aten.prod.dim_int(x, dim, keepdim)
        ctx.save_for_backward(x, result)
        ctx.dim, ctx.keepdim = dim, keepdim
        made: torch.Tensor = result
        return made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise Unplannable(
                "a gradient of the gradient of prod", "eager takes another path where something is zero",
                "write it as an exp of a sum of logarithms, or as cumprod",
            )  # fmt: skip
        (x, result), dim = ctx.saved_tensors, ctx.dim
        zeros = (x == 0).sum()
        if dim is None:
            safe = _products_of_others(grad, x.contiguous().view(-1), 0).view_as(x)
            safe = torch.where(zeros > 1, torch.zeros((), dtype=x.dtype, device=x.device), safe)
        else:
            if not ctx.keepdim:
                grad, result = grad.unsqueeze(dim), result.unsqueeze(dim)
            safe = _products_of_others(grad, x, dim)
        return torch.where(zeros == 0, grad * (result / x), safe), None, None


def _products_of_others(grad: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """``prod_safe_zeros_backward`` of ATen."""
    n = x.shape[dim]
    if n == 1:
        return grad
    if not x.numel():
        return grad.expand_as(x)
    ones = torch.ones_like(x.narrow(dim, 0, 1), dtype=grad.dtype)
    before = torch.cat([ones, x.narrow(dim, 0, n - 1)], dim).cumprod(dim)
    behind = torch.cat([ones, x.narrow(dim, 1, n - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return grad * (before * behind)


@contextmanager
def on_methods(only_here: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Inside, methods of tensors are what `as_in_eager` says, where ``only_here`` (before, now) is."""
    with ExitStack() as stack:
        for name in _METHODS:
            before = getattr(torch.Tensor, name)
            if name in vars(torch.Tensor):
                stack.callback(setattr, torch.Tensor, name, vars(torch.Tensor)[name])
            else:
                stack.callback(delattr, torch.Tensor, name)
            setattr(torch.Tensor, name, only_here(before, as_in_eager(before)))
        yield
