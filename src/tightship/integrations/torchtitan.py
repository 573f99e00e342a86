"""Tags for other partitioners on joint fx graphs, and a memory policy for trainers that trace a step into one.

    from torchtitan.experiments.graph_trainer.registry import register_memory_policy

    register_memory_policy("tightship")(MemoryPolicy("60GiB"))  # --compile.memory_policy tightship

A policy of torchtitan's is called with the traced graph and the trainer's configuration, writes into
``node.meta["recompute"]`` which results of the forward pass are saved, and gives the graph back; a later pass copies
what is to be recomputed to the backward pass. torchtitan itself is not imported.
"""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import torch
import torch.utils.checkpoint
from torch.fx import GraphModule, Node

from tightship.errors import BadInput
from tightship.frontends.torch import compat, compat_compile, compat_inductor
from tightship.frontends.torch.capture.fused import FusedJoint, fuse
from tightship.frontends.torch.compiled_collectives import is_collective, is_gather, is_wait
from tightship.plan import Plan
from tightship.planners.default import Options, PlanOptions, read_options
from tightship.planners.default import plan as default_plan
from tightship.units import BudgetLike, format_bytes, parse_budget

__all__ = ["MemoryPolicy", "tag"]

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


# --- tags ---


def tag(joint: GraphModule, budget: BudgetLike, *, outputs: int | None = None, **options: Any) -> Plan:
    """Says on every node of the forward pass of a joint fx graph whether it is saved for the backward pass:
    ``node.meta["recompute"]``, a ``CheckpointPolicy``, as PyTorch's partitioners read it, in the place of what was
    there. ``budget``: bytes, text or a percentage, of the graph's inputs and everything that the two passes
    make. ``outputs``: how many of the graph's results are the forward pass's; by default all but one for each input,
    as AOTAutograd writes them. ``options`` are the planner's.

    A graph without tangents is one of forward pass, loss and backward pass, whose nodes say which they are of
    (``custom["phase"]`` or ``autograd_backward``), as PyTorch's pass that recomputes by tags reads it; its results
    before the first gradient are the forward pass's. That pass recomputes for one stretch of backward nodes alone:
    what other ones read is saved.

    Returns the plan. Its bytes are those of a model of fused code: what a compiler makes of the tags is not replayed.
    Random ops and ops with effects are saved, never recomputed. Raises ``Infeasible``; ``BadInput`` for what is no
    joint graph; ``Unsupported`` for symbolic sizes and higher-order ops.
    """
    compat.require_torch()
    chosen = replace(read_options(cast(PlanOptions, options), "tag"), redraw=False)
    if not isinstance(joint, GraphModule):
        raise BadInput("a joint graph is a torch.fx.GraphModule", type(joint).__qualname__, "tag")
    inputs = joint.graph.find_nodes(op="placeholder")
    primals = [n for n in inputs if not compat_compile.is_tangent(n)]
    (output,) = joint.graph.find_nodes(op="output")
    results = list(torch.utils._pytree.tree_leaves(output.args[0]))
    if len(primals) < len(inputs):
        count = len(results) - len(primals) if outputs is None else outputs
        if not 0 < count < len(results):
            raise BadInput(_JOINT, f"{len(inputs)} inputs, {len(results)} results", "tag")
        return _write_tags(joint, _model(joint, count), budget, chosen, frozenset())
    with compat_compile.phases_marked(joint) as backward:
        late = set(backward)
        count = next((k for k, x in enumerate(results) if x in late), 0) if outputs is None else outputs
        if not 0 < count < len(results):
            raise BadInput(_JOINT, f"{len(inputs)} inputs, {len(results)} results, no tangents", "tag")
        return _write_tags(joint, _model(joint, count), budget, chosen, _read_elsewhere(joint, late))


_JOINT: Final = (
    "a joint graph has tangents among its inputs, or marks on the nodes of its backward pass, and its results are "
    "the forward pass's, then gradients"
)


def _model(joint: GraphModule, outputs: int) -> FusedJoint:
    return fuse(joint, outputs, masks=False, gathers_again=True)


def _write_tags(
    joint: GraphModule, model: FusedJoint, budget: BudgetLike, options: Options, kept: frozenset[Node]
) -> Plan:
    plan = default_plan(model.graph, budget, replace(options, place=False, reuse=False))
    saved = set(model.saved(plan))
    again = {model.calls[s.op] for s in plan.steps if s.kind == "recompute"}
    for node in joint.graph.nodes:
        if node.op == "call_function" and not model.is_late(node):
            once = compat_inductor.runs_once(node) or _sends_once(node)
            once = once or any(compat_inductor.draws(a) for a in node.all_input_nodes if _is_part(node))
            once = once or (is_wait(node.target) and any(map(_sends_once, _sent_by(node))))
            sent = is_wait(node.target) and any(a.name in saved for a in node.all_input_nodes)
            whole = node.all_input_nodes[0] if _is_part(node) else node
            parts = [u for u in whole.users if _is_part(u)]
            # Partitioners go by an op's own tag for its parts; what the backward pass does not read is not saved.
            together = whole not in again and any(u.name in saved for u in parts)
            keep = once or sent or together or node.name in saved or node in kept
            node.meta["recompute"] = _POLICY.MUST_SAVE if keep else _POLICY.MUST_RECOMPUTE
    return plan


def _read_elsewhere(joint: GraphModule, late: set[Node]) -> frozenset[Node]:
    """What stretches of backward nodes read, the longest one aside."""
    stretches: list[list[Node]] = [[]]
    for node in joint.graph.nodes:
        if node in late:
            stretches[-1].append(node)
        elif stretches[-1]:
            stretches.append([])
    longest = max(stretches, key=len)
    others = [s for s in stretches if s is not longest]
    return frozenset(a for s in others for n in s for a in n.all_input_nodes if a not in late)


def _sends_once(node: Node) -> bool:
    """Whether a node adds up, or hands out, what ranks have."""
    return is_collective(node.target) and not is_gather(node.target)


def _sent_by(wait: Node) -> list[Node]:
    """The collective that a node waits for: of several tensors it waits for a part."""
    return [m for n in wait.all_input_nodes for m in (n.all_input_nodes if _is_part(n) else [n])]


def _is_part(node: Node) -> bool:
    return node.target is operator.getitem


_POLICY: Final = torch.utils.checkpoint.CheckpointPolicy
