"""Where the seconds of preparing a step go, when a script is started first and when it is started again.

    python benchmarks/prepare.py [--models gpt2,resnet50] [--scripts nanogpt,…] [--budget 60%] [--write]

Each start is a process of its own with one thread; the second finds what the first has kept in a folder of theirs.
Seconds are those of the processor, from `fit`'s first line to its last; importing, building the model and making the
batch are before. *Capture* is the step's Python code on stand-ins, with the backward pass and the graph of both.
Scripts are those of examples/loops, up to the end of their first `fit`. ``--write`` puts the table into
docs/training.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pages
import torch

import tightship
from tightship.demo import models
from tightship.execute import allocator, cache, prepared
from tightship.planners import default, search

SCRIPTS = Path(__file__).resolve().parent.parent / "examples" / "loops"
WITHIN = "static+90%"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "training.md"
BEGIN, END = "<!-- begin: benchmarks/prepare.py -->", "<!-- end: benchmarks/prepare.py -->"
PARTS: tuple[tuple[str, Any, str], ...] = (
    ("measure", prepared, "profile"),
    ("order", default, "order_of"),
    ("bound", search, "least_time"),
    ("bound", search, "lower_bound"),
    ("search", search.Search, "fit"),
    ("place", search.floor.Placement, "lay"),
    ("verify", search, "check"),
    ("verify", cache, "check"),
    ("verify", prepared, "check"),
)
"""What is timed: a name, and the function that does it, where it is called."""
NAMES = ("capture", "measure", "order", "bound", "search", "place", "verify", "other")
HEAD = ("model", "start", *NAMES, "all")
MARKS = ("---", "---", *("---:" for _ in NAMES), "---:")


class Clock:
    """Seconds of the processor by part; what a part calls of another counts there."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(NAMES, 0.0)
        self._open: list[str] = []
        self._since = time.process_time()

    def enter(self, part: str) -> None:
        self._turn()
        self._open.append(part)

    def leave(self) -> None:
        self._turn()
        self._open.pop()

    def _turn(self) -> None:
        now = time.process_time()
        if self._open:
            self.spent[self._open[-1]] += now - self._since
        self._since = now

    def wrap(self, part: str, owner: Any, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(part)
            try:
                return inner(*args, **kwargs)
            finally:
                self.leave()

        setattr(owner, name, timed)


def start(name: str, budget: str) -> dict[str, float]:
    """One start of a model, or of a script: seconds by part."""
    torch.set_num_threads(1)
    allocator.available("cpu")  # compiled once for a machine
    clock = Clock()
    for part, owner, function in PARTS:
        clock.wrap(part, owner, function)
    clock.wrap("other", prepared.Prepared, "_variant")
    clock.wrap("capture", tightship, "fit")
    script = SCRIPTS / f"{name}.py"
    if script.exists():
        prepared_by(script)
        return clock.spent
    work = getattr(models, name)()
    net, batch = work.make(), work.batch(0)
    tightship.fit(net, None, torch.optim.AdamW(net.parameters()), batch, budget)
    return clock.spent


class Prepared(Exception):
    """A script has come to the end of its `fit`."""


def prepared_by(script: Path) -> None:
    inner = tightship.fit

    def once(*args: Any, **kwargs: Any) -> None:
        inner(*args, **kwargs)
        raise Prepared

    tightship.fit = once
    sys.argv = [str(script), WITHIN]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Prepared:
        return
    raise SystemExit(f"{script.name} has ended without fit")


def row(title: str, which: str, spent: dict[str, float]) -> tuple[str, ...]:
    return title, which, *(f"{spent[n]:.2f}" for n in NAMES), f"{sum(spent.values()):.2f}"


def rows(names: list[str], budget: str) -> Iterator[tuple[str, ...]]:
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            for which in ("first", "second"):
                command = [sys.executable, __file__, "--start", name, "--budget", budget]
                environment = {**os.environ, "TIGHTSHIP_CACHE": folder, "OMP_NUM_THREADS": "1"}
                # As installed: the second start finds the modules' bytecode, too.
                environment |= {"PYTHONPYCACHEPREFIX": folder + "/bytecode", "PYTHONDONTWRITEBYTECODE": ""}
                done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
                script = SCRIPTS / f"{name}.py"
                title = f"examples/loops/{name}.py" if script.exists() else getattr(models, name)().title
                yield row(title, which, json.loads(done.stdout.strip().splitlines()[-1]))


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="gpt2,resnet50", help="of the demonstration, with commas")
    parser.add_argument(
        "--scripts", default="nanogpt,classifier,diffusion,lora,speech", help="of examples/loops, with commas"
    )
    parser.add_argument("--budget", default="60%", help="of the step")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=f"put the table into docs/{PAGE.name}")
    chosen = parser.parse_args()
    if chosen.start:
        print(json.dumps(start(chosen.start, chosen.budget)))
        return
    text = pages.table(HEAD, MARKS, rows([*names(chosen.models), *names(chosen.scripts)], chosen.budget))
    said = (
        f"{time.strftime('%Y-%m-%d')}; {platform.machine()}, one thread; PyTorch {torch.__version__}; seconds of the "
        f"processor at a budget of {chosen.budget} ({WITHIN} for scripts); `python benchmarks/prepare.py`."
    )
    print(f"{said}\n\n{text}")
    if chosen.write:
        pages.put(PAGE, BEGIN, END, f"{said}\n\n{text}")


if __name__ == "__main__":
    main()
