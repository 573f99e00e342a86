"""A traced JAX function as equations in a row, as a Graph of what XLA would fuse, and as a function again.

Calls (`jit`, `custom_jvp`, `closed_call`, checkpoints) are inlined; loops, branches and shard maps are one
equation each. What a checkpoint of a backward pass makes again is merged with the first time (`merged`), so that a
plan decides anew. An op of the graph is what XLA's fusion would make one kernel of: an equation, the element-wise
ones that only it reads, and the shapes and broadcasts it reads, which cost nothing. Times are modeled: floating-point
operations of contractions and convolutions, bytes of all else.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util

from tightship.cached import cached_property
from tightship.frontends.builder import GraphBuilder
from tightship.frontends.jaxpr import BYTES, FLOPS, bytes_of, called, flops_of, kind_of, runs_once, source_of
from tightship.graph import Graph, Op

__all__ = [
    "FREE",
    "Equation",
    "Ops",
    "Program",
    "array_of",
    "inlined",
    "is_divided",
    "is_plain",
    "late",
    "merged",
    "never",
    "on_values",
    "varying",
    "with_carry",
]

_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "remat2",
    "checkpoint",
    "remat",
)
_ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy "
    "cos cosh div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p "
    "logistic lt max min mul ne neg nextafter not or pow real imag rem round rsqrt select_n shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor".split()
)
FREE = frozenset("broadcast_in_dim expand_dims iota reshape squeeze stop_gradient".split())
"""Made again by whoever reads them: XLA takes them for views, or puts them into each fusion."""


@dataclass(frozen=True)
class Equation:
    """A primitive, bound to values of the program: numbers, or literals as JAX has them. ``instead``: what computes
    it where it was rewritten, with ``more`` floating-point operations than ``made`` says. ``once``: it is not run
    again, however much that would save. ``remat``: a checkpoint of the backward pass has it. ``inner``: bytes that it
    takes while it runs, beyond its results. ``bodies``: what it runs inside where that is not ``made``'s."""

    made: Any
    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]
    backward: bool
    instead: Callable[[Sequence[Any]], list[Any]] | None = None
    more: int = 0
    once: bool = False
    remat: bool = False
    inner: int = 0
    bodies: tuple[Program, ...] = ()

    @property
    def name(self) -> str:
        return str(self.made.primitive.name)

    @property
    def read(self) -> tuple[int, ...]:
        return tuple(x for x in self.inputs if isinstance(x, int))

    @property
    def flops(self) -> int:
        return flops_of(self.made) + self.more

    def bind(self, values: Sequence[Any]) -> list[Any]:
        """The results on ``values``, one for each input."""
        if self.instead is not None:
            return self.instead(values)
        e = self.made
        params = e.primitive.get_bind_params(e.params)
        functions, params = params if isinstance(params, tuple) else ((), params)
        stack = source_info_util.current_name_stack() + e.source_info.name_stack
        with source_info_util.user_context(e.source_info.traceback, name_stack=stack), e.ctx.manager:
            out = e.primitive.bind(*functions, *values, **params)
        return list(out) if e.primitive.multiple_results else [out]


@dataclass
class Program:
    """``equations`` in order over values 0, 1, … with ``avals``; ``constants`` with their contents, ``inputs``,
    ``outputs`` (numbers or literals). ``in_place``: results that are written over inputs, so that they take no bytes.
    """

    equations: list[Equation] = field(default_factory=list)
    avals: list[Any] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    in_place: frozenset[int] = frozenset()

    def value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def nbytes(self, values: Iterable[int]) -> int:
        return sum(bytes_of(self.avals[v]) for v in values)

    def results(self) -> set[int]:
        return {x for x in self.outputs if isinstance(x, int)}

    def call(self, args: Sequence[Any]) -> list[Any]:
        """The outputs for ``args``: every equation, in order."""
        known = dict(self.constants) | dict(zip(self.inputs, args, strict=True))
        for e in self.equations:
            known |= zip(
                e.outputs, e.bind([known[x] if isinstance(x, int) else x.val for x in e.inputs]), strict=True
            )
        return [known[x] if isinstance(x, int) else array_of(x) for x in self.outputs]

    def constant(self, aval: Any, content: Any) -> int:
        """The value of a constant, one for each array."""
        held = next((v for v, x in self.constants.items() if x is content), None)
        if held is None:
            held = self.value(aval)
            self.constants[held] = content
        return held

    def run(
        self,
        jaxpr: Any,
        constants: Sequence[Any],
        args: Sequence[Any],
        backward: bool = False,
        remat: bool = False,
    ) -> list[Any]:
        """The equations of ``jaxpr`` on values of this program; its outputs."""
        known: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        for var, content in zip(jaxpr.constvars, constants, strict=True):
            known[var] = self.constant(var.aval, content)

        def read(x: Any) -> Any:
            return x if isinstance(x, core.Literal) else known[x]

        for e in jaxpr.eqns:
            given = tuple(map(read, e.invars))
            behind = backward or "transpose" in str(e.source_info.name_stack)
            inner, given = _inlines(e, given)
            if inner is not None:
                again = remat or bool(e.params.get("differentiated"))
                open_, closed_over = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
                made = self.run(open_, closed_over, given, behind or again, again)
            else:
                made = [self.value(x.aval) for x in e.outvars]
                self.equations.append(Equation(e, given, tuple(made), behind, remat=remat))
            known |= zip(e.outvars, made, strict=True)
        return [read(x) for x in jaxpr.outvars]


def varying(aval: Any) -> frozenset[Any]:
    """The axes of a mesh along which a value differs from device to device."""
    known: Any = getattr(aval, "vma", None)
    if known is None:
        known = getattr(getattr(aval, "manual_axis_type", None), "varying", ())
    return frozenset(known)


def array_of(literal: Any) -> Any:
    """A literal as an array of its own type."""
    return jnp.asarray(literal.val, literal.aval.dtype)


def inlined(closed: Any) -> Program:
    """The program of a jaxpr, such as ``jax.jit(f).trace(…).jaxpr``, its checkpoints merged."""
    jaxpr, constants = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
    made = Program()
    made.inputs = [made.value(x.aval) for x in jaxpr.invars]
    made.outputs = made.run(jaxpr, constants, made.inputs)
    return merged(made)


def merged(
    program: Program, around: Iterable[Equation] = (), there: Sequence[tuple[Any, int]] = ()
) -> Program:
    """The program without equations of checkpoints whose results another one has made before: what the user's
    checkpoints drop and make again is there once, and which of it is kept is the planner's to say. ``around``:
    equations outside of it; ``there``: pairs of a value outside or a literal and the program's own for it."""
    names = {e.name for e in program.equations if e.remat and not e.made.effects}
    if not names:
        return program
    numbers = _Numbers(there)
    for e in around:
        numbers.of(e, names, outside=True)
    same: dict[int, int] = {}
    equations = []
    for e in program.equations:
        found = numbers.of(e, names)
        if e.remat and found is not None:
            if all(n in numbers.value for n in found):
                same |= zip(e.outputs, (numbers.value[n] for n in found), strict=True)
                continue
            numbers.value |= zip(found, e.outputs, strict=True)
        equations.append(
            replace(e, inputs=tuple(same.get(x, x) if isinstance(x, int) else x for x in e.inputs))
        )
    outputs = [same.get(x, x) if isinstance(x, int) else x for x in program.outputs]
    needed = {x for x in outputs if isinstance(x, int)}
    live = []
    for e in reversed(equations):
        if not e.remat or e.made.effects or not needed.isdisjoint(e.outputs):
            live.append(e)
            needed.update(e.read)
    return replace(program, equations=live[::-1], outputs=outputs)


class _Numbers:
    """Value numbering: values that are computed alike have one number. ``value``: a value of the program for a
    number; numbers of values outside are negative, literals are their own."""

    def __init__(self, there: Sequence[tuple[Any, int]]) -> None:
        self.there = {x: v for x, v in there if isinstance(x, int)}
        self.number: dict[int, Any] = {v: _operand(x) for x, v in there if not isinstance(x, int)}
        self.value: dict[Any, int] = {n: v for v, n in self.number.items()}
        self.seen: dict[Hashable, tuple[Any, ...]] = {}

    def _inside(self, v: int) -> Any:
        if v not in self.number:
            self.number[v] = v
            self.value[v] = v
        return self.number[v]

    def of(self, e: Equation, names: set[str], *, outside: bool = False) -> tuple[Any, ...] | None:
        """The numbers of an equation's results, if another one has them already."""
        number = (lambda v: self.there.get(v, -1 - v)) if outside else self._inside
        if e.name not in names or e.made.effects or e.instead is not None:
            return None
        inputs = tuple(number(x) if isinstance(x, int) else _operand(x) for x in e.inputs)
        key = (e.name, inputs, *_parameters(e.made.params))
        if key in self.seen and not outside:
            self.number |= zip(e.outputs, self.seen[key], strict=True)
            return self.seen[key]
        self.seen.setdefault(key, tuple(map(number, e.outputs)))
        return None


def _operand(literal: Any) -> Hashable:
    return str(literal.aval), np.asarray(literal.val).tobytes()


def _parameters(params: Mapping[str, Any]) -> Iterator[Hashable]:
    """Parameters of an equation, equal where they mean the same: jaxprs by their text and their constants."""
    for name in sorted(params):
        held = params[name]
        rows = held if isinstance(held, (tuple, list)) else (held,)
        if any(hasattr(getattr(x, "jaxpr", x), "eqns") for x in rows):
            yield name, tuple((str(x), tuple(map(id, getattr(x, "consts", ())))) for x in rows)
            continue
        try:
            hash(held)
        except TypeError:
            held = repr(held)
        yield name, held


def _inlines(e: Any, given: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The jaxpr of a call that means the same written out (a call that shards its arguments does not), and what of
    the operands it takes."""
    if e.primitive.name == "custom_linear_solve":  # differentiated already: only its solver is left to run
        parts, each = e.params["jaxprs"], e.params["const_lengths"]
        at = each.matvec + each.vecmat
        return parts.solve, (*given[at : at + each.solve], *given[sum(each) :])
    if e.primitive.name not in _CALLS:
        return None, given
    if any(
        "Unspecified" not in type(s).__name__
        for k in ("in_shardings", "out_shardings")
        for s in e.params.get(k, ())
    ):
        return None, given
    inner = called(e)
    jaxpr = getattr(inner, "jaxpr", inner)
    return (inner if jaxpr is not None and len(jaxpr.invars) == len(e.invars) else None), given


class Ops:
    """The equations of a program as the ops of a graph: op ``i`` runs ``members[i]``, the last of which has its
    results; ``home`` has the graph's value of a program's value that an op makes or the caller gives."""

    def __init__(self, program: Program, name: str = "step") -> None:
        self.program = program
        self.members: list[tuple[int, ...]] = _fused(program)
        self.builder = GraphBuilder()
        self.home: dict[int, int] = {}
        for v in (*program.constants, *program.inputs):
            self.home[v] = self._tensor(v, "parameter")
        self.builder.inputs = [self.home[v] for v in (*program.constants, *program.inputs)]
        for row in self.members:
            self._op(row)
        own = {self.home[v] for v in program.inputs}
        found = dict.fromkeys(self.home[v] for v in program.outputs if isinstance(v, int))
        self.graph: Graph = self.builder.graph([v for v in found if v not in own], name)

    def _tensor(self, v: int, kind: str = "activation") -> int:
        aval = self.program.avals[v]
        shape = tuple(getattr(aval, "shape", ()))
        nbytes = 0 if v in self.program.in_place else bytes_of(aval)
        return self.builder.tensor(f"{kind}.{v}", nbytes, str(getattr(aval, "dtype", "")), shape, kind)

    def _op(self, row: tuple[int, ...]) -> None:
        e, reads = self.program.equations[row[-1]], self.reads(row)
        for v in e.outputs:
            self.home[v] = self._tensor(v)
        flops = sum(self.program.equations[i].flops for i in row)
        moved = self.program.nbytes((*reads, *e.outputs))
        self.builder.op(
            Op(
                self.builder.op_name(e.name), kind_of(e.made), tuple(self.home[v] for v in reads),
                tuple(self.home[v] for v in e.outputs), time=max(flops / FLOPS, moved / BYTES), flops=flops,
                workspace=e.inner,
                effect=runs_once(e.made) or e.once,
                phase="backward" if e.backward else "forward", source=source_of(e.made),
            )
        )  # fmt: skip

    def reads(self, row: Iterable[int]) -> tuple[int, ...]:
        """The values from outside that equations read."""
        equations = [self.program.equations[i] for i in row]
        made = {v for e in equations for v in e.outputs}
        return tuple(dict.fromkeys(v for e in equations for v in e.read if v not in made))

    @cached_property
    def results(self) -> list[tuple[int, ...]]:
        return [self.program.equations[row[-1]].outputs for row in self.members]

    def compute(self, op: int, known: Mapping[int, Any]) -> dict[int, Any]:
        """The results of an op by itself."""
        local: dict[int, Any] = {}
        for i in self.members[op]:
            e = self.program.equations[i]
            values = [
                (local[x] if x in local else known[x]) if isinstance(x, int) else x.val for x in e.inputs
            ]
            local |= zip(e.outputs, e.bind(values), strict=True)
        return {v: local[v] for v in self.results[op]}


def with_carry(program: Program, first: int) -> Program:
    """The body of a loop that carries its inputs from ``first`` on. XLA has one buffer for each of them: what is
    computed of it element by element, after all others have read it, is written over it, and so is what a loop
    inside, which alone reads it, carries on from it, and a part of it that is set."""
    readers: dict[int, set[int]] = {}
    maker: dict[int, tuple[int, int]] = {}
    for i, e in enumerate(program.equations):
        maker |= {v: (i, at) for at, v in enumerate(e.outputs)}
        for v in e.read:
            readers.setdefault(v, set()).add(i)
    rows = {row[-1]: set(row) for row in _fused(program)}
    found = set()
    for before, after in zip(program.inputs[first:], program.outputs, strict=False):
        if not isinstance(after, int) or after not in maker or program.outputs.count(after) > 1:
            continue
        i, at = maker[after]
        e, alike = program.equations[i], str(program.avals[before]) == str(program.avals[after])
        if not alike or not (own := readers.get(before, set()) & rows[i]) or max(readers[before]) > i:
            continue
        if e.name in _ELEMENTWISE or (own == {i} and before in _written(e, at)):
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


def _fused(program: Program) -> list[tuple[int, ...]]:
    """Equations by op, the one whose results others read last."""
    equations, results = program.equations, program.results()
    readers: dict[int, set[int]] = {}
    maker: dict[int, int] = {}
    for i, e in enumerate(equations):
        maker |= dict.fromkeys(e.outputs, i)
        for v in e.read:
            readers.setdefault(v, set()).add(i)
    free = {
        i
        for i, e in enumerate(equations)
        if e.name in FREE and e.outputs[0] not in results and e.outputs[0] in readers
    }
    head = list(range(len(equations)))
    for i in reversed(range(len(equations))):
        e = equations[i]
        if i in free or e.name not in _ELEMENTWISE or e.outputs[0] in results:
            continue
        heads = {head[k] for k in _through(readers.get(e.outputs[0], ()), free, equations, readers)}
        if len(heads) == 1:
            to = next(iter(heads))
            if equations[to].name in _ELEMENTWISE or equations[to].name.startswith("reduce_"):
                head[i] = to
    rows: dict[int, set[int]] = {}
    for i in range(len(equations)):
        if i not in free:
            rows.setdefault(head[i], set()).add(i)
    for row in rows.values():  # what costs nothing goes to each of its readers
        more = list(row)
        while more:
            for v in equations[more.pop()].read:
                k = maker.get(v)
                if k in free and k not in row:
                    row.add(k)
                    more.append(k)
    return [tuple(sorted(rows[h])) for h in sorted(rows)]


def _through(
    readers: Iterable[int], free: set[int], equations: Sequence[Equation], of: Mapping[int, set[int]]
) -> Iterator[int]:
    """The readers of a value, those that cost nothing replaced by theirs."""
    more = list(readers)
    while more:
        i = more.pop()
        if i in free:
            more.extend(of.get(equations[i].outputs[0], ()))
        else:
            yield i


# --- a function again ---


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

    def run(*args: Any) -> list[Any]:
        known = dict(program.constants) | dict(zip(given, args, strict=True))
        turn = [x for x in args[alike:] if _tells(jax.typeof(x))]
        held = late(ops, in_turn, known, turn, hold) if in_turn and turn else {}
        before: dict[
            int, None
        ] = {}  # what is computed before the next repetition, and read by nothing before it
        at = 0
        while at < len(steps):
            again, op = steps[at]
            if not again:
                known |= ops.compute(op, known | held if op in in_turn else known)
                for v in ops.reads(ops.members[op]):
                    before.pop(v, None)
                before |= dict.fromkeys(v for v in needed[at] if _tells(program.avals[v]))
                at += 1
                continue
            end = next((k for k in range(at, len(steps)) if not steps[k][0]), len(steps))
            group = [op for _, op in steps[at:end]]
            local = dict(known) | late(ops, group, known, [known[v] for v in before], hold)
            before.clear()
            for op in group:
                made = ops.compute(op, local)
                local |= made
                known |= made
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


def _tells(aval: Any) -> bool:
    """Whether a value can hold back another one."""
    return bytes_of(aval) > 0 and jnp.issubdtype(aval.dtype, jnp.inexact)


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
        may = [v for v in row if is_plain(program.avals[v]) or _key(program.avals[v])]
        # What is one on all devices of a mesh is not chosen by what differs there.
        may = [v for v in may if differ <= varying(jax.typeof(known[v]))] or [
            v for v in may if any(varying(jax.typeof(t)) <= varying(jax.typeof(known[v])) for t in tokens)
        ]
        if may:
            of = {v: (_key(a := program.avals[v]), v in program.constants, bytes_of(a)) for v in may}
            v = min(may, key=of.__getitem__)
            held_back[v] = _chosen(known[v], always_for(varying(jax.typeof(known[v]))))
    return held_back


def is_plain(aval: Any) -> bool:
    return not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)


def _key(aval: Any) -> bool:
    """Whether a value is random keys of JAX's own type: bits are made of nothing else."""
    return bool(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key))


def _chosen(value: Any, always: Any) -> Any:
    """A value where ``always`` is true, and nothing where it is not."""
    if _key(jax.typeof(value)):
        data = _chosen(jax.random.key_data(value), always)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    which = always if is_divided(jax.typeof(value)) else jnp.broadcast_to(always, jnp.shape(value))
    return jax.lax.select_n(which, jnp.zeros_like(value), value)


def is_divided(aval: Any) -> bool:
    """Whether the type of an array says that it is divided among devices, by a mesh of explicit axes."""
    spec = getattr(getattr(aval, "sharding", None), "spec", ())
    return any(axis is not None for axis in spec)


def never(tokens: Sequence[Any]) -> Any:
    """False, once arrays are there, which XLA cannot know; None where none of them can tell. What is no array of the
    program, as a number that a loop begins with, XLA knows."""
    arrays = (t for t in tokens if isinstance(t, jax.core.Tracer))
    told = [t for t in arrays if _tells(a := jax.typeof(t)) and not varying(a) and not is_divided(a)]
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
