"""What loops, branches and shard maps of a JAX program run inside: as programs, and bound again with others in their
place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from tightship.frontends.jax_function import never
from tightship.frontends.jax_in_place import with_carry
from tightship.frontends.jax_ops import FREE
from tightship.frontends.jax_program import (
    Equation,
    Program,
    inlined,
    is_array,
    is_divided,
    is_plain,
    varying,
)
from tightship.frontends.jaxpr import bytes_of

__all__ = [
    "ROWWISE",
    "SHARD",
    "Function",
    "appended",
    "bodies_of",
    "by_rows",
    "devices_of",
    "may_plan_inside",
    "mesh_size",
    "one_condition",
    "program_of",
    "scan_with",
    "shard_with",
    "with_functions",
]

Function = Callable[..., list[Any]]


def program_of(closed: Any) -> Program:
    """The program of a jaxpr, with what costs nothing inside of the loops that read it: outside, it would be an array
    for as long as they run."""
    made = inlined(closed)
    maker = {v: e for e in made.equations if e.name in FREE for v in e.outputs}
    equations = [_with_makers(e, maker, made.avals) if e.name == "scan" else e for e in made.equations]
    return one_condition(replace(made, equations=equations))


def one_condition(program: Program, start: int = 0) -> Program:
    """The program, from an equation on, with one ``cond`` in place of two of the backward pass that ask the same and
    of which the first makes all it does for the second: a checkpoint's forward pass and its gradient. What the one
    branch hands on to the other is then inside of it, to be planned there."""
    equations, gone, results = list(program.equations), set[int](), program.results()
    readers: dict[int, set[int]] = {}
    for i, e in enumerate(equations):
        for v in e.read:
            readers.setdefault(v, set()).add(i)
    for i, e in enumerate(equations):
        read = {k for v in e.outputs for k in readers.get(v, ())}
        if i < start or len(read) != 1 or results & set(e.outputs) or not _may_join(e) or e.made.effects:
            continue
        other = equations[k := read.pop()]
        if _may_join(other) and other.inputs[0] == e.inputs[0]:
            equations[k] = _with_first(e, other)
            gone.add(i)
    return (
        replace(program, equations=[e for i, e in enumerate(equations) if i not in gone]) if gone else program
    )


def _may_join(e: Equation) -> bool:
    plain = e.name == "cond" and e.instead is None and not e.once and not _has_effects(e)
    return plain and e.backward and isinstance(e.inputs[0], int)


def _has_effects(e: Equation) -> bool:
    """Whether an equation does anything but give results: that it names an axis of a mesh is no effect."""
    return any(type(x).__name__ != "NamedAxisEffect" for x in e.made.effects)


def _with_first(first: Equation, second: Equation) -> Equation:
    """A ``cond`` whose branches run those of another one before, on that one's operands."""
    made_before = {v: at for at, v in enumerate(first.outputs)}
    own = [k for k, x in enumerate(second.inputs) if k and x not in made_before]
    bodies = []
    for a, b in zip(bodies_of(first), bodies_of(second), strict=True):
        joined = Program(list(a.equations), list(a.avals), dict(a.constants), list(a.inputs), [])
        takes: list[Any] = []
        for k, (x, v) in enumerate(zip(second.inputs[1:], b.inputs, strict=True), 1):
            if k in own:
                joined.inputs.append(joined.value(b.avals[v]))
            takes.append(joined.inputs[-1] if k in own else a.outputs[made_before[x]])
        joined.outputs = appended(joined, b, takes)
        bodies.append(joined)
    operands = (*first.inputs, *(second.inputs[k] for k in own))
    functions = [lambda *values, b=b: b.call(values) for b in bodies]
    return replace(
        second, inputs=operands, bodies=tuple(bodies), instead=with_functions(second, functions),
        more=second.more + first.flops,
    )  # fmt: skip


def _with_makers(e: Equation, maker: Mapping[int, Equation], avals: Sequence[Any]) -> Equation:
    """A loop that makes by itself what each of its iterations reads as a whole, from less."""
    p, inputs, invars = e.made.params, list(e.inputs), list(e.made.invars)
    chains: dict[int, list[Equation]] = {}
    for j in range(p["num_consts"]):
        x = inputs[j]
        while isinstance(x, int) and x in maker and len(maker[x].inputs) == 1:
            source = maker[x].inputs[0]
            if bytes_of(avals[source] if isinstance(source, int) else source.aval) > bytes_of(avals[x]):
                break
            chains.setdefault(j, []).insert(0, maker[x])
            invars[j], x = maker[x].made.invars[0], source
        inputs[j] = x
    if not chains:
        return e

    jaxpr, equations, takes = p["jaxpr"].jaxpr, [], list(p["jaxpr"].jaxpr.invars)
    for j, chain in chains.items():
        at = takes[j] = core.Var(invars[j].aval)
        for k, link in enumerate(chain):
            last = k == len(chain) - 1
            (to,) = [jaxpr.invars[j]] if last else [core.Var(x.aval) for x in link.made.outvars]
            equations.append(link.made.replace(invars=[at], outvars=[to]))
            at = to
    inner = p["jaxpr"].replace(jaxpr=jaxpr.replace(invars=takes, eqns=[*equations, *jaxpr.eqns]))
    made = e.made.replace(params={**p, "jaxpr": inner}, invars=invars)
    return replace(e, made=made, inputs=tuple(inputs))


def bodies_of(e: Equation) -> tuple[Program, ...]:
    """The programs that an equation runs: the body of a loop, the branches of a condition, the shard of a map. None
    for an equation that is no such thing, or was rewritten already."""
    if e.bodies or e.instead is not None:
        return e.bodies
    p = e.made.params
    if e.name == "scan":
        return (with_carry(program_of(p["jaxpr"]), p["num_consts"]),)
    if e.name == "while":
        return (with_carry(program_of(p["body_jaxpr"]), p["body_nconsts"]),)
    if e.name == "cond":
        return tuple(map(program_of, p["branches"]))
    if e.name == "shard_map" and set(p) >= SHARD:
        return (program_of(p["jaxpr"]),)
    return ()


ROWWISE = frozenset({"select_and_scatter_add"})
"""Primitives that compute each row of a batch by itself, and may take many times the bytes of their results."""


def by_rows(e: Equation, room: int) -> Equation:
    """An equation of ``ROWWISE`` as a loop over as few parts of its batch as take ``room`` bytes."""
    window = (e.made.params[name][0] for name in ("window_dimensions", "window_strides", "padding"))
    rows = int(e.made.outvars[0].aval.shape[0])
    if tuple(window) != (1, 1, (0, 0)):
        return e
    moved = sum(bytes_of(x.aval) for x in (*e.made.invars, *e.made.outvars))
    many = [n for n in range(1, rows + 1) if rows % n == 0]
    parts = next((n for n in many if e.inner + moved <= n * room), rows)

    def instead(values: Sequence[Any]) -> list[Any]:
        split = [x.reshape(parts, rows // parts, *x.shape[1:]) for x in values]
        made = jax.lax.map(lambda xs: e.bind(xs)[0], tuple(split))
        return [made.reshape(rows, *made.shape[2:])]

    return replace(e, instead=instead, inner=(e.inner + moved) // parts) if parts > 1 else e


def devices_of(e: Equation) -> int:
    """How many devices run the body of an equation, each on its part of the arrays."""
    if e.name != "shard_map":
        return 1
    return mesh_size(e.made.params["mesh"], e.made.params.get("newly_manual_axes", ()))


def with_functions(e: Equation, functions: Sequence[Function]) -> Callable[[Sequence[Any]], list[Any]]:
    """What binds an equation with other functions in place of its bodies."""
    p = e.made.params

    def bind(values: Sequence[Any]) -> list[Any]:
        if e.name == "scan":
            gives = p["jaxpr"].out_avals[p["num_carry"] :]
            return scan_with(p, functions[0], values, p["num_consts"], p["num_carry"], gives)
        if e.name == "cond":
            branches = [lambda *xs, f=f: tuple(f(*xs)) for f in functions]
            return list(jax.lax.switch(values[0], branches, *values[1:]))
        if e.name == "while":
            told, begins = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
            goes_on = jax.extend.core.jaxpr_as_fun(p["cond_jaxpr"])
            return list(
                jax.lax.while_loop(
                    lambda c: goes_on(*values[:told], *c)[0],
                    lambda c: tuple(functions[0](*values[told:begins], *c)),
                    tuple(values[begins:]),
                )
            )
        return shard_with(p, functions[0], values, p["in_specs"], p["out_specs"])

    return bind


def scan_with(
    p: Any, body: Function, values: Sequence[Any], consts: int, carry: int, gives: Sequence[Any]
) -> list[Any]:
    """A scan with parameters ``p`` and another body, which ``gives`` results of these avals beside what it carries,
    on its inputs. The arrays that it stacks up begin as zeros of its own: XLA has equal zeros once for all loops of
    a program, there from the first of them to the last."""
    count, back, zero = p["length"], p["reverse"], never(values)
    own = [k for k, a in enumerate(gives) if zero is not None and _may_be_zeros_of(zero, a)]

    def step(state: Any, x: Sequence[Any]) -> Any:
        at, c, arrays = state
        outs = body(*values[:consts], *c, *x)
        made = dict(enumerate(outs[carry:]))
        arrays = [_with_row(a, made.pop(k), at) for a, k in zip(arrays, own, strict=True)]
        return (at + (-1 if back else 1), tuple(outs[:carry]), arrays), made

    arrays = [jnp.broadcast_to(zero.astype(gives[k].dtype), (count, *gives[k].shape)) for k in own]
    begins = (jnp.int32(count - 1 if back else 0), tuple(values[consts : consts + carry]), arrays)
    rows = tuple(values[consts + carry :])
    (_, ends, arrays), stacked = jax.lax.scan(step, begins, rows, count, back, p["unroll"])
    stacked |= zip(own, arrays, strict=True)
    return [*ends, *(stacked[k] for k in range(len(gives)))]


def _may_be_zeros_of(zero: Any, aval: Any) -> bool:
    """Whether rows like ``aval`` may be written into an array of a plain scalar of the device's memory."""
    space = [getattr(x, "memory_space", None) for x in (jax.typeof(zero), aval)]
    return is_plain(aval) and not varying(aval) and not is_divided(aval) and space[0] == space[1]


def _with_row(array: Any, row: Any, at: Any) -> Any:
    return jax.lax.dynamic_update_index_in_dim(array, row, at, 0, allow_negative_indices=False)


SHARD = {"jaxpr", "mesh", "in_specs", "out_specs", "check_vma", "newly_manual_axes"}


def shard_with(p: Any, body: Function, values: Sequence[Any], takes: Any, gives: Any) -> list[Any]:
    mapped = jax.shard_map(
        lambda *xs: tuple(body(*xs)),
        mesh=p["mesh"],
        in_specs=tuple(takes),
        out_specs=tuple(gives),
        axis_names=set(p["newly_manual_axes"]),
        check_vma=p["check_vma"],
    )
    return list(mapped(*values))


def mesh_size(mesh: Any, axes: Any) -> int:
    found = 1
    for name in axes:
        found *= int(dict(mesh.shape)[name])
    return found


def may_plan_inside(e: Equation) -> bool:
    """Whether an equation may be bound again with other bodies: with what it reads, where this is arrays. References
    (`jax.new_ref`) are closed over, which loops take as they take constants. What the bodies do but give results
    (prints, callbacks) runs once in each, in its order."""
    return e.name in ("scan", "while") or all(is_array(x.aval) for x in e.made.invars)


def appended(to: Program, program: Program, inputs: Sequence[Any]) -> list[Any]:
    """The equations of another program on values ``inputs``; its outputs."""
    names = dict(zip(program.inputs, inputs, strict=True))
    for v, content in program.constants.items():
        names[v] = to.constant(program.avals[v], content)

    def name(x: Any) -> Any:
        if not isinstance(x, int):
            return x
        if x not in names:
            names[x] = to.value(program.avals[x])
        return names[x]

    for e in program.equations:
        to.equations.append(
            replace(e, inputs=tuple(map(name, e.inputs)), outputs=tuple(map(name, e.outputs)))
        )
    return [name(x) for x in program.outputs]
