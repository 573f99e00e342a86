"""Compiled mode of the torch.compile backend: what Inductor makes of a graph, within a budget in bytes.

Problem: the partition of a joint graph (what is saved, what the backward pass computes again) whose compiled passes
are the fastest within the budget. Measure: bytes to the byte, by replaying the lines of what Inductor lowers each
candidate to (`execute.compiled`), before any kernel exists; seconds of recomputation, modeled. Candidates: Inductor's
own partition, which wins where it fits; saved sets that our planner chooses on a model of fused code
(``capture.fused``) for an inner target, moved by what the replays say; Inductor's own at several
``activation_memory_budget`` values, and each block of the model computed again; where none of that fits and there
are convolutions, the same of a graph that is written for memory (`compat_inductor.lean_convolutions`). Guarantee:
what runs was replayed and is within the budget, or ``Infeasible`` has the least peak replayed. Known limits: the
model of fused code steers which candidates are looked at, so a faster one may be missed. A budget is shared as in
exact mode (`accounting`): with other graphs, gradients and the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch.fx import GraphModule

from tightship.errors import Infeasible, Unsupported, VerificationFailed
from tightship.execute import allocator
from tightship.execute.aiming import source_of
from tightship.execute.cache import KeptPartitions, Unplanned, folder_of
from tightship.execute.compiled import CompiledPass, LoweredStep, Measured, StepPlan, StepReplay, place
from tightship.execute.kept_code import Choice, KeptCode
from tightship.frontends.torch import (
    compat,
    compat_compile,
    compat_dynamo,
    compat_inductor,
    compat_sending,
)
from tightship.frontends.torch.compat_inductor import Lowered, LowerPair, Outdated, Pair
from tightship.graph import aligned, alignment_of
from tightship.integrations.accounting import Ledger
from tightship.integrations.graph_shares import Shares
from tightship.integrations.torch_inductor_search import Search
from tightship.integrations.torch_partition import (
    NOT_HELD,
    RETAINED,
    CompileOptions,
    FrameArena,
    GraphRuns,
    check_again,
)

__all__ = ["CompiledGraph", "compile_within", "stock_peaks"]

_STOCK: Final = source_of(1.0)
_NUMBERS: Final = (
    "what is computed again is fused, and so rounded, otherwise than in code that torch.compile makes without a "
    "budget; neither is further from exact numbers"
)


class CompiledGraph(GraphRuns):
    """A graph that Inductor compiled as planned, as `compiled_plans` gives it. ``plan``: its bytes."""

    def __init__(
        self, name: str, options: CompileOptions, device: str, arena: FrameArena, shares: Shares
    ) -> None:
        super().__init__(name, device, strict=options.strict)
        self.kind, self.shares = "inference", shares
        self._kept: list[bool] = []
        self.plan = StepPlan(None, 0, 0, 0, ())
        self._options, self._frame_arena = options, arena
        self._passes: dict[str, CompiledPass] = {}
        self._step: _Step | None = None
        self._heaps: dict[int, tuple[Any, allocator.Arena]] = {}

    # --- running ---

    def forward(self, args: list[Any]) -> Any:
        """The forward pass (or the only one)."""
        place = self.shares.begin(args)
        placed = self._options.arena and self._frame_arena.idle()
        if self._options.arena and not placed:
            self._outside()
        heap = None if placed else allocator.Arena(0, self._device)
        results = self._run("forward", args, heap)
        if "backward" in self._passes:
            saved = list(results)[len(results) - len(self._kept) :]
            inside = [t for t, kept in zip(saved, self._kept, strict=True) if kept]
            if heap is None:
                self._frame_arena.hold(self, inside)
            elif inside:
                self._lies_in(heap, inside[0])
            handed = list(results)[: len(results) - len(saved)]
            self._hands_out(handed)
            self.shares.keeps(place, handed, inside)
        if "backward" not in self._passes:
            self._report(self.plan.static, self._passes["forward"].last)
        return results

    def backward(self, args: list[Any]) -> Any:
        """The backward pass, from what was saved and the tangents."""
        assert self._step is not None
        again = compat_compile.graph_is_kept()
        if again:  # nothing is placed over what was saved, and kernels write over copies
            check_again(self.name, self.plan.budget, self.plan.passes[1].peak + self._step.saved)
            for k, kept in enumerate(self._kept):
                args[k] = args[k].clone() if kept else args[k]
        mine = [args[k] for k, kept in enumerate(self._kept) if kept][:1]
        self.shares.ends(mine)
        placed = self._options.arena and (
            self._frame_arena.holds(self, mine) if mine else self._frame_arena.idle()
        )
        placed = placed and not again
        _, heap = self._heaps.pop(mine[0].data_ptr() if mine else 0, (None, None))
        del mine
        shared = {k: compat.storage_reference(args[k]) for k in self._step.shared}
        results = self._run("backward", args, None if placed else heap or allocator.Arena(0, self._device))
        if again:
            self._note(RETAINED)
            return results
        last = self._passes["backward"].last
        dropped = frozenset(k for k, reference in shared.items() if reference.expired())
        if last is not None and dropped:
            last = replace(last, planned_peak=self._step.peak_without(dropped))
        self._report(self.plan.static, self._passes["forward"].last, last)
        return results

    def _lies_in(self, heap: allocator.Arena, saved: Any) -> None:
        """A call's saved tensors lie in ``heap``, which is no other call's: what those free is none of its bytes."""
        self._heaps = {k: row for k, row in self._heaps.items() if not row[0].expired()}
        self._heaps[saved.data_ptr()] = compat.storage_reference(saved), heap

    def _run(self, name: str, args: list[Any], heap: allocator.Arena | None) -> Any:
        """Runs a pass outside of the arena, in ``heap``, or in the arena."""
        arena = self._frame_arena.fit(self.plan.arena, self._device) if heap is None else heap
        return self._passes[name].run(args, arena, placed=heap is None, budget=self.plan.budget)


@dataclass(eq=False)
class _Step:
    """A graph's step, and which saved tensors (by position) are results that the caller was given, too. The plan
    counts these until the backward pass is over; where the caller has let go of them, they end in it."""

    lowered: LoweredStep
    measured: Measured
    align: int
    shared: tuple[int, ...]
    saved: int

    def __post_init__(self) -> None:
        self._peaks: dict[frozenset[int], int] = {}

    def peak_without(self, dropped: frozenset[int]) -> int:
        """The backward pass's peak where the caller has let go of these."""
        if dropped not in self._peaks:
            self._peaks[dropped] = self.lowered.replay(self.measured, self.align, dropped).peaks[1]
        return self._peaks[dropped]


# --- compiling -------------------------------------------------------------------------------------------------


def compile_within(
    gm: GraphModule, inputs: Sequence[Any], options: CompileOptions, arena: FrameArena, shares: Shares
) -> tuple[Callable[..., Any], CompiledGraph]:
    """The compiled function of a Dynamo graph, and its plan. Raises ``Infeasible``, ``Unsupported``."""
    for kept in ("code", "choices", ""):
        compilation = _Compilation(gm, options, arena, shares, kept)
        try:
            call = compat_inductor.compile_graph(
                gm,
                inputs,
                partition=compilation.partition,
                finished=compilation.finished,
                code=compilation.code,
            )
        except Outdated:  # what was kept is of something else by now: everything is made anew
            compilation.forget()
            continue
        return call, compilation.graph
    raise AssertionError


def stock_peaks(gm: GraphModule, inputs: Sequence[Any], shares: Sequence[float]) -> list[int]:
    """The peaks of what Inductor makes of a Dynamo graph at these values of ``activation_memory_budget``, replayed:
    nothing is compiled. Raises ``Unsupported``, for a graph without a backward pass, too."""
    ledger = Shares(Ledger(None), (0, 0), lambda _: {}, lambda _: {}, last=True)
    compilation = _Compilation(gm, CompileOptions(cache=None), FrameArena(), ledger, "")
    found: list[int] = []

    def partition(
        joint: GraphModule, inputs: Any, outputs: int, static: Sequence[int], lower: LowerPair
    ) -> Pair:
        search = Search(compilation, joint, inputs, outputs, static, lower)
        found.extend(search.at_share(share).peak for share in shares)
        raise compat_inductor.Stopped

    with suppress(compat_inductor.Stopped):
        compat_inductor.compile_graph(gm, inputs, partition=partition, finished=lambda _k, _l, call: call)
    if not found:
        raise Unsupported("peaks of a graph without a backward pass", "there is nothing to partition")
    return found


@dataclass(eq=False)
class _Compilation:
    gm: GraphModule
    options: CompileOptions
    arena: FrameArena
    shares: Shares
    kept: str = "code"  # of earlier runs: compiled code, with what was chosen for it; choices alone; nothing

    def __post_init__(self) -> None:
        _, self.name = compat_dynamo.frame()
        self.device = _device(self.gm)
        self.align = alignment_of(self.device)
        self.measured = Measured(allocator.kind_of(self.device))
        folder = folder_of(self.options.cache) if self.kept else None
        o = self.options
        made_from = (o.budget, o.planner, o.arena, self.align, self.static(self.gm), self.shares.describe())
        self.code = (
            None if folder is None else KeptCode(folder, made_from, self.measured, joint=self.kept == "code")
        )
        self.choice: Choice | None = None
        self.from_search = False  # whether what was chosen was replayed here
        self.partitions: KeptPartitions | None = None
        self.lowered: dict[str, Lowered] = {}
        self.calls: dict[str, Callable[[list[Any]], Any]] = {}
        self.graph = CompiledGraph(self.name, self.options, self.device, self.arena, self.shares)

    def static(self, graph: GraphModule) -> int:
        """Bytes of the distinct storages that a graph's inputs lie in."""
        sizes: dict[int, int] = {}
        for n in graph.graph.find_nodes(op="placeholder"):
            t = n.meta.get("example_value", n.meta.get("val"))
            if isinstance(t, torch.Tensor) and not compat_compile.is_tangent(n):
                storage = t.untyped_storage()
                sizes[storage._cdata] = aligned(int(storage.nbytes()), self.align)
        return sum(sizes.values())

    def replay(self, static: int, *lowered: Lowered) -> StepReplay:
        given = dict(row for one in lowered for row in one.constants)
        return StepReplay(
            static + sum(aligned(n, self.align) for n in given.values()), self.measured, self.align
        )

    def step(self, pair: Pair, forward: Lowered, backward: Lowered) -> LoweredStep:
        """The step with ``pair`` lowered so."""
        pair = compat_inductor.without_tokens(pair)
        tangents = [
            aligned(t.untyped_storage().nbytes(), self.align)
            for n in pair.backward.graph.find_nodes(op="placeholder")[len(pair.saved) :]
            if isinstance(t := n.meta.get("val"), torch.Tensor)
        ]
        written = compat_inductor.overwritten_count(pair)
        return LoweredStep(forward, backward, pair.outputs, written, self.static(pair.forward), sum(tangents))

    # --- what Inductor asks and what it has made ---

    def partition(
        self, joint: GraphModule, inputs: Any, outputs: int, static: Sequence[int], lower: LowerPair
    ) -> Pair:
        self.graph.sends = compat_sending.sent_by(joint)
        if self.shares.ledger.budget is None:  # it is taken as it is, and replayed as it is compiled
            pair = compat_inductor.stock_pair(joint, inputs, outputs, static, 1.0)
            chosen = self._chosen(pair, Unplanned(0, (), 0, (), 0), None, source=_STOCK)
        else:
            search = Search(self, joint, inputs, outputs, static, lower)
            best = search.run()
            pair = best.made
            self.from_search = best.replay is not None
            chosen = self._chosen(
                pair, search.unplanned, search.budget, peak=best.peak, recomputed=best.recomputed,
                seconds=best.seconds, source=best.source, lowered=search.count, notes=tuple(search.notes),
            )  # fmt: skip
            self.partitions = search.kept
        self.choice = chosen
        return pair

    def _chosen(
        self, pair: Pair, unplanned: Unplanned, budget: int | None, *, source: str, peak: int = 0,
        recomputed: int = 0, seconds: float = 0.0, lowered: int = 0, notes: tuple[str, ...] = (),
    ) -> Choice:  # fmt: skip
        nothing = Lowered((), (), (), (), ())
        step = self.step(pair, nothing, nothing)
        return Choice(
            self.static(self.gm), step.static, step.tangents, step.outputs, step.written, pair.saved, budget,
            unplanned, peak, recomputed, seconds, source, lowered, notes,
        )  # fmt: skip

    def forget(self) -> None:
        """Nothing that was kept holds."""
        if self.code is not None:
            self.code.forget()
        if self.partitions is not None:
            self.partitions.forget()

    def finished(
        self, kind: str, lowered: Lowered | None, call: Callable[[list[Any]], Any]
    ) -> Callable[[list[Any]], Any]:
        if lowered is None:
            raise Unsupported(f"a pass ({kind}) in compiled mode", "Inductor lowers it to nothing")
        self.lowered[kind] = lowered
        self.calls[kind] = call if compat_inductor.calls_others(lowered) else _unchecked(call)
        if kind == "inference":
            self._ready_inference(lowered)
        if kind == "backward":
            self._ready_training()
        graph, backward = self.graph, kind == "backward"

        def run(args: list[Any]) -> Any:
            with graph.running(backward=backward):
                return graph.backward(args) if backward else graph.forward(args)

        return compat_compile.boxed(run)

    def _ready_inference(self, lowered: Lowered) -> None:
        replay = self.replay(self.static(self.gm), lowered)
        for held in replay.run(lowered, [None] * len(lowered.inputs)):
            replay.hand_out(held)
        need = max(replay.peaks) - replay.static
        budget = self.shares.limit(replay.static, need)
        if budget is None and self.shares.ledger.budget is not None:
            self.graph.notes.append(NOT_HELD)
        plan = StepPlan(budget, replay.static, 0, 0, (), max(replay.peaks), source="Inductor")
        self._ready(replay, replay, plan, ("inference",))

    def _ready_training(self) -> None:
        """Both passes are compiled: what is placed are their own lines, which were replayed before they were."""
        c = self.choice if self.choice is not None else self._kept_choice()
        step = LoweredStep(
            self.lowered["forward"], self.lowered["backward"], c.outputs, c.written, c.static, c.tangents
        )
        replay = step.replay(self.measured, self.align)
        peak = max(replay.peaks)
        if self.shares.ledger.budget is None:
            plan = StepPlan(None, replay.static, 0, 0, (), peak, c.saved, source=c.source)
            unplanned: StepReplay | Unplanned = replay
        else:
            if peak != c.peak and not self.from_search:
                raise Outdated("a kept partition")
            if peak != c.peak:
                text = f"compiled, the passes need {peak} B and not the {c.peak} B that were replayed"
                raise VerificationFailed([text], f"graph {self.name}")
            within = None if c.budget is None else c.budget - self.shares.beyond(replay.rest)
            plan = StepPlan(
                within, replay.static, 0, 0, (), max(c.unplanned.peaks), c.saved, c.recomputed, c.seconds, c.source,
                c.lowered,
            )  # fmt: skip
            unplanned = c.unplanned
            self.graph.notes += [*([_NUMBERS] if c.source != _STOCK else []), *c.notes]
        self.graph.kind = "training"
        self.graph._step = _Step(step, self.measured, self.align, replay.shared(), replay.rest)
        self._ready(replay, unplanned, plan, ("forward", "backward"))
        if self.code is not None and self.choice is not None:
            self.code.keep_choice(c)

    def _kept_choice(self) -> Choice:
        """What was decided when passes that are loaded from caches were made. Raises ``Outdated``."""
        c = None if self.code is None else self.code.choice()
        if c is None or c.given != self.static(self.gm):
            raise Outdated("what was decided for kept code is not known")
        if self.shares.ledger.budget is not None:
            budget, _ = self.shares.training_limit(c.unplanned)
            if budget != c.budget:
                raise Outdated("kept code is within another budget")
        return c

    def _ready(
        self, replay: StepReplay, unplanned: StepReplay | Unplanned, plan: StepPlan, kinds: tuple[str, ...]
    ) -> None:
        passes, arena = place(replay, most=max(replay.peaks) if plan.budget is None else None)
        plan = replace(plan, peak=max(replay.peaks), arena=arena, passes=passes)
        needed = max(plan.peak, plan.static + arena) if self.options.arena else plan.peak
        if plan.budget is not None and needed > plan.budget:
            raise Infeasible(budget=plan.budget, lower_bound=plan.static, best_peak=needed, compiled=True)
        self.shares.enter(replay, unplanned)
        graph = self.graph
        graph.plan, graph._kept = plan, replay.kept()
        for k, kind in enumerate(kinds):
            name = "backward" if kind == "backward" else "forward"
            where = f"the {kind} pass of graph {self.name}"
            graph._passes[name] = CompiledPass(
                self.calls[kind], passes[k], plan.static, self.measured.kind, where
            )
        graph.notes += self.measured.notes()


def _unchecked(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """``call``, whose first run asks for what every other one does."""

    def run(args: list[Any]) -> Any:
        with compat_compile.without_alias_check():
            return call(args)

    return run


def _device(gm: GraphModule) -> str:
    devices = {
        str(t.device) for n in gm.graph.nodes
        if isinstance(t := n.meta.get("example_value", n.meta.get("val")), torch.Tensor)
    } - {"meta"}  # fmt: skip
    if len(devices) > 1 and (on_gpu := [d for d in devices if d != "cpu"]):
        devices = set(on_gpu)
    if len(devices) > 1:
        raise Unsupported(
            f"compiled mode on {', '.join(sorted(devices))}", "a budget is of one device's memory"
        )
    return next(iter(devices), "cpu")
