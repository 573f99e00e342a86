"""Modules of HLO in slices: whether, and into how many; and what XLA makes of them on the CPU, if JAX is installed.

`tightship.hlo.split` finds the regions and writes them; here is decided how many are taken, and asked whether the
results are equal.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from tightship.baselines.xla_remat import Result
from tightship.errors import Unsupported
from tightship.hlo import Module, flattened, to_text
from tightship.hlo.assign.order import reordered
from tightship.hlo.module import inlined
from tightship.hlo.split import Choice, choices
from tightship.planners.default import EXACT, ROUNDING
from tightship.units import format_bytes

__all__ = ["InSlices", "Xla", "advice", "planned", "prepared"]

_TYPES: Final = {"f32": "float32", "f64": "float64", "f16": "float16", "pred": "bool"} | {
    f"{k}{n}": f"{'u' * (k == 'u')}int{n}" for k in "su" for n in (8, 16, 32, 64)
}
_SMALL: Final = 16
"""Random integers are below this: they are mostly indices."""


def prepared(module: Module) -> Module:
    """A module as slices are looked for in it: calls inlined, and in the best order found if it has no schedule."""
    whole = flattened(inlined(module))
    return whole if whole.scheduled else reordered(whole)[0]


# --- what XLA makes of a module ---


@dataclass(frozen=True)
class Xla:
    """A module as XLA compiles it for the CPU, which schedules and fuses it anew. Raises ``Unsupported`` for what it
    does not take."""

    module: Module

    @cached_property
    def executable(self) -> Any:
        if importlib.util.find_spec("jax") is None:
            raise Unsupported(
                "allow=split of a module of HLO", "JAX, whose XLA says whether results are equal, is not installed",
                "install it, or give split-rounding",
            )  # fmt: skip
        import jax
        from jax._src.lib import xla_client
        from jaxlib import _hlo

        devices = jax.devices("cpu")[:1]
        try:
            read = _hlo.hlo_module_from_text(to_text(self.module))
            proto = _hlo.XlaComputation(read.as_serialized_hlo_module_proto())
            text = xla_client._xla.mlir.xla_computation_to_mlir_module(proto)
            options = xla_client.CompileOptions()
            return devices[0].client.compile_and_load(text, xla_client.DeviceList(tuple(devices)), options)
        except (RuntimeError, ValueError, AttributeError, TypeError) as error:
            raise Unsupported(
                f"XLA's compilation of {self.module.name}", (str(error).splitlines() or [repr(error)])[0],
                'give the module as JAX hands it to XLA: jax.jit(f).lower(...).as_text("hlo")',
            ) from error  # fmt: skip

    @cached_property
    def temporaries(self) -> int:
        """Bytes that it allocates beside arguments and results."""
        return int(self.executable.get_compiled_memory_stats().temp_size_in_bytes)

    @cached_property
    def outputs(self) -> tuple[Any, ...]:
        """What it computes from random data, which is the same for modules with the same parameters."""
        import jax

        random = np.random.default_rng(0)
        given = [jax.numpy.asarray(_random(random, p.shape)) for p in self.module.entry.parameters]
        found = self.executable.execute_sharded(given).disassemble_into_single_device_arrays()
        return tuple(np.asarray(rows[0]) for rows in found)

    def equals(self, other: Xla) -> bool:
        """Whether both give the same bits."""
        rows = zip(self.outputs, other.outputs, strict=True)
        return all(a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in rows)


def _random(random: np.random.Generator, shape: Any) -> Any:
    if shape.dtype not in _TYPES:
        raise Unsupported(
            f"random data of type {shape.dtype}", "numpy has no such type", "give split-rounding"
        )
    kind = np.dtype(_TYPES[shape.dtype])
    if kind.kind == "f":
        return random.standard_normal(shape.dims).astype(kind)
    return random.integers(0, 2 if kind.kind == "b" else _SMALL, shape.dims).astype(kind)


# --- whether, and into how many ---


@dataclass(frozen=True)
class InSlices:
    """The module that is planned, and its plan; ``choice``: what is in slices in it, None if nothing is; ``notes``
    say it, or why nothing is."""

    module: Module
    result: Result
    choice: Choice | None = None
    notes: tuple[str, ...] = ()

    def rows(self) -> dict[str, Any]:
        """What is in slices, for programs."""
        assert self.choice is not None
        return {
            "split": [
                {
                    "seed": region.seed,
                    "instructions": list(region.ops),
                    "slices": count,
                    "rounds": region.rounds,
                }
                for region, count in self.choice.regions
            ]
        }


def planned(module: Module, limit: int, plan_of: Callable[[Module], Result], mode: str) -> InSlices:
    """A `prepared` module planned within a limit, in slices where it needs them, as few as it allows. ``mode``:
    `EXACT`, then XLA gives the same bits on random data, or `ROUNDING`.

    Where nothing is within the limit, the least that was reached. Raises ``Unsupported`` where bits cannot be
    compared.
    """
    best = InSlices(module, plan_of(module))
    if best.result.met:
        return best
    whole, other = Xla(module), 0

    def same(choice: Choice) -> bool:
        nonlocal other
        equal = mode == ROUNDING or Xla(choice.module).equals(whole)
        other += not equal
        return equal

    for choice in choices(module, limit, rounding=mode == ROUNDING, believed=same):
        found = plan_of(choice.module)
        if found.peak_after < best.result.peak_after:
            best = InSlices(choice.module, found, choice, tuple(_notes(module, choice, mode)))
        if best.result.met:
            return best
    if best.choice is not None:
        said = f"in slices {format_bytes(best.result.peak_after)} was the least that was reached"
    else:
        said = "no instructions of the entry can be computed in slices that need less"
    left = f"; {other} other ways give other bits in XLA (allow=split-rounding takes them)" if other else ""
    return replace(best, notes=(*best.notes, f"split: {said}{left}"))


def _notes(module: Module, choice: Choice, mode: str) -> Iterator[str]:
    for region, count in choice.regions:
        names, shape = list(region.ops), region.seed
        rounding = "; sums over slices round otherwise than in one piece" if region.rounds else ""
        yield (
            f"split: {len(names)} instructions from {names[0]} to {names[-1]}, around {shape}, in a loop of {count} "
            f"slices{rounding}"
        )
    if mode == EXACT:
        yield "split: the same bits in XLA on the CPU, on random data"


def advice(module: Module, limit: int, allow: str) -> tuple[str, ...]:
    """What slices would come to where they were not allowed; nothing where they do not help."""
    whole = prepared(module)
    *_, last = (None, *choices(whole, limit, rounding=True))
    if last is None:
        return ()
    way = ROUNDING if last.rounds else EXACT
    count = sum(len(region.ops) for region, _ in last.regions)
    return (
        f"splitting (allow={allow},{way}): {format_bytes(last.peak)} then, {count} instructions in loops of up to "
        f"{last.most} slices",
    )
