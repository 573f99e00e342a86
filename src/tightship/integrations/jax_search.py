"""The search of `jax_fit`: programs for a budget, planned and then corrected by what XLA says of them.

XLA places and fuses on its own, so what was planned for is corrected by its analysis of each program that was
compiled, cheaply: without fast code for the processor, which decides nothing about memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import msgspec

from tightship.analysis.bounds import lower_bound
from tightship.cached import cached_property
from tightship.errors import Infeasible
from tightship.frontends.jax_function import on_values
from tightship.frontends.jax_program import Program
from tightship.integrations.jax_compiled import Memory, compile_for, look_at, memory_of, scheduled_text
from tightship.integrations.jax_levels import Level, Planner, unplanned_bytes
from tightship.integrations.jax_peak import largest_at_peak
from tightship.integrations.jax_policies import is_policy

__all__ = ["Archive", "Candidate", "Row", "Search"]


@dataclass(frozen=True)
class Candidate:
    """A program that was compiled to be looked at. ``log``: how it was decided, for ``beyond`` bytes; ``order``:
    in XLA's order for memory; ``operations``: as XLA counts them, where it is within the limit; ``which``: of the
    search's programs."""

    lowered: Any
    memory: Memory
    order: bool
    level: Level
    beyond: float
    log: list[Any]
    operations: float = 0.0
    which: int = 0


def _key(level: Level, log: list[Any]) -> str:
    """Names the program that a log leads to: bytes that were asked for do not matter, but by how many parts of a
    batch are computed at a time, which the peak tells."""
    return repr([level.peak, *(x for x in log if not isinstance(x, float))])


@dataclass(frozen=True)
class _Policy:
    """A policy's program, planned beside its loops for ``beyond`` bytes; ``planned``: for what there is, or that has
    been done, or there are none; ``takes``: bytes by the model."""

    name: str
    level: Level
    beyond: float
    log: list[Any]
    planned: bool
    takes: int

    @cached_property
    def least(self) -> int:
        """Bytes that it takes by the model, however it is planned beside its loops."""
        graph = self.level.ops.graph
        return self.takes if self.planned else lower_bound(graph) - graph.static_bytes


class Row(msgspec.Struct, frozen=True):
    """A candidate on disk, and the budgets whose answer it is. ``which``: of the search's programs."""

    total: int
    flops: int
    beyond: float
    order: bool
    log: list[Any]
    budgets: tuple[str, ...] = ()
    which: int = 0


class Archive(msgspec.Struct, frozen=True):
    """What is known of a step: of its programs those that no other one beats in bytes and operations, whatever budget
    they were looked at for, and what answers a budget."""

    before: tuple[int, int, int, int]
    operations_before: float
    rows: tuple[Row, ...]


_AT_LEAST, _TRIES = 2, 4
"""Plans that are looked at however long it takes, and at most once one is within the budget; twice as many before."""
_NEAR, _CHEAP, _WORTH = 0.95, 1.005, 0.002
"""A plan that needs at least this part of the budget's temporaries, or at most this many times the operations that
must be, is not improved upon; nor is one that what it leaves of the budget would save at most this part of them, if
each byte saved as many as those that were taken from the step cost."""
_LEFT_OUT = 0.9
"""Part of what XLA takes for the step as it is that the model has for it without what loops take inside, at least,
for that to be left out of the bytes that the first plan is asked to take."""
_SPARED = 0.88
"""Part of the budget's temporaries that the first plan of a step without loops is to take, where that costs next to
nothing by the model: XLA makes up to a seventh more of it."""
_AIM = 0.97
"""Part of the budget's temporaries that the next plan is to take, after one that took more."""
_ALMOST, _MAYBE = 2.0, 1.15
"""How far from the budget's temporaries a policy's program may be that is looked at all the same: by the model, and
by what XLA made of plans of the model."""
_ALIKE, _UNLIKE = 1.15, 1.3
"""How far beyond the budget's temporaries a policy's program may be expected to be, to be looked at: by what XLA made
of another program of that policy, and by the least part of the model's bytes that it made of any program."""
_CHEAPER = 0.98
"""Part of the operations of what else there is that a policy takes at most for the former to be enough."""
_CLOSE, _ANYHOW, _OF_LOOPS = 1.1, 1.08, 1.15
"""How far a program in the one of XLA's orders may be for the other one to be tried: by what that took before, and of
a small program whatever it took, without loops and with them."""
_FAR = 1.75
"""How many times the budget's temporaries a program may take in one of XLA's orders to be looked at in the other."""
_UNTRUE = 1.5
"""How many times the model's bytes XLA may take for the first plan of a step without loops that is not small, for the
next one to be planned by the model: beyond it, policies say sooner what XLA makes less of."""
_SMALL = 500
"""Equations of a program that is soon looked at: twice as many plans are."""
_LEAST = 0.5
"""Part of the budget's temporaries that a plan is asked to take, before it is asked for the least there is."""
_LESS = 0.99
"""Part of what others took that a plan takes, at most, for less to be asked for again where the model has no less."""
_UPWARDS = (0.15, 0.4, 1.0)
"""Parts of the way from the most bytes that plans were asked to take to those of the step as it is: where none is
within the budget, plans for these are looked at."""
_BETWEEN = (1 / 3, 2 / 3)
"""Parts of the way from the least plan there is to the most bytes that plans were asked to take, likewise."""
_SLOPES = (0.5, 0.9, 1.0)
"""What a byte less in a plan saves in the program, at least, at first, and at most."""
_ENDLESS = 1e300
"""Stands for bytes without a limit on disk: JSON has no word for it."""
_WRONG = 3
"""How often a program that takes more than its look said is replaced."""


@dataclass
class Search:
    """Programs within ``limit`` bytes, for what bytes the model must be given so that XLA's total is within it.
    ``programs``: the step in several orders, of which the next is planned where nothing of those before is within it.
    ``told``: what the caller gave to `jax.jit`, and where arguments and results lie (`placed_as`).
    ``least``: the fewest bytes that were reached for other budgets. ``compiling``: seconds of the processor that XLA
    took for the program that runs."""

    programs: tuple[Program, ...]
    leaves: list[Any]
    donated: tuple[int, ...]
    limit: int
    before: Memory
    until: float
    operations: float = 0.0
    told: dict[str, Any] = field(default_factory=dict)
    least: float = math.inf
    tried: list[int] = field(default_factory=list)
    compiling: float = 0.0
    found: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        cpu = jax.default_backend() == "cpu"
        self.planner = Planner("select" if cpu else "barrier")
        self._orders: tuple[bool, ...] = (True, False) if cpu else (False,)
        self._other = math.inf
        self._more = 0
        # The program that takes least, with its text for what is said of its peak: one, as texts are long.
        self._nearest: tuple[Candidate | None, str] = (None, "")
        self._small = len(self.programs[0].equations) <= _SMALL
        self._flops = sum(e.flops for e in self.programs[0].equations)
        self._scale = 1.0
        self._begin(0)

    def _begin(self, which: int) -> None:
        """What is looked at from now on is made of another of the programs."""
        self.which, self.program = which, self.programs[which]
        self._results = self.before.results if self.program.in_place else self.before.outputs
        self._looks: dict[tuple[str, bool], Candidate] = {}
        self._last: tuple[float, int] | None = None
        self._policies: list[_Policy] | None = None
        self._levels: dict[float, tuple[Level, list[Any]]] = {}
        self.planner.until = self.until

    @property
    def room(self) -> int:
        """Bytes for temporaries, by a look."""
        return max(0, self.limit - self._more - self.before.static)

    def run(self) -> tuple[Candidate, Any]:
        """The program with the fewest operations of those within the limit, and what XLA compiled of it. Raises
        ``Infeasible``."""
        span = self.until - time.process_time()
        for which in range(len(self.programs)):
            if which and self.fitting():
                break
            self._begin(which)
            self._look_around()
            self.until = time.process_time() + max(0.0, span)  # what one of them takes, the next has, too
        least = int(min((self.before.total, self.least, *self.tried)))
        for _ in range(_WRONG):
            fits = self.fitting()
            if not fits:
                break
            best = min(fits, key=lambda c: (c.level.flops, c.operations, c.memory.total))
            began = time.process_time()
            compiled = compile_for(best.lowered, memory=best.order, quick=False)
            self.compiling = time.process_time() - began
            total = memory_of(compiled).total
            if total <= self.limit:
                return best, compiled
            wrong = total - best.memory.total
            self._more = max(self._more, wrong)
            self.found.remove(best)
            beyond = min(best.beyond, float(best.level.peak)) - 1.1 * wrong * self._scale
            self.which, self.planner.log = best.which, []
            self.look(self.planner.level(self.programs[best.which], max(0.0, beyond)), max(0.0, beyond))
        at, top = self._peak(least)
        raise Infeasible(
            budget=self.limit, lower_bound=self.before.static, best_peak=least, top=top, at=at, compiled=True
        )

    def _peak(self, total: int) -> tuple[str, list[tuple[str, int, str]]]:
        """What makes up the peak of the program that takes ``total`` bytes, if it was looked at here."""
        best = min(self.found, key=lambda c: c.memory.total, default=None)
        if best is None or best.memory.total > total:
            return "", []
        of, module = self._nearest
        at, rows = largest_at_peak(module if of is best else scheduled_text(best.lowered, memory=best.order))
        return at, [("arguments and results", self.before.static, ""), *rows] if rows else []

    def _look_around(self) -> None:
        """Plans, and the policies that may be better."""
        self._planned()
        least, most = math.inf, self._almost
        if fits := self.fitting():
            least = min(c.level.flops for c in fits)
            if any(self._best_of_all(c) for c in fits if c.level.flops == least):
                return
            made = min(max(1, c.memory.temporaries) / self._takes(c.level) for c in self.found)
            most = _MAYBE * self.room / made
        self._by_policies(least, most)
        if not self.fitting() and self.before.total > self.limit:
            self._elsewhere()

    @property
    def _loops(self) -> bool:
        """Whether the program has loops, or shard maps, that hand values on to those of its backward pass, or is
        divided among devices: what the model has is roughly what XLA makes of it."""
        return self.planner.has_pairs(self.program) or "in_shardings" in self.told

    @property
    def _almost(self) -> float:
        """Bytes by the model of what may be within the budget by XLA's count, at most."""
        return (_ALMOST * self.room + self._results) * self._scale

    def fitting(self) -> list[Candidate]:
        return [c for c in self.found if c.memory.temporaries <= self.room]

    def _planned(self) -> None:
        """Plans for bytes that follow from what XLA made of the plan before."""
        low, high, unplanned = 0.0, math.inf, float(unplanned_bytes(self.program))
        if "in_shardings" in self.told:  # the model's bytes are those of whole arrays, XLA's are one device's
            placed = max(1, self.before.temporaries + self._results)
            self._scale = max(1.0, unplanned / placed)
            unplanned /= self._scale
        scale = self._scale
        beyond = self._begins_with(unplanned)
        more = self._begins_with(self.planner.unplanned(self.program) / scale)
        if unplanned < _LEFT_OUT * self.before.temporaries:
            beyond, more = more, 0.0
        if beyond >= unplanned and self._level(math.inf).peak <= beyond * scale:
            beyond = math.inf  # not so where the step's own checkpoints make less of it
        else:
            beyond = self._with_reserve(beyond)
        most = 2 * _TRIES if self._small else _TRIES
        for tries in range(2 * _TRIES):
            late = tries >= (_AT_LEAST if low > 0 else _TRIES) and time.process_time() > self.until
            fits = self.fitting()
            if self.room <= 0 or (fits and ((low > 0 and tries >= most) or late)):
                break
            level = self._level(beyond)
            peak = level.peak / scale
            if self._last is not None and low == 0 and (self._loops or not self._costs_nothing(level)):
                planned, compiled = self._last
                self._by_policies(level.flops, _MAYBE * self.room * scale * planned / max(1, compiled))
                fits, level = self.fitting(), self._level(beyond)
            if tries and level.flops > min((c.level.flops for c in fits), default=math.inf) and low == 0:
                break
            takes, known = min(beyond, peak), len(self._looks)
            made = self.look(level, beyond * scale)
            if not tries and self._untrue(made):
                self._by_policies(math.inf, self.room * scale, _FAR)
                if self.fitting():
                    break
            if peak > beyond and more > max(beyond, peak) and not self.fitting():
                # By the model nothing is within so little: what loops take inside counts beside the results, and XLA
                # puts the one into the other.
                beyond, more, self._last, self._other = more, 0.0, None, math.inf  # this once
                continue
            least = min((c.memory.temporaries for c in self.found if c is not made), default=0)
            far = peak > _CLOSE * beyond and made.memory.temporaries > _CLOSE * self.room
            if peak > beyond and (
                far or len(self._looks) == known or made.memory.temporaries > _LESS * least > 0
            ):
                break  # the least there is, again
            spare = self.room - made.memory.temporaries
            if spare >= 0:
                low = max(low, takes)
                if self._cheap(made) or made.memory.temporaries >= _NEAR * self.room:
                    break
                following = min(min(beyond, high) + 0.9 * spare, (low + high) / 2)
                low, following = self._with_fewer_operations(low, following, high)
                if following <= low:
                    break
            elif low > 0:
                high = min(high, takes)
                following = (low + high) / 2
            else:
                high = min(high, takes)
                following = min(0.97 * takes, self._lower(takes, made.memory.temporaries))
                following = max(following, _LEAST * self.room) if beyond > _LEAST * self.room else 0.0
            if beyond == 0.0 or following < 0 or abs(following - beyond) < 0.01 * following:
                break
            beyond = following

    def _level(self, beyond: float) -> Level:
        """The plan for so many bytes, by XLA's measure; what it decided is the planner's log."""
        if beyond not in self._levels:
            self.planner.log = []
            level = self.planner.level(self.program, beyond * self._scale)
            self._levels[beyond] = level, self.planner.log
        level, self.planner.log = self._levels[beyond]
        return level

    def _untrue(self, made: Candidate) -> bool:
        """Whether XLA makes so much more of a plan than the model that further plans would be guesses."""
        if self._small or self._loops:
            return False
        return made.memory.temporaries > max(self.room, _UNTRUE * made.level.peak)

    def _costs_nothing(self, level: Level) -> bool:
        """Whether next to nothing runs again by the model."""
        return level.flops <= _CHEAP * self._flops

    def _with_reserve(self, beyond: float) -> float:
        """The bytes to plan for at first: fewer than ``beyond``, where that costs next to nothing. Plans of loops are
        many searches each, and XLA makes less of them than the model."""
        parts = (1.0, _SPARED) if self.room > 0 and not self._loops else ()
        for less in (part * self.room for part in parts):
            level = self._level(less) if less < beyond else None
            if level is not None and (level.peak > less * self._scale or not self._costs_nothing(level)):
                break
            beyond = min(beyond, less)
        return beyond

    def _with_fewer_operations(self, low: float, following: float, high: float) -> tuple[float, float]:
        """Between the most bytes ``low`` whose plan is within the budget and the least ``high`` whose plan is not:
        those to plan for next, or ``low`` if there are none. A plan with as many operations as the best is no better,
        wherever XLA has it."""
        fewest = min(c.level.flops for c in self.fitting())
        while high < math.inf and self._level(following).flops >= fewest:
            low, following = following, (following + high) / 2
            if following - low < 0.01 * following or self._late:
                return low, low
        return low, following

    def _begins_with(self, unplanned: float) -> float:
        """The bytes to plan for at first, where the step as it is takes ``unplanned`` by the model: those there are
        for temporaries, and those of results as far as XLA has temporaries in them, or the model other ones."""
        more = int(unplanned) - self.before.temporaries
        return float(self.room + min(self._results, max(0, more)))

    def _cheap(self, made: Candidate) -> bool:
        """Whether next to nothing is left to win by another plan: by the model, and by XLA's count, which has the
        body of a loop once."""
        of_model = made.level.flops / max(1, self._flops) - 1
        counted = made.operations / self.operations - 1 if self.operations and not self._loops else 0.0
        dear, took = max(of_model, counted), made.memory.temporaries
        return dear <= _CHEAP - 1 or dear * (self.room - took) <= _WORTH * (self.before.temporaries - took)

    def _best_of_all(self, made: Candidate) -> bool:
        """Whether no policy would be better. Those of loops are soon looked at, and what plans of them cost does not
        say what policies do."""
        return self._costs_nothing(made.level) if self._loops else self._cheap(made)

    def _lower(self, takes: float, made: int) -> float:
        """The bytes to plan for after a plan that ``takes`` so many, of which XLA made too many: by how much the
        program shrank for each byte that was taken from the plan before it; at first as much as by their ratio, or
        less."""
        least, first, most = _SLOPES
        before, self._last = self._last, (takes, made)
        short = made - _AIM * self.room
        if before is None or before[0] <= takes:
            by_ratio = takes * (1 - short / made) if made > takes else 0.0
            return max(takes - short / first, by_ratio)
        return takes - short / min(most, max(least, (before[1] - made) / (before[0] - takes)))

    def _by_policies(self, flops: float, most: float, unlike: float = _UNLIKE) -> None:
        """What the policies of `jax.checkpoint` make of the step, those with at most ``flops`` that take at most
        ``most`` bytes by the model, up to the first that is within the budget: what is planned is never behind.
        ``unlike``: as `_hopeless` has it."""
        if self.before.total <= self.limit or self.room <= 0:
            return
        if self._policies is None:
            self._policies = list(self._of_policies())
        passed: list[_Policy] = []
        while self._policies:
            row = min(self._policies, key=lambda row: row.level.flops)
            if row.level.flops > flops:
                break
            self._policies.remove(row)
            if self._hopeless(row.least, unlike if most < math.inf else _FAR, row.name):
                passed.append(row)
                continue
            if not row.planned and row.level.peak > self.room * self._scale and not self._late:
                self._policies.append(self._policy(row.name, self.room * self._scale))
                row = replace(row, planned=True)
            far = max(most, self._almost) if row.level.flops < _CHEAPER * flops else most
            if row.takes > far or self._hopeless(row.takes, _FAR, row.name):
                passed.append(row)
                continue
            self.planner.log = row.log
            if self.look(row.level, row.beyond).memory.temporaries <= self.room:
                break
        self._policies += passed

    def _hopeless(self, peak: int, unlike: float, name: str = "") -> bool:
        """Whether XLA's other programs say that one with such a ``peak``, of a policy by ``name``, is far above the
        budget."""
        made = [(c.log[:1] == [name], c.memory.temporaries / self._takes(c.level)) for c in self.found]
        own, any_one = (min((r for of, r in made if of or not alike), default=0.0) for alike in (True, False))
        # One program that took more says little of others, of which none would be left.
        if unlike == _FAR and not self._loops:
            any_one = min(any_one, 1.0)
        return self.room < peak * max(own / _ALIKE, any_one / unlike)

    def _takes(self, level: Level) -> int:
        """Bytes that a program takes by the model. Around loops XLA fuses little of what is there at the peak."""
        return max(1, level.peak if self._loops else level.fused_peak)

    def _of_policies(self) -> Iterator[_Policy]:
        """The policies' levels, as `jax.checkpoint` has them. Where one takes more than there is by the model, what
        is beside the loops is planned for that, too, once it could be the best: it makes no less again then."""
        made = set[tuple[int, int, int]]()
        for policy in self.planner.policies(self.program):
            row = self._policy(policy, math.inf)
            level = row.level
            if (is_like := (level.flops, level.peak, level.again)) not in made:  # else the same program
                made.add(is_like)
                yield row

    def _policy(self, name: str, beyond: float) -> _Policy:
        self.planner.log = []
        level = self.planner.by_policy(self.program, name, beyond)
        planned = beyond < math.inf or not self._loops
        return _Policy(name, level, beyond, self.planner.log, planned, self._takes(level))

    def look(self, level: Level, beyond: float) -> Candidate:
        """The program of a level, as XLA orders it in the way that took less before; where that is not within the
        budget, in the other one, too: the first time, and where the other may be within it."""
        log = self.planner.log
        key = _key(level, log)
        for order in self._orders:
            made = [c for (k, _), c in self._looks.items() if k == key]
            least = min((c.memory.temporaries for c in made), default=0)
            if any(c.order == order for c in made) or (
                made and not self.room < least <= self._near * self.room
            ):
                continue
            lowered = made[0].lowered if made else self.lower(level)
            self._look_in(order, Candidate(lowered, self.before, order, level, beyond, log, which=self.which))
        made = sorted((c for (k, _), c in self._looks.items() if k == key), key=lambda c: c.memory.total)
        if len(made) > 1:
            self._orders = tuple(c.order for c in made)
            self._other = _CLOSE * made[0].memory.temporaries / max(1, made[1].memory.temporaries)
        return made[0]

    def _look_in(self, order: bool, of: Candidate) -> Candidate:
        memory, operations, module = look_at(of.lowered, memory=order, counted_within=self.limit)
        made = replace(of, memory=memory, order=order, operations=operations)
        if module and memory.total < min(self.tried, default=math.inf):
            self._nearest = made, module
        self.tried.append(memory.total)
        self._looks[_key(of.level, of.log), order] = made
        self.found.append(made)
        return made

    def _elsewhere(self) -> None:
        """Where nothing is within the budget: XLA places temporaries in results, too, and does not take less of all
        that takes less by the model. So plans between those that were asked for are looked at, then the policies'
        programs, however far the model has them, plans for more bytes, and all of them in XLA's other order."""
        if self.room <= 0:
            return
        planned = [c for c in self.found if c.which == self.which and c.beyond < math.inf]
        asked = max((c.beyond for c in planned), default=math.inf)
        least = min((float(c.level.peak) for c in planned), default=math.inf)
        self._at_parts(least, asked, _BETWEEN, anyhow=1)
        if not self.fitting():
            self._by_policies(math.inf, math.inf)
            self._by_blocks()
        self._at_parts(asked, float(unplanned_bytes(self.program)), _UPWARDS)
        if not self.fitting():
            self._in_other_order()

    def _at_parts(self, low: float, high: float, parts: Sequence[float], anyhow: int = 0) -> None:
        """Plans for parts of the way from ``low`` bytes to ``high``, up to the first that is within the budget;
        ``anyhow``: so many however late it is."""
        for k, part in enumerate(parts if low < high else ()):
            if self.fitting() or (k >= anyhow and self._late):
                return
            beyond = math.inf if part == 1.0 else low + part * (high - low)
            self.planner.log = []
            level = self.planner.level(self.program, beyond)
            if k < anyhow or self._loops or not self._hopeless(self._takes(level), _FAR):
                self.look(level, beyond)

    def _by_blocks(self) -> None:
        """All ways to cut the step into blocks, in both of XLA's orders, the better one first, up to the first that
        is within the budget: the model does not know which of them XLA makes least of. Those that are far above it in
        the one order are not looked at in the other."""
        rows = sorted(self.planner.blocks(self.program).items(), key=lambda row: row[1].flops)
        if not self._loops:  # of which the model says less
            rows = [
                (name, level) for name, level in rows if not self._hopeless(self._takes(level), _FAR, name)
            ]
        for order in sorted(self._orders, key=self._least_in):
            for name, level in rows:
                if self.fitting() or self._late:
                    return
                key = _key(level, [name])
                there = self._looks.get((key, not order))
                if there is not None and there.memory.temporaries > _FAR * self.room:
                    continue
                if (key, order) not in self._looks:
                    made = self.lower(level)
                    of = Candidate(made, self.before, order, level, math.inf, [name], which=self.which)
                    self._look_in(order, of)

    def _least_in(self, order: bool) -> float:
        """The fewest bytes of temporaries of programs in one of XLA's orders."""
        return min((c.memory.temporaries for c in self.found if c.order == order), default=math.inf)

    @property
    def _late(self) -> bool:
        return time.process_time() > self.until

    def _in_other_order(self) -> None:
        """The program that takes least in XLA's other order, which one look at the start may have ruled out, and, if
        that is less, those with the fewest operations, up to the first that is within the budget."""
        alone = [
            c
            for c in self.found
            if c.which == self.which and (_key(c.level, c.log), not c.order) not in self._looks
        ]
        if len(self._orders) == 1 or not alone:
            return
        nearest = min(alone, key=lambda c: c.memory.temporaries)
        made = self._look_in(not nearest.order, nearest)
        if made.memory.temporaries >= nearest.memory.temporaries:
            return
        for c in sorted(alone, key=lambda c: (c.level.flops, c.memory.temporaries)):
            if c is not nearest:
                made = self._look_in(not c.order, c)
            if made.memory.temporaries <= self.room or self._late:
                return

    @property
    def _near(self) -> float:
        anyhow = _OF_LOOPS if self._loops else _ANYHOW
        return max(self._other, anyhow) if self._small else self._other

    def lower(self, level: Level) -> Any:
        run = on_values(level.ops, level.steps, self.planner.hold)
        jitted = jax.jit(run, donate_argnums=self.donated, **{"keep_unused": True, **self.told})
        return jitted.lower(*self.leaves)

    def seed(self, row: Row) -> None:
        """Looks at a program that was found for another budget. Raises what `again` does."""
        level = self.again(row)
        self.which, self.planner.log = row.which, row.log
        self.look(level, row.beyond)

    def archive(self, known: Archive | None, best: Candidate | None, budget: str) -> Archive:
        """What is ``known`` and what was found, with ``best`` as the answer to a budget."""
        b, rows = self.before, list(known.rows) if known else []
        rows = [msgspec.structs.replace(x, budgets=tuple(n for n in x.budgets if n != budget)) for x in rows]
        for c in self.found:
            answers = (budget,) if c is best else ()
            beyond = min(c.beyond, _ENDLESS)
            rows.append(Row(c.memory.total, c.level.flops, beyond, c.order, c.log, answers, c.which))
        kept: list[Row] = []
        for x in sorted(rows, key=lambda x: (x.total, x.flops)):
            if x.budgets or all(x.flops < k.flops for k in kept):
                kept.append(x)
        return Archive((b.arguments, b.outputs, b.aliased, b.temporaries), self.operations, tuple(kept))

    def again(self, row: Row) -> Level:
        """The level that a row's log says. Raises what reading a log that is none of this program's comes to."""
        beyond = math.inf if row.beyond >= _ENDLESS else row.beyond
        program, planner = self.programs[row.which], Planner(self.planner.hold, given=iter(row.log))
        if row.log and is_policy(row.log[0]):
            return planner.by_policy(program, str(row.log[0]), beyond)
        return planner.level(program, beyond)
