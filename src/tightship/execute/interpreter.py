"""Executor: runs a plan op by op, every request of the step served from one arena at its planned offset."""

from __future__ import annotations

import contextlib
import os
import re
import traceback
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tightship.errors import BadInput, BudgetExceeded, Unsupported, VerificationFailed
from tightship.execute import allocator
from tightship.execute.allocator import Meter
from tightship.execute.away import Fetch, FetchPiece
from tightship.execute.compile import Code, Instruction, compile_plan
from tightship.execute.host_pool import FilePool, HostPool, PinnedPool, pool_beside
from tightship.execute.interrupts import Updating
from tightship.execute.script import HEAP, PlannedRequests, device_of, needs_memory, planned_requests
from tightship.execute.transfers import host_offsets
from tightship.frontends.torch import compat
from tightship.frontends.torch.capture.readings import Read
from tightship.frontends.torch.program import Program, Slot, mismatch
from tightship.plan import Plan, Step
from tightship.process_local import NotCopied, check_process
from tightship.units import format_bytes

__all__ = ["Executor", "Fallback", "Part", "PeakMismatch", "RunStats", "report"]

_EXCEEDED: Final = re.compile(r"tightship: budget exceeded at step (\d+): asked (\d+)")


class PeakMismatch(UserWarning):
    """A step used other memory than its plan says."""


class Fallback(UserWarning):
    """A step, or a part of the model, runs in eager, or will, without a plan: there the budget is not kept."""


@dataclass(frozen=True, slots=True)
class RunStats:
    """What one run used, in bytes unless said otherwise; what was in use before it is included in the peaks.

    ``measured_peak`` counts every request the step itself made, ``process_peak`` those of all threads.
    ``exact`` is False where the run made optimizer state: the plan counts it from the start, so the
    measured peak is then at most the planned one.
    """

    planned_peak: int
    measured_peak: int
    process_peak: int
    static: int
    arena: int  # end of the highest byte the step used there
    requests: int  # count
    misses: int  # count, requests that went to the heap against the plan
    short: int  # count, steps that made fewer requests than planned
    exact: bool
    first_misses: tuple[str, ...] = ()
    heap: int = 0  # most bytes at once outside the arena, results that are handed out included

    @staticmethod
    def of_passes(passes: Sequence[RunStats], static: int) -> RunStats:
        """Of a step in several passes, one after the other, beside ``static`` bytes."""
        return RunStats(
            planned_peak=max(s.planned_peak for s in passes),
            measured_peak=max(s.measured_peak for s in passes),
            process_peak=max(s.process_peak for s in passes),
            static=static,
            arena=max(s.arena for s in passes),
            requests=sum(s.requests for s in passes),
            misses=sum(s.misses for s in passes),
            short=sum(s.short for s in passes),
            exact=True,
            first_misses=tuple(m for s in passes for m in s.first_misses)[:8],
            heap=max(s.heap for s in passes),
        )

    @property
    def as_planned(self) -> bool:
        """Whether every request was served at its planned offset, and the peak is the planned one."""
        return self.peak_as_planned and self.misses == 0 and self.short == 0

    @property
    def peak_as_planned(self) -> bool:
        below = self.measured_peak < self.planned_peak and not self.exact
        return below or self.measured_peak == self.planned_peak


@dataclass(frozen=True)
class Part:
    """Consecutive steps of a plan as a function of their own, such as the backward pass of a compiled model.

    ``slots`` and ``results`` are its inputs and outputs, ``begins`` the bytes in use when it starts, ``peak`` the
    most while it runs (static set included). ``boundary`` is an op without requests.
    """

    steps: range
    slots: tuple[Slot, ...]
    results: tuple[int, ...]
    begins: int
    peak: int
    boundary: int | None


Running = Generator[Read, None, list[Any]]
"""A run that stops at what the code of a step looks at; its value are the results."""


class Executor(NotCopied):
    """Runs ``plan`` for ``program``, or ``part`` of it, as often as wanted.

    ``arena`` may be shared by executors that never run at the same time; without it the executor reserves one.
    Requests beyond the plan's budget raise ``BudgetExceeded``. A run that did not go as planned warns
    `PeakMismatch` or, with ``strict``, raises ``VerificationFailed`` when it is over. Without ``hand_out`` results
    stay in the arena: let go of them before the next run. On a CPU the plan offloads to an unnamed file in
    ``folder`` (default: the system's for temporary files); on a GPU to pinned memory, and to that file only what is
    beyond ``pinned`` bytes, if given. ``pool`` is another executor's pinned memory, to be shared.

    Without a C++ compiler, or without measured requests, the plan runs on the ordinary heap: same results, nothing
    measured, and ``notes`` says so. Raises ``BadInput`` for a plan of another program, and where there is no room
    for what is offloaded.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        *,
        part: Part | None = None,
        arena: allocator.Arena | None = None,
        strict: bool = False,
        folder: str | os.PathLike[str] | None = None,
        hand_out: bool = True,
        pinned: int | None = None,
        pool: PinnedPool | None = None,
    ) -> None:
        graph = program.graph
        if plan.digest and plan.digest != graph.digest:
            rule = "the plan belongs to another graph: a plan runs for the graph it was made for"
            raise BadInput(rule, plan.digest[:12], "Executor")
        self._process = os.getpid()
        self.notes: list[str] = []
        self.last: RunStats | None = None
        self.arena, self.strict = arena, strict
        self._device = device_of(graph)
        self._kind = allocator.kind_of(self._device or "cpu")
        self.requests = self._planned_requests(program, plan, hand_out, part.boundary if part else None)
        self._begins, self._peak = graph.static_bytes, plan.peak
        if part is not None:
            program = replace(program, slots=part.slots, results=part.results)
            plan = replace(plan, steps=plan.steps[part.steps.start : part.steps.stop])
            self.requests = self.requests and self.requests.of_steps(part.steps)
            self._begins, self._peak = part.begins, part.peak
        self.program, self.plan = program, plan
        self._pool = self._host_pool(folder, pinned, pool) if plan.count("offload") else None
        serving = allocator.load(self._kind) if self.requests is not None else None
        self._code: Code = compile_plan(program, plan, serving, self._pool)
        self._updating: Updating | None = None
        self._tell_of_updates()
        self._reads = [(k + 1, i.op) for k, i in enumerate(self._code.instructions) if self._is_read(i)]
        self._limit = None if plan.budget is None else max(plan.budget - self._begins, 0)
        self._scripts: dict[bool, tuple[int, allocator.Script]] = {}
        self._verified = False
        self._fetches = [c.fn for c in program.calls if isinstance(c.fn, Fetch | FetchPiece)]

    def _planned_requests(
        self, program: Program, plan: Plan, hand_out: bool, boundary: int | None
    ) -> PlannedRequests | None:
        """None where the plan runs on the heap, unmeasured; a note says why."""
        graph = program.graph
        unknown = any(
            k != boundary and not op.requests and needs_memory(graph, k) for k, op in enumerate(graph.ops)
        )
        why = "ops on several devices" if self._device is None else allocator.why_not(self._kind)
        if why is not None:
            advice = allocator.instead(self._kind) if self._device is not None else ""
            text = f"{why}: the plan runs on the ordinary heap and its peak is not measured"
            self.notes.append(f"{text}; {advice}" if advice else text)
            return None
        if unknown:
            text = "requests were not measured: the plan runs on the ordinary heap, without an arena"
            self.notes.append(text)
            return None
        requests = planned_requests(program, plan, hand_out=hand_out)
        if not requests.placed:
            self.notes.append("the plan places nothing: every request is served from the heap, and measured")
        return requests

    def _tell_of_updates(self) -> None:
        """Puts an instruction before the first update."""
        ops, code = self.program.graph.ops, self._code.instructions
        first = next((k for k, i in enumerate(code) if i.op >= 0 and ops[i.op].phase == "update"), None)

        def begin(_: Any) -> None:
            if self._updating is not None:
                self._updating.begin()

        if first is not None:
            code.insert(first, Instruction(code[first].step, -1, begin))

    def _is_read(self, instruction: Instruction) -> bool:
        return instruction.op >= 0 and isinstance(self.program.calls[instruction.op].fn, Read)

    def _host_pool(
        self, folder: str | os.PathLike[str] | None, pinned: int | None, pool: PinnedPool | None
    ) -> HostPool:
        size = host_offsets(self.program, self.plan)[1]
        if not self._device or self._kind != "cuda":
            if pinned is not None:
                self.notes.append("pinned= is ignored without a GPU: everything offloaded goes to the file")
            return FilePool(size, folder)
        if pool is None or str(pool.device) != self._device:
            return pool_beside(size, self._device, pinned, folder)
        pool.reserve(size)
        return pool

    @property
    def extent(self) -> int:
        """Bytes the arena must have; 0 when the plan is run without one."""
        return self.requests.extent if self.requests else 0

    @property
    def pool(self) -> PinnedPool | None:
        """The pinned memory that the plan copies to, for other executors that never run at the same time."""
        return self._pool if isinstance(self._pool, PinnedPool) else None

    def reserve(self, extent: int) -> allocator.Arena:
        """An arena of ``extent`` bytes where the program's ops run."""
        return allocator.Arena(extent, self._device or "cpu")

    def change_numbers(self, program: Program) -> None:
        """From now on, run ``program``: the same ops with other numbers among their arguments."""
        for op, (known, call) in enumerate(zip(self.program.calls, program.calls, strict=True)):
            if call is not known:
                self._code.change(call, op, False)
            again = program.replays.get(op, call)
            if again is not self.program.replays.get(op, known):
                self._code.change(again, op, True)
        self.program = program

    # --- running ---

    def run(
        self, inputs: Sequence[Any], *, consume: bool = False, updating: Updating | None = None
    ) -> list[Any]:
        """One run on the tensors of ``program.slots`` (None where optimizer state does not exist yet).

        Returns the tensors of ``program.results``, which lie outside the arena. If an op fails, the error is
        raised after everything the step made is freed; what the ops before it wrote stays written (parameters
        whose update has run are updated, the others are not; running statistics and random state are those of
        the point reached). ``consume``: as for `execute`. ``updating`` hears when updates begin and are complete.
        """
        return self.finish(self.begin(inputs, consume=consume), updating, level=4)

    def finish(self, running: Running, updating: Updating | None = None, *, level: int = 3) -> list[Any]:
        """The results of a run that has begun, as `run` gives them. ``level``: where a warning comes from, in calls
        from the report."""
        self._updating = updating
        try:
            results = _drained(running)
        finally:
            self._updating = None
        if self.last is not None:
            report(self.last, self.strict, level=level)
        return results

    def execute(
        self,
        inputs: Sequence[Any],
        arena: allocator.Arena | None = None,
        *,
        placed: bool = True,
        consume: bool = False,
    ) -> list[Any]:
        """`run` without the report on what it used, which is in ``last``.

        ``arena``: for this run. ``placed``: requests go to their planned offsets, else to the heap. ``consume``: the
        list of inputs is emptied, so that each tensor is dropped at its planned free.
        """
        return _drained(self.begin(inputs, arena, placed=placed, consume=consume))

    def begin(
        self,
        inputs: Sequence[Any],
        arena: allocator.Arena | None = None,
        *,
        placed: bool = True,
        consume: bool = False,
    ) -> Running:
        """`execute` that stops wherever an op has read what the code of the step looks at: yields that op's `Read`.
        Meanwhile requests of this thread are none of the plan's. Closing it frees everything the run made."""
        check_process(self._process, self)
        env = self._environment(inputs)
        if consume:
            assert isinstance(inputs, list)
            inputs.clear()
        instructions: Sequence[Instruction] = self._code.instructions
        if not self._verified:
            self._check_inputs(env)
            instructions = [self._checked(i) for i in instructions]
        self._code.running = env
        try:
            with self._freeing(env), self._awaiting_copies(env):
                if self.requests is None:
                    yield from self._run(instructions, env, None)
                else:
                    yield from self._replay(
                        self.requests, instructions, env, arena or self._own_arena(), placed
                    )
                results = [env[at] for at in self._code.results]
                if self._updating is not None:
                    self._updating.complete()
        finally:
            self._code.running = []
        env.clear()
        self._verified = True
        return results

    def rebind(self, slot: int, tensor: Any) -> None:
        """Of a run that has begun: the tensor of a slot that no op has used yet."""
        self._code.running[self._code.inputs[slot]] = tensor

    def _environment(self, inputs: Sequence[Any]) -> list[Any]:
        if len(inputs) != len(self._code.inputs):
            rule = f"{len(inputs)} inputs for {len(self._code.inputs)} slots: give an input for each slot"
            raise BadInput(rule, place="Executor.run")
        env = self._code.initial.copy()
        for at, tensor in zip(self._code.inputs, inputs, strict=True):
            env[at] = tensor
        return env

    def _own_arena(self) -> allocator.Arena:
        if self.arena is None:
            self.arena = self.reserve(self.extent)
        return self.arena

    def _replay(
        self,
        requests: PlannedRequests,
        instructions: Sequence[Instruction],
        env: list[Any],
        arena: allocator.Arena,
        placed: bool,
    ) -> Running:
        missing = self._missing(env)
        exact = not missing and all(f.away.there for f in self._fetches)
        meter = Meter(self._kind)
        script = self._script(requests, arena.live + missing, placed)
        try:
            with allocator.replay(arena, script) as session, meter:
                for read in self._run(instructions, env, session):
                    with allocator.suspended(self._kind):
                        yield read
        finally:
            self.last = self._stats(session.stats, meter.peak, missing, exact=exact)
        return []

    def _run(
        self, instructions: Sequence[Instruction], env: list[Any], session: allocator.Replay | None
    ) -> Running:
        at = 0
        for stop, op in (*self._reads, (len(instructions), -1)):
            with compat.plain_execution():
                for i in instructions[at:stop] if self._reads else instructions:
                    if session is not None and i.asks:
                        session.seek(i.step)
                    i.run(env)
            at = stop
            if op >= 0:
                read = self.program.calls[op].fn
                assert isinstance(read, Read)
                yield read
        return []

    def _script(self, requests: PlannedRequests, already: int, placed: bool) -> allocator.Script:
        """The limit does not count ``already``, bytes of earlier runs: results that the caller still holds, and
        optimizer state that is still to be made, which the static set has already."""
        known = self._scripts.get(placed)
        if known is None or known[0] != already:
            limit = None if self._limit is None else self._limit + already
            r, offsets = requests, requests.offsets
            if not placed:
                offsets = np.full_like(offsets, HEAP)
            known = already, allocator.Script(r.sizes, offsets, r.starts, limit, self._kind, r.over)
            self._scripts[placed] = known
        return known[1]

    def _missing(self, env: list[Any]) -> int:
        """Bytes of the static set that do not exist yet: optimizer state that this run makes."""
        graph = self.program.graph
        slots = (s.value for s in self.program.slots if s.role == "state" and env[s.value] is None)
        return sum(graph.storages[s].size for s in {graph.values[v].storage for v in slots})

    def _stats(
        self, stats: allocator.ReplayStats, process_peak: int, missing: int, *, exact: bool
    ) -> RunStats:
        begins = self._begins - missing
        return RunStats(
            planned_peak=self._peak,
            measured_peak=stats.peak - stats.start + begins,
            process_peak=process_peak + begins,
            static=self.program.graph.static_bytes,
            arena=stats.high_water,
            requests=stats.requests,
            misses=stats.misses,
            short=stats.short,
            exact=exact,
            first_misses=tuple(self._miss(m) for m in stats.first_misses),
            heap=stats.heap_peak,
        )

    # --- when something goes wrong ---

    def _miss(self, miss: allocator.Miss) -> str:
        step = self.plan.steps[miss.step] if 0 <= miss.step < len(self.plan.steps) else Step("view")
        return f"{self._where(step)}: {miss.kind}, asked for {miss.asked} bytes, planned {miss.planned}"

    def _where(self, step: Step) -> str:
        graph = self.program.graph
        if step.op >= 0:
            return f"{graph.ops[step.op].name} at {graph.place(step.op)}"
        return " ".join([f"a {step.kind}", *(graph.storages[s].name for s in step.storages[:1])])

    @contextlib.contextmanager
    def _freeing(self, env: list[Any]) -> Iterator[None]:
        """Frees everything a failing run made, frames of the traceback included, and tells a refusal of the arena
        in the plan's words."""
        try:
            yield
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            env.clear()
            match = _EXCEEDED.search(str(error)) if isinstance(error, RuntimeError) else None
            if match is None:
                raise
            raise self._exceeded(int(match[1]), int(match[2])) from error

    def _exceeded(self, at: int, nbytes: int) -> BudgetExceeded:
        step, graph, budget = self.plan.steps[at], self.program.graph, self.plan.budget or 0
        if step.op < 0:
            return BudgetExceeded(self._where(step), nbytes, budget)
        return BudgetExceeded(graph.ops[step.op].name, nbytes, budget, graph.place(step.op))

    @contextlib.contextmanager
    def _awaiting_copies(self, env: list[Any]) -> Iterator[None]:
        """Waits for every copy before anything is freed: copies know addresses only."""
        try:
            yield
        except BaseException:
            for copied in (c for at in self._code.copies for c in env[at] or ()):
                with contextlib.suppress(OSError):  # the first error is the one to report
                    copied.result()
            with contextlib.suppress(OSError):
                self._drain()
            raise
        self._drain()

    def _drain(self) -> None:
        if self._pool is not None:
            self._pool.drain()

    # --- the first run ---

    def _checked(self, i: Instruction) -> Instruction:
        """The same instruction, followed by a look at what it made."""

        def run(env: list[Any]) -> None:
            i.run(env)
            for v in i.made:
                wrong = mismatch(self.program, v, env[v])
                if wrong:
                    graph = self.program.graph
                    raise Unsupported(
                        f"{graph.ops[i.op].target} at {graph.place(i.op)}",
                        f"its result has {wrong}, which shape inference did not say",
                        "leave this op out, or report it",
                    )

        return replace(i, run=run) if i.made else i

    def _check_inputs(self, env: list[Any]) -> None:
        for slot in self.program.slots:
            tensor = env[slot.value]
            if tensor is None and slot.role == "state":
                continue
            wrong = mismatch(self.program, slot.value, tensor, storage=False)
            if wrong:
                name = self.program.graph.values[slot.value].name
                raise BadInput(f"{wrong} at capture", place=f"{slot.role} {name}")


def _drained(running: Running) -> list[Any]:
    while True:
        try:
            next(running).said = ()
        except StopIteration as end:
            results: list[Any] = end.value
            return results


def report(stats: RunStats, strict: bool, graph: str = "", *, level: int = 3) -> None:
    """Warn `PeakMismatch`, or with ``strict`` raise ``VerificationFailed``, where a run did not go as planned."""
    if stats.as_planned:
        return
    text = []
    if not stats.peak_as_planned:
        measured, planned = format_bytes(stats.measured_peak), format_bytes(stats.planned_peak)
        text.append(
            f"the measured peak is {measured} ({stats.measured_peak} B), the planned one {planned} "
            f"({stats.planned_peak} B)"
        )
    if stats.misses:
        text.append(f"{stats.misses} of {stats.requests} requests were not served where planned")
        text.extend(stats.first_misses)
    if stats.short:
        text.append(f"{stats.short} ops asked for less than measured")
    if strict:
        raise VerificationFailed(text, f"running graph {graph}" if graph else "running the plan")
    warnings.warn((f"graph {graph}: " if graph else "") + "; ".join(text), PeakMismatch, stacklevel=level)
