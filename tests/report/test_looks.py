"""The page, the trace and the snapshot of one plan: their numbers are the plan's, and their readers accept them."""

import gzip
import html
import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from support.chains import chain
from support.pages import in_page
from tightship import api
from tightship.graph import Graph
from tightship.machine import Machine
from tightship.plan import Plan
from tightship.report.viewers import events, snapshot
from tightship.simulate import replay


@pytest.fixture(scope="module")
def planned() -> api.Planned:
    made = api.plan_graph(chain(12), "70%", seconds=1.0)
    assert made.plan.count("recompute")
    return made


@pytest.fixture()
def both(planned: api.Planned) -> tuple[Graph, Plan]:
    return planned.graph, planned.plan


class TestTrace:
    def test_has_every_step_and_every_stay(self, both) -> None:
        graph, plan = both
        rows = events(graph, plan)
        count = Counter(r["ph"] for r in rows)
        assert count["X"] == sum(s.kind != "free" for s in plan.steps)
        assert count["b"] == count["e"] == len(plan.residences)
        assert max(sum(r["args"].values()) for r in rows if r["ph"] == "C") == plan.peak

    def test_time_ends_with_the_plan(self, both) -> None:
        graph, plan = both
        ends = [r["ts"] + r["dur"] for r in events(graph, plan) if r["ph"] == "X"]
        assert max(ends) == pytest.approx(1e6 * plan.time)

    @pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
    def test_can_be_read_back(self, planned: api.Planned, tmp_path: Path, name: str) -> None:
        planned.trace(tmp_path / name)
        data = (tmp_path / name).read_bytes()
        rows = json.loads(gzip.decompress(data) if name.endswith("gz") else data)
        assert rows["otherData"]["peak"] == planned.plan.peak


@pytest.fixture(scope="module")
def copying() -> api.Planned:
    """A plan that copies out and back beside compute, on a machine whose copies take a while."""
    slow = Machine(offload=2e6, fetch=2e6)
    graph = replace(chain(12, 1 << 20), machine=slow)
    made = api.plan_graph(graph, "60%", seconds=1.0, work=200_000, allow="offload")
    assert made.plan.count("offload") and made.plan.host
    return made


class TestCopies:
    """What moves between pools, in both files."""

    def test_streams_are_tracks_with_every_copy(self, copying: api.Planned) -> None:
        rows = events(copying.graph, copying.plan)
        names = {r["tid"]: r["args"]["name"] for r in rows if r["name"] == "thread_name"}
        assert names == {0: "compute", 1: "copy 1", 2: "copy 2"}
        for stream in names:
            slices = sorted(
                (r["ts"], r["ts"] + r["dur"]) for r in rows if r["ph"] == "X" and r["tid"] == stream
            )
            steps = [s for s in copying.plan.steps if s.stream == stream and s.kind != "free"]
            assert len(slices) == len(steps)
            assert all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(slices))
        copies = [r for r in rows if r["ph"] == "X" and r["cat"] == "offload"]
        size = copying.graph.machine.seconds("offload", 1 << 20)
        assert {round(r["dur"]) for r in copies} == {round(1e6 * size)}

    def test_residences_are_slices_of_their_pool_that_end_after_they_begin(
        self, copying: api.Planned
    ) -> None:
        rows = events(copying.graph, copying.plan)
        begins = {r["id"]: r for r in rows if r["ph"] == "b"}
        ends = {r["id"]: r for r in rows if r["ph"] == "e"}
        assert begins.keys() == ends.keys() == set(range(len(copying.plan.residences)))
        assert all(ends[k]["ts"] >= b["ts"] for k, b in begins.items())
        assert Counter(b["cat"] for b in begins.values()) == Counter(r.pool for r in copying.plan.residences)
        assert Counter(b["args"]["form"] for b in begins.values())["host"] == copying.plan.count("offload")

    def test_memory_is_a_counter_that_goes_forward(self, copying: api.Planned) -> None:
        counted = [r for r in events(copying.graph, copying.plan) if r["ph"] == "C"]
        times = [r["ts"] for r in counted]
        assert times == sorted(times)
        assert max(sum(r["args"].values()) for r in counted) == copying.plan.peak

    def test_a_snapshot_has_what_is_on_the_device_alone(self, copying: api.Planned, tmp_path: Path) -> None:
        copying.snapshot(tmp_path / "s.pickle")
        data = pickle.loads((tmp_path / "s.pickle").read_bytes())
        (trace,) = data["device_traces"]
        device = [r for r in copying.plan.residences if r.pool != "host"]
        assert sum(e["action"] == "alloc" for e in trace) == len(device) + len(copying.graph.static)
        assert [e["time_us"] for e in trace] == sorted(e["time_us"] for e in trace)
        live = most = 0
        for e in trace:
            live += {"alloc": e["size"], "free_completed": -e["size"]}.get(e["action"], 0)
            most = max(most, live)
        assert most == copying.plan.peak


class TestSnapshot:
    def test_allocations_of_the_trace_reach_the_peak(self, both) -> None:
        graph, plan = both
        live = most = 0
        for e in snapshot(graph, plan)["device_traces"][0]:
            live += {"alloc": e["size"], "free_completed": -e["size"]}.get(e["action"], 0)
            most = max(most, live)
        assert most == plan.peak

    def test_is_plain_values(self, planned: api.Planned, tmp_path: Path) -> None:
        planned.snapshot(tmp_path / "s.pickle")
        with open(tmp_path / "s.pickle", "rb") as file:
            assert pickle.load(file) == snapshot(planned.graph, planned.plan)

    def test_pytorch_s_viewer_accepts_it(self, planned: api.Planned, tmp_path: Path) -> None:
        pytest.importorskip("torch", reason="torch is not installed")
        planned.snapshot(tmp_path / "s.pickle")
        out = tmp_path / "s.html"
        viewer = [
            sys.executable,
            "-m",
            "torch.cuda._memory_viz",
            "trace_plot",
            str(tmp_path / "s.pickle"),
            "-o",
            str(out),
        ]
        done = subprocess.run(
            viewer, capture_output=True, text=True, env=dict(os.environ), timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert out.stat().st_size > 1000
        from torch.cuda import _memory_viz

        text = _memory_viz.trace(snapshot(planned.graph, planned.plan))
        assert "TOTAL MEM" in text


def test_spans_follow_the_streams(both) -> None:
    graph, plan = both
    line = replay(graph, plan.steps)
    assert len(line.spans) == len(plan.steps)
    assert max(end for _, end in line.spans) == line.time


def test_a_notebook_shows_the_picture(planned: api.Planned) -> None:
    shown = planned._repr_html_()
    assert shown.startswith("<img")
    assert "recomputed" in shown


def test_a_notebook_shows_a_frontier(tmp_path: Path) -> None:
    found = api.frontier(chain(8), points=3, peers=False, seconds=1.0)
    shown = found._repr_html_()
    assert shown.startswith("<img") and "3 plans" in shown
    assert shown.count("<pre>") == 1 and "&lt;" not in str(found)
    assert str(found) == repr(found)
    found.report(tmp_path / "f.html")
    assert [p["peak_after"] for p in in_page((tmp_path / "f.html").read_text())["summary"]["points"]] == [
        p.peak for p in found.points
    ]


FACTORY = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    rows = [m for _ in range(4) for m in (nn.Linear(16, 16), nn.GELU())]
    model = nn.Sequential(*rows, nn.Linear(16, 1))
    return model, lambda model, x: model(x).square().mean(), torch.optim.SGD(model.parameters()), torch.randn(64, 16)
"""


@pytest.fixture
def a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "a_model", raising=False)
    (tmp_path / "a_model.py").write_text(FACTORY)
    return "a_model:make"


def test_explain_names_the_lines_of_the_user_s_model(
    a_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from tightship.cli import main

    assert main(["explain", a_model, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    lines = [m["source"] for m in rows["makers"] if m["kind"] == "activation"]
    line = 1 + FACTORY.splitlines().index(next(x for x in FACTORY.splitlines() if "lambda" in x))
    assert lines and all(source.endswith(f"a_model.py:{line}") for source in lines)
    assert rows["changes"]


def test_the_plan_of_the_largest_batch_can_be_looked_at(
    a_model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tightship.cli import main

    given = ["--max-batch", "--budget", "100kB", "--work", "100000", "--report", "p.html", "--json"]
    assert main(["plan", a_model, *given]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["report"] == "p.html"
    page = in_page((tmp_path / "p.html").read_text())["summary"]
    assert page == {k: rows[k] for k in page}


@pytest.mark.parametrize("source", ["graph.json", "a_model:make"])
def test_the_command_line_writes_all_three(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], a_model: str, source: str
) -> None:
    from tightship.cli import main
    from tightship.serde import save_graph

    save_graph(chain(8), tmp_path / "graph.json")
    wanted = {"report": "p.html", "trace": "t.json.gz", "snapshot": "s.pickle"}
    given = [x for name, file in wanted.items() for x in (f"--{name}", str(tmp_path / file))]
    assert main(["plan", source, "--budget", "80%", "--work", "300000", "--json", *given]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(
        (tmp_path / file).exists() and rows[name] == str(tmp_path / file) for name, file in wanted.items()
    )
    page = in_page((tmp_path / "p.html").read_text())["summary"]
    assert page == {k: rows[k] for k in page}
    trace = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))
    assert trace["otherData"]["peak"] == rows["peak_after"]
    (device,) = pickle.loads((tmp_path / "s.pickle").read_bytes())["device_traces"]
    live = [0]
    for e in device:
        live.append(live[-1] + {"alloc": e["size"], "free_completed": -e["size"]}.get(e["action"], 0))
    assert max(live) == rows["peak_after"]


# --- notebooks ---


@pytest.mark.parametrize("kind", ["planned", "estimate", "snapshot", "comparison"])
def test_answers_are_displayed_without_scripts_offline_and_escaped(kind: str, tmp_path: Path) -> None:
    """A notebook's file keeps what is displayed: nothing in it may need another file, a server or JavaScript."""
    from torch import nn

    graph = chain(4)
    planned = api.plan_graph(graph, seconds=0.5)
    if kind == "planned":
        shown: Any = planned
    elif kind == "comparison":
        shown = api.diff(planned, planned)
    elif kind == "estimate":
        shown = api.estimate(nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(2, 4))
    else:
        path = tmp_path / "<script>alert(1)<b>.pickle"
        planned.snapshot(path)
        shown = api.explain(path, seconds=0.5)
    found = shown._repr_mimebundle_()
    assert set(found) == {"text/plain", "text/html"} == set(json.loads(json.dumps(found)))
    assert found["text/plain"] == str(shown)
    page = found["text/html"]
    assert html.unescape(page).count(str(shown)) >= 1
    for word in ("<script", "<style", "<link", "http:", "https:", "onload", "<svg"):
        assert word not in page.replace("data:image/svg+xml", "")
    assert set(shown._repr_mimebundle_(include=["text/html"])) == {"text/html"}
    assert set(shown._repr_mimebundle_(exclude=["text/html"])) == {"text/plain"}
