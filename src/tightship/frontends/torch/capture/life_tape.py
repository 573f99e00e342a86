"""A tape of a loop that is run as it is: its ops, and when storages begin and end to live."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any

import torch

from tightship.frontends.torch import compat, compat_distributed, compat_ops
from tightship.frontends.torch.capture.expectations import Expectation
from tightship.frontends.torch.capture.tape import Origin, Record, Tape, TapeStorage

__all__ = ["Kind", "Life", "LifeTape"]

_NUMBER_BYTES = 8
"""Bytes of the tensor that a number of Python's becomes where an op keeps it for its backward pass."""


class Kind(IntEnum):
    """Of an event: an op begins, a storage begins or ends to live, a step begins."""

    OP = 0
    ALLOC = 1
    FREE = 2
    STEP = 3


@dataclass(slots=True)
class Life:
    """What is known of a storage beside its size: ``made`` is the number of the op that made it, -1 for what was
    there before; ``role`` what it is (parameter, buffer, input, state, constant, gradient; empty for the rest), and
    ``origin`` where it was made."""

    made: int = -1
    role: str = ""
    phase: str = ""
    origin: Origin = field(default_factory=Origin)


class LifeTape(Tape):
    """A tape that also takes down when storages begin and end to live."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[Kind, int]] = []
        self.lives: list[Life] = []
        # Ops of autograd's own, by number, with those of their arguments that are views, which hold their base.
        self.between_nodes: dict[int, frozenset[int]] = {}
        self.there: str = ""  # the role of storages that are there before the loop
        self.unread: list[Origin] = []  # where the code reads a number that only a real step has
        self._watched: dict[int, Any] = {}
        self._numbers: dict[int, list[int]] = {}
        self._before: list[set[int]] = []
        self._views: set[int] = set()
        self._node = self._ran = -1
        self._empty: set[int] = set()

    def sent(self, fn: Any) -> None:
        """Collectives write to what they are given, like any op."""

    def resized(self, key: int, nbytes: int) -> None:
        """A storage has lost its bytes, or got them back."""
        s = self._storage_of.get(key)
        if s is None or (s in self._empty) == (not nbytes):
            return
        if nbytes:
            self._empty.discard(s)
            self.events.append((Kind.ALLOC, s))
        else:
            self._empty.add(s)
            self.events.append((Kind.FREE, s))

    def reserved(self, nbytes: int, device: str, origin: Origin) -> None:
        """Bytes that are there all along and that no op sees."""
        self.storages.append(TapeStorage(nbytes, nbytes, device, -1))
        self.lives.append(Life(-1, "constant", "", origin))

    def knows(self, tensor: torch.Tensor) -> bool:
        return super().knows(compat_distributed.own_part(tensor))

    def value(self, tensor: torch.Tensor, place: str = "") -> int:
        tensor = compat_distributed.own_part(tensor)
        known = len(self.storages)
        v = super().value(tensor, place)
        if len(self.storages) > known:
            self.lives.append(Life(-1 if self.there else len(self.records), self.there))
            if not self.there:
                self.events.append((Kind.ALLOC, known))
            end = partial(self._ended, known)
            self._watched[known] = weakref.ref(tensor.untyped_storage(), end)
        return v

    def _ended(self, storage: int, _: object) -> None:
        if storage not in self._empty:
            self.events.append((Kind.FREE, storage))

    def given(self, tensor: torch.Tensor, real: torch.Tensor) -> None:
        """A tensor of the user's that is neither the model's nor the batch's."""
        before, self.there = self.there, self.there or "constant"
        super().constant(tensor, real)
        self.there = before

    def lifted(self, tensor: torch.Tensor, real: torch.Tensor) -> None:
        """A number, a list or an array that has become a tensor: made anew, and perhaps written later."""
        if not self.there:
            self.events.append((Kind.OP, len(self.records)))
        made = self.value(tensor)
        with compat.without_modes():
            copy = real.clone()
        self.records.append(Record(copy.clone, "lift_fresh", (), {}, (made,)))

    def record(
        self, fn: Any, args: Any, kwargs: Any, out: Any, *, phase: str, origin: Origin, flops: int = 0
    ) -> Record | None:
        if not self.there:
            self.events.append((Kind.OP, len(self.records)))
        known = len(self.storages)
        r = super().record(fn, args, kwargs, out, phase=phase, origin=origin, flops=flops)
        if r is None and not self.there and self.events[-1][0] is Kind.OP:
            self.events.pop()  # a view
        for life in self.lives[known:]:
            life.phase, life.origin = phase, origin
        if r is None and isinstance(out, torch.Tensor):
            (self._views.add if compat_ops.is_view(fn) else self._views.discard)(self.value(out))
        if r is not None and phase == "backward" and compat.backward_sequence() == self._ran:
            self.between_nodes[len(self.records) - 1] = frozenset(self._views.intersection(r.reads))
        return r

    @property
    def checks(self) -> tuple[Expectation, ...]:
        """Answers that were taken for granted."""
        return tuple(r.fn for r in self.records if isinstance(r.fn, Expectation))

    def was_there(self, tensor: torch.Tensor) -> None:
        """What was thought to be made by the loop has outlived it."""
        s = self.storage(self.value(tensor))
        self.events.remove((Kind.ALLOC, s))
        self.lives[s].made, self.lives[s].role = -1, "constant"

    def emulated(
        self, fn: Any, target: str, made: Callable[[], Sequence[torch.Tensor]], *, phase: str, origin: Origin,
        flops: int = 0,
    ) -> None:  # fmt: skip
        """Takes down an op that no dispatcher has seen, and what it makes."""
        self.events.append((Kind.OP, len(self.records)))
        known = len(self.storages)
        values = tuple(self.value(t) for t in made())
        for life in self.lives[known:]:
            life.phase, life.origin = phase, origin
        written = tuple(self.storage(v) for v in values)
        self.records.append(
            Record(
                fn,
                target,
                (),
                {},
                values,
                writes=written,
                effect=True,
                phase=phase,
                origin=origin,
                flops=flops,
            )
        )

    def number_saved(self, node: int) -> None:
        """The node of autograd with that number keeps a tensor for a number of Python's until it has run."""
        s = len(self.storages)
        self.storages.append(TapeStorage(_NUMBER_BYTES, _NUMBER_BYTES, "cpu", -1))
        self.lives.append(Life(len(self.records), "", "forward"))
        self.events.append((Kind.ALLOC, s))
        self._numbers.setdefault(node, []).append(s)

    def node_runs(self, node: int) -> None:
        """An op of that node begins: the one before has run, and has let go of what it kept."""
        if node != self._node:
            self.events += [(Kind.FREE, s) for s in self._numbers.pop(self._node, ())]
            self._node = node
        if node != self._ran:
            self._ran = -1

    def recompute_begins(self) -> None:
        """A checkpoint begins to run its function again."""
        self._before.append(set(self._numbers))

    def recompute_ends(self) -> None:
        """Its nodes, of which none will run, are gone with all that they kept."""
        before = self._before.pop()
        for node in [n for n in self._numbers if n not in before]:
            self.events += [(Kind.FREE, s) for s in self._numbers.pop(node)]

    def step_over(self) -> None:
        """A step has returned: nodes that its backward pass did not need go with the rest of its graph."""
        self.events += [(Kind.FREE, s) for some in self._numbers.values() for s in some]
        self._numbers.clear()

    def node_ran(self, node: int) -> None:
        """The formula of that node has run; until the next one begins, autograd adds up gradients."""
        self._ran = node

    def forget(self) -> None:
        """From now on nothing is taken down."""
        self._watched.clear()
