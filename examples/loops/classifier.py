"""An image classifier as timm's script trains one: mixup, label smoothing, a moving average, warm-up, evaluation.

python classifier.py [BUDGET]
"""

import copy
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

BUDGET = sys.argv[1] if len(sys.argv) > 1 else None
CLASSES, EPOCHS = 10, 2
torch.manual_seed(42)
np.random.seed(42)
images, labels = torch.randn(88, 3, 24, 24), torch.randint(CLASSES, (88,))
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(images, labels), batch_size=32, shuffle=True
)


class Residual(nn.Module):
    def __init__(self, width, out, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.short = nn.Conv2d(width, out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.short(x), inplace=True)


class MovingAverage:
    def __init__(self, model, decay=0.9):
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for ours, theirs in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            ours.copy_(self.decay * ours + (1.0 - self.decay) * theirs)


def mixup(x, y, alpha=0.8):
    share = float(np.random.beta(alpha, alpha))
    off, on = 0.1 / CLASSES, 0.9 + 0.1 / CLASSES
    target = torch.full((len(y), CLASSES), off).scatter_(1, y[:, None], on)
    return x * share + x.flip(0) * (1 - share), target * share + target.flip(0) * (1 - share)


def loss_fn(model, batch):
    x, target = batch
    output = model(x)
    return torch.sum(-target * F.log_softmax(output, dim=-1), dim=-1).mean(), output


model = nn.Sequential(
    nn.Conv2d(3, 16, 3, 1, 1), Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 32, 1), nn.AdaptiveAvgPool2d(1),
    nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, CLASSES),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.SequentialLR(
    optimizer,
    [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6),
    ],
    [3],
)
average = MovingAverage(model)
if BUDGET:
    import tightship

    sample = mixup(images[:32], labels[:32])
    np.random.seed(42)
    step = tightship.fit(model, loss_fn, optimizer, sample, BUDGET, clip_norm=5.0)
for epoch in range(EPOCHS):
    model.train()
    for x, y in loader:
        batch = mixup(x, y)
        if BUDGET:
            loss, output = step(batch)
        else:
            loss, output = loss_fn(model, batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
        average.update(model)
        schedule.step()
        right = (output.argmax(-1) == y).sum().item()
        print(
            f"epoch {epoch}: loss {loss.item()!r}, right {right} of {len(y)}, rate {schedule.get_last_lr()[0]!r}"
        )
    model.eval()
    with torch.no_grad():
        scores = [F.cross_entropy(m(images), labels).item() for m in (model, average.module)]
    print(f"epoch {epoch}: evaluation {scores}")
if BUDGET:
    used = step.measure()
    print(f"planned peak {used['planned_peak']} B, measured {used['measured_peak']} B", file=sys.stderr)
