"""Modules as large as the largest there are: read, analyzed and assigned; how long it takes is not asserted."""

import pytest

from support.hlo_made import deep_module
from tightship.baselines import xla_assign
from tightship.hlo import parse, to_text
from tightship.hlo.assign import tight


@pytest.mark.parametrize("instructions", [3_000, pytest.param(114_000, marks=pytest.mark.slow)])
def test_a_large_module_is_assigned_within_a_thousandth_of_the_bound(instructions: int) -> None:
    text = deep_module(instructions)
    module = parse(text)
    assert sum(1 for _ in module.instructions) > 0.85 * instructions
    assert parse(to_text(module)) == module
    theirs, ours = xla_assign.plan(module), tight.plan(module)
    assert ours.lower_bound <= ours.total <= theirs.total <= 1.001 * theirs.lower_bound
