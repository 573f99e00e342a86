"""When a plan was asked for, and until when each part of making it may take."""

from __future__ import annotations

import time

from tightship.options import Deadline
from tightship.simulate import Timeline, replay

__all__ = ["PREPARED", "Clock"]

_REST = 20.0
"""What follows the search, over what it takes to replay a graph once."""


PREPARED = 0.25
"""The part of the time before the search's end that the order may take, and of what is left then the bounds."""


class Clock:
    """When a plan was asked for, and when the search for it has to end so that the rest is done in time: the steps
    of the best decision, their offsets, and two verifications."""

    def __init__(self, seconds: float) -> None:
        self.began = time.perf_counter()
        self.deadline = self.search = Deadline(self.began + seconds)

    def replayed(self, line: Timeline) -> None:
        """What follows the search takes so many times as long as a replay of the graph; a part of what is left is for
        the search in any case."""
        began = time.perf_counter()
        replay(line.graph, line.steps)
        took = time.perf_counter() - began
        self.search = Deadline(max(self.deadline.at - _REST * took, self.deadline.part(PREPARED).at))
