"""Greedy placement: orders of buffers, each into the first or the smallest hole; the planners made of them.

Each row of ``PLANNERS`` is a planner of its own on the command line. ``best_greedy`` tries their packings, and some
more, before any search: twenty orders, most of them given up early. Of very many buffers the first answer is a sweep
through time, as an allocator at run time would go: a tenth of the time of the others, so that there is one worth
having when time is short.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from tightship import _core
from tightship.baselines import xla_heap
from tightship.plan import Problem, Solution
from tightship.planners import PlannerInfo
from tightship.planners.place import orders
from tightship.planners.place.orders import Best, stacked
from tightship.planners.place.problem import FREE, NoOptions, frame

__all__ = ["GREEDY", "MANY", "PLANNERS", "START", "Greedy", "Packing", "best_greedy"]

Packing = tuple[orders.Order, bool]
"""An order, and whether each buffer goes into the smallest hole that fits (True) or into the first."""

START: Packing = (orders.by_size, False)
"""First fit by size, which often leaves less than best fit does, and is twice as fast."""

PEAK_FIRST: tuple[Packing, ...] = tuple(
    (partial(orders.peak_first, stack=stack, rest=rest), best_fit)
    for stack, rest, best_fit in (
        ("end", "area", True),
        ("start", "size", False),
        ("length", "size", False),
        ("size", "length", False),
        ("end", "length", False),
    )
)

SKYLINE: tuple[Packing, ...] = tuple((partial(orders.skyline, rule=rule), False) for rule in orders.SKIES)

BY_START: Packing = (orders.by_start, False)


@dataclass(frozen=True, slots=True)
class Greedy:
    """A planner that packs in each of some orders and keeps the smallest arena; without any order, every buffer
    has bytes of its own. The texts are its documentation."""

    name: str
    summary: str
    packings: tuple[Packing, ...]
    source: str
    guarantee: str
    limits: str
    minimized: str = "the arena"
    complexity: str = "O(n log n) set operations in practice"

    def plan(self, problem: Problem, options: NoOptions | None = None) -> Solution:
        f = frame(problem)
        if not self.packings:
            return f.solution(stacked(f), self.name)
        if self.packings == (BY_START,) and not f.related and (f.arrays.pinned == FREE).all():
            return f.solution(f.placer.sweep(orders.by_start(f.arrays))[0], self.name)  # the same, sooner
        packed = [f.placer.pack(order(f.arrays), best_fit=best_fit)[0] for order, best_fit in self.packings]
        return f.solution(min(packed, key=f.arena), self.name)

    @property
    def info(self) -> PlannerInfo:
        text = (
            f"{self.summary}\n\nProblem: offsets for buffers with known live ranges. Minimized: {self.minimized}. "
            f"Source: {self.source}. Guarantee: {self.guarantee}. Complexity: {self.complexity}. "
            f"Known limits: {self.limits}."
        )
        return PlannerInfo(self.name, "place", self.summary, NoOptions, self.plan, text)


TABLE = (
    Greedy(
        "naive",
        "Every buffer in bytes of its own (no reuse), the reference for what placement saves.",
        (),
        source="every memory planner's baseline",
        guarantee="valid for any execution order",
        limits="all of them",
        minimized="nothing; the arena is the sum of the sizes",
        complexity="linear",
    ),
    Greedy(
        "first-fit",
        "Buffers as they come alive, each at the lowest offset that is free.",
        (BY_START,),
        source="first fit, what an allocator without knowledge of the future does at run time (Robson 1977)",
        guarantee="within O(log n) of the lower bound (Kierstead)",
        limits="short-lived buffers end up between long-lived ones (fragmentation)",
    ),
    Greedy(
        "greedy-by-size",
        "Largest buffer first, each into the smallest hole that fits.",
        ((orders.by_size, True),),
        source="greedy by size with best fit, as in TensorFlow Lite and AITemplate (Pisarchyk and Lee, "
        '"Efficient Memory Management for Deep Neural Net Inference", 2020)',
        guarantee="none better than the sum of sizes; in practice within a few percent of the lower bound on "
        "neural networks",
        limits="a hole that a later, smaller buffer would need is not kept free for it",
    ),
    Greedy(
        "by-breadth",
        "Buffers alive at the broadest time first, each into the smallest hole that fits.",
        ((orders.by_breadth, True),),
        source="TensorFlow Lite's greedy by breadth (Pisarchyk and Lee 2020): operations by the bytes alive at "
        "them, the buffers of each by size",
        guarantee="the broadest time is packed without a hole; none for the arena",
        limits="what lies at the broadest time is stacked by size alone, whatever its live range",
    ),
    Greedy(
        "by-conflicts",
        "Buffers with the most conflicts first, each into the smallest hole that fits.",
        ((orders.by_conflicts, True),),
        source="TVM's and the ARM Ethos-U compilers' greedy by conflicts",
        guarantee="none",
        limits="sizes only break ties, so a large short-lived buffer comes late and finds no hole",
    ),
    Greedy(
        "peak-first",
        "What is alive at the peak first, as one stack without a hole, then the others where they fit.",
        PEAK_FIRST,
        source="ours. In a training step the buffers alive at the peak are mostly saved activations, last made "
        "first freed: stacked with the last to die at the bottom, what they free after the peak is one growing "
        "hole (and so, before the peak, with the first to live at the bottom)",
        guarantee="no hole at the peak; none for the arena",
        limits="on problems without one marked peak no better than any order",
        complexity="a greedy packing for each of five orders",
    ),
    Greedy(
        "skyline",
        "A skyline raised from the bottom: at its lowest stretch, a buffer that is alive within it.",
        SKYLINE,
        source='Sekiyama, Imai, Negishi and Raymond, "Profile-guided memory optimization for deep neural '
        'networks" (2018), after the best-fit skyline of Burke, Kendall and Whitwell (2004): the lowest stretch '
        "takes the longest-lived buffer that fits into it; where none does, it is raised to its lower neighbor. "
        "Two more rules: the largest (bytes times time), and the most snug (touching the ends of the stretch). "
        "The best of the three, each buffer finally as low as it goes",
        guarantee="none",
        limits="pins, alignments and gaps are honored, but not looked at when the order is made",
        complexity="every step looks at the buffers that fit into a stretch, quadratic at worst",
    ),
)

PLANNERS = tuple(row.info for row in TABLE)

GREEDY: tuple[Packing, ...] = (
    START,
    (orders.by_size_then_start, False),
    *PEAK_FIRST,
    (orders.by_size, True),
    (orders.by_breadth, True),
    (orders.by_area, False),
    (orders.by_length, True),
    (orders.by_conflicts, True),
    BY_START,
    (orders.by_start, True),
    (orders.given, False),
    *xla_heap.GREEDY,
    *SKYLINE,
)
"""Those that usually win first."""

SOME, MANY = 1_000, 20_000
"""Buffers beyond which there is a sweep first, and the skyline is left to its own planner."""

MANY_GREEDY: tuple[Packing, ...] = (
    (orders.by_size_then_start, False),
    *(p for p in GREEDY if p not in SKYLINE and p != (orders.by_size_then_start, False)),
)
"""For many: first the one that goes through memory in order of time where sizes are equal, so that it is fast."""

MOST_PLACED = 2_000_000
"""Packings are tried until so many buffers are placed: all up to a hundred thousand buffers, two of a million."""

LEAST_TIME = 0.02
"""Seconds for the first packing, whatever the limit: it is so much better than none."""

ORDER_TIME = 2e-6
"""Seconds, for each buffer, that are left to begin with another order: making one is not ended by the time."""


def best_greedy(best: Best, enough: int, time_limit: float | None) -> Packing:
    """Improves the best, and returns how it was packed. Ends at an arena of ``enough`` bytes, and by the time."""
    f, count = best.frame, best.frame.arrays.count
    packings, needed = (MANY_GREEDY, ORDER_TIME * count) if count > MANY else (GREEDY, 0.0)
    how = packings[0]
    if count > SOME:
        _sweep(best)
    for k, (order, best_fit) in enumerate(packings):
        over = k * count >= MOST_PLACED or f.seconds_left(time_limit) <= needed
        if not best.first and (best.arena <= enough or over):
            break
        by = order(f.arrays)  # takes a part of the time
        left = max(f.seconds_left(time_limit), LEAST_TIME if best.first else 0.0)
        offsets, arena = f.placer.pack(by, best_fit=best_fit, cutoff=best.cutoff, seconds=left)
        if best.offer(offsets, int(arena)):
            how = order, best_fit
    return how


def _sweep(best: Best) -> None:
    """A first packing, of buffers alive in their whole live ranges; whatever the time limit. None where there may be
    conflicts beside these."""
    f, a = best.frame, best.frame.arrays
    if (a.pinned == FREE).all() and (not f.related or f.placer.by_time):
        placer = _core.Placer(a.lower, a.upper, a.size, a.alignment, a.pinned) if f.related else f.placer
        offsets, _ = placer.sweep(orders.by_start(a))
        best.offer(np.asarray(offsets), f.arena(offsets))
