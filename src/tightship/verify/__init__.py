"""Verify a plan: every rule it breaks, by name.

The verifier replays a plan by its own means and shares no code with planners or the simulator. Work is
near-linear in steps and residences. The rules are rows of one table (`tightship.verify.rules`); those of
placements alone are checked by `tightship.verify.placement`.
"""

from __future__ import annotations

from tightship.errors import Rule, VerificationFailed
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.verify.rules import PLACEMENT_RULES, PLAN_RULES, verify

__all__ = ["PLACEMENT_RULES", "PLAN_RULES", "Rule", "check", "verify"]


def check(graph: Graph, plan: Plan) -> None:
    """Raise ``VerificationFailed`` if anything is wrong."""
    if faults := verify(graph, plan):
        raise VerificationFailed(faults, place=f"{plan.planner or 'plan'} for {graph.name!r}")
