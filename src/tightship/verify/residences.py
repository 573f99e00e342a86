"""Check a plan's residences: that they are those its steps imply, and that no two use the same bytes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tightship.graph import Graph, Op, Storage, aligned
from tightship.plan import Residence
from tightship.verify.steps import ImpliedResidence, Inspection

__all__ = ["check_residences"]

Point = tuple[int, int]  # (step, event within it)


class _Block(NamedTuple):
    """Bytes ``[low, high)`` taken at ``begin`` and given back at ``finish``, by step ``released``."""

    name: str
    low: int
    high: int
    begin: Point
    finish: Point
    released: int


def check_residences(i: Inspection) -> None:
    """Offsets count in the arena, on the host and in pools of the planner's own; results handed out (pool ``out``)
    are memory of their own."""
    pools: dict[str, list[_Block]] = {}
    handed = 0
    matched = [*_matched(i)]
    _same_places(i, [r for r, _ in matched])
    for r, released in matched:
        name = _name(i.graph, r)
        handed += r.size if r.pool == "out" else 0
        begin = (r.start, max(r.first, 0))
        finish = (r.end - 1, r.last) if r.last >= 0 else (r.end, 0)
        if begin >= finish:
            i.ledger.add(
                "wrong-residence", r.start, (name,), f"the residence of {name} ends before it begins"
            )
        elif r.size > 0 and r.pool != "out" and _inside(i, r, name):
            block = _Block(name, r.offset, r.offset + r.size, begin, finish, released)
            pools.setdefault(r.pool, []).append(block)
    if i.plan.handed != handed:
        message = f"the plan says {i.plan.handed} bytes leave the arena, its residences {handed}"
        i.note("peak-mismatch", "handed", message)
    for pool, blocks in pools.items():
        _sweep(i, blocks, pool)


def _same_places(i: Inspection, rows: list[Residence]) -> None:
    """A result that takes the place of an input lies exactly there from the beginning of the step."""
    took, storages = i.replay.took, i.graph.storages
    full = [r for r in rows if r.storage >= 0 and r.form == "full"] if took else []
    begun, ended = {(r.storage, r.start): r for r in full}, {(r.storage, r.end): r for r in full}
    for step, s, before in took:
        new, old = begun.get((s, step)), ended.get((before, step))
        if new is None or old is None:  # without bytes, or noted already
            continue
        name, other = storages[s].name, storages[before].name
        there = (new.offset, new.pool, new.size) == (old.offset, old.pool, old.size)
        if not there or new.pool == "out" or new.first != -1:
            message = (
                f"{name} takes the place of {other} but lies at {new.offset} of {new.pool!r}, not from the step's"
                f" beginning at {old.offset} of {old.pool!r}"
            )
            i.ledger.add("reuse", step, (name, other), message)


def _name(graph: Graph, r: Residence) -> str:
    if r.form == "state":
        return f"random state of {graph.ops[r.request].name}"
    if r.storage >= 0:
        return graph.storages[r.storage].name
    return f"request {r.request} of step {r.start}" if r.request >= 0 else f"workspace of step {r.start}"


def _inside(i: Inspection, r: Residence, name: str) -> bool:
    if r.offset % i.facts.alignment:
        message = f"{name} lies at {r.offset}, which is no multiple of {i.facts.alignment}"
        i.ledger.add("misaligned", r.start, (name,), message)
    end = i.plan.arena if r.pool == "device" else i.plan.host if r.pool == "host" else r.offset + r.size
    if r.offset < 0 or r.offset + r.size > end:
        message = f"{name} lies in [{r.offset}, {r.offset + r.size}), outside the {end} bytes of {r.pool!r}"
        i.ledger.add("out-of-bounds", r.start, (name,), message)
    return r.offset >= 0


# Which residences there must be


def _matched(i: Inspection) -> Iterator[tuple[Residence, int]]:
    """The residences that stand for something, each with the step that ends it."""
    graph, note = i.graph, i.ledger.add
    missing = {(e.storage, e.form, e.start): e for e in i.replay.implied}
    workspace: dict[int, list[Residence]] = {}
    for r in i.plan.residences:
        state = r.form == "state"
        if r.storage == -1 and not state:
            workspace.setdefault(r.start, []).append(r)
            continue
        if not (state or 0 <= r.storage < len(graph.storages)):
            note("unknown", r.start, (str(r.storage),), f"there is no storage {r.storage}")
            continue
        expected = missing.pop((r.request if state else r.storage, r.form, r.start), None)
        if state and (expected is None or r != _state(expected, r.offset)):
            message = f"no random state of op {r.request} is resident in steps [{r.start}, {r.end}) with these bytes"
            note("wrong-residence", r.start, (str(r.request),), message)
        elif expected is None:
            name = _name(graph, r)
            message = f"{name} ({r.form}) does not become resident here, or is placed twice"
            note("wrong-residence", r.start, (name,), message)
        elif not state:
            _compare(i, r, expected)
        if expected is not None:
            yield r, expected.released
    for e in missing.values():
        if e.size > 0:
            named: Sequence[Op | Storage] = graph.ops if e.form == "state" else graph.storages
            name = named[e.storage].name
            message = f"{name} ({e.form}) is resident in steps [{e.start}, {e.end}) but has no place"
            note("missing-residence", e.start, (name,), message)
    yield from _workspace(i, workspace)


def _state(expected: ImpliedResidence, offset: int) -> Residence:
    """A random state, saved or set aside, lies in the arena for as long as its steps say."""
    e = expected
    return Residence(-1, e.start, e.end, e.size, offset, form="state", request=e.storage)


def _compare(i: Inspection, r: Residence, expected: ImpliedResidence) -> None:
    size = expected.size
    fits = (
        r.end == expected.end,
        size <= r.size <= aligned(size, i.facts.alignment),
        _pool_fits(i, r, expected),
        r.request == r.last == -1 and _first_fits(i, r),
    )
    if all(fits):
        return
    name = i.graph.storages[r.storage].name
    messages = (
        f"{name} ({r.form}) is resident until step {expected.end}, not {r.end}",
        f"{name} ({r.form}) has {size} bytes, not {r.size}",
        f"{name} ({r.form}) cannot be in pool {r.pool!r}",
        f"{name} is taken when its op requests it or before, and given back by a step",
    )
    for right, message in zip(fits, messages, strict=True):
        if not right:
            i.ledger.add("wrong-residence", r.start, (name,), message)


def _pool_fits(i: Inspection, r: Residence, expected: ImpliedResidence) -> bool:
    if r.form == "host":
        return r.pool == "host"
    if r.pool == "out":
        return r.form == "full" and expected.end == len(i.plan.steps) and r.storage in i.facts.kept
    return r.pool in ("device", i.graph.storages[r.storage].pool)


def _first_fits(i: Inspection, r: Residence) -> bool:
    """A result may take its bytes with its request in the op, never later."""
    if r.first < 0:
        return r.first == -1
    step = i.plan.steps[r.start]
    if step.kind not in ("compute", "recompute"):
        return False
    which = i.facts.makes[step.op].index(r.storage)
    asked = [q.start for q in i.graph.ops[step.op].requests if q.storage == which]
    return bool(asked) and r.first <= min(asked)


def _workspace(i: Inspection, given: dict[int, list[Residence]]) -> Iterator[tuple[Residence, int]]:
    """What an op needs while it runs has a place: its temporaries one by one, and what graphs that it calls need
    as a block; or all of it as one block. ``given``: the residences of workspace, by step."""
    graph, facts, note = i.graph, i.facts, i.ledger.add
    for step, k in i.replay.ran:
        op = graph.ops[k]
        if not op.requests and not facts.extra[k] and step not in given:
            continue
        wanted = {j: q.size for j, q in enumerate(op.requests) if q.storage < 0 and q.size > 0}
        rows = given.pop(step, [])
        block = facts.extra[k] - op.workspace  # of called graphs
        if not op.requests or not {r.request for r in rows} >= wanted.keys():
            block += max(op.workspace, _temporaries(op))
        placed: set[int] = set()
        for r in rows:
            if _is_workspace(op, r, block, facts.alignment) and r.request not in placed:
                placed.add(r.request)
                yield r, step
            else:
                name = _name(graph, r)
                message = f"{name} is nothing {op.name} needs, or not with this size, pool and events"
                note("wrong-residence", step, (name, op.name), message)
        in_parts = placed >= wanted.keys() or -1 in placed
        if not in_parts or (block > 0 and -1 not in placed):
            message = f"{op.name} needs more bytes while it runs than have a place"
            note("missing-residence", step, (op.name,), message)
    for step, rest in given.items():
        for r in rest:
            name = _name(graph, r)
            note("wrong-residence", step, (name,), f"{name}: no op runs at this step")


def _is_workspace(op: Op, r: Residence, block: int, alignment: int) -> bool:
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


def _sweep(i: Inspection, blocks: list[_Block], pool: str) -> None:
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
                _beside(i, blocks[o], new, pool)
        low, high = [new.low], [index]
        if cuts[p] < new.low:
            low, high = [cuts[p], *low], [owners[p], *high]
        if q == len(cuts) or cuts[q] > new.high:
            low, high = [*low, new.high], [*high, owners[q - 1]]
        cuts[p:q], owners[p:q] = low, high


def _beside(i: Inspection, old: _Block, new: _Block, pool: str) -> None:
    step = new.begin[0]
    if old.finish > new.begin:
        message = f"{new.name} and {old.name} both use bytes from {max(old.low, new.low)} of pool {pool!r}"
        i.ledger.add("overlap", step, (new.name, old.name), message)
    elif old.released != step and not i.clocks.before(old.released, step):
        message = f"{new.name} takes bytes of {old.name}, but step {old.released} may not have ended"
        i.ledger.add("lane", step, (new.name, old.name), message)
