"""What trains within a budget as it does in eager: every table of docs/compatibility.md, taken anew.

    python benchmarks/compatibility.py [--only TEXT] [--limit SECONDS] [--results FILE] [--known] [--write]
    python benchmarks/compatibility.py --compiled [--only TEXT] [--limit SECONDS] [--results FILE] [--known]
    python benchmarks/compatibility.py --backend [--compiled] [--only TEXT] [--limit SECONDS] [--results FILE]

Each row trains a small model with random weights for a few steps in a process of its own, in eager and by
`tightship.fit`, and compares losses, parameters, buffers, optimizer state and random states bit by bit; the planned
peak must be the measured one, and every request be served where it was planned. A row is bit-identical, or says in a
sentence why it runs in eager or is refused; anything else is a fault, and the exit status is 1. Rows whose packages
are missing are not run (`pip install --group compatibility` has them all). ``--write`` puts the tables into
docs/compatibility.md. ``--results`` keeps what came of each row in a file, and does not run those that it has;
with ``--known`` it runs none.

With ``--compiled`` the models run in compiled mode, at 80 % of what they take without a budget, or at the least that
is found: results must be near eager's where eager draws no random numbers, and the planned peak the measured one.
Each step is lowered several times, so give some rows ten minutes (``--limit 600``).

With ``--backend`` they are given to torch.compile with tightship's backend, in exact mode (eager's bits, or those of
its backend ``aot_eager`` where torch.compile runs other ops than eager does) or, with ``--compiled``, in compiled
mode; within 80 %, or what `Infeasible` says would do. What is not planned is said behind the result.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pages
from compat import GOOD, Outcome, Row, compiled, through_backend, trained

from tightship.units import format_bytes

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parent / "docs" / "compatibility.md"
BEGIN, END = "<!-- begin: benchmarks/compatibility.py -->", "<!-- end: benchmarks/compatibility.py -->"
WORDS = {"eager": "in eager"}
RUN = {"identical": "bit-identical", "close": "as planned"}
HEAD = ("", "with", "result", "unplanned", "planned = measured", "prepared in")
MARKS = ("---", "---", "---", "---:", "---:", "---:")
FIRST = ("language", "vision", "speech", "diffusion", "graphs", "adapters", "agents", "others", "packages")


def tables() -> list[str]:
    """Modules with tables, by name: those of models first."""
    found = [p.stem for p in FOLDER.glob("compat_*.py")]
    order = {f"compat_{name}": n for n, name in enumerate(FIRST)}
    return sorted(found, key=lambda name: (order.get(name, len(order)), name))


def rows_of(table: Any) -> Iterator[Row]:
    """A table's rows; it may have rows and a ``run`` of its own, as the one of optimizers does."""
    for row in table.rows():
        if isinstance(row, Row):
            yield row
        else:
            packages = (row.package,) if importlib.util.find_spec(row.package) else ()
            yield Row(f"{row.name} ({row.package})", packages, partial(run_own, table.run, row))


def run_own(run: Callable[[Any], Any], row: Any) -> Outcome:
    found = run(row)
    if found.kind == "none":
        return Outcome("refused", f"eager cannot, either: {found.text}")
    return Outcome({"misplaced": "mismatch"}.get(found.kind, found.kind), found.text)


def missing(row: Row) -> list[str]:
    return [name for name in row.packages if importlib.util.find_spec(name) is None]


class Runner:
    """Runs each row in a process of its own, forked from one that has imported what they need."""

    def __init__(
        self, threads: int, limit: float, imported: Iterable[str], how: Callable[..., Outcome] | None = None
    ) -> None:
        self.threads, self.limit, self.how = threads, limit, how
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["PYTHONWARNINGS"] = "ignore"
        os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["compat", *imported])

    def run(self, table: str, name: str) -> Outcome:
        mine, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=answer, args=(theirs, table, name, self.threads, self.how))
        process.start()
        theirs.close()
        try:
            if mine.poll(self.limit):
                return mine.recv()
            return Outcome("failed", f"not done after {self.limit:.0f} s")
        except EOFError:
            process.join()
            return Outcome("failed", f"the process ended, exit status {process.exitcode}")
        finally:
            process.kill()
            process.join()


def run_by(row: Row, how: Callable[..., Outcome] | None) -> Row | None:
    """The same by another function than `trained`; None of loops that are not run by this one."""
    run = row.run
    if how is None:
        return row
    if not isinstance(run, partial) or run.func is not trained:
        return None
    return dataclasses.replace(row, run=partial(how, *run.args, **run.keywords))


def answer(pipe: Connection, table: str, name: str, threads: int, how: Callable[..., Outcome] | None) -> None:
    """Runs a row, in this process."""
    import torch

    torch.set_num_threads(threads)
    try:
        row = next(r for r in rows_of(importlib.import_module(table)) if r.name == name)
        row = run_by(row, how) or row
        outcome = row.run()
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome("failed", f"{type(error).__name__}: {error}")
    pipe.send(outcome)


class Results:
    """Outcomes by table and name, in a file if there is one."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        found = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}
        self.outcomes = {key: Outcome(**fields) for key, fields in found.items()}

    def of(self, key: str, run: Callable[[], Outcome]) -> Outcome:
        if key not in self.outcomes:
            self.outcomes[key] = run()
            if self.path is not None:
                rows = {k: dataclasses.asdict(o) for k, o in self.outcomes.items()}
                self.path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        return self.outcomes[key]


def cells(row: Row, outcome: Outcome | None) -> tuple[str, ...]:
    packages = ", ".join(row.packages) or "torch"
    if outcome is None:
        return row.name, packages, f"not run: {', '.join(missing(row))} is missing", "", "", ""
    if outcome.kind not in RUN:
        sentence = " ".join(outcome.sentence.split()).replace("|", "\\|").replace("<", "&lt;")
        return row.name, packages, f"{WORDS.get(outcome.kind, outcome.kind)}: {sentence}", "", "", ""
    if not outcome.planned:
        return row.name, packages, RUN[outcome.kind], "", "", ""
    peaks = (format_bytes(outcome.unplanned), format_bytes(outcome.planned))
    said = f"{RUN[outcome.kind]}; {outcome.sentence}" if outcome.sentence else RUN[outcome.kind]
    return row.name, packages, said, *peaks, f"{outcome.seconds:.1f} s"


def section(table: Any, lines: Sequence[tuple[str, ...]]) -> str:
    """A table under its title. One with rows of its own has hundreds: those that are bit-identical are counted."""
    if hasattr(table, "TITLE"):
        return f"## {table.TITLE}\n\n{pages.table(HEAD, MARKS, lines)}"
    others = [cells for cells in lines if cells[2] != "bit-identical"]
    text = f"## Optimizers\n\nOf {len(lines)} rows {len(lines) - len(others)} are bit-identical."
    return f"{text} The others:\n\n{pages.table(HEAD, MARKS, others)}" if others else text


def versions(rows: Iterable[Row]) -> str:
    modules = {name for row in rows for name in row.packages if not missing(row)} | {"torch"}
    known = importlib.metadata.packages_distributions()
    names = sorted({known.get(name, [name])[0] for name in modules}, key=str.lower)
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose name, or whose table's, has this text")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for a row")
    parser.add_argument("--threads", type=int, default=1, help="threads for ops")
    parser.add_argument("--results", type=Path, help="file of outcomes, which is read first")
    parser.add_argument("--known", action="store_true", help="run nothing: rows of --results alone")
    parser.add_argument("--compiled", action="store_true", help="compiled mode; not for the page")
    parser.add_argument("--backend", action="store_true", help="through torch.compile; not for the page")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    args = parser.parse_args()
    modules = {name: importlib.import_module(name) for name in tables()}
    chosen = {n: [r for r in rows_of(m) if args.only in f"{n} {r.name}"] for n, m in modules.items()}
    how: Callable[..., Outcome] | None = compiled if args.compiled else None
    if args.backend:
        how = partial(through_backend, mode="compiled" if args.compiled else "exact")
    if how is not None:
        if args.write:
            parser.error("--write is for the tables of fit in exact mode: leave --compiled and --backend out")
        chosen = {n: [r for r in rows if run_by(r, how)] for n, rows in chosen.items()}
    packages = sorted({p for rows in chosen.values() for r in rows for p in r.packages if not missing(r)})
    runner, results = Runner(args.threads, args.limit, packages, how), Results(args.results)
    texts, ran, faults = [], [], 0
    if args.known:
        chosen = {n: [r for r in rows if f"{n} {r.name}" in results.outcomes] for n, rows in chosen.items()}
    for name, rows in chosen.items():
        lines = []
        for row in rows:
            run = partial(runner.run, name, row.name)
            outcome = None if missing(row) else results.of(f"{name} {row.name}", run)
            faults += outcome is not None and outcome.kind not in GOOD
            ran.append((row, outcome))
            lines.append(cells(row, outcome))
            print(f"{name}: {' | '.join(c for c in lines[-1] if c)}", flush=True)
        if lines:
            texts.append(section(modules[name], lines))
    kinds = [o.kind if o else "not run" for _, o in ran]
    counts = ", ".join(
        f"{kinds.count(kind)} {kind}"
        for kind in dict.fromkeys(("close" if args.compiled else "identical", *sorted(kinds)))
    )
    command = (
        "python benchmarks/compatibility.py" + " --backend" * args.backend + " --compiled" * args.compiled
    )
    said = (
        f"{time.strftime('%Y-%m-%d')}; {platform.machine()}, threads for ops: {args.threads}; "
        f"{versions(r for r, _ in ran)}; `{command}`.\n\n{len(ran)} rows: {counts}."
    )
    print(f"\n{said}")
    if args.write:
        pages.put(PAGE, BEGIN, END, "\n\n".join((said, *texts)))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
