"""One call run by itself: what it asks of the allocator, how long it takes, and which inputs it can be computed into.

Its tensors are made for it: the metadata of graph values, and contents that any op accepts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import Any, Final

import torch

from tightship.execute import allocator
from tightship.frontends.torch import compat_ops
from tightship.frontends.torch.capture.lower import in_place_operands
from tightship.frontends.torch.optimizer.copy import Rehearsal, random_untouched
from tightship.frontends.torch.program import Call, dtype_of, flat, refs_in, substitute
from tightship.graph import ALIGNMENT, Graph, Value, aligned, alignment_of

__all__ = [
    "LONG_CALL",
    "Bench",
    "Row",
    "UpdateRun",
    "in_place_inputs",
    "rehearsed",
    "rows_of_update",
    "sample_arguments",
    "sample_tensor",
    "workspace_of",
]

Row = tuple[int, int, int, int]
"""A request: bytes, the defined storage it becomes or -1, first event, event of its end or -1."""

_LONG: Final = 0.25  # seconds; what takes longer is not run again only for its time
LONG_CALL: Final = 0.002
"""Seconds from which on a kernel's first time does not count: one more run is enough."""
_REPEATS: Final = 20
_AGREE: Final = 0.04
"""Of a time: by so much the middle and the least of a call's times differ, at most, when they agree."""
_TILE: Final = 1 << 16
_PRIME: Final = 65_521
"""Random numbers that are drawn for a probed tensor and repeated: no row or page has the same as another."""

Room = Callable[[int], allocator.Arena]
"""An arena of at least so many bytes."""


class Bench:
    """``seconds`` bounds how long a call is repeated for its time; ``recording``: requests are wanted too.
    ``device``: where the calls run."""

    def __init__(self, seconds: float, recording: bool, device: str = "cpu") -> None:
        self._seconds, self._recording, self._device = seconds, recording, device
        self._kind = allocator.kind_of(device)
        self._arena: allocator.Arena | None = None

    def run(
        self, call: Callable[[], list[Any]], kept: Sequence[int], *, warm: bool = False
    ) -> tuple[list[Any], list[allocator.Event], float]:
        """One run that counts, after one that does not, unless it is ``warm``: kernels have a first time.

        Of its results those at the positions ``kept`` survive. Returns them with the events of the run, the
        last of which are the ends of the other results, and its seconds.
        """
        if not warm:
            call()
        return self.first_run(call, kept)

    def first_run(
        self, call: Callable[[], list[Any]], kept: Sequence[int]
    ) -> tuple[list[Any], list[allocator.Event], float]:
        """As `run`, without a run before: for what takes long, where `time` says whether another asks the same."""
        if not self._recording:
            start = self.now()
            results = call()
            return results, [], self.now() - start
        with allocator.record(self._kind) as recording:
            start = self.now()
            results = call()
            seconds = self.now() - start
            results = [r if position in kept else None for position, r in enumerate(results)]
        return results, recording.events, seconds

    def time(
        self, call: Callable[[], list[Any]], sizes: Sequence[int], once: float, *, roughly: bool = False
    ) -> tuple[float, bool]:
        """Seconds of a call whose requests are ``sizes``, when it has taken ``once`` seconds before; and whether it
        asked for ``sizes`` again.

        It is run as it will be: from an arena, whose pages are there already. What takes long is run once more only;
        anything else until its times agree, once if ``roughly`` is enough.
        """
        if once >= _LONG and not self._recording:
            return once, True
        most = max(1, min(1 if roughly else _REPEATS, int(self._seconds / max(once, 1e-7))))
        if not self._recording:
            return _agreed(partial(self._seconds_of, call), most), True
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + size)
        script = allocator.Script(sizes, offsets[:-1], (0, len(sizes)), kind=self._kind)
        with allocator.replay(self.room(offsets[-1]), script) as session:

            def run() -> float:
                session.seek(0)
                return self._seconds_of(call)

            if once >= LONG_CALL:
                seconds = min(once, run())
            else:
                run()
                seconds = _agreed(run, most)
        return seconds, session.stats.as_planned

    def room(self, size: int) -> allocator.Arena:
        """An arena of at least so many bytes."""
        if self._arena is None or self._arena.size < size:
            self._arena = None  # given back before the larger one is taken
            self._arena = allocator.Arena(size * 5 // 4, self._device)
        return self._arena

    def log(self) -> AbstractContextManager[allocator.Recording]:
        """Records what this thread asks for; nothing where requests are not wanted."""
        if self._recording:
            return allocator.record(self._kind)
        silent = allocator.Recording(lambda step: None)
        silent._events = []
        return nullcontext(silent)

    def now(self) -> float:
        """Seconds, once everything asked of the device is done."""
        if self._kind == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()

    def _seconds_of(self, call: Callable[[], list[Any]]) -> float:
        start = self.now()
        call()
        return self.now() - start


def _agreed(run: Callable[[], float], most: int) -> float:
    """The median of ``run``'s seconds, taken until it is near the least of them, ``most`` times at most."""
    times: list[float] = []
    while len(times) < most:
        times.append(run())
        middle = statistics.median(times)
        if len(times) >= 3 and middle - min(times) <= _AGREE * middle:
            break
    return statistics.median(times)


@dataclass(frozen=True)
class UpdateRun:
    """One run of an update: what it asked for, and its seconds."""

    events: list[allocator.Event]
    seconds: float

    @property
    def shape(self) -> tuple[Any, ...]:
        """What it asked for and let go of, in order, whatever the addresses."""
        first = next((e.id for e in self.events if e.kind == "alloc"), 0)
        return tuple((e.kind, e.id - first, e.nbytes) for e in self.events)

    @property
    def kept(self) -> int:
        """Bytes that it has asked for and not let go of."""
        ended = {e.id for e in self.events if e.kind == "free"}
        return sum(e.nbytes for e in self.events if e.kind == "alloc" and e.id not in ended)

    @property
    def peak(self) -> int:
        """The most bytes above those at its start; what it lets go of may be older than that."""
        steps = (e.nbytes if e.kind == "alloc" else -e.nbytes for e in self.events)
        return max(0, *accumulate(steps)) if self.events else 0

    @property
    def extent(self) -> int:
        """Bytes of a block that has room for all it asks for, each request in the first hole that is large enough."""
        blocks: list[tuple[int, int, int]] = []  # offset, end, id
        most = 0
        for e in self.events:
            if e.kind == "free":
                blocks = [b for b in blocks if b[2] != e.id]
                continue
            at = place = 0
            for place, (start, end, _) in enumerate([*blocks, (1 << 62, 0, -1)]):  # noqa: B007
                if start - at >= e.nbytes:
                    break
                at = end
            blocks.insert(place, (at, at + e.nbytes, e.id))
            most = max(most, at + e.nbytes)
        return most


_SCALES: Final = (0.0, 0.0, 1.0)
_MORE_SCALES: Final = (0.0, 1.0, -0.5, 1.0, 0.0, 1e-3, 10.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0)
"""Of the gradients of an update that is tried: what an update asks for may depend on them."""
_AHEAD: Final = (9_999, 10_000_000)
_MORE_AHEAD: Final = (99, 999, 9_999)
"""Steps that are skipped: what it asks for may depend on how many there were."""
_MANY: Final = 10**7
"""Elements of parameters above which an update is tried a few times only."""


def rehearsed(
    rehearsal: Rehearsal, bench: Bench, *, exact: bool, elements: int
) -> tuple[list[UpdateRun], int]:
    """Runs of an update with other gradients and after other numbers of steps; ``exact``: of a known class. And the
    bytes of a run before them, beside what it keeps: one that makes the state, if there is none yet, or replaces
    tensors whose end is not logged, as they are from before."""
    scales: Sequence[float] = _SCALES if exact else _MORE_SCALES
    if elements > _MANY:
        scales = scales[:6]
    seconds: list[float] = []
    begins = rehearsal.begins or not exact

    def run(scale: float) -> None:
        log.seek(0)
        rehearsal.fill(scale)
        log.seek(len(seconds) + 1)
        start = bench.now()
        rehearsal.run()
        seconds.append(bench.now() - start)
        log.seek(0)

    with random_untouched(), bench.log() as log:
        if begins:
            run(0.0 if exact else 1.0)
        for scale in scales:
            run(scale)
            rehearsal.count()
        try:
            for steps in _AHEAD if exact else (*(n - 1 for n in rehearsal.intervals()), *_MORE_AHEAD):
                if rehearsal.skip(steps):
                    run(1.0)
                    if not exact:
                        run(-1.0)
        except Exception:  # so many steps may be more than it was made for
            log.seek(0)
    events: list[list[allocator.Event]] = [[] for _ in range(len(seconds) + 1)]
    for event in log.events:
        if event.step < len(events):
            events[event.step].append(event)
    runs = [UpdateRun(e, s) for e, s in zip(events[1:], seconds, strict=True)]
    if not begins:
        return runs, 0
    return runs[1:], runs[0].peak - runs[0].kept


def rows_of_update(
    runs: Sequence[UpdateRun], begun: int, *, exact: bool, keeps: bool
) -> tuple[int, tuple[Row, ...]]:
    """The workspace of an update and its requests: those of every run, if it is ``exact`` and they are the same in
    all; or one block that has room for those of any, and for ``begun`` bytes of the first. What ``keeps`` some of it
    needs no room, but the bytes."""
    first = runs[0]
    if exact and not keeps and all(r.shape == first.shape for r in runs) and not first.kept:
        workspace, rows, _ = workspace_of(first.events, {}, 0)
        return workspace, rows
    if keeps:
        most = max(r.peak for r in runs)
    else:
        most = max([r.extent for r in runs if not r.kept] or [r.extent for r in runs])
    most = max(most, begun)
    return most, ((most, -1, 0, 1),) if most else ()


def workspace_of(
    events: Sequence[allocator.Event], made: dict[int, int], results: int
) -> tuple[int, tuple[Row, ...], int]:
    """Bytes a call needs beyond its ``results`` bytes, its requests, and bytes it keeps to itself.

    ``made`` says which request (by id) became which defined storage.
    """
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    sizes: dict[int, int] = {}
    live = most = 0
    for number, event in enumerate(events):
        if event.kind == "alloc":
            starts[event.id], sizes[event.id] = number, event.nbytes
            live += event.nbytes
        else:
            ends[event.id] = number
            live -= event.nbytes
        most = max(most, live)
    kept = sum(sizes[i] for i in starts if i not in ends and i not in made)
    rows = tuple((sizes[i], made.get(i, -1), starts[i], ends.get(i, -1)) for i in sorted(starts))
    return max(0, most - results), rows, kept


# --- sample tensors ---

_tiles: dict[torch.dtype, Any] = {}


def _tile(dtype: torch.dtype) -> Any:
    """Random numbers between 0 and 1, from a seed of their own, repeated to fill what has to be filled. What takes
    probabilities, rates, variances or concentrations runs on them; a GPU would fail for good on any others."""
    if dtype not in _tiles:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.rand(_TILE, generator=generator, dtype=torch.float32)
        _tiles[dtype] = (0.05 + 0.9 * drawn).to(dtype)
    return _tiles[dtype]


def _filled(flat: Any) -> None:
    """Zeros are valid indices, and false; numbers are drawn."""
    if not (flat.dtype.is_floating_point or flat.dtype.is_complex):
        flat.zero_()
        return
    tile, whole = _tile(flat.dtype).to(flat.device), flat.numel() // _TILE * _TILE
    if whole:
        flat[:whole].view(-1, _TILE).copy_(tile.expand(whole // _TILE, _TILE))
    flat[whole:].copy_(tile[: flat.numel() - whole])


def _ones(tensor: Any) -> None:
    """Square matrices are the identity, anything else is one: what can be inverted, pivots, counts, lengths."""
    tensor.fill_(1)
    if tensor.dim() >= 2 and tensor.shape[-1] == tensor.shape[-2] and tensor.is_floating_point():
        tensor.zero_().diagonal(dim1=-2, dim2=-1).fill_(1)


def sample_tensor(value: Value, device: str, contents: Any = None, *, ones: bool = False) -> Any:
    """A tensor with the metadata of ``value`` in a storage of its own, aligned as the value is in its storage, with
    the ``contents`` of a tensor like it if one is given; else with numbers that most ops accept, or with ``ones``
    and identity matrices."""
    dtype = dtype_of(value.dtype)
    start = value.offset * dtype.itemsize % ALIGNMENT // dtype.itemsize
    extent = start + 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride, strict=True))
    if 0 in value.shape:
        extent = start
    flat = torch.empty(extent, dtype=dtype, device=device)
    if contents is None:
        _filled(flat)
    else:
        flat[start:].copy_(contents.as_strided((extent - start,), (1,), contents.storage_offset()))
    tensor = flat.as_strided(value.shape, value.stride, start)
    if ones and contents is None:
        _ones(tensor)
    return tensor


def sample_arguments(
    graph: Graph, call: Call, device: str = "cpu", contents: Mapping[int, Any] | None = None, *, ones: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Arguments like those of ``call``; one value is one tensor, however often it is given. ``contents`` are those
    of a program's ``samples``; ``ones`` as for `sample_tensor`."""
    known, values = contents or {}, dict.fromkeys(refs_in((call.args, call.kwargs)))
    tensors = {v: _like(graph, v, device, known.get(n), ones=ones) for n, v in enumerate(values)}
    return substitute(call.args, tensors.__getitem__), substitute(call.kwargs, tensors.__getitem__)


def _like(graph: Graph, v: int, device: str, contents: Any = None, *, ones: bool = False) -> Any:
    """A sample of a value, on the host if it lies there."""
    value = graph.values[v]
    on_host = graph.storages[value.storage].pool == "host"
    return sample_tensor(value, "cpu" if on_host else device, contents, ones=ones)


# --- computing in place ---


def in_place_inputs(graph: Graph, call: Call, device: str, room: Room) -> tuple[int, ...]:
    """Which of the values that ``call`` is given, by number in the order of its arguments, its first result can be
    computed into, with bit-identical results. It is run that way to know."""
    if not call.results or call.results[0] < 0:
        return ()
    if allocator.kind_of(device) == "cuda":  # as `overwrites` says
        return ()
    result = graph.values[call.results[0]]
    values = list(dict.fromkeys(refs_in((call.args, call.kwargs))))
    layout = result.dtype, result.shape, result.stride, 0

    def alike(v: int) -> bool:
        x = graph.values[v]
        return (x.dtype, x.shape, x.stride, x.offset) == layout

    operands = in_place_operands(call.fn, call.args, call.kwargs)
    numbers = [n for n, v in enumerate(values) if v in operands and alike(v)]
    if not numbers or result.offset or graph.storages[result.storage].pool != "device":
        return ()
    fn = compat_ops.direct(call.fn)

    def run(tensors: dict[int, Any]) -> list[Any]:
        args, kwargs = (substitute(tree, tensors.__getitem__) for tree in (call.args, call.kwargs))
        made = flat(fn(*args, **kwargs))
        return [t for t, v in zip(made, call.results, strict=True) if v >= 0]

    def safe(tensors: dict[int, Any]) -> list[int]:
        with allocator.record(allocator.kind_of(device)) as recording:
            want = run(tensors)
        asked = [e for e in recording.events if e.kind == "alloc"]
        return [n for n in numbers if _same(run, tensors, values[n], want, asked, device, room)]

    tensors = _drawn(graph, call, device)
    if numbers := safe(tensors):
        _mask(tensors.values())
        numbers = safe(tensors)
    return tuple(numbers)


def _mask(tensors: Iterable[torch.Tensor]) -> None:
    """Fills those of floating-point numbers with -inf, as where all is masked: an op may look at its input again for
    that."""
    for t in tensors:
        if t.is_floating_point():
            t.new_empty(0).set_(t.untyped_storage()).fill_(-math.inf)


def _same(
    run: Callable[[dict[int, Any]], Any], tensors: dict[int, Any], over: int, want: Any,
    asked: Sequence[allocator.Event], device: str, room: Room,
) -> bool:  # fmt: skip
    """Whether ``run`` gives ``want`` into the tensor of the value ``over`` as well, for which it ``asked``."""
    given, alignment = tensors[over], alignment_of(device)
    size = aligned(given.untyped_storage().nbytes(), alignment)
    mine = max((k for k, e in enumerate(asked) if e.data_ptr == want[0].data_ptr()), default=-1)
    if mine < 0 or asked[mine].nbytes != size:
        return False
    sizes, offsets, taking = [size], [0], [0]
    end = size
    for k, e in enumerate(asked):
        here = k == mine
        sizes.append(e.nbytes)
        offsets.append(0 if here else end)
        taking.append(int(here))
        end += 0 if here else e.nbytes
    script = allocator.Script(sizes, offsets, (0, 1, len(sizes)), None, allocator.kind_of(device), taking)
    with allocator.replay(room(end), script) as session:
        session.seek(0)
        laid = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=device)
        laid.copy_(given)
        session.seek(1)
        found = run({**tensors, over: laid})
        lies = found[0].data_ptr() == laid.data_ptr()
        del laid
    same = all(torch.equal(_bits(a), _bits(b)) for a, b in zip(found, want, strict=True))
    return lies and session.stats.misses == 0 and same


def _bits(tensor: Any) -> Any:
    """The bytes of a tensor without gaps, in the order in which they lie."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _drawn(graph: Graph, call: Call, device: str) -> dict[int, Any]:
    """A tensor for each value the call is given, no two with the same contents."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for v in dict.fromkeys(refs_in((call.args, call.kwargs))):
        value, tensor = graph.values[v], _like(graph, v, device)
        if all(s > 0 or n == 1 for n, s in zip(value.shape, value.stride, strict=True)):
            drawn = torch.rand(_PRIME, generator=generator)
            drawn = drawn.repeat(-(-tensor.numel() // _PRIME))[: tensor.numel()].view(tensor.shape)
            numbers = tensor.dtype.is_floating_point or tensor.dtype.is_complex
            tensor.copy_(
                drawn - 0.25 if numbers else drawn > 0.5 if tensor.dtype == torch.bool else drawn * 7 + 1
            )
        tensors[v] = tensor
    return tensors
