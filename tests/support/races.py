"""What streams did, as calls in the order the host made them -> accesses to the same bytes that nothing orders.

A work of a stream begins when the earlier ones of that stream are done, and, by waiting for an event, those that had
been asked of the event's stream when it was recorded. Each stream has a clock of what is surely done (vector clocks).
"""

from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    stream: int
    event: int


@dataclass(frozen=True)
class Wait:
    stream: int
    event: int


@dataclass(frozen=True)
class Work:
    """Reads and writes bytes ``[low, high)``."""

    stream: int
    reads: tuple = ()
    writes: tuple = ()
    name: str = ""


class Sync:
    """The host waits for the whole device."""


def races(calls):
    """Pairs of names of works that touch the same bytes, one of them writing, in no certain order."""
    clocks, events, done = defaultdict(dict), {}, {}
    seen, found = [], []
    for call in calls:
        if isinstance(call, Sync):
            for clock in (*clocks.values(), done):
                clock.update({s: c.get(s, 0) for s, c in clocks.items()})
            continue
        clock = clocks.setdefault(call.stream, dict(done))
        if isinstance(call, Record):
            events[call.event] = dict(clock)
        elif isinstance(call, Wait):
            for stream, time in events.get(call.event, {}).items():
                clock[stream] = max(clock.get(stream, 0), time)
        else:
            clock[call.stream] = clock.get(call.stream, 0) + 1
            for other, time in seen:
                if clock.get(other.stream, 0) < time and _meet(call, other):
                    found.append((other.name, call.name))
            seen.append((call, clock[call.stream]))
    return found


def _meet(a, b):
    pairs = ((a.writes, b.writes), (a.writes, b.reads), (a.reads, b.writes))
    return any(x < v and u < y for p, q in pairs for x, y in p for u, v in q)
