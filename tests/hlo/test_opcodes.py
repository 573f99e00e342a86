"""The table of opcodes has XLA's, the code names no others, and planner and verifier know effects on their own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tightship
from tightship.hlo import parse
from tightship.hlo.opcodes import OPCODES, opcode
from tightship.hlo.remat.lower import repeatable
from tightship.verify.steps import has_effects

XLA = frozenset(
    """abs acos acosh add add-dependency after-all all-gather all-gather-done all-gather-start all-reduce
    all-reduce-done all-reduce-start all-to-all and asin asinh async-done async-start async-update atan2 atanh
    batch-norm-grad batch-norm-inference batch-norm-training bitcast bitcast-convert broadcast call cbrt ceil
    cholesky clamp collective-broadcast collective-permute collective-permute-done collective-permute-start compare
    complex concatenate conditional constant convert convolution copy copy-done copy-start cosine cosh
    count-leading-zeros custom-call divide domain dot dynamic-reshape dynamic-slice dynamic-update-slice erf
    exponential exponential-minus-one fft floor fusion gather get-dimension-size get-tuple-element imag infeed iota
    is-finite log log-plus-one logistic map maximum minimum mulhi multiply negate not opt-barrier or outfeed pad
    parameter partition-id popcnt power ragged-all-to-all ragged-dot real recv recv-done reduce reduce-precision
    reduce-scatter reduce-window remainder replica-id reshape reverse rng rng-bit-generator
    rng-get-and-update-state round-nearest-afz round-nearest-even rsqrt scaled-dot scan scatter select
    select-and-scatter send send-done set-dimension-size shift-left shift-right-arithmetic shift-right-logical sign
    sine sinh slice sort sqrt stochastic-convert subtract tan tanh topk transpose triangular-solve tuple while
    xor""".split()
)
"""As XLA's hlo_opcode.h has them."""

OLDER = {"tuple-select"}
"""In dumps of older versions."""

SPELLED = {
    "clz": "count-leading-zeros", "cos": "cosine", "exp": "exponential", "expm1": "exponential-minus-one",
    "log1p": "log-plus-one", "optimization-barrier": "opt-barrier", "population-count": "popcnt", "sin": "sine",
    "top-k": "topk",
}  # fmt: skip


EFFECTS = frozenset(name for name, row in OPCODES.items() if row.effect)
FOLDERS = ("hlo", "hlo/remat", "hlo/assign", "baselines", "report", "report/pages")


def test_the_opcodes_are_those_of_xla() -> None:
    assert set(OPCODES) == XLA | OLDER
    assert all(row.name == name for name, row in OPCODES.items())


def test_every_word_of_the_table_is_one_that_somebody_asks_for() -> None:
    asked = {
        constant.value
        for path in _sources()
        if path.name != "opcodes.py"
        for constant in ast.walk(ast.parse(path.read_text()))
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    }
    for row in OPCODES.values():
        for word in (row.forwards, row.writes_over, row.flops, row.cut, row.combines):
            assert word in asked or word in ("", "elements"), (row.name, word)


def test_the_list_of_opcodes_is_that_of_the_installed_jaxlib() -> None:
    hlo = pytest.importorskip("jaxlib._hlo")
    names = (re.sub(r"(?<=.)([A-Z])", r"-\1", name[1:]).lower() for name in hlo.HloOpcode.__members__)
    assert {SPELLED.get(name, name) for name in names} == XLA


def test_every_opcode_that_the_code_names_is_in_the_table() -> None:
    """What an opcode is compared with or matched against, and what instructions are made of."""
    seen = 0
    for path in _sources():
        for name in _opcodes(ast.parse(path.read_text())):
            seen += 1
            assert name in OPCODES, (path.name, name)
    assert seen > 100


def test_no_other_table_of_opcodes_stands_beside_it() -> None:
    """Sets and keys of dictionaries at the top of a module, most of which are opcodes; rules by kind may be."""
    kinds = {kind for row in OPCODES.values() for kind in (row.forwards, row.cut)}
    for path in _sources():
        for statement in ast.parse(path.read_text()).body if path.name != "opcodes.py" else ():
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
                words = set(_words(statement.value)) - kinds
                assert len(words & set(OPCODES)) < max(2, len(words) / 2), (path.name, words)


def _sources() -> list[Path]:
    root = Path(tightship.__file__).parent
    return [path for folder in FOLDERS for path in sorted((root / folder).glob("*.py"))]


def _opcodes(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and _is_opcode(node.left):
            yield from (word for right in node.comparators for word in _words(right))
        elif isinstance(node, ast.Match) and _is_opcode(node.subject):
            for case in node.cases:
                for pattern in ast.walk(case.pattern):
                    yield from _words(pattern.value) if isinstance(pattern, ast.MatchValue) else ()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Instruction":
            yield from _words(node.args[1]) if len(node.args) > 1 else ()


def _words(tree: ast.expr) -> list[str]:
    """The words of a string, or of the strings that a set, a dictionary's keys or a row are made of."""
    match tree:
        case ast.Constant(value=str(text)):
            return text.split()
        case ast.Dict(keys=parts):
            return [word for part in parts if part is not None for word in _words(part)]
        case ast.Set(elts=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
            return [word for part in parts for word in _words(part)]
        case ast.BinOp(left=left, right=right):
            return [*_words(left), *_words(right)]
        case ast.Call(func=function, args=parts):
            inside = [function.value] if isinstance(function, ast.Attribute) else []
            return [word for part in (*inside, *parts) for word in _words(part)]
    return []


def _is_opcode(tree: ast.expr) -> bool:
    return (isinstance(tree, ast.Attribute) and tree.attr == "opcode") or (
        isinstance(tree, ast.Name) and tree.id == "opcode"
    )


@pytest.mark.parametrize("name", sorted(EFFECTS))
def test_the_verifier_knows_effects_on_its_own(name: str) -> None:
    assert has_effects(name)


def test_the_verifier_takes_nothing_else_for_an_effect() -> None:
    assert {name for name in OPCODES if has_effects(name)} == EFFECTS


@pytest.mark.parametrize("name", [*sorted(EFFECTS), "from-the-future"])
def test_no_effect_and_nothing_unknown_may_run_again(name: str) -> None:
    assert not opcode(name).repeatable
    text = "HloModule m\n\nENTRY e {\n  p = f32[4] parameter(0)\n  ROOT r = f32[4] negate(p)\n}\n"
    module = parse(text)
    root = module.entry.root
    assert repeatable(module, root)
    assert not repeatable(module, type(root)("r", name, root.shape, root.operands))
