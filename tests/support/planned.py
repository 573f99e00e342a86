"""Random graphs of all sorts, planned in every way there is: the campaign's class ``plans`` (benchmarks/soak.py).

A case is a graph with one planner, one budget and, for the default planner, one choice of each of its options; a
large graph is planned by all planners. The oracle judges what comes of it (`support.oracle`), and the verifier.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

from support.oracle import faults
from support.strategies import EVERYTHING, GATHER, REDUCE, random_graph
from tightship import api
from tightship.errors import Infeasible, TightshipError, VerificationFailed
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.planners import default, planners
from tightship.verify import verify

__all__ = ["MANY", "Judged", "features", "plans", "size_of", "wrong"]


class Judged(NamedTuple):
    """What came of a case, what is wrong with it, if something is, and what it had that is counted beside."""

    what: str
    fault: str = ""
    had: tuple[str, ...] = ()


WAYS = ("recompute", "compress", "offload", "redraw")
SELDOM = {"evict/exact": 0.2, "chain": 0.5, "states": 0.5}
"""Planners that take longest: how often they are drawn, as a part of the others."""
LIMITS = {"evict/exact": {"seconds": 1.0}}
"""Options of named planners, where they have a limit of their own."""
MANY = 25
"""Ops from which on a graph is planned by all planners."""


def plans(seed: int, size: int) -> Judged:
    """A graph with a planner and a budget; a large one with all planners."""
    rng = random.Random(f"plans {seed}")
    graph = random_graph(seed, size, **_knobs(rng))
    systems = sorted(api.systems())
    if size >= MANY:
        rows = [_planned(graph, name, rng) for name in ("default", "default", *systems)]
        had = tuple(h for row in rows for h in (row.what, *row.had))
        fault = next((row.fault for row in rows if row.fault), "")
        return Judged("all planners", fault, (*features(graph), *had))
    weights = [len(systems) / 4, *(SELDOM.get(name, 1.0) for name in systems)]
    row = _planned(graph, rng.choices(["default", *systems], weights)[0], rng)
    return row._replace(had=(*features(graph), *row.had))


def size_of(rng: random.Random) -> int:
    """Of 1,000 graphs 940 have 2 to 10 ops, 59 up to 24 and one up to 60."""
    low, high = rng.choices(((2, 10), (11, MANY - 1), (MANY, 60)), (940, 59, 1))[0]
    return rng.randint(low, high)


def _knobs(rng: random.Random) -> dict[str, float]:
    """A third of the graphs has all sorts of ops, in a third one sort stands out, and a third is as training steps
    are: hardly anything but plain ops, and a second half that reads what the first one made, last made first. One in
    ten is on a GPU."""
    knobs: dict[str, float] = {
        "largest": rng.choice((1, 4, 16)), "static_writes": rng.choice((0.0, 0.0, 1.0)), "nested": 0.1,
        "random": rng.choice((0.0, 0.06, 0.2)), "cuda": float(rng.random() < 0.1), **EVERYTHING,
    }  # fmt: skip
    sorts = ("view", "inplace", "stats", "random", "effect", "calls", *EVERYTHING)
    like = rng.randrange(3)
    if like == 1:
        knobs |= dict.fromkeys(EVERYTHING, 0.0) | {rng.choice(sorts): 0.4}
    elif like == 2:
        knobs |= dict.fromkeys(sorts, 0.01) | {"mirror": 1.0, "updates": 0.1, "static_writes": 0.0}
    return knobs


def features(graph: Graph) -> tuple[str, ...]:
    """Which of the things that a graph may have this one has."""
    home, there = [v.storage for v in graph.values], set(graph.static)
    seen: set[str] = {f"{s.pool} pool" for s in graph.storages if s.pool != "device"}
    for op in graph.ops:
        new = {home[v] for v in op.outputs} - there
        there |= new
        seen |= {name for name, has in (
            ("several results", len(new) > 1), ("views", len(op.outputs) > len(new) and not op.mutates),
            ("values that share a result", len(op.outputs) > len(new) > 0),
            ("in place", bool(set(op.mutates) - graph.static)),
            ("writes of inputs", bool(set(op.mutates) & graph.static)),
            ("statistics", bool(op.updates)), ("control", bool(op.control)), ("random", op.random),
            ("random state", op.state > 0), ("effects", op.effect), ("workspace", op.workspace > 0),
            ("requests", bool(op.requests)), ("results over inputs", bool(op.overwrites)), ("calls", bool(op.calls)),
            ("nested calls", any(g.nesting[0] for g in op.calls)), ("collectives", op.target == REDUCE),
            ("gathers", op.target == GATHER), ("a GPU", op.device != "cpu"),
        ) if has}  # fmt: skip
    seen |= {"slices" for v in graph.values if v.name.startswith("p")}
    seen |= {"streamed parameters" for s in graph.storages if s.name.startswith("away")}
    return tuple(f"graph: {name}" for name in sorted(seen))


def _planned(graph: Graph, name: str, rng: random.Random) -> Judged:
    budget = f"static+{rng.randint(*rng.choice(((30, 105), (85, 105), (95, 100))))}%"
    try:
        if name == "default":
            made = default.plan(graph, budget if rng.random() < 0.9 else None, _options(rng))
        else:
            limits = LIMITS.get(name, {})
            made = api.plan_named(graph, name, rng.choice((budget, None)), **limits).plan
            made = replace(made, budget=None)  # these say themselves whether they meet it
    except Infeasible as no:
        fault = f"{name}: its bound is no bound" if no.lower_bound > no.best_peak else ""
        return Judged(f"{name} infeasible", fault)
    except VerificationFailed as error:
        return Judged(name, f"{name}: made a wrong plan: {error.violations[0]}")
    except TightshipError:
        return Judged(f"{name} refused")
    return Judged(name, wrong(graph, made, name), _means(made))


def _means(plan: Plan) -> tuple[str, ...]:
    """What a plan does, by the kinds of its steps and residences."""
    steps = plan.steps
    seen = {step.kind for step in steps} - {"compute", "free"}
    seen |= {name for name, has in (
        ("two streams or more", any(step.stream for step in steps)),
        ("saved states", any(step.saves for step in steps)),
        ("results over inputs", any(step.reuses for step in steps)), ("places", bool(plan.residences)),
        ("handed out", plan.handed > 0), ("rounding", plan.lossy), ("another order", plan.moved > 0),
    ) if has}  # fmt: skip
    return tuple(f"plan: {name}" for name in sorted(seen))


def _options(rng: random.Random) -> default.Options:
    allow = [way for way in WAYS if rng.random() < 0.5] or ["recompute"]
    means = {"offload": "offload", "compress": "compress"}
    evicts = [n for n in planners("evict") if means.get(n, "recompute") in allow and n != "evict/exact"]
    return default.Options(
        order=rng.choice(["best", "given", *planners("order")]),
        evict=rng.choice(["anneal", *evicts]).removeprefix("evict/"),
        seconds=2.0,
        work=20_000,
        gap=rng.choice((0.001, 0.0)),
        seed=rng.randrange(9),
        hand_out=rng.random() < 0.5,
        place=rng.random() < 0.8,
        reuse=rng.random() < 0.7,
        allow=",".join(allow),
        lossy=rng.random() < 0.2,
        host=rng.choice((0, 0, 64 * rng.randint(1, 40))),
    )


def wrong(graph: Graph, plan: Plan, name: str) -> str:
    said = [*faults(graph, plan), *(str(v) for v in verify(graph, plan))]
    return f"{name}: {said[0]}" if said else ""
