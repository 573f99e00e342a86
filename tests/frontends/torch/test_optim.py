"""One parameter at a time, every optimizer of torch gives the bits it gives all at once."""

import copy

import pytest
import torch
from torch import nn

import tightship
from support.models import MODELS
from support.naive import Naive
from tightship.frontends.torch.capture.step import capture_step
from tightship.frontends.torch.optimizer.updates import updaters

CLASSES = ["Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop"]
CLASSES += ["Rprop", "SGD"]


def trained(make, steps=3, schedule=None):
    """Parameters and state after some steps, by the optimizer itself and by the program."""
    model, loss_fn, batches = MODELS["cnn"]()
    other = copy.deepcopy(model)
    opt, other_opt = make(model.parameters()), make(other.parameters())
    schedulers = [schedule(o) for o in (opt, other_opt)] if schedule else []
    naive = Naive(capture_step(other, loss_fn, other_opt, batches(0)), other, other_opt)
    for step in range(steps):
        torch.manual_seed(step)
        opt.zero_grad()
        loss_fn(model, batches(step)).backward()
        opt.step()
        torch.manual_seed(step)
        naive(batches(step))
        other_opt._opt_called = True
        for s in schedulers:
            s.step()
    return (model, opt), (other, other_opt)


def check(left, right):
    for a, b in zip(left[0].parameters(), right[0].parameters(), strict=True):
        assert torch.equal(a, b)
    a, b = left[1].state_dict(), right[1].state_dict()
    assert a["param_groups"] == b["param_groups"]
    for k, state in a["state"].items():
        for name, value in state.items():
            other = b["state"][k][name]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other


@pytest.mark.parametrize("name", CLASSES)
def test_every_class(name):
    check(*trained(getattr(torch.optim, name)))


@pytest.mark.parametrize(
    "settings",
    [
        {"foreach": True},
        {"fused": True},
        {"amsgrad": True, "maximize": True, "weight_decay": 0.1},
        {"lr": torch.tensor(0.01)},
    ],
)
def test_settings(settings):
    check(*trained(lambda ps: torch.optim.AdamW(ps, **settings)))


def test_groups_keep_their_own_settings():
    def make(params):
        first, *rest = params
        return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": rest}], lr=0.1, momentum=0.9)

    check(*trained(make))


def test_schedulers_act_on_every_update():
    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    check(*trained(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), schedule=schedule))


def test_a_subclass_that_changes_nothing():
    class Mine(torch.optim.AdamW):
        pass

    check(*trained(Mine))


def updater(optimizer=torch.optim.AdamW, **settings):
    net = nn.Linear(3, 3)
    made = optimizer(net.parameters(), lr=0.1, **settings)
    return next(iter(updaters(made, dict(net.named_parameters())).ops(["weight"]))), net, made


def step(updater, net, opt):
    state = opt.state.get(net.weight, {})
    updater(net.weight, torch.ones(3, 3), *(state.get(k) for k in updater.members[0].state_keys))


def test_state_is_known_before_it_exists():
    u, net, opt = updater()
    (member,) = u.members
    assert member.state_keys == ("step", "exp_avg", "exp_avg_sq") and not u.materialized
    assert [tuple(t.shape) for t in member.state_like] == [(), (3, 3), (3, 3)]
    assert not opt.state
    step(u, net, opt)
    assert u.materialized
    assert all(isinstance(opt.state[net.weight][k], torch.Tensor) for k in member.state_keys)
    assert net.weight.grad is None


def test_no_state_is_always_there():
    assert updater(torch.optim.SGD)[0].materialized
    assert not updater(torch.optim.SGD, momentum=0.9)[0].materialized


def test_loaded_state_is_used():
    u, net, opt = updater()
    step(u, net, opt)
    opt.load_state_dict(opt.state_dict())
    step(u, net, opt)
    assert opt.state[net.weight]["step"] == 2


def test_a_rehearsal_changes_nothing():
    for first in (False, True):
        u, net, opt = updater()
        if first:
            step(u, net, opt)
        weight, state = net.weight.clone(), copy.deepcopy(opt.state_dict())
        u.rehearsal()()
        assert torch.equal(weight, net.weight)
        assert str(state) == str(opt.state_dict())


def test_a_gradient_there_before_stays():
    u, net, opt = updater()
    net.weight.grad = torch.full((3, 3), 7.0)
    step(u, net, opt)
    assert torch.equal(net.weight.grad, torch.full((3, 3), 7.0))


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_fused_optimizers_are_planned_on_the_meta_device(cls, options):
    """Torch itself refuses to step them there; state is what it is elsewhere."""

    def planned(device):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).to(device)
        optimizer = cls(model.parameters(), lr=0.1, fused=True, **options)
        batch = torch.ones(4, 64, device=device)
        made = tightship.plan(
            model, batch, optimizer=optimizer, loss_fn=lambda m, b: m(b).square().mean(), cache=None
        )
        return made.plan.peak, made.graph.static_bytes

    assert planned("meta") == planned("cpu")
