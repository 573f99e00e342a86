"""The questions about what is there already: why a device was full, why a plan is as it is, how two plans differ."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from tightship import api
from tightship.api import SnapshotRequest
from tightship.cli.output import Output, targets, write_targets
from tightship.errors import BadInput
from tightship.options import given_options, model_options
from tightship.report.decisions import why_tables
from tightship.report.progress import Line
from tightship.result import Planned

__all__ = ["diff", "explain_snapshot", "explain_why"]


def explain_snapshot(chosen: argparse.Namespace, out: Output) -> int:
    """``explain SNAPSHOT``: what a memory snapshot of PyTorch's says."""
    given, model = given_options(chosen), model_options(chosen)
    unused = [f"--{n}" for n in ("budget", "why") if getattr(chosen, n) is not None]
    unused += [f"--{n.replace('_', '-')}" for n in given if n != "seconds"]
    unused += [f"--{n.replace('_', '-')}" for n, value in model.items() if value is not None]
    if unused:
        raise BadInput(f"{unused[0]} requires a model or a plan, not a memory snapshot", place=chosen.source)
    files, seconds = targets(chosen), given.get("seconds", SnapshotRequest.seconds)
    with Line(out.errors, f"reading {chosen.source}"):
        answer = SnapshotRequest(chosen.source, float(str(seconds))).solve()
    rows, text = answer.rows(), answer.tables(chosen.top)
    write_targets(answer, files, rows, text)
    out.answer(rows, text)
    return 0


def explain_why(name: str, planned: Planned, out: Output) -> int:
    """``explain PLAN --why NAME``: why the plan does what it does with a tensor."""
    with Line(out.errors, "simulating alternatives"):
        answer = planned.why(name)
    out.answer(asdict(answer), why_tables(answer))
    return 0


def diff(chosen: argparse.Namespace, out: Output) -> int:
    """``diff A.json B.json``: what two plans do differently."""
    if chosen.top < 1:
        raise BadInput(f"--top is {chosen.top}: a table has at least one row")
    files = targets(chosen)
    with Line(out.errors, "simulating differences"):
        answer = api.diff(chosen.one, chosen.two)
    rows, text = answer.rows(), answer.tables(chosen.top)
    write_targets(answer, files, rows, text)
    out.answer(rows, text)
    return 0
