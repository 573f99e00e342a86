"""Answers that a program takes for granted: it checks in each step, before anything is updated, that they are right.

Questions of yes or no about what only the step itself computes (``if torch.isinf(h).any()``, ``if loss > limit``) are
mostly answered as in the step before. Where the caller can run a step again in eager, such an answer is guessed, and
learnt where the guess was wrong (`Guesses`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tightship.errors import CheckFailed, Unplannable, Unsupported
from tightship.frontends.torch.program import Program

__all__ = [
    "Expectation",
    "Guesses",
    "Misled",
    "OtherAnswer",
    "Question",
    "guesses_now",
    "guessing",
    "only_raises",
    "written_back",
]

AGAIN = 256
"""Questions at one place of the code, at most: a loop that only an answer ends is not unrolled for ever."""
_TURNS = 2
"""How often the answer of a question may turn out to be the other one for good, at most."""
_RARE = 4
"""Of so many steps one may have another answer, and is run in eager."""


class Question(NamedTuple):
    """The ``nth`` at a place of the code."""

    place: str
    nth: int = 0


class OtherAnswer(Unsupported):
    """A step has another answer to a question than its program was captured with."""

    def __init__(self, question: Question, expected: bool) -> None:
        self.question, self.expected = question, expected
        super().__init__(
            f"another answer than {expected} to the question at {question.place}",
            "eager takes another path there, which the captured step does not have",
            "run this step in eager; where a number is no longer finite, lower the learning rate",
        )


class Misled(Unplannable):
    """The step's code has raised an error, perhaps as an answer was taken for granted."""

    def __init__(self, error: Exception) -> None:
        super().__init__(
            f"an error ({type(error).__name__}) after an answer that is taken for granted",
            "with the other answer the code may go on",
        )


@dataclass(frozen=True)
class Expectation:
    """An op that only checks that a tensor of one element is what the captured control flow took it to be, or that
    two tensors are equal, or not.

    If it is not, raises ``CheckFailed`` where eager raises an error, too (``raises``), else `OtherAnswer`: eager
    would run other ops from here on.
    """

    expected: bool
    place: str
    raises: bool = False
    nth: int = 0

    def __call__(self, *asked: torch.Tensor) -> None:
        answer = torch.equal(*asked) if len(asked) > 1 else bool(asked[0].item())
        if answer is self.expected:
            return
        if self.raises:
            raise CheckFailed(self.place)
        raise OtherAnswer(Question(self.place, self.nth), self.expected)


def only_raises(call: Any) -> bool:
    """Whether a program's call is a check after which eager goes on the same way, or raises."""
    return isinstance(call, Expectation) and call.raises


class Guesses:
    """What the captures of one step take for granted, and what its runs say of it."""

    def __init__(self) -> None:
        self.taken: set[Question] = set()
        """Questions that captures have guessed the answer of."""
        self._learnt: dict[Question, bool] = {}
        self._turns: dict[Question, int] = {}
        self._wrong: Counter[Question] = Counter()  # how often steps have had another answer
        self._last: Question | None = None  # that the last step had another answer to
        self._proved = False  # whether all were right in a step since one was learnt
        self._balance = 2 * _RARE
        self.given_up = False
        """Whether code waits for its answers."""

    def answer(self, question: Question, likely: bool, now: bool | None = None) -> bool | None:
        """``now``: the answer in the step that is captured, as far as it is known. None beyond what is guessed at one
        place, and where nothing is guessed any more."""
        if question.nth >= AGAIN or self.given_up:
            return None
        self.taken.add(question)
        return now if now is not None else self._learnt.get(question, likely)

    def were_right(self) -> None:
        self._last, self._proved, self._balance = None, True, min(self._balance + 1, 2 * _RARE)

    def learn(self, no: OtherAnswer | Unplannable) -> bool:
        """Of a step that had to run in eager: whether its answer is taken for granted from now on, as it came twice
        in a row, or the guess was not right before."""
        if not isinstance(no, OtherAnswer):
            self._balance -= _RARE
            return False
        self._wrong[no.question] += 1
        again, self._last = not self._proved or self._last == no.question, no.question
        self._balance -= _RARE
        if again:
            self._learnt[no.question] = not no.expected
            self._turns[no.question] = self._turns.get(no.question, 0) + 1
            self._last, self._proved, self._balance = None, False, self._balance + 2 * _RARE
        return again

    def give_up(self) -> bool:
        """From now on the code of the step waits for its answers; False where it has done so before."""
        if self.given_up:
            return False
        self.given_up, self._balance = True, 2 * _RARE
        self._turns.clear()
        self._wrong.clear()
        return True

    @property
    def turned_again(self) -> bool:
        """Whether a question has had another answer more than once: to wait for it takes less than steps in eager."""
        return any(n >= _TURNS for n in self._wrong.values())

    @property
    def hopeless(self) -> bool:
        """Whether answers change too often to be guessed."""
        return self._balance < 0 or any(n > _TURNS for n in self._turns.values())


_GUESSES: ContextVar[Guesses | None] = ContextVar("guesses", default=None)


@contextmanager
def guessing(guesses: Guesses | None) -> Iterator[None]:
    """Captures inside take answers for granted, as far as ``guesses`` say; with None, none but finite numbers."""
    token = _GUESSES.set(guesses)
    try:
        yield
    finally:
        _GUESSES.reset(token)


def guesses_now() -> Guesses | None:
    return _GUESSES.get()


@contextmanager
def written_back(program: Program, tensors: Sequence[Any]) -> Iterator[None]:
    """Where the step turns out to have another answer than the program, what it has written before (running
    statistics) is as it was. What is trained is not written before that is known."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    if any(isinstance(c.fn, Expectation) and not c.fn.raises for c in program.calls):
        written = {s for op in program.graph.ops if op.phase != "update" for s in op.mutates}
        for slot, t in zip(program.slots, tensors, strict=True):
            of_step = slot.role not in ("parameter", "state", "gradient")
            if of_step and program.graph.values[slot.value].storage in written:
                kept.append((t, t.detach().clone()))
    try:
        yield
    except OtherAnswer:
        with torch.no_grad():
            for t, before in kept:
                t.copy_(before)
        raise
