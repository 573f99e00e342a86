"""Loops, branches and shard maps of a JAX program: what they run inside, and what passes between two of them.

A loop of the forward pass hands the loop of the backward pass one array for every value that its body saves, with a
row for each iteration; a shard map hands on what its devices save. Any set of values of the body may be handed
on instead, from which, with what the body began with, the rest is made again inside the backward one: what
`jax.checkpoint` around the body does for one set. So the two bodies are one program with a cut in it (`Pair`),
planned as any program is, and then written out again as two: `handed_on`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend import core

from tightship.cached import cached_property
from tightship.frontends.jax_function import never, on_values
from tightship.frontends.jax_in_place import with_carry
from tightship.frontends.jax_ops import FREE, Ops
from tightship.frontends.jax_program import Equation, Program, inlined, is_divided, is_plain, merged, varying
from tightship.frontends.jaxpr import bytes_of
from tightship.graph import aligned

__all__ = [
    "ROWWISE",
    "Pair",
    "PlannedPair",
    "bodies_of",
    "by_rows",
    "crossing_bytes",
    "devices_of",
    "handed_on",
    "has_effects",
    "pairs_of",
    "program_of",
    "with_functions",
]

_Function = Callable[..., list[Any]]


# --- what an equation runs inside ---


def program_of(closed: Any) -> Program:
    """The program of a jaxpr, with what costs nothing inside of the loops that read it: outside, it would be an array
    for as long as they run."""
    made = inlined(closed)
    maker = {v: e for e in made.equations if e.name in FREE for v in e.outputs}
    equations = [_with_makers(e, maker, made.avals) if e.name == "scan" else e for e in made.equations]
    return _one_condition(replace(made, equations=equations))


def _one_condition(program: Program, start: int = 0) -> Program:
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
    plain = e.name == "cond" and e.instead is None and not e.once and not has_effects(e)
    return plain and e.backward and isinstance(e.inputs[0], int)


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
        joined.outputs = _append(joined, b, takes)
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
    if e.name == "shard_map" and set(p) >= _SHARD:
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
    return _size(e.made.params["mesh"], e.made.params.get("newly_manual_axes", ()))


def with_functions(e: Equation, functions: Sequence[_Function]) -> Callable[[Sequence[Any]], list[Any]]:
    """What binds an equation with other functions in place of its bodies."""
    p = e.made.params

    def bind(values: Sequence[Any]) -> list[Any]:
        if e.name == "scan":
            gives = p["jaxpr"].out_avals[p["num_carry"] :]
            return _scan(p, functions[0], values, p["num_consts"], p["num_carry"], gives)
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
        return _shard(p, functions[0], values, p["in_specs"], p["out_specs"])

    return bind


def _scan(
    p: Any, body: _Function, values: Sequence[Any], consts: int, carry: int, gives: Sequence[Any]
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


_SHARD = {"jaxpr", "mesh", "in_specs", "out_specs", "check_vma", "newly_manual_axes"}


def _shard(p: Any, body: _Function, values: Sequence[Any], takes: Any, gives: Any) -> list[Any]:
    mapped = jax.shard_map(
        lambda *xs: tuple(body(*xs)),
        mesh=p["mesh"],
        in_specs=tuple(takes),
        out_specs=tuple(gives),
        axis_names=set(p["newly_manual_axes"]),
        check_vma=p["check_vma"],
    )
    return list(mapped(*values))


def _size(mesh: Any, axes: Any) -> int:
    found = 1
    for name in axes:
        found *= int(dict(mesh.shape)[name])
    return found


# --- two of them, one after the other ---


class _Kind(Protocol):
    """How the bodies of two equations lie to each other."""

    def same(self, j: int, k: int) -> bool:
        """Whether the bodies see the same where the first's input ``j`` and the second's ``k`` are one value."""

    def passes(self, at: int, to: int) -> bool:
        """Whether the second body's input ``to`` is what the first body has as its result ``at``."""

    def each_time(self) -> range:
        """Inputs of the first that are other ones each time its body runs, and are gone afterwards."""

    def arrives(self) -> range:
        """Inputs of the second that are made between the two."""

    def outside(self, aval: Any) -> Any:
        """The array outside for a value of the first body that is handed on."""


@dataclass(frozen=True)
class _Loops:
    forward: Equation
    backward: Equation

    @property
    def _counts(self) -> tuple[int, int, int, int]:
        p, q = self.forward.made.params, self.backward.made.params
        return p["num_consts"], p["num_carry"], q["num_consts"], q["num_carry"]

    def same(self, j: int, k: int) -> bool:
        consts, carry, told, around = self._counts
        return (j < consts and k < told) or (j >= consts + carry and k >= told + around)

    def passes(self, at: int, to: int) -> bool:
        _, carry, told, around = self._counts
        return at >= carry and to >= told + around

    def each_time(self) -> range:
        consts, carry, _, _ = self._counts
        return range(consts, consts + carry)

    def arrives(self) -> range:
        _, _, told, around = self._counts
        return range(told, told + around)

    def outside(self, aval: Any) -> Any:
        return _Array((self.forward.made.params["length"], *aval.shape), aval.dtype, varying(aval))

    def bind(self, halves: Halves) -> tuple[Callable[..., list[Any]], Callable[..., list[Any]]]:
        consts, carry, told, around = self._counts
        p, q = self.forward.made.params, self.backward.made.params
        wholes = [j for j in halves.needs if j < consts]
        place = {j: n for n, j in enumerate(halves.needs)}
        old = len(halves.stays)
        kept = [p["jaxpr"].out_avals[k] for k in halves.keeps if k >= carry]

        def first(values: Sequence[Any]) -> list[Any]:
            return _scan(p, halves.first, values, consts, carry, [*kept, *halves.crosses])

        def second(values: Sequence[Any]) -> list[Any]:
            mine, more = values[:old], values[old:]
            whole = [more[place[j]] for j in wholes]
            rows = [x for n, x in enumerate(more) if n >= len(place) or halves.needs[n] not in wholes]

            def body(*xs: Any) -> list[Any]:
                given, slices = xs[len(wholes) : len(wholes) + old], list(xs[len(wholes) + old :])
                known = dict(zip(wholes, xs[: len(wholes)], strict=True))
                extra = [known[j] if j in known else slices.pop(0) for j in halves.needs]
                return halves.second(*given, *extra, *slices)

            gives = q["jaxpr"].out_avals[around:]
            return _scan(q, body, [*whole, *mine, *rows], len(wholes) + told, around, gives)

        return first, second


@dataclass(frozen=True)
class _Shards:
    forward: Equation
    backward: Equation

    def same(self, j: int, k: int) -> bool:
        p, q = self.forward.made.params, self.backward.made.params
        return bool(p["in_specs"][j] == q["in_specs"][k])

    def passes(self, at: int, to: int) -> bool:
        p, q = self.forward.made.params, self.backward.made.params
        return bool(p["out_specs"][at] == q["in_specs"][to])

    def each_time(self) -> range:
        return range(0)

    def arrives(self) -> range:
        return range(0)

    def _axes(self, aval: Any) -> tuple[Any, ...]:
        p = self.forward.made.params
        axes = p["newly_manual_axes"]
        differs = varying(aval) if p["check_vma"] else axes
        return tuple(n for n in p["mesh"].axis_names if n in axes and n in differs)

    def outside(self, aval: Any) -> Any:
        shape = tuple(aval.shape) or (1,)
        many = _size(self.forward.made.params["mesh"], self._axes(aval))
        return _Array((shape[0] * many, *shape[1:]), aval.dtype, frozenset())

    def bind(self, halves: Halves) -> tuple[Callable[..., list[Any]], Callable[..., list[Any]]]:
        p, q = self.forward.made.params, self.backward.made.params
        spec = jax.sharding.PartitionSpec
        crosses = [spec(axes) if (axes := self._axes(a)) else spec() for a in halves.crosses]
        scalars = [not a.shape for a in halves.crosses]
        before = len(halves.keeps)

        def first(values: Sequence[Any]) -> list[Any]:
            def body(*xs: Any) -> list[Any]:
                outs = halves.first(*xs)
                told = zip(outs[before:], scalars, strict=True)
                return [*outs[:before], *(x.reshape(1) if flat else x for x, flat in told)]

            return _shard(
                p, body, values, p["in_specs"], [*(p["out_specs"][k] for k in halves.keeps), *crosses]
            )

        def second(values: Sequence[Any]) -> list[Any]:
            at = len(values) - len(scalars)

            def body(*xs: Any) -> list[Any]:
                told = zip(xs[at:], scalars, strict=True)
                return halves.second(*xs[:at], *(x.reshape(()) if flat else x for x, flat in told))

            takes = [
                *(q["in_specs"][k] for k in halves.stays),
                *(p["in_specs"][j] for j in halves.needs),
                *crosses,
            ]
            return _shard(q, body, values, takes, q["out_specs"])

        return first, second


@dataclass(frozen=True)
class _Array:
    """What is known of a value that is handed on: ``vma`` as JAX's avals have it."""

    shape: tuple[int, ...]
    dtype: Any
    vma: frozenset[Any]


_KINDS: dict[str, Any] = {"scan": _Loops, "shard_map": _Shards}


@dataclass(frozen=True)
class Halves:
    """Both bodies of a pair, written again: ``first`` gives the results ``keeps`` of the first equation, then values
    with ``crosses`` (avals); ``second`` takes the inputs ``stays`` of the second equation, the inputs ``needs`` of
    the first, and what crosses."""

    first: _Function
    second: _Function
    keeps: tuple[int, ...]
    stays: tuple[int, ...]
    needs: tuple[int, ...]
    crosses: tuple[Any, ...]


@dataclass(frozen=True)
class Pair:
    """Equations ``forward`` and ``backward`` of a program, of which the second reads what only the first makes for
    it: ``passed``, positions among the first's results and the second's inputs. ``joined``: the equations of the
    first's body, ``cut`` of them, then the second's. ``takes``: values of ``joined`` for the second's inputs."""

    program: Program
    forward: int
    backward: int
    passed: tuple[tuple[int, int], ...]
    joined: Program
    cut: int
    takes: tuple[int, ...]

    @property
    def first(self) -> Equation:
        return self.program.equations[self.forward]

    @property
    def second(self) -> Equation:
        return self.program.equations[self.backward]

    @cached_property
    def kind(self) -> Any:
        return _KINDS[self.first.name](self.first, self.second)

    @property
    def length(self) -> int:
        """How many rows of each value are handed on."""
        return int(self.first.made.params["length"]) if self.first.name == "scan" else 1

    @property
    def inputs(self) -> list[int]:
        """Values of ``joined`` that the first body takes."""
        return self.joined.inputs[: len(self.first.inputs)]

    @property
    def begins(self) -> frozenset[int]:
        """Of these, those that are gone after it."""
        return frozenset(self.inputs[j] for j in self.kind.each_time())

    @property
    def arrives(self) -> frozenset[int]:
        """Values of ``joined`` that are made between the two bodies."""
        return frozenset(self.takes[k] for k in self.kind.arrives())

    @cached_property
    def keeps(self) -> tuple[int, ...]:
        """The results of the first that are not for the second alone."""
        gone = {at for at, _ in self.passed}
        return tuple(at for at in range(len(self.first.outputs)) if at not in gone)


def crossing_bytes(program: Program, cut: int, begins: frozenset[int]) -> int:
    """Bytes that equations from ``cut`` on read of those before it and of ``begins``, where nothing is made again."""
    made = {v for e in program.equations[:cut] for v in e.outputs} | begins
    read = {v for e in program.equations[cut:] for v in e.read} | program.results()
    return sum(aligned(bytes_of(program.avals[v])) for v in read & made)


def pairs_of(program: Program) -> tuple[Pair, ...]:
    """The pairs of loops and of shard maps of a program."""
    results = program.results()
    readers: dict[int, set[int]] = {}
    for i, e in enumerate(program.equations):
        for v in e.read:
            readers.setdefault(v, set()).add(i)
    found: list[Pair] = []
    taken: set[int] = set()
    for i, e in enumerate(program.equations):
        if i in taken or not _pairs(e):
            continue
        passed: dict[int, list[tuple[int, int]]] = {}
        for at, v in enumerate(e.outputs):
            k = next(iter(readers.get(v, ())), None)
            if v in results or k is None or len(readers[v]) > 1 or k in taken:
                continue
            other = program.equations[k]
            if _fit(e, other) and other.inputs.count(v) == 1:
                passed.setdefault(k, []).append((at, other.inputs.index(v)))
        if passed:
            k = max(passed, key=lambda k: program.nbytes(e.outputs[at] for at, _ in passed[k]))
            pair = _pair(program, i, k, passed[k])
            if pair is not None:
                taken |= {i, k}
                found.append(pair)
    return tuple(found)


def _pairs(e: Equation) -> bool:
    known = e.name == "scan" or (e.name == "shard_map" and set(e.made.params) >= _SHARD)
    return known and e.instead is None and not e.once and not has_effects(e)


def has_effects(e: Equation) -> bool:
    """Whether an equation does anything but give results: that it names an axis of a mesh is no effect."""
    return any(type(x).__name__ != "NamedAxisEffect" for x in e.made.effects)


def _fit(e: Equation, other: Equation) -> bool:
    if other.name != e.name or not _pairs(other):
        return False
    p, q = e.made.params, other.made.params
    if e.name == "scan":
        return bool(p["length"] == q["length"])
    names = ("mesh", "newly_manual_axes", "check_vma")
    return all(p[n] == q[n] for n in names)


def _pair(program: Program, i: int, k: int, rows: Sequence[tuple[int, int]]) -> Pair | None:
    first, second = program.equations[i], program.equations[k]
    kind = _KINDS[first.name](first, second)
    (body,), (behind,) = bodies_of(first), bodies_of(second)
    joined = Program(
        list(body.equations), list(body.avals), dict(body.constants), list(body.inputs), list(body.outputs)
    )
    taken = {}
    for at, to in rows:
        v = body.outputs[at]
        if (
            isinstance(v, int)
            and kind.passes(at, to)
            and _alike(body.avals[v], behind.avals[behind.inputs[to]])
        ):
            taken[to] = (at, v)
    if not taken:
        return None
    takes = []
    for to, v in enumerate(behind.inputs):
        x = second.inputs[to]
        shared = [j for j, y in enumerate(first.inputs) if isinstance(x, int) and y == x and kind.same(j, to)]
        if to in taken:
            takes.append(taken[to][1])
        elif shared:
            takes.append(body.inputs[shared[0]])
        else:
            takes.append(joined.value(behind.avals[v]))
            joined.inputs.append(takes[-1])
    outputs = _append(joined, behind, takes)
    passed = tuple((at, to) for to, (at, _) in taken.items())
    gone = {at for at, _ in passed}
    kept = [x for at, x in enumerate(body.outputs) if at not in gone]
    cut = len(joined.equations) - len(behind.equations)
    each_time = {body.inputs[j] for j in kind.each_time()} | {takes[k] for k in kind.arrives()}
    outside = [*zip(second.inputs, takes, strict=True), *zip(first.inputs, body.inputs, strict=True)]
    there = [(x, v) for x, v in outside if v not in each_time]
    whole = merged(replace(joined, outputs=[*kept, *outputs]), program.equations[:i], there)
    whole = _one_condition(whole, cut)
    return Pair(program, i, k, passed, whole, cut, tuple(takes))


def _alike(a: Any, b: Any) -> bool:
    return bool(a.shape == b.shape and a.dtype == b.dtype and varying(a) == varying(b))


def _append(to: Program, program: Program, inputs: Sequence[Any]) -> list[Any]:
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


@dataclass(frozen=True)
class PlannedPair:
    """How the two bodies of a pair run: ops of its joined program, before the cut and after it, each with whether it
    has run before in that body; bytes that each takes while it runs. ``inside``: how many operations run again inside
    of what these run."""

    ops: Ops
    first: tuple[tuple[bool, int], ...]
    second: tuple[tuple[bool, int], ...]
    bytes_first: int
    bytes_second: int
    inside: int = 0


def handed_on(program: Program, chosen: Sequence[tuple[Pair, PlannedPair]], hold: str) -> Program:
    """The program with each pair as planned. A loop of the forward pass may run again as a whole, shortly before that
    of the backward pass reads what it hands on: of loops one behind another (layers of an RNN) what one hands on is
    there at a time. What devices do together is not done again."""
    made = replace(program, equations=list(program.equations), avals=list(program.avals))
    for pair, planned in chosen:
        _hand_on(made, pair, planned, hold)
    return made


def _hand_on(made: Program, pair: Pair, planned: PlannedPair, hold: str) -> None:
    ops, first, second = planned.ops, pair.first, pair.second
    body, given = ops.program, {v: j for j, v in reversed(list(enumerate(pair.inputs)))}
    begins = pair.begins
    there = set(body.constants)
    gone = {to for _, to in pair.passed}
    stays = tuple(k for k in range(len(second.inputs)) if k not in gone)
    there |= {pair.takes[k] for k in stays}
    needed: dict[int, None] = {}
    for _, op in planned.second:
        needed |= dict.fromkeys(v for v in ops.reads(ops.members[op]) if v not in there)
        there |= set(ops.results[op])
    count = len(pair.keeps)
    outputs = body.outputs[count:]
    needed |= dict.fromkeys(x for x in outputs if isinstance(x, int) and x not in there)
    crosses = [v for v in needed if v not in given or v in begins]
    needs = tuple(given[v] for v in needed if v in given and v not in begins)
    halves = Halves(
        on_values(ops, _live(ops, planned.first, [*body.outputs[:count], *crosses]), hold, pair.inputs,
                  [*body.outputs[:count], *crosses]),
        on_values(ops, planned.second, hold,
                  [*(pair.takes[k] for k in stays), *(pair.inputs[j] for j in needs), *crosses], outputs),
        pair.keeps, stays, needs, tuple(body.avals[v] for v in crosses),
    )  # fmt: skip
    run_first, run_second = pair.kind.bind(halves)
    stacks = tuple(made.value(pair.kind.outside(body.avals[v])) for v in crosses)
    n, many = pair.length, devices_of(first)
    # A loop's rows are copies; what a map's devices hand on is the array itself.
    shared = 0 if first.name == "scan" else body.nbytes(crosses)
    flops = [
        n * sum(ops.graph.ops[op].flops for _, op in steps)
        for steps in (_live(ops, planned.first, [*body.outputs[:count], *crosses]), planned.second)
    ]
    made.equations[pair.forward] = replace(
        first, outputs=(*(first.outputs[k] for k in pair.keeps), *stacks), instead=run_first,
        once=first.name != "scan" or bool(first.made.effects),
        inner=max(0, planned.bytes_first - shared) * many, more=flops[0] - replace(first, more=0).flops,
    )  # fmt: skip
    made.equations[pair.backward] = replace(
        second,
        inputs=(*(second.inputs[k] for k in stays), *(first.inputs[j] for j in needs), *stacks),
        instead=run_second, once=True, inner=max(0, planned.bytes_second - shared) * many,
        more=flops[1] - replace(second, more=0).flops,
    )  # fmt: skip


def _live(ops: Ops, steps: Sequence[tuple[bool, int]], outputs: Sequence[Any]) -> list[tuple[bool, int]]:
    """The steps that ``outputs`` or an effect need."""
    wanted = {x for x in outputs if isinstance(x, int)}
    kept = []
    for again, op in reversed(steps):
        effect = bool(ops.program.equations[ops.members[op][-1]].made.effects)
        if effect or wanted & set(ops.results[op]):
            kept.append((again, op))
            wanted |= set(ops.reads(ops.members[op]))
    return kept[::-1]
