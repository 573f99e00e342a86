"""Plans and graphs as JSON files with a schema and a version.

A plan's file may carry the graph it was made for; it can then be verified, explained and run alone. Reading
executes nothing, and whatever is wrong with a file is a ``BadInput`` that names the file and the place in it.
Writing is atomic: the file appears complete or not at all.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tightship.errors import BadInput, unreadable
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.serde.documents import (
    GRAPH_FORMAT,
    PLAN_FORMAT,
    VERSION,
    GraphDocument,
    PlanDocument,
    from_graph,
    from_plan,
    to_graph,
    to_plan,
)

__all__ = [
    "GRAPH_FORMAT",
    "LARGEST_FILE",
    "PLAN_FORMAT",
    "VERSION",
    "dumps_graph",
    "dumps_plan",
    "json_schema",
    "load_any",
    "load_graph",
    "load_plan",
    "loads_any",
    "loads_graph",
    "loads_plan",
    "read_bytes",
    "save_graph",
    "save_plan",
    "write_file",
]

LARGEST_FILE = 1 << 30
"""Bytes a file may have to be read."""

PathLike = str | os.PathLike[str]
_T = TypeVar("_T")


def dumps_plan(plan: Plan, graph: Graph | None = None) -> bytes:
    """JSON of a plan, with its graph if given. Raises ``BadInput`` for what could not be read back."""
    if graph is not None and graph.digest != plan.digest:
        raise BadInput(f"cannot save graph {graph.name!r} with a plan made for another", place="graph")
    return _encode(from_plan(plan, graph), PlanDocument, "plan")


def dumps_graph(graph: Graph) -> bytes:
    return _encode(from_graph(graph), GraphDocument, "graph")


def loads_plan(data: bytes, place: str = "plan") -> tuple[Plan, Graph | None]:
    """The plan and, if the document has it, its graph; ``place`` is what messages call the document."""
    return _read(data, PlanDocument, PLAN_FORMAT, place, to_plan)


def loads_graph(data: bytes, place: str = "graph") -> Graph:
    return _read(data, GraphDocument, GRAPH_FORMAT, place, to_graph)


def loads_any(data: bytes, place: str = "document") -> tuple[Plan | None, Graph | None]:
    """Either kind of document: a plan with or without a graph, or a graph alone."""
    if _decode(data, _Header, "", place).format == GRAPH_FORMAT:
        return None, loads_graph(data, place)
    return loads_plan(data, place)


def save_plan(plan: Plan, path: PathLike, graph: Graph | None = None) -> None:
    write_file(path, dumps_plan(plan, graph))


def save_graph(graph: Graph, path: PathLike) -> None:
    write_file(path, dumps_graph(graph))


def load_plan(path: PathLike, limit: int = LARGEST_FILE) -> tuple[Plan, Graph | None]:
    """Read a plan's file of at most ``limit`` bytes."""
    return loads_plan(read_bytes(path, limit), os.fspath(path))


def load_graph(path: PathLike, limit: int = LARGEST_FILE) -> Graph:
    return loads_graph(read_bytes(path, limit), os.fspath(path))


def load_any(path: PathLike, limit: int = LARGEST_FILE) -> tuple[Plan | None, Graph | None]:
    return loads_any(read_bytes(path, limit), os.fspath(path))


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of both documents, by format name."""
    return {
        name: {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(cls)}
        for name, cls in ((PLAN_FORMAT, PlanDocument), (GRAPH_FORMAT, GraphDocument))
    }


# Documents


class _Header(msgspec.Struct):
    format: str = ""
    version: int = 0


def _encode(doc: Any, cls: Any, place: str) -> bytes:
    try:
        data = msgspec.json.encode(doc)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadInput(f"cannot be written as JSON: {error}", place=place) from error
    _decode(data, cls, "", place)  # never write what cannot be read: an index of 2**63, a time of nan
    return data


def _decode(data: bytes, cls: Any, format_: str, place: str) -> Any:
    try:
        return msgspec.json.decode(data, type=cls)
    except RecursionError as error:
        raise BadInput("lists or objects nested too deep", place=place) from error
    except msgspec.ValidationError as error:
        if format_:
            _check_header(_decode(data, _Header, "", place), format_, place)
        raise _located(error, place) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"invalid JSON: {error}", place=place) from error


def _check_header(header: _Header, format_: str, place: str) -> None:
    if header.format != format_:
        raise BadInput(f"format is {header.format!r}, not {format_!r}", place=f"{place}: $.format")
    if header.version != VERSION:
        rule = (
            f"version {header.version} of {format_} cannot be read: this tightship reads version {VERSION}; "
        )
        rule += "write the file again with this version, or read it with the one that wrote it"
        raise BadInput(rule, place=f"{place}: $.version")


def _located(error: msgspec.ValidationError, place: str) -> BadInput:
    """msgspec ends its messages with the path in the document."""
    rule, at, path = str(error).rpartition(" - at `")
    rule, path = (rule, path.rstrip("`")) if at else (path, "$")
    return BadInput(rule[:1].lower() + rule[1:], place=f"{place}: {path}")


def _read(data: bytes, cls: Any, format_: str, place: str, build: Callable[[Any], _T]) -> _T:
    doc = _decode(data, cls, format_, place)
    try:
        return build(doc)
    except BadInput as error:
        error_at = BadInput(error.rule, error.value, f"{place}: {error.place}")
        raise error_at from error


# Files


def read_bytes(path: PathLike, limit: int, what: str = "file") -> bytes:
    """What is in a regular file of at most ``limit`` bytes. Raises ``BadInput`` for all others: a pipe would wait."""
    name = os.fspath(path)
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            raise BadInput("not a regular file", place=name)
        size, data = about.st_size, b""
        if size <= limit:
            with open(path, "rb") as file:
                data = file.read(limit + 1)
    except (OSError, ValueError) as error:
        raise unreadable(error, name) from error
    if max(size, len(data)) > limit:
        raise BadInput(
            f"{what} of {max(size, len(data))} bytes is too large: at most {limit} are read", place=name
        )
    return data


def write_file(path: PathLike, data: bytes) -> None:
    """A new file beside the old one takes its name when it is complete; a link stays a link."""
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():  # a device is written to, not replaced
            target.write_bytes(data)
            return
        beside = target.with_name(f".{target.name[:50]}.{secrets.token_hex(4)}.tmp")
        # Opened this way, and not by tempfile, the file gets the permissions that the umask asks for.
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with open(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, target)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        why = getattr(error, "strerror", None) or error
        raise BadInput(f"cannot write {os.fspath(path)!r}: {why}") from error
