"""A plan of a JAX program as a function again.

What is done again reads its operands through `late`, so that XLA neither merges it with the first time nor runs it
before its turn; what is written over an input waits for who reads that input (`jax_in_place`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tightship.frontends.jax_in_place import writers
from tightship.frontends.jax_ops import Ops
from tightship.frontends.jax_program import array_of, is_array, is_divided, is_plain, tells, varying
from tightship.frontends.jaxpr import bytes_of

__all__ = ["late", "never", "on_values"]


def on_values(
    ops: Ops,
    steps: Sequence[tuple[bool, int]],
    hold: str,
    inputs: Sequence[int] | None = None,
    outputs: Sequence[Any] | None = None,
    alike: int = 0,
) -> Callable[..., list[Any]]:
    """A function of ``inputs`` (the program's) that runs ``steps``: (whether it is done again, op), and returns
    ``outputs`` (the program's). What is done again reads its operands through `late`, by ``hold``, so that XLA
    neither merges it with the first time nor runs it before its turn. So does, in a loop, what follows from its first
    ``alike`` inputs alone, the same ones in every turn: XLA would move it out of the loop."""
    program = ops.program
    given = program.inputs if inputs is None else inputs
    wanted = program.outputs if outputs is None else outputs
    needed = _needed(ops, steps, wanted)
    in_turn = _follows(ops, given[:alike]) if alike else []
    waits = writers(ops, steps) if hold == "select" else {}
    token = {
        k: next(v for v in ops.results[steps[k][1]] if tells(program.avals[v]))
        for row in waits.values()
        for k in row
    }

    def run(*args: Any) -> list[Any]:
        known = dict(program.constants) | dict(zip(given, args, strict=True))
        turn = [x for x in args[alike:] if tells(jax.typeof(x))]
        held = late(ops, in_turn, known, turn, hold) if in_turn and turn else {}
        before: dict[
            int, None
        ] = {}  # what is computed before the next repetition, and read by nothing before it
        read: dict[int, Any] = {}  # of the steps that others wait for
        at = 0
        while at < len(steps):
            again, op = steps[at]
            if not again:
                there = known | held if op in in_turn else known
                if at in waits:
                    there = there | late(ops, [op], known, [read[k] for k in waits[at]], hold)
                known |= ops.compute(op, there)
                read |= {at: known[token[at]]} if at in token else {}
                for v in ops.reads(ops.members[op]):
                    before.pop(v, None)
                before |= dict.fromkeys(v for v in needed[at] if tells(program.avals[v]))
                at += 1
                continue
            end = next((k for k in range(at, len(steps)) if not steps[k][0]), len(steps))
            group = [op for _, op in steps[at:end]]
            local = dict(known) | late(ops, group, known, [known[v] for v in before], hold)
            before.clear()
            for k, op in enumerate(group, at):
                made = ops.compute(op, local)
                local |= made
                known |= made
                read |= {k: known[token[k]]} if k in token else {}
            at = end
        return [known[x] if isinstance(x, int) else array_of(x) for x in wanted]

    return run


def _follows(ops: Ops, inputs: Sequence[int]) -> list[int]:
    """The ops that follow from inputs and constants alone."""
    known, found = {*inputs, *ops.program.constants}, []
    for op, row in enumerate(ops.members):
        reads = ops.reads(row)
        if reads and known.issuperset(reads) and not ops.graph.ops[op].effect:
            known.update(ops.results[op])
            found.append(op)
    return found


def _needed(ops: Ops, steps: Sequence[tuple[bool, int]], outputs: Sequence[Any]) -> list[list[int]]:
    """The results of each step that are read before they are made again: to wait for another one, as of a branch that
    leaves all that its gradient reads, would keep it until then."""
    later = {x for x in outputs if isinstance(x, int)}
    found: list[list[int]] = []
    for _, op in reversed(steps):
        found.append([v for v in ops.results[op] if v in later])
        later.difference_update(ops.results[op])
        later.update(ops.reads(ops.members[op]))
    return found[::-1]


def late(
    ops: Ops, group: Sequence[int], known: Mapping[int, Any], tokens: Sequence[Any], hold: str
) -> dict[int, Any]:
    """Operands of ops that are done again, with the same contents, but not before the arrays ``tokens`` are there.

    ``barrier``: all of them through an optimization barrier (as `jax.checkpoint` does). ``select``: XLA takes
    barriers out before it schedules for CPUs, so of each op the smallest operand is chosen by a predicate that is
    always true and that XLA cannot know, read off the tokens. Gradients of weights are among these: XLA would put
    them off to the end, with everything they read."""
    program = ops.program
    made = {v for op in group for v in ops.results[op]}
    outside = [[v for v in ops.reads(ops.members[op]) if v not in made] for op in group]
    if hold == "barrier":
        names = list(dict.fromkeys(v for row in outside for v in row))
        held = jax.lax.optimization_barrier((*(known[v] for v in names), *tokens))
        return dict(zip(names, held[: len(names)], strict=True))
    if not tokens:
        return {}
    differ = frozenset[Any]().union(*(varying(jax.typeof(t)) for t in tokens))

    @functools.cache
    def always_for(axes: frozenset[Any]) -> Any:
        told = [t for t in tokens if varying(jax.typeof(t)) <= axes]
        return functools.reduce(operator.and_, map(_always, told))

    held_back: dict[int, Any] = {}
    for op, row in zip(group, outside, strict=True):
        if set(ops.reads(ops.members[op])) & made or any(v in held_back for v in row):
            continue  # is late by an operand that is
        may = [v for v in row if is_plain(a := program.avals[v]) or _key(a)]
        # What is one on all devices of a mesh is not chosen by what differs there.
        may = [v for v in may if differ <= varying(jax.typeof(known[v]))] or [
            v for v in may if any(varying(jax.typeof(t)) <= varying(jax.typeof(known[v])) for t in tokens)
        ]
        if may:
            of = {v: (_key(a := program.avals[v]), v in program.constants, bytes_of(a)) for v in may}
            v = min(may, key=of.__getitem__)
            held_back[v] = _chosen(known[v], always_for(varying(jax.typeof(known[v]))))
    return held_back


def _key(aval: Any) -> bool:
    """Whether a value is random keys of JAX's own type: bits are made of nothing else."""
    return is_array(aval) and bool(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key))


def _chosen(value: Any, always: Any) -> Any:
    """A value where ``always`` is true, and nothing where it is not."""
    if _key(jax.typeof(value)):
        data = _chosen(jax.random.key_data(value), always)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    which = always if is_divided(jax.typeof(value)) else jnp.broadcast_to(always, jnp.shape(value))
    return jax.lax.select_n(which, jnp.zeros_like(value), value)


def never(tokens: Sequence[Any]) -> Any:
    """False, once arrays are there, which XLA cannot know; None where none of them can tell. What is no array of the
    program, as a number that a loop begins with, XLA knows."""
    arrays = (t for t in tokens if isinstance(t, jax.core.Tracer))
    told = [t for t in arrays if tells(a := jax.typeof(t)) and not varying(a) and not is_divided(a)]
    return ~functools.reduce(operator.and_, map(_always, told)) if told else None


def _always(token: Any) -> Any:
    """True, once the token is there."""
    if is_divided(jax.typeof(token)):  # of which no slice of one element can be taken
        at = (jnp.zeros((1,), jnp.int32),) * token.ndim
        first = token.at[at].get(out_sharding=jax.sharding.PartitionSpec()).reshape(())
    else:
        first = jax.lax.slice(token, (0,) * token.ndim, (1,) * token.ndim).reshape(())
    first = jnp.real(first)
    return (first == first) | (first != first)
