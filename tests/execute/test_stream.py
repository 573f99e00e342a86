"""Streaming: parameters and optimizer state leave memory while a step does not need them. Bits are eager's, bytes the
planned ones, and the caller's tensors are there again where they are asked for."""

import copy
import gc
import io
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tightship
from support.runs import Failing, beyond, eager
from tightship.errors import BadInput, Infeasible, Unsupported
from tightship.execute import allocator
from tightship.execute.allocator import Meter
from tightship.execute.away import Away
from tightship.execute.fit import fit
from tightship.execute.host_pool import in_file
from tightship.graph import aligned
from tightship.planners.ahead import COPIES
from tightship.simulate import replay
from tightship.verify import verify

pytestmark = pytest.mark.skipif(not allocator.available(), reason="no C++ compiler")

WIDTH, LAYERS = 64, 10


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("measurements")


def loss_of(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def layers(dropout=0.0, width=WIDTH):
    torch.manual_seed(0)
    rows = [
        x
        for _ in range(LAYERS)
        for x in (torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Dropout(dropout))
    ]
    return torch.nn.Sequential(*rows)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


class Twins:
    """A model that is fitted with streaming, and the same in eager."""

    def __init__(self, kept, share=0.5, optimizer=adamw, model=None, **options):
        self.model = layers() if model is None else model
        self.twin = copy.deepcopy(self.model)
        self.optimizer, self.other = optimizer(self.model.parameters()), optimizer(self.twin.parameters())
        self.static = 3 * sum(p.numel() * 4 for p in self.model.parameters())
        options = {"allow": "recompute,stream", "cache": kept, "seconds": 3, "strict": True} | options
        budget = int(share * self.static)
        self.step = fit(self.model, loss_of, self.optimizer, self.batch(0), budget, **options)

    def batch(self, number, rows=4):
        torch.manual_seed(1000 + number)
        width = self.model[0].in_features
        return torch.randn(rows, width), torch.randn(rows, width)

    def run(self, number, rows=4):
        batch = self.batch(number, rows)
        torch.manual_seed(number)
        expected = eager(self.twin, loss_of, self.other, batch)
        torch.manual_seed(number)
        assert torch.equal(self.step(batch), expected)
        self.other.zero_grad()

    def same(self):
        with self.step.gathered():
            for (name, p), q in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
                assert torch.equal(p, q), name
                mine, theirs = self.optimizer.state[p], self.other.state[q]
                assert list(mine) == list(theirs)
                for key in mine:
                    assert torch.equal(mine[key], theirs[key]), (name, key)

    @property
    def streams(self):
        return self.step._streams


def as_planned(step):
    last = step.last
    assert last.as_planned
    assert last.exact
    assert last.measured_peak == last.process_peak == step.plan.peak <= step.plan.budget


@pytest.mark.parametrize("share", [0.5, 1 / 3])
def test_steps_are_those_of_eager_and_take_the_planned_bytes(kept, share):
    twins = Twins(kept, share)
    for number in range(20):
        twins.run(number)
        if number:
            as_planned(twins.step)
    twins.same()
    assert verify(twins.step.graph, twins.step.plan) == []
    assert twins.step.measure()["unplanned_peak"] > twins.static


class Late:
    """A pool whose copies are made when they are waited for."""

    def __init__(self, pool):
        self.pool = pool

    def __getattr__(self, name):
        return getattr(self.pool, name)

    def read(self, *args):
        return LateCopy(self.pool.read, args)

    def write(self, *args):
        return LateCopy(self.pool.write, args)


class LateCopy:
    def __init__(self, begin, args):
        self.begin, self.args = begin, args

    def result(self):
        self.begin(*self.args).result()


def test_copies_run_beside_ops_and_whoever_needs_them_waits(kept):
    twins = Twins(kept, 0.5)
    graph, plan = twins.step.graph, twins.step.plan
    beside = [i for i, s in enumerate(plan.steps) if s.stream == COPIES]
    assert {graph.ops[plan.steps[i].op].target for i in beside} == {"tightship.fetch", "tightship.store"}
    one = [replace(s, stream=0, waits=()) for s in plan.steps]
    assert plan.time < replay(graph, one).time
    for away in twins.streams.items.values():
        away.pool = Late(away.pool)
    for number in range(3):
        twins.run(number)
    as_planned(twins.step)
    twins.same()
    waiting = [i for i, s in enumerate(plan.steps) if s.waits and not s.stream]
    missed = 0  # others wait for what comes later on the same stream
    for i in waiting:
        steps = [*plan.steps]
        steps[i] = replace(steps[i], waits=())
        missed += "lane" in {v.code for v in verify(graph, replace(plan, steps=tuple(steps)))}
    assert missed > len(waiting) / 2


def test_what_is_away_takes_no_memory(kept):
    twins = Twins(kept, 1 / 3)
    twins.run(0)
    gc.collect()
    with Meter() as meter, twins.step.gathered():
        back = meter.current
    assert back == twins.streams.nbytes > twins.static / 2
    assert meter.current == 0
    assert all(away.blank.untyped_storage().nbytes() == 0 for away in twins.streams.items.values())


def test_moments_alone_stream_where_that_is_enough(kept):
    twins = Twins(kept, 0.9)
    assert {role for role, _ in twins.streams.items} == {"state"}
    for number in range(3):
        twins.run(number)
    as_planned(twins.step)
    twins.same()
    assert twins.model[0].weight.sum() == twins.twin[0].weight.sum()  # parameters are there


def test_nothing_streams_where_the_budget_does_not_ask_for_it(kept):
    twins = Twins(kept, 2.0)
    twins.run(0)
    assert not twins.streams.items


def momentum(params):
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


@pytest.mark.parametrize("optimizer", [momentum, torch.optim.Adagrad, torch.optim.RMSprop])
def test_other_optimizers(kept, optimizer):
    twins = Twins(kept, 0.4, optimizer)
    for number in range(4):
        twins.run(number)
    as_planned(twins.step)
    twins.same()


def test_frozen_parameters_are_fetched_and_never_stored(kept):
    model = layers()
    for p in model[:9].parameters():
        p.requires_grad_(False)

    def optimizer(params):
        return adamw([p for p in params if p.requires_grad])

    twins = Twins(kept, 0.3, optimizer, model)
    stored = {op.name for op in twins.step.graph.ops if op.target == "tightship.store"}
    fetched = {op.name for op in twins.step.graph.ops if op.target == "tightship.fetch"}
    assert "fetch 0.weight" in fetched
    assert "store 0.weight" not in stored
    for number in range(3):
        twins.run(number)
    as_planned(twins.step)


@pytest.mark.parametrize("allow", ["stream", "recompute,stream,offload", "recompute,compress,stream"])
def test_beside_other_ways(kept, allow):
    twins = Twins(kept, 0.6, allow=allow)
    for number in range(3):
        twins.run(number)
    as_planned(twins.step)
    twins.same()


@pytest.mark.slow
def test_a_gpt2_of_three_times_the_budget(kept):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=12, n_embd=128, n_head=4, vocab_size=512, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    twin = copy.deepcopy(model)
    optimizer, other = adamw(model.parameters()), adamw(twin.parameters())
    static = 3 * sum(p.numel() * 4 for p in model.parameters())

    def loss_fn(model, batch):
        return model(input_ids=batch, labels=batch).loss

    batches = torch.randint(0, 512, (20, 2, 32))
    step = fit(
        model, loss_fn, optimizer, batches[0], static // 3, allow="recompute,stream", cache=kept, strict=True
    )
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        expected = eager(twin, loss_fn, other, batch)
        torch.manual_seed(number)
        assert torch.equal(step(batch), expected)
        if number:
            as_planned(step)
    assert sum(aligned(away.nbytes) for away in step._streams.items.values()) > static / 2
    with step.gathered():
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q)
            for key, theirs in other.state[q].items():
                assert torch.equal(optimizer.state[p][key], theirs)


# ---- beside slices

WORDS = 2000
BOTH = "recompute,stream,split-rounding"


class Language(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = torch.nn.Embedding(WORDS, 32), torch.nn.Linear(32, 32)
        self.head = torch.nn.Linear(32, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.embed(ids))))


def likelihood(model, ids):
    return torch.nn.functional.cross_entropy(model(ids).view(-1, WORDS), ids.roll(1, 1).view(-1))


def fused(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def words(number):
    return torch.randint(0, WORDS, (8, 32), generator=torch.Generator().manual_seed(number))


def test_slices_and_streams_in_one_step_meet_what_neither_does(kept):
    torch.manual_seed(0)
    model = Language()
    twin = copy.deepcopy(model)
    optimizer, other = fused(model.parameters()), fused(twin.parameters())
    options = {"cache": kept, "seconds": 1, "strict": True}
    budget = 1_300_000
    for alone in ("recompute,stream", "recompute,split-rounding"):
        with pytest.raises(Infeasible):
            fit(model, likelihood, optimizer, words(0), budget, allow=alone, **options)
    step = fit(model, likelihood, optimizer, words(0), budget, allow=BOTH, **options)
    assert any(note.startswith("split: ") for note in step.notes)
    assert any(note.startswith("streamed: ") for note in step.notes)
    assert step.measure()["unplanned_peak"] > 4 * budget
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, other)]
    for number in range(4):  # the rate is a number of an op that was made anew by both
        expected = eager(twin, likelihood, other, words(number))
        torch.testing.assert_close(step(words(number)), expected, rtol=1e-6, atol=0)
        for schedule in schedules:
            schedule.step()
    as_planned(step)
    assert verify(step.graph, step.plan) == []
    with step.gathered():
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_a_budget_that_both_ways_would_meet_says_so(kept):
    torch.manual_seed(0)
    model = Language()
    with pytest.raises(Infeasible) as refused:
        fit(model, likelihood, fused(model.parameters()), words(0), 1_300_000, cache=kept, seconds=1)
    assert any(f"(allow={BOTH})" in text for text in refused.value.advice)


def test_streaming_that_was_not_allowed_says_what_its_copies_cost(kept):
    with pytest.raises(Infeasible) as refused:
        Twins(kept, 0.5, allow="recompute")
    assert any("allow=recompute,stream" in x and "of copies a step" in x for x in refused.value.advice)


# ---- the caller's tensors


def test_what_is_away_says_so_when_it_is_read(kept):
    twins = Twins(kept, 1 / 3)
    twins.run(0)
    weight = twins.model[0].weight
    assert weight.shape == (WIDTH, WIDTH)
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.requires_grad
    assert weight.grad is None
    assert "away" in repr(weight)
    state = twins.optimizer.state[weight]["exp_avg"]
    for read in (
        lambda: weight.sum(),
        lambda: weight.data,
        lambda: twins.model(twins.batch(0)[0]),
        lambda: twins.model.state_dict(),
        lambda: copy.deepcopy(twins.model),
        lambda: twins.model.double(),
        lambda: state + 1,
        lambda: torch.save(twins.optimizer.state_dict(), io.BytesIO()),
        lambda: torch.stack([weight, weight]),
        lambda: weight.tolist(),
        lambda: weight.numpy(),
        lambda: weight.untyped_storage(),
        lambda: twins.model.load_state_dict(twins.twin.state_dict()),
        lambda: twins.other.load_state_dict(twins.optimizer.state_dict()),
        lambda: twins.optimizer.step() if weight.grad is not None else weight.add_(1),
    ):
        with pytest.raises((Unsupported, RuntimeError), match="gathered"):
            read()
    twins.run(1)
    twins.same()


def test_checkpoints_are_written_and_read_inside_of_gathered(kept):
    twins = Twins(kept, 1 / 3)
    twins.run(0)
    with twins.step.gathered():
        saved = copy.deepcopy((twins.model.state_dict(), twins.optimizer.state_dict()))
    twins.run(1)
    with twins.step.gathered():
        twins.model.load_state_dict(saved[0])
        twins.optimizer.load_state_dict(copy.deepcopy(saved[1]))
    twins.twin.load_state_dict(saved[0])
    twins.other.load_state_dict(saved[1])
    for number in (2, 3):
        twins.run(number)
    twins.same()
    as_planned(twins.step)


def test_an_optimizers_state_may_be_loaded_while_its_own_is_away(kept):
    twins = Twins(kept, 1 / 3)
    twins.run(0)
    saved = copy.deepcopy(twins.other.state_dict())
    twins.run(1)
    twins.optimizer.load_state_dict(saved)
    twins.other.load_state_dict(copy.deepcopy(saved))
    twins.run(2)
    twins.same()


def test_evaluation_inside_of_gathered(kept):
    twins = Twins(kept, 1 / 3)
    twins.run(0)
    x = twins.batch(0)[0]
    with twins.step.gathered(), torch.no_grad():
        assert torch.equal(twins.model(x), twins.twin(x))
        with pytest.raises(BadInput, match="gathered"):
            twins.step(twins.batch(1))
        with pytest.raises(BadInput, match="gathered"), twins.step.gathered():
            pass
    twins.run(1)
    twins.same()


def test_views_of_what_was_gathered_stay_valid(kept):
    twins = Twins(kept, 1 / 3)
    with twins.step.gathered():
        view = twins.model[0].weight.detach()[0]
    before = view.clone()
    twins.run(0)
    assert torch.equal(view, before)


def test_what_somebody_else_holds_a_view_of_stays(kept):
    model = layers()
    view = model[0].weight.detach()[0]
    twins = Twins(kept, 0.5, model=model)
    for number in range(2):
        twins.run(number)
        assert torch.equal(view, twins.twin[0].weight[0])
    assert ("parameter", "0.weight") not in twins.streams.items
    assert any("views" in note for note in twins.step.notes)
    as_planned(twins.step)
    twins.same()


def test_a_step_after_another_of_the_same_model(kept):
    twins = Twins(kept, 0.4)
    twins.run(0)
    again = {"allow": "recompute,stream", "cache": kept, "seconds": 3, "strict": True}
    with pytest.raises(Unsupported, match="gathered"):
        fit(twins.model, loss_of, twins.optimizer, twins.batch(0), twins.static // 2, **again)
    twins.step = None
    gc.collect()
    twins.step = fit(twins.model, loss_of, twins.optimizer, twins.batch(0), twins.static // 2, **again)
    for number in (1, 2):
        twins.run(number)
    as_planned(twins.step)
    twins.same()


def test_another_kind_of_batch_is_captured_while_all_is_away(kept):
    twins = Twins(kept, 0.5)
    for number, rows in enumerate((4, 6, 4, 6)):
        twins.run(number, rows)
    as_planned(twins.step)
    twins.same()


def test_parameters_that_are_frozen_later(kept):
    twins = Twins(kept, 0.5)
    twins.run(0)
    for model in (twins.model, twins.twin):
        model[0].weight.requires_grad_(False)
    for number in (1, 2):
        twins.run(number)
    twins.same()


def test_a_schedule_and_dropout(kept):
    twins = Twins(kept, 0.5, model=layers(0.2))
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (twins.optimizer, twins.other)]
    for number in range(4):
        for model in (twins.model, twins.twin):
            model[2].p = 0.1 * number
        twins.run(number)
        for schedule in schedules:
            schedule.step()
    twins.same()


def test_who_lets_go_of_the_step_keeps_the_model(kept):
    twins = Twins(kept, 1 / 3)
    twins.run(0)
    twins.step = None
    gc.collect()
    for p, q in zip(twins.model.parameters(), twins.twin.parameters(), strict=True):
        assert type(p) is torch.nn.Parameter
        assert torch.equal(p, q)
        assert torch.equal(twins.optimizer.state[p]["exp_avg"], twins.other.state[q]["exp_avg"])


# ---- hints and plans


def test_hints_say_whose_parameters_stream_and_whose_never_do(kept):
    twins = Twins(kept, 0.6, hints="0=stream,27=resident")
    assert {key for role, key in twins.streams.items if role == "parameter"} >= {"0.weight"}
    assert not any("27.weight" in key for _, key in twins.streams.items)
    assert ("state", ("0.weight", "exp_avg")) in twins.streams.items
    for number in range(2):
        twins.run(number)
    as_planned(twins.step)
    twins.same()


def test_hints_that_are_about_nothing(kept):
    with pytest.raises(BadInput, match=r"unknown module 'encoder'"):
        Twins(kept, 0.6, hints="encoder=stream")
    with pytest.raises(BadInput, match="add stream to allow"):
        Twins(kept, 0.6, hints="0=resident", allow="recompute")
    with pytest.raises(BadInput, match="malformed hint"):
        Twins(kept, 0.6, hints="0=streamed")


def planned(model, budget, **options):
    batch = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    optimizer = adamw(model.parameters())
    return tightship.plan(model, batch, budget, loss_fn=loss_of, optimizer=optimizer, seconds=3, **options)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_plan_says_what_would_stream_and_changes_nothing(kept, device):
    model = layers().to(device)
    size = sum(p.nbytes for p in model.parameters())
    with pytest.raises(Infeasible) as refused:
        planned(model, size, cache=kept)
    assert any("(allow=recompute,stream)" in text for text in refused.value.advice)
    found = planned(model, size, allow="recompute,stream", cache=kept)
    assert found.met
    assert found.plan.peak <= size
    assert verify(found.graph, found.plan) == []
    assert found.rows()["peak_before"] > 3 * size
    assert any(note.startswith("streamed: ") for note in found.plan.notes)
    assert all(p.device.type == device and type(p) is torch.nn.Parameter for p in model.parameters())
    kept_there = planned(model, size, allow="recompute,stream", cache=kept, hints="0=resident")
    fetched = {op.name for op in kept_there.graph.ops if op.target == "tightship.fetch"}
    assert "fetch 3.weight" in fetched
    assert "fetch 0.weight" not in fetched
    with pytest.raises(Unsupported, match="stream"):
        tightship.plan(found.graph, budget=size, allow="recompute,stream")


# ---- the file itself


def test_a_state_dict_takes_no_memory_and_is_written_by_others(kept, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    twins = Twins(kept, 1 / 3)
    twins.run(0)
    with Meter() as meter:
        state = twins.step.state_dict()
        torch.save(state, tmp_path / "all.pt")
        save_file(state["model"], tmp_path / "model.safetensors")
    assert meter.peak < 4096
    loaded = torch.load(tmp_path / "all.pt", mmap=True)
    theirs = {n: twins.other.state[p] for n, p in twins.twin.named_parameters()}
    for name, tensor in twins.twin.state_dict().items():
        assert torch.equal(loaded["model"][name], tensor)
        for key, moment in theirs[name].items():
            assert torch.equal(loaded["optimizer"]["state"][name][key], moment)
    saved = copy.deepcopy((twins.twin.state_dict(), twins.other.state_dict()))
    twins.run(1)
    assert torch.equal(state["model"]["0.weight"], twins.twin[0].weight)  # it follows the steps, as in eager
    twins.step.load_state_dict(loaded)
    twins.twin.load_state_dict(saved[0])
    twins.other.load_state_dict(saved[1])
    for number in (2, 3):
        twins.run(number)
    as_planned(twins.step)
    twins.same()


def test_gathered_in_the_file_takes_no_memory_and_keeps_changes(kept):
    twins = Twins(kept, 1 / 3)
    twins.run(0)
    x = twins.batch(0)[0]
    with Meter() as meter, twins.step.gathered(mapped=True), torch.no_grad():
        assert torch.equal(twins.model(x), twins.twin(x))
        twins.model[0].weight.mul_(2)
        first, second = twins.model[3], twins.model[6]
        first.weight.data, second.weight.data = (
            second.weight.data,
            first.weight.data,
        )  # each in the other's place
        twins.model[9].weight.data = torch.ones(WIDTH, WIDTH)
    assert meter.peak < twins.static / 6
    with torch.no_grad():
        twins.twin[0].weight.mul_(2)
        first, second = twins.twin[3], twins.twin[6]
        first.weight.data, second.weight.data = second.weight.data, first.weight.data
        twins.twin[9].weight.data = torch.ones(WIDTH, WIDTH)
    for number in (1, 2):
        twins.run(number)
    as_planned(twins.step)
    twins.same()


def test_another_kind_of_batch_is_captured_without_a_parameter_in_memory(kept):
    twins = Twins(kept, 1 / 3, model=layers(width=512))
    twins.run(0)
    gc.collect()
    with Meter() as meter:
        asked = twins.step._ask(twins.batch(1, 6), twins.step._ending())
    assert asked.program is not None
    assert meter.peak < 512 * 512 * 4
    twins.run(1, 6)
    twins.same()


def filled(module):
    with torch.no_grad():
        for p in module.parameters(recurse=False):
            p.uniform_(-0.2, 0.2)


@pytest.mark.parametrize("before", [True, False])
def test_a_model_is_made_module_by_module_and_never_whole_in_memory(kept, before):
    with torch.device("meta"):
        model = layers(width=512)
    size = sum(p.nbytes for p in model.parameters())
    optimizer = adamw(model.parameters()) if before else None
    torch.manual_seed(7)
    with Meter() as meter:
        tightship.materialize(model, filled)
    assert meter.peak < size / 4
    twin = layers(width=512)
    torch.manual_seed(7)
    for module in twin:
        filled(module)
    twins = Twins.__new__(Twins)
    twins.model, twins.twin, twins.static = model, twin, 3 * size
    twins.optimizer, twins.other = optimizer or adamw(model.parameters()), adamw(twin.parameters())
    with Meter() as meter:
        twins.step = fit(
            model, loss_of, twins.optimizer, twins.batch(0), size, allow="recompute,stream", cache=kept, seconds=3,
            strict=True,
        )  # fmt: skip
        gc.collect()
        assert meter.current <= size  # what stays, and the arena
    for number in range(3):
        twins.run(number)
    as_planned(twins.step)
    assert not any(in_file(p) for p in model.parameters())  # what does not stream is in memory
    twins.same()


def test_a_model_in_a_file_that_does_not_stream_is_in_memory_with_its_first_step(kept):
    with torch.device("meta"):
        model = layers()
    tightship.materialize(model)
    batch = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    step = fit(model, loss_of, adamw(model.parameters()), batch, "100%", cache=kept, seconds=1)
    assert all(in_file(p) for p in model.parameters())
    step(batch)
    assert not any(in_file(p) for p in model.parameters())


class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))
        self.register_buffer("table", torch.arange(8), persistent=False)


def test_a_model_is_read_from_files_that_have_parts_of_it(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    source = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8).bfloat16()
    )
    state = source.state_dict()
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    save_file({n: t for n, t in state.items() if n[0] == "0"}, files[0])
    save_file({n: t for n, t in state.items() if n[0] != "0"}, files[1])

    def fresh():
        with torch.device("meta"):
            return copy.deepcopy(source).to("meta")

    model = fresh()
    tightship.materialize(model, files, folder=tmp_path)
    assert sorted(tmp_path.iterdir()) == files
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    with pytest.raises(BadInput, match="in no file"):
        tightship.materialize(fresh(), files[0])
    with pytest.raises(BadInput, match="has a tensor that the model has not"):
        tightship.materialize(fresh()[:1], files)
    files[1].write_bytes(files[1].read_bytes()[:-9])
    with pytest.raises(BadInput, match="cut off or damaged"):
        tightship.materialize(fresh(), files)
    files[1].write_bytes(b"no such thing")
    with pytest.raises(BadInput, match="no safetensors file"):
        tightship.materialize(fresh(), files)


def test_what_nobody_fills_is_refused(tmp_path):
    with torch.device("meta"):
        made = [Odd() for _ in range(3)]
    with pytest.raises(Unsupported, match="filling a Odd"):
        tightship.materialize(made[0])
    with pytest.raises(BadInput, match=r"table"):
        tightship.materialize(made[1], lambda m: torch.nn.init.ones_(m.weight))
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"weight": torch.ones(64)}, tmp_path / "odd.safetensors")
    with pytest.raises(BadInput, match=r"table"):
        tightship.materialize(made[2], tmp_path / "odd.safetensors")


# ---- parts of a step


def test_accumulated_and_clipped_gradients(kept):
    twins = Twins(kept, 0.75, accumulate=2, clip_norm=0.1)
    for number in range(3):
        batches = [twins.batch(2 * number + k) for k in range(2)]
        for batch in batches:
            loss_of(twins.twin, batch).backward()
            twins.step(batch)
        torch.nn.utils.clip_grad_norm_(twins.twin.parameters(), 0.1)
        twins.other.step()
        twins.other.zero_grad()
    twins.same()
    assert twins.step.measure()["measured_peak"] <= twins.step.plan.budget


def test_backward_and_update(kept):
    twins = Twins(kept, 0.75, split=True)
    for number in range(3):
        batch = twins.batch(number)
        loss_of(twins.twin, batch).backward()
        twins.other.step()
        twins.step.backward(batch)
        for p, q in zip(twins.model.parameters(), twins.twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        twins.step.update()
        twins.other.zero_grad()
        twins.optimizer.zero_grad()
    twins.same()


# ---- what goes wrong


def test_a_full_disk_is_an_error_before_the_first_step(kept, tmp_path):
    with beyond(4096), pytest.raises(BadInput, match="no room"):
        Twins(kept, 1 / 3, folder=tmp_path)


def test_no_file_has_a_name(kept, tmp_path):
    twins = Twins(kept, 1 / 3, folder=tmp_path)
    twins.run(0)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_named_and_kept(kept, monkeypatch):
    twins = Twins(kept, 1 / 3)
    twins.run(0)
    failing = next(away for away in twins.streams.items.values() if away.name == "parameter '9.weight'")
    pool = failing.pool

    class Full:
        def write(self, *args):
            raise OSError(28, "No space left on device")

        def __getattr__(self, name):
            return getattr(pool, name)

    failing.pool = Full()
    batch = twins.batch(1)
    eager(twins.twin, loss_of, twins.other, batch)
    with pytest.raises(OSError, match=r"writing the streamed parameter '9.weight' failed: No space left"):
        twins.step(batch)
    failing.pool = pool
    done = set()
    with twins.step.gathered():
        for (name, p), q in zip(twins.model.named_parameters(), twins.twin.parameters(), strict=True):
            if torch.equal(p, q):
                done.add(name)
                for key, theirs in twins.other.state[q].items():
                    assert (
                        key == "step"
                        or torch.equal(twins.optimizer.state[p][key], theirs)
                        or name == "9.weight"
                    )
    assert "9.weight" in done  # its update had run, and was not lost
    assert "0.weight" not in done  # the step stopped there


def test_a_read_that_fails_names_what_was_read(kept, monkeypatch):
    twins = Twins(kept, 1 / 3)

    def broken(self):
        raise self._failed("reading", OSError(5, "Input/output error"))

    monkeypatch.setattr(Away, "begin_fetch", broken)
    with pytest.raises(OSError, match="reading the streamed parameter"):
        twins.step(twins.batch(0))
    monkeypatch.undo()
    twins.run(0)
    twins.same()


@pytest.mark.parametrize("which", ["read", "write"])
def test_whichever_copy_fails_every_parameter_is_as_before_or_as_after_its_update(kept, tmp_path, which):
    twins = Twins(kept, 1 / 3, folder=tmp_path)
    twins.run(0)
    items = list(twins.streams.items.values())
    with twins.step.gathered():
        before = copy.deepcopy((twins.model.state_dict(), twins.optimizer.state_dict()))
    batch = twins.batch(1)
    eager(twins.twin, loss_of, twins.other, batch)
    at, partly = 0, 0
    while True:
        at, counter = at + 1, [0]
        pools = [away.pool for away in items]
        for away in items:
            away.pool = Failing(away.pool, which, at, counter)
        try:
            twins.step(batch)
            break
        except OSError as error:
            verb = "reading" if which == "read" else "writing"
            assert f"{verb} the streamed " in str(error)
            assert "failed on purpose" in str(error)
        finally:
            for away, pool in zip(items, pools, strict=True):
                away.pool = pool
        with twins.step.gathered():
            for (name, p), q in zip(twins.model.named_parameters(), twins.twin.parameters(), strict=True):
                old = torch.equal(p, before[0][name])
                assert old or torch.equal(p, q), name
                partly += not old
            twins.model.load_state_dict(before[0])
            twins.optimizer.load_state_dict(copy.deepcopy(before[1]))
    assert at > len(items) / 2
    assert partly  # some failed after an update
    assert list(tmp_path.iterdir()) == []
    twins.same()


KILLED = """
import os, signal, sys, torch, tightship
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
batch = torch.randn(4, 64), torch.randn(4, 64)
size = sum(p.nbytes for p in model.parameters())
def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()
step = tightship.fit(model, loss, torch.optim.AdamW(model.parameters()), batch, 2 * size, allow="recompute,stream",
                     folder=sys.argv[1], cache=None, seconds=0.5)
step(batch)
assert step._streams.items
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_no_file(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.stdout == "ready\n", run.stderr
    assert run.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_arguments_that_do_not_go_together(kept):
    with pytest.raises(BadInput, match="verify_every"):
        Twins(kept, 0.5, verify_every=2)


def test_infeasible_offers_streaming(kept):
    with pytest.raises(Infeasible, match=r"streaming \(allow=recompute,stream\)"):
        Twins(kept, 0.5, allow="recompute")


def test_a_budget_below_what_streams_is_refused_and_leaves_the_model_whole(kept):
    model = layers()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(Infeasible):
        Twins(kept, 0.01, model=model)
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name])


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.device("meta"), torch.inference_mode])
def test_contents_come_back_wherever_the_collector_comes_by(kept, mode):
    """A step that nobody holds may be collected in the middle of another one's capture."""
    twins = Twins(kept)
    twins.run(0)
    model, twin = twins.model, twins.twin
    with mode():
        del twins
        gc.collect()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q) and not p.is_inference()
