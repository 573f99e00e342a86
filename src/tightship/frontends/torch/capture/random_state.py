"""torch's random state while code runs on stand-ins, which draw nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from tightship.errors import Unplannable
from tightship.frontends.torch import compat

__all__ = [
    "drawn",
    "random_state_before",
    "random_state_is_ahead",
    "random_state_watched",
    "set_torch_state",
    "torch_state",
]

_DRAWN: ContextVar[list[bytes] | None] = ContextVar("_DRAWN", default=None)
"""torch's random state before the first random op of stand-ins, and after the latest; empty before the first."""

_AHEAD: ContextVar[bytes | None] = ContextVar("_AHEAD", default=None)
"""torch's random state before the step, some of whose ops have run."""


def random_state_is_ahead(before: bytes | None) -> None:
    """Ops of the step have drawn while its code still runs; with None, no more."""
    _AHEAD.set(before)


@contextmanager
def random_state_watched() -> Iterator[None]:
    """Code that sets torch's random state between random ops of stand-ins is noticed, by whatever name or method it
    does; before the first one it may. Raises ``Unplannable``."""
    outer = _DRAWN.set([])
    try:
        yield
        _as_drawn()
    finally:
        if states := _DRAWN.get():
            set_torch_state(states[0])
        _DRAWN.reset(outer)


def drawn() -> None:
    """Called when a random op was recorded. Stand-ins draw nothing: torch's state moves on here. Raises
    ``Unplannable`` where something else has changed it since the last one."""
    states = _DRAWN.get()
    if states is None:
        return
    _as_drawn()
    before = states[0] if states else torch_state()
    with compat.without_modes():
        torch.empty(1).uniform_()
    states[:] = [before, torch_state()]


@contextmanager
def random_state_before() -> Iterator[None]:
    """Inside, torch's random state is that before the first random op of stand-ins; what is drawn leaves no trace."""
    with compat.random_states_kept(("cpu",)):
        states, ahead = _DRAWN.get(), _AHEAD.get()
        if states or ahead is not None:
            set_torch_state(states[0] if states else ahead or b"")
        yield


def _as_drawn() -> None:
    states = _DRAWN.get()
    if states and torch_state() != states[-1]:
        raise Unplannable(
            "setting torch's random state in a step, or drawing for other tensors meanwhile",
            "the captured ops draw from the state they find, in the order of the step", "seed before the step",
        )  # fmt: skip


def torch_state() -> bytes:
    with compat.without_modes():
        return bytes(torch.default_generator.get_state().numpy())


def set_torch_state(state: bytes) -> None:
    with compat.without_modes():
        torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
