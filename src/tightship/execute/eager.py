"""Eager's step beside a planned one (what it leaves behind, by name, and whether two such are bit-identical), and in
the place of one, where nothing can be planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from tightship.execute import allocator
from tightship.frontends.torch import compat, compat_calls, compat_capture, compat_optimizers
from tightship.frontends.torch.capture.incremental import Ending
from tightship.frontends.torch.collectives import average_now
from tightship.frontends.torch.optimizer.copy import random_untouched
from tightship.frontends.torch.optimizer.given import each, twin_of
from tightship.frontends.torch.program import tensors_in
from tightship.frontends.torch.python_state import python_state_kept
from tightship.frontends.torch.rerun.arguments import map_tensors
from tightship.frontends.torch.rerun.execution import Inner
from tightship.frontends.torch.rerun.function_trace import FunctionTrace
from tightship.frontends.torch.rerun.live_step import Asked, Owned
from tightship.frontends.torch.structure import LossFn, checked_loss, map_leaves
from tightship.graph import aligned, alignment_of

__all__ = ["Unplanned", "bit_identical", "differences", "random_states", "run_eager", "tensors_by_name"]


class Unplanned:
    """Steps in eager, and how much memory they take; ``why`` nothing can be planned."""

    def __init__(self, why: Exception) -> None:
        self.why = why
        self.static = 0
        self.peak: int | None = None

    def backward(self, loss_fn: LossFn, model: torch.nn.Module, batch: Any) -> Any:
        """What ``loss_fn`` returns, without a graph; gradients are left in ``p.grad``."""
        out = loss_fn(model, batch)
        checked_loss(out).backward()  # type: ignore[no-untyped-call]
        return map_leaves(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, out)

    @contextmanager
    def metered(self, static: Iterable[torch.Tensor]) -> Iterator[None]:
        """Measures a step that begins with the tensors ``static``."""
        homes = {compat.storage_key(t): t for t in static if t.layout is torch.strided}
        kinds = {allocator.kind_of(str(t.device)) for t in homes.values()}
        self.static = sum(
            aligned(t.untyped_storage().nbytes(), alignment_of(str(t.device))) for t in homes.values()
        )
        kind = kinds.pop() if len(kinds) == 1 else ""
        meter = allocator.Meter(kind) if kind and allocator.why_not(kind) is None else None
        with meter or nullcontext():
            yield
        self.peak = None if meter is None else self.static + meter.peak

    def measure(self, budget: int | None) -> dict[str, int | None]:
        return {
            "budget": budget, "static": self.static, "arena": 0, "reserved": 0, "unplanned_peak": self.peak,
            "planned_peak": None, "measured_peak": self.peak, "process_peak": self.peak, "outside": None,
            "misses": None,
        }  # fmt: skip


def run_eager(
    asked: Asked, leaves: Sequence[object], owned: Owned, optimizer: torch.optim.Optimizer | None, ending: Ending
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What eager's step leaves behind, by name: the calls that ``asked`` of a step, the backward pass, ``ending``'s
    clipping and, if there is an ``optimizer``, its step, run on copies of everything; ``leaves`` are the batch's.
    Where it ends with that pass, it leaves gradients. Needs the bytes of an eager step beside the plan's.
    """
    trace = asked.trace
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
    known |= {n: asked.bound.get(n, trace.tensors[n]).detach().clone() for n in trace.constants}
    hooks = [c.args[1] for c in trace.calls if c.kind == "hook"]
    twin = None
    if optimizer is not None:
        twin = twin_of(optimizer, {id(p): parameters[n] for n, p in owned.parameters})
    if ending.leaves:
        for n, p in owned.parameters:
            parameters[n].grad = None if p.grad is None else p.grad.detach().clone()
    drawing = ExitStack()
    drawing.enter_context(random_untouched())  # the optimizer may draw Python's or NumPy's numbers
    try:
        _run_calls(
            trace, known, lambda: compat_capture.reparametrized(owned.model, {**parameters, **buffers})
        )
        inside = compat_capture.inside_backward(lambda: Inner(trace, known))
        handed_back = (*trace.results, *trace.kept)
        results = [known[n] for n in handed_back if n >= 0 and n not in trace.constants]
        with _stepping_twins(optimizer, twin), python_state_kept(*(h.fn for h in hooks)), inside:
            torch.autograd.backward(results[0], inputs=[parameters[n] for n in ending.wanted])
        buffers |= _replaced(trace, known, {id(b): n for n, b in owned.buffers.items()})
        for names in ending.averaged:
            assert ending.among is not None
            average_now([g for n in names if (g := parameters[n].grad) is not None], ending.among)
        if not ending.leaves and ending.clip is not None:
            ending.clip({n: p for n, p in parameters.items() if p.grad is not None})
        if not ending.leaves and twin is not None:
            compat_optimizers.plain_step(type(twin))(twin)
            twin.zero_grad()
        return tensors_by_name([r.detach() for r in results], parameters, buffers, twin, random_states())
    finally:
        for hook in hooks:
            hook.remove()
        drawing.close()


def _run_calls(
    trace: FunctionTrace, known: dict[int, torch.Tensor], swapped: Callable[[], AbstractContextManager[None]]
) -> None:
    """``swapped`` puts the copies into the model, for scripted code."""
    states = compat_capture.States()
    others = [c for c in trace.program.constants if id(c) not in trace.index]  # which hooks reach
    copies = {id(c): c.detach().clone() for c in others}
    with compat_capture.python_for_stand_ins(has_data=True), states.kept():
        for call in trace.calls:
            states.set(call.state)
            if call.kind == "now" and isinstance(call.func, compat_calls.Special):
                call.func(*call.args, **call.kwargs)
            if call.kind == "hook":
                parameter, hook = call.args
                hook.register(known[trace.index[id(parameter)]], trace, known, copies)
            if call.kind != "op":
                continue
            args = map_tensors(lambda t: known[trace.index[id(t)]], (call.args, call.kwargs))
            with ExitStack() as inside:
                if isinstance(call.func, compat_calls.Special):
                    inside.enter_context(swapped() if call.func.is_scripted else nullcontext())
                    inside.enter_context(Inner(trace, known).with_transforms())
                answer = call.func(*args[0], **args[1])
            for t, seen in zip(tensors_in(answer), tensors_in(call.answer), strict=True):
                known[trace.index[id(seen)]] = t


@contextmanager
def _stepping_twins(optimizer: Any, twin: Any) -> Iterator[None]:
    """Hooks on parameters that step an optimizer step its copy."""
    with ExitStack() as stack:
        for own, copy in zip(each(optimizer), each(twin), strict=True) if twin is not None else ():
            step = partial(compat_optimizers.plain_step(type(copy)), copy)
            stack.enter_context(compat_optimizers.step_replaced(own, step))
        yield


def _replaced(
    trace: FunctionTrace, known: dict[int, torch.Tensor], names: Mapping[int, str]
) -> dict[str, torch.Tensor]:
    """What stands in the places of buffers, by name; ``names`` by id."""
    pairs = [c.args for c in trace.calls if c.kind == "last"]
    return {names[id(buffer)]: known[trace.index[id(now)]].detach() for buffer, now in pairs}


def _parameter_copy(parameter: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)


def tensors_by_name(
    results: Sequence[torch.Tensor], parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer | None, states: Sequence[torch.Tensor],
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What training leaves behind: results, model, gradients, optimizer state, torch's random states."""
    tensors = {f"result {k}": r for k, r in enumerate(results)}
    tensors |= {f"parameter {n!r}": p for n, p in parameters.items()}
    tensors |= {f"gradient of {n!r}": p.grad for n, p in parameters.items() if p.grad is not None}
    tensors |= {f"buffer {n!r}": b for n, b in buffers.items()}
    names = {id(p): n for n, p in parameters.items()}
    for one in each(optimizer) if optimizer is not None else ():
        for p, state in one.state.items():
            for k, t in state.items() if isinstance(state, dict) else ():
                if isinstance(t, torch.Tensor):
                    tensors[f"{type(one).__name__}'s state {k!r} of {names.get(id(p), '?')!r}"] = t
    return tensors | {f"torch's random state {k}": s for k, s in enumerate(states)}


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


def random_states() -> tuple[torch.Tensor, ...]:
    states = [torch.get_rng_state()]
    return (*states, *torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else tuple(states)
