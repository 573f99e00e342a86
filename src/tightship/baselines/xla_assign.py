"""XLA's buffer assignment: the same allocations, offsets and total, from the text of a scheduled module.

Problem: a place for every logical buffer, with the least bytes in all. Measure: bytes of all allocations. Source:
XLA, ``BufferAssigner`` with its heap simulator (best fit by decreasing size or span). Guarantee: none on the size;
legal by construction, and checked. Complexity: buffers × those alive with them. Known limits: what already has an
allocation is reused as a whole only, from its start; tables of addresses are never reused; ties between equal buffers
follow the order of the text, which may not be the order XLA had.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from tightship.errors import BadInput
from tightship.hlo import Module, flattened
from tightship.hlo.alias import TARGETS, Sharing, target_of
from tightship.hlo.assign.allocate import Assignment, allocate, combine
from tightship.hlo.assign.check import check
from tightship.hlo.assign.heap import assembled, best_fit, replay
from tightship.hlo.liveness import live_ranges
from tightship.options import option

__all__ = ["Options", "plan"]

PLANNER = "assign/xla"
"""Its group and its name on the command line."""


@dataclass(frozen=True, slots=True)
class Options:
    target: str = option(
        "auto",
        "machine whose alignment and fusions' in-place rules hold: cpu, gpu, or auto, as the module says",
        choices=("auto", *TARGETS),
    )


def plan(module: Module, options: Options | None = None) -> Assignment:
    """XLA's assignment. Raises ``BadInput`` for a module without a schedule, or with shapes without a size."""
    began = time.perf_counter()
    target = known_target(module, (options or Options()).target)
    live = live_ranges(flattened(module))
    sharing = Sharing(live.points, target)
    assigner = allocate(live, sharing)
    groups = replay(live, assigner.heap, sharing)
    placed = best_fit(groups, TARGETS[target])
    whole = assembled(live, sharing, assigner.allocations, groups, placed, target)
    allocations = tuple(combine(whole.allocations, TARGETS[target]))
    made = replace(whole, allocations=allocations, planner="xla", seconds=time.perf_counter() - began)
    check(made, sharing)
    return made


def known_target(module: Module, target: str) -> str:
    """``target``, or what the module was compiled for."""
    if target == "auto":
        return target_of(module)
    if target not in TARGETS:
        raise BadInput(
            f"unknown target {target!r}: there are auto, {' and '.join(TARGETS)}", place="--target"
        )
    return target
