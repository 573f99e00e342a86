"""The verbs on a scheduled HLO module: ``assign``, ``explain``, ``plan`` and ``frontier``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import RenderableType

from tightship import hlo
from tightship.baselines import xla_assign
from tightship.baselines.xla_remat import Result
from tightship.cached import cached_property
from tightship.cli.output import Output, targets, write_targets
from tightship.diagnose.changes import Change, changes
from tightship.errors import BadInput
from tightship.files import write_file
from tightship.hlo import Module, read, to_text
from tightship.hlo.assign import advice, tight
from tightship.hlo.assign.allocate import Assignment
from tightship.hlo.assign.order import reordered
from tightship.hlo.remat import search
from tightship.hlo.remat.as_plan import as_plan, graph_before
from tightship.hlo.remat.cost import ACCELERATOR, work_of
from tightship.hlo.remat.instructions import ways
from tightship.hlo.remat.lower import bounds
from tightship.hlo.remat.peak import (
    module_peak,
    peak_of,
    plan_with_results,
    result_bytes,
    sequential_order,
    with_results,
)
from tightship.hlo.remat.search import tradeoff
from tightship.integrations.hlo_split import InSlices, Splitting, lowered, prepared
from tightship.integrations.hlo_split import advice as split_advice
from tightship.options import filled, given_options, model_options
from tightship.plan import Plan
from tightship.planners import planner
from tightship.planners.default import Options, divide_allow, top_of_peak, without_split
from tightship.planners.frontier import Changed, below
from tightship.planners.layout import lay_out
from tightship.report.hlo import assignment_page, assignment_rows, assignment_text, peak_rows, peak_table
from tightship.report.pages.plan import plan_page
from tightship.report.progress import Line
from tightship.report.text import change_lines
from tightship.result import Frontier, Planned
from tightship.simulate import Timeline, baseline, replay
from tightship.units import format_bytes, parse_budget

__all__ = [
    "assign",
    "explain_module",
    "module_frontier",
    "plan_module",
]


_ORDER = "assign --order --write FILE"
"""What schedules a module that is not."""
_LINK = (
    f"assumed for offloading: a link of {ACCELERATOR.offload / 1e9:g} GB/s to the host and "
    f"{ACCELERATOR.fetch / 1e9:g} GB/s back, and modeled times of instructions; a module does not say what its "
    "device does, so that XLA may offload other arrays"
)
_TOP = 8
"""Arrays that are named where the limit is missed."""


@dataclass(frozen=True, repr=False)
class PlannedModule(Planned):
    """A module rematerialized within a limit: its plan is that of the entry, its numbers those of the module."""

    module: Module
    remade: Result
    least: int
    budget_given: bool
    slices: InSlices | None = None
    whole: int = 0  # the peak in one piece
    notes: tuple[str, ...] = ()

    def rows(self) -> dict[str, Any]:
        return dict(self._numbers)

    @cached_property
    def _numbers(self) -> dict[str, Any]:
        module, made, plan = self.module, self.remade, self.plan
        work, names = work_of(module), sequential_order(module)
        inner = list(_inner(plan))
        rows: dict[str, Any] = {
            "peak_before": self.whole or made.peak_before,
            "peak_after": made.peak_after,
            "budget": made.limit if self.budget_given else None,
            "met": made.met,
            "lower_bound": self.least + result_bytes(module),
            "static": 0,
            "arena": _arena(made.module),
            "time_before": plan.time_before,
            "time_after": plan.time + sum(p.time - p.time_before for p in inner),
            "flops_before": sum(sum(work.flops[name].values()) for name in names),
            "flops_after": made.flops(work, names),
            "recomputed": len(made.recomputed),
            "offloaded": made.count("offload"),
            "compressed": made.count("compress"),
            "moved": plan.moved + sum(p.moved for p in inner),
            "added": made.added,
            "planner": plan.planner,
            "seconds": plan.seconds,
            "instructions": [*made.recomputed],
            "computations": 1 + len(inner),
            "graph": module.name,
        }
        if self.slices is not None and self.slices.choice is not None:
            rows |= self.slices.rows()
        if self.slices is not None and (runtime := self.slices.xla()):
            rows["runtime"] = runtime
        if self.notes:
            rows["notes"] = list(self.notes)
        if not made.met:
            rows["top"] = [{"name": name, "bytes": nbytes, "at": at} for name, nbytes, at in self._top()]
        return rows

    def _top(self) -> tuple[tuple[str, int, str], ...]:
        return top_of_peak(self.graph, replay(self.graph, self.plan.steps), self.plan.steps, _TOP)

    def __str__(self) -> str:
        rows, made, module = self._numbers, self.remade, self.module
        verdict = "within the limit" if made.met else "ABOVE the limit"
        least, before = rows["lower_bound"], rows["time_before"]
        longer = rows["time_after"] / before - 1 if before else 0.0
        flops = rows["flops_after"] - rows["flops_before"]
        facts = [
            ("peak", f"{format_bytes(made.peak_after)}, {verdict} of {format_bytes(made.limit)}"),
            ("before", f"{format_bytes(rows['peak_before'])}, as XLA counts it: results, without parameters"),
            (
                "placed",
                f"{format_bytes(rows['arena'])}, beyond parameters, by XLA's assignment of what is written",
            ),
            (
                "lower bound",
                format_bytes(least) + (": no plan meets the limit" if least > made.limit else ""),
            ),
            (
                "recomputed",
                f"{len(made.recomputed)} instructions, {made.added:+d} in all; {rows['moved']} reordered",
            ),
            ("offloaded", f"{rows['offloaded']} to the host; {rows['compressed']} compressed"),
            ("time", f"{100 * longer:+.2f} %, modeled; {flops:,} FLOPs more"),
            ("planner", f"{rows['planner']}, in {rows['seconds']:.2f} s"),
        ]
        lines = [f"plan for {module.name} ({len(module.entry.instructions)} instructions)"]
        lines += [f"  {name:<11}  {text}" for name, text in facts]
        if runtime := rows.get("runtime"):
            sizes = " → ".join(format_bytes(runtime[k]) for k in ("temp_before", "temp_after"))
            lines.append(f"  {'XLA':<11}  temporaries {sizes}, as it compiles both for the CPU")
        if not made.met:
            lines += ["at its peak"] + [
                f"  {format_bytes(n):>12}  {name} ({at})" for name, n, at in self._top()
            ]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        write_file(path, to_text(self.remade.module).encode())

    def report(self, path: Any, *, title: str = "") -> None:
        before = with_results(self.module, graph_before(self.module))
        write_file(path, plan_page(self.graph, self.drawn, rows=self.rows(), before=before).encode())

    @cached_property
    def drawn(self) -> Plan:
        """To look at: what is in memory at once is placed for that, results outside the graph."""
        layout = lay_out(self.graph, self.plan.steps, seconds=1.0)
        return replace(self.plan, residences=layout.residences, arena=layout.arena, handed=layout.handed)


def plan_module(chosen: argparse.Namespace, out: Output) -> int:
    info = planner(chosen.planner or "search", "remat")
    options = filled(info.options, given_options(chosen), "a module's planner", chosen.source)
    allow, mode = without_split(options.allow)
    options = replace(options, allow=allow) if mode else options
    budget = None if chosen.budget is None else parse_budget(chosen.budget, "--budget")
    files = targets(chosen)
    module = _module(chosen.source, out)
    module = prepared(module) if mode else _scheduled(module, _ORDER)
    before = module_peak(module)
    limit = before if budget is None else budget.resolve(before)
    began = time.perf_counter()

    lossy = getattr(options, "lossy", False)

    def plan_of(module: Module, limit: int) -> Result:
        made: Result = info.plan(module, limit, options)
        return made

    with Line(out.live, f"planning {module.name}"):
        if mode:
            slices = Splitting(module, mode, ways(allow), plan_of, lossy=lossy).plan(limit)
        else:
            slices = InSlices(module, module, plan_of(module, limit))
        advised = () if mode or slices.result.met else split_advice(module, limit, options.allow)
    seconds = time.perf_counter() - began
    module, result = slices.module, slices.result
    least = bounds(module, ways(options.allow), lossy=lossy)
    graph, plan = plan_with_results(module, *as_plan(module, result, info.name, least))
    notes = (*slices.notes, *advised, *([_LINK] if "offload" in ways(options.allow) else []))
    plan = replace(
        plan, seconds=seconds, source=chosen.source, command=chosen.command, notes=(*plan.notes, *notes)
    )
    entry = least[module.entry.name]
    answer = PlannedModule(
        plan, graph, module, result, entry, budget is not None, slices if mode else None, before, notes
    )
    rows, text = answer.rows(), [str(answer)]
    write_targets(answer, files, rows, text)
    out.answer(rows, "\n".join(text))
    return 0 if result.met else 1


def module_frontier(chosen: argparse.Namespace, out: Output, options: dict[str, Any]) -> Frontier:
    """The trade-off of a module's entry: see `hlo.remat.search.tradeoff`."""
    if given := [name for name, value in model_options(chosen).items() if value is not None]:
        raise BadInput(f"{', '.join(given)}: a module's text says all sizes", place=chosen.source)
    if given := [name for name in ("hints", "place", "hand_out") if name in options]:
        raise BadInput(f"{', '.join(given)}: no option of a module's planner", place=chosen.source)
    module = _module(chosen.source, out)
    with Line(out.live, f"planning {module.name}") as line:
        o, mode = divide_allow(Options(**options))
        say = partial(line.say, always=True)
        if not mode:
            return Frontier.of(tradeoff(module, chosen.points, o, say, peers=chosen.peers))
        module = prepared(module)
        half = replace(o, seconds=o.seconds / 2, work=o.work // 2)
        base = tradeoff(module, chosen.points, half, say, peers=chosen.peers)
        each = search.Options(
            half.seconds / chosen.points, half.work // chosen.points, seed=o.seed, allow=o.allow, lossy=o.lossy,
            host=o.host,
        )  # fmt: skip
        plan_of = partial(search.plan, options=each)
        splitting = Splitting(module, mode, ways(o.allow), plan_of, lossy=o.lossy)
        return Frontier.of(below(base, chosen.points, splitting.least, partial(_split_at, splitting), say))


def _split_at(splitting: Splitting, budget: int) -> Changed | int:
    """The plan of a module within a budget, in slices where it needs them; the bytes that are enough where there is
    none."""
    lowest = splitting.lowest
    if lowest is not None and budget < lowest.peak:
        return lowest.peak
    if (found := splitting.within(budget)) is None:
        return 0
    graph, plan = plan_with_results(found.module, *as_plan(found.module, found.result, "search"))
    if found.choice is None:
        return Changed(plan, graph, "")
    costs = found.rows()
    plan = replace(plan, time=costs.get("time_after", plan.time), time_before=costs["time_before"])
    return Changed(plan, graph, f"in {found.choice.most} slices")


def _module(path: str, out: Output) -> Module:
    with Line(out.live, f"reading {path}"):
        return read(path)


def _arena(module: Module) -> int:
    """Bytes that XLA's buffer assignment of a module takes in the device's memory beyond its parameters."""
    assignment = xla_assign.plan(module)
    return sum(a.size for a in assignment.allocations if a.kind != "parameter" and not a.space)


def _inner(plan: Plan) -> Iterator[Plan]:
    for row in plan.inner:
        yield row.plan
        yield from _inner(row.plan)


def assign(chosen: argparse.Namespace, out: Output) -> int:
    info = planner(chosen.planner, "assign")
    options = filled(info.options, given_options(chosen), f"planner {chosen.planner!r}")
    files = targets(chosen)
    module, moved = _ordered(chosen, out)
    with Line(out.live, f"assigning {module.name}"):
        result: Assignment = info.plan(module, options)
        if moved is not None and (given := hlo.read(chosen.module)).scheduled:
            before: Assignment = info.plan(given, options)
            if before.total <= result.total:  # the new order comes out no smaller
                result, module, moved = before, given, 0
    rows = assignment_rows(result)
    text = [assignment_text(result)]
    if moved is not None:
        rows["moved"] = moved
        text.append(f"  order        {moved} instructions moved")
    answer = SimpleNamespace(
        write=lambda path: write_file(path, to_text(module).encode()),
        report=lambda path: write_file(path, assignment_page(result, rows=rows).encode()),
    )
    write_targets(answer, files, rows, text)
    out.answer(rows, "\n".join(text))
    return 0


def _ordered(chosen: argparse.Namespace, out: Output) -> tuple[Module, int | None]:
    module = _module(chosen.module, out)
    if not chosen.order:
        return _scheduled(module, "--order"), None
    with Line(out.live, f"ordering {module.name}"):
        return reordered(module)


def _scheduled(module: Module, remedy: str) -> Module:
    if not module.scheduled:
        rule = f"the module is not scheduled (no is_scheduled=true in its header); {remedy} schedules it"
        raise BadInput(rule, place=module.file)
    return module


def changes_of(module: Module) -> tuple[tuple[Change, ...], Timeline]:
    """What recomputing instructions of the entry would give, simulated with modeled times, and what there is now."""
    graph = with_results(module, graph_before(module))
    return changes(graph, means=("recompute",), reorder=False), replay(graph, baseline(graph))


def explain_module(chosen: argparse.Namespace, out: Output) -> int:
    """The peak of a module, who makes it up, and what would lower it."""
    if chosen.budget is not None:
        raise BadInput("--budget is not taken for a module", place=chosen.source)
    module = _scheduled(_module(chosen.source, out), _ORDER)
    with Line(out.live, f"assigning {module.name}"):
        assignment = planner("xla", "assign").plan(module)
        live = assignment.live
        peak = peak_of(live.points.module)
        step, rows = peak_rows(live, peak)
        advised = [*advice.advice(assignment, tight.plan(module), step), *lowered(module)]
        advised.sort(key=lambda a: -a.saves)
        again, line = changes_of(module)
    answer = assignment_rows(assignment) | {
        "peak": {
            "step": step,
            "bytes": peak.nbytes,
            "instruction": peak.instruction,
            "computation": peak.computation,
            "residents": [asdict(r) for r in rows[: chosen.top]],
            "count": len(rows),
        },
        "advice": [asdict(a) for a in advised],
        "changes": [asdict(c) for c in again],
    }
    place = live.points.module.place(live.schedule[step].instruction)
    where = f"{peak.instruction} ({place})" if place else peak.instruction
    title = f"Peak: {format_bytes(peak.nbytes)}, with results and without parameters, at step {step} of"
    text: list[RenderableType] = [
        assignment_text(replace(assignment, planner="xla")),
        "",
        f"{title} {live.end}, while {where} runs",
        "",
        peak_table(rows, chosen.top),
        "",
        "What would lower it",
    ]
    text += [f"  {format_bytes(a.saves):>12}  {a.text}" for a in advised] or ["  nothing that was tried"]
    if again:
        text += ["", "\n".join(change_lines(again, line))]
    out.answer(answer, text)
    return 0
