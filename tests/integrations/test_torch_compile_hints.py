"""Hints per module in compiled models: obeyed, or refused with the reason."""

import pytest
import torch
from torch import nn

from support.compiled import batch, compiled, deep
from tightship.errors import BadInput, Infeasible
from tightship.integrations.torch_compile import compiled_notes, compiled_plans


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def again(piece):
    """Modules whose results are made twice."""
    graph = piece.graph
    return {graph.ops[s.op].module for s in piece.plan.steps if s.kind == "recompute"}


def trained(model, x=None, **options):
    call = compiled(model, **options)
    call(batch(256) if x is None else x).sum().backward()
    return call


def test_hints_are_obeyed_and_change_what_is_made_again():
    free = again(compiled_plans(trained(deep(), budget="70%"))[0])
    assert {"0", "3", "6"} <= free
    torch._dynamo.reset()
    kept = again(compiled_plans(trained(deep(), budget="85%", hints="0=keep,3=keep"))[0])
    assert kept and not kept & {"0", "3"}
    torch._dynamo.reset()
    forced = again(compiled_plans(trained(deep(), budget="100%", hints="6=recompute"))[0])
    assert "6" in forced


def test_gradients_are_those_of_eager_with_hints():
    ours, theirs = deep(), deep()
    torch.manual_seed(3)
    trained(ours, budget="80%", hints="3=recompute,6=keep")
    torch.manual_seed(3)
    theirs(batch(256)).sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize(
    ("hints", "said"),
    [
        ("nope=keep", r"no module of the forward pass matches \(such as"),
        ("0=offload", "this backend recomputes"),
        ("0=keep,*=recompute", "undone by later ones"),
        ("0", "PATTERN=WAY"),
    ],
)
def test_hints_that_cannot_be_obeyed_are_refused(hints, said):
    with pytest.raises(BadInput, match=said):
        trained(deep(), budget="90%", hints=hints)


def test_a_budget_that_hints_forbid_is_infeasible():
    with pytest.raises(Infeasible):
        trained(deep(), budget="50%", hints="*=keep")


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.second = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_a_hint_about_another_graph_is_said_to_be():
    call = trained(Broken(), budget=None, hints="first.1=recompute,second.1=recompute")
    first, second = compiled_plans(call)
    assert "first.1" in again(first) and "second.1" in again(second)
    said = [n for n in compiled_notes(call) if "is meant by the hint" in n]
    assert len(said) == 2 and "first.1" in "".join(said) and "second.1" in "".join(said)
