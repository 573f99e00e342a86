"""Calls that torch's function modes do not see: of autograd functions, scripted code and functional transforms.

A part of ``compat``, under the same rule: nothing else in tightship may import private interfaces.
"""

from __future__ import annotations

import functools
import importlib
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from tightship.frontends.torch import compat_distributed
from tightship.frontends.torch.compat_capture import nothing_compiled_elsewhere, patched


class Special:
    """Such a call as a function: equal for the same ``owner``; ``inner_code`` is the caller's Python in it, and
    ``keys`` what its outcome follows from beside its arguments, as far as it is known; ``functions`` likewise, of
    functions among these."""

    keys: tuple[Any, ...] = ()
    functions: tuple[Any, ...] = ()

    def __init__(
        self, name: str, call: Callable[..., Any], owner: Any, inner_code: tuple[Any, ...] = ()
    ) -> None:
        self.__name__, self._call, self.owner, self.inner_code = name, call, owner, inner_code

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    @property
    def is_scripted(self) -> bool:
        return self.owner in (torch._C.ScriptFunction, torch._C.ScriptMethod)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Special) and other._parts() == self._parts()

    def _parts(self) -> tuple[Any, ...]:
        return self.__name__, self.owner, self.inner_code, self.keys, self.functions

    def __hash__(self) -> int:
        return hash(self.__name__)


Seen = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def calls_seen(seen: Seen, *, within: bool = False) -> Iterator[None]:
    """``seen(function, args, kwargs)`` makes calls of autograd functions, scripted code and functional transforms,
    and is told when autocast forgets what it has converted. ``within``: inside of such a call, where what hands back
    functions is seen, too."""

    def through(owner: Any, name: str) -> Any:
        call = getattr(owner, name)
        return lambda *args, **kwargs: seen(Special(name, call, owner), args, kwargs)

    with ExitStack() as stack:
        stack.enter_context(_applications_seen(seen))
        inner = _WITHIN if within else ()
        for owner, name in (*_UNSEEN, *inner, *compat_distributed.methods_of_parts()):
            stack.enter_context(patched(owner, name, through(owner, name)))
        yield


_APPLY: types.FunctionType = vars(torch.autograd.Function)["apply"].__func__
_apply = types.FunctionType(
    _APPLY.__code__, _APPLY.__globals__, _APPLY.__name__, _APPLY.__defaults__, _APPLY.__closure__
)
"""`torch.autograd.Function.apply`, whatever the code of that one is just now."""
_seen_by: dict[int, Seen] = {}
"""By thread, who is told of autograd functions."""
_swapping = threading.Lock()


class _Standing:
    """Has the code that `torch.autograd.Function.apply` has meanwhile: who has bound it before, as PyTorch's
    documentation advises (``relu = ReLU.apply``), holds the same function, and is not told of another one."""

    @classmethod
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        __class__  # type: ignore[name-defined]  # noqa: B018 - a free variable, as what this stands in for has
        from tightship.frontends.torch.compat_calls import _applied

        return _applied(cls, *args, **kwargs)


def _applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
    seen = _seen_by.get(threading.get_ident())
    if seen is None:
        return _apply(cls, *args, **kwargs)
    code = (cls.forward, cls.backward, *([cls.setup_context] if _has_setup(cls) else []))
    return seen(Special(f"{cls.__name__}.apply", functools.partial(_apply, cls), cls, code), args, kwargs)


@contextmanager
def _applications_seen(seen: Seen) -> Iterator[None]:
    """``seen`` makes the calls of autograd functions on this thread."""
    mine = threading.get_ident()
    with _swapping:
        outer = _seen_by.get(mine)
        _seen_by[mine] = seen
        _APPLY.__code__ = vars(_Standing)["apply"].__func__.__code__
    try:
        with nothing_compiled_elsewhere():
            yield
    finally:
        with _swapping:
            del _seen_by[mine]
            if outer is not None:
                _seen_by[mine] = outer
            if not _seen_by:
                _APPLY.__code__ = _apply.__code__


def _has_setup(cls: Any) -> bool:
    return cls.setup_context is not torch.autograd.Function.setup_context


_UNSEEN: list[tuple[Any, str]] = [
    (torch._C.ScriptFunction, "__call__"),
    (torch._C.ScriptMethod, "__call__"),
    (importlib.import_module("torch._functorch.apis"), "vmap_impl"),
    (importlib.import_module("torch._functorch.eager_transforms"), "grad_impl"),
    (importlib.import_module("torch._functorch.eager_transforms"), "grad_and_value_impl"),
    (torch, "clear_autocast_cache"),
]
_WITHIN = [
    (importlib.import_module("torch._functorch.eager_transforms"), name)
    for name in ("_vjp_with_argnums", "_jvp_with_argnums")
]
