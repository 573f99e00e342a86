"""Which partition of a joint graph is compiled within a budget.

A part of `torch_inductor`, whose problem and guarantee these are; the search is that of all compiled code
(`compiled_search`). On several ranks (tensor parallelism) each decides by itself: every candidate sends once and in
the order of the graph, so that ranks agree whatever each has chosen.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from tightship.cached import cached_property
from tightship.errors import Unsupported
from tightship.execute.aiming import Candidate, source_of
from tightship.execute.cache import KeptPartitions, Unplanned, folder_of
from tightship.execute.compiled import LoweredStep, Measured, StepReplay
from tightship.execute.compiled_search import CompiledSearch
from tightship.frontends.torch import compat_compile, compat_inductor
from tightship.frontends.torch.capture.fused import FusedJoint, between_blocks, fuse
from tightship.frontends.torch.compat_inductor import Lowered, LowerPair, NotLowered, Pair
from tightship.integrations.graph_entries import Ahead
from tightship.integrations.torch_partition import CompileOptions
from tightship.plan import Plan

__all__ = ["Search"]


class Sharing(Protocol):
    """What is used of the shares of a budget (`graph_shares.Shares`)."""

    @property
    def ledger(self) -> Any: ...

    @property
    def ahead(self) -> Ahead: ...

    def training_limit(self, unplanned: Unplanned) -> tuple[int | None, int | None]: ...

    def beyond(self, rest: int) -> int: ...


class Owner(Protocol):
    """What is used of the compilation that a search is for."""

    options: CompileOptions
    kept: str
    align: int
    measured: Measured

    @property
    def shares(self) -> Sharing: ...

    def step(self, pair: Pair, forward: Lowered, backward: Lowered) -> LoweredStep: ...


class Search(CompiledSearch[Pair]):
    """The search for a partition of ``joint``, whose first ``outputs`` results are the forward pass's."""

    def __init__(
        self, owner: Owner, joint: GraphModule, inputs: Any, outputs: int, static: Sequence[int],
        lower: LowerPair,
    ) -> None:  # fmt: skip
        o = owner.options
        placed = o.arena and not owner.shares.ahead.count
        self._made_from = (compat_inductor.digest(joint, static), outputs, owner.align, placed, o.planner)
        kept = KeptPartitions(folder_of(o.cache), self._made_from)
        super().__init__(o.planner, owner.shares.ledger.budget, kept, looks=bool(owner.kept))
        self.placed = placed
        self.owner, self.joint, self.inputs, self.outputs, self.lower = owner, joint, inputs, outputs, lower
        self.fixed = static
        self._model: FusedJoint | None = None
        try:
            self._model = fuse(joint, outputs)
        except Unsupported as error:
            self.notes.append(f"partitions are Inductor's own: {error}")

    @property
    def model(self) -> FusedJoint | None:
        return self._model

    @property
    def static(self) -> int:
        return self.unplanned.static

    def limit(self, unplanned: Unplanned) -> int | None:
        limit, self.held = self.owner.shares.training_limit(unplanned)
        if self.held is not None and limit is not None:
            folder = folder_of(self.owner.options.cache)
            self.kept = KeptPartitions(folder, (*self._made_from, limit, self.held))
            if self._model is not None:
                self._model = self._model.holding(limit, self.held)
        return limit

    def needs(self, replay: StepReplay) -> int:
        """Bytes that a candidate needs; where others follow that nobody knows, of what it keeps beyond ``held``, as
        many beyond the budget."""
        needed = super().needs(replay)
        if self.held is None or self.budget is None:
            return needed
        if self.owner.shares.ahead.count:
            return self._as_one_of_all(needed, replay.rest)
        return max(needed, self.budget + replay.rest - self.held)

    def _as_one_of_all(self, needed: int, rest: int) -> int:
        """``needed`` by one call, with its part of what all, which keep ``rest``, take beyond their bytes or leave of
        them."""
        assert self.budget is not None
        spare = self.budget - needed - self.owner.shares.beyond(rest)
        return self.budget - spare // (1 + self.owner.shares.ahead.count)

    def key(self, made: Pair) -> Hashable:
        return tuple(made.saved), tuple(map(compat_inductor.origin, made.backward.graph.nodes))

    def replay(self, made: Pair, *, likely: bool) -> StepReplay:
        if self._sends_otherwise(made):
            raise NotLowered(
                "a partition that sends twice, or in another order",
                "other ranks may have chosen another one",
            )
        forward, backward = self.lower(made, likely=likely)
        return self.owner.step(made, forward, backward).replay(self.owner.measured, self.owner.align)

    def stock(self, *, likely: bool = True) -> Candidate[Pair]:
        return self.at_share(1.0, likely=likely)

    def at_share(self, share: float, *, likely: bool = True) -> Candidate[Pair]:
        """Inductor's own partition at an ``activation_memory_budget``, replayed."""
        return self.candidate(self.stock_pair(share), source_of(share), share=share, likely=likely)

    def stock_pair(self, share: float) -> Pair:
        pair = compat_inductor.stock_pair(self.joint, self.inputs, self.outputs, self.fixed, share)
        otherwise = self._sends_otherwise(pair)  # under a checkpoint of the user's, or at a low budget
        if not (self.dead or otherwise):
            return pair
        joint = compat_inductor.merged(self.joint)  # whose nodes those that are saved are
        saved = (*pair.saved, *self.sent[0]) if otherwise else pair.saved
        return self.marked(compat_inductor.extract(joint, self.outputs, saved))

    @cached_property
    def sent(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What each pass sends to other ranks, by name, in order."""
        merged = compat_inductor.merged(self.joint)
        late = {n.name for n in merged.graph.nodes if compat_compile.is_backward(n)}
        names = compat_inductor.sent(merged)
        return tuple(n for n in names if n not in late), tuple(n for n in names if n in late)

    def _sends_otherwise(self, pair: Pair) -> bool:
        return (compat_inductor.sent(pair.forward), compat_inductor.sent(pair.backward)) != self.sent

    def saving(self, saved: Sequence[str], needed: Sequence[str] = ()) -> Pair:
        return self.marked(compat_inductor.extract(self.joint, self.outputs, saved, needed))

    def marked(self, pair: Pair) -> Pair:
        """``pair``, of ours, as this graph is to be written."""
        if self.dead:
            inputs = {n.name for n in pair.forward.graph.find_nodes(op="placeholder")}
            compat_inductor.mark_lean(pair.forward, self.dead)
            compat_inductor.mark_lean(pair.backward, self.dead, given={*pair.saved} - inputs)
        return pair

    def seed(self, share: float | None) -> Pair | None:
        """Inductor's own partition at an ``activation_memory_budget``; for None, the one that computes each block of
        the model again, if there are blocks."""
        if share is not None:
            try:
                return self.stock_pair(share)
            except Unsupported as error:  # Inductor fails at it
                self.failed += [] if str(error) in self.failed else [str(error)]
                return None
        saved = between_blocks(self.joint, self.model.is_late) if self.model is not None else ()
        return self.saving(saved) if saved else None

    def least(self, made: Pair) -> int:
        """Static set, and what a partition saves beside inputs; with calls ahead, as `needs` has it."""
        primals = {n.name for n in made.forward.graph.find_nodes(op="placeholder")}
        sizes: dict[int, int] = {}
        for n in made.backward.graph.find_nodes(op="placeholder"):
            t = n.meta.get("val")
            if n.name not in primals and n.name in made.saved and isinstance(t, torch.Tensor):
                sizes[t.untyped_storage()._cdata] = int(t.numel() * t.element_size())
        saved = sum(sizes.values())
        least = self.unplanned.static + saved
        ahead = self.held is not None and self.owner.shares.ahead.count
        return self._as_one_of_all(least, saved) if ahead else least

    def of_lean_graph(self) -> Search:
        joint, other = compat_inductor.lean_convolutions(self.joint)
        lean = Search(self.owner, joint, self.inputs, self.outputs, self.fixed, self.lower)
        lean.shares = self.shares if other else ()
        lean.held, lean.budget = self.held, self.budget
        if lean.held is not None and lean.budget is not None and lean._model is not None:
            lean._model = lean._model.holding(lean.budget, lean.held)
        return lean

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
