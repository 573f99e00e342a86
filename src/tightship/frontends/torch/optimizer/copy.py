"""Copies of an optimizer on other tensors: its step, rehearsed, and a parameter at a time."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from tightship.frontends.torch import compat, compat_optimizers
from tightship.frontends.torch.optimizer.attributes import (
    OWN,
    Fixed,
    Plain,
    copy_plain,
    fixed,
    is_hooks,
    not_fixed,
    numbers_of,
    plain_part,
    set_numbers,
    told,
)
from tightship.frontends.torch.optimizer.tensors import parameters_of

__all__ = [
    "Disagreement",
    "Rehearsal",
    "Rows",
    "Term",
    "Turns",
    "bare",
    "blank_term",
    "copied",
    "random_states",
    "random_untouched",
    "sparse_gradient",
    "stepped",
]


def stepped(
    optimizer: Any, step: Callable[..., Any], pairs: Iterable[tuple[torch.Tensor, torch.Tensor | None]]
) -> None:
    """Run ``step(optimizer)`` with ``pairs`` of parameters and their gradients; ``p.grad`` stays as it was.

    The parameters of the optimizer that are not among them have no gradient.
    """
    given = {id(p): g for p, g in pairs}
    params = parameters_of(optimizer)
    before = [p.grad for p in params]
    try:
        for p in params:
            p.grad = given.get(id(p))
        with compat.code_of_others():
            step(optimizer)
    finally:
        for p, was in zip(params, before, strict=True):
            p.grad = was


def bare(optimizer: Any) -> Any:
    """An object of the optimizer's class, made without its constructor, whose defaults may differ from the groups."""
    cls: Any = type(optimizer)
    made = cls.__new__(cls)
    for name, value in vars(optimizer).items():
        if is_hooks(name):
            made.__dict__[name] = type(value)()
    return made


def copied(optimizer: Any, others: Mapping[int, torch.Tensor], *, alone: bool = False) -> Any:
    """A copy of the optimizer, state and attributes included, with ``others[id(p)]`` in the place of parameter ``p``.

    A parameter that is not among them stands there as another object on the same data, without a gradient and without
    state: run the copy with gradients for ``others`` alone. Where ``alone``, for optimizers that step each parameter
    by itself, it is left out of its group, which is quicker by far where there are many. Step hooks are left out.
    Raises what copying an attribute raises.
    """
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in memo:
                memo[id(p)] = others.get(id(p))
                if memo[id(p)] is None and not alone:
                    memo[id(p)] = torch.nn.Parameter(p.detach(), p.requires_grad)
    made = _copied(optimizer, memo, frozenset(memo) - frozenset(others))
    for group in made.param_groups if alone else ():
        group["params"] = [p for p in group["params"] if p is not None]
    return made


def _copied(optimizer: Any, memo: dict[int, Any], left_out: frozenset[int]) -> Any:
    made = bare(optimizer)
    memo[id(optimizer)] = made
    for value in (*vars(optimizer).values(), *(x for g in optimizer.param_groups for x in g.values())):
        if isinstance(value, torch.Generator) and id(value) not in memo:
            memo[id(value)] = value.clone_state()
    for value in vars(optimizer).values():  # an optimizer's own way of being copied forgets its attributes
        if isinstance(value, torch.optim.Optimizer) and id(value) not in memo:
            _copied(value, memo, left_out)
    state = optimizer.state
    if id(state) not in memo:
        rows = [(k, x) for k, x in state.items() if id(k) not in left_out]
        memo[id(state)] = defaultdict(dict, {copy.deepcopy(k, memo): copy.deepcopy(x, memo) for k, x in rows})
    for name, value in vars(optimizer).items():
        if not is_hooks(name) and name != "step":
            made.__dict__[name] = copy.deepcopy(value, memo)
    ids = {id(p): id(q) for p in parameters_of(optimizer) if (q := memo.get(id(p))) is not None}
    for name, value in vars(made).items():
        if name not in OWN:
            made.__dict__[name] = _with_ids(value, ids)
    return made


def _with_ids(tree: Any, ids: Mapping[int, int]) -> Any:
    """A copy's attribute with the ids of the copy's parameters in the place of the ids of the optimizer's."""
    if type(tree) in (set, frozenset) and not ids.keys().isdisjoint(tree):
        return type(tree)(ids.get(x, x) if type(x) is int else x for x in tree)
    if type(tree) in (dict, OrderedDict, defaultdict):
        rows = [(ids.get(k, k) if type(k) is int else k, _with_ids(x, ids)) for k, x in tree.items()]
        tree.clear()
        tree.update(rows)
    return tree


_MOST_STEPS = 10**6
_MOST_INTERVALS = 8


class Rehearsal:
    """An update on copies of parameters and state, run as often as one likes; changes nothing real.

    ``fill`` before each ``run`` says what the gradients are; a call does both, with gradients of zeros. ``alone``: as
    for `copied`. ``rows``: by a parameter's id, those of the terms of its gradient, if that is sparse.
    ``begins``: the first run makes state.
    """

    def __init__(
        self,
        optimizer: Any,
        params: Sequence[torch.Tensor],
        *,
        alone: bool,
        rows: Mapping[int, Sequence[Rows]],
        begins: bool,
    ) -> None:
        self.begins = begins
        others = {id(p): torch.nn.Parameter(p.detach().clone(), p.requires_grad) for p in params}
        self._made = copied(optimizer, others, alone=alone)
        self._step = compat_optimizers.plain_step(type(optimizer))
        self._pairs = [(q, torch.zeros_like(q)) for i, q in others.items() if i not in rows]
        self._sparse = [(q, [blank_term(q, n) for n in rows[i]]) for i, q in others.items() if i in rows]
        self._parameters, self._filled = list(others.values()), 0
        self._before: dict[tuple[int, Any], float] = {}
        self._counters: list[tuple[int, Any]] = []

    def __call__(self) -> None:
        self.fill(0.0)
        self.run()

    def fill(self, scale: float) -> None:
        """Gradients of normally distributed numbers times ``scale``."""
        self._filled += 1
        for q, terms in self._sparse:
            _spread(terms, q.shape[0], self._filled)
        values = [t.values for _, terms in self._sparse for t in terms]
        for g in (*values, *(g for _, g in self._pairs)):
            flat = g.as_strided((g.untyped_storage().nbytes() // g.itemsize,), (1,), 0)
            if scale:
                tile = _normal_tile(g.dtype).to(g.device)
                whole = flat.numel() // len(tile) * len(tile)
                if whole:
                    flat[:whole].view(-1, len(tile)).copy_(tile.expand(whole // len(tile), len(tile)))
                flat[whole:].copy_(tile[: flat.numel() - whole])
                flat.mul_(scale)
            else:
                flat.zero_()

    def run(self) -> None:
        sparse = [(q, sparse_gradient(q, terms)) for q, terms in self._sparse]
        stepped(self._made, self._step, [*self._pairs, *sparse])

    def count(self) -> None:
        """Called after two runs in turn: numbers that the second has raised by one are counters."""
        now = numbers_of(self._made, self._parameters)
        self._counters = [n for n, x in now.items() if self._before.get(n) == x - 1]
        self._before = now

    def intervals(self) -> tuple[int, ...]:
        """Whole numbers among the settings that may be numbers of steps, the least first: what some optimizers do
        every so many steps, or after so many, needs more than other steps do."""
        counted = set(self._counters)
        numbers = {int(x) for n, x in self._before.items() if n not in counted and x.is_integer()}
        return tuple(sorted(n for n in numbers if 2 <= n <= _MOST_STEPS)[:_MOST_INTERVALS])

    def skip(self, steps: int) -> bool:
        """As if so many steps had been done; False if nothing counts them."""
        set_numbers(self._made, self._parameters, self._counters, steps)
        return bool(self._counters)


class Rows(NamedTuple):
    """How many rows of a table a term of a sparse gradient names; ``padding`` is not to be changed by it."""

    number: int
    padding: int | None = None


class Term(NamedTuple):
    """``rows`` (1, n) says which rows of a table get the ``values`` (n, …), but ``padding``; rows may come several
    times."""

    values: torch.Tensor
    rows: torch.Tensor
    padding: int | None = None

    def without_padding(self) -> Term:
        """Torch's own filter (embedding_sparse_backward in aten/src/ATen/native/Embedding.cpp)."""
        if self.padding is None:
            return self
        stays = self.rows[0] != self.padding
        return Term(self.values[stays], self.rows[0][stays][None])


def blank_term(param: torch.Tensor, rows: Rows) -> Term:
    """One of so many rows, of zeros."""
    values = torch.zeros(rows.number, *param.shape[1:], dtype=param.dtype, device=param.device)
    return Term(values, torch.zeros(1, rows.number, dtype=torch.int64, device=param.device), rows.padding)


def sparse_gradient(param: torch.Tensor, terms: Iterable[Term]) -> torch.Tensor:
    """The gradient of a table as autograd makes it: each term plus the sum of those behind it."""
    plain = (term.without_padding() for term in terms)
    made = [compat.sparse_tensor(param.shape, t.rows, t.values) for t in plain]
    while len(made) > 1:
        last = made.pop()
        made[-1] = made[-1] + last
    return made[0]


def _spread(terms: Sequence[Term], length: int, time: int) -> None:
    """Gives the terms other rows of a table of that ``length``. Every second time no two are the same, as far as
    there are so many, and no term has one of another's, with which it would be merged; else some, or one for each."""
    at = 0
    for left, (_, rows, _) in zip(
        range(len(terms), 0, -1), sorted(terms, key=lambda t: t.rows.shape[1]), strict=True
    ):
        number = rows.shape[1]
        own = min(number, (length - at) // left)
        some = own if time % 2 == 0 else (own + 1) // 2 if time % 4 == 1 else 1
        rows.copy_((at + torch.arange(number, device=rows.device)[None] % max(1, some)) % length)
        at += own


_tiles: dict[torch.dtype, torch.Tensor] = {}


def _normal_tile(dtype: torch.dtype) -> torch.Tensor:
    if dtype not in _tiles:
        generator = torch.Generator().manual_seed(0)
        wide = torch.complex64 if dtype.is_complex else torch.float32
        _tiles[dtype] = torch.randn(1 << 16, generator=generator, dtype=wide).to(dtype)
    return _tiles[dtype]


class Turns:
    """An optimizer's step, a parameter at a time.

    Each turn, one for each of ``params``, starts from attributes and groups as they were before the step, as each
    parameter does when all are stepped at once; what they become is written to the optimizer after the last turn. A
    parameter that has had its turn begins the next step.
    """

    def __init__(self, optimizer: Any, params: Sequence[torch.Tensor]) -> None:
        self.optimizer, self._params = optimizer, params
        self._step = compat_optimizers.plain_step(type(optimizer))
        self._had: set[int] = set()
        self._stateful: set[int] = set()  # that had an entry before the step
        self._before: Plain = ({}, [])
        self._tensors: Fixed = ()
        self._attributes: dict[str, Any] | None = None
        self._groups: dict[int, tuple[bool, dict[str, Any]]] = {}  # whether it is a parameter's own group

    def run(self, group: int, param: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Step ``param`` of ``param_groups[group]``.

        Raises ``Disagreement`` when the turns of one step make different things of attributes and groups."""
        if not self._had or id(param) in self._had:
            self._had, self._before = set(), plain_part(self.optimizer)
            self._tensors = fixed(self._before)
            self._attributes, self._groups = None, {}
            self._stateful = {id(p) for p in self.optimizer.state}
        self._had.add(id(param))
        one = self._alone(group, param)
        stepped(one, self._step, [(param, grad)])
        now = plain_part(one)
        if (name := not_fixed(self._tensors, fixed(now))) is not None:
            raise Disagreement(f"the tensor in {name!r}, which its step changes")
        self._note(group, *now)
        if len(self._had) == len(self._params):
            self._commit()
            self._had = set()

    def _alone(self, group: int, param: torch.Tensor) -> Any:
        one = bare(self.optimizer)
        attributes, groups = self._before
        one.__dict__.update({n: copy_plain(x) for n, x in attributes.items()})
        one.state = self.optimizer.state
        one.param_groups = [
            {"params": [param] if k == group else []} | {n: copy_plain(x) for n, x in g.items()}
            for k, g in enumerate(groups)
        ]
        return one

    def _note(self, group: int, attributes: dict[str, Any], groups: Sequence[dict[str, Any]]) -> None:
        if len(groups) != len(self._before[1]):
            raise Disagreement("the number of its groups changes")
        _agree("its attributes", self._attributes, attributes)
        self._attributes = attributes
        for k, now in enumerate(groups):
            own, known = self._groups.get(k, (False, None))
            if known is None or (k == group and not own):
                self._groups[k] = k == group, now
            elif own == (k == group):
                _agree(f"group {k}", known, now)

    def _commit(self) -> None:
        attributes, groups = self._before
        _write(vars(self.optimizer), attributes, self._attributes or {})
        for k, (_, now) in self._groups.items():
            _write(self.optimizer.param_groups[k], groups[k], now)
        state = self.optimizer.state
        for p in self._params:  # new entries come in the order of the parameters, as in eager
            if id(p) not in self._stateful and p in state:
                state[p] = state.pop(p)


class Disagreement(Exception):
    """The turns of one step do not make the same of groups and attributes."""


def _agree(what: str, known: dict[str, Any] | None, now: dict[str, Any]) -> None:
    if known is None or told(known) == told(now):
        return
    names = sorted(n for n in {*known, *now} if told(known.get(n)) != told(now.get(n)))
    raise Disagreement(f"{what}: {', '.join(names) or 'their order'}")


def _write(home: Any, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for n in before:
        if n not in after:
            home.pop(n, None)
    for n, x in after.items():
        if n in before and told(before[n]) == told(x):
            continue
        if isinstance(x, (list, dict)):
            raise Disagreement(f"{n!r} is changed, which others may hold")
        home[n] = x


@contextmanager
def random_untouched() -> Iterator[None]:
    """What draws random numbers, torch's, Python's or NumPy's, draws the same again afterwards."""
    generators = compat.generators()
    torchs = [g.get_state() for g in generators]
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        for g, state in zip(generators, torchs, strict=True):
            g.set_state(state)
        random.setstate(pythons)
        np.random.set_state(numpys)


def random_states() -> tuple[Any, ...]:
    """What `random_untouched` sets back, to compare."""
    numbers = [bytes(g.get_state().numpy()) for g in compat.generators()]
    name, keys, *more = np.random.get_state()
    return (*numbers, random.getstate(), name, bytes(keys), *more)  # type: ignore[arg-type]
