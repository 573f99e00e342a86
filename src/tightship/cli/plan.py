"""``plan``, for one budget or the largest batch, and ``frontier``, for many: arguments to a request, and what is
written of its answer."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tightship.analysis.bounds import time_bound
from tightship.cli.output import INTERRUPTED, Output, targets, write_targets
from tightship.cli.verbs import is_module, loaded, read_budget
from tightship.errors import BadInput, TightshipError, Unsupported
from tightship.files import scratch_folder, write_file
from tightship.options import given_options, model_options
from tightship.planners.default import Interrupted, Options, PlanOptions, read_options
from tightship.planners.frontier import MOST
from tightship.report.progress import Line
from tightship.requests import BatchRequest, FrontierRequest, PlanRequest, plan_options
from tightship.result import Planned, SplitPlanned
from tightship.simulate import baseline, replay
from tightship.sources import Source, users_code
from tightship.units import Budget, format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tightship.planners.batch import MaxBatch

__all__ = ["frontier", "plan", "solved"]


def plan(chosen: argparse.Namespace, out: Output) -> int:
    if chosen.max_batch:
        return max_batch(chosen, out)
    if chosen.batch_dim is not None:
        raise BadInput("--batch-dim requires --max-batch")
    if chosen.what_if is not None:
        if chosen.report is None or chosen.planner is not None or is_module(chosen.source):
            raise BadInput("--what-if requires --report, and no --planner and no module.txt")
        if not 1 <= chosen.what_if <= MOST:
            raise BadInput(f"--what-if is {chosen.what_if}: a frontier has 1 to {MOST}")
    if is_module(chosen.source):
        from tightship.cli.hlo import plan_module

        return plan_module(chosen, out)
    if chosen.bank:
        from tightship.planners.banks import parse_banks

        parse_banks(chosen.bank)  # what is wrong with them is said before the work is done
    options, budget, files = given_options(chosen), read_budget(chosen), targets(chosen)
    seconds = (
        math.inf if chosen.planner is not None else read_options(cast(PlanOptions, options), "plan").seconds
    )
    source = loaded(chosen.source, out, model_options(chosen), seconds)
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
        answer, interrupted = solved(request, out), False
    except Interrupted as end:
        answer, interrupted = Planned(end.plan, source.graph), True
    if isinstance(answer, SplitPlanned):
        source = replace(source, graph=answer.graph, program=answer.program)
    answer = answer.changed(source=chosen.source, command=chosen.command)
    rows = answer.rows() | {"interrupted": interrupted}
    text: list[RenderableType] = [str(answer)]
    if out.reads:
        from tightship.report.numbers import module_costs
        from tightship.report.text import module_tables, plan_chart

        text += plan_chart(answer.graph, answer.plan)
        if costs := module_costs(answer.graph, answer.plan.steps):
            text += ["", *module_tables(costs, top=8)]
    text.append("")
    if interrupted:
        text.append("interrupted: this is the best that was found so far")
    if kind == "onnx" and chosen.planner is None and not interrupted:
        from tightship.planners.order.best import order_bound

        rows["order_bound"] = least = order_bound(source.graph)
        text.append(f"without recomputation no order needs less than {format_bytes(least)}")
    short = _banked(answer, chosen, files, rows, text) if chosen.bank else False
    must = chosen.optimize == "none" or answer.plan.budget is not None
    if chosen.what_if is not None and not interrupted:
        beside = FrontierRequest(
            original.graph, chosen.what_if, original.program, False, options, original.step
        )
        with Line(out.live, "planning for other budgets") as line:
            others = beside.solve(lambda text: line.say(text, always=True))
        answer, rows["what_if"] = replace(answer, frontier=others), others.rows()["points"]
    writing = _Writing(
        answer.plan, source.graph, source, chosen.copies, chosen.offline_plan, original, chosen.inputs, must,
        frontier=answer.frontier,
    )  # fmt: skip
    write_targets(answer if chosen.write is None else writing, files, rows, text)
    if writing.answers:
        rows["runtime"] = writing.answers[0].rows()
        text += writing.answers[0].lines()
    if chosen.write is not None:
        text.append(f"see docs/{'inference' if kind == 'onnx' else 'tensorflow'}.md for how to run it")
    out.answer(rows, text)
    return INTERRUPTED if interrupted else 0 if answer.met and not short else 1


def _banked(
    answer: Planned, chosen: argparse.Namespace, files: dict[str, Path], rows: dict[str, Any], text: list[Any]
) -> bool:
    """The plan's arena in banks instead: says where everything lies, and writes the header. Whether a bank is too
    small."""
    from tightship.cli.pack import bank_lines, bank_rows, why_unmet
    from tightship.planners.banks import assign_banks, parse_banks, problem_of

    problem = problem_of(answer.graph, answer.plan, parse_banks(chosen.bank))
    banked = assign_banks(problem)
    found = bank_rows(problem, banked)
    rows["banks"] = found.pop("pools")
    rows |= found | {"banks_met": banked.met}
    said = (
        f"{r['name']} {format_bytes(r['arena'])} ({r['buffers']} tensor{'' if r['buffers'] == 1 else 's'})"
        for r in rows["banks"]
    )
    text += [f"banks: {', '.join(said)}", *bank_lines(banked)]
    if not banked.met:
        unmet, why = why_unmet(problem, banked.solution)
        rows |= unmet
        text.append(why)
    path = files.pop("arena_header", None)
    if path is not None and banked.met:
        from tightship.report.c_header import header_of_packing

        title = Path(chosen.source).stem
        write_file(path, header_of_packing(problem, banked.solution, title).encode())
        rows["arena_header"] = str(path)
        text.append(f"C header in {path}")
    elif path is not None:
        text.append(f"not written to {path}: a capacity is not met")
    return not banked.met


@dataclass(frozen=True, repr=False)
class _Writing(Planned):
    """A plan of a model's file, which can be written as planned."""

    source: Source
    copies: str | None
    offline_plan: bool
    original: Source
    inputs: str | None = None
    must: bool = False  # written as planned, whatever onnxruntime says
    answers: list[Any] = field(default_factory=list)  # what the file takes in its runtime

    def write(self, path: Path) -> None:
        program: Any = self.source.program
        if self.graph.meta["source"] == "tflite":
            from tightship.integrations.tflite_write import write_model as write_tflite

            self.answers.append(write_tflite(program, self.plan, path, offsets=self.offline_plan))
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
    from tightship.integrations.onnxruntime import check_room, optimized

    program: Any = source.program
    held = contextlib.ExitStack()
    atexit.register(held.close)  # weights are read from there as long as the model is
    try:
        if chosen.optimize is None:
            check_room(program, 1)
        folder = held.enter_context(scratch_folder())
        made = optimized(program, folder, chosen.shape, level, target=Path(chosen.write))
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
        (chosen.what_if is not None, "--what-if does not go with --max-batch"),
        (dim < 0, f"--batch-dim is {dim}: dimensions are numbered from 0"),
    ):
        if given:
            raise BadInput(fault)
    options, files = given_options(chosen), targets(chosen)
    step = loaded(chosen.source, out).step
    if step is None:
        raise BadInput("--max-batch requires module:factory as SOURCE", place=chosen.source)
    with Line(out.live, "looking for the largest batch") as line:
        request = BatchRequest(step, read_budget(chosen), dim, options)
        with users_code("running the model without data", chosen.source):
            first = request.first()
        best = request.solve(lambda text: line.say(text, always=True), first)
    from tightship.frontends.torch.structure import batched
    from tightship.report.text import batch_table

    answer = Planned(best.plan, best.graph, batches=best.sizes).changed(
        source=chosen.source, command=chosen.command
    )
    tried = [{"batch": n, "met": met} for n, met in best.tried.items()]
    rows = {"batch": best.batch, "tried": tried, "unit": best.unit, "refused": best.refused}
    rows |= {"interrupted": best.interrupted} | answer.rows()
    text: list[Any] = [*_batch_lines(best, dim, *batched(step.sample, dim)), "", batch_table(best.sizes), ""]
    text.append(str(answer))
    write_targets(answer, files, rows, text)
    out.answer(rows, text)
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
        source = loaded(chosen.source, out, model_options(chosen))
        request = FrontierRequest(
            source.graph, chosen.points, source.program, chosen.peers, options, source.step
        )
        with Line(out.live, f"planning {source.graph.name}") as line:
            answer = request.solve(lambda text: line.say(text, always=True))
    rows, text = answer.rows(), answer.tables()
    write_targets(answer, files, rows, text)
    out.answer(rows, text)
    return INTERRUPTED if answer.interrupted else 0


# --- parts ---


def _accumulated(source: Source, budget: Budget | None) -> Source:
    """A graph of TensorFlow's with its sums as Grappler's scheduling has them."""
    from tightship.integrations.tensorflow_write import accumulated

    peak, static = replay(source.graph, baseline(source.graph)).peak, source.graph.static_bytes
    limit = peak if budget is None else budget.resolve(peak, static=static)
    program: Any = source.program
    program = accumulated(program, limit)
    return replace(source, graph=program.graph, program=program)


def solved(request: PlanRequest, out: Output) -> Planned:
    """The request's plan, with what is being found on the live line."""
    graph, budget = request.graph, request.budget
    options = None if request.planner is not None else plan_options(graph, request.options)
    before = replay(graph, baseline(graph))
    limit = 0.0 if options is None else options.seconds
    with Line(out.live, f"planning {graph.name}", step_time=before.time, limit=limit) as line:
        if line.shown and isinstance(budget, Budget) and options is not None:
            line.budget = budget.resolve(before.peak, static=graph.static_bytes)
            if options.allow == Options().allow:
                line.least = time_bound(graph, line.budget, redraw=options.redraw)
        return request.solve(line.planning)
