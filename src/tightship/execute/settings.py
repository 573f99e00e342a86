"""How kinds of batches are planned and run, and who hears of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from tightship.graph import Graph
from tightship.plan import Plan
from tightship.units import Budget

__all__ = [
    "Planner",
    "Settings",
    "Silent",
    "Stages",
]


Planner = Callable[[Graph, int | None], Plan]


class Stages(Protocol):
    """Is told which stage a preparation is in, what of its ops is measured, and the best plan so far."""

    def stage(self, what: str, step_time: float = 0.0) -> AbstractContextManager[None]: ...

    def measured(self, count: int, of: int) -> None: ...

    def planning(self, peak: int, extra: float, met: bool) -> bool: ...


class Silent:
    """Tells nobody."""

    def stage(self, what: str, step_time: float = 0.0) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def measured(self, count: int, of: int) -> None:
        pass

    def planning(self, peak: int, extra: float, met: bool) -> bool:
        return False


@dataclass(frozen=True)
class Settings:
    """How kinds of batches are planned and run: ``variants`` of them are kept, ``hand_out`` and ``strict`` are as for
    `Executor`, ``measuring`` are the arguments of `profile`, ``progress`` hears how far preparing is."""

    budget: Budget | None
    planner: Planner
    measuring: dict[str, Any]
    strict: bool = False
    variants: int = 4
    hand_out: bool = True
    progress: Stages = field(default_factory=Silent)
    split: str = ""
    """Which way of splitting ops is allowed, as `split.divide_allow` says."""
    stream: bool = False
    """Whether parameters and optimizer state may leave memory."""
    stream_hints: tuple[tuple[str, bool], ...] = ()
    """As for `Streaming`."""
