"""A program of JAX as a graph whose ops are what XLA would fuse.

An op is what XLA's fusion would make one kernel of: an equation, the element-wise ones that only it reads, and the
shapes and broadcasts it reads, which cost nothing. Times are modeled: floating-point operations of contractions and
convolutions, bytes of all else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tightship.cached import cached_property
from tightship.frontends.builder import GraphBuilder
from tightship.frontends.jax_program import Equation, Program
from tightship.frontends.jaxpr import BYTES, FLOPS, bytes_of, kind_of, runs_once, source_of
from tightship.graph import Graph, Op

__all__ = ["ELEMENTWISE", "FREE", "Ops", "fused"]

ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy "
    "cos cosh div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p "
    "logistic lt max min mul ne neg nextafter not or pow real imag rem round rsqrt select_n shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor".split()
)
FREE = frozenset("broadcast_in_dim expand_dims iota reshape squeeze stop_gradient".split())
"""Made again by whoever reads them: XLA takes them for views, or puts them into each fusion."""


class Ops:
    """The equations of a program as the ops of a graph: op ``i`` runs ``members[i]``, the last of which has its
    results; ``home`` has the graph's value of a program's value that an op makes or the caller gives."""

    def __init__(self, program: Program, name: str = "step") -> None:
        self.program = program
        self.members: list[tuple[int, ...]] = fused(program)
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


def fused(program: Program) -> list[tuple[int, ...]]:
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
        if i in free or e.name not in ELEMENTWISE or e.outputs[0] in results:
            continue
        heads = {head[k] for k in _through(readers.get(e.outputs[0], ()), free, equations, readers)}
        if len(heads) == 1:
            to = next(iter(heads))
            if equations[to].name in ELEMENTWISE or equations[to].name.startswith("reduce_"):
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
