"""What the torch.compile backend is told, and what it says when it cannot."""

import warnings

import pytest
import torch
from torch import nn

from support.compiled import batch, deep, pair
from tightship import errors
from tightship.integrations.torch_compile import Fallback, compiled_notes, compiled_plans

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_infeasible_reaches_the_caller_as_itself_each_time():
    call, _, _ = pair(budget="2KiB")
    for _ in range(2):
        with pytest.raises(
            errors.Infeasible, match=r"(?s)no plan can meet the budget of 2.00 KiB.*make up the best peak"
        ):
            call(batch())


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"bugdet": "1GiB"}, "unknown option 'bugdet': an option is one of accumulate, allow, arena, budget"),
        ({"budget": "much"}, "invalid budget: give bytes"),
        ({"budget": 0.5}, "invalid budget"),
        ({"seconds": "long"}, "seconds must be a float"),
        ({"work": True}, "work must be a int"),
        ({"evict": "nobody"}, "a planner is one of"),
        ({"strict": 1}, "strict must be True or False"),
        ({"on_plan": 3}, "on_plan must be a function"),
        ({"allow": "recompute,compress"}, "'compress' is not possible.*this backend recomputes"),
        ({"hints": "*.mlp=offload"}, "'offload' is not possible.*this backend recomputes"),
        ({"lossy": True}, "'lossy' is not possible.*this backend recomputes"),
        ({"hand_out": False}, "an option is one of"),
    ],
)
def test_wrong_options_are_named(options, rule):
    with pytest.raises(errors.BadInput, match=rule):
        torch.compile(deep(), backend="tightship", options=options)(batch())


def test_modes_are_not_options():
    with pytest.raises(errors.BadInput, match="takes options="):
        torch.compile(deep(), backend="tightship", mode="max-autotune")(batch())


def test_plans_are_told_and_can_be_looked_at():
    told = []
    call, _, _ = pair(on_plan=told.append, budget="90%")
    assert compiled_plans(call) == ()
    call(batch())
    assert told == list(compiled_plans(call))
    assert told[0].plan.digest == told[0].graph.digest and "peak" in str(told[0])
    with pytest.raises(errors.BadInput):
        compiled_plans(deep())


def sparse():
    return nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 4)), torch.arange(12).view(3, 4)


def sparse_bag():
    return nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 4)), torch.arange(12).view(3, 4)


def branching():
    class Net(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    return Net(), batch()


def rows_of(x):
    return x.unbind() if x.is_nested else [x]


def nested():
    rows = [torch.randn(n, 8) for n in (5, 2)]
    return nn.Linear(8, 4), torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize("make", [sparse, sparse_bag, branching, nested])
def test_what_cannot_be_planned_runs_in_eager_with_a_warning_or_not_at_all(make):
    model, x = make()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call = torch.compile(model, backend="tightship", options={"seconds": 1.0})
        assert all(map(torch.equal, rows_of(call(x)), rows_of(model(x))))
        call(x)
    (warning,) = [w for w in found if w.category is Fallback]
    assert "runs in eager, without a plan and outside the budget: " in str(warning.message)
    assert "object has no attribute" not in str(warning.message)
    assert str(warning.message) in compiled_notes(call)
    torch._dynamo.reset()
    with pytest.raises(errors.Unsupported):
        torch.compile(model, backend="tightship", options={"strict": True})(x)
