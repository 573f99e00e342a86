"""fit: a training step within a budget, as a function of the batch, or as its parts: backward pass and update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, SupportsIndex, Unpack

import torch

from tightship.errors import BadInput, Unsupported
from tightship.execute.cache import KeptPlans, folder_of
from tightship.execute.data_parallel import DataParallel, check_together, is_in_parts
from tightship.execute.part_in_hand import at_work
from tightship.execute.parts import Loop
from tightship.execute.ranks import together
from tightship.execute.settings import Planner, Settings, Silent, Stages
from tightship.execute.stream import is_about
from tightship.execute.train_step import TrainStep
from tightship.frontends.torch import compat_ddp
from tightship.frontends.torch.optimizer.given import Several, as_one
from tightship.frontends.torch.structure import (
    Pad,
)
from tightship.planners.default import (
    ROUNDING,
    STREAM,
    PlanOptions,
    allows_stream,
    divide_allow,
    read_options,
)
from tightship.planners.hints import divide_hints, parse_hints
from tightship.units import Budget, parse_budget, parse_bytes

__all__ = ["fit"]


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
    parallel: DataParallel | None = None,
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
    collective is refused there. ``parallel``: all ranks train this model, each on batches of its own
    (`DataParallel`); a model in ``DistributedDataParallel``, of ``fully_shard`` or of ``parallelize_module`` says by
    itself how ranks train it (hooks of the first two do not run). All ranks call ``fit`` and each step together; one
    that fails ends all (``PeerFailed``).

    With ``accumulate=k`` each call takes one batch, and every k-th updates with the sum of the gradients (divide the
    loss by k, as in eager). ``clip_norm`` and ``clip_value`` clip the gradients of the optimizer's parameters as
    ``clip_grad_norm_`` and ``clip_grad_value_`` of ``torch.nn.utils`` do; ``scaler`` (a ``torch.amp.GradScaler``)
    scales the loss, and unscales, steps and updates; ``skip_nonfinite`` leaves out an update where the norm of the
    gradients is not finite. ``split``: prepare for ``step.backward(batch)`` and ``step.update()``, with anything
    you like between the two; without an optimizer there is ``step.backward`` alone.

    ``pad_to`` says how batches of varying length are filled up to few lengths: each of these is captured and planned
    once, and a step does what eager's does on the batch that ``step.padded(batch)`` gives, bit-identically. The
    largest length that there is is planned here: a percentage is of it. Kinds for all lengths are kept.

    With ``stream`` among the ways of ``allow`` (``"recompute,stream"``) parameters and optimizer state leave memory
    while a step does not need them, to ``folder``: between steps they are there inside of ``with step.gathered():``.
    ``hints="encoder.*=stream,head=resident"``: parameters of these modules, with their state, always do, or never.

    ``progress`` hears which stage preparing is in. The options' ``seconds`` are for measuring and search together.
    ``mode``: ``exact`` runs op by op; ``compiled`` runs what PyTorch Inductor makes of the whole step, within the
    same budget and with Inductor's numbers (`CompiledStep`).

    ``loss_fn`` runs once in every step, as in eager, and once here: what that run changes of Python's state is put
    back. Without ``prepare`` it does not run here, and the first step captures and plans.

    Raises ``Infeasible`` when no plan meets the budget, ``Unsupported`` for what cannot be captured or run
    exactly, ``BadInput`` for arguments that make no sense.
    """
    if mode not in ("exact", "compiled"):
        raise BadInput("mode must be 'exact' or 'compiled'", mode, "fit(mode=…)")
    ranks = None if independent else together(in_parts=is_in_parts(model))
    with at_work(), ranks.ending_together("fit") if ranks is not None else nullcontext():
        if mode == "compiled":
            _check_compiled(planner, options, verify_every, folder, pinned)
        pads = _pads(pad_to)
        settings = _settings(
            budget, planner, options, strict=strict, variants=_kinds(variants, pads), cache=cache,
            seconds_per_op=seconds_per_op, folder=folder, pinned=pinned, progress=progress,
        )  # fmt: skip
        _check_verified(verify_every, settings)
        _check_stream_hints(settings, model)
        loop = Loop(accumulate, clip_norm, clip_value, scaler, skip_nonfinite)
        loop.check()
        one = as_one(optimizer)
        if isinstance(one, Several) and scaler is not None:
            raise Unsupported(
                "a GradScaler with several optimizers", "it skips each of them by itself",
                "leave fit's optimizer out (None), and call scaler.step for each after step.backward",
            )  # fmt: skip
        kind = TrainStep
        if mode == "compiled":
            from tightship.execute.compiled_step import CompiledStep  # here: importing Dynamo takes a second

            kind = CompiledStep
        module, parallel = check_together(
            model, ranks, parallel, settings, loop, one, split=split or optimizer is None
        )
        step = kind(
            module, loss_fn, one, settings, verify_every,
            independent=independent, loop=loop, split=split, pads=pads, ranks=ranks, parallel=parallel,
        )  # fmt: skip
        if prepare:
            step._prepared(step._filled(sample_batch, largest=True), 4)
    if ranks is not None or module is not model:
        for ddp in compat_ddp.ddps_of(model):
            step.take_over_ddp(ddp)
    return step


def _settings(
    budget: Budget | str | SupportsIndex | None, planner: Planner | None, options: PlanOptions, *,
    strict: bool, variants: int, cache: Path | str | None, seconds_per_op: float, folder: Path | str | None,
    pinned: str | SupportsIndex | None, progress: Stages | None,
) -> Settings:  # fmt: skip
    """How the step is measured, planned and run. Raises ``BadInput`` for arguments that make no sense."""
    measuring: dict[str, Any] = {"cache": cache, "seconds_per_op": seconds_per_op, "folder": folder}
    splitting, streams, static = "", False, tuple[tuple[str, bool], ...]()
    if planner is None:
        chosen, splitting = divide_allow(read_options(options, "fit"))
        chosen, streams = allows_stream(chosen)
        rest, static = divide_hints(chosen.hints)
        chosen = replace(chosen, hints=rest)
        if static and not streams:
            rule = f"the hint {static[0][0]!r} is about streaming: add {STREAM} to allow"
            raise BadInput(rule, place="fit(hints=…)")
        planner = KeptPlans(folder_of(cache), chosen)
        measuring["seconds"] = chosen.seconds
    elif options:
        rule = f"unused options {', '.join(options)}: planner= replaces the default planner, whose they are"
        raise BadInput(rule, place="fit")
    wanted = None if budget is None else parse_budget(budget)
    measuring["pinned"] = None if pinned is None else parse_bytes(pinned, "fit(pinned=…)")
    return Settings(
        wanted,
        planner,
        measuring,
        strict,
        variants,
        progress=progress or Silent(),
        split=splitting,
        stream=streams,
        stream_hints=static,
    )


def _kinds(variants: int, pads: tuple[Pad, ...]) -> int:
    """How many kinds of batches are kept: at least as many as there are lengths to fill up to."""
    if variants < 1:
        raise BadInput("no kind of batch would be kept: variants must be at least 1", variants, "fit")
    lengths = math.prod(len(p.lengths) for p in pads if p.lengths is not None) if pads else 0
    return max(variants, min(_PER_LENGTH * lengths, _MOST_KINDS))


def _check_verified(every: int, settings: Settings) -> None:
    """Raises ``BadInput`` where steps cannot be compared with eager's every so often."""
    if every < 0:
        raise BadInput("negative verify_every: it is a number of steps, 0 for never", every, "fit")
    if every and settings.split == ROUNDING:
        rule = f"verify_every compares bits, and allow={ROUNDING} lets sums round otherwise: leave one of them out"
        raise BadInput(rule, place="fit")
    if every and settings.stream:
        rule = "verify_every runs eager beside the step, which needs all in memory at once: leave out allow=stream"
        raise BadInput(rule, place="fit")


def _check_stream_hints(settings: Settings, model: torch.nn.Module) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern, _ in settings.stream_hints:
        if not any(is_about(pattern, name) for name in names):
            near = get_close_matches(pattern, names, 3, 0.3) or names[:3]
            rule = f"unknown module {pattern!r}: no parameter is in one of that name (there are {', '.join(near)})"
            raise BadInput(rule, place="fit(hints=…)")


def _check_compiled(planner: Any, options: PlanOptions, verify_every: int, folder: Any, pinned: Any) -> None:
    """Raises for what compiled mode does not do."""
    place = "fit(mode='compiled')"
    if planner is not None:
        raise BadInput(
            "planner= goes with exact mode: compiled code is planned by the default planner", place=place
        )
    if verify_every:
        raise BadInput(
            "verify_every compares with eager's bits, and compiled code has Inductor's: leave it out, or use "
            'mode="exact"', verify_every, place,
        )  # fmt: skip
    ways = {way.strip() for way in options.get("allow", "").split(",")} - {"", "recompute", "redraw"}
    ways |= {way for _, way in parse_hints(options.get("hints", ""))} - {"keep", "recompute"}
    if ways or options.get("lossy") or folder is not None or pinned is not None:
        means = next(iter(sorted(ways)), "lossy" if options.get("lossy") else "offload")
        raise BadInput(f'{means!r} goes with mode="exact": compiled code computes again', place=place)


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
