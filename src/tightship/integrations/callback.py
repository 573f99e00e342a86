"""What callbacks of trainers share: a model that is compiled with tightship's backend while it trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch

from tightship.errors import BadInput
from tightship.frontends.torch import compat_distributed, compat_dynamo, compat_fully_shard
from tightship.integrations.torch_compile import compiled_notes, compiled_plans, compiled_session
from tightship.integrations.torch_partition import BackendOptions, read_options
from tightship.units import format_bytes

__all__ = ["CompileCallback"]

_BREAKS = "graphs of those who call them end at fully_shard's hooks"

_LOG = logging.getLogger("tightship.callback")


class CompileCallback:
    """Compiles a model when training begins, and leaves it as it was when training ends.

    ``budget`` and ``options`` are those of the torch.compile backend (`CompileOptions`); the trainer's optimizers are
    counted unless ``optimizer`` says otherwise. ``plans`` are the graphs
    planned so far, each with its ``plan``, ``notes`` what a user should know of them; ``say`` is told both when
    training ends (None: nobody), and so is the log ``tightship.callback`` (INFO). Raises ``BadInput`` for unknown
    options.
    """

    def __init__(
        self,
        budget: Any = None,
        *,
        say: Callable[[str], object] | None = print,
        **options: Unpack[BackendOptions],
    ) -> None:
        self.options = {"budget": budget, **options}
        self.say = say
        self.plans: tuple[Any, ...] = ()
        self.notes: tuple[str, ...] = ()
        self._model: Any = None
        self._inside: list[Any] = []  # modules that are compiled by themselves
        self._own_notes: tuple[str, ...] = ()
        self._cut: Any = None  # what Dynamo did before with a model in DistributedDataParallel
        self._session: Any = None  # kept, and with it what a percentage came to
        read_options(self.options)  # before anything is loaded

    def attach(self, model: Any, optimizers: Sequence[Any], *, accumulate: bool) -> None:
        """From here on the model runs as planned, within a budget that counts what ``optimizers`` take. Raises
        ``BadInput`` for a model that is compiled already. Of a model of ``fully_shard``, modules of torch's own
        classes are planned by themselves, which is said.

        ``accumulate``: gradients are there while the model runs.
        """
        if getattr(model, "_compiled_call_impl", None) is not None:
            rule = f"{type(model).__name__} is compiled already: a model is compiled once, by this callback"
            raise BadInput(rule, place="Tightship")
        self._model = model
        plain = [_unwrapped(o) for o in optimizers if o is not None]
        counted = {"optimizer": plain or None, "accumulate": accumulate}
        self._cut = compat_dynamo.cut_at_buckets(False)
        options = {**counted, **self.options}
        model.compile(backend="tightship", options=options)
        if compat_distributed.distributed_by(model) != "fully_shard":
            return
        self._inside = list(compat_fully_shard.left_to_their_caller(model))
        for module in self._inside:
            module.forward = torch.compile(_forward_of(module), backend="tightship", options=options)
        if self._inside:
            kinds = ", ".join(sorted({type(m).__name__ for m in self._inside}))
            what = f"modules of torch's own classes ({len(self._inside)}: {kinds}) are planned by themselves"
            self._own_notes = (f"{what}: {_BREAKS}",)

    def look(self) -> None:
        """Take note of what has been planned so far."""
        if self._model is not None:
            self._session = compiled_session(self._model)
            self.plans = compiled_plans(self._model)
            self.notes = (*self._own_notes, *compiled_notes(self._model))

    def metrics(self, prefix: str = "") -> dict[str, int]:
        """Numbers for any tracker: ``tracker.log(callback.metrics("memory/"))``, while training and after it.

        ``graphs`` and ``notes`` count what is planned and said. In bytes, of the graph with the most: ``planned`` and
        ``unplanned`` peak, and ``peak``, measured. ``misses``: requests that went elsewhere than planned, in the last
        run of each graph. What was not measured is left out; before the first step, all but the counts.
        """
        self.look()
        rows = {"graphs": len(self.plans), "notes": len(self.notes)}
        if self.plans:
            rows["planned"] = max(p.plan.peak for p in self.plans)
            rows["unplanned"] = max(p.plan.peak_before for p in self.plans)
        if runs := [p.last for p in self.plans if p.last is not None]:
            rows["peak"] = max(run.measured_peak for run in runs)
            rows["misses"] = sum(run.misses for run in runs)
        return {f"{prefix}{key}": value for key, value in rows.items()}

    def detach(self) -> None:
        """Leave the model as it was, and say what was planned."""
        if self._model is None:
            return
        self.look()
        self._model._compiled_call_impl = None
        while self._inside:
            del self._inside.pop().forward
        compat_dynamo.cut_at_buckets(self._cut)
        self._model = None
        for text in (*map(_peaks, self.plans), *self.notes):
            _LOG.info("%s", text)
            if self.say is not None:
                self.say(f"tightship: {text}")


def _forward_of(module: Any) -> Callable[..., Any]:
    """As code of the caller's, whose frame Dynamo compiles; hooks around it run as they are."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return type(module).forward(module, *args, **kwargs)

    return forward


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer in a trainer's wrapper (accelerate's, Lightning's)."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _peaks(piece: Any) -> str:
    plan = piece.plan
    return f"graph {piece.name}: peak {format_bytes(plan.peak)}, {format_bytes(plan.peak_before)} unplanned"
