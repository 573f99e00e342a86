"""Measurements and plans kept on disk: JSON in the user's cache folder, safe with several processes.

A file that cannot be read, or holds something else, is as good as none: what it was for is made again and the file
is replaced. Writing merges with the measurements that others wrote meanwhile; losing a race costs a measurement or a
search, never a wrong one. A plan is found by everything that it was made from, and verified whenever it is read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from tightship.diagnose.remedies import advised
from tightship.errors import BadInput, TightshipError
from tightship.files import (
    DEFAULT,
    default_folder,
    folder_of,
    from_json,
    remove_parts,
    to_json,
    write_file,
)
from tightship.frontends.torch.capture.looks import LOOKS, Look, Looks
from tightship.graph import MOST_BYTES, Graph
from tightship.options import filled
from tightship.plan import Plan
from tightship.planners.default import Options
from tightship.planners.evict.problem import Progress
from tightship.planners.floor import same_ops
from tightship.serde import dumps_plan, loads_plan
from tightship.simulate import baseline, replay
from tightship.units import Budget, parse_budget
from tightship.verify import check

__all__ = [
    "DEFAULT",
    "Cache",
    "KeptLooks",
    "KeptPartitions",
    "KeptPlans",
    "Measurement",
    "Partition",
    "Unplanned",
    "default_folder",
    "folder_of",
    "machine",
    "partition_plan",
    "plan_of",
]

_LOG = logging.getLogger("tightship.cache")

VERSION = 4
"""Raised when measurements or plans change their meaning."""

MOST_MEASUREMENTS = 50_000
"""Of one machine; the oldest are forgotten."""

MOST_PLAN_BYTES = 256 << 20
"""Of all plans' files; those not read for longest are removed."""


UNREADABLE = (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What reading and decoding a file raises."""

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=MOST_BYTES)]
_Index = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]


class Measurement(msgspec.Struct, frozen=True, array_like=True):
    """Of one call: seconds, bytes beyond its results, requests as (size, storage, start, end), and which of the
    values it is given its result was laid over without changing (None: not tried). ``rough``: the limit in seconds
    that left no time to time it well, 0 where there was time."""

    time: _Seconds
    workspace: _Bytes = 0
    requests: tuple[tuple[_Bytes, _Index, _Index, _Index], ...] = ()
    over: tuple[_Index, ...] | None = None
    rough: _Seconds = 0.0


class _File(msgspec.Struct):
    machine: str
    entries: dict[str, Measurement]


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = [x.partition(":")[2].strip() for x in lines if x.startswith(("model name", "flags", "Features"))]
    return " ".join(dict.fromkeys(found)) or platform.machine()


def machine(measured: bool) -> str:
    """What measurements depend on besides the op; ``measured``: requests were recorded, not only times."""
    what = (VERSION, _processor(), os.cpu_count(), torch.get_num_threads(), torch.__version__, measured)
    flags = (torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.is_available())
    return hashlib.sha256(repr((what, flags, torch.get_float32_matmul_precision())).encode()).hexdigest()[:32]


class Cache:
    """Measurements of one machine. ``note`` says what was wrong with the file, if something was.

    ``folder`` None keeps them in memory only.
    """

    def __init__(self, folder: Path | str | None, machine: str) -> None:
        self.machine = machine
        self.path = None if folder is None else Path(folder) / f"profile-{machine}.json"
        self.note = ""
        self._new: dict[str, Measurement] = {}
        self._known = self._read()

    def get(self, key: str) -> Measurement | None:
        return self._new.get(key) or self._known.get(key)

    def put(self, key: str, measurement: Measurement) -> None:
        self._new[key] = measurement

    def save(self) -> None:
        """Writes what was measured since the last save. Not being able to is a note, not an error."""
        if self.path is None or not self._new:
            return
        known = {**self._read(), **self._known, **self._new}
        self._known = dict(islice(known.items(), max(0, len(known) - MOST_MEASUREMENTS), None))
        self._new = {}
        error = _write(self.path, to_json(_File(self.machine, self._known)))
        if error:
            self.note = f"measurements could not be kept: {error}"

    def _read(self) -> dict[str, Measurement]:
        if self.path is None:
            return {}
        try:
            file = from_json(self.path.read_bytes(), _File)
        except FileNotFoundError:
            return {}
        except UNREADABLE as error:
            self.note = (
                f"the measurements kept in {self.path.name} cannot be read and are made again: {error}"
            )
            return {}
        return file.entries if file.machine == self.machine else {}


def _write(path: Path, data: bytes) -> str:
    """Makes the file, complete or not at all; returns why not, empty if it is there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)
        remove_parts(path.parent)
    except (OSError, BadInput) as error:
        return str(error)
    return ""


# --- what results look like ---


class _LooksFile(msgspec.Struct):
    machine: str
    looks: dict[str, Look]


class KeptLooks:
    """What the results of calls look like, kept in ``folder`` (None: nowhere): what the first capture on a machine
    finds out by formulas and by runs on zeros, later ones read. A plan's first run compares each result with it."""

    def __init__(self, folder: Path | None, looks: Looks = LOOKS) -> None:
        self._looks, self._count, self.note = looks, looks.count, ""
        self._machine = machine(False)
        self._path = None if folder is None else folder / f"looks-{self._machine}.json"
        looks.learn(self._read())

    def keep(self) -> None:
        """Writes them if there are new ones."""
        if self._path is None or self._looks.count == self._count:
            return
        self._count = self._looks.count
        self._looks.learn(self._read())
        error = _write(self._path, to_json(_LooksFile(self._machine, self._looks.known)))
        if error:
            self.note = f"what results look like could not be kept: {error}"

    def _read(self) -> dict[str, Look]:
        if self._path is None:
            return {}
        try:
            file = from_json(self._path.read_bytes(), _LooksFile)
        except FileNotFoundError:
            return {}
        except UNREADABLE as error:
            self.note = f"what is kept in {self._path.name} cannot be read and is found out again: {error}"
            return {}
        return file.looks if file.machine == self._machine else {}


# --- plans ---


class _PlanFile(msgspec.Struct):
    key: str
    plan: msgspec.Raw


@dataclass(frozen=True)
class KeptPlans:
    """The default planner with ``options``; its plans are kept in ``folder`` (None: nowhere). ``like``: as for
    `default.plan`. ``seconds``: what is left of those of the options, where some are spent by now.

    A plan's file is named by a digest of what it was made from: the measured graph (which the machine and torch's
    version are behind), budget and options, and the planner's own code. It is verified when it is read. A file that
    is damaged or not this plan's is noted in the plan that is made in its stead.
    """

    folder: Path | None
    options: Options

    def __call__(
        self, graph: Graph, budget: Budget | str | int | None = None, progress: Progress | None = None,
        like: Sequence[tuple[Graph, Plan]] = (), seconds: float = math.inf,
    ) -> Plan:  # fmt: skip
        o = replace(self.options, seconds=min(self.options.seconds, seconds))
        like = [(g, p) for g, p in like if same_ops(g, graph)][:1]
        least = KeptLeast(self.folder)
        if self.folder is None:
            return advised(graph, budget, o, progress, like, least)
        wanted = None if budget is None else parse_budget(budget)
        key = self._key(graph, wanted, [p for _, p in like])
        path = self.folder / f"plan-{key[:32]}.json"
        plan, note = _read_plan(path, key, graph, wanted)
        if plan is not None:
            return plan
        made = advised(graph, budget, o, progress, like, least)
        error = _write(path, to_json(_PlanFile(key, msgspec.Raw(dumps_plan(made)))))
        if error:
            note = f"the plan could not be kept: {error}"
        else:
            _remove_oldest(self.folder)
        return replace(made, notes=(*made.notes, note)) if note else made

    def with_options(self, changed: Mapping[str, object]) -> KeptPlans:
        return replace(self, options=filled(type(self.options), asdict(self.options) | dict(changed), "fit"))

    def knows(self, graph: Graph, budget: int) -> bool:
        """Whether a plan within the budget was found in a search that failed, so that it will not be refused."""
        return KeptLeast(self.folder).within(graph, self.options, budget) is not None

    def _key(self, graph: Graph, budget: Budget | None, like: Sequence[Plan]) -> str:
        begins = [(p.digest, p.budget, p.time, p.peak) for p in like]
        made_from = (VERSION, _planner_code(), torch.__version__, self.options, budget, begins)
        h = hashlib.sha256(repr(made_from).encode())
        _digest(graph, h.update)
        return h.hexdigest()


def _digest(graph: Graph, add: Callable[[bytes], None], *, times: bool = True) -> None:
    """Everything of a graph that planners can see, or all but ``times``. Source lines are for people only."""
    add(repr((graph.digest, graph.machine if times else None, graph.meta)).encode())
    for s in graph.storages:
        add(repr((s.name, s.kind)).encode())
    for o in graph.ops:
        seconds = o.time if times else 0.0
        add(repr((o.name, o.module, o.phase, o.device, seconds, o.flops, o.workspace, o.requests)).encode())
        for inner in o.calls:
            _digest(inner, add, times=times)


@dataclass(frozen=True)
class KeptLeast:
    """Plans of the least budgets that failed searches named, kept in ``folder`` as other plans are, or, where that
    is None, as long as the process lives: what was named once is never refused, though a later search, with other
    times or in less time, may not come to it again.

    Such a plan is found by the bytes of its graph and by what its options allow, and verified whenever it is read.
    """

    folder: Path | None

    def within(self, graph: Graph, o: Options, budget: int) -> Plan | None:
        """One that was kept, verified, if there is one within the budget."""
        plan = self._read(graph, self._key(graph, o))
        return None if plan is None or plan.budget is None or plan.budget > budget else replace(
            plan, budget=budget, notes=(*plan.notes, _LEAST_NOTE)
        )  # fmt: skip

    def offer(self, graph: Graph, o: Options, plan: Plan) -> int:
        """Keeps a plan unless a lesser one is kept; returns the least budget."""
        assert plan.budget is not None
        key = self._key(graph, o)
        kept = self._read(graph, key)
        if kept is not None and kept.budget is not None and kept.budget <= plan.budget:
            return kept.budget
        if self.folder is None:
            _least_here.pop(key, None)
            _least_here[key] = plan
            for old in list(_least_here)[:-_MOST_HERE]:
                del _least_here[old]
        else:
            _write(self._path(key), to_json(_PlanFile(key, msgspec.Raw(dumps_plan(plan)))))
            _remove_oldest(self.folder)
        return plan.budget

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"plan-least-{key[:32]}.json"

    def _key(self, graph: Graph, o: Options) -> str:
        allowed = replace(o, order="", evict="", seconds=0.0, work=0, gap=0.0, seed=0)
        h = hashlib.sha256(repr((VERSION, _planner_code(), torch.__version__, allowed)).encode())
        _digest(graph, h.update, times=False)
        return h.hexdigest()

    def _read(self, graph: Graph, key: str) -> Plan | None:
        """The plan that was kept, with the times that the graph has now."""
        if self.folder is None:
            plan = _least_here.get(key)
        else:
            plan = _plan_of_file(self._path(key), key)
        if plan is None:
            return None
        line = replay(graph, plan.steps)
        once = sum(op.time for op in graph.ops)
        plan = replace(plan, time=line.time, time_before=once, time_bound=0.0, termination="")
        try:
            check(graph, plan)
        except TightshipError:
            return None  # of other times: copies that come later leave memory later
        return plan


_LEAST_NOTE = "the search found no plan: this one is of an earlier search for the least memory"
_MOST_HERE = 16
_least_here: dict[str, Plan] = {}
"""By key, those used last at the end."""


def _plan_of_file(path: Path, key: str) -> Plan | None:
    try:
        file = from_json(path.read_bytes(), _PlanFile)
        plan, _ = loads_plan(bytes(file.plan), path.name)
    except (*UNREADABLE, TightshipError):
        return None
    return plan if file.key == key else None


@functools.cache
def _planner_code() -> str:
    """Which planners there are: the package's version, and of what is installed the sizes and times."""
    root = Path(__file__).resolve().parents[1]
    rows = [version("tightship")]
    for file in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".so", ".pyd")):
        about = file.stat()
        rows.append(f"{file.relative_to(root)} {about.st_size} {about.st_mtime_ns}")
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def _read_plan(path: Path, key: str, graph: Graph, budget: Budget | None) -> tuple[Plan | None, str]:
    """The plan that was kept, verified; None with what was wrong with the file, if there is one."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"the plan kept in {path.name} cannot be read and is made again: {error}"
    try:
        file = from_json(data, _PlanFile)
        plan, _ = loads_plan(bytes(file.plan), path.name)
        check(graph, plan)
        limit = None
        if budget is not None:
            limit = budget.resolve(replay(graph, baseline(graph)).peak, static=graph.static_bytes)
        if file.key != key or plan.digest != graph.digest or plan.budget != limit:
            return None, f"the plan kept in {path.name} is another one and is made again"
    except (*UNREADABLE, TightshipError) as error:
        said = str(error).splitlines()[0]
        return None, f"the plan kept in {path.name} is damaged and is made again: {said}"
    with contextlib.suppress(OSError):
        os.utime(path)  # the oldest go first
    return plan, ""


def _remove_oldest(folder: Path) -> None:
    """Keeps the files of plans within `MOST_PLAN_BYTES`. Others may remove some at the same time."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.glob("plan-*"):
            with contextlib.suppress(OSError):
                about = path.stat()
                found.append((about.st_mtime_ns, about.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= MOST_PLAN_BYTES:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size


def made_here() -> tuple[Any, ...]:
    """What everything that is kept of compiled mode depends on: version, machine, and tightship's own code."""
    return VERSION, machine(False), _planner_code()


def write_kept(path: Path, data: bytes) -> None:
    """Writes a file of plans and keeps them all within `MOST_PLAN_BYTES`. Where that is not possible the log says so,
    once for each folder: the next process decides everything again."""
    error = _write(path, data)
    if not error:
        _remove_oldest(path.parent)
    elif path.parent not in _not_kept:
        _not_kept.add(path.parent)
        _LOG.warning("what was decided could not be kept for the next process: %s", error)


_not_kept: set[Path] = set()


# --- partitions of compiled mode ---


class Partition(msgspec.Struct, frozen=True):
    """A partition that was chosen: Inductor's own at an ``activation_memory_budget`` of ``share`` or, where that is
    null, what ``plan`` or, where that is null too, ``source`` says. ``peak`` and ``needed`` (with its arena) were
    replayed in bytes; ``recomputed`` kernels take ``seconds``; so many were ``lowered`` until it was found;
    ``lean``: of the graph as it is written for memory."""

    source: str
    share: float | None
    plan: msgspec.Raw
    peak: int
    needed: int
    recomputed: int
    seconds: float
    lowered: int
    lean: bool = False


class Unplanned(msgspec.Struct, frozen=True):
    """Bytes of Inductor's own partition: as `StepReplay` has them, and ``needed`` with an arena."""

    static: int
    peaks: tuple[int, ...]
    rest: int
    handed: tuple[int, ...]
    needed: int


class _PartitionFile(msgspec.Struct):
    key: str
    unplanned: Unplanned
    chosen: dict[str, Partition]


class KeptPartitions:
    """What was chosen for a joint graph, by budget, kept in ``folder`` (None: nowhere). ``made_from``: everything
    that the choice depends on but the machine and the planner's code, which are added. What is read is compared with
    the compiled code's own lines before it runs."""

    def __init__(self, folder: Path | None, made_from: object) -> None:
        parts = (*made_here(), made_from)
        self._key = hashlib.sha256(repr(parts).encode()).hexdigest()
        self._path = None if folder is None else folder / f"plan-compiled-{self._key[:32]}.json"

    def read(self) -> tuple[Unplanned, dict[str, Partition]] | None:
        if self._path is None:
            return None
        try:
            file = from_json(self._path.read_bytes(), _PartitionFile)
        except UNREADABLE:
            return None
        return (file.unplanned, file.chosen) if file.key == self._key else None

    def keep(self, unplanned: Unplanned, budget: int | None, chosen: Partition) -> None:
        """Adds what was chosen within ``budget``."""
        if self._path is None:
            return
        known = self.read()
        rows = {**({} if known is None else known[1]), str(budget): chosen}
        write_kept(self._path, to_json(_PartitionFile(self._key, unplanned, rows)))

    def reached(self, unplanned: Unplanned, least: Partition) -> None:
        """Adds the least that was found where nothing was within the budget: it is what a budget of so many bytes
        gets."""
        known = self.read()
        if known is None or str(least.needed) not in known[1]:
            self.keep(unplanned, least.needed, least)

    def within(self, budget: int) -> Partition | None:
        """The fastest of what was found for other budgets that is within this one, too."""
        known = self.read()
        fits = [] if known is None else [row for row in known[1].values() if row.needed <= budget]
        return min(fits, key=lambda row: (row.seconds, row.needed), default=None)

    def forget(self) -> None:
        """Removes what does not hold any more."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


def plan_of(partition: Partition) -> Plan | None:
    """The plan in it. Raises ``BadInput`` for a damaged one."""
    data = bytes(partition.plan)
    return None if data == b"null" else loads_plan(data, "kept partition")[0]


def partition_plan(plan: Plan | None) -> msgspec.Raw:
    """A plan as `Partition` has it."""
    return msgspec.Raw(b"null" if plan is None else dumps_plan(plan))
