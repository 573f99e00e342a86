"""What people write with `jax.checkpoint`, as steps of a level: policies, and blocks.

A policy saves the results of some primitives. Blocks are `jax.checkpoint` around one layer after the other: the
forward pass is cut where few bytes go on (between layers), what goes on is kept, and the rest of a block is made
again, all at once, when the backward pass comes to it. Both are candidates beside what is planned: XLA fuses what is
made again together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from tightship.graph import Graph

__all__ = [
    "POLICIES",
    "Steps",
    "all_saved",
    "block_names",
    "is_policy",
    "saved",
    "steps_of_policy",
    "unbeaten",
]

POLICIES = ("dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")
"""Policies of `jax.checkpoint` that people take."""
_BLOCKS = "blocks"
_MOST = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""Into how many blocks the forward pass is cut."""
_ALIKE = 0.98
"""Of two ways to cut whose bytes by the model differ by less, one is enough."""

Steps = list[tuple[bool, int]]
"""Which op runs when, and whether for the second time."""
Ints = npt.NDArray[np.int64]


def is_policy(name: Any) -> bool:
    return isinstance(name, str) and (name in POLICIES or name.startswith(f"{_BLOCKS}/"))


def saved(saves: Any, made: Any) -> bool:
    """Whether a policy saves the results of a jaxpr's equation. A parameter named as JAX's policies name the
    primitive (equinox's `noinline` has one) cannot be given to them, and none of them reads it."""
    params = {name: x for name, x in made.params.items() if name != "prim"}
    return saves(made.primitive, *(x.aval for x in made.invars), **params) is True


def all_saved(saves: Any, equations: Iterable[Any]) -> Iterator[bool]:
    """What a policy saves of equations and of those inside of them."""
    for made in equations:
        yield saved(saves, made)
        held = jax.tree.leaves(list(made.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr"))
        inner = (getattr(x, "jaxpr", x) for x in held)
        yield from (found for x in inner if hasattr(x, "eqns") for found in all_saved(saves, x.eqns))


def steps_of_policy(graph: Graph, cut: int, made: Sequence[Any], policy: str, *, loops: bool) -> Steps:
    """The steps that a policy makes of a graph whose backward pass begins at ``cut``. ``made``: the jaxpr's equation
    with the results of each op (None: of none). ``loops``: the graph is the body of a loop and of its gradient's."""
    if policy.startswith(_BLOCKS):
        count, again = map(int, policy.split("/")[1:])
        return _steps_of_blocks(graph, cut, count, again if loops else min(again, count - 1))
    saves = getattr(jax.checkpoint_policies, policy)
    return _steps_saving(graph, cut, lambda k: made[k] is None or saved(saves, made[k]))


def _steps_saving(graph: Graph, cut: int, saves: Callable[[int], bool]) -> Steps:
    """What `jax.checkpoint` with a policy does, but that each value is made again when it is needed first: all that
    the backward pass reads of the forward pass and the policy does not save."""
    steps: Steps = [(False, k) for k in range(cut)]
    maker = {v: k for k, op in enumerate(graph.ops[:cut]) for v in op.outputs}
    for k in range(cut):
        if graph.ops[k].effect or saves(k):
            for v in graph.ops[k].outputs:
                del maker[v]
    for k in range(cut, len(graph.ops)):
        wanted = [v for v in graph.ops[k].inputs if v in maker]
        while wanted:
            again = maker[wanted[-1]]
            missing = [v for v in graph.ops[again].inputs if v in maker]
            wanted.extend(missing)
            if not missing:
                steps.append((True, again))
                for v in graph.ops[again].outputs:
                    maker.pop(v, None)
                wanted = [v for v in wanted if v in maker]
        steps.append((False, k))
    return steps


# --- blocks ---


def block_names() -> list[str]:
    """Names of the ways to cut forward passes into blocks: all are made again, or the first half of them, which keep
    longest what they keep."""
    halves = (1, 2)
    return [f"{_BLOCKS}/{n}/{n // by}" for n in _MOST for by in halves if n // by]


def unbeaten(took: Mapping[str, tuple[int, int]]) -> list[str]:
    """The names that no other one beats by what they ``took``, operations and bytes; fewest operations first."""
    found, least = list[str](), float("inf")
    for name, (_, nbytes) in sorted(took.items(), key=lambda row: row[1]):
        if nbytes < _ALIKE * least:
            found.append(name)
            least = nbytes
    return found


def _bounds(graph: Graph, cut: int, count: int) -> list[int]:
    """Where ``count`` blocks of the forward pass begin, but for the first: where fewest bytes go on from one op to
    the next, so that of what the backward pass reads each block has about as much as the others."""
    onward, kept = _onward(graph, cut), _kept(graph, cut)
    bounds: list[int] = []
    for i in range(1, count):
        aim = kept[-1] * i / count
        low, high = (np.searchsorted(kept, kept[-1] * (i + by) / count) for by in (-0.5, 0.5))
        inside = range(max(int(low), bounds[-1] + 1 if bounds else 1), min(int(high), cut))
        if inside:
            bounds.append(min(inside, key=lambda p: (onward[p], abs(kept[p] - aim))))
    return bounds


def _onward(graph: Graph, cut: int) -> Ints:
    """The bytes that go on to each op of the forward pass, and later ones of it, from those before."""
    reads, defines, sizes = graph.uses.reads, graph.uses.defines, [s.size for s in graph.storages]
    last = {s: k for k in range(cut) for s in reads[k]}
    change = np.zeros(cut + 2, dtype=np.int64)
    for k in range(cut):
        for s in defines[k]:
            if last.get(s, k) > k:
                change[k + 1] += sizes[s]
                change[last[s] + 1] -= sizes[s]
    return np.cumsum(change)


def _kept(graph: Graph, cut: int) -> Ints:
    """The bytes that the backward pass reads of what ops before each one make."""
    reads, defines, sizes = graph.uses.reads, graph.uses.defines, [s.size for s in graph.storages]
    later = {s for k in range(cut, len(graph.ops)) for s in reads[k]}
    return np.cumsum([0, *(sum(sizes[s] for s in defines[k] if s in later) for k in range(cut))])


def _steps_of_blocks(graph: Graph, cut: int, count: int, again: int) -> Steps:
    """The first ``again`` of ``count`` blocks are made again, each by itself."""
    reads, defines, effect = graph.uses.reads, graph.uses.defines, [op.effect for op in graph.ops]
    bounds = _bounds(graph, cut, count)
    of = np.searchsorted(bounds, np.arange(cut), side="right")
    maker = {s: k for k in range(cut) if of[k] < again and not effect[k] for s in defines[k]}
    onward = {s for k in range(cut) for s in reads[k] if s in maker and of[maker[s]] != of[k]}
    for s in (*onward, *graph.kept):
        maker.pop(s, None)
    needed: dict[int, set[int]] = {}
    for k in range(cut, len(graph.ops)):
        for s in reads[k]:
            if s in maker:
                needed.setdefault(int(of[maker[s]]), set()).add(s)
    steps: Steps = [(False, k) for k in range(cut)]
    members = [[k for k in range(cut) if of[k] == i] for i in range(again)]
    for k in range(cut, len(graph.ops)):
        for i in sorted({int(of[maker[s]]) for s in reads[k] if s in maker}, reverse=True):
            if i in needed:
                steps += _again(graph, members[i], maker, needed.pop(i))
        steps.append((False, k))
    return steps


def _again(graph: Graph, block: Sequence[int], maker: dict[int, int], needed: set[int]) -> Steps:
    """The ops of a block that make what is ``needed``."""
    found: Steps = []
    for k in reversed(block):
        if any(s in needed and s in maker for s in graph.uses.defines[k]):
            found.append((True, k))
            needed.update(s for s in graph.uses.reads[k] if s in maker)
    return found[::-1]
