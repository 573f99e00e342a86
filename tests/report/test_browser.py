"""Pages in a real browser: they load without an error or a request, show the plan's numbers, and answer to pointer,
keyboard and search. Skipped where there is no Chromium or no playwright."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from support.chains import chain
from support.pages import in_page
from tightship import api
from tightship.cli import main
from tightship.serde import save_graph
from tightship.units import format_bytes, visible

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
PNG = b"\x89PNG"


@dataclass
class Opened:
    """A page, what it complained of, and what it asked for."""

    page: Any
    faults: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    @property
    def tip(self) -> str:
        return str(self.page.text_content("#tip"))

    def canvas(self, kind: str) -> Any:
        return self.page.locator(f"section[id^={kind}] canvas[role=img]").first


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        found = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    contexts = []

    def open_(file: Path, **given: Any) -> Opened:
        context = browser.new_context(viewport={"width": 1200, "height": 900}, offline=True, **given)
        contexts.append(context)
        made = Opened(context.new_page())
        made.page.on("pageerror", lambda e: made.faults.append(str(e)))
        made.page.on("console", lambda m: made.faults.append(m.text) if m.type == "error" else None)
        made.page.on("request", lambda r: made.asked.append(r.url))
        made.page.goto(file.as_uri())
        made.page.wait_for_selector("html[data-ready=true]")
        return made

    yield open_
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def graph_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("graph") / "graph.json"
    save_graph(chain(12, 1 << 20), file)
    return file


@pytest.fixture(scope="module")
def planned(graph_file: Path) -> tuple[Path, api.Planned]:
    made = api.plan_graph(chain(12, 1 << 20), "70%", seconds=1.0)
    file = graph_file.parent / "plan.html"
    made.report(file)
    return file, made


def test_it_loads_without_an_error_or_a_request(planned, opened) -> None:
    file, _ = planned
    page = opened(file)
    page.page.wait_for_timeout(100)
    assert (page.faults, page.asked) == ([], [file.as_uri()])


def test_the_numbers_shown_are_those_of_the_json(planned, opened, graph_file, capsys) -> None:
    target = graph_file.parent / "again.html"
    given = [
        "plan",
        str(graph_file),
        "--budget",
        "70%",
        "--work",
        "100000",
        "--json",
        "--report",
        str(target),
    ]
    assert main(given) == 0
    rows = json.loads(capsys.readouterr().out)
    page = opened(target).page
    shown = page.evaluate("report.summary")
    assert shown == {k: v for k, v in rows.items() if k not in ("report", "interrupted")}
    fact = {d.get_attribute("data-fact"): d.text_content() for d in page.query_selector_all("dd")}
    for name, key in {
        "peak": "peak_after",
        "before": "peak_before",
        "budget": "budget",
        "arena": "arena",
    }.items():
        assert fact[name] == format_bytes(rows[key])
    assert fact["recomputed"] == str(rows["recomputed"])


def test_pointing_at_a_stay_tells_about_it(planned, opened) -> None:
    """Every stay that is large enough to hit, at its middle."""
    file, _ = planned
    page = opened(file)
    arena = next(s for s in in_page(file.read_text())["sections"] if s["kind"] == "arena")
    (space,) = arena["spaces"]
    canvas = page.canvas("arena")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    for start, end, offset, size, _, name, _ in space["stays"]:
        x = 78 + (box["width"] - 82) * ((start + end) / 2) / arena["end"]
        y = 402 - 392 * (offset + size / 2) / space["size"]
        canvas.hover(position={"x": x, "y": y})
        assert page.tip.startswith(f"{arena['names'][name]} (")
        assert f"steps {start} to {end}" in page.tip.replace("step ", "steps ", 1)


def test_search_finds_what_there_is_and_reads_it_out(planned, opened) -> None:
    file, made = planned
    page = opened(file).page
    page.fill("input[type=search]", "F3")
    stays = [
        r for r in made.plan.residences if r.storage >= 0 and made.graph.storages[r.storage].name == "f3"
    ]
    assert page.text_content(".tools [role=status]") == f"{len(stays)} found"
    page.press("input[type=search]", "Enter")
    assert page.text_content("#said").startswith("f3 (activations)")
    page.fill("input[type=search]", "nothing like it")
    assert page.text_content(".tools [role=status]") == "0 found"
    page.click("text=show all")
    assert page.input_value("input[type=search]") == ""


def test_the_keyboard_zooms_pans_and_reads(planned, opened) -> None:
    file, made = planned
    page = opened(file)
    canvas = page.canvas("arena")
    canvas.focus()

    def across() -> tuple[float, float]:
        return tuple(page.page.evaluate("[views.plan.a, views.plan.b]"))

    whole = across()
    assert whole == (0, len(made.plan.steps))
    canvas.press("+")
    a, b = across()
    assert 0 < a < b < whole[1]
    canvas.press("ArrowRight")
    assert across()[0] > a and across()[1] - across()[0] == pytest.approx(b - a)
    canvas.press("0")
    assert across() == whole
    canvas.press("n")
    assert "at offset" in page.page.text_content("#said")
    memory = page.page.locator("section[id^=memory] canvas[role=img]").nth(1)
    memory.focus()
    memory.press("Home")
    assert page.page.text_content("#said").startswith("step 0: f0")
    memory.press("End")
    assert page.page.text_content("#said").startswith(f"step {len(made.plan.steps) - 1}")


def test_the_wheel_scrolls_the_page_until_the_picture_is_clicked(planned, opened) -> None:
    page = opened(planned[0])
    canvas = page.canvas("arena")
    canvas.scroll_into_view_if_needed()
    canvas.hover()
    page.page.mouse.wheel(0, -120)
    page.page.wait_for_timeout(50)
    assert page.page.evaluate("views.plan.a") == 0
    canvas.click()
    page.page.mouse.wheel(0, -120)
    page.page.wait_for_timeout(50)
    assert page.page.evaluate("views.plan.a") > 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_drawn_in_the_reader_s_colors(planned, opened, scheme, tmp_path) -> None:
    """The screenshot's file is kept by pytest; the canvas has the bands' colors in it."""
    page = opened(planned[0], color_scheme=scheme)
    shot = page.page.screenshot(path=str(tmp_path / f"{scheme}.png"), full_page=True)
    assert shot.startswith(PNG)
    count = """name => { const c = document.querySelector("section[id^=arena] canvas"), g = c.getContext("2d");
      g.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
      const [r, b] = [1, 5].map(k => parseInt(g.fillStyle.slice(k, k + 2), 16));
      const d = g.getImageData(0, 0, c.width, c.height).data; let n = 0;
      for (let i = 0; i < d.length; i += 4) n += Math.abs(d[i] - r) < 3 && Math.abs(d[i + 2] - b) < 3; return n; }"""
    for band in ("activation", "gradient"):
        assert page.page.evaluate(count, band) > 1000


def test_nothing_is_wider_than_a_small_screen(planned, opened) -> None:
    page = opened(planned[0]).page
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_timeout(50)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_on_paper_it_is_light_and_tables_are_open(planned, opened, tmp_path) -> None:
    page = opened(planned[0], color_scheme="dark").page
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.evaluate("[...document.querySelectorAll('details')].every(d => d.open)")
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.pdf().startswith(b"%PDF")


def test_what_is_drawn_is_said(planned, opened) -> None:
    """Every picture has a text and can be reached with the tab key; headings and tables have names."""
    page = opened(planned[0]).page
    for canvas in page.query_selector_all("canvas[role=img]"):
        assert canvas.get_attribute("tabindex") == "0"
        assert re.search(r"\d", canvas.get_attribute("aria-label") or "")
    assert page.evaluate("[...document.querySelectorAll('table')].every(t => t.caption.textContent)")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"


def test_a_frontier_shows_the_plan_that_is_chosen(graph_file, opened, capsys) -> None:
    target = graph_file.parent / "frontier.html"
    given = [
        "frontier",
        str(graph_file),
        "--points",
        "4",
        "--work",
        "400000",
        "--json",
        "--report",
        str(target),
    ]
    assert main(given) == 0
    rows = json.loads(capsys.readouterr().out)
    page = opened(target)
    chart = page.canvas("frontier")
    chart.focus()
    chart.press("Home")
    for point in rows["points"][1:]:
        chart.press("ArrowRight")
        chart.press("Enter")
        after = page.page.locator("section[id^=memory] figcaption").nth(1)
        assert format_bytes(point["peak_after"]) in after.text_content()
        assert format_bytes(point["peak_after"]) in page.page.text_content("#said")
    assert page.faults == []


def test_a_notebook_s_cells_do_not_change_one_another(tmp_path, opened) -> None:
    """Plan and frontier on one page: both are drawn, and their styles hold for themselves alone."""
    plan = api.plan_graph(chain(6, 1 << 20), "80%", seconds=0.5)
    frontier = api.frontier(chain(6, 1 << 20), points=3, peers=False, seconds=0.5)
    file = tmp_path / "cells.html"
    file.write_text("<html data-ready=true>" + plan._repr_html_() + frontier._repr_html_())
    page = opened(file)
    assert page.page.evaluate("document.styleSheets.length") == 0
    assert page.page.evaluate("[...document.images].map(i => i.naturalWidth)") == [920, 920]
    assert page.page.text_content("pre") == str(plan)
    assert (page.faults, [a for a in page.asked if not a.startswith("data:")]) == ([], [file.as_uri()])


def test_a_packing_s_page_works_too(tmp_path, opened) -> None:
    rows = "".join(f"b{k},{k},{k + 3 + k % 5},{64 * (1 + k % 7)}\n" for k in range(60))
    (tmp_path / "p.csv").write_text("id,lower,upper,size\n" + rows)
    assert main(["pack", str(tmp_path / "p.csv"), "--report", str(tmp_path / "p.html")]) == 0
    page = opened(tmp_path / "p.html")
    page.page.fill("input[type=search]", "b59")
    page.page.press("input[type=search]", "Enter")
    assert page.page.text_content("#said").startswith("b59 (")
    assert page.faults == []


@pytest.fixture(scope="module")
def choices(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, api.Frontier]:
    made = api.frontier(chain(12, 1 << 20), points=4, peers=False, seconds=1.0)
    file = tmp_path_factory.mktemp("choices") / "frontier.html"
    made.report(file)
    return file, made


def test_a_slider_goes_through_the_plans_with_the_keyboard(choices, opened) -> None:
    file, made = choices
    page = opened(file)
    slider = page.page.get_by_label("Plan, from the least memory")
    assert slider.input_value() == "0"
    slider.focus()
    for k, plan in enumerate(made.points):
        if k:
            slider.press("ArrowRight")
        assert page.page.text_content("[data-plan=peak]") == format_bytes(plan.peak)
        assert slider.get_attribute("aria-valuetext").endswith(f"plan {k + 1} of {len(made.points)}")
        after = page.page.locator("section[id^=memory] figcaption").nth(1).text_content()
        assert after.endswith(f"peak {format_bytes(plan.peak)}")
    recomputed = made.points[0].count("recompute")
    assert recomputed and "Everything is kept. " in page.page.text_content(".whatif")
    assert "recomputed" in page.page.text_content(".whatif table")
    slider.press("Home")
    assert f"{recomputed} recomputed" in page.page.text_content(".whatif")
    assert "No tensor is treated otherwise" in page.page.text_content(".whatif")
    assert page.faults == []


@pytest.mark.parametrize("width", [400, 900, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_frontier_s_page_fits_every_screen(choices, opened, width, scheme) -> None:
    page = opened(choices[0], color_scheme=scheme).page
    page.set_viewport_size({"width": width, "height": 900})
    page.get_by_label("Plan, from the least memory").press("End")
    page.wait_for_timeout(50)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_without_a_script_there_are_tables(choices, browser) -> None:
    file, made = choices
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(file.as_uri())
    text = page.inner_text("body")
    context.close()
    assert all(format_bytes(p.peak) in text for p in made.points)
    assert "__" not in text


def test_a_plan_s_page_has_a_slider_over_other_budgets(tmp_path, graph_file, opened, capsys) -> None:
    file = tmp_path / "plan.html"
    given = ["plan", str(graph_file), "--budget", "70%", "--work", "100000", "--report", str(file), "--json"]
    assert main([*given, "--what-if", "3"]) == 0
    rows = json.loads(capsys.readouterr().out)
    page = opened(file)
    slider = page.page.get_by_label("Plan, from the least memory")
    captions = page.page.locator("section[id^=memory] figcaption")
    own = captions.nth(1).text_content()
    first = captions.nth(3).text_content()
    slider.press("End")
    assert captions.nth(3).text_content() != first
    assert captions.nth(1).text_content() == own and own.endswith(f"peak {format_bytes(rows['peak_after'])}")
    for width in (400, 900, 1400):
        page.page.set_viewport_size({"width": width, "height": 900})
        page.page.wait_for_timeout(50)
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.faults == []
    for more in (["--what-if", "0"], ["--what-if", "3", "--max-batch"]):
        assert main([*given, *more]) == 2
    assert main(["plan", str(graph_file), "--what-if", "3"]) == 2


def test_modules_are_sorted_by_the_column_chosen(tmp_path, opened) -> None:
    graph = chain(6, 1 << 20)
    hostile = "</script><b>\u202egood"
    ops = tuple(
        replace(op, module=hostile if k == 3 else f"blocks.{k % 6}") for k, op in enumerate(graph.ops)
    )
    made = api.plan_graph(replace(graph, ops=ops), "70%", seconds=0.5)
    made.report(tmp_path / "p.html")
    page = opened(tmp_path / "p.html")
    table = page.page.locator("table", has_text="What each module costs")
    names = "t => [...t.tBodies[0].rows].map(r => r.cells[0].textContent)"
    rows = made.rows()["modules"]
    assert [n or "(all)" for n in (visible(r["module"]) for r in rows)] == table.evaluate(names)
    table.get_by_role("button", name="made again").click()
    assert table.evaluate(names)[0] == "(all)"
    assert table.locator("th[aria-sort=descending]").text_content() == "made again"
    table.get_by_role("button", name="made again").click()
    by_amount = {visible(r["module"]) or "(all)": r["recomputed"] for r in rows}
    amounts = [by_amount[n] for n in table.evaluate(names)]
    assert amounts == sorted(amounts) and amounts[-1] > 0
    assert page.page.locator("section b").count() == 0
    assert "\u202e" not in (tmp_path / "p.html").read_text()
    assert page.faults == []
