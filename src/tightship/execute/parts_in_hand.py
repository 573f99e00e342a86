"""What code has in hand of parameters that lie in parts on several ranks: between steps whole ones, to which it may
write; in a step nothing but what modules read; and what it is told where a part would be taken for the whole.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tightship.errors import Unsupported
from tightship.frontends.torch import compat_capture
from tightship.frontends.torch.capture.parts_written import refused
from tightship.frontends.torch.fabric import saves_by_kind
from tightship.frontends.torch.program import tensors_in

__all__ = ["NoParts", "Parts", "Telling", "WrittenThrough", "reading"]


class Reading:
    """Whether the code of a step runs; whether it is this module's own that has parts in hand; and whether a method
    runs that reads whole parameters."""

    active = own = whole = False

    @contextmanager
    def parts(self) -> Iterator[None]:
        before, self.own = self.own, True
        try:
            yield
        finally:
            self.own = before

    def by_caller(self) -> bool:
        """Whether a parameter is read by code between steps, and not by a module that computes with it."""
        computes = self.active or self.whole or torch.compiler.is_compiling() or compat_capture.in_a_module()
        return not computes


reading = Reading()


_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]

Named = tuple[str, Any]
Parts = Mapping[int, tuple[str, weakref.ref[torch.Tensor]]]
"""Names of parameters of which ranks have parts, and these, by id."""


class NoParts(TorchFunctionMode):
    """Refuses what the code of a step computes of parts that it has from elsewhere than an attribute of a module or
    ``parameters()``: they may be taken for whole parameters without an error, where shapes broadcast. And other
    data for what was ``gathered`` of them, a copy."""

    def __init__(self, parts: Parts, gathered: Sequence[Any] = ()) -> None:
        super().__init__()
        self._parts, self._gathered = parts, gathered

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not reading.own:
            if func == _SET_DATA and any(one.has(args[0]) for one in self._gathered):
                raise refused("data set")
            found = (self._parts.get(id(t)) for t in tensors_in((args, kwargs)))
            part = next((row for row in found if row is not None and row[1]() is not None), None)
            if part is not None:
                return self._answer(part[0], func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _answer(name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Of a question that is not for a tensor: whether it is trained, its type."""
        refused = Unsupported(
            f"the parameter {name!r} in the code of a step, read otherwise than by its module's attribute,",
            "there it is this rank's part, and not the whole parameter",
            "read it where the module has it (self.weight), or by parameters()",
        )
        try:
            out = func(*args, **kwargs)
        except RuntimeError as error:  # as shapes do not fit
            raise refused from error
        if next(tensors_in(out), None) is not None:
            raise refused
        return out


class WrittenThrough(torch.Tensor):
    """A whole parameter in the hands of code between steps: a tensor as any other, but that this rank's part of what
    is written to it, or to a view of it, is written to the part of the parameter."""

    base: Any
    to: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            given = [t for t in tensors_in((args, kwargs or {})) if isinstance(t, WrittenThrough)]
            homes = {t.untyped_storage().data_ptr(): t for t in given if t.numel()}
            with torch.no_grad():
                for t in homes.values():
                    shard, part = t.to
                    now = shard.part(t.base.detach().as_subclass(torch.Tensor))
                    if not torch.equal(now, part):
                        part.copy_(now)
        if isinstance(out, torch.Tensor) and type(out) is not torch.Tensor:
            out = out.as_subclass(torch.Tensor)
        source = homes.get(out.untyped_storage().data_ptr()) if isinstance(out, torch.Tensor) else None
        if source is not None and not isinstance(out, WrittenThrough):
            out = out.as_subclass(WrittenThrough)
            out.base, out.to = source.base, source.to
        return out


class Telling:
    """``named_parameters`` of the modules of a model, of any kinds: warns, once, code which is given parts. Those who
    ask of which kind parameters are, to save them, are given what ``seen`` makes of a module's."""

    def __init__(self, seen: Callable[[torch.nn.Module, Iterator[Named]], Iterator[Named]]) -> None:
        self._seen, self._said = seen, False

    def parameters(self, kind: type[torch.nn.Module]) -> Callable[..., Iterator[Named]]:
        def named_parameters(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Iterator[Named]:
            rows = kind.named_parameters(module, *args, **kwargs)
            if reading.active:
                return rows
            level, name = _caller()
            if saves_by_kind(name):
                return self._seen(module, rows)
            if not self._said and name.partition(".")[0] not in ("torch", "tightship"):
                self._said = True
                warnings.warn(_PARTS, stacklevel=level)
            return rows

        return named_parameters


_PARTS = (
    "parameters() gives this rank's parts: what is done element by element is done to all, and an average with "
    "whole weights is of whole ones, which all ranks ask for; a norm or a count is of the part alone; "
    "step.named_parameters() and state_dict() have DTensors, which ask all ranks"
)


def _caller() -> tuple[int, str]:
    """How far away the code is that asks for parameters, by itself or to average weights, and in which module."""
    level, frame = 2, sys._getframe(2)
    passed = torch.nn.Module.__module__, "torch.optim.swa_utils"
    while frame.f_globals.get("__name__") in passed and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level, frame.f_globals.get("__name__", "")
