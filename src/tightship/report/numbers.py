"""The numbers behind every report: a plan's costs, its bytes at each step, who makes up the peak."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tightship.graph import Graph
from tightship.plan import Plan, Step
from tightship.simulate import baseline, replay

__all__ = ["BANDS", "Column", "Peak", "Share", "band", "columns", "peak_of", "summary"]

BANDS = ("weights", "state", "batch", "activation", "gradient", "workspace")
"""What a picture tells apart, from below: bytes of the caller (parameters and buffers, optimiser state, inputs), what
ops made (results included), gradients, scratch."""


def summary(plan: Plan, graph: Graph | None = None) -> dict[str, Any]:
    """A plan as the keys that other programs read, in the order people read them."""
    found: dict[str, Any] = {
        "peak_before": plan.peak_before,
        "peak_after": plan.peak,
        "budget": plan.budget,
        "met": plan.met,
        "lower_bound": plan.lower_bound,
        "gap": plan.gap,
        "static": plan.static,
        "arena": plan.arena,
        "handed": plan.handed,
        "host": plan.host,
        "host_budget": plan.host_budget,
        "lossy": plan.lossy,
        "time_before": plan.time_before,
        "time_after": plan.time,
        "time_bound": plan.time_bound,
        "time_gap": plan.time_gap,
        "recomputed": plan.count("recompute"),
        "offloaded": plan.count("offload"),
        "compressed": plan.count("compress"),
        "codecs": dict(sorted(Counter(s.codec for s in plan.steps if s.kind == "compress").items())),
        "redrawn": sum(s.saves for s in plan.steps),
        "moved": plan.moved,
        "in_place": sum(len(s.reuses) for s in plan.steps),
        "steps": len(plan.steps),
        "planner": plan.planner,
        "seconds": plan.seconds,
        "digest": plan.digest,
        "notes": list(plan.notes),
        "meta": plan.meta,
    }
    if graph is not None:
        found |= {"graph": graph.name, "ops": len(graph.ops), "storages": len(graph.storages)}
        found["called"] = [
            {"op": op.name, "graph": g.name, "peak": replay(g, baseline(g)).peak - g.static_bytes}
            for op in graph.ops
            for g in op.calls
        ]
    return found


# --- bytes over the steps ---


@dataclass(frozen=True, slots=True)
class Column:
    """One step: when it begins and how long it takes (seconds of computing), its phase, bytes by band."""

    start: float
    seconds: float
    phase: str
    bytes: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.bytes)


def columns(graph: Graph, steps: Sequence[Step]) -> list[Column]:
    """Device bytes while each step runs, split by band; their sum is what the simulator says."""
    bands = [BANDS.index(band(graph, s)) for s in range(len(graph.storages))]
    live = [0] * len(BANDS)
    for s in graph.static:
        live[bands[s]] += graph.storages[s].size
    line = replay(graph, steps)
    found = []
    clock = 0.0
    phase = ""
    packed: dict[int, int] = {}
    for step, during, (start, end) in zip(steps, line.during, line.spans, strict=True):
        if step.kind == "free":
            now = tuple(live)
            for s in step.storages:
                size = {"full": graph.storages[s].size, "packed": packed.get(s, 0)}
                live[bands[s]] -= size.get(step.form, 0)
        else:
            phase = graph.ops[step.op].phase if step.kind == "compute" else phase
            packed.update(dict.fromkeys(step.storages, step.nbytes) if step.kind == "compress" else {})
            for s, _ in step.reuses:
                live[bands[s]] -= graph.storages[s].size
            for s, nbytes in _begins(graph, step):
                live[bands[s]] += nbytes
            now = tuple(live)
        if step.stream:  # beside what is computed, which it does not make longer
            start = end = clock
        rest = during - sum(now)
        found.append(Column(start, end - start, phase, (*now[:-1], now[-1] + rest)))
        clock = end
    return found


def band(graph: Graph, s: int) -> str:
    """Which of ``BANDS`` a storage belongs to."""
    kind = graph.storages[s].kind
    if s in graph.static:
        return {"state": "state", "input": "batch"}.get(kind, "weights")
    return "gradient" if kind == "gradient" else "activation"


def _begins(graph: Graph, step: Step) -> list[tuple[int, int]]:
    """What becomes resident on the device with a step: (storage, bytes)."""
    if step.kind == "offload":
        return []
    made = graph.uses.defines[step.op] if step.kind == "compute" else step.storages
    return [(s, step.nbytes if step.kind == "compress" else graph.storages[s].size) for s in made]


# --- who makes up the peak ---


@dataclass(frozen=True, slots=True)
class Share:
    """``count`` storages that hold ``bytes`` at the peak and share a kind, module or line."""

    name: str
    bytes: int
    count: int


@dataclass(frozen=True)
class Peak:
    """The peak of a list of steps: its bytes, the step and op it is at, and its makers, largest first.

    ``by_module`` and ``by_source`` leave the static set out, which is there at every step; so does
    ``by_storage``.
    """

    bytes: int
    step: int
    op: str
    place: str
    by_kind: tuple[Share, ...]
    by_module: tuple[Share, ...]
    by_source: tuple[Share, ...]
    by_storage: tuple[tuple[str, int, str], ...]

    def as_dict(self) -> dict[str, Any]:
        def rows(shares: Sequence[Share]) -> list[dict[str, Any]]:
            return [{"name": s.name, "bytes": s.bytes, "count": s.count} for s in shares]

        return {
            "bytes": self.bytes,
            "step": self.step,
            "op": self.op,
            "place": self.place,
            "by_kind": rows(self.by_kind),
            "by_module": rows(self.by_module),
            "by_source": rows(self.by_source),
            "by_storage": [{"name": n, "bytes": b, "place": p} for n, b, p in self.by_storage],
        }


def peak_of(graph: Graph, steps: Sequence[Step]) -> Peak:
    """Who is in memory at the highest step, by kind, by module, by source line and one by one."""
    line = replay(graph, steps)
    at = steps[line.peak_step].op if line.peak_step >= 0 else -1
    rows = [(s, nbytes) for s, nbytes in line.at_peak if nbytes]
    dynamic = [(s, nbytes) for s, nbytes in rows if s not in graph.static]

    def maker(s: int) -> int:
        return at if s < 0 else graph.uses.definer[s]

    def kind(s: int) -> str:
        return "workspace" if s < 0 else graph.storages[s].kind

    def name(s: int) -> str:
        return f"workspace of {graph.ops[at].name}" if s < 0 else graph.storages[s].name

    def source(s: int) -> str:
        parts = (graph.ops[maker(s)].source or "(no line)").rsplit("/", 2)
        return "/".join(parts[-2:])  # a folder and a file are enough to find it

    largest = sorted(((name(s), b, source(s)) for s, b in dynamic), key=lambda r: (-r[1], r[0]))
    return Peak(
        bytes=line.peak,
        step=line.peak_step,
        op=graph.ops[at].name if at >= 0 else "",
        place=graph.place(at) if at >= 0 else "",
        by_kind=_shares(rows, kind),
        by_module=_shares(dynamic, lambda s: graph.ops[maker(s)].module or "(no module)"),
        by_source=_shares(dynamic, source),
        by_storage=tuple(largest),
    )


def _shares(rows: Sequence[tuple[int, int]], key: Callable[[int], str]) -> tuple[Share, ...]:
    total: dict[str, int] = defaultdict(int)
    count: dict[str, int] = defaultdict(int)
    for s, nbytes in rows:
        total[key(s)] += nbytes
        count[key(s)] += 1
    shares = [Share(name, total[name], count[name]) for name in total]
    return tuple(sorted(shares, key=lambda r: (-r.bytes, r.name)))
