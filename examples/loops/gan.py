"""A DCGAN: discriminator and generator in turns, each with an optimizer and a step of its own.

python gan.py [BUDGET]
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

BUDGET = sys.argv[1] if len(sys.argv) > 1 else None
LATENT, BATCH, STEPS = 16, 16, 5
torch.manual_seed(999)
data = torch.rand(64, 1, 16, 16) * 2 - 1


def weights(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


G = nn.Sequential(
    nn.ConvTranspose2d(LATENT, 32, 4, 1, 0, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
    nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
    nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False), nn.Tanh(),
).apply(weights)  # fmt: skip
D = nn.Sequential(
    nn.Conv2d(1, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(32, 1, 4, 1, 0, bias=False), nn.Flatten(0),
).apply(weights)  # fmt: skip
optimizer_d = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))


def loss_d(model, batch):
    real, fake = batch
    a, b = model(real), model(fake)
    ones, zeros = torch.ones_like(a), torch.zeros_like(b)
    loss = F.binary_cross_entropy_with_logits(a, ones) + F.binary_cross_entropy_with_logits(b, zeros)
    return loss, a.sigmoid().mean()


def loss_g(model, noise):
    judged = D(model(noise))
    return F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))


if BUDGET:
    import tightship

    step_d = tightship.fit(D, loss_d, optimizer_d, (data[:BATCH], data[:BATCH]), BUDGET)
    step_g = tightship.fit(G, loss_g, optimizer_g, torch.zeros(BATCH, LATENT, 1, 1), BUDGET)
for k in range(STEPS):
    real, noise = data[torch.randint(0, len(data), (BATCH,))], torch.randn(BATCH, LATENT, 1, 1)
    with torch.no_grad():
        fake = G(noise)
    if BUDGET:
        error_d, score = step_d((real, fake))
    else:
        D.zero_grad()
        error_d, score = loss_d(D, (real, fake))
        error_d.backward()
        optimizer_d.step()
        D.zero_grad()
    if BUDGET:
        error_g = step_g(noise)
    else:
        G.zero_grad()
        error_g = loss_g(G, noise)
        error_g.backward()
        optimizer_g.step()
        G.zero_grad()
    print(f"step {k}: D {error_d.item()!r}, G {error_g.item()!r}, D(x) {score.item()!r}")
if BUDGET:
    for used in (step_d.measure(), step_g.measure()):
        print(f"planned peak {used['planned_peak']} B, measured {used['measured_peak']} B", file=sys.stderr)
