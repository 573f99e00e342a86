"""Sparse gradients of embeddings: planned where the optimizer is known to step by them, with room for the most rows
that a batch can have; in eager, or refused, elsewhere."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import tightship
from support.harness import Loop, run
from support.runs import measured
from support.state import differences
from tightship.errors import Unsupported
from tightship.execute import allocator
from tightship.execute.estimate import estimate
from tightship.execute.fit import fit
from tightship.execute.interpreter import Fallback
from tightship.frontends.torch.capture import sparse

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

ROWS = 40


def words(number, low=0):
    """Four sentences of five words of ``ROWS``, and a class for each; of batch 2, all words are one."""
    g = torch.Generator().manual_seed(number)
    texts = torch.randint(low, ROWS if number != 2 else low + 1, (4, 5), generator=g)
    return texts, torch.randint(0, 3, (4,), generator=g)


def without_padding(number):
    return words(number, 1)


def padded(number):
    """None, some, or all of batch 2."""
    texts, labels = words(number, 1)
    g = torch.Generator().manual_seed(number)
    texts[torch.rand(4, 5, generator=g) < number / 4 if number != 2 else texts > 0] = 0
    return texts, labels


class Once(nn.Module):
    def __init__(self, kind=nn.Embedding, **options):
        super().__init__()
        self.embed = kind(ROWS, 8, sparse=True, **options)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        h = self.embed(x)
        return self.out(torch.tanh(h if h.dim() == 2 else h.mean(1)))


class Twice(Once):
    def forward(self, x):
        return self.out(torch.tanh(self.embed(x) * self.embed(x.flip(1))).mean(1))


class Weighted(Once):
    """A bag with a weight for each word, and offsets instead of rows."""

    def __init__(self, **options):
        super().__init__(nn.EmbeddingBag, mode="sum", **options)
        self.weight = nn.Parameter(torch.linspace(0.1, 1, 20))

    def forward(self, x):
        return self.out(self.embed(x.flatten(), torch.tensor([0, 3, 3, 11]), self.weight))


class TwoTables(nn.Module):
    """Word2vec with negative samples."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = (nn.Embedding(ROWS, 4, sparse=True) for _ in range(2))

    def forward(self, x):
        center, rest = x[:, :1], x[:, 1:]
        scores = (self.inner(center) * self.outer(rest)).sum(-1)
        return torch.stack([scores.mean(1), scores.amax(1), scores.amin(1)], 1)


def loss_of(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def bag(**options):
    return lambda: Once(nn.EmbeddingBag, **options)


MODELS = {
    "embedding": (Once, words),
    "padded": (lambda: Once(padding_idx=0), without_padding),
    "as much padding as comes": (lambda: Once(padding_idx=0), padded),
    "padding, used twice": (lambda: Twice(padding_idx=0), padded),
    "padded bag": (bag(mode="mean", padding_idx=0), padded),
    "padding in the middle": (lambda: Once(padding_idx=7), words),
    "used twice": (Twice, words),
    "bag of sums": (bag(mode="sum"), words),
    "bag of means": (bag(mode="mean"), words),
    "weighted bag": (Weighted, words),
    "two tables": (TwoTables, words),
    "one row": (Once, lambda number: (torch.full((1, 1), number % ROWS), torch.tensor([number % 3]))),
}

OPTIMIZERS = {
    "SGD": lambda m: torch.optim.SGD(m, lr=0.1),
    "SparseAdam": lambda m: torch.optim.SparseAdam(m, lr=0.1),
    "SparseAdam, maximize": lambda m: torch.optim.SparseAdam(m, lr=0.1, maximize=True),
    "Adagrad": lambda m: torch.optim.Adagrad(m, lr=0.1, lr_decay=0.1),
}


def sparse_and_dense(model, kind):
    tables = [p for n, p in model.named_parameters() if "embed" in n or "ner" in n or "outer" in n]
    rest = [p for p in model.parameters() if all(p is not t for t in tables)]
    return [kind(tables), *([torch.optim.AdamW(rest)] if rest else [])]


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(("build", "batch"), MODELS.values(), ids=MODELS)
def test_planned(build, batch, kind):
    """Bits, state and the measured peak, in batches that look up each row once, some several times, or one alone."""
    models = [build(), build()]
    models[1].load_state_dict(models[0].state_dict())
    each = [sparse_and_dense(m, kind) for m in models]
    with warnings.catch_warnings():
        warnings.simplefilter("error", Fallback)
        step = fit(models[1], loss_of, each[1], batch(0), "100%", cache=None)
    for number in range(5):
        with torch.random.fork_rng():
            theirs = loss_of(models[0], batch(number))
            theirs.backward()
            for optimizer in each[0]:
                optimizer.step()
                optimizer.zero_grad()
        assert torch.equal(theirs, step(batch(number)))
        assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True)), number
        states = [[o.state_dict() for o in optimizers] for optimizers in each]
        assert not differences(*states, "optimizers")
        measured = step.measure()
        assert measured["measured_peak"] <= measured["planned_peak"] <= measured["budget"]
        if number:  # the first update makes its state, and its temporaries as it needs them
            assert measured["measured_peak"] == measured["process_peak"] == measured["planned_peak"]
            assert measured["misses"] == 0
    assert step.metrics()["kinds"] == 1


@pytest.mark.parametrize("words_of_a_batch", [2, 60, 900])
def test_room_is_for_the_most_rows(words_of_a_batch):
    """Whatever rows a batch looks up, and be they more than the table has, what the update asks for has room."""
    model = Twice()
    optimizer = torch.optim.SparseAdam(model.embed.parameters(), lr=0.1)
    model.out.requires_grad_(False)

    def batch(most):
        g = torch.Generator().manual_seed(most)
        return torch.randint(0, most, (2, words_of_a_batch), generator=g), torch.tensor([0, 1])

    step = fit(model, loss_of, optimizer, batch(ROWS), "100%", cache=None)
    step(batch(ROWS))
    for most in (ROWS, 1, 2, 3, 7, 20, ROWS):
        step(batch(most))
        measured = step.measure()
        assert measured["misses"] == 0
        assert measured["measured_peak"] == measured["process_peak"] == measured["planned_peak"]


def test_a_loop(measurements):
    def build():
        model = Once()
        return Loop(model, loss_of, torch.optim.Adagrad(model.parameters(), lr=0.1), words, steps=5)

    verdict = run(build, measurements)
    assert verdict.kind == "identical" and verdict.plans == 1, verdict


def in_eager(build, optimizer, match, loss=loss_of, **options):
    """Steps that cannot be planned are eager's, after one warning."""
    models = [build(), build()]
    models[1].load_state_dict(models[0].state_dict())
    each = [optimizer([p for p in m.parameters() if p.requires_grad]) for m in models]
    with pytest.warns(Fallback, match=match):
        step = fit(models[1], loss, each[1], words(0), cache=None, **options)
    for number in range(4):
        loss(models[0], words(number)).backward()
        if number % options.get("accumulate", 1) == options.get("accumulate", 1) - 1:
            each[0].step()
            each[0].zero_grad()
        step(words(number))
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))
    return step


class Tied(Once):
    """The table is looked up and multiplied by: a dense and a sparse gradient."""

    def forward(self, x):
        return (self.embed(x).mean(1) @ self.embed.weight.T)[:, :3]


def test_dense_and_sparse_gradients_of_one_table():
    in_eager(Tied, OPTIMIZERS["SGD"], "sparse")


def test_momentum_keeps_sparse_state():
    in_eager(Once, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "SGD with momentum")


def with_table_alone():
    model = Once()
    model.out.requires_grad_(False)
    return model


class Steps(torch.optim.SGD):
    """Not torch's: what it keeps is not known."""


def test_an_optimizer_that_is_not_known():
    in_eager(Once, lambda p: Steps(p, lr=0.1), "of 'embed.weight' in Steps")


@pytest.mark.parametrize("kind", ["SGD", "SparseAdam"])
def test_in_parts(kind):
    def loss_fn(model, batch):
        return loss_of(model, batch) / 2

    in_eager(with_table_alone, OPTIMIZERS[kind], "sparse=False", loss_fn, accumulate=2)


def test_not_in_compiled_mode():
    model = Once()
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = r"sparse gradient of 'embed\.weight' in compiled mode"
    with pytest.raises(Unsupported, match=said):
        fit(model, loss_of, optimizer, words(0), cache=None, mode="compiled", strict=True)
    with pytest.warns(Fallback, match=f"runs op by op.*{said}"):
        step = fit(model, loss_of, optimizer, words(0), cache=None, mode="compiled")
    step(words(0))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    loss_of(other, words(0)).backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_planned_alone():
    """`tightship.plan` takes several optimizers, as `tightship.fit` does."""
    model = Once()
    optimizers = sparse_and_dense(model, OPTIMIZERS["SparseAdam"])
    planned = tightship.plan(model, words(0), "100%", loss_fn=loss_of, optimizer=optimizers, cache=None)
    assert any(op.target == "optimizer.SparseAdam" for op in planned.graph.ops)


@pytest.mark.parametrize("limit", ["clip_norm", "clip_value"])
def test_not_clipped_as_in_eager(limit):
    model = Once()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(Unsupported, match=f"{limit} with the sparse gradient of 'embed"):
        fit(model, loss_of, optimizer, words(0), cache=None, **{limit: 1.0})


@pytest.mark.parametrize("limit", ["clip_norm", "clip_value"])
def test_not_clipped_where_steps_run_in_eager(limit):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    options = {limit: 1.0, "accumulate": 2}
    with pytest.warns(Fallback):
        step = fit(model, dense_at_first, optimizer, words(0), cache=None, **options)
    step(words(0))
    with pytest.raises(Unsupported, match=f"{limit} with the sparse gradient of 'embed"):
        step(words(1))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def dense_at_first(model, batch):
    return loss_of(lambda x: Once.forward(model, x), batch)


def test_looked_at():
    step = in_eager(Once, OPTIMIZERS["SGD"], "sparse=False", skip_nonfinite=True)
    assert step.skipped == 0


def test_a_hook_on_the_table():
    def build():
        model = Once()
        model.embed.weight.register_hook(lambda g: g * 0.5)
        return model

    in_eager(build, OPTIMIZERS["SGD"], "sparse")


@pytest.mark.skipif(not allocator.available("cpu"), reason="no C++ compiler")
@pytest.mark.parametrize(
    ("kind", "large"),
    [("SGD", False), ("momentum", False), ("Adagrad", False), ("SparseAdam", False), ("SparseAdam", True)],
)
def test_estimated(kind, large, monkeypatch, tmp_path):
    """The peak of a loop that accumulates, to the byte, with the rows that the batch names, also as if the table were
    too large to be made."""
    monkeypatch.setenv("TIGHTSHIP_CACHE", str(tmp_path))
    if large:
        monkeypatch.setattr(sparse, "_LARGE", 0)
    kinds = {**OPTIMIZERS, "momentum": lambda m: torch.optim.SGD(m, lr=0.1, momentum=0.9)}
    for name, (build, words_of) in MODELS.items():
        for number in (0, 2) if "padd" in name else (1,):
            model, batch = build(), words_of(number)
            table = next(m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
            model.requires_grad_(False)
            table.requires_grad_(True)
            parameters = list(table.parameters())

            def loop(model, batch, optimizer):
                for _ in range(2):
                    loss = loss_of(model, batch)
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            found = estimate(model, batch, kinds[kind](parameters), loop=loop)
            optimizer = kinds[kind](parameters)
            assert found.peak == measured(model, batch, loop, optimizer), (name, number)


def test_estimated_on_the_meta_device_as_many_rows_as_can_be():
    with torch.device("meta"):
        model = nn.Embedding(50_000_000, 16, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    few, many = torch.zeros(64, 8, dtype=torch.int64), torch.empty(64, 8, dtype=torch.int64, device="meta")
    peaks = [
        estimate(model, x, optimizer, lambda m, x: m(x).sin().sum(), kernels=False).peak for x in (few, many)
    ]
    size = model.weight.nbytes
    assert 3 * size < peaks[0] < peaks[1] < 3 * size + (1 << 20)
