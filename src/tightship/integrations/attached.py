"""What callbacks of trainers share: a model that is compiled with tightship's backend while it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tightship.errors import BadInput
from tightship.integrations.torch_compile import compiled_notes, compiled_plans, compiled_session
from tightship.integrations.torch_options import read_options
from tightship.units import format_bytes

__all__ = ["Attached", "Planning"]


class Attached:
    """``attach`` a model, ``look`` now and then, ``detach`` it: then it is as it was. ``plans`` and ``notes`` are of
    the model that is or was attached. Raises ``BadInput`` for options that the backend does not have."""

    def __init__(self, budget: Any, say: Callable[[str], object] | None, options: dict[str, Any]) -> None:
        self.options = {"budget": budget, **options}
        self.say = say
        self.plans: tuple[Any, ...] = ()
        self.notes: tuple[str, ...] = ()
        self._model: Any = None
        self._session: Any = None  # kept, and with it what a percentage came to
        read_options(self.options)  # what is wrong is said before anything is loaded

    def attach(self, model: Any) -> None:
        """From here on the model runs as planned. Raises ``BadInput`` for one that is compiled already."""
        if getattr(model, "_compiled_call_impl", None) is not None:
            rule = "a model is compiled once: leave compiling to the callback"
            raise BadInput(rule, type(model).__name__, "Tightship")
        self._model = model
        model.compile(backend="tightship", options=self.options)

    def look(self) -> None:
        """Take note of what has been planned so far."""
        if self._model is not None:
            self._session = compiled_session(self._model)
            self.plans, self.notes = compiled_plans(self._model), compiled_notes(self._model)

    def detach(self) -> None:
        """The model is as it was; what was planned is said."""
        if self._model is None:
            return
        self.look()
        self._model._compiled_call_impl = None
        self._model = None
        if self.say is not None:
            for text in (*map(_said, self.plans), *self.notes):
                self.say(f"tightship: {text}")


class Planning:
    """A callback with a model ``attached``: what was planned for it."""

    attached: Attached

    @property
    def plans(self) -> tuple[Any, ...]:
        """The graphs planned so far, each with its ``plan``."""
        return self.attached.plans

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of them."""
        return self.attached.notes


def _said(piece: Any) -> str:
    plan = piece.plan
    return f"graph {piece.name}: peak {format_bytes(plan.peak)}, {format_bytes(plan.peak_before)} unplanned"
