"""Batch norm in slices of images: statistics of all, within a budget that no plan of whole ops meets."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tightship.errors import Infeasible
from tightship.execute.fit import fit
from tightship.frontends.torch.split_norm import normalized, normalized_backward
from tightship.planners.default import EXACT, ROUNDING

aten = torch.ops.aten


def network():
    norm = nn.BatchNorm2d
    layers = [nn.Conv2d(3, 16, 3, padding=1, bias=False), norm(16), nn.SiLU()]
    layers += [nn.Conv2d(16, 16, 3, padding=1), norm(16), nn.SiLU(), nn.Conv2d(16, 8, 3, 2)]
    return nn.Sequential(*layers, norm(8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def loss_of(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def fitted(model, batch, budget, allow):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return fit(
        model,
        loss_of,
        optimizer,
        batch,
        budget,
        allow=allow,
        cache=None,
        seconds_per_op=0.0,
        seconds=2.0,
        strict=True,
    )


def trained(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for images, labels in batches:
        optimizer.zero_grad()
        loss_of(model, (images.to(next(model.parameters()).dtype), labels)).backward()
        optimizer.step()
    return dict(model.state_dict())


def test_a_network_with_batch_norm_trains_in_less_than_one_op_needs():
    torch.manual_seed(0)
    model = network()
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    draw = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(8, 3, 32, 32, generator=draw), torch.randint(0, 4, (8,), generator=draw))
        for _ in range(3)
    ]
    step = fitted(model, batches[0], 2_000_000, f"recompute,{ROUNDING}")

    for batch in batches:
        step(batch)
        assert step.last.as_planned
    assert step.last.measured_peak == step.last.process_peak == step.plan.peak <= 2_000_000
    theirs, reference = trained(eager, batches), trained(exact, batches)
    for name, ours in model.state_dict().items():
        error, other = (float((x.double() - reference[name]).norm()) for x in (ours, theirs[name]))
        assert error <= 2 * other + 1e-7, name  # three steps, each a little off


def test_slices_of_batch_norm_are_not_exact_ones():
    torch.manual_seed(0)  # and no plan of whole ops meets the budget
    batch = torch.randn(8, 3, 32, 32), torch.randint(0, 4, (8,))
    with pytest.raises(Infeasible):
        fitted(network(), batch, 2_000_000, f"recompute,{EXACT}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [(4, 4), (1, 2, 5)])
@pytest.mark.parametrize("affine", [True, False])
def test_results_are_no_further_from_the_reference_than_the_ops_own(dtype, cuts, affine):
    torch.manual_seed(0)
    x, gradient = (torch.randn(8, 12, 5, 7) * 2 + 3).to(dtype), torch.randn(8, 12, 5, 7).to(dtype)
    weight, bias = (torch.randn(12).to(dtype) if affine else None for _ in range(2))

    def whole(to):
        w, b = (None if t is None else t.to(to) for t in (weight, bias))
        running = [torch.zeros(12, dtype=to), torch.ones(12, dtype=to)]
        out, mean, spread = aten.native_batch_norm(x.to(to), w, b, *running, True, 0.1, 1e-5)
        back = aten.native_batch_norm_backward(
            gradient.to(to), x.to(to), w, *running, mean, spread, True, 1e-5, [True] * 3
        )
        return [out, mean, spread, *back[: 3 if affine else 1], *running]

    running = [torch.zeros(12, dtype=dtype), torch.ones(12, dtype=dtype)]
    out, back = list[torch.Tensor](), list[torch.Tensor]()

    def at(_):
        return nullcontext()

    rows = zip(x.split(cuts), gradient.split(cuts), strict=True)
    parts = [(p, g) for p, g in rows]
    mean, spread = normalized(
        [[p, weight, bias, *running, True, 0.1, 1e-5] for p, _ in parts], at, lambda _, t: out.append(t)
    )
    sums = normalized_backward(
        [[g, p, weight, *running, mean, spread, True, 1e-5, [True] * 3] for p, g in parts],
        at,
        lambda _, t: back.append(t),
    )
    ours = [torch.cat(out), mean, spread, torch.cat(back), *sums[: 2 if affine else 0], *running]
    for mine, other, reference in zip(ours, whole(dtype), whole(torch.float64), strict=True):
        assert mine.shape == other.shape
        assert mine.dtype == other.dtype
        error, theirs = (float((t.double() - reference).norm()) for t in (mine, other))
        assert error <= 1.5 * theirs + torch.finfo(dtype).eps * 1e-3
