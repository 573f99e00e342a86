"""The verifier compares residences with the stays that steps imply, and finds bytes that two of them use."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.strategies import plans, random_plan
from support.verifying import (
    A,
    B,
    C,
    E,
    H,
    codes,
    good,
    placed,
    plain,
    small,
)
from tightship.graph import Graph, Op, Request, Storage, Value
from tightship.plan import Plan, Residence, Step
from tightship.simulate import baseline, replay
from tightship.verify import verify


def find(plan: Plan, storage: int, start: int, form: str = "full") -> int:
    rows = enumerate(plan.residences)
    return next(i for i, r in rows if (r.storage, r.start, r.form) == (storage, start, form))


def changed(plan: Plan, index: int, **changes: object) -> Plan:
    rows = list(plan.residences)
    rows[index] = replace(rows[index], **changes)  # type: ignore[arg-type]
    return replace(plan, residences=tuple(rows), arena=1 << 20, budget=None)


def apart(plan: Plan) -> Plan:
    """Every residence in bytes of its own, so that a change cannot cause overlaps."""
    rows = tuple(replace(r, offset=4096 * i) for i, r in enumerate(plan.residences))
    return replace(plan, residences=rows, arena=1 << 20, host=1 << 20, budget=None)


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("wrong-residence", {"end": 5}),
        ("wrong-residence", {"end": 7}),
        ("wrong-residence", {"end": 0}),
        ("wrong-residence", {"size": 64}),
        ("wrong-residence", {"size": 256}),
        ("wrong-residence", {"pool": "host"}),
        ("wrong-residence", {"pool": "elsewhere"}),
        ("wrong-residence", {"request": 0}),
        ("wrong-residence", {"first": 1}),
        ("wrong-residence", {"last": 1}),
        ("misaligned", {"offset": 32}),
        ("out-of-bounds", {"offset": -64}),
        ("out-of-bounds", {"offset": 1 << 20}),
        ("out-of-bounds", {"offset": (1 << 20) - 64}),
    ],
)
def test_wrong_residences_are_found(code: str, changes: dict[str, object]) -> None:
    plan = apart(placed())
    if changes.get("offset") == 32:
        changes = {"offset": 4096 * len(plan.residences) + 32}
    broken = changed(plan, find(plan, B, 1), **changes)
    assert codes(replace(broken, handed=0)) - {"peak-mismatch"} == {code}


@pytest.mark.parametrize("changes", [{"start": 2}, {"form": "packed"}, {"storage": A}])
def test_a_residence_of_something_else_leaves_the_right_one_missing(changes: dict[str, object]) -> None:
    plan = apart(placed())
    broken = changed(plan, find(plan, B, 1), **changes)
    assert codes(broken) == {"wrong-residence", "missing-residence"}
    assert codes(changed(plan, find(plan, B, 1), storage=77)) == {"unknown", "missing-residence"}


def test_each_missing_or_repeated_residence_is_found() -> None:
    for plan in (apart(random_plan(small(), seed, tuple(good()))) for seed in range(4)):
        for i, r in enumerate(plan.residences):
            fewer = replace(plan, residences=plan.residences[:i] + plan.residences[i + 1 :])
            handed = sum(x.size for x in fewer.residences if x.pool == "out")
            assert codes(replace(fewer, handed=handed)) == {"missing-residence"}
            more = replace(
                plan, residences=(*plan.residences, r), handed=plan.handed + r.size * (r.pool == "out")
            )
            assert "wrong-residence" in codes(more)


def test_results_may_leave_the_arena_and_nothing_else_may() -> None:
    plan = apart(placed())
    kept = changed(plan, find(plan, E, 15), pool="out")
    assert codes(replace(kept, handed=128)) == set()
    assert codes(kept) == {"peak-mismatch"}
    broken = changed(plan, find(plan, B, 1), pool="out")
    assert codes(replace(broken, handed=plan.handed + 128)) == {"wrong-residence"}


def scratch(*rows: tuple[int, int, int, int, int], base: int = 0) -> set[str]:
    """Codes when what h needs (step 3: a temporary of 192 until event 2, a result from 1 on) lies in ``rows``:
    (request, size, offset, first, last)."""
    graph, steps = small(), tuple(plain())
    plan = random_plan(graph, 0, steps)
    others = tuple(r for r in plan.residences if r.storage >= 0 or r.start != H)
    plan = apart(replace(plan, residences=others))
    result = find(plan, C, H)
    plan = changed(plan, result, offset=1 << 19, first=1)
    new = tuple(
        Residence(-1, H, H + 1, z, (1 << 19) + o, request=q, first=a, last=b) for q, z, o, a, b in rows
    )
    handed = sum(r.size for r in plan.residences if r.pool == "out")
    return codes(replace(plan, residences=plan.residences + new, handed=handed), graph)


def test_scratch_in_one_block_or_request_by_request() -> None:
    assert scratch((0, 192, 128, 0, 2)) == set()  # beside the result
    assert scratch((0, 192, 128, -1, -1)) == set()  # longer than asked for
    assert scratch((-1, 192, 128, -1, -1)) == set()
    assert scratch((0, 192, 64, 0, 2)) == {"overlap"}
    assert scratch() == {"missing-residence"}
    for wrong in [
        (0, 128, 128, 0, 2), (0, 192, 128, 1, 2), (0, 192, 128, 0, 1), (1, 128, 128, 1, -1), (2, 192, 128, 0, 2),
        (-1, 128, 128, -1, -1), (-1, 192, 128, 0, 2), (-2, 192, 128, -1, -1),
    ]:  # fmt: skip
        assert scratch(wrong) == {"wrong-residence", "missing-residence"}, wrong


def test_scratch_of_nothing_is_wrong() -> None:
    plan = apart(placed())
    stray = Residence(-1, 3, 4, 64, 1 << 19)
    assert codes(replace(plan, residences=(*plan.residences, stray))) == {"wrong-residence"}


def test_overlaps_are_found_by_event_and_by_step() -> None:
    plan = apart(placed())
    a, b, e = find(plan, A, 0), find(plan, B, 1), find(plan, E, 15)
    assert codes(changed(plan, b, offset=plan.residences[a].offset + 64)) == {"overlap"}
    assert codes(changed(plan, e, offset=plan.residences[a].offset)) == set()
    found = verify(small(), changed(plan, b, offset=plan.residences[a].offset))
    assert [(v.step, v.subjects) for v in found] == [(1, ("b", "a"))]


def test_bytes_freed_on_one_stream_are_reused_on_another_only_after_a_wait() -> None:
    steps = good()
    steps[13] = replace(steps[13], waits=())  # the fetch may now run as soon as the offload has
    plan = apart(random_plan(small(), 2, tuple(steps)))
    b, fetched = find(plan, B, 1), find(plan, C, 13)
    assert codes(plan) == set()
    assert (
        codes(changed(plan, fetched, offset=plan.residences[b].offset)) == set()
    )  # by way of the offload's wait
    old = find(plan, C, 5)
    assert codes(changed(plan, fetched, offset=plan.residences[old].offset)) == {"lane"}


@given(plans(max_ops=12, streams=False), st.integers(0, 2**32 - 1))
def test_overlaps_agree_with_comparing_all_pairs(pair: tuple[Graph, Plan], seed: int) -> None:
    graph, plan = pair
    rng = random.Random(seed)
    rows = [replace(r, offset=64 * rng.randrange(200)) if rng.random() < 0.2 else r for r in plan.residences]
    plan = replace(plan, residences=tuple(rows), arena=1 << 20, host=1 << 20, budget=None)
    assert (codes(plan, graph) == {"overlap"}) == any_overlap(rows)


def any_overlap(rows: Sequence[Residence]) -> bool:
    def life(r: Residence) -> tuple[tuple[int, int], tuple[int, int]]:
        return (r.start, max(r.first, 0)), (r.end - 1, r.last) if r.last >= 0 else (r.end, 0)

    here = [r for r in rows if r.pool != "out"]
    return any(
        a.pool == b.pool
        and a.offset < b.offset + b.size
        and b.offset < a.offset + a.size
        and life(a)[0] < life(b)[1]
        and life(b)[0] < life(a)[1]
        for i, a in enumerate(here)
        for b in here[:i]
    )


def test_what_called_graphs_need_is_a_block_beside_an_ops_own_requests() -> None:
    inner = small()
    storages, values = (Storage("x", 64), Storage("y", 64)), (Value("x", 0), Value("y", 1))
    asked = (Request(128, -1, 0, 1), Request(64, 0, 0, -1))
    loop = Op("loop", "while", (0,), (1,), workspace=128, requests=asked, calls=(inner,))
    graph = Graph((loop,), values, storages, (0,), (1,))
    steps = (Step("compute", op=0),)
    need = replay(inner, baseline(inner)).peak - inner.static_bytes
    plan = apart(random_plan(graph, 0, steps))
    result = Residence(1, 0, 1, 64, 0)
    part, block = Residence(-1, 0, 1, 128, 1 << 12, request=0), Residence(-1, 0, 1, need, 1 << 13)
    whole = replace(block, size=need + 128)

    def found(*rows: Residence) -> set[str]:
        return codes(replace(plan, residences=(result, *rows), handed=0), graph)

    assert found(part, block) == found(whole) == set()
    assert found(part) == {"missing-residence"}
    assert found(block) == {"missing-residence", "wrong-residence"}
    assert found(part, whole) == {"wrong-residence", "missing-residence"}
