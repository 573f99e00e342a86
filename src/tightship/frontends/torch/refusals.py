"""What a capture refuses while the caller's code runs. In eager nothing is raised there, so code that catches errors
must not catch that: it would go on as eager never does, and other numbers would be computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from tightship.errors import TightshipError

__all__ = ["heeded", "told"]

Refusal = TypeVar("Refusal", bound=TightshipError)

_told: ContextVar[list[TightshipError] | None] = ContextVar("told", default=None)


def told(refusal: Refusal) -> Refusal:
    """The error itself, about to be raised into the caller's code, if that is `heeded`."""
    found = _told.get()
    if found is not None:
        found.append(refusal)
    return refusal


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
