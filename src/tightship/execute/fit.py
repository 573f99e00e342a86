"""fit: a training step within a budget, as a function of the batch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch

from tightship.diagnose.remedies import advised
from tightship.errors import BadInput, Unsupported, VerificationFailed
from tightship.execute.eager_check import expected
from tightship.execute.prepared import Planner, Prepared, Settings, Variant
from tightship.frontends.torch import compat
from tightship.frontends.torch.live_step import Asked, Owned, run_code
from tightship.frontends.torch.loss import loss_function
from tightship.frontends.torch.numbers import other_numbers, with_numbers_at
from tightship.frontends.torch.optim import Updates, updaters
from tightship.frontends.torch.program import Program
from tightship.frontends.torch.python_state import python_state_kept
from tightship.frontends.torch.state_restore import untouched
from tightship.frontends.torch.step import DATA_PARALLEL, check_hooks, check_model
from tightship.frontends.torch.structure import flatten
from tightship.plan import Plan
from tightship.planners.default import PlanOptions, read_options
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
    prepare: bool = True,
    verify_every: int = 0,
    independent: bool = False,
    **options: Unpack[PlanOptions],
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

    ``loss_fn`` runs once in every step, as in eager, and once here: what that run changes of Python's state is put
    back. Without ``prepare`` it does not run here, and the first step captures and plans.

    Raises ``Infeasible`` when no plan meets the budget, ``Unsupported`` for what cannot be captured or run
    exactly, ``BadInput`` for arguments that make no sense.
    """
    if variants < 1:
        raise BadInput("at least one kind of batch is kept", variants, "fit(variants=…)")
    if planner is None:
        chosen = read_options(options, "fit")
        planner = partial(advised, options=chosen)
    elif options:
        raise BadInput(
            f"unused options {', '.join(options)}: they are those of the default planner, but planner= replaces it",
            place="fit",
        )
    wanted = None if budget is None else parse_budget(budget)
    most = None if pinned is None else parse_bytes(pinned, "fit(pinned=…)")
    measuring = {"cache": cache, "seconds_per_op": seconds_per_op, "folder": folder, "pinned": most}
    settings = Settings(wanted, planner, measuring, strict, variants)
    if verify_every < 0:
        raise BadInput("verify_every is a number of steps, 0 for never", verify_every, "fit(verify_every=…)")
    step = TrainStep(model, loss_fn, optimizer, settings, verify_every, independent=independent)
    if prepare:
        step.prepare(sample_batch)
    return step


class TrainStep(Prepared):
    """Made by `fit`. ``step(batch)`` trains on a batch and returns the loss, or (loss, what came with it).

    ``loss_fn`` runs once in every step, as in eager and with its side effects, on stand-ins for tensors that compute
    nothing; what it asks for is compared with what was captured. Numbers that have changed are taken over, anything
    else is captured and planned as a kind of its own; the latest kinds are kept, as `Prepared` says.

    Gradients are not left in ``p.grad``, and one that is there is refused, as are hooks on parameters and backward
    hooks of modules. One thread at a time: a call while another is running raises ``Unsupported``. If a step raises,
    the parameters whose update had run are updated and the others are not (running statistics and random state
    likewise): load a checkpoint, or go on.
    """

    optimizer: torch.optim.Optimizer

    def __init__(
        self, model: torch.nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, settings: Settings,
        verify_every: int = 0, *, independent: bool = False,
    ) -> None:  # fmt: skip
        check_model(model)
        super().__init__(model, optimizer, settings)
        self.loss_fn, self.independent = loss_fn, independent
        self._owned = Owned(model)
        self._updates: Updates | None = None
        self._verify_every, self._steps = verify_every, 0

    def _renewed(self) -> None:
        self._owned, self._updates = Owned(self.model), None

    def __call__(self, batch: Any) -> Any:
        with self._alone():
            check_no_gradients(self._owned.parameters)
            variant, tensors, asked = self._asked(batch)
            self._check_ranks(variant.program)
            self._steps += 1
            if self._verify_every and self._steps % self._verify_every == 0:
                done = self._verified(variant, tensors, asked, flatten(batch))
            else:
                done = variant.executor.run(tensors)
            compat.mark_stepped(self.optimizer)
            return asked.results.unflatten(done)

    def _verified(self, variant: Variant, tensors: list[Any], asked: Asked, leaves: list[Any]) -> list[Any]:
        """The step's results, compared with eager's, which runs first."""
        eager = expected(asked.trace, asked.bound, leaves, self._owned, self.optimizer)
        done = variant.executor.run(tensors)
        wrong = eager.differences(done, self._owned, self.optimizer)
        if wrong:
            raise VerificationFailed(
                [f"{w} is not bit-identical to eager's" for w in wrong], f"step {self._steps}"
            )
        return done

    def prepare(self, batch: Any) -> Plan:
        """Captures and plans for batches like this one, if that has not been done. The code of the step runs once,
        and what it changed of the model, of random states and of what it can reach is put back; no op is run."""
        with (
            self._alone(),
            untouched(self.model, [], frozen=False),
            python_state_kept(self.model, self.loss_fn),
        ):
            return self._asked(batch)[0].executor.plan

    def _asked(self, batch: Any) -> tuple[Variant, list[Any], Asked]:
        """What the code of the step asks for on this batch, the tensors to run it on, and how results go together."""
        self._renew()
        check_call()
        check_hooks(self._owned.parameters, self._owned.modules)
        if self._updates is None:
            self._updates = updaters(self.optimizer, dict(self._owned.parameters))
        leaves, modes = flatten(batch), self._modes()
        fitting = [v for v in self._variants if v.modes == modes]
        traces = {
            id(t): (t, v)
            for v in fitting
            for t in v.traces
            if t.batch.misfit(batch, leaves, plain=False) is None
        }
        loss = loss_function(self.loss_fn, batch)
        asked = run_code(self._owned, loss, self._updates, batch, [t for t, _ in traces.values()])
        if asked.program is None:
            variant = traces[id(asked.trace)][1]
            if asked.numbers:
                self._renumber(variant, asked)
        else:
            variant = self._taken_over(asked, fitting) or self._new(asked.program, batch, modes)
            variant.remember(asked.trace)
        self._use(variant)
        return variant, variant.binding.tensors(leaves, asked.constants), asked

    def _taken_over(self, asked: Asked, fitting: list[Variant]) -> Variant | None:
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
        renewed = with_numbers_at(variant.program, numbers)
        assert renewed is not None  # recomputations take the numbers of the captured program's
        variant.executor.change_numbers(renewed)
        variant.program, variant.captured = renewed, captured

    def _new(self, program: Program, batch: Any, modes: tuple[Any, ...]) -> Variant:
        self._check_new(batch, flatten(batch))
        self._check_ranks(program)
        variant = self._variant(program, modes)
        self._variants.insert(0, variant)
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
