"""A step in parts, which `fit` runs one after the other: what is done with gradients between them, what a part
depends on of gradients that are there, and what the parts of a step have used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tightship.errors import BadInput, Unsupported
from tightship.execute.interpreter import RunStats
from tightship.execute.prepared import Variant
from tightship.frontends.torch import compat
from tightship.frontends.torch.program import Program, dtype_of
from tightship.plan import Plan

__all__ = ["Loop", "PartRuns", "bytes_of_inputs", "check_gradients", "gradients_of", "layouts"]


@dataclass(frozen=True)
class Loop:
    """What a training loop does around backward pass and update, by torch's own functions and in this order: the
    loss is scaled by ``scaler``, gradients are added up over ``accumulate`` batches, unscaled, looked at
    (``skip_nonfinite``), clipped by their norm and by value."""

    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    scaler: Any = None
    skip_nonfinite: bool = False
    total_norm: Callable[[Mapping[str, torch.Tensor]], torch.Tensor] | None = None
    """Of gradients by name, where each rank has parts of them; otherwise torch's."""

    def check(self) -> None:
        if type(self.accumulate) is not int or self.accumulate < 1:
            fault = "accumulate is the number of batches whose gradients are added up: 1 or more"
            raise BadInput(fault, self.accumulate, "fit")
        for name in ("clip_norm", "clip_value"):
            limit = getattr(self, name)
            if limit is not None and not float(limit) > 0:
                raise BadInput(f"{name} is a limit above 0", limit, "fit")
        if self.scaler is not None and not isinstance(self.scaler, torch.amp.GradScaler):
            raise BadInput("scaler is a torch.amp.GradScaler", type(self.scaler).__name__, "fit")

    @property
    def in_parts(self) -> bool:
        """Whether something is decided by what gradients are, or there are several backward passes."""
        return self.accumulate > 1 or self.scaler is not None or self.skip_nonfinite

    @property
    def clips(self) -> bool:
        return self.clip_norm is not None or self.clip_value is not None

    def norm(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The norm of their gradients, where it is asked for."""
        self._check_dense(parameters)
        if self.clip_norm is None and not self.skip_nonfinite:
            return None
        gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        if self.total_norm is not None:
            return self.total_norm(gradients)
        own = [g.coalesce().values() if g.is_sparse else g for g in gradients.values()]
        return torch.nn.utils.get_total_norm(own)

    def _check_dense(self, parameters: Mapping[str, torch.Tensor]) -> None:
        sparse = next((n for n, p in parameters.items() if p.grad is not None and p.grad.is_sparse), None)
        if sparse is not None and self.clips:
            how = "clip_norm" if self.clip_norm is not None else "clip_value"
            raise Unsupported(
                f"{how} with the sparse gradient of {sparse!r}", "torch's own function clips dense ones alone",
                f"use sparse=False, or leave {how} out",
            )  # fmt: skip

    def clip(self, parameters: Mapping[str, torch.Tensor], norm: torch.Tensor | None) -> None:
        self._check_dense(parameters)
        if self.clip_norm is not None and norm is not None:
            torch.nn.utils.clip_grads_with_norm_(list(parameters.values()), self.clip_norm, norm)
        if self.clip_value is not None:
            torch.nn.utils.clip_grad_value_(list(parameters.values()), self.clip_value)

    def clipped(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        norm = self.norm(parameters)
        self.clip(parameters, norm)
        return norm


def check_gradients(gradients: Mapping[str, torch.Tensor]) -> None:
    """Raises ``Unsupported`` for gradients that are no plain tensors."""
    for n, g in gradients.items():
        if g.layout is not torch.strided or g.requires_grad:
            what = "requires a gradient" if g.requires_grad else f"is {g.layout}"
            raise Unsupported(
                f"the gradient of {n!r}, which {what},", "a planned step adds to dense gradients, without a graph",
                "clear it (optimizer.zero_grad()), or detach it",
            )  # fmt: skip


def layouts(gradients: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    """What a program depends on of gradients that it is given: their strides, and what lies in one storage."""
    homes: dict[int, int] = {}
    keys = [compat.storage_key(g) if not g.is_meta else id(g) for g in gradients.values()]
    for k in keys:
        homes[k] = homes.get(k, 0) + 1
    return tuple(
        (n, g.stride(), (keys.index(k), g.storage_offset()) if homes[k] > 1 else None)
        for (n, g), k in zip(gradients.items(), keys, strict=True)
    )


def gradients_of(program: Program) -> dict[str, torch.Tensor]:
    """Tensors without contents, laid out like the gradients that the program hands back."""
    count = len(program.gradients)
    values = [program.graph.values[v] for v in program.results[len(program.results) - count :]]
    return {
        n: torch.empty_strided(v.shape, v.stride, dtype=dtype_of(v.dtype), device="meta")
        for n, v in zip(program.gradients, values, strict=True)
    }


def bytes_of_inputs(program: Program) -> int:
    graph = program.graph
    homes = {graph.values[s.value].storage for s in program.slots if s.role == "input"}
    return sum(graph.storages[s].size for s in homes)


class PartRuns:
    """The parts of a step that have run since the last update: plans and what was measured, with bytes that stood
    beside them."""

    def __init__(self) -> None:
        self.parts: list[tuple[Plan, RunStats | None, int, int]] = []
        self.between: int | None = None

    def add(self, variant: Variant, beside: int = 0) -> None:
        row = variant.executor.plan, variant.executor.last, beside, variant.unplanned
        if row not in self.parts:  # of many microbatches most are alike
            self.parts.append(row)

    def measure(self) -> dict[str, int | None]:
        if not self.parts:
            return {}
        found: dict[str, int | None] = {
            "unplanned_peak": max(unplanned + beside for _, _, beside, unplanned in self.parts),
            "planned_peak": max(p.peak + beside for p, _, beside, _ in self.parts),
            "arena": max(p.arena for p, _, _, _ in self.parts),
            "between": self.between,
        }
        rows = [(s, beside) for _, s, beside, _ in self.parts if s is not None]
        if len(rows) == len(self.parts):
            found["measured_peak"] = max(self.between or 0, *(s.measured_peak + beside for s, beside in rows))
            found["process_peak"] = max(self.between or 0, *(s.process_peak + beside for s, beside in rows))
            found["outside"] = max(s.heap for s, _ in rows)
            found["misses"] = sum(s.misses for s, _ in rows)
        return found
