"""A small, deterministic part of the campaign (``benchmarks/soak.py``), and that its judges can say no."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from support.hostile import FORMATS, hostile
from support.oracle import faults
from support.strategies import random_graph, random_plan
from tightship.plan import Plan, Step

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
import soak

CASES = {"plans": 40, "verifier": 200, "places": 60, "optima": 30, "files": 60, "faults": 6, "core": 130}


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTSHIP_CACHE", "off")


@pytest.mark.parametrize("name", soak.CLASSES)
def test_nothing_fails_in_the_first_cases(name: str) -> None:
    if name in ("files", "faults"):
        pytest.importorskip("onnxruntime")
    cases = list(islice(soak.campaign([name], {}, lambda: False), CASES[name]))
    assert [case for case in cases if case[-1].fault] == []
    assert len({case[-1].what for case in cases}) > 1 or name == "optima"


def test_what_fails_is_shrunk_and_kept_and_a_campaign_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def case(seed: int, size: int) -> soak.Judged:
        seen.append(seed)
        if len(seen) > 300:
            raise KeyboardInterrupt
        return soak.Judged("tried", "too large" if size >= 3 else "")

    monkeypatch.setattr(soak, "CLASSES", {"made up": case})
    state, failures = tmp_path / "s.json", tmp_path / "f.jsonl"
    monkeypatch.setattr(sys, "argv", ["soak", "--state", str(state), "--failures", str(failures)])
    assert soak.main() == 1
    rows = [json.loads(line) for line in failures.read_text().splitlines()]
    assert rows
    assert {(row["size"], row["fault"]) for row in rows} == {(3, "too large")}
    assert "failed" in capsys.readouterr().out
    last = json.loads(state.read_text())["begin"]["made up"]
    seen.clear()
    soak.main()
    assert seen[0] == last


def wrong(plan: Plan, **changes: object) -> Plan:
    return replace(plan, **changes)  # type: ignore[arg-type]


def test_the_oracle_finds_what_is_wrong() -> None:
    """Of 100 plans each: a step gone, a step twice, a false sum, a place on top of another."""
    found = dict.fromkeys(("gone", "twice", "peak", "time", "place"), 0)
    for seed in range(100):
        graph = random_graph(seed, 12)
        plan = random_plan(graph, seed)
        assert faults(graph, plan) == []
        compute = next(i for i, s in enumerate(plan.steps) if s.kind == "compute")
        bare = wrong(plan, residences=(), arena=0, handed=0, host=0)
        steps = list(plan.steps)
        mutants = {
            "gone": wrong(bare, steps=(*steps[:compute], Step("free"), *steps[compute + 1 :])),
            "twice": wrong(bare, steps=(*steps, steps[compute])),
            "peak": wrong(plan, peak=plan.peak + 64),
            "time": wrong(plan, time=plan.time + 1),
        }
        if len(plan.residences) > 1:
            flat = tuple(replace(r, offset=0) for r in plan.residences)
            mutants["place"] = wrong(plan, residences=flat)
        for name, mutant in mutants.items():
            found[name] += bool(faults(graph, mutant))
    assert found.pop("place") > 60
    assert set(found.values()) == {100}


@pytest.mark.parametrize("kind", FORMATS)
def test_hostile_files_are_the_same_every_time_and_differ(kind: str) -> None:
    if kind == "model":
        pytest.importorskip("onnx")
    assert hostile(kind, 5, 2) == hostile(kind, 5, 2)
    assert len({hostile(kind, seed, 1)[1] for seed in range(7, 700, 7)}) > 30
