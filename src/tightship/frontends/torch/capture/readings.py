"""What a step's code looks at of what only the step itself computes: ``loss.item()`` for a log, ``f"{loss:.3f}"``.

The program has an op that reads it, before everything that the code has not asked for by then. A planned step runs up
to that op when its code asks, and goes on when the code has run to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from tightship.errors import Unplannable
from tightship.frontends.torch.collectives import Collective
from tightship.frontends.torch.program import Program

__all__ = [
    "READ", "Read", "Reading", "Readings", "Together", "looked_behind", "reading", "readings_now",
    "readings_of",
]  # fmt: skip

READ = "read"
"""Target of ops that hand what a tensor holds to the code of the step."""

_RARE = 4
"""Of so many steps one may take a path that none before has taken, by what its code has read."""
_AT_FIRST = 3 * _RARE


class Read:
    """The op: ``said`` are copies of what it was last given, in no memory of torch's. ``refusal`` is what to raise
    where code must not look at it after all."""

    def __init__(self, place: str, nth: int, refusal: Unplannable) -> None:
        self.place, self.nth, self.refusal = place, nth, refusal
        self.said: tuple[torch.Tensor, ...] = ()

    def __call__(self, *tensors: torch.Tensor) -> None:
        self.said = tuple([_copied(t) for t in tensors])

    def __repr__(self) -> str:  # by which programs are compared
        return f"reading {self.nth} at {self.place}"


@dataclass(frozen=True)
class Reading:
    """Stands among the guards of a call for which the program's op ``read`` reads contents, of which ``finish`` says
    what the call depends on, ``expected`` when it was captured. ``graph``: the node that has made what is read, as it
    is printed."""

    read: Read
    finish: Callable[[Sequence[torch.Tensor]], Any]
    expected: Any
    graph: str = ""
    sources: tuple[tuple[str, Any], ...] = ()
    calls: frozenset[int] = frozenset()
    requests: bool = False

    @property
    def place(self) -> str:
        return self.read.place

    def holds(self, tensors: Any, other_numbers: Collection[int] = ()) -> bool:
        """What it says is asked of the step that runs."""
        return True


class Together(Protocol):
    """Several ranks, whose code looks at what others take part in."""

    def computing(
        self, place: str, sent: Sequence[str], *, behind: bool, written: bool
    ) -> AbstractContextManager[None]:
        """Inside, what is looked at at ``place`` is computed, for which ``sent`` is sent: by all ranks ``behind`` a
        collective of the code's, or where buffers were ``written``."""


class Readings:
    """How often the steps of one training loop take another path by what their code has read; ``refusal`` says where
    the last one did. ``together``: with whom its ranks look at what others take part in."""

    refusal: Unplannable

    def __init__(self, together: Together | None = None) -> None:
        self.together, self._balance = together, _AT_FIRST

    def followed(self) -> None:
        self._balance = min(self._balance + 1, _AT_FIRST)

    def took_another_path(self, after: Read) -> None:
        self._balance -= _RARE
        self.refusal = Unplannable(
            f"looking at what a step computes at {after.place}",
            "steps go on from there as none before them has, again and again, each to be captured and planned",
            after.refusal.instead,
        )

    @property
    def hopeless(self) -> bool:
        return self._balance < 0


_READINGS: ContextVar[Readings | None] = ContextVar("readings", default=None)


@contextmanager
def reading(readings: Readings | None) -> Iterator[None]:
    """Code of steps captured inside may look at what they compute; with None, it may not."""
    token = _READINGS.set(readings)
    try:
        yield
    finally:
        _READINGS.reset(token)


def readings_now() -> Readings | None:
    return _READINGS.get()


def readings_of(program: Program) -> list[Read]:
    return [c.fn for c in program.calls if isinstance(c.fn, Read)]


def looked_behind(program: Program) -> dict[int, tuple[bool, bool]]:
    """By reading: whether the code has called a collective before it, and whether the step has written buffers."""
    homes = {program.graph.values[s.value].storage for s in program.slots if s.role == "buffer"}
    behind = written = False
    found: dict[int, tuple[bool, bool]] = {}
    for op, call in zip(program.graph.ops, program.calls, strict=True):
        if isinstance(call.fn, Read):
            found[call.fn.nth] = behind, written
        behind = behind or isinstance(call.fn, Collective)
        written = written or not homes.isdisjoint(op.mutates)
    return found


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Made without asking torch's allocator of the tensor's device."""
    tensor = tensor.detach()
    if not tensor.is_cpu:
        return tensor.cpu()
    plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size())
    known = tensor.dtype.is_complex or plain is None
    bits = np.array((tensor if known else tensor.view(plain)).numpy(), copy=True)
    return torch.from_numpy(bits) if known else torch.from_numpy(bits).view(tensor.dtype)
