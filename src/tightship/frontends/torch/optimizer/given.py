"""Optimizers as users give them: one, several in a list, or in a wrapper; and which classes are torch's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from tightship.errors import BadInput, Unsupported
from tightship.frontends.torch import compat_optimizers
from tightship.frontends.torch.optimizer.copy import copied

__all__ = ["Several", "as_one", "each", "independent", "settings", "twin_of"]

_INDEPENDENT = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
)  # fmt: skip


class Several:
    """Optimizers that step in turn, as one: all groups, and a step of each."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [g for o in self.optimizers for g in o.param_groups]

    def step(self) -> None:
        for o in self.optimizers:
            compat_optimizers.plain_step(type(o))(o)

    def zero_grad(self) -> None:
        for o in self.optimizers:
            o.zero_grad()


def each(optimizer: Any) -> tuple[Any, ...]:
    """The optimizers that one stands for: itself, as a rule."""
    return optimizer.optimizers if isinstance(optimizer, Several) else (optimizer,)


def as_one(optimizer: Any) -> Any:
    """The optimizer, or the several of a list or tuple as one, without the wrappers that packages put around each.
    Raises ``BadInput`` for an empty list and what is no optimizer, ``Unsupported`` for groups of another form, and
    for a wrapper that scales gradients."""
    if not isinstance(optimizer, (list, tuple)):
        return _unwrapped(optimizer)
    optimizer = [_unwrapped(o) for o in optimizer]
    if not optimizer:
        raise BadInput(
            "an empty list of optimizers: give one, or None for a backward pass alone", place="optimizer"
        )
    return optimizer[0] if len(optimizer) == 1 else Several(optimizer)


def _unwrapped(optimizer: Any) -> Any:
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        kind = type(optimizer).__name__
        fault = f"optimizer of type {kind}; give a torch.optim.Optimizer, several in a list, or None"
        raise BadInput(fault, place="optimizer")
    if optimizer is not None and not _has_groups(optimizer):
        raise Unsupported(
            f"an optimizer of the class {type(optimizer).__module__}.{type(optimizer).__qualname__}",
            "its param_groups are not dicts with params, as those of torch.optim.Optimizer are",
            "give fit None for the optimizer, call step.backward(batch), and its own step()",
        )  # fmt: skip
    package = next((p for p in _WRAPPERS if type(optimizer).__module__.startswith(f"{p}.")), None)
    if package is None:
        return optimizer
    by, before = _WRAPPERS[package]
    precision = getattr(getattr(optimizer, "_strategy", None), "precision", None)
    if any(getattr(x, "scaler", None) is not None for x in (optimizer, precision)):
        raise Unsupported(
            f"an optimizer of {by} with a GradScaler", "its step unscales gradients and may be left out",
            f"give fit the optimizer before {before}, and the scaler as scaler=",
        )  # fmt: skip
    callbacks = getattr(optimizer, "_callbacks", ())
    if any(callable(getattr(c, "on_after_optimizer_step", None)) for c in callbacks):
        raise Unsupported(
            f"an optimizer of {by} with callbacks", "a planned step does not call them",
            "leave them out, and do what they do behind the step",
        )  # fmt: skip
    return optimizer.optimizer


def _has_groups(optimizer: Any) -> bool:
    return all(isinstance(g, Mapping) and "params" in g for g in optimizer.param_groups)


_WRAPPERS: Final = {
    "accelerate": ("accelerate's", "accelerator.prepare"),
    "lightning.fabric": ("Fabric's", "fabric.setup"),
    "lightning_fabric": ("Fabric's", "fabric.setup"),
}
"""Packages that put a wrapper around each optimizer, whose step is the optimizer's where nothing scales."""


def twin_of(optimizer: Any, others: Mapping[int, torch.Tensor]) -> Any:
    """As `copied`, of several as well."""
    made = [copied(o, others) for o in each(optimizer)]
    return Several(made) if isinstance(optimizer, Several) else made[0]


def independent(optimizer: Any) -> bool:
    """Whether the optimizer is of a class of torch's that treats its parameters independently; subclasses are not."""
    cls = type(optimizer)
    return cls.__name__ in _INDEPENDENT and getattr(torch.optim, cls.__name__, None) is cls


def settings(optimizer: Any) -> tuple[Any, ...]:
    """What decides which ops a step of the optimizer is made of; other numbers are read anew at each step.

    Numbers that are zero leave ops out; of classes that are not torch's they may count, and are not looked at.
    """
    if isinstance(optimizer, Several):
        return tuple(settings(o) for o in optimizer.optimizers)
    known = independent(optimizer)

    def kind(name: str, value: Any) -> Any:
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, (int, float)):
            return bool(value) if known and "lr" not in name else "a number"
        return type(value).__name__

    rows = [{n: kind(n, x) for n, x in g.items() if n != "params"} for g in optimizer.param_groups]
    groups = [{n: x for n, x in row.items() if x != "a number"} for row in rows]  # a step may make some
    members = [[id(p) for p in g["params"]] for g in optimizer.param_groups]
    around = compat_optimizers.optimizer_hooks(optimizer), compat_optimizers.replaced_step(optimizer) is None
    return type(optimizer), compat_optimizers.plain_step(type(optimizer)), members, groups, around
