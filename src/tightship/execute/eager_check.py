"""A step compared with eager's: what the step's code asked for, run by autograd and the optimizer on copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from tightship.frontends.torch import compat, compat_capture
from tightship.frontends.torch.program import tensors_in
from tightship.frontends.torch.rerun.function_trace import FunctionTrace, Inner, map_tensors
from tightship.frontends.torch.rerun.live_step import Owned

__all__ = ["Expected", "expected"]


@dataclass(frozen=True)
class Expected:
    """What eager's step would leave behind: results by position, tensors of model and optimizer by name."""

    results: tuple[torch.Tensor, ...]
    tensors: dict[str, torch.Tensor]
    random: tuple[torch.Tensor, ...]

    def differences(
        self, results: Sequence[torch.Tensor], owned: Owned, optimizer: torch.optim.Optimizer
    ) -> list[str]:
        """Names of what is not bit-identical now."""
        wrong = [
            f"result {k}"
            for k, (a, b) in enumerate(zip(self.results, results, strict=True))
            if not _same(a, b)
        ]
        now = dict(_named(dict(owned.parameters), owned.buffers, optimizer))
        for name in dict.fromkeys((*self.tensors, *now)):
            a, b = self.tensors.get(name), now.get(name)
            if a is None or b is None or not _same(a, b):
                wrong.append(name)
        states = zip(self.random, _random(), strict=True)
        return wrong + [
            f"torch's random state {k}" for k, (a, b) in enumerate(states) if not torch.equal(a, b)
        ]


def expected(
    trace: FunctionTrace, bound: Mapping[int, torch.Tensor], leaves: Sequence[Any], owned: Owned,
    optimizer: torch.optim.Optimizer,
) -> Expected:  # fmt: skip
    """Run the calls of ``trace`` in eager, then the backward pass and the optimizer's step, on copies of everything;
    ``bound`` are this step's constants, ``leaves`` the batch's. Needs the bytes of an eager step beside the plan's.
    """
    random = _random()
    parameters = {n: _copy(p) for n, p in owned.parameters}
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
        _run(trace, known, lambda: compat_capture.reparametrized(owned.model, {**parameters, **buffers}))
        results = [known[n] for n in trace.results if n >= 0 and n not in trace.constants]
        results[0].backward()
        compat.plain_step(type(optimizer))(twin)
        tensors = dict(_named(parameters, buffers, twin))
        return Expected(tuple(r.detach() for r in results), tensors, _random())
    finally:
        _set_random(random)


def _run(
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


def _copy(parameter: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)


def _named(
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((f"parameter {n!r}", p) for n, p in parameters.items())
    yield from ((f"buffer {n!r}", b) for n, b in buffers.items())
    names = {id(p): n for n, p in parameters.items()}
    for p, state in optimizer.state.items():
        for k, t in state.items() if isinstance(state, dict) else ():
            if isinstance(t, torch.Tensor):
                yield f"optimizer state {k!r} of {names.get(id(p), '?')!r}", t


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if a.dtype.is_floating_point or a.dtype.is_complex:
        return torch.equal(
            a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
        )
    return torch.equal(a, b)


def _random() -> tuple[torch.Tensor, ...]:
    states = [torch.get_rng_state()]
    return (*states, *torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else tuple(states)


def _set_random(states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(list(states[1:]))
