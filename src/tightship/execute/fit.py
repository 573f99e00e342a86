"""fit: a training step within a budget, as a function of the batch; and the same step in eager, to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, SupportsIndex, Unpack

import torch

from tightship.errors import BadInput, Unsupported, VerificationFailed
from tightship.execute.cache import KeptPlans, folder_of
from tightship.execute.prepared import Planner, Prepared, Settings, Variant
from tightship.frontends.torch import compat, compat_capture
from tightship.frontends.torch.capture.state_restore import untouched
from tightship.frontends.torch.capture.step import DATA_PARALLEL, check_hooks, check_model
from tightship.frontends.torch.optimizer.updates import Updates, updaters
from tightship.frontends.torch.program import Program, tensors_in
from tightship.frontends.torch.rerun.function_trace import FunctionTrace, Inner, map_tensors
from tightship.frontends.torch.rerun.live_step import Asked, Owned, run_code
from tightship.frontends.torch.rerun.numbers import other_numbers, with_numbers_at
from tightship.frontends.torch.rerun.python_state import python_state_kept
from tightship.frontends.torch.structure import flatten, loss_function
from tightship.plan import Plan
from tightship.planners.default import PlanOptions, read_options
from tightship.units import Budget, parse_budget, parse_bytes

__all__ = ["TrainStep", "bit_identical", "differences", "fit", "tensors_by_name"]


def fit(
    model: torch.nn.Module,
    loss_fn: Any,
    optimizer: torch.optim.Optimizer,
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
    **options: Unpack[PlanOptions],
) -> TrainStep:
    """A training step of ``model`` that stays within ``budget``.

    ``step = fit(model, loss_fn, optimizer, batch, "60%")`` and then ``loss = step(batch)`` do what
    ``optimizer.zero_grad(); loss = loss_fn(model, batch); loss.backward(); optimizer.step()`` does, bit-identically,
    in the caller's own model and optimizer. ``loss_fn`` and batches are as `capture_step` takes them.

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
        raise BadInput("no kind of batch would be kept: variants must be at least 1", variants, "fit")
    if planner is None:
        planner = KeptPlans(folder_of(cache), read_options(options, "fit"))
    elif options:
        rule = f"unused options {', '.join(options)}: planner= replaces the default planner, whose they are"
        raise BadInput(rule, place="fit")
    wanted = None if budget is None else parse_budget(budget)
    most = None if pinned is None else parse_bytes(pinned, "fit(pinned=…)")
    measuring = {"cache": cache, "seconds_per_op": seconds_per_op, "folder": folder, "pinned": most}
    settings = Settings(wanted, planner, measuring, strict, variants)
    if verify_every < 0:
        raise BadInput("negative verify_every: it is a number of steps, 0 for never", verify_every, "fit")
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

    def _on_replaced(self) -> None:
        self._owned, self._updates = Owned(self.model), None

    def __call__(self, batch: Any) -> Any:
        with self._exclusive():
            check_no_gradients(self._owned.parameters)
            variant, tensors, asked = self._run_code(batch)
            self._check_ranks(variant.program)
            self._steps += 1
            if self._verify_every and self._steps % self._verify_every == 0:
                results = self._run_verified(variant, tensors, asked, flatten(batch))
            else:
                results = variant.executor.run(tensors)
            compat.mark_stepped(self.optimizer)
            return asked.results.unflatten(results)

    def _run_verified(
        self, variant: Variant, tensors: list[Any], asked: Asked, leaves: list[Any]
    ) -> list[Any]:
        """The step's results, compared with eager's, which runs first."""
        owned, optimizer = self._owned, self.optimizer
        eager = run_eager(asked.trace, asked.bound, leaves, owned, optimizer)
        results = variant.executor.run(tensors)
        ours = tensors_by_name(results, dict(owned.parameters), owned.buffers, optimizer, _random_states())
        if names := differences(eager, ours):
            text = [f"{name} is not bit-identical to eager's" for name in names]
            raise VerificationFailed(text, f"step {self._steps}")
        return results

    def prepare(self, batch: Any) -> Plan:
        """Captures and plans for batches like this one, if that has not been done. The code of the step runs once,
        and what it changed of the model, of random states and of what it can reach is put back; no op is run."""
        with (
            self._exclusive(),
            untouched(self.model, [], frozen=False),
            python_state_kept(self.model, self.loss_fn),
        ):
            return self._run_code(batch)[0].executor.plan

    def _run_code(self, batch: Any) -> tuple[Variant, list[Any], Asked]:
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
            variant = self._variant_of_same_ops(asked, fitting) or self._new(asked.program, batch, modes)
            variant.remember(asked.trace)
        self._use(variant)
        return variant, variant.binding.tensors(leaves, asked.constants), asked

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


# --- eager's step ---


def run_eager(
    trace: FunctionTrace, bound: Mapping[int, torch.Tensor], leaves: Sequence[Any], owned: Owned,
    optimizer: torch.optim.Optimizer,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What eager's step leaves behind, by name: the calls of ``trace``, then the backward pass and the optimizer's
    step, run on copies of everything; ``bound`` are this step's constants, ``leaves`` the batch's. Needs the bytes of
    an eager step beside the plan's.
    """
    states = _random_states()
    parameters = {n: _parameter_copy(p) for n, p in owned.parameters}
    buffers = {n: b.detach().clone() for n, b in owned.buffers.items()}
    known: dict[int, torch.Tensor] = {}
    own = [(p, parameters[n]) for n, p in owned.parameters] + [
        (b, buffers[n]) for n, b in owned.buffers.items()
    ]
    known |= {trace.index[id(t)]: c for t, c in own}
    batch = [
        x.detach().clone().requires_grad_(x.requires_grad) for x in leaves if isinstance(x, torch.Tensor)
    ]
    known |= dict(zip(range(trace.leaves, trace.inputs), batch, strict=True))
    known |= {n: bound.get(n, trace.tensors[n]).detach().clone() for n in trace.constants}
    twin = copy.deepcopy(optimizer, {id(p): parameters[n] for n, p in owned.parameters})
    try:
        _run_calls(
            trace, known, lambda: compat_capture.reparametrized(owned.model, {**parameters, **buffers})
        )
        results = [known[n] for n in trace.results if n >= 0 and n not in trace.constants]
        results[0].backward()
        compat.plain_step(type(optimizer))(twin)
        return tensors_by_name([r.detach() for r in results], parameters, buffers, twin, _random_states())
    finally:
        _restore_random_states(states)


def _run_calls(
    trace: FunctionTrace, known: dict[int, torch.Tensor], swapped: Callable[[], AbstractContextManager[None]]
) -> None:
    """``swapped`` puts the copies into the model, for scripted code."""
    states = compat_capture.States()
    with compat_capture.python_for_stand_ins(has_data=True), states.kept():
        for call in trace.calls:
            states.set(call.state)
            if call.kind == "now" and isinstance(call.func, compat_capture.Special):
                call.func(*call.args, **call.kwargs)
            if call.kind != "op":
                continue
            args = map_tensors(lambda t: known[trace.index[id(t)]], (call.args, call.kwargs))
            with ExitStack() as inside:
                if isinstance(call.func, compat_capture.Special):
                    inside.enter_context(swapped() if call.func.is_scripted else nullcontext())
                    inside.enter_context(Inner(trace, known))
                answer = call.func(*args[0], **args[1])
            for t, seen in zip(tensors_in(answer), tensors_in(call.answer), strict=True):
                known[trace.index[id(seen)]] = t


def _parameter_copy(parameter: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)


def tensors_by_name(
    results: Sequence[torch.Tensor], parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer, random_states: Sequence[torch.Tensor],
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What training leaves behind: results, model, optimizer state, torch's random states."""
    tensors = {f"result {k}": r for k, r in enumerate(results)}
    tensors |= {f"parameter {n!r}": p for n, p in parameters.items()}
    tensors |= {f"buffer {n!r}": b for n, b in buffers.items()}
    names = {id(p): n for n, p in parameters.items()}
    for p, state in optimizer.state.items():
        for k, t in state.items() if isinstance(state, dict) else ():
            if isinstance(t, torch.Tensor):
                tensors[f"optimizer state {k!r} of {names.get(id(p), '?')!r}"] = t
    return tensors | {f"torch's random state {k}": s for k, s in enumerate(random_states)}


def differences(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of what is not in both, bit-identical."""
    names = dict.fromkeys((*a, *b))
    return [n for n in names if n not in a or n not in b or not bit_identical(a[n], b[n])]


def bit_identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    x, y = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(x, y)


def _random_states() -> tuple[torch.Tensor, ...]:
    states = [torch.get_rng_state()]
    return (*states, *torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else tuple(states)


def _restore_random_states(states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(list(states[1:]))
