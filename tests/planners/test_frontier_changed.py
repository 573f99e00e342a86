"""Frontiers that go below what one graph reaches: ops in slices, and a static set that streams."""

import json

import onnx
import pytest
import torch
from onnx import TensorProto, helper

import tightship
from support.chains import chain
from tightship.cli import main
from tightship.planners.frontier import Changed, below, needs
from tightship.planners.frontier import frontier as base_frontier
from tightship.simulate import baseline, replay
from tightship.verify import verify

WORDS = 600


def training():
    torch.manual_seed(0)
    layers = [x for _ in range(3) for x in (torch.nn.Linear(32, 32), torch.nn.GELU())]
    model = torch.nn.Sequential(torch.nn.Embedding(WORDS, 32), *layers, torch.nn.Linear(32, WORDS))

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    return model, loss_fn, torch.optim.AdamW(model.parameters()), torch.randint(0, WORDS, (8, 32))


def frontier(allow, points=4):
    model, loss_fn, optimizer, batch = training()
    return tightship.frontier(
        model, batch, points, loss_fn=loss_fn, optimizer=optimizer, allow=allow, seconds=8.0, peers=False
    )


@pytest.fixture(scope="module")
def both():
    return frontier("recompute,split-rounding,stream")


def test_both_ways_go_below_what_one_graph_reaches(both):
    alone = frontier("recompute", 2)
    assert both.points[0].peak < alone.lower_bound  # which no plan of the graph itself goes below
    how = both.change_of(both.points[0]).how
    assert "slices" in how and "streamed" in how


def test_plans_are_verified_in_their_own_graphs_and_monotone(both):
    for plan in both.points:
        graph = both.graph_of(plan)
        assert verify(graph, plan) == [] and replay(graph, plan.steps).peak == plan.peak
        assert needs(plan) <= plan.budget and both.lower_bound <= plan.peak
    for less, more in zip(both.points, both.points[1:], strict=False):
        assert less.budget < more.budget and less.time >= more.time


def test_table_page_picture_and_json_say_how(both, tmp_path):
    rows = json.loads(json.dumps(both.rows()))
    unplanned = replay(both.graph, baseline(both.graph)).peak
    assert {p["peak_before"] for p in rows["points"]} == {both.before[0]} == {unplanned}
    assert "slices" in rows["points"][0]["changed"]
    assert "streamed" in str(both) and "of those that are tried" in str(both)
    changed = sum(both.change_of(p) is not None for p in both.points)
    assert both.picture().count("stroke-width") >= changed and "ringed" in both.picture()
    both.report(tmp_path / "frontier.html")
    page = (tmp_path / "frontier.html").read_text()
    assert page.count('"changed":true') == changed and "streamed" in page


def test_the_least_plan_is_what_a_fit_measures(both):
    model, loss_fn, optimizer, batch = training()
    budget = both.points[0].budget
    step = tightship.fit(
        model, loss_fn, optimizer, batch, budget, allow="recompute,split-rounding,stream", seconds=8.0
    )
    for _ in range(2):  # the first makes the optimizer's state
        step(batch)
    used = step.measure()
    assert used["measured_peak"] == used["planned_peak"] <= budget


def test_slices_of_an_onnx_file(tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    weights = [
        helper.make_tensor(f"w{k}", TensorProto.FLOAT, [m, n, 3, 3], [0.1] * 9 * m * n)
        for k, (n, m) in enumerate(((3, 32), (32, 32), (32, 4)))
    ]
    nodes = [
        helper.make_node("Conv", [f"x{k}", f"w{k}"], [f"x{k + 1}"], kernel_shape=[3, 3], pads=[1] * 4)
        for k in range(3)
    ]
    nodes.append(helper.make_node("GlobalAveragePool", ["x3"], ["y"]))
    given = helper.make_tensor_value_info("x0", TensorProto.FLOAT, [1, 3, 64, 64])
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 1, 1])
    graph = helper.make_graph(nodes, "rows", [given], [made], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "rows.onnx")
    args = [
        "frontier",
        str(tmp_path / "rows.onnx"),
        "--points",
        "3",
        "--seconds",
        "6",
        "--no-peers",
        "--json",
    ]
    assert main(args) == 0
    whole = json.loads(capsys.readouterr().out)
    assert main([*args, "--allow", "recompute,split-rounding"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["least_peak"] < whole["least_peak"] and "slices" in rows["points"][0]["changed"]
    assert rows["points"][0]["extra_flops"] > 0


def test_graphs_alone_are_refused():
    with pytest.raises(tightship.Unsupported, match="leave it out"):
        tightship.frontier(chain(9), points=2, allow="recompute,split")


def test_what_is_enough_is_found_from_below_and_an_interrupt_keeps_what_there_is():
    graph = chain(9)
    base = base_frontier(graph, 3)
    small = base.points[0]
    asked = []

    def at(budget):
        asked.append(budget)
        return small.peak - 8 if len(asked) == 1 else 0

    found = below(base, 3, small.peak * 9 // 10, at)
    assert asked[:2] == [small.peak * 9 // 10, small.peak - 8]  # what was said to be enough
    assert found.points[0].peak == small.peak and not found.interrupted
    assert all(isinstance(c, Changed) for c in found.changed)

    def stopped(budget):
        raise KeyboardInterrupt

    found = below(base, 3, small.peak // 2, stopped)
    assert found.interrupted and [p.peak for p in found.points] == [p.peak for p in base.points]
