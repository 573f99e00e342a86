"""Banks: pools of different speeds. Which buffer lies in which, so that what is read and written costs least.

Problem: buffers with live ranges and traffic (bytes read and written); pools with capacity and speed. Minimized:
the sum over buffers of traffic times the cost of a byte where it lies, counted in bytes of the fastest pool (a byte
in a pool of a fourth of its speed costs four). Source: the objective of COSMA (Li et al., "COSMA: An Optimized
Memory Allocation for Accelerators", 2023), of buffers that stay where they are; Lagrangian relaxation of the
capacities at every moment (Held and Karp 1970), whose prices order a greedy choice, bound a sweep over what is alive
at once (`bank_sweep`), and a branch and bound where too much is. Guarantee: ``cost`` is never below ``bound``, which
no choice goes below; where they meet, the choice is optimal. Complexity: linear in buffers and moments for each of
``ROUNDS`` rounds of prices, a placement for each change of a pool; the search is exponential and ends with ``work``.
Known limits: a buffer stays in one pool all its life; proofs are rare where many buffers are alive at once; that a
choice whose bytes fit at every moment has no placement is proved only as far as the lower bound of packings goes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tightship.errors import BadInput, VerificationFailed
from tightship.graph import Graph, distinct
from tightship.options import Deadline
from tightship.plan import Buffer, Plan, Pool, Problem, Residence, Solution
from tightship.planners.bank_sweep import sweep
from tightship.planners.layout import ticks_of
from tightship.planners.packing import DEFAULT, Search, check_pools, pack, spans
from tightship.planners.place.problem import load as bytes_alive
from tightship.planners.place.problem import merge
from tightship.units import parse_bytes
from tightship.verify.placement import check_solution

__all__ = ["Banked", "assign_banks", "parse_banks", "problem_of", "traffic_of"]

ROUNDS = 400
"""Rounds in which prices of bytes are improved."""

LEAVES = 400
"""Complete choices that the search may try to place."""

_CLOSE = 1e-9
"""Costs are floating-point numbers: as a part of them, what is no difference."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Banked:
    """Where every buffer lies, what its traffic costs, and what no choice can cost less than, in bytes of the fastest
    pool. ``traffic``: bytes read and written in each pool. ``met``: whether every pool keeps its capacity."""

    solution: Solution
    cost: float
    bound: float
    traffic: dict[str, int]
    met: bool

    @property
    def optimal(self) -> bool:
        return self.met and self.cost <= self.bound * (1 + _CLOSE)

    @property
    def gap(self) -> float:
        """How far the cost is above the bound, as a part of it."""
        return max(0.0, self.cost / self.bound - 1) if self.bound else 0.0


def traffic_of(buffer: Buffer) -> int:
    """Bytes of a buffer that are read and written."""
    return 2 * buffer.size if buffer.traffic is None else buffer.traffic


def assign_banks(problem: Problem, planner: str = DEFAULT, search: Search | None = None) -> Banked:
    """Pools and offsets for a problem's buffers, verified. Raises ``BadInput`` for pools that break a rule.

    ``search.work`` limits the nodes of the search, and the work of each placement."""
    limits = search or Search()
    _check(problem)
    banks = _Banks(problem, planner, limits)
    relaxed = _Relaxed(banks)
    best = banks.placed(relaxed.greedy(banks.saving / np.maximum(banks.area, 1)))
    for priority in (relaxed.prices(best.cost), banks.saving / np.maximum(banks.size, 1)):
        best = min(best, banks.placed(relaxed.greedy(priority)), key=_rank)
    best, bound = banks.improved(best), relaxed.bound
    if best.cost > bound * (1 + _CLOSE) or not best.met:
        swept = relaxed.swept(best)
        if swept is not None:
            best = min(best, banks.placed(swept), key=_rank) if swept else best
            bound = max(bound, min(banks.total(swept), best.cost) if swept else best.cost)
    if best.cost > bound * (1 + _CLOSE) or not best.met:
        best, bound = _Tree(banks, relaxed, best, bound).search()
    return banks.answer(best, min(bound, best.cost) if best.met else relaxed.bound)


def parse_banks(texts: Sequence[str], place: str = "--bank") -> tuple[Pool, ...]:
    """Pools from ``NAME[=BYTES][@SPEED]``, in the order in which buffers spill. Without speeds, each is half as fast
    as the one before it. Raises ``BadInput`` naming what is wrong."""
    pools, fast = list[Pool](), 0
    for text in texts:
        head, at, speed = text.rpartition("@") if "@" in text else (text, "", "")
        name, equals, size = head.partition("=")
        if name.split() != [name] or name in {pool.name for pool in pools}:
            raise BadInput(f"{text!r} is not NAME=BYTES@SPEED with a new name", place=place)
        try:
            rate = float(speed) if at else 1.0
        except ValueError:
            raise BadInput(f"{text!r}: {speed!r} is no number", place=place) from None
        if not 0 < rate < math.inf:
            raise BadInput(f"{text!r}: a speed is a positive number", place=place)
        fast += bool(at)
        pools.append(Pool(name, parse_bytes(size, place) if equals else None, speed=rate))
    if fast not in (0, len(pools)):
        raise BadInput("give all banks a speed, as in NAME=BYTES@SPEED, or none", place=place)
    return tuple(pools) if fast else tuple(replace(pool, speed=0.5**k) for k, pool in enumerate(pools))


# --- of a plan ---


def problem_of(graph: Graph, plan: Plan, pools: Sequence[Pool]) -> Problem:
    """The placement of what a plan has in its arena, in pools instead. An op reads each storage that it reads once as
    a whole, and writes each that it makes or changes so, also when it runs again; a copy or codec does the same."""
    ticks, rows = ticks_of(graph, plan.steps), [r for r in plan.residences if r.pool == "device" and r.size]
    traffic, chain = _traffic(graph, plan, rows), _chains(plan, rows)
    buffers, names = list[Buffer](), set[str]()
    for k, r in enumerate(rows):
        lower = int(ticks[r.start]) + max(r.first, 0)
        upper = int(ticks[r.end - 1]) + r.last if r.last >= 0 else int(ticks[r.end])
        name = graph.storages[r.storage].name if r.storage >= 0 else _scratch(graph, plan, r)
        unlike, number = name, 1
        while unlike in names:
            number += 1
            unlike = f"{name} ({number})"
        names.add(unlike)
        buffers.append(Buffer(
            unlike, lower, max(upper, lower + 1), r.size, graph.alignment, group=chain[k], traffic=traffic[k],
        ))  # fmt: skip
    return Problem(tuple(buffers), pools=tuple(pools))


def _scratch(graph: Graph, plan: Plan, r: Residence) -> str:
    op = plan.steps[r.start].op
    return f"{graph.ops[op].name}.{'state' if r.form == 'state' else 'workspace'}" if op >= 0 else "workspace"


def _chains(plan: Plan, rows: Sequence[Residence]) -> list[str]:
    """A name for each run of residences of which each takes the place of the one before; nothing for the others."""
    at = {(r.storage, r.start): k for k, r in enumerate(rows) if r.form == "full" and r.storage >= 0}
    ends = {(r.storage, r.end): k for k, r in enumerate(rows) if r.form == "full" and r.storage >= 0}
    chain = [""] * len(rows)
    for i, step in enumerate(plan.steps):
        for old, new in step.reuses:
            one, two = ends.get((old, i)), at.get((new, i))
            if one is not None and two is not None:
                chain[one] = chain[two] = chain[one] or f"in place from {one}"
    return chain


def _traffic(graph: Graph, plan: Plan, rows: Sequence[Residence]) -> list[int | None]:
    """Bytes of each residence that are read and written; None of scratch."""
    found: list[int | None] = [0 if r.storage >= 0 else None for r in rows]
    stays: dict[int, list[int]] = {}
    for k, r in enumerate(rows):
        stays.setdefault(r.storage, []).append(k)

    def touch(storage: int, i: int) -> None:
        for k in stays.get(storage, ()):
            if rows[k].start <= i < rows[k].end and rows[k].form in ("full", "packed"):
                found[k] = (found[k] or 0) + rows[k].size

    for i, step in enumerate(plan.steps):
        if step.kind in ("compute", "recompute"):
            op = graph.ops[step.op]
            for values in (op.inputs, op.outputs):
                for storage in {graph.values[v].storage for v in values}:
                    touch(storage, i)
            for storage in op.mutates:
                touch(storage, i)
            for old, _ in step.reuses:  # read while its place is taken
                touch(old, i - 1)
        elif step.kind != "free":
            for storage in step.storages:
                touch(storage, i)
    return found


# --- choices ---


@dataclass(frozen=True, slots=True)
class _Choice:
    """A pool for every unit, offsets, and the cost."""

    pool: tuple[int, ...]
    offsets: tuple[int, ...]
    cost: float
    met: bool


def _rank(choice: _Choice) -> tuple[bool, float]:
    return not choice.met, choice.cost


def _check(problem: Problem) -> None:
    check_pools(problem)
    if not problem.pools:
        raise BadInput("no pool: banks are pools, and there is at least one", place="Problem.pools")
    for pool in problem.pools:
        if not 0 < pool.speed < math.inf:
            raise BadInput("a speed is a positive number", pool.speed, f"pool {pool.name!r}")
        if pool.heap is not None:
            raise BadInput(
                "a bank is one heap: it has a capacity, no heap limit", place=f"pool {pool.name!r}"
            )
    for b in problem.buffers:
        if traffic_of(b) < 0:
            raise BadInput("traffic is at least 0 bytes", b.traffic, f"buffer {b.id!r}")


class _Banks:
    """A problem in units (buffers of one group are one), pools in order of cost."""

    def __init__(self, problem: Problem, planner: str, limits: Search) -> None:
        self.problem, self.planner, self.limits = problem, planner, limits
        self.began, self.work, self.until = time.perf_counter(), 0, Deadline.after(limits.seconds)
        self.pools = sorted(problem.pools, key=lambda pool: -pool.speed)  # stable: else in the order given
        self.capacity = [math.inf if pool.capacity is None else pool.capacity for pool in self.pools]
        merged, became = merge(problem)
        self.units, self.members = merged.buffers, [list[int]() for _ in merged.buffers]
        self.traffic = [0] * len(self.units)
        for i, k in enumerate(became):
            self.members[k].append(i)
            self.traffic[k] += traffic_of(problem.buffers[i])
        self.size = np.array([u.size for u in self.units], dtype=float)
        self.cost = self._costs()
        count = len(self.units)
        parts = [(k, *part) for k, u in enumerate(self.units) for part in u.parts()]
        rows = np.array(parts, dtype=np.int64).reshape(-1, 5)
        times = distinct(rows[:, 1])  # the bytes alive grow at no other time
        self.moments = len(times)
        self.owner, self.nbytes = rows[:, 0], rows[:, 4] - rows[:, 3]
        self.first, self.last = np.searchsorted(times, rows[:, 1]), np.searchsorted(times, rows[:, 2])
        self.parts: list[list[tuple[int, int, int]]] = [[] for _ in self.units]
        columns = (x.tolist() for x in (self.owner, self.first, self.last, self.nbytes))
        for k, a, b, n in zip(*columns, strict=True):
            self.parts[k].append((a, b, n))
        self.area = np.bincount(self.owner, self.nbytes * (self.last - self.first), count).astype(float)
        dearest = np.where(np.isfinite(self.cost), self.cost, 0).max(axis=1, initial=0)
        self.saving = dearest - self.cost.min(axis=1, initial=np.inf)

    def _costs(self) -> Floats:
        """What each unit costs in each pool: infinitely much where it may not lie, or never fits."""
        fastest, every = (
            max(pool.speed for pool in self.pools),
            tuple(pool.name for pool in self.problem.pools),
        )
        cost = np.full((len(self.units), len(self.pools)), np.inf)
        for k, u in enumerate(self.units):
            names = u.pools or every
            for p, pool in enumerate(self.pools):
                if pool.name in (names if u.pinned is None else names[:1]):
                    cost[k, p] = self.traffic[k] * (fastest / pool.speed)
        too_large = self.size[:, None] > np.array(self.capacity)
        elsewhere = (np.isfinite(cost) & ~too_large).any(axis=1, keepdims=True)
        cost[too_large & elsewhere] = np.inf
        return cost

    def total(self, pool: Sequence[int]) -> float:
        return math.fsum(self.cost[k, p] for k, p in enumerate(pool))

    def allowed(self, k: int, cost: Floats) -> list[int]:
        """Pools that the unit may go to, the cheapest first."""
        return [p for p in np.argsort(cost[k], kind="stable").tolist() if np.isfinite(cost[k, p])]

    def fits(self, held: Ints, k: int, p: int) -> bool:
        """Whether unit ``k`` keeps the pool's capacity at every moment, beside what is there."""
        limit = self.capacity[p]
        return all(int(held[p, a:b].max(initial=0)) + n <= limit for a, b, n in self.parts[k])

    def add(self, held: Ints, k: int, p: int, sign: int = 1) -> None:
        for a, b, n in self.parts[k]:
            held[p, a:b] += sign * n

    def held(self, pool: Sequence[int]) -> Ints:
        """The bytes in each pool at each moment."""
        held = np.zeros((len(self.pools), self.moments), dtype=np.int64)
        for k, p in enumerate(pool):
            self.add(held, k, p)
        return held

    def pack(self, p: int, chosen: Sequence[int]) -> Solution:
        """A packing of some units in a pool, within its capacity if that is found."""
        keep = [i for k in chosen for i in self.members[k]]
        buffers = tuple(replace(self.problem.buffers[i], pools=(), traffic=None) for i in keep)
        rows, conflicts = self.problem.conflicts, tuple[int, ...]()
        if rows:
            conflicts = tuple(sum((rows[i] >> j & 1) << at for at, j in enumerate(keep)) for i in keep)
        seconds = max(0.05, min(self.limits.seconds / 10, self.until.left))
        search = Search(self.limits.seed, self.limits.work // 10, seconds)
        found = pack(Problem(buffers, self.pools[p].capacity, conflicts), self.planner, search)
        self.work += found.work
        return found

    def placed(self, pool: Sequence[int]) -> _Choice:
        """The choice with offsets; what a pool has no room for goes to the next that has."""
        now, offsets, met = list(pool), [0] * len(pool), True
        held = self.held(now)
        for p in range(len(self.pools)):
            here = [k for k, q in enumerate(now) if q == p]
            while here:
                found = self.pack(p, here)
                if found.arena <= self.capacity[p]:
                    break
                left = [k for k in here if self._next(p, k, held) is not None]
                if not left:
                    met = False
                    break
                for k in self._above(found, p, here, left, held)[: max(1, len(here) // 32)]:
                    self._move(now, held, k, self._next(p, k, held))
                    here.remove(k)
            if here:
                at = iter(found.offsets)
                for k in here:
                    offsets[k] = [next(at) for _ in self.members[k]][-1]  # the same for all of them
        return _Choice(tuple(now), tuple(offsets), self.total(now), met)

    def _above(
        self, found: Solution, p: int, here: Sequence[int], left: Sequence[int], held: Ints
    ) -> list[int]:
        """Who of those that may leave lies beyond the capacity (if nobody: all), first who loses least."""
        of = [k for k in here for _ in self.members[k]]
        buffers = [self.problem.buffers[i] for k in here for i in self.members[k]]
        ends = zip(of, found.offsets, buffers, strict=True)
        above = {k for k, x, b in ends if x + b.size > self.capacity[p]}
        return sorted(above.intersection(left) or left, key=lambda k: (self._loss(k, p, held), k))

    def _move(self, now: list[int], held: Ints, k: int, to: int | None) -> None:
        assert to is not None
        self.add(held, k, now[k], -1)
        self.add(held, k, to)
        now[k] = to

    def _next(self, p: int, k: int, held: Ints) -> int | None:
        """The next slower pool that a unit may go to, and has room for it; if none has, the last it may go to."""
        slower = [q for q in range(p + 1, len(self.pools)) if np.isfinite(self.cost[k, q])]
        return next((q for q in slower if self.fits(held, k, q)), slower[-1] if slower else None)

    def _loss(self, k: int, p: int, held: Ints) -> float:
        to = self._next(p, k, held)
        return math.inf if to is None else (self.cost[k, to] - self.cost[k, p]) / max(1.0, self.area[k])

    def improved(self, best: _Choice) -> _Choice:
        """The choice with units moved to faster pools, as long as that helps; others may have to leave for them."""
        again = best.met
        while again and not self.until.over:
            again, held = False, self.held(best.pool)
            for k in sorted(range(len(self.units)), key=lambda k: -self.saving[k]):
                for p in range(best.pool[k]):
                    moved = self._moved(best, held, k, p)
                    if moved is None or self.until.over:
                        continue
                    other = self.placed(moved)
                    if other.met and other.cost < best.cost * (1 - _CLOSE):
                        best, held, again = other, self.held(other.pool), True
                        break
        return best

    def _moved(self, best: _Choice, held: Ints, k: int, p: int) -> list[int] | None:
        """The pools with unit ``k`` in ``p``, and those out of it that are in its way, if that costs less."""
        if not np.isfinite(self.cost[k, p]):
            return None
        now, held, gain = list(best.pool), held.copy(), self.cost[k, best.pool[k]] - self.cost[k, p]
        self.add(held, k, now[k], -1)
        now[k] = p
        touching = [j for j, q in enumerate(best.pool) if q == p and self._meets(j, k)]
        for j in sorted(touching, key=lambda j: self._loss(j, p, held)):
            if self.fits(held, k, p):
                break
            to = self._next(p, j, held)
            if to is not None:
                gain -= self.cost[j, to] - self.cost[j, p]
                self._move(now, held, j, to)
        return now if gain > 0 and self.fits(held, k, p) else None

    def _meets(self, j: int, k: int) -> bool:
        return any(a < d and c < b for a, b, _ in self.parts[j] for c, d, _ in self.parts[k])

    def answer(self, best: _Choice, bound: float) -> Banked:
        offsets, homes = [0] * len(self.problem.buffers), [("", 0)] * len(self.problem.buffers)
        traffic = dict.fromkeys((pool.name for pool in self.problem.pools), 0)
        for k, (p, x) in enumerate(zip(best.pool, best.offsets, strict=True)):
            traffic[self.pools[p].name] += self.traffic[k]
            for i in self.members[k]:
                offsets[i], homes[i] = x, (self.pools[p].name, 0)
        arena = sum(spans(self.problem, offsets, homes).values())
        solution = Solution(
            tuple(offsets), arena, bytes_alive(self.problem), f"banks+{self.planner}",
            time.perf_counter() - self.began, self.work, tuple(homes),
        )  # fmt: skip
        wrong = check_solution(self.problem, solution)
        if faults := [v for v in wrong if v.code != "over-capacity"]:
            raise VerificationFailed(faults, "banks")
        return Banked(solution, best.cost, bound, traffic, not wrong)


# --- bounds ---


class _Relaxed:
    """The problem with a price for each byte of a pool at each moment in place of its capacity."""

    def __init__(self, banks: _Banks) -> None:
        self.banks = banks
        self.limited = [p for p, n in enumerate(banks.capacity) if n < math.inf]
        self.limit = np.array([banks.capacity[p] for p in self.limited])[:, None]
        self.bound = float(banks.cost.min(axis=1, initial=math.inf).sum())
        self.price = np.zeros((len(self.limited), banks.moments))
        self.reduced = banks.cost

    def prices(self, cost: float) -> Floats:
        """Better prices, for choices that cost less than ``cost``; returns how dear each unit would be elsewhere."""
        banks, price, scale, stale = self.banks, self.price.copy(), 1.0, 0
        for _ in range(ROUNDS if self.limited and len(banks.units) else 0):
            reduced = self._at(price)
            value = float(reduced.min(axis=1).sum()) - float((price * self.limit).sum())
            stale += 1
            if value > self.bound:
                self.bound, self.price, self.reduced, stale = value, price.copy(), reduced, 0
            elif stale % 12 == 0:
                scale /= 2
            pool = reduced.argmin(axis=1)
            over = np.stack([self._held(pool == p) for p in self.limited]) - self.limit
            over = np.where((price <= 0) & (over < 0), 0, over)
            length = float((over.astype(float) ** 2).sum())
            if not length or scale < 1e-3 or self.bound >= cost * (1 - _CLOSE) or banks.until.over:
                break
            price = np.maximum(0, price + scale * max(cost - value, _CLOSE * cost) / length * over)
        self.bound *= 1 - _CLOSE
        two = np.sort(self.reduced, axis=1)[:, :2]
        return two[:, -1] - two[:, 0] if two.shape[1] > 1 else two[:, 0]

    def _at(self, price: Floats) -> Floats:
        """What each unit costs in each pool at these prices."""
        banks, reduced = self.banks, self.banks.cost.copy()
        until = np.concatenate((np.zeros((len(price), 1)), np.cumsum(price, axis=1)), axis=1)
        for row, p in enumerate(self.limited):
            paid = banks.nbytes * (until[row, banks.last] - until[row, banks.first])
            reduced[:, p] += np.bincount(banks.owner, paid, len(banks.units))
        return reduced

    def _held(self, inside: npt.NDArray[np.bool_]) -> Ints:
        banks = self.banks
        mine = inside[banks.owner]
        change = np.zeros(banks.moments + 1, dtype=np.int64)
        np.add.at(change, banks.first[mine], banks.nbytes[mine])
        np.add.at(change, banks.last[mine], -banks.nbytes[mine])
        return np.cumsum(change)[:-1]

    def swept(self, best: _Choice) -> list[int] | None:
        """The cheapest choice whose bytes fit at each moment; see `sweep`."""
        banks, least = self.banks, self.reduced.min(axis=1, keepdims=True, initial=math.inf)
        slack = best.cost * (1 - _CLOSE) - self.bound if best.met else math.inf
        return sweep(
            banks.parts, banks.cost, banks.capacity, self.reduced - least, slack, lambda: banks.until.over
        )

    def greedy(self, priority: Floats) -> list[int]:
        """Each unit in the cheapest pool with room at every moment, in order of priority; first who has no choice."""
        banks, pool = self.banks, [0] * len(self.banks.units)
        held = banks.held(())
        few = np.minimum(np.isfinite(banks.cost).sum(axis=1), 2)
        for k in np.lexsort((-priority, few)).tolist():
            allowed = banks.allowed(k, banks.cost)
            pool[k] = next((p for p in allowed if banks.fits(held, k, p)), allowed[-1])
            banks.add(held, k, pool[k])
        return pool


class _Tree:
    """Branch and bound: a pool for one unit after the other, what it costs more than at the prices being added up."""

    def __init__(self, banks: _Banks, relaxed: _Relaxed, best: _Choice, bound: float) -> None:
        self.banks, self.best, self.bound, self.root = banks, best, bound, relaxed.bound
        self.more = relaxed.reduced - relaxed.reduced.min(axis=1, keepdims=True, initial=np.inf)
        finite = np.where(np.isfinite(self.more), self.more, 0)
        self.order = np.argsort(-finite.max(axis=1, initial=0), kind="stable").tolist()
        self.nodes, self.leaves, self.open = banks.limits.work, LEAVES, math.inf

    def search(self) -> tuple[_Choice, float]:
        """The best choice, and a bound of all."""
        count, pool, held = len(self.order), [0] * len(self.order), self.banks.held(())
        ways = [self.banks.allowed(k, self.more) for k in self.order]
        at, floor = [0] * (count + 1), [self.root] * (count + 1)  # next way, and bound, at each depth
        depth = 0
        while depth >= 0:
            if self.nodes <= 0 or self.leaves <= 0 or (self.nodes % 256 == 0 and self.banks.until.over):
                return self.best, self.bound
            self.nodes -= 1
            if depth == count or at[depth] == len(ways[depth]):
                if depth == count:
                    self._leaf(pool)
                at[depth] = 0
                depth -= 1
                if depth >= 0:
                    k = self.order[depth]
                    self.banks.add(held, k, pool[k], -1)
                continue
            k, p = self.order[depth], ways[depth][at[depth]]
            at[depth] += 1
            floor[depth + 1] = floor[depth] + float(self.more[k, p])
            if floor[depth + 1] >= self._enough:
                at[depth] = len(ways[depth])  # the others cost more still
            elif self.banks.fits(held, k, p):
                pool[k] = p
                self.banks.add(held, k, p)
                depth += 1
        return self.best, max(self.bound, min(self.open, self.best.cost))

    @property
    def _enough(self) -> float:
        return self.best.cost * (1 - _CLOSE) if self.best.met else math.inf

    def _leaf(self, pool: Sequence[int]) -> None:
        """Bytes fit at every moment: whether they can be placed is another question."""
        cost = self.banks.total(pool)
        if cost >= self._enough:
            return
        self.leaves -= 1
        found = self.banks.placed(pool)
        self.best = min(self.best, found, key=_rank)
        if (found.pool != tuple(pool) or not found.met) and not self._impossible(pool):
            self.open = min(self.open, cost)

    def _impossible(self, pool: Sequence[int]) -> bool:
        """Whether no placement of this choice can keep the capacities: proved."""
        for p, limit in enumerate(self.banks.capacity):
            here = [k for k, q in enumerate(pool) if q == p]
            if here and self.banks.pack(p, here).lower_bound > limit:
                return True
        return False
