"""The numbers behind every report, counted once: of a plan, a frontier, each step, each residence, the peak.

A number that JSON, terminal and pages show is one row of ``NUMBERS`` (plans), ``POINT`` or ``POLICY`` (a frontier).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from tightship.analysis.structure import ModuleSums, pattern
from tightship.graph import Graph
from tightship.plan import Plan, Step
from tightship.planners.frontier import Frontier, budget_of
from tightship.simulate import Timeline, baseline, replay
from tightship.units import format_bytes, format_seconds, percent

__all__ = [
    "BANDS", "NUMBERS", "POINT", "POLICY", "Column", "Maker", "ModuleCost", "Number", "Peak", "ResidenceRow", "Share",
    "at_peak", "band", "changes_of", "columns", "comparable", "frontier_rows", "label", "makers", "module_costs",
    "moments", "peak_of", "plan_rows", "point_numbers", "residence_rows", "shown", "slots", "summary",
]  # fmt: skip

BANDS = ("weights", "state", "batch", "activation", "gradient", "workspace")
"""What a picture tells apart, from below: bytes of the caller (parameters and buffers, optimizer state, inputs), what
ops made (results included), gradients, workspace."""


# --- the tables of numbers ---


@dataclass(frozen=True, slots=True)
class Number:
    """A number: its key in JSON, how it is counted, and its heading and unit where people are shown it.

    ``unit``: bytes, seconds, count, percent (a share, with its sign) or text. ``wide``: left out where a terminal is
    narrow. ``rare``: left out where it is nothing."""

    key: str
    of: Callable[..., Any]
    heading: str = ""
    unit: str = ""
    wide: bool = False
    rare: bool = False


def _bytes_of(change: str) -> Callable[[Plan], int]:
    """What a plan says of what streams, or is in slices."""

    def of(plan: Plan) -> int:
        row = plan.meta.get(change)
        found = row.get("bytes") if isinstance(row, dict) else None
        return found if type(found) is int and 0 <= found < 1 << 62 else 0

    return of


_streamed, _split = _bytes_of("streamed"), _bytes_of("split")


def before(plan: Plan) -> tuple[int, float]:
    """Peak and seconds before planning: of the program in one piece and in memory, where the plan's is another."""
    row = plan.meta.get("in_one_piece")
    peak, time = (row.get("peak"), row.get("time")) if isinstance(row, dict) else (None, None)
    if type(peak) is int and 0 <= peak < 1 << 62 and type(time) is float and 0 <= time < 1e300:
        return peak, time
    return plan.peak_before, plan.time_before


def _steps_of(kind: str) -> Callable[[Plan], int]:
    return lambda plan: plan.count(kind)


NUMBERS: tuple[Number, ...] = (
    Number("peak_before", lambda p: before(p)[0], "before", "bytes"),
    Number("peak_after", lambda p: p.peak, "peak", "bytes"),
    Number("budget", lambda p: p.budget, "budget", "bytes"),
    Number("met", lambda p: p.met),
    Number("lower_bound", lambda p: p.lower_bound, "lower bound", "bytes"),
    Number("gap", lambda p: p.gap),
    Number("static", lambda p: p.static, "static", "bytes"),
    Number("arena", lambda p: p.arena, "arena", "bytes"),
    Number("handed", lambda p: p.handed),
    Number("streamed", _streamed, "streamed", "bytes", rare=True),
    Number("split", _split, "in slices", "bytes", rare=True),
    Number("host", lambda p: p.host),
    Number("host_budget", lambda p: p.host_budget),
    Number("lossy", lambda p: p.lossy),
    Number("time_before", lambda p: before(p)[1], "time before", "seconds"),
    Number("time_after", lambda p: p.time, "time", "seconds"),
    Number("time_bound", lambda p: p.time_bound),
    Number("time_gap", lambda p: p.time_gap),
    Number("termination", lambda p: p.termination),
    Number("recomputed", _steps_of("recompute"), "recomputed", "count"),
    Number("offloaded", _steps_of("offload"), "offloaded", "count"),
    Number("compressed", _steps_of("compress"), "compressed", "count"),
    Number(
        "codecs", lambda p: dict(sorted(Counter(s.codec for s in p.steps if s.kind == "compress").items()))
    ),
    Number("redrawn", lambda p: sum(s.saves for s in p.steps)),
    Number("moved", lambda p: p.moved, "reordered", "count"),
    Number("in_place", lambda p: sum(len(s.reuses) for s in p.steps)),
    Number("steps", lambda p: len(p.steps)),
    Number("planner", lambda p: p.planner),
    Number("seconds", lambda p: p.seconds),
    Number("digest", lambda p: p.digest),
    Number("notes", lambda p: list(p.notes)),
    Number("meta", lambda p: p.meta),
)
"""What is said of a plan, in the order in which people read it."""


def summary(plan: Plan, graph: Graph | None = None) -> dict[str, Any]:
    """A plan as the keys that other programs read."""
    rows = {n.key: n.of(plan) for n in NUMBERS}
    if graph is not None:
        rows |= {"graph": graph.name, "ops": len(graph.ops), "storages": len(graph.storages)}
        rows["called"] = [
            {"op": op.name, "graph": g.name, "peak": replay(g, baseline(g)).peak - g.static_bytes}
            for op in graph.ops
            for g in op.calls
        ]
    return rows


def plan_rows(plan: Plan, graph: Graph) -> dict[str, Any]:
    """``summary``, and what each module costs."""
    return summary(plan, graph) | {"modules": [asdict(c) for c in module_costs(graph, plan.steps)]}


def _once(f: Frontier) -> float:
    """Seconds of the step before planning."""
    return f.before[1] or 1.0


def _ours(f: Frontier, other: Any) -> str:
    best = other.ours
    return "none" if best is None else f"{percent(best.time, _once(f))} at {format_bytes(best.peak)}"


POINT: tuple[Number, ...] = (
    Number("budget", lambda f, p: budget_of(p), "budget", "bytes", wide=True),
    Number("peak", lambda f, p: p.peak, "peak", "bytes"),
    Number("extra", lambda f, p: p.time / _once(f) - 1, "extra time", "percent"),
    Number("least", lambda f, p: max(0.0, p.time_bound / _once(f) - 1), "at least", "percent"),
    Number("flops", lambda f, p: f.more_flops(p), "extra FLOPs", "percent", wide=True),
    Number("streamed", lambda f, p: _streamed(p), "streamed", "bytes", rare=True),
    Number("split", lambda f, p: _split(p), "in slices", "bytes", rare=True),
    Number("changes", lambda f, p: _changes(f, p), "changes", "text"),
)
"""What is said of each plan of a frontier."""

POLICY: tuple[Number, ...] = (
    Number("name", lambda f, o: o.name, "policy, simulated", "text"),
    Number("peak", lambda f, o: o.peak, "peak", "bytes"),
    Number("extra", lambda f, o: o.time / _once(f) - 1, "extra time", "percent"),
    Number("flops", lambda f, o: o.extra_flops, "extra FLOPs", "percent", wide=True),
    Number("ours", _ours, "ours within it", "text"),
)
"""What is said of each other policy beside a frontier."""


def point_numbers(f: Frontier) -> tuple[Number, ...]:
    """Those of `POINT` that say something of these plans."""
    return tuple(n for n in POINT if not n.rare or any(n.of(f, p) for p in f.points))


def frontier_rows(f: Frontier) -> dict[str, Any]:
    """A frontier as the keys that other programs read: ``points``, each as a plan's, and ``peers``."""
    return {
        "graph": f.graph.name,
        "ops": len(f.graph.ops),
        "lower_bound": f.lower_bound,
        "least_peak": min(p.peak for p in f.points),
        "seconds": f.seconds,
        "interrupted": f.interrupted,
        "notes": list(f.notes),
        "points": [_point(f, p) for p in f.points],
        "peers": [
            {"name": o.name, "peak_after": o.peak, "time_after": o.time, "extra_flops": o.extra_flops}
            | {"ours": None if o.ours is None else summary(o.ours, f.graph)}
            for o in f.others
        ],
    }


def _point(f: Frontier, plan: Plan) -> dict[str, Any]:
    row = summary(plan, f.graph_of(plan)) | {"extra_flops": f.more_flops(plan)}
    if f.changed:
        peak, seconds = f.before
        change = f.change_of(plan)
        row |= {"peak_before": peak, "time_before": seconds, "changed": "" if change is None else change.how}
    return row


def _changes(f: Frontier, plan: Plan) -> str:
    """What a plan does, with how its graph was changed."""
    change, does = f.change_of(plan), changes_of(plan)
    if change is None:
        return does
    return change.how if does == "none" else f"{change.how}, {does}"


def shown(number: Number, value: Any) -> str:
    """A value as people read it, by its unit."""
    if number.unit == "percent":
        return percent(1 + value, 1)
    return str({"bytes": format_bytes, "seconds": format_seconds}.get(number.unit, str)(value))


def changes_of(plan: Plan) -> str:
    """How much is recomputed, offloaded and compressed, in a few words."""
    kinds = {"recompute": "recomputed", "offload": "offloaded", "compress": "compressed"}
    return ", ".join(f"{n} {word}" for kind, word in kinds.items() if (n := plan.count(kind))) or "none"


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
    rows = []
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
        rows.append(Column(start, end - start, phase, (*now[:-1], now[-1] + rest)))
        clock = end
    return rows


def comparable(*charts: Sequence[Column]) -> tuple[list[Sequence[Column]], float, bool]:
    """Charts on one scale, how long it is, and whether in seconds: computing time where all have it, else steps."""
    timed = all(data and data[-1].start + data[-1].seconds > 0 for data in charts)
    if not timed:
        charts = tuple(
            [Column(float(k), 1.0, c.phase, c.bytes) for k, c in enumerate(data)] for data in charts
        )
    longest = max((data[-1].start + data[-1].seconds for data in charts if data), default=0.0)
    return list(charts), longest or 1.0, timed


def slots(data: Sequence[Column], count: int, longest: float) -> list[Column]:
    """The highest step in each of ``count`` stretches of ``longest``, up to the last one that there is."""
    best: list[Column | None] = [None] * count
    for c in data:
        first = min(count - 1, int(c.start / longest * count))
        end = min(count - 1, int((c.start + c.seconds) / longest * count - 1e-9))
        for k in range(first, max(first, end) + 1):
            known = best[k]
            if known is None or c.total > known.total:
                best[k] = c
    while best and best[-1] is None:
        best.pop()
    filled, last = [], Column(0.0, 0.0, "", (0,) * len(BANDS))
    for highest in best:
        last = highest or last
        filled.append(last)
    return filled


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
    defined = graph.uses.defines[step.op] if step.kind == "compute" else step.storages
    return [(s, step.nbytes if step.kind == "compress" else graph.storages[s].size) for s in defined]


# --- residences ---


@dataclass(frozen=True, slots=True)
class ResidenceRow:
    """``size`` bytes at ``offset`` of ``pool`` during steps [start, end); ``kind``: one of ``BANDS``."""

    name: str
    kind: str
    start: int
    end: int
    offset: int
    size: int
    pool: str
    form: str
    where: str


def residence_rows(graph: Graph, plan: Plan) -> list[ResidenceRow]:
    """The residences of a plan, workspace included, in their order."""
    rows = []
    for r in plan.residences:
        if r.storage < 0:
            op = plan.steps[r.start].op
            name, kind, where = f"workspace of {graph.ops[op].name}", "workspace", graph.place(op)
        else:
            op = graph.uses.definer[r.storage]
            name, kind = graph.storages[r.storage].name, band(graph, r.storage)
            where = graph.place(op) if op >= 0 else ""
        rows.append(ResidenceRow(name, kind, r.start, r.end, r.offset, r.size, r.pool, r.form, where))
    return rows


def label(graph: Graph, steps: Sequence[Step], step: int) -> str:
    """What a step does, in a few words."""
    s = steps[step]
    if s.op >= 0:
        over = "".join(f", in place of {graph.storages[a].name}" for a, _ in s.reuses)
        return (f"{s.kind} " if s.kind != "compute" else "") + graph.ops[s.op].name + over
    names = ", ".join(graph.storages[x].name for x in s.storages[:3])
    return f"{s.kind} {names}" + (" …" if len(s.storages) > 3 else "")


def moments(line: Timeline) -> list[float]:
    """When bytes are taken and given back: for each step, and for the end, seconds that never go back. Bytes follow
    the order of the steps, whatever the streams: a step that its stream runs early counts from those before it on."""
    return [*accumulate((since for since, _ in line.spans), max), line.time]


# --- who makes up the peak ---


@dataclass(frozen=True, slots=True)
class Resident:
    """``bytes`` of one storage at the peak; ``storage`` is negative for the workspace of the op that runs then."""

    storage: int
    name: str
    kind: str
    bytes: int
    module: str
    source: str


def at_peak(graph: Graph, steps: Sequence[Step], line: Timeline) -> list[Resident]:
    """Everything that is in memory at the peak."""
    running = steps[line.peak_step].op if line.peak_step >= 0 else -1
    rows = []
    for s, nbytes in line.at_peak:
        k = running if s < 0 else graph.uses.definer[s]
        name = f"workspace of {graph.ops[k].name}" if s < 0 else graph.storages[s].name
        kind = "workspace" if s < 0 else graph.storages[s].kind
        module, source = (graph.ops[k].module, graph.ops[k].source) if k >= 0 else ("", "")
        rows.append(Resident(s, name, kind, nbytes, module, source))
    return [r for r in rows if r.bytes]


@dataclass(frozen=True, slots=True)
class Share:
    """``count`` storages that hold ``bytes`` at the peak and share a kind, module or line."""

    name: str
    bytes: int
    count: int


@dataclass(frozen=True)
class Peak:
    """The peak of a list of steps: its bytes, the step and op it is at, and its makers, largest first.

    ``by_module``, ``by_source`` and ``by_storage`` leave the static set out, which is there at every step.
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
        return asdict(self) | {
            "by_storage": [{"name": n, "bytes": b, "place": p} for n, b, p in self.by_storage]
        }


def peak_of(graph: Graph, steps: Sequence[Step]) -> Peak:
    """Who is in memory at the highest step, by kind, by module, by source line and one by one."""
    line = replay(graph, steps)
    op = steps[line.peak_step].op if line.peak_step >= 0 else -1
    rows = at_peak(graph, steps, line)
    dynamic = [r for r in rows if r.storage not in graph.static]

    def source(r: Resident) -> str:
        return "/".join(
            (r.source or "(no line)").rsplit("/", 2)[-2:]
        )  # a folder and a file are enough to find it

    return Peak(
        bytes=line.peak,
        step=line.peak_step,
        op=graph.ops[op].name if op >= 0 else "",
        place=graph.place(op) if op >= 0 else "",
        by_kind=_shares((r.kind, r.bytes) for r in rows),
        by_module=_shares((r.module or "(no module)", r.bytes) for r in dynamic),
        by_source=_shares((source(r), r.bytes) for r in dynamic),
        by_storage=tuple(
            sorted(((r.name, r.bytes, source(r)) for r in dynamic), key=lambda row: (-row[1], row[0]))
        ),
    )


def _shares(rows: Iterable[tuple[str, int]]) -> tuple[Share, ...]:
    groups: dict[str, list[int]] = defaultdict(list)
    for name, nbytes in rows:
        groups[name].append(nbytes)
    shares = [Share(name, sum(sizes), len(sizes)) for name, sizes in groups.items()]
    return tuple(sorted(shares, key=lambda r: (-r.bytes, r.name)))


@dataclass(frozen=True)
class Maker:
    """``count`` values of one role that are there at the peak: ``bytes`` in all, made on line ``source``."""

    what: str
    count: int
    bytes: int
    source: str
    kind: str


_NUMBER = re.compile(r"\d+")
_CALLER = {"parameter": "parameters", "buffer": "buffers", "state": "optimizer state", "input": "inputs"}


def makers(graph: Graph, steps: Sequence[Step], line: Timeline) -> list[Maker]:
    """What makes up a peak, most bytes first: values of one role in different layers together; the static set by
    kind."""
    groups: dict[tuple[str, str, str], list[Resident]] = defaultdict(list)
    for r in at_peak(graph, steps, line):
        role = r.name if r.storage < 0 else r.kind if r.kind in _CALLER else _NUMBER.sub("#", r.name)
        groups[role, r.source, r.kind].append(r)
    rows = [
        Maker(
            _CALLER.get(kind) or pattern([r.name for r in same]),
            len(same),
            sum(r.bytes for r in same),
            source,
            kind,
        )
        for (_, source, kind), same in groups.items()
    ]
    return sorted(rows, key=lambda m: (-m.bytes, m.what))


# --- what each module costs ---


@dataclass(frozen=True, slots=True)
class ModuleCost:
    """A module with all that is inside it: bytes of its parameters and buffers, bytes of what its ops made that are
    there at the peak, bytes that the plan makes again and moves to the host, the seconds that both keep a stream
    busy, and the share of the peak. ``module`` is a path as in ``named_modules``; the whole is the empty one."""

    module: str
    parameters: int
    activations: int
    recomputed: int
    offloaded: int
    seconds: float
    share: float


def module_costs(graph: Graph, steps: Sequence[Step]) -> list[ModuleCost]:
    """Every module with ops, each after the one that it is in; nothing where no op has a module.

    A parameter belongs to the first op that reads it, other values to the op that made them. Time of transfers is
    counted in full, also where it is hidden behind computing."""
    if not any(op.module for op in graph.ops):
        return []
    uses, line = graph.uses, replay(graph, steps)
    costs = ModuleSums(5)

    def add(op: int, column: int, amount: float) -> None:
        costs.add(graph.ops[op].module if op >= 0 else "", column, amount)

    for op in range(len(graph.ops)):
        add(op, 0, 0)
    for s in graph.static:
        if graph.storages[s].kind in ("parameter", "buffer"):
            add(min(uses.readers[s], default=-1), 0, graph.storages[s].size)
    running = steps[line.peak_step].op if line.peak_step >= 0 else -1
    for s, nbytes in line.at_peak:
        if s not in graph.static:
            add(running if s < 0 else uses.definer[s], 1, nbytes)
    for step, (start, end) in zip(steps, line.spans, strict=True):
        if step.kind == "recompute":
            add(step.op, 2, sum(graph.storages[s].size for s in step.storages))
            add(step.op, 4, end - start)
        elif step.kind in ("offload", "fetch"):
            for s in step.storages:
                add(uses.definer[s], 3, graph.storages[s].size if step.kind == "offload" else 0)
                add(uses.definer[s], 4, (end - start) / len(step.storages))
    return [
        ModuleCost(name, int(p), int(a), int(r), int(o), float(t), (p + a) / line.peak if line.peak else 0.0)
        for name, (p, a, r, o, t) in costs
    ]
