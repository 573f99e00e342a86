"""Generative, contrastive and other models, of torch alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from compat import Row, Training, trained
from compat_agents import drawn, generator, mlp, picked
from torch import nn
from torch.nn import functional as F

TITLE = "Generative, contrastive and other models"


def rows() -> Iterator[Row]:
    makers: dict[str, Callable[[], Training]] = {
        "GAN: discriminator, generator": gan,
        "WGAN-GP, gradients of gradients": wgan,
        "VAE": vae,
        "SimCLR, two views": simclr,
        "triplets, shared weights": triplets,
        "BYOL with a moving average": byol,
        "RealNVP, normalizing flow": flow,
        "NeRF, rays through a perceptron": nerf,
        "PINN, second derivatives": pinn,
        "neural ODE, fixed steps": ode,
        "knowledge distillation": distillation,
        "N-BEATS": nbeats,
        "capsules with routing": capsules,
        "GRU, sequence to sequence with teacher forcing": seq2seq,
        "memory bank (MoCo)": moco,
        "MAML, one inner step": maml,
    }
    for name, build in makers.items():
        yield Row(name, (), partial(trained, build))


# --- generative models ----------------------------------------------------------------------------------------


class GAN(nn.Module):
    def __init__(self, spectral: bool = True) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(16, 16, 4), nn.BatchNorm2d(16), nn.ReLU(True),
            nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.ReLU(True), nn.ConvTranspose2d(8, 3, 4, 2, 1),
            nn.Tanh(),
        )  # fmt: skip
        convs = [nn.Conv2d(3, 8, 4, 2, 1), nn.Conv2d(8, 16, 4, 2, 1), nn.Conv2d(16, 1, 4)]
        if spectral:
            convs = [nn.utils.parametrizations.spectral_norm(c) for c in convs]
        self.discriminator = nn.Sequential(
            convs[0], nn.LeakyReLU(0.2, True), convs[1], nn.LeakyReLU(0.2, True), convs[2], nn.Flatten(0)
        )

    def fake(self, number: int) -> torch.Tensor:
        return self.generator(torch.randn(number, 16, 1, 1))


def gan() -> Training:
    def discriminator(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            fake = model.fake(len(x))
        real, made = model.discriminator(x), model.discriminator(fake)
        return F.softplus(-real).mean() + F.softplus(made).mean()

    def generator(model: Any, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(-model.discriminator(model.fake(len(x)))).mean()

    return Training(
        GAN(), discriminator, lambda k: drawn(k, 4, 3, 16, 16), partial(torch.optim.Adam, lr=2e-4, betas=(0.5, 0.9)),
        lambda model: model.discriminator.parameters(), [(generator, lambda model: model.generator.parameters())],
    )  # fmt: skip


def wgan() -> Training:
    def critic(model: Any, x: torch.Tensor) -> torch.Tensor:
        fake = model.fake(len(x)).detach()
        share = torch.rand(len(x), 1, 1, 1)
        between = (share * x + (1 - share) * fake).requires_grad_(True)
        score = model.discriminator(between).sum()
        (slope,) = torch.autograd.grad(score, between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).pow(2).mean()
        return model.discriminator(fake).mean() - model.discriminator(x).mean() + 10 * penalty

    def generator(model: Any, x: torch.Tensor) -> torch.Tensor:
        return -model.discriminator(model.fake(len(x))).mean()

    return Training(
        GAN(spectral=False), critic, lambda k: drawn(k, 4, 3, 16, 16), partial(torch.optim.RMSprop, lr=1e-4),
        lambda model: model.discriminator.parameters(), [(generator, lambda model: model.generator.parameters())],
    )  # fmt: skip


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 48, 16), mlp(8, 48, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_var = self.encoder(x).chunk(2, -1)
        hidden = mean + torch.randn_like(mean) * torch.exp(0.5 * log_var)
        return self.decoder(hidden), mean, log_var


def vae() -> Training:
    def loss(model: nn.Module, x: torch.Tensor) -> Any:
        out, mean, log_var = model(x)
        error = F.binary_cross_entropy_with_logits(out, x, reduction="sum")
        divergence = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())
        return error + divergence, {"error": error, "divergence": divergence}

    return Training(VAE(), loss, lambda k: torch.rand(16, 64, generator=generator(k)))


class Coupling(nn.Module):
    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.net, self.flip = mlp(4, 32, 8, act=nn.Tanh), flip

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = x.chunk(2, -1)[:: -1 if self.flip else 1]
        scale, shift = self.net(a).chunk(2, -1)
        scale = torch.tanh(scale)
        return torch.cat([a, b * scale.exp() + shift], -1), scale.sum(-1)


def flow() -> Training:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        base = torch.distributions.MultivariateNormal(torch.zeros(8), torch.eye(8))
        total: Any = 0
        for layer in model:
            x, log_det = layer(x)
            total = total + log_det
        return -(base.log_prob(x) + total).mean()

    return Training(nn.Sequential(*(Coupling(k % 2 == 1) for k in range(4))), loss, lambda k: drawn(k, 32, 8))


def moco() -> Training:
    return Training(MoCo(), lambda model, b: model(*b), lambda k: (drawn(k, 8, 16), drawn(k + 9, 8, 16)))


class MoCo(nn.Module):
    """Keys of earlier batches are kept in a buffer, which each step writes to at a place that moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.query = mlp(16, 32, 8)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, 64), dim=0))
        self.place = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            for a, b in zip(self.query.parameters(), self.key.parameters(), strict=True):
                b.mul_(0.99).add_(a, alpha=0.01)
            k = F.normalize(self.key(y), dim=1)
        near, far = (q * k).sum(1, keepdim=True), q @ self.queue.clone()
        loss = F.cross_entropy(torch.cat([near, far], 1) / 0.07, torch.zeros(len(x), dtype=torch.long))
        self.queue[:, self.place : self.place + len(x)] = k.T
        self.place = (self.place + len(x)) % self.queue.shape[1]
        return loss


# --- contrast and the rest ------------------------------------------------------------------------------------


def simclr() -> Training:
    def loss(model: nn.Module, b: Any) -> torch.Tensor:
        z = F.normalize(model(torch.cat(b)), dim=1)
        scores = (z @ z.T / 0.1).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
        half = len(z) // 2
        return F.cross_entropy(scores, torch.cat([torch.arange(half) + half, torch.arange(half)]))

    return Training(mlp(16, 32, 8), loss, lambda k: (drawn(k, 8, 16), drawn(k + 9, 8, 16)))


def triplets() -> Training:
    def loss(model: nn.Module, b: Any) -> torch.Tensor:
        return F.triplet_margin_loss(*(model(x) for x in b), margin=0.5)

    return Training(mlp(16, 32, 8), loss, lambda k: tuple(drawn(k + 9 * n, 8, 16) for n in range(3)))


class BYOL(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = mlp(8, 16, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for a, b in zip(self.online.parameters(), self.target.parameters(), strict=True):
                b.lerp_(a, 0.01)
            target = self.target(y)
        return 2 - 2 * F.cosine_similarity(self.predictor(self.online(x)), target).mean()


def byol() -> Training:
    return Training(BYOL(), lambda model, b: model(*b), lambda k: (drawn(k, 8, 16), drawn(k + 9, 8, 16)))


class NeRF(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.density, self.color = mlp(27, 32, 32), nn.Linear(32, 1), mlp(32, 16, 3)

    def forward(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        waves = [f(places * 2.0**k * math.pi) for k in range(4) for f in (torch.sin, torch.cos)]
        hidden = F.relu(self.body(torch.cat([places, *waves], -1)))
        return F.softplus(self.density(hidden)).squeeze(-1), torch.sigmoid(self.color(hidden))


def nerf() -> Training:
    def loss(model: nn.Module, b: Any) -> torch.Tensor:
        origin, direction, color = b
        depths = torch.linspace(1, 4, 12) + torch.rand(len(origin), 12) * 0.25
        places = origin[:, None] + direction[:, None] * depths[..., None]
        density, colors = model(places)
        steps = torch.cat([depths.diff(dim=1), torch.full((len(origin), 1), 1e3)], 1)
        alpha = 1 - torch.exp(-density * steps)
        clear = torch.cumprod(1 - alpha + 1e-10, 1).roll(1, 1)
        clear[:, 0] = 1
        return F.mse_loss(((alpha * clear)[..., None] * colors).sum(1), color)

    def batch(step: int) -> Any:
        return (
            drawn(step, 16, 3),
            F.normalize(drawn(step + 9, 16, 3), dim=-1),
            drawn(step + 20, 16, 3).sigmoid(),
        )

    return Training(NeRF(), loss, batch)


def pinn() -> Training:
    def loss(model: nn.Module, b: Any) -> torch.Tensor:
        x = b.clone().requires_grad_(True)
        u = model(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        return (first[:, 1] - 0.1 * second[:, 0] + u.squeeze(1) * first[:, 0]).pow(2).mean()

    return Training(mlp(2, 32, 32, 1, act=nn.Tanh), loss, lambda k: drawn(k, 64, 2))


def ode() -> Training:
    def loss(model: nn.Module, b: Any) -> torch.Tensor:
        x, y = b
        for _ in range(6):
            one = model(x)
            two = model(x + 0.05 * one)
            x = x + 0.1 * two
        return F.mse_loss(x, y)

    return Training(mlp(8, 32, 8, act=nn.Tanh), loss, lambda k: (drawn(k, 16, 8), drawn(k + 9, 16, 8)))


def distillation() -> Training:
    teacher = mlp(16, 64, 5)

    def loss(model: nn.Module, b: Any) -> torch.Tensor:
        x, y = b
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 2, -1)
        out = model(x)
        return F.cross_entropy(out, y) + 4 * F.kl_div(F.log_softmax(out / 2, -1), soft, reduction="batchmean")

    return Training(mlp(16, 32, 5), loss, lambda k: (drawn(k, 16, 16), picked(k, 5, 16)))


class NBeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([mlp(20, 32, 32, 25) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ahead: Any = 0
        for block in self.blocks:
            back, forth = block(x).split((20, 5), -1)
            x, ahead = x - back, ahead + forth
        return ahead


def nbeats() -> Training:
    return Training(NBeats(), nn.HuberLoss(), lambda k: (drawn(k, 16, 20), drawn(k + 9, 16, 5)))


class Capsules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 5, 2)
        self.weight = nn.Parameter(0.1 * torch.randn(5, 72, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = squash(self.conv(x).view(len(x), 72, 8))
        votes = torch.einsum("nio,cioh->ncih", u, self.weight)
        share = torch.zeros(votes.shape[:3])
        for _ in range(3):
            out = squash((share.softmax(1)[..., None] * votes).sum(2))
            share = share + (votes.detach() * out.detach()[:, :, None]).sum(-1)
        return out.norm(dim=-1)


def squash(x: torch.Tensor) -> torch.Tensor:
    size = x.pow(2).sum(-1, keepdim=True)
    return size / (1 + size) * x / (size.sqrt() + 1e-8)


def capsules() -> Training:
    def loss(model: nn.Module, b: Any) -> torch.Tensor:
        size, wanted = model(b[0]), F.one_hot(b[1], 5).float()
        return (wanted * F.relu(0.9 - size) ** 2 + 0.5 * (1 - wanted) * F.relu(size - 0.1) ** 2).sum(1).mean()

    return Training(Capsules(), loss, lambda k: (drawn(k, 4, 1, 15, 15), picked(k, 5, 4)))


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(30, 16), nn.GRU(16, 32, batch_first=True)
        self.cell, self.head = nn.GRUCell(16, 32), nn.Linear(32, 30)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        import random

        _, h = self.encoder(self.embed(source))
        h, word, out = h[0], target[:, 0], []
        for k in range(1, target.shape[1]):
            h = self.cell(self.embed(word), h)
            out.append(self.head(h))
            word = target[:, k] if random.random() < 0.7 else out[-1].argmax(1)
        return torch.stack(out, 1)


def seq2seq() -> Training:
    def loss(model: nn.Module, b: Any) -> torch.Tensor:
        return F.cross_entropy(model(*b).flatten(0, 1), b[1][:, 1:].flatten())

    return Training(Seq2Seq(), loss, lambda k: (picked(k, 30, 4, 7), picked(k + 9, 30, 4, 5)))


def maml() -> Training:
    def loss(model: nn.Module, b: Any) -> torch.Tensor:
        weights = dict(model.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(model, weights, b[0]), b[1])
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {n: w - 0.1 * s for (n, w), s in zip(weights.items(), slopes, strict=True)}
        return F.mse_loss(torch.func.functional_call(model, moved, b[2]), b[3])

    return Training(
        mlp(4, 32, 2, act=nn.Tanh),
        loss,
        lambda k: tuple(drawn(k + n, 8, s) for n, s in enumerate((4, 2) * 2)),
    )
