"""Compiled mode of models with ops that run for their effect: checks of factorizations, others' ops that log."""

import pytest
import torch
from torch import nn
from torch._library.effects import EffectType
from torch.fx.experimental.proxy_tensor import make_fx

from tightship import errors, fit
from tightship.execute.compiled import Measured
from tightship.frontends.torch.capture.fused import fuse
from tightship.frontends.torch.compat_inductor import Kernel
from tightship.integrations.torch_compile import compiled_plans

pytestmark = [
    pytest.mark.filterwarnings("error::tightship.execute.interpreter.PeakMismatch"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

OPTIONS = {"mode": "compiled", "strict": True, "work": 1_000_000, "cache": None}
logged = []


@torch.library.custom_op("tightship_effects::noted", mutates_args=())
def noted(x: torch.Tensor, name: str) -> torch.Tensor:
    logged.append(name)
    return x * 2


@noted.register_fake
def _(x, name):
    return torch.empty_like(x)


noted.register_autograd(
    lambda ctx, grad: (noted(grad, f"gradient of {ctx.name}"), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "name", inputs[1]),
)
noted.register_effect(EffectType.ORDERED)


class Noting(nn.Module):
    """Blocks whose activations outweigh their parameters, with effects in between, and a factorization's check."""

    def __init__(self, layers=3, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Tanh())
            for _ in range(layers)
        )
        self.scale = nn.Parameter(torch.eye(width) + 0.1)

    def forward(self, x):
        x = x @ torch.linalg.cholesky(self.scale @ self.scale.T)
        for k, block in enumerate(self.blocks):
            x = x + noted(block(x), f"block {k}").sin()
        return x


def rows(seed=0):
    return torch.randn(256, 16, generator=torch.Generator().manual_seed(seed))


def loss_of(model, x):
    return model(x).square().mean()


def trained(model, call, steps=3):
    """Losses, and what was logged in each step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, logs = [], []
    for k in range(steps):
        logged.clear()
        optimizer.zero_grad()
        loss = loss_of(call, rows(k))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        logs.append(list(logged))
    return losses, logs


def singular(model):
    with torch.no_grad():
        model.scale.fill_(float("nan"))
    return model


@pytest.mark.slow
def test_effects_come_once_and_in_order_around_what_runs_again_and_checks_are_made():
    model, other = Noting(), Noting()
    call = torch.compile(model, backend="tightship", options={**OPTIONS, "budget": "75%"})
    loss_of(call, rows()).backward()  # effects come while bytes are measured, too
    model.zero_grad()
    losses, logs = trained(model, call)
    expected, order = trained(other, other)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert logs == order
    (graph,) = compiled_plans(call)
    assert graph.plan.recomputed
    assert graph.last.measured_peak == graph.last.planned_peak <= graph.plan.budget
    assert not graph.last.misses
    singular(model)
    with pytest.raises(RuntimeError, match="cholesky"):
        call(rows())


@pytest.mark.slow
def test_a_whole_step_has_its_effects_once_and_in_order_and_makes_its_checks():
    model, other = Noting(), Noting()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = fit(model, loss_of, optimizer, rows(), "75%", **OPTIONS)
    losses, logs = [], []
    for k in range(3):
        logged.clear()
        losses.append(step(rows(k)).item())
        logs.append(list(logged))
    expected, order = trained(other, other)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert logs == order
    assert step.plan.recomputed
    used = step.measure()
    assert used["measured_peak"] == used["planned_peak"] <= step.plan.budget
    singular(model)
    with pytest.raises(RuntimeError, match="cholesky"):
        step(rows())


def test_a_kernel_that_counts_from_one_is_measured_on_other_integers():
    def prepare(number, index):
        factors, pivots = torch.full((4, 4), number), torch.full((4,), index, dtype=torch.int32)
        return lambda: torch.ops.aten.linalg_lu_solve(factors, pivots, torch.ones(4, 4))

    asked = Measured("cpu")(Kernel("lu_solve", prepare))
    assert sum(n for _, n in asked.events if n > 0) >= 4 * 4 * 4


def test_a_graph_within_a_graph_is_refused_with_its_place_and_what_to_do():
    def chosen(x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    gm = make_fx(chosen)(torch.ones(4))
    with pytest.raises(
        errors.Unsupported, match=r"cond at .* in compiled mode .*not an ATen op.*mode=\"exact\""
    ):
        fuse(gm, 1)


def test_exact_mode_names_the_op_and_the_mode_that_runs_it():
    options = {"budget": "75%", "strict": True}
    call = torch.compile(Noting(1), backend="tightship", options=options)
    with pytest.raises(errors.Unsupported, match=r"_linalg_check_errors.default at .*mode=\"compiled\""):
        call(rows())
