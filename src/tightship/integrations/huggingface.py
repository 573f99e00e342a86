"""A callback for transformers' Trainer: training within a budget, without another line of the script.

    Trainer(model, args, train_dataset=data, callbacks=[Tightship("60%")]).train()

or, of a Trainer that is there already (TRL's, a script's), one line before it trains:

    fit_trainer(trainer, "6GiB")

When training begins the model is given to ``torch.compile`` with tightship's backend; each size of batch is planned
when it first comes, and losses are bit-identical to those of the Trainer alone. When training ends the model is
as it was (not after an error: the Trainer then tells no callback).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from transformers import TrainerCallback

from tightship.errors import BadInput
from tightship.integrations.callback import CompileCallback
from tightship.integrations.torch_partition import BackendOptions

__all__ = ["Tightship", "fit_trainer"]


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
        _check(args)
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


def fit_trainer(
    trainer: Any,
    budget: Any = None,
    *,
    say: Callable[[str], object] | None = print,
    **options: Unpack[BackendOptions],
) -> Tightship:
    """Have a Trainer train within ``budget``; returns its callback, which has ``plans``, ``notes`` and ``metrics()``.

    The Trainer stays as it is but for the callback: clipping, accumulation, mixed precision, evaluation, resuming
    and every ``TrainingArguments`` do what they did. ``options`` are those of `Tightship`. Raises ``BadInput`` for
    unknown options, for a Trainer that has the callback or compiles by itself, and for what is no Trainer.
    """
    callback = Tightship(budget, say=say, **options)
    handler = getattr(trainer, "callback_handler", None)
    if handler is None:
        raise BadInput(
            "no Trainer of transformers: it has no callbacks", type(trainer).__name__, "fit_trainer"
        )
    if any(isinstance(c, Tightship) for c in handler.callbacks):
        raise BadInput(
            "this Trainer has the callback already: one budget holds for all of it", place="fit_trainer"
        )
    _check(trainer.args)
    trainer.add_callback(callback)
    return callback


def _check(args: Any) -> None:
    if getattr(args, "torch_compile", False):
        rule = "torch_compile=True, but the callback compiles: a model is compiled once, leave it out"
        raise BadInput(rule, place="TrainingArguments")
