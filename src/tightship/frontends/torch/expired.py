"""Stand-ins that a step's code keeps beyond the step: what they stood for is gone, so every use of them is an error.

A trace hands out the same stand-ins in every run. One that the code has put into a closure, a list or an attribute
would be taken for the tensor of the step in which it is read. So after each run those that somebody else still holds
are replaced in the trace, and expire.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from tightship.errors import Unsupported
from tightship.frontends.torch import compat
from tightship.frontends.torch.function_trace import FunctionTrace, map_tensors, name_of

__all__ = ["Expired", "expire_kept"]


class Expired(torch.Tensor):
    """What a stand-in becomes when its step has run."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Unsupported(
            f"{name_of(func)} of a tensor that an earlier step has made and its code has kept",
            "a step's code runs on stand-ins, which have no contents when the step has run",
            "keep what steps hand on in buffers, or hand it back as a result and into the next batch",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return "<a tensor of a step that has run, without contents>"

    def __deepcopy__(self, memo: Any) -> Expired:
        return self


def expire_kept(trace: FunctionTrace) -> None:
    """To be called when a run of ``trace`` is over: stand-ins that are not the trace's alone expire, and all of them
    if the run has captured it."""
    now = _references(trace)
    known = trace.references
    kept = range(len(now)) if known is None else [n for n, c in enumerate(now) if c > known[n]]
    kept = [n for n in kept if compat.is_fake(trace.tensors[n])]
    if kept or known is None:
        _replace(trace, kept)
        trace.references = _references(trace)


def _references(trace: FunctionTrace) -> list[int]:
    return list(map(sys.getrefcount, trace.tensors))


def _replace(trace: FunctionTrace, numbers: Iterable[int]) -> None:
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
        old.__class__ = Expired
