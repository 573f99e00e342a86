"""One rank: loops that step an optimizer of their own behind ``step.backward``, in eager and with ``fit``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_worker import sharded, whole
from worker import ROWS, WIDTH, batches, caught, loss_of, main, model

import tightship


def columns(m: Any) -> Any:
    return parallelize_module(
        m,
        init_device_mesh("cpu", (dist.get_world_size(),)),
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
    )


def held_before() -> Any:
    """What the caller holds of a model before ``fit`` takes it over: an optimizer's parameters, and a list."""
    return {
        wrap.__name__: {how: _trained(wrap, how == "fit") for how in ("eager", "fit")}
        for wrap in (sharded, columns)
    }


def _trained(wrap: Callable[[Any], Any], planned: bool) -> dict[str, Any]:
    m, given = wrap(model()), batches(6)
    if wrap is columns:  # ranks compute one batch together
        g = torch.Generator().manual_seed(1)
        given = [(torch.randn(ROWS, WIDTH, generator=g), torch.randn(ROWS, 7, generator=g)) for _ in given]
    held = list(m.parameters())
    distributed: list[Any] = [p for p in held if hasattr(p, "full_tensor")]
    o = torch.optim.SGD(held, 0.01, momentum=0.9, foreach=False)
    step: Any = tightship.fit(m, loss_of, None, given[0], "100%") if planned else None
    log: list[float] = []
    for k, b in enumerate(given):
        if planned:
            loss = step.backward(b)
        else:
            loss = loss_of(m, b)
            loss.backward()
        log.append(loss.item())
        if k % 2:  # two batches of gradients
            log.append(torch.nn.utils.clip_grad_norm_(distributed, 0.1).full_tensor().item())  # type: ignore[attr-defined]
            torch.nn.utils.clip_grad_value_(distributed, 0.01)
            distributed[0].grad = distributed[0].grad * 2
            o.step()
            o.zero_grad(set_to_none=k == 1)
    found = {"log": log, "model": whole(m.state_dict().values())}
    return found | ({"measure": step.measure()} if planned else {})


def accumulated_before() -> Any:
    """Gradients that are there when ``fit`` takes the model over."""
    m, given = sharded(model()), batches(2)
    o = torch.optim.SGD(m.parameters(), 0.1)
    loss_of(m, given[0]).backward()
    step = tightship.fit(m, loss_of, o, given[0], "100%")
    refused = caught(lambda: step(given[0]))
    o.zero_grad()
    return {"refused": refused, "loss": step(given[1]).item()}


if __name__ == "__main__":
    main(globals())
