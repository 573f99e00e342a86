"""Recommendation and reinforcement learning, of torch alone."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from compat import Row, Training, trained
from torch import nn
from torch.nn import functional as F

TITLE = "Recommendation and reinforcement learning"


def rows() -> Iterator[Row]:
    makers: dict[str, Callable[[], Training]] = {
        "DLRM, bags of embeddings": dlrm,
        "DLRM, sparse gradients": partial(dlrm, sparse=True),
        "two towers, negatives of the batch": two_towers,
        "neural collaborative filtering": collaborative,
        "PPO, actor and critic": ppo,
        "DQN with a target network": dqn,
        "SAC: actor, critics, temperature": sac,
    }
    for name, build in makers.items():
        yield Row(name, (), partial(trained, build))


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def drawn(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(step))


def picked(step: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=generator(step))


def mlp(*sizes: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


# --- recommendation -------------------------------------------------------------------------------------------


class DLRM(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.bottom, self.top = mlp(8, 32, 16), mlp(16 + 6, 32, 1)
        tables = [nn.EmbeddingBag(n, 16, mode="sum", sparse=sparse) for n in (50, 30, 20)]
        self.tables = nn.ModuleList(tables)

    def forward(self, dense: torch.Tensor, bags: Any, offsets: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *(t(b, offsets) for t, b in zip(self.tables, bags, strict=True))], 1)
        rows, columns = torch.tril_indices(4, 4, -1)
        pairs = torch.bmm(features, features.mT)[:, rows, columns]
        return self.top(torch.cat([x, pairs], 1)).squeeze(1)


def dlrm(sparse: bool = False) -> Training:
    def loss(model: nn.Module, b: Any) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(b["dense"], b["bags"], b["offsets"]), b["label"])

    def batch(step: int) -> Any:
        bags = [picked(step, n, 48) for n in (50, 30, 20)]
        label = picked(step, 2, 16).float()
        return {"dense": drawn(step, 16, 8), "bags": bags, "offsets": torch.arange(0, 48, 3), "label": label}

    return Training(DLRM(sparse), loss, batch, optimizer=partial(torch.optim.Adagrad, lr=0.01))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(60, 16), nn.Embedding(40, 16)
        self.left, self.right = mlp(16, 32, 16), mlp(16, 32, 16)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        a = F.normalize(self.left(self.users(users)), dim=-1)
        b = F.normalize(self.right(self.items(items)), dim=-1)
        return a @ b.T * self.scale.exp()


def two_towers() -> Training:
    def loss(model: nn.Module, b: Any) -> torch.Tensor:
        return F.cross_entropy(model(*b), torch.arange(b[0].shape[0]))

    return Training(Towers(), loss, lambda k: (picked(k, 60, 16), picked(k + 50, 40, 16)))


class Collaborative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(60, 32), nn.Embedding(40, 32)
        self.net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 16))
        self.head = nn.Linear(32, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        (a, b), (c, d) = self.users(users).chunk(2, -1), self.items(items).chunk(2, -1)
        return self.head(torch.cat([a * c, self.net(torch.cat([b, d], -1))], -1)).squeeze(-1)


def collaborative() -> Training:
    def loss(model: nn.Module, b: Any) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(b[0], b[1]), b[2])

    def batch(step: int) -> Any:
        return picked(step, 60, 32), picked(step + 50, 40, 32), picked(step, 2, 32).float()

    return Training(Collaborative(), loss, batch)


# --- reinforcement learning -----------------------------------------------------------------------------------


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(6, 32, 32, act=nn.Tanh)
        self.actor, self.critic = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def ppo() -> Training:
    def loss(model: nn.Module, b: Any) -> Any:
        scores, values = model(b["state"])
        policy = torch.distributions.Categorical(logits=scores)
        gain = (b["gain"] - b["gain"].mean()) / (b["gain"].std() + 1e-8)
        ratio = torch.exp(policy.log_prob(b["action"]) - b["log_prob"])
        surrogate = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        entropy, error = policy.entropy().mean(), F.mse_loss(values, b["return"])
        return -surrogate + 0.5 * error - 0.01 * entropy, {"entropy": entropy, "error": error}

    def batch(step: int) -> Any:
        more = {
            "gain": drawn(step, 32),
            "return": drawn(step + 1, 32),
            "log_prob": -drawn(step + 2, 32).abs(),
        }
        return {"state": drawn(step, 32, 6), "action": picked(step, 3, 32)} | more

    return Training(ActorCritic(), loss, batch)


class DQN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = mlp(6, 32, 32, 4)
        self.target = copy.deepcopy(self.online).requires_grad_(False)


def dqn() -> Training:
    def loss(model: nn.Module, b: Any) -> torch.Tensor:
        values = model.online(b["state"]).gather(1, b["action"][:, None]).squeeze(1)
        with torch.no_grad():
            best = model.online(b["next"]).argmax(1, keepdim=True)
            target = b["reward"] + 0.99 * (1 - b["done"]) * model.target(b["next"]).gather(1, best).squeeze(1)
        return F.smooth_l1_loss(values, target)

    def batch(step: int) -> Any:
        more = {
            "reward": drawn(step, 32),
            "done": picked(step, 2, 32).float(),
            "next": drawn(step + 9, 32, 6),
        }
        return {"state": drawn(step, 32, 6), "action": picked(step, 4, 32)} | more

    return Training(DQN(), loss, batch, parameters=lambda model: model.online.parameters())


class SAC(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = mlp(6, 32, 4)
        self.critics = nn.ModuleList([mlp(8, 32, 1), mlp(8, 32, 1)])
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(-1.0))

    def act(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = self.actor(state).chunk(2, -1)
        policy = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = policy.rsample()
        action = torch.tanh(raw)
        return action, (policy.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)).sum(-1)

    def values(self, critics: Any, state: torch.Tensor, action: torch.Tensor) -> list[torch.Tensor]:
        return [c(torch.cat([state, action], -1)).squeeze(-1) for c in critics]


def sac() -> Training:
    def critics(model: Any, b: Any) -> torch.Tensor:
        with torch.no_grad():
            action, log_prob = model.act(b["next"])
            value = torch.min(*model.values(model.targets, b["next"], action))
            target = b["reward"] + 0.99 * (value - model.log_alpha.exp() * log_prob)
        return sum(F.mse_loss(v, target) for v in model.values(model.critics, b["state"], b["action"]))

    def actor(model: Any, b: Any) -> torch.Tensor:
        action, log_prob = model.act(b["state"])
        value = torch.min(*model.values(model.critics, b["state"], action))
        return (model.log_alpha.exp().detach() * log_prob - value).mean()

    def temperature(model: Any, b: Any) -> torch.Tensor:
        with torch.no_grad():
            _, log_prob = model.act(b["state"])
        return -(model.log_alpha * (log_prob - 2)).mean()

    def batch(step: int) -> Any:
        more = {"reward": drawn(step, 32), "next": drawn(step + 9, 32, 6)}
        return {"state": drawn(step, 32, 6), "action": torch.tanh(drawn(step, 32, 2))} | more

    others = [
        (actor, lambda model: model.actor.parameters()),
        (temperature, lambda model: [model.log_alpha]),
    ]
    return Training(SAC(), critics, batch, parameters=lambda m: m.critics.parameters(), others=others)
