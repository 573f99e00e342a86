"""fx graphs of ATen ops -> Program."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from support.naive import Naive
from tightship.errors import BadInput, UnknownSize, Unsupported
from tightship.frontends.torch.capture.lower import lower


def traced(fn, *args):
    return make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)


def run(program, *args):
    return Naive.with_inputs(program, args)


def test_values_views_and_tuples():
    def fn(x, w):
        a, b = F.layer_norm(x @ w.t(), (4,)).chunk(2, dim=-1)
        top, where = torch.topk(a + b, 1)
        return top, {"where": where, "n": 3}, x.view(-1)

    x, w = torch.randn(5, 8), torch.randn(4, 8)
    program = lower(traced(fn, x, w))
    assert not any("view" in o.target or "split" in o.target for o in program.graph.ops)
    got, want = run(program, x, w), fn(x, w)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1]["where"], want[1]["where"])
    assert got[1]["n"] == 3 and torch.equal(got[2], want[2])


def test_mutation_of_an_input_through_a_view():
    def fn(x, y):
        x[1:].mul_(y)
        return x.sum()

    x, y = torch.randn(3, 4), torch.randn(4)
    program = lower(traced(fn, x.clone(), y), [("parameter", "x"), ("input", 0)])
    write = next(o for o in program.graph.ops if o.mutates)
    assert [program.graph.storages[s].name for s in write.mutates] == [program.graph.storages[0].name]
    assert [(s.role, s.key) for s in program.slots] == [("parameter", "x"), ("input", 0)]
    a, b = x.clone(), x.clone()
    assert torch.equal(run(program, a, y), fn(b, y)) and torch.equal(a, b)


def test_phases_modules_and_constants():
    k = torch.tensor([1.0, 2.0])
    gm = traced(lambda x: (x * k).sin().sum(), torch.ones(2))
    program = lower(gm, phase=lambda n: "backward" if "sin" in n.name else "forward")
    assert {o.phase for o in program.graph.ops if "sin" in o.target} == {"backward"}
    assert [s.role for s in program.slots] == ["input", "constant"]
    assert torch.equal(run(program, torch.ones(2)), (torch.ones(2) * k).sin().sum())


def test_errors():
    gm = traced(lambda x: x.sin(), torch.ones(2))
    with pytest.raises(BadInput, match="one entry per placeholder"):
        lower(gm, [])
    symbolic = torch.fx.symbolic_trace(nn.Linear(2, 2))
    with pytest.raises(Unsupported, match="trace to ATen"):
        lower(symbolic)
    plain = torch.fx.symbolic_trace(lambda x: operator.add(x, 1))
    with pytest.raises(Unsupported, match="ATen"):
        lower(plain)
    for n in gm.graph.nodes:
        n.meta.pop("val", None)
    with pytest.raises(UnknownSize, match="fake tensor"):
        lower(gm)
