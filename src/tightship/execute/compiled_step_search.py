"""Which graph of a whole step is compiled within a budget.

A part of `compiled_step`, whose problem and guarantee these are; the search is that of all compiled code
(`compiled_search`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Final, Protocol

from torch.fx import GraphModule

from tightship import simulate
from tightship.errors import Infeasible, TightshipError, Unsupported
from tightship.execute.aiming import STOCK, Candidate, row_of, unplanned_of
from tightship.execute.cache import KeptPartitions, Partition, Unplanned
from tightship.execute.compiled import StepReplay
from tightship.execute.compiled_ranks import Decision
from tightship.execute.compiled_search import CompiledSearch
from tightship.frontends.torch import compat_inductor
from tightship.frontends.torch.capture.fused import between_blocks
from tightship.frontends.torch.capture.fused_step import FusedStep, fuse_step
from tightship.frontends.torch.compat_inductor import Lower, Lowered
from tightship.plan import Plan
from tightship.planners import default
from tightship.planners.run import decision_plan
from tightship.units import Budget

__all__ = ["StepSearch"]

_INDUCTOR: Final = "Inductor"


class Owner(Protocol):
    """What is used of the compilation that a search is for. ``within``: the budget as the user gave it; ``given``:
    what another rank has decided, of other tensors if this one ``follows``."""

    given: Decision | None
    follows: bool

    @property
    def options(self) -> default.Options: ...

    @property
    def within(self) -> Budget | None: ...

    @property
    def name(self) -> str: ...

    @property
    def static(self) -> int: ...

    def replayed(self, lowered: Lowered) -> StepReplay: ...

    def limit(self, unplanned: Unplanned) -> int | None: ...


class StepSearch(CompiledSearch[GraphModule]):
    """The search for the graph that runs a step in the place of ``gm``, whose first ``outputs`` results come of the
    forward pass."""

    shares: tuple[float | None, ...] = (1.0, *STOCK, None)
    masks = False
    """Whether what the backward pass makes of the forward pass's values may be made early."""

    def __init__(
        self, owner: Owner, gm: GraphModule, outputs: int, lower: Lower, kept: KeptPartitions, *, looks: bool
    ) -> None:
        super().__init__(owner.options, owner.within, kept, looks=looks)
        self.owner, self.gm, self.outputs, self.lower = owner, gm, outputs, lower
        self._model: FusedStep | None = None

    @property
    def model(self) -> FusedStep:
        if self._model is None:
            self._model = fuse_step(self.gm, self.outputs, name=self.owner.name, masks=self.masks)
        return self._model

    @property
    def static(self) -> int:
        return self.owner.static

    def limit(self, unplanned: Unplanned) -> int | None:
        return self.owner.limit(unplanned)

    def key(self, made: GraphModule) -> Hashable:
        return tuple(map(compat_inductor.origin, made.graph.nodes))

    def replay(self, made: GraphModule, *, likely: bool) -> StepReplay:
        return self.owner.replayed(self.lower(made, likely=likely))

    def stock(self, *, likely: bool = True) -> Candidate[GraphModule]:
        """Of a lean graph, too: its own order is Inductor's."""
        return self.candidate(self.gm, _INDUCTOR, likely=likely)

    def cost(self, made: GraphModule) -> tuple[int, float]:
        return (0, 0.0) if made is self.gm else self.model.recompute_time(made)

    def least(self, made: GraphModule) -> int:
        return 0

    def seed(self, share: float | None) -> GraphModule | None:
        model = self.model
        if share is None:
            saved = between_blocks(self.gm, model.is_late)
            return self.marked(model.saving(saved)) if saved else None
        saved = compat_inductor.stock_saved(self.gm, model.late, model.outputs, share)
        return self.marked(model.saving(saved))

    def planned(self, plan: Plan) -> GraphModule:
        return self.marked(self.model.ordered(plan))

    def marked(self, made: GraphModule) -> GraphModule:
        """A graph of ours, as this one is to be written."""
        return compat_inductor.mark_lean(made, self.dead) if self.dead else made

    def of_lean_graph(self) -> StepSearch:
        gm, other = compat_inductor.lean_convolutions(self.gm)
        lean = StepSearch(self.owner, gm, self.outputs, self.lower, self.kept, looks=self.looks)
        lean.masks, lean.shares = True, self.shares if other else ()
        return lean

    # --- what was decided in an earlier run, or on another rank ---

    def run(self) -> Candidate[GraphModule]:
        given = self.owner.given
        return self._followed(given.chosen) if given is not None and self.owner.follows else super().run()

    def known(self) -> tuple[Unplanned, Mapping[str, Partition]] | None:
        given = self.owner.given
        return super().known() if given is None else (given.unplanned, {})

    def chosen(self, known: Mapping[str, Partition], budget: int | None) -> Partition | None:
        given = self.owner.given
        return super().chosen(known, budget) if given is None else given.chosen

    def plan_of(self, row: Partition) -> Plan | None:
        plan = super().plan_of(row)
        ours = plan is None or self.owner.given is None  # on another rank nodes may have other names
        return plan if ours or plan is None else replace(plan, digest=self.model.graph.digest)

    def without_plan(self, row: Partition) -> GraphModule | None:
        return self.gm if row.source == _INDUCTOR else super().without_plan(row)

    def _followed(self, row: Partition) -> Candidate[GraphModule]:
        """What was decided for the same ops on tensors of other sizes. Raises ``Unsupported`` where ops differ,
        ``Infeasible`` beyond the budget."""
        self.unplanned = unplanned_of(self.stock())
        budget = self.budget = self.limit(self.unplanned)
        search = self.lean() if row.lean else self
        found = search.followed(row) if isinstance(search, StepSearch) else None
        if found is None:
            raise Unsupported(
                "a batch of other shapes on some ranks, for which other ops run,",
                "no compiled code sends in the order of the other ranks'", "give all ranks batches of one shape",
            )  # fmt: skip
        if budget is not None and found.needed > budget:
            raise Infeasible(
                budget=budget, lower_bound=self.static, best_peak=found.peak, placed=found.needed
            )
        self.row = row_of(found, self.count, lean=self.leaned)
        return found

    def followed(self, row: Partition) -> Candidate[GraphModule] | None:
        """The candidate that a choice for other sizes says; None where that is of other ops."""
        if row.source == _INDUCTOR:
            return self.stock()
        plan, made = super().plan_of(row), None
        try:
            if plan is not None:
                line = simulate.replay(self.model.graph, plan.steps)
                plan = decision_plan(self.model.graph, plan.steps, line, plan.planner)
                made = self.planned(plan)
            else:
                made = self.seed(row.share)
        except (TightshipError, LookupError, ValueError):
            return None
        return None if made is None else self.candidate(made, row.source, share=row.share, plan=plan)
