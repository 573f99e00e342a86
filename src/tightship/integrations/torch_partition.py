"""One graph of a compiled model, planned, as the two functions that AOTAutograd's wrappers call.

The plan's steps are cut at the boundary op. What is resident there and read later is what autograd saves
between the two passes; it comes back in the backward pass, where each tensor is dropped at its planned free.

All the graphs that a compiled model falls into share one budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tightship.errors import Infeasible, Unsupported, VerificationFailed
from tightship.execute.allocator import Arena
from tightship.execute.interpreter import Executor, Part, RunStats, report
from tightship.execute.script import device_of
from tightship.frontends.torch import compat, compat_compile
from tightship.frontends.torch.capture.joint import Joint
from tightship.frontends.torch.program import Program, Ref, Slot, dtype_of, mismatch
from tightship.graph import Graph
from tightship.plan import Plan, Step
from tightship.process_local import NotCopied
from tightship.simulate import replay
from tightship.units import Budget, format_bytes

__all__ = [
    "Cut",
    "Entry",
    "FrameArena",
    "Ledger",
    "PlannedGraph",
    "cut",
]


@dataclass(frozen=True, slots=True)
class Entry:
    """What one graph takes, in bytes. ``static``: the caller's tensors no earlier graph has counted.
    ``dynamic``: the most it needs beyond its inputs while it runs. ``rest``: what stays between its two
    passes. ``gradients``: what it hands out in the backward pass. ``unplanned_*`` are the same if everything
    was kept."""

    static: int
    dynamic: int
    rest: int
    gradients: int
    unplanned: int
    unplanned_rest: int


@dataclass
class _Share:
    """What a percentage came to, in bytes, once the graphs in ``frames`` were known."""

    limit: int | None = None
    frames: set[int] = field(default_factory=set)


@dataclass
class Ledger:
    """Shares ``budget`` among graphs, by the number of their Python frame, in the order they were first
    compiled.

    While a graph runs, the inputs of all of them and the rests of the earlier ones are in memory; while the
    backward pass of an earlier graph runs, the gradients that the later ones have handed out.

    A percentage is of the peak that the graphs of the first training step have together if they keep everything.
    It grows with each of them, and from the first backward pass on (`settle`) it is a number of bytes for all that
    comes: other sizes, other modes, other frames, evaluation. Graphs without a backward pass that come before any
    with one share a percentage of what they need themselves.
    """

    budget: Budget | None
    entries: dict[int, Entry] = field(default_factory=dict)
    _current: dict[int, Entry] = field(default_factory=dict)  # of the graphs that ran last
    _storages: dict[int, int] = field(default_factory=dict)
    _training: _Share = field(default_factory=_Share)
    _evaluation: _Share = field(default_factory=_Share)
    _settled: bool = False

    def new_static(self, frame: int, storages: Mapping[int, int]) -> int:
        """Bytes of ``storages`` (identity: bytes) that no other frame has counted."""
        for key in storages:
            self._storages.setdefault(key, frame)
        return sum(n for key, n in storages.items() if self._storages[key] == frame)

    def ran(self, frame: int, entry: Entry) -> None:
        """Takes note of which of a frame's graphs ran last."""
        self._current[frame] = entry

    def settle(self) -> None:
        """The first backward pass has begun: all graphs of the first training step are known."""
        self._settled = True

    def binding(self, training: bool) -> bool:
        """Whether the budget in bytes is known to be meant for such a graph: not where a percentage is of a training
        step that nobody has seen yet."""
        known = self.budget is None or self.budget.bytes is not None or self._training.limit is not None
        return training or known

    def resolved_before(self, frame: int, training: bool) -> bool:
        """Whether the budget is a percentage of something that came before this graph."""
        share = self._share(training)
        return self.budget is not None and self.budget.bytes is None and share.limit is not None and (
            self._settled or frame in share.frames or (share is self._training and not training)
        )  # fmt: skip

    def available(
        self, frame: int, static: int, unplanned: int, *, training: bool, current: bool = False
    ) -> int | None:
        """Bytes this graph may use beyond its static set; None without a budget.

        ``static`` is what `new_static` said, ``unplanned`` the most the graph needs beyond its inputs if
        everything is kept. Earlier graphs take the most that any kind of theirs takes or, if ``current``, what those
        take that ran last.
        """
        if self.budget is None:
            return None
        earlier = self._earlier(frame, current)
        shared = static + sum(e.static for e in earlier)
        peak = kept = 0
        for e in earlier:
            peak = max(peak, kept + e.unplanned)
            kept += e.unplanned_rest
        peak = max(peak, kept + unplanned) + shared
        return self._limit(frame, peak, shared, training) - shared - sum(e.rest for e in earlier)

    def enter(self, frame: int, entry: Entry, *, current: bool = False) -> None:
        """Takes note of what a graph takes. Raises ``Infeasible`` if the gradients it hands out leave an
        earlier graph's backward pass too little."""
        before = self.entries.get(frame)
        self.entries[frame] = entry if before is None else _larger(before, entry)
        if self.budget is None or self.budget.bytes is None:
            return
        rows = [*self._earlier(frame, current), entry] if current else list(self.entries.values())
        static = sum(e.static for e in rows)
        for k, e in enumerate(rows):
            need = (
                static + sum(r.rest for r in rows[:k]) + e.dynamic + sum(r.gradients for r in rows[k + 1 :])
            )
            if need > self.budget.bytes:
                raise Infeasible(
                    budget=self.budget.bytes, lower_bound=static, best_peak=need,
                    top=[(f"gradients of graph {n}", r.gradients, "") for n, r in enumerate(rows) if n > k],
                )  # fmt: skip

    def _earlier(self, frame: int, current: bool) -> list[Entry]:
        entries = []
        for f, e in self.entries.items():
            if f == frame:
                break
            entries.append(self._current.get(f, e) if current else e)
        return entries

    def _share(self, training: bool) -> _Share:
        return self._training if training or self._training.limit is not None else self._evaluation

    def _limit(self, frame: int, peak: int, static: int, training: bool) -> int:
        """The budget in bytes: ``peak`` is that of all graphs up to this one if they keep everything."""
        assert self.budget is not None
        if self.budget.bytes is not None:
            return self.budget.bytes
        share = self._share(training)
        if share.limit is None or not self.resolved_before(frame, training):
            share.limit = max(self.budget.resolve(peak, static=static), share.limit or 0)
            share.frames.add(frame)
        return share.limit


def _larger(a: Entry, b: Entry) -> Entry:
    pairs = ((getattr(a, n), getattr(b, n)) for n in Entry.__slots__)
    return Entry(*(max(p) for p in pairs))


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
    needed = _needed(program, joint, steps[at + 1 :]) | _lingering(graph, steps, at)
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


def _lingering(graph: Graph, steps: Sequence[Step], at: int) -> set[int]:
    """Storages that the forward pass made and that the plan frees in the backward pass, whether that reads them or
    not: an op that would have read one may run later, with what is made anew. Until then they are in memory."""
    there: set[int] = set()
    for step in steps[:at]:
        if step.kind in ("compute", "recompute"):
            there.difference_update(a for a, _ in step.reuses)
            there.update(graph.uses.defines[step.op] if step.kind == "compute" else step.storages)
        elif step.kind == "free" and step.form == "full":
            there.difference_update(step.storages)
    made: set[int] = set()
    freed: set[int] = set()
    for step in steps[at:]:
        if step.kind == "free" and step.form == "full":
            freed.update(s for s in step.storages if s not in made)
        elif step.kind in ("compute", "recompute"):
            made.update(graph.uses.defines[step.op] if step.kind == "compute" else step.storages)
    return (there & freed) - graph.kept - graph.static


class FrameArena(NotCopied):
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


class PlannedGraph(NotCopied):
    """A planned graph. ``name`` is Dynamo's (frame/compilation), ``kind`` training or inference.

    ``plan`` and ``graph`` are what was decided; ``last`` is what the last step used, measured against the
    plan (None before the first step and where nothing can be measured), ``notes`` what a user should know.
    ``unplaced`` counts forward passes that ran outside the arena because an earlier one's tensors lay there.
    """

    def __init__(
        self, joint: Joint, program: Program, plan: Plan, where: Cut, *, name: str, frame_arena: FrameArena,
        strict: bool, arena: bool, saved: Sequence[int],
    ) -> None:  # fmt: skip
        self.name, self.kind = name, "inference" if joint.boundary is None else "training"
        self.program, self.plan, self.strict = program, plan, strict
        self.notes = [*program.notes, *plan.notes]
        self.last: RunStats | None = None
        self.unplaced = 0
        self.saved = tuple(saved)
        self._joint, self._frame_arena = joint, frame_arena
        self._build(where)
        requests = self.forward_pass.requests
        self.notes += [] if requests else self.forward_pass.notes
        self._placed = arena and requests is not None and requests.placed
        self._extent = requests.extent if requests is not None and self._placed else 0
        self._device = device_of(program.graph) or "cpu"
        self._heap = None if requests is None else Arena(0, self._device)
        kept = {program.graph.values[v].storage for v in program.results}
        self._tracked = [
            k for k, v in enumerate(self.saved)
            if v in set(where.made) and program.graph.values[v].storage not in kept
        ]  # fmt: skip
        self._first: RunStats | None = None
        self._outputs: dict[int, Any] = {}
        self._complained = False

    @property
    def graph(self) -> Graph:
        return self.program.graph

    def __str__(self) -> str:
        from tightship.report.text import describe

        return describe(self.plan, self.graph)

    def _build(self, where: Cut) -> None:
        program, plan, joint = self.program, self.plan, self._joint
        constants = [s for s in program.slots if s.role == "constant"]
        primals = [s for s in program.slots if s.role != "constant"]
        self._constants = [program.constants[s.key] for s in constants]
        self._positions = [s.key for s in primals]
        self._forward_values = [r.value for r in joint.forward if isinstance(r, Ref)]

        def executor(steps: range, slots: list[Slot], results: list[int], begins: int, peak: int) -> Executor:
            slots = [*slots, *constants]
            part = Part(steps, tuple(slots), tuple(results), begins, peak, joint.boundary)
            return Executor(program, plan, part=part)

        results = [*self._forward_values, *self.saved]
        static = program.graph.static_bytes
        self.forward_pass = executor(range(where.at), primals, results, static, where.peaks[0])
        self.backward_pass: Executor | None = None
        self._peak_kept = where.peaks[1] + where.resident - static
        if joint.boundary is not None:
            given = [Slot(v, "input", k) for k, v in enumerate((*self.saved, *joint.tangents))]
            results = [r.value for r in joint.backward if isinstance(r, Ref)]
            steps = range(where.at + 1, len(plan.steps))
            self.backward_pass = executor(steps, given, results, where.resumed, where.peaks[1])

    def handed_out(self, storage: int) -> bool:
        """Whether the storage of that identity is a result of the last forward pass, and still there."""
        reference = self._outputs.get(storage)
        return reference is not None and not reference.expired()

    # --- running ---

    def forward(self, args: list[Any]) -> list[Any]:
        """The graph's outputs, then what is saved. Empties ``args``."""
        tensors = [args[k] for k in self._positions] + self._constants
        args.clear()
        placed = self._placed and self._frame_arena.idle()
        if self._placed and not placed:
            self.unplaced += 1
            self._note("a forward pass ran outside the arena: tensors of an earlier one lay there")
        arena = self._frame_arena.fit(self._extent, self._device) if placed else self._heap
        results = self.forward_pass.execute(tensors, arena, placed=placed, consume=True)
        count = len(self._forward_values)
        saved = results[count:]
        if placed and self._tracked:
            self._frame_arena.hold(self, [saved[k] for k in self._tracked])
        self._first = self.forward_pass.last
        self._outputs = {compat.storage_key(t): compat.storage_reference(t) for t in results[:count]}
        if self.backward_pass is None:
            self._report(self._first)
        return _fill(self._joint.forward, results[:count]) + saved

    def backward(self, args: list[Any]) -> list[Any]:
        """The gradients, from what was saved and the tangents. Empties ``args``."""
        assert self.backward_pass is not None
        again = compat_compile.graph_is_kept()
        if again:
            self._check_again()
        count = len(self.saved)
        given = [x for x in args[count:] if x is not None]
        tangents = [_as_traced(self.program, v, t) for v, t in zip(self._joint.tangents, given, strict=True)]
        tensors = args[:count] + tangents + self._constants
        placed = self._placed and not again and self._returned(args)
        args.clear()
        del tangents, given
        arena = self._frame_arena.fit(self._extent, self._device) if placed else self._heap
        results = self.backward_pass.execute(tensors, arena, placed=placed, consume=True)
        if again:
            self._note("retain_graph: what was saved stays in memory, which is not planned")
        else:
            self._report(self._first, self.backward_pass.last)
        return _fill(self._joint.backward, results)

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
            return self._frame_arena.idle()
        return self._frame_arena.holds(self, [args[k] for k in self._tracked[:1]])

    # --- afterwards ---

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _report(self, *passes: RunStats | None) -> None:
        stats = [s for s in passes if s is not None]
        if not stats:
            return
        self.last = RunStats(
            planned_peak=max(s.planned_peak for s in stats),
            measured_peak=max(s.measured_peak for s in stats),
            process_peak=max(s.process_peak for s in stats),
            static=self.program.graph.static_bytes,
            arena=max(s.arena for s in stats),
            requests=sum(s.requests for s in stats),
            misses=sum(s.misses for s in stats),
            short=sum(s.short for s in stats),
            exact=True,
            first_misses=tuple(m for s in stats for m in s.first_misses)[:8],
        )
        if self.strict or not self._complained:
            self._complained = not self.last.as_planned
            report(self.last, self.strict, self.name)


def _fill(spec: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    given = iter(tensors)
    return [next(given) if isinstance(x, Ref) else x for x in spec]


def _as_traced(program: Program, value: int, tensor: Any) -> Any:
    """A tangent as it was traced: autograd may hand over a part of a larger tensor."""
    if mismatch(program, value, tensor, storage=False) is None and tensor.storage_offset() == 0:
        return tensor
    info = program.graph.values[value]
    new = torch.empty_strided(info.shape, info.stride, dtype=dtype_of(info.dtype), device=tensor.device)
    return new.copy_(tensor)
