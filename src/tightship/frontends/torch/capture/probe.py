"""Prober: what an op's results really look like.

PyTorch derives the metadata of fake results from formulas that now and then differ from what the kernel does (other
strides for sizes of one, other types of saved statistics, results that are not there). One wrong stride changes the
ops that follow, and so the bits. Each call with new metadata is therefore run once, on zeros, and believed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tightship.errors import Unsupported
from tightship.frontends.torch import compat

__all__ = ["Prober", "form_of", "made_of"]


LIMIT = 1 << 28
"""Bytes of arguments and results above which the formula is believed, so that capture stays light."""

_MATRIX_PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")


class Prober:
    """``correct`` replaces fake results by ones with the metadata the kernel gives. Remembers what it has seen."""

    def __init__(self, fake: Any) -> None:
        self._fake = fake
        self._seen: dict[Any, Any] = {}
        self.corrected: dict[str, int] = {}

    def correct(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """``out``, or results like the real ones.

        Raises ``Unsupported`` if a real result shares bytes with an argument and the fake one does not.
        """
        tensors = [t for t in _tensors((args, kwargs))]
        fresh = [t for t in _tensors(out)]
        if any(t.layout is not torch.strided for t in fresh):
            return out  # refused where it is recorded
        if not fresh or _believable(fn, tensors, fresh) or not _probable(fn, args, kwargs, tensors, fresh):
            return out
        key = (fn, form_of(args), form_of(kwargs))
        if key not in self._seen:
            self._seen[key] = self._real(fn, args, kwargs, out)
        real = self._seen[key]
        if real is None or real == form_of(out):
            return out
        self.corrected[str(fn)] = self.corrected.get(str(fn), 0) + 1
        return self._like(real, out)

    def made_up(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Results like the real ones where there is no formula or it fails; None if the op cannot be run."""
        tensors = _tensors((args, kwargs))
        if not tensors or not _probable(fn, args, kwargs, tensors, []):
            return None
        key = (fn, form_of(args), form_of(kwargs))
        if key not in self._seen:
            self._seen[key] = self._real(fn, args, kwargs, None)
        return None if self._seen[key] is None else made_of(self._seen[key])

    def _real(self, fn: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """The metadata of the real results; None if the op cannot be run on zeros."""
        run = compat.runnable(fn) if torch.is_grad_enabled() else fn
        draws = compat.is_random(fn, args, kwargs)
        devices = {"cpu", *(str(t.device) for t in _tensors((args, kwargs, out)))} if draws else ()
        with compat.without_modes(), torch.no_grad(), compat.random_states_kept(devices):
            try:
                given, named = _zeros(args), _zeros(kwargs)
                real = run(*given, **named)
            except Exception:
                return None
            keys = {compat.storage_key(t) for t in _tensors((given, named))}
            if any(compat.storage_key(t) in keys for t in _tensors(real)):
                raise Unsupported(
                    str(fn), "its result shares bytes with an argument, which its formula hides"
                )
            return form_of(real)

    def _like(self, key: Any, out: Any) -> Any:
        if isinstance(out, (list, tuple)):
            return type(out)(self._like(k, o) for k, o in zip(key[1], out, strict=True))
        if key is None or not isinstance(out, torch.Tensor):
            return key if not isinstance(out, torch.Tensor) else None
        if key == form_of(out):
            return out
        return key.blank()


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


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return _tensors(tuple(tree.values()))
    return [t for x in tree for t in _tensors(x)] if isinstance(tree, (list, tuple)) else []


def form_of(tree: Any) -> Any:
    """``tree`` with each tensor replaced by what matters about it without its contents; comparable."""
    if isinstance(tree, torch.Tensor):
        nbytes = tree.untyped_storage().nbytes()
        return _Form(
            tree.dtype,
            tuple(tree.shape),
            tuple(tree.stride()),
            int(tree.storage_offset()),
            nbytes,
            str(tree.device),
        )
    if isinstance(tree, (list, tuple)):
        return "list", tuple(form_of(x) for x in tree)
    if isinstance(tree, dict):
        return tuple((k, form_of(x)) for k, x in tree.items())
    return tree


def _zeros(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        z = torch.empty_strided(tree.shape, tree.stride(), dtype=tree.dtype, device=tree.device)
        z.untyped_storage().fill_(0)
        return z
    if isinstance(tree, (list, tuple)):
        return type(tree)(_zeros(x) for x in tree)
    if isinstance(tree, dict):
        return {k: _zeros(x) for k, x in tree.items()}
    return tree


def _believable(fn: Any, tensors: list[torch.Tensor], fresh: list[torch.Tensor]) -> bool:
    """Whether formula and kernel are one: matrix products, and element-wise ops on like tensors."""
    if fn._schema.name in _MATRIX_PRODUCTS:
        return True
    if torch.Tag.pointwise not in fn.tags or not tensors:
        return False
    full = [t for t in tensors if t.dim()]
    alike = all(t.shape == fresh[0].shape and t.is_contiguous() for t in (*full, *fresh))
    return bool(alike and all(d != 1 for d in fresh[0].shape))


def _probable(
    fn: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], fresh: list[torch.Tensor]
) -> bool:
    """Whether the op may be run on zeros: it writes nothing, makes new tensors of moderate size."""
    if compat.written_arguments(fn) or compat.is_collective(fn):
        return False
    storages = {compat.storage_key(t) for t in tensors}
    if any(compat.storage_key(t) in storages for t in fresh):
        return False
    if any(t.device.type not in ("cpu", "cuda") for t in (*tensors, *fresh)):
        return False
    if any(t.is_cuda for t in (*tensors, *fresh)) and not torch.cuda.is_available():
        return False
    return sum(t.untyped_storage().nbytes() for t in (*tensors, *fresh)) <= LIMIT
