"""Batches of varying length, filled up to few: one capture and one plan for each length, and eager's bits."""

import collections
import copy
import dataclasses
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tightship
from support.models import MODELS
from tightship import Pad
from tightship.errors import BadInput
from tightship.execute import cache as cache_module
from tightship.execute.interpreter import Fallback
from tightship.frontends.torch.capture.incremental import StepCapture
from tightship.frontends.torch.structure import padded

FILL = {"input_ids": 0, "attention_mask": 0, "labels": -100}
BUCKETS = (8, 12, 16)


@pytest.fixture
def captures(monkeypatch):
    seen = []
    begin = StepCapture.__init__
    monkeypatch.setattr(
        StepCapture, "__init__", lambda self, *a, **k: (seen.append(1), begin(self, *a, **k))[1]
    )
    return seen


class Tokens(nn.Module):
    """A small language model that looks at its mask and ignores labels of -100."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.mix = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.mix(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=-100)


def tokens(model, batch):
    return model(**batch)


def text(n, seed=0, rows=3):
    g = torch.Generator().manual_seed(100 * n + seed)
    ids = torch.randint(1, 50, (rows, n), generator=g)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def twins(make=Tokens):
    torch.manual_seed(0)
    model = make()
    other = copy.deepcopy(model)
    return model, other, *(torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, other))


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


OPTIONS = {"work": 20_000, "seconds": 20.0, "strict": True}


@pytest.mark.parametrize("loop", ["whole", "clipped", "accumulated", "split"])
def test_each_length_is_captured_once_and_trained_as_eager_trains_the_padded_batch(loop, captures):
    model, other, optimizer, reference = twins()
    more = {
        "whole": {},
        "clipped": {"clip_norm": 0.1},
        "accumulated": {"accumulate": 2},
        "split": {"split": True},
    }
    step = tightship.fit(
        model, tokens, optimizer, text(5), "95%", pad_to=Pad(FILL, to=BUCKETS), **more[loop], **OPTIONS
    )
    reserved, on_heap = step.reserved, any("ordinary heap" in n for n in step.notes)
    lengths = [5, 7, 8, 12, 9, 3, 16, 14, 11, 15, 8, 1]
    for k, n in enumerate(lengths):
        batch = text(n, k)
        filled = step.padded(batch)
        assert filled["input_ids"].shape[1] == next(b for b in BUCKETS if b >= n)
        want = tokens(other, filled)
        want.backward()
        if loop == "split":
            loss = step.backward(batch)
            step.update()
            model.zero_grad()
        else:
            loss = step(batch)
        if loop == "clipped":
            nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        if loop != "accumulated" or k % 2:
            reference.step()
            reference.zero_grad()
        assert torch.equal(loss, want.detach()) and same(model, other)
        found = step.measure()
        assert found["measured_peak"] <= found["budget"] and not found["misses"]
    # Of an accumulated step, those that add to gradients are kinds of their own.
    assert len(captures) == len(BUCKETS) * (2 if loop == "accumulated" else 1)
    assert on_heap or step.reserved == reserved  # the largest length was planned first


def test_the_largest_length_is_what_a_percentage_is_of_and_is_not_refused_later():
    model, _, optimizer, _ = twins()
    step = tightship.fit(model, tokens, optimizer, text(5), "95%", pad_to=Pad(FILL, to=BUCKETS), **OPTIONS)
    longest, _, optimizer, _ = twins()
    alone = tightship.fit(longest, tokens, optimizer, text(16), "95%", **OPTIONS)
    assert step.plan.budget == alone.plan.budget == step.plan.peak_before * 95 // 100
    small, _, optimizer, _ = twins()
    unknown = Pad(FILL, multiple=8)
    assert (
        tightship.fit(small, tokens, optimizer, text(5), "95%", pad_to=unknown, **OPTIONS).plan.budget
        < step.plan.budget
    )


def test_more_lengths_than_variants_are_all_kept(captures):
    model, _, optimizer, _ = twins()
    pad = Pad(FILL, multiple=2, most=12)
    step = tightship.fit(model, tokens, optimizer, text(5), "100%", pad_to=pad, variants=1, **OPTIONS)
    for _ in range(3):
        for n in range(1, 13):
            step(text(n))
    assert len(captures) == 6


@pytest.mark.parametrize("name", ["gpt2", "llama_sdpa", "bert", "t5"])
def test_models_of_transformers(name, captures):
    model, _, batch_fn = MODELS[name]()
    other = copy.deepcopy(model)
    optimizer, reference = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, other))
    sample = {k: v for k, v in batch_fn(0).items()}
    full = sample["input_ids"].shape[1]
    pads = [
        Pad(
            {"input_ids": 0, "attention_mask": 0, **({} if name == "t5" else {"labels": -100})},
            to=(full - 4, full),
        )
    ]
    if name == "t5":
        pads.append(Pad({"labels": -100}, multiple=4))

    def cut(k, n):
        batch = {**batch_fn(k)}
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, -1] = 0
        return {key: x[:, :n] if x.dim() > 1 and x.shape[1] == full else x for key, x in batch.items()}

    step = tightship.fit(model, None, optimizer, cut(0, full), "100%", pad_to=pads, **OPTIONS)
    for k, n in enumerate((full - 1, full - 4, full - 6, full, full - 3, full - 5)):
        batch = cut(k, n)
        torch.manual_seed(k)
        want = other(**step.padded(batch)).loss
        want.backward()
        reference.step()
        reference.zero_grad()
        torch.manual_seed(k)
        assert torch.equal(step(batch), want.detach()) and same(model, other)
    assert len(captures) <= 4  # a mask that is all ones may take another path, in eager, too


def test_plans_of_all_lengths_are_kept_for_the_next_start(tmp_path, monkeypatch):
    def run():
        model, _, optimizer, _ = twins()
        pad = Pad(FILL, to=BUCKETS)
        step = tightship.fit(model, tokens, optimizer, text(5), "90%", pad_to=pad, cache=tmp_path, **OPTIONS)
        for n in (5, 10, 15):
            step(text(n))

    run()
    monkeypatch.setattr(cache_module, "advised", None)
    run()


def test_a_step_that_cannot_be_planned_sees_the_padded_batch_too():
    model, other, optimizer, reference = twins()

    def hard(model, batch):
        loss = model(**batch)
        return loss * (1 + (loss.detach()[None] > 0).nonzero().shape[0])

    with pytest.warns(Fallback):
        step = tightship.fit(model, hard, optimizer, text(5), "100%", pad_to=Pad(FILL, to=16), work=1000)
    want = hard(other, step.padded(text(6)))
    want.backward()
    reference.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(step(text(6)), want.detach()) and same(model, other)


# --- what is filled, and what not


Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor


X, Y = torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3)
CONTAINERS = {
    "tensor": (X, 7, lambda b: [b]),
    "tuple": ((X, Y), (7, 0.5), list),
    "list": ([X, "a", Y], [7, None, 0.5], lambda b: [b[0], b[2]]),
    "dict": ({"x": X, "y": Y, "n": 3}, {"x": 7, "y": 0.5}, lambda b: [b["x"], b["y"]]),
    "nested": ({"in": (X,), "out": {"y": Y}}, {"in": (7,), "out": {"y": 0.5}}, lambda b: [b["in"][0], b["out"]["y"]]),
    "namedtuple": (Pair(X, Y), {"x": 7, "y": 0.5}, list),
    "namedtuple by another": (Pair(X, Y), Pair(7, 0.5), list),
    "dataclass": (Sample(X, Y), {"x": 7, "y": 0.5}, lambda b: [b.x, b.y]),
    "UserDict": (collections.UserDict(x=X, y=Y), {"x": 7, "y": 0.5}, lambda b: [b["x"], b["y"]]),
    "mapping": (types.MappingProxyType({"x": X, "y": Y}), {"x": 7, "y": 0.5}, lambda b: [b["x"], b["y"]]),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONTAINERS)
def test_fill_is_built_as_the_batch_is(kind):
    batch, fill, tensors = CONTAINERS[kind]
    made = padded(batch, [Pad(fill, to=5)])
    assert type(made) is type(batch)
    for was, now, value in zip(tensors(batch), tensors(made), (7, 0.5), strict=False):
        assert now.dtype == was.dtype and torch.equal(now[:, :3], was)
        assert now.shape == (2, 5) and bool((now[:, 3:] == value).all())
    assert padded(made, [Pad(fill, to=5)]) is made


def test_what_is_not_named_or_has_no_such_dimension_stays():
    batch = {"x": X, "y": torch.ones(2), "z": torch.ones(2, 3, 4)}
    made = padded(batch, [Pad({"x": 0, "y": 0, "z": None}, to=(4,))], whole=True)
    assert made["x"].shape == (2, 4) and made["y"] is batch["y"] and made["z"] is batch["z"]


def test_one_tensor_in_two_places_is_filled_with_two_numbers():
    made = padded({"input_ids": X, "labels": X}, [Pad({"input_ids": 0, "labels": -100}, to=4)])
    assert made["input_ids"][0, 3] == 0 and made["labels"][0, 3] == -100


def test_several_lengths_and_dimensions_from_the_end():
    images = torch.randn(2, 3, 5, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    batch = {"image": images, "words": X, "mask": torch.ones(2, 1, 3, 3, dtype=torch.bool)}
    pads = [
        Pad({"image": 0.0}, dim=2, multiple=4),
        Pad({"image": 0.0}, dim=-1, multiple=4),
        Pad({"words": 1, "mask": True}, dim=-1, to=(2, 4)),
        Pad({"mask": False}, dim=-2, to=(2, 4)),
    ]
    made = padded(batch, pads)
    assert made["image"].shape == (2, 3, 8, 8) and made["image"].is_contiguous(
        memory_format=torch.channels_last
    )
    assert made["image"].requires_grad and made["image"].is_leaf
    assert torch.equal(made["image"][:, :, :5, :6], images) and made["image"].sum().isclose(images.sum())
    assert made["words"].shape == (2, 4) and made["mask"][0, 0].tolist() == [[True] * 4] * 3 + [[False] * 4]


def test_lengths():
    assert [Pad(0, to=(8, 4, 8)).length(n) for n in (0, 4, 5, 8)] == [4, 4, 8, 8]
    assert [Pad(0, multiple=4).length(n) for n in (0, 1, 4, 5)] == [4, 4, 4, 8]
    assert list(Pad(0, multiple=4, most=11).lengths) == [4, 8] and Pad(0, multiple=4).lengths is None
    assert Pad(0, to=5).lengths == (5,)


FAULTS = {
    "longer": (Pad({"x": 0}, to=(1, 2)), r"length 3 at dimension 1, and the largest length is 2: truncate"),
    "longer than most": (Pad({"x": 0}, multiple=2, most=3), r"the largest length is 2"),
    "no such name": (Pad({"ids": 0}, to=4), r"no tensor \['ids'\]: its tensors are \['x'\], \['y'\], \['z'\]"),
    "a number for all": (Pad(0, to=4), r"no tensor batch"),
    "text": (Pad({"x": "pad"}, to=4), r"what fills \['x'\] is no number"),
    "lengths that differ": (Pad({"x": 0, "y": 0}, to=9), r"3 of \['x'\], 5 of \['y'\]; give a Pad for each"),
    "forgotten": (Pad({"x": 0}, to=4), r"\['z'\] has length 3 at dimension 1 as well.*or None"),
    "no such dimension": (Pad({"x": 0}, dim=2, to=4), r"no tensor that is to be filled has a dimension 2"),
    "a fraction": (Pad({"x": 0.5}, to=4), r"\['x'\] is of type torch.int64, which cannot hold"),
    "not a number": (Pad({"x": float("nan")}, to=4), r"cannot hold"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_said(fault):
    pad, said = FAULTS[fault]
    batch = {"x": X, "y": torch.ones(2, 5), "z": torch.ones(2, 3)}
    with pytest.raises(BadInput, match=said):
        padded(batch, [pad], whole=fault == "forgotten")


@pytest.mark.parametrize(
    "given", [{}, {"to": ()}, {"to": 0}, {"to": (4, -1)}, {"to": 4, "multiple": 2}, {"most": 4}, {"to": True},
              {"multiple": 8, "most": 4}, {"multiple": 2.0}]
)  # fmt: skip
def test_lengths_that_make_no_sense(given):
    with pytest.raises(BadInput, match="Pad"):
        Pad(0, **given)


def test_a_batch_that_is_too_long_is_refused_before_its_code_runs_and_training_goes_on():
    model, _, optimizer, _ = twins()
    ran = []

    def counted(model, batch):
        ran.append(1)
        return tokens(model, batch)

    step = tightship.fit(model, counted, optimizer, text(5), "100%", pad_to=Pad(FILL, to=8), **OPTIONS)
    count = len(ran)
    with pytest.raises(BadInput, match="largest length is 8"):
        step(text(9))
    assert len(ran) == count
    step(text(8))
    for wrong in ([64], 64, {"input_ids": 0}, "64"):
        with pytest.raises(BadInput, match=r"pad_to is no tightship\.Pad"):
            tightship.fit(model, counted, optimizer, text(5), pad_to=wrong)
