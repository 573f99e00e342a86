"""fit: a training step within a budget, as a function of the batch, or as its parts: backward pass and update."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, SupportsIndex, Unpack

import torch

from tightship import simulate
from tightship.errors import BadInput, Enough, Infeasible, Unplannable, Unsupported, VerificationFailed
from tightship.execute import allocator
from tightship.execute.cache import KeptPlans, folder_of
from tightship.execute.eager import Unplanned, differences, random_states, run_eager, tensors_by_name
from tightship.execute.interpreter import Fallback, PeakMismatch, RunStats
from tightship.execute.parts import (
    Loop,
    PartRuns,
    bytes_of_inputs,
    check_gradients,
    gradients_of,
    layouts,
)
from tightship.execute.prepared import (
    Planner,
    Prepared,
    Settings,
    Silent,
    Stages,
    Variant,
    within_unplanned,
)
from tightship.execute.split import ROUNDING, divide_allow
from tightship.frontends.torch import compat
from tightship.frontends.torch.capture.state_restore import untouched
from tightship.frontends.torch.capture.step import (
    DATA_PARALLEL,
    Ending,
    capture_update,
    check_hooks,
    check_model,
)
from tightship.frontends.torch.optimizer.updates import Several, SeveralUpdates, Updates, as_one, updaters
from tightship.frontends.torch.program import Program
from tightship.frontends.torch.rerun.live_step import Asked, Owned, run_code
from tightship.frontends.torch.rerun.numbers import other_numbers, with_numbers_at
from tightship.frontends.torch.rerun.python_state import python_state_kept
from tightship.frontends.torch.structure import (
    Pad,
    TensorLeaf,
    checked_loss,
    flatten,
    loss_function,
    padded,
    tensor_leaves,
)
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.planners.default import PlanOptions, read_options
from tightship.units import Budget, format_bytes, parse_budget, parse_bytes

__all__ = ["TrainStep", "fit"]


def fit(
    model: torch.nn.Module,
    loss_fn: Any,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    sample_batch: Any,
    budget: Budget | str | SupportsIndex | None = None,
    *,
    planner: Planner | None = None,
    strict: bool = False,
    cache: Path | str | None = "default",
    seconds_per_op: float = 0.01,
    variants: int = 4,
    folder: Path | str | None = None,
    pinned: str | SupportsIndex | None = None,
    prepare: bool = True,
    verify_every: int = 0,
    independent: bool = False,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    scaler: Any = None,
    skip_nonfinite: bool = False,
    split: bool = False,
    pad_to: Pad | Sequence[Pad] | None = None,
    progress: Stages | None = None,
    mode: str = "exact",
    **options: Unpack[PlanOptions],
) -> TrainStep:
    """A training step of ``model`` that stays within ``budget``.

    ``step = fit(model, loss_fn, optimizer, batch, "60%")`` and then ``loss = step(batch)`` do what
    ``optimizer.zero_grad(); loss = loss_fn(model, batch); loss.backward(); optimizer.step()`` does, bit-identically,
    in the caller's own model and optimizer. ``loss_fn`` and batches are as `capture_step` takes them. Of a list of
    optimizers each steps in turn.

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

    With ``accumulate=k`` each call takes one batch, and every k-th updates with the sum of the gradients (divide the
    loss by k, as in eager). ``clip_norm`` and ``clip_value`` clip the gradients of the optimizer's parameters as
    ``clip_grad_norm_`` and ``clip_grad_value_`` of ``torch.nn.utils`` do; ``scaler`` (a ``torch.amp.GradScaler``)
    scales the loss, and unscales, steps and updates; ``skip_nonfinite`` leaves out an update where the norm of the
    gradients is not finite. ``split``: prepare for ``step.backward(batch)`` and ``step.update()``, with anything
    you like between the two; without an optimizer there is ``step.backward`` alone.

    ``pad_to`` says how batches of varying length are filled up to few lengths: each of these is captured and planned
    once, and a step does what eager's does on the batch that ``step.padded(batch)`` gives, bit-identically. The
    largest length that there is is planned here: a percentage is of it. Kinds for all lengths are kept.

    ``progress`` hears which stage preparing is in. The options' ``seconds`` are for measuring and search together.
    ``mode`` is ``exact``: op by op. Compiled code is planned by the torch.compile backend.

    ``loss_fn`` runs once in every step, as in eager, and once here: what that run changes of Python's state is put
    back. Without ``prepare`` it does not run here, and the first step captures and plans.

    Raises ``Infeasible`` when no plan meets the budget, ``Unsupported`` for what cannot be captured or run
    exactly, ``BadInput`` for arguments that make no sense.
    """
    if variants < 1:
        raise BadInput("no kind of batch would be kept: variants must be at least 1", variants, "fit")
    if mode == "compiled":
        raise Unsupported("fit(mode='compiled')", "fit runs a step op by op", _COMPILED)
    if mode != "exact":
        raise BadInput("an unknown mode: fit knows 'exact' alone", mode, "fit(mode=…)")
    measuring: dict[str, Any] = {"cache": cache, "seconds_per_op": seconds_per_op, "folder": folder}
    splitting = ""
    if planner is None:
        chosen, splitting = divide_allow(read_options(options, "fit"))
        planner = KeptPlans(folder_of(cache), chosen)
        measuring["seconds"] = chosen.seconds
    elif options:
        rule = f"unused options {', '.join(options)}: planner= replaces the default planner, whose they are"
        raise BadInput(rule, place="fit")
    wanted = None if budget is None else parse_budget(budget)
    most = None if pinned is None else parse_bytes(pinned, "fit(pinned=…)")
    measuring["pinned"] = most
    pads = _pads(pad_to)
    kinds = math.prod(len(p.lengths) for p in pads if p.lengths is not None) if pads else 0
    variants = max(variants, min(_PER_LENGTH * kinds, _MOST_KINDS))
    said = progress or Silent()
    settings = Settings(wanted, planner, measuring, strict, variants, progress=said, split=splitting)
    if verify_every < 0:
        raise BadInput("negative verify_every: it is a number of steps, 0 for never", verify_every, "fit")
    if verify_every and splitting == ROUNDING:
        rule = f"verify_every compares bits, and allow={ROUNDING} lets sums round otherwise: leave one of them out"
        raise BadInput(rule, place="fit")
    loop = Loop(accumulate, clip_norm, clip_value, scaler, skip_nonfinite)
    loop.check()
    one = as_one(optimizer)
    if isinstance(one, Several) and scaler is not None:
        raise Unsupported(
            "a GradScaler with several optimizers", "it skips each of them by itself",
            "leave fit's optimizer out (None), and call scaler.step for each after step.backward",
        )  # fmt: skip
    step = TrainStep(
        model, loss_fn, one, settings, verify_every,
        independent=independent, loop=loop, split=split, pads=pads,
    )  # fmt: skip
    if prepare:
        step._prepared(step._filled(sample_batch, largest=True), 4)
    return step


_COMPILED = (
    'compile the model by torch.compile(model, backend="tightship", options={"budget": …, "mode": "compiled", '
    '"optimizer": optimizer}), and keep your loop'
)


def _pads(given: Pad | Sequence[Pad] | None) -> tuple[Pad, ...]:
    """What ``pad_to`` says, which may be anything. Raises ``BadInput``."""
    pads = given if isinstance(given, (list, tuple)) else () if given is None else (given,)
    for pad in pads:
        if not isinstance(pad, Pad):
            raise BadInput(
                "pad_to is no tightship.Pad: it is one, or several in a list", type(pad).__name__, "fit"
            )
    return tuple(pads)


_PER_LENGTH, _MOST_KINDS = 2, 32
"""Kinds of batches that are kept for each length, such as with and without a mask that is all ones; and at most."""


class TrainStep(Prepared):
    """Made by `fit`. ``step(batch)`` trains on a batch and returns the loss, or (loss, what came with it).

    ``loss_fn`` runs once in every step, as in eager and with its side effects, on stand-ins for tensors that compute
    nothing; what it asks for is compared with what was captured. Numbers that have changed are taken over, anything
    else is captured and planned as a kind of its own; the latest kinds are kept, as `Prepared` says.

    The same in parts, each within the budget: ``step.backward(batch)`` leaves gradients in ``p.grad``, or adds to
    those that are there, and ``step.update()`` is ``optimizer.step()``. A call of the step leaves no gradients, and
    refuses one that is there.

    Hooks on parameters and backward hooks of modules are refused. One thread at a time: a call while another is
    running raises ``Unsupported``. If a step raises, the parameters whose update had run are updated and the others
    are not (running statistics and random state likewise): load a checkpoint, or go on.

    ``grad_norm`` is the norm of the gradients before the last update, where it was asked for (``clip_norm``,
    ``skip_nonfinite``); ``skipped`` counts the updates that were left out for gradients that are not finite.
    """

    def __init__(
        self, model: torch.nn.Module, loss_fn: Any, optimizer: Any, settings: Settings,
        verify_every: int = 0, *, independent: bool = False, loop: Loop | None = None, split: bool = False,
        pads: Sequence[Pad] = (),
    ) -> None:  # fmt: skip
        check_model(model, hooks=True)
        super().__init__(model, optimizer, settings, trains=True)
        self.loss_fn, self.independent = loss_fn, independent
        self.loop, self._split = loop or Loop(), split or optimizer is None
        self._pads, self._has_padded = tuple(pads), False
        self.grad_norm: torch.Tensor | None = None
        self.skipped = 0
        self._owned = Owned(model)
        self._updates: Updates | SeveralUpdates | None = None
        self._has_no_update = False
        self._verify_every, self._steps = verify_every, 0
        self._added = 0  # batches since the last update
        self._ran = PartRuns()
        self._unplanned: Unplanned | None = None
        self._in_eager: Unplanned | None = None  # the last step, perhaps for a while only

    def _on_replaced(self) -> None:
        self._owned, self._updates, self._has_no_update = Owned(self.model), None, False

    @property
    def _in_parts(self) -> bool:
        return self._split or self.loop.in_parts

    @property
    def _latest(self) -> Variant:
        if self._unplanned is not None:
            raise BadInput("nothing is planned: steps run in eager, as notes says", place="plan")
        return next((v for v in self._variants if v.part != "update"), super()._latest)

    def measure(self) -> dict[str, int | None]:
        """Bytes of the last step against its plan; None where nothing was measured (yet). Of a step in parts: the
        most of any of them, from the first backward pass to the update; ``between`` is what stood between the two,
        where `fit` was told what to do there."""
        if self._in_eager is not None:
            return self._in_eager.measure(self._limit)
        return super().measure() | self._ran.measure()

    @property
    def last(self) -> RunStats | None:
        return None if self._in_eager is not None else super().last

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes) if self._unplanned is not None else super().notes

    # --- running ---

    def padded(self, batch: Any) -> Any:
        """The batch that the step is run on: filled up as ``pad_to`` of `fit` says, otherwise itself. Raises
        ``BadInput`` for one that is too long."""
        return padded(batch, self._pads)

    def _filled(self, batch: Any, *, largest: bool = False) -> Any:
        if not self._pads:
            return batch
        filled = padded(batch, self._pads, largest=largest, whole=not self._has_padded)
        self._has_padded = True
        return filled

    def __call__(self, batch: Any) -> Any:
        with self._exclusive():
            batch = self._filled(batch)
            if self._in_parts:
                return self._call_in_parts(batch)
            self._renew()
            check_no_gradients(self._owned.parameters)
            out = self._run(batch)
            self._ran = PartRuns()
            compat.mark_stepped(self.optimizer)
            return out

    def _call_in_parts(self, batch: Any) -> Any:
        if self.optimizer is None:
            fault = "no optimizer: call step.backward(batch) and update yourself, or give fit an optimizer"
            raise BadInput(fault, place="step")
        if not self._added:
            check_no_gradients(self._owned.parameters)
        out = self._backward(batch)
        if self._added == self.loop.accumulate:
            self._update()
            for _, p in self._owned.parameters:
                p.grad = None
        return out

    def backward(self, batch: Any) -> Any:
        """Forward and backward pass on a batch, within the budget: what ``loss = loss_fn(model, batch)`` and
        ``loss.backward()`` do, bit-identically. Gradients are left in ``p.grad``; where one is there, the new one is
        added to it in place. Returns what the step itself would return. Do as you like with gradients before
        ``update``."""
        with self._exclusive():
            return self._backward(self._filled(batch))

    def update(self) -> None:
        """The optimizer's step with the gradients that are in ``p.grad``, within the budget: what
        ``optimizer.step()`` does, bit-identically. Gradients stay, as in eager. What `fit` was told to do with them
        (``clip_norm``, ``clip_value``, ``scaler``, ``skip_nonfinite``) is done before."""
        with self._exclusive():
            self._update()

    def _backward(self, batch: Any) -> Any:
        self._renew()
        held = {n: p.grad for n, p in self._owned.parameters if p.grad is not None}
        if not self._added:
            self._ran = PartRuns()
        out = self._run(batch, held)
        self._added += 1
        if self._unplanned is None and not torch.is_anomaly_enabled():
            self._ran.add(self._latest)
        return out if self.loop.scaler is None else out[1]

    def _run(self, batch: Any, held: Mapping[str, torch.Tensor] | None = None) -> Any:
        """What the step returns, or its backward pass with the gradients ``held`` so far; compared with eager's,
        which runs first, in every so many steps. Gradients that the program hands back are left with their
        parameters."""
        unplanned = self._in_eager = self._unplanned or self._anomalous()
        if unplanned is not None:
            return self._run_unplanned(unplanned, batch, whole=held is None)
        check_gradients(held or {})
        try:
            ending = self._ending(held)
            return self._run_planned(batch, ending)
        except Unplannable as no:
            no.add_note("step.prepare(batch) with this batch has it, and those that follow, run in eager")
            raise
        except Infeasible as no:
            if held is None:
                raise
            try:
                backward = self._ending({})
                with self._undone():
                    program = self._program_of(self._ask(batch, backward), backward)
                no = self._of_all_parts(no, batch, program, adds=bool(held))
            except Unsupported:  # the code does not run once more: what one part needs is not said of all
                no = no.with_enough(())
            raise no from None

    def _anomalous(self) -> Unplanned | None:
        """Under anomaly detection a step is eager's, whose nodes it looks at; the next one may be planned again."""
        if not torch.is_anomaly_enabled():
            return None
        what = (
            "a training step under torch.autograd.set_detect_anomaly",
            "a planned backward pass is not autograd's",
        )
        if self.settings.strict:
            raise Unsupported(
                *what, "look for the anomaly in eager, or leave out strict=True: such steps then run so"
            )
        note = "under torch.autograd.set_detect_anomaly steps run in eager, where the budget is not kept"
        if note not in self._notes:
            self._notes.append(note)
            level, frame = 1, sys._getframe()
            while frame.f_code.co_filename == __file__ and frame.f_back is not None:
                level, frame = level + 1, frame.f_back
            warnings.warn(note, Fallback, stacklevel=level)
        return Unplanned(Unsupported(*what))

    def _run_unplanned(self, unplanned: Unplanned, batch: Any, *, whole: bool) -> Any:
        check_call()
        static = [t for t in flatten(batch) if isinstance(t, torch.Tensor)]
        static += [p for _, p in self._owned.parameters] + list(self._owned.buffers.values())
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            static += [t for t in state.values() if isinstance(t, torch.Tensor)]
        with unplanned.metered(static):
            out = unplanned.backward(self._loss(batch), self.model, batch)
            if whole and self.optimizer is not None:
                self._between(self._with_gradients(), None)
                self.optimizer.step()
        for _, p in self._owned.parameters if whole else ():
            p.grad = None
        return out

    def _run_planned(self, batch: Any, ending: Ending) -> Any:
        variant, tensors, asked = self._run_code(batch, ending)
        self._check_ranks(variant.program)
        self._steps += 1
        in_hooks = any(op.phase == "update" for op in variant.program.graph.ops)
        optimizer = self.optimizer if in_hooks or not ending.leaves else None
        eager = None
        if self._verify_every and self._steps % self._verify_every == 0:
            eager = run_eager(asked, tensor_leaves(batch), self._owned, optimizer, ending)
        results = variant.executor.run(tensors, consume=True)
        made, parameters = variant.program.gradients, dict(self._owned.parameters)
        count = len(variant.program.results) - len(made)
        for n, g in zip(made, results[count:], strict=True):
            parameters[n].grad = g
        own = results[:count]
        if in_hooks and ending.leaves:
            compat.mark_stepped(self.optimizer)
        if ending.clip is not None and self.loop.clip_norm is not None:
            self.grad_norm = own.pop()
        if eager is not None:
            ours = tensors_by_name(own, parameters, self._owned.buffers, optimizer, random_states())
            if names := differences(eager, ours):
                text = [f"{name} is not bit-identical to eager's" for name in names]
                raise VerificationFailed(text, f"step {self._steps}")
        return asked.results.unflatten(own)

    def _update(self) -> None:
        self._renew()
        if self.optimizer is None:
            raise BadInput("no optimizer: update yourself, or give fit an optimizer", place="step.update")
        variant = None
        if self._unplanned is None:
            names = self._own_updates().names
            gradients = {n: p.grad for n, p in self._owned.parameters if n in names and p.grad is not None}
            check_gradients(gradients)
            variant = self._update_variant(gradients) if gradients else None
        finite = self._between(self._with_gradients(), variant)
        self._added = 0
        if not finite:
            self.skipped += 1
        scaler = self.loop.scaler
        if scaler is not None:
            if finite and self._unplanned is not None:
                scaler.step(self.optimizer)
            elif finite:
                with compat.step_replaced(self.optimizer, lambda: self._run_update(variant)):
                    scaler.step(self.optimizer)
            scaler.update()
        elif finite:
            self._run_update(variant)

    def _with_gradients(self) -> list[torch.Tensor]:
        """Those of the optimizer's parameters that have one."""
        assert self.optimizer is not None
        stepped = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return [p for _, p in self._owned.parameters if id(p) in stepped and p.grad is not None]

    def _run_update(self, variant: Variant | None) -> None:
        assert self.optimizer is not None
        if self._unplanned is not None:
            self.optimizer.step()
        if variant is not None:
            variant.executor.run(variant.binding.tensors(()), consume=True)
            self._ran.add(variant, self._beside)
        compat.mark_stepped(self.optimizer)

    def _between(self, parameters: list[torch.Tensor], variant: Variant | None) -> bool:
        """What is done with gradients before the update; returns whether they are finite, where that is asked."""
        loop = self.loop
        if not parameters or not (loop.clips or loop.skip_nonfinite):
            return True
        kind = allocator.kind_of(str(parameters[0].device))
        meter = allocator.Meter(kind) if allocator.why_not(kind) is None else None
        with meter or nullcontext(), torch.no_grad():
            if loop.scaler is not None:
                loop.scaler.unscale_(self.optimizer)
            self.grad_norm = loop.norm(parameters)
            if loop.skip_nonfinite and self.grad_norm is not None and not torch.isfinite(self.grad_norm):
                return False
            loop.clip(parameters, self.grad_norm)
        if meter is not None and variant is not None:
            self._ran.between = variant.program.graph.static_bytes + self._beside + meter.peak
            if self._limit is not None and self._ran.between > self._limit:
                warnings.warn(
                    f"clipping takes {format_bytes(self._ran.between)}, beyond the budget of "
                    f"{format_bytes(self._limit)}", PeakMismatch, stacklevel=4,
                )  # fmt: skip
        return True

    # --- preparing ---

    def prepare(self, batch: Any) -> Plan | None:
        """Captures and plans for batches like this one, if that has not been done. The code of the step runs, and
        what it changed of the model, of random states and of what it can reach is put back; no op is run.

        Where shapes or control flow follow from what only the step computes, nothing can be planned: from now on
        steps run in eager, exactly and outside the budget, which a `Fallback` says once, and None is returned. With
        ``strict``, and on several ranks, that is refused.
        """
        return self._prepared(self._filled(batch), 3)

    def _prepared(self, batch: Any, level: int) -> Plan | None:
        """``level``: where a warning comes from, in calls from here."""
        if self._unplanned is not None:
            return None
        try:
            return self._prepare(batch)
        except Unplannable as no:
            if self.settings.strict or (compat.world_size() > 1 and not self.independent):
                raise
            self._unplanned = self._in_eager = Unplanned(no)
            self._variants.clear()
            self._arena = None
            note = f"steps run in eager, where the budget is not kept: {no}"
            self._notes.append(note)
            warnings.warn(note, Fallback, stacklevel=level)
            return None

    def _prepare(self, batch: Any) -> Plan:
        stage = self.settings.progress.stage("capturing")
        with self._exclusive(), torch.autograd.set_detect_anomaly(False), stage:
            self._renew()
            if not self._in_parts:
                with self._undone():
                    return self._run_code(batch, self._ending())[0].executor.plan
            self._prepare_parts(batch)
            return self.plan

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """What the code of the step changes is put back."""
        hooks = [hook.fn for hook in self._owned.hooks()]
        with untouched(self.model, [], frozen=False), python_state_kept(self.model, self.loss_fn, *hooks):
            yield

    def _prepare_parts(self, batch: Any) -> None:
        """All that an update takes is planned, from the part that needs most on, of which the budget is a share."""
        ending = self._ending({})
        with self._undone():
            asked = self._ask(batch, ending)
        try:
            if self.loop.accumulate > 1 and asked.program is not None:
                with self._undone():
                    self._run_code(batch, self._ending(gradients_of(asked.program)))
            variant = self._settled(asked, batch, ending)
            if self._updates is not None:
                self._update_variant(gradients_of(variant.program))
        except Infeasible as no:
            program = self._program_of(asked, ending)
            raise self._of_all_parts(no, batch, program, adds=self.loop.accumulate > 1) from None

    def _program_of(self, asked: Asked, ending: Ending) -> Program:
        if asked.program is not None:
            return asked.program
        fitting = self._fitting(ending)
        return next(v.captured for v in fitting if any(t is asked.trace for t in v.traces))

    def _of_all_parts(self, no: Infeasible, batch: Any, backward: Program, *, adds: bool) -> Infeasible:
        """The error of one part of the step, with budgets that are enough for all of them: its backward pass, the
        one that adds to gradients, and the update."""
        programs = [(backward, 0)]
        gradients = gradients_of(backward)
        if adds:
            ending = self._ending(gradients)
            with self._undone():
                programs.append((self._program_of(self._ask(batch, ending), ending), 0))
        if self._updates is not None:
            update = capture_update(self.model, self._updates, gradients)
            programs.append((update, bytes_of_inputs(backward)))
        graphs = [(self._measured(p)[0].graph, beside) for p, beside in programs]
        self._profiled.clear()
        own = next(e for e in no.enough if not e.options)
        least = min(no.enough, key=lambda e: e.nbytes)
        found = [self._enough_for(graphs, e) for e in dict.fromkeys((own, least))]
        return no.with_enough([e for e in found if not e.options or e.nbytes < found[0].nbytes])

    def _enough_for(self, graphs: Sequence[tuple[Graph, int]], enough: Enough) -> Enough:
        """The budget, raised as far as any of the graphs needs, each beside some bytes."""
        limit, planner = enough.nbytes, self.settings.planner
        if enough.options:
            assert isinstance(planner, KeptPlans)
            planner = planner.with_options(dict(enough.options))
        for graph, beside in graphs:
            peak = simulate.replay(graph, simulate.baseline(graph)).peak
            known = isinstance(planner, KeptPlans) and planner.knows(graph, limit - beside)
            if known or peak + beside <= limit:
                continue
            try:
                planner(graph, max(limit - beside, 0))
            except Infeasible as no:
                own = next(e for e in within_unplanned(no, peak).enough if not e.options)
                limit = max(limit, own.nbytes + beside)
        return replace(enough, nbytes=limit)

    def _own_updates(self) -> Updates | SeveralUpdates:
        if self._updates is None:
            self._updates = updaters(self.optimizer, dict(self._owned.parameters))
        return self._updates

    def _ending(self, held: Mapping[str, torch.Tensor] | None = None) -> Ending:
        """What follows the forward pass: the whole step, or, with the gradients that are there already, its backward
        pass, as autograd runs it for every parameter or, if `fit` does the rest, for those of the optimizer."""
        if held is None:
            whole = self._own_updates()
            clip = self.loop.clipped if self.loop.clips else None
            return Ending(whole.names, whole, clip)
        updates = self._updates_if_any()
        if updates is not None and not self._split and (self.loop.in_parts or self.loop.clips):
            wanted = updates.names
        else:
            wanted = tuple(n for n, p in self._owned.parameters if p.requires_grad)
        return Ending(wanted, updates, leaves=True, held={n: g for n, g in held.items() if n in wanted})

    def _updates_if_any(self) -> Updates | SeveralUpdates | None:
        """None without an optimizer, and where a split step's cannot be planned, which is noted once."""
        if self.optimizer is None or self._has_no_update:
            return None
        try:
            return self._own_updates()
        except Unsupported as no:
            if not self._split:
                raise
            self._has_no_update = True
            self._notes.append(f"step.update is not there, and its state is not counted: {no}")
            return None

    def _loss(self, batch: Any) -> Any:
        loss, scaler = loss_function(self.loss_fn, batch), self.loop.scaler
        if scaler is None:
            return loss
        device = next((p.device for _, p in self._owned.parameters), None)
        scaler.scale(torch.zeros((), device=device))  # makes its tensors, which stand-ins cannot be

        def scaled(model: torch.nn.Module, given: Any) -> Any:
            out = loss(model, given)
            return scaler.scale(checked_loss(out)), out

        return scaled

    def _run_code(self, batch: Any, ending: Ending) -> tuple[Variant, list[Any], Asked]:
        """What the code of the step asks for on this batch, the tensors to run it on, and how results go together."""
        asked = self._ask(batch, ending)
        variant = self._settled(asked, batch, ending)
        return variant, variant.binding.tensors(tensor_leaves(batch), asked.constants), asked

    def _ask(self, batch: Any, ending: Ending) -> Asked:
        """What the code of the step asks for on this batch."""
        check_call()
        check_hooks((), self._owned.modules)
        kinds = [TensorLeaf.of(t) for t in tensor_leaves(batch)]
        traces = [t for v in self._fitting(ending) for t in v.traces if t.takes(kinds)]
        with nullcontext() if traces else self.settings.progress.stage("capturing"):
            return run_code(self._owned, self._loss(batch), ending, batch, traces)

    def _fitting(self, ending: Ending) -> list[Variant]:
        modes = self._modes_of(ending)
        return [v for v in self._variants if v.modes == modes]

    def _modes_of(self, ending: Ending) -> tuple[Any, ...]:
        return (ending.part, layouts(ending.held), *self._modes())

    def _settled(self, asked: Asked, batch: Any, ending: Ending) -> Variant:
        """The variant that runs what was asked for."""
        fitting = self._fitting(ending)
        if asked.program is None:
            variant = next(v for v in fitting if any(t is asked.trace for t in v.traces))
            if asked.numbers:
                self._renumber(variant, asked)
        else:
            variant = self._variant_of_same_ops(asked, fitting) or self._new(asked.program, batch, ending)
            variant.remember(asked.trace)
        self._use(variant)
        return variant

    def _variant_of_same_ops(self, asked: Asked, fitting: list[Variant]) -> Variant | None:
        """The variant whose ops are those of the program but for numbers, with the numbers of the program."""
        assert asked.program is not None
        for variant in fitting:
            numbers = other_numbers(variant.captured, asked.program)
            if numbers is not None:
                if numbers:
                    self._change(variant, asked.program, numbers)
                    variant.traces.clear()  # they hold other numbers
                return variant
        return None

    def _renumber(self, variant: Variant, asked: Asked) -> None:
        """The variant with the numbers that its code asked for, for a trace that has them by now."""
        self._change(variant, asked.trace.program, asked.numbers)
        variant.traces = [asked.trace]

    def _change(self, variant: Variant, captured: Program, numbers: dict[int, tuple[Any, ...]]) -> None:
        if variant.split is not None:
            before, now = variant.split.apply(variant.captured), variant.split.apply(captured)
            numbers = other_numbers(before, now) or {}
        renewed = with_numbers_at(variant.program, numbers)
        assert renewed is not None  # recomputations take the numbers of the captured program's
        variant.executor.change_numbers(renewed)
        variant.program, variant.captured = renewed, captured

    def _new(self, program: Program, batch: Any, ending: Ending) -> Variant:
        self._check_new(batch, flatten(batch))
        self._check_ranks(program)
        if ending.part:
            self._resolve_for_parts(program)
        variant = self._variant(program, self._modes_of(ending), part=ending.part)
        self._variants.insert(0, variant)
        return variant

    def _resolve_for_parts(self, program: Program) -> None:
        """A share of what the parts need unplanned: this backward pass, and the update that follows it."""
        budget = self.settings.budget
        if self._limit is not None or budget is None:
            return
        graphs = [self._measured(program)[0].graph]
        beside = bytes_of_inputs(program)
        if self._updates is not None:
            update = capture_update(self.model, self._updates, gradients_of(program))
            graphs.append(self._measured(update)[0].graph)
        peaks = [simulate.replay(g, simulate.baseline(g)).peak for g in graphs]
        peaks[1:] = [p + beside for p in peaks[1:]]
        first = graphs[0]
        held = sum(first.storages[s].size for s in first.static if first.storages[s].kind == "gradient")
        self._limit = budget.resolve(max(peaks), static=first.static_bytes - held)

    @property
    def _beside(self) -> int:
        """Bytes of the batch, which is there while parameters are updated."""
        return bytes_of_inputs(self._latest.program) if self._variants else 0

    def _update_variant(self, gradients: Mapping[str, torch.Tensor]) -> Variant:
        """The planned update of parameters with gradients like these."""
        modes = ("update", layouts(gradients), *self._modes())
        variant = next((v for v in self._variants if v.modes == modes), None)
        if variant is not None and self._limit is not None:
            budget = variant.executor.plan.budget
            if budget is not None and budget + self._beside > self._limit:  # the batch was smaller
                self._variants.remove(variant)
                variant = None
        if variant is None:
            program = capture_update(self.model, self._own_updates(), gradients)
            variant = self._variant(program, modes, part="update", beside=self._beside)
            self._variants.insert(0, variant)
        self._use(variant)
        return variant

    def _check_ranks(self, program: Program) -> None:
        """Raise ``Unsupported`` where ranks would drift apart without a word."""
        ranks = 1 if self.independent else compat.world_size()
        if ranks > 1 and not any(compat.is_collective(call.fn) for call in program.calls):
            raise Unsupported(
                f"a step without a collective on {ranks} ranks", "each rank would train a model of its own",
                f"{DATA_PARALLEL}; where that is what you want (an ensemble), fit(…, independent=True)",
            )  # fmt: skip


def check_call() -> None:
    """Raises ``Unsupported`` where eager's step would do something else than train on gradients from nothing."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        mode = "inference mode" if torch.is_inference_mode_enabled() else "torch.no_grad"
        raise Unsupported(
            f"a training step under {mode}",
            "it needs gradients",
            "call it outside, or evaluate the model itself",
        )


def check_no_gradients(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ``Unsupported`` for gradients that eager would add to, or that would stay."""
    for n, p in parameters:
        if p.grad is not None:
            raise Unsupported(
                f"a training step while {n!r} has a gradient", "a step starts with zero_grad and leaves no gradients",
                "call optimizer.zero_grad() before the step",
            )  # fmt: skip
