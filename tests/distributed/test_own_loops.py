"""Loops with an optimizer of their own behind ``step.backward``, on several ranks: the bits of eager's."""

from __future__ import annotations

import pytest

from support.ranks import Rows, as_planned, run


@pytest.fixture(scope="module")
def rows() -> Rows:
    return run("held_before", "accumulated_before", "asked_of_parts", worker="own_worker.py")


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


def test_what_is_asked_of_gradients_in_parts_is_answered_of_all_of_them_or_refused(rows: Rows) -> None:
    for row in rows["asked_of_parts"]:
        assert row["fit"] == row["eager"]
        plain = [one for name, one in row.items() if name.startswith("plain ")]
        assert len(plain) == 10
        for one in plain:
            assert "of which this rank has a part" in one["text"]
            assert "clip_norm=" in one["text"]
        assert row["by row"][0] == [0.0] * 3
