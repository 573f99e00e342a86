"""A callback for transformers' Trainer: training within a budget, without another line of the script.

    Trainer(model, args, train_dataset=data, callbacks=[Tightship("60%")]).train()

When training begins the model is given to ``torch.compile`` with tightship's backend; each size of batch is planned
when it first comes, and losses are those of ``backend="aot_eager"`` to the bit. When training ends the model is as it
was (not after an error: the Trainer then tells no callback).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from tightship.errors import BadInput
from tightship.integrations.attached import Attached, Planning

__all__ = ["Tightship"]


class Tightship(Planning, TrainerCallback):
    """Plans each kind of batch for ``budget`` and runs the plans.

    ``budget`` and ``options`` are those of the torch.compile backend (`CompileOptions`): a budget counts parameters,
    batch, gradients and everything that forward and backward make, not the optimizer's state. ``say`` is told, when
    training ends, of every plan and of what a user should know. Raises ``BadInput`` for options that there are not,
    and when training begins for a model that is compiled already.
    """

    def __init__(
        self, budget: Any = None, *, say: Callable[[str], object] | None = print, **options: Any
    ) -> None:
        self.attached = Attached(budget, say, options)
        self._untyped: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Attach: from here on the model runs as planned."""
        if getattr(args, "torch_compile", False):
            raise BadInput("a model is compiled once: leave out torch_compile", True, "TrainingArguments")
        self.attached.attach(model)
        if hasattr(model, "loss_function") and getattr(model, "loss_type", None) is None:
            self._untyped = model
            model.loss_type = "ForCausalLM"  # which is taken anyway, with a warning that breaks the graph

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.attached.look()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Detach, and say what was planned."""
        self.attached.detach()
        if self._untyped is not None:
            self._untyped.loss_type = self._untyped = None
