"""Order, evictions and placement together: verified, within the budget, or a clear no."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chains import chain
from support.strategies import random_graph
from tightship.analysis.bounds import lower_bound
from tightship.errors import BadInput, Infeasible
from tightship.graph import Op
from tightship.planners import floor, planners
from tightship.planners.default import Options, PlanOptions, plan, read_options
from tightship.planners.evict.problem import EvictionProblem
from tightship.planners.in_orders import InOrders
from tightship.planners.layout import Layout, lay_out, residences
from tightship.planners.search import Search
from tightship.serde import loads_graph
from tightship.simulate import baseline, replay
from tightship.verify import verify

QUICK = Options(work=300_000, seconds=30.0)


@given(st.integers(0, 10_000), st.integers(5, 60), st.floats(0.3, 1.0))
@settings(max_examples=40, deadline=None)
def test_a_plan_is_verified_and_within_its_budget(seed: int, n: int, part: float) -> None:
    graph = random_graph(seed, n)
    base = replay(graph, baseline(graph)).peak
    budget = graph.static_bytes + int(part * (base - graph.static_bytes))
    try:
        made = plan(graph, budget, QUICK)
    except Infeasible as no:
        assert no.budget == budget and no.lower_bound <= no.best_peak
        return
    assert verify(graph, made) == []
    assert made.met and made.lower_bound <= made.peak <= budget
    assert made.static + made.arena + made.handed <= budget
    assert replay(graph, made.steps).peak == made.peak


def test_a_percentage_is_of_the_unplanned_peak() -> None:
    graph = chain(40)
    made = plan(graph, "60%", QUICK)
    assert made.peak_before == replay(graph, baseline(graph)).peak
    assert made.budget == made.peak_before * 60 // 100
    assert made.count("recompute") > 0 and made.time > made.time_before


def test_without_a_budget_nothing_is_recomputed() -> None:
    made = plan(chain(20), None, QUICK)
    assert made.count("recompute") == 0 and made.budget is None and made.met


def test_a_plan_says_why_its_search_ended() -> None:
    graph, long = chain(40), replace(QUICK, work=10**9)
    assert plan(graph, None, long).termination == "optimal"
    wide = plan(graph, "60%", replace(long, gap=0.2))
    assert wide.termination == "gap" and 0 < wide.time_gap < 0.2
    assert plan(graph, "60%", replace(long, work=1)).termination == "work"
    assert plan(graph, "60%", long).termination == "stagnation"
    assert plan(graph, "60%", replace(long, seconds=0.0)).termination == "seconds"


@pytest.mark.parametrize("part", [95, 90, 85, 80, 70, 60])
def test_results_outside_the_arena_cost_no_plan(part: int) -> None:
    """The bytes of a chain go up in steps of 64: a target lowered by what is missing alone may ask for the same."""
    assert plan(chain(40), f"{part}%", QUICK).met


def test_a_termination_that_nobody_knows_is_refused() -> None:
    with pytest.raises(BadInput, match="optimal"):
        replace(plan(chain(5), None, QUICK), termination="bored")


@pytest.mark.parametrize("gap", [-0.1, float("nan")])
def test_a_gap_is_not_negative(gap: float) -> None:
    with pytest.raises(BadInput, match="gap"):
        plan(chain(5), "60%", Options(gap=gap))


def test_a_smaller_gap_never_gives_a_slower_plan() -> None:
    graph = chain(40)
    times = [plan(graph, "50%", replace(QUICK, gap=gap)).time for gap in (1.0, 0.1, 0.001, 0.0)]
    assert times == sorted(times, reverse=True)


def test_below_the_lower_bound_is_infeasible_and_says_who() -> None:
    graph = chain(20, size=1 << 20)
    with pytest.raises(Infeasible) as caught:
        plan(graph, 1 << 20, QUICK)
    assert caught.value.lower_bound == 4 << 20 <= caught.value.best_peak
    assert caught.value.top and "MiB" in str(caught.value)


def test_same_seed_and_work_give_the_same_plan() -> None:
    graph = chain(30)
    first, second = (plan(graph, "50%", QUICK) for _ in range(2))
    assert (first.steps, first.residences) == (second.steps, second.residences)


def test_a_plan_without_places_is_held_to_its_peak_alone() -> None:
    graph = chain(30)
    with_places, without = (plan(graph, "60%", replace(QUICK, place=p)) for p in (True, False))
    assert without.met and without.peak <= without.budget and without.time <= with_places.time
    assert not without.residences and without.arena == 0 < with_places.arena
    assert verify(graph, without) == []


def test_when_only_the_places_do_not_fit_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def loose(*args: Any, **options: Any) -> Layout:
        layout = lay_out(*args, **options)
        return replace(layout, arena=layout.arena + (1 << 20))

    graph = chain(20)
    monkeypatch.setattr(floor, "lay_out", loose)
    with pytest.raises(Infeasible) as caught:
        plan(graph, "90%", QUICK)
    error = caught.value
    assert error.best_peak <= error.budget < error.placed
    assert "within the budget, but" in str(error) and "-" not in str(error).splitlines()[0]
    assert plan(graph, "90%", replace(QUICK, place=False)).met


def test_unknown_planner_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match="anneal"):
        plan(chain(5), "50%", Options(evict="magic"))


def test_the_keywords_of_the_public_functions_are_the_options_fields() -> None:
    assert get_type_hints(PlanOptions) == get_type_hints(Options)
    assert PlanOptions.__total__ is False


def test_an_unknown_option_is_named_beside_those_there_are() -> None:
    assert read_options({"seed": 3}, "fit") == Options(seed=3)
    with pytest.raises(BadInput, match=r"fit: unknown option 'sede': .*order, evict, .*seed"):
        read_options({"sede": 3}, "fit")  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize("seed", range(20))
def test_every_residence_is_placed_apart_and_the_arena_is_no_more_than_a_little_above_the_load(
    seed: int,
) -> None:
    graph = random_graph(seed, 50)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    steps = problem.steps(problem.nothing())
    layout = lay_out(graph, steps)
    assert len(layout.residences) == len(list(residences(graph, steps)))
    assert layout.load <= layout.arena
    line = replay(graph, steps)
    assert graph.static_bytes + layout.load + layout.handed >= line.peak - graph.static_bytes
    assert layout.load <= line.peak - graph.static_bytes


def test_workspace_takes_part_in_the_placement() -> None:
    graph = chain(3)
    ops = (
        Op(
            **{n: getattr(graph.ops[0], n) for n in Op.__dataclass_fields__ if n != "workspace"},
            workspace=640,
        ),
    )
    graph = graph.with_ops(ops + graph.ops[1:])
    layout = lay_out(graph, baseline(graph))
    assert any(r.storage == -1 and r.size == 640 for r in layout.residences)


def test_sizes_that_are_no_multiples_of_the_alignment_are_placed_at_multiples_of_it() -> None:
    graph = chain(6, size=100)  # as somebody's own graph may have them
    made = plan(graph, "80%", Options(work=200_000))
    assert verify(graph, made) == []
    assert any(r.offset for r in made.residences) and all(r.offset % 64 == 0 for r in made.residences)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("part", [0.75, 0.6])
def test_bytes_lost_to_holes_cost_evictions_and_not_the_plan(
    seed: int, part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places leave holes by chance: a lower target is found that is within the budget with them."""
    graph, chance = chain(60), random.Random(seed)
    laid = floor.Placement.layout

    def with_holes(self: floor.Placement, *given: Any) -> Layout:
        made = laid(self, *given)
        return replace(made, arena=made.load + int(chance.uniform(0.01, 0.2) * made.load) // 64 * 64)

    monkeypatch.setattr(floor.Placement, "layout", with_holes)
    base = replay(graph, baseline(graph)).peak
    budget = graph.static_bytes + int(part * (base - graph.static_bytes))
    made = plan(graph, budget, Options(work=3_000_000, seconds=30.0))
    assert verify(graph, made) == [] and made.count("recompute") > 0
    assert made.peak < made.static + made.arena + made.handed <= budget


@pytest.mark.parametrize("name", [name for name in planners("evict") if name != "exact"])
def test_no_planner_copies_more_out_than_the_host_has_room_for(name: str) -> None:
    """Those that lower their decisions themselves know nothing of the engine's limit."""
    copied = 0
    for seed in range(6):
        graph = random_graph(seed, 5 + seed % 7, mirror=1.0, static_writes=0.0)
        for budget, host in ((f"static+{p}%", 64 * n) for p in (85, 96) for n in (1, 8)):
            o = Options(
                evict=name,
                seconds=2,
                work=2_000,
                allow="recompute,compress,offload",
                host=host,
                place=seed % 2 == 0,
            )
            with contextlib.suppress(Infeasible):
                made = plan(graph, budget, o)
                assert max(made.host, replay(graph, made.steps).host_peak) <= host
                copied += any(step.kind == "offload" for step in made.steps)
    assert copied or name != "offload"


def test_where_nothing_fits_an_order_gets_a_search_only_if_its_first_look_is_the_lowest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    searched: list[list[int]] = []
    inside = False

    def named(self: InOrders) -> None:
        nonlocal inside
        inside = self.search.reached.within(self.search.bytes) is None and not self.search.problem.brief
        in_named(self)
        inside = False

    def look(self: Search, *args: Any) -> Any:
        found = looked(self, *args)
        looks.append(found.decision.peak)
        return found

    def search(self: Search, *args: Any) -> Any:
        if inside:
            searched.append(list(looks))
        return search_once(self, *args)

    in_named, looked, search_once = InOrders._named, Search.look, Search.searched
    monkeypatch.setattr(InOrders, "_named", named)
    monkeypatch.setattr(Search, "look", look)
    monkeypatch.setattr(Search, "searched", search)
    refused = orders = 0
    for seed in range(20):
        graph = random_graph(seed, 30, calls=0.0)
        looks.clear()
        searched.clear()
        try:
            plan(graph, int(lower_bound(graph, redraw=False)), Options(place=False, work=300_000))
        except Infeasible:
            refused += 1
            orders += len(looks) - len(searched)
            assert all(peaks[-1] < min(peaks[:-1]) for peaks in searched)
    assert refused and orders


@pytest.mark.parametrize(
    ("name", "budget", "seed"),
    [
        *[("layers_of_a_rank", 75_392, seed) for seed in (142, 144, 160)],
        *[("three_layers_with_gelu", 71_300, seed) for seed in (0, 2, 3, 4)],
    ],
)
def test_what_can_be_met_hangs_on_no_times_of_ops(name: str, budget: int, seed: int) -> None:
    """The step of three layers, on one of two ranks and on one alone: with the times of some machines searches ended
    64 B above the one, and above the other with an update later than its gradient needs it."""
    text = (Path(__file__).parents[1] / f"data/graphs/{name}.json").read_bytes()
    graph, rng = loads_graph(text, f"{name}.json"), random.Random(seed)
    factors = [0.1, 0.3, 0.6, 1, 1, 2, 4, 10, 50]
    timed = graph.with_ops(tuple(replace(op, time=op.time * rng.choice(factors)) for op in graph.ops))
    assert plan(timed, budget).peak <= budget
