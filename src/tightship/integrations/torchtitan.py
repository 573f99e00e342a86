"""A memory policy for trainers that trace a step into one fx graph, as torchtitan's graph trainer does.

    from torchtitan.experiments.graph_trainer.registry import register_memory_policy

    register_memory_policy("tightship")(MemoryPolicy("60GiB"))  # --compile.memory_policy tightship

A policy of torchtitan's is called with the traced graph and the trainer's configuration, writes into
``node.meta["recompute"]`` which results of the forward pass are saved, and gives the graph back; a later pass copies
what is to be recomputed to the backward pass. torchtitan itself is not imported.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from tightship.errors import BadInput
from tightship.integrations.torch_inductor import tag
from tightship.plan import Plan
from tightship.planners.default import read_options
from tightship.units import BudgetLike, format_bytes, parse_budget

__all__ = ["MemoryPolicy"]

_LOG = logging.getLogger("tightship.torchtitan")


@dataclass
class MemoryPolicy:
    """``policy(gm, config=…)`` tags a graph of forward pass, loss and backward pass, or a joint graph, within
    ``budget`` (bytes, text such as ``60GiB``, or a percentage), and returns it. ``options``: the planner's.

    The budget is of what the graph reads (a rank's own parameters and batch), and what it makes; not of what the
    optimizer holds. ``plans`` are those of the graphs so far; their bytes are a model of fused code (see
    `tightship.tag`). Random ops and ops with effects are saved. Every rank has the same graph and makes the same
    plan. ``log_activation_memory_policy`` of torchtitan shows the tags. Raises as `tightship.tag`, and ``BadInput``
    for a budget and options that are none.
    """

    budget: BudgetLike
    options: dict[str, Any] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.budget is None:
            raise BadInput("a policy needs a budget, such as 60GiB", place="MemoryPolicy")
        parse_budget(self.budget)
        read_options(self.options, "MemoryPolicy")  # type: ignore[arg-type]

    def __call__(self, gm: GraphModule, *, config: Any = None) -> GraphModule:
        plan = tag(gm, self.budget, **self.options)
        self.plans.append(plan)
        _LOG.info("tagged: peak %s, unplanned %s", format_bytes(plan.peak), format_bytes(plan.peak_before))
        return gm
