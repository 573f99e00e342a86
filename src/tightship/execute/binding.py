"""A program's slots -> the caller's own tensors, looked up anew for each step; and whether they are still the
same.

Steps write into the caller's parameters, buffers and optimizer state as eager would. What is checked before a
step is identity and address: it costs some microseconds, and whatever it misses is caught by the executor's
first run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

from tightship.errors import BadInput
from tightship.frontends.torch import compat
from tightship.frontends.torch.optimizer.updates import settings
from tightship.frontends.torch.program import Program
from tightship.process_local import NotCopied

__all__ = ["Attributes", "Binding", "Identity"]


class Identity:
    """Whether model and optimizer (if there is one) are made of the objects they were made of at construction.

    Without an optimizer it does not matter where parameters lie: a forward pass reads them from wherever they are.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self._modules = tuple(model.modules())
        members = [m for module in self._modules for m in compat.members(module)]
        self._members = [m for m in members if m]
        self._empty = [m for m in members if not m]  # most are: most modules are leaves, or have no buffers
        self._objects = self._held()  # kept, or another could get the address of one that is gone
        self._tensors = (*model.parameters(), *model.buffers()) if optimizer is not None else ()
        self._known = self._now()

    def _held(self) -> list[Any]:
        return list(chain.from_iterable([m.values() for m in self._members]))

    def _now(self) -> tuple[Any, ...]:
        return (
            [(t.data_ptr(), t.requires_grad) for t in self._tensors],
            [compat.gradient_hooks(t) for t in self._tensors],
            settings(self._optimizer) if self._optimizer is not None else None,
        )

    def changed(self) -> str | None:
        """What is different now, for people; None if nothing is."""
        held = self._held()
        same = len(held) == len(self._objects) and all(map(is_, held, self._objects))
        if not same or any(self._empty):
            return "a module, parameter or buffer of the model was added or replaced"
        what = (
            "a parameter or buffer was moved, resized or frozen",
            "a hook on a parameter's gradient was added or removed",
            "the optimizer's parameter groups changed, or what is called around its step",
        )
        pairs = zip(what, self._now(), self._known, strict=True)
        return next((text for text, now, known in pairs if now != known), None)

    def modes(self) -> tuple[Any, ...]:
        """What else decides which ops eager would run: training modes, autocast, threads, types by default, …."""
        return (tuple([m.training for m in self._modules]), *self.settings())

    def settings(self) -> tuple[Any, ...]:
        """As `modes`, of the process alone: for what is run in evaluation mode, whatever the model is in."""
        kinds = ("cpu", "cuda")
        autocast = [torch.get_autocast_dtype(k) if torch.is_autocast_enabled(k) else None for k in kinds]
        return tuple(autocast), *compat.process_settings()


class Attributes:
    """Whether the Python attributes of a model's modules are what they were: numbers, functions, hooks, and those of
    plain objects, lists and mappings that modules hold (configurations).

    For a pass whose Python code does not run again. What modules reach in other ways (globals, closures) is not
    looked at. Most calls compare some thousand pointers, which takes microseconds.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._places: list[tuple[str, Any]] = []  # whose, and the mapping or list
        for m in model.modules():
            kind = type(m).__name__
            self._places.append((kind, vars(m)))
            for k, x in vars(m).items():
                if k in _MEMBERS or isinstance(x, (torch.Tensor, torch.nn.Module)):
                    continue
                inner = x if isinstance(x, (dict, list)) else getattr(x, "__dict__", None)
                if isinstance(inner, (dict, list)) and not isinstance(x, type) and not callable(x):
                    self._places.append((f"{kind}.{k}", inner))
        self._known = [_copied(x) for _, x in self._places]
        self._objects = self._held()

    def _held(self) -> list[Any]:
        return list(chain.from_iterable([x if type(x) is list else x.values() for _, x in self._places]))

    def changed(self) -> str | None:
        """The name of one that is different now; None if none is."""
        held = self._held()
        if len(held) == len(self._objects) and all(map(is_, held, self._objects)):
            return None
        for (whose, now), known in zip(self._places, self._known, strict=True):
            fresh = _copied(now)
            for k in dict.fromkeys((*fresh, *known)):
                if k not in _OURS and not _equal(fresh.get(k, _MISSING), known.get(k, _MISSING)):
                    return f"{whose}.{k}"
        self._known, self._objects = [_copied(x) for _, x in self._places], held
        return None


_MEMBERS = ("_parameters", "_buffers", "_modules")
_OURS = ("training",)  # a pass is in evaluation mode, whatever the model is in
_MISSING = object()


def _copied(place: Any) -> dict[Any, Any]:
    return dict(enumerate(place)) if isinstance(place, list) else dict(place)


def _equal(a: Any, b: Any) -> bool:
    plain = (bool, int, float, complex, str, tuple)
    return a is b or (type(a) is type(b) and isinstance(a, plain) and repr(a) == repr(b))


class Binding(NotCopied):
    """Finds the tensors of ``program.slots``.

    Parameters, buffers and constants are found once: `Identity` says when they are others, and until then nothing
    looks at some hundred mappings before each step.
    """

    def __init__(
        self, program: Program, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._program, self._optimizer = program, optimizer
        self._found: list[Any] = []  # by slot; None for what each step brings
        self._leaves: list[tuple[int, int]] = []  # slot, leaf of the batch
        self._constants: list[tuple[int, int]] = []  # slot, index of the constant
        self._states: list[tuple[int, Any, Any]] = []  # slot, parameter, key
        for n, slot in enumerate(program.slots):
            found = None
            if slot.role in ("parameter", "buffer"):
                home, name = compat.tensor_home(model, slot.role, slot.key)
                found = home[name]
            elif slot.role == "state":
                home, name = compat.tensor_home(model, "parameter", slot.key[0])
                self._states.append((n, home[name], slot.key[1]))
            elif slot.role == "input":
                self._leaves.append((n, slot.key))
            elif slot.role == "constant":
                found = program.constants[slot.key]
                self._constants.append((n, slot.key))
            else:
                raise BadInput("a slot's role is known", slot.role, f"slot {slot.key}")
            self._found.append(found)
        self._guarded = {(s.role, s.key): n for n, s in enumerate(program.slots)}

    def tensors(self, leaves: Sequence[Any], constants: Sequence[Any] | None = None) -> list[Any]:
        """One tensor per slot; None for optimizer state that does not exist yet. ``leaves`` are the
        batch's, ``constants`` those of this step where they are not the program's own.
        """
        found = self._found.copy()
        if constants is not None:
            for n, k in self._constants:
                found[n] = constants[k]
        for n, leaf in self._leaves:
            found[n] = leaves[leaf]
        if self._optimizer is not None:
            state = self._optimizer.state
            for n, parameter, key in self._states:
                found[n] = state[parameter].get(key) if parameter in state else None
        return found

    def broken_guard(self, tensors: Sequence[Any]) -> str | None:
        """Where the captured ops depend on data that is no longer what it was; None if they do not."""
        for guard in self._program.guards:
            if not guard.holds({source: tensors[self._guarded[source]] for source in guard.sources}):
                return str(guard.place)
        return None
