"""Compiled mode: what Inductor makes of a model, within a budget, its peak as planned, its numbers Inductor's."""

import ast
import contextlib
import copy
import hashlib
import importlib
import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tightship
from support.compiled import batch, deep, loss_of, zoo
from tightship import errors, simulate
from tightship.execute import allocator, compiled_search
from tightship.execute.allocator import Meter
from tightship.execute.compiled import LoweredStep, Measured, StepReplay, place
from tightship.frontends.torch import (
    compat_compile,
    compat_inductor,
    compat_inductor_code,
    compat_inductor_lines,
    compat_inductor_partitions,
)  # fmt: skip
from tightship.frontends.torch.capture import fused, fused_writing
from tightship.frontends.torch.capture.fused import fuse
from tightship.frontends.torch.capture.fused_step import fuse_step
from tightship.frontends.torch.compat_inductor import Event, Kernel, Lowered
from tightship.integrations import graph_shares, torch_inductor, torch_inductor_search
from tightship.integrations.torch_compile import Fallback, compiled_notes, compiled_plans, measured_step
from tightship.integrations.torchtitan import MemoryPolicy
from tightship.planners.default import Options
from tightship.planners.default import plan as default_plan

pytestmark = [
    pytest.mark.filterwarnings("error::tightship.execute.interpreter.PeakMismatch"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

OPTIONS = {"mode": "compiled", "strict": True, "work": 1_000_000}


def compiled(model, **options):
    return torch.compile(model, backend="tightship", options={**OPTIONS, **options})


def step(call, model, x, seed=1):
    """One step on the mean of the squared output; loss and gradients."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss = call(x).square().mean()
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]


def stock(model, x):
    torch._dynamo.reset()
    return step(torch.compile(model, backend="inductor"), model, x)


def wide(layers=3, width=32, dropout=0.1):
    """Layers whose activations outweigh their parameters at a batch of a few hundred rows."""
    torch.manual_seed(0)
    rows = [
        m
        for _ in range(layers)
        for m in (nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh(), nn.Dropout(dropout))
    ]
    return nn.Sequential(*rows, nn.Linear(width, 4))


def rows(n=512, width=32):
    return torch.randn(n, width, generator=torch.Generator().manual_seed(3))


# --- from end to end ---


def used_by(call, model, x):
    """The most bytes that a step takes beyond what there was before it, once it has run."""
    step(call, model, x)
    model.zero_grad()
    with Meter() as meter:
        call(x).square().mean().backward()
    return meter.peak


def test_without_a_budget_it_is_inductor_with_the_peak_known_to_the_byte():
    model, x = deep(2), batch()
    call = compiled(model)
    got = step(call, model, x)
    (graph,) = compiled_plans(call)
    assert graph.kind == "training"
    assert graph.last.measured_peak == graph.plan.peak == graph.plan.peak_before
    assert graph.last.as_planned
    assert not compiled_notes(call)
    assert all(torch.equal(a, b) for a, b in zip(got, stock(model, x), strict=True))
    assert graph.plan.static + graph.plan.arena <= graph.plan.peak
    ours = used_by(call, model, x)
    torch._dynamo.reset()
    assert ours <= used_by(torch.compile(model), model, x)


@pytest.mark.slow
def test_a_budget_holds_as_a_measured_peak_and_masks_stay_those_that_were_drawn():
    model, x = wide(), rows()
    call = compiled(model, budget="93%")
    got = step(call, model, x)
    (graph,) = compiled_plans(call)
    plan = graph.plan
    assert plan.met
    assert plan.peak <= plan.budget < plan.peak_before
    assert plan.static + plan.arena <= plan.budget
    assert plan.recomputed
    for _ in range(2):
        again = step(call, model, x)
        assert graph.last.measured_peak == plan.peak
        assert graph.last.as_planned
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    reference = stock(model, x)
    assert torch.equal(got[0], reference[0])  # the same masks: another draw would give another loss
    for a, b in zip(got, reference, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_recomputed_numbers_are_no_further_from_exact_ones_than_inductors_are():
    model, x = wide(3, dropout=0.0), rows()
    call = compiled(model, budget="93%")
    got = step(call, model, x)
    assert compiled_plans(call)[0].plan.recomputed
    assert any("neither is further from exact numbers" in note for note in compiled_notes(call))
    reference = stock(model, x)
    double = copy.deepcopy(model).double()
    exact = step(double, double, x.double())

    def far(numbers):
        return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(numbers, exact, strict=True))

    assert far(got) <= 1.1 * far(reference)


@pytest.mark.slow
def test_the_least_peak_that_infeasible_reports_can_be_had():
    model, x = wide(2, dropout=0.0), rows(256)
    with pytest.raises(errors.Infeasible) as found:
        step(compiled(model, budget=1024), model, x)
    assert found.value.best_peak >= found.value.lower_bound > found.value.budget
    torch._dynamo.reset()
    call = compiled(model, budget=found.value.best_peak)
    step(call, model, x)
    (graph,) = compiled_plans(call)
    assert graph.last.measured_peak == graph.plan.peak <= found.value.best_peak


def test_evaluation_is_placed_as_well():
    model, x = deep(2).eval(), batch()
    call = compiled(model)
    with torch.no_grad():
        got = call(x)
        got = call(x)
    (graph,) = compiled_plans(call)
    assert graph.kind == "inference"
    assert graph.last.measured_peak == graph.plan.peak
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(got, torch.compile(model)(x))


@pytest.mark.slow
def test_sizes_have_plans_of_their_own_in_one_budget():
    model = wide(2)
    call = compiled(model, budget="2MiB")
    for n in (64, 128, 64):
        step(call, model, rows(n))
    assert [g.last.measured_peak == g.plan.peak <= 2 << 20 for g in compiled_plans(call)] == [True, True]


@pytest.mark.slow
def test_the_optimizer_has_its_part_of_the_budget():
    model, x = wide(2), rows(256)
    optimizer = torch.optim.AdamW(model.parameters())
    call = compiled(model, budget="100%", optimizer=optimizer)
    for _ in range(3):
        with measured_step(call) as bytes_:
            step(call, model, x)
            optimizer.step()
            optimizer.zero_grad()
    assert bytes_.planned is not None
    assert bytes_.measured <= bytes_.planned


@pytest.mark.slow
def test_an_infeasible_budget_of_a_step_says_what_the_optimizer_takes_of_it(monkeypatch):
    def nothing(*_args):
        raise errors.Infeasible(budget=1000, lower_bound=500, best_peak=2000, compiled=True)

    monkeypatch.setattr("tightship.integrations.torch_compile_graph.compile_within", nothing)
    model = wide()
    optimizer = torch.optim.AdamW(model.parameters())
    call = compiled(model, budget=10**6, optimizer=optimizer)
    with pytest.raises(errors.Infeasible, match=r"of the whole step's budget of .* left: state of AdamW "):
        call(torch.randn(8, 32))


def test_what_inductor_fails_at_is_said_in_its_words():
    from torch._inductor.exc import InductorError

    def raising(error):
        with compat_inductor_code._lowerable():
            raise InductorError(error, None)

    with pytest.raises(compat_inductor.NotLowered, match=r"Inductor fails at it \(no range for q3\)"):
        raising(AssertionError("no range for q3\nmore"))
    with pytest.raises(InductorError):  # ours are raised as they are, by who compiles
        raising(errors.Unsupported("a line", "nobody knows what memory it takes"))


def test_a_share_of_a_step_that_is_not_known_yet_holds_nothing_which_is_said():
    model = nn.Linear(16, 4).eval()
    call = compiled(model, budget="50%", cache=None)
    with torch.no_grad():
        call(batch())
    (graph,) = compiled_plans(call)
    assert graph.plan.budget is None
    assert any("is not held to it" in note for note in graph.notes)


def test_a_second_forward_pass_before_the_backward_pass_runs_outside_the_arena_and_says_so():
    model, x = deep(2, dropout=0.0), batch()
    call = compiled(model, strict=False)
    step(call, model, x)
    model.zero_grad()
    (call(x).sum() + call(x).sum()).backward()
    twice = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    call(x).sum().backward()
    assert all(torch.allclose(a, 2 * p.grad) for a, p in zip(twice, model.parameters(), strict=True))
    assert any("outside the arena" in n for n in compiled_notes(call))


def test_the_mode_is_one_of_two():
    model = deep(1)
    with pytest.raises(errors.BadInput, match="mode must be 'exact' or 'compiled'"):
        torch.compile(model, backend="tightship", options={"mode": "fast"})(batch())


# --- what people do around it ---


class Broken(nn.Module):
    """Two graphs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = wide(1, dropout=0.0), nn.Linear(4, 4)

    def forward(self, x):
        h = self.first(x)
        torch._dynamo.graph_break()
        return self.second(h).tanh()


def after_evaluation(call, model, x):
    step(call, model, x)
    model.eval()
    with torch.no_grad():
        call(x)
    model.train()
    return step(call, model, x)


def accumulated(call, model, x):
    model.zero_grad()
    for _ in range(2):
        loss = call(x).square().mean()
        loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]


def in_bfloat16(call, model, x):
    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return call(x)

    return step(run, model, x)


def low_rank():
    """A frozen layer beside which a product of two small ones is trained."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.base = nn.Linear(16, 16).requires_grad_(False)
            self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    return Adapted()


def trained(call, model, x):
    model.zero_grad()
    loss = call(x).square().mean()
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


SURROUNDINGS = {
    "two graphs": (lambda: (torch.manual_seed(0), Broken())[1], rows, step),
    "evaluation in between": (lambda: wide(1, dropout=0.0), rows, after_evaluation),
    "trained in eval mode": (lambda: wide(1).eval(), rows, step),
    "gradients added up": (lambda: deep(1, dropout=0.0), batch, accumulated),
    "autocast": (lambda: wide(1), rows, in_bfloat16),
    "frozen parameters": (low_rank, batch, trained),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_numbers_are_inductors_and_peaks_as_planned_whatever_is_around(name):
    make, given, run = SURROUNDINGS[name]
    model, x = make(), given()
    call = compiled(model)
    found = run(call, model, x)
    plans = compiled_plans(call)
    assert plans
    assert all(
        g.last.as_planned and g.last.measured_peak == g.last.planned_peak <= g.plan.peak for g in plans
    )
    torch._dynamo.reset()
    other = make()
    wanted = run(torch.compile(other, backend="inductor"), other, x)
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))


class Bent(nn.Module):
    """What is saved is all that its gradient is made of, so that kernels write over it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 32)

    def forward(self, x):
        return torch.tanh(self.second(torch.tanh(self.first(x)))).sum()


@pytest.mark.parametrize("donated", [True, False])
def test_a_graph_is_kept_for_further_backward_passes(donated, tmp_path):
    """What was saved stays where it lies, and what it was, though kernels write over what Inductor takes for theirs;
    also where code is taken from caches."""
    x = torch.randn(64, 16)
    for _ in range(2):
        torch._dynamo.reset()
        model = Bent()
        with torch._functorch.config.patch(donated_buffer=donated):
            call = compiled(model, cache=tmp_path)
            call(x).backward()
            once = [p.grad for p in model.parameters()]
            model.zero_grad()
            loss = call(x)
            for more in (True, True, False):
                loss.backward(retain_graph=more)
        for p, g in zip(model.parameters(), once, strict=True):
            assert torch.equal(p.grad, g + g + g)
        assert any("retain_graph" in n for n in compiled_notes(call))
        with pytest.raises(errors.Unsupported, match="create_graph"):
            torch.autograd.grad(call(x), list(model.parameters()), create_graph=True)


def test_results_that_the_caller_drops_before_the_backward_pass_are_not_a_mismatch():
    """What is handed out and saved as well ends in the backward pass where nobody else has it."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 4)

        def forward(self, x):
            h = self.up(x).exp()
            return self.down(h).square().mean(), h

    model, x = Two(), batch()
    call = compiled(model)
    call(x)[0].backward()
    (graph,) = compiled_plans(call)
    assert graph.last.as_planned
    kept = call(x)
    kept[0].backward()
    assert graph.last.as_planned
    assert graph.last.measured_peak == graph.plan.peak


# --- other people's models ---


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2_sdpa", "llama", "bert", "t5", "vit", "convnext", "resnet", "unet"])
def test_other_peoples_models_run_as_planned_with_inductors_numbers(name):
    """Kernels that add up atomically, as the gradients of embeddings do, give other last bits in each run."""
    pytest.importorskip("transformers")
    model, loss_fn, batches = zoo(name, 4)
    if name == "gpt2_sdpa":
        model.loss_type = "ForCausalLM"  # it has none, and what transformers warns of would be a graph break
    call = compiled(model, eager_fallback=True)
    for k in range(2):
        model.zero_grad()
        torch.manual_seed(k)
        loss = loss_of(call, loss_fn, batches(k))
        loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    assert compiled_plans(call)
    assert all(g.last is None or g.last.as_planned for g in compiled_plans(call))
    assert any(g.last is not None for g in compiled_plans(call))
    torch._dynamo.reset()
    other, loss_fn, _ = zoo(name, 4)
    if name == "gpt2_sdpa":
        other.loss_type = "ForCausalLM"
    plain = torch.compile(other, backend="inductor")
    for k in range(2):
        other.zero_grad()
        torch.manual_seed(k)
        loss = loss_of(plain, loss_fn, batches(k))
        loss.backward()
    wanted = [loss.detach(), *(p.grad for p in other.parameters() if p.grad is not None)]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_attention_with_dropout_within_a_budget():
    pytest.importorskip("transformers")
    model, loss_fn, batches = zoo("bert", 8)
    call = compiled(model, budget="85%")
    model.zero_grad()
    torch.manual_seed(0)
    loss_of(call, loss_fn, batches(0)).backward()
    (graph,) = compiled_plans(call)
    assert graph.last.as_planned
    assert graph.last.measured_peak <= graph.plan.peak <= graph.plan.budget < graph.plan.peak_before


@pytest.mark.slow
def test_what_checkpoints_around_blocks_reach_is_found_as_well(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_search.Aim, "run", lambda self, **how: [])
    monkeypatch.setattr(torch_inductor_search.Search, "shares", (None,))

    def block():
        return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Dropout(0.1))

    torch.manual_seed(0)
    model, x = nn.Sequential(*(block() for _ in range(4))), rows(256, 16)
    for _ in range(2):  # chosen, then kept
        torch._dynamo.reset()
        call = compiled(model, budget="80%", cache=str(tmp_path))
        got = step(call, model, x)
        (graph,) = compiled_plans(call)
        assert graph.plan.source == "each block computed again"
        assert graph.last.measured_peak == graph.plan.peak <= graph.plan.budget
    for a, b in zip(got, stock(model, x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_depthwise_convolutions_that_run_again_keep_the_layouts_of_a_backward_pass_without_them(monkeypatch):
    monkeypatch.setattr(compiled_search.Aim, "run", lambda self, **how: [])
    monkeypatch.setattr(torch_inductor_search.Search, "shares", (None,))

    def block():
        rows = [
            nn.Conv2d(32, 32, 7, padding=3, groups=32),
            nn.Conv2d(32, 64, 1),
            nn.GELU(),
            nn.Conv2d(64, 32, 1),
        ]
        return nn.Sequential(*rows)

    model, x = nn.Sequential(*(block() for _ in range(4))), torch.randn(4, 32, 8, 8)
    call = compiled(model, budget="80%", cache=None)
    got = step(call, model, x)
    (graph,) = compiled_plans(call)
    assert graph.plan.source == "each block computed again"
    assert graph.last.measured_peak == graph.plan.peak <= graph.plan.budget
    for a, b in zip(got, stock(model, x), strict=True):
        torch.testing.assert_close(a, b)


class Attending(nn.Module):
    """A block of attention without dropout, under a checkpoint or not."""

    def __init__(self, again):
        super().__init__()
        self.qkv, self.again = nn.Linear(16, 48), again

    def forward(self, x):
        return checkpoint(self.attended, x, use_reentrant=False) if self.again else self.attended(x)

    def attended(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:-1], 3, 2, 8).permute(2, 0, 3, 1, 4)
        return x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


def test_attention_under_a_checkpoint_runs_again_and_nothing_is_drawn():
    peaks = []

    def backend(gm, given):
        peaks.extend(torch_inductor.stock_peaks(gm, given, [1.0]))
        return gm.forward

    for again in (False, True):
        torch._dynamo.reset()
        model = nn.Sequential(*(Attending(again) for _ in range(3)))
        torch.compile(model, backend=backend)(torch.randn(4, 64, 16))
    assert peaks[1] < peaks[0]


complex_numbers = pytest.mark.filterwarnings(
    "ignore:Torchinductor does not support code generation for complex"
)


class Turned(nn.Module):
    """Real numbers that become complex ones, which Inductor leaves to a copy into a tensor of the other type; with a
    sum, whose ops it calls with numbers."""

    def __init__(self, summed=False):
        super().__init__()
        self.summed = summed
        self.inner, self.weight = nn.Linear(16, 16), nn.Parameter(torch.randn(16, dtype=torch.complex64))

    def forward(self, x):
        if self.summed:
            return (self.inner(x).double().to(torch.complex128) + self.weight).real.square().mean()
        return (self.inner(x).to(torch.complex64) * self.weight.conj()).real.square().mean()


@complex_numbers
def test_copies_into_tensors_of_another_type_are_replayed():
    peaks = []

    def backend(gm, given):
        peaks.extend(torch_inductor.stock_peaks(gm, given, [1.0]))
        return gm.forward

    torch.compile(Turned(), backend=backend)(torch.randn(64, 16))
    assert len(peaks) == 1 and peaks[0] > 64 * 16 * 8


@complex_numbers
@pytest.mark.slow
@pytest.mark.parametrize("summed", [False, True])
def test_real_numbers_that_become_complex_run_as_planned_from_the_first_step_on(summed):
    torch.manual_seed(0)
    model, x = Turned(summed), torch.randn(64, 16)
    call, found = compiled(model), []
    for k in range(2):
        for run in (call, torch.compile(model, backend="inductor")):
            model.zero_grad()
            loss = run(x)
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
            assert all(torch.equal(a, b) for a, b in zip(found[-1], found[0], strict=True)), k
    (p,) = compiled_plans(call)
    assert p.last is not None and p.last.measured_peak == p.last.planned_peak and not p.last.misses


class Conjugated(nn.Module):
    """Complex products, whose operands PyTorch leaves to be conjugated or negated by those who read them."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.w, self.v = (nn.Parameter(torch.randn(32, 32, dtype=torch.complex64)) for _ in range(2))

    def forward(self, x):
        return (self.way(self.w, self.v).abs() * x).sum()


@complex_numbers
@pytest.mark.parametrize(
    "way",
    [
        lambda w, v: w.t() @ v,
        pytest.param(lambda w, v: w.conj() @ v, marks=pytest.mark.slow),
        pytest.param(lambda w, v: w.mH @ v @ w, marks=pytest.mark.slow),
        pytest.param(lambda w, v: w.conj().imag @ v.real, marks=pytest.mark.slow),
        pytest.param(lambda w, v: w.conj()[:16].t() @ v[:16], marks=pytest.mark.slow),
        lambda w, v: torch.bmm((w * v)[None], (v * v).t()[None]),
    ],
    ids=["transposed", "conjugated", "both", "negated", "in part", "saved for the backward pass"],
)
def test_what_is_conjugated_by_its_readers_takes_what_was_planned(way):
    torch.manual_seed(0)
    model, x = Conjugated(way), torch.randn(32, 32)
    call, found = compiled(model), []
    for run in (call, torch.compile(model, backend="inductor")):
        model.zero_grad()
        loss = run(x)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    (p,) = compiled_plans(call)
    assert p.last is not None and p.last.measured_peak == p.last.planned_peak and not p.last.misses


def test_a_first_run_asks_for_what_every_other_one_does():
    from torch._functorch._aot_autograd.runtime_wrappers import _AnalyzeCustomOpInputOutputMode

    x = torch.zeros(64, dtype=torch.complex128)
    asked = []
    for mode in (contextlib.nullcontext(), _AnalyzeCustomOpInputOutputMode()):
        with mode, compat_compile.without_alias_check(), allocator.record("cpu") as recording:
            torch.ops.aten.add.Tensor(x, 0)
        asked.append([(e.kind, e.nbytes) for e in recording.events])
    assert asked[0] == asked[1]


@pytest.mark.parametrize(
    ("name", "others"), [("aten.mm", False), ("extern_kernels.mm", False), ("mine.op", True)]
)
def test_ops_of_other_libraries_are_known_by_their_names(name, others):
    call = Event("call", "b", kernel=Kernel(repr((name, name, (), {})), lambda _: None))
    assert compat_inductor.calls_others(Lowered((call,), (), (), (), ())) is others


@pytest.mark.parametrize(("dropout", "drawn"), [(0.0, False), (0.1, True)])
def test_attention_draws_where_it_drops(dropout, drawn):
    graph = torch.fx.Graph()
    q = graph.placeholder("q")
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert compat_inductor.draws(graph.call_function(attention, (q, q, q, dropout))) is drawn


# --- choices that are kept ---


@pytest.mark.slow
def test_a_second_start_chooses_nothing_and_a_file_that_does_not_hold_is_made_again(tmp_path, monkeypatch):
    lowerings = []
    lower = compat_inductor.lower

    def counted(*args, **more):
        lowerings.append(1)
        return lower(*args, **more)

    monkeypatch.setattr(compat_inductor, "lower", counted)

    def start():
        torch._dynamo.reset()
        lowerings.clear()
        model = wide(2, dropout=0.0)
        call = compiled(model, budget="93%", cache=str(tmp_path))
        numbers = step(call, model, rows(256))
        (graph,) = compiled_plans(call)
        assert graph.last.measured_peak == graph.plan.peak <= graph.plan.budget
        return graph.plan, numbers

    first, numbers = start()
    assert lowerings
    second, again = start()
    assert not lowerings
    assert (second.peak, second.saved, second.peak_before) == (first.peak, first.saved, first.peak_before)
    assert all(map(torch.equal, numbers, again))
    for file in tmp_path.glob("plan-code-*"):  # code that is kept is taken without another look
        file.unlink()
    (file,) = tmp_path.glob("plan-compiled-*")
    file.write_text(
        file.read_text().replace(f'"peak":{first.peak},"needed"', f'"peak":{first.peak + 64},"needed"')
    )
    third, _ = start()
    assert lowerings
    assert third.peak == first.peak
    start()
    assert not lowerings


@pytest.mark.slow
def test_what_a_refusal_reached_is_taken_at_once(tmp_path, monkeypatch):
    model, x = wide(2, dropout=0.0), rows(256)
    with pytest.raises(errors.Infeasible) as found:
        step(compiled(model, budget=1024, cache=str(tmp_path)), model, x)
    least, lowerings = found.value.best_peak, []
    lower = compat_inductor.lower
    monkeypatch.setattr(compat_inductor, "lower", lambda *a, **k: lowerings.append(1) or lower(*a, **k))
    for budget in (least, least + 64):
        torch._dynamo.reset()
        call = compiled(model, budget=budget, cache=str(tmp_path))
        step(call, model, x)
        (graph,) = compiled_plans(call)
        assert graph.last.measured_peak == graph.plan.peak <= budget
        if budget == least:
            assert not lowerings


@pytest.mark.parametrize("inductor_keeps", [True, False])
@pytest.mark.parametrize("budget", ["93%", 10**7])
def test_what_is_chosen_was_written_as_a_candidate(tmp_path, monkeypatch, budget, inductor_keeps):
    from torch._inductor import compile_fx

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    written, whole = [], compile_fx.fx_codegen_and_compile

    def counted(*args, **more):
        written.append(1)
        return whole(*args, **more)

    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", counted)
    model, x = wide(2, dropout=0.0), rows(256)
    call = compiled(model, budget=budget, cache=str(tmp_path))
    with torch._inductor.config.patch(fx_graph_cache=inductor_keeps):
        step(call, model, x)
    (graph,) = compiled_plans(call)
    assert graph.last.measured_peak == graph.plan.peak
    again = 0 if inductor_keeps else 2  # without Inductor's cache both passes are written again
    assert len(written) == 2 * graph.plan.lowered + again


# --- compiled code that is kept ---


@pytest.fixture
def starts(tmp_path, monkeypatch):
    """Starts as of a new process on caches of its own; returns a function that gives the graph of one step with its
    numbers, and how many passes Inductor compiled, how many partitions were asked for."""
    from torch._inductor import compile_fx

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    made, cut = [], []
    whole, compile_graph = compile_fx.fx_codegen_and_compile, compat_inductor.compile_graph

    def counted(*args, **more):
        made.append(1)
        return whole(*args, **more)

    def counting(gm, inputs, *, partition, **more):
        def counted_partition(*args):
            cut.append(1)
            return partition(*args)

        return compile_graph(gm, inputs, partition=counted_partition, **more)

    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", counted)
    monkeypatch.setattr(compat_inductor, "compile_graph", counting)

    def start(budget="93%", model=None, x=None, cache=tmp_path / "ours"):
        torch._dynamo.reset()
        made.clear(), cut.clear()
        model = wide(2, dropout=0.0) if model is None else model
        call = compiled(model, budget=budget, cache=None if cache is None else str(cache))
        numbers = step(call, model, rows(256) if x is None else x)
        (graph,) = compiled_plans(call)
        assert graph.last.measured_peak == graph.plan.peak
        assert graph.plan.budget is None or graph.plan.peak <= graph.plan.budget
        return graph, numbers, len(made), len(cut)

    return start


@pytest.mark.parametrize("budget", [None, "93%"])
def test_the_next_process_partitions_and_compiles_nothing(starts, budget):
    first, numbers, made, cut = starts(budget)
    assert made >= 2
    assert cut == 1
    second, again, made, cut = starts(budget)
    assert (made, cut) == (0, 0)
    assert all(map(torch.equal, numbers, again))
    assert second.plan == first.plan
    assert second.notes == first.notes


def test_kept_code_is_of_one_budget_one_cache_and_one_set_of_tensors(starts, tmp_path):
    first, numbers, _, _ = starts("93%")
    looser, same, _, cut = starts("200%")
    assert cut == 1
    assert looser.plan.peak >= first.plan.peak
    assert looser.plan.recomputed == 0
    for a, b in zip(numbers, same, strict=True):
        torch.testing.assert_close(a, b)
    elsewhere, _, _, cut = starts("93%", cache=tmp_path / "elsewhere")
    assert cut == 1
    assert elsewhere.plan.peak == first.plan.peak
    assert starts("93%", cache=None)[3] == 1
    whole = torch.zeros(512, 32)  # of which the batch is a part
    part, *_ = starts("93%", x=whole[128:384].copy_(rows(256)))
    assert part.plan.static == first.plan.static + 256 * 32 * 4
    assert starts("93%")[2:] == (0, 0)


@pytest.mark.parametrize("damage", ["gone", "cut", "sizes", "names", "inductor"])
def test_kept_code_that_does_not_hold_is_made_again(starts, tmp_path, damage):
    first, numbers, _, _ = starts()
    if damage == "inductor":
        shutil.rmtree(tmp_path / "inductor")
    for file in (tmp_path / "ours").glob("plan-code-*"):
        text = file.read_text()
        if damage == "gone":
            file.unlink()
        elif damage == "cut":
            file.write_text(text[: len(text) // 2])
        elif damage in ("sizes", "names"):  # with a digest that fits: a file that somebody wrote
            whole = json.loads(text)
            body = whole["body"]
            if "events" in body and damage == "sizes":
                body["constants"] = [["x", -5]]
            elif "events" in body:
                body["outputs"] = ["nobody"]
            else:
                body["given"] = -1
            data = json.dumps(body)
            head = {"key": whole["key"], "digest": hashlib.sha256(data.encode()).hexdigest()}
            file.write_text(json.dumps(head)[:-1] + ', "body": ' + data + "}")
    again, found, *_ = starts()
    assert again.plan == first.plan
    assert all(map(torch.equal, numbers, found))
    assert starts()[2:] == (0, 0)


# --- hooks ---


@pytest.mark.parametrize(("module", "name"), compat_inductor.HOOKS, ids=lambda text: text.rpartition("_")[2])
def test_a_hook_that_is_gone_is_named(module, name, monkeypatch):
    compat_inductor.require_inductor()
    owner = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    if not isinstance(owner, type) and hasattr(type(owner), last):
        owner = type(owner)
    if module.endswith("config"):  # such modules are objects with a table of their entries
        monkeypatch.delitem(owner._config, last)
    else:
        monkeypatch.delattr(owner, last)
    with pytest.raises(errors.Unsupported, match=f"(?s){module}.{name}.*mode=.exact"):
        compat_inductor.require_inductor()


def test_a_mark_that_inductor_does_not_read_is_named(monkeypatch):
    from torch._inductor.graph import GraphLowering

    monkeypatch.setattr(GraphLowering, "run_node", lambda self, n: None)
    with pytest.raises(errors.Unsupported, match=compat_inductor.AS_IT_IS):
        compat_inductor.require_inductor()


def _leaned_on(path):
    """(module, name) of PyTorch's private interfaces that a file imports, reads of modules it imports, or patches."""
    return {x for part in ast.parse(path.read_text(encoding="utf-8")).body for x in _leaned_on_by(part)}


def _leaned_on_by(part):
    modules, names = {}, {}
    nodes = list(ast.walk(part))
    for node in (n for n in nodes if isinstance(n, ast.ImportFrom) and n.module.startswith("torch._")):
        for a in node.names:
            if _is_module(f"{node.module}.{a.name}"):
                modules[a.asname or a.name] = f"{node.module}.{a.name}"
            else:
                names[a.asname or a.name] = node.module
                yield node.module, a.name
    for node in nodes:
        owner = node.value.id if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else ""
        if owner in names:
            yield names[owner], f"{owner}.{node.attr}"
        if owner in modules and node.attr not in ("patch", "save_config_portable"):
            yield modules[owner], node.attr
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("config.patch"):
            owner = modules[ast.unparse(node.func).partition(".")[0]]
            yield from ((owner, k.arg) for k in node.keywords if k.arg)


def _is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize(
    "path", sorted(Path(compat_inductor.__file__).parent.glob("compat_inductor*.py")), ids=lambda p: p.stem
)
def test_every_private_interface_that_is_leaned_on_is_looked_for(path):
    listed = {*compat_inductor.HOOKS, *((m, n.partition(".")[0]) for m, n in compat_inductor.HOOKS)}
    assert not {x for x in _leaned_on(path) if x not in listed}
    names = {name for _, name in compat_inductor.HOOKS}
    text = [
        n.value for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Constant)
    ]
    known = {*torch._inductor.config._config, *torch._functorch.config._config}
    assert {x for x in text if x in known} <= names


def test_a_hook_that_is_gone_stops_a_compilation_and_nothing_runs_in_its_place(monkeypatch):
    monkeypatch.setattr(compat_inductor, "HOOKS", (("torch._inductor.compile_fx", "no_such_thing"),))
    model = deep(1)
    with pytest.raises(errors.Unsupported, match="no_such_thing"):
        compiled(model)(batch())


@pytest.mark.parametrize("setting", ["cpp_wrapper", "fx_wrapper", "custom_partitioner_fn"])
def test_settings_that_make_other_code_than_is_replayed_are_refused_by_name(setting):
    model = deep(1)
    with (
        torch._inductor.config.patch({setting: True}),
        pytest.raises(errors.Unsupported, match=f"config.{setting} in compiled mode.*mode=.exact"),
    ):
        compiled(model)(batch())


# --- replays ---


def lowered(*events, inputs=(), outputs=()):
    return Lowered(tuple(events), tuple(inputs), tuple(outputs), (None,) * len(outputs), ())


def replay(static=0):
    return StepReplay(static, Measured("cpu"), 64)


def test_a_replay_counts_what_variables_hold():
    r = replay(static=1000)
    made = r.run(
        lowered(
            Event("make", "a", nbytes=100),  # 128 in use
            Event("make", "b", nbytes=64),  # 192
            Event("alias", "c", source="a"),
            Event("drop", "a"),  # c has it still
            Event("make", "d", nbytes=1),  # 256
            Event("drop", "c"),
            Event("drop", "b"),  # 64
            Event("make", "e", nbytes=128),  # 192
            inputs=("x",),
            outputs=("d", "x", ""),
        ),
        [None],
    )
    assert r.peaks == [1256]
    assert [m is None for m in made] == [False, True, True]
    r.between([made[0]])
    assert r.rest == 64
    for held in r.run(
        lowered(Event("drop", "s"), Event("make", "g", nbytes=64), inputs=("s",), outputs=("g",)),
        made[:1],
        64,
    ):
        r.hand_out(held)
    assert r.peaks[1] == 1000 + 64 + 64
    assert r.begins == [1000, 1000 + 64 + 64]
    passes, arena = place(r)
    assert passes[1].offsets == (-1,)  # handed out
    assert arena == 256
    assert min(passes[0].offsets) == 0


def test_a_result_that_is_dropped_ends_at_its_last_use():
    forward = lowered(Event("make", "h", nbytes=64), Event("make", "y", nbytes=64), outputs=("y", "h", "h"))
    backward = lowered(Event("drop", "h"), Event("make", "g", nbytes=128), inputs=("h",), outputs=("g",))
    step_ = LoweredStep(forward, backward, outputs=2, written=0, static=0, tangents=0)
    held = step_.replay(Measured("cpu"), 64)
    assert held.shared() == (0,)
    assert held.peaks == [128, 256]
    assert step_.replay(Measured("cpu"), 64, {0}).peaks == [128, 192]


def test_what_spans_more_than_it_may_is_not_placed():
    r = replay(static=1000)
    r.run(lowered(Event("make", "a", nbytes=64), Event("make", "b", nbytes=128)), [])
    passes, arena = place(r, most=1192)
    assert (arena, passes[0].offsets) == (192, (0, 64)) or passes[0].offsets == (128, 0)
    passes, arena = place(r, most=1191)
    assert (arena, passes[0].sizes, passes[0].offsets) == (0, (64, 128), (-1, -1))


def test_what_replays_had_in_use_for_fused_nodes_counts_for_the_next_one_of_the_model():
    def gradients(x, w):
        y = torch.tanh(x @ w)
        return (y @ w).sum(), w.t() @ (1 - y * y)

    gm = torch.fx.experimental.proxy_tensor.make_fx(gradients, tracing_mode="fake")(
        torch.randn(8, 8), torch.randn(8, 8)
    )
    model = fuse_step(gm, 1)
    plan = default_plan(model.graph, None, Options(place=False))
    names = [model.calls[s.op].name for s in plan.steps if s.kind == "compute"]
    fused = next(n.name for n in gm.graph.nodes if n.op == "call_function" and n.name not in names)
    line = simulate.replay(model.graph, plan.steps)
    rows = [(fused, line.peak + 512), (names[1], 64), (names[2], 64), (fused, line.peak + 64)]
    taught = model.with_excess(model.graph, plan, [rows])
    peaks = {model.calls[s.op].name: line.during[k] for k, s in enumerate(plan.steps) if s.kind == "compute"}
    more = {op.name: op.workspace for op in taught.ops if op.workspace}
    assert set(more.values()) == {line.peak + 512 - peaks[names[1]], line.peak + 64 - peaks[names[2]]}


def test_levels_are_what_is_in_use_while_each_is_made():
    r = replay(static=1000)
    made = r.run(
        lowered(
            Event("make", "a", nbytes=64, origin="one"),
            Event("make", "b", nbytes=64, origin="two"),
            Event("make", "c", nbytes=64, origin="two"),
            Event("drop", "b"),
            Event("make", "d", nbytes=64, origin="three"),
            outputs=("a", "c"),
        ),
        [],
    )
    r.between(made)
    r.run(lowered(Event("make", "e", nbytes=64, origin="four"), inputs=("a", "c")), made, 64)
    assert r.levels() == [[("one", 1064), ("two", 1192), ("three", 1192)], [("four", 1256)]]


def test_a_kernel_is_measured_once_with_its_own_workspace():
    calls = []

    def prepare(_number, _index):
        calls.append(1)
        x = torch.ones(64, 64)
        return lambda: (torch.relu(x @ x), x)  # the product is gone when the kernel returns

    r = replay()
    kernel = Kernel("square", prepare)
    r.run(
        lowered(
            Event("call", "k", kernel=kernel),
            Event("item", "y", source="k", path=(0,)),
            Event("drop", "k"),
            Event("call", "", kernel=kernel),
            outputs=("y",),
        ),
        [],
    )
    if not r.measured.recorded:
        pytest.skip("no C++ compiler")
    assert len(calls) == 1
    assert r.peaks == [3 * 64 * 64 * 4]
    assert [b.size for b in r.blocks[0]] == [64 * 64 * 4] * 4


def test_a_kernel_that_does_not_run_by_itself_is_refused():
    def prepare(_number, _index):
        return lambda: torch.ones(2) @ torch.ones(3)

    with pytest.raises(errors.Unsupported, match="does not run on tensors like those of the step"):
        replay().run(lowered(Event("call", "", kernel=Kernel("('mm', 1)", prepare))), [])


class Strange:
    """A line nobody knows."""


def test_a_kernel_that_takes_no_zeros_is_measured_on_other_numbers():
    def prepare(number, _index):
        p = torch.full((4, 16), number)
        return lambda: torch.multinomial(p, 2)

    asked = Measured("cpu")(Kernel("multinomial", prepare))
    assert sum(n for _, n in asked.events if n > 0) >= 4 * 2 * 8


def test_other_peoples_ops_run_while_they_are_planned_which_is_said():
    seen = []

    @torch.library.custom_op("tightship_test::logged", mutates_args=())
    def logged(x: torch.Tensor) -> torch.Tensor:
        seen.append(float(x.sum()))
        return x.clone()

    logged.register_fake(torch.empty_like)
    logged.register_autograd(lambda _, grad: grad)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(16, 4)

        def forward(self, x):
            return logged(torch.multinomial(self.map(x).softmax(-1), 2) + x[:, :1])

    call = compiled(Model())
    with torch.no_grad():
        call(batch())
    (note,) = (n for n in compiled_notes(call) if "tightship_test.logged" in n)
    assert "made-up tensors" in note and len(seen) > 1
    assert not any("multinomial" in n for n in compiled_notes(call))
    (graph,) = compiled_plans(call)
    assert graph.last.as_planned


def test_lines_that_only_check_take_no_memory():
    for line in (
        "assert_alignment(buf1, 16, 'aten.mm')",
        "# a remark",
        "",
        "stream0 = get_raw_stream(0)",
        "buf2 = None",
    ):
        assert not list(compat_inductor_lines._events_of(line, None))


@pytest.mark.slow
def test_masks_of_whole_channels_are_drawn_once_and_as_planned():
    torch.manual_seed(0)
    parts = [
        nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.GELU(), dropout)
        for dropout in (nn.Dropout1d(0.3), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2))
    ]
    model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(256, 4))
    other = copy.deepcopy(model)
    call = compiled(model, budget="85%", cache=None)
    for k in range(2):
        x = torch.randn(16, 8, 32, generator=torch.Generator().manual_seed(k))
        for a, b in zip(
            step(call, model, x), step(other, other, x), strict=True
        ):  # Inductor draws as eager does
            torch.testing.assert_close(a, b)
    (graph,) = compiled_plans(call)
    assert graph.last.measured_peak == graph.last.planned_peak <= graph.plan.budget
    assert not graph.last.misses


@pytest.mark.parametrize("line", [Strange(), "buf0 = surprise()", "buf0 = None or surprise()"])
def test_lines_that_nobody_knows_are_refused(line):
    with pytest.raises(errors.Unsupported, match=r"nobody knows what memory it takes"):
        list(compat_inductor_lines._events_of(line, None))


# --- tags and partitions ---


def joint_of(model, x):
    """The joint graph that AOTAutograd traces of the model's squared mean."""
    from torch._functorch.aot_autograd import aot_function, make_boxed_compiler

    found = []

    def keep(joint, inputs, **more):
        found.append((compat_inductor_partitions.copied(joint), more["num_fwd_outputs"]))
        return torch._functorch.partitioners.default_partition(joint, inputs, **more)

    params = dict(model.named_parameters())

    def loss(values, x):
        return torch.func.functional_call(model, values, (x,)).square().mean()

    nop = make_boxed_compiler(lambda gm, _: gm.forward)
    aot_function(loss, nop, nop, partition_fn=keep)(params, x)
    return found[0]


def test_the_model_of_fused_code_has_what_attention_makes():
    """fx calls attention impure, as it may draw random numbers; its results are results all the same."""
    joint, outputs = joint_of(nn.Sequential(*(Attending(False) for _ in range(3))), torch.randn(4, 64, 16))
    model = fuse(joint, outputs)
    attention = [k for k, n in model.calls.items() if "attention" in n.name and not model.is_late(n)]
    assert len(attention) == 3
    assert all(model.graph.ops[k].outputs and model.graph.ops[k].pure for k in attention)
    parts = {u.name for n in joint.graph.nodes if "attention" in n.name for u in n.users if u.users}
    assert parts
    assert parts <= set(model.nodes.values())


def test_tags_say_what_is_saved_and_a_partitioner_of_torchs_follows_them():
    joint, outputs = joint_of(wide(3), rows())
    plan = tightship.tag(joint, "70%", outputs=outputs)
    assert plan.met
    assert plan.count("recompute")
    policy = torch.utils.checkpoint.CheckpointPolicy
    tags = {n.name: n.meta.get("recompute") for n in joint.graph.nodes}
    recomputed = {k for k, v in tags.items() if v is policy.MUST_RECOMPUTE}
    assert recomputed
    assert not any(compat_inductor.draws(n) and n.name in recomputed for n in joint.graph.nodes)
    forward, _ = torch._functorch.partitioners.default_partition(joint, [], num_fwd_outputs=outputs)
    (output,) = forward.graph.find_nodes(op="output")
    saved = {x.name for x in output.args[0][outputs:]}
    assert saved
    assert not saved & recomputed


def test_tags_of_what_is_no_joint_graph_are_refused():
    gm = torch.fx.symbolic_trace(nn.Linear(2, 2))
    with pytest.raises(errors.BadInput, match="a joint graph has tangents"):
        tightship.tag(gm, "50%")
    with pytest.raises(errors.BadInput, match=r"a joint graph is a torch\.fx\.GraphModule, got 'Graph'"):
        tightship.tag(gm.graph, "50%")


def traced(model, x, *, chunks=1, marked=True):
    """A step as trainers trace it: forward pass, loss and gradients in one graph without tangents, the backward pass
    marked; the loss in so many chunks. Also what it takes."""
    from torch.fx import traceback
    from torch.fx.experimental.proxy_tensor import make_fx

    names = [n for n, _ in model.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in model.parameters()]

    def step(*given):
        values, x = given[:-1], given[-1]
        out = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))
        total, slopes = 0.0, []
        for part in out.detach().requires_grad_().chunk(chunks) if chunks > 1 else ():
            loss = part.tanh().square().sum()
            with traceback.annotate({"phase": "backward"}):
                slopes.append(torch.autograd.grad(loss, part)[0])
            total = total + loss.detach()
        if chunks == 1:
            total = out.tanh().square().sum()
        with traceback.annotate({"phase": "backward"} if marked else {}):
            grads = torch.autograd.grad(
                total if chunks == 1 else out, values, None if chunks == 1 else torch.cat(slopes)
            )
        return total, *grads

    with traceback.preserve_node_meta():
        return make_fx(step, tracing_mode="fake")(*values, x), (*values, x)


def test_a_policy_tags_a_traced_step_and_torchs_pass_recomputes_what_it_says():
    from torch._functorch._activation_checkpointing import (
        remat_using_tags_for_fwd_loss_bwd_graph_pass as remat,
    )

    policy = MemoryPolicy("70%", {"seconds": 3.0})
    joint, given = traced(wide(3), rows())
    torch.manual_seed(1)
    before = joint(*given)
    assert policy(joint, config=object()) is joint
    (plan,) = policy.plans
    assert plan.met and plan.peak < plan.peak_before
    tagged = [n for n in joint.graph.nodes if "recompute" in n.meta]
    assert not any(n.meta["custom"].get("phase") for n in tagged if "custom" in n.meta)
    assert not any("partitioner_tag" in n.meta for n in joint.graph.nodes)
    after = remat.remat_using_tags_for_fwd_loss_bwd_graph(joint)
    assert any("recomputed" in n.name for n in after.graph.nodes)
    torch.manual_seed(1)  # masks are drawn once, in the forward pass
    ours = torch.fx.Interpreter(after).run(*given)
    assert all(torch.equal(a, b) for a, b in zip(before, ours, strict=True))


def test_what_the_loss_reads_chunk_by_chunk_is_saved():
    joint, _ = traced(wide(3), rows(), chunks=2)
    MemoryPolicy("80%", {"seconds": 2.0})(joint)
    nodes = list(joint.graph.nodes)
    late = [n for n in nodes if n.meta.get("custom", {}).get("phase") == "backward"]
    first = late[: next(k for k in range(1, len(late)) if late[k - 1].next is not late[k])]
    policy = torch.utils.checkpoint.CheckpointPolicy
    read = {a for n in first for a in n.all_input_nodes if "recompute" in a.meta}
    assert all(a.meta["recompute"] is policy.MUST_SAVE for a in read)


def test_a_traced_step_that_does_not_say_what_is_backward_is_refused():
    joint, _ = traced(wide(1), rows(), marked=False)
    for n in joint.graph.nodes:
        n.meta.pop("autograd_backward", None)
    with pytest.raises(errors.BadInput, match="marks on the nodes of its backward pass"):
        MemoryPolicy("70%")(joint)


def test_a_policy_says_at_once_what_is_no_budget_and_no_option():
    for budget in ("some", None):
        with pytest.raises(errors.BadInput):
            MemoryPolicy(budget)
    with pytest.raises(errors.BadInput):
        MemoryPolicy("70%", {"color": "red"})


def test_drawing_twice_is_refused():
    def graph(*, draw):
        g = torch.fx.Graph()
        x = g.placeholder("x")
        drawn = g.call_function(torch.ops.aten.rand_like.default, (x,)) if draw else x
        g.output((drawn,))
        return torch.fx.GraphModule(nn.Module(), g)

    with pytest.raises(errors.Unsupported, match="again in the backward pass"):
        compat_inductor_partitions._checked(compat_inductor.Pair(graph(draw=True), graph(draw=True), 1))
    compat_inductor_partitions._checked(compat_inductor.Pair(graph(draw=True), graph(draw=False), 1))


def test_what_the_backward_pass_draws_by_itself_is_not_saved():
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x.sin()

        @staticmethod
        def backward(_ctx, grad):
            return grad * torch.bernoulli(grad.sigmoid())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(16, 4)

        def forward(self, x):
            return Noisy.apply(self.map(x)).cos()

    joint, outputs = joint_of(Model(), batch())
    (drawn,) = [n for n in joint.graph.nodes if compat_inductor.draws(n)]
    inputs = [n.name for n in joint.graph.find_nodes(op="placeholder") if not compat_compile.is_tangent(n)]
    pair = compat_inductor.extract(joint, outputs, inputs)
    assert drawn.name not in pair.saved
    assert [compat_inductor.origin(n) for n in pair.backward.graph.nodes if compat_inductor.draws(n)] == [
        drawn.name
    ]


def test_what_is_saved_is_taken_in_the_order_in_which_it_is_handed_over():
    """Another order would give the backward pass other tensors, and no error."""
    first, second = torch.fx.Graph(), torch.fx.Graph()
    a, b = first.placeholder("a"), first.placeholder("b")
    first.output((a, a, b))
    given = [second.placeholder(name) for name in ("b", "tangents_1", "a")]
    second.output(tuple(given))
    pair = compat_inductor.Pair(
        torch.fx.GraphModule(nn.Module(), first), torch.fx.GraphModule(nn.Module(), second), 1
    )
    with pytest.raises(errors.Unsupported, match="in another order"):
        compat_inductor_partitions._checked(pair)
    compat_inductor_partitions._inputs_in_order(pair)
    compat_inductor_partitions._checked(pair)
    assert [n.name for n in second.nodes][:3] == ["a", "b", "tangents_1"]


def test_what_a_plan_reads_in_the_backward_pass_is_saved_where_inductors_cut_would_not_read_it():
    """What is saved, let go of and made again needs its inputs as well; a plan's order was dropped without them."""
    joint, outputs = joint_of(wide(2, dropout=0.0), rows())
    model = fuse(joint, outputs)
    late = {n.name for n in joint.graph.nodes if model.is_late(n)}
    saved = (*model.primals, *(n for n in model.nodes.values() if n not in late and n not in model.primals))
    cut = compat_inductor.extract(joint, outputs, saved)
    unread = [n for n in model.primals if n not in cut.saved][:2]
    assert unread
    pair = compat_inductor.extract(joint, outputs, saved, unread)
    assert {*unread} <= {*pair.saved}
    given = [n.name for n in pair.backward.graph.find_nodes(op="placeholder")]
    assert tuple(given[: len(pair.saved)]) == pair.saved
    ends = [compat_inductor_partitions.results_of(p.backward) for p in (cut, pair)]
    assert len(ends[0]) == len(ends[1])


# --- layouts ---


def planned_lines(model, x, share, *, lean=False):
    """The partition of a plan for a share of what the model of fused code takes, of the graph that is written for
    memory where ``lean``; what it is lowered to; and the least bytes for what that takes beyond the model."""
    found = []

    def partition(joint, inputs, outputs, static, lower):
        shares = graph_shares.Shares(
            torch_inductor.Ledger(None), (0, 0), lambda _: {}, lambda _: {}, last=True
        )
        options = torch_inductor.CompileOptions(cache=None)
        owner = torch_inductor._Compilation(gm_of[0], options, torch_inductor.FrameArena(), shares, "")
        search = torch_inductor_search.Search(owner, joint, inputs, outputs, static, lower)
        search = search.lean() if lean else search
        graph = search.model.graph
        unplanned = simulate.replay(graph, simulate.baseline(graph)).peak
        plan = default_plan(
            graph, int(unplanned * share), Options(place=False, allow="recompute", work=200_000)
        )
        pair = search.planned(plan)
        lines = lower(pair)
        replay = owner.step(pair, *lines).replay(owner.measured, owner.align)
        found.extend((pair, lines, max(replay.peaks) - plan.peak))
        raise compat_inductor.Stopped

    gm_of = []

    def backend(gm, inputs):
        gm_of.append(gm)
        with contextlib.suppress(compat_inductor.Stopped):
            compat_inductor.compile_graph(gm, inputs, partition=partition, finished=lambda _k, _l, call: call)
        return gm.forward

    torch.compile(model, backend=backend, dynamic=False)(x)
    return found


class Experts(nn.Module):
    """Products whose operand is made in another order than the one of its sizes, and read through views."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 16, 32) * 0.1)
        self.down = nn.Parameter(torch.randn(2, 32, 16) * 0.1)

    def forward(self, x):
        made = nn.functional.gelu(torch.einsum("btd,edf->betf", x, self.up))
        return x + torch.einsum("betf,efd->btd", made, self.down)


def test_what_is_read_through_views_is_not_copied_for_them(monkeypatch):
    """Inductor would lay an operand out in the order of its sizes, and again as each product reads it."""
    model, x = nn.Sequential(Experts(), Experts()), torch.randn(8, 32, 16)
    operand = 2 * 8 * 32 * 32 * 4
    _, _, beyond = planned_lines(model, x, 0.7)
    assert beyond < operand / 4
    for module in (fused, fused_writing):
        monkeypatch.setattr(module, "lies_otherwise", lambda _: False)
    torch._dynamo.reset()
    _, _, beyond = planned_lines(model, x, 0.7)
    assert beyond >= operand


def test_saved_inputs_of_convolutions_are_handed_on_as_they_lie():
    """Inductor would save them turned to channels-last: copies of all weights, from the first kernel to the last."""
    pair, (forward, _), _ = planned_lines(convolutional(), images(), 0.8)
    given = [n.name for n in pair.forward.graph.find_nodes(op="placeholder")]
    saved = {name for name in pair.saved if name in given}
    assert {given[k] for k in (0, 6)} & saved
    names = dict(zip(given, forward.inputs, strict=True))
    for name, kept in zip(pair.saved, forward.outputs[pair.outputs :], strict=True):
        assert name not in saved or kept == names[name]


# --- convolutions and batch norm ---


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def images():
    return torch.randn(4, 3, 24, 24, generator=torch.Generator().manual_seed(5))


class Overwriting(nn.Module):
    """Three inputs of a graph that the backward pass may not read again: it would find other numbers there."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.register_buffer("scale", torch.full((32,), 0.5))
        self.register_buffer("table", torch.ones(2, 16))

    def forward(self, x):
        x.mul_(2).add_(1)
        self.scale.mul_(1.5)
        self.table.view(-1).add_(0.25)
        for layer in self.layers:
            x = torch.sin(layer(x * self.scale) * self.table.view(-1).exp())
        return x


@pytest.mark.parametrize("share", [1.0, 0.3, 0.0])
def test_a_backward_pass_does_not_read_what_the_forward_pass_has_overwritten(share):
    """PyTorch 2.13's own partitions do, below an ``activation_memory_budget`` of 1, with wrong gradients."""
    model, found = Overwriting(), []

    def cut(joint, given, outputs, static, _lower):
        pair = compat_inductor.stock_pair(joint, given, outputs, static, share)
        gone = {n.name for n in compat_inductor.overwritten(joint)}
        assert len(gone) >= 3
        inputs = [n.name for n in joint.graph.nodes if n.name.startswith("primals")]
        pairs = [pair, compat_inductor.extract(joint, outputs, inputs)]
        graph = fuse(joint, outputs)
        options = Options(work=100_000)
        with pytest.raises(errors.Infeasible) as no:
            default_plan(graph.graph, graph.graph.static_bytes, options)
        plan = default_plan(graph.graph, no.value.best_peak, options)
        assert plan.count("recompute")
        planned = compat_inductor.extract(joint, outputs, graph.saved(plan), graph.needed(plan))
        pairs += [planned, graph.ordered(plan, planned)]
        for p in pairs:
            read = {n.name for n in p.backward.graph.find_nodes(op="placeholder")}
            assert not gone & read
            found.append(p)
        raise compat_inductor.Stopped

    def backend(gm, inputs):
        compat_inductor.compile_graph(gm, inputs, partition=cut, finished=lambda _k, _l, call: call)

    with pytest.raises(compat_inductor.Stopped):
        torch.compile(model, backend=backend)(rows())
    assert len(found) == 4


class Attention(nn.Module):
    """Attention that drops, with a norm in front of what follows: both passes normalize alike, so that PyTorch's
    partitions, of which equal nodes are one, have the backward pass read what the forward pass has normalized."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.take, self.norm = heads, nn.Linear(width, 3 * width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.take(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        x = mixed.transpose(1, 2).flatten(-2) + x
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def test_a_partition_that_would_draw_twice_is_put_right_where_pytorch_merges_equal_nodes():
    """What such a partition saves is named after the nodes that are left of equal ones."""
    pairs = []

    def cut(joint, given, outputs, static, _lower):
        for share in (0.7, 0.5, 0.3, 0.1, 0.0):
            pairs.append(compat_inductor.stock_pair(joint, given, outputs, static, share))
        raise compat_inductor.Stopped

    def backend(gm, inputs):
        compat_inductor.compile_graph(gm, inputs, partition=cut, finished=lambda _k, _l, call: call)

    with pytest.raises(compat_inductor.Stopped):
        torch.compile(Attention(), backend=backend)(torch.randn(4, 32, 32))
    for pair in pairs:
        assert any(compat_inductor_partitions.draws(n) for n in pair.forward.graph.nodes)
        assert not any(compat_inductor_partitions.draws(n) for n in pair.backward.graph.nodes)


@pytest.mark.slow
def test_gradients_are_right_where_inputs_are_overwritten():
    call = compiled(model := Overwriting(), budget="88%")
    call(rows()).square().mean().backward()
    (graph,) = compiled_plans(call)
    assert graph.last.as_planned and graph.plan.recomputed
    exact = Overwriting().double()
    exact(rows().double()).square().mean().backward()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=1e-4, atol=1e-7)


def test_convolutions_and_running_statistics_are_inductor_s():
    model, other = convolutional(), convolutional()
    call = compiled(model)
    for _ in range(2):
        found = step(call, model, images())
    plain = torch.compile(other, backend="inductor")
    for _ in range(2):
        wanted = step(plain, other, images())
    assert all(map(torch.equal, found, wanted))
    assert all(map(torch.equal, model.buffers(), other.buffers()))
    (graph,) = compiled_plans(call)
    assert graph.last.measured_peak == graph.plan.peak


@pytest.mark.slow
def test_a_smaller_last_batch_and_evaluation_are_inductor_s_at_fixed_sizes():
    """Code for all sizes adds up in another order, and Adam blows up gradients that are zero but for rounding."""

    def train(**how):
        torch._dynamo.reset()
        model, x = convolutional(), images()
        call, losses = torch.compile(model, **how), []
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model.train()
            for rows in (x, x[:2]):
                optimizer.zero_grad()
                loss = call(rows).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            model.eval()
            with torch.no_grad():
                losses.append(call(x).square().mean())
        return *losses, *model.state_dict().values()

    ours = train(backend="tightship", options=OPTIONS)
    wanted = train(backend="inductor", dynamic=False)
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


@pytest.mark.slow
def test_convolutions_within_a_budget(tmp_path, monkeypatch):
    """Nothing fits as Inductor writes it; what does is kept, and found again where the code is gone."""
    from torch._inductor.utils import fresh_cache

    lowerings, lower = [], compat_inductor.lower

    def counted(*args, **more):
        lowerings.append(1)
        return lower(*args, **more)

    monkeypatch.setattr(compat_inductor, "lower", counted)
    model, exact = convolutional(), convolutional().double()
    for kept in (False, True):
        torch._dynamo.reset()
        lowerings.clear()
        call = compiled(model, budget="65%", cache=str(tmp_path))
        with fresh_cache():
            for _ in range(2):
                found, wanted = step(call, model, images()), step(exact, exact, images().double())
        (graph,) = compiled_plans(call)
        assert graph.last.measured_peak == graph.plan.peak <= graph.plan.budget
        assert any("one after the other" in note for note in graph.notes)
        assert bool(lowerings) != kept
        for a, b in zip(found, wanted, strict=True):
            assert torch.allclose(a.double(), b, rtol=1e-4, atol=1e-6)


def small_images():
    """Convolutions and ReLUs, without a norm."""
    torch.manual_seed(0)
    rows = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()]
    rows += [nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 4)]
    return nn.Sequential(*rows)


def dropped():
    """A net with dropout after its activations."""
    torch.manual_seed(0)
    kinds = (32, nn.ReLU()), (128, nn.ReLU()), (128, nn.GELU())
    rows = [x for k, kind in kinds for x in (nn.Linear(k, 128), kind, nn.Dropout(0.2))]
    return nn.Sequential(*rows, nn.Linear(128, 4))


@pytest.mark.parametrize(
    ("make", "shape", "budget", "masks"),
    [(small_images, (16, 3, 16, 16), "70%", False), (dropped, (256, 32), "75%", True)],
)
def test_where_a_relu_is_positive_is_saved_in_the_place_of_its_result(make, shape, budget, masks):
    """While ReLUs' gradients read whole results, and convolutions' images were read for their own gradient, the first
    did not fit, and the second computed more again. The first also fits by inputs of convolutions."""
    model, other, x = make(), make(), torch.randn(shape)
    call, stock = compiled(model, budget=budget), torch.compile(other, dynamic=False)
    for seed in range(2):
        pairs = zip(step(call, model, x, seed), step(stock, other, x, seed), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    (graph,) = compiled_plans(call)
    assert graph.last.measured_peak == graph.plan.peak <= graph.plan.budget
    assert graph.last.misses == 0
    assert any(name.startswith("le") for name in graph.plan.saved) or not masks


class Routed(nn.Module):
    """Each row through two of four experts: all compute, and their results are turned and weighted."""

    def __init__(self, width=64, count=4):
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) * 0.1)
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) * 0.1)

    def forward(self, x):
        best, which = self.gate(x).softmax(-1).topk(2, -1)
        weights = torch.zeros_like(x[:, : len(self.up)]).scatter(-1, which, best)
        made = torch.einsum("nd,edf->nef", x, self.up).relu()
        return x + (torch.einsum("nef,efd->ned", made, self.down) * weights[..., None]).sum(1)


@pytest.mark.slow
def test_masks_that_are_computed_early_and_results_that_are_turned_are_as_the_model_has_them():
    """While Inductor made masks where they were read, which kept what they are made from, and results that are read
    turned were thought to be written over, this took 14 candidates."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Routed() for _ in range(3)]), torch.randn(256, 64)
    other = copy.deepcopy(model)
    call = compiled(model, budget="75%", cache=None, seconds=1000.0)
    got, want = step(call, model, x), step(torch.compile(other, dynamic=False), other, x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    (graph,) = compiled_plans(call)
    assert graph.last.measured_peak == graph.plan.peak <= graph.plan.budget
    assert graph.plan.lowered <= 8


class Kink(torch.autograd.Function):
    """A ReLU whose backward pass compares its result."""

    @staticmethod
    def forward(ctx, x):
        y = x.clamp(min=0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        return torch.where(ctx.saved_tensors[0] > 0, gradient, 0.0)


class Kinked(nn.Module):
    def forward(self, x):
        return Kink.apply(x)


def test_masks_are_of_the_forward_pass_where_nothing_is_drawn_for_them():
    """What is drawn in the backward pass would draw other numbers before it."""
    net = nn.Sequential(nn.Linear(8, 64), Kinked(), nn.Linear(64, 4))
    joint, outputs = joint_of(net, torch.randn(16, 8))

    def sizes(model):
        return {model.nodes[k]: s.size for k, s in enumerate(model.graph.storages) if k in model.nodes}

    with_masks, without = fuse(joint, outputs), fuse(joint, outputs, masks=False)
    (name,) = set(sizes(with_masks)) - set(sizes(without))
    assert sizes(with_masks)[name] == 16 * 64  # a byte for each number of the ReLU's
    mask = next(n for n in joint.graph.nodes if n.name == name)
    assert without.is_late(mask)
    assert not with_masks.is_late(mask)
    with joint.graph.inserting_before(mask):
        (relu, *_) = mask.all_input_nodes
        drawn = joint.graph.call_function(torch.ops.aten.rand_like.default, (relu,))
    drawn.meta = {**mask.meta, "val": relu.meta["val"]}
    mask.replace_input_with(relu, drawn)
    again = fuse(joint, outputs)
    assert again.is_late(mask)
    assert again.is_late(drawn)


# --- graphs written for memory ---


class Joined(nn.Module):
    """Images that are concatenated with earlier ones, as in a U-Net, with norms that view them in groups."""

    def __init__(self, width=16):
        super().__init__()
        self.rows = nn.ModuleList(self.row(k, width) for k in (3, width, 2 * width))

    @staticmethod
    def row(k, width):
        return nn.Sequential(nn.Conv2d(k, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU())

    def forward(self, x):
        first, second, third = self.rows
        kept = first(x)
        return third(torch.cat([kept, second(kept)], 1))


def ran(gm):
    """The results of a traced graph, on the same numbers each time."""
    torch.manual_seed(7)
    values = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    results = gm(*(torch.randn(v.shape, dtype=v.dtype).as_strided(v.shape, v.stride()) for v in values))
    return torch.utils._pytree.tree_leaves(results)


@pytest.mark.parametrize(
    "make", [lambda: nn.Sequential(Joined.row(3, 8), Joined.row(8, 8)), Joined, lambda: nn.Conv2d(3, 4, 3)]
)
def test_gradients_of_convolutions_are_computed_one_after_the_other_with_the_same_numbers(make):
    from torch._inductor import config

    torch.manual_seed(0)
    joint, _ = joint_of(make(), images())
    with config.patch(layout_optimization=False):
        lean, other = compat_inductor.lean_convolutions(joint)
    masks = [n.args[10] for n in joint.graph.nodes if "convolution_backward" in n.name]
    if not any(m[0] and m[1] for m in masks):
        assert not other
        return
    found = [n for n in lean.graph.nodes if n.target is torch.ops.aten.convolution_backward.default]
    images_alone = [n for n in lean.graph.nodes if "convolution.default" in str(n.target) and n.args[6]]
    assert not any(n.args[10][0] for n in found)  # the images are not read for their own gradient
    assert len(found) == len(masks)
    assert len(images_alone) == sum(m[0] and m[1] for m in masks)
    own = [n for n in lean.graph.nodes if compat_inductor.AS_IT_IS in n.meta]
    assert len(own) == (make is Joined)  # of the two parts of a concatenated image's gradient, the later one
    for a, b in zip(ran(joint), ran(lean), strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("last", [nn.Conv2d(8, 4, 3, stride=2), nn.ConvTranspose2d(8, 4, 3, stride=2)])
def test_images_in_channels_last_change_no_numbers_but_for_rounding(last):
    torch.manual_seed(0)
    joint, _ = joint_of(nn.Sequential(Joined.row(3, 8), Joined.row(8, 8), last), images())
    lean, _ = compat_inductor.lean_convolutions(joint)
    turned = [n for n in lean.graph.nodes if n.kwargs.get("memory_format") is torch.channels_last]
    assert len(turned) >= 3
    for a, b in zip(ran(joint), ran(lean), strict=True):
        assert a is b is None or torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6) is None


def test_images_of_convolutions_lie_in_one_layout_in_both_passes(monkeypatch):
    """Inductor lays out anew what it saves of the last convolution's results, and gradients of an image's weights:
    kernels read one layout and write the other, with neither over the other."""
    monkeypatch.setattr(fused, "masks_of", lambda *_: (set(), set()))  # whole results are saved
    operand = images().numel() // 3 * 16 * 4
    for lean in (False, True):
        torch._dynamo.reset()
        _, _, beyond = planned_lines(convolutional(), images(), 0.8, lean=lean)
        assert (beyond < operand / 4) == lean


def test_images_of_grouped_convolutions_are_left_as_they_lie():
    """Gradients of their weights would take many times the workspace in channels-last."""
    rows = [nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Conv2d(16, 16, 3, groups=16), nn.Tanh(), nn.Conv2d(16, 4, 1)]
    joint, _ = joint_of(nn.Sequential(*rows), images())
    lean, _ = compat_inductor.lean_convolutions(joint)
    for n in lean.graph.nodes:
        if n.target is torch.ops.aten.convolution.default:
            turned = n.args[0].meta["val"].is_contiguous(memory_format=torch.channels_last)
            assert turned == (n.args[8] == 1)


def test_kernels_end_where_much_could_be_given_back():
    """Inductor writes loops one after the other into one kernel, and gives nothing back before all of it has run."""
    from torch._inductor import ir
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.virtualized import V

    joint, outputs = joint_of(nn.Sequential(nn.Linear(32, 32), nn.Tanh()), rows(64))
    pair = compat_inductor.extract(joint, outputs, [n.name for n in joint.graph.find_nodes(op="placeholder")])
    read = SimpleNamespace(get_size=lambda: (), get_numel=lambda: 1024, get_dtype=lambda: torch.float32)
    several = ir.MultiOutput.__new__(ir.MultiOutput)  # a kernel with several results (of FFTs, of attention)
    several.layout = ir.MultiOutputLayout(device=torch.device("cpu"))
    scheduler = SimpleNamespace(
        buffer_names_to_free={"buf0", "buf1", "primals_1"},
        name_to_buf={
            f"buf{k}": SimpleNamespace(node=node, can_free=lambda: True)
            for k, node in enumerate((read, several))
        },
    )
    writing = SimpleNamespace(_ready_to_flush=False, scheduler=scheduler)
    graph = SimpleNamespace(
        removed_buffers=set(), wrapper_code=SimpleNamespace(freed=set()), graph_inputs={"primals_1": read},
        sizevars=SimpleNamespace(optimization_hint=int),
    )  # fmt: skip
    with V.set_graph_handler(graph):
        assert not CppScheduling.ready_to_flush(writing)
        with compat_inductor_partitions.as_planned(pair.backward, backward=True):
            assert not CppScheduling.ready_to_flush(writing)
        compat_inductor.mark_lean(pair.backward, 4096)
        with compat_inductor_partitions.as_planned(pair.backward, backward=True):
            assert CppScheduling.ready_to_flush(writing)
            graph.removed_buffers.add("buf0")  # the caller's tensors alone are left
            assert not CppScheduling.ready_to_flush(writing)
        assert not CppScheduling.ready_to_flush(writing)


def test_an_error_of_ours_while_inductor_writes_code_is_not_wrapped(monkeypatch):
    def unknown(_line, _graph):
        raise errors.Unsupported("a line", "nobody knows what memory it takes")

    monkeypatch.setattr(compat_inductor_lines, "_events_of", unknown)
    model = deep(1)
    with pytest.raises(errors.Unsupported, match="nobody knows what memory it takes"):
        compiled(model)(batch(4)).square().mean().backward()


class Shuffled(nn.Module):
    """Rows in another order each time, which PyTorch 2.13's Inductor does not compile."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))[torch.randperm(x.shape[0])]
        return x


def test_what_inductor_does_not_compile_runs_op_by_op_within_the_budget():
    """With eager's bits, as in exact mode; it used to run in eager, outside the budget."""
    model, x = Shuffled(), torch.randn(256, 64)
    wanted = step(model, model, x)
    call = compiled(model, budget="95%", eager_fallback=True)
    with pytest.warns(Fallback, match="is not compiled and runs op by op, within the budget"):
        got = step(call, model, x)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    (graph,) = compiled_plans(call)
    assert graph.kind == "training" and graph.plan.peak <= graph.plan.budget < graph.plan.peak_before
    assert graph.last.as_planned and graph.last.measured_peak == graph.plan.peak


def test_what_inductor_does_not_compile_is_an_error_where_nothing_may_fall_back():
    model, x = Shuffled(), torch.randn(256, 64)
    with pytest.raises(RuntimeError, match="Not all inputs to pattern found"):
        step(compiled(model, budget="95%", eager_fallback=False), model, x)
