"""Tensors derived from a storage's current tensor by metadata alone, prepared before the step runs.

A view op is never run again: what it needs is only where its result lies in the storage, and the storage may
have been recomputed somewhere else since.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tightship.errors import BadInput
from tightship.frontends.torch.program import Program
from tightship.graph import Value, aligned, alignment_of

__all__ = ["derivation", "dtype_of", "mismatch"]


def dtype_of(name: str) -> torch.dtype:
    """The dtype that a graph value names (``float32``). Raises ``BadInput``."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise BadInput(f"unknown dtype {name!r}: a value's dtype is one of PyTorch's", place="Value.dtype")
    return found


def derivation(value: Value, base: Value, *, movable: bool = False) -> Callable[[Any], Any]:
    """A function from the tensor of ``base`` to the tensor of ``value``, which shares its storage.

    ``movable`` tensors (the caller's) may start elsewhere in their storage than they did at capture.
    """
    shape, stride, offset = value.shape, value.stride, value.offset
    as_strided = torch.as_strided
    dtype, known = dtype_of(value.dtype), base.offset * dtype_of(base.dtype).itemsize

    def reinterpreted(tensor: Any) -> Any:
        moved = (tensor.storage_offset() * tensor.element_size() - known) // dtype.itemsize
        empty = torch.empty(0, dtype=dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), offset + moved, shape, stride)

    def moved(tensor: Any) -> Any:
        return as_strided(tensor, shape, stride, tensor.storage_offset() + offset - base.offset)

    def fixed(tensor: Any) -> Any:
        return as_strided(tensor, shape, stride, offset)

    if value.dtype != base.dtype:
        return reinterpreted
    return moved if movable else fixed


def mismatch(program: Program, value: int, tensor: Any, *, storage: bool = True) -> str | None:
    """How a tensor differs from the metadata of the value it is to be; None if it does not.

    Strides of dimensions of size 1 mean nothing and may differ. ``storage``: whether offset and size count
    too.
    """
    info = program.graph.values[value]
    if not isinstance(tensor, torch.Tensor):
        return f"type {type(tensor).__name__}"
    if tensor.dtype != dtype_of(info.dtype):
        return f"dtype {tensor.dtype} instead of {info.dtype}"
    if tuple(tensor.shape) != info.shape:
        return f"shape {tuple(tensor.shape)} instead of {info.shape}"
    strides = zip(tensor.shape, tensor.stride(), info.stride, strict=True)
    if tensor.numel() and any(n != 1 and now != known for n, now, known in strides):
        return f"stride {tuple(tensor.stride())} instead of {info.stride}"
    planned = program.graph.storages[info.storage]
    if not storage or planned.pool == "host":
        return None
    if tensor.storage_offset() != info.offset:
        return f"storage offset {tensor.storage_offset()} instead of {info.offset}"
    size = tensor.untyped_storage().nbytes()
    whole = aligned(size, alignment_of(str(tensor.device)))
    return None if whole == planned.size else f"a storage of {size} bytes instead of {planned.size}"
