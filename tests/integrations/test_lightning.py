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
    train(
        tmp_path, Tightship("75%", say=None, **QUICK), steps=1
    )  # measures the machine, which takes memory once
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


class Loop(Net):
    """The same, with what a loop has beside it: an adaptive optimizer, a schedule, and validation."""

    def __init__(self):
        super().__init__()
        self.validated = []

    def validation_step(self, batch, _):
        self.validated.append(self(*batch).detach().clone())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


TRAINERS = {
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping by norm": {"gradient_clip_val": 0.1},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulation and clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "bfloat16": {"precision": "bf16-mixed"},
    "true bfloat16": {"precision": "bf16-true"},
    "validation within an epoch": {"val_check_interval": 2},
}


def run(folder, *callbacks, epochs=2, resume=None, **more):
    """Epochs with a smaller last batch, and validation after each; the module."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, draw = Loop(), torch.Generator().manual_seed(0)
    rows = torch.randn(160, 32, generator=draw), torch.randint(0, 4, (160,), generator=draw)
    data = torch.utils.data.TensorDataset(*rows)
    kept = torch.utils.data.DataLoader(torch.utils.data.Subset(data, range(40)), batch_size=24)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=list(callbacks), logger=False, default_root_dir=folder,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **more,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = torch.utils.data.DataLoader(data, batch_size=48)
        # Lightning's own checkpoints hold more than tensors.
        trainer.fit(model, loader, kept, ckpt_path=resume, **({"weights_only": False} if resume else {}))
    return model, trainer


def same(left, right):
    for a, b in ((left.losses, right.losses), (left.validated, right.validated),
                 (list(left.parameters()), list(right.parameters()))):  # fmt: skip
        assert len(a) == len(b) > 0
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", TRAINERS)
def test_trainers_as_people_have_them_are_the_same_with_the_callback(kind, tmp_path):
    planned = Tightship("90%", say=None, **QUICK)
    model, _ = run(tmp_path, planned, **TRAINERS[kind])
    other, _ = run(tmp_path, **TRAINERS[kind])
    same(model, other)
    assert planned._session.ledger.step.name == "AdamW"
    assert planned.plans
    assert model._compiled_call_impl is None


def test_a_run_is_resumed_from_a_checkpoint(tmp_path):
    _, trainer = run(tmp_path, Tightship("90%", say=None, **QUICK), epochs=1)
    checkpoint = str(tmp_path / "one.ckpt")
    trainer.save_checkpoint(checkpoint)
    planned = Tightship("90%", say=None, **QUICK)
    model, _ = run(tmp_path, planned, resume=checkpoint)
    other, _ = run(tmp_path, resume=checkpoint)
    same(model, other)
    assert planned.plans
