"""Graphs of torch.compile that ranks run together: where one cannot, all say so in seconds; else none waits."""

from __future__ import annotations

from typing import Any

import pytest

from support.ranks import Rows, run, seconds_to_error

MODES = ("exact", pytest.param("compiled", marks=pytest.mark.slow))
KINDS = {
    "infeasible": ("budget of 1.00 KiB", "Infeasible"),
    "capture": ("injected", "RuntimeError"),
    "option": ("unknown option 'bugdet'", "BadInput"),
    "version": ("tightship 0.0.1", ""),
    "shapes": ("collectives", ""),
}


def ran(scenario: str) -> Rows:
    return run(scenario, worker="graph_worker.py", most=900)


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_cannot_compile_its_graph_ends_all_with_one_error(mode: str) -> None:
    """Infeasible, an error in capture, an option, a version, sizes of what is sent: with each way to train in
    parallel."""
    first, second = ran(f"failing_{mode}")[f"failing_{mode}"]
    assert len(first) == len(second) == 21
    for how, one in first.items():
        kind, errors = how.partition(", ")[2], (one["first"], second[how]["first"])
        if kind == "infeasible everywhere":
            assert [e["type"] for e in errors] == ["Infeasible"] * 2, how
            continue
        assert [e["type"] for e in errors] == ["PeerFailed"] * 2, (how, errors)
        assert errors[0]["text"] == errors[1]["text"], how
        assert "rank" in errors[0]["text"]
        assert KINDS[kind][0] in errors[0]["text"], how
        assert one["again"]["text"] == errors[0]["text"], how  # and so it stays
        together(errors)


def together(errors: Any) -> None:
    """Both ranks end at the same time: they began together."""
    assert abs(errors[0]["at"] - errors[1]["at"]) < 5


@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_compile_apart_do_not_wait_for_one_another(mode: str) -> None:
    for row in ran(f"apart_{mode}")[f"apart_{mode}"]:
        assert row["losses"] == pytest.approx(row["eager"], rel=1e-5)
        if mode == "exact":
            assert (row["losses"], row["digest"]) == (row["eager"], row["eager digest"])
            assert max(row["seconds"][k] for k in ("1", "3")) < 2
            assert row["seconds"]["2"] < 10  # one compiles again, the other has gone on


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_fails_inside_of_a_graph_ends_those_that_wait_in_its_collectives(mode: str) -> None:
    first, second = ran(f"in_the_middle_{mode}")[f"in_the_middle_{mode}"]
    for row in (first, second):
        assert all(measured == planned for measured, planned in row["bytes"])  # nothing stays while one waits
    assert first["type"] == "PeerFailed"
    assert "rank 1" in first["text"]
    assert second["type"] != ""
    assert seconds_to_error(first, second) < 5


def test_a_rank_that_fails_to_compile_again_by_itself_ends_those_that_wait_inside_of_the_graph() -> None:
    first, second = ran("alone")["alone"]
    assert first["type"] == "PeerFailed"
    assert "rank 1: RuntimeError: injected" in first["text"]
    assert (second["type"], second["text"]) == ("RuntimeError", "injected")
    assert seconds_to_error(first, second) < 5


def test_a_rank_asks_nothing_of_the_store_until_another_rings() -> None:
    first, second = ran("listening")["listening"]
    for row in (first, second):
        assert row["asked"] <= 1  # it waits
        assert row["ended"]
    assert first["heard"] == [[1, "code.py:1", 0, "injected"]]
    assert first["seconds"] < 1
    assert second["heard"] == []


def test_a_budget_is_of_a_ranks_own_parts() -> None:
    """Not of the tensors that they are parts of."""
    for row in ran("own_parts")["own_parts"]:
        assert row["0"] == row["1"]


def test_what_fully_shard_gathers_and_sends_counts_within_the_budget() -> None:
    """No more is in memory than was planned for the rank's step, and not much less; bits are eager's."""
    for row in ran("gathered")["gathered"]:
        for how in ("gathered again", "stays", "bfloat16"):
            eager = row[how].pop("eager")
            for budget, one in row[how].items():
                assert (one["losses"], one["parts"]) == (eager["losses"], eager["parts"]), (how, budget)
                for planned, measured in one["bytes"]:
                    assert measured <= planned <= 1.3 * measured, (how, budget)
                    assert one["budget"] is None or planned <= one["budget"]
        again = row["gathered again"]
        assert again["90%"]["budget"] < again["None"]["bytes"][0][0]
        assert row["unsent"]["type"] == "Infeasible"
        assert "fully_shard's hooks hold more than when this was planned" in row["unsent"]["text"]
        assert row["unsent, with room"]["type"] == "", row["unsent, with room"]


def test_what_fully_shard_gathers_and_sends_counts_in_compiled_mode() -> None:
    for row in ran("gathered_compiled")["gathered_compiled"]:
        for budget in ("None", "95%"):
            assert row[budget]["losses"] == pytest.approx(row["eager"]["losses"], rel=1e-4)
            for planned, measured in row[budget]["bytes"]:
                assert measured <= planned <= 1.3 * measured
