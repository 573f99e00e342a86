"""A plan over forward and backward pass, run as the two functions that autograd calls.

The plan's steps are cut at the boundary op. What is resident there and read later is what autograd saves
between the two passes; it comes back in the backward pass, where each tensor is dropped at its planned free.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tightship.errors import BudgetExceeded, Unsupported, VerificationFailed
from tightship.execute import allocator
from tightship.execute.compile import Instruction, compile_plan
from tightship.execute.failing import freed
from tightship.execute.meter import Meter
from tightship.execute.script import HEAP, Orders, device_of, orders
from tightship.execute.views import dtype_of, mismatched
from tightship.frontends.torch import compat
from tightship.frontends.torch.capture.joint import Joint
from tightship.frontends.torch.program import Program, Ref, Slot
from tightship.plan import Plan, Step
from tightship.process_local import NotCopied, check_process
from tightship.simulate import replay

__all__ = ["Cut", "Half", "HalfStats", "cut", "fitted", "placed_orders"]


@dataclass(frozen=True)
class Cut:
    """Where a plan's steps are cut: ``at`` is the boundary's step (the number of steps, if there is none).

    ``saved`` are the values that cross it: first those of the caller's storages, then the bases of storages
    that the forward pass made. ``resident`` bytes (static set included) are in memory just before the
    boundary, ``resumed`` just after it; ``peaks`` are the most bytes in use in the forward and in the
    backward pass.
    """

    at: int
    saved: tuple[int, ...]
    made: tuple[int, ...]
    resident: int
    resumed: int
    peaks: tuple[int, int]


def cut(joint: Joint, program: Program, plan: Plan) -> Cut:
    """Cuts ``plan`` (of ``program``, which is ``joint``'s, measured) at the boundary.

    Raises ``VerificationFailed`` if an op that draws random numbers would draw twice: wrong gradients, no
    error.
    """
    graph, steps = program.graph, plan.steps
    drawn = Counter(s.op for s in steps if s.kind in ("compute", "recompute") and graph.ops[s.op].random)
    twice = [f"{graph.ops[k].name} draws {n} times" for k, n in drawn.items() if n > 1]
    if twice:
        raise VerificationFailed(twice, "torch.compile")
    line = replay(graph, steps)
    static = graph.static_bytes
    if joint.boundary is None:
        return Cut(len(steps), (), (), line.resident[-1] if steps else static, 0, (line.peak, 0))
    at = next(i for i, s in enumerate(steps) if s.kind == "compute" and s.op == joint.boundary)
    needed = _needed(program, joint, steps[at + 1 :])
    saved = tuple(
        s.value for s in program.slots if s.role != "constant" and graph.values[s.value].storage in needed
    )
    owned = {graph.values[s.value].storage for s in program.slots}
    made = tuple(program.bases[s] for s in sorted(needed - owned))
    before = line.resident[at - 1] if at else static
    peaks = (max(line.during[:at], default=static), max(line.during[at:]))
    return Cut(at, saved, made, before, line.resident[at], (max(peaks[0], static), peaks[1]))


def _needed(program: Program, joint: Joint, steps: Sequence[Step]) -> set[int]:
    """Storages that the steps read before they make them themselves, tangents excluded."""
    graph, uses = program.graph, program.graph.uses
    brought = {graph.values[v].storage for v in joint.tangents}
    needed: set[int] = set()
    there = set(brought)
    for step in steps:
        if step.kind in ("compute", "recompute"):
            skip = graph.ops[step.op].updates if step.kind == "recompute" else ()
            needed.update(s for s in uses.reads[step.op] if s not in there and s not in skip)
            there.update(uses.defines[step.op] if step.kind == "compute" else step.storages)
    ends = {graph.values[r.value].storage for r in joint.backward if isinstance(r, Ref)}
    return needed | (ends - there)


@dataclass(frozen=True, slots=True)
class HalfStats:
    """What one pass used: bytes as its plan counts them (static set and what was resident before
    included)."""

    planned_peak: int
    measured_peak: int
    process_peak: int
    high_water: int
    requests: int
    misses: int
    short: int
    first_misses: tuple[str, ...]


class Half(NotCopied):
    """The steps ``[first, last)`` of a plan as a function of the tensors of ``slots``.

    ``begins`` bytes are in use when it starts and ``peak`` at most, by the plan.
    """

    def __init__(
        self, program: Program, plan: Plan, which: range, slots: Sequence[Slot], results: Sequence[int],
        *, found: Orders | None, begins: int, peak: int,
    ) -> None:  # fmt: skip
        self.program, self.plan, self.first = program, plan, which.start
        self._process = os.getpid()
        self.begins, self.peak = begins, peak
        steps = plan.steps[which.start : which.stop]
        part = replace(program, slots=tuple(slots), results=tuple(results))
        self._code = compile_plan(part, replace(plan, steps=steps))
        self._slots = tuple(slots)
        self._orders = None if found is None else _sliced(found, which)
        self._scripts: dict[bool, tuple[int, allocator.Script]] = {}
        self._verified = False

    def run(self, tensors: list[Any], arena: Any, *, placed: bool) -> tuple[list[Any], HalfStats | None]:
        """Runs on ``tensors`` (one per slot) and empties the list, so that each is dropped at its planned
        free.

        ``placed``: requests go where planned in ``arena``, else to the heap.
        """
        check_process(self._process, self)
        env = self._code.initial.copy()
        for place, tensor in zip(self._code.inputs, tensors, strict=True):
            env[place] = tensor
            del tensor
        tensors.clear()
        instructions = self._code.instructions
        if not self._verified:
            self._check_inputs(env)
            instructions = [self._checked(i) for i in instructions]
        stats = None
        with freed(env, self._exceeded), compat.plain_execution():
            if self._orders is None:
                for i in instructions:
                    i.run(env)
            else:
                stats = self._replayed(instructions, env, arena, placed)
            results = [env[place] for place in self._code.results]
        env.clear()
        self._verified = True
        return results, stats

    def _replayed(
        self, instructions: Sequence[Instruction], env: list[Any], arena: Any, placed: bool
    ) -> HalfStats:
        script = self._script(arena.live, placed, arena.kind)
        meter = Meter(arena.kind)
        with allocator.replay(arena, script) as session, meter:
            seek = session.seek
            for i in instructions:
                if i.op >= 0:
                    seek(i.step)
                i.run(env)
        s = session.stats
        misses = tuple(self._miss(m) for m in s.first_misses)
        measured = s.peak - s.start + self.begins
        return HalfStats(
            self.peak, measured, meter.peak + self.begins, s.high_water, s.requests, s.misses, s.short, misses
        )

    def _script(self, live: int, placed: bool, kind: str) -> allocator.Script:
        """``live`` bytes are there already: of them the plan knows those it begins with."""
        limit = None
        if self.plan.budget is not None:
            limit = max(self.plan.budget - self.begins, 0) + live
        known = self._scripts.get(placed)
        if known is None or known[0] != live:
            o: Any = self._orders
            offsets = o.offsets if placed else np.full_like(o.offsets, HEAP)
            known = live, allocator.Script(o.sizes, offsets, o.starts, limit, kind, o.over)
            self._scripts[placed] = known
        return known[1]

    # --- messages and checks ---

    def _where(self, step: int) -> str:
        op = self.plan.steps[self.first + step].op if step >= 0 else -1
        return f"{self.program.graph.ops[op].name} at {self.program.graph.place(op)}" if op >= 0 else "a view"

    def _miss(self, miss: allocator.Miss) -> str:
        return f"{self._where(miss.step)}: {miss.kind}, asked for {miss.asked} bytes, planned {miss.planned}"

    def _exceeded(self, at: int, nbytes: int) -> BudgetExceeded:
        op, graph = self.plan.steps[self.first + at].op, self.program.graph
        return BudgetExceeded(graph.ops[op].name, nbytes, self.plan.budget or 0, graph.place(op))

    def _checked(self, i: Instruction) -> Instruction:
        def run(env: list[Any]) -> None:
            i.run(env)
            for v in i.made:
                wrong = mismatched(self.program, v, env[v])
                if wrong:
                    op = self.program.graph.ops[i.op]
                    raise Unsupported(
                        f"{op.target} at {self.program.graph.place(i.op)}",
                        f"its result has {wrong}, which shape inference did not say",
                        "leave this op out of the compiled region, or report it",
                    )

        return Instruction(i.step, i.op, run, i.made) if i.made else i

    def _check_inputs(self, env: list[Any]) -> None:
        for slot in self._slots:
            wrong = mismatched(self.program, slot.value, env[slot.value], storage=False)
            if wrong:
                name = self.program.graph.values[slot.value].name
                raise Unsupported(
                    f"the input {name}", f"it has {wrong}, against what was traced", "report this"
                )


def _sliced(o: Orders, which: range) -> Orders:
    a, b = int(o.starts[which.start]), int(o.starts[which.stop])
    starts = o.starts[which.start : which.stop + 1] - a
    return Orders(o.sizes[a:b], o.offsets[a:b], starts, o.extent, o.placed, o.over[a:b])


def placed_orders(program: Program, plan: Plan, boundary: int | None) -> tuple[Orders | None, str]:
    """The plan's orders, or None and why the plan runs on the heap unmeasured."""
    graph = program.graph
    for k, op in enumerate(graph.ops):
        made = any(graph.storages[s].size for s in graph.uses.defines[k])
        if k != boundary and (op.workspace or made) and not op.requests:
            return None, "requests were not measured: the plan runs on the ordinary heap, without an arena"
    device = device_of(graph)
    why = "ops on several devices" if device is None else allocator.why_not(allocator.kind_of(device))
    if why is not None:
        return None, f"{why}: the plan runs on the ordinary heap and its peak is not measured"
    return orders(program, plan), ""


def fitted(program: Program, value: int, tensor: Any) -> Any:
    """A tangent as it was traced: autograd may hand over a part of a larger tensor."""
    if mismatched(program, value, tensor, storage=False) is None and tensor.storage_offset() == 0:
        return tensor
    info = program.graph.values[value]
    new = torch.empty_strided(info.shape, info.stride, dtype=dtype_of(info.dtype), device=tensor.device)
    return new.copy_(tensor)
