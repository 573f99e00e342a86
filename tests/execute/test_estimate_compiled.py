"""What a loop needs whose model Inductor compiles: the allocator's bytes, before a kernel is built."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.commands import as_json, run
from tightship.errors import Unsupported
from tightship.execute import allocator
from tightship.execute.estimate import estimate
from tightship.frontends.torch import compat
from tightship.frontends.torch.structure import tensor_leaves
from tightship.graph import aligned

pytestmark = [
    pytest.mark.skipif(not allocator.available("cpu"), reason="no C++ compiler"),
    pytest.mark.usefixtures("fresh_dynamo"),
]


def measured(model: nn.Module, batch: Any, loop: Callable[..., Any], optimizer: Any) -> int:
    """The most bytes of two steps of the compiled loop, by the allocator, once everything is compiled."""
    compiled = torch.compile(model)
    held = None
    for _ in range(2):
        held = loop(compiled, batch, optimizer)
    states = [t for s in optimizer.state.values() for t in tensor_leaves(s)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    tensors = (
        *model.parameters(),
        *model.buffers(),
        *tensor_leaves(batch),
        *states,
        *gradients,
        *tensor_leaves(held),
    )
    homes = {compat.storage_key(t): t for t in tensors}
    static = sum(aligned(t.untyped_storage().nbytes()) for t in homes.values())
    del tensors, homes
    gc.collect()
    with allocator.Meter() as meter:
        for _ in range(2):
            held = loop(compiled, batch, optimizer)
    return static + meter.peak


def step(model: Any, batch: Any, optimizer: Any) -> Any:
    x, y = batch
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class Blocks(nn.Module):
    """Residual blocks with norms and dropout; graph breaks, or checkpoints, between them."""

    def __init__(self, *, breaks: bool = False, recompute: bool = False) -> None:
        super().__init__()
        one = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1)) for _ in "ab"]
        self.blocks, self.back = nn.ModuleList(one), nn.Linear(64, 32)
        self.breaks, self.recompute = breaks, recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.through(0, x)
        if self.breaks:  # not in a loop: Dynamo compiles nothing around such a one
            torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
        return self.through(1, x)

    def through(self, number: int, x: torch.Tensor) -> torch.Tensor:
        block = self.blocks[number]
        y = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x + self.back(y.sin())


def blocks(**kind: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Blocks(**kind), (torch.randn(256, 32), torch.randn(256, 32))


_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param({"recompute": True}, id="checkpoints"),
        pytest.param({"breaks": True}, id="breaks", marks=_SLOW),
        pytest.param({}, id="plain", marks=_SLOW),
    ],
)
def test_a_compiled_loop_needs_what_the_allocator_measures(kind: dict[str, bool]) -> None:
    model, batch = blocks(**kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    found = estimate(model, batch, optimizer, loop=step, compiled=True)
    eager = estimate(model, batch, optimizer, loop=step)
    assert found.compiled and not eager.compiled
    assert found.peak < eager.peak
    assert found.peak == measured(model, batch, step, optimizer)


def test_nothing_of_the_user_is_touched_and_nothing_stays_compiled() -> None:
    model, batch = blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    before, state = dict(vars(model)), torch.get_rng_state()
    estimate(model, batch, optimizer, loop=step, compiled=True)
    assert dict(vars(model)) == before and torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters()) and not optimizer.state
    seen: list[int] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(len(gm.graph.nodes))
        return gm.forward

    torch.compile(model, backend=backend)(batch[0])
    assert seen


def test_who_makes_up_a_compiled_peak() -> None:
    model, batch = blocks()
    found = estimate(model, batch, torch.optim.SGD(model.parameters(), 0.1), loop=step, compiled=True)
    rows = {m.module: m for m in found.modules}
    assert rows["blocks"].activations > 0
    assert found.by_line and all(".py:" in s.place for s in found.by_line if s.place)
    assert found.phases.keys() == {"forward", "backward", "update"}
    assert found.flops > 0


def test_a_compiled_forward_pass_without_gradients() -> None:
    model, (x, _) = blocks()
    found = estimate(model, x, compiled=True)
    assert not found.training and found.peak < estimate(model, x).peak


def test_a_model_on_the_meta_device_is_compiled_without_data() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 8))
    batch = torch.empty(1 << 18, 256, device="meta"), torch.empty(1 << 18, 8, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = estimate(model, batch, optimizer, loop=step, compiled=True, device="h100")
    assert found.peak < estimate(model, batch, optimizer, loop=step, device="h100").peak
    assert found.unknown and "code for the CPU" in str(found)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y.repeat(int(y[0].argmax()) + 1, 1)[:2]


def test_a_model_that_decides_by_what_it_computes_is_refused_in_words() -> None:
    model = Reads()
    batch = torch.randn(2, 4), torch.randn(2, 4)
    with pytest.raises(Unsupported, match="depend on data"):
        estimate(model, batch, torch.optim.SGD(model.parameters(), 0.1), loop=step, compiled=True)


SOURCE = """
import torch
from torch import nn

def step():
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10))
    batch = torch.randn(256, 32), torch.zeros(256, dtype=torch.long)
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), batch
"""


def test_the_verb_estimates_the_compiled_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"compiled_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    status, rows = as_json("estimate", f"{name}:step", "--compiled", capsys=capsys)
    assert status == 0 and rows["compiled"] is True
    _, eager = as_json("estimate", f"{name}:step", capsys=capsys)
    assert eager["compiled"] is False and rows["peak"] < eager["peak"]
    status, text, _ = run("estimate", f"{name}:step", "--compiled", "--fits", "1kB", capsys=capsys)
    assert status == 1 and "does NOT fit" in text
