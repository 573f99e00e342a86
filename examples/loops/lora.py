"""Adapters of low rank (LoRA) on a frozen transformer, with bfloat16 autocast and accumulation.

python lora.py [BUDGET]
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

BUDGET = sys.argv[1] if len(sys.argv) > 1 else None
VOCABULARY, LENGTH, STEPS, ACCUMULATE = 100, 48, 4, 2
torch.manual_seed(3)


class LoRA(nn.Module):
    def __init__(self, base, rank=4, scale=2.0):
        super().__init__()
        self.base, self.scale, self.dropout = base, scale, nn.Dropout(0.05)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(self.dropout(x), self.a), self.b)


class Layer(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(width, 128), nn.Linear(width, 128), nn.Linear(128, width)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (m(h).unflatten(-1, (4, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


base = nn.Sequential(nn.Embedding(VOCABULARY, 64), *(Layer() for _ in range(3)), nn.Linear(64, VOCABULARY))
model = base.requires_grad_(False)
for layer in model[1:4]:
    layer.q, layer.v = LoRA(layer.q), LoRA(layer.v)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
rows = torch.randint(VOCABULARY, (64, LENGTH + 1))


def loss_fn(model, rows):
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(rows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten()) / ACCUMULATE


if BUDGET:
    import tightship

    step = tightship.fit(model, loss_fn, optimizer, rows[:8], BUDGET, accumulate=ACCUMULATE)
for k in range(STEPS * ACCUMULATE):
    batch = rows[torch.randint(0, 64, (8,))]
    if BUDGET:
        loss = step(batch)
    else:
        loss = loss_fn(model, batch)
        loss.backward()
        if (k + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    print(f"microbatch {k}: loss {loss.item()!r}")
print(f"adapters {sum(p.double().sum().item() for p in trained)!r}")
if BUDGET:
    used = step.measure()
    print(f"planned peak {used['planned_peak']} B, measured {used['measured_peak']} B", file=sys.stderr)
