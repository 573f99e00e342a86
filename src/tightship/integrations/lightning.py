"""A callback for Lightning's Trainer: training within a budget, without another line of the script.

    lightning.Trainer(callbacks=[Tightship("60%")]).fit(module, data)

While the module trains, its ``forward`` runs through ``torch.compile`` with tightship's backend, so ``training_step``
must call ``self(…)``; each size of batch is planned when it first comes. When training ends, also by an error, the
module is as it was.

    lightning.Trainer(callbacks=[LargestBatch("20GiB")]).fit(module)

sets the batch size as Lightning's ``BatchSizeFinder`` does, from an estimate: no batch is tried, so none runs out of
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.utilities.parsing import lightning_setattr

from tightship.errors import BadInput, Unsupported
from tightship.execute.estimate import estimate
from tightship.integrations.callback import CompileCallback
from tightship.units import BudgetLike, parse_budget

__all__ = ["LargestBatch", "Tightship"]


class Tightship(CompileCallback, Callback):
    """Plans each kind of batch for ``budget`` and runs the plans; keywords are those of `CompileCallback`.

    A budget counts parameters, batch, gradients, everything that forward and backward make, and the optimizer's state
    and step, not what ``training_step`` makes of the module's results. Lightning clears gradients only between the
    next forward and backward pass: they are counted all along. Raises ``BadInput`` when training begins for a
    module that is compiled already.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.attach(pl_module, trainer.optimizers, accumulate=True)
        _compile_forward_alone(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.look()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.detach()


def _compile_forward_alone(module: Any) -> None:
    """Where a strategy wraps the module (DistributedDataParallel), Lightning calls ``training_step`` in the place of
    ``forward``, once a step. With it Dynamo would compile what the step does beside the model, and again whenever
    that changes (a list of losses grows): such a call runs as it is, and the ``forward`` in it as planned."""
    compiled, plain = module._compiled_call_impl, module._call_impl

    @wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        redirected = getattr(vars(module).get("forward"), "__module__", "").endswith(".strategies.strategy")
        return (plain if redirected else compiled)(*args, **kwargs)

    module._compiled_call_impl = call


class LargestBatch(BatchSizeFinder):
    """Sets ``batch_arg_name`` of module or data module to the largest batch whose step, as Lightning runs it in
    eager, is within ``budget`` (bytes, or text such as ``20GiB``); ``device`` (a name such as ``h100``): with what
    its context takes, and its own memory where there is no budget. At most ``max_val``, and the data set's length.

    When fitting begins one batch is loaded, and steps are looked at on tensors without data: nothing is tried, and
    nothing of model or optimizer changes. ``optimal_batch_size`` is the answer. As for ``BatchSizeFinder`` the
    loaders are the module's own, and training is on one device. Counted are clipping, accumulation and the precision
    that the trainer has; not what callbacks and loggers hold. Raises ``Infeasible`` where no batch fits,
    ``Unsupported`` for manual optimization and several optimizers.
    """

    def __init__(
        self, budget: BudgetLike = None, *, batch_arg_name: str = "batch_size", max_val: int = 8192,
        device: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(batch_arg_name=batch_arg_name, max_val=max_val, margin=0.0)
        if budget is None and device is None:
            raise BadInput("the largest batch needs a budget in bytes, such as 20GiB", place="LargestBatch")
        if budget is not None and parse_budget(budget).bytes is None:
            rule = f"{budget}: the largest batch needs a budget in bytes, such as 20GiB"
            raise BadInput(rule, place="LargestBatch")
        self._budget, self._device = budget, device

    def scale_batch_size(self, trainer: Any, pl_module: Any) -> None:
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            raise Unsupported(
                f"LargestBatch for {type(pl_module).__name__}", "only its own code knows the order of its steps",
                "use tightship.estimate(loop=…), which takes a step of your own",
            )  # fmt: skip
        loop = trainer.fit_loop
        loop.setup_data()
        loader = loop._combined_loader
        batch = trainer.strategy.batch_to_device(next(iter(loader.flattened[0])))
        (optimizer,) = trainer.optimizers
        with _unlogged(pl_module):
            answer = estimate(pl_module, batch, optimizer, device=self._device, loop=_Step(trainer))
            try:
                most = min(self._max_val, loader._dataset_length())
            except NotImplementedError:  # a data set without a length
                most = self._max_val
            size = answer.largest_batch(self._budget, most=most)
        self.optimal_batch_size = size
        lightning_setattr(pl_module, self._batch_arg_name, size)
        loop._combined_loader = None
        loop.setup_data()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Only training is looked at."""

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Only training is looked at."""

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Only training is looked at."""


class _Step:
    """A step as Lightning runs it: gradients of the step before are cleared between forward and backward pass."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __call__(self, module: Any, batch: Any, optimizer: Any) -> Any:
        trainer, count = self._trainer, self._trainer.accumulate_grad_batches
        for k in range(count):
            with trainer.precision_plugin.train_step_context():
                out = module.training_step(batch, k)
            loss = out["loss"] if isinstance(out, dict) else out
            if k == 0:
                optimizer.zero_grad()
            (loss / count).backward()
        if trainer.gradient_clip_val:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            if trainer.gradient_clip_algorithm == "value":
                torch.nn.utils.clip_grad_value_(parameters, trainer.gradient_clip_val)
            else:
                torch.nn.utils.clip_grad_norm_(parameters, trainer.gradient_clip_val)
        optimizer.step()
        return loss.detach()


@contextmanager
def _unlogged(module: Any) -> Iterator[None]:
    """``self.log`` in a training step says nothing meanwhile: there is no step that a number would belong to."""
    names = [n for n in ("log", "log_dict") if n not in vars(module)]
    for name in names:
        object.__setattr__(module, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name in names:
            object.__delattr__(module, name)
