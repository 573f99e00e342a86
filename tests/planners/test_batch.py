"""The largest batch that fits, and what is said when nothing does."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import tightship
from support.chains import chain
from tightship import sources
from tightship.cli import main
from tightship.diagnose.advice import advice, batch_of, smaller_batch
from tightship.errors import BadInput, Infeasible
from tightship.frontends.torch.structure import batch_size, batched, resized
from tightship.graph import Graph, Value
from tightship.planners.batch import max_batch
from tightship.planners.default import Options, plan
from tightship.report.text import batch_table, rendered
from tightship.result import Planned
from tightship.simulate import baseline, replay
from tightship.verify import verify

QUICK = Options(work=200_000, seconds=20.0, hand_out=False)


def sized(batch: int) -> Graph:
    """A chain whose storages grow with the batch."""
    graph = chain(12, size=64 * batch)
    return replace(graph, values=(Value("x", 0, "float32", (batch, 16), (16, 1)), *graph.values[1:]))


@pytest.mark.parametrize("start", [1, 3, 40])
def test_the_largest_batch_fits_and_the_next_does_not(start: int) -> None:
    budget = 64 * 100
    found = max_batch(sized, budget, QUICK, start=start)
    assert verify(found.graph, found.plan) == [] and found.plan.met and found.plan.budget == budget
    assert found.tried[found.batch] and not found.tried[found.batch + 1]
    assert found.graph.storages[0].size == 64 * found.batch
    with pytest.raises(Infeasible):
        plan(sized(found.batch + 1), budget, QUICK)


def test_what_each_size_needs() -> None:
    budget = 64 * 100
    found = max_batch(sized, budget, QUICK, start=8)
    assert [b.batch for b in found.sizes] == sorted({*found.tried, 9})
    for b in found.sizes:
        graph = sized(b.batch)
        assert (b.unplanned_peak, b.time_before) == (replay(graph, baseline(graph)).peak, plan(graph).time)
        assert b.met is found.tried.get(b.batch) and (b.peak is not None) == bool(b.met)
        assert b.peak is None or (b.peak <= budget and b.time is not None)
    best = next(b for b in found.sizes if b.batch == found.batch)
    assert (best.peak, best.time) == (found.plan.peak, found.plan.time)
    shown = Planned(found.plan, found.graph, batches=found.sizes)
    assert shown.rows()["batches"] == [asdict(b) for b in found.sizes]
    text = rendered([batch_table(found.sizes)])
    assert "no plan" in text and str(found.batch) in text


def test_when_not_even_one_fits() -> None:
    with pytest.raises(Infeasible) as no:
        max_batch(sized, 64 * 2, QUICK)
    assert no.value.budget == 128


def test_a_share_of_the_peak_is_no_budget_for_a_batch() -> None:
    with pytest.raises(BadInput, match="budget in bytes"):
        max_batch(sized, "60%", QUICK)


def test_samples_of_other_sizes_have_no_data() -> None:
    sample = {"x": torch.ones(4, 7), "mask": torch.ones(1, 7), "y": torch.zeros(4, dtype=torch.long), "n": 3}
    assert batch_size(sample) == 4
    other = resized(sample, 9)
    assert (other["x"].shape, other["y"].shape, other["mask"].shape, other["n"]) == ((9, 7), (9,), (1, 7), 3)
    assert all(t.is_meta for t in other.values() if isinstance(t, torch.Tensor))
    with pytest.raises(BadInput, match="first dimension"):
        batch_size({"n": 3})


def net() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)))


def test_a_model_of_pytorchs() -> None:
    found = tightship.max_batch(net(), torch.randn(4, 32), "200kB", work=400_000, seconds=20.0)
    assert found.batch > 4 and found.plan.peak <= 200_000
    inputs = [found.graph.values[v] for v in found.graph.inputs]
    assert any(v.shape == (found.batch, 32) for v in inputs)
    more = sources.ModelStep(net(), torch.randn(4, 32)).graph_at(found.batch + 1)
    assert more.static_bytes > found.graph.static_bytes


def test_command_line(tmp_path: Path, capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "some_net.py").write_text(
        "import torch\n\ndef make():\n"
        "    return torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6))), torch.randn(4, 32)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    args = ["plan", "some_net:make", "--max-batch", "--work", "200000"]
    assert main([*args, "-b", "200kB", "--json", "-o", "p.json", "--report", "p.html"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert any(b["batch"] == rows["batch"] and b["met"] for b in rows["batches"])
    assert "Batch sizes" in Path("p.html").read_text(encoding="utf-8")
    assert rows["batch"] > 4 and rows["met"] and {"batch": rows["batch"], "met": True} in rows["tried"]
    assert main(["verify", "p.json"]) == 0
    assert rows["unit"] == 1 and rows["refused"] == {}
    assert main([*args, "-b", "200kB", "--batch-dim", "1"]) == 2  # of a linear layer, that is its features
    assert "other batch sizes than the sample's 32" in capsys.readouterr().err
    assert main([*args, "-b", "200kB", "--batch-dim", "7"]) == 2
    assert main(["plan", "some_net:make", "--batch-dim", "1"]) == 2
    assert "--max-batch" in capsys.readouterr().err
    assert main([*args[:2], "--budget", "10kB", *args[2:], "--batch-dim", "-1"]) == 2
    assert "numbered from 0" in capsys.readouterr().err
    assert main(args) == 2 and "--budget" in capsys.readouterr().err
    assert main(["plan", "p.json", "--max-batch", "-b", "200kB"]) == 2
    assert main([*args, "-b", "1kB", "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["met"] is False


class Folded(torch.nn.Module):
    """Folds pairs of rows: runs at even sizes only."""

    def __init__(self, rows: int | None = None) -> None:
        super().__init__()
        self.layers, self.rows = net(), rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.view(-1, 2, 32) if self.rows is None else x.view(self.rows, 32))


def test_a_model_that_runs_at_multiples_only() -> None:
    found = tightship.max_batch(Folded(), torch.randn(4, 32), "200kB", work=400_000, seconds=20.0)
    assert found.unit == 2 and found.batch > 4 and all(n % 2 == 0 for n in found.tried)
    assert list(found.refused) == [5] and "RuntimeError" in found.refused[5]


def test_a_model_of_one_size_is_refused_with_what_it_said() -> None:
    with pytest.raises(BadInput, match=r"other batch sizes than the sample's 4.*RuntimeError"):
        tightship.max_batch(Folded(rows=4), torch.randn(4, 32), "200kB", work=100_000)


@pytest.mark.parametrize("start", [3, 4, 64])
def test_a_size_too_small_to_run_is_not_one_too_large(start: int) -> None:
    """Batch norm trains on two rows at least, and two fit here."""

    def graph_of(n: int) -> Graph:
        if n < 2:
            raise ValueError("more than one row")
        return sized(n)

    found = max_batch(graph_of, 64 * 9, QUICK, start=start)
    assert found.batch == 2 and found.tried[2] and 3 in found.tried and not found.tried[3]
    with pytest.raises(Infeasible):
        max_batch(graph_of, 64 * 4, QUICK, start=start)


def test_an_interrupt_gives_back_the_largest_so_far() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def graph_of(n: int) -> Graph:
        if n > 30:
            signal.raise_signal(signal.SIGINT)
        return sized(n)

    try:
        found = max_batch(graph_of, 64 * 400, QUICK, start=8)
        assert found.interrupted and found.batch == 16 and verify(found.graph, found.plan) == []
        with pytest.raises(KeyboardInterrupt):
            max_batch(graph_of, 64 * 400, QUICK, start=30)
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_batch_may_be_another_dimension() -> None:
    sample = {"x": torch.ones(7, 4, 3), "y": torch.ones(4), "length": torch.ones(7)}
    other = resized(sample, 9, dim=1)
    assert [tuple(t.shape) for t in other.values()] == [(7, 9, 3), (9,), (7,)]
    assert batched(sample, 1) == (2, 3) and batched(sample) == (2, 3) and batch_size(sample, 1) == 4
    found = tightship.max_batch(net(), torch.randn(5, 4, 32), "200kB", dim=1, work=400_000, seconds=20.0)
    assert any(found.graph.values[v].shape == (5, found.batch, 32) for v in found.graph.inputs)


# --- what else would help ---


def test_advice_is_told_with_its_numbers() -> None:
    graph = sized(64)
    graph = graph.with_ops(tuple(replace(op, random=op.phase == "forward") for op in graph.ops))
    with pytest.raises(Infeasible) as no:
        plan(graph, 64 * 64 * 4, QUICK)
    error = no.value
    assert error.at in {op.name for op in graph.ops} and f"reached while {error.at} runs" in str(error)
    assert (
        batch_of(replace(graph, storages=(replace(graph.storages[0], kind="input"), *graph.storages[1:])))
        == 64
    )
    assert any("offloading" in text and "16.00 KiB" in text for text in error.advice)
    assert "what else may help" in str(error)


def given_as(kind: str, batch: int) -> Graph:
    graph = sized(batch)
    return replace(graph, storages=(replace(graph.storages[0], kind=kind), *graph.storages[1:]))


@pytest.mark.parametrize("room", [17, 40, 63])
def test_a_smaller_batch_is_a_number_that_fits(room: int) -> None:
    """On a graph that grows with its batch, it is the one that `max_batch` finds."""
    graph, budget = given_as("input", 64), 64 * 4 * room
    with pytest.raises(Infeasible) as no:
        plan(graph, budget, QUICK)
    text = next(a for a in no.value.advice if "smaller batch" in a)
    found = max_batch(lambda n: given_as("input", n), budget, QUICK, start=64).batch
    assert f"about {found} instead of 64" in text and "--max-batch" in text
    of_a_file = replace(graph, meta=graph.meta | {"source": "onnx"})  # which has no factory
    with pytest.raises(Infeasible) as no:
        plan(of_a_file, budget, QUICK)
    text = next(a for a in no.value.advice if "smaller batch" in a)
    assert f"about {found} instead of 64" in text and "--max-batch" not in text


def test_what_does_not_grow_with_the_batch_is_left_out() -> None:
    graph = given_as("parameter", 64)  # 4,096 bytes of weights, whatever the batch
    assert (
        smaller_batch(graph, 64 * 64 * 2, [(0, 4096), (3, 4096), (4, 4096)]) is None
    )  # no input has a batch
    graph = given_as("input", 64)
    assert smaller_batch(graph, 64 * 64, [(0, 4096), (3, 4096)]) == 32
    gradient = graph.outputs[0]
    grown = replace(graph, storages=(*graph.storages[:-1], replace(graph.storages[-1], size=64)))
    assert graph.values[gradient].storage == len(graph.storages) - 1
    assert smaller_batch(grown, 64 * 33, [(0, 2048), (3, 2048), (len(graph.storages) - 1, 64)]) == 32
    assert smaller_batch(grown, 63, [(0, 2048), (3, 2048), (len(graph.storages) - 1, 64)]) is None


def test_when_the_callers_own_bytes_are_too_many_nothing_else_is_advised() -> None:
    assert advice(sized(64), 64, [])[0].startswith("nothing that a plan can do")
    assert len(advice(sized(64), 64, [])) == 1
