"""What follows a training step's backward pass: gradients are averaged and clipped, parameters updated."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tightship.errors import BadInput
from tightship.execute import allocator
from tightship.execute.data_parallel import check_options, digest_of_options
from tightship.execute.eager import Unplanned
from tightship.execute.hooked_buckets import HookedBuckets
from tightship.execute.interpreter import PeakMismatch
from tightship.execute.parts import PartRuns, check_gradients
from tightship.execute.prepared import Variant
from tightship.execute.train_variants import TrainVariants, callers_level
from tightship.frontends.torch import compat, compat_distributed, compat_optimizers
from tightship.units import format_bytes

__all__ = ["TrainUpdate"]


class TrainUpdate(TrainVariants):
    """``grad_norm`` and ``skipped`` as in `TrainStep`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.grad_norm: torch.Tensor | None = None
        self.skipped = 0
        self._added = 0  # batches since the last update
        self._ran = PartRuns()
        self._said_kept = False
        self._ready: tuple[str, ...] = ()  # parameters, as their gradients came in the last backward pass
        self._unplanned: Unplanned | None = None
        self._in_eager: Unplanned | None = None  # the last step, perhaps for a while only

    def _average(self, *, updates: bool = False) -> None:
        """Gradients of parameters that all ranks have; ``updates``, if they are stepped with next."""
        assert self.ranks is not None
        assert self._replicas is not None
        there = [n for n, p in self._owned.parameters if p.grad is not None]
        text = f"gradients of {len(there)} parameters ({', '.join(there)})"
        hooked = self._replicas.hooked
        check = None if hooked is None else partial(hooked.check, dict(self._owned.parameters))
        self._compare("gradients", text, updates=updates, check=check)
        if hooked is not None and hooked.asks_order:
            _, told = self.ranks.agreed("ordering buckets", lambda: self._ready, lambda row: row)
            hooked.order(told[compat_distributed.first_rank(self._replicas.parallel.group)])
        if hooked is None:
            self._replicas.average(self._owned.parameters)
            return
        with self.ranks.calling_out(f"the communication hook {hooked.name}"):
            self._replicas.average(self._owned.parameters)
        self._say_kept(hooked)

    def _say_kept(self, hooked: HookedBuckets) -> None:
        """What a communication hook keeps is beside the plan: said where both are more than the budget."""
        peak = self._latest.executor.plan.peak + hooked.kept
        if self._limit is None or peak <= self._limit or self._said_kept:
            return
        self._said_kept = True
        note = (
            f"the communication hook {hooked.name} keeps {format_bytes(hooked.kept)} from step to step, which is "
            f"{format_bytes(peak)} with what is planned, beyond the budget of {format_bytes(self._limit)}: give fit "
            "a budget that is as much smaller"
        )
        self._notes.append(note)
        warnings.warn(note, PeakMismatch, stacklevel=callers_level())

    def _compare(
        self, what: str, text: str, *, updates: bool, check: Callable[[], None] | None = None
    ) -> None:  # fmt: skip
        """Raises ``PeerFailed`` unless ranks say the same, and are to do the same updates; what ``check`` raises, on
        all."""
        assert self.ranks is not None

        def own() -> list[str]:
            if check is not None:
                check()
            return [text, digest_of_options(self.optimizer) if updates else ""]

        _, told = self.ranks.agreed(f"comparing {what}", own, lambda row: row)
        if len({row[0] for row in told}) > 1:
            raise self.ranks.differ(f"different {what}", [row[0] for row in told])
        check_options(self.ranks, [row[1] for row in told], self.optimizer)
        self.ranks.begin()

    def _update(self, *, averaged: bool) -> None:
        self._added = 0  # whatever comes of it: the next batch begins anew
        self._renew()
        if self.optimizer is None:
            raise BadInput("no optimizer: update yourself, or give fit an optimizer", place="step.update")
        unseen = compat.in_dispatch_mode() or compat.in_function_mode()
        in_eager = (
            self._unplanned is not None or unseen or (self._in_eager is not None and not self._variants)
        )
        if self._replicas is not None and not averaged:
            self._replicas.fill_up(self._owned.parameters, self.ranks)
        variant = None if in_eager else self._planned_update()
        if self._replicas is not None and not averaged:
            with self._metered(variant, "averaging gradients"):
                self._average(updates=True)
        elif self.ranks is not None:
            self._compare("updates", "an update", updates=self._replicas is not None)
        finite = self._between(self._with_gradients(), variant)
        self._add_up()
        if not finite:
            self.skipped += 1
        scaler = self.loop.scaler
        if scaler is not None:
            if finite and in_eager:
                scaler.step(self.optimizer)
            elif finite:
                with compat_optimizers.step_replaced(self.optimizer, lambda: self._run_update(variant)):
                    scaler.step(self.optimizer)
            scaler.update()
        elif finite and in_eager:
            self.optimizer.step()
        elif finite:
            self._run_update(variant)

    def _add_up(self) -> None:
        """What eager's DTensors do in the optimizer's step."""
        if self._replicas is not None:
            self._replicas.add_up({n: p.grad for n, p in self._owned.parameters if p.grad is not None})

    def _planned_update(self) -> Variant | None:
        names = self._own_updates().names
        gradients = {n: p.grad for n, p in self._owned.parameters if n in names and p.grad is not None}
        check_gradients(gradients)
        return self._update_variant(gradients) if gradients else None

    def _with_gradients(self) -> dict[str, torch.Tensor]:
        """Those of the optimizer's parameters that have one."""
        assert self.optimizer is not None
        stepped = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return {n: p for n, p in self._owned.parameters if id(p) in stepped and p.grad is not None}

    def _run_update(self, variant: Variant | None) -> None:
        assert self.optimizer is not None
        if variant is not None:
            self._put_away()
            variant.executor.run(variant.binding.tensors(()), consume=True, updating=self._updating)
            self._ran.add(variant, self._beside)
        compat_optimizers.mark_stepped(self.optimizer)

    def _between(self, parameters: dict[str, torch.Tensor], variant: Variant | None) -> bool:
        """What is done with gradients before the update; returns whether they are finite, where that is asked."""
        loop = self.loop
        in_parts = self._replicas is not None and self._replicas.shards and loop.scaler is not None
        if not parameters or not (loop.clips or loop.skip_nonfinite or in_parts):
            return True
        with self._metered(variant, "clipping"), torch.no_grad():
            if loop.scaler is not None:
                loop.scaler.unscale_(self.optimizer)
                if self._replicas is not None:
                    self._replicas.agree_finite(loop.scaler, self.optimizer)
            self.grad_norm = loop.norm(parameters)
            if loop.skip_nonfinite and self.grad_norm is not None and not torch.isfinite(self.grad_norm):
                return False
            loop.clip(parameters, self.grad_norm)
        return True

    @contextmanager
    def _metered(self, variant: Variant | None, what: str) -> Iterator[None]:
        """What is done between the parts of a step, which asks for memory beside the arena: measured, and compared
        with the budget. ``variant``: the update that follows."""
        kind = allocator.kind_of(str(next((p.device for _, p in self._owned.parameters), "cpu")))
        if variant is None or allocator.why_not(kind) is not None:
            yield
            return
        meter = allocator.Meter(kind)
        with meter:
            yield
        nbytes = variant.program.graph.static_bytes + self._beside + meter.peak
        self._ran.between = max(nbytes, self._ran.between or 0)
        if self._limit is not None and nbytes > self._limit:
            warnings.warn(
                f"{what} takes {format_bytes(nbytes)}, beyond the budget of {format_bytes(self._limit)}",
                PeakMismatch, stacklevel=6,
            )  # fmt: skip
