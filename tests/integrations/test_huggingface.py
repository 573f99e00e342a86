"""The callback in the real Trainer: bit-identical losses and parameters, a lower measured peak, nothing left."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate, which the Trainer needs, is not installed")

from accelerate import Accelerator
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

import tightship
from tightship.errors import BadInput, Infeasible
from tightship.execute.allocator import Meter
from tightship.integrations.huggingface import Tightship

QUICK = {"seconds_per_op": 0.0005, "seconds": 20.0, "work": 500_000, "strict": True}


def gpt2():
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return GPT2LMHeadModel(config)


def bert():
    config = BertConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=100
    )
    return BertForSequenceClassification(config)


def sentences(classes: int = 0):
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(3, 100, (16, 48), generator=draw)
    return [
        {"input_ids": r, "labels": torch.tensor(k % classes) if classes else r} for k, r in enumerate(rows)
    ]


def train(make, data, folder, *callbacks, steps=3):
    torch.manual_seed(0)
    model = make()
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=8, max_steps=steps, logging_steps=1, report_to=[], seed=1,
        save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=data, callbacks=list(callbacks))
    with Meter() as meter:
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], model, meter.peak


@pytest.mark.parametrize(("make", "classes"), [(gpt2, 0), pytest.param(bert, 2, marks=pytest.mark.slow)])
def test_losses_and_parameters_are_eager_s_and_the_peak_is_lower(make, classes, tmp_path) -> None:
    data = sentences(classes)
    said = []
    planned = Tightship("60%", say=said.append, **QUICK)
    losses, model, peak = train(make, data, tmp_path, planned)
    eager, other, without = train(make, data, tmp_path)
    assert losses == eager and len(losses) == 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert peak < 0.85 * without
    largest = max(planned.plans, key=lambda piece: piece.plan.peak_before)
    assert largest.plan.peak < largest.plan.peak_before
    assert any(text.startswith(f"tightship: graph {largest.name}: peak") for text in said)
    assert model._compiled_call_impl is None
    assert getattr(model, "loss_type", None) == getattr(other, "loss_type", None)


def test_a_budget_that_cannot_be_met_ends_training(tmp_path) -> None:
    with pytest.raises(Infeasible):
        train(gpt2, sentences(), tmp_path, Tightship(1 << 16, say=None, **QUICK))


def test_bad_options_are_said_at_once() -> None:
    with pytest.raises(BadInput, match="an option is one of"):
        Tightship("60%", color="red")


def test_a_model_is_not_compiled_twice(tmp_path) -> None:
    def compiled():
        model = gpt2()
        model.compile(backend="eager")
        return model

    with pytest.raises(BadInput, match="compiled once"):
        train(compiled, sentences(), tmp_path, Tightship("60%"))


TRAINERS = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "bfloat16": {"bf16": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3},
}


def run(folder, *callbacks, resume=None, **more):
    """Two epochs with a smaller last batch and clipping; what was logged, and the model."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=6, num_train_epochs=2, logging_steps=1, report_to=[], seed=1,
        use_cpu=True, disable_tqdm=True, max_grad_norm=0.5, **{"save_strategy": "no", **more},
    )  # fmt: skip
    data = sentences()
    trainer = Trainer(gpt2(), args, train_dataset=data, eval_dataset=data[:7], callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)
    rows = [
        {k: r[k] for k in ("loss", "eval_loss", "grad_norm") if k in r} for r in trainer.state.log_history
    ]
    return rows, trainer.model


def same(left, right):
    rows, model = left
    others, other = right
    return rows == others and all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINERS)
def test_trainers_as_people_have_them_are_the_same_with_the_callback(kind, tmp_path):
    planned = Tightship("80%", say=None, **QUICK)
    assert same(run(tmp_path, planned, **TRAINERS[kind]), run(tmp_path, **TRAINERS[kind]))
    assert planned._session.ledger.step.name == "AdamW"
    assert planned._session.ledger.accumulate == (kind == "accumulation")


@pytest.mark.slow
def test_a_run_is_resumed_from_a_checkpoint(tmp_path):
    run(tmp_path, Tightship("80%", say=None, **QUICK), save_strategy="epoch")
    checkpoint = str(tmp_path / "checkpoint-3")
    resumed = run(tmp_path / "a", Tightship("80%", say=None, **QUICK), resume=checkpoint)
    assert same(resumed, run(tmp_path / "b", resume=checkpoint))


@pytest.mark.parametrize("prepared", [False, True])
def test_a_loop_of_accelerate_is_the_same_by_fit(prepared, tmp_path):
    """``accelerator.prepare`` wraps the optimizer, whose own step is what fit plans."""
    sides = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        if prepared:
            accelerator = Accelerator(cpu=True)
            model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        batches = torch.randn(3, 8, 16)
        loss_fn = lambda model, x: model(x).square().mean()  # noqa: E731
        step = None
        if ours:
            step = tightship.fit(model, loss_fn, optimizer, batches[0], cache=tmp_path, strict=True)
        losses = []
        for batch in batches:
            if step is None:
                losses.append(loss_fn(model, batch))
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                losses.append(step(batch))
            scheduler.step()
        if step is not None:
            assert step.last.measured_peak == step.plan.peak and not step.last.misses
        rate = optimizer.param_groups[0]["lr"]
        sides.append(([x.detach() for x in losses], list(model.state_dict().values()), rate))
    (a, b, first), (c, d, second) = sides
    assert all(torch.equal(x, y) for x, y in zip([*a, *b], [*c, *d], strict=True)) and first == second
