"""Ranks that do not do the same: with the bits of eager, or an error on all of them, never a word less."""

from __future__ import annotations

from typing import Any

import pytest

from support.ranks import Rows, as_planned, asked, run


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Rows:
    return run(
        *asked(request, "other_layers", "other_rates", "data_set", "other_rows"),
        worker="unequal_worker.py",
        most=600,
    )


def same(row: dict[str, Any]) -> None:
    for what, eager in row["eager"].items():
        assert row["fit"][what] == eager, what
    as_planned(row["fit"]["measure"])


@pytest.mark.parametrize("how", ["whole", "alike", "accumulated", "split"])
def test_ranks_that_run_other_layers_train_as_under_find_unused_parameters(rows: Rows, how: str) -> None:
    for row in rows["other_layers"]:
        same(row[how])
        switched = [n for n in row[how]["fit"]["notes"] if n.startswith("ranks run other layers")]
        assert len(switched) == (how in ("whole", "alike"))


@pytest.mark.parametrize("how", ["step", "update", "accumulated", "sharded", "compiled", "two"])
def test_a_rate_that_one_rank_alone_has_changed_is_refused_on_all(rows: Rows, how: str) -> None:
    for row in rows["other_rates"]:
        assert row[how]["refused"]["type"] == "PeerFailed"
        name = "SGD 0" if how == "two" else "SGD"
        assert f"rank 0: lr of {name}: 0.1" in row[how]["refused"]["text"]
        assert f"rank 1: lr of {name}: 0.01" in row[how]["refused"]["text"]
        assert "half written" not in row[how]["refused"]["text"]
        assert row[how]["afterwards"] == ""


def test_data_given_to_parameters_of_fully_shard_change_nothing(rows: Rows) -> None:
    for row in rows["data_set"]:
        same(row)
        assert any("changes nothing, as in eager" in n for n in row["fit"]["notes"])
        assert row["fit"]["places"] == ["unequal_worker.py"]  # once, where the caller's code is


@pytest.mark.parametrize("how", ["sharded", "DistributedDataParallel"])
def test_short_and_empty_batches_of_one_rank_follow_the_plan_of_the_other(rows: Rows, how: str) -> None:
    for row in rows["other_rows"]:
        same(row[how])
