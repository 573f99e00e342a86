"""Gradients of which this rank has a part, in the hands of code between ``step.backward`` and ``step.update``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tightship.errors import Unsupported
from tightship.frontends.torch import compat_distributed
from tightship.frontends.torch.elementwise import goes_by_elements
from tightship.frontends.torch.program import tensors_in
from tightship.frontends.torch.structure import map_leaves

__all__ = ["Division", "PartOfGradient"]


@dataclass(frozen=True)
class Division:
    """How a tensor is divided: along which dimensions; how many elements all parts have together, None where that is
    not known; and what makes the DTensor of a part, in the same memory, if eager has one there."""

    dims: frozenset[int]
    count: int | None
    distributed: Callable[[torch.Tensor], Any] | None


_UNKNOWN: Final = Division(frozenset(), None, None)
_ALONG_DIMS: Final = {
    "norm": 2, "vector_norm": 2, "matrix_norm": 2, "quantile": 2, "sum": 1, "nansum": 1, "mean": 1, "nanmean": 1,
    "prod": 1, "std": 1, "var": 1, "max": 1, "min": 1, "amax": 1, "amin": 1, "all": 1, "any": 1, "count_nonzero": 1,
    "median": 1, "nanmedian": 1, "logsumexp": 1, "argmax": 1, "argmin": 1,
}  # fmt: skip
"""Functions of torch that answer for each row if they are told along which dimensions, and their place for these."""
_FLAT: Final = "cat", "stack"
_LEAVES: Final = "numpy", "__array__", "tolist", "__dlpack__", "__len__"
_COUNTS: Final = "numel", "nelement"
_TEXTS: Final = "__repr__", "__str__", "__format__"
_BASE: Final = torch.Tensor._base.__get__  # type: ignore[attr-defined]
"""Of a view, which a part is to autograd; whoever follows it would not come to an end."""


class PartOfGradient(torch.Tensor):
    """This rank's part of a gradient in the hands of the caller: a tensor as any other where code goes element by
    element. What else is asked of it, its norm or a sum, is not that of the part: it is the DTensor's where eager
    has one, and else refused. What is made of it is such a part again."""

    division: Division = _UNKNOWN

    @classmethod
    def of(cls, part: torch.Tensor, division: Division) -> PartOfGradient:
        made = part.as_subclass(cls)
        made.division = division
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").removeprefix("linalg_")
        given = list(_parts_in((args, kwargs)))
        with torch._C.DisableTorchFunctionSubclass():
            if name in _TEXTS or not given or func == _BASE:
                return func(*args, **kwargs)
            if name in _COUNTS and given[0].division.count is not None:
                return given[0].division.count
            mixed = any(compat_distributed.is_distributed(type(t)) for t in tensors_in((args, kwargs)))
            if mixed or name in _LEAVES or name in _COUNTS:
                return _of_whole(func, args, kwargs)
            try:
                with _element_by_element(given):
                    out = func(*args, **kwargs)
            except _CrossesElements:
                return _crossing(name, func, args, kwargs, given)
            marked = _marked(out, given, args, kwargs)
            by_torch = all(g.division.distributed is not None for g in given)
            lost = by_torch and any(t.division is _UNKNOWN for t in _parts_in(marked))
            return _of_whole(func, args, kwargs) if lost else marked

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return copy.deepcopy(self.as_subclass(torch.Tensor), memo)


def _parts_in(tree: Any) -> Iterator[PartOfGradient]:
    return (t for t in tensors_in(tree) if isinstance(t, PartOfGradient))


def _marked(out: Any, given: Sequence[PartOfGradient], args: Any, kwargs: Any) -> Any:
    """Results are parts, divided as that one of those given which they are like; what was handed in stays what it
    was."""
    known = {id(t) for t in tensors_in((args, kwargs))}

    def one(t: Any) -> Any:
        if type(t) is not torch.Tensor or id(t) in known:
            return t
        alike = next((g.division for g in given if _lie(g) == _lie(t)), None)
        return PartOfGradient.of(t, alike or _UNKNOWN)

    return map_leaves(one, out)


def _lie(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride()


class _CrossesElements(Exception):
    """An op reads, of an element, what others are."""


class _ElementByElement(TorchDispatchMode):
    """Stops ahead of the first op that does not go element by element, or draws numbers."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self._flat = flat

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2].removesuffix("_")
        plain = goes_by_elements(func) and torch.Tag.nondeterministic_seeded not in func.tags
        if not plain and not (name == "index_put" and _by_mask(args)) and not (self._flat and name in _FLAT):
            raise _CrossesElements
        return func(*args, **(kwargs or {}))


def _by_mask(args: Sequence[Any]) -> bool:
    """Whether what is written to, of a tensor, a mask of its own size says."""
    first, places, *_ = args
    return (
        len(places) == 1
        and places[0] is not None
        and (places[0].dtype, places[0].shape) == (torch.bool, first.shape)
    )


@contextmanager
def _element_by_element(given: Sequence[PartOfGradient]) -> Iterator[None]:
    with _ElementByElement(all(g.division.distributed is None for g in given)):
        yield


def _crossing(
    name: str, func: Any, args: Any, kwargs: Mapping[str, Any], given: Sequence[PartOfGradient]
) -> Any:
    """What a function answers that does not go element by element."""
    if all(g.division.distributed is None for g in given) and _within_rows(name, args, kwargs):
        return _marked(func(*args, **kwargs), (), args, kwargs)
    return _of_whole(func, args, kwargs)


def _within_rows(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function asks no more than what each row has for itself."""
    first = args[0] if args else None
    if not isinstance(first, PartOfGradient) or not first.division.dims or name not in _ALONG_DIMS:
        return False
    place = _ALONG_DIMS[name]
    dims = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else None))
    dims = [dims] if isinstance(dims, int) and not isinstance(dims, bool) else dims
    if not isinstance(dims, (list, tuple)) or not dims:
        return False
    return not any(d % first.dim() in first.division.dims for d in dims)


def _of_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """What a function answers of DTensors in the places of parts, which it may write."""
    made: dict[int, Any] = {}
    back: dict[int, torch.Tensor] = {}
    even = True

    def whole(x: Any) -> Any:
        nonlocal even
        if not isinstance(x, PartOfGradient):
            return x
        if x.division.distributed is None:
            raise _refused(func)
        if id(x) not in made:
            made[id(x)] = x.division.distributed(x.as_subclass(torch.Tensor))
            back[id(made[id(x)])] = x
            even = even and compat_distributed.divides_evenly(made[id(x)])
        return made[id(x)]

    given, named = map_leaves(whole, args), map_leaves(whole, kwargs)
    others = [
        t
        for t in tensors_in((given, named))
        if t.numel() > 1 and isinstance(t, torch.Tensor) and not compat_distributed.is_distributed(type(t))
    ]
    if made and others:
        raise _refused(func)
    out = func(*given, **named)
    known = {id(t) for t in tensors_in((given, named))}

    def handed_back(t: Any) -> Any:
        if id(t) in back:
            return back[id(t)]
        again = id(t) not in known and even and compat_distributed.is_distributed(type(t))
        dims = compat_distributed.divided_dims(t) if again else frozenset()
        if not dims or not compat_distributed.divides_evenly(t):
            return t
        return PartOfGradient.of(t.to_local(), Division(dims, t.numel(), compat_distributed.maker_like(t)))

    return map_leaves(handed_back, out)


def _refused(func: Any) -> Unsupported:
    name = f"{getattr(func, '__name__', func)} of a gradient of which this rank has a part"
    if getattr(func, "__module__", "").startswith("torch.distributed."):
        return Unsupported(
            name, "other ranks have other rows of it, and it is averaged over all of them", "leave that out"
        )
    return Unsupported(
        f"{name} (a norm, a sum, whether all is finite, rows by number, …),",
        "it would be another one on each rank, where that of the whole gradient is meant",
        "ask that of step.named_parameters(), which has DTensors, or give fit clip_norm=, skip_nonfinite= or scaler=",
    )
