"""Buffer assignment of HLO modules: XLA's to the byte, ours never larger, both checked."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from support import hlo_data, hlo_dumps
from tightship.baselines import xla_assign
from tightship.cli import main
from tightship.hlo import parse, read, to_text
from tightship.hlo.alias import Sharing, target_of
from tightship.hlo.assign import tight
from tightship.hlo.assign.allocate import Assignment
from tightship.hlo.assign.check import violations
from tightship.hlo.assign.heap import replay
from tightship.hlo.assign.order import reordered
from tightship.hlo.liveness import live_ranges
from tightship.planners import planner

QUICK = tight.Options(seconds=120.0, work=2_000)
MODULES = hlo_data.CPU + hlo_data.GPU


def wrong(made: Assignment) -> list[str]:
    return [str(v) for v in violations(made, Sharing(made.live.points, made.target))]


@pytest.mark.parametrize("name", MODULES)
def test_xla_assigns_what_xla_assigned_to_the_byte(name: str) -> None:
    theirs = hlo_data.text(name, "after_optimizations-buffer-assignment")
    made = xla_assign.plan(hlo_data.module(name))
    assert {"total": made.total, "temp": made.temp} == hlo_dumps.total(theirs)
    assert made.target == name[:3]
    ours = {str(b): offset for a in made.allocations for b, offset in a.held.items()}
    different = {n for n, (_, offset, _) in hlo_dumps.offsets(theirs).items() if ours[n] != offset}
    assert different == set()


def test_xla_sums_by_kind_as_compiled_memory_analysis_does() -> None:
    made = xla_assign.plan(hlo_data.module("cpu_mlp"))
    assert (made.arguments, made.output, made.alias, made.temp) == (22576388, 22445016, 22444804, 9863492)
    assert (
        made.total
        == made.arguments + made.output - made.alias + made.temp + made.constants + made.thread_local
    )


@pytest.mark.parametrize("name", MODULES)
def test_tight_is_legal_never_larger_than_xla_and_not_below_the_bound(name: str) -> None:
    theirs, ours = xla_assign.plan(hlo_data.module(name)), tight.plan(hlo_data.module(name), QUICK)
    assert wrong(ours) == []
    assert ours.lower_bound <= ours.total <= theirs.total
    assert ours.lower_bound == theirs.lower_bound


@pytest.mark.parametrize(
    ("name", "at_most"),
    [("gpu_mlp_35000000", 27_819_640), ("cpu_mlp", 31_489_680), ("cpu_control", 5_446_591)],
)
def test_tight_is_smaller_where_the_bound_allows(name: str, at_most: int) -> None:
    made = tight.plan(hlo_data.module(name), QUICK)
    assert made.total <= at_most < xla_assign.plan(hlo_data.module(name)).total


def moved(made: Assignment, name: str, offset: int) -> Assignment:
    """The same assignment with one buffer moved."""
    allocations = tuple(
        replace(a, held={b: offset if str(b) == name else o for b, o in a.held.items()}, lives=[])
        for a in made.allocations
    )
    return replace(made, allocations=allocations)


def test_what_is_wrong_with_an_assignment_is_found() -> None:
    made = xla_assign.plan(hlo_data.module("cpu_mlp"))
    heap = next(a for a in made.allocations if a.kind == "heap")
    buffer = next(b for b in heap.held if heap.held[b] and b.nbytes > 1000)
    assert any("overlap" in v for v in wrong(moved(made, str(buffer), 0)))
    assert any("out-of-bounds" in v for v in wrong(moved(made, str(buffer), heap.size)))
    assert any("misaligned" in v for v in wrong(moved(made, str(buffer), heap.held[buffer] + 1)))
    less = replace(heap, held={b: o for b, o in heap.held.items() if b is not buffer})
    without = replace(made, allocations=tuple(less if a is heap else a for a in made.allocations))
    assert any("has no place" in v for v in wrong(without))


def test_L06_a_result_over_its_operand_does_not_interfere_and_a_copy_does() -> None:  # noqa: N802
    made = xla_assign.plan(hlo_data.module("cpu_control"))
    nodes = {n.name: n for n in made.live.schedule}
    sharing = Sharing(made.live.points, "cpu")
    assert sharing.allowed(nodes["ynn_fusion"], (), nodes["wrapped_add.1"], ())  # element by element
    assert not sharing.allowed(
        nodes["constant.37"], (), nodes["wrapped_clamp"], ()
    )  # a constant is not written
    assert not sharing.allowed(nodes["wrapped_iota"], (), nodes["sort.1"], (0,))  # the other part of a sort
    assert sharing.allowed(nodes["wrapped_iota"], (), nodes["sort.1"], (1,))


def test_L08_allocations_by_kind() -> None:  # noqa: N802
    made = xla_assign.plan(hlo_data.module("cpu_control"))
    kinds = {a.kind for a in made.allocations}
    assert kinds == {"parameter", "constant", "thread-local", "output", "heap", "tuple"}
    parameters = [a for a in made.allocations if a.kind == "parameter"]
    assert sorted(a.number for a in parameters) == [0, 1, 2, 3, 4]
    assert all(len(a.held) == 1 for a in parameters)  # none is donated: nothing else may lie there


@pytest.mark.parametrize("name", ["cpu_control", "cpu_mlp", "cpu_lstm"])
def test_reordered_is_legal_and_needs_no_more(name: str) -> None:
    module = hlo_data.module(name)
    other, _ = reordered(module)
    for before, after in zip(module.computations, other.computations, strict=True):
        assert sorted(i.name for i in before.instructions) == sorted(i.name for i in after.instructions)
        place = {i.name: k for k, i in enumerate(after.instructions)}
        for i in after.instructions:
            assert all(place[o] < place[i.name] for o in (*i.operands, *i.control_predecessors))
    assert wrong(xla_assign.plan(other)) == []
    assert parse(to_text(other)) == other


def test_an_order_that_helps_is_found() -> None:
    width = 8
    lines = [f"  %b{k} = f32[1024]{{0}} broadcast(%p), dimensions={{}}" for k in range(width)]
    lines += [f"  %r{k} = f32[] reduce(%b{k}, %p), dimensions={{0}}, to_apply=%add" for k in range(width)]
    scalars = ", ".join(f"%r{k}" for k in range(width))
    shapes = ", ".join(["f32[]"] * width)
    text = (
        "HloModule wide, is_scheduled=true\n%add {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
        "  ROOT %c = f32[] add(%a, %b)\n}\nENTRY %main {\n  %p = f32[] parameter(0)\n"
        + "\n".join(lines)
        + f"\n  ROOT %t = ({shapes}) tuple({scalars})\n}}\n"
    )
    module = parse(text)
    before = xla_assign.plan(module).total
    other, count = reordered(module)
    assert count and before - xla_assign.plan(other).total == (width - 1) * 4096
    assert live_ranges(other).end == live_ranges(module).end


def test_orders_are_those_of_the_ordinary_planners() -> None:
    module = hlo_data.module("cpu_cnn")
    assert xla_assign.plan(module).total == 53_758_544
    assert xla_assign.plan(reordered(module)[0]).total <= 22_546_024


def test_assign_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "module.txt"
    path.write_text(hlo_data.text("cpu_control"))
    assert main(["assign", str(path), "--planner", "xla", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["total"] == 6489523 and rows["temp"] == 3212408 and rows["planner"] == "xla"
    keys = {"total", "temp", "arguments", "output", "alias", "constants", "lower_bound", "heap_fragmentation"}
    assert keys < set(rows)
    written = tmp_path / "ordered.txt"
    assert main(["assign", str(path), "--order", "--work", "2000", "--write", str(written), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"] < 6489523
    assert read(written).scheduled


def test_explain_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "module.txt"
    path.write_text(hlo_data.text("cpu_control"))
    assert main(["explain", str(path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    first = rows["peak"]["residents"][0]
    assert first["bytes"] == 1048576 and first["shape"].startswith("f32[512,512]")
    assert any(r["source"].startswith("models.py:") and r["op_name"] for r in rows["peak"]["residents"])
    assert {a["kind"] for a in rows["advice"]} >= {"place", "donate"}
    assert main(["explain", str(path), "--top", "4"]) == 0
    said = capsys.readouterr().out
    assert "What would lower it" in said and "Peak: 7.13 MiB, with results and without parameters" in said


def test_explain_says_what_a_loop_stacks_up_and_on_which_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "module.txt"
    path.write_text(hlo_data.text("cpu_tx_scan"))
    assert main(["explain", str(path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["peak"]["residents"]
    stacked = [r for r in rows if r["name"].startswith("while.41")]
    assert [r["bytes"] for r in stacked[:6]] == [6 * 8 * 128 * 1024 * 4] * 6
    made = {r["op_name"].rpartition("/")[2] for r in stacked[:6]}
    assert made == {"dot_general", "tanh"} and {r["source"] for r in stacked[:6]} == {"models.py:39"}
    names = {i.op_name for i in read(path).entry.parameters}
    assert "p['layers']['w1']" in names  # as it is written, without backslashes


def test_an_output_without_bytes_is_no_place(tmp_path: Path) -> None:
    text = "HloModule none, is_scheduled=true\nENTRY e {\n  ROOT p = f32[0]{0} iota(), iota_dimension=0\n}\n"
    assert tight.plan(parse(text)).total == xla_assign.plan(parse(text)).lower_bound == 0


@pytest.mark.parametrize("verb", ["assign", "explain"])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda t: t[: len(t) // 2], "expected"),
        (lambda t: t.replace(", is_scheduled=true", "", 1), "is not scheduled"),
        (lambda t: t.replace("negate(", "negate(%nobody, ", 1), "%nobody"),
        (lambda t: t.replace("f32[512,512]", "f32[4294967296,4294967296]"), "63 bits"),
        (lambda t: t.replace("f32[512,512]", "f32[<=512,512]"), "dynamic dimensions"),
        (lambda t: "", "HloModule"),
    ],
    ids=["truncated", "unscheduled", "missing operand", "too large", "dynamic", "empty"],
)
def test_bad_modules_are_refused_with_their_place(
    verb: str, damage: object, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(damage)
    path = tmp_path / "module.txt"
    text = hlo_data.text("cpu_control").replace(" tanh(", " negate(")
    path.write_text(damage(text))
    assert main([verb, str(path)]) == 2
    error = capsys.readouterr().err
    assert says.strip("%") in error and "module.txt" in error and "Traceback" not in error


def test_an_unscheduled_module_is_scheduled_with_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "module.txt"
    path.write_text(hlo_data.text("cpu_mlp").replace(", is_scheduled=true", "", 1))
    assert main(["assign", str(path), "--order", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"] <= 32440208


def test_every_assigner_gives_a_legal_assignment_twice_the_same() -> None:
    module = hlo_data.module("cpu_lstm")
    for info in (planner("xla", "assign"), planner("tight", "assign")):
        options = QUICK if info.options is tight.Options else None
        made, again = info.plan(module, options), info.plan(module, options)
        assert wrong(made) == [] and made.total == again.total
        places = [[(str(b), o) for b, o in a.held.items()] for a in made.allocations]
        assert places == [[(str(b), o) for b, o in a.held.items()] for a in again.allocations]


def test_the_target_is_told_by_what_only_its_compiler_writes() -> None:
    for name in MODULES:
        assert target_of(hlo_data.module(name)) == name[:3]


EMPTY = """\
HloModule empty, is_scheduled=true

ENTRY %main (p: f32[8]) -> f32[2] {
  %p = f32[8]{0} parameter(0)
  %a = f32[8]{0} reverse(%p), dimensions={0}
  %none = s8[0]{0} constant({})
  %w = s8[0]{0} copy(%none)
  %b = f32[8]{0} reverse(%a), dimensions={0}
  %c = f32[8]{0} reverse(%b), dimensions={0}
  ROOT %d = f32[2]{0} slice(%c), slice={[0:2]}
}
"""


def test_a_buffer_without_bytes_is_no_event() -> None:
    live = xla_assign.plan(parse(EMPTY)).live
    sets = {b: g for g in live.sets for b in g.buffers}
    heap = {b: sets[b] for b in live.ranges if str(b) in "abcw"}
    stays = {
        str(m.buffer): (m.start, m.end)
        for g in replay(live, heap, Sharing(live.points, "cpu"))
        for m in g.members
    }
    assert stays["w"][0] == stays["w"][1]
    assert stays["b"][0] - stays["a"][0] == 1  # nothing passes between them for w


SORTED = """\
HloModule sorted, is_scheduled=true

%less (a: f32[], b: f32[], c: s32[], d: s32[]) -> pred[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  %c = s32[] parameter(2)
  %d = s32[] parameter(3)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

%inside (q: f32[64]) -> (f32[64], s32[64]) {
  %q = f32[64]{0} parameter(0)
  %i = s32[64]{0} iota(), iota_dimension=0
  ROOT %s = (f32[64]{0}, s32[64]{0}) sort(%q, %i), dimensions={0}, to_apply=%less
}

ENTRY %main (p: f32[64]) -> s32[64] {
  %p = f32[64]{0} parameter(0)
  %a = f32[64]{0} reverse(%p), dimensions={0}
  %f = (f32[64]{0}, s32[64]{0}) fusion(%a), kind=kCustom, calls=%inside
  ROOT %r = s32[64]{0} get-tuple-element(%f), index=1
}
"""


def test_a_fused_sort_on_a_gpu_puts_in_order_where_its_operand_lies() -> None:
    made = xla_assign.plan(parse(SORTED), xla_assign.Options("gpu"))
    nodes = {n.name: n for n in made.live.schedule}
    gpu, cpu = Sharing(made.live.points, "gpu"), Sharing(made.live.points, "cpu")
    assert gpu.allowed(nodes["a"], (), nodes["f"], (0,)) and not gpu.allowed(nodes["a"], (), nodes["f"], (1,))
    assert not cpu.allowed(nodes["a"], (), nodes["f"], (0,))
    where = {str(b): o for a in made.allocations for b, o in a.held.items()}
    assert where["a"] == where["f{0}"]
