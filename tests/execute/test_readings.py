"""Steps whose code looks at what they compute (``loss.item()`` for a log) are planned: they run up to what it looks
at when it does, and everything is eager's, the log included."""

import copy
import math
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tightship
from tightship.execute.interpreter import Fallback
from tightship.frontends.torch.capture.readings import Read


class Net(nn.Module):
    def __init__(self, drop=0.2):
        super().__init__()
        self.a, self.bn, self.drop = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(drop)
        self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 5)
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.step, self.log, self.state = 0, [], None

    def forward(self, x):
        h = self.drop(F.gelu(self.bn(self.a(x))))
        return self.c(h + self.b(h).tanh())


def batches(count=6):
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(16, 8, generator=g), torch.randint(5, (16,), generator=g)) for _ in range(count)]


def plain(m, b):
    m.step += 1
    out = m(b[0])
    return out, F.cross_entropy(out, b[1])


# --- looks: each logs what eager's code sees ---


def numbers(m, b):
    out, loss = plain(m, b)
    right = out.argmax(-1) == b[1]
    m.log.append(
        {"loss": loss.item(), "size": float(out.detach().pow(2).mean()), "right": right.sum().item()}
    )
    m.log.append([((out.argmax(-1) == c) & right).sum().item() for c in range(5)])
    return loss


def text(m, b):
    out, loss = plain(m, b)
    m.log += [f"{loss:.4f} {loss.item():.3f} {loss}", str(loss), repr(out[:2]), f"{out.detach()[0]}"]
    return loss


def arrays(m, b):
    out, loss = plain(m, b)
    m.log += [
        out.detach().numpy().argmax(-1).tolist(),
        np.asarray(out.detach()).sum(),
        out.argmax(-1).tolist(),
    ]
    m.log += [b[1].numpy().sum(), b[1].tolist(), b[0][0].tolist(), m.c.bias.detach().numpy().copy().tolist()]
    return loss


def half(m, b):
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = plain(m, b)
    with torch.no_grad():
        m.log += [out.max().item(), out[0].tolist(), out.float().softmax(-1).max().item()]
    return F.cross_entropy(out.float(), b[1])


def parameters_and_buffers(m, b):
    m.count += 1
    before = int(m.bn.num_batches_tracked), m.bn.running_mean.sum().item(), m.a.weight.norm().item()
    _, loss = plain(m, b)
    m.mean.mul_(0.9).add_(m.a(b[0]).detach().mean(0), alpha=0.1)
    m.log += [before, loss.item(), int(m.bn.num_batches_tracked), m.bn.running_mean.sum().item()]
    m.mean.mul_(2)
    m.log += [m.mean.sum().item(), m.count.item()]
    return loss * 2 if m.count.item() % 2 else loss


def gradient(m, b):
    _, loss = plain(m, b)
    (g,) = torch.autograd.grad(loss, [m.c.weight], retain_graph=True)
    m.log.append(g.norm().item())
    return loss + g.detach().pow(2).sum()


def scaled(m, b):
    out, loss = plain(m, b)
    size = out.pow(2).mean()
    weight = loss.item() / (size.item() + 1e-8)
    m.log.append(weight)
    return loss + 0.1 * weight * size + torch.tensor(weight) * 0.01 * out.mean()


def scheduled(m, b):
    out, loss = plain(m, b)
    loss = loss * 0.9**m.step
    m.log.append(loss.item())
    return loss * (1 + 0.1 * m.step) + torch.tensor(0.1 * m.step) * out.pow(2).mean()


def best(m, b):
    _, loss = plain(m, b)
    if loss.item() < (m.state or math.inf):
        m.state = loss.item()
        m.log.append(m.state)
    return loss


def branch(m, b):
    out, loss = plain(m, b)
    if loss.item() > 1.7:
        loss = loss + 0.1 * out.pow(2).mean()
        m.log.append(m.step)
    return loss


def now_and_then(m, b):
    _, loss = plain(m, b)
    if m.step % 3 == 0:
        m.log.append(loss.item())
    return loss


def drawn(m, b):
    out, loss = plain(m, b)
    m.log.append(out.sum().item())
    again = m(b[0])
    m.log += [again.sum().item(), torch.rand(()).item(), random.random()]
    if torch.rand(1).item() < 0.5:
        again = again * 2
    return loss + F.cross_entropy(again, b[1])


def kept(m, b):
    h = m.a(b[0])
    h = h if m.state is None else h + 0.1 * m.state
    m.state = h.detach()
    loss = F.cross_entropy(m.c(h), b[1])
    m.log += [loss.item(), loss.detach()]
    return loss


def finite(m, b):
    _, loss = plain(m, b)
    if not math.isfinite(loss.item()):
        raise RuntimeError("diverged")
    return loss


def caught(m, b):
    _, loss = plain(m, b)
    try:
        m.log.append(loss.item())
    except Exception:
        m.log.append("not there")
    return loss


def checkpointed(m, b):
    def block(h):
        out = m.b(h).tanh()
        m.log.append(out.abs().mean().item())
        return out

    h = block(m.a(b[0]))
    loss = F.cross_entropy(m.c(checkpoint(m.b, h, use_reentrant=False)), b[1])
    m.log.append(loss.item())
    return loss


def written_batch(m, b):
    x = b[0]
    x.mul_(1.01)
    out = m(x.clone())
    m.log += [out.sum().item(), x.sum().item()]
    x.add_(0.01)
    m.log.append(x.sum().item())
    return F.cross_entropy(out, b[1])


def shape(m, b):
    """How many rows count follows from what the step computes, and is one of few numbers."""
    out, loss = plain(m, b)
    rows = 4 if out.mean().item() > 0 else 8
    return loss + out[:rows].pow(2).mean()


LOOKS = [
    numbers, text, arrays, half, parameters_and_buffers, gradient, scaled, scheduled, best, branch, now_and_then,
    drawn, kept, finite, caught, checkpointed, written_batch, shape,
]  # fmt: skip


def trained(loss_fn, make, data, **how):
    torch.manual_seed(0)
    random.seed(0)
    model = Net()
    data = copy.deepcopy(data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = make(model, loss_fn, optimizer, data[0], **how)
    torch.manual_seed(1)
    losses = [step(b).detach().clone() for b in data]
    return step, (losses, list(model.state_dict().values()), torch.get_rng_state(), data), model.log


def eager(model, loss_fn, optimizer, _, accumulate=1, clip_norm=None, **__):
    def step(b):
        loss = loss_fn(model, b)
        loss.backward()
        step.count += 1
        if step.count % accumulate == 0:
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    step.count = 0
    return step


class Fitted:
    def __init__(self, model, loss_fn, optimizer, b, budget="100%", **how):
        self.step = tightship.fit(model, loss_fn, optimizer, b, budget, cache=None, seconds_per_op=0.0, **how)
        self.rows = []

    def __call__(self, b):
        out = self.step(b)
        self.rows.append(self.step.measure())
        return out


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def check(loss_fn, data=None, **how):
    data = data or batches()
    _, expected, log = trained(loss_fn, eager, data, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Fallback)
        warnings.filterwarnings("ignore", message="Converting a tensor with requires_grad")
        fitted, found, logged = trained(loss_fn, Fitted, data, **how)
    assert same(log, logged)
    assert same(expected, found)
    for row in fitted.rows[how.get("accumulate", 1) :]:  # the first update makes the optimizer's state
        assert row["planned_peak"] == row["measured_peak"]
        assert row["misses"] == 0
    return fitted.step


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("look", LOOKS, ids=lambda f: f.__name__)
def test_what_the_code_looks_at_is_there_and_the_step_is_planned(look):
    check(look, budget="120%" if look is kept else "100%")  # steps after the first have a state


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize(
    "how",
    [{"accumulate": 2}, {"clip_norm": 0.1}, {"verify_every": 2}, {"strict": True}, {"budget": "static+85%"},
     {"allow": "recompute,offload", "budget": "static+80%"}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("look", [numbers, parameters_and_buffers, drawn], ids=lambda f: f.__name__)
def test_with_all_that_a_step_can_do(look, how):
    check(look, **how)


def test_ops_run_once_and_what_is_read_in_the_plan():
    """A look costs the reading, no second forward pass."""
    step = check(numbers)
    reads = [c.fn for c in step._latest.program.calls if isinstance(c.fn, Read)]
    assert len(reads) == 8
    assert [s.kind for s in step.plan.steps if s.op >= 0].count("compute") == len(step._latest.program.calls)
    graph = step._latest.program.graph
    last = max(k for k, op in enumerate(graph.ops) if op.target == "read")
    assert all(last in op.control for op in graph.ops if op.phase == "update")


def test_an_error_after_a_look_changes_nothing():
    model, data = Net(), batches()

    def fails(m, b):
        _, loss = plain(m, b)
        m.log.append(loss.item())
        if m.step == 3:
            raise KeyError("stop")
        return loss

    optimizer = torch.optim.AdamW(model.parameters())
    step = tightship.fit(model, fails, optimizer, data[0], "100%", cache=None, seconds_per_op=0.0)
    step(data[0])
    step(data[1])
    before, drawn_from = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(KeyError, match="stop"):
        step(data[2])
    assert same(list(before.values()), list(model.state_dict().values()))
    assert torch.equal(drawn_from, torch.get_rng_state())
    step(data[2])
    assert step.measure()["planned_peak"] == step.measure()["measured_peak"]


def test_paths_that_change_all_the_time_run_in_eager():
    """Each step has other shapes by what it computes: none is planned for long."""

    def rows(m, b):
        out, loss = plain(m, b)
        m.log.append(int((out > 0.1 * m.step).sum()))
        return loss + out.reshape(-1)[: max(m.log[-1], 1)].pow(2).mean()

    data = batches(12)
    _, expected, log = trained(rows, eager, data)
    with pytest.warns(Fallback, match=r"steps run in eager.*looking at.*test_readings\.py") as seen:
        fitted, found, logged = trained(rows, Fitted, data)
    assert same(log, logged)
    assert same(expected, found)
    assert len([w for w in seen if w.category is Fallback]) == 1
    assert fitted.step.metrics()["eager"] == 1


def test_answers_that_change_all_the_time_are_waited_for():
    def turns(m, b):
        out, loss = plain(m, b)
        if out.mean() > out.median():
            loss = loss * 0.9
            m.log.append(m.step)
        return loss

    data = batches(24)
    _, expected, log = trained(turns, eager, data)
    with pytest.warns(Fallback, match="another answer than"):
        fitted, found, logged = trained(turns, Fitted, data)
    assert same(log, logged)
    assert same(expected, found)
    assert 0 < len(log) < 24
    assert [row["planned_peak"] is None for row in fitted.rows[-6:]] == [False] * 6


def test_an_array_that_the_code_changes_is_an_error():
    def changes(m, b):
        out, loss = plain(m, b)
        out.detach().numpy()[:] = 0.0
        return loss

    model = Net()
    with pytest.raises(tightship.Unsupported, match="changing an array that is also a tensor's"):
        tightship.fit(model, changes, torch.optim.SGD(model.parameters(), 0.1), batches()[0], cache=None)


def test_a_large_array_cannot_be_changed():
    """Beyond what is watched for changes."""

    def changes(m, b):
        out, loss = plain(m, b)
        out.detach().expand(1 << 14, 16, 5).clone().numpy()[:] = 0.0
        out.detach().expand(1 << 16, 16, 5).clone().numpy()[:] = 0.0
        return loss

    model = Net()
    with pytest.raises(ValueError, match="read-only"):
        tightship.fit(model, changes, torch.optim.SGD(model.parameters(), 0.1), batches()[0], cache=None)


def in_a_function(m, b):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            m.log.append(x.max().item())
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    return F.cross_entropy(Twice.apply(m(b[0])), b[1])


def replaced(m, b):
    _, loss = plain(m, b)
    m.mean = 0.9 * m.mean + 0.1 * m.a(b[0]).detach().mean(0)
    m.log.append(loss.item())
    return loss


@pytest.mark.parametrize("look", [in_a_function, replaced], ids=lambda f: f.__name__)
def test_where_code_cannot_wait_steps_run_in_eager(look):
    data = batches()
    _, expected, log = trained(look, eager, data)
    with pytest.warns(Fallback, match="must not depend on data"):
        _, found, logged = trained(look, Fitted, data)
    assert same(log, logged)
    assert same(expected, found)


def test_numbers_that_functions_ask_for_themselves():
    """Another path where they differ, as the function's result may have another shape."""

    def codes(m, b):
        out, loss = plain(m, b)
        kinds = (out > 0).any(0).sum() * 0 + 5  # always 5, which nobody knows before the step runs
        m.log.append(kinds.item())
        return loss + F.one_hot(b[1], kinds).float().mul(out).mean()

    check(codes)
