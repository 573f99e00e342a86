"""A planned step that begins while its code still runs, as the code waits for what the step computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from tightship.errors import PeerFailed, TightshipError
from tightship.execute.interpreter import Running
from tightship.execute.interrupts import Updating
from tightship.execute.looking import Looking
from tightship.execute.prepared import Variant
from tightship.frontends.torch import collectives, compat
from tightship.frontends.torch.capture.expectations import Expectation, OtherAnswer
from tightship.frontends.torch.capture.random_state import random_state_is_ahead, torch_state
from tightship.frontends.torch.capture.readings import Read, Reading, Readings, looked_behind
from tightship.frontends.torch.refusals import told
from tightship.frontends.torch.rerun.function_trace import FunctionTrace

__all__ = ["InStep"]


@dataclass
class _Run:
    """``constants`` are the ids of those that it began with, by slot; ``kept`` what was in the caller's tensors that
    it writes before it is sure to go on, by id, and ``states`` the random states; ``latest`` is the reading before
    now; ``sent`` counts the collectives that have been run."""

    variant: Variant
    constants: dict[int, int]
    going: Running
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]]
    states: list[tuple[Any, torch.Tensor]]
    latest: Read
    sent: int = 0
    said: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def put_back(self) -> None:
        with torch.no_grad(), compat.without_modes():
            for tensor, was in self.kept.values():
                tensor.copy_(was)
            for generator, state in self.states:
                generator.set_state(state)


class InStep:
    """At most one run of one step. ``variant_of`` finds what runs a trace, ``renumber`` gives it numbers, by op, for
    as long as the run takes, ``ready`` is called before it begins, and ``leaves`` are the batch's tensors;
    ``looking``: with other ranks."""

    def __init__(
        self, readings: Readings, variant_of: Callable[[FunctionTrace], Variant],
        renumber: Callable[[Variant, FunctionTrace, dict[int, tuple[Any, ...]]], None], ready: Callable[[], None],
        leaves: Sequence[Any], updating: Updating, looking: Looking | None = None,
    ) -> None:  # fmt: skip
        self._looking = looking
        self._readings, self._variant_of, self._renumber = readings, variant_of, renumber
        self._ready, self._leaves, self._updating = ready, leaves, updating
        self._run: _Run | None = None

    # --- while the code runs ---

    def told(
        self,
        reading: Reading,
        trace: FunctionTrace,
        numbers: dict[int, tuple[Any, ...]],
        constants: Sequence[Any],
    ) -> tuple[torch.Tensor, ...] | None:
        variant = self._variant_of(trace)
        if self._run is not None and self._run.variant is not variant:
            self.put_back()
        look = _early(variant).looks[reading.read.nth]
        looking = self._looking
        if looking is None or not looking.together(behind=look.behind, written=look.written):
            looking = None
        elif not looking.follows(reading.place, look.digest, self.sent, self.put_back):
            return None
        if numbers:
            self._renumber(variant, trace, numbers)
        inputs = variant.binding.tensors(self._leaves, constants)
        if self._run is None:
            self._run = self._begun(variant, inputs, reading.read)
        else:
            self._rebind(inputs)
        run, nth = self._run, reading.read.nth
        run.latest = reading.read
        while nth not in run.said:
            try:
                with looking.sending() if looking is not None else nullcontext():
                    read = next(run.going)
            except StopIteration:
                return None
            except TightshipError as no:
                self.put_back()
                raise told(no) from None
            except Exception:  # the code may catch it and go on
                self.put_back()
                raise
            run.said[read.nth], read.said = read.said, ()
        run.sent = look.sent
        return run.said[nth]

    @property
    def sent(self) -> int:
        """How many collectives the run has sent that has begun."""
        return 0 if self._run is None else self._run.sent

    def before(self, tensors: dict[tuple[str, Any], Any]) -> dict[tuple[str, Any], Any]:
        kept = self._run.kept if self._run is not None else {}
        return {k: kept[id(t)][1] if id(t) in kept else t for k, t in tensors.items()} if kept else tensors

    def abort(self) -> None:
        if self._run is not None:
            self._readings.took_another_path(self._run.latest)
        self.put_back()

    def put_back(self) -> None:
        """As `abort`, where no path is taken that none of its steps has taken before."""
        run, self._run = self._run, None
        if run is not None:
            if run.sent:
                with suppress(PeerFailed):
                    collectives.finish()
            run.going.close()
            random_state_is_ahead(None)
            run.variant.executor.change_numbers(run.variant.program)
            run.put_back()

    def _begun(self, variant: Variant, inputs: list[Any], read: Read) -> _Run:
        program, executor = variant.program, variant.executor
        early = _early(variant)
        written, devices = early.written, early.devices
        with compat.without_modes():
            generators = [compat.generator_of(d) for d in devices]
            states = [(g, g.get_state()) for g in generators]
            found = [inputs[n] for n in written if inputs[n] is not None]
            kept = {id(t): (t, t.detach().clone()) for t in found}
        if devices:
            random_state_is_ahead(torch_state())
        self._ready()
        constants = {n: id(inputs[n]) for n, slot in enumerate(program.slots) if slot.role == "constant"}
        return _Run(variant, constants, executor.begin(inputs, consume=True), kept, states, read)

    def _rebind(self, inputs: Sequence[Any]) -> None:
        """Constants that the code has asked for since."""
        run = self._run
        assert run is not None
        for n, known in run.constants.items():
            if id(inputs[n]) != known:
                run.variant.executor.rebind(n, inputs[n])
                run.constants[n] = id(inputs[n])

    # --- when it has run ---

    def goes_on(self, variant: Variant) -> bool:
        """Whether what has begun is what the code has asked for; otherwise it is put back."""
        if self._run is not None and self._run.variant is not variant:
            self.put_back()
        return self._run is not None

    def finished(self, inputs: Sequence[Any]) -> list[Any]:
        """The results of the run that has begun, with the tensors that are known by now."""
        self._rebind(inputs)
        run, self._run = self._run, None  # from here on parameters are updated
        assert run is not None
        random_state_is_ahead(None)
        try:
            results = run.variant.executor.finish(run.going, self._updating)
        except OtherAnswer:
            run.put_back()
            raise
        self._readings.followed()
        return results


@dataclass(frozen=True)
class _Look:
    """What comes before a reading: the collectives that the plan has ``sent``, and their ``digest``; whether the code
    has called one, and whether buffers are ``written``."""

    sent: int
    digest: str
    behind: bool
    written: bool


@dataclass(frozen=True)
class _Early:
    """Of a step that runs while its code does: the slots of the caller's tensors ``written`` before it is sure to go
    on, never those that it trains; the devices on which it draws; what comes before each reading."""

    written: tuple[int, ...]
    devices: tuple[str, ...]
    looks: dict[int, _Look]


def _early(variant: Variant) -> _Early:
    if variant.early is None:
        variant.early = _found_early(variant)
    found: _Early = variant.early
    return found


def _found_early(variant: Variant) -> _Early:
    graph, calls = variant.program.graph, variant.program.calls
    steps = [s.op for s in variant.executor.plan.steps if s.op >= 0]
    last = max(k for k, op in enumerate(steps) if isinstance(calls[op].fn, Read | Expectation))
    written = {s for op in steps[:last] for s in graph.ops[op].mutates}
    slots = [n for n, s in enumerate(variant.program.slots) if graph.values[s.value].storage in written]
    devices = {op.device for op in graph.ops if op.random}
    looks: dict[int, _Look] = {}
    sent, plan = 0, variant.told and variant.told.plan
    before = looked_behind(variant.program)
    for op in steps:
        fn = calls[op].fn
        sent += isinstance(fn, collectives.Collective)
        if isinstance(fn, Read):
            looks[fn.nth] = _Look(sent, f"{plan} {sent}", *before[fn.nth])
    return _Early(tuple(slots), tuple(sorted({"cpu", *devices})) if devices else (), looks)
