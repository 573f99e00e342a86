"""Numbers among a torch function's arguments, and what its ops and their backward ops make of them.

A schedule changes a number in every step. The ops that follow from one call are found by making that call alone, on
fake tensors like its arguments, with its backward pass: once with the captured numbers and once with the new ones.
That is believed only if the former gives the very numbers that were captured for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tightship.errors import TightshipError
from tightship.frontends.torch import compat, compat_calls, compat_capture
from tightship.frontends.torch.capture.recorder import Recorder
from tightship.frontends.torch.capture.tape import Tape, Tracker
from tightship.frontends.torch.program import Call, Program, leaves_in, map_tree, tensors_in
from tightship.frontends.torch.rerun.arguments import map_tensors
from tightship.frontends.torch.rerun.function_trace import ExecutionState, FunctionCall, FunctionTrace, form

__all__ = ["Renumbering", "numbers_of", "with_numbers_at"]


Made = tuple[str, tuple[Any, ...]]
"""An op's name and the numbers among its arguments, in order."""


class Alone(NamedTuple):
    """What a call makes alone: its ops, and all that numbers must not change, the looks of tensors and answers."""

    ops: list[Made]
    looks: Any


class Renumbering:
    """Finds the numbers of a trace's program; remembers what calls that are alike have made of theirs."""

    def __init__(self) -> None:
        self._made: dict[Any, Alone | None] = {}

    def looks_alike(
        self, trace: FunctionTrace, call: FunctionCall, args: tuple[Any, ...], kwargs: dict[str, Any],
        number: Callable[[torch.Tensor], int],
    ) -> bool:  # fmt: skip
        """Whether a call of ``trace`` gives an answer that looks the same with other numbers among its arguments, by
        the same ops. ``number`` numbers the tensors among them."""
        before = self._alone(call.state, call.func, (call.args, call.kwargs), lambda t: t)
        after = self._alone(call.state, call.func, (args, kwargs), lambda t: trace.tensors[number(t)])
        return _pairs(before, after) is not None

    def changes(
        self, program: Program, trace: FunctionTrace,
        changed: Mapping[int, tuple[Any, tuple[Any, ...], dict[str, Any]]], number: Callable[[torch.Tensor], int],
    ) -> dict[int, tuple[Any, ...]] | None:  # fmt: skip
        """The new numbers of the ops of ``program``, captured with ``trace``, when the functions ``changed`` (by
        index of their call) get those arguments instead; None where the calls alone do not tell. ``number`` numbers
        their tensors."""
        of_call: dict[int, list[int]] = {}
        for i, asked in enumerate(program.asked):
            of_call.setdefault(asked, []).append(i)
        found: dict[int, tuple[Any, ...]] = {}
        for k, (func, args, kwargs) in changed.items():
            known = trace.calls[k]
            before = self._alone(known.state, known.func, (known.args, known.kwargs), lambda t: t)
            after = self._alone(known.state, func, (args, kwargs), lambda t: trace.tensors[number(t)])
            becomes = _pairs(before, after)
            if becomes is None:
                return None
            for i in of_call.get(k, ()):
                numbers = numbers_of(program.calls[i])
                new = becomes.get((program.graph.ops[i].target, numbers)) if numbers else numbers
                if new is None:
                    return None
                if written(new) != written(numbers):
                    found[i] = new
        return found

    def _alone(
        self, state: ExecutionState, func: Any, given: Any, like: Callable[[torch.Tensor], torch.Tensor]
    ) -> Alone | None:
        seen: dict[int, int] = {}

        def described(t: torch.Tensor) -> Any:
            known = like(t)
            return seen.setdefault(id(known), len(seen)), form(known)

        key = func, state, repr(_mapped(described, given))
        if key not in self._made:
            while len(self._made) >= _REMEMBERED:
                del self._made[next(iter(self._made))]
            self._made[key] = _alone(state, func, given, like)
        return self._made[key]


_REMEMBERED = 256


def _mapped(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree).__name__, [_mapped(fn, x) for x in tree]
    return [(k, _mapped(fn, x)) for k, x in tree.items()] if isinstance(tree, dict) else tree


def with_numbers_at(program: Program, numbers: Mapping[int, tuple[Any, ...]]) -> Program | None:
    """``program`` with other numbers in the calls of those indices; None where a recomputation takes others."""
    calls, replays = list(program.calls), dict(program.replays)
    for i, new in numbers.items():
        calls[i] = _with(calls[i], new)
        if i in replays:
            if len(numbers_of(replays[i])) != len(new):
                return None
            replays[i] = _with(replays[i], new)
    return replace(program, calls=tuple(calls), replays=replays)


def written(numbers: tuple[Any, ...]) -> str:
    """Tells 0.0 from -0.0 and 1 from 1.0, and NaN is itself."""
    return repr(numbers)


def _alone(
    state: ExecutionState, func: Any, given: Any, like: Callable[[torch.Tensor], torch.Tensor]
) -> Alone | None:
    """The ops of one call and of its backward pass; None if it cannot be made alone, or code of the caller's in it
    makes tensors of Python's data, in which a number may stand unseen. ``like`` says what its tensors look like."""
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
    if isinstance(func, compat_calls.Special) and tape.constants:
        return None
    ops = [(r.target, tuple(_numbers_in((r.args, r.kwargs)))) for r in tape.records]
    return Alone(ops, (tape.values, _mapped(form, out)))


def _pairs(before: Alone | None, after: Alone | None) -> dict[Made, tuple[Any, ...]] | None:
    """What numbers become, by op and number; None where two like ones become different ones, or more than numbers."""
    if before is None or after is None or before.looks != after.looks:
        return None
    if [t for t, _ in before.ops] != [t for t, _ in after.ops]:
        return None
    becomes: dict[Made, tuple[Any, ...]] = {}
    for known, (_, numbers) in zip(before.ops, after.ops, strict=True):
        if len(known[1]) != len(numbers) or becomes.setdefault(known, numbers) != numbers:
            return None
    return becomes


def _with(call: Call, numbers: tuple[Any, ...]) -> Call:
    given = iter(numbers)

    def other(x: Any) -> Any:
        return next(given) if type(x) in _NUMBERS else x

    return replace(call, args=map_tree(other, call.args), kwargs=map_tree(other, call.kwargs))


_NUMBERS = (int, float, complex)


def numbers_of(call: Call) -> tuple[Any, ...]:
    return tuple(_numbers_in((call.args, call.kwargs)))


def _numbers_in(tree: Any) -> Iterator[Any]:
    return (x for x in leaves_in(tree) if type(x) in _NUMBERS)


# --- two captures ---------------------------------------------------------------------------------------------


def other_numbers(known: Program, new: Program) -> dict[int, tuple[Any, ...]] | None:
    """The numbers of ``new``, by op, that are not those of ``known``; None where ``new`` has other ops, inputs or
    results."""
    alike = (
        known.graph.digest == new.graph.digest
        and known.slots == new.slots
        and known.results == new.results
        and known.bases == new.bases
        and known.replays.keys() == new.replays.keys()
        and len(known.constants) == len(new.constants)
        and all(form(a) == form(b) for a, b in zip(known.constants, new.constants, strict=True))
    )
    if not alike:
        return None
    found: dict[int, tuple[Any, ...]] = {}
    for k, (a, b) in enumerate(zip(known.calls, new.calls, strict=True)):
        if not _same_function(a.fn, b.fn) or a.results != b.results:
            return None
        if _without_numbers((a.args, a.kwargs)) != _without_numbers((b.args, b.kwargs)):
            return None
        if written(numbers_of(a)) != written(numbers_of(b)):
            found[k] = numbers_of(b)
    if any(k in new.replays and len(numbers_of(new.replays[k])) != len(n) for k, n in found.items()):
        return None
    return found


def _same_function(a: Any, b: Any) -> bool:
    """Functions of torch are the same object; those made for one program say what they are."""
    return a is b or (type(a) is type(b) and _described(a) == _described(b))


def _described(fn: Any) -> Any:
    return getattr(fn, "name", None) or repr(fn)


def _without_numbers(tree: Any) -> Any:
    if isinstance(tree, (list, tuple)):
        return [_without_numbers(x) for x in tree]
    if isinstance(tree, dict):
        return {k: _without_numbers(x) for k, x in tree.items()}
    return type(tree).__name__ if type(tree) in _NUMBERS else repr(tree)
