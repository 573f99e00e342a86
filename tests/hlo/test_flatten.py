"""Computations run from several places get copies, as XLA gives them before it schedules."""

import json
from pathlib import Path

import pytest

from support import hlo_data
from support.hlo_small import COUNTING
from tightship.baselines import xla_assign
from tightship.cli import main
from tightship.errors import Unsupported
from tightship.hlo import flattened, parse, to_text
from tightship.hlo.assign import tight
from tightship.hlo.assign.order import reordered
from tightship.hlo.dataflow import points_to
from tightship.hlo.module import CLONE_LIMIT

AGAIN = COUNTING.replace(
    "  ROOT %out",
    "  %z2 = s32[] copy(%zero)\n  %b2 = f32[8]{0} copy(%b)\n  %init2 = (s32[], f32[8]{0}) tuple(%z2, %b2)\n"
    "  %again = (s32[], f32[8]{0}) while(%init2), condition=%cond, body=%body\n  ROOT %out",
)
"""The same loop, twice."""

CALLS = """\
HloModule calls, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%sum (x: f32[8]) -> f32[] {
  %x = f32[8]{0} parameter(0)
  %zero = f32[] constant(0)
  %n = f32[8]{0} negate(%x), control-predecessors={%zero}
  ROOT %r = f32[] reduce(%n, %zero), dimensions={0}, to_apply=%add
}

%both (y: f32[8]) -> f32[] {
  %y = f32[8]{0} parameter(0)
  %first = f32[] call(%y), to_apply=%sum
  %second = f32[] call(%y), to_apply=%sum
  ROOT %s = f32[] add(%first, %second)
}

ENTRY %main (p: pred[], v: f32[8]) -> f32[] {
  %p = pred[] parameter(0)
  %v = f32[8]{0} parameter(1)
  ROOT %if = f32[] conditional(%p, %v, %v), branch_computations={%both, %both}
}
"""


def test_what_nothing_shares_stays_the_very_same() -> None:
    for name in hlo_data.CPU + hlo_data.GPU:
        module = hlo_data.module(name)
        assert flattened(module) is module


def test_each_call_has_a_copy_and_what_that_runs_too() -> None:
    module = flattened(parse(CALLS))
    names = [c.name for c in module.computations]
    assert names == ["add", "sum", "sum.clone", "sum.clone.1", "sum.clone.2", "both", "both.clone", "main"]
    assert module.by_name["main"].root.called == ("both", "both.clone")
    callers = {n: i.name for i in module.instructions for n in i.called if n.startswith("sum")}
    assert len(callers) == 4 and {i.called for i in module.instructions if i.opcode == "reduce"} == {("add",)}
    everyone = [i.name for i in module.instructions]
    assert len(everyone) == len(set(everyone))
    copy = module.by_name["sum.clone"]
    assert copy.by_name["n.clone"].control_predecessors == ("zero.clone",)
    assert module.notes == (
        "computations run from several places are copied for each of them: sum 4 times, both 2 times",
    )
    assert parse(to_text(module)) == module and flattened(module) is module


def test_what_a_reduction_applies_and_a_call_runs_is_kept_for_the_reduction() -> None:
    text = CALLS.replace("%s = f32[] add(%first, %second)", "%s = f32[] call(%first, %second), to_apply=%add")
    module = flattened(parse(text))
    calls = {i.name: i.called for i in module.instructions if i.opcode == "call"}
    assert calls["s"] == ("add.clone",) and calls["s.clone"] == ("add.clone.1",)
    assert {i.called for i in module.instructions if i.opcode == "reduce"} == {("add",)}
    assert [c.name for c in points_to(module).embedded] == ["add"]


def test_two_runs_of_a_loop_need_what_two_loops_need() -> None:
    ours = xla_assign.plan(parse(AGAIN))
    start, end = COUNTING.index("%body"), COUNTING.index("ENTRY")
    second = COUNTING[start:end].replace("%body", "%body2").replace("%cond", "%cond2")
    by_hand = parse((second + AGAIN[start:]).join([AGAIN[:start], ""]).replace(
        "while(%init2), condition=%cond, body=%body", "while(%init2), condition=%cond2, body=%body2"
    ))  # fmt: skip
    assert flattened(by_hand) is by_hand
    theirs = xla_assign.plan(by_hand)
    assert (ours.total, ours.temp) == (theirs.total, theirs.temp)
    assert tight.plan(parse(AGAIN)).total <= ours.total
    once = xla_assign.plan(parse(COUNTING))
    assert ours.live.end == once.live.end + 4 + 10  # four more in the entry, and ten that the loop runs


def test_a_computation_run_from_two_places_has_no_points_to_sets_of_its_own() -> None:
    with pytest.raises(Unsupported, match="run from both 'loop' and 'again'"):
        points_to(parse(AGAIN))


def test_calls_that_multiply_without_end_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "HloModule m, is_scheduled=true\nc0 {\n p = f32[] parameter(0)\n ROOT r = f32[] negate(p)\n}\n"
    for k in range(1, 60):
        text += (
            f"c{k} {{\n p = f32[] parameter(0)\n a = f32[] call(p), to_apply=c{k - 1}\n"
            f" ROOT b = f32[] call(a), to_apply=c{k - 1}\n}}\n"
        )
    text += "ENTRY e {\n p = f32[] parameter(0)\n ROOT r = f32[] call(p), to_apply=c59\n}\n"
    with pytest.raises(Unsupported, match=f"more than {CLONE_LIMIT} instructions"):
        flattened(parse(text))
    path = tmp_path / "calls.txt"
    path.write_text(text)
    for verb in ("plan", "explain", "assign"):  # each ended, in time
        assert main([verb, str(path)]) == 2
        assert "instructions is not supported" in capsys.readouterr().err


def test_assign_says_that_it_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "calls.txt"
    path.write_text(CALLS)
    for planner in ("xla", "tight"):
        assert main(["assign", str(path), "--planner", planner, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert rows["notes"] and "copied" in rows["notes"][0]
    path.write_text(CALLS.replace(", is_scheduled=true", ""))
    assert main(["assign", str(path), "--order", "--json"]) == 0


def test_what_jax_hands_to_the_compiler_is_scheduled_and_jaxlib_agrees() -> None:
    jax = pytest.importorskip("jax")
    reader = pytest.importorskip("jaxlib._hlo")
    step = jax.jit(lambda a: jax.numpy.tanh(a @ a))
    program = jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda _, c: step(step(c)) + step(x), x))
    text = program.lower(jax.ShapeDtypeStruct((9, 9), jax.numpy.float32)).as_text("hlo")
    module = parse(text)
    assert not module.scheduled and flattened(module) is not module
    other, _ = reordered(module)
    reader.hlo_module_from_text(to_text(other)).schedule().verify()
    assert xla_assign.plan(other).total > 0
