"""Constants of a step that its own code may change behind torch's back, in memory of NumPy's or of others."""

from __future__ import annotations

import torch

from tightship.errors import Unsupported
from tightship.frontends.torch import compat

__all__ = ["Watched"]


_MOST = 1 << 24
"""Bytes that are watched, at most."""


class Watched:
    """Ops run when the code has run: what it changes meanwhile, they would find changed."""

    def __init__(self) -> None:
        self._then: list[tuple[torch.Tensor, bytes]] = []
        self._size = 0

    def add(self, tensor: torch.Tensor, *, whatever: bool = False) -> bool:
        """Watches a tensor in memory of others (or ``whatever`` it lies in). Returns whether a change would be
        noticed, if one is possible."""
        if tensor.layout is torch.strided and (whatever or compat.is_foreign_memory(tensor)):
            self._size += tensor.numel() * tensor.element_size()
            if self._size > _MOST:
                return False
            self._then.append((tensor, _bytes_of(tensor)))
        return True

    def check(self) -> None:
        """To be called when the code has run. Raises ``Unsupported`` if something was changed."""
        if any(_bytes_of(t) != then for t, then in self._then):
            raise Unsupported(
                "changing an array that is also a tensor's in a step", "its ops run apart from its code",
                "make the tensor by torch.tensor, or the array by numpy().copy(), which copy",
            )  # fmt: skip


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
