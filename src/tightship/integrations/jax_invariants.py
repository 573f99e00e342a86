"""What a loop computes in every turn alike, from what does not change in it: XLA moves that out of it, where it is
done once, and its results are there as long as the loop runs. Where there is no room for them it is held in the loop
(`on_values`), as the loop was written: products of a Hessian and a vector in a solver, the gradient of a fixed point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tightship.frontends.jax_ops import FREE
from tightship.frontends.jax_program import Equation, Program

__all__ = ["constants_of", "flops_moved_out", "moved_out"]

_STAYS = frozenset({"scan", "while", "cond", "shard_map"})
"""What XLA leaves in the loop."""


def constants_of(e: Equation) -> int:
    """How many inputs of a loop's body are the same in every turn."""
    p = e.made.params
    return (
        int(p["num_consts"] if e.name == "scan" else p["body_nconsts"]) if e.name in ("scan", "while") else 0
    )


def _invariant(body: Program, constants: int) -> frozenset[int]:
    """The equations of a loop's body that compute the same in every turn."""
    alike, found = {*body.constants, *body.inputs[:constants]}, set()
    for i, e in enumerate(body.equations):
        if not e.made.effects and e.name not in _STAYS and e.read and alike.issuperset(e.read):
            alike.update(e.outputs)
            found.add(i)
    return frozenset(found)


def moved_out(body: Program, constants: int, takes: Callable[[Program], int]) -> int | None:
    """The bytes that a body takes where XLA has moved out of it what it moves; None where it moves nothing.
    ``takes``: those of a program."""
    out = _invariant(body, constants)
    held, stays = _read_inside(body, out)
    if not held:
        return None
    there = [e for i, e in enumerate(body.equations) if i in out]
    rest = [e for i, e in enumerate(body.equations) if i not in out or i in stays]
    before = replace(body, equations=there, outputs=list(held), in_place=frozenset())
    inside = replace(body, equations=rest, inputs=[*body.inputs, *held])
    return max(takes(before), takes(inside) + body.nbytes(held))


def flops_moved_out(body: Program, constants: int) -> int:
    """The floating-point operations that XLA does once for all turns."""
    return sum(body.equations[i].flops for i in _invariant(body, constants)) if constants else 0


def _read_inside(body: Program, out: frozenset[int]) -> tuple[tuple[int, ...], frozenset[int]]:
    """The values made by equations ``out`` that others read, and those of these equations that cost nothing and are
    made where they are read."""
    maker = {v: i for i in out for v in body.equations[i].outputs}
    more = [v for i, e in enumerate(body.equations) if i not in out for v in e.read]
    more += body.results()
    found, stays = set[int](), set[int]()
    while more:
        v = more.pop()
        if v not in maker:
            continue
        e = body.equations[maker[v]]
        if e.name in FREE:
            stays.add(maker[v])
            more.extend(e.read)
        else:
            found.add(v)
    return tuple(sorted(found)), frozenset(stays)
