"""Whether an optimizer may step a part of a parameter, as on ranks that have some rows each: tried on small ones.

An optimizer may if it does with each element what it would do without the others: stepping all rows and stepping some
of them by themselves leaves the same bits in parameters, state, groups and attributes, over many kinds of gradients;
and no op of its step but those that go element by element reads numbers of a parameter or its gradient, and none
hands one to Python. Comparing bits finds a coupling only where it acts on small tensors; what ops it is made of shows
it whatever its threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from tightship.frontends.torch.elementwise import goes_by_elements
from tightship.frontends.torch.optimizer.attributes import plain_part, told, unchanged_globals
from tightship.frontends.torch.optimizer.copy import Disagreement, random_states, random_untouched, stepped
from tightship.frontends.torch.optimizer.probe import (
    DRAWS,
    Flow,
    Follow,
    Pair,
    Scenario,
    Trial,
    same,
    scenarios,
)

__all__ = ["why_whole"]

_LARGEST: Final = 1 << 15
"""Elements of a parameter that is tried: more than those below which optimizers of 8 bits keep all bits."""


def why_whole(optimizer: Any) -> str | None:
    """Why the optimizer has to have whole parameters; None if it may step a part of each. The optimizer stays as it
    is."""
    with unchanged_globals(optimizer) as counted, random_untouched():
        before = random_states()
        try:
            trial = _PartTrial(optimizer, _LARGEST)
            *others, _missing = scenarios(
                len(trial.shapes), trial.last_group
            )  # a part has a gradient, or none has
            why = trial.tried([*_elements(), *others])
        except Exception as error:
            why = f"its step does not run on parameters like its own ({type(error).__name__}: {error})"
        if random_states() != before:
            why = DRAWS
    return f"its step changes {counted[0]}" if counted else why


def _elements() -> list[Scenario]:
    """One element that is unlike all others."""

    def one(value: float) -> Scenario:
        def gradient(step: int, k: int, g: torch.Tensor) -> torch.Tensor:
            if g.numel() and step == 1:
                g.view(-1)[0] = value
            return g

        return Scenario(f"one element of {value}", 3, gradient)

    return [one(x) for x in (float("inf"), float("nan"), 1e15, 0.0)]


class _Elementwise(Follow):
    """Sees ops that read numbers of the parameters otherwise than element by element."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not goes_by_elements(func) and self.of((*args, *(kwargs or {}).values())):
            self.met.append(f"{func._schema.name.rpartition('::')[2]} does not go element by element")
        return super().__torch_dispatch__(func, types, args, kwargs)


class _PartTrial(Trial):
    """Steps whole parameters, and some of their rows by an optimizer of its own, the others by another."""

    def pair(self, start: Sequence[torch.Tensor]) -> Pair:
        whole, ours = self.fresh(start)
        twins = [self.fresh([_rows(t)[k] for t in start]) for k in range(2)]
        pair = Pair(whole, ours, twins, Flow(_Elementwise()))
        for p in ours:
            pair.flow.own(0, p)
        return pair

    def step_both(self, pair: Pair, grads: Sequence[torch.Tensor | None]) -> str | None:
        parts = [None if g is None else [t.clone() for t in _rows(g)] for g in grads]
        for g in grads:
            if g is not None:
                pair.flow.own(0, g)
        with pair.flow.watching():
            stepped(pair.whole, self.step, zip(pair.ours, grads, strict=True))
        if pair.flow.met:
            return f"an op of its step, {pair.flow.met[0]}"
        for k, (twin, params) in enumerate(pair.twins):
            stepped(twin, self.step, zip(params, [row and row[k] for row in parts], strict=True))
        return _difference(pair)


def _rows(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two parts of a tensor's rows, of other sizes; of what has no two rows: all, twice."""
    if not t.dim() or t.shape[0] < 2:
        return t, t
    first = max(1, t.shape[0] // 3)
    return t[:first], t[first:]


def _difference(pair: Pair) -> str | None:
    (first, some), (second, others) = pair.twins
    for k, (p, a, b) in enumerate(zip(pair.ours, some, others, strict=True)):
        if not _together(p.detach(), a.detach(), b.detach(), shape=p.shape):
            return "its update of some rows depends on the others"
        states = [o.state.get(x, {}) for o, x in ((pair.whole, p), (first, a), (second, b))]
        if len({tuple(state) for state in states}) > 1:
            return f"its state of parameter {k} has other entries for some of the rows"
        if not all(_together(*(s[n] for s in states), shape=p.shape) for n in states[0]):
            return f"its state of some rows of parameter {k} depends on the others"
    known = {id(p) for p in (*pair.ours, *some, *others)}
    if any(id(p) not in known for o in (pair.whole, first, second) for p in o.state):
        return "its state has entries that are no parameter's"
    rows = [plain_part(o) for o in (pair.whole, first, second)]
    for what, *values in zip(("attributes", "groups"), *rows, strict=True):
        if len(set(map(told, values))) > 1:
            raise Disagreement(what)
    return None


def _together(whole: Any, a: Any, b: Any, *, shape: torch.Size) -> bool:
    """Whether two parts, one after the other, are the whole, if it is of the parameter's shape; or all are equal."""
    if not isinstance(whole, torch.Tensor) or whole.shape != shape or not shape or shape[0] < 2:
        return _alike(whole, a) and _alike(whole, b)
    parts = (isinstance(t, torch.Tensor) and t.shape[1:] == shape[1:] for t in (a, b))
    return all(parts) and _alike(whole, torch.cat([a, b]))


def _alike(a: Any, b: Any) -> bool:
    """To the bit, but for those of NaN, which follow from where an element lies in its row."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.is_floating_point():
        a, b = (t.masked_fill(t.isnan(), float("nan")) for t in (a, b))
    return same(a, b)
