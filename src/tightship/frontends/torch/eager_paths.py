"""Composite functions that take another path on stand-ins than in eager, where the two round otherwise.

ATen asks of some arguments whether they are "like a subclass" of tensors, which everything is under a dispatch mode,
and then avoids what subclasses do not do. ``matmul`` of a batch of matrices and one matrix in three dimensions
multiplies by one matrix then, and in eager, where that matrix requires no gradient, by a batch of it. Singular and
eigenvalues come with vectors then, by another algorithm, which eager asks for only where gradients need them. The
gradient of ``prod`` is then made of products of all others, and in eager, where nothing is zero, by dividing. What
batch norm makes of a transposed tensor is transposed as well then, and on the CPU contiguous in eager: what follows
asks for that (``linear``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from tightship.errors import Unplannable
from tightship.frontends.torch import compat_ops

__all__ = ["FUNCTIONS", "active", "as_in_eager"]

FUNCTIONS: Final = ("prod",)
"""Of torch, by name, that `as_in_eager` changes."""


@contextmanager
def active() -> Iterator[None]:
    """Inside, on this thread, such functions take eager's path, by whatever name they are called, from C++ too."""
    aten = torch.ops.aten
    with (
        compat_ops.composed_instead(aten.matmul.default, _matmul),
        compat_ops.composed_instead(aten.linalg_svdvals.default, _singular_values),
        compat_ops.composed_instead(aten.linalg_eigvalsh.default, _eigenvalues),
        compat_ops.composed_instead(aten.batch_norm.default, _batch_norm),
    ):
        yield


def _singular_values(x: torch.Tensor, *, driver: str | None = None) -> Any:
    if _is_trained(x):
        return NotImplemented
    return torch.ops.aten._linalg_svd.default(x, False, False, driver=driver)[1]


def _eigenvalues(x: torch.Tensor, triangle: str = "L") -> Any:
    return NotImplemented if _is_trained(x) else torch.ops.aten._linalg_eigh.default(x, triangle, False)[0]


def _batch_norm(x: torch.Tensor, *args: Any) -> Any:
    format = compat_ops.suggest_memory_format(x)
    if x.device.type != "cpu" or x.is_contiguous(memory_format=format):
        return NotImplemented
    return torch.ops.aten.native_batch_norm.default(x, *args[:-1])[0].contiguous(memory_format=format)


def _is_trained(x: torch.Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _matmul(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Eager's path, where it is another one than stand-ins take; ``NotImplemented`` else."""
    if not _is_batch_in_eager(a, b):
        return NotImplemented
    return torch.bmm(a, b.expand(a.shape[0], -1, -1))


def as_in_eager(func: Any) -> Any:
    """What is called on stand-ins in the place of ``func``, a function, method or op of torch's: mostly itself."""
    if getattr(func, "__name__", "").partition(".")[0] != "prod":
        return func

    def prod(*args: Any, **kwargs: Any) -> Any:
        return _prod(func, *args, **kwargs)

    return prod


def _is_batch_in_eager(a: torch.Tensor, b: torch.Tensor) -> bool:
    batches = a.dim() == b.dim() == 3 and b.shape[0] == 1 != a.shape[0]
    return (
        batches and not b.requires_grad and a.shape[2] == b.shape[1] and a.layout is b.layout is torch.strided
    )


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
