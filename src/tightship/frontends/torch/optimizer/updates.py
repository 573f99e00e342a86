"""Updater: an optimizer's step as opaque ops, one for each parameter or one for all of them.

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
from typing import Any, NamedTuple

import torch

from tightship.errors import BadInput, Unplannable, Unsupported
from tightship.frontends.torch import compat
from tightship.frontends.torch.optimizer.copy import (
    Disagreement,
    Path,
    Rehearsal,
    Rows,
    Term,
    Turns,
    bare,
    blank_term,
    copied,
    inside,
    kept_by_path,
    kept_tensors,
    moved_out,
    parameters_of,
    random_untouched,
    sparse_gradient,
    stepped,
)
from tightship.frontends.torch.optimizer.probe import (
    DRAWS,
    does_not_run,
    needs_closure,
    why_together,
)
from tightship.graph import aligned

__all__ = [
    "Member",
    "Several",
    "SeveralUpdates",
    "Updater",
    "Updates",
    "as_one",
    "blank_state",
    "each",
    "independent",
    "is_blank",
    "settings",
    "state_at",
    "twin_of",
    "updaters",
]


_INDEPENDENT = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
)  # fmt: skip


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
        return all(isinstance(state_at(state, k), torch.Tensor) for k in self.state_keys)


def state_at(state: Any, key: Any) -> Any:
    """What stands in a parameter's state under a key, or at a path inside of it; None if nothing does."""
    return key.find(state) if isinstance(key, Path) else state.get(key)


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
        return all(isinstance(k.find(vars(self.optimizer), params), torch.Tensor) for k in self.held)

    @property
    def state_bytes(self) -> int:
        """Bytes of all state."""
        kept = (t for m in self.members for t in m.state_like)
        return sum(aligned(t.numel() * t.itemsize) for t in (*kept, *self.held.values()))

    def rehearsal(self) -> Rehearsal:
        """The same update on copies of parameters and state, for measuring.

        State that does not exist yet is created by a first update here.
        """
        rows = {id(m.param): m.rows for m in self.members if m.rows}
        made = Rehearsal(self.optimizer, [m.param for m in self.members], alone=self._is_alone, rows=rows)
        if not self.materialized:
            with random_untouched():
                made()
        return made

    def settle(self) -> None:
        """What this update has made is kept, where the plan wants to use that memory again: moves it."""
        self.keeps = True
        moved_out(self.optimizer)


class Updates:
    """How an optimizer's step is divided into ops. ``names`` are the model's for the parameters that it steps;
    ``together`` says why one op steps them all, and is None where each has its own."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, places: Mapping[str, tuple[int, torch.Tensor]]
    ) -> None:
        self.optimizer, self._places = optimizer, places
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
        kept = _rehearsed(optimizer, rows, known=self._known, together=self.together is not None)
        members, self.keeps = _members(optimizer, rows, kept), kept.keeps
        if self._known:
            stateful = [m.param for m in members if m.has_state]
            # What a sparse gradient asks for follows from how many rows come several times.
            return [
                Updater(optimizer, [m], _alone(optimizer, m, stateful), exact=not m.rows) for m in members
            ]
        more: dict[str, Any] = {
            "writes_gradients": True,
            "exact": False,
            "keeps": kept.keeps,
            "takes": kept.takes,
        }
        if self.together is not None:
            params, step = [m.param for m in members], compat.plain_step(type(optimizer))

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


class Several:
    """Optimizers that step in turn, as one: all groups, and a step of each."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [g for o in self.optimizers for g in o.param_groups]

    def step(self) -> None:
        for o in self.optimizers:
            compat.plain_step(type(o))(o)

    def zero_grad(self) -> None:
        for o in self.optimizers:
            o.zero_grad()


def each(optimizer: Any) -> tuple[Any, ...]:
    """The optimizers that one stands for: itself, as a rule."""
    return optimizer.optimizers if isinstance(optimizer, Several) else (optimizer,)


def as_one(optimizer: Any) -> Any:
    """The optimizer, or the several of a list or tuple as one, without the wrapper that accelerate puts around each.
    Raises ``BadInput`` for an empty list and what is no optimizer, ``Unsupported`` for a wrapper that scales
    gradients."""
    if not isinstance(optimizer, (list, tuple)):
        return _unwrapped(optimizer)
    optimizer = [_unwrapped(o) for o in optimizer]
    if not optimizer:
        raise BadInput(
            "an empty list of optimizers: give one, or None for a backward pass alone", place="optimizer"
        )
    return optimizer[0] if len(optimizer) == 1 else Several(optimizer)


def _unwrapped(optimizer: Any) -> Any:
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        kind = type(optimizer).__name__
        fault = f"optimizer of type {kind}; give a torch.optim.Optimizer, several in a list, or None"
        raise BadInput(fault, place="optimizer")
    if isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "defaults"):
        raise Unsupported(
            f"a {type(optimizer).__name__}, which is made without Optimizer.__init__,",
            "what it does around the step of the optimizer inside of it is not known",
            "give fit the optimizer inside, or call step.backward(batch) and its own step() (fit with None for it)",
        )  # fmt: skip
    if not type(optimizer).__module__.startswith("accelerate."):
        return optimizer
    if getattr(optimizer, "scaler", None) is not None:
        raise Unsupported(
            "an optimizer of accelerate's with a GradScaler", "its step unscales gradients and may be left out",
            "give fit the optimizer before accelerator.prepare, and the scaler as scaler=",
        )  # fmt: skip
    return optimizer.optimizer


def twin_of(optimizer: Any, others: Mapping[int, torch.Tensor]) -> Any:
    """As `copied`, of several as well."""
    made = [copied(o, others) for o in each(optimizer)]
    return Several(made) if isinstance(optimizer, Several) else made[0]


def updaters(
    optimizer: torch.optim.Optimizer | Several, model_parameters: Mapping[str, torch.Tensor]
) -> Updates | SeveralUpdates:
    """How the optimizer's step becomes ops on those of the model's parameters that require a gradient.

    Raises ``Unsupported`` for optimizers whose step needs a closure, has hooks around it or does not run on copies
    of its parameters; ``BadInput`` for one that does not hold the model's parameters.
    """
    if isinstance(optimizer, Several):
        return SeveralUpdates(optimizer, [_updates(o, model_parameters) for o in optimizer.optimizers])
    return _updates(optimizer, model_parameters)


def _updates(optimizer: torch.optim.Optimizer, model_parameters: Mapping[str, torch.Tensor]) -> Updates:
    _check(optimizer)
    names = {id(p): n for n, p in reversed(list(model_parameters.items()))}
    places: dict[str, tuple[int, torch.Tensor]] = {}
    for g, group in enumerate(optimizer.param_groups):
        for k, p in enumerate(group["params"]):
            if not p.requires_grad:
                continue
            if id(p) not in names:
                fault = (
                    f"a parameter of shape {tuple(p.shape)} that is not one of the model's: what puts new parameters "
                    "there (load_state_dict(assign=True)) comes before the optimizer is made"
                )
                raise BadInput(fault, place=f"optimizer: group {g}, entry {k}")
            places[names[id(p)]] = g, p
    if not places:
        raise BadInput("none of its parameters requires a gradient", place="optimizer")
    return Updates(optimizer, places)


def independent(optimizer: Any) -> bool:
    """Whether the optimizer is of a class of torch's that treats its parameters independently; subclasses are not."""
    cls = type(optimizer)
    return cls.__name__ in _INDEPENDENT and getattr(torch.optim, cls.__name__, None) is cls


def blank_state(optimizer: Any) -> dict[int, dict[Any, torch.Tensor]]:
    """Zeros like the state of parameters that have none before their first step, by their ids, for an optimizer of
    torch's: `torch.distributed.checkpoint` reads nothing of what a state dict has no tensor for."""
    if not independent(optimizer) or isinstance(optimizer, torch.optim.SparseAdam):
        return {}
    groups = enumerate(optimizer.param_groups)
    rows = [Row(g, p, "", ()) for g, group in groups for p in group["params"] if p.requires_grad]
    missing = [row for row in rows if not optimizer.state.get(row.param)]
    kept = _rehearsed(optimizer, missing, known=True, together=False).states
    return {
        i: {
            k: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).zero_()
            for k, t in state.items()
        }
        for i, state in kept.items()
        if state
    }


def is_blank(optimizer: Any, state: Mapping[Any, Any]) -> bool:
    """Whether a parameter's state is one of `blank_state`, which stands for none at all."""
    if "step" not in state or isinstance(optimizer, torch.optim.Adagrad):  # Adagrad begins with its state
        return False
    return not any(bool(t.any()) for t in state.values() if isinstance(t, torch.Tensor))


def settings(optimizer: Any) -> tuple[Any, ...]:
    """What decides which ops a step of the optimizer is made of; other numbers are read anew at each step.

    Numbers that are zero leave ops out; of classes that are not torch's they may count, and are not looked at.
    """
    if isinstance(optimizer, Several):
        return tuple(settings(o) for o in optimizer.optimizers)
    known = independent(optimizer)

    def kind(name: str, value: Any) -> Any:
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, (int, float)):
            return bool(value) if known and "lr" not in name else "a number"
        return type(value).__name__

    rows = [{n: kind(n, x) for n, x in g.items() if n != "params"} for g in optimizer.param_groups]
    groups = [{n: x for n, x in row.items() if x != "a number"} for row in rows]  # a step may make some
    members = [[id(p) for p in g["params"]] for g in optimizer.param_groups]
    around = compat.optimizer_hooks(optimizer), compat.replaced_step(optimizer) is None
    return type(optimizer), compat.plain_step(type(optimizer)), members, groups, around


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        fault = f"object of type {type(optimizer).__name__}; give a torch.optim.Optimizer"
        raise BadInput(fault, place="optimizer")
    cls = type(optimizer)
    name = f"the optimizer {cls.__name__}"
    closure = inspect.signature(compat.plain_step(cls)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise needs_closure(optimizer)
    if compat.optimizer_hooks(optimizer):
        raise Unsupported(
            f"a {cls.__name__} with step hooks",
            "its step is an op among others in a planned step",
            "call them after the step",
        )
    if compat.replaced_step(optimizer) is not None:
        raise Unsupported(
            f"{name} with another step in its attributes",
            "what it does cannot be tried on copies",
            "override step() in a subclass",
        )
    if any(g.get("differentiable") for g in optimizer.param_groups):
        raise Unsupported(f"{name} with differentiable=True", "a planned step is not differentiable")


# --- one parameter of one of torch's own ----------------------------------------------------------------------


def _alone(optimizer: torch.optim.Optimizer, member: Member, stateful: Sequence[torch.Tensor]) -> Run:
    """Steps the parameter in an optimizer of the same class and settings that has no other. The ``stateful`` ones get
    their places in the state in this order, as in eager, whatever the order of the updates."""
    one, step, param = bare(optimizer), compat.plain_step(type(optimizer)), member.param
    one.__dict__.update({n: x for n, x in vars(optimizer).items() if n not in vars(one) and n != "step"})
    one.param_groups = [{"params": [param]}]
    nothing: dict[Any, Any] = {}

    def run(grads: list[torch.Tensor]) -> None:
        one.state = optimizer.state
        if member.has_state and param not in one.state:
            for p in stateful:
                one.state.setdefault(p, {})  # which these classes take for none
        group = optimizer.param_groups[member.group]
        one.param_groups[0] = {**group, "params": one.param_groups[0]["params"]}
        for name in ("grad_scale", "found_inf"):  # what a GradScaler tells a fused step
            vars(one)[name] = vars(optimizer).get(name)
        before, param.grad = param.grad, grads[0]
        try:
            step(one)
        finally:
            param.grad = before
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


# --- state ----------------------------------------------------------------------------------------------------

_FIRST_STEPS = 12
"""Steps of a class that is not torch's that are tried for what it keeps: some make it in a later one."""


class Row(NamedTuple):
    """A parameter: its group, itself, its name, and the rows of the terms of a sparse gradient."""

    group: int
    param: torch.Tensor
    name: str
    rows: tuple[Rows, ...]


@dataclass(frozen=True)
class Kept:
    """What an optimizer keeps after some steps: the tensors in the state of each parameter, by its id; those it
    ``held`` beside; whether it ``keeps`` new tensors in the place of others, and ``takes`` gradients themselves."""

    states: Mapping[int, dict[Any, torch.Tensor] | None]
    held: Mapping[Path, torch.Tensor]
    keeps: bool
    takes: bool = False


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


def _flat(state: Any, others: Collection[int]) -> dict[Any, torch.Tensor] | None:
    """The tensors of a parameter's state by key or path, but ``others``, by their ids; None without a state."""
    if not state:
        return None
    found: dict[Any, torch.Tensor] = {}
    for k, x in state.items():
        inner = {k: x} if isinstance(x, torch.Tensor) else inside(x)
        for path, t in inner.items():
            if id(t) not in others:
                found[Path((("key", k), *path)) if isinstance(path, Path) else path] = t
    return found


def _rehearsed(optimizer: torch.optim.Optimizer, rows: Sequence[Row], *, known: bool, together: bool) -> Kept:
    """What it will keep, as a copy of it does after some steps; of parameters that look alike one is tried where each
    is stepped by itself. Torch's own make all state in their first step."""
    if together:
        return _on_copies(optimizer, [row.param for row in rows], _FIRST_STEPS, held=True)
    own = {id(row.param) for row in rows}
    states = {
        id(p): _flat(optimizer.state[p], own) for _, p, _, _ in rows if known and optimizer.state.get(p)
    }
    alike: dict[Any, list[torch.Tensor]] = {}
    sparse: set[int] = set()
    for g, p, _, rows_of in rows:
        if rows_of:
            sparse.add(id(p))
        if id(p) not in states:
            look = g, tuple(p.shape), p.stride(), p.dtype, p.device, bool(rows_of)
            alike.setdefault(look, []).append(p)
    if not alike:
        return Kept(states, {}, False)
    firsts = [some[0] for some in alike.values()]
    tried = _on_copies(optimizer, firsts, 1 if known else _FIRST_STEPS, sparse=sparse)
    states |= {id(p): tried.states[id(some[0])] for some in alike.values() for p in some}
    return Kept(states, {}, tried.keeps, tried.takes)


_SMALL = 1e-3
"""A gradient's numbers: of one of zeros some optimizers keep nothing yet (DAdaptSGD)."""


def _on_copies(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], steps: int, *, held: bool = False,
    sparse: Collection[int] = (),
) -> Kept:  # fmt: skip
    """What a copy of the optimizer keeps for these parameters after ``steps``: on fake tensors, if the step runs on
    them. The gradients of those whose ids are in ``sparse`` are. Raises ``Unsupported`` if it does not run on real
    ones, either."""
    plain = compat.plain_step(type(optimizer))

    def tried(scratch: Callable[[torch.Tensor], torch.Tensor], *, fused: bool = True) -> Kept:
        others = {id(p): torch.nn.Parameter(scratch(p), p.requires_grad) for p in params}
        made = copied(optimizer, others, alone=not held)
        for group in made.param_groups if not fused else ():
            group["fused"] = False
        pairs = [
            (q, sparse_gradient(q, [blank_term(q, Rows(1))]) if i in sparse else torch.full_like(q, _SMALL))
            for i, q in others.items()
        ]
        keeps, before = False, dict[Path, torch.Tensor]()
        for _ in range(steps):
            stepped(made, plain, pairs)
            now = kept_by_path(made)
            keeps = keeps or any(
                compat.storage_key(t) != compat.storage_key(before[path])
                for path, t in now.items()
                if path in before
            )
            before = now
        own = {id(q) for q in others.values()}
        states = {id(p): _flat(made.state.get(others[id(p)]), own) for p in params}
        given = {compat.storage_key(g) for _, g in pairs if not g.is_sparse}
        takes = any(compat.storage_key(t) in given for t in before.values())
        return Kept(states, _held(made, states) if held else {}, keeps or takes, takes)

    def blank(p: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=p.device)

    if not kept_tensors(optimizer):  # a copy of a real tensor among fake ones could be written to by nothing
        try:
            with random_untouched(), compat.fake_mode_of(params) or compat.fake_mode():
                return tried(blank)
        except Exception:
            pass

    def same(p: torch.Tensor) -> torch.Tensor:
        """With its numbers: what an optimizer keeps for a parameter may follow from them (Prodigy)."""
        return p.detach().clone(memory_format=torch.preserve_format)

    on_meta = any(p.is_meta for p in params)
    try:
        with random_untouched(), compat.fused_on_meta():
            try:
                return tried(same)
            except (
                NotImplementedError
            ):  # of a fused kernel torch does not know the shapes: the plain one's are the same
                if not on_meta:
                    raise
                return tried(same, fused=False)
    except Exception as error:
        raise does_not_run(optimizer, error) from error


def _held(made: Any, states: Mapping[int, dict[Any, torch.Tensor] | None]) -> dict[Path, torch.Tensor]:
    """What it keeps beside the states of its parameters, each tensor once."""
    own = {id(t) for state in states.values() for t in (state or {}).values()}
    return {path: t for path, t in kept_by_path(made).items() if id(t) not in own}
