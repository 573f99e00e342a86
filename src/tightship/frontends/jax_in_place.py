"""Results that take the places of inputs: of what is donated to a step, of what a loop carries.

XLA gives a result its input's bytes where nothing reads the input afterwards. Where it does not know that, it copies:
it asks the dependences between instructions, before it has an order of them. An update of a parameter does not depend
on the product of the backward pass that reads the parameter, so that each such parameter is there twice, and its
gradient waits for the end. So updates come as soon as they free what they make (`early`), and wait, by a dependence,
for who reads what they are written over (`writers`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tightship.frontends.jax_ops import ELEMENTWISE, FREE, Ops, fused
from tightship.frontends.jax_program import Equation, Program, tells

__all__ = ["with_carry", "writers", "written_over"]

_SMALL = 256
"""Bytes that an update may make and not free: scalars, of which others are computed."""


def with_carry(program: Program, first: int) -> Program:
    """The body of a loop that carries its inputs from ``first`` on: XLA has one buffer for each of them."""
    pairs = zip(program.outputs, program.inputs[first:], strict=False)
    return _over(program, {x: old for x, old in pairs if isinstance(x, int)})


def written_over(program: Program, donated: Sequence[int]) -> Program:
    """The program where results take the places of the inputs ``donated``: those of each shape and type in turn, as
    `jax.jit` has them."""
    free: dict[Hashable, list[int]] = {}
    for k in donated:
        v = program.inputs[k]
        free.setdefault(_shape(program.avals[v]), []).append(v)
    over: dict[int, int] = {}
    for x in program.outputs:
        row = free.get(_shape(program.avals[x] if isinstance(x, int) else x.aval))
        if row:
            old = row.pop(0)
            if isinstance(x, int):
                over.setdefault(x, old)
    return _over(program, over)


def _shape(aval: Any) -> Hashable:
    return tuple(aval.shape), str(aval.dtype)


def _over(program: Program, over: Mapping[int, int]) -> Program:
    """The program where results take the places of inputs. What is computed of one element by element, after all
    others have read it, is written over it, and so is what a loop inside, which alone reads it, carries on from it,
    and a part of it that is set."""
    program = early(replace(program, over={x: old for x, old in over.items() if x not in program.inputs}))
    readers: dict[int, set[int]] = {}
    maker: dict[int, tuple[int, int]] = {}
    for i, e in enumerate(program.equations):
        maker |= {v: (i, at) for at, v in enumerate(e.outputs)}
        for v in e.read:
            readers.setdefault(v, set()).add(i)
    rows = {row[-1]: set(row) for row in fused(program)}
    found = set()
    for after, before in program.over.items():
        if after not in maker or program.outputs.count(after) > 1:
            continue
        i, at = maker[after]
        e, alike = program.equations[i], str(program.avals[before]) == str(program.avals[after])
        if not alike or not (own := readers.get(before, set()) & rows[i]) or max(readers[before]) > i:
            continue
        if e.name in ELEMENTWISE or (own == {i} and before in _written(e, at)):
            found.add(after)
    return replace(program, in_place=frozenset(found))


def _written(e: Equation, at: int) -> tuple[Any, ...]:
    """The operand that XLA writes an equation's result ``at`` over, if it is that of a loop or of a part that is
    set."""
    p = e.made.params
    if e.name == "dynamic_update_slice":
        return e.inputs[:1]
    if e.instead is not None or e.name not in ("scan", "while"):
        return ()
    consts = p["num_consts"] if e.name == "scan" else p["cond_nconsts"] + p["body_nconsts"]
    carried = p["num_carry"] if e.name == "scan" else len(e.inputs) - consts
    return e.inputs[consts + at : consts + at + 1] if at < carried else ()


# --- updates, early ---


class _Rows:
    """The ops of a program, by number: what each reads, and what it waits for."""

    def __init__(self, program: Program) -> None:
        self.program, self.members = program, fused(program)
        equations = program.equations
        self.makes = [equations[row[-1]].outputs for row in self.members]
        self.maker = {v: k for k, row in enumerate(self.makes) for v in row}
        self.reads: list[set[int]] = []
        readers: dict[int, set[int]] = {}
        for k, row in enumerate(self.members):
            inside = {v for i in row for v in equations[i].outputs}
            self.reads.append({v for i in row for v in equations[i].read if v not in inside})
            for v in self.reads[-1]:
                readers.setdefault(v, set()).add(k)
        self.waits = [{self.maker[v] for v in row if v in self.maker} for row in self.reads]
        for x, old in program.over.items():
            if x in self.maker:
                k = self.maker[x]
                self.waits[k] |= {r for r in readers.get(old, ()) if r < k}
        self.left = {v: len(row) for v, row in readers.items()}

    def updates(self) -> list[int]:
        """What is computed element by element and leads to nothing of the backward pass."""
        equations = self.program.equations
        leads = [any(equations[i].backward for i in row) for row in self.members]
        for k in reversed(range(len(leads))):
            if leads[k]:
                for v in self.reads[k] & self.maker.keys():
                    leads[self.maker[v]] = True
        simple = ELEMENTWISE | FREE
        rows = enumerate(self.members)
        return [k for k, row in rows if not leads[k] and all(equations[i].name in simple for i in row)]

    def grows(self, k: int, kept: set[int]) -> bool:
        """Whether more is there after an op than before it, beside the bytes of inputs."""
        size, over = self.program.nbytes, self.program.over
        gone = size(v for v in self.reads[k] if self.left[v] == 1 and v in self.maker and v not in kept)
        return size(v for v in self.makes[k] if v not in over) > gone + _SMALL


def early(program: Program) -> Program:
    """The program whose updates come as soon as they free as much as they make. As it is traced, they come last, and
    all gradients are there at once."""
    if not program.over or not any(e.backward for e in program.equations):
        return program
    rows, kept = _Rows(program), program.results()
    later, order, done = rows.updates(), list[int](), set[int]()

    def run(k: int) -> None:
        order.append(k)
        done.add(k)
        for v in rows.reads[k]:
            rows.left[v] -= 1

    for k in range(len(rows.members)):
        if k in done:
            continue
        run(k)
        more = True
        while more:
            ready = [j for j in later if j not in done and rows.waits[j] <= done and not rows.grows(j, kept)]
            for j in ready:
                run(j)
            more = bool(ready)
        later = [j for j in later if j not in done]
    # Where each equation is needed first: one that costs nothing has several places.
    first: dict[int, int] = {}
    for at, k in enumerate(order):
        for i in rows.members[k]:
            first.setdefault(i, at)
    there = sorted(range(len(program.equations)), key=lambda i: (first.get(i, len(order)), i))
    return replace(program, equations=[program.equations[i] for i in there])


# --- and not before the input is read ---


def writers(ops: Ops, steps: Sequence[tuple[bool, int]]) -> dict[int, list[int]]:
    """The steps that each step waits for that writes a result over an input: those that read the input, and that it
    does not follow from. None for a step that one of these comes after, or that none of them can hold back."""
    over = ops.program.over
    if not over:
        return {}
    before, maker = list[int](), dict[int, int]()  # the steps that each follows from, as bits
    readers: dict[int, list[int]] = {}
    inputs = set(over.values())
    for at, (_, op) in enumerate(steps):
        bits = 0
        for v in ops.reads(ops.members[op]):
            if v in maker:
                bits |= before[maker[v]] | 1 << maker[v]
            if v in inputs:
                readers.setdefault(v, []).append(at)
        before.append(bits)
        maker |= dict.fromkeys(ops.results[op], at)
    found = {}
    for at, (again, op) in enumerate(steps):
        written = [over[v] for v in ops.results[op] if v in over]
        more = {k for v in written for k in readers.get(v, ()) if k != at and not before[at] >> k & 1}
        holds = all(
            k < at and any(tells(ops.program.avals[v]) for v in ops.results[steps[k][1]]) for k in more
        )
        if more and holds and not again:
            found[at] = sorted(k for k in more if not any(before[j] >> k & 1 for j in more))
    return found
