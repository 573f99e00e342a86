"""A whole step as Inductor compiles it: its code and plan, and its runs.

A part of `compiled_step`, whose problem and guarantee these are.
"""

from __future__ import annotations

import inspect
import math
import pathlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from tightship.errors import Unsupported, VerificationFailed
from tightship.execute import allocator
from tightship.execute.aiming import Candidate
from tightship.execute.cache import DEFAULT, KeptPartitions, Partition, Unplanned, folder_of
from tightship.execute.compiled import CompiledPass, Measured, StepPlan, StepReplay, place
from tightship.execute.compiled_ranks import Decision
from tightship.execute.compiled_step_search import StepSearch
from tightship.execute.interpreter import RunStats, report
from tightship.execute.interrupts import Updating
from tightship.execute.kept_code import Choice, KeptCode
from tightship.execute.script import device_of
from tightship.execute.settings import Settings
from tightship.frontends.torch import compat_inductor, compat_optimizers
from tightship.frontends.torch.capture.expectations import only_raises
from tightship.frontends.torch.capture.flat import Flat, NoFormula, flatten_program
from tightship.frontends.torch.capture.number_inputs import OpNumber, takes
from tightship.frontends.torch.collectives import Collective
from tightship.frontends.torch.compat_inductor import Lower, Lowered, Outdated
from tightship.frontends.torch.optimizer.copy import bare, copied, random_untouched
from tightship.frontends.torch.optimizer.given import independent
from tightship.frontends.torch.optimizer.tensors import Path
from tightship.frontends.torch.optimizer.updates import Member, Updater, state_at
from tightship.frontends.torch.program import Program
from tightship.graph import aligned, alignment_of
from tightship.planners import default
from tightship.process_local import NotCopied
from tightship.units import Budget

__all__ = ["Compilation", "WholePlan"]

_NUMBERS = (
    "numbers are Inductor's: rounded as its fused kernels round, no further from exact ones than code that "
    "torch.compile makes, and with random numbers as it draws them"
)
_UNCHECKED = (
    "checks that the code makes of what it computes (assertions, arguments of distributions) are left out"
)


@dataclass(frozen=True)
class WholePlan(StepPlan):
    """A compiled step's bytes (`StepPlan`, of one pass). ``notes``: what a user should know of it."""

    notes: tuple[str, ...] = ()


class Compiled(NotCopied):
    """Runs a compiled program, as `Executor` runs one op by op."""

    def __init__(
        self, program: Program, optimizer: Any, flat: Flat, call: Callable[[list[Any]], Any], plan: WholePlan,
        kind: str, device: str, made_by: Compilation, *, sends: tuple[int, ...], strict: bool,
    ) -> None:  # fmt: skip
        self.unplanned, self.chosen, self.sends = made_by.unplanned, made_by.row, sends
        self.measured = made_by.measured
        self.program, self.optimizer, self.flat, self.plan, self.strict = (
            program,
            optimizer,
            flat,
            plan,
            strict,
        )
        self.notes: list[str] = []
        self.arena: allocator.Arena | None = None
        self.last: RunStats | None = None
        self._device = device
        count = len(flat.numbers) + len(flat.op_numbers)
        self._numbers = [torch.zeros((), dtype=torch.float64) for _ in range(count)]
        updated = {s for op in program.graph.ops if op.phase == "update" for s in op.mutates}
        self._updates, self._counts = bool(updated), _counts(program, updated)
        name = program.graph.name
        (pass_,) = plan.passes
        self._pass = CompiledPass(call, pass_, plan.static, kind, f"the compiled {name}")

    @property
    def extent(self) -> int:
        return self.plan.arena

    @property
    def pool(self) -> None:
        """Nothing is offloaded."""
        return None

    def reserve(self, extent: int) -> allocator.Arena:
        return allocator.Arena(extent, self._device)

    def takes(self, places: Collection[OpNumber], program: Program) -> bool:
        """Whether the numbers at these places are inputs, and can be what they are in ``program``."""
        return set(places) <= set(self.flat.op_numbers) and all(takes(program, n) for n in places)

    def change_numbers(self, program: Program) -> None:
        """Runs with the numbers of ``program`` from now on, which differs in nothing else."""
        self.program = program

    def run(
        self, inputs: Sequence[Any], *, consume: bool = False, updating: Updating | None = None
    ) -> list[Any]:
        tensors = list(inputs)
        if consume:
            assert isinstance(inputs, list)
            inputs.clear()
        self._make_state(tensors)
        args = [tensors[k] for k in self.flat.slots]
        counts = [tensors[k] for k in self._counts]
        del tensors
        values = [n.read(self.optimizer) for n in self.flat.numbers]
        values += [n.of(self.program) for n in self.flat.op_numbers]
        for t, value in zip(self._numbers, values, strict=True):
            t.copy_(value) if isinstance(value, torch.Tensor) else t.fill_(value)
        args += self._numbers
        if self.arena is None:
            self.arena = self.reserve(self.extent)
        if updating is not None and self._updates:
            updating.begin(perhaps=True)
        with torch.no_grad(), _as_before_an_error(counts):
            results = self._pass.run(args, self.arena, placed=True, budget=self.plan.budget)
        if updating is not None:
            updating.complete()
        self.last = self._pass.last
        if self.last is not None:
            report(self.last, self.strict)
        return list(results)

    def _make_state(self, tensors: list[Any]) -> None:
        """Optimizers make their state at their first step; compiled code finds it there."""
        places = {slot.value: k for k, slot in enumerate(self.program.slots)}
        for call in self.program.calls:
            updater = call.fn
            if not isinstance(updater, Updater):
                continue
            at = [places[ref.value] for ref in call.args[2 : 2 + len(updater.members[0].state_keys)]]
            if all(tensors[k] is not None for k in at):
                continue
            (member,) = updater.members
            _first_state(updater)
            state = updater.optimizer.state[member.param]
            for k, key in zip(at, member.state_keys, strict=True):
                tensors[k] = state_at(state, key)


def _counts(program: Program, updated: Collection[int]) -> list[int]:
    """The slots of what an optimizer keeps of a parameter as one number, such as its count of steps."""
    values = program.graph.values
    return [
        k
        for k, slot in enumerate(program.slots)
        if slot.role == "state"
        and values[slot.value].storage in updated
        and math.prod(values[slot.value].shape) == 1
    ]


@contextmanager
def _as_before_an_error(counts: Sequence[torch.Tensor]) -> Iterator[None]:
    """Compiled code counts a step before it knows of errors in the forward pass. Of other devices nothing fails here
    that has not ended."""
    known = [(t, t.item()) for t in counts if t.device.type == "cpu"]
    try:
        yield
    except BaseException:
        for t, was in known:
            t.fill_(was)
        raise


def _first_state(updater: Updater) -> None:
    """The state as it is before the first step: of PyTorch's own classes made by the optimizer's code, of others as
    `_check_updates` has found it to be."""
    (member,) = updater.members
    optimizer, param = updater.optimizer, member.param
    if not independent(optimizer):
        optimizer.state[param].update({k: torch.zeros_like(t) for k, t in _state_like(member)})
        return
    one = _alone(optimizer, member.group, param)
    group = one.param_groups[0]
    before = param.grad
    param.grad = torch.zeros((), dtype=param.dtype, device=param.device).expand_as(param)
    try:
        lists: list[list[Any]] = [[] for _ in list(inspect.signature(one._init_group).parameters)[1:]]
        with torch.no_grad():
            one._init_group(group, *lists)
    finally:
        param.grad = before
    state = optimizer.state[param]
    for key, like in zip(member.state_keys, member.state_like, strict=True):
        if not isinstance(state.get(key), torch.Tensor):  # SGD's momentum, which begins as the gradient
            state[key] = torch.zeros_like(param) if like.shape == param.shape else None


def _alone(optimizer: Any, group: int, param: torch.Tensor) -> Any:
    """The optimizer with one parameter, or another in its place."""
    one: Any = bare(optimizer)
    one.__dict__.update({n: x for n, x in vars(optimizer).items() if n not in vars(one) and n != "step"})
    one.param_groups = [{**optimizer.param_groups[group], "params": [param]}]
    return one


def _state_like(member: Member) -> list[tuple[Any, torch.Tensor]]:
    """The member's state by its keys: tensors of its metadata, of unknown numbers."""
    return [
        (k, torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=member.param.device))
        for k, t in zip(member.state_keys, member.state_like, strict=True)
    ]


# --- compiling -------------------------------------------------------------------------------------------------


class Compilation:
    """One program: which graph is compiled for it, and its plan."""

    def __init__(
        self, program: Program, optimizer: Any, settings: Settings,
        resolved: Callable[[int, int, int], int | None], beside: int, given: Decision | None = None, *,
        alone: bool = True, follows: bool = False, numbers: Collection[OpNumber] = (),
        before: Compiled | None = None,
    ) -> None:  # fmt: skip
        """``given``: what another rank has decided, of other tensors if this one ``follows``. Unless ``alone``,
        nothing is kept for later processes: each rank would find something else. ``numbers`` are inputs;
        ``before`` is what ran the same ops with other ones."""
        self.given, self.alone, self.follows, self.numbers = given, alone, follows, numbers
        self.row: Partition | None = None
        self.program, self.optimizer, self.settings = program, optimizer, settings
        self.resolved, self.beside = resolved, beside
        device = device_of(program.graph)
        if device is None:
            raise Unsupported("ops on several devices in compiled mode", "a budget is of one device's memory")
        self.device, self.align = device or "cpu", alignment_of(device or "cpu")
        self.measured = Measured(allocator.kind_of(self.device))
        self.told = None if before is None else before.flat.told
        if before is not None:
            self.measured.learn(before.measured.known)
        unchecked = any(only_raises(c.fn) for c in program.calls)
        self.notes = [_NUMBERS, *([_UNCHECKED] if unchecked else [])]
        self.count = 0
        self.found: Sequence[str] = ()  # what the search has to say
        self.outputs = len(program.results) - len(program.gradients)
        self.looks = True  # whether choices of earlier runs count
        self.best: Candidate[GraphModule] | None = None
        self.code: KeptCode | None = None
        self.kept: KeptPartitions | None = None

    def run(self) -> Compiled:
        _check_updates(self.program)
        if not self.alone:
            return self._run(None, "")
        _check_alone(self.program)
        folder = folder_of(self.settings.measuring.get("cache", DEFAULT))
        for kept in ("code", "choices", ""):
            self.looks, self.best = bool(kept), None
            try:
                return self._run(folder, kept)
            except Outdated:  # it is made anew
                for file in (self.code, self.kept):
                    if file is not None:
                        file.forget()
        raise AssertionError

    def _run(self, folder: pathlib.Path | None, kept: str) -> Compiled:
        program = self.program
        flat = flatten_program(program, self.optimizer, self.numbers, self.told)
        self.own = aligned(8, self.align) * (len(flat.numbers) + len(flat.op_numbers))
        self.code = None
        if folder is not None and kept:
            made_from = (
                "step",
                self.settings.budget,
                self.options,
                self.outputs,
                self.static,
                self.beside,
                self.align,
            )
            self.code = KeptCode(folder, made_from, self.measured, joint=kept == "code")
        call, lowered = compat_inductor.compile_flat(flat.graph, flat.inputs, self.choose, self.code)
        if self.best is None:
            self.best = self._loaded(flat.graph)
        elif self.code is not None:
            self.code.keep_choice(self._choice(self.best))
        replay = self.replayed(lowered)
        if max(replay.peaks) != self.best.peak:
            if self.best.replay is None and self.given is None:
                raise Outdated("a kept choice")
            text = f"compiled, the step needs {max(replay.peaks)} B and not the {self.best.peak} B that were replayed"
            raise VerificationFailed([text], f"graph {program.graph.name}")
        passes, arena = place(replay, most=self.best.peak if self.budget is None else None)
        plan = WholePlan(
            self.budget, replay.static, self.best.peak, arena, passes, max(self.unplanned.peaks), (),
            self.best.recomputed, self.best.seconds, self.best.source, self.count, (*self.notes, *self.found),
        )  # fmt: skip
        made = Compiled(
            program, self.optimizer, flat, call, plan, self.measured.kind, self.device, self,
            sends=compat_inductor.sequence(lowered), strict=self.settings.strict,
        )  # fmt: skip
        made.notes += self.measured.notes()
        return made

    def replayed(self, lowered: Lowered) -> StepReplay:
        constants = sum(aligned(n, self.align) for _, n in lowered.constants)
        replay = StepReplay(self.program.graph.static_bytes + self.own + constants, self.measured, self.align)
        for held in replay.run(lowered, [None] * len(lowered.inputs)):
            replay.hand_out(held)
        return replay

    # --- which graph ---

    @property
    def options(self) -> default.Options:
        options = getattr(self.settings.planner, "options", None)
        chosen = options if isinstance(options, default.Options) else default.Options()
        return replace(chosen, redraw=False)  # compiled code draws from seeds, and has the same ones again

    @property
    def within(self) -> Budget | None:
        return self.settings.budget

    @property
    def name(self) -> str:
        return self.program.graph.name

    @property
    def static(self) -> int:
        return self.program.graph.static_bytes + self.own

    def limit(self, unplanned: Unplanned) -> int | None:
        """The most bytes for a step that takes so many as Inductor has it."""
        self.budget = self.resolved(self.static, max(unplanned.peaks, default=0), self.beside)
        return self.budget

    def _choice(self, best: Candidate[GraphModule]) -> Choice:
        return Choice(
            self.static, self.static, 0, self.outputs, 0, (), self.budget, self.unplanned, best.peak,
            best.recomputed, best.seconds, best.source, self.count, tuple(self.found),
        )  # fmt: skip

    def _loaded(self, graph: GraphModule) -> Candidate[GraphModule]:
        """What was decided when the code that is loaded was made. Raises ``Outdated``."""
        c = None if self.code is None else self.code.choice()
        if c is None or c.given != self.static:
            raise Outdated("what was decided for kept code is not known")
        self.unplanned, self.count, self.found = c.unplanned, c.lowered, c.notes
        if self.limit(c.unplanned) != c.budget:
            raise Outdated("kept code is within another budget")
        return Candidate(graph, c.source, c.peak, c.peak, None, c.recomputed, c.seconds)

    def choose(self, gm: GraphModule, lower: Lower) -> GraphModule:
        made_from = (
            "step",
            compat_inductor.digest(gm, ()),
            self.outputs,
            self.static,
            self.align,
            self.options,
        )
        folder = folder_of(self.settings.measuring.get("cache", DEFAULT)) if self.alone else None
        self.kept = KeptPartitions(folder, made_from)
        search = StepSearch(self, gm, self.outputs, lower, self.kept, looks=self.looks)
        self.best = search.run()
        self.count, self.unplanned, self.row = search.count, search.unplanned, search.row
        self.found = search.notes
        return self.best.made


def _check_alone(program: Program) -> None:
    """Raises ``Unsupported`` for what is sent to ranks that have not agreed on an order."""
    for call in program.calls:
        if isinstance(call.fn, Collective) and len(call.fn.group(call.args)) > 1:
            raise Unsupported(
                f"{call.fn} in compiled mode with independent=True", "each rank would compile and order it by itself",
                'leave independent out, or use mode="exact"',
            )  # fmt: skip


_INSTEAD = "call step.prepare(batch): the update is then planned by itself, op by op"


def _check_updates(program: Program) -> None:
    """Raises ``Unsupported`` for updates by sparse gradients, and ``NoFormula`` for a first step that is another than
    those after it."""
    tried: set[Any] = set()
    for call in program.calls:
        updater = call.fn
        if isinstance(updater, Updater) and updater.sparse:
            raise Unsupported(
                f"the sparse gradient of {updater.name!r} in compiled mode",
                "Inductor has no code for sparse tensors",
                'use mode="exact", or sparse=False in the embedding',
            )  # fmt: skip
        if not isinstance(updater, Updater) or updater.materialized or len(updater.members) > 1:
            continue
        (member,) = updater.members
        group = updater.optimizer.param_groups[member.group]
        if isinstance(updater.optimizer, torch.optim.SGD) and group.get("dampening"):
            raise NoFormula(
                "SGD with dampening before its first step, in compiled mode",
                "its first step leaves dampening out", _INSTEAD,
            )  # fmt: skip
        if independent(updater.optimizer):
            continue
        p = member.param
        kind = (updater.number, member.group, tuple(p.shape), p.dtype)
        if kind not in tried and not _begins_with_zeros(updater):
            raise NoFormula(
                f"{type(updater.optimizer).__name__} before its first step, in compiled mode",
                "its state does not begin as zeros", _INSTEAD,
            )  # fmt: skip
        tried.add(kind)


def _begins_with_zeros(updater: Updater) -> bool:
    """Whether a first step with a state of zeros gives the same bits as one without a state, on copies. Raises
    ``NoFormula`` for a state that has more than tensors."""
    (member,) = updater.members
    optimizer, p = updater.optimizer, member.param
    keys = [k for k in member.state_keys if not isinstance(k, Path)]
    found: list[list[torch.Tensor]] = []
    with random_untouched(), torch.no_grad():
        start, grad = torch.randn_like(p), torch.randn_like(p)
        for zeros in (False, True):
            param = torch.nn.Parameter(start.clone())
            one = copied(_alone(optimizer, member.group, p), {id(p): param})
            one.state = defaultdict(dict)
            if zeros:
                one.state[param] = {k: torch.zeros_like(t) for k, t in _state_like(member)}
            param.grad = grad.clone()
            try:
                compat_optimizers.plain_step(type(optimizer))(one)
            except Exception:
                return False
            state = one.state[param]
            if other := [k for k, x in state.items() if not isinstance(x, torch.Tensor)]:
                raise NoFormula(
                    f"the optimizer {type(optimizer).__name__} in compiled mode",
                    f"it keeps {other[0]!r} in Python beside tensors, which would stay as it is", _INSTEAD,
                )  # fmt: skip
            if not all(isinstance(state.get(k), torch.Tensor) for k in keys):
                return False
            found.append([param.detach(), *(state[k] for k in keys)])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))
