"""A peak in sentences: which values make it up, which line of the model made them, and what would lower it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tightship.analysis.structure import pattern
from tightship.diagnose.changes import Change
from tightship.graph import Graph
from tightship.plan import Step
from tightship.report.text import percent
from tightship.simulate import Timeline, replay
from tightship.units import format_bytes

__all__ = ["Maker", "change_lines", "makers", "peak_lines"]

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Maker:
    """``count`` values of one role that are there at the peak: ``bytes`` in all, made on line ``source``."""

    what: str
    count: int
    bytes: int
    source: str
    kind: str

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def makers(graph: Graph, steps: Sequence[Step], line: Timeline) -> list[Maker]:
    """What makes up a peak, most bytes first: values of one role in different layers together; the static set by
    kind."""
    groups: dict[tuple[str, str, str], list[tuple[str, int]]] = defaultdict(list)
    at = steps[line.peak_step].op if line.peak_step >= 0 else -1
    for s, nbytes in line.at_peak:
        if s < 0:
            op = graph.ops[at]
            groups[f"workspace of {op.name}", op.source, "workspace"].append(
                (f"workspace of {op.name}", nbytes)
            )
            continue
        storage, made = graph.storages[s], graph.uses.definer[s]
        source = graph.ops[made].source if made >= 0 else ""
        key = storage.kind if storage.kind in _CALLER else _NUMBER.sub("#", storage.name)
        groups[key, source, storage.kind].append((storage.name, nbytes))
    found = []
    for (_, source, kind), rows in groups.items():
        what = _CALLER.get(kind) or pattern([name for name, _ in rows])
        found.append(Maker(what, len(rows), sum(n for _, n in rows), source, kind))
    return sorted((m for m in found if m.bytes), key=lambda m: (-m.bytes, m.what))


_CALLER = {"parameter": "parameters", "buffer": "buffers", "state": "optimiser state", "input": "inputs"}


def peak_lines(graph: Graph, steps: Sequence[Step], top: int = 5) -> list[str]:
    """The peak in sentences, one a line."""
    line = replay(graph, steps)
    found = makers(graph, steps, line)
    op = steps[line.peak_step].op if line.peak_step >= 0 else -1
    when = f"while {graph.ops[op].name} runs" if op >= 0 else "before the first step"
    where = f" ({graph.ops[op].source})" if op >= 0 and graph.ops[op].source else ""
    lines = [f"The peak of {format_bytes(line.peak)} is reached {when}{where}. It is made up of:"]
    for m in found[:top]:
        share = f"{100 * m.bytes / line.peak:.0f} %"
        name = m.what if m.count == 1 else f"{m.count} × {m.what}"
        lines.append(
            f"  {format_bytes(m.bytes)} ({share}): {name}" + (f", made on {m.source}" if m.source else "")
        )
    if rest := found[top:]:
        nbytes = sum(m.bytes for m in rest)
        count = sum(m.count for m in rest)
        lines.append(f"  {format_bytes(nbytes)} ({100 * nbytes / line.peak:.0f} %): {count} others")
    return lines


def change_lines(changes: Sequence[Change], before: Timeline) -> list[str]:
    """Changes and what they come to, one a line."""
    if not changes:
        return ["No single change that was tried lowers the peak by 1 % of what is beyond the static set."]
    lines = ["The cheapest changes, each simulated on top of those before it:"]
    for c in changes:
        what = (
            f"{c.way} of {c.count} × {c.what}"
            if c.way != "order"
            else f"order: {c.what} ({c.count} ops moved)"
        )
        where = f", made on {c.source}" if c.source else ""
        lines.append(f"  {what}{where}: −{format_bytes(c.saves)}, {_longer(c.extra, before.time)}")
    last = changes[-1]
    total = f"  together: {format_bytes(before.peak)} to {format_bytes(last.peak)}"
    return [*lines, f"{total}, {_longer(last.time - before.time, before.time)}"]


def _longer(extra: float, time: float) -> str:
    return f"{percent(time + extra, time)} time"
