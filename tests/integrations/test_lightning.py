"""The callback in the real Trainer of Lightning: bit-identical losses and parameters, a lower peak, nothing left."""

import logging
import warnings

import pytest
import torch
from torch import nn

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

from tightship.errors import Infeasible  # noqa: E402
from tightship.execute.allocator import Meter  # noqa: E402
from tightship.integrations.lightning import Tightship  # noqa: E402

QUICK = {"seconds_per_op": 0.0005, "seconds": 20.0, "work": 500_000, "strict": True}
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        rows = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))]
        self.net, self.losses = nn.Sequential(*rows, nn.Linear(32, 4)), []

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch, _):
        loss = self(*batch)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(folder, *callbacks, steps=4):
    torch.manual_seed(0)
    model = Net()
    draw = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(1024, 32, generator=draw), torch.randint(0, 4, (1024,), generator=draw)
    )
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", callbacks=list(callbacks), logger=False, default_root_dir=folder,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings(), Meter() as meter:
        warnings.simplefilter("ignore")
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=256))
    return model, meter.peak


def test_losses_and_parameters_are_eager_s_and_the_peak_is_lower(tmp_path) -> None:
    said = []
    planned = Tightship("75%", say=said.append, **QUICK)
    model, peak = train(tmp_path, planned)
    other, without = train(tmp_path)
    assert len(model.losses) == 4
    assert all(torch.equal(a, b) for a, b in zip(model.losses, other.losses, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert peak < 0.9 * without
    (piece,) = planned.plans
    assert piece.plan.peak < piece.plan.peak_before
    assert said[0].startswith(f"tightship: graph {piece.name}: peak")
    assert model._compiled_call_impl is None


def test_a_budget_that_cannot_be_met_ends_training_and_leaves_the_module_as_it_was(tmp_path) -> None:
    planned = Tightship(1 << 14, say=None, **QUICK)
    with pytest.raises(Infeasible):
        train(tmp_path, planned)
    assert planned._model is None
