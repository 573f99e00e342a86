"""A campaign that goes on for as long as it is let: random cases of each class, judged by the definitions.

    python benchmarks/soak.py [CLASS ...] [--seconds N] [--state FILE] [--failures DIR]

``plans``: random graphs, planned in every way there is, judged by an oracle that shares no code with tightship
(``tests/support/oracle.py``) and by the verifier. ``verifier``: plans changed at random; what the oracle finds wrong
the verifier has to list, without raising. ``places``: random problems with every placement planner. ``optima``: small
graphs with every plan tried; no bound is above the best. ``files``: files of every format, changed by their structure
and read by the command line; nothing may raise, and nothing take more than ten seconds. ``faults``: every verb that
writes and steps that are fitted, on a disk that fails at the n-th write, with signals at it or at some time, and with
too little memory (``tests/support/faults.py``); what ``docs/reliability.md`` promises has to hold. ``core``: every
function of the core with wrong arguments; of use under the sanitizers (``make sanitize``).

A case is a number. What fails is shrunk to the smallest case that does, and kept as one line of ``failures``; a
campaign goes on where the state's file says that it was.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import io
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import faults as disturbances
from support import mutation, planned
from support.hostile import FORMATS, changed, hostile
from support.optimum import optimum
from support.placing import assert_right
from support.planned import Judged, wrong
from support.strategies import random_graph
from tightship.cli import main as command
from tightship.errors import Infeasible
from tightship.plan import Buffer, Problem
from tightship.planners import default, packing, planners

LONGEST = {"faults": 300, "files": 8}
"""Seconds that a case may take beyond the limits that it was given: `USUAL`, but for these."""
USUAL = 10
BESIDE = 10
"""By what the clock may run ahead of a case's own processor time, on a machine that does other work, too."""


# --- the verifier ---


def verifier(seed: int, size: int) -> Judged:
    """A plan with one change; the sizes of cases are those of their graphs. What comes of it is the rule that alone
    finds it, if one does."""
    graph, plan = mutation.case(seed, size)
    kind, changed = mutation.mutant(graph, plan, random.Random(seed))
    faults, found = mutation.verdict(graph, changed)
    if faults and not found:
        return Judged(kind, f"{kind}: not found: {faults[0]}")
    if not faults:
        return Judged(
            f"right to the oracle, {'refused' if found else 'and verified'}", had=(f"mutant: {kind}",)
        )
    rules = f"only {next(iter(found))}" if len(found) == 1 else "several rules"
    return Judged(rules, had=(f"mutant: {kind}",))


# --- places ---


def places(seed: int, size: int) -> Judged:
    rng = random.Random(seed)
    buffers = []
    for k in range(size):
        lower = rng.randrange(-3, 12)
        buffers.append(
            Buffer(
                f"b{k}",
                lower,
                lower + rng.randint(1, 9),
                rng.choice((0, 1, 2, 3, 7, 2**40)),
                rng.choice((1, 1, 2)),
            )
        )
    problem = Problem(tuple(buffers))
    name = rng.choice(sorted(planners("place")))
    solution = packing.pack(problem, name, packing.Search(seconds=1.0, work=3_000))
    assert_right(problem, solution)
    return Judged(name)


# --- optima ---


def optima(seed: int, size: int) -> Judged:
    graph = random_graph(seed, min(size, 5), random=0.0, effect=0.0, calls=0.0, updates=0.0, largest=4)
    try:
        points = optimum(graph, most=5_000)
    except RuntimeError:
        return Judged("too large")
    best = points[-1].nbytes
    try:
        o = default.Options(seconds=5.0, work=100_000, place=False)
        problem = default.problem_of(graph, default.order_of(graph, o, 1 << 60), o)
        made = default.plan(graph, best, o, problem=replace(problem, in_place=True))
    except Infeasible as no:
        return Judged("missed", "the bound is above the optimum" if no.lower_bound > best else "")
    if made.lower_bound > best:
        return Judged("met", "the bound is above the optimum")
    return Judged("met", wrong(graph, made, "default"))


# --- files ---

VERBS = {
    "graph": (["plan", "-b", "static+99%", "--seconds", "0.3", "--work", "20000"], ["explain"]),
    "plan": (["verify"], ["explain"]),
    "problem": (["pack", "--seconds", "0.3", "--work", "3000"], ["verify"]),
    "module": (["assign", "--seconds", "0.3"], ["plan", "-b", "80%", "--seconds", "0.3"], ["explain"]),
    "model": (["plan", "-b", "static+99%", "--seconds", "0.3", "--work", "20000"], ["explain"]),
    "graphdef": (["plan", "-b", "static+99%", "--seconds", "0.3", "--work", "20000"], ["explain"]),
    "lite": (["plan", "-b", "static+99%", "--seconds", "0.3", "--work", "20000"], ["explain"]),
    "keras": (["explain"],),
    "snapshot": (["explain"],),
    "measurements": (["fit"],),
    "kept": (["fit"],),
}
"""What reads files of each kind; what `fit` reads is handed to what it reads it with."""

MOST_MEMORY = 2 << 30
"""Bytes that the process may have once a file was read, and take beyond what it had before."""


def files(seed: int, size: int) -> Judged:
    rng = random.Random(seed)
    lacking = {"graphdef"} if find_spec("tensorflow") is None else set()
    kind = rng.choice(sorted(set(VERBS) - lacking))
    verb = rng.choice(VERBS[kind])
    if verb[0] == "fit":
        return Judged(kind, _kept(kind, seed, min(size, 3)) or _memory())
    _imported(kind)
    more = ["--report", "page.html"] if verb[0] in ("plan", "pack", "assign") and rng.random() < 0.3 else []
    return read(kind, verb, *hostile(kind, seed, min(size, 3)), more)


@cache
def _imported(kind: str) -> None:
    """A right file is read first: what imports take, of memory and of seconds, is not a file's."""
    ending, make, _ = FORMATS[kind]
    for verb in VERBS[kind]:
        read(kind, verb, f"{kind}{ending}", make(0), [], limited=False)


def read(
    kind: str, verb: list[str], name: str, data: bytes, more: list[str], *, limited: bool = True
) -> Judged:
    """What a verb makes of a file, and what is wrong with that; ``more``: an option and the file that it writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        given = [
            verb[0],
            str(path),
            *verb[1:],
            "--json",
            *more[:1],
            *(str(Path(folder) / m) for m in more[1:]),
        ]
        said, errors = io.StringIO(), io.StringIO()
        within = _limited() if limited else contextlib.nullcontext()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors), within:
            status = command(given)
    what = f"{kind} {verb[0]} -> {status}"
    if status not in (0, 1, 2):
        return Judged(what, f"{' '.join(verb)} {name}: {errors.getvalue().strip()[:300]}")
    try:
        json.loads(said.getvalue())
    except ValueError:
        return Judged(what, f"{' '.join(verb)} {name}: no JSON")
    return Judged(what, _memory())


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Address space for `MOST_MEMORY` more than the process has, most of which is what libraries map."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + MOST_MEMORY
    if pages and (before[1] == resource.RLIM_INFINITY or most < before[1]):
        resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _memory() -> str:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return f"{most >> 20} MiB of memory" if most > MOST_MEMORY else ""


def _kept(kind: str, seed: int, changes: int) -> str:
    """What is kept between processes, damaged: it is as good as none, and the next one is whole again."""
    from tightship.execute.cache import Cache, KeptPlans, Measurement

    with tempfile.TemporaryDirectory() as folder:
        if kind == "measurements":
            (Path(folder) / "profile-m.json").write_bytes(hostile(kind, seed, changes)[1])
            cache = Cache(folder, "m")
            cache.put("op9", Measurement(1.0))
            cache.save()
            cache = Cache(folder, "m")
            return "" if cache.get("op9") and not cache.note else f"not whole again: {cache.note}"
        graph = random_graph(seed % 7, 3 + seed % 7)
        planner = KeptPlans(Path(folder), default.Options(seconds=0.2, work=2_000))
        planner(graph)
        (path,) = Path(folder).glob("plan-*")
        path.write_bytes(changed("kept", path.read_bytes(), seed, changes))
        return wrong(graph, planner(graph), "kept") or wrong(graph, planner(graph), "kept again")


# --- faults ---


@cache
def _server() -> disturbances.Server:
    server = disturbances.Server()
    atexit.register(server.close)
    return server


def disturbed(seed: int, size: int) -> Judged:
    """A scenario and a fault; there are no smaller ones."""
    if disturbances.why_not():
        return Judged("not here")
    rng = random.Random(f"faults {seed}")
    about = disturbances.SCENARIOS
    scenario = rng.choices(list(about), [1 / scenario.work for scenario in about.values()])[0]
    try:
        fault = disturbances.random_fault(_server(), scenario, rng)
        return Judged(f"{scenario}: {fault.kind}", disturbances.judged(_server(), scenario, fault))
    except (
        OSError,
        ValueError,
    ):  # it was interrupted, or its answer was: cases after this one are none of it
        _server().close()
        _server.cache_clear()
        raise


# --- the core ---


def core(seed: int, size: int) -> Judged:
    """A function of the core with wrong arguments; what harm they do shows under the sanitizers, or as a crash, which
    ends the campaign."""
    from support.core_calls import HARMLESS, hostile_call  # what they are made of takes a second

    call = HARMLESS[seed % len(HARMLESS)]
    return Judged(call.name, had=(hostile_call(call, seed).rpartition(": ")[2],))


CLASSES: dict[str, Callable[[int, int], Judged]] = {
    "plans": planned.plans, "verifier": verifier, "places": places, "optima": optima, "files": files,
    "faults": disturbed, "core": core,
}  # fmt: skip


# --- the campaign ---


def judged(name: str, seed: int, size: int) -> Judged:
    """What comes of one case; an exception that is no error of tightship's is a fault, and so is a hang."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"takes more than {longest} s")

    longest = LONGEST.get(name, USUAL)
    before = {sent: signal.signal(sent, stop) for sent in (signal.SIGALRM, signal.SIGPROF)}
    signal.setitimer(signal.ITIMER_PROF, longest + 2)
    signal.alarm(BESIDE * longest)
    try:
        return CLASSES[name](seed, size)
    except Exception as error:
        return Judged("raised", f"{type(error).__name__}: {str(error)[:300]}")
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for sent, handler in before.items():
            signal.signal(sent, handler)


def shrunk(name: str, seed: int, size: int) -> tuple[int, str]:
    """The least size at which the case fails, and how."""
    for less in range(1, size + 1):
        if fault := judged(name, seed, less).fault:
            return less, fault
    return size, judged(name, seed, size).fault


def size_of(name: str, rng: random.Random) -> int:
    """Mostly small ones."""
    if name == "plans":
        return planned.size_of(rng)
    return rng.choice((1, 1, 1, 2, 3)) if name == "files" else rng.randint(1, rng.choice((6, 6, 24)))


def campaign(
    names: list[str], begin: dict[str, int], until: Callable[[], bool]
) -> Iterator[tuple[str, int, int, Judged]]:
    """Cases of all classes in turn, each class from its own number on."""
    while True:
        for name in names:
            if until():
                return
            seed = begin.get(name, 0)
            size = size_of(name, random.Random(f"{name} {seed}"))
            yield name, seed, size, judged(name, seed, size)
            begin[name] = seed + 1


def main() -> int:
    given = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    given.add_argument("classes", nargs="*", metavar="CLASS", help=f"of {', '.join(CLASSES)} (default: all)")
    given.add_argument("--seconds", type=float, default=600.0, help="how long (default: 600)")
    given.add_argument("--state", type=Path, default=Path("build/soak.json"), help="where it is")
    given.add_argument("--failures", type=Path, default=Path("build/soak-failures.jsonl"), help="what failed")
    chosen = given.parse_args()
    if unknown := set(chosen.classes) - set(CLASSES):
        given.error(f"unknown class {unknown.pop()!r}: expected {', '.join(CLASSES)}")
    state: dict[str, Any] = json.loads(chosen.state.read_text()) if chosen.state.exists() else {}
    begin: dict[str, int] = state.setdefault("begin", {})
    tallies = _Tallies(state, _version())
    chosen.state.parent.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        beside = chosen.state.with_suffix(".new")  # the old state or the new one, whatever ends the campaign
        beside.write_text(json.dumps(state, indent=1))
        beside.replace(chosen.state)

    if find_spec("torch"):
        import tightship.execute.cache  # noqa: F401 - takes seconds, which are none of a case's

    until = time.monotonic() + chosen.seconds
    kept = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        for name, seed, size, case in campaign(
            chosen.classes or list(CLASSES), begin, lambda: time.monotonic() > until
        ):
            tallies.add(name, case)
            if case.fault:
                least, fault = shrunk(name, seed, size)
                row = {"class": name, "seed": seed, "size": least, "fault": fault, "code": tallies.version}
                print(json.dumps(row), flush=True)
                with chosen.failures.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            if time.monotonic() - kept > 5:
                keep()
                kept = time.monotonic()
    keep()
    tallies.show()
    return 1 if any(state["failed"].values()) else 0


class _Tallies:
    """Counts in the state's dictionary: by class, of what came of cases, of what they had, of those that failed, of
    those that each version of the code was tried with, and of processor seconds."""

    def __init__(self, state: dict[str, Any], version: str) -> None:
        self.state, self.version = state, version
        for part in ("counts", "had", "failed", "code", "seconds"):
            state.setdefault(part, {})
        self.began = time.process_time()

    def add(self, name: str, case: Judged) -> None:
        for part, keys in (("counts", (case.what,)), ("had", case.had), ("code", (self.version,))):
            row = self.state[part].setdefault(name, {})
            for key in keys:
                row[key] = row.get(key, 0) + 1
        now = time.process_time()
        self.state["failed"][name] = self.state["failed"].get(name, 0) + bool(case.fault)
        self.state["seconds"][name] = self.state["seconds"].get(name, 0.0) + now - self.began
        self.began = now

    def show(self) -> None:
        for name, known in self.state["counts"].items():
            tried, seconds = sum(known.values()), self.state["seconds"].get(name, 0.0)
            rate = f", {tried / seconds:.0f} a second" if seconds else ""
            print(f"{name}: {tried:,} tried, {self.state['failed'].get(name, 0)} failed{rate}")
            for row in (known, self.state["had"].get(name, {}), self.state["code"].get(name, {})):
                print("  " + ", ".join(f"{what} {n:,}" for what, n in sorted(row.items())))


def _version() -> str:
    """Which code this is: the commit, with a plus where files differ from it."""
    root = Path(__file__).resolve().parents[1]
    asked = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=7"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False)
    return said.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
