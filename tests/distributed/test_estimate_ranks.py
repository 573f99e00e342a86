"""What a loop on several ranks needs, as torch has divided it, against what the allocator measures.

The ranks are imagined: collectives do nothing and copy nothing, so that what is measured is this rank's own. Meshes
are made before, as each has a small tensor.
"""

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch has no distributed package", allow_module_level=True)

from tightship.cli import main  # noqa: E402

HEAD = """
import gc, json, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tightship.execute import allocator
from tightship.execute.allocator import Meter
from tightship.frontends.torch import compat_distributed
allocator.load()
import tightship

class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wide, self.back = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x):
        return x + self.back(torch.nn.functional.gelu(self.wide(self.norm(x))))

class Net(torch.nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(3))
        self.head = torch.nn.Linear(width, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def divided(net, **how):
    how = {"mesh": mesh, **how}
    for block in net.blocks:
        fully_shard(block, **how)
    return fully_shard(net, **how)

def plain(model, batch, optimizer):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

def clipped(model, batch, optimizer):
    loss = model(batch).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

def accumulated(model, batch, optimizer):
    model.set_requires_gradient_sync(False)
    (model(batch).square().mean() / 2).backward()
    model.set_requires_gradient_sync(True)
    return plain(model, batch, optimizer)

def frozen():
    net = Net()
    for p in net.blocks[0].parameters():
        p.requires_grad_(False)
    return divided(net)

def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)

def compared(make, batch, loop=plain):
    torch.manual_seed(0)
    model = make()
    optimizer = adamw(model)
    before = dict(model.named_parameters())
    found = tightship.estimate(model, batch, optimizer, loop=loop)
    same = all(before[n] is p and p.grad is None for n, p in model.named_parameters()) and not optimizer.state
    del model, optimizer, before
    gc.collect()
    with Meter() as meter:
        given, result = batch.clone(), None
        model = make()
        optimizer = adamw(model)
        gc.collect()
        start = meter.current
        with Meter() as inner:
            for _ in range(2):
                result = loop(model, given, optimizer)
    return {"real": start + inner.peak, "estimate": found.peak, "same": same, "static": found.static}
"""

FULLY_SHARD = """
compat_distributed.imagine_ranks(1, 4)
half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
mesh = init_device_mesh("cpu", (4,))
both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
x = torch.randn(64, 128)
def by_tensor(net):
    for block in net.blocks:
        plan = {"wide": ColwiseParallel(), "back": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return net

print(json.dumps({
    "tensor parallel": compared(lambda: by_tensor(Net()), x),
    "blocks": compared(lambda: divided(Net()), x),
    "kept gathered": compared(lambda: divided(Net(), reshard_after_forward=False), x),
    "bfloat16": compared(lambda: divided(Net(), mp_policy=half), x),
    "copies of parts": compared(lambda: divided(Net(), mesh=both), x),
    "whole model": compared(lambda: fully_shard(Net(), mesh=mesh), x),
    "uneven": compared(lambda: divided(Net(126)), torch.randn(64, 126)),
    "clipped": compared(lambda: divided(Net()), x, clipped),
    "accumulated": compared(lambda: divided(Net()), x, accumulated),
    "frozen": compared(frozen, x),
}))
"""

DDP = """
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
Parallel = torch.nn.parallel.DistributedDataParallel
x = torch.randn(64, 128)

def waiting(model, batch, optimizer):
    with model.no_sync():
        (model(batch).square().mean() / 2).backward()
    return plain(model, batch, optimizer)

try:
    tightship.estimate(Parallel(Net()), x, None, lambda m, x: m(x).sum(), compiled=True)
except tightship.Unsupported as error:
    refused = str(error)
print(json.dumps({"refused": refused}))
print(json.dumps({
    "copies": compared(lambda: Parallel(Net()), x),
    "views": compared(lambda: Parallel(Net(), gradient_as_bucket_view=True), x),
    "no_sync": compared(lambda: Parallel(Net()), x, waiting),
}))
"""


def run(text):
    done = subprocess.run([sys.executable, "-c", HEAD + text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line)
    return found


def test_what_fully_shard_gathers_and_frees_is_followed():
    for name, row in run(FULLY_SHARD).items():
        assert row["same"], (name, "the model or the optimizer has changed")
        if name != "tensor parallel":
            assert row["estimate"] == row["real"], (name, row)
        else:
            assert abs(row["estimate"] - row["real"]) <= row["real"] // 1000, (name, row)


def test_buckets_of_distributed_data_parallel_count():
    rows = run(DDP)
    assert "Dynamo cuts its graph at the buckets" in rows.pop("refused")
    for name, row in rows.items():
        assert row["same"], (name, "the model or the optimizer has changed")
        assert abs(row["estimate"] - row["real"]) <= row["real"] // 100, (name, row)
    assert rows["copies"]["estimate"] > rows["views"]["estimate"]


ALONE = """
rank, store = RANK, STORE
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
model, x = divided(Net()), torch.randn(64, 128)
optimizer = adamw(model)
found = tightship.estimate(model, x, optimizer, loop=plain).peak if rank == 0 else 0
losses = [float(plain(model, x, optimizer)) for _ in range(2)]
print(json.dumps({"estimate": found, "losses": losses}))
torch.distributed.destroy_process_group()
"""


def test_nothing_is_sent(tmp_path):
    """One of two ranks asks, and both train afterwards."""
    programs = [
        HEAD + ALONE.replace("RANK", str(k)).replace("STORE", repr(str(tmp_path / "store"))) for k in range(2)
    ]
    pipe = subprocess.PIPE
    ranks = [
        subprocess.Popen([sys.executable, "-c", p], stdout=pipe, stderr=pipe, text=True) for p in programs
    ]
    said = [p.communicate(timeout=120) for p in ranks]
    assert all(p.returncode == 0 for p in ranks), said
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in said)
    assert first["estimate"] > 0 and len(first["losses"]) == len(second["losses"]) == 2


MODULE = HEAD.split("def divided")[0].partition("class Block")[2]


def test_ranks_on_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "estimated_ranks.py").write_text(
        f"import torch\nclass Block{MODULE}\n"
        "def step():\n    net = Net()\n"
        "    loss = lambda m, x: m(x).square().mean()\n"
        "    return net, loss, torch.optim.AdamW(net.parameters()), torch.randn(8, 128)\n"
    )
    monkeypatch.chdir(tmp_path)
    peaks = {}
    for ranks in ("2", "8"):
        command = [
            sys.executable,
            "-m",
            "tightship",
            "estimate",
            "estimated_ranks:step",
            "--ranks",
            ranks,
            "--json",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks[ranks] = json.loads(done.stdout)
    assert peaks["8"]["static"] < peaks["2"]["static"] / 3
    assert peaks["8"]["peak"] < peaks["2"]["peak"]
    assert main(["estimate", "estimated_ranks:step", "--ranks", "4", "--rank", "4"]) == 2
    assert "no such rank" in capsys.readouterr().err
