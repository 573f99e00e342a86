"""A callback for Lightning's Trainer: training within a budget, without another line of the script.

    lightning.Trainer(callbacks=[Tightship("60%")]).fit(module, data)

While the module trains, its ``forward`` runs through ``torch.compile`` with tightship's backend, so ``training_step``
must call ``self(…)``; each size of batch is planned when it first comes. When training ends, also by an error, the
module is as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback

from tightship.integrations.attached import Attached, Planning

__all__ = ["Tightship"]


class Tightship(Planning, Callback):
    """Plans each kind of batch for ``budget`` and runs the plans.

    ``budget`` and ``options`` are those of the torch.compile backend (`CompileOptions`): a budget counts parameters,
    batch, gradients and everything that forward and backward make, not the optimizer's state or what
    ``training_step`` makes of the module's results. ``say`` is told, when training ends, of every plan and of what a
    user should know. Raises ``BadInput`` for options that there are not, and for a module that is compiled already.
    """

    def __init__(
        self, budget: Any = None, *, say: Callable[[str], object] | None = print, **options: Any
    ) -> None:
        self.attached = Attached(budget, say, options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.attached.attach(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.attached.look()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.attached.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.attached.detach()
