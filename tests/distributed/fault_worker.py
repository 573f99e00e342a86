"""One rank: something fails on one of two, at each point at which it can."""

from __future__ import annotations

import json
import logging.handlers
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed as dist
from worker import ROWS, adamw, batches, caught, loss_of, main, model

import tightship
from tightship.errors import BadInput, Infeasible
from tightship.execute import meeting, planned_together, prepared, ranks, roll_call, train_variants
from tightship.frontends.torch import collectives, compat_distributed

Fault = Callable[..., Any]


def fitted(m: Any = None, loss: Any = loss_of, batch: Any = None, **options: Any) -> Any:
    m = m or model()
    options = {"budget": "static+60%", "parallel": tightship.DataParallel(shard=True)} | options
    return tightship.fit(
        m, loss, options.pop("optimizer", None) or adamw(m), batch or batches()[0], **options
    )


def here(rank: int) -> bool:
    return dist.get_rank() == rank


@contextmanager
def broken(rank: int, place: Any, name: str, fault: Fault, at: int = 0) -> Iterator[None]:
    """On one rank, the call number ``at`` of ``place.name`` is ``fault``."""
    own, count = getattr(place, name), 0

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return fault() if here(rank) and count == at + 1 else own(*args, **kwargs)

    with patch.object(place, name, called):
        yield


def raises(error: BaseException) -> Fault:
    def fault() -> Any:
        raise error

    return fault


def frozen(on: bool) -> Any:
    m = model()
    m[0].weight.requires_grad_(not on)
    return m


def in_fit(rank: int, place: Any, name: str, error: Exception, at: int = 0) -> Callable[[], Any]:
    def injected() -> Any:
        with broken(rank, place, name, raises(error), at):
            return caught(lambda: fitted(cache=None))

    return injected


def in_step(change: Callable[[Any], Any]) -> Callable[[], Any]:
    def injected() -> Any:
        step = fitted()
        step(batches()[0])
        return caught(lambda: change(step))

    return injected


def raising_loss(m: Any, batch: Any) -> torch.Tensor:
    if here(1):
        raise KeyError("a loss that fails on rank 1")
    return loss_of(m, batch)


def only_here(rank: int, given: Any, otherwise: Any) -> Any:
    return given if here(rank) else otherwise


def named(text: str) -> Any:
    return lambda name: text if here(1) else "1"


def other_version() -> Any:
    ranks._process.of = None  # as in a process that has just begun
    with patch.object(ranks, "version", named("0.0.1")):
        return caught(fitted)


def no_plan() -> Any:
    return Infeasible(budget=1, lower_bound=2, best_peak=2, top=())


MENDED: dict[str, Callable[[], Any]] = {
    "another version": other_version,
    "budget that is none": lambda: caught(lambda: fitted(budget=only_here(1, "wat", "60%"))),
    "another budget": lambda: caught(lambda: fitted(budget=only_here(1, "70%", "60%"))),
    "another norm": lambda: caught(lambda: fitted(clip_norm=only_here(0, 1.0, 2.0))),
    "unknown option": lambda: caught(lambda: fitted(**only_here(1, {"allow": "magic"}, {}))),
    "another mode": lambda: caught(
        lambda: fitted(parallel=tightship.DataParallel(shard=here(0)))
    ),
    "no module": lambda: caught(lambda: fitted(only_here(0, [1], None), optimizer=adamw(model()))),
    "another model": lambda: caught(lambda: fitted(model(more=here(1)))),
    "frozen parameter": lambda: caught(lambda: fitted(frozen(here(1)))),
    "optimizer of another model": lambda: caught(
        lambda: fitted(optimizer=only_here(1, adamw(model()), None))
    ),
    "optimizer that is not elementwise": lambda: caught(
        lambda: fitted((m := model()), optimizer=only_here(1, torch.optim.Adafactor(m.parameters()), None))
    ),
    "raise in capture": lambda: caught(lambda: fitted(loss=raising_loss)),
    "batch that does not fit": lambda: caught(
        lambda: fitted(batch=only_here(1, (torch.zeros(4, 3), torch.zeros(4, 7)), None))
    ),
    "raise in profile": in_fit(0, prepared, "profile", RuntimeError("no clock")),
    "no memory in profile": in_fit(0, prepared, "profile", MemoryError("no memory")),
    "raise in plan": in_fit(0, train_variants.TrainVariants, "_planned", ValueError("a bug in planning")),
    "infeasible": in_fit(0, train_variants.TrainVariants, "_planned", no_plan()),
    "raise in verification": in_fit(1, planned_together, "read", BadInput("a plan that breaks a rule")),
    "no memory for the arena": in_fit(
        1, train_variants.TrainVariants, "_bound", MemoryError("cannot reserve")
    ),
    "raise in step's code": in_step(
        lambda step: step(batches()[1] if here(0) else (batches()[1][0][:, :3], batches()[1][1]))
    ),
    "other batch, other plan": in_step(
        lambda step: step(only_here(1, (batches()[1][0][None], batches()[1][1]), batches()[1]))
    ),
    "gradient that is there": in_step(
        lambda step: (leave_gradient(step.model), step(batches()[1]))
    ),
    "no step but prepare": in_step(
        lambda step: step.prepare(batches(1, ROWS // 2)[0]) if here(1) else step(batches()[1])
    ),
    "no step but a state dict": in_step(
        lambda step: step.state_dict(full=True) if here(1) else step(batches()[1])
    ),
    "no step but an update": in_step(lambda step: step.update() if here(0) else step(batches()[1])),
    "under no_grad": in_step(lambda step: under_no_grad(step)),
}  # fmt: skip


def leave_gradient(m: Any) -> None:
    if here(1):
        p = next(m.parameters())
        p.grad = torch.zeros_like(p)


def under_no_grad(step: Any) -> Any:
    with torch.set_grad_enabled(here(0)):
        return step(batches()[1])


def mended() -> Any:
    """Faults before anything is sent, one after the other; and a step of a fit that has been there before them."""
    good = fitted()
    rows = {name: fault() for name, fault in MENDED.items()}
    return {"rows": rows, "good": [good(b).item() for b in batches()], "whole": fitted()(batches()[0]).item()}


# --- faults that end a process, or the step on all ranks ---


def ended(name: str, status: int = 9) -> None:
    """The process says when, and is no more."""
    print(json.dumps([name, {"ended": time.time()}]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL) if status else os._exit(0)


def in_running_step(rank: int, fault: Fault, at: int) -> Any:
    step = fitted()
    step(batches()[0])
    with broken(rank, collectives, "running", fault, at):
        first = caught(lambda: step(batches()[1]))
    return {"error": first, "later": caught(lambda: step(batches()[2]))}


def killed_in_step() -> Any:
    return in_running_step(1, lambda: ended("killed_in_step"), 5)


def stopped(seconds: int) -> Any:
    """As by SIGSTOP, and goes on afterwards."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def in_stopped_step(seconds: int, limit: float) -> Any:
    """One rank is stopped inside of a step; what is said meanwhile, with patience of a few seconds less."""
    said = logging.handlers.BufferingHandler(100)
    logging.getLogger("tightship").addHandler(said)
    waits = {"_PATIENCE": 0.5, "_BETWEEN": 0.2, "_SILENT": 1.5}
    with (
        patch.multiple(roll_call, **waits),
        patch.object(compat_distributed, "seconds_of_timeout", lambda: limit),
    ):
        step = fitted()
        step(batches()[0])
        own, calls = collectives.running, 0

        def running(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if here(1) and calls == 5:
                stopped(seconds)
            return own(*args, **kwargs)

        with patch.object(collectives, "running", running):
            error = caught(lambda: step(batches()[1]))
    lines = [record.getMessage() for record in said.buffer if record.levelno == logging.WARNING]
    return {"error": error, "said": lines}


def late_for_fit() -> Any:
    """Rank 1 comes to fit after the others have named it; what is said meanwhile."""
    said = logging.handlers.BufferingHandler(100)
    logging.getLogger("tightship").addHandler(said)
    with patch.object(meeting, "_LATE", 0.6):
        if here(1):
            time.sleep(3)
        step = fitted()
    step(batches()[0])
    return [record.getMessage() for record in said.buffer if record.levelno == logging.WARNING]


def stopped_for_a_while() -> Any:
    return in_stopped_step(4, 60.0)


def stopped_for_longer_than_the_group_waits() -> Any:
    return in_stopped_step(8, 3.0)


def store_killed_in_step() -> Any:
    return in_running_step(0, lambda: ended("store_killed_in_step"), 9)


def raised_in_step() -> Any:
    return in_running_step(1, raises(RuntimeError("an op that fails")), 7)


def no_memory_in_step() -> Any:
    return in_running_step(0, raises(MemoryError("an op without memory")), 3)


def interrupted_in_step() -> Any:
    try:
        return in_running_step(1, raises(KeyboardInterrupt()), 4)
    except KeyboardInterrupt:
        return {"error": {"type": "KeyboardInterrupt", "text": "", "seconds": 0.0}}


def fitted_after_a_failed_step() -> Any:
    """In the same processes: what is sent next would be taken for what is still waited for."""
    return in_running_step(1, raises(RuntimeError("an op that fails")), 7) | {"fit": caught(fitted)}


def launchers_store() -> Any:
    """Ranks meet in the store that torchrun keeps while it starts them again."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["LAUNCHERS_PORT"]), is_master=False)
    return patch.object(compat_distributed, "process_groups_store", lambda: store)


def killed_under_a_launcher() -> Any:
    with launchers_store():
        return in_running_step(1, lambda: ended("killed_under_a_launcher"), 5)


def started_again() -> Any:
    """With what the ranks before have left in the store."""
    with launchers_store():
        step = fitted()
        return {"losses": [step(b).item() for b in batches()], "error": caught(step.measure)}


def killed_in_capture() -> Any:
    def loss(m: Any, batch: Any) -> torch.Tensor:
        if here(1):
            ended("killed_in_capture")
        return loss_of(m, batch)

    return {"error": caught(lambda: fitted(loss=loss))}


def killed_in_plan() -> Any:
    with broken(0, train_variants.TrainVariants, "_planned", lambda: ended("killed_in_plan")):
        return {"error": caught(lambda: fitted(cache=None))}


def done_before_the_others() -> Any:
    """Rank 1 has fewer batches, and leaves."""
    step = fitted()
    step(batches()[0])
    if here(1):
        ended("done_before_the_others", 0)
    return {"error": caught(lambda: step(batches()[1]))}


if __name__ == "__main__":
    main(globals())
