"""What graphs are made from: models, ONNX files, TensorFlow's graphs, files of tightship's. Importing this file is
light: a framework is imported when its function is called."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightship.errors import BadInput, TightshipError, Unsupported
from tightship.files import begins_with
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.serde import load_any

if TYPE_CHECKING:
    import torch

    from tightship.frontends.onnx.lower import Program as OnnxProgram
    from tightship.frontends.tensorflow.program import Program as GraphDefProgram
    from tightship.frontends.tflite import Program as TfliteProgram
    from tightship.frontends.torch.program import Program
    from tightship.frontends.torch.structure import LossFn

__all__ = [
    "FILES", "ModelStep", "Source", "load_source", "load_step", "need_torch", "read_graphdef", "read_keras",
    "read_model", "read_onnx", "read_tflite", "torch_saved", "users_code",
]  # fmt: skip


def need_torch(what: str) -> None:
    """Raise ``Unsupported`` naming ``what`` is asked for, where PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise Unsupported(what, "PyTorch is not installed", "pip install 'tightship[torch]'")


# --- models ---


@dataclass(frozen=True)
class ModelStep:
    """One step of ``model`` on ``sample``: with ``loss_fn`` or ``optimizer`` the training step that `tightship.fit`
    runs, without both the forward and backward pass, without ``train`` the forward pass in evaluation mode.
    ``notes`` are on how ranks divide the model."""

    model: torch.nn.Module | torch.export.ExportedProgram
    sample: object
    loss_fn: LossFn | torch.nn.Module | None = None
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    train: bool = True
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        need_torch("capturing a model")
        if not self.train and (self.loss_fn is not None or self.optimizer is not None):
            raise BadInput("train=False is a forward pass alone: it takes no loss_fn and no optimizer")

    def program(self, cache: Path | str | None = "default", seconds: float = math.inf) -> Program:
        """Its graph, with times (measured, or modeled for models without data), and how PyTorch runs it. ``seconds``:
        as for `profile.profile`."""
        return self.timed(self._captured(self.sample), cache, seconds)

    def timed(
        self, program: Program, cache: Path | str | None = "default", seconds: float = math.inf
    ) -> Program:
        """A program of this model's ops with times."""
        from tightship.execute import profile
        from tightship.frontends.torch import compat, compat_distributed
        from tightship.frontends.torch.capture.step import module_of

        model = module_of(self.model)
        tensors = [*model.parameters(), *model.buffers()]
        if compat_distributed.imagined_ranks() or any(t.is_meta or compat.is_fake(t) for t in tensors):
            return profile.model(program)
        return profile.profile(program, cache=cache, seconds=seconds)

    def batch_size(self, dim: int = 0) -> int:
        """The sample's size in the dimension that is the batch."""
        from tightship.frontends.torch.structure import batch_size

        return batch_size(self.sample, dim)

    def graph_at(self, batch: int, dim: int = 0) -> Graph:
        """The graph at another batch size, captured without data and with modeled times; ``dim`` is the dimension of
        the sample's tensors that is the batch."""
        from tightship.execute import profile
        from tightship.frontends.torch.structure import resized

        return profile.model(self._captured(resized(self.sample, batch, dim))).graph

    def _captured(self, sample: object) -> Program:
        """The program at ``sample``, not yet timed."""
        from tightship.frontends.torch.capture.step import (
            capture_forward,
            capture_loss,
            capture_step,
            module_of,
        )

        model = module_of(self.model)
        if not self.train:
            return capture_forward(model, sample)
        if self.loss_fn is None and self.optimizer is None:
            return capture_loss(model, sample)
        return capture_step(model, self.loss_fn, self.optimizer, sample)


def torch_saved(program: object) -> dict[str, frozenset[int]]:
    """What PyTorch's partitioner saves at each budget, by name; empty for what is not captured from a model of
    PyTorch's, and where it does not take the graph."""
    try:
        from tightship.frontends.torch.capture.joint import saved_sets
        from tightship.frontends.torch.program import Program
    except ImportError:
        return {}
    if not isinstance(program, Program):
        return {}
    try:
        return {f"torch {budget:g}": saved for budget, saved in saved_sets(program).items()}
    except TightshipError:
        return {}


# --- files of models ---


def read_onnx(
    path: str | os.PathLike[str],
    shape: str | Mapping[str, Any] | None = None,
    *,
    views: bool = True,
    in_place: str = "onnxruntime",
) -> OnnxProgram:
    """An ONNX model and its graph (``.graph``): see `tightship.frontends.onnx.lower.lower`.

    ``shape`` gives sizes to symbolic dimensions: ``batch=4,seq=128``, or a mapping. Weights are not loaded.
    """
    try:
        from tightship.frontends.onnx.load import read
        from tightship.frontends.onnx.lower import lower
    except ImportError as error:
        instead = "pip install 'tightship[onnx]'"
        raise Unsupported("reading ONNX", f"{error.name} is not installed", instead) from error
    return lower(read(path), shape, views=views, in_place=in_place)


def read_graphdef(
    path: str | os.PathLike[str],
    shape: str | Iterable[str] | Mapping[str, Any] | None = None,
    *,
    fetch: str | Iterable[str] | None = None,
    feed: str | Iterable[str] | None = None,
) -> GraphDefProgram:
    """A TensorFlow graph and its graph here (``.graph``): see `tightship.frontends.tensorflow.lower.lower`.

    ``shape`` gives sizes to placeholders: ``x=8x32``, or a mapping. Nothing in the file is run.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # it says much when it is imported
    try:
        from tightship.frontends.tensorflow.load import read
        from tightship.frontends.tensorflow.lower import lower
    except ImportError as error:
        instead = "pip install 'tightship[tensorflow]'"
        raise Unsupported("reading TensorFlow's graphs", "TensorFlow is not installed", instead) from error
    return lower(read(path), shape, fetch=fetch, feed=feed)


def read_keras(
    path: str | os.PathLike[str], shape: str | Iterable[str] | Mapping[str, Any] | None = None
) -> GraphDefProgram:
    """The forward pass of a Keras model's file, as a TensorFlow graph with its weights as constants, and its graph
    here: see `tightship.frontends.tensorflow.keras_file`. ``shape`` gives sizes to inputs: ``x=8x32``, or a mapping;
    and to results of the graph that follow from data: ``node:0=5``.
    """
    from tightship.frontends.tensorflow.keras_file import check_archive, check_hdf5
    from tightship.frontends.tensorflow.keras_file import read_keras as read

    (check_hdf5 if Path(path).suffix in _HDF5 else check_archive)(path)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        from tightship.frontends.tensorflow.lower import lower
        from tightship.frontends.tensorflow.shapes import shapes_given
    except ImportError as error:
        instead = "pip install 'tightship[tensorflow]'"
        raise Unsupported("reading Keras models", "TensorFlow is not installed", instead) from error
    given = shapes_given(shape)
    results = {name: sizes for name, sizes in given.items() if ":" in name}
    return lower(read(path, {n: sizes for n, sizes in given.items() if n not in results}), results)


def read_tflite(path: str | os.PathLike[str]) -> TfliteProgram:
    """A TensorFlow Lite model and its graph (``.graph``): see `tightship.frontends.tflite.lower`."""
    from tightship.frontends.tflite import lower, read

    return lower(read(path))


@dataclass(frozen=True)
class _FileKind:
    """A kind of file that holds a model: what reads it, its options on the command line, and what it is called."""

    read: Callable[..., OnnxProgram | GraphDefProgram | TfliteProgram]
    options: tuple[str, ...]
    called: str


_ONNX = _FileKind(read_onnx, ("shape", "views", "in_place"), "a model.onnx")
_TENSORFLOW = _FileKind(
    read_graphdef, ("shape", "fetch", "feed"), "a graph.pb, .pbtxt or .meta of TensorFlow's"
)
_KERAS = _FileKind(read_keras, ("shape",), "a model.keras or .h5")
_HDF5 = (".h5", ".hdf5")
_TFLITE = _FileKind(lambda path, shape=None: read_tflite(path), (), "a model.tflite")
_ENDINGS = {
    ".onnx": _ONNX, ".pb": _TENSORFLOW, ".pbtxt": _TENSORFLOW, ".meta": _TENSORFLOW, ".keras": _KERAS,
    ".tflite": _TFLITE, **dict.fromkeys(_HDF5, _KERAS),
}  # fmt: skip


def read_model(
    path: str | os.PathLike[str], shape: Any = None
) -> OnnxProgram | GraphDefProgram | TfliteProgram:
    """The model in a file, of the kind that its ending says; ONNX by default. A SavedModel may be its folder."""
    path = _file_of(path)
    return _ENDINGS.get(Path(path).suffix, _ONNX).read(path, shape)


def _file_of(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The file that a path names: of TensorFlow's folder for a SavedModel its graph."""
    inside = os.path.join(path, "saved_model.pb")
    return inside if os.path.isfile(inside) else path


# --- SOURCE: any of them, by a text ---

FILES = (
    "model.onnx, a graph.pb of TensorFlow's, a model.keras, .h5 or .tflite, a module.txt of HLO, or a graph.json or "
    "plan.json of tightship's"
)
"""The files that a SOURCE may be, in the words of the command line."""
_RETURNS = (
    "factory() returns (model, sample), (model, loss_fn, sample), (model, loss_fn, optimizer, sample) "
    "or a mapping with these keys, where train=False stands for a forward pass alone"
)
_NOT_READ = {
    ".ort": "onnxruntime's own format is not read: give the model.onnx that it was made of",
    **dict.fromkeys(
        (".safetensors", ".gguf"), "weights without a model: load them in a factory() and name that"
    ),
}
_CODE = (".pt2", ".pt", ".pth", ".bin", ".ckpt", ".pkl")
_KEYS = ("model", "loss_fn", "optimizer", "sample")


@dataclass(frozen=True)
class Source:
    """What a SOURCE holds: ``plan`` where it is a plan's file, ``program`` where it is a model (with ``step``) or a
    model's file."""

    graph: Graph
    plan: Plan | None = None
    program: OnnxProgram | GraphDefProgram | TfliteProgram | Program | None = None
    step: ModelStep | None = None
    took: float = 0.0


def load_source(text: str, options: Mapping[str, Any] | None = None, *, seconds: float = math.inf) -> Source:
    """Read SOURCE; ``options`` are those given for a model's file. A model's ops are measured in ``seconds``, as
    `profile.profile` says, of which ``took`` are gone when it is read. Raises ``BadInput`` for whatever is wrong
    with it, never anything else."""
    given = {name: value for name, value in (options or {}).items() if value is not None}
    text = os.fspath(_file_of(text))
    kind = _ENDINGS.get(Path(text).suffix)
    ranks = {n: given.pop(n) for n in _RANKS if n in given}
    if ranks and (":" not in text or kind is not None):
        raise BadInput(f"--{next(iter(ranks))} requires module:factory as SOURCE", place=text)
    if unknown := [n for n in given if kind is None or n not in kind.options]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in unknown)
        kinds = " or ".join(
            dict.fromkeys(k.called for k in _ENDINGS.values() if set(unknown) <= {*k.options})
        )
        raise BadInput(f"{names} requires {kinds or 'one kind of file'}", place=text)
    if os.path.isfile(text) and text.endswith(".hlo.pb"):  # as XLA's dumps are called
        from tightship.hlo.text import BINARY

        raise BadInput(BINARY, place=text)
    if kind is not None:
        program = kind.read(text, **given)
        return Source(program.graph, program=program)
    if os.path.isfile(text) and (fault := _NOT_READ.get(Path(text).suffix)):
        raise BadInput(fault, place=text)
    if os.path.isfile(text) and text.endswith(".mlir"):
        from tightship.hlo.text import STABLE_HLO  # here, as few sources are of HLO

        raise BadInput(STABLE_HLO, place=text)
    if text.endswith(_CODE):
        raise BadInput(
            "cannot open a file that may hold code: load it in a factory() and name that", place=text
        )
    if text.endswith(".py"):
        raise BadInput(
            f"a Python file is no source: name a factory in it, such as {Path(text).stem}:step", place=text
        )
    if text.endswith(".json") or (os.path.exists(text) and ":" not in text):
        if not text.endswith(".json") and (first := begins_with(text, 64).lstrip()) and first[:1] != b"{":
            raise BadInput(f"unknown kind of file: a source is module:factory, {FILES}", place=text)
        plan, graph = load_any(text)
        if graph is None:
            raise BadInput(
                "the plan's file does not carry its graph: write it with plan --output", place=text
            )
        return Source(graph, plan)
    step = load_step(text, **ranks)
    with users_code("running the model on its sample", text):
        began = time.perf_counter()
        captured = step.program(seconds=seconds)
    return Source(captured.graph, program=captured, step=step, took=time.perf_counter() - began)


def load_step(text: str, *, as_it_is: bool = False, **ranks: int) -> ModelStep:
    """The model and what comes with it that ``module:factory`` makes, of one of the ``ranks`` given (``ranks``,
    ``rank``): divided as a plan does it, or, ``as_it_is``, as torch does. Raises as `load_source`."""
    module, colon, name = text.partition(":")
    if as_it_is and not colon and (Path(text).suffix in {*_ENDINGS, ".json", ".txt"} or os.path.exists(text)):
        raise BadInput(
            "a model's file has no step to run: give module:factory, or see what the file needs with tightship plan",
            place=text,
        )
    if not colon or not module or not name:
        raise BadInput(f"unknown source {text!r}: a source is module:factory, {FILES}; {_RETURNS}")
    factory = _factory(module, name, text)
    if ranks:
        _imagine(**ranks)
    with users_code("the factory", text):
        returned = factory()
    step = _step(returned, text)
    if ranks:
        with users_code("dividing the model among ranks", text):
            if as_it_is:
                from tightship.execute.blocks import fully_sharded

                fully_sharded(step.model, step.optimizer)
            else:
                step = _divided(step)
    return step


_RANKS = ("ranks", "rank")


def _imagine(ranks: int = 0, rank: int = 0) -> None:
    """Makes this process one of so many ranks, of which there are no others."""
    need_torch("imagining ranks")
    from tightship.frontends.torch import compat_distributed

    if not ranks:
        raise BadInput("--rank requires --ranks of 2 or more")
    if ranks < 2:
        raise BadInput("a number of ranks is 2 or more (leave it out for one process)", ranks, "--ranks")
    if not 0 <= rank < ranks:
        raise BadInput(f"no such rank: of {ranks}, they count from 0 to {ranks - 1}", rank, "--rank")
    compat_distributed.imagine_ranks(rank, ranks)


def _divided(step: ModelStep) -> ModelStep:
    """The step of one rank of those imagined."""
    from tightship.execute.replicas import imagined
    from tightship.frontends.torch.structure import loss_function

    has_loss = step.loss_fn is not None or step.optimizer is not None
    loss = loss_function(step.loss_fn, step.sample) if has_loss else None
    model, loss, notes = imagined(step.model, step.optimizer, loss)
    return replace(step, model=model, loss_fn=loss, notes=notes)


def _factory(module: str, name: str, text: str) -> Any:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with users_code(f"importing {module!r}", text):
        if not _exists(module):
            raise BadInput(f"no module {module!r} in {folder} or on Python's path", place=text)
        value: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(value, part):
            raise BadInput(f"{module!r} has no attribute {part!r}", place=text)
        value = getattr(value, part)
    if not callable(value):
        raise BadInput(f"{name!r} is no function but of type {type(value).__name__}: {_RETURNS}", place=text)
    return value


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package it would be in
        return False


def _step(returned: Any, text: str) -> ModelStep:
    """What a factory returned, by key."""
    many = isinstance(returned, (tuple, list))
    if isinstance(returned, Mapping):
        if unknown := set(returned) - {*_KEYS, "train"}:
            keys = ", ".join(sorted(map(repr, unknown)))
            raise BadInput(f"the factory's mapping has unknown keys {keys}: {_RETURNS}", place=text)
        if missing := {"model", "sample"} - set(returned):
            raise BadInput(
                f"the factory's mapping lacks {', '.join(sorted(missing))}: {_RETURNS}", place=text
            )
        if not isinstance(returned.get("train", True), bool):
            raise BadInput(f"train is {returned['train']!r}: it must be True or False", place=text)
        return ModelStep(**returned)
    if many and 2 <= len(returned) <= len(_KEYS):
        names = {2: ("model", "sample"), 3: ("model", "loss_fn", "sample"), 4: _KEYS}[len(returned)]
        return ModelStep(**dict(zip(names, returned, strict=True)))
    kind = f"{type(returned).__name__} of {len(returned)}" if many else type(returned).__name__
    raise BadInput(f"the factory returned a {kind}: {_RETURNS}", place=text)


@contextmanager
def users_code(what: str, text: str) -> Iterator[None]:
    """Whatever a user's code raises is the user's to know: which exception, and on which line."""
    try:
        yield
    except TightshipError:
        raise
    except (Exception, SystemExit) as error:
        try:
            message = " ".join(str(error).split())
        except Exception:  # as its own text does
            message = ""
        said = f"{type(error).__name__}: {message}" if message else type(error).__name__
        where = f", at {place}" if (place := _line(error)) else ""
        raise BadInput(f"{what} raised {said}{where}", place=text) from error


def _line(error: BaseException) -> str:
    """The line that an exception came from: the user's deepest one, else the deepest there is."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename)}:{error.lineno}"
    library = os.path.dirname(os.__file__) + os.sep
    package = os.path.dirname(os.path.abspath(__file__))
    machinery = (package, "<frozen", library + "importlib", library + "contextlib.py")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(machinery)]
    own = [f for f in frames if "site-packages" not in f.filename]
    frame = (own or frames)[-1:]
    return f"{_short(frame[0].filename)}:{frame[0].lineno}" if frame else ""


def _short(path: str) -> str:
    """A path from the current folder, or where that leads up and away, its last two parts."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else os.sep.join(path.split(os.sep)[-2:])
