"""A traced JAX function as equations in a row.

Calls (`jit`, `custom_jvp`, `closed_call`, checkpoints) are inlined; loops, branches and shard maps are one
equation each. What a checkpoint of a backward pass makes again is merged with the first time (`merged`), so that a
plan decides anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util

from tightship.cached import cached_property
from tightship.frontends.jaxpr import bytes_of, called, flops_of

__all__ = [
    "Equation",
    "Program",
    "array_of",
    "inlined",
    "is_array",
    "is_divided",
    "is_plain",
    "merged",
    "tells",
    "varying",
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

    @cached_property
    def name(self) -> str:
        return str(self.made.primitive.name)

    @cached_property
    def read(self) -> tuple[int, ...]:
        return tuple(x for x in self.inputs if isinstance(x, int))

    @cached_property
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
    ``over``: the input whose place each result takes, that of what is donated or carried by a loop.
    """

    equations: list[Equation] = field(default_factory=list)
    avals: list[Any] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    in_place: frozenset[int] = frozenset()
    over: Mapping[int, int] = field(default_factory=dict)

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


def is_array(aval: Any) -> bool:
    """Whether a value is an array, and no reference to one that is written (`jax.new_ref`)."""
    return isinstance(aval, jax.core.ShapedArray)


def is_plain(aval: Any) -> bool:
    return is_array(aval) and not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)


def tells(aval: Any) -> bool:
    """Whether a value can hold back another one."""
    return is_array(aval) and bytes_of(aval) > 0 and jnp.issubdtype(aval.dtype, jnp.inexact)


def is_divided(aval: Any) -> bool:
    """Whether the type of an array says that it is divided among devices, by a mesh of explicit axes."""
    spec = getattr(getattr(aval, "sharding", None), "spec", ())
    return any(axis is not None for axis in spec)


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
