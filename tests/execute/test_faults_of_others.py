"""Faults known of other memory planners, each of which must not be ours: by name, on models that have the trait, at
the tightest budget that can be met, bit-identical to eager."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from support.runs import eager  # noqa: E402
from support.strategies import random_graph  # noqa: E402
from tightship.errors import Infeasible  # noqa: E402
from tightship.execute import allocator  # noqa: E402
from tightship.execute.fit import fit  # noqa: E402
from tightship.execute.train_step import TrainStep  # noqa: E402
from tightship.graph import Graph  # noqa: E402
from tightship.plan import Step  # noqa: E402
from tightship.planners import planners  # noqa: E402
from tightship.planners.default import Options, plan  # noqa: E402
from tightship.planners.evict.problem import EvictionProblem  # noqa: E402
from tightship.simulate import baseline, replay  # noqa: E402
from tightship.verify import verify  # noqa: E402

QUICK = {"work": 2_000_000, "seconds": 60.0}


def blocks(make, n: int = 6) -> nn.Sequential:  # type: ignore[no-untyped-def]
    return nn.Sequential(*(make() for _ in range(n)))


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


def tightest(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, **options: Any
) -> TrainStep:
    """Within the least peak that is reached, or a little more where places do not fit."""
    budget = 1
    for _ in range(8):
        try:
            return fit(model, loss_of, optimizer, batch, budget, **QUICK, **options)
        except Infeasible as no:
            budget = max(no.best_peak, budget + budget // 50)
    raise AssertionError("no budget near the least peak could be met")


def same_as_eager(
    model: nn.Module, *, sample: torch.Tensor | None = None, steps: int = 3, **options: Any
) -> TrainStep:
    """Train both ways from the same random states: losses, parameters, buffers and draws are bit-identical."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) if sample is None else sample
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin))
    step = tightest(model, ours, x, **options)
    assert step.plan.count("recompute") > 0
    for n in range(steps):
        batch = x + n
        torch.manual_seed(n)
        expected = eager(twin, loss_of, theirs, batch.clone())
        drawn = torch.get_rng_state()
        torch.manual_seed(n)
        given = batch.clone()
        assert torch.equal(step(given), expected)
        assert torch.equal(torch.get_rng_state(), drawn)
        if n and allocator.available():
            assert step.last.measured_peak == step.plan.peak
    for (name, mine), other in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(mine, other), name
    return step


def test_dropout_is_recomputed_with_the_same_masks() -> None:
    """A step draws again from the state it drew from; where it must not, what was drawn stays."""
    for redraw in (True, False):
        torch.manual_seed(1)
        model = blocks(
            lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 32))
        )
        sample = torch.randn(512, 32, generator=torch.Generator().manual_seed(0))
        step = same_as_eager(model, sample=sample, redraw=redraw)
        again = [s.op for s in step.plan.steps if s.kind == "recompute"]
        drawn = [k for k in again if step.program.graph.ops[k].random]
        assert bool(drawn) == redraw


def test_running_statistics_are_updated_once() -> None:
    torch.manual_seed(1)
    model = blocks(lambda: nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Tanh()))
    step = same_as_eager(model, steps=4)
    assert int(model[0][1].num_batches_tracked) == 4
    again = [step.program.graph.ops[s.op] for s in step.plan.steps if s.kind == "recompute"]
    assert any(op.updates for op in again), "a batch norm is among what runs again"


class WritesItsInput(nn.Module):
    """Writes into a buffer that its ops have read, and in place into what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.body = blocks(lambda: nn.Sequential(nn.Linear(32, 32), nn.Sigmoid(), nn.Tanh()), 5)
        self.register_buffer("seen", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sin(x * (1 + self.seen))
        with torch.no_grad():
            self.seen.add_(x.mean(0))
        for layer in self.body:
            h = layer(h).clone().mul_(1.5).add_(h)
        return h * torch.exp(-self.seen.square())


def test_mutated_inputs_are_read_as_they_were() -> None:
    torch.manual_seed(1)
    same_as_eager(WritesItsInput())


class Tied(nn.Module):
    """One weight under three names, read by the forward, recomputed, updated once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.body = blocks(lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), 5)
        self.last = nn.Linear(32, 32, bias=False)
        self.last.weight = self.first.weight
        self.body[2][2].weight = self.body[0][2].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(torch.tanh(self.first(x))))


def test_tied_weights_stay_one() -> None:
    torch.manual_seed(1)
    model = Tied()
    same_as_eager(model)
    assert model.last.weight is model.first.weight and model.body[2][2].weight is model.body[0][2].weight


class Viewed(nn.Module):
    """Views of one value, read by forward and backward alike."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList([nn.Linear(32, 96) for _ in range(5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for wide in self.wide:
            a, b, c = wide(x).chunk(3, dim=-1)
            x = x + (
                torch.sigmoid(a) * b.t().contiguous().t() + c.unflatten(-1, (4, 8)).flatten(1).exp().sin()
            )
        return x


def test_a_value_that_forward_and_backward_read_through_views() -> None:
    torch.manual_seed(1)
    same_as_eager(Viewed())


def with_effects(seed: int) -> Graph:
    return random_graph(seed, 40, effect=0.25)


@pytest.mark.parametrize("seed", range(8))
def test_collectives_are_never_repeated_nor_reordered(seed: int) -> None:
    """A collective is an op with an effect: every rank would wait for ever if one of them ran it twice."""
    graph = with_effects(seed)
    effects = [k for k, op in enumerate(graph.ops) if op.effect]
    assert effects
    base = replay(graph, baseline(graph)).peak
    for share in (10, 7, 4):
        try:
            made = plan(
                graph, graph.static_bytes + (base - graph.static_bytes) * share // 10, Options(work=200_000)
            )
        except Infeasible:
            continue
        ran = [s.op for s in made.steps if s.kind in ("compute", "recompute") and s.op in effects]
        assert ran == effects and verify(graph, made) == []


@pytest.mark.parametrize("name", sorted(planners("evict")))
def test_no_eviction_planner_repeats_a_collective(name: str) -> None:
    info = planners("evict")[name]
    small = {"work": 100_000, "seconds": 20.0}
    options = info.options(**{n: small[n] for n in small if n in info.options.__dataclass_fields__})
    for seed in range(4):
        graph = with_effects(seed)
        frame = EvictionProblem(graph, tuple(range(len(graph.ops))))
        found = info.plan(frame, graph.static_bytes, options)
        steps = found.steps or frame.steps(found.evict)
        assert all(not graph.ops[s.op].effect for s in steps if s.kind == "recompute")


def test_the_peak_follows_the_budget() -> None:
    """PyTorch's budget caps what is saved, and the peak may rise as it falls; here the peak is what is capped."""
    torch.manual_seed(1)
    model = blocks(
        lambda: nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 4, 1))
    )
    from tightship import api, sources

    graph = sources.ModelStep(model, torch.randn(8, 4, 16)).graph_at(8)
    line = api.frontier(graph, points=6, work=3_000_000, seconds=60.0).points
    assert len(line) == 6
    for less, more in pairwise(line):
        assert less.peak <= (less.budget or 0) < (more.budget or 0) and less.time >= more.time


def test_hints_are_obeyed_where_the_plan_runs() -> None:
    """G2, G11: per module, by a pattern of its name, in a step that is bit-identical to eager's."""
    torch.manual_seed(1)
    model = blocks(lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
    twin, x = copy.deepcopy(model), torch.randn(64, 32)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin))
    hints = "*=keep,1=recompute,2.1=offload,4.0=recompute"
    step = fit(model, loss_of, ours, x, "100%", hints=hints, **QUICK)
    graph = step.program.graph
    by_kind = {
        kind: {
            graph.ops[graph.uses.definer[s]].module
            for p in step.plan.steps
            if p.kind == kind
            for s in storages(p, graph)
        }
        for kind in ("recompute", "offload")
    }
    assert {"1.0", "1.1", "4.0"} <= by_kind["recompute"] <= {"1.0", "1.1", "1.2", "4.0"}
    assert by_kind["offload"] == {"2.1"}
    for _ in range(2):
        assert torch.equal(step(x.clone()), eager(twin, loss_of, theirs, x.clone()))
    if allocator.available():
        assert step.last.measured_peak == step.plan.peak


def storages(step: Step, graph: Graph) -> tuple[int, ...]:
    return step.storages or (graph.uses.defines[step.op] if step.op >= 0 else ())
