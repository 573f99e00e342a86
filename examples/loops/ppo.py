"""Proximal policy optimization as CleanRL writes it, on a pendulum of its own: minibatches over epochs, clipping.

python ppo.py [BUDGET]
"""

import sys

import numpy as np
import torch
from torch import nn
from torch.distributions import Normal

BUDGET = sys.argv[1] if len(sys.argv) > 1 else None
ENVIRONMENTS, HORIZON, MINIBATCHES, EPOCHS, ITERATIONS = 8, 32, 4, 2, 2
np.random.seed(1)
torch.manual_seed(1)


def layer(inputs, outputs, gain=2**0.5):
    made = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(made.weight, gain)
    nn.init.constant_(made.bias, 0.0)
    return made


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(layer(2, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, 1.0))
        self.mean = nn.Sequential(layer(2, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, 0.01))
        self.logstd = nn.Parameter(torch.zeros(1, 1))

    def act(self, x, action=None):
        policy = Normal(self.mean(x), self.logstd.expand(x.shape[0], 1).exp())
        action = policy.sample() if action is None else action
        return action, policy.log_prob(action).sum(1), policy.entropy().sum(1), self.critic(x).squeeze(-1)


def move(state, action):
    angle, speed = state[:, 0], state[:, 1]
    speed = (speed + 0.05 * (10 * angle.sin() + action.clamp(-2, 2)[:, 0])).clamp(-8, 8)
    state = torch.stack([angle + 0.05 * speed, speed], 1)
    return state, -(state[:, 0] ** 2 + 0.1 * speed**2)


def loss_fn(agent, batch):
    observed, action, old, advantage, returns, values = batch
    _, new, entropy, value = agent.act(observed, action)
    ratio = (new - old).exp()
    with torch.no_grad():
        divergence = ((ratio - 1) - (new - old)).mean()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
    near = values + (value - values).clamp(-0.2, 0.2)
    error = 0.5 * torch.max((value - returns) ** 2, (near - returns) ** 2).mean()
    return policy - 0.01 * entropy.mean() + 0.5 * error, divergence


agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)
size = ENVIRONMENTS * HORIZON // MINIBATCHES
if BUDGET:
    import tightship

    sample = [torch.zeros(size, 2), torch.zeros(size, 1), *(torch.zeros(size) for _ in range(4))]
    step = tightship.fit(agent, loss_fn, optimizer, sample, BUDGET, clip_norm=0.5)
state = torch.randn(ENVIRONMENTS, 2)
for iteration in range(ITERATIONS):
    rows = []
    for _ in range(HORIZON):
        with torch.no_grad():
            action, logprob, _, value = agent.act(state)
        after, reward = move(state, action)
        rows.append((state, action, logprob, reward, value))
        state = after
    states, actions, logprobs, rewards, values = (torch.stack(x) for x in zip(*rows, strict=True))
    advantages, last = torch.zeros_like(rewards), 0.0
    with torch.no_grad():
        following = agent.act(state)[3]
    for t in reversed(range(HORIZON)):
        delta = rewards[t] + 0.99 * following - values[t]
        advantages[t] = last = delta + 0.99 * 0.95 * last
        following = values[t]
    whole = [x.flatten(0, 1) for x in (states, actions, logprobs, advantages, advantages + values, values)]
    indices = np.arange(ENVIRONMENTS * HORIZON)
    for epoch in range(EPOCHS):
        np.random.shuffle(indices)
        for start in range(0, len(indices), size):
            batch = [x[indices[start : start + size]] for x in whole]
            if BUDGET:
                loss, divergence = step(batch)
            else:
                loss, divergence = loss_fn(agent, batch)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        print(f"iteration {iteration}, epoch {epoch}: loss {loss.item()!r}, divergence {divergence.item()!r}")
if BUDGET:
    used = step.measure()
    print(f"planned peak {used['planned_peak']} B, measured {used['measured_peak']} B", file=sys.stderr)
