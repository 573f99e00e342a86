"""A program's slots -> the caller's own tensors, looked up anew for each step; and whether they are still the
same.

Steps write into the caller's parameters, buffers and optimizer state as eager would. What is checked before a
step is identity and address: it costs some microseconds, and whatever it misses is caught by the executor's
first run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from tightship.errors import BadInput
from tightship.frontends.torch import compat
from tightship.frontends.torch.program import Program

__all__ = ["Binding", "Identity"]


class Identity:
    """Whether model and optimizer (if there is one) are made of the objects they were made of at construction.

    Without an optimizer it does not matter where parameters lie: a forward pass reads them from wherever they are.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._groups = optimizer.param_groups if optimizer is not None else []
        self._modules = tuple(model.modules())
        self._members = tuple(m for module in self._modules for m in compat.members(module))
        self._tensors = (*model.parameters(), *model.buffers()) if optimizer is not None else ()
        self._known = self._now()

    def _now(self) -> tuple[Any, ...]:
        return (
            list(map(id, chain.from_iterable(m.values() for m in self._members))),
            [(t.data_ptr(), t.requires_grad) for t in self._tensors],
            [[id(p) for p in g["params"]] for g in self._groups],
        )

    def changed(self) -> str | None:
        """What is different now, for people; None if nothing is."""
        what = (
            "a module, parameter or buffer of the model was added or replaced",
            "a parameter or buffer was moved, resized or frozen",
            "the optimizer's parameter groups changed",
        )
        pairs = zip(what, self._now(), self._known, strict=True)
        return next((text for text, now, known in pairs if now != known), None)

    def modes(self) -> tuple[Any, ...]:
        """What else decides which ops eager would run: training modes, autocast, threads, determinism."""
        kinds = ("cpu", "cuda")
        return (
            tuple([m.training for m in self._modules]),
            tuple([torch.get_autocast_dtype(k) if torch.is_autocast_enabled(k) else None for k in kinds]),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
        )


class Binding:
    """Finds the tensors of ``program.slots``."""

    def __init__(
        self, program: Program, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._program, self._optimizer = program, optimizer
        # Of a slot: mapping and key (parameters, buffers), parameter and key (state), leaf number, or tensor.
        self._finders: list[tuple[str, Any, Any]] = []
        for slot in program.slots:
            if slot.role in ("parameter", "buffer"):
                self._finders.append((slot.role, *compat.tensor_home(model, slot.role, slot.key)))
            elif slot.role == "state":
                home, name = compat.tensor_home(model, "parameter", slot.key[0])
                self._finders.append((slot.role, home[name], slot.key[1]))
            elif slot.role == "input":
                self._finders.append((slot.role, None, slot.key))
            elif slot.role == "constant":
                self._finders.append((slot.role, program.constants[slot.key], None))
            else:
                raise BadInput("a slot's role is known", slot.role, f"slot {slot.key}")
        self._guarded = {(s.role, s.key): n for n, s in enumerate(program.slots)}

    def tensors(self, leaves: Sequence[Any]) -> list[Any]:
        """One tensor per slot; None for optimizer state that does not exist yet. ``leaves`` are the
        batch's.
        """
        state = self._optimizer.state if self._optimizer is not None else {}
        found: list[Any] = []
        for role, where, key in self._finders:
            if role == "state":
                found.append(state[where].get(key) if where in state else None)
            elif role == "input":
                found.append(leaves[key])
            else:
                found.append(where if key is None else where[key])
        return found

    def broken_guard(self, tensors: Sequence[Any]) -> str | None:
        """Where the captured ops depend on data that is no longer what it was; None if they do not."""
        for guard in self._program.guards:
            if not guard.holds({source: tensors[self._guarded[source]] for source in guard.sources}):
                return str(guard.place)
        return None
