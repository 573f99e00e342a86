"""Results in the places of inputs: what it means, what the verifier refuses, what the engine makes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support.lowering import costs
from support.strategies import random_graph
from tightship import serde
from tightship.analysis.bounds import lower_bound
from tightship.errors import BadInput
from tightship.graph import Graph, Op, Request, Storage, Value
from tightship.plan import Plan, Step
from tightship.planners import default
from tightship.planners.evict.problem import EvictionProblem
from tightship.planners.layout import lay_out
from tightship.simulate import baseline, replay
from tightship.verify import verify

X, A, B, C, D = range(5)
HUGE = 1 << 60


def small(**changes: object) -> Graph:
    """a is made of x, b of a and may lie over it, c of b and may lie over it, d of a half c."""
    storages = (Storage("x", 64, "input"), *(Storage(n, 256) for n in "abc"), Storage("d", 128))
    values = tuple(Value(s.name, k) for k, s in enumerate(storages))
    ops = (
        Op("f", "f", (X,), (A,), time=1.0),
        Op("g", "g", (A, X), (B,), time=1.0, overwrites=((A, B),)),
        Op("h", "h", (B,), (C,), time=1.0, overwrites=((B, C),), workspace=64),
        Op("i", "i", (C,), (D,), time=1.0),
    )
    return replace(Graph(ops, values, storages, (X,), (D,)), **changes)  # type: ignore[arg-type]


def run(op: int, *reuses: tuple[int, int]) -> Step:
    return Step("compute", op=op, reuses=reuses)


GOOD = (run(0), run(1, (A, B)), run(2, (B, C)), run(3), Step("free", storages=(C,)))


def plan_of(graph: Graph, steps: tuple[Step, ...]) -> Plan:
    layout = lay_out(graph, steps)
    return Plan(
        graph.digest, steps, layout.residences, arena=layout.arena, handed=layout.handed, host=layout.host,
        **costs(graph, steps),
    )  # fmt: skip


def codes(graph: Graph, *steps: Step) -> set[str]:
    plan = Plan(graph.digest, steps, static=graph.static_bytes)
    return {v.code for v in verify(graph, plan)} - {"peak-mismatch", "time-mismatch"}


# ---- meaning


def test_the_bytes_of_a_result_and_of_the_input_beneath_it_count_once() -> None:
    line = replay(small(), GOOD)
    assert line.during == (64 + 256, 64 + 256, 64 + 256 + 64, 64 + 256 + 128, 64 + 256 + 128)
    assert line.resident == (320, 320, 320, 448, 192)
    assert replay(small(), baseline(small())).peak == 64 + 256 + 256 + 64


def test_a_plan_without_budget_takes_places_unless_told_not_to() -> None:
    graph = small()
    plan = default.plan(graph)
    assert plan.steps == GOOD and plan.peak == 448 and plan.peak_before == 640
    assert plan.lower_bound == lower_bound(graph) == 448
    for o in (default.Options(reuse=False), default.Options(place=False)):
        assert default.plan(graph, options=o).peak == 640 == default.plan(graph, options=o).lower_bound


def test_a_recomputation_takes_a_place_too() -> None:
    """b is wanted again by an op after c: a is made again, and b in its place."""
    graph = small()
    ops = (*graph.ops, Op("j", "j", (B, D), (), effect=True))
    graph = replace(graph, ops=ops)
    frame = EvictionProblem(graph, tuple(range(5)))
    bits = np.array([int(s == B) for s in frame.gaps[:, 0]], np.uint8)
    steps = frame.steps(bits)
    assert [(s.op, s.reuses) for s in steps if s.kind == "recompute"] == [(0, ()), (1, ((A, B),))]
    assert replay(graph, steps).peak == frame.cost(bits, HUGE).peak == 448  # 640 if c were beside b


def test_what_is_used_later_or_the_callers_keeps_its_place() -> None:
    graph = small()
    later = replace(graph, ops=(*graph.ops[:3], replace(graph.ops[3], inputs=(C, A))))
    assert [s.reuses for s in default.plan(later).steps if s.reuses] == [((B, C),)]
    for kept in (A, B):
        held = replace(graph, outputs=(D, kept))
        assert all(a != kept for s in default.plan(held).steps for a, _ in s.reuses)


def test_input_and_result_lie_at_one_offset_and_residences_meet_at_the_step() -> None:
    plan = plan_of(small(), GOOD)
    at = {r.storage: r for r in plan.residences if r.storage >= 0}
    assert at[A].offset == at[B].offset == at[C].offset
    assert [(at[s].start, at[s].end) for s in (A, B, C)] == [(0, 1), (1, 2), (2, 4)]
    assert plan.arena == 256 + 64 and plan.handed == 128
    assert verify(small(), plan) == []


def test_temporaries_before_the_result_do_not_lie_on_the_input() -> None:
    graph = small()
    requests = (Request(64, -1, 0, 1), Request(256, 0, 2, -1))
    ops = (graph.ops[0], replace(graph.ops[1], requests=requests, workspace=0), *graph.ops[2:])
    graph = graph.with_ops(ops)
    plan = plan_of(graph, GOOD)
    assert verify(graph, plan) == []
    temporary = next(r for r in plan.residences if r.storage < 0 and r.start == 1)
    a = next(r for r in plan.residences if r.storage == A)
    assert not a.offset < temporary.offset + 64 <= a.offset + 256


# ---- what is refused


def test_a_graph_says_sensible_things() -> None:
    graph = small()

    def with_pair(*pairs: tuple[int, int]) -> Graph:
        return graph.with_ops((graph.ops[0], replace(graph.ops[1], overwrites=pairs), *graph.ops[2:]))

    for pair in ((C, B), (A, C), (A, A), (B, A), (-1, B)):
        with pytest.raises(BadInput, match="may overwrite is read"):
            with_pair(pair)
    with pytest.raises(BadInput, match="has its size"):
        with_pair((X, B))
    assert with_pair().digest != graph.digest == small().digest


@pytest.mark.parametrize("early", ["an op before", "the caller"])
def test_what_takes_a_place_is_not_there_before(early: str) -> None:
    """An earlier op, or the caller, made the storage of which the op returns another view."""
    graph = small()
    view = len(graph.values)
    values = (*graph.values, replace(graph.values[B], name="view", storage=B))
    if early == "the caller":
        ops, inputs = graph.ops, (*graph.inputs, view)
    else:
        first = graph.ops[0]
        ops, inputs = (replace(first, outputs=(*first.outputs, view)), *graph.ops[1:]), graph.inputs
    with pytest.raises(BadInput, match="is not there before"):
        replace(graph, values=values, ops=ops, inputs=inputs)


@pytest.mark.parametrize("steps", [
    (run(0, (X, A)), *GOOD[1:]),
    (run(0), run(1, (B, A)), *GOOD[2:]),
    (run(0), run(1, (A, B), (A, B)), *GOOD[2:]),
    (run(0), run(1, (A, D)), *GOOD[2:]),
    (run(0), run(1), Step("free", storages=(B,)), Step("recompute", op=1, reuses=((A, B),)), *GOOD[2:]),
    (run(0), run(1), Step("recompute", op=1, storages=(B,), reuses=((A, B),)), *GOOD[2:]),
], ids=["the caller's", "backwards", "twice", "another op's", "not kept", "there already"])  # fmt: skip
def test_what_is_no_reuse_is_refused(steps: tuple[Step, ...]) -> None:
    with pytest.raises(BadInput):
        replay(small(), steps)
    assert "reuse" in codes(small(), *steps)


def test_what_lost_its_place_is_gone() -> None:
    graph = small()
    assert codes(graph, *GOOD) == set()
    assert codes(graph, *GOOD[:4], Step("free", storages=(C, B))) == {"foreign-free"}
    later = graph.with_ops((*graph.ops[:3], replace(graph.ops[3], inputs=(C, A))))
    assert codes(later, *GOOD) == {"not-resident"}
    assert codes(replace(graph, outputs=(D, A)), *GOOD) == {"lost-output"}
    assert codes(graph, run(0), Step("free", storages=(A,)), *GOOD[1:]) == {"not-resident", "reuse"}
    assert "unknown" in codes(graph, run(0), run(1, (99, B)), *GOOD[2:])


def test_a_copy_of_what_is_overwritten_is_waited_for() -> None:
    graph = small()
    out = Step("offload", storages=(A,), stream=1, waits=(0,))
    gone = Step("free", storages=(A,), form="host", waits=(1,))
    late = (run(0), out, run(1, (A, B)), *GOOD[2:], gone)
    assert codes(graph, *late) == {"lane"}
    assert codes(graph, *late[:2], replace(late[2], waits=(1,)), *late[3:]) == set()


def test_a_place_is_exactly_that_of_the_input() -> None:
    graph = small()
    plan = plan_of(graph, GOOD)

    def moved(**changes: object) -> set[str]:
        rows = tuple(replace(r, **changes) if r.storage == B else r for r in plan.residences)  # type: ignore[arg-type]
        found = verify(graph, replace(plan, residences=rows, arena=plan.arena + 512))
        return {v.code for v in found}

    assert moved() == set()
    assert moved(offset=512) == {"reuse"}
    assert moved(offset=64) == {"reuse"}
    assert moved(pool="somewhere") == {"reuse", "wrong-residence"}


# ---- on random graphs


@pytest.mark.parametrize("seed", range(40))
def test_what_the_engine_takes_is_what_the_replay_and_the_verifier_see(seed: int) -> None:
    graph = random_graph(seed, 8 + seed, overwrites=0.8)
    frame = EvictionProblem(graph, tuple(range(len(graph.ops))), ("recompute", "compress", "offload"))
    beside = replace(frame, in_place=False)
    rng = np.random.default_rng(seed)
    for kinds in (1, 2, 4, 6):
        bits = rng.choice(kinds, len(frame.gaps)).astype(np.uint8)
        found = frame.cost(bits, HUGE)
        assert found.valid == beside.cost(bits, HUGE).valid
        if not found.valid:
            continue
        steps = frame.steps(bits)
        assert replay(graph, steps).peak == found.peak <= beside.cost(bits, HUGE).peak
        assert verify(graph, plan_of(graph, steps)) == []


def test_places_are_taken_on_random_graphs_by_first_runs_and_by_others() -> None:
    """Otherwise the test above would show nothing."""
    kinds = []
    for seed in range(40):
        graph = random_graph(seed, 8 + seed, overwrites=0.8)
        frame = EvictionProblem(graph, tuple(range(len(graph.ops))))
        bits = frame.nothing() + np.uint8(3)
        if frame.cost(bits, HUGE).valid:
            kinds += [s.kind for s in frame.steps(bits) if s.reuses]
    assert kinds.count("compute") > 50 and kinds.count("recompute") > 10


def test_plans_and_graphs_come_back_from_files() -> None:
    graph = small()
    plan = plan_of(graph, GOOD)
    assert serde.loads_plan(serde.dumps_plan(plan, graph)) == (plan, graph)
    data = serde.dumps_plan(plan, graph).replace(b"[[1,2]]", b"[[1,9]]")
    with pytest.raises(BadInput, match=r"index of the graph's 5 storages|may overwrite is read"):
        serde.loads_plan(data)
