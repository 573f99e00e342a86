"""What passes between two loops, or two shard maps, of a JAX program.

A loop of the forward pass hands the loop of the backward pass one array for every value that its body saves, with a
row for each iteration; a shard map hands on what its devices save. Any set of values of the body may be handed
on instead, from which, with what the body began with, the rest is made again inside the backward one: what
`jax.checkpoint` around the body does for one set. So the two bodies are one program with a cut in it (`Pair`),
planned as any program is, and then written out again as two: `handed_on`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax

from tightship.cached import cached_property
from tightship.frontends.jax_function import on_values
from tightship.frontends.jax_ops import Ops
from tightship.frontends.jax_program import Equation, Program, merged, varying
from tightship.frontends.jaxpr import bytes_of
from tightship.graph import aligned
from tightship.integrations.jax_bodies import (
    SHARD,
    Function,
    appended,
    bodies_of,
    devices_of,
    may_plan_inside,
    mesh_size,
    one_condition,
    scan_with,
    shard_with,
)

__all__ = ["Pair", "PlannedPair", "crossing_bytes", "handed_on", "pairs_of"]


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
            return scan_with(p, halves.first, values, consts, carry, [*kept, *halves.crosses])

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
            return scan_with(q, body, [*whole, *mine, *rows], len(wholes) + told, around, gives)

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
        many = mesh_size(self.forward.made.params["mesh"], self._axes(aval))
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

            return shard_with(
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
            return shard_with(q, body, values, takes, q["out_specs"])

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

    first: Function
    second: Function
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
    known = e.name == "scan" or (e.name == "shard_map" and set(e.made.params) >= SHARD)
    return known and e.instead is None and not e.once and may_plan_inside(e)


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
    outputs = appended(joined, behind, takes)
    passed = tuple((at, to) for to, (at, _) in taken.items())
    gone = {at for at, _ in passed}
    kept = [x for at, x in enumerate(body.outputs) if at not in gone]
    cut = len(joined.equations) - len(behind.equations)
    each_time = {body.inputs[j] for j in kind.each_time()} | {takes[k] for k in kind.arrives()}
    outside = [*zip(second.inputs, takes, strict=True), *zip(first.inputs, body.inputs, strict=True)]
    there = [(x, v) for x, v in outside if v not in each_time]
    whole = merged(replace(joined, outputs=[*kept, *outputs]), program.equations[:i], there)
    whole = one_condition(whole, cut)
    return Pair(program, i, k, passed, whole, cut, tuple(takes))


def _alike(a: Any, b: Any) -> bool:
    return bool(a.shape == b.shape and a.dtype == b.dtype and varying(a) == varying(b))


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
