"""Why a plan does this with a tensor and not that, and what two plans do differently: each answer is a simulation.

The decisions of a plan are read off its steps: between two uses a storage is kept, recomputed, offloaded or
compressed. One decision (`why`), or those of another plan for tensors of one role (`difference`), take the place of
the plan's, everything else staying as it is; the steps that carry this out are replayed. Peak and seconds are exact
for those steps. Where the plan's own steps are not those of its decisions (a planner that lowers them by itself),
the differences are counted from what the decisions give, and ``exact`` is false. Known limits: one change at a time;
what would pay only together with another is not found. Other alternatives of order and place are not tried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

import numpy as np

from tightship.analysis.structure import pattern, without_numbers
from tightship.cached import cached_property
from tightship.diagnose.alternatives import (
    Alternative,
    judged,
    kept_cost,
    size_of,
    slices_of,
    split_rows,
    stream_row,
    stream_words,
    streamed_as,
    streamed_cost,
    tensor_of,
)
from tightship.errors import BadInput, Unsupported
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.planners.evict.lowering import drop_dead_copies, pure_random_ops, save_random_states
from tightship.planners.evict.problem import (
    COMPRESS,
    DROP,
    EVICT,
    KEEP,
    OFFLOAD,
    PASS,
    STAY,
    Bits,
    EvictionProblem,
)
from tightship.planners.hints import refusals
from tightship.simulate import replay
from tightship.units import format_bytes

__all__ = ["Alternative", "Difference", "Differences", "Why", "difference", "why"]

WAYS = {"keep": (KEEP,), "recompute": (EVICT, PASS, DROP), "offload": (OFFLOAD,), "compress": (COMPRESS,)}
"""The decisions that stand for each way."""
_RESTORES = {"recompute": EVICT, "fetch": OFFLOAD, "decompress": COMPRESS}
_WAY_OF = {code: way for way, codes in WAYS.items() for code in codes}
_ALIKE = 0.02
"""By so much of its speed a machine is another one."""
GROUPS = 200
"""Differences of two plans that are simulated, those of most bytes first."""


# --- answers ---


@dataclass(frozen=True)
class Why:
    """What a plan does with the storage ``name`` of ``bytes``, made at ``source``; ``place``: where it lies."""

    name: str
    bytes: int
    kind: str
    source: str
    way: str
    alternatives: tuple[Alternative, ...]
    place: tuple[str, ...]
    exact: bool
    budget: int | None


@dataclass(frozen=True, slots=True)
class Difference:
    """``count`` tensors of ``bytes`` together, called ``what``, leave memory in way ``one`` in the first plan and
    ``two`` in the second (keep, recompute, offload, compress, stream; of ops in slices split and whole). Doing as the
    second in the first plan costs ``more`` bytes of its peak and ``extra`` seconds; ``possible``: whether that can be
    done alone."""

    what: str
    count: int
    bytes: int
    one: str
    two: str
    more: int = 0
    extra: float = 0.0
    possible: bool = True


@dataclass(frozen=True)
class Differences:
    """What two plans do differently. ``same``: they are of one graph; ``matched``: tensors of the same name in both,
    ``only_one`` and ``only_two``: those of one plan alone, with their bytes. ``moved``: ops of both that run in
    another order. ``left``: differences that were not simulated. ``machines``: how the machine of the second is
    another one, in words."""

    same: bool
    matched: int
    rows: tuple[Difference, ...]
    only_one: tuple[tuple[str, int], ...]
    only_two: tuple[tuple[str, int], ...]
    moved: int
    exact: bool
    left: int = 0
    machines: str = ""


# --- decisions of a plan ---


@dataclass(frozen=True)
class _Decided:
    """A plan's decisions as those of the eviction problem in its order."""

    graph: Graph
    plan: Plan

    @cached_property
    def order(self) -> tuple[int, ...]:
        return tuple(s.op for s in self.plan.steps if s.kind == "compute")

    @cached_property
    def problem(self) -> EvictionProblem:
        redraws = any(s.saves for s in self.plan.steps)
        graph = pure_random_ops(self.graph) if redraws else self.graph
        means = ("recompute", "compress", "offload")
        in_place = any(s.reuses for s in self.plan.steps)
        return EvictionProblem(graph, self.order, means, lossy=self.plan.lossy, in_place=in_place)

    @cached_property
    def absences(self) -> dict[int, list[tuple[int, int, int]]]:
        """When each storage is away: computed ops before it left, before it came back, and how it did."""
        left: dict[int, int] = {}
        found: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        position = 0
        for step in self.plan.steps:
            if step.kind == "compute":
                position += 1
            elif step.kind == "free" and step.form == "full":
                left.update(dict.fromkeys(step.storages, position))
            elif step.kind in _RESTORES:
                for s in step.storages:
                    found[s].append((left.pop(s, position), position, _RESTORES[step.kind]))
            left.update({s: position for s, _ in step.reuses})
        return found

    @cached_property
    def leaves(self) -> dict[int, list[int]]:
        """When each storage leaves, for good or not: computed ops before it."""
        found: dict[int, list[int]] = defaultdict(list)
        position = 0
        for step in self.plan.steps:
            position += step.kind == "compute"
            for s in (*(step.storages if step.kind == "free" else ()), *(a for a, _ in step.reuses)):
                found[s].append(position)
        return found

    def way(self, storage: int) -> str:
        """Between its uses; where ways differ, that of the longest absence."""
        rows = [row for row in self.absences.get(storage, ())]
        return _WAY_OF[max(rows, key=lambda row: row[1] - row[0])[2]] if rows else "keep"

    @cached_property
    def bits(self) -> Bits:
        """The decisions, of recomputation in the kind that comes nearest to the plan."""
        plain = self.problem.nothing()
        for g, (s, since, to) in enumerate(self.problem.gaps.tolist()):
            for left, back, code in self.absences.get(s, ()):
                if since < left <= back <= to:
                    plain[g] = code
        for g in np.flatnonzero(self.problem.stays).tolist():
            s, since, to = self.problem.gaps[g].tolist()
            plain[g] = KEEP if any(since < left <= to for left in self.leaves.get(s, ())) else STAY
        tried = []
        for code in WAYS["recompute"]:
            bits = np.where(plain == EVICT, code, plain).astype(np.uint8)
            cost = self.replayed(bits)
            if cost is not None:
                tried.append((abs(cost[0] - self.plan.peak), abs(cost[1] - self.plan.time), code, bits))
        if not tried:
            raise Unsupported(
                f"the plan of {self.plan.planner or 'an unknown planner'}",
                "its steps do not follow from decisions between uses",
            )
        return min(tried, key=lambda row: row[:3])[3]

    def replayed(self, bits: Bits) -> tuple[int, float] | None:
        """Peak and seconds of what carries decisions out, within the plan's budget if that is possible; None if they
        cannot be carried out."""
        limit = self.plan.budget if self.plan.budget is not None else (1 << 62)
        cost = self.problem.cost(bits, limit)
        if not cost.valid:
            return None
        try:
            steps = save_random_states(self.graph, drop_dead_copies(self.problem.lower(cost, limit)))
        except (Unsupported, BadInput):
            return None
        line = replay(self.graph, steps)
        return line.peak, line.time

    @cached_property
    def base(self) -> tuple[int, float]:
        found = self.replayed(self.bits)
        assert found is not None  # `bits` are some that can be carried out
        return found

    @property
    def exact(self) -> bool:
        return self.base[0] == self.plan.peak and abs(self.base[1] - self.plan.time) <= 1e-9 * max(
            1.0, self.plan.time
        )

    def with_(self, ways: Iterable[tuple[int, str]]) -> tuple[int, float] | None:
        """Peak and seconds with other ways for some storages; None where that cannot be."""
        best: tuple[int, float] | None = None
        chosen = dict(ways)
        used = ~self.problem.stays
        at = {s: np.flatnonzero(used & (self.problem.gaps[:, 0] == s)) for s in chosen}
        allowed = self.problem.engine.allowed
        for kind in range(max(len(WAYS[way]) for way in chosen.values()) if chosen else 0):
            bits = self.bits.copy()
            for s, way in chosen.items():
                code = WAYS[way][min(kind, len(WAYS[way]) - 1)]
                may = at[s][allowed[at[s]] >> code & 1 == 1]
                bits[at[s]] = KEEP
                bits[may] = code
                if way != "keep" and not len(may):
                    return None
            cost = self.replayed(bits)
            if cost is not None and (best is None or self._rank(cost) < self._rank(best)):
                best = cost
        return best

    def _rank(self, cost: tuple[int, float]) -> tuple[bool, float, float]:
        over = self.plan.budget is not None and cost[0] > self.plan.budget
        return over, *((cost[0], cost[1]) if over else (cost[1], cost[0]))


# --- why ---


def why(graph: Graph, plan: Plan, name: str) -> Why:
    """Why ``plan`` does what it does with the tensor called ``name``.

    Raises ``BadInput`` for a name that no storage of the graph has, ``Unsupported`` for a plan without decisions."""
    s = _named(graph, name)
    decided, storage = _Decided(graph, plan), graph.storages[s]
    way, op, parts = decided.way(s), graph.uses.definer[s], streamed_as(graph, s)
    source = graph.place(op) if op >= 0 else ""
    about = storage.name, storage.size, storage.kind, source
    if parts:
        about = tensor_of(graph, s), size_of(graph, parts), storage.kind, ""
        rows, places = tuple(_streamed(decided, parts)), [p for t in parts for p in _places(plan, t)]
        return Why(*about, "stream", rows, tuple(dict.fromkeys(places)), decided.exact, plan.budget)
    if s in graph.static:
        reason = f"the caller owns it, {storage.kind}: it is there in every step"
        chosen = Alternative("keep", "chosen", reason, plan.peak, 0, plan.time)
        return Why(*about, "keep", (chosen, stream_row(graph, plan, s)), (), True, plan.budget)
    found = [
        _alternative(decided, s, other, chosen=other == way)
        for other in sorted(WAYS, key=lambda other: other != way)
    ]
    rows = (*found, *split_rows(graph, plan, s))
    return Why(*about, way, rows, tuple(_places(plan, s)), decided.exact, plan.budget)


def _streamed(decided: _Decided, parts: tuple[int, ...]) -> Iterator[Alternative]:
    """Of what streams: fetched once or again between its uses, and in memory all the time."""
    graph, plan, base = decided.graph, decided.plan, decided.base
    yield Alternative("stream", "chosen", stream_words(graph, plan, parts), plan.peak, 0, plan.time)
    for t in parts:
        again = decided.way(t) == "recompute"
        if not _impossible(decided, t, "recompute"):
            cost = decided.with_([(t, "keep" if again else "recompute")])
            if cost is not None:
                way = "fetch once" if again else "fetch again"
                yield judged(way, cost, base, plan.budget, "the search has not found it")
    exact = replay(graph, plan.steps)
    cost = kept_cost(graph, plan, [parts])
    yield judged(
        "keep", cost, (exact.peak, exact.time), plan.budget, "what streams is chosen before the search"
    )


def _named(graph: Graph, name: str) -> int:
    names = {storage.name: s for s, storage in enumerate(graph.storages) if _exists(graph, s)}
    names |= {v.name: v.storage for v in graph.values if v.name not in names and _exists(graph, v.storage)}
    names |= {tensor: s for s in reversed(range(len(graph.storages))) if (tensor := tensor_of(graph, s))}
    if name in names:
        return names[name]
    near = get_close_matches(name, list(names), 3, 0.3)
    said = f" (such as {', '.join(near)})" if near else ""
    raise BadInput(f"unknown tensor {name!r}: no value of {graph.name} has that name{said}", place="--why")


def _alternative(decided: _Decided, s: int, way: str, *, chosen: bool) -> Alternative:
    (peak, time), budget = decided.base, decided.plan.budget
    if chosen:
        return Alternative(way, "chosen", _chosen(decided, s), peak, 0, time, 0.0)
    if reason := _impossible(decided, s, way):
        return Alternative(way, "not possible", reason)
    cost = decided.with_([(s, way)])
    if cost is None:
        return Alternative(way, "not possible", "what it needs is not there when it would have to come back")
    return judged(way, cost, (peak, time), budget, _missed(decided.plan, way))


def _missed(plan: Plan, way: str) -> str:
    """Why a plan does not do what would cost it less."""
    kind = {"offload": "offload", "compress": "compress"}.get(way)
    if kind is not None and not plan.count(kind):
        return f"nothing is {way}ed in this plan: allow=recompute,{way} lets it"
    return "the search has not found it"


def _chosen(decided: _Decided, s: int) -> str:
    count = len(decided.absences.get(s, ()))
    return (
        f"leaves memory {count} time{'s'[: count > 1]}"
        if count
        else "in memory from its making to its last use"
    )


def _impossible(decided: _Decided, s: int, way: str) -> str:
    """Why a storage cannot be treated so at all, or nothing."""
    gaps = decided.problem.gaps
    if way != "keep" and not (gaps[:, 0] == s).any():
        return "it is in use from its making to its last use, with nothing in between"
    if way in ("recompute", "compress"):
        refused = refusals(decided.problem.graph, [s], way, decided.plan.lossy)
        if s in refused:
            return refused[s]
    allowed = decided.problem.engine.allowed[gaps[:, 0] == s]
    if way != "keep" and not any((allowed >> code & 1).any() for code in WAYS[way]):
        return "an op in between would see other contents, or it must be there when the step ends"
    return ""


def _places(plan: Plan, s: int) -> Iterable[str]:
    """Where it lies, and whether another place could save anything."""
    rows = [r for r in plan.residences if r.storage == s]
    for r in rows:
        pool = {"device": "the arena", "host": "the host's pool", "out": "memory of its own, for the caller"}[
            r.pool
        ]
        at = f" at {format_bytes(r.offset)} of {pool}" if r.pool != "out" else f" in {pool}"
        form = "" if r.form in ("full", "host") else f", {r.form}"
        yield f"steps {r.start} to {r.end}: {format_bytes(r.size)}{at}{form}"
    if rows and plan.arena:
        beyond = plan.static + plan.arena + plan.handed - plan.peak
        if beyond <= 0:
            yield "the arena is as small as the bytes alive at the peak: every other place is a tie at best"
        else:
            yield f"the arena spans {format_bytes(beyond)} more than the peak: other places could save that at most"


# --- two plans ---


@dataclass(slots=True)
class _Group:
    names: list[str] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)
    bytes: int = 0


def difference(one: tuple[Graph, Plan], two: tuple[Graph, Plan]) -> Differences:
    """What the second plan does differently, and what each difference costs in the first one, alone. Plans of
    different graphs are matched by the names of tensors."""
    first, second = _Decided(*one), _Decided(*two)
    a, b = _by_name(one[0]), _by_name(two[0])
    both = [name for name in a if name in b]
    groups: dict[tuple[str, str, str], _Group] = defaultdict(_Group)
    for name in both:
        s, t = a[name], b[name]
        if (ways := _ways(first, s, second, t))[0] == ways[1]:
            continue
        group = groups[without_numbers(name), *ways]
        group.names.append(name)
        group.storages.append(s)
        parts = streamed_as(one[0], s)
        group.bytes += size_of(one[0], parts) if parts else one[0].storages[s].size
    ranked = sorted(groups.items(), key=lambda item: (-item[1].bytes, item[0]))
    rows = [_row(first, group, ways) for (_, *ways), group in ranked[:GROUPS]]
    return Differences(
        one[1].digest == two[1].digest, len(both), tuple(rows), _alone(first, a, b), _alone(second, b, a),
        _moved(first, second), not rows or first.exact, max(0, len(ranked) - GROUPS), _machines(one[0], two[0]),
    )  # fmt: skip


def _machines(one: Graph, two: Graph) -> str:
    """How the second's machine is another one: what ops of both take there, and what copies do."""
    times = {op.name: op.time for op in one.ops}
    both = [(times[op.name], op.time) for op in two.ops if op.name in times]
    a, b = (sum(row) for row in zip(*both, strict=True)) if both else (0.0, 0.0)
    said = [f"ops of both take {b / a:.2f} of the seconds"] if a > 0 and abs(b / a - 1) > _ALIKE else []
    for kind, word in (("offload", "to"), ("fetch", "from")):
        old, new = getattr(one.machine, kind), getattr(two.machine, kind)
        if abs(new / old - 1) > _ALIKE:
            said.append(
                f"copies {word} the host {format_bytes(int(new))}/s instead of {format_bytes(int(old))}/s"
            )
    return ", ".join(said)


def _row(first: _Decided, group: _Group, ways: Sequence[str]) -> Difference:
    about = pattern(group.names), len(group.storages), group.bytes, ways[0], ways[1]
    base: tuple[int, float] = first.base
    if "split" in ways or "whole" in ways:
        return Difference(*about, possible=False)  # of another program
    if "stream" in ways:
        line = replay(first.graph, first.plan.steps)
        base = line.peak, line.time
        if ways[1] == "stream":
            cost: tuple[int, float] | None = streamed_cost(first.graph, first.plan, group.storages)[0]
        else:
            cost = kept_cost(first.graph, first.plan, [streamed_as(first.graph, s) for s in group.storages])
    else:
        cost = first.with_([(s, ways[1]) for s in group.storages])
    if cost is None:
        return Difference(*about, possible=False)
    return Difference(*about, cost[0] - base[0], cost[1] - base[1])


def _ways(first: _Decided, s: int, second: _Decided, t: int) -> tuple[str, str]:
    """What two plans do with a tensor of both; the same where neither could do otherwise."""
    one, two = first.graph, second.graph
    slices = [slices_of(d.graph, d.plan, k) is not None for d, k in ((first, s), (second, t))]
    if slices[0] != slices[1]:
        return ("split", "whole") if slices[0] else ("whole", "split")
    streams = bool(tensor_of(one, s)), bool(tensor_of(two, t))
    if any(streams):
        return ("stream" if streams[0] else "keep"), ("stream" if streams[1] else "keep")
    if s in one.static or t in two.static:
        return "keep", "keep"
    return first.way(s), second.way(t)


def _exists(graph: Graph, s: int) -> bool:
    """Whether a storage is the caller's, or an op makes it; where tensors stream, some are neither."""
    return graph.uses.definer[s] >= 0 or s in graph.static


def _by_name(graph: Graph) -> dict[str, int]:
    """Storages by name; of those that share one, the n-th is called so, too, with its number. What streams is there
    once, whatever it is fetched as."""
    found: dict[str, int] = {}
    count: dict[str, int] = defaultdict(int)
    for s, storage in enumerate(graph.storages):
        if tensor := tensor_of(graph, s):
            if graph.uses.definer[s] >= 0:
                found.setdefault(tensor, s)
            continue
        if not _exists(graph, s):
            continue
        count[storage.name] += 1
        found[storage.name if count[storage.name] == 1 else f"{storage.name} ({count[storage.name]})"] = s
    return found


def _alone(decided: _Decided, mine: dict[str, int], others: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """What the other plan does not have and that has bytes; slices of what it has are no tensors."""
    graph, found = decided.graph, []
    for name, s in mine.items():
        split = slices_of(graph, decided.plan, s)
        if name not in others and not tensor_of(graph, s) and (split is None or split["name"] not in others):
            found.append((name, graph.storages[s].size))
    return tuple(sorted(found, key=lambda row: (-row[1], row[0])))


def _moved(first: _Decided, second: _Decided) -> int:
    """Ops of both, by name, that do not follow the same one."""
    names = [[d.graph.ops[k].name for k in d.order] for d in (first, second)]
    both = set(names[0]) & set(names[1])
    rows = [[n for n in row if n in both] for row in names]
    follows = [dict(zip(row[1:], row, strict=False)) for row in rows]
    return sum(1 for n in both if follows[0].get(n) != follows[1].get(n))
