"""Updater: an optimizer's step as opaque ops, one for each parameter (on a GPU, for some), or one for all of them.

An optimizer that treats its parameters independently gives the same bits when it steps them one at a time, so the
update of a parameter can run as soon as its gradient is there, and the gradient be freed. Those of torch.optim do;
others are tried (`probe`). What couples parameters steps all of them in one op: always right, and every
gradient is there until then, as in eager.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from tightship.errors import BadInput, Unplannable, Unsupported
from tightship.frontends.torch import compat_optimizers
from tightship.frontends.torch.optimizer.copy import (
    Disagreement,
    Rehearsal,
    Rows,
    Term,
    Turns,
    bare,
    sparse_gradient,
    stepped,
)
from tightship.frontends.torch.optimizer.given import Several, independent
from tightship.frontends.torch.optimizer.kept import Kept, Row, rehearsed
from tightship.frontends.torch.optimizer.probe import (
    DRAWS,
    needs_closure,
    why_together,
)
from tightship.frontends.torch.optimizer.tensors import Path, moved_out, parameters_of
from tightship.graph import aligned

__all__ = ["Member", "SeveralUpdates", "Updater", "Updates", "state_at", "updaters"]


_NONE: Mapping[str, tuple[Rows, ...]] = MappingProxyType({})

_SPARSE = ("Adagrad", "SGD", "SparseAdam")
"""Those that step a parameter by a sparse gradient, and keep no sparse state."""


@dataclass(frozen=True)
class Member:
    """A parameter that an updater steps: its place in the optimizer, its name in the model, and its state's tensors,
    ``state_like`` being of the right metadata (perhaps fake). ``rows``: those of the terms of its gradient, if
    that is sparse."""

    group: int
    param: torch.Tensor
    name: str
    state_keys: tuple[Any, ...]
    state_like: tuple[torch.Tensor, ...]
    has_state: bool = True  # be it without tensors
    rows: tuple[Rows, ...] = ()

    def materialized(self, optimizer: Any) -> bool:
        """Whether all of the state exists (optimizers create it at their first step)."""
        state = optimizer.state.get(self.param, {})
        return all(state_at(state, k) is not None for k in self.state_keys)


def state_at(state: Any, key: Any, params: Sequence[torch.Tensor] = ()) -> torch.Tensor | None:
    """The tensor in a parameter's state under a key, or at a path inside of it or of an optimizer's attributes; None
    if there is none: some begin as a number of Python's."""
    found = key.find(state, params) if isinstance(key, Path) else state.get(key)
    return found if isinstance(found, torch.Tensor) else None


Run = Callable[[list[torch.Tensor]], None]
"""Steps an updater's members with their gradients."""


class Updater:
    """``updater(param, grad, *state, …, *held, *sparse)``, with the first three for each member, steps the members in
    the real optimizer. Where a gradient is sparse, ``grad`` are the values of its first term, and ``sparse`` holds
    their rows, and values and rows of each further one.

    It works on the optimizer's own parameters and state, which the caller's tensors are (they are named in the call
    so that a planner sees them); hyperparameters are those of the real groups at the time of the call. ``held`` are
    tensors that the optimizer keeps for no parameter, or in no usual place, by their paths.
    ``writes_gradients``: what it leaves in a gradient may differ from what was given. ``keeps``: it puts new tensors
    in the place of those it keeps. ``exact``: it is of a class that is known to ask for the same in every step, if
    it does so in some. ``draws``: random numbers. ``takes``: gradients, which it keeps
    as they are. ``number``: of the optimizer, where there are several.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        members: Sequence[Member],
        run: Run,
        *,
        writes_gradients: bool = False,
        keeps: bool = False,
        exact: bool = True,
        alone: bool = True,
        draws: bool = False,
        takes: bool = False,
        held: Mapping[Path, torch.Tensor] | None = None,
    ) -> None:
        self.optimizer, self.members, self.held = optimizer, tuple(members), dict(held or {})
        self.writes_gradients, self.keeps, self.exact = writes_gradients, keeps, exact
        self.draws, self.takes, self.number = draws, takes, 0
        self._run, self._is_alone = run, alone
        self.gradients: list[int] = []  # where they stand among the arguments
        self.states: list[int] = []
        at = 0
        for m in self.members:
            self.gradients.append(at + 1)
            self.states += range(at + 2, at + 2 + len(m.state_keys))
            at += 2 + len(m.state_keys)
        self.states += range(at, at + len(self.held))
        sparse = sum(2 * len(m.rows) - 1 for m in self.members if m.rows)
        self.sparse = range(at + len(self.held), at + len(self.held) + sparse)

    def __call__(self, *tensors: torch.Tensor) -> None:
        self.step([tensors[k] for k in self.gradients], [tensors[k] for k in self.sparse])

    def step(self, gradients: list[torch.Tensor], sparse: Sequence[torch.Tensor] = ()) -> None:
        """As a call, without the tensors that only a planner needs to see."""
        self._run(self._whole(gradients, sparse) if sparse else gradients)

    def _whole(self, gradients: Sequence[torch.Tensor], sparse: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients, the sparse ones put together."""
        rest, made = iter(sparse), list(gradients)
        for k, m in enumerate(self.members):
            if m.rows:
                terms = [
                    Term(made[k] if not n else next(rest), next(rest), r.padding)
                    for n, r in enumerate(m.rows)
                ]
                made[k] = sparse_gradient(m.param, terms)
        return made

    @property
    def name(self) -> str:
        """The parameter's name, or how many there are."""
        first, *more = self.members
        return f"{len(self.members)} parameters" if more else first.name

    @property
    def materialized(self) -> bool:
        """Whether all of the state exists (optimizers create it at their first step, and some of it later)."""
        if not all(m.materialized(self.optimizer) for m in self.members):
            return False
        if not self.held:
            return True
        params = parameters_of(self.optimizer)
        return all(state_at(vars(self.optimizer), k, params) is not None for k in self.held)

    @property
    def state_bytes(self) -> int:
        """Bytes of all state."""
        kept = (t for m in self.members for t in m.state_like)
        return sum(aligned(t.numel() * t.itemsize) for t in (*kept, *self.held.values()))

    def rehearsal(self) -> Rehearsal:
        """The same update on copies of parameters and state, for measuring: the first of its runs ``begins`` where
        some of the state does not exist yet."""
        rows = {id(m.param): m.rows for m in self.members if m.rows}
        params = [m.param for m in self.members]
        return Rehearsal(
            self.optimizer, params, alone=self._is_alone, rows=rows, begins=not self.materialized
        )

    def settle(self) -> None:
        """What this update has made is kept, where the plan wants to use that memory again: moves it."""
        self.keeps = True
        moved_out(self.optimizer)


class Updates:
    """How an optimizer's step is divided into ops. ``names`` are the model's for the parameters that it steps;
    ``together`` says why one op steps them all, and is None where each has its own, or, with ``buckets`` on a GPU,
    neighbors share one."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        places: Mapping[str, tuple[int, torch.Tensor]],
        *,
        buckets: bool = False,
    ) -> None:
        self.optimizer, self._places, self._buckets = optimizer, places, buckets
        self.names = tuple(places)
        self.keeps = False
        self._known = independent(optimizer)
        self.together = None if self._known else why_together(optimizer)

    @property
    def parts(self) -> tuple[Updates, ...]:
        """Those of each optimizer, where there are several."""
        return (self,)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of it, once `ops` has been called."""
        name, found = type(self.optimizer).__name__, []
        if self.together is not None:
            found.append(
                f"{name} steps all parameters at once, when all gradients are there: {self.together}"
            )
        if self.keeps:
            found.append(f"{name} makes new tensors for its state at each step, beside the ones it had")
        return tuple(found)

    def ops_of(
        self, part: int, gradients: Collection[str], sparse: Mapping[str, tuple[Rows, ...]]
    ) -> list[Updater]:
        """As `ops`, of the optimizer of that number: the only one."""
        return self.ops(gradients, sparse)

    def ops(
        self, gradients: Collection[str], sparse: Mapping[str, tuple[Rows, ...]] = _NONE
    ) -> list[Updater]:
        """The updaters of a step in which the parameters of these names get a gradient; how many rows its terms
        have, where it is ``sparse``.

        Raises ``Unsupported`` for a step that does not run."""
        rows = [Row(*self._places[n], n, sparse.get(n, ())) for n in self.names if n in gradients]
        optimizer = self.optimizer
        if not rows:
            return []
        _check_sparse(optimizer, rows)
        kept = rehearsed(optimizer, rows, known=self._known, together=self.together is not None)
        members, self.keeps = _members(optimizer, rows, kept), kept.keeps
        if self._known:
            stateful = [m.param for m in members if m.has_state]
            # What a sparse gradient asks for follows from how many rows come several times.
            return [
                Updater(optimizer, b, _alone(optimizer, b, stateful), exact=not b[0].rows)
                for b in (_buckets(members) if self._buckets else [[m] for m in members])
            ]
        more: dict[str, Any] = {
            "writes_gradients": True,
            "exact": False,
            "keeps": kept.keeps,
            "takes": kept.takes,
        }
        if self.together is not None:
            params, step = [m.param for m in members], compat_optimizers.plain_step(type(optimizer))

            def run(grads: list[torch.Tensor]) -> None:
                stepped(optimizer, step, zip(params, grads, strict=True))

            draws = self.together == DRAWS
            return [Updater(optimizer, members, run, alone=False, held=kept.held, draws=draws, **more)]
        turns = Turns(optimizer, [m.param for m in members])
        return [Updater(optimizer, [m], _turn(turns, m), **more) for m in members]


class SeveralUpdates:
    """As `Updates`, of optimizers that step one after the other, perhaps the same parameters."""

    def __init__(self, optimizer: Several, parts: Sequence[Updates]) -> None:
        self.optimizer, self.parts = optimizer, tuple(parts)
        self.names = tuple(dict.fromkeys(n for u in parts for n in u.names))

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note for u in self.parts for note in u.notes)

    def ops(
        self, gradients: Collection[str], sparse: Mapping[str, tuple[Rows, ...]] = _NONE
    ) -> list[Updater]:
        return [u for k in range(len(self.parts)) for u in self.ops_of(k, gradients, sparse)]

    def ops_of(
        self, part: int, gradients: Collection[str], sparse: Mapping[str, tuple[Rows, ...]]
    ) -> list[Updater]:
        """Those of the optimizer of that number."""
        found = self.parts[part].ops(gradients, sparse)
        for updater in found:
            updater.number = part
        return found


def updaters(
    optimizer: torch.optim.Optimizer | Several,
    model_parameters: Mapping[str, torch.Tensor],
    *,
    buckets: bool = False,
) -> Updates | SeveralUpdates:
    """How the optimizer's step becomes ops on those of the model's parameters that require a gradient. ``buckets``:
    on a GPU, parameters of known optimizers may share an op.

    Raises ``Unsupported`` for optimizers whose step needs a closure, has hooks around it or does not run on copies
    of its parameters; ``BadInput`` for one that does not hold the model's parameters.
    """
    if isinstance(optimizer, Several):
        parts = [_updates(o, model_parameters, buckets) for o in optimizer.optimizers]
        return SeveralUpdates(optimizer, parts)
    return _updates(optimizer, model_parameters, buckets)


def _updates(
    optimizer: torch.optim.Optimizer, model_parameters: Mapping[str, torch.Tensor], buckets: bool
) -> Updates:
    _check(optimizer)
    names = {id(p): n for n, p in reversed(list(model_parameters.items()))}
    places: dict[str, tuple[int, torch.Tensor]] = {}
    for g, group in enumerate(optimizer.param_groups):
        for k, p in enumerate(group["params"]):
            if not p.requires_grad:
                continue
            if id(p) not in names:
                fault = (
                    f"a parameter of shape {tuple(p.shape)} that is not one of the model's: give fit a model that "
                    "has those of the loss, too (torch.nn.ModuleList([model, criterion])); what puts new parameters "
                    "there (another layer, load_state_dict(assign=True)) comes before the optimizer is made and fit"
                )
                raise BadInput(fault, place=f"optimizer: group {g}, entry {k}")
            places[names[id(p)]] = g, p
    if not places:
        raise BadInput("none of its parameters requires a gradient", place="optimizer")
    return Updates(optimizer, places, buckets=buckets)


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        fault = f"object of type {type(optimizer).__name__}; give a torch.optim.Optimizer"
        raise BadInput(fault, place="optimizer")
    cls = type(optimizer)
    name = f"the optimizer {cls.__name__}"
    closure = inspect.signature(compat_optimizers.plain_step(cls)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise needs_closure(optimizer)
    if compat_optimizers.optimizer_hooks(optimizer):
        raise Unsupported(
            f"a {cls.__name__} with step hooks",
            "its step is an op among others in a planned step",
            "call them after the step",
        )
    if compat_optimizers.replaced_step(optimizer) is not None:
        raise Unsupported(
            f"{name} with another step in its attributes",
            "what it does cannot be tried on copies",
            "override step() in a subclass",
        )
    if any(g.get("differentiable") for g in optimizer.param_groups):
        raise Unsupported(f"{name} with differentiable=True", "a planned step is not differentiable")


# --- parameters of one of torch's own ----------------------------------------------------------------------


def _buckets(members: Sequence[Member]) -> list[list[Member]]:
    """Members that one op steps: on the CPU, and with sparse gradients, one. On a GPU an update of one parameter is
    a dozen kernels that take longer to launch than to run, so neighbors share an op, up to a small part of the
    parameters' bytes: by so much more memory is taken while one runs."""
    limit = min(sum(m.param.nbytes for m in members) // _PARTS, _BUCKET)
    buckets: list[list[Member]] = []
    free = 0
    for m in members:
        shares = m.param.is_cuda and not m.rows
        if shares and m.param.nbytes <= free:
            buckets[-1].append(m)
        else:
            buckets.append([m])
            free = limit if shares else 0
        free -= m.param.nbytes
    return buckets


_PARTS, _BUCKET = 32, 32 << 20


def _alone(
    optimizer: torch.optim.Optimizer, members: Sequence[Member], stateful: Sequence[torch.Tensor]
) -> Run:
    """Steps the parameters in an optimizer of the same class and settings that has no others. The ``stateful`` ones
    get their places in the state in this order, as in eager, whatever the order of the updates."""
    one, step = bare(optimizer), compat_optimizers.plain_step(type(optimizer))
    one.__dict__.update({n: x for n, x in vars(optimizer).items() if n not in vars(one) and n != "step"})
    groups: dict[int, list[torch.Tensor]] = {}
    for m in members:
        groups.setdefault(m.group, []).append(m.param)
    begins = [m.param for m in members if m.has_state]
    nothing: dict[Any, Any] = {}

    def run(grads: list[torch.Tensor]) -> None:
        one.state = optimizer.state
        if any(p not in one.state for p in begins):
            for p in stateful:
                one.state.setdefault(p, {})  # which these classes take for none
        one.param_groups = [{**optimizer.param_groups[g], "params": params} for g, params in groups.items()]
        for name in ("grad_scale", "found_inf"):  # what a GradScaler tells a fused step
            vars(one)[name] = vars(optimizer).get(name)
        before = [m.param.grad for m in members]
        for m, grad in zip(members, grads, strict=True):
            m.param.grad = grad
        try:
            step(one)
        finally:
            for m, grad in zip(members, before, strict=True):
                m.param.grad = grad
            one.state = (
                nothing  # state that is replaced (load_state_dict) is let go of then, not a step later
            )

    return run


def _turn(turns: Turns, member: Member) -> Run:
    def run(grads: list[torch.Tensor]) -> None:
        try:
            turns.run(member.group, member.param, grads[0])
        except Disagreement as error:
            raise Unsupported(
                f"the optimizer {type(turns.optimizer).__name__}",
                f"its parameters do not agree on {error}: this step is incomplete",
                "load a checkpoint, and report this",
            ) from error

    return run


def _members(optimizer: torch.optim.Optimizer, rows: Sequence[Row], kept: Kept) -> list[Member]:
    """Members with the keys and tensors of the state that the optimizer has or will create for them."""
    made = []
    for g, p, name, sparse in rows:
        state = kept.states[id(p)]
        found = state or {}
        made.append(Member(g, p, name, tuple(found), tuple(found.values()), state is not None, sparse))
    return made


def _check_sparse(optimizer: torch.optim.Optimizer, rows: Sequence[Row]) -> None:
    """Raises ``Unplannable`` where a step by a sparse gradient is not known to be plannable."""
    for row in rows:
        if not row.rows:
            continue
        name = type(optimizer).__name__
        momentum = optimizer.param_groups[row.group].get("momentum", 0)
        if not independent(optimizer) or name not in _SPARSE or momentum:
            raise Unplannable(
                f"the sparse gradient of {row.name!r} in {name}{' with momentum' if momentum else ''}",
                "what it keeps of it is not known before the step", "SGD without momentum, Adagrad or SparseAdam; or "
                "sparse=False in the embedding",
            )  # fmt: skip
