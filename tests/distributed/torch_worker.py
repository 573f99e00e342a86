"""One rank: models that torch itself has made parallel, in ``fit`` and in eager."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils
from worker import WIDTH, adamw, batches, caught, digest, loss_of, main, model

import tightship
from tightship.frontends.torch.capture.incremental import StepCapture
from tightship.integrations.torch_compile import Fallback, measured_step


class Tied(torch.nn.Module):
    """Words in and out by one matrix, in a number that two ranks do not divide; a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(51, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.extra = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(WIDTH)) for _ in range(2)])
        self.head = torch.nn.Linear(WIDTH, 51, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> Any:
        x = self.words(words)
        for layer in (*self.layers, self.layers[0]):
            x = F.gelu(layer(x)) + self.extra[0] * self.extra[1]
        return self.head(x)


class Own(torch.nn.Linear):
    """None of torch's own, which Dynamo compiles with their callers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


def words(count: int = 3) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(100 + dist.get_rank())
    return [torch.randint(0, 51, (64, 8), generator=g) for _ in range(count)]


def word_loss(m: Any, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(m(batch).flatten(0, 1), batch.flatten())


def sharded(m: Any, **options: Any) -> Any:
    """Each layer by itself, then the whole."""
    layers = m.layers if isinstance(m, Tied) else m
    for layer in layers:
        if next(layer.parameters(recurse=False), None) is not None:
            fully_shard(layer, **options)
    if "mp_policy" in options:
        options["mp_policy"] = replace(options["mp_policy"], output_dtype=torch.float32)
    return fully_shard(m, **options)


def averaged() -> Any:
    """Weights, step by step, in a copy that is made after ``fit``."""
    rows: dict[str, Any] = {}
    average = swa_utils.get_ema_multi_avg_fn(0.5)
    for planned in (False, True):
        m = sharded(model())
        o, kept = adamw(m), dict[str, Any]()
        step: Any = tightship.fit(m, loss_of, o, batches()[0], "100%") if planned else None
        copied = swa_utils.AveragedModel(m, multi_avg_fn=average) if planned else None
        for b in batches():
            if copied is not None:
                step(b)
                copied.update_parameters(m)
                continue
            o.zero_grad()
            loss_of(m, b).backward()
            o.step()
            for n, p in m.named_parameters():
                kept[n] = kept[n].lerp_(p.detach(), 0.5) if n in kept else p.detach().clone()
        names = [n for n, _ in model().named_parameters()]
        found = kept if copied is None else copied.module.state_dict()
        rows["fit" if planned else "eager"] = whole(found[n] for n in names)
    return rows


def whole(tensors: Any) -> str:
    return digest(t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors)


def row(losses: list[Any], m: Any, o: Any) -> dict[str, Any]:
    """What a training left behind, of which state dicts say all."""
    states = o.state_dict()["state"]
    return {
        "losses": [loss.item() for loss in losses],
        "model": whole(m.state_dict().values()),
        "optimizer": whole(t for k in sorted(states) for t in states[k].values()),
        "names": sorted(m.state_dict()),
        "kinds": {n: type(t).__name__ for n, t in m.state_dict().items()},
    }


_CAPTURES = [0]
_begin = StepCapture.__init__


def _counted(*args: Any, **kwargs: Any) -> None:
    _CAPTURES[0] += 1
    _begin(*args, **kwargs)


StepCapture.__init__ = _counted  # type: ignore[method-assign]


def both(
    make: Callable[[], Any], loss: Any, given: list[Any], clip: float | None = None, budget: str = "static+50%",
    wrap: Callable[[Any], Any] = sharded, before: int = 0, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Eager training and ``fit``'s of the same model, with how often each step was captured; ``before`` as many eager
    steps."""
    rows = {}
    for planned in (False, True):
        m = wrap(make())
        o = adamw(m)
        losses: list[Any] = []
        captures = []
        step: Any = None
        for k, b in enumerate(given):
            if planned and k >= before:
                o.zero_grad()
                step = step or tightship.fit(m, loss, o, b, budget, clip_norm=clip, **options)
                captures.append(_CAPTURES[0])
                losses.append(step(b))
                continue
            o.zero_grad()
            value = loss(m, b)
            value.backward()
            if clip is not None:
                norm = torch.nn.utils.clip_grad_norm_(m.parameters(), clip)
            o.step()
            losses.append(value.detach())
        mine = row(losses, m, o)
        if planned:
            mine |= {"measure": step.measure(), "recomputed": step.plan.count("recompute")}
            mine["captures"] = [b - a for a, b in pairwise((*captures, _CAPTURES[0]))]
        if clip is not None:
            norm = step.grad_norm if planned else norm
            mine["norm"] = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
        rows["fit" if planned else "eager"] = mine
    return rows


# --- scenarios ---


def fully_sharded() -> Any:
    return both(model, loss_of, batches(3), verify_every=2)


def fully_sharded_tied() -> Any:
    return both(Tied, word_loss, words(4))


def fully_sharded_later() -> Any:
    """After eager steps, whose optimizer state is taken over."""
    return both(model, loss_of, batches(4), before=2)


def fully_sharded_groups() -> Any:
    """Several modules as one group, with parts on the CPU, where they are anyway."""
    away = CPUOffloadPolicy(pin_memory=False)

    def wrap(m: Any) -> Any:
        fully_shard([m.words, m.head], offload_policy=away)
        fully_shard(list(m.layers[:2]), offload_policy=away)
        return fully_shard(m, offload_policy=away)

    return both(Tied, word_loss, words(), wrap=wrap)


def fully_sharded_other_shapes() -> Any:
    """Batches of other lengths on each rank, which change from step to step."""
    given = [b[:, : 8 - 4 * ((k + dist.get_rank()) % 2)].contiguous() for k, b in enumerate(words(4))]
    return both(Tied, word_loss, given)


def fully_sharded_clipped() -> Any:
    return both(model, loss_of, batches(3), clip=0.05, verify_every=2)


def mixed_precision() -> Any:
    half, full = torch.bfloat16, torch.float32
    policies = {
        "parameters": MixedPrecisionPolicy(param_dtype=half),
        "all": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=full),
        "sent": MixedPrecisionPolicy(reduce_dtype=half, cast_forward_inputs=False),
    }

    rows = {
        n: both(Tied, word_loss, words(), wrap=lambda m, p=p: sharded(m, mp_policy=p))
        for n, p in policies.items()
    }

    class Scoring(Tied):
        def scored(self, words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return self.forward(words) * weights

    def loss(m: Any, batch: torch.Tensor) -> torch.Tensor:
        scores = m.scored(batch, torch.full((1,), 1.37))
        return F.cross_entropy(scores.flatten(0, 1), batch.flatten())

    def registered(m: Any) -> Any:
        m = sharded(m, mp_policy=policies["parameters"])
        register_fsdp_forward_method(m, "scored")
        return m

    rows["method"] = both(Scoring, loss, words(), wrap=registered)
    return rows


class Around(torch.nn.Module):
    """A module that hands on what it is asked for, and what is set, as wrappers of trainers do."""

    def __init__(self, inside: torch.nn.Module) -> None:
        super().__init__()
        self.inside, self.calls = inside, 0
        self.made = True

    def forward(self, *given: Any) -> Any:
        self.calls += 1
        return self.inside(*given) * 2

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inside"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "made" in vars(self) and name not in vars(self) and hasattr(type(self), name):
            setattr(self.inside, name, value)
        else:
            super().__setattr__(name, value)


def loss_that_sends(m: Any, batch: Any) -> Any:
    """Its value is as without, but a step of it has a collective."""
    value = loss_of(m, batch)
    total = value.detach().clone()
    dist.all_reduce(total)
    return value + 0 * total


def around_ddp() -> Any:
    return both(model, loss_that_sends, batches(3), wrap=lambda m: Around(DistributedDataParallel(m)))


def around_fully_sharded() -> Any:
    return both(model, loss_of, batches(3), wrap=lambda m: Around(sharded(m)))


def not_given() -> Any:
    """Models whose DistributedDataParallel averages, and fit was given something else."""
    m, n, alone = model(), model(), model()
    ddp = DistributedDataParallel(m)

    def loss(_: Any, batch: Any) -> Any:
        return loss_that_sends(ddp, batch)

    beside = Around(DistributedDataParallel(n))
    beside.more = torch.nn.Linear(2, 2)
    two = torch.nn.ModuleList([DistributedDataParallel(model()), DistributedDataParallel(model())])
    return {
        "hand": caught(lambda: tightship.fit(m, loss, adamw(m), batches()[0])),
        "beside": caught(lambda: tightship.fit(beside, loss_of, adamw(beside), batches()[0])),
        "metric": caught(lambda: tightship.fit(alone, loss_that_sends, adamw(alone), batches()[0])),
        "two": caught(lambda: tightship.fit(two, loss_of, adamw(two), batches()[0])),
    }


def in_ddp() -> Any:
    return both(model, loss_of, batches(4), wrap=DistributedDataParallel)


def penalties() -> Any:
    """A loss that asks the model for its parameters, in shards of ``fit``'s and of ``fully_shard``."""

    def penalized(m: Any, batch: Any) -> torch.Tensor:
        total: Any = sum(p.norm() + p.abs().sum() for p in m.parameters())
        more: Any = sum(p.pow(2).sum() for n, p in m.named_parameters() if n.endswith("weight"))
        total = total + more
        return loss_of(m, batch) + 1e-3 * (total.full_tensor() if hasattr(total, "full_tensor") else total)

    rows = {"fully_shard": both(model, penalized, batches(3))}
    rows["shard"] = {"eager": both(model, penalized, batches(3), wrap=DistributedDataParallel)["eager"]}
    m = model()
    o = adamw(m)
    step = tightship.fit(m, penalized, o, batches()[0], "100%", parallel=tightship.DataParallel(shard=True))
    rows["shard"]["fit"] = row([step(b) for b in batches(3)], m, o)
    return rows


def hooked() -> Any:
    """Hooks on parameters of which ranks have parts."""
    rows = {}
    for late in (False, True):
        for how in ("shard", "fully_shard", "placed"):
            m = model()
            if how == "fully_shard":
                m = sharded(m)
            if how == "placed":
                mesh = init_device_mesh("cpu", (dist.get_world_size(),))
                m = parallelize_module(m, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            p = m[0].weight
            seen: list[Any] = []
            (p.register_post_accumulate_grad_hook if late else p.register_hook)(seen.append)
            options = {"parallel": tightship.DataParallel(shard=True)} if how == "shard" else {}
            given = batches()[0]

            def fitted(m: Any = m, given: Any = given, options: Any = options) -> Any:
                return tightship.fit(m, loss_of, adamw(m), given, "100%", **options)

            rows[f"{how} {late}"] = caught(fitted)
    return rows


def ddp_in_hand() -> Any:
    """A loss that has the DistributedDataParallel and not what it is given, and one of another model that reads it;
    evaluation between steps, which sends buffers once, however many batches a rank has."""
    rows = {}
    for planned in (False, True):
        ddp = DistributedDataParallel(model())
        other = torch.nn.Linear(WIDTH, WIDTH)
        after = DistributedDataParallel(other)
        o, second, losses = adamw(ddp), adamw(after), []
        steps: Any = None

        def loss(_: Any, batch: Any, ddp: Any = ddp) -> torch.Tensor:
            return loss_of(ddp, batch)

        def judged(m: Any, batch: Any, ddp: Any = ddp) -> torch.Tensor:
            return F.mse_loss(ddp.module(m(batch[0])), batch[1])

        for b in batches(3):
            for k, (m, fn, opt) in enumerate([(ddp, loss, o), (after, judged, second)]):
                ddp.module.requires_grad_(not k)
                if planned:
                    steps = steps or [None, None]
                    steps[k] = steps[k] or tightship.fit(m, fn, opt, b, "100%")
                    losses.append(steps[k](b))
                    continue
                value = fn(m, b)
                value.backward()
                opt.step()
                opt.zero_grad()
                losses.append(value.detach())
            ddp.module.requires_grad_(True)
            ddp.eval()
            with torch.no_grad():
                losses += [ddp(b[0]).sum() for _ in range(1 + dist.get_rank())]
            ddp.train()
        mine = row(losses, ddp.module, o) | {"after": whole(other.state_dict().values())}
        rows["fit" if planned else "eager"] = mine
    return rows


def accumulated() -> Any:
    """Two batches for each update, a GradScaler, and clipping; one batch whose gradients are infinite on rank 1."""
    rows = {}
    for planned in (False, True):
        m = sharded(model())
        o, scaler = adamw(m), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        given = batches(8)
        if dist.get_rank():
            given[3][1][0] = float("inf")
        losses, norms, scales = [], [], []
        step: Any = None
        for k, b in enumerate(given):
            if planned:
                how: dict[str, Any] = {"accumulate": 2, "scaler": scaler, "clip_norm": 0.05}
                step = step or tightship.fit(m, loss_of, o, b, "static+60%", **how)
                losses.append(step(b))
            else:
                value = loss_of(m, b)
                scaler.scale(value).backward()
                losses.append(value.detach())
            if k % 2 == 0:
                continue
            if not planned:
                scaler.unscale_(o)
                norm = torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05)
                scaler.step(o)
                scaler.update()
                o.zero_grad()
            norms.append((norm.full_tensor() if not planned else step.grad_norm).item())
            scales.append(scaler.get_scale())
        rows["fit" if planned else "eager"] = row(losses, m, o) | {"norms": repr(norms), "scales": scales}
    return rows


def checkpoints(make: Any = model, wrap: Any = sharded, given: Any = None, loss_of: Any = loss_of) -> Any:
    """What eager FSDP2 saves, ``fit`` loads, and the other way round, with torch's own functions; and goes on."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    given, rows = given or batches(4), {}
    for first, then in ((False, True), (True, False), (True, True)):
        losses: list[float] = []
        for k, planned in enumerate((first, then)):
            m = wrap(make())
            o = adamw(m)
            step = tightship.fit(m, loss_of, o, given[0], "static+60%") if planned else None
            if k:
                state = {
                    "model": dcp.get_model_state_dict(m),
                    "optimizer": dcp.get_optimizer_state_dict(m, o),
                }
                checkpoint.load(state, checkpoint_id=folder[0])
                dcp.set_model_state_dict(m, state["model"])
                dcp.set_optimizer_state_dict(m, o, state["optimizer"])
            for b in given[2 * k : 2 * k + 2]:
                if step is not None:
                    losses.append(step(b).item())
                    continue
                o.zero_grad()
                value = loss_of(m, b)
                value.backward()
                o.step()
                losses.append(value.item())
            if not k:
                state = {
                    "model": dcp.get_model_state_dict(m),
                    "optimizer": dcp.get_optimizer_state_dict(m, o),
                }
                checkpoint.save(state, checkpoint_id=folder[0])
        rows[f"{first} {then}"] = [losses, row([], m, o)]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return rows


def at_this_size(how: str) -> tuple[Any, Any, Any]:
    m = sharded(model()) if how == "fully_shard" else model()
    o = adamw(m)
    parallel = None if how == "fully_shard" else tightship.DataParallel(shard=True)
    return m, o, tightship.fit(m, loss_of, o, batches()[0], "static+60%", parallel=parallel)


def kept(m: Any, o: Any) -> str:
    """Of parameters and what the optimizer holds for them, whole."""
    whole = dcp.StateDictOptions(full_state_dict=True)
    state = dcp.get_optimizer_state_dict(m, o, options=whole)["state"]
    own = dcp.get_model_state_dict(m, options=whole)
    names = [n for n, _ in model().named_parameters()]
    rows = [own.get(n) for n in names], [x for n in names for x in state.get(n, {}).values()]
    return digest([t for row in rows for t in row]) if dist.get_rank() == 0 else ""


def saved_for_others() -> Any:
    rows = {}
    for how in ("shard", "fully_shard"):
        m, o, step = at_this_size(how)
        for b in batches():
            step(b)
        checkpoint.save(step.state_dict(), checkpoint_id=f"{os.environ['CHECKPOINTS']}/{how}")
        rows[how] = kept(m, o)
    return rows


def loaded_by_others() -> Any:
    """On another number of ranks, by a step and by torch's own functions."""
    rows = {}
    for how in ("shard", "fully_shard"):
        m, o, step = at_this_size(how)
        state = step.state_dict()
        checkpoint.load(state, checkpoint_id=f"{os.environ['CHECKPOINTS']}/{how}")
        step.load_state_dict(state)
        rows[how] = [kept(m, o), step(batches()[0]).item()]
    return rows


def of_one_rank() -> Any:
    """Models that torch has divided among one rank, the second time with state from the first; and an error of the
    caller's own in a step."""
    rows: dict[str, Any] = {}
    for wrap in (sharded, columns_of_one):
        for planned in (False, True):
            m = wrap(model())
            o = adamw(m)
            step: Any = tightship.fit(m, loss_of, o, batches()[0], "100%") if planned else None
            losses = []
            for b in batches(4):
                if planned:
                    losses.append(step(b))
                else:
                    losses.append(loss_of(m, b))
                    losses[-1].backward()
                    o.step()
                    o.zero_grad()
            found = row(losses, m, o) | ({"measure": step.measure()} if planned else {})
            rows.setdefault(wrap.__name__, {})["fit" if planned else "eager"] = found
        again = tightship.fit(m, loss_of, o, batches()[0], "100%")
        rows[wrap.__name__]["again"] = again(batches()[0]).item(), step(batches()[0]).item()
        rows[wrap.__name__]["error"] = caught(lambda again=again: again(None))  # type: ignore[misc]
    return rows


def columns_of_one(m: Any) -> Any:
    return parallelize_module(
        m, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )


def in_hand() -> Any:
    """Backward passes whose gradients the program clips itself, and steps an optimizer of its own with them."""
    rows = {}
    for planned in (False, True):
        ddp = DistributedDataParallel(model())
        o, given, losses, norms = adamw(ddp), batches(4), [], []
        step = tightship.fit(ddp, loss_of, None, given[0], "150%") if planned else None
        for k, b in enumerate(given):
            loss = step.backward(b) if step is not None else loss_of(ddp, b)
            if step is None:
                loss.backward()
            losses.append(loss)
            if k % 2:
                norms.append(torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.05).item())
                o.step()
                o.zero_grad()
        rows["fit" if planned else "eager"] = row(losses, ddp.module, o) | {"norms": norms}
    m = sharded(model())
    o = adamw(m)
    step = tightship.fit(m, loss_of, o, batches()[0], "150%", split=True)
    step.backward(batches()[0])
    norm = torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05).full_tensor().item()
    torch.nn.utils.clip_grad_value_(m.parameters(), 1e9)
    step.update()
    kinds = sorted({type(t).__name__ for state in o.state.values() for t in state.values()})
    return rows | {"norm": norm, "kinds": kinds}


def resumed() -> Any:
    """What `state_dict` of a step that has not run yet has a place for, with torch's checkpoint."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    rows: dict[str, Any] = {}
    for shard in (True, False):
        for k in range(2):
            m, given = model(), batches(4)
            o = adamw(m)
            step = tightship.fit(m, loss_of, o, given[0], parallel=tightship.DataParallel(shard=shard))
            state = step.state_dict()
            if k:
                checkpoint.load(state, checkpoint_id=folder[0])
            step.load_state_dict(state)
            rows[f"fresh {shard} {k}"] = len(o.state)
            losses = [step(b).item() for b in given[2 * k :]]
            if not k:
                ahead = losses[2:]
                again = model()
                step = tightship.fit(
                    again, loss_of, adamw(again), given[0], parallel=tightship.DataParallel()
                )
                for b in given[:2]:
                    step(b)
                checkpoint.save(step.state_dict(), checkpoint_id=folder[0])
        rows[str(shard)] = [ahead, losses]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return rows


def after_infeasible() -> Any:
    """A budget that nothing meets leaves a model that ``fit`` takes again; evaluation gathers."""
    m = sharded(model())
    o = adamw(m)
    no = caught(lambda: tightship.fit(m, loss_of, o, batches()[0], "static+1%", seconds=1.0))
    step = tightship.fit(m, loss_of, o, batches()[0], "static+60%")
    losses = [step(b).item() for b in batches()]
    m.eval()
    with torch.no_grad():
        other = sharded(model())
        dcp.set_model_state_dict(other, dcp.get_model_state_dict(m))
        other.eval()
        same = torch.equal(m(batches()[0][0]), other(batches()[0][0]))
    m.train()
    again = tightship.fit(m, loss_of, o, batches()[0], "100%")
    return {"no": no, "losses": losses, "evaluates": same, "again": again(batches()[0]).item()}


def compiled() -> Any:
    """The backend in and around what torch sends with: what is said, and what a whole step takes."""
    torch._dynamo.config.optimize_ddp = False
    rows: dict[str, Any] = {}
    for how in ("alone", "inside", "around", "layers", "eager"):
        m, given = Tied(), words()
        o = adamw(m)
        run: Any = m
        if how == "layers":
            m.layers[1] = Own(WIDTH, WIDTH)
            run, o = sharded(m), adamw(m)
        buckets = [DistributedDataParallel(m) for _ in range(how in ("around", "eager"))]
        run = buckets[0] if buckets else run
        options = {"budget": "100%", "optimizer": o}
        run = made = torch.compile(run, backend="tightship", options=options) if how != "eager" else run
        buckets += [DistributedDataParallel(made) for _ in range(how == "inside")]
        run = buckets[0] if how == "inside" else run
        steps: list[Any] = []

        def trained(
            run: Any = run,
            o: Any = o,
            made: Any = made,
            how: str = how,
            given: Any = given,
            steps: Any = steps,
        ) -> None:
            for b in given:
                known = run if how == "inside" else made
                with nullcontext() if how == "eager" else measured_step(known) as bytes_:
                    word_loss(run, b).backward()
                    o.step()
                    o.zero_grad()
                steps.append(bytes_)

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            rows[how] = {
                "error": caught(trained),
                "said": [str(w.message) for w in said if w.category is Fallback],
            }
        rows[how]["digest"] = whole(m.state_dict().values())
        if how not in ("eager", "layers"):
            rows[how] |= {"planned": steps[-1].planned, "measured": steps[-1].measured}
        if how == "inside":
            sizes = buckets[0]._get_ddp_logging_data()["bucket_sizes"]
            rows[how]["buckets"] = [int(x) for x in str(sizes).split(",")]
    return rows


def refused() -> Any:
    """What ``fit`` does not take of torch's own ways."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("a", "b"))["b"]
    partly = model()
    fully_shard(partly[0], mesh=mesh)
    recurrent = torch.nn.Sequential(torch.nn.LSTM(WIDTH, WIDTH))
    hooked = DistributedDataParallel(torch.nn.Sequential(torch.nn.Embedding(9, WIDTH, sparse=True), *model()))
    static, custom, unused = (
        DistributedDataParallel(model(), static_graph=True),
        sharded(model()),
        sharded(model()),
    )
    for one in (hooked, static):
        one.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    loss_of(static, batches()[0]).backward()
    custom[0].set_custom_reduce_scatter(type("Own", (DefaultReduceScatter,), {"__module__": __name__})())
    unused.set_reduce_scatter_unused_params(True)
    models = {
        "columns": fully_shard(
            torch.nn.Linear(WIDTH, 8, bias=False), mesh=mesh, shard_placement_fn=lambda p: Shard(1)
        ),
        "alone": fully_shard(model(), mesh=alone),
        "partly": partly,
        "recurrent": fully_shard(recurrent, mesh=mesh),
        "comm_hook": hooked,
        "static": static,
        "custom": custom,
        "unused": unused,
        "replicate": replicate(model()),
    }
    rows = {
        n: caught(lambda m=m: tightship.fit(m, loss_of, adamw(m), batches()[0])) for n, m in models.items()
    }
    whole, m = tightship.DataParallel(), sharded(model())
    rows["parallel"] = caught(lambda: tightship.fit(m, loss_of, adamw(m), batches()[0], parallel=whole))
    scripted, shards = torch.nn.Sequential(torch.jit.script(model()[0])), tightship.DataParallel(shard=True)
    rows["scripted"] = caught(
        lambda: tightship.fit(scripted, loss_of, adamw(scripted), batches()[0], parallel=shards)
    )
    sparse, words = torch.nn.Embedding(9, 9, sparse=True), torch.arange(9)
    for n, m, how in (("sparse", DistributedDataParallel(sparse), None), ("sparse, plain", sparse, whole)):
        o = torch.optim.SGD(m.parameters())
        rows[n] = caught(lambda m=m, o=o, how=how: tightship.fit(m, word_loss, o, words[None], parallel=how))
    taken = DistributedDataParallel(model())
    tightship.fit(taken, loss_of, adamw(taken), batches()[0])
    rows["taken"] = caught(lambda: taken(batches()[0][0]).sum().backward())
    with torch.no_grad():
        taken(batches()[0][0])
    return rows


if __name__ == "__main__":
    main(globals())
