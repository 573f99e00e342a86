"""Modules of HLO in slices: whether, and into how many; and what XLA makes of them on the CPU, if JAX is installed.

`tightship.hlo.split` finds the regions and writes them; here is decided how many are taken, and asked whether the
results are equal.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from tightship.baselines.xla_remat import Result
from tightship.cached import cached_property
from tightship.errors import Unsupported
from tightship.hlo import Module, flattened, to_text
from tightship.hlo.assign.advice import Advice
from tightship.hlo.assign.order import reordered
from tightship.hlo.module import inlined
from tightship.hlo.remat.as_plan import graph_before
from tightship.hlo.remat.cost import work_of
from tightship.hlo.remat.lower import bound
from tightship.hlo.remat.peak import module_peak, peak_of
from tightship.hlo.split import Choice, choices
from tightship.hlo.split_check import check_slices
from tightship.planners.default import EXACT, ROUNDING
from tightship.simulate import baseline, replay
from tightship.units import format_bytes

__all__ = ["InSlices", "Splitting", "Xla", "advice", "lowered", "prepared"]

_TYPES: Final = {"f32": "float32", "f64": "float64", "f16": "float16", "pred": "bool"} | {
    f"{k}{n}": f"{'u' * (k == 'u')}int{n}" for k in "su" for n in (8, 16, 32, 64)
}
_WORTH: Final = 0.01
"""By so much of the whole's time a plan is slower before slices are tried, and faster with them."""
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
    """The module that is planned, and its plan; ``whole``: that module in one piece; ``choice``: what is in slices in
    it, None if nothing is; ``notes`` say it, or why nothing is."""

    whole: Module
    module: Module
    result: Result
    choice: Choice | None = None
    notes: tuple[str, ...] = ()

    def rows(self) -> dict[str, Any]:
        """What is in slices, and what it costs beside the module in one piece, for programs."""
        assert self.choice is not None
        regions = [
            {"seed": region.seed, "instructions": list(region.ops), "slices": count, "rounds": region.rounds}
            for region, count in self.choice.regions
        ]
        made = self.result.module
        found = {"slices": regions, "flops_before": _flops(self.whole), "flops_after": _flops(made)}
        found["time_before"] = _time(self.whole)
        return found if self.result.transfers else found | {"time_after": _time(made)}

    def xla(self) -> dict[str, int]:
        """Bytes of temporaries that XLA allocates on the CPU, in one piece and as planned; empty where it cannot be
        asked, or nothing but the order is another."""
        if self.choice is None and not self.result.recomputed and not self.result.transfers:
            return {}
        try:
            return {
                "temp_before": Xla(self.whole).temporaries, "temp_after": Xla(self.result.module).temporaries
            }  # fmt: skip
        except Unsupported:
            return {}


def _slower(made: InSlices) -> float:
    """By what part it takes longer than the module in one piece, by modeled times."""
    whole = _time(made.whole)
    return _time(made.result.module) / whole - 1 if whole else 0.0


def _flops(module: Module) -> int:
    return sum(work_of(module).flops[module.entry.name].values())


def _time(module: Module) -> float:
    graph = graph_before(module)
    return replay(graph, baseline(graph)).time


class Splitting:
    """A `prepared` module in slices, for one limit or many. ``mode``: `EXACT`, then XLA gives the same bits on random
    data, or `ROUNDING`; ``allow``, ``lossy``: what else plans may do. ``plan_of`` plans a module within a limit."""

    def __init__(
        self, module: Module, mode: str, allow: Sequence[str], plan_of: Callable[[Module, int], Result], *,
        lossy: bool = False,
    ) -> None:  # fmt: skip
        self.module, self.mode, self.plan_of, self.whole = module, mode, plan_of, Xla(module)
        self._bound = partial(bound, allow=allow, lossy=lossy)
        self._equal: dict[tuple[tuple[frozenset[str], int], ...], bool] = {}

    def believed(self, choice: Choice) -> bool:
        if self.mode == ROUNDING:
            return True
        key = tuple((frozenset(region.ops), count) for region, count in choice.regions)
        if key not in self._equal:
            self._equal[key] = Xla(choice.module).equals(self.whole)
        return self._equal[key]

    def choice(self, limit: int) -> Choice | None:
        """The first choice within a limit, or the last there is."""
        *_, last = (
            None,
            *choices(self.module, limit, rounding=self.mode == ROUNDING, believed=self.believed),
        )
        return last

    @cached_property
    def lowest(self) -> Choice | None:
        return self.choice(0)

    @property
    def least(self) -> int:
        """Bytes that no plan goes below, in one piece or in the slices that need the least."""
        made = [self.module] if self.lowest is None else [self.module, self.lowest.module]
        return min(map(self._bound, made))

    def within(self, limit: int) -> InSlices | None:
        """A plan within a limit, in slices where it needs them or is faster so, as few as it allows; None without
        one. Raises ``Unsupported`` where bits cannot be compared."""
        best = None
        if self._bound(self.module) <= limit:
            best = self._planned(None, limit)
            if best is not None and (best.result.transfers or _slower(best) <= _WORTH):
                return best
        choice = self.choice(limit)
        if choice is None or self._bound(choice.module) > limit:
            return best
        made = self._planned(choice, limit)
        if made is None or (best is not None and _slower(made) > _slower(best) - _WORTH):
            return best
        return made

    def _planned(self, choice: Choice | None, limit: int, *, missed: bool = False) -> InSlices | None:
        if choice is None:
            made = InSlices(self.module, self.module, self.plan_of(self.module, limit))
        else:
            check_slices(self.module, choice.module)
            result = self.plan_of(choice.module, limit)
            made = InSlices(self.module, choice.module, result, choice, tuple(_notes(choice, self.mode)))
        return made if missed or made.result.met else None

    def plan(self, limit: int) -> InSlices:
        """The same, or the least that is reached, with why it is no less."""
        if (found := self.within(limit)) is not None:
            return found
        choice = self.choice(limit)
        ways: list[Choice | None] = [None] if choice is None else [None, choice]
        tried = (self._planned(c, limit, missed=True) for c in ways)
        best = min((m for m in tried if m is not None), key=lambda m: m.result.peak_after)
        return replace(best, notes=(*best.notes, *self._missed(best)))

    def _missed(self, best: InSlices) -> Iterator[str]:
        """Why nothing is within the limit."""
        if best.choice is not None:
            yield f"split: in slices {format_bytes(best.result.peak_after)} was the least that was reached"
        else:
            yield "split: no instructions of the entry can be computed in slices that need less"
        if other := sum(not equal for equal in self._equal.values()):
            yield f"split: {other} other ways give other bits in XLA (allow={ROUNDING} takes them)"
        yield from _uncut(self.module)


def _uncut(module: Module) -> Iterator[str]:
    """What at the peak cannot be in slices whatever it touches."""
    peak = peak_of(module)
    kinds: dict[str, list[str]] = {}
    for r in peak.residents:
        if r.computation != module.entry.name:
            kinds.setdefault("computation", []).append(r.computation)
        elif (i := module.entry.by_name[r.instruction]).row.makes == "results" and not i.row.cut:
            kinds.setdefault(i.opcode, []).append(i.name)
    for kind, names in kinds.items():
        count, first = len(dict.fromkeys(names)), names[0]
        if kind == "computation":
            yield f"split: arrays at the peak are made inside {first}: slices are of the entry computation alone"
        elif kind == "fusion":
            yield (
                f"split: {count} arrays at the peak are made by fusions (first {first}), which are not taken apart: "
                'give the module as JAX hands it to XLA, jax.jit(f).lower(...).as_text("hlo")'
            )
        else:
            yield f"split: {count} arrays at the peak are made by {kind} (first {first}), which has no rule"


def _notes(choice: Choice, mode: str) -> Iterator[str]:
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
    last = lowest(module, limit)
    return () if last is None else (f"splitting (allow={allow},{_way(last)}): {_said(last)}",)


def lowest(module: Module, limit: int) -> Choice | None:
    """The module in slices within a limit, or in those that need the least, whatever their bits; None where that is
    no less."""
    *_, last = (None, *choices(prepared(module), limit, rounding=True))
    return last


def lowered(module: Module) -> tuple[Advice, ...]:
    """The same beside what else would lower the peak."""
    last = lowest(module, 0)
    if last is None:
        return ()
    saves = module_peak(module) - last.peak
    return (Advice("split", saves, f"by slices (tightship plan --allow {_way(last)}): {_said(last)}"),)


def _way(choice: Choice) -> str:
    return ROUNDING if choice.rounds else EXACT


def _said(choice: Choice) -> str:
    count = sum(len(region.ops) for region, _ in choice.regions)
    return f"{format_bytes(choice.peak)} then, {count} instructions in loops of up to {choice.most} slices"
