"""Plans of JAX programs, level by level.

A level is a program: the step, the body of a loop, a branch, a shard. What its equations run inside is planned for
the bytes that are left where they run (`Planner`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax

from tightship.analysis.bounds import lower_bound
from tightship.cached import cached_property
from tightship.frontends.jax_function import on_values
from tightship.frontends.jax_ops import Ops
from tightship.frontends.jax_program import Equation, Program
from tightship.frontends.jaxpr import bytes_of
from tightship.graph import aligned
from tightship.integrations.jax_bodies import (
    ROWWISE,
    bodies_of,
    by_rows,
    devices_of,
    may_plan_inside,
    with_functions,
)
from tightship.integrations.jax_frames import Frame, Share, frame_of, policy_steps
from tightship.integrations.jax_invariants import constants_of, flops_moved_out, moved_out
from tightship.integrations.jax_pairs import Pair, PlannedPair, crossing_bytes, handed_on, pairs_of
from tightship.integrations.jax_policies import POLICIES, Steps, all_saved, block_names, unbeaten
from tightship.integrations.jax_schedules import (
    TIGHTENED,
    Schedules,
    check_steps,
    fused_peak,
    peak_of,
    whole_steps,
)
from tightship.simulate import baseline, replay

__all__ = ["Level", "Planner", "unplanned_bytes"]

_WORK, _OF_MANY = 4_000_000, 1_000_000
"""Ops that one search simulates at most: the same plan on every machine. The latter where loops hand on values: there
is a search for each part of these that is tried, and for each body."""
_SHARES = (1.0, 0.85, 0.7, 0.58, 0.47, 0.38, 0.3, 0.23, 0.17, 0.11, 0.05, 0.0)
"""Parts of what loops may hand on, or of the bytes there are for it, that are tried."""
_STRIDE = 3
"""Every third of them at first, then those beside the best."""


@dataclass(frozen=True)
class Level:
    """A program as planned: ``steps`` over ``ops``, their modeled ``peak`` beyond what is given, floating-point
    operations, and how many operations run again, inside of loops too."""

    ops: Ops
    steps: Steps
    peak: int
    flops: int
    again: int

    @cached_property
    def fused_peak(self) -> int:
        """The peak where XLA fuses what is made again."""
        return fused_peak(self.ops, self.steps)


_Planned = tuple[Level, PlannedPair | None]
_Way = Callable[[], _Planned]


@dataclass
class Planner:
    """Plans levels. ``log``: what was decided, in the order of the questions; ``given``: such a log, to decide it
    again as it was. ``hold``: how repetitions are held back (`on_values`). ``work``: ops that a search simulates.
    ``until``: seconds of the processor, after which no better part of what loops may hand on is looked for."""

    hold: str
    log: list[Any] = field(default_factory=list)
    given: Iterator[Any] | None = None
    work: int = _WORK
    until: float = math.inf
    schedules: Schedules = field(default_factory=Schedules)
    _inner: dict[int, tuple[Any, int]] = field(default_factory=dict)
    _handed: dict[Any, tuple[Any, PlannedPair, list[Any]]] = field(default_factory=dict)
    _pairs: dict[int, tuple[Program, tuple[Pair, ...]]] = field(default_factory=dict)
    _ops: dict[int, tuple[Program, Ops]] = field(default_factory=dict)
    _blocks: dict[int, tuple[Program, dict[str, Level]]] = field(default_factory=dict)
    _by_name: dict[Any, tuple[Program, Level, list[Any]]] = field(default_factory=dict)
    _least: dict[int, tuple[Ops, int]] = field(default_factory=dict)
    _crossing: dict[int, tuple[Ops, int]] = field(default_factory=dict)
    _best_parts: dict[int, tuple[Program, list[tuple[float, int]]]] = field(default_factory=dict)
    _missed: dict[int, tuple[Ops, list[tuple[Share, float, int]]]] = field(default_factory=dict)

    def level(self, program: Program, beyond: float) -> Level:
        """The program with the fewest operations within ``beyond`` bytes, as the model has it, or the one that
        takes least: loops hand on as large a part of what they may as there is room for."""
        pairs = self._pairs_of(program)
        if not pairs or beyond == math.inf:
            return self._at(program, pairs, beyond, 1.0)[0]
        if self.given is not None:
            share = next(self.given)
            self.log.append(share)
            return self._at(program, pairs, beyond, share)[0]
        return self._apart(_OF_MANY, lambda one: one._by_shares(program, pairs, beyond))

    def _apart(self, work: int, ask: Callable[[Planner], Level]) -> Level:
        """What a planner whose searches may do so much ``work`` answers; what it decided is logged here."""
        one = replace(self, log=[], work=work)
        level = ask(one)
        self.log.extend(one.log)
        return level

    def _by_shares(self, program: Program, pairs: Sequence[Pair], beyond: float) -> Level:
        """The best of the levels where loops hand on parts of what they may."""
        kept = self.log
        most = sum(crossing_bytes(p.joined, p.cut, p.begins) * p.length for p in pairs)
        shares = list(dict.fromkeys(part * min(1.0, beyond / max(1, most)) for part in _SHARES))
        tried: dict[int, tuple[bool, int, float, Level, list[Any]]] = {}

        def attempt(k: int) -> Level:
            if k not in tried:
                self.log = [shares[k]]
                level = self._at(program, pairs, beyond, shares[k])[0]
                short = level.peak > beyond
                tried[k] = (short, level.peak if short else level.flops, -shares[k], level, self.log)
            return tried[k][3]

        least = sum(e.flops for e in program.equations)
        begins = self._begins_at(program, beyond)
        first, best = attempt(begins[0] if begins else 0), -1
        for k in begins[1:]:
            attempt(k)
        if begins or first.peak > beyond or first.flops > least:
            fewest = math.inf
            for k in range(_STRIDE, len(shares) + _STRIDE - 1, _STRIDE) if not begins else ():
                found = attempt(min(k, len(shares) - 1))
                if found.peak <= beyond and found.flops >= fewest:
                    break  # less is handed on, and more is made again for it
                fewest = min(fewest, found.flops) if found.peak <= beyond else fewest
            while best != (best := min(tried, key=lambda k: tried[k][:3])) and not self._late:
                for k in (best - 1, best + 1):
                    if 0 <= k < len(shares):
                        attempt(k)
        self._best_parts.setdefault(id(program), (program, []))[1].append((beyond, max(0, best)))
        *_, level, log = min(tried.values(), key=lambda row: row[:3])
        self.log = [*kept, *log]
        return level

    @property
    def _late(self) -> bool:
        return time.process_time() > self.until

    def _begins_at(self, program: Program, beyond: float) -> list[int]:
        """The parts of what loops may hand on that were best for the nearest bytes that are more than these, and that
        are fewer: the best is one of them, or near. None where none are known for more, or for as many."""
        _, known = self._best_parts.get(id(program), (program, []))
        more = [row for row in known if row[0] >= beyond]
        fewer = [row for row in known if row[0] < beyond] if more else []
        return list(dict.fromkeys(k for _, k in (*sorted(more)[:1], *sorted(fewer)[-1:])))

    def policies(self, program: Program) -> list[str]:
        """The policies that save other results of a program each, and the ways to cut it into blocks that no other
        one beats by the model."""
        found: dict[tuple[bool, ...], str] = {}
        for policy in POLICIES:
            saves = getattr(jax.checkpoint_policies, policy)
            found.setdefault(tuple(all_saved(saves, (e.made for e in program.equations))), policy)
        return [
            *found.values(),
            *unbeaten({name: (x.flops, x.peak) for name, x in self.blocks(program).items()}),
        ]

    def blocks(self, program: Program) -> dict[str, Level]:
        """The ways to cut a program into blocks that are other programs each, as planned."""
        if id(program) not in self._blocks:
            kept, found = self.log, dict[tuple[int, int, int], tuple[str, Level]]()
            for name in block_names():
                self.log = []  # none of this is in what was decided before
                level = self.by_policy(program, name, math.inf)
                if level.again:
                    found.setdefault((level.flops, level.peak, level.again), (name, level))
            self.log = kept
            self._blocks[id(program)] = program, dict(found.values())
        return self._blocks[id(program)][1]

    def by_policy(self, program: Program, policy: str, beyond: float) -> Level:
        """The program as `jax.checkpoint` with a policy has it: around the bodies of its loops, if it has pairs of
        them, and planned for ``beyond`` bytes beside these; else around all that leads to its gradients."""
        key = id(program), policy, beyond
        if key not in self._by_name or self.given is not None:
            pairs = self._pairs_of(program)
            named = policy if self.given is None else next(self.given)
            work = _OF_MANY if pairs else self.work
            kept, self.log = self.log, [named]
            level = self._apart(work, lambda one: one._at(program, pairs, beyond, policy)[0])
            self._by_name[key] = program, level, self.log
            self.log = kept
        _, level, log = self._by_name[key]
        self.log.extend(log)
        return level

    def _at(
        self, program: Program, pairs: Sequence[Pair], beyond: float, share: Share, pair: Pair | None = None
    ) -> _Planned:
        """The level where loops hand on ``share``; of a pair's joined program, with its two halves."""
        given = program
        program = self._within(program)
        inside = 0
        if isinstance(share, str):
            program, inside = self._inside_by_policy(program, pairs, share)
        chosen = [(p, self._halves(p, math.inf, share)) for p in pairs]
        made = handed_on(program, chosen, self.hold)
        plain = not pairs and not inside and not any(e.inner for e in made.equations)
        ops = self._ops_of(given) if plain else Ops(_without_inner(made) if beyond < math.inf else made)
        policy = share if isinstance(share, str) and not pairs else None
        frame, steps = self._solved(ops, pair, share, beyond, policy)
        again = inside + sum(_repeats(p, h) for p, h in chosen)
        if beyond == math.inf or policy is not None:
            return self._level(ops, frame, steps, again)
        room = self._room(made, ops, frame, steps, beyond)
        short = {i for i, left in room.items() if made.equations[i].inner > left}

        def as_they_are() -> _Planned:
            if not any(e.inner for e in made.equations):
                return self._level(ops, frame_of(ops, pair, share, beyond), steps, again)
            whole = Ops(made)
            return self._level(whole, *self._solved(whole, pair, share, beyond), again)

        def within() -> _Planned:
            fewer = short if not isinstance(share, str) else set()
            rows = [
                (
                    p,
                    self._halves(p, max(0, room[p.backward]), share)
                    if {p.forward, p.backward} & fewer
                    else h,
                )
                for p, h in chosen
            ]
            planned, more = self._inside(handed_on(program, rows, self.hold), room, short)
            count = inside + more + sum(_repeats(p, h) for p, h in rows)
            whole = Ops(planned)
            if any(e.inner for e in planned.equations):
                return self._level(whole, *self._solved(whole, pair, share, beyond), count)
            return self._level(whole, frame_of(whole, pair, share, beyond), steps, count)

        if not short:
            return as_they_are()
        fewest = sum(frame.graph.ops[op].flops for _, op in steps)
        least = lower_bound(whole := Ops(made).graph) - whole.static_bytes
        return self._better(as_they_are if least <= beyond else None, within, beyond, fewest)

    def _better(self, as_they_are: _Way | None, within: _Way, beyond: float, fewest: int) -> _Planned:
        """Of the two ways to make room for what equations run inside the better one: less of what is there meanwhile,
        or less in there, by making more again inside. ``fewest``: operations without any of both."""
        ways = {False: as_they_are, True: within}
        if self.given is not None:
            which = bool(next(self.given))
            self.log.append(which)
            way = ways[which]
            if way is None:
                raise ValueError("no plan of this program")
            return way()
        kept, found = self.log, []
        for which, way in ways.items():
            if way is None:
                continue
            self.log = [which]
            made = way()
            over = made[0].peak > beyond
            found.append((over, made[0].peak if over else made[0].flops, which, made, self.log))
            if not over and made[0].flops <= fewest:
                break
        *_, made, log = min(found, key=lambda row: row[:3])
        self.log = [*kept, *log]
        return made

    def has_pairs(self, program: Program) -> bool:
        """Whether a program has loops or shard maps that hand values on to those of its backward pass."""
        return bool(self._pairs_of(program))

    def _pairs_of(self, program: Program) -> tuple[Pair, ...]:
        if id(program) not in self._pairs:
            self._pairs[id(program)] = program, pairs_of(program)
        return self._pairs[id(program)][1]

    def _ops_of(self, program: Program) -> Ops:
        if id(program) not in self._ops:
            self._ops[id(program)] = program, Ops(program)
        return self._ops[id(program)][1]

    def _level(self, ops: Ops, frame: Frame, steps: Steps, again: int) -> _Planned:
        graph = frame.graph
        own = [(twice, op) for twice, k in steps if (op := frame.op_of[k]) is not None]
        flops = sum(ops.graph.ops[op].flops for _, op in own)
        count = again + sum(twice for twice, _ in own)
        if frame.rest is None:
            return Level(ops, own, peak_of(graph, steps) - graph.static_bytes, flops, count), None
        full = whole_steps(graph, steps)
        line = replay(graph, full)
        at = next(k for k, (_, op) in enumerate(steps) if op == frame.rest)
        level_at = next(k for k, s in enumerate(full) if s.kind == "compute" and s.op == frame.rest)
        first = [(twice, op) for twice, k in steps[:at] if (op := frame.op_of[k]) is not None]
        second, ran = [], {op for _, op in first} if frame.one else set[int]()
        for _, k in steps[at + 1 :]:
            op = frame.op_of[k]
            if op is not None:
                second.append((op in ran, op))
                ran.add(op)
        static = graph.static_bytes
        parts = (line.during[:level_at], line.during[level_at + 1 :])
        peaks = [max(0, max(part, default=static) - static) for part in parts]
        level = Level(ops, own, max(peaks), flops, count)
        return level, PlannedPair(ops, tuple(first), tuple(second), peaks[0], peaks[1], again)

    def _halves(self, pair: Pair, beyond: float, share: Share) -> PlannedPair:
        """A pair's bodies where ``share`` of what they may is handed on, within ``beyond`` bytes each."""
        key = (id(pair.first.made), id(pair.second.made), share, beyond, self.work)
        if key not in self._handed or self.given is not None:
            kept, self.log = self.log, []
            planned = self._at(pair.joined, self._pairs_of(pair.joined), beyond, share, pair)[1]
            assert planned is not None
            self._handed[key] = pair, planned, self.log
            self.log = kept
        _, planned, log = self._handed[key]
        self.log.extend(log)
        return planned

    def _solved(
        self, ops: Ops, pair: Pair | None, share: Share, beyond: float, policy: str | None = None
    ) -> tuple[Frame, Steps]:
        """The plan of a level. Bodies of a pair that cannot be had within ``beyond`` bytes take what they must, and
        hand on no more for that."""
        if policy is not None:
            frame = frame_of(ops, pair, share, beyond)
            return frame, policy_steps(ops, frame, policy)
        if pair is None or beyond == math.inf:
            frame = frame_of(ops, pair, share, beyond, self._least_crossing(ops, pair, share))
            return frame, self._solve(frame)
        if self.given is not None:
            frame = frame_of(ops, pair, share, float(next(self.given)))
            return frame, self._solve(frame)
        _, missed = self._missed.setdefault(id(ops), (ops, []))
        known = [need for of, within, need in missed if _no_more(share, of) and beyond <= within]
        least = self._least_of(ops, pair) if self._too_few(ops, pair, beyond) else 0
        beyond, over = max(beyond, least, *known), math.inf
        for _ in range(1 + TIGHTENED):
            frame = frame_of(ops, pair, share, beyond, self._least_crossing(ops, pair, share))
            steps = self.schedules.within(frame.graph, beyond, self.work)
            need = peak_of(frame.graph, steps) - frame.graph.static_bytes
            if need <= beyond + (1 << 10):
                break
            missed.append((share, beyond, need))
            least = self._least_of(ops, pair)
            if beyond >= least:  # what is handed on is more than the share, whatever the bodies take
                if need - beyond >= over:
                    break
                over = need - beyond
            beyond = max(need, least)
        self.log += [float(frame.beyond), steps]
        return frame, steps

    def _too_few(self, ops: Ops, pair: Pair, beyond: float) -> bool:
        """Whether bodies of a pair are known to take more, whatever is handed on."""
        if id(ops) in self._least:
            return beyond < self._least[id(ops)][1]
        graph = frame_of(ops, pair, 0.0, 0.0).graph
        return beyond < lower_bound(graph) - graph.static_bytes

    def _least_of(self, ops: Ops, pair: Pair) -> int:
        """The bytes that bodies of a pair take whatever is handed on, as near as plans come."""
        if id(ops) not in self._least:
            graph = frame_of(ops, pair, 0.0, 0.0).graph
            self._least[id(ops)] = (
                ops,
                peak_of(graph, self.schedules.within(graph, 0.0, self.work)) - graph.static_bytes,
            )
        return self._least[id(ops)][1]

    def _least_crossing(self, ops: Ops, pair: Pair | None, share: Share) -> int:
        """The bytes that a pair hands on at least, with what comes between, as near as plans come. Shares with less
        are asked for as many: what could not be met anyhow is one question, and no search for the least of it all."""
        if pair is None or self.given is not None or isinstance(share, str) or share == 1.0:
            return 0
        if id(ops) not in self._crossing:
            frame = frame_of(ops, pair, 0.0, math.inf)
            steps = self.schedules.within(frame.graph, frame.beyond, self.work)
            taken = peak_of(frame.graph, steps) - frame.graph.static_bytes
            self._crossing[id(ops)] = ops, taken - frame.graph.ops[frame.rest or 0].workspace
        return self._crossing[id(ops)][1]

    def _solve(self, frame: Frame) -> Steps:
        if self.given is not None:
            steps = [(bool(twice), int(op)) for twice, op in next(self.given)]
            check_steps(frame.graph, steps)
        else:
            steps = self.schedules.within(frame.graph, frame.beyond, self.work)
        self.log.append(steps)
        return steps

    # --- what equations run inside ---

    def _measured(self, e: Equation) -> Equation:
        """An equation with the bytes that it takes inside, unplanned. XLA writes the gradient of a pooling for CPUs
        with an array of indices for each of four dimensions, and a window's five results."""
        key = id(e.bodies or e.made)
        if e.name == "select_and_scatter_add" and jax.default_backend() == "cpu":
            source, operand = (math.prod(x.aval.shape) for x in e.made.invars[:2])
            return replace(e, inner=16 * operand + 20 * source) if e.instead is None else e
        if (
            e.inner
            or (e.instead is not None and not e.bodies)
            or e.name not in ("scan", "while", "cond", "shard_map")
        ):
            return e
        if key not in self._inner:
            bodies = [self._within(b) for b in bodies_of(e)]
            moved = [moved_out(b, constants_of(e), unplanned_bytes) for b in bodies]
            rows = zip(bodies, moved, strict=True)
            most = max(
                (unplanned_bytes(b) - _given_out(e, b) if out is None else out for b, out in rows), default=0
            )
            self._inner[key] = e.bodies or e.made, most * devices_of(e)
        return replace(e, inner=self._inner[key][1])

    def unplanned(self, program: Program) -> int:
        """What a program takes beyond what it is given, run as it is, with what its loops take inside."""
        return unplanned_bytes(self._within(program))

    def _within(self, program: Program) -> Program:
        return replace(program, equations=[self._measured(e) for e in program.equations])

    def _room(self, program: Program, ops: Ops, frame: Frame, steps: Steps, beyond: float) -> dict[int, int]:
        """Bytes left for what runs inside of equations, where these run."""
        full = whole_steps(frame.graph, steps)
        line = replay(frame.graph, full)
        found = {}
        for k, step in enumerate(full):
            op = frame.op_of[step.op] if step.kind in ("compute", "recompute") else None
            i = None if op is None else ops.members[op][-1]
            if i is not None and i not in found and program.equations[i].inner:
                found[i] = int(beyond) - (line.during[k] - frame.graph.static_bytes)
        return found | {i: int(beyond) for i, e in enumerate(program.equations) if e.inner and i not in found}

    def _inside(self, program: Program, room: dict[int, int], short: set[int]) -> tuple[Program, int]:
        """The program with the bodies of its equations ``short`` of bytes planned, and how much runs again."""
        equations, again = list(program.equations), 0
        for i in sorted(short):
            e = equations[i]
            if e.name in ROWWISE:
                equations[i] = by_rows(e, room[i])
            equations[i], more = self._with_levels(
                equations[i], partial(self._body_in, max(0, room[i] // devices_of(e)))
            )
            again += more
        return replace(program, equations=equations), again

    def _body_in(self, left: int, body: Program, own: int) -> Level:
        return self.level(body, left + own)

    def _inside_by_policy(self, program: Program, pairs: Sequence[Pair], policy: str) -> tuple[Program, int]:
        """The program with a policy in the bodies that have a backward pass of their own, as where gradients are
        accumulated, and how much runs again."""
        equations, again = list(program.equations), 0
        for i in set(range(len(equations))) - {k for p in pairs for k in (p.forward, p.backward)}:
            if any(x.backward for body in bodies_of(equations[i]) for x in body.equations):
                equations[i], more = self._with_levels(
                    equations[i], lambda body, _: self._at(body, self._pairs_of(body), math.inf, policy)[0]
                )
                again += more
        return replace(program, equations=equations), again

    def _with_levels(self, e: Equation, level_of: Callable[[Program, int], Level]) -> tuple[Equation, int]:
        """An equation with its bodies as planned, if these then take less, and how much runs again. ``level_of``: a
        body as planned, which makes so many bytes that are the equation's results."""
        bodies = bodies_of(e)
        if not bodies or not may_plan_inside(e):
            return e, 0
        many = devices_of(e)
        given_out = [_given_out(e, body) for body in bodies]
        levels = [level_of(body, own) for body, own in zip(bodies, given_out, strict=True)]
        inner = max(level.peak - own for level, own in zip(levels, given_out, strict=True)) * many
        if inner >= e.inner:
            return e, 0
        alike = constants_of(e)
        functions = [on_values(level.ops, level.steps, self.hold, alike=alike) for level in levels]
        n = int(e.made.params["length"]) if e.name == "scan" else 1
        more = n * sum(level.flops for level in levels) - replace(e, more=0).flops
        held = sum(flops_moved_out(body, alike) for body in bodies) * max(1, n - 1)
        made = replace(
            e,
            instead=with_functions(e, functions),
            bodies=(),
            inner=inner,
            more=held + (more if e.name != "while" else e.more),
        )
        return made, sum(level.again for level in levels)


def unplanned_bytes(program: Program) -> int:
    """What a program takes beyond what it is given, run as it is."""
    graph = Ops(program).graph
    return replay(graph, baseline(graph)).peak - graph.static_bytes


def _given_out(e: Equation, body: Program) -> int:
    """Bytes that a body makes and that are an equation's results as they are: a branch's. What a loop carries is
    written anew in each iteration."""
    if e.name != "cond":
        return 0
    made = {v for x in body.equations for v in x.outputs}
    return sum(aligned(bytes_of(body.avals[v])) for v in body.results() & made)


def _without_inner(program: Program) -> Program:
    return replace(program, equations=[replace(e, inner=0) if e.inner else e for e in program.equations])


def _no_more(share: Share, of: Share) -> bool:
    """Whether loops may hand on no more with one share than with another."""
    return share == of if isinstance(share, str) or isinstance(of, str) else share <= of


def _repeats(pair: Pair, planned: PlannedPair) -> int:
    """Operations of a pair that run again: of the first body in the second, and any twice in one."""
    ops = planned.ops
    twice = sum(again for again, _ in (*planned.first, *planned.second))
    return (
        planned.inside
        + twice
        + sum(ops.members[op][-1] < pair.cut for again, op in planned.second if not again)
    )
