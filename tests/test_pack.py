"""``tightship pack`` and ``verify`` of packings: the JSON contract, exit statuses, bad input, pictures."""

import _thread
import os
import re
import threading
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.commands import as_json, run
from support.placing import packing, planted, problems
from tightship.diagnose.infeasible_subset import infeasible_subset
from tightship.frontends import problem_csv
from tightship.plan import Buffer, Gap, Problem, Solution
from tightship.planners import planners
from tightship.planners.place import exact
from tightship.report import packing as picture
from tightship.report.packing import packing_picture, time_ticks

QUICK = ["--work", "3000", "--seconds", "5"]
HEAD = "id,lower,upper,size\n"
TOY = HEAD + "b1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def there(tmp_path, monkeypatch):
    (tmp_path / "toy.csv").write_text(TOY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- pack ---


def test_pack_prints_the_keys_that_programs_read(there, capsys):
    status, rows = as_json("pack", "toy.csv", capsys=capsys)
    assert status == 0
    assert (rows["arena"], rows["lower_bound"], rows["optimal"], rows["gap"]) == (12, 12, True, 0.0)
    assert (rows["met"], rows["capacity"], rows["buffers"], rows["clash"]) == (True, None, 5, None)
    assert rows["planner"] == "portfolio" and rows["seconds"] >= 0 and rows["work"] >= 5


def test_a_packing_is_written_and_verified(there, capsys):
    status, out, _ = run("pack", "toy.csv", "-c", "12 B", "-o", "out.csv", capsys=capsys)
    assert status == 0 and "within the capacity of 12 B" in out and "written to out.csv" in out
    lines = (there / "out.csv").read_text().splitlines()
    assert lines[0] == "id,lower,upper,size,offset"
    assert [line.rpartition(",")[0] for line in lines] == TOY.splitlines()
    assert as_json("verify", "out.csv", "--capacity", "12", capsys=capsys) == (
        0,
        {"violations": [], "arena": 12, "capacity": 12, "buffers": 5},
    )
    assert "OK (0 violations, 5 buffers, arena 12 B)" in run("verify", "out.csv", capsys=capsys)[1]


@pytest.mark.parametrize("name", planners("place"))
def test_every_planner_packs(there, capsys, name):
    status, rows = as_json("pack", "toy.csv", "--planner", name, *QUICK, capsys=capsys)
    assert status == 0 and rows["planner"] == name and rows["arena"] >= 12


def test_a_packing_over_its_own_input_keeps_it_pinned(there, capsys):
    assert run("pack", "toy.csv", "-o", "toy.csv", capsys=capsys)[0] == 0
    first = (there / "toy.csv").read_text()
    assert run("pack", "toy.csv", "-o", "toy.csv", "--planner", "naive", capsys=capsys)[0] == 0
    assert (there / "toy.csv").read_text() == first


def test_what_cannot_fit_together_is_named_with_its_time(there, capsys):
    (there / "p.csv").write_text(HEAD + "a,0,5,3\nb,2,9,4\nc,4,5,2\nd,4,6,9\ne,0,1,1\n")
    status, rows = as_json("pack", "p.csv", "-c", "14", "-o", "out.csv", capsys=capsys)
    assert (status, rows["met"], rows["lower_bound"]) == (1, False, 18)
    assert rows["clash"] == {"time": 4, "ids": ["d", "b", "a"], "bytes": 16}
    assert not (there / "out.csv").exists()
    status, out, _ = run("pack", "p.csv", "-c", "14", "-o", "out.csv", capsys=capsys)
    assert status == 1 and "lower bound  18 B" in out
    assert "at time 4 these 3 are alive together and need 16 B:\n  d, b, a" in out
    assert "d alone needs 9 B" in run("pack", "p.csv", "-c", "8", capsys=capsys)[1]
    assert as_json("pack", "p.csv", "-c", "8", capsys=capsys)[1]["too_large"] == [{"id": "d", "bytes": 9}]
    assert rows["too_large"] == []


def test_what_is_not_proved_is_said_not_to_be(there, capsys):
    # Naive placement proves nothing but the peak.
    status, rows = as_json("pack", "toy.csv", "-c", "13", "--planner", "naive", capsys=capsys)
    assert (status, rows["met"], rows["clash"], rows["arena"]) == (1, False, None, 20)
    out = run("pack", "toy.csv", "-c", "13", "--planner", "naive", capsys=capsys)[1]
    assert "that there is none is not proved" in out


def test_is_never_worse_than_the_baseline(there, capsys):
    assert run("pack", "toy.csv", "-o", "best.csv", capsys=capsys)[0] == 0
    lines = (there / "best.csv").read_text().splitlines()
    (there / "best.csv").write_text("\n".join([lines[0], *reversed(lines[1:])]) + "\n")
    args = ["pack", "toy.csv", "--planner", "naive", "--baseline", "best.csv", "-o", "out.csv"]
    status, rows = as_json(*args, capsys=capsys)
    assert (status, rows["arena"], rows["planner"]) == (0, 12, "baseline")
    assert as_json("verify", "out.csv", capsys=capsys)[1]["arena"] == 12
    assert as_json("pack", "toy.csv", "--baseline", "out.csv", capsys=capsys)[1]["planner"] == "portfolio"


@pytest.mark.parametrize(
    ("baseline", "said"),
    [
        (TOY, "buffer 'b1' has no offset"),
        (HEAD + "b1,0,3,4\n", "missing buffer 'b2'"),
        (TOY + "b6,0,1,4\n", "unknown buffer 'b6'"),
        (
            TOY.replace("b1,0", "b1,1"),
            "buffer 'b1' is alive [1, 3) with 4 bytes; in the problem [0, 3) with 4",
        ),
        ("offset," + TOY.replace("\n", "\n0,", 5), "share bytes"),
        ("nothing", "no column for"),
    ],
)
def test_a_baseline_is_verified_first(there, capsys, baseline, said):
    (there / "base.csv").write_text(baseline)
    status, rows = as_json("pack", "toy.csv", "--baseline", "base.csv", "-o", "out.csv", capsys=capsys)
    assert status == 2 and said in rows["error"]["message"]
    assert not (there / "out.csv").exists()


def test_gaps_and_pins_go_all_the_way(there, capsys):
    rows = ["host,0,9,8,0-0@0:1,0", "host2,0,9,8,2-5,", "guest,2,4,8,,"]
    (there / "g.csv").write_text("\n".join(["id,start,end,size,gaps,offset", *rows]) + "\n")
    status, answer = as_json("pack", "g.csv", "-o", "out.csv", "--svg", "g.svg", capsys=capsys)
    assert (status, answer["arena"], answer["lower_bound"]) == (0, 16, 16)
    assert [line.split(",")[-1] for line in (there / "out.csv").read_text().split()] == [
        "offset",
        "0",
        "8",
        "8",
    ]
    assert as_json("verify", "out.csv", capsys=capsys)[0] == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "empty file"),
        (HEAD + "a,0,1,0\n", "bad.csv:2"),
        (HEAD + "a,0,1,4\na,0,1,4\n", "bad.csv:3"),
        (
            "id,lower,upper,size,offset\na,0,1,4,10\n",
            "pinned buffer ends at 14, beyond the capacity of 12 bytes",
        ),
        ("id,lower,upper,size,offset\na,0,2,4,0\nb,1,2,4,2\n", "share bytes [2, 4)"),
        (HEAD + f"a,0,1,{2**62}\n", "below 2^62"),
        (HEAD + f"a,0,1,{2**61}\nb,0,1,{2**61}\n", "below 2^62"),
        ("\x00" * 99, "no column for id"),
    ],
)
def test_bad_input_leaves_the_output_alone(there, capsys, content, said):
    (there / "bad.csv").write_text(content)
    (there / "out.csv").write_text("precious")
    args = ["pack", "bad.csv", "-c", "12", "-o", "out.csv", "--svg", "out.svg"]
    status, out, err = run(*args, capsys=capsys)
    assert (status, out) == (2, "") and said in err and "Traceback" not in err
    status, rows = as_json(*args, capsys=capsys)
    assert status == 2 and said in rows["error"]["message"]
    assert (there / "out.csv").read_text() == "precious"
    assert set(os.listdir(there)) == {"toy.csv", "bad.csv", "out.csv"}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-c", "12XB"], "unknown unit"),
        (["-c", "50%"], "invalid size"),
        (["-c", "-4"], "invalid size"),
        (["--planner", "anneal"], "a planner is one of"),
        (["--seed", "-1"], "must not be negative"),
        (["--seed", str(2**63)], "at most 2^63-1"),
        (["--work", str(10**30)], "at most 2^63-1"),
        (["--seconds", "nan"], "must not be negative"),
        (["-o", "no/such/folder.csv"], "directory 'no/such' does not exist"),
        (["--svg", "."], "is a directory, not a file"),
        (["--baseline", "missing.csv"], "No such file or directory"),
    ],
)
def test_bad_arguments_are_said_to_be_bad(there, capsys, args, said):
    status, rows = as_json("pack", "toy.csv", *args, capsys=capsys)
    assert status == 2 and said in rows["error"]["message"]
    assert os.listdir(there) == ["toy.csv"]


@pytest.mark.parametrize(
    "limits", [["--work", "0"], ["--seconds", "0"], ["--seconds", "inf", "--work", "99"]]
)
def test_limits_of_nothing_still_give_an_answer(there, capsys, limits):
    assert as_json("pack", "toy.csv", *limits, capsys=capsys)[0] == 0


@pytest.mark.parametrize("case", ["A.1048576", "input.12", "resnet50"])
def test_published_problems_are_packed_and_verified(there, capsys, case):
    problem = packing(case)
    problem_csv.write("p.csv", problem_csv.table_of(problem))
    status, rows = as_json("pack", "p.csv", "-o", "out.csv", "--svg", "p.svg", *QUICK, capsys=capsys)
    assert status == 0 and rows["buffers"] == len(problem.buffers)
    assert rows["lower_bound"] <= rows["arena"]
    assert as_json("verify", "out.csv", "-c", rows["arena"], capsys=capsys)[0] == 0


# --- verify ---


@pytest.mark.parametrize(
    ("rows", "code", "step", "subjects"),
    [
        ("a,0,4,8,1,0\nb,2,6,8,1,4\n", "overlap", 2, ["b", "a"]),
        ("a,0,4,8,4,6\n", "misaligned", 0, ["a"]),
        ("a,0,4,8,1,13\n", "over-capacity", -1, []),
        ("a,3,4,8,1,\n", "missing", 3, ["a"]),
    ],
)
def test_verify_says_what_is_wrong_and_where(there, capsys, rows, code, step, subjects):
    (there / "w.csv").write_text("id,lower,upper,size,alignment,offset\n" + rows)
    status, answer = as_json("verify", "w.csv", "-c", "20", capsys=capsys)
    assert status == 1
    (violation,) = answer["violations"]
    assert violation.keys() == {"code", "step", "subjects", "message"}
    assert (violation["code"], violation["step"], violation["subjects"]) == (code, step, subjects)
    assert code in run("verify", "w.csv", "-c", "20", capsys=capsys)[1]


def test_many_violations_are_counted_and_some_shown(there, capsys):
    rows = "".join(f"b{k},0,4,8,0\n" for k in range(50))
    (there / "w.csv").write_text("id,lower,upper,size,offset\n" + rows)
    status, out, _ = run("verify", "w.csv", capsys=capsys)
    assert status == 1 and "49 violations" in out and "overlap at time 0" in out and "and 29 more" in out
    assert len(as_json("verify", "w.csv", capsys=capsys)[1]["violations"]) == 49


def test_a_packing_is_known_by_its_name_or_its_content(there, capsys):
    run("pack", "toy.csv", "-o", "packed", capsys=capsys)
    assert as_json("verify", "packed", capsys=capsys)[0] == 0
    os.rename("packed", "PACKED.CSV")
    assert as_json("verify", "PACKED.CSV", capsys=capsys)[0] == 0
    os.rename("PACKED.CSV", "packed.json")
    assert as_json("verify", "packed.json", capsys=capsys)[0] == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["toy.csv"], "missing column 'offset'"),
        (["missing.csv"], "No such file or directory"),
        (["toy.csv", "--source", "graph.json"], "only plans are verified against a graph"),
        (["toy.csv", "--capacity", "x"], "invalid size"),
        (["plan.json", "--capacity", "1GB"], "--capacity requires a packing"),
    ],
)
def test_what_cannot_be_verified_is_bad_input(there, capsys, args, said):
    status, rows = as_json("verify", *args, capsys=capsys)
    assert status == 2 and said in rows["error"]["message"]


# --- clashes ---


@given(problems(plain=True), st.integers(0, 60))
def test_a_clash_is_a_proof_and_nothing_in_it_can_be_left_out(problem: Problem, capacity: int) -> None:
    loads = [sum(b.size for b in problem.buffers if b.lower <= t < b.upper) for t in range(-3, 16)]
    found = infeasible_subset(problem, capacity)
    assert (found is not None) == (max(loads) > capacity)
    if found is not None:
        members = [b for b in problem.buffers if b.id in found.ids]
        assert len(members) == len(found.ids)
        assert all(b.lower <= found.time < b.upper for b in members)
        assert sum(b.size for b in members) == found.nbytes > capacity
        assert found.nbytes - min(b.size for b in members) <= capacity


@given(problems(), st.integers(0, 60))
def test_a_clash_counts_what_alignments_force(problem: Problem, capacity: int) -> None:
    found = infeasible_subset(problem, capacity)
    if found is not None:
        members = [b for b in problem.buffers if b.id in found.ids]
        assert all(b.lower <= found.time < b.upper for b in members)
        assert found.nbytes > capacity


def test_a_buffer_clashes_with_what_of_another_is_alive() -> None:
    host = Buffer("host", 0, 9, 8, gaps=(Gap(2, 5, (0, 3)),))
    guest = Buffer("guest", 2, 4, 6)
    assert infeasible_subset(Problem((host, guest)), 9) is None
    found = infeasible_subset(Problem((host, guest)), 8)
    assert found is not None and (found.time, found.ids, found.nbytes) == (2, ("guest", "host"), 9)


# --- pictures ---


def drawn(problem: Problem, offsets: tuple[int, ...], **known: object) -> ET.Element:
    arena = max((x + b.size for b, x in zip(problem.buffers, offsets, strict=True)), default=0)
    return ET.fromstring(packing_picture(problem, Solution(offsets, arena, **known), title="a <b> & c"))


def test_a_picture_has_every_buffer_at_its_place() -> None:
    problem = Problem((Buffer("x<&>", 0, 5, 1024), Buffer("y", 5, 10, 3072)), capacity=4096)
    root = drawn(problem, (0, 1024), lower_bound=3072)
    groups = root.findall(f"{SVG}g")
    assert len(groups) == 2
    boxes = [{k: float(v) for k, v in g.find(f"{SVG}rect").attrib.items() if k != "class"} for g in groups]
    assert boxes[0]["width"] == pytest.approx(boxes[1]["width"])
    assert boxes[1]["height"] == pytest.approx(3 * boxes[0]["height"])
    assert boxes[1]["y"] + boxes[1]["height"] == pytest.approx(boxes[0]["y"])
    said = groups[0].findtext(f"{SVG}title")
    assert said == "x<&>\n1.00 KiB (1024 B) at [0, 1024)\nalive [0, 5)"
    words = " ".join(root.itertext())
    for word in ("a <b> & c", "capacity", "lower bound", "arena", "4.00 KiB", "3.00 KiB", "time", "offset"):
        assert word in words


def test_a_picture_shows_gaps_and_what_is_alive_in_them() -> None:
    problem = Problem((Buffer("x", 0, 9, 1024, gaps=(Gap(2, 4), Gap(6, 8, (0, 512)))),))
    (group,) = drawn(problem, (0,)).findall(f"{SVG}g")
    kinds = [r.attrib.get("class", "") for r in group.findall(f"{SVG}rect")]
    assert len(kinds) == 5 and ["pale" in k for k in kinds] == [True, False, False, False, False]
    assert "gap [6, 8), bytes [0, 512) alive" in group.findtext(f"{SVG}title")


def test_a_picture_stands_alone_and_follows_light_and_dark() -> None:
    text = packing_picture(Problem((Buffer("a\x00\ud800", 0, 1, 1),)), Solution((0,), 1))
    ET.fromstring(text)
    text.encode()
    assert "prefers-color-scheme:dark" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


@given(problems())
def test_any_problem_can_be_drawn(problem: Problem) -> None:
    root = drawn(problem, tuple(3 * k for k in range(len(problem.buffers))))
    numbers = [float(r.attrib[k]) for r in root.iter(f"{SVG}rect") for k in ("width", "height")]
    assert min(numbers) > 0
    assert len(root.findall(f"{SVG}g")) == len(problem.buffers)


def test_of_very_many_the_largest_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "MOST", 2)
    problem = Problem(tuple(Buffer(f"b{k}", 0, 4, k + 1) for k in range(5)))
    root = drawn(problem, (0, 1, 3, 6, 10))
    assert [g.findtext(f"{SVG}title")[:2] for g in root.findall(f"{SVG}g")] == ["b4", "b3"]
    assert "the largest 2 of 5 buffers" in " ".join(root.itertext())


@pytest.mark.parametrize("until", [1, 2, 7, 9, 10, 64, 99, 1000, 123456, 2**62])
@pytest.mark.parametrize("since", [0, 3, 10**9])
def test_times_on_the_axis_are_round(since: int, until: int) -> None:
    marks = time_ticks(since, since + until)
    assert 1 <= len(marks) <= 10
    assert all(since <= t <= since + until for t in marks)
    assert all(re.fullmatch(r"[125]0*|[1-9]", str(b - a)) for a, b in pairwise(marks))


def test_the_picture_in_the_docs_is_of_the_problem_beside_it() -> None:
    docs = os.path.join(os.path.dirname(__file__), os.pardir, "docs")
    problem = problem_csv.read(os.path.join(docs, "placement.csv")).problem
    root = ET.parse(os.path.join(docs, "placement.svg")).getroot()
    said = [g.findtext(f"{SVG}title").split("\n")[0] for g in root.findall(f"{SVG}g")]
    assert sorted(said) == sorted(b.id for b in problem.buffers)


# --- groups, conflicts and pools ---

POOLED = """id,lower,upper,size,pools,group,conflicts,note
a,0,4,10,fast slow,g,,x
b,8,12,6,,g,,y
c,4,8,10,,,d,
d,8,12,4,,,,
e,0,12,5,,,,
"""


@pytest.fixture
def pooled(tmp_path, monkeypatch):
    (tmp_path / "p.csv").write_text(POOLED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_packs_into_pools_and_verifies_what_it_wrote(pooled, capsys):
    pools = ["--pool", "fast=12", "--pool", "slow"]
    status, rows = as_json("pack", "p.csv", *pools, "-o", "out.csv", "--svg", "out.svg", capsys=capsys)
    assert (status, rows["met"], rows["lower_bound"]) == (0, True, 15)
    assert [(p["name"], p["capacity"], p["arena"]) for p in rows["pools"]] == [
        ("fast", 12, 10),
        ("slow", None, 9),
    ]
    lines = (pooled / "out.csv").read_text().splitlines()
    assert lines[0] == POOLED.splitlines()[0] + ",offset,pool"
    assert [line.rsplit(",", 2)[0] for line in lines] == POOLED.splitlines()
    status, rows = as_json("verify", "out.csv", *pools, capsys=capsys)
    assert (status, rows["violations"], rows["arena"]) == (0, [], 19)
    status, rows = as_json("verify", "out.csv", "--pool", "fast=9", "--pool", "slow", capsys=capsys)
    assert status == 1 and [v["code"] for v in rows["violations"]] == ["over-capacity"]
    ET.parse(pooled / "out.svg")


@pytest.mark.parametrize("name", planners("place"))
def test_every_planner_packs_into_pools(pooled, capsys, name):
    status, rows = as_json(
        "pack", "p.csv", "--pool", "fast=12", "--pool", "slow", "--planner", name, capsys=capsys
    )
    assert status == 0 and rows["planner"] == f"{name}+spill"


def test_packs_into_heaps(pooled, capsys):
    status, rows = as_json(
        "pack", "p.csv", "--heap", "fast=10", "--pool", "fast", "--pool", "slow", capsys=capsys
    )
    assert status == 0 and rows["pools"][0]["heaps"] == [10, 9]
    (pooled / "plain.csv").write_text(TOY)
    assert run("pack", "plain.csv", "--heap", "8", "-o", "out.csv", capsys=capsys)[0] == 0
    assert (pooled / "out.csv").read_text().startswith("id,lower,upper,size,offset,heap")
    assert run("verify", "out.csv", "--heap", "8", capsys=capsys)[0] == 0
    assert run("verify", "out.csv", "--heap", "7", capsys=capsys)[0] == 1
    assert run("verify", "out.csv", capsys=capsys)[0] == 0


def test_what_fits_no_pool_is_said_by_name(pooled, capsys):
    status, rows = as_json(
        "pack", "p.csv", "--pool", "fast=12", "--pool", "slow=2", "-o", "out.csv", capsys=capsys
    )
    assert (status, rows["met"]) == (1, False)
    assert not (pooled / "out.csv").exists()
    assert rows["clash"]["bytes"] > 14
    assert run("pack", "p.csv", "--pool", "fast=12", "--pool", "slow=2", capsys=capsys)[0] == 1


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (("0,fast\nb", "5,fast\nb"), "colocation-broken"),
        (("a,0,4,10,fast slow", "a,0,4,10,slow"), "wrong-pool"),
        (("y,0,fast", "y,0,"), "missing"),
        ((",5,slow", ",0,slow"), "overlap"),
    ],
)
def test_what_is_wrong_in_pools_is_found(pooled, capsys, edit, code):
    run("pack", "p.csv", "--pool", "fast=12", "--pool", "slow", "-o", "out.csv", capsys=capsys)
    text = (pooled / "out.csv").read_text()
    assert edit[0] in text
    (pooled / "out.csv").write_text(text.replace(*edit))
    status, rows = as_json("verify", "out.csv", "--pool", "fast=16", "--pool", "slow", capsys=capsys)
    assert status == 1 and code in {v["code"] for v in rows["violations"]}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--pool", "fat"], "p.csv:2: unknown pool 'fast'; --pool gives fat"),
        (["--pool", "fast=x"], "--pool"),
        (["--pool", "fast", "--pool", "fast"], "with a new name"),
        (["--pool", "a b"], "'a b' is not NAME or NAME=BYTES"),
        (["--pool", "fast", "--pool", "slow", "--heap", "9"], "--heap: '9' names no pool: with several"),
        (
            ["--pool", "fast", "--pool", "slow", "--heap", "far=9"],
            "'far=9': unknown pool, or a second limit (pools: fast, slow)",
        ),
        (["--heap", "fast=0"], "at least 1 byte"),
        (["--capacity", "9"], "--capacity is for one arena"),
        (["--pool", "fast", "--pool", "slow", "--baseline", "p.csv"], "baseline"),
    ],
)
def test_bad_pools_are_refused_in_one_line(pooled, capsys, options, said):
    status, out, err = run("pack", "p.csv", *options, "-o", "out.csv", capsys=capsys)
    assert (status, out) == (2, "")
    assert said in err and err.count("\n") == 1
    assert not (pooled / "out.csv").exists()


def test_a_pool_that_nobody_may_go_to_is_refused(there, capsys):
    (there / "p.csv").write_text("id,lower,upper,size,pools\na,0,1,4,fast\n")
    status, _, err = run("pack", "p.csv", "--pool", "fast", "--pool", "slow=9", capsys=capsys)
    assert status == 2 and "no buffer may go to pool 'slow'" in err


def test_an_interrupt_prints_and_writes_the_best_so_far(there, capsys, monkeypatch):
    problem_csv.write("p.csv", problem_csv.table_of(planted(600, 1, height=5000)))
    search = exact.search

    def interrupted(*args):
        threading.Timer(0.2, _thread.interrupt_main).start()  # well within the minutes that it would take
        return search(*args)

    monkeypatch.setattr(exact, "search", interrupted)
    args = ["pack", "p.csv", "-o", "out.csv", "--seconds", "300", "--work", 10**12]
    status, answer = as_json(*args, capsys=capsys)
    assert status == 130
    assert (answer["interrupted"], answer["met"], answer["output"]) == (True, True, "out.csv")
    assert 5000 <= answer["arena"] < 10_000
    status, checked = as_json("verify", "out.csv", capsys=capsys)
    assert (status, checked["arena"]) == (0, answer["arena"])


def test_a_large_packing_is_verified_in_one_pass(there, capsys):
    rows = "\n".join(f"b{k},{k},{k + 1},64,0" for k in range(20_000))
    (there / "many.csv").write_text(f"id,lower,upper,size,offset\n{rows}\n")
    status, out, _ = run(
        "verify", "many.csv", capsys=capsys
    )  # minutes, if the table is made anew for every row
    assert status == 0
    assert "20000 buffers" in out
