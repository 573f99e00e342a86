"""What graphs are made from: models, ONNX files and TensorFlow's graphs. Importing this file is light: a framework
is imported when its function is called."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from tightship.errors import BadInput, Unsupported
from tightship.graph import Graph

__all__ = [
    "capture",
    "captured",
    "graph_at",
    "need_torch",
    "read_graphdef",
    "read_onnx",
    "torch_saved",
]


def need_torch(what: str) -> None:
    """Raise ``Unsupported`` naming ``what`` is asked for, where PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise Unsupported(what, "PyTorch is not installed", "pip install 'tightship[torch]'")


def capture(model: Any, sample: Any, **how: Any) -> Graph:
    """The graph of one step of ``model``, with times, measured or modelled: that of `captured`, whose arguments it
    takes."""
    graph: Graph = captured(model, sample, **how).graph
    return graph


def captured(
    model: Any,
    sample: Any,
    *,
    loss_fn: Any = None,
    optimizer: Any = None,
    train: bool = True,
    cache: Path | str | None = "default",
) -> Any:
    """The program of one step of ``model``: its graph, with times (measured, or modelled for models without data),
    and how PyTorch runs it. What the step is, `tightship.plan` says."""
    program = _program(model, sample, loss_fn, optimizer, train)
    from tightship.execute import profile
    from tightship.frontends.torch import compat
    from tightship.frontends.torch.capture.step import module_of

    model = module_of(model)
    tensors = [*model.parameters(), *model.buffers()]
    if any(t.is_meta or compat.is_fake(t) for t in tensors):
        return profile.model(program)
    return profile.profile(program, cache=cache)


def graph_at(
    model: Any,
    sample: Any,
    batch: int,
    *,
    loss_fn: Any = None,
    optimizer: Any = None,
    train: bool = True,
    dim: int = 0,
) -> Graph:
    """The graph of one step at another batch size, captured without data and with modelled times; ``dim`` is the
    dimension of the sample's tensors that is the batch."""
    need_torch("capturing a model")
    from tightship.execute import profile
    from tightship.frontends.torch.structure import resized

    program = _program(model, resized(sample, batch, dim), loss_fn, optimizer, train)
    graph: Graph = profile.model(program).graph
    return graph


def _program(model: Any, sample: Any, loss_fn: Any, optimizer: Any, train: bool) -> Any:
    """One step of ``model``, not yet timed."""
    need_torch("capturing a model")
    from tightship.frontends.torch.capture.step import capture_forward, capture_loss, capture_step, module_of

    if not train and (loss_fn is not None or optimizer is not None):
        raise BadInput("a step with a loss or an optimizer trains", train, "train")
    model = module_of(model)
    if not train:
        return capture_forward(model, sample)
    if loss_fn is None and optimizer is None:
        return capture_loss(model, sample)
    return capture_step(model, loss_fn, optimizer, sample)


def torch_saved(program: Any) -> dict[str, frozenset[int]]:
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
    except Unsupported:
        return {}


def read_onnx(path: str | os.PathLike[str], shape: Any = None, **options: Any) -> Any:
    """An ONNX model and its graph (``.graph``): see `tightship.frontends.onnx.lower.lower`.

    ``shape`` gives sizes to symbolic dimensions: ``batch=4,seq=128``, or a mapping. Weights are not loaded.
    """
    try:
        from tightship.frontends.onnx.load import read
        from tightship.frontends.onnx.lower import lower
    except ImportError as error:
        raise Unsupported(
            "reading ONNX", f"{error.name} is not installed", "pip install 'tightship[onnx]'"
        ) from error
    return lower(read(path), shape, **options)


def read_graphdef(path: str | os.PathLike[str], shape: Any = None, **options: Any) -> Any:
    """A TensorFlow graph and its graph here (``.graph``): see `tightship.frontends.tensorflow.lower.lower`.

    ``shape`` gives sizes to placeholders: ``x=8x32``, or a mapping. Nothing in the file is run.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # it says much when it is imported
    try:
        from tightship.frontends.tensorflow.load import read
        from tightship.frontends.tensorflow.lower import lower
    except ImportError as error:
        raise Unsupported(
            "reading TensorFlow's graphs",
            "TensorFlow is not installed",
            "pip install 'tightship[tensorflow]'",
        ) from error
    return lower(read(path), shape, **options)
