"""Models that torch itself has made parallel: the bits of its own eager steps, each rank within its budget."""

from __future__ import annotations

from typing import Any

import pytest

from support.ranks import Rows, as_planned, run

TOGETHER = (
    "fully_sharded", "fully_sharded_tied", "fully_sharded_later", "fully_sharded_clipped", "in_ddp", "accumulated",
    "checkpoints", "after_infeasible", "refused",
)  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> Rows:
    return run(*TOGETHER, worker="torch_worker.py")


def same(row: dict[str, Any]) -> None:
    for what, eager in row["eager"].items():
        assert row["fit"][what] == eager, what


@pytest.mark.parametrize(
    "how", ["fully_sharded", "fully_sharded_tied", "fully_sharded_later", "fully_sharded_clipped", "in_ddp"]
)
def test_steps_leave_what_torchs_own_leave_and_measure_what_was_planned(rows: Rows, how: str) -> None:
    for row in rows[how]:
        same(row)
        as_planned(row["fit"]["measure"])
        assert row["fit"]["recomputed"] > 0


def test_state_dicts_of_a_model_and_its_optimizer_have_dtensors_under_the_models_names(rows: Rows) -> None:
    kinds = rows["fully_sharded"][0]["fit"]["kinds"]
    assert kinds["0.weight"] == kinds["13.bias"] == "DTensor"
    assert kinds["12.running_mean"] == "Tensor"


def test_accumulation_scaler_and_norm_over_all_ranks_are_torchs(rows: Rows) -> None:
    for row in rows["accumulated"]:
        same(row)
        assert min(row["fit"]["scales"]) < 8.0  # gradients that were not finite on one rank: all have skipped
    assert len({row["fit"]["norms"] for row in rows["accumulated"]}) == 1


def test_torchs_checkpoints_go_from_eager_to_planned_steps_and_back(rows: Rows) -> None:
    for row in rows["checkpoints"]:
        first, *others = row.values()
        assert len(others) == 2
        assert all(other == first for other in others)


def test_a_model_is_taken_again_after_a_budget_that_nothing_meets(rows: Rows) -> None:
    for row, other in zip(rows["after_infeasible"], rows["fully_sharded"], strict=True):
        assert row["no"]["type"] == "Infeasible"
        assert row["losses"] == other["eager"]["losses"][:3]
        assert row["evaluates"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("offload_policy", "offload_policy"),
        ("columns", "Shard(dim=1)"),
        ("2-D", "Replicate()"),
        ("partly", "'2.weight', which fully_shard has left out"),
        ("recurrent", "recurrent module '0'"),
        ("comm_hook", "a communication hook"),
        ("TP", "DataParallel("),
        ("parallel", "leave parallel out"),
        ("taken", "call the step that fit has returned"),
    ],
)
def test_what_is_not_taken_over_is_refused_with_what_to_do(rows: Rows, how: str, words: str) -> None:
    for row in rows["refused"]:
        assert row[how]["type"] in ("Unsupported", "BadInput")
        assert words in row[how]["text"]


@pytest.mark.slow
def test_policies_of_mixed_precision_cast_as_torch_does() -> None:
    for row in run("mixed_precision", worker="torch_worker.py")["mixed_precision"]:
        for policy in row.values():
            same(policy)
            as_planned(policy["fit"]["measure"])
