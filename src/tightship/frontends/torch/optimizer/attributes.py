"""What an optimizer's step keeps beside tensors: values of Python alone in its groups and attributes."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tightship.frontends.torch.optimizer.tensors import SCALARS

__all__ = [
    "OWN",
    "Plain",
    "copy_plain",
    "fixed",
    "is_hooks",
    "not_fixed",
    "numbers_of",
    "plain_part",
    "set_numbers",
    "told",
    "traits",
    "unchanged_globals",
    "why_not_plain",
]


Plain = tuple[dict[str, Any], list[dict[str, Any]]]
"""Attributes of an optimizer and its groups without their parameters: values of Python, and tensors that its steps
only read (a rate, a table of codes)."""

Fixed = tuple[tuple[str, torch.Tensor, int], ...]
"""These tensors, each with where it is and the version of its contents."""


OWN = {"state", "param_groups", "step"}  # a scheduler's step counts calls of the real optimizer


def is_hooks(name: str) -> bool:
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def _homes(optimizer: Any, params: Sequence[Any]) -> list[Any]:
    states = [optimizer.state[p] for p in params if p in optimizer.state]
    return [vars(optimizer), *optimizer.param_groups, *(s for s in states if isinstance(s, dict))]


def numbers_of(optimizer: Any, params: Sequence[Any]) -> dict[tuple[int, Any], float]:
    """Every single number in attributes, groups and state, by home and name."""
    found: dict[tuple[int, Any], float] = {}
    for k, home in enumerate(_homes(optimizer, params)):
        for name, x in home.items():
            if isinstance(x, torch.Tensor):
                single = x.dim() == 0 and not x.is_complex()
            else:
                single = isinstance(x, (int, float)) and not isinstance(x, bool)
            if single:
                found[k, name] = float(x)
    return found


def set_numbers(optimizer: Any, params: Sequence[Any], names: Sequence[tuple[int, Any]], value: int) -> None:
    homes = _homes(optimizer, params)
    for k, name in names:
        x = homes[k][name]
        if isinstance(x, torch.Tensor):
            x.fill_(value)
        else:
            homes[k][name] = type(x)(value)


def plain_part(optimizer: Any) -> Plain:
    """A copy of the optimizer's attributes and groups, with the tensors themselves; `why_not_plain` must have had
    nothing to say."""
    attributes = {n: copy_plain(x) for n, x in vars(optimizer).items() if n not in OWN and not is_hooks(n)}
    groups = [{n: copy_plain(x) for n, x in g.items() if n != "params"} for g in optimizer.param_groups]
    return attributes, groups


def fixed(part: Plain) -> Fixed:
    """The tensors of an optimizer's `plain_part`."""
    return tuple(_fixed(part))


def _fixed(value: Any, where: str = "") -> Iterator[tuple[str, torch.Tensor, int]]:
    if isinstance(value, torch.Tensor):
        yield where, value, value._version
    elif isinstance(value, (dict, list, tuple)):
        for name, x in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _fixed(x, where or (name if isinstance(name, str) else ""))


def not_fixed(before: Fixed, now: Fixed) -> str | None:
    """Which of these tensors was written or replaced in between; None if none was."""
    for (where, a, version), (_, b, later) in zip(before, now, strict=False):
        if a is not b or version != later:
            return where
    return None if len(before) == len(now) else "how many tensors it holds"


def told(value: Any) -> str:
    """What two plain parts are compared by; of tensors, which `not_fixed` sees, that they are there."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}"
    if isinstance(value, dict):
        return repr([(k, told(x)) for k, x in value.items()])
    if isinstance(value, (list, tuple)):
        return repr((type(value), *map(told, value)))
    return repr(value)


def traits(optimizer: Any) -> tuple[Any, ...]:
    """What else than its groups may decide what an optimizer does: plain attributes, and the same of optimizers
    inside of it."""
    rows: list[Any] = []
    for name, value in sorted(vars(optimizer).items()):
        if name in OWN or is_hooks(name):
            continue
        if isinstance(value, torch.optim.Optimizer):
            groups = [{n: told(x) for n, x in g.items() if n != "params"} for g in value.param_groups]
            rows.append((name, type(value).__qualname__, groups, traits(value)))
        else:
            rows.append((name, told(value) if _is_plain(value) else type(value).__qualname__))
    return tuple(rows)


def why_not_plain(optimizer: Any) -> str | None:
    """Which attribute or group value is neither a value of Python nor a plain tensor (an object, say); None if none
    is."""
    for name, value in vars(optimizer).items():
        if name not in OWN and not is_hooks(name) and not _is_plain(value):
            return f"its attribute {name!r} holds a {type(value).__name__}"
    for k, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params" and not _is_plain(value):
                return f"{name!r} of group {k} holds a {type(value).__name__}"
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(_is_plain(x) for kv in value.items() for x in kv)
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None  # what it is given is all it knows
    if type(value) is torch.Tensor:
        return not value.requires_grad
    return isinstance(value, SCALARS)


def copy_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: copy_plain(x) for k, x in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(copy_plain, value))
    return value


@contextmanager
def unchanged_globals(optimizer: Any) -> Iterator[list[str]]:
    """Puts back what its classes and their modules count; yields a list that then names what was changed."""
    classes = [
        c for c in type(optimizer).__mro__ if c.__module__.partition(".")[0] not in ("torch", "builtins")
    ]
    modules = {c.__module__: sys.modules.get(c.__module__) for c in classes}
    homes: list[Any] = [*classes, *(m for m in modules.values() if m is not None)]
    before = [
        {n: copy_plain(x) for n, x in vars(home).items() if not n.startswith("__") and _is_plain(x)}
        for home in homes
    ]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for home, was in zip(homes, before, strict=True):
            for n, x in was.items():
                if told(vars(home).get(n)) != told(x):
                    setattr(home, n, x)
                    changed.append(f"{home.__name__}.{n}")
