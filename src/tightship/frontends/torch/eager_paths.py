"""Composite functions that take another path on stand-ins than in eager, where the two round otherwise.

ATen asks of some arguments whether they are "like a subclass" of tensors, which everything is under a dispatch mode,
and then avoids what subclasses do not do. ``matmul`` of a batch of matrices and one matrix in three dimensions
multiplies by one matrix then, and in eager, where that matrix requires no gradient, by a batch of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch

__all__ = ["FUNCTIONS", "as_in_eager", "on_methods"]

FUNCTIONS: Final = ("matmul",)
"""Of torch, by name."""
_METHODS: Final = ("matmul", "__matmul__", "__rmatmul__")


def as_in_eager(func: Any) -> Any:
    """What is called on stand-ins in the place of ``func``: mostly itself."""
    name = getattr(func, "__name__", "")
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
    return batches and not b.requires_grad and a.shape[2] == b.shape[1] and a.layout is b.layout is torch.strided


def _as_autocast_has_it(tensor: torch.Tensor) -> torch.Tensor:
    """Cast before it is expanded, as ``matmul`` casts it: so it is not copied for each matrix."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


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
