"""Executor: runs a plan op by op, every request of the step served from one arena at its planned place."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tightship.errors import BadInput, BudgetExceeded, Unsupported, VerificationFailed
from tightship.execute import allocator
from tightship.execute.compile import Code, Instruction, compile_plan
from tightship.execute.failing import freed
from tightship.execute.file_pool import Spill
from tightship.execute.meter import Meter
from tightship.execute.moves import Pool, host_offsets
from tightship.execute.pinned_pool import Pinned
from tightship.execute.script import device_of, orders
from tightship.execute.tiered_pool import host_pool
from tightship.execute.views import mismatched
from tightship.frontends.torch import compat
from tightship.frontends.torch.program import Program
from tightship.plan import Plan, Step
from tightship.process_local import NotCopied, check_process
from tightship.units import format_bytes

__all__ = ["Executor", "PeakMismatch", "RunStats", "mismatch"]


class PeakMismatch(UserWarning):
    """A step used other memory than its plan says."""


@dataclass(frozen=True, slots=True)
class RunStats:
    """What one run used, in bytes unless said otherwise; the static set is included in the peaks.

    ``measured_peak`` counts every request the step itself made, ``process_peak`` those of all threads.
    ``exact`` is False where the run made optimizer state: the plan counts it from the start, so that the
    measured peak is then at most the planned one.
    ``arena`` is the end of the highest byte the step used there. ``short`` counts steps that asked for less
    than they were to.
    """

    planned_peak: int
    measured_peak: int
    process_peak: int
    static: int
    arena: int
    requests: int  # count
    misses: int  # count, requests that went to the heap against the plan
    short: int  # count
    exact: bool
    first_misses: tuple[str, ...] = ()
    heap: int = 0  # most bytes at once that lay outside of the arena, results that are handed out included

    @property
    def as_planned(self) -> bool:
        """Whether every request was served where it was planned, and the peak is the planned one."""
        return self.peak_as_planned and self.misses == 0 and self.short == 0

    @property
    def peak_as_planned(self) -> bool:
        below = self.measured_peak < self.planned_peak and not self.exact
        return below or self.measured_peak == self.planned_peak


class Executor(NotCopied):
    """Runs ``plan`` for ``program`` as often as wanted.

    ``arena`` may be shared by several executors, one running at a time; without it the executor reserves one
    of the size the plan needs. Requests that would go beyond the plan's budget raise ``BudgetExceeded``. With
    ``strict`` a run that did not go as planned raises ``VerificationFailed`` when it is over, otherwise it
    warns `PeakMismatch`. Without ``hand_out`` results lie where the plan has placed them, in the arena: they are
    to be let go of before the next run. What the plan offloads goes to a file without a name in ``folder``
    (default: the system's for temporary files); from a GPU to pinned memory, and to that file only what is beyond
    ``pinned`` bytes of it, if that is said. All of it is reserved here; pinned memory may be shared, as the arena:
    ``pool`` is another executor's.

    Without a C++ compiler, or without measured requests, the plan is run on the ordinary heap: results are
    the same, nothing is measured, and ``notes`` says so. Raises ``BadInput`` for plans that do not belong to the
    program, and when there is no room for what is offloaded.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        *,
        arena: allocator.Arena | None = None,
        strict: bool = False,
        folder: str | os.PathLike[str] | None = None,
        hand_out: bool = True,
        pinned: int | None = None,
        pool: Pinned | None = None,
    ) -> None:
        if plan.digest and plan.digest != program.graph.digest:
            raise BadInput("a plan is run for the graph it was made for", plan.digest[:12], "Executor")
        self.program, self.plan, self.strict = program, plan, strict
        self._process = os.getpid()
        self.notes: list[str] = []
        self.last: RunStats | None = None
        self.arena = arena
        self._hand_out = hand_out
        self._device = device_of(program.graph)
        self._kind = allocator.kind_of(self._device or "cpu")
        self._orders = self._planned()
        self._spill = self._host_pool(folder, pinned, pool) if plan.count("offload") else None
        self._code: Code = compile_plan(program, plan, self._aside(), self._spill)
        self._limit = None if plan.budget is None else max(plan.budget - program.graph.static_bytes, 0)
        self._scripts: tuple[int, allocator.Script] | None = None
        self._verified = False

    def change_numbers(self, program: Program) -> None:
        """From now on, run ``program``: the same ops with other numbers among their arguments."""
        for op, (known, call) in enumerate(zip(self.program.calls, program.calls, strict=True)):
            if call is not known:
                self._code.change(call, op, False)
            again = program.replays.get(op, call)
            if again is not self.program.replays.get(op, known):
                self._code.change(again, op, True)
        self.program = program

    @property
    def extent(self) -> int:
        """Bytes the arena must have; 0 when the plan is run without one."""
        return self._orders.extent if self._orders else 0

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """One run on the tensors of ``program.slots`` (None where optimizer state does not exist yet).

        Returns the tensors of ``program.results``, which lie outside the arena. If an op fails, the error is
        raised after everything the step made is freed; what the ops before it wrote stays written (parameters
        whose update has run are updated, the others are not; running statistics and random state are those of
        the point reached).
        """
        check_process(self._process, self)
        if len(inputs) != len(self._code.inputs):
            raise BadInput("an input for each slot of the program", len(inputs), "Executor.run")
        env = self._code.initial.copy()
        for place, tensor in zip(self._code.inputs, inputs, strict=True):
            env[place] = tensor
        instructions = self._code.instructions
        if not self._verified:
            self._check_inputs(env)
            instructions = self._checked()
        with freed(env, self._exceeded), self._landed(), compat.plain_execution():
            if self._orders is None:
                for i in instructions:
                    i.run(env)
            else:
                self._replayed(instructions, env)
            results = [env[place] for place in self._code.results]
        env.clear()
        self._verified = True
        if self.last is not None and not self.last.as_planned:
            self._complain(self.last)
        return results

    # --- with the arena ---

    def _planned(self) -> Any:
        graph = self.program.graph
        needs = (
            (o.workspace or any(graph.storages[s].size for s in d))
            for o, d in zip(graph.ops, graph.uses.defines, strict=True)
        )
        unknown = any(n and not o.requests for n, o in zip(needs, graph.ops, strict=True))
        why = "ops on several devices" if self._device is None else allocator.why_not(self._kind)
        if why is not None:
            self.notes.append(f"{why}: the plan runs on the ordinary heap and its peak is not measured")
            return None
        if unknown:
            self.notes.append(
                "requests were not measured: the plan runs on the ordinary heap, without an arena"
            )
            return None
        found = orders(self.program, self.plan, hand_out=self._hand_out)
        if not found.placed:
            self.notes.append("the plan places nothing: every request is served from the heap, and measured")
        return found

    def _host_pool(
        self, folder: str | os.PathLike[str] | None, pinned: int | None, pool: Pinned | None
    ) -> Pool:
        size = host_offsets(self.program, self.plan)[1]
        if not self._device or self._kind != "cuda":
            if pinned is not None:
                self.notes.append(
                    "memory is pinned beside a GPU only: all that is offloaded goes to the file"
                )
            return Spill(size, folder)
        if pool is None or str(pool.device) != self._device:
            return host_pool(size, self._device, pinned, folder)
        pool.reserve(size)
        return pool

    @property
    def pool(self) -> Pinned | None:
        """The memory beside a GPU that the plan copies to, for other executors that never run at the same time."""
        return self._spill if isinstance(self._spill, Pinned) else None

    def _aside(self) -> Callable[[], None] | None:
        return partial(allocator.aside, self._kind) if self._orders is not None else None

    def reserve(self, extent: int) -> allocator.Arena:
        """An arena of ``extent`` bytes where the program's ops run."""
        return allocator.Arena(extent, self._device or "cpu")

    def _script(self, already: int) -> allocator.Script:
        """The limit does not count ``already``, bytes of earlier runs: results that the caller still holds, and
        optimizer state that is still to be made, which the static set has already."""
        if self._scripts is None or self._scripts[0] != already:
            o = self._orders
            limit = None if self._limit is None else self._limit + already
            self._scripts = already, allocator.Script(o.sizes, o.offsets, o.starts, limit, self._kind, o.over)
        return self._scripts[1]

    def _replayed(self, instructions: Sequence[Instruction], env: list[Any]) -> None:
        if self.arena is None:
            self.arena = self.reserve(self.extent)
        missing = self._missing(env)
        meter = Meter(self._kind)
        script = self._script(self.arena.live + missing)
        try:
            with allocator.replay(self.arena, script) as session, meter:
                seek = session.seek
                for i in instructions:
                    if i.asks:
                        seek(i.step)
                    i.run(env)
        finally:
            self.last = self._stats(session.stats, meter.peak, missing)

    def _missing(self, env: list[Any]) -> int:
        """Bytes of the static set that do not exist yet: optimizer state that this run makes."""
        graph = self.program.graph
        slots = (s.value for s in self.program.slots if s.role == "state" and env[s.value] is None)
        return sum(graph.storages[s].size for s in {graph.values[v].storage for v in slots})

    def _stats(self, stats: allocator.ReplayStats, process_peak: int, missing: int) -> RunStats:
        static = self.program.graph.static_bytes
        return RunStats(
            self.plan.peak,
            stats.peak - stats.start + static - missing,
            process_peak + static - missing,
            static,
            stats.high_water,
            stats.requests,
            stats.misses,
            stats.short,
            not missing,
            tuple(self._miss(m) for m in stats.first_misses),
            stats.heap_peak,
        )

    def _miss(self, miss: allocator.Miss) -> str:
        step = self.plan.steps[miss.step] if 0 <= miss.step < len(self.plan.steps) else Step("view")
        where = self._where(step)
        return f"{where}: {miss.kind}, asked for {miss.asked} bytes, planned {miss.planned}"

    def _where(self, step: Step) -> str:
        graph = self.program.graph
        if step.op >= 0:
            return f"{graph.ops[step.op].name} at {graph.place(step.op)}"
        return " ".join([f"a {step.kind}", *(graph.storages[s].name for s in step.storages[:1])])

    def _complain(self, stats: RunStats) -> None:
        text = mismatch(stats)
        if self.strict:
            raise VerificationFailed(text, "running the plan")
        warnings.warn("; ".join(text), PeakMismatch, stacklevel=3)

    @contextlib.contextmanager
    def _landed(self) -> Iterator[None]:
        """Waits for every copy before anything is freed: copies know addresses only."""
        try:
            yield
            if self._spill is not None:
                self._spill.drain()
        except BaseException:
            if self._spill is not None:
                with contextlib.suppress(OSError):  # what went wrong first is told
                    self._spill.drain()
            raise

    def _exceeded(self, at: int, nbytes: int) -> BudgetExceeded:
        step, graph = self.plan.steps[at], self.program.graph
        budget = self.plan.budget if self.plan.budget is not None else 0
        if step.op < 0:
            return BudgetExceeded(self._where(step), nbytes, budget)
        return BudgetExceeded(graph.ops[step.op].name, nbytes, budget, graph.place(step.op))

    # --- the first run ---

    def _checked(self) -> list[Instruction]:
        """The same instructions, each followed by a look at what it made."""

        def checked(i: Instruction) -> Instruction:
            def run(env: list[Any]) -> None:
                i.run(env)
                for v in i.made:
                    self._check(v, env[v], i.op)

            return replace(i, run=run) if i.made else i

        return [checked(i) for i in self._code.instructions]

    def _check(self, value: int, tensor: Any, op: int) -> None:
        wrong = mismatched(self.program, value, tensor)
        if wrong:
            graph = self.program.graph
            raise Unsupported(
                f"{graph.ops[op].target} at {graph.place(op)}",
                f"its result has {wrong}, which shape inference did not say",
                "leave this op out, or report it",
            )

    def _check_inputs(self, env: list[Any]) -> None:
        for slot in self.program.slots:
            tensor = env[slot.value]
            if tensor is None and slot.role == "state":
                continue
            wrong = mismatched(self.program, slot.value, tensor, storage=False)
            if wrong:
                raise BadInput(
                    "an input is as it was when the program was captured", wrong, f"{slot.role} {slot.key}"
                )


def mismatch(stats: RunStats) -> list[str]:
    """What did not go as planned, one sentence each."""
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
    return text
