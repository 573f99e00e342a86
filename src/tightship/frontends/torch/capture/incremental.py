"""Capture a step whose calls come one by one, while the caller's code runs on stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from tightship.errors import Unplannable, Unsupported
from tightship.frontends.torch import compat, compat_distributed, compat_optimizers, eager_paths
from tightship.frontends.torch.capture.checks import check_held
from tightship.frontends.torch.capture.lower import finish
from tightship.frontends.torch.capture.parts_written import check_gathered
from tightship.frontends.torch.capture.replaced_data import ReplacedData, check_data
from tightship.frontends.torch.capture.step import Capture, tensors_of
from tightship.frontends.torch.capture.tape import Origin, TapeValue
from tightship.frontends.torch.collectives import Division, reduced, share
from tightship.frontends.torch.missing_gradients import leave_out
from tightship.frontends.torch.optimizer.updates import SeveralUpdates, Updates
from tightship.frontends.torch.program import Program
from tightship.frontends.torch.structure import BatchSpec, Results

__all__ = ["Ending", "StepCapture"]


@dataclass(frozen=True)
class Ending:
    """What follows a step's forward pass: a backward pass for the gradients of ``wanted`` parameters, and the
    optimizer's ``updates`` with them.

    Where the step ends with the backward pass, ``leaves`` is true: gradients are added to those of ``held``, in
    place, and the others are the program's last results; the optimizer's state stands beside them. Otherwise ``clip``
    changes gradients before the updates, in place, and may return a tensor, which is the program's last result.
    ``averaged`` are the parameters whose gradients are averaged ``among`` ranks before that, by message. ``add_up``
    adds up over all ranks, in place, those of which each rank still has a summand behind the clipping.
    ``ordered``: whether the program says in which order gradients are there.
    ``repeats``: whether collectives that change nothing may run again. ``whole``: whether eager has whole parameters,
    so that what code writes to one stays.
    """

    wanted: tuple[str, ...]
    updates: Updates | SeveralUpdates | None
    clip: Callable[[Mapping[str, torch.Tensor]], torch.Tensor | None] | None = None
    leaves: bool = False
    held: Mapping[str, torch.Tensor] = field(default_factory=dict)
    averaged: tuple[tuple[str, ...], ...] = ()
    among: Division | None = None
    add_up: Callable[[Mapping[str, torch.Tensor]], None] | None = None
    repeats: bool = False
    whole: bool = False
    ordered: bool = False

    @property
    def part(self) -> str:
        """Which part of a step ends so; empty for all of it."""
        return "" if not self.leaves else "adding" if self.held else "backward"


class StepCapture(Capture):
    """Captures a step whose calls come one by one, as `Execution` makes them: ``program`` when all are made."""

    def __init__(self, model: torch.nn.Module, batch: Any, name: str, ending: Ending) -> None:
        super().__init__(model, batch, name)
        self.ending, self.tape.repeats, self.ordered = ending, ending.repeats, ending.ordered
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._given = self._fakes(ending.held.values())
        named = (*self._given.parameters.items(), *self._given.buffers.items())
        self._replaced_data = ReplacedData(self.tape, self.mode, named)

    @property
    def stand_ins(self) -> Any:
        """The batch on fake tensors."""
        return self._given.batch

    @property
    def guards(self) -> list[Any]:
        return self.recorder.guards

    def inputs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What the code sees of parameters, buffers and the batch, and the fake tensor of each."""
        own = [(p, self._given.parameters[n]) for n, p in self.parameters.items()]
        own += [(b, self._given.buffers[n]) for n, b in self.buffers.items()]
        return own + [(t, t) for t in tensors_of(self._given.batch)]

    def adds_to(self, parameter: torch.Tensor | None = None) -> bool:
        """Whether a parameter, or any, has a gradient from before, which the step adds to."""
        return any(parameter is None or parameter is self.parameters[n] for n in self.ending.held)

    @contextmanager
    def executing(self) -> Iterator[None]:
        with compat_distributed.captured_alike(), eager_paths.active(), self.mode, self.recorder:
            yield

    def instead(self, func: Any) -> Any:
        """What is called in the place of a function that reads data by itself."""
        return self.readers.instead(func)

    def swapped(self) -> AbstractContextManager[None]:
        """The model on fake tensors."""
        return self._swapped(self._given)

    def origin(self) -> Origin:
        return self.tracker.here()

    def place(self, origin: Origin | None) -> None:
        """Where calls come from that are made again; None: where the running code is."""
        self.tracker.place = origin

    def asking(self, number: int) -> None:
        """The ops to come belong to the torch function's call of that number."""
        self.recorder.asked = number

    @contextmanager
    def looking(self, told: Sequence[Sequence[torch.Tensor]]) -> Iterator[None]:
        """The code itself looks at what the call inside reads, which it has been ``told`` if this is made again."""
        questions = self.recorder.questions
        questions.looks, questions.told = True, iter(told)
        try:
            yield
        finally:
            questions.looks, questions.told = False, iter(())

    def contents(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is in a fake tensor, for code that looks at it."""
        with compat.without_modes():
            return self.recorder.looked_at(tensor)

    def write_back(self, buffer: torch.Tensor, now: torch.Tensor) -> None:
        """To be taken down behind the backward pass."""
        self._late.append((buffer, now))

    def owned(self, constant: torch.Tensor) -> torch.Tensor:
        """The fake tensor that stands for a constant to which other data are given."""
        fake = self.recorder.fake_of(constant)
        self._replaced_data.own("a tensor that is not the model's", fake)
        return fake

    def set_data(self, own: torch.Tensor, data: torch.Tensor) -> None:
        """Other data for what the caller owns: written there behind the backward pass."""
        data = self.recorder.fake_of(data)
        check_data(str(self.origin()), self.tape.values[self.tape.value(own)], data)
        with compat.without_modes():
            own.data = data

    def resume(self) -> None:
        self.tracker.resume()

    def described(self, tensor: torch.Tensor) -> TapeValue | None:
        """What `ended` takes for a tensor of the step, if it is one whose bytes a program can hand back."""
        return self.tape.described(tensor)

    def ended(
        self, loss: torch.Tensor, results: Sequence[torch.Tensor], spec: Results, notes: Sequence[str]
    ) -> Callable[[Sequence[TapeValue]], Program]:
        """Takes down what follows the calls made; returns what makes the program, with further results behind
        those that the step hands back. It holds no tensor that the code has seen."""
        ending = self.ending
        check_gathered(self.tape, whole=ending.whole)
        wanted = ending.wanted if self._trained() else ()
        leaves = [self._given.parameters[n] for n in wanted]
        held = self._held(ending.held)
        for n, g in held.items():
            self._given.parameters[n].grad = g
        self.asking(-1)
        self._check_graph(loss, wanted)
        with torch.enable_grad(), self.executing():
            values = [self.tape.value(compat_distributed.own_part(t)) for t in (*results, loss)]
            with self._stepping_in_hooks():
                gradients = self._gradients(loss, wanted, leaves)
            self._late = self._replaced_data.taken([*self._late, *self._replaced_data.restored()])
            self._write_back(self._late, self._given)
        made: list[str] = []
        norm: torch.Tensor | None = None
        check_held(held, gradients)
        if ending.leaves:
            made = [n for n in gradients if n not in held]
            if ending.updates is not None:
                self._state(ending.updates, gradients)
        else:
            gradients = self._averaged(gradients)
            if ending.clip is not None:
                found = {n: p for n, p in self._given.parameters.items() if n in gradients}
                norm = self._clipped(ending.clip, found)  # in the model's order, in which norms add up
            if ending.add_up is not None:
                with torch.no_grad(), self.executing(), self.recorder.in_phase("update"):
                    ending.add_up(gradients)
            notes = [*notes, *self._updated(ending.updates, self._given, gradients)]
        last = [gradients[n] for n in made] if norm is None else [norm]
        tape, guards, name, ends = self.tape, self.recorder.guards, self.name, [*map(self.tape.value, last)]
        batch, replaced, ready = BatchSpec.of(self.batch), self._replaced_data, tuple(self.ready)

        def program(kept: Sequence[TapeValue]) -> Program:
            extra = replaced.extra()
            handed_back = [*values[:-1], *map(tape.intern, kept), *extra, *ends]
            captured = finish(
                tape, handed_back, result_spec=spec, name=name, guards=guards, batch=batch, notes=notes,
                losses=values[-1:], sums=True, whole_batch=False,
            )  # fmt: skip
            apart = replaced.apart(handed_back, captured.slots)
            return replace(captured, gradients=tuple(made), apart=apart, extra=len(extra), ready=ready)

        return program

    def _check_graph(self, loss: torch.Tensor, wanted: Sequence[str]) -> None:
        """Refuses a backward pass that in eager goes on to parameters through a graph that this step has not made.
        Notes which get no gradient."""
        nodes = compat.backward_nodes(loss.grad_fn)
        if any(map(compat.is_of_the_past, nodes)):
            raise Unsupported(
                "a backward pass through a tensor that an earlier step has made",
                "that step's backward pass has freed its graph, in eager, too",
                "keep a tensor without a graph (detach())",
            )  # fmt: skip
        real = {id(fake): t for fake, t in self._differentiable.items()}
        real |= {id(fake): self.parameters[n] for n, fake in self._given.parameters.items()}
        leaves = [real.get(id(x), x) for n in nodes if (x := getattr(n, "variable", None)) is not None]
        graphs = (self.tape.graphs & nodes) | {t.grad_fn for t in leaves if t.grad_fn is not None}
        ends = [getattr(n, "variable", None) for n in compat.backward_nodes(*graphs)]
        if any(isinstance(x, torch.nn.Parameter) for x in ends):
            raise Unsupported(
                "a backward pass through a tensor that was made outside of the step from parameters",
                "it would go on into the graph of that tensor, whose ops the step has not made",
                "make the tensor in the loss function, or give it without its graph (detach())",
            )  # fmt: skip
        own = {id(self.parameters[n]) for n in wanted}
        leave_out(t for t in leaves if id(t) not in own and not compat.is_fake(t))

    def _averaged(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Averages gradients over ranks in place, as soon as nothing else needs those of one message."""
        among = self.ending.among
        records, tape = self.tape.records, self.tape
        buckets = [[n for n in names if n in gradients] for names in self.ending.averaged]
        for n in (n for names in buckets for n in names if gradients[n].layout is not torch.strided):
            raise Unplannable(
                f"the sparse gradient of {n!r}, which several ranks average,",
                "how many of its rows are different on all ranks is not known before the step",
                "sparse=False in the embedding, or torch.compile's backend, which leaves gradients to torch",
            )
        homes = {n: tape.storage(tape.value(gradients[n])) for names in buckets for n in names}
        last: dict[int, int] = {}
        for k, r in enumerate(records):
            used = {tape.storage(v) for v in (*r.reads, *(v for v in r.results if v >= 0))}
            last |= dict.fromkeys((*used, *r.writes), k)
        behind: dict[int, list[Any]] = {}

        def recorded(at: int, known: int) -> None:
            behind.setdefault(at, []).extend(records[known:])
            del records[known:]

        with torch.no_grad(), self.executing(), self.recorder.in_phase("backward"):
            for names in filter(None, buckets):
                assert among is not None
                owned, parts = [], []
                for n in names:
                    owned.append(
                        list(homes.values()).count(homes[n]) == 1 and not tape.storages[homes[n]].role
                    )
                    known = len(records)
                    parts.append(share(gradients[n], among, own=owned[-1]))
                    recorded(last.get(homes[n], -1), known)
                known = len(records)
                for n, own, mean in zip(names, owned, reduced(parts, among.group), strict=True):
                    if mean.dtype != gradients[n].dtype:
                        mean = gradients[n].copy_(mean) if own else mean.to(gradients[n].dtype)
                    if not own:
                        gradients[n] = self._given.parameters[n].grad = mean
                        self._name_gradient(n, mean)
                recorded(max(last.get(homes[n], -1) for n in names), known)
        records[:] = [
            *behind.get(-1, ()),
            *(x for k, r in enumerate(records) for x in (r, *behind.get(k, ()))),
        ]
        return gradients

    @contextmanager
    def _stepping_in_hooks(self) -> Iterator[None]:
        """Where hooks on parameters step the step's optimizers, their updates are taken down there."""
        updates = self.ending.updates

        def stepped(part: int) -> None:
            assert updates is not None
            given = self._given.parameters
            with compat.without_modes(), torch._C.DisableTorchFunction():
                gradients = {n: g for n in updates.parts[part].names if (g := given[n].grad) is not None}
                for updater in updates.ops_of(part, gradients, self._rows(gradients)):
                    self._update(updater, given, gradients)

        def refuse(optimizer: Any) -> None:
            raise Unsupported(
                f"a hook on a parameter that steps a {type(optimizer).__name__}", "fit does not know that optimizer",
                "give fit all of them, as a list; or leave hooks out: a planned step updates each parameter "
                "as soon as its gradient is there",
            )  # fmt: skip

        with ExitStack() as stack:
            for k, part in enumerate(updates.parts if updates is not None else ()):
                stack.enter_context(compat_optimizers.step_replaced(part.optimizer, partial(stepped, k)))
            stack.enter_context(compat_optimizers.steps_seen(refuse))
            yield
