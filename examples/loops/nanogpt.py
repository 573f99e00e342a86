"""A language model as nanoGPT trains one: microbatches, clipping, a cosine schedule set by hand.

    python nanogpt.py [BUDGET]

Without a budget it is the ordinary loop; with one (``static+60%``, ``48MiB``) five lines make the step tightship's.
"""

import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

BUDGET = sys.argv[1] if len(sys.argv) > 1 else None
WIDTH, HEADS, LAYERS, BLOCK, VOCABULARY, BATCH, MICROBATCHES, STEPS = 64, 4, 3, 64, 128, 8, 4, 5
torch.manual_seed(1337)
text = torch.randint(VOCABULARY, (20_000,))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            h.view(b, t, HEADS, c // HEADS).transpose(1, 2) for h in self.qkv(self.ln_1(x)).split(c, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, index, targets):
        x = self.wte(index) + self.wpe(torch.arange(index.size(1)))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


def get_batch():
    starts = torch.randint(len(text) - BLOCK, (BATCH,))
    return torch.stack([text[i : i + BLOCK] for i in starts]), torch.stack(
        [text[i + 1 : i + 1 + BLOCK] for i in starts]
    )


def loss_fn(model, batch):
    _, loss = model(*batch)
    return loss / MICROBATCHES


model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
batch = get_batch()
if BUDGET:
    import tightship

    step = tightship.fit(model, loss_fn, optimizer, batch, BUDGET, split=True, accumulate=MICROBATCHES)
for k in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = 1e-4 + 0.5 * (1 + math.cos(math.pi * k / STEPS)) * 9e-4
    total = 0.0
    for _ in range(MICROBATCHES):
        if BUDGET:
            loss = step.backward(batch)
        else:
            loss = loss_fn(model, batch)
            loss.backward()
        total += loss.item()
        batch = get_batch()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if BUDGET:
        step.update()
    else:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"step {k}: loss {total!r}, norm {norm.item()!r}")
if BUDGET:
    used = step.measure()
    print(f"planned peak {used['planned_peak']} B, measured {used['measured_peak']} B", file=sys.stderr)
