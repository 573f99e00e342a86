"""The verifier finds each thing that can be wrong with a plan, and only that; broken plans are broken one way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.lowering import costs, random_steps
from support.strategies import graphs, plans, random_graph, random_plan
from support.verifying import (
    DRAW,
    MARK,
    REDRAW,
    SCALE,
    UPDATE,
    A,
    B,
    C,
    D,
    E,
    F,
    G,
    H,
    W,
    at,
    codes,
    decided,
    free,
    good,
    placed,
    plain,
    run,
    small,
    step_codes,
)
from tightship.errors import BadInput, VerificationFailed
from tightship.graph import Graph, Op, Storage, Value
from tightship.plan import Inner, Plan, Step
from tightship.simulate import baseline, replay
from tightship.verify import PLAN_RULES, check, verify
from tightship.verify.facts import PER_CODE, facts_of

CODES = [rule.code for rule in PLAN_RULES]


def test_the_good_plan_is_good() -> None:
    assert step_codes(good()) == step_codes(plain()) == set()
    for seed in range(20):
        assert verify(small(), random_plan(small(), seed, tuple(good()))) == []
    check(small(), placed())


_pack = [Step("compress", storages=(D,), nbytes=64, codec="bits")]
_unpack = free(D, form="packed")
_again = Step("recompute", op=G, storages=(B,))
_out = Step("offload", storages=(C,))
_saved, _forget = Step("compute", op=DRAW, saves=True), Step("free", op=DRAW, form="state")
_redraw = Step("recompute", op=DRAW, storages=(D,))


def _drawn() -> list[Step]:
    return [*run(*range(DRAW)), *run(DRAW, REDRAW), free(D)]


def _packing(**changes: object) -> list[Step]:
    """d is packed and back, changed."""
    return plain(replace(_pack[0], **changes), _unpack)  # type: ignore[arg-type]


_stale_copy = [
    *run(F, G),
    Step("offload", storages=(B,)),
    *run(SCALE),
    free(B),
    Step("fetch", storages=(B,)),
    free(B, form="host"),
]

BROKEN_STEPS: dict[str, tuple[set[str], list[Step]]] = {
    "op 99": ({"unknown"}, plain(Step("compute", op=99))),
    "op -1": ({"unknown"}, plain(Step("recompute"))),
    "storage 99": ({"unknown"}, plain(free(99))),
    "storage -1": ({"unknown"}, plain(Step("offload", storages=(-1,)))),
    "a kind": ({"unknown"}, plain(Step("jump"))),
    "a form": ({"unknown"}, plain(free(A, form="gas"), *[])),
    "a wait for later": ({"unknown"}, plain(free(waits=(10,)))),
    "a wait for itself": ({"unknown"}, plain(free(waits=(8,)))),
    "a stream": ({"unknown"}, plain(Step("free", stream=-1))),
    "streams without end": ({"unknown"}, plain(*(Step("free", stream=k) for k in range(100)))),
    "no packed bytes": ({"unknown", "codec"}, plain(Step("compress", storages=(A,)), free(A, form="packed"))),
    "a foreign result": (
        {"unknown"},
        [*run(F, G), Step("recompute", op=F, storages=(C,)), *run(*range(SCALE, 8)), free(A, B, C, D)],
    ),
    "op left out": ({"missing-op"}, plain(order=range(7))),
    "op twice": ({"repeated-op"}, plain(*run(MARK))),
    "random order": ({"order"}, plain(order=[F, G, SCALE, H, MARK, REDRAW, DRAW, UPDATE])),
    "control edge": ({"order"}, plain(order=[F, MARK, G, SCALE, H, DRAW, REDRAW, UPDATE])),
    "read before write": ({"hazard"}, plain(order=[F, G, H, SCALE, MARK, DRAW, REDRAW, UPDATE])),
    "write before read": ({"hazard"}, plain(order=[F, G, SCALE, H, DRAW, REDRAW, UPDATE, MARK])),
    "use first": ({"use-before-definition"}, plain(order=[G, F, SCALE, H, MARK, DRAW, REDRAW, UPDATE])),
    "evicted, not restored": ({"not-resident"}, at(4, free())),
    "packed form not there": ({"not-resident"}, plain(free(D), Step("decompress", storages=(D,)))),
    "packed though gone": ({"not-resident"}, plain(free(D), *_pack, Step("decompress", storages=(D,)), _unpack)),
    "recomputed though there": (
        {"already-resident"},
        [*run(F), Step("recompute", op=F, storages=(A,)), *run(*range(G, 8)), free(A, B, C, D)],
    ),
    "fetched though there": ({"already-resident"}, at(12, free())),
    "part of a recipe": ({"stale"}, [*run(F, G, SCALE), free(B), _again, *run(*range(H, 8)), free(A, B, C, D)]),
    "an old copy": ({"stale"}, [*_stale_copy, *run(*range(H, 8)), free(A, B, C, D)]),
    "inputs have changed": ({"stale"}, plain(Step("recompute", op=F))),
    "random again": ({"impure-recompute"}, plain(Step("recompute", op=DRAW))),
    "random again, state gone": ({"impure-recompute"}, [*_drawn(), _redraw, *run(UPDATE), free(A, B, C, D)]),
    "random again too late": (
        {"impure-recompute"},
        [*run(*range(DRAW)), _saved, *run(REDRAW), _forget, free(D), _redraw, *run(UPDATE), free(A, B, C, D)],
    ),
    "state of another op": (
        {"unknown"},
        [*run(*range(REDRAW)), Step("compute", op=REDRAW, saves=True), *run(UPDATE), free(A, B, C, D)],
    ),
    "state never freed": ({"leak"}, [*run(*range(DRAW)), _saved, *run(REDRAW, UPDATE), free(A, B, C, D)]),
    "state freed unsaved": ({"foreign-free"}, plain(_forget)),
    "another codec": ({"codec"}, _packing(codec="uint8")),
    "a codec unheard of": ({"codec"}, _packing(codec="zip")),
    "no codec": ({"codec"}, _packing(codec="")),
    "too few bytes": ({"codec"}, _packing(storages=(D,), nbytes=32)),
    "loss": ({"codec"}, _packing(codec="bf16")),
    "packed before its last write": (
        {"codec", "stale"},
        [*run(F, G), Step("compress", storages=(B,), nbytes=64, codec="bits"), *run(SCALE), free(B),
         Step("decompress", storages=(B,)), free(B, form="packed"), *run(*range(H, 8)), free(A, B, C, D)],
    ),
    "packed form of an old version": (
        {"codec", "stale"},
        [*run(F, G), Step("compress", storages=(B,), nbytes=64, codec="bits"), free(B), _again,
         *run(SCALE), free(B), Step("decompress", storages=(B,)), free(B, form="packed"),
         *run(*range(H, 8)), free(A, B, C, D)],
    ),
    "packed twice": ({"already-resident"}, plain(*_pack, *_pack, _unpack)),
    "copied out twice": ({"already-resident"}, plain(_out, _out, free(C, form="host"))),
    "fetch of what was never copied": ({"not-resident"}, plain(free(D), Step("fetch", storages=(D,)))),
    "fetched into the copy's place too early": ({"lane"}, at(13, Step("fetch", storages=(C,), stream=2))),
    "written while copied out": (
        {"lane"},
        [*run(F, G), Step("offload", storages=(B,), stream=1, waits=(1,)), *run(*range(SCALE, 8)),
         free(B, form="host", waits=(2,)), free(A, B, C, D)],
    ),
    "effect again": (
        {"impure-recompute"},
        [*run(*range(7)), Step("recompute", op=MARK), *run(UPDATE), free(A, B, C, D)],
    ),
    "update again": ({"impure-recompute", "stale"}, plain(Step("recompute", op=UPDATE))),
    "again before first": ({"impure-recompute"}, [Step("recompute", op=F), *plain()]),
    "the caller's": ({"foreign-free"}, plain(free(W))),
    "freed twice": ({"foreign-free"}, [*plain(), free(A)]),
    "another form": ({"foreign-free"}, plain(free(A, form="host"))),
    "result freed": ({"lost-output"}, plain(free(E))),
    "never freed": ({"leak"}, run(*range(8))),
    "copy never freed": ({"leak"}, plain(Step("offload", storages=(A,)))),
    "freed while copied out": ({"lane"}, at(12, free(C))),
    "used before fetched": ({"lane"}, [*good()[:14], *run(REDRAW), good()[14], *good()[16:]]),
    "copy freed while fetched": ({"lane"}, at(14, free(C, form="host"))),
    "copied before made": ({"lane"}, at(11, Step("offload", storages=(C,), stream=1))),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN_STEPS)
def test_wrong_steps_are_found(what: str) -> None:
    expected, steps = BROKEN_STEPS[what]
    found = step_codes(steps)
    # A wrong form of a free leaves behind what it should have freed; nothing else may follow from a fault.
    allowed = {"not-resident": {"foreign-free"}}.get(next(iter(expected)), set())
    assert expected <= found <= expected | allowed, verify(small(), decided(steps))


BROKEN_TOTALS = {
    "unknown": {"digest": "0" * 64},
    "over-budget": {"budget": 700},
    "peak-mismatch": {"peak": 1},
    "time-mismatch": {"time": 1.0},
    "count-mismatch": {"moved": 9},
    "bound": {"lower_bound": 1 << 40},
}


@pytest.mark.parametrize("code", BROKEN_TOTALS)
def test_wrong_totals_are_found(code: str) -> None:
    assert codes(placed(**{"budget": None, **BROKEN_TOTALS[code]})) == {code}


def test_static_and_handed_bytes_and_what_they_do_to_the_budget() -> None:
    plan = placed(budget=None)
    assert codes(replace(plan, static=0)) == {"peak-mismatch"}
    assert codes(replace(plan, handed=plan.handed + 64)) == {"peak-mismatch"}
    most = max(plan.peak, plan.static + plan.arena + plan.handed)
    assert codes(replace(plan, budget=most)) == set()
    assert codes(replace(plan, budget=most - 1)) == {"over-budget"}


def test_every_code_is_broken_here() -> None:
    placement = {"missing-residence", "wrong-residence", "overlap", "misaligned", "out-of-bounds"}
    broken = set().union(*(c for c, _ in BROKEN_STEPS.values()), BROKEN_TOTALS, placement)
    assert broken | {"inner", "reuse"} == set(CODES)


def test_plans_inside_a_plan_are_checked_and_fit_the_workspace_of_their_op() -> None:
    inside = Graph(
        (Op("f", "f", (0,), (1,)), Op("g", "g", (1,), (2,))),
        tuple(Value(n, k) for k, n in enumerate("xyz")),
        (Storage("x", 0), Storage("y", 32), Storage("z", 0)), (0,), (2,), "body",
    )  # fmt: skip
    steps = (*run(0, 1), free(1))
    body = Plan(inside.digest, steps, **costs(inside, steps))
    outer = replace(placed(), inner=(Inner(G, inside, body), Inner(G, inside, body)))
    assert verify(small(), outer) == []  # 64 bytes of workspace, two times 32
    assert codes(replace(outer, inner=(*outer.inner, Inner(G, inside, body)))) == {"inner"}
    assert codes(replace(outer, inner=(Inner(F, inside, body),))) == {"inner"}
    assert codes(replace(outer, inner=(Inner(99, inside, body),))) == {"unknown"}
    wrong = replace(body, steps=steps[1:])
    (found, *_) = verify(small(), replace(outer, inner=(Inner(G, inside, wrong),)))
    assert found.message.startswith("inside g: ")
    deep = replace(placed(), inner=())
    for _ in range(102):
        deep = replace(placed(), inner=(Inner(G, small(), deep),))
    assert "more than 100 deep" in " ".join(v.message for v in verify(small(), deep))


# Everything wrong is told, within reason


def test_all_kinds_of_faults_are_collected() -> None:
    steps = [*plain(order=range(7)), free(A), Step("compute", op=99)]
    assert step_codes(steps) == {"missing-op", "foreign-free", "unknown"}


def test_a_flood_of_one_kind_does_not_hide_another() -> None:
    found = verify(small(), decided([*plain(), *[free(A)] * 1000, Step("jump")]))
    assert sum(v.code == "foreign-free" for v in found) == PER_CODE
    assert "unknown" in {v.code for v in found}


def test_check_raises_with_the_violations() -> None:
    with pytest.raises(VerificationFailed, match="there is no op 99") as caught:
        check(small(), decided(plain(Step("compute", op=99))))
    assert any(v.code == "unknown" for v in caught.value.violations)  # type: ignore[attr-defined]


def test_messages_name_ops_and_storages() -> None:
    (found,) = (v for v in verify(small(), decided(plain(free(E)))) if v.code == "lost-output")
    assert found.subjects == ("e",) and "e is a result" in found.message


def test_a_random_op_may_run_again_from_its_saved_state() -> None:
    steps = [
        *run(*range(DRAW)),
        _saved,
        free(D),
        *run(REDRAW),
        _redraw,
        _forget,
        *run(UPDATE),
        free(A, B, C, D),
    ]
    assert step_codes(steps) == set()
    plan = random_plan(small(), 2, tuple(steps))
    assert verify(small(), plan) == []
    states = [(r.start, r.end, r.size, r.request) for r in plan.residences if r.form == "state"]
    assert sorted(states) == [(5, 9, 64, DRAW), (8, 9, 64, DRAW)]
    for r in plan.residences:
        if r.form == "state":
            rest = tuple(x for x in plan.residences if x != r)
            assert "missing-residence" in codes(replace(plan, residences=rest))
            longer = replace(r, end=r.end + 1)
            assert "wrong-residence" in codes(replace(plan, residences=(*rest, longer)))


def test_a_lossy_codec_needs_the_plans_word() -> None:
    x, y = (Value("x", 0, "float32", (64,), (1,)), Value("y", 1, "float32", (64,), (1,)))
    graph = Graph((Op("f", "f", (0,), (1,)),), (x, y), (Storage("x", 256), Storage("y", 256)), (0,), (1,))
    steps = [*run(0), Step("compress", storages=(1,), nbytes=128, codec="bf16"), free(1, form="packed")]
    assert step_codes(steps, graph) == {"codec"}
    assert codes(replace(decided(steps, graph), lossy=True), graph) == {"peak-mismatch", "time-mismatch"}


# Recomputation, in detail


def test_running_statistics_are_left_alone_when_an_op_is_recomputed() -> None:
    storages = (Storage("x", 64), Storage("mean", 64), Storage("y", 64), Storage("z", 64))
    values = tuple(Value(s.name, i) for i, s in enumerate(storages))
    norm = Op("norm", "batch_norm", (0,), (2,), mutates=(1,), updates=(1,))
    graph = Graph((norm, Op("z", "z", (2,), (3,))), values, storages, (0, 1), (3,))
    steps = [*run(0), free(2), Step("recompute", op=0, storages=(2,)), *run(1), free(2)]
    assert step_codes(steps, graph) == set()
    strict = replace(graph, ops=(replace(norm, updates=()), graph.ops[1]))
    assert step_codes(steps, strict) == {"impure-recompute", "stale"}


def test_a_recipe_of_several_writes_restores_the_last_version() -> None:
    steps = [
        *run(F, G, SCALE), free(B), Step("recompute", op=G, storages=(B,)), Step("recompute", op=SCALE),
        *run(*range(H, 8)), free(A, B, C, D),
    ]  # fmt: skip
    assert step_codes(steps) == set()
    assert step_codes([*steps[:6], Step("recompute", op=SCALE), *steps[6:]]) == {"stale"}


def test_a_recomputation_needs_room_for_what_it_does_not_keep() -> None:
    graph = small()
    steps = [*run(F), Step("recompute", op=F), *run(*range(G, 8)), free(A, B, C, D)]
    plan = random_plan(graph, 0, tuple(steps))
    assert verify(graph, plan) == []
    second = [r for r in plan.residences if r.storage == A and (r.start, r.end) == (1, 2)]
    assert [r.size for r in second] == [128]


# Random graphs and plans


@given(graphs())
def test_facts_agree_with_the_graphs_own(graph: Graph) -> None:
    facts, uses = facts_of(graph), graph.uses
    for k in range(len(graph.ops)):
        assert facts.sees[k] == dict(zip(uses.reads[k], uses.needs[k], strict=True))
        assert (tuple(facts.makes[k]), tuple(facts.writes[k])) == (uses.defines[k], uses.mutates[k])
    assert tuple(facts.maker) == uses.definer
    assert facts.final == [len(w) for w in uses.writers]


@given(plans())
def test_valid_plans_have_no_violation(pair: tuple[Graph, Plan]) -> None:
    graph, plan = pair
    assert verify(graph, plan) == []


@given(graphs(static_writes=1.0))
def test_the_baseline_is_valid(graph: Graph) -> None:
    assert verify(graph, random_plan(graph, 0, baseline(graph))) == []


@given(graphs(), st.integers(0, 2**32 - 1), st.data())
def test_steps_the_reference_refuses_are_refused_and_peaks_agree(
    graph: Graph, seed: int, data: st.DataObject
) -> None:
    steps = list(random_steps(graph, seed, streams=False))
    rng = random.Random(data.draw(st.integers(0, 2**32 - 1)))
    for _ in range(data.draw(st.integers(0, 2))):
        i, j = rng.randrange(len(steps)), rng.randrange(len(steps))
        match rng.randrange(4):
            case 0 if len(steps) > 1:
                del steps[i]
            case 1:
                steps.insert(j, steps[i])
            case 2:
                steps[i] = replace(steps[i], storages=steps[i].storages[1:])
            case _:
                steps[i], steps[j] = steps[j], steps[i]
    plan = replace(decided(steps, graph), peak=-1)
    found = verify(graph, plan)
    try:
        line = replay(graph, steps)
    except BadInput:
        assert {v.code for v in found} - {"peak-mismatch"}
        return
    mismatch = next(v for v in found if v.code == "peak-mismatch")
    if {v.code for v in found} == {"peak-mismatch"}:
        assert f"reach {line.peak}" in mismatch.message


@pytest.mark.parametrize("seed", range(20))
def test_copies_without_any_waits_are_not_safe(seed: int) -> None:
    """A missing wait is a lane, and nothing else follows from it."""
    graph = random_graph(seed, 40)
    steps = random_steps(graph, seed, rate=0.4)
    bare = [replace(s, waits=()) for s in steps]
    found = step_codes(bare, graph)
    assert found == ({"lane"} if any(s.stream for s in steps) else set())


@pytest.mark.slow
def test_a_hundred_thousand_steps_take_seconds() -> None:
    import time

    graph = random_graph(1, 60_000, calls=0.0)
    steps = baseline(graph)
    assert len(steps) > 90_000
    plan = replace(decided(steps, graph), **costs(graph, steps))
    began = time.perf_counter()
    assert verify(graph, plan) == []
    assert time.perf_counter() - began < 20
