"""The callback in the real Trainer: bit-identical losses and parameters, a lower measured peak, nothing left."""

import json

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
from tightship.graph import aligned
from tightship.integrations.accelerate import find_executable_batch_size
from tightship.integrations.huggingface import Tightship, fit_trainer

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


# --- one line, and what a tracker is told ---


def trainer_of(folder, **more):
    torch._dynamo.reset()
    torch.manual_seed(0)
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=8, max_steps=2, logging_steps=1, report_to=[], seed=1,
        save_strategy="no", use_cpu=True, disable_tqdm=True, **more,
    )  # fmt: skip
    data = sentences()
    return Trainer(gpt2(), args, train_dataset=data, eval_dataset=data[:3])


@pytest.mark.slow
def test_one_line_is_enough_with_all_that_a_trainer_does(tmp_path, caplog):
    """Clipping, accumulation, mixed precision and evaluation together."""
    more = {
        "max_grad_norm": 0.3, "gradient_accumulation_steps": 2, "bf16": True, "eval_strategy": "steps",
        "eval_steps": 1, "per_device_eval_batch_size": 3,
    }  # fmt: skip
    sides = []
    for ours in (True, False):
        trainer = trainer_of(tmp_path, **more)
        if ours:
            callback = fit_trainer(trainer, "85%", say=None, **QUICK)
            assert callback.metrics() == {"graphs": 0, "notes": 0}
        with caplog.at_level("INFO", logger="tightship"):
            trainer.train()
        rows = [{k: v for k, v in r.items() if "loss" in k or "norm" in k} for r in trainer.state.log_history]
        sides.append((rows, [p.detach() for p in trainer.model.parameters()]))
    assert sides[0][0] == sides[1][0]
    assert all(torch.equal(a, b) for a, b in zip(sides[0][1], sides[1][1], strict=True))
    found = json.loads(json.dumps(callback.metrics("memory/")))
    assert set(found) == {
        f"memory/{k}" for k in ("graphs", "notes", "planned", "unplanned", "peak", "misses")
    }
    assert found["memory/planned"] < found["memory/unplanned"]
    assert found["memory/misses"] == 0 and found["memory/graphs"] > 0
    assert any(r.name == "tightship.callback" for r in caplog.records)


def test_one_line_is_refused_where_it_would_say_nothing_or_twice(tmp_path):
    trainer = trainer_of(tmp_path)
    fit_trainer(trainer, "6GiB")
    with pytest.raises(BadInput, match="has the callback already"):
        fit_trainer(trainer, "6GiB")
    with pytest.raises(BadInput, match="no Trainer of transformers"):
        fit_trainer(object(), "6GiB")
    with pytest.raises(BadInput, match="an option is one of"):
        fit_trainer(trainer_of(tmp_path), "6GiB", color="red")


# --- accelerate's decorator ---


def parts():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "sample": torch.randn(4, 64), "optimizer": optimizer, "loss_fn": squared}


def squared(model, x):
    return model(x).square().mean()


def eager_peak(size):
    made = parts()
    model, optimizer, x = made["model"], made["optimizer"], torch.randn(size, 64)
    static = sum(aligned(t.nbytes) for t in (*model.parameters(), x))
    with Meter() as meter:
        for _ in range(2):
            squared(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    return static + meter.peak


def test_the_decorator_runs_once_with_the_largest_batch_that_eager_has_room_for():
    calls = []

    @find_executable_batch_size(step=parts, budget="300kB")
    def train(batch_size, epochs, *, rate):
        calls.append(batch_size)
        return batch_size, epochs, rate

    size, *rest = train(3, rate=0.1)
    assert rest == [3, 0.1] and calls == [size] == [train.batch_size()]
    assert eager_peak(size) <= 300_000 < eager_peak(size + max(1, size // 32))


def test_a_planned_step_has_room_for_a_larger_batch():
    options = {"step": parts, "budget": "200kB", "seconds": 2.0}
    plain, planned = (
        find_executable_batch_size(planned=planned, **options)(lambda size: size)()
        for planned in (False, True)
    )
    assert planned > plain
    capped = find_executable_batch_size(planned=True, starting_batch_size=plain, **options)
    assert capped(lambda size: size)() == plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": parts}, "needs a budget in bytes"),
        ({"step": parts, "budget": "60%"}, "needs a budget in bytes"),
        ({"step": parts, "budget": "1MiB", "starting_batch_size": 0}, "starting_batch_size"),
        ({"step": {"model": None}, "budget": "1MiB"}, "sample missing"),
        ({"step": {"models": None}, "budget": "1MiB"}, "unknown models"),
        ({"step": lambda: None, "budget": "1MiB"}, "a step is a mapping"),
    ],
)
def test_what_the_decorator_cannot_do_is_said(options, message):
    with pytest.raises(BadInput, match=message):
        find_executable_batch_size(**options)(lambda size: size)()


def test_no_batch_fits():
    with pytest.raises(Infeasible):
        find_executable_batch_size(step=parts, budget="20kB")(lambda size: size)()
