"""A callback for transformers' Trainer: training within a budget, without another line of the script.

    Trainer(model, args, train_dataset=data, callbacks=[Tightship("60%")]).train()

When training begins the model is given to ``torch.compile`` with tightship's backend; each size of batch is planned
when it first comes, and losses are bit-identical to those of the Trainer alone. When training ends the model is
as it was (not after an error: the Trainer then tells no callback).
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from tightship.errors import BadInput
from tightship.integrations.callback import CompileCallback

__all__ = ["Tightship"]


class Tightship(CompileCallback, TrainerCallback):
    """Plans each kind of batch for ``budget`` and runs the plans; keywords are those of `CompileCallback`.

    A budget counts parameters, batch, gradients, everything that forward and backward make, and the optimizer's state
    and step. Raises ``BadInput`` when training begins for a model that is compiled already.
    """

    _untyped: Any = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Attach: from here on the model runs as planned."""
        if getattr(args, "torch_compile", False):
            rule = "torch_compile=True, but the callback compiles: a model is compiled once, leave it out"
            raise BadInput(rule, place="TrainingArguments")
        self.attach(model, [optimizer], accumulate=getattr(args, "gradient_accumulation_steps", 1) > 1)
        if hasattr(model, "loss_function") and getattr(model, "loss_type", None) is None:
            self._untyped = model
            model.loss_type = "ForCausalLM"  # which is taken anyway, with a warning that breaks the graph

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.look()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Detach, and say what was planned."""
        self.detach()
        if self._untyped is not None:
            self._untyped.loss_type = self._untyped = None
