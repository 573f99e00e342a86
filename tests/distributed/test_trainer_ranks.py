"""Steps in the loops of trainers and launchers, on several ranks: the bits of eager's, or a sentence that helps."""

from __future__ import annotations

import pytest

from support.ranks import Rows, as_planned, run


@pytest.fixture(scope="module")
def rows() -> Rows:
    return run(
        "accumulated_by_accelerate",
        "accumulated_in_shards",
        "averaged_now_and_then",
        "updates_unsent",
        "blocks_of_torchs_own",
        worker="trainer_worker.py",
    )


def test_a_step_is_made_where_accelerate_adds_up_gradients(rows: Rows) -> None:
    for row in rows["accumulated_by_accelerate"]:
        assert row["fit"] == row["eager"]
        as_planned(row["measure"])


def test_ranks_train_by_themselves_where_accelerate_averages_parameters(rows: Rows) -> None:
    for row in rows["averaged_now_and_then"]:
        assert row["fit"] == row["eager"]
        as_planned(row["measure"])


def test_a_step_is_made_of_shards_while_no_gradients_are_to_be_sent(rows: Rows) -> None:
    for row in rows["accumulated_in_shards"]:
        assert row["fit"] == row["eager"]


def test_no_step_updates_where_the_loop_sends_no_gradients(rows: Rows) -> None:
    for row in rows["updates_unsent"]:
        for name in ("fit in no_sync", "step in no_sync", "fit told", "second of two, told"):
            assert row[name]["type"] == "Unsupported", (name, row[name])
            said = "set_requires_gradient_sync(False)" if "told" in name else "no_sync()"
            assert f" {said}, which adds up gradients over batches, is not supported" in row[name]["text"]
            assert "call it outside" in row[name]["text"]
            assert "split=True" in row[name]["text"]
            assert ("independent=True" in row[name]["text"]) == (said == "no_sync()")
        assert row["step of one in no_sync"]["type"] == "PeerFailed"
        assert "rank 1: a step that updates inside of no_sync()" in row["step of one in no_sync"]["text"]
        assert row["unchanged"]
        for name in ("later", "first of two, told", "second of two"):
            assert row[name]["type"] == "", (name, row[name])


def test_blocks_of_torchs_own_classes_are_planned_where_hooks_of_fully_shard_end_graphs(rows: Rows) -> None:
    """Dynamo compiles no module of torch's by itself; one graph is for all blocks that are alike."""
    for row in rows["blocks_of_torchs_own"]:
        assert row["nested"] == row["flat"] == row["eager"]
        assert (row["nested, planned"][0], row["flat, planned"][0]) == (3, 1)
        assert any("modules of torch's own classes" in note for note in row["nested, planned"][1])
        assert row["nested, planned"][2] == row["flat, planned"][2] == []


def test_fabric_saves_and_loads_what_was_fully_sharded() -> None:
    pytest.importorskip("lightning.fabric", reason="lightning is not installed")
    for row in run("saved_by_fabric", worker="trainer_worker.py")["saved_by_fabric"]:
        for whole in (False, True):
            eager, fitted = row[f"{whole} False"], row[f"{whole} True"]
            assert fitted == eager
            assert eager[2] == 2  # loaded
