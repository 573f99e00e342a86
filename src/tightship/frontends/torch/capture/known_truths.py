"""What a boolean tensor of a tape holds, as far as its ops tell: without any data, or for finite numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tightship.frontends.torch.capture.tape import Record, Tape
from tightship.frontends.torch.program import Ref

__all__ = ["Answer", "Reader", "name_of"]


@dataclass(frozen=True)
class Answer:
    """What every element of a boolean value is. ``sure`` is false where it holds for finite numbers only."""

    value: bool
    sure: bool


class Reader:
    """Who makes and writes what on a tape that grows; each record is looked at once, however many questions there
    are."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.maker: dict[int, Record | None] = {}
        self.touching: dict[int, list[int]] = {}  # by storage: the records that make or write it
        self.numbered: set[int] = set()  # calls with numbers that answers since have looked at
        self.known = 0

    def look(self) -> Reader:
        """Takes in what has come since."""
        for k in range(self.known, len(self.tape.records)):
            self._take(k, self.tape.records[k])
        self.known = len(self.tape.records)
        return self

    def _take(self, k: int, r: Record) -> None:
        made = [self.tape.storage(v) for v in r.results if v >= 0]
        for s in made:
            self.maker[s] = r
        for s in r.writes:  # no longer what its op made, unless that is random numbers
            self.maker[s] = r if name_of(r) == "uniform_" else None
        for s in {*made, *r.writes}:
            self.touching.setdefault(s, []).append(k)

    def made_by(self, ref: Any) -> Record | None:
        return self.maker.get(self.tape.storage(ref.value)) if type(ref) is Ref else None

    def truth(self, value: int) -> Answer | None:
        """What every element of a boolean value is, as far as the ops that made it tell; None if they do not."""
        r = self.maker.get(self.tape.storage(value))
        if r is None:
            return None
        rule = _RULES.get(name_of(r))
        if rule and any(type(x) in (int, float) for x in r.args):
            self.numbered.add(r.asked)
        return rule(self, r.args) if rule else None

    def likely(self, asked: Sequence[int]) -> bool:
        """What a question of yes or no about these values is mostly answered with: all are, none is; two tensors
        are equal where both are made of the same."""
        if len(asked) > 1:
            makers = [self.maker.get(self.tape.storage(v)) for v in asked]
            return asked[0] == asked[1] or (None not in makers and _made_alike(*makers))  # type: ignore[arg-type]
        r, turned = self.maker.get(self.tape.storage(asked[0])), False
        while r is not None and name_of(r) in ("bitwise_not", "logical_not"):
            r, turned = self.made_by(r.args[0]), not turned
        return (r is not None and name_of(r) in ("all", "_is_all_true")) is not turned

    def of(self, ref: Any) -> Answer | None:
        return self.truth(ref.value) if type(ref) is Ref else None

    def is_number(self, ref: Any) -> bool:
        return type(ref) is Ref and self.tape.values[ref.value].dtype.is_floating_point


def name_of(r: Record) -> str:
    return r.target.removeprefix("aten.").split(".")[0] if r.target.startswith("aten.") else ""


def _made_alike(a: Record, b: Record) -> bool:
    return (a.fn, a.args, a.kwargs) == (b.fn, b.args, b.kwargs)


Rule = Callable[[Reader, tuple[Any, ...]], "Answer | None"]


def _same(reader: Reader, args: tuple[Any, ...]) -> Answer | None:
    return reader.of(args[0])


def _not(reader: Reader, args: tuple[Any, ...]) -> Answer | None:
    a = reader.of(args[0])
    return a and Answer(not a.value, a.sure)


def _both(decisive: bool) -> Rule:
    """``and`` for which False decides, ``or`` for which True does."""

    def rule(reader: Reader, args: tuple[Any, ...]) -> Answer | None:
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

    def rule(reader: Reader, args: tuple[Any, ...]) -> Answer | None:
        a, b = args
        if type(b) is Ref:
            return Answer(equal, False) if a == b else None
        r = reader.made_by(a)
        of_size = r is not None and name_of(r) == "abs" and reader.is_number(a)
        return Answer(not equal, False) if of_size and b == math.inf else None

    return rule


def _below(below: bool) -> Rule:
    """A number drawn from [0, 1) against a fixed one. ``below``: lt, else ge."""

    def rule(reader: Reader, args: tuple[Any, ...]) -> Answer | None:
        r, bound = reader.made_by(args[0]), args[1]
        if r is None or isinstance(bound, Ref) or not _unit_interval(r):
            return None
        if bound <= 0 or bound >= 1:
            return Answer((bound >= 1) is below, True)
        return None

    return rule


def _unit_interval(r: Record) -> bool:
    return name_of(r) in ("rand", "rand_like") or (
        name_of(r) == "uniform_" and r.args[1:] in ((), (0, 1), (0.0, 1.0))
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
