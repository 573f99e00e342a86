"""Parameters of which this rank has a part, in the hands of code between steps.

Code may have whole tensors beside them, such as an average of weights from before ``fit``. A part would be added to
these row by row wherever its shape broadcasts, without an error: what mixes the two is done with the whole
parameter, as in eager.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch

from tightship.execute.part_of_gradient import PartOfGradient
from tightship.execute.parts_in_hand import reading
from tightship.frontends.torch import compat_optimizers
from tightship.frontends.torch.program import tensors_in
from tightship.frontends.torch.structure import map_leaves

__all__ = ["PartInHand", "at_work", "hold", "plain"]

_UNMARKED: Final = {"as_subclass"} | {
    f"{n}_like" for n in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")
}
"""Functions whose results are not the parameter's values, and those that give a plain tensor."""
_DATA: Final = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SETTERS: Final = tuple(getattr(torch.Tensor, name).__set__ for name in ("data", "grad", "requires_grad"))


class Way(Protocol):
    """How a parameter is divided."""

    def meets(self, other: torch.Tensor) -> bool:
        """Whether code that mixes a part with ``other`` means the whole parameter."""

    def between(self, part: torch.Tensor) -> Any:
        """The whole parameter; what is written to it is written to the part."""


class _InHand:
    """Of a tensor that is a part, or is made of one element by element; ``way`` is the parameter's."""

    __slots__ = ()
    way: Way

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, PartOfGradient) for kind in types):
            return NotImplemented  # it knows what may be asked of both
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if reading.own or func in _SETTERS:
            return _plainly(func, args, kwargs)
        meeting = {id(t) for row in _rows(name, args, kwargs) for t in _meeting(row)}
        if meeting:

            def whole(t: Any) -> Any:
                return t.way.between(t) if id(t) in meeting else t

            return func(*map_leaves(whole, args), **map_leaves(whole, kwargs))
        out = _plainly(func, args, kwargs)
        if name in _UNMARKED or (name == "__get__" and func != _DATA):
            return out
        return _marked(out, [*tensors_in((args, kwargs))])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


class PartInHand(_InHand, torch.Tensor):
    """What is made of a part, or another view of it."""

    def __deepcopy__(self, memo: Any) -> Any:
        return plain(self).__deepcopy__(memo)


class _PartOfParameter(_InHand, torch.nn.Parameter):
    """A parameter, between steps."""

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) not in memo:
            with reading.parts():
                made = torch.nn.Parameter(plain(self).detach().clone(), self.requires_grad)
            memo[id(self)] = made
            hold(made, self.way)
            _show(made, self.way)
        return memo[id(self)]


compat_optimizers.go_through_lists_of(_PartOfParameter)


def _plainly(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _rows(name: str, args: Any, kwargs: Any) -> Iterator[list[Any]]:
    """The tensors that a function mixes: of lists, those at the same place in each."""
    if not name.startswith(("_foreach_", "_fused_")):
        yield [*tensors_in((args, kwargs))]
        return
    given = (*args, *kwargs.values())
    lists = [x for x in given if isinstance(x, (list, tuple))]
    most = max(map(len, lists), default=0)
    for row in zip(*(x for x in lists if len(x) == most), strict=True):
        yield [t for t in row if isinstance(t, torch.Tensor)]


def _meeting(row: list[Any]) -> list[Any]:
    """The parts beside whole tensors."""
    parts = [t for t in row if isinstance(t, _InHand)]
    with torch._C.DisableTorchFunctionSubclass():
        others = [t for t in row if not isinstance(t, _InHand)]
        return parts if any(p.way.meets(t) for p in parts for t in others) else []


def _marked(out: Any, given: list[Any]) -> Any:
    known = {id(t) for t in given}
    with torch._C.DisableTorchFunctionSubclass():
        ways = {t.shape: t.way for t in reversed(given) if isinstance(t, _InHand)}  # type: ignore[attr-defined]

    def one(t: Any) -> Any:
        if type(t) is not torch.Tensor or id(t) in known or t.shape not in ways:
            return t
        t.__class__ = PartInHand
        t.way = ways[t.shape]  # type: ignore[attr-defined]
        return t

    return map_leaves(one, out)


def plain(t: Any) -> Any:
    """The same tensor, or parameter, as any other."""
    if not isinstance(t, _InHand):
        return t
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(t, PartInHand):
            return t.as_subclass(torch.Tensor)
        made = torch.nn.Parameter(t.detach(), t.requires_grad)  # type: ignore[attr-defined]
        made.grad = t.grad  # type: ignore[attr-defined]
        return made


# --- when they are ---


class _Held:
    """Of this process: parameters that are parts, by id, and how many steps are at work."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[weakref.ref[Any], Way]] = {}
        self.working = 0


_held = _Held()


def hold(parameter: torch.Tensor, way: Way) -> None:
    """From the end of the step on that is at work, ``parameter`` is a part in the hands of code."""
    key = id(parameter)
    _held.rows[key] = weakref.ref(parameter, lambda _: _held.rows.pop(key, None)), way


@contextmanager
def at_work() -> Iterator[None]:
    """Inside, parts are parameters like all others: no code of the caller's has them in hand."""
    _held.working += 1
    if _held.working == 1:
        for ref, _ in [*_held.rows.values()]:
            if isinstance(p := ref(), _PartOfParameter):
                p.__class__ = torch.nn.Parameter
    try:
        yield
    finally:
        _held.working -= 1
        for ref, way in [*_held.rows.values()] if not _held.working else ():
            _show(ref(), way)


def _show(parameter: Any, way: Way) -> None:
    if type(parameter) is torch.nn.Parameter and not _held.working:
        parameter.__class__ = _PartOfParameter
        parameter.way = way  # type: ignore[attr-defined]
