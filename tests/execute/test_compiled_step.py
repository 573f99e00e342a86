"""fit(mode="compiled"): the whole step as Inductor's code, its peak as planned, within a budget."""

import copy
import re
import threading

import pytest
import torch
from torch import nn
from torch._inductor import pattern_matcher
from torch.fx.experimental.proxy_tensor import make_fx

from tightship import errors, fit
from tightship.execute import compiled_code
from tightship.execute.allocator import Meter
from tightship.execute.compiled_step_search import StepSearch
from tightship.frontends.torch import compat_inductor, compat_inductor_partitions
from tightship.frontends.torch.capture import whole_ops
from tightship.frontends.torch.capture.flat import viewed
from tightship.frontends.torch.capture.fused import between_blocks
from tightship.frontends.torch.capture.fused_step import fuse_step
from tightship.graph import Value
from tightship.planners import default

pytestmark = pytest.mark.filterwarnings("error::tightship.execute.interpreter.PeakMismatch")

OPTIONS = {"mode": "compiled", "strict": True, "cache": None}


def net(layers=1, width=16, dropout=0.0):
    torch.manual_seed(0)
    rows = [
        m
        for _ in range(layers)
        for m in (nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(width))
    ]
    return nn.Sequential(*rows, nn.Linear(width, 4))


def data(n=32, width=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=g), torch.randn(n, 4, generator=g)


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def sgd(model, **more):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **more})


def adamw(model, **more):
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **more})


def eager(model, optimizer, call=loss):
    def step(batch):
        optimizer.zero_grad()
        out = call(model, batch)
        out.backward()
        optimizer.step()
        return out.detach()

    return step


def train(step, steps=3, n=32, width=16):
    found = []
    for k in range(steps):
        torch.manual_seed(k)
        found.append(float(step(data(n, width, seed=k))))
    return found


def assert_close(a, b, **tolerance):
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y, **tolerance)


def as_planned(step):
    used = step.measure()
    return used["measured_peak"] == used["planned_peak"] and not used["misses"]


# --- from end to end ---


def test_a_step_is_one_compiled_graph_with_the_peak_known_to_the_byte_and_rates_are_read_at_each_step(
    monkeypatch,
):
    made = []
    plain = compat_inductor.compile_flat
    monkeypatch.setattr(compat_inductor, "compile_flat", lambda *a: made.append(1) or plain(*a))
    model, other = net(), net()
    ours, theirs = sgd(model, momentum=0.9), sgd(other, momentum=0.9)
    step, reference = fit(model, loss, ours, data(), **OPTIONS), eager(other, theirs)
    assert step.plan.met
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (ours, theirs)]
    for k in range(3):
        torch.testing.assert_close(step(data(seed=k)), reference(data(seed=k)))
        assert as_planned(step)
        for s in schedulers:
            s.step()
    assert_close(model, other)
    assert made == [1]
    assert any("numbers are Inductor's" in note for note in step.notes)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(data()[0]), other(data()[0]))


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["60%", "static+50%"])
def test_a_budget_holds_as_a_measured_peak_and_masks_are_drawn_once(budget):
    model, other = net(5, 32, 0.1), net(5, 32, 0.1)
    step = fit(model, loss, adamw(model), data(1024, 32), budget, work=1_000_000, **OPTIONS)
    plan = step.plan
    assert plan.recomputed
    assert max(plan.peak, plan.static + plan.arena) <= plan.budget < plan.peak_before
    free = fit(other, loss, adamw(other), data(1024, 32), **OPTIONS)
    assert plan.peak_before == free.plan.peak
    for k in range(3):
        torch.manual_seed(k)
        found = step(data(1024, 32, k))
        torch.manual_seed(k)
        torch.testing.assert_close(found, free(data(1024, 32, k)))  # other masks would give another loss
        assert as_planned(step) and as_planned(free)
    assert_close(model, other)


@pytest.mark.slow
def test_masks_are_those_that_torch_compile_draws():
    model, other = net(2, dropout=0.5), net(2, dropout=0.5)
    step = fit(model, loss, sgd(model), data(), **OPTIONS)
    torch._dynamo.reset()
    stock = torch.compile(other)
    assert train(step) == pytest.approx(
        train(eager(other, sgd(other), lambda _, b: loss(stock, b))), rel=1e-5
    )
    assert_close(model, other)


class Path(nn.Module):
    """Whole rows that are left out, as in residual networks."""

    def forward(self, x):
        return x * x.new_empty(x.shape[0], 1).bernoulli_(0.6).div_(0.6)


class Channels(nn.Module):
    """Dropout of channels of one element."""

    def forward(self, x):
        return nn.functional.dropout1d(x.unsqueeze(-1), 0.4, self.training).squeeze(-1)


@pytest.mark.parametrize("drop", [Path(), Channels(), nn.AlphaDropout(0.4), nn.Dropout(0.4), nn.Dropout(0.5)])
def test_whatever_is_left_out_is_what_torch_compile_leaves_out(drop):
    """A dropout of single elements is of Inductor's own uniform numbers, all others are drawn as in eager: they were
    of the former, too."""
    model, other = (nn.Sequential(net(), drop) for _ in range(2))
    step = fit(model, loss, sgd(model), data(), **OPTIONS)
    torch._dynamo.reset()
    stock = torch.compile(other, dynamic=False)
    wanted = train(eager(other, sgd(other), lambda _, b: loss(stock, b)))
    assert train(step) == pytest.approx(wanted, rel=1e-5)
    assert as_planned(step)


@pytest.mark.slow
def test_numbers_are_no_further_from_exact_ones_than_inductors_are():
    model, other, exact = net(3, 32), net(3, 32), net(3, 32).double()
    step = fit(model, loss, sgd(model), data(256, 32), "80%", work=1_000_000, **OPTIONS)
    assert step.plan.recomputed
    torch._dynamo.reset()
    stock = torch.compile(other)
    rows = [eager(other, sgd(other), lambda _, b: loss(stock, b)), eager(exact, sgd(exact))]
    for k in range(3):
        x, y = data(256, 32, k)
        step((x, y))
        rows[0]((x, y))
        rows[1]((x.double(), y.double()))

    assert far(model, exact) <= 1.1 * far(other, exact)


@pytest.mark.slow
def test_the_least_peak_that_infeasible_reports_can_be_had():
    model = net(3, 32)
    with pytest.raises(errors.Infeasible) as found:
        fit(model, loss, sgd(model), data(512, 32), 1024, work=1_000_000, **OPTIONS)
    least = found.value.best_peak
    assert least >= found.value.lower_bound > 1024
    step = fit(model, loss, sgd(model), data(512, 32), least, work=1_000_000, **OPTIONS)
    train(step, 1, 512, 32)
    assert as_planned(step)
    assert step.measure()["measured_peak"] <= least


@pytest.mark.slow
def test_convolutions_and_running_statistics():
    def images(seed):
        g = torch.Generator().manual_seed(seed)
        return torch.randn(4, 3, 24, 24, generator=g), torch.arange(4)

    def convolutional():
        torch.manual_seed(0)
        rows = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
        rows += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
        return nn.Sequential(*rows, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))

    def entropy(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    model, other = convolutional(), convolutional()
    step = fit(model, entropy, sgd(model), images(0), "45%", work=1_000_000, **OPTIONS)
    assert step.plan.recomputed
    assert any("one after the other" in note for note in step.notes)
    reference = eager(other, sgd(other), entropy)
    for k in range(3):
        torch.testing.assert_close(step(images(k)), reference(images(k)))
        assert as_planned(step)
    for a, b in zip(model.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    assert_close(model, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_without_a_budget_it_takes_no_more_than_inductor_does():
    model, other = net(3, 32), net(3, 32)
    step = fit(model, loss, sgd(model), data(512, 32), **OPTIONS)
    torch._dynamo.reset()
    stock = torch.compile(other)
    reference = eager(other, sgd(other), lambda _, b: loss(stock, b))
    used = []
    for call, trained in ((step, model), (reference, other)):
        for _ in range(2):
            call(data(512, 32))
        for p in trained.parameters():
            p.grad = None
        batch = data(512, 32)
        with Meter() as meter:
            call(batch)
        used.append(meter.peak)
    assert step.plan.static + step.plan.arena <= step.plan.peak == step.plan.peak_before
    assert used[0] <= used[1]


# --- loops ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "Adam", "Adadelta", "Adagrad", "Adamax", "NAdam", "RMSprop", "Rprop", "amsgrad", "nesterov", "fused",
        "foreach",
    ],
)  # fmt: skip
def test_torchs_optimizers(name):
    special = {
        "Rprop": lambda m: torch.optim.Rprop(m.parameters()),
        "foreach": lambda m: torch.optim.NAdam(m.parameters(), weight_decay=0.01, foreach=True),
        "amsgrad": lambda m: adamw(m, amsgrad=True),
        "nesterov": lambda m: sgd(m, momentum=0.9, nesterov=True, weight_decay=0.01),
        "fused": lambda m: adamw(m, fused=True),
    }
    make = special.get(name) or (lambda m: getattr(torch.optim, name)(m.parameters(), weight_decay=0.01))
    model, other = net(), net()
    ours, theirs = make(model), make(other)
    step = fit(model, loss, ours, data(), **OPTIONS)
    assert train(step) == pytest.approx(train(eager(other, theirs)), rel=1e-4)
    assert as_planned(step)
    assert_close(model, other, rtol=1e-4, atol=1e-5)
    for a, b in zip(ours.state.values(), theirs.state.values(), strict=True):
        assert a.keys() == b.keys()
        for k in a:
            torch.testing.assert_close(a[k], b[k], rtol=1e-3, atol=1e-5)


def far(trained, exact):
    """The distance from a model in double precision."""
    pairs = zip(trained.parameters(), exact.parameters(), strict=True)
    return sum(float((a.detach().double() - b.detach()).norm() ** 2) for a, b in pairs) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.RAdam(p, lr=0.01, weight_decay=0.01),  # begins to rectify with the sixth step
        lambda p: torch.optim.RAdam(p, lr=0.01, weight_decay=0.01, decoupled_weight_decay=True, foreach=True),
        lambda p: torch.optim.ASGD(p, lr=0.05, t0=3, weight_decay=0.01),  # begins to average with the fifth
    ],
    ids=["RAdam", "decoupled", "ASGD"],
)
def test_steps_that_go_by_their_count_are_one_graph(make):
    model, other, exact = net(), net(), net().double()
    ours, theirs = make(model.parameters()), make(other.parameters())
    step = fit(model, loss, ours, data(), **OPTIONS)
    rows = [eager(other, theirs), eager(exact, make(exact.parameters()))]
    for k in range(8):
        x, y = data(seed=k)
        step((x, y))
        rows[0]((x, y))
        rows[1]((x.double(), y.double()))
        assert as_planned(step)
    assert len(step._variants) == 1
    assert far(model, exact) <= 1.1 * far(other, exact)
    for a, b in zip(ours.state.values(), theirs.state.values(), strict=True):
        assert a.keys() == b.keys()
        for k in a:
            torch.testing.assert_close(a[k], b[k], rtol=1e-4, atol=1e-5)


class Lion(torch.optim.Optimizer):
    """As other people write it: state at the first step, and no helpers of PyTorch's."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.0, start=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "start": start})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.full_like(p, group["start"])
                mean, (a, b) = state["exp_avg"], group["betas"]
                if group["weight_decay"] != 0:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(mean.lerp(p.grad, 1 - a).sign_(), alpha=-group["lr"])
                mean.lerp_(p.grad, 1 - b)


class Counting(Lion):
    """Counts in Python."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = 0.01 / (1 + group.setdefault("count", 0))
            group["count"] += 1
        super().step()


class Stepping(Lion):
    """Counts in Python, for each parameter."""

    def step(self, closure=None):
        super().step()
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            self.state[p]["step"] = self.state[p].get("step", 0) + 1


class Warm(Lion):
    """Goes by the value of its rate."""

    def step(self, closure=None):
        if self.param_groups[0]["lr"] > 0.5:
            return
        super().step()


@pytest.mark.slow
def test_other_peoples_optimizers_with_their_rates_and_what_they_leave_out():
    model, other = net(), net()
    ours, theirs = Lion(model.parameters()), Lion(other.parameters())
    step, reference = fit(model, loss, ours, data(), **OPTIONS), eager(other, theirs)
    for k in range(4):
        if k == 2:
            ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.002
        step(data(seed=k))
        reference(data(seed=k))
        assert as_planned(step)
    assert_close(model, other)
    assert len(step._variants) == 1
    for o in (ours, theirs):  # an op that was left out
        o.param_groups[0]["weight_decay"] = 0.5
    step(data())
    reference(data())
    assert_close(model, other)
    assert len(step._variants) == 2
    for a, b in zip(ours.state.values(), theirs.state.values(), strict=True):
        torch.testing.assert_close(a["exp_avg"], b["exp_avg"])


@pytest.mark.slow
def test_cycled_momenta_are_read_at_each_step_too():
    model, other = net(), net()
    ours, theirs = adamw(model), adamw(other)
    step = fit(model, loss, ours, data(), **OPTIONS)
    reference = eager(other, theirs)
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8) for o in (ours, theirs)]
    for k in range(4):
        step(data(seed=k))
        reference(data(seed=k))
        for s in schedulers:
            s.step()
    assert_close(model, other)
    assert len(step._variants) == 1
    ours.param_groups[0]["eps"] = theirs.param_groups[0]["eps"] = 0.1  # of the graph: another one
    step(data())
    reference(data())
    assert_close(model, other)
    assert len(step._variants) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [{"clip_norm": 0.1}, {"clip_value": 0.01}, {"accumulate": 2}, {"skip_nonfinite": True}, {"scaler": True}],
)
def test_what_a_loop_does_with_gradients(how):
    model, other = net(), net()
    optimizer, clip = adamw(other), how.get("clip_norm")
    more = {**how, "scaler": torch.amp.GradScaler("cpu", init_scale=8.0)} if "scaler" in how else how
    step = fit(model, loss, adamw(model), data(), budget="100%", work=1_000_000, **more, **OPTIONS)
    every = how.get("accumulate", 1)
    for k in range(4):
        found = step(data(seed=k))
        wanted = loss(other, data(seed=k))
        wanted.backward()
        torch.testing.assert_close(found, wanted.detach())
        if (k + 1) % every == 0:
            if clip:
                torch.nn.utils.clip_grad_norm_(other.parameters(), clip)
            if "clip_value" in how:
                torch.nn.utils.clip_grad_value_(other.parameters(), how["clip_value"])
            optimizer.step()
            optimizer.zero_grad()
    used = step.measure()
    assert used["measured_peak"] == used["planned_peak"] <= used["budget"]
    assert_close(model, other)


@pytest.mark.slow
def test_parts_of_a_step_and_gradients_between_them():
    model, other = net(), net()
    optimizer = sgd(other)
    step = fit(model, loss, sgd(model), data(), split=True, **OPTIONS)
    for k in range(2):
        step.backward(data(seed=k))
        optimizer.zero_grad()
        loss(other, data(seed=k)).backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
            p.grad.mul_(0.5)
            q.grad.mul_(0.5)
        step.update()
        optimizer.step()
        for p in model.parameters():
            p.grad = None
    assert_close(model, other)


@pytest.mark.slow
def test_kinds_of_batches_and_a_checkpoint_in_between():
    model, other = net(), net()
    ours, theirs = adamw(model), adamw(other)
    step, reference = fit(model, loss, ours, data(), "1MiB", work=1_000_000, **OPTIONS), eager(other, theirs)
    for n in (32, 8, 32):
        step(data(n))
        reference(data(n))
        assert as_planned(step)
    assert len(step._variants) == 2
    kept = copy.deepcopy((model.state_dict(), ours.state_dict()))
    step(data(seed=5))
    model.load_state_dict(kept[0])
    ours.load_state_dict(copy.deepcopy(kept[1]))  # it takes the tensors themselves
    step(data(seed=6))
    reference(data(seed=6))
    assert_close(model, other)
    fresh = net()
    again = adamw(fresh)
    fresh.load_state_dict(kept[0])
    again.load_state_dict(kept[1])
    fit(fresh, loss, again, data(), **OPTIONS)(data(seed=6))
    assert_close(fresh, other)


# --- refused ---


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"verify_every": 1}, "verify_every compares with eager's bits"),
        ({"allow": "recompute,offload"}, "'offload' goes with mode=\"exact\""),
        ({"allow": "split"}, "'split' goes with mode=\"exact\""),
        ({"hints": "0=compress"}, "'compress' goes with mode=\"exact\""),
        ({"folder": "/tmp"}, "'offload' goes with mode=\"exact\""),
        ({"planner": lambda graph, budget: None}, "planner= goes with exact mode"),
        ({"mode": "fast"}, "mode must be 'exact' or 'compiled'"),
    ],
)
def test_arguments_of_exact_mode_are_refused(more, rule):
    model = net()
    with pytest.raises(errors.BadInput, match=rule):
        fit(model, loss, sgd(model), data(), **{**OPTIONS, **more})


# --- what is saved, and choices that are kept ---


def stepped(x, *weights):
    """A step of four layers that writes its weights at the end."""
    with torch.enable_grad():
        leaves = [w.detach().requires_grad_() for w in weights]
        for w in leaves:
            x = torch.tanh(x @ w) * 2
        loss = x.square().sum()
    made = [w - 0.1 * g for w, g in zip(weights, torch.autograd.grad(loss, leaves), strict=True)]
    return loss.detach(), *(w.copy_(m) for w, m in zip(weights, made, strict=True))


def inputs(seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, generator=g) for s in ((32, 16), *((16, 16),) * 4)]


def test_what_inductor_saves_at_its_budgets_is_saved_in_a_step_with_the_same_numbers():
    gm = make_fx(stepped, tracing_mode="fake")(*inputs())
    model = fuse_step(gm, 1)
    exact, again = inputs(), []
    wanted = gm(*exact)
    for share in (1.0, 0.5, 0.0):
        saved = compat_inductor.stock_saved(gm, model.late, 1, share)
        made = model.saving(saved)
        names = [compat_inductor.origin(n) for n in made.graph.nodes]
        assert all(names.count(n) == 1 for n in saved)
        given = inputs()
        assert all(map(torch.equal, made(*given), wanted))
        assert all(map(torch.equal, given, exact))
        again.append(len(names) - len(gm.graph.nodes))
    assert again == sorted(again)
    assert again[-1] > again[0]


def test_an_update_of_hundreds_of_ops_is_written_in_a_moment():
    """Each op on the way to a write is looked at once: that took three times as long for each more of them."""

    def long(x, w):
        with torch.enable_grad():
            leaf = w.detach().requires_grad_()
            loss = (x @ leaf).square().sum()
        (d,) = torch.autograd.grad(loss, [leaf])
        for _ in range(400):
            d = d * 0.99 + w
        w.copy_(w - 1e-6 * d)
        return loss.detach()

    gm = make_fx(long, tracing_mode="fake")(*inputs()[:2])
    model = fuse_step(gm, 1)
    written = model.ordered(default.plan(model.graph, None, default.Options(place=False, reuse=False)))
    ours, theirs = inputs()[:2], inputs()[:2]
    assert torch.equal(written(*ours), gm(*theirs))
    assert torch.equal(ours[1], theirs[1])
    assert not torch.equal(ours[1], inputs()[1])


def test_updates_come_as_soon_as_their_gradients_do_and_after_the_last_read_of_what_they_write_over():
    gm = make_fx(stepped, tracing_mode="fake")(*inputs())
    model = fuse_step(gm, 1)
    made = model.saving(compat_inductor.stock_saved(gm, model.late, 1, 0.0))
    nodes = list(made.graph.nodes)
    writes = [n for n in nodes if n.target is torch.ops.aten.copy_.default]
    assert len(writes) == 4
    for n in writes:
        reads = [nodes.index(u) for u in n.args[0].users if u is not n]
        assert max(reads) < nodes.index(n)
    products = [k for k, n in enumerate(nodes) if n.target is torch.ops.aten.mm.default]
    assert (
        nodes.index(writes[0]) < products[-1] or nodes.index(writes[-1]) < products[-1]
    )  # not all at the end


@pytest.mark.slow
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.NAdam])
def test_a_step_that_fails_in_its_forward_pass_leaves_all_as_it_was_and_nothing_in_the_arena(make):
    """Compiled code counts steps as soon as it likes, and an error that is kept has frames."""

    def classified(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def everything():
        state = [t.clone() for state in optimizer.state.values() for t in state.values()]
        return [*state, *(p.detach().clone() for p in model.parameters())]

    model = net()
    optimizer = make(model.parameters(), 0.01)
    x, y = data()[0], torch.arange(32) % 4
    step = fit(model, classified, optimizer, (x, y), **OPTIONS)
    step((x, y))
    run, before = step._latest.executor._pass.call, everything()

    def counted(args):
        for state in optimizer.state.values():
            state["step"] += 1
        return run(args)

    step._latest.executor._pass.call = counted
    with pytest.raises(RuntimeError, match="index out of bounds") as error:
        step((x, y + 10))
    assert all(map(torch.equal, everything(), before))
    assert any("as they were" in note for note in error.value.__notes__)
    step._latest.executor._pass.call = run
    step((x, y))
    assert as_planned(step)
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


def test_where_a_graph_writes_is_noted_anew_when_a_plan_has_its_writes_elsewhere():
    """Else a product that reads a parameter is fused into a sum that comes after its update, and reads that."""
    gm = make_fx(stepped, tracing_mode="fake")(*inputs())
    pattern_matcher.compute_mutation_region_ids(gm.graph)
    assert not pattern_matcher.should_compute_mutation_region_ids(gm.graph)
    assert pattern_matcher.should_compute_mutation_region_ids(compat_inductor_partitions.copied(gm).graph)


def penalized(model, batch):
    """A critic's loss with a penalty on its gradient."""
    x = batch[0].detach().clone().requires_grad_(True)
    y = model(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + 10 * ((g.norm(dim=1) - 1) ** 2).mean()


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["100%", "85%"])
def test_gradients_of_gradients_are_right_within_a_budget(budget):
    """A weight is read in both passes of the penalty, and written where nothing reads it any more."""

    def critic():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def wide(dtype=torch.float32, seed=0):
        return (torch.randn(128, 16, generator=torch.Generator().manual_seed(seed)).to(dtype),)

    model, exact = critic(), critic().double()
    optimizer = torch.optim.SGD(exact.parameters(), lr=0.05)
    ours = torch.optim.SGD(model.parameters(), lr=0.05)
    step = fit(model, penalized, ours, wide(), budget, work=1_000_000, **OPTIONS)
    for k in range(3):
        found = step(wide(seed=k))
        wanted = penalized(exact, wide(torch.float64, k))
        wanted.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-6, atol=1e-6)
        assert as_planned(step)
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_checkpoint_around_each_block_of_a_step_takes_less_than_inductor_does(monkeypatch):
    found = {}

    class Stop(BaseException):
        pass

    def run(self):
        found["stock"] = self.stock().peak
        found["blocks"] = self.lowered(self.seed(None), None).peak
        raise Stop

    monkeypatch.setattr(StepSearch, "run", run)
    blocks = [
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Dropout(0.1)) for _ in range(4)
    ]
    model = nn.Sequential(*blocks)
    with pytest.raises(Stop):
        fit(model, lambda m, x: m(x).square().mean(), sgd(model), torch.randn(256, 16), **OPTIONS)
    assert found["blocks"] < 0.8 * found["stock"]


def test_blocks_of_a_step_are_those_of_the_model(monkeypatch):
    found = {}

    class Stop(BaseException):
        pass

    def choose(self, gm, _):
        found["model"] = fuse_step(gm, self.outputs)
        raise Stop

    monkeypatch.setattr(compiled_code.Compilation, "choose", choose)
    blocks = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.BatchNorm1d(16), nn.Linear(16, 4))
    with pytest.raises(Stop):
        fit(model, loss, sgd(model), data(), **OPTIONS)
    step = found["model"]
    saved = [n for n in step.gm.graph.nodes if n.name in between_blocks(step.gm, step.is_late)]
    shapes = [tuple(n.meta["val"].shape) for n in saved if n.op == "call_function"]
    assert shapes[:2] == [(32, 16), (32, 16)]
    assert (32, 32) not in shapes
    written = [n for n in step.late if n.target is torch.ops.aten.copy_.default]
    statistics = {n.args[1] for n in written} - step.late
    assert len(statistics) == 3  # of the forward pass, though no result needs them


@pytest.mark.slow
def test_a_second_start_of_a_step_chooses_nothing_and_a_file_that_does_not_hold_is_made_again(
    tmp_path, monkeypatch
):
    counted, candidate = [], StepSearch.candidate

    def counting(self, *args, **more):
        counted.append(1)
        return candidate(self, *args, **more)

    monkeypatch.setattr(StepSearch, "candidate", counting)

    def start():
        counted.clear()
        torch.manual_seed(0)
        rows = [m for _ in range(3) for m in (nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))]
        model = nn.Sequential(*rows, nn.Linear(16, 4))
        step = fit(
            model, loss, sgd(model), data(256), "75%", mode="compiled", strict=True, cache=str(tmp_path)
        )
        return train(step, n=256), (step.plan.peak, step.plan.source, step.plan.peak_before)

    first = start()
    assert counted
    assert start() == first
    assert not counted
    for file in tmp_path.glob("plan-code-*"):  # code that is kept is taken without another look
        file.unlink()
    (file,) = tmp_path.glob("plan-compiled-*")
    file.write_text(file.read_text().replace(f'"peak":{first[1][0]},', f'"peak":{first[1][0] + 64},'))
    assert start() == first
    assert counted


@pytest.mark.slow
def test_what_a_refusal_reached_is_taken_at_once(tmp_path, monkeypatch):
    model = net(3, 32)
    with pytest.raises(errors.Infeasible) as found:
        fit(
            model,
            loss,
            sgd(model),
            data(512, 32),
            1024,
            work=1_000_000,
            **{**OPTIONS, "cache": str(tmp_path)},
        )
    least = found.value.best_peak
    for budget in (least, least + 64):
        step = fit(
            model, loss, sgd(model), data(512, 32), budget, work=1_000_000,
            **{**OPTIONS, "cache": str(tmp_path)},
        )  # fmt: skip
        train(step, 1, 512, 32)
        assert as_planned(step)
        assert step.measure()["measured_peak"] <= budget


@pytest.mark.parametrize("budget", ["80%", 10**7])
def test_what_is_chosen_was_written_as_a_candidate(tmp_path, monkeypatch, budget):
    from torch._inductor import compile_fx

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    made, whole = [], compile_fx.fx_codegen_and_compile
    monkeypatch.setattr(
        compile_fx, "fx_codegen_and_compile", lambda *a, **k: made.append(1) or whole(*a, **k)
    )
    model = net(3, 32)
    step = fit(model, loss, sgd(model), data(512, 32), budget, **{**OPTIONS, "cache": str(tmp_path)})
    train(step, 1, 512, 32)
    assert as_planned(step)
    assert len(made) == step.plan.lowered


# PyTorch warns while it compiles; as errors, warnings would end the other thread's compilation halfway.
@pytest.mark.filterwarnings("default")
def test_another_thread_may_compile_at_the_same_time():
    wrong = []

    def others():
        for width in range(20, 26):
            model, x = net(1, width), data(8, width)[0]
            try:
                torch.testing.assert_close(torch.compile(model, dynamic=False)(x), model(x))
            except Exception as error:  # whatever it is: it is not of this thread's own code
                if "using FX to symbolically trace" not in str(error):  # PyTorch says so of all threads
                    wrong.append(error)

    thread = threading.Thread(target=others)
    thread.start()
    try:
        model = net(3, 32)
        step = fit(model, loss, sgd(model), data(512, 32), "80%", work=1_000_000, **OPTIONS)
        train(step, 1, 512, 32)
    finally:
        thread.join()
    assert as_planned(step)
    assert not wrong, [repr(error) for error in wrong]


@pytest.mark.parametrize("budget", [None, "80%"])
def test_the_next_process_compiles_nothing_of_a_step(tmp_path, monkeypatch, budget):
    from torch._inductor import compile_fx

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    made, whole = [], compile_fx.fx_codegen_and_compile

    def counting(*args, **more):
        made.append(1)
        return whole(*args, **more)

    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", counting)

    def start():
        made.clear()
        torch.manual_seed(0)
        rows = [m for _ in range(2) for m in (nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))]
        model = nn.Sequential(*rows, nn.Linear(16, 4))
        step = fit(
            model, loss, sgd(model), data(256), budget, mode="compiled", strict=True, cache=str(tmp_path)
        )
        numbers = train(step, n=256)
        assert as_planned(step)
        return numbers, step.plan

    first = start()
    assert made
    assert start() == first
    assert not made


# --- updates apart ---


class Clipping(Lion):
    """Couples parameters."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        super().step()


def dampened(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5)


APART = {
    "Adafactor": (lambda p: torch.optim.Adafactor(p), "follows from numbers in tensors"),
    "coupled": (Clipping, "several parameters at once"),
    "counting": (Counting, "it counts 'lr|count' in Python"),
    "stepping": (Stepping, "it keeps 'step' in Python"),
    "warm": (Warm, "follows from the value of lr"),
    "not_zeros": (lambda p: Lion(p, start=0.5), "Lion before its first step.*does not begin as zeros"),
    "dampening": (dampened, "SGD with dampening before its first step"),
}


def check_apart(name, **more):
    make, why = APART[name]
    model, exact = net(), net()
    step = fit(model, loss, make(model.parameters()), data(), **OPTIONS, **more)
    wanted = train(eager(exact, make(exact.parameters())))
    assert train(step) == pytest.approx(wanted, rel=1e-5)
    assert_close(model, exact)
    (note,) = [n for n in step.notes if "the update runs op by op" in n]
    assert re.search(why, note)
    assert as_planned(step)
    return step


def test_an_update_that_cannot_be_written_out_runs_op_by_op_after_a_compiled_backward_pass():
    step = check_apart("Adafactor")
    assert {v.part for v in step._variants} == {"backward", "update"}


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_steps_that_would_not_be_those_that_were_compiled_run_op_by_op_within_the_budget(name):
    step = check_apart(name, budget="100%")
    used = step.measure()
    assert used["measured_peak"] <= used["budget"]


@pytest.mark.slow
def test_an_update_apart_is_known_before_a_first_step_that_nobody_prepared():
    calls = []

    def counted(model, batch):
        calls.append(1)
        return loss(model, batch)

    model = net()
    step = fit(model, counted, Counting(model.parameters()), data(), prepare=False, **OPTIONS)
    kept = list(calls)
    step(data())
    assert step.plan.source and kept == []
    model.eval()
    step(data())
    with pytest.raises(errors.Unsupported, match="has a gradient"):
        model[0].weight.grad = torch.zeros_like(model[0].weight)
        step(data())


def test_a_scaler_with_a_fused_optimizer_is_refused():
    model = net()
    with pytest.raises(errors.Unsupported, match="a GradScaler with a fused optimizer"):
        fit(model, loss, adamw(model, fused=True), data(), scaler=torch.amp.GradScaler("cpu"), **OPTIONS)


def test_gradients_that_share_memory_are_refused():
    model = net()
    step = fit(model, loss, sgd(model), data(), split=True, prepare=False, **OPTIONS)
    whole = torch.zeros(2, 16)
    model[3].weight.grad, model[3].bias.grad = whole[0], whole[1]
    with pytest.raises(errors.Unsupported, match="which share memory, in compiled mode"):
        step.backward(data())


def test_a_hook_of_inductor_that_is_gone_stops_fit_and_nothing_runs_in_its_place(monkeypatch):
    monkeypatch.setattr(compat_inductor, "HOOKS", (("torch._inductor.compile_fx", "no_such_thing"),))
    model = net()
    with pytest.raises(errors.Unsupported, match="no_such_thing"):
        fit(model, loss, sgd(model), data(), **OPTIONS)


def test_what_is_compiled_is_what_was_replayed(monkeypatch):
    first = compiled_code.Compilation.replayed
    sizes = iter([0, 64])

    def drifting(self, lowered):
        found = first(self, lowered)
        found.peaks[-1] += next(sizes)
        return found

    monkeypatch.setattr(compiled_code.Compilation, "replayed", drifting)
    model = net()
    with pytest.raises(errors.VerificationFailed, match="that were replayed"):
        fit(model, loss, sgd(model), data(), **OPTIONS)


# --- views ---


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.transpose(0, 2),
        lambda t: t.view(2, 60),
        lambda t: t.split(5, 2)[1],
        lambda t: t.split(5, 2)[1].view(2, 6, 5, 1).transpose(1, 2),
        lambda t: t[:, 3],
        lambda t: t[1, 2, 7],
        lambda t: t[:, 1:4, 2:9],
        lambda t: t[0].view(3, 4, 5).permute(2, 0, 1),
        lambda t: t[:, :1].expand(2, 6, 10),
        lambda t: t.unsqueeze(1).expand(2, 3, 6, 10),
        lambda t: t.view(-1)[::3],
        lambda t: t.diagonal(dim1=0, dim2=1),
        lambda t: t.unfold(2, 4, 2),
        lambda t: t.view(2, 6, 2, 5)[:, :, 1, 2:4],
    ],
)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_views_are_found_from_shapes_and_strides(view, order):
    dense = torch.arange(120.0).view(2, 6, 10)
    base = dense.permute(order).contiguous().permute([order.index(k) for k in range(3)])
    try:
        wanted = view(base)
    except RuntimeError:
        pytest.skip("no view of a tensor in this order")

    def value(t):
        return Value("v", 0, "float32", tuple(t.shape), t.stride(), t.storage_offset())

    found = viewed(base, value(base), value(wanted))
    assert torch.equal(found, wanted)
    assert found.data_ptr() == wanted.data_ptr()


def test_another_type_of_the_same_bytes_is_refused():
    t = torch.zeros(4)
    base = Value("v", 0, "float32", (4,), (1,))
    with pytest.raises(errors.Unsupported, match="float32 read as int32"):
        viewed(t, base, Value("w", 0, "int32", (4,), (1,)))


class Laid(nn.Module):
    """Results that compiled code lays out otherwise than eager does, and views of them."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Linear(16, 16), nn.Linear(16, 4)
        self.c, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        x = self.a(x)
        if self.kind == "cat":  # what a key cache begins with
            heads = torch.cat([torch.zeros(0), x.view(8, 4, 4, 4).transpose(1, 2)], -2)
            x = heads.view(32, 16).sin().view(8, 4, 4, 4).transpose(1, 2).reshape(32, 16)
        elif self.kind == "derived":
            heads = x.view(8, 4, 4, 4).transpose(1, 2)
            x = (torch.cat([heads, heads[..., :0]], -1) * 0.5).view(32, 16)
        elif self.kind == "as_strided":
            heads = torch.cat([torch.zeros(0), x.view(8, 4, 4, 4).transpose(1, 2)], -2)
            x = x + heads.as_strided((32, 16), (16, 1)).sin() + heads.as_strided((32, 16), (16, 1)).cos()
        else:  # gradients of a norm of what is permuted
            rows = self.c(x.view(8, 4, 4, 4)) * 0.5
            x = x + self.norm(rows).permute(0, 3, 1, 2).mean((2, 3)).repeat(4, 4)
        return self.b(x)


@pytest.mark.parametrize("kind", ["cat", "derived", "as_strided", "norm"])
def test_results_are_laid_out_as_eager_lays_them_out_where_views_are_read(kind):
    torch.manual_seed(0)
    model = Laid(kind)
    other = copy.deepcopy(model)
    step = fit(model, loss, sgd(model), data(), **OPTIONS)
    theirs = train(eager(other, sgd(other)))
    assert train(step) == pytest.approx(theirs, rel=1e-5)
    assert as_planned(step)
    assert_close(model, other)


def test_what_the_compiler_cannot_do_is_refused_in_its_words(monkeypatch):
    monkeypatch.setattr(whole_ops, "_SHAPED_BY_DATA", ())
    model = net()

    def chosen(model, batch):
        rows = torch.nonzero(batch[1][:, 0] > 0)[:, 0]
        return (model(batch[0]) - batch[1]).square()[rows].mean()

    with pytest.raises(errors.Unsupported, match=r"compiled mode .*nonzero.* follows from numbers"):
        fit(model, chosen, sgd(model), data(), **OPTIONS)


class Experts(nn.Module):
    """A mixture whose experts multiply rows sorted by expert (transformers' ``grouped_mm``)."""

    def __init__(self):
        super().__init__()
        self.gate, self.out = nn.Linear(16, 4), nn.Linear(16, 4)
        self.up = nn.Parameter(torch.randn(4, 16, 32) / 4)
        self.down = nn.Parameter(torch.randn(4, 32, 16) / 4)

    def forward(self, x):
        weight, expert = self.gate(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = torch.arange(4).unsqueeze(1).ge(expert).sum(1).to(torch.int32)
        rows = torch._grouped_mm(
            nn.functional.gelu(torch._grouped_mm(x[order], self.up, offs=ends)), self.down, offs=ends
        )
        return self.out(x + (rows * weight[order].unsqueeze(1))[order.argsort()])


def test_experts_that_multiply_sorted_rows_train_as_in_eager():
    torch.manual_seed(0)
    model = Experts()
    other = copy.deepcopy(model)
    step = fit(model, loss, sgd(model), data(), "90%", **OPTIONS)
    assert train(step) == pytest.approx(train(eager(other, sgd(other))), rel=1e-5)
    assert as_planned(step)
    assert_close(model, other)
