"""Inference in one arena: eager's bits, the planned memory, nothing outside; batches up to the planned size."""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch
from torch import nn

import tightship
from support.models import MODELS
from tightship.errors import BadInput, Infeasible, Unsupported
from tightship.execute import allocator
from tightship.execute.allocator import Meter

pytestmark = pytest.mark.skipif(not allocator.available(), reason="no C++ compiler")

PLAIN = (
    "mlp",
    "cnn",
    "tied",
    "viewed",
    "in_place",
    "buffers",
    "norms",
    "lstm",
    "gru",
    "torch_transformer",
    "unet",
)
OTHERS = ("vit", "resnet", "bert_padded", "bert_sdpa", "convnext", "swin")


def sample_of(batch):
    return dict(batch) if hasattr(batch, "keys") else batch[0] if isinstance(batch, tuple) else batch


def called(model, sample):
    with torch.no_grad():
        return model(**sample) if isinstance(sample, dict) else model(sample)


def tensors(out):
    if isinstance(out, torch.Tensor):
        return [out]
    return (
        [t for x in (out.values() if hasattr(out, "keys") else out) for t in tensors(x)]
        if out is not None
        else []
    )


def same(a, b):
    a, b = tensors(a), tensors(b)
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def infer(*args, **options):
    return tightship.infer(*args, **{"strict": True, "seconds_per_op": 0.0, "seconds": 2.0, **options})


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("name", [*PLAIN, *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)])
def test_numbers_are_eager_s_and_memory_is_as_planned(name, fresh):
    model, _, batches = MODELS[name]()
    eager = copy.deepcopy(model).eval()
    run = infer(model, sample_of(batches(0)), fresh=fresh)
    assert model.training
    for step in (1, 2, 3):
        sample = sample_of(batches(step))
        torch.manual_seed(step)
        want = called(eager, sample)
        torch.manual_seed(step)
        assert same(want, called(run, sample))
        used = run.measure()
        assert used["measured_peak"] == used["planned_peak"] and used["misses"] == 0
        handed = run.plan.handed
        assert run.last.heap == handed and (handed == 0) is not fresh


def test_nothing_is_allocated_outside_of_the_arena():
    model, _, batches = MODELS["cnn"]()
    x = sample_of(batches(0))
    run = infer(model, x, fresh=False)
    run(x)
    gc.collect()
    with Meter() as meter:
        run(x)
    assert meter.current == 0  # results are windows: not a byte is left behind
    stats = run.last
    assert stats.heap == 0 and stats.misses == 0 and stats.requests > 10
    assert meter.peak == stats.measured_peak - stats.static == run.plan.peak - run.plan.static
    assert run.plan.arena == run.reserved


def test_results_in_the_arena_are_overwritten_and_fresh_ones_are_not():
    model, _, batches = MODELS["mlp"]()
    a, b = sample_of(batches(0)), sample_of(batches(1))
    run = infer(model, a, fresh=False)
    first = run(a)
    kept = first.clone()
    second = run(b)
    assert first.data_ptr() == second.data_ptr() and not torch.equal(first, kept)
    run = infer(model, a)
    first = run(a)
    kept = first.clone()
    run(b)
    assert torch.equal(first, kept)


def test_windows_keep_the_arena():
    model, _, batches = MODELS["mlp"]()
    x = sample_of(batches(0))
    before = allocator.reserved()
    out = infer(model, x, fresh=False)(x)
    kept = out.clone()
    gc.collect()
    assert allocator.reserved() > before and torch.equal(out, kept)
    del out
    gc.collect()
    assert allocator.reserved() == before


def test_results_that_are_inputs_weights_or_views():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x):
            h = self.lin(x).relu()
            return {"x": x, "w": self.lin.weight, "half": h[:, ::2], "h": h, "n": 3, "none": None}

    model, x = Several().eval(), torch.randn(4, 8)
    for fresh in (True, False):
        run = infer(model, x, fresh=fresh)
        for _ in range(2):
            out, want = run(x), called(model, x)
            assert out["n"] == 3 and out["none"] is None and out["x"] is x
            assert same([out[k] for k in ("w", "half", "h")], [want[k] for k in ("w", "half", "h")])
            assert out["half"].stride() == want["half"].stride()


def test_weights_may_change_in_place_and_be_replaced():
    model, _, batches = MODELS["mlp"]()
    x = sample_of(batches(0))
    run = infer(model, x)
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert same(run(x), called(model.eval(), x))
    model[0] = nn.Linear(8, 16)
    assert same(run(x), called(model, x))


# --- budgets ---


class Skips(nn.Module):
    """Long skips of cheap values: a pass that can do with less."""

    def __init__(self, depth=6):
        super().__init__()
        self.depth = depth

    def forward(self, x):
        kept = []
        for _ in range(self.depth):
            x = torch.sin(x)
            kept.append(torch.exp(x))
        x = x.sum(-1, keepdim=True) + 0.0 * x
        for k in reversed(kept):
            x = x * k
        return x


def test_a_budget_holds_and_more_is_not_possible():
    model, x = Skips(), torch.randn(64, 256)
    free = infer(model, x)
    run = infer(model, x, budget=free.plan.peak - 65536)
    assert run.plan.count("recompute") and run.plan.met
    assert same(run(x), called(model, x))
    used = run.measure()
    assert used["measured_peak"] == used["planned_peak"] <= used["budget"]
    with pytest.raises(Infeasible):
        infer(model, x, budget="10%")


def test_plan_without_training_is_the_plan_of_infer():
    model, _, batches = MODELS["cnn"]()
    x = sample_of(batches(0))
    planned = tightship.plan(model, x, train=False)
    run = infer(model, x, fresh=False)
    assert planned.digest == run.plan.digest and planned.peak == run.plan.peak
    assert all(op.phase == "forward" for op in planned.graph.ops) and model.training
    kinds = {planned.graph.storages[s].kind for s in planned.graph.static}
    assert kinds == {"parameter", "buffer", "input"}
    tightship.check(planned)
    with pytest.raises(BadInput, match="forward pass alone"):
        tightship.plan(model, x, loss_fn=lambda m, b: m(b).sum(), train=False)


def test_A06_workspace_of_each_op_is_measured():  # noqa: N802
    run = infer(nn.Conv2d(16, 16, 3, padding=1), torch.randn(2, 16, 24, 24))
    assert any(op.requests for op in run.graph.ops)
    assert run.measure()["planned_peak"] >= run.plan.static + 2 * 16 * 24 * 24 * 4


def reloaded(program):
    """As its user has it: saved and loaded again. Reading files is not ours."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def test_exported_programs():
    model, _, batches = MODELS["cnn"]()
    x = sample_of(batches(0))
    exported = reloaded(torch.export.export(model.eval(), (x,)))
    run = infer(exported, (x,))
    assert same(run(x), called(model, x))
    assert tightship.plan(exported, (x,), train=False).peak == tightship.plan(model, x, train=False).peak


def test_exported_programs_of_any_batch():
    model, _, _ = MODELS["cnn"]()
    x, batch = torch.randn(6, 3, 16, 16), torch.export.Dim("batch", min=1, max=6)
    exported = torch.export.export(model.eval(), (x,), dynamic_shapes=({0: batch},))
    run = infer(exported, (x,), dynamic=True)
    for n in (6, 1, 4):
        assert same(run(x[:n]), called(model, x[:n]))


# --- batches ---


def test_smaller_batches_run_in_the_arena_of_the_largest():
    model, _, _ = MODELS["cnn"]()
    eager = copy.deepcopy(model).eval()
    big = torch.randn(8, 3, 16, 16)
    for fresh in (True, False):
        run = infer(model, big, dynamic=True, fresh=fresh)
        reserved = run.reserved
        for n in (8, 1, 5, 8, 1):
            x = big[:n] if n != 5 else torch.randn(5, 3, 16, 16)
            assert same(run(x), called(eager, x))
            used = run.measure()
            assert used["measured_peak"] == used["planned_peak"] and used["arena"] <= reserved == run.reserved


class Pooled(nn.Module):
    """Asks for more scratch the fewer rows there are."""

    def forward(self, x):
        return (x.sum(0, keepdim=True) + torch.zeros(4096 // x.shape[0], x.shape[1])).sum()


def test_one_row_is_planned_ahead():
    x = torch.ones(8, 16)
    run = infer(Pooled(), x, dynamic=True)
    reserved, one = run.reserved, run._variants[1]
    assert run.program.batch.fits(x) and one.program.batch.fits(x[:1])
    assert reserved >= one.executor.extent > run._variants[0].executor.extent
    for n in (1, 8, 3):
        assert same(run(x[:n]), called(Pooled(), x[:n])) and run.reserved == reserved
    assert not run.notes


def test_a_model_that_takes_no_single_row_says_so():
    class Pairs(nn.Module):
        def forward(self, x):
            return x.reshape(2, -1).exp()

    run = infer(Pairs(), torch.ones(4, 3), dynamic=True)
    assert "a batch of one was not planned ahead: RuntimeError" in run.notes[0]
    assert same(run(torch.ones(2, 3)), torch.ones(2, 3).exp())


def test_every_dimension_may_be_smaller():
    run = infer(nn.Tanh(), torch.ones(4, 6), dynamic=True)
    assert same(run(torch.ones(2, 5)), torch.ones(2, 5).tanh())
    for shape, said in (((4, 7), "largest shape that was planned for is"), ((4,), "but planned for")):
        with pytest.raises(BadInput, match=said):
            run(torch.ones(*shape))


def test_larger_and_other_batches_are_refused():
    model, _, _ = MODELS["cnn"]()
    x = torch.randn(4, 3, 16, 16)
    run = infer(model, x, dynamic=True)
    with pytest.raises(BadInput, match="largest batch that was planned for has 4"):
        run(torch.randn(5, 3, 16, 16))
    with pytest.raises(BadInput, match="largest shape that was planned for"):
        run(torch.randn(4, 3, 20, 20))
    with pytest.raises(BadInput, match="one argument"):
        run(x, x)
    with pytest.raises(BadInput, match="by position"):
        run(input=x)
    with pytest.raises(BadInput, match="dynamic=True"):
        infer(model, x)(x[:2])
    assert same(run(x), called(copy.deepcopy(model).eval(), x))  # none the worse for it


def test_arguments_by_name():
    model, _, batches = MODELS["tied"]()
    x = batches(0)
    run = infer(model, {"ids": x})
    assert same(run(ids=x), called(copy.deepcopy(model).eval(), x))
    with pytest.raises(BadInput, match="by name"):
        run(x)
    with pytest.raises(BadInput, match="by name"):
        run(other=x)


def test_control_flow_on_data_is_captured_again():
    class Branch(nn.Module):
        def forward(self, x):
            return x.exp() if x.sum() > 0 else x.tanh() + 1

    model, x = Branch().eval(), torch.ones(64, 64)
    run = infer(model, x)
    for y in (x, -x, x, -x):
        assert same(run(y), called(model, y))
    assert "the arena grew" in run.notes[0]


# --- what is wrong ---


def test_options_that_make_no_sense():
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    for options in ({"color": 1}, {"hand_out": False}, {"variants": 0}, {"budget": "much"}):
        with pytest.raises(BadInput):
            tightship.infer(model, x, **options)
    with pytest.raises(BadInput, match="no tensor in the output"):
        tightship.infer(type("Nothing", (nn.Module,), {"forward": lambda self, x: 3})(), x)


def test_two_passes_at_once_are_refused():
    class Again(nn.Module):
        run = None

        def forward(self, x):
            return x + 1

    model, x = Again(), torch.ones(4)
    run = infer(model, x)
    run._busy.acquire()
    with pytest.raises(Unsupported, match="at once"):
        run(x)
    run._busy.release()
    assert same(run(x), x + 1)


def test_a_refusal_that_the_models_code_catches_is_raised_all_the_same():
    class Scaled(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            try:
                return y * y.sum().item()
            except Exception:  # of eager's own; there is none
                return y * 0

    with pytest.raises(Unsupported, match="must not depend on data"):
        infer(Scaled(4, 4), torch.randn(8, 4))
