"""The table of rules: what the verifier reports is a row, and every row has a sentence and a check."""

import ast
from pathlib import Path

import pytest

import tightship.verify
from tightship.verify import PLACEMENT_RULES, PLAN_RULES

SOURCE = Path(tightship.verify.__file__).parent
REPORTS = ("add", "note", "Violation")


def reported(path: Path) -> set[str]:
    """The codes that a file of the verifier reports, as its calls name them."""
    calls = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call) and n.args)
    named = (n for n in calls if ast.unparse(n.func).rpartition(".")[2] in REPORTS)
    firsts = (n.args[0] for n in named)
    parts = (part for first in firsts for part in ast.walk(first))
    return {p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)}


def strings(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def test_every_code_that_is_reported_is_a_row() -> None:
    plan = {rule.code for rule in PLAN_RULES}
    rest = [p for p in SOURCE.glob("*.py") if p.name != "placement.py"]
    assert set().union(*map(reported, rest)) <= plan
    assert reported(SOURCE / "placement.py") == {rule.code for rule in PLACEMENT_RULES}
    assert plan <= set().union(
        *(strings(p) for p in rest if p.name != "rules.py"), reported(SOURCE / "rules.py")
    )


@pytest.mark.parametrize("table", [PLAN_RULES, PLACEMENT_RULES])
def test_a_code_is_one_row_with_a_sentence(table: tuple[tightship.verify.Rule, ...]) -> None:
    assert len({rule.code for rule in table}) == len(table)
    assert all(rule.sentence.lstrip("`")[0].isalpha() and rule.sentence.endswith(".") for rule in table)
