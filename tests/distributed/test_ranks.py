"""Several ranks: the same budget and bits on each, and one end for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tightship
from support.ranks import Rows, as_planned, asked, run, seconds_to_error
from tightship.errors import BadInput
from tightship.frontends.torch.collectives import messages

TOGETHER = (
    "ddp", "whole_40", "sharded_40", "infeasible", "raising_code", "other_rows", "other_models", "other_parameters",
    "hand_made", "state_dicts", "refused", "whole_each", "sharded_each", "whole_streamed", "taught", "seen_by_a_mode",
    "failing_op",
)  # fmt: skip


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Rows:
    return run(*asked(request, *TOGETHER))


def test_gathers_begin_ahead_of_where_they_are_read_and_change_neither_bits_nor_bytes(rows: Rows) -> None:
    for mine, ddp in zip(rows["sharded_each"], rows["ddp"], strict=True):
        assert mine["begun ahead"] > 3
        assert mine["losses"] == ddp["losses"]
        assert mine["digest"] == ddp["digest"]
        as_planned(mine["measure"])


@pytest.mark.parametrize("how", ["whole_40", "sharded_40"])
def test_losses_and_parameters_are_those_of_ddp(rows: Rows, how: str) -> None:
    for mine, ddp in zip(rows[how], rows["ddp"], strict=True):
        assert mine["losses"] == ddp["losses"]
        assert mine["digest"] == ddp["digest"]


@pytest.mark.parametrize("how", ["whole_40", "sharded_40"])
def test_every_rank_runs_one_plan_and_measures_what_was_planned(rows: Rows, how: str) -> None:
    a, b = rows[how]
    assert a["plan"] == b["plan"]
    assert a["recomputed"] > 0
    assert a["notes"] == []
    for row in (a, b):
        as_planned(row["measure"])


def test_a_rank_with_shards_has_half_of_the_static_set_and_gathers_again(rows: Rows) -> None:
    sharded, whole = rows["sharded_40"][0], rows["whole_40"][0]
    assert sharded["measure"]["static"] < 0.6 * whole["measure"]["static"]
    assert sharded["gathered again"] > 0


@pytest.mark.parametrize("how", ["whole_40", "sharded_40"])
def test_later_steps_are_not_captured_again(rows: Rows, how: str) -> None:
    assert [row["captured again"] for row in rows[how]] == [0, 0]


@pytest.mark.parametrize("how", ["whole", "sharded"])
def test_neighbors_go_as_one_message_with_the_same_bits(rows: Rows, how: str) -> None:
    for together, each in zip(rows[f"{how}_40"], rows[f"{how}_each"], strict=True):
        assert together["losses"] == each["losses"]
        assert together["digest"] == each["digest"]
        assert together["collectives"] < 0.8 * each["collectives"]


def test_steps_that_run_in_eager_for_once_average_gradients_on_all_ranks_or_none(rows: Rows) -> None:
    for row, ddp in zip(rows["seen_by_a_mode"], rows["ddp"], strict=True):
        assert row["losses"] == ddp["losses"]
        assert row["digest"] == ddp["digest"]
        assert row["alone"]["type"] == "PeerFailed"
    assert seconds_to_error(*(row["alone"] for row in rows["seen_by_a_mode"])) < 5


def test_a_copy_of_a_model_in_shards_is_read_as_what_it_is(rows: Rows) -> None:
    for row in rows["taught"]:
        assert row["found"] == row["expected"]


@pytest.mark.parametrize("given", [torch.int32, "half"])
def test_gradients_are_averaged_in_a_floating_point_type(given: Any) -> None:
    with pytest.raises(BadInput, match="reduce_dtype= is a floating-point type"):
        tightship.DataParallel(reduce_dtype=given)


def test_messages_are_neighbors_of_one_kind_within_the_bytes_given() -> None:
    sizes = [("a", 40), ("b", 10), ("a", 50), ("a", 20), ("b", 200), ("a", 80)]
    assert messages(sizes, 100) == [[0, 2], [1], [3, 5], [4]]
    assert messages(sizes, 0) == [[0], [1], [2], [3], [4], [5]]
    assert messages(sizes) == messages(sizes, 200)
    assert messages([]) == []


def test_all_ranks_refuse_a_budget_with_the_same_error(rows: Rows) -> None:
    a, b = rows["infeasible"]
    assert a["type"] == b["type"] == "Infeasible"
    assert a["text"] == b["text"]


def test_code_that_fails_on_one_rank_fails_on_all_and_nothing_is_sent(rows: Rows) -> None:
    for row in rows["raising_code"]:
        assert row["error"]["type"] == "PeerFailed"
        assert "rank 1: ValueError: three is one too many" in row["error"]["text"]
        assert row["apart"]["type"] == "PeerFailed"
        assert "rank 1: preparing the step" in row["apart"]["text"]
        assert row["everywhere"]["type"] == "Unsupported"  # the same on all ranks, so that it is just that
        assert row["somewhere"]["type"] == "PeerFailed"
        assert "rank 0: a training step while '0.weight' has a gradient" in row["somewhere"]["text"]
    assert seconds_to_error(*(row["error"] for row in rows["raising_code"])) < 5
    assert len({row["somewhere"]["text"] for row in rows["raising_code"]}) == 1
    assert rows["raising_code"][0]["losses"] == rows["ddp"][0]["losses"]


def test_another_number_of_rows_on_one_rank_keeps_the_sequence(rows: Rows) -> None:
    for row in rows["other_rows"]:
        as_planned(row["measure"])
    assert [row["kinds"] for row in rows["other_rows"]] == [2, 2]


@pytest.mark.parametrize("how", ["other_models", "other_parameters"])
def test_steps_that_do_not_match_are_refused_before_anything_is_sent(rows: Rows, how: str) -> None:
    a, b = rows[how]
    assert a["type"] == b["type"] == "PeerFailed"
    assert a["text"] == b["text"]
    assert "rank 1" in a["text"]


def test_what_leaves_memory_between_uses_is_told_and_changes_no_bits(rows: Rows) -> None:
    a, b = rows["whole_streamed"]
    assert a["plan"] == b["plan"]
    assert a["parameters"] == b["parameters"]
    for mine, ddp in zip((a, b), rows["ddp"], strict=True):
        assert mine["losses"] == ddp["losses"]
        assert mine["digest"] == ddp["digest"]
        assert any(note.startswith("streamed: ") for note in mine["notes"])
        as_planned(mine["measure"])
        as_planned(mine["kinds"])


@pytest.mark.slow
def test_an_optimizer_of_ones_own_has_parts_where_it_treats_elements_one_by_one() -> None:
    for row in run("own_optimizer")["own_optimizer"]:
        for how in ("sharded", "fully_shard"):
            assert row[how] == row["ddp"]
            as_planned(row[f"{how} measure"])
        assert row["sharded two"] == row["ddp two"]
        as_planned(row["two"]["measure"])
        assert any("parameters of Muon stay whole" in note for note in row["two"]["notes"])
        assert row["normed"]["type"] == "Unsupported"
        assert "norm does not go element by element" in row["normed"]["text"]


@pytest.mark.parametrize("how", ["DTensor", "Adafactor", "streamed"])
def test_what_does_not_go_together_with_shards_is_refused_with_what_to_do(rows: Rows, how: str) -> None:
    for row in rows["refused"]:
        assert row[how]["type"] == "Unsupported"
        assert "DataParallel(" in row[how]["text"]


def test_collectives_in_a_model_are_planned_and_measured(rows: Rows) -> None:
    for row in rows["hand_made"]:
        for budget in ("100%", "static+50%"):
            assert row[budget][:2] == row[""]
            as_planned(row[budget][2])


def test_state_dicts_have_the_names_of_the_model_and_go_on_with_the_same_bits(rows: Rows) -> None:
    for row in rows["state_dicts"]:
        for shard in ("False", "True"):
            assert row[shard]["again"] == row[shard]["ahead"]
            assert row[shard]["names"] == row["names"]
        assert row["True"]["kinds"] == ["DTensor"]


def test_an_op_that_fails_on_one_rank_ends_the_step_on_all(rows: Rows) -> None:
    for row in rows["failing_op"]:
        for error in (row["error"], row["later"]):
            assert error["type"] == "PeerFailed"
            assert "rank 1" in error["text"]
            assert "cholesky" in error["text"]
    for name in ("error", "later"):
        assert seconds_to_error(*(row[name] for row in rows["failing_op"])) < 5


def test_a_program_for_several_ranks_trains_on_one_as_in_eager() -> None:
    (row,) = run("one", ranks=1, ends=(0,))["one"]
    for how in ("in DDP", "replicated", "sharded"):
        assert row[how]["losses"] == row["eager"]["losses"]
        assert row[how]["digest"] == row["eager"]["digest"]
    for how in ("replicated", "sharded"):
        assert row[how]["measure"]["measured_peak"] == row[how]["measure"]["planned_peak"]


def test_a_killed_rank_ends_the_step_on_all() -> None:
    (row,) = run("killed", ends=(0, 9))["killed"]
    assert row["type"] == "PeerFailed"
    assert seconds_to_error(row) < 5


@pytest.mark.slow
def test_more_budgets_and_steps_in_parts() -> None:
    rows = run("ddp", "whole_100", "sharded_100", "in_parts", "checkpoints")
    for how in ("whole_100", "sharded_100"):
        for mine, ddp in zip(rows[how], rows["ddp"], strict=True):
            assert (mine["losses"], mine["digest"]) == (ddp["losses"], ddp["digest"])
            as_planned(mine["measure"])
    assert all(row and all(row.values()) for row in rows["checkpoints"])
    for row in rows["in_parts"]:
        assert row["digest"] == row["expected"]
        as_planned(row["measure"])
        assert row["measure"]["between"] > row["measure"]["static"]  # messages that average gradients


@pytest.mark.slow
def test_three_ranks_and_parameters_that_do_not_divide() -> None:
    rows = run("whole_40", "sharded_40", ranks=3, ends=(0, 0, 0))
    for how in ("whole_40", "sharded_40"):
        for row in rows[how]:
            as_planned(row["measure"])
    for whole, sharded in zip(rows["whole_40"], rows["sharded_40"], strict=True):
        assert whole["losses"] == pytest.approx(sharded["losses"], rel=1e-5)
