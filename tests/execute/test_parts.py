"""A step in parts: what people do with gradients between backward pass and update."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from support import plans
from support.state import differences, snapshot
from tightship.errors import BadInput, Infeasible, Unsupported, VerificationFailed
from tightship.execute import allocator, eager
from tightship.execute.fit import fit
from tightship.execute.interpreter import Fallback
from tightship.execute.parts import Loop
from tightship.graph import aligned

STEPS = 6


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("measurements")


def make():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.Dropout(0.2), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.BatchNorm1d(64),
        nn.Tanh(), nn.Linear(64, 5),
    )  # fmt: skip
    model.spare = nn.Parameter(torch.ones(3))  # gets no gradient
    return model


def batches(count=2 * STEPS):
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(32, 16, generator=g), torch.randint(5, (32,), generator=g)) for _ in range(count)]


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def adam(model, **options):
    return torch.optim.Adam(model.parameters(), lr=0.01, **options)


def recompute(graph, budget=None):
    """Where there is a forward pass."""
    whole = any(op.phase == "forward" for op in graph.ops)
    return (plans.recompute if whole else plans.keep)(graph, budget)


def pair(kept, make_optimizer=adam, loss=loss_fn, **options):
    """A model and optimizer for eager, the same for ours, and the step."""
    model, ours = make(), make()
    theirs, own = make_optimizer(model), make_optimizer(ours)
    options = {"planner": recompute, "strict": True, "cache": kept, "seconds_per_op": 0.0} | options
    return (model, theirs), (ours, own), fit(ours, loss, own, batches(1)[0], **options)


def alike(a, b, **more):
    found = differences(snapshot(*a), snapshot(*b))
    assert not [f for f in found if "keys" not in f], found


def as_planned(step):
    m = step.measure()
    assert m["misses"] == 0
    assert m["measured_peak"] == m["planned_peak"]


def run(loop, model, optimizer, scaler=None, count=STEPS):
    """The usual loop in eager."""
    losses = []
    torch.manual_seed(2)
    for k, batch in enumerate(batches(count * loop.accumulate)):
        loss = loss_fn(model, batch)
        losses.append(loss.detach())
        (loss if scaler is None else scaler.scale(loss)).backward()
        if (k + 1) % loop.accumulate:
            continue
        finite = True
        if scaler is not None and loop.clip_norm is not None:
            scaler.unscale_(optimizer)
        if loop.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), loop.clip_norm)
            finite = not loop.skip_nonfinite or bool(norm.isfinite())
        if loop.clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), loop.clip_value)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif finite:
            optimizer.step()
        optimizer.zero_grad()
    return losses


def run_ours(step, count=STEPS):
    torch.manual_seed(2)
    return [step(batch) for batch in batches(count * step.loop.accumulate)]


LOOPS = {
    "norm": {"clip_norm": 0.1},
    "value": {"clip_value": 0.01},
    "accumulated": {"accumulate": 3},
    "accumulated and clipped": {"accumulate": 2, "clip_norm": 0.1, "clip_value": 0.02},
    "guarded": {"clip_norm": 0.1, "skip_nonfinite": True},
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_fit_does_with_gradients_is_what_eager_does(kept, name):
    theirs, ours, step = pair(kept, **LOOPS[name], verify_every=2)
    expected = run(Loop(**LOOPS[name]), *theirs)
    assert not differences(expected, [x.detach() for x in run_ours(step)])
    alike(theirs, ours)
    as_planned(step)
    assert all(p.grad is None for p in ours[0].parameters())


@pytest.mark.parametrize("more", [{}, {"skip_nonfinite": True}])
def test_norms_add_up_in_the_models_order_whatever_the_groups(kept, more):
    """The last bit of a norm depends on it."""

    def groups(model):
        rows = [p for p in model.parameters() if p.dim() < 2], [p for p in model.parameters() if p.dim() > 1]
        return torch.optim.AdamW([{"params": row, "weight_decay": k * 0.1} for k, row in enumerate(rows)])

    theirs, ours, step = pair(kept, groups, clip_norm=0.1, **more)
    model, optimizer = theirs
    for seed, batch in enumerate(batches(40)):
        torch.manual_seed(seed)
        step(batch)
        torch.manual_seed(seed)
        loss_fn(model, batch).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(norm, step.grad_norm)
    alike(theirs, ours)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_scaler_scales_unscales_skips_and_updates(kept, fused, clip):
    """The scale grows until gradients overflow; then the update is left out."""

    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1, growth_factor=1.9)

    def make_optimizer(model):
        return adam(model, fused=fused)

    a, b = scaler(), scaler()
    theirs, ours, step = pair(kept, make_optimizer, scaler=b, clip_norm=clip)
    expected = run(Loop(clip_norm=clip), *theirs, a, count=8)
    assert not differences(expected, [x.detach() for x in run_ours(step, 8)])
    alike(theirs, ours)
    assert a.state_dict() == b.state_dict()
    assert a.get_scale() < 2.0**127 * 1.9  # an update was left out
    as_planned(step)


def test_updates_with_gradients_that_are_not_finite_are_left_out(kept):
    _, (model, _), step = pair(kept, skip_nonfinite=True)
    x, y = batches(1)[0]
    step((x, y))
    before = snapshot(model)["parameters"]
    step((x * float("inf"), y))
    assert step.skipped == 1
    assert not step.grad_norm.isfinite()
    assert not differences(before, snapshot(model)["parameters"])
    assert all(p.grad is None for p in model.parameters())


def between(model, k):
    """What people do with gradients, and with whether they are there."""
    if k == 1:
        for p in model[0].parameters():
            p.grad = None
    if k == 2:
        model[4].weight.grad = model[4].weight.grad.t().contiguous().t()
    if k == 3:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.add_(torch.randn_like(p))
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_in_parts_anything_may_happen_between_them(kept, set_to_none):
    theirs, ours, step = pair(kept, split=True, verify_every=3)
    logs = []
    for model, optimizer, mine in ((*theirs, False), (*ours, True)):
        torch.manual_seed(2)
        logs.append([])
        for k, batch in enumerate(batches()):
            if mine:
                loss = step.backward(batch).detach()
            else:
                loss = loss_fn(model, batch)
                loss.backward()
            logs[-1].append((loss.detach(), between(model, k)))
            if k % 3 == 1:
                continue  # and so accumulates
            step.update() if mine else optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    assert not differences(*logs)
    alike(theirs, ours)
    as_planned(step)


def test_update_leaves_gradients_as_eager_does(kept):
    _, (model, _), step = pair(kept, split=True)
    step.backward(batches(1)[0])
    step.update()
    assert model[0].weight.grad is not None
    with pytest.raises(Unsupported, match=r"'0\.weight' has a gradient"):
        step(batches(1)[0])


def test_without_an_optimizer_there_is_the_backward_pass(kept):
    theirs, ours = make(), make()
    step = fit(ours, loss_fn, None, batches(1)[0], planner=recompute, strict=True, cache=kept)
    batch = batches(1)[0]
    torch.manual_seed(3)
    loss_fn(theirs, batch).backward()
    torch.manual_seed(3)
    step.backward(batch)
    assert not differences(snapshot(theirs)["gradients"], snapshot(ours)["gradients"])
    as_planned(step)
    with pytest.raises(BadInput, match="no optimizer"):
        step.update()
    with pytest.raises(BadInput, match="no optimizer"):
        step(batch)


def test_an_optimizer_with_a_closure_runs_the_backward_pass_in_it(kept):
    def make_optimizer(model):
        return torch.optim.LBFGS(model.parameters(), max_iter=3)

    theirs, ours, step = pair(kept, make_optimizer, split=True)
    assert any("closure" in note for note in step.notes)
    for model, optimizer, mine in ((*theirs, False), (*ours, True)):
        torch.manual_seed(2)

        def closure(model=model, optimizer=optimizer, mine=mine):
            optimizer.zero_grad()
            if mine:
                return step.backward(batches(1)[0])
            loss = loss_fn(model, batches(1)[0])
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.step(closure)
    alike(theirs, ours)
    with pytest.raises(Unsupported, match="closure"):
        step.update()


def test_a_scheduler_sees_the_updates(kept):
    _, (_, optimizer), step = pair(kept, clip_norm=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(batches(1)[0])
        schedule.step()


def test_every_parameter_gets_its_gradient_in_parts_and_the_optimizers_alone_elsewhere(kept):
    def half(model):
        return torch.optim.SGD(model[4:].parameters(), lr=0.1)

    _, (model, _), step = pair(kept, half, split=True)
    step.backward(batches(1)[0])
    assert model[0].weight.grad is not None
    _, (model, _), step = pair(kept, half, clip_norm=1.0)
    step(batches(1)[0])
    assert all(p.grad is None for p in model.parameters())


def test_a_share_is_of_the_part_that_needs_most(kept):
    """An optimizer's state is static in all of them, and gradients that are added to are not."""
    (theirs, _), _, whole = pair(kept)
    options = {"planner": None, "place": False, "budget": "static+95%"}
    _, _, step = pair(kept, split=True, **options)
    _, _, several = pair(kept, accumulate=2, **options)
    sizes = sum(p.numel() * 4 for p in theirs.parameters())
    static = whole.plan.static
    assert step.plan.static == static > 3 * sizes  # parameters, and two of Adam's of each
    assert step._limit == static + (step.plan.peak_before - static) * 95 // 100
    adding = next(v for v in several._variants if v.part == "adding").executor.plan
    assert adding.static > static
    assert several._limit == static + (adding.peak_before - static) * 95 // 100


def test_the_update_keeps_the_budget_beside_the_batch(kept):
    wide = (torch.randn(3000, 16), torch.randint(5, (3000,)))
    model = make()
    step = fit(model, loss_fn, adam(model), wide, cache=kept, split=True, seconds_per_op=0.0)
    assert step._beside == 3000 * 16 * 4 + 3000 * 8
    for _ in range(2):
        step.backward(wide)
        step.update()
        model.zero_grad()
    m = step.measure()
    assert m["planned_peak"] == m["measured_peak"]


def test_the_update_is_planned_again_beside_a_larger_batch(kept):
    wide = (torch.randn(300, 16), torch.randint(5, (300,)))
    model = make()
    step = fit(
        model, loss_fn, adam(model), batches(1)[0], "100MiB", cache=kept, split=True, seconds_per_op=0.0
    )

    def room():
        return next(v for v in step._variants if v.part == "update").executor.plan.budget + step._beside

    assert room() == step._limit
    step.backward(wide)
    step.update()
    assert room() == step._limit


@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_run_of_preparing_finds_the_code_as_it_was(kept, accumulate):
    """Several parts are captured; each sees the first batch weight, and so does the first step."""
    weights, seen = iter([0.5, 0.25, 0.125, 0.0625]), []

    def weighted(model, batch):
        seen.append(next(weights))
        return seen[-1] * loss_fn(model, batch)

    _, _, step = pair(kept, loss=weighted, split=True, accumulate=accumulate)
    assert seen == []  # put back, too
    step.backward(batches(1)[0])
    assert seen == [0.5]


def test_what_an_optimizer_cannot_do_is_noted_once(kept):
    _, (model, _), step = pair(kept, lambda m: torch.optim.LBFGS(m.parameters()), split=True)
    for _ in range(3):
        model.zero_grad()
        step.backward(batches(1)[0])
    assert len([n for n in step._notes if "closure" in n]) == 1


def test_microbatches_need_the_gradients_beside_them(kept):
    """A budget in which the backward pass fits, but not beside the sum of the gradients before it."""
    model = make()
    step = fit(model, loss_fn, adam(model), batches(1)[0], cache=kept, split=True)
    least = step.plan.lower_bound
    with pytest.raises(Infeasible):
        fit(model, loss_fn, adam(model), batches(1)[0], least, cache=kept, accumulate=2)


def test_verification_compares_gradients(kept, monkeypatch):
    _, _, step = pair(kept, split=True, verify_every=1)
    step.backward(batches(1)[0])
    monkeypatch.setattr(eager, "bit_identical", lambda a, b: a.shape != (64, 16))
    with pytest.raises(VerificationFailed, match=r"gradient of '0\.weight'"):
        step.backward(batches(1)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "accumulate is the number"),
        ({"accumulate": 1.5}, "accumulate is the number"),
        ({"clip_norm": -1.0}, "clip_norm is a limit above 0"),
        ({"clip_value": float("nan")}, "clip_value is a limit above 0"),
        ({"scaler": object()}, r"scaler is a torch\.amp\.GradScaler"),
    ],
)
def test_bad_options_are_told(kept, options, message):
    with pytest.raises(BadInput, match=message):
        pair(kept, **options)


def clears(model, batch):
    model.zero_grad()
    return loss_fn(model, batch)


def sets(model, batch):
    model[0].weight.grad = None
    return loss_fn(model, batch)


def scales(model, batch):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)
    return loss_fn(model, batch)


def reads(model, batch):
    before = sum(float(p.grad is not None) for p in model.parameters())
    return loss_fn(model, batch) * (1 + before)


def adds(model, batch):
    loss_fn(model, batch).backward()
    return loss_fn(model, batch)


def adds_to_the_input(model, batch):
    x = batch[0].clone().requires_grad_()
    loss_fn(model, (x, batch[1])).backward(inputs=[x])
    return loss_fn(model, (x.detach() + x.grad.sign(), batch[1]))


GRADIENTS_IN_CODE = [clears, sets, scales, reads, adds]


@pytest.mark.parametrize("code", GRADIENTS_IN_CODE)
def test_code_that_uses_gradients_that_are_added_to_runs_in_eager(kept, code):
    """They were added to beside it, silently."""
    with pytest.warns(Fallback, match="gradients from before"):
        theirs, ours, step = pair(kept, loss=code, accumulate=2, strict=False)
    for k, batch in enumerate(batches(4)):
        torch.manual_seed(k)
        code(theirs[0], batch).backward()
        if k % 2:
            theirs[1].step()
            theirs[1].zero_grad()
        torch.manual_seed(k)
        step(batch)
    alike(theirs, ours)
    with pytest.raises(Unsupported, match="gradients from before"):
        pair(kept, loss=code, accumulate=2)


@pytest.mark.parametrize("code", GRADIENTS_IN_CODE)
def test_code_that_uses_gradients_that_are_not_there_is_planned_and_refused_where_they_are(kept, code):
    _, _, step = pair(kept, loss=code, split=True)
    step.backward(batches(1)[0])
    with pytest.raises(Unsupported, match="gradients from before"):
        step.backward(batches(1)[0])


def test_gradients_of_other_tensors_are_planned_where_gradients_are_added_to(kept):
    theirs, ours, step = pair(kept, loss=adds_to_the_input, accumulate=2)
    for k, batch in enumerate(batches(4)):
        torch.manual_seed(k)
        adds_to_the_input(theirs[0], batch).backward()
        if k % 2:
            theirs[1].step()
            theirs[1].zero_grad()
        torch.manual_seed(k)
        step(batch)
    as_planned(step)
    alike(theirs, ours)


def test_what_cannot_be_added_to_is_refused(kept):
    _, (model, _), step = pair(kept, split=True)
    weight = model[0].weight
    weight.grad = torch.ones_like(weight).to_sparse()
    with pytest.raises(Unsupported, match=r"the gradient of .*, which is torch\.sparse_coo"):
        step.backward(batches(1)[0])
    weight.grad = torch.ones_like(weight, requires_grad=True)
    with pytest.raises(Unsupported, match="requires a gradient"):
        step.update()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("more", [{}, {"clip_norm": 0.1}, {"accumulate": 2}, {"split": True}])
def test_steps_under_anomaly_detection_are_eagers(kept, more):
    """They are said to be, and those after them are planned again."""
    with torch.autograd.set_detect_anomaly(True):
        theirs, ours, step = pair(kept, strict=False, **more)
    loop = Loop(**{k: x for k, x in more.items() if k != "split"})
    rows = batches(4)
    torch.manual_seed(2)
    model, optimizer = theirs
    for k, batch in enumerate(rows):
        loss_fn(model, batch).backward()
        if (k + 1) % loop.accumulate == 0:
            loop.clipped(dict(model.named_parameters()))
            optimizer.step()
            optimizer.zero_grad()
    torch.manual_seed(2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for k, batch in enumerate(rows):
            with torch.autograd.set_detect_anomaly(1 <= k < 3):
                if step._split:
                    step.backward(batch)
                    step.update()
                    ours[1].zero_grad()
                else:
                    step(batch)
    assert [w.filename for w in said if "set_detect_anomaly" in str(w.message)] == [__file__]
    alike(theirs, ours)


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in", "ignore:under torch")
def test_an_anomaly_is_found_as_in_eager(kept):
    _, _, step = pair(kept, strict=False)
    x, y = batches(1)[0]
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="returned nan values"):
        step((x * float("nan"), y))
    with torch.autograd.set_detect_anomaly(True), pytest.raises(Unsupported, match="set_detect_anomaly"):
        pair(kept)[2](batches(1)[0])


class Ops(TorchDispatchMode):
    """Counts ops, and makes each product half as large."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, fn, types, args=(), kwargs=None):
        self.seen.append(str(fn))
        out = fn(*args, **(kwargs or {}))
        return out * 0.5 if fn is torch.ops.aten.addmm.default else out


class Functions(TorchFunctionMode):
    """The same with functions."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, fn, types, args=(), kwargs=None):
        out = fn(*args, **(kwargs or {}))
        if fn is not F.linear:
            return out
        self.seen.append(fn)
        return out * 0.5


@pytest.mark.parametrize("more", [{}, {"split": True}])
@pytest.mark.parametrize("mode", [Ops, Functions])
def test_steps_under_modes_of_the_callers_are_eagers(kept, mode, more):
    """The mode sees every op, and what it changes is changed; steps after it are planned again."""
    theirs, ours, step = pair(kept, strict=False, **more)
    seen = []
    for model, optimizer in (theirs, ours):
        torch.manual_seed(2)
        for k, batch in enumerate(batches(4)):
            with mode() if 1 <= k < 3 else nullcontext() as watch, warnings.catch_warnings():
                warnings.simplefilter("ignore", Fallback)
                if model is theirs[0]:
                    loss_fn(model, batch).backward()
                    optimizer.step()
                elif more:
                    step.backward(batch)
                    step.update()
                else:
                    step(batch)
            optimizer.zero_grad()
            seen.append(watch and [x for x in watch.seen if "detach" not in str(x)])
        assert model is theirs[0] or (
            step.last is not None and any(mode.__base__.__name__ in n for n in step.notes)
        )
    assert seen[:4] == seen[4:]
    alike(theirs, ours)
    with mode(), pytest.raises(Unsupported, match=mode.__base__.__name__):
        pair(kept)[2](batches(1)[0])


def test_gradients_that_share_a_storage(kept):
    """Views of one weight get gradients that are views of one tensor, or copies of it, as in eager."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return torch.tanh(x @ torch.cat([self.a, self.b], 1)).chunk(2, 1)[0] + x @ (self.a + self.b)

    theirs, ours = Both(), Both()
    data = torch.randn(3, 16, 8)
    step = fit(
        ours,
        lambda m, x: m(x).sum(),
        None,
        data[0],
        planner=recompute,
        strict=True,
        cache=kept,
        verify_every=1,
    )
    for x in data:
        theirs(x).sum().backward()
        step.backward(x)
    assert not differences(snapshot(theirs)["gradients"], snapshot(ours)["gradients"])
    as_planned(step)


def test_the_default_planner_takes_the_parts(kept):
    theirs, ours, step = pair(kept, planner=None, budget="static+90%", accumulate=2, clip_norm=0.1)
    expected = run(Loop(accumulate=2, clip_norm=0.1), *theirs)
    assert not differences(expected, [x.detach() for x in run_ours(step)])
    alike(theirs, ours)
    as_planned(step)
    assert step.measure()["measured_peak"] <= step.measure()["budget"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_count_from_the_backward_pass_to_the_update(kept, accumulate):
    """Measured from outside, around clipping of one's own: everything that is there meanwhile was planned for."""
    _, (model, optimizer), step = pair(kept, split=True, accumulate=accumulate)
    for batch in batches(3):
        with allocator.Meter() as meter:
            for _ in range(accumulate):
                step.backward(batch)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            step.update()
        optimizer.zero_grad()
    measured = step.measure()
    assert measured["misses"] == 0
    static = sum(aligned(t.nbytes) for t in (*model.state_dict().values(), *batch))
    static += sum(aligned(t.nbytes) for s in optimizer.state.values() for t in s.values())
    assert static + meter.peak == measured["measured_peak"] == measured["planned_peak"]


def wide():
    """Gradients take as many bytes as what is saved for the backward pass."""
    torch.manual_seed(0)
    rows = [row for _ in range(6) for row in (nn.Linear(128, 128), nn.Tanh(), nn.LayerNorm(128))]
    return nn.Sequential(nn.Linear(16, 128), *rows, nn.Linear(128, 5))


@pytest.mark.parametrize("budget", ["80%", "70%"])
@pytest.mark.parametrize("how", ["split", "skip_nonfinite", "accumulate"])
def test_where_an_arena_beside_all_gradients_costs_recomputation_the_heap_is_taken(kept, how, budget):
    model, other = wide(), wide()
    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    options = {how: 2 if how == "accumulate" else True}
    g = torch.Generator().manual_seed(1)
    data = [(torch.randn(160, 16, generator=g), torch.randint(5, (160,), generator=g)) for _ in range(4)]
    step = fit(
        model, loss_fn, optimizer, data[0], budget, cache=kept, seconds_per_op=0.0, strict=True, **options
    )
    for k, batch in enumerate(data):
        ours = step.backward(batch) if how == "split" else step(batch)
        if how == "split":
            step.update()
            optimizer.zero_grad()
        expected = loss_fn(other, batch)
        expected.backward()
        if how != "accumulate" or k % 2:
            theirs.step()
            theirs.zero_grad()
        assert torch.equal(ours, expected) and all(map(torch.equal, model.parameters(), other.parameters()))
        measured = step.measure()
        assert measured["measured_peak"] == measured["planned_peak"] <= measured["budget"]
    plan = step.plan  # with an arena some are refused, and others far above the bound
    assert plan.time < plan.time_bound + 0.03 * plan.time_before
