"""Piece: one graph of a compiled model, planned, and the functions that AOTAutograd's wrappers call."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from tightship.errors import Unsupported, VerificationFailed
from tightship.execute.allocator import Arena
from tightship.execute.interpreter import PeakMismatch, RunStats, mismatch
from tightship.execute.script import device_of
from tightship.frontends.torch import compat, compat_compile
from tightship.frontends.torch.capture.joint import Joint
from tightship.frontends.torch.program import Program, Ref, Slot
from tightship.graph import Graph
from tightship.integrations.torch_executor import Cut, Half, HalfStats, fitted, placed_orders
from tightship.plan import Plan
from tightship.process_local import NotCopied
from tightship.units import format_bytes

__all__ = ["Lane", "Piece"]


class Lane(NotCopied):
    """The arena of one Python frame's graphs, and whose saved tensors lie in it.

    While a forward pass's saved tensors are alive, no other forward pass is placed there.
    """

    def __init__(self) -> None:
        self.arena: Arena | None = None
        self._holder: Any = None
        self._address = 0
        self._references: list[Any] = []

    def idle(self) -> bool:
        while self._references and self._references[-1].expired():
            self._references.pop()
        return not self._references

    def fit(self, extent: int, device: str) -> Arena:
        """The arena, of at least ``extent`` bytes on ``device``; a larger one replaces it."""
        if self.arena is None or self.arena.size < extent or self.arena.device != device:
            self.arena = None  # given back before the larger one is taken
            self.arena = Arena(extent, device)
        return self.arena

    def hold(self, holder: Any, tensors: Sequence[Any]) -> None:
        self._holder = holder
        self._address = tensors[0].data_ptr() if tensors else 0
        self._references = [compat.storage_reference(t) for t in tensors]

    def holds(self, holder: Any, tensors: Sequence[Any]) -> bool:
        """Whether ``tensors`` are those of the last `hold`."""
        return self._holder is holder and bool(tensors) and tensors[0].data_ptr() == self._address


class Piece(NotCopied):
    """A planned graph. ``name`` is Dynamo's (frame/compilation), ``kind`` training or inference.

    ``plan`` and ``graph`` are what was decided; ``last`` is what the last step used, measured against the
    plan (None before the first step and where nothing can be measured), ``notes`` what a user should know.
    ``unplaced`` counts forward passes that ran outside the arena because an earlier one's tensors lay there.
    """

    def __init__(
        self, joint: Joint, program: Program, plan: Plan, where: Cut, *, name: str, lane: Lane, strict: bool,
        arena: bool, saved: Sequence[int],
    ) -> None:  # fmt: skip
        self.name, self.kind = name, "inference" if joint.boundary is None else "training"
        self.program, self.plan, self.strict = program, plan, strict
        self.notes = [*program.notes, *plan.notes]
        self.last: RunStats | None = None
        self.unplaced = 0
        self.saved = tuple(saved)
        self._joint, self._lane = joint, lane
        found, note = placed_orders(program, plan, joint.boundary)
        self.notes += [note] if note else []
        self._placed = arena and found is not None and found.placed
        self._extent = found.extent if found is not None and self._placed else 0
        self._device = device_of(program.graph) or "cpu"
        self._heap = None if found is None else Arena(0, self._device)
        kept = {program.graph.values[v].storage for v in program.results}
        self._tracked = [
            k for k, v in enumerate(self.saved)
            if v in set(where.made) and program.graph.values[v].storage not in kept
        ]  # fmt: skip
        self._build(where, found)
        self._first: HalfStats | None = None
        self._outputs: dict[int, Any] = {}
        self._complained = False

    @property
    def graph(self) -> Graph:
        return self.program.graph

    def __str__(self) -> str:
        from tightship.report.text import describe

        return describe(self.plan, self.graph)

    def _build(self, where: Cut, found: Any) -> None:
        program, plan, joint = self.program, self.plan, self._joint
        constants = [s for s in program.slots if s.role == "constant"]
        primals = [s for s in program.slots if s.role != "constant"]
        self._constants = [program.constants[s.key] for s in constants]
        self._positions = [s.key for s in primals]
        self._forward_values = [r.value for r in joint.forward if isinstance(r, Ref)]
        self.forward_half = Half(
            program, plan, range(where.at), [*primals, *constants], [*self._forward_values, *self.saved],
            found=found, begins=program.graph.static_bytes, peak=where.peaks[0],
        )  # fmt: skip
        self.backward_half: Half | None = None
        self._peak_kept = where.peaks[1] + where.resident - program.graph.static_bytes
        if joint.boundary is not None:
            brought = [Slot(v, "input", k) for k, v in enumerate((*self.saved, *joint.tangents))]
            results = [r.value for r in joint.backward if isinstance(r, Ref)]
            self.backward_half = Half(
                program, plan, range(where.at + 1, len(plan.steps)), [*brought, *constants], results,
                found=found, begins=where.resumed, peak=where.peaks[1],
            )  # fmt: skip

    def handed_out(self, storage: int) -> bool:
        """Whether the storage of that identity is a result of the last forward pass, and still there."""
        found = self._outputs.get(storage)
        return found is not None and not found.expired()

    # --- running ---

    def forward(self, args: list[Any]) -> list[Any]:
        """The graph's outputs, then what is saved. Empties ``args``."""
        tensors = [args[k] for k in self._positions] + self._constants
        args.clear()
        placed = self._placed and self._lane.idle()
        if self._placed and not placed:
            self.unplaced += 1
            self._note("a forward pass ran outside the arena: tensors of an earlier one lay there")
        arena = self._lane.fit(self._extent, self._device) if placed else self._heap
        found, stats = self.forward_half.run(tensors, arena, placed=placed)
        count = len(self._forward_values)
        saved = found[count:]
        if placed and self._tracked:
            self._lane.hold(self, [saved[k] for k in self._tracked])
        self._first = stats
        self._outputs = {compat.storage_key(t): compat.storage_reference(t) for t in found[:count]}
        if self.backward_half is None:
            self._report(stats, None)
        return _filled(self._joint.forward, found[:count]) + saved

    def backward(self, args: list[Any]) -> list[Any]:
        """The gradients, from what was saved and the tangents. Empties ``args``."""
        assert self.backward_half is not None
        again = compat_compile.graph_is_kept()
        if again:
            self._check_again()
        count = len(self.saved)
        brought = [x for x in args[count:] if x is not None]
        tangents = [fitted(self.program, v, t) for v, t in zip(self._joint.tangents, brought, strict=True)]
        tensors = args[:count] + tangents + self._constants
        placed = self._placed and not again and self._returned(args)
        args.clear()
        del tangents, brought
        arena = self._lane.fit(self._extent, self._device) if placed else self._heap
        found, stats = self.backward_half.run(tensors, arena, placed=placed)
        if again:
            self._note("retain_graph: what was saved stays in memory, which is not planned")
        else:
            self._report(self._first, stats)
        return _filled(self._joint.backward, found)

    def _check_again(self) -> None:
        """Raise ``Unsupported``, before anything is computed, for a backward pass that is to be differentiated, and
        for one that keeps what was saved where the budget has no room for that beside what the pass needs."""
        if compat_compile.graph_is_built():
            raise Unsupported(
                f"create_graph=True in graph {self.name}", "a compiled backward pass cannot be differentiated again",
                "train with tightship.fit, which plans double backward, or leave this part out of the compiled model",
            )  # fmt: skip
        budget = self.plan.budget
        if budget is not None and self._peak_kept > budget:
            raise Unsupported(
                f"retain_graph=True in graph {self.name} within a budget of {format_bytes(budget)}",
                f"what the first backward pass keeps was to be freed, and may take up to "
                f"{format_bytes(self._peak_kept)} with what the pass makes",
                "add the losses up and call backward() once, or give a larger budget",
            )  # fmt: skip

    def _returned(self, args: Sequence[Any]) -> bool:
        """Whether the arena is free but for what this call's forward pass left there."""
        if not self._tracked:
            return self._lane.idle()
        return self._lane.holds(self, [args[k] for k in self._tracked[:1]])

    # --- afterwards ---

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _report(self, first: HalfStats | None, second: HalfStats | None) -> None:
        halves = [h for h in (first, second) if h is not None]
        if not halves:
            return
        self.last = RunStats(
            planned_peak=max(h.planned_peak for h in halves),
            measured_peak=max(h.measured_peak for h in halves),
            process_peak=max(h.process_peak for h in halves),
            static=self.program.graph.static_bytes,
            arena=max(h.high_water for h in halves),
            requests=sum(h.requests for h in halves),
            misses=sum(h.misses for h in halves),
            short=sum(h.short for h in halves),
            exact=True,
            first_misses=tuple(m for h in halves for m in h.first_misses)[:8],
        )
        if self.last.as_planned:
            return
        text = mismatch(self.last)
        if self.strict:
            raise VerificationFailed(text, f"running graph {self.name}")
        if not self._complained:
            self._complained = True
            warnings.warn(f"graph {self.name}: " + "; ".join(text), PeakMismatch, stacklevel=2)


def _filled(spec: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    given = iter(tensors)
    return [next(given) if isinstance(x, Ref) else x for x in spec]
