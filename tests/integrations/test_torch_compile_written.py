"""The torch.compile backend: tensors that are written between the forward pass and the backward pass."""

import pytest
import torch
from torch import nn

from support.compiled import QUICK
from tightship.errors import Infeasible
from tightship.execute import allocator
from tightship.integrations.torch_compile import compiled_plans, measured_step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Queue(nn.Module):
    """Momentum contrast: keys of earlier batches lie in a buffer, of which the forward pass reads a copy."""

    def __init__(self, copied, broken):
        super().__init__()
        torch.manual_seed(0)
        self.of, self.copied, self.broken = nn.Linear(32, 16), copied, broken
        self.register_buffer("queue", torch.randn(16, 256))
        self.at = 0

    def forward(self, x):
        q = nn.functional.normalize(self.of(x), dim=1)
        queue = self.queue.clone().detach() if self.copied else nn.functional.normalize(self.queue, dim=0)
        logits = (q @ queue) / 0.07
        if self.broken:
            torch._dynamo.graph_break()
            self.write(q)
        return nn.functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    @torch.no_grad()
    def write(self, keys):
        self.queue[:, self.at : self.at + len(keys)] = keys.detach().T
        self.at = (self.at + len(keys)) % 256


def train(model, call, write):
    losses = []
    for k in range(3):
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(k))
        loss = call(x)
        if write:
            model.write(model.of(x))
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    return losses, [t.clone() for t in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize(
    ("copied", "broken"), [(True, True), (False, True), (True, False)], ids=["copied", "read", "caller"]
)
def test_what_is_written_later_is_not_read_again_in_the_backward_pass(copied, broken):
    """Eager saves the copy, or what is made of the buffer, and so must a plan: autograd raises otherwise."""
    eager = Queue(copied, broken)
    expected, tensors = train(eager, eager, write=not broken)
    budget = "65%"
    for _ in range(6):  # with a graph break, what one graph needs is not all there is to it
        torch._dynamo.reset()
        model = Queue(copied, broken)
        call = torch.compile(model, backend="tightship", options={**QUICK, "budget": budget})
        try:
            losses, found = train(model, call, write=not broken)
            break
        except Infeasible as no:
            budget = no.best_peak
    assert losses == expected
    assert all(map(torch.equal, found, tensors))
    assert compiled_plans(call)


class Averages(nn.Module):
    """Batch norm, and a codebook's averages: the forward pass writes new ones to its buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(16, 128), nn.BatchNorm1d(128), nn.Linear(128, 4)
        self.middle = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(128, 128), nn.ReLU())))
        self.register_buffer("mean", torch.zeros(2048))

    def forward(self, x):
        h = self.norm(self.up(x)).relu()
        with torch.no_grad():
            self.mean.lerp_(h.mean(0).repeat(16), 0.1)
        return self.down(self.middle(h)).square().mean()


@pytest.mark.skipif(not allocator.available(), reason="no C++ compiler")
@pytest.mark.parametrize("budget", [None, "80%"])
def test_what_is_written_to_buffers_is_gone_after_the_forward_pass(budget):
    """New statistics counted as results that the caller has until the backward pass is over."""
    model, x = Averages(), torch.randn(256, 16)
    call = torch.compile(model, backend="tightship", options={**QUICK, "budget": budget})
    for _ in range(2):
        model.zero_grad()
        with measured_step(call) as memory:
            call(x).backward()
            model.zero_grad()
    assert memory.planned == memory.measured
    (graph,) = compiled_plans(call)
    assert graph.last.as_planned


def reshaped(x):
    return x.transpose(0, 1).reshape(6, 4)  # a copy, and no view of x


def added(x):
    o = reshaped(x)
    z = o.exp()
    torch._dynamo.graph_break()
    o.add_(1.0)
    return z.sum() + (o * o).sum()


def put(x):
    o = reshaped(x).contiguous()
    z = o.exp()
    torch._dynamo.graph_break()
    o[torch.tensor([0, 1]), torch.tensor([1, 0])] = x.sum()
    return z.sum() + o.sum()


def made_without_gradients(x):
    with torch.no_grad():
        o = reshaped(x)
        z = o.exp()
    torch._dynamo.graph_break()
    o.mul_(x.view(6, 4)[:, :1])
    return (o * z).sum()


@pytest.mark.parametrize("step", [added, put, made_without_gradients])
def test_a_result_that_the_graph_reads_too_may_be_written(step):
    """Longformer writes to the rows of tokens with global attention so."""
    found = []
    for call in (step, torch.compile(step, backend="tightship", options=QUICK)):
        x = torch.arange(24.0).view(2, 3, 4).mul(0.1).requires_grad_()
        loss = call(x)
        loss.backward()
        found.append((loss.detach(), x.grad))
    (loss, grad), (ours, gradient) = found
    assert torch.equal(loss, ours)
    assert torch.equal(grad, gradient)


def test_a_result_that_is_saved_is_seen_to_be_written():
    def step(x):
        o = reshaped(x)
        z = o * o
        torch._dynamo.graph_break()
        o.add_(1.0)
        return z.sum() + o.sum()

    for call in (step, torch.compile(step, backend="tightship", options=QUICK)):
        x = torch.rand(2, 3, 4, requires_grad=True)
        loss = call(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
