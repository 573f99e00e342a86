"""What the outcome of a Python function follows from beside its arguments, as far as its code tells."""

from __future__ import annotations

import dis
import functools
import threading
import types
from collections.abc import Mapping
from typing import Any

import torch

from tightship.frontends.torch import compat
from tightship.frontends.torch.python_state import globals_of
from tightship.frontends.torch.rerun.function_trace import form

__all__ = ["function_key", "inner_key", "settled_key", "understood"]


def understood(fn: Any) -> bool:
    """Whether a function's outcome follows from its arguments alone, as far as its code tells: it has no closure, no
    defaults and no object that it is bound to, and its globals are modules, functions and classes of torch. For
    functions of the caller's own, another may stand under that name in the next step."""
    if not isinstance(fn, types.FunctionType):
        return _of_torch(fn)
    if hasattr(fn, "__wrapped__") and str(fn.__globals__.get("__name__")).startswith("torch."):
        return understood(fn.__wrapped__)  # once_differentiable, custom_fwd
    if fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__ or vars(fn):
        return False
    if str(fn.__globals__.get("__name__")).startswith("tightship."):  # gathers and averages of several ranks
        return True
    return all(_harmless(fn.__globals__, name) for name in globals_of(fn.__code__))


_EFFECTS = {
    "update", "setdefault", "pop", "popitem", "clear", "train", "eval", "add_module", "register_buffer",
    "register_parameter", "__setattr__", "__dict__",
}  # fmt: skip
"""By which code changes a dict or a module."""


def inner_key(fn: Any) -> tuple[Any, ...] | None:
    """As `settled_key`, of code of an autograd function, which may set attributes of its context, the first
    argument."""
    if understood(fn):
        return (fn,)
    while hasattr(fn, "__wrapped__") and str(fn.__globals__.get("__name__")).startswith("torch."):
        fn = fn.__wrapped__  # once_differentiable, custom_fwd
    return settled_key(fn, context=True)


def function_key(fn: Any) -> tuple[Any, ...] | None:
    """As `settled_key`, of a function or module that a functional transform calls; functions that the code writes
    anew in each step have the same key."""
    if isinstance(fn, torch.nn.Module):
        return _of_modules(fn)
    of_torch = isinstance(fn, types.FunctionType) and str(fn.__globals__.get("__name__")).startswith("torch.")
    if of_torch and fn.__closure__:  # what grad(f) and others return, which call what they close over
        parts = [_inside(_content(cell)) for cell in fn.__closure__]
        return None if None in parts else (fn.__code__, *parts)
    return (getattr(fn, "__code__", fn),) if understood(fn) else settled_key(fn)


def _inside(value: Any) -> Any:
    if isinstance(value, types.ModuleType) and value.__name__.startswith("torch."):
        return value.__name__
    return function_key(value) if callable(value) else _settled(value)


def settled_key(fn: Any, *, context: bool = False) -> tuple[Any, ...] | None:
    """What the outcome of a function follows from beside its arguments, to be compared from step to step: its code,
    and in closures, defaults and globals plain values, torch's functions, modules and tensors, which become constants
    of the program. None where its code does not tell, or changes what it finds there."""
    if isinstance(fn, functools.partial):
        parts = [_settled(x) for x in (fn.func, *fn.args, *fn.keywords.values())]
        return None if None in parts else (tuple(fn.keywords), *parts)
    if not isinstance(fn, types.FunctionType):
        return (fn,) if _of_torch(fn) else None
    if fn.__globals__.get("__name__") == "torch.utils._contextlib" and hasattr(
        fn, "__wrapped__"
    ):  # @torch.no_grad()
        within = next(
            (c for x in fn.__closure__ or () if (c := getattr(_content(x), "__self__", None))), None
        )
        inner = settled_key(fn.__wrapped__) if isinstance(within, torch.no_grad | torch.enable_grad) else None
        return None if inner is None else (type(within), inner)
    names = _globals_without_effects(fn.__code__, context)
    if names is None or vars(fn):
        return None
    found: list[Any] = [fn.__code__]
    defaults = (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())
    for value in (*defaults, *(_content(cell) for cell in fn.__closure__ or ())):
        found.append(_settled(value, fn))
    for name in names:
        if not _harmless(fn.__globals__, name):
            found.append(_settled(fn.__globals__.get(name, fn), fn))
    dicts = any(type(x) is tuple and x[:1] == (dict,) for x in found)
    return None if None in found or (dicts and _sets_elements(fn.__code__)) else tuple(found)


def _settled(value: Any, inside: Any = None) -> Any:
    """A value that stands for another one in comparisons; None where the value may be changed in place."""
    if isinstance(
        value, (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
    ):
        return type(value), repr(value)
    if isinstance(value, torch.Tensor):
        return None if compat.is_fake(value) else (Identical(value), form(value))
    if isinstance(value, torch.optim.Optimizer):
        return Identical(value)
    if isinstance(value, torch.nn.Module):
        return _of_modules(value)
    if isinstance(value, tuple):
        parts = [_settled(x, inside) for x in value]
        return None if None in parts else (tuple, *parts)
    if type(value) is dict and len(value) < 10_000:  # that of optimizers by parameter
        parts = [_settled(x, inside) for pair in value.items() for x in pair]
        return None if None in parts else (dict, *parts)
    return None if value is inside else settled_key(value)


def _of_modules(top: torch.nn.Module) -> tuple[Any, ...] | None:
    """What a call of a module follows from, its own parameters aside: its modules, their attributes and the code of
    their classes. None where that does not tell, or sets or changes attributes."""
    if id(top) in _walk.under_way:  # a function among its attributes has it
        return (Identical(top),)
    _walk.under_way |= {id(top)}
    try:
        return _of_each(list(top.modules()))
    finally:
        _walk.under_way -= {id(top)}


class _Walk(threading.local):
    """The modules that keys are being made of."""

    under_way: frozenset[int] = frozenset()


_walk = _Walk()


def _of_each(modules: list[torch.nn.Module]) -> tuple[Any, ...] | None:
    if compat.has_global_hooks():
        return None
    found: list[Any] = []
    for m in modules:
        if any(getattr(m, hooks) for hooks in _HOOKS) or "forward" in vars(m):
            return None
        kept = [(name, _of_tensor(t)) for name, t in (*m._parameters.items(), *m._buffers.items())]
        plain = {name: _settled(x) for name, x in vars(m).items() if name not in _INTERNAL}
        if None in plain.values() or any(map(_has_dict, plain.values())):  # whose elements code may set
            return None
        found += [Identical(m), tuple(m._modules), tuple(kept), tuple(plain.items())]
    code = _code_of_classes({type(m) for m in modules})
    return None if code is None else (*found, *code)


def _has_dict(key: Any) -> bool:
    return isinstance(key, tuple) and (key[:1] == (dict,) or any(map(_has_dict, key)))


def _of_tensor(tensor: torch.Tensor | None) -> Any:
    """Stand-ins are of what the step knows by itself."""
    return "own" if tensor is None or compat.is_fake(tensor) else (Identical(tensor), form(tensor))


def _code_of_classes(classes: set[type]) -> list[Any] | None:
    """The keys of all functions and values of classes other than torch's: who has a module may call any of them. None
    where one does not tell."""
    own = {c: None for k in classes for c in k.__mro__ if not _of_torch(c) and c is not object}
    found: list[Any] = []
    for name, value in (pair for c in own for pair in vars(c).items()):
        if name in _OVERRIDES:
            return None
        if name in _NOT_CALLED or (name.startswith("__") and not isinstance(value, types.FunctionType)):
            continue
        parts = (value.fget, value.fset) if isinstance(value, property) else (value,)
        for part in (getattr(x, "__func__", x) for x in parts):
            key = _settled(part)
            if key is None or (isinstance(part, types.FunctionType) and _sets_elements(part.__code__)):
                return None
            found.append((name, key))
    return found


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_INTERNAL = {n for n in vars(torch.nn.Module()) if n != "training"}
"""Attributes of every module: its parameters, buffers, modules and hooks."""
_OVERRIDES = {"__call__", "__getattr__", "__getattribute__", "__setattr__", "__torch_function__"}
_NOT_CALLED = {"__init__", "__repr__", "extra_repr"}
"""Of a module that is there, by code that computes."""


class Identical:
    """Equal for the same object, which it keeps."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identical) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty so far
        return cell


@functools.lru_cache(maxsize=1024)
def _globals_without_effects(code: types.CodeType, context: bool) -> tuple[str, ...] | None:
    """The globals that code names; None where it sets something that outlives it, other than elements, and other than
    attributes of its first argument, if that is a ``context``."""
    names = globals_of(code)
    if "<writes>" in names:
        return None
    for one in _with_inner(code):
        owner: Any = None
        for i in dis.get_instructions(one):
            outer = i.opname == "STORE_DEREF" and i.argval in one.co_freevars
            own = context and one is code and owner == ("LOAD_FAST", *code.co_varnames[:1])
            if outer or (i.opname == "STORE_ATTR" and i.argval not in ("grad", "data") and not own):
                return None
            owner = i.opname, i.argval
        if _EFFECTS & {*one.co_names}:
            return None
    return tuple(sorted(names))


@functools.lru_cache(maxsize=1024)
def _sets_elements(code: types.CodeType) -> bool:
    return any(
        "_SUBSCR" in i.opname and i.opname != "BINARY_SUBSCR"
        for c in _with_inner(code)
        for i in dis.get_instructions(c)
    )


def _with_inner(code: types.CodeType) -> list[types.CodeType]:
    every = [code]
    for one in every:
        every += [c for c in one.co_consts if isinstance(c, types.CodeType)]
    return every


_NOT_HARMLESS = {
    "open", "input", "eval", "exec", "globals", "locals", "vars", "next", "id", "print", "setattr", "delattr",
    "breakpoint", "__import__",
}  # fmt: skip


def _harmless(scope: Mapping[str, Any], name: str) -> bool:
    builtin = scope.get("__builtins__", {})
    known = vars(builtin) if isinstance(builtin, types.ModuleType) else builtin
    if name not in scope:
        return name in known and name not in _NOT_HARMLESS
    value = scope[name]
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in ("torch", "math")
    return _of_torch(value)


def _of_torch(value: Any) -> bool:
    """Whether this is a function, class, op or constant of torch. Tensors, modules and generators are not: they can
    be replaced or changed."""
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
        return str(value.__module__ or "").partition(".")[0] in ("torch", "math")
    return compat.is_fixed(value)
