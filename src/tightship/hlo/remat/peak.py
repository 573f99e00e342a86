"""The peak of a module as XLA's rematerialisation counts it (R1-R4, R14)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tightship.errors import BadInput
from tightship.hlo.module import Module
from tightship.hlo.remat.body import Body, Names
from tightship.hlo.remat.tracker import Tracker, device_bytes

__all__ = ["module_peak", "peaks", "result_bytes", "sequential_order"]


def result_bytes(module: Module) -> int:
    """Bytes of the module's result, tables of addresses included."""
    return sum(device_bytes(part) for _, part in module.entry.root.shape.positions)


def module_peak(module: Module) -> int:
    """Bytes the module needs beyond its parameters."""
    return peaks(module)[module.entry.name] + result_bytes(module)


def sequential_order(module: Module) -> list[str]:
    """The entry and what it runs in sequence (loops, branches, calls), callees before their callers.

    Raises ``BadInput`` when a computation runs itself.
    """
    done: dict[str, None] = {}
    open_: dict[str, Iterator[str]] = {module.entry.name: _callees(module, module.entry.name)}
    while open_:
        name = next(reversed(open_))
        inner = next((c for c in open_[name] if c not in done), None)
        if inner is None:
            done[name] = None
            del open_[name]
        elif inner in open_:
            raise BadInput("a computation does not run itself", inner, f"computation {name}")
        else:
            open_[inner] = _callees(module, inner)
    return list(done)


def _callees(module: Module, name: str) -> Iterator[str]:
    return (c for i in module.by_name[name].instructions if i.row.holds for c in i.called)


def peaks(module: Module) -> Mapping[str, int]:
    """Bytes that each computation run in sequence needs beyond its parameters and its result."""
    found: dict[str, int] = {}
    for name in sequential_order(module):
        inside = module.by_name[name]
        body = Body(inside, Names(()))
        tracker = Tracker(module, inside, body)
        peak = 0
        for node in body:
            tracker.begin(node)
            callees = sum(found[c] for c in node.made.called) if node.made.row.holds else 0
            peak = max(peak, tracker.use + callees)
            tracker.end()
        found[name] = peak
    return found
