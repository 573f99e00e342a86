"""Hooks on parameters: what they do to gradients is part of the planned step, or the step says why it is not."""

import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.state import differences, snapshot
from tightship.errors import Unplannable, Unsupported
from tightship.execute.fit import fit
from tightship.execute.interpreter import Fallback


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("measurements")


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))


def batches(count):
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(12, 8, generator=g), torch.randint(4, (12,), generator=g)) for _ in range(count)]


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def adams(model):
    return [torch.optim.Adam([p], lr=0.01) for p in model.parameters()]


QUICK = {"budget": "static+95%", "seconds": 10.0, "work": 20_000, "seconds_per_op": 0.0, "verify_every": 2}


class Two:
    """A loop in eager, and the same by ``fit``; ``hook(model, optimizers, log)`` puts hooks on each model."""

    def __init__(self, hook, kept, make_optimizer=adam, *, updates=True, **options):
        self.sides, self.updates = [], updates
        for _ in range(2):
            model = make()
            optimizer = make_optimizer(model)
            log: list = []
            hook(model, optimizer, log)
            self.sides.append((model, optimizer, log))
        model, optimizer, _ = self.sides[1]
        self.fitted = fit(model, loss_fn, optimizer, batches(1)[0], cache=kept, **(QUICK | options))

    def eager(self, batch):
        model, optimizer, _ = self.sides[0]
        loss = loss_fn(model, batch)
        loss.backward()
        for o in optimizer if isinstance(optimizer, list) else [optimizer]:
            if self.updates:
                o.step()
        model.zero_grad()
        return loss.detach()

    def run(self, between=lambda k: None, count=5, ours=None):
        for k, batch in enumerate(batches(count)):
            between(k)
            torch.manual_seed(k)
            expected = self.eager(batch)
            torch.manual_seed(k)
            found = (ours or self.fitted)(batch)
            assert torch.equal(expected, found.detach())
            (a, _, log), (b, _, other) = self.sides
            assert not differences(snapshot(a), snapshot(b))
            assert repr(log) == repr(other)
        return self

    def as_planned(self):
        m = self.fitted.measure()
        assert m["misses"] == 0
        assert m["measured_peak"] == m["planned_peak"]
        assert not any(call.repeats for call in self.fitted._variants[0].traces[0].calls)


def each(fn):
    return lambda model, optimizer, log: [p.register_hook(fn) for p in model.parameters()]


def late(fn):
    def hook(model, optimizer, log):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(fn)

    return hook


LIMIT = 1e-3


def masked(model, optimizer, log):
    for p in model.parameters():
        mask = (torch.rand(p.shape, generator=torch.Generator().manual_seed(0)) < 0.5).float()
        p.register_hook(lambda g, mask=mask: g * mask)


def rows_frozen(model, optimizer, log):
    def frozen(grad):
        grad = grad.clone()
        grad[:3] = 0
        return grad

    model[0].weight.register_hook(frozen)


def norms_added(model, optimizer, log):
    total = torch.zeros(())
    log.append(total)

    def add(grad):
        total.add_(grad.norm())

    for p in model.parameters():
        p.register_hook(add)


def clip_each(p):
    nn.utils.clip_grad_norm_([p], 0.01)


def halve(p):
    p.grad.mul_(0.5)


def replace_gradient(p):
    p.grad = p.grad.clamp(-LIMIT, LIMIT)


TENSORS_ALONE = {
    "clamp": each(lambda g: g.clamp(-0.001, 0.001)),
    "in place": each(lambda g: g.clamp_(-0.001, 0.001)),
    "a global": each(lambda g: g.clamp(-LIMIT, LIMIT)),
    "a mask": masked,
    "rows": rows_frozen,
    "norms in a tensor": norms_added,
    "clip_grad_norm_": late(clip_each),
    "late, in place": late(halve),
    "late, another": late(replace_gradient),
}


@pytest.mark.parametrize("name", TENSORS_ALONE)
def test_hooks_of_ops_alone_are_part_of_the_plan(name, kept):
    Two(TENSORS_ALONE[name], kept).run().as_planned()


@pytest.mark.parametrize("name", ["clamp", "a mask", "late, in place"])
def test_hooks_run_in_each_backward_pass_of_several(name, kept):
    """A hook sees the gradient of one batch, a late one the sum so far."""
    two = Two(TENSORS_ALONE[name], kept, accumulate=2)
    model, optimizer, _ = two.sides[0]

    def eager(batch):
        loss = loss_fn(model, batch)
        loss.backward()
        eager.count += 1
        if eager.count % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    eager.count, two.eager = 0, eager
    for k, batch in enumerate(batches(6)):
        torch.manual_seed(k)
        expected = two.eager(batch)
        torch.manual_seed(k)
        assert torch.equal(expected, two.fitted(batch))
    assert not differences(snapshot(model), snapshot(two.sides[1][0]))


def test_a_number_of_a_hook_may_change(kept):
    scale = [1.0]

    def hook(model, optimizer, log):
        for p in model.parameters():
            p.register_hook(lambda g: g * scale[0])

    two = Two(hook, kept).run(lambda k: scale.__setitem__(0, 1 / (k + 1)))
    assert len(two.fitted._variants) == 1


def test_hooks_come_and_go(kept):
    handles = []

    def between(k):
        if k == 1:
            handles.extend(m[0].weight.register_hook(lambda g: g * 2) for m, _, _ in two.sides)
        if k == 3:
            for handle in handles:
                handle.remove()

    two = Two(lambda *_: None, kept)
    two.run(between)
    assert len(two.fitted._variants) == 2


def test_python_of_a_hook_runs_in_every_step(kept):
    def hook(model, optimizer, log):
        for n, p in model.named_parameters():
            p.register_hook(lambda g, n=n: log.append(n))

    two = Two(hook, kept, verify_every=0)
    assert two.sides[1][2] == []  # what preparing has done is undone
    two.run()


def test_python_of_a_hook_runs_once_in_a_step_that_is_verified(kept):
    def hook(model, optimizer, log):
        model[0].weight.register_hook(lambda g: log.append(len(log)))

    Two(hook, kept, verify_every=1).run()


def reads(model, optimizer, log):
    def append(g):
        log.append(g.norm().item())

    for p in model.parameters():
        p.register_hook(append)


def keeps(model, optimizer, log):
    for p in model.parameters():
        p.register_hook(lambda g: log.append(g.norm()))


def keeps_the_gradient(model, optimizer, log):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: log.append(p.grad))


def prints(model, optimizer, log):
    def show(g):
        log.append(str(g))

    model[0].weight.register_hook(show)


@pytest.mark.parametrize(
    ("hook", "what"),
    [(reads, "reads a gradient"), (keeps, "keeps a gradient"), (keeps_the_gradient, "keeps a gradient"),
     (prints, "reads a gradient")],
)  # fmt: skip
def test_hooks_that_take_gradients_away_make_steps_run_in_eager(hook, what, kept):
    with pytest.warns(Fallback, match=rf"the hook at test_hooks.py:\d+ on the parameter .*{what}"):
        two = Two(hook, kept)
    two.run()
    with pytest.raises(Unplannable, match=what):
        Two(hook, kept, strict=True)


def in_backward(model, optimizers, log):
    """Torch's tutorial "How to save memory by fusing the optimizer step into the backward pass"."""
    optimizer_of = dict(zip(model.parameters(), optimizers, strict=True))

    def step(p):
        optimizer_of[p].step()
        optimizer_of[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize("parts", [False, True])
def test_an_optimizer_for_each_parameter_in_the_backward_pass(parts, kept):
    two = Two(in_backward, kept, adams, updates=False, split=parts)
    two.run(ours=two.fitted.backward if parts else None)
    two.as_planned()
    assert all(p.grad is None for p in two.sides[1][0].parameters())
    states = [[o.state_dict() for o in side[1]] for side in two.sides]
    assert not differences(*states)


def test_a_step_of_ones_own_in_the_backward_pass(kept):
    @torch.no_grad()
    def step(p):
        p.add_(p.grad, alpha=-0.1)
        p.grad = None

    Two(late(step), kept, updates=False).run().as_planned()


def test_an_optimizer_that_fit_does_not_know_is_refused(kept):
    def hook(model, optimizer, log):
        in_backward(model, adams(model), log)

    with pytest.raises(Unsupported, match=r"steps a Adam.*give fit all of them, as a list"):
        Two(hook, kept)


def test_hooks_that_count_nodes_of_autograd_are_refused(kept):
    def hook(model, optimizer, log):
        torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), log.append)

    with pytest.raises(Unsupported, match=r"the hook .* which torch has put there"):
        Two(hook, kept)


@pytest.mark.parametrize("how", ["torch's", "own", "before the gradient", "held by a graph"])
def test_hooks_on_nodes_that_accumulate_gradients_are_refused(kept, how):
    """They hang on no tensor; a step without them would leave out what they do, without a word."""
    nodes = []

    def hook(model, optimizer, log):
        if how == "torch's":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # as this is imported
                from torch.distributed.optim import _apply_optimizer_in_backward
            _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
            return
        for p in model.parameters():
            view = p.view_as(p)
            nodes.append(view.grad_fn.next_functions[0][0])
            add = nodes[-1].register_prehook if how == "before the gradient" else nodes[-1].register_hook
            add(lambda *_: None)
            if how == "held by a graph":  # as DistributedDataParallel has them
                nodes.append(view)

    with pytest.raises(Unsupported, match=r"on the node that accumulates the gradient of '0\.weight'"):
        Two(hook, kept)


@pytest.mark.parametrize("how", ["register_hook", "register_prehook"])
def test_hooks_on_nodes_that_accumulate_gradients_are_refused_after_fit_too(kept, how):
    def hook(model, optimizer, log):  # hooks of the parameters themselves are taken along
        model[3].weight.register_hook(lambda g: g * 0.5)
        model[3].weight.register_post_accumulate_grad_hook(lambda p: log.append(1))

    two = Two(hook, kept, budget="64KiB")
    two.run(count=2)
    model = two.sides[1][0]
    node = torch.autograd.graph.get_gradient_edge(model[3].weight).node
    handle = getattr(node, how)(lambda *_: None)
    before = snapshot(model)
    with pytest.raises(Unsupported, match=r"on the node that accumulates the gradient of '3\.weight'"):
        two.fitted(batches(1)[0])
    assert not differences(before, snapshot(model))
    handle.remove()
    two.run(count=2)


def test_a_hook_on_a_parameter_that_the_step_leaves_out_is_refused(kept):
    def half(model):
        return torch.optim.SGD(model[3:].parameters(), lr=0.1)

    with pytest.raises(Unsupported, match=r"'0\.weight'.*which the optimizer does not step"):
        Two(each(lambda g: g * 2), kept, half)


def test_a_gradient_that_was_added_to_is_not_replaced(kept):
    with pytest.raises(Unsupported, match="replaces or clears a gradient"):
        Two(TENSORS_ALONE["late, another"], kept, accumulate=2)


def test_hooks_leave_nothing_behind(kept):
    """What stood for the parameters is gone when the step was captured."""
    two = Two(norms_added, kept)
    gc.collect()
    two.run()
    fakes = [x for x in gc.get_objects() if type(x).__name__ == "FakeTensor" and x.shape == (16, 8)]
    own = {id(t) for v in two.fitted._variants for trace in v.traces for t in trace.tensors}
    assert not [x for x in fakes if id(x) not in own and x.requires_grad]


def test_no_warnings(kept):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Two(masked, kept).run()
