"""Pages: one file each, their numbers those of ``--json``, whatever they are about."""

import json
import re

import pytest
from hypothesis import given, settings

from support.chains import chain
from support.pages import in_page, part
from support.strategies import plans
from tightship import api
from tightship.cli import main
from tightship.graph import Graph
from tightship.plan import Plan, Step
from tightship.report.numbers import plan_rows
from tightship.report.pages.plan import arcs, plan_page
from tightship.serde import save_graph
from tightship.simulate import baseline, replay

PROBLEM = "id,lower,upper,size\na,0,4,128\nb,2,6,64\nc,5,9,256\n"
MODULE = """HloModule m, is_scheduled=true

ENTRY %e (p: f32[256]) -> f32[256] {
  %p = f32[256]{0} parameter(0)
  %big = f32[1024]{0} broadcast(%p), dimensions={}
  %a = f32[1024]{0} negate(%big)
  %b = f32[1024]{0} add(%a, %big)
  ROOT %out = f32[256]{0} slice(%b), slice={[0:256]}, metadata={op_name="cut" source_file="m.py" source_line=7}
}
"""


@pytest.fixture(scope="module")
def planned() -> api.Planned:
    made = api.plan_graph(chain(12), "70%", seconds=1.0)
    assert made.plan.count("recompute")
    return made


@pytest.fixture(scope="module")
def text(planned: api.Planned) -> str:
    return plan_page(planned.graph, planned.plan)


class TestPlan:
    def test_its_numbers_are_the_plan_s(self, planned: api.Planned, text: str) -> None:
        plan = planned.plan
        data = in_page(text)
        assert data["summary"] == json.loads(json.dumps(plan_rows(plan, planned.graph)))
        memory = part(text, "memory")
        tops = [max(map(sum, zip(*p["columns"], strict=True))) for p in memory["panels"]]
        assert tops == [p["peak"] for p in memory["panels"]] == [plan.peak_before, plan.peak]
        assert memory["lines"] == [
            ["budget", plan.budget, "budget"],
            ["lower bound", plan.lower_bound, "bound"],
        ]
        assert len(part(text, "arcs")["arcs"]) == sum(
            len(s.storages) for s in plan.steps if s.kind == "recompute"
        )

    def test_the_table_of_the_peak_adds_up_to_it(self, planned: api.Planned, text: str) -> None:
        table = next(s for s in in_page(text)["sections"] if s["heading"] == "The peak")
        assert [c[0] for c in table["columns"]] == [
            "tensor",
            "kind",
            "shape",
            "bytes",
            "module",
            "made on line",
        ]
        assert sum(row[3] for row in table["rows"]) == planned.plan.peak

    def test_stays_lie_within_the_arena(self, planned: api.Planned, text: str) -> None:
        (space,) = part(text, "arena")["spaces"]
        assert space["size"] == max(s[2] + s[3] for s in space["stays"]) == planned.plan.arena
        assert len(space["stays"]) == len(planned.plan.residences)

    def test_an_arc_leads_from_leaving_to_return(self) -> None:
        """By every way there is, with the seconds that the way back takes."""
        graph = chain(2, size=128)
        steps = (
            Step("compute", op=0),
            Step("compute", op=1),
            Step("compress", storages=(1,), nbytes=64),
            Step("free", storages=(1,)),
            Step("offload", storages=(2,), stream=1, waits=(1,)),
            Step("free", storages=(2,), waits=(4,)),
            Step("decompress", storages=(1,)),
            Step("fetch", storages=(2,), stream=2, waits=(5,)),
        )
        plan = api.plan_graph(graph, seconds=0.1).plan
        plan = plan.__class__(digest=plan.digest, steps=steps)
        line = replay(graph, steps)
        found = {a["kind"]: a for a in arcs(graph, plan, line)}
        assert (found["compress"]["from"], found["compress"]["to"]) == (3, 6)
        assert (found["offload"]["from"], found["offload"]["to"]) == (5, 7)
        assert found["offload"]["cost"] == pytest.approx(graph.machine.seconds("fetch", 128))

    def test_asks_the_network_for_nothing(self, text: str) -> None:
        assert not re.search(r"""(src|href)\s*=|https?://|@import|url\(""", text)

    def test_is_small_beside_its_data(self, text: str) -> None:
        data = re.search(r'id="data">(.*?)</script>', text, re.S)
        assert data is not None
        assert len(text) - len(data[1]) < 300_000

    def test_a_name_cannot_end_the_script_nor_be_a_part_of_the_page(self, planned: api.Planned) -> None:
        title = "</script><script>alert(1)</script><!-- __DATA__ __STYLE__"
        text = plan_page(planned.graph, planned.plan, title=title)
        assert text.count("</script>") == 2
        assert in_page(text)["title"] == title

    def test_nothing_is_left_out_of_a_graph_that_is_empty(self) -> None:
        text = plan_page(chain(1), api.plan_graph(chain(1), place=False, seconds=0.1).plan)
        assert {s["kind"] for s in in_page(text)["sections"]} == {"memory", "table", "streams"}


@settings(max_examples=30, deadline=None)
@given(plans())
def test_a_page_of_any_plan_has_its_bytes_step_by_step(both: tuple[Graph, Plan]) -> None:
    graph, plan = both
    text = plan_page(graph, plan)
    for panel, steps in zip(part(text, "memory")["panels"], (baseline(graph), plan.steps), strict=True):
        found = [sum(row) for row in zip(*panel["columns"], strict=True)]
        assert found == list(replay(graph, steps).during) or not steps
    table = next(s for s in in_page(text)["sections"] if s["heading"] == "The peak")
    assert sum(row[3] for row in table["rows"]) == replay(graph, plan.steps).peak


def run(capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, object]:
    assert main([*given, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_frontier_has_a_page_with_every_plan_and_every_peer(tmp_path, capsys) -> None:
    save_graph(chain(12), tmp_path / "g.json")
    page = tmp_path / "f.html"
    rows = run(capsys, "frontier", str(tmp_path / "g.json"), "--points", "4", "--report", str(page))
    assert rows.pop("report") == str(page)
    text = page.read_text()
    assert in_page(text)["summary"] == rows
    chart = part(text, "frontier")
    assert [p["peak"] for p in chart["points"]] == [p["peak_after"] for p in rows["points"]]
    assert [p["name"] for p in chart["peers"]] == [p["name"] for p in rows["peers"]]
    choices = part(text, "memory")["panels"][1]["choices"]
    assert [p["peak"] for p in choices] == [p["peak_after"] for p in rows["points"]]


def test_a_packing_has_a_page(tmp_path, capsys) -> None:
    (tmp_path / "p.csv").write_text(PROBLEM)
    page = tmp_path / "p.html"
    rows = run(capsys, "pack", str(tmp_path / "p.csv"), "--capacity", "320", "--report", str(page))
    assert rows.pop("report") == str(page)
    text = page.read_text()
    assert in_page(text)["summary"] == rows
    (space,) = part(text, "arena")["spaces"]
    assert max(s[2] + s[3] for s in space["stays"]) == rows["arena"] == 320
    (panel,) = part(text, "memory")["panels"]
    assert (panel["times"], panel["columns"]) == ([0, 2, 4, 5, 6, 9], [[128, 192, 64, 320, 256, 0]])


def test_pools_and_gaps_of_a_packing_are_shown(tmp_path, capsys) -> None:
    (tmp_path / "p.csv").write_text("id,lower,upper,size,gaps\na,0,9,128,2-6\nb,2,6,128,\n")
    page = tmp_path / "p.html"
    given = ("--pool", "fast=128", "--pool", "slow")
    run(capsys, "pack", str(tmp_path / "p.csv"), *given, "--report", str(page))
    stays = [s for space in part(page.read_text(), "arena")["spaces"] for s in space["stays"]]
    assert sum(len(s) == 8 and s[7] for s in stays) == 1
    assert len(stays) == 4


def test_an_assignment_has_a_page(tmp_path, capsys) -> None:
    (tmp_path / "m.txt").write_text(MODULE)
    page = tmp_path / "m.html"
    rows = run(capsys, "assign", str(tmp_path / "m.txt"), "--report", str(page))
    assert rows.pop("report") == str(page)
    text = page.read_text()
    assert in_page(text)["summary"] == rows
    (space,) = part(text, "arena")["spaces"]
    assert space["size"] == rows["total"]
    assert all(s[2] + s[3] <= rows["total"] for s in space["stays"])
    (panel,) = part(text, "memory")["panels"]
    assert rows["lower_bound"] <= panel["peak"] or rows["lower_bound"] == rows["total"]


def test_a_plan_of_a_module_can_be_looked_at_in_every_way(tmp_path, capsys) -> None:
    (tmp_path / "m.txt").write_text(MODULE)
    wanted = {"report": "p.html", "trace": "t.json.gz", "snapshot": "s.pickle", "picture": "p.svg"}
    given = [x for name, file in wanted.items() for x in (f"--{name}", str(tmp_path / file))]
    rows = run(capsys, "plan", str(tmp_path / "m.txt"), *given)
    assert all((tmp_path / file).exists() for file in wanted.values())
    memory = part((tmp_path / "p.html").read_text(), "memory")
    assert [p["peak"] for p in memory["panels"]] == [rows["peak_before"], rows["peak_after"]]
