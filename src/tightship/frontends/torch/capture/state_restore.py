"""Leaving no trace: what running a model's Python code changes is put back after a capture."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from tightship.errors import Unplannable, Unsupported
from tightship.frontends.torch import compat
from tightship.frontends.torch.capture.random_state import (
    random_state_watched,
    set_torch_state,
    torch_state,
)
from tightship.frontends.torch.containers import contents, refill

__all__ = ["Change", "Leftovers", "applied", "stand_ins_in", "untouched"]


@dataclass(frozen=True)
class Change:
    """An attribute that running the model has set to another object."""

    module: torch.nn.Module
    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{type(self.module).__name__}.{self.name}"

    @property
    def is_plain(self) -> bool:
        """Whether the new object can be put there for another capture: it holds no fake tensors."""
        return isinstance(self.new, (bool, int, float, str, type(None)))


@contextmanager
def applied(changes: Iterable[Change]) -> Iterator[None]:
    """The model as it is after a step, as far as its plain attributes go."""
    plain = [c for c in changes if c.is_plain]
    before = [(c, dict(vars(c.module))) for c in plain]
    try:
        for c in plain:
            vars(c.module)[c.name] = c.new
        yield
    finally:
        for c, attributes in reversed(before):
            vars(c.module).clear()
            vars(c.module).update(attributes)


@contextmanager
def untouched(
    model: torch.nn.Module,
    changes: list[Change],
    *,
    frozen: bool = True,
    when: Callable[[], bool] = lambda: True,
) -> Iterator[None]:
    """Put back what running a model's Python code changes, if ``when`` says so at the end: modules, their
    attributes, random states.

    ``changes`` receives the public attributes that were set to something else. Raises ``Unsupported`` for
    changes without which the captured step is another one than eager's; if the code is ``frozen``, not to run again
    in every step, that is also so for random numbers that Python and NumPy have drawn.
    """
    before = [(m, dict(vars(m)), _contents(m)) for m in model.modules()]
    modules, states = _modules(model), _random_states()
    try:
        with random_state_watched() if frozen else nullcontext():
            yield
        if when() and _modules(model) != modules:
            raise Unsupported(
                "a model that replaces modules while it runs", "eager would do so in the first step only",
                "run the model once before capturing it",
            )  # fmt: skip
        for library, get, _, state in states if frozen else ():
            if not _equal(get(), state):
                raise Unsupported(
                    f"drawing from {library}'s random state in a step",
                    "what it decides would be fixed by the capture",
                    "draw with torch's functions",
                )
    finally:
        for _, _, put, state in states if when() else ():
            put(state)
        for m, attributes, filled in before if when() else ():
            for k, new in vars(m).items():
                old = attributes.get(k)
                if not k.startswith("_") and old is not new:
                    changes.append(Change(m, k, old, new))
            vars(m).clear()
            vars(m).update(attributes)
            for k, held in filled.items():
                refill(vars(m)[k], held)


class Leftovers:
    """Attributes of a model's modules as they are now, to be put back where Python code that ran on stand-ins has
    left some there. ``only`` is where to look; None: everywhere. ``modules``: the model's, where they are known."""

    def __init__(
        self, model: torch.nn.Module, only: Iterable[tuple[torch.nn.Module, str]] | None = None,
        modules: tuple[torch.nn.Module, ...] | None = None,
    ) -> None:  # fmt: skip
        self._model, self._everywhere = model, only is None
        self._all = tuple(model.modules()) if modules is None else modules
        self._buffers = {m: dict(m._buffers) for m in self._all if m._buffers}
        if only is None:
            self._before = [(m, dict(vars(m)), _contents(m)) for m in model.modules()]
            self._modules = _modules(model)
            return
        wanted: dict[torch.nn.Module, list[str]] = {}
        for m, name in only:
            wanted.setdefault(m, []).append(name)
        self._before = [
            (m, {k: vars(m)[k] for k in names if k in vars(m)}, {k: _copied(vars(m).get(k)) for k in names})
            for m, names in wanted.items()
        ]

    def remove(self, *, finished: bool = False) -> list[Change]:
        """Puts back what holds stand-ins, unless the code has ``finished``: what it has left is there after the step
        then, as in eager, for code that goes by anything else it has set (``self.size = n; self.table = …``).
        Returns what that was. Other changes stay, as eager's do.

        Raises ``Unplannable`` for modules that were replaced.
        """
        gone = self._new_buffers(put_back=not finished)
        for m, attributes, filled in self._before:
            names = list(vars(m)) if self._everywhere else list(filled)
            for k in names:
                new, old = vars(m).get(k), attributes.get(k)
                if k in _MEMBERS or not stand_ins_in(new):
                    continue
                gone.append(Change(m, k, old, new))
                if finished:
                    continue
                if old is new and filled.get(k) is not None:
                    refill(new, filled[k])
                elif k in attributes:
                    vars(m)[k] = old
                else:
                    del vars(m)[k]
        if self._everywhere and _modules(self._model) != self._modules:
            raise Unplannable(
                "a model that replaces modules while it runs", "eager would do so in the first step only",
                "run the model once before fit; what comes after the first step is planned in any case",
            )  # fmt: skip
        return gone

    def _new_buffers(self, *, put_back: bool) -> list[Change]:
        """Stand-ins that the code has registered as buffers, or set where there was none."""
        gone = []
        for m in self._all:
            before = self._buffers.get(m, {})
            for k, new in list(m._buffers.items()):
                if before.get(k) is not None or not stand_ins_in(new):
                    continue
                gone.append(Change(m, k, None, new))
                if put_back and k in before:
                    m._buffers[k] = None
                elif put_back:
                    del m._buffers[k]
                    m._non_persistent_buffers_set.discard(k)
        return gone


_MEMBERS = ("_parameters", "_buffers", "_modules")


def _copied(value: Any) -> Any:
    return contents(value) if isinstance(value, (dict, list, set)) else None


def stand_ins_in(value: Any) -> list[torch.Tensor]:
    """The stand-ins that an attribute of a module holds."""
    return [t for t in _tensors(value) if compat.is_fake(t)]


def _tensors(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    parts: Iterable[Any] = ()
    if isinstance(value, (list, tuple, set)):
        parts = contents(value)
    elif isinstance(value, dict):
        parts = contents(value).values()
    elif hasattr(type(value), "__dataclass_fields__"):
        parts = getattr(value, "__dict__", {}).values()
    for x in parts if depth else ():
        yield from _tensors(x, depth - 1)


def _contents(module: torch.nn.Module) -> dict[str, Any]:
    """Copies of the module's containers, which are changed in place (hooks, children, lists)."""
    return {k: contents(v) for k, v in vars(module).items() if isinstance(v, (dict, list, set))}


def _modules(model: torch.nn.Module) -> list[tuple[str, int]]:
    return [(n, id(m)) for n, m in model.named_modules()]


def _random_states() -> list[tuple[str, Callable[[], Any], Callable[[Any], None], Any]]:
    """(library, how to get its state, how to set it, the state now)."""
    libraries: list[tuple[str, Callable[[], Any], Callable[[Any], None]]] = [
        ("Python", random.getstate, random.setstate),
        # Fake tensors draw nothing: who changes this state has seeded it or used real tensors.
        ("torch", torch_state, set_torch_state),
    ]
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        libraries.append(("NumPy", lambda: numpy.get_state(legacy=False), numpy.set_state))
    return [(name, get, put, get()) for name, get, put in libraries]


def _equal(a: Any, b: Any) -> bool:
    """Equality that looks into NumPy's dict of arrays."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    return bool((a == b).all()) if hasattr(a, "all") else bool(a == b)
