"""Code of steps on several ranks may look at what they compute: each rank by itself, or, where others take part in
it, all together."""

from __future__ import annotations

import pytest

from support.ranks import Rows, run


@pytest.fixture(scope="module")
def rows() -> Rows:
    return run("looks", "together", "one_looks", "fails", worker="look_worker.py")


@pytest.mark.parametrize("how", ["logged", "branched", "weighed", "answered"])
def test_what_is_looked_at_is_eagers_and_steps_are_planned(rows: Rows, how: str) -> None:
    for row in rows["looks"]:
        eager, ours = row[how]
        assert ours["row"] == eager["row"]
        assert all(planned == measured for planned, measured in ours["peaks"][1:])
    logs = [str(row[how][0]["row"]["log"]) for row in rows["looks"]]
    assert how == "answered" or logs[0] != logs[1]
    assert how != "branched" or any("above" in log for log in logs)


def test_a_buffer_that_one_rank_has_changed_is_an_error_where_its_code_has_seen_it() -> None:
    for row in run("changed", worker="look_worker.py")["changed"]:
        assert "a buffer that this rank alone has changed ('scale')" in row["text"]


@pytest.mark.parametrize("how", ["reduced", "statistics", "before statistics", "parts", "parts, alternating"])
def test_what_other_ranks_take_part_in_is_looked_at_together(rows: Rows, how: str) -> None:
    logs = []
    for row in rows["together"]:
        eager, ours = row[how]
        assert ours["row"] == eager["row"]
        assert all(planned == measured for planned, measured in ours["peaks"][1:])
        logs.append([x for x in eager["row"]["log"] if x == "above"])
    assert "alternating" not in how or logs[0] != logs[1]


def test_what_others_take_part_in_and_one_rank_looks_at_is_an_error_on_all(rows: Rows) -> None:
    for row in rows["one_looks"]:
        assert row["type"] == "PeerFailed" and row["seconds"] < 60
        assert "rank 0: looking at what other ranks take part in at " in row["text"]
        assert "look_worker.py:" in row["text"] and "have all ranks look there" in row["text"]


def test_an_error_behind_a_look_ends_the_step_on_all_ranks(rows: Rows) -> None:
    for row in rows["fails"]:
        assert row["same"]
        assert "rank 1: ArithmeticError: seen enough" in row["text"]
