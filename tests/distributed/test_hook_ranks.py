"""Communication hooks of DistributedDataParallel that do more than average are called as eager calls them."""

from __future__ import annotations

import pytest

from support.ranks import Rows, asked, run


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Rows:
    return run(*asked(request, "called_as_in_eager", "lacks_a_gradient"), worker="hook_worker.py")


def test_hooks_get_the_buckets_that_eager_gives_them_and_leave_its_bits(rows: Rows) -> None:
    for row in rows["called_as_in_eager"]:
        assert len(row) == 13
        for name, one in row.items():
            for what, eager in one["eager"].items():
                assert one["fit"]["row"][what] == eager, (name, what)
            measure = one["fit"]["measure"]
            assert measure["measured_peak"] == max(measure["planned_peak"], measure["between"])
            assert measure["misses"] == 0
        buckets = row["power"]["eager"]["buckets"]
        assert len(buckets) > 8  # made anew behind the first step, or nothing was compared
        assert len(row["not made anew"]["eager"]["buckets"]) != len(buckets)


def test_what_a_hook_keeps_is_said_where_it_is_beyond_the_budget(rows: Rows) -> None:
    for row in rows["called_as_in_eager"]:
        assert row["half"]["fit"]["measure"]["hook"] == 0
        one = row["power"]["fit"]
        assert one["measure"]["hook"] > 0
        above = one["measure"]["planned_peak"] + one["measure"]["hook"] > one["measure"]["budget"]
        assert above == any("powerSGD" in n or "keeps" in n for n in one["notes"][1:])


def test_a_gradient_that_eager_would_wait_for_is_refused_before_anything_is_sent(rows: Rows) -> None:
    for row in rows["lacks_a_gradient"]:
        assert row["type"] == "Unsupported"
        assert "a step without a gradient of '0.bias' (2 in all)" in row["text"]
        assert "half written" not in row["text"]
        assert row["loss"] > 0


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("no_future", "a communication hook returns a torch.futures.Future, got 'NoneType'"),
        ("raises", "rank 1: ArithmeticError: no third step"),
    ],
)
def test_a_hook_that_fails_on_one_rank_ends_all(scenario: str, words: str) -> None:
    errors = [e["text"] for e in run(scenario, worker="hook_worker.py")[scenario]]
    assert len(errors) == 2
    assert all(words in e and "parameters may be half written" in e for e in errors)


def test_a_rank_that_is_killed_in_a_hook_is_named() -> None:
    (row,) = run("killed", worker="hook_worker.py", ends=(0, -9))["killed"]
    assert row["type"] == "PeerFailed"
    assert "rank 1: has ended, or does not answer any more" in row["text"]
