"""Grappler's memory optimiser: cheap ops run again for the backward, values live at the peak swapped out and in.

Problem: what TensorFlow's ``MemoryOptimizer`` decides (behaviours G1-G5, G8-G13), on graphs of this project; its
targets, the ops under ``gradients/``, are the backward ops where nothing has such a name. Of a graph read from
TensorFlow's files exactly the nodes that Grappler recomputes are recomputed. Measure: its own: a list
of cheap kinds of op, and a ranking by times. Source: tensorflow/core/grappler/optimizers/memory_optimizer.cc.
Guarantee: none on the peak, which the rewrites may miss; what comes out is legal and costed exactly. Complexity:
linear, with a replay for each round of swapping. Known limits: G15, recompute and swap do not know of each other and
there is no cost model,
which is what the default planner is for; of the two, the better one is taken. Sums (G6, G7) are rewritten before
planning: by the capture of a training step always, of TensorFlow's graphs at the level scheduling alone, because an
accumulator takes what it adds in no fixed order.

The rewrites of Grappler's memory optimiser: which ops are cloned and where, which values are swapped and when.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate

from tightship.analysis.bounds import replayable
from tightship.baselines.grappler_nodes import node_runs, rewritten
from tightship.errors import BadInput
from tightship.graph import Graph
from tightship.planners.evict.lowering import Run, carried_out
from tightship.planners.evict.offload_compress import Aside, decided
from tightship.planners.evict.problem import Decision, Frame
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
    """G1: ops under the scope, also where it is nested; the backward ops where nothing is."""
    named = {k for k, op in enumerate(graph.ops) if op.name.startswith(scope) or f"/{scope}" in op.name}
    return frozenset(named or (k for k, op in enumerate(graph.ops) if op.phase == "backward"))


def kind(target: str) -> str:
    """``aten.add.Tensor`` -> ``add``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 and parts[0] in ("aten", "prims") else parts[0]


def clones(
    frame: Frame, goals: frozenset[int], hinted: Iterable[int] = (), *, heuristic: bool = True
) -> frozenset[int]:
    """G2, G3: the ops to clone. Candidates are cheap or hinted, no targets, and read no target; of a set that hangs
    together the part that finally feeds a target."""
    graph, uses = frame.graph, frame.graph.uses
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
    chosen: set[int] = set()
    stack = [k for k in likely if any(r in goals for s in written_by(k) for r in uses.readers[s])]
    while stack:
        k = stack.pop()
        if k not in chosen:
            chosen.add(k)
            stack += [w for s in (*uses.reads[k], *written_by(k)) for w in uses.writers[s] if w in likely]
    return frozenset(chosen)


def runs(frame: Frame, again: frozenset[int], scope: str) -> list[Run]:
    """G3-G5: each clone runs once, after all else that the first target it serves waits for; inputs inside of the
    set come from clones, and only targets read them."""
    graph, uses = frame.graph, frame.graph.uses
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

    for k in frame.order:
        for s in uses.reads[k] if k in goals else ():
            bring(s)
        found.append(Run(k))
    return found


def _clock(frame: Frame) -> list[float]:
    """When each position begins, and when the last one ends."""
    return list(accumulate((frame.graph.ops[k].time for k in frame.order), initial=0.0))


def swap(frame: Frame, limit: int, rounds: int) -> Decision:
    """G8-G10: until the savings are met, swap the highest ranked values that are alive at the peak. G13: what could
    not be swapped is not tried again."""
    chosen: dict[int, Aside] = {}
    skipped: set[int] = set()
    best = frame.cost(frame.nothing(), limit)
    for _ in range(rounds):
        if best.met:
            break
        steps = best.steps or baseline(frame.graph, frame.order)
        line = replay(frame.graph, steps)
        peak = sum(s.kind == "compute" for s in steps[: line.peak_step + 1]) - 1
        need, more = best.peak - limit, {}
        for a in ranked(frame, peak, {*chosen, *skipped}):
            if need <= 0:
                break
            timed = triggered(frame, a)
            if timed is None:
                skipped.add(a.storage)
                continue
            more[a.storage] = timed
            need -= frame.graph.storages[a.storage].size
        found = decided(frame, limit, [*chosen.values(), *more.values()]) if more else best
        if found is best or not found.beats(best):
            break
        chosen |= more
        best = found
    return best


def ranked(frame: Frame, peak: int, known: set[int]) -> list[Aside]:
    """G9, G10: values alive at the peak that nobody uses there, best first."""
    graph, uses, clock = frame.graph, frame.graph.uses, _clock(frame)
    at = {k: i for i, k in enumerate(frame.order)}
    rows: list[tuple[float, Aside]] = []
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
        rows.append(
            ((next_use / len(later)) ** 2 + made**2, Aside(s, before[-1], later[0], before[-1], later[0]))
        )
    return [a for _, a in sorted(rows, key=lambda row: (-row[0], row[1].storage))]


def triggered(frame: Frame, a: Aside) -> Aside | None:
    """G12: out right after the last use, in on the last op that ends early enough for the copy to be there when the
    consumer's other inputs are; None (G13) if there is no such op after the copy out."""
    graph, uses, clock = frame.graph, frame.graph.uses, _clock(frame)
    at = {k: i for i, k in enumerate(frame.order)}
    others = [
        uses.writers[s][-1] for s in uses.reads[frame.order[a.next]] if s != a.storage and uses.writers[s]
    ]
    ready = max([clock[at[w] + 1] for w in others if at[w] < a.next], default=clock[a.next])
    seconds = graph.machine.seconds("fetch", graph.storages[a.storage].size)
    early = [p for p in range(a.last + 1, a.next) if clock[p + 1] <= ready - seconds]
    if not early:
        return None
    return Aside(a.storage, a.last, a.next, a.last, early[-1] + 1)


def by_hand(frame: Frame, hints: str) -> list[Aside]:
    """G11: ``OP:INPUT`` says which of an op's inputs to swap. A wrong hint, and the same input twice, is an error
    (G13), as is a value that an op overwrites later."""
    graph, uses = frame.graph, frame.graph.uses
    names = {op.name: k for k, op in enumerate(graph.ops)}
    at = {k: i for i, k in enumerate(frame.order)}
    found: dict[int, Aside] = {}
    for hint in filter(None, (h.strip() for h in hints.split(","))):
        name, _, which = hint.rpartition(":")
        k = names.get(name)
        if k is None or not which.isdigit() or int(which) >= len(graph.ops[k].inputs):
            raise BadInput(
                "a swap hint is OP:INPUT, an op's name and the index of an input", hint, "swap_hints"
            )
        s = graph.values[graph.ops[k].inputs[int(which)]].storage
        if s in found:
            raise BadInput("an input is swapped once", hint, "swap_hints")
        if s in graph.static or len(uses.writers[s]) > 1:
            raise BadInput("what is swapped is no reference: nobody else writes it", hint, "swap_hints")
        before = [at[t] for t in (*uses.writers[s], *uses.readers[s]) if at[t] < at[k]]
        found[s] = Aside(s, max(before), at[k], max(before), at[k])
    return list(found.values())


def swapped(frame: Frame, limit: int, chosen: Sequence[Aside]) -> Decision:
    """Swaps with triggers where there are some, else right before the consumer."""
    return decided(frame, limit, [triggered(frame, a) or a for a in chosen if a.next - a.last > 1])


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
    """``level``: none, manual (only what hints say), default and all (recompute what is cheap, or swap), recompute
    or swap alone, scheduling (sums alone, which are rewritten where a graph of TensorFlow's is read). ``scope``: the
    name that targets stand under. ``recompute_hints``: patterns of op names, between commas, that run again whatever
    their kind. ``swap_hints``: OP:INPUT between commas, which input of an op to swap.
    ``rounds``: of swapping, at most."""

    level: str = "all"
    scope: str = "gradients/"
    recompute_hints: str = ""
    swap_hints: str = ""
    rounds: int = 25


def plan(frame: Frame, limit: int, options: Options | None = None) -> Decision:
    """The best of what the rewrites of the level come to (of a single one, whatever it comes to); keeping everything
    when that is within the limit."""
    o = options or Options()
    if o.level not in LEVELS:
        raise BadInput(f"a level is one of {', '.join(LEVELS)}", o.level, "level")
    best = frame.cost(frame.nothing(), limit)
    if o.level in ("none", "scheduling") or (best.met and o.level != "manual"):
        return best
    for made in _made(frame, limit, o):
        best = made if made.beats(best) or o.level in ("manual", "recompute") else best
    return best


def _made(frame: Frame, limit: int, o: Options) -> list[Decision]:
    hints = tuple(filter(None, (h.strip() for h in o.recompute_hints.split(","))))
    hinted = {k for k, op in enumerate(frame.graph.ops) if any(fnmatchcase(op.name, h) for h in hints)}
    found = []
    if o.level != "swap" and "nodes" in frame.graph.meta:
        found += _on_nodes(frame, limit, o, hints)
    elif o.level != "swap":
        again = clones(frame, targets(frame.graph, o.scope), hinted, heuristic=o.level != "manual")
        if again:
            found.append(carried_out(frame, runs(frame, again, o.scope), limit))
    swaps = ",".join(filter(None, (o.swap_hints, *frame.graph.meta.get("swaps", ()))))
    if o.level == "manual" and swaps:
        found.append(swapped(frame, limit, by_hand(frame, swaps)))
    if o.level in ("swap", "all", "default"):
        found.append(swap(frame, limit, o.rounds))
    return found


def _on_nodes(frame: Frame, limit: int, o: Options, hints: tuple[str, ...]) -> list[Decision]:
    """What the recompute rewrite of a TensorFlow graph's nodes comes to."""
    rewrite = rewritten(frame.graph, o.level, o.scope, hints)
    runs = node_runs(frame, rewrite)
    return [carried_out(frame, runs, limit)] if any(run.again for run in runs) else []
