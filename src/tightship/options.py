"""What a planner is given besides its problem: options, fields of its ``Options`` dataclass that carry their own help
text, as the command line has them, too; and a deadline, one clock for all stages of planning."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from tightship.errors import BadInput
from tightship.units import MAX_BYTES

__all__ = [
    "NEVER",
    "Deadline",
    "add_options",
    "filled",
    "flag_of",
    "given_options",
    "help_of",
    "model_options",
    "option",
]

T = TypeVar("T")


def option(default: T, help: str, *, metavar: str = "", choices: tuple[str, ...] = ()) -> T:
    """A dataclass field with its default and one sentence of help, in the words of the command line.

    ``metavar`` stands for the value in ``--help`` and ``choices`` are the values there are, where the type alone does
    not say it. The type checker takes the field for its default.
    """
    metadata = {"help": help, "metavar": metavar, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def help_of(field: dataclasses.Field[Any]) -> str:
    """The field's help text, or nothing where it has none."""
    return str(field.metadata.get("help", ""))


def filled(options: type[T], given: Mapping[str, Any], owner: str, place: str = "") -> T:
    """The ``options`` of ``owner`` with what was given. Raises ``BadInput`` for an option that there is not."""
    known = getattr(options, "__dataclass_fields__", {})
    if unknown := sorted(given.keys() - known.keys()):
        names = ", ".join(known) or "none"
        raise BadInput(f"unknown option {unknown[0]!r} of {owner}: its options are {names}", place=place)
    return options(**given)


# --- when work must end ---


@dataclasses.dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of the wall clock (`time.perf_counter`). A deadline only ends work: limits of work decide what is done
    before, so that a plan made in time is the same everywhere."""

    at: float = math.inf

    @staticmethod
    def after(seconds: float) -> Deadline:
        return Deadline(time.perf_counter() + seconds)

    @property
    def left(self) -> float:
        """Seconds until then, at least zero."""
        return max(0.0, self.at - time.perf_counter())

    @property
    def over(self) -> bool:
        return time.perf_counter() >= self.at

    def part(self, share: float) -> Deadline:
        """The moment at which this share of what is left is over."""
        return Deadline.after(share * self.left) if self.at < math.inf else self


NEVER = Deadline()


# --- on the command line ---

_READERS = {int: ("N", int), float: ("X", float), str: ("NAME", str)}
"""By type: what stands for an option's value, and how it is read."""


def add_options(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """One ``--option`` for each field; what is not given stays out of the namespace's way as None."""
    group = parser.add_argument_group("planner")
    hints = get_type_hints(options)
    for field in dataclasses.fields(options):
        flag = flag_of(field.name)
        default = "none" if field.default in ("", math.inf) else field.default
        text = f"{help_of(field)} (default: {default})".strip().replace("%", "%%")
        if hints[field.name] is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text, default=None)
            continue
        metavar, reader = _READERS.get(hints[field.name], ("NAME", str))
        metavar = field.metadata.get("metavar") or metavar
        choices = field.metadata.get("choices") or None
        group.add_argument(flag, dest=field.name, type=reader, metavar=metavar, choices=choices, help=text)


def flag_of(name: str) -> str:
    """A field's name as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def given_options(chosen: argparse.Namespace) -> dict[str, Any]:
    """The options that were given; raises ``BadInput`` for numbers no planner can take."""
    given = {f.name: getattr(chosen, f.name) for f in dataclasses.fields(chosen.options)}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, (int, float)) and not value >= 0:
            raise BadInput(f"{flag_of(name)} must not be negative", value)
        if isinstance(value, int) and value > MAX_BYTES:
            raise BadInput(f"{flag_of(name)} is at most 2^63-1", value)
    return given


def model_options(chosen: argparse.Namespace) -> dict[str, Any]:
    """What is said of a model, or its file, by option."""
    names = ("ranks", "rank", "shape", "fetch", "feed", "views", "in_place")
    return {name: getattr(chosen, name) for name in names}
