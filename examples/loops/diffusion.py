"""A denoising diffusion model: noise and timesteps drawn in the loss, a warm-up, clipping, a moving average.

python diffusion.py [BUDGET]
"""

import copy
import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

BUDGET = sys.argv[1] if len(sys.argv) > 1 else None
TIMESTEPS, STEPS = 200, 6
torch.manual_seed(0)
data = torch.rand(64, 3, 16, 16) * 2 - 1
betas = torch.linspace(1e-4, 0.02, TIMESTEPS)
kept = torch.cumprod(1 - betas, dim=0)


class Block(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.time, self.norm = nn.Linear(32, out), nn.GroupNorm(4, out)
        self.conv1, self.conv2 = nn.Conv2d(width, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.short = nn.Conv2d(width, out, 1)

    def forward(self, x, t):
        h = self.conv1(x) + self.time(t)[:, :, None, None]
        return self.conv2(F.silu(self.norm(h))) + self.short(x)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32))
        self.down1, self.down2, self.middle = Block(3, 16), Block(16, 32), Block(32, 32)
        self.up2, self.up1, self.out = Block(64, 16), Block(32, 16), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x, t):
        rates = torch.exp(torch.arange(16) * (-math.log(1000.0) / 16))
        angles = t[:, None].float() * rates[None]
        t = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        a = self.down1(x, t)
        b = self.down2(F.avg_pool2d(a, 2), t)
        c = self.middle(F.avg_pool2d(b, 2), t)
        c = self.up2(torch.cat([F.interpolate(c, scale_factor=2), b], dim=1), t)
        return self.out(self.up1(torch.cat([F.interpolate(c, scale_factor=2), a], dim=1), t))


def loss_fn(model, clean):
    noise = torch.randn_like(clean)
    t = torch.randint(0, TIMESTEPS, (clean.shape[0],))
    share = kept[t].view(-1, 1, 1, 1)
    return F.mse_loss(model(share.sqrt() * clean + (1 - share).sqrt() * noise, t), noise)


model = UNet()
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 3))
if BUDGET:
    import tightship

    step = tightship.fit(model, loss_fn, optimizer, data[:16], BUDGET, clip_norm=1.0)
for k in range(STEPS):
    clean = data[torch.randint(0, len(data), (16,))]
    if BUDGET:
        loss = step(clean)
    else:
        loss = loss_fn(model, clean)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    schedule.step()
    with torch.no_grad():
        for mean, p in zip(average.parameters(), model.parameters(), strict=True):
            mean.mul_(0.95).add_(p, alpha=0.05)
    print(f"step {k}: loss {loss.item()!r}")
print(f"average {sum(p.double().sum().item() for p in average.parameters())!r}")
if BUDGET:
    used = step.measure()
    print(f"planned peak {used['planned_peak']} B, measured {used['measured_peak']} B", file=sys.stderr)
