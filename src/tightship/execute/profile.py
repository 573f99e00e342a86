"""Profile: what each op of a program costs on this machine, in seconds, bytes and allocator requests.

Ops with the same target and the same argument metadata are measured once, on tensors made for it; the model's
own are never touched. A measurement is kept on disk for the next time. Where time is limited, ops are timed in fewer
runs and then not at all: bytes are always measured.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from tightship.errors import Unplannable, Unsupported
from tightship.execute import allocator
from tightship.execute.bench import (
    LONG_CALL,
    Bench,
    Row,
    UpdateRun,
    in_place_inputs,
    rehearsed,
    rows_of_update,
    sample_arguments,
    workspace_of,
)
from tightship.execute.cache import DEFAULT, Cache, Measurement, folder_of, machine
from tightship.execute.compile import updater_of
from tightship.execute.speeds import device_speeds, speeds
from tightship.frontends.torch import compat, compat_distributed, compat_ops
from tightship.frontends.torch.capture.readings import Read
from tightship.frontends.torch.collectives import Collective, unsent
from tightship.frontends.torch.optimizer.attributes import traits
from tightship.frontends.torch.optimizer.probe import BY_ITSELF
from tightship.frontends.torch.optimizer.updates import Updater
from tightship.frontends.torch.program import Call, Program, Ref, dtype_of, flat, mismatch, refs_in
from tightship.graph import ALIGNMENT, Op, Request, aligned
from tightship.machine import BANDWIDTH, FLOPS, OVERHEAD, modeled_time
from tightship.options import Deadline

_REFUSES: Final = (RuntimeError, ValueError, TypeError, IndexError)
"""What an op raises for contents that it does not run on."""
_HEAVY: Final = 10**7
"""Floating-point operations from which on an op takes some milliseconds: it is not run once more for a first time."""

_FEWER: Final = 0.25
"""The part of the seconds from which on ops are timed in one run each."""
MEASURING: Final = 0.5
"""The part of the seconds from which on ops are not timed any more."""
_KIN: Final = 8.0
"""How many times as long as another, by a model, an op may take whose time follows from the other's."""

__all__ = ["BANDWIDTH", "FLOPS", "MEASURING", "OVERHEAD", "Measured", "model", "profile"]

Measured = Callable[[int, int], None]
"""Is told how many of how many ops are measured."""


def model(
    program: Program, *, flops: float = FLOPS, bandwidth: float = BANDWIDTH, overhead: float = OVERHEAD
) -> Program:
    """The program with modeled times, for graphs that cannot run here; workspaces and requests stay unknown.

    The roofline: an op takes as long as its arithmetic (at ``flops`` operations per second) or its traffic
    (at ``bandwidth`` bytes per second), whichever is longer, plus ``overhead`` seconds.
    """
    ops = tuple(_modeled(program, k, flops, bandwidth, overhead) for k in range(len(program.graph.ops)))
    return replace(program, graph=program.graph.with_ops(ops))


def _modeled(program: Program, k: int, flops: float, bandwidth: float, overhead: float) -> Op:
    graph = program.graph
    op = graph.ops[k]
    made = {graph.values[v].storage for v in op.outputs} | set(op.mutates)
    traffic = sum(_bytes(program, v) for v in op.inputs) + sum(graph.storages[s].size for s in made)
    seconds = modeled_time(op.flops, traffic, rate=flops, bandwidth=bandwidth, overhead=overhead)
    return replace(op, time=seconds)


def _bytes(program: Program, value: int) -> int:
    info = program.graph.values[value]
    size = program.graph.storages[info.storage].size
    count = 1
    for n, s in zip(info.shape, info.stride, strict=True):
        count *= n if s else 1
    return min(size, count * dtype_of(info.dtype).itemsize)


def profile(
    program: Program,
    *,
    cache: Path | str | None = DEFAULT,
    seconds_per_op: float = 0.01,
    folder: Path | str | None = None,
    pinned: int | None = None,
    seconds: float = math.inf,
    say: Measured | None = None,
) -> Program:
    """The program with measured ``time``, ``workspace`` and ``requests`` on its ops, and ``replay_requests``; its
    graph's ``machine`` says what copies and codecs cost here: to ``folder``; from a GPU to pinned memory, or to
    ``folder`` where ``pinned`` says how much of that there is.

    ``cache`` is the folder measurements are kept in (default: as `default_folder` says), None for none.
    ``seconds_per_op`` bounds how long one op is repeated for its time. Random states are left as they were. Without
    a C++ compiler times alone are measured; ops that cannot run here (other devices, effects) are modeled. Both are
    said in the program's notes.

    ``seconds`` is what measuring and the search that follows may take: when a quarter of it is over, an op is timed
    in one run, when half of it is over, in none; then its time follows from that of an op of the same kind and like
    size, or, without one, is that of the run in which its requests were recorded. What was measured so is measured
    anew only when there are more seconds. Each op is run for its requests in any case. ``say`` is told how far it is.

    Raises ``Unsupported`` naming op, module and line if what an op really returns is not what was captured.
    """
    devices = sorted({op.device for op in program.graph.ops if _runs_here(op.device)} | {"cpu"})
    with_requests = {d: allocator.available(allocator.kind_of(d)) for d in devices}
    kept = Cache(folder_of(cache), machine(all(with_requests.values())))
    states = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        with compat.plain_execution():
            measured = _Profiler(program, kept, with_requests, seconds_per_op, _Hurry(seconds))
            ops = tuple(measured.ops(say))
            on_gpu = next((d for d in devices if d != "cpu"), None)
            figures = speeds(kept, folder) if on_gpu is None else device_speeds(kept, on_gpu, pinned, folder)
    finally:
        torch.set_rng_state(states)
        for index, state in enumerate(cuda_states):
            torch.cuda.set_rng_state(state, index)
        kept.save()
    notes = [*program.notes, *measured.notes(), *([kept.note] if kept.note else [])]
    return replace(
        program,
        graph=replace(program.graph, ops=ops, machine=figures),
        replay_requests=measured.replays,
        notes=tuple(dict.fromkeys(notes)),
    )


class _Hurry:
    """What is left of the seconds that an answer is wanted in."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._few, self._none = (Deadline.after(part * seconds) for part in (_FEWER, MEASURING))

    @property
    def mark(self) -> float:
        """What measurements that had too little time are marked with."""
        return max(self.seconds, 1e-9)

    @property
    def few(self) -> bool:
        return self._few.over

    @property
    def over(self) -> bool:
        return self._none.over


class _Profiler:
    def __init__(
        self, program: Program, cache: Cache, with_requests: dict[str, bool], seconds: float, hurry: _Hurry
    ) -> None:
        self.program, self.graph = program, program.graph
        self.cache, self.with_requests = cache, with_requests
        self.hurry = hurry
        self.kin: dict[str, list[tuple[float, float]]] = {}  # by target: seconds by a model, and measured
        self.keys: set[str] = set()
        self.rough: set[str] = set()
        self.benches = {d: Bench(seconds, recorded, d) for d, recorded in with_requests.items()}
        self.replays: dict[int, tuple[Request, ...]] = {}
        self.modeled: list[str] = []

    def notes(self) -> list[str]:
        notes = []
        for device, recorded in self.with_requests.items():
            if not recorded:
                why = allocator.why_not(allocator.kind_of(device))
                notes.append(f"{why}: workspaces are unknown, and counted as 0")
        if self.rough:
            limit = f" (seconds={self.hurry.seconds:g})" if self.hurry.seconds < math.inf else ""
            notes.append(
                f"{len(self.rough)} of {len(self.keys)} kinds of ops were timed in one run or none, as measuring "
                f"takes half of the seconds{limit} at most: their bytes are exact; more seconds= measure them"
            )
        if self.modeled:
            names = ", ".join(dict.fromkeys(self.modeled[:3]))
            notes.append(f"{len(self.modeled)} ops were not run but modeled ({names}, …)")
        return notes

    def ops(self, say: Measured | None) -> Iterator[Op]:
        count = len(self.graph.ops)
        for k in range(count):
            yield self.op(k)
            if say is not None:
                say(k + 1, count)

    def op(self, k: int) -> Op:
        op = self.graph.ops[k]
        fn = self.program.calls[k].fn
        if isinstance(fn, Collective) and op.device in self.benches:
            return self.collective(k, fn)
        if isinstance(fn, Read):
            return replace(op, time=0.0)
        usual = self.check(k) if op.effect and op.device in self.benches else None
        if op.device not in self.benches or (op.effect and usual is None):
            self.modeled.append(op.target)
            return _modeled(self.program, k, FLOPS, BANDWIDTH, OVERHEAD)
        usual = usual or self.call(k, self.program.calls[k])
        if self.on_host(k):
            return replace(op, time=usual.time)
        workspace, requests = usual.workspace, _requests(usual)
        if k in self.program.replays:
            again = self.call(k, self.program.replays[k])
            if _requests(again) != requests:
                self.replays[k] = _requests(again)
                workspace = max(workspace, again.workspace)
        safe = self.overwrites(op, self.program.calls[k], usual)
        return replace(op, time=usual.time, workspace=workspace, requests=requests, overwrites=safe)

    def collective(self, k: int, fn: Collective) -> Op:
        """Run without sending: its bytes are those of any run, its time is that and what sending takes."""
        call = self.program.calls[k]
        with unsent():
            usual = self.call(k, call)
        given = [self.graph.values[v] for v in refs_in((call.args, call.kwargs))]
        nbytes = sum(math.prod(v.shape) * dtype_of(v.dtype).itemsize for v in given)
        return replace(
            self.graph.ops[k], time=usual.time + fn.seconds(call.args, nbytes), workspace=usual.workspace,
            requests=_requests(usual),
        )  # fmt: skip

    def check(self, k: int) -> Measurement | None:
        """Of an op that only looks at its arguments, which may ask for memory; None for any other effect, and where
        it raises for arguments like these."""
        fn = self.program.calls[k].fn
        if compat_distributed.is_collective(fn) or not hasattr(fn, "_schema"):
            return None
        try:
            return self.call(k, self.program.calls[k])
        except Unsupported:
            return None

    def overwrites(self, op: Op, call: Call, measured: Measurement) -> tuple[tuple[int, int], ...]:
        """Those of the op's that were tried and gave the same result."""
        values = list(dict.fromkeys(refs_in((call.args, call.kwargs))))
        wrong = {self.graph.values[v].storage for n, v in enumerate(values) if n not in (measured.over or ())}
        return tuple((a, b) for a, b in op.overwrites if a not in wrong)

    def on_host(self, k: int) -> bool:
        """Whether an op runs on the CPU beside a GPU, where no bytes are planned."""
        return self.graph.ops[k].device == "cpu" and len(self.benches) > 1

    def call(self, k: int, call: Call) -> Measurement:
        key = _key(self.program, k, call)
        found = self.cache.get(key)
        if found is None or (0 < found.rough < self.hurry.seconds and not self.hurry.few):
            over = None if found is None else found.over
            found = msgspec.structs.replace(self.measure(k, call), over=over)
            self.cache.put(key, found)
        if found.over is None and self.graph.ops[k].overwrites:
            found = msgspec.structs.replace(found, over=self.over(k, call))
            self.cache.put(key, found)
        if key not in self.keys:
            self.keys.add(key)
            if found.rough:
                self.rough.add(key)
            else:
                self.kin.setdefault(self.graph.ops[k].target, []).append((self.by_model(k), found.time))
        return found

    def by_model(self, k: int) -> float:
        return _modeled(self.program, k, FLOPS, BANDWIDTH, OVERHEAD).time

    def estimated(self, k: int, once: float) -> float:
        """The time of an op that there is no time to time: as that of the op of its kind that is nearest in size, or
        else what it took ``once``."""
        own = self.by_model(k)
        rows = self.kin.get(self.graph.ops[k].target, [])
        nearest = min(rows, key=lambda row: abs(math.log(row[0] / own)), default=None)
        if nearest is None or not 1 / _KIN <= own / nearest[0] <= _KIN:
            return once
        return nearest[1] * own / nearest[0]

    def over(self, k: int, call: Call) -> tuple[int, ...]:
        device = self.graph.ops[k].device
        if not self.with_requests[device]:
            return ()
        try:
            return in_place_inputs(self.graph, call, device, self.benches[device].room)
        except _REFUSES:  # what it is tried with
            return ()

    def measure(self, k: int, call: Call) -> Measurement:
        device = self.graph.ops[k].device
        bench, updater = self.benches[device], updater_of(call)
        if updater is not None:
            with self.runs(k):
                return self.update(updater, bench)
        with self.runs(k):
            if compat_ops.asks_by_row(call.fn):
                return self.at_worst(k, call, bench)
            try:
                return self.measured(k, call, self.work(k, call, device))
            except _REFUSES as refused:
                with suppress(*_REFUSES):
                    return self.measured(k, call, self.work(k, call, device, ones=True))
                raise refused

    def measured(self, k: int, call: Call, work: Callable[[], list[Any]]) -> Measurement:
        """What ``work``, which runs the call, takes."""
        bench = self.benches[self.graph.ops[k].device]
        few, untimed = self.hurry.few, self.hurry.over
        kept = [position for position, v in enumerate(call.results) if v >= 0]

        def once(run: Callable[..., Any]) -> tuple[Measurement, bool, int]:
            """With whether later runs ask the same, and how many bytes stay."""
            results, events, first = run(work, kept)
            made = self.verify(k, call, results, events)
            del results
            size = sum(self.graph.storages[s].size for s in self.graph.uses.defines[k])
            workspace, rows, hoarded = workspace_of(events, made, size)
            if untimed:
                seconds, same = self.estimated(k, first), True
            else:
                seconds, same = bench.time(work, [row[0] for row in rows], first, roughly=few)
            rough = self.hurry.mark if untimed or (few and first < LONG_CALL) else 0.0
            return Measurement(seconds, workspace, rows, rough=rough), same, hoarded

        found, same, hoarded = None, False, 0
        # The run for its time says whether it asks the same.
        if self.graph.ops[k].flops >= _HEAVY and not untimed:
            found, same, hoarded = once(bench.first_run)
        if found is None or not same or hoarded:
            found, same, hoarded = once(bench.run)
        if hoarded:
            raise Unsupported(self.where(k), f"it keeps {hoarded} bytes that it does not return")
        return found

    def at_worst(self, k: int, call: Call, bench: Bench) -> Measurement:
        """Of an op whose temporaries follow from data: one block with room for the most of them, which it asks for
        when each row is looked up once and too long."""
        args, kwargs = sample_arguments(self.graph, call, self.graph.ops[k].device)
        fn, (weight, indices) = compat_ops.direct(call.fn), args[:2]
        rows = torch.arange(indices.numel(), device=indices.device).reshape(indices.shape) % weight.shape[0]

        weight.fill_(1e4)
        indices.copy_(rows)

        def work() -> list[Any]:
            fn(*args, **kwargs)
            return []

        _, events, first = bench.run(work, [], warm=True)  # in later runs no row is too long
        run = UpdateRun(events, first)
        sizes = [e.nbytes for e in events if e.kind == "alloc"]
        seconds = first if self.hurry.over else bench.time(work, sizes, first, roughly=self.hurry.few)[0]
        rough = self.hurry.mark if self.hurry.few and first < LONG_CALL else 0.0
        block: tuple[Row, ...] = ((run.extent, -1, 0, 1),) if run.extent else ()
        return Measurement(seconds, run.extent, block, rough=rough)

    def update(self, updater: Updater, bench: Bench) -> Measurement:
        """An update is run on copies, several times: what it asks for may depend on gradients and steps."""
        elements = sum(m.param.numel() for m in updater.members)
        runs, begun = rehearsed(updater.rehearsal(), bench, exact=updater.exact, elements=elements)
        workspace, rows = rows_of_update(runs, begun, exact=updater.exact, keeps=updater.keeps)
        return Measurement(min(r.seconds for r in runs), workspace, rows)

    @contextmanager
    def runs(self, k: int) -> Iterator[None]:
        """Says which op it is that does not run."""
        try:
            yield
        except _REFUSES as error:
            why = f"it does not run on tensors like those of the step: {error}"
            updates = self.graph.ops[k].phase == "update"
            raise Unplannable(self.where(k), why, BY_ITSELF if updates else "") from error

    def work(self, k: int, call: Call, device: str, *, ones: bool = False) -> Callable[[], list[Any]]:
        contents = self.program.samples.get(k)
        args, kwargs = sample_arguments(self.graph, call, device, contents, ones=ones)
        fn = compat_ops.direct(call.fn)
        return lambda: flat(fn(*args, **kwargs))

    def where(self, k: int) -> str:
        return f"{self.graph.ops[k].target} at {self.graph.place(k)}"

    def verify(self, k: int, call: Call, results: Sequence[Any], events: Sequence[Any]) -> dict[int, int]:
        """Which request became which of the storages the op defines."""
        defines = self.graph.uses.defines[k]
        made: dict[int, int] = {}
        for v, tensor in zip(call.results, results, strict=False):
            if v < 0:
                continue
            wrong = mismatch(self.program, v, tensor)
            data = tensor.untyped_storage().data_ptr() if wrong is None else 0
            planned = self.graph.storages[self.graph.values[v].storage].pool == "device"
            if (
                wrong is None
                and planned
                and self.with_requests[self.graph.ops[k].device]
                and tensor.untyped_storage().nbytes()
            ):
                ids = [e.id for e in events if e.kind == "alloc" and e.data_ptr == data]
                if ids:
                    made[ids[-1]] = defines.index(self.graph.values[v].storage)
                else:
                    wrong = "memory that it did not ask for itself"
            if wrong:
                raise Unsupported(self.where(k), f"its result has {wrong}, which shape inference did not say")
        return made


def _runs_here(device: str) -> bool:
    return device == "cpu" or (allocator.kind_of(device) == "cuda" and torch.cuda.is_available())


def _requests(m: Measurement) -> tuple[Request, ...]:
    return tuple(Request(*row) for row in m.requests)


# --- what makes two calls the same ---


def _key(program: Program, k: int, call: Call) -> str:
    device = program.graph.ops[k].device
    values = list(dict.fromkeys(refs_in((call.args, call.kwargs))))
    number = {v: n for n, v in enumerate(values)}
    made = [None if v < 0 else _metadata(program, v, whole=True) for v in call.results]
    updater = updater_of(call)
    given = call.args
    if isinstance(call.fn, Collective):
        given = (*given[:-1], len(call.fn.group(given)))
    parts: tuple[Any, ...] = (
        (str(call.fn), compat_ops.asks_by_row(call.fn)) if updater is None else _update_key(updater),
        _plain((given, call.kwargs), number),
        [_metadata(program, v) for v in values],
        made,
        device if device == "cpu" else torch.cuda.get_device_name(device),
        *((n, _contents(t)) for n, t in program.samples.get(k, {}).items()),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _contents(tensor: Any) -> Any:
    """What of a sample decides what an op asks of the allocator: of masks, how much they select."""
    if tensor.dtype in (torch.bool, torch.uint8):
        return int(tensor.count_nonzero())
    return hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).hexdigest()


def _metadata(program: Program, value: int, *, whole: bool = False) -> tuple[Any, ...]:
    info = program.graph.values[value]
    itemsize = dtype_of(info.dtype).itemsize
    storage = program.graph.storages[info.storage]
    size = storage.size if whole else 0
    if storage.pool == "host":
        return info.dtype, info.shape, info.stride, storage.pool
    return info.dtype, info.shape, info.stride, info.offset * itemsize % ALIGNMENT, aligned(size)


def _plain(tree: Any, number: dict[int, int]) -> Any:
    if isinstance(tree, Ref):
        return f"%{number[tree.value]}"
    if isinstance(tree, (list, tuple)):
        return [_plain(x, number) for x in tree]
    if isinstance(tree, dict):
        return {name: _plain(x, number) for name, x in tree.items()}
    return tree


def _update_key(updater: Updater) -> tuple[Any, ...]:
    """The optimizer's class and settings; learning rates change by schedules and cost nothing."""
    cls = type(updater.optimizer)
    groups = [updater.optimizer.param_groups[m.group] for m in updater.members]
    settings = [
        {n: x for n, x in g.items() if n not in ("params", "lr", "initial_lr", "param_names")} for g in groups
    ]
    rows = [
        (repr(sorted(s.items())), type(g.get("lr")).__name__) for s, g in zip(settings, groups, strict=True)
    ]
    own = () if updater.exact else traits(updater.optimizer)
    own += tuple(f"{m.rows} rows" for m in updater.members if m.rows)
    own += () if updater.exact or updater.materialized else ("begins",)  # which may take more than later ones
    return (
        "rehearsed, at intervals",
        cls.__module__,
        cls.__qualname__,
        updater.keeps,
        own,
        *(rows if len(rows) == 1 else [rows]),
    )
