"""What each verb does: arguments in, one answer and an exit status out."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from tightship import api
from tightship.analysis.bounds import time_bound
from tightship.cli.hlo import explain_module
from tightship.cli.module import is_module, module_frontier, plan_module
from tightship.cli.options import documented, given_options, model_options
from tightship.cli.output import Output
from tightship.cli.pack import INTERRUPTED, is_packing, verify_packing
from tightship.cli.source import Source, load_source, users_code, writable
from tightship.diagnose.changes import changes
from tightship.errors import BadInput, Infeasible
from tightship.plan import Plan
from tightship.planners.batch import MaxBatch
from tightship.planners.default import Interrupted, Options
from tightship.planners.frontier import MOST, Frontier
from tightship.planners.order.best import order_bound
from tightship.report.artifacts import SHOWN
from tightship.report.frontier import frontier_picture, frontier_rows, frontier_tables
from tightship.report.numbers import peak_of, summary
from tightship.report.pages.frontier import frontier_page
from tightship.report.progress import Line
from tightship.report.prose import change_lines, makers, peak_lines
from tightship.report.terminal import looks
from tightship.report.text import describe, peak_tables
from tightship.serde import write_file
from tightship.simulate import baseline, replay
from tightship.units import Budget, format_bytes, parse_budget

__all__ = ["demo", "explain", "frontier", "plan", "planners", "verify"]


def plan(chosen: argparse.Namespace, out: Output) -> int:
    if chosen.max_batch:
        return largest(chosen, out)
    if chosen.batch_dim is not None:
        raise BadInput(
            "which dimension is the batch is said with --max-batch", chosen.batch_dim, "--batch-dim"
        )
    if is_module(chosen.source):
        return plan_module(chosen, out)
    options = given_options(chosen)
    budget = _budget(chosen)
    path = writable(chosen.output, "--output")
    shown = {name: writable(getattr(chosen, name), f"--{name}") for name in SHOWN}
    model = writable(chosen.write, "--write")
    source = _loaded(chosen.source, out, model_options(chosen))
    if model is not None and source.program is None:
        raise BadInput(
            "a model is written where one is read: SOURCE is a model.onnx or a graph.pb",
            chosen.source,
            "--write",
        )
    if chosen.copies is not None and (model is None or source.graph.meta.get("source") != "tensorflow"):
        raise BadInput("copies are written into a graph.pb, with --write", chosen.source, "--copies")
    if options.get("level") == "scheduling":
        source = _summed(source, budget)
    interrupted = False
    try:
        if chosen.planner is None:
            made = _planned(source, budget, options, out)
        else:
            with Line(out.errors, f"planning {source.graph.name}"):
                made = api.plan_named(source.graph, chosen.planner, budget, **options).plan
    except Interrupted as end:
        made, interrupted = end.plan, True
    made = replace(made, source=chosen.source, command=chosen.command)
    whole = api.Planned(made, source.graph)
    text = [describe(made, source.graph)]
    rows = summary(made, source.graph) | {"interrupted": interrupted}
    if interrupted:
        text.append("interrupted: this is the best that was found so far")
    if source.graph.meta.get("source") == "onnx" and chosen.planner is None and not interrupted:
        rows["order_bound"] = least = order_bound(source.graph)
        text.append(f"without recomputation no order needs less than {format_bytes(least)}")
    _kept(whole, path, shown, rows, text)
    if model is not None:
        page = _write_model(source, made, model, chosen)
        rows["written"] = str(model)
        text.append(f"model written to {model}; see {page}")
    picture = looks(source.graph, made) if out.reads else []
    out.answer(rows, [text[0], *picture, "", *text[1:]])
    return INTERRUPTED if interrupted else 0 if made.met else 1


def largest(chosen: argparse.Namespace, out: Output) -> int:
    """``plan --max-batch``: the largest batch that fits, and its plan."""
    options = given_options(chosen)
    if chosen.budget is None:
        raise BadInput("the largest batch is asked for with a budget", "none", "--budget")
    if chosen.write is not None:
        raise BadInput("with --max-batch no model is written", chosen.write, "--write")
    dim = chosen.batch_dim or 0
    if dim < 0:
        raise BadInput("dimensions are numbered from 0", dim, "--batch-dim")
    path = writable(chosen.output, "--output")
    shown = {name: writable(getattr(chosen, name), f"--{name}") for name in SHOWN}
    source = _loaded(chosen.source, out)
    if source.parts is None:
        raise BadInput(
            "the batch of a model can change: SOURCE is module:factory", chosen.source, "--max-batch"
        )
    from tightship.frontends.torch.structure import batched

    with (
        Line(out.errors, "looking for the largest batch") as line,
        users_code("running the model at another batch", chosen.source),
    ):
        found = api.max_batch(
            **source.parts,
            budget=_budget(chosen),
            dim=dim,
            say=lambda text: line.say(text, always=True),
            **options,
        )
    made = replace(found.plan, source=chosen.source, command=chosen.command)
    text = [
        "\n".join(_largest(found, dim, *batched(source.parts["sample"], dim))),
        describe(made, found.graph),
    ]
    tried = [{"batch": n, "met": met} for n, met in found.tried.items()]
    rows = {"batch": found.batch, "tried": tried, "unit": found.unit, "refused": found.refused}
    rows["interrupted"] = found.interrupted
    rows |= summary(made, found.graph)
    _kept(api.Planned(made, found.graph), path, shown, rows, text)
    out.answer(rows, "\n".join(text))
    return INTERRUPTED if found.interrupted else 0


def _largest(found: MaxBatch, dim: int, count: int, tensors: int) -> Iterator[str]:
    """The answer, and what it rests on."""
    ended = ", as far as was tried: interrupted" if found.interrupted else ""
    yield f"largest batch: {found.batch}{ended}"
    yield f"  the batch is dimension {dim} of {count} of the sample's {tensors} tensors (--batch-dim says which)"
    if found.unit > 1:
        yield f"  the model runs at multiples of {found.unit}"
    above = [n for n in found.refused if n > found.batch and n % found.unit == 0]
    if above:
        yield f"  it does not run at {min(above)}: {found.refused[min(above)]}"


def frontier(chosen: argparse.Namespace, out: Output) -> int:
    options = given_options(chosen)
    drawing, page = writable(chosen.picture, "--svg"), writable(chosen.report, "--report")
    if not 1 <= chosen.points <= MOST:
        raise BadInput(f"a frontier has 1 to {MOST} points", chosen.points, "option --points")
    if is_module(chosen.source):
        found = module_frontier(chosen, out, options)
    else:
        found = _frontier(chosen, out, options)
    rows = frontier_rows(found)
    text: list[RenderableType] = [*frontier_tables(found)]
    if drawing is not None:
        write_file(drawing, frontier_picture(found).encode())
        rows["picture"] = str(drawing)
        text.append(f"drawn in {drawing}")
    if page is not None:
        write_file(page, frontier_page(found).encode())
        rows["report"] = str(page)
        text.append(f"shown in {page}")
    out.answer(rows, text)
    return INTERRUPTED if found.interrupted else 0


def _frontier(chosen: argparse.Namespace, out: Output, options: dict[str, Any]) -> Frontier:
    source = _loaded(chosen.source, out, model_options(chosen))
    with Line(out.errors, f"planning {source.graph.name}") as line:
        return api.frontier_of(
            source.graph,
            chosen.points,
            program=source.captured,
            peers=chosen.peers,
            say=lambda text: line.say(text, always=True),
            **options,
        )


def explain(chosen: argparse.Namespace, out: Output) -> int:
    options = given_options(chosen)
    if chosen.top < 1:
        raise BadInput("a table has at least one row", chosen.top, "option --top")
    if is_module(chosen.source):
        return explain_module(chosen, out)
    budget = _budget(chosen)
    source = _loaded(chosen.source, out, model_options(chosen))
    made, failure = source.plan, None
    if made is not None and made.digest != source.graph.digest:
        rule = f"a plan is for the graph in its file, whose digest is {source.graph.digest[:12]}"
        raise BadInput(rule, made.digest[:12], chosen.source)
    if budget is not None:
        try:
            made = _planned(source, budget, options, out)
        except Infeasible as error:  # the peak is explained all the same
            made, failure = None, error
    graph = source.graph
    before = peak_of(graph, baseline(graph))
    rows: dict[str, object] = {"graph": graph.name, "static": graph.static_bytes, "before": before.as_dict()}
    with Line(out.errors, "simulating changes"):
        found = changes(graph)
    line = replay(graph, baseline(graph))
    rows["makers"] = [m.as_dict() for m in makers(graph, baseline(graph), line)]
    rows["changes"] = [c.as_dict() for c in found]
    text: list[RenderableType] = ["\n".join(peak_lines(graph, baseline(graph))), ""]
    text += ["\n".join(change_lines(found, line)), ""]
    text += peak_tables(before, title="Peak before planning", top=chosen.top)
    if made is not None:
        after = peak_of(graph, made.steps)
        of_plan = makers(graph, made.steps, replay(graph, made.steps))
        rows |= {"planned": after.as_dict(), "plan": summary(made, graph)}
        rows["planned_makers"] = [m.as_dict() for m in of_plan]
        text[2:2] = ["\n".join(["With the plan:", *peak_lines(graph, made.steps)]), ""]
        text += ["", *peak_tables(after, title="Peak of the plan", top=chosen.top), "", describe(made, graph)]
    if failure is not None:
        rows["error"] = {"type": type(failure).__name__, "message": str(failure)}
        text += ["", str(failure)]
    out.answer(rows, text)
    return 1 if failure is not None else 0


def verify(chosen: argparse.Namespace, out: Output) -> int:
    if is_packing(chosen.plan):
        return verify_packing(chosen, out)
    if chosen.capacity is not None:
        raise BadInput("a capacity is for a packing; a plan has its budget", chosen.capacity, "--capacity")
    if chosen.pool or chosen.heap:
        raise BadInput("pools are for a packing", (chosen.pool or chosen.heap)[0], "--pool, --heap")
    source = _loaded(chosen.plan, out)
    if source.plan is None:
        raise BadInput("what is verified is a plan", "a graph", chosen.plan)
    graph = (
        source.graph if chosen.source is None else _loaded(chosen.source, out, model_options(chosen)).graph
    )
    found = api.violations(source.plan, graph)
    if source.plan.digest != graph.digest:
        del found[1:]  # it is for another graph: what else does not fit says nothing
    rows = [
        {"code": v.code, "step": v.step, "subjects": list(v.subjects), "message": v.message} for v in found
    ]
    made = source.plan
    head = f"{len(made.steps)} steps, {len(made.residences)} residences"
    if not found:
        text = f"{chosen.plan}: nothing is wrong ({head})"
    else:
        count = f"{len(found)} violation{'s' if len(found) > 1 else ''}"
        text = "\n".join([f"{chosen.plan}: {count} ({head})", *(f"  {v}" for v in found)])
    out.answer({"violations": rows, "peak": made.peak, "budget": made.budget, "steps": len(made.steps)}, text)
    return 1 if found else 0


def planners(chosen: argparse.Namespace, out: Output) -> int:
    from tightship.planners import planners as every

    rows, table = [], Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("planner", no_wrap=True)
    table.add_column("decides", no_wrap=True)
    table.add_column("how", overflow="fold")
    for name, info in every().items():
        fields = getattr(info.options, "__dataclass_fields__", {})
        help_of = documented(info.options) if fields else {}
        options = [
            {"name": n, "default": _plain(f.default), "help": help_of.get(n, "")} for n, f in fields.items()
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


def _summed(source: Source, budget: Budget | None) -> Source:
    """A graph of TensorFlow's with its sums as Grappler's scheduling has them; anything else as it is."""
    if source.program is None or source.graph.meta.get("source") != "tensorflow":
        return source
    from tightship.integrations.tensorflow_write import accumulated

    peak, static = replay(source.graph, baseline(source.graph)).peak, source.graph.static_bytes
    limit = peak if budget is None else budget.resolve(peak, static=static)
    made = accumulated(source.program, limit)
    return replace(source, graph=made.graph, program=made)


def _write_model(source: Source, made: Plan, path: Path, chosen: argparse.Namespace) -> str:
    """Write the model as planned; where it is said how it must be run."""
    if chosen.source.endswith(".onnx"):
        from tightship.integrations.onnx_write import write_model

        write_model(source.program, made, path)
        return "docs/inference.md for what onnxruntime must be told"
    from tightship.integrations.tensorflow_write import write_graph

    write_graph(source.program, made, path, chosen.copies or "copy")
    return "docs/tensorflow.md for what a session must be told"


def _kept(
    made: api.Planned,
    path: Path | None,
    shown: Mapping[str, Path | None],
    rows: dict[str, Any],
    text: list[str],
) -> None:
    """Write a plan and every way to look at it that was asked for, and say so."""
    if path is not None:
        made.save(path)
        rows["output"] = str(path)
        text.append(f"written to {path}")
    for name, target in shown.items():
        if target is not None:
            getattr(made, name)(target)
            rows[name] = str(target)
            text.append(f"{SHOWN[name]} {target}")


def _plain(value: object) -> object:
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _budget(chosen: argparse.Namespace) -> Budget | None:
    return None if chosen.budget is None else parse_budget(chosen.budget, "--budget")


def _loaded(text: str, out: Output, options: dict[str, object] | None = None) -> Source:
    with Line(out.errors, f"reading {text}"):
        return load_source(text, options)


def _planned(source: Source, budget: Budget | None, options: dict[str, Any], out: Output) -> Plan:
    graph = source.graph
    before = replay(graph, baseline(graph))
    chosen = Options(**options)
    with Line(out.errors, f"planning {graph.name}", step_time=before.time, limit=chosen.seconds) as line:
        if line.shown and budget is not None:
            limit = line.budget = budget.resolve(before.peak, static=graph.static_bytes)
            if chosen.allow == Options().allow:
                line.least = time_bound(graph, limit, redraw=False)
        return api.plan_graph(graph, budget, progress=line.planning, **options).plan
