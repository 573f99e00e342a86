"""What an object of the caller's holds in tensors, wherever they are in it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from tightship.frontends.torch import compat

__all__ = ["bytes_held"]

_NOT_INSIDE = (torch.nn.Module, torch.optim.Optimizer, torch.distributed.ProcessGroup, ModuleType, type)


def bytes_held(*roots: Any, beside: Collection[torch.Tensor] = ()) -> int:
    """The bytes of all storages that tensors in ``roots`` have, each once, without those of tensors ``beside``."""
    known = {compat.storage_key(t) for t in beside}
    found = {compat.storage_key(t): t.untyped_storage().nbytes() for t in _tensors(roots)}
    return sum(n for key, n in found.items() if key not in known)


def _tensors(roots: Any) -> Iterator[torch.Tensor]:
    seen: dict[int, Any] = {}
    stack = [*roots]
    while stack:
        x = stack.pop()
        if id(x) in seen or isinstance(x, _NOT_INSIDE) or x is None:
            continue
        seen[id(x)] = x
        if isinstance(x, torch.Tensor):
            if x.layout is torch.strided and not x.is_meta and not compat.is_fake(x):
                yield x
        else:
            stack += _inside(x)


def _inside(x: Any) -> Iterator[Any]:
    if isinstance(x, (str, bytes, int, float, complex)):
        return
    if isinstance(x, Mapping):
        yield from x.values()
    elif isinstance(x, Collection):
        yield from x
    elif isinstance(x, functools.partial):
        yield from (x.func, *x.args, *x.keywords.values())
    elif isinstance(x, MethodType):
        yield from (x.__func__, x.__self__)
    elif isinstance(x, FunctionType):
        yield from (c.cell_contents for c in x.__closure__ or () if _is_full(c))
    slots = (s for kind in type(x).__mro__ for s in vars(kind).get("__slots__", ()))
    yield from (getattr(x, s, None) for s in slots if isinstance(s, str))
    yield from getattr(x, "__dict__", {}).values()


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 – asks whether it is there
    except ValueError:
        return False
    return True
