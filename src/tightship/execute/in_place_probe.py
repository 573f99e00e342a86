"""Runs an op with its result laid over one of its inputs, and says whether the result is the same to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tightship.execute import allocator
from tightship.execute.sample_inputs import fresh
from tightship.frontends.torch import compat
from tightship.frontends.torch.capture.lower import elementwise
from tightship.frontends.torch.program import Call, flat, refs_in, substitute
from tightship.graph import Graph, aligned, alignment_of

__all__ = ["overlaid"]

Room = Callable[[int], allocator.Arena]
"""An arena of at least so many bytes."""


_TILE = 65_521
"""Random numbers that are drawn for a tensor and repeated; prime, so that no row or page has the same as another."""


def overlaid(graph: Graph, call: Call, device: str, room: Room) -> tuple[int, ...]:
    """Which of the values that ``call`` is given, by number in the order of its arguments, its result can
    be laid over."""
    if not elementwise(call.fn) or len(call.results) != 1 or call.results[0] < 0:
        return ()
    if allocator.kind_of(device) == "cuda":  # as `overwrites` says
        return ()
    made = graph.values[call.results[0]]
    values = list(dict.fromkeys(refs_in((call.args, call.kwargs))))
    layout = made.dtype, made.shape, made.stride, 0

    def alike(v: int) -> bool:
        x = graph.values[v]
        return (x.dtype, x.shape, x.stride, x.offset) == layout

    numbers = [n for n, v in enumerate(values) if alike(v)]
    if not numbers or made.offset or graph.storages[made.storage].pool != "device":
        return ()
    return tuple(n for n in numbers if _same(graph, call, values[n], device, room))


def _same(graph: Graph, call: Call, over: int, device: str, room: Room) -> bool:
    tensors = _drawn(graph, call, device)
    fn, alignment = compat.direct(call.fn), alignment_of(device)

    def run() -> Any:
        args, kwargs = (substitute(tree, tensors.__getitem__) for tree in (call.args, call.kwargs))
        return flat(fn(*args, **kwargs))[0]

    with allocator.record(allocator.kind_of(device)) as recording:
        want = run()
    asked = [e for e in recording.events if e.kind == "alloc"]
    given = tensors[over]
    size = aligned(given.untyped_storage().nbytes(), alignment)
    mine = max((k for k, e in enumerate(asked) if e.data_ptr == want.data_ptr()), default=-1)
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
        tensors[over] = laid
        session.seek(1)
        found = run()
        tensors.clear()
        lies = found.data_ptr() == laid.data_ptr()
        del laid, given
    same = lies and session.stats.misses == 0 and bool(torch.equal(_bits(found), _bits(want)))
    del found
    return same


def _bits(tensor: Any) -> Any:
    """The bytes of a tensor without gaps, in the order in which they lie."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _drawn(graph: Graph, call: Call, device: str) -> dict[int, Any]:
    """A tensor for each value the call is given, no two with the same contents."""
    generator = torch.Generator().manual_seed(1)
    made = {}
    for v in dict.fromkeys(refs_in((call.args, call.kwargs))):
        value = graph.values[v]
        tensor = fresh(value, "cpu" if graph.storages[value.storage].pool == "host" else device)
        if all(s > 0 or n == 1 for n, s in zip(value.shape, value.stride, strict=True)):
            drawn = torch.rand(_TILE, generator=generator)
            drawn = drawn.repeat(-(-tensor.numel() // _TILE))[: tensor.numel()].view(tensor.shape)
            numbers = tensor.dtype.is_floating_point or tensor.dtype.is_complex
            tensor.copy_(
                drawn - 0.25 if numbers else drawn > 0.5 if tensor.dtype == torch.bool else drawn * 7 + 1
            )
        made[v] = tensor
    return made
