"""Signals and errors that come in the middle of a step: all parameters are updated or none, or it is said."""

import copy
import signal
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.state import differences, snapshot
from tightship.execute.fit import fit


def parts():
    torch.manual_seed(0)
    layers = [m for _ in range(3) for m in (nn.Linear(16, 16), nn.Dropout(0.1), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters(), 0.05)


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(count=4):
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(32, 16, generator=draw), torch.randint(4, (32,), generator=draw)) for _ in range(count)
    ]


def planned(model, optimizer, **options):
    options = {"cache": None, "seconds_per_op": 0.0, "seconds": 1.0, "progress": None} | options
    return fit(model, loss_of, optimizer, batches()[0], **options)


def code_of(step, part=""):
    (executor,) = [v.executor for v in step._variants if v.part == part]
    return executor._code.instructions, executor.program.graph.ops


def updates(step, part=""):
    code, ops = code_of(step, part)
    return [k for k, i in enumerate(code) if i.op >= 0 and ops[i.op].phase == "update"]


def before(step, at, act, part=""):
    """``act`` is done once, before an instruction of the step."""
    code, _ = code_of(step, part)
    known = code[at]

    def run(env):
        code[at] = known
        act()
        known.run(env)

    code[at] = replace(known, run=run)


def interrupt():
    signal.raise_signal(signal.SIGINT)


def eager(model, optimizer, batch):
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def bits(model, optimizer):
    """All that a step leaves behind but what each library keeps for itself."""
    return {n: x for n, x in snapshot(model, optimizer).items() if n != "attributes"}


@pytest.fixture(autouse=True)
def handlers():
    known = {n: signal.getsignal(n) for n in signal.valid_signals()}
    yield
    assert {n: signal.getsignal(n) for n in signal.valid_signals()} == known


@pytest.mark.parametrize("where", ["second", "last", "behind"])
def test_an_interrupt_among_updates_is_heard_when_all_are_done(where):
    model, optimizer = parts()
    step = planned(model, optimizer)
    twin, theirs = parts()
    torch.manual_seed(2)
    eager(twin, theirs, batches()[0])
    eager(twin, theirs, batches()[1])
    expected = bits(twin, theirs)
    torch.manual_seed(2)
    step(batches()[0])
    among = updates(step)
    assert len(among) > 2
    at = {"second": among[1], "last": among[-1], "behind": len(code_of(step)[0]) - 1}[where]
    before(step, at, interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        step(batches()[1])
    assert not getattr(caught.value, "__notes__", [])
    assert differences(bits(model, optimizer), expected) == []
    torch.manual_seed(3)
    ours = step(batches()[2])
    torch.manual_seed(3)
    assert torch.equal(ours, eager(twin, theirs, batches()[2]))


def test_an_interrupt_before_the_first_update_is_heard_at_once():
    model, optimizer = parts()
    step = planned(model, optimizer)
    step(batches()[0])
    known = copy.deepcopy(model.state_dict())
    before(step, updates(step)[0] - 2, interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        step(batches()[1])
    assert not getattr(caught.value, "__notes__", [])
    assert differences(dict(model.state_dict()), dict(known)) == []


def test_a_second_interrupt_is_heard_at_once_and_what_is_left_is_said():
    model, optimizer = parts()
    step = planned(model, optimizer)
    step(batches()[0])
    before(step, updates(step)[1], interrupt)
    before(step, updates(step)[2], interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        step(batches()[1])
    assert "others not" in caught.value.__notes__[0]
    step(batches()[2])


@pytest.mark.parametrize("late", [True, False], ids=["among updates", "before"])
def test_an_error_among_updates_says_that_some_parameters_are_updated(late):
    model, optimizer = parts()
    step = planned(model, optimizer)
    step(batches()[0])
    known = copy.deepcopy(model.state_dict())

    def fail():
        raise OSError("no space left on device")

    before(step, updates(step)[1] if late else updates(step)[0] - 2, fail)
    with pytest.raises(OSError, match="no space") as caught:
        step(batches()[1])
    changed = bool(differences(dict(model.state_dict()), dict(known)))
    assert changed == late == bool(getattr(caught.value, "__notes__", []))


CLUSTERS_TELL = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGALRM, *CLUSTERS_TELL])
def test_handlers_of_ones_own_are_called_when_the_step_is_over(number):
    model, optimizer = parts()
    step = planned(model, optimizer)
    heard = []
    known = signal.signal(number, lambda *_: heard.append(len(among)))
    try:
        among = updates(step)
        before(step, among[1], lambda: signal.raise_signal(number))
        before(step, among[-1], lambda: among.clear())
        step(batches()[0])
        assert heard == [0]
    finally:
        signal.signal(number, known)


def test_all_signals_that_came_are_heard_though_a_handler_raises():
    model, optimizer = parts()
    step = planned(model, optimizer)
    heard = []
    known = signal.signal(signal.SIGTERM, lambda *_: heard.append(True))
    try:
        before(step, updates(step)[1], interrupt)
        before(step, updates(step)[2], lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(KeyboardInterrupt):
            step(batches()[0])
        assert heard == [True]
    finally:
        signal.signal(signal.SIGTERM, known)


def test_a_second_signal_of_a_kind_leaves_the_others_held():
    model, optimizer = parts()
    step = planned(model, optimizer)
    heard = []
    known = signal.signal(signal.SIGTERM, lambda *_: heard.append(len(among)))
    try:
        among = updates(step)
        for at in (1, 2):
            before(step, among[at], lambda: signal.raise_signal(signal.SIGTERM))
        before(step, among[3], interrupt)
        before(step, among[-1], lambda: among.clear())
        with pytest.raises(KeyboardInterrupt) as caught:
            step(batches()[0])
        assert heard[0] > 0 and not among and not getattr(caught.value, "__notes__", [])
    finally:
        signal.signal(signal.SIGTERM, known)


def test_what_the_system_does_with_a_signal_is_left_to_it():
    model, optimizer = parts()
    step = planned(model, optimizer)
    known = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        before(step, updates(step)[1], interrupt)
        step(batches()[0])
    finally:
        signal.signal(signal.SIGINT, known)


def test_steps_in_another_thread_leave_handlers_alone():
    model, optimizer = parts()
    step = planned(model, optimizer)
    seen = []
    before(step, updates(step)[1], lambda: seen.append(signal.getsignal(signal.SIGINT)))
    thread = threading.Thread(target=lambda: seen.append(step(batches()[0])))
    thread.start()
    thread.join()
    assert seen[0] is signal.getsignal(signal.SIGINT)
    assert len(seen) == 2


def test_an_update_by_itself_is_done_as_a_whole():
    model, optimizer = parts()
    step = planned(model, optimizer, split=True)
    twin, theirs = parts()
    torch.manual_seed(2)
    for batch in batches()[:2]:
        eager(twin, theirs, batch)
    expected = bits(twin, theirs)
    torch.manual_seed(2)
    step.backward(batches()[0])
    step.update()
    optimizer.zero_grad()
    step.backward(batches()[1])
    among = updates(step, "update")
    before(step, among[min(1, len(among) - 1)], interrupt, "update")
    with pytest.raises(KeyboardInterrupt):
        step.update()
    optimizer.zero_grad()
    assert differences(bits(model, optimizer), expected) == []


@pytest.mark.parametrize("where", ["clipping", "planning the update", "updating"])
def test_after_an_update_that_failed_batches_are_counted_anew(where, monkeypatch):
    """Eager's loop goes on with `zero_grad` and the next batches, every second of which updates."""
    model, optimizer = parts()
    step = planned(model, optimizer, accumulate=2, clip_norm=0.5)
    for batch in batches()[:2]:
        step(batch)

    def fail(*_):
        raise OSError("interrupted")

    with monkeypatch.context() as patch:
        if where == "updating":
            before(step, 0, fail, "update")
        else:
            patch.setattr(step, "_between" if where == "clipping" else "_planned_update", fail)
        step(batches()[2])
        with pytest.raises(OSError, match="interrupted"):
            step(batches()[3])
    optimizer.zero_grad()
    weight = next(model.parameters())
    changed = []
    for batch in batches():
        known = weight.detach().clone()
        step(batch)
        changed.append(not torch.equal(known, weight))
    assert changed == [False, True] * 2


def test_zero_grad_in_the_middle_of_an_accumulation_begins_anew():
    """As a loop does that was interrupted behind a first batch, and goes on with the first batch of its group."""
    model, optimizer = parts()
    step = planned(model, optimizer, accumulate=2)
    twin, theirs = parts()
    step(batches()[0])
    optimizer.zero_grad()
    torch.manual_seed(4)
    ours = [step(batch) for batch in batches()]
    torch.manual_seed(4)
    for k, batch in enumerate(batches()):
        loss = loss_of(twin, batch)
        loss.backward()
        assert torch.equal(ours[k], loss.detach())
        if k % 2:
            theirs.step()
            theirs.zero_grad()
    assert differences(bits(model, optimizer), bits(twin, theirs)) == []


@pytest.mark.slow
def test_a_compiled_step_is_done_as_a_whole():
    model, optimizer = parts()
    step = planned(model, optimizer, mode="compiled")
    step(batches()[0])
    (executor,) = [v.executor for v in step._variants]
    call, known = executor._pass.run, [p.detach().clone() for p in model.parameters()]

    def run(*args, **options):
        interrupt()
        return call(*args, **options)

    executor._pass.run = run
    with pytest.raises(KeyboardInterrupt):
        step(batches()[1])
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), known, strict=True))


def test_it_is_said_on_a_terminal_alone(monkeypatch, capfd):
    model, optimizer = parts()
    step = planned(model, optimizer)
    step(batches()[0])
    for terminal in (False, True):
        stream = SimpleNamespace(isatty=lambda t=terminal: t, fileno=lambda: 2)
        monkeypatch.setattr(sys, "stderr", stream)
        before(step, updates(step)[1], interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(batches()[1])
        assert ("finished first" in capfd.readouterr().err) == terminal
