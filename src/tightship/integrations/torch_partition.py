"""Options of the torch.compile backend; and one graph of a compiled model, planned, as the two functions that
AOTAutograd's wrappers call.

The plan's steps are cut at the boundary op. What is resident there and read later is what autograd saves
between the two passes; it comes back in the backward pass, where each tensor is dropped at its planned free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, Final

import torch

from tightship.errors import BadInput, Unsupported, VerificationFailed
from tightship.execute.allocator import Arena
from tightship.execute.graph_ranks import Turn
from tightship.execute.interpreter import Executor, Part, RunStats, report
from tightship.execute.script import device_of
from tightship.frontends.torch import compat, compat_compile
from tightship.frontends.torch.capture.joint import Joint
from tightship.frontends.torch.program import Program, Ref, Slot, dtype_of, mismatch
from tightship.graph import Graph
from tightship.options import option
from tightship.plan import Plan, Step
from tightship.planners import planner as planner_named
from tightship.planners.default import Options as PlannerOptions
from tightship.planners.default import PlanOptions
from tightship.planners.hints import parse_hints
from tightship.process_local import NotCopied
from tightship.simulate import replay
from tightship.units import Budget, format_bytes, parse_budget

__all__ = [
    "NOT_HELD",
    "RETAINED",
    "BackendOptions",
    "CompileOptions",
    "Cut",
    "FrameArena",
    "PlannedGraph",
    "check_again",
    "cut",
    "read_options",
]


# --- options ---


_PLACE = "torch.compile(options=…)"


@dataclass(frozen=True)
class CompileOptions:
    """Options of the torch.compile backend, beside those of the default planner."""

    budget: Budget | None = option(  # noqa: RUF009
        None,
        "bytes for all graphs of the model together (6GiB, an int), or a percentage of the first training step's "
        "unplanned peak (60%, static+60%), resolved to bytes once; none: keep everything, in the better order",
    )
    mode: str = option(
        "exact",
        "exact: op by op on ATen, bit-identical to eager; compiled: what PyTorch Inductor makes of the graphs, with "
        "Inductor's numbers",
    )
    arena: bool = option(True, "serve requests from an arena at planned offsets")
    strict: bool = option(False, "raise when a step did not go as planned")
    eager_fallback: bool = option(
        True,
        "run in eager, with a warning, what cannot be planned and what Dynamo leaves out of its graphs, instead of "
        "raising; by default unless strict",
    )
    on_plan: Callable[[Any], object] | None = option(  # noqa: RUF009
        None, "function that is told of every planned graph, again when its plan is made anew"
    )
    optimizer: Any = option(  # noqa: RUF009
        None,
        "the optimizer that steps the model's parameters, or a list of those that do: the budget is then of the "
        "whole step, and counts its state, what its step makes, and all gradients",
    )
    accumulate: bool = option(
        False, "with optimizer, gradients stay from one backward pass to the next: all are counted in each"
    )
    calls: int = option(
        1,
        "how often a graph's code runs before the first backward pass; layers compiled one by one are counted "
        "without it",
    )
    cache: Any = option("default", "folder in which measurements are kept, None for none")  # noqa: RUF009
    seconds_per_op: float = option(0.01, "seconds for which one op is repeated to measure its time")
    planner: PlannerOptions = field(default_factory=lambda: PlannerOptions(redraw=False))


_DEFAULTS: Final = {f.name: f.default for cls in (CompileOptions, PlannerOptions) for f in fields(cls)}
_OWN: Final = {f.name for f in fields(CompileOptions)}
_KNOWN: Final = _DEFAULTS.keys() - {"planner", "hand_out", "place"}
"""Without two of the planner's: results always leave the arena, and ``arena`` says whether there is one."""


class BackendOptions(PlanOptions, total=False):
    """The fields of `CompileOptions` as keywords: all but ``hand_out`` and ``place`` of the planner's."""

    mode: str
    arena: bool
    strict: bool
    eager_fallback: bool
    on_plan: Callable[[Any], object] | None
    cache: Any
    seconds_per_op: float
    optimizer: Any
    accumulate: bool
    calls: int


def read_options(given: Mapping[str, Any]) -> CompileOptions:
    """Raises ``BadInput`` for unknown options, with the list of them, and for values of the wrong kind."""
    for name, value in given.items():
        if name not in _KNOWN:
            known = ", ".join(sorted(_KNOWN))
            raise BadInput(f"unknown option {name!r}: an option is one of {known}", place=_PLACE)
        if name not in ("budget", "on_plan", "cache", "optimizer"):
            _check_kind(name, value)
    budget = None if given.get("budget") is None else parse_budget(given["budget"], _PLACE)
    if given.get("on_plan") is not None and not callable(given["on_plan"]):
        raise BadInput("on_plan must be a function of one argument", given["on_plan"], _PLACE)
    _check_recompute_only(given)
    if given.get("mode", "exact") not in ("exact", "compiled"):
        raise BadInput("mode must be 'exact' or 'compiled'", given["mode"], _PLACE)
    for folder in ("order", "evict"):
        if given.get(folder, "given") != "given":
            planner_named(given[folder], folder)
    own: dict[str, Any] = {"eager_fallback": not given.get("strict", False)}
    own |= {name: value for name, value in given.items() if name in _OWN} | {"budget": budget}
    planner = {name: value for name, value in given.items() if name not in _OWN}
    return CompileOptions(**own, planner=PlannerOptions(**{"redraw": False, **planner}))


def _check_recompute_only(chosen: Mapping[str, Any]) -> None:
    """Between forward and backward it is autograd that holds what is saved, and only as the tensors it knows."""
    ways = {way.strip() for way in chosen.get("allow", "").split(",")} - {""}
    ways |= {way for _, way in parse_hints(chosen.get("hints", ""))} - {"keep"}
    other = next((name for name in ("lossy", "redraw") if chosen.get(name)), None)
    if other or ways - {"recompute"}:
        means = other or sorted(ways - {"recompute"})[0]
        rule = f"{means!r} is not possible here: this backend recomputes; tightship.fit can do the rest, too"
        raise BadInput(rule, place=_PLACE)


def _check_kind(name: str, value: Any) -> None:
    """A plain option is of its default's type."""
    default = _DEFAULTS[name]
    kind = type(default)
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool) or (kind in (int, float) and value < 0):
        rule = "True or False" if kind is bool else f"a {kind.__name__} such as {default!r}"
        raise BadInput(f"{name} must be {rule}", value, _PLACE)


# --- a graph ---


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


RETAINED: Final = "retain_graph: what was saved stays in memory, which is not planned"
NOT_HELD: Final = (
    "before any backward pass, a percentage of a training step's peak is unknown: "
    "this graph is not held to it"
)


def check_again(name: str, budget: int | None, peak: int) -> None:
    """Raise ``Unsupported``, before anything is computed, for a backward pass of graph ``name`` that is to be
    differentiated, and for one that keeps what was saved where the budget has no room for that beside what the pass
    needs: ``peak`` bytes with it."""
    if compat_compile.graph_is_built():
        raise Unsupported(
            f"create_graph=True in graph {name}", "a compiled backward pass cannot be differentiated again",
            "train with tightship.fit, which plans double backward, or leave this part out of the compiled model",
        )  # fmt: skip
    if budget is not None and peak > budget:
        raise Unsupported(
            f"retain_graph=True in graph {name} within a budget of {format_bytes(budget)}",
            f"what the first backward pass keeps was to be freed, and may take up to {format_bytes(peak)} with what "
            "the pass makes",
            "add the losses up and call backward() once, or give a larger budget",
        )  # fmt: skip


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


class GraphRuns(NotCopied):
    """What is known of a planned graph's runs: ``last``, what the last step used, measured against the plan (None
    before the first step and where nothing can be measured); ``notes``, what a user should know; ``unplaced`` counts
    forward passes that ran outside the arena because an earlier one's tensors lay there."""

    def __init__(self, name: str, device: str, *, strict: bool) -> None:
        self.name, self.strict = name, strict
        self.notes: list[str] = []
        self.last: RunStats | None = None
        self.unplaced = 0
        self.turn: Turn | None = None  # of several ranks
        self.sends: list[str] | None = None  # what it sends to them, in order, if that is known
        self._device = device
        self._complained = False
        self._outputs: dict[int, Any] = {}

    def handed_out(self, storage: int) -> bool:
        """Whether the storage of that identity is a result of the last forward pass, and still there: it counts as
        what that graph keeps, not as an input of a later one."""
        reference = self._outputs.get(storage)
        return reference is not None and not reference.expired()

    def _hands_out(self, results: Sequence[Any]) -> None:
        tensors = [t for t in results if isinstance(t, torch.Tensor)]
        self._outputs = {compat.storage_key(t): compat.storage_reference(t) for t in tensors}

    def running(self, *, backward: bool = False) -> AbstractContextManager[None]:
        """Around each pass."""
        return nullcontext() if self.turn is None else self.turn.running(backward=backward)

    @property
    def device(self) -> str:
        """Where its memory is."""
        return self._device

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _outside(self) -> None:
        """A forward pass is not placed."""
        self.unplaced += 1
        self._note("a forward pass ran outside the arena: tensors of an earlier one lay there")

    def _report(self, static: int, *passes: RunStats | None) -> None:
        stats = [s for s in passes if s is not None]
        if not stats:
            return
        self.last = RunStats.of_passes(stats, static)
        if self.strict or not self._complained:
            self._complained = not self.last.as_planned
            report(self.last, self.strict, self.name)


class PlannedGraph(GraphRuns):
    """A planned graph. ``name`` is Dynamo's (frame/compilation), ``kind`` training or inference; ``plan`` and
    ``graph`` are what was decided."""

    def __init__(
        self, joint: Joint, program: Program, plan: Plan, where: Cut, *, name: str, frame_arena: FrameArena,
        strict: bool, arena: bool, saved: Sequence[int],
    ) -> None:  # fmt: skip
        super().__init__(name, device_of(program.graph) or "cpu", strict=strict)
        self.kind = "inference" if joint.boundary is None else "training"
        self._joint, self._frame_arena, self._arena = joint, frame_arena, arena
        self._first: RunStats | None = None
        self.program, self.plan = program, plan
        self.replace(plan, where, saved)

    def replace(self, plan: Plan, where: Cut, saved: Sequence[int]) -> None:
        """Runs as ``plan`` says from now on, which is cut at ``where`` and saves these values; no call may be between
        its passes."""
        program = self.program
        others = [n for n in self.notes if n not in self.plan.notes]
        self.plan, self.saved = plan, tuple(saved)
        self._build(where)
        requests = self.forward_pass.requests
        passes = [] if requests else self.forward_pass.notes
        self.notes[:] = dict.fromkeys([*program.notes, *plan.notes, *passes, *others])
        self._placed = self._arena and requests is not None and requests.placed
        self._extent = requests.extent if requests is not None and self._placed else 0
        self._heap = None if requests is None else Arena(0, self._device)
        kept = {program.graph.values[v].storage for v in program.results}
        self._tracked = [
            k for k, v in enumerate(self.saved)
            if v in set(where.made) and program.graph.values[v].storage not in kept
        ]  # fmt: skip
        self._made = [k for k, v in enumerate(self.saved) if v in set(where.made)]

    def cut(self, plan: Plan) -> Cut:
        """``plan`` between the two passes."""
        return cut(self._joint, self.program, plan)

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
        self._alone = _alone(program.graph, self._forward_values, self.saved)

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

    # --- running ---

    def made(self, results: Sequence[Any], *, saved: bool) -> list[Any]:
        """References to what a forward pass made that a backward pass follows, which are ``expired()`` when it is
        freed: what is ``saved``, if it is kept, or what is handed out."""
        if self.backward_pass is None:
            return []
        first = len(results) - len(self.saved)
        kept = [results[first + k] for k in self._made] if saved else []
        handed = [x for x in results[:first] if isinstance(x, torch.Tensor)]
        return [compat.storage_reference(t) for t in kept or handed]

    def mark(self, saved: Sequence[Any]) -> int:
        """The identity of something that a forward pass made and ``saved``, 0 where it made nothing of that."""
        return compat.storage_key(saved[self._made[0]]) if self._made else 0

    def forward(self, args: list[Any]) -> list[Any]:
        """The graph's outputs, then what is saved. Empties ``args``."""
        tensors = [args[k] for k in self._positions] + self._constants
        args.clear()
        placed = self._placed and self._frame_arena.idle()
        if self._placed and not placed:
            self._outside()
        arena = self._frame_arena.fit(self._extent, self._device) if placed else self._heap
        results = self.forward_pass.execute(tensors, arena, placed=placed, consume=True)
        for k, others in self._alone.items():
            _not_a_view(results, k, others)
        count = len(self._forward_values)
        saved = results[count:]
        if placed and self._tracked:
            self._frame_arena.hold(self, [saved[k] for k in self._tracked])
        self._first = self.forward_pass.last
        self._hands_out(results[:count])
        if self.backward_pass is None:
            self._report(self.program.graph.static_bytes, self._first)
        return _fill(self._joint.forward, results[:count]) + saved

    def backward(self, args: list[Any]) -> list[Any]:
        """The gradients, from what was saved and the tangents. Empties ``args``."""
        assert self.backward_pass is not None
        again = compat_compile.graph_is_kept()
        if again:
            check_again(self.name, self.plan.budget, self._peak_kept)
        count = len(self.saved)
        given = [x for x in args[count:] if isinstance(x, torch.Tensor)]  # not None, nor a DTensor's mesh
        tangents = [_as_traced(self.program, v, t) for v, t in zip(self._joint.tangents, given, strict=True)]
        tensors = args[:count] + tangents + self._constants
        placed = self._placed and not again and self._returned(args)
        args.clear()
        del tangents, given
        arena = self._frame_arena.fit(self._extent, self._device) if placed else self._heap
        results = self.backward_pass.execute(tensors, arena, placed=placed, consume=True)
        if again:
            self._note(RETAINED)
        else:
            self._report(self.program.graph.static_bytes, self._first, self.backward_pass.last)
        return _fill(self._joint.backward, results)

    def _returned(self, args: Sequence[Any]) -> bool:
        """Whether the arena is free but for what this call's forward pass left there."""
        if not self._tracked:
            return self._frame_arena.idle()
        return self._frame_arena.holds(self, [args[k] for k in self._tracked[:1]])


def _alone(graph: Graph, handed: Sequence[int], saved: Sequence[int]) -> dict[int, list[int]]:
    """Of results that the graph makes and hands out without another one over the same memory: by their number in a
    forward pass's results, those of what is saved there."""
    storages = [graph.values[v].storage for v in (*handed, *saved)]
    shared = Counter(storages[: len(handed)])
    return {
        k: [n for n in range(len(handed), len(storages)) if storages[n] == s]
        for k, s in enumerate(storages[: len(handed)])
        if shared[s] == 1 and s not in graph.static
    }


def _not_a_view(results: list[Any], k: int, others: Sequence[int]) -> None:
    """Result ``k`` may have been derived from another tensor of its storage (``aten._unsafe_view``). To AOTAutograd
    and to eager it is no view: the caller may write to it, and PyTorch refuses that of views that are made in a
    function of one's own. What is saved of the same memory, ``others``, then sees that it was written to."""
    t = results[k]
    if isinstance(t, torch.Tensor) and t._is_view():
        results[k] = own = torch.ops.aten._unsafe_view(t, t.shape)
        for n in others:
            saved = results[n]
            if (saved.dtype, saved.is_conj(), saved.is_neg()) != (own.dtype, own.is_conj(), own.is_neg()):
                continue
            results[n] = own.as_strided(saved.shape, saved.stride(), saved.storage_offset())


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
