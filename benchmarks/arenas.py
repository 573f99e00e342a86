"""Arenas of small networks: the planners that small devices come with beside ours, on the same live ranges.

    python benchmarks/arenas.py [--only NAME]… [--split] [--models FOLDER] [--results FILE] [--json] [--write]

Thirty networks with random weights: those of MLPerf Tiny and others rebuilt here, the rest of timm, as ONNX files.
FOLDER has more of them. Every planner gets the same buffers: all but weights and the network's input, in the given
order, with what a runtime computes in place as one buffer, and sizes rounded up to ``ALIGNMENT``. ExecuTorch's
and Vela's planners are their own code, where the packages are installed; the others are their algorithms.
``--results`` keeps rows and goes on where it stopped. ``--write`` puts the table into docs/arenas.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import io
import itertools
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pages
import torch
from patches import MCU, MOBILE, network, operations
from torch import nn

import tightship
from tightship.baselines import tvm_hill_climb
from tightship.errors import TightshipError
from tightship.graph import Graph, aligned
from tightship.plan import Buffer, Problem, Solution
from tightship.planners.layout import residences
from tightship.planners.order import best as least_order
from tightship.planners.packing import pack
from tightship.planners.place import orders
from tightship.planners.place.orders import Order
from tightship.planners.place.problem import frame
from tightship.simulate import baseline
from tightship.sources import read_onnx
from tightship.verify.placement import check_solution

PAGE = Path(__file__).resolve().parent.parent / "docs" / "arenas.md"
BEGIN, END = "<!-- begin: benchmarks/arenas.py -->", "<!-- end: benchmarks/arenas.py -->"
KIB = 2**10
ALIGNMENT = 64
VELA_ROUNDS = 5_000
"""Rounds of Vela's hill climb at most; its own limit of 99,999 takes minutes of Python for a large network."""
SHARES = (1.25, 1.5, 2, 3, 4, 6, 8)
"""How many times smaller an arena in slices is asked to be, one after the other."""

Row = dict[str, Any]


# --- networks ---


def conv(wide: int, out: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    pad = kernel // 2
    return nn.Sequential(
        nn.Conv2d(wide, out, kernel, stride, pad, groups=groups, bias=False), nn.BatchNorm2d(out), nn.ReLU()
    )


def separable(wide: int, out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(conv(wide, wide, 3, stride, wide), conv(wide, out, 1))


def head(width: int, classes: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes), nn.Softmax(-1))


def ds_cnn() -> nn.Module:
    """Keyword spotting of MLPerf Tiny."""
    return nn.Sequential(conv(1, 64, 5, 2), *(separable(64, 64) for _ in range(4)), head(64, 12))


def mobilenet_v1(alpha: float, classes: int) -> nn.Module:
    """With alpha 0.25 at 96: visual wake words of MLPerf Tiny, and TensorFlow Lite Micro's person detection."""
    widths = [int(alpha * n) for n in (32, 64, 128, 128, 256, 256, *[512] * 6, 1024, 1024)]
    strides = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1)
    rows = [separable(a, b, s) for (a, b), s in zip(itertools.pairwise(widths), strides, strict=True)]
    return nn.Sequential(conv(3, widths[0], 3, 2), *rows, head(widths[-1], classes))


class Residual(nn.Module):
    def __init__(self, wide: int, out: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = conv(wide, out, 3, stride), conv(out, out)[:2]
        self.short = nn.Identity() if wide == out else nn.Conv2d(wide, out, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.two(self.one(x)) + self.short(x))


def resnet8() -> nn.Module:
    """Image classification of MLPerf Tiny."""
    return nn.Sequential(
        conv(3, 16), Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2), head(64, 10)
    )


def autoencoder() -> nn.Module:
    """Anomaly detection of MLPerf Tiny."""
    widths = (640, 128, 128, 128, 128, 8, 128, 128, 128, 128)
    rows = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*rows, nn.Linear(128, 640))


class UNet(nn.Module):
    def __init__(self, width: int, deep: int) -> None:
        super().__init__()
        wide = [width * 2**k for k in range(deep + 1)]
        self.down = nn.ModuleList(
            nn.Sequential(conv(a, b), conv(b, b)) for a, b in zip([3, *wide], wide, strict=False)
        )
        self.up = nn.ModuleList(conv(a + b, a) for a, b in itertools.pairwise(wide))
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for k, row in enumerate(self.down):
            x = row(x if k == 0 else nn.functional.max_pool2d(x, 2))
            kept.append(x)
        for one, row in zip(reversed(kept[:-1]), reversed(list(self.up)), strict=True):
            x = row(torch.cat([one, nn.functional.interpolate(x, scale_factor=2)], 1))
        out: torch.Tensor = self.last(x)
        return out


class Wired(nn.Module):
    """A cell of a randomly wired network (Xie et al. 2019), as in SERENITY: a node reads two of those before it."""

    def __init__(self, width: int, count: int, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.reads = [torch.randint(0, k + 1, (2,), generator=draw).tolist() for k in range(count)]
        self.first = conv(3, width, 3, 2)
        wide = [width * (1 + int(torch.randint(0, 3, (1,), generator=draw))) for _ in range(count)]
        wides = [width, *wide]
        self.rows = nn.ModuleList(
            separable(wides[a] + wides[b], n) for (a, b), n in zip(self.reads, wide, strict=True)
        )
        used = {n for pair in self.reads for n in pair}
        self.ends = [k for k in range(count + 1) if k not in used]
        self.last = head(sum(wides[k] for k in self.ends), 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [self.first(x)]
        for (a, b), row in zip(self.reads, self.rows, strict=True):
            made.append(row(torch.cat([made[a], made[b]], 1)))
        out: torch.Tensor = self.last(torch.cat([made[k] for k in self.ends], 1))
        return out


def tiny_yolo() -> nn.Module:
    rows: list[nn.Module] = []
    for a, b in ((3, 16), (16, 32), (32, 64), (64, 128), (128, 256), (256, 512)):
        rows += [conv(a, b), nn.MaxPool2d(2) if b < 512 else nn.Identity()]
    return nn.Sequential(*rows, conv(512, 512), nn.Conv2d(512, 125, 1))


REBUILT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "DS-CNN, keywords": (ds_cnn, (1, 49, 10)),
    "ResNet-8": (resnet8, (3, 32, 32)),
    "autoencoder, anomalies": (autoencoder, (640,)),
    "MobileNetV1 0.25, person": (lambda: mobilenet_v1(0.25, 2), (3, 96, 96)),
    "MobileNetV1": (lambda: mobilenet_v1(1.0, 1000), (3, 224, 224)),
    "MobileNetV2": (lambda: network(MOBILE, 32, 1280), (3, 224, 224)),
    "in the manner of MCUNet": (lambda: network(MCU, 16, 640), (3, 176, 176)),
    "U-Net, 8 wide": (lambda: UNet(8, 4), (3, 128, 128)),
    "tiny YOLO": (tiny_yolo, (3, 224, 224)),
    "randomly wired, 24 nodes": (lambda: Wired(16, 24, 0), (3, 64, 64)),
    "randomly wired, 48 nodes": (lambda: Wired(8, 48, 1), (3, 64, 64)),
}
TIMM = (
    "mobilenetv3_small_100", "mobilenetv3_large_100", "mobilenetv4_conv_small", "efficientnet_lite0", "mnasnet_small",
    "tinynet_e", "lcnet_050", "ghostnet_100", "mixnet_s", "fbnetc_100", "resnet18", "densenet121", "inception_v3",
    "dla46_c", "hrnet_w18_small", "mobilevit_xxs", "edgenext_xx_small", "nasnetalarge", "rexnet_100",
)  # fmt: skip


def exported(only: Sequence[str], folder: Path | None) -> Iterator[tuple[str, Path]]:
    """Names and files of the networks; a file lives until the next is asked for."""
    rows = dict(REBUILT)
    if importlib.util.find_spec("timm") is not None:
        rows |= {name: (lambda name=name: _timm(name), (3, 224, 224)) for name in TIMM}
    for name, (make, shape) in rows.items():
        if only and name not in only:
            continue
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.getLogger("torch.onnx").setLevel(logging.ERROR)
            path = Path(place) / "net.onnx"
            torch.onnx.export(make().eval(), (torch.randn(1, *shape),), path, dynamo=False, verbose=False)
            yield name, path
    for path in sorted(folder.rglob("*.onnx")) if folder is not None else ():
        if not only or path.stem in only:
            yield path.stem, path


def _timm(name: str) -> nn.Module:
    import compat  # noqa: F401  # torchvision's own ops where it has none
    import timm

    made: nn.Module = timm.create_model(name, pretrained=False, exportable=True)
    return made


def problem_of(graph: Graph, order: Sequence[int] | None = None) -> Problem:
    """What lies in the arena, in the graph's order or another."""
    stays = [r for r in residences(graph, baseline(graph, order)) if r.size and r.pool == "device"]
    times = sorted({t for r in stays for t in (r.start, r.end)})
    at = {t: k for k, t in enumerate(times)}
    return Problem(
        tuple(Buffer(str(k), at[r.start], at[r.end], aligned(r.size, ALIGNMENT)) for k, r in enumerate(stays))
    )


# --- planners ---


def greedy(problem: Problem, order: Order, best_fit: bool) -> int:
    f = frame(problem)
    found = f.placer.pack(order(f.arrays), best_fit=best_fit)[0]
    return checked(problem, found.tolist())


def checked(problem: Problem, offsets: Sequence[int]) -> int:
    """What a placement spans. Ends the program where it is wrong: it would not be a figure to compare with."""
    arena = max((x + b.size for x, b in zip(offsets, problem.buffers, strict=True)), default=0)
    if wrong := check_solution(problem, Solution(tuple(map(int, offsets)), arena)):
        raise SystemExit(f"wrong placement of a peer: {wrong[0]}")
    return arena


def vela(problem: Problem) -> int | None:
    """Vela's hill climb, its own code: ends are of its inclusive kind."""
    if importlib.util.find_spec("ethosu") is None:
        return None
    from ethosu.vela.hillclimb_allocation import HillClimbAllocator  # type: ignore[import-untyped]
    from ethosu.vela.live_range import LiveRange  # type: ignore[import-untyped]

    rows = []
    for b in problem.buffers:
        row = LiveRange(None, ALIGNMENT)
        row.start_time, row.end_time, row.size = b.lower, b.upper - 1, b.size
        rows.append(row)
    allocator = HillClimbAllocator(rows, VELA_ROUNDS, 0)
    allocator.memory_limit = allocator.min_required_size
    return checked(problem, allocator.allocate())


def executorch(problem: Problem) -> int | None:
    """ExecuTorch's greedy algorithm, its own code."""
    if importlib.util.find_spec("executorch") is None:
        return None
    from executorch.exir.memory_planning import greedy as theirs
    from executorch.exir.tensor import TensorSpec

    specs = []
    for b in problem.buffers:
        spec = TensorSpec(torch.uint8, torch.Size([b.size]))
        spec.lifetime = [b.lower, b.upper - 1]
        specs.append(spec)
    module: Any = torch.fx.symbolic_trace(nn.Identity())
    found = theirs(ALIGNMENT, specs, module, None)  # in one order always: a set has another in each run
    return checked(problem, [found.spec_dict[spec].mem_offset for spec in specs])


def tvm(problem: Problem) -> int:
    return checked(problem, tvm_hill_climb.plan(problem).offsets)


PEERS: dict[str, Callable[[Problem], int | None]] = {
    "LiteRT, XNNPACK": lambda p: greedy(p, orders.by_size_then_start, True),
    "TFLM": lambda p: greedy(p, orders.by_size_then_start, False),
    "onnxruntime, IREE": lambda p: greedy(p, orders.by_start, True),
    "TVM": tvm,
    "ExecuTorch": executorch,
    "Vela": vela,
}


# --- rows ---


def measured(name: str, path: Path) -> Row:
    graph = read_onnx(path).graph
    problem = problem_of(graph)
    with contextlib.redirect_stdout(io.StringIO()):
        peers = {peer: run(problem) for peer, run in PEERS.items()}
    began = time.process_time()
    ours = pack(problem)
    seconds = time.process_time() - began
    found = least_order.solve(graph)
    ordered = pack(problem_of(graph, found.order))
    if ordered.arena > ours.arena:  # an order of less bytes that packs to more is no gain
        ordered = ours
    least = max(aligned(found.bound - graph.static_bytes, 1), 0)
    return {
        "network": name, "buffers": len(problem.buffers), "peers": peers, "arena": ours.arena,
        "bound": ours.lower_bound, "seconds": round(seconds, 3), "ordered": ordered.arena,
        "order_bound": least, "split": None, "operations": None,
    }  # fmt: skip


def in_slices(path: Path, whole: int) -> Row:
    """The smallest arena of those asked for that slices reach, and the operations it takes; the whole one and none
    where there is no smaller."""
    graph = read_onnx(path).graph
    best: Row = {"split": whole, "operations": 0.0}
    for share in SHARES:
        limit = graph.static_bytes + int(whole / share)
        try:
            planned = tightship.plan(path, None, limit, allow="recompute,split", seconds=5.0)
        except TightshipError:
            break
        more = operations(planned.graph) / max(1, operations(graph)) - 1
        best = {"split": planned.arena, "operations": more}
    return best


def markdown(rows: Sequence[Row]) -> str:
    known = [peer for peer in PEERS if any(row["peers"].get(peer) is not None for row in rows)]
    top = ("network", "buffers", *known, "tightship", "proved", "order", "split", "operations")
    marks = ("---", "---:", *["---:"] * (len(known) + 1), "---", "---:", "---:", "---:")
    text = pages.table(top, marks, ([*cells(row, known)] for row in rows))
    return f"{datetime.date.today()}; float32, batch 1; KiB. {said(rows, known)}\n\n{text}"


def cells(row: Row, known: Sequence[str]) -> Iterator[str]:
    yield from (row["network"], str(row["buffers"]))
    for peer in known:
        nbytes = row["peers"].get(peer)
        more = (
            ""
            if nbytes is None or nbytes == row["arena"]
            else f" (+{100 * (nbytes / row['arena'] - 1):.1f} %)"
        )
        yield "" if nbytes is None else f"{nbytes / KIB:,.1f}{more}"
    yield f"**{row['arena'] / KIB:,.1f}**"
    yield "yes" if row["arena"] == row["bound"] else f"within {100 * (row['arena'] / row['bound'] - 1):.2f} %"
    yield f"{row['ordered'] / KIB:,.1f}{', least' if row['ordered'] == row['order_bound'] else ''}"
    yield "" if row["split"] is None else f"{row['split'] / KIB:,.1f}"
    yield "" if row["operations"] is None else f"{100 * row['operations']:+.1f} %"


def said(rows: Sequence[Row], known: Sequence[str]) -> str:
    proved = sum(row["arena"] == row["bound"] for row in rows)
    worse = {
        peer: sum(row["peers"][peer] > row["arena"] for row in rows if row["peers"].get(peer) is not None)
        for peer in known
    }
    larger = sum(row["arena"] > min(n for n in row["peers"].values() if n is not None) for row in rows)
    beaten = ", ".join(f"{peer} on {count}" for peer, count in worse.items())
    return (
        f"{len(rows)} networks: ours is larger than a peer's on {larger} and proved minimal on {proved}. "
        f"Larger than ours: {beaten}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this network alone")
    parser.add_argument("--split", action="store_true", help="also in slices, which takes minutes")
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="ONNX files to measure, too")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep rows here, and go on from there")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--write", action="store_true", help=f"put the table into docs/{PAGE.name}")
    chosen = parser.parse_args()
    kept: Mapping[str, Row] = {}
    if chosen.results is not None and chosen.results.exists():
        kept = {row["network"]: row for row in json.loads(chosen.results.read_text())}
    rows: list[Row] = []
    for name, path in exported(chosen.only, chosen.models):
        row = kept.get(name)
        row = measured(name, path) if row is None else row
        if chosen.split and row["split"] is None:
            row = row | in_slices(path, row["ordered"])
        rows.append(row)
        if not chosen.json:
            print(" | ".join(cells(row, list(PEERS))), flush=True)
        if chosen.results is not None:
            chosen.results.write_text(
                json.dumps(list((dict(kept) | {r["network"]: r for r in rows}).values()))
            )
    print(json.dumps(rows, indent=1) if chosen.json else markdown(rows), flush=True)
    if chosen.write:
        pages.put(PAGE, BEGIN, END, markdown(rows))


if __name__ == "__main__":
    main()
