"""Who keeps what a call saved for its backward pass, when that is there in a later step."""

from __future__ import annotations

import gc
import os
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any

import torch

from tightship.frontends.torch import compat

__all__ = ["kept_advice"]

_KEPT = (
    "what an earlier call of the same code saved for its backward pass is still there: let go of what holds it (a "
    "loss or a result with its graph, an exception with its traceback), or make it under torch.no_grad()"
)
_NODES = 100_000
"""Of a graph of autograd's, at most, that are looked at."""


def kept_advice(marks: Collection[int]) -> str:
    """What to do about calls whose backward passes have not come when their step is over; ``marks`` are identities of
    what they saved. An exception that holds the graph of one is named."""
    for error, frame in _frames_of_errors():
        # Not `f_locals`, which would hold them for as long as the frame is there.
        if any(isinstance(x, torch.Tensor) and _reaches(x, marks) for x in gc.get_referents(frame)):
            where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            return (
                f"the {type(error).__name__} of {where} is kept with its traceback, and with it what an earlier call "
                "of the same code saved for its backward pass: let go of it, or call "
                "traceback.clear_frames(error.__traceback__)"
            )
    return _KEPT


def _frames_of_errors() -> Iterator[tuple[BaseException, FrameType]]:
    for one in gc.get_objects():
        kind = type(one)  # `isinstance` asks objects that stand for others, and may be answered by code
        traceback = one.__traceback__ if issubclass(kind, BaseException) else None
        while traceback is not None:
            yield one, traceback.tb_frame
            traceback = traceback.tb_next


def _reaches(tensor: torch.Tensor, marks: Collection[int]) -> bool:
    """Whether the tensor's graph has saved one of these."""
    left: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    while left and len(seen) < _NODES:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        try:
            saved = getattr(node, "saved_tensors", ())
        except RuntimeError:  # it is freed
            saved = ()
        if any(compat.storage_key(t) in marks for t in saved if isinstance(t, torch.Tensor)):
            return True
        left += [n for n, _ in node.next_functions]
    return False
