"""Arrays that are packed or copied to the host and back, by XLA's way and by our search, and written as HLO."""

import json
from pathlib import Path

import pytest

from support import hlo_data
from support.hlo_small import K, module, same_results
from support.xla_trackers import faults
from tightship.baselines import xla_remat
from tightship.baselines.xla_body import Body, Tracker
from tightship.cli import main
from tightship.errors import BadInput
from tightship.hlo import Module, parse, to_text
from tightship.hlo.module import Names
from tightship.hlo.remat import search
from tightship.hlo.remat.as_plan import as_plan
from tightship.hlo.remat.instructions import on_host, packed_shape
from tightship.hlo.remat.lower import bound, bounds
from tightship.hlo.remat.peak import module_peak
from tightship.simulate import replay
from tightship.verify import verify

ALL = "recompute,compress,offload"
QUICK = {"seconds": 60.0, "work": 2_000_000}
EITHER = [xla_remat, search]
NAMES = ["xla", "search"]


def kept(dots: int = 24) -> Module:
    """%a is used at once and at the end; in between, products of matrices, and something large in their middle."""
    shape = "f32[512,512]{1,0}"
    dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    rows = [f"  %x{k + 1} = {shape} dot(%x{k}, %x{k}), {dims}" for k in range(dots)]
    rows[dots // 2] = (
        f"  %wide = f32[1024,512]{{1,0}} concatenate(%x{dots // 2}, %x{dots // 2}), dimensions={{0}}\n"
        f"  %x{dots // 2 + 1} = {shape} slice(%wide), slice={{[0:512], [0:512]}}"
    )
    body = "\n".join(rows)
    return module(f"""ENTRY %main (p: f32[512,512]) -> f32[512,512] {{
  %p = {shape} parameter(0)
  %a = {shape} tanh(%p)
  %x0 = {shape} cosine(%a)
{body}
  ROOT %out = {shape} add(%x{dots}, %a)
}}
""")


def masked(n: int = 512) -> Module:
    """Whether something is positive, a byte each, is kept beside a chain of work."""
    shape = f"f32[{n},511]{{1,0}}"
    mask = f"pred[{n},511]{{1,0}}"
    return module(f"""ENTRY %main (p: f32[{n},511]) -> f32[{n},511] {{
  %p = {shape} parameter(0)
  %sine = {shape} sine(%p)
  %small = {shape} multiply(%sine, %p)
  %mask = {mask} compare(%small, %p), direction=GE
  %first = {shape} select(%mask, %p, %small)
  %a = {shape} cosine(%first)
  %b = {shape} exponential(%a)
  %c = {shape} multiply(%b, %a)
  %d = {shape} negate(%c)
  ROOT %out = {shape} select(%mask, %d, %p)
}}
""")


def check(m: Module, made: xla_remat.Result, allow: str = ALL) -> None:
    """What every rewritten module has to be."""
    assert made.peak_after == module_peak(made.module)
    assert same_results(m, made.module)
    assert parse(to_text(made.module)) == made.module
    graph, plan = as_plan(m, made, "x", bounds(m, tuple(allow.split(","))))
    assert verify(graph, plan) == []
    assert plan.count("offload") == made.count("offload")
    assert plan.count("fetch") == made.count("fetch")
    assert plan.count("compress") == made.count("compress")


@pytest.mark.parametrize("planner", EITHER, ids=NAMES)
def test_R13_copies_out_what_work_hides(planner) -> None:  # type: ignore[no-untyped-def]  # noqa: N802
    m = kept()
    limit = module_peak(m) - K + 100
    options = {"allow": "offload"} | (QUICK if planner is search else {})
    made = planner.plan(m, limit, planner.Options(**options))
    assert (made.met, made.recomputed, made.count("offload")) == (True, (), 1)
    check(m, made, "offload")
    opcodes = [i.opcode for i in made.module.entry.instructions]
    assert opcodes.count("copy-start") == opcodes.count("copy-done") == 2
    _, plan = as_plan(m, made, "x", bounds(m, ("offload",)))
    assert plan.time == pytest.approx(plan.time_before, rel=1e-2)  # hidden
    assert plan.host == K


def test_R13_xla_copies_nothing_out_where_work_does_not_hide_it() -> None:  # noqa: N802
    m = kept(dots=3)
    made = xla_remat.plan(m, module_peak(m) - K + 100, xla_remat.Options(allow="offload"))
    assert (made.met, made.transfers, made.module) == (False, {}, m)


@pytest.mark.parametrize("planner", EITHER, ids=NAMES)
def test_R12_packs_a_bit_for_each_element_of_pred(planner) -> None:  # type: ignore[no-untyped-def]  # noqa: N802
    m = masked()
    limit = module_peak(m) - 200_000
    options = {"allow": "compress"} | (QUICK if planner is search else {})
    made = planner.plan(m, limit, planner.Options(**options))
    assert (made.met, made.recomputed, made.count("compress")) == (True, (), 1)
    assert made.peak_before - made.peak_after >= 512 * 511 - 512 * 511 // 8 - 64
    check(m, made, "compress")


@pytest.mark.parametrize("elements", [3, 8, 9, 1000])
def test_R12_packing_gives_back_the_same_bits(elements: int) -> None:  # noqa: N802
    m = masked(elements)
    made = search.plan(m, 1, search.Options(allow="compress", **QUICK))  # type: ignore[arg-type]
    assert made.count("compress") == made.count("decompress") == 1
    assert same_results(m, made.module)


def test_R13_the_cheaper_of_the_ways_allowed_wins() -> None:  # noqa: N802
    m = masked()
    limit = module_peak(m) - 100_000
    made = xla_remat.plan(m, limit, xla_remat.Options(allow="recompute,compress"))
    assert made.met
    assert made.count("compress") == 1  # making it again would keep what it is made of alive
    check(m, made, "recompute,compress")


def test_R16_the_books_are_right_with_copies() -> None:  # noqa: N802
    m = kept()
    walk = xla_remat._Walk(xla_remat._Run(m, xla_remat.Options(allow=ALL)), m.entry, K + 100)
    insert, found = walk.transfers.insert, []

    def checked(way: str, node: object) -> int:
        added = insert(way, node)  # type: ignore[arg-type]
        found.append(faults(walk.tracker))
        return added

    walk.transfers.insert = checked  # type: ignore[method-assign,assignment]
    walk.run()
    assert found
    assert not any(found)


def test_what_is_on_the_host_takes_nothing_on_the_device() -> None:
    text = """ENTRY %main (p: f32[512,512]) -> f32[512,512] {
  %p = f32[512,512]{1,0} parameter(0)
  %a = f32[512,512]{1,0} tanh(%p)
  %start = (f32[512,512]{1,0:S(5)}, f32[512,512]{1,0}, u32[]) copy-start(%a)
  %far = f32[512,512]{1,0:S(5)} copy-done(%start)
  %back = (f32[512,512]{1,0}, f32[512,512]{1,0:S(5)}, u32[]) copy-start(%far)
  %near = f32[512,512]{1,0} copy-done(%back)
  ROOT %b = f32[512,512]{1,0} negate(%near)
}
"""
    m = module(text)
    body = Body(m.entry, Names(()))
    tracker, after = Tracker(m, body), {}
    for node in body:
        tracker.begin(node)
        tracker.end()
        after[node.name] = tracker.use
    assert (after["start"], after["far"]) == (K + 24 + 4, 0)
    assert module_peak(m) == 2 * K + 24 + 4


def test_shapes_of_other_forms() -> None:
    shape = module(masked_text := to_text(masked()).partition("\n\n")[2]).entry.by_name["mask"].shape
    assert masked_text
    assert str(on_host(shape)) == "pred[512,511]{1,0:S(5)}"
    assert on_host(shape).memory_space == 5
    assert str(packed_shape(shape, "bits")) == "u8[32704]{0}"
    assert str(
        packed_shape(module(to_text(kept()).partition("\n\n")[2]).entry.by_name["a"].shape, "bf16")
    ) == ("bf16[512,512]{1,0}")


def test_rounds_to_bfloat16_only_where_loss_is_allowed() -> None:
    m = kept()
    limit = module_peak(m) - K // 2 + 200
    options = {"allow": "compress", **QUICK}
    assert not search.plan(m, limit, search.Options(**options)).met  # type: ignore[arg-type]
    made = search.plan(m, limit, search.Options(lossy=True, **options))  # type: ignore[arg-type]
    assert (made.met, made.count("compress")) == (True, 1)
    graph, plan = as_plan(m, made, "x", bounds(m, ("compress",), lossy=True))
    assert plan.lossy
    assert verify(graph, plan) == []


def test_bounds_know_what_may_leave_memory() -> None:
    m = hlo_data.module("gpu_cnn_30000000", hlo_data.BEFORE)
    assert bound(m, ("recompute", "offload")) <= bound(m) <= module_peak(m)
    assert bound(m, ("offload",)) < module_peak(m)


@pytest.mark.parametrize("planner", EITHER, ids=NAMES)
@pytest.mark.parametrize("name", ["cpu_mlp", "cpu_lstm", "cpu_control"])
@pytest.mark.parametrize(("allow", "part"), [("recompute", 0.8), (ALL, 0.7)])
def test_computes_the_same_values(planner, name: str, allow: str, part: float) -> None:  # type: ignore[no-untyped-def]
    m = hlo_data.module(name)
    limit = max(bound(m, tuple(allow.split(","))), int(part * module_peak(m)))
    options = {"allow": allow} | (QUICK if planner is search else {})
    made = planner.plan(m, limit, planner.Options(**options))
    if planner is search or allow == "recompute":  # XLA's way counts copies twice, and may end above
        assert made.peak_after < made.peak_before
    check(m, made, allow)


def test_copies_take_their_time_where_nothing_hides_them() -> None:
    m = kept(dots=3)
    made = search.plan(m, module_peak(m) - K + 100, search.Options(allow="offload", **QUICK))  # type: ignore[arg-type]
    assert made.met
    graph, plan = as_plan(m, made, "x", bounds(m, ("offload",)))
    assert plan.time > plan.time_before
    assert plan.peak == replay(graph, plan.steps).peak


@pytest.mark.parametrize("planner", NAMES)
def test_the_command_line_says_what_was_done(planner: str, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    path, plan = tmp_path / "m.txt", tmp_path / "plan.json"
    m = kept()
    path.write_text(to_text(m))
    limit = module_peak(m) - K + 100
    given = ["plan", str(path), "--budget", str(limit), "--planner", planner, "--allow", "offload"]
    assert main([*given, "-o", str(plan), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert (rows["offloaded"], rows["compressed"], rows["recomputed"], rows["met"]) == (1, 0, 0, True)
    assert rows["arena"] <= limit + 512
    assert any("16 GB/s" in note and "assumed" in note for note in rows["notes"])
    assert main(["verify", str(plan)]) == 0
    capsys.readouterr()
    assert main([*given[:-1], "redraw"]) == 2
    assert "recompute, compress, offload" in capsys.readouterr().err


def test_unknown_ways_are_refused() -> None:
    with pytest.raises(BadInput, match="compress"):
        search.plan(kept(3), 1, search.Options(allow="swap"))
    with pytest.raises(BadInput, match="compress"):
        xla_remat.plan(kept(3), 1, xla_remat.Options(allow="swap"))


@pytest.mark.parametrize("planner", EITHER, ids=NAMES)
@pytest.mark.parametrize("make", [kept, masked])
def test_jaxlib_reads_the_result_and_accepts_its_schedule(planner, make) -> None:  # type: ignore[no-untyped-def]
    hlo = pytest.importorskip("jaxlib._hlo", reason="jaxlib is not installed")
    m = make()
    options = {"allow": "compress,offload"} | (QUICK if planner is search else {})
    made = planner.plan(m, module_peak(m) - 200_000, planner.Options(**options))
    assert made.transfers
    hlo.hlo_module_from_text(to_text(made.module)).schedule().verify()
