"""The demonstration on models so small that it takes seconds."""

import json
from functools import partial

import pytest
from rich.console import Console

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tightship import cli, demo  # noqa: E402
from tightship.demo import models  # noqa: E402
from tightship.errors import BadInput  # noqa: E402
from tightship.execute import allocator  # noqa: E402
from tightship.execute.eager import bit_identical  # noqa: E402

SMALL = (
    lambda: models.gpt2(layers=3, width=32, heads=2, length=32, batch=4),
    lambda: models.resnet50(depths=(4, 4), widths=(64, 128), size=32, batch=4),
)
QUICK = {"work": 1_000_000, "seconds": 3.0}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    if not allocator.available():
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("demo")
    chosen = [make() for make in SMALL]
    return folder, demo.run(out_dir=folder / "out", steps=5, workloads=chosen, **QUICK)


def test_planned_is_measured_within_the_budget_and_the_same_to_the_bit(result):
    _, found = result
    assert found.faults == [] and found.holds
    for r in found.runs:
        assert r.planned_peak == r.measured_peak <= r.budget < r.eager_peak
        assert r.identical and r.misses == 0 and r.steps == len(r.losses) == 5
        assert r.static + r.arena <= r.budget
        assert r.budget == r.static + (r.eager_peak - r.static) // 2
        assert r.lower_bound <= r.planned_peak


def test_its_files_are_plans_that_verify_and_pictures(result):
    folder, found = result
    assert json.loads((folder / "out" / "demo.json").read_text())["runs"][0]["model"] == "gpt2"
    for r in found.runs:
        assert cli.main(["verify", str(folder / "out" / f"{r.model}.plan.json")]) == 0
        assert (folder / "out" / f"{r.model}.svg").read_text().startswith("<svg")


def test_its_table_fits_a_terminal(result, capsys):
    console = Console(width=80, highlight=False)
    for part in result[1].tables()[:-1]:
        console.print(part)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "Planned peak = measured peak ≤ budget" in out


def test_json_of_the_command(tmp_path, capsys, monkeypatch):
    if not allocator.available():
        pytest.skip("no C++ compiler")
    small = [make() for make in SMALL]
    monkeypatch.setattr(models, "gpt2", lambda: small[0])
    monkeypatch.setattr(models, "resnet50", lambda: small[1])
    monkeypatch.setattr(demo, "run", partial(demo.run, **QUICK))
    status = cli.main(["demo", "--json", "--steps", "5", "--out", str(tmp_path / "out")])
    rows = json.loads(capsys.readouterr().out)
    assert status == 0 and rows["holds"]
    keys = {
        "model",
        "budget",
        "planned_peak",
        "measured_peak",
        "eager_peak",
        "static",
        "identical",
        "time_ratio",
    }
    keys |= {"evictions", "arena", "lower_bound", "plan_seconds", "misses", "losses"}
    assert all(keys <= r.keys() for r in rows["runs"])


def test_a_claim_that_does_not_hold_is_said_and_is_a_failure(result):
    from dataclasses import replace

    _, found = result
    good = found.runs[0]
    for wrong, said in (
        (replace(good, measured_peak=good.planned_peak + 64), "the measured peak is"),
        (replace(good, budget=good.planned_peak - 64), "exceeded"),
        (replace(good, identical=False, different=["loss 3"]), "loss 3"),
        (replace(good, misses=2), "2 misplaced"),
        (
            replace(good, measured_peak=None, notes=["no C++ compiler"]),
            "nothing was measured: no C++ compiler",
        ),
    ):
        result_ = demo.Result((wrong,), ())
        assert not result_.holds and any(said in fault for fault in result_.faults)
        assert any("NOT as claimed" in str(part) for part in result_.tables())


def test_a_difference_of_one_bit_is_found():
    a = torch.tensor([1.0, float("nan")])
    b = a.clone()
    assert bit_identical(a, b)
    b.view(torch.int32)[0] += 1
    assert not bit_identical(a, b)
    assert not bit_identical(torch.tensor(0.0), torch.tensor(-0.0))


def test_too_few_steps_and_a_bad_folder(tmp_path):
    with pytest.raises(BadInput, match="takes at least 5"):
        demo.run(out_dir=tmp_path, steps=4)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot write to directory"):
        demo.run(out_dir=tmp_path / "file", steps=5)


def test_data_is_a_function_of_its_number():
    for make in SMALL:
        workload = make()
        first, again, other = workload.batch(3), workload.batch(3), workload.batch(4)
        assert all(torch.equal(first[k], again[k]) for k in first)
        assert any(not torch.equal(first[k], other[k]) for k in first)
        weights = [p for p in workload.make().parameters()]
        assert all(torch.equal(p, q) for p, q in zip(weights, workload.make().parameters(), strict=True))
