"""HLO text to Module and back, and what is said of text that is none."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import hlo_data
from tightship.errors import BadInput
from tightship.hlo import parse, to_text
from tightship.hlo.text import Scan

MODULES = [(name, part) for name in hlo_data.CPU for part in (hlo_data.FINAL,)] + [
    (name, part) for name in hlo_data.GPU for part in (hlo_data.FINAL, hlo_data.BEFORE, hlo_data.AFTER)
]

SMALL = """\
HloModule tiny, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %neg = f32[4]{0} negate(%p)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %c = f32[] constant(3)
  %y = f32[4] fusion(%x), kind=kLoop, calls=%fused,metadata={op_name="\\"}{\\"/*no*/" source_file="a b" source_line=7}
  ROOT %add = f32[4]{0} add(%x, /*index=1*/%y), control-predecessors={%c}, novel={a={b} "}" [1]<=[2]}, other=1
}
"""


@pytest.mark.parametrize(("name", "part"), MODULES)
def test_text_to_module_to_text_is_what_xla_wrote(name: str, part: str) -> None:
    given = hlo_data.text(name, part)
    module = parse(given)
    assert to_text(module).rstrip() == given.rstrip()
    assert parse(to_text(module)) == module


def test_what_a_module_says() -> None:
    module = parse(SMALL)
    _fused, main = module.computations
    assert module.scheduled and module.entry is main and module.name == "tiny"
    assert [i.name for i in main.parameters] == ["x"] and main.root.name == "add"
    y, add = main.by_name["y"], main.by_name["add"]
    assert y.called == ("fused",) and y.attribute("kind") == "kLoop"
    assert add.operands == ("x", "y") and add.control_predecessors == ("c",)
    assert add.attribute("novel") == '{a={b} "}" [1]<=[2]}' and add.attribute("other") == "1"
    assert main.users["x"] == ("y", "add") and main.users["add"] == ()
    assert main.by_name["c"].payload == "3"
    assert y.op_name == '"}{"/*no*/'  # without the backslashes of the text
    assert str(module.place(y)) == "a b:7"
    assert parse(to_text(module)) == module


def test_lines_of_the_users_program_come_from_stack_frames() -> None:
    module = hlo_data.module("cpu_control")
    place = module.place(module.by_name["region_3.5"].by_name["wrapped_add.1"])
    assert place is not None and place.file == "models.py" and place.line > 80


def test_operands_may_carry_shapes_and_names_no_percent_sign() -> None:
    module = parse(
        "HloModule m\nENTRY e {\n a = (f32[2]{0}, /*index=1*/s32[]) parameter(0)\n"
        " b = f32[2]{0} get-tuple-element((f32[2]{0}, s32[]) a), index=0 // the first\n"
        " ROOT c = f32[2]{0} add(f32[2]{0} %b, f32[2]{0} b)\n}"
    )
    assert module.entry.root.operands == ("b", "b")
    assert module.entry.by_name["b"].operands == ("a",)
    assert parse(to_text(module)) == module


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("f32[2,3]{1,0}", 24),
        ("pred[7]", 7),
        ("bf16[]", 2),
        ("c128[2]{0}", 32),
        ("s4[3]{0:E(4)}", 2),
        ("s4[3]{0}", 3),
        ("f32[0,5]{1,0}", 0),
        ("token[]", 0),
        ("(f32[2], (s8[], u64[]))", 16),
        ("f32[9223372036854775807]{0:S(1)}", None),
        ("f32[4294967296,4294967296]", None),
        ("f32[<=5]", None),
        ("f32[?]", None),
    ],
)
def test_bytes_of_shapes(text: str, nbytes: int | None) -> None:
    shape = Scan(text, "t").shape()
    assert str(shape) == text
    if nbytes is None:
        with pytest.raises(BadInput):
            _ = shape.nbytes
    else:
        assert shape.nbytes == nbytes


def edit(old: str, new: str) -> str:
    assert old in SMALL
    return SMALL.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "m:1:1: expected 'HloModule' at the start of a module, got 'the end of the text'"),
        ("HloModule m\n", "m:2:1: expected a computation"),
        (
            "module @jit_step attributes {mhlo.num_partitions = 1 : i32} {\n}\n",
            "m: MLIR, such as StableHLO, is not",
        ),
        ("#loc = loc(unknown)\nmodule @jit_step {\n}\n", ".as_text('hlo')"),
        ("HloModule m\nTables\n1 x\n", "m:2:1: expected a computation or one of FileNames"),
        (
            edit("negate(%p)", "negate(%p"),
            "m:6:1: expected ',' or ')' after an operand, got '}'",
        ),
        (edit("parameter(0)", "parameter(zero)"), "m:4:28: expected the number of a parameter"),
        (edit("f32[4]{0} negate", "f3[4]{0} negate"), "m:5:15: expected an element type"),
        (edit("f32[4]{0} negate", "f32[x]{0} negate"), "m:5:19: expected a dimension"),
        (edit("%neg = ", "%neg "), "m:5:3: expected an instruction: name = shape opcode(operands)"),
        (edit("kind=kLoop", "kind="), "m:11:32: expected the value of an attribute"),
        (edit("novel={a", "novel={a("), "m:12:102: expected a bracket that closes the '{' of line 12"),
        (SMALL[:-2], "m:13:1: expected '}' that ends computation 'main'"),
        (
            edit("negate(%p)", "negate(%q)"),
            "m:5: operand 'q' of 'neg' is not defined before it in 'fused'",
        ),
        (edit("calls=%fused", "calls=%f"), "m:11: unknown computation 'f', called by 'y'"),
        (
            edit("calls=%fused", "calls=%main"),
            "m:11: computations call one another in a circle: main → main",
        ),
        (
            edit("predecessors={%c}", "predecessors={%d}"),
            "control predecessor 'd' of 'add' is not defined before it",
        ),
        (
            edit("parameter(0)", "parameter(1)"),
            "m:3: parameters of computation 'fused' are numbered [1], not from 0",
        ),
        (edit("%c = ", "%x = "), "m:10: duplicate instruction name 'x' in computation 'main'"),
        (edit("%y = f32", "ROOT %y = f32"), "m:12: second ROOT 'add' in computation 'main', beside 'y'"),
        ("HloModule m\nENTRY e {\n a = " + "(" * 99 + "f32[]", "expected tuples nested at most 64 deep"),
    ],
)
def test_broken_text_gets_its_place_and_what_was_expected(text: str, says: str) -> None:
    with pytest.raises(BadInput) as error:
        parse(text, "m")
    assert says in str(error.value)


def test_circles_through_several_computations_are_found() -> None:
    body = "HloModule m\n" + "".join(
        f"c{k} {{\n p = f32[] parameter(0)\n ROOT r = f32[] call(p), to_apply=c{(k + 1) % 3}\n}}\n"
        for k in range(3)
    )
    with pytest.raises(BadInput, match=r"c0 → c1 → c2 → c0"):
        parse(body)


@settings(max_examples=150)
@given(st.integers(0, 2**32))
def test_damaged_text_is_read_or_refused_but_never_crashes(seed: int) -> None:
    rng = random.Random(seed)
    text = list(SMALL)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text))
        text[at : at + rng.randint(0, 3)] = rng.choice(
            ["", "(", ")", "{", "}", '"', ",", "%", "9", "x", "\n", "=", " "]
        )
    try:
        module = parse("".join(text))
    except BadInput:
        return
    assert parse(to_text(module)) == module


def test_jaxlib_reads_the_same() -> None:
    hlo = pytest.importorskip("jaxlib._hlo")
    for name, part in MODULES:
        ours = hlo_data.module(name, part)
        theirs = hlo.hlo_module_from_text(hlo_data.text(name, part))
        assert hlo.hlo_module_from_text(to_text(ours)).to_string() == theirs.to_string()
        for computation in theirs.computations():
            found = {i.name: [o.name for o in i.operands()] for i in computation.instructions()}
            assert found == {i.name: list(i.operands) for i in ours.by_name[computation.name].instructions}


def test_an_unknown_opcode_is_read_and_noted_with_its_line() -> None:
    text = (
        "HloModule m, is_scheduled=true\nENTRY e {\n  p = f32[8]{0} parameter(0)\n"
        "  a = f32[8]{0} warp-shuffle(p), lanes={4}\n  ROOT b = f32[8]{0} warp-shuffle(a)\n}\n"
    )
    module = parse(text)
    assert module.notes == (
        "opcode 'warp-shuffle' is not known (2, first 'a' in line 4):"
        " its results are taken to have bytes of their own",
    )
    assert module.entry.by_name["a"].attribute("lanes") == "{4}"
    for name in hlo_data.CPU + hlo_data.GPU:
        assert hlo_data.module(name).notes == ()


def test_replica_groups_by_axes_of_a_mesh_are_one_value() -> None:
    groups = "mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}"
    text = (
        "HloModule m, is_scheduled=true\n%add {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n"
        "  ROOT c = f32[] add(a, b)\n}\nENTRY e {\n  p = f32[8]{0} parameter(0)\n"
        f"  ROOT r = f32[8]{{0}} all-reduce(p), channel_id=1, replica_groups={groups}, to_apply=%add\n}}\n"
    )
    root = parse(text).entry.root
    assert root.called == ("add",)
    assert f"{root.attribute('replica_groups')}, device_ids={root.attribute('device_ids')}" == groups
    assert parse(to_text(parse(text))) == parse(text)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("f32[8]", f"f32[{'9' * 5000}]", ": expected a number of at most 400 digits, got"),
        ("f32[8]", f"f32[{','.join('1' * 300)}]", "3:16: expected at most 256 dimensions"),
        (
            "=true",
            f"=true, input_output_alias={{ {{}}: ({'1' * 5000}, {{}}) }}",
            "module:1:",
        ),
    ],
)
def test_numbers_and_shapes_that_nothing_real_has_are_refused(old: str, new: str, says: str) -> None:
    text = "HloModule m, is_scheduled=true\nENTRY e {\n  ROOT p = f32[8] parameter(0)\n}\n"
    with pytest.raises(BadInput) as error:
        parse(text.replace(old, new))
    assert says in str(error.value)
