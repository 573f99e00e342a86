"""Verify a plan: every rule it breaks, by name.

The verifier replays a plan by its own means and shares no code with planners or the simulator. Work is
near-linear in steps and residences. The rules are rows of one table (`tightship.verify.rules`); those of
placements alone are checked by `tightship.verify.placement`.
"""

from __future__ import annotations

from tightship.errors import VerificationFailed
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.verify.rules import PLACEMENT_RULES, PLAN_RULES, violations
from tightship.violation import Rule, Violation

__all__ = ["PLACEMENT_RULES", "PLAN_RULES", "Rule", "check", "verify"]


def verify(graph: Graph, plan: Plan) -> list[Violation]:
    """Everything wrong with ``plan`` as a plan for ``graph``; of one code, at most ``facts.PER_CODE`` (in each plan
    inside it, too)."""
    return violations(graph, plan)


def check(graph: Graph, plan: Plan) -> None:
    """Raise ``VerificationFailed`` if anything is wrong."""
    if faults := verify(graph, plan):
        raise VerificationFailed(faults, place=f"{plan.planner or 'plan'} for {graph.name!r}")
