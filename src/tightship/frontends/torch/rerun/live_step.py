"""One training step's Python code, run as in eager, and the program that it asks for.

What a step computes is known only when its code has run: a number may have been annealed, a counter have reached its
end, a tensor have been replaced. So the code runs in every step (`Rerun`), and what it asks for is compared with what
was captured.

Stand-ins that the code keeps expire (`stand_ins`). What they stood for is handed back by the program behind the
results, and they become that (`Asked.fill`), wherever they are: to the next step they are constants, of which each
step may bring another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from tightship.errors import Unplannable, Unsupported
from tightship.frontends.torch import compat, compat_capture, compat_distributed, compat_optimizers
from tightship.frontends.torch.capture.checks import check_replaced, checked_leaf
from tightship.frontends.torch.capture.incremental import Ending, StepCapture
from tightship.frontends.torch.capture.random_state import random_state_watched
from tightship.frontends.torch.capture.readings import Reading
from tightship.frontends.torch.capture.state_restore import Change, Leftovers, stand_ins_in
from tightship.frontends.torch.program import Program
from tightship.frontends.torch.rerun.arguments import name_of
from tightship.frontends.torch.rerun.function_trace import FunctionTrace, add_hook, nowhere, write_back
from tightship.frontends.torch.rerun.gradient_hooks import GradientHook
from tightship.frontends.torch.rerun.numbers import Renumbering, with_numbers_at
from tightship.frontends.torch.rerun.rerun import Rerun
from tightship.frontends.torch.rerun.stand_ins import Expired, Kept, expire_kept, held_elsewhere
from tightship.frontends.torch.structure import (
    LossFn,
    Results,
    TensorLeaf,
    checked_loss,
    map_leaves,
    tensor_leaves,
)

__all__ = ["Asked", "Begun", "Owned", "run_code"]


class Begun(Protocol):
    """The planned step of a trace, some of whose ops run while the code that asks for them still does."""

    def told(
        self,
        reading: Reading,
        trace: FunctionTrace,
        numbers: dict[int, tuple[Any, ...]],
        constants: Sequence[Any],
    ) -> Sequence[torch.Tensor] | None:
        """What the step reads there, run up to there with these numbers, by op, and constants."""

    def before(self, tensors: dict[tuple[str, Any], Any]) -> dict[tuple[str, Any], Any]:
        """These, with what they held when the step began."""

    def abort(self) -> None:
        """All that its ops have changed is put back."""


class Owned:
    """A model's modules, parameters and buffers, and where buffers stand, looked up once. ``before_capture`` brings
    back what of them is not in memory."""

    def __init__(self, model: torch.nn.Module, before_capture: Callable[[], None] = lambda: None) -> None:
        self.model, self.before_capture = model, before_capture
        self.modules = tuple(model.modules())
        self.parameters = tuple(model.named_parameters())
        self.known_parameters = {("parameter", n): p for n, p in self.parameters}
        self.buffers = dict(model.named_buffers())
        homes = [(n, m._buffers, k) for n, (m, k) in {n: _home(model, n) for n in self.buffers}.items()]
        self.homes = tuple((n, home, k, self.buffers[n]) for n, home, k in homes)
        where = [(n, *_home(model, n), p) for n, p in self.parameters]
        self.parameter_homes = tuple(
            (n, m._parameters, k, p)
            for n, m, k, p in where
            if isinstance(m._parameters, dict) and m._parameters.get(k) is p  # not of scripted ones
        )

    def hooks(self) -> list[GradientHook]:
        """Those on parameters, as they are now."""
        return [
            GradientHook(n, p, fn, late=late)
            for n, p in self.parameters
            if compat_optimizers.gradient_hooks(p)
            for late, fn in compat_optimizers.gradient_hooks(p)
        ]

    def take(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """``new`` is in the place of the buffer ``old`` from now on."""
        self.buffers |= {n: new for n, _, _, own in self.homes if own is old}
        self.homes = tuple((n, home, k, self.buffers[n]) for n, home, k, _ in self.homes)

    def replaced(self) -> list[tuple[str, dict[str, Any], str, torch.Tensor, torch.Tensor]]:
        """(name, mapping, key, own tensor, tensor there now) of buffers in whose place something else stands."""
        return [(n, home, k, own, home[k]) for n, home, k, own in self.homes if home.get(k) is not own]


@dataclass(frozen=True)
class Asked:
    """What the code of one step asked for. ``program`` is None where it is what ``trace`` has been for before.
    ``results`` puts the step's results together; ``constants`` are this step's by the index of the program's,
    ``bound`` by their numbers in the trace; ``numbers`` are the new ones of ops of the trace's program, by op.
    ``kept`` are the stand-ins that the code has kept, by their numbers in the trace; ``placed`` those that it has put
    in the place of a buffer of another size or type: (buffers of a module, name, stand-in)."""

    trace: FunctionTrace
    program: Program | None
    results: Results
    constants: tuple[Any, ...]
    bound: dict[int, torch.Tensor]
    numbers: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    kept: Kept = field(default_factory=list)
    placed: list[tuple[dict[str, Any], str, torch.Tensor]] = field(default_factory=list)

    def fill(self, made: Sequence[torch.Tensor], leaves: Sequence[object]) -> None:
        """What the code has kept becomes what it stood for: a tensor that the program has ``made`` (as ``trace.kept``
        says), or one of the batch's ``leaves``. In eager, too, it is another name for the same bytes."""
        trace, given = self.trace, [x for x in leaves if isinstance(x, torch.Tensor)]
        tensors = dict(zip(trace.kept, made, strict=True))
        tensors |= dict(zip(range(trace.leaves, trace.inputs), given, strict=True))
        # Eager's would have a gradient, which this step does not: reading one of these stays an error.
        asked = [c.args[0] for c in trace.calls if name_of(c.func) == "retain_grad"]
        retained = {trace.index[id(t)] for t in asked}
        # What was made of others lets go of them.
        for n, stand_in in sorted(self.kept, key=lambda one: -one[0]):
            if n not in retained:
                compat.become(stand_in, tensors[n], given=n < trace.inputs)
        for home, key, tensor in self.placed:
            home[key] = tensor
        self.kept.clear()
        self.placed.clear()
        trace.elsewhere = nowhere


def run_code(
    owned: Owned, loss_fn: LossFn, ending: Ending, batch: Any,
    traces: Sequence[FunctionTrace], *, name: str = "step", begun: Begun | None = None,
) -> Asked:  # fmt: skip
    """Run ``loss_fn(model, batch)`` of ``owned.model`` on stand-ins, with its side effects; ``traces`` are those of
    earlier steps of the same ``ending`` that may be met again, the likeliest first. Nothing is computed, and nothing
    drawn from torch's random state, but what the code looks at: by ``begun``, or as it is captured.

    Raises as ``capture_step``, and whatever the code raises.
    """
    code = _Code(owned, ending, batch, traces, name, begun)
    kept: Kept = []
    try:
        with compat_capture.python_for_stand_ins(has_data=True), code.open():
            with random_state_watched():
                out = code.rerun.run(lambda given: code.asked(loss_fn, given))
            asked = code.finish(out)
            del out
    finally:
        code.expire(kept)
    if code.ended is None and not _handed_back(asked.trace, kept):
        kept = held_elsewhere(kept)
    if code.ended is not None or _handed_back(asked.trace, kept):
        asked = code.completed(asked, kept)
    else:
        asked = _handing_back(owned, ending, batch, asked, kept, name, begun)
    for hook in code.hooks:
        hook.check_kept()
    return asked


def _handed_back(trace: FunctionTrace, kept: Kept) -> bool:
    """Whether the trace's program hands back all that is kept of what it makes."""
    return all(n in trace.kept for n, _ in kept if n >= trace.inputs)


def _handing_back(
    owned: Owned, ending: Ending, batch: Any, asked: Asked, kept: Kept, name: str, begun: Begun | None
) -> Asked:
    """``asked`` with a program that also hands back what is ``kept``: a trace of the same calls, captured without
    running the code once more."""
    trace = asked.trace
    also = {*trace.kept, *(n for n, _ in kept if n >= trace.inputs)}
    code = _Code(owned, ending, batch, [trace], name, begun)
    try:
        with compat_capture.python_for_stand_ins(has_data=True), code.open():
            rerun = code.rerun
            new = rerun.made_again(asked.bound)
            results = [n for n in trace.results if n >= 0 and n not in trace.constants]
            again = code.finish(asked.results.unflatten([rerun.trace.tensors[new[n]] for n in results]))
            del rerun
    finally:
        code.expire([])
    trace.superseded = True
    return code.completed(again, [(new.get(n, n), t) for n, t in kept], {new[n] for n in also})


class _Code:
    def __init__(
        self, owned: Owned, ending: Ending, batch: Any, traces: Sequence[FunctionTrace], name: str,
        begun: Begun | None = None,
    ) -> None:  # fmt: skip
        self.begun = begun
        self.owned, self.model, self.ending = owned, owned.model, ending
        self.batch, self.traces, self.name = batch, traces, name
        self.leaves = tensor_leaves(batch)
        self.stack = ExitStack()
        self.captures: list[StepCapture] = []
        self.caches: list[compat_capture.GrownCaches] = []
        known = {(m, k): None for t in traces for m, k in t.attributes}
        self.left = [Leftovers(self.model, known, owned.modules)]
        self.has_run = False
        self.shown: list[FunctionTrace] = []
        self.ended: Callable[[Sequence[Any]], Program] | None = None  # makes the program of a captured trace
        self.described: dict[int, Any] = {}  # what `ended` takes, by number
        self.trace: FunctionTrace | None = None  # what was followed or captured to its end
        self.others: dict[int, int] = {}  # numbers of tensors of other traces, by id
        self.placed: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self.hooks = owned.hooks()
        for hook in self.hooks:
            if hook.name not in ending.wanted and hook.parameter.requires_grad:
                raise Unsupported(
                    f"{hook}, which the optimizer does not step", "the step leaves its gradient out",
                    "remove it, give the parameter to the optimizer, or train in parts (split=True)",
                )  # fmt: skip

    @contextmanager
    def open(self) -> Iterator[None]:
        cleaned = False
        with self.stack:
            self.rerun = Rerun(self.traces, self.start, self.stand_ins, self.read, self.tell)
            self.shown = self.rerun.shown
            try:
                yield
                cleaned = True
            finally:
                if not cleaned:
                    self.clean()

    def start(self) -> StepCapture:
        if self.begun is not None:
            self.begun.abort()
        self.owned.before_capture()
        capture = StepCapture(self.model, self.batch, self.name, self.ending)
        if not self.has_run:
            self.caches.append(compat_capture.GrownCaches())
            self.left.append(Leftovers(self.model))
        self.stack.enter_context(compat_capture.quiet_engine())
        self.stack.enter_context(capture.tracker.active())
        self.captures.append(capture)
        return capture

    def stand_ins(self, trace: FunctionTrace) -> Any:
        """The batch with a trace's stand-ins in the place of its tensors."""
        tensors = iter(trace.tensors[trace.leaves : trace.inputs])
        return map_leaves(lambda x: next(tensors) if isinstance(x, torch.Tensor) else x, self.batch)

    def read(self, trace: FunctionTrace, bound: Mapping[int, torch.Tensor]) -> dict[tuple[str, Any], Any]:
        """The caller's tensors by role and key, as guards know them."""
        found: dict[tuple[str, Any], Any] = self.owned.known_parameters.copy()
        found |= {("buffer", n): b for n, b in self.owned.buffers.items()}
        found |= {("input", k): x for k, x in enumerate(self.leaves)}
        for k, c in enumerate(trace.program.constants if trace.program is not None else ()):
            found["constant", k] = bound.get(trace.index.get(id(c), -1), c)
        return found if self.begun is None else self.begun.before(found)

    def tell(self, reading: Reading) -> Sequence[torch.Tensor] | None:
        """What the step says that the code so far has asked for; None where it cannot be run for that."""
        rerun, trace = self.rerun, self.rerun.trace
        if self.begun is None or trace.repeats:
            return None
        numbers: dict[int, tuple[Any, ...]] | None = {}
        if rerun.actual:
            numbers = trace.renumbering.changes(trace.program, trace, rerun.actual, rerun.number)
        if numbers is None or with_numbers_at(trace.program, numbers) is None:
            return None
        return self.begun.told(reading, trace, numbers, self.constants())

    def constants(self) -> list[Any]:
        """Those of this step by the index of the program's."""
        rerun, trace = self.rerun, self.rerun.trace
        return [rerun.bound.get(trace.index.get(id(c), -1), c) for c in trace.program.constants]

    # --- around the code ---

    def asked(self, loss_fn: LossFn, given: Any) -> Any:
        for hook in self.hooks:
            if hook.parameter.requires_grad:
                self.rerun.special(add_hook, (hook.parameter, hook), {})
        out = loss_fn(self.model, given)
        self.rebound()
        self.has_run = True
        return out

    def rebound(self) -> None:
        """A buffer that was replaced by a new tensor is written back, which is what the next step would read. A
        parameter that was is another one from then on."""
        for name, home, key, own in self.owned.parameter_homes:
            if home.get(key) is not own:
                home[key] = own
                raise Unplannable(
                    f"the parameter {name!r}, in whose place a step puts another,",
                    "the optimizer has the one that was there, and a plan is of one model",
                    f"keep it in a buffer, or set its data ({name}.data = …)",
                )  # fmt: skip
        for name, home, key, own, now in self.owned.replaced():
            if _is_another(own, now):  # it becomes what it stands for, as what is kept elsewhere does
                continue
            check_replaced(name, own, now)
            self.rerun.special(write_back, (own, now), {})
            home[key] = own

    def expire(self, kept: Kept) -> None:
        """When the run is over, however it went: what the code has kept of stand-ins says so, and is ``kept``."""
        shown, self.shown = self.shown, []
        self.__dict__.pop("rerun", None)  # not there where no run has begun
        del self.captures
        for hook in self.hooks:
            hook.remove()
        for trace in {id(t): t for t in shown}.values():
            if (
                trace.program is None and trace is not self.trace
            ):  # it has not come to its end, and is of no use
                for t in filter(compat.is_fake, trace.tensors):
                    compat_distributed.expire(t, Expired)
                continue
            for n, stand_in in expire_kept(trace):
                number = n if trace is self.trace else self.others.get(id(stand_in))
                if number is not None:
                    kept.append((number, stand_in))

    def completed(self, asked: Asked, kept: Kept, also: Iterable[int] = ()) -> Asked:
        """What was asked for, with what the code has ``kept``, which a program captured in this run hands back."""
        trace = asked.trace
        trace.elsewhere = {id(t): n for n, t in kept}.get  # others may be gone, and their ids be given anew
        if self.ended is None:
            return replace(asked, kept=kept)
        numbers = sorted({*also, *(n for n, _ in kept if n >= trace.inputs)})
        for n in numbers:
            if self.described.get(n) is None:
                place = next((c.origin for c in reversed(trace.calls) if n >= c.first), "")
                raise Unplannable(
                    f"a tensor made at {place} and kept for later", "its bytes are not one strided storage",
                    "keep a dense copy of it",
                )  # fmt: skip
        program = self.ended([self.described[n] for n in numbers])
        trace.kept, trace.program = tuple(numbers), program
        return replace(asked, program=program, constants=program.constants, kept=kept)

    def clean(self, *, finished: bool = False) -> list[Change]:
        """Takes away what the code has left of stand-ins, unless it has ``finished``. Returns all that were there."""
        for _, home, key, own, now in self.owned.replaced():
            home[key] = own
            if finished and _is_another(own, now):
                self.placed.append((home, key, now))
        grown = [c.empty() for c in self.caches]
        for t in self.traces:
            for c in t.caches:
                c.cache_clear()
        self.grown = tuple(c for some in grown for c in some)
        return [c for left in reversed(self.left) for c in left.remove(finished=finished)]

    # --- when it has run ---

    def finish(self, out: Any) -> Asked:
        rerun = self.rerun
        tensors = tensor_leaves(out)
        numbers = rerun.settle(tensors)
        new_numbers = self.renumbered() if rerun.execution is None else None
        if rerun.execution is None and new_numbers is None and (rerun.actual or rerun.trace.repeats):
            rerun.go_on()
            numbers = rerun.settle(tensors)
        del tensors
        trace = rerun.trace
        results = [n for n in numbers if n >= 0 and n not in trace.constants]
        changes = self.clean(finished=True)
        self.trace, self.others = trace, rerun.other_numbers
        position = iter(range(len(results)))

        def leaf(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                n = rerun.number(x)
                if n < 0 or n in trace.constants:
                    return x
                return Results.Position(next(position), compat_distributed.layout_of(x))
            return checked_leaf(x)

        spec = Results(map_leaves(leaf, out))
        if rerun.execution is None:
            numbers_of = new_numbers or {}
            return Asked(
                trace, None, spec, tuple(self.constants()), rerun.bound, numbers_of, placed=self.placed
            )
        capture = self.captures[-1]
        rerun.execution.check_frozen()
        fakes = rerun.execution.fakes
        loss = checked_loss(out)
        guards = len(capture.guards)
        self.described = {
            n: capture.described(fakes[n])
            for n in range(trace.inputs, len(fakes))
            if n not in trace.constants
        }
        self.ended = capture.ended(
            fakes[rerun.number(loss)], [fakes[n] for n in results], spec, self.notes(changes)
        )
        self.note(trace, capture.guards[guards:], changes)
        return Asked(trace, None, spec, (), rerun.bound, placed=self.placed)

    def renumbered(self) -> dict[int, tuple[Any, ...]] | None:
        """The numbers of this step by op of the program, if nothing but numbers differs and that is all it takes."""
        rerun, trace = self.rerun, self.rerun.trace
        if not trace.repeats and not rerun.actual:
            rerun.take_numbers()
        if not rerun.actual or trace.repeats:
            return None
        found = trace.renumbering.changes(trace.program, trace, rerun.actual, rerun.number)
        renewed = None if found is None else with_numbers_at(trace.program, found)
        if renewed is None:
            return None
        rerun.take_numbers()
        trace.program = renewed
        return found

    def notes(self, changes: Sequence[Change]) -> list[str]:
        left = {(c.module, c.name): None for c in changes if not stand_ins_in(vars(c.module).get(c.name))}
        return [
            f"{type(m).__name__}.{k} is set to a tensor by each step in eager, not by the program"
            for m, k in left
        ]

    def note(self, trace: FunctionTrace, guards: Sequence[Any], changes: Sequence[Change]) -> None:
        """What is known of a trace when its calls and what follows them are taken down."""
        trace.batch = tuple([TensorLeaf.of(t) for t in self.leaves])
        trace.end_guards = tuple(guards)
        trace.attributes = tuple({(c.module, c.name): None for c in changes})
        trace.caches = tuple(
            {id(c): c for c in (*self.grown, *(c for t in self.traces for c in t.caches))}.values()
        )
        trace.renumbering = Renumbering()
        keys: dict[int, int] = {}
        shared = [*trace.tensors[: trace.inputs], *(trace.tensors[n] for n in trace.constants)]
        for t in shared:
            if not compat.is_fake(t):
                keys[compat.storage_key(t)] = keys.get(compat.storage_key(t), 0) + 1
        trace.rigid = {n for n in trace.constants if keys[compat.storage_key(trace.tensors[n])] > 1}


def _is_another(buffer: torch.Tensor, now: torch.Tensor | None) -> bool:
    """Whether a tensor of another size or type, which the step has made, is in the place of a buffer."""
    if now is None or not compat.is_fake(now):
        return False
    return (now.shape, now.dtype, now.device) != (buffer.shape, buffer.dtype, buffer.device)


def _home(model: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last
