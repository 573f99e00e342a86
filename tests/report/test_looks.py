"""The page, the trace and the snapshot of one plan: their numbers are the plan's, and their readers accept them."""

import gzip
import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from chains import chain
from pages import in_page
from tightship import api
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.report.snapshot import snapshot
from tightship.report.trace import events
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


def test_the_command_line_writes_all_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tightship.cli import main
    from tightship.serde import save_graph

    source = tmp_path / "graph.json"
    save_graph(chain(8), source)
    wanted = {"report": "p.html", "trace": "t.json.gz", "snapshot": "s.pickle"}
    given = [x for name, file in wanted.items() for x in (f"--{name}", str(tmp_path / file))]
    assert main(["plan", str(source), "--budget", "80%", "--json", *given]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(
        (tmp_path / file).exists() and rows[name] == str(tmp_path / file) for name, file in wanted.items()
    )
    assert in_page((tmp_path / "p.html").read_text())["summary"]["peak_after"] == rows["peak_after"]
