"""Ctrl-C ends a search and gives back the best so far, verified."""

from __future__ import annotations

import signal

import pytest

from support.chains import chain
from tightship.planners import search
from tightship.planners.default import Interrupted, Options, plan
from tightship.verify import verify


@pytest.fixture(autouse=True)
def interrupts_are_heard():
    """A parent may have told its children to ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("hand_out", [False, True])
def test_the_best_so_far_is_given_back_with_the_interrupt(hand_out: bool) -> None:
    """Where its results leave the arena, the first one that is found has no places within the budget."""
    graph = chain(60)
    heard = []

    def progress(_peak: int, _extra: float, met: bool) -> bool:
        if met and not heard:
            heard.append(1)
            signal.raise_signal(signal.SIGINT)
        return False

    with pytest.raises(KeyboardInterrupt) as end:
        plan(graph, "50%", Options(work=1_000_000_000, seconds=60.0, hand_out=hand_out), progress)
    assert isinstance(end.value, Interrupted) is not hand_out
    if isinstance(end.value, Interrupted):
        assert end.value.plan.met and verify(graph, end.value.plan) == []


def test_without_a_plan_that_fits_there_is_none_to_give_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(problem, limit, *_args):
        problem.archive.stopped = True
        return problem.cost(problem.nothing(), limit)

    info = search.planner("anneal", "evict")
    monkeypatch.setattr(search, "planner", lambda *_: _With(info, interrupted))
    with pytest.raises(KeyboardInterrupt) as end:
        plan(chain(60), "30%", Options(order="given"))
    assert not isinstance(end.value, Interrupted)


class _With:
    def __init__(self, info, found) -> None:
        self.name, self.options, self.plan = info.name, info.options, found
