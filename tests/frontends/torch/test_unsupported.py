"""What cannot be captured is said by op, module and line, with what to do instead."""

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tightship
from tightship.errors import BadInput, Unsupported
from tightship.frontends.torch.capture.step import capture_loss, capture_step

X = torch.randn(4, 8)


def plain(net, x):
    return net(x).sum()


def capture(net, loss_fn=plain, batch=X, optimizer=None):
    return capture_step(net, loss_fn, optimizer, batch)


class Doing(nn.Module):
    """Does ``action(self, hidden)`` in its middle."""

    def __init__(self, action):
        super().__init__()
        self.first, self.last, self.action = nn.Linear(8, 8), nn.Linear(8, 4), action
        self.mean, self.count = torch.tensor(1.0), 0

    def forward(self, x):
        return self.last(self.action(self, self.first(x)))


def branch(net, h):
    return h if h.sum() > 0 else -h


def select(net, h):
    return h[h[:, 0] > 0]


def drawn(net, h):
    return h if torch.poisson(torch.ones([])) < 0.5 else 2 * h


def seeded(net, h):
    torch.manual_seed(3)
    return F.dropout(h, 0.5)


def own_generator(net, h):
    return h * torch.rand(8, generator=torch.Generator().manual_seed(0))


def numpy_random(net, h):
    return h * float(numpy.random.rand())


def python_random(net, h):
    return h * random.random()


def resized(net, h):
    return h + h.detach().clone().resize_(8, 8)[:4]


def converted(net, h):
    net.last.to(torch.float64)
    return h


def grown(net, h):
    net.extra = nn.Linear(1, 1)
    return h


def average(net, h):
    net.mean = 0.9 * net.mean + 0.1 * h.detach().mean()
    return h * net.mean


def annealed(net, h):
    net.count += 1
    return h * (1 / net.count)


def warmed_up(net, h):
    net.count += 1
    return h * torch.tensor(min(net.count, 5) / 5)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (branch, ["_local_scalar_dense", "test_unsupported.py:", "torch.where"]),
        (select, ["aten.index", "test_unsupported.py:"]),
        (drawn, ["aten.poisson", "torch.rand"]),
        (seeded, ["random state", "seed before the step"]),
        (own_generator, ["generator"]),
        (numpy_random, ["NumPy"]),
        (python_random, ["Python"]),
        (resized, ["resiz"]),
        (converted, ["converting", "weight"]),
        (grown, ["modules", "run the model once"]),
        (average, ["Doing.mean", "register_buffer"]),
        (annealed, ["Doing.count", "next step"]),
        (warmed_up, ["Doing.count", "next step"]),
    ],
)
def test_unsupported(action, words):
    net = Doing(action)
    states = torch.get_rng_state(), random.getstate()
    kept = set(vars(net)), dict(net.named_modules())
    with pytest.raises(Unsupported) as e:
        capture(net)
    for w in words:
        assert w in str(e.value)
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert kept == (set(vars(net)), dict(net.named_modules()))
    assert all(type(p) is nn.Parameter for p in net.parameters())


def test_a_count_that_decides_nothing_is_noted():
    def counted(net, h):
        net.count += 1
        net.mean = h.detach().mean()
        return h

    net = Doing(counted)
    program = capture(net)
    assert [n.split()[0] for n in program.notes] == ["Doing.mean", "Doing.count"]
    assert net.count == 0 and net.mean == 1.0


def test_the_place_is_the_users_line_and_module():
    net = nn.Sequential(nn.Linear(8, 8), Doing(branch))
    with pytest.raises(Unsupported, match=r"at 1 · .*test_unsupported\.py:\d+"):
        capture(net)


def test_sparse_gradients():
    net = nn.Embedding(5, 3, sparse=True)
    with pytest.raises(Unsupported, match="sparse=False"):
        capture(net, batch=torch.tensor([1, 2]))


def test_hooks_on_parameters():
    net = nn.Linear(8, 4)
    net.weight.register_hook(lambda g: g * 2)
    with pytest.raises(Unsupported, match=r"hook.*weight"):
        capture(net)


def test_results_that_are_not_tensors():
    with pytest.raises(Unsupported, match="object"):
        capture(nn.Linear(8, 4), lambda net, x: (net(x).sum(), object()))


@pytest.mark.parametrize(
    ("net", "loss_fn", "batch", "rule"),
    [
        (3, plain, X, "torch.nn.Module"),
        (nn.Linear(8, 4), lambda net, x: net(x), X, "one element"),
        (nn.Linear(8, 4), lambda net, x: 1.0, X, "one element"),
        (nn.Linear(8, 4), lambda net, x: x.sum(), X, "depends on no parameter"),
        (nn.Linear(8, 4).requires_grad_(False), plain, X, "requires a gradient"),
        (nn.ReLU(), plain, X, "requires a gradient"),
        (nn.Linear(8, 4), nn.MSELoss(), X, r"\(inputs, targets\)"),
        (nn.Linear(8, 4), None, X, "mapping"),
        (nn.Linear(8, 4), None, {"input": X}, "no loss in"),
        (nn.Linear(8, 4), 3, X, "loss_fn"),
    ],
)
def test_bad_input(net, loss_fn, batch, rule):
    with pytest.raises(BadInput, match=rule):
        capture(net, loss_fn, batch)


def test_optimizers_that_couple_parameters():
    net = nn.Linear(8, 4)
    with pytest.raises(Unsupported, match=r"LBFGS.*closure"):
        capture(net, optimizer=torch.optim.LBFGS(net.parameters()))

    class Clipped(torch.optim.SGD):
        def step(self, closure=None):
            params = [p for g in self.param_groups for p in g["params"]]
            nn.utils.clip_grad_norm_(params, 1.0)
            return super().step(closure)

    program = capture(net, optimizer=Clipped(net.parameters(), lr=0.1))
    assert sum(op.phase == "update" for op in program.graph.ops) == 1
    assert any("all parameters at once" in note for note in program.notes)


def test_optimizers_with_hooks_or_of_another_model():
    net = nn.Linear(8, 4)
    hooked = torch.optim.SGD(net.parameters(), lr=0.1)
    hooked.register_step_post_hook(lambda *a: None)
    with pytest.raises(Unsupported, match="step hooks"):
        capture(net, optimizer=hooked)
    with pytest.raises(BadInput, match="not one of the model's"):
        capture(net, optimizer=torch.optim.SGD(nn.Linear(8, 4).parameters(), lr=0.1))
    before = torch.optim.SGD(net.parameters(), lr=0.1)
    net.load_state_dict({n: t.clone() for n, t in net.state_dict().items()}, assign=True)
    with pytest.raises(BadInput, match=r"assign=True.*before the optimizer is made"):
        capture(net, optimizer=before)
    with pytest.raises(BadInput, match=r"torch\.optim\.Optimizer"):
        capture(net, optimizer=torch.optim.lr_scheduler.StepLR(torch.optim.SGD(net.parameters(), 0.1), 1))


def test_capture_loss_without_gradients():
    with pytest.raises(BadInput, match="does not depend on its parameters"):
        capture_loss(_Constant(), X)


class _Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x + self.w.detach()


@pytest.mark.skipif(bool(torch.version.cuda), reason="PyTorch has been built with CUDA")
def test_a_device_that_this_pytorch_cannot_think_of() -> None:
    model = torch.nn.Linear(4, 2, device="meta")
    with pytest.raises(Unsupported, match=r"cuda:0.*built without CUDA"):
        capture_loss(model, torch.empty(3, 4, device="meta"), device="cuda:0")


@pytest.mark.parametrize("way", ["fit", "plan", "infer", "estimate"])
def test_lazy_modules_have_no_shape_yet(way):
    model, x = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()), torch.randn(3, 2)
    with pytest.raises(
        BadInput, match=r"model: '0\.weight' gets its shape from the first batch .*: run the model once"
    ):
        if way == "fit":
            sgd = torch.optim.SGD(model.parameters())
            tightship.fit(model, lambda m, b: m(b).sum(), sgd, x, "100%")
        else:
            getattr(tightship, way)(model, x)
