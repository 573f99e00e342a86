"""Faults: a file system that fails at the n-th write, signals at the n-th or at some time, too little memory, a clock
that is set, a second process at the same work, threads and forks, and surroundings that lack something.

A server imports everything once and forks a process for each case. The process runs a scenario (a verb that writes
files, a step that is fitted and trained) in a folder of its own, which is all that the disk that fails knows
(``failing_disk.c``). `judged` says what of the promises of ``docs/reliability.md`` was broken: the exit status and
its sentence, files that are neither the old nor the new ones, files that nobody asked for, and that the same command
does its work when the fault is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["SCENARIOS", "Fault", "Server", "judged", "random_fault", "why_not"]

HERE = Path(__file__).parent
OTHERS = re.compile(r"\.ses|torchinductor_.*|__pycache__|[a-z0-9_]{8}")
"""What onnxruntime and torch keep in the system's folder for temporary files, and Python's look whether it is one."""
STDOUT = "said.json"
"""What a shell sends somewhere: nobody can write that whole or not at all."""
LONGEST = 180
"""Seconds after which a case hangs."""
OLD = b"what was there before\n"
SHORT = -1
CLOCKS = {"later": -2, "earlier": -3}
"""The clock is set, by more than a year."""
ERRORS = {"full": 28, "io": 5, "short": SHORT, "read-only": 30, **CLOCKS}
SURROUNDINGS = ("homeless", "no compiler", "threads")
"""A user of whom the system knows nothing, without a home; no compiler; another thread that plans and forks."""
KINDS = (
    "full", "full", "io", "io", "short", "kill", "int", "term", "memory", "read-only", "twin", *CLOCKS, *SURROUNDINGS
)  # fmt: skip
SIGNALS = {"kill": signal.SIGKILL, "int": signal.SIGINT, "term": signal.SIGTERM}
STATUS = {"kill": {-9}, "int": {130, -2}, "term": {143, -15}}


def why_not() -> str:
    """Why there can be no faults here; empty where there can."""
    if sys.platform != "linux":
        return "only Linux preloads and forks as needed"
    return "" if shutil.which("gcc") else "no gcc"


@dataclass(frozen=True)
class Fault:
    """``kind`` at the ``at``-th call that writes; ``stays``: at all later ones, too. ``seconds``: a signal so long
    after the beginning instead. ``memory``: so many bytes more than at the beginning are there. ``twin``: a second
    process does the same beside it, in the same places, and is killed after ``seconds``."""

    kind: str = ""
    at: int = 0
    stays: bool = False
    seconds: float = -1.0
    memory: int = 0

    def __str__(self) -> str:
        if self.memory:
            return f"memory {self.memory >> 20} MiB"
        if not self.at and self.seconds < 0:
            return self.kind
        when = (
            f"after {self.seconds:.3f} s"
            if self.seconds >= 0
            else f"at {self.at}{' and on' if self.stays else ''}"
        )
        return f"{self.kind} {when}"


# --- what is run ---


@dataclass(frozen=True)
class Scenario:
    """``run(folder, given)`` in a process of its own; ``targets`` are the files it writes, in ``folder``; ``kept``:
    folders in which it may leave what it likes, as long as it can work with it; ``given``: where the files lie that
    it reads. ``torch``: needs the executor, and takes seconds. ``work``: about how many times as long as others it
    takes, and is tried so much less often."""

    run: Callable[[Path, Path], int]
    targets: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    torch: bool = False
    work: float = 1.0


def _verb(text: str, *targets: str) -> Scenario:
    """A command; words that name a target are in the folder, those with a slash among what is given."""

    def run(folder: Path, given: Path) -> int:
        from tightship.cli import main

        words = [
            str(folder / w) if w in targets else str(given / w[3:]) if w[:3] == "in/" else w
            for w in text.split()
        ]
        sys.argv = ["tightship", *words]
        return main()

    return Scenario(run, targets)


def _into_file(text: str) -> Scenario:
    inner = _verb(text)

    def run(folder: Path, given: Path) -> int:
        os.dup2(os.open(folder / STDOUT, os.O_WRONLY | os.O_TRUNC), 1)
        return inner.run(folder, given)

    return Scenario(run, (STDOUT,))


def _training(**options: Any) -> Scenario:
    def run(folder: Path, given: Path) -> int:
        return _train(folder, given, options)

    return Scenario(run, (), ("cache", "xdg", "pool"), torch=True, work=16.0 if options.get("build") else 4.0)


_QUICK = "--seconds 30 --work 2000"
SCENARIOS: dict[str, Scenario] = {
    "plan": _verb(
        f"plan in/graph.json -b 90% {_QUICK} -o plan.json --picture p.svg --report p.html --trace t.json.gz "
        "--snapshot s.pickle --arena-header a.h",
        "plan.json", "p.svg", "p.html", "t.json.gz", "s.pickle", "a.h",
    ),
    "plan --json": _verb(f"plan in/graph.json -b 90% {_QUICK} -o plan.json --json", "plan.json"),
    "plan, long": _verb("plan in/large.json -b 100% --seconds 1 -o plan.json", "plan.json"),
    "plan MODEL": _verb(f"plan in/model.onnx {_QUICK} --optimize none --write m.onnx", "m.onnx"),
    "plan MODEL, optimized": _verb(f"plan in/model.onnx {_QUICK} --write m.onnx", "m.onnx"),
    "frontier": _verb(
        f"frontier in/graph.json --points 2 --no-peers {_QUICK} --picture p.svg --report p.html", "p.svg", "p.html"
    ),
    "explain": _verb("explain in/s.pickle --report p.html", "p.html"),
    "explain > file": _into_file("explain in/graph.json --json"),
    "diff": _verb("diff in/a.json in/b.json --report p.html", "p.html"),
    "pack": _verb(
        f"pack in/problem.csv {_QUICK} -o o.csv --picture p.svg --report p.html --arena-header a.h",
        "o.csv", "p.svg", "p.html", "a.h",
    ),
    "assign": _verb("assign in/module.txt --write m.txt --report p.html", "m.txt", "p.html"),
    "fit, kept": _training(budget="80%", kept=True),
    "fit, offload": _training(budget="75%", allow="offload"),
    "fit, stream": _training(budget=0.6, allow="recompute,stream"),
    "fit, build": _training(budget="80%", build=True),
}  # fmt: skip


def given_files(folder: Path) -> None:
    """What the scenarios read."""
    from support.hlo_small import CHAIN, HEADER
    from support.hostile import FORMATS
    from support.strategies import random_graph, random_plan
    from tightship.result import Planned
    from tightship.serde import save_graph, save_plan

    graph = random_graph(3, 12)
    save_graph(graph, folder / "graph.json")
    Planned(random_plan(graph, 1), graph).snapshot(folder / "s.pickle")
    save_graph(random_graph(2, 400), folder / "large.json")
    for name, seed in (("a", 1), ("b", 2)):
        save_plan(random_plan(graph, seed), folder / f"{name}.json", graph)
    (folder / "module.txt").write_text(HEADER + CHAIN)
    (folder / "problem.csv").write_bytes(FORMATS["problem"][1](1))
    (folder / "model.onnx").write_bytes(FORMATS["model"][1](1))


# --- training ---

ROWS = 512


def _layers() -> Any:
    import torch

    torch.manual_seed(0)
    rows = [x for _ in range(5) for x in (torch.nn.Linear(32, 32), torch.nn.ReLU())]
    return torch.nn.Sequential(*rows)


def _loss(model: Any, batch: Any) -> Any:
    return (model(batch[0]) - batch[1]).square().mean()


def _batch(k: int, rows: int) -> tuple[Any, Any]:
    import torch

    made = torch.Generator().manual_seed(k)
    return torch.randn(rows, 32, generator=made), torch.randn(rows, 32, generator=made)


def _train(folder: Path, files: Path, options: dict[str, Any]) -> int:
    """Three steps beside eager's. After a fault every parameter is as before the step or as after it; then the same
    is done once more, with nothing in the way. Returns 2 where a fault was said in words."""
    given = dict(options, folder=folder / "pool", seconds=0.3, seconds_per_op=0.001)
    given["cache"] = (folder if given.pop("kept", False) else files) / "cache"
    if given.pop("build", False):
        os.environ["XDG_CACHE_HOME"] = str(folder / "xdg")
    status, again = 0, True
    try:
        _beside_eager(given)
    except KeyboardInterrupt:  # perhaps while torch imported more of itself, which it does not take up again
        sys.stderr.write("tightship: interrupted\n")
        return 130
    except Exception as error:
        from tightship.errors import InternalError, TightshipError

        said = InternalError(error)  # knows in how many ways there can be too little memory
        if "out of memory" in str(said):  # as above
            sys.stderr.write(f"tightship: {said}\n")
            return 3
        if isinstance(error, (TightshipError, OSError)):
            status = 2
        else:
            raise
        sys.stderr.write(f"tightship: {type(error).__name__}: {error}\n")
        again = not _of_an_import(error)
    if status and again:
        _rest()
        _beside_eager(given)
    return status


def _of_an_import(error: BaseException) -> bool:
    """Whether torch was importing more of itself, for which it makes a folder, and does not take that up again."""
    frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(code.co_name == "<module>" and "torch" in Path(code.co_filename).parts for code in frames)


def _beside_eager(given: dict[str, Any]) -> None:
    import torch

    import tightship

    model, twin = _layers(), _layers()
    optimizer, other = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(twin.parameters())
    rows, share = ROWS, given["budget"]
    if isinstance(share, float):  # of parameters and state
        static = 3 * sum(p.nbytes for p in model.parameters())
        rows, given = 4, given | {"budget": int(share * static)}
    step = tightship.fit(model, _loss, optimizer, _batch(0, rows), **given)
    for k in range(3):
        before = [p.detach().clone() for p in twin.parameters()]
        other.zero_grad()
        _loss(twin, _batch(k, rows)).backward()
        other.step()
        try:
            step(_batch(k, rows))
        except BaseException:
            _rest()
            with step.gathered():
                for p, old, new in zip(model.parameters(), before, twin.parameters(), strict=True):
                    assert torch.equal(p, old) or torch.equal(p, new), "a parameter is neither old nor new"
            raise
    with step.gathered():
        for p, new in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, new), "a parameter is not eager's"


# --- the server ---


def _rest() -> None:
    """Whatever it was, it is over."""
    import resource

    ctypes.CDLL(None).failing_disk_rest()
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)


def _serve(base: Path) -> None:
    """Reads cases, one a line; forks a process for each, and says how it ended."""
    _import_all()
    for line in sys.stdin:
        case = json.loads(line)
        answer = _forked(base, case)
        if answer is None:  # in the process that was forked
            _run(base, case)
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), flush=True)
    shutil.rmtree(base, ignore_errors=True)  # also where who has started this was killed


def _import_all() -> None:
    """So that no process that is forked spends its time on it."""
    import torch

    import tightship
    from tightship import cli

    torch.set_num_threads(1)
    cli.parser()
    assert tightship.fit


def _forked(base: Path, case: dict[str, Any]) -> dict[str, Any] | None:
    """How the process ended, or None in a process that was forked."""
    disk = ctypes.CDLL(None)
    kind, seconds = case["kind"], case["seconds"]
    what = ERRORS.get(kind) or (-100 - int(SIGNALS[kind]) if kind in SIGNALS else 0)
    folder = f"{base}/case/" + (
        "out/cache/" if kind == "read-only" and SCENARIOS[case["scenario"]].torch else ""
    )
    disk.failing_disk_arm(folder.encode(), case["at"] if seconds < 0 else 0, what, int(case["stays"]))
    begun, child = _begun()
    if not child:
        return None
    other = 0
    if kind == "twin":
        case["stderr"] = "stderr-twin"
        _, other = _begun()
        if not other:
            return None
    signals = [(seconds, child, SIGNALS[kind])] if kind in SIGNALS and seconds >= 0 else []
    signals += [(seconds, other, signal.SIGKILL)] if other and seconds >= 0 else []
    ended, hangs = _ends([child, *([other] if other else [])], begun, signals)
    twin = ended.get(other, 0)
    return {
        "status": ended[child], "hangs": hangs, "calls": disk.failing_disk_calls(),
        "hindered": disk.failing_disk_hindered(), "twin": 0 if twin == -9 and seconds >= 0 else twin,
    }  # fmt: skip


def _begun() -> tuple[float, int]:
    """When the process that is forked has begun, and which it is; 0 in itself."""
    ready, begun = os.pipe()
    child = os.fork()
    if not child:
        os.close(ready)
        os.dup2(begun, 99)
        return 0.0, 0
    os.close(begun)
    os.read(ready, 1)
    os.close(ready)
    return time.monotonic(), child


def _ends(
    children: list[int], began: float, signals: list[tuple[float, int, signal.Signals]]
) -> tuple[dict[int, int], bool]:
    """The exit statuses, once all have ended, and whether one had to be killed for not ending."""
    ended: dict[int, int] = {}
    hangs = False
    while len(ended) < len(children):
        for child in children:
            done, status = os.waitpid(child, os.WNOHANG) if child not in ended else (0, 0)
            if done:
                ended[child] = os.waitstatus_to_exitcode(status)
        now = time.monotonic() - began
        if now >= LONGEST and not hangs:
            hangs = True
            signals = [(0.0, child, signal.SIGKILL) for child in children]
        for due in [due for due in signals if now >= due[0]]:
            signals.remove(due)
            if due[1] not in ended:
                os.kill(due[1], due[2])
        time.sleep(0.002)
    return ended, hangs


def _run(base: Path, case: dict[str, Any]) -> None:
    """Does not return: the process ends as a program does, with all that is done at its end."""
    folder, kind = base / "case", case["kind"]
    os.chdir(folder / "out")
    os.environ["TMPDIR"], tempfile.tempdir = str(folder / "tmp"), None
    said = (base / "stdout", base / case.get("stderr", "stderr"))
    for number, name in enumerate((os.devnull, *said)):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.write(99, b".")
    os.close(99)
    if case["memory"]:
        import resource

        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + case["memory"], resource.RLIM_INFINITY))
    with _surroundings(kind):
        status = SCENARIOS[case["scenario"]].run(folder / "out", base / "in")
    sys.exit(status)


@contextlib.contextmanager
def _surroundings(kind: str) -> Iterator[None]:
    if kind == "homeless":
        import pwd

        def unknown(user: int) -> Any:
            raise KeyError(f"getpwuid(): uid not found: {user}")

        pwd.getpwuid = unknown
        for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME", "TIGHTSHIP_CACHE"):
            os.environ.pop(name, None)
    if kind == "no compiler":
        os.environ["PATH"] = "/nonexistent"
        for name in ("CC", "CXX"):
            os.environ.pop(name, None)
    if kind != "threads":
        yield
        return
    over = threading.Event()
    beside = threading.Thread(target=_plan_and_fork, args=(over,))
    beside.start()
    try:
        yield
    finally:
        over.set()
        beside.join()


def _plan_and_fork(over: threading.Event) -> None:
    """What another thread does all the while: it plans, and forks processes that plan."""
    from support.strategies import random_graph
    from tightship.planners import default

    def work(seed: int) -> None:
        graph = random_graph(seed % 16, 8, effect=0.0, calls=0.0)
        default.plan(graph, None, default.Options(seconds=5.0, work=2_000))

    for seed in range(1_000):
        if over.wait(0.01):
            return
        work(seed)
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                work(seed + 1)
                os._exit(0)
            os._exit(1)
        if os.waitpid(child, 0)[1]:
            sys.stderr.write("Traceback of a process that another thread forked\n")


class Server:
    """Runs cases. A context: with its end the folder is gone."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="faults-"))
        given = self.base / "in"
        given.mkdir()
        given_files(given)
        shim = self.base / "failing_disk.so"
        source = HERE / "failing_disk.c"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl"], check=True)
        environment = os.environ | {
            "LD_PRELOAD": str(shim), "TIGHTSHIP_CACHE": "off", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent),
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.faults", str(self.base)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self._calls: dict[str, int] = {}

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()
        shutil.rmtree(self.base, ignore_errors=True)

    def calls(self, scenario: str) -> int:
        """How many calls of a scenario write."""
        if scenario not in self._calls:
            self.clean(scenario)
            self._calls[scenario] = self.run(scenario, Fault())["calls"]
        return self._calls[scenario]

    def clean(self, scenario: str) -> None:
        """The folder as it is before a scenario: old files for every second target, so that both are tried."""
        case = self.base / "case"
        shutil.rmtree(case, ignore_errors=True)
        for name in ("out/pool", "tmp") if SCENARIOS[scenario].torch else ("out", "tmp"):
            (case / name).mkdir(parents=True)
        for target in SCENARIOS[scenario].targets[::2]:
            (case / "out" / target).write_bytes(OLD)

    def run(self, scenario: str, fault: Fault) -> dict[str, Any]:
        """How it ended: ``status``, ``hangs``, ``calls`` that write, ``hindered`` ones, ``stderr``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        case = {"scenario": scenario, **asdict(fault)}
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        answer["stderr"] = (self.base / "stderr").read_text(errors="replace")
        if answer["twin"]:
            answer["stderr"] += (
                f"; its twin, {answer['twin']}: {(self.base / 'stderr-twin').read_text(errors='replace')}"
            )
        return answer


# --- what is promised ---


def random_fault(server: Server, scenario: str, rng: random.Random) -> Fault:
    kind = rng.choice(KINDS)
    if kind == "memory":
        return Fault(kind, memory=rng.choice((1, 2, 4, 8, 16, 32, 64, 128, 256)) << 20)
    if kind in SURROUNDINGS or (kind == "twin" and rng.random() < 0.5):
        return Fault(kind)
    if kind == "read-only":
        return Fault(kind, 1, stays=True)
    if kind == "twin" or (kind in SIGNALS and (rng.random() < 0.5 or not server.calls(scenario))):
        return Fault(kind, seconds=rng.random() * (4.0 if SCENARIOS[scenario].torch else 1.0))
    return Fault(
        kind, rng.randint(1, max(1, server.calls(scenario))), kind not in SIGNALS and rng.random() < 0.5
    )


def judged(server: Server, scenario: str, fault: Fault) -> str:
    """What of the promises was broken, empty if nothing was."""
    server.clean(scenario)
    ended = server.run(scenario, fault)
    killed = fault.kind == "kill" or (fault.kind == "twin" and fault.seconds >= 0)
    said = _wrong_end(scenario, fault, ended) or _wrong_files(
        server, scenario, ended["status"], killed=killed
    )
    if said:
        return f"{scenario}, {fault}: {said}; {_last(ended['stderr'])}"
    again = server.run(scenario, Fault())
    said = "" if again["status"] == 0 else f"status {again['status']}"
    said = said or _wrong_files(server, scenario, 0, killed=False)
    return f"{scenario}, {fault}, then again: {said}; {_last(again['stderr'])}" if said else ""


def _last(text: str) -> str:
    return text.strip()[-400:]


def _wrong_end(scenario: str, fault: Fault, ended: dict[str, Any]) -> str:
    status, said = ended["status"], ended["stderr"]
    if ended["hangs"]:
        return f"takes more than {LONGEST} s"
    if "Traceback" in said or "internal error" in said:
        return f"status {status}, a traceback or an internal error"
    allowed = {0} | STATUS.get(fault.kind, set())
    if fault.kind in ("full", "io", "read-only") and ended["hindered"]:
        allowed |= {2}
    if fault.kind == "read-only" and SCENARIOS[scenario].torch:  # a cache that is not there
        allowed = {0}
    if fault.kind == "memory":
        allowed |= {2, 3}
    if ended["twin"]:
        return f"its twin ended with {ended['twin']}"
    if status not in allowed:
        return f"status {status}, not one of {sorted(allowed)}"
    words = {
        2: "tightship: ",
        3: "out of memory",
        130: "tightship: interrupted",
        143: "tightship: terminated",
    }
    return "" if words.get(status, "") in said else f"status {status} without a word"


def _wrong_files(server: Server, scenario: str, status: int, *, killed: bool) -> str:
    about, out = SCENARIOS[scenario], server.base / "case" / "out"
    for name in about.targets:
        path = out / name
        data = path.read_bytes() if path.exists() else OLD
        if data == OLD and status == 0:
            return f"{name} was not written, and nobody says so"
        if data != OLD and not _whole(path) and (status == 0 or name != STDOUT):
            return f"{name} is neither the old nor a whole one"
    if killed:  # nobody could take away anything; the next that writes the same does
        return ""
    left = [p.name for p in out.iterdir() if p.name not in (*about.targets, *about.kept)]
    left += [f"{p.parent.name}/{p.name}" for kept in about.kept for p in (out / kept).glob("**/.*")]
    left += [f"pool/{p.name}" for p in (out / "pool").glob("*")]  # files there have no names
    left += [f"tmp/{p.name}" for p in (out.parent / "tmp").iterdir() if not OTHERS.fullmatch(p.name)]
    return f"left behind: {left}" if left else ""


def _whole(path: Path) -> bool:
    data = path.read_bytes()
    with contextlib.suppress(Exception):
        if path.suffix == ".json":
            return bool(json.loads(data))
        if path.suffix == ".gz":
            return bool(json.loads(gzip.decompress(data)))
        if path.suffix == ".onnx":
            import onnx

            return onnx.checker.check_model(data) is None
        ends = {
            ".svg": b"</svg>",
            ".html": b"</html>",
            ".h": b"_H */",
            ".pickle": b".",
            ".csv": b"\n",
            ".txt": b"}",
        }
        return data.rstrip(b"\n" if path.suffix != ".csv" else b"").endswith(ends[path.suffix])
    return False


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
