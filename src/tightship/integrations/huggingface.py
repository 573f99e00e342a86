"""A callback for transformers' Trainer: training within a budget, without another line of the script.

    Trainer(model, args, train_dataset=data, callbacks=[Tightship("60%")]).train()

When training begins the model is given to ``torch.compile`` with tightship's backend; each size of batch is planned
when it first comes, and losses are those of ``backend="aot_eager"`` to the bit. When training ends the model is as it
was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from tightship.errors import BadInput
from tightship.integrations.torch_compile import compiled_notes, compiled_plans
from tightship.integrations.torch_options import read_options
from tightship.units import format_bytes

__all__ = ["Tightship"]


class Tightship(TrainerCallback):
    """Plans each kind of batch for ``budget`` and runs the plans.

    ``budget`` and ``options`` are those of the torch.compile backend (`CompileOptions`): a budget counts parameters,
    batch, gradients and everything that forward and backward make, not the optimizer's state. ``say`` is told, when
    training ends, of every plan and of what a user should know. Raises ``BadInput`` for options that there are not,
    and when training begins for a model that is compiled already.
    """

    def __init__(
        self, budget: Any = None, *, say: Callable[[str], object] | None = print, **options: Any
    ) -> None:
        self.options = {"budget": budget, **options}
        self.say = say
        self.plans: tuple[Any, ...] = ()
        self.notes: tuple[str, ...] = ()
        self._model: Any = None
        self._loss_type: Any = None
        read_options(self.options)  # what is wrong is said before anything is loaded

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Attach: from here on the model runs as planned."""
        if getattr(model, "_compiled_call_impl", None) is not None or getattr(args, "torch_compile", False):
            raise BadInput(
                "a model is compiled once: leave out torch_compile", type(model).__name__, "Trainer"
            )
        self._model, self._loss_type = model, getattr(model, "loss_type", None)
        if hasattr(model, "loss_function") and self._loss_type is None:
            model.loss_type = "ForCausalLM"  # which is taken anyway, with a warning that breaks the graph
        model.compile(backend="tightship", options=self.options)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._look()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Detach, and say what was planned."""
        if self._model is None:
            return
        self._look()
        self._model._compiled_call_impl = None
        if self._loss_type is None and hasattr(self._model, "loss_type"):
            self._model.loss_type = None
        self._model = None
        if self.say is not None:
            for text in (*map(_said, self.plans), *self.notes):
                self.say(f"tightship: {text}")

    def _look(self) -> None:
        self.plans, self.notes = compiled_plans(self._model), compiled_notes(self._model)


def _said(piece: Any) -> str:
    plan = piece.plan
    return f"graph {piece.name}: peak {format_bytes(plan.peak)}, {format_bytes(plan.peak_before)} unplanned"
