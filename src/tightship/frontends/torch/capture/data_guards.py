"""Questions that a program asks of its data while it is captured: values for control flow, and shapes.

They are answered where the answer is the same in every step: if it comes from constants, the batch or buffers, a
``Guard`` repeats the question in each step; or it is folded to a constant without the data. "Are all numbers finite?"
is folded to yes, and the program checks it in every step (``Expectation``); "is a number drawn from [0, 1) below 0?"
needs no check. Everything else stays unanswered.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tightship.errors import Unsupported
from tightship.frontends.torch import compat
from tightship.frontends.torch.capture.tape import Origin, Record, Tape, TapeValue
from tightship.frontends.torch.program import Ref, evaluate, refs_in, substitute

__all__ = [
    "READS_DATA",
    "Expectation",
    "Guard",
    "Questions",
    "form_of",
    "made_of",
    "unsupported",
    "zeros_like",
]


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


class _Reader:
    """Who makes and writes what on a tape that grows; each record is looked at once, however many questions there
    are."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.maker: dict[int, Record | None] = {}
        self.touching: dict[int, list[int]] = {}  # by storage: the records that make or write it
        self.known = 0

    def look(self) -> _Reader:
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
            self.maker[s] = r if _name(r) == "uniform_" else None
        for s in {*made, *r.writes}:
            self.touching.setdefault(s, []).append(k)

    def made_by(self, ref: Any) -> Record | None:
        return self.maker.get(self.tape.storage(ref.value)) if type(ref) is Ref else None

    def truth(self, value: int) -> Answer | None:
        """What every element of a boolean value is, as far as the ops that made it tell; None if they do not."""
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


# --- what a tensor looks like ---------------------------------------------------------------------------------


class _Form(NamedTuple):
    """What matters about a tensor without its contents. Some kernels return part of a larger storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int
    device: str

    def blank(self) -> torch.Tensor:
        whole = torch.empty(self.nbytes // self.dtype.itemsize, dtype=self.dtype, device=self.device)
        return whole.as_strided(self.shape, self.stride, self.offset)


def made_of(form: Any) -> Any:
    """New tensors of that form (``form_of`` a call's result)."""
    if isinstance(form, _Form):
        return form.blank()
    return tuple(made_of(f) for f in form[1]) if isinstance(form, tuple) else form


def form_of(tree: Any) -> Any:
    """``tree`` with each tensor replaced by what matters about it without its contents; comparable."""
    if isinstance(tree, torch.Tensor):
        shape, stride, nbytes = tuple(tree.shape), tuple(tree.stride()), tree.untyped_storage().nbytes()
        return _Form(tree.dtype, shape, stride, int(tree.storage_offset()), nbytes, str(tree.device))
    if isinstance(tree, (list, tuple)):
        return "list", tuple(form_of(x) for x in tree)
    if isinstance(tree, dict):
        return tuple((k, form_of(x)) for k, x in tree.items())
    return tree


def zeros_like(value: torch.Tensor | TapeValue, device: Any = None) -> torch.Tensor:
    """A tensor of zeros with the layout of another."""
    stride = value.stride if isinstance(value, TapeValue) else value.stride()
    t = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=device)
    t.untyped_storage().fill_(0)
    return t


# --- questions ------------------------------------------------------------------------------------------------

READS_DATA = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
"""Ops that hand the contents of a tensor to Python."""

_SHAPED_BY = {
    "aten::nonzero": ("self",),
    "aten::masked_select": ("mask",),
    "aten::index": ("indices",),
    "aten::repeat_interleave": ("repeats",),
    "aten::_unique2": ("self",),
    "aten::unique_consecutive": ("self",),
    "aten::unique_dim": ("self",),
    "aten::bincount": ("self",),
    "aten::_ctc_loss": ("input_lengths", "target_lengths"),
}
"""Arguments whose contents decide the shapes of the results."""

_INSTEAD = {
    "aten::_local_scalar_dense": "keep the value in a tensor (torch.where instead of an if, no .item())",
    "aten::nonzero": "use a mask and torch.where, so that the shape does not depend on the data",
    "aten::masked_select": "multiply by the mask instead of selecting",
}

Tensors = Mapping[tuple[str, Any], torch.Tensor]


@dataclass(frozen=True)
class Guard:
    """Something read from data when the step was captured, on which the captured ops depend.

    ``sources`` are the (role, key) of the caller's tensors the answer depends on. ``holds`` asks again.
    """

    sources: tuple[tuple[str, Any], ...]
    expected: Any
    place: str
    _ask: Callable[[Tensors], Any]

    def holds(self, tensors: Tensors) -> bool:
        """Whether the answer is the captured one, given the tensors of ``sources``."""
        return bool(self._ask(tensors) == self.expected)


class Questions:
    """Answers for one capture; ``guards`` are those that have to be asked again."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._reader = _Reader(tape)
        self.guards: list[Guard] = []

    def value(self, fn: Any, args: tuple[Any, ...], origin: Origin, phase: str) -> Any:
        """What ``fn`` returns to Python. Raises ``Unsupported`` where only the step itself can tell."""
        wanted = list(refs_in(args))
        known = self._reader.look().truth(wanted[0]) if len(wanted) == 1 else None
        if known is not None:
            if not known.sure:
                self._expect(wanted[0], known.value, origin, phase)
            return known.value
        return self._ask(fn, wanted, lambda parts: fn(*parts), origin)

    def shapes(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origin: Origin) -> Any:
        """What the results of ``fn`` look like (``form_of``); raises as ``value``."""
        names = _SHAPED_BY.get(fn._schema.name, ())
        given = [compat.argument(fn, args, kwargs, n) for n in names]
        wanted = list(dict.fromkeys(refs_in(given)))
        if not wanted:
            raise unsupported(fn, origin, "the shape of its result")
        values = self._tape.values

        def look(parts: Sequence[torch.Tensor]) -> Any:
            known = dict(zip(wanted, parts, strict=True))

            def read(v: int) -> torch.Tensor:
                return known[v] if v in known else zeros_like(values[v])

            return form_of(fn(*substitute(args, read), **substitute(kwargs, read)))

        return self._ask(fn, wanted, look, origin)

    def _ask(
        self, fn: Any, wanted: list[int], finish: Callable[[Sequence[torch.Tensor]], Any], origin: Origin
    ) -> Any:
        tape = self._tape
        needed, sources = self._slice(wanted, fn, origin)
        values, asked = tape.values, {v: (role, key) for v, role, key in sources}
        used = {*wanted, *(v for r in needed for v in (*r.reads, *r.results) if v >= 0)}
        bases = {s: tape.storages[s].base for s in {tape.storage(v) for v in used}}

        def ask(tensors: Tensors) -> Any:
            given = {v: tensors[key] for v, key in asked.items()}
            with torch.no_grad():
                return finish(evaluate(needed, values, bases, given, wanted))

        with compat.without_modes():
            answer = ask({key: tape.real[v] for v, key in asked.items()})
        if asked:
            self.guards.append(Guard(tuple(asked.values()), answer, f"{fn} · {origin}", ask))
        return answer

    def _expect(self, value: int, expected: bool, origin: Origin, phase: str) -> None:
        check = Expectation(expected, str(origin))
        record = self._tape.call(check, "expect", (value,), ())
        record.effect, record.origin, record.phase = True, origin, phase

    def _slice(
        self, wanted: list[int], fn: Any, origin: Origin
    ) -> tuple[list[Record], list[tuple[int, str, Any]]]:
        """The records that compute ``wanted`` and the caller's slots they start from."""
        tape, touching = self._tape, self._reader.look().touching
        needed_storages: set[int] = set()
        needed: list[Record] = []
        later: list[int] = []  # records to look at, the last first
        known: set[int] = set()

        def need(storages: set[int], before: int) -> None:
            for s in storages - needed_storages:
                needed_storages.add(s)
                for k in touching.get(s, ()):
                    if k < before and k not in known:
                        known.add(k)
                        heapq.heappush(later, -k)

        need({tape.storage(v) for v in wanted}, len(tape.records))
        while later:
            k = -heapq.heappop(later)
            r = tape.records[k]
            if r.random or r.effect:
                raise unsupported(
                    fn, origin, f"its data comes from {r.target} at {r.origin}", random=r.random
                )
            needed.append(r)
            need({tape.storage(v) for v in r.reads}, k)
        written = {s for r in needed for s in r.writes}
        sources = []
        for v, role, key in tape.slots_of(needed_storages):
            if role in ("parameter", "state") or tape.storage(v) in written or v not in tape.real:
                raise unsupported(fn, origin, f"its data comes from {role} {key}")
            sources.append((v, role, key))
        return needed[::-1], sources


def unsupported(fn: Any, origin: Origin, why: str, *, random: bool = False) -> Unsupported:
    """The error for an op that needs data, with what to do instead."""
    instead = _INSTEAD.get(fn._schema.name, "use an op whose result and shape do not depend on the data")
    if random:
        instead = "set the rate by which things are dropped (layerdrop, …) to 0, or decide with torch.where"
    where = f" at {origin}" if str(origin) else ""
    return Unsupported(f"{fn}{where}", f"the ops of a step must not depend on data ({why})", instead)
