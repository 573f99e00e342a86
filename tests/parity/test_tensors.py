"""Training loops that keep tensors beside the model: teachers, class weights, queues, hidden states, caches."""

from __future__ import annotations

import copy
import functools
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from support.harness import Loop, adam, identical, mlp, pairs, refused, run, sgd
from tightship.execute.fit import fit
from tightship.frontends.torch.missing_gradients import MissingGradients

cross_entropy = functional.cross_entropy


def plain_loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


# --- teachers -----------------------------------------------------------------------------------------------------


def distilled(teacher):
    """A loss against what ``teacher()`` says."""

    def loss_fn(model, batch):
        with torch.no_grad():
            target = teacher()(batch[0]).softmax(-1)
        return cross_entropy(model(batch[0]), target)

    return loss_fn


@identical()
def test_a_teacher_that_follows_in_place():
    model = mlp()
    teacher = copy.deepcopy(model)

    def after(k, out):
        with torch.no_grad():
            for p, q in zip(teacher.parameters(), model.parameters(), strict=True):
                p.mul_(0.9).add_(q, alpha=0.1)

    return Loop(model, distilled(lambda: teacher), sgd(model), after=after, watched=teacher.state_dict)


@identical()
def test_a_teacher_whose_attention_takes_the_path_it_takes_in_eager():
    """Under a function mode it would take another, with other bits."""
    model = mlp()
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    teacher = nn.Sequential(nn.Linear(4, 16), nn.TransformerEncoder(layer, 1), nn.Linear(16, 3)).eval()

    def loss_fn(model, batch):
        with torch.no_grad():
            target = teacher(batch[0][None])[0]
        return functional.mse_loss(model(batch[0]), target)

    return Loop(model, loss_fn, sgd(model), watched=teacher.state_dict)


@identical()
def test_a_teacher_that_is_copied_now_and_then():
    model, held = mlp(), {}
    held["teacher"] = copy.deepcopy(model)

    def after(k, out):
        if k % 2:
            held["teacher"] = copy.deepcopy(model)

    return Loop(model, distilled(lambda: held["teacher"]), sgd(model), after=after)


@identical()
def test_a_teacher_that_loads_the_weights():
    model = mlp()
    teacher = copy.deepcopy(model).requires_grad_(False)

    def after(k, out):
        teacher.load_state_dict(model.state_dict())

    return Loop(model, distilled(lambda: teacher), sgd(model), after=after)


@identical()
def test_a_teacher_in_inference_mode():
    model = mlp()
    teacher = copy.deepcopy(model)

    def loss_fn(model, batch):
        with torch.inference_mode():
            target = teacher(batch[0]).softmax(-1)
        return cross_entropy(model(batch[0]), target.clone())

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_a_teacher_that_is_updated_in_the_loss():
    model = mlp()
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss_fn(model, batch):
        with torch.no_grad():
            for p, q in zip(teacher.parameters(), model.parameters(), strict=True):
                p.lerp_(q, 0.1)
        return cross_entropy(model(batch[0]), teacher(batch[0]).softmax(-1))

    return Loop(model, loss_fn, sgd(model), watched=teacher.state_dict)


@identical()
def test_a_teacher_that_is_written_twice_in_the_loss():
    model = mlp()
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss_fn(model, batch):
        with torch.no_grad():
            for p, q in zip(teacher.parameters(), model.parameters(), strict=True):
                p.mul_(0.9).add_(q, alpha=0.1)
        return cross_entropy(model(batch[0]), teacher(batch[0]).softmax(-1))

    return Loop(model, loss_fn, sgd(model), watched=teacher.state_dict)


@identical()
def test_a_teacher_with_running_statistics():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    teacher = copy.deepcopy(model)
    return Loop(model, distilled(lambda: teacher), sgd(model), watched=teacher.state_dict)


# --- weights of classes -------------------------------------------------------------------------------------------


@identical()
def test_class_weights_are_replaced():
    model, held = mlp(), SimpleNamespace(weight=torch.ones(3))

    def before(k):
        held.weight = torch.tensor([1.0, 0.5, 0.1 * k])

    def loss_fn(model, batch):
        return cross_entropy(model(batch[0]), batch[1], weight=held.weight)

    return Loop(model, loss_fn, sgd(model), before=before)


@identical()
def test_class_weights_change_in_place():
    model, weight = mlp(), torch.ones(3)

    def before(k):
        weight[k % 3] *= 0.5

    return Loop(model, lambda m, b: cross_entropy(m(b[0]), b[1], weight=weight), sgd(model), before=before)


@identical()
def test_class_weights_of_a_list():
    model, weights = mlp(), [1.0, 1.0, 1.0]

    def loss_fn(model, batch):
        weights[0] *= 0.9
        return cross_entropy(model(batch[0]), batch[1], weight=torch.tensor(weights))

    return Loop(model, loss_fn, sgd(model), watched=lambda: weights)


@identical()
def test_a_module_with_weights_as_a_buffer():
    model, criterion = mlp(), nn.CrossEntropyLoss(weight=torch.ones(3))

    def before(k):
        if k == 3:
            criterion.weight = torch.tensor([0.2, 1.0, 2.0])
        criterion.weight[1] += 0.1

    return Loop(model, lambda m, b: criterion(m(b[0]), b[1]), sgd(model), before=before)


@identical(plans=2)
def test_a_constant_of_another_shape():
    model, held = mlp(), [torch.ones(3)]

    def before(k):
        held[0] = torch.full((1,) if k in (3, 4) else (3,), 0.1 * k)

    return Loop(model, lambda m, b: cross_entropy(m(b[0]) * held[0], b[1]), sgd(model), before=before)


@identical(plans=2)
def test_two_constants_that_become_one():
    model, held = mlp(), [torch.ones(3), torch.ones(3)]

    def before(k):
        held[0] = torch.full((3,), 0.1 * k)
        held[1] = held[0] if k in (2, 3, 5) else torch.full((3,), 0.3 * k)

    def loss_fn(model, batch):
        return cross_entropy(model(batch[0]) * held[0] + held[1], batch[1])

    return Loop(model, loss_fn, sgd(model), before=before)


@identical(plans=2)
def test_a_constant_that_becomes_a_parameter():
    model = mlp()
    held = [torch.zeros(3)]

    def before(k):
        held[0] = model[3].bias if k > 2 else torch.zeros(3)

    return Loop(model, lambda m, b: cross_entropy(m(b[0]) + held[0], b[1]), sgd(model), before=before)


@identical(plans=2)
def test_the_batch_before_is_kept():
    model, held = mlp(), [torch.ones(6, 4)]

    def before(k):
        if k < 3:
            held[0] = torch.ones(6, 4)

    def loss_fn(model, batch):
        out = model(batch[0] * held[0])
        held[0] = batch[0]
        return cross_entropy(out, batch[1])

    return Loop(model, loss_fn, sgd(model), before=before)


@identical(plans=2)
def test_the_output_before_is_kept():
    model, held = mlp(), [torch.zeros(6, 3)]

    def loss_fn(model, batch):
        out = model(batch[0])
        loss = cross_entropy(out, batch[1]) + (out - held[0]).pow(2).mean()
        held[0] = out.detach()
        return loss

    return Loop(model, loss_fn, sgd(model))


@identical(plans=3)
def test_the_output_before_is_kept_from_some_step():
    """The step that keeps it is answered from what is known; only the next one reads it."""
    model, held, k = mlp(), [torch.zeros(6, 3)], [0]

    def loss_fn(model, batch):
        k[0] += 1
        out = model(batch[0])
        loss = cross_entropy(out, batch[1]) + (out - held[0]).pow(2).mean()
        if k[0] == 4:
            held[0] = out.detach()
        else:
            out.detach()
        return loss

    return Loop(model, loss_fn, sgd(model))


@identical(plans=2)
def test_a_layer_before_is_kept():
    """When it is read, this step's is there already."""
    model, held = mlp(), [torch.zeros(6, 8)]

    def loss_fn(model, batch):
        hidden = model[0](batch[0])
        now = hidden.detach()
        loss = (hidden - held[0]).pow(2).mean()
        held[0] = now
        return loss + cross_entropy(model[1:](hidden), batch[1])

    return Loop(model, loss_fn, sgd(model))


@identical(plans=3)
def test_an_attribute_is_kept_from_some_step():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.h, self.k = nn.Linear(4, 3), None, 0

        def forward(self, x):
            self.k += 1
            h = self.layer(x)
            out = h if self.h is None else h + self.h
            if self.k == 4:
                self.h = h.detach()
            else:
                h.detach()
            return out

    model = Net()
    return Loop(model, plain_loss, sgd(model))


@identical(plans=2)
def test_a_list_that_changes_in_place():
    model, pad, terms = mlp(), [0, 1], []

    def loss_fn(model, batch):
        out = model(functional.pad(batch[0][:, :3], pad))
        terms[:] = [out.exp().mean(), cross_entropy(out, batch[1])]
        if pad[0]:
            terms.reverse()
        return (torch.stack(terms) * torch.tensor([1.0, 2.0])).sum()

    def before(k):
        pad[:] = [k % 2, 1 - k % 2]

    return Loop(model, loss_fn, sgd(model), before=before)


@identical()
def test_the_batch_before_is_kept_by_the_loop():
    model, held = mlp(), [torch.ones(6, 4)]
    return Loop(
        model, lambda m, b: cross_entropy(m(b[0] * held[0]), b[1]), sgd(model),
        after=lambda k, out: held.__setitem__(0, pairs(k)[0]),
    )  # fmt: skip


# --- queues and statistics ----------------------------------------------------------------------------------------


class Bank(nn.Module):
    """The last eight rows, as buffers or plain tensors."""

    def __init__(self, *, buffers):
        super().__init__()
        self.encode = nn.Linear(4, 3)
        queue, at = torch.randn(12, 3), torch.zeros(1, dtype=torch.long)
        if buffers:
            self.register_buffer("queue", queue)
            self.register_buffer("at", at)
        else:
            self.queue, self.at = queue, at

    def forward(self, x):
        q = functional.normalize(self.encode(x), dim=1)
        logits = q @ self.queue.clone().detach().T
        self.push(q)
        return logits

    @torch.no_grad()
    def push(self, rows):
        at = int(self.at)
        self.queue[at : at + len(rows)] = rows
        self.at[0] = (at + len(rows)) % len(self.queue)


@identical(plans=2)
def test_a_queue_in_buffers():
    model = Bank(buffers=True)
    return Loop(model, lambda m, b: cross_entropy(m(b[0]), b[1]), sgd(model))


@identical(plans=2)
def test_a_queue_in_plain_tensors():
    model = Bank(buffers=False)
    return Loop(
        model, lambda m, b: cross_entropy(m(b[0]), b[1]), sgd(model), watched=lambda: (model.queue, model.at)
    )


@identical(plans=2)
def test_a_queue_whose_pointer_is_a_number():
    model, queue, at = mlp(), torch.randn(12, 3), [0]

    def loss_fn(model, batch):
        out = model(batch[0])
        loss = cross_entropy(out @ queue.T.detach().clone(), batch[1])
        with torch.no_grad():
            queue[at[0] : at[0] + 6] = out
        at[0] = (at[0] + 6) % 12
        return loss

    return Loop(model, loss_fn, sgd(model), watched=lambda: (queue, at))


class Averaging(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 3), kind
        if kind == "plain":
            self.mean = torch.zeros(3)
        else:
            self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        x = self.layer(x)
        out = x - self.mean
        if self.kind == "in place":
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        else:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return out


@identical()
def test_a_buffer_updated_in_place():
    model = Averaging("in place")
    return Loop(model, plain_loss, sgd(model))


@identical()
def test_a_buffer_that_is_replaced():
    model = Averaging("replaced")
    return Loop(model, plain_loss, sgd(model))


@identical()
def test_a_plain_tensor_that_is_replaced():
    model = Averaging("plain")
    return Loop(model, plain_loss, sgd(model), watched=lambda: model.mean)


@identical()
def test_a_tensor_in_a_closure_that_is_replaced():
    model, mean = mlp(), torch.zeros(3)

    def loss_fn(model, batch):
        nonlocal mean
        out = model(batch[0])
        loss = cross_entropy(out - mean, batch[1])
        mean = 0.9 * mean + 0.1 * out.detach().mean(0)
        return loss

    return Loop(model, loss_fn, sgd(model))


@identical(plans=None)
def test_a_tensor_that_grows():
    model, held = mlp(), [torch.zeros(1, 3)]

    def loss_fn(model, batch):
        out = model(batch[0])
        held[0] = torch.cat([held[0], out.detach().mean(0, keepdim=True)])
        return cross_entropy(out - held[0].mean(0), batch[1])

    return Loop(model, loss_fn, sgd(model))


@identical(plans=2)
def test_a_hidden_state_carried_as_an_attribute():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head, self.h = nn.GRUCell(4, 8), nn.Linear(8, 3), None

        def forward(self, x):
            h = None if self.h is None else self.h.detach()
            self.h = self.cell(x, h)
            return self.head(self.h)

    model = Net()
    return Loop(model, plain_loss, sgd(model))


@identical()
def test_a_hidden_state_carried_by_the_loop():
    model = nn.GRU(4, 3, batch_first=True)
    held = SimpleNamespace(h=torch.zeros(1, 2, 3))

    def loss_fn(model, batch):
        x, y, h = batch
        out, h = model(x.view(2, 3, 4), h)
        return cross_entropy(out.reshape(6, 3), y), h

    def after(k, out):
        held.h = out[1].detach()

    return Loop(model, loss_fn, sgd(model), batch=lambda k: (*pairs(k), held.h), after=after)


@identical(plans=2)
def test_a_loss_that_is_appended():
    model, history = mlp(), []

    def loss_fn(model, batch):
        loss = plain_loss(model, batch)
        history.append(loss.detach())
        return loss

    def before(k):
        if k == 3:
            float(torch.stack(history).mean())

    return Loop(model, loss_fn, sgd(model), before=before)


@identical()
def test_a_module_that_keeps_its_last_output():
    """What is kept is a result; nothing reads it in the next step."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            self.last = self.layer(x)
            return self.last

    model = Net()

    def loss_fn(model, batch):
        return plain_loss(model, batch) + 0.1 * model.last.pow(2).mean()

    return Loop(model, loss_fn, sgd(model))


# --- what is made once --------------------------------------------------------------------------------------------


@identical()
def test_tables_in_a_cache():
    @functools.lru_cache(maxsize=8)
    def table(n):
        return torch.outer(torch.arange(n, dtype=torch.float32), torch.tensor([1.0, 0.1, 0.01, 0.001])).cos()

    model = mlp()
    return Loop(
        model, lambda m, b: cross_entropy(m(b[0] * table(6)), b[1]), sgd(model), watched=lambda: table(6)
    )


@identical(plans=None)
def test_a_mask_that_is_made_when_needed():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.mask = nn.Linear(4, 3), None

        def forward(self, x):
            if self.mask is None or self.mask.size(0) < len(x):
                self.mask = torch.ones(len(x), 3).tril()
            return self.layer(x) * self.mask[: len(x)]

    def batch(k):
        x, y = pairs(k)
        n = (4, 4, 6, 6, 5, 6, 4)[k]
        return x[:n], y[:n]

    model = Net()
    return Loop(model, plain_loss, sgd(model), batch=batch)


def sizes(k):
    x, y = pairs(k)
    n = (4, 4, 6, 6, 5, 4, 4)[k]
    return x[:n], y[:n]


class Grid(nn.Module):
    """Tables that are made when needed, which a number beside them tells: as YOLO's grids and rotary embeddings."""

    def __init__(self, ask):
        super().__init__()
        self.layer, self.ask, self.size, self.built, self.calls = nn.Linear(4, 3), ask, 0, False, 0
        self.sizes = [0]

    def forward(self, x):
        return self.layer(x) + self.ask(self, len(x))


def of_that_size(grid, n):
    if grid.size != n:
        grid.size = n
        grid.rows = torch.arange(n).float().view(n, 1)
        grid.scaled = (grid.rows / n, torch.FloatTensor([1.0, n, 2.0]))
    return grid.rows * grid.scaled[0] + grid.scaled[1]


def of_the_largest_size(grid, n):
    if n > grid.size:
        grid.size = n
        grid.rows = torch.outer(torch.arange(n).float(), torch.tensor([1.0, 0.1, 0.01])).cos()
    return grid.rows[:n]


def once_and_for_all(grid, n):
    if not grid.built:
        grid.rows, grid.built = torch.linspace(0, 1, 8).view(8, 1), True
    return grid.rows[:n]


def beside_a_counter(grid, n):
    grid.calls += 1
    grid.rows = torch.ones(n, 3).tril()
    return grid.rows


def told_elsewhere(grid, n):
    if grid.sizes[0] != n:
        grid.sizes[0] = n
        grid.rows = torch.arange(n).float().view(n, 1)
    return grid.rows


@pytest.mark.parametrize(
    "ask", [of_that_size, told_elsewhere, of_the_largest_size, once_and_for_all, beside_a_counter]
)
def test_tables_that_a_number_beside_them_tells(ask, measurements):
    def build():
        model = Grid(ask)
        return Loop(model, plain_loss, sgd(model), batch=sizes)

    verdict = run(build, measurements)
    assert verdict.kind == "identical", verdict


@identical(plans=None)
def test_a_mask_made_when_needed_and_kept_in_a_dict():
    masks, model = {}, mlp()

    def loss_fn(model, batch):
        n = len(batch[0])
        if n not in masks:
            masks[n] = torch.linspace(0, 1, n)
        return (cross_entropy(model(batch[0]), batch[1], reduction="none") * masks[n]).sum()

    def batch(k):
        x, y = pairs(k)
        n = (4, 4, 6, 6, 5, 6, 4)[k]
        return x[:n], y[:n]

    return Loop(model, loss_fn, sgd(model), batch=batch)


@identical()
def test_parameters_listed_beforehand():
    model = mlp()
    matrices = [p for n, p in model.named_parameters() if n.endswith("weight")]

    def loss_fn(model, batch):
        return plain_loss(model, batch) + 0.01 * sum(p.pow(2).sum() for p in matrices)

    return Loop(model, loss_fn, sgd(model))


@refused("the parameter '0.weight'")
def test_an_alias_of_a_parameter():
    model = mlp()
    alias = model[0].weight.detach()
    return Loop(model, lambda m, b: plain_loss(m, b) + alias.pow(2).sum() * m[3].bias.sum(), sgd(model))


def flat(model):
    """Moves all parameters into one storage."""
    whole = torch.cat([p.detach().flatten() for p in model.parameters()])
    nn.utils.vector_to_parameters(whole, model.parameters())
    return whole


@identical()
def test_parameters_that_lie_in_one_storage():
    model = mlp()
    whole = flat(model)
    return Loop(model, plain_loss, sgd(model), watched=lambda: {"whole": whole})


@identical(plans=2)
def test_parameters_that_move_into_one_storage():
    model = mlp()

    def before(k):
        if k == 2:
            flat(model)

    return Loop(model, plain_loss, adam(model), before=before)


@identical()
def test_constants_that_lie_in_one_storage():
    model, whole = mlp(), torch.rand(40)
    first, second = whole[:12].data, whole[8:20].data

    def loss_fn(model, batch):
        with torch.no_grad():
            first.mul_(0.9)
            second.add_(first.sum(), alpha=0.1)
        return plain_loss(model, batch) * first.sum() * second.mean()

    return Loop(model, loss_fn, sgd(model), watched=lambda: {"whole": whole})


@identical()
def test_parameters_of_the_model():
    model = mlp()

    def loss_fn(model, batch):
        penalty = torch.stack([p.abs().sum() for p in model.parameters()]).sum()
        return plain_loss(model, batch) + 0.01 * penalty

    return Loop(model, loss_fn, sgd(model))


@refused("not one of the model's")
def test_learned_weights_of_losses_outside_of_the_model():
    model, scales = mlp(), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([*model.parameters(), scales], lr=0.1)

    def loss_fn(model, batch):
        out = model(batch[0])
        losses = torch.stack([cross_entropy(out, batch[1]), out.pow(2).mean()])
        return (losses * (-scales).exp() + scales).sum()

    return Loop(model, loss_fn, optimizer)


@identical()
def test_learned_weights_of_losses_in_a_common_module():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.scales = mlp(), nn.Parameter(torch.zeros(2))

    model = Both()

    def loss_fn(model, batch):
        out = model.net(batch[0])
        losses = torch.stack([cross_entropy(out, batch[1]), out.pow(2).mean()])
        return (losses * (-model.scales).exp() + model.scales).sum()

    return Loop(model, loss_fn, adam(model))


@identical(plans=None)
def test_weights_clipped_in_the_loss():
    model = mlp()

    def loss_fn(model, batch):
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)
        return plain_loss(model, batch)

    return Loop(model, loss_fn, sgd(model))


# --- graphs that were made outside of the step: eager's backward pass goes on into them ---------------------------

OUTSIDE = "a backward pass through a tensor that was made outside of the step"


@refused(OUTSIDE, step=-1)
def test_outputs_made_outside_of_the_step_as_the_batch():
    model = mlp()
    return Loop(model, plain_loss_of_outputs, sgd(model), batch=lambda k: (model(pairs(k)[0]), pairs(k)[1]))


def plain_loss_of_outputs(model, batch):
    return cross_entropy(batch[0], batch[1])


@refused(OUTSIDE, step=-1)
def test_outputs_that_the_model_has_kept_from_outside_of_the_step():
    """As policies keep the log probabilities of an episode."""
    model = mlp()
    model.saved = []

    def before(k):
        model.saved[:] = [model(x).log_softmax(0) for x in pairs(k)[0]]

    before(0)

    def loss_fn(model, batch):
        return cross_entropy(torch.stack(model.saved), batch[1]) + plain_loss(model, batch)

    return Loop(model, loss_fn, sgd(model), before=before)


@refused(OUTSIDE, step=3)
def test_a_constant_that_becomes_the_output_of_another_model():
    model, other = mlp(), nn.Linear(4, 4)
    now = {"shift": torch.zeros(6, 4, requires_grad=True)}

    def before(k):
        if k == 3:
            now["shift"] = other(pairs(k)[0])

    return Loop(model, lambda m, b: cross_entropy(m(b[0] + now["shift"]), b[1]), sgd(model), before=before)


@refused(OUTSIDE, step=3)
def test_a_batch_that_becomes_the_output_of_another_model():
    model, other = mlp(), nn.Linear(4, 4)

    def batch(k):
        x, y = pairs(k)
        return (other(x) if k == 3 else x.requires_grad_()), y

    return Loop(model, plain_loss, sgd(model), batch=batch)


@identical(plans=2)
def test_points_that_a_graph_has_made_of_no_parameter():
    """As in nets that learn from physics: the graph is a conversion, which leads to a leaf that nobody looks at."""
    model = mlp()
    points = torch.rand(6, 4, dtype=torch.float64, requires_grad=True).float()

    def slope(model, x):
        return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].pow(2).mean()

    def loss_fn(model, batch):
        return plain_loss(model, batch) + slope(model, batch[0]) + slope(model, points)

    def batch(k):
        x, y = pairs(k)
        return x.requires_grad_().clone(), y

    return Loop(model, loss_fn, sgd(model), batch=batch)


@identical()
def test_results_written_into_a_tensor_made_by_its_class():
    """``torch.Tensor(2, 3)`` is a constant that no function has made; what is written into it has a graph."""
    model = mlp()

    def loss_fn(model, batch):
        rows = torch.Tensor(6, 3)
        for k, row in enumerate(model(batch[0])):
            rows[k] = row
        return cross_entropy(rows, batch[1])

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_outputs_of_another_model_whose_graph_is_left_out():
    model, other = mlp(), nn.Linear(4, 4)

    def loss_fn(model, batch):
        return cross_entropy(model(batch[0].detach()), batch[1])

    return Loop(model, loss_fn, sgd(model), batch=lambda k: (other(pairs(k)[0]), pairs(k)[1]))


# --- parameters that a step leaves without a gradient: whoever steps them alone is told -----------------------------


def lost(model, optimizer, loss_fn, others, between, **options):
    """Trains ``model`` by ``fit``, and steps ``others``, which it does not know."""
    options = {"cache": None, "seconds_per_op": 0.0} | options
    step = fit(model, loss_fn, optimizer, pairs(0), **options)
    for k in range(3):
        optimizer.zero_grad()
        if options.get("split"):
            step.backward(pairs(k))
            step.update()
        else:
            step(pairs(k))
        between(k)
        for other in others:
            other.step()
            other.zero_grad()


@pytest.mark.parametrize("split", [False, True])
def test_an_optimizer_that_fit_does_not_know_trains_nothing_and_that_is_said(split: bool):
    model, heat = mlp(), nn.Parameter(torch.ones(()))
    own, other = sgd(model), torch.optim.Adam([heat])

    def loss_fn(model, batch):
        return cross_entropy(model(batch[0]) / heat, batch[1])

    with pytest.warns(
        MissingGradients, match="Adam.step changes nothing: a step of fit leaves no gradient"
    ) as said:
        lost(model, own, loss_fn, [other], lambda k: None, split=split)
    assert [w.filename for w in said] == [__file__]


def test_an_optimizer_of_a_part_of_the_model_that_fit_does_not_know():
    model = mlp()
    own, other = torch.optim.SGD(model[0].parameters()), torch.optim.SGD(model[3].parameters())
    with pytest.warns(MissingGradients, match="leaves no gradient in 2 of its parameters"):
        lost(model, own, plain_loss, [other], lambda k: None)


def test_models_in_turns_are_not_told_of_gradients_that_nobody_wants():
    """A critic whose parameters a step depends on, which it does not train: its own steps have gradients."""
    model, critic = mlp(), mlp()
    other = torch.optim.SGD(critic.parameters(), lr=0.1)

    def between(k):
        plain_loss(critic, pairs(k)).backward()

    def loss_fn(model, batch):
        return cross_entropy(critic(batch[0] + model(batch[0]).mean()), batch[1])

    with warnings.catch_warnings():
        warnings.simplefilter("error", MissingGradients)
        lost(model, sgd(model), loss_fn, [other], between)
        lost(critic, other, lambda m, b: loss_fn(model, b), [], lambda k: None)


# --- two optimizers -----------------------------------------------------------------------------------------------


@identical(plans=2)
def test_two_networks_against_one_another():
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": mlp()})
    d = torch.optim.Adam(model["d"].parameters(), lr=0.01)
    g = torch.optim.Adam(model["g"].parameters(), lr=0.01)
    label = torch.zeros(6, dtype=torch.long)

    def critic(model, batch):
        fake = model["g"](torch.randn(6, 4)).detach()
        return cross_entropy(model["d"](batch[0]), label + 1) + cross_entropy(model["d"](fake), label)

    def generator(model, batch):
        return cross_entropy(model["d"](model["g"](torch.randn(6, 4))), label + 1)

    return Loop(model, critic, d, others=[(generator, g)])


@identical(plans=None)
def test_a_step_of_the_second_optimizer_with_frozen_parts():
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": mlp()})
    d = torch.optim.SGD(model["d"].parameters(), lr=0.01)
    g = torch.optim.SGD(model["g"].parameters(), lr=0.01)

    def critic(model, batch):
        with torch.no_grad():
            fake = model["g"](batch[0])
        return model["d"](batch[0]).mean() - model["d"](fake).mean()

    def generator(model, batch):
        return model["d"](model["g"](batch[0])).mean()

    return Loop(model, critic, d, others=[(generator, g)])


@identical(plans=None)
def test_a_convolution_with_a_frozen_weight_and_a_bias_that_learns():
    convolutions = [nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)]
    model = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), *convolutions, nn.Flatten(), nn.Linear(16, 3))
    convolutions[1].weight.requires_grad_(False)
    return Loop(model, plain_loss, sgd(model))


class Shifted(nn.Module):
    """Keeps a tensor that it makes when there is none, of a number that may have changed by then."""

    def __init__(self):
        super().__init__()
        self.inner, self.shift, self.kept = mlp(), 0.1, None

    def forward(self, x):
        if self.kept is None:
            self.kept = torch.full((3,), self.shift)
        return self.inner(x) + self.kept


@identical(plans=2)
def test_a_tensor_that_is_made_once_of_a_number_that_changes():
    model = Shifted()

    def before(k):
        model.shift = 0.1 * (1 + k // 2)

    return Loop(model, plain_loss, sgd(model), before=before)


@identical(plans=2)
def test_a_tensor_that_is_made_once_of_a_number_that_stays():
    model = Shifted()
    return Loop(model, plain_loss, sgd(model))
