"""The questions about what is there already: why a device was full."""

from __future__ import annotations

import argparse

from tightship.api import SnapshotRequest
from tightship.cli.output import Output, targets, write_targets
from tightship.errors import BadInput
from tightship.options import given_options, model_options
from tightship.report.progress import Line

__all__ = ["explain_snapshot"]


def explain_snapshot(chosen: argparse.Namespace, out: Output) -> int:
    """``explain SNAPSHOT``: what a memory snapshot of PyTorch's says."""
    given, model = given_options(chosen), model_options(chosen)
    unused = [f"--{n}" for n in ("budget",) if getattr(chosen, n) is not None]
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
