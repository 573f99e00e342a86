"""Why a plan streams tensors and runs ops in slices, and how it differs from one that does not."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

import tightship
from support.pages import in_page
from tightship.cli import main
from tightship.diagnose.alternatives import kept_cost, streamed_as, streamed_cost, tensor_of
from tightship.graph import Storage
from tightship.planners.frontier import Changed, Frontier
from tightship.report.pages.plan import plan_page, what_if
from tightship.simulate import replay
from tightship.units import format_bytes

RECORDED = Path(__file__).parents[1] / "data/plans"
"""Plans of a step of `FACTORY` that ``tightship plan`` wrote: as it is, and with slices and streams."""

FACTORY = """
import torch

def step():
    torch.manual_seed(0)
    layers = [x for _ in range(2) for x in (torch.nn.Linear(32, 32), torch.nn.GELU())]
    model = torch.nn.Sequential(torch.nn.Embedding(400, 32), *layers, torch.nn.Linear(32, 400))

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    return model, loss_fn, torch.optim.AdamW(model.parameters()), torch.randint(0, 400, (4, 32))
"""


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    folder = tmp_path_factory.mktemp("changed")
    for path in RECORDED.glob("*.json.gz"):
        (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    return folder


@pytest.mark.slow
def test_what_the_command_writes_says_what_streams_and_what_is_in_slices(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    (tmp_path / "small_net.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    ways = ["--allow", "recompute,split-rounding,stream", "--seconds", "1", "-o", "p.json"]
    assert main(["plan", "small_net:step", "-b", "25%", *ways]) == 0
    planned = tightship.load("p.json")
    assert {name for name, _ in planned.plan.meta["split"]["storages"].values()} >= {"5:addmm"}
    assert planned.why("5:addmm").alternatives and planned.why("0.weight").way == "stream"


def test_what_streams_is_told_from_what_is_kept(plans):
    planned = tightship.load(plans / "changed.json")
    graph, plan = planned.graph, planned.plan
    tensors = {
        tensor_of(graph, s): streamed_as(graph, s) for s in range(len(graph.storages)) if tensor_of(graph, s)
    }
    assert {"0.weight", "0.weight.exp_avg", "1.weight.exp_avg"} <= set(tensors), "in pieces of rows, too"
    whole = {x.name: x.size for x in tightship.load(plans / "plain.json").graph.storages}
    for name, parts in tensors.items():
        answer = planned.why(name)
        assert answer.way == "stream" and (answer.name, answer.bytes) == (name, whole[name])
        assert "fetch" in answer.alternatives[0].reason
        keep = next(a for a in answer.alternatives if a.way == "keep")
        # The same, counted otherwise: the fetched bytes are none, and as many are the caller's from the beginning.
        rows = [replace(x, size=0) if s in parts else x for s, x in enumerate(graph.storages)]
        other = replace(graph, storages=tuple(rows))
        assert keep.peak == replay(other, plan.steps).peak + whole[name] == kept_cost(graph, plan, [parts])[0]
        assert keep.extra <= 0
        assert (keep.verdict == "over the budget") == (keep.peak > max(plan.budget, plan.peak))
    assert planned.why("0.weight[0:100].away") == planned.why("0.weight"), "what stands for the host's bytes"


def test_what_is_kept_is_told_from_what_streams(plans):
    planned = tightship.load(plans / "plain.json")
    graph, plan = planned.graph, planned.plan
    answer = planned.why("0.weight")
    stream = next(a for a in answer.alternatives if a.way == "stream")
    size = next(x.size for x in graph.storages if x.name == "0.weight")
    assert plan.peak - size <= stream.peak <= plan.peak and stream.extra > 0 and stream.verdict == "slower"
    every = [s for s, x in enumerate(graph.storages) if x.kind in ("parameter", "state")]
    together, fetches = streamed_cost(graph, plan, every)
    assert together[0] < stream.peak and fetches >= len([s for s in every if graph.storages[s].size > 64])
    batch = next(x.name for x in graph.storages if x.kind == "input")
    assert [a.verdict for a in planned.why(batch).alternatives] == ["chosen", "not possible"]


def test_slices_are_told_from_the_whole(plans):
    planned = tightship.load(plans / "changed.json")
    graph, plan, split = planned.graph, planned.plan, planned.plan.meta["split"]
    sums = {}
    for storage in graph.storages:
        if storage.name in split["storages"]:
            name, whole = split["storages"][storage.name]
            sums[name] = sums.get(name, 0) + storage.size
            answer = planned.why(storage.name)
            rows = {a.way: a for a in answer.alternatives}
            assert rows["split"].verdict == "chosen" and name in rows["split"].reason
            assert f"{format_bytes(storage.size)} of {format_bytes(whole)}" in rows["split"].reason
            assert rows["whole"].verdict == "over the budget" and rows["whole"].peak > plan.budget
    wholes = dict(split["storages"].values())
    assert sums == {n: pytest.approx(whole, rel=0.05) for n, whole in wholes.items()}, "slices are the whole"


def test_numbers_before_planning_are_those_of_the_step_in_one_piece(plans):
    plain, changed = (tightship.load(plans / f"{name}.json") for name in ("plain", "changed"))
    one, two = plain.rows(), changed.rows()
    assert one["peak_before"] <= two["peak_before"] < 1.05 * one["peak_before"]
    assert (one["streamed"], one["split"]) == (0, 0)
    assert (two["streamed"], two["split"]) == (6 * 51200 + 4 * 4096, 4 * 204800)


def test_a_page_draws_what_runs_and_says_what_was_before(plans):
    changed = tightship.load(plans / "changed.json")
    data = in_page(plan_page(changed.graph, changed.plan))
    drawn = next(s for s in data["sections"] if s["kind"] == "memory")["panels"][0]
    assert drawn["caption"] == "with slices and streams, not planned"
    assert max(map(sum, zip(*drawn["columns"], strict=True))) == changed.plan.peak_before
    assert data["summary"]["peak_before"] == changed.rows()["peak_before"] > changed.plan.peak_before


def test_the_slider_compares_with_the_plan_of_the_page(plans):
    """Its own graph, not that of the frontier: numbers of storages differ between them."""
    plain, changed = (tightship.load(plans / f"{name}.json") for name in ("plain", "changed"))
    frontier = Frontier(
        plain.graph, (plain.plan, changed.plan), changed=(Changed(changed.plan, changed.graph, "4"),)
    )
    section = what_if(frontier, (changed.graph, changed.plan))
    other, same = section["plans"]
    assert same["changed"] == 0 and not same["changes"]
    ways = {row[0]: row[1:3] for row in other["changes"]}
    assert ways["0.weight"] == ["streamed", "kept"] and ways["5:addmm"] == ["in slices", "kept"]
    facts = {name: value for name, value, _ in same["facts"]}
    assert facts["streamed"] == changed.rows()["streamed"] and facts["in slices"] == changed.rows()["split"]


def test_the_differences_of_a_changed_plan(plans, capsys, monkeypatch):
    one, two = str(plans / "plain.json"), str(plans / "changed.json")
    assert main(["diff", one, two, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    ways = {(r["one"], r["two"]) for r in rows["differences"]}
    assert ("keep", "stream") in ways and ("whole", "split") in ways
    streamed = [r for r in rows["differences"] if r["two"] == "stream"]
    assert all(r["possible"] and r["more"] <= 0 < r["extra"] for r in streamed)
    assert sum(r["bytes"] for r in streamed) == 6 * 51200 + 4 * 4096, "as the plan's note says"
    alone = {r["name"] for r in rows["only_two"]}
    split = tightship.load(two).plan.meta["split"]["storages"]
    assert not alone & set(split) and not any(name.endswith((".updated", ".away", "]")) for name in alone)
    assert main(["diff", two, one, "--json", "--report", str(plans / "d.html")]) == 0
    rows = json.loads(capsys.readouterr().out)
    back = [r for r in rows["differences"] if r["one"] == "stream"]
    assert back and all(r["two"] == "keep" and r["more"] >= 0 >= r["extra"] for r in back)
    for columns in (60, 80, 140):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(["diff", one, two]) == 0
        out = capsys.readouterr().out
        assert "in one piece → in slices" in " ".join(out.split()) or columns < 140
        assert max(len(line) for line in out.splitlines() if "─" in line) <= columns


@pytest.mark.parametrize(
    "split", [3, {}, {"storages": 3}, {"storages": {}, "whole": 3, "tried": 7}, {"whole": {"peak": "x"}}]
)
def test_what_a_plan_says_of_slices_is_believed_only_as_far_as_it_can_be_read(plans, split):
    planned = tightship.load(plans / "changed.json")
    row = planned.plan.meta["split"]["storages"]
    if isinstance(split, dict) and split.get("storages") == {}:
        split = split | {"storages": {key: ["x", 1] for key in row} | {next(iter(row)): "y"}}
    other = planned.changed(meta={"split": split})
    assert other.why(next(iter(row))).alternatives


def test_names_of_any_kind(plans, capsys):
    """A name that nothing has, or that looks like something else, is refused by a sentence with names near it."""
    path = str(plans / "changed.json")
    for name in ("", "x" * 5000, "\x1b[31m", "0.weigth", "*", "-1", "0.weight\n", "\u202e", "💥"):
        assert main(["explain", path, f"--why={name}", "--json"]) == 2
        said = json.loads(capsys.readouterr().out)["error"]["message"]
        assert "unknown tensor" in said and len(said) < 6000
    graph = tightship.load(path).graph
    named = replace(graph, storages=(Storage("<script>\x1b[1m", 64, "input"), *graph.storages[1:]))
    assert named.storages[0].name
