"""One rank: communication hooks of DistributedDataParallel, in eager and with ``fit``."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from worker import batches, caught, digest, loss_of, main, model

import tightship


def power(start: int = 2, **options: Any) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=start, **options)


def at_random(state: Any, bucket: Any) -> Any:
    """Half of all elements, drawn."""
    assert isinstance(bucket, dist.GradBucket)
    kept = torch.where(torch.rand_like(bucket.buffer()) < 0.5, bucket.buffer(), 0.0)
    work = dist.all_reduce(kept, async_op=True)
    return work.get_future().then(lambda f: f.value()[0] / dist.get_world_size())


def all_with_the_last(state: list[Any], bucket: Any) -> Any:
    """One message for all buckets, whose futures wait for it."""
    future: Any = torch.futures.Future()
    state.append((future, bucket.buffer()))
    if bucket.is_last():
        row = torch.cat([b for _, b in state]) / dist.get_world_size()
        dist.all_reduce(row)
        for (one, buffer), part in zip(state, row.split([len(b) for _, b in state]), strict=True):
            one.set_result(buffer.copy_(part))
        state.clear()
    return future


def seen(hook: Any, log: list[Any], *, waits: bool) -> Any:
    """Notes buckets. On gloo, hooks of torch's that send again when an answer is there mix up their messages, unless
    each is ``waited`` for."""

    def called(state: Any, bucket: Any) -> Any:
        shapes = [tuple(p.shape) for p in bucket.parameters()]
        log.append([bucket.index(), bucket.is_last(), bucket.buffer().numel(), str(shapes)])
        assert [tuple(g.shape) for g in bucket.gradients()] == shapes
        future = hook(state, bucket)
        if waits:
            future.wait()
        return future

    called.__annotations__.clear()  # torch reads them, and takes none that are texts
    return called


def trained(
    hook: Any, state: Any, *, planned: bool, every: int = 1, before: int = 0, waits: bool = True, **ddp: Any
) -> dict[str, Any]:  # fmt: skip
    log: list[Any] = []
    m = DistributedDataParallel(model(), **{"bucket_cap_mb": 0.02, **ddp})
    m.register_comm_hook(state, seen(hook, log, waits=waits))
    o = torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(dist.get_rank())
    losses, step = [], None
    for k, b in enumerate(batches(8)):
        if planned and k >= before:
            step = step or tightship.fit(m, loss_of, o, b, "100%", accumulate=every)
            losses.append(step(b).item())
            continue
        last = k % every == every - 1
        with nullcontext() if last else m.no_sync():
            loss = loss_of(m, b)
            loss.backward()
        if last:
            o.step()
            o.zero_grad()
        losses.append(loss.item())
    row = {"losses": losses, "parameters": digest(m.parameters()), "buckets": log}
    return row if step is None else {"row": row, "measure": step.measure(), "notes": [*step.notes]}


_HOOKS: dict[str, tuple[Any, Callable[[], Any], dict[str, Any]]] = {
    "power": (powerSGD_hook.powerSGD_hook, power, {}),
    "views": (powerSGD_hook.powerSGD_hook, power, {"gradient_as_bucket_view": True}),
    "static": (powerSGD_hook.powerSGD_hook, lambda: power(3), {"static_graph": True}),
    "not made anew": (powerSGD_hook.powerSGD_hook, power, {"find_unused_parameters": True}),
    "sizes": (
        powerSGD_hook.powerSGD_hook, power, {"bucket_cap_mb": None, "bucket_cap_mb_list": [0.01, 0.02]},
    ),
    "one bucket": (powerSGD_hook.powerSGD_hook, power, {"bucket_cap_mb": None}),
    "added up": (powerSGD_hook.powerSGD_hook, power, {"every": 2}),
    "after one step": (powerSGD_hook.powerSGD_hook, power, {"before": 1}),
    "after four steps": (powerSGD_hook.powerSGD_hook, power, {"before": 4}),
    "half": (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), lambda: None, {}),
    "nothing": (debugging_hooks.noop_hook, lambda: None, {}),
    "at random": (at_random, lambda: None, {}),
    "with the last": (all_with_the_last, list, {"waits": False}),
}  # fmt: skip


def called_as_in_eager() -> Any:
    return {
        name: {
            "eager": trained(hook, state(), planned=False, **how),
            "fit": trained(hook, state(), planned=True, **how),
        }
        for name, (hook, state, how) in _HOOKS.items()
    }


def lacks_a_gradient() -> Any:
    m = DistributedDataParallel(model())
    m.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    step = tightship.fit(m, loss_of, torch.optim.SGD(m.parameters(), 0.1), batches()[0], "100%")
    step(batches()[0])
    m.module[0].requires_grad_(False)
    row = caught(lambda: step(batches()[0]))
    m.module[0].requires_grad_(True)
    return row | {"loss": step(batches()[0]).item()}


def no_future() -> Any:
    return caught(lambda: trained(lambda state, bucket: None, None, planned=True, waits=False))


def raises() -> Any:
    """On one rank, in the third step."""

    def hook(state: Any, bucket: Any) -> Any:
        state.append(bucket.index())
        if state.count(0) == 3 and dist.get_rank() == 1:
            raise ArithmeticError("no third step")
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]

    return caught(lambda: trained(hook, [], planned=True, waits=False))


def killed() -> Any:
    """One rank, inside of its hook."""

    def hook(state: Any, bucket: Any) -> Any:
        state.append(bucket.index())
        if state.count(0) == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]

    return caught(lambda: trained(hook, [], planned=True, waits=False))


if __name__ == "__main__":
    main(globals())
