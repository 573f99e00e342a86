"""What each verb does: arguments to a request, the request's answer to output and an exit status."""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from rich.console import RenderableType

from tightship import api
from tightship.analysis.bounds import time_bound
from tightship.api import BatchRequest, FrontierRequest, PlanRequest
from tightship.cli.explain import explain_snapshot, explain_why
from tightship.cli.output import INTERRUPTED, Output, targets, write_targets
from tightship.cli.pack import is_packing, verify_packing
from tightship.diagnose.changes import changes
from tightship.errors import BadInput, Infeasible, TightshipError, Unsupported
from tightship.frontends.memory_snapshot import is_snapshot
from tightship.options import given_options, help_of, model_options
from tightship.planners import planners as every_planner
from tightship.planners.batch import MaxBatch
from tightship.planners.default import Interrupted, Options, PlanOptions, read_options
from tightship.planners.frontier import MOST
from tightship.planners.order.best import order_bound
from tightship.report.numbers import makers, peak_of
from tightship.report.progress import Line
from tightship.report.text import (
    change_lines,
    new_table,
    peak_lines,
    peak_tables,
    plan_chart,
    remedy_table,
    share_tables,
)
from tightship.result import Planned, SplitPlanned
from tightship.simulate import baseline, replay
from tightship.sources import Source, load_source, load_step, users_code
from tightship.units import Budget, format_bytes, parse_budget

__all__ = ["demo", "estimate", "explain", "frontier", "plan", "planners", "verify"]


def is_module(text: str) -> bool:
    """Whether a SOURCE is the text of an HLO module: by its ending."""
    return text.endswith((".hlo", ".txt"))


def plan(chosen: argparse.Namespace, out: Output) -> int:
    if chosen.max_batch:
        return max_batch(chosen, out)
    if chosen.batch_dim is not None:
        raise BadInput("--batch-dim requires --max-batch")
    if is_module(chosen.source):
        from tightship.cli.hlo import plan_module

        return plan_module(chosen, out)
    options, budget, files = given_options(chosen), _budget(chosen), targets(chosen)
    seconds = (
        math.inf if chosen.planner is not None else read_options(cast(PlanOptions, options), "plan").seconds
    )
    source = _loaded(chosen.source, out, model_options(chosen), seconds)
    kind = "" if source.program is None else source.graph.meta.get("source", "")
    if chosen.write is not None and kind not in ("onnx", "tensorflow", "tflite"):
        raise BadInput(
            "--write requires a model.onnx, graph.pb, model.keras or model.tflite as SOURCE",
            place=chosen.source,
        )
    for given, option in ((chosen.optimize, "optimize"), (chosen.inputs, "inputs")):
        if given is not None and (chosen.write is None or kind != "onnx"):
            raise BadInput(f"--{option} requires a model.onnx as SOURCE, and --write")
    if chosen.offline_plan and (chosen.write is None or kind != "tflite"):
        raise BadInput("--offline-plan requires a model.tflite as SOURCE, and --write", place=chosen.source)
    if chosen.copies is not None and (chosen.write is None or kind != "tensorflow"):
        raise BadInput("--copies requires a graph.pb as SOURCE, and --write", place=chosen.source)
    if kind == "tensorflow" and options.get("level") == "scheduling":
        source = _accumulated(source, budget)
    original = source
    if kind == "onnx" and chosen.write is not None:
        source = _optimized(source, chosen, options)
    kept = "default" if source.step is not None else None  # what is measured once is planned once
    request = PlanRequest(
        source.graph, budget, chosen.planner, options, kept, source.took, source.program, source.step
    )
    try:
        answer, interrupted = _solved(request, out), False
    except Interrupted as end:
        answer, interrupted = Planned(end.plan, source.graph), True
    if isinstance(answer, SplitPlanned):
        source = replace(source, graph=answer.graph, program=answer.program)
    answer = answer.changed(source=chosen.source, command=chosen.command)
    rows = answer.rows() | {"interrupted": interrupted}
    text: list[RenderableType] = [str(answer)]
    text += [*plan_chart(answer.graph, answer.plan), ""] if out.reads else [""]
    if interrupted:
        text.append("interrupted: this is the best that was found so far")
    if kind == "onnx" and chosen.planner is None and not interrupted:
        rows["order_bound"] = least = order_bound(source.graph)
        text.append(f"without recomputation no order needs less than {format_bytes(least)}")
    must = chosen.optimize == "none" or answer.plan.budget is not None
    writing = _Writing(
        answer.plan, source.graph, source, chosen.copies, chosen.offline_plan, original, chosen.inputs, must
    )
    write_targets(answer if chosen.write is None else writing, files, rows, text)
    if writing.answers:
        rows["runtime"] = writing.answers[0].rows()
        text += writing.answers[0].lines()
    if chosen.write is not None:
        text.append(f"see docs/{'inference' if kind == 'onnx' else 'tensorflow'}.md for how to run it")
    out.answer(rows, text)
    return INTERRUPTED if interrupted else 0 if answer.met else 1


@dataclass(frozen=True, repr=False)
class _Writing(Planned):
    """A plan of a model's file, which can be written as planned."""

    source: Source
    copies: str | None
    offline_plan: bool
    original: Source
    inputs: str | None = None
    must: bool = False  # written as planned, whatever onnxruntime says
    answers: list[Any] = field(default_factory=list)  # what onnxruntime said of the file

    def write(self, path: Path) -> None:
        program: Any = self.source.program
        if self.graph.meta["source"] == "tflite":
            from tightship.integrations.tflite_write import write_model as write_tflite

            write_tflite(program, self.plan, path, offsets=self.offline_plan)
        elif self.graph.meta["source"] == "tensorflow":
            from tightship.integrations.tensorflow_write import write_graph

            write_graph(program, self.plan, path, self.copies or "copy")
        elif not _has_onnxruntime():
            from tightship.integrations.onnx_write import write_model

            write_model(program, self.plan, path)
        else:
            from tightship.integrations.onnx_compare import read_feeds, write_best

            feeds = None if self.inputs is None else read_feeds(self.inputs)
            original: Any = self.original.program
            self.answers.append(write_best(program, self.plan, original, path, feeds, must=self.must))


def _has_onnxruntime() -> bool:
    return importlib.util.find_spec("onnxruntime") is not None


def _optimized(source: Source, chosen: argparse.Namespace, options: dict[str, Any]) -> Source:
    """A model as onnxruntime optimizes it, where it is installed: what is planned is then what runs. Slices are of
    onnx's own ops, and are cut before the runtime makes others of them."""
    if chosen.inputs is not None and not _has_onnxruntime():
        raise Unsupported("--inputs", "onnxruntime is not installed", "pip install onnxruntime")
    level = chosen.optimize or ("none" if "split" in str(options.get("allow", "")) else "all")
    if level == "none":
        return source
    if not _has_onnxruntime():
        if chosen.optimize is None:
            return source
        raise Unsupported("--optimize", "onnxruntime is not installed", "pip install onnxruntime")
    from tightship.integrations.onnxruntime import optimized

    program: Any = source.program
    folder = tempfile.mkdtemp(prefix="tightship-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        made = optimized(program, Path(folder), chosen.shape, level)
    except TightshipError as error:
        if chosen.optimize is not None:
            raise
        notes = (*program.notes, f"planned as it is, not as onnxruntime optimizes it: {error}")
        return replace(source, program=replace(program, notes=notes))
    return replace(source, graph=made.graph, program=made)


def max_batch(chosen: argparse.Namespace, out: Output) -> int:
    """``plan --max-batch``: the largest batch that fits, and its plan."""
    dim = chosen.batch_dim or 0
    for given, fault in (
        (chosen.budget is None, "--max-batch requires --budget"),
        (chosen.write is not None, "--write does not go with --max-batch"),
        (dim < 0, f"--batch-dim is {dim}: dimensions are numbered from 0"),
    ):
        if given:
            raise BadInput(fault)
    options, files = given_options(chosen), targets(chosen)
    step = _loaded(chosen.source, out).step
    if step is None:
        raise BadInput("--max-batch requires module:factory as SOURCE", place=chosen.source)
    with (
        Line(out.errors, "looking for the largest batch") as line,
        users_code("running the model at another batch", chosen.source),
    ):
        request = BatchRequest(step, _budget(chosen), dim, options)
        best = request.solve(lambda text: line.say(text, always=True))
    from tightship.frontends.torch.structure import batched

    answer = Planned(best.plan, best.graph).changed(source=chosen.source, command=chosen.command)
    tried = [{"batch": n, "met": met} for n, met in best.tried.items()]
    rows = {"batch": best.batch, "tried": tried, "unit": best.unit, "refused": best.refused}
    rows |= {"interrupted": best.interrupted} | answer.rows()
    text: list[str] = [*_batch_lines(best, dim, *batched(step.sample, dim)), str(answer)]
    write_targets(answer, files, rows, text)
    out.answer(rows, "\n".join(text))
    return INTERRUPTED if best.interrupted else 0


def _batch_lines(best: MaxBatch, dim: int, count: int, tensors: int) -> Iterator[str]:
    """The answer, and what it rests on."""
    ended = ", as far as was tried: interrupted" if best.interrupted else ""
    yield f"largest batch: {best.batch}{ended}"
    yield f"  the batch is dimension {dim} of {count} of the sample's {tensors} tensors (--batch-dim says which)"
    if best.unit > 1:
        yield f"  the model runs at multiples of {best.unit}"
    above = [n for n in best.refused if n > best.batch and n % best.unit == 0]
    if above:
        yield f"  it does not run at {min(above)}: {best.refused[min(above)]}"


def frontier(chosen: argparse.Namespace, out: Output) -> int:
    options, files = given_options(chosen), targets(chosen)
    if not 1 <= chosen.points <= MOST:
        raise BadInput(f"--points is {chosen.points}: a frontier has 1 to {MOST}")
    if is_module(chosen.source):
        from tightship.cli.hlo import module_frontier

        answer = module_frontier(chosen, out, options)
    else:
        source = _loaded(chosen.source, out, model_options(chosen))
        request = FrontierRequest(source.graph, chosen.points, source.program, chosen.peers, options)
        with Line(out.errors, f"planning {source.graph.name}") as line:
            answer = request.solve(lambda text: line.say(text, always=True))
    rows, text = answer.rows(), answer.tables()
    write_targets(answer, files, rows, text)
    out.answer(rows, text)
    return INTERRUPTED if answer.interrupted else 0


def explain(chosen: argparse.Namespace, out: Output) -> int:
    options = given_options(chosen)
    if chosen.top < 1:
        raise BadInput(f"--top is {chosen.top}: a table has at least one row")
    if is_snapshot(chosen.source):
        return explain_snapshot(chosen, out)
    if chosen.report is not None:
        raise BadInput("--report requires a memory snapshot: plan --report draws a plan", place=chosen.source)
    if is_module(chosen.source):
        if chosen.why is not None:
            raise BadInput(
                "--why requires a plan: name a plan.json, or a model and --budget", place=chosen.source
            )
        from tightship.cli.hlo import explain_module

        return explain_module(chosen, out)
    budget = _budget(chosen)
    source = _loaded(chosen.source, out, model_options(chosen))
    graph, planned, failure = source.graph, source.plan, None
    if planned is not None:
        api.check_digest(planned, graph, chosen.source)
    if budget is not None:
        try:
            planned = _solved(PlanRequest(graph, budget, options=options), out).plan
        except Infeasible as error:  # the peak is explained all the same
            planned, failure = None, error
    if chosen.why is not None:
        if failure is not None:
            raise failure
        if planned is None:
            raise BadInput("--why requires a plan: name a plan.json, or add --budget", place=chosen.source)
        return explain_why(chosen.why, Planned(planned, graph), out)
    steps = baseline(graph)
    before, line = peak_of(graph, steps), replay(graph, steps)
    with Line(out.errors, "simulating changes"):
        cheapest = changes(graph)
    rows: dict[str, object] = {"graph": graph.name, "static": graph.static_bytes, "before": before.as_dict()}
    rows["makers"] = [asdict(m) for m in makers(graph, steps, line)]
    rows["changes"] = [asdict(c) for c in cheapest]
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
    if failure is not None:
        rows["error"] = {"type": type(failure).__name__, "message": str(failure)}
        text += ["", str(failure)]
    out.answer(rows, text)
    return 1 if failure is not None else 0


def estimate(chosen: argparse.Namespace, out: Output) -> int:
    if chosen.top < 1:
        raise BadInput(f"--top is {chosen.top}: a table has at least one row")
    memory = None if chosen.fits is None else parse_budget(chosen.fits, "--fits")
    if memory is not None and memory.bytes is None:
        raise BadInput(f"--fits is {chosen.fits!r}: give bytes, such as 24GiB")
    with Line(out.errors, f"reading {chosen.source}"):
        step = load_step(chosen.source)
    options: Any = {
        "accumulate": chosen.accumulate,
        "checkpoint": chosen.checkpoint,
        "autocast": chosen.autocast,
    }
    with (
        Line(out.errors, "running a step without data"),
        users_code("running the model on its sample", chosen.source),
    ):
        answer = api.estimate(step.model, step.sample, step.optimizer, step.loss_fn, chosen.device, **options)
    known = memory is not None or answer.device.memory > 0
    if chosen.remedies and not known:
        raise BadInput("--remedies requires --fits, or a --device whose memory is known")
    rows, lines = answer.rows(memory), "\n".join([*answer.lines(memory), ""])
    text: list[RenderableType] = [lines, *share_tables(answer, chosen.top)]
    if chosen.remedies:
        with Line(out.errors, "trying what would make it fit"):
            remedies = answer.remedies(memory)
        rows["remedies"] = [asdict(r) for r in remedies]
        text += ["", remedy_table(remedies)]
    out.answer(rows, text)
    return 1 if memory is not None and not answer.fits(memory) else 0


def verify(chosen: argparse.Namespace, out: Output) -> int:
    if is_packing(chosen.plan):
        return verify_packing(chosen, out)
    for option in ("capacity", "pool", "heap"):
        if getattr(chosen, option):
            raise BadInput(f"--{option} requires a packing; a plan has its budget", place=chosen.plan)
    source = _loaded(chosen.plan, out)
    plan, graph = source.plan, source.graph
    if plan is None:
        raise BadInput("cannot verify a graph: name a plan.json that plan --output wrote", place=chosen.plan)
    if chosen.source is not None:
        graph = _loaded(chosen.source, out, model_options(chosen)).graph
    faults = api.violations(plan, graph)
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


def _accumulated(source: Source, budget: Budget | None) -> Source:
    """A graph of TensorFlow's with its sums as Grappler's scheduling has them."""
    from tightship.integrations.tensorflow_write import accumulated

    peak, static = replay(source.graph, baseline(source.graph)).peak, source.graph.static_bytes
    limit = peak if budget is None else budget.resolve(peak, static=static)
    program: Any = source.program
    program = accumulated(program, limit)
    return replace(source, graph=program.graph, program=program)


def _plain(value: object) -> object:
    """As JSON has it, which knows no infinity: no limit is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _budget(chosen: argparse.Namespace) -> Budget | None:
    return None if chosen.budget is None else parse_budget(chosen.budget, "--budget")


def _loaded(
    text: str, out: Output, options: dict[str, object] | None = None, seconds: float = math.inf
) -> Source:
    with Line(out.errors, f"reading {text}"):
        return load_source(text, options, seconds=seconds)


def _solved(request: PlanRequest, out: Output) -> Planned:
    """The request's plan, with what is being found on the live line."""
    graph, budget = request.graph, request.budget
    options = None if request.planner is not None else api.plan_options(graph, request.options)
    before = replay(graph, baseline(graph))
    limit = 0.0 if options is None else options.seconds
    with Line(out.errors, f"planning {graph.name}", step_time=before.time, limit=limit) as line:
        if line.shown and isinstance(budget, Budget) and options is not None:
            line.budget = budget.resolve(before.peak, static=graph.static_bytes)
            if options.allow == Options().allow:
                line.least = time_bound(graph, line.budget, redraw=False)
        return request.solve(line.planning)
