"""Every verb counts a module's peak the same: with its results, without its parameters."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import hlo_data
from support.hlo_small import CHAIN, COUNTING, HEADER, LOOP, K
from tightship.cli import main
from tightship.hlo import flattened, parse
from tightship.hlo.remat.peak import module_peak, peak_of

SMALL = {"chain": HEADER + CHAIN, "loop": HEADER + LOOP, "counting": COUNTING}
MODULES = (*SMALL, "cpu_control", "gpu_mlp_35000000")

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def answer(*arguments: str) -> dict[str, Any]:
        assert main([*arguments, "--json"]) == 0
        rows: dict[str, Any] = json.loads(capsys.readouterr().out)
        return rows

    return answer


@pytest.mark.parametrize("name", MODULES)
def test_plan_explain_and_frontier_show_one_peak(name: str, run: Run, tmp_path: Path) -> None:
    path, plan = str(tmp_path / "module.txt"), str(tmp_path / "plan.json")
    text = SMALL[name] if name in SMALL else hlo_data.text(name)
    Path(path).write_text(text)
    peak = module_peak(parse(text))
    planned = run("plan", path, "--output", plan)
    assert planned["peak_before"] == planned["peak_after"] == peak
    explained = run("explain", path, "--top", "100000")
    assert explained["peak"]["bytes"] == peak
    assert sum(r["bytes"] for r in explained["peak"]["residents"]) == peak
    found = run("frontier", path, "--points", "2", "--seconds", "1", "--no-peers")
    assert {p["peak_before"] for p in found["points"]} == {peak}
    assert found["lower_bound"] <= min(p["peak_after"] for p in found["points"]) <= peak
    assert run("explain", plan)["before"]["bytes"] == peak
    assert run("verify", plan)["violations"] == []


@pytest.mark.parametrize("name", hlo_data.CPU + hlo_data.GPU)
def test_who_is_resident_at_the_peak_adds_up_to_it(name: str) -> None:
    module = hlo_data.module(name)
    assert peak_of(module).nbytes == module_peak(module) == module_peak(flattened(module))


def test_the_peak_of_a_loop_lies_in_its_body() -> None:
    peak = peak_of(parse(HEADER + LOOP))
    assert peak.computation == "body"
    assert [r.nbytes for r in peak.residents if r.result] == [4]
    assert sum(r.nbytes == K for r in peak.residents) == 4  # three of the body, and what the loop is given
