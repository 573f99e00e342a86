"""Hooks on parameters: run on stand-ins for gradients where a step's code is captured, as they were registered."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from tightship.errors import Unplannable, Unsupported
from tightship.frontends.torch import compat
from tightship.frontends.torch.program import tensors_in
from tightship.frontends.torch.rerun.arguments import map_tensors, name_of
from tightship.frontends.torch.rerun.calls import READS, SHOWN
from tightship.frontends.torch.rerun.execution import Inner
from tightship.frontends.torch.rerun.function_trace import FunctionTrace
from tightship.frontends.torch.rerun.outcome import settled_key

__all__ = ["GradientHook"]


class GradientHook:
    """A hook on the parameter ``name``, as it was registered: ``fn`` of the gradient or, where ``late``, of the
    parameter when its gradient is there. Equal to others that do the same; ``key`` is None where only running it
    again tells what it does."""

    def __init__(self, name: str, parameter: torch.Tensor, fn: Any, *, late: bool) -> None:
        self.name, self.parameter, self.fn, self.late = name, parameter, fn, late
        self.key = settled_key(fn)
        self.made: list[Any] = []  # weakly, the tensors that it has seen
        self._handles: list[Any] = []
        if str(getattr(fn, "__module__", "")).startswith(("torch.autograd.graph", "torch.distributed")):
            raise Unsupported(
                f"{self}, which torch has put there", "it counts the nodes of autograd, which a planned step has not",
                "remove it; between step.backward(batch) and step.update() (split=True) are all gradients",
            )  # fmt: skip

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GradientHook) or (other.name, other.late) != (self.name, self.late):
            return False
        return other.fn is self.fn if self.key is None or other.key is None else other.key == self.key

    def __hash__(self) -> int:
        return hash((self.name, self.late))

    def __str__(self) -> str:
        how = "register_post_accumulate_grad_hook" if self.late else "register_hook"
        code = getattr(self.fn, "__code__", None)
        where = f" at {os.path.basename(code.co_filename)}:{code.co_firstlineno}" if code is not None else ""
        return f"the hook{where} on the parameter {self.name!r} ({how})"

    def register(
        self, target: Any, trace: FunctionTrace, others: Any, copies: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """On a tensor that stands for the parameter, as ``others``, by number, do for the tensors of ``trace``, and
        ``copies``, by id, for what else it reaches."""

        def called(given: torch.Tensor) -> Any:
            with _InHook(self, trace, others, copies or {}):
                return self.fn(self.parameter if self.late else given)

        how = target.register_post_accumulate_grad_hook if self.late else target.register_hook
        self._handles.append(how(called))

    def remove(self) -> None:
        """From all that stood for the parameter, which would be kept for ever: Python's search for garbage does not
        see what a tensor keeps."""
        while self._handles:
            self._handles.pop().remove()

    def check_kept(self) -> None:
        """Raises ``Unplannable`` if something is held of what it has seen, when all else is gone."""
        if self.key is not None or all(r() is None for r in self.made):
            return
        gc.collect()
        if any(r() is not None for r in self.made):
            raise Unplannable(
                f"{self}, which keeps a gradient or what it has made of one,", _NO_DATA, _BETWEEN
            )


class _InHook(Inner):
    """Inside of a hook: it may compute with tensors that have no data, and not look at them or take them away."""

    def __init__(
        self, hook: GradientHook, trace: FunctionTrace, others: Any, copies: Mapping[int, torch.Tensor]
    ) -> None:
        super().__init__(trace, others)
        self.hook, self.copies = hook, copies

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.copies:
            args, kwargs = map_tensors(lambda t: self.copies.get(id(t), t), (tuple(args), dict(kwargs or {})))
        reads = name_of(func) in READS and any(compat.is_fake(t) for t in tensors_in(args))
        unplannable = Unplannable(
            f"{self.hook}, which reads a gradient ({name_of(func)}),", _NO_DATA, _BETWEEN
        )
        if reads and name_of(func) in SHOWN:
            raise unplannable
        try:
            out = super().__torch_function__(func, types, args, kwargs)
        except Unsupported as no:
            if reads:
                raise unplannable from no
            raise
        self.hook.made += [weakref.ref(t) for t in tensors_in(out) if compat.is_fake(t)]
        return out


_NO_DATA = "gradients are there only when the step has run"
_BETWEEN = (
    "do it between step.backward(batch) and step.update() (fit(…, split=True)), or with ops alone "
    "(total.add_(grad.norm()), where total is a tensor)"
)
