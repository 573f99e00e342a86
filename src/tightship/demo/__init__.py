"""`tightship demo`: train real models eagerly and within half the memory, and show that nothing else differs.

Importing this file is light; `run` imports torch and transformers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from tightship.errors import BadInput, Unsupported
from tightship.files import write_file
from tightship.report.progress import Line
from tightship.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tightship.demo.models import Workload
    from tightship.demo.trial import Run

__all__ = ["LEAST_STEPS", "Result", "run"]

LEAST_STEPS = 5


@dataclass(frozen=True)
class Result:
    """What the demonstration found, and the files it wrote."""

    runs: tuple[Run, ...]
    files: tuple[str, ...]

    @property
    def faults(self) -> list[str]:
        return [fault for r in self.runs for fault in r.faults()]

    @property
    def holds(self) -> bool:
        """Whether everything that is claimed was seen."""
        return bool(self.runs) and not self.faults

    def as_dict(self) -> dict[str, Any]:
        return {
            "runs": [dataclasses.asdict(r) for r in self.runs],
            "holds": self.holds,
            "faults": self.faults,
            "files": list(self.files),
        }

    def tables(self) -> list[RenderableType]:
        said = [f"NOT as claimed: {fault}" for fault in self.faults]
        if self.holds:
            said = ["Planned peak = measured peak ≤ budget, and every number is bit-identical to eager's."]
        return [*map(_table, self.runs), *said, f"Plans and pictures: {', '.join(self.files)}"]


def run(
    *, out_dir: str | Path = "demo-out", steps: int = 12, console: Console | None = None,
    workloads: Sequence[Workload] | None = None, **options: Any,
) -> Result:  # fmt: skip
    """Train each workload both ways; ``options`` are the default planner's.

    Raises ``BadInput`` for a folder that cannot be written or too few steps, ``Unsupported`` where torch or
    transformers are missing.
    """
    if steps < LEAST_STEPS:
        raise BadInput(
            f"{steps} steps are too few: the demonstration takes at least {LEAST_STEPS}", place="steps"
        )
    folder = _folder(Path(out_dir))
    try:
        from tightship.demo import models
        from tightship.demo.trial import trial
    except ImportError as error:
        raise Unsupported("the demonstration", str(error), "pip install 'tightship[demo]'") from error
    chosen = workloads if workloads is not None else (models.gpt2(), models.resnet50())
    console = console or Console(stderr=True, highlight=False)
    runs, files = [], []
    for workload in chosen:
        with Line(console, workload.title) as line:
            result, planned = trial(workload, steps, line, **options)
        runs.append(result)
        planned.save(folder / f"{workload.key}.plan.json")
        planned.picture(
            folder / f"{workload.key}.svg", title=f"{workload.title}: memory over one training step"
        )
        files += [str(folder / f"{workload.key}{end}") for end in (".plan.json", ".svg")]
    files.append(str(folder / "demo.json"))
    shown = Result(tuple(runs), tuple(files))
    write_file(folder / "demo.json", (json.dumps(shown.as_dict(), indent=1) + "\n").encode())
    return shown


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "demo.json").touch()
    except OSError as error:
        raise BadInput(f"cannot write to directory {str(path)!r}: {error.strerror}", place="--out") from error
    return path


def _table(r: Run) -> Table:
    table = Table(title=r.title, title_justify="left", title_style="bold", box=box.SIMPLE, pad_edge=False)
    table.show_header = False
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", overflow="fold")

    def peak(name: str, size: int | None, note: str = "") -> None:
        table.add_row(name, format_bytes(size) if size is not None else "not measured", note)

    beyond = (r.eager_peak or 0) - r.static
    left = (
        f"{100 * (r.budget - r.static) / beyond:.0f} % of eager's, beyond the static set"
        if beyond > 0
        else ""
    )
    peak("static set", r.static, f"{r.parameters / 1e6:.1f} M parameters, AdamW's state, the batch")
    peak("eager, measured", r.eager_peak)
    peak("budget", r.budget, left)
    peak("planned", r.planned_peak)
    exact = "= planned, to the byte" if r.measured_peak == r.planned_peak else "differs from the plan"
    peak("measured", r.measured_peak, exact if r.measured_peak is not None else "")
    above = f"{100 * (r.planned_peak / r.lower_bound - 1):.1f} % above it" if r.lower_bound else ""
    peak("lower bound", r.lower_bound, f"the plan is {above}" if above else "")
    peak("arena", r.arena, f"{r.misses or 0} misplaced allocations")
    same = "bit-identical" if r.identical else "DIFFERENT"
    table.add_row("losses and state", same, f"compared with eager over {r.steps} steps")
    table.add_row("loss", f"{r.losses[0]:.3f} → {r.losses[-1]:.3f}", "")
    table.add_row("recomputed", f"{r.evictions} ops", f"{r.moved} ops reordered")
    ratio = f"{r.time_ratio:.2f}×"
    seconds = f"{format_seconds(r.seconds)}, eager {format_seconds(r.eager_seconds)} (medians)"
    table.add_row("step time", ratio, seconds)
    prepared = f"capture, measuring; planning {format_seconds(r.plan_seconds)}"
    table.add_row("prepared in", format_seconds(r.fit_seconds), prepared)
    return table
