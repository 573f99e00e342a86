"""Training loops that change, between steps, what modules, losses and optimizers are set to."""

from __future__ import annotations

import contextlib
import copy
import random
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler, swa_utils

from support.harness import Loop, adam, identical, mlp, pairs, raises, refused, sgd

cross_entropy = functional.cross_entropy


def plain_loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


# --- attributes of modules --------------------------------------------------------------------------------------


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.temperature = nn.Linear(4, 3), 1.0

    def forward(self, x):
        return self.layer(x) / self.temperature


@identical()
def test_temperature_of_a_module():
    model = Tempered()

    def before(k):
        model.temperature = 1.0 + 0.3 * k

    return Loop(model, plain_loss, sgd(model), before=before)


@identical()
def test_a_class_attribute():
    class Net(nn.Module):
        alpha = 0.5

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x) * self.alpha

    model = Net()

    def before(k):
        Net.alpha = 0.5 + k

    return Loop(model, plain_loss, sgd(model), before=before)


@identical()
def test_a_default_argument():
    model, state = mlp(), {"weight": 1.0}

    def loss_fn(model, batch, state=state):
        state["weight"] *= 0.9
        return plain_loss(model, batch) * state["weight"]

    return Loop(model, loss_fn, sgd(model), watched=lambda: state)


@identical()
def test_a_float_in_the_batch():
    model = mlp()

    def loss_fn(model, batch):
        x, y, weight = batch
        return cross_entropy(model(x), y) * weight

    return Loop(model, loss_fn, sgd(model), batch=lambda k: (*pairs(k), 0.5 + k))


@identical()
def test_ids_in_the_batch():
    model, seen = mlp(), []

    def loss_fn(model, batch):
        seen.extend(batch["ids"])
        return cross_entropy(model(batch["x"]), batch["y"])

    def batch(k):
        x, y = pairs(k)
        return {"ids": [f"row-{k}-{i}" for i in range(6)], "x": x, "y": y}

    return Loop(model, loss_fn, sgd(model), batch=batch, watched=lambda: seen)


@identical()
def test_dropout_is_scheduled():
    model = mlp(dropout=0.1)

    def before(k):
        model[2].p = 0.1 * k + 0.05

    return Loop(model, plain_loss, sgd(model), before=before)


@identical(plans=2)
def test_dropout_of_zero_in_some_steps():
    model = mlp(dropout=0.2)

    def before(k):
        model[2].p = 0.0 if k % 3 == 2 else 0.2

    return Loop(model, plain_loss, sgd(model), before=before)


@identical()
def test_momentum_of_batch_norm_is_scheduled():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def before(k):
        model[1].momentum = 0.5 / (1 + k)

    return Loop(model, plain_loss, sgd(model), before=before)


@identical(plans=1)
def test_batch_norm_with_a_cumulative_average():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 3))
    return Loop(model, plain_loss, sgd(model))


@identical()
def test_label_smoothing_is_scheduled():
    model, criterion = mlp(), nn.CrossEntropyLoss(label_smoothing=0.1)

    def before(k):
        criterion.label_smoothing = 0.1 * (k % 4) + 0.01

    return Loop(model, lambda m, b: criterion(m(b[0]), b[1]), sgd(model), before=before)


@identical(plans=2)
def test_eval_and_train_in_turn():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))

    def before(k):
        model.train(k % 3 != 1)

    return Loop(model, plain_loss, sgd(model), before=before)


@identical(plans=2)
def test_a_module_frozen_in_eval_mode_from_some_step():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def before(k):
        if k == 3:
            model[1].eval()

    return Loop(model, plain_loss, sgd(model), before=before)


# --- counters in the model ----------------------------------------------------------------------------------------


@identical(plans=2)
def test_a_model_that_counts_and_branches():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.steps = nn.Linear(4, 3), 0

        def forward(self, x):
            self.steps += 1
            x = self.layer(x)
            return x.tanh() if self.steps > 3 else x

    model = Net()
    return Loop(model, plain_loss, sgd(model), watched=lambda: model.steps)


@identical(plans=2)
def test_a_counter_in_a_buffer_that_branches():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            x = self.layer(x)
            x = x.tanh() if self.steps > 3 else x
            self.steps += 1
            return x

    model = Net()
    return Loop(model, plain_loss, sgd(model))


@identical(plans=2)
def test_a_buffer_read_as_a_number():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            return self.layer(x) * (1 if self.steps.item() < 3 else 2)

    model = Net()

    def after(k, out):
        model.steps += 1

    return Loop(model, plain_loss, sgd(model), after=after)


# --- optimizers and schedulers ------------------------------------------------------------------------------------


@identical()
def test_one_cycle():
    model = mlp()
    optimizer = sgd(model)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=8)
    return Loop(
        model, plain_loss, optimizer, after=lambda k, out: scheduler.step(), watched=scheduler.get_last_lr
    )


@identical()
def test_plateau_on_the_loss():
    model = mlp()
    optimizer = adam(model)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    return Loop(model, plain_loss, optimizer, after=lambda k, out: scheduler.step(out.item()))


@identical()
def test_warm_restarts():
    model = mlp()
    optimizer = adam(model)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)
    return Loop(model, plain_loss, optimizer, after=lambda k, out: scheduler.step(k + 0.5))


@identical()
def test_the_learning_rate_is_read_in_the_loss():
    model = mlp()
    optimizer = sgd(model)

    def loss_fn(model, batch):
        return plain_loss(model, batch) * (1 + optimizer.param_groups[0]["lr"])

    def after(k, out):
        optimizer.param_groups[0]["lr"] *= 0.8

    return Loop(model, loss_fn, optimizer, after=after)


@identical(plans=3)  # zero leaves ops out
def test_weight_decay_changes():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def before(k):
        optimizer.param_groups[0]["weight_decay"] = 0.1 * (k + 1)

    return Loop(model, plain_loss, optimizer, before=before)


@identical(plans=4)
def test_weight_decay_is_switched_off_and_on():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def before(k):
        optimizer.param_groups[0]["weight_decay"] = 0.1 if k in (0, 1, 4) else 0.0

    return Loop(model, plain_loss, optimizer, before=before)


@identical(plans=None)
def test_momentum_is_switched_off_and_on():
    model = mlp()
    optimizer = sgd(model)

    def before(k):
        optimizer.param_groups[0]["momentum"] = 0.0 if k in (0, 1, 4) else 0.9

    return Loop(model, plain_loss, optimizer, before=before)


@identical()
def test_an_average_of_the_weights():
    model = mlp()
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    return Loop(
        model, plain_loss, sgd(model), after=lambda k, out: average.update_parameters(model),
        watched=lambda: average.state_dict(),
    )  # fmt: skip


@identical(plans=2)
def test_an_optimizer_that_loads_an_older_state():
    model = mlp()
    optimizer, held = adam(model), {}

    def before(k):
        if k == 3:
            held.update(copy.deepcopy(optimizer.state_dict()))
        if k == 5:
            optimizer.load_state_dict(held)

    return Loop(model, plain_loss, optimizer, before=before)


@identical()
def test_weights_that_are_loaded_again():
    model = mlp()
    first = copy.deepcopy(model.state_dict())

    def before(k):
        if k == 4:
            model.load_state_dict(first)

    return Loop(model, plain_loss, sgd(model), before=before)


@identical()
def test_weights_clipped_after_each_step():
    model = mlp()

    def after(k, out):
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.3, 0.3)

    return Loop(model, plain_loss, sgd(model), after=after)


@refused("step hooks")
def test_a_step_hook_of_the_optimizer():
    model, lengths = mlp(), []
    optimizer = sgd(model)
    optimizer.register_step_post_hook(lambda *_: lengths.append(1))
    return Loop(model, plain_loss, optimizer, watched=lambda: lengths)


@refused("step hooks")
def test_a_step_hook_after_fit():
    model, lengths = mlp(), []
    optimizer = sgd(model)

    def before(k):
        if k == 3:
            optimizer.register_step_pre_hook(lambda *_: lengths.append(1))

    return Loop(model, plain_loss, optimizer, before=before, watched=lambda: lengths)


# --- what is trained ----------------------------------------------------------------------------------------------


@identical(plans=None)
def test_layers_are_frozen_and_unfrozen():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def before(k):
        model[0].requires_grad_(k >= 2)
        model[2].requires_grad_(k not in (1, 4))

    return Loop(model, plain_loss, sgd(model), before=before)


@identical(plans=None)
def test_a_group_is_added_to_the_optimizer():
    model = mlp()
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1, momentum=0.9)

    def before(k):
        if k == 3:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})

    return Loop(model, plain_loss, optimizer, before=before)


@identical(plans=None)
def test_a_layer_is_replaced():
    model = mlp()
    optimizer = sgd(model)

    def before(k):
        if k == 3:
            model[3] = nn.Linear(8, 3)
            for p in optimizer.param_groups[0]["params"][2:]:
                optimizer.state.pop(p)
            optimizer.param_groups[0]["params"] = list(model.parameters())

    return Loop(model, plain_loss, optimizer, before=before)


@identical(plans=3)
def test_batches_of_several_sizes():
    model = mlp(dropout=0.2)

    def batch(k):
        x, y = pairs(k)
        n = (6, 6, 5, 6, 2, 5, 2)[k]
        return x[:n], y[:n]

    return Loop(model, plain_loss, sgd(model), batch=batch)


@raises("a step at k = 3")
def test_a_loss_that_raises():
    model, k = mlp(), [0]

    def loss_fn(model, batch):
        k[0] += 1
        if k[0] == 3:
            raise ValueError("a step at k = 3")
        return plain_loss(model, batch)

    return Loop(model, loss_fn, sgd(model), watched=lambda: k)


@identical(plans=2)
def test_a_loss_that_falls_back_when_something_raises():
    model, k = mlp(), [0]

    def fragile(out):
        if k[0] % 3 == 2:
            raise FloatingPointError
        return out.pow(2).mean()

    def loss_fn(model, batch):
        k[0] += 1
        out = model(batch[0])
        try:
            return cross_entropy(out, batch[1]) + fragile(out.exp())
        except FloatingPointError:
            return cross_entropy(out, batch[1])

    return Loop(model, loss_fn, sgd(model), watched=lambda: k)


# --- the process --------------------------------------------------------------------------------------------------


@identical(plans=2)
def test_autocast_around_some_steps():
    model = mlp()
    return Loop(
        model, plain_loss, sgd(model),
        around=lambda k: torch.autocast("cpu", torch.bfloat16, enabled=k >= 3),
    )  # fmt: skip


@identical(plans=2)
def test_autocast_in_the_loss():
    model, on = mlp(), SimpleNamespace(k=0)

    def loss_fn(model, batch):
        on.k += 1
        with torch.autocast("cpu", torch.bfloat16, enabled=on.k > 2):
            out = model(batch[0])
        return cross_entropy(out.float(), batch[1])

    return Loop(model, loss_fn, sgd(model), watched=lambda: vars(on))


@refused("no_grad", step=3)
def test_a_step_without_gradients():
    model = mlp()
    return Loop(
        model, lambda m, b: plain_loss(m, b).requires_grad_(), sgd(model),
        around=lambda k: torch.no_grad() if k == 3 else contextlib.nullcontext(),
    )  # fmt: skip


@refused("inference mode", step=3)
def test_a_step_in_inference_mode():
    model = mlp()
    return Loop(
        model, plain_loss, sgd(model),
        around=lambda k: torch.inference_mode() if k == 3 else contextlib.nullcontext(),
    )  # fmt: skip


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@identical(plans=2)
def test_another_default_type():
    model = mlp()

    def loss_fn(model, batch):
        return plain_loss(model, batch) * torch.full((3,), 0.1).sum() * torch.tensor(0.3)

    return Loop(
        model, loss_fn, sgd(model),
        around=lambda k: default_dtype(torch.float64 if k in (2, 3, 5) else torch.float32),
    )  # fmt: skip


@identical(plans=None)
def test_a_default_device():
    model = mlp()

    def loss_fn(model, batch):
        return plain_loss(model, batch) * torch.ones(3).sum()

    return Loop(
        model, loss_fn, sgd(model),
        around=lambda k: torch.device("cpu") if k > 2 else contextlib.nullcontext(),
    )  # fmt: skip


@identical(plans=None)
def test_kernels_of_attention_change():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.head = nn.Linear(4, 24), nn.Linear(8, 3)

        def forward(self, x):
            q, k, v = self.qkv(x).view(1, 2, 6, 12).split(4, -1)
            return self.head(functional.scaled_dot_product_attention(q, k, v).reshape(6, 8))

    model = Net()
    kinds = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    return Loop(model, plain_loss, sgd(model), around=lambda k: sdpa_kernel(kinds[k in (2, 3, 6)]))


@identical(plans=None)
def test_deterministic_algorithms_are_switched_on():
    model = mlp()

    @contextlib.contextmanager
    def deterministic(on):
        torch.use_deterministic_algorithms(on)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    return Loop(model, plain_loss, sgd(model), around=lambda k: deterministic(k > 3))


# --- draws --------------------------------------------------------------------------------------------------------


@identical()
def test_numbers_of_python_and_a_tensor_of_them():
    model = mlp()

    def loss_fn(model, batch):
        weight = torch.tensor([random.random() for _ in range(3)])
        return cross_entropy(model(batch[0]), batch[1], weight=weight) * random.uniform(0.5, 1.5)

    return Loop(model, loss_fn, sgd(model))


@identical(plans=3)
def test_a_random_crop():
    model, rng = mlp(), np.random.default_rng(1)

    def loss_fn(model, batch):
        start = int(rng.integers(0, 3))
        return cross_entropy(model(batch[0][start : start + 3]), batch[1][start : start + 3])

    return Loop(model, loss_fn, sgd(model), watched=lambda: rng.bit_generator.state)


@identical()
def test_a_random_permutation_of_python():
    model = mlp()

    def loss_fn(model, batch):
        order = list(range(6))
        random.shuffle(order)
        return cross_entropy(model(batch[0][torch.tensor(order)]), batch[1][torch.tensor(order)])

    return Loop(model, loss_fn, sgd(model))


@identical(plans=None)
def test_a_list_of_python_as_an_index():
    model = mlp()

    def loss_fn(model, batch):
        order = random.sample(range(6), 4)
        return cross_entropy(model(batch[0][order]), batch[1][order])

    return Loop(model, loss_fn, sgd(model))


@identical(plans=None)
def test_a_random_depth():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.cell, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def grow(self, x, depth):
            return x if depth == 0 else self.grow(self.cell(x).tanh(), depth - 1)

        def forward(self, x):
            return self.head(self.grow(self.enter(x), random.randint(0, 3)))

    model = Net()
    return Loop(model, plain_loss, sgd(model))


@identical(plans=None)
def test_a_tree_given_as_data():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.join, self.head = nn.Embedding(5, 8), nn.Linear(16, 8), nn.Linear(8, 3)

        def node(self, tree):
            if isinstance(tree, int):
                return self.embed.weight[tree]
            return self.join(torch.cat([self.node(t) for t in tree])).tanh()

        def forward(self, tree):
            return self.head(self.node(tree))

    model, trees = Net(), [((0, 1), 2), (3, (1, 4)), (0, 1), ((2, 3), (4, 0))]

    def loss_fn(model, batch):
        return cross_entropy(model(batch["tree"]), batch["y"])

    return Loop(
        model, loss_fn, sgd(model),
        batch=lambda k: {"tree": trees[k % 4], "y": torch.tensor(k % 3)},
    )  # fmt: skip
