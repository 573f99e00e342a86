"""Code of steps under DistributedDataParallel may look at what they compute, as far as no other rank takes part."""

from __future__ import annotations

import pytest

from support.ranks import Rows, run


@pytest.fixture(scope="module")
def rows() -> Rows:
    return run("looks", "refused", "fails", worker="look_worker.py")


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


@pytest.mark.parametrize("what", ["reduced", "statistics"])
def test_what_other_ranks_take_part_in_is_refused_on_all(rows: Rows, what: str) -> None:
    for row in rows["refused"]:
        assert row[what]["type"] == "Unplannable"
        assert "must not depend on data" in row[what]["text"]


def test_an_error_behind_a_look_ends_the_step_on_all_ranks(rows: Rows) -> None:
    for row in rows["fails"]:
        assert row["same"]
        assert "rank 1: ArithmeticError: seen enough" in row["text"]
