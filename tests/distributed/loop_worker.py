"""One rank: training loops as people write them, in eager and with ``fit``."""

from __future__ import annotations

import itertools
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import worker
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn import functional as differentiable
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_worker import Own, Tied, both, row, sharded, whole, word_loss, words
from worker import WIDTH, adamw, batches, caught, digest, loss_of, main, model, replicated

import tightship
from tightship.execute.interpreter import Fallback
from tightship.integrations.callback import CompileCallback

# --- losses that send ---


class Gathered(torch.autograd.Function):
    """As many repositories have it: what all ranks have, whose gradient adds up over them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, x.contiguous())
        return torch.cat(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def contrastive(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    rows, others = F.normalize(rows, dim=-1), F.normalize(others, dim=-1)
    return F.cross_entropy(rows @ others.T / 0.1, torch.arange(len(rows)))


def differentiably(m: Any, batch: Any) -> torch.Tensor:
    x, y = (torch.cat(differentiable.all_gather(t)) for t in (m(batch[0]), batch[1]))
    return contrastive(x, y)


def by_a_function(m: Any, batch: Any) -> torch.Tensor:
    return contrastive(Gathered.apply(m(batch[0])), Gathered.apply(batch[1]))  # type: ignore[no-untyped-call]


def in_place(m: Any, batch: Any) -> torch.Tensor:
    """Barlow's cross-correlation, whose sum over ranks autograd does not see; numbers of rows; others' tensors."""
    x, size = m(batch[0]), dist.get_world_size()
    correlation = (x.T @ batch[1]).div(len(x) * size)
    dist.all_reduce(correlation)
    count = torch.tensor([float(len(x))])
    dist.all_reduce(count, op=dist.ReduceOp.MAX, async_op=True).wait()
    first, largest = batch[1][:2].clone(), batch[1].new_empty(size * len(x), x.shape[1])
    dist.broadcast(first, src=1)
    dist.all_gather_into_tensor(largest, batch[1])
    other = torch.empty_like(batch[1])
    dist.all_to_all_single(other, batch[1])
    part = torch.empty_like(other)
    dist.reduce_scatter_tensor(part, largest)
    rest = (x[:2] - first).pow(2).mean() + (x - other).pow(2).sum() / count + (x - part).pow(2).mean()
    return correlation.diagonal().sub(1).pow(2).sum() + rest.sum()


def reduced(m: Any, batch: Any) -> torch.Tensor:
    """A mean over the rows of all ranks, with its gradient."""
    count = differentiable.all_reduce(torch.tensor(float(len(batch[0]))) * 1.0)
    x = m(batch[0])
    mean = differentiable.all_reduce(x.mean(0)) / dist.get_world_size()
    return F.mse_loss(x, batch[1]) * len(x) / count + mean.pow(2).sum()


def to_and_from_one(m: Any, batch: Any) -> torch.Tensor:
    """What only one rank is to have: a sum, and what all have; and what it has for all."""
    x, size, first = m(batch[0]), dist.get_world_size(), dist.get_rank() == 0
    total, parts = x.detach().mean(0), x.new_empty(size, 7)
    dist.reduce(total, 0)
    rows = [torch.empty_like(batch[1][0]) for _ in range(size)]
    dist.gather(batch[1][0], rows if first else None, 0)
    given = [total / size, *rows[1:]] if first else None
    dist.scatter(parts[0], given, 0)
    sent = differentiable.reduce(x.mean(0), 1)
    return F.mse_loss(x, batch[1]) + (x - parts[0]).pow(2).mean() + sent.pow(2).sum() * dist.get_rank()


def logged_by_one(m: Any, batch: Any) -> torch.Tensor:
    """What only the first rank reads of what all send."""
    loss = loss_of(m, batch)
    rows = [loss.new_empty(1) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, loss.detach()[None])
    total = loss.detach().clone()
    dist.reduce(total, 0)
    if dist.get_rank() == 0:
        _LOG.append((torch.cat(rows), total / len(rows)))
    return loss


_LOG: list[Any] = []


def losses_that_send() -> Any:
    rows = {}
    for loss in (differentiably, by_a_function, in_place, reduced, to_and_from_one, logged_by_one):
        for wrap in (DistributedDataParallel, sharded)[
            : 1 + (loss in (differentiably, in_place, logged_by_one))
        ]:
            rows[f"{loss.__name__} {wrap.__name__}"] = both(
                model, loss, batches(3), wrap=wrap, budget="static+70%"
            )

    rows["log"] = [[t.tolist() for t in row] for row in _LOG]  # type: ignore[assignment]

    def to_one(m: Any, batch: Any) -> torch.Tensor:
        loss = loss_of(m, batch)
        dist.send(loss.detach(), 1 - dist.get_rank())
        return loss

    m = DistributedDataParallel(model())
    given = batches()[0]
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    rows["send"] = caught(lambda: tightship.fit(m, to_one, optimizer, given, "100%"))
    return rows


def by_nobody() -> Any:
    """A contrastive loss over all ranks of a plain model, whose gradients nobody averages; one that each rank has its
    own part of from the start; and one that is averaged by hand."""
    rows = {}
    for how in ("alike", "parts", "by hand", "independent", "averaged"):
        m = model()
        if how == "parts":
            with torch.no_grad():
                m[0].weight.add_(dist.get_rank())
        o, given = torch.optim.SGD(m.parameters(), 0.1), batches(4)
        by_hand = how == "by hand"
        options = {
            "independent": {"independent": True},
            "averaged": {"parallel": tightship.DataParallel()},
        }.get(how, {})

        def fitted(
            m: Any = m, o: Any = o, given: Any = given, hand: bool = by_hand, more: Any = options
        ) -> Any:
            step = tightship.fit(m, reduced, None if hand else o, given[0], "200%", seconds=1.0, **more)
            for b in given:
                if not hand:
                    step(b)
                    continue
                step.backward(b)
                for p in m.parameters():
                    dist.all_reduce(p.grad)
                o.step()
                o.zero_grad()

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            error = caught(fitted)
        texts = [f"{Path(w.filename).name} {w.message}" for w in said if "same parameters" in str(w.message)]
        rows[how] = {"error": error["text"], "said": texts}
    return rows


# --- gradients that are sent in another type ---


def compressed() -> Any:
    """By torch's hooks, as they are taken over, and by plain models."""

    def hooked(m: Any, hook: Any) -> Any:
        m = DistributedDataParallel(m)
        if callable(hook):
            m.register_comm_hook(None, hook)
        else:
            m._register_builtin_comm_hook(hook)
        return m

    hooks = {
        "plain": default_hooks.allreduce_hook,
        "half": default_hooks.fp16_compress_hook,
        "built in": dist.BuiltinCommHookType.FP16_COMPRESS,
    }
    rows: dict[str, Any] = {
        n: both(model, loss_of, batches(3), wrap=lambda m, hook=hook: hooked(m, hook))
        for n, hook in hooks.items()
    }
    for shard in (False, True):
        m = model()
        how = tightship.DataParallel(shard=shard, reduce_dtype=torch.float16)
        step = tightship.fit(m, loss_of, adamw(m), batches()[0], "static+60%", parallel=how)
        losses = [step(b).item() for b in batches()]
        whole = step.state_dict(full=True)["model"]
        parameters = digest(whole[n] for n, _ in model().named_parameters())
        rows[f"shard={shard}"] = {"losses": losses, "parameters": parameters, "measure": step.measure()}
    m = hooked(model(), hooks["half"])
    o = adamw(m)
    losses = []
    for b in batches():
        o.zero_grad()
        loss = loss_of(m, b)
        loss.backward()
        o.step()
        losses.append(loss.item())
    rows["eager"] = {"losses": losses, "parameters": digest(m.parameters())}
    m = model()
    step = tightship.fit(m, loss_of, adamw(m), batches()[0], "100%", parallel=tightship.DataParallel())
    rows["whole"] = [step(b).item() for b in batches()]
    return rows


# --- gradients that each rank adds up by itself ---


def added_up_apart() -> Any:
    """Two batches in ``no_sync`` and one outside of it for each update, with a look at gradients and buffers."""
    rows = {}
    for planned in (False, True):
        m = DistributedDataParallel(model())
        o, given, seen = adamw(m), batches(6), []
        step = tightship.fit(m, loss_of, o, given[0], "100%", split=True) if planned else None
        for k, b in enumerate(given):
            last = k % 3 == 2
            with nullcontext() if last else m.no_sync():
                loss = loss_of(m, b) if step is None else step.backward(b)
                if step is None:
                    loss.backward()
            seen += [loss.item(), digest(p.grad for p in m.parameters()), digest(m.buffers())]
            if last:
                (o.step if step is None else step.update)()
                o.zero_grad()
        rows["fit" if planned else "eager"] = [*seen, digest(m.parameters())]
    return rows


# --- parameters that code has from elsewhere ---


class Held(torch.nn.Module):
    """A scale that a list holds, too; the part of one rank has a shape that broadcasts."""

    def __init__(self, listed: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = torch.nn.Parameter(torch.randn(2, 1))
        self.layer = torch.nn.Linear(WIDTH, 7)
        self.scales = [self.scale] if listed else []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scales[0] if self.scales else self.scale
        assert scale.requires_grad
        return (self.layer(x)[:, None] * scale).mean(1)


def held_elsewhere() -> Any:
    given = batches()[0]

    def fitted(m: torch.nn.Module) -> Any:
        return tightship.fit(m, loss_of, adamw(m), given, "100%", parallel=tightship.DataParallel(shard=True))

    return {"list": caught(lambda: fitted(Held())), "attribute": caught(lambda: fitted(Held(listed=False)))}


def written_between_steps() -> Any:
    """Parameters that code changes where modules have them: by methods in place, views, and functions of torch."""
    rows: dict[str, Any] = {}
    wraps = {
        "eager": DistributedDataParallel,
        "shard": lambda m: m,
        "fully_shard": sharded,
        "eager of it": sharded,
    }
    for how, wrap in wraps.items():
        m = wrap(model())
        o, given, losses = torch.optim.SGD(m.parameters(), 0.1), batches(3), []
        options = {"parallel": tightship.DataParallel(shard=True)} if how == "shard" else {}
        step: Any = None
        for b in given:
            if how.startswith("eager"):
                o.zero_grad()
                loss = loss_of(m, b)
                loss.backward()
                o.step()
            else:
                step = step or tightship.fit(m, loss_of, o, b, "100%", **options)
                loss = step(b)
            losses.append(loss.item())
            inner = m.module if how == "eager" else m
            layers = [n for n in inner if isinstance(n, torch.nn.Linear)]
            with torch.no_grad():
                layers[0].bias.zero_()
                layers[0].weight.mul_(0.5)
                torch.nn.init.constant_(layers[1].bias, 0.25)
                if how in ("eager", "shard"):
                    layers[1].weight[1:3].fill_(0.5)
                    layers[1].weight.data[0, :2] = 1.0
                    layers[0].weight.add_(layers[0].weight.abs().mean())
                losses += [float(loss_of(m, b)), float(whole_sum(layers[1].weight))]
        rows[how] = losses
    return rows


class Writes(torch.nn.Module):
    """Code that writes to parameters in its forward pass: in place, by a view, by other data, in an op."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.layer = how, torch.nn.Linear(WIDTH, 7)
        self.words = torch.nn.Embedding(8, 7, max_norm=1.0 if how == "op" else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight
        if self.how == "in place":
            with torch.no_grad():
                self.layer.weight.clamp_(-0.1, 0.1)
        elif self.how == "view":
            weight.data[0].clamp_(-0.1, 0.1)
        elif self.how == "data":
            weight.data = weight.data.clamp(-0.1, 0.1)
        elif self.how == "listed":
            for p in self.layer.parameters():
                p.data = p.data.clamp(-0.1, 0.1)
        return self.layer(x) + self.words(torch.arange(len(x)) % 8)


class Moves(torch.nn.Module):
    """Moves an average of weights in its forward pass, which ``fully_shard`` forgets with what it has gathered."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.average = torch.nn.Linear(WIDTH, 7), torch.nn.Linear(WIDTH, 7).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            for p, q in zip(self.layer.parameters(), self.average.parameters(), strict=True):
                q.mul_(0.9).add_(p, alpha=0.1)
            goal = self.average(x)
        return self.layer(x) + goal


def written_in_steps() -> Any:
    rows: dict[str, Any] = {}
    for wrap in (DistributedDataParallel, fully_shard):
        rows[f"moves, {wrap.__name__}"] = both(Moves, loss_of, batches(3), wrap=wrap, budget="100%")
    for how in ("in place", "view", "data", "listed", "op"):

        def fitted(m: Any, **options: Any) -> None:
            tightship.fit(m, loss_of, adamw(m), batches(1)[0], "100%", **options)

        shard = {"parallel": tightship.DataParallel(shard=True)}
        rows[how] = [
            caught(lambda fitted=fitted, how=how, shard=shard: fitted(Writes(how), **shard)),
            caught(lambda fitted=fitted, how=how: fitted(fully_shard(Writes(how)))),
        ]
    for how in ("in place", "op"):
        rows[f"{how}, whole"] = both(
            lambda how=how: Writes(how), loss_of, batches(3), wrap=DistributedDataParallel, budget="100%"
        )
    return rows


def whole_sum(t: torch.Tensor) -> torch.Tensor:
    total: Any = t.sum()
    made: torch.Tensor = total.full_tensor() if hasattr(total, "full_tensor") else total
    return made


# --- code that does something else in later steps ---


class Branches(torch.nn.Module):
    """Which ops follow a parameter that has been read depends on the step, alike on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps = 0
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, 7)
        )
        self.scale = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> Any:
        self.steps += 1
        x = self.layers[:2](x)
        if self.steps % 3 == 2:
            x = x * self.scale.mean()
        if self.steps > 3:
            with torch.no_grad():
                shift = self.scale.sum()
            x = x - shift
        return self.layers[2](x) + self.scale[:7]


def other_branches() -> Any:
    """``Branches`` counts calls, those in which ``fit`` looks at the code among them, which it puts back."""
    given = batches(6)
    alike = [tuple(t.clone() for t in b) for b in given]
    for t in (t for b in alike for t in b):
        dist.broadcast(t, 0)

    def columns(m: Any) -> Any:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return parallelize_module(m, mesh, {"layers.0": ColwiseParallel(), "layers.2": RowwiseParallel()})

    rows: dict[str, Any] = {
        "DDP": both(Branches, loss_of, given, wrap=DistributedDataParallel, budget="100%"),
        "fully_shard": both(Branches, loss_of, given, wrap=fully_shard, budget="100%"),
        "columns": both(Branches, loss_of, alike, wrap=columns, budget="100%"),
    }
    m = Branches()
    how = tightship.DataParallel(shard=True)
    step = tightship.fit(m, loss_of, adamw(m), given[0], "100%", parallel=how)
    rows["shard"] = [step(b).item() for b in given]
    return rows


# --- parameters that code puts into a model, and those that it finds behind a forward pass ---


def adapted(m: Any, batch: Any) -> torch.Tensor:
    """One step of gradient descent inside of the loss, as meta-learning has it."""
    parameters, (x, y) = dict(m.named_parameters()), batch
    inner = F.mse_loss(functional_call(m, parameters, (x[:9],)), y[:9])
    gradients = torch.autograd.grad(inner, [*parameters.values()], create_graph=True)
    rows = zip(parameters.items(), gradients, strict=True)
    return F.mse_loss(functional_call(m, {n: p - 0.1 * g for (n, p), g in rows}, (x[9:],)), y[9:])


def penalized_behind(m: Any, batch: Any) -> torch.Tensor:
    loss = loss_of(m, batch)
    return loss + 1e-3 * sum(p.abs().sum() for p in m.parameters())  # type: ignore[no-any-return]


def put_and_found() -> Any:
    rows: dict[str, Any] = {}
    for shard in (False, True):
        m = Branches().layers
        o = torch.optim.SGD(m.parameters(), 0.3)
        how = tightship.DataParallel(shard=shard)
        step = tightship.fit(m, adapted, o, batches()[0], "100%", parallel=how)
        losses = [step(b).item() for b in batches()]
        rows[f"shard={shard}"] = [losses, digest(step.state_dict(full=True)["model"].values())]
    m = fully_shard(Branches().layers)
    rows["fully_shard"] = caught(lambda: tightship.fit(m, adapted, adamw(m), batches()[0], "100%"))
    rows["behind"] = both(
        lambda: Branches().layers, penalized_behind, batches(3), wrap=fully_shard, budget="100%"
    )
    return rows


# --- two models ---


def adversaries() -> Any:
    """Each in a DistributedDataParallel, which the other's step calls; and the loop between steps, with gradients."""
    rows = {}
    for planned in (False, True):
        torch.manual_seed(0)
        maker = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()))
        judge = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()))
        o, second, losses = adamw(maker), adamw(judge), []

        def judged(m: Any, batch: Any) -> torch.Tensor:
            return F.softplus(m(batch[0])).mean() + F.softplus(-m(batch[1])).mean()

        def made(m: Any, x: Any, judge: Any = judge) -> torch.Tensor:
            return F.softplus(-judge(m(x))).mean()

        steps: Any = None
        for x, _ in batches(3):
            both_ = maker(x).detach(), x
            if planned:
                steps = steps or (
                    tightship.fit(maker, made, o, x, "100%"),
                    tightship.fit(judge, judged, second, both_, "100%"),
                )
                losses += [steps[1](both_), steps[0](x)]
                continue
            for m, fn, optimizer, given in ((judge, judged, second, both_), (maker, made, o, x)):
                optimizer.zero_grad()
                loss = fn(m, given)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        rows["fit" if planned else "eager"] = [
            row(losses, m.module, n) for m, n in ((maker, o), (judge, second))
        ]
    return rows


# --- ranks that do not do the same ---


def fewer_batches() -> Any:
    """A rank that goes to a barrier when its batches are over, and one that has another; then both train on."""
    m = DistributedDataParallel(model())
    o, given = adamw(m), batches(3)
    step = tightship.fit(m, loss_of, o, given[0], "100%")
    rows: dict[str, Any] = {"taken": [step(b).item() for b in given[:2]]}
    before = digest(m.parameters())
    rows["joined"] = caught(lambda: Join([m]))
    with Join([other := DistributedDataParallel(model())]):
        rows["in join"] = caught(lambda: tightship.fit(other, loss_of, adamw(other), given[0], "100%"))
    rows["error"] = caught(lambda: step(given[2]) if dist.get_rank() == 0 else dist.barrier())
    rows["again"] = caught(lambda: step(given[2]))["text"]
    if dist.get_rank() == 0:
        dist.barrier()
    rows["unchanged"] = before == digest(m.parameters())
    step = tightship.fit(m.module, loss_of, o, given[0], "100%", parallel=tightship.DataParallel())
    step(given[2])
    rows["digest"] = digest(m.module.parameters())
    return rows


def evaluated_by_one() -> Any:
    """Parameters in parts are gathered by all ranks, or by none."""
    m = model()
    x, _ = given = batches()[0]
    step = tightship.fit(m, loss_of, adamw(m), given, "100%", parallel=tightship.DataParallel(shard=True))
    step(given)

    def evaluated() -> None:
        with torch.no_grad():
            m(x)

    error = caught(evaluated if dist.get_rank() == 0 else lambda: step(given))
    return {
        "error": error,
        "again": caught(lambda: step(given)),
        "fit": caught(lambda: worker.planned("100%", True)),
    }


def grouped_by_one() -> Any:
    """One rank makes a group of all while the other is in a step."""
    m = model()
    given = batches()[0]
    step = tightship.fit(m, loss_of, adamw(m), given, "100%", parallel=tightship.DataParallel())
    step(given)
    first = dist.get_rank() == 0
    error = caught(dist.new_group if first else lambda: step(given))
    if not first:
        dist.new_group()
    return error


def fitted_by_one() -> Any:
    """A second model that one rank alone fits, while the other is in a step, or in a barrier; then both go on."""
    m, given = DistributedDataParallel(model()), batches(3)
    o = adamw(m)
    step = tightship.fit(m, loss_of, o, given[0], "100%")
    step(given[0])

    def fitted() -> Any:
        second = model()
        how = tightship.DataParallel()
        return tightship.fit(second, loss_of, adamw(second), given[0], "100%", parallel=how)

    first = dist.get_rank() == 0
    rows = {"step": caught(fitted if first else lambda: step(given[1]))}
    rows["both"] = caught(lambda: fitted()(given[1]))
    rows["barrier"] = caught(fitted if first else dist.barrier)
    if first:
        dist.barrier()
    rows["again"] = caught(lambda: fitted()(given[2]))
    return rows


def raised_by(rank: int) -> Any:
    """A rank's own code raises between steps, in the second of two loops, which nobody catches."""
    steps = [replicated(budget="100%")[1] for _ in range(2)]
    given = batches(1)[0]
    for step in steps:
        step(given)
    if dist.get_rank() == rank:
        raise ValueError("the loader has no more")
    return caught(lambda: steps[1](given))


def raised_by_the_first() -> Any:
    return raised_by(0)


def raised_by_the_second() -> Any:
    return raised_by(1)


def left_alone() -> Any:
    """A rank whose step fails ends by itself, while the other waits for it to put parameters together."""
    m, given = model(), batches(1)[0]
    step = tightship.fit(m, loss_of, adamw(m), given, "100%", parallel=tightship.DataParallel(shard=True))
    step(given)
    if dist.get_rank() == 0:
        return caught(lambda: [t.full_tensor() for t in m.state_dict().values() if hasattr(t, "full_tensor")])
    caught(lambda: step(given))
    sys.exit(0)


# --- what is trained on one rank alone ---


def trained_apart() -> Any:
    """A parameter that one rank freezes before the other does, and thaws before it."""
    wraps = {
        "plain": model, "divided": model, "sharded": lambda: sharded(model()), "placed": lambda: placed(model()),
    }  # fmt: skip
    divided = {"plain": tightship.DataParallel(), "divided": tightship.DataParallel(shard=True)}
    return {
        f"{name}, split={split}": frozen_by_one(wrap(), divided.get(name), split)
        for (name, wrap), split in itertools.product(wraps.items(), (False, True))
    }


def frozen_by_one(m: Any, parallel: Any, split: bool) -> list[Any]:
    o, given = adamw(m), batches(1)[0]
    for t in given:
        dist.broadcast(t, 0)  # ranks that compute together have the same
    step = tightship.fit(m, loss_of, o, given, "100%", parallel=parallel, split=split)

    def train() -> None:
        o.zero_grad()
        if split:
            step.backward(given)
            step.update()
        else:
            step(given)

    def state() -> str:
        found = m.state_dict()
        return whole(found[n] for n, _ in model().named_parameters())

    train()
    rows: list[Any] = []
    for on in (False, True):
        before = state()
        if dist.get_rank() == 1:
            m[2]._parameters["weight"].requires_grad_(on)
        rows.append(caught(train) | {"unchanged": state() == before})
        if dist.get_rank() == 0:
            m[2]._parameters["weight"].requires_grad_(on)
        train()
        rows[-1]["then"] = state()
    return rows


# --- norms for a log ---


def placed(m: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(m, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def logged() -> Any:
    """Norms of parameters and gradients in a loop that clips by torch's own function, and who is told of parts."""

    def number(t: Any) -> float:
        return float((t.full_tensor() if hasattr(t, "full_tensor") else t).item())

    rows: dict[str, Any] = {}
    for wrap in (sharded, placed):
        rows[wrap.__name__] = mine = {}
        for planned in (False, True):
            m = wrap(model())
            o, norms, losses = adamw(m), [], []
            given = batches(2) if wrap is sharded else [batches()[0]] * 2
            if wrap is placed:
                for t in given[0]:
                    dist.broadcast(t, 0)
            step: Any = None
            for b in given:
                if planned:
                    step = step or tightship.fit(m, loss_of, o, b, "100%", split=True)
                    losses.append(step.backward(b))
                    own = [p for _, p in step.named_parameters()]
                else:
                    loss = loss_of(m, b)
                    loss.backward()
                    losses.append(loss.detach())
                    own = list(m.parameters())
                norms += [number(p.detach().norm()) for p in own] + [number(p.grad.norm()) for p in own]
                if wrap is sharded:
                    norms.append(number(torch.nn.utils.clip_grad_norm_(own, 0.05)))
                (step.update if planned else o.step)()
                o.zero_grad()
            mine["fit" if planned else "eager"] = {"norms": norms, **row(losses, m, o)}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            m.state_dict()
            step.state_dict(full=True)
            quiet = len(said)
            total = [sum(p.norm() for p in m.parameters()) for _ in range(2)]
        mine["said"] = [quiet, len(total), *(f"{Path(w.filename).name} {w.message}" for w in said)]
    return rows


# --- trainers ---


def of_own_layers() -> Any:
    """Of which Dynamo compiles one, as it is none of torch's."""
    m = Tied()
    m.layers[1] = Own(WIDTH, WIDTH)
    return m


def trained_by_a_callback() -> Any:
    """A model of ``fully_shard`` in the hands of what trainers' callbacks share."""
    rows: dict[str, Any] = {}
    for planned in (False, True):
        m = sharded(of_own_layers())
        o = adamw(m)
        callback = CompileCallback("100%", say=None)
        if planned:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                callback.attach(m, [o], accumulate=False)
            rows["warned"] = [str(w.message) for w in found if w.category is Fallback]
        losses = []
        for b in words():
            o.zero_grad()
            loss = word_loss(m, b)
            loss.backward()
            o.step()
            losses.append(loss.detach())
        callback.look()
        rows["fit" if planned else "eager"] = row(losses, m, o)
        rows["notes"], rows["graphs"] = list(callback.notes), len(callback.plans)
        callback.detach()
    m = sharded(of_own_layers())
    strict = CompileCallback("90%", say=None, strict=True)
    strict.attach(m, [adamw(m)], accumulate=False)
    rows["strict"] = caught(lambda: word_loss(m, words()[0]))
    strict.detach()
    return rows


class Stateful(torch.nn.Module):
    """Replaces its states in each step; what DistributedDataParallel sends of them are those of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = torch.nn.LSTMCell(4, 8), torch.nn.Linear(8, 3)
        self.register_buffer("h", torch.zeros(6, 8))
        self.register_buffer("c", torch.zeros(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, c = self.cell(x, (self.h, self.c))
        self.h, self.c = h.detach(), c.detach()
        out: torch.Tensor = self.head(h)
        return out


def kept_states() -> Any:
    """Each rank keeps results and state dicts, and one of them what its code has of states."""
    rows: dict[str, Any] = {}
    for planned in (False, True):
        m = Stateful()
        wrapped, o, log = DistributedDataParallel(m), adamw(m), []

        def loss(net: Any, batch: Any, m: Any = m, log: list[Any] = log) -> Any:
            if dist.get_rank() == 0:
                log.append(m.h)
            return F.cross_entropy(net(batch), torch.arange(6) % 3), m.c

        step: Any = None
        for k in range(5):
            batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(2 * k + dist.get_rank()))
            if planned:
                step = step or tightship.fit(wrapped, loss, o, batch, cache=None)
                out = step(batch)
            else:
                out = loss(wrapped, batch)
                out[0].backward()
                o.step()
                o.zero_grad()
            log += [m.state_dict()["h"], out[0].detach(), out[1]]
        rows["fit" if planned else "eager"] = [digest([t]) for t in (*log, *m.state_dict().values())]
    return rows


if __name__ == "__main__":
    main(globals())
