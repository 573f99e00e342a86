"""fit: a training step within a budget, as a function of the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tightship.errors import BadInput, Unsupported
from tightship.execute.prepared import Planner, Prepared, Settings
from tightship.frontends.torch import compat
from tightship.frontends.torch.program import Program
from tightship.frontends.torch.step import DATA_PARALLEL, capture_step
from tightship.frontends.torch.structure import flatten
from tightship.units import parse_budget, parse_bytes

__all__ = ["TrainStep", "fit"]


def fit(
    model: torch.nn.Module,
    loss_fn: Any,
    optimizer: torch.optim.Optimizer,
    sample_batch: Any,
    budget: Any = None,
    *,
    planner: Planner | None = None,
    strict: bool = False,
    cache: Path | str | None = "default",
    seconds_per_op: float = 0.01,
    variants: int = 4,
    folder: Path | str | None = None,
    pinned: Any = None,
    independent: bool = False,
    **options: Any,
) -> TrainStep:
    """A training step of ``model`` that stays within ``budget``.

    ``step = fit(model, loss_fn, optimizer, batch, "60%")`` and then ``loss = step(batch)`` do what
    ``optimizer.zero_grad(); loss = loss_fn(model, batch); loss.backward(); optimizer.step()`` does, to the
    bit, in the caller's own model and optimizer. ``loss_fn`` and batches are as `capture_step` takes them.

    ``budget`` is bytes, text such as ``6GiB``, a percentage of the unplanned peak (``60%``), or ``static+60%``: the
    static set and that share of what the unplanned step needs beyond it. A percentage is of the sample's step, and
    resolved to bytes once: they hold for every later batch. A budget counts parameters, buffers, optimizer state,
    the batch, and everything the step makes, results included. None keeps everything, in the better order.
    ``planner`` replaces the default planner, to which ``options`` go. ``variants`` is how many kinds of batches are
    kept planned. ``strict``: as for `Executor`. ``cache`` and ``seconds_per_op``: as for `profile`. ``folder``: where
    offloaded bytes go, in files without names (default: the system's folder for temporary files); from a GPU to
    pinned memory instead, and to files only what is beyond ``pinned`` of it (bytes or text such as ``8GiB``), if that
    is said. ``independent``: in a world of several ranks each trains a model of its own; without, a step that has no
    collective is refused there.

    Raises ``Infeasible`` when no plan meets the budget, ``Unsupported`` for what cannot be captured or run
    exactly, ``BadInput`` for arguments that make no sense.
    """
    if variants < 1:
        raise BadInput("at least one kind of batch is kept", variants, "fit(variants=…)")
    if planner is None:
        planner = _default_planner(options)
    elif options:
        raise BadInput("options go to the default planner", sorted(options), "fit")
    wanted = None if budget is None else parse_budget(budget)
    most = None if pinned is None else parse_bytes(pinned, "fit(pinned=…)")
    measuring = {"cache": cache, "seconds_per_op": seconds_per_op, "folder": folder, "pinned": most}
    settings = Settings(wanted, planner, measuring, strict, variants)
    step = TrainStep(model, loss_fn, optimizer, settings, independent=independent)
    step.prepare(sample_batch)
    return step


def _default_planner(options: dict[str, Any]) -> Planner:
    from tightship.planners.default import Options
    from tightship.planners.remedies import advised

    try:
        chosen = Options(**options)
    except TypeError as error:
        raise BadInput(
            f"options are those of the default planner ({error})", sorted(options), "fit"
        ) from error
    return lambda graph, budget: advised(graph, budget, chosen)


class TrainStep(Prepared):
    """Made by `fit`. ``step(batch)`` trains on a batch and returns the loss, or (loss, what came with it).

    Kinds of batches are kept as `Prepared` says. ``p.grad`` is neither read nor written. One thread at a time: a call
    while another is running raises ``Unsupported``. If a step raises, the parameters whose update had run are
    updated and the others are not (running statistics and random state likewise): load a checkpoint, or go
    on.
    """

    optimizer: torch.optim.Optimizer

    def __init__(
        self, model: torch.nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, settings: Settings,
        *, independent: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(model, optimizer, settings)
        self.loss_fn, self.independent = loss_fn, independent

    def __call__(self, batch: Any) -> Any:
        with self._alone():
            variant, tensors = self._find(batch, flatten(batch))
            self._check_ranks(variant.program)
            results = variant.executor.run(tensors)
            compat.mark_stepped(self.optimizer)
            return variant.program.result_spec.unflatten(results)

    def _capture(self, batch: Any) -> Program:
        program = capture_step(self.model, self.loss_fn, self.optimizer, batch)
        self._check_ranks(program)
        return program

    def _check_ranks(self, program: Program) -> None:
        """Raise ``Unsupported`` where ranks would drift apart without a word."""
        ranks = 1 if self.independent else compat.world_size()
        if ranks > 1 and not any(compat.is_collective(call.fn) for call in program.calls):
            raise Unsupported(
                f"a step without a collective on {ranks} ranks", "each rank would train a model of its own",
                f"{DATA_PARALLEL}; where that is what you want (an ensemble), fit(…, independent=True)",
            )  # fmt: skip
