"""What a tensor looks like, without its contents."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tightship.frontends.torch.capture.tape import TapeValue

__all__ = ["form_of", "made_of", "zeros_like"]


class _Form(NamedTuple):
    """What matters about a tensor without its contents. Some kernels return part of a larger storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int
    device: str

    def blank(self) -> torch.Tensor:
        whole = torch.empty(self.nbytes // self.dtype.itemsize, dtype=self.dtype, device=self.device)
        return whole.as_strided(self.shape, self.stride, self.offset)


def made_of(form: Any) -> Any:
    """New tensors of that form (``form_of`` a call's result)."""
    if isinstance(form, _Form):
        return form.blank()
    return tuple(made_of(f) for f in form[1]) if isinstance(form, tuple) else form


def form_of(tree: Any) -> Any:
    """``tree`` with each tensor replaced by what matters about it without its contents; comparable."""
    if isinstance(tree, torch.Tensor):
        shape, stride, nbytes = tuple(tree.shape), tuple(tree.stride()), tree.untyped_storage().nbytes()
        return _Form(tree.dtype, shape, stride, int(tree.storage_offset()), nbytes, str(tree.device))
    if isinstance(tree, (list, tuple)):
        return "list", tuple(form_of(x) for x in tree)
    if isinstance(tree, dict):
        return tuple((k, form_of(x)) for k, x in tree.items())
    return tree


def zeros_like(value: torch.Tensor | TapeValue, device: Any = None) -> torch.Tensor:
    """A tensor of zeros with the layout of another."""
    stride = value.stride if isinstance(value, TapeValue) else value.stride()
    t = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=device)
    t.untyped_storage().fill_(0)
    return t
