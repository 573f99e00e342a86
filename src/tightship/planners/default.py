"""Order, eviction and placement composed into one verified plan; what `tightship plan` uses.

Problem: the fastest plan whose peak, and whose arena, fit the budget. Measure: seconds, bytes. Source: the parts
named in ``Options``. Guarantee: the plan is verified; peak and static set plus arena are within the budget, or
``Infeasible`` is raised with the least peak reached. Complexity: that of the parts. Known limits: decides order
first, evictions second, offsets last; when offsets do not fit, evictions are searched again under a lower limit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TypedDict

from tightship.analysis.bounds import lower_bound, time_bound
from tightship.analysis.packing import packings
from tightship.diagnose.advice import advice
from tightship.errors import BadInput, Infeasible
from tightship.graph import Graph
from tightship.options import option
from tightship.plan import Plan, Step
from tightship.planners import planner
from tightship.planners.evict.dead_copies import without_idle_copies
from tightship.planners.evict.problem import MEANS, Decision, Frame, Progress
from tightship.planners.evict.rng_replay import redrawable, with_states
from tightship.planners.hints import parse_hints, resolve
from tightship.planners.layout import Layout, lay_out
from tightship.simulate import Timeline, baseline, replay
from tightship.units import Budget, resolve_budget
from tightship.verify import check

__all__ = [
    "Interrupted",
    "Options",
    "PlanOptions",
    "adopted",
    "displaced",
    "frame_of",
    "least_time",
    "order_of",
    "plan",
    "read_options",
    "top_of_peak",
]

_REDRAW = "redraw"
_TIGHTEN = 4
"""How often evictions are searched again because the placement came out larger than the peak."""


class Interrupted(KeyboardInterrupt):
    """The search was ended by Ctrl-C; ``plan`` is the best it had found, verified."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


@dataclass(frozen=True, slots=True)
class Options:
    """What the default planner decides, how long it looks, and which means it may take."""

    order: str = option("best", "planner of the order; given: the graph's own order")
    evict: str = option("anneal", "planner of what leaves memory between two uses")
    seconds: float = option(10.0, "time limit of the search, in seconds")
    work: int = option(150_000_000, "limit of the search in simulated ops; makes a plan reproducible")
    seed: int = option(0, "seed of random moves")
    hand_out: bool = option(True, "give results to the caller outside the arena")
    place: bool = option(True, "decide every offset; without, the plan runs on the ordinary heap")
    reuse: bool = option(True, "let results overwrite inputs that nothing needs any more, where ops allow it")
    allow: str = option(
        "recompute",
        "how storages may leave memory: recompute, compress, offload, redraw (recompute random ops too, from saved "
        "random states)",
        metavar="MEANS,…",
    )
    hints: str = option(
        "",
        "what to do with the values of modules: keep, recompute, compress or offload, by a pattern of module names",
        metavar="PATTERN=MEANS,…",
    )
    lossy: bool = option(False, "let codecs round single precision to bfloat16")
    host: int = option(0, "most bytes offloaded at once; 0: no limit", metavar="BYTES")


class PlanOptions(TypedDict, total=False):
    """The fields of `Options` as keywords of the public functions: ``**options: Unpack[PlanOptions]`` (PEP 692)."""

    order: str
    evict: str
    seconds: float
    work: int
    seed: int
    hand_out: bool
    place: bool
    reuse: bool
    allow: str
    hints: str
    lossy: bool
    host: int


def read_options(options: PlanOptions, caller: str) -> Options:
    """The keywords of a public function as `Options`. Raises ``BadInput``, naming the caller, for an unknown one."""
    known = Options.__dataclass_fields__
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise BadInput(
            f"unknown option {unknown!r}: the planner's options are {', '.join(known)}", place=caller
        )
    return Options(**options)


def plan(
    graph: Graph,
    budget: Budget | str | int | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
    frame: Frame | None = None,
) -> Plan:
    """A verified plan for ``budget`` (bytes, text with a unit, or a percentage of the unplanned peak; none:
    keep everything, in the better order). ``frame``: the graph in an order decided before, so that several budgets
    share what is found.

    Raises ``Infeasible`` with budget, lower bound, least peak reached and what makes it up; after Ctrl-C
    ``Interrupted`` with the best plan so far, or ``KeyboardInterrupt`` where none fits yet.
    """
    o = options or Options()
    began = time.perf_counter()
    before = replay(graph, baseline(graph))
    limit = resolve_budget(budget, before.peak, static=graph.static_bytes)
    frame = frame or frame_of(graph, order_of(graph, o, before.peak), o)
    bound = lower_bound(graph, redraw=_redraws(o), least=_least(frame), in_place=frame.in_place)
    target = before.peak if limit is None else limit
    best: Timeline | None = None  # of all tries
    needed: int | None = None
    interrupted = False
    for _ in range(_TIGHTEN):
        left = o.seconds - (time.perf_counter() - began)
        # A search again begins where the last one ended: a part of the work is enough.
        share = o.work if best is None else o.work // (30 if interrupted else 3)
        decision = _evict(frame, target, replace(o, seconds=max(1.0, left), work=share), progress)
        interrupted, frame.archive.stopped = interrupted or frame.archive.stopped, False
        if not decision.valid:  # the planner found nothing that can be carried out
            decision = frame.cost(frame.nothing(), target)
        steps = frame.lower(decision, target)
        steps = with_states(graph, without_idle_copies(steps))
        line = replay(graph, steps)
        if best is None or line.peak < best.peak:
            best, best_steps = line, steps
        if limit is not None and not decision.met:
            if interrupted:
                raise KeyboardInterrupt
            raise _infeasible(graph, limit, bound, best, best_steps, needed)
        layout = _layout(graph, steps, o)
        placed = max(line.peak, graph.static_bytes + layout.arena + layout.handed)
        if limit is None or placed <= limit:
            break
        needed = placed if needed is None else min(needed, placed)
        target -= placed - limit
    else:
        assert limit is not None and best is not None
        raise _infeasible(graph, limit, bound, best, best_steps, needed)
    made = _bounded(_plan(graph, steps, layout, line, before), graph, frame, o, limit, bound)
    made = replace(made, moved=displaced(frame.order), seconds=time.perf_counter() - began)
    check(graph, made)
    if interrupted:
        raise Interrupted(made)
    return made


def _bounded(made: Plan, graph: Graph, frame: Frame, o: Options, limit: int | None, bound: float) -> Plan:
    """A plan with what it was asked for, what none can go below, and who made it."""
    return replace(
        made,
        budget=limit,
        lower_bound=int(bound),
        time_bound=0.0 if limit is None else least_time(graph, frame, o, limit),
        host_budget=o.host or None,
        lossy=o.lossy,
        planner=f"{o.order}+{o.evict}" + "+portfolio" * o.place,
    )


def adopted(frame: Frame, steps: Sequence[Step], o: Options, planner: str) -> Plan:
    """A verified plan that does what ``steps`` say, placed; its budget is what it needs."""
    graph, began = frame.graph, time.perf_counter()
    line, layout = replay(graph, steps), _layout(graph, steps, o)
    made = _plan(graph, steps, layout, line, replay(graph, baseline(graph)))
    limit = max(line.peak, graph.static_bytes + layout.arena + layout.handed)
    made = replace(
        made,
        budget=limit,
        lower_bound=int(lower_bound(graph, redraw=_redraws(o), least=_least(frame), in_place=frame.in_place)),
        time_bound=least_time(graph, frame, o, limit),
        planner=planner,
        seconds=time.perf_counter() - began,
        moved=displaced(frame.order),
    )
    check(graph, made)
    return made


def least_time(graph: Graph, frame: Frame, o: Options, limit: int) -> float:
    """Seconds no plan by the ways that the options allow can go below."""
    return time_bound(graph, limit, redraw=_redraws(o), least=_least(frame), in_place=frame.in_place)


def _redraws(o: Options) -> bool:
    return _REDRAW in _means(o)


def _means(o: Options) -> tuple[str, ...]:
    return tuple(filter(None, (m.strip() for m in o.allow.split(","))))


def _least(frame: Frame) -> dict[int, int]:
    """The bytes in which storages can wait until they are needed again, if they may be packed or moved out."""
    if "offload" in frame.means:
        return dict.fromkeys((s for s in range(len(frame.graph.storages)) if s not in frame.stuck), 0)
    if "compress" in frame.means:
        return {
            s: x.nbytes for s, x in packings(frame.graph, lossy=frame.lossy).items() if s not in frame.stuck
        }
    return {}


def frame_of(graph: Graph, order: tuple[int, ...], o: Options) -> Frame:
    """What evictions are decided on, with what the options say of them. Raises ``BadInput``."""
    means = _means(o)
    for m in means:
        if m not in (*MEANS, _REDRAW):
            raise BadInput(f"what leaves memory does so by {', '.join((*MEANS, _REDRAW))}", m, "allow")
    chained = tuple(k for k, op in enumerate(graph.ops) if op.random)
    if _REDRAW in means:
        graph = redrawable(graph)
        means = tuple(dict.fromkeys("recompute" if m == _REDRAW else m for m in means))
    only = resolve(graph, parse_hints(o.hints), lossy=o.lossy)
    in_place = o.reuse and o.place
    return Frame(graph, order, means, only, o.lossy, o.host or None, chained, in_place=in_place)


def order_of(graph: Graph, o: Options, peak: int) -> tuple[int, ...]:
    """The planned order, unless it needs more memory than the graph's own."""
    given = tuple(range(len(graph.ops)))
    if o.order == "given":
        return given
    order: tuple[int, ...] = planner(o.order, "order").plan(graph)
    return given if replay(graph, baseline(graph, order)).peak > peak else order


def displaced(order: tuple[int, ...]) -> int:
    """How many ops run after another one than in the graph's own order."""
    successor = dict(pairwise(order))
    return sum(1 for k in range(len(order) - 1) if successor.get(k) != k + 1)


def _evict(frame: Frame, limit: int, o: Options, progress: Progress | None) -> Decision:
    info = planner(o.evict, "evict")
    known = {"seconds": o.seconds, "work": o.work, "seed": o.seed}
    chosen = info.options(**{f.name: known[f.name] for f in fields(info.options) if f.name in known})
    more = (progress,) if "progress" in info.plan.__annotations__ else ()
    found: Decision = info.plan(frame, limit, chosen, *more)
    return found


def _layout(graph: Graph, steps: Sequence[Step], o: Options) -> Layout:
    if not o.place:
        return Layout((), 0, 0, 0)
    return lay_out(graph, steps, hand_out=o.hand_out, seed=o.seed, seconds=1.0)


def _plan(graph: Graph, steps: Sequence[Step], layout: Layout, line: Timeline, before: Timeline) -> Plan:
    return Plan(
        digest=graph.digest,
        steps=tuple(steps),
        residences=layout.residences,
        peak=line.peak,
        peak_before=before.peak,
        static=graph.static_bytes,
        arena=layout.arena,
        handed=layout.handed,
        host=layout.host,
        time=line.time,
        time_before=before.time,
    )


def top_of_peak(
    graph: Graph, line: Timeline, steps: Sequence[Step], n: int = 8
) -> tuple[tuple[str, int, str], ...]:
    """The largest storages outside the static set at the peak: (name, bytes, where they were made)."""
    rows = []
    for s, size in line.at_peak:
        if s in graph.static or not size:
            continue
        op = steps[line.peak_step].op if s < 0 else graph.uses.definer[s]
        name = f"while {graph.ops[op].name} runs" if s < 0 else graph.storages[s].name
        rows.append((name, size, graph.place(op)))
    return tuple(sorted(rows, key=lambda r: -r[1])[:n])


def _infeasible(
    graph: Graph, limit: int, bound: int, line: Timeline, steps: Sequence[Step], placed: int | None
) -> Infeasible:
    return Infeasible(
        budget=limit,
        lower_bound=int(bound),
        best_peak=line.peak,
        top=top_of_peak(graph, line, steps),
        placed=placed,
        at=graph.ops[steps[line.peak_step].op].name if line.peak_step >= 0 else "",
        advice=advice(graph, limit, line.at_peak),
    )
