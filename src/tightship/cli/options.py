"""A planner's options as command-line options: names, types and defaults from its dataclass, help from its
docstring."""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import Any, get_type_hints

from tightship.errors import BadInput
from tightship.options import help_of
from tightship.units import MAX_BYTES

__all__ = ["add_model", "add_options", "documented", "given_options", "model_options"]

_READERS = {int: int, float: float, str: str}
_SHOWN = {"allow": "WAY,…", "hints": "PATTERN=WAY,…"}
"""What stands for the value of an option that is not a name or a number."""


def add_options(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """One ``--option`` for each field; what is not given stays out of the namespace's way as None."""
    group = parser.add_argument_group("planner")
    hints = get_type_hints(options)
    documented_of = documented(options)
    for field in dataclasses.fields(options):
        flag = f"--{field.name.replace('_', '-')}"
        default = "none" if field.default == "" else field.default
        text = f"{help_of(field) or documented_of.get(field.name, '')} (default: {default})".strip().replace(
            "%", "%%"
        )
        if hints[field.name] is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text, default=None)
        else:
            metavar = {int: "N", float: "X"}.get(hints[field.name], _SHOWN.get(field.name, "NAME"))
            reader = _READERS.get(hints[field.name], str)
            group.add_argument(flag, dest=field.name, type=reader, metavar=metavar, help=text)


def given_options(chosen: argparse.Namespace) -> dict[str, Any]:
    """The options that were given; raises ``BadInput`` for numbers no planner can take."""
    given = {f.name: getattr(chosen, f.name) for f in dataclasses.fields(chosen.options)}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, (int, float)) and not value >= 0:
            raise BadInput("a number is not negative", value, f"option --{name.replace('_', '-')}")
        if isinstance(value, int) and value > MAX_BYTES:
            raise BadInput("a number is at most 2^63-1", value, f"option --{name.replace('_', '-')}")
    return given


def add_model(parser: argparse.ArgumentParser) -> None:
    """What can be said of a model.onnx, and of a graph.pb."""
    group = parser.add_argument_group("a model.onnx or a graph.pb")
    text = "sizes of symbolic dimensions, such as batch=4,seq=128, or of a value, such as x=1x3x224x224"
    group.add_argument("--shape", metavar="NAME=N,…", action="append", help=text)
    group = parser.add_argument_group("a graph.pb of TensorFlow's")
    text = "nodes that are run; what they do not need is left out (default: a MetaGraph's train_op, else all)"
    group.add_argument("--fetch", metavar="NAME,…", action="append", help=text)
    text = "nodes besides placeholders whose results are given, and never made again"
    group.add_argument("--feed", metavar="NAME,…", action="append", help=text)
    group = parser.add_argument_group("a model.onnx")
    text = "whether the runtime makes views where it can, or copies (default: views)"
    group.add_argument("--views", action=argparse.BooleanOptionalAction, help=text, default=None)
    text = "what it writes over an input nobody needs: as onnxruntime does, all that is elementwise, or none"
    choices = ("onnxruntime", "elementwise", "none")
    group.add_argument("--in-place", choices=choices, help=f"{text} (default: onnxruntime)")


def model_options(chosen: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(chosen, name) for name in ("shape", "fetch", "feed", "views", "in_place")}


def documented(options: type[Any]) -> dict[str, str]:
    """What a dataclass's docstring says of each field: ``name``, ``other``: text."""
    names = "|".join(re.escape(f.name) for f in dataclasses.fields(options))
    text = " ".join((options.__doc__ or "").split())
    head = rf"((?:``(?:{names})``(?:, )?)+): "
    parts = re.split(head, text)[1:]
    found = {f.name: help_of(f) for f in dataclasses.fields(options) if help_of(f)}
    for subjects, said in zip(parts[::2], parts[1::2], strict=True):
        for name in re.findall(r"``(\w+)``", subjects):
            found[name] = said.strip().rstrip(".").replace("``", "")
    return found
