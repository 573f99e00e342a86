"""A traced JAX function (`jax.jit(f).trace(…)`) to a Graph, with the names that `checkpoint_name` gave.

Loops of `lax.scan` are written out, one op after the other for each time around, so that what an iteration saves for
the backward pass is a storage of its own; calls (`jit`, `custom_jvp`, `checkpoint`) are inlined. Other control flow
is one op. Times are modeled: floating-point operations of contractions and convolutions, bytes of all else. What
XLA fuses is not fused here, so peaks are above those of compiled programs; what is saved is the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tightship.errors import Unsupported
from tightship.frontends.builder import GraphBuilder
from tightship.graph import Graph, Op

__all__ = [
    "BYTES",
    "FLOPS",
    "Traced",
    "bytes_of",
    "called",
    "flops_of",
    "kind_of",
    "lower",
    "runs_once",
    "source_of",
]

FLOPS = 5e10
"""Floating-point operations a second: only how they compare with bytes matters."""
BYTES = 2e10
MOST = 100_000
"""Ops of a graph."""

_INSIDE = ("jaxpr", "call_jaxpr", "fun_jaxpr")


@dataclass(frozen=True)
class Traced:
    """``graph``; ``names``: storages that each name stands for; ``carried``: those that an iteration begins with,
    which a checkpoint around a loop's body saves in any case."""

    graph: Graph
    names: Mapping[str, frozenset[int]]
    carried: frozenset[int]


def lower(traced: Any) -> Traced:
    """``traced`` is what `jax.jit(f).trace(…)` gives. Raises ``Unsupported`` for loops too long to write out."""
    made = _Lowering()
    closed = traced.jaxpr
    constants = [made.given("constant", x.aval) for x in closed.jaxpr.constvars]
    inputs = [made.given("parameter", x.aval) for x in closed.jaxpr.invars]
    outputs = made.run(closed.jaxpr, constants, inputs, "")
    flat = tuple(dict.fromkeys(v for x in outputs for v in _flat(x) if v >= len(constants) + len(inputs)))
    made.builder.inputs = constants + inputs + made.literals  # the call's first, in its order
    graph = made.builder.graph(flat, str(getattr(traced, "fun_name", "") or "traced"))
    names = {name: frozenset(found) for name, found in made.names.items()}
    return Traced(graph, names, frozenset(made.carried))


_Known = int | list[int]
"""A value, or the values of a stacked array that a loop has made, one for each time around."""


def _flat(known: _Known) -> list[int]:
    return known if isinstance(known, list) else [known]


@dataclass
class _Lowering:
    builder: GraphBuilder = field(default_factory=GraphBuilder)
    names: dict[str, set[int]] = field(default_factory=dict)
    carried: set[int] = field(default_factory=set)
    literals: list[int] = field(default_factory=list)  # and constants of inner calls
    backward: bool = False  # inside of what runs in the backward pass

    def phase(self, e: Any) -> str:
        return "backward" if self.backward or "transpose" in str(e.source_info.name_stack) else "forward"

    def given(self, kind: str, aval: Any) -> int:
        return self.value(f"{kind}{len(self.builder.values)}", aval, kind)

    def literal(self, aval: Any) -> int:
        self.literals.append(self.given("constant", aval))
        return self.literals[-1]

    def value(self, name: str, aval: Any, kind: str = "activation") -> int:
        return self.builder.tensor(name, bytes_of(aval), str(aval.dtype), tuple(aval.shape), kind)

    def run(
        self, jaxpr: Any, constants: Sequence[_Known], inputs: Sequence[_Known], module: str
    ) -> list[_Known]:
        """The outputs of a jaxpr."""
        known: dict[Any, _Known] = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *inputs], strict=True)
        )
        for e in jaxpr.eqns:
            args = [None if hasattr(x, "val") else known[x] for x in e.invars]
            known |= zip(e.outvars, self.equation(e, args, module), strict=True)
        return [self.literal(x.aval) if hasattr(x, "val") else known[x] for x in jaxpr.outvars]

    def equation(self, e: Any, args: list[_Known | None], module: str) -> list[_Known]:
        outside, self.backward = self.backward, self.phase(e) == "backward"
        made = self._equation(e, args, module)
        self.backward = outside
        return made

    def _equation(self, e: Any, args: list[_Known | None], module: str) -> list[_Known]:
        name = e.primitive.name
        if name == "name" and args[0] is not None:
            stands = self.names.setdefault(e.params["name"], set())
            stands.update(map(self.builder.storage_of, _flat(args[0])))
            return [args[0]]
        if name == "scan":
            return self.scan(e, args, module)
        inside = called(e)
        if (
            inside is not None
            and name not in ("while", "cond", "pallas_call")
            and not isinstance(inside, (tuple, list))
        ):
            closed = getattr(inside, "jaxpr", inside)
            given = [self._present(a, x) for a, x in zip(args, e.invars, strict=True)]
            if len(closed.invars) == len(given):
                constants = [self.literal(x.aval) for x in closed.constvars]
                return self.run(closed, constants, given, module)
        return self.op(e, args, module)

    def _present(self, arg: _Known | None, var: Any) -> _Known:
        return self.literal(var.aval) if arg is None else arg

    def scan(self, e: Any, args: list[_Known | None], module: str) -> list[_Known]:
        """A loop, written out."""
        p, body = e.params, e.params["jaxpr"]
        n, fixed, around = p["length"], p["num_consts"], p["num_carry"]
        if len(self.builder.ops) + n * len(body.jaxpr.eqns) > MOST:
            raise Unsupported(
                "a loop that is written out", f"it makes more than {MOST} ops", "trace fewer iterations"
            )
        present = [self._present(a, x) for a, x in zip(args, e.invars, strict=True)]
        constants, carry = present[:fixed], present[fixed : fixed + around]
        stacked = present[fixed + around :]
        inner = [self.literal(x.aval) for x in body.jaxpr.constvars]
        made: list[list[int]] = [[-1] * n for _ in range(len(e.outvars) - around)]
        for k in reversed(range(n)) if p["reverse"] else range(n):
            if self.phase(e) == "forward":
                self.carried.update(self.builder.storage_of(v) for x in carry for v in _flat(x))
            slices = [x[k] if isinstance(x, list) else x for x in stacked]
            out = self.run(body.jaxpr, inner, [*constants, *carry, *slices], f"{module}scan.{k}.")
            carry = out[:around]
            for row, x in zip(made, out[around:], strict=True):
                row[k] = self._one(x, e)
        return [*carry, *made]

    def _one(self, known: _Known, e: Any) -> int:
        """A stack of stacks is one array."""
        if isinstance(known, int):
            return known
        name = f"stack{len(self.builder.values)}"
        whole = sum(self.builder.storages[self.builder.storage_of(v)].size for v in known)
        stack = self.builder.tensor(name, whole)
        self.builder.op(Op(name, "stack", tuple(known), (stack,), phase=self.phase(e)))
        return stack

    def op(self, e: Any, args: list[_Known | None], module: str) -> list[_Known]:
        inputs = tuple(v for a in args if a is not None for v in _flat(a))
        name = f"{module}{e.primitive.name}"
        number = len(self.builder.ops)
        outputs = [self.value(f"{name}.{number}", x.aval) for x in e.outvars]
        flops = flops_of(e)
        moved = sum(bytes_of(x.aval) for x in (*e.invars, *e.outvars))
        self.builder.op(
            Op(
                f"{name}#{number}", kind_of(e), inputs, tuple(outputs),
                time=max(flops / FLOPS, moved / BYTES), flops=flops, phase=self.phase(e),
                module=module.rstrip("."), source=source_of(e), effect=runs_once(e),
            )
        )  # fmt: skip
        return list(outputs)


def called(e: Any) -> Any:
    """The jaxpr that a call runs, if the equation is one."""
    return next((e.params[k] for k in _INSIDE if k in e.params), None)


def bytes_of(aval: Any) -> int:
    """Bytes of an abstract array, 0 for what is none."""
    shape = getattr(aval, "shape", ())
    return math.prod(shape) * int(getattr(getattr(aval, "dtype", None), "itemsize", 0))


_OVER_DEVICES = {"psum": "reduce_sum", "pmax": "reduce_max", "pmin": "reduce_min"}


def kind_of(e: Any) -> str:
    """The name of an equation's primitive; of a sum over devices that `vmap` made one over an array's own axes, what
    it is: a reduction that nobody else hears of."""
    name, axes = str(e.primitive.name), e.params.get("axes")
    own = name in _OVER_DEVICES and axes is not None and all(isinstance(axis, int) for axis in axes)
    return _OVER_DEVICES[name] if own else name


def runs_once(e: Any) -> bool:
    """Whether an equation is not run again: it has effects, or devices exchange what it reads. JAX writes the axis
    down as an effect of most of these, but not of `ppermute`."""
    return bool(e.effects) or bool(e.params.get("axis_name"))


def flops_of(e: Any) -> int:
    """Floating-point operations of the contractions and convolutions of an equation and of what it runs inside."""
    out = math.prod(e.outvars[0].aval.shape) if e.outvars else 0
    if e.primitive.name == "dot_general":
        (contracted, _), _ = e.params["dimension_numbers"]
        return 2 * out * math.prod(e.invars[0].aval.shape[d] for d in contracted)
    if e.primitive.name == "conv_general_dilated":
        kernel = e.invars[1].aval.shape
        return 2 * out * math.prod(kernel) // max(1, kernel[e.params["dimension_numbers"].rhs_spec[0]])
    held = [x for p in e.params.values() for x in (p if isinstance(p, (tuple, list)) else (p,))]
    if e.primitive.name == "custom_linear_solve":  # beside its solver it has what gradients are made of
        held = [e.params["jaxprs"].solve]
    bodies: list[Any] = [j for x in held if hasattr(j := getattr(x, "jaxpr", x), "eqns")]
    each = sum(flops_of(x) for body in bodies for x in body.eqns)
    return each * int(e.params.get("length", 1)) if e.primitive.name == "scan" else each


def source_of(e: Any) -> str:
    """``file.py:line`` of the innermost frame that is the user's."""
    frames = getattr(e.source_info.traceback, "frames", ()) if e.source_info.traceback else ()
    frame = next((f for f in frames if "site-packages" not in f.file_name), None)
    return "" if frame is None else f"{'/'.join(frame.file_name.split('/')[-2:])}:{frame.line_num}"
