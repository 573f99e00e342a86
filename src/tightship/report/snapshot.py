"""What a memory snapshot says: in text, as the keys that other programs read, and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType

from tightship.diagnose.snapshot import DeviceReport, Failure, PinningStack, Saving
from tightship.report.numbers import Column
from tightship.report.pages import Fact, Section, cut, page_of, table
from tightship.report.tables import new_table
from tightship.report.text import Chart
from tightship.units import format_bytes, format_seconds

__all__ = ["snapshot_page", "snapshot_rows", "snapshot_tables"]

_LAYOUT = (
    ("requested", "alive, as asked for"),
    ("rounding", "alive, but nobody asked for it: sizes are rounded up"),
    ("stranded", "free, in segments (or expandable pages) in which something is alive"),
    ("cached", "free, in segments (or expandable pages) in which nothing is"),
)
_STACKS, _FRAMES = 3, 6
"""Call stacks in the terminal, and lines of each."""


def snapshot_rows(name: str, devices: Sequence[DeviceReport]) -> dict[str, Any]:
    """The keys that other programs read."""
    rows = []
    for d in devices:
        beside = {"optimal": d.optimal, "fragmentation": d.fragmentation, "stranded": d.layout.stranded}
        rows.append(asdict(d) | beside)
    return {"snapshot": name, "devices": rows}


# --- text ---


def snapshot_tables(name: str, devices: Sequence[DeviceReport], top: int = 10) -> list[RenderableType]:
    """Each device: its numbers, bytes over time, what they are at the worst moment, and what would save some."""
    if not devices:
        return [f"{name}: no device has memory or a history in this snapshot"]
    items: list[RenderableType] = []
    for d in devices:
        items += [*([""] if items else []), *_device(d, top)]
    return items


def _device(d: DeviceReport, top: int) -> Iterator[RenderableType]:
    yield "\n".join([_head(d), *(f"  {name:<16}{text}" for name, text in _facts(d))])
    if any(live or reserved for _, live, reserved in d.timeline):
        rows = [
            (Column(float(k), 1.0, "", (n,)), Column(float(k), 1.0, "", (m,))) for k, (_, m, n) in _steps(d)
        ]
        end = f"{d.events} events" + (f", {format_seconds(d.seconds)}" if d.seconds else "")
        names = ("alive", "reserved", "least arena")
        yield ""
        yield Chart([r for r, _ in rows], [m for _, m in rows], None, d.arena, names, end)
    if d.failures:
        yield ""
        yield "\n".join(_failure_lines(d.failures, top))
    if d.lines:
        yield from _lines(d, top)
    if d.layout.reserved:
        yield from _idle(d, top)
    yield from _savings(d)
    if d.notes:
        yield ""
        yield "\n".join(f"note: {note}" for note in d.notes)


def _steps(d: DeviceReport) -> Iterator[tuple[int, tuple[float, int, int]]]:
    return enumerate(d.timeline)


def _head(d: DeviceReport) -> str:
    streams = f" on {d.streams} streams" if d.streams > 1 else ""
    return f"device {d.device}: {d.requests:,} allocations{streams}, {d.events:,} events"


def _facts(d: DeviceReport) -> Iterator[tuple[str, str]]:
    yield "reserved", f"{format_bytes(d.reserved)} at most"
    yield "alive", f"{format_bytes(d.peak)} at most, as asked for"
    if d.optimal:
        yield "least arena", f"{format_bytes(d.arena)} for the same requests; no arena can be smaller"
    else:
        bound = f"no arena can be below {format_bytes(d.lower_bound)}"
        yield "least arena", f"{format_bytes(d.arena)} found for the same requests; {bound}"
    yield "fragmentation", f"{100 * d.fragmentation:.1f} % of what was reserved"
    if d.private:
        yield "private pools", f"{format_bytes(d.private)}"
    if d.capacity is not None:
        yield "the device", f"{format_bytes(d.capacity)} for these pools, seen where it was full"
    if d.settings:
        yield "settings", d.settings


def _failure_lines(failures: Sequence[Failure], top: int) -> Iterator[str]:
    for f in failures[-top:]:
        enough = "; without fragmentation it would have fit" if f.asked <= f.free + f.idle else ""
        if f.takes <= f.free:
            enough = (
                "; the device had enough: a limit of the process (set_per_process_memory_fraction) kept it"
            )
        text = f"out of memory at event {f.event}: {format_bytes(f.asked)} asked for"
        text += f" (a segment of {format_bytes(f.takes)})" if f.takes > f.asked else ""
        yield (
            f"{text}, {format_bytes(f.free)} free on the device, {format_bytes(f.idle)} idle in what is reserved"
            + enough
        )


def _lines(d: DeviceReport, top: int) -> Iterator[RenderableType]:
    alive = new_table(("made on line", 18, None), "bytes", "share", "tensors")
    for row in d.lines[:top]:
        alive.add_row(row.line, format_bytes(row.bytes), _share(row.bytes, d.peak), str(row.count))
    if rest := d.lines[top:]:
        nbytes, count = sum(r.bytes for r in rest), sum(r.count for r in rest)
        alive.add_row(
            f"({len(rest)} more)", format_bytes(nbytes), _share(nbytes, d.peak), str(count), style="dim"
        )
    yield from ("", f"Alive at its peak of {format_bytes(d.peak)}, by line", "", alive)


def _idle(d: DeviceReport, top: int) -> Iterator[RenderableType]:
    made = new_table(("what", 12, None), "bytes", "share")
    for key, text in _LAYOUT:
        nbytes = getattr(d.layout, key)
        made.add_row(f"{key}: {text}", format_bytes(nbytes), _share(nbytes, d.layout.reserved))
    yield from ("", f"Reserved {d.layout.when}: {format_bytes(d.layout.reserved)}, of which are", "", made)
    if d.pins:
        kept = new_table(
            ("what keeps free bytes from being given back", 18, None), "alone", "with others", "tensors"
        )
        for pin in d.pins[:top]:
            kept.add_row(pin.line, format_bytes(pin.alone), format_bytes(pin.shared), str(pin.count))
        if len(d.pins) > top:
            kept.add_row(f"({len(d.pins) - top} more)", "", "", "", style="dim")
        yield from ("", kept)
    if d.stacks:
        yield ""
        yield "\n".join(_stack_lines(d.stacks, min(top, _STACKS)))


def _stack_lines(stacks: Sequence[PinningStack], top: int) -> Iterator[str]:
    yield "Call stacks that strand most:"
    for s in stacks[:top]:
        tensors = f"{s.count} tensor{'s'[: s.count != 1]} of {format_bytes(s.bytes)}"
        yield f"  {format_bytes(s.alone)} alone, {format_bytes(s.shared)} with others; {tensors}"
        yield from (f"    {frame}" for frame in s.frames[:_FRAMES])
        if len(s.frames) > _FRAMES:
            yield f"    ({len(s.frames) - _FRAMES} more)"
    if len(stacks) > top:
        yield f"  ({len(stacks) - top} more)"


def _savings(d: DeviceReport) -> Iterator[RenderableType]:
    saved = new_table(("what would help", 18, None), "reserved", "saves", ("how", 7, None))
    for s in d.savings:
        saved.add_row(s.name, format_bytes(s.reserved), _saves(s), _how(s))
    yield from ("", saved)
    if d.simulated is not None:
        yield f"(simulated as it was: {format_bytes(d.simulated)} reserved, {format_bytes(d.reserved)} recorded)"


def _how(s: Saving) -> str:
    if s.failed is None:
        return s.how
    many = f"{s.failed} request{'s' * (s.failed != 1)} find{'s' * (s.failed == 1)} no memory"
    return f"{s.how}: {many if s.failed else 'every request fits'}"


def _saves(s: Saving) -> str:
    return format_bytes(s.saves) if s.saves >= 0 else f"{format_bytes(-s.saves)} more"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


# --- a page ---


def snapshot_page(name: str, devices: Sequence[DeviceReport], *, title: str = "") -> str:
    """The page's text: for each device bytes over time, and the tables."""
    facts: list[Fact] = []
    sections: list[Section] = []
    for d in devices:
        of = f", device {d.device}" if len(devices) > 1 else ""
        facts += [
            (f"reserved{of}", d.reserved, "bytes"), (f"alive{of}", d.peak, "bytes"),
            (f"least arena{of}", d.arena, "bytes"), (f"lower bound{of}", d.lower_bound, "bytes"),
            (f"fragmentation{of}", f"{100 * d.fragmentation:.1f} %", "text"),
        ]  # fmt: skip
        sections += [_memory(d, of), *_page_tables(d, of)]
    about = "; ".join(_head(d) for d in devices) or "nothing is in this snapshot"
    return page_of(title or f"Memory snapshot {name}", about, facts, sections, snapshot_rows(name, devices))


def _memory(d: DeviceReport, of: str) -> Section:
    columns = [[m for _, m, _ in d.timeline], [max(0, n - m) for _, m, n in d.timeline]]
    panel = {
        "caption": "reserved",
        "columns": columns,
        "view": "plan",
        "start": 0,
        "end": max(1, len(d.timeline)),
    }
    panel |= {"peak": d.reserved, "labels": [f": {format_seconds(t)}" for t, _, _ in d.timeline]}
    lines = [("least arena", d.arena, "bound")]
    return {
        "kind": "memory", "heading": f"Bytes over the record{of}", "across": "column", "lines": lines,
        "bands": [("activation", "alive"), ("workspace", "reserved, idle")], "panels": [panel],
    }  # fmt: skip


def _page_tables(d: DeviceReport, of: str) -> Iterator[Section]:
    number = ("bytes", "bytes"), ("tensors", "count")
    lines = [[r.line, r.bytes, r.count] for r in d.lines]
    yield table(f"Alive at its peak, by line{of}", [("made on line", "text"), *number], cut(lines, 1))
    rows: list[list[Any]] = [[f"{k}: {text}", getattr(d.layout, k)] for k, text in _LAYOUT]
    yield table(f"Reserved {d.layout.when}{of}", [("what", "text"), ("bytes", "bytes")], rows)
    if d.pins:
        pins = [[p.line, p.alone, p.shared, p.count] for p in d.pins]
        heads = [("line", "text"), ("alone", "bytes"), ("with others", "bytes"), ("tensors", "count")]
        yield table(f"What keeps free bytes from being given back{of}", heads, cut(pins, 1))
    if d.stacks:
        stacks = [[" ← ".join(s.frames), s.alone, s.shared, s.bytes, s.count] for s in d.stacks]
        heads = [("call stack, innermost first", "text"), ("alone", "bytes"), ("with others", "bytes")]
        yield table(f"Call stacks that strand bytes{of}", [*heads, *number], cut(stacks, 1))
    rows = [[s.name, s.reserved, _saves(s), _how(s)] for s in d.savings]
    heads = [("what would help", "text"), ("reserved", "bytes"), ("saves", "text"), ("how", "text")]
    yield table(f"What would help{of}", heads, rows)
    notes = [[note] for note in d.notes] + [[line] for line in _failure_lines(d.failures, 10)]
    if notes:
        yield table(f"Notes{of}", [("note", "text")], notes)
