"""One rank: runs the scenarios named on the command line and prints a line of JSON for each."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import tightship
from tightship.frontends.torch.capture.recorder import Recorder

WIDTH, ROWS = 32, 64


def model(more: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(4):
        layers += [torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)]
    layers += [
        torch.nn.BatchNorm1d(WIDTH),
        *[torch.nn.Linear(WIDTH, WIDTH)] * more,
        torch.nn.Linear(WIDTH, 7),
    ]
    return torch.nn.Sequential(*layers)


def batches(count: int = 3, rows: int = ROWS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(100 + dist.get_rank())
    return [(torch.randn(rows, WIDTH, generator=g), torch.randn(rows, 7, generator=g)) for _ in range(count)]


def loss_of(m: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(m(batch[0]), batch[1])


def adamw(m: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(m.parameters(), 1e-2)


def digest(tensors: Any) -> str:
    """Whatever their order."""
    rows = [t.detach().contiguous().numpy().tobytes() for t in tensors]
    return hashlib.sha256(b"".join(sorted(hashlib.sha256(r).digest() for r in rows))).hexdigest()


def eager(**given: Any) -> dict[str, Any]:
    """Under DistributedDataParallel."""
    m = model()
    wrapped, o = torch.nn.parallel.DistributedDataParallel(m), adamw(m)
    losses = []
    for b in batches(**given):
        o.zero_grad()
        loss = loss_of(wrapped, b)
        loss.backward()
        o.step()
        losses.append(loss.item())
    return {"losses": losses, "digest": digest([*m.parameters(), *m.buffers()])}


def planned(budget: str, shard: bool, bucket: int | None = None, **options: Any) -> dict[str, Any]:
    m = model()
    data_parallel = tightship.DataParallel(shard=shard, bucket=bucket)
    step = tightship.fit(m, loss_of, adamw(m), batches()[0], budget, parallel=data_parallel, **options)
    with ops_recorded() as recorded:
        losses = [step(b).item() for b in batches()]
    whole = step.state_dict(full=True)["model"]
    gathers = {k for k, op in enumerate(step.graph.ops) if "all_gather" in op.target}
    return {
        "losses": losses,
        "digest": digest(whole.values()),
        "measure": step.measure(),
        "notes": step.notes,
        "recomputed": step.plan.count("recompute"),
        "captured again": len(recorded),
        "collectives": sum("c10d" in op.target for op in step.graph.ops),
        "begun ahead": sum(s.stream > 0 for s in step.plan.steps if s.op in gathers),
        "gathered again": sum(s.kind == "recompute" and s.op in gathers for s in step.plan.steps),
        "plan": hashlib.sha256(repr(step.plan.steps).encode()).hexdigest(),
    }


@contextmanager
def ops_recorded() -> Iterator[list[Any]]:
    """The ops that are captured inside."""
    found: list[Any] = []
    inner = Recorder.__torch_dispatch__

    def seen(self: Any, fn: Any, *rest: Any) -> Any:
        found.append(fn)
        return inner(self, fn, *rest)

    Recorder.__torch_dispatch__ = seen
    try:
        yield found
    finally:
        Recorder.__torch_dispatch__ = inner


def caught(fn: Callable[[], Any]) -> dict[str, Any]:
    """The error, after how many seconds, and when; for how many of them this thread had no processor to run on."""
    start, idle, kind, text = time.monotonic(), without_processor(), "", ""
    try:
        fn()
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    seconds, idle = time.monotonic() - start, without_processor() - idle
    return {"type": kind, "text": text, "seconds": seconds, "without_processor": idle, "at": time.time()}


def without_processor() -> float:
    """Seconds that this thread has waited for a processor while it could have run; 0 where no kernel says so."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def replicated(**options: Any) -> Any:
    m, options = model(), {"parallel": tightship.DataParallel(), **options}
    return m, tightship.fit(m, loss_of, adamw(m), batches()[0], **options)


# --- scenarios ---


def ddp() -> Any:
    return eager()


def whole_100() -> Any:
    return planned("100%", False)


def whole_40() -> Any:
    return planned("static+40%", False, verify_every=2)


def sharded_100() -> Any:
    return planned("100%", True)


def sharded_40() -> Any:
    return planned("static+40%", True, verify_every=2)


def whole_streamed() -> Any:
    """Parameters and their state leave memory between uses; a second kind of batch finds them away."""
    row = planned("45%", False, bucket=0, allow="recompute,stream")
    m, step = replicated(budget="45%", allow="recompute,stream")
    for b in (batches()[0], batches(1, 48)[0], batches()[1]):
        step(b)
    whole = {n: digest([t]) for n, t in step.state_dict(full=True)["model"].items()}
    return row | {"kinds": step.measure(), "parameters": [whole[n] for n, _ in m.named_parameters()]}


def whole_each() -> Any:
    return planned("100%", False, bucket=0)


def sharded_each() -> Any:
    return planned("100%", True, bucket=0)


def taught() -> Any:
    """A copy of a sharded model is read beside it."""
    m, teacher = model(), model()

    def loss(m: Any, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            goal = teacher(batch[0])
        return loss_of(m, batch) + F.mse_loss(m(batch[0]), goal)

    step = tightship.fit(
        m, loss_of, adamw(m), batches()[0], "100%", parallel=tightship.DataParallel(shard=True)
    )
    step(batches()[0])
    teacher = copy.deepcopy(m)
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(0.5)
    own = model()
    wrapped, o = torch.nn.parallel.DistributedDataParallel(own), adamw(own)
    loss_of(wrapped, batches()[0]).backward()
    o.step()
    o.zero_grad()
    step = tightship.fit(
        m, loss, step.optimizer, batches()[1], "100%", parallel=tightship.DataParallel(shard=True)
    )
    found = [step(b).item() for b in batches()[1:]]
    teacher = copy.deepcopy(own)
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(0.5)
    expected = []
    for b in batches()[1:]:
        o.zero_grad()
        one = loss(wrapped, b)
        one.backward()
        o.step()
        expected.append(one.item())
    return {"found": found, "expected": expected}


def seen_by_a_mode() -> Any:
    """Steps that run in eager for once average gradients, too; where one rank alone runs one, all say so."""
    m, step = replicated()
    with FlopCounterMode(display=False):
        losses = [step(b).item() for b in batches()]
    found = digest([*m.parameters(), *m.buffers()])
    with FlopCounterMode(display=False) if dist.get_rank() else nullcontext():
        alone = caught(lambda: step(batches()[0]))
    return {"losses": losses, "digest": found, "alone": alone}


def infeasible() -> Any:
    return caught(lambda: planned("static+1%", False, seconds=1.0))


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return functional.wait_tensor(functional.all_gather_single(x, 0, dist.group.WORLD))

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        whole = functional.reduce_scatter_single(g.contiguous(), "sum", 0, dist.group.WORLD)
        return functional.wait_tensor(whole) / dist.get_world_size()


class HandMade(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.parts = torch.nn.ParameterList(
            torch.nn.Parameter(
                torch.randn(WIDTH, WIDTH).chunk(dist.get_world_size())[dist.get_rank()].clone()
            )
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = F.gelu(F.linear(x, Gather.apply(part)))
        return x[:, :7]


def hand_made() -> Any:
    rows = {}
    for budget in ("", "100%", "static+50%"):
        m = HandMade()
        o = adamw(m)
        if not budget:
            for b in batches():
                o.zero_grad()
                loss = loss_of(m, b)
                loss.backward()
                o.step()
        else:
            step = tightship.fit(m, loss_of, o, batches()[0], budget)
            for b in batches():
                loss = step(b)
        rows[budget] = [loss.item(), digest(m.parameters())]
        if budget:
            rows[budget].append(step.measure())
    return rows


def raising_code() -> Any:
    """A batch that the code of the step does not take, on one rank; then one that it takes."""

    def loss(m: Any, batch: Any) -> torch.Tensor:
        if len(batch) == 3:
            raise ValueError("three is one too many")
        return loss_of(m, batch)

    m = model()
    step = tightship.fit(m, loss, adamw(m), batches()[0], parallel=tightship.DataParallel())
    first = step(batches()[0]).item()
    bad = (*batches()[1], 3) if dist.get_rank() == 1 else batches()[1]
    error = caught(lambda: step(bad))
    p = next(m.parameters())
    p.grad = torch.zeros_like(p)
    everywhere = caught(lambda: step(batches()[1]))
    p.grad = torch.zeros_like(p) if dist.get_rank() == 0 else None
    somewhere = caught(lambda: step(batches()[1]))
    p.grad = None
    other = batches(1, ROWS // 4)[0]
    apart = caught(lambda: step.prepare(other) if dist.get_rank() else step(other))
    return {
        "apart": apart,
        "error": error,
        "everywhere": everywhere,
        "somewhere": somewhere,
        "losses": [first, *[step(b).item() for b in batches()[1:]]],
    }


def other_rows() -> Any:
    """Another number of rows on rank 1 from the second batch on."""
    _, step = replicated(budget="100%")
    step(batches()[0])
    rows = [ROWS // 2 if dist.get_rank() else ROWS, ROWS // 2]
    losses = [step(batches(1, n)[0]).item() for n in rows]
    return {"losses": losses, "measure": step.measure(), "kinds": len(step._variants)}


def other_models() -> Any:
    """Rank 1 has a layer more."""
    m = model(more=dist.get_rank() == 1)
    return caught(
        lambda: tightship.fit(m, loss_of, adamw(m), batches()[0], parallel=tightship.DataParallel())
    )


class Either(torch.nn.Module):
    """Each rank trains another of two layers of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 7) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers[dist.get_rank()](x)


def other_parameters() -> Any:
    m = Either()
    return caught(
        lambda: tightship.fit(m, loss_of, adamw(m), batches()[0], parallel=tightship.DataParallel())
    )


def refused() -> Any:
    """Models that torch itself has distributed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    mesh = init_device_mesh("cpu", (1, dist.get_world_size()))
    models = {"DTensor": distribute_module(model(), mesh)}
    rows = {
        n: caught(lambda m=m: tightship.fit(m, loss_of, adamw(m), batches()[0])) for n, m in models.items()
    }
    whole = torch.nn.Linear(WIDTH, 7, bias=False)
    factored = torch.optim.Adafactor(whole.parameters())
    shards = tightship.DataParallel(shard=True)
    rows["Adafactor"] = caught(lambda: tightship.fit(whole, loss_of, factored, batches()[0], parallel=shards))
    away: dict[str, Any] = {"allow": "recompute,stream", "parallel": shards}
    rows["streamed"] = caught(lambda: tightship.fit(whole, loss_of, adamw(whole), batches()[0], **away))
    return rows


class Lion(torch.optim.Optimizer):
    """None of torch's own: what it does with an element follows from this element alone, unless ``normed``."""

    def __init__(self, params: Any, normed: bool = False) -> None:
        super().__init__(params, {"lr": 1e-3, "normed": normed})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad / p.grad.norm() if group["normed"] else p.grad
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.add_((m * 0.9 + g * 0.1).sign_(), alpha=-group["lr"])
                m.lerp_(g, 0.01)


def own_optimizer() -> Any:
    rows: dict[str, Any] = {}
    for how in ("ddp", "sharded", "fully_shard"):
        m = model()
        run: Any = torch.nn.parallel.DistributedDataParallel(m) if how == "ddp" else m
        run = fully_shard(m) if how == "fully_shard" else run
        o = Lion(run.parameters())
        if how == "ddp":
            losses = []
            for b in batches():
                o.zero_grad()
                losses.append(loss_of(run, b))
                losses[-1].backward()
                o.step()
            rows[how] = [[x.item() for x in losses], digest([*m.parameters()])]
            continue
        parallel = tightship.DataParallel(shard=True) if how == "sharded" else None
        step = tightship.fit(run, loss_of, o, batches()[0], "static+50%", parallel=parallel)
        losses = [step(b).item() for b in batches()]
        whole = step.state_dict(full=True)["model"]
        rows[how] = [losses, digest(whole[n] for n, _ in model().named_parameters())]
        rows[f"{how} measure"] = step.measure()
    for how in ("ddp", "sharded"):  # matrices by one optimizer, all else by another
        m = model()
        run = torch.nn.parallel.DistributedDataParallel(m) if how == "ddp" else m
        matrices = [p for p in m.parameters() if p.dim() == 2]
        both = [torch.optim.Muon(matrices, 1e-3), Lion([p for p in m.parameters() if p.dim() != 2])]
        given = {} if how == "ddp" else {"parallel": tightship.DataParallel(shard=True)}
        step = None if how == "ddp" else tightship.fit(m, loss_of, both, batches()[0], "static+60%", **given)
        losses = []
        for b in batches():
            if step is not None:
                losses.append(step(b).item())
                continue
            m.zero_grad()
            loss = loss_of(run, b)
            loss.backward()
            losses.append(loss.item())
            for one in both:
                one.step()
        found = m.state_dict() if step is None else step.state_dict(full=True)["model"]
        rows[f"{how} two"] = [losses, digest(found[n] for n, _ in model().named_parameters())]
        if step is not None:
            rows["two"] = {"notes": step.notes, "measure": step.measure()}
    m = model()
    normed, parallel = Lion(m.parameters(), True), tightship.DataParallel(shard=True)
    rows["normed"] = caught(lambda: tightship.fit(m, loss_of, normed, batches()[0], parallel=parallel))
    return rows


def in_parts() -> Any:
    """Two batches for each update."""
    m = model()
    wrapped, o = torch.nn.parallel.DistributedDataParallel(m), adamw(m)
    given = batches(4)
    for k, b in enumerate(given):
        if k % 2:
            loss_of(wrapped, b).backward()
            o.step()
            o.zero_grad()
        else:
            with wrapped.no_sync():
                loss_of(wrapped, b).backward()
    expected = digest(m.parameters())
    m = model()
    data_parallel = tightship.DataParallel()
    step = tightship.fit(m, loss_of, adamw(m), given[0], "100%", accumulate=2, parallel=data_parallel)
    for b in given:
        step(b)
    return {"expected": expected, "digest": digest(m.parameters()), "measure": step.measure()}


def state_dicts() -> Any:
    """What one step saves, another loads, sharded or not, and goes on with the same bits."""
    rows = {}
    for shard in (False, True):
        m = model()
        o = adamw(m)
        step = tightship.fit(m, loss_of, o, batches()[0], parallel=tightship.DataParallel(shard=shard))
        step(batches()[0])
        saved = copy.deepcopy(step.state_dict(full=True))
        parts = step.state_dict()["model"]
        kinds = sorted({type(t).__name__ for n, t in parts.items() if n.endswith((".weight", ".bias"))})
        ahead = [step(b).item() for b in batches()[1:]]
        step.load_state_dict(saved)
        again = [step(b).item() for b in batches()[1:]]
        rows[str(shard)] = {"ahead": ahead, "again": again, "names": sorted(parts), "kinds": kinds}
    rows["names"] = sorted(model().state_dict())
    return rows


def checkpoints() -> Any:
    """Whether torch's own checkpoint gives a plain model the parameters that a sharded step has."""
    from torch.distributed import checkpoint

    m = model()
    step = tightship.fit(m, loss_of, adamw(m), batches()[0], parallel=tightship.DataParallel(shard=True))
    step(batches()[0])
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    checkpoint.save(step.state_dict(), checkpoint_id=folder[0])
    state = {"model": model().state_dict()}
    checkpoint.load(state, checkpoint_id=folder[0])
    whole = step.state_dict(full=True)["model"]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    names = [n for n, _ in model().named_parameters()]
    return {n: torch.equal(state["model"][n], whole[n]) for n in names}


def failing_op() -> Any:
    """An op that fails inside of the step, on rank 1 alone, between two collectives."""

    def loss(m: Any, batch: Any) -> torch.Tensor:
        x, y = batch
        out = m(x)
        return F.mse_loss(out, y) + torch.linalg.cholesky(x[:WIDTH]).sum() + out.sum() * 0

    m = model()
    good, bad = torch.eye(ROWS, WIDTH), -torch.eye(ROWS, WIDTH)
    y = batches()[0][1]
    step = tightship.fit(m, loss, adamw(m), (good, y), parallel=tightship.DataParallel(shard=True))
    step((good, y))
    error = caught(lambda: step((bad if dist.get_rank() == 1 else good, y)))
    return {"error": error, "later": caught(lambda: step((good, y)))}


def one() -> Any:
    """A program for several ranks, started on one."""
    m = model()
    ddp = torch.nn.parallel.DistributedDataParallel(m)
    step = tightship.fit(ddp, loss_of, adamw(ddp), batches()[0], "static+60%")
    losses = [step(b).item() for b in batches()]
    return {
        "eager": eager(),
        "in DDP": {"losses": losses, "digest": digest([*m.parameters(), *m.buffers()])},
        "replicated": planned("static+60%", shard=False),
        "sharded": planned("static+60%", shard=True),
    }


def killed() -> Any:
    """Rank 1 ends without a word."""
    _, step = replicated()
    step(batches()[0])
    if dist.get_rank() == 1:
        os._exit(9)
    return caught(lambda: step(batches()[1]))


def main(scenarios: dict[str, Any]) -> None:
    # Searches are judged elsewhere: here they are to be brief.
    tightship.fit = functools.partial(tightship.fit, work=3_000_000)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        start = time.monotonic()
        print(json.dumps([name, scenarios[name]()]), flush=True)
        print(f"{name}: {time.monotonic() - start:.2f} s", file=sys.stderr)
    os._exit(0)  # a rank may be gone, and the others' groups with it


if __name__ == "__main__":
    main(globals())
