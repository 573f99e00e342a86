"""What the graphs of a compiled model take, by where they are called, and how a budget is divided among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["Ahead", "Entry", "Part", "Place", "divide", "larger", "name_of", "rests", "top_of"]


Place = tuple[int, int]
"""Where a graph is called: the number of its Python frame, and how many calls of that frame's graphs are then between
their two passes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one graph takes, in bytes. ``static``: the caller's tensors no earlier graph has counted.
    ``dynamic``: the most it needs beyond its inputs while it runs, ``forward`` while its forward pass does. ``rest``:
    what stays between its two passes. ``gradients``: what it hands out in the backward pass, ``results``: in the
    forward pass, if no other graph follows. ``unplanned_*`` are the same if everything was kept. ``beside``: earlier
    graphs may be between their two passes meanwhile. ``place``: where it was planned. ``handed``: what stays between
    its passes where what it saves is not kept (`elsewhere`): its results. ``parameters``: gradients of those alone,
    which other calls of it hand out."""

    static: int
    dynamic: int
    rest: int
    gradients: int
    unplanned: int
    unplanned_rest: int
    results: int = 0
    forward: int = 0
    beside: bool = True
    place: Place = (-1, 0)
    handed: int = 0
    parameters: int = 0

    def elsewhere(self) -> Entry:
        """The same under hooks that take over what is saved: a checkpoint's, which has it computed again, or those
        that move it away."""
        return replace(self, rest=self.handed, unplanned_rest=self.handed)

    @property
    def training(self) -> bool:
        return bool(self.gradients or self.unplanned_rest)


@dataclass(frozen=True, slots=True)
class Ahead:
    """Calls of the same code that are to follow before the first backward pass: ``count`` of them, with ``static``
    bytes of parameters and buffers that nobody has counted yet. ``elsewhere``: what they save is not kept;
    ``others``: modules of other classes are compiled beside them, which take so many bytes ``beside``, of a budget in
    bytes: a percentage grows with them. ``batches``: bytes among the static ones that are there if each call has a
    batch of its own, and not what the call before it made. ``said``: as many as the caller says."""

    count: int = 0
    static: int = 0
    elsewhere: bool = False
    others: bool = False
    beside: int = 0
    batches: int = 0
    said: bool = False

    def each(self) -> list[Ahead]:
        """The same with batches of their own, and without, which is for where that is too much."""
        return [self, replace(self, static=self.static - self.batches, batches=0)][: 1 + bool(self.batches)]

    def parts(self, room: int, need: int, rest: int, gradients: int) -> list[tuple[int, int]]:
        """Of ``room`` bytes for a graph and those ahead, in the order to try: the most for one of them, which needs
        ``need`` if it keeps everything, and how many of ``rest`` may stay between its passes. While the last of them
        runs, the others are between theirs; while the first does, the others have handed out their ``gradients``.
        At first both are the same part of what they would be; then one may have more, and the others keep less.
        Where what they save is not kept, there is one division, with less than nothing where others take more than
        there is."""
        if self.elsewhere:  # while one in between runs, some have done the one, and some the other
            return [(room - self.count * max(rest, gradients), rest)]
        whole = need + self.count * rest
        found: dict[tuple[int, int], None] = {}
        for share in (min(1.0, max(room, 0) / max(whole, 1)), 1.0, 0.875, 0.75):
            most = max(min(math.ceil(need * share), room - self.count * gradients), 0)
            found[most, min(max(room - most, 0) // max(self.count, 1), rest)] = None
        return list(found)


@dataclass(frozen=True, slots=True)
class Part:
    """A graph's part of a budget: at most so many bytes beyond its inputs while it runs (``most``), and between its
    passes (``rest``)."""

    most: int
    rest: int


def divide(rows: Sequence[Entry], limit: int) -> list[Part]:
    """What each of a step's graphs may take, of ``limit`` bytes for all: the same share, as large as possible, of
    what it would need more to keep everything than it takes as planned. While a graph runs it has all that is then
    left.

    The rows fit together as planned. A graph that is planned again within its part fits whatever others do in theirs.
    """
    static, gradients = sum(e.static for e in rows), sum(e.gradients for e in rows)

    def parts(share: float) -> list[Part]:
        return [
            Part(
                e.dynamic + int(share * max(e.unplanned - e.dynamic, 0)),
                e.rest + int(share * max(e.unplanned_rest - e.rest, 0)),
            )
            for e in rows
        ]

    def room(found: Sequence[Part]) -> list[int]:
        """Beyond the inputs, beside what earlier graphs keep and later ones have handed out."""
        kept, later, rooms = 0, gradients, []
        for e, part in zip(rows, found, strict=True):
            later -= e.gradients
            rooms.append(limit - static - later - (kept if e.beside else 0))
            kept += part.rest
        return rooms

    def fits(share: float) -> bool:
        found = parts(share)
        return all(p.most <= r for p, r in zip(found, room(found), strict=True))

    low, high = (1.0, 1.0) if fits(1.0) else (0.0, 1.0)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    found = parts(low)
    return [Part(r, p.rest) for p, r in zip(found, room(found), strict=True)]


def rests(rows: Sequence[Entry], k: int) -> int:
    """Bytes of what earlier graphs keep between their passes while the ``k``-th of them runs."""
    return sum(r.rest for r in rows[:k]) if rows[k].beside else 0


def name_of(rows: Sequence[Entry], k: int) -> str:
    frame, before = rows[k].place
    return f"graph {frame}" + (f", call {before + 1} of it" if before else "")


def top_of(rows: Sequence[Entry], k: int, static: int) -> list[tuple[str, int, str]]:
    """What else there is while the ``k``-th of the graphs runs, for people."""
    kept: dict[int, list[int]] = {}
    for r in rows[:k] if rows[k].beside else ():
        kept.setdefault(r.place[0], []).append(r.rest)
    found = [
        (f"kept by graph {frame}" + (f", {len(sizes)} calls of it" if len(sizes) > 1 else ""), sum(sizes), "")
        for frame, sizes in kept.items()
    ]
    found += [(f"gradients of {name_of(rows, n)}", rows[n].gradients, "") for n in range(k + 1, len(rows))]
    found += [
        (f"what {name_of(rows, k)} makes", rows[k].dynamic, ""),
        ("parameters, buffers and batch", static, ""),
    ]
    return sorted((row for row in found if row[1]), key=lambda row: -row[1])


def larger(a: Entry, b: Entry) -> Entry:
    pairs = ((getattr(a, n), getattr(b, n)) for n in Entry.__slots__)
    return Entry(*(max(p) for p in pairs))
