"""The backend, where how much kernels ask for follows from data: writes under masks, and what is refused."""

import pytest
import torch
from torch import nn

from support.compiled import numbers
from tightship import errors
from tightship.execute.interpreter import Fallback
from tightship.frontends.torch import compat_inductor_masks
from tightship.integrations.torch_compile import compiled_plans

pytestmark = [
    pytest.mark.filterwarnings("error::tightship.execute.interpreter.PeakMismatch"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

OPTIONS = {"mode": "compiled", "strict": True, "work": 1_000_000, "cache": None}


SETS = {
    "a number": ((4, 6), 0, lambda x: x > 0, ()),
    "rows": ((4, 6), 0, lambda x: x[:, 0] > 0, (6,)),
    "rows, of one row": ((4, 6), 0, lambda x: x[:, 0] > 0, (1, 6)),
    "columns": ((4, 6), 1, lambda x: x[0] > 0, (4, 1)),
    "the middle": ((3, 4, 5, 2), 1, lambda x: x[0, ..., 0] > 0, (3, 1, 2)),
    "nothing": ((4, 6), 0, lambda x: x[:, 0] > 9, (6,)),
    "bytes": ((4, 6), 0, lambda x: (x[:, 0] > 0).to(torch.uint8), (6,)),
}


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_what_is_written_everywhere_alike_is_a_choice(name, accumulate):
    shape, at, mask_of, given = SETS[name]
    x, values = numbers(*shape), numbers(*given, seed=1)
    indices = [*[None] * at, mask_of(x)]
    found = compat_inductor_masks._index_put(x, indices, values, accumulate)
    assert torch.equal(found, torch.ops.aten.index_put.default(x, indices, values, accumulate))


def test_what_says_how_much_is_set_is_left_to_its_kernel():
    x = numbers(4, 6)
    mask = x[:, 0] > -9
    assert compat_inductor_masks._index_put(x, [mask], numbers(4, 6, seed=1)) is NotImplemented
    assert compat_inductor_masks.set_by_values((4, 6), 0, 1, (4, 6)) == 4
    assert compat_inductor_masks.set_by_values((4, 6), 0, 1, (6,)) is None


@pytest.mark.parametrize("least", [-9.0, 0.0, 9.0])
def test_gradients_of_what_is_scattered_under_a_mask(least):
    grad = numbers(4, 6)
    mask = numbers(4, 1, seed=1) > least
    wanted = torch.ops.aten.masked_scatter_backward.default(grad, mask.expand(4, 6), (5, 5))
    assert torch.equal(compat_inductor_masks._masked_scatter_backward(grad, mask, (5, 5)), wanted)


class Masked(nn.Module):
    """Embeddings of images in their places among those of text, padding that is one vector, and rows of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.text, self.image, self.padding = nn.Linear(16, 16), nn.Linear(16, 16), torch.ones(16)

    def forward(self, x, images, rows):
        y = self.text(x)
        y = y.masked_scatter((x[:, :1] > 0).expand_as(y), self.image(images))
        y = y.clone()
        y[x[:, 1] > 0] = self.padding
        y[rows] = images[:5]
        return y.tanh()


@pytest.mark.slow
def test_writes_under_masks_take_what_was_planned_however_much_is_set():
    def given(k):
        x = numbers(64, 16, seed=k)
        x[:, 0] -= k - 1  # fewer each time
        rows = torch.zeros(64, dtype=torch.bool)
        rows[torch.randperm(64, generator=torch.Generator().manual_seed(k))[:5]] = True
        return x, numbers(64, 16, seed=k + 9), rows

    def train(call, model):
        found = []
        for k in range(3):
            model.zero_grad()
            loss = call(*given(k)).square().mean()
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
            with torch.no_grad():
                found.append(call(*given(k)))
        return found

    model, other = Masked(), Masked()
    call = torch.compile(model, backend="tightship", options=OPTIONS)
    found = train(call, model)
    plans = compiled_plans(call)
    assert [g.kind for g in plans] == ["training", "inference"]
    assert all(g.last.as_planned and g.last.measured_peak == g.last.planned_peak for g in plans)
    torch._dynamo.reset()
    wanted = train(torch.compile(other, backend="inductor", dynamic=False), other)
    assert all(map(torch.equal, found, wanted))


class Padded(nn.Module):
    """Padding that is one vector, and a token of the model's own where there is no gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.map, self.padding, self.token = nn.Linear(16, 16), torch.ones(16), nn.Parameter(torch.randn(16))

    def forward(self, x):
        y = self.map(x).tanh() + 1
        y[x[:, :, 0] > 0] = self.padding
        if not torch.is_grad_enabled():
            y[x[:, :, 1] > 0] = self.token
        return self.map(y.masked_scatter((x[..., :1] > 1).expand_as(y), x.tanh()))


@pytest.mark.parametrize("budget", [None, "100%"])
def test_op_by_op_writes_under_masks_take_what_was_planned_and_are_eagers(budget):
    def train(call, model):
        found = []
        for k in range(3):
            model.zero_grad()
            x = numbers(8, 16, 16, seed=k) - k + 1  # fewer each time
            loss = call(x).square().mean()
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            with torch.no_grad():
                found.append(call(x))
        return found

    model, other = Padded(), Padded()
    options = {**OPTIONS, "mode": "exact", "budget": budget}
    call = torch.compile(model, backend="tightship", options=options)
    found = train(call, model)
    plans = compiled_plans(call)
    assert len(plans) == 2
    assert all(g.last.as_planned and g.last.measured_peak == g.last.planned_peak for g in plans)
    assert all(map(torch.equal, found, train(other, other)))


TURNED = {
    "rows": lambda y, mask, x: y.transpose(0, 1).__setitem__(mask[..., 0].t(), 0.5),
    "a mask that lies otherwise": lambda y, mask, x: y.permute(2, 0, 1).__setitem__(
        mask.permute(2, 0, 1).contiguous(), 0.5
    ),
    "a mask alone that lies otherwise": lambda y, mask, x: y.__setitem__(
        mask.permute(2, 0, 1).contiguous().permute(1, 2, 0), 0.5
    ),
    "a copy": lambda y, mask, x: y.transpose(0, 1).copy_(x.transpose(0, 1).contiguous()),
    "a copy of another type": lambda y, mask, x: y.permute(2, 0, 1).copy_(x.double().permute(2, 0, 1)),
    "one row for all": lambda y, mask, x: y.permute(1, 0, 2).copy_(x[:, 0]),
}


@pytest.mark.parametrize("write", TURNED.values(), ids=TURNED)
def test_op_by_op_what_is_written_to_a_turned_view_lies_there(write):
    """Sums over what lies otherwise add up in another order; views of it may not be there at all."""

    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.norm, self.last = nn.Linear(24, 24), nn.LayerNorm(24), nn.Linear(24, 24)

        def forward(self, x, mask):
            y = self.first(x)
            write(y, mask, x)
            return self.last(self.norm(y)).tanh()

    def train(call, model):
        found = []
        for k in range(2):
            x = numbers(6, 10, 24, seed=k)
            loss = call(x, x > 0.5).square().mean()
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        return found

    model, other = Written(), Written()
    call = torch.compile(model, backend="tightship", options={**OPTIONS, "mode": "exact"})
    assert all(map(torch.equal, train(call, model), train(other, other)))


def test_what_is_written_under_a_mask_lies_as_it_did():
    x = numbers(4, 6, 5).permute(2, 0, 1)
    found = compat_inductor_masks._index_put(x, [x[..., 0] > 0], numbers(6, seed=1))
    assert found.stride() == x.stride()


def test_a_write_whose_memory_nothing_says_is_refused_with_its_place():
    def write(x, mask, columns):
        x = x * 2
        x[mask, columns] = 1.0
        return x

    x, columns = numbers(8, 8), torch.tensor([3])
    call = torch.compile(write, backend="tightship", options=OPTIONS)
    with pytest.raises(errors.Unsupported, match=r"mask at test_inductor_masks.py:\d+.*torch.where"):
        call(x, x[:, 0] > 0, columns)


@pytest.mark.filterwarnings("ignore:Error detected in IndexPutBackward0")
@pytest.mark.parametrize("mode", ["exact", "compiled"])
def test_a_size_that_follows_from_data_in_a_gradient_says_what_to_do(mode):
    def write(x, token):
        x = x * 2
        x[x[:, 0] > 0] = token
        return x

    given = numbers(8, 4), numbers(4).requires_grad_()
    call = torch.compile(write, backend="tightship", options={**OPTIONS, "mode": mode})
    with pytest.raises(errors.Unsupported, match=r"nonzero.*follows from data.*torch.where\(mask, v, x\)"):
        call(*given)
    torch._dynamo.reset()
    call = torch.compile(write, backend="tightship", options={**OPTIONS, "mode": mode, "strict": False})
    with pytest.warns(Fallback, match=r"nonzero.*torch.where"):
        assert torch.equal(call(*given), write(*given))


@pytest.mark.parametrize("training", [True, False])
def test_sizes_that_follow_from_data_are_refused_with_their_place(training):
    def chosen(x):
        return x[x[:, 0] > 0] * 2

    call = torch.compile(chosen, backend="tightship", options=OPTIONS)
    said = r"at test_inductor_masks.py:\d+.*follows from data.*capture_dynamic_output_shape_ops off"
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        pytest.raises(errors.Unsupported, match=said),
    ):
        call(numbers(8, 4).requires_grad_(training))


@pytest.mark.parametrize("training", [True, False])
def test_ops_whose_memory_follows_from_their_data_run_in_eager_which_is_said(training):
    """How large a matrix is decides on the formula of its exponential, and so on what that asks for."""

    def turned(w):
        return torch.linalg.matrix_exp(w - w.T)

    w = numbers(16, 16).requires_grad_(training)
    said = r"matrix_exp.* at test_inductor_masks.py:\d+.*follows from its data"
    with pytest.raises(errors.Unsupported, match=said):
        torch.compile(turned, backend="tightship", options=OPTIONS)(w)
    torch._dynamo.reset()
    call = torch.compile(turned, backend="tightship", options={**OPTIONS, "strict": False})
    with pytest.warns(Fallback, match=r"runs in eager.*matrix_exp"):
        assert torch.equal(call(w), turned(w))
