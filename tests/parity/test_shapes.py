"""Steps whose shapes data decide. Of the batch's data (masks, what is found, counts, packed sequences) they
are planned for what came: batches repeat, and a shape that has been planned for is met again. Where only the step
itself can tell, steps run in eager."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from support.harness import Loop, _Side, adam, mlp, run, sgd
from support.state import differences
from tightship.errors import BadInput, Unsupported
from tightship.execute.fit import fit
from tightship.execute.infer import infer
from tightship.execute.interpreter import Fallback

cross_entropy = functional.cross_entropy
KINDS = (0, 1, 0, 2, 1)
"""The numbers of the batches of a loop."""


def masked_pairs(number):
    """Six rows of four numbers, a class each, and a mask, which selects another number of rows in each."""
    g = torch.Generator().manual_seed(KINDS[number])
    chosen = torch.randperm(6, generator=g) < (2, 5, 6)[KINDS[number]]
    return torch.randn(6, 4, generator=g), torch.randint(0, 3, (6,), generator=g), chosen


def check(build, measurements, plans):
    verdict = run(build, measurements)
    assert verdict.kind == "identical" and verdict.plans <= plans, verdict


# --- masks and what is found --------------------------------------------------------------------------------------


def by_mask(model, batch):
    x, y, mask = batch
    return cross_entropy(model(x)[mask], y[mask])


def by_masked_select(model, batch):
    x, y, mask = batch
    return cross_entropy(model(x), y, reduction="none").masked_select(mask).mean()


def by_nonzero(model, batch):
    x, y, mask = batch
    found = mask.nonzero().squeeze(1)
    return cross_entropy(model(x).index_select(0, found), y[found])


def by_where(model, batch):
    (found,) = torch.where(batch[2])
    return cross_entropy(model(batch[0])[found], batch[1][found])


def by_two_masks(model, batch):
    x, _, mask = batch
    i, j = (mask[:, None] & mask).nonzero(as_tuple=True)
    return (model(x)[i] * model(x)[j]).mean()


def written_by_mask(model, batch):
    """Of the op that writes a mask decides what it asks of the allocator, though not its shape."""
    x, y, mask = batch
    h = model(x).clone()
    h[mask] = h.detach().mean(0)
    return cross_entropy(h, y)


def filled_by_mask(model, batch):
    """A number in the places of a mask asks of the allocator the same, wherever the mask is true."""
    x, y, mask = batch
    h = model(x).clone()
    h[mask] = 0.5
    h[:, 1:][mask[:, None].expand(6, 2)] = 0.25
    return cross_entropy(h, y)


def scattered_by_mask(model, batch):
    x, y, mask = batch
    h = torch.zeros(6, 3).masked_scatter(mask[:, None], model(x[mask]))
    return cross_entropy(h, y)


def in_each_state_of_a_mask(model, batch):
    x, _, mask = batch
    mask, h = mask.clone(), model(x)
    mask[0] = True
    first = h[mask.clone()].mean()
    mask[:3] = False
    mask[5] = True
    return first + h[mask.clone()].pow(2).mean()


def by_classes(model, batch):
    x, y, _ = batch
    classes, of_row, counts = torch.unique(y, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(classes), 3).index_add(0, of_row, model(x))
    return (sums / counts[:, None]).pow(2).mean()


def by_runs(model, batch):
    x, y, _ = batch
    _, of_row = torch.unique_consecutive(y, return_inverse=True)
    return (model(x) * of_row[:, None]).mean()


def repeated(model, batch):
    return model(batch[0]).repeat_interleave(batch[1], dim=0).pow(2).mean()


def repeated_to_a_size(model, batch):
    x, times, _ = batch
    return model(x).repeat_interleave(times, dim=0, output_size=int(times.sum())).pow(2).mean()


def weighted_by_counts(model, batch):
    x, y, _ = batch
    return (cross_entropy(model(x), y, reduction="none") * torch.bincount(y)[y]).mean()


def the_first_sorted(model, batch):
    x, y, mask = batch
    first = torch.argsort(y, stable=True)[: int(mask.sum())]
    return model(x)[first].pow(2).mean()


def split_at(model, batch):
    x, _, mask = batch
    parts = model(x).tensor_split(mask.nonzero().squeeze(1)[:2])
    return sum(p.sum() for p in parts) + parts[0].pow(2).mean()


MASKS = [
    by_mask, by_masked_select, by_nonzero, by_where, by_two_masks, written_by_mask, scattered_by_mask,
    in_each_state_of_a_mask, by_classes, by_runs, repeated, repeated_to_a_size, weighted_by_counts,
    the_first_sorted, split_at,
]  # fmt: skip


@pytest.mark.parametrize("loss_fn", MASKS, ids=lambda f: f.__name__)
def test_shapes_that_the_batch_decides(loss_fn, measurements):
    def build():
        model = mlp()
        return Loop(model, loss_fn, adam(model), masked_pairs, steps=len(KINDS))

    check(build, measurements, 3)


def test_a_mask_in_a_buffer(measurements):
    def build():
        model = mlp()
        model.register_buffer("mask", torch.tensor([True, False, True, True, False, False]))

        def after(number, _out):
            model.mask[number] = True

        def loss_fn(model, batch):
            return cross_entropy(model(batch[0])[model.mask], batch[1][model.mask])

        return Loop(model, loss_fn, sgd(model), masked_pairs, after=after, steps=4)

    check(build, measurements, 3)


class Graphs(nn.Module):
    """A layer of a graph net: loops are removed and added to every node, and messages summed where they go."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, edges):
        edges = edges[:, edges[0] != edges[1]]
        edges = torch.cat([edges, torch.arange(len(x)).repeat(2, 1)], 1)
        degree = torch.zeros(len(x)).index_add(0, edges[1], torch.ones(edges.shape[1]))
        for layer in (self.inner, self.outer):
            sent = layer(x)[edges[0]] / degree[edges[1], None]
            x = torch.zeros(len(x), layer.out_features).index_add(0, edges[1], sent)
        return x


def test_graphs_with_loops(measurements):
    def batch(number):
        x, y, mask = masked_pairs(number)
        edges = torch.randint(0, 6, (2, 14), generator=torch.Generator().manual_seed(KINDS[number]))
        return x, edges, y, mask

    def loss_fn(model, batch):
        x, edges, y, mask = batch
        return cross_entropy(model(x, edges)[mask], y[mask])

    def build():
        model = Graphs()
        return Loop(model, loss_fn, adam(model), batch, steps=len(KINDS))

    check(build, measurements, 3)


def test_no_contents_of_a_batch_are_kept():
    model = mlp()
    batch = masked_pairs(0)
    step = fit(model, by_mask, adam(model), batch, cache=None, seconds_per_op=0.0)
    assert step.program.samples and not any(step.program.samples.values())


def test_how_much_a_mask_selects_is_what_is_planned_for():
    model = mlp()
    step = fit(model, by_mask, adam(model), masked_pairs(0), cache=None, seconds_per_op=0.0)
    graphs = set()
    for number in (0, 1, 3, 0, 1, 3):
        step(masked_pairs(number))
        measured, first = step.measure(), not graphs
        assert measured["misses"] == 0
        assert first or measured["planned_peak"] == measured["measured_peak"]
        graphs.add(step.graph.digest)
    assert len(graphs) == 3


def test_masks_that_select_equally_much_share_a_plan(measurements):
    def build():
        model = mlp()

        def batch(number):
            x, y, _ = masked_pairs(0)
            return x, y, torch.arange(6).roll(number) < 3

        return Loop(model, written_by_mask, adam(model), batch, steps=4)

    check(build, measurements, 1)


def test_numbers_written_by_masks_of_any_count_are_one_plan(measurements):
    def build():
        torch.manual_seed(0)
        model = mlp()
        return Loop(model, filled_by_mask, adam(model), masked_pairs, steps=4)

    check(build, measurements, 1)


# --- packed sequences ---------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind, *, batch_first=True, enforce_sorted=False, total=None, **options):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.net = kind(4, 5, batch_first=batch_first, **options)
        width = options.get("proj_size", 5) * (2 if options.get("bidirectional") else 1)
        self.out = nn.Linear(width, 3)
        self.batch_first, self.enforce_sorted, self.total = batch_first, enforce_sorted, total

    def forward(self, x, lengths):
        x = self.embed(x if self.batch_first else x.t())
        packed = pack_padded_sequence(x, lengths, self.batch_first, self.enforce_sorted)
        out, last = self.net(packed)
        out, lengths = pad_packed_sequence(out, self.batch_first, total_length=self.total)
        last = last[0] if isinstance(last, tuple) else last
        mean = out.sum(1 if self.batch_first else 0) / lengths[:, None]
        return self.out(mean), last


def sequences(number, *, ordered=False):
    g = torch.Generator().manual_seed(KINDS[number])
    lengths = torch.randint(1, 6, (4,), generator=g)
    if ordered:
        lengths = lengths.sort(descending=True)[0]
    return torch.randint(0, 9, (4, 5), generator=g), lengths, torch.randint(0, 3, (4,), generator=g)


def recurrent_loss(model, batch):
    out, last = model(batch[0], batch[1])
    return cross_entropy(out, batch[2]) + last.pow(2).mean()


def of_list(model, batch):
    return recurrent_loss(model, (batch[0], batch[1].tolist(), batch[2]))


@pytest.mark.parametrize(
    ("kind", "options", "loss_fn"),
    [
        (nn.LSTM, {}, recurrent_loss),
        (nn.GRU, {"total": 7}, recurrent_loss),
        (nn.RNN, {"nonlinearity": "relu"}, of_list),
        (nn.LSTM, {"batch_first": False, "enforce_sorted": True, "proj_size": 2}, recurrent_loss),
        pytest.param(
            nn.GRU,
            {"num_layers": 2, "bidirectional": True, "dropout": 0.5},
            recurrent_loss,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["LSTM", "GRU", "RNN", "LSTM-sorted", "GRU-2-layers"],
)
def test_packed_sequences(kind, options, loss_fn, measurements):
    def build():
        model = Recurrent(kind, **options)

        def batch(number):
            return sequences(number, ordered=model.enforce_sorted)

        return Loop(model, loss_fn, adam(model), batch, steps=len(KINDS))

    check(build, measurements, 3)


def test_a_batch_that_is_packed(measurements):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.out = nn.GRU(4, 5), nn.Linear(5, 3)

        def forward(self, packed):
            return self.out(self.net(packed)[1][-1])

    def batch(number):
        g = torch.Generator().manual_seed(KINDS[number])
        rows = [torch.randn(1 + (k * (KINDS[number] + 2)) % 5, 4, generator=g) for k in range(3)]
        return pack_sequence(rows, enforce_sorted=False), torch.randint(0, 3, (3,), generator=g)

    def build():
        model = Last()
        return Loop(model, lambda m, b: cross_entropy(m(b[0]), b[1]), adam(model), batch, steps=4)

    check(build, measurements, 3)


@pytest.mark.parametrize("as_given", [torch.Tensor.clone, torch.Tensor.tolist], ids=["tensors", "lists"])
def test_speech(measurements, as_given):
    """Packed sequences, and a loss whose memory follows from the lengths of its targets."""

    def batch(number):
        g = torch.Generator().manual_seed(KINDS[number])
        x, lengths, _ = sequences(number)
        return x, lengths.clamp(min=4), torch.randint(1, 3, (4, 2), generator=g), torch.tensor([1, 2, 1, 2])

    def loss_fn(model, batch):
        x, lengths, targets, target_lengths = batch
        packed = pack_padded_sequence(model.embed(x), lengths, batch_first=True, enforce_sorted=False)
        out, lengths = pad_packed_sequence(model.net(packed)[0], batch_first=True)
        logs = model.out(out).log_softmax(-1).transpose(0, 1)
        return functional.ctc_loss(logs, targets, as_given(lengths), as_given(target_lengths))

    def build():
        model = Recurrent(nn.LSTM)
        return Loop(model, loss_fn, adam(model), batch, steps=len(KINDS))

    check(build, measurements, 3)


def test_packed_sequences_in_a_forward_pass():
    model = Recurrent(nn.LSTM).eval()
    run = infer(model, sequences(0)[:2], cache=None, seconds_per_op=0.0)
    for number in (0, 1, 3, 0):
        with torch.no_grad():
            want = model(*sequences(number)[:2])
        got = run(*sequences(number)[:2])
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert run.measure()["misses"] == 0


# --- what only the step itself can tell ---------------------------------------------------------------------------


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.net = nn.BatchNorm1d(4), mlp(0.2)

    def forward(self, x):
        return self.net(self.norm(x))


def hard_ones(model, batch):
    losses = cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses[losses > losses.detach().mean()].mean()


def the_active(model, batch):
    h = model(batch[0])
    return h[h > 0].sum() - h.logsumexp(1).mean()


def dropped_rows(model, batch):
    keep = torch.rand(6) < 0.7
    return model(batch[0])[keep].pow(2).sum()


def in_eager(build, words):
    """Both sides of a loop whose steps ``fit`` cannot plan: as in eager, after one warning."""
    eager, fitted = _Side(build), _Side(build)
    before = fitted.kept()
    with fitted.turn(), pytest.warns(Fallback, match=words):
        loop = fitted.loop
        step = fit(loop.model, loop.loss_fn, loop.optimizer, loop.batch(0), "50%", cache=None)
    assert not differences(before, fitted.kept(), "after fit")
    for number in range(loop.steps):
        want = eager.eager(number)
        assert not differences(want, fitted.fitted(number, [step]), "results")
        assert not differences(eager.kept(), fitted.kept(), "after the step")
        assert all(p.grad is None for p in fitted.loop.model.parameters())
    measured = step.measure()
    assert measured["planned_peak"] is None and step.last is None and step.reserved == 0
    assert measured["measured_peak"] is None or measured["measured_peak"] > measured["static"]
    assert any("run in eager" in note for note in step.notes)
    with pytest.raises(BadInput, match="run in eager"):
        _ = step.plan


@pytest.mark.parametrize("loss_fn", [hard_ones, the_active], ids=lambda f: f.__name__)
def test_shapes_that_the_step_decides(loss_fn):
    def build():
        model = Noisy()
        return Loop(model, loss_fn, adam(model), masked_pairs, steps=4)

    in_eager(build, r"test_shapes\.py:\d+")


@pytest.mark.parametrize("loss_fn", [hard_ones, the_active])
def test_strict_refuses_what_cannot_be_planned(loss_fn):
    model = Noisy()
    with pytest.raises(Unsupported, match=r"test_shapes\.py:\d+"):
        fit(model, loss_fn, adam(model), masked_pairs(0), strict=True, cache=None)


def test_rows_that_a_draw_drops(measurements):
    """What is drawn on the CPU is drawn ahead."""

    def build():
        model = Noisy()
        return Loop(model, dropped_rows, adam(model), masked_pairs, steps=4)

    verdict = run(build, measurements)
    assert verdict.kind == "identical", verdict


def test_a_shape_that_a_later_step_decides():
    """A step that has begun is refused, with what to do; then it can be run."""
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    hard = False

    def loss_fn(model, batch):
        return hard_ones(model, batch) if hard else cross_entropy(model(batch[0]), batch[1])

    step = fit(model, loss_fn, sgd(model), masked_pairs(0), cache=None, seconds_per_op=0.0)
    hard = True
    with pytest.raises(Unsupported) as refusal:
        step(masked_pairs(0))
    assert "step.prepare" in refusal.value.__notes__[0]
    with pytest.warns(Fallback):
        assert step.prepare(masked_pairs(0)) is None
    optimizer = sgd(twin)
    for _ in range(2):
        step(masked_pairs(0))
        hard_ones(twin, masked_pairs(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def at_strides(model, batch, log):
    model[0].weight.data = model[0].weight.data.t().contiguous().t()


def at_shared(model, batch, log):
    model[3].bias.data = model[0].bias.data[:3]


def at_parameter(model, batch, log):
    """As older codebooks have it: the optimizer goes on with the one that was there."""
    now = 0.9 * model[3].bias.detach() + model(batch[0]).detach().mean()
    model[3].bias = nn.Parameter(now, requires_grad=False)


def at_tangent(model, batch, log):
    log.append(torch.func.jvp(model, (batch[0],), (torch.ones_like(batch[0]),))[1].sum().item())


def at_generator(model, batch, log):
    g = torch.Generator().manual_seed(len(log))
    log.append(torch.randn(2, generator=g).sum().item())


def at_seed(model, batch, log):
    torch.manual_seed(len(log))
    log.append(0)


LOOKS = [at_strides, at_shared, at_parameter, at_tangent, at_generator, at_seed]


@pytest.mark.parametrize("look", LOOKS)
def test_what_the_code_looks_at_is_there_in_eager(look):
    """Whatever only running the step could answer is answered there, and what the code keeps of it is eager's."""
    logs = []

    def build():
        log = []
        logs.append(log)

        def loss_fn(model, batch):
            look(model, batch, log)
            return cross_entropy(model(batch[0]), batch[1])

        return Loop(model := mlp(), loss_fn, sgd(model), masked_pairs, steps=3)

    in_eager(build, r"steps run in eager")
    assert repr(logs[0]) == repr(logs[1][-len(logs[0]) :])
    assert all(type(a) is type(b) for a, b in zip(*logs, strict=False))


def test_ops_whose_memory_follows_from_their_data():
    """How large a matrix is decides on the formula of its exponential, and so on what that asks for."""

    def build():
        turn = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
        model = nn.Sequential(turn, nn.Linear(4, 3))
        return Loop(model, lambda m, b: cross_entropy(m(b[0]), b[1]), sgd(model), masked_pairs, steps=3)

    in_eager(build, "matrix_exp.*how much memory it asks for follows from its data")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_draws_anew(reentrant, measurements):
    """Eager's second draw of the same dropout is another one; without any draw there is nothing to tell."""

    def build(dropout):
        model = mlp(dropout)

        def loss_fn(model, batch):
            x = batch[0].clone().requires_grad_()
            hidden = checkpoint(model[:3], x, use_reentrant=reentrant, preserve_rng_state=False)
            return cross_entropy(model[3](hidden), batch[1])

        return Loop(model, loss_fn, sgd(model), masked_pairs, steps=3)

    in_eager(lambda: build(0.5), "preserve_rng_state=False")
    verdict = run(lambda: build(0.0), measurements)
    assert verdict.kind == "identical", verdict


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_on_modules(register):
    logs = []

    def build():
        model, log = mlp(), []
        logs.append(log)

        def hook(module, gradients, *more):
            log.append(gradients[0].norm().item())
            return (gradients[0] * 0.5, *gradients[1:])

        getattr(model[3], register)(hook)
        return Loop(model, lambda m, b: cross_entropy(m(b[0]), b[1]), sgd(model), masked_pairs, steps=3)

    in_eager(build, "backward hook on a module")
    assert logs[0] == logs[1] != []


@pytest.mark.parametrize("parts", [False, True])
def test_backward_hooks_that_come_and_go(parts):
    """A step with them is eager's, and said to be; those before and after it are planned."""
    sides = [mlp(), mlp()]
    sides[1].load_state_dict(sides[0].state_dict())
    optimizers = [adam(m) for m in sides]
    step = fit(sides[1], cross_entropy_of, optimizers[1], masked_pairs(0), cache=None, split=parts)
    planned = []
    for number in range(4):
        hooks = [m[3].register_full_backward_hook(halved) for m in sides if number in (1, 2)]
        with pytest.warns(Fallback, match="with backward hooks on modules") if number == 1 else nullcontext():
            ours = step.backward(masked_pairs(number)) if parts else step(masked_pairs(number))
        if parts:
            step.update()
            optimizers[1].zero_grad()
        planned.append(step.measure()["planned_peak"] is not None)
        theirs = cross_entropy_of(sides[0], masked_pairs(number))
        theirs.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        assert torch.equal(ours, theirs)
        assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in sides), strict=True))
        for hook in hooks:
            hook.remove()
    assert planned == [True, False, False, True]
    sides[1][3].register_full_backward_hook(halved)
    with pytest.raises(Unsupported, match="backward hook"):
        fit(sides[1], cross_entropy_of, optimizers[1], masked_pairs(0), cache=None, strict=True)


def halved(module, of_inputs, of_results):
    return (of_inputs[0] / 2,)


def cross_entropy_of(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def test_clipping_in_eager():
    model, twin = Noisy(), Noisy()
    twin.load_state_dict(model.state_dict())
    with pytest.warns(Fallback):
        step = fit(model, hard_ones, sgd(model), masked_pairs(0), cache=None, clip_norm=0.01)
    optimizer, state = sgd(twin), torch.get_rng_state()
    for number in range(2):
        step(masked_pairs(number))
    torch.set_rng_state(state)
    for number in range(2):
        hard_ones(twin, masked_pairs(number)).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(
    "empty",
    [
        lambda: torch.BoolTensor(6).fill_(0),
        lambda: torch.empty(6, dtype=torch.bool).zero_(),
        lambda: CHOSEN.fill_(0),
    ],
    ids=["by its class", "empty", "outside of the step"],
)
def test_a_mask_that_is_filled_before_it_is_written(empty, measurements):
    """As targets of detectors are built: what was in the mask before does not matter."""

    def loss_fn(model, batch):
        chosen = empty()
        chosen[batch[1]] = True
        before = chosen.sum()
        chosen.fill_(False)
        chosen[batch[1][:4]] = True
        return cross_entropy(model(batch[0])[chosen], batch[1][chosen]) + before

    verdict = run(lambda: Loop(model := mlp(), loss_fn, sgd(model)), measurements)
    assert verdict.kind == "identical", verdict


CHOSEN = torch.ones(6, dtype=torch.bool)
