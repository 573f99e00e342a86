"""`tightship plan module.txt` and `frontier module.txt`: rematerialisation of a scheduled HLO module."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tightship import api
from tightship.baselines import xla_assign as assigned
from tightship.baselines.xla_remat import Result
from tightship.cli.options import given_options, model_options
from tightship.cli.output import Output
from tightship.cli.source import writable
from tightship.errors import BadInput
from tightship.graph import Graph
from tightship.hlo import Module, read, to_text
from tightship.hlo.peak import plan_with_results, with_results
from tightship.hlo.remat.as_plan import as_plan, graph_before
from tightship.hlo.remat.cost import work_of
from tightship.hlo.remat.instructions import ways
from tightship.hlo.remat.lower import bounds
from tightship.hlo.remat.peak import module_peak, result_bytes, sequential_order
from tightship.hlo.remat.tradeoff import tradeoff
from tightship.plan import Plan
from tightship.planners import planner
from tightship.planners.default import Options, top_of_peak
from tightship.planners.frontier import Frontier
from tightship.planners.layout import lay_out
from tightship.report.artifacts import SHOWN
from tightship.report.pages.plan import plan_page
from tightship.report.progress import Line
from tightship.serde import write_file
from tightship.simulate import replay
from tightship.units import format_bytes, parse_budget

__all__ = ["is_module", "module_frontier", "plan_module"]

_ENDINGS = (".hlo", ".txt")
_TOP = 8
"""Arrays that are named where the limit is missed."""


def is_module(text: str) -> bool:
    """Whether a SOURCE is the text of an HLO module: by its ending."""
    return text.endswith(_ENDINGS)


def plan_module(chosen: argparse.Namespace, out: Output) -> int:
    info = planner(chosen.planner or "search", "remat")
    options = _options(info.options, given_options(chosen))
    budget = parse_budget(chosen.budget, "--budget") if chosen.budget is not None else None
    path, text = writable(chosen.output, "--output"), writable(chosen.write, "--write")
    looks = {name: writable(getattr(chosen, name), f"--{name}") for name in SHOWN}
    with Line(out.errors, f"reading {chosen.source}"):
        module = read(chosen.source)
    if not module.scheduled:
        rule = "a module that is planned has is_scheduled=true; assign --order --write FILE schedules it"
        raise BadInput(rule, place=str(chosen.source))
    before = module_peak(module)
    limit = before if budget is None else budget.resolve(before)
    began = time.perf_counter()
    with Line(out.errors, f"planning {module.name}"):
        made: Result = info.plan(module, limit, options)
    seconds = time.perf_counter() - began
    least = bounds(module, ways(options.allow), lossy=getattr(options, "lossy", False))
    graph, plan = plan_with_results(module, *as_plan(module, made, info.name, least))
    plan = replace(plan, seconds=seconds, source=chosen.source, command=chosen.command)
    rows = _rows(module, made, plan, least[module.entry.name]) | {"budget": None if budget is None else limit}
    said = [_said(module, made, rows)]
    if not made.met:
        top = top_of_peak(graph, replay(graph, plan.steps), plan.steps, _TOP)
        rows["top"] = [{"name": name, "bytes": nbytes, "at": at} for name, nbytes, at in top]
        said += ["at its peak"] + [f"  {format_bytes(nbytes):>12}  {name} ({at})" for name, nbytes, at in top]
    if path is not None:
        api.Planned(plan, graph).save(path)
        rows["output"] = str(path)
        said.append(f"written to {path}")
    if text is not None:
        write_file(text, to_text(made.module).encode())
        rows["written"] = str(text)
        said.append(f"module written to {text}")
    for name, target in looks.items():
        if target is not None:
            _look(name, target, with_results(module, graph_before(module)), graph, plan, rows)
            rows[name] = str(target)
            said.append(f"{SHOWN[name]} {target}")
    out.answer(rows, "\n".join(said))
    return 0 if made.met else 1


def module_frontier(chosen: argparse.Namespace, out: Output, options: dict[str, Any]) -> Frontier:
    """The trade-off of a module's entry: see `planners.remat.tradeoff`."""
    if given := [name for name, value in model_options(chosen).items() if value is not None]:
        raise BadInput("a module's text says all sizes", ", ".join(given), chosen.source)
    if given := [name for name in ("hints", "place", "hand_out") if name in options]:
        raise BadInput("not for a module", ", ".join(given), chosen.source)
    with Line(out.errors, f"reading {chosen.source}"):
        module = read(chosen.source)
    with Line(out.errors, f"planning {module.name}") as line:
        return tradeoff(
            module,
            chosen.points,
            Options(**options),
            lambda text: line.say(text, always=True),
            peers=chosen.peers,
        )


def _look(name: str, target: Path, before: Graph, graph: Graph, plan: Plan, rows: dict[str, Any]) -> None:
    """A plan of a module to look at. What is in memory at once is placed for that, results outside the graph."""
    layout = lay_out(graph, plan.steps, seconds=1.0)
    placed = replace(plan, residences=layout.residences, arena=layout.arena, handed=layout.handed)
    if name == "report":
        write_file(target, plan_page(graph, placed, rows=rows, before=before).encode())
    else:
        getattr(api.Planned(placed, graph), name)(target)


def _options(kind: type[Any], given: dict[str, Any]) -> Any:
    known = {name: value for name, value in given.items() if name in kind.__dataclass_fields__}
    if unknown := sorted(set(given) - set(known)):
        rule = f"options of a module's planner are {', '.join(kind.__dataclass_fields__)}"
        raise BadInput(rule, ", ".join(unknown), "options")
    return kind(**known)


def _rows(module: Module, made: Result, plan: Plan, least: int) -> dict[str, Any]:
    work, names = work_of(module), sequential_order(module)
    longer = sum(p.time - p.time_before for p in _inner(plan))
    return {
        "peak_before": made.peak_before,
        "peak_after": made.peak_after,
        "budget": made.limit,
        "met": made.met,
        "lower_bound": least + result_bytes(module),
        "static": 0,
        "arena": _arena(made.module),
        "time_before": plan.time_before,
        "time_after": plan.time + longer,
        "flops_before": sum(sum(work.flops[name].values()) for name in names),
        "flops_after": made.flops(work, names),
        "recomputed": len(made.recomputed),
        "offloaded": made.count("offload"),
        "compressed": made.count("compress"),
        "moved": plan.moved + sum(p.moved for p in _inner(plan)),
        "added": made.added,
        "planner": plan.planner,
        "seconds": plan.seconds,
        "instructions": [*made.recomputed],
        "computations": 1 + sum(1 for _ in _inner(plan)),
        "graph": module.name,
    }


def _arena(module: Module) -> int:
    """Bytes that XLA's buffer assignment of a module takes in the device's memory beyond its parameters."""
    made = assigned.plan(module)
    return sum(a.size for a in made.allocations if a.kind != "parameter" and not a.space)


def _inner(plan: Plan) -> Iterator[Plan]:
    for row in plan.inner:
        yield row.plan
        yield from _inner(row.plan)


def _said(module: Module, made: Result, rows: dict[str, Any]) -> str:
    verdict = "within the limit" if made.met else "ABOVE the limit"
    least = rows["lower_bound"]
    longer = rows["time_after"] / rows["time_before"] - 1 if rows["time_before"] else 0.0
    lines = [
        f"plan for {module.name} ({len(module.entry.instructions)} instructions)",
        f"  peak         {format_bytes(made.peak_after)}, {verdict} of {format_bytes(made.limit)}",
        f"  before       {format_bytes(made.peak_before)}, as XLA counts it: results, without parameters",
        f"  placed       {format_bytes(rows['arena'])}, beyond parameters, by XLA's assignment of what is written",
        f"  lower bound  {format_bytes(least)}" + (": no plan meets the limit" if least > made.limit else ""),
        f"  recomputed   {len(made.recomputed)} instructions, {made.added:+d} in all; {rows['moved']} moved",
        f"  set aside    {rows['offloaded']} copied to the host, {rows['compressed']} packed",
        f"  time         {100 * longer:+.2f} %, "
        f"modelled; {rows['flops_after'] - rows['flops_before']:,} FLOPs more",
        f"  planner      {rows['planner']}, in {rows['seconds']:.2f} s",
    ]
    return "\n".join(lines)
