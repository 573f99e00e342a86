"""The tables of opcodes name opcodes, all of them, and what runs once is told by planner and verifier apart."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import tightship
from tightship.hlo import parse
from tightship.hlo.opcodes import EFFECTS, KNOWN, ONCE
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


def test_the_opcodes_are_those_of_xla() -> None:
    assert KNOWN == XLA | OLDER
    assert EFFECTS < ONCE < KNOWN


def test_the_list_of_opcodes_is_that_of_the_installed_jaxlib() -> None:
    hlo = pytest.importorskip("jaxlib._hlo")
    names = (re.sub(r"(?<=.)([A-Z])", r"-\1", name[1:]).lower() for name in hlo.HloOpcode.__members__)
    assert {SPELLED.get(name, name) for name in names} == XLA


def test_every_table_of_opcodes_names_opcodes() -> None:
    """Sets, and keys of dictionaries, at the top of a module that reads or plans HLO, most of which are opcodes."""
    root, seen = Path(tightship.__file__).parent, 0
    for folder in ("hlo", "hlo/remat", "hlo/assign", "baselines"):
        for path in sorted((root / folder).glob("*.py")):
            for statement in ast.parse(path.read_text()).body:
                if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
                    continue
                words = set(_words(statement.value))
                if len(words & KNOWN) < 3 or len(words & KNOWN) < len(words) / 2:
                    continue
                seen += 1
                assert words <= KNOWN, (path.name, words - KNOWN)
    assert seen >= 5


def _words(tree: ast.expr) -> list[str]:
    """What a set or a dictionary is looked up by: words in its strings, but for the values of a dictionary."""
    if isinstance(tree, ast.Constant):
        return tree.value.split() if isinstance(tree.value, str) else []
    if isinstance(tree, ast.Dict):
        return [word for key in tree.keys if key is not None for word in _words(key)]
    if isinstance(tree, (ast.Set, ast.Tuple, ast.List)):
        return [word for item in tree.elts for word in _words(item)]
    if isinstance(tree, ast.BinOp):
        return [*_words(tree.left), *_words(tree.right)]
    if isinstance(tree, ast.Call):
        inside = [tree.func.value] if isinstance(tree.func, ast.Attribute) else []
        return [word for part in (*inside, *tree.args) for word in _words(part)]
    return []


@pytest.mark.parametrize("opcode", sorted(EFFECTS))
def test_the_verifier_knows_effects_on_its_own(opcode: str) -> None:
    assert has_effects(opcode)


def test_the_verifier_takes_nothing_else_for_an_effect() -> None:
    assert {opcode for opcode in KNOWN if has_effects(opcode)} == EFFECTS


@pytest.mark.parametrize("opcode", [*sorted(EFFECTS), "from-the-future"])
def test_no_effect_and_nothing_unknown_may_run_again(opcode: str) -> None:
    text = "HloModule m\n\nENTRY e {\n  p = f32[4] parameter(0)\n  ROOT r = f32[4] negate(p)\n}\n"
    module = parse(text)
    root = module.entry.root
    assert repeatable(module, root)
    assert not repeatable(module, type(root)("r", opcode, root.shape, root.operands))
