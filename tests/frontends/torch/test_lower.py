"""fx graphs of ATen ops -> Program: views, writes in place and constants."""

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from support.naive import Naive
from tightship.frontends.torch.capture.joint import Primal, lower_joint


def lower(fn, *args, primals=()):
    gm = make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    return lower_joint(gm, None, primals)


def run(joint, *args):
    return Naive.with_inputs(joint.program, args)


def test_values_views_and_tuples():
    def fn(x, w):
        a, b = F.layer_norm(x @ w.t(), (4,)).chunk(2, dim=-1)
        top, where = torch.topk(a + b, 1)
        return top, where, 3, x.view(-1)

    x, w = torch.randn(5, 8), torch.randn(4, 8)
    joint = lower(fn, x, w)
    assert not any("view" in o.target or "split" in o.target for o in joint.program.graph.ops)
    assert joint.forward[2] == 3 and joint.boundary is None
    got, want = run(joint, x, w), fn(x, w)
    assert all(torch.equal(a, b) for a, b in zip(got, (want[0], want[1], want[3]), strict=True))


def test_mutation_of_an_input_through_a_view():
    def fn(x, y):
        x[1:].mul_(y)
        return x.sum()

    x, y = torch.randn(3, 4), torch.randn(4)
    joint = lower(fn, x.clone(), y, primals=[Primal("parameter", "x"), Primal("input", "y")])
    graph = joint.program.graph
    write = next(o for o in graph.ops if o.mutates)
    assert [graph.storages[s].name for s in write.mutates] == [graph.storages[0].name]
    assert [(s.role, s.key) for s in joint.program.slots] == [("parameter", 0), ("input", 1)]
    a, b = x.clone(), x.clone()
    assert torch.equal(run(joint, a, y)[0], fn(b, y)) and torch.equal(a, b)


def test_constants():
    k = torch.tensor([1.0, 2.0])
    joint = lower(lambda x: (x * k).sin().sum(), torch.ones(2))
    assert [s.role for s in joint.program.slots] == ["input", "constant"]
    assert torch.equal(run(joint, torch.ones(2))[0], (torch.ones(2) * k).sin().sum())
