"""Steps whose large intermediates exist in slices alone: within the budget, with the planned bytes, as in eager."""

import copy
import dataclasses
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tightship
from tightship.analysis.patches import Finder
from tightship.errors import BadInput, Infeasible, Unsupported
from tightship.execute import split as split_decision
from tightship.execute import split_trials as deciding
from tightship.execute.fit import fit
from tightship.execute.infer import infer
from tightship.execute.split_trials import verdict
from tightship.frontends.torch.capture.step import capture_forward, capture_step
from tightship.frontends.torch.split_chains import chains
from tightship.frontends.torch.split_rules import SUM
from tightship.frontends.torch.split_windows import windows
from tightship.hlo.remat.instructions import ways
from tightship.planners.default import EXACT, ROUNDING, Options, divide_allow

ALLOW = f"recompute,{ROUNDING}"


class Language(nn.Module):
    def __init__(self, words=2000, width=32, tied=True):
        super().__init__()
        self.embed, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.mix, self.head = nn.Linear(width, width), nn.Linear(width, words, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.norm(x + torch.tanh(self.mix(x))))


def loss_of(model, batch):
    ids, labels = batch
    return F.cross_entropy(model(ids).view(-1, 2000), labels.view(-1))


def batch_of(seed, rows=8, length=32):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 2000, (rows, length), generator=draw)
    return ids, ids.roll(1, 1).masked_fill(ids % 5 == 0, -100)


def fitted(model, budget, allow=ALLOW, loss=loss_of, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"cache": None, "seconds_per_op": 0.0, "seconds": 1.0, "strict": True} | options
    return fit(model, loss, optimizer, batch_of(0), budget, allow=allow, **options)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Language()


def as_planned(step):
    assert step.last.misses == 0
    assert step.last.measured_peak == step.last.process_peak == step.plan.peak


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_language_model_trains_below_the_floor_of_whole_logits(tied):
    torch.manual_seed(0)
    model = Language(tied=tied)
    twin, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    with pytest.raises(Infeasible, match="splitting"):
        fitted(model, "50%", allow="recompute")
    step = fitted(model, "50%")
    assert any(note.startswith("split: ") and "slices" in note for note in step.notes)
    for number in range(4):
        batch = batch_of(number)
        losses = []
        for other in (twin, wide):
            loss = loss_of(other, batch)
            loss.backward()
            torch.optim.SGD(other.parameters(), lr=0.1).step()
            other.zero_grad()
            losses.append(loss.detach())
        loss = step(batch)
        assert abs(loss - losses[1]) <= max(abs(losses[0] - losses[1]), 4e-7 * losses[1])
    as_planned(step)
    for p, q, r in zip(model.parameters(), twin.parameters(), wide.parameters(), strict=True):
        theirs, ours = (q.double() - r).norm(), (p.double() - r).norm()
        assert ours <= 1.1 * theirs + 1e-9


def test_nothing_is_split_that_was_not_allowed_or_is_not_needed(model):
    step = fitted(model, "100%", allow="recompute")
    assert not any("split" in note for note in step.notes)
    step = fitted(model, None)
    assert not any("split" in note for note in step.notes)


def test_exact_slices_alone_are_no_answer_where_sums_round(model):
    with pytest.raises(Infeasible, match=r"no chain of ops can be split \(allow=split\)"):
        fitted(model, "50%", allow=f"recompute,{EXACT}")


def test_a_budget_below_all_slices_says_what_slices_need(model):
    with pytest.raises(Infeasible, match=r"splitting: \d+ slices need"):
        fitted(model, "8%")


def test_numbers_that_change_reach_the_slices(model):
    factor = [1.0]

    def loss(model, batch):
        ids, labels = batch
        return F.cross_entropy(model(ids).view(-1, 2000) * factor[0], labels.view(-1)) * factor[0]

    twin = copy.deepcopy(model)
    step = fitted(model, "55%", loss=loss)
    for number in range(3):
        factor[0] = 1.0 + number / 4
        batch = batch_of(number)
        eager = loss(twin, batch)
        eager.backward()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        twin.zero_grad()
        assert torch.allclose(step(batch), eager.detach(), rtol=1e-6)
    assert step.reserved
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-6)


def test_backward_and_update_apart_leave_the_gradients_of_eager(model):
    twin = copy.deepcopy(model)
    step = fitted(model, "60%", split=True)
    loss = step.backward(batch_of(1))
    eager = loss_of(twin, batch_of(1))
    eager.backward()
    assert torch.allclose(loss, eager.detach(), rtol=1e-6)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-7)


def trained(model, batches, accumulate=1, clip=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(batches):
        loss_of(model, batch).backward()
        if number % accumulate == accumulate - 1:
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "options", [{"accumulate": 2}, {"clip_norm": 0.05}, {"accumulate": 2, "clip_norm": 0.05}], ids=str
)
def test_accumulated_and_clipped_gradients_are_eagers_but_for_rounding(model, options):
    twin = copy.deepcopy(model)
    step = fitted(model, "65%", **options)
    batches = [batch_of(number) for number in range(4)]
    for batch in batches:
        step(batch)
    assert any(note.startswith("split: ") for note in step.notes)
    trained(twin, batches, options.get("accumulate", 1), options.get("clip_norm"))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-6)


def test_each_kind_of_batch_has_slices_of_its_own(model):
    twin = copy.deepcopy(model)
    step = fitted(model, "50%")
    batches = [batch_of(0), batch_of(1, rows=7, length=31), batch_of(2, rows=1, length=5), batch_of(3)]
    for batch in batches:
        step(batch)
        assert step.plan.peak <= step.plan.budget
    trained(twin, batches)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-6)


class Frozen(nn.Module):
    """A trained layer before a wide block that is not: no slices of it add up."""

    def __init__(self):
        super().__init__()
        self.first, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 1024), nn.Linear(1024, 16)
        for p in (*self.up.parameters(), *self.down.parameters()):
            p.requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        return x + self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize(
    "rows", [slice(32), slice(16, 48), slice(None, None, 2)], ids=["first", "inner", "second"]
)
def test_some_rows_of_what_is_cut_are_no_slice_of_it(rows):
    """An op that reads some rows alone has none of each slice, even where it may be cut along another dimension."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 10))
    twin = copy.deepcopy(model)

    def loss(model, batch):
        z = torch.relu(model[0](batch)) * 2
        return model[1](z[rows]).square().mean() + torch.tanh(z).mean()

    def step_of(budget, allow):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return fit(model, loss, optimizer, batch, budget, allow=allow, cache=None, seconds=1.0, strict=True)

    batch = torch.randn(64, 16)
    for chain in chains(capture_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch)):
        assert chain.units > 1
    with pytest.raises(Infeasible):  # having looked at what slices would come to
        step_of("static+10%", "recompute")
    step = step_of("static+80%", ALLOW)
    ours = step(batch)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    theirs = loss(twin, batch)
    theirs.backward()
    optimizer.step()
    torch.testing.assert_close(ours, theirs.detach())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    as_planned(step)


def test_exact_slices_leave_the_bits_of_eager():
    torch.manual_seed(0)
    model = Frozen()
    twin, batch = copy.deepcopy(model), torch.randn(1024, 16)

    def loss(model, x):
        return model(x).square().mean()

    def optimizer(model):
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    options = {"cache": None, "seconds_per_op": 0.0, "seconds": 1.0, "strict": True}
    step = fit(
        model, loss, optimizer(model), batch, "45%", allow=f"recompute,{EXACT}", verify_every=1, **options
    )
    assert any(note.startswith("split: ") and note.endswith("bit-identical") for note in step.notes)
    other = optimizer(twin)
    for _ in range(3):
        eager = loss(twin, batch)
        eager.backward()
        other.step()
        other.zero_grad()
        assert torch.equal(step(batch), eager.detach())
    as_planned(step)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


class Attending(nn.Module):
    """Attention written out, over a batch of which each row is padded by itself."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x, padded):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        mask = torch.zeros(padded.shape).masked_fill(padded, -1e9)[:, None, None, :]
        scores = q @ k.transpose(-1, -2) / 2 + mask.expand(-1, 1, x.shape[1], -1)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))


def test_scores_of_attention_exist_by_heads_with_the_bits_of_eager():
    torch.manual_seed(0)
    model = Attending()
    twin = copy.deepcopy(model)
    batch = torch.randn(2, 128, 16), torch.arange(128)[None] >= torch.tensor([[100], [128]])

    def loss(model, batch):
        return model(*batch).square().mean()

    options = {"cache": None, "seconds_per_op": 0.0, "seconds": 1.0, "strict": True, "verify_every": 1}
    optimizer, other = (torch.optim.AdamW(m.parameters()) for m in (model, twin))
    step = fit(model, loss, optimizer, batch, "22%", allow=f"recompute,{EXACT}", **options)
    assert any("in 8 slices, bit-identical" in note for note in step.notes)
    for _ in range(3):
        eager = loss(twin, batch)
        eager.backward()
        other.step()
        other.zero_grad()
        assert torch.equal(step(batch), eager.detach())
    as_planned(step)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(optimizer.state[p][n], x) for n, x in other.state[q].items())


def test_comparing_bits_and_rounding_otherwise_exclude_each_other(model):
    with pytest.raises(BadInput, match="verify_every"):
        fitted(model, "50%", verify_every=2)


def test_allow_is_divided_into_the_planners_part_and_ours():
    assert divide_allow(Options(allow=f"recompute, {ROUNDING},offload")) == (
        Options(allow="recompute,offload"),
        ROUNDING,
    )
    assert divide_allow(Options(allow=f"{EXACT},recompute")) == (Options(), EXACT)
    assert divide_allow(Options()) == (Options(), "")


# ---- what is believed of slices


def program_of(model, loss, batch):
    return capture_step(model, loss, None, batch)


def verdicts(program, slices=4, **options):
    (chain, *_) = chains(program)
    return {
        (program.graph.ops[k].target, SUM in axis.results.values()): verdict(
            program, k, axis, chain.units, slices, **options
        )
        for k, axis in chain.ops.items()
    }


def test_rows_of_a_softmax_are_the_same_bits_and_sums_are_never_said_to_be(model):
    found = verdicts(program_of(model, loss_of, batch_of(0)))
    assert found["aten._log_softmax.default", False] == "same"
    assert found["aten._log_softmax_backward_data.default", False] == "same"
    assert found["aten.mm.default", True] == "rounds"
    assert found["aten.nll_loss_forward.default", True] == "rounds"


def test_sums_in_16_bits_are_rounded_once(monkeypatch):
    torch.manual_seed(0)
    model = Language().bfloat16()
    program = program_of(model, lambda m, b: loss_of(m, b).float(), batch_of(0))
    assert verdicts(program, 16)["aten.mm.default", True] == "rounds"
    monkeypatch.setattr(deciding, "_KNOWN", {})
    monkeypatch.setattr(deciding, "added_wide", lambda *_: False)
    assert verdicts(program, 16)["aten.mm.default", True] == "wrong"


def test_a_rule_that_is_wrong_is_found_out(model, monkeypatch):
    program = program_of(model, loss_of, batch_of(0))
    (chain, *_) = chains(program)
    k = next(k for k in chain.ops if program.graph.ops[k].target == "aten._log_softmax.default")
    other = copy.copy(chain.ops[k])
    object.__setattr__(other, "args", {0: 1})  # along the classes, over which each row is summed
    object.__setattr__(other, "results", {0: 1})
    monkeypatch.setattr(deciding, "_KNOWN", {})
    assert verdict(program, k, other, 4, 4) == "wrong"
    assert verdict(program, k, other, 4, 4, bits=False) == "wrong"


# ---- forward passes, patch by patch


class Small(nn.Module):
    """The shape of a mobile network: large images at first, few channels between."""

    def __init__(self):
        super().__init__()

        def block(width, out, stride):
            up = nn.Sequential(
                nn.Conv2d(width, 6 * width, 1, bias=False), nn.BatchNorm2d(6 * width), nn.ReLU6(True)
            )
            deep = nn.Conv2d(6 * width, 6 * width, 3, stride, 1, groups=6 * width, bias=False)
            return nn.Sequential(
                up, deep, nn.BatchNorm2d(6 * width), nn.ReLU6(True), nn.Conv2d(6 * width, out, 1)
            )

        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), block(8, 8, 1), block(8, 16, 2), block(16, 16, 2))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def inferred(model, x, budget, **options):
    options = {"cache": None, "seconds_per_op": 0.0, "seconds": 1.0, "strict": True, "fresh": False} | options
    return infer(model, x, budget, **options)


@pytest.fixture
def network():
    torch.manual_seed(0)
    model = Small().eval()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_(0, 0.1)
            m.running_var.uniform_(0.5, 2)
    return model, torch.randn(1, 3, 128, 128)


@pytest.mark.parametrize("way", [EXACT, ROUNDING])
def test_a_network_runs_in_a_quarter_of_its_arena(network, way):
    model, x = network
    whole = inferred(model, x, None)
    static = whole.plan.static
    budget = static + whole.plan.arena // 4
    run = inferred(model, x, budget, allow=f"recompute,{way}")
    with torch.no_grad():
        for _ in range(2):
            y, want = run(x), model(x)
            assert torch.equal(y, want) if way == EXACT else torch.allclose(y, want, rtol=1e-5, atol=1e-6)
            x = torch.randn_like(x)
    as_planned(run)
    assert run.last.heap == 0
    assert run.plan.peak <= budget
    assert run.measure()["unplanned_peak"] == whole.measure()["unplanned_peak"] > run.plan.peak_before
    more = sum(op.flops for op in run.graph.ops) - sum(op.flops for op in whole.graph.ops)
    assert 0 < more < 0.5 * sum(op.flops for op in whole.graph.ops)
    assert any(f"{more:,} operations more" in note for note in run.notes)
    if way == EXACT:
        assert any(note.endswith("rows, bit-identical") for note in run.notes)


def test_a_forward_pass_that_does_not_fit_is_told_of_slices(network):
    model, x = network
    static = inferred(model, x, None).plan.static
    with pytest.raises(Infeasible, match=r"splitting \(allow=recompute,split\).* operations"):
        inferred(model, x, static + 600_000)
    with pytest.raises(Infeasible, match="splitting: "):
        inferred(model, x, static + 20_000, allow=f"recompute,{EXACT}")


def test_kernels_that_give_other_bits_for_slices_are_found_out(network, monkeypatch):
    """A probe that sees every convolution as rounding leaves nothing to take where bits count."""
    model, x = network
    static = inferred(model, x, None).plan.static
    known = deciding.patch_verdict

    def strict(program, k, region, slices, *, bits=True):
        found = known(program, k, region, slices, bits=bits)
        conv = "convolution" in program.graph.ops[k].target
        return ("wrong" if bits else "rounds") if conv else found

    monkeypatch.setattr(split_decision, "patch_verdict", strict)
    with pytest.raises(Infeasible):
        inferred(model, x, static + 600_000, allow=f"recompute,{EXACT}")
    run = inferred(model, x, static + 600_000, allow=f"recompute,{ROUNDING}")
    assert any("bits may differ" in note for note in run.notes)


def test_wrong_rows_are_found_by_the_probe(network, monkeypatch):
    program = capture_forward(*network)
    finder = Finder(program.graph, partial(windows, program))
    region, _ = finder.best(max(finder.needs) - 1).slices[0]
    k = next(k for k in region.ops if program.calls[k].fn is torch.ops.aten.convolution.default)
    right = deciding._takes

    def off(*given):
        rows = [row for row in right(*given) if row[1].start]
        return [(w, dataclasses.replace(t, start=t.start - 1, stop=t.stop - 1)) for w, t in rows]

    monkeypatch.setattr(deciding, "_KNOWN", {})
    assert deciding.patch_verdict(program, k, region, 3, bits=False) in ("same", "rounds")
    monkeypatch.setattr(deciding, "_takes", off)
    assert deciding.patch_verdict(program, k, region, 3, bits=False) == "wrong"


def test_a_model_is_planned_in_slices(network):
    model, x = network
    static = inferred(model, x, None).plan.static
    options = {"train": False, "cache": None, "hand_out": False}
    planned = tightship.plan(model, x, static + 600_000, allow=f"recompute,{EXACT}", **options)
    tightship.check(planned)
    assert planned.peak <= static + 600_000
    whole = tightship.plan(model, x, None, **options)
    assert planned.rows()["peak_before"] == whole.rows()["peak_before"] > 4 * 600_000
    with pytest.raises(Unsupported, match="ops are split in models of PyTorch's"):
        tightship.api.plan_graph(whole.graph, static + 600_000, allow=EXACT)
    with pytest.raises(Unsupported, match="ops are split in models"):
        tightship.frontier(whole.graph, allow=EXACT)


@pytest.mark.parametrize("way", [EXACT, ROUNDING])
def test_planners_of_modules_say_that_slices_are_cut_before(way):
    with pytest.raises(Unsupported, match=f"allow={way} for a module of HLO"):
        ways(f"recompute,{way}")
