"""Training loops of several kinds of models, batches and losses."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import rnn

from support.harness import Loop, adam, identical, mlp, pairs, refused, sgd

cross_entropy = functional.cross_entropy


def plain_loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


# --- batches ------------------------------------------------------------------------------------------------------


@identical()
def test_a_list():
    model = mlp()
    return Loop(model, plain_loss, sgd(model), batch=lambda k: list(pairs(k)))


@identical()
def test_a_named_tuple():
    Pair = namedtuple("Pair", "x y")
    model = mlp()
    return Loop(model, lambda m, b: cross_entropy(m(b.x), b.y), sgd(model), batch=lambda k: Pair(*pairs(k)))


@identical()
def test_a_dataclass():
    @dataclasses.dataclass
    class Pair:
        x: torch.Tensor
        y: torch.Tensor
        name: str

    model = mlp()
    return Loop(
        model, lambda m, b: cross_entropy(m(b.x), b.y), sgd(model), batch=lambda k: Pair(*pairs(k), f"b{k}")
    )


@identical()
def test_an_object_of_a_class():
    class Pair:
        def __init__(self, x, y):
            self.x, self.y = x, y

    model = mlp()
    return Loop(model, lambda m, b: cross_entropy(m(b.x), b.y), sgd(model), batch=lambda k: Pair(*pairs(k)))


@identical()
def test_arrays_of_numpy():
    model = mlp()

    def loss_fn(model, batch):
        return cross_entropy(model(torch.from_numpy(batch[0])), torch.as_tensor(batch[1]))

    return Loop(model, loss_fn, sgd(model), batch=lambda k: tuple(t.numpy() for t in pairs(k)))


@refused("changing an array")
def test_an_array_of_numpy_that_is_filled_twice():
    model, rng, noise = mlp(), np.random.default_rng(0), np.empty((6, 4), dtype=np.float32)

    def loss_fn(model, batch):
        loss = 0.0
        for _ in range(2):
            rng.standard_normal(out=noise, dtype=np.float32)
            loss = loss + cross_entropy(model(batch[0] + torch.from_numpy(noise)), batch[1])
        return loss

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_an_array_of_numpy_that_is_filled_in_each_step():
    model, rng, noise = mlp(), np.random.default_rng(0), np.empty((6, 4), dtype=np.float32)

    def loss_fn(model, batch):
        rng.standard_normal(out=noise, dtype=np.float32)
        return cross_entropy(model(batch[0] + torch.from_numpy(noise)), batch[1])

    return Loop(model, loss_fn, sgd(model), watched=lambda: (noise, rng.bit_generator.state))


@identical()
def test_lists_of_python():
    model = mlp()

    def loss_fn(model, batch):
        return cross_entropy(model(torch.tensor(batch["x"])), torch.tensor(batch["y"]))

    def batch(k):
        x, y = pairs(k)
        return {"x": x.tolist(), "y": y.tolist()}

    return Loop(model, loss_fn, sgd(model), batch=batch)


@identical(plans=None)
def test_a_number_of_parts_that_changes():
    model = mlp()

    def loss_fn(model, batch):
        return sum(plain_loss(model, part) for part in batch) / len(batch)

    return Loop(model, loss_fn, sgd(model), batch=lambda k: [pairs(k + i) for i in range(1 + k % 3)])


@identical(prepare=False)
def test_a_generator_that_the_loss_draws_from():
    model, data = mlp(), (p for p in [pairs(k) for k in range(9)])
    return Loop(model, lambda m, b: plain_loss(m, next(data)), sgd(model), batch=lambda k: {"k": k})


@identical(plans=None)
def test_the_batch_is_changed_in_place():
    model = mlp()

    def loss_fn(model, batch):
        batch[0].mul_(0.5)
        return plain_loss(model, batch)

    batches = [pairs(0), pairs(1)]
    return Loop(model, loss_fn, sgd(model), batch=lambda k: batches[k % 2], watched=lambda: batches)


@identical(plans=None)
def test_the_dict_of_the_batch_is_emptied():
    model = mlp()

    def loss_fn(model, batch):
        y = batch.pop("y")
        return cross_entropy(model(batch["x"]), y)

    return Loop(model, loss_fn, sgd(model), batch=lambda k: dict(zip("xy", pairs(k), strict=True)))


@identical(plans=2)
def test_a_text_that_decides():
    model = mlp()

    def loss_fn(model, batch):
        out = model(batch["x"])
        return cross_entropy(out, batch["y"]) if batch["task"] == "class" else out.pow(2).mean()

    def batch(k):
        x, y = pairs(k)
        return {"x": x, "y": y, "task": "square" if k % 3 == 1 else "class"}

    return Loop(model, loss_fn, sgd(model), batch=batch)


# --- looking at tensors -------------------------------------------------------------------------------------------


@identical()
def test_item_of_the_loss():
    model, history = mlp(), []

    def loss_fn(model, batch):
        loss = plain_loss(model, batch)
        history.append(loss.item())
        return loss

    return Loop(model, loss_fn, sgd(model))


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@identical()
def test_float_of_the_loss():
    model, history = mlp(), []

    def loss_fn(model, batch):
        loss = plain_loss(model, batch)
        history.append(float(loss))
        return loss

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_print_of_the_loss():
    model, shown = mlp(), []

    def loss_fn(model, batch):
        loss = plain_loss(model, batch)
        shown.append(str(loss))
        return loss

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_an_f_string_of_the_loss():
    model, shown = mlp(), []

    def loss_fn(model, batch):
        loss = plain_loss(model, batch)
        shown.append(f"loss {loss:.3f}")
        return loss

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_numpy_of_the_output():
    model, shown = mlp(), []

    def loss_fn(model, batch):
        out = model(batch[0])
        shown.append(out.detach().numpy().mean())
        return cross_entropy(out, batch[1])

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_numpy_given_a_tensor():
    model, shown = mlp(), []

    def loss_fn(model, batch):
        out = model(batch[0])
        shown.append(np.asarray(out.detach()).mean())
        return cross_entropy(out, batch[1])

    return Loop(model, loss_fn, sgd(model))


@identical(plans=None)
def test_a_branch_on_the_batch():
    model = mlp()

    def loss_fn(model, batch):
        out = model(batch[0])
        if (batch[1] == 0).any():
            out = out.tanh()
        return cross_entropy(out, batch[1])

    return Loop(model, loss_fn, sgd(model))


@identical(plans=None)
def test_a_branch_on_the_loss():
    model = mlp()

    def loss_fn(model, batch):
        loss = plain_loss(model, batch)
        return loss * 2 if loss > 1 else loss

    return Loop(model, loss_fn, sgd(model))


def skipped_for_nan(bad):
    """A loss that looks whether it is finite, on batches of which ``bad`` holds NaN."""
    model = mlp()

    def loss_fn(model, batch):
        loss = plain_loss(model, batch)
        return loss if torch.isfinite(loss) else loss * 0

    def batch(k):
        x, y = pairs(k)
        return (x * float("nan") if k == bad else x), y

    return Loop(model, loss_fn, sgd(model), batch=batch)


@identical()
def test_a_step_that_would_be_skipped_for_nan():
    return skipped_for_nan(-1)


@refused("", step=3)
def test_a_step_that_is_skipped_for_nan():
    return skipped_for_nan(3)


@identical()
def test_a_loss_of_nan():
    model = mlp()

    def batch(k):
        x, y = pairs(k)
        return (x * float("nan") if k == 3 else x), y

    return Loop(model, plain_loss, sgd(model), batch=batch)


@identical(plans=None)
def test_rows_that_are_selected():
    model = mlp()

    def loss_fn(model, batch):
        x, y = batch
        keep = y != 0
        return cross_entropy(model(x)[keep], y[keep])

    return Loop(model, loss_fn, sgd(model))


@refused("must not depend on data")
def test_rows_selected_by_the_output():
    model = mlp()

    def loss_fn(model, batch):
        out = model(batch[0])
        keep = out.max(1).values > 0
        return cross_entropy(out[keep], batch[1][keep])

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_where():
    model = mlp()

    def loss_fn(model, batch):
        out = model(batch[0])
        rows = cross_entropy(out, batch[1], reduction="none")
        return torch.where(rows > 1.0, rows * 0.5, rows).mean()

    return Loop(model, loss_fn, sgd(model))


# --- random numbers of torch --------------------------------------------------------------------------------------


@identical()
def test_gumbel():
    model, held = mlp(), SimpleNamespace(tau=1.0)

    def loss_fn(model, batch):
        held.tau *= 0.9
        return (functional.gumbel_softmax(model(batch[0]), tau=held.tau, hard=True) * batch[0][:, :3]).sum()

    return Loop(model, loss_fn, sgd(model), watched=lambda: vars(held))


@identical()
def test_a_distribution():
    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.leave = nn.Linear(4, 4), nn.Linear(2, 4)

        def forward(self, x):
            mean, scale = self.enter(x).chunk(2, -1)
            z = torch.distributions.Normal(mean, scale.exp())
            return self.leave(z.rsample()), torch.distributions.kl_divergence(
                z, torch.distributions.Normal(0.0, 1.0)
            )

    model, beta = Coder(), [0.0]

    def loss_fn(model, batch):
        out, kl = model(batch[0])
        beta[0] = min(1.0, beta[0] + 0.2)
        return functional.mse_loss(out, batch[0]) + beta[0] * kl.mean()

    return Loop(model, loss_fn, adam(model), watched=lambda: beta)


@refused("with a generator")
def test_a_generator_of_torch():
    model, g = mlp(), torch.Generator().manual_seed(5)

    def loss_fn(model, batch):
        return cross_entropy(model(batch[0] + torch.randn(6, 4, generator=g)), batch[1])

    return Loop(model, loss_fn, sgd(model), watched=g.get_state)


@identical(plans=2)
def test_draws_that_only_python_sees():
    model = mlp()

    def loss_fn(model, batch):
        weight = 2.0 if torch.rand(()).item() > 0.5 else 1.0
        return plain_loss(model, batch) * weight

    return Loop(model, loss_fn, sgd(model))


@refused("random state")
def test_a_seed_in_the_loss():
    model, k = mlp(dropout=0.2), [0]

    def loss_fn(model, batch):
        k[0] += 1
        torch.manual_seed(k[0])
        return plain_loss(model, batch)

    return Loop(model, loss_fn, sgd(model))


@refused("")
def test_a_fork_of_the_random_state():
    model = mlp()

    def loss_fn(model, batch):
        with torch.random.fork_rng(devices=[]):
            noise = torch.randn(6, 4)
        return cross_entropy(model(batch[0] + noise), batch[1])

    return Loop(model, loss_fn, sgd(model))


# --- recurrent networks -------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.net, self.head = kind(4, 5, batch_first=True, dropout=0.2, num_layers=2), nn.Linear(5, 3)


@identical()
def test_an_lstm():
    model = Recurrent()

    def loss_fn(model, batch):
        out, _ = model.net(batch[0].view(2, 3, 4))
        return cross_entropy(model.head(out).view(6, 3), batch[1])

    return Loop(model, loss_fn, sgd(model))


@identical()
def test_a_gru():
    model = Recurrent(nn.GRU)

    def loss_fn(model, batch):
        _, h = model.net(batch[0].view(6, 1, 4))
        return cross_entropy(model.head(h[-1]), batch[1])

    return Loop(model, loss_fn, sgd(model))


@identical(plans=None)
def test_packed_sequences():
    model = Recurrent()

    def loss_fn(model, batch):
        x, y, lengths = batch
        packed = rnn.pack_padded_sequence(x.view(2, 3, 4), lengths, batch_first=True, enforce_sorted=False)
        out, _ = rnn.pad_packed_sequence(model.net(packed)[0], batch_first=True)
        return cross_entropy(model.head(out[:, 0]), y[:2])

    lengths = [[3, 2], [3, 2], [1, 3], [3, 3], [3, 2], [1, 3], [2, 2]]
    return Loop(model, loss_fn, sgd(model), batch=lambda k: (*pairs(k), torch.tensor(lengths[k])))


@identical()
def test_attention():
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)

    def loss_fn(model, batch):
        return model(batch[0].view(2, 3, 4)).pow(2).mean()

    return Loop(model, loss_fn, adam(model))


@identical()
def test_an_embedding():
    model = nn.Sequential(nn.Embedding(3, 8, padding_idx=0), nn.Linear(8, 3))
    return Loop(model, lambda m, b: cross_entropy(m(b[1]), b[1]), adam(model))


@identical()
def test_a_loss_module():
    model = mlp()
    return Loop(model, lambda m, b: nn.CrossEntropyLoss()(m(b[0]), b[1]), sgd(model))


# --- results ------------------------------------------------------------------------------------------------------


@identical()
def test_results_with_numbers():
    model, k = mlp(), [0]

    def loss_fn(model, batch):
        k[0] += 1
        out = model(batch[0])
        return cross_entropy(out, batch[1]), {"k": k[0], "out": out.detach(), "name": f"step {k[0]}"}

    return Loop(model, loss_fn, sgd(model), watched=lambda: k)


@identical(plans=None)
def test_results_that_change_their_structure():
    model, k = mlp(), [0]

    def loss_fn(model, batch):
        k[0] += 1
        out = model(batch[0])
        loss = cross_entropy(out, batch[1])
        return (loss, out.argmax(1)) if k[0] % 3 == 0 else (loss, None)

    return Loop(model, loss_fn, sgd(model), watched=lambda: k)


@identical()
def test_a_result_that_is_a_parameter():
    model = mlp()
    return Loop(model, lambda m, b: (plain_loss(m, b), {"bias": m[3].bias.detach().clone()}), sgd(model))


@identical()
def test_a_result_that_is_part_of_the_batch():
    model = mlp()
    return Loop(model, lambda m, b: (plain_loss(m, b), {"x": b[0]}), sgd(model))


@identical()
def test_a_result_that_is_a_constant():
    model, held = mlp(), [torch.ones(3)]

    def before(k):
        held[0] = torch.full((3,), float(k))

    def loss_fn(model, batch):
        return plain_loss(model, batch) * held[0].sum(), {"weights": held[0]}

    return Loop(model, loss_fn, sgd(model), before=before)
