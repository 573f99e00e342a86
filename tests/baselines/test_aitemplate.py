"""AITemplate's memory planning (A1 to A10), on graphs made for it and on real models."""

# ruff: noqa: N802

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.strategies import graphs
from support.zoo import captured, measured
from tightship.analysis.concurrency import ancestors, waves
from tightship.analysis.order import predecessors
from tightship.baselines.aitemplate import Options, Record, check_records, plan, records
from tightship.errors import BadInput
from tightship.graph import Graph, Op, Storage, Value
from tightship.plan import Buffer, Problem
from tightship.planners import planner
from tightship.serde import dumps_plan, loads_plan
from tightship.verify import verify

GREEDY_BY_SIZE = planner("greedy-by-size", "place")
REAL = ("gpt2", "resnet", "lstm")


def toy() -> Graph:
    """in -> a -> b, a view of a -> c, and a constant; b and c run side by side before out."""
    sizes = {"in": 100, "k": 40, "a": 70, "b": 130, "c": 60, "out": 10}
    storages = tuple(Storage(n, s, "constant" if n == "k" else "activation") for n, s in sizes.items())
    values = (
        *(Value(n, k, "uint8", (s,), (1,)) for k, (n, s) in enumerate(sizes.items())),
        Value("a.view", 2, "uint8", (30,), (1,), 10),
        Value("a.view.view", 2, "uint8", (5,), (1,), 12),
        Value("in.view", 0, "uint8", (50,), (1,)),
    )
    ops = (
        Op("view in", "view", (0,), (8,)),
        Op("a", "f", (8, 1), (2,), workspace=20),
        Op("view", "view", (2,), (6,)),
        Op("view again", "view", (6,), (7,)),
        Op("b", "f", (2,), (3,), workspace=200),
        Op("c", "f", (7,), (4,), workspace=100),
        Op("out", "f", (3, 4), (5,), workspace=50),
    )
    return Graph(ops, values, storages, (0, 1), (5,))


def record(graph: Graph, name: str, **options: object) -> Record:
    return next(r for r in records(graph, Options(**options)) if r.name == name)


def test_A01_a_record_has_first_and_last_use_and_the_aligned_size() -> None:
    graph = toy()
    assert {r.name for r in records(graph)} == {"a", "b", "c", "out"}  # not the caller's
    a, out = record(graph, "a"), record(graph, "out")
    assert (a.first, a.last, a.size) == (1, 5, 128)  # to the view of its view
    assert record(graph, "a", alignment=16).size == 80
    assert (out.first, out.last) == (6, 6)  # a result lives to the end
    early = replace(graph, outputs=(3, 5))
    assert record(early, "b").last == 6


@pytest.mark.parametrize("name", REAL)
def test_A01_of_real_models(name: str) -> None:
    graph = captured(name)
    found = records(graph)
    planned = {r.storage for r in found}
    assert planned == {
        s for s, storage in enumerate(graph.storages) if s not in graph.static and storage.size
    }
    assert all(r.last == len(graph.ops) - 1 for r in found if r.storage in graph.kept)
    assert all(r.size % 64 == 0 and r.first == graph.uses.definer[r.storage] for r in found)


def test_A02_views_have_the_offset_of_what_they_view_and_make_it_live() -> None:
    graph = toy()
    assert record(graph, "a").views == ("a", "a.view", "a.view.view")
    assert not any("in.view" in r.views for r in records(graph))  # a view of what the user gives
    real = captured("gpt2")
    viewed = [r for r in records(real) if len(r.views) > 2]
    assert viewed
    made = plan(real)
    for r in viewed:  # one residence, so one offset, for as long as any view is used
        stays = [x for x in made.residences if x.storage == r.storage]
        assert len(stays) == 1


@pytest.mark.parametrize("name", REAL)
def test_A03_greedy_by_size_with_best_fit(name: str) -> None:
    graph = captured(name)
    made = plan(graph)
    rows = records(graph)
    problem = Problem(tuple(Buffer(r.name, r.first, r.last + 1, r.size, 64) for r in rows))
    placed = GREEDY_BY_SIZE.plan(problem)
    offsets = {r.storage: x for r, x in zip(rows, placed.offsets, strict=True)}
    assert all(r.offset == offsets[r.storage] for r in made.residences if r.storage >= 0)
    assert made.meta["aitemplate"]["values"] == placed.arena
    assert verify(graph, made) == []


def test_A03_the_smallest_gap_that_fits() -> None:
    """Gaps of 3 and 2 units; what has 2 goes into the smaller one although it lies higher."""
    rows = [("top", 0, 9, 9), ("x", 0, 4, 5), ("low", 0, 9, 4), ("y", 4, 9, 3), ("z", 4, 9, 1)]
    buffers = tuple(Buffer(n, lower, upper, size) for n, lower, upper, size in rows)
    offsets = dict(zip((b.id for b in buffers), GREEDY_BY_SIZE.plan(Problem(buffers)).offsets, strict=True))
    assert (offsets["top"], offsets["x"], offsets["low"]) == (0, 9, 14)
    assert (offsets["y"], offsets["z"]) == (9, 12)


@pytest.mark.parametrize("name", REAL)
def test_A04_naive_planning_reuses_nothing(name: str) -> None:
    graph = captured(name)
    naive, greedy = plan(graph, Options(place="naive")), plan(graph)
    assert naive.meta["aitemplate"]["values"] == sum(r.size for r in records(graph))
    assert greedy.meta["aitemplate"]["naive"] == naive.meta["aitemplate"]["values"]
    assert greedy.arena < naive.arena


def test_A05_constants_have_a_region_of_their_own() -> None:
    facts = plan(toy()).meta["aitemplate"]
    assert (facts["constants"], facts["constant_offsets"]) == (64, {"k": 0})
    real = captured("gpt2")
    buffers = replace(  # its weights, as an inference engine has them
        real,
        storages=tuple(
            replace(s, kind="constant" if s.kind == "parameter" else s.kind) for s in real.storages
        ),
    )
    facts = plan(buffers).meta["aitemplate"]
    names = {s.name for s in buffers.storages if s.kind == "constant"}
    assert set(facts["constant_offsets"]) == names
    assert facts["constants"] == sum(-(-s.size // 64) * 64 for s in buffers.storages if s.name in names) > 0
    rows = sorted(
        (x, next(s.size for s in buffers.storages if s.name == n))
        for n, x in facts["constant_offsets"].items()
    )
    assert all(x + size <= y for (x, size), (y, _) in pairwise(rows))


def test_A06_scratch_is_shared_or_unique_unique_first() -> None:
    graph = toy()
    facts = plan(graph).meta["aitemplate"]
    assert (facts["unique_workspace"], facts["shared_workspace"]) == (0, 256)  # the largest, of b
    made = plan(graph, Options(unique="a,out"))
    facts = made.meta["aitemplate"]
    assert (facts["unique_workspace"], facts["shared_workspace"]) == (64 + 64, 256)
    start = 384  # after the values, aligned
    assert 384 - 64 < facts["values"] <= 384
    assert facts["unique_offsets"] == {"a": start, "out": start + 64}
    scratch = {made.steps[r.start].op: r.offset for r in made.residences if r.storage < 0}
    assert scratch == {1: start, 6: start + 64, 4: start + 128, 5: start + 128}
    assert made.arena == start + 128 + 200
    with pytest.raises(BadInput, match="unknown op 'nobody'"):
        plan(graph, Options(unique="nobody"))


@pytest.mark.parametrize("name", ["resnet", "cnn"])
def test_A06_on_real_models_with_measured_scratch(name: str) -> None:
    graph = measured(name)
    made = plan(graph)
    facts = made.meta["aitemplate"]
    assert facts["shared_workspace"] > 0
    assert verify(graph, made) == []
    largest = sorted(graph.ops, key=lambda op: op.workspace)[
        -4:
    ]  # by requests as they follow one another, not as placed
    apart = [plan(graph, Options(unique=op.name)) for op in largest]
    assert all(verify(graph, one) == [] for one in apart)
    own = [one.meta["aitemplate"]["unique_workspace"] for one in apart]
    assert max(own) == facts["shared_workspace"]
    rest = apart[own.index(max(own))].meta["aitemplate"]["shared_workspace"]
    assert rest == sorted(own)[-2] < facts["shared_workspace"] or own.count(max(own)) > 1


def test_A07_ops_of_one_step_share_nothing() -> None:
    graph = toy()
    late = replace(graph.ops[4], control=(3,))  # c waits for a view of a view, b for nothing like it
    graph = graph.with_ops((*graph.ops[:4], late, *graph.ops[5:]))
    made = plan(graph, Options(streams=2))
    facts = made.meta["aitemplate"]
    assert facts["steps"] < len(graph.ops) and facts["shared_workspace"] > 256  # b and c at the same time
    b, c = record(graph, "b", streams=2), record(graph, "c", streams=2)
    assert max(b.first, c.first) <= min(b.last, c.last)


@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("name", REAL)
def test_A07_on_real_models(name: str, streams: int) -> None:
    graph = captured(name)
    step = waves(predecessors(graph), streams)
    before = ancestors(predecessors(graph))
    by_step: dict[int, list[int]] = {}
    for k, at in enumerate(step):
        by_step.setdefault(at, []).append(k)
    assert max(map(len, by_step.values())) == streams
    for ops in by_step.values():
        assert not any(before[k] >> j & 1 for k in ops for j in ops)
    made = plan(graph, Options(streams=streams))
    offsets = {r.storage: r.offset for r in made.residences if r.storage >= 0}
    rows = records(graph, Options(streams=streams))
    for i, r in enumerate(rows):  # values whose steps meet lie apart, whichever op of a step runs first
        for other in rows[:i]:
            if r.first <= other.last and other.first <= r.last:
                x, y = offsets[r.storage], offsets[other.storage]
                assert x + r.size <= y or y + other.size <= x
    assert made.meta["aitemplate"]["values"] < made.meta["aitemplate"]["naive"]


def test_A08_records_are_checked() -> None:
    good = Record("a", 0, 64, 0, 3, ("a",))
    check_records([good, replace(good, name="b", storage=1)], 4)
    for wrong, rule in (
        ([good, good], "duplicate record"),
        ([replace(good, first=4, last=3)], "not within the 4 steps"),
        ([replace(good, last=4)], "not within the 4 steps"),
        ([replace(good, size=0)], "at least 1 byte"),
    ):
        with pytest.raises(BadInput, match=rule):
            check_records(wrong, 4)
    for name in REAL:
        check_records(records(captured(name)), len(captured(name).ops))


def test_A09_says_the_sizes_of_its_regions() -> None:
    for graph in (toy(), captured("resnet")):
        made = plan(graph)
        facts = made.meta["aitemplate"]
        for name in ("values", "constants", "unique_workspace", "shared_workspace"):
            assert f" {facts[name]}" in made.notes[0] or f"{facts[name]} " in made.notes[0]


@pytest.mark.parametrize("name", REAL)
def test_A10_any_other_placement_takes_its_place_and_says_how_far_from_the_bound_it_is(name: str) -> None:
    graph = captured(name)
    greedy, best = (
        plan(graph, Options(place=place)).meta["aitemplate"] for place in ("greedy-by-size", "portfolio")
    )
    assert best["values_bound"] <= best["values"] <= greedy["values"]
    assert best["values"] == best["values_bound"]  # proved: no placement is smaller


@given(graphs(max_ops=30), st.sampled_from((1, 2, 5)))
@settings(max_examples=60)
def test_every_plan_is_verified(graph: Graph, streams: int) -> None:
    options = Options(streams=streams, unique=graph.ops[0].name)
    made = plan(graph, options)
    assert verify(graph, made) == []
    assert replace(plan(graph, options), seconds=0.0) == replace(made, seconds=0.0)


def test_is_a_planner_whose_plan_can_be_saved() -> None:
    graph = captured("lstm")
    made = plan(graph)
    assert planner("aitemplate", "").plan is plan
    assert loads_plan(dumps_plan(made, graph))[0].meta == made.meta
