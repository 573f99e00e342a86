"""A plan, and a frontier, as a page: memory before and after, evictions, the arena, streams, the peak's makers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from tightship.diagnose.alternatives import size_of, slices_of, streamed_as, tensor_of
from tightship.graph import Graph
from tightship.plan import Plan, Step
from tightship.planners.batch import BatchSize
from tightship.planners.frontier import Frontier, budget_of
from tightship.report.numbers import (
    BANDS,
    NUMBERS,
    POLICY,
    at_peak,
    columns,
    frontier_rows,
    label,
    module_costs,
    plan_rows,
    point_numbers,
    residence_rows,
)
from tightship.report.pages import ROWS, Fact, Section, cut, page_of, table
from tightship.report.picture import NAMES
from tightship.simulate import Timeline, baseline, replay
from tightship.units import format_bytes, format_seconds, percent

__all__ = ["arcs", "frontier_page", "plan_page"]

_SLOTS = 12_000
"""Columns of memory in all: of many plans, each has fewer."""


def plan_page(
    graph: Graph,
    plan: Plan,
    *,
    title: str = "",
    rows: Mapping[str, Any] | None = None,
    before: Graph | None = None,
    batches: Sequence[BatchSize] = (),
    frontier: Frontier | None = None,
) -> str:
    """The page's text. ``rows``: the plan's numbers where they are not those of ``summary``: of a module, whose peak
    counts bytes that its graph does not have. ``before``: what there was, where planning changed what ops call.
    ``batches``: the sizes that were looked at to find the largest that fits. ``frontier``: plans for other budgets,
    to choose from."""
    s = dict(plan_rows(plan, graph) if rows is None else rows)
    facts: list[Fact] = [
        (n.heading, s[n.key], n.unit)
        for n in NUMBERS
        if n.heading and n.key in s and (s[n.key] or not n.rare)
    ]
    about = f"{s['planner']}, planned in {format_seconds(s['seconds'])}; {len(plan.steps)} steps"
    about += "" if s["met"] else "; the budget is NOT met"
    before = before or graph
    unplanned = replay(before, baseline(before)).peak
    changed = (
        plan.meta.get("in_one_piece") is not None
    )  # drawn is what runs: the numbers are of the step as it was
    beside = (0 if changed else s["peak_before"] - unplanned, s["peak_after"] - plan.peak)
    sections = steps_of(before, graph, plan, marks(s["budget"], s["lower_bound"]), beside)
    if changed:
        sections[0]["panels"][0]["caption"] = "with slices and streams, not planned"
    sections[1:1] = batch_sizes(batches)
    sections[1:1] = [] if frontier is None else other_budgets(frontier, plan, graph)
    return page_of(title or f"Plan for {graph.name}", about, facts, sections, s)


# --- parts of pages about a graph and its steps ---

Band = tuple[str, str]
"""A color of the page's style, and what it stands for."""

Line = tuple[str, int, str]
"""A line across a chart: its name, its bytes, a color."""


_BANDS = [*NAMES.items()]
_MEMORY = {"kind": "memory", "heading": "Memory over the steps", "across": "step"}


def memory(
    given: Graph, graph: Graph, plan: Plan, lines: Sequence[Line], beside: tuple[int, int] = (0, 0)
) -> Section:
    """Bytes while each step runs, before and with the plan. ``beside``: bytes, before and with it, that are there all
    the time and not in the graph (the results of a module and what XLA counts besides)."""
    panels = []
    for caption, view, g, steps, more in (
        ("before planning", "before", given, baseline(given), beside[0]),
        ("with the plan", "plan", graph, plan.steps, beside[1]),
    ):
        rows = [(more, *c.bytes) for c in columns(g, steps)] or [(more + g.static_bytes, *(0 for _ in BANDS))]
        panels.append(
            panel(caption, rows, view) | {"labels": [label(g, steps, i) for i in range(len(steps))]}
        )
    bands = [("batch", "results"), *_BANDS]
    return _MEMORY | {"lines": lines, "bands": without_empty(bands, panels), "panels": panels}


def panel(caption: str, rows: Sequence[Sequence[int]], view: str) -> Section:
    """One chart of memory: for each band its bytes at every step."""
    columns_ = [list(band) for band in zip(*rows, strict=True)]
    end = max(1, len(rows))
    about = {"caption": caption, "columns": columns_, "view": view}
    return about | {"start": 0, "end": end, "peak": max(map(sum, rows))}


def without_empty(bands: Sequence[Band], panels: Sequence[Section]) -> list[Band]:
    """The bands that are somewhere in one of the panels; the others leave the panels."""
    used = [k for k in range(len(bands)) if any(any(p["columns"][k]) for p in panels)] or [0]
    for p in panels:
        p["columns"] = [p["columns"][k] for k in used]
    return [bands[k] for k in used]


def folded(rows: Sequence[Sequence[int]], slots: int) -> list[Sequence[int]]:
    """At most ``slots`` rows, each the highest of those that it stands for."""
    n = len(rows)
    if n <= slots:
        return list(rows)
    cuts = [n * k // slots for k in range(slots + 1)]
    return [max(rows[a:b], key=sum) for a, b in pairwise(cuts)]


def marks(budget: int | None, bound: int) -> list[Line]:
    """The lines across."""
    lines = [("budget", budget, "budget")] if budget is not None else []
    return lines + ([("lower bound", bound, "bound")] if bound else [])


_AGAIN = {"recompute": "recompute", "fetch": "offload", "decompress": "compress"}


def arcs(graph: Graph, plan: Plan, line: Timeline) -> list[dict[str, Any]]:
    """Each eviction: from the step that freed the full form to the one that made it again, and the seconds that this
    took (of several at once, each an equal part)."""
    left: dict[int, int] = {}
    rows = []
    for i, (step, (start, end)) in enumerate(zip(plan.steps, line.spans, strict=True)):
        if step.kind == "free" and step.form == "full":
            left.update(dict.fromkeys(step.storages, i))
        left.update((s, i) for s, _ in step.reuses)
        if step.kind in _AGAIN:
            share = (end - start) / max(1, len(step.storages))
            rows += [
                {"kind": _AGAIN[step.kind], "from": left.get(s, i), "to": i, "name": graph.storages[s].name}
                | {"bytes": graph.storages[s].size, "cost": share}
                for s in step.storages
            ]
    return rows


def evictions(graph: Graph, plan: Plan, line: Timeline) -> list[Section]:
    """The arcs, and the largest of them as a table; nothing where everything is kept."""
    evicted = arcs(graph, plan, line)
    if not evicted:
        return []
    drawn = {"kind": "arcs", "heading": "What left and came back", "arcs": evicted, "view": "plan"}
    largest = sorted(evicted, key=lambda a: (-a["bytes"], a["from"]))
    rows = [[a["name"], a["kind"], a["bytes"], a["cost"], a["from"], a["to"]] for a in largest[:ROWS]]
    count = len(evicted)
    many = f"all {count}" if len(rows) == count else f"the largest {len(rows)} of {count}"
    names = [("storage", "text"), ("how", "text"), ("bytes", "bytes"), ("cost", "seconds")]
    names += [("leaves at step", "count"), ("is back at step", "count")]
    listed = table("Evictions, largest first", names, rows, fold=f"as a table: {many}")
    return [drawn | {"steps": len(plan.steps)}, listed]


def streams(graph: Graph, plan: Plan, line: Timeline) -> Section:
    """What runs when: [begin, end, stream, kind, step], seconds."""
    slices = [
        [*span, step.stream, step.kind, i]
        for i, (step, span) in enumerate(zip(plan.steps, line.spans, strict=True))
        if step.kind != "free"
    ]
    tracks = [(t, "compute" if t == 0 else f"copy {t}") for t in sorted({s.stream for s in plan.steps} | {0})]
    labels = ["" if s.kind == "free" else label(graph, plan.steps, i) for i, s in enumerate(plan.steps)]
    return {"kind": "streams", "heading": "Streams", "slices": slices, "tracks": tracks, "labels": labels}


def arena(graph: Graph, plan: Plan) -> list[Section]:
    """Where every byte lies: residences ("stays") are [start, end, offset, size, band, name, where], the last two as
    indices of ``names``. Nothing for a plan without places."""
    names: dict[str, int] = {}
    spaces: dict[str, list[list[int]]] = {}
    for r in residence_rows(graph, plan):
        texts = [names.setdefault(text, len(names)) for text in (r.name, r.where)]
        spaces.setdefault(r.pool, []).append([r.start, r.end, r.offset, r.size, BANDS.index(r.kind), *texts])
    if not spaces:
        return []
    called = {"device": "the arena", "out": "results, outside it", "host": "offloaded"}
    return [{
        "kind": "arena", "heading": "The arena", "across": "step", "view": "plan", "start": 0, "end": len(plan.steps),
        "names": list(names), "bands": _BANDS,
        "spaces": [
            {"name": called.get(pool, pool), "size": max(r[2] + r[3] for r in rows), "stays": rows}
            for pool, rows in sorted(spaces.items(), key=lambda item: item[0] != "device")
        ],
    }]  # fmt: skip


def peak_table(graph: Graph, steps: Sequence[Step], line: Timeline, beside: int = 0) -> Section:
    """Who makes up the peak, largest first: tensor, kind, shape, bytes, module, line; the static set as one row."""
    shapes: dict[int, str] = {}
    for v in graph.values:
        shape = f"{v.dtype.removeprefix('torch.')}[{','.join(map(str, v.shape))}]" if v.shape else v.dtype
        shapes.setdefault(v.storage, shape)
    residents = at_peak(graph, steps, line)
    static = sum(r.bytes for r in residents if r.storage in graph.static)
    rows: list[list[Any]] = [
        [r.name, r.kind, shapes.get(r.storage, ""), r.bytes, r.module, r.source]
        for r in residents
        if r.storage not in graph.static
    ]
    rows.append([f"static set ({len(graph.static)} storages)", "static", "", static, "", ""])
    rows.append(["results", "output", "", beside, "", ""])
    rows = sorted((r for r in rows if r[3]), key=lambda r: -r[3])
    running = label(graph, steps, line.peak_step) if line.peak_step >= 0 else "the static set"
    names = [("tensor", "text"), ("kind", "text"), ("shape", "shape"), ("bytes", "bytes"), ("module", "text")]
    section = table("The peak", [*names, ("made on line", "text")], cut(rows, 3))
    return section | {"said": f"{format_bytes(line.peak + beside)} at step {line.peak_step}: {running}"}


_COSTS = 200
"""Rows of the table of modules."""


def modules(graph: Graph, plan: Plan) -> list[Section]:
    """What each module costs, with all that is inside it; nothing where no op has a module."""
    costs = module_costs(graph, plan.steps)
    if not costs:
        return []
    most = sorted(costs, key=lambda c: (-c.share, -c.recomputed - c.offloaded, c.module))[:_COSTS]
    kept = {c.module for c in most}
    rows = [
        [c.module or "(all)", c.parameters, c.activations, c.share, c.recomputed, c.offloaded, c.seconds]
        for c in costs
        if c.module in kept
    ]
    names = [("module", "text"), ("parameters, buffers", "bytes"), ("kept at the peak", "bytes")]
    names += [
        ("of the peak", "share"),
        ("made again", "bytes"),
        ("offloaded", "bytes"),
        ("time for both", "seconds"),
    ]
    section = table("What each module costs", names, rows) | {"sortable": True}
    more = f"; the {_COSTS} of {len(costs)} with the largest share of the peak" if len(costs) > _COSTS else ""
    return [section | {"said": f"each with all that is inside it{more}"}]


def batch_sizes(batches: Sequence[BatchSize]) -> list[Section]:
    """What a step needs at other sizes of the batch; nothing without any."""
    names = [("batch", "count"), ("as it is", "bytes"), ("plan", "text"), ("with it", "bytes")]
    names += [("time for each", "seconds"), ("with the plan", "seconds")]
    words = {True: "found", False: "none", None: "not looked for"}
    rows = [
        [
            b.batch,
            b.unplanned_peak,
            words[b.met],
            b.peak,
            b.time_before / b.batch,
            b.time and b.time / b.batch,
        ]
        for b in batches
    ]
    return [table("Batch sizes", names, rows) | {"said": "seconds are modeled"}] if rows else []


def steps_of(
    given: Graph, graph: Graph, plan: Plan, lines: Sequence[Line], beside: tuple[int, int] = (0, 0)
) -> list[Section]:
    """All of a plan, in the order in which it is looked at."""
    line = replay(graph, plan.steps)
    return [
        memory(given, graph, plan, lines, beside),
        *evictions(graph, plan, line),
        *arena(graph, plan),
        peak_table(graph, plan.steps, line, beside[1]),
        *modules(graph, plan),
        streams(graph, plan, line),
    ]


# --- a frontier ---


def frontier_page(f: Frontier, *, title: str = "") -> str:
    """The page's text: the trade-off beside other policies, and memory before and after of the plan chosen."""
    rows = frontier_rows(f)
    facts: list[Fact] = [
        ("least peak", rows["least_peak"], "bytes"),
        ("before", f.before[0], "bytes"),
        ("lower bound", f.lower_bound, "bytes"),
        ("time before", f.before[1], "seconds"),
        ("plans", len(f.points), "count"),
        ("other policies", len(f.others), "count"),
    ]
    about = (
        f"{len(f.points)} plans for {f.graph.name} ({len(f.graph.ops)} ops), in {format_seconds(f.seconds)}"
    )
    tightest = f.points[0]
    graph = f.graph_of(tightest)
    at_peak = peak_table(graph, tightest.steps, replay(graph, tightest.steps))
    at_peak["heading"] = "The peak of the plan that needs least"
    tables = [
        table(
            heading,
            [(n.heading, n.unit) for n in numbers],
            [[n.of(f, row) for n in numbers] for row in rows_],
        )
        for heading, numbers, rows_ in (
            ("Plans", point_numbers(f), f.points),
            ("Other policies", POLICY, f.others),
        )
        if rows_
    ]
    sections = [_chart(f), what_if(f), _memory(f), *tables, at_peak]
    return page_of(title or f"Time against memory: {f.graph.name}", about, facts, sections, rows)


def other_budgets(f: Frontier, plan: Plan, graph: Graph) -> list[Section]:
    """In the page of a plan: the plans for other budgets beside it, each with its memory."""
    beside = _memory(f) | {"heading": "Memory with the plan that is chosen"}
    beside["panels"] = [p | {"view": f"what if, {p['view']}"} for p in beside["panels"]]
    numbers = point_numbers(f)
    rows = [[n.of(f, p) for n in numbers] for p in f.points]
    listed = table("Plans for other budgets", [(n.heading, n.unit) for n in numbers], rows, fold="as a table")
    return [what_if(f, (graph, plan)), beside, listed]


_DOES = {"recompute": "recomputed", "offload": "offloaded", "compress": "compressed"}


def what_if(f: Frontier, compared: tuple[Graph, Plan] | None = None) -> Section:
    """A choice of plan: for each its numbers, what it does, and which tensors it treats otherwise than the one that
    is ``compared`` (the plan that needs least, if None)."""
    of, base = compared or (f.graph_of(f.points[0]), f.points[0])
    sizes: dict[str, int] = {}
    ours = _ways(of, base, sizes)
    plans = []
    for p in f.points:
        graph, change = f.graph_of(p), f.change_of(p)
        ways = _ways(graph, p, sizes)
        does: list[list[Any]] = [] if change is None else [[change.how, None, 0]]
        for kind, word in _DOES.items():
            moved = [graph.storages[s].size for step in p.steps if step.kind == kind for s in step.storages]
            if moved:
                does.append([word, p.count(kind), sum(moved)])
        other = sorted(ours.items() ^ ways.items(), key=lambda way: (-sizes[way[0]], way[0]))
        changes = [
            [name, ours.get(name, "kept"), ways.get(name, "kept"), sizes[name]]
            for name in dict.fromkeys(name for name, _ in other)
        ]
        facts = [(n.heading, n.of(f, p), n.unit) for n in point_numbers(f) if n.key != "changes"]
        facts.insert(2, ("time", p.time, "seconds"))
        plans.append({"facts": facts, "does": does, "changes": cut(changes, 3), "changed": len(changes)})
    names = [("tensor", "text"), ("there", "text"), ("here", "text"), ("bytes", "bytes")]
    about = f"the plan for {format_bytes(budget_of(base))}"
    return {"kind": "whatif", "heading": "What if?", "plans": plans, "columns": names, "base": about}


def _ways(graph: Graph, plan: Plan, sizes: dict[str, int]) -> dict[str, str]:
    """What is done with each tensor that is not kept all the time, by its name, which it has in changed graphs too;
    notes their ``sizes``."""
    found: dict[str, set[str]] = {}
    in_parts: set[str] = set()
    for k, storage in enumerate(graph.storages):
        if (tensor := tensor_of(graph, k)) and tensor not in found and (parts := streamed_as(graph, k)):
            found[tensor], sizes[tensor] = {"streamed"}, size_of(graph, parts)
        elif (split := slices_of(graph, plan, k)) is not None:
            found[split["name"]], sizes[split["name"]] = {"in slices"}, split["bytes"]
            in_parts.add(storage.name)
    for step in plan.steps:
        if step.kind in _DOES:
            for s in step.storages:
                name = graph.storages[s].name
                if name not in in_parts and not tensor_of(graph, s):
                    found.setdefault(name, set()).add(_DOES[step.kind])
                    sizes[name] = graph.storages[s].size
    return {name: " and ".join(sorted(words)) for name, words in found.items()}


def _chart(f: Frontier) -> Section:
    once = f.before[1] or 1.0
    values = [{n.key: n.of(f, p) for n in point_numbers(f)} | {"time": p.time} for p in f.points]
    points = [
        v
        | {
            "name": f"budget {format_bytes(v['budget'])}",
            "said": v["changes"],
            "changed": f.change_of(p) is not None,
        }
        for v, p in zip(values, f.points, strict=True)
    ]
    peers = [
        {"name": o.name, "peak": o.peak, "time": o.time, "extra": o.time / once - 1}
        | {"said": "" if o.ours is None else f"a plan for as much memory: {percent(o.ours.time, once)}"}
        for o in f.others
    ]
    heading = "Time against memory"
    return {"kind": "frontier", "heading": heading, "points": points, "peers": peers, "bound": f.lower_bound}


def _memory(f: Frontier) -> Section:
    """Before, beside the plan that was chosen; the lines are those of the tightest budget."""
    slots = min(600, _SLOTS // len(f.points))
    panels = [_panel("before planning", f.graph, None, slots)]
    panels += [
        _panel(f"with the plan for {format_bytes(budget_of(p))}", f.graph_of(p), p, slots) for p in f.points
    ]
    bands = without_empty(_BANDS, panels)
    before, first, *_ = panels
    choices = [before, first | {"choices": panels[1:]}]
    return _MEMORY | {"bands": bands, "panels": choices, "lines": marks(None, f.lower_bound)}


def _panel(caption: str, graph: Graph, plan: Plan | None, slots: int) -> dict[str, Any]:
    steps = baseline(graph) if plan is None else plan.steps
    rows = [c.bytes for c in columns(graph, steps)] or [(0,) * len(BANDS)]
    less = folded(rows, slots)
    times = [len(rows) * k // max(1, len(less)) for k in range(len(less))]
    section = panel(caption, less, "before" if plan is None else "plan")
    return section | {"times": times, "end": max(1, len(rows))}
