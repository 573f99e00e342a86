"""Stand-ins that a step's code keeps beyond its run.

A trace hands out the same stand-ins in every run. One that the code has put into a closure, a list or an attribute
would be taken for the tensor of the step in which it is read. So after each run those that somebody else still holds
are replaced in the trace, and expire: until the ops have run, every use of them is an error.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from tightship.errors import Unsupported
from tightship.frontends.torch import compat, compat_distributed
from tightship.frontends.torch.rerun.arguments import map_tensors, name_of
from tightship.frontends.torch.rerun.function_trace import FunctionTrace

__all__ = ["Expired", "Kept", "expire_kept", "held_elsewhere"]


class Expired(torch.Tensor):
    """What a stand-in becomes when its step has run."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Unsupported(
            f"{name_of(func)} of a tensor that an earlier step has made and its code has kept",
            "a step's code runs on stand-ins, which have no contents when the step has run",
            "the step that made it was not run to its end, or it was to retain its gradient (retain_grad): "
            "set it anew, without",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return "<a tensor of a step that has run, without contents>"

    def __deepcopy__(self, memo: Any) -> Expired:
        return self


Kept = list[tuple[int, torch.Tensor]]
"""Stand-ins that the code holds, each with its number."""


def expire_kept(trace: FunctionTrace) -> Kept:
    """To be called when a run of ``trace`` is over: stand-ins that are not the trace's alone expire, and all of them
    if the run has captured it. Returns those that somebody else holds."""
    now = _references(trace)
    known = trace.references
    kept = range(len(now)) if known is None else [n for n, c in enumerate(now) if c > known[n]]
    kept = [n for n in kept if compat.is_fake(trace.tensors[n])]
    if not kept and known is not None:
        return []
    gone = _replace(trace, kept)
    trace.references = _references(trace)
    return gone if known is not None else held_elsewhere(gone)


def held_elsewhere(stand_ins: Kept) -> Kept:
    """Those that are held by something else than this list, which is emptied, and than garbage."""
    weak = [(n, weakref.ref(t)) for n, t in stand_ins]
    stand_ins.clear()
    if any(r() is not None for _, r in weak):
        gc.collect()
    return [(n, t) for n, r in weak if (t := r()) is not None]


def _references(trace: FunctionTrace) -> list[int]:
    return list(map(sys.getrefcount, trace.tensors))


def _replace(trace: FunctionTrace, numbers: Iterable[int]) -> Kept:
    fresh: dict[int, torch.Tensor] = {}
    gone, places = [], trace.places
    for n in numbers:
        old = trace.tensors[n]
        new = compat.another(old)
        fresh[id(old)] = new
        del trace.index[id(old)]
        trace.tensors[n], trace.index[id(new)] = new, n
        gone.append((n, old))

    def own(t: torch.Tensor) -> torch.Tensor:
        return fresh.get(id(t), t)

    for k in sorted({k for n, _ in gone for k in places.get(n, ())}):
        call = trace.calls[k]
        call.args, call.kwargs = map_tensors(own, call.args), map_tensors(own, call.kwargs)
        call.answer = map_tensors(own, call.answer)
    for _, old in gone:
        compat_distributed.expire(old, Expired)
    return gone
