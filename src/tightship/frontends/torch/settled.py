"""Questions to data whose answer is known without the data.

"Are all numbers finite?" is taken to be answered yes, and the program checks it in every step (``Expectation``);
"is a number drawn from [0, 1) below 0?" needs no check. Everything else stays unanswered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tightship.errors import Unsupported
from tightship.frontends.torch.program import Ref
from tightship.frontends.torch.tape import Record, Tape

__all__ = ["Expectation", "settled"]


@dataclass(frozen=True)
class Expectation:
    """An op that only checks that a tensor of one element is what the captured control flow took it to be.

    Raises ``Unsupported`` if it is not: eager would run other ops from here on.
    """

    expected: bool
    place: str

    def __call__(self, answer: torch.Tensor) -> None:
        if bool(answer.item()) is not self.expected:
            raise Unsupported(
                f"a number that is not finite at {self.place}",
                "eager takes another path there, which the captured step does not have",
                "lower the learning rate or run this step in eager",
            )


@dataclass(frozen=True)
class Answer:
    """``sure`` is false where it holds for finite numbers only."""

    value: bool
    sure: bool


def settled(tape: Tape, value: int) -> Answer | None:
    """What every element of a boolean value is, as far as the ops that made it tell; None if they do not."""
    return _Reader(tape).truth(value)


class _Reader:
    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.maker: dict[int, Record | None] = {}
        for r in tape.records:
            for v in r.results:
                if v >= 0:
                    self.maker[tape.storage(v)] = r
            for (
                s
            ) in r.writes:  # no longer what its op made; random numbers written in place are looked at below
                self.maker[s] = r if _name(r) == "uniform_" else None

    def made_by(self, ref: Any) -> Record | None:
        return self.maker.get(self.tape.storage(ref.value)) if type(ref) is Ref else None

    def truth(self, value: int) -> Answer | None:
        r = self.maker.get(self.tape.storage(value))
        if r is None:
            return None
        rule = _RULES.get(_name(r))
        return rule(self, r.args) if rule else None

    def of(self, ref: Any) -> Answer | None:
        return self.truth(ref.value) if type(ref) is Ref else None

    def is_number(self, ref: Any) -> bool:
        return type(ref) is Ref and self.tape.values[ref.value].dtype.is_floating_point


def _name(r: Record) -> str:
    return r.target.removeprefix("aten.").split(".")[0] if r.target.startswith("aten.") else ""


Rule = Callable[[_Reader, tuple[Any, ...]], "Answer | None"]


def _same(reader: _Reader, args: tuple[Any, ...]) -> Answer | None:
    return reader.of(args[0])


def _not(reader: _Reader, args: tuple[Any, ...]) -> Answer | None:
    a = reader.of(args[0])
    return a and Answer(not a.value, a.sure)


def _both(decisive: bool) -> Rule:
    """``and`` for which False decides, ``or`` for which True does."""

    def rule(reader: _Reader, args: tuple[Any, ...]) -> Answer | None:
        answers = [reader.of(args[0]), reader.of(args[1])]
        known = [a for a in answers if a is not None]
        for a in known:
            if a.value is decisive:
                return a
        return Answer(not decisive, all(a.sure for a in known)) if len(known) == 2 else None

    return rule


def _finite(value: bool) -> Rule:
    """Of ``isfinite``, ``isnan``, ``isinf``."""
    return lambda reader, args: Answer(value, False) if reader.is_number(args[0]) else None


def _equality(equal: bool) -> Rule:
    """``x == x`` and ``abs(x) == inf``: what ``isnan`` and ``isinf`` are made of. ``equal``: eq, else ne."""

    def rule(reader: _Reader, args: tuple[Any, ...]) -> Answer | None:
        a, b = args
        if type(b) is Ref:
            return Answer(equal, False) if a == b else None
        r = reader.made_by(a)
        of_size = r is not None and _name(r) == "abs" and reader.is_number(a)
        return Answer(not equal, False) if of_size and b == math.inf else None

    return rule


def _below(below: bool) -> Rule:
    """A number drawn from [0, 1) against a fixed one. ``below``: lt, else ge."""

    def rule(reader: _Reader, args: tuple[Any, ...]) -> Answer | None:
        r, bound = reader.made_by(args[0]), args[1]
        if r is None or isinstance(bound, Ref) or not _unit_interval(r):
            return None
        if bound <= 0 or bound >= 1:
            return Answer((bound >= 1) is below, True)
        return None

    return rule


def _unit_interval(r: Record) -> bool:
    return _name(r) in ("rand", "rand_like") or (
        _name(r) == "uniform_" and r.args[1:] in ((), (0, 1), (0.0, 1.0))
    )


_RULES: dict[str, Rule] = {
    "all": _same, "any": _same, "clone": _same, "_to_copy": _same,
    "bitwise_not": _not, "logical_not": _not,
    "bitwise_and": _both(False), "logical_and": _both(False), "mul": _both(False),
    "bitwise_or": _both(True), "logical_or": _both(True),
    "isfinite": _finite(True), "isnan": _finite(False), "isinf": _finite(False),
    "eq": _equality(True), "ne": _equality(False),
    "lt": _below(True), "ge": _below(False),
}  # fmt: skip
