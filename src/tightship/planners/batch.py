"""The largest batch whose step fits a budget: bisection over graphs of one step at different batch sizes.

Problem: the largest size of the batch for which a plan meets the budget. Measure: as of the default planner.
Guarantee: the answer comes with its verified plan; the next larger size tried had none that was found, or does not
run. Complexity: a capture for each size tried, about a dozen, and a plan for each that no bound rules out. Known
limits: takes the least memory to grow with the batch, and all sizes that run to be multiples of one number.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from tightship.analysis.bounds import lower_bound
from tightship.errors import BadInput, Infeasible
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.planners import default
from tightship.simulate import unplanned
from tightship.units import Budget, parse_budget

__all__ = ["LARGEST", "BatchSize", "MaxBatch", "max_batch"]

LARGEST = 1 << 20
_CLOSE = 64
"""Sizes above this are found to within one part in so many."""

GraphOf = Callable[[int], Graph]


@dataclass(frozen=True)
class BatchSize:
    """A size that was looked at: bytes and seconds of a step as it is, and of the plan within the budget. ``met``:
    whether there is one, None where none was looked for."""

    batch: int
    unplanned_peak: int
    time_before: float
    met: bool | None = None
    peak: int | None = None
    time: float | None = None


@dataclass(frozen=True)
class MaxBatch:
    """``batch`` is the largest size found, ``plan`` fits its ``graph``; ``tried`` says of each size whether there was
    a plan (True) or not; ``refused`` why a size does not run. Sizes are multiples of ``unit``. ``interrupted``: the
    search was ended, and a larger one may fit. ``sizes``: all that ran, the smallest first."""

    batch: int
    plan: Plan
    graph: Graph
    tried: dict[int, bool] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    unit: int = 1
    interrupted: bool = False
    sizes: tuple[BatchSize, ...] = ()


def max_batch(
    graph_of: GraphOf,
    budget: Budget | str | int,
    options: default.Options | None = None,
    *,
    start: int = 1,
    say: Callable[[str], None] | None = None,
) -> MaxBatch:
    """The largest batch that fits ``budget`` bytes. ``graph_of(n)`` is the step at batch size ``n``, ``start`` a size
    that runs.

    Raises ``Infeasible`` if no size that runs fits, ``BadInput`` for a budget that is a percentage and for a step
    that runs at no size but ``start``; what ``graph_of(start)`` raises is passed on.
    """
    budget = parse_budget(budget)
    if budget.bytes is None:
        raise BadInput(f"{budget}: the largest batch needs a budget in bytes, such as 6GiB", place="budget")
    search = _Search(graph_of, budget.bytes, options or default.Options(), say or (lambda text: None))
    start = max(1, start)
    search.graphs[start] = graph_of(start)
    unit, interrupted = 1, False
    try:
        unit = search.unit(start)
        search.bisect(start // unit, unit)
    except KeyboardInterrupt:
        if not search.plans:
            raise
        interrupted = True
    if not search.plans:
        smallest = min(search.graphs)
        search.plans[smallest] = default.plan(search.graphs[smallest], budget, options)
    best = max(search.plans)
    tried = {n: n in search.plans for n in sorted(search.tried | {best})}
    return MaxBatch(
        best,
        search.plans[best],
        search.graphs[best],
        tried,
        search.refused,
        unit,
        interrupted,
        search.sizes(),
    )


@dataclass(frozen=True)
class _Search:
    """What is known of the sizes that were looked at."""

    graph_of: GraphOf
    budget: int
    options: default.Options
    say: Callable[[str], None]
    graphs: dict[int, Graph] = field(default_factory=dict)
    plans: dict[int, Plan] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    tried: set[int] = field(default_factory=set)

    def runs(self, n: int) -> bool:
        """Whether the step runs at this size: whatever it raises is an answer."""
        if n not in self.graphs and n not in self.refused:
            try:
                self.graphs[n] = self.graph_of(n)
            except Exception as error:
                self.refused[n] = " ".join(f"{type(error).__name__}: {error}".split())
        return n in self.graphs

    def unit(self, start: int) -> int:
        """What all sizes are multiples of: the smallest divisor of ``start`` by which it can grow."""
        for step in (d for d in range(1, start + 1) if start % d == 0):
            self.say(f"a batch of {start + step}")
            if self.runs(start + step):
                return step
        why = self.refused[start + 1]
        raise BadInput(
            f"the step does not run at other batch sizes than the sample's {start}: with {start + 1}, {why}"
        )

    def bisect(self, start: int, unit: int) -> None:
        """Looks at ``start`` times ``unit``, then at twice as many, then between what fits and what does not."""
        low, high = 0, start
        while high * unit < LARGEST and self.fits(high * unit):
            low, high = high, min(2 * high, LARGEST // unit)
        while high - low > max(1, low // _CLOSE):
            middle = (low + high) // 2
            # Batch norm at 1: larger ones may run, and fit.
            small = not self.plans and not self.runs(middle * unit)
            low, high = (middle, high) if small or self.fits(middle * unit) else (low, middle)

    def sizes(self) -> tuple[BatchSize, ...]:
        """Of every size that runs, what is known."""
        found = []
        for n, graph in sorted(self.graphs.items()):
            before, plan = unplanned(graph), self.plans.get(n)
            met = n in self.plans if n in self.tried or plan is not None else None
            known = () if plan is None else (plan.peak, plan.time)
            found.append(BatchSize(n, before.peak, before.time, met, *known))
        return tuple(found)

    def fits(self, n: int) -> bool:
        if n not in self.tried:
            self.tried.add(n)
            self.say(f"a batch of {n}")
            if self.runs(n) and self._least(n) <= self.budget:
                with suppress(Infeasible):
                    self.plans[n] = default.plan(self.graphs[n], self.budget, self.options)
        return n in self.plans

    def _least(self, n: int) -> float:
        """Bytes below which there is no plan of this size, whatever may leave memory."""
        graph, away = self.graphs[n], self.options.allow != default.Options().allow or self.options.hints
        return lower_bound(graph, least=dict.fromkeys(range(len(graph.storages)), 0) if away else {})
