"""Tensors that torch makes of lists of numbers where some numbers are tensors, such as ``torch.tensor([a, b])``.

Torch reads such tensors in C++, where no mode sees it and stand-ins have no data. The ops called here instead give
the same bits; what they cannot give is left to torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tightship.frontends.torch.program import tensors_in

__all__ = ["FUNCTIONS", "instead"]

FUNCTIONS = ("tensor", "as_tensor", "asarray")
"""Those of the module ``torch``."""

_METHODS = ("new_tensor", "new")
_OPTIONS = {"dtype", "device", "requires_grad", "copy", "pin_memory"}


def instead(func: Callable[..., Any]) -> Callable[..., Any]:
    """What is called in the place of ``func``."""
    name = getattr(func, "__name__", "")
    if name not in FUNCTIONS + _METHODS:
        return func

    def called(*args: Any, **kwargs: Any) -> Any:
        options = dict(kwargs)
        whose = args[0] if name in _METHODS and args else None
        given = list(args if whose is None else args[1:])
        for key in ("data", "obj"):
            if key in options and not given:
                given.append(options.pop(key))
        if given and isinstance(given[0], (list, tuple)) and next(tensors_in(given[0]), None) is not None:
            options.update(zip(("dtype", "device"), given[1:], strict=False))
            if whose is not None:
                options["dtype"] = options.get("dtype") or whose.dtype
            made = _made(given[0], options)
            if made is not None:
                return made
        return func(*args, **kwargs)

    return called


def _made(data: Any, options: dict[str, Any]) -> torch.Tensor | None:
    """The tensor of ``data``; None where torch has to make it, or to say what is wrong."""
    leaves: list[Any] = []
    shape = _shape(data, leaves)
    on_cpu = all(x.device.type == "cpu" for x in leaves if isinstance(x, torch.Tensor))
    if shape is None or not on_cpu or not options.keys() <= _OPTIONS or options.get("pin_memory"):
        return None
    if torch.device(options.get("device") or torch.get_default_device()).type != "cpu":
        return None
    kinds = [_kind(x) for x in leaves]
    dtype = options.get("dtype") or functools.reduce(torch.promote_types, kinds)
    if not all(_takes(dtype, kind) for kind in kinds):
        return None
    made = torch.stack([_scalar(x, dtype) for x in leaves])
    made = made if len(shape) == 1 else made.reshape(shape)
    return made.requires_grad_() if options.get("requires_grad") else made


def _shape(data: Any, leaves: list[Any]) -> tuple[int, ...] | None:
    """The shape of nested lists, and their ``leaves``; None if they have none, or hold anything but numbers."""
    if not isinstance(data, (list, tuple)):
        leaves.append(data)
        number = data.numel() == 1 if isinstance(data, torch.Tensor) else type(data) in (bool, int, float)
        return () if number else None
    inner = {_shape(x, leaves) for x in data}
    part = inner.pop() if len(inner) == 1 else None
    return None if part is None else (len(data), *part)


def _kind(x: Any) -> torch.dtype:
    if isinstance(x, torch.Tensor):
        return x.dtype
    return torch.bool if type(x) is bool else torch.int64 if type(x) is int else torch.get_default_dtype()


def _takes(dtype: torch.dtype, kind: torch.dtype) -> bool:
    """Whether torch reads numbers of dtype ``kind`` for a tensor of ``dtype``: for a real one as doubles."""
    return kind == dtype or (dtype.is_floating_point and not kind.is_complex) or (
        not (dtype.is_complex or kind.is_floating_point or kind.is_complex) and torch.bool not in (dtype, kind)
    )  # fmt: skip


def _scalar(x: Any, dtype: torch.dtype) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        return torch.full((), float(x) if dtype.is_floating_point else x, dtype=dtype)
    x = x.detach().reshape(())
    if dtype.is_floating_point and not x.dtype.is_floating_point:
        x = x.to(torch.float64)
    return x.to(dtype)
