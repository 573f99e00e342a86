"""What a prepared step is bound to: the caller's own model and optimizer, and the tensors a program's slots stand
for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

from tightship.errors import BadInput
from tightship.frontends.torch import compat
from tightship.frontends.torch.containers import contents
from tightship.frontends.torch.optimizer.given import each
from tightship.frontends.torch.optimizer.given import settings as optimizer_settings
from tightship.frontends.torch.optimizer.tensors import parameters_of
from tightship.frontends.torch.optimizer.updates import state_at
from tightship.frontends.torch.program import Program
from tightship.process_local import NotCopied

__all__ = ["Attributes", "Binding", "Identity", "form_of"]


class Identity:
    """Whether model and optimizer (if there is one) are made of the objects they were made of at construction.

    Without training it does not matter where parameters lie: a forward pass reads them from wherever they are.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, *, trains: bool = False
    ) -> None:
        self._optimizer, self.trains = optimizer, trains
        self._modules = tuple(model.modules())
        members = [m for module in self._modules for m in compat.members(module)]
        self._members = [m for m in members if m]
        self._empty = [m for m in members if not m]  # most are: most modules are leaves, or have no buffers
        self._objects = self._held()  # kept, or another could get the address of one that is gone
        tensors = (*model.parameters(), *model.buffers()) if trains else ()
        self._tensors = [t for t in tensors if t.layout is torch.strided]
        self._known, self._places = self._now(), self._where()

    def _held(self) -> list[Any]:
        return list(chain.from_iterable([m.values() for m in self._members]))

    def _now(self) -> tuple[Any, ...]:
        return (
            [(t.data_ptr(), t.requires_grad) for t in self._tensors],
            optimizer_settings(self._optimizer) if self._optimizer is not None else None,
        )

    def moved(self) -> None:
        """The tensors lie elsewhere by our own hand: that is no change."""
        tensors, settings = self._known
        rows = zip(self._tensors, tensors, strict=True)
        self._known = [(t.data_ptr(), trained) for t, (_, trained) in rows], settings
        self._places = self._where()

    def take(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """``new`` is in the place of ``old`` by our own hand; where it lies elsewhere, `moved` says so."""
        self._objects = [new if x is old else x for x in self._objects]
        self._tensors = [new if t is old else t for t in self._tensors]

    def settle(self, tensor: torch.Tensor) -> None:
        """A tensor lies where it does now."""
        tensors, _ = self._known
        for k, t in enumerate(self._tensors):
            if t is tensor:
                tensors[k] = (t.data_ptr(), t.requires_grad)
                self._places[k] = (compat.storage_reference(t), form_of(t))

    def _where(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """The storage of each tensor, weakly, and what a program depends on of it beside the contents."""
        return [(compat.storage_reference(t), form_of(t)) for t in self._tensors]

    def _moved_alone(self) -> bool:
        """Whether all that is different is that tensors lie elsewhere, and neither where they were nor where they are
        anything else does: so averages of weights are put in their place (``p.data = …``)."""
        tensors, settings = self._known
        if self._optimizer is not None and optimizer_settings(self._optimizer) != settings:
            return False
        for t, (place, trained), (storage, form) in zip(self._tensors, tensors, self._places, strict=True):
            if t.requires_grad is not trained:
                return False
            if t.data_ptr() != place and not (
                storage.expired() and compat.is_alone(t) and not compat.is_borrowed(t) and form_of(t) == form
            ):
                return False
        return True

    def changed(self, *, moves: bool = False) -> str | None:
        """What is different now, for people; None if nothing is, or if tensors have moved and may (``moves``)."""
        if not _same_objects(self._held(), self._objects) or any(self._empty):
            return "a module, parameter or buffer of the model was added or replaced"
        what = (
            "a parameter or buffer was moved, resized or frozen",
            "the optimizer's parameter groups changed, or what is called around its step",
        )
        pairs = zip(what, self._now(), self._known, strict=True)
        found = next((text for text, now, known in pairs if now != known), None)
        if found is not None and moves and self._moved_alone():
            self.moved()
            return None
        return found

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
        self._containers: list[tuple[str, Any]] = []  # whose, and the mapping or list
        for m in model.modules():
            kind = type(m).__name__
            self._containers.append((kind, vars(m)))
            for k, x in vars(m).items():
                if k in _MEMBERS or isinstance(x, (torch.Tensor, torch.nn.Module)):
                    continue
                inner = x if isinstance(x, (dict, list)) else getattr(x, "__dict__", None)
                if isinstance(inner, (dict, list)) and not isinstance(x, type) and not callable(x):
                    self._containers.append((f"{kind}.{k}", inner))
        self._known = [_copied(x) for _, x in self._containers]
        self._objects = self._held()

    def _held(self) -> list[Any]:
        return list(
            chain.from_iterable([x.values() if isinstance(x, dict) else x for _, x in self._containers])
        )

    def changed(self) -> str | None:
        """The name of one that is different now; None if none is."""
        held = self._held()
        if _same_objects(held, self._objects):
            return None
        for (whose, now), known in zip(self._containers, self._known, strict=True):
            fresh = _copied(now)
            for k in dict.fromkeys((*fresh, *known)):
                if k not in _OURS and not _equal(fresh.get(k, _MISSING), known.get(k, _MISSING)):
                    return f"{whose}.{k}"
        self._known, self._objects = [_copied(x) for _, x in self._containers], held
        return None


_MEMBERS = ("_parameters", "_buffers", "_modules")
_OURS = ("training",)  # a pass is in evaluation mode, whatever the model is in
_MISSING = object()


def _same_objects(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))


def _copied(container: Any) -> dict[Any, Any]:
    held = contents(container)
    return dict(enumerate(held)) if isinstance(held, list) else held


def form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a program depends on of a tensor beside its contents."""
    nbytes = tensor.untyped_storage().nbytes()
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.storage_offset(), nbytes


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
        self._tensors: list[Any] = []  # by slot; None for what each step brings
        self._leaves: list[tuple[int, int]] = []  # slot, leaf of the batch
        self._constants: list[tuple[int, int]] = []  # slot, index of the constant
        self._states: list[tuple[int, Any, Any, Any, int]] = []  # slot, optimizer, parameter, key, which
        self._holds = False  # whether it keeps tensors that are no parameter's
        self._gradients: list[tuple[int, Any]] = []  # slot, parameter
        for n, slot in enumerate(program.slots):
            tensor = None
            if slot.role in ("parameter", "buffer"):
                owner, name = compat.tensor_home(model, slot.role, slot.key)
                tensor = owner[name]
            elif slot.role == "state":
                self._states.append((n, *self._place_of_state(model, *slot.key)))
            elif slot.role == "gradient":
                owner, name = compat.tensor_home(model, "parameter", slot.key)
                self._gradients.append((n, owner[name]))
            elif slot.role == "input":
                self._leaves.append((n, slot.key))
            elif slot.role == "constant":
                tensor = program.constants[slot.key]
                self._constants.append((n, slot.key))
            else:
                raise BadInput(f"unknown role {slot.role!r}", place=f"slot {slot.key}")
            self._tensors.append(tensor)
        self._guarded = {(s.role, s.key): n for n, s in enumerate(program.slots)}

    def take(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """``new`` is in the place of ``old``."""
        self._tensors = [new if t is old else t for t in self._tensors]

    def tensors(self, leaves: Sequence[Any], constants: Sequence[Any] | None = None) -> list[Any]:
        """One tensor per slot; None for optimizer state that does not exist yet. ``leaves`` are the
        batch's tensors, ``constants`` those of this step where they are not the program's own.
        """
        tensors = self._tensors.copy()
        if constants is not None:
            for n, k in self._constants:
                tensors[n] = constants[k]
        for n, leaf in self._leaves:
            tensors[n] = leaves[leaf]
        for n, parameter in self._gradients:
            tensors[n] = parameter.grad
        if self._optimizer is not None:
            params = [parameters_of(o) for o in each(self._optimizer)] if self._holds else []
            for n, optimizer, parameter, key, which in self._states:
                if parameter is None:
                    tensors[n] = state_at(vars(optimizer), key, params[which])
                elif parameter in optimizer.state:
                    tensors[n] = state_at(optimizer.state[parameter], key)
        return tensors

    def _place_of_state(
        self, model: torch.nn.Module, name: str, key: Any, which: int = 0
    ) -> tuple[Any, Any, Any, int]:
        """The optimizer, of several perhaps; the parameter, if it is a parameter's; and the key."""
        optimizer = each(self._optimizer)[which]
        if not name:
            self._holds = True
            return optimizer, None, key, which
        owner, last = compat.tensor_home(model, "parameter", name)
        return optimizer, owner[last], key, which

    def broken_guard(self, tensors: Sequence[Any]) -> str | None:
        """Where the captured ops depend on data that is no longer what it was; None if they do not."""
        for guard in self._program.guards:
            if not guard.holds({source: tensors[self._guarded[source]] for source in guard.sources}):
                return str(guard.place)
        return None
