"""Verbs that need no planner loaded before they run, and what all verbs read alike: arguments to a request, the
request's answer to output and an exit status. A verb imports what it needs when it runs: most commands are short."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from tightship.cli.output import Output
from tightship.errors import BadInput
from tightship.files import begins_with
from tightship.options import help_of, model_options
from tightship.report.progress import Line
from tightship.sources import Source, load_source, load_step, users_code
from tightship.units import Budget, parse_budget

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["demo", "estimate", "is_module", "loaded", "planners", "read_budget", "verify"]


def estimate(chosen: argparse.Namespace, out: Output) -> int:
    if chosen.top < 1:
        raise BadInput(f"--top is {chosen.top}: a table has at least one row")
    memory = None if chosen.fits is None else parse_budget(chosen.fits, "--fits")
    if memory is not None and memory.bytes is None:
        raise BadInput(f"--fits is {chosen.fits!r}: give bytes, such as 24GiB")
    with Line(out.live, f"reading {chosen.source}"):
        ranks = {n: x for n in ("ranks", "rank") if (x := getattr(chosen, n)) is not None}
        step = load_step(chosen.source, as_it_is=True, **ranks)
    options: Any = {
        "accumulate": chosen.accumulate,
        "checkpoint": chosen.checkpoint,
        "autocast": chosen.autocast,
        "compiled": chosen.compiled,
    }
    with (
        Line(out.live, "running a step without data"),
        users_code("running the model on its sample", chosen.source),
    ):
        from tightship import api

        answer = api.estimate(step.model, step.sample, step.optimizer, step.loss_fn, chosen.device, **options)
    known = memory is not None or answer.device.memory > 0
    if chosen.remedies and not known:
        raise BadInput("--remedies requires --fits, or a --device whose memory is known")
    rows, lines = answer.rows(memory), "\n".join([*answer.lines(memory), ""])
    from tightship.report.text import remedy_table, share_tables

    text: list[RenderableType] = [lines, *share_tables(answer, chosen.top)]
    if chosen.remedies:
        with Line(out.live, "trying what would make it fit"):
            remedies = answer.remedies(memory)
        rows["remedies"] = [asdict(r) for r in remedies]
        text += ["", remedy_table(remedies)]
    out.answer(rows, text)
    return 1 if known and not answer.fits(memory) else 0


def verify(chosen: argparse.Namespace, out: Output) -> int:
    if is_packing(chosen.plan):
        from tightship.cli.pack import verify_packing

        return verify_packing(chosen, out)
    for option in ("capacity", "pool", "bank", "heap"):
        if getattr(chosen, option):
            raise BadInput(f"--{option} requires a packing; a plan has its budget", place=chosen.plan)
    source = loaded(chosen.plan, out)
    plan, graph = source.plan, source.graph
    if plan is None:
        raise BadInput("cannot verify a graph: name a plan.json that plan --output wrote", place=chosen.plan)
    if chosen.source is not None:
        graph = loaded(chosen.source, out, model_options(chosen)).graph
    from tightship.verify import verify as violations

    faults = violations(graph, plan)
    if plan.digest != graph.digest:
        del faults[1:]  # it is for another graph: what else does not fit says nothing
    rows = [asdict(v) for v in faults]
    count = f"{len(faults):,} violation{'' if len(faults) == 1 else 's'}"
    size = f"{len(graph.ops):,} ops, {len(plan.residences):,} residences"
    head = f"{count} ({size})" if faults else f"OK ({count}, {size})"
    text = "\n".join([f"{chosen.plan}: {head}", *(f"  {v}" for v in faults)])
    out.answer({"violations": rows, "peak": plan.peak, "budget": plan.budget, "steps": len(plan.steps)}, text)
    return 1 if faults else 0


def planners(chosen: argparse.Namespace, out: Output) -> int:
    from tightship.planners import planners as every_planner
    from tightship.report.tables import new_table

    rows, table = [], new_table(("planner", 14, None), ("decides", 10, None), ("how", 10, None))
    for name, info in every_planner().items():
        options = [
            {"name": f.name, "default": _plain(f.default), "help": help_of(f)} for f in fields(info.options)
        ]
        rows.append({"name": name, "group": info.group, "summary": info.summary, "options": options})
        table.add_row(name, info.group or "everything", info.summary)
    out.answer({"planners": rows}, table)
    return 0


def demo(chosen: argparse.Namespace, out: Output) -> int:
    from tightship.demo import run

    result = run(out_dir=chosen.out, steps=chosen.steps, console=out.errors)
    out.answer(result.as_dict(), result.tables())
    return 0 if result.holds else 1


# --- parts ---


def _plain(value: object) -> object:
    """As JSON has it, which knows no infinity: no limit is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def is_packing(path: str) -> bool:
    """Whether a file is to be verified as a packing: by its name, else by how it begins."""
    name = path.lower()
    if name.endswith((".csv", ".json")):
        return name.endswith(".csv")
    begin = begins_with(path, 64)
    return bool(begin) and not begin.lstrip().startswith(b"{")


def is_module(text: str) -> bool:
    """Whether a SOURCE is the text of an HLO module: by its ending."""
    return text.endswith((".hlo", ".txt"))


def read_budget(chosen: argparse.Namespace) -> Budget | None:
    return None if chosen.budget is None else parse_budget(chosen.budget, "--budget")


def loaded(
    text: str, out: Output, options: dict[str, object] | None = None, seconds: float = math.inf
) -> Source:
    with Line(out.live, f"reading {text}"):
        return load_source(text, options, seconds=seconds)
