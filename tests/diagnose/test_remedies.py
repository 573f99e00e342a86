"""What an infeasible budget's message says would help is what helps: each remedy, taken, does what was said."""

from __future__ import annotations

import json
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from support.chains import chain
from tightship import api
from tightship.cli import main
from tightship.diagnose import remedies
from tightship.diagnose.remedies import advised
from tightship.errors import Infeasible
from tightship.graph import Graph
from tightship.planners import default
from tightship.planners.default import Options
from tightship.serde import save_graph
from tightship.verify import verify

QUICK = Options(work=4_000_000, seconds=60.0)


def layered(n: int = 24) -> Graph:
    graph = chain(n, size=6400)
    ops = (replace(o, module=f"net.{k}" if o.phase == "forward" else "") for k, o in enumerate(graph.ops))
    return graph.with_ops(tuple(ops))


def drawn(n: int = 24, state: int = 64) -> Graph:
    """Every other forward op draws random numbers, from a state of so many bytes (0: it cannot be set again)."""
    graph, before = layered(n), list[int]()
    ops = []
    for k, op in enumerate(graph.ops):
        if op.phase == "forward" and k % 2:
            op = replace(op, random=True, state=state, control=tuple(before[-1:]))
            before.append(k)
        ops.append(op)
    return graph.with_ops(tuple(ops))


def said(graph: Graph, budget: int, o: Options = QUICK) -> tuple[str, ...]:
    with pytest.raises(Infeasible) as no:
        advised(graph, budget, o)
    assert no.value.budget == budget
    return no.value.advice


def options_of(text: str) -> dict[str, object]:
    """What a remedy says is to be allowed."""
    if "(redraw)" in text:
        return {"redraw": True}
    found = re.search(r"\(allow=([a-z,]+?)(?:, (lossy))?\)", text)
    assert found
    return {"allow": found[1].rstrip(","), "lossy": bool(found[2])}


@pytest.mark.parametrize("state", [0, 64])
def test_what_is_said_to_fit_fits(state: int) -> None:
    graph, once = drawn(state=state), replace(QUICK, redraw=False)
    with pytest.raises(Infeasible) as least:
        default.plan(graph, graph.static_bytes, once)
    budget = least.value.best_peak - 1
    texts = [t for t in said(graph, budget, once) if "allow=" in t or "(redraw)" in t]
    fits = [t for t in texts if "fits" in t]
    assert any(t.startswith("offloading") for t in texts)
    assert (state > 0) == any(t.startswith("recomputing dropout") for t in texts)
    for text in fits:
        made = default.plan(graph, budget, replace(once, **options_of(text)))  # type: ignore[arg-type]
        assert made.met and verify(graph, made) == []
    assert fits


def test_a_hint_that_makes_a_budget_impossible_is_named() -> None:
    graph = layered()
    o = replace(QUICK, hints="net.*=keep,net.3=recompute")
    texts = said(graph, graph.static_bytes + 6400 * 8, o)
    assert texts[0].startswith("without the hint net.*=keep: fits, +")
    assert texts[1].startswith("without the hint net.3=recompute: not enough")
    assert texts[2].startswith("without any hint: fits")
    alone = default.plan(graph, graph.static_bytes + 6400 * 8, replace(QUICK, hints="net.3=recompute"))
    assert alone.met


def test_what_nothing_helps_against_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, count, made = layered(), [], default.plan
    monkeypatch.setattr(default, "plan", lambda *a, **more: (count.append(1), made(*a, **more))[1])
    texts = said(graph, graph.static_bytes + 64)
    assert len(count) == 2  # what was asked for, and what was reached
    assert texts[0].startswith("no offloading")
    assert said(graph, 64)[0].startswith("nothing that a plan can do")


def test_remedies_are_short_and_an_interrupt_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, given, made = drawn(), [], default.plan

    def counted(graph, budget, o, *more, **named):  # type: ignore[no-untyped-def]
        if o.work > 1:  # to make again what was reached is no search
            given.append(o)
        if len(given) == 2:
            signal.raise_signal(signal.SIGINT)
        return made(graph, budget, o, *more, **named)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(remedies.default, "plan", counted)
    try:
        texts = said(graph, graph.static_bytes + 6400 * 4)
    finally:
        signal.signal(signal.SIGINT, before)
    assert given[1].work == QUICK.work // 20 and len(given) == 2
    assert texts[0].startswith("interrupted")


def test_remedies_end_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search has a part of the time; what else is tried has the rest, and what is left out is said."""
    graph, given, made = drawn(), [], default.plan

    def slow(graph, budget, o, *more, **named):  # type: ignore[no-untyped-def]
        given.append(o.seconds)
        try:
            return made(graph, budget, o, *more, **named)
        finally:
            time.sleep(max(0.0, until - time.perf_counter()) if len(given) > 1 else 0.0)

    monkeypatch.setattr(remedies.default, "plan", slow)
    until = time.perf_counter() + 2.0
    texts = said(graph, graph.static_bytes + 6400 * 4, replace(QUICK, seconds=2.0))
    assert given[0] < 2.0 and len(given) == 2 and given[1] <= 2.0
    assert any("not tried, the time is over" in text for text in texts)


def test_the_command_line_says_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = drawn()
    save_graph(graph, tmp_path / "graph.json")
    budget = str(graph.static_bytes + 6400 * 4)
    limits = ["--work", "1000000", "--seconds", "60", "--no-redraw"]
    args = ["plan", str(tmp_path / "graph.json"), *limits, "-b", budget]
    assert main([*args, "--json", "-o", str(tmp_path / "p.json")]) == 1
    rows = json.loads(capsys.readouterr().out)
    keys = {"budget", "lower_bound", "best_peak", "placed", "impossible", "at", "advice", "top", "met"}
    assert keys <= set(rows) and rows["met"] is False and rows["budget"] == int(budget)
    assert rows["best_peak"] >= rows["lower_bound"] and rows["best_peak"] > rows["budget"]
    assert rows["impossible"] == (rows["lower_bound"] > rows["budget"])
    assert rows["at"] in {op.name for op in graph.ops}
    assert rows["top"] and all(t["bytes"] > 0 and t["name"] for t in rows["top"])
    assert any("offloading (allow=recompute,offload): fits" in text for text in rows["advice"])
    enough = str(rows["enough"][0]["budget"])
    assert rows["enough"][0]["options"] == {} and f"budget={enough}" in rows["error"]["message"]
    assert main([*args[:-1], enough]) == 0
    capsys.readouterr()
    assert not (tmp_path / "p.json").exists()
    assert main(args) == 1
    said = capsys.readouterr().err
    assert "reached while" in said and "what else may help" in said and "Traceback" not in said


def test_the_api_says_it_too() -> None:
    graph = drawn()
    with pytest.raises(Infeasible, match=r"offloading .*: fits"):
        api.plan_graph(graph, graph.static_bytes + 6400 * 4, work=1_000_000, redraw=False)
