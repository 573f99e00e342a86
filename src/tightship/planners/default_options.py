"""What the default planner is asked: its options, and the order, problem and bounds that they ask for of a graph."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TypedDict

from tightship.analysis.bounds import Ways, time_bound
from tightship.analysis.concurrency import reusing
from tightship.analysis.moment_chain import chain_bound
from tightship.analysis.moments import peak_of
from tightship.analysis.packing import packings
from tightship.errors import BadInput
from tightship.graph import Graph
from tightship.options import NEVER, Deadline, option
from tightship.planners import run
from tightship.planners.evict.lowering import pure_random_ops
from tightship.planners.evict.problem import MEANS, EvictionProblem
from tightship.planners.hints import parse_hints, resolve

__all__ = [
    "EXACT",
    "REDRAW",
    "ROUNDING",
    "STREAM",
    "Options",
    "PlanOptions",
    "allowed",
    "allows_stream",
    "divide_allow",
    "least_time",
    "means_of",
    "order_of",
    "problem_of",
    "read_options",
    "seconds_left",
    "ways_of",
    "without_split",
]


REDRAW = "redraw"


_SEARCH = 0.25
"""The part of the seconds that a search has, at least, however long it took to measure bytes."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the default planner decides, how long it looks, and which means it may take."""

    order: str = option("best", "planner of the order; given: the graph's own order")
    evict: str = option("anneal", "planner of what leaves memory between two uses")
    seconds: float = option(10.0, "time limit of the search, in seconds")
    work: int = option(150_000_000, "limit of the search in simulated ops; makes a plan reproducible")
    gap: float = option(
        0.001, "end where no plan is faster by more than this part of the time; 0: only with proof"
    )
    seed: int = option(0, "seed of random moves")
    hand_out: bool = option(True, "give results to the caller outside the arena")
    place: bool = option(True, "decide every offset; without, the plan runs on the ordinary heap")
    reuse: bool = option(True, "let results overwrite inputs that nothing needs any more, where ops allow it")
    allow: str = option(
        "recompute",
        "how storages may leave memory: recompute, compress, offload; of models and modules also: split, "
        "split-rounding (ops in slices); of models: stream (parameters and optimizer state of a training step)",
        metavar="MEANS,…",
    )
    redraw: bool = option(True, "let recomputation run random ops, too, from saved random states")
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
    gap: float
    seed: int
    hand_out: bool
    place: bool
    reuse: bool
    allow: str
    redraw: bool
    hints: str
    lossy: bool
    host: int


def seconds_left(seconds: float, took: float) -> float:
    """What a search has of ``seconds`` when measuring took some of them."""
    return max(seconds - took, _SEARCH * seconds)


EXACT, ROUNDING = "split", "split-rounding"
"""Ways that ``allow`` may name of models: slices with the bits of the whole, or ones that may round otherwise."""


STREAM = "stream"
"""The way that ``allow`` may name of training steps: parameters and optimizer state leave memory between uses."""


def divide_allow(options: Options) -> tuple[Options, str]:
    """The planner's options without splitting, and which of `EXACT` and `ROUNDING` was allowed, if any."""
    rest, mode = without_split(options.allow)
    return replace(options, allow=rest) if mode else options, mode


def without_split(allow: str) -> tuple[str, str]:
    """The ways of ``allow`` but for splitting, and which of `EXACT` and `ROUNDING` is among them, if any."""
    ways = [way.strip() for way in allow.split(",")]
    mode = ROUNDING if ROUNDING in ways else EXACT if EXACT in ways else ""
    return ",".join(way for way in ways if way not in (EXACT, ROUNDING)), mode


def allows_stream(options: Options) -> tuple[Options, bool]:
    """The planner's options without streaming, and whether it was allowed."""
    ways = [way.strip() for way in options.allow.split(",")]
    if STREAM not in ways:
        return options, False
    return replace(options, allow=",".join(way for way in ways if way != STREAM)), True


def read_options(options: PlanOptions, caller: str) -> Options:
    """The keywords of a public function as `Options`. Raises ``BadInput``, naming the caller, for an unknown one."""
    known = Options.__dataclass_fields__
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise BadInput(
            f"unknown option {unknown!r}: the planner's options are {', '.join(known)}", place=caller
        )
    return Options(**options)


def least_time(
    graph: Graph, problem: EvictionProblem, budget: int, deadline: Deadline = NEVER, *, quick: bool = False
) -> float:
    """Seconds no plan of the problem can go below; ``quick``: by each moment alone."""
    if quick:
        return time_bound(graph, budget, **ways_of(problem), deadline=deadline)
    return chain_bound(graph, budget, **ways_of(problem), deadline=deadline)


def ways_of(problem: EvictionProblem) -> Ways:
    """What plans of the problem may do, as bounds take it."""
    return Ways(redraw=problem.redraws, least=_least(problem), in_place=problem.in_place)


def allowed(problem: EvictionProblem, o: Options) -> Hashable:
    """What plans may do: those that may do the same are answers for one another."""
    only = tuple(sorted(problem.only.items()))
    ways = (problem.means, only, problem.lossy, problem.host, problem.stuck, problem.in_place)
    return (*ways, problem.redraws, o.place, o.hand_out)


def means_of(o: Options) -> tuple[str, ...]:
    return tuple(filter(None, (m.strip() for m in o.allow.split(","))))


def _least(problem: EvictionProblem) -> dict[int, int]:
    """The bytes in which storages can wait until they are needed again, if they may be packed or moved out."""
    if "offload" in problem.means:
        return dict.fromkeys((s for s in range(len(problem.graph.storages)) if s not in problem.stuck), 0)
    if "compress" in problem.means:
        return {
            s: x.nbytes
            for s, x in packings(problem.graph, lossy=problem.lossy).items()
            if s not in problem.stuck
        }
    return {}


def problem_of(graph: Graph, order: tuple[int, ...], o: Options) -> EvictionProblem:
    """What evictions are decided on, with what the options say of them. Raises ``BadInput``."""
    means = means_of(o)
    for m in means:
        if m not in (*MEANS, REDRAW):
            raise BadInput(f"unknown way {m!r}: expected {', '.join((*MEANS, REDRAW))}", place="allow")
    chained = tuple(k for k, op in enumerate(graph.ops) if op.random)
    if REDRAW in means or (o.redraw and "recompute" in means):
        graph = pure_random_ops(graph)
        means = tuple(dict.fromkeys("recompute" if m == REDRAW else m for m in means))
    only = resolve(graph, parse_hints(o.hints), lossy=o.lossy)
    in_place = o.reuse and o.place
    return EvictionProblem(graph, order, means, only, o.lossy, o.host or None, chained, in_place=in_place)


def order_of(
    graph: Graph, o: Options, peak: int, deadline: Deadline = NEVER, enough: int | None = None
) -> tuple[int, ...]:
    """The planned order, unless it needs more memory than the graph's own; ``enough`` as for `run.order`. Where
    nothing is trained, what takes the places of inputs in every order is known to it."""
    given = tuple(range(len(graph.ops)))
    if o.order == "given":
        return given
    if o.reuse and o.place and all(op.phase == "forward" for op in graph.ops):
        whole, graph = graph, reusing(graph)
        peak = peak if whole is graph else peak_of(graph, given)
    order = run.order(o.order, graph, deadline, enough)
    return given if order != given and peak_of(graph, order) > peak else order
