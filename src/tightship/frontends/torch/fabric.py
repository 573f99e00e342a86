"""Modules of Lightning's Fabric in a step. In mixed precision their results are hooked, and ask in each backward pass
whether ``fabric.backward`` runs it: of what that does beside (a GradScaler) a planned step takes none, which
`optimizer.given` refuses. So inside of a step results are not hooked. And what saves them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

__all__ = ["modules_of_fabric", "saves_by_kind", "without_backward_checks"]

_HOOKS: Final = "_register_backward_hook"


def modules_of_fabric(model: torch.nn.Module) -> list[Any]:
    """Those of ``model`` that ``fabric.setup`` has made."""
    return [
        m
        for m in model.modules()
        if type(m).__module__.startswith(("lightning.fabric.", "lightning_fabric."))
        and hasattr(type(m), _HOOKS)
    ]


def saves_by_kind(name: str) -> bool:
    """Whether the code of a Python module looks whether parameters are DTensors, and saves and loads them by state
    dicts: ``fabric.save`` and ``fabric.load`` of a ``ModelParallelStrategy`` find the model so."""
    return name in _SAVES


_SAVES: Final = ("lightning.fabric.strategies.model_parallel", "lightning_fabric.strategies.model_parallel")


@contextmanager
def without_backward_checks(modules: Iterable[Any]) -> Iterator[None]:
    modules = [m for m in modules if _HOOKS not in vars(m)]
    for m in modules:
        vars(m)[_HOOKS] = _same
    try:
        yield
    finally:
        for m in modules:
            del vars(m)[_HOOKS]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
