"""What `lax.scan` stacks up for the backward pass: which of it is kept, and which is made again in each iteration.

A loop of the forward pass hands the loop of the backward pass one array for every value that its body saves, with a
row for each iteration. Any set of values of the body may be stacked up instead, from which, with what the iteration
began with, the rest is made again inside the backward loop: what `jax.checkpoint` around the body does for one set.
Sets are plans of the body's graph in which all that stays until the backward pass is what the budget is for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from tightship.errors import Infeasible
from tightship.frontends.builder import GraphBuilder
from tightship.frontends.jax_program import Ops, Program, array_of, inlined, on_values
from tightship.frontends.jaxpr import bytes_of
from tightship.graph import Graph, Op
from tightship.plan import Step
from tightship.planners import default
from tightship.simulate import baseline, replay

__all__ = ["Loop", "Saved", "loops_of", "with_bodies", "with_saved"]


@dataclass(frozen=True)
class Saved:
    """``values`` of the body that are stacked up; ops ``again`` make the rest of them in each backward iteration."""

    values: tuple[int, ...]
    again: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """Equation ``forward`` of a program is a scan that stacks up values for ``backward``, another one. ``stacked``:
    (position among the forward loop's results, value of its body, position among the backward loop's arguments)."""

    program: Program
    forward: int
    backward: int
    stacked: tuple[tuple[int, Any, int], ...]

    @property
    def length(self) -> int:
        return int(self.program.equations[self.forward].made.params["length"])

    @cached_property
    def body(self) -> Ops:
        """An iteration of the forward loop."""
        return Ops(inlined(self.program.equations[self.forward].made.params["jaxpr"]))

    @property
    def most(self) -> int:
        """Bytes of an iteration that are stacked up as it is."""
        return self.body.program.nbytes({v for _, v, _ in self.stacked})

    @cached_property
    def _graph(self) -> tuple[Graph, int, int, dict[int, int]]:
        """The body, then an op that needs more than all of it (``high`` bytes), then one that reads what is stacked
        up; the op that is high; values of the graph by the program's."""
        body, p = self.body.program, self.program.equations[self.forward].made.params
        begins = set(body.inputs[p["num_consts"] : p["num_consts"] + p["num_carry"]])
        high = sum(map(bytes_of, body.avals)) * 2 + (1 << 20)
        b, home = GraphBuilder(), {}
        given = [v for v in (*body.constants, *body.inputs) if v not in begins]
        for v in given:
            home[v] = b.tensor(f"given.{v}", bytes_of(body.avals[v]), kind="parameter")
        b.inputs = [home[v] for v in given]
        for v in sorted(begins):
            home[v] = b.tensor(f"begins.{v}", bytes_of(body.avals[v]))
        b.op(Op("begins", "begins", (), tuple(home[v] for v in sorted(begins)), effect=True))
        for row, results, op in zip(self.body.members, self.body.results, self.body.graph.ops, strict=True):
            for v in results:
                home[v] = b.tensor(f"made.{v}", bytes_of(body.avals[v]))
            reads = tuple(home[v] for v in self.body.reads(row))
            b.op(replace(op, inputs=reads, outputs=tuple(home[v] for v in results), phase="forward"))
        ends = tuple(home[v] for v in body.outputs if isinstance(v, int))
        b.op(Op("ends", "ends", tuple(dict.fromkeys(ends)), effect=True))
        rest = b.op(Op("rest", "rest", workspace=high, effect=True))
        done = b.tensor("done", 1)
        needs = tuple(dict.fromkeys(home[v] for _, v, _ in self.stacked))
        b.op(Op("backward", "backward", needs, (done,), phase="backward", effect=True))
        return b.graph([done], "body"), high, rest, home

    def saved(self, share: float) -> Saved:
        """What to stack up in ``share`` of the bytes that are stacked up as it is; less where nothing else will do,
        and the least there is for 0."""
        graph, high, rest, home = self._graph
        options = default.Options(order="given", place=False, seconds=2.0)
        static = graph.static_bytes + high
        try:
            made = default.plan(graph, static + int(self.most * share) + (1 << 10), options)
        except Infeasible as error:
            made = default.plan(graph, max(error.best_peak, error.lower_bound), options)
        return self._read(made.steps, rest, {g: v for v, g in home.items()})

    def _read(self, steps: Sequence[Step], rest: int, value: dict[int, int]) -> Saved:
        graph, first = self._graph[0], 1  # op 0 says what the iteration begins with
        after = next(k for k, s in enumerate(steps) if s.kind == "compute" and s.op == rest) + 1
        free = set(self.body.program.constants)
        made: set[int] = set()
        values: dict[int, None] = {}
        again: list[int] = []
        for s in steps[after:]:
            if s.kind not in ("compute", "recompute"):
                continue
            reads = [value[v] for v in graph.ops[s.op].inputs]
            values |= dict.fromkeys(v for v in reads if v not in made and v not in free)
            if s.kind == "recompute":
                again.append(s.op - first)
                made |= {value[v] for v in graph.ops[s.op].outputs}
        return Saved(tuple(values), tuple(again))


def loops_of(program: Program) -> tuple[Loop, ...]:
    """The pairs of loops of a program of which the second reads, row by row, what only the first stacks up."""
    equations, results = program.equations, program.results()
    readers: dict[int, set[int]] = {}
    for i, e in enumerate(equations):
        for v in e.read:
            readers.setdefault(v, set()).add(i)
    found = []
    taken: set[int] = set()
    for i, e in enumerate(equations):
        if e.name != "scan" or e.made.effects:
            continue
        body, around = e.made.params["jaxpr"].jaxpr, e.made.params["num_carry"]
        behind: dict[int, list[tuple[int, Any, int]]] = {}
        for at in range(around, len(e.outputs)):
            by = readers.get(e.outputs[at], set())
            if e.outputs[at] in results or len(by) != 1 or hasattr(body.outvars[at], "val"):
                continue
            k = next(iter(by))
            b = equations[k]
            p = b.made.params
            if (
                b.name != "scan"
                or p["length"] != e.made.params["length"]
                or b.inputs.count(e.outputs[at]) != 1
            ):
                continue
            to = b.inputs.index(e.outputs[at])
            if to >= p["num_consts"] + p["num_carry"]:
                behind.setdefault(k, []).append((at, None, to))
        for k, rows in behind.items():
            if k in taken or i in taken:
                continue
            taken |= {i, k}
            loop = Loop(program, i, k, ())
            outs = loop.body.program.outputs
            inputs = set(loop.body.program.inputs)
            rows = [
                (at, outs[at], to)
                for at, _, to in rows
                if isinstance(outs[at], int) and outs[at] not in inputs
            ]
            if rows:
                found.append(Loop(program, i, k, tuple(rows)))
    return tuple(found)


def with_saved(program: Program, chosen: Sequence[tuple[Loop, Saved]]) -> Program:
    """The program with other values stacked up. The forward loops run once: to run one again as a whole would make
    everything that is stacked up, and cost more than making it again where it is read."""
    made = Program(
        list(program.equations), list(program.avals), program.constants, program.inputs, program.outputs
    )
    for loop, saved in chosen:
        made.equations[loop.forward] = replace(made.equations[loop.forward], once=True)
        if saved.again:
            _rewrite(made, loop, saved)
    return made


def with_bodies(
    program: Program, share: float, steps: Callable[[Ops, int], Sequence[tuple[bool, int]]], hold: str
) -> tuple[Program, int]:
    """The program with the bodies of its loops planned, by ``steps``, in ``share`` of what an iteration takes beyond
    what it is given, and how many operations of bodies run again: where gradients are accumulated over micro-batches,
    forward and backward pass are inside of one, and loops over layers inside of these. Loops that stack up values for
    another one, and those that read them, stay as they are."""
    made, count = list(program.equations), 0
    for i, e in enumerate(made):
        if share >= 1 or e.name != "scan" or e.instead is not None or e.once or e.backward or e.made.effects:
            continue
        body = inlined(e.made.params["jaxpr"])
        if {k.backward for k in body.equations} != {False, True}:
            continue
        whole = Ops(body).graph
        chosen = [(loop, loop.saved(share)) for loop in loops_of(body)]
        inner, inside = with_bodies(with_saved(body, chosen), share, steps, hold)
        ops = Ops(inner)
        beyond = replay(whole, baseline(whole)).peak - whole.static_bytes
        planned = steps(ops, int(share * beyond))
        again = inside + sum(len(saved.again) for _, saved in chosen) + sum(twice for twice, _ in planned)
        if again:
            flops = sum(ops.graph.ops[op].flops for _, op in planned)
            more = max(0, flops - sum(op.flops for op in whole.ops))
            loop = functools.partial(_planned_loop, e.made.params, on_values(ops, planned, hold))
            made[i] = replace(e, instead=loop, more=more * int(e.made.params["length"]))
            count += again
    return Program(made, program.avals, program.constants, program.inputs, program.outputs), count


def _planned_loop(p: Any, body: Callable[..., list[Any]], values: Sequence[Any]) -> list[Any]:
    """A scan with parameters ``p`` and another body, on its inputs."""
    consts, told = p["num_consts"], p["num_consts"] + p["num_carry"]

    def step(c: Sequence[Any], x: Sequence[Any]) -> Any:
        outs = body(*values[:consts], *c, *x)
        return tuple(outs[: p["num_carry"]]), tuple(outs[p["num_carry"] :])

    begins, rows = tuple(values[consts:told]), tuple(values[told:])
    ends, stacked = jax.lax.scan(step, begins, rows, p["length"], p["reverse"], p["unroll"])
    return [*ends, *stacked]


def _rewrite(program: Program, loop: Loop, saved: Saved) -> None:
    """Both loops of ``program`` with ``saved`` stacked up instead."""
    forward, backward = program.equations[loop.forward], program.equations[loop.backward]
    ops, p, q = loop.body, forward.made.params, backward.made.params
    body = ops.program
    consts, carry = p["num_consts"], p["num_carry"]
    given = {v: k for k, v in enumerate(body.inputs)}
    begins = set(body.inputs[consts : consts + carry])
    remade = {v for op in saved.again for v in ops.results[op]}
    gone = {at for at, v, _ in loop.stacked if v in remade}
    keeps = [at for at in range(carry, len(forward.outputs)) if at not in gone]
    there = {v: at for at, v, _ in loop.stacked if at not in gone}
    extra = [v for v in saved.values if v not in there and (v in begins or v not in given)]
    slices = [v for v in saved.values if v in given and given[v] >= consts + carry]
    wholes = [v for v in saved.values if v in given and given[v] < consts]
    n = loop.length
    stacks = {
        v: program.value(jax.core.ShapedArray((n, *body.avals[v].shape), body.avals[v].dtype)) for v in extra
    }

    def run(known: dict[int, Any], again: Sequence[int]) -> dict[int, Any]:
        local = dict(body.constants) | known
        for op in again:
            local |= ops.compute(op, local)
        return local

    def forwards(values: Sequence[Any]) -> list[Any]:
        def step(c: Sequence[Any], x: Sequence[Any]) -> Any:
            local = run(
                dict(zip(body.inputs, (*values[:consts], *c, *x), strict=True)), range(len(ops.members))
            )
            outs = [local[o] if isinstance(o, int) else array_of(o) for o in body.outputs]
            return tuple(outs[:carry]), (*(outs[at] for at in keeps), *(local[v] for v in extra))

        ends, rows = jax.lax.scan(
            step,
            tuple(values[consts : consts + carry]),
            tuple(values[consts + carry :]),
            n,
            p["reverse"],
            p["unroll"],
        )
        return [*ends, *rows]

    told = q["num_consts"] + q["num_carry"]
    lost = {to: v for at, v, to in loop.stacked if at in gone}
    stays = [k for k in range(told, len(backward.inputs)) if k not in lost]
    inner = inlined(q["jaxpr"])
    kept_at = {to: v for at, v, to in loop.stacked if at not in gone}
    reads_kept = {v for v in saved.values if v in there}

    def backwards(values: Sequence[Any]) -> list[Any]:
        old, more = values[: len(backward.inputs) - len(lost)], values[len(backward.inputs) - len(lost) :]
        whole = dict(zip(wholes, more[: len(wholes)], strict=True))

        def step(c: Sequence[Any], x: Sequence[Any]) -> Any:
            mine, others = x[: len(stays)], x[len(stays) :]
            known = whole | dict(zip((*slices, *extra), others, strict=True))
            rows = dict(zip(stays, mine, strict=True))
            known |= {v: rows[k] for k, v in kept_at.items() if v in reads_kept}
            local = run(known, saved.again)
            xs = [rows[k] if k in rows else local[lost[k]] for k in range(told, len(backward.inputs))]
            outs = inner.call((*old[: q["num_consts"]], *c, *xs))
            return tuple(outs[: q["num_carry"]]), tuple(outs[q["num_carry"] :])

        ends, rows = jax.lax.scan(
            step,
            tuple(old[q["num_consts"] : told]),
            (*old[told:], *more[len(wholes) :]),
            n,
            q["reverse"],
            q["unroll"],
        )
        return [*ends, *rows]

    outputs = (*forward.outputs[:carry], *(forward.outputs[at] for at in keeps), *stacks.values())
    program.equations[loop.forward] = replace(forward, outputs=outputs, instead=forwards)
    inputs = [x for k, x in enumerate(backward.inputs) if k not in lost]
    inputs += [forward.inputs[given[v]] for v in (*wholes, *slices)] + [stacks[v] for v in extra]
    more = n * sum(ops.graph.ops[op].flops for op in saved.again)
    program.equations[loop.backward] = replace(backward, inputs=tuple(inputs), instead=backwards, more=more)
