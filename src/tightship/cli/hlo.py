"""``assign`` and ``explain`` of a scheduled HLO module."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import Any

from rich.console import RenderableType

from tightship import hlo
from tightship.cli.options import given_options
from tightship.cli.output import Output, writable
from tightship.diagnose.changes import Change, changes
from tightship.errors import BadInput
from tightship.hlo import Module
from tightship.hlo.assign import advice, tight
from tightship.hlo.assign.allocate import Assignment
from tightship.hlo.assign.order import reordered
from tightship.hlo.peak import peak_of, with_results
from tightship.hlo.remat.as_plan import graph_before
from tightship.planners import planner
from tightship.report.hlo import assignment_rows, assignment_text, peak_rows, peak_table
from tightship.report.pages.assignment import assignment_page
from tightship.report.progress import Line
from tightship.report.text import change_lines
from tightship.serde import write_file
from tightship.simulate import Timeline, baseline, replay
from tightship.units import format_bytes

__all__ = ["assign", "explain_module"]


def assign(chosen: argparse.Namespace, out: Output) -> int:
    options = given_options(chosen)
    info = planner(chosen.planner, "assign")
    fields = getattr(info.options, "__dataclass_fields__", {})
    for name in options:
        if name not in fields:
            known = ", ".join(fields) or "none"
            raise BadInput(f"unknown option --{name} of planner {chosen.planner!r}: its options are {known}")
    path, page = writable(chosen.write, "--write"), writable(chosen.report, "--report")
    module, moved = _module(chosen, out)
    with Line(out.errors, f"assigning {module.name}"):
        made: Assignment = info.plan(module, info.options(**options))
        if moved is not None:
            made, module, moved = _not_worse(chosen, made, module, moved, info, options)
    rows = assignment_rows(made)
    text = [assignment_text(made)]
    if moved is not None:
        rows["moved"] = moved
        text.append(f"  order        {moved} instructions moved")
    if path is not None:
        write_file(path, hlo.to_text(module).encode())
        rows["written"] = str(path)
        text.append(f"written to {path}")
    if page is not None:
        write_file(page, assignment_page(made, rows=rows).encode())
        rows["report"] = str(page)
        text.append(f"shown in {page}")
    out.answer(rows, "\n".join(text))
    return 0


def _module(chosen: argparse.Namespace, out: Output) -> tuple[Module, int | None]:
    with Line(out.errors, f"reading {chosen.module}"):
        module = hlo.read(chosen.module)
    if not chosen.order:
        return _scheduled(module, "--order"), None
    with Line(out.errors, f"ordering {module.name}"):
        return reordered(module)


def _scheduled(module: Module, remedy: str) -> Module:
    if not module.scheduled:
        rule = f"the module is not scheduled (no is_scheduled=true in its header); {remedy} schedules it"
        raise BadInput(rule, place=module.file)
    return module


def _not_worse(
    chosen: argparse.Namespace,
    made: Assignment,
    module: Module,
    moved: int,
    info: Any,
    options: dict[str, Any],
) -> tuple[Assignment, Module, int]:
    """The given order, where the new one comes out larger."""
    given = hlo.read(chosen.module)
    if not given.scheduled:
        return made, module, moved
    before: Assignment = info.plan(given, info.options(**options))
    return (before, given, 0) if before.total <= made.total else (made, module, moved)


def changes_of(module: Module) -> tuple[tuple[Change, ...], Timeline]:
    """What recomputing instructions of the entry would give, simulated with modeled times, and what there is now."""
    graph = with_results(module, graph_before(module))
    return changes(graph, means=("recompute",), reorder=False), replay(graph, baseline(graph))


def explain_module(chosen: argparse.Namespace, out: Output) -> int:
    """The peak of a module, who makes it up, and what would lower it."""
    if chosen.budget is not None:
        raise BadInput("--budget is not taken for a module", place=chosen.source)
    with Line(out.errors, f"reading {chosen.source}"):
        module = _scheduled(hlo.read(chosen.source), "assign --order --write FILE")
    with Line(out.errors, f"assigning {module.name}"):
        made = planner("xla", "assign").plan(module)
        ours = tight.plan(module)
        peak = peak_of(made.live.points.module)
        step, rows = peak_rows(made.live, peak)
        found = advice.advice(made, ours, step)
        again, line = changes_of(module)
    answer = assignment_rows(made) | {
        "peak": {
            "step": step,
            "bytes": peak.nbytes,
            "instruction": peak.instruction,
            "computation": peak.computation,
            "residents": [asdict(r) for r in rows[: chosen.top]],
            "count": len(rows),
        },
        "advice": [asdict(a) for a in found],
        "changes": [c.as_dict() for c in again],
    }
    place = made.live.points.module.place(made.live.schedule[step].instruction)
    where = f"{peak.instruction} ({place})" if place else peak.instruction
    title = f"Peak: {format_bytes(peak.nbytes)}, with results and without parameters, at step {step} of"
    text: list[RenderableType] = [
        assignment_text(replace(made, planner="xla")),
        "",
        f"{title} {made.live.end}, while {where} runs",
        "",
        peak_table(rows, chosen.top),
        "",
        "What would lower it",
    ]
    text += [f"  {format_bytes(a.saves):>12}  {a.text}" for a in found] or ["  nothing that was tried"]
    if again:
        text += ["", "\n".join(change_lines(again, line))]
    out.answer(answer, text)
    return 0
