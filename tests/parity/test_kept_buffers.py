"""Tensors that somebody holds when a step puts others in their place: as in eager, they stay what they were."""

from __future__ import annotations

import contextlib
import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tightship
from support.harness import Loop, adam, identical, pairs, refused
from support.models import Stateful
from tightship.execute import replaced, train_variants
from tightship.execute.interpreter import Fallback


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def logged(keep: Any, model: nn.Module | None = None) -> Loop:
    """The step's code keeps ``keep(model)`` of what was there."""
    model, log = model or Stateful(), []

    def loss(net, batch):
        log.append(keep(net))
        return cross_entropy(net, batch)

    return Loop(model, loss, adam(model), watched=lambda: log, steps=6)


@identical(plans=1)
def test_what_the_step_keeps_of_a_buffer_that_it_replaces():
    return logged(lambda net: net.h)


@identical(plans=1, verify_every=2)
def test_a_view_of_a_buffer_that_it_replaces():
    return logged(lambda net: net.h[1:3, ::2])


@identical(plans=1)
def test_now_and_then():
    kept = []

    def seldom(net):
        kept.append(0)
        return net.h if len(kept) % 3 == 0 else 0

    return logged(seldom)


@identical(plans=2)
def test_a_view_now_and_then():
    kept = []

    def seldom(net):
        kept.append(0)
        return net.h.mT if len(kept) % 3 == 0 else 0

    return logged(seldom)


@identical(plans=1, verify_every=2)
def test_a_buffer_that_is_handed_back_as_it_was():
    model, held = Stateful(), []

    def loss(net, batch):
        before = net.h
        return cross_entropy(net, batch), before, net.c

    return Loop(
        model, loss, adam(model), after=lambda _, out: held.append(out), watched=lambda: held, steps=5
    )


@identical(plans=1)
def test_what_the_loop_keeps():
    return _outside(lambda model: model.h)


@identical(plans=1)
def test_a_state_dict():
    return _outside(lambda model: model.state_dict())


@identical(plans=1)
def test_an_array_of_a_buffer():
    return _outside(lambda model: torch.from_numpy(model.h.numpy()))


def _outside(kept: Any) -> Loop:
    model, log = Stateful(), []
    return Loop(
        model,
        cross_entropy,
        adam(model),
        before=lambda _: log.append(kept(model)),
        watched=lambda: log,
        steps=5,
    )


# --- what comes in their place is also somebody's -----------------------------------------------------------------


def _after(do: Any, keep: Any = lambda net: net.h) -> Loop:
    """``keep(model)`` is kept when the code has replaced it; ``do(model)`` follows each second step."""
    model, log = Stateful(), []

    def loss(net, batch):
        out = cross_entropy(net, batch)
        log.append(keep(net))
        return out

    return Loop(
        model, loss, adam(model), watched=lambda: log, steps=6,
        after=lambda k, _: do(model, log) if k % 2 else None,
    )  # fmt: skip


@identical(plans=1)
def test_a_state_that_is_kept_and_set_to_zero_later():
    """In eager, what was kept is the buffer."""
    return _after(lambda model, _log: model.h.zero_())


@identical(plans=1)
def test_what_is_kept_is_written():
    return _after(lambda _model, log: log[-1].mul_(0.5))


@identical(plans=1)
def test_a_part_of_what_is_kept_is_written():
    return _after(lambda _model, log: log[-1].mul_(0.5), keep=lambda net: net.h[2:4])


@identical(plans=1)
def test_what_is_kept_is_read_by_the_next_step():
    model, log = Stateful(), []

    def loss(net, batch):
        past = sum((t.mean() for t in log[-2:]), torch.zeros(()))
        out = cross_entropy(net, batch)
        log.append(net.h)
        return out + 0.0 * out * past

    for _ in range(2):
        log.append(torch.zeros(6, 8))
    return Loop(model, loss, adam(model), watched=lambda: log, steps=6)


# --- buffers that are written, too --------------------------------------------------------------------------------


class Decaying(nn.Module):
    """Writes into its state before it replaces it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("trace", torch.ones(6, 3))
        self.register_buffer("last", torch.zeros(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.trace.mul_(0.9)
        out = self.layer(x) + self.trace
        self.trace, self.last = self.trace + out.detach(), self.trace
        return out + self.last


@identical(plans=1, verify_every=2)
def test_a_buffer_that_is_written_and_replaced():
    return logged(lambda net: (net.trace, net.trace[1], net.last), Decaying())


class Halves(nn.Module):
    """Two states in one storage, of which one is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, both = nn.Linear(4, 3), torch.zeros(12, 3)
        self.register_buffer("a", both[:6])
        self.register_buffer("b", both[3:9])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x) + self.a + self.b
        self.a = out.detach()
        return out


@identical(plans=2)
def test_buffers_that_share_bytes():
    return Loop(model := Halves(), cross_entropy, adam(model), steps=5)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("a", torch.zeros(6, 3))
        self.first = self.a  # an attribute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x) + self.a + self.first
        self.a = self.a + out.detach()
        return out


@identical(plans=2)
def test_a_buffer_that_is_an_attribute_as_well():
    return Loop(model := Tied(), cross_entropy, adam(model), steps=5, watched=lambda: model.first)


@identical(plans=1)
def test_a_buffer_replaced_by_itself_without_a_graph():
    """``h = h.detach()`` lies where it lay."""
    model, log = Decaying(), []

    def loss(net, batch):
        log.append(net.last)
        net.last = net.last.detach()
        net.last.add_(1.0)
        return nn.functional.cross_entropy(net.layer(batch[0]) + net.last, batch[1])

    return Loop(model, loss, adam(model), watched=lambda: log, steps=4)


@pytest.mark.parametrize("always", [True, False])
def test_a_buffer_that_becomes_the_batch(always, measurements):
    """The loader writes all batches to the same place."""

    @identical(plans=2)
    def pattern():
        model, x, y = Decaying(), torch.zeros(6, 3), torch.zeros(6, dtype=torch.long)

        def batch(k: int) -> Any:
            given = pairs(k)
            x.copy_(given[0][:, :3])
            y.copy_(given[1])
            return x, y

        def loss(net, batch):
            out = net.layer.weight.mean(1) * batch[0] + net.last
            if always or (net.last.numel() and not net.seen):
                net.last, net.seen = batch[0], True
            return nn.functional.cross_entropy(out, batch[1])

        model.seen = False
        return Loop(model, loss, adam(model), batch=batch, steps=5)

    pattern(measurements)


# --- data that are set ---------------------------------------------------------------------------------------------


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(4, 3)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            t.data = t.data * 0.9 + s.data * 0.1
        return self.student(x) + 0.1 * self.teacher(x)


class Clipped(Teacher):
    """Writes into what it then replaces."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.teacher.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


def _teaching(keep: Any, inside: Any = None, model: Teacher | None = None) -> Loop:
    model, log = model or Teacher(), []

    def loss(net, batch):
        if inside is not None:
            log.append(inside(net))
        return cross_entropy(net, batch)

    return Loop(
        model,
        loss,
        adam(model.student),
        before=lambda _: log.append(keep(model)),
        watched=lambda: log,
        steps=5,
    )


@identical(plans=1)
def test_a_teachers_state_dict():
    return _teaching(lambda model: model.teacher.state_dict())


@identical(plans=1)
def test_a_teachers_data():
    return _teaching(lambda model: model.teacher.weight.data)


@identical(plans=1)
def test_a_teachers_data_kept_by_the_step():
    return _teaching(lambda _: None, inside=lambda net: net.teacher.weight.data)


@identical(plans=1, verify_every=2)
def test_data_of_a_parameter_that_is_trained():
    model, log = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), []

    def loss(net, batch):
        before = net[0].weight.data
        net[0].weight.data = 0.9 * before
        log.append((before, before[1]))
        return cross_entropy(net, batch)

    return Loop(model, loss, adam(model), watched=lambda: log, steps=5)


@identical(plans=1)
def test_data_that_are_written_and_set():
    return _teaching(lambda _: None, model=Clipped())


@refused("writes in place and then replaces, while others hold it", step=0)
def test_data_that_are_written_and_set_while_others_hold_them():
    return _teaching(lambda model: model.teacher.weight.data, model=Clipped())


@identical(plans=1)
def test_a_tensor_outside_of_the_model():
    model, outer, log = nn.Linear(4, 3), torch.zeros(3), []

    def loss(net, batch):
        out = net(batch[0]) + outer
        outer.data = outer.data + out.detach().mean(0)
        return nn.functional.cross_entropy(out, batch[1])

    return Loop(
        model,
        loss,
        adam(model),
        before=lambda _: log.append(outer.data),
        watched=lambda: (outer, log),
        steps=5,
    )


# --- parts, and what it takes --------------------------------------------------------------------------------------


def _trained(mode: str, keep: Any, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Stateful()
    optimizer, log = adam(model), []

    def loss(net, batch):
        log.append(keep(net))
        return cross_entropy(net, batch)

    step = (
        None
        if mode == "eager"
        else tightship.fit(model, loss, optimizer, pairs(0), seconds_per_op=0.0, **options)
    )
    parts = options.get("accumulate", 1)
    for k in range(6):
        if step is None:
            loss(model, pairs(k)).backward()
            if (k + 1) % parts == 0:
                optimizer.step()
                optimizer.zero_grad()
        elif options.get("split"):
            step.backward(pairs(k))
            step.update()
            model.zero_grad()
        else:
            step(pairs(k))
    return [t.detach().clone() for t in (*log[-6:], *model.state_dict().values())]


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"split": True}, {"clip_norm": 1e9}], ids=str)
def test_in_parts(options, measurements):
    expected = _trained("eager", lambda net: net.h, **options)
    found = _trained("planned", lambda net: net.h, cache=measurements, **options)
    assert all(map(torch.equal, expected, found))


def test_nothing_is_copied_that_nobody_holds(monkeypatch, measurements):
    copied = []
    monkeypatch.setattr(replaced, "own_bytes", lambda t: copied.append(t.shape))
    _trained("planned", lambda net: net.h + 1, cache=measurements)
    assert not copied


def test_what_nobody_holds_any_more_is_gone(measurements):
    """The steps keep nothing of the buffers that were there."""
    torch.manual_seed(0)
    model = Stateful()
    step = tightship.fit(model, cross_entropy, adam(model), pairs(0), cache=measurements, seconds_per_op=0.0)
    first = torch.empty(0).set_(model.h)
    step(pairs(0))
    step(pairs(1))
    gc.collect()
    assert replaced.has_own_bytes(first) and replaced.has_own_bytes(model.h)


# --- steps in eager ------------------------------------------------------------------------------------------------


def test_an_eager_step_that_replaces_buffers_is_tried_no_more_than_once_again(monkeypatch, measurements):
    """After the first step, as after any: that it replaces them is what it does, there is nothing new to plan."""
    asked = []
    monkeypatch.setattr(train_variants, "run_code", _counted(asked))
    torch.manual_seed(0)
    model = Stateful()

    def loss(net, batch):
        found = cross_entropy(net, batch)
        float(found.detach())
        return found

    with pytest.warns(Fallback):
        step = tightship.fit(model, loss, adam(model), pairs(0), cache=measurements, seconds_per_op=0.0)
    for k in range(5):
        step(pairs(k))
    assert len(asked) == 2 and len(step.notes) == 1
    model.tail = nn.Linear(8, 3)
    step(pairs(0))
    assert len(asked) == 3  # another model is looked at again


def _counted(asked: list[int]) -> Any:
    run_code = train_variants.run_code

    def counted(*args: Any, **options: Any) -> Any:
        asked.append(1)
        return run_code(*args, **options)

    return counted


@pytest.mark.filterwarnings("ignore::tightship.execute.interpreter.Fallback")
@identical(plans=1, strict=False)
def test_steps_in_eager_between_planned_ones():
    """Under a mode of the caller's: the plan is there when it has gone."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model = Stateful()
    around = lambda k: Mode() if k % 3 == 1 else contextlib.nullcontext()  # noqa: E731
    return Loop(model, cross_entropy, adam(model), around=around, steps=6)


# --- forward passes ------------------------------------------------------------------------------------------------


class Streaming(nn.Module):
    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.layer, self.writes = nn.Linear(4, 4), writes
        self.register_buffer("state", torch.zeros(6, 4))

    def forward(self, x: torch.Tensor) -> Any:
        if self.writes:
            self.state.mul_(0.5)
        old = self.state
        self.state = torch.tanh(self.layer(x) + old)
        return self.state * 2, old, self.state


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("writes", [True, False])
def test_in_forward_passes(fresh, writes, measurements):
    def states(planned: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, held = Streaming(writes=writes).eval(), []
        run = model
        if planned:
            run = tightship.infer(model, pairs(0)[0], cache=measurements, fresh=fresh)
        with torch.no_grad():
            for k in range(4):
                held += [model.state, model.state_dict()["state"]]
                out = run(pairs(k)[0])
                held += [t.clone() for t in out] if not fresh else out
        return [*held, model.state]

    assert all(map(torch.equal, states(planned=False), states(planned=True)))
