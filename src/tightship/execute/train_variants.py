"""The kinds of batches that a training step is captured and planned for: what its code asks for on a batch, and what
runs that."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from tightship import simulate
from tightship.errors import Enough, Infeasible, TightshipError, Unsupported
from tightship.execute.binding import form_of
from tightship.execute.cache import KeptPlans
from tightship.execute.data_parallel import DataParallel
from tightship.execute.in_step import InStep
from tightship.execute.interrupts import Updating
from tightship.execute.looking import Looking
from tightship.execute.parts import (
    Loop,
    bytes_of_inputs,
    gradients_of,
    layouts,
)
from tightship.execute.planned_together import OtherLayers, PlannedTogether
from tightship.execute.prepared import Variant, within_unplanned
from tightship.execute.ranks import Ranks
from tightship.execute.replaced import Knows, Replaced, has_own_bytes, own_bytes
from tightship.execute.replicas import Replicas
from tightship.execute.settings import Settings
from tightship.frontends.torch import compat_ddp, compat_distributed, compat_optimizers
from tightship.frontends.torch.capture.checks import check_accumulation, check_hooks, check_model
from tightship.frontends.torch.capture.expectations import Guesses, Misled, guessing
from tightship.frontends.torch.capture.incremental import Ending
from tightship.frontends.torch.capture.readings import Readings, reading, readings_of
from tightship.frontends.torch.capture.state_restore import untouched
from tightship.frontends.torch.capture.step import capture_update
from tightship.frontends.torch.fabric import modules_of_fabric, without_backward_checks
from tightship.frontends.torch.optimizer.updates import SeveralUpdates, Updates, updaters
from tightship.frontends.torch.program import Program
from tightship.frontends.torch.python_state import python_state_kept
from tightship.frontends.torch.refusals import end_frames, names_stand_ins, raised_on_stand_ins
from tightship.frontends.torch.rerun.live_step import Asked, Owned, run_code
from tightship.frontends.torch.rerun.numbers import other_numbers, with_numbers_at
from tightship.frontends.torch.structure import (
    LossFn,
    TensorLeaf,
    checked_loss,
    flatten,
    loss_function,
    tensor_leaves,
)
from tightship.graph import Graph
from tightship.plan import Plan

__all__ = ["TrainVariants", "check_call"]


class TrainVariants(PlannedTogether):
    """What has been captured and planned of a training step: as a whole, or of its backward passes and updates.

    The code of the step runs for every batch, on stand-ins for tensors that compute nothing. What it asks for is
    compared with what was captured: a kind that has its ops runs them, with the numbers it asks for now, anything
    else is captured and planned as a kind of its own.
    """

    _shares_updates = True
    """Whether parameters may share the op that updates them."""
    _looks_beside_ranks = True
    """Whether code that runs together with other ranks may look at what its step computes."""

    def __init__(
        self, model: torch.nn.Module, loss_fn: Any, optimizer: Any, settings: Settings, *,
        independent: bool = False, loop: Loop | None = None, split: bool = False,
        ranks: Ranks | None = None, parallel: DataParallel | None = None,
    ) -> None:  # fmt: skip
        self.ranks = ranks
        self._replicas = (
            None if ranks is None or parallel is None else Replicas(model, optimizer, parallel, ranks)
        )
        check_model(model, hooks=True)
        super().__init__(model, optimizer, settings, trains=True)
        self._with_others = ranks is not None
        self._notes += self._replicas.notes if self._replicas is not None else ()
        self.loss_fn, self.independent = loss_fn, independent
        self.loop, self._split = loop or Loop(), split or optimizer is None
        if self._replicas is not None and self._replicas.shards:
            self.loop = replace(self.loop, total_norm=self._replicas.norm)
            late = self.loop.in_parts or self.loop.clip_norm is not None
            self._replicas.late(late and not self._split and self.loop.clip_value is None)
        self._owned, self._of_fabric = Owned(model, self._bring_back), modules_of_fabric(model)
        self._preparing = False
        self._node_hooks = -1  # how many there were when the parameters were last looked at
        self._updates: Updates | SeveralUpdates | None = None
        self._has_no_update = False
        self._shared: list[torch.Tensor] = []
        alone = ranks is None and (independent or compat_distributed.world_size() == 1)
        self._guesses = Guesses() if alone and not settings.strict else None
        self._looking: Looking | None = None
        if ranks is not None and self._looks_beside_ranks:
            sends_buffers = self._replicas is not None and self._replicas.parallel.buffers
            self._looking = Looking(ranks, self._synchronize if sends_buffers else None)
        looks = (alone or self._looking is not None) and not settings.stream
        self._readings = Readings(self._looking) if looks else None
        self._inside = False  # of an accumulation, which DistributedDataParallel lets each rank do by itself

    def _synchronize(self, looked: bool) -> None:
        assert self._replicas is not None
        self._replicas.synchronize(self._owned.buffers, looked=looked)

    def take_over_ddp(self, ddp: Any) -> None:
        """From here on the DistributedDataParallel of the model evaluates, and this trains."""
        compat_ddp.let_go_of_buckets(ddp)
        if self._replicas is not None:
            self._replicas.ddp = ddp

    @property
    def _may_move(self) -> bool:
        return super()._may_move and (self._replicas is None or not self._replicas.shards)

    def _renew(self) -> None:
        if self._replicas is not None and (moved := self._replicas.put_back()):
            note = (
                f"p.data = … of {moved[0]!r} ({len(moved)} in all) changes nothing, as in eager, whose parameters "
                "are DTensors: write into them (p.copy_(…))"
            )
            if note not in self._notes:
                self._notes.append(note)
                warnings.warn(note, stacklevel=callers_level())
        super()._renew()
        if self._replicas is not None and self.ranks is not None and not self._replicas.follows:
            self._replicas.follow(self.ranks)
        self._unshare()

    def _on_replaced(self) -> None:
        if self._replicas is not None:
            self._replicas.follows = False
        self._owned, self._updates, self._has_no_update = Owned(self.model, self._bring_back), None, False

    def _replacing(self, variant: Variant, tensors: list[Any], asked: Asked) -> Replaced | None:
        """To be asked when all is ready to run; None where the step replaces nothing."""
        if not variant.program.apart:
            return None
        known = self._knowing(asked.trace)
        return Replaced(variant.program, tensors, self.model, known, self._streams.items)

    def _knowing(self, *traces: Any) -> list[Knows]:
        """All that have the model's buffers."""
        seen = {id(t): t for t in (*traces, *(t for v in self._variants for t in v.traces))}
        return [self._owned, self._identity, *(v.binding for v in self._variants), *seen.values()]

    def _take_over_replaced(self) -> None:
        """To be called when a step has run in eager. Buffers in whose place it has put others like them are no other
        parts of the model: that is what this step does."""
        owned = {id(b) for b in self._owned.buffers.values()}
        for _, _, _, own, now in self._owned.replaced():
            plain = type(now) is type(own) and now.requires_grad is own.requires_grad and id(now) not in owned
            if plain and now.layout is own.layout is torch.strided and form_of(now) == form_of(own):
                for one in self._knowing():
                    one.take(own, now)
                self._identity.settle(now)

    def _replaced(self, replaced: Replaced | None, results: list[Any]) -> None:
        if replaced is not None:
            replaced.finish(results)
            self._shared += replaced.shared
            if self._replicas is not None:
                self._replicas.lie_here()
            if not replaced.reshaped:
                self._identity.moved()

    def _unshare(self) -> None:
        """Buffers that the last step has handed back, too, and that it does not write in place: to its code, what is
        held of them is something else. Not those that rank 0 sends, which is seen in what is held."""
        if self._replicas is not None and self._replicas.parallel.buffers:
            self._shared.clear()
            return
        there = {id(b) for b in self._owned.buffers.values()}
        shared = [b for b in self._shared if id(b) in there and not has_own_bytes(b)]
        self._shared.clear()
        for b in shared:
            own_bytes(b)
        if shared:
            self._identity.moved()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        updating = Updating()
        with (
            updating.whole(),
            super()._exclusive(),
            self.ranks.ending_together("a training step") if self.ranks else nullcontext(),
        ):
            self._updating = updating
            yield

    @property
    def _in_parts(self) -> bool:
        late = self._replicas is not None and self._replicas.late_averages
        return self._split or self.loop.in_parts or late

    def _average_late(self) -> None:
        """From here on gradients are averaged behind the backward pass."""
        assert self._replicas is not None
        self._replicas.late_averages = True
        self._variants.clear()
        self._arena = None
        self._notes.append("ranks run other layers: gradients are averaged once all of them are there")

    def _prepare(self, batch: Any) -> Plan:
        stage = self.settings.progress.stage("capturing")
        with self._exclusive(), self._as_preparing(), torch.autograd.set_detect_anomaly(False), stage:
            self._renew()
            return self._prepare_now(batch)

    def _prepare_now(self, batch: Any) -> Plan:
        if not self._in_parts:
            try:
                with self._undone(batch):
                    return self._run_code(batch, self._ending())[0].executor.plan
            except OtherLayers:
                self._average_late()
        self._prepare_parts(batch)
        return self.plan

    @contextmanager
    def _as_preparing(self) -> Iterator[None]:
        self._preparing = True
        try:
            yield
        finally:
            self._preparing = False

    @contextmanager
    def _undone(self, batch: Any, when: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """What the code of the step changes, also of ``batch``, is put back, if ``when`` says so at the end."""
        roots = (self.model, self.loss_fn, batch, *(hook.fn for hook in self._owned.hooks()))
        with untouched(self.model, [], frozen=False, when=when), python_state_kept(*roots, when=when):
            try:
                yield
            except TightshipError as error:
                end_frames(error)
                raise

    def _prepare_parts(self, batch: Any) -> None:
        """All that an update takes is planned, from the part that needs most on, of which the budget is a share."""
        ending = self._ending({})
        with self._undone(batch):
            asked = self._ask(batch, ending)
        try:
            if self.loop.accumulate > 1 and asked.program is not None:
                with self._undone(batch):
                    self._run_code(batch, self._ending(gradients_of(asked.program)))
            variant, asked = self._settled(lambda: asked, batch, ending)
            if self._updates is not None:
                self._update_variant(gradients_of(variant.program))
        except Infeasible as no:
            program = self._program_of(asked, ending)
            raise self._of_all_parts(no, batch, program, adds=self.loop.accumulate > 1) from None

    def _program_of(self, asked: Asked, ending: Ending) -> Program:
        if asked.program is not None:
            return asked.program
        fitting = self._fitting(ending)
        return next(v.captured for v in fitting if any(t is asked.trace for t in v.traces))

    def _of_all_parts(self, no: Infeasible, batch: Any, backward: Program, *, adds: bool) -> Infeasible:
        """The error of one part of the step, with budgets that are enough for all of them: its backward pass, the
        one that adds to gradients, and the update."""
        programs = [(backward, 0)]
        gradients = gradients_of(backward)
        if adds:
            ending = self._ending(gradients)
            with self._undone(batch):
                programs.append((self._program_of(self._ask(batch, ending), ending), 0))
        if self._updates is not None:
            update = self._captured_update(gradients)
            programs.append((update, bytes_of_inputs(backward)))
        graphs = [(self._measured(p)[0].graph, beside) for p, beside in programs]
        self._profiled.clear()
        own = next(e for e in no.enough if not e.options)
        least = min(no.enough, key=lambda e: e.nbytes)
        found = [self._enough_for(graphs, e) for e in dict.fromkeys((own, least))]
        return no.with_enough([e for e in found if not e.options or e.nbytes < found[0].nbytes])

    def _enough_for(self, graphs: Sequence[tuple[Graph, int]], enough: Enough) -> Enough:
        """The budget, raised as far as any of the graphs needs, each beside some bytes."""
        limit, planner = enough.nbytes, self.settings.planner
        if enough.options:
            assert isinstance(planner, KeptPlans)
            planner = planner.with_options(dict(enough.options))
        for graph, beside in graphs:
            peak = simulate.replay(graph, simulate.baseline(graph)).peak
            known = isinstance(planner, KeptPlans) and planner.knows(graph, limit - beside)
            if known or peak + beside <= limit:
                continue
            try:
                planner(graph, max(limit - beside, 0))
            except Infeasible as no:
                own = next(e for e in within_unplanned(no, peak).enough if not e.options)
                limit = max(limit, own.nbytes + beside)
        return replace(enough, nbytes=limit)

    def _own_updates(self) -> Updates | SeveralUpdates:
        if self._updates is None:
            whole = not (self.settings.stream or self.settings.split or self._with_others)
            parameters = dict(self._owned.parameters)
            self._updates = updaters(self.optimizer, parameters, buckets=whole and self._shares_updates)
        return self._updates

    def _ending(self, held: Mapping[str, torch.Tensor] | None = None) -> Ending:
        """What follows the forward pass: the whole step, or, with the gradients that are there already, its backward
        pass, as autograd runs it for every parameter or, if `fit` does the rest, for those of the optimizer."""
        if held is None:
            whole = self._own_updates()
            clip = self.loop.clipped if self.loop.clips else None
            averaged = () if self._replicas is None else self._replicas.averaged
            among = None if self._replicas is None else self._replicas.among
            add_up = None if self._replicas is None else self._replicas.add_up
            return Ending(
                whole.names, whole, clip, averaged=averaged, among=among, add_up=add_up, **self._of_ranks()
            )
        updates = self._updates_if_any()
        hooked = self._replicas is not None and self._replicas.hooked is not None
        if updates is not None and not self._split and (self._in_parts or self.loop.clips) and not hooked:
            wanted = updates.names
        else:
            wanted = tuple(n for n, p in self._owned.parameters if p.requires_grad)
        held = {n: g for n, g in held.items() if n in wanted}
        return Ending(wanted, updates, leaves=True, held=held, **self._of_ranks())

    def _of_ranks(self) -> dict[str, Any]:
        """What of an `Ending` follows from other ranks."""
        whole = self._replicas is not None and self._replicas.whole_in_eager
        ordered = self._replicas is not None and self._replicas.hooked is not None
        return {"repeats": self.ranks is not None, "whole": whole, "ordered": ordered}

    def _updates_if_any(self) -> Updates | SeveralUpdates | None:
        """None without an optimizer, and where a split step's cannot be planned, which is noted once."""
        if self.optimizer is None or self._has_no_update:
            return None
        try:
            return self._own_updates()
        except Unsupported as no:
            if not self._split:
                raise
            self._has_no_update = True
            self._notes.append(f"step.update is not there, and its state is not counted: {no}")
            return None

    def _loss(self, batch: Any) -> Any:
        loss, scaler = loss_function(self.loss_fn, batch), self.loop.scaler
        if self._of_fabric:
            loss = _as_fabric_runs_it(loss, self._of_fabric)
        if self._replicas is not None:
            loss = _of_replica(loss, self._replicas)
        elif compat_distributed.world_size() > 1:
            loss = _of_itself(loss, {id(p) for _, p in self._owned.parameters if p.requires_grad})
        if scaler is None:
            return loss
        device = next((p.device for _, p in self._owned.parameters), None)
        scaler.scale(torch.zeros((), device=device))  # makes its tensors, which stand-ins cannot be

        def scaled(model: torch.nn.Module, given: Any) -> Any:
            out = loss(model, given)
            return scaler.scale(checked_loss(out)), out

        return scaled

    def _run_code(
        self, batch: Any, ending: Ending, begun: InStep | None = None
    ) -> tuple[Variant, list[Any], Asked]:
        """What the code of the step asks for on this batch, the tensors to run it on, and how results go together."""
        variant, asked = self._settled(lambda: self._ask(batch, ending, begun), batch, ending, begun)
        return variant, variant.binding.tensors(tensor_leaves(batch), asked.constants), asked

    def _in_step(self, batch: Any, ending: Ending) -> InStep | None:
        """What runs a planned step while its code looks at what it computes."""
        if self._readings is None:
            return None

        def variant_of(trace: Any) -> Variant:
            return next(v for v in self._fitting(ending) if any(t is trace for t in v.traces))

        def renumber(variant: Variant, trace: Any, numbers: dict[int, tuple[Any, ...]]) -> None:
            captured = with_numbers_at(trace.program, numbers)
            assert captured is not None
            variant.executor.change_numbers(self._renewed(variant, captured, numbers))

        leaves = tensor_leaves(batch)
        ready = self._put_away
        return InStep(self._readings, variant_of, renumber, ready, leaves, self._updating, self._looking)

    def _ask(self, batch: Any, ending: Ending, begun: InStep | None = None) -> Asked:
        """What the code of the step asks for on this batch."""
        check_call()
        check_hooks((), self._owned.modules)
        if compat_optimizers.node_hooks() != self._node_hooks:
            check_accumulation(self._owned.parameters)
            self._node_hooks = compat_optimizers.node_hooks()
        if self._looking is not None:
            self._looking.begin(buffers=not self._inside)
        kinds = [TensorLeaf.of(t) for t in tensor_leaves(batch)]
        traces = [t for v in self._fitting(ending) for t in v.traces if t.takes(kinds)]
        stage = nullcontext() if traces else self.settings.progress.stage("capturing")
        with stage, guessing(self._guesses), reading(self._readings):
            try:
                return run_code(self._owned, self._loss(batch), ending, batch, traces, begun=begun)
            except TightshipError:
                raise
            except Exception as error:
                if self._guesses is not None and self._guesses.taken:
                    raise Misled(error) from error
                if not names_stand_ins(error):
                    raise
                raise raised_on_stand_ins(error) from error

    def _fitting(self, ending: Ending) -> list[Variant]:
        modes = self._modes_of(ending)
        return [v for v in self._variants if v.modes == modes]

    def _modes_of(self, ending: Ending) -> tuple[Any, ...]:
        return (ending.part, layouts(ending.held), *self._modes())

    def _settled(
        self, ask: Callable[[], Asked], batch: Any, ending: Ending, begun: InStep | None = None
    ) -> tuple[Variant, Asked]:
        """The variant that runs what is asked for; with other ranks, only where it goes together with theirs."""
        if self.ranks is not None:
            return self._settled_together(self.ranks, ask, batch, ending, begun)
        asked = ask()
        variant = self._known(asked, ending)
        if variant is None:
            assert asked.program is not None
            self._check_readings(asked)
            variant = self._new(asked.program, batch, ending)
            variant.remember(asked.trace)
        self._use(variant)
        return variant, asked

    def _check_readings(self, asked: Asked) -> None:
        """Refuses looks of code that is captured each time, and what cannot run before all of the code has."""
        assert asked.program is not None
        reads = readings_of(asked.program)
        if not reads:
            return
        each_time = any(c.repeats or c.state.saves for c in asked.trace.calls)
        late = self._replicas is not None and self._replicas.sends_behind(asked.program)
        if each_time or asked.program.apart or late:
            raise reads[0].refusal

    def _known(self, asked: Asked, ending: Ending) -> Variant | None:
        """The variant that there is for what was asked for, with its numbers."""
        fitting = self._fitting(ending)
        if asked.program is None:
            variant = next(v for v in fitting if any(t is asked.trace for t in v.traces))
            if asked.numbers:
                self._renumber(variant, asked)
            return variant
        same = self._variant_of_same_ops(asked, fitting)
        if same is not None:
            same.remember(asked.trace)
        return same

    def _variant_of_same_ops(self, asked: Asked, fitting: list[Variant]) -> Variant | None:
        """The variant whose ops are those of the program but for numbers, with the numbers of the program."""
        assert asked.program is not None
        for variant in fitting:
            if _decided(variant.captured) != _decided(asked.program):
                continue
            numbers = other_numbers(variant.captured, asked.program)
            if numbers is not None:
                if numbers:
                    self._change(variant, asked.program, numbers)
                    variant.traces.clear()  # they hold other numbers
                return variant
        return None

    def _renumber(self, variant: Variant, asked: Asked) -> None:
        """The variant with the numbers that its code asked for, for a trace that has them by now."""
        self._change(variant, asked.trace.program, asked.numbers)
        variant.traces = [asked.trace]

    def _change(self, variant: Variant, captured: Program, numbers: dict[int, tuple[Any, ...]]) -> None:
        renewed = self._renewed(variant, captured, numbers)
        variant.executor.change_numbers(renewed)
        variant.program, variant.captured = renewed, captured

    @staticmethod
    def _renewed(variant: Variant, captured: Program, numbers: dict[int, tuple[Any, ...]]) -> Program:
        """The variant's program with the numbers of ``captured``."""
        if variant.changes:
            before, now = variant.captured, captured
            for change in variant.changes:
                before, now = change.apply(before), change.apply(now)
            numbers = other_numbers(before, now) or {}
        renewed = with_numbers_at(variant.program, numbers)
        assert renewed is not None  # recomputations take the numbers of the captured program's
        return renewed

    def _new(self, program: Program, batch: Any, ending: Ending) -> Variant:
        self._check_new(batch, flatten(batch))
        self._check_ranks(program)
        if ending.part:
            self._resolve_for_parts(program)
        variant = self._variant(program, self._modes_of(ending), part=ending.part)
        self._variants.insert(0, variant)
        return variant

    def _resolve_for_parts(self, program: Program) -> None:
        """A share of what the parts need unplanned: this backward pass, and the update that follows it."""
        budget = self.settings.budget
        if self._limit is not None or budget is None:
            return
        graphs = [self._measured(program)[0].graph]
        beside = bytes_of_inputs(program)
        if self._updates is not None:
            update = self._captured_update(gradients_of(program))
            graphs.append(self._measured(update)[0].graph)
        peaks = [simulate.replay(g, simulate.baseline(g)).peak for g in graphs]
        peaks[1:] = [p + beside for p in peaks[1:]]
        first = graphs[0]
        held = sum(first.storages[s].size for s in first.static if first.storages[s].kind == "gradient")
        self._limit = budget.resolve(max(peaks), static=first.static_bytes - held)

    @property
    def _beside(self) -> int:
        """Bytes of the batch, which is there while parameters are updated."""
        return bytes_of_inputs(self._latest.program) if self._variants else 0

    def _update_variant(self, gradients: Mapping[str, torch.Tensor]) -> Variant:
        """The planned update of parameters with gradients like these."""
        modes = ("update", layouts(gradients), *self._modes())
        variant = next((v for v in self._variants if v.modes == modes), None)
        if variant is not None and self._limit is not None:
            budget = variant.executor.plan.budget
            if budget is not None and budget + self._beside > self._limit:  # the batch was smaller
                self._variants.remove(variant)
                variant = None
        if variant is None:
            program = self._captured_update(gradients)
            variant = self._variant(program, modes, part="update", beside=self._beside)
            self._variants.insert(0, variant)
        self._use(variant)
        return variant

    def _captured_update(self, gradients: Mapping[str, torch.Tensor]) -> Program:
        self._bring_back()
        return capture_update(self.model, self._own_updates(), gradients)


def callers_level() -> int:
    """How far away from the function that calls this the code is that calls the step, as ``warnings.warn`` counts."""
    level, frame = 1, sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] == "tightship" and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level


def _of_replica(loss: LossFn, replicas: Replicas) -> LossFn:
    """Reads what is in parts once, and calls modules where the code has them in a DistributedDataParallel."""

    def of_replica(model: torch.nn.Module, batch: Any) -> Any:
        with replicas.read_once(), compat_ddp.modules_in_ddp():
            return loss(model, batch)

    return of_replica


def _as_fabric_runs_it(loss: LossFn, modules: Sequence[Any]) -> LossFn:
    """Of a model that ``fabric.setup`` has given: the step is what ``fabric.backward`` would run."""

    def of_fabric(model: torch.nn.Module, batch: Any) -> Any:
        with without_backward_checks(modules):
            return loss(model, batch)

    return of_fabric


def _of_itself(loss: LossFn, trained: Collection[int]) -> LossFn:
    """Of a step of which nobody averages the gradients."""

    def of_itself(model: torch.nn.Module, batch: Any) -> Any:
        with compat_ddp.none_in_ddp(trained):
            return loss(model, batch)

    return of_itself


def _decided(program: Program) -> list[Any]:
    """What data say of the requests of ops, where nothing else tells programs apart."""
    return [g.expected for g in program.guards if g.requests]


def check_call() -> None:
    """Raises ``Unsupported`` where eager's step would do something else than train on gradients from nothing."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        mode = "inference mode" if torch.is_inference_mode_enabled() else "torch.no_grad"
        raise Unsupported(
            f"a training step under {mode}",
            "it needs gradients",
            "call it outside, or evaluate the model itself",
        )
