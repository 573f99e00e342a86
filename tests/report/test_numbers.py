"""Numbers of reports against the simulator, which defines them."""

from dataclasses import replace

import pytest

from support.chains import chain
from tightship import api
from tightship.graph import Graph, Op, Storage, Value
from tightship.plan import Step
from tightship.planners.default import Options, plan
from tightship.report.numbers import BANDS, columns, module_costs, peak_of, summary
from tightship.simulate import baseline, replay


def planned(graph: Graph, budget: str = "60%"):
    return plan(graph, budget, Options(work=200_000, seconds=2.0))


@pytest.mark.parametrize("n", [1, 5, 20])
def test_bands_add_up_to_what_the_simulator_says(n):
    graph = chain(n)
    for steps in (baseline(graph), planned(graph, "100%").steps):
        assert [c.total for c in columns(graph, steps)] == list(replay(graph, steps).during)


def test_bands_of_recomputed_steps_add_up_too():
    graph = chain(20)
    made = planned(graph)
    assert made.count("recompute")
    found = columns(graph, made.steps)
    assert [c.total for c in found] == list(replay(graph, made.steps).during)
    assert max(c.total for c in found) == made.peak
    assert all(c.bytes[BANDS.index("batch")] == graph.static_bytes for c in found)
    assert found[-1].start + found[-1].seconds == pytest.approx(made.time)


def test_packed_and_copied_forms_are_counted():
    graph = chain(2, size=128)
    f0, f1 = 1, 2
    steps = [
        Step("compute", op=0),
        Step("compute", op=1),
        Step("compress", storages=(f0,), nbytes=64),
        Step("free", storages=(f0,)),
        Step("offload", storages=(f1,)),
        Step("decompress", storages=(f0,)),
        Step("free", storages=(f0,), form="packed"),
        Step("free", storages=(f1,), form="host"),
    ]
    assert [c.total for c in columns(graph, steps)] == list(replay(graph, steps).during)


def test_workspace_is_a_band_of_its_own():
    values = (Value("x", 0), Value("y", 1))
    op = Op("y", "f", (0,), (1,), workspace=192)
    graph = Graph((op,), values, (Storage("x", 64, "input"), Storage("y", 64)), (0,), (1,))
    assert columns(graph, baseline(graph))[0].bytes == (0, 0, 64, 64, 0, 192)


def test_shares_of_the_peak_add_up():
    graph = chain(12)
    peak = peak_of(graph, baseline(graph))
    assert peak.bytes == replay(graph, baseline(graph)).peak == sum(s.bytes for s in peak.by_kind)
    dynamic = peak.bytes - graph.static_bytes
    for rows in (peak.by_module, peak.by_source):
        assert sum(s.bytes for s in rows) == dynamic
    assert sum(b for _, b, _ in peak.by_storage) == dynamic
    assert [b for _, b, _ in peak.by_storage] == sorted((b for _, b, _ in peak.by_storage), reverse=True)


def test_a_graph_without_ops_has_a_peak_too():
    graph = Graph((), (Value("x", 0),), (Storage("x", 64, "input"),), (0,))
    peak = peak_of(graph, ())
    assert (peak.bytes, peak.step, peak.op) == (64, -1, "")


def test_a_summary_has_the_keys_that_programs_read():
    graph = chain(20)
    made = planned(graph)
    rows = summary(made, graph)
    assert list(rows)[:3] == ["peak_before", "peak_after", "budget"]
    assert rows["peak_after"] == made.peak <= rows["budget"]
    assert rows["recomputed"] == made.count("recompute") > 0
    assert rows["met"] is True
    keys = {"lower_bound", "arena", "static", "time_before", "time_after", "planner", "seconds"}
    assert keys | {"offloaded", "compressed", "moved"} <= rows.keys()


def test_modules_cost_what_the_plan_spends_in_them_with_all_that_is_inside() -> None:
    graph = chain(12, 1 << 10)
    ops = tuple(replace(op, module=f"blocks.{k % 12}.mlp") for k, op in enumerate(graph.ops))
    made = api.plan_graph(replace(graph, ops=ops), "60%", place=False, seconds=0.5)
    rows = {c.module: c for c in module_costs(made.graph, made.plan.steps)}
    inside = [c for name, c in rows.items() if name.endswith(".mlp")]
    assert list(rows) == ["", "blocks", *(n for k in range(12) for n in (f"blocks.{k}", f"blocks.{k}.mlp"))]
    again = [s for s in made.plan.steps if s.kind == "recompute"]
    assert rows[""].recomputed == sum(c.recomputed for c in inside) == len(again) << 10 > 0
    assert rows[""].seconds == sum(c.seconds for c in inside) == len(again)
    caller = made.graph.storages[0].size
    assert rows[""].activations == sum(c.activations for c in inside) == made.plan.peak - caller
    assert module_costs(graph, made.plan.steps) == []
