import io
import re

from rich.console import Console

from support.chains import chain
from tightship.cli.output import error_rows
from tightship.errors import Infeasible
from tightship.plan import Plan
from tightship.planners.default import Options, plan
from tightship.report.numbers import Peak, Share, peak_of
from tightship.report.progress import Line, incumbent
from tightship.report.text import describe, peak_tables, rendered
from tightship.simulate import baseline
from tightship.units import format_bytes, percent


def planned(graph, budget="60%"):
    return plan(graph, budget, Options(work=200_000, seconds=2.0))


def test_a_change_in_percent():
    assert percent(150, 100) == "+50.0 %"
    assert percent(61.8, 100) == "-38.2 %"
    assert percent(100, 100) == percent(1, 0) == "±0 %"


def test_a_description_says_what_the_plan_says():
    graph = chain(20, 1 << 20)
    made = planned(graph)
    text = describe(made, graph)
    assert text.splitlines()[0] == f"plan for graph ({len(graph.ops)} ops)"
    for fact in (made.peak, made.peak_before, made.static, made.arena, made.lower_bound, made.budget):
        assert format_bytes(fact) in text
    assert f"{made.count('recompute')} ops recomputed" in text
    assert made.planner in text
    assert "within the budget" in text
    assert text == describe(made, graph)


def test_a_broken_budget_is_said_aloud():
    assert "NOT within the budget" in describe(Plan("", (), budget=1, peak=2))


def test_nothing_done_is_said():
    assert "none: everything is kept" in describe(Plan("", ()))


def test_tables_fit_sixty_columns_and_name_everything():
    name = "a.very.long.module.path.that.does.not.fit.into.one.line"
    shares = (Share(name, 3 << 20, 2), Share("b", 1 << 20, 1), Share("c", 1, 1))
    source = "folder/a_file_with_a_name.py:1234"
    peak = Peak(4 << 20, 7, "op", "", shares, shares, shares, ((name, 3 << 20, source),))
    text = rendered(peak_tables(peak, title="Peak", top=2), 60)
    assert max(len(line) for line in text.splitlines()) <= 60
    assert "(1 more)" in text
    assert "".join(text.split()).count(name[:12]) == 4
    assert "75.0 %" in text


def test_tables_of_a_real_peak_are_the_same_each_time():
    graph = chain(9)
    tables = [rendered(peak_tables(peak_of(graph, baseline(graph)), title="Peak")) for _ in range(2)]
    assert tables[0] == tables[1]
    assert "activation" in tables[0]


def test_what_is_infeasible_as_json():
    error = Infeasible(budget=10, lower_bound=20, best_peak=30, top=[("x", 5, "m")])
    rows = error_rows(error)
    assert (rows["met"], rows["impossible"], rows["best_peak"]) == (False, True, 30)
    assert rows["top"] == [{"name": "x", "bytes": 5, "place": "m"}]


def test_progress_is_silent_where_there_is_no_terminal():
    out = io.StringIO()
    with Line(Console(file=out), "planning") as line:
        assert line.planning(5, 0.1, True) is False
    assert out.getvalue() == ""


def test_progress_on_a_terminal():
    out = io.StringIO()
    with Line(Console(file=out, force_terminal=True, width=100), "planning", step_time=1.0) as line:
        line.say("peak 5 B", always=True)
        line._live.refresh()
    assert "planning" in out.getvalue() and "peak 5 B" in out.getvalue()


def test_the_incumbent_and_its_distance_from_the_goal():
    assert incumbent(1 << 20, 0.25, True, 1.0) == "time +25.0 % · peak 1.00 MiB, within the budget"
    assert incumbent(1 << 20, 0.25, True, 1.0, least=1.0).startswith("time +25.0 %, gap 25.0 % · peak")
    assert incumbent(1 << 20, 0.25, True, 1.0, least=float("inf")).startswith("time +25.0 % · peak")
    assert incumbent(512, 0.25, False) == "not yet within the budget · peak 512 B"
    assert incumbent(512, 0.25, False, over=12) == "12 B over the budget · peak 512 B"


def test_a_narrow_terminal_keeps_one_line():
    out = io.StringIO()
    with Line(Console(file=out, force_terminal=True, width=60), "planning", step_time=1.0, limit=9.0) as line:
        line.least, line.budget = 1.0, 10
        line.planning(1 << 20, 0.25, True)
        line._live.refresh()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n")
    assert any("gap 25.0 %" in text for text in shown.splitlines())
    assert all(len(text) <= 60 for text in shown.splitlines())
