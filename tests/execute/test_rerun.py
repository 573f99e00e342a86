"""The code of a step runs once in every step; what it asks for anew is taken over, captured again, or refused."""

import contextlib
import gc
import itertools
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import (
    FakeQuantize,
    MovingAverageMinMaxObserver,
    default_per_channel_weight_fake_quant,
)

from support import plans
from tightship.errors import BadInput, Infeasible, Unsupported, VerificationFailed
from tightship.execute.fit import fit
from tightship.execute.interpreter import Executor, Fallback
from tightship.frontends.torch import python_state
from tightship.frontends.torch.optimizer.updates import Updater
from tightship.frontends.torch.refusals import end_frames
from tightship.frontends.torch.rerun import live_step, stand_ins
from tightship.frontends.torch.rerun.outcome import understood


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def batch(k=0):
    g = torch.Generator().manual_seed(k)
    return torch.randn(6, 8, generator=g), torch.randint(4, (6,), generator=g)


def fitted(model, loss_fn, sample=None, lr=0.1, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    options = {"planner": plans.keep, "cache": None, "seconds_per_op": 0.0} | options
    return fit(model, loss_fn, optimizer, batch() if sample is None else sample, **options)


def ordinary(model, pair):
    return F.cross_entropy(model(pair[0]), pair[1])


class Count:
    """Counts captures and plans."""

    def __init__(self, monkeypatch):
        self.captures = self.plans = 0
        start = live_step.StepCapture.__init__

        def counted(capture, *args):
            self.captures += 1
            start(capture, *args)

        monkeypatch.setattr(live_step.StepCapture, "__init__", counted)

    def planner(self, graph, budget=None):
        self.plans += 1
        return plans.keep(graph, budget)


@pytest.fixture
def count(monkeypatch):
    return Count(monkeypatch)


# ---- numbers


def test_a_schedule_is_neither_captured_nor_planned_again(count):
    weight = {"beta": 0.1}
    model = net()

    def loss_fn(model, pair):
        out = model(pair[0])
        return (
            F.cross_entropy(out, pair[1], label_smoothing=weight["beta"]) + weight["beta"] * out.pow(2).mean()
        )

    step = fitted(model, loss_fn, planner=count.planner)
    losses = []
    for k in range(5):
        weight["beta"] = 0.1 + 0.07 * k
        model[3].p = 0.2 + 0.05 * k
        losses.append(step(batch()).item())
    assert (count.captures, count.plans) == (1, 1)
    assert len(set(losses)) == 5


class Garbage:
    """Only a search for garbage finds it, and calls torch then, as the finalizers of many packages do."""

    def __init__(self, found):
        self.itself, self.found, self.tensor = self, found, torch.zeros(2)

    def __del__(self):
        self.found.append(torch.zeros(2).add_(self.tensor).device.type)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("at", [0, 2])
def test_what_becomes_garbage_elsewhere_is_no_part_of_a_step(count, at, asks):
    """Finalizers run in the middle of whatever code runs when garbage is searched for."""
    now = itertools.count()

    def loss_fn(model, pair):
        hidden = model[0](pair[0])
        if next(now) in (at, at + 2):
            others = [[] for _ in range(3000)]  # enough for Python to search of its own accord
            if asks:
                gc.collect()
            del others
        return F.cross_entropy(model[1:](hidden), pair[1])

    gc.collect()
    found = []
    for k in range(4):
        Garbage(found)
        if k == 0:
            step = fitted(net(), loss_fn, planner=count.planner)
        step(batch())
    assert (count.captures, count.plans) == (1, 1)
    assert gc.isenabled()
    gc.collect()
    assert found == ["cpu"] * 4


def test_a_number_that_changes_the_ops_is_captured_and_not_planned_twice(count):
    model = net()
    step = fitted(model, ordinary, planner=count.planner)
    for p in (0.2, 0.0, 0.3, 0.0, 1.0, 0.25):
        model[3].p = p
        step(batch())
    assert count.plans <= 3  # some, none, and all dropped


def in_steps(loss_fn, count, batches):
    """Captures once ``loss_fn`` has been fitted to the first batch, with everything as in eager."""
    model, other = net(), net()
    other.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    step = fitted(model, loss_fn, batches[0], planner=count.planner)
    captures = []
    for k, pair in enumerate(batches):
        torch.manual_seed(k)
        loss = step(pair)
        captures.append(count.captures)
        torch.manual_seed(k)
        optimizer.zero_grad()
        expected = loss_fn(other, pair)
        expected.backward()
        optimizer.step()
        assert torch.equal(loss, expected)
        assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    return captures


def masked(k, rows=6):
    """A batch of which another number of labels count each time."""
    x, y = (t[:rows] for t in batch(k))
    return x, y.masked_fill(torch.arange(rows) <= k % 4, -100)


def counted(pair):
    return (pair[1] != -100).sum().item()


def by_count(model, pair):
    return F.cross_entropy(model(pair[0]), pair[1], reduction="sum") / counted(pair)


def as_tensor(model, pair):
    return F.cross_entropy(model(pair[0]), pair[1], reduction="sum") / torch.tensor(float(counted(pair)))


def by_scale(model, pair):
    return F.cross_entropy(model(pair[0]) / float(pair[0].std()), pair[1])


def drawn(model, pair):
    return F.cross_entropy(model(pair[0]), pair[1]) * torch.randint(1, 9, ()).item()


@pytest.mark.parametrize("loss_fn", [by_count, as_tensor, by_scale, drawn])
def test_a_number_that_the_batch_says_is_neither_captured_nor_planned_again(count, loss_fn):
    assert in_steps(loss_fn, count, [masked(k) for k in range(8)]) == [1] * 8
    assert count.plans == 1


def test_a_branch_on_such_a_number_is_captured_where_it_goes_another_way(count):
    def loss_fn(model, pair):
        out = model(pair[0])
        if counted(pair) < 4:
            out = out.tanh()
        return F.cross_entropy(out, pair[1], reduction="sum") / counted(pair)

    captures = in_steps(loss_fn, count, [masked(k) for k in (0, 1, 2, 3, 0, 1, 3, 2)])
    assert captures == [1, 1, 2, 2, 2, 2, 2, 2] and count.plans == 2


def test_kinds_that_take_turns_keep_such_numbers_of_their_own(count):
    captures = in_steps(by_count, count, [masked(k, 6 if k % 3 else 5) for k in range(9)])
    assert captures[-1] <= 3 and count.plans == 2


def test_what_is_asked_by_such_a_number_is_asked_again(count):
    """How many are above the mean depends on the mean, which is a number to the code."""

    def loss_fn(model, pair):
        mean = pair[0].mean().item()
        return F.cross_entropy(model(pair[0]), pair[1]) / (1 + (pair[0] > mean).sum().item())

    in_steps(loss_fn, count, [batch(k) for k in range(5)])
    assert count.plans == 1


def test_whole_numbers_that_shape_are_told_from_numbers_that_multiply(count):
    rows = [6]

    def loss_fn(model, pair):
        return ordinary(model, (pair[0][: rows[0]], pair[1][: rows[0]])) * rows[0]

    step = fitted(net(), loss_fn, planner=count.planner)
    twin = net()
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for k, n in enumerate((6, 4, 4, 6)):
        rows[0] = n
        torch.manual_seed(k)
        ours = step(batch(k))
        torch.manual_seed(k)
        twin_optimizer.zero_grad()
        theirs = loss_fn(twin, batch(k))
        theirs.backward()
        twin_optimizer.step()
        assert torch.equal(ours, theirs)
    assert count.plans == 2


# ---- side effects


def test_the_run_before_the_first_step_leaves_nothing_behind():
    counts, letters, draws = {"n": 0, "seen": []}, itertools.cycle("abc"), numpy.random.default_rng(3)
    ticks, own = itertools.count(), random.Random(5)

    def loss_fn(model, pair):
        counts["n"] += 1
        counts["seen"].append((next(letters), next(ticks), own.random()))
        return ordinary(model, pair) * float(draws.uniform(0.5, 1.5)) * random.uniform(0.9, 1.1)

    state = random.getstate()
    step = fitted(net(), loss_fn)
    assert counts == {"n": 0, "seen": []} and random.getstate() == state
    expected = random.Random(5)
    for k in range(3):
        step(batch(k))
    assert counts["n"] == 3
    assert counts["seen"] == [(c, k, expected.random()) for k, c in enumerate("abc")]
    again = numpy.random.default_rng(3)
    again.uniform(size=3)
    assert draws.uniform() == again.uniform()


def test_attributes_of_functions_are_put_back():
    """Counters of calls, and what functions keep of theirs."""

    def kept(x):
        if not hasattr(kept, "seen"):
            kept.seen, kept.made = [], []
        kept.seen.append(len(kept.made))
        return x

    def loss_fn(model, pair):
        loss_fn.calls = getattr(loss_fn, "calls", 0) + 1
        return kept(ordinary(model, pair))

    step = fitted(net(), loss_fn)
    assert vars(loss_fn) == vars(kept) == {}
    for k in range(3):
        step(batch(k))
    assert loss_fn.calls == 3 and kept.seen == [0, 0, 0]


class SameState:
    """As a cached contrastive loss runs its model again: in an ``__enter__`` that does not come to its end where the
    random state may not be set."""

    def __init__(self):
        self.state = torch.get_rng_state()

    def __enter__(self):
        self.fork = torch.random.fork_rng(devices=[])
        self.fork.__enter__()
        torch.set_rng_state(self.state)

    def __exit__(self, *_):
        self.fork.__exit__(None, None, None)


def run_again(model, pair):
    with torch.no_grad():
        same = SameState()
        model(pair[0])
    with same:
        return model(pair[0]).square().mean()


def run_again_in_a_hook(model, pair):
    with torch.no_grad():
        same = SameState()
        out = model(pair[0])
    out.requires_grad_()
    loss = out.square().mean()
    (grad,) = torch.autograd.grad(loss, out)
    loss = loss.detach().requires_grad_()

    def hook(given):
        with torch.enable_grad(), same:
            ((model(pair[0]) * grad).sum() * given).backward()

    loss.register_hook(hook)
    return loss


def test_the_frames_of_errors_that_are_one_anothers_cause_end():
    one, other = ValueError(), KeyError()
    one.__cause__, other.__cause__ = one, one
    end_frames(one)
    end_frames(other, kept=True)
    assert other.__traceback__ is None


@pytest.mark.parametrize("loss_fn", [run_again, run_again_in_a_hook])
def test_contexts_that_a_refusal_ends_leave_before_random_states_are_put_back(loss_fn):
    model, twin = (nn.Sequential(net(), nn.Dropout(0.5)) for _ in range(2))
    with pytest.warns(Fallback, match="setting torch's random state"):
        step = fitted(model, loss_fn)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    ours, theirs = [], []
    torch.manual_seed(1)
    for k in range(4):
        ours.append(step(batch(k)))
    state = torch.get_rng_state()
    torch.manual_seed(1)
    for k in range(4):
        optimizer.zero_grad()
        theirs.append(loss_fn(twin, batch(k)))
        theirs[-1].backward()
        optimizer.step()
    assert torch.equal(state, torch.get_rng_state())
    assert [x.item() for x in ours] == [x.item() for x in theirs]
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


LARGE: list[list[list[int]]] = []


@pytest.mark.parametrize("where", ["globals", "closure", "model"])
def test_what_lies_near_to_the_code_is_put_back_beside_a_data_set_of_many_objects(where, monkeypatch):
    many = [[[k] for k in range(1000)] for _ in range(3)]
    monkeypatch.setattr(python_state, "LIMIT", 2000)
    model, counts, others = net(), [], many if where == "closure" else []
    if where == "model":
        model.samples = many
    if where == "globals":
        LARGE.extend(many)

    def loss_fn(model, pair, seen=counts):
        counts.append(len(others) + len(LARGE))
        seen.append(0)
        return ordinary(model, pair)

    fitted(model, loss_fn)
    LARGE.clear()
    assert counts == []


def test_a_generator_is_refused_beforehand_and_right_without_preparing():
    def numbers():
        yield from (1.0, 2.0, 3.0, 4.0)

    def made(prepare):
        scales = numbers()
        step = fitted(net(), lambda m, pair: next(scales) * ordinary(m, pair), prepare=prepare, lr=0.0)
        return step, scales

    with pytest.raises(Unsupported, match=r"generator.*prepare=False"):
        made(True)
    step, scales = made(False)
    with pytest.raises(BadInput, match="captured"):
        _ = step.plan
    for _ in range(3):
        step(batch())
    assert next(scales) == 4.0 and step.plan.peak > 0


@pytest.mark.parametrize("ends", ["in eager", "without room"])
def test_iterators_are_where_they_were_when_the_run_beforehand_ends_early(ends):
    """They had moved on, silently, where nothing could be planned, or not within the budget."""
    numbers, own = itertools.count(), torch.Generator()

    def loss_fn(model, pair):
        scale = 1 + next(numbers)
        x = pair[0] + torch.randn(pair[0].shape, generator=own) if ends == "in eager" else pair[0]
        return scale * F.cross_entropy(model(x), pair[1])

    if ends == "in eager":
        with pytest.warns(Fallback, match="generator"):
            fitted(net(), loss_fn)
    else:
        with pytest.raises(Infeasible):
            fitted(net(), loss_fn, budget=64, planner=None)
    assert next(numbers) == 0


def test_a_generator_is_refused_where_the_run_beforehand_ends_early():
    numbers = (float(k) for k in range(9))

    def loss_fn(model, pair):
        scale = next(numbers)
        return scale * ordinary(model, (pair[0] + torch.randn(pair[0].shape, generator=own), pair[1]))

    own = torch.Generator()
    with pytest.raises(Unsupported, match=r"generator.*make a new one and pass prepare=False"):
        fitted(net(), loss_fn)


class Observed(nn.Module):
    """Quantization-aware: the observers' buffers get their shape in the first step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 4)
        self.weights = default_per_channel_weight_fake_quant()
        self.inputs = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    def forward(self, x):
        return self.outer(self.inputs(F.relu(F.linear(x, self.weights(self.inner.weight), self.inner.bias))))


class Centered(nn.Module):
    """Centers are looked for in the first step, until they stay."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.begun = nn.Linear(8, 4), False
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x):
        y = self.inner(x)
        while not self.begun:
            now = self.center + (y.detach().mean(0) - self.center) * 0.9
            self.begun = (now - self.center).abs().max().item() < 1e-3
            self.center.copy_(now)
        return y - self.center


WAYS = [{}, {"split": True}, {"accumulate": 2}, {"prepare": False}]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_what_a_first_step_in_eager_has_set_up_is_planned_from_the_second_on(how):
    step = set_up_by_the_first_step(Observed, how, pytest.warns(Fallback))
    assert any(note.startswith("steps ran in eager at first") for note in step.notes)


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_a_loop_that_ends_by_what_it_has_computed_is_planned(how):
    assert set_up_by_the_first_step(Centered, how, contextlib.nullcontext()).metrics()["eager"] == 0


def set_up_by_the_first_step(make, how, fallback):
    model, other = make(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(other.parameters(), lr=0.1)
    options = {"planner": plans.keep, "cache": None, "seconds_per_op": 0.0} | how
    with fallback:
        step = fit(model, ordinary, optimizer, batch(), **options)
        for k in range(4):
            loss = step.backward(batch(k)) if "split" in how else step(batch(k))
            if "split" in how:
                step.update()
                optimizer.zero_grad()
            expected = ordinary(other, batch(k))
            expected.backward()
            if k % how.get("accumulate", 1) == how.get("accumulate", 1) - 1:
                reference.step()
                reference.zero_grad()
            assert torch.equal(loss, expected)
            assert k == 0 or step.plan.peak > 0
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    return step


class Reviving(nn.Module):
    """A code that few took is put where data are, now and then."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.steps = nn.Linear(8, 4), []
        self.register_buffer("codes", torch.randn(5, 4))

    def forward(self, x):
        y = self.inner(x)
        self.steps.append(len(self.steps))
        taken = torch.cdist(y.detach(), self.codes).argmin(1)
        if len(self.steps) in (1, 4, 7):
            found, counts = taken.unique(return_counts=True)
            self.codes[int(found[counts.argmin()])] = y.detach()[0]
        return y - self.codes[taken]


def test_what_could_not_be_planned_at_first_may_come_again():
    model, other = Reviving(), Reviving()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(other.parameters(), lr=0.1)
    in_eager = []
    with pytest.warns(Fallback, match="unique"):
        step = fit(model, ordinary, optimizer, batch(), planner=plans.keep, cache=None, seconds_per_op=0.0)
        for k in range(9):
            loss = step(batch(k))
            expected = ordinary(other, batch(k))
            expected.backward()
            reference.step()
            reference.zero_grad()
            assert torch.equal(loss, expected)
            in_eager.append(step.metrics()["eager"])
    assert in_eager == [1, 0, 0, 1, 0, 0, 1, 0, 0]
    assert model.steps == other.steps
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def test_an_error_of_the_callers_code_leaves_the_step_usable():
    broken = [False]

    def loss_fn(model, pair):
        out = model(pair[0])
        if broken[0]:
            raise KeyError("theirs")
        return F.cross_entropy(out, pair[1])

    model = net()
    step = fitted(model, loss_fn)
    before = [p.detach().clone() for p in model.parameters()]
    broken[0] = True
    with pytest.raises(KeyError, match="theirs"):
        step(batch())
    assert all(map(torch.equal, before, model.parameters()))
    assert (
        not torch._C._len_torch_function_stack()
        and torch.autograd.Function.apply.__func__.__name__ == "apply"
    )
    broken[0] = False
    step(batch())


# ---- tensors of an earlier step


def trained(loss_fn, steps=5, **options):
    """The step, its last loss and parameters compared with those of a loop in eager; ``loss_fn()`` makes the loss."""
    losses, models = [], []
    for planned in (True, False):
        model, one = net(), loss_fn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = fitted(model, one, **options) if planned else None
        for k in range(steps):
            torch.manual_seed(k)
            if step is None:
                optimizer.zero_grad()
                loss = one(model, batch(k))
                loss.backward()
                optimizer.step()
            else:
                loss, last = step(batch(k)), step
        losses.append(loss)
        models.append(model)
    assert torch.equal(*losses)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    return last


class Keeping:
    """A loss that pulls outputs towards those of an earlier step; ``every``: of how many it keeps one."""

    def __init__(self, every=1, graph=False):
        self.kept, self.calls, self.every, self.graph = [], 0, every, graph

    def __call__(self, model, pair):
        out = model(pair[0])
        loss = F.cross_entropy(out, pair[1])
        if self.kept:
            loss = loss + (out - self.kept[-1].detach()).pow(2).mean()
        self.calls += 1
        if self.calls % self.every == 0:
            self.kept.append(out if self.graph else out.detach())
        return loss


@pytest.mark.parametrize("options", [{}, {"every": 3}, {"graph": True}])
def test_what_a_step_keeps_is_an_input_of_those_that_read_it(options):
    step = trained(lambda: Keeping(**options), verify_every=1)
    assert step.measure()["planned_peak"] == step.measure()["measured_peak"]


def test_what_is_kept_is_there_after_the_step_wherever_it_lies():
    seen = {}

    def loss_fn(model, pair):
        out = model(pair[0])
        seen["view"], seen["batch"], seen["deep"] = out.detach()[:, 1], pair[0], [{"out": (out.detach(),)}]
        return F.cross_entropy(out, pair[1]), out

    model = net()
    step = fitted(model, loss_fn)
    for k in range(3):
        given = batch(k)
        _, out = step(given)
        assert type(seen["view"]) is torch.Tensor
        assert torch.equal(seen["view"], out[:, 1]) and torch.equal(seen["batch"], given[0])
        assert torch.equal(seen["deep"][0]["out"][0], out)
        assert seen["view"].data_ptr() == out.data_ptr() + out.element_size()  # eager's is the same storage


def test_more_is_kept_than_when_the_step_was_captured(monkeypatch):
    count, seen = Count(monkeypatch), {}

    def loss_fn(model, pair):
        out = model(pair[0])
        if model.keeps:
            seen["out"] = out.detach()
        return F.cross_entropy(out, pair[1]), out

    model = net()
    model.keeps = False
    step = fitted(model, loss_fn, planner=count.planner)
    step(batch())
    model.keeps = True
    for k in range(3):
        _, out = step(batch(k))
        assert torch.equal(seen["out"], out)
    assert (count.captures, count.plans) == (2, 2)
    model.keeps = False
    step(batch())
    assert (count.captures, count.plans) == (2, 2)


def test_a_graph_of_an_earlier_step_is_gone():
    kept = []

    def loss_fn(model, pair):
        out = model(pair[0])
        loss = F.cross_entropy(out, pair[1]) + sum(k.pow(2).mean() for k in kept[-1:])
        kept.append(out)
        return loss

    step = fitted(net(), loss_fn)
    step(batch())
    assert kept[-1].requires_grad and not kept[-1].is_leaf
    with pytest.raises(Unsupported, match="an earlier step has made"):
        step(batch())


def test_what_a_step_that_failed_has_kept_is_without_contents():
    kept = []

    def loss_fn(model, pair):
        kept.append(model(pair[0]).detach())
        raise ValueError("no loss today")

    with pytest.raises(ValueError, match="no loss"):
        fitted(net(), loss_fn)
    assert not kept
    model, fails = net(), [False]

    def sometimes(model, pair):
        kept.append(model(pair[0]).detach())
        return loss_fn(model, pair) if fails[0] else ordinary(model, pair)

    step = fitted(model, sometimes)
    step(batch())
    assert kept[-1].isfinite().all()
    fails[0] = True
    with pytest.raises(ValueError, match="no loss"):
        step(batch())
    with pytest.raises(Unsupported, match="earlier step"):
        kept[-1].sum()


def test_parameters_in_a_list_of_the_callers_are_trained_as_such():
    model = net()
    held = list(model.parameters())
    step = fitted(model, lambda m, pair: ordinary(m, pair) + sum(p.pow(2).sum() for p in held))
    twin = net()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for k in range(3):
        torch.manual_seed(k)
        ours = step(batch(k))
        torch.manual_seed(k)
        optimizer.zero_grad()
        theirs = ordinary(twin, batch(k)) + sum(p.pow(2).sum() for p in twin.parameters())
        theirs.backward()
        optimizer.step()
        assert torch.equal(ours, theirs)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


# ---- the belt


def test_verify_every_agrees_with_eager_and_changes_nothing():
    model, twin = net(), net()
    step, plain = fitted(model, ordinary, verify_every=2), fitted(twin, ordinary)
    for k in range(4):
        torch.manual_seed(k)
        a = step(batch(k))
        torch.manual_seed(k)
        assert torch.equal(a, plain(batch(k)))
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))


def test_verify_every_reaches_what_code_inside_of_calls_reaches():
    model = nn.Sequential(nn.Linear(8, 4), torch.jit.script(nn.Linear(4, 4)))

    def loss_fn(model, pair):
        slopes = torch.func.vmap(torch.func.grad(lambda row: model[0](row).sum()))(pair[0])
        return ordinary(model, pair) + slopes.pow(2).mean()

    with torch.jit.optimized_execution(False):
        step = fitted(model, loss_fn, verify_every=1)
        for k in range(3):
            step(batch(k))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore::tightship.execute.interpreter.PeakMismatch")  # its own product makes it
def test_verify_every_notices_a_wrong_update(monkeypatch):
    step = fitted(net(), ordinary, verify_every=1)
    step(batch())
    run = Updater.step

    def wrong(self, gradients, sparse=()):
        run(self, [g * (1 + 1e-6) for g in gradients] if self.name == "4.bias" else gradients, sparse)

    monkeypatch.setattr(Updater, "step", wrong)
    with pytest.raises(VerificationFailed, match=r"4\.bias"):
        step(batch())


def test_verify_every_notices_a_wrong_loss(monkeypatch):
    step = fitted(net(), ordinary, verify_every=3)
    run = Executor.run
    monkeypatch.setattr(Executor, "run", lambda *args, **kwargs: [r + 1e-6 for r in run(*args, **kwargs)])
    step(batch()), step(batch())
    with pytest.raises(VerificationFailed, match="result 0"):
        step(batch())


def test_verify_every_is_a_number_of_steps():
    with pytest.raises(BadInput, match="verify_every"):
        fitted(net(), ordinary, verify_every=-1)


# ---- code that runs inside of calls


SCALE = nn.Dropout(0.5)


def _reads_a_module(x):
    return SCALE(x)


def _reads_torch(x):
    return torch.sigmoid(x) * F.relu(x)


def _calls_another(x):
    return _reads_torch(x) + 1


@torch.autograd.function.once_differentiable
def _once(ctx, gradient):
    return gradient * ctx.factor


@torch.autograd.function.once_differentiable
def _once_with_state(ctx, gradient):
    return SCALE(gradient)


@pytest.mark.parametrize(
    ("fn", "known"),
    [
        (_reads_torch, True), (_calls_another, False), (_once, True), (torch.relu, True),
        (_once_with_state, False), (_reads_a_module, False), (lambda x, scale=2.0: x * scale, False),
        (Count.__new__(Count).planner, False), (nn.ReLU(), False),
    ],
)  # fmt: skip
def test_code_is_understood_only_if_its_arguments_decide(fn, known):
    assert understood(fn) is known


SLOPE = 1.5


def _gate(x):
    return torch.sigmoid(SLOPE * x)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.slope = SLOPE
        return x * _gate(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        gate = _gate(x)
        return gradient * (gate + ctx.slope * x * gate * (1 - gate))


def test_what_helpers_of_an_autograd_function_read_is_compared_and_not_captured_again(count, monkeypatch):
    step = fitted(net(), lambda model, pair: F.cross_entropy(Swish.apply(model(pair[0])), pair[1]))
    for k in range(3):
        step(batch(k))
    assert count.captures == 1
    monkeypatch.setitem(globals(), "SLOPE", 2.5)
    step(batch())
    assert count.captures == 2


class Reversed(torch.autograd.Function):
    """The number is there in the backward pass alone, as in domain-adversarial training."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None


class Tensored(Reversed):
    """The number stands in a tensor, where no op shows it."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.tensor(ctx.factor), None


class NewTensored(Reversed):
    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient.new_tensor([ctx.factor]), None


class Kept(Reversed):
    """The number says how many columns are kept, of which no op tells."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor, ctx.columns = factor, x.shape[1]
        return x[:, : 1 + int(factor * 2) % 2] * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return F.pad(gradient, (0, ctx.columns - gradient.shape[1])), None


class Branching(Reversed):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor if factor > 1 else x + factor

    @staticmethod
    def backward(ctx, gradient):
        return (gradient * ctx.factor if ctx.factor > 1 else gradient.clone()), None


class Noted(Reversed):
    """An answer beside the tensor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor, factor * 2

    @staticmethod
    def backward(ctx, gradient, _):
        return gradient * ctx.factor, None


@pytest.mark.parametrize(
    ("function", "captures"),
    [(Reversed, 1), (Tensored, 4), (NewTensored, 4), (Kept, 2), (Branching, 2), (Noted, 4)],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_number_for_an_autograd_function_that_changes(count, function, captures):
    """A schedule costs nothing where ops show what becomes of the number, and is right where they do not."""
    model, twin = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    factors = [0.5, 0.75, 1.5, 2.0]
    used = []

    def loss_fn(model, pair):
        hidden, more = model(pair[0]), 0.0
        out = function.apply(hidden, used[-1])
        if isinstance(out, tuple):
            out, more = out
        return out.square().mean() * out.shape[1] + F.cross_entropy(hidden, pair[1]) * (1 + more)

    used.append(factors[0])
    step = fitted(model, loss_fn)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for k, factor in enumerate(factors):
        used.append(factor)
        loss = loss_fn(twin, batch(k))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(step(batch(k)), loss)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert count.captures <= captures
    assert captures > 2 or count.captures == captures


def test_what_a_capture_leaves_needs_no_garbage_collector(monkeypatch):
    """A pass over all objects of a process that has imported much takes longer than small steps are captured."""
    collected = []
    monkeypatch.setattr(stand_ins.gc, "collect", lambda *_: collected.append(True))

    def checkpointed(model, pair):
        return F.cross_entropy(
            torch.utils.checkpoint.checkpoint(model, pair[0], use_reentrant=False), pair[1]
        )

    def looked_at(model, pair):
        loss = ordinary(model, pair)
        return loss * 2 if loss.item() > 0.1 else loss

    for loss_fn in (ordinary, checkpointed, looked_at):
        step = fitted(net(), loss_fn)
        for k in range(2):
            step(batch(k))
    assert not collected


class Field(nn.Module):
    """What a physics-informed loss differentiates in its inputs."""

    gain = 1.0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.scale = 1.0

    def scaled(self, x):
        return self.layers(x) * self.scale * self.gain

    def forward(self, x):
        return self.scaled(x).sum()


class Counting(Field):
    """Counts its calls beside what `forward` does."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def count(self):
        self.seen += 1
        return 1.0

    def counted(self, x):
        return self.scaled(x).sum() * self.count()

    @torch.no_grad()
    def told(self):
        return self.count()

    def energy(self, x):
        return self.scaled(x).sum() * self.told()


class InForward(Counting):
    def forward(self, x):
        return self.counted(x)


class InFunction(Counting):
    def forward(self, x):
        return counted_by_function(self, x)


class InDict(Field):
    def __init__(self):
        super().__init__()
        self.table = {"seen": 0}

    @property
    def seen(self):
        return self.table["seen"]

    def forward(self, x):
        seen_in_dict(self)
        return self.scaled(x).sum()


class InList(Field):
    def __init__(self):
        super().__init__()
        self.calls = []

    @property
    def seen(self):
        return len(self.calls)

    def forward(self, x):
        self.calls.append(1)
        return self.scaled(x).sum()


def counted_by_function(model, x):
    return model.counted(x)


def seen_in_dict(model):
    model.table["seen"] += 1


def physics(model, x):
    slope = torch.func.vmap(torch.func.grad(lambda point: model(point)))(x)
    return (slope.sum(1) - torch.vmap(model)(x)).pow(2).mean()


@pytest.mark.parametrize("loss_fn", [physics, lambda m, x: torch.vmap(torch.func.jacrev(m))(x).pow(2).mean()])
def test_functional_transforms_of_modules_are_captured_once_and_again_where_something_changed(count, loss_fn):
    """The code inside is not run in each step, so all that it follows from is compared."""

    def nothing(model):
        pass

    def scale(model):
        model.scale = 0.5

    def class_attribute(model):
        model.gain = 2.0

    def layer(model):
        model.layers[1] = nn.Sigmoid()

    def method(model):
        model.scaled = lambda x: Field.scaled(model, x) * 2

    def hook(model):
        model.layers[1].register_forward_hook(lambda module, given, made: made * 2)

    models = Field(), Field()
    given = torch.randn(8, 2)
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for m in models]
    step = fit(models[0], loss_fn, optimizers[0], given)
    for change in (nothing, scale, nothing, class_attribute, layer, nothing, method, hook):
        before = count.captures
        for m in models:
            change(m)
        mine = step(given)
        optimizers[1].zero_grad()
        loss = loss_fn(models[1], given)
        loss.backward()
        optimizers[1].step()
        assert torch.equal(mine, loss), change.__name__
        assert change is not nothing or models[0].layers[1]._forward_hooks or count.captures == before
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (Counting, "counted"), (Counting, "energy"), (InForward, "__call__"), (InFunction, "__call__"),
        (InDict, "__call__"), (InList, "__call__"),
    ],
)  # fmt: skip
def test_what_code_inside_of_a_functional_transform_keeps_is_kept_in_each_step(kind, method):
    """Whatever it reaches it by: `forward`, a method of another name, one that is decorated, a function."""
    inside = {
        "counted": lambda model: lambda point: model.counted(point),
        "energy": lambda model: lambda point: model.energy(point),
        "__call__": lambda model: lambda point: model(point),
    }[method]

    def loss_fn(model, x):
        return torch.func.vmap(torch.func.grad(inside(model)))(x).pow(2).mean()

    given, models = torch.randn(8, 2), (kind(), kind())
    step = fit(models[0], loss_fn, torch.optim.SGD(models[0].parameters(), 0.01), given)
    for _ in range(3):
        step(given)
        loss_fn(models[1], given)
    assert models[0].seen == models[1].seen == 3


def test_hooks_of_all_modules_are_called_inside_of_functional_transforms_in_each_step():
    called, given = [], torch.randn(8, 2)
    model = Field()
    step = fit(model, physics, torch.optim.SGD(model.parameters(), 0.01), given)
    step(given)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: called.append(1))
    try:
        step(given)
        once = len(called)
        step(given)
    finally:
        handle.remove()
    assert once and len(called) == 2 * once


class OwnCheckpoint(torch.autograd.Function):
    """As fairscale's and Megatron's."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("Checkpointing is not compatible with .grad()")
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


def test_reentrant_checkpoints_of_ones_own_run_in_eager():
    def made():
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        return model, torch.optim.SGD(model.parameters(), 0.1)

    def loss_fn(model, x):
        return OwnCheckpoint.apply(model[1], model[0](x)).square().mean()

    (model, optimizer), (twin, theirs) = made(), made()
    batches = [torch.randn(4, 8) for _ in range(3)]
    with pytest.warns(Fallback, match="a reentrant checkpoint that is not torch's"):
        step = fit(model, loss_fn, optimizer, batches[0], "100%")
    for x in batches:
        loss = loss_fn(twin, x)
        loss.backward()
        theirs.step()
        theirs.zero_grad()
        assert torch.equal(step(x), loss)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert not [n for n in step.notes if "not torch's" not in n]
