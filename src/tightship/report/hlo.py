"""Buffer assignment of an HLO module in numbers and words: bytes by kind, the peak, and who makes it up.

The page shows bytes by kind over the schedule, every allocation, and the peak.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from tightship.hlo.assign.allocate import Allocation, Assignment
from tightship.hlo.dataflow import Buffer, Node
from tightship.hlo.liveness import LiveRanges
from tightship.hlo.remat.peak import Peak, peak_of
from tightship.report.pages import Fact, Section, cut, page_of, table
from tightship.units import format_bytes, format_seconds

__all__ = [
    "PeakRow",
    "assignment_page",
    "assignment_rows",
    "assignment_text",
    "kind_of",
    "peak_rows",
    "peak_table",
]


_SCALAR = 8
"""Bytes of an index; a slice is larger."""

_LAYOUT = re.compile(r"\{[^}]*\}")


@dataclass(frozen=True)
class PeakRow:
    """A buffer that is resident at the peak. ``made`` and ``used`` are steps: when it was made, and when it is next
    used (-1: by whoever called). What a loop carries is told by what makes it in the body."""

    name: str
    shape: str
    bytes: int
    opcode: str
    kind: str
    op_name: str
    source: str
    made: int
    used: int


def assignment_rows(made: Assignment) -> dict[str, Any]:
    """What ``assign --json`` prints. Bytes; ``gap`` is how far the total is above the bound, as a fraction."""
    return {
        "total": made.total,
        "temp": made.temp,
        "arguments": made.arguments,
        "output": made.output,
        "alias": made.alias,
        "constants": made.constants,
        "thread_local": made.thread_local,
        "lower_bound": made.lower_bound,
        "gap": made.total / made.lower_bound - 1 if made.lower_bound else 0.0,
        "heap_fragmentation": made.heap_fragmentation,
        "allocations": len(made.allocations),
        "buffers": len(made.live.points.buffers),
        "instructions": len(made.live.schedule),
        "target": made.target,
        "planner": made.planner,
        "seconds": made.seconds,
        "notes": list(made.live.points.module.notes),
    }


def assignment_text(made: Assignment) -> str:
    """The same for people, one fact a line."""
    rows = assignment_rows(made)
    name = made.live.points.module.name
    alias = f", of which {format_bytes(made.alias)} in donated arguments" if made.alias else ""
    lines = [
        f"{name}: {format_bytes(made.total)} ({made.total} B) in {len(made.allocations)} allocations",
        f"  arguments    {format_bytes(made.arguments)}",
        f"  outputs      {format_bytes(made.output)}{alias}",
        f"  temporaries  {format_bytes(made.temp)}, {format_bytes(made.heap_fragmentation)} of it fragmentation",
        f"  constants    {format_bytes(made.constants)}",
        f"  lower bound  {format_bytes(made.lower_bound)}; the total is {100 * rows['gap']:.2f} % above it",
        f"  planner      {made.planner} for {made.target}, in {format_seconds(made.seconds)}",
    ]
    return "\n".join([*lines, *(f"  note         {note}" for note in made.live.points.module.notes)])


def peak_rows(live: LiveRanges, peak: Peak) -> tuple[int, list[PeakRow]]:
    """The step of the peak, and who makes it up, largest first."""
    nodes = {(n.computation.name, n.name): n for n in live.schedule}
    step = live.time[nodes[peak.computation, peak.instruction]]
    groups = {b: g.buffers for g in live.sets for b in g.buffers}
    rows = []
    for r in peak.residents:
        buffer = nodes[r.computation, r.instruction].buffer(r.index)
        group = groups[buffer]
        if any(b.node.row.runs for b in group):  # a loop or a branch continues it
            here = [b for b in group if b in live.ranges and live.ranges[b].start <= step]
            buffer = max(here, key=lambda b: live.ranges[b].start, default=buffer)
        kind = "output" if r.result else "constant" if buffer.node.opcode == "constant" else "temporary"
        rows.append(_peak_row(live, buffer, _maker(group, buffer), r.nbytes, kind, step))
    return step, sorted(rows, key=lambda r: (-r.bytes, r.made))


def kind_of(a: Allocation) -> str:
    """What an allocation is for: argument, output, temporary, constant or thread-local."""
    if a.kind == "parameter":
        return "argument"
    return "output" if a.output else "temporary" if a.temporary else a.kind


def _maker(group: Sequence[Buffer], buffer: Buffer) -> Node:
    """The instruction that tells most of what is in a buffer: for what a loop or a branch carries, what makes it
    there; for slices stacked up, what makes the slices."""
    if not _carries(buffer.node):
        return buffer.node
    inside = [b.node for b in group if b.node.computation is not buffer.node.computation]
    made = next((n for n in reversed(inside) if not _carries(n)), buffer.node)
    if not made.op_name.endswith("dynamic_update_slice"):
        return made
    given = [o.at[0] for o in made.operands if not o.shape.is_tuple and o.at[0] not in group]
    slices = max(given, key=lambda b: b.nbytes, default=buffer)
    return slices.node if slices.node.op_name and slices.nbytes > _SCALAR else made


def _carries(node: Node) -> bool:
    """Whether it hands buffers on, within a computation or to and from the caller."""
    return node.row.runs or node.row.makes != "results" or node.opcode == "copy"


def _peak_row(live: LiveRanges, buffer: Buffer, maker: Node, nbytes: int, kind: str, step: int) -> PeakRow:
    i = buffer.node.instruction
    place = live.points.module.place(maker.instruction)
    time = live.time
    later = [time[u.node] for u in buffer.uses if time.get(u.node, -1) > step]
    return PeakRow(
        str(buffer),
        str(buffer.shape),
        nbytes,
        i.opcode,
        kind,
        maker.instruction.op_name or i.op_name,
        "" if place is None else str(place),
        live.ranges[buffer].start,
        min(later, default=-1),
    )


def peak_table(rows: Sequence[PeakRow], top: int) -> RenderableType:
    """The largest of them, with where they come from."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("what", overflow="fold")
    table.add_column("kind", no_wrap=True)
    table.add_column("shape", overflow="fold")
    table.add_column("made by, at", overflow="fold")
    for r in rows[:top]:
        where = " ".join(x for x in (r.op_name, f"({r.source})" if r.source else "") if x) or r.opcode
        table.add_row(format_bytes(r.bytes), f"{r.name}: {r.opcode}", r.kind, _LAYOUT.sub("", r.shape), where)
    rest = rows[top:]
    if rest:
        table.add_row(format_bytes(sum(r.bytes for r in rest)), f"({len(rest)} more)", "", "", "")
    return table


_KINDS = {
    "argument": ("weights", "arguments"),
    "output": ("batch", "outputs"),
    "temporary": ("activation", "temporaries"),
    "constant": ("state", "constants"),
    "thread-local": ("workspace", "thread-local"),
}
_NAMES = tuple(_KINDS)


def assignment_page(made: Assignment, *, title: str = "", rows: dict[str, Any] | None = None) -> str:
    """The page's text. ``rows``: the numbers that ``assign --json`` prints, where they are more."""
    s = rows or assignment_rows(made)
    keys = ("total", "temp", "arguments", "output", "alias", "constants", "heap_fragmentation")
    facts: list[Fact] = [(k.replace("_", " "), s[k], "bytes") for k in keys]
    facts.insert(1, ("lower bound", s["lower_bound"], "bytes"))
    about = f"{made.planner} for {made.target}, in {format_seconds(made.seconds)}; "
    about += f"{s['instructions']} instructions, {s['buffers']} buffers, {s['allocations']} allocations"
    sections = [_memory(made), _arena(made), _peak(made)]
    return page_of(title or f"Buffer assignment of {made.live.points.module.name}", about, facts, sections, s)


def _memory(made: Assignment) -> Section:
    """Bytes alive at each step of the schedule, by kind; what is never given back is there all the time."""
    live, end = made.live, max(1, made.live.end)
    change: dict[str, dict[int, int]] = {name: defaultdict(int) for name in _NAMES}
    kinds: dict[Buffer, str] = {}
    for a in made.allocations:
        stays = a.read_only or a.kind == "thread-local"
        change[kind_of(a)][0] += a.size if stays else 0
        kinds |= dict.fromkeys(a.held, "" if stays else kind_of(a))
    for group in live.sets:
        kind = kinds.get(group.buffers[0], "temporary")
        if not kind:
            continue
        for start, stop in live.between(group):
            change[kind][max(0, start)] += group.size
            change[kind][min(end, stop)] -= group.size
    rows = {k: list(accumulate(c[t] for t in range(end))) for k, c in change.items() if any(c.values())}
    peak = max(map(sum, zip(*rows.values(), strict=True)), default=0)
    panel = {
        "caption": "alive at each step of the schedule", "columns": list(rows.values()) or [[0]], "view": "steps",
        "start": 0, "end": end, "peak": peak, "labels": [n.name for n in live.schedule],
    }  # fmt: skip
    return {
        "kind": "memory", "heading": "Bytes alive", "across": "step",
        "bands": [_KINDS[k] for k in rows] or [("weights", "")],
        "panels": [panel], "lines": [("total", made.total, "budget"), ("lower bound", made.lower_bound, "bound")],
    }  # fmt: skip


def _arena(made: Assignment) -> Section:
    """Allocations on top of one another, what is temporary lowest; in each, its buffers while they are alive."""
    names: dict[str, int] = {}
    stays: list[list[int]] = []
    base = 0
    for a in sorted(made.allocations, key=lambda a: (not a.temporary, -a.size)):
        band = _NAMES.index(kind_of(a))
        stays += [_stay(made, a, b, base, band, names) for b in a.held if b in made.live.ranges]
        base += a.size
    return {
        "kind": "arena", "heading": "Where every buffer lies", "across": "step", "view": "steps", "start": 0,
        "end": max(1, made.live.end), "names": list(names), "bands": list(_KINDS.values()),
        "spaces": [{"name": "all allocations", "size": max(1, base), "stays": stays}],
    }  # fmt: skip


def _stay(
    made: Assignment, a: Allocation, b: Buffer, base: int, band: int, names: dict[str, int]
) -> list[int]:
    r, i = made.live.ranges[b], b.node.instruction
    place = made.live.points.module.place(i)
    where = " ".join(x for x in (i.op_name, f"({place})" if place else "", f"in {a.kind} of {a.size} B") if x)
    texts = [names.setdefault(text, len(names)) for text in (f"{b} {b.shape}", where)]
    return [r.start, max(r.start + 1, r.end), base + a.held[b], b.shape.nbytes, band, *texts]


def _peak(made: Assignment) -> Section:
    peak = peak_of(made.live.points.module)
    step, rows = peak_rows(made.live, peak)
    found = [[r.name, r.kind, r.shape, r.bytes, r.op_name, r.source] for r in rows]
    names = [("buffer", "text"), ("kind", "text"), ("shape", "text"), ("bytes", "bytes"), ("made by", "text")]
    table_ = table("The peak", [*names, ("made on line", "text")], cut(found, 3))
    said = f"{format_bytes(peak.nbytes)}, with results and without parameters, at step {step}"
    return table_ | {"said": f"{said}, while {peak.instruction} runs"}
