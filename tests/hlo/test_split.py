"""Modules in slices: rules, regions, what is written and what is refused; and the same results in XLA."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tightship.cli import main
from tightship.errors import VerificationFailed
from tightship.hlo import Module, flattened, parse, read, to_text
from tightship.hlo.assign.order import scheduled
from tightship.hlo.module import inlined
from tightship.hlo.remat.peak import module_peak
from tightship.hlo.shape import Shape
from tightship.hlo.split import Region, choices, regions, written
from tightship.hlo.split_check import check_slices
from tightship.hlo.split_rules import CARRIED, SUM, WHOLE, Cut, cuts

HEAD = """HloModule head{schedule}

max {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT m = f32[] maximum(a, b)
}}

sum {{
  c = f32[] parameter(0)
  d = f32[] parameter(1)
  ROOT s = f32[] add(c, d)
}}

softmax {{
  logits = f32[64,96]{{1,0}} parameter(0)
  low = f32[] constant(-inf)
  most = f32[64]{{0}} reduce(logits, low), dimensions={{1}}, to_apply=max
  wide = f32[64,96]{{1,0}} broadcast(most), dimensions={{0}}
  less = f32[64,96]{{1,0}} subtract(logits, wide)
  e = f32[64,96]{{1,0}} exponential(less)
  zero = f32[] constant(0)
  total = f32[64]{{0}} reduce(e, zero), dimensions={{1}}, to_apply=sum
  under = f32[64,96]{{1,0}} broadcast(total), dimensions={{0}}
  p = f32[64,96]{{1,0}} divide(e, under)
  column = s32[64,96]{{1,0}} iota(), iota_dimension=0
  number = f32[64,96]{{1,0}} convert(column)
  q = f32[64,96]{{1,0}} multiply(p, number)
  ROOT both = (f32[64,96]{{1,0}}, f32[64]{{0}}) tuple(q, most)
}}

ENTRY main {{
  x = f32[64,16]{{1,0}} parameter(0)
  w = f32[16,96]{{1,0}} parameter(1)
  scores = f32[64,96]{{1,0}} dot(x, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  made = (f32[64,96]{{1,0}}, f32[64]{{0}}) call(scores), to_apply=softmax
  first = f32[64,96]{{1,0}} get-tuple-element(made), index=0
  second = f32[64]{{0}} get-tuple-element(made), index=1
  gw = f32[96,16]{{1,0}} dot(first, x), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
  gx = f32[64,16]{{1,0}} dot(first, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  ROOT out = (f32[96,16]{{1,0}}, f32[64,16]{{1,0}}, f32[64]{{0}}) tuple(gw, gx, second)
}}
"""


def head() -> Module:
    return inlined(parse(HEAD.format(schedule=", is_scheduled=true")))


def rows_region(module: Module, *, rounding: bool) -> Region:
    found = [r for r in regions(module, rounding=rounding) if r.units == 64]
    return max(found, key=lambda r: len(r.ops))


# --- rules ---


def cuts_of(line: str, *shapes: str, extra: str = "") -> set[Cut]:
    """The ways to cut the instruction of a line whose operands have these shapes."""
    given = "\n".join(f"  p{k} = {s} parameter({k})" for k, s in enumerate(shapes))
    reducer = "add {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT c = f32[] add(a, b)\n}\n\n"
    m = parse(
        f"HloModule m, is_scheduled=true\n\n{reducer}ENTRY e {{\n{given}\n{extra}  ROOT r = {line}\n}}\n"
    )
    root = m.entry.root
    return set(cuts(m, root, [m.entry.by_name[o].shape for o in root.operands]))


@pytest.mark.parametrize(
    ("line", "shapes", "expected"),
    [
        ("f32[4,6] add(p0, p1)", ("f32[4,6]", "f32[4,6]"), {Cut((0, 0), 0), Cut((1, 1), 1)}),
        ("f32[4,6] clamp(p0, p1, p0)", ("f32[]", "f32[4,6]"), {Cut((WHOLE, d, WHOLE), d) for d in (0, 1)}),
        ("f32[4,6] broadcast(p0), dimensions={1}", ("f32[6]",), {Cut((WHOLE,), 0), Cut((0,), 1)}),
        ("f32[24] reshape(p0)", ("f32[4,6]",), {Cut((0,), 0)}),
        ("f32[4,2,3] reshape(p0)", ("f32[4,6]",), {Cut((0,), 0), Cut((1,), 1)}),
        ("f32[6,4] transpose(p0), dimensions={1,0}", ("f32[4,6]",), {Cut((1,), 0), Cut((0,), 1)}),
        ("f32[4,2] slice(p0), slice={[0:4], [1:3]}", ("f32[4,6]",), {Cut((0,), 0)}),
        ("f32[4,12] concatenate(p0, p0), dimensions={1}", ("f32[4,6]",), {Cut((0, 0), 0)}),
        ("f32[4,9] pad(p0, p1), padding=0_0x1_2", ("f32[4,6]", "f32[]"), {Cut((0, WHOLE), 0)}),
        (
            "f32[4,5] dot(p0, p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}", ("f32[4,6]", "f32[6,5]"),
            {Cut((0, WHOLE), 0), Cut((WHOLE, 1), 1), Cut((1, 0), SUM, "add", True)},
        ),
        (
            "s32[4,5] dot(p0, p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}", ("s32[4,6]", "s32[6,5]"),
            {Cut((0, WHOLE), 0), Cut((WHOLE, 1), 1), Cut((1, 0), SUM, "add")},
        ),
        (
            "f32[8,6] gather(p0, p1), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0},"
            " index_vector_dim=1, slice_sizes={1,6}", ("f32[4,6]", "s32[8]"),
            {Cut((WHOLE, 0), 0), Cut((1, WHOLE), 1)},
        ),
        (
            "f32[4,6] scatter(p0, p1, p2), update_window_dims={1}, inserted_window_dims={0},"
            " scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=add",
            ("f32[4,6]", "s32[8]", "f32[8,6]"), {Cut((CARRIED, 0, 0), SUM), Cut((1, WHOLE, 1), 1)},
        ),
        ("f32[4,6] custom-call(p0), custom_call_target=\"f\"", ("f32[4,6]",), set()),
        ("f32[4,6] add(p0, p0), sharding={replicated}", ("f32[4,6]",), set()),
    ],
)  # fmt: skip
def test_along_what_an_instruction_may_be_cut(line: str, shapes: tuple[str, ...], expected: set[Cut]) -> None:
    assert cuts_of(line, *shapes) == expected


@pytest.mark.parametrize(("start", "sums"), [("0", True), ("1", False)])
def test_a_sum_is_cut_where_it_begins_with_nothing(start: str, sums: bool) -> None:
    extra = f"  start = f32[] constant({start})\n"
    found = cuts_of("f32[4] reduce(p0, start), dimensions={1}, to_apply=add", "f32[4,6]", extra=extra)
    assert found == {Cut((0, WHOLE), 0)} | ({Cut((1, WHOLE), SUM, "add", True)} if sums else set())


# --- regions, and what is written ---


def test_calls_are_inlined_without_their_tuples() -> None:
    entry = head().entry
    assert not any(i.opcode in ("call", "get-tuple-element") for i in entry.instructions)
    assert entry.by_name[entry.root.operands[2]].opcode == "reduce"


def test_exact_slices_leave_out_sums_over_what_is_cut() -> None:
    module = head()
    exact, rounding = (rows_region(module, rounding=r) for r in (False, True))
    assert "gw" not in exact.ops and not exact.rounds
    assert rounding.ops["gw"].result == SUM and rounding.rounds


def test_the_peak_that_is_counted_goes_down_and_the_text_is_read_again() -> None:
    module = head()
    *_, last = choices(module, 0, rounding=True)
    assert last.peak * 2 < module_peak(module)
    again = parse(to_text(last.module))
    assert module_peak(again) == last.peak
    check_slices(module, again)


def test_fewer_slices_where_the_limit_allows_it() -> None:
    module = head()
    before = module_peak(module)
    few, many = ([*choices(module, before * share // 100, rounding=True)][-1].most for share in (60, 25))
    assert few < many


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("constant(16)", "constant(8)"),  # parts overlap
        ("constant(4)", "constant(3)"),  # the last slice does not run
        ("constant(1)", "constant(2)"),  # every second runs
    ],
)
def test_a_loop_that_does_not_write_each_element_once_is_refused(old: str, new: str) -> None:
    module = head()
    text = to_text(written(module, rows_region(module, rounding=True), 4))
    assert old in text
    with pytest.raises(VerificationFailed, match="S1"):
        check_slices(module, parse(text.replace(old, new)))


def test_a_result_that_is_read_half_written_is_refused() -> None:
    module = head()
    made = written(module, rows_region(module, rounding=False), 4)
    name = next(c.name for c in made.computations if c.name.endswith(".body"))
    body = made.by_name[name]
    update = next(i for i in body.instructions if i.opcode == "dynamic-update-slice")
    spy = replace(update, name="spy", opcode="negate", operands=update.operands[:1], root=False)
    other = replace(body, instructions=(*body.instructions[:-1], spy, body.instructions[-1]))
    rows = tuple(other if c.name == name else c for c in made.computations)
    with pytest.raises(VerificationFailed, match="before all slices are written"):
        check_slices(module, replace(made, computations=rows))


def test_a_part_of_an_iota_counts_on() -> None:
    module = head()
    made = written(module, rows_region(module, rounding=True), 4)
    body = next(c for c in made.computations if c.name.endswith(".body"))
    (part,) = (i for i in body.instructions if i.opcode == "iota")
    assert part.shape == Shape("s32", (16, 96), "1,0")
    assert any(i.opcode == "add" and part.name in i.operands for i in body.instructions)


# --- the command line, and XLA ---


def run(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict]:  # type: ignore[type-arg]
    status = main([*args, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("mode", "bits"), [("split", True), ("split-rounding", False)])
def test_what_is_written_runs_in_xla_and_needs_less(
    mode: str, bits: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jax = pytest.importorskip("jax")
    from tightship.integrations.hlo_split import Xla

    given, made, plan = tmp_path / "head.hlo", tmp_path / "made.hlo", tmp_path / "plan.json"
    soft = jax.jit(lambda x: jax.nn.softmax(x * 2 + 1).max(-1))
    rows_alone = soft.lower(jax.ShapeDtypeStruct((512, 2048), jax.numpy.float32)).as_text("hlo")
    given.write_text(rows_alone if bits else HEAD.format(schedule=""))
    args = ["plan", str(given), "--budget", "40%", "--allow", mode, "--write", str(made), "-o", str(plan)]
    status, rows = run(args, capsys)
    assert status == 0 and rows["met"] and rows["slices"]
    assert any(region["rounds"] for region in rows["slices"]) is not bits
    assert rows["runtime"]["temp_after"] < rows["runtime"]["temp_before"]
    assert main(["verify", str(plan)]) == 0
    capsys.readouterr()
    assert run(["plan", str(made)], capsys)[1]["peak_before"] == rows["peak_after"]
    one, other = Xla(read(given)).outputs, Xla(read(made)).outputs
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
        assert not bits or a.tobytes() == b.tobytes()


def test_a_limit_that_is_missed_offers_slices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "head.hlo"
    path.write_text(to_text(head()))
    status, rows = run(["plan", str(path), "--budget", "40%"], capsys)
    assert status == 1 and any("splitting (allow=recompute,split-rounding)" in n for n in rows["notes"])


def test_a_limit_that_slices_miss_says_what_they_reach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "head.hlo"
    path.write_text(to_text(head()))
    status, rows = run(["plan", str(path), "--budget", "1KiB", "--allow", "split-rounding"], capsys)
    assert status == 1 and rows["slices"] and rows["peak_after"] < rows["peak_before"]
    assert any("was the least that was reached" in note for note in rows["notes"])


def test_fusions_are_said_to_be_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fused.hlo"
    path.write_text("""HloModule fused, is_scheduled=true

f {
  a = f32[64,64]{1,0} parameter(0)
  ROOT b = f32[64,64]{1,0} tanh(a)
}

ENTRY main {
  x = f32[64,64]{1,0} parameter(0)
  y = f32[64,64]{1,0} fusion(x), kind=kLoop, calls=f
  ROOT z = f32[64,64]{1,0} fusion(y), kind=kLoop, calls=f
}
""")
    status, rows = run(["plan", str(path), "--budget", "50%", "--allow", "split-rounding"], capsys)
    assert status == 1
    assert any("fusions" in note and "as_text" in note for note in rows["notes"])


def test_a_frontier_goes_on_below_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "head.hlo"
    path.write_text(to_text(head()))
    least = {}
    for allow in ("recompute", "recompute,split-rounding"):
        args = ["frontier", str(path), "--points", "2", "--allow", allow, "--no-peers", "--seconds", "2"]
        least[allow] = run(args, capsys)[1]["points"][0]["peak_after"]
    assert least["recompute,split-rounding"] * 2 < least["recompute"]


def test_a_training_step_with_donated_parameters_computes_the_same() -> None:
    jax = pytest.importorskip("jax")
    from support.hlo_fresh import program
    from tightship.integrations.hlo_split import Xla, prepared

    step, given = program("unrolled")
    module = prepared(parse(jax.jit(step, donate_argnums=(0,)).lower(*given).as_text("hlo")))
    choice = next(choices(module, module_peak(module) // 2, rounding=True))
    assert choice.module.aliases == module.aliases != {}
    one, other = Xla(module), Xla(choice.module)
    assert other.temporaries * 2 < one.temporaries
    for a, b in zip(one.outputs, other.outputs, strict=True):
        assert np.abs(a - b).max() <= 1e-4 * np.abs(a).max()


def test_what_a_loop_makes_is_said_to_be_out_of_reach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jax = pytest.importorskip("jax")
    from support.hlo_fresh import program

    path = tmp_path / "scan.hlo"
    step, given = program("scan")
    module = scheduled(flattened(parse(jax.jit(step).lower(*given).as_text("hlo"))))
    path.write_text(to_text(module))
    args = ["plan", str(path), "--budget", "30%", "--allow", "split-rounding", "--planner", "xla"]
    status, rows = run(args, capsys)
    assert status == 1 and any("slices are of the entry computation alone" in note for note in rows["notes"])
