"""The questions about what is there already: why a device was full, why a plan is as it is, how two plans differ."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from tightship import api
from tightship.cli.output import Output, targets, write_targets
from tightship.cli.plan import solved
from tightship.cli.verbs import is_module, loaded, read_budget
from tightship.diagnose.changes import changes
from tightship.errors import BadInput, Infeasible
from tightship.frontends.memory_snapshot import is_snapshot
from tightship.options import given_options, model_options
from tightship.report.decisions import why_tables
from tightship.report.numbers import makers, module_costs, peak_of
from tightship.report.progress import Line
from tightship.report.text import change_lines, module_tables, peak_lines, peak_tables
from tightship.requests import PlanRequest, SnapshotRequest
from tightship.result import Planned
from tightship.simulate import baseline, replay

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["diff", "explain"]


def explain(chosen: argparse.Namespace, out: Output) -> int:
    options = given_options(chosen)
    if chosen.top < 1:
        raise BadInput(f"--top is {chosen.top}: a table has at least one row")
    if is_snapshot(chosen.source):
        return _explain_snapshot(chosen, out)
    if chosen.alloc_conf is not None:
        raise BadInput("--alloc-conf requires a memory snapshot", place=chosen.source)
    if chosen.report is not None:
        raise BadInput("--report requires a memory snapshot: plan --report draws a plan", place=chosen.source)
    if is_module(chosen.source):
        if chosen.why is not None:
            raise BadInput(
                "--why requires a plan: name a plan.json, or a model and --budget", place=chosen.source
            )
        from tightship.cli.hlo import explain_module

        return explain_module(chosen, out)
    budget = read_budget(chosen)
    source = loaded(chosen.source, out, model_options(chosen))
    graph, planned, failure = source.graph, source.plan, None
    if planned is not None:
        api.check_digest(planned, graph, chosen.source)
    if budget is not None:
        try:
            planned = solved(PlanRequest(graph, budget, options=options), out).plan
        except Infeasible as error:  # the peak is explained all the same
            planned, failure = None, error
    if chosen.why is not None:
        if failure is not None:
            raise failure
        if planned is None:
            raise BadInput("--why requires a plan: name a plan.json, or add --budget", place=chosen.source)
        return _explain_why(chosen.why, Planned(planned, graph), out)
    steps = baseline(graph)
    before, line = peak_of(graph, steps), replay(graph, steps)
    with Line(out.live, "simulating changes"):
        cheapest = changes(graph)
    rows: dict[str, object] = {"graph": graph.name, "static": graph.static_bytes, "before": before.as_dict()}
    rows["makers"] = [asdict(m) for m in makers(graph, steps, line)]
    rows["changes"] = [asdict(c) for c in cheapest]
    costs = module_costs(graph, steps if planned is None else planned.steps)
    rows["modules"] = [asdict(c) for c in costs]
    text: list[RenderableType] = ["\n".join(peak_lines(graph, steps)), ""]
    text += ["\n".join(change_lines(cheapest, line)), ""]
    text += peak_tables(before, title="Peak before planning", top=chosen.top)
    if planned is not None:
        answer, after = Planned(planned, graph), peak_of(graph, planned.steps)
        of_plan = makers(graph, planned.steps, replay(graph, planned.steps))
        rows |= {"planned": after.as_dict(), "plan": answer.rows()}
        rows["planned_makers"] = [asdict(m) for m in of_plan]
        text[2:2] = ["\n".join(["With the plan:", *peak_lines(graph, planned.steps)]), ""]
        text += ["", *peak_tables(after, title="Peak of the plan", top=chosen.top), "", str(answer)]
    if costs:
        of = "before planning" if planned is None else "with the plan"
        text += ["", f"What each module costs {of}:", "", *module_tables(costs, chosen.top)]
    if failure is not None:
        rows["error"] = {"type": type(failure).__name__, "message": str(failure)}
        text += ["", str(failure)]
    out.answer(rows, text)
    return 1 if failure is not None else 0


def _explain_snapshot(chosen: argparse.Namespace, out: Output) -> int:
    """``explain SNAPSHOT``: what a memory snapshot of PyTorch's says."""
    given, model = given_options(chosen), model_options(chosen)
    unused = [f"--{n}" for n in ("budget", "why") if getattr(chosen, n) is not None]
    unused += [f"--{n.replace('_', '-')}" for n in given if n != "seconds"]
    unused += [f"--{n.replace('_', '-')}" for n, value in model.items() if value is not None]
    if unused:
        raise BadInput(f"{unused[0]} requires a model or a plan, not a memory snapshot", place=chosen.source)
    files, seconds = targets(chosen), given.get("seconds", SnapshotRequest.seconds)
    with Line(out.live, f"reading {chosen.source}"):
        answer = SnapshotRequest(chosen.source, float(str(seconds)), chosen.alloc_conf).solve()
    rows, text = answer.rows(), answer.tables(chosen.top)
    write_targets(answer, files, rows, text)
    out.answer(rows, text)
    return 0


def _explain_why(name: str, planned: Planned, out: Output) -> int:
    """``explain PLAN --why NAME``: why the plan does what it does with a tensor."""
    with Line(out.live, "simulating alternatives"):
        answer = planned.why(name)
    out.answer(asdict(answer), why_tables(answer))
    return 0


def diff(chosen: argparse.Namespace, out: Output) -> int:
    """``diff A.json B.json``: what two plans do differently."""
    if chosen.top < 1:
        raise BadInput(f"--top is {chosen.top}: a table has at least one row")
    files = targets(chosen)
    with Line(out.live, "simulating differences"):
        answer = api.diff(chosen.one, chosen.two)
    rows, text = answer.rows(), answer.tables(chosen.top)
    write_targets(answer, files, rows, text)
    out.answer(rows, text)
    return 0
