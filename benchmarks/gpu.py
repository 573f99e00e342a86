"""On a CUDA device: the tests that need one, then models trained in eager and within budgets.

    python benchmarks/gpu.py [--minutes 30] [--write]      (make gpu)

Each row is one process: PyTorch takes another CUDA allocator only as its first. Losses and parameters are compared
with eager's bit by bit, peaks are those of one meter, times are medians of steps that take turns. What does not
finish in the time is said. Without a device it says so and ends with status 2. ``--write`` puts the table into
docs/training.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pages
import torch

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "training.md"
BEGIN, END = "<!-- begin: benchmarks/gpu.py -->", "<!-- end: benchmarks/gpu.py -->"
TESTS = ("tests/execute/test_cuda.py",)
MODELS = ("gpt2", "bert", "vit", "resnet50")
BUDGETS = ("100%", "static+70%", "static+50%", "static+35%")
STEPS = 12
HEAD = (
    "model",
    "budget",
    "eager, MiB",
    "planned",
    "measured",
    "misses",
    "bits",
    "step over eager",
    "code, ms",
)
MARKS = ("---", "---", "---:", "---:", "---:", "---:", "---", "---:", "---:")


def one(name: str, budget: str) -> dict[str, Any]:
    """A model trained in eager and within the budget, on this process's device."""
    from tightship.execute import allocator

    allocator.load("cuda")  # before anything is put on the device
    import tightship
    from tightship.demo import models
    from tightship.execute.allocator import Meter

    work = getattr(models, name)()
    model = work.make().cuda()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (model, twin)]
    batches = [{k: v.cuda() for k, v in work.batch(k).items()} for k in range(STEPS)]
    step = tightship.fit(model, None, optimizers[0], batches[0], budget, seconds=10.0)
    times: dict[str, list[float]] = {"ours": [], "eager": [], "code": []}
    peaks, alike, asked = [], True, step._asked

    def timed(batch: Any) -> Any:
        began = time.perf_counter()
        found = asked(batch)
        times["code"].append(time.perf_counter() - began)
        return found

    def eager(batch: Any) -> torch.Tensor:
        optimizers[1].zero_grad()
        loss: torch.Tensor = twin(**batch).loss
        loss.backward()
        optimizers[1].step()
        return loss.detach()

    step._asked = timed  # type: ignore[method-assign]
    for k, batch in enumerate(batches):
        losses = []
        for kind, run in (("ours", step), ("eager", eager)):
            torch.manual_seed(k)
            torch.cuda.synchronize()
            began = time.perf_counter()
            with Meter("cuda") as meter:
                losses.append(run(batch).detach().clone())
                torch.cuda.synchronize()
            times[kind].append(time.perf_counter() - began)
            optimizers[1].zero_grad()
        peaks.append(meter.peak)
        alike = alike and torch.equal(*losses)
    alike = alike and all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
    middle = {kind: statistics.median(v[2:]) for kind, v in times.items()}
    return {
        "model": work.title, "budget": budget, **step.measure(), "alike": alike, "eager": max(peaks[2:]),
        "ratio": middle["ours"] / middle["eager"], "code": 1e3 * middle["code"],
    }  # fmt: skip


def row(name: str, budget: str, seconds: float) -> tuple[str, ...]:
    command = [sys.executable, __file__, "--one", name, budget]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 1.0), cwd=ROOT)
    except subprocess.TimeoutExpired:
        return (name, budget, "", "", "", "", "not finished", "", "")
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        said = done.stderr.strip().splitlines()[-1:] or ["no word"]
        return (name, budget, "", "", "", "", said[0][:100].replace("|", "/"), "", "")
    r = json.loads(done.stdout.splitlines()[-1])

    def mib(size: int | None) -> str:
        return "" if size is None else f"{size / 2**20:.2f}"

    return (
        r["model"], budget, mib(r["static"] + r["eager"]), mib(r["planned_peak"]), mib(r["measured_peak"]),
        str(r["misses"]), "identical" if r["alike"] else "DIFFERENT", f"{r['ratio']:.2f}", f"{r['code']:.1f}",
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="for all of it")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "BUDGET"), help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to run; make dry-cuda checks what needs none", file=sys.stderr)
        return 2
    if args.one:
        print(json.dumps(one(*args.one)))
        return 0
    until = time.monotonic() + 60 * args.minutes
    tests = subprocess.run([sys.executable, "-m", "pytest", "-ra", *TESTS], cwd=ROOT)
    rows = [row(name, budget, until - time.monotonic()) for name in MODELS for budget in BUDGETS]
    table = pages.table(HEAD, MARKS, rows)
    said = (
        f"{time.strftime('%Y-%m-%d')}; {torch.cuda.get_device_name()}; PyTorch {torch.__version__}; {STEPS} steps "
        f"each, in turns; tests {'passed' if tests.returncode == 0 else 'FAILED'}; `make gpu`."
    )
    print(f"{said}\n\n{table}")
    if args.write:
        pages.put(PAGE, BEGIN, END, f"{said}\n\n{table}")
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
