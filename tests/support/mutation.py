"""Valid plans with one change each, for the verifier's mutation score.

What a plan says of itself is made to agree with the change as far as it can be (its time, its peaks), so that a sum
that is wrong does not give away what else is. `mutant` draws one of `KINDS`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from support.oracle import faults, seconds_of
from support.strategies import random_graph, random_order, random_plan
from tightship.graph import Graph
from tightship.plan import Inner, Plan, Step
from tightship.simulate import baseline
from tightship.verify import verify

__all__ = ["KINDS", "case", "mutant", "verdict"]

Change = Callable[[Graph, Plan, random.Random], Plan | None]
BARE: dict[str, Any] = {"residences": (), "arena": 0, "handed": 0, "host": 0, "budget": None}
COLLECTIVE = "_c10d_functional.all_reduce.default"


def case(seed: int, size: int) -> tuple[Graph, Plan]:
    """A graph and a valid plan of it; some graphs run others inside of them, by plans of their own, and some have a
    collective in them, which is not recomputed."""
    rng = random.Random(f"mutation {seed}")
    static = rng.choice((0.0, 0.0, 1.0))
    graph = random_graph(seed, size, static_writes=static, view=rng.choice((0.1, 0.3)))
    plan = random_plan(graph, seed, rate=rng.choice((0.15, 0.4)), streams=rng.random() < 0.7)
    again = {step.op for step in plan.steps if step.kind == "recompute"}
    once = [k for k in range(len(graph.ops)) if k not in again]
    if once and rng.random() < 0.2:
        k = rng.choice(once)
        ops = (*graph.ops[:k], replace(graph.ops[k], target=COLLECTIVE), *graph.ops[k + 1 :])
        graph = graph.with_ops(ops)
        plan = replace(plan, digest=graph.digest)
    return graph, plan if rng.random() < 0.9 else _with_inner(graph, plan, rng)


def _with_inner(graph: Graph, plan: Plan, rng: random.Random) -> Plan:
    inner = random_graph(rng.randrange(1 << 30), 2)
    own = random_plan(inner, 0)
    need = own.peak - own.static
    able = [k for k, op in enumerate(graph.ops) if op.workspace >= need]
    return replace(plan, inner=(Inner(rng.choice(able), inner, own),)) if able else plan


def mutant(graph: Graph, plan: Plan, rng: random.Random) -> tuple[str, Plan]:
    """Its kind, and the plan with a change; kinds that this plan has nothing for are passed over."""
    while True:
        kind = "inside" if plan.inner and rng.random() < 0.5 else rng.choice(list(KINDS))
        changed = KINDS[kind](graph, plan, rng)
        if changed is not None and changed != plan:
            return kind, _agreeing(graph, changed) if changed.steps != plan.steps else changed


def verdict(graph: Graph, plan: Plan) -> tuple[list[str], set[str]]:
    """What the oracle finds wrong, and the rules that the verifier says are broken."""
    try:
        wrong = faults(graph, plan)
    except (
        LookupError,
        ValueError,
        TypeError,
    ):  # the oracle takes for granted what is out of range: that is wrong
        wrong = ["out of range"]
    return wrong, {v.code for v in verify(graph, plan)}


def _agreeing(graph: Graph, plan: Plan) -> Plan:
    """With the sums that its steps come to, for who counts on in spite of all."""
    plan = replace(plan, **BARE, lower_bound=0, time_bound=0.0)
    try:
        plan = replace(plan, time=seconds_of(graph, plan.steps))
    except (LookupError, ValueError):
        return plan
    for v in verify(graph, plan):
        said = re.search(r"states \d+ bytes as peak, its steps reach (\d+)", v.message)
        if v.code == "peak-mismatch" and said:
            plan = replace(plan, peak=int(said[1]))
    return plan


# --- steps ---


def _steps(plan: Plan, steps: list[Step]) -> Plan:
    return replace(plan, steps=tuple(steps))


def _waits_after(steps: list[Step], where: Callable[[int], int | None]) -> list[Step]:
    """Steps whose waits follow those that they wait for to where these are now; None: it is gone."""
    return [
        replace(s, waits=tuple(sorted({n for w in s.waits if (n := where(w)) is not None}))) for s in steps
    ]


def _gone(graph: Graph, plan: Plan, rng: random.Random) -> Plan:
    i, steps = rng.randrange(len(plan.steps)), list(plan.steps)
    del steps[i]
    return _steps(plan, _waits_after(steps, lambda w: None if w == i else w - (w > i)))


def _twice(graph: Graph, plan: Plan, rng: random.Random) -> Plan:
    i, steps = rng.randrange(len(plan.steps)), list(plan.steps)
    at = rng.choice((i + 1, rng.randrange(i + 1, len(steps) + 1)))
    steps = _waits_after(steps, lambda w: w + (w >= at))
    steps.insert(at, steps[i])
    return _steps(plan, steps)


def _moved(graph: Graph, plan: Plan, rng: random.Random) -> Plan:
    steps, i = list(plan.steps), rng.randrange(len(plan.steps))
    j = rng.choice((i - 1, i + 1, rng.randrange(len(steps))))
    j = min(max(j, 0), len(steps) - 1)
    order = list(range(len(steps)))
    order.insert(j, order.pop(i))
    now = {old: new for new, old in enumerate(order)}
    return _steps(plan, _waits_after([steps[k] for k in order], lambda w: now[w]))


def _another_order(graph: Graph, plan: Plan, rng: random.Random) -> Plan:
    """Ops in an order that is perhaps none, with frees after each last use: nothing else is wrong with it."""
    order = list(range(len(graph.ops)))
    i = rng.randrange(len(order))
    order.insert(rng.randrange(len(order)), order.pop(i))
    return _steps(plan, list(baseline(graph, order)))


def _free_order(graph: Graph, plan: Plan, rng: random.Random) -> Plan:
    """An order in which contents are right, and that waits for nothing else: for no control, for no earlier draw."""
    bare = graph.with_ops(tuple(replace(op, control=(), random=False, state=0) for op in graph.ops))
    return _steps(plan, list(baseline(graph, random_order(bare, rng.randrange(1 << 30)))))


def _again(graph: Graph, plan: Plan, rng: random.Random) -> Plan:
    """An op once more, keeping none or some of its results."""
    steps, k = list(plan.steps), rng.randrange(len(graph.ops))
    at = rng.randrange(len(steps) + 1)
    steps = _waits_after(steps, lambda w: w + (w >= at))
    kept = graph.uses.defines[k] if rng.random() < 0.4 else ()
    steps.insert(at, Step("recompute", op=k, storages=tuple(kept)))
    return _steps(plan, steps)


def _field(graph: Graph, plan: Plan, rng: random.Random) -> Plan | None:
    steps, i = list(plan.steps), rng.randrange(len(plan.steps))
    step, numbers = steps[i], (-1, 0, 1, 5, 2**31, rng.randrange(99))
    storage = lambda: rng.randrange(-1, len(graph.storages) + 1)  # noqa: E731
    name, value = rng.choice((
        ("kind", rng.choice(("compute", "recompute", "free", "offload", "fetch", "compress", "decompress", "jump"))),
        ("op", rng.choice((*numbers, rng.randrange(len(graph.ops))))),
        ("storages", tuple(storage() for _ in range(rng.randrange(3)))),
        ("storages", step.storages[1:]), ("storages", (*step.storages, storage())),
        ("form", rng.choice(("full", "packed", "host", "state", "odd"))),
        ("saves", not step.saves),
    ))  # fmt: skip
    steps[i] = replace(step, **{name: value})
    return _steps(plan, steps)


def _at_steps(
    kind: str | tuple[str, ...], change: Callable[[Graph, Step, random.Random], dict[str, Any]]
) -> Change:
    """A change of a step of these kinds."""

    def changed(graph: Graph, plan: Plan, rng: random.Random) -> Plan | None:
        able = [i for i, s in enumerate(plan.steps) if s.kind in kind]
        if not able:
            return None
        steps, i = list(plan.steps), rng.choice(able)
        steps[i] = replace(steps[i], **change(graph, steps[i], rng))
        return _steps(plan, steps)

    return changed


def _codec(graph: Graph, step: Step, rng: random.Random) -> dict[str, Any]:
    return rng.choice((
        {"nbytes": step.nbytes + rng.choice((-64, 64, 1))},
        {"codec": rng.choice(("bits", "mask", "uint8", "int16", "int32", "bf16", "zip"))},
        {"codec": "bf16", "nbytes": -(-graph.storages[step.storages[0]].size // 128) * 64},
    ))  # fmt: skip


def _early_pack(graph: Graph, plan: Plan, rng: random.Random) -> Plan | None:
    """A storage of booleans packed, and unpacked nowhere, at any time."""
    able = [v.storage for v in graph.values if v.dtype == "bool" and v.shape[0]]
    if not able:
        return None
    steps, at, s = list(plan.steps), rng.randrange(len(plan.steps)), rng.choice(able)
    nbytes = -(-graph.storages[s].size // 512) * 64
    steps = _waits_after(steps, lambda w: w + 2 * (w >= at))
    pack = Step("compress", storages=(s,), nbytes=nbytes, codec="bits")
    steps[at:at] = [pack, Step("free", storages=(s,), form="packed")]
    return _steps(plan, steps)


def _reuse(graph: Graph, step: Step, rng: random.Random) -> dict[str, Any]:
    op = graph.ops[step.op]
    made, read = graph.uses.defines[step.op], list(graph.uses.reads[step.op])
    pairs = [*op.overwrites, *((a, b) for a in read for b in made)]
    return {"reuses": (rng.choice(pairs),)} if pairs else {"reuses": ((0, len(graph.storages) - 1),)}


def _waits(graph: Graph, plan: Plan, rng: random.Random) -> Plan | None:
    able = [i for i, s in enumerate(plan.steps) if s.waits]
    if not able:
        return None
    steps, i = list(plan.steps), rng.choice(able)
    waits = list(steps[i].waits)
    del waits[rng.randrange(len(waits))]
    steps[i] = replace(steps[i], waits=tuple(waits))
    return _steps(plan, steps)


def _stream(graph: Graph, plan: Plan, rng: random.Random) -> Plan:
    steps, i = list(plan.steps), rng.randrange(len(plan.steps))
    steps[i] = replace(steps[i], stream=rng.choice((-1, 0, 1, 2)))
    if rng.random() < 0.3:
        steps[i] = replace(steps[i], waits=(*steps[i].waits, rng.randrange(-1, len(steps))))
    return _steps(plan, steps)


def _waits_in_place(graph: Graph, plan: Plan, rng: random.Random) -> Plan | None:
    """A wait gone, places and all else as they were: bytes may be taken too early."""
    changed = _waits(graph, plan, rng)
    return None if changed is None else _stays_placed(graph, plan, changed)


def _stays_placed(graph: Graph, plan: Plan, changed: Plan) -> Plan:
    """The first steps, so that nothing is made to agree but the time."""
    return replace(changed, time=seconds_of(graph, changed.steps), time_bound=0.0)


# --- places ---


def _row(change: Callable[[Graph, Plan, Any, random.Random], dict[str, Any]]) -> Change:
    def changed(graph: Graph, plan: Plan, rng: random.Random) -> Plan | None:
        if not plan.residences:
            return None
        rows, k = list(plan.residences), rng.randrange(len(plan.residences))
        rows[k] = replace(rows[k], **change(graph, plan, rows[k], rng))
        return replace(plan, residences=tuple(rows))

    return changed


def _offset(graph: Graph, plan: Plan, row: Any, rng: random.Random) -> dict[str, Any]:
    others = [r.offset for r in plan.residences if r.pool == row.pool]
    return {"offset": rng.choice((*others, row.offset - 64, row.offset + 64, -64, 2**40))}


def _row_field(graph: Graph, plan: Plan, row: Any, rng: random.Random) -> dict[str, Any]:
    name = rng.choice(("start", "end", "size", "storage", "request", "first", "last", "pool", "form"))
    if name == "pool":
        return {"pool": rng.choice(("device", "host", "out", "elsewhere"))}
    if name == "form":
        return {"form": rng.choice(("full", "host", "packed", "state"))}
    return {name: getattr(row, name) + rng.choice((-64, -1, 1, 64))}


def _askew(graph: Graph, plan: Plan, rng: random.Random) -> Plan | None:
    """Everything a few bytes further on."""
    rows = tuple(replace(r, offset=r.offset + 8) if r.pool == "device" else r for r in plan.residences)
    return replace(plan, residences=rows, arena=plan.arena + 8, budget=None) if rows else None


def _unplaced(graph: Graph, plan: Plan, rng: random.Random) -> Plan | None:
    """A residence gone, with the bytes that were its alone."""
    rows = list(plan.residences)
    if len(rows) < 2:
        return None
    del rows[rng.randrange(len(rows))]
    handed = sum(r.size for r in rows if r.pool == "out")
    return replace(plan, residences=tuple(rows), handed=handed)


def _placed_twice(graph: Graph, plan: Plan, rng: random.Random) -> Plan | None:
    if not plan.residences:
        return None
    row = rng.choice(plan.residences)
    other = replace(row, offset=plan.arena + 64) if row.pool == "device" else row
    top = max(plan.arena, other.offset + -(-other.size // 64) * 64) if row.pool == "device" else plan.arena
    handed = plan.handed + (row.size if row.pool == "out" else 0)
    return replace(plan, residences=(*plan.residences, other), arena=top, handed=handed, budget=None)


# --- what a plan says of itself ---


def _claim(graph: Graph, plan: Plan, rng: random.Random) -> Plan:
    name = rng.choice((
        "peak", "static", "time", "time_before", "lower_bound", "arena", "host", "handed", "peak_before", "moved",
        "time_bound", "budget", "host_budget", "digest",
    ))  # fmt: skip
    if name == "digest":
        return replace(plan, digest="0" * len(plan.digest))
    if name == "budget":
        return replace(
            plan, budget=max(plan.peak, plan.static + plan.arena + plan.handed) - rng.choice((0, 1, 64))
        )
    if name == "host_budget":
        return replace(plan, host_budget=max(0, plan.host - rng.choice((0, 1, 64))))
    if name == "moved":
        return replace(plan, moved=rng.choice((-1, 0, len(graph.ops), len(graph.ops) + 1)))
    if name in ("lower_bound", "time_bound"):
        top = plan.peak if name == "lower_bound" else plan.time
        return replace(plan, **{name: top + rng.choice((0, 1))})
    return replace(plan, **{name: max(0, getattr(plan, name) + rng.choice((-64, 64, 1, -1)))})


def _inside(graph: Graph, plan: Plan, rng: random.Random) -> Plan | None:
    """An op that runs more inside of it than it has room for, or something wrong inside."""
    if not plan.inner:
        return None
    (row,) = plan.inner
    if rng.random() < 0.3:
        wrong = replace(row.plan, peak=row.plan.peak + 64)
        return replace(plan, inner=(replace(row, plan=wrong),))
    if rng.random() < 0.2:
        return replace(plan, inner=(replace(row, op=len(graph.ops)),))
    many = 2 + graph.ops[row.op].workspace // max(1, row.plan.peak - row.plan.static)
    return replace(plan, inner=(row,) * min(many, 40))


KINDS: dict[str, Change] = {
    "step gone": _gone, "step twice": _twice, "step moved": _moved, "another order": _another_order,
    "controls broken": _free_order,
    "recomputed": _again, "step's field": _field,
    "freed more": _at_steps("free", lambda g, s, r: {"storages": (*s.storages, r.randrange(len(g.storages)))}),
    "codec": _at_steps(("compress",), _codec), "packed early": _early_pack,
    "place taken": _at_steps(("compute", "recompute"), _reuse),
    "wait gone": _waits, "wait gone, placed": _waits_in_place, "stream": _stream,
    "offset": _row(_offset), "residence's field": _row(_row_field), "askew": _askew, "residence gone": _unplaced,
    "residence twice": _placed_twice, "claim": _claim, "inside": _inside,
}  # fmt: skip
"""By what is changed."""
