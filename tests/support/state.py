"""What a training loop leaves behind, as a value; and in what two such values differ, bit by bit."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["differences", "snapshot"]

_HELD = {"state", "param_groups", "defaults"}  # parts of an optimizer that have an entry of their own


def snapshot(
    model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **more: Any
) -> dict[str, Any]:
    """A copy of all that the next step reads: parameters (with gradients), buffers, modes, the optimizer's
    ``state_dict()``, hyperparameters and own attributes, random states, and ``more`` by name.
    """
    taken: dict[str, Any] = {"random": _random_states()}
    if model is not None:
        taken["parameters"] = {n: p.detach() for n, p in model.named_parameters()}
        taken["gradients"] = {n: p.grad for n, p in model.named_parameters()}
        taken["buffers"] = dict(model.named_buffers())
        taken["training"] = {n: m.training for n, m in model.named_modules()}
    if optimizer is not None:
        taken["optimizer"] = optimizer.state_dict()
        taken["attributes"] = {
            n: x for n, x in vars(optimizer).items() if n not in _HELD and not n.startswith("_optimizer_")
        }
    return {n: _copied(x) for n, x in {**taken, **more}.items()}


def differences(a: Any, b: Any, place: str = "") -> list[str]:
    """One line for each place where ``a`` and ``b`` differ: tensors and arrays in dtype, shape, strides or any bit
    (so that a NaN equals itself, and 0.0 is not -0.0), containers in type, keys or order, other values in type or
    value. Objects of other classes are compared by their attributes.
    """
    place = place or "value"
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _tensors(a, b, place)
    if type(a) is not type(b):
        return [f"{place}: {_short(a)} against {_short(b)}"]
    if isinstance(a, torch.Generator):
        return _tensors(a.get_state(), b.get_state(), place)
    if isinstance(a, np.ndarray):
        same = (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
        return [] if same else [f"{place}: arrays differ"]
    if isinstance(a, Mapping):
        keys, others = ([_key(k) for k in x] for x in (a, b))
        if keys != others:
            return [f"{place}: keys {_short(keys)} against {_short(others)}"]
        rows = zip(keys, a.values(), b.values(), strict=True)
        return [d for k, x, y in rows for d in differences(x, y, f"{place}[{k!r}]")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{place}: {len(a)} entries against {len(b)}"]
        return [
            d for k, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{place}[{k}]")
        ]
    if isinstance(a, float):
        same = np.float64(a).tobytes() == np.float64(b).tobytes()
        return [] if same else [f"{place}: {a!r} against {b!r}"]
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        fields = [f.name for f in dataclasses.fields(a)]
        return [d for n in fields for d in differences(getattr(a, n), getattr(b, n), f"{place}.{n}")]
    if callable(a) or a is b:
        return []  # functions are equal if their effects are
    if type(a).__eq__ is object.__eq__ and hasattr(a, "__dict__"):
        return differences(vars(a), vars(b), place)
    return [] if a == b else [f"{place}: {_short(a)} against {_short(b)}"]


def _key(key: Any) -> Any:
    """A key to compare; a tensor's is its place among them, as in the state of an optimizer."""
    return f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else key


def _tensors(a: torch.Tensor, b: torch.Tensor, place: str) -> list[str]:
    if a.layout is not torch.strided or b.layout is not torch.strided:
        rows = [] if a.layout == b.layout else [f"{place}: {a.layout} against {b.layout}"]
        return rows or _tensors(a.to_dense(), b.to_dense(), place)

    def kind(t: torch.Tensor) -> tuple[Any, ...]:
        return type(t).__name__, t.dtype, tuple(t.shape), t.stride(), str(t.device), t.requires_grad

    if kind(a) != kind(b):
        return [f"{place}: {kind(a)} against {kind(b)}"]
    left, right = (t.detach().resolve_conj().resolve_neg().contiguous().cpu() for t in (a, b))
    if left.numel() == 0:
        return []
    left, right = (
        t.reshape(-1, 1).clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (left, right)
    )
    wrong = int((left != right).any(dim=1).sum())
    return [f"{place}: {wrong} of {a.numel()} elements differ"] if wrong else []


def _random_states() -> dict[str, Any]:
    taken = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if torch.cuda.is_available():
        taken["cuda"] = torch.cuda.get_rng_state_all()
    return taken


def _copied(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.detach().clone().requires_grad_(x.requires_grad)
    if isinstance(x, dict):
        return {k: _copied(v) for k, v in x.items()}
    if isinstance(x, list):
        return [_copied(v) for v in x]
    if type(x) is tuple:
        return tuple(_copied(v) for v in x)
    if callable(x):
        return x
    return copy.deepcopy(x)


def _short(x: Any) -> str:
    text = repr(x)
    return text if len(text) <= 100 else f"{text[:97]}..."
