"""One rank: graphs of torch.compile that ranks run together, of which one rank cannot."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from worker import adamw, caught, digest, main

from tightship.execute import graph_board, graph_ranks
from tightship.frontends.torch import compat_distributed
from tightship.integrations import torch_compile_graph
from tightship.integrations.torch_compile import compiled_plans, compiled_session, measured_step

WIDTH = 16
WAYS = ("ddp", "ddp inside", "fully_shard", "tensor parallel")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(32, WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        out: torch.Tensor = self.down(F.gelu(self.up(x))) + x
        return out


def compiled(how: str, mode: str, **options: Any) -> tuple[Any, Any]:
    """The model that is called, and the one whose parameters are trained."""
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = False
    m: Any = Net()
    given = {"budget": "1GiB", "mode": mode, "cache": None, **options}
    if how == "ddp":
        return torch.compile(DistributedDataParallel(m), backend="tightship", options=given, dynamic=False), m
    if how == "ddp inside":
        inside = torch.compile(m, backend="tightship", options=given, dynamic=False)
        return DistributedDataParallel(inside), m
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if how == "fully_shard":
        m = fully_shard(m, mesh=mesh)
    else:
        parallelize_module(m, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    m.compile(backend="tightship", options=given, dynamic=False)
    return m, m


def words(rows: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 32, (rows, 8), generator=torch.Generator().manual_seed(seed))


def stepped(call: Any, o: Any, given: torch.Tensor) -> float:
    loss = call(given).pow(2).mean()
    loss.backward()
    o.step()
    o.zero_grad()
    return float(loss.detach())


def _raises(*_: Any, **__: Any) -> Any:
    raise RuntimeError("injected")


def _failing(how: str, mode: str, kind: str) -> dict[str, Any]:
    """Rank 1 cannot compile its graph; what it is that each raises, and again after that."""
    mine = bool(dist.get_rank())
    options: dict[str, Any] = {}
    known = vars(torch_compile_graph.Compilation)["run"], vars(torch_compile_graph.Compilation)["compiled"]
    versions = graph_ranks._versions
    if kind == "infeasible" and mine:
        options["budget"] = "1KiB"
    if kind == "infeasible everywhere":
        options["budget"] = "1KiB"
    if kind == "capture" and mine:
        options["eager_fallback"] = False
        torch_compile_graph.Compilation.run = torch_compile_graph.Compilation.compiled = _raises  # type: ignore[method-assign]
    if kind == "option" and mine:
        options["bugdet"] = "1GiB"
    if kind == "version" and mine:
        graph_ranks._versions = lambda: "tightship 0.0.1, torch 2.13.0"
    rows = 16 if kind == "shapes" and mine else 8
    call, _ = compiled(how, mode, **options)
    first = caught(lambda: call(words(rows)).sum().backward())
    again = caught(lambda: call(words(rows)))
    run, made = known
    torch_compile_graph.Compilation.run = run  # type: ignore[method-assign]
    torch_compile_graph.Compilation.compiled = made  # type: ignore[method-assign]
    graph_ranks._versions = versions
    dist.barrier()
    return {"first": first, "again": again}


KINDS = ("infeasible", "infeasible everywhere", "capture", "option", "version", "shapes")


def _all_failing(mode: str) -> dict[str, Any]:
    return {
        f"{how}, {kind}": _failing(how, mode, kind)
        for how in WAYS
        for kind in KINDS
        if kind != "shapes" or how == "tensor parallel"
    }


def failing_exact() -> Any:
    return _all_failing("exact")


def failing_compiled() -> Any:
    return _all_failing("compiled")


def _apart(mode: str) -> dict[str, Any]:
    """Ranks that compile apart from one another, which is no fault: rank 1 has a batch of another size, rank 0
    evaluates alone, rank 1 comes late. How long each of these took beside compiling again."""
    call, m = compiled("ddp inside", mode)
    o, rank, losses, seconds = adamw(m), dist.get_rank(), [], {}
    for k, rows in enumerate((8, 8, 16 if rank else 8, 8, 16)):
        if k == 4 and rank:
            time.sleep(1.0)
        start = time.monotonic()
        losses.append(stepped(call, o, words(rows, 10 * k + rank)))
        dist.barrier()
        seconds[str(k)] = time.monotonic() - start
    if rank == 0:
        with torch.no_grad():
            start = time.monotonic()
            call.module(words(4))
            seconds["alone"] = time.monotonic() - start
    dist.barrier()
    after = digest(m.parameters())
    plain = Net()
    other, o, eager = DistributedDataParallel(plain), adamw(plain), []
    for k, rows in enumerate((8, 8, 16 if rank else 8, 8, 16)):
        eager.append(stepped(other, o, words(rows, 10 * k + rank)))
    return {
        "losses": losses, "eager": eager, "digest": after, "eager digest": digest(plain.parameters()),
        "seconds": seconds,
    }  # fmt: skip


def apart_exact() -> Any:
    return _apart("exact")


def apart_compiled() -> Any:
    return _apart("compiled")


def _in_the_middle(mode: str) -> Any:
    """Rank 1 comes late to a step, and then fails inside of a graph, between its collectives."""
    call, m = compiled("tensor parallel", mode)
    o = adamw(m)
    stepped(call, o, words(8))
    (graph,) = compiled_plans(call)
    bytes_ = []
    for _ in range(3):
        time.sleep(dist.get_rank())
        stepped(call, o, words(8))
        bytes_.append((graph.last.measured_peak, graph.plan.peak))  # type: ignore[union-attr]
    given = words(8)
    if dist.get_rank():
        given[0, 0] = 1000
    return caught(lambda: stepped(call, o, given)) | {"bytes": bytes_}


def in_the_middle_exact() -> Any:
    return _in_the_middle("exact")


def in_the_middle_compiled() -> Any:
    return _in_the_middle("compiled")


def alone() -> Any:
    """Rank 1 alone compiles again, and fails, while rank 0 waits inside of the graph that it has."""
    call, m = compiled("tensor parallel", "exact", strict=True)
    o = adamw(m)
    stepped(call, o, words(8))
    if dist.get_rank():
        torch._dynamo.reset_code(type(m).forward.__code__)
        torch_compile_graph.Compilation.run = _raises  # type: ignore[method-assign]
    return caught(lambda: stepped(call, o, words(8)))


class Counted:
    """A connection to the store that counts what is asked of it."""

    def __init__(self, store: Any) -> None:
        self.store, self.asked = store, 0

    def __getattr__(self, name: str) -> Any:
        self.asked += 1
        return getattr(self.store, name)


def listening() -> Any:
    """What is asked of the store while nothing happens, and how soon a rank hears that another has failed."""
    connections = []

    def other(store: Any) -> Any:
        connections.append(Counted(compat_distributed.other_connection(store)))
        return connections[-1]

    graph_board.compat_distributed = SimpleNamespace(**vars(compat_distributed) | {"other_connection": other})  # type: ignore[assignment]
    turn = graph_ranks.begin("code.py:1", "code", range(dist.get_world_size()))
    assert turn is not None
    time.sleep(2.0)
    asked, board = connections[0].asked, turn._board
    dist.barrier()
    start = time.monotonic()
    if dist.get_rank():
        board.alone("code.py:1", "injected")
    else:
        while not board.heard and time.monotonic() < start + 10:
            time.sleep(0.01)
    seconds = time.monotonic() - start
    dist.barrier()
    board.end()
    return {
        "asked": asked, "heard": [tuple(f) for f in board.heard], "seconds": seconds,
        "ended": not board._thread.is_alive(),
    }  # fmt: skip


def own_parts() -> Any:
    """A budget of exactly what a rank's own parts need, and what it makes of them."""
    rows: dict[str, Any] = {}
    budget: Any = None
    for _ in range(2):
        call, m = compiled("tensor parallel", "exact", budget=budget)
        o = adamw(m)
        stepped(call, o, words(8))
        (graph,) = compiled_plans(call)
        budget = graph.plan.peak
        rows[str(len(rows))] = budget, graph.plan.count("recompute")
    return rows


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4 * WIDTH, 16 * WIDTH)
        self.down = torch.nn.Linear(16 * WIDTH, 4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.gelu(self.up(x))) + x
        return out


class Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _in_blocks(policy: MixedPrecisionPolicy, **more: Any) -> Any:
    m = Blocks()
    for block in m.blocks:
        fully_shard(block, mp_policy=policy, **more)
    return fully_shard(m, mp_policy=policy, **more)


def _steps_in_blocks(
    mode: str | None, budget: Any = None, policy: Any = None, unsent: int = -1, **more: Any
) -> dict[str, Any]:
    """Losses and parts of parameters after four steps; with a mode, the bytes of each. ``unsent``: the step whose
    gradients stay whole."""
    torch._dynamo.reset()
    m = _in_blocks(policy or MixedPrecisionPolicy(), **more)
    o, losses, bytes_ = adamw(m), [], []
    options = {"budget": budget, "mode": mode, "cache": None, "optimizer": o}
    for block in m.blocks if mode is not None else ():
        block.compile(backend="tightship", options=options, dynamic=False)
    for k in range(4):
        x = torch.randn(96, 4 * WIDTH, generator=torch.Generator().manual_seed(10 * k + dist.get_rank()))
        if k == unsent:
            m.set_requires_gradient_sync(False)
        step: Any = SimpleNamespace(planned=None, measured=None)
        with nullcontext(step) if mode is None else measured_step(m.blocks[0]) as step:
            loss = m(x).pow(2).mean()
            loss.backward()
            o.step()
            o.zero_grad()
        losses.append(float(loss.detach()))
        del loss
        bytes_.append((step.planned, step.measured))
    parts = digest(p.to_local() for p in m.parameters())
    return {"losses": losses, "parts": parts, "bytes": bytes_[2:], "budget": _limit(m) if mode else None}


def _limit(m: Any) -> int | None:
    return compiled_session(m.blocks[0]).ledger.limit


GATHERED: dict[str, dict[str, Any]] = {
    "gathered again": {},
    "stays": {"reshard_after_forward": False},
    "bfloat16": {"policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


def gathered() -> Any:
    """Blocks of ``fully_shard`` that are compiled one by one, with the optimizer in the budget: in eager, without a
    budget, at a percentage and in bytes; and with gradients that are not sent any more."""
    rows: dict[str, Any] = {}
    for how, given in GATHERED.items():
        rows[how] = {"eager": _steps_in_blocks(None, **given)}
        for budget in ("90%", None) if how == "gathered again" else ("90%",):
            rows[how][str(budget)] = _steps_in_blocks("exact", budget, **given)
    known = rows["gathered again"]
    known["bytes"] = _steps_in_blocks("exact", known["90%"]["budget"])
    whole = rows["gathered again"]["None"]["bytes"][-1][0]
    rows["unsent"] = caught(lambda: _steps_in_blocks("exact", whole, unsent=2))
    dist.barrier()
    rows["unsent, with room"] = caught(lambda: _steps_in_blocks("exact", 2 * whole, unsent=2))
    return rows


def gathered_compiled() -> Any:
    rows = {"eager": _steps_in_blocks(None)}
    return rows | {str(budget): _steps_in_blocks("compiled", budget) for budget in (None, "95%")}


if __name__ == "__main__":
    main(globals())
