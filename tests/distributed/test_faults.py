"""Whatever fails on one rank, and wherever: all ranks raise the same error within seconds, or have been told so."""

from __future__ import annotations

import pytest

from support.ranks import run

SECONDS = 5.0
"""Within which a fault has been heard of on all ranks."""

ENDS = {
    "raised_in_step": ((0, 0), "an op that fails"),
    "no_memory_in_step": ((0, 0), "an op without memory"),
    "interrupted_in_step": ((0, 0), "KeyboardInterrupt"),
    "killed_in_step": ((0, -9), "a rank has ended"),
    "store_killed_in_step": ((-9, 0), "a rank has ended"),
    "killed_in_capture": ((0, -9), "a rank has ended"),
    "killed_in_plan": ((-9, 0), "a rank has ended"),
    "done_before_the_others": ((0, 0), "a rank has ended"),
}
"""How the processes end, and what those that are left say."""


def test_faults_before_anything_is_sent_are_the_same_error_on_all_ranks_and_leave_steps_as_they_were() -> (
    None
):
    rows = run("mended", worker="fault_worker.py")["mended"]
    assert len(rows[0]["rows"]) >= 20
    for name, one in rows[0]["rows"].items():
        other = rows[1]["rows"][name]
        assert one["type"] in ("PeerFailed", "Infeasible"), name
        assert (one["type"], one["text"]) == (other["type"], other["text"]), name
        if one["type"] == "PeerFailed":
            assert "rank" in one["text"], name
        assert max(one["seconds"], other["seconds"]) < SECONDS, name
    for row in rows:
        assert row["whole"] == row["good"][0]


@pytest.mark.slow
@pytest.mark.parametrize("how", list(ENDS))
def test_a_fault_while_ranks_send_ends_the_step_on_all(how: str) -> None:
    ends, words = ENDS[how]
    rows = run(how, ends=ends, worker="fault_worker.py")[how]
    ended = next((row["ended"] for row in rows if "ended" in row), None)
    left = [row for row in rows if "error" in row and row["error"]["type"] != "KeyboardInterrupt"]
    assert left  # a rank whose user has interrupted it raises just that
    for row in left:
        assert row["error"]["type"] == "PeerFailed"
        assert words in row["error"]["text"]
        assert (row["error"]["seconds"] if ended is None else row["error"]["at"] - ended) < SECONDS
        if "later" in row:
            assert row["later"]["type"] == "PeerFailed"
            assert row["later"]["seconds"] < SECONDS
