"""Compiled code within budgets in bytes: tightship's compiled mode beside Inductor's own ways and eager.

    python benchmarks/compiled.py [--model gpt,…] [--budgets 80%,60%,…] [--rounds 5] [--cpu] [--results FILE] [--json]
    python benchmarks/compiled.py --bytes [--model gpt2-6,…] [--budgets 90%,80%,…] [--results FILE] [--json]

A row for each model and way: the peak that was planned and the one that was measured (forward and backward pass,
with parameters, batch and gradients), the time of a step over stock Inductor's, and of the first step over stock
Inductor's first step. Ways: eager; Inductor at several ``activation_memory_budget`` values; Inductor with a
checkpoint around each block; tightship exact; tightship compiled without a budget and at each of ``--budgets``, of
stock Inductor's peak. Each way runs beside stock Inductor in this process; steps are timed in turns. Models are
made from configurations, with random weights. With ``--results`` each row is written to the file once it is there,
and those that are in it are not run again. A budget called ``peers`` stands for the peak of each way beside
tightship's compiled mode that no other beats in both bytes and time; ``peer_ratio`` is the time of a step over that
way's, in turns with it. With ``--cpu`` times are seconds of the processor, of all threads, which other work on the
machine changes less. With ``--bytes`` nothing is timed: ten models
at five budgets, each row in a process of its own, and the peers' peaks as replayed from what Inductor lowers at
each value. A budget called ``least`` is the least peak that is found, which takes many candidates. Kernels come
from Inductor's cache of C++ where it has them: empty ``TORCHINDUCTOR_CACHE_DIR`` for cold compile times.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compiled_models import MODELS, TEN, with_checkpoints
from torch import nn

import tightship
from tightship.execute.allocator import Meter
from tightship.integrations.torch_compile import compiled_plans

STOCK = (1.0, 0.7, 0.5, 0.3, 0.1, 0.0)


Clock = Callable[[], float]

# --- ways ---


class Way:
    """One way to run a model's step."""

    def __init__(self, name: str, model: nn.Module, batch: tuple[Any, ...], call: Callable[..., Any]) -> None:
        self.name, self.model, self.batch, self.call = name, model, batch, call
        self.first = 0.0
        self.beyond = 0  # bytes that the step asks for
        self.least: int | None = None
        self.peak = 0
        self.budget: int | None = None
        self.planned: int | None = None
        self.note = ""

    def step(self, clock: Clock = time.perf_counter) -> float:
        self.model.zero_grad()
        began = clock()
        self.call(*self.batch).backward()
        return clock() - began

    def prepare(self) -> None:
        """The first steps, and the peak of the last of them."""
        self.first = self.step()
        self.step()
        self.model.zero_grad()
        static = sum(
            -(-t.untyped_storage().nbytes() // 64) * 64 for t in [*self.model.parameters(), *self.batch]
        )
        static += sum(-(-t.untyped_storage().nbytes() // 64) * 64 for t in self.model.buffers())
        with Meter() as meter:
            self.step()
        self.beyond, self.peak = meter.peak, static + meter.peak


def stock(model: nn.Module, share: float) -> Callable[..., Any]:
    """Inductor at an ``activation_memory_budget``, which it reads while it compiles."""
    compiled = torch.compile(model, dynamic=False)

    def call(*batch: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=share):
            return compiled(*batch)

    return call


Make = Callable[[nn.Module], Callable[..., Any]]


def ours(**options: Any) -> Make:
    """tightship's backend."""
    return lambda model: torch.compile(model, backend="tightship", options={"strict": True, **options})


def ways(peak: int, budgets: Sequence[str]) -> Iterator[tuple[str, Make]]:
    """All but stock Inductor, whose peak it is, by name."""
    yield "eager", lambda model: model
    for share in STOCK[1:]:
        yield f"Inductor {share}", lambda model, share=share: stock(model, share)  # type: ignore[misc]
    yield CHECKPOINTED, lambda model: stock(with_checkpoints(model), 1.0)
    yield "tightship compiled", ours(mode="compiled")
    for budget in budgets:
        nbytes = int(peak * float(budget.rstrip("%")) / 100)
        yield f"tightship compiled {budget}", ours(mode="compiled", budget=nbytes)
    yield "tightship exact", ours()


CHECKPOINTED = "Inductor, checkpoint per block"
REFERENCE = "Inductor 1.0"


def prepared(name: str, label: str, make: Make) -> Way:
    """A way of the model of that name, after its first steps; or with a note of why there are none."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, batch = MODELS[name]()
    way = Way(label, model, batch, make(model))
    try:
        way.prepare()
    except tightship.Infeasible as error:
        way.note, way.budget, way.least = "infeasible", error.budget, error.best_peak
    except Exception as error:  # of whatever is beside: the other rows are worth having
        lines = str(error).splitlines() or [""]
        way.note = f"{type(error).__name__}: {lines[0][:200]}"
    else:
        if label.startswith("tightship compiled"):
            (graph,) = compiled_plans(way.call)
            way.planned, way.budget = graph.plan.peak, graph.plan.budget
            # A buffer that the step does not read is not of its static set.
            way.peak = graph.plan.static + way.beyond
    say(f"{name} {label}: {way.peak} {way.note} first {way.first:.1f} s")
    return way


@dataclass(frozen=True)
class Timing:
    """How steps are timed: so many of each way, by that clock."""

    rounds: int
    clock: Clock

    def ratio(self, way: Way, other: Way) -> float:
        """The time of a way's step over another's, run in turns: medians."""
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(self.rounds):
            times[0].append(way.step(self.clock))
            times[1].append(other.step(self.clock))
        return round(statistics.median(times[0]) / statistics.median(times[1]), 3)


def row_of(name: str, way: Way, base: Way, timing: Timing, peer: Way | None = None) -> dict[str, Any]:
    """The row of a way, timed in turns with stock Inductor's, and with that of ``peer``, whose peak is the budget."""
    row: dict[str, Any] = {"model": name, "way": way.name, "budget": way.budget, "peer": peer and peer.name}
    row |= dict.fromkeys(("planned_peak", "measured_peak", "time_ratio", "compile_ratio", "peer_ratio"))
    row |= {"note": way.note, "least": way.least, "load": round(os.getloadavg()[0], 1)}
    if way.note:
        return row
    if way is base:
        return row | {"measured_peak": way.peak, "time_ratio": 1.0, "compile_ratio": 1.0}
    return row | {
        "planned_peak": way.planned, "measured_peak": way.peak, "time_ratio": timing.ratio(way, base),
        "compile_ratio": round(way.first / base.first, 3), "peer_ratio": peer and timing.ratio(way, peer),
    }  # fmt: skip


def rows_of(
    name: str,
    budgets: Sequence[str],
    timing: Timing,
    known: Sequence[dict[str, Any]],
    keep: Callable[..., None],
) -> list[dict[str, Any]]:
    """The rows of one model: those that are ``known``, and all others, each given to ``keep`` once it is there."""
    had = {r["way"]: r for r in known if r["model"] == name}
    makes = dict(ways(0, [b for b in budgets if b != PEERS]))
    wanted = [REFERENCE, *makes]
    if PEERS not in budgets and all(label in had for label in wanted):
        return [had[label] for label in wanted]
    base = prepared(name, REFERENCE, lambda model: stock(model, 1.0))
    assert not base.note, base.note
    there = {REFERENCE: base}

    def row(label: str, make: Make, peer: Way | None = None) -> None:
        if label not in had:
            way = base if label == REFERENCE else prepared(name, label, make)
            if PEERS in budgets and peer is None:
                there[label] = way
            had[label] = row_of(name, way, base, timing, peer)
            keep(had[label])

    row(REFERENCE, lambda model: model)
    for label, make in ways(base.peak, [b for b in budgets if b != PEERS]):
        row(label, make)
    at_peers = []
    for rival in contested([had[label] for label in wanted]) if PEERS in budgets else []:
        label = f"tightship compiled, as {rival['way']}"
        at_peers.append(label)
        if label not in had:
            peer = there.get(rival["way"]) or prepared(name, rival["way"], makes[rival["way"]])
            row(label, ours(mode="compiled", budget=rival["measured_peak"]), peer)
    return [had[label] for label in (*wanted, *at_peers)]


PEERS = "peers"


def contested(peers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of peers that no other beats in both bytes and time, the most bytes first: who is no slower within
    the bytes of each of these is so within those of all."""
    ran = sorted(
        (r for r in peers if not r["note"] and not r["way"].startswith("tightship compiled")),
        key=lambda r: (r["measured_peak"], r["time_ratio"]),
    )
    found: list[dict[str, Any]] = []
    for row in ran:
        if not found or row["time_ratio"] < found[-1]["time_ratio"]:
            found.append(row)
    return found[::-1]


# --- bytes alone ---

LEAST = "tightship compiled least"


def replayed_rows(name: str, label: str) -> Iterator[dict[str, Any]]:
    """Rows of what Inductor takes at each ``activation_memory_budget``, or with checkpoints, replayed."""
    from tightship.integrations.torch_inductor import stock_peaks

    model, batch = MODELS[name]()
    model = with_checkpoints(model) if label == CHECKPOINTED else model
    shares = (1.0,) if label == CHECKPOINTED else STOCK
    found: list[int] = []

    def backend(gm: Any, inputs: Sequence[Any]) -> Any:
        found.extend(stock_peaks(gm, inputs, shares))
        return gm.forward

    torch.compile(model, backend=backend, dynamic=False)(*batch)
    assert len(found) == len(shares), "one graph"
    for share, peak in zip(shares, found, strict=True):
        yield _bytes_row(name, label if label == CHECKPOINTED else f"Inductor {share}", planned_peak=peak)


def _bytes_row(name: str, label: str, **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "way": label, "cpu": round(_cpu_seconds(), 1)}
    row |= dict.fromkeys(
        ("budget", "planned_peak", "measured_peak", "met", "note", "least", "source", "lowered")
    )
    return row | more


def _cpu_seconds() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def measured_row(name: str, label: str, budget: int) -> dict[str, Any]:
    """The row of a model compiled within a budget. ``LEAST``: within the least that is found below ``budget``."""
    if label == LEAST:
        way = prepared(name, label, ours(mode="compiled", budget=budget))
        budget = way.least if way.least is not None else budget
    way = prepared(name, label, ours(mode="compiled", budget=budget))
    row = _bytes_row(name, label, budget=budget, note=way.note, least=way.least)
    if way.note:
        return row
    (graph,) = compiled_plans(way.call)
    met = way.planned == way.peak <= budget
    return row | {
        "planned_peak": way.planned, "measured_peak": way.peak, "met": met, "source": graph.plan.source,
        "lowered": graph.plan.lowered,
    }  # fmt: skip


def bytes_rows(
    name: str, budgets: Sequence[str], known: Sequence[dict[str, Any]], keep: Callable[..., None]
) -> list[dict[str, Any]]:
    """The rows of one model, each made by a process of its own; the rows of one that fails have a note."""
    had = {r["way"]: r for r in known if r["model"] == name}

    def make(way: str, labels: Sequence[str], budget: int = 0) -> None:
        if all(label in had for label in labels):
            return
        command = [
            sys.executable,
            __file__,
            "--bytes",
            "--model",
            name,
            "--way",
            way,
            "--budget",
            str(budget),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or [r["way"] for r in rows] != list(labels):
            note = f"the process ended with {done.returncode}"
            rows = [_bytes_row(name, label, note=note) for label in labels]
        for row in rows:
            had[row["way"]] = row
            keep(row)

    stock_labels = [f"Inductor {share}" for share in STOCK]
    make(REFERENCE, stock_labels)
    make(CHECKPOINTED, [CHECKPOINTED])
    peak = had[REFERENCE]["planned_peak"]
    ours_labels = [f"tightship compiled {b}" for b in budgets] if peak else []
    for label in ours_labels:
        budget = label.rpartition(" ")[2]
        make(label, [label], 1 if label == LEAST else int(peak * float(budget.rstrip("%")) / 100))
    return [had[label] for label in (*stock_labels, CHECKPOINTED, *ours_labels)]


# --- rows in files ---


def read(path: Path | None) -> list[dict[str, Any]]:
    """The rows of a file of results, a JSON object in each line; one that was cut off is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            say(f"{path}: left out {line[:60]!r}")
    return rows


def write(path: Path, row: dict[str, Any]) -> None:
    """Adds a row to a file of results, on a line of its own."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    cut_off = before and not before.endswith("\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut_off else "") + json.dumps(row) + "\n")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", "--models", help=f"some of {', '.join(MODELS)}; with --bytes ten, else all"
    )
    parser.add_argument("--budgets", default="90%%,80%%,70%%,60%%,50%%", help="of stock Inductor's peak")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each way")
    parser.add_argument("--cpu", action="store_true", help="seconds of the processor, not of the clock")
    parser.add_argument("--results", type=Path, metavar="FILE", help="file of rows, which is read first")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--bytes", action="store_true", help="time nothing: planned and measured peaks alone")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.model.split(",") if given.model else list(TEN if given.bytes else MODELS)
    if unknown := [n for n in names if n not in MODELS]:
        parser.error(f"no model {unknown[0]!r}: {', '.join(MODELS)}")
    budgets = [b for b in given.budgets.replace("%%", "%").split(",") if b]
    if given.way:
        replay = given.way in (REFERENCE, CHECKPOINTED)
        made = (
            replayed_rows(names[0], given.way)
            if replay
            else [measured_row(names[0], given.way, given.budget)]
        )
        for row in made:
            print(json.dumps(row), flush=True)
        return
    known = read(given.results)

    def keep(row: dict[str, Any]) -> None:
        if given.results is not None:
            write(given.results, row)

    timing = Timing(given.rounds, time.process_time if given.cpu else time.perf_counter)
    if given.bytes:
        rows = [r for name in names for r in bytes_rows(name, budgets, known, keep)]
    else:
        rows = [r for name in names for r in rows_of(name, budgets, timing, known, keep)]
    if given.json:
        print(json.dumps({"rows": rows}))
        return
    for r in rows:
        print(" | ".join(str(r[k]) for k in r))


if __name__ == "__main__":
    main()
