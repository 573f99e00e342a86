"""Check a plan's residences: that they are the stays its steps imply, and that no two use the same bytes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tightship.graph import Graph, Op, Storage, aligned
from tightship.plan import Plan, Residence
from tightship.verify.facts import Facts, Ledger
from tightship.verify.lanes import Clocks
from tightship.verify.steps import Replay, Stay

__all__ = ["check_residences"]

Point = tuple[int, int]  # (step, event within it)


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes ``[low, high)`` taken at ``begin`` and given back at ``finish``, by step ``released``."""

    name: str
    low: int
    high: int
    begin: Point
    finish: Point
    released: int


def check_residences(
    graph: Graph, facts: Facts, plan: Plan, replay: Replay, clocks: Clocks, ledger: Ledger
) -> None:
    """Offsets count in the arena, on the host and in pools of the planner's own; results handed out (pool ``out``)
    are memory of their own."""
    pools: dict[str, list[_Block]] = {}
    handed = 0
    matched = list(_matched(graph, facts, plan, replay, ledger))
    _same_places(graph, [r for r, _ in matched], replay, ledger)
    for r, released in matched:
        name = _name(graph, r)
        handed += r.size if r.pool == "out" else 0
        begin = (r.start, max(r.first, 0))
        finish = (r.end - 1, r.last) if r.last >= 0 else (r.end, 0)
        if begin >= finish:
            message = f"the residence of {name} ends before it begins"
            ledger.add("wrong-residence", r.start, (name,), message)
        elif r.size > 0 and r.pool != "out" and _inside(r, name, plan, facts, ledger):
            block = _Block(name, r.offset, r.offset + r.size, begin, finish, released)
            pools.setdefault(r.pool, []).append(block)
    if plan.handed != handed:
        message = f"the plan says {plan.handed} bytes leave the arena, its residences {handed}"
        ledger.add("peak-mismatch", -1, ("handed",), message)
    for pool, blocks in pools.items():
        _sweep(blocks, pool, clocks, ledger)


def _same_places(graph: Graph, rows: list[Residence], replay: Replay, ledger: Ledger) -> None:
    """A result that takes the place of an input lies exactly there from the beginning of the step."""
    full = [r for r in rows if r.storage >= 0 and r.form == "full"] if replay.took else []
    begun, ended = {(r.storage, r.start): r for r in full}, {(r.storage, r.end): r for r in full}
    for i, s, before in replay.took:
        new, old = begun.get((s, i)), ended.get((before, i))
        if new is None or old is None:  # without bytes, or noted already
            continue
        name, other = graph.storages[s].name, graph.storages[before].name
        there = (new.offset, new.pool, new.size) == (old.offset, old.pool, old.size)
        if not there or new.pool == "out" or new.first != -1:
            message = (
                f"{name} takes the place of {other} but lies at {new.offset} of {new.pool!r}, not from the step's"
                f" beginning at {old.offset} of {old.pool!r}"
            )
            ledger.add("reuse", i, (name, other), message)


def _name(graph: Graph, r: Residence) -> str:
    if r.form == "state":
        return f"random state of {graph.ops[r.request].name}"
    if r.storage >= 0:
        return graph.storages[r.storage].name
    return f"request {r.request} of step {r.start}" if r.request >= 0 else f"workspace of step {r.start}"


def _inside(r: Residence, name: str, plan: Plan, facts: Facts, ledger: Ledger) -> bool:
    if r.offset % facts.alignment:
        message = f"{name} lies at {r.offset}, which is no multiple of {facts.alignment}"
        ledger.add("misaligned", r.start, (name,), message)
    end = {"device": plan.arena, "host": plan.host}.get(r.pool, r.offset + r.size)
    if r.offset < 0 or r.offset + r.size > end:
        message = f"{name} lies in [{r.offset}, {r.offset + r.size}), outside the {end} bytes of {r.pool!r}"
        ledger.add("out-of-bounds", r.start, (name,), message)
    return r.offset >= 0


# Which residences there must be


def _matched(
    graph: Graph, facts: Facts, plan: Plan, replay: Replay, ledger: Ledger
) -> Iterable[tuple[Residence, int]]:
    """The residences that stand for something, each with the step that ends it."""
    expected = {(stay.storage, stay.form, stay.start): stay for stay in replay.stays}
    scratch: dict[int, list[Residence]] = {}
    found: list[tuple[Residence, int]] = []
    for r in plan.residences:
        if r.form == "state":
            found += _state(graph, r, expected.pop((r.request, "state", r.start), None), ledger)
        elif r.storage == -1:
            scratch.setdefault(r.start, []).append(r)
        elif not 0 <= r.storage < len(graph.storages):
            ledger.add("unknown", r.start, (str(r.storage),), f"there is no storage {r.storage}")
        else:
            stay = expected.pop((r.storage, r.form, r.start), None)
            if stay is None:
                name = _name(graph, r)
                message = f"{name} ({r.form}) does not become resident here, or is placed twice"
                ledger.add("wrong-residence", r.start, (name,), message)
            else:
                _compare(graph, facts, plan, r, stay, ledger)
                found.append((r, stay.released))
    for stay in expected.values():
        if stay.size > 0:
            named: Sequence[Op | Storage] = graph.ops if stay.form == "state" else graph.storages
            name = named[stay.storage].name
            message = f"{name} ({stay.form}) is resident in steps [{stay.start}, {stay.end}) but has no place"
            ledger.add("missing-residence", stay.start, (name,), message)
    found += _scratch(graph, facts, replay, scratch, ledger)
    return found


def _state(graph: Graph, r: Residence, stay: Stay | None, ledger: Ledger) -> list[tuple[Residence, int]]:
    """A random state, saved or set aside, lies in the arena for as long as its steps say."""
    wanted = stay and Residence(
        -1, stay.start, stay.end, stay.size, r.offset, form="state", request=stay.storage
    )
    if stay is None or r != wanted:
        message = (
            f"no random state of op {r.request} is resident in steps [{r.start}, {r.end}) with these bytes"
        )
        ledger.add("wrong-residence", r.start, (str(r.request),), message)
    return [] if stay is None else [(r, stay.released)]


def _compare(graph: Graph, facts: Facts, plan: Plan, r: Residence, stay: Stay, ledger: Ledger) -> None:
    name = graph.storages[r.storage].name
    if r.end != stay.end:
        message = f"{name} ({r.form}) is resident until step {stay.end}, not {r.end}"
        ledger.add("wrong-residence", r.start, (name,), message)
    if not stay.size <= r.size <= aligned(stay.size, facts.alignment):
        message = f"{name} ({r.form}) has {stay.size} bytes, not {r.size}"
        ledger.add("wrong-residence", r.start, (name,), message)
    if not _pool_fits(graph, facts, len(plan.steps), r, stay):
        message = f"{name} ({r.form}) cannot be in pool {r.pool!r}"
        ledger.add("wrong-residence", r.start, (name,), message)
    if r.request != -1 or r.last != -1 or not _first_fits(graph, facts, plan, r):
        message = f"{name} is taken when its op requests it or before, and given back by a step"
        ledger.add("wrong-residence", r.start, (name,), message)


def _pool_fits(graph: Graph, facts: Facts, n: int, r: Residence, stay: Stay) -> bool:
    if r.form == "host":
        return r.pool == "host"
    if r.pool == "out":
        return r.form == "full" and stay.end == n and r.storage in facts.kept
    return r.pool in ("device", graph.storages[r.storage].pool)


def _first_fits(graph: Graph, facts: Facts, plan: Plan, r: Residence) -> bool:
    """A result may take its bytes with its request in the op, never later."""
    if r.first < 0:
        return r.first == -1
    step = plan.steps[r.start]
    if step.kind not in ("compute", "recompute"):
        return False
    which = facts.makes[step.op].index(r.storage)
    asked = [q.start for q in graph.ops[step.op].requests if q.storage == which]
    return bool(asked) and r.first <= min(asked)


def _scratch(
    graph: Graph, facts: Facts, replay: Replay, scratch: dict[int, list[Residence]], ledger: Ledger
) -> list[tuple[Residence, int]]:
    """What an op needs while it runs has a place: its temporaries one by one, and what graphs that it calls need
    as a block; or all of it as one block."""
    found: list[tuple[Residence, int]] = []
    for i, k in replay.ran:
        op = graph.ops[k]
        if not op.requests and not facts.extra[k] and i not in scratch:
            continue
        wanted = {j: q.size for j, q in enumerate(op.requests) if q.storage < 0 and q.size > 0}
        rows = scratch.pop(i, [])
        block = facts.extra[k] - op.workspace  # of called graphs
        if not op.requests or not {r.request for r in rows} >= wanted.keys():
            block += max(op.workspace, _temporaries(op))
        placed: set[int] = set()
        for r in rows:
            if _scratch_fits(op, r, block, facts.alignment) and r.request not in placed:
                placed.add(r.request)
                found.append((r, i))
            else:
                name = _name(graph, r)
                message = f"{name} is nothing {op.name} needs, or not with this size, pool and events"
                ledger.add("wrong-residence", i, (name, op.name), message)
        in_parts = placed >= wanted.keys() or -1 in placed
        if not in_parts or (block > 0 and -1 not in placed):
            message = f"{op.name} needs more bytes while it runs than have a place"
            ledger.add("missing-residence", i, (op.name,), message)
    for i, rest in scratch.items():
        for r in rest:
            name = _name(graph, r)
            ledger.add("wrong-residence", i, (name,), f"{name}: no op runs at this step")
    return found


def _scratch_fits(op: Op, r: Residence, block: int, alignment: int) -> bool:
    if r.end != r.start + 1 or r.form != "full" or r.pool == "out":
        return False
    if r.request < 0:
        whole = aligned(block, alignment)
        return r.request == -1 and r.first == -1 and r.last == -1 and 0 < block <= r.size <= whole
    if r.request >= len(op.requests) or op.requests[r.request].storage >= 0:
        return False
    q = op.requests[r.request]
    until_end = r.last == -1 or (q.end >= 0 and r.last >= q.end)
    return -1 <= r.first <= q.start and until_end and q.size <= r.size <= aligned(q.size, alignment)


def _temporaries(op: Op) -> int:
    """The most bytes an op's temporary requests hold at a time."""
    events = []
    for q in op.requests:
        if q.storage < 0:
            events.append((q.start, 1, q.size))
            if q.end >= 0:
                events.append((q.end, 0, -q.size))
    live = peak = 0
    for _, _, change in sorted(events):
        live += change
        peak = max(peak, live)
    return peak


# Where they lie


def _sweep(blocks: list[_Block], pool: str, clocks: Clocks, ledger: Ledger) -> None:
    """Place blocks in the order in which they begin, remembering who had each byte last.

    The last owner is enough: it came after the owner before it, by the same check. Each block adds at most
    two boundaries and removes those it covers, so the work is near-linear in the number of blocks.
    """
    blocks.sort(key=lambda b: (b.begin, b.finish))
    cuts = [0]  # owners[j] has bytes [cuts[j], cuts[j + 1])
    owners = [-1]
    for index, new in enumerate(blocks):
        p = bisect_right(cuts, new.low) - 1
        q = bisect_left(cuts, new.high)
        for o in dict.fromkeys(owners[p:q]):
            if o >= 0:
                _beside(blocks[o], new, pool, clocks, ledger)
        low, high = [new.low], [index]
        if cuts[p] < new.low:
            low, high = [cuts[p], *low], [owners[p], *high]
        if q == len(cuts) or cuts[q] > new.high:
            low, high = [*low, new.high], [*high, owners[q - 1]]
        cuts[p:q], owners[p:q] = low, high


def _beside(old: _Block, new: _Block, pool: str, clocks: Clocks, ledger: Ledger) -> None:
    step = new.begin[0]
    if old.finish > new.begin:
        message = f"{new.name} and {old.name} both use bytes from {max(old.low, new.low)} of pool {pool!r}"
        ledger.add("overlap", step, (new.name, old.name), message)
    elif old.released != step and not clocks.before(old.released, step):
        message = f"{new.name} takes bytes of {old.name}, but step {old.released} may not have ended"
        ledger.add("lane", step, (new.name, old.name), message)
