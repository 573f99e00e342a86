"""Numbers among a torch function's arguments, and what its ops and their backward ops make of them.

A schedule changes a number in every step. The ops that follow from one call are found by making that call alone, on
fake tensors like its arguments, with its backward pass: once with the captured numbers and once with the new ones.
That is believed only if the former gives the very numbers that were captured for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from tightship.errors import TightshipError
from tightship.frontends.torch import compat, compat_capture
from tightship.frontends.torch.function_trace import ExecutionState, FunctionTrace, map_tensors, tensors_in
from tightship.frontends.torch.origin import Tracker
from tightship.frontends.torch.program import Call, Program
from tightship.frontends.torch.record import Recorder
from tightship.frontends.torch.tape import Tape

__all__ = ["renumbered"]

Made = tuple[str, tuple[Any, ...]]
"""An op's name and the numbers among its arguments, in order."""


def renumbered(
    program: Program, trace: FunctionTrace,
    changed: Mapping[int, tuple[Any, tuple[Any, ...], dict[str, Any]]], number: Callable[[torch.Tensor], int],
) -> Program | None:  # fmt: skip
    """``program``, which was captured with ``trace``, as it is when the functions ``changed`` (by index of their call)
    get those arguments instead; None where the calls alone do not tell. ``number`` numbers their tensors."""
    calls, replays = list(program.calls), dict(program.replays)
    for k, (func, args, kwargs) in changed.items():
        known = trace.calls[k]
        before = _alone(known.state, known.func, (known.args, known.kwargs), lambda t: t)
        after = _alone(known.state, func, (args, kwargs), lambda t: trace.tensors[number(t)])
        becomes = _pairs(before, after)
        if becomes is None:
            return None
        for i, asked in enumerate(program.asked):
            numbers = _numbers(calls[i]) if asked == k else ()
            if not numbers:
                continue
            new = becomes.get((program.graph.ops[i].target, numbers))
            if new is None or (i in replays and len(_numbers(replays[i])) != len(new)):
                return None
            calls[i] = _with(calls[i], new)
            if i in replays:
                replays[i] = _with(replays[i], new)
    return replace(program, calls=tuple(calls), replays=replays)


def _alone(
    state: ExecutionState, func: Any, given: Any, like: Callable[[torch.Tensor], torch.Tensor]
) -> list[Made] | None:
    """The ops of one call and of its backward pass; None if it cannot be made alone. ``like`` says what its tensors
    look like."""
    tape, mode, states = Tape(), compat.fake_mode(), compat_capture.States()
    recorder = Recorder(tape, mode, Tracker({}))
    made: dict[int, torch.Tensor] = {}
    leaves: list[torch.Tensor] = []

    def stand_in(t: torch.Tensor) -> torch.Tensor:
        known = like(t)
        if id(known) not in made:
            with mode, torch.inference_mode(False), torch.enable_grad():
                fresh = torch.empty_strided(
                    known.shape, known.stride(), dtype=known.dtype, device=known.device
                )
                if known.requires_grad:
                    leaves.append(fresh.requires_grad_())
                    fresh = fresh.clone()  # no leaf, which could not be written in place
            made[id(known)] = fresh
        return made[id(known)]

    try:
        with compat_capture.quiet_engine(), states.kept():
            args, kwargs = map_tensors(stand_in, given)
            states.set(state)
            with mode, recorder:
                out = func(*args, **kwargs)
                wanted = [t for t in tensors_in(out) if t.requires_grad]
                if wanted and leaves:
                    with recorder.in_phase("backward"):
                        torch.autograd.grad(
                            wanted, leaves, [torch.empty_like(t) for t in wanted], allow_unused=True
                        )
    except (TightshipError, RuntimeError, NotImplementedError):
        return None
    return [(r.target, tuple(_numbers_in((r.args, r.kwargs)))) for r in tape.records]


def _pairs(before: list[Made] | None, after: list[Made] | None) -> dict[Made, tuple[Any, ...]] | None:
    """What numbers become, by op and number; None where two like ones become different ones."""
    if before is None or after is None or [t for t, _ in before] != [t for t, _ in after]:
        return None
    becomes: dict[Made, tuple[Any, ...]] = {}
    for known, (_, numbers) in zip(before, after, strict=True):
        if len(known[1]) != len(numbers) or becomes.setdefault(known, numbers) != numbers:
            return None
    return becomes


def _with(call: Call, numbers: tuple[Any, ...]) -> Call:
    given = iter(numbers)

    def walk(tree: Any) -> Any:
        if type(tree) in _NUMBERS:
            return next(given)
        if isinstance(tree, (list, tuple)):
            return type(tree)(walk(x) for x in tree)
        return {k: walk(x) for k, x in tree.items()} if isinstance(tree, dict) else tree

    return replace(call, args=walk(call.args), kwargs=walk(call.kwargs))


_NUMBERS = (int, float, complex)


def _numbers(call: Call) -> tuple[Any, ...]:
    return tuple(_numbers_in((call.args, call.kwargs)))


def _numbers_in(tree: Any) -> Iterator[Any]:
    if type(tree) in _NUMBERS:
        yield tree
    elif isinstance(tree, (list, tuple)):
        for x in tree:
            yield from _numbers_in(x)
    elif isinstance(tree, dict):
        for x in tree.values():
            yield from _numbers_in(x)
