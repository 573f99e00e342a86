"""fit(mode="compiled") of recurrent layers, whose kernels are called whole or written out step by step."""

import pytest
import torch
from torch import nn

from tightship import fit

pytestmark = [
    pytest.mark.filterwarnings("error::tightship.execute.interpreter.PeakMismatch"),
    pytest.mark.slow,
]


class Tagger(nn.Module):
    def __init__(self, kind, **more):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(30, 8), kind(8, 8, batch_first=True, **more)
        self.head = nn.Linear(16 if more.get("bidirectional") else 8, 30)

    def forward(self, tokens):
        return self.head(self.layer(self.table(tokens))[0])


def loss(model, tokens):
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batch(seed):
    return torch.randint(30, (8, 9), generator=torch.Generator().manual_seed(seed))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


@pytest.mark.parametrize(
    ("kind", "more", "budget"),
    [
        (nn.LSTM, {"num_layers": 2, "bidirectional": True}, "static+85%"),
        (nn.LSTM, {"proj_size": 0, "bias": False}, None),
        (nn.GRU, {}, None),
        (nn.RNN, {"nonlinearity": "relu"}, None),
    ],
    ids=["LSTM within a budget", "LSTM", "GRU", "RNN"],
)
def test_recurrent_layers_train_as_in_eager_and_as_planned(kind, more, budget):
    model, other = Tagger(kind, **more), Tagger(kind, **more)
    options = {"mode": "compiled", "strict": True, "cache": None}
    step, optimizer = fit(model, loss, sgd(model), batch(0), budget, **options), sgd(other)
    for k in range(3):
        optimizer.zero_grad()
        expected = loss(other, batch(k))
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step(batch(k)), expected.detach())
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b)
        used = step.measure()
        assert used["measured_peak"] == used["planned_peak"] and not used["misses"]
        assert budget is None or used["measured_peak"] <= used["budget"] < used["unplanned_peak"]
