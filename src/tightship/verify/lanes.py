"""Which steps are known to have ended before another begins, when streams run side by side.

Each step has a clock: for every stream, the last of its steps that is known to have ended. A step inherits
the clocks of its predecessor in its own stream and of the steps it waits for, so a question costs one
comparison (vector clocks; Fidge 1988, Mattern 1989). Plans of one stream are in total order and cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from tightship.plan import Step

__all__ = ["MAX_STREAMS", "Clocks", "Lanes"]

MAX_STREAMS = 64
"""Streams a plan may use; clocks take this many integers per step."""

Key = tuple[str, int]  # (form, storage)


class Clocks:
    """``before(a, b)``: whether step ``a`` has surely ended when step ``b`` begins (a < b)."""

    def __init__(self, steps: Sequence[Step]) -> None:
        names = {stream: k for k, stream in enumerate(dict.fromkeys(s.stream for s in steps))}
        self.single = len(names) <= 1
        self.too_many = len(names) > MAX_STREAMS
        self._lane: list[int] = []
        self._clock: list[list[int]] = []
        if not self.single and not self.too_many:
            self._build(steps, names)

    def _build(self, steps: Sequence[Step], names: dict[int, int]) -> None:
        last: list[int] = [-1] * len(names)
        for i, step in enumerate(steps):
            lane = names[step.stream]
            clock = [-1] * len(names) if last[lane] < 0 else self._clock[last[lane]]
            waits = [w for w in step.waits if 0 <= w < i]
            for w in waits:
                clock = [max(a, b) for a, b in zip(clock, self._clock[w], strict=True)]
            clock = clock.copy()
            clock[lane] = last[lane] = i
            self._lane.append(lane)
            self._clock.append(clock)

    def before(self, a: int, b: int) -> bool:
        if a < 0 or self.single or self.too_many:
            return True
        if a >= len(self._lane):  # the end of the plan
            return False
        if self._lane[a] == self._lane[b]:
            return a <= b
        return self._clock[b][self._lane[a]] >= a


class Lanes:
    """Who last wrote each form of each storage, and who read it since: what a later step must wait for.

    Every method returns the steps among them that are not known to have ended.
    """

    def __init__(self, clocks: Clocks, steps: Sequence[Step]) -> None:
        self._clocks, self._steps = clocks, steps
        self._writer: dict[Key, int] = {}
        self._readers: dict[Key, dict[int, int]] = {}  # stream -> its last reader; earlier ones are implied

    def read(self, i: int, key: Key) -> list[int]:
        if self._clocks.single:
            return []
        late = self._late(i, [self._writer.get(key, -1)])
        self._readers.setdefault(key, {})[self._steps[i].stream] = i
        return late

    def write(self, i: int, key: Key) -> list[int]:
        """Writing in place, and freeing: after the last writer and everyone who read what it wrote."""
        if self._clocks.single:
            return []
        late = self._late(i, [self._writer.get(key, -1), *self._readers.pop(key, {}).values()])
        self._writer[key] = i
        return late

    def make(self, i: int, key: Key) -> None:
        """A new stay; that its bytes are no longer used by others is a question of placement."""
        if not self._clocks.single:
            self._writer[key] = i
            self._readers.pop(key, None)

    def _late(self, i: int, earlier: list[int]) -> list[int]:
        return [a for a in earlier if a != i and not self._clocks.before(a, i)]
