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
from typing import Any, TypeVar

import torch

from tightship.errors import BadInput, Unsupported
from tightship.frontends.torch import compat
from tightship.frontends.torch.optimizer.copy import Disagreement, Turns, bare, copied, kept_tensors, stepped
from tightship.frontends.torch.optimizer.probe import why_together

__all__ = ["Member", "Updater", "Updates", "independent", "settings", "updaters"]


_INDEPENDENT = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD",
)  # fmt: skip


@dataclass(frozen=True)
class Member:
    """A parameter that an updater steps: its place in the optimizer, its name in the model, and its state's tensors,
    ``state_like`` being of the right metadata (perhaps fake)."""

    group: int
    param: torch.Tensor
    name: str
    state_keys: tuple[Any, ...]
    state_like: tuple[torch.Tensor, ...]

    def materialized(self, optimizer: Any) -> bool:
        """Whether all of the state exists (optimizers create it at their first step)."""
        state = optimizer.state.get(self.param, {})
        return all(isinstance(state.get(k), torch.Tensor) for k in self.state_keys)


Result = TypeVar("Result")
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
Run = Callable[[list[torch.Tensor]], None]
"""Steps an updater's members with their gradients."""


class Updater:
    """``updater(param, grad, *state)``, with these for each member, steps the members in the real optimizer.

    It works on the optimizer's own parameters and state, which the caller's tensors are (they are named in the call
    so that a planner sees them); hyperparameters are those of the real groups at the time of the call.
    ``writes_gradients``: what it leaves in a gradient may differ from what was given. ``keeps``: what it makes may
    outlive the step even if all state exists.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        members: Sequence[Member],
        run: Run,
        *,
        writes_gradients: bool = False,
        keeps: bool = False,
    ) -> None:
        self.optimizer, self.members = optimizer, tuple(members)
        self.writes_gradients, self.keeps = writes_gradients, keeps
        self._run = run
        self._gradients: list[int] = []  # where they stand among the arguments
        at = 1
        for m in self.members:
            self._gradients.append(at)
            at += 2 + len(m.state_keys)

    def __call__(self, *tensors: torch.Tensor) -> None:
        self._run([tensors[k] for k in self._gradients])

    @property
    def name(self) -> str:
        """The parameter's name, or how many there are."""
        first, *more = self.members
        return f"{len(self.members)} parameters" if more else first.name

    @property
    def materialized(self) -> bool:
        """Whether all of the state exists (optimizers create it at their first step)."""
        return all(m.materialized(self.optimizer) for m in self.members)

    def rehearsal(self) -> Callable[[], None]:
        """The same update on copies of parameters and state, for measuring: changes nothing real.

        State that does not exist yet is created by a first update here, before the returned function runs.
        """
        others = {
            id(m.param): torch.nn.Parameter(m.param.detach().clone(), m.param.requires_grad)
            for m in self.members
        }
        made = copied(self.optimizer, others, alone=independent(self.optimizer))
        step = compat.plain_step(type(self.optimizer))
        pairs = [(q, torch.zeros_like(q)) for q in others.values()]

        def run() -> None:
            if self.writes_gradients:
                for _, g in pairs:
                    g.zero_()
            stepped(made, step, pairs)

        if not self.materialized:
            run()
        return run


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

    def ops(self, gradients: Collection[str]) -> list[Updater]:
        """The updaters of a step in which the parameters of these names get a gradient.

        Raises ``Unsupported`` for state that cannot be planned, and for a step that does not run."""
        names = [n for n in self.names if n in gradients]
        optimizer = self.optimizer
        if not names:
            return []
        members = _members(optimizer, [(*self._places[n], n) for n in names], self.together is not None)
        if self._known:
            return [Updater(optimizer, [m], _alone(optimizer, m)) for m in members]
        self.keeps = _keeps(optimizer, [m.param for m in members])
        if self.together is not None:
            params, step = [m.param for m in members], compat.plain_step(type(optimizer))

            def run(grads: list[torch.Tensor]) -> None:
                stepped(optimizer, step, zip(params, grads, strict=True))

            return [Updater(optimizer, members, run, writes_gradients=True, keeps=self.keeps)]
        turns = Turns(optimizer, len(members))
        return [
            Updater(optimizer, [m], _turn(turns, m), writes_gradients=True, keeps=self.keeps) for m in members
        ]


def updaters(optimizer: torch.optim.Optimizer, model_parameters: Mapping[str, torch.Tensor]) -> Updates:
    """How the optimizer's step becomes ops on those of the model's parameters that require a gradient.

    Raises ``Unsupported`` for optimizers whose step needs a closure, has hooks around it, draws random numbers or
    does not run on copies of its parameters; ``BadInput`` for one that does not hold the model's parameters.
    """
    _check(optimizer)
    names = {id(p): n for n, p in reversed(list(model_parameters.items()))}
    places: dict[str, tuple[int, torch.Tensor]] = {}
    for g, group in enumerate(optimizer.param_groups):
        for k, p in enumerate(group["params"]):
            if not p.requires_grad:
                continue
            if id(p) not in names:
                fault = f"a parameter of shape {tuple(p.shape)} that is not one of the model's"
                raise BadInput(fault, place=f"optimizer: group {g}, entry {k}")
            places[names[id(p)]] = g, p
    if not places:
        raise BadInput("none of its parameters requires a gradient", place="optimizer")
    return Updates(optimizer, places)


def independent(optimizer: Any) -> bool:
    """Whether the optimizer is of a class of torch's that treats its parameters independently; subclasses are not."""
    cls = type(optimizer)
    return cls.__name__ in _INDEPENDENT and getattr(torch.optim, cls.__name__, None) is cls


def settings(optimizer: Any) -> tuple[Any, ...]:
    """What decides which ops a step of the optimizer is made of; other numbers are read anew at each step.

    Numbers that are zero leave ops out; of classes that are not torch's they may count, and are not looked at.
    """
    known = independent(optimizer)

    def kind(name: str, value: Any) -> Any:
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, (int, float)):
            return bool(value) if known and "lr" not in name else "a number"
        return type(value).__name__

    groups = [{n: kind(n, x) for n, x in g.items() if n != "params"} for g in optimizer.param_groups]
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
        raise Unsupported(name, "its step needs a closure that runs the model again", "use AdamW or SGD")
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


def _alone(optimizer: torch.optim.Optimizer, member: Member) -> Run:
    """Steps the parameter in an optimizer of the same class and settings that has no other."""
    one, step, param = bare(optimizer), compat.plain_step(type(optimizer)), member.param
    one.__dict__.update({n: x for n, x in vars(optimizer).items() if n not in vars(one) and n != "step"})
    one.param_groups = [{"params": [param]}]

    def run(grads: list[torch.Tensor]) -> None:
        one.state = optimizer.state
        group = optimizer.param_groups[member.group]
        one.param_groups[0] = {**group, "params": one.param_groups[0]["params"]}
        before, param.grad = param.grad, grads[0]
        try:
            step(one)
        finally:
            param.grad = before

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


def _members(
    optimizer: torch.optim.Optimizer, rows: Sequence[tuple[int, torch.Tensor, str]], together: bool
) -> list[Member]:
    """Members with the keys and tensors of the state that the optimizer has or will create for them."""
    states: dict[int, Any] = {id(p): optimizer.state[p] for _, p, _ in rows if optimizer.state.get(p)}
    new = [(g, p) for g, p, _ in rows if id(p) not in states]
    if together and new:
        created = _first_states(optimizer, [p for _, p, _ in rows])
        states |= {
            id(p): state for (_, p, _), state in zip(rows, created, strict=True) if id(p) not in states
        }
    elif new:  # parameters that look alike have states that look alike
        alike: dict[Any, list[torch.Tensor]] = {}
        for g, p in new:
            alike.setdefault((g, tuple(p.shape), p.stride(), p.dtype, p.device), []).append(p)
        created = _first_states(optimizer, [some[0] for some in alike.values()])
        states |= {id(p): state for some, state in zip(alike.values(), created, strict=True) for p in some}
    made = []
    for g, p, name in rows:
        kept = {k: t for k, t in states[id(p)].items() if isinstance(t, torch.Tensor)}
        for k, x in states[id(p)].items():
            if isinstance(x, (list, tuple, dict)) and x:
                raise Unsupported(
                    f"the optimizer state {k!r}", "it holds tensors in a container", "use another optimizer"
                )
        made.append(Member(g, p, name, tuple(kept), tuple(kept.values())))
    return made


def _first_states(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> list[dict[Any, Any]]:
    """The state that a first step creates for these parameters."""

    def run(made: Any, pairs: Pairs, step: Callable[[], None]) -> list[dict[Any, Any]]:
        step()
        return [dict(made.state.get(q, {})) for q, _ in pairs]

    return _on_copies(optimizer, params, run)


def _keeps(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> bool:
    """Whether a later step puts other tensors in the place of those it keeps."""

    def run(made: Any, pairs: Pairs, step: Callable[[], None]) -> bool:
        step()
        before = kept_tensors(made)
        step()
        known = {compat.storage_key(t) for t in before}
        return any(compat.storage_key(t) not in known for t in kept_tensors(made))

    return _on_copies(optimizer, params, run)


def _on_copies(
    optimizer: torch.optim.Optimizer,
    params: Sequence[torch.Tensor],
    run: Callable[[Any, Pairs, Callable[[], None]], Result],
) -> Result:
    """``run`` with a copy of the optimizer, its parameters and gradients, and a step of it: on fake tensors, if the
    step runs on them. Raises ``Unsupported`` if it does not run on real ones, either."""
    plain = compat.plain_step(type(optimizer))

    def tried(scratch: Callable[[torch.Tensor], torch.Tensor]) -> Result:
        others = {id(p): torch.nn.Parameter(scratch(p), p.requires_grad) for p in params}
        made = copied(optimizer, others, alone=independent(optimizer))
        pairs = [(q, torch.zeros_like(q)) for q in others.values()]
        return run(made, pairs, lambda: stepped(made, plain, pairs))

    def blank(p: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=p.device)

    if not kept_tensors(optimizer):  # a copy of a real tensor among fake ones could be written to by nothing
        try:
            with compat.fake_mode_of(params) or compat.fake_mode():
                return tried(blank)
        except Exception:
            pass
    try:
        return tried(lambda p: torch.zeros_like(p, memory_format=torch.preserve_format))
    except Exception as error:
        name = f"the optimizer {type(optimizer).__name__}"
        raise Unsupported(name, f"its step does not run on copies of its parameters: {error}") from error
