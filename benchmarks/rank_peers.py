"""One of 64 imagined ranks: a step as planned, and FSDP2 with each block checkpointed, in bytes and modeled seconds.

    python benchmarks/rank_peers.py [--ranks N] [--cases mlp,transformer] [--seconds S] [--write]

FSDP2's bytes are torch's own estimate (`FSDPMemTracker`, on fake tensors and a fake process group) of forward and
backward pass, and of the optimizer's state. Its seconds are those of its ops in the model of time that plans have,
recomputed forward passes among them, as if it waited for nothing that it sends. Plans are given budgets of shares of
FSDP2's bytes. Nothing is run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import pages
import torch
from torch import nn
from torch.nn import functional as F

from tightship.serde import loads_plan

PAGE = Path(__file__).resolve().parent.parent / "docs" / "distributed.md"
BEGIN, END = "<!-- begin: benchmarks/rank_peers.py -->", "<!-- end: benchmarks/rank_peers.py -->"
WIDTH, BLOCKS, HEADS = 4096, 8, 32
HEAD = ("blocks", "", "peak", "seconds", "run again", "sending that nothing waits for")
MARKS = ("---", "---", "---:", "---:", "---:", "---:")
SHARES = (100, 80, 66)
Step = tuple[nn.Module, Callable[[Any, Any], torch.Tensor], torch.optim.Optimizer, torch.Tensor]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Transformer(nn.Module):
    """As GPT has it: attention, and a layer four times as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        out: torch.Tensor = self.mlp(x + self.out(seen.transpose(1, 2).flatten(2)))
        return out


def _step(block: Callable[[], nn.Module], device: str) -> Step:
    with torch.device(device):
        model = nn.Sequential(*(block() for _ in range(BLOCKS)))
        sample = torch.empty(1, 2048, WIDTH)
    return model, lambda m, x: m(x).pow(2).mean(), torch.optim.AdamW(model.parameters()), sample


def mlp() -> Step:
    """What ``tightship plan rank_peers:mlp`` plans."""
    return _step(Mlp, "meta")


def transformer() -> Step:
    return _step(Transformer, "meta")


BLOCK = {"mlp": Mlp, "transformer": Transformer}


def eager_peak(case: str, ranks: int) -> int:
    """What FSDP2 with each block checkpointed takes on a rank, by torch's own tracker."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = torch.distributed.init_device_mesh("cpu", (ranks,))
    with FakeTensorMode():
        model, loss, _, sample = _step(lambda: checkpoint_wrapper(BLOCK[case]()), "cpu")
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        tracker = FSDPMemTracker(model)
        tracker.track_inputs((sample,))
        with tracker:
            loss(model, sample).backward()
        peak = sum(s["Total"] for s in tracker.get_tracker_snapshot("peak").values())
        state = 2 * sum(p.to_local().nbytes for p in model.parameters())
    torch.distributed.destroy_process_group()
    return int(peak + state)


class Planned(NamedTuple):
    answer: dict[str, Any]
    computed: float  # seconds of its ops that do not send
    sent: float
    again: float  # of forward passes of all blocks, as checkpoints recompute them
    recomputed: float
    waited: float


def planned(case: str, ranks: int, budget: str, seconds: float) -> Planned | str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        command = [
            *(sys.executable, "-m", "tightship", "plan", f"rank_peers:{case}", "--ranks", str(ranks)),
            *("--budget", budget, "--seconds", str(seconds), "--json", "-o", str(file)),
        ]
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        if done.returncode:
            return (done.stderr.strip().splitlines() or [""])[0]
        plan, graph = loads_plan(file.read_bytes(), str(file))
    assert graph is not None
    sends = {k for k, op in enumerate(graph.ops) if "c10d" in op.target}
    there = {k for k, op in enumerate(graph.ops) if op.phase == "forward" and op.module and k not in sends}
    time = [op.time for op in graph.ops]
    again = sum(time[s.op] for s in plan.steps if s.kind == "recompute" and s.op not in sends)
    computed = sum(t for k, t in enumerate(time) if k not in sends)
    sent = sum(time[s.op] for s in plan.steps if s.kind in ("compute", "recompute") and s.op in sends)
    return Planned(
        json.loads(done.stdout),
        computed,
        sent,
        sum(time[k] for k in there),
        again,
        plan.time - computed - again,
    )


def rows(case: str, ranks: int, seconds: float) -> list[list[str]]:
    eager = eager_peak(case, ranks)
    made = [(share, planned(case, ranks, str(eager * share // 100), seconds)) for share in SHARES]
    first = next(p for _, p in made if isinstance(p, Planned))
    time = first.computed + first.again
    table = [
        [
            case,
            "FSDP2, blocks checkpointed",
            gib(eager),
            f"{time:.1f}",
            f"{first.again:.1f} s",
            "assumed: all",
        ],
    ]
    for share, plan in made:
        if isinstance(plan, str):
            table.append([case, f"planned, {share} %", plan, "", "", ""])
            continue
        peak, took = plan.answer["peak_after"], plan.answer["time_after"]
        hidden = f"{plan.sent - plan.waited:.2f} of {plan.sent:.2f} s"
        table.append(
            [case, f"planned, {share} % ({peak / eager - 1:+.1%})", gib(peak), f"{took:.1f}",
             f"{plan.recomputed:.1f} s", hidden]
        )  # fmt: skip
    return table


def gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--cases", default="mlp,transformer")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    options = parser.parse_args()
    table: list[list[str]] = []
    for case in options.cases.split(","):
        for row in rows(case, options.ranks, options.seconds):
            table.append(row)
            print(" | ".join(row), flush=True)
    if options.write:
        said = (
            f"{date.today()}; one of {options.ranks} imagined ranks; PyTorch {torch.__version__}; "
            f"`python benchmarks/rank_peers.py --ranks {options.ranks}`."
        )
        pages.put(PAGE, BEGIN, END, f"{said}\n\n{pages.table(HEAD, MARKS, table)}")


if __name__ == "__main__":
    main()
