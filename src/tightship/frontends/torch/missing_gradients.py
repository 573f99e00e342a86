"""Parameters that a step leaves without the gradient that eager's backward pass would leave in them: those of another
module, and those that no optimizer of the step holds. In turns of several models nobody asks for them. An optimizer
that would step by them alone would train nothing without a word: then there is a warning.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from tightship.frontends.torch import compat_optimizers

__all__ = ["MissingGradients", "leave_out"]


class MissingGradients(UserWarning):
    """An optimizer has stepped parameters of which a step of `fit` has left out the gradients."""


_left: dict[int, weakref.ref[torch.Tensor]] = {}


def leave_out(tensors: Iterable[torch.Tensor]) -> None:
    """Notes tensors that get no gradient in a step although its loss depends on them."""
    for t in tensors:
        _left[id(t)] = weakref.ref(t)
    if _left:
        compat_optimizers.watch_steps(_stepping)


def _stepping(optimizer: Any, closure: Any) -> None:
    """Called before an optimizer's step, which makes gradients itself where it has a ``closure``."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if closure is not None or any(p.grad is not None for p in own):
        return
    lost = [p for p in own if (known := _left.get(id(p))) is not None and known() is p]
    for p in lost:  # said once
        del _left[id(p)]
    if lost:
        many = f"{len(lost)} of its parameters" if len(lost) > 1 else "a parameter"
        warnings.warn(
            f"{type(optimizer).__name__}.step changes nothing: a step of fit leaves no gradient in {many}, on which "
            "its loss depends; give fit all optimizers, as a list, and a module that has all parameters",
            MissingGradients,
            stacklevel=4,
        )
