"""One call run by itself: what it asks of the allocator, how long it takes, and which inputs it can be computed into.

Its tensors are made for it: the metadata of graph values, and contents that any op accepts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Final

import torch

from tightship.execute import allocator
from tightship.frontends.torch import compat
from tightship.frontends.torch.capture.lower import in_place_operands
from tightship.frontends.torch.program import Call, dtype_of, flat, refs_in, substitute
from tightship.graph import ALIGNMENT, Graph, Value, aligned, alignment_of

__all__ = ["Bench", "Row", "in_place_inputs", "sample_arguments", "sample_tensor", "workspace_of"]

Row = tuple[int, int, int, int]
"""A request: bytes, the defined storage it becomes or -1, first event, event of its end or -1."""

_LONG: Final = 0.25  # seconds; what takes longer is not run again only for its time
_LONG_CALL: Final = 0.002
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
            start = self._now()
            results = call()
            return results, [], self._now() - start
        with allocator.record(self._kind) as recording:
            start = self._now()
            results = call()
            seconds = self._now() - start
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

            if once >= _LONG_CALL:
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

    def _now(self) -> float:
        """Seconds, once everything asked of the device is done."""
        if self._kind == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()

    def _seconds_of(self, call: Callable[[], list[Any]]) -> float:
        start = self._now()
        call()
        return self._now() - start


def _agreed(run: Callable[[], float], most: int) -> float:
    """The median of ``run``'s seconds, taken until it is near the least of them, ``most`` times at most."""
    times: list[float] = []
    while len(times) < most:
        times.append(run())
        middle = statistics.median(times)
        if len(times) >= 3 and middle - min(times) <= _AGREE * middle:
            break
    return statistics.median(times)


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
    """Random normal numbers from a seed of their own, repeated to fill what has to be filled."""
    if dtype not in _tiles:
        generator = torch.Generator().manual_seed(0)
        _tiles[dtype] = torch.randn(_TILE, generator=generator, dtype=torch.float32).to(dtype)
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


def sample_tensor(value: Value, device: str) -> Any:
    """A tensor with the metadata of ``value`` in a storage of its own, aligned as the value is in its storage."""
    dtype = dtype_of(value.dtype)
    start = value.offset * dtype.itemsize % ALIGNMENT // dtype.itemsize
    extent = start + 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride, strict=True))
    if 0 in value.shape:
        extent = start
    flat = torch.empty(extent, dtype=dtype, device=device)
    _filled(flat)
    return flat.as_strided(value.shape, value.stride, start)


def sample_arguments(graph: Graph, call: Call, device: str = "cpu") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments like those of ``call``; one value is one tensor, however often it is given."""
    tensors = {v: _like(graph, v, device) for v in dict.fromkeys(refs_in((call.args, call.kwargs)))}
    return substitute(call.args, tensors.__getitem__), substitute(call.kwargs, tensors.__getitem__)


def _like(graph: Graph, v: int, device: str) -> Any:
    """A sample of a value, on the host if it lies there."""
    value = graph.values[v]
    return sample_tensor(value, "cpu" if graph.storages[value.storage].pool == "host" else device)


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
    tensors, fn = _drawn(graph, call, device), compat.direct(call.fn)

    def run(tensors: dict[int, Any]) -> list[Any]:
        args, kwargs = (substitute(tree, tensors.__getitem__) for tree in (call.args, call.kwargs))
        made = flat(fn(*args, **kwargs))
        return [t for t, v in zip(made, call.results, strict=True) if v >= 0]

    with allocator.record(allocator.kind_of(device)) as recording:
        want = run(tensors)
    asked = [e for e in recording.events if e.kind == "alloc"]
    return tuple(n for n in numbers if _same(run, tensors, values[n], want, asked, device, room))


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
