"""Loops with an optimizer of their own behind ``step.backward``, on several ranks: the bits of eager's."""

from __future__ import annotations

import pytest

from support.ranks import Rows, as_planned, run


@pytest.fixture(scope="module")
def rows() -> Rows:
    return run("held_before", "accumulated_before", worker="own_worker.py")


@pytest.mark.parametrize("how", ["sharded", "columns"])
def test_parameters_held_from_before_have_the_gradients_of_the_parts_in_their_places(
    rows: Rows, how: str
) -> None:
    for row in rows["held_before"]:
        eager, fitted = row[how]["eager"], row[how]["fit"]
        as_planned(fitted.pop("measure"))
        assert fitted == eager
        assert eager["log"][0] != eager["log"][3]


def test_gradients_from_before_stay(rows: Rows) -> None:
    for row in rows["accumulated_before"]:
        assert "while '0.weight' has a gradient" in row["refused"]["text"]
