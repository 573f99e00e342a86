"""Grappler's memory optimizer: cheap ops run again for the backward, values live at the peak swapped out and in.

Problem: what TensorFlow's ``MemoryOptimizer`` decides (behaviors G1-G5, G8-G13), on graphs of this project; its
targets, the ops under ``gradients/``, are the backward ops where nothing has such a name. Of a graph read from
TensorFlow's files exactly the nodes that Grappler recomputes are recomputed. Measure: its own: a list of cheap
kinds of op, and a ranking by times. Source: tensorflow/core/grappler/optimizers/memory_optimizer.cc. Guarantee:
none on the peak, which the rewrites may miss; what comes out is legal and costed exactly. Complexity: linear, with
a replay for each round of swapping. Known limits: G15, recompute and swap do not know of each other and there is no
cost model, which is what the default planner is for; of the two, the better one is taken. Sums (G6, G7) are
rewritten before planning: by the capture of a training step always, of TensorFlow's graphs at the level scheduling
alone, because an accumulator takes what it adds in no fixed order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import NoReturn

from tightship.analysis.bounds import replayable
from tightship.baselines.grappler_nodes import cloned, is_target, node_runs, rewritten
from tightship.errors import BadInput
from tightship.graph import Graph
from tightship.options import option
from tightship.planners.evict.lowering import Run, Transfer, decide
from tightship.planners.evict.problem import Decision, EvictionProblem, Progress
from tightship.simulate import baseline, replay

__all__ = [
    "CHEAP",
    "LEVELS",
    "Options",
    "by_hand",
    "clones",
    "plan",
    "relaxed",
    "runs",
    "swap",
    "swapped",
    "targets",
]

PLANNER = "evict/grappler"
"""Its group and its name on the command line."""


CHEAP = frozenset(
    "add sub mul div neg abs exp log sqrt rsqrt square pow sin cos tanh sigmoid relu gelu silu leaky_relu elu "
    "softplus threshold clamp maximum minimum where eq ne lt le gt ge _to_copy to cast convert_element_type clone "
    "reshape view transpose permute expand repeat tile fill full zeros ones zeros_like ones_like full_like "
    "native_batch_norm batch_norm cudnn_batch_norm add_ mul_ div_ relu_ identity bias_add".split()
)
"""Kinds of op that are run again without asking what they cost (G2)."""
_SMALLEST = 1024  # bytes: no value up to this is swapped (G9)
_SHORTEST = 1e-3  # seconds: nor one alive for less


def targets(graph: Graph, scope: str) -> frozenset[int]:
    """G1: ops under the scope; the backward ops where nothing is."""
    named = {k for k, op in enumerate(graph.ops) if is_target(op.name, scope)}
    return frozenset(named or (k for k, op in enumerate(graph.ops) if op.phase == "backward"))


def kind(target: str) -> str:
    """``aten.add.Tensor`` -> ``add``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 and parts[0] in ("aten", "prims") else parts[0]


def clones(
    problem: EvictionProblem, goals: frozenset[int], hinted: Iterable[int] = (), *, heuristic: bool = True
) -> frozenset[int]:
    """G2, G3: the ops to clone. Candidates are cheap or hinted, no targets, and read no target."""
    graph, uses = problem.graph, problem.graph.uses
    hints = set(hinted)

    def candidate(k: int) -> bool:
        if k in goals or not (k in hints or (heuristic and kind(graph.ops[k].target) in CHEAP)):
            return False
        written = written_by(k)
        return bool(written) and all(replayable(graph, s) and s not in graph.kept for s in written)

    def written_by(k: int) -> list[int]:
        skip = graph.ops[k].updates
        return [s for s in (*uses.defines[k], *uses.mutates[k]) if s not in skip and graph.storages[s].size]

    likely = {k for k in range(len(graph.ops)) if candidate(k)}
    after_goal: set[int] = set(goals)
    for k in range(len(graph.ops)):  # what a target feeds cannot run again before it
        if any(uses.definer[s] in after_goal for s in uses.reads[k]):
            after_goal.add(k)
    likely -= after_goal
    # A storage that several ops write comes back only if all of them may run again.
    likely = {k for k in likely if all(w in likely for s in written_by(k) for w in uses.writers[s])}
    read = {k: [w for s in (*uses.reads[k], *written_by(k)) for w in uses.writers[s]] for k in likely}
    readers = {k: [r for s in written_by(k) for r in uses.readers[s]] for k in likely}
    return frozenset().union(*cloned(sorted(likely), likely, goals, read, readers))


def runs(problem: EvictionProblem, again: frozenset[int], scope: str) -> list[Run]:
    """G3-G5: each clone runs once, after all else that the first target it serves waits for; inputs inside of the
    set come from clones, and only targets read them."""
    graph, uses = problem.graph, problem.graph.uses
    goals = targets(graph, scope)
    done: set[int] = set()
    found: list[Run] = []

    def bring(storage: int) -> None:
        todo = [("storage", storage, -1)]  # no recursion: chains are as long as they like
        while todo:
            what, k, s = todo.pop()
            if what == "storage" and again.issuperset(uses.writers[k]):
                todo += [("op", w, k) for w in reversed(uses.writers[k])]
            elif what == "op" and k not in done:
                done.add(k)
                todo.append(("run", k, s))
                todo += [("storage", t, -1) for t in reversed(uses.reads[k]) if t != s]
            elif what == "run":
                found.append(Run(k, True, tuple(t for t in uses.defines[k] if t not in graph.kept)))

    for k in problem.order:
        for s in uses.reads[k] if k in goals else ():
            bring(s)
        found.append(Run(k))
    return found


def _clock(problem: EvictionProblem) -> list[float]:
    """When each position begins, and when the last one ends."""
    return list(accumulate((problem.graph.ops[k].time for k in problem.order), initial=0.0))


def swap(problem: EvictionProblem, budget: int, rounds: int) -> Decision:
    """G8-G10: until the savings are met, swap the highest ranked values that are alive at the peak. G13: what could
    not be swapped is not tried again."""
    chosen: dict[int, Transfer] = {}
    skipped: set[int] = set()
    best = problem.cost(problem.nothing(), budget)
    for _ in range(rounds):
        if best.met:
            break
        steps = best.steps or baseline(problem.graph, problem.order)
        line = replay(problem.graph, steps)
        peak = sum(s.kind == "compute" for s in steps[: line.peak_step + 1]) - 1
        need, more = best.peak - budget, {}
        for t in ranked(problem, peak, {*chosen, *skipped}):
            if need <= 0:
                break
            timed = triggered(problem, t)
            if timed is None:
                skipped.add(t.storage)
                continue
            more[t.storage] = timed
            need -= problem.graph.storages[t.storage].size
        if not more:
            break
        found = decide(problem, budget, transfers=[*chosen.values(), *more.values()])
        if not found.beats(best):
            break
        chosen |= more
        best = found
    return best


def ranked(problem: EvictionProblem, peak: int, known: set[int]) -> list[Transfer]:
    """G9, G10: values alive at the peak that nobody uses there, best first."""
    graph, uses, clock = problem.graph, problem.graph.uses, _clock(problem)
    at = {k: i for i, k in enumerate(problem.order)}
    rows: list[tuple[float, Transfer]] = []
    for s, storage in enumerate(graph.storages):
        if s in known or s in graph.static or s in graph.kept or storage.size <= _SMALLEST:
            continue
        touches = sorted({at[k] for k in (*uses.writers[s], *uses.readers[s])})
        before, later = [p for p in touches if p < peak], [p for p in touches if p > peak]
        if peak in touches or not before or not later or any(at[w] > peak for w in uses.writers[s]):
            continue
        if clock[touches[-1]] - clock[before[0]] <= _SHORTEST:
            continue
        next_use, made = clock[later[0]] - clock[peak], clock[before[0]] - clock[peak]
        score = (next_use / len(later)) ** 2 + made**2
        rows.append((score, Transfer(s, before[-1], later[0], before[-1], later[0])))
    return [t for _, t in sorted(rows, key=lambda row: (-row[0], row[1].storage))]


def triggered(problem: EvictionProblem, t: Transfer) -> Transfer | None:
    """G12: out right after the last use, in on the last op that ends early enough for the copy to be there when the
    consumer's other inputs are; None (G13) if there is no such op after the copy out."""
    graph, uses, clock = problem.graph, problem.graph.uses, _clock(problem)
    at = {k: i for i, k in enumerate(problem.order)}
    reads = uses.reads[problem.order[t.next]]
    others = [uses.writers[s][-1] for s in reads if s != t.storage and uses.writers[s]]
    ready = max([clock[at[w] + 1] for w in others if at[w] < t.next], default=clock[t.next])
    seconds = graph.machine.seconds("fetch", graph.storages[t.storage].size)
    early = [p for p in range(t.last + 1, t.next) if clock[p + 1] <= ready - seconds]
    return replace(t, freed=t.last, restored=early[-1] + 1) if early else None


def by_hand(problem: EvictionProblem, hints: str) -> list[Transfer]:
    """G11: ``OP:INPUT`` says which of an op's inputs to swap. A wrong hint, and the same input twice, is an error
    (G13), as is a value that an op overwrites later."""
    graph, uses = problem.graph, problem.graph.uses
    names = {op.name: k for k, op in enumerate(graph.ops)}
    at = {k: i for i, k in enumerate(problem.order)}
    found: dict[int, Transfer] = {}

    def refuse(fault: str) -> NoReturn:
        raise BadInput(fault, place="swap_hints")

    for hint in _listed(hints):
        name, _, which = hint.rpartition(":")
        k = names.get(name)
        if not name or not which.isdigit():
            refuse(f"malformed swap hint {hint!r}: expected OP:INPUT, an op's name and the index of an input")
        if k is None:
            refuse(f"unknown op {name!r} in swap hint {hint!r}")
        if int(which) >= len(graph.ops[k].inputs):
            refuse(f"op {name!r} has no input {which}: it has {len(graph.ops[k].inputs)}")
        s = graph.values[graph.ops[k].inputs[int(which)]].storage
        if s in found:
            refuse(f"duplicate swap hint {hint!r}: an input is swapped once")
        if s in graph.static or len(uses.writers[s]) > 1:
            refuse(f"cannot swap {hint!r}: another op writes it (a reference, to TensorFlow)")
        before = max(at[u] for u in (*uses.writers[s], *uses.readers[s]) if at[u] < at[k])
        found[s] = Transfer(s, before, at[k], before, at[k])
    return list(found.values())


def swapped(problem: EvictionProblem, budget: int, chosen: Sequence[Transfer]) -> Decision:
    """Swaps with triggers where there are some, else right before the consumer."""
    timed = [triggered(problem, t) or t for t in chosen if t.next - t.last > 1]
    return decide(problem, budget, transfers=timed)


def relaxed(graph: Graph) -> tuple[int, ...]:
    """G14: ops that write the caller's storages and whose results stay on their device: all, where there is one
    device, else those all of whose readers are on the same one."""
    uses = graph.uses
    writes = [k for k in range(len(graph.ops)) if any(s in graph.static for s in uses.mutates[k])]
    if len({op.device for op in graph.ops}) == 1:
        return tuple(writes)
    found = []
    for k in writes:
        seen, stack = {k}, [k]
        while stack:
            o = stack.pop()
            later = [
                r
                for s in (*uses.defines[o], *uses.mutates[o])
                for r in uses.readers[s]
                if r > o and r not in seen
            ]
            seen.update(later)
            stack += later
        if len({graph.ops[o].device for o in seen}) == 1:
            found.append(k)
    return tuple(found)


LEVELS = ("none", "manual", "default", "recompute", "swap", "scheduling", "all")


@dataclass(frozen=True, slots=True)
class Options:
    """Which of the rewrites, and what is said by hand."""

    level: str = option(
        "all",
        "none; manual: hints alone; default, all: recompute what is cheap, or swap; recompute or swap alone; "
        "scheduling: sums alone, rewritten where a TensorFlow graph is read",
        choices=LEVELS,
    )
    scope: str = option("gradients/", "the name that targets stand under", metavar="PREFIX")
    recompute_hints: str = option(
        "", "patterns of op names, between commas, to recompute whatever their kind"
    )
    swap_hints: str = option("", "inputs to swap, as OP:INPUT between commas")
    rounds: int = option(25, "rounds of swapping at most")


def plan(
    problem: EvictionProblem, budget: int, options: Options | None = None, progress: Progress | None = None
) -> Decision:
    """The best of what the rewrites of the level come to (of a single one, whatever it comes to); keeping everything
    when that is within the budget."""
    o = options or Options()
    if o.level not in LEVELS:
        raise BadInput(f"unknown level {o.level!r}: expected one of {', '.join(LEVELS)}", place="level")
    best = problem.cost(problem.nothing(), budget)
    if o.level in ("none", "scheduling") or (best.met and o.level != "manual"):
        return best
    for found in _rewrites(problem, budget, o):
        best = found if found.beats(best) or o.level in ("manual", "recompute") else best
    return best


def _rewrites(problem: EvictionProblem, budget: int, o: Options) -> Iterator[Decision]:
    if o.level != "swap":
        again = _recomputed(problem, o)
        if any(run.again for run in again):
            yield decide(problem, budget, again)
    swaps = ",".join(filter(None, (o.swap_hints, *problem.graph.meta.get("swaps", ()))))
    if o.level == "manual" and swaps:
        yield swapped(problem, budget, by_hand(problem, swaps))
    if o.level in ("swap", "all", "default"):
        yield swap(problem, budget, o.rounds)


def _recomputed(problem: EvictionProblem, o: Options) -> list[Run]:
    """What the recompute rewrite runs, on the nodes of a TensorFlow graph or else on ops."""
    graph, hints = problem.graph, tuple(_listed(o.recompute_hints))
    if "nodes" in graph.meta:
        return node_runs(problem, rewritten(graph, o.level, o.scope, hints))
    hinted = {k for k, op in enumerate(graph.ops) if any(fnmatchcase(op.name, h) for h in hints)}
    again = clones(problem, targets(graph, o.scope), hinted, heuristic=o.level != "manual")
    return runs(problem, again, o.scope) if again else []


def _listed(text: str) -> Iterator[str]:
    return filter(None, (part.strip() for part in text.split(",")))
