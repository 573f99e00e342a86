"""Buffer assignment of an HLO module in numbers and words: bytes by kind, the peak, and who makes it up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from tightship.hlo.assign.allocate import Allocation, Assignment
from tightship.hlo.dataflow import Buffer, Node
from tightship.hlo.liveness import LiveRanges
from tightship.hlo.peak import Peak
from tightship.units import format_bytes, format_seconds

_SCALAR = 8
"""Bytes of an index; a slice is larger."""

_LAYOUT = re.compile(r"\{[^}]*\}")

__all__ = ["PeakRow", "assignment_rows", "assignment_text", "kind_of", "peak_rows", "peak_table"]


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
