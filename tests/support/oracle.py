"""An oracle of plans written from the definitions in `tightship.plan` alone: it replays values as symbols.

It shares no code with the replay, the verifier or a planner, and is written to be read, not to be fast. Two things
are compared: what the graph computes in its own order, and what a plan's steps compute, each content of a storage
being a term built from the contents that were read. Bytes, seconds, effects, draws, races between streams and places
are judged on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

from support.oracle_places import faults_of_places
from tightship.graph import Graph, Op
from tightship.plan import Plan, Step

__all__ = ["faults", "seconds_of"]

BETWEEN_RANKS = ("c10d.", "_c10d_functional.all_reduce")
"""Names of ops that other ranks notice, whatever a graph says of them."""


def faults(graph: Graph, plan: Plan) -> list[str]:
    """What is wrong with a plan: nothing, or the first wrong step, or all sums and places that are wrong."""
    world = _World(graph, lossy=plan.lossy)
    try:
        for i, step in enumerate(plan.steps):
            world.step(i, step)
    except _WrongError as wrong:
        return [str(wrong)]
    return [
        *_end(world, graph),
        *_sums(world, graph, plan),
        *_races(graph, plan),
        *_places(graph, plan),
        *_inner(plan, graph),
    ]


class _WrongError(Exception):
    pass


class _Terms:
    """Terms as numbers: equal terms are one number, so that comparing takes no time."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}

    def __call__(self, *parts: Any) -> int:
        return self.known.setdefault(parts, len(self.known))


@dataclass
class _World:
    graph: Graph
    term: _Terms = field(default_factory=_Terms)
    lossy: bool = False

    def __post_init__(self) -> None:
        g = self.graph
        self.home = [v.storage for v in g.values]
        self.static = {self.home[v] for v in g.inputs}
        begin = {s: self.term("given", s) for s in self.static}
        self.full = dict(begin)
        self.packed: dict[int, tuple[int, int]] = {}  # storage: (content, bytes)
        self.host: dict[int, int] = {}
        self.states: dict[int, int] = {}  # op: the random state from before it ran
        self.random = self.term("seed")
        self.effects: Counter[int] = Counter()
        self.ran: set[int] = set()
        self.peak = self.host_peak = 0
        self.views = _views(g)
        self.unit = 512 if any(op.device.startswith("cuda") for op in g.ops) else 64
        self.expected = _expected(g, dict(begin), self.term)

    def made(self, op: Op) -> list[int]:
        """Storages that begin with this op: those of its results that are neither read nor the caller's."""
        old = {self.home[v] for v in op.inputs} | set(op.mutates) | self.static
        return [s for s in dict.fromkeys(self.home[v] for v in op.outputs) if s not in old]

    def size(self, s: int) -> int:
        return self.graph.storages[s].size

    def live(self) -> int:
        states = sum(self.graph.ops[k].state for k in self.states)
        return sum(map(self.size, self.full)) + sum(n for _, n in self.packed.values()) + states

    def need(self, holds: bool, i: int, what: str) -> None:
        if not holds:
            raise _WrongError(f"step {i}: {what}")

    def step(self, i: int, step: Step) -> None:
        self.need(
            step.stream >= 0 and all(0 <= w < i for w in step.waits), i, "no such stream, or earlier step"
        )
        if step.kind in ("compute", "recompute"):
            during = self.run(i, step)
        elif step.kind == "free":
            during = self.live()
            self.free(i, step)
        else:
            during = self.copy(i, step)
        self.peak = max(self.peak, during, self.live())
        self.host_peak = max(self.host_peak, sum(map(self.size, self.host)))

    def run(self, i: int, step: Step) -> int:
        op, again = self.graph.ops[step.op], step.kind == "recompute"
        self.need(again == (step.op in self.ran), i, f"{op.name} is computed twice, or again before once")
        self.need(all(c in self.ran for c in op.control), i, f"{op.name} runs before what it waits for")
        self.ran.add(step.op)
        views = [self.views[v] for v in op.inputs if v in self.views]
        self.need(all(k in self.ran for k in views), i, f"{op.name} reads a view that is not made yet")
        reads = dict.fromkeys([*(self.home[v] for v in op.inputs), *op.mutates])
        left_alone = set(op.updates) if again else set()
        for s in reads:
            self.need(
                s in self.full or s in left_alone, i, f"{op.name} reads storage {s}, which is not there"
            )
        draw = self.random
        if op.random:
            if again:
                self.need(step.op in self.states, i, f"{op.name} draws again without its state")
                draw = self.states[step.op]
            else:
                self.random = self.term("drawn", step.op, draw)
        if step.saves:
            self.need(op.state > 0 and not again, i, f"{op.name} has no state to save")
        results, writes = _results(op, step.op, self.home, self.full, self.made(op), draw, self.term)
        expected = self.expected.of[step.op]
        self.need(results == expected[0], i, f"{op.name} computes something else")
        for s, content in writes.items():
            if s not in left_alone:
                self.full[s] = content
                self.need(content == expected[1][s], i, f"{op.name} writes something else to storage {s}")
        if _noticed(op):
            self.need(not again, i, f"the effects of {op.name} happen twice")
            self.effects[self.term("effect", step.op, *results.values())] += 1
        keep = step.storages if again else tuple(results)
        for old, new in step.reuses:
            pairs = (
                (old, new) in op.overwrites and new in keep and old in self.full and old not in self.static
            )
            self.need(pairs, i, f"storage {new} takes the place of {old}, which it may not")
            del self.full[old]
        state = op.state if step.saves or again else 0
        during = self.live() + sum(map(self.size, results)) + op.workspace + state
        during += max((_inside(g) for g in op.calls), default=0)
        if step.saves:
            self.states[step.op] = draw
        for s in keep:
            self.need(s in results and s not in self.full, i, f"storage {s} is there already")
            self.full[s] = results[s]
        return during

    def copy(self, i: int, step: Step) -> int:
        for s in step.storages:
            source = {"fetch": self.host, "decompress": self.packed}.get(step.kind, self.full)
            self.need(s in source, i, f"{step.kind} of storage {s}, which is not there")
            target = {"offload": self.host, "compress": self.packed}.get(step.kind, self.full)
            self.need(s not in target, i, f"{step.kind} of storage {s} makes what is there")
            if step.kind == "offload":
                self.host[s] = self.full[s]
            elif step.kind == "fetch":
                self.full[s] = self.host[s]
            elif step.kind == "compress":
                self.need(self.packs(s, step), i, f"storage {s} does not become {step.nbytes} bytes so")
                self.packed[s] = (self.full[s], step.nbytes)
            else:
                self.full[s] = self.packed[s][0]
        return self.live()

    def packs(self, s: int, step: Step) -> bool:
        """Of values of which only the type is known: booleans become bits once they are written for the last time,
        and single precision half of it where the plan allows it."""
        values = [v for v in self.graph.values if v.storage == s]
        count = max((prod(v.shape) for v in values), default=0)
        kind, nbytes = {"bits": ("bool", -(-count // 8)), "bf16": ("float32", 2 * count)}.get(
            step.codec, ("", -1)
        )
        right = (
            count > 0
            and {v.dtype for v in values} == {kind}
            and step.nbytes == -(-nbytes // self.unit) * self.unit
        )
        last = self.full[s] == self.expected.end.get(s)
        return right and (self.lossy if step.codec == "bf16" else last)

    def free(self, i: int, step: Step) -> None:
        if step.form == "state":
            self.need(self.states.pop(step.op, None) is not None, i, "a state that is not there is freed")
            return
        forms: dict[str, dict[int, Any]] = {"full": self.full, "packed": self.packed, "host": self.host}
        for s in step.storages:
            form = forms[step.form]
            foreign = step.form == "full" and s in self.static
            self.need(s in form and not foreign, i, f"{step.form} of storage {s} is freed")
            del form[s]


def _noticed(op: Op) -> bool:
    return op.effect or op.target.startswith(BETWEEN_RANKS)


@dataclass
class _Expected:
    of: dict[int, tuple[dict[int, int], dict[int, int]]]
    """By op: contents of what it makes, and of what it writes."""
    end: dict[int, int]
    effects: Counter[int]
    random: int


def _expected(g: Graph, full: dict[int, int], term: _Terms) -> _Expected:
    home, random, effects = [v.storage for v in g.values], term("seed"), Counter[int]()
    of = {}
    for k, op in enumerate(g.ops):
        read = {home[v] for v in op.inputs} | set(op.mutates)
        made = [s for s in dict.fromkeys(home[v] for v in op.outputs) if s not in read and s not in full]
        results, writes = _results(op, k, home, full, made, random, term)
        if op.random:
            random = term("drawn", k, random)
        if _noticed(op):
            effects[term("effect", k, *results.values())] += 1
        of[k] = (results, writes)
        full.update(results)
        full.update(writes)
    return _Expected(of, full, effects, random)


def _results(
    op: Op, k: int, home: list[int], full: dict[int, int], made: Iterable[int], draw: int, term: _Terms
) -> tuple[dict[int, int], dict[int, int]]:
    """Contents of what an op makes and writes, from what it reads; its updates change nothing else."""
    reads = dict.fromkeys([*(home[v] for v in op.inputs), *op.mutates])
    given = tuple(full[s] for s in reads if s not in op.updates)
    drawn = draw if op.random else -1
    results = {s: term("result", k, s, drawn, given) for s in made}
    writes = {s: term("write", k, s, drawn, given, full.get(s, -1)) for s in op.mutates}
    return results, writes


def _inside(graph: Graph) -> int:
    """What a called graph needs beyond its inputs, run in its order, each storage freed after its last use."""
    world = _World(graph)
    last: dict[int, int] = {}
    for k, op in enumerate(graph.ops):
        for v in (*op.inputs, *op.outputs):
            last[world.home[v]] = k
        for s in op.mutates:
            last[s] = k
    keep = world.static | {world.home[v] for v in graph.outputs}
    for k in range(len(graph.ops)):
        world.step(k, Step("compute", k))
        for s in [s for s in world.full if last.get(s, k) <= k and s not in keep]:
            del world.full[s]
    return max(0, world.peak - sum(map(world.size, world.static)))


def _end(world: _World, graph: Graph) -> list[str]:
    wrong = []
    if len(world.ran) != len(graph.ops):
        wrong.append(f"{len(graph.ops) - len(world.ran)} ops never run")
        return wrong
    keep = {world.home[v] for v in graph.outputs} | world.static
    for s in keep:
        if world.full.get(s) != world.expected.end[s]:
            wrong.append(f"storage {s} does not end with what it should")
    if set(world.full) != keep or world.packed or world.host or world.states:
        wrong.append("something else is left at the end")
    if world.effects != world.expected.effects or world.random != world.expected.random:
        wrong.append("effects or draws are not those of the graph")
    return wrong


def _sums(world: _World, graph: Graph, plan: Plan) -> list[str]:
    static = sum(map(world.size, world.static))
    stated = {
        "peak": (plan.peak, max(world.peak, static)),
        "static": (plan.static, static),
        "peak_before": (plan.peak_before, static + _inside(graph)),
    }
    wrong = [f"{name}: {said}, not {is_}" for name, (said, is_) in stated.items() if said != is_]
    seconds = seconds_of(graph, plan.steps)
    if abs(seconds - plan.time) > 1e-9 * max(seconds, plan.time):
        wrong.append(f"time: {plan.time}, not {seconds}")
    once = sum(op.time for op in graph.ops)
    if abs(once - plan.time_before) > 1e-9 * max(once, plan.time_before):
        wrong.append(f"time before: {plan.time_before}, not {once}")
    if plan.time_bound > seconds * (1 + 1e-6):
        wrong.append(f"the bound {plan.time_bound} is above the time {seconds}")
    if plan.digest != graph.digest:
        wrong.append("it is another graph's")
    if not 0 <= plan.moved <= len(graph.ops):
        wrong.append(f"{plan.moved} ops are said to move")
    if plan.host_budget is not None and max(plan.host, world.host_peak) > plan.host_budget:
        wrong.append(f"{max(plan.host, world.host_peak)} bytes on the host are above {plan.host_budget}")
    if not plan.residences and plan.host not in (0, world.host_peak):
        wrong.append(f"{plan.host} bytes on the host without a place")
    placed = static + plan.arena + plan.handed
    if plan.budget is not None and max(world.peak, placed) > plan.budget:
        wrong.append(f"{max(world.peak, placed)} bytes are above the budget of {plan.budget}")
    if plan.lower_bound > world.peak and plan.lower_bound > static:
        wrong.append(f"the bound {plan.lower_bound} is above the peak {world.peak}")
    return wrong


def seconds_of(graph: Graph, steps: Iterable[Step]) -> float:
    machine, end, clock = graph.machine, list[float](), {0: 0.0}
    for step in steps:
        begin = max([clock.get(step.stream, 0.0), *(end[w] for w in step.waits)])
        took = lost = 0.0
        if step.kind in ("compute", "recompute"):
            op = graph.ops[step.op]
            took = op.time + machine.state * (step.saves + 3 * (step.kind == "recompute" and op.random))
        elif step.kind != "free":
            for s in step.storages:
                took += machine.seconds(step.kind, graph.storages[s].size, step.codec)
                lost += machine.lost(graph.storages[s].size)
            if step.stream:
                begin = max(begin, clock[0])
                clock[0] += lost
        end.append(begin + took)
        clock[step.stream] = end[-1]
    return max(clock.values())


def _before(steps: tuple[Step, ...]) -> list[int]:
    """Of each step, a bit set of the steps that have surely ended when it begins: those of its stream, and those that
    it waits for. That stream 0 begins copies costs time, but is no wait."""
    ended: list[int] = []
    last: dict[int, int] = {}
    for i, step in enumerate(steps):
        begins = [*step.waits, *([last[step.stream]] if step.stream in last else [])]
        row = 0
        for w in begins:
            row |= ended[w] | 1 << w
        ended.append(row)
        last[step.stream] = i
    return ended


def _views(graph: Graph) -> dict[int, int]:
    """Values that are views of what was there, each with the op that makes it."""
    home, there, views = (
        [v.storage for v in graph.values],
        {graph.values[v].storage for v in graph.inputs},
        {},
    )
    for k, op in enumerate(graph.ops):
        for v in op.outputs:
            if home[v] in there and home[v] not in op.mutates:
                views[v] = k
        there |= {home[v] for v in op.outputs}
    return views


def _follows(graph: Graph, plan: Plan, before: list[int]) -> list[str]:
    """What has to have ended when an op begins, whatever it touches: ops that it waits for, that draw before it and
    that make its views."""
    at = {step.op: i for i, step in enumerate(plan.steps) if step.kind == "compute"}
    views, wrong, drawn = _views(graph), [], None
    for i, step in enumerate(plan.steps):
        if step.kind not in ("compute", "recompute"):
            continue
        op = graph.ops[step.op]
        needed = [at[views[v]] for v in op.inputs if v in views]
        if step.kind == "compute":
            needed += [at[c] for c in op.control]
            needed += [drawn] if op.random and drawn is not None else []
            drawn = i if op.random else drawn
        wrong += [f"step {i} has to follow step {j}" for j in needed if not before[i] >> j & 1]
    return wrong


def _touches(graph: Graph, step: Step) -> tuple[set[tuple[int, str]], set[tuple[int, str]]]:
    """Forms that a step reads, and those that it makes, writes or ends."""
    reads: set[tuple[int, str]] = set()
    writes: set[tuple[int, str]] = set()
    home = [v.storage for v in graph.values]
    if step.kind in ("compute", "recompute"):
        op = graph.ops[step.op]
        again = step.kind == "recompute"
        kept_out = set(op.updates) if again else set()
        reads = {(home[v], "full") for v in op.inputs}
        writes = {(s, "full") for s in op.mutates if s not in kept_out}
        made = {(home[v], "full") for v in op.outputs} - reads - writes
        writes |= {(s, "full") for s in step.storages} if again else made
        writes |= {(s, "full") for pair in step.reuses for s in pair}
        writes |= {(step.op, "state")} if step.saves else set()
        reads |= {(step.op, "state")} if again and op.random else set()
    elif step.kind == "free":
        writes = {(s, step.form) for s in (step.storages if step.form != "state" else (step.op,))}
    else:
        source, target = {
            "offload": ("full", "host"), "fetch": ("host", "full"),
            "compress": ("full", "packed"), "decompress": ("packed", "full"),
        }[step.kind]  # fmt: skip
        reads = {(s, source) for s in step.storages}
        writes = {(s, target) for s in step.storages}
    return reads, writes


def _races(graph: Graph, plan: Plan) -> list[str]:
    """Two steps that touch one form, one of them writing, on two streams, of which neither waits for the other."""
    if all(s.stream == 0 for s in plan.steps):
        return []
    before = _before(plan.steps)
    wrong = _follows(graph, plan, before)
    seen: dict[tuple[int, str], list[tuple[int, bool]]] = {}
    for i, step in enumerate(plan.steps):
        reads, writes = _touches(graph, step)
        for form in reads | writes:
            for j, wrote in seen.get(form, ()):
                if (wrote or form in writes) and not before[i] >> j & 1:
                    wrong.append(f"steps {j} and {i} race for {form}")
            seen.setdefault(form, []).append((i, form in writes))
        # What comes next is another stay; whether it may have these bytes is a question of places.
        ended = writes if step.kind == "free" else set()
        for form in (*ended, *((old, "full") for old, _ in step.reuses)):
            seen.pop(form, None)
    return wrong


def _places(graph: Graph, plan: Plan) -> list[str]:
    return faults_of_places(graph, plan, _before(plan.steps), _inside)


def _inner(plan: Plan, graph: Graph) -> list[str]:
    """Plans of what ops run inside themselves are plans, and what they need is in the ops' workspace."""
    wrong, need = [], Counter[int]()
    for row in plan.inner:
        wrong += faults(row.graph, row.plan)
        need[row.op] += max(0, row.plan.peak - row.plan.static)
    return wrong + [f"op {k} needs {n} bytes inside" for k, n in need.items() if n > graph.ops[k].workspace]
