"""`tightship frontier SOURCE`: whatever a SOURCE may be, as table, JSON and pictures; bad input and Ctrl-C."""

from __future__ import annotations

import json
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support import hlo_data, hlo_small
from support.chains import chain
from tightship import api
from tightship.cli import main
from tightship.hlo.remat.peak import module_peak, result_bytes
from tightship.hlo.remat.search import tradeoff
from tightship.planners import default
from tightship.planners.frontier import frontier, needs
from tightship.report.numbers import frontier_rows
from tightship.report.text import frontier_tables, rendered
from tightship.serde import save_graph
from tightship.units import NARROW
from tightship.verify import verify

QUICK = ["--points", "4", "--work", "2000000", "--seconds", "60"]


def hlo(folder: Path) -> Path:
    path = folder / "module.txt"
    path.write_text(hlo_data.text("gpu_cnn_30000000", hlo_data.BEFORE))
    return path


def onnx(folder: Path) -> Path:
    pytest.importorskip("onnx")
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    from support.onnx_models import exported

    del torch
    return exported("unet", folder)


def graphdef(folder: Path) -> Path:
    pytest.importorskip("tensorflow")
    from support import tensorflow_models

    made, _ = tensorflow_models.mlp()
    path = folder / "graph.pb"
    path.write_bytes(made.SerializeToString())
    return path


def saved(folder: Path) -> Path:
    save_graph(chain(24), folder / "graph.json")
    return folder / "graph.json"


def plan_of(folder: Path) -> Path:
    api.plan_graph(chain(24), "80%", work=100_000).save(folder / "plan.json")
    return folder / "plan.json"


MORE = {"onnx": ["--shape", "batch=2"]}


@pytest.mark.parametrize("make", [hlo, onnx, graphdef, saved, plan_of])
def test_every_kind_of_source(make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(make(tmp_path))
    drawn, page = tmp_path / "f.svg", tmp_path / "f.html"
    args = ["frontier", path, *QUICK, *MORE.get(make.__name__, [])]
    assert main([*args, "--json", "--svg", str(drawn), "--report", str(page)]) == 0
    rows = json.loads(capsys.readouterr().out)
    points = rows["points"]
    assert 1 <= len(points) <= 4 and all(p["met"] for p in points)
    for less, more in pairwise(points):
        assert less["budget"] < more["budget"] and less["time_after"] >= more["time_after"]
    for p in points:
        assert rows["lower_bound"] <= p["peak_after"] <= p["budget"]
    assert points[-1]["recomputed"] == 0
    assert points[-1]["time_after"] == pytest.approx(points[-1]["time_before"])
    assert drawn.read_text().startswith("<svg") and "</html>" in page.read_text()


def test_a_module_is_counted_as_xla_counts_it_beside_xlas_own_way() -> None:
    module = hlo_data.module("gpu_cnn_30000000", hlo_data.BEFORE)
    f = tradeoff(module, 5, default.Options(work=8_000_000, seconds=120.0))
    assert f.graph.static_bytes == result_bytes(module)
    assert f.points[-1].peak <= module_peak(module) and all(verify(f.graph, p) == [] for p in f.points)
    assert f.points[0].peak < f.points[-1].peak and f.points[0].count("recompute") > 0
    assert f.others and all(o.name.startswith("xla ") for o in f.others)
    for o in f.others:
        assert o.peak < module_peak(module) and o.time > f.points[-1].time and o.extra_flops > 0
        assert o.ours is not None and needs(o.ours) <= o.peak and o.ours.time <= o.time
    assert tradeoff(module, 1, default.Options(work=1_000), peers=False).others == ()


@pytest.mark.parametrize("ways", ["recompute", "recompute,offload"])
def test_plan_and_frontier_bound_a_module_alike(
    ways: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, bounds = tmp_path / "loop.txt", []
    path.write_text(hlo_small.HEADER + hlo_small.LOOP)
    for verb in (["plan", "--budget", "90%"], ["frontier", "--points", "2", "--no-peers"]):
        assert main([verb[0], str(path), *verb[1:], "--allow", ways, "--work", "1000", "--json"]) in (0, 1)
        bounds.append(json.loads(capsys.readouterr().out)["lower_bound"])
    assert bounds[0] == bounds[1]


def test_what_a_module_does_not_take_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(hlo(tmp_path))
    for more, said in (
        (["--shape", "x=1"], "a module's text says all sizes"),
        (["--hints", "a=keep"], "no option of a module"),
        (["--allow", "redraw"], "recompute, compress, offload"),
        (["--points", "0"], "a frontier has 1 to 200"),
    ):
        assert main(["frontier", path, *more]) == 2
        assert said in capsys.readouterr().err
    assert main(["frontier", str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err
    plain = hlo_data.text("gpu_cnn_30000000", hlo_data.BEFORE).replace(
        "is_scheduled=true", "is_scheduled=false"
    )
    (tmp_path / "loose.txt").write_text(plain)
    assert main(["frontier", str(tmp_path / "loose.txt")]) == 2
    assert "is_scheduled=true" in capsys.readouterr().err


@pytest.mark.parametrize("width", [20, 40, 60, 200])
def test_tables_fit_the_terminal(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["frontier", str(saved(tmp_path)), *QUICK]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if "MiB" in line or "KiB" in line or line.rstrip().endswith(" B")]
    assert table and all("%" in line for line in lines if "recomputed" in line)
    assert max(len(line.rstrip()) for line in lines if "─" in line) <= max(width, NARROW)


def test_an_interrupt_gives_back_the_plans_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    made, found = default.plan, []

    def interrupted(*args: Any, **more: Any) -> Any:
        if len(found) == 3:
            signal.raise_signal(signal.SIGINT)
        found.append(made(*args, **more))
        return found[-1]

    monkeypatch.setattr(default, "plan", interrupted)
    try:
        f = frontier(chain(40), 9, default.Options(work=2_000_000, seconds=60.0))
    finally:
        signal.signal(signal.SIGINT, before)
    assert f.interrupted and frontier_rows(f)["interrupted"] and "interrupted" in rendered(frontier_tables(f))
    assert 2 <= len(f.points) < 9 and all(verify(f.graph, p) == [] for p in f.points)


def test_the_least_budget_is_found_where_places_need_far_more_than_the_peak() -> None:
    """A chain's least peak is 256 bytes, but with a place for everything it needs a quarter more."""
    f = frontier(chain(40), 5, default.Options(work=2_000_000, seconds=60.0))
    assert len(f.points) == 5 and f.points[0].peak < f.points[-1].peak // 4


def test_all_budgets_share_one_order_and_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = []
    made = default.plan
    monkeypatch.setattr(
        default,
        "plan",
        lambda *a, problem=None, **k: (frames.append(problem), made(*a, problem=problem, **k))[1],
    )
    frontier(chain(30), 5, default.Options(work=1_000_000, seconds=60.0))
    assert len(frames) >= 5 and len({id(f) for f in frames}) == 1 and frames[0].archive.found
