"""When work must end: one clock for all stages of planning."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

__all__ = ["NEVER", "Deadline"]


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of the wall clock (`time.perf_counter`). A deadline only ends work: limits of work decide what is done
    before, so that a plan made in time is the same everywhere."""

    at: float = math.inf

    @staticmethod
    def after(seconds: float) -> Deadline:
        return Deadline(time.perf_counter() + seconds)

    @property
    def left(self) -> float:
        """Seconds until then, at least zero."""
        return max(0.0, self.at - time.perf_counter())

    @property
    def over(self) -> bool:
        return time.perf_counter() >= self.at

    def part(self, share: float) -> Deadline:
        """The moment at which this share of what is left is over."""
        return Deadline.after(share * self.left) if self.at < math.inf else self


NEVER = Deadline()
