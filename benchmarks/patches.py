"""Networks patch by patch: how small an arena becomes, and at how many operations more.

    python benchmarks/patches.py [--quick] [--only onnx|torch] [--write]

MobileNetV2 and a network in the manner of MCUNet's (kernels of 3, 5 and 7), batch 1, random weights: in PyTorch by
`tightship.infer`, planned bytes beside measured ones, and as ONNX files, results compared in onnxruntime. ``--write``
puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pages
import torch
from torch import nn

import tightship
from tightship.errors import Infeasible
from tightship.sources import read_onnx

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- begin: benchmarks/patches.py -->", "<!-- end: benchmarks/patches.py -->"
KIB = 2**10


class Block(nn.Module):
    """An inverted residual: expand, depthwise, project."""

    def __init__(self, width: int, out: int, stride: int, expand: int, kernel: int) -> None:
        super().__init__()
        inner, rows = width * expand, list[nn.Module]()
        if expand > 1:
            rows += [nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(True)]
        deep = nn.Conv2d(inner, inner, kernel, stride, kernel // 2, groups=inner, bias=False)
        rows += [
            deep,
            nn.BatchNorm2d(inner),
            nn.ReLU6(True),
            nn.Conv2d(inner, out, 1, bias=False),
            nn.BatchNorm2d(out),
        ]
        self.rows, self.adds = nn.Sequential(*rows), stride == 1 and width == out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.rows(x)
        return x + y if self.adds else y


def network(stages: Sequence[tuple[int, int, int, int, Sequence[int]]], first: int, last: int) -> nn.Module:
    """``stages``: expansion, width, blocks, stride, kernels in turn."""
    rows: list[nn.Module] = [nn.Conv2d(3, first, 3, 2, 1, bias=False), nn.BatchNorm2d(first), nn.ReLU6(True)]
    width = first
    for expand, out, count, stride, kernels in stages:
        for i in range(count):
            rows.append(Block(width, out, stride if i == 0 else 1, expand, kernels[i % len(kernels)]))
            width = out
    rows += [nn.Conv2d(width, last, 1, bias=False), nn.BatchNorm2d(last), nn.ReLU6(True)]
    model = nn.Sequential(*rows, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 1000)).eval()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_(0, 0.1)  # type: ignore[operator, union-attr]
            m.running_var.uniform_(0.5, 2)  # type: ignore[operator, union-attr]
    return model


MOBILE = [
    (1, 16, 1, 1, [3]), (6, 24, 2, 2, [3]), (6, 32, 3, 2, [3]), (6, 64, 4, 2, [3]), (6, 96, 3, 1, [3]),
    (6, 160, 3, 2, [3]), (6, 320, 1, 1, [3]),
]  # fmt: skip
MCU = [
    (1, 8, 1, 1, [3]), (5, 16, 3, 2, [7, 3, 5]), (5, 24, 3, 2, [5, 3, 7]), (5, 40, 3, 2, [7, 5, 3]),
    (6, 48, 3, 1, [5, 3, 5]), (6, 96, 3, 2, [7, 5, 3]), (6, 160, 1, 1, [3]),
]  # fmt: skip
NETWORKS = {
    "MobileNetV2, 224": (lambda: network(MOBILE, 32, 1280), 224),
    "in the manner of MCUNet, 176": (lambda: network(MCU, 16, 640), 176),
}


def operations(graph: Any) -> int:
    return sum(op.flops for op in graph.ops)


def in_torch(model: nn.Module, x: torch.Tensor, parts: Sequence[float]) -> Iterator[tuple[str, ...]]:
    options: dict[str, Any] = {
        "fresh": False,
        "strict": True,
        "seconds": 4.0,
        "seconds_per_op": 0.0,
        "progress": False,
    }
    whole = tightship.infer(model, x, **options)
    yield "PyTorch", "whole", f"{whole.plan.arena / KIB:.0f}", "", "1.0", "", ""
    with torch.no_grad():
        want = model(x)
    for way in ("split", "split-rounding"):
        for part in parts:
            limit = whole.plan.static + int(whole.plan.arena / part)
            try:
                run = tightship.infer(model, x, limit, allow=f"recompute,{way}", **options)
            except Infeasible:
                yield "PyTorch", way, "", "", f"{part:g} not reached", "", ""
                break
            bits = "equal" if torch.equal(run(x), want) else "rounded"
            measured = (run.measure()["measured_peak"] or 0) - run.plan.static
            more = operations(run.graph) / operations(whole.graph) - 1
            yield (
                "PyTorch", way, f"{run.plan.arena / KIB:.0f}", f"{measured / KIB:.0f}",
                f"{whole.plan.arena / run.plan.arena:.1f}", f"{100 * more:+.1f} %", bits,
            )  # fmt: skip


def in_onnx(model: nn.Module, x: torch.Tensor, parts: Sequence[float]) -> Iterator[tuple[str, ...]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(model, (x,), dynamo=True, verbose=False).save(str(path), external_data=False)
        graph = read_onnx(path).graph
        whole = tightship.plan(path)
        yield "ONNX", "whole", f"{whole.arena / KIB:.0f}", "", "1.0", "", ""
        for part in parts:
            limit = whole.static + int(whole.arena / part)
            try:
                planned = tightship.plan(path, None, limit, allow="recompute,split")
            except Infeasible:
                yield "ONNX", "split", "", "", f"{part:g} not reached", "", ""
                break
            more = operations(planned.graph) / operations(graph) - 1
            yield (
                "ONNX", "split", f"{planned.arena / KIB:.0f}", "", f"{whole.arena / planned.arena:.1f}",
                f"{100 * more:+.1f} %", "equal",
            )  # fmt: skip


def markdown(rows: list[tuple[str, ...]]) -> str:
    head = ("network", "in", "allow", "arena", "measured", "times smaller", "operations", "results")
    marks = ("---", "---", "---", "---:", "---:", "---:", "---:", "---")
    today = f"{datetime.date.today()}; float32, batch 1, {torch.get_num_threads()} threads; KiB."
    return f"{today}\n\n{pages.table(head, marks, rows)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the ONNX files alone, at a quarter")
    parser.add_argument("--only", choices=("onnx", "torch"), help="one of the two")
    parser.add_argument("--write", action="store_true", help=f"put the table into docs/{PAGE.name}")
    chosen = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    for name, (make, size) in NETWORKS.items():
        torch.manual_seed(0)
        model, x = make(), torch.randn(1, 3, size, size)
        found: list[Iterator[tuple[str, ...]]] = []
        if chosen.only != "torch":
            found.append(in_onnx(model, x, [4.0] if chosen.quick else [4.0, 5.0, 6.0, 7.0, 8.0]))
        if chosen.only != "onnx" and not chosen.quick:
            found.append(in_torch(model, x, [4.0, 6.0]))
        for row in (row for part in found for row in part):
            rows.append((name, *row))
            print(" | ".join(rows[-1]), flush=True)
    print(markdown(rows), flush=True)
    if chosen.write:
        pages.put(PAGE, BEGIN, END, markdown(rows))


if __name__ == "__main__":
    main()
