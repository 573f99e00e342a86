"""One rank: loops that step an optimizer of their own behind ``step.backward``, in eager and with ``fit``."""

from __future__ import annotations

import copy
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import swa_utils
from torch_worker import sharded, whole
from worker import ROWS, WIDTH, batches, caught, digest, loss_of, main, model

import tightship
from tightship.errors import Unsupported


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


def held_weakly() -> Any:
    """An average of weights that knows the parameters by weak references alone, as torch_ema's does."""
    found = {}
    for wrap in (sharded, columns):
        m = wrap(model())
        known = [weakref.ref(p) for p in m.parameters()]
        g = torch.Generator().manual_seed(1)  # tensor parallel ranks compute one batch together
        given = [(torch.randn(ROWS, WIDTH, generator=g), torch.randn(ROWS, 7, generator=g)) for _ in range(3)]
        optimizer = torch.optim.SGD(m.parameters(), 0.1)
        averages = [p.detach().clone() for p in m.parameters()]
        step = tightship.fit(m, loss_of, optimizer, given[0], "100%")
        seen = []
        for b in given:
            step(b)
            seen.append(all(ref() is not None for ref in known))
            with torch.no_grad():
                for average, ref, (_, p) in zip(averages, known, step.named_parameters(), strict=True):
                    average.lerp_(ref(), 0.1)  # type: ignore[arg-type]
                    seen.append(whole([ref()]) == whole([p]))
        found[wrap.__name__] = {"seen": seen, "whole": whole(averages), "measure": step.measure()}
    return found


def averages_put_in() -> Any:
    """Averages that are written into parameters for an evaluation, and taken out again; ``stale``: eager that does
    not say `reshard` keeps the model's own group as it was gathered."""
    return {how: _evaluated_with_averages(how) for how in ("fit", "eager", "stale")}


def _evaluated_with_averages(how: str) -> dict[str, Any]:
    m: Any = model()
    fully_shard(m[0])
    fully_shard(m)  # with layers of its own
    held = list(m.parameters())
    o = torch.optim.AdamW(held, 0.01)
    averages = [p.detach().clone() for p in held]
    step: Any = tightship.fit(m, loss_of, o, batches(1)[0], "100%") if how == "fit" else None
    losses = []
    for b in batches(4):
        if step is None:
            loss = loss_of(m, b)
            loss.backward()
            o.step()
            o.zero_grad()
        else:
            loss = step(b)
        losses.append(loss.item())
        with torch.no_grad():
            for average, p in zip(averages, held, strict=True):
                average.lerp_(p, 0.5)
            kept = [p.clone() for p in held]
            for values in (averages, kept):
                for p, value in zip(held, values, strict=True):
                    p.copy_(value)
                if how != "stale":
                    m.reshard()
                losses.append(loss_of(m, b).item())
    return {"losses": losses, "averages": whole(averages), "whole": whole(m.state_dict().values())}


def hooked_nodes() -> Any:
    """Hooks on nodes that accumulate gradients, which DistributedDataParallel holds, before ``fit`` and after it."""
    found = []
    for before in (True, False):
        m: Any = torch.nn.parallel.DistributedDataParallel(model())
        first = next(m.parameters())

        def hook(t: torch.Tensor = first) -> None:
            torch.autograd.graph.get_gradient_edge(t).node.register_hook(lambda *_: None)

        try:
            if before:
                hook()
            step = tightship.fit(m, loss_of, torch.optim.SGD(m.parameters(), 0.1), batches(1)[0], "100%")
            step(batches(1)[0])
            copy.deepcopy(m)
            hook()
            step(batches(1)[0])
            found.append("")
        except Unsupported as error:
            found.append(str(error))
    return found


def saved_beside() -> Any:
    """Checkpoints saved from a thread over the default group, which steps send over as well."""
    found = {}
    for how in ("ddp", "sharded"):
        with tempfile.TemporaryDirectory() as own:
            folders = [own]
            dist.broadcast_object_list(folders)
            m: Any = torch.nn.parallel.DistributedDataParallel(model()) if how == "ddp" else sharded(model())
            o = torch.optim.AdamW(m.parameters(), 0.01)
            step = tightship.fit(m, loss_of, o, batches(1)[0], "100%")
            then, future = "", None
            for k, b in enumerate(batches(40)):
                step(b)
                if k % 10 == 3:
                    if future is not None:
                        future.result(60)
                    state = dict(zip(("model", "optimizer"), get_state_dict(m, o), strict=True))
                    then = _parameters(state)
                    future = checkpoint.async_save(state, checkpoint_id=f"{folders[0]}/{k}")
            assert future is not None
            future.result(60)
            state = dict(zip(("model", "optimizer"), get_state_dict(m, o), strict=True))
            moved = _parameters(state)
            checkpoint.load(state, checkpoint_id=f"{folders[0]}/33")
            found[how] = {"saved": _parameters(state), "then": then, "moved": moved}
            dist.barrier()
    return found


def _parameters(state: Any) -> str:
    """Without buffers, of which each rank has its own."""
    return whole(t for n, t in state["model"].items() if n.rpartition(".")[2] in ("weight", "bias"))


def accumulated_before() -> Any:
    """Gradients that are there when ``fit`` takes the model over."""
    m, given = sharded(model()), batches(2)
    o = torch.optim.SGD(m.parameters(), 0.1)
    loss_of(m, given[0]).backward()
    step = tightship.fit(m, loss_of, o, given[0], "100%")
    refused = caught(lambda: step(given[0]))
    o.zero_grad()
    return {"refused": refused, "loss": step(given[1]).item()}


ASKED: dict[str, Callable[[list[Any]], Any]] = {
    "clipped": lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.1),
    "largest": lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.1, norm_type=float("inf"), foreach=True),
    "by hand": lambda ps: torch.stack([torch.norm(p.grad.detach(), 2) for p in ps]).norm(2),
    "numbers": lambda ps: sum(p.grad.data.norm(2).item() ** 2 for p in ps),
    "squares": lambda ps: sum((p.grad**2).sum() for p in ps).sqrt(),  # type: ignore[union-attr]
    "absolute": lambda ps: max(p.grad.abs().max().item() for p in ps),
    "finite": lambda ps: all(torch.isfinite(p.grad).all().item() for p in ps),
    "mean": lambda ps: ps[0].grad.mean(),
    "lerped": lambda ps: sum(g.sum() for g in torch._foreach_lerp(*_and_zeros(ps), 0.25)),
    "clones": lambda ps: sum(p.grad.clone().norm() for p in ps),
    "with others": lambda ps: sum(
        (p.grad + 0.1 * p.grad.sign() * p.detach().new_ones(())).norm() for p in ps
    ),
    "how many": lambda ps: sum((p.grad > 0).sum() for p in ps) / sum(p.grad.numel() for p in ps),
    "flat": lambda ps: torch.stack([p.grad.T.reshape(-1).square().sum() for p in ps]).sum(),
    "rows": lambda ps: (ps[0].grad / ps[0].grad.norm(dim=-1, keepdim=True)).exp().sum(),
    "first": lambda ps: ps[0].grad[0].abs().sum(),
    "total": lambda ps: torch.nn.utils.get_total_norm([p.grad for p in ps]),
    "written": lambda ps: ps[0].grad.masked_fill_(ps[0].grad > 1e-3, 1e-3).add_(1e-4).var(),
    "scaled": lambda ps: ps[0].grad.mul_(0.1 / torch.stack([p.grad.norm() for p in ps[:2]]).norm()).sum(),
}
"""What people ask of the gradients of ``model.parameters()``."""


def _and_zeros(ps: list[Any]) -> tuple[list[Any], list[Any]]:
    return [p.grad for p in ps], [torch.zeros_like(p.grad) for p in ps]


JOINED: Callable[[list[Any]], Any] = lambda ps: torch.cat([p.grad.view(-1) for p in ps]).norm()  # noqa: E731


def asked_of_parts() -> Any:
    """Questions between ``step.backward`` and ``step.update``."""
    rows: dict[str, Any] = {}
    refused: dict[str, Any] = {}
    sent: dict[str, Any] = {}
    by_hand = {"all_reduce": lambda ps: dist.all_reduce(ps[0].grad.data)}
    every = {**ASKED, "joined": JOINED, "python": lambda ps: sum(ps[0].grad.tolist())}
    ways = [lambda ps: _refused(ps, every, refused), lambda ps: _refused(ps, by_hand, sent)]
    _asked(lambda m: m, ways, "fit", shard=True)
    rows["plain"] = refused
    rows["averaged by hand"] = sent
    for how in ("eager", "fit"):
        rows[how] = _asked(sharded, list(ASKED.values()), how)
    rows["by row"] = _asked(lambda m: m, [lambda ps: ps[0].grad.norm(dim=-1).shape[0] * 0], "fit", shard=True)
    return rows


def _refused(ps: list[Any], every: Any, texts: dict[str, Any]) -> float:
    texts |= {name: caught(lambda ask=ask: ask(ps))["text"] for name, ask in every.items()}  # type: ignore[misc]
    return 0.0


def _asked(wrap: Callable[[Any], Any], ways: list[Any], how: str, shard: bool = False) -> list[Any]:
    m, given = wrap(model()), batches(3)
    o = torch.optim.SGD(m.parameters(), 0.1)
    parallel = tightship.DataParallel(shard=True) if shard else None
    step: Any = None
    if how == "fit":
        step = tightship.fit(m, loss_of, o, given[0], "100%", split=True, parallel=parallel)
    log: list[float] = []
    for b in given:
        if how == "fit":
            step.backward(b)
        else:
            loss_of(m, b).backward()
        for ask in ways:
            found = ask(list(m.parameters()))
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            log.append(float(found))
        if how == "fit":
            step.update()
        else:
            o.step()
        o.zero_grad()
    return [log, whole(m.state_dict().values())]


def told_in_the_loop() -> Any:
    """Methods of ``fully_shard``'s modules, which loops call before each pass."""
    rows: dict[str, Any] = {}
    for planned in (False, True):
        m, given = sharded(model()), batches(4)
        o = torch.optim.SGD(m.parameters(), 0.1)
        m.unshard()
        step: Any = tightship.fit(m, loss_of, o, given[0], "200%", split=True) if planned else None
        log: list[float] = []
        for k, b in enumerate(given):
            m.unshard(async_op=True).wait()
            m.set_is_last_backward(k % 2 == 1)
            m[0].set_reshard_after_backward(k % 2 == 1)
            m.set_requires_gradient_sync(True)
            loss = step.backward(b) if planned else loss_of(m, b)
            if not planned:
                loss.backward()
            log.append(loss.item())
            if k % 2:
                step.update() if planned else o.step()
                o.zero_grad()
        rows["fit" if planned else "eager"] = [log, whole(m.state_dict().values())]
    rows["refused"] = caught(lambda: m.set_gradient_divide_factor(4.0))
    return rows


def changed_between() -> Any:
    """Between steps a layer is trained that was frozen, or comes to the model."""
    rows: dict[str, Any] = {"thawed": {}, "added": {}}
    ways: dict[str, tuple[Any, Any]] = {
        "replicated": (lambda m: m, tightship.DataParallel()),
        "shard": (lambda m: m, tightship.DataParallel(shard=True)),
        "fully_shard": (sharded, None),
    }
    for name, (wrap, parallel) in ways.items():
        m, given = wrap(model()), batches(4)
        m[0].requires_grad_(False)
        step = tightship.fit(
            m, loss_of, torch.optim.SGD(m.parameters(), 0.1), given[0], "200%", parallel=parallel
        )
        losses = []
        for k, b in enumerate(given):
            m[0].requires_grad_(k > 1)
            losses.append(step(b).item())
        weights = {n: t for n, t in step.state_dict(full=True)["model"].items() if "weight" in n}
        rows["thawed"][name] = [losses, digest(weights.values()), digest([weights["0.weight"]])]
    first = digest([model()[0].weight])
    rows["moved"] = all(row[2] != first for row in rows["thawed"].values())
    for name, alike, parallel in (
        ("replicated", True, ways["replicated"][1]),
        ("different", False, ways["replicated"][1]),
        ("shard", True, ways["shard"][1]),
    ):
        m, given = model(), batches(4)
        o = torch.optim.SGD(m.parameters(), 0.1)
        step = tightship.fit(m, loss_of, o, given[0], "200%", parallel=parallel)
        step(given[0])
        torch.manual_seed(0 if alike else dist.get_rank())
        m.append(torch.nn.Linear(7, 7))  # type: ignore[operator]
        o.add_param_group({"params": list(m[-1].parameters())})  # type: ignore[index]
        errors = [caught(lambda b=b, step=step: step(b)) for b in given[1:]]  # type: ignore[misc]
        rows["added"][name] = [[e["text"] for e in errors], digest(m[-1].parameters())]  # type: ignore[index]
    return rows


class Normed(torch.optim.SGD):
    """Goes by the norm of each whole gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(p.grad.norm() + 1)
        return super().step(closure)


def stepped_by_themselves() -> Any:
    """Optimizers that fit refuses, made before it and stepped behind ``step.backward``, as what it says has it."""
    rows: dict[str, Any] = {}
    ways: dict[str, tuple[Any, Any]] = {
        "sends": (
            torch.nn.parallel.DistributedDataParallel,
            lambda ps: ZeroRedundancyOptimizer(ps, torch.optim.AdamW, lr=0.01),
        ),
        "whole rows": (sharded, lambda ps: Normed(ps, 0.1, foreach=False)),
    }
    for name, (wrap, made) in ways.items():
        m, given = wrap(model()), batches(3)
        o = made(m.parameters())
        refused = caught(lambda m=m, o=o: tightship.fit(m, loss_of, o, batches(1)[0], None))
        rows[name] = {"refused": refused["text"]}
        for how in ("eager", "fit"):
            m = wrap(model())
            o = made(m.parameters())
            step: Any = tightship.fit(m, loss_of, None, given[0], "100%") if how == "fit" else None
            losses = []
            for b in given:
                o.zero_grad()
                loss = loss_of(m, b) if step is None else step.backward(b)
                if step is None:
                    loss.backward()
                o.step()
                losses.append(loss.item())
            rows[name][how] = [losses, whole(m.state_dict().values())]
    return rows


class Scaled(torch.nn.Module):
    """A parameter with as many rows as there are ranks, and one with rows that these do not divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.randn(dist.get_world_size(), WIDTH))
        self.inner, self.outer = torch.nn.Linear(WIDTH, 5), torch.nn.Linear(5, 7)

    def forward(self, x: torch.Tensor) -> Any:
        return self.outer(self.inner(x * self.scale.sum(0)))


def averaged_beside() -> Any:
    """Averages of weights that are whole, as they were made before ``fit``; on one rank alone."""
    rows: dict[str, Any] = {"eager": _averaged_beside(Scaled(), None)}
    shard = tightship.DataParallel(shard=True)
    rows["shard"] = _averaged_beside(Scaled(), shard)
    m = Scaled()
    kept = copy.deepcopy(m)
    step = tightship.fit(
        m, loss_of, torch.optim.SGD(m.parameters(), 0.1), batches(1)[0], "200%", parallel=shard
    )

    def alone() -> None:
        if dist.get_rank() == 0:
            with torch.no_grad():
                kept.scale.lerp_(next(m.parameters()), 0.1)
        step(batches(1)[0])

    rows |= {"optimizer": [_stepped(how) for how in (None, shard)], "alone": caught(alone)}
    return rows


def _stepped(shard: Any) -> Any:
    """By an optimizer that is made after ``fit``, and goes through lists of parameters; and what others are told."""
    own, given = Scaled(), batches(2)
    m = own if shard is not None else torch.nn.parallel.DistributedDataParallel(own)
    step: Any = shard and tightship.fit(m, loss_of, None, given[0], "200%", parallel=shard)
    o = torch.optim.AdamW(m.parameters(), 0.1, foreach=True)
    for b in given:
        o.zero_grad()
        if step is None:
            loss_of(m, b).backward()
        else:
            step.backward(b)
        o.step()
    x = given[0][0]
    with torch.no_grad():
        out = own(x) if step is None else tightship.infer(own, x)(x)
    if step is not None:
        assert tightship.estimate(own, x).peak > 0
    return digest([out]), digest([own.outer.bias, copy.deepcopy(own).outer.bias])


def _averaged_beside(own: Any, shard: Any) -> dict[str, Any]:
    given = batches(3)
    m = own if shard is not None else torch.nn.parallel.DistributedDataParallel(own)
    o = torch.optim.SGD(m.parameters(), 0.1)
    held = list(own.parameters())
    in_place, in_turn = copy.deepcopy(own), {n: p.detach().clone() for n, p in own.named_parameters()}
    listed = [p.data.clone() for p in held]
    of_torch = swa_utils.AveragedModel(own, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    step: Any = shard and tightship.fit(m, loss_of, o, given[0], "200%", parallel=shard)
    evaluated = []
    for b in given:
        if step is None:
            o.zero_grad()
            loss_of(m, b).backward()
            o.step()
        else:
            step(b)
        of_torch.update_parameters(own)
        for e, p in zip(listed, held, strict=True):
            e.mul_(0.5).add_(p.data, alpha=0.5)
        with torch.no_grad():
            for n, p in own.named_parameters():
                in_turn[n] = 0.5 * in_turn[n] + 0.5 * p
            for e, p in zip(in_place.parameters(), own.parameters(), strict=True):
                e.lerp_(p, 0.5)
            kept = [p.clone() for p in own.parameters()]
            for e, p in zip(in_place.parameters(), own.parameters(), strict=True):
                p.copy_(e)
            evaluated.append(loss_of(own, b).item())
            for k, p in zip(kept, own.parameters(), strict=True):
                p.copy_(k)
    averages = [in_place.parameters(), in_turn.values(), listed, of_torch.module.parameters()]
    kinds = sorted({type(t).__name__ for t in (*in_place.parameters(), *in_turn.values())})
    return {"averages": [digest(tensors) for tensors in averages], "evaluated": evaluated, "kinds": kinds}


if __name__ == "__main__":
    main(globals())
