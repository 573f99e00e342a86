"""What the loss of a captured step is: a function's, a module's, the model's own, or a sum of its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tightship.errors import BadInput
from tightship.frontends.torch.structure import flatten

__all__ = ["LossFn", "called", "checked_loss", "loss_function", "summed_output"]

LossFn = Callable[[Any, Any], Any]


def loss_function(loss_fn: Any, batch: Any) -> LossFn:
    """``loss_fn`` as a function of (model, batch). Raises ``BadInput`` where it does not fit the batch."""
    if isinstance(loss_fn, torch.nn.Module):
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
            raise BadInput("a batch for a loss module is (inputs, targets)", type(batch).__name__, "batch")
        return lambda model, pair: loss_fn(model(pair[0]), pair[1])
    if loss_fn is not None:
        if not callable(loss_fn):
            raise BadInput(
                "loss_fn is a function of (model, batch) or a module", type(loss_fn).__name__, "loss_fn"
            )
        return loss_fn
    if not isinstance(batch, Mapping):
        raise BadInput(
            "without loss_fn a batch is a mapping of the model's arguments", type(batch).__name__, "batch"
        )
    return _own_loss


def _own_loss(model: Any, batch: Any) -> Any:
    out = model(**batch)
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise BadInput("without loss_fn the model's output has a loss", type(out).__name__, "loss_fn")
    return loss


def called(model: Any, sample: Any) -> Any:
    """The model's results for a mapping of keyword arguments, a tuple of positional ones, or the one argument."""
    if isinstance(sample, Mapping):
        return model(**sample)
    return model(*sample) if isinstance(sample, (tuple, list)) else model(sample)


def summed_output(model: Any, sample: Any) -> Any:
    """The output's ``loss``, otherwise the sum of its ``logits`` or of its first floating-point tensor."""
    out = called(model, sample)
    for key in ("loss", "logits"):
        found = out.get(key) if isinstance(out, Mapping) else getattr(out, key, None)
        if isinstance(found, torch.Tensor):
            return found if key == "loss" and found.dim() == 0 else found.sum()
    for t in flatten(out):
        if isinstance(t, torch.Tensor) and t.requires_grad:
            return t.sum()
    raise BadInput("the model's output depends on its parameters", type(out).__name__, "model")


def checked_loss(out: Any) -> torch.Tensor:
    """The loss among what a loss function returned. Raises ``BadInput`` unless it is one number with a gradient."""
    loss = out[0] if isinstance(out, tuple) and out else out
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        shown = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise BadInput("the loss is a floating-point tensor with one element", shown, "loss_fn")
    if not loss.requires_grad:
        raise BadInput("the loss depends on a parameter that requires a gradient", place="loss_fn")
    return loss
