"""The callback in the real Trainer of Lightning: bit-identical losses and parameters, a lower peak, nothing left."""

import logging
import warnings

import pytest
import torch
from torch import nn

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

from tightship.errors import BadInput, Infeasible, Unsupported  # noqa: E402
from tightship.execute.allocator import Meter  # noqa: E402
from tightship.execute.fit import fit  # noqa: E402
from tightship.graph import aligned  # noqa: E402
from tightship.integrations.lightning import LargestBatch, Tightship  # noqa: E402

QUICK = {"seconds_per_op": 0.0005, "seconds": 20.0, "work": 500_000, "strict": True}
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_what_fabric_has_set_up_is_planned_as_it_is(precision):
    """Its module is called, its optimizer is the one inside."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    rows = []
    for planned in (False, True):
        torch.manual_seed(0)
        layers = [m for _ in range(3) for m in (nn.Linear(32, 32), nn.GELU())]
        model = nn.Sequential(*layers, nn.Linear(32, 4))
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 0.01))
        losses, step = [], None
        for _ in range(3):
            batch = torch.randn(64, 32), torch.randint(4, (64,))
            if planned:
                step = step or fit(model, cross_entropy, optimizer, batch, "100%", cache=None, seconds=2.0)
                losses.append(step(batch))
                continue
            loss = cross_entropy(model, batch)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        rows.append([*losses, *(p.detach() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True))
    assert step.measure()["measured_peak"] == step.plan.peak
    assert not step.notes or not any("AdamW" in note for note in step.notes)  # one op for each parameter


def test_what_fabric_does_around_the_step_is_refused():
    class Counts:
        def on_after_optimizer_step(self, **_):
            raise AssertionError

    fabric = lightning.Fabric(accelerator="cpu", devices=1, callbacks=[Counts()])
    model = nn.Linear(4, 4)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.01))
    with pytest.raises(Unsupported, match="Fabric's with callbacks"):
        fit(model, cross_entropy, optimizer, (torch.randn(2, 4), torch.randint(4, (2,))), cache=None)


def cross_entropy(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


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


@pytest.fixture
def one_rank(monkeypatch):
    """What torchrun says to a process of a world of one."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_in_distributed_data_parallel_forward_is_compiled_and_not_what_a_step_does_beside_it(
    tmp_path, one_rank
):
    """A list of losses that grows is Python state: compiled, each step would be another graph."""
    planned = Tightship("90%", say=None, **QUICK)
    model, _ = run(tmp_path, planned, epochs=3, strategy="ddp", devices=1)
    other, _ = run(tmp_path, epochs=3, strategy="ddp", devices=1)
    same(model, other)
    assert len(model.losses) > torch._dynamo.config.recompile_limit
    assert len(planned.plans) == 4  # for training and validation each size of batch
    assert model._compiled_call_impl is None


# --- the largest batch ---


class Sized(Net):
    """A module with its own loader, as the batch size finder wants it."""

    def __init__(self, batch_size=4):
        super().__init__()
        self.batch_size = batch_size

    def training_step(self, batch, _):
        loss = self(*batch)
        self.log("train", loss)
        return {"loss": loss}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self):
        data = torch.utils.data.TensorDataset(torch.randn(4096, 32), torch.randint(0, 4, (4096,)))
        return torch.utils.data.DataLoader(data, batch_size=self.batch_size)


def sized(folder, module, *callbacks, steps=2, **more):
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", callbacks=list(callbacks), logger=False, default_root_dir=folder,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **more,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module)
    return module


class Peak(lightning.pytorch.Callback):
    """The most bytes of a step, with what was there before."""

    def on_train_batch_start(self, trainer, module, batch, index):
        held = [*module.parameters(), *batch, *(p.grad for p in module.parameters() if p.grad is not None)]
        states = [t for s in trainer.optimizers[0].state.values() for t in s.values()]
        self.static = sum(aligned(t.untyped_storage().nbytes()) for t in (*held, *states))
        self.meter = Meter()
        self.meter.__enter__()

    def on_train_batch_end(self, *_):
        self.meter.__exit__(None, None, None)
        self.peak = self.static + self.meter.peak


@pytest.mark.parametrize(
    "more", [{}, {"gradient_clip_val": 0.1, "precision": "bf16-mixed"}], ids=["plain", "bf16"]
)
def test_the_largest_batch_fits_the_budget_and_the_next_does_not(more, tmp_path):
    budget, finder = 500_000, LargestBatch("500kB")
    module = sized(tmp_path, Sized(), finder, **more)
    assert module.batch_size == finder.optimal_batch_size > 64
    peaks = []
    for size in (module.batch_size, module.batch_size + max(2, module.batch_size // 32)):
        peak = Peak()
        sized(tmp_path, Sized(size), peak, **more)
        peaks.append(peak.peak)
    assert 0.9 * budget < peaks[0] <= budget < peaks[1]


def test_the_largest_batch_is_at_most_what_was_said_and_the_data_set(tmp_path):
    assert sized(tmp_path, Sized(), LargestBatch("1GiB", max_val=100), steps=1).batch_size == 100
    assert sized(tmp_path, Sized(), LargestBatch("1GiB"), steps=1).batch_size == 4096


def test_no_batch_within_the_budget_and_budgets_that_are_none(tmp_path):
    with pytest.raises(Infeasible):
        sized(tmp_path, Sized(), LargestBatch("10kB"))
    with pytest.raises(BadInput, match="a budget in bytes"):
        LargestBatch("60%")
    with pytest.raises(BadInput, match="a budget in bytes"):
        LargestBatch()


def test_looking_for_the_largest_batch_changes_nothing_of_the_module(tmp_path):
    torch.manual_seed(0)
    before = Sized()
    state = {n: t.clone() for n, t in before.state_dict().items()}
    sized(tmp_path, before, LargestBatch("500kB"), steps=0)
    assert all(torch.equal(t, state[n]) for n, t in before.state_dict().items())
    assert not {"log", "log_dict"} & set(vars(before))


def test_manual_optimization_is_refused(tmp_path):
    module = Sized()
    module.automatic_optimization = False
    with pytest.raises(Unsupported, match="LargestBatch for Sized"):
        sized(tmp_path, module, LargestBatch("1GiB"))
