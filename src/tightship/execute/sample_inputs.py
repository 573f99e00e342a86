"""Tensors made for measuring: the metadata of graph values, and contents that any op accepts."""

from __future__ import annotations

from typing import Any

import torch

from tightship.execute.views import dtype_of
from tightship.frontends.torch.program import Call, refs_in, substitute
from tightship.graph import ALIGNMENT, Graph, Value

__all__ = ["fresh_arguments"]

_TILE = 1 << 16
_tiles: dict[torch.dtype, Any] = {}


def _tile(dtype: torch.dtype) -> Any:
    """Random normal numbers from a seed of their own, repeated to fill what has to be filled."""
    if dtype not in _tiles:
        generator = torch.Generator().manual_seed(0)
        _tiles[dtype] = torch.randn(_TILE, generator=generator, dtype=torch.float32).to(dtype)
    return _tiles[dtype]


def _filled(flat: Any) -> None:
    """Zeros are valid indices, and false; numbers are drawn."""
    if not (flat.dtype.is_floating_point or flat.dtype.is_complex):
        flat.zero_()
        return
    tile, whole = _tile(flat.dtype).to(flat.device), flat.numel() // _TILE * _TILE
    if whole:
        flat[:whole].view(-1, _TILE).copy_(tile.expand(whole // _TILE, _TILE))
    flat[whole:].copy_(tile[: flat.numel() - whole])


def fresh(value: Value, device: str) -> Any:
    """A tensor on ``device`` with the metadata of ``value`` in a storage of its own, aligned as the value is in
    its storage.
    """
    dtype = dtype_of(value.dtype)
    start = value.offset * dtype.itemsize % ALIGNMENT // dtype.itemsize
    extent = start + 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride, strict=True))
    if 0 in value.shape:
        extent = start
    flat = torch.empty(extent, dtype=dtype, device=device)
    _filled(flat)
    return flat.as_strided(value.shape, value.stride, start)


def fresh_arguments(graph: Graph, call: Call, device: str = "cpu") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments like those of ``call``, its tensors fresh and on ``device`` (on the host, if they lie there); one
    value is one tensor, however often it is given.
    """

    def like(v: int) -> Any:
        value = graph.values[v]
        return fresh(value, "cpu" if graph.storages[value.storage].pool == "host" else device)

    made = {v: like(v) for v in dict.fromkeys(refs_in((call.args, call.kwargs)))}
    return substitute(call.args, made.__getitem__), substitute(call.kwargs, made.__getitem__)
