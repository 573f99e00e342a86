"""A planner's options as command-line options: the fields of its dataclass, with their types, defaults and help."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, get_type_hints

from tightship.errors import BadInput
from tightship.options import help_of
from tightship.units import MAX_BYTES

__all__ = ["add_options", "flag_of", "given_options", "model_options"]

_READERS = {int: ("N", int), float: ("X", float), str: ("NAME", str)}
"""By type: what stands for an option's value, and how it is read."""


def add_options(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """One ``--option`` for each field; what is not given stays out of the namespace's way as None."""
    group = parser.add_argument_group("planner")
    hints = get_type_hints(options)
    for field in dataclasses.fields(options):
        flag = flag_of(field.name)
        default = "none" if field.default == "" else field.default
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
    """What is said of a model's file, by option."""
    return {name: getattr(chosen, name) for name in ("shape", "fetch", "feed", "views", "in_place")}
