"""What a capture refuses while the caller's code runs. In eager nothing is raised there, so code that catches errors
must not catch that: it would go on as eager never does, and other numbers would be computed."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar

from tightship.errors import TightshipError, Unplannable
from tightship.frontends.torch import compat

__all__ = ["end_frames", "heeded", "names_stand_ins", "raised_on_stand_ins", "told"]

Refusal = TypeVar("Refusal", bound=TightshipError)

_told: ContextVar[list[TightshipError] | None] = ContextVar("told", default=None)


def told(refusal: Refusal) -> Refusal:
    """The error itself, about to be raised into the caller's code, if that is `heeded`."""
    found = _told.get()
    if found is not None:
        found.append(refusal)
    return refusal


def names_stand_ins(error: Exception) -> bool:
    """Whether an error of the caller's code is about fake tensors, which it knows nothing of."""
    return "FakeTensor" in str(error)


def raised_on_stand_ins(error: Exception) -> Unplannable:
    """The refusal of code that raises ``error`` on stand-ins, which eager may not raise, or raises itself."""
    text = (str(error).splitlines() or [""])[0]
    what = f"code of the step that raises {type(error).__name__} on stand-ins for tensors ({text})"
    return Unplannable(what, "it may ask for what is there only when the step runs")


@contextmanager
def heeded() -> Iterator[None]:
    """Around the caller's code: the first refusal in it is raised behind it, whatever the code made of it."""
    found: list[TightshipError] = []
    before = _told.set(found)
    try:
        yield
    except Exception as error:
        if found and error is not found[0]:
            raise found[0] from error
        raise
    finally:
        _told.reset(before)
    if found:
        raise found[0]


def end_frames(error: BaseException | None, *, kept: bool = False) -> None:
    """Code that an error of ours has ended leaves its contexts (``fork_rng()`` in an ``__enter__``) now, before what
    it has changed is put back: with the error's frames they would be left whenever that goes. ``kept``: the error
    stays, and the step has been put back."""
    with compat.random_states_kept(("cpu",)) if kept else nullcontext():
        ended = set[int]()
        while error is not None and id(error) not in ended:  # an error may be its own cause
            ended.add(id(error))
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None if kept else error.__traceback__
            error = error.__cause__ or error.__context__
        gc.collect()  # hooks and what they are registered on hold one another
