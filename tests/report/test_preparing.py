"""What is said while a step is prepared, and where: a line on a terminal, otherwise the log."""

import contextlib
import io
import logging
import re
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

import tightship
from tightship.execute.fit import fit
from tightship.report import progress
from tightship.report.progress import Preparing


class Terminal(io.StringIO):
    def isatty(self):
        return True


def until(true, seconds=20.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def arguments(rows=8):
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, lambda m, x: m(x).mean(), torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(rows, 16)


class Heard:
    """Which stages there were, innermost ones as they begin."""

    def __init__(self):
        self.stages, self.ops, self.open = [], [], 0

    @contextlib.contextmanager
    def stage(self, what, step_time=0.0):
        if self.stages[-1:] != [what]:
            self.stages.append(what)
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def measured(self, count, of):
        self.ops.append((count, of))

    def planning(self, peak, extra, met):
        return False


IN_ORDER = ["capturing", "measuring", "planning", "verifying"]


def test_stages_come_in_their_order_for_each_kind_that_is_new_and_for_no_other():
    heard = Heard()
    step = fit(*arguments(), "100%", progress=heard)
    count = len(step.graph.ops)
    assert heard.stages == IN_ORDER and heard.ops == [(k + 1, count) for k in range(count)]
    step(torch.randn(8, 16))
    assert heard.stages == IN_ORDER
    step(torch.randn(4, 16))
    assert heard.stages == IN_ORDER * 2 and heard.open == 0


def test_each_part_is_heard_of():
    heard = Heard()
    fit(*arguments(), "100%", progress=heard, accumulate=2)
    assert heard.stages[:2] == IN_ORDER[:2] and heard.stages.count("planning") == 3


def test_an_error_ends_it():
    heard = Heard()
    with pytest.raises(tightship.Infeasible):
        fit(*arguments(), 10, progress=heard)
    assert heard.open == 0


def test_where_nobody_looks_no_thread_is_started(monkeypatch, capsys):
    monkeypatch.setattr(threading, "Thread", None)
    tightship.fit(*arguments(), "100%")(torch.randn(4, 16))
    tightship.infer(arguments()[0], torch.randn(4, 16))
    assert capsys.readouterr() == ("", "")


def test_progress_off_is_off(monkeypatch):
    monkeypatch.setattr(progress, "Preparing", None)
    tightship.fit(*arguments(), "100%", progress=False)
    tightship.infer(arguments()[0], torch.randn(4, 16), progress=False)


def test_without_a_terminal_the_log_says_it(caplog, capsys):
    caplog.set_level(logging.INFO, "tightship")
    said = Preparing(after=0.0, every=60.0)
    with said.stage("capturing"):
        until(lambda: caplog.messages)
        with said.stage("capturing"), said.stage("measuring"):
            said.measured(3, 7)
        with said.stage("planning", 1.0):
            said.planning(1 << 20, 0.25, True)
    assert [re.sub(r" \(after .*\)", "", m) for m in caplog.messages] == [
        f"preparing: {what}" for what in ("capturing", "measuring", "planning")
    ]
    assert {r.levelname for r in caplog.records} == {"INFO"} and capsys.readouterr() == ("", "")
    with said.stage("capturing"):
        until(lambda: len(caplog.messages) == 4)


def test_what_takes_long_is_said_again_with_how_far_it_is(caplog):
    caplog.set_level(logging.INFO, "tightship")
    said = Preparing(after=0.0, every=0.01)
    with said.stage("measuring"):
        said.measured(3, 7)
        until(lambda: len(caplog.messages) > 3)
    assert caplog.messages[-1].startswith("preparing: measuring, 3 of 7 ops (after ")
    said = Preparing(after=60.0)
    count = len(caplog.messages)
    with said.stage("measuring"), said.stage("planning"):
        pass
    assert len(caplog.messages) == count


def test_on_a_terminal_a_line_says_it_and_goes(monkeypatch, capsys):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    said, out = Preparing(after=0.0), sys.stdout
    with said.stage("capturing"):
        until(lambda: said._line is not None)
        assert sys.stderr is shown and sys.stdout is out  # what the program writes is left alone
        with said.stage("planning", 1.0):
            said.planning(1 << 20, 0.25, True)
            said._line._live.refresh()
    text = shown.getvalue()
    assert "capturing" in text and "planning" in text and "time +25.0 % · peak 1.00 MiB" in text
    assert said._line is None and text.rstrip().endswith("\x1b[2K")  # the line is taken away
    assert capsys.readouterr().out == ""


def test_streams_that_are_closed_or_no_streams_disturb_nothing(monkeypatch):
    closed = Terminal()
    closed.close()
    for stream in (closed, None, object()):
        monkeypatch.setattr(sys, "stderr", stream)
        with Preparing(after=0.0).stage("capturing"):
            pass


def test_a_terminal_that_is_closed_meanwhile_disturbs_nothing(monkeypatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    said = Preparing(after=0.0)
    with said.stage("capturing"):
        until(lambda: said._line is not None)
        shown.close()
        with said.stage("planning"):
            said.planning(1, 0.0, True)
            said._line._live.refresh()


FIRST_IN_A_PROCESS = """
import random
import numpy, torch
import tightship

def states():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), states()
step = tightship.fit(model, lambda m, x: m(x).mean(), optimizer, torch.ones(3, 4), "100%", cache=None)
assert states() == before, "fit"
step(torch.ones(3, 4))
import tightship.report.text
assert step.measure()["misses"] == 0
assert states() == before, "a look at it"
"""


def test_the_first_call_in_a_process_draws_no_random_numbers():
    """Libraries that it loads may: rich does."""
    done = subprocess.run([sys.executable, "-c", FIRST_IN_A_PROCESS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]
