"""Compiled steps of several ranks: each within its budget to the byte, by one decision, with collectives inside."""

from __future__ import annotations

import pytest

from support.ranks import Rows, run, seconds_to_error

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows() -> Rows:
    return run(
        "ways",
        "in_parts",
        "other_rows",
        "infeasible",
        "other_first_rows",
        "hand_made",
        "not_compiled",
        worker="compiled_worker.py",
        most=900,
    )


def test_compiled_steps_train_as_eager_does_and_measure_what_was_planned(rows: Rows) -> None:
    for row in rows["ways"]:
        eager = row.pop("eager")
        assert len(row) == 3
        for how, found in row.items():
            assert found["losses"] == pytest.approx(eager, rel=1e-4), how
            measure = found["measure"]
            assert measure["measured_peak"] == measure["planned_peak"] <= measure["budget"], how
            assert measure["misses"] == 0
        assert row["shard static+60%"]["recomputed"] > 0
    for how in ("ddp 100%", "shard static+60%", "fully_shard 100%"):
        assert len({row[how]["digest"] for row in rows["ways"]}) == 1


def test_gradients_of_several_batches_are_averaged_between_compiled_passes(rows: Rows) -> None:
    for row in rows["in_parts"]:
        assert row["compiled"] == pytest.approx(row["exact"], rel=1e-4)
    assert len({row["digest"] for row in rows["in_parts"]}) == 1


def test_a_shorter_batch_on_one_rank_sends_as_the_others_do(rows: Rows) -> None:
    for how in ("ddp", "shard"):
        assert len({row[how]["digest"] for row in rows["other_rows"]}) == 1
        for row in rows["other_rows"]:
            measure = row[how]["measure"]
            assert measure["measured_peak"] == measure["planned_peak"] <= measure["budget"], how
            assert measure["misses"] == 0


def test_a_budget_that_nothing_meets_is_the_same_error_everywhere(rows: Rows) -> None:
    first, second = rows["infeasible"]
    assert first["type"] == second["type"] == "Infeasible"
    assert first["text"] == second["text"]


def test_a_percentage_of_other_steps_is_refused_on_all(rows: Rows) -> None:
    for row in rows["other_first_rows"]:
        assert row["type"] == "PeerFailed"
        assert "give bytes" in row["text"]


def test_collectives_of_ones_own_are_agreed_on(rows: Rows) -> None:
    for row in rows["hand_made"]:
        assert row["False"]["type"] == row["True"]["type"] == ""
        assert row["loss"] == pytest.approx(row["eager"], rel=1e-5)
        assert row["alone"] == row["eager"]
        (said,) = row["said"]
        assert "is not compiled and runs op by op" in said
        assert "independent" in said


def test_a_step_that_inductor_does_not_compile_runs_op_by_op_on_all_ranks(rows: Rows) -> None:
    for row in rows["not_compiled"]:
        for how in ("ddp", "shard"):
            found = row[how]
            assert found["losses"][:3] == row["eager"]["losses"][:3]
            assert found["losses"][3:] == pytest.approx(row["eager"]["losses"][3:], rel=1e-4)
            assert found["measure"]["measured_peak"] == found["measure"]["planned_peak"]
            assert found["measure"]["planned_peak"] <= found["measure"]["budget"]
            (said,) = found["said"]
            assert "is not compiled and runs op by op, as in exact mode, within the budget" in said
        assert "compiling the step in compiled mode" in row["strict"]["text"]


def test_a_kernel_that_fails_ends_all() -> None:
    found = run("failing_kernel", worker="compiled_worker.py", most=900)
    for row in found["failing_kernel"]:
        assert row["error"]["type"] == "PeerFailed"
        assert "rank 1" in row["error"]["text"]
    assert seconds_to_error(*(row["error"] for row in found["failing_kernel"])) < 5


def test_ranks_that_compute_together_send_in_one_order_whatever_each_has_compiled() -> None:
    found = run("by_the_backend", worker="compiled_worker.py", most=900)
    for row in found["by_the_backend"]:
        wanted = row.pop("inductor")
        for how, got in row.items():
            assert (got["losses"], got["digest"]) == (wanted["losses"], wanted["digest"]), how
            measured, planned, budget = got["bytes"]
            assert measured == planned <= budget, how
            assert got["misses"] == 0
            assert not any("eager" in n for n in got["notes"])
    one, two = (row["cold"] for row in found["by_the_backend"])
    assert one["bytes"] != two["bytes"]
    assert two["recomputed"] > one["recomputed"]
