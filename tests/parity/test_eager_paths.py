"""Functions that choose among kernels by more than shapes: a plan has those that eager runs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import matmul, nn, prod
from torch.nn import functional as F

import tightship
from support.harness import Loop, adam, identical, refused


def _like(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Product(nn.Module):
    """``(8, 5, 5) @ (1, 5, 7)``, with gradients of one of them, both or none."""

    def __init__(self, how: Any, first: bool, second: bool) -> None:
        super().__init__()
        self.how, self.gate = how, nn.Parameter(torch.ones(7))
        self.a = nn.Parameter(_like((8, 5, 5), 1), requires_grad=first)
        self.b = nn.Parameter(_like((1, 5, 7), 2), requires_grad=second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.how(self.a * x[0], self.b) * self.gate
        return product.square().mean() if self.training else product


WAYS = {
    "operator": lambda a, b: a @ b,
    "function": lambda a, b: torch.matmul(a, b),
    "method": lambda a, b: a.matmul(b),
    "reflected": lambda a, b: b.__rmatmul__(a),
    "turned": lambda a, b: (b.mT @ a.mT).mT,
    "name": lambda a, b: matmul(a, b),
    "partial": lambda a, b: PARTIAL(a, b),
    "descriptor": lambda a, b: METHOD(a, b),
    "keywords": lambda a, b: matmul(input=a, other=b),
    "linalg": lambda a, b: torch.linalg.matmul(a, b),
    "packet": lambda a, b: torch.ops.aten.matmul(a, b),
    "overload": lambda a, b: torch.ops.aten.matmul.default(a, b),
}
PARTIAL, METHOD = functools.partial(torch.matmul), torch.Tensor.matmul
"""As code has them that was imported before a step is captured."""


def batch(k: int) -> tuple[torch.Tensor, ...]:
    return (_like((8, 5, 5), k + 9),)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("grads", [(True, False), (False, True), (True, True), (False, False)], ids=str)
def test_products(way, grads, measurements):
    @identical(plans=1)
    def pattern():
        model = Product(WAYS[way], *grads)
        trained = [p for p in model.parameters() if p.requires_grad]
        return Loop(model, lambda m, b: m(b[0][None]), torch.optim.Adam(trained, 0.01), batch=batch, steps=3)

    pattern(measurements)


@identical(plans=1)
def test_a_product_under_autocast():
    model = Product(WAYS["operator"], True, False)

    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m(b[0][None]).float()

    return Loop(model, loss, adam(model), batch=batch, steps=3)


@pytest.mark.parametrize("way", WAYS)
def test_products_of_forward_passes(way, measurements):
    model = Product(WAYS[way], True, False).eval()
    run = tightship.infer(model, batch(0)[0][None], cache=measurements)
    with torch.no_grad():
        for k in range(3):
            x = batch(k)[0][None]
            assert torch.equal(model(x), run(x))
    keys = torch._C._dispatch_dump("aten::matmul")
    assert "AutogradCPU" not in keys  # as torch has it again


# --- products of all numbers, or along a dimension -----------------------------------------------------------------

PRODUCTS = {
    "all": lambda x: x.prod() * 1e-3,
    "function": lambda x: torch.prod(x, dim=-1).sum(),
    "keeping": lambda x: x.prod(0, keepdim=True).square().sum(),
    "turned": lambda x: x.mT.prod(1).sum() + x.t().prod(),
    "wide": lambda x: torch.prod(x, 1, dtype=torch.float64).sum().float(),
    "one": lambda x: x[:, :1].prod(1).sum() + x[0, 0].prod(),
    "name": lambda x: prod(input=x, dim=0).sum(),
    "overload": lambda x: torch.ops.aten.prod.dim_int(x, 1).sum(),
}


@pytest.mark.parametrize("zeros", [0, 1, 3])
@pytest.mark.parametrize("way", PRODUCTS)
def test_gradients_of_products(way, zeros, measurements):
    class Factors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(_like((5, 7), 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factors = self.weight.sigmoid() + 0.4 + x[0, :, :7]
            return PRODUCTS[way](factors.masked_fill(x[1, :, :7] > 0, 0.0))

    def batch(k: int) -> torch.Tensor:
        x = 0.05 * _like((2, 5, 7), k)
        x[1] = 0
        x[1].view(-1)[[4, 11, 12][:zeros]] = 1
        return x

    @identical(plans=1)
    def pattern():
        model = Factors()
        return Loop(model, lambda m, b: m(b), adam(model), batch=batch, steps=4)

    pattern(measurements)


@refused("a gradient of the gradient of prod")
def test_a_gradient_of_a_gradient_of_a_product():
    model = nn.Linear(4, 3)

    def loss(net, batch):
        x = net.weight.exp()
        (grad,) = torch.autograd.grad(x.prod(1).sum(), x, create_graph=True)
        return grad.square().sum() + net(batch[0]).mean()

    return Loop(model, loss, adam(model))


# --- values without vectors -----------------------------------------------------------------------------------------

SPECTRA = {
    "singular values": torch.linalg.svdvals,
    "eigenvalues": lambda x: torch.linalg.eigvalsh(x @ x.mT),
    "nuclear norm": lambda x: torch.linalg.matrix_norm(x, "nuc"),
    "condition": torch.linalg.cond,
}


@pytest.mark.parametrize("way", SPECTRA)
@pytest.mark.parametrize("trained", [True, False])
def test_spectra(way, trained, measurements):
    """Eager asks for vectors only where gradients need them; they come by another algorithm."""

    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(_like((8, 9, 9), 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            product = self.weight * x
            return SPECTRA[way](product if trained else product.detach()).mean() + product.mean()

    @identical(plans=1)
    def pattern():
        model = Spectrum()
        return Loop(model, lambda m, b: m(b), adam(model), batch=lambda k: _like((8, 9, 9), k), steps=2)

    pattern(measurements)
    model = Spectrum()
    run = tightship.infer(model, _like((8, 9, 9), 0), cache=measurements)
    with torch.no_grad():
        assert torch.equal(model(_like((8, 9, 9), 5)), run(_like((8, 9, 9), 5)))


# --- torch.compile --------------------------------------------------------------------------------------------------

COMPILED = {
    **{f"product, {n}": lambda x, f=f: f(x, BATCH).square().mean() for n, f in WAYS.items()},
    **{f"all numbers, {n}": lambda x, f=f: f(x[0].sigmoid() + 0.5) for n, f in PRODUCTS.items()},
    **{f"zeros, {n}": lambda x, f=f: f(x[0].masked_fill(x[0] > 1, 0.0)) for n, f in PRODUCTS.items()},
    **{f"{n} of data": lambda x, f=f: f(x.detach()).mean() + x.mean() for n, f in SPECTRA.items()},
    "vector by matrices": lambda x: (BATCH[0, :, 0] @ x).square().mean(),
    "vector by many matrices": lambda x: (BATCH[0, :, 0] @ x.view(2, 4, 5, 5)).square().mean(),
    "matrix by matrices": lambda x: (BATCH[0].mT @ x).square().mean(),
    "interpolation": lambda x: F.interpolate(x, 7, mode="linear").square().mean(),
}
BATCH = _like((1, 5, 7), 2)


@pytest.mark.parametrize("way", COMPILED)
def test_paths_in_graphs_of_torch_compile(way):
    """AOTAutograd traces other ops of its own accord: these are eager's."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(_like((8, 5, 5), 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return COMPILED[way](self.weight * x)

    eager, model = Net(), Net()
    torch._dynamo.reset()
    options = {"budget": "100%", "strict": True, "cache": None}
    compiled = torch.compile(model, backend="tightship", options=options)
    for k in range(2):
        expected, loss = eager(_like((8, 5, 5), k)), compiled(_like((8, 5, 5), k))
        expected.backward()
        loss.backward()
        assert torch.equal(expected, loss)
        assert torch.equal(eager.weight.grad, model.weight.grad)
