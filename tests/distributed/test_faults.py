"""Whatever fails on one rank, and wherever: all ranks raise the same error within seconds, or have been told so."""

from __future__ import annotations

import functools

import pytest
from torch.distributed import TCPStore

from support import ranks as started_ranks
from support.rank_faults import drawn, judged
from support.ranks import seconds_to_error

run = functools.partial(started_ranks.run, worker="fault_worker.py", forked=False)
"""Each rank is a process of its own from its beginning to its end, which is what is looked at."""
SECONDS = 5.0
"""Within which a fault has been heard of on all ranks."""

ENDS = {
    "raised_in_step": ((0, 0), "an op that fails"),
    "no_memory_in_step": ((0, 0), "an op without memory"),
    "interrupted_in_step": ((0, 0), "KeyboardInterrupt"),
    "killed_in_step": ((0, -9), "rank 1: has ended"),
    "store_killed_in_step": ((-9, 0), "rank 0: has ended"),
    "killed_in_capture": ((0, -9), "rank 1: has ended"),
    "killed_in_plan": ((-9, 0), "rank 0: has ended"),
    "done_before_the_others": ((0, 0), "rank 1: has ended"),
}
"""How the processes end, and what those that are left say."""


def test_faults_before_anything_is_sent_are_the_same_error_on_all_ranks_and_leave_steps_as_they_were() -> (
    None
):
    rows = run("mended")["mended"]
    assert len(rows[0]["rows"]) >= 20
    for name, one in rows[0]["rows"].items():
        other = rows[1]["rows"][name]
        assert one["type"] in ("PeerFailed", "Infeasible"), name
        assert (one["type"], one["text"]) == (other["type"], other["text"]), name
        if one["type"] == "PeerFailed":
            assert "rank" in one["text"], name
        assert seconds_to_error(one, other) < SECONDS, name
    for row in rows:
        assert row["whole"] == row["good"][0]


@pytest.mark.slow
@pytest.mark.parametrize("how", list(ENDS))
def test_a_fault_while_ranks_send_ends_the_step_on_all(how: str) -> None:
    ends, words = ENDS[how]
    rows = run(how, ends=ends)[how]
    ended = next((row["ended"] for row in rows if "ended" in row), None)
    left = [row for row in rows if "error" in row and row["error"]["type"] != "KeyboardInterrupt"]
    assert left  # a rank whose user has interrupted it raises just that
    for row in left:
        assert row["error"]["type"] == "PeerFailed"
        assert words in row["error"]["text"]
        assert ended is None or row["error"]["at"] - ended < SECONDS
        if "later" in row:
            assert row["later"]["type"] == "PeerFailed"
    for name in ["later"] if ended is not None else ["error", "later"]:
        if errors := [row[name] for row in left if name in row]:
            assert seconds_to_error(*errors) < SECONDS


def test_a_rank_that_comes_late_to_fit_is_named_once() -> None:
    rows = run("late_for_fit")["late_for_fit"]
    assert [line.split(":")[0] for line in rows[0]] == ["ranks [1] have not called fit for 0 s"]
    assert rows[1] == []


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_and_may_go_on() -> None:
    rows = run("stopped_for_a_while")["stopped_for_a_while"]
    assert [row["error"]["type"] for row in rows] == ["", ""]
    assert [line.split(":")[0] for line in rows[0]["said"]] == ["rank 1"]
    assert "no answer" in rows[0]["said"][0]


@pytest.mark.slow
def test_a_rank_that_is_stopped_for_longer_than_the_process_group_waits_ends_the_step_on_all() -> None:
    name = "stopped_for_longer_than_the_group_waits"
    rows = run(name)[name]
    assert [row["error"]["type"] for row in rows] == ["PeerFailed", "PeerFailed"]
    assert "rank 1: has not answered for 3 s" in rows[0]["error"]["text"]
    assert (
        rows[0]["error"]["seconds"] < rows[1]["error"]["seconds"]
    )  # which goes on, and finds the others gone


def test_ranks_that_are_started_again_with_the_store_of_those_before_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As torchrun does it: addresses of ranks that have ended lie there, and why they have."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("LAUNCHERS_PORT", str(store.port))
    rows = run("killed_under_a_launcher", ends=(0, -9))
    assert "rank 1: has ended" in rows["killed_under_a_launcher"][0]["error"]["text"]
    for row in run("started_again")["started_again"]:
        assert len(row["losses"]) > 1
        assert row["error"]["type"] == ""


DRAWN = ((2, 1, 7, 8, 29), (3,))
"""Of seed 0: what one rank is given and others not, errors before anything is sent, an error before the first op."""


@pytest.mark.parametrize("numbers", DRAWN)
def test_faults_drawn_from_a_seed_end_on_all_ranks_with_one_sentence(numbers: tuple[int, ...]) -> None:
    found = judged(0, [*numbers])
    assert tuple(found) == numbers
    assert {fault: wrong for fault, wrong, _ in found.values() if wrong} == {}


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 4, 5, 15, 24, 33])
def test_drawn_faults_that_end_the_processes(number: int) -> None:
    """Kills, and errors while ranks meet, while they send and behind the last op."""
    assert drawn(0, number).ends
    ((_, wrong, _),) = judged(0, [number]).values()
    assert not wrong


@pytest.mark.slow
def test_no_fit_on_groups_that_wait_for_what_a_failed_step_sent() -> None:
    for row in run("fitted_after_a_failed_step")["fitted_after_a_failed_step"]:
        assert row["error"]["type"] == "PeerFailed"
        assert "half written" in row["error"]["text"]
        assert row["fit"]["type"] == "BadInput"
        assert "start the ranks again" in row["fit"]["text"]
