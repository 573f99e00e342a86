"""Faults drawn for two ranks, run and judged: `tests/distributed/drawn_worker.py` injects them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from support.ranks import WORKERS, started

sys.path.insert(0, str(WORKERS))

from drawn_worker import Fault, drawn

SECONDS = 5.0
"""Within which every rank has heard of a fault."""
LONGEST = 90.0
"""Seconds that a fault may take with all around it: a pair that takes longer hangs."""


def pairs(seed: int, numbers: Iterable[int]) -> Iterator[list[int]]:
    """Faults that one pair of processes has, one after the other: up to the first that ends it."""
    row: list[int] = []
    for number in numbers:
        row.append(number)
        if drawn(seed, number).ends or len(row) == 8:
            yield row
            row = []
    if row:
        yield row


def judged(seed: int, numbers: list[int]) -> dict[int, tuple[Fault, str, float]]:
    """What is wrong with each of a pair's faults, if something is, and after how many seconds all had heard of it."""
    names = [f"{seed}:{number}" for number in numbers]
    rows, hung, words = _run(names)
    faults = [drawn(seed, number) for number in numbers]
    found = {}
    for number, name, fault in zip(numbers, names, faults, strict=True):
        said = [{k: v for row in rank.get(name, []) for k, v in row.items()} for rank in rows]
        wrong, seconds = _wrong(fault, said)
        missing = [
            r for r, row in enumerate(said) if "type" not in row and (fault.what, fault.rank) != ("kill", r)
        ]
        if missing:
            wrong = f"ranks {missing} {'hang' if hung else 'say nothing: ' + words[missing[0]][-300:]}"
        found[number] = fault, wrong, seconds
        if missing:
            break
    return found


def _run(names: list[str]) -> tuple[list[dict[str, list[Any]]], bool, list[str]]:
    """What each rank has said, by fault; whether one had to be ended; and what they wrote on standard error."""
    processes, read = started(*names, worker="drawn_worker.py")
    end, hung = time.monotonic() + LONGEST * len(names), False
    while any(p.poll() is None for p in processes):
        time.sleep(0.05)
        if time.monotonic() > end:
            hung = True
            for p in processes:
                p.kill()
    said, words = read()
    return said, hung, words


def _wrong(fault: Fault, said: list[dict[str, Any]]) -> tuple[str, float]:
    left = [row for r, row in enumerate(said) if (fault.what, fault.rank) != ("kill", r)]
    since = next((row["injected"] for row in said if "injected" in row), None)
    if since is None and fault.what != "other":
        return "not reached", 0.0
    errors = [row for row in left if row.get("type")]
    if since is not None:
        seconds = max((row["at"] - since for row in errors), default=0.0)
    else:
        ends = [row["at"] for row in errors]
        seconds = max(ends) - min(ends) if ends else 0.0
    if not errors:
        states = {row.get("going") for row in left}
        return ("" if len(states) == 1 else "silent: parameters differ between ranks"), 0.0
    texts = {(row["type"], row["text"]) for row in left}
    kind, text = errors[0]["type"], errors[0]["text"]
    if len(errors) < len(left) or len(texts) > 1:
        return f"ranks say different things: {sorted(texts)}", seconds
    if kind not in ("PeerFailed", "Infeasible") or (
        kind == "PeerFailed" and f"rank {fault.rank}" not in text
    ):
        return f"no rank {fault.rank} in {kind}: {text}", seconds
    if any(row.get("changed") for row in left) and "half written" not in text:
        return f"silent: parameters have changed, and nobody says so: {text}", seconds
    if seconds > SECONDS:
        return f"after {seconds:.1f} s", seconds
    return "", seconds
