"""One of two ranks: faults drawn from a seed, each named ``seed:number``, one after the other."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import distributed as dist
from worker import adamw, batches, caught, digest, loss_of, model

import tightship
from tightship.errors import Infeasible
from tightship.execute import planned_together, prepared, ranks, replicas, train_step, train_variants
from tightship.frontends.torch import collectives
from tightship.frontends.torch.rerun.live_step import Asked

IN_FIT: dict[str, tuple[Any, str]] = {
    "meeting": (ranks.Ranks, "measure"),
    "dividing": (replicas, "shard_optimizer"),
    "capture": (train_variants, "run_code"),
    "profile": (prepared, "profile"),
    "plan": (train_variants.TrainVariants, "_planned"),
    "verification": (planned_together, "read"),
    "reservation": (train_variants.TrainVariants, "_bound"),
    "first messages": (collectives, "running"),
}
IN_STEP: dict[str, tuple[Any, str]] = {
    "code of the step": (train_variants, "run_code"),
    "messages": (collectives, "running"),
    "before the first op": (train_step.TrainStep, "_put_away"),
    "behind the last op": (Asked, "fill"),
    "update": (train_step.TrainStep, "_run_update"),
    "state dict": (train_step, "saved"),
}
ONE_SENDS = ("profile", "plan")
"""What rank 0 does for all."""
UNSENT = ("capture", "profile", "plan", "verification", "reservation", "code of the step")
"""Where nothing has been sent yet: ranks go on afterwards."""
ERRORS: tuple[type[Exception], ...] = (RuntimeError, MemoryError, KeyError, ValueError, OSError)
OTHERS = (
    "infeasible",
    "budget",
    "batch of a step",
    "batch in fit",
    "version",
    "model",
    "frozen",
    "optimizer",
)


class Fault(NamedTuple):
    """``what`` happens on ``rank`` at call ``at`` of ``where``; "other" is what one rank is given, and others not."""

    what: str
    where: str
    rank: int
    at: int
    shard: bool
    error: int

    @property
    def ends(self) -> bool:
        """Whether the processes cannot go on."""
        return self.what == "kill" or (self.what == "raise" and self.where not in UNSENT)


def drawn(seed: int, number: int) -> Fault:
    rng = random.Random(f"{seed}:{number}")
    what = rng.choice(("kill", "raise", "raise", "other"))
    where = rng.choice((*IN_FIT, *IN_STEP)) if what != "other" else rng.choice(OTHERS)
    shard = rng.random() < 0.5
    at = rng.randrange(9 if where == "messages" else 4) if where.endswith("messages") else 0
    rank = 0 if where in ONE_SENDS else rng.randrange(2)
    return Fault(what, where, rank, at, shard, rng.randrange(len(ERRORS)))


def say(name: str, row: dict[str, Any]) -> None:
    print(json.dumps([name, row]), flush=True)


def happens(name: str, fault: Fault) -> Callable[[], Any]:
    def now() -> Any:
        say(name, {"injected": time.time()})
        if fault.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ERRORS[fault.error](f"injected: {fault.where}")

    return now


def struck(name: str, fault: Fault) -> Any:
    """Inside, the fault happens."""
    if fault.what == "other" or dist.get_rank() != fault.rank:
        return nullcontext()
    place, attribute = {**IN_FIT, **IN_STEP}[fault.where]
    own, count, now = getattr(place, attribute), 0, happens(name, fault)

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return now() if count == fault.at + 1 else own(*args, **kwargs)

    return patch.object(place, attribute, called)


def given(fault: Fault) -> dict[str, Any]:
    """What this rank gives fit."""
    other = fault.what == "other" and dist.get_rank() == fault.rank
    where = fault.where if other else ""
    m = model(more=where == "model")
    m[0].weight.requires_grad_(where != "frozen")
    o = torch.optim.SGD(m.parameters(), 1e-2, momentum=0.9) if where == "optimizer" else adamw(m)
    options: dict[str, Any] = {"split": True} if fault.where == "update" else {}
    if fault.where == "infeasible" and fault.what == "other":
        options["seconds"] = 1.0
    budgets = {"budget": "static+70%", "infeasible": "static+1%"}
    return {
        "model": m,
        "loss_fn": loss_of,
        "optimizer": o,
        "sample_batch": batches(1, 40 if where == "batch in fit" else 64)[0],
        "budget": budgets.get(where, "static+100%" if "split" in options else "static+60%"),
        "parallel": tightship.DataParallel(shard=fault.shard),
        "cache": None,
        **options,
    }


def held(m: Any) -> str:
    return digest(t for t in [*m.parameters(), *m.buffers()])


def refit(fault: Fault) -> Any:
    if fault.where in ("version", "meeting"):
        ranks._process.of = None  # as in a process that has just begun
    if fault.where == "version" and dist.get_rank() == fault.rank:
        with patch.object(ranks, "version", lambda _: "0.0.1"):
            return tightship.fit(**given(fault))
    if fault.where == "plan" and fault.what == "raise" and fault.error == 0:
        no = Infeasible(budget=1, lower_bound=2, best_peak=2, top=())
        with patch.dict(globals(), {"ERRORS": (lambda _: no, *ERRORS[1:])}):
            return tightship.fit(**given(fault))
    return tightship.fit(**given(fault))


def run(name: str) -> dict[str, Any]:
    """What came of a fault: the error, when, and whether parameters have changed in the step that raised it."""
    fault = drawn(*map(int, name.split(":")))
    found: dict[str, Any] = {"began": time.time()}
    if fault.where in IN_FIT or (fault.what == "other" and fault.where != "batch of a step"):
        with struck(name, fault):
            return found | caught(lambda: found.update(going=going_on(refit(fault), fault)))
    options = given(fault)
    step, m = tightship.fit(**options), options["model"]
    stepped(step, batches()[0], fault)
    if fault.where == "state dict":
        before = held(m)
        with struck(name, fault):
            return found | caught(lambda: step.state_dict(full=True)) | {"changed": held(m) != before}
    with struck(name, fault):
        for batch in batches(4)[1:]:  # a rank that has sent all it has to hears of it in its next step
            rows = 40 if fault.where == "batch of a step" and dist.get_rank() == fault.rank else 64
            before, one = held(m), (batch[0][:rows], batch[1][:rows])
            row = caught(lambda one=one: stepped(step, one, fault))
            if row["type"]:
                return found | row | {"changed": held(m) != before}
    return found | row | {"changed": False, "going": whole(step)}


def stepped(step: Any, batch: Any, fault: Fault) -> None:
    if fault.where != "update":
        step(batch)
        return
    step.optimizer.zero_grad()
    step.backward(batch)
    step.update()


def going_on(step: Any, fault: Fault) -> str:
    """A fault that no rank has to mind: steps that go on, with the same parameters on all."""
    other = fault.where == "batch in fit" and dist.get_rank() == fault.rank
    for b in batches(2, 40 if other else 64):
        step(b)
    return whole(step)


def whole(step: Any) -> str:
    """Of the parameters: after a step buffers are those of each rank's own batch, as in DistributedDataParallel."""
    state = step.state_dict(full=True)["model"]
    return digest(state[n] for n, _ in step.model.named_parameters())


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in sys.argv[1:]:
        say(case, run(case))
    os._exit(0)  # a rank may be gone, and the others' groups with it
