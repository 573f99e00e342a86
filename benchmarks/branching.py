"""Networks whose layers branch, where the order of ops decides most: beside those of tests/onnx_models.py, cells like
NASNet's and randomly wired stages."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.onnx_models import Dense, HighRes, Inception, UNet

__all__ = ["NETWORKS"]


class Separable(nn.Sequential):
    """ReLU, depthwise and pointwise convolution, norm."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__(
            nn.ReLU(),
            nn.Conv2d(width, width, kernel, 1, kernel // 2, groups=width, bias=False),
            nn.Conv2d(width, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )


class Cell(nn.Module):
    """NASNet-A's normal cell (Zoph et al. 2018): five sums of two branches over two inputs, joined."""

    def __init__(self, before: int, now: int, width: int) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.ReLU(), nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width))
        self.now = nn.Sequential(nn.ReLU(), nn.Conv2d(now, width, 1, bias=False), nn.BatchNorm2d(width))
        self.three = nn.ModuleList(Separable(width, 3) for _ in range(3))
        self.five = nn.ModuleList(Separable(width, 5) for _ in range(2))
        self.pool = nn.AvgPool2d(3, 1, 1)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = self.before(a), self.now(b)
        joined = [
            self.three[0](b) + b,
            self.three[1](a) + self.five[0](b),
            self.pool(b) + a,
            self.pool(a) + self.pool(a),
            self.five[1](a) + self.three[2](a),
        ]
        return torch.cat([a, *joined], 1)


class Nasnet(nn.Module):
    def __init__(self, width: int = 32, cells: int = 6) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width))
        sizes = [width, width] + [6 * width] * cells
        self.cells = nn.ModuleList(Cell(sizes[k], sizes[k + 1], width) for k in range(cells))
        self.head = nn.Linear(6 * width, 10)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        a = b = self.stem(pixel_values)
        for cell in self.cells:
            a, b = b, cell(a, b)
        return self.head(b.mean((2, 3)))


class Wired(nn.Module):
    """Stages of 32 nodes wired like a small world (Xie et al. 2019, WS(4, 0.75)), always the same for a seed."""

    def __init__(self, width: int = 16, nodes: int = 32, stages: int = 3, seed: int = 1) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.wires = [self._wires(nodes, 4, 0.75, rng) for _ in range(stages)]
        self.stem = nn.Conv2d(3, width, 3, 2, 1, bias=False)
        self.down = nn.ModuleList(nn.Conv2d(width << k, width << (k + 1), 3, 2, 1) for k in range(stages))
        self.nodes = nn.ModuleList(
            nn.ModuleList(Separable(width << (k + 1), 3) for _ in range(nodes)) for k in range(stages)
        )
        self.head = nn.Linear(width << stages, 10)

    @staticmethod
    def _wires(nodes: int, near: int, moved: float, rng: random.Random) -> list[list[int]]:
        """By node: the nodes it sums, all with smaller numbers."""
        rows: list[set[int]] = [set() for _ in range(nodes)]
        for a in range(nodes):
            for step in range(1, near // 2 + 1):
                b = (
                    rng.choice([c for c in range(nodes) if c != a])
                    if rng.random() < moved
                    else (a + step) % nodes
                )
                rows[max(a, b)].add(min(a, b))
        return [sorted(row) for row in rows]

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.stem(pixel_values)
        for down, nodes, wires in zip(self.down, self.nodes, self.wires, strict=True):
            x, made = down(x), []
            for node, row in zip(nodes, wires, strict=True):
                made.append(node(sum((made[b] for b in row[1:]), made[row[0]]) if row else x))
            read = {b for row in wires for b in row}
            x = sum(y for k, y in enumerate(made) if k not in read) / len(made)
        return self.head(x.mean((2, 3)))


# Network and the size of its images, 8 of them.
NETWORKS: dict[str, tuple[str, Callable[[], nn.Module], int]] = {
    "inception": ("Inception-like, 9 blocks", lambda: Inception(64, 9), 224),
    "densenet": ("DenseNet-121", lambda: Dense(32, (6, 12, 24, 16)), 64),
    "unet2": ("U-Net with two heads", lambda: UNet(32, 5), 128),
    "hrnet": ("HRNet-like, 4 stages", lambda: HighRes(32, 4), 128),
    "nasnet": ("NASNet-like, 6 cells", Nasnet, 64),
    "wired": ("Randomly wired, 3 stages of 32 nodes", Wired, 64),
}
