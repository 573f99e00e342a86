"""Every numbered behavior of the five systems has a test that names it, and one on a real model.

A test names a behavior in its name (``test_R07_…``, ``test_G03_G04_…``) or in its docstring (``R7``). It works on a
real model where it, or what it is parametrized with, takes one of `REAL`: captured training steps, ONNX models,
modules that XLA compiled, training graphs of TensorFlow's.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PAGES = sorted((TESTS.parent / "docs" / "systems").glob("*.md"))
BEHAVIORS = [b for page in PAGES for b in re.findall(r"^\| ([RGAML]\d+) \|", page.read_text(), re.MULTILINE)]
"""Rows of the tables in docs/systems."""
REAL = re.compile(
    r"\b(captured|measured|recorded|planned|step|program|case|MODELS|zoo|capture_loss|capture_step|hlo_data|hlo_dumps)\b"
)

_IN_NAME = re.compile(r"(?<=_)([RGAML])(\d\d)(?=_)")
_IN_TEXT = re.compile(r"(?<![\w.])([RGAML])(\d{1,2})(?![\w.])")


def behaviors(test: ast.FunctionDef) -> set[str]:
    """The numbers that a test names."""
    named = _IN_NAME.findall(f"{test.name}_") + _IN_TEXT.findall(ast.get_docstring(test) or "")
    return {f"{system}{int(n)}" for system, n in named}


@cache
def found() -> dict[str, list[tuple[str, bool]]]:
    """By behavior: (test, whether it works on a real model)."""
    every: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                text = ast.unparse(node)
                for b in behaviors(node):
                    every[b].append(
                        (f"{path.name}::{node.name}", bool(REAL.search(text.partition('"""')[0] + text)))
                    )
    return every


@pytest.mark.parametrize("behavior", BEHAVIORS)
def test_a_behavior_is_tested_by_name(behavior: str) -> None:
    assert found()[behavior], f"no test names {behavior} in its name or docstring"


@pytest.mark.parametrize("behavior", BEHAVIORS)
def test_a_behavior_is_tested_on_a_real_model(behavior: str) -> None:
    names = [name for name, _ in found()[behavior]]
    assert any(real for _, real in found()[behavior]), f"{behavior} is tested on made graphs alone: {names}"


def test_the_pages_number_them_without_gaps() -> None:
    systems = {"R": 20, "G": 15, "A": 10, "M": 10, "L": 8}
    assert sorted(BEHAVIORS) == sorted(f"{s}{n}" for s, last in systems.items() for n in range(1, last + 1))


def test_no_test_names_a_behavior_that_there_is_not() -> None:
    assert set(found()) <= set(BEHAVIORS)


def test_what_names_a_behavior_is_seen() -> None:
    source = 'def test_R07_R10_gain():\n    "As M6 says, but not R999 or v1.R3x."\n'
    (test,) = ast.parse(source).body
    assert isinstance(test, ast.FunctionDef)
    assert behaviors(test) == {"R7", "R10", "M6"}
