"""A callback for Lightning's Trainer: training within a budget, without another line of the script.

    lightning.Trainer(callbacks=[Tightship("60%")]).fit(module, data)

While the module trains, its ``forward`` runs through ``torch.compile`` with tightship's backend, so ``training_step``
must call ``self(…)``; each size of batch is planned when it first comes. When training ends, also by an error, the
module is as it was.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from tightship.integrations.callback import CompileCallback

__all__ = ["Tightship"]


class Tightship(CompileCallback, Callback):
    """Plans each kind of batch for ``budget`` and runs the plans; keywords are those of `CompileCallback`.

    A budget counts parameters, batch, gradients, everything that forward and backward make, and the optimizer's state
    and step, not what ``training_step`` makes of the module's results. Lightning clears gradients only between the
    next forward and backward pass: they are counted all along. Raises ``BadInput`` when training begins for a
    module that is compiled already.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.attach(pl_module, trainer.optimizers, accumulate=True)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.look()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.detach()
