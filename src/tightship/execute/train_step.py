"""A training step within a budget, as a function of the batch, or as its parts: backward pass and update."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tightship.errors import BadInput, Infeasible, Unplannable, Unsupported, VerificationFailed
from tightship.execute.data_parallel import DataParallel
from tightship.execute.divergence import Divergence
from tightship.execute.eager import Unplanned, differences, random_states, run_eager, tensors_by_name
from tightship.execute.in_step import InStep
from tightship.execute.interpreter import Fallback, RunStats
from tightship.execute.parts import (
    Loop,
    PartRuns,
    check_gradients,
)
from tightship.execute.planned_together import OtherLayers
from tightship.execute.prepared import Variant
from tightship.execute.ranks import Ranks
from tightship.execute.settings import Settings
from tightship.execute.state_dicts import load, saved
from tightship.execute.train_update import TrainUpdate
from tightship.execute.train_variants import callers_level, check_call
from tightship.frontends.torch import compat, compat_distributed, compat_optimizers
from tightship.frontends.torch.capture.expectations import OtherAnswer, written_back
from tightship.frontends.torch.capture.incremental import Ending
from tightship.frontends.torch.capture.readings import readings_of
from tightship.frontends.torch.compat_capture import nothing_compiled_elsewhere
from tightship.frontends.torch.optimizer.given import each
from tightship.frontends.torch.program import tensors_in
from tightship.frontends.torch.refusals import end_frames, raised_on_stand_ins
from tightship.frontends.torch.structure import (
    Pad,
    flatten,
    padded,
    tensor_leaves,
)
from tightship.plan import Plan

__all__ = ["TrainStep"]

_IN_EAGER, _AT_FIRST = "steps run in eager", "steps ran in eager at first"


class TrainStep(TrainUpdate):
    """Made by `fit`. ``step(batch)`` trains on a batch and returns the loss, or (loss, what came with it).

    ``loss_fn`` runs once in every step, as in eager and with its side effects, on stand-ins for tensors that compute
    nothing; what it asks for is compared with what was captured. Numbers that have changed are taken over, anything
    else is captured and planned as a kind of its own; the latest kinds are kept, as `Prepared` says.

    The same in parts, each within the budget: ``step.backward(batch)`` leaves gradients in ``p.grad``, or adds to
    those that are there, and ``step.update()`` is ``optimizer.step()``. A call of the step leaves no gradients, and
    refuses one that is there.

    With backward hooks on modules a step runs in eager. One thread at a time: a call while another is
    running raises ``Unsupported``. If a step raises, the parameters whose update had run are updated and the others
    are not (running statistics and random state likewise): load a checkpoint, or go on.

    ``grad_norm`` is the norm of the gradients before the last update, where it was asked for (``clip_norm``,
    ``skip_nonfinite``); ``skipped`` counts the updates that were left out for gradients that are not finite.
    """

    def __init__(
        self, model: torch.nn.Module, loss_fn: Any, optimizer: Any, settings: Settings,
        verify_every: int = 0, *, independent: bool = False, loop: Loop | None = None, split: bool = False,
        pads: Sequence[Pad] = (), ranks: Ranks | None = None, parallel: DataParallel | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            model, loss_fn, optimizer, settings, independent=independent, loop=loop, split=split, ranks=ranks,
            parallel=parallel,
        )  # fmt: skip
        self._pads, self._has_padded = tuple(pads), False
        self._verify_every, self._steps = verify_every, 0
        self._unsent = False  # the last backward pass was in its no_sync()
        self._tries_again = False  # to plan what could not be planned as the model was
        self._once_more = True  # so it is after the first step in eager
        alone = ranks is not None and self._replicas is None and not settings.stream
        self._divergence = Divergence(ranks) if ranks is not None and alone else None

    @property
    def _latest(self) -> Variant:
        if self._unplanned is not None:
            raise BadInput("nothing is planned: steps run in eager, as notes says", place="plan")
        return next((v for v in self._variants if v.part != "update"), super()._latest)

    def measure(self) -> dict[str, int | None]:
        """Bytes of the last step against its plan; None where nothing was measured (yet). Of a step in parts: the
        most of any of them, from the first backward pass to the update; ``between`` is what stood between the two,
        where `fit` was told what to do there; ``hook`` what a communication hook keeps from step to step, beside
        all that."""
        if self._in_eager is not None:
            return self._in_eager.measure(self._limit)
        hooked = None if self._replicas is None else self._replicas.hooked
        kept = {} if hooked is None else {"hook": hooked.kept}
        return super().measure() | self._ran.measure() | kept

    def metrics(self, prefix: str = "") -> dict[str, int | float]:
        """As `Prepared.metrics`, with ``skipped`` (updates that were left out), and ``eager``: 1 where the last step
        ran in eager, else 0."""
        rows = super().metrics(prefix)
        if rows:
            rows |= {f"{prefix}skipped": self.skipped, f"{prefix}eager": int(self._in_eager is not None)}
        return rows

    def _captured_something(self) -> bool:
        return self._in_eager is not None or super()._captured_something()

    def _times(self) -> dict[str, float | None]:
        return {} if self._in_eager is not None else super()._times()

    @property
    def last(self) -> RunStats | None:
        return None if self._in_eager is not None else super().last

    @property
    def notes(self) -> tuple[str, ...]:
        nothing = self._unplanned is not None or (self._in_eager is not None and not self._variants)
        return tuple(self._notes) if nothing else super().notes

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's parameters with their gradients, by name. Those of which ranks have parts are DTensors in the
        memory of this rank's: norms of them are those of all ranks, which all ask, and what is written to them, or
        to their gradients between ``step.backward`` and ``step.update``, is written."""
        for n, p in self._owned.parameters:
            yield n, p if self._replicas is None else self._replicas.seen(n, p)

    # --- saving ---

    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        """What `load_state_dict` takes: ``{"model": …, "optimizer": …}`` by the model's own names. Shards of several
        ranks are DTensors, for ``torch.distributed.checkpoint``, or ``full`` tensors: then all ranks call this. What
        streams is the bytes of its file, which take no memory: save it with ``torch.save``, or each part's tensors
        with safetensors. As ever, it follows the steps; beside a GPU it is in memory until the next one."""
        with self._exclusive():
            self._bring_back()
            if full and self.ranks is not None:
                self.ranks.same("state dicts", lambda: "state_dict(full=True)")
                with self.ranks.sending(writing=False):
                    found = saved(self.model, self.optimizer, full=full)
                    self.ranks.same("state dicts", lambda: "all of it")
                return found
            return saved(self.model, self.optimizer, full=full)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over, in place, what `state_dict` has given on this or another number of ranks."""
        with self._exclusive():
            self._bring_back()
            load(self.model, self.optimizer, state, self._put_away)

    @contextmanager
    def gathered(self, *, mapped: bool = False) -> Iterator[None]:
        """Everything that streams (``allow="stream"``) in memory while the block runs, beyond the budget: to read and
        write parameters and state as ever (checkpoints, evaluation). What it changes is kept. ``mapped``: as bytes of
        the file, which take no memory: slower, and a disk that fails to read them ends the process (beside a GPU as
        without). Raises ``BadInput`` for one inside of another."""
        with self._exclusive():
            self._streams.bring_back(mapped=mapped)
        self._streams.gathered = True
        try:
            yield
        finally:
            self._streams.gathered = False
            with self._exclusive():
                self._put_away()

    # --- preparing ---

    def prepare(self, batch: Any) -> Plan | None:
        """Captures and plans for batches like this one, if that has not been done. The code of the step runs, and
        what it changed of the model, of random states and of what it can reach is put back; no op is run but for
        what the code looks at.

        Where shapes or control flow follow from what only the step computes, nothing can be planned: from now on
        steps run in eager, exactly and outside the budget, which a `Fallback` says once, and None is returned. With
        ``strict``, and on several ranks, that is refused.
        """
        return self._prepared(self._filled(batch), 3)

    def _prepared(self, batch: Any, level: int) -> Plan | None:
        """``level``: where a warning comes from, in calls from here."""
        if self._unplanned is not None:
            return None
        try:
            return self._prepare(batch)
        except Unplannable as no:
            if self.settings.strict or (compat_distributed.world_size() > 1 and not self.independent):
                raise
            note = self._fall_back(no)
            warnings.warn(note, Fallback, stacklevel=level)
            return None

    def _fall_back(self, no: Unsupported | BadInput | Infeasible) -> str:
        """From now on steps run in eager. Returns what is said of it."""
        end_frames(no, kept=True)
        self._unplanned = self._in_eager = Unplanned(no)
        self._variants.clear()
        self._arena = None
        note = f"{_IN_EAGER}, where the budget is not kept: {str(no).splitlines()[0]}"
        self._notes += [] if note in self._notes else [note]
        return note

    def _try_once_more(self) -> None:
        """A step in eager may have set up what the others find: scales, centers, buffers without a shape. From then
        on each step notes what its code may change: what was not planned once may come again."""
        if self._once_more and self._unplanned is not None and self._guesses is not None:
            self._once_more, self._tries_again, self._unplanned = False, True, None

    def _on_replaced(self) -> None:
        super()._on_replaced()
        self._tries_again, self._unplanned = self._tries_again or self._unplanned is not None, None

    # --- running ---

    def padded(self, batch: Any) -> Any:
        """The batch that the step is run on: filled up as ``pad_to`` of `fit` says, otherwise itself. Raises
        ``BadInput`` for one that is too long."""
        return padded(batch, self._pads)

    def _filled(self, batch: Any, *, largest: bool = False) -> Any:
        if not self._pads:
            return batch
        filled = padded(batch, self._pads, largest=largest, whole=not self._has_padded)
        self._has_padded = True
        return filled

    def __call__(self, batch: Any) -> Any:
        with self._exclusive():
            if self._added and all(p.grad is None for _, p in self._owned.parameters):
                self._added = 0  # the caller has dropped what was added up
            if self._replicas is not None and (not self._in_parts or self._added + 1 == self.loop.accumulate):
                self._replicas.check_sent()
            batch = self._filled(batch)
            if self._in_parts:
                return self._call_in_parts(batch)
            self._renew()
            check_no_gradients(self._owned.parameters)
            try:
                with self._undone_for_other_layers(batch):
                    out = self._run(batch)
            except OtherLayers:
                self._average_late()
                return self._call_in_parts(batch)
            self._ran = PartRuns()
            compat_optimizers.mark_stepped(self.optimizer)
            return out

    @contextmanager
    def _undone_for_other_layers(self, batch: Any) -> Iterator[None]:
        """What the step's code has done is put back where it is to run once more, as ranks have run other layers."""
        if self._replicas is None or not self._replicas.may_differ:
            yield
            return
        again: list[OtherLayers] = []
        with self._undone(batch, when=lambda: bool(again)):
            try:
                yield
            except OtherLayers as no:
                again.append(no)
                raise

    def _call_in_parts(self, batch: Any) -> Any:
        if self.optimizer is None:
            fault = "no optimizer: call step.backward(batch) and update yourself, or give fit an optimizer"
            raise BadInput(fault, place="step")
        if not self._added:
            check_no_gradients(self._owned.parameters)
        self._inside = self._added > 0
        try:
            out = self._backward(batch)
        finally:
            self._inside = False
        if self._added == self.loop.accumulate:
            try:
                self._update(averaged=False)
            finally:  # a step leaves no gradients, also where it fails
                for _, p in self._owned.parameters:
                    p.grad = None
        return out

    def backward(self, batch: Any) -> Any:
        """Forward and backward pass on a batch, within the budget: what ``loss = loss_fn(model, batch)`` and
        ``loss.backward()`` do, bit-identically. Gradients are left in ``p.grad``; where one is there, the new one is
        added to it in place. Returns what the step itself would return. Do as you like with gradients before
        ``update``. On several ranks they are averages, as ``DistributedDataParallel`` leaves them, and this
        rank's own in its ``no_sync()``; of parameters in shards they are this rank's parts, of which norms are
        refused."""
        with self._exclusive():
            if self._replicas is not None:
                self._replicas.check_parts()
                self._replicas.take_back(self._owned.parameters)
            self._inside = self._unsent
            try:
                out = self._backward(self._filled(batch))
            finally:
                self._inside = False
            if self._replicas is not None:
                self._unsent = self._replicas.apart
                if not self._unsent:
                    self._replicas.fill_up(self._owned.parameters, self.ranks)
                    self._average()
                self._replicas.hand_out(self._owned.parameters)
            return out

    def update(self) -> None:
        """The optimizer's step with the gradients that are in ``p.grad``, within the budget: what
        ``optimizer.step()`` does, bit-identically. Gradients stay, as in eager. What `fit` was told to do with them
        (``clip_norm``, ``clip_value``, ``scaler``, ``skip_nonfinite``) is done before."""
        with self._exclusive():
            if self._replicas is not None:
                self._replicas.take_back(self._owned.parameters)
            self._update(averaged=True)

    def _backward(self, batch: Any) -> Any:
        self._renew()
        held = {n: p.grad for n, p in self._owned.parameters if p.grad is not None}
        if not self._added:
            self._ran = PartRuns()
        out = self._run(batch, held)
        self._added += 1
        if self._in_eager is None:
            self._ran.add(self._latest)
        return out if self.loop.scaler is None else out[1]

    def _run(self, batch: Any, held: Mapping[str, torch.Tensor] | None = None) -> Any:
        """What the step returns, or its backward pass with the gradients ``held`` so far; compared with eager's,
        which runs first, in every so many steps. Gradients that the program hands back are left with their
        parameters."""
        if self._divergence is not None:
            self._divergence.look((p for _, p in self._owned.parameters if p.requires_grad), callers_level())
        self._plan_once_more(batch)
        unplanned = self._in_eager = self._unplanned or self._for_now()
        if unplanned is not None:
            out = self._run_unplanned(unplanned, batch, whole=held is None)
            self._try_once_more()
            return out
        check_gradients(held or {})
        try:
            return self._run_guessing(batch, self._ending(held))
        except Unplannable as no:
            no.add_note("step.prepare(batch) with this batch has it, and those that follow, run in eager")
            raise
        except Infeasible as no:
            if held is None:
                raise
            try:
                backward = self._ending({})
                with self._undone(batch):
                    program = self._program_of(self._ask(batch, backward), backward)
                no = self._of_all_parts(no, batch, program, adds=bool(held))
            except Unsupported:  # the code does not run once more: what one part needs is not said of all
                no = no.with_enough(())
            raise no from None

    def _plan_once_more(self, batch: Any) -> None:
        """Where a step in eager was to set up what was missing: if it has not, steps go on in eager."""
        if not self._tries_again:
            return
        self._tries_again = False
        try:
            with self._as_preparing():
                self._prepare_now(batch)
        # As before: it was said that the budget is not kept.
        except (Unsupported, BadInput, Infeasible) as no:
            self._fall_back(no)
        except Exception as error:
            self._fall_back(raised_on_stand_ins(error))
        else:
            self._notes = [n.replace(_IN_EAGER, _AT_FIRST) for n in self._notes]

    @staticmethod
    def _is_anomaly_ours() -> bool:
        """Whether it is still there when no other thread compiles: Inductor has it on meanwhile, for all threads."""
        with nothing_compiled_elsewhere():
            return torch.is_anomaly_enabled()

    def _for_now(self) -> Unplanned | None:
        """Under anomaly detection, with backward hooks on modules, and under modes of the caller's a step is eager's,
        whose nodes, functions and ops they look at; the next one may be planned again."""
        why = "a planned backward pass is not autograd's"
        if torch.is_anomaly_enabled() and self._is_anomaly_ours():
            under, instead = "under torch.autograd.set_detect_anomaly", "look for the anomaly in eager"
        elif compat.backward_hooks(self._owned.modules):
            under, instead = "with backward hooks on modules", "remove them"
        elif compat.in_dispatch_mode():
            under, why = (
                "under a TorchDispatchMode (FlopCounterMode, say)",
                "it would see none of the planned ops",
            )
            instead = "leave it"
        elif compat.in_function_mode():
            under, why = "under a TorchFunctionMode", "it would see none of the functions that a plan answers"
            instead = "leave it"
        else:
            return None
        what = f"a training step {under}", why
        if self.settings.strict:
            raise Unsupported(*what, f"{instead}, or leave out strict=True: such steps then run in eager")
        note = f"{under} steps run in eager, where the budget is not kept"
        if note not in self._notes:
            self._notes.append(note)
            warnings.warn(note, Fallback, stacklevel=callers_level())
        return Unplanned(Unsupported(*what))

    def _run_unplanned(self, unplanned: Unplanned, batch: Any, *, whole: bool) -> Any:
        check_call()
        if self.ranks is not None:
            self.ranks.agreed("running a step in eager", lambda: None, lambda _: "")
            self.ranks.begin()
        if self._replicas is not None and not self._inside:
            self._replicas.synchronize(self._owned.buffers)
        self._bring_back()
        static = [t for t in flatten(batch) if isinstance(t, torch.Tensor)]
        static += [p for _, p in self._owned.parameters] + list(self._owned.buffers.values())
        for one in each(self.optimizer) if self.optimizer is not None else ():
            static += [t for state in one.state.values() for t in tensors_in(state)]
        hooked = self._replicas is not None and self._replicas.hooked is not None
        ordered = dict(self._owned.parameters) if hooked else {}
        with unplanned.metered(static), compat_optimizers.ready_order(ordered) as ready:
            out = unplanned.backward(self._loss(batch), self.model, batch)
            self._ready = tuple(ready)
            if whole and self.optimizer is not None:
                if self._replicas is not None:
                    self._replicas.average(self._owned.parameters)
                if self._between(self._with_gradients(), None):
                    self._add_up()
                    self.optimizer.step()
        for _, p in self._owned.parameters if whole else ():
            p.grad = None
        self._take_over_replaced()
        return out

    def _run_guessing(self, batch: Any, ending: Ending) -> Any:
        """A planned step; in eager where it has other answers than its program takes for granted."""
        if self._guesses is None:
            return self._run_planned(batch, ending)
        if self._variants and not self._guesses.taken and self._once_more:
            try:
                return self._run_planned(batch, ending)
            except OtherAnswer as no:  # a question that no step before this one has had
                self._learn(no)
                no.add_note(
                    "nothing is updated, and what the step's code has done is not undone; call it again"
                )
                raise
        other: list[OtherAnswer | Unplannable] = []
        try:
            with self._undone(batch, when=lambda: bool(other)):
                try:
                    out = self._run_planned(batch, ending)
                except (OtherAnswer, Unplannable) as no:
                    end_frames(no)
                    other.append(no)
                else:
                    self._guesses.were_right()
                    return out
        except Unsupported:
            if not other:
                raise
            self._learn(other[0])
            raise other[0] from None  # an iterator of the code's cannot be set back
        note = f"the step runs in eager, where the budget is not kept: {other[0].what}"
        nothing = isinstance(other[0], Unplannable) and not self._variants
        self._learn(other[0])
        changes = self._guesses.hopeless or self._guesses.turned_again
        if not nothing and changes and self._readings is not None and self._guesses.give_up():
            self._variants.clear()
            self._arena = None
        if nothing or self._guesses.hopeless:
            note = self._fall_back(other[0])
        elif note not in self._notes:
            self._notes.append(note)
        warnings.warn(note, Fallback, stacklevel=callers_level())
        self._in_eager = Unplanned(other[0])
        out = self._run_unplanned(self._in_eager, batch, whole=not ending.leaves)
        if nothing:
            self._try_once_more()
        return out

    def _learn(self, other: OtherAnswer | Unplannable) -> None:
        assert self._guesses is not None
        if self._guesses.learn(other):
            self._variants.clear()
            self._arena = None

    def _run_planned(self, batch: Any, ending: Ending) -> Any:
        verifies = self._verify_every and (self._steps + 1) % self._verify_every == 0
        begun = None if verifies else self._in_step(batch, ending)  # eager's has to run first
        try:
            out = self._run_begun(batch, ending, begun)
        finally:
            if begun is not None:
                begun.put_back()
        waits = self.settings.strict or self.ranks is not None  # whatever that takes
        if self._readings is not None and self._readings.hopeless and not waits:
            self._once_more = False
            note = self._fall_back(self._readings.refusal)
            warnings.warn(note, Fallback, stacklevel=callers_level())
        return out

    def _run_begun(self, batch: Any, ending: Ending, begun: InStep | None) -> Any:
        variant, tensors, asked = self._run_code(batch, ending, begun)
        self._check_ranks(variant.program)
        if self.ranks is not None:
            self.ranks.begin()
        sent = self._looking is not None and self._looking.synchronized
        if self._replicas is not None and not self._inside and not sent:
            self._synchronize(bool(readings_of(variant.program)))
        self._steps += 1
        in_hooks = any(op.phase == "update" for op in variant.program.graph.ops)
        optimizer = self.optimizer if in_hooks or not ending.leaves else None
        eager = None
        if self._verify_every and self._steps % self._verify_every == 0:
            eager = run_eager(asked, tensor_leaves(batch), self._owned, optimizer, ending)
        if begun is not None and begun.goes_on(variant):
            results = begun.finished(tensors)
        else:
            self._put_away()
            replaced = self._replacing(variant, tensors, asked)
            with written_back(variant.program, tensors):
                results = variant.executor.run(tensors, consume=True, updating=self._updating)
            self._replaced(replaced, results)
        made, parameters = variant.program.gradients, dict(self._owned.parameters)
        self._ready = variant.program.ready
        count = len(variant.program.results) - len(made)
        for n, g in zip(made, results[count:], strict=True):
            parameters[n].grad = g
        own = results[:count]
        del results
        if in_hooks and ending.leaves:
            compat_optimizers.mark_stepped(self.optimizer)
        if ending.clip is not None and self.loop.clip_norm is not None:
            self.grad_norm = own.pop()
        del own[len(own) - variant.program.extra :]
        if eager is not None:
            ours = tensors_by_name(own, parameters, self._owned.buffers, optimizer, random_states())
            if names := differences(eager, ours):
                text = [f"{name} is not bit-identical to eager's" for name in names]
                raise VerificationFailed(text, f"step {self._steps}")
        count = len(own) - len(asked.trace.kept)
        asked.fill(own[count:], tensor_leaves(batch))
        return asked.results.unflatten(own[:count])


def check_no_gradients(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ``Unsupported`` for gradients that eager would add to, or that would stay."""
    for n, p in parameters:
        if p.grad is not None:
            raise Unsupported(
                f"a training step while {n!r} has a gradient", "a step starts with zero_grad and leaves no gradients",
                "call optimizer.zero_grad() before the step",
            )  # fmt: skip
