"""Questions that a program asks of its data while it is captured: values for control flow, and shapes.

They are answered where the answer is known before the ops run: if it comes from constants, the batch, buffers or
random numbers, a ``Guard`` repeats the question in each step; or it is folded to a constant without the data. "Are
all numbers finite?" is folded to yes, and the program checks it in every step (``Expectation``); so is a question
whose other answer only raises an error, and one of yes or no where answers may be guessed (`Guesses`); "is a number
drawn from [0, 1) below 0?" needs no check. Everything else stays unanswered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tightship.errors import Unplannable, Unsupported
from tightship.frontends.torch import compat, compat_ops
from tightship.frontends.torch.capture.assertions import answer_without_error
from tightship.frontends.torch.capture.expectations import Expectation, Question, guesses_now
from tightship.frontends.torch.capture.forms import form_of, zeros_like
from tightship.frontends.torch.capture.known_truths import Reader
from tightship.frontends.torch.capture.random_state import random_state_before
from tightship.frontends.torch.capture.readings import READ, Read, Reading, Together, readings_now
from tightship.frontends.torch.capture.slices import READS_DATA, Slices, unsupported
from tightship.frontends.torch.capture.tape import CHECK, Origin, Record, Tape
from tightship.frontends.torch.collectives import Collective
from tightship.frontends.torch.program import derive, evaluate, last_uses, refs_in, substitute

__all__ = [
    "Guard",
    "Questions",
]


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
    "aten::_pack_padded_sequence": ("lengths",),
}
"""Arguments whose contents decide the shapes of the results."""

_MEASURED_BY = {
    **_SHAPED_BY,
    "aten::index_put": ("indices",),
    "aten::index_put_": ("indices",),
    "aten::_index_put_impl_": ("indices",),
    "aten::_unsafe_index_put": ("indices",),
    "aten::masked_scatter_backward": ("mask",),
    "aten::_fused_moving_avg_obs_fq_helper": ("observer_on", "fake_quant_on"),
}
"""Arguments whose contents decide what an op asks of the allocator, or whether it runs at all."""

_MASKS = (torch.bool, torch.uint8)

_READ_WORK = 64
"""How often, at most, a capture computes what its ops have made so far, for code that looks at it."""

_GUESS_WORK = 24
"""The same for answers of yes or no, which are guessed beyond that."""

Tensors = Mapping[tuple[str, Any], torch.Tensor]


@dataclass(frozen=True)
class Guard:
    """Something read from data when the step was captured, on which the captured ops depend.

    ``sources`` are the (role, key) of the caller's tensors the answer depends on, ``calls`` the calls of torch's
    functions, as `Record.asked` numbers them, that it follows from. ``holds`` asks again, with the numbers they had.
    ``requests``: what ops ask of the allocator follows from the answer.
    """

    sources: tuple[tuple[str, Any], ...]
    expected: Any
    place: str
    _ask: Callable[[Tensors], Any]
    calls: frozenset[int] = frozenset()
    requests: bool = False

    def holds(self, tensors: Tensors, other_numbers: Collection[int] = ()) -> bool:
        """Whether the answer is the captured one, given the tensors of ``sources``; not where one of its calls is
        among those with ``other_numbers``, or may be."""
        return self.tells(other_numbers) and bool(self._ask(tensors) == self.expected)

    def tells(self, other_numbers: Collection[int]) -> bool:
        """Whether none of the calls that the answer follows from is among those with ``other_numbers``, or may be."""
        return not other_numbers or (-1 not in self.calls and self.calls.isdisjoint(other_numbers))

    def answer(self, tensors: Tensors) -> Any:
        """The answer now."""
        return self._ask(tensors)


@dataclass(frozen=True)
class Shown(Guard):
    """Contents that the step's code looks at, which each step may have others of; ``answer`` has them. ``graph`` as
    in `Reading`."""

    graph: str = ""

    def holds(self, tensors: Tensors, other_numbers: Collection[int] = ()) -> bool:
        return self.tells(other_numbers)


_COUNTER = 64
"""Bytes of tensors that are kept once they are known."""


class _Counter(NamedTuple):
    """What is in a storage that follows from constants alone, and the calls that it follows from."""

    tensor: torch.Tensor
    calls: frozenset[int]


class Questions:
    """Answers for one capture; ``guards`` are those that have to be asked again."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._reader = Reader(tape)
        self._slices = Slices(tape, self._reader)
        self._known: dict[tuple[int, int], torch.Tensor] = {}
        self._counted: set[tuple[int, int]] = set()  # masks with a guard on how much they select
        self._counters: dict[tuple[int, int], _Counter] = {}  # by storage and how often it was written
        self._places: Counter[str] = Counter()  # of questions with answers that are taken for granted
        self.guards: list[Any] = []
        self.looks = False  # whether the code itself looks at what the call being made reads
        self.told: Iterator[Sequence[torch.Tensor]] = iter(())  # what it has been told then
        self._readings = 0
        self._read_work = 0

    def value(self, fn: Any, args: tuple[Any, ...], origin: Origin, phase: str) -> Any:
        """What ``fn`` returns to Python. Raises ``Unsupported`` where only the step itself can tell."""
        wanted = list(refs_in(args))
        reader = self._reader.look()
        reader.numbered.clear()
        known = reader.truth(wanted[0]) if len(wanted) == 1 else None
        if known is not None:
            if any(k >= 0 for k in reader.numbered):
                self._guard_numbers(known.value, frozenset(reader.numbered), fn, origin)
            if known.sure:
                return known.value
        raised = answer_without_error() if self._is_truth(wanted) else None
        fits = known is not None and known.value is raised
        if raised is not None and (fits or (known is None and not self._is_known(wanted, fn, origin))):
            return self._expect(wanted, Expectation(raised, str(origin), raises=True), origin, phase)
        try:
            return self._ask(fn, wanted, lambda parts: fn(*parts), origin)
        except Unplannable as no:
            check = self._guessed(fn, wanted, None if known is None else known.value, origin, phase)
            if check is None and not self._may_read(phase):
                raise
            if check is None:
                why = no.what, no.why, no.instead
                return self._read(wanted, lambda parts: fn(*parts), fn, origin, why)[1]
        return self._expect(wanted, check, origin, phase)

    def shapes(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origin: Origin) -> Any:
        """What the results of ``fn`` look like (``form_of``); raises as ``value``."""
        names = _SHAPED_BY.get(fn._schema.name, ())
        given = [compat_ops.argument(fn, args, kwargs, n) for n in names]
        wanted = list(dict.fromkeys(refs_in(given)))
        if not wanted:
            raise unsupported(fn, origin, "the shape of its result")
        values = self._tape.values

        def look(parts: Sequence[torch.Tensor]) -> Any:
            known = dict(zip(wanted, parts, strict=True))

            def read(v: int) -> torch.Tensor:
                return known[v] if v in known else zeros_like(values[v])

            return form_of(fn(*substitute(args, read), **substitute(kwargs, read)))

        answer = self._ask(fn, wanted, look, origin)
        if len(wanted) == 1:
            self._counted.add(self._key(wanted[0]))
        return answer

    def contents(self, value: int, fn: Any, origin: Origin) -> torch.Tensor:
        """What is in ``value``, guarded; raises as ``value``."""
        self._ask(fn, [value], lambda parts: (parts[0].dtype, parts[0].tolist()), origin)
        return self._contents(value, fn, origin)

    def looked_at(self, value: int, fn: Any, origin: Origin, graph: str) -> torch.Tensor:
        """What is in ``value``, for code that may find something else there in each step; raises as ``value``.
        ``graph`` as in `Reading`."""
        try:
            whose = self._tape.storages[self._tape.storage(value)].role
            untouched = bool(whose) and not self._reader.look().touching.get(self._tape.storage(value))
            ask, asked, calls, *_ = self._question(
                [value], lambda parts: parts[0], fn, origin, trained=untouched
            )
        except Unplannable as no:
            if not self._may_read("forward"):
                raise
            return self._read([value], len, fn, origin, (no.what, no.why, no.instead), graph)[0][0]
        with compat.without_modes():
            contents: torch.Tensor = ask({key: self._tape.real[v] for v, key in asked.items()})
        self.guards.append(Shown(tuple(asked.values()), None, f"{fn} · {origin}", ask, calls, graph=graph))
        return contents

    def _may_read(self, phase: str) -> bool:
        """Whether the code of the step waits for what it looks at."""
        return self.looks and phase == "forward" and readings_now() is not None

    def _read(
        self, wanted: Sequence[int], finish: Callable[[Sequence[torch.Tensor]], Any], fn: Any, origin: Origin,
        why: tuple[str, str, str], graph: str = "",
    ) -> tuple[Sequence[torch.Tensor], Any]:  # fmt: skip
        """What is in values, which the step itself reads from now on, and what ``finish`` says of it. While it is
        captured, that is computed by its ops up to here. ``why`` there is no plan otherwise is what is raised where
        that would take too long."""
        contents = next(self.told, None)
        if contents is None:
            contents = self._computed(wanted, fn, origin, _READ_WORK)
        if contents is None:
            raise Unplannable(*why)
        with compat.without_modes():
            said = finish(contents)
        read = Read(str(origin), self._readings, Unplannable(*why))
        self._readings += 1
        record = self._tape.call(read, READ, tuple(wanted), ())
        record.effect, record.origin = True, origin
        self.guards.append(Reading(read, finish, said, graph))
        return contents, said

    def _computed(
        self, wanted: Sequence[int], fn: Any, origin: Origin, most: int
    ) -> Sequence[torch.Tensor] | None:
        """What is in values now, by the ops up to here; None where such looks would come to more than ``most`` times
        all ops."""
        readings = readings_now()
        together = None if readings is None else readings.together
        sent = together is not None
        ask, asked, _, _, needed = self._question(list(wanted), tuple, fn, origin, trained=True, sent=sent)
        work, records = self._read_work, len(self._tape.records)
        if work + records > most * max(records, _COUNTER):
            return None
        self._read_work = work + records
        beside = nullcontext() if together is None else self._beside_others(together, needed, str(origin))
        with beside, compat.without_modes():
            contents: Sequence[torch.Tensor] = ask({key: self._tape.real[v] for v, key in asked.items()})
        return contents

    def _beside_others(
        self, together: Together, needed: Sequence[Record], place: str
    ) -> AbstractContextManager[None]:
        """What other ranks have to do with what ``needed`` computes."""
        tape = self._tape
        written = {s for r in tape.records for s in r.writes}
        rows = [(r.fn, r.args) for r in needed if isinstance(r.fn, Collective)]
        sent = [fn.describe(args, self._metadata, len(fn.group(args))) for fn, args in rows]
        behind = any(isinstance(r.fn, Collective) for r in tape.records)
        buffers = any(tape.storages[s].role == "buffer" for s in written)
        return together.computing(place, sent, behind=behind, written=buffers)

    def _metadata(self, argument: Any) -> Any:
        values = self._tape.values
        return [(values[v].dtype, values[v].shape) for v in refs_in(argument)] or argument

    def _true_now(self, fn: Any, wanted: Sequence[int], origin: Origin, phase: str) -> bool | None:
        """The answer of yes or no in the step that is captured; None where its code does not wait for it."""
        if not self._may_read(phase):
            return None
        try:
            contents = self._computed(wanted, fn, origin, _GUESS_WORK)
        except Unplannable:
            return None
        with compat.without_modes():
            return None if contents is None else bool(fn(*contents))

    def samples(
        self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origin: Origin
    ) -> dict[int, torch.Tensor]:
        """Contents of arguments without which ``fn`` cannot be measured, as `Program.samples` has them; none where
        only the step can tell. Where nothing else checks it, how much a mask selects is guarded, which decides what
        the op asks of the allocator."""
        name = fn._schema.name
        if name not in _MEASURED_BY:
            return {}
        given = [compat_ops.argument(fn, args, kwargs, n) for n in _MEASURED_BY[name]]
        wanted = list(dict.fromkeys(refs_in(given)))
        if "index" in name:  # zeros are as good as any other index
            wanted = [v for v in wanted if self._tape.values[v].dtype in _MASKS]
        if not wanted:
            return {}
        try:
            if name not in _SHAPED_BY and not all(self._key(v) in self._counted for v in wanted):
                self._ask(
                    fn, wanted, lambda parts: [int(p.count_nonzero()) for p in parts], origin, requests=True
                )
                self._counted |= {self._key(v) for v in wanted}
            order = list(dict.fromkeys(refs_in((args, kwargs))))
            return {order.index(v): self._contents(v, fn, origin) for v in wanted}
        except Unsupported:
            return {}

    def _key(self, value: int) -> tuple[int, int]:
        """A value with its contents as they are now."""
        return value, len(self._reader.look().touching.get(self._tape.storage(value), ()))

    def _contents(self, value: int, fn: Any, origin: Origin) -> torch.Tensor:
        key = self._key(value)
        if key not in self._known:
            ask, asked, *_ = self._question([value], lambda parts: parts[0], fn, origin)
            with compat.without_modes():
                self._known[key] = ask({k: self._tape.real[v] for v, k in asked.items()})
        return self._known[key]

    def _ask(
        self, fn: Any, wanted: list[int], finish: Callable[[Sequence[torch.Tensor]], Any], origin: Origin,
        *, requests: bool = False,
    ) -> Any:  # fmt: skip
        counters = [self._counters.get(self._state(self._tape.storage(v))) for v in wanted]
        if counters and None not in counters:
            return self._of_counters([c for c in counters if c is not None], fn, wanted, finish, origin)
        ask, asked, calls, drawn, _ = self._question(wanted, finish, fn, origin)
        with compat.without_modes():
            answer = ask({key: self._tape.real[v] for v, key in asked.items()})
        if asked or drawn:
            place = f"{fn} · {origin}"
            self.guards.append(Guard(tuple(asked.values()), answer, place, ask, calls, requests))
        elif any(k >= 0 for k in calls):
            self._guard_numbers(answer, calls, fn, origin)
        return answer

    def _question(
        self,
        wanted: list[int],
        finish: Callable[[Sequence[torch.Tensor]], Any],
        fn: Any,
        origin: Origin,
        *,
        trained: bool = False,
        sent: bool = False,
    ) -> tuple[Callable[[Tensors], Any], dict[int, tuple[str, Any]], frozenset[int], bool, list[Record]]:
        """What ``finish`` says of the values ``wanted``, as a function of the caller's tensors; which they are,
        (role, key) by value; the calls that it follows from; whether random numbers go into it; and the records that
        it runs. ``trained``: also of what follows from parameters, ``sent``: and from what ranks send."""
        tape = self._tape
        needed, sources, filled = self._slices.of(wanted, fn, origin, trained=trained, sent=sent)
        drawn = any(r.random for r in needed)
        written = {s for r in needed for s in r.writes}
        for v, role, key in sources:
            if tape.storage(v) in written and not _copies_as_it_lies(tape.real[v]):
                raise unsupported(fn, origin, f"its data comes from {role} {key}")
        values, asked = tape.values, {v: (role, key) for v, role, key in sources}
        used = {*wanted, *(v for r in needed for v in (*r.reads, *r.results) if v >= 0)}
        bases = {s: tape.storages[s].base for s in {tape.storage(v) for v in used}}
        calls = frozenset(r.asked for r in needed)
        small = [] if asked or drawn else self._small(needed, bases)
        asked_for = [*wanted, *(bases[s] for s in small)]
        done = last_uses(needed, values, asked_for)

        def ask(tensors: Tensors) -> Any:
            given = {v: tensors[key] for v, key in asked.items()}
            given |= {v: t.clone() for v, t in given.items() if tape.storage(v) in written}
            given |= {v: zeros_like(values[v], tape.storages[tape.storage(v)].device) for v in filled}
            with torch.no_grad(), random_state_before() if drawn else nullcontext():
                found = evaluate(needed, values, bases, given, asked_for, done)
                for s, tensor in zip(small, found[len(wanted) :], strict=True):
                    self._counters[self._state(s)] = _Counter(tensor, calls)
                return finish(found[: len(wanted)])

        return ask, asked, calls, drawn, needed

    def _state(self, storage: int) -> tuple[int, int]:
        """A storage with its contents as they are now."""
        return storage, len(self._reader.look().touching.get(storage, ()))

    def _small(self, needed: Sequence[Record], bases: Mapping[int, int]) -> list[int]:
        """The storages of a few bytes that are as they are now once the records ``needed`` have run: an optimizer
        asks for the counter of each parameter, and an op that counts them all makes all of them at once."""
        tape, run = self._tape, {id(r) for r in needed}
        touching = self._reader.look().touching
        return [
            s
            for s in bases
            if tape.storages[s].nbytes <= _COUNTER
            and s in touching
            and all(id(tape.records[k]) in run for k in touching[s])
        ]

    def _of_counters(
        self, counters: Sequence[_Counter], fn: Any, wanted: Sequence[int],
        finish: Callable[[Sequence[torch.Tensor]], Any], origin: Origin,
    ) -> Any:  # fmt: skip
        """What ``finish`` says of values that follow from constants, and are known."""
        tape = self._tape
        with compat.without_modes(), torch.no_grad():
            parts = [
                derive(c.tensor, tape.values[tape.storages[tape.storage(v)].base], tape.values[v])
                for c, v in zip(counters, wanted, strict=True)
            ]
            answer = finish(parts)
        calls = frozenset().union(*(c.calls for c in counters))
        if any(k >= 0 for k in calls):
            self._guard_numbers(answer, calls, fn, origin)
        return answer

    def _guard_numbers(self, answer: Any, calls: frozenset[int], fn: Any, origin: Origin) -> None:
        """An answer that no data go into, but perhaps numbers of ``calls``."""
        self.guards.append(Guard((), answer, f"{fn} · {origin}", lambda _: answer, calls))

    def _is_truth(self, wanted: Sequence[int]) -> bool:
        return len(wanted) == 1 and self._tape.values[wanted[0]].dtype is torch.bool

    def _is_known(self, wanted: list[int], fn: Any, origin: Origin) -> bool:
        """Whether it follows from constants alone."""
        try:
            needed, sources, _ = self._slices.of(wanted, fn, origin)
        except Unsupported:
            return False
        return not sources and not any(r.random for r in needed)

    def _guessed(
        self, fn: Any, wanted: Sequence[int], finite: bool | None, origin: Origin, phase: str
    ) -> Expectation | None:
        """What is taken for granted; ``finite``: the answer where all numbers are finite, if they tell it."""
        guesses, place = guesses_now(), str(origin)
        if guesses is None:
            return None if finite is None else Expectation(finite, place)
        if finite is None and phase != "forward":
            return None
        if fn._schema.name == READS_DATA[0] and not self._is_truth(wanted):
            return None
        question = Question(place, self._places[place])
        self._places[place] += 1
        now = None if finite is not None or guesses.given_up else self._true_now(fn, wanted, origin, phase)
        likely = self._reader.likely(wanted) if finite is None else finite
        answer = guesses.answer(question, likely, now)
        answer = finite if answer is None else answer
        return None if answer is None else Expectation(answer, place, nth=question.nth)

    def _expect(self, wanted: Sequence[int], check: Expectation, origin: Origin, phase: str) -> bool:
        record = self._tape.call(check, CHECK, tuple(wanted), ())
        record.effect, record.origin, record.phase = True, origin, phase
        return check.expected


def _copies_as_it_lies(tensor: torch.Tensor) -> bool:
    """Whether a copy of a tensor has its strides: one without gaps, and without elements that share memory."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
