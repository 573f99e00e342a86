"""One rank, with torch.compile: one of them ends for good between graphs, where torch's own collectives wait."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from graph_worker import Net, words
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from worker import caught, main, replicated

from tightship.execute.early_end import waits
from tightship.frontends.torch import compat_distributed


class Fault:
    """``how`` this rank ends at its ``visit``-th visit of the place."""

    def __init__(self, how: str, visit: int) -> None:
        self.how, self.left = how, visit

    def __call__(self) -> None:
        self.left -= 1
        if self.left:
            return
        print(json.dumps([sys.argv[1], {"ended": time.time()}]), flush=True)
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "interrupted":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        if self.how == "exits":
            sys.exit(3)
        raise ValueError("injected")


class Broken(Net):
    """Code of the caller's own runs between its two graphs."""

    def __init__(self, outside: Callable[[], None]) -> None:
        super().__init__()
        self.outside = torch.compiler.disable(outside)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.up(self.words(words))
        self.outside()
        out: torch.Tensor = self.down(F.gelu(x))
        return out


class Untraceable(Net):
    """Dynamo cannot trace what some ranks alone run."""

    def __init__(self, here: bool) -> None:
        super().__init__()
        self.here = here

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        if self.here:
            torch._dynamo.graph_break()
        return super().forward(words)


def nothing() -> None: ...


def raises() -> None:
    raise ValueError("injected")


def trained(model: Any, how: str, fullgraph: bool) -> tuple[Any, Any]:
    torch._dynamo.config.optimize_ddp = False
    options = {"budget": "1GiB", "cache": None}
    given: dict[str, Any] = {
        "backend": "tightship", "options": options, "dynamic": False, "fullgraph": fullgraph,
    }  # fmt: skip
    if how == "ddp":
        return DistributedDataParallel(torch.compile(model, **given)), model
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if how == "parallelize_module":
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    else:
        fully_shard(model, mesh=mesh)
    model.compile(**given)
    return model, model


def made(how: str, where: str, fault: Callable[[], None]) -> tuple[Any, Any]:
    net: Any = Broken(fault) if where == "break" else Net()
    call, m = trained(net, how, False)
    return call, torch.optim.AdamW(m.parameters(), 1e-2)


def steps(call: Any, o: Any, at: dict[str, Callable[[], None]]) -> None:
    """Four steps; each visits the fault once."""
    for k in range(4):
        at.get("loader", nothing)()
        loss = call(words(8, 10 * k + dist.get_rank())).pow(2).mean()
        at.get("loss", nothing)()
        loss.backward()
        at.get("update", nothing)()
        o.step()
        o.zero_grad()


def ends(how: str, where: str, fault: str, rank: int = 1, visit: int = 3) -> Any:
    """What the others raise, and again in another step."""
    mine = dist.get_rank() == rank
    ended = Fault(fault, visit) if mine else nothing
    kept = made(how, where, ended)
    if mine:
        return steps(*kept, {where: ended})
    row = {"error": caught(lambda: steps(*kept, {}))}
    return row | {"later": caught(lambda: steps(*kept, {}))}


def waits_elsewhere(how: str, where: str) -> Any:
    """Rank 1 leaves its loop, and waits in a barrier of its own for ranks that go on: for ``where`` "caught" as it
    has caught an error, for "fewer" as it has had fewer batches."""
    mine = dist.get_rank() == 1
    call, o = made(how, "loader", nothing)
    steps(call, o, {})
    since = time.time()

    def more() -> None:
        if not mine:
            steps(call, o, {})
        elif where == "caught":
            with suppress(ValueError):
                steps(call, o, {"loss": raises})
        dist.barrier()

    return {"error": caught(more), "since": since, "later": caught(lambda: steps(call, o, {}))}


def patient(how: str) -> Any:
    """Ranks come late to collectives of the caller's own, and one of them does not wait for what it has begun."""
    mine = dist.get_rank() == 1
    call, o = made(how, "loader", nothing)
    steps(call, o, {})
    sent = torch.ones(3)

    def wait() -> None:
        time.sleep(6 * mine)
        dist.barrier()
        work = dist.all_reduce(sent, async_op=mine)
        time.sleep(6 * mine)
        if work is not None:
            work.wait()
        steps(call, o, {})
        dist.broadcast(sent, 0)
        time.sleep(6 * (not mine))
        steps(call, o, {})

    return {"error": caught(wait), "sum": float(sent.sum())}


def untraceable(how: str, fault: str) -> Any:
    """Dynamo does not come to rank 1's graph, with fullgraph=True, while rank 0 waits for it."""
    mine = dist.get_rank() == 1
    call, _ = trained(Untraceable(mine), how, True)
    given = words(8)
    if mine and fault == "raises":
        print(json.dumps([sys.argv[1], {"ended": time.time()}]), flush=True)
        call(given).sum().backward()
    row = {"error": caught(lambda: call(given).sum().backward())}
    if fault == "caught":
        dist.barrier()
        call, _ = trained(Net(), how, True)
        row["later"] = caught(lambda: call(given).sum().backward())
    return row


def before_fit(fault: str, rank: int, fits: int) -> Any:
    """The rank ends while others wait for it in fit, which it has called so many times."""
    for _ in range(fits):
        replicated()
    if dist.get_rank() == rank:
        while waits(compat_distributed.process_groups_store(), 0) < dist.get_world_size() - 1:
            time.sleep(0.05)
        Fault(fault, 1)()
    return {"error": caught(replicated)}


def after_the_store() -> Any:
    """The rank that has the store has ended, without a word, when another one fails that has run no graph yet."""
    importlib.import_module("tightship.integrations.torch_compile")
    dist.barrier()
    if dist.get_rank() == 0:
        os._exit(0)
    time.sleep(1)
    raise ValueError("injected")


def as_child(folder: str) -> Any:
    """Ranks are processes of multiprocessing, whose errors no hook of Python's is told of."""
    kind = torch.multiprocessing.get_context("spawn")
    ranks = [kind.Process(target=_child, args=(r, folder)) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    said = json.loads(Path(folder, "said").read_text())
    return {"statuses": [process.exitcode for process in ranks], "error": said}


def _child(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    fault = Fault("raises", 3) if rank == 1 else nothing
    kept = made("ddp", "loss", fault)
    if rank == 1:
        steps(*kept, {"loss": fault})
    error = caught(lambda: steps(*kept, {}))
    Path(folder, "said").write_text(json.dumps(error))
    os._exit(0)


class Scenarios(dict[str, Any]):
    """By ``way place fault rank visit``."""

    def __missing__(self, name: str) -> Any:
        if name.startswith("child"):
            return lambda: as_child(name.split()[1])
        if name == "after_the_store":
            return after_the_store
        way, place, *rest = name.split()
        if place == "patient":
            return lambda: patient(way)
        if place == "waits":
            return lambda: waits_elsewhere(way, rest[0])
        if way == "before_fit":
            return lambda: before_fit(place, *map(int, rest))
        if place == "untraceable":
            return lambda: untraceable(way, rest[0])
        return lambda: ends(way, place, rest[0], *map(int, rest[1:]))


if __name__ == "__main__":
    main(Scenarios())
