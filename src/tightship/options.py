"""An option of a planner: a field of its ``Options`` dataclass that carries its own help text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from tightship.errors import BadInput

__all__ = ["filled", "help_of", "option"]

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
