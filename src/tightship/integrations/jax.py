"""JAX programs within a budget: `fit` (module `jax_fit`) for a whole step, and policies for `jax.checkpoint`.

A policy, from a plan of a traced function: which named values to save.

    step = jax.jit(jax.value_and_grad(loss))             # the body of its lax.scan gives names with checkpoint_name
    chosen = plan_policy(step.trace(params, batch), "60%")
    body = jax.checkpoint(body, policy=chosen.policy)     # in the loss, which then is compiled as ever

Names do not survive ``lower``, so it is the trace, from which ``step.trace(…).lower()`` goes on, that is planned.
Each set of names is a plan of one graph: everything else leaves between the forward and the backward pass and is made
again, from what is saved and from what each iteration began with. Its peak and seconds are simulated; the fastest
within the budget is chosen. XLA fuses and places on its own, so its peak is another number: `temp_bytes` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from tightship.errors import BadInput, Infeasible
from tightship.frontends.jaxpr import lower
from tightship.integrations.jax_fit import Fit, FittedStep, Memory, fit
from tightship.planners.default import top_of_peak
from tightship.planners.evict.problem import EvictionProblem
from tightship.planners.frontier import with_saved
from tightship.simulate import baseline, replay
from tightship.units import parse_budget

__all__ = ["Fit", "FittedStep", "Memory", "Policy", "fit", "plan_policies", "plan_policy", "temp_bytes"]

_EVERY = 8
"""Names of which every set is tried; of more, those are left out one by one that cost least for their bytes."""


@dataclass(frozen=True)
class Policy:
    """``names`` to save of all ``known`` ones; ``peak`` (bytes) and ``time`` (seconds) of a step, simulated, beside
    those without any checkpoint. ``everything``: no checkpoint is needed."""

    names: tuple[str, ...]
    known: tuple[str, ...]
    peak: int
    time: float
    peak_before: int
    time_before: float
    everything: bool = False

    @property
    def policy(self) -> Any:
        """For ``jax.checkpoint(body, policy=…)``."""
        if self.everything:
            return jax.checkpoint_policies.everything_saveable
        return jax.checkpoint_policies.save_only_these_names(*self.names)


def plan_policies(traced: Any) -> tuple[Policy, ...]:
    """Every set of names that no other one beats in both bytes and seconds, the smallest peak first; the last one
    saves everything. ``traced``: what ``jax.jit(f).trace(…)`` gives of a function with a backward pass.

    Raises ``BadInput`` where nothing is named, or nothing is saved for a backward pass."""
    found = lower(traced)
    graph = found.graph
    if not found.names:
        raise BadInput("no named values; name them with jax.ad_checkpoint.checkpoint_name", place=graph.name)
    if not any(op.phase == "backward" for op in graph.ops):
        raise BadInput("no backward pass; give a function of jax.grad", place=graph.name)
    before = replay(graph, baseline(graph))
    frame = EvictionProblem(graph, tuple(range(len(graph.ops))))
    known = tuple(sorted(found.names))
    crossing = _crossing(frame)
    rows = [Policy(known, known, before.peak, before.time, before.peak, before.time, everything=True)]

    def tried(names: Sequence[str]) -> Policy:
        saved = found.carried.union(*(found.names[n] for n in names))
        line = replay(graph, frame.lower(with_saved(frame, frozenset(saved), crossing)))
        return Policy(tuple(names), known, line.peak, line.time, before.peak, before.time)

    rows += map(tried, _sets(known)) if len(known) <= _EVERY else _one_by_one(known, tried)
    rows.sort(key=lambda p: (p.peak, p.time, len(p.names)))
    best: list[Policy] = []
    for p in rows:  # of those that come to the same, the one that saves fewest names
        if not best or p.time < best[-1].time:
            best.append(p)
    return tuple(best)


def _crossing(frame: EvictionProblem) -> NDArray[np.bool_]:
    """The gaps between a use in a forward pass and one in its backward pass: of loops over micro-batches, whose
    gradients are taken in each turn, there are as many passes as turns."""
    behind = np.array([op.phase == "backward" for op in frame.graph.ops])[list(frame.order)]
    before, after = frame.gaps[:, 1], frame.gaps[:, 2]
    last = np.minimum(after, len(behind) - 1)
    found: NDArray[np.bool_] = ~behind[before] & behind[last] & (after < len(behind))
    return found


def plan_policy(traced: Any, budget: Any) -> Policy:
    """The fastest policy whose simulated peak is within ``budget`` (bytes, text such as ``6GiB``, or a percentage of
    the peak without checkpoints). Raises ``Infeasible``, and what `plan_policies` raises."""
    rows = plan_policies(traced)
    wanted = parse_budget(budget)
    static = lower(traced).graph.static_bytes if wanted.beyond_static else None
    limit = wanted.resolve(rows[0].peak_before, static=static)
    fits = [p for p in rows if p.peak <= limit]
    if not fits:
        graph = lower(traced).graph
        top = top_of_peak(graph, replay(graph, baseline(graph)), baseline(graph))
        raise Infeasible(budget=limit, lower_bound=graph.static_bytes, best_peak=rows[0].peak, top=top)
    return min(fits, key=lambda p: (p.time, p.peak))


def temp_bytes(compiled: Any) -> int:
    """What XLA takes for temporaries: of ``jax.jit(f).lower(…).compile()``."""
    return int(compiled.memory_analysis().temp_size_in_bytes)


def _sets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for n in range(len(names) + 1):
        yield from combinations(names, n)


def _one_by_one(names: Sequence[str], tried: Any) -> list[Policy]:
    rows = [tried(names)]
    while rows[-1].names:
        last = rows[-1]
        fewer = [tried(tuple(n for n in last.names if n != gone)) for gone in last.names]
        rows.append(min(fewer, key=lambda p: ((p.time - last.time) / max(1, last.peak - p.peak), p.peak)))
    return rows
