"""The chart says what the simulator says, fits every width from 60 on, and is plain where there is no terminal."""

import io
import re

import pytest
from rich.console import Console

from support.chains import chain
from tightship import frontier
from tightship.cli import main
from tightship.planners.default import plan
from tightship.report.numbers import Column, peak_of
from tightship.report.text import LABEL, ROWS, Chart, frontier_tables, plan_chart
from tightship.serde import save_graph
from tightship.units import format_bytes

KIB = 1024


def drawn(items, width=80, color=False):
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=color, color_system="truecolor" if color else None
    )
    for item in items:
        console.print(item, markup=False) if isinstance(item, str) else console.print(item)
    return out.getvalue()


def step(start, nbytes, seconds=1.0):
    return Column(start, seconds, "", (nbytes,))


def rows(text):
    """The chart's rows of characters, from the top one down."""
    found = [line[LABEL + 2 :] for line in text.splitlines() if re.match(r".{10} [│┤]", line)]
    assert len(found) == ROWS
    return found


@pytest.mark.parametrize("width", [60, 61, 80, 100, 140, 200])
def test_everything_fits_the_width(width):
    graph = chain(12)
    made = plan(graph, "60%")
    text = drawn(plan_chart(graph, made), width)
    assert max(map(len, text.splitlines())) <= width
    assert all(sign in text for sign in ("█", "·", "─", "planned", "budget", "lower bound"))
    assert "\x1b" not in text


def test_there_is_color_on_a_terminal_alone():
    chart = Chart([step(0.0, 8)], [step(0.0, 4)], 6)
    assert "\x1b[" in drawn([chart], color=True)
    assert "\x1b" not in drawn([chart])


def test_an_areas_height_is_the_most_of_each_stretch():
    before = [step(float(k), 8 * KIB) for k in range(4)]
    after = [step(0.0, 2 * KIB), step(1.0, 8 * KIB), step(2.0, 4 * KIB), step(3.0, 1 * KIB)]
    picture = rows(drawn([Chart(before, after)], width=LABEL + 3 + 40))
    heights = [sum(row[x] == "█" for row in picture) for x in range(40)]
    assert heights == [2] * 10 + [8] * 10 + [4] * 10 + [1] * 10


def test_unplanned_memory_is_an_outline_and_budget_a_line():
    before, after = [step(0.0, 8 * KIB)], [step(0.0, 2 * KIB)]
    text = drawn([Chart(before, after, budget=4 * KIB)], width=LABEL + 3 + 20)
    picture = rows(text)
    assert picture[0] == "·" * 20
    assert picture[ROWS - 1 - 4] == "─" * 20
    assert [row for row in picture if "█" in row] == ["█" * 20] * 2
    assert "8.00 KiB ┤" in text and "4.00 KiB ┤" in text


def test_without_times_a_column_is_a_step():
    text = drawn([Chart([step(0.0, 8, 0.0), step(0.0, 4, 0.0)], [step(0.0, 8, 0.0)])])
    assert "2 steps" in text


def test_nothing_at_all_is_drawn_too():
    assert "0 └" in drawn([Chart([], [])])


def test_the_table_is_the_peak_of_the_plan():
    graph = chain(12)
    made = plan(graph, "60%")
    peak = peak_of(graph, made.steps)
    text = drawn(plan_chart(graph, made, top=2), 100)
    for name, nbytes, _ in peak.by_storage[:2]:
        assert re.search(rf"^{re.escape(name)} +{re.escape(format_bytes(nbytes))}", text, re.M)
    rest = peak.by_storage[2:]
    assert f"({len(rest)} more)" in text and format_bytes(sum(b for _, b, _ in rest)) in text


def test_plan_draws_it_for_people_and_not_for_programs(tmp_path, capsys):
    path = str(tmp_path / "graph.json")
    save_graph(chain(12), path)
    assert main(["plan", path, "--budget", "60%"]) == 0
    assert "█" in capsys.readouterr().out
    assert main(["plan", path, "--budget", "60%", "--json"]) == 0
    assert "█" not in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--quiet", "-q"])
def test_quiet_says_errors_alone(flag, tmp_path, capsys):
    path = str(tmp_path / "graph.json")
    save_graph(chain(12), path)
    assert main(["plan", path, "--budget", "60%", flag, "-o", str(tmp_path / "plan.json")]) == 0
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "plan.json").exists()
    assert main(["plan", path, "--budget", "1B", flag]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "no plan can meet the budget of 1 B" in err
    assert main(["plan", path, "--budget", "60%", flag, "--json"]) == 0
    assert capsys.readouterr().out.startswith('{"peak_before"')


def test_a_frontiers_tables_fit_from_60_columns_on():
    found = frontier(chain(30), points=3, seconds=1.0)
    for width in (60, 80, 140):
        text = drawn(frontier_tables(found), width)
        tables = [line for line in text.splitlines() if "ops)" not in line]
        assert max(map(len, tables)) <= width
        assert "…" not in text and "extra time" in text
        assert ("extra FLOPs" in text) is (width > 60)
