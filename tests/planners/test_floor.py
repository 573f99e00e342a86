"""Near the least memory: optimal budgets are met, and what was reached once is never refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chains import chain
from support.optimum import optimum
from support.strategies import graphs, random_graph
from tightship.analysis.bounds import lower_bound
from tightship.analysis.order import is_legal
from tightship.errors import Infeasible
from tightship.graph import Graph, Op, Storage, Value
from tightship.options import NEVER
from tightship.plan import Step
from tightship.planners import default, floor, in_orders, run, search
from tightship.planners.default import Options, plan
from tightship.planners.evict.problem import EVICT, EvictionProblem
from tightship.planners.frontier import frontier, needs
from tightship.planners.layout import Layout, lay_out
from tightship.simulate import baseline, replay
from tightship.sources import ModelStep
from tightship.verify import verify

QUICK = Options(work=100_000, seconds=30.0, hand_out=False, redraw=False)


def test_budgets_equal_to_an_optimum_are_met_as_fast_as_can_be() -> None:
    o, count = replace(QUICK, place=False), Counter[str]()
    for seed in range(20):
        for n in (3, 5, 6):
            graph = random_graph(seed, n, updates=0.1)
            problem = default.problem_of(graph, tuple(range(len(graph.ops))), o)
            for point in optimum(graph):
                made = plan(graph, point.nbytes, o, problem=replace(problem, in_place=True))
                assert made.time - made.time_before == pytest.approx(point.extra), graph.name
                count["at a cost"] += point.extra > 0
    assert count["at a cost"] >= 8


def test_of_large_graphs_few_plans_are_kept_the_least_always(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(40)
    monkeypatch.setattr(floor, "_KEPT", 2 * len(graph.ops))
    made = [plan(graph, f"{part}%", QUICK) for part in (50, 60, 70, 80, 60, 90)]
    (kept,) = graph.__dict__["_reached"].values()
    assert len(kept.plans) == 2 and kept.plans[0].needs == min(map(needs, made))
    assert all(p.met for p in made)
    with pytest.raises(Infeasible):
        plan(graph, graph.static_bytes, QUICK)
    assert needs(plan(graph, needs(made[0]), QUICK)) <= needs(made[0])


def budgets(graph: Graph) -> list[int]:
    room = replay(graph, baseline(graph)).peak - graph.static_bytes
    return [graph.static_bytes + room * part // 100 for part in (40, 60, 75, 90, 100)]


@pytest.mark.slow
def test_of_a_thousand_graphs_no_smaller_budget_has_a_faster_plan() -> None:
    o, plans = replace(QUICK, work=60_000), 0
    for seed in range(1_000):
        graph = random_graph(seed, 5 + seed % 20, updates=0.1)
        last, least = float("inf"), None
        for budget in budgets(graph):
            try:
                made = plan(graph, budget, o)
            except Infeasible:
                assert least is None or least > budget, (seed, budget)
                continue
            assert made.time <= last + 1e-9, (seed, budget)
            last, plans = made.time, plans + 1
            least = needs(made) if least is None else min(least, needs(made))
    assert plans > 1_000


@pytest.mark.parametrize("n", [6, 13, 24])
def test_what_was_reached_once_is_never_refused_and_more_memory_never_costs_time(n: int) -> None:
    refused = 0
    for seed in range(60 // n):
        graph = random_graph(seed, n, updates=0.1)
        last = float("inf")
        for budget in budgets(graph):
            try:
                made = plan(graph, budget, QUICK)
            except Infeasible as no:
                refused += 1
                least = no.best_peak if no.placed is None else no.placed
                assert least > budget
                assert needs(plan(graph, least, QUICK)) <= least
                continue
            assert needs(made) <= budget and made.time <= last + 1e-9
            last = made.time
    assert refused


ASKED = st.tuples(
    st.integers(0, 100), st.sampled_from(("best", "given")), st.sampled_from(("anneal", "greedy"))
)


@settings(max_examples=30, deadline=None)
@given(graphs(24, updates=0.1), st.lists(ASKED, min_size=3, max_size=6), st.booleans(), st.booleans())
def test_no_budget_is_refused_above_a_peak_that_was_ever_reached(
    graph: Graph, asked: list[tuple[int, str, str]], place: bool, first: bool
) -> None:
    """In whatever order budgets are asked for, by whichever planners, after a frontier or not: neither is one refused
    that is no less than what a plan needed, nor is its plan slower."""
    o = replace(QUICK, work=20_000, place=place)
    made = list(frontier(graph, 3, o).points) if first else []
    room, least = replay(graph, baseline(graph)).peak - graph.static_bytes, 1 << 60
    for share, order, evict in asked:
        budget = graph.static_bytes + room * share // 100
        try:
            found = plan(graph, budget, replace(o, order=order, evict=evict))
        except Infeasible as no:
            assert budget < min((needs(p) for p in made), default=least) and budget < least
            least = min(least, no.best_peak if no.placed is None else no.placed)
            continue
        assert all(found.time <= p.time + 1e-9 for p in made if needs(p) <= budget)
        made.append(found)
    if least < 1 << 60:
        assert needs(plan(graph, least, o)) <= least


def test_a_plan_with_other_rights_is_no_answer() -> None:
    """What was reached with copies to the host is not a plan for those who must not copy."""
    graph = chain(30)
    least = graph.static_bytes + (replay(graph, baseline(graph)).peak - graph.static_bytes) // 5
    offloads = plan(graph, least, replace(QUICK, allow="offload"))
    assert offloads.met and offloads.count("offload")
    recomputes = plan(graph, "60%", QUICK)
    assert needs(offloads) < recomputes.budget and offloads.time < recomputes.time
    assert recomputes.count("recompute") and not recomputes.count("offload")


def test_offsets_that_alone_are_above_the_budget_are_searched_harder(monkeypatch: pytest.MonkeyPatch) -> None:
    def loose(*args: Any, capacity: int | None = None, **options: Any) -> Layout:
        layout = lay_out(*args, capacity=capacity, **options)
        return layout if capacity is not None else replace(layout, arena=layout.arena + (1 << 20))

    monkeypatch.setattr(floor, "lay_out", loose)
    assert plan(chain(20), "90%", QUICK).met


def test_gradients_of_weights_are_made_at_the_end_where_memory_is_short() -> None:
    """Convolutions forward and back, the first the largest: at half of the activations the largest gradients come
    last, from what is recomputed for them, and hardly any convolution's gradient is made twice."""
    torch = pytest.importorskip("torch")
    layers, width = [], 3
    for k, out in enumerate((64, 128, 256, 512)):
        norm = [torch.nn.BatchNorm2d(out)] if k else []
        layers += [torch.nn.Conv2d(width, out, 4, 2, 1, device="meta"), *norm, torch.nn.LeakyReLU(0.2)]
        width = out
    model = torch.nn.Sequential(*layers, torch.nn.Conv2d(width, 1, 4, device="meta")).to("meta")
    graph = ModelStep(model, {"input": torch.empty(16, 3, 64, 64, device="meta")}).program().graph
    made = plan(graph, "static+50%", replace(QUICK, work=15_000_000))
    runs = Counter(s.op for s in made.steps if s.kind in ("compute", "recompute"))
    backward = [k for k, op in enumerate(graph.ops) if op.target == "aten.convolution_backward.default"]
    assert len(backward) == 9 and sum(runs[k] for k in backward) <= 10
    assert made.time < 1.13 * made.time_before


def test_the_runs_of_a_plan_in_another_order_need_less() -> None:
    """The order with the least peak without recomputation is not the one in which a plan that recomputes needs least;
    what the plan does with every gap is known in the new order."""
    lower = 0
    for seed in range(30):
        graph = random_graph(seed, 24, updates=0.1)
        problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
        bits = problem.nothing()
        bits[(problem.engine.allowed >> EVICT & 1) > 0] = EVICT
        found = problem.cost(bits, 1 << 60)
        if not found.valid:
            continue
        other = floor.reordered(problem, graph, problem.steps(bits), NEVER)
        if other is not None:
            assert is_legal(graph, other.order) and other.order != problem.order
            lower += any(d.peak < found.peak for d in other.archive.found)
    assert lower >= 8


@pytest.mark.parametrize("in_place", (False, True))
@pytest.mark.parametrize(
    "reorder", [lambda g, steps: floor.rearranged(g, steps, NEVER), floor.released_early]
)
def test_runs_of_a_plan_are_put_into_an_order_that_takes_less(
    reorder: Callable[[Graph, tuple[Step, ...]], tuple[Step, ...] | None], in_place: bool
) -> None:
    """Recomputations move as well; what runs, and what that costs, stays."""
    rng, lower = np.random.default_rng(0), 0
    for seed in range(40):
        graph = random_graph(seed, 10 + seed % 20, updates=0.1)
        problem = EvictionProblem(graph, tuple(range(len(graph.ops))), in_place=in_place)
        bits = problem.nothing()
        bits[((problem.engine.allowed >> EVICT & 1) > 0) & (rng.random(len(bits)) < 0.7)] = EVICT
        steps = problem.steps(bits)
        other = reorder(graph, steps) if steps else None
        if other is None:
            continue
        before, after = replay(graph, steps), replay(graph, other)
        assert after.time == pytest.approx(before.time)
        assert verify(graph, run.decision_plan(graph, other, after)) == []
        assert Counter(s.op for s in steps if s.op >= 0) == Counter(s.op for s in other if s.op >= 0)
        lower += after.peak < before.peak
    assert lower >= 5


def test_updates_run_once_their_gradients_are_there() -> None:
    """In the order given all gradients are there first."""
    storages = (
        *(Storage(f"w{i}", 8, "parameter") for i in range(2)),
        *(Storage(f"g{i}", 8) for i in range(2)),
    )
    values = tuple(Value(s.name, i) for i, s in enumerate(storages))
    ops = (
        Op("first", "g", (0,), (2,), time=1.0),
        Op("second", "g", (1,), (3,), time=1.0),
        Op("first update", "u", (0, 2), mutates=(0,), time=1.0),
        Op("second update", "u", (1, 3), mutates=(1,), time=1.0),
    )
    graph = Graph(ops, values, storages, (0, 1))
    steps = replay(graph, baseline(graph)).steps
    early = floor.released_early(graph, steps)
    assert early is not None and [s.op for s in early if s.op >= 0] == [0, 2, 1, 3]
    assert replay(graph, early).peak == replay(graph, steps).peak - 8
    assert floor.released_early(graph, early) is None


def test_where_nothing_fits_the_least_plan_is_rearranged(monkeypatch: pytest.MonkeyPatch) -> None:
    """What that comes to is met, where without it nothing is found."""
    graph, o = random_graph(3, 24, updates=0.1), replace(QUICK, place=False, work=20_000)
    budget = int(lower_bound(graph))
    without_reruns(monkeypatch)
    assert plan(graph, budget, o).peak <= budget
    monkeypatch.setattr(search.InOrders, "rearranged", lambda self: None)
    with pytest.raises(Infeasible):
        plan(graph.with_ops(graph.ops), budget, o)  # nothing was reached for it


def without_reruns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are not changed run by run, which would come to the same bytes another way."""
    monkeypatch.setattr(search.Reruns, "first", lambda self: None)
    monkeypatch.setattr(search.Reruns, "last", lambda self: None)


def fresh(graph: Graph, budget: int, o: Options) -> int:
    """The peak of a plan by a search that knows nothing of others; negative where it is the least of a refusal."""
    try:
        return plan(graph.with_ops(graph.ops), budget, o).peak
    except Infeasible as no:
        return -no.best_peak


def test_a_plan_that_others_beat_may_come_down_further_than_they(monkeypatch: pytest.MonkeyPatch) -> None:
    o, lower = replace(QUICK, place=False, work=20_000), 0
    without_reruns(monkeypatch)
    rows = [
        (g, int(lower_bound(g))) for g in (random_graph(seed, 24, updates=0.1) for seed in (25, 26, 32, 41))
    ]
    found = [abs(fresh(graph, least, o)) for graph, least in rows]
    monkeypatch.setattr(in_orders, "_LOWERED", 1)
    for (graph, least), peak in zip(rows, found, strict=True):
        alone = abs(fresh(graph, least, o))
        assert alone >= peak
        lower += alone > peak
    assert lower >= 2


def test_a_budget_is_met_that_a_search_for_less_has_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a search comes down to depends on its target: one for less is made before a budget is refused."""
    refused = 0
    for seed, ops, work in ((53, 32, 40_000), (41, 40, 100_000)):
        graph, o = random_graph(seed, ops, updates=0.1), replace(QUICK, place=False, work=work)
        least = abs(fresh(graph, int(lower_bound(graph)), o))
        for budget in (least, least * 101 // 100, least * 102 // 100):
            assert 0 < fresh(graph, budget, o) <= budget
            with monkeypatch.context() as alone:
                alone.setattr(search.Search, "_aim_lower", lambda *args: None)
                refused += fresh(graph, budget, o) < 0
    assert refused


def wide_gradients(layers: int = 8, wide: int = 1024) -> Graph:
    """A chain whose backward ops each make a large result that stays and what the next one reads, as convolutions do;
    the last one reads much."""
    storages, ops, results = [Storage("x", 64, "input")], [], []
    for k in range(layers):
        storages.append(Storage(f"f{k}", 64 if k else 2 * wide))
        ops.append(Op(f"f{k}", "f", (k,), (k + 1,), time=1.0))
    last = layers
    for k in reversed(range(layers)):
        storages += [Storage(f"b{k}", 64, "gradient"), Storage(f"w{k}", wide, "gradient")]
        at = len(storages) - 2
        ops.append(Op(f"b{k}", "b", (last, k + 1), (at, at + 1), time=2.0, phase="backward"))
        results.append(at + 1)
        last = at
    values = tuple(Value(s.name, k) for k, s in enumerate(storages))
    return Graph(tuple(ops), values, tuple(storages), (0,), (*results, last))


def test_results_that_stay_are_made_when_little_else_is_there() -> None:
    graph = wide_gradients(10)
    before = replay(graph, baseline(graph)).peak
    ends = graph.static_bytes + sum(graph.storages[s].size for s in graph.kept)
    budget = before - 1024
    assert ends < budget < before
    made = plan(graph, budget, QUICK)
    assert made.met and made.peak <= budget and verify(graph, made) == []
    again = Counter(s.op for s in made.steps if s.kind in ("compute", "recompute"))
    twice = [k for k, n in again.items() if n > 1 and graph.ops[k].target == "b"]
    assert twice and plan(graph, budget, QUICK).steps == made.steps
