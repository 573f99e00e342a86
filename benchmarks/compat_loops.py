"""Patterns of training loops: what people do between batches, between backward pass and update, and around them.

Each pattern is one generator, written twice where the loops differ: first it yields its models, optimizers and fitted
steps, then what each step logs. Both run in turns.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from compat import BUDGET, Outcome, Row, Side, fitted, lockstep
from torch import nn
from torch.nn import functional as F

from tightship.errors import BadInput, Unsupported

TITLE = "Loops"
STEPS = 8

Loop = Callable[[bool], Iterator[Any]]
"""Whether it is ours -> (models, optimizers, fitted steps, what else must be equal), then a step's results."""


def rows() -> Iterator[Row]:
    for name, loop in LOOPS.items():
        yield Row(name, (), partial(run, loop))


def run(loop: Loop) -> Outcome:
    sides = []
    for ours in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        steps, began = loop(ours), time.process_time()
        try:
            models, optimizers, prepared, more = next(steps)
        except (Unsupported, BadInput) as refusal:
            return Outcome("refused", str(refusal))
        seconds = time.process_time() - began
        sides.append(Side(models, optimizers, lambda k, steps=steps: next(steps), prepared, more))
    return dataclasses.replace(lockstep(*sides, STEPS), seconds=seconds)


def nothing() -> None:
    return None


def fit(
    ours: bool,
    model: nn.Module,
    loss_fn: Any,
    optimizer: Any,
    batch: Any,
    budget: Any = BUDGET,
    **options: Any,
) -> list[Any]:
    return [fitted(model, loss_fn, optimizer, batch, budget, **options)] if ours else []


# --- small models and data --------------------------------------------------------------------------------------


def classifier() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.1), nn.Conv2d(8, 16, 3, 2, 1),
        nn.GELU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 64), nn.LayerNorm(64), nn.ReLU(),
        nn.Dropout(0.1), nn.Linear(64, 10),
    )  # fmt: skip


def images(count: int = STEPS, size: int = 32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 3, 12, 12, generator=g), torch.randint(10, (size,), generator=g))
        for _ in range(count)
    ]


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class LanguageModel(nn.Module):
    """Two causal layers over 50 tokens, weights tied."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, width), nn.Embedding(24, width)
        layer = partial(
            nn.TransformerEncoderLayer, width, 4, 64, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.ModuleList([layer(), layer()])
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            h = layer(h, src_mask=mask, is_causal=True)
        return self.head(h)


def texts(count: int = STEPS, length: int = 24) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    rows = [torch.randint(50, (8, length + 1), generator=g) for _ in range(count)]
    return [(r[:, :-1], r[:, 1:]) for r in rows]


def next_token(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **options)


# --- between backward pass and update ---------------------------------------------------------------------------


def clipping(ours: bool, by_value: bool = False) -> Iterator[Any]:
    model, data = classifier(), images()
    optimizer = adamw(model)
    steps = fit(
        ours,
        model,
        cross_entropy,
        optimizer,
        data[0],
        **({"clip_value": 0.01} if by_value else {"clip_norm": 0.1}),
    )
    yield [model], [optimizer], steps, nothing
    for batch in data:
        if ours:
            loss = steps[0](batch)
        else:
            loss = cross_entropy(model, batch)
            loss.backward()
            if by_value:
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        yield loss


def nano_gpt(ours: bool) -> Iterator[Any]:
    """Accumulation over four microbatches, clipping, cosine schedule set by hand."""
    model, data, micro = LanguageModel(), texts(4 * STEPS), 4
    optimizer = adamw(model, betas=(0.9, 0.95), weight_decay=0.1)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return next_token(model, batch) / micro

    steps = fit(ours, model, loss_fn, optimizer, data[0], accumulate=micro, clip_norm=1.0)
    yield [model], [optimizer], steps, nothing
    for k in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * k / STEPS))
        losses = []
        for batch in data[micro * k : micro * (k + 1)]:
            if ours:
                losses.append(steps[0](batch))
            else:
                losses.append(loss_fn(model, batch))
                losses[-1].backward()
        if not ours:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        yield losses


def split_steps(
    ours: bool, between: Callable[[nn.Module, int], Any], set_to_none: bool = True
) -> Iterator[Any]:
    """``backward`` and ``update``, with the same code between them."""
    model, data = LanguageModel(), texts()
    optimizer = adamw(model)
    steps = fit(ours, model, next_token, optimizer, data[0], split=True)
    yield [model], [optimizer], steps, nothing
    for k, batch in enumerate(data):
        optimizer.zero_grad(set_to_none=set_to_none)
        if ours:
            loss = steps[0].backward(batch)
        else:
            loss = next_token(model, batch)
            loss.backward()
        log = between(model, k)
        if ours:
            steps[0].update()
        else:
            optimizer.step()
        yield loss, log, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def norms(model: nn.Module, k: int) -> Any:
    return {n: p.grad.norm().item() for n, p in model.named_parameters()}


def noise(model: nn.Module, k: int) -> Any:
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p), alpha=0.01 / (1 + k))


def left_out(model: nn.Module, k: int) -> Any:
    for n, p in model.named_parameters():
        if n.startswith("places") and k % 2:
            p.grad = None


def clipped_each(model: nn.Module, k: int) -> Any:
    return [nn.utils.clip_grad_norm_(p, 0.05) for p in model.parameters()]


def uneven_accumulation(ours: bool) -> Iterator[Any]:
    """As many microbatches as there are, in parts."""
    model, data = classifier(), images(3 * STEPS)
    optimizer = sgd(model)
    steps = fit(ours, model, cross_entropy, optimizer, data[0], split=True, accumulate=2)
    yield [model], [optimizer], steps, nothing
    for k in range(STEPS):
        losses = []
        for batch in data[3 * k : 3 * k + 1 + k % 3]:
            if ours:
                losses.append(steps[0].backward(batch))
            else:
                losses.append(cross_entropy(model, batch))
                losses[-1].backward()
        if ours:
            steps[0].update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        yield losses


def sharpness_aware(ours: bool, rho: float = 0.05) -> Iterator[Any]:
    """SAM: a second backward pass at the perturbed parameters."""
    model, data = classifier(), images()
    optimizer = sgd(model)
    steps = fit(ours, model, cross_entropy, optimizer, data[0], split=True)
    yield [model], [optimizer], steps, nothing

    def backward(batch: Any) -> torch.Tensor:
        if ours:
            return steps[0].backward(batch)
        loss = cross_entropy(model, batch)
        loss.backward()
        return loss

    for batch in data:
        loss = backward(batch)
        scale = rho / nn.utils.get_total_norm([p.grad for p in model.parameters()])
        with torch.no_grad():
            moved = [p.grad * scale for p in model.parameters()]
            for p, e in zip(model.parameters(), moved, strict=True):
                p.add_(e)
        optimizer.zero_grad()
        backward(batch)
        with torch.no_grad():
            for p, e in zip(model.parameters(), moved, strict=True):
                p.sub_(e)
        if ours:
            steps[0].update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        yield loss


def two_optimizers(ours: bool) -> Iterator[Any]:
    """Matrices and the rest: gradients from one backward pass, two optimizers of the caller's."""
    model, data = LanguageModel(), texts()
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    known = {id(p) for p in matrices}
    optimizers = [
        torch.optim.SGD(matrices, lr=0.02, momentum=0.95, nesterov=True),
        torch.optim.AdamW([p for p in model.parameters() if id(p) not in known], lr=1e-3),
    ]
    steps = fit(ours, model, next_token, None, data[0])
    yield [model], optimizers, steps, nothing
    for batch in data:
        if ours:
            loss = steps[0].backward(batch)
        else:
            loss = next_token(model, batch)
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield loss


def lbfgs(ours: bool) -> Iterator[Any]:
    model, data = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1)), torch.randn(STEPS, 64, 13)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def loss_fn(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(rows[:, :12]), rows[:, 12:])

    steps = fit(ours, model, loss_fn, optimizer, data[0], split=True)
    yield [model], [optimizer], steps, nothing
    for batch in data:

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            if ours:
                return steps[0].backward(batch)
            loss = loss_fn(model, batch)
            loss.backward()
            return loss

        yield optimizer.step(closure)


# --- mixed precision and guards ---------------------------------------------------------------------------------


def scaled(ours: bool, accumulate: int = 1, clip: float | None = None, growth: int = 2) -> Iterator[Any]:
    """float16 autocast with a GradScaler; the scale grows until gradients overflow."""
    model, data = LanguageModel(), texts(accumulate * STEPS)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=growth, growth_factor=8.0)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            logits = model(batch[0])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten()) / accumulate

    steps = fit(
        ours, model, loss_fn, optimizer, data[0], scaler=scaler, accumulate=accumulate, clip_norm=clip
    )
    yield [model], [optimizer], steps, scaler.state_dict
    for k in range(STEPS):
        losses = []
        for batch in data[accumulate * k : accumulate * (k + 1)]:
            if ours:
                losses.append(steps[0](batch))
            else:
                losses.append(loss_fn(model, batch))
                scaler.scale(losses[-1]).backward()
        if not ours:
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        yield losses


def bfloat16(ours: bool) -> Iterator[Any]:
    model, data = classifier(), images()
    optimizer = adamw(model)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(batch[0]), batch[1])

    steps = fit(ours, model, loss_fn, optimizer, data[0])
    yield [model], [optimizer], steps, nothing
    for batch in data:
        yield plain(ours, steps, model, loss_fn, optimizer, batch)


def plain(ours: bool, steps: list[Any], model: nn.Module, loss_fn: Any, optimizer: Any, batch: Any) -> Any:
    if ours:
        return steps[0](batch)
    out = loss_fn(model, batch)
    (out[0] if isinstance(out, tuple) else out).backward()
    optimizer.step()
    optimizer.zero_grad()
    return out


def skipped(ours: bool) -> Iterator[Any]:
    """Batches with numbers that are not finite train nothing."""
    model, data = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)), torch.randn(STEPS, 16, 9)
    data[2, 3, 4], data[5, 0, 0] = float("inf"), float("nan")
    optimizer = adamw(model)

    def loss_fn(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(rows[:, :8]), rows[:, 8:])

    steps = fit(ours, model, loss_fn, optimizer, data[0], skip_nonfinite=True, clip_norm=1.0)
    yield [model], [optimizer], steps, nothing
    for batch in data:
        if ours:
            loss = steps[0](batch)
        else:
            loss = loss_fn(model, batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if torch.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()
        yield loss


def anomalies(ours: bool) -> Iterator[Any]:
    model, data = classifier(), images()
    optimizer = adamw(model)
    steps = fit(ours, model, cross_entropy, optimizer, data[0])
    yield [model], [optimizer], steps, nothing
    for batch in data:
        with torch.autograd.set_detect_anomaly(True):
            loss = plain(ours, steps, model, cross_entropy, optimizer, batch)
        yield loss


def looked_at(ours: bool) -> Iterator[Any]:
    """The loss is logged where it is computed, and images are weighed by a number that NumPy finds."""
    model, data, log = classifier(), images(), []

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = cross_entropy(model, batch) * float(np.abs(batch[0].numpy()).mean())
        log.append(loss.item())
        return loss

    optimizer = adamw(model)
    steps = fit(ours, model, loss_fn, optimizer, data[0])
    yield [model], [optimizer], steps, nothing
    for batch in data:
        yield plain(ours, steps, model, loss_fn, optimizer, batch), log[-1]


def hooked_modules(ours: bool) -> Iterator[Any]:
    model, data, norms = classifier(), images(), []
    model[4].register_full_backward_hook(lambda m, i, o: norms.append(o[0].norm().item()))
    optimizer = adamw(model)
    steps = fit(ours, model, cross_entropy, optimizer, data[0])
    yield [model], [optimizer], steps, nothing
    for batch in data:
        yield plain(ours, steps, model, cross_entropy, optimizer, batch), norms[-1]


# --- around the step --------------------------------------------------------------------------------------------


def scheduled(ours: bool, make: Callable[[Any], Any], per_loss: bool = False) -> Iterator[Any]:
    model, data = classifier(), images()
    optimizer = sgd(model)
    schedule = make(optimizer)
    steps = fit(ours, model, cross_entropy, optimizer, data[0])
    yield [model], [optimizer], steps, schedule.state_dict
    for batch in data:
        loss = plain(ours, steps, model, cross_entropy, optimizer, batch)
        schedule.step(loss.item()) if per_loss else schedule.step()
        yield loss, optimizer.param_groups[0]["lr"]


def averaged(ours: bool, swa: bool = False) -> Iterator[Any]:
    """A moving average of the weights; or stochastic weight averaging, with the statistics taken anew."""
    model, data = classifier(), images()
    optimizer = adamw(model)
    decay = None if swa else torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay, use_buffers=not swa)
    schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01) if swa else None
    steps = fit(ours, model, cross_entropy, optimizer, data[0])
    yield [model, average], [optimizer], steps, nothing
    for k, batch in enumerate(data):
        loss = plain(ours, steps, model, cross_entropy, optimizer, batch)
        if schedule is None or k > 3:
            average.update_parameters(model)
        if schedule is not None:
            schedule.step()
            torch.optim.swa_utils.update_bn([x for x, _ in data[:2]], average)
        yield loss


def mixed_up(ours: bool, cut: bool = False) -> Iterator[Any]:
    """Mixup in the loss, by a share from NumPy's generator; or CutMix of the batch before the step, as in timm."""
    model, data = classifier(), images()
    optimizer = adamw(model)

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        x, y, other, share = batch
        if not cut:
            share, order = float(np.random.beta(0.4, 0.4)), torch.randperm(len(x))
            x, other = share * x + (1 - share) * x[order], y[order]
        out = model(x)
        return share * F.cross_entropy(out, y, label_smoothing=0.1) + (1 - share) * F.cross_entropy(
            out, other
        )

    def mixed(x: torch.Tensor, y: torch.Tensor) -> Any:
        if not cut:
            return x, y, y, 1.0
        edge = max(1, int(12 * math.sqrt(1 - np.random.beta(1.0, 1.0))))
        at, x = random.randrange(0, 12 - edge + 1), x.clone()
        x[:, :, at : at + edge, at : at + edge] = x.flip(0)[:, :, at : at + edge, at : at + edge]
        return x, y, y.flip(0), 1 - edge**2 / 144

    steps = fit(ours, model, loss_fn, optimizer, (*data[0], data[0][1], 0.5))
    yield [model], [optimizer], steps, nothing
    for batch in data:
        yield plain(ours, steps, model, loss_fn, optimizer, mixed(*batch))


def evaluated(ours: bool) -> Iterator[Any]:
    """Evaluation between steps, and a last batch that is smaller."""
    model, data = classifier(), images()
    data[3] = data[7] = (data[7][0][:11], data[7][1][:11])
    optimizer = adamw(model)
    steps = fit(ours, model, cross_entropy, optimizer, data[0])
    yield [model], [optimizer], steps, nothing
    for batch in data:
        model.train()
        loss = plain(ours, steps, model, cross_entropy, optimizer, batch)
        model.eval()
        with torch.no_grad():
            right = (model(data[0][0]).argmax(-1) == data[0][1]).float().mean().item()
        yield loss.item(), right


def resumed(ours: bool) -> Iterator[Any]:
    """A checkpoint is written, training goes on, and is set back."""
    model, data = classifier(), images()
    optimizer = adamw(model)
    steps = fit(ours, model, cross_entropy, optimizer, data[0])
    yield [model], [optimizer], steps, nothing
    kept: Any = None
    for k, batch in enumerate(data):
        if k == 3:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if k == 6:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        yield plain(ours, steps, model, cross_entropy, optimizer, batch)


def unfrozen(ours: bool) -> Iterator[Any]:
    """The head first, then everything, in a group of its own."""
    model, data = classifier(), images()
    for p in model[:8].parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW(model[8:].parameters(), lr=1e-3)
    steps = fit(ours, model, cross_entropy, optimizer, data[0], "2MiB")
    yield [model], [optimizer], steps, nothing
    for k, batch in enumerate(data):
        if k == 4:
            for p in model[:8].parameters():
                p.requires_grad_(True)
            optimizer.add_param_group({"params": list(model[:8].parameters()), "lr": 1e-4})
        yield plain(ours, steps, model, cross_entropy, optimizer, batch)


def annealed(ours: bool) -> Iterator[Any]:
    """Loss weights, dropout and label smoothing that change by step; several outputs are logged."""
    model, data = classifier(), images()
    optimizer, now = adamw(model), {"step": 0}

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        share = now["step"] / STEPS
        out = model(batch[0])
        first = F.cross_entropy(out, batch[1], label_smoothing=0.2 * share)
        second = out.square().mean()
        loss = (1 - share) * first + share * 0.1 * second
        return loss, {"cross entropy": first.detach(), "penalty": second.detach(), "top": out.argmax(-1)}

    steps = fit(ours, model, loss_fn, optimizer, data[0])
    yield [model], [optimizer], steps, nothing
    for k, batch in enumerate(data):
        now["step"], model[11].p = k, 0.1 * k / STEPS
        yield plain(ours, steps, model, loss_fn, optimizer, batch)


def lengths(ours: bool) -> Iterator[Any]:
    """Sequences that grow, with names beside them in lists and tuples."""
    model, data = LanguageModel(), texts()
    optimizer = adamw(model)
    cut = [8, 8, 16, 16, 24, 24, 8, 16]
    batches = [
        ([x[:, :n], y[:, :n]], {"id": f"row {k}"})
        for k, ((x, y), n) in enumerate(zip(data, cut, strict=True))
    ]

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return next_token(model, batch[0])

    steps = fit(ours, model, loss_fn, optimizer, batches[4])
    yield [model], [optimizer], steps, nothing
    for batch in batches:
        yield plain(ours, steps, model, loss_fn, optimizer, batch)


def hooked(ours: bool) -> Iterator[Any]:
    """A hook on a parameter's gradient."""
    model, data = classifier(), images()
    optimizer = adamw(model)
    model[0].weight.register_hook(lambda g: g.clamp(-1, 1))
    steps = fit(ours, model, cross_entropy, optimizer, data[0])
    yield [model], [optimizer], steps, nothing
    for batch in data:
        yield plain(ours, steps, model, cross_entropy, optimizer, batch)


# --- several models, several losses -----------------------------------------------------------------------------


def gan(ours: bool) -> Iterator[Any]:
    """Discriminator and generator, each with an optimizer of its own."""
    g = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
    d = nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(64, 1))
    og, od = (torch.optim.Adam(m.parameters(), lr=2e-4, betas=(0.5, 0.999)) for m in (g, d))
    data = torch.randn(STEPS, 32, 32)
    bce = F.binary_cross_entropy_with_logits

    def judge(d: nn.Module, real: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            fake = g(torch.randn(len(real), 8))
        yes, no = d(real), d(fake)
        return bce(yes, torch.ones_like(yes)) + bce(no, torch.zeros_like(no))

    def forge(g: nn.Module, real: torch.Tensor) -> torch.Tensor:
        out = d(g(torch.randn(len(real), 8)))
        return bce(out, torch.ones_like(out))

    steps = [*fit(ours, d, judge, od, data[0]), *fit(ours, g, forge, og, data[0])]
    yield [g, d], [og, od], steps, nothing
    for real in data:
        if ours:
            a, b = steps[0](real), steps[1](real)
        else:
            od.zero_grad()
            a = judge(d, real)
            a.backward()
            od.step()
            og.zero_grad()
            b = forge(g, real)
            b.backward()
            og.step()
            d.zero_grad()
            g.zero_grad()
        yield a, b


def proximal_policy(ours: bool) -> Iterator[Any]:
    """PPO: rollouts without gradients, minibatches over epochs, clipping, entropy."""
    actor, critic = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)), nn.Linear(6, 1)
    model = nn.ModuleDict({"actor": actor, "critic": critic})
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, eps=1e-5)
    states = torch.randn(STEPS, 64, 6)

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        state, action, old, advantage, value = batch
        policy = torch.distributions.Categorical(logits=model["actor"](state))
        ratio = (policy.log_prob(action) - old).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        error = F.mse_loss(model["critic"](state).squeeze(-1), value)
        return -gain + 0.5 * error - 0.01 * policy.entropy().mean(), ratio.detach()

    def rollout(state: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            policy = torch.distributions.Categorical(logits=model["actor"](state))
            action, value = policy.sample(), model["critic"](state).squeeze(-1)
            return [state, action, policy.log_prob(action), torch.randn(len(state)) - value, value + 0.1]

    with torch.random.fork_rng():
        sample = [x[:16] for x in rollout(states[0])]
    steps = fit(ours, model, loss_fn, optimizer, sample, clip_norm=0.5)
    yield [model], [optimizer], steps, nothing
    for state in states:
        whole, losses = rollout(state), []
        for _ in range(2):
            for rows in torch.randperm(64).split(16):
                batch = [x[rows] for x in whole]
                if ours:
                    losses.append(steps[0](batch)[0])
                else:
                    loss, _ = loss_fn(model, batch)
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss)
        yield losses


def q_learning(ours: bool) -> Iterator[Any]:
    """DQN with a target network that is copied every few steps."""
    q = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 4))
    target, optimizer, rows = (
        copy.deepcopy(q),
        torch.optim.RMSprop(q.parameters(), lr=1e-3),
        torch.randn(STEPS, 32, 14),
    )

    def loss_fn(q: nn.Module, r: torch.Tensor) -> torch.Tensor:
        action = (r[:, 12:13].abs() * 10).long() % 4
        with torch.no_grad():
            aim = r[:, 13] + 0.99 * target(r[:, 6:12]).max(1).values
        return F.smooth_l1_loss(q(r[:, :6]).gather(1, action).squeeze(1), aim)

    steps = fit(ours, q, loss_fn, optimizer, rows[0], clip_value=1.0)
    yield [q, target], [optimizer], steps, nothing
    for k, r in enumerate(rows):
        if ours:
            loss = steps[0](r)
        else:
            loss = loss_fn(q, r)
            loss.backward()
            nn.utils.clip_grad_value_(q.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if k % 3 == 2:
            target.load_state_dict(q.state_dict())
        yield loss


def denoising(ours: bool) -> Iterator[Any]:
    """DDPM: noise drawn in the loss, its schedule in a closure, warm-up, a moving average, clipping."""
    net = nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1)
    )
    data, optimizer, average = images(), adamw(net), copy.deepcopy(net).requires_grad_(False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 4))
    kept = torch.linspace(1e-4, 0.02, 100).neg().add(1).cumprod(0)

    def loss_fn(net: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0]
        t = torch.randint(0, 100, (len(x),))
        drawn, a = torch.randn_like(x), kept[t].view(-1, 1, 1, 1)
        noisy = a.sqrt() * x + (1 - a).sqrt() * drawn
        time = (t / 100).view(-1, 1, 1, 1).expand(-1, 1, *x.shape[2:])
        return F.mse_loss(net(torch.cat([noisy, time], 1)), drawn)

    steps = fit(ours, net, loss_fn, optimizer, data[0], clip_norm=1.0)
    yield [net, average], [optimizer], steps, schedule.state_dict
    for batch in data:
        if ours:
            loss = steps[0](batch)
        else:
            loss = loss_fn(net, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        with torch.no_grad():
            for p, q in zip(average.parameters(), net.parameters(), strict=True):
                p.lerp_(q, 0.1)
        yield loss


def low_rank(ours: bool) -> Iterator[Any]:
    """LoRA by hand on a frozen model, with accumulation."""

    class LoRA(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.a = base, nn.Parameter(torch.randn(4, base.in_features) * 0.1)
            self.b = nn.Parameter(torch.zeros(base.out_features, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + F.dropout(x, 0.1, self.training) @ self.a.T @ self.b.T

    model, data = LanguageModel(), texts(2 * STEPS)
    model.requires_grad_(False)
    for layer in model.layers:
        layer.linear1, layer.linear2 = LoRA(layer.linear1), LoRA(layer.linear2)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    steps = fit(ours, model, next_token, optimizer, data[0], accumulate=2)
    yield [model], [optimizer], steps, nothing
    for k in range(STEPS):
        losses = []
        for batch in data[2 * k : 2 * k + 2]:
            if ours:
                losses.append(steps[0](batch))
            else:
                losses.append(next_token(model, batch))
                losses[-1].backward()
        if not ours:
            optimizer.step()
            optimizer.zero_grad()
        yield losses


def adversarial(ours: bool) -> Iterator[Any]:
    """FGSM: the inputs' gradients are taken inside the loss."""
    model, data = classifier(), images()
    optimizer = sgd(model)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0].clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(F.cross_entropy(model(x), batch[1]), x)
        return cross_entropy(model, ((x + 0.03 * slope.sign()).detach(), batch[1]))

    steps = fit(ours, model, loss_fn, optimizer, data[0])
    yield [model], [optimizer], steps, nothing
    for batch in data:
        if ours:
            yield steps[0](batch)
        else:
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss


def distilled(ours: bool) -> Iterator[Any]:
    """A teacher in evaluation mode, under autocast, and a temperature."""
    model, teacher, data = classifier(), classifier().eval(), images()
    optimizer = adamw(model)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            wanted = teacher(batch[0]).float()
        out = model(batch[0])
        soft = F.kl_div(F.log_softmax(out / 2, -1), F.softmax(wanted / 2, -1), reduction="batchmean") * 4
        return 0.5 * soft + 0.5 * F.cross_entropy(out, batch[1])

    steps = fit(ours, model, loss_fn, optimizer, data[0])
    yield [model, teacher], [optimizer], steps, nothing
    for batch in data:
        yield plain(ours, steps, model, loss_fn, optimizer, batch)


def checkpointed(ours: bool) -> Iterator[Any]:
    """torch.utils.checkpoint inside the model."""
    model, data = LanguageModel(), texts()
    optimizer = adamw(model)
    for layer in model.layers:
        inner = layer.forward

        def forward(*args: Any, inner: Any = inner, **kwargs: Any) -> Any:
            return torch.utils.checkpoint.checkpoint(inner, *args, use_reentrant=False, **kwargs)

        layer.forward = forward
    steps = fit(ours, model, next_token, optimizer, data[0])
    yield [model], [optimizer], steps, nothing
    for batch in data:
        yield plain(ours, steps, model, next_token, optimizer, batch)


LOOPS: dict[str, Loop] = {
    "clipping by norm": clipping,
    "clipping by value": partial(clipping, by_value=True),
    "accumulation, clipping, cosine schedule (nanoGPT)": nano_gpt,
    "in parts: norms of gradients logged": partial(split_steps, between=norms),
    "in parts: noise on gradients": partial(split_steps, between=noise),
    "in parts: some gradients left out": partial(split_steps, between=left_out),
    "in parts: each gradient clipped, zero_grad(set_to_none=False)": partial(
        split_steps, between=clipped_each, set_to_none=False
    ),
    "in parts: as many microbatches as there are": uneven_accumulation,
    "in parts: sharpness-aware (SAM)": sharpness_aware,
    "in parts: two optimizers of one model": two_optimizers,
    "in parts: L-BFGS with a closure": lbfgs,
    "float16 autocast, GradScaler": scaled,
    "float16 autocast, GradScaler, accumulation, clipping": partial(scaled, accumulate=2, clip=1.0),
    "bfloat16 autocast": bfloat16,
    "updates left out for gradients that are not finite": skipped,
    "anomaly detection": anomalies,
    "the loss read and logged in the loss function": looked_at,
    "backward hook on a module": hooked_modules,
    "one-cycle schedule": partial(
        scheduled, make=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1)
    ),
    "warm-up, then cosine": partial(
        scheduled,
        make=lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o, 0.1), torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)],
            [3],
        ),
    ),
    "reduced on a plateau": partial(
        scheduled, make=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1), per_loss=True
    ),
    "moving average of weights": averaged,
    "stochastic weight averaging": partial(averaged, swa=True),
    "mixup": mixed_up,
    "CutMix": partial(mixed_up, cut=True),
    "evaluation between steps, a smaller last batch": evaluated,
    "checkpoint, then set back": resumed,
    "unfreezing, a further parameter group": unfrozen,
    "annealed loss weights and dropout, several results": annealed,
    "growing lengths, names in the batch": lengths,
    "hook on a parameter": hooked,
    "GAN: two models, two optimizers": gan,
    "PPO": proximal_policy,
    "DQN with a target network": q_learning,
    "DDPM: noise, schedules, moving average": denoising,
    "LoRA on a frozen model, accumulation": low_rank,
    "adversarial examples (FGSM)": adversarial,
    "distillation": distilled,
    "activation checkpointing": checkpointed,
}
