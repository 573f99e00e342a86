"""Greedy by size, then hill climbing over the order in which buffers are placed.

Problem: offsets for buffers with known live ranges. Minimized: the arena. Source: after TVM's hill climb
(``tvm-hill-climb``): moves the buffers that make up the top of the arena before those in their way and places again,
here with late acceptance (Burke and Bykov 2008) and moves of many buffers at once. Guarantee: never worse than first
fit by size; stops with proof at the lower bound. Complexity: one greedy packing a round. Known limits: a packing
changes as a whole with its order, so on tight problems progress is slow.
"""

from __future__ import annotations

from tightship.plan import Problem, Solution
from tightship.planners.place.greedy import START
from tightship.planners.place.orders import Best, Order
from tightship.planners.place.orders import Limits as Options
from tightship.planners.place.problem import frame

__all__ = ["Options", "climb", "plan"]


def plan(problem: Problem, options: Options | None = None) -> Solution:
    o, best = options or Options(), Best(frame(problem))
    return best.search(problem, "hill-climb", lambda: climb(best, o, *START))


def climb(best: Best, o: Options, order: Order, best_fit: bool) -> None:
    """Improves the best by packings found from one order on."""
    f = best.frame
    offsets, arena = f.placer.climb(
        order(f.arrays),
        best_fit=best_fit,
        seed=o.seed,
        work=o.work_limit,
        seconds=f.seconds_left(o.time_limit),
        bound=f.bound,
    )
    best.offer(offsets, int(arena))
    best.go_on()
