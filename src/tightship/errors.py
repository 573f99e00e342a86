"""The errors tightship raises: one family, so that one ``except`` catches them all; and what a verifier finds.

A message states the fault with its value and place, then the rule, then what to do. ``exit_status`` is what the
command line exits with: 1 for "not achievable", 2 for bad input or usage.
"""

import errno
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

__all__ = [
    "BadInput",
    "BudgetExceeded",
    "CheckFailed",
    "Infeasible",
    "InternalError",
    "PeerFailed",
    "TightshipError",
    "UnknownAlias",
    "UnknownSize",
    "Unplannable",
    "Unsupported",
    "VerificationFailed",
]

_SHOWN_VALUE: Final = 120  # characters of an offending value that a message repeats
_SHOWN_VIOLATIONS: Final = 10
_OF_THESE_OPS: Final = (
    "the lower bound is that of these ops, run one by one; "
    "the same model as other ops (fused, compiled) may need less"
)

_OF_STATIC: Final = "the lower bound is what the compiled step holds whatever is planned"


class _Missing:
    """The type of the default of ``BadInput.value``: ``None`` can itself be an offending value."""

    def __repr__(self) -> str:
        return "<no value>"

    def __reduce__(self) -> str:
        return "_MISSING"  # pickled by name, or ``is`` would fail after a round trip


_MISSING: Final = _Missing()


def _bytes(count: int) -> str:
    """Readable and exact: two sizes that round to the same text must not look equal in a message."""
    from tightship.units import format_bytes  # here, because units raises the errors of this file

    return format_bytes(count) if abs(count) < 1024 else f"{format_bytes(count)} ({count} B)"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_VALUE else text[: _SHOWN_VALUE - 1] + "…"


def _rebuild(cls: type["TightshipError"], args: tuple[Any, ...], state: dict[str, Any]) -> "TightshipError":
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


class TightshipError(Exception):
    """Base of every error that tightship raises on purpose."""

    exit_status: ClassVar[int] = 2

    def __reduce__(self) -> tuple[Callable[..., "TightshipError"], tuple[Any, ...]]:
        # Exceptions are pickled as ``cls(*args)`` by default, which does not fit the constructors below;
        # errors travel between processes when planners run in a pool.
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _out_of_memory(error: BaseException) -> bool:
    """Also where the system says it in its own way, or a library that it was to load."""
    said = ("failed to map segment", "Cannot allocate memory", "cannot allocate memory", "bad_alloc")
    number = getattr(error, "errno", None)
    if isinstance(
        error, SystemError
    ):  # memory that ends within an import: Python itself loses the MemoryError
        last = error.__traceback__
        while last and last.tb_next:
            last = last.tb_next
        where = last.tb_frame.f_code.co_filename if last else ""
        return where.startswith("<frozen importlib") and "without exception set" in str(error)
    return isinstance(error, MemoryError) or number == errno.ENOMEM or any(x in str(error) for x in said)


class InternalError(TightshipError):
    """Something went wrong that nobody foresaw: a fault of tightship's own, ``cause``, or too little memory for the
    work. The command line says so in the place of a traceback."""

    exit_status: ClassVar[int] = 3

    def __init__(self, cause: BaseException) -> None:
        self.__cause__ = cause
        said = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
        if _out_of_memory(cause):
            super().__init__(f"out of memory ({said}): plan a smaller graph, or where there is more memory")
            return
        super().__init__(
            f"internal error: {said}. This is a fault of tightship's: --debug shows where it was raised; please "
            "report it, with the command and its input, at https://github.com/tightship/tightship/issues"
        )


class BadInput(TightshipError):
    """An argument, a file or a graph is wrong: ``{place}: {rule}, got {value}``.

    ``rule`` states the fault first, then what must hold and what to do; ``value`` is what was found (left out where
    the fault names it) and ``place`` says where: an argument, a file and line, an op or value by name.
    """

    def __init__(self, rule: str, value: object = _MISSING, place: str = "") -> None:
        self.rule = rule
        self.value = value
        self.place = place
        message = f"{place}: {rule}" if place else rule
        super().__init__(message if value is _MISSING else f"{message}, got {_shown(value)}")


class UnknownSize(BadInput):
    """The size of a value in bytes is unknown; sizes are never guessed."""


class UnknownAlias(BadInput):
    """It is unknown whether an op's results share bytes with its operands; that is never guessed."""


@dataclass(frozen=True, slots=True)
class Enough:
    """A budget of ``nbytes`` that a plan was found for, with ``options`` (name, value) beside those that were given.
    As text it is what a call takes: ``budget=1048576, allow="recompute,offload"``."""

    nbytes: int
    options: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        said = (f'{n}="{x}"' if isinstance(x, str) else f"{n}={x!r}" for n, x in self.options)
        return ", ".join((f"budget={self.nbytes}", *said))


class Least(str):
    """Advice that names the least bytes some other way takes, in the place of ``{}`` in ``text``."""

    text: str
    nbytes: int

    def __new__(cls, text: str, nbytes: int) -> "Least":
        from tightship.units import format_bytes  # here, as above

        said = super().__new__(cls, text.format(format_bytes(nbytes)))
        said.text, said.nbytes = text, nbytes
        return said

    def __getnewargs__(self) -> tuple[str, int]:  # type: ignore[override]
        return self.text, self.nbytes

    def beside(self, nbytes: int) -> "Least":
        """The same of a budget that holds so many more."""
        return Least(self.text, self.nbytes + nbytes)


class Infeasible(TightshipError):
    """No plan within the budget was found, or none exists.

    ``best_peak`` is the least peak reached, ``lower_bound`` one that no plan of this graph can go below, its ops run
    one by one: if it is above the budget, no plan can meet it, though another graph of the model may. ``placed``:
    the fewest bytes that a plan with a peak within the budget needed once everything in it had a place, if there was
    such a plan. ``top`` are the values that make up the best peak, largest first, each as (name, bytes, "module path
    · source line"), ``at`` is the op that runs then, ``advice`` what else may help. ``enough`` are budgets that plans
    were found for: the least with the options that were given, if there is one, and lesser ones with others.
    ``compiled``: the program is a compiler's, and ``lower_bound`` what it is given and gives back; ``modeled``: what
    it takes at least by a model of the compiled code, where that is above the budget.
    """

    exit_status: ClassVar[int] = 1

    def __init__(
        self,
        *,
        budget: int,
        lower_bound: int,
        best_peak: int,
        top: Sequence[tuple[str, int, str]] = (),
        placed: int | None = None,
        at: str = "",
        advice: Sequence[str] = (),
        enough: Sequence[Enough] = (),
        compiled: bool = False,
        modeled: int | None = None,
    ) -> None:
        self.compiled = compiled
        self.modeled = modeled
        self.budget = budget
        self.lower_bound = lower_bound
        self.best_peak = best_peak
        self.placed = placed
        self.at = at
        self.advice = tuple(advice)
        self.enough = tuple(enough)
        self.top = tuple((name, size, place) for name, size, place in top)
        super().__init__(self._message())

    def with_advice(self, advice: Sequence[str]) -> "Infeasible":
        """The same with other advice."""
        return self._with(advice=tuple(advice))

    def with_enough(self, enough: Sequence[Enough]) -> "Infeasible":
        """The same with other budgets that are enough."""
        return self._with(enough=tuple(enough))

    @property
    def missing(self) -> int:
        """Bytes by which the best peak is above the budget."""
        return self.best_peak - self.budget

    def with_budget(self, budget: int) -> "Infeasible":
        """The same of a budget that is no number to plan for: what else it holds takes more than there is."""
        return self if budget == self.budget else self._with(budget=budget)

    def needing(self, more: int) -> "Infeasible":
        """The same where so many bytes more than the budget are needed, for others like it, too."""
        return self._with(best_peak=self.budget + more, placed=None)

    def beside(self, nbytes: int, rows: Sequence[tuple[str, int]] = ()) -> "Infeasible":
        """The same of a budget that holds ``nbytes`` beside what was planned; ``rows``: what these are."""
        if not nbytes:
            return self
        top = (*self.top, *((name, size, "") for name, size in rows if size > 0))
        return self._with(
            top=tuple(sorted(top, key=lambda row: -row[1])) if rows else self.top,
            advice=tuple(a.beside(nbytes) if isinstance(a, Least) else a for a in self.advice),
            budget=self.budget + nbytes,
            lower_bound=self.lower_bound + nbytes,
            best_peak=self.best_peak + nbytes,
            placed=None if self.placed is None else self.placed + nbytes,
            modeled=None if self.modeled is None else self.modeled + nbytes,
            enough=tuple(replace(e, nbytes=e.nbytes + nbytes) for e in self.enough),
        )

    def _with(self, **changed: object) -> "Infeasible":
        other = copy(self)
        other.__dict__.update(changed)
        other.args = (other._message(),)
        return other

    @property
    def impossible(self) -> bool:
        """Whether it is proved that no plan of these ops meets the budget (otherwise: none was found)."""
        return self.lower_bound > self.budget

    def _message(self) -> str:
        verdict = "no plan can meet the budget" if self.impossible else "no plan found that meets the budget"
        over = self.missing
        beside = f"{_bytes(over)} above the budget" if over > 0 else "within the budget"
        if self.placed is not None:
            beside += f", but with a place for everything {_bytes(self.placed)} are needed"
            beside += f", {_bytes(self.placed - self.budget)} above it"
        lines = [
            f"{verdict} of {_bytes(self.budget)}: the lower bound is {_bytes(self.lower_bound)}, "
            f"the best peak reached {_bytes(self.best_peak)}, {beside}"
        ]
        if self.impossible:
            lines.append(_OF_STATIC if self.compiled else _OF_THESE_OPS)
        if self.modeled is not None:
            lines.append(
                f"by a model of the compiled code, every plan of it takes {_bytes(self.modeled)} or more"
            )
        if self.enough:
            from tightship.units import format_bytes  # here, as above

            lines.append("what is enough, by a plan that was found:")
            lines += [f"  {e}  ({format_bytes(e.nbytes)})" for e in self.enough]
        if self.top:
            where = f", reached while {self.at} runs" if self.at else ""
            lines.append(f"values that make up the best peak{where}:")
            lines += [
                f"  {_bytes(size)}  {name}" + (f"  at {place}" if place else "")
                for name, size, place in self.top
            ]
        if self.advice:
            lines += ["what else may help:", *(f"  {text}" for text in self.advice)]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule: its ``code``, the ``step`` at which it breaks (-1: none in particular), the names of
    the ops, storages or buffers concerned (the offending one first), and a sentence for people."""

    code: str
    step: int
    subjects: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        where = f" at step {self.step}" if self.step >= 0 else ""
        return f"{self.code}{where}: {self.message}"


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of a verifier's table: the ``code`` of its violations, what they mean in a ``sentence``, and the function
    that finds them. One ``check`` may find violations of several rules; it runs once."""

    code: str
    sentence: str
    check: Callable[[Any], Any]


class VerificationFailed(TightshipError):
    """A plan is not valid; ``violations`` lists everything that is wrong, as the verifier gave it."""

    exit_status: ClassVar[int] = 1

    def __init__(self, violations: Sequence[object], place: str = "") -> None:
        self.violations = tuple(violations)
        self.place = place
        count = len(self.violations)
        head = f"the plan is not valid: {count} violation{'' if count == 1 else 's'}"
        lines = [f"{place}: {head}" if place else head]
        lines += [f"  {violation}" for violation in self.violations[:_SHOWN_VIOLATIONS]]
        if count > _SHOWN_VIOLATIONS:
            lines.append(f"  … and {count - _SHOWN_VIOLATIONS} more")
        super().__init__("\n".join(lines))


class BudgetExceeded(TightshipError):
    """An op of a running plan asked for more bytes than its budget leaves."""

    exit_status: ClassVar[int] = 1

    def __init__(self, op: str, asked: int, budget: int, place: str = "") -> None:
        self.op = op
        self.asked = asked
        self.budget = budget
        self.place = place
        where = f" at {place}" if place else ""
        super().__init__(
            f"op {op!r}{where} asked for {_bytes(asked)}, more than is left of the budget of {_bytes(budget)}"
        )


class CheckFailed(TightshipError, ValueError, AssertionError):
    """A check of the step's own code at ``place``, which it makes of what it computes, fails: eager raises an error
    there. Parameters and optimizer state are as before the step. It is what such checks raise, so that code which
    goes on after those goes on."""

    exit_status: ClassVar[int] = 1

    def __init__(self, place: str) -> None:
        self.place = place
        super().__init__(
            f"the code's own check at {place} fails: eager raises an error there, in the middle of the forward pass; "
            "the step has changed no parameter. Run the batch in eager for the text, or leave it out"
        )


class PeerFailed(TightshipError):
    """A rank has failed, or ranks do not agree, so that none of them goes on; every rank raises the same.

    ``failures`` are what went wrong by rank, in words; empty where nobody knows which rank has ended. ``place`` is
    what the ranks were doing. ``writing``: they were at a point from which on parameters are written.
    """

    exit_status: ClassVar[int] = 1

    def __init__(
        self, failures: Mapping[int, str], place: str = "", lost: str = "", *, writing: bool = False
    ) -> None:
        self.failures = dict(failures)
        self.place, self.lost, self.writing = place, lost, writing
        rows: dict[str, list[int]] = {}
        for rank, text in sorted(self.failures.items()):
            rows.setdefault(text, []).append(rank)
        head = f"{place}: " if place else ""
        lines = [f"rank{'s'[: len(r) > 1]} {', '.join(map(str, r))}: {text}" for text, r in rows.items()]
        if not lines:
            lines = [f"a rank has ended, or cannot be reached any more ({lost})"]
        if writing:
            lines.append("parameters may be half written: start the ranks again, from a checkpoint")
        super().__init__(f"{head}the ranks cannot go on\n" + "\n".join(f"  {line}" for line in lines))


class Unsupported(TightshipError):
    """``what`` is not supported: ``why``, and what to do ``instead``."""

    def __init__(self, what: str, why: str, instead: str = "") -> None:
        self.what = what
        self.why = why
        self.instead = instead
        message = f"{what} is not supported: {why}"
        super().__init__(f"{message}; instead, {instead}" if instead else message)


class Unplannable(Unsupported):
    """What a step does can be known only while it runs: it can be run, exactly, but not as planned before."""
