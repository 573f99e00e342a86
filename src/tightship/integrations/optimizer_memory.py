"""What an optimizer takes: its parameters, its state, gradients, and what a step of it makes for itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from tightship.errors import BadInput, Unsupported
from tightship.execute import allocator
from tightship.frontends.torch import compat, compat_compile, compat_distributed, compat_optimizers
from tightship.frontends.torch.optimizer.copy import copied, stepped
from tightship.frontends.torch.optimizer.given import independent
from tightship.graph import aligned, alignment_of

__all__ = ["StepMemory", "measure_optimizers"]

_SMALL: Final = 2048
"""Bytes for the numbers of a step: the norm of gradients, a scaler's scale, what it found."""


@dataclass(frozen=True)
class StepMemory:
    """What ``optimizers`` take, in bytes: ``parameters`` by the identity of their storage, their ``state`` once all
    of it exists, ``gradients`` of all of them, and ``workspace``, the most a step makes for itself beside those.
    ``one_by_one`` is about the workspace if parameters were stepped one at a time; ``name`` is for people."""

    optimizers: tuple[Any, ...]
    parameters: Mapping[int, int]
    state: int
    gradients: int
    workspace: int
    one_by_one: int
    name: str

    def existing_gradients(self) -> int:
        """Bytes of the gradients that are there now, but those in buckets."""
        if not self.gradients:
            return 0
        there = [compat_distributed.own_part(p.grad) for p in _trained(self.optimizers) if p.grad is not None]
        storages = {compat.storage_key(t): _bytes(t) for t in there}  # several may lie in one
        return sum(storages.values())

    def in_parts(self) -> bool:
        """Whether a parameter is a DTensor, of which this rank has a part."""
        return any(compat_distributed.is_distributed(type(p.data)) for p in _trained(self.optimizers))

    def existing_state(self) -> int:
        """Bytes of the state that is there now."""
        return sum(map(_bytes, self._state()))

    def state_storages(self) -> frozenset[int]:
        """The identities of the storages of the state that is there now."""
        return frozenset(compat.storage_key(compat_distributed.own_part(t)) for t in self._state())

    def _state(self) -> Iterator[torch.Tensor]:
        return (t for o in self.optimizers for s in o.state.values() for t in _tensors(s))


def measure_optimizers(given: Any) -> StepMemory:
    """What the optimizer, or each in a list of them, takes: two steps of it on parameters like its own.

    Raises ``BadInput`` for what is no optimizer, ``Unsupported`` for one whose step does not run on copies.
    """
    optimizers = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for o in optimizers:
        if not isinstance(o, torch.optim.Optimizer):
            raise BadInput(
                "optimizer must be a torch.optim.Optimizer or a list of them", o, "torch.compile(options=…)"
            )
    params = {id(p): p for o in optimizers for g in o.param_groups for p in g["params"]}.values()
    rows = [_step_of(o) for o in optimizers]
    trained = _trained(optimizers)
    norms = len(trained) * 2 * aligned(1) + aligned(
        8 * len(trained)
    )  # what clipping makes: a norm of each, stacked
    return StepMemory(
        optimizers,
        {compat.storage_key(compat_distributed.own_part(p)): _bytes(p) for p in params},
        sum(state for state, _, _ in rows),
        sum(map(_bytes, trained)),
        max(norms, *(most for _, most, _ in rows)) + _SMALL,
        max(norms, *(least for _, _, least in rows)) + _SMALL,
        " and ".join(dict.fromkeys(type(o).__name__ for o in optimizers)),
    )


def _trained(optimizers: Sequence[Any]) -> list[torch.Tensor]:
    found = {id(p): p for o in optimizers for g in o.param_groups for p in g["params"] if p.requires_grad}
    return list(found.values())


def _bytes(t: torch.Tensor) -> int:
    t = compat_distributed.own_part(t)
    if t.layout is not torch.strided:
        return aligned(t.element_size() * t._nnz() if t.is_sparse else 0)
    return aligned(t.untyped_storage().nbytes(), alignment_of(str(t.device)))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple, dict)):
        for x in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(x)


def _step_of(optimizer: Any) -> tuple[int, int, int]:
    """Bytes of state, of what a step makes for itself, and of that if parameters were stepped one at a time."""
    params = _trained([optimizer])
    group_of = {id(p): k for k, g in enumerate(optimizer.param_groups) for p in g["params"]}
    alike: dict[Any, list[torch.Tensor]] = {}
    for p in params:
        fresh = not optimizer.state.get(p)
        alike.setdefault((group_of[id(p)], tuple(p.shape), p.stride(), p.dtype, p.device, fresh), []).append(
            p
        )
    if not alike:
        return 0, 0, 0
    tried = {key: _tried(optimizer, some[:1]) for key, some in alike.items()}
    state = sum(tried[key][0] * len(some) for key, some in alike.items())
    alone = {key: workspace for key, (_, workspace) in tried.items()}
    most = max(alone.values())
    if len(params) == 1:
        return state, most, most
    largest = sorted(params, key=_bytes)[-2:]
    key = {id(p): k for k, some in alike.items() for p in some}
    a, b = sorted(alone[key[id(p)]] for p in largest)
    _, both = _tried(optimizer, largest)
    together = both >= b + max(a // 2, 1)  # lists of all parameters at once (foreach)
    if not together:
        return state, max(most, both), max(most, both)
    whole = sum(alone[k] * len(some) for k, some in alike.items())
    return state, whole, min(whole, 2 * most)


def _tried(optimizer: Any, params: Sequence[torch.Tensor]) -> tuple[int, int]:
    """State and workspace of a step on copies of ``params``: the most of the first step, which creates the state, and
    of the second."""
    step = compat_optimizers.plain_step(type(optimizer))
    kind = allocator.kind_of(str(params[0].device))
    try:
        with compat_compile.outside(), torch.random.fork_rng(enabled=True):
            others = {id(p): torch.nn.Parameter(torch.zeros_like(p), p.requires_grad) for p in params}
            made = copied(optimizer, others, alone=independent(optimizer))
            pairs = [(q, torch.zeros_like(q)) for q in others.values()]
            first = _workspace(lambda: stepped(made, step, pairs), kind)
            state = sum(_bytes(t) for q in others.values() for t in _tensors(dict(made.state.get(q, {}))))
            return state, max(first, _workspace(lambda: stepped(made, step, pairs), kind))
    except Exception as error:
        name = f"the optimizer {type(optimizer).__name__}"
        what = f"its step does not run on copies of its parameters: {error}"
        raise Unsupported(
            name, what, "leave it out of the options: a budget is then of the graphs alone"
        ) from error


def _workspace(run: Any, kind: str) -> int:
    """The most bytes that ``run`` has in use beside what it leaves; 0 where no allocator counts them."""
    if not allocator.available(kind):
        run()
        return 0
    align = alignment_of(kind)
    with allocator.record(kind) as recording:
        run()
    sizes: dict[int, int] = {}
    live = most = 0
    for event in recording.events:
        if event.kind == "alloc":
            sizes[event.id] = aligned(event.nbytes, align)
            live += sizes[event.id]
        else:
            live -= sizes.get(event.id, 0)
        most = max(most, live)
    return most - max(live, 0)
