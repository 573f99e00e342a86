"""Meshes of two dimensions on four ranks: eager's bits, each rank within its budget."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.ranks import Rows, as_planned, run
from tightship.errors import PeerFailed
from tightship.execute.agreement import Told, check_sequences, told_groups

RANKS = 4


def on_four(*names: str) -> Rows:
    return run(*names, ranks=RANKS, ends=(0,) * RANKS, worker="mesh_worker.py")


@pytest.fixture(scope="module")
def rows() -> Rows:
    return on_four("replicas_of_shards_clipped", "tensors_and_shards_clipped", "in_groups", "refused")


def same(row: Any) -> None:
    for what, eager in row["eager"].items():
        assert row["fit"][what] == eager, what
    as_planned(row["fit"]["measure"])
    assert row["fit"]["recomputed"] > 0


@pytest.mark.parametrize("how", ["replicas_of_shards_clipped", "tensors_and_shards_clipped"])
def test_steps_leave_what_eager_leaves_and_measure_what_was_planned(rows: Rows, how: str) -> None:
    assert len(rows[how]) == RANKS
    for row in rows[how]:
        same(row)


def test_ranks_of_a_process_group_train_among_themselves(rows: Rows) -> None:
    for row in rows["in_groups"]:
        same(row)
        as_planned(row["bytes"])
        assert {n: row["eager"][n] for n in row["parts"]} == row["parts"]
    models = [row["eager"]["model"] for row in rows["in_groups"]]
    assert models[0] != models[2]  # of the other group


@pytest.mark.slow
def test_verified_steps_and_rows_that_parts_do_not_divide() -> None:
    names = ("replicas_of_shards", "tensors_and_shards", "uneven_and_tied")
    found = on_four(*names)
    for name in names:
        for row in found[name]:
            same(row)


@pytest.mark.slow
def test_torchs_checkpoints_go_from_eager_to_planned_steps_and_back() -> None:
    names = ("hybrid_checkpoints", "tensor_checkpoints")
    found = on_four(*names)
    for name in names:
        for row in found[name]:
            first, *others = row.values()
            assert len(others) == 2
            assert all(other == first for other in others)


def test_what_is_not_taken_over_is_refused_with_what_to_do(rows: Rows) -> None:
    for row in rows["refused"]:
        assert row["partly"]["type"] == "Unsupported"
        assert "which fully_shard has left out" in row["partly"]["text"]
        assert "a tensor parallel model in DistributedDataParallel" in row["ddp"]["text"]
        assert row["apart"]["type"] == "Unsupported"
        assert "a mesh of 2 of 4 ranks" in row["apart"]["text"]
        assert "fully_shard" in row["apart"]["text"]


def differ(place: str, texts: Any) -> PeerFailed:
    return PeerFailed(dict(enumerate(texts)), place)


def told(*groups: list[list[int]]) -> list[Told]:
    """What ranks say that send the same among other ranks."""
    return [Told("ops", (3, "calls"), None, told_groups(g)) for g in groups]


def test_ranks_of_a_mesh_send_among_others_and_a_rank_of_another_mesh_is_refused() -> None:
    ranks: Any = SimpleNamespace(differ=differ)
    rows, columns = [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]
    check_sequences(ranks, told(*([r, c] for r, c in zip(rows, columns, strict=True))))
    turned = [[r, c] for r, c in zip(rows, columns, strict=True)]
    turned[3].reverse()
    with pytest.raises(PeerFailed, match="other meshes"):
        check_sequences(ranks, told(*turned))
