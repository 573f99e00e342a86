"""The eviction problem: what leaves memory between two uses of a graph in an order; decisions, what they cost, and
the way from decisions to steps.

A gap is the stretch between two uses of a storage. Gaps that play one role in several layers stand side by side
(`families`): a search can copy one layer's decisions to others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tightship import _core
from tightship.analysis.order import Rows, csr, deepest_first, hardest_first, pairs
from tightship.analysis.packing import Packing, packings
from tightship.analysis.structure import block_of, colors, layer, role, without_numbers
from tightship.cached import cached_property
from tightship.errors import BadInput, Unsupported
from tightship.graph import Graph, distinct
from tightship.plan import Step
from tightship.simulate import (
    SAVE_MOVES,
    SET_MOVES,
    Timeline,
    baseline,
    extras,
    make_steps,
    replay,
    unplanned,
)

__all__ = [
    "COMPRESS",
    "DROP",
    "EVICT",
    "KEEP",
    "MEANS",
    "OFFLOAD",
    "PASS",
    "STAY",
    "Archive",
    "Bits",
    "Decision",
    "EvictionProblem",
    "Family",
    "Progress",
    "Rows",
    "best_of",
    "csr",
    "families",
]


Bits = NDArray[np.uint8]
Progress = Callable[[int, float, bool], bool]
"""Told (peak bytes, extra seconds, whether the budget is met) now and then; true stops the search."""

Family = tuple[tuple[int, ...], ...]
"""One row per role, with a gap per layer, -1 where a layer has none."""

_KINDS = ("compute", "recompute", "free", "offload", "fetch", "compress", "decompress")
_COMPRESS = _KINDS.index("compress")
"""The next one decompresses."""
_FORMS = ("full", "packed", "host")
_UNLIMITED = (1 << 63) - 1


KEEP, EVICT, PASS, DROP, COMPRESS, OFFLOAD, STAY = range(7)
"""What a gap may be: kept; evicted, and once restored it stays; evicted, and dropped again if restored only for a
recomputation while its own next use is beyond the engine's horizon; the same however near its next use; compressed;
offloaded to the host pool. Past a storage's last use, where it leaves if nothing is said: stays for what is
recomputed from it, until that has its own last use."""

MEANS = {"recompute": (EVICT, PASS, DROP), "compress": (COMPRESS,), "offload": (OFFLOAD,)}
"""The decisions that each way of leaving memory allows."""


@dataclass(frozen=True)
class Decision:
    """What happens to every gap, and what it costs: peak bytes, extra seconds, ops run again, work spent, bytes
    copied out at once.

    ``steps`` is set by planners that lower their decisions themselves; `EvictionProblem.lower` has those of any. One
    that is not ``valid`` cannot be carried out, and its numbers mean nothing. ``ended``: why the planner stopped, one
    of ``plan.TERMINATIONS``; empty where it is not known."""

    evict: Bits
    peak: int
    extra: float
    runs: int
    met: bool
    valid: bool = True
    work: int = 0
    steps: tuple[Step, ...] | None = None
    host: int = 0
    ended: str = ""

    def beats(self, other: Decision) -> bool:
        """Met before unmet; among met ones less time, among unmet ones a lower peak."""
        if self.valid != other.valid or self.met != other.met:
            return (self.valid, self.met) > (other.valid, other.met)
        mine, theirs = (self.extra, self.peak), (other.extra, other.peak)
        return mine < theirs if self.met else mine[::-1] < theirs[::-1]


def best_of(decisions: Iterable[Decision]) -> Decision:
    """The one that none beats, the first of equal ones."""
    return reduce(lambda best, other: other if other.beats(best) else best, decisions)


class Archive:
    """Decisions found so far, none of which another one beats in both bytes and seconds: what was found for less
    memory is also an answer for more. ``cuts``: what leaves across the boundary by the price of what is saved.
    ``stopped``: by Ctrl-C, and nothing more is to be searched."""

    def __init__(self) -> None:
        self.found: list[Decision] = []
        self.cuts: dict[float, NDArray[np.bool_]] = {}
        self.stopped = False

    def offer(self, d: Decision) -> None:
        if not d.valid or any(x.peak <= d.peak and x.extra <= d.extra for x in self.found):
            return
        self.found = [x for x in self.found if x.peak < d.peak or x.extra < d.extra] + [d]
        self.found.sort(key=lambda x: x.peak)

    def around(self, budget: int, problem: EvictionProblem) -> list[Decision]:
        """The largest that meets the budget and the smallest that does not."""
        below = [x for x in self.found if x.peak <= budget][-1:]
        above = [x for x in self.found if x.peak > budget][:1]
        return [problem.cost(x.evict, budget) for x in (*below, *above)]


@dataclass(frozen=True)
class EvictionProblem:
    """A graph and an order, ready for evaluation of eviction decisions.

    ``means``: how storages may leave memory (``recompute``, ``compress``, ``offload``). ``only``: for storages for
    which it is not up to the planner, the ones of ``means`` to take from forward to backward, or ``keep`` throughout.
    ``lossy``: codecs may round.
    ``host``: bytes that may be copied out at once. ``chained``: ops that keep their place for a reason the graph does
    not know, ``stuck``: storages that can be made again, but not be packed or copied out, for such a reason.
    ``in_place``: results take the places of inputs wherever ops allow it and nothing needs those any more.
    ``deep``: for less memory, at a price or none: what an op reads is recomputed in the order of `deepest_first`, not
    in the op's own, and what an op made of something that is written over later may be recomputed until then.
    ``brief``: for still less, what several recomputations read does not wait for all of them."""

    graph: Graph
    order: tuple[int, ...]
    means: tuple[str, ...] = ("recompute",)
    only: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    lossy: bool = False
    host: int | None = None
    chained: tuple[int, ...] = ()
    stuck: frozenset[int] = frozenset()
    in_place: bool = True
    deep: bool = False
    brief: bool = False

    @cached_property
    def archive(self) -> Archive:
        return Archive()

    @cached_property
    def _in_order(self) -> dict[tuple[int, ...], EvictionProblem]:
        return {}

    @property
    def obeyed(self) -> bool:
        """Whether what hints say can be done in its order."""
        return not self.only or self.cost(self.nothing(), 0).valid

    @property
    def redraws(self) -> bool:
        """Whether some random op may run again: the graph takes it for a pure one (`lowering.pure_random_ops`)."""
        return any(not self.graph.ops[k].random for k in self.chained)

    def in_order(self, order: tuple[int, ...]) -> EvictionProblem:
        """The same in another order; always the same problem, with what was found for it."""
        if order not in self._in_order:
            self._in_order[order] = replace(self, order=order)
        return self._in_order[order]

    def deeper(self, order: tuple[int, ...]) -> EvictionProblem:
        """The same with ``deep``, in another order; always the same problem, with what was found for it."""
        return self._deep.in_order(order)

    @cached_property
    def _deep(self) -> EvictionProblem:
        return replace(self, deep=True)

    @cached_property
    def briefer(self) -> EvictionProblem:
        """The same with ``brief``."""
        return replace(self, brief=True)

    @cached_property
    def engine(self) -> Any:
        g, c, facts = self.graph, self.graph.columns, self.graph.uses.facts
        n = len(g.storages)
        owned, kept = np.zeros(n, np.uint8), np.zeros(n, np.uint8)
        fixed = np.zeros(len(g.ops), np.uint8)
        fixed[c.control[1]] = 1
        fixed[list(self.chained)] = 1
        # The engine knows storages: of what else makes a view it cannot tell who reads that.
        maker, value = pairs(c.outputs).T
        fixed[maker[facts.definer[c.home[value]] != maker]] = 1
        owned[list(g.static)] = 1
        kept[[s for s in g.kept if s not in g.static]] = 1
        reads, needs = deepest_first(g) if self.deep else (facts.reads, facts.needs)
        engine = _core.Engine(
            reads=reads,
            needs=needs,
            defines=facts.defines,
            mutates=facts.mutates,
            updates=c.updates,
            extra=extras(g),
            time=c.time,
            again=self._again(),
            pure=((c.random | c.effect) == 0).astype(np.uint8),
            fixed=fixed,
            size=c.size,
            owned=owned,
            kept=kept,
            order=np.array(self.order, dtype=np.int32),
            overwrites=c.overwrites if self.in_place else csr([()] * len(g.ops)),
            ending=self._ending(),
            until_written=self.deep,
            brief=self.brief,
            **self._copies(),
        )
        if self.host is not None:
            engine.set_host_limit(self.host)
        engine.set_horizon(_horizon(engine, self.order, g))
        return engine

    def _again(self) -> NDArray[np.float64]:
        """By op, the seconds of running it again: of a random op also those of saving and setting its state."""
        redrawn = [k for k in self.chained if not self.graph.ops[k].random]
        again = self.graph.columns.time.copy()
        again[redrawn] += (SAVE_MOVES + SET_MOVES) * self.graph.machine.state
        return again

    def _ending(self) -> NDArray[np.int32]:
        """Storages in the order in which results are restored at the end."""
        if not self.deep:
            return np.arange(len(self.graph.storages), dtype=np.int32)
        return hardest_first(self.graph)

    @cached_property
    def packings(self) -> dict[int, Packing]:
        """How each storage is packed, where that is allowed."""
        allowed = "compress" in self.means or any("compress" in ways for ways in self.only.values())
        return packings(self.graph, lossy=self.lossy) if allowed else {}

    def _copies(self) -> dict[str, Any]:
        """What the engine is told of packing and copying out: bytes, seconds, and what is allowed, by storage."""
        machine, storages = self.graph.machine, self.graph.storages
        rows = [(p.codec, storages[s].size) for s, p in self.packings.items()]
        at = list(self.packings)
        packed, pack_, unpack = (np.zeros(len(storages), t) for t in (np.int64, np.float64, np.float64))
        packed[at] = [p.nbytes for p in self.packings.values()]
        pack_[at] = [machine.seconds("compress", n, codec) for codec, n in rows]
        unpack[at] = [machine.seconds("decompress", n, codec) for codec, n in rows]
        may = np.full(len(storages), _bits(self.means) | 1 << KEEP, np.uint8)
        may[list(self.stuck)] &= _bits(("keep", "recompute"))
        must = np.zeros(len(storages), np.uint8)
        for s, ways in self.only.items():
            (may if ways == ("keep",) else must)[s] = _bits(ways)
        outside = "offload" in self.means or any("offload" in ways for ways in self.only.values())
        sizes = [s.size for s in storages] if outside else []
        offload, fetch, lost = (np.zeros(len(storages)) for _ in range(3))
        offload[: len(sizes)] = [machine.seconds("offload", n) for n in sizes]
        fetch[: len(sizes)] = [machine.seconds("fetch", n) for n in sizes]
        lost[: len(sizes)] = [machine.lost(n) for n in sizes]
        return {
            "packed": packed, "pack": pack_, "unpack": unpack, "may": may, "must": must, "boundary": self.boundary,
            "offload": offload, "fetch": fetch, "lost": lost,
        }  # fmt: skip

    @cached_property
    def gaps(self) -> NDArray[np.int32]:
        """One row per gap: storage, position it begins at, position it ends at."""
        return np.stack(self.engine.gaps, axis=1) if len(self.engine.gaps[0]) else np.zeros((0, 3), np.int32)

    @cached_property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """Gaps of the same role in different layers, by position."""
        u = self.graph.uses
        hues = colors(self.graph)
        by_role: dict[object, list[int]] = defaultdict(list)
        by_hue: dict[object, list[int]] = defaultdict(list)
        nth: dict[int, int] = defaultdict(int)
        for g, (s, _, to) in enumerate(self.gaps.tolist()):
            k = u.definer[s]
            which = (u.defines[k].index(s), nth[s])
            nth[s] += 1
            user = hues[self.order[to]] if to < len(self.order) else -1
            by_hue[hues[k], which, user].append(g)
            if name := role(self.graph, k):
                by_role[name, which].append(g)
        rows = {tuple(r) for d in (by_role, by_hue) for r in d.values()}
        return tuple(sorted(rows))

    @cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """Gaps of one numbered module, by position."""
        by_layer: dict[str, list[int]] = defaultdict(list)
        for g, (s, _, _) in enumerate(self.gaps.tolist()):
            if name := layer(self.graph, self.graph.uses.definer[s]):
                by_layer[name].append(g)
        return tuple(tuple(r) for r in by_layer.values())

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """Positions at which numbered modules, and those in them, begin in the forward."""
        first: dict[str, int] = {}
        for at, k in enumerate(self.order[: self.boundary]):
            for depth in _DEPTHS:
                if name := block_of(self.graph.ops[k].module, depth):
                    first.setdefault(name, at)
        return tuple(sorted(set(first.values())))

    @cached_property
    def groups(self) -> Rows:
        """What searches move together: every class and every layer with more than one gap."""
        rows = [r for r in (*self.classes, *self.layers) if len(r) > 1]
        return csr(rows or [list(range(len(self.gaps)))])

    @cached_property
    def isomorphic_layers(self) -> tuple[Rows, NDArray[np.int64]]:
        """Rows of gaps of one role in several layers (-1: a layer has none), and at which rows families begin."""
        found = families(self.graph, [(s, a, b) for s, a, b in self.gaps.tolist()], self.classes)
        starts = np.cumsum([0, *(len(f) for f in found)], dtype=np.int64)
        return csr([row for f in found for row in f]), starts

    @cached_property
    def singles(self) -> Rows:
        """Every gap alone, largest first."""
        size = [self.graph.storages[int(s)].size for s in self.gaps[:, 0]]
        return csr([[g] for g in sorted(range(len(size)), key=lambda g: size[g])])

    @cached_property
    def rows(self) -> Rows:
        """Groups by position, and every gap alone."""
        lists = [r for r in (*self.classes, *self.layers) if len(r) > 1]
        return csr([*lists, *([g] for g in range(len(self.gaps)))])

    @cached_property
    def boundary(self) -> int:
        """Where the backward begins (without phases: where most bytes are alive), as a position."""
        phases = [self.graph.ops[k].phase for k in self.order]
        if "backward" in phases:
            return phases.index("backward")
        line = self.kept
        return sum(step.kind == "compute" for step in line.steps[: max(0, line.peak_step)])

    @cached_property
    def crossing(self) -> NDArray[np.bool_]:
        """Which gaps go from the forward into the backward."""
        return (self.gaps[:, 1] < self.boundary) & (self.gaps[:, 2] >= self.boundary)

    @cached_property
    def stays(self) -> NDArray[np.bool_]:
        """Which gaps lie past the last use of a storage: there it leaves, or (`STAY`) does not."""
        found: NDArray[np.bool_] = self.engine.allowed >> STAY & 1 == 1
        return found

    @cached_property
    def kept(self) -> Timeline:
        """What the order costs with everything kept."""
        if self.order == tuple(range(len(self.graph.ops))):
            return unplanned(self.graph)
        return replay(self.graph, baseline(self.graph, self.order))

    def nothing(self) -> Bits:
        return np.zeros(len(self.gaps), dtype=np.uint8)

    def wherever(self, to: int) -> Bits:
        """The decision ``to`` for every gap that may be so, the others kept."""
        return np.where(self.engine.allowed >> to & 1, to, KEEP).astype(np.uint8)

    def cost(self, evict: Bits, budget: int, cutoff: float = math.inf) -> Decision:
        """What a decision costs; of more than ``cutoff`` seconds it is not known, and not valid."""
        c = self.engine.evaluate(evict, budget, cutoff)
        met = c["valid"] and c["peak"] <= budget
        return Decision(evict, c["peak"], c["extra"], c["runs"], met, c["valid"], host=c["host"])

    def decision(self, result: tuple[Bits, dict[str, Any], int, bool, bool]) -> Decision:
        evict, c, work, met, stopped = result
        self.archive.stopped |= stopped
        return Decision(evict, c["peak"], c["extra"], c["runs"], met, c["valid"], work, host=c["host"])

    def steps(self, evict: Bits, budget: int = _UNLIMITED) -> tuple[Step, ...]:
        """The steps that carry a decision out; within ``budget``, which says when copies out must be waited for."""
        return self.steps_of(self.engine.emit(evict, budget))

    def steps_of(self, columns: Sequence[Any]) -> tuple[Step, ...]:
        """Steps as the core has them."""
        kind, op, storages, form, stream, waits, reuses = columns
        rows = _core.tuples(storages)
        nbytes, codec = np.zeros(len(kind), dtype=np.int64), [""] * len(kind)
        for k in np.flatnonzero((kind == _COMPRESS) | (kind == _COMPRESS + 1)).tolist():
            packing = self.packings[rows[k][0]]
            codec[k] = packing.codec
            nbytes[k] = packing.nbytes if kind[k] == _COMPRESS else 0
        pairs_ = _core.tuples(reuses) if len(reuses[1]) else ()
        return make_steps(
            len(kind),
            kind=np.array(_KINDS, dtype=object)[kind].tolist(),
            op=op,
            storages=list(rows),
            form=np.array(_FORMS, dtype=object)[form].tolist(),
            nbytes=nbytes,
            stream=stream,
            waits=list(_core.tuples(waits)) if len(waits[1]) else (),
            codec=codec,
            reuses=[tuple(zip(r[::2], r[1::2], strict=True)) for r in pairs_] if pairs_ else (),
        )

    def lower(
        self, decision: Decision, budget: int = _UNLIMITED, means: Collection[str] | None = None
    ) -> tuple[Step, ...]:
        """The steps of a decision, whoever made it: the one way from decisions to plans. ``budget`` as for `steps`;
        ``means``: the ones it may use; by default those of the problem, and those that hints name for some storages.

        Raises ``Unsupported`` for a decision that cannot be carried out, ``BadInput`` for one that uses other means.
        """
        steps: tuple[Step, ...] = ()
        if decision.valid:
            steps = self.steps(decision.evict, budget) if decision.steps is None else decision.steps
        if self.order and not steps:
            raise Unsupported(
                f"what is decided for {self.graph.name!r}", "what it evicts cannot be recomputed"
            )
        allowed = frozenset(self.means).union(*self.only.values()) if means is None else means
        others = tuple(kind for kind in MEANS if kind not in allowed)
        found = _core.codes(steps, "kind", others)
        if used := dict.fromkeys(others[k] for k in found[found < len(others)].tolist()):
            rule = f"the plan uses {', '.join(used)}, which is not allowed"
            raise BadInput(f"{rule} (allowed: {', '.join(sorted(allowed)) or 'nothing'})", place="allow")
        return steps

    def again(self, evict: Bits) -> list[int]:
        """The ops that a decision runs again, once for each time, without the rest of the steps."""
        kind, op, *_ = self.engine.emit(evict, _UNLIMITED)
        found: list[int] = op[kind == _KINDS.index("recompute")].tolist()
        return found


def _bits(ways: Sequence[str]) -> int:
    bits = 0
    for way in ways:
        for decision in (KEEP,) if way == "keep" else MEANS[way]:
            bits |= 1 << decision
    return bits


def _horizon(engine: Any, order: tuple[int, ...], graph: Graph) -> int:
    """About one layer's worth of positions: the usual distance between uses of neighboring layers' tensors."""
    hues, definer = np.array(colors(graph), dtype=np.int64), graph.uses.facts.definer
    storage, start, to = (rows[engine.allowed >> STAY & 1 == 0] for rows in engine.gaps)
    far = (to < len(order)) & (to - start > len(order) // 50)
    storage, to = storage[far], to[far]
    made, user = hues[definer[storage]], hues[np.array(order, dtype=np.int64)[to]]
    # Equal tensors that one op reads together say nothing of layers.
    rows = distinct(np.stack([made, user, to], axis=1))
    near = np.diff(rows[:, 2])[(np.diff(rows[:, :2], axis=0) == 0).all(axis=1)]
    return int(np.median(near)) if len(near) else max(1, len(order) // 8)


_DEPTHS = (1, 2)
"""Layers are modules whose path has this many numbers (``stages.1`` and ``stages.1.layers.0``)."""
_FEW = 3
"""Without names, classes of as many gaps, and at least this many, are taken for rows of one family."""


def families(
    graph: Graph, gaps: Sequence[tuple[int, int, int]], classes: Sequence[Sequence[int]]
) -> tuple[Family, ...]:
    """Layers whose module paths differ in numbers alone, and the gaps in them that differ in the layer alone.

    ``gaps``: storage, where it begins, where it ends; ``classes`` serve where ops have no module paths. A wrong twin
    costs time, never correctness."""
    found = [f for depth in _DEPTHS for f in _named(graph, gaps, depth) if f]
    if found:
        return tuple(dict.fromkeys(found))
    by_length: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for row in classes:
        if len(row) >= _FEW:
            by_length[len(row)].append(tuple(row))
    return tuple(tuple(rows) for _, rows in sorted(by_length.items()))


def _named(graph: Graph, gaps: Sequence[tuple[int, int, int]], depth: int) -> list[Family]:
    uses = graph.uses
    tables: dict[str, dict[Hashable, dict[str, int]]] = {}
    layers: dict[str, dict[str, None]] = {}
    nth: dict[int, int] = defaultdict(int)
    alike: dict[Hashable, int] = defaultdict(int)
    for g in sorted(range(len(gaps)), key=lambda g: (gaps[g][1], g)):
        s = gaps[g][0]
        op = graph.ops[uses.definer[s]]
        gap, nth[s] = nth[s], nth[s] + 1
        layer = block_of(op.module, depth)
        if not layer:
            continue
        kind = without_numbers(layer)
        same = (op.module[len(layer) :], op.target, op.phase, uses.defines[uses.definer[s]].index(s), gap)
        alike[layer, same] += 1
        layers.setdefault(kind, {})[layer] = None
        tables.setdefault(kind, {}).setdefault((same, alike[layer, same]), {})[layer] = g
    return [
        tuple(tuple(row.get(layer, -1) for layer in layers[kind]) for row in rows.values() if len(row) > 1)
        for kind, rows in tables.items()
        if len(layers[kind]) > 1
    ]
