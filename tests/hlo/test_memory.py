"""Points-to sets, alias sets and live ranges, against XLA's own dumps."""

import pytest

from support import hlo_data, hlo_dumps
from support.hlo_small import COUNTING
from tightship.errors import BadInput
from tightship.hlo import parse
from tightship.hlo.alias import alias_sets
from tightship.hlo.dataflow import PointsTo, points_to
from tightship.hlo.liveness import live_ranges


def at(points: PointsTo, computation: str, name: str, index: tuple[int, ...] = ()) -> str:
    return str(next(n for n in points.nodes[computation] if n.name == name).buffer(index))


@pytest.mark.parametrize("name", hlo_data.CPU)
def test_every_buffer_with_its_positions_and_uses_is_xlas(name: str) -> None:
    """L1, L2, L3 and L4, as XLA has them."""
    theirs = hlo_dumps.values(hlo_data.text(name, "after_optimizations-buffer-assignment-values"))
    assert hlo_dumps.our_values(points_to(hlo_data.module(name))) == theirs


@pytest.mark.parametrize("name", hlo_data.CPU + hlo_data.GPU)
def test_the_schedule_and_every_live_range_are_xlas(name: str) -> None:
    theirs = hlo_dumps.ranges(hlo_data.text(name, "after_optimizations-live-range"))
    assert hlo_dumps.our_ranges(live_ranges(hlo_data.module(name))) == theirs


@pytest.mark.parametrize("name", hlo_data.CPU + hlo_data.GPU)
def test_an_alias_set_lies_at_one_place_in_xlas_assignment(name: str) -> None:
    where = hlo_dumps.offsets(hlo_data.text(name, "after_optimizations-buffer-assignment"))
    for group in alias_sets(points_to(hlo_data.module(name))):
        places = {where[str(b)][:2] for b in group.buffers if str(b) in where}
        assert len(places) <= 1, group.buffers


def test_a_loop_is_one_place_and_what_it_passes_on_is_one_buffer() -> None:
    points = points_to(parse(COUNTING))
    assert at(points, "main", "out") == at(points, "body", "x") == "b"  # passed on unchanged: no phi
    assert at(points, "body", "i") == "p{0}" and at(points, "cond", "j") == "q{0}"
    sets = [{str(b) for b in group.buffers} for group in alias_sets(points)]
    assert {"z", "p{0}", "q{0}", "next", "loop{0}"} in sets
    assert {"init{}", "p{}", "q{}", "t{}", "loop{}"} in sets
    assert {"b"} in sets


def test_what_a_while_takes_ends_where_its_body_begins() -> None:
    ranges = hlo_dumps.our_ranges(live_ranges(parse(COUNTING)))[1]
    assert ranges["z{}"] == (2, 5) and ranges["q{0}"] == (5, 9)
    assert ranges["a{}"] == (0, 17)  # an input that is not donated stays to the end


def test_an_unscheduled_module_has_no_live_ranges() -> None:
    with pytest.raises(BadInput, match="the module is not scheduled"):
        live_ranges(parse(COUNTING.replace(", is_scheduled=true", "")))


@pytest.mark.parametrize("shape", ["f32[4294967296,4294967296]", "f32[<=8]"])
def test_shapes_without_a_size_are_refused_with_their_place(shape: str) -> None:
    text = COUNTING.replace("%b = f32[8]", f"%b = {shape}")
    with pytest.raises(BadInput, match=r"module:23, 'b' in 'main'"):
        points_to(parse(text))


SELECT = """\
HloModule choice, is_scheduled=true

ENTRY %main (c: pred[], x: f32[2], y: f32[2]) -> f32[2] {
  %c = pred[] parameter(0)
  %x = f32[2]{0} parameter(1)
  %y = f32[2]{0} parameter(2)
  %inner = (f32[2]{0}) tuple(%y)
  %left = (f32[2]{0}, (f32[2]{0})) tuple(%x, %inner)
  %right = (f32[2]{0}, (f32[2]{0})) tuple(%y, %inner)
  %either = (f32[2]{0}, (f32[2]{0})) tuple-select(%c, %left, %right)
  %first = f32[2]{0} get-tuple-element(%either), index=0
  %second = (f32[2]{0}) get-tuple-element(%either), index=1
  %same = f32[2]{0} get-tuple-element(%second), index=0
  ROOT %sum = f32[2]{0} add(%first, %same)
}
"""


def test_L01_one_logical_buffer_per_instruction_and_position() -> None:  # noqa: N802
    points = points_to(parse(SELECT))
    left = [str(b) for b in points.buffers if b.node.name == "left"]
    assert left == ["left{}"]  # a table of addresses; what stands in it comes from elsewhere
    sizes = {str(b): b.nbytes for b in points.buffers}
    assert sizes["left{}"] == 16 and sizes["inner{}"] == 8 and sizes["sum"] == 8 and sizes["c"] == 1


def test_L02_points_to_sets_forward_unite_and_know_whether_they_are_ambiguous() -> None:  # noqa: N802
    points = points_to(parse(SELECT))
    nodes = {n.name: n for n in points.nodes["main"]}
    assert {str(b) for b in points.sources(nodes["first"])} == {"x", "y"}  # ambiguous
    assert {str(b) for b in points.sources(nodes["same"])} == {"y"}  # distinct
    assert at(points, "main", "either") == "either{}"


@pytest.mark.parametrize("name", hlo_data.CPU)
def test_L03_positions_are_the_inverse_of_points_to(name: str) -> None:  # noqa: N802
    points = points_to(hlo_data.module(name))
    forward = {
        (n.name, n.computation.name, index, b.id)
        for nodes in points.nodes.values()
        for n in nodes
        for b, (index, _) in zip(n.at, n.shape.positions, strict=False)
    }
    inverse = {(n.name, n.computation.name, i, b.id) for b in points.buffers for n, i in b.positions}
    assert forward == inverse


def test_L04_live_out_is_all_the_root_points_to() -> None:  # noqa: N802
    points = points_to(parse(COUNTING))
    assert {str(b) for b in points.live_out} == {"b"}
    control = points_to(hlo_data.module("cpu_control"))
    assert {str(b) for b in control.live_out} == {
        "tuple.25{}",
        "add_select_fusion",
        "wrapped_copy.2",
        "while.4{2}",
    }


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("negate(%a)", "copy()", "23: copy 'b' has 0 operands, needs at least 1"),
        ("tuple(%z, %b)", "tuple(%z)", "24: tuple 'init' and its operands have shapes of different parts"),
        (
            "while(%init)",
            "while(%b)",
            "25: while 'loop' and its operand have shapes of different parts",
        ),
        (", condition=%cond", "", "25: while 'loop' names '' as its condition, not one computation"),
        (
            "true",
            "true, input_output_alias={ {3}: (0, {}) }",
            "1: input_output_alias: the result has no part (3,)",
        ),
        (
            "true",
            "true, input_output_alias={ {}: (4, {}) }",
            "1: input_output_alias: no part () of a parameter 4",
        ),
    ],
)
def test_instructions_that_cannot_be_are_refused_with_their_line(old: str, new: str, says: str) -> None:
    assert old in COUNTING
    with pytest.raises(BadInput) as error:
        points_to(parse(COUNTING.replace(old, new, 1)))
    assert f"module:{says}" in str(error.value)


def test_an_instruction_that_writes_over_parts_there_are_not_is_refused_with_its_line() -> None:
    text = COUNTING.replace("%b = f32[8]{0} negate(%a)", "%b = f32[8]{0} all-reduce-start(%a, %a)")
    with pytest.raises(
        BadInput, match=r"module:23: all-reduce-start 'b' of shape .* lacks the parts that it writes over"
    ):
        live_ranges(parse(text))


def test_calls_nested_without_end_are_refused() -> None:
    deep = "".join(
        f"c{k} {{\n p = f32[] parameter(0)\n ROOT r = f32[] "
        + (f"call(p), to_apply=c{k - 1}\n}}\n" if k else "negate(p)\n}\n")
        for k in range(2000)
    )
    with pytest.raises(BadInput, match="at most 100 deep"):
        parse("HloModule m, is_scheduled=true\n" + deep)
