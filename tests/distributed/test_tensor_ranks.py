"""Tensor parallelism as torch's ``parallelize_module`` makes it: eager's bits, each rank within its budget."""

from __future__ import annotations

import pytest

from support.ranks import Rows, as_planned, asked, run

TOGETHER = (
    "columns", "sequence", "clipped", "accumulated", "later", "logits_in_parts", "loss_in_parts", "checkpoints",
    "refused", "clipped_by_torch",
)  # fmt: skip


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Rows:
    return run(*asked(request, *TOGETHER), worker="tensor_worker.py")


@pytest.mark.parametrize("how", ["columns", "sequence", "clipped", "later", "logits_in_parts"])
def test_steps_leave_what_eager_leaves_and_measure_what_was_planned(rows: Rows, how: str) -> None:
    for row in rows[how]:
        for what, eager in row["eager"].items():
            assert row["fit"][what] == eager, what
        as_planned(row["fit"]["measure"])
        assert row["fit"]["full"] == row["eager"]["model"]
        assert row["fit"]["collectives"] > 3
        assert row["fit"]["recomputed"] > 0
        assert not row["fit"]["captured again"]


def test_a_loss_that_is_a_dtensor_is_handed_back_as_one_by_fit_and_backend(rows: Rows) -> None:
    for row in rows["loss_in_parts"]:
        assert row["fit"] == row["compiled"] == row["eager"]
        assert row["eager"][2] == ["DTensor"]


def test_gradients_are_added_up_behind_accumulation_and_clipping(rows: Rows) -> None:
    for row in rows["accumulated"]:
        assert row["fit"] == row["eager"]
        assert min(row["fit"]["norms"]) > 0.3
        assert row["backward"]["type"] == "BadInput"
        assert "split=True" in row["backward"]["text"]


def test_loops_clip_gradients_of_which_ranks_have_parts_and_all(rows: Rows) -> None:
    for row in rows["clipped_by_torch"]:
        assert row["fit"] == row["eager"]
        assert row["eager"][0] > 0.3


def test_state_dicts_have_dtensors_of_what_ranks_have_parts_of(rows: Rows) -> None:
    kinds = rows["columns"][0]["fit"]["kinds"]
    assert kinds["blocks.0.up.weight"] == kinds["blocks.0.down.bias"] == "DTensor"
    assert kinds["blocks.0.norm.weight"] == "Tensor"


def test_torchs_checkpoints_go_from_eager_to_planned_steps_and_back(rows: Rows) -> None:
    for row in rows["checkpoints"]:
        first, *others = row.values()
        assert len(others) == 2
        assert all(other == first for other in others)


def test_what_is_not_taken_over_is_refused_with_what_to_do(rows: Rows) -> None:
    for row in rows["refused"]:
        assert row["parallel"]["type"] == "BadInput"
        assert "leave parallel out" in row["parallel"]["text"]
        assert row["part"]["type"] == "Unsupported"
        assert "a mesh of 1 of 2 ranks" in row["part"]["text"]


def test_a_part_of_a_mesh_that_has_all_ranks_will_do_and_a_model_is_taken_twice(rows: Rows) -> None:
    for row, other in zip(rows["refused"], rows["columns"], strict=True):
        assert [row["taken"], row["twice"]] == other["eager"]["losses"][:2]
