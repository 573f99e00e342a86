"""XLA's dumps of its own memory analysis, as plain values to compare with."""

import re

from tightship.hlo.dataflow import Buffer, PointsTo
from tightship.hlo.liveness import LiveRanges

Values = dict[str, tuple[bool, list[str], list[str]]]


def values(text: str) -> Values:
    """``…-buffer-assignment-values.txt``: buffer -> (is a phi, positions, uses)."""
    found = {}
    for block in re.split(r"^(?=<\d+ )", text, flags=re.M)[1:]:
        head = re.match(r"<\d+ (\S+?)( \(phi\))? @\d+>", block)
        parts = re.search(r" positions:\n(.*?) uses:\n(.*?) from instruction", block, re.S)
        assert head and parts
        found[head[1]] = (head[2] is not None, _lines(parts[1]), _lines(parts[2]))
    return found


def _lines(text: str) -> list[str]:
    return sorted(line.strip() for line in text.strip().splitlines() if line.strip() != "(none)")


def our_values(points: PointsTo) -> Values:
    return {
        str(b): (
            b.phi,
            sorted(n.name + (_index(i) if n.shape.is_tuple else "") for n, i in b.positions),
            sorted(
                f"{u.node.name}, operand {u.operand}"
                + (_index(u.index) if u.node.operands[u.operand].shape.is_tuple else "")
                for u in b.uses
            ),
        )
        for b in points.buffers
    }


def _index(index: tuple[int, ...]) -> str:
    return f" {{{','.join(map(str, index))}}}"


def name(b: Buffer) -> str:
    """As live-range dumps write it."""
    return f"{b.node.name}{{{','.join(map(str, b.index))}}}"


def ranges(text: str) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """``…-live-range.txt``: the flattened schedule, and buffer -> (start, end)."""
    schedule = [m[1] for m in re.finditer(r"^    \d+:(\S+)$", text, re.M)]
    found = {m[1]: (int(m[2]), int(m[3])) for m in re.finditer(r"^    (\S+):(\d+)-(\d+)$", text, re.M)}
    return schedule, found


def our_ranges(live: LiveRanges) -> tuple[list[str], dict[str, tuple[int, int]]]:
    return [n.name for n in live.schedule], {name(b): (r.start, r.end) for b, r in live.ranges.items()}


def offsets(text: str) -> dict[str, tuple[int, int, int]]:
    """``…-buffer-assignment.txt``: buffer -> (allocation, offset, size)."""
    found = {}
    for block in re.split(r"^(?=allocation )", text, flags=re.M)[1:]:
        head = re.match(r"allocation (\d+): size", block)
        assert head
        for m in re.finditer(r" value: <\d+ (\S+)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)", block):
            found[m[1]] = (int(head[1]), int(m[3]), int(m[2]))
    return found


def total(text: str) -> dict[str, int]:
    """``…-buffer-assignment.txt``: bytes of all allocations, and of those for temporaries."""
    sizes = re.findall(r"^allocation \d+: size (\d+)(.*):$", text, re.M)
    return {
        "total": sum(int(n) for n, _ in sizes),
        "temp": sum(int(n) for n, kind in sizes if "preallocated-temp" in kind),
    }
