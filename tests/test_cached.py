"""Values that are computed once hold no lock meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tightship.cached import cached_property


class Thing:
    """Whose value takes as long to compute as it is held up."""

    held = threading.Event()
    begun = threading.Event()

    def __init__(self, number: int, waits: bool = False) -> None:
        self.number, self.waits, self.times = number, waits, 0

    @cached_property
    def value(self) -> int:
        """Its number and one."""
        self.times += 1
        if self.waits:
            self.begun.set()
            self.held.wait(60)
        return self.number + 1


def test_a_value_is_computed_once_and_may_be_forgotten() -> None:
    thing = Thing(1)
    assert [thing.value, thing.value, thing.times] == [2, 2, 1]
    del thing.value
    assert [thing.value, thing.times] == [2, 2]
    assert Thing.value.__doc__ == "Its number and one."


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_process_forked_while_another_thread_computes_does_not_wait_for_it() -> None:
    beside = threading.Thread(target=lambda: Thing(1, waits=True).value)
    beside.start()
    assert Thing.begun.wait(60)
    child = os.fork()
    if not child:
        os._exit(Thing(2).value)
    try:
        end, done, status = time.monotonic() + 20, 0, 0
        while not done and time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if not done:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    finally:
        Thing.held.set()
        beside.join()
    assert (done, os.waitstatus_to_exitcode(status)) == (child, 3)
