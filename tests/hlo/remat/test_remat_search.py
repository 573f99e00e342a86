"""Our own rematerialization of HLO modules: limits that XLA meets at no more work, limits it misses, and proofs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from support import hlo_data
from support.hlo_small import CHAIN, LOOP, K, module, same_results
from tightship.baselines import xla_assign as assigned
from tightship.baselines import xla_remat
from tightship.cli import main
from tightship.errors import BadInput
from tightship.hlo import Module, parse, to_text
from tightship.hlo.remat import search
from tightship.hlo.remat.as_plan import as_plan
from tightship.hlo.remat.cost import work_of
from tightship.hlo.remat.lower import Lowering, bound
from tightship.hlo.remat.peak import module_peak, peaks, sequential_order
from tightship.verify import verify

MIB = 2**20
TIED = """ENTRY %main (p: f32[512,512]) -> f32[512,512] {
  %p = f32[512,512]{1,0} parameter(0)
  %a = f32[512,512]{1,0} tanh(%p)
  %b = f32[512,512]{1,0} cosine(%a)
  %c = f32[512,512]{1,0} sine(%b)
  %wide = f32[512,512]{1,0} exponential(%c)
  %d = f32[512,512]{1,0} multiply(%wide, %c)
  %e = f32[1,512]{1,0} slice(%d), slice={[0:1], [0:512]}
  %flat = f32[512]{0} bitcast(%e)
  %f = f32[512,512]{1,0} broadcast(%flat), dimensions={1}
  ROOT %out = f32[512,512]{1,0} add(%f, %a), control-predecessors={%a}
}
"""
QUICK = search.Options(seconds=60.0, work=6_000_000)
LIMITS = {"gpu_tx_unroll_250000000": 184.20, "gpu_cnn_30000000": 21.45, "gpu_mlp_35000000": 26.32}


def repeated_flops(m: Module, made: xla_remat.Result) -> int:
    work, names = work_of(m), sequential_order(m)
    return made.flops(work, names) - sum(sum(work.flops[name].values()) for name in names)


def test_where_xla_meets_the_limit_so_do_we_at_no_more_work() -> None:
    m = hlo_data.module("gpu_tx_unroll_250000000", hlo_data.BEFORE)
    limit = int(184.20 * MIB)
    theirs, ours = xla_remat.plan(m, limit), search.plan(m, limit, QUICK)
    assert theirs.met
    assert ours.met
    assert repeated_flops(m, ours) <= repeated_flops(m, theirs)


def test_meets_a_limit_that_xla_misses() -> None:
    m = hlo_data.module("gpu_cnn_30000000", hlo_data.BEFORE)
    made = search.plan(m, int(21.45 * MIB), QUICK)
    assert made.met
    assert module_peak(made.module) == made.peak_after <= 21.45 * MIB
    assert not xla_remat.plan(m, int(21.45 * MIB)).met


def test_proves_that_a_limit_cannot_be_met() -> None:
    m = hlo_data.module("gpu_mlp_35000000", hlo_data.BEFORE)
    limit = int(26.32 * MIB)
    made = search.plan(m, limit, QUICK)
    assert bound(m) > limit
    assert not made.met
    assert made.peak_after <= 1.0001 * bound(m)


@pytest.mark.parametrize("name", LIMITS)
def test_the_plan_is_what_the_verifier_accepts_and_counts_what_the_module_counts(name: str) -> None:
    m = hlo_data.module(name, hlo_data.BEFORE)
    for planner, options in ((xla_remat, None), (search, QUICK)):
        made = planner.plan(m, int(1.05 * LIMITS[name] * MIB), options)  # type: ignore[attr-defined]
        graph, plan = as_plan(m, made, "x")
        assert verify(graph, plan) == []
        assert plan.peak_before <= made.peak_before
        if planner is search:
            tables = sum(8 * len(i.shape.parts) for i in made.module.entry.instructions)
            assert made.peak_after - tables <= plan.peak + sum(
                p.nbytes for _, p in m.entry.root.shape.positions
            )


def test_moves_what_was_made_too_early_at_no_cost() -> None:
    m = module(CHAIN)
    made = search.plan(m, 2 * K + 4, QUICK)
    assert (made.met, made.recomputed) == (True, ())
    assert same_results(m, made.module)


def test_plans_the_body_of_a_loop_for_what_is_left_at_its_call() -> None:
    m = module(LOOP)
    limit = module_peak(m) - K + 64
    made = search.plan(m, limit, QUICK)
    assert made.met
    assert [i.name for i in made.module.by_name["body"].instructions] != [
        i.name for i in m.by_name["body"].instructions
    ]
    names = [sorted(i.name for i in x.entry.instructions) for x in (made.module, m)]
    assert names[0] == names[1]  # in whatever order: nothing of the entry runs twice
    assert same_results(m, made.module)


def test_what_reads_what_a_loop_passes_on_runs_after_it() -> None:
    """As a step of a decoder has it: the position that it begins with is carried, and read after the loop."""
    carried = ("(s32[], f32[512,512])", "(s32[], f32[512,512], s32[])")
    arrays = ("(s32[], f32[512,512]{1,0})", "(s32[], f32[512,512]{1,0}, s32[])")
    text = LOOP.replace(*carried).replace(*arrays)
    text = text.replace("tuple(%m, %y)", "tuple(%m, %y, %k)").replace(
        "tuple(%zero, %a)", "tuple(%zero, %a, %n)"
    )
    text = text.replace("  %one = s32[]", "  %k = s32[] get-tuple-element(%t), index=2\n  %one = s32[]")
    text = text.replace("(p: f32[512,512]) -> f32[]", "(p: f32[512,512], n: s32[]) -> (f32[], s32[])")
    text = text.replace("  %zero = s32", "  %n = s32[] parameter(1)\n  %zero = s32").replace(
        "  ROOT %s =", "  %s ="
    )
    end = [
        "  %k = s32[] get-tuple-element(%loop), index=2", "  %last = s32[] add(%k, %k)",
        "  ROOT %both = (f32[], s32[]) tuple(%s, %last)",
    ]  # fmt: skip
    m = module(text.rstrip().removesuffix("}") + "\n".join(end) + "\n}\n")
    at = Lowering(m, m.entry.name, peaks(m), work_of(m))
    number = {i.name: k for k, i in enumerate(at.ops)}
    assert at.graph.ops[number["last"]].control == (number["loop"],)
    made = search.plan(m, module_peak(m) - K + 64, QUICK)
    names = [i.name for i in made.module.entry.instructions]
    assert names.index("loop") < names.index("last")
    assert same_results(m, made.module)


def test_a_module_within_its_limit_stays_as_it_is() -> None:
    m = module(LOOP)
    made = search.plan(m, module_peak(m), QUICK)
    assert (made.module, made.recomputed, made.added) == (m, (), 0)


def test_R11_what_others_wait_for_may_run_again_before_them() -> None:  # noqa: N802
    m = module(TIED)
    made = search.plan(m, module_peak(m) - K + 64, QUICK)
    assert (made.met, made.recomputed) == (True, ("a",))
    assert made.module.entry.by_name["out"].control_predecessors == ("a", "a.remat")
    assert same_results(m, made.module)
    assert parse(to_text(made.module)) == made.module


def test_R11_but_not_after_them() -> None:  # noqa: N802
    tied = TIED.replace("%wide = f32[512,512]{1,0} exponential(%c)", "%wide = f32[512,512]{1,0} exponential(%c), "
                        "control-predecessors={%a}").replace(", control-predecessors={%a}\n}", "\n}")  # fmt: skip
    made = search.plan(module(tied), module_peak(module(tied)) - K + 64, QUICK)
    assert made.recomputed == ()
    assert not made.met


def test_another_order_is_part_of_the_search() -> None:
    rows = [
        f"  %x{k} = f32[512,512]{{1,0}} {op}(%p)" for k, op in enumerate(("tanh", "sine", "cosine", "negate"))
    ]
    rows += [f"  %r{k} = f32[512]{{0}} slice(%y{k}), slice={{[0:1], [0:512]}}" for k in range(4)]
    made_of = [f"  %y{k} = f32[512,512]{{1,0}} add(%x{k}, %x{k})" for k in range(4)]
    sums = ["  %s0 = f32[512]{0} add(%r0, %r1)", "  %s1 = f32[512]{0} add(%r2, %r3)",
            "  ROOT %out = f32[512]{0} add(%s0, %s1)"]  # fmt: skip
    body = "\n".join(["  %p = f32[512,512]{1,0} parameter(0)", *rows[:4], *made_of, *rows[4:], *sums])
    m = module(f"ENTRY %main (p: f32[512,512]) -> f32[512] {{\n{body}\n}}\n")
    assert module_peak(m) >= 5 * K
    made = search.plan(m, 2 * K + 10_000, QUICK)
    assert (made.met, made.recomputed, made.added) == (True, (), 0)
    assert same_results(m, made.module)
    _, plan = as_plan(m, made, "x")
    assert plan.moved > 0


def test_control_dependent_instructions_run_once() -> None:
    tied = CHAIN.replace("exponential(%p)", "exponential(%p), control-predecessors={%a}")
    made = search.plan(module(tied), 2 * K + 4, QUICK)
    names = [i.name for i in made.module.entry.instructions]
    assert names.index("a") < names.index("b")
    assert not made.met


def test_one_seed_and_work_limit_give_one_answer() -> None:
    m = hlo_data.module("gpu_cnn_30000000", hlo_data.BEFORE)
    first, second = (search.plan(m, int(24 * MIB), replace(QUICK, seed=3)) for _ in range(2))
    assert first.module == second.module


class TestCommandLine:
    @pytest.fixture()
    def path(self, tmp_path: Path) -> Path:
        file = tmp_path / "module.txt"
        file.write_text(to_text(module(LOOP)))
        return file

    def test_writes_plan_and_module(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        limit = module_peak(module(LOOP)) - K + 64
        out, plan = path.with_name("out.txt"), path.with_name("plan.json")
        given = ["plan", str(path), "--budget", str(limit), "--write", str(out), "-o", str(plan)]
        given += ["--work", "2000000", "--json"]
        assert main(given) == 0
        rows = json.loads(capsys.readouterr().out)
        assert rows["peak_after"] == module_peak(parse(out.read_text())) <= limit == rows["budget"]
        assert (rows["met"], rows["planner"], rows["recomputed"]) == (True, "search", 0)
        capsys.readouterr()
        assert main(["verify", str(plan)]) == 0
        made = assigned.plan(parse(out.read_text()))
        assert rows["arena"] == made.total - made.arguments
        assert rows["computations"] == 3

    def test_the_plan_proves_what_loops_run(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        limit = module_peak(module(LOOP)) - K + 64
        plan = path.with_name("plan.json")
        assert main(["plan", str(path), "--budget", str(limit), "-o", str(plan), "--work", "2000000"]) == 0
        document = json.loads(plan.read_text())
        names = [row["plan"]["graph"]["name"] for row in document["inner"]]
        assert names == ["test", "body"]
        document["inner"][1]["plan"]["steps"] = {"kind": [], "op": []}
        plan.write_text(json.dumps(document))
        assert main(["verify", str(plan)]) == 1
        assert "inside loop" in capsys.readouterr().out

    def test_a_limit_that_is_missed_is_exit_1(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", str(path), "--budget", "1KiB", "--planner", "xla"]) == 1
        said = capsys.readouterr().out
        assert "ABOVE the limit" in said
        assert "no plan meets the limit" in said
        assert "1.00 MiB  a (" in said  # who makes up the peak
        assert main(["plan", str(path), "--budget", "1KiB", "--planner", "xla", "--json"]) == 1
        rows = json.loads(capsys.readouterr().out)
        assert rows["lower_bound"] > 1024
        assert rows["top"][0]["bytes"] >= K

    @pytest.mark.parametrize("given", [["--planner", "nobody"], ["--order", "sink"], ["--budget", "x"]])
    def test_bad_options_are_exit_2(self, path: Path, given: list[str]) -> None:
        assert main(["plan", str(path), *given]) == 2

    def test_a_module_without_a_schedule_is_exit_2(
        self, path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path.write_text(path.read_text().replace(", is_scheduled=true", ""))
        assert main(["plan", str(path), "--budget", "1MiB"]) == 2
        assert "assign --order --write" in capsys.readouterr().err


def test_needs_a_schedule() -> None:
    with pytest.raises(BadInput, match="schedule"):
        search.plan(module(CHAIN, "HloModule m\n\n"), 1)


@pytest.mark.parametrize("planner", [xla_remat, search], ids=["xla", "search"])
def test_what_is_called_stands_before_what_calls_it(planner: object) -> None:
    m = hlo_data.module("cpu_tx_scan")
    options = QUICK if planner is search else None
    made = planner.plan(m, int(0.97 * module_peak(m)), options).module  # type: ignore[attr-defined]
    if planner is xla_remat:
        assert len(made.computations) > len(m.computations)  # clones bring copies along
    known: set[str] = set()
    for c in made.computations:
        assert {name for i in c.instructions for name in i.called} <= known
        known.add(c.name)


def test_is_never_above_what_xla_leaves() -> None:
    m = hlo_data.module("cpu_lstm")
    limit = int(0.5 * module_peak(m))
    assert search.plan(m, limit, QUICK).peak_after <= 1.0001 * module_peak(xla_remat.plan(m, limit).module)
