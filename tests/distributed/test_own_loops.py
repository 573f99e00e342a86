"""Loops with an optimizer of their own behind ``step.backward``, on several ranks: the bits of eager's."""

from __future__ import annotations

import pytest

from support.ranks import Rows, as_planned, run


@pytest.fixture(scope="module")
def rows() -> Rows:
    return run(
        "held_before",
        "held_weakly",
        "averages_put_in",
        "hooked_nodes",
        "saved_beside",
        "accumulated_before",
        "asked_of_parts",
        "told_in_the_loop",
        "changed_between",
        "stepped_by_themselves",
        "averaged_beside",  # last: a rank's gather is still waited for then
        worker="own_worker.py",
    )


@pytest.mark.parametrize("how", ["sharded", "columns"])
def test_parameters_held_from_before_have_the_gradients_of_the_parts_in_their_places(
    rows: Rows, how: str
) -> None:
    for row in rows["held_before"]:
        eager, fitted = row[how]["eager"], row[how]["fit"]
        as_planned(fitted.pop("measure"))
        assert fitted == eager
        assert eager["log"][0] != eager["log"][3]


def test_dtensors_that_code_holds_weakly_stay(rows: Rows) -> None:
    for row in rows["held_weakly"]:
        for how, one in row.items():
            assert all(one["seen"])
            assert one["whole"] == rows["held_weakly"][0][how]["whole"]
            as_planned(one["measure"])


def test_an_evaluation_reads_what_was_last_written_to_parameters(rows: Rows) -> None:
    for row in rows["averages_put_in"]:
        assert row["fit"] == row["eager"]
        assert row["stale"]["losses"] != row["eager"]["losses"]


def test_hooks_on_the_nodes_of_distributed_data_parallel_are_refused(rows: Rows) -> None:
    for row in rows["hooked_nodes"]:
        assert len(row) == 2
        assert all("on the node that accumulates the gradient" in text for text in row)


def test_checkpoints_are_saved_from_a_thread_while_steps_send(rows: Rows) -> None:
    """Eager training over the same group hangs, or its processes are aborted by gloo."""
    for row in rows["saved_beside"]:
        for one in row.values():
            assert one["saved"] == one["then"] != one["moved"]


def test_gradients_from_before_stay(rows: Rows) -> None:
    for row in rows["accumulated_before"]:
        assert "while '0.weight' has a gradient" in row["refused"]["text"]


def test_what_is_asked_of_gradients_in_parts_is_answered_of_all_of_them_or_refused(rows: Rows) -> None:
    for row in rows["asked_of_parts"]:
        assert row["fit"] == row["eager"]
        assert len(row["plain"]) == 20
        for text in row["plain"].values():
            assert "of which this rank has a part" in text
            assert "clip_norm=" in text
        assert "it is averaged over all of them" in row["averaged by hand"]["all_reduce"]
        assert row["by row"][0] == [0.0] * 3


def test_loops_go_on_telling_fully_shard_when_to_gather_and_not_what_to_compute(rows: Rows) -> None:
    for row in rows["told_in_the_loop"]:
        assert row["fit"] == row["eager"]
        assert (
            "set_gradient_divide_factor of a model that tightship.fit has taken over"
            in row["refused"]["text"]
        )


def test_layers_that_are_trained_later_are_averaged(rows: Rows) -> None:
    first, second = rows["changed_between"]
    assert first["moved"]
    for how in ("replicated", "shard", "fully_shard"):
        assert first["thawed"][how][0] == first["thawed"]["replicated"][0]
        assert first["thawed"][how][1:] == second["thawed"][how][1:] == first["thawed"]["replicated"][1:]


def test_layers_that_come_later_are_averaged_where_ranks_have_the_same_or_refused(rows: Rows) -> None:
    first, second = (row["added"] for row in rows["changed_between"])
    assert first["replicated"] == second["replicated"]
    assert not any(first["replicated"][0])
    for texts in (first["different"][0], second["different"][0]):
        assert all("different parameters that have come to the model since fit" in text for text in texts)
    for texts in (first["shard"][0], second["shard"][0]):
        assert all(
            "the parameter '14.weight', which has come to the model since fit" in text for text in texts
        )


def test_parts_that_meet_whole_tensors_from_before_fit_are_whole(rows: Rows) -> None:
    """Averages of weights, written in several ways, and swapped in to evaluate; with as many rows as ranks a part
    would broadcast."""
    for row in rows["averaged_beside"]:
        assert row["shard"]["averages"] == row["eager"]["averages"]
        assert row["shard"]["evaluated"] == row["eager"]["evaluated"]
        assert row["shard"]["kinds"] == row["eager"]["kinds"] == ["Parameter", "Tensor"]
        first, second = row["optimizer"]
        assert first == second
        assert "outside of a step" in row["alone"]["text"], row["alone"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("sends", "its step sends to other ranks by itself"),
        ("whole rows", "as eager does; or use an optimizer that"),
    ],
)
def test_optimizers_that_are_refused_step_by_themselves_as_is_said(rows: Rows, how: str, words: str) -> None:
    for row in rows["stepped_by_themselves"]:
        assert words in row[how]["refused"]
        assert row[how]["fit"] == row[how]["eager"]
