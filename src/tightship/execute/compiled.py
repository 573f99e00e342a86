"""A step that Inductor compiles, as bytes: its lines replayed before kernels exist, then placed in one arena.

The lines of the forward graph, then those of the backward graph (`compat_inductor.Lowered`) say which variable holds
which bytes; kernels that Inductor calls and has not written are run once each, on tensors like theirs, for what they
ask for by themselves (`Measured`). What follows is every request of the step with its lifetime, and the peak to the
byte (`StepReplay`). `place` gives each request its offset in one arena; the compiled functions are served from there
by the allocator, request by request, in every run (`CompiledPass`).
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tightship.errors import BudgetExceeded, Unsupported
from tightship.execute import allocator
from tightship.execute.allocator import Meter
from tightship.execute.interpreter import RunStats
from tightship.frontends.torch import compat
from tightship.frontends.torch.capture.whole_ops import measured_on_samples
from tightship.frontends.torch.collectives import unsent
from tightship.frontends.torch.compat_compile import outside
from tightship.frontends.torch.compat_inductor import Event, Kernel, Lowered
from tightship.graph import aligned, alignment_of
from tightship.plan import Buffer, Problem
from tightship.planners.packing import Search, pack

__all__ = ["Asked", "CompiledPass", "LoweredStep", "Measured", "Pass", "StepPlan", "StepReplay", "place"]

_HEAP = -1
_EXCEEDED = re.compile(r"tightship: budget exceeded at step (\d+): asked (\d+)")


# --- kernels by themselves -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What a kernel asks for: (request, bytes) or, where it gives back, (request, -1), in order; and its result, with
    the request that each tensor in it lies in (-1: in none of them). ``beside``: bytes that its workers ask for."""

    events: tuple[tuple[int, int], ...]
    result: Any
    beside: int = 0


_FILLED = ((0.0, 0), (1.0, 0), (0.0, 1), (1.0, 1))
"""What floats and integers of a kernel's sample inputs are: there are kernels that draw from no distribution of
zeros, and those that count from one (the pivots of a factorization)."""


class Measured:
    """What kernels ask of the allocator, each measured once. ``kind`` of device: cpu or cuda."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.recorded = allocator.available(kind)
        self.known: dict[str, Asked] = {}
        self._foreign: list[str] = []

    def notes(self) -> list[str]:
        """What a user should know of how it was measured."""
        missing = "no C++ compiler: nothing is placed or measured, and kernels' workspaces count as 0"
        ran = "ran on made-up tensors while this was planned, for the bytes that it asks for, with all that it does"
        return [*([] if self.recorded else [missing]), *(f"{op} {ran}" for op in self._foreign)]

    def learn(self, known: Mapping[str, Asked]) -> None:
        """Takes over what was measured in an earlier run."""
        self.known.update({k: x for k, x in known.items() if k not in self.known})

    def __call__(self, kernel: Kernel) -> Asked:
        if kernel.key not in self.known:
            if kernel.foreign and kernel.foreign not in self._foreign:
                self._foreign.append(kernel.foreign)
            with outside(), compat.plain_execution(), torch.random.fork_rng():
                self.known[kernel.key] = self._run(kernel)
        return self.known[kernel.key]

    def _run(self, kernel: Kernel) -> Asked:
        for number, index in _FILLED:
            try:
                return self._asked(kernel, number, index)
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                failed = error
        what = f"the kernel {kernel.key.partition(',')[0].strip('(')} in compiled mode"
        raise Unsupported(what, f"it does not run on tensors like those of the step: {failed}") from failed

    def _asked(self, kernel: Kernel, number: float, index: int) -> Asked:
        with unsent(), measured_on_samples():  # other ranks do not measure at the same time
            return self._recorded(kernel.prepare(number, index), kernel)

    def _recorded(self, call: Callable[[], Any], kernel: Kernel) -> Asked:
        if not self.recorded:
            return _unrecorded(call())
        call()  # kernels have a first time
        with allocator.record(self.kind) as recording:
            result = call()
        at = {e.data_ptr: e.id for e in recording.events if e.kind == "alloc"}
        events = tuple((e.id, e.nbytes if e.kind == "alloc" else -1) for e in recording.events)
        tree = _tree(result, lambda t: at.get(t.untyped_storage().data_ptr(), -1))
        lost = {i for i, n in events if n >= 0} - {i for i, n in events if n < 0} - set(_leaves(tree))
        if lost:
            raise Unsupported(f"the kernel {kernel.key[:80]}", "it keeps bytes that it does not return")
        return Asked(events, tree, recording.beside)


def _unrecorded(result: Any) -> Asked:
    """Without an allocator of ours: the results alone."""
    sizes: list[int] = []

    def made(t: torch.Tensor) -> int:
        sizes.append(t.untyped_storage().nbytes())
        return len(sizes) - 1

    tree = _tree(result, made)
    return Asked(tuple(enumerate(sizes)), tree)


def _tree(result: Any, of: Callable[[torch.Tensor], int]) -> Any:
    if isinstance(result, torch.Tensor):
        return of(result)
    if isinstance(result, (list, tuple)):
        return tuple(_tree(x, of) for x in result)
    return -1


def _leaves(tree: Any) -> Iterator[int]:
    if isinstance(tree, tuple):
        for x in tree:
            yield from _leaves(x)
    else:
        yield tree


# --- replay ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Block:
    """One request: bytes, the events between which it is alive, and how many hold it."""

    size: int
    start: int
    end: int = -1
    holders: int = 0
    leaves: bool = False
    origin: str = ""


_Held = Any
"""What a variable holds: a block, None (memory of the caller's), or a tuple of those."""


@dataclass(frozen=True)
class Pass:
    """The requests of one pass, in order; ``begins`` and ``peak``: bytes in use when it starts, and at most."""

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    begins: int
    peak: int


@dataclass
class StepReplay:
    """The bytes of a step, event by event, from ``static`` on. ``align``: what requests are rounded up to."""

    static: int
    measured: Measured
    align: int
    _clock: int = 0
    _live: int = 0
    blocks: list[list[_Block]] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    rest: int = 0
    _saved: list[_Held] = field(default_factory=list)
    _levels: list[list[tuple[str, int]]] = field(default_factory=list)
    _beside: dict[str, int] = field(default_factory=dict)

    @property
    def handed(self) -> list[int]:
        """Bytes that each pass hands out."""
        return [sum(b.size for b in blocks if b.leaves) for blocks in self.blocks]

    def levels(self) -> list[list[tuple[str, int]]]:
        """Of each pass: the nodes whose values got memory, new or another's, in order, and the bytes in use then."""
        return self._levels

    def workspaces(self) -> dict[str, int]:
        """Of the nodes that kernels of somebody else's run for: the most bytes beside the result, of what a kernel
        takes by itself and of arguments that Inductor lays out anew for it."""
        return self._beside

    def between(self, saved: Sequence[_Held]) -> None:
        """One pass is over, and these of its outputs are for the next."""
        self._saved, self.rest = list(saved), self._live

    def kept(self) -> list[bool]:
        """Which of what is saved lies in the arena."""
        return [any(not b.leaves for b in _blocks(held)) for held in self._saved]

    def shared(self) -> tuple[int, ...]:
        """Which of what is saved the caller was given as well."""
        return tuple(k for k, held in enumerate(self._saved) if any(b.leaves for b in _blocks(held)))

    def run(self, lowered: Lowered, inputs: Sequence[_Held], more: int = 0) -> list[_Held]:
        """Replays a pass whose inputs hold ``inputs`` (taken from the caller), with ``more`` bytes of the caller's
        in use meanwhile. Returns what its outputs hold, handed to the caller."""
        self._env: dict[str, _Held] = {name: None for name, _ in lowered.constants}
        self._more = more
        self.blocks.append([])
        self._levels.append([])
        self.begins.append(self.static + self._live + more)
        self.peaks.append(self.begins[-1])
        self._env.update(zip(lowered.inputs, inputs, strict=True))
        for event in lowered.events:
            getattr(self, f"_{event.kind}")(event)
        for node, nbytes in workspaces(lowered.events, self.measured).items():
            self._beside[node] = max(nbytes, self._beside.get(node, 0))
        outputs = [self._env[name] if name else None for name in lowered.outputs]
        for held in outputs:
            self._hold(held)
        for held in self._env.values():
            self.release(held)
        return outputs

    def _take(self, nbytes: int, origin: str = "") -> _Block | None:
        if not nbytes:
            return None
        block = _Block(aligned(nbytes, self.align), self._clock, origin=origin)
        self._clock += 1
        self._live += block.size
        self.blocks[-1].append(block)
        self.peaks[-1] = max(self.peaks[-1], self._level(origin))
        return block

    def _level(self, origin: str) -> int:
        """Takes note of the bytes in use while a node's value is made."""
        level = self.static + self._live + self._more
        rows = self._levels[-1]
        if rows and rows[-1][0] == origin:
            level = max(level, rows.pop()[1])
        rows.append((origin, level))
        return level

    def _hold(self, held: _Held) -> None:
        for block in _blocks(held):
            block.holders += 1

    def release(self, held: _Held) -> None:
        """The caller lets go of what an output held."""
        for block in _blocks(held):
            block.holders -= 1
            if not block.holders:
                self._end(block)

    def _end(self, block: _Block) -> None:
        block.end = self._clock
        self._clock += 1
        self._live -= block.size

    def hand_out(self, held: _Held) -> None:
        """The caller keeps what an output holds: it lies outside the arena."""
        for block in _blocks(held):
            block.leaves = True

    # --- the lines ---

    def _bind(self, name: str, held: _Held) -> None:
        self._hold(held)
        if name in self._env:
            self.release(self._env[name])
        self._env[name] = held

    def _make(self, event: Event) -> None:
        self._bind(event.name, self._take(event.nbytes, event.origin))

    def _alias(self, event: Event) -> None:
        if event.origin:
            self._level(event.origin)
        self._bind(event.name, self._env[event.source])

    def _drop(self, event: Event) -> None:
        self.release(self._env.pop(event.name))

    def _item(self, event: Event) -> None:
        held = self._env[event.source]
        for k in event.path:
            held = held[k] if isinstance(held, tuple) else held
        self._bind(event.name, held)

    def _call(self, event: Event) -> None:
        assert event.kernel is not None
        asked = self.measured(event.kernel)
        blocks: dict[int, _Block | None] = {}
        ended = {i for i, n in asked.events if n < 0}
        for i, nbytes in asked.events:
            if nbytes >= 0:
                blocks[i] = self._take(nbytes, event.origin)
            elif i in blocks and (block := blocks[i]) is not None:
                self._end(block)
        result = _tree_of_blocks(asked.result, {i: b for i, b in blocks.items() if i not in ended})
        given = tuple(self._env[name] for name in event.given)
        self._hold(result)
        if event.name:
            self._bind(event.name, (result, *given) if given and not isinstance(result, tuple) else result)
        self.release(result)


def workspaces(events: Sequence[Event], measured: Measured) -> dict[str, int]:
    """As `StepReplay.workspaces`, of one pass."""
    sizes: dict[str, int] = {}
    made: dict[str, list[int]] = {}
    found: dict[str, int] = {}
    for e in events:
        if e.kind in ("make", "alias"):
            sizes[e.name] = e.nbytes if e.kind == "make" else sizes.get(e.source, 0)
            made.setdefault(e.origin, []).append(sizes[e.name])
        elif e.kernel is not None and e.origin:
            rows = made.pop(e.origin, [])
            asked = measured(e.kernel)
            within = peak = 0
            taken = dict(n for n in asked.events if n[1] >= 0)
            for i, nbytes in asked.events:
                within += nbytes if nbytes >= 0 else -taken.get(i, 0)
                peak = max(peak, within)
            found[e.origin] = max(found.get(e.origin, 0), sum(rows[:-1]) + peak - within)
    return found


def _tree_of_blocks(tree: Any, blocks: dict[int, _Block | None]) -> _Held:
    if isinstance(tree, tuple):
        return tuple(_tree_of_blocks(x, blocks) for x in tree)
    return blocks.get(tree)


def _blocks(held: _Held) -> Iterator[_Block]:
    """The blocks in ``held``, each once for every tensor that lies there."""
    if isinstance(held, tuple):
        for x in held:
            yield from _blocks(x)
    elif held is not None:
        yield held


@dataclass(frozen=True)
class LoweredStep:
    """A training step as its two passes were lowered. ``outputs``: how many of the forward pass's results are the
    caller's, the first ``written`` of which are copied into tensors of the caller's and dropped; the others are
    saved. ``static`` and ``tangents``: bytes of the caller's tensors, and of the gradients that the second pass gets.
    """

    forward: Lowered
    backward: Lowered
    outputs: int
    written: int
    static: int
    tangents: int

    def replay(self, measured: Measured, align: int, dropped: Collection[int] = ()) -> StepReplay:
        """Every request of the step. ``dropped``: of what is saved, which results the caller has let go of before
        the second pass."""
        given = dict(row for one in (self.forward, self.backward) for row in one.constants)
        static = self.static + sum(aligned(n, align) for n in given.values())
        replay = StepReplay(static, measured, align)
        made = replay.run(self.forward, [None] * len(self.forward.inputs))
        handed, saved = made[: self.outputs], made[self.outputs :]
        for k, held in enumerate(handed):
            replay.hand_out(held)
            if k < self.written:
                replay.release(held)
        replay.between(saved)
        gone = {id(b) for k in dropped for b in _blocks(saved[k])}
        for held in handed[self.written :]:
            if gone & {id(b) for b in _blocks(held)}:
                replay.release(held)
        for held in replay.run(
            self.backward, [*saved, *[None] * (len(self.backward.inputs) - len(saved))], self.tangents
        ):
            replay.hand_out(held)
        return replay


# --- the plan --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepPlan:
    """A compiled graph's bytes. ``peak``: the most in use at any time, static set included. ``arena``: what the
    requests span once placed. ``peak_before``: the peak of what Inductor itself would have chosen, without a budget.
    ``saved``: what crosses the boundary, by name; ``recomputed``: how many nodes run in both passes. ``source``: who
    chose that. ``recompute_time``: seconds that this adds, modeled."""

    budget: int | None
    static: int
    peak: int
    arena: int
    passes: tuple[Pass, ...]
    peak_before: int = 0
    saved: tuple[str, ...] = ()
    recomputed: int = 0
    recompute_time: float = 0.0
    source: str = ""
    lowered: int = 0

    @property
    def met(self) -> bool:
        """Whether peak, and static set with arena, are within the budget."""
        return self.budget is None or self.peak <= self.budget

    def count(self, kind: str) -> int:
        """How many nodes are recomputed; of every other kind of step there is none."""
        return self.recomputed if kind == "recompute" else 0


def place(
    replay: StepReplay, *, search: Search | None = None, most: int | None = None
) -> tuple[tuple[Pass, ...], int]:
    """Offsets for every request of the replay but those that leave, and the bytes that they span. Nothing is placed
    where that is more than ``most``, static set included: each request is served by itself, as without a plan."""
    last = replay._clock
    rows = [b for blocks in replay.blocks for b in blocks if not b.leaves]
    buffers = tuple(
        Buffer(str(k), b.start, b.end if b.end >= 0 else last, b.size, replay.align)
        for k, b in enumerate(rows)
    )
    solution = pack(Problem(buffers), search=search or Search())
    arena, offset = solution.arena, {id(b): o for b, o in zip(rows, solution.offsets, strict=True)}
    if most is not None and replay.static + arena > most:
        arena, offset = 0, {}
    passes = tuple(
        Pass(
            tuple(b.size for b in blocks), tuple(offset.get(id(b), _HEAP) for b in blocks),
            replay.begins[k], replay.peaks[k],
        )
        for k, blocks in enumerate(replay.blocks)
    )  # fmt: skip
    return passes, arena


# --- running ---------------------------------------------------------------------------------------------------


class CompiledPass:
    """A compiled function whose requests are served as planned. ``last``: what its last run used."""

    def __init__(
        self, call: Callable[[list[Any]], Any], pass_: Pass, static: int, kind: str, name: str
    ) -> None:
        self.call, self.pass_, self.static, self.kind, self.name = call, pass_, static, kind, name
        self.last: RunStats | None = None
        self._scripts: dict[tuple[bool, int | None], allocator.Script] = {}

    def _script(self, placed: bool, limit: int | None) -> allocator.Script:
        key = placed, limit
        if key not in self._scripts:
            sizes = self.pass_.sizes
            offsets = self.pass_.offsets if placed else [_HEAP] * len(sizes)
            self._scripts[key] = allocator.Script(sizes, offsets, (0, len(sizes)), limit, self.kind)
        return self._scripts[key]

    def run(self, args: list[Any], arena: allocator.Arena, *, placed: bool, budget: int | None) -> Any:
        """Runs it on ``args``, which it empties. Raises ``BudgetExceeded`` where it asks for more than ``budget``
        leaves, against the plan."""
        start = arena.live
        limit = None if budget is None else start + max(budget - self.pass_.begins, 0)
        meter = Meter(self.kind)
        try:
            with allocator.replay(arena, self._script(placed, limit)) as session, meter:
                session.seek(0)
                results = self.call(args)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # or who keeps the error keeps places in the arena
            match = _EXCEEDED.search(str(error)) if isinstance(error, RuntimeError) else None
            if match is None or budget is None:
                raise
            raise BudgetExceeded(self.name, int(match[2]), budget) from error
        stats, begins = session.stats, self.pass_.begins
        self.last = RunStats(
            planned_peak=self.pass_.peak,
            measured_peak=stats.peak - stats.start + begins,
            process_peak=meter.peak + begins,
            static=self.static,
            arena=stats.high_water,
            requests=stats.requests,
            misses=stats.misses,
            short=stats.short,
            exact=True,
            first_misses=tuple(
                f"request {m.request}: {m.kind}, asked for {m.asked} bytes, planned {m.planned}"
                for m in stats.first_misses
            ),
            heap=stats.heap_peak,
        )
        return results


def alignment(device: str) -> int:
    """What requests on the device are rounded up to."""
    return alignment_of(device)
