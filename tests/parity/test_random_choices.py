"""Python that asks what torch has drawn: dropped layers, choices, numbers. They are what eager draws there."""

from __future__ import annotations

import torch
from torch import get_rng_state, nn, set_rng_state

from support.harness import Loop, adam, identical, mlp, refused, sgd


class Dropped(nn.Module):
    """Layers with dropout, some of which a step leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.drop(x)
            if torch.rand([]) < 0.5:
                x = torch.tanh(layer(x))
        return self.head(x)


def cross_entropy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@identical(plans=4)
def test_dropped_layers():
    model = Dropped()
    return Loop(model, cross_entropy, adam(model), steps=6)


@identical(plans=2)
def test_an_augmentation_that_is_drawn_behind_noise():
    model = mlp(dropout=0.2)

    def loss_fn(model, batch):
        x = batch[0] + 0.1 * torch.randn_like(batch[0])
        if torch.randint(2, (1,)).item():
            x = x.flip(-1)
        return cross_entropy(model, (x, batch[1]))

    return Loop(model, loss_fn, sgd(model), steps=12)


@identical(plans=1)
def test_a_weight_that_is_drawn():
    """Another number in every step, and the same ops."""
    model = mlp()

    def loss_fn(model, batch):
        share = torch.rand(1).item()
        mixed = share * batch[0] + (1 - share) * batch[0].flip(0)
        return cross_entropy(model, (mixed, batch[1]))

    return Loop(model, loss_fn, sgd(model))


@identical(plans=2)
def test_what_is_drawn_and_a_buffer_decide():
    model = mlp()
    model.register_buffer("rate", torch.tensor(0.5))

    def loss_fn(model, batch):
        x = nn.functional.dropout(batch[0], 0.2)
        loss = cross_entropy(model, (x, batch[1]))
        return loss * 2 if torch.rand([]) < model.rate else loss

    return Loop(model, loss_fn, sgd(model), steps=12)


@refused("aten.poisson")
def test_draws_whose_number_data_decide():
    model = mlp()

    def loss_fn(model, batch):
        loss = cross_entropy(model, batch)
        return loss * 2 if torch.poisson(torch.ones(())) > 0 else loss

    return Loop(model, loss_fn, sgd(model))


@refused("aten.poisson")
def test_draws_behind_some_whose_number_data_decide():
    model = mlp()

    def loss_fn(model, batch):
        loss = cross_entropy(model, (batch[0] + torch.poisson(batch[0].abs()), batch[1]))
        return loss * 2 if torch.rand([]) < 0.5 else loss

    return Loop(model, loss_fn, sgd(model))


@identical(plans=2)
def test_a_rate_that_changes():
    """What the answer is asked with is another number in each step."""
    model, k = mlp(), [0]

    def loss_fn(model, batch):
        k[0] += 1
        loss = cross_entropy(model, batch)
        return loss * 2 if torch.rand([]) < k[0] / 10 else loss

    return Loop(model, loss_fn, sgd(model), steps=8)


@identical(plans=2)
def test_a_threshold_on_the_batch_that_changes():
    model, k = mlp(), [0]

    def loss_fn(model, batch):
        k[0] += 1
        loss = cross_entropy(model, batch)
        return loss * 2 if (batch[0] > k[0] / 2).any() else loss

    return Loop(model, loss_fn, sgd(model), steps=8)


@identical(plans=2)
def test_a_rate_that_is_zero_at_first():
    """Nothing need be drawn to know that it is not below zero."""
    model, k = mlp(), [0]

    def loss_fn(model, batch):
        k[0] += 1
        loss = cross_entropy(model, batch)
        return loss * 2 if torch.rand([]) < max(0.0, (k[0] - 3) / 5) else loss

    return Loop(model, loss_fn, sgd(model), steps=8)


# --- states that are set, by names that were bound before ---------------------------------------------------------


@refused("random state")
def test_a_state_that_is_set_back():
    model = mlp(dropout=0.2)

    def loss_fn(model, batch):
        state = get_rng_state()
        first = cross_entropy(model, batch)
        set_rng_state(state)
        return first + cross_entropy(model, batch)

    return Loop(model, loss_fn, sgd(model))


@refused("random state")
def test_a_state_that_the_generator_sets_back():
    model = mlp(dropout=0.2)

    def loss_fn(model, batch):
        state = torch.default_generator.get_state()
        loss = cross_entropy(model, batch)
        torch.default_generator.set_state(state)
        return loss

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_a_seed_before_all_draws():
    model = mlp(dropout=0.2)

    def loss_fn(model, batch):
        torch.default_generator.manual_seed(3)
        return cross_entropy(model, batch)

    return Loop(model, loss_fn, sgd(model))
