"""Values that are computed once hold no lock meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tightship.cached import cached_property

FORKS = """
import os, signal, threading
from tightship.cached import cached_property

begun, over = threading.Event(), threading.Event()

class Thing:
    @cached_property
    def value(self):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            over.wait()
        return 3

beside = threading.Thread(target=lambda: Thing().value)
beside.start()
begun.wait()
child = os.fork()
if not child:
    signal.alarm(30)
    os._exit(Thing().value)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
over.set()
beside.join()
print(status)
"""
"""A process of its own, as others' threads run where tests do."""


class Thing:
    def __init__(self, number: int) -> None:
        self.number, self.times = number, 0

    @cached_property
    def value(self) -> int:
        """Its number and one."""
        self.times += 1
        return self.number + 1


def test_a_value_is_computed_once_and_may_be_forgotten() -> None:
    thing = Thing(1)
    assert [thing.value, thing.value, thing.times] == [2, 2, 1]
    del thing.value
    assert [thing.value, thing.times] == [2, 2]
    assert Thing.value.__doc__ == "Its number and one."


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_process_forked_while_another_thread_computes_does_not_wait_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("3\n", "")
