"""The schedule that XLA's rematerialization walks, and the bytes in use at every item of it, for graphs.

`Usage` is a list of blocks of up to 256 items. Inserting, removing, adding to a range and the maximum of a range
touch two blocks item by item and the rest through one number per block, so each costs about the square root of the
length, most of it inside numpy. Order is decided by (block, rank), which an insertion changes for one block.

`Tracker`: an **item** is one run of an op; a **clone** is a later run of an op that has run before. A **buffer** is
one residence of a storage, from the item that defines it to its last user; a storage has several buffers once it
is recomputed, never two at a time. Users reach a buffer through any alias of its storage (R2). Its users that
have run are a prefix of ``users``: the schedule is walked in order and clones only go behind the walk.
The bytes in use at *every* item are known at all times, those already walked included, so a step can be judged
by its effect on the whole schedule, and taken back. A loop (R4) needs no rule of its own: its results are
aliases of its operands' storages, so it defines nothing, and their other users are indirect.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tightship.analysis.bounds import replayable
from tightship.graph import Graph
from tightship.hlo.opcodes import OPCODES
from tightship.simulate import extra_bytes

__all__ = ["Buffer", "Item", "Place", "Split", "Tracker", "Usage", "recomputable"]


_FULL = 256
_NONE = -(1 << 62)
"""The maximum over nothing; adding real sizes to it never makes it count."""


class Place:
    """Anything that stands in the schedule."""

    __slots__ = ("block", "rank")

    block: _Block
    rank: int

    @property
    def key(self) -> int:
        """Compares as the schedule does, until the next insertion."""
        return self.block.number << 9 | self.rank


class _Block:
    __slots__ = ("items", "number", "use")

    def __init__(self, items: list[Place], use: NDArray[np.int64], number: int) -> None:
        self.items, self.number = items, number
        self.use = np.zeros(_FULL + 1, dtype=np.int64)
        self.use[: len(items)] = use
        self.renumber(0)

    def renumber(self, start: int) -> None:
        for rank in range(start, len(self.items)):
            item = self.items[rank]
            item.block, item.rank = self, rank


class Usage:
    """Items in schedule order with a number of bytes each."""

    def __init__(self, items: Sequence[Place], use: NDArray[np.int64]) -> None:
        half = _FULL // 2
        cuts = range(0, max(len(items), 1), half)
        self.blocks = [_Block(list(items[a : a + half]), use[a : a + half], n) for n, a in enumerate(cuts)]
        self.shift = np.zeros(len(self.blocks), dtype=np.int64)
        self.top = np.full(len(self.blocks), _NONE, dtype=np.int64)
        for b in self.blocks:
            self._refresh(b)

    def __iter__(self) -> Iterator[Place]:
        for b in self.blocks:
            yield from b.items

    def _refresh(self, b: _Block) -> None:
        n = len(b.items)
        self.top[b.number] = b.use[:n].max() + self.shift[b.number] if n else _NONE

    def value(self, item: Place) -> int:
        return int(item.block.use[item.rank]) + int(self.shift[item.block.number])

    def first(self) -> Place | None:
        return next(iter(self), None)

    def following(self, item: Place) -> Place | None:
        """The item right after ``item``."""
        b, rank = item.block, item.rank + 1
        while rank >= len(b.items):
            if b.number + 1 == len(self.blocks):
                return None
            b, rank = self.blocks[b.number + 1], 0
        return b.items[rank]

    def previous(self, item: Place) -> Place | None:
        """The item right before ``item``."""
        if item.rank:
            return item.block.items[item.rank - 1]
        return next((b.items[-1] for b in reversed(self.blocks[: item.block.number]) if b.items), None)

    def insert(self, item: Place, before: Place, value: int) -> None:
        b, rank = before.block, before.rank
        n = len(b.items)
        b.items.insert(rank, item)
        b.use[rank + 1 : n + 1] = b.use[rank:n].copy()
        b.use[rank] = value - int(self.shift[b.number])
        b.renumber(rank)
        if n + 1 > _FULL:
            self._split(b)
        self._refresh(item.block)

    def _split(self, b: _Block) -> None:
        half, n = len(b.items) // 2, b.number
        rest = _Block(b.items[half:], b.use[half : len(b.items)], n + 1)
        del b.items[half:]
        self.blocks.insert(n + 1, rest)
        for i in range(n + 2, len(self.blocks)):
            self.blocks[i].number = i
        self.shift = np.insert(self.shift, n + 1, self.shift[n])
        self.top = np.insert(self.top, n + 1, 0)
        self._refresh(b)
        self._refresh(rest)

    def remove(self, item: Place) -> None:
        b, rank = item.block, item.rank
        n = len(b.items)
        del b.items[rank]
        b.use[rank : n - 1] = b.use[rank + 1 : n].copy()
        b.renumber(rank)
        self._refresh(b)

    def add(self, after: Place, last: Place, delta: int) -> None:
        """Add to every item behind ``after``, up to and including ``last``."""
        a, b = after.block, last.block
        if a is b:
            a.use[after.rank + 1 : last.rank + 1] += delta
            self._refresh(a)
            return
        a.use[after.rank + 1 : len(a.items)] += delta
        b.use[: last.rank + 1] += delta
        self._refresh(a)
        self._refresh(b)
        self.shift[a.number + 1 : b.number] += delta
        self.top[a.number + 1 : b.number] += delta

    def peak(self) -> int:
        return int(self.top.max())

    def most(self, after: Place | None, until: Place, *, last: bool = True) -> int:
        """The most of any item behind ``after`` (None: from the start) up to ``until``; without that one if not
        ``last``."""
        b, stop = until.block, until.rank + last
        first = self.blocks[0] if after is None else after.block
        start = 0 if after is None else after.rank + 1
        if first is b:
            return self._part(b, start, stop)
        found = max(self._part(first, start, len(first.items)), self._part(b, 0, stop))
        between = self.top[first.number + 1 : b.number]
        return max(found, int(between.max())) if len(between) else found

    def _part(self, b: _Block, start: int, stop: int) -> int:
        part = b.use[start:stop]
        return int(part.max()) + int(self.shift[b.number]) if len(part) else _NONE


class Item(Place):
    """One run of an op. ``own`` bytes are in use while it runs beyond its buffers: workspace, called graphs,
    and results that a clone makes but nobody wants. ``reads`` are storages outside the static set."""

    __slots__ = ("clone", "denied", "gone", "heir", "made", "moved", "number", "op", "own", "placed", "reads")

    def __init__(self, op: int, number: int, reads: tuple[int, ...], own: int, clone: bool) -> None:
        self.op, self.number, self.reads, self.own, self.clone = op, number, reads, own, clone
        self.made: list[Buffer] = []
        self.placed = self.moved = self.denied = self.gone = False
        self.heir: Item | None = None


class Buffer:
    """One residence of a storage. The first ``done`` of ``users`` have run (or are running now)."""

    __slots__ = ("done", "item", "live_out", "size", "storage", "users")

    def __init__(self, storage: int, item: Item, users: list[Item], size: int, live_out: bool) -> None:
        self.storage, self.item, self.users, self.size = storage, item, users, size
        self.live_out, self.done = live_out, 0

    @property
    def remaining(self) -> int:
        return len(self.users) - self.done

    @property
    def end(self) -> Item:
        return self.users[-1] if self.users else self.item


@dataclass(frozen=True, slots=True)
class Split:
    """One clone put in, with what is needed to take it out again."""

    source: Item
    clone: Item
    moved: tuple[tuple[Buffer, Buffer], ...]
    extended: tuple[tuple[Buffer, Item | None], ...]


def recomputable(graph: Graph, k: int) -> bool:
    """Whether op ``k`` may run again (R6); its inputs are another matter."""
    op, uses = graph.ops[k], graph.uses
    made = uses.defines[k]
    row = OPCODES.get(op.target)
    if not made or not op.pure or op.calls or (row is not None and not row.repeatable):
        return False
    if any(s not in op.updates for s in uses.mutates[k]):
        return False
    if op.target == "copy" and len(op.inputs) == len(op.outputs) == 1:
        a, b = graph.values[op.inputs[0]], graph.values[op.outputs[0]]
        if (a.dtype, a.shape, a.stride) == (b.dtype, b.shape, b.stride):
            return False
    return all(len(uses.writers[s]) == 1 and replayable(graph, s) for s in made)


def _indirect(graph: Graph) -> list[bool]:
    """Storages some op reads through a value that is not a result of their definer."""
    found = [False] * len(graph.storages)
    for op in graph.ops:
        for v in op.inputs:
            s = graph.values[v].storage
            d = graph.uses.definer[s]
            if d >= 0 and v not in graph.ops[d].outputs:
                found[s] = True
    for v in graph.outputs:
        d = graph.uses.definer[graph.values[v].storage]
        if d >= 0 and v not in graph.ops[d].outputs:
            found[graph.values[v].storage] = True
    return found


class Tracker:
    """The schedule and its buffers. ``charge[s]`` is what a buffer of storage ``s`` counts; ``base`` counts
    throughout."""

    def __init__(self, graph: Graph, order: Sequence[int], charge: Sequence[int], base: int) -> None:
        uses = graph.uses
        self.graph, self.uses, self.charge = graph, uses, charge
        self.size = [s.size for s in graph.storages]
        self.extra = [extra_bytes(op) for op in graph.ops]
        self.may = [recomputable(graph, k) for k in range(len(graph.ops))]
        rows = list(zip(graph.ops, uses.defines, strict=True))
        self.kept = [not graph.kept.isdisjoint(row) for row in uses.defines]
        self.views = [any(graph.values[v].storage not in made for v in op.outputs) for op, made in rows]
        self.indirect = _indirect(graph)
        self.barriers = self._barriers(order)
        self.runs = [1] * len(graph.ops)
        self.now: Item | None = None
        self.count = 0
        self.buffers: list[list[Buffer]] = [[] for _ in graph.storages]
        self.current: list[Buffer | None] = [None] * len(graph.storages)
        self.first: list[Item] = cast(list[Item], [None] * len(graph.ops))
        self.usage = self._start(order, base)

    def _item(self, k: int, own: int, *, clone: bool) -> Item:
        op = self.graph.ops[k]
        skip = op.updates if clone else ()
        reads = tuple(s for s in self.uses.reads[k] if s not in self.graph.static and s not in skip)
        self.count += 1
        return Item(k, self.count, reads, own, clone)

    def _start(self, order: Sequence[int], base: int) -> Usage:
        items = []
        change = np.zeros(len(order) + 1, dtype=np.int64)
        at: dict[Item, int] = {}
        for p, k in enumerate(order):
            item = self.first[k] = self._item(k, self.extra[k], clone=False)
            items.append(item)
            at[item] = p
            for s in item.reads:
                self.buffers[s][0].users.append(item)
            for s in self.uses.defines[k]:
                kept = s in self.graph.kept
                item.made.append(Buffer(s, item, [], self.charge[s], kept))
                self.buffers[s].append(item.made[-1])
        for rows in self.buffers:
            for b in rows:
                change[at[b.item]] += b.size
                change[len(order) if b.live_out else at[b.end] + 1] -= b.size
        own = np.array([i.own for i in items], dtype=np.int64)
        return Usage(items, base + own + np.cumsum(change)[:-1])

    def _barriers(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        """Ops a clone of each op must stay ahead of: its control successors, and the next write to what it
        reads of the caller's (all other operands of what may run again have their final contents)."""
        found: list[list[int]] = [[] for _ in order]
        for k, op in enumerate(self.graph.ops):
            for c in op.control:
                found[c].append(k)
            for s, need in zip(self.uses.reads[k], self.uses.needs[k], strict=True):
                if s in self.graph.static and s not in op.updates and need < len(self.uses.writers[s]):
                    found[k].append(self.uses.writers[s][need])
        return [tuple(row) for row in found]

    # -- the walk (R1) ---------------------------------------------------------------------------------------

    def begin(self, item: Item) -> None:
        """``item`` runs now: its results are charged, its operands are in use."""
        self.now, item.placed = item, True
        for s in item.reads:
            cast(Buffer, self.current[s]).done += 1
        for b in item.made:
            self.current[b.storage] = b

    def end(self) -> None:
        """The item running now has run: what nobody else reads is free."""
        self.now = None

    def items(self) -> Iterator[Item]:
        """The schedule in order; clones may be put in and sources removed meanwhile."""
        place = self.usage.first()
        while place is not None:
            yield cast(Item, place)
            place = self.usage.following(place)

    def rewind(self) -> None:
        """Back to the start, for another walk over the schedule as it is now."""
        self.now = None
        for item in self.items():
            item.placed = item.moved = item.denied = False
        for rows in self.buffers:
            for b in rows:
                b.done = 0

    # -- questions -------------------------------------------------------------------------------------------

    def in_use(self, b: Buffer) -> bool:
        """Whether the item running now reads or makes the buffer."""
        return self.now is not None and (
            b.item is self.now or (b.done > 0 and b.users[b.done - 1] is self.now)
        )

    def dead(self, b: Buffer) -> bool:
        return b.item.placed and not b.remaining and not b.live_out and not self.in_use(b)

    def candidate(self, item: Item) -> bool:
        """Whether the item has run, may run again, and no op it must stay ahead of has run (R6, R11)."""
        return (
            self.may[item.op]
            and item.placed
            and item is not self.now
            and not item.denied
            and not (self.barriers[item.op] and any(self.run_of(k).placed for k in self.barriers[item.op]))
        )

    def run_of(self, k: int) -> Item:
        """The first run of op ``k``, wherever moves have taken it."""
        item = self.first[k]
        while item.heir is not None:
            item = item.heir
        self.first[k] = item
        return item

    def wanted(self, item: Item) -> list[Buffer]:
        """Buffers of ``item`` that still have users to run."""
        return [b for b in item.made if b.remaining and not b.live_out]

    def freed(self, item: Item) -> int:
        """Bytes of the item's results that are live and not in use right now (R7)."""
        total = 0
        for b in item.made:
            if len(b.users) > b.done and not b.live_out and not self.in_use(b):
                total += b.size
        return total

    def unused(self, item: Item) -> bool:
        """Whether no user of the item's results has run: recomputing it is only a move (R9)."""
        return not any(b.done for b in item.made) and self.droppable(item)

    def droppable(self, item: Item) -> bool:
        if self.uses.mutates[item.op] or self.views[item.op]:
            return False
        return not (self.kept[item.op] and any(b.live_out for b in item.made))

    def target(self, item: Item) -> Item | None:
        """What a clone of ``item`` goes right before: the earliest remaining use (R10) or barrier (R11)."""
        users = [b.users[b.done] for b in self.wanted(item)]
        if not users:
            return None
        if self.barriers[item.op]:
            users.extend(self.run_of(k) for k in self.barriers[item.op])
        return users[0] if len(users) == 1 else min(users, key=lambda i: i.key)

    def buffer_at(self, s: int, item: Place) -> Buffer:
        """The buffer of storage ``s`` that ``item`` reads: the last one defined before it."""
        rows = self.buffers[s]
        return rows[0] if len(rows) == 1 else rows[bisect_left(rows, item.key, key=lambda b: b.item.key) - 1]

    def reads_again(self, item: Item) -> tuple[int, ...]:
        """Storages outside the static set that a clone of ``item`` reads."""
        skip = self.graph.ops[item.op].updates
        return tuple(s for s in item.reads if s not in skip) if skip else item.reads

    def dead_operands(self, item: Item, at: Item, block: Sequence[Item]) -> list[Buffer]:
        """Operands that a clone of ``item`` before ``at`` would revive, but for those that ``block`` makes."""
        rows = (self.buffer_at(s, at) for s in self.reads_again(item))
        return [b for b in rows if self.dead(b) and b.item not in block]

    # -- the same in XLA's terms (`xla_pick.Candidates`) -------------------------------------------------------

    def ran(self) -> list[Item]:
        return list(takewhile(lambda item: item is not self.now, self.items()))

    def released(self, item: Item) -> int | None:
        return None if any(self.indirect[b.storage] for b in item.made) else self.freed(item)

    def revived(self, item: Item, block: Sequence[Item]) -> int:
        at = self.target(item) or self.target(block[-1])
        return sum(b.size for b in self.dead_operands(item, at, block)) if at else 0

    def offered(self, way: str, item: Item) -> int:
        return 0

    # -- steps -----------------------------------------------------------------------------------------------

    def split(self, item: Item) -> Split:
        """Put a clone of ``item`` before the earliest remaining use; all remaining uses go to it, and its
        operands live up to it (R7, R10)."""
        before, wanted = self.target(item), self.wanted(item)
        assert before is not None
        stay = {b.storage for b in wanted}
        spare = sum(self.size[s] for s in self.uses.defines[item.op] if s not in stay)
        clone = self._item(item.op, self.extra[item.op] + spare, clone=True)
        through = self.usage.value(before) - before.own - sum(b.size for b in before.made)
        self.usage.insert(clone, before, through + clone.own + sum(b.size for b in wanted))
        moved = []
        for old in wanted:
            new = Buffer(old.storage, clone, old.users[old.done :], old.size, False)
            del old.users[old.done :]
            self.usage.add(old.end, clone, -old.size)
            rows = self.buffers[old.storage]
            rows.insert(rows.index(old) + 1, new)
            clone.made.append(new)
            moved.append((old, new))
        extended: list[tuple[Buffer, Item | None]] = []
        for s in clone.reads:
            b = self.buffer_at(s, clone)
            end = b.end
            if b.live_out or end.key > clone.key:
                extended.append((b, None))
            else:
                self.usage.add(end, clone, b.size)
                extended.append((b, end))
            insort(b.users, clone, lo=b.done, key=lambda i: i.key)
        self.runs[item.op] += 1
        return Split(item, clone, tuple(moved), tuple(extended))

    def undo(self, split: Split) -> None:
        """Take back the latest split."""
        clone = split.clone
        for b, end in reversed(split.extended):
            b.users.remove(clone)
            if end is not None:
                self.usage.add(end, clone, -b.size)
        for old, new in reversed(split.moved):
            self.buffers[old.storage].remove(new)
            self.usage.add(old.end, clone, old.size)
            old.users.extend(new.users)
        self.usage.remove(clone)
        self.runs[clone.op] -= 1
        self.count -= 1

    def settle(self, split: Split) -> bool:
        """Make a split final: a source nobody uses any more goes. Returns whether it was such a move; moved a
        second time, it is on the do-not-repeat list (R10)."""
        source, clone = split.source, split.clone
        if source.gone or not self.idle(source):
            return source.gone
        clone.denied, clone.moved = source.moved, True
        self.drop(source)
        return True

    def drop(self, item: Item) -> None:
        """Remove an item whose results have no users, and then what only it had need of (R15)."""
        stack = [item]
        while stack:
            x = stack.pop()
            x.gone = True
            for b in x.made:
                self.buffers[b.storage].remove(b)
            if self.run_of(x.op) is x:
                x.heir = self._next_run(x)
            for s in x.reads:
                b = self.buffer_at(s, x)
                last = b.end is x
                b.users.remove(x)
                b.done -= x.placed
                if last and not b.live_out:
                    self.usage.add(b.end, x, -b.size)
                if self.idle(b.item):
                    stack.append(b.item)
            self.usage.remove(x)
            self.runs[x.op] -= 1

    def idle(self, item: Item) -> bool:
        """Whether an item may go: nobody uses its results, and its op runs elsewhere too."""
        if self.runs[item.op] < 2 or any(b.users for b in item.made):
            return False
        return item.clone or self.droppable(item)

    def _next_run(self, item: Item) -> Item:
        rows = (self.buffers[s] for s in self.uses.defines[item.op])
        return min((r[0].item for r in rows if r), key=lambda i: i.key)

    def merge(self, clone: Item, limit: int) -> bool:
        """Give a clone back: keep what it restores resident since its last use, if that fits the limit."""
        pairs = []
        for b in (b for b in clone.made if b.users):
            rows = self.buffers[b.storage]
            i = rows.index(b)
            if not i:
                return False
            pairs.append((rows[i - 1], b))
        if not pairs:
            return False
        start = min((a.end for a, _ in pairs), key=lambda i: i.key)
        more = sum(b.size for _, b in pairs)
        if self.usage.most(start, clone, last=False) + more > limit:
            return False
        for old, new in pairs:
            self.usage.add(old.end, clone, old.size)
            old.users.extend(new.users)
            old.done += new.done
            new.users = []
        self.drop(clone)
        return True
