"""Tensors of the caller's in whose place a step puts others, where a program has them (`program.Apart`).

In eager what was there stays as it was, for whoever holds it: a list of states, a ``state_dict``, the loop. A program
writes into the bytes that were there, as long as nobody does. So a buffer is another object from each such step on,
as in eager: where the one that was there, or its bytes, are still held when nothing of ours holds them any more, the
new one has bytes of its own before the step runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any, Protocol

import torch

from tightship.errors import Unsupported
from tightship.execute.binding import form_of
from tightship.frontends.torch import compat
from tightship.frontends.torch.program import Apart, Program, derive

__all__ = ["Knows", "Replaced", "has_own_bytes", "own_bytes"]


class Knows(Protocol):
    """Has tensors of the caller's."""

    def take(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """``new`` is in the place of ``old`` from now on."""


def own_bytes(tensor: torch.Tensor) -> None:
    """The tensor lies in a copy of its storage from now on."""
    with torch.no_grad():
        whole = tensor.detach().untyped_storage().clone()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = empty.set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())


def has_own_bytes(tensor: torch.Tensor) -> bool:
    """Whether nothing else holds what the tensor lies in."""
    return compat.is_alone(tensor)


class Replaced:
    """Of one run of ``program`` on ``tensors``, which are changed in place. ``known`` are all that have buffers of
    ``model``. ``shared`` are those whose bytes the step hands back, too; ``reshaped`` says whether something is part
    of a larger storage now, or no longer. Without ``hand_out``, results are overwritten by the next run.

    Raises ``Unsupported`` for what is held in bytes that the step writes in two ways.
    """

    def __init__(
        self, program: Program, tensors: list[Any], model: torch.nn.Module, known: Iterable[Knows],
        streams: Collection[Any] = (), *, hand_out: bool = True,
    ) -> None:  # fmt: skip
        self._program, self._model, self._known, self._hand_out = program, model, tuple(known), hand_out
        self._old: dict[int, torch.Tensor] = {}
        self._own: dict[int, torch.Tensor] = {}
        self.reshaped = False
        self.shared: list[torch.Tensor] = []
        for k, a in enumerate(program.apart):
            if streams and program.slots[a.slot].role != "buffer":
                continue  # what streams has its bytes to itself
            self._set_apart(k, a, tensors)

    def _set_apart(self, k: int, apart: Apart, tensors: list[Any]) -> None:
        own: torch.Tensor = tensors[apart.slot]
        held = False
        if apart.writes and self._is_buffer(apart):
            new = own.detach().requires_grad_(own.requires_grad)
            tensors[apart.slot] = new
            self._rebind(apart, own, new)
            there = weakref.ref(own)
            del own
            held, own = there() is not None, new
        self._own[k] = own
        if not apart.writes:
            return
        if apart.before:
            self._old[k] = own.detach()
        elif not held and has_own_bytes(own):
            return
        if apart.changes:
            raise Unsupported(
                f"the {self._name(apart)}, which the step writes in place and then replaces, while others hold it,",
                "they would see otherwise than in eager what is written there", "hold a copy of it (clone())",
            )  # fmt: skip
        own_bytes(own)

    def _rebind(self, apart: Apart, old: torch.Tensor, new: torch.Tensor) -> None:
        home, name = compat.tensor_home(self._model, "buffer", self._program.slots[apart.slot].key)
        home[name] = new
        for one in self._known:
            one.take(old, new)

    def _is_buffer(self, apart: Apart) -> bool:
        return self._program.slots[apart.slot].role == "buffer"

    def _name(self, apart: Apart) -> str:
        slot = self._program.slots[apart.slot]
        return f"{slot.role} {slot.key!r}"

    def finish(self, results: list[Any]) -> None:
        """To be called with the results of the run, which are changed in place: those in bytes that were there are
        taken from these, and what is handed back in the place of something lies there."""
        values, numbers = self._program.graph.values, self._program.results
        for k, old in self._old.items():
            apart = self._program.apart[k]
            base = values[self._program.slots[apart.slot].value]
            for n in apart.before:
                results[n] = derive(old, base, values[numbers[n]])
        self._old.clear()
        found = []
        for k, own in self._own.items():
            apart = self._program.apart[k]
            if apart.now >= 0 and (self._hand_out or not apart.writes):
                now = derive(results[apart.now].detach(), values[numbers[apart.now]], apart.placed)
                found.append((apart, own, now))
        self._own.clear()
        for apart, own, now in found:
            self._put(apart, own, now)

    def _put(self, apart: Apart, own: torch.Tensor, now: torch.Tensor) -> None:
        self.reshaped = self.reshaped or form_of(own) != form_of(now)
        if not self._is_buffer(apart):
            own.data = now
            return
        now = now.detach().requires_grad_(own.requires_grad)
        if not self._hand_out:
            own_bytes(now)
        self._rebind(apart, own, now)
        if not apart.changes:
            self.shared.append(now)
