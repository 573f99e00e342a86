"""What an optimizer keeps, found by steps of a copy of it: the state of each parameter, and tensors beside."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tightship.frontends.torch import compat, compat_optimizers
from tightship.frontends.torch.optimizer.copy import (
    Rows,
    blank_term,
    copied,
    random_untouched,
    sparse_gradient,
    stepped,
)
from tightship.frontends.torch.optimizer.given import independent
from tightship.frontends.torch.optimizer.probe import does_not_run
from tightship.frontends.torch.optimizer.tensors import Path, inside, kept_by_path, kept_tensors

__all__ = ["Kept", "Row", "blank_state", "is_blank", "rehearsed"]

_FIRST_STEPS = 12
"""Steps of a class that is not torch's that are tried for what it keeps: some make it in a later one."""


_SMALL = 1e-3
"""A gradient's numbers: of one of zeros some optimizers keep nothing yet (DAdaptSGD)."""


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


def rehearsed(optimizer: torch.optim.Optimizer, rows: Sequence[Row], *, known: bool, together: bool) -> Kept:
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


def _on_copies(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], steps: int, *, held: bool = False,
    sparse: Collection[int] = (),
) -> Kept:  # fmt: skip
    """What a copy of the optimizer keeps for these parameters after ``steps``: on fake tensors, if the step runs on
    them. The gradients of those whose ids are in ``sparse`` are. Raises ``Unsupported`` if it does not run on real
    ones, either."""
    plain = compat_optimizers.plain_step(type(optimizer))

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
        with random_untouched(), compat_optimizers.fused_on_meta():
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


def _held(made: Any, states: Mapping[int, dict[Any, torch.Tensor] | None]) -> dict[Path, torch.Tensor]:
    """What it keeps beside the states of its parameters, each tensor once."""
    own = {id(t) for state in states.values() for t in (state or {}).values()}
    return {path: t for path, t in kept_by_path(made).items() if id(t) not in own}


def blank_state(optimizer: Any) -> dict[int, dict[Any, torch.Tensor]]:
    """Zeros like the state of parameters that have none before their first step, by their ids, for an optimizer of
    torch's: `torch.distributed.checkpoint` reads nothing of what a state dict has no tensor for."""
    if not independent(optimizer) or isinstance(optimizer, torch.optim.SparseAdam):
        return {}
    groups = enumerate(optimizer.param_groups)
    rows = [Row(g, p, "", ()) for g, group in groups for p in group["params"] if p.requires_grad]
    missing = [row for row in rows if not optimizer.state.get(row.param)]
    kept = rehearsed(optimizer, missing, known=True, together=False).states
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
