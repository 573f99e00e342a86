import json
import logging
import threading
import warnings

import pytest
import torch

from support import plans
from support.models import MODELS
from support.runs import Pair, eager, loss_of
from tightship.errors import BadInput, BudgetExceeded, Infeasible, Unsupported, VerificationFailed
from tightship.execute import allocator
from tightship.execute.fit import fit
from tightship.execute.interpreter import PeakMismatch
from tightship.frontends.torch.optimizer.updates import Updater
from tightship.graph import aligned

STEPS = 5
QUICK = (
    "mlp", "cnn", "tied", "viewed", "in_place", "buffers", "two_losses", "loss_module", "lstm", "checkpointed",
    "autocast", "gpt2_padded", "llama_sdpa",
)  # fmt: skip


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("measurements")


@pytest.fixture
def fitted(kept):
    """A pair and a strict step for it."""

    def make(name="mlp", optimizer="adamw", **options):
        pair = Pair(name, optimizer)
        options = {"planner": plans.keep, "strict": True, "cache": kept, "seconds_per_op": 0.0} | options
        return pair, fit(pair.model, pair.loss_fn, pair.optimizer, pair.batch(0), **options)

    return make


def as_planned(step):
    assert step.last.exact
    assert step.last.misses == 0
    assert step.last.measured_peak == step.last.process_peak == step.plan.peak


# ---- the same bits, the planned bytes


@pytest.mark.parametrize("planner", [plans.keep, plans.recompute], ids=["keep", "recompute"])
@pytest.mark.parametrize("name", QUICK)
def test_five_steps_are_those_of_eager_and_take_the_planned_bytes(fitted, name, planner):
    pair, step = fitted(name, planner=planner)
    for number in range(STEPS):
        pair.compare(step, number)
        if number:
            as_planned(step)
    if planner is plans.recompute:
        assert step.plan.count("recompute") > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(MODELS) - set(QUICK)))
def test_the_same_for_larger_graphs(fitted, name):
    pair, step = fitted(name, planner=plans.recompute)
    for number in range(STEPS):
        pair.compare(step, number)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_optimizer_state_is_made_as_eager_makes_it(fitted, optimizer):
    pair, step = fitted("cnn", optimizer)
    for number in range(STEPS):
        pair.compare(step, number)
    as_planned(step)


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "tied"])
def test_the_first_step_makes_the_state_and_stays_within_the_plan(fitted, name, optimizer):
    """The plan counts the state from the start, so what was measured may be less, never more."""
    pair, step = fitted(name, optimizer, planner=lambda graph, _: plans.keep(graph, plans.keep(graph).peak))
    assert step.last is None
    pair.compare(step, 0)
    first = step.last
    made = {
        t for state in pair.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)
    }
    made = sum(aligned(t.untyped_storage().nbytes()) for t in made)
    assert made > 0 and not first.exact and first.as_planned
    assert step.plan.peak - made <= first.measured_peak == first.process_peak <= step.plan.peak
    pair.compare(step, 1)
    as_planned(step)


def test_a_first_step_that_needs_more_than_planned_is_told(fitted, monkeypatch):
    _, step = fitted("mlp", strict=False)
    update = Updater.step

    def wasteful(self, *given):
        held = torch.empty(1 << 20)
        update(self, *given)
        del held

    monkeypatch.setattr(Updater, "step", wasteful)
    with pytest.warns(PeakMismatch, match="the measured peak is"):
        step(MODELS["mlp"]()[2](0))
    assert not step.last.exact and step.last.measured_peak > step.plan.peak + (3 << 20)


def test_a_first_step_is_held_to_the_budget(fitted, monkeypatch):
    _, step = fitted("mlp", planner=lambda graph, _: plans.keep(graph, plans.keep(graph).peak))
    update = Updater.step
    monkeypatch.setattr(Updater, "step", lambda *given: (torch.empty(1 << 20), update(*given))[1])
    with pytest.raises(BudgetExceeded):
        step(MODELS["mlp"]()[2](0))


def test_the_default_planner_under_a_budget(fitted):
    pair, step = fitted("gpt2", planner=None, budget="85%", seconds=0.5)
    assert step.plan.budget == step.plan.peak_before * 85 // 100
    for number in range(3):
        pair.compare(step, number)
    as_planned(step)
    assert step.measure()["measured_peak"] <= step.plan.budget


def test_a_budget_that_cannot_be_met(fitted):
    with pytest.raises(Infeasible):
        fitted("mlp", planner=None, budget=100)


def test_results_beside_the_loss_come_back_in_their_structure(fitted):
    pair, step = fitted("two_losses")
    torch.manual_seed(0)
    loss, more = step(pair.batch(0))
    torch.manual_seed(0)
    expected = eager(pair.twin, pair.loss_fn, pair.twin_optimizer, pair.batch(0))
    assert torch.equal(loss, expected)
    assert more["name"] == "both" and more["logits"].shape == (6, 4)


def test_results_that_are_kept_neither_change_nor_disturb_later_steps(fitted):
    pair, step = fitted("two_losses")
    held = [step(pair.batch(k)) for k in range(4)]
    copies = [logits.clone() for _, more in held for logits in [more["logits"]]]
    for number in range(4, 8):
        step(pair.batch(number))
        as_planned(step)
    for (_, more), copy in zip(held, copies, strict=True):
        assert torch.equal(more["logits"], copy)


def test_results_that_are_kept_do_not_count_against_the_budget_of_later_steps(fitted):
    pair, step = fitted("mlp", planner=lambda graph, _: plans.keep(graph, plans.keep(graph).peak))
    losses = [step(pair.batch(k)) for k in range(6)]
    assert len({loss.data_ptr() for loss in losses}) == 6
    as_planned(step)


# ---- the caller's model and optimizer


def test_schedulers_are_seen_and_do_not_warn(fitted):
    pair, step = fitted()
    ours, theirs = (torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (pair.optimizer, pair.twin_optimizer))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            pair.compare(step, number)
            ours.step()
            theirs.step()


def test_checkpoints_are_the_usual_ones(fitted):
    pair, step = fitted("cnn")
    pair.compare(step, 0)
    model, optimizer = pair.model.state_dict(), pair.optimizer.state_dict()
    fresh, again = fitted("cnn")
    fresh.model.load_state_dict(model)
    fresh.optimizer.load_state_dict(optimizer)
    fresh.twin.load_state_dict(pair.twin.state_dict())
    fresh.twin_optimizer.load_state_dict(pair.twin_optimizer.state_dict())
    for number in range(1, 3):
        fresh.compare(again, number)
    assert not [note for note in again.notes if "captured again" in note]
    as_planned(again)


def test_gradients_of_the_caller_are_refused_and_left_alone(fitted):
    pair, step = fitted()
    weight = next(pair.model.parameters())
    before = weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    with pytest.raises(Unsupported, match=r"0\.weight.*zero_grad"):
        step(pair.batch(0))
    assert torch.equal(weight.grad, torch.ones_like(weight)) and torch.equal(weight, before)
    weight.grad = None
    pair.compare(step, 0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused(fitted, mode):
    pair, step = fitted()
    with mode(), pytest.raises(Unsupported, match="gradients"):
        step(pair.batch(0))
    pair.compare(step, 0)


def _replace_layer(pair):
    pair.model[0] = torch.nn.Linear(8, 16)
    pair.optimizer.param_groups[0]["params"][:2] = list(pair.model[0].parameters())
    return "replaced"


def _move_data(pair):
    weight = next(pair.model.parameters())
    pair.kept = weight.data  # which is another tensor from then on
    weight.data = weight.data.clone()
    return "moved"


def _move_into_another(pair):
    weight = next(pair.model.parameters())
    pair.kept = torch.empty(2, *weight.shape)
    pair.kept[1] = weight.data
    weight.data = pair.kept[1]
    return "moved"


def test_parameters_that_lie_elsewhere_are_planned_as_they_were(fitted):
    """As where an average of weights, or a target network, is put in their place between steps."""
    pair, step = fitted("mlp", "momentum")
    for number in range(3):
        pair.compare(step, number)
        for p in (*pair.model.parameters(), *pair.twin.parameters()):
            p.data = 0.9 * p.data
    assert not any("captured again" in note for note in step.notes)


def _add_group(pair):
    pair.optimizer.param_groups[0]["params"].pop()
    pair.optimizer.add_param_group({"params": [pair.model[2].bias], "lr": 0.5})
    return "groups"


@pytest.mark.parametrize("change", [_replace_layer, _move_data, _move_into_another, _add_group])
def test_changed_parts_are_captured_again(fitted, change):
    pair, step = fitted("mlp", "momentum")
    pair.compare(step, 0)
    word = change(pair)
    torch.manual_seed(1)
    step(pair.batch(1))
    assert any(word in note for note in step.notes)
    # From what is there now, both go the same way.
    pair.twin.load_state_dict(pair.model.state_dict())
    before = [p.clone() for p in pair.model.parameters()]
    step(pair.batch(2))
    assert not any(torch.equal(p, b) for p, b in zip(pair.model.parameters(), before, strict=True))
    as_planned(step)


def test_modes_are_planned_apart(fitted):
    pair, step = fitted("cnn")
    pair.compare(step, 0)
    first = step.plan
    for net in (pair.model, pair.twin):
        net.eval()
    pair.compare(step, 1)
    assert step.plan is not first
    for net in (pair.model, pair.twin):
        net.train()
    pair.compare(step, 2)
    assert step.plan is first


# ---- batches


def pairs_of(rows, columns=8):
    g = torch.Generator().manual_seed(rows)
    return torch.randn(rows, columns, generator=g), torch.randint(0, 4, (rows,), generator=g)


def test_other_shapes_are_planned_and_share_one_arena(fitted):
    pair, step = fitted()
    for number, rows in enumerate((6, 300, 6, 20, 300, 6)):
        pair.compare(step, number, pairs_of(rows))
        if number > 1:
            as_planned(step)
    assert len(step._variants) == 3
    assert len({id(v.executor.arena) for v in step._variants}) == 1
    assert allocator.reserved() >= max(v.executor.extent for v in step._variants)


def test_the_kinds_used_last_are_kept(fitted):
    _, step = fitted(variants=2)
    plan = step.prepare(pairs_of(6))
    step.prepare(pairs_of(7))
    assert step.prepare(pairs_of(6)) is plan
    step.prepare(pairs_of(8))
    assert step.prepare(pairs_of(6)) is plan
    assert len(step._variants) == 2


def test_a_slice_of_a_data_set_starts_elsewhere_in_its_storage(fitted):
    pair, step = fitted("viewed")
    data, targets = torch.randn(30, 8), torch.randint(0, 4, (30,))
    for number in range(4):
        rows = slice(number * 6, number * 6 + 6)
        pair.compare(step, number, (data[rows], targets[rows]))
    assert len(step._variants) == 1


def test_other_values_beside_the_tensors_are_planned_apart(kept):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss(net, batch):
        return net(batch["x"]).sum() * batch["scale"]

    batch = {"x": torch.ones(2, 4), "scale": 2.0}
    step = fit(model, loss, optimizer, batch, planner=plans.keep, cache=kept)
    assert torch.equal(step(batch) * 2, step({**batch, "scale": 4.0}))


# ---- errors


def test_two_calls_at_once_are_refused(fitted):
    pair, step = fitted()
    program = step.program
    inside, go_on = threading.Event(), threading.Event()
    executor = step._variants[0].executor
    run = executor.run

    def slow(tensors, **options):
        inside.set()
        assert go_on.wait(60)
        return run(tensors, **options)

    executor.run = slow
    losses = []
    thread = threading.Thread(target=lambda: losses.append(step(pair.batch(0))))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(Unsupported, match="one thread at a time"):
        step(pair.batch(0))
    with pytest.raises(Unsupported, match="one thread at a time"):
        step.prepare(pair.batch(0))
    go_on.set()
    thread.join()
    assert len(losses) == 1 and step.program is program
    executor.run = run
    expected = eager(pair.twin, pair.loss_fn, pair.twin_optimizer, pair.batch(0))
    assert torch.equal(losses[0], expected)
    pair.compare(step, 1)  # from this thread, now that the other is done


def test_a_failed_step_leaves_nothing_behind(fitted):
    pair, step = fitted("mlp", "sgd")
    executor = step._variants[0].executor
    pair.compare(step, 0)
    broken = executor._code.instructions[len(executor._code.instructions) // 2]
    live = executor.arena.live

    def fail(_env):
        raise KeyError("broken")

    position = executor._code.instructions.index(broken)
    executor._code.instructions[position] = type(broken)(broken.step, broken.op, fail)
    with pytest.raises(KeyError, match="broken"):
        step(pair.batch(1))
    assert executor.arena.live <= live
    executor._code.instructions[position] = broken
    pair.twin.load_state_dict(pair.model.state_dict())
    pair.compare(step, 2)
    as_planned(step)


def test_a_planner_is_not_believed(fitted):
    def liar(graph, _budget):
        from dataclasses import replace

        return replace(plans.keep(graph), peak=1)

    with pytest.raises(VerificationFailed):
        fitted(planner=liar)


def test_arguments_that_make_no_sense(fitted):
    with pytest.raises(BadInput, match="options"):
        fitted(seconds=1.0)
    with pytest.raises(BadInput, match="options"):
        fitted(planner=None, color="red")
    with pytest.raises(BadInput, match="budget"):
        fitted(budget="much")
    with pytest.raises(BadInput, match="kind"):
        fitted(variants=0)


# ---- without a compiler


def test_without_a_compiler_results_are_the_same(fitted, monkeypatch):
    monkeypatch.setattr(allocator, "why_not", lambda _kind: "no C++ compiler")
    pair, step = fitted("cnn")
    for number in range(3):
        pair.compare(step, number)
    assert step.last is None
    assert step.measure()["measured_peak"] is None
    assert any("compiler" in note for note in step.notes)


def test_a_warning_when_a_step_does_not_go_as_planned(fitted):
    pair, step = fitted(strict=False)
    pair.compare(step, 0)
    executor = step._variants[0].executor
    hoard = torch.empty
    instruction = next(i for i in executor._code.instructions if i.made)
    held = []

    def greedy(env):
        instruction.run(env)
        held.append(hoard(1000))

    position = executor._code.instructions.index(instruction)
    executor._code.instructions[position] = type(instruction)(
        instruction.step, instruction.op, greedy, instruction.made
    )
    with pytest.warns(PeakMismatch, match="extra"):
        loss = step(pair.batch(1))
    assert torch.isfinite(loss_of(loss))


# ---- what a tracker and a log are told


def test_metrics_are_plain_numbers_under_keys_that_stay(fitted):
    pair, step = fitted("mlp", budget="100%", prepare=False, planner=None, seconds=0.5)
    assert step.metrics() == {}
    assert "nothing is captured" in str(step)
    for number in range(2):
        pair.compare(step, number)
    found = json.loads(json.dumps(step.metrics()))
    assert list(found) == [
        "peak", "planned", "unplanned", "process", "budget", "static", "arena", "reserved", "outside", "misses",
        "kinds", "time", "time_unplanned", "skipped", "eager",
    ]  # fmt: skip
    assert found["peak"] == found["planned"] == step.last.measured_peak <= found["budget"]
    assert (found["misses"], found["kinds"], found["eager"]) == (0, 1, 0)
    assert set(step.metrics("memory/")) == {f"memory/{key}" for key in found}
    assert all(type(x) in (int, float) for x in found.values())
    assert str(step) in step._repr_mimebundle_()["text/plain"]


def test_metrics_of_a_step_in_eager_have_no_plan(fitted):
    pair, step = fitted("mlp", strict=False)
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(pair.batch(0))
    found = step.metrics()
    assert found["eager"] == 1 and found["peak"] > 0
    assert "planned" not in found and "budget" not in found and "time" not in found


def test_plans_are_logged_under_the_packages_name_and_nothing_is_printed(fitted, caplog, capsys):
    with caplog.at_level(logging.INFO, logger="tightship"):
        _, step = fitted("mlp")
    (row,) = [r for r in caplog.records if r.name == "tightship.plan"]
    assert row.levelno == logging.INFO and "unplanned" in row.getMessage()
    assert not capsys.readouterr().out
    assert not any(logging.getLogger(n).handlers for n in logging.root.manager.loggerDict if "tightship" in n)
    assert step.plan.peak
