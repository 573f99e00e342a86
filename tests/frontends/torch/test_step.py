"""What a captured program says about itself, and that capture leaves no trace."""

import re
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.models import MODELS
from support.naive import Naive
from tightship.frontends.torch import compat
from tightship.frontends.torch.capture.expectations import Expectation
from tightship.frontends.torch.capture.step import capture_loss, capture_step


def captured(name, optimizer=torch.optim.AdamW):
    model, loss_fn, batches = MODELS[name]()
    return capture_step(model, loss_fn, optimizer and optimizer(model.parameters(), lr=0.1), batches(0))


@pytest.fixture(scope="module")
def gpt2():
    return captured("gpt2")


def test_phases_follow_one_another(gpt2):
    phases = [o.phase for o in gpt2.graph.ops]
    assert list(dict.fromkeys(phases)) == ["forward", "backward", "update"]
    assert phases == sorted(phases, key=["forward", "backward", "update"].index)


def test_kinds_and_names(gpt2):
    graph = gpt2.graph
    assert {s.kind for s in graph.storages} == {
        "parameter", "state", "input", "constant", "activation", "gradient", "output"
    }  # fmt: skip
    names = [s.name for s in graph.storages]
    assert len(set(names)) == len(names)
    assert len({o.name for o in graph.ops}) == len(graph.ops)
    assert len({v.name for v in graph.values}) == len(graph.values)
    assert "transformer.h.1.mlp.c_fc:addmm" in names
    assert "transformer.h.1.mlp.c_fc.weight.grad" in names
    assert [graph.storages[graph.values[v].storage].kind for v in gpt2.results] == ["output"]


def test_every_op_has_a_module_and_a_line(gpt2):
    for o in gpt2.graph.ops:
        if o.phase == "update":
            assert o.target == "optimizer.AdamW"
        elif not o.name.startswith("ones_like"):  # the gradient of the loss belongs to no line
            assert re.search(r"transformers/.*\.py:\d+$|test_step\.py:\d+$", o.source), o
    backward = [o for o in gpt2.graph.ops if o.phase == "backward" and o.module == "transformer.h.0.mlp.c_fc"]
    assert {o.target for o in backward} >= {"aten.mm.default", "aten.sum.dim_IntList"}


def test_views_leave_no_ops(gpt2):
    targets = {o.target for o in gpt2.graph.ops}
    views = ("view", "t", "transpose", "permute", "expand", "detach", "alias", "slice", "select", "unsqueeze")
    assert not {t for t in targets if t.removeprefix("aten.").split(".")[0] in views}
    assert "aten._unsafe_view.default" not in targets


def test_static_bytes_count_state_that_is_not_there_yet():
    net = nn.Linear(16, 16)
    program = capture_step(
        net, lambda n, x: n(x).sum(), torch.optim.Adam(net.parameters()), torch.ones(4, 16)
    )
    state = [s for s in program.graph.storages if s.kind == "state"]
    assert sorted(s.size for s in state) == [64, 64, 64, 64, 1024, 1024]
    assert [s.key[1] for s in program.slots if s.role == "state"] == ["step", "exp_avg", "exp_avg_sq"] * 2


def test_flops_count_matrix_products(gpt2):
    op = next(o for o in gpt2.graph.ops if o.name == "transformer.h.0.mlp.c_fc:addmm")
    assert op.flops == 2 * 24 * 16 * 64


def test_running_statistics_are_updates_with_a_replay():
    program = captured("cnn")
    norms = [k for k, o in enumerate(program.graph.ops) if "batch_norm" in o.target and o.phase == "forward"]
    assert len(norms) == 2
    for k in norms:
        op = program.graph.ops[k]
        assert len(op.updates) == 2 and set(op.updates) <= set(op.mutates)
        assert {program.graph.storages[s].kind for s in op.updates} == {"buffer"}
        assert k in program.replays


def test_random_ops_stay_and_are_marked():
    program = captured("in_place")
    drawn = [o for o in program.graph.ops if o.random]
    assert [o.target for o in drawn] == ["aten.bernoulli_.float"]

    def unused(net, x):
        torch.rand(3)
        return net(x).sum()

    program = capture_step(nn.Linear(8, 4), unused, None, torch.ones(2, 8))
    assert [o.target for o in program.graph.ops if o.random] == ["aten.rand.default"]


def test_mutation_is_by_storage():
    program = captured("viewed")
    graph = program.graph
    writes = [o for o in graph.ops if o.phase == "forward" and o.mutates]
    assert len(writes) == 2
    assert len({o.mutates for o in writes}) == 1
    assert all(graph.storages[s].name == ":".join(["zeros"]) for o in writes for s in o.mutates)


def test_tied_unused_and_frozen_parameters():
    program = captured("tied")
    updated = [o.name for o in program.graph.ops if o.phase == "update"]
    assert updated == ["embed:optimizer.AdamW"]
    keys = [s.key for s in program.slots if s.role == "parameter"]
    assert "head.weight" not in keys and {"embed.weight", "unused.weight", "frozen.weight"} <= set(keys)


def test_backward_ops_are_of_the_module_whose_forward_op_has_the_gradient():
    """Ops without one, of frozen layers, stand between; in a new thread the first of them is before any node."""
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[3].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)

    def loss_of(model, x):
        return F.cross_entropy(model(x), torch.tensor([0, 1]))

    with ThreadPoolExecutor(1) as thread:
        program = thread.submit(capture_step, model, loss_of, optimizer, torch.randn(2, 4)).result()
    modules = {o.name.rpartition(":")[2]: o.name.rpartition(":")[0] for o in program.graph.ops}
    assert modules["tanh_backward"] == "2"
    assert modules["ones_like"] == modules["nll_loss_backward"] == modules["_log_softmax_backward_data"] == ""


def test_gradients_are_results_without_an_optimizer():
    model, loss_fn, batches = MODELS["mlp"]()
    program = capture_step(model, loss_fn, None, batches(0))
    _, gradients = Naive(program, model)(batches(0))
    want = torch.autograd.grad(loss_fn(model, batches(0)), list(model.parameters()))
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(a, b) for a, b in zip(gradients.values(), want, strict=True))


def test_sums_of_gradients_are_in_place():
    def branched(net, x):
        h = net(x)
        return (h * h.sin()).sum() + h.cos().sum()

    net = nn.Linear(8, 8)
    program = capture_step(net, branched, None, torch.ones(4, 8))
    sums = [o for o in program.graph.ops if o.phase == "backward" and ".add" in o.target]
    assert [o.target for o in sums] == ["aten.add_.Tensor"] * 2
    assert all(len(o.mutates) == 1 and not o.outputs for o in sums)


# --- no trace -------------------------------------------------------------------------------------------------


def test_the_model_is_left_as_it_was():
    model, loss_fn, batches = MODELS["vit"]()
    model.train()
    next(model.children()).eval()
    modes = [m.training for m in model.modules()]
    attributes = [(id(m), {k: id(v) for k, v in vars(m).items()}) for m in model.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    model.classifier.weight.grad = torch.ones_like(model.classifier.weight)
    capture_step(model, loss_fn, torch.optim.AdamW(model.parameters()), batches(0))
    assert modes == [m.training for m in model.modules()]
    assert attributes == [(id(m), {k: id(v) for k, v in vars(m).items()}) for m in model.modules()]
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert torch.equal(model.classifier.weight.grad, torch.ones_like(model.classifier.weight))
    assert not any(compat.is_fake(t) for m in model.modules() for t in vars(m).values())


def test_the_batch_is_left_as_it_was():
    def writes(net, x):
        return net(x.mul_(2)).sum()

    x = torch.ones(4, 8)
    capture_step(nn.Linear(8, 4), writes, None, x)
    assert torch.equal(x, torch.ones(4, 8)) and x.grad is None


# --- batches --------------------------------------------------------------------------------------------------


@dataclass
class Pair:
    x: torch.Tensor
    scale: float


@pytest.mark.parametrize(
    ("batch", "get"),
    [
        ({"x": torch.ones(2, 8), "n": 3}, lambda b: b["x"] * b["n"]),
        (UserDict(x=torch.ones(2, 8)), lambda b: b["x"]),
        (Pair(torch.ones(2, 8), 2.0), lambda b: b.x * b.scale),
        ([torch.ones(2, 8), (torch.zeros(2, 8), None)], lambda b: b[0] + b[1][0]),
        (torch.ones(2, 8), lambda b: b),
    ],
)
def test_batches_of_many_kinds(batch, get):
    net = nn.Linear(8, 4)
    program = capture_step(net, lambda n, b: n(get(b)).sum(), None, batch)
    loss, _ = Naive(program, net)(batch)
    assert torch.equal(loss, net(get(batch)).sum())


def test_a_batch_must_be_alike():
    batch = {"x": torch.ones(2, 8), "k": 2}
    program = capture_step(nn.Linear(8, 4), lambda n, b: n(b["x"]).sum() * b["k"], None, batch)
    fits = program.batch.misfit
    assert fits({"x": torch.zeros(2, 8), "k": 2}) is None
    assert "leaf 0" in fits({"x": torch.zeros(2, 8), "k": 3})
    assert "leaf 1" in fits({"x": torch.zeros(3, 8), "k": 2})
    assert "leaf 1" in fits({"x": torch.zeros(2, 8).double(), "k": 2})
    assert "structure" in fits({"x": torch.zeros(2, 8)})


def test_equal_leaves_are_separate_inputs():
    x = torch.ones(2, 8)
    net = nn.Linear(8, 8)
    program = capture_step(net, lambda n, b: (n(b[0]) * b[1]).sum(), None, (x, x))
    other = torch.ones(2, 8), torch.full((2, 8), 3.0)
    loss, _ = Naive(program, net)(other)
    assert torch.equal(loss, (net(other[0]) * other[1]).sum())


def test_a_constant_is_one_storage_however_often_the_code_comes_to_it():
    model, other = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def loss_fn(model, x):
        with torch.no_grad():
            other.weight.mul_(0.9)
            other.weight.add_(model.weight)
        return (model(x) * other(x)).mean()

    graph = capture_step(model, loss_fn, None, torch.zeros(2, 4)).graph
    assert len([s for s in graph.storages if s.kind == "constant"]) == len([other.weight, other.bias])
    written = {o.mutates for o in graph.ops if o.target in ("aten.mul_.Tensor", "aten.add_.Tensor")}
    assert len(written) == 1


def test_a_batch_may_be_a_slice():
    data = torch.randn(10, 8)
    net = nn.Linear(8, 4)
    program = capture_step(net, lambda n, b: n(b.view(2, 2, 8)[1]).sum(), None, data[:4])
    loss, _ = Naive(program, net)(data[4:8])
    assert torch.equal(loss, net(data[6:8]).sum())


# --- data -----------------------------------------------------------------------------------------------------


def test_questions_to_the_batch_become_guards():
    def loss(net, b):
        x, mask = b
        return net(x).sum() if mask.all() else (net(x) * mask).sum()

    net, x = nn.Linear(8, 1), torch.randn(3, 8)
    program = capture_step(net, loss, None, (x, torch.ones(3, 1)))
    (guard,) = program.guards
    assert guard.sources == (("input", 1),)
    assert guard.holds({("input", 1): torch.ones(3, 1)})
    assert not guard.holds({("input", 1): torch.zeros(3, 1)})
    assert "_local_scalar_dense" in guard.place


def test_shapes_from_the_batch_become_guards():
    def loss(net, b):
        return net(b[0])[b[1]].sum()

    net, x, mask = nn.Linear(8, 1), torch.randn(3, 8), torch.tensor([True, False, True])
    program = capture_step(net, loss, None, (x, mask))
    (guard,) = program.guards
    assert guard.holds({("input", 1): mask.flip(0)})
    assert not guard.holds({("input", 1): ~mask})
    other = torch.tensor([False, True, True])
    result, _ = Naive(program, net)((x, other))
    assert torch.equal(result, loss(net, (x, other)))


def test_questions_to_constants_need_no_guard():
    def loss(net, x):
        positions = torch.arange(4)
        return net(x).sum() * (2 if (positions.diff() == 1).all() else 3)

    program = capture_step(nn.Linear(8, 1), loss, None, torch.ones(2, 8))
    assert not program.guards


def test_finite_numbers_are_expected_and_checked():
    def loss(net, x):
        h = net(x)
        if torch.isinf(h).any() or torch.isnan(h).any() or not torch.isfinite(h).all():
            h = h.clamp(-1, 1)
        return h.sum()

    net = nn.Linear(8, 1)
    program = capture_step(net, loss, None, torch.ones(2, 8))
    checks = [k for k, c in enumerate(program.calls) if isinstance(c.fn, Expectation)]
    assert len(checks) == 3 and all(program.graph.ops[k].effect for k in checks)
    Naive(program, net)(torch.ones(2, 8))
    with pytest.raises(Exception, match="another answer than False"):
        Naive(program, net)(torch.full((2, 8), float("inf")))


# --- capture_loss ---------------------------------------------------------------------------------------------


def shapes(program):
    return [(o.target, [(program.graph.values[v].shape) for v in o.outputs]) for o in program.graph.ops]


@pytest.mark.parametrize("name", ["bert", "cnn", "llama"])
def test_capture_loss_without_memory(name):
    model, _, batches = MODELS[name]()
    sample = batches(0) if name != "cnn" else batches(0)[0]
    real = capture_loss(model, sample)
    meta = capture_loss(model.to("meta"), _to_meta(sample))
    with compat.fake_mode():
        other, _, _ = MODELS[name]()
        fake = capture_loss(other, _blank(sample))
    assert shapes(real) == shapes(meta) == shapes(fake)
    assert {o.phase for o in real.graph.ops} == {"forward", "backward"}
    assert not any(t.device.type != "meta" for t in model.parameters())


def _to_meta(sample):
    return {k: v.to("meta") for k, v in sample.items()} if isinstance(sample, dict) else sample.to("meta")


def _blank(sample):
    def blank(t):
        return torch.empty(t.shape, dtype=t.dtype)

    return {k: blank(v) for k, v in sample.items()} if isinstance(sample, dict) else blank(sample)


def test_capture_loss_restores_the_training_mode():
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval()
    assert any(o.random for o in capture_loss(net, torch.ones(2, 8)).graph.ops)
    assert not any(o.random for o in capture_loss(net, torch.ones(2, 8), train=False).graph.ops)
    assert not any(m.training for m in net.modules())


def test_a_gradient_penalty():
    def loss(net, x):
        x = x.clone().requires_grad_(True)
        out = net(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.softplus(out).sum() + g.pow(2).sum()

    net, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(3, 8)
    program = capture_step(net, loss, None, x)
    _, gradients = Naive(program, net)(x)
    want = torch.autograd.grad(loss(net, x), list(net.parameters()), allow_unused=True)
    kept = [g for g in want if g is not None]
    assert all(torch.equal(a, b) for a, b in zip(gradients.values(), kept, strict=True))
