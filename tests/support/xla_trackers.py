"""Invariants of the trackers of XLA's rematerialization (R16), computed anew from the schedule after every step."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

from tightship.baselines import xla_body
from tightship.baselines.xla_tracker import Item, Tracker


def faults(tracker: xla_body.Tracker) -> list[str]:
    """What is wrong with what is counted of a computation of HLO: nothing, ever."""
    found = []
    for node in tracker.body:
        for rows, what in ((node.defined, "defined"), (node.used, "used")):
            if len(set(rows)) != len(rows):
                found.append(f"{node.name}: buffers {what} are not unique")
    for k, buffer in enumerate(tracker.buffers):
        left = {u.node for u in buffer.users if not u.node.placed or u.node is tracker.now}
        if buffer.remaining != len(left):
            found.append(f"{buffer.node.name}: {buffer.remaining} users to come, counted {len(left)}")
        found += [f"{u.node.name} uses {buffer.node.name}" for u in buffer.users if k not in u.node.used]
        if k not in buffer.node.defined:
            found.append(f"{buffer.node.name} does not define its buffer")
    return found


def check(tracker: Tracker, base: int) -> None:
    """Raises ``AssertionError`` unless definitions and uses are unique and mutual, the counts of remaining users
    are right, and the bytes in use at every item are what its buffers add up to."""
    items = [cast(Item, place) for place in tracker.usage]
    at = {item: i for i, item in enumerate(items)}
    assert len(at) == len(items), "an item stands in the schedule once"
    ran = [item.placed for item in items]
    assert ran == sorted(ran, reverse=True), "items that have run stand before those that have not"
    assert all(a.key < b.key for a, b in pairwise(items)), "keys compare as the schedule"
    _check_buffers(tracker, items, at)
    _check_bytes(tracker, items, at, base)


def _check_buffers(tracker: Tracker, items: list[Item], at: dict[Item, int]) -> None:
    defined = [b for item in items for b in item.made]
    listed = [b for rows in tracker.buffers for b in rows]
    assert len(defined) == len(set(defined)) == len(listed) and set(defined) == set(listed), "defined once"
    for item in items:
        assert all(b.item is item for b in item.made), "a buffer knows the item that defines it"
        for s in item.reads:
            b = tracker.buffer_at(s, item)
            assert at[b.item] < at[item], "a buffer is defined before it is used"
            assert b.users.count(item) == 1, "a used buffer knows its user, once"
    used = sum(len(b.users) for b in listed)
    assert used == sum(len(item.reads) for item in items), "a buffer's users read it"
    for s, rows in enumerate(tracker.buffers):
        last = -1
        for b in rows:
            where = [at[u] for u in b.users]
            assert where == sorted(where), "users stand in schedule order"
            assert b.done == sum(u.placed for u in b.users), "the count of users that have run is right"
            assert at[b.item] > last, f"storage {s} has one copy at a time"
            last = at[b.end]
    for k, runs in enumerate(tracker.runs):
        assert runs == sum(item.op == k for item in items), "runs of an op are counted"
        assert not tracker.run_of(k).gone, "an op runs"


def _check_bytes(tracker: Tracker, items: list[Item], at: dict[Item, int], base: int) -> None:
    change = [0] * (len(items) + 1)
    for rows in tracker.buffers:
        for b in rows:
            change[at[b.item]] += b.size
            change[len(items) if b.live_out else at[b.end] + 1] -= b.size
    now = base
    for i, item in enumerate(items):
        now += change[i]
        assert tracker.usage.value(item) == now + item.own, f"bytes in use at item {i}"
    assert tracker.usage.peak() == max((tracker.usage.value(i) for i in items), default=tracker.usage.peak())
