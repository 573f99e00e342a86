"""What a loop needs as it is: the bytes of torch's allocator at its fullest, split up, and what would help."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tightship
from support.batches import cache_argument
from support.commands import as_json, run
from support.runs import measured
from tightship.errors import BadInput, Infeasible, Unsupported
from tightship.execute import allocator
from tightship.execute.blocks import blocks
from tightship.execute.eager_peak import reserved
from tightship.execute.estimate import DEVICES, estimate
from tightship.execute.estimate_remedies import with_batch
from tightship.frontends.torch.capture import data_guards
from tightship.frontends.torch.capture.step import capture_step
from tightship.graph import aligned
from tightship.planners import default
from tightship.report.text import rendered, share_tables

PARTS = (
    "parameters", "buffers", "batch", "gradients", "optimizer_state", "activations", "temporaries", "constants",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTSHIP_CACHE", str(tmp_path / "cache"))


def step(model: Any, batch: Any, optimizer: Any, *, accumulate: int = 1, set_to_none: bool = True) -> Any:
    for _ in range(accumulate):
        x, y = batch
        loss = nn.functional.cross_entropy(model(x), y)
        if accumulate > 1:
            loss = loss / accumulate
        loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    else:
        model.zero_grad()
    return loss.detach()


def step_of(loss_fn: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any, Any], torch.Tensor]:
    def loop(model: Any, batch: Any, optimizer: Any) -> torch.Tensor:
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return loop


class Net(nn.Module):
    """Convolutions, norms, attention and residual sums, whose gradients autograd adds in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU())
        layer = partial(nn.TransformerEncoderLayer, 16, 2, 32, dropout=0.1, batch_first=True)
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.head = nn.Linear(16, 10)
        self.recompute = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            x = x * 0.5 + x / 3
        return self.head(x.mean(1))


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def images(count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, 20, 20), torch.randint(0, 10, (count,))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda p: None,
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p),
    "adamw": lambda p: torch.optim.AdamW(p),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


class Unused(nn.Module):
    """Divides by a number what no gradient comes back to: its node never runs, and goes with the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.other(x)
        y /= 3.0
        return self.used(x), y


def test_numbers_that_no_backward_pass_reads_end_with_their_graph() -> None:
    def loop(model: Any, x: torch.Tensor, optimizer: Any) -> torch.Tensor:
        used, _other = model(x)
        loss = used.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model, x = Unused(), torch.randn(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert estimate(model, x, optimizer, loop=loop, steps=3).peak == measured(model, x, loop, optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_loop_needs_what_the_allocator_measures(name: str) -> None:
    model, batch = net(), images()
    optimizer = OPTIMIZERS[name](model.parameters())
    found = estimate(model, batch, optimizer, nn.CrossEntropyLoss())
    assert found.peak == measured(model, batch, step, optimizer)
    assert found.peak == sum(getattr(found, part) for part in PARTS)
    assert found.training and not found.unknown
    assert found.optimizer_state == 0 or name not in ("none", "sgd")


@pytest.mark.parametrize(
    "options", [{"accumulate": 3}, {"set_to_none": False}, {"accumulate": 2, "set_to_none": False}]
)
def test_options_of_the_loop(options: dict[str, Any]) -> None:
    model, batch = net(), images()
    optimizer = torch.optim.AdamW(model.parameters())
    found = estimate(model, batch, optimizer, nn.CrossEntropyLoss(), **options)
    assert found.peak == measured(model, batch, partial(step, **options), optimizer)


SUMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "branches": lambda h: (h + h.tanh() + h.sin()).sum(),
    "columns": lambda h: torch.stack([h[:, k].sin().sum() for k in range(8)]).sum() + h.exp().sum(),
    "slices": lambda h: torch.stack([h[:, k : k + 4].sin().sum() for k in range(8)]).sum() + h.sum(),
    "products": lambda h: (h.sin() * h.cos() * h.exp()).sum(),
    "transposed": lambda h: (h.t() @ h).sum() + h.t().exp().sum(),
    "cumulated": lambda h: (h.cumsum(1) + torch.logsumexp(h, 1, keepdim=True)).sum() + (h * h.norm()).sum(),
}


@pytest.mark.parametrize("name", SUMS)
def test_autograd_adds_gradients_in_place_where_nobody_else_holds_them(name: str) -> None:
    model, batch = nn.Linear(64, 64), torch.randn(32, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return SUMS[name](model(batch))

    assert estimate(model, batch, optimizer, loss_fn).peak == measured(
        model, batch, step_of(loss_fn), optimizer
    )


TWICE: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(64, 64),
    "linear in three dimensions": lambda: nn.Sequential(nn.Unflatten(1, (2, 32)), nn.Linear(32, 256)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (16, 2, 2)), nn.Conv2d(16, 64, 2), nn.BatchNorm2d(64)
    ),
    "transposed": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)),
    "recurrent": lambda: nn.GRUCell(64, 64),
    "attention": lambda: nn.TransformerEncoderLayer(64, 2, 64, dropout=0.0),
}


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("calls", [2, 3])
def test_gradients_of_a_model_that_is_called_several_times(name: str, calls: int) -> None:
    """Those of a linear layer are views, whose base holds the storage, too: autograd adds them out of place."""
    torch.manual_seed(0)
    model, batch = TWICE[name](), torch.randn(4, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return torch.stack([model(batch * (k + 1)).sin().sum() for k in range(calls)]).sum()

    found = estimate(model, batch, optimizer, loss_fn).peak
    assert found == measured(model, batch, step_of(loss_fn), optimizer)


def test_tensors_of_a_batch_that_share_memory_are_there_once() -> None:
    text = torch.randint(0, 50, (8, 33))
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    for batch in ((text, text), (text[:, :-1], text[:, 1:]), (text[:4], text[4:]), (text, text.clone())):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        found = estimate(model, batch, optimizer, loss_fn)
        assert found.peak == measured(model, batch, step_of(loss_fn), optimizer)
        assert found.batch == aligned(text.nbytes) * (2 if batch[0] is text and batch[1] is not text else 1)


class Tables(nn.Module):
    """Reads tensors that are none of its parameters and buffers, whole and in parts, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tables = nn.Linear(64, 64), [torch.randn(64, 64)]
        self.grid = torch.from_numpy(np.ones((64, 64), np.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tables = [t.to(torch.float32) for t in self.tables]
        h = self.linear(x) * self.tables[0].view(64, 64)
        return (h.sin() * self.tables[0] + self.tables[0][:1] + self.tables[0][1:2] * self.grid).exp()


def test_tensors_of_nobody_s_are_there_once_all_the_time() -> None:
    model, x = Tables(), torch.randn(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop = step_of(lambda model, x: model(x).sum())
    found = estimate(model, x, optimizer, loop=loop)
    tables = model.tables[0].nbytes + model.grid.nbytes
    assert found.constants == tables
    assert found.peak == measured(model, x, loop, optimizer) + tables


def test_an_array_that_a_step_makes_ends_with_its_last_tensor() -> None:
    def loop(model: Any, x: torch.Tensor, optimizer: Any) -> torch.Tensor:
        noise = torch.from_numpy(np.ones((64, 64), np.float32)) * 2
        loss = (model(x) * noise).sum()
        loss.backward()
        return loss.detach()

    model, x = nn.Linear(64, 64), torch.randn(64, 64)
    short, long = (estimate(model, x, None, loop=loop, steps=n) for n in (1, 4))
    assert short.phases["forward"] <= long.phases["forward"] < short.phases["forward"] + 2 * x.nbytes
    assert not long.constants


def test_checkpoints_of_the_model_itself_recompute_in_the_backward_pass() -> None:
    model, batch = net(), images()
    kept = estimate(model, batch, torch.optim.AdamW(model.parameters()), nn.CrossEntropyLoss())
    model.recompute = True
    optimizer = torch.optim.AdamW(model.parameters())
    found = estimate(model, batch, optimizer, nn.CrossEntropyLoss())
    assert found.peak == measured(model, batch, step, optimizer)
    assert found.activations < kept.activations


def test_checkpoints_as_an_option_are_those_that_a_model_of_its_own_has() -> None:
    model, batch = net(), images()
    asked = estimate(model, batch, None, nn.CrossEntropyLoss(), checkpoint=True)
    assert "forward" not in vars(model.layers[0])
    assert asked.flops > estimate(model, batch, None, nn.CrossEntropyLoss()).flops
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    assert asked.peak == measured(model, batch, step)


def test_autocast() -> None:
    model, batch = net(), images()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loop(model: Any, batch: Any, optimizer: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    found = estimate(model, batch, optimizer, nn.CrossEntropyLoss(), autocast="bfloat16")
    assert found.peak == measured(model, batch, loop, optimizer)


def test_frozen_parts_have_no_gradients_and_no_state() -> None:
    model, batch = net(), images()
    for name, p in model.named_parameters():
        p.requires_grad = name.startswith("head")
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    found = estimate(model, batch, optimizer, nn.CrossEntropyLoss())
    assert found.peak == measured(model, batch, step, optimizer)
    assert found.optimizer_state < found.parameters


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_gradients_of_frozen_parts_that_a_kernel_makes_nonetheless(frozen: str, groups: int) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=groups))
    getattr(model[1], frozen).requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    x, loop = torch.randn(2, 8, 8, 8), step_of(lambda model, x: model(x).sin().sum())
    assert estimate(model, x, optimizer, loop=loop).peak == measured(model, x, loop, optimizer)


class Scaled(nn.Module):
    """Multiplies by numbers, which autograd keeps as tensors: in what is recomputed until that is over."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(self.scaled, layer, x, use_reentrant=False)
        return x

    def scaled(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 + (layer(x) * 0.22).tanh() * 0.7


def test_numbers_that_a_recomputation_keeps_end_with_it() -> None:
    model, x = Scaled(), torch.randn(2, 64)
    optimizer, loop = torch.optim.SGD(model.parameters(), 0.1), step_of(lambda model, x: model(x).sum())
    assert estimate(model, x, optimizer, loop=loop).peak == measured(model, x, loop, optimizer)


def test_a_loop_that_has_run_before_has_state_and_gradients() -> None:
    model, batch = net(), images()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, batch, optimizer)
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    found = estimate(model, batch, optimizer, nn.CrossEntropyLoss())
    assert all(torch.equal(p.grad, before[n]) for n, p in model.named_parameters())
    assert {float(s["step"]) for s in optimizer.state.values()} == {1.0}
    fresh = estimate(model, batch, torch.optim.AdamW(model.parameters()), nn.CrossEntropyLoss())
    state = sum(aligned(t.nbytes) for s in optimizer.state.values() for t in s.values())
    assert found.optimizer_state == state
    assert found.phases["backward"] > fresh.phases["backward"]  # which adds to gradients that are there


def test_gradients_that_are_there_end_when_the_loop_lets_go_of_them() -> None:
    model, batch = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]), torch.randn(256, 64)
    loop = step_of(lambda model, x: model(x).sum())
    fresh = estimate(model, batch, torch.optim.AdamW(model.parameters()), loop=loop)
    model(batch).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    found = estimate(model, batch, optimizer, loop=loop)
    assert found.peak == fresh.peak == measured(model, batch, loop, optimizer)  # of the second step


def test_a_loop_of_ones_own() -> None:
    model, batch = net(), images()
    optimizer = torch.optim.AdamW(model.parameters())

    def loop(model: Any, batch: Any, optimizer: Any) -> Any:
        optimizer.zero_grad()
        logits = model(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss, logits

    found = estimate(model, batch, optimizer, loop=loop)
    assert found.peak == measured(model, batch, loop, optimizer)


def test_numbers_for_a_log_are_said_to_be_assumed() -> None:
    model, batch = net(), images()
    optimizer, said = torch.optim.SGD(model.parameters(), 0.1), []

    def loop(model: Any, batch: Any, optimizer: Any) -> Any:
        loss = step(model, batch, optimizer)
        said.append(loss.item())

    found = estimate(model, batch, optimizer, loop=loop)
    assert said == [1.0, 1.0] and any("test_estimate.py:" in place for place in found.unread)
    assert found.peak == measured(model, batch, loop, optimizer)


def test_inference_keeps_no_activations_for_a_backward_pass() -> None:
    model, batch = net().eval(), images()[0]

    def forward(model: Any, batch: Any, _: Any) -> Any:
        with torch.no_grad():
            return model(batch)

    found = estimate(model, batch)
    assert found.peak == measured(model, batch, forward)
    assert not found.training and found.gradients == 0
    assert found.peak < estimate(model, (batch, images()[1]), None, nn.CrossEntropyLoss()).peak


def test_prefill_and_decode_of_a_language_model() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).eval()
    prompt = {"input_ids": torch.randint(0, 64, (2, 16)), "use_cache": True}

    def forward(model: Any, batch: Any, _: Any) -> Any:
        with torch.no_grad():
            return model(**batch)

    prefill = estimate(model, prompt)
    assert prefill.peak == measured(model, prompt, forward)
    cache = forward(model, prompt, None).past_key_values
    token = {"input_ids": torch.randint(0, 64, (2, 1)), cache_argument(model): cache}
    decode = estimate(model, token, steps=1)
    assert decode.peak > decode.parameters + 2 * 2 * 2 * 16 * 32 * 4  # keys and values of each layer
    assert decode.peak < prefill.peak
    assert cache.get_seq_length() == 16


def test_a_model_on_the_meta_device_is_never_allocated() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8192, 8192), nn.GELU()) for _ in range(16)])
    allocator.load()
    with allocator.Meter() as meter:
        found = estimate(
            model, torch.empty(64, 8192, device="meta"), torch.optim.AdamW(model.parameters()), summed
        )
    size = sum(p.numel() * 4 for p in model.parameters())
    assert found.parameters == size and found.optimizer_state >= 2 * size
    assert found.static >= 3 * size and meter.peak < 1 << 27
    assert found.unknown  # kernels were not run


def summed(model: Any, x: Any) -> Any:
    return model(x).float().pow(2).mean()


def test_nothing_of_the_user_is_touched() -> None:
    model, batch = net(), images()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    state = torch.get_rng_state()
    estimate(model, batch, optimizer, nn.CrossEntropyLoss())
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert not optimizer.state and all(p.grad is None for p in model.parameters())
    assert model.training and "step" not in vars(optimizer)


# --- will it fit? ---


def test_what_the_caching_allocator_reserves_on_a_gpu() -> None:
    """Tensors of 9 MiB lie two to a segment of 20, of which every other one ends."""
    mib = 1 << 20
    pieces = [(k, 9 * mib) for k in range(10)]
    assert reserved(pieces) == 5 * 20 * mib
    ended = [*pieces, *((k, -1) for k in range(0, 10, 2)), (10, 18 * mib)]
    assert reserved(ended) == (5 * 20 + 18) * mib
    assert reserved(ended, 118 * mib) == 118 * mib
    assert reserved(ended, 117 * mib) is None  # 45 are alive, in every segment
    cached = [*pieces, *((k, -1) for k in range(10)), (10, 30 * mib)]
    assert reserved(cached, 117 * mib) == 100 * mib  # all of it is given back first


def test_an_estimate_for_a_gpu_fits_only_where_its_allocator_finds_room() -> None:
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(1 << 11, 1 << 11), nn.ReLU())])

    def loss(model: Any, x: Any) -> torch.Tensor:
        return model(x).square().mean()

    found = estimate(
        model, torch.empty(1 << 10, 1 << 11), torch.optim.AdamW(model.parameters()), loss, device="l4"
    )
    assert found.reserved is not None and found.reserved > found.peak
    assert found.rows()["reserved"] == found.reserved and "by PyTorch's allocator" in str(found)
    beside = found.total - found.peak
    assert found.fits(found.reserved + beside) and not found.fits(found.total - 1)
    assert not found.fits(found.total)
    said = "\n".join(found.lines(found.total))
    assert "does NOT fit" in said and "in pieces" in said
    assert found.needs(found.total) == found.reserved + beside and found.needs(1 << 40) == found.total
    largest = found.largest_batch(found.total)
    assert 0 < largest < 1 << 10
    few = torch.empty(largest, 1 << 11)
    less = estimate(model, few, torch.optim.AdamW(model.parameters()), loss, device="l4")
    assert less.fits(found.total)
    remedies = {r.name for r in found.remedies(found.total)}
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in remedies
    plain = estimate(model, torch.empty(4, 1 << 11), None, loss)
    assert plain.reserved is None and plain.rows()["reserved"] is None


def test_fits_compares_with_memory_or_with_the_devices_own() -> None:
    model, batch = net(), images()
    found = estimate(model, batch, None, nn.CrossEntropyLoss())
    assert found.fits(found.peak) and not found.fits(found.peak - 1) and found.fits("1GiB")
    with pytest.raises(BadInput, match="give the memory there is"):
        found.fits()
    with pytest.raises(BadInput, match="percentage"):
        found.fits("50%")
    gpu = estimate(model, batch, None, nn.CrossEntropyLoss(), device="H100")
    assert gpu.fits() and gpu.total == gpu.peak + DEVICES["h100"].context + DEVICES["h100"].workspace
    assert gpu.peak % 512 == 0


def test_on_a_gpu_the_optimizer_steps_all_parameters_together() -> None:
    model, batch = net(), images()
    loss = nn.CrossEntropyLoss()
    usual = estimate(model, batch, torch.optim.AdamW(model.parameters()), loss, device="a10g")
    together = estimate(
        model, batch, torch.optim.AdamW(model.parameters(), foreach=True), loss, device="a10g"
    )
    one_by_one = estimate(
        model, batch, torch.optim.AdamW(model.parameters(), foreach=False), loss, device="a10g"
    )
    assert usual.phases == together.phases
    assert one_by_one.phases["update"] < usual.phases["update"]


def test_a_plan_that_draws_again_is_a_remedy() -> None:
    rows = [m for _ in range(8) for m in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.3))]
    model = nn.Sequential(*rows)

    def loss(model: Any, x: Any) -> torch.Tensor:
        return model(x).square().mean()

    found = estimate(model, torch.empty(4096, 64), torch.optim.SGD(model.parameters(), 0.1), loss)
    limit = found.peak * 35 // 100
    own = next(r for r in found.remedies(limit) if r.name == "tightship.fit")
    assert own.fits and own.peak <= limit
    step = capture_step(model, loss, torch.optim.SGD(model.parameters(), 0.1), torch.empty(4096, 64))
    with pytest.raises(Infeasible):
        default.plan(step.graph, limit, default.Options(redraw=False))


def test_remedies_are_tried_not_guessed() -> None:
    model, batch = net(), images(8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_fn(model: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    found = estimate(model, batch, optimizer, loss_fn)
    limit = found.peak * 3 // 4
    remedies = {r.name.partition(" of ")[0]: r for r in found.remedies(limit, seconds=1.0)}
    assert set(remedies) == {"a checkpoint around each block", "a batch", "tightship.fit"}
    assert remedies["a batch"].fits and remedies["a batch"].peak <= limit
    size = int(remedies["a batch"].name.rpartition(" ")[2])
    small, larger = (with_batch(batch, 8, n) for n in (size, size + 1))
    assert remedies["a batch"].peak == estimate(model, small, optimizer, loss_fn).peak
    assert estimate(model, larger, optimizer, loss_fn).peak > limit
    kept = estimate(model, batch, optimizer, loss_fn, checkpoint=True)
    assert remedies["a checkpoint around each block"].peak == kept.peak


def test_blocks_are_the_members_of_lists_of_one_class() -> None:
    model = net()
    assert blocks(model) == list(model.layers)
    assert blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


def test_who_makes_up_the_peak_by_module_and_line() -> None:
    model, batch = net(), images()
    found = estimate(model, batch, torch.optim.AdamW(model.parameters()), nn.CrossEntropyLoss())
    assert sum(s.nbytes for s in found.by_module) == found.peak
    assert any(s.place.startswith("layers.*") and s.what == "parameters" for s in found.by_module)
    made = found.activations + found.temporaries
    assert sum(s.nbytes for s in found.by_line) == made
    assert any("test_estimate.py:" in s.place for s in found.by_line)
    assert "peak" in str(found) and str(found) == repr(found)


# --- bad input ---


def test_arguments_that_make_no_sense() -> None:
    model, batch = net(), images()
    loss = nn.CrossEntropyLoss()
    with pytest.raises(BadInput, match="unknown device 'rtx9'"):
        estimate(model, batch, None, loss, "rtx9")
    with pytest.raises(BadInput, match="accumulate must be"):
        estimate(model, batch, None, loss, accumulate=0)
    with pytest.raises(BadInput, match="unknown options quantized"):
        estimate(model, batch, None, loss, quantized=True)  # type: ignore[call-arg]
    with pytest.raises(BadInput, match="all of a step"):
        estimate(model, batch, None, loss, loop=step)
    with pytest.raises(BadInput, match="autocast is to"):
        estimate(model, batch, None, loss, autocast="float64")
    with pytest.raises(BadInput, match="no blocks"):
        estimate(nn.Linear(3, 3), torch.randn(2, 3), None, lambda m, b: m(b).sum(), checkpoint=True)
    with pytest.raises(Unsupported, match="not the model's"):
        estimate(model, batch, torch.optim.SGD([nn.Parameter(torch.zeros(3))], 0.1), loss)
    with pytest.raises(BadInput, match=r"give a torch\.nn\.Module"):
        tightship.estimate("model", batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("reads", [lambda h: h.detach().numpy(), lambda h: np.asarray(h.detach())])
def test_a_loop_that_gives_what_it_computes_to_numpy_is_refused(reads: Callable[[torch.Tensor], Any]) -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        h = model(batch)
        return h[:, int(reads(h)[0].argmax())].sum()

    with pytest.raises(Unsupported, match="given to NumPy"):
        estimate(nn.Linear(4, 4), torch.ones(2, 4), None, loss_fn)


def test_a_loop_that_decides_by_its_parameters_is_refused() -> None:
    model = nn.Linear(4, 4)

    def loss_fn(model: Any, x: Any) -> Any:
        y = model(x)
        return torch.stack([y.sum() for _ in range(int(y[0].argmax()) + 1)]).sum()

    with pytest.raises(Unsupported, match="depend on data"):
        estimate(model, torch.randn(2, 4), None, loss_fn)


def test_answers_to_yes_or_no_are_assumed_and_said() -> None:
    model, x = nn.Linear(64, 64), torch.randn(8, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_fn(model: Any, x: Any) -> Any:
        y = model(x)
        if not torch.isfinite(y).all():
            return y.sum()
        return model(y.tanh()).exp().mean() if y.mean() > 1e6 else y.exp().sum()

    found = estimate(model, x, optimizer, loss_fn)
    assert found.peak == measured(model, x, step_of(loss_fn), optimizer)
    assert [a.partition(" at ")[0] for a in found.answered] == ["True", "False"]
    assert "assumed            of what only a real step has: True at" in str(found)


SOURCE = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

def step():
    model = net()
    batch = torch.randn(16, 32), torch.zeros(16, dtype=torch.long)
    return model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), batch

def forward():
    return net(), torch.randn(16, 32)

def raises():
    raise KeyError("nothing here")

class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def speechless():
    raise Speechless

def named_optimizer():
    return net(), nn.CrossEntropyLoss(), "adam", (torch.randn(16, 32), torch.zeros(16, dtype=torch.long))

def other_shape():
    return net(), torch.randn(16, 5)

class Moves(nn.Module):
    def forward(self, x):
        raise RuntimeError("no CUDA GPUs are available")

def moves():
    return Moves(), torch.randn(3)


def large():
    return nn.Linear(1 << 16, 1 << 16, device="meta"), torch.empty(1, 1 << 16, device="meta")
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"estimated_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_the_verb_answers_in_json(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = as_json("estimate", f"{source}:step", "--fits", "1MiB", capsys=capsys)
    assert status == 0 and rows["fits"] is True and rows["memory"] == 1 << 20
    assert rows["peak"] == sum(rows[part] for part in PARTS)
    assert {"peak", "static", "parameters", "gradients", "optimizer_state", "activations", "fits"} <= set(
        rows
    )
    assert json.loads(json.dumps(rows)) == rows
    status, rows = as_json("estimate", f"{source}:step", "--fits", "10kB", "--remedies", capsys=capsys)
    assert status == 1 and rows["fits"] is False
    assert {r["name"].partition(" of ")[0] for r in rows["remedies"]} >= {"a batch", "tightship.fit"}
    status, rows = as_json("estimate", f"{source}:forward", capsys=capsys)
    assert status == 0 and rows["fits"] is None and rows["training"] is False


def test_the_verb_answers_people(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = run("estimate", f"{source}:step", "--fits", "10kB", capsys=capsys)
    assert status == 1 and "does NOT fit" in text and "optimizer state" in text
    status, text, _ = run("estimate", f"{source}:step", "--device", "t4", capsys=capsys)
    assert status == 0 and "fits" in text and "assumed" in text


@pytest.mark.parametrize(
    "name", ["model.onnx", "net.tflite", "net.keras", "graph.pb", "graph.json", "module.txt"]
)
def test_a_models_file_is_sent_to_plan(name, capsys):
    """Not told to be an unknown source, in a sentence that lists it among the known ones."""
    status, rows = as_json("estimate", name, capsys=capsys)
    said = rows["error"]["message"]
    assert status == 2 and name in said and "no step to run" in said and "tightship plan" in said


def test_modules_have_every_byte_of_the_model_s_and_hold_what_is_inside_them() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.ReLU(), nn.Linear(16, 4)))
    batch = (torch.randn(4, 8), torch.randint(4, (4,)))
    found = estimate(
        model, batch, torch.optim.AdamW(model.parameters()), nn.CrossEntropyLoss(), device="h100"
    )
    rows = {m.module: m for m in found.modules}
    everything = rows[""]
    assert everything.parameters == found.parameters + found.buffers
    assert everything.gradients == found.gradients and everything.optimizer_state == found.optimizer_state > 0
    assert everything.activations == found.activations + found.temporaries
    assert everything.share == (found.peak - found.batch - found.constants) / found.peak
    assert rows["1"].parameters == rows["1.1"].parameters > 0 < rows["1"].optimizer_state
    assert everything.parameters == rows["0"].parameters + rows["1"].parameters
    assert list(rows) == ["", "0", "1", *(m for m in rows if m.startswith("1."))]


@pytest.mark.parametrize("width", [60, 80, 140])
def test_tables_of_modules_fit_the_terminal(width: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a_rather_long_name_of_a_list_of_blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for m in self.a_rather_long_name_of_a_list_of_blocks:
                x = m(x).relu()
            return x

    model = Model()
    found = estimate(model, torch.randn(4, 8), torch.optim.AdamW(model.parameters()), lambda m, x: m(x).sum())
    text = rendered(share_tables(found, 10), width)
    assert max(map(len, text.splitlines())) <= width
    assert width == 60 or "parameters" in text.split("\n", 1)[0]  # there is room for more than the share
    assert all("share" in line for line in text.splitlines() if "bytes" in line)
    assert "(all)" in text and "*" in text and "blocks.1" not in text


def test_names_are_no_markup_and_no_lines_of_their_own() -> None:
    names = ["[bold]a", "b\npeak 0 B", "c\x1b[31m\u202e"]
    model = nn.Sequential(OrderedDict((name, nn.Linear(4, 4)) for name in names))
    found = estimate(model, torch.randn(2, 4))
    lines = rendered(share_tables(found, 10), 140).splitlines()
    for shown in ("[bold]a", "b<U+000A>peak 0 B", "c<U+001B>[31m<U+202E>"):
        assert sum(line.startswith(f"{shown} ") for line in lines) >= 2  # in each table of modules


def test_counters_of_parameters_are_evaluated_once_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every counter's number is asked for by itself, and one op counts all of them: each question alone would run
    the counts of all parameters again."""
    evaluated = []

    def counted(records: list[Any], *others: Any) -> Any:
        evaluated.append(len(records))
        return evaluate(records, *others)

    evaluate = data_guards.evaluate
    monkeypatch.setattr(data_guards, "evaluate", counted)
    sums = []
    for count in (4, 16):
        evaluated.clear()
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
        estimate(
            model, torch.randn(2, 4), torch.optim.AdamW(model.parameters()), lambda m, x: m(x).sum(), "h100"
        )
        sums.append(sum(evaluated))
    assert 0 < sums[1] <= 4 * sums[0]


def test_a_device_that_is_too_small_is_a_budget_that_is_not_met(
    source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text, _ = run("estimate", f"{source}:large", "--device", "t4", capsys=capsys)
    assert status == 1 and "does NOT fit 15.00 GiB" in text
    status, rows = as_json("estimate", f"{source}:large", "--device", "t4", capsys=capsys)
    assert status == 1 and rows["fits"] is False
    status, text, _ = run("estimate", f"{source}:large", "--device", "t4", "--fits", "24GiB", capsys=capsys)
    assert status == 0 and "NOT" not in text
    status, text, _ = run("estimate", f"{source}:large", capsys=capsys)
    assert status == 0 and "fit" not in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "the factory raised KeyError"),
        ("speechless", "the factory raised Speechless, at "),
        ("named_optimizer", "optimizer of type str; give a torch.optim.Optimizer"),
        ("other_shape", "running the model on its sample raised RuntimeError"),
        ("moves", "no CUDA GPUs are available"),
        ("nosuch", "has no attribute 'nosuch'"),
    ],
)
def test_bad_sources_end_with_status_2(
    source: str, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, errors = run("estimate", f"{source}:{name}", capsys=capsys)
    assert status == 2 and said in errors
    status, rows = as_json("estimate", f"{source}:{name}", capsys=capsys)
    assert status == 2 and said in rows["error"]["message"]


def test_bad_options_end_with_status_2(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    for given, said in (
        (["--fits", "60%"], "give bytes"),
        (["--fits", "much"], "invalid budget"),
        (["--device", "rtx9"], "unknown device"),
        (["--remedies"], "--remedies requires --fits"),
        (["--top", "0"], "at least one row"),
        (["--accumulate", "0"], "accumulate must be"),
    ):
        status, _, errors = run("estimate", f"{source}:step", *given, capsys=capsys)
        assert status == 2 and said in errors, given
    assert run("estimate", "nomodule:x", capsys=capsys)[0] == 2
