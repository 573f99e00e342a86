"""Programs in slices: the same results as in one piece, whatever is split, and nothing split that cannot be."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tightship.analysis.patches import bounds_of
from tightship.errors import Unsupported
from tightship.frontends.torch.capture.step import capture_step
from tightship.frontends.torch.program import evaluate
from tightship.frontends.torch.split import split
from tightship.frontends.torch.split_chains import WIDE, chains
from tightship.graph import Graph

# ---- running programs without plans


def run(program, model, batch):
    """The results of a program in its own order of ops, on copies of the caller's tensors."""
    own = {
        "parameter": dict(model.named_parameters()),
        "buffer": dict(model.named_buffers()),
        "input": list(batch),
    }
    own["constant"] = program.constants
    given = {s.value: own[s.role][s.key].detach().clone() for s in program.slots}
    bases = dict(enumerate(program.bases))
    return evaluate(program.calls, program.graph.values, bases, given, program.results, {})


def captured(model, loss_fn, batch):
    return capture_step(model, loss_fn, None, batch)


def close(a, b):
    return all(torch.allclose(x, y, rtol=1e-9, atol=1e-11, equal_nan=True) for x, y in zip(a, b, strict=True))


def compared(model, loss_fn, batch, slices=(2, 3, 64), least=1):
    """Every chain by itself and all of them at once, against the program in one piece, in double precision."""
    program = captured(model, loss_fn, batch)
    found = chains(program)
    assert len(found) >= least
    want = run(program, model, batch)
    for count in slices:
        for chosen in [*([c] for c in found), list(found)]:
            made = split(program, {c: min(count, c.units) for c in chosen})
            assert close(run(made, model, batch), want), (count, [c.ops for c in chosen])
    return program, found


class Head(nn.Module):
    """Hidden states of an embedding, and scores for each class."""

    def __init__(self, classes=50, width=8, bias=False, tied=True):
        super().__init__()
        self.embed = nn.Embedding(classes, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids)))


def batch_of(classes=50, shape=(4, 6), ignored=True):
    ids = torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(1))
    labels = ids.flip(0).clone()
    if ignored:
        labels[0, :2] = -100
    return ids, labels


def cross_entropy(**options):
    def loss(model, batch):
        return F.cross_entropy(model(batch[0]).view(-1, 50), batch[1].view(-1), **options)

    return loss


LOSSES = {
    "mean": cross_entropy(),
    "sum": cross_entropy(reduction="sum"),
    "ignored": cross_entropy(ignore_index=3),
    "smoothed": cross_entropy(label_smoothing=0.1),
    "smoothed sum": cross_entropy(label_smoothing=0.1, reduction="sum"),
    "weighted": cross_entropy(weight=torch.linspace(0.5, 2, 50, dtype=torch.float64)),
    "weighted, smoothed": cross_entropy(
        weight=torch.linspace(0.5, 2, 50, dtype=torch.float64), label_smoothing=0.1
    ),
    "each": lambda m, b: (F.cross_entropy(m(b[0]).view(-1, 50), b[1].view(-1), reduction="none") * 2).sum(),
    "focal": lambda m, b: _focal(F.cross_entropy(m(b[0]).view(-1, 50), b[1].view(-1), reduction="none")),
    "scaled": lambda m, b: LOSSES["mean"](m, b) / 4,
    "with a penalty": lambda m, b: LOSSES["mean"](m, b) + 1e-3 * m(b[0]).logsumexp(-1).square().mean(),
    "shifted": lambda m, b: F.cross_entropy(
        m(b[0])[:, :-1].contiguous().view(-1, 50), b[1][:, 1:].contiguous().view(-1)
    ),
    "classes second": lambda m, b: F.cross_entropy(m(b[0]).transpose(1, 2), b[1]),
    "in float32": lambda m, b: F.cross_entropy(m(b[0]).float().view(-1, 50), b[1].view(-1)).double(),
    "distilled": lambda m, b: F.kl_div(
        F.log_softmax(m(b[0]), -1), F.softmax(m(b[0].flip(0)).detach(), -1), reduction="batchmean"
    ),
    "entropy": lambda m, b: -(F.softmax(m(b[0]), -1) * F.log_softmax(m(b[0]), -1)).sum(-1).mean(),
    "squares": lambda m, b: m(b[0]).square().sum(),
    "binary": lambda m, b: F.binary_cross_entropy_with_logits(
        m(b[0]), torch.ones(4, 6, 50, dtype=torch.float64)
    ),
}


def _focal(each):
    return ((1 - (-each).exp()) ** 2 * each).mean()


@pytest.mark.parametrize("bias", [False, True], ids=["tied", "untied with bias"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_over_slices_are_those_of_the_whole(name, bias):
    torch.manual_seed(0)
    least = 0 if name in ("binary",) else 1
    tolerance = compared if name != "in float32" else _compared_in_float32
    batch = batch_of(ignored=name != "ignored")
    tolerance(Head(bias=bias, tied=not bias), LOSSES[name], batch, least=least)


def _compared_in_float32(model, loss_fn, batch, least=1):
    program = captured(model, loss_fn, batch)
    want = run(program, model, batch)
    for chain in chains(program):
        found = run(split(program, {chain: 4}), model, batch)
        assert all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(found, want, strict=True))


def test_what_is_ignored_altogether_is_nan_as_in_eager():
    ids, labels = batch_of()
    compared(Head(), LOSSES["mean"], (ids, torch.full_like(labels, -100)))


def test_no_large_intermediate_of_a_head_is_left():
    program = captured(Head(), LOSSES["mean"], batch_of())
    (chain, *_) = chains(program)
    made = split(program, {chain: 8}).graph
    whole = program.graph.storages[chain.seed].size
    rest = [s.size for k, s in enumerate(made.storages) if k not in made.static and k not in made.kept]
    assert whole == max(s.size for s in program.graph.storages)
    assert max(rest) <= max(whole // 8, 50 * 8 * 8)  # as large as the gradient of the embedding


def test_each_slice_goes_backward_before_the_next_goes_forward():
    program = captured(Head(), LOSSES["mean"], batch_of())
    made = split(program, {chains(program)[0]: 4}).graph
    heads = [op.target for op in made.ops if "_log_softmax" in op.target]
    assert heads == ["aten._log_softmax.default", "aten._log_softmax_backward_data.default"] * 4


def test_shifted_logits_are_cut_by_sequences_only():
    program = captured(Head(), LOSSES["shifted"], batch_of())
    assert chains(program)[0].units == 4


def test_logits_that_are_handed_back_stay_whole():
    def loss(model, batch):
        logits = model(batch[0])
        return F.cross_entropy(logits.view(-1, 50), batch[1].view(-1)), logits

    program, found = compared(Head(), loss, batch_of(), least=0)
    kept = program.graph.kept
    assert all(not kept & chain.storages for chain in found)


def test_random_ops_are_never_split():
    def loss(model, batch):
        return F.cross_entropy(F.dropout(model(batch[0]), 0.3).view(-1, 50), batch[1].view(-1))

    program = captured(Head(), loss, batch_of())
    assert all(not program.graph.ops[k].random for chain in chains(program) for k in chain.ops)


@pytest.mark.parametrize("slices", [0, 1, 25])
def test_there_are_two_slices_at_least_and_no_empty_one(slices):
    program = captured(Head(), LOSSES["mean"], batch_of())
    with pytest.raises(Unsupported, match="slices"):
        split(program, {chains(program)[0]: slices})


def test_slices_cover_everything_once():
    for units in range(2, 40):
        for count in range(2, units + 1):
            rows = bounds_of(units, count)
            assert [k for a, b in rows for k in range(a, b)] == list(range(units))
            assert all(a < b for a, b in rows)


def test_a_program_without_large_intermediates_has_no_chain():
    model = nn.Linear(8, 1).double()
    program = captured(model, lambda m, b: m(b[0]).sum(), (torch.ones(1, 8, dtype=torch.float64),))
    assert chains(program) == ()
    assert isinstance(program.graph, Graph)


# ---- models of other kinds


class Block(nn.Module):
    """A wide hidden layer, its activation in place or gated."""

    def __init__(self, width=6, wide=48, kind="gelu"):
        super().__init__()
        self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width)
        self.gate, self.norm, self.kind = nn.Linear(width, wide), nn.LayerNorm(width), kind
        self.double()

    def forward(self, x):
        y = self.up(self.norm(x))
        if self.kind == "gated":
            y = F.silu(self.gate(x)) * y
        elif self.kind == "in place":
            y = F.relu_(y)
        else:
            y = F.gelu(y)
        return x + self.down(y)


@pytest.mark.parametrize("kind", ["gelu", "in place", "gated"])
def test_wide_hidden_layers(kind):
    torch.manual_seed(0)
    model = nn.Sequential(Block(kind=kind), Block(kind=kind))
    batch = (torch.randn(4, 6, 6, dtype=torch.float64),)
    compared(model, lambda m, b: m(b[0]).square().mean(), batch, least=2)


def test_convolutions_are_cut_by_images():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 2, 3)).double()
    batch = (torch.randn(4, 2, 6, 6, dtype=torch.float64),)
    _, found = compared(model, lambda m, b: m(b[0]).square().sum(), batch)
    assert found[0].units == 4


# ---- random programs


UNARY = (torch.tanh, torch.sigmoid, F.gelu, F.silu, torch.exp, torch.square, lambda t: t.clone().relu_())


class Drawn(nn.Module):
    """Layers, reshapes and reductions drawn at random."""

    def __init__(self, seed):
        super().__init__()
        self.draw = random.Random(seed)
        self.width = self.draw.choice((4, 6, 8))
        self.wide = self.width * self.draw.choice((4, 7))
        self.rows = self.draw.choice(((4, 6), (6,), (2, 3, 4), (1, 8)))
        self.moves = [self.draw.randrange(9) for _ in range(self.draw.randrange(3, 9))]
        self.picks = [self.draw.randrange(100) for _ in self.moves]
        self.layers = nn.ModuleList(nn.Linear(self.wide, self.wide) for _ in self.moves)
        self.first, self.norm = nn.Linear(self.width, self.wide, bias=seed % 2 == 0), nn.LayerNorm(self.wide)
        self.ending = self.draw.randrange(5)
        self.double()

    def forward(self, x):
        y = self.first(x)
        for move, pick, layer in zip(self.moves, self.picks, self.layers, strict=True):
            y = self.moved(y, move, pick, layer)
        return y

    def moved(self, y, move, pick, layer):
        if move == 0:
            return layer(y)
        if move == 1:
            return F.softmax(y, pick % y.dim())
        if move == 2:
            return y * y.amax(-1, keepdim=True)
        if move == 3:
            return self.norm(y)
        if move == 4:
            return y + y.mean(pick % y.dim(), keepdim=True)
        if move == 5:
            return y.reshape(-1, self.wide).t().contiguous().t().reshape(y.shape)
        if move == 6:
            a, b = y.chunk(2, -1) if y.shape[-1] % 2 == 0 else (y, y)
            return torch.cat([a * b.sigmoid(), b], -1)[..., : self.wide]
        if move == 7:
            return F.pad(y[..., 1:], (0, 1)) + y.flip(-1)
        return UNARY[pick % len(UNARY)](y)

    def loss(self, y):
        if self.ending == 0:
            return y.square().mean()
        if self.ending == 1:
            rows = y.reshape(-1, self.wide)
            return F.cross_entropy(rows, torch.arange(len(rows)) % self.wide)
        if self.ending == 2:
            return y.logsumexp(-1).sum()
        if self.ending == 3:
            return (y.sum(-1) * y.amax(-1)).mean()
        return F.log_softmax(y, -1)[..., 0].sum()


def drawn(seed):
    torch.manual_seed(seed)
    model = Drawn(seed)
    return model, (torch.randn(*model.rows, model.width, dtype=torch.float64) / 4,)


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_in_slices_are_as_in_one_piece(seed):
    model, batch = drawn(seed)
    compared(model, lambda m, b: m.loss(m(b[0])), batch, slices=(2, 64), least=0)


def test_most_random_programs_have_something_to_split():
    with_chains = 0
    for seed in range(20):
        model, batch = drawn(seed)
        with_chains += bool(chains(captured(model, lambda m, b: m.loss(m(b[0])), batch)))
    assert with_chains >= 10


# ---- attention, images, whole blocks of layers


class Attention(nn.Module):
    """Blocks with attention over a batch whose rows are padded; written out, or as one op."""

    def __init__(self, written=True, causal=False, masked=True):
        super().__init__()
        self.written, self.causal, self.masked = written, causal, masked
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(12, 36) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.double()

    def forward(self, x, padded):
        mask = padded[:, None, None, :].expand(-1, 1, x.shape[1], -1)
        mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask, -1e9) if self.masked else None
        for norm, qkv, out in zip(self.norms, self.qkv, self.out, strict=True):
            heads = qkv(norm(x)).view(*x.shape[:2], 3, 3, 4).permute(2, 0, 3, 1, 4)
            x = x + out(self.attended(*heads, mask).transpose(1, 2).reshape(x.shape))
        return x

    def attended(self, q, k, v, mask):
        if not self.written:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        scores = q @ k.transpose(-1, -2) / 2
        return (scores if mask is None else scores + mask).softmax(-1) @ v


def padded_batch(images=2):
    x = torch.randn(images, 16, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(16)[None] >= torch.tensor([12, 16, 9, 14])[:images, None]


def squares(model, batch):
    return model(*batch).square().sum()


def test_heads_are_slices_of_scores_though_masks_are_of_images():
    torch.manual_seed(0)
    model, batch = Attention(), padded_batch()
    program = captured(model, squares, batch)
    want = run(program, model, batch)
    coarse = next(c for c in chains(program) if "bmm" in program.graph.storages[c.seed].name)
    fine = next(c for c in chains(program, fine=True) if c.seed == coarse.seed)
    assert (coarse.units, fine.units) == (2, 6)
    for count in (2, 4, 6):
        assert close(run(split(program, {fine: count}), model, batch), want)
    with pytest.raises(Unsupported, match="3 slices"):  # one of them has heads of both images
        split(program, {fine: 3})


def test_scores_that_nothing_masks_are_cut_by_images_and_heads_as_one():
    torch.manual_seed(0)
    _, found = compared(Attention(masked=False), squares, padded_batch(), slices=(2, 3, 6))
    assert 6 in {c.units for c in found}


@pytest.mark.parametrize(
    ("causal", "masked"), [(False, False), (True, False), (False, True)], ids=["plain", "causal", "masked"]
)
def test_blocks_with_attention_as_one_op_run_images_by_images(causal, masked):
    torch.manual_seed(0)
    model, batch = Attention(written=False, causal=causal, masked=masked), padded_batch(4)
    program = captured(model, squares, batch)
    want = run(program, model, batch)
    chain = chains(program, WIDE)[0]
    targets = [program.graph.ops[k].target for k in chain.ops]
    assert sum("scaled_dot_product" in target for target in targets) == 4
    assert chain.units == 4
    for count in (2, 3, 4):
        assert close(run(split(program, {chain: count}), model, batch), want)


class Images(nn.Module):
    """The ops of a small U-Net."""

    def __init__(self, mode="nearest", pool=F.max_pool2d):
        super().__init__()
        self.mode, self.pool = mode, pool
        self.down, self.middle, self.up = (nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 4), (4, 4), (8, 4)))
        self.norms = nn.ModuleList(nn.GroupNorm(2, 4) for _ in range(3))
        self.double()

    def forward(self, x):
        wide = F.silu(self.norms[0](self.down(x)))
        y = F.silu(self.norms[1](self.middle(self.pool(F.pad(wide, (1, 1, 1, 1)), 2))))
        y = F.interpolate(y, size=wide.shape[2:], mode=self.mode)
        y = F.silu(self.norms[2](self.up(torch.cat([y, wide], 1))))
        return y * F.adaptive_avg_pool2d(y, 4).mean((2, 3), keepdim=True)


@pytest.mark.parametrize(
    ("mode", "pool"), [("nearest", F.max_pool2d), ("bilinear", F.avg_pool2d)], ids=["nearest", "bilinear"]
)
def test_networks_on_images_run_images_by_images(mode, pool):
    torch.manual_seed(0)
    batch = (torch.randn(5, 3, 8, 8, dtype=torch.float64),)
    program, found = compared(Images(mode, pool), squares, batch, slices=(2, 5))
    targets = {program.graph.ops[k].target for c in found for k in c.ops}
    for name in ("native_group_norm_backward", "pool2d", "upsample", "cat"):
        assert any(name in target for target in targets), name


def test_attention_that_drops_at_random_is_left_whole():
    model = Attention(written=False, masked=False)
    model.attended = lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    program = captured(model, squares, padded_batch(4))
    drawing = {k for k, op in enumerate(program.graph.ops) if op.random}
    assert drawing
    for found in (chains(program), chains(program, WIDE)):
        assert not any(drawing & c.ops.keys() for c in found)


def test_rms_norms_are_cut_by_rows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.RMSNorm(64), nn.Linear(64, 8)).double()
    batch = (torch.randn(4, 6, 8, dtype=torch.float64),)
    compared(model, squares, batch, slices=(2, 3, 8))
