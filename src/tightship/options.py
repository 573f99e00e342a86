"""An option of a planner: a field of its ``Options`` dataclass that carries its own help text."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

__all__ = ["help_of", "option"]

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
