"""SOURCE on the command line: a graph, and the plan that comes with it if there is one."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightship import sources
from tightship.errors import BadInput, TightshipError
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.serde import load_any

__all__ = ["Source", "load_source", "users_code", "writable"]

_FORMS = (
    "a source is module:factory, model.onnx, a graph.pb, a module.txt of HLO, or a graph.json or plan.json of "
    "tightship's; "
    "factory() returns (model, sample), (model, loss_fn, sample), (model, loss_fn, optimizer, sample) "
    "or a mapping with these keys, where train=False stands for a forward pass alone"
)
_TENSORFLOW = ("shape", "fetch", "feed"), "a graph.pb, .pbtxt or .meta of TensorFlow's"
_OF = {
    ".onnx": (("shape", "views", "in_place"), "a model.onnx"),
    ".pb": _TENSORFLOW,
    ".pbtxt": _TENSORFLOW,
    ".meta": _TENSORFLOW,
}
"""By ending: the options for files of models, and what such a file is called."""
_KEYS = ("model", "loss_fn", "optimizer", "sample")
_MAPPED = (*_KEYS, "train")


@dataclass(frozen=True)
class Source:
    """What a SOURCE holds; ``plan`` only where it is a plan's file, ``program`` only where it is an ONNX model's or a
    TensorFlow graph's, ``captured`` (a program of PyTorch's) and ``parts`` (what the factory returned, by key) where
    it is a model."""

    graph: Graph
    plan: Plan | None = None
    program: Any = None
    captured: Any = None
    parts: Mapping[str, Any] | None = None


def load_source(text: str, options: Mapping[str, Any] | None = None) -> Source:
    """Read SOURCE; ``options`` are those given for a model's file. Raises ``BadInput`` for whatever is wrong
    with it, never anything else."""
    given = {name: value for name, value in (options or {}).items() if value is not None}
    allowed, _ = _OF.get(Path(text).suffix, ((), ""))
    if unknown := [n for n in given if n not in allowed]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in unknown)
        kinds = " or ".join(dict.fromkeys(w for a, w in _OF.values() if set(unknown) <= set(a)))
        raise BadInput(f"{names}: for {kinds or 'one kind of file'} only", text, "SOURCE")
    if allowed:
        program = (sources.read_onnx if text.endswith(".onnx") else sources.read_graphdef)(text, **given)
        return Source(program.graph, program=program)
    if text.endswith((".pt2", ".pt", ".pth", ".bin", ".ckpt", ".pkl")):
        rule = "files that may hold code are not opened: load it in a factory() that returns (model, sample)"
        raise BadInput(rule, text, "SOURCE")
    if text.endswith(".py"):
        named = f"a model is named as module:factory, such as {Path(text).stem}:step"
        raise BadInput(named, text, "SOURCE")
    if text.endswith(".json") or (os.path.exists(text) and ":" not in text):
        return _from_file(text)
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise BadInput(_FORMS, text, "SOURCE")
    return _captured(_factory(module, name, text), text)


def writable(path: str | None, what: str) -> Path | None:
    """The path, if a file can be written there. Said before the work is done, not after it."""
    if path is None:
        return None
    target = Path(path)
    try:
        if target.is_dir():
            raise BadInput("what is written is a file, not a folder", path, what)
        if not target.parent.is_dir():
            raise BadInput("a file is written into a folder that exists", str(target.parent), what)
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            raise BadInput("a file is written where you may write", path, what)
    except OSError as error:
        raise BadInput(f"the file can be written ({error.strerror})", path, what) from error
    return target


# --- files ---


def _from_file(path: str) -> Source:
    plan, graph = load_any(path)
    if graph is None:
        raise BadInput("a plan's file carries the graph it was made for", "none", path)
    return Source(graph, plan)


# --- module:factory ---


def _factory(module: str, name: str, text: str) -> Any:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with users_code(f"importing {module!r}", text):
        if not _there(module):
            rule = f"there is no module {module!r}; modules are found from the current folder"
            raise BadInput(rule, folder, text)
        found: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise BadInput(f"{module!r} has no attribute {part!r}", place=text)
        found = getattr(found, part)
    if not callable(found):
        raise BadInput("a factory is a function without arguments", type(found).__name__, text)
    return found


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package it would be in
        return False


def _captured(factory: Any, text: str) -> Source:
    with users_code("the factory", text):
        made = factory()
    parts = _parts(made, text)
    with users_code("running the model on its sample", text):
        made = sources.captured(**parts)
    return Source(made.graph, captured=made, parts=parts)


def _parts(made: Any, text: str) -> dict[str, Any]:
    """What a factory returned, by key."""
    many = isinstance(made, (tuple, list))
    if isinstance(made, Mapping):
        if not {"model", "sample"} <= set(made) <= set(_MAPPED):
            raise BadInput(f"a factory's mapping has keys of {', '.join(_MAPPED)}", list(made), text)
        if not isinstance(made.get("train", True), bool):
            raise BadInput("train is True or False", made["train"], text)
        parts = dict(made)
    elif many and 2 <= len(made) <= len(_KEYS):
        names = {2: ("model", "sample"), 3: ("model", "loss_fn", "sample"), 4: _KEYS}[len(made)]
        parts = dict(zip(names, made, strict=True))
    else:
        shown = f"{type(made).__name__} of {len(made)}" if many else type(made).__name__
        raise BadInput(_FORMS, shown, text)
    return {"train": True} | {key: parts.get(key) for key in _KEYS} | parts


@contextmanager
def users_code(what: str, text: str) -> Iterator[None]:
    """Whatever a user's code raises is the user's to know: which exception, and on which line."""
    try:
        yield
    except TightshipError:
        raise
    except (Exception, SystemExit) as error:
        message = " ".join(str(error).split())
        said = f"{type(error).__name__}: {message}" if message else type(error).__name__
        where = f", at {place}" if (place := _line(error)) else ""
        raise BadInput(f"{what} raised {said}{where}", place=text) from error


def _line(error: BaseException) -> str:
    """The line that an exception came from: the user's deepest one, else the deepest there is."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename)}:{error.lineno}"
    library = os.path.dirname(os.__file__) + os.sep
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    machinery = (package, "<frozen", library + "importlib", library + "contextlib.py")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(machinery)]
    own = [f for f in frames if "site-packages" not in f.filename]
    frame = (own or frames)[-1:]
    return f"{_short(frame[0].filename)}:{frame[0].lineno}" if frame else ""


def _short(path: str) -> str:
    """A path from the current folder, or where that leads up and away, its last two parts."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else os.sep.join(path.split(os.sep)[-2:])
