"""Which partition of a joint graph is compiled within a budget: candidates are replayed until none is worth a look.

A part of `torch_inductor`, whose problem and guarantee these are. Where nothing fits and there are convolutions, the
same is done of the graph as it is written for memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import torch
from msgspec import structs
from torch.fx import GraphModule

from tightship import simulate
from tightship.errors import BadInput, Infeasible, TightshipError, Unsupported
from tightship.execute.aiming import (
    STOCK,
    Aim,
    Candidate,
    fastest,
    found_or_kept,
    row_of,
    source_of,
    unplanned_of,
)
from tightship.execute.cache import KeptPartitions, Partition, folder_of, plan_of
from tightship.execute.compiled import LoweredStep, Measured, place
from tightship.frontends.torch import compat_inductor
from tightship.frontends.torch.capture.fused import FusedJoint, between_blocks, fuse
from tightship.frontends.torch.compat_inductor import Lowered, LowerPair, NotLowered, Outdated, Pair
from tightship.integrations.torch_partition import CompileOptions
from tightship.plan import Plan
from tightship.verify import check

__all__ = ["Search"]

_DEAD: Final = 64
"""A lean pass's kernels end where the dead bytes are such a part of what the model has beyond the static set."""
_LEAN: Final = (
    "nothing else fits: gradients of convolutions are computed one after the other, kernels end early"
)


class Sharing(Protocol):
    """What is used of the shares of a budget (`torch_inductor.Shares`)."""

    @property
    def ledger(self) -> Any: ...

    def limit(self, static: int, need: int, results: int, *, training: bool) -> int | None: ...


class Owner(Protocol):
    """What is used of the compilation that a search is for."""

    options: CompileOptions
    kept: str
    align: int
    measured: Measured

    @property
    def shares(self) -> Sharing: ...

    def step(self, pair: Pair, forward: Lowered, backward: Lowered) -> LoweredStep: ...


class Search:
    """Which partition: lowered and replayed until nothing faster is to be expected within the budget."""

    def __init__(
        self, owner: Owner, joint: GraphModule, inputs: Any, outputs: int, static: Sequence[int],
        lower: LowerPair,
    ) -> None:  # fmt: skip
        self.owner, self.joint, self.inputs, self.outputs, self.lower = owner, joint, inputs, outputs, lower
        self.fixed = static
        self.dead = 0  # in a lean graph: bytes for which a kernel ends
        self.leaned = False  # whether the lean graph was searched
        self.lean_search: Search | None = None
        self.count = 0
        self.notes: list[str] = []
        self.failed: list[str] = []  # why Inductor failed at candidates
        self.seen: dict[Hashable, Candidate[Pair]] = {}
        self.model: FusedJoint | None = None
        try:
            self.model = fuse(joint, outputs)
        except Unsupported as error:
            self.notes.append(f"partitions are Inductor's own: {error}")
        o = owner.options
        folder = folder_of(o.cache)
        made_from = (compat_inductor.digest(joint, static), outputs, owner.align, o.arena, o.planner)
        self.kept = KeptPartitions(folder, made_from)

    def run(self) -> Candidate[Pair]:
        known = self.kept.read() if self.owner.kept else None
        within = self.owner.shares.ledger.budget
        likely = within is None or not within.below_unplanned
        first = self.stock(1.0, likely=likely) if known is None else None
        self.unplanned = known[0] if known is not None else unplanned_of(first)
        static, peak = self.unplanned.static, max(self.unplanned.peaks)
        budget = self.owner.shares.limit(static, peak - static, self.unplanned.handed[0], training=True)
        self.budget = budget
        if known is not None and (chosen := known[1].get(str(budget))) is not None:
            return self.again(chosen)
        if first is None:
            first = self.stock(1.0, likely=likely)
        best = first
        if budget is not None and first.needed > budget:
            try:
                best = found_or_kept(
                    self.kept, self.unplanned, budget, partial(self.within, budget, static, first),
                    self.instead if self.owner.kept else None, self.least_row,
                )  # fmt: skip
            except Infeasible as no:
                raise no.with_advice((*no.advice, *self.failed)) from None
        self.notes += self.failed
        self.kept.keep(self.unplanned, budget, row_of(best, self.count, lean=self.leaned))
        return best

    def instead(self, row: Partition) -> Candidate[Pair]:
        """What was found for another budget, where this search has found nothing."""
        self.leaned = False
        self.notes[:] = [n for n in self.notes if n != _LEAN]
        return self.again(row)

    def least_row(self) -> Partition:
        """The least that was found, of this graph or of the lean one."""
        searches = [self, *([] if self.lean_search is None else [self.lean_search])]
        found = [(c.needed, k, c) for k, one in enumerate(searches) for c in one.seen.values()]
        _, k, least = min(found, key=lambda row: row[:2])
        return row_of(least, self.count, lean=k > 0)

    def again(self, chosen: Partition) -> Candidate[Pair]:
        """A candidate that was chosen in an earlier run. Raises ``Outdated`` where it is not this graph's."""
        if chosen.lean:
            lean = self.lean()
            if lean is None:
                raise Outdated("a partition of another graph")
            found = lean.again(structs.replace(chosen, lean=False))
            self.count = chosen.lowered
            return found
        try:
            plan = plan_of(chosen)
            if plan is not None and self.model is not None:
                check(self.model.graph, plan)
                pair = self.planned(plan)
            else:
                known = chosen.share is not None or chosen.source == source_of(None)
                seed = self.seed(chosen.share) if known else None
                if seed is None:
                    raise BadInput("a partition is Inductor's own or of a plan")
                pair = seed
        except TightshipError as error:
            raise Outdated(str(error)) from error
        self.count = chosen.lowered
        return Candidate(
            pair, chosen.source, chosen.peak, chosen.needed, None, chosen.recomputed, chosen.seconds, chosen.share,
            plan,
        )  # fmt: skip

    def within(self, budget: int, static: int, first: Candidate[Pair]) -> Candidate[Pair]:
        """The fastest within the budget; of the lean graph only where there is none. Raises ``Infeasible``."""
        try:
            return self.search(budget, static, first)
        except Infeasible as error:
            lean = self.lean()
            if lean is None:
                raise
            reached = error.best_peak
        lean.unplanned, lean.count = self.unplanned, self.count
        try:
            return lean.search(budget, static, lean.stock(1.0))
        except (Infeasible, NotLowered) as error:
            best = min(reached, error.best_peak) if isinstance(error, Infeasible) else reached
            raise Infeasible(budget=budget, lower_bound=static, best_peak=best, compiled=True) from None
        finally:
            self.count = lean.count

    def lean(self) -> Search | None:
        """The search on the graph as it is written for memory, where there are convolutions."""
        joint = compat_inductor.lean_convolutions(self.joint) if self.model is not None else None
        if joint is None:
            return None
        lean = Search(self.owner, joint, self.inputs, self.outputs, self.fixed, self.lower)
        if lean.model is None:
            return None
        graph = lean.model.graph
        beyond = simulate.replay(graph, simulate.baseline(graph)).peak - graph.static_bytes
        lean.dead = max(beyond // _DEAD, 1)
        self.notes.append(_LEAN)
        self.leaned, self.lean_search, lean.notes, lean.failed = True, lean, self.notes, self.failed
        return lean

    def search(self, budget: int, static: int, first: Candidate[Pair]) -> Candidate[Pair]:
        """The fastest within the budget of this graph. Raises ``Infeasible``."""
        if self.model is None:
            return fastest([first], STOCK, self, budget, static)
        aim = Aim(self.model, self.owner.options.planner, self.ours, budget, static, first.workspaces())
        return fastest([first, *aim.run()], (*STOCK, None), self, budget, static, aim)

    # --- candidates ---

    def stock(self, share: float, *, likely: bool = True) -> Candidate[Pair]:
        return self.candidate(self.stock_pair(share), source_of(share), share=share, likely=likely)

    def stock_pair(self, share: float) -> Pair:
        pair = compat_inductor.stock_pair(self.joint, self.inputs, self.outputs, self.fixed, share)
        return self.saving(pair.saved) if self.dead else pair

    def saving(self, saved: Sequence[str], needed: Sequence[str] = ()) -> Pair:
        return self.marked(compat_inductor.extract(self.joint, self.outputs, saved, needed))

    def marked(self, pair: Pair) -> Pair:
        """``pair``, of ours, as this graph is to be written."""
        return compat_inductor.mark_lean(pair, self.dead) if self.dead else pair

    def seed(self, share: float | None) -> Pair | None:
        """Inductor's own partition at an ``activation_memory_budget``; for None, the one that computes each block of
        the model again, if there are blocks."""
        if share is not None:
            return self.stock_pair(share)
        saved = between_blocks(self.joint, self.model.is_late) if self.model is not None else ()
        return self.saving(saved) if saved else None

    def seconds(self, pair: Pair) -> float:
        return self.cost(pair)[1]

    def lowered(self, pair: Pair, share: float | None) -> Candidate[Pair]:
        return self.candidate(pair, source_of(share), share=share)

    def least(self, pair: Pair) -> int:
        """Static set, and what a partition saves beside inputs: its peak is not below."""
        primals = {n.name for n in pair.forward.graph.find_nodes(op="placeholder")}
        sizes: dict[int, int] = {}
        for n in pair.backward.graph.find_nodes(op="placeholder"):
            t = n.meta.get("val")
            if n.name not in primals and n.name in pair.saved and isinstance(t, torch.Tensor):
                sizes[t.untyped_storage()._cdata] = int(t.numel() * t.element_size())
        return self.unplanned.static + sum(sizes.values())

    def cost(self, pair: Pair) -> tuple[int, float]:
        return (0, 0.0) if self.model is None else self.model.recompute_time(pair)

    def candidate(
        self,
        pair: Pair,
        source: str,
        *,
        share: float | None = None,
        plan: Plan | None = None,
        likely: bool = True,
    ) -> Candidate[Pair]:
        key = tuple(pair.saved), tuple(map(compat_inductor.origin, pair.backward.graph.nodes))
        if key not in self.seen:
            try:
                forward, backward = self.lower(pair, likely=likely)
            except NotLowered as error:
                self.failed += [] if str(error) in self.failed else [str(error)]
                raise
            self.count += 1
            replay = self.owner.step(pair, forward, backward).replay(self.owner.measured, self.owner.align)
            peak = max(replay.peaks)
            needed = max(peak, replay.static + place(replay)[1]) if self.owner.options.arena else peak
            self.seen[key] = Candidate(pair, source, peak, needed, replay, *self.cost(pair), share, plan)
        return self.seen[key]

    def ours(self, plan: Plan) -> Candidate[Pair]:
        return self.candidate(self.planned(plan), "tightship", plan=plan)

    def planned(self, plan: Plan) -> Pair:
        """The partition that a plan says."""
        assert self.model is not None
        model = self.model
        pair = self.saving(model.saved(plan), model.needed(plan))
        try:
            return self.marked(model.ordered(plan, pair))
        except (
            Unsupported
        ) as error:  # the saved set alone is right as well: what is left out is the plan's order
            note = f"a plan's order was not taken over: {error}"
            self.notes += [] if note in self.notes else [note]
            return pair
