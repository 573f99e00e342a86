"""Copies of an optimizer on other tensors; and what its step keeps beside tensors: groups and attributes."""

from __future__ import annotations

import copy
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tightship.frontends.torch import compat

__all__ = [
    "Disagreement",
    "Plain",
    "Turns",
    "bare",
    "copied",
    "kept_tensors",
    "plain_part",
    "stepped",
    "unchanged_globals",
    "why_not_plain",
]


Plain = tuple[dict[str, Any], list[dict[str, Any]]]
"""Attributes of an optimizer and its groups without their parameters, values of Python alone."""

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type)
_OWN = {"state", "param_groups", "step"}  # a scheduler's step counts calls of the real optimizer


def stepped(
    optimizer: Any, step: Callable[..., Any], pairs: Iterable[tuple[torch.Tensor, torch.Tensor | None]]
) -> None:
    """Run ``step(optimizer)`` with ``pairs`` of parameters and their gradients; ``p.grad`` stays as it was.

    The parameters of the optimizer that are not among them have no gradient.
    """
    given = {id(p): g for p, g in pairs}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.grad for p in params]
    try:
        for p in params:
            p.grad = given.get(id(p))
        step(optimizer)
    finally:
        for p, was in zip(params, before, strict=True):
            p.grad = was


def bare(optimizer: Any) -> Any:
    """An object of the optimizer's class, made without its constructor, whose defaults may differ from the groups."""
    cls: Any = type(optimizer)
    made = cls.__new__(cls)
    for name, value in vars(optimizer).items():
        if _is_hooks(name):
            made.__dict__[name] = type(value)()
    return made


def copied(optimizer: Any, others: Mapping[int, torch.Tensor], *, alone: bool = False) -> Any:
    """A copy of the optimizer, state and attributes included, with ``others[id(p)]`` in the place of parameter ``p``.

    A parameter that is not among them stands there as another object on the same data, without a gradient and without
    state: run the copy with gradients for ``others`` alone. Where ``alone``, for optimizers that step each parameter
    by itself, it is left out of its group, which is quicker by far where there are many. Step hooks are left out.
    Raises what copying an attribute raises.
    """
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in memo:
                memo[id(p)] = others.get(id(p))
                if memo[id(p)] is None and not alone:
                    memo[id(p)] = torch.nn.Parameter(p.detach(), p.requires_grad)
    made = _copied(optimizer, memo, frozenset(memo) - frozenset(others))
    for group in made.param_groups if alone else ():
        group["params"] = [p for p in group["params"] if p is not None]
    return made


def _copied(optimizer: Any, memo: dict[int, Any], left_out: frozenset[int]) -> Any:
    made = bare(optimizer)
    memo[id(optimizer)] = made
    for value in vars(optimizer).values():  # an optimizer's own way of being copied forgets its attributes
        if isinstance(value, torch.optim.Optimizer) and id(value) not in memo:
            _copied(value, memo, left_out)
    state = optimizer.state
    if id(state) not in memo:
        rows = [(k, x) for k, x in state.items() if id(k) not in left_out]
        memo[id(state)] = defaultdict(dict, {copy.deepcopy(k, memo): copy.deepcopy(x, memo) for k, x in rows})
    for name, value in vars(optimizer).items():
        if not _is_hooks(name) and name != "step":
            made.__dict__[name] = copy.deepcopy(value, memo)
    return made


def _is_hooks(name: str) -> bool:
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def kept_tensors(optimizer: Any) -> list[torch.Tensor]:
    """The tensors in the optimizer's state, groups and attributes, parameters left out."""
    params = {id(p) for g in optimizer.param_groups for p in g["params"]}
    found = _tensors([list(vars(optimizer).items())], set())
    return [t for t in found if id(t) not in params]


def _tensors(tree: Any, seen: set[int]) -> Iterable[torch.Tensor]:
    if id(tree) in seen:
        return
    seen.add(id(tree))
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, torch.optim.Optimizer):
        yield from _tensors(vars(tree), seen)
    elif isinstance(tree, Mapping):
        for x in tree.values():
            yield from _tensors(x, seen)
    elif isinstance(tree, (list, tuple)):
        for x in tree:
            yield from _tensors(x, seen)


# --- groups and attributes ------------------------------------------------------------------------------------


def plain_part(optimizer: Any) -> Plain:
    """A copy of the optimizer's attributes and groups; `why_not_plain` must have had nothing to say."""
    attributes = {n: _copy(x) for n, x in vars(optimizer).items() if n not in _OWN and not _is_hooks(n)}
    groups = [{n: _copy(x) for n, x in g.items() if n != "params"} for g in optimizer.param_groups]
    return attributes, groups


def why_not_plain(optimizer: Any) -> str | None:
    """Which attribute or group value is no value of Python alone, such as a tensor or a function; None if none is."""
    for name, value in vars(optimizer).items():
        if name not in _OWN and not _is_hooks(name) and not _is_plain(value):
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
    return isinstance(value, _SCALARS)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copy(x) for k, x in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copy, value))
    return value


class Turns:
    """An optimizer's step, a parameter at a time.

    Each of ``total`` turns starts from attributes and groups as they were before the step, as each parameter does
    when all are stepped at once; what they become is written to the optimizer after the last turn. A parameter that
    has had its turn begins the next step.
    """

    def __init__(self, optimizer: Any, total: int) -> None:
        self.optimizer, self.total = optimizer, total
        self._step = compat.plain_step(type(optimizer))
        self._had: set[int] = set()
        self._before: Plain = ({}, [])
        self._attributes: dict[str, Any] | None = None
        self._groups: dict[int, tuple[bool, dict[str, Any]]] = {}  # whether it is a parameter's own group

    def run(self, group: int, param: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Step ``param`` of ``param_groups[group]``.

        Raises ``Disagreement`` when the turns of one step make different things of attributes and groups."""
        if not self._had or id(param) in self._had:
            self._had, self._before = set(), plain_part(self.optimizer)
            self._attributes, self._groups = None, {}
        self._had.add(id(param))
        one = self._alone(group, param)
        stepped(one, self._step, [(param, grad)])
        self._note(group, *plain_part(one))
        if len(self._had) == self.total:
            self._commit()
            self._had = set()

    def _alone(self, group: int, param: torch.Tensor) -> Any:
        one = bare(self.optimizer)
        attributes, groups = self._before
        one.__dict__.update({n: _copy(x) for n, x in attributes.items()})
        one.state = self.optimizer.state
        one.param_groups = [
            {"params": [param] if k == group else []} | {n: _copy(x) for n, x in g.items()}
            for k, g in enumerate(groups)
        ]
        return one

    def _note(self, group: int, attributes: dict[str, Any], groups: Sequence[dict[str, Any]]) -> None:
        if len(groups) != len(self._before[1]):
            raise Disagreement("the number of its groups changes")
        _agree("its attributes", self._attributes, attributes)
        self._attributes = attributes
        for k, now in enumerate(groups):
            own, known = self._groups.get(k, (False, None))
            if known is None or (k == group and not own):
                self._groups[k] = k == group, now
            elif own == (k == group):
                _agree(f"group {k}", known, now)

    def _commit(self) -> None:
        attributes, groups = self._before
        _write(vars(self.optimizer), attributes, self._attributes or {})
        for k, (_, now) in self._groups.items():
            _write(self.optimizer.param_groups[k], groups[k], now)


class Disagreement(Exception):
    """The turns of one step do not make the same of groups and attributes."""


def _agree(what: str, known: dict[str, Any] | None, now: dict[str, Any]) -> None:
    if known is None or repr(known) == repr(now):
        return
    names = sorted(n for n in {*known, *now} if repr(known.get(n)) != repr(now.get(n)))
    raise Disagreement(f"{what}: {', '.join(names) or 'their order'}")


def _write(home: Any, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for n in before:
        if n not in after:
            home.pop(n, None)
    for n, x in after.items():
        if n in before and repr(before[n]) == repr(x):
            continue
        if isinstance(x, (list, dict)):
            raise Disagreement(f"{n!r} is changed, which others may hold")
        home[n] = x


@contextmanager
def unchanged_globals(optimizer: Any) -> Iterator[list[str]]:
    """Puts back what its classes and their modules count; yields a list that then names what was changed."""
    classes = [
        c for c in type(optimizer).__mro__ if c.__module__.partition(".")[0] not in ("torch", "builtins")
    ]
    modules = {c.__module__: sys.modules.get(c.__module__) for c in classes}
    homes: list[Any] = [*classes, *(m for m in modules.values() if m is not None)]
    before = [
        {n: _copy(x) for n, x in vars(home).items() if not n.startswith("__") and _is_plain(x)}
        for home in homes
    ]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for home, was in zip(homes, before, strict=True):
            for n, x in was.items():
                if repr(vars(home).get(n)) != repr(x):
                    setattr(home, n, x)
                    changed.append(f"{home.__name__}.{n}")
