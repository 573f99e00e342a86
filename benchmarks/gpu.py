"""On a CUDA device: the tests that need one, then models of usual sizes trained within budgets, in bfloat16.

    python benchmarks/gpu.py [--minutes 30] [--jobs 1] [--models gpt2,bert] [--no-tests] [--write]      (make gpu)

Each row is one process: PyTorch takes another CUDA allocator only as its first. A way is a budget, with what else
than recomputation is allowed (``static+40%,offload``), or a peer: the same model in eager on PyTorch's own
allocator, as it is or with checkpoints. A step's time is that of several one after another, as a training loop runs
them, without waiting for the device in between. With ``--jobs`` several processes prepare side by side, and are
timed one after the other. Losses and parameters are compared with eager's bit by bit; where eager differs from
itself (kernels that add in no fixed order), that is said. What does not finish in the time is said. Without a
device it says so and ends with status 2. ``--write`` puts the table into docs/training.md.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pages
import torch

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "training.md"
BEGIN, END = "<!-- begin: benchmarks/gpu.py -->", "<!-- end: benchmarks/gpu.py -->"
TESTS = ("tests/execute/test_cuda.py", "tests/execute/test_gpu.py")
BUDGETS = ("100%", "static+60%", "static+45%", "static+45%,offload")
PEERS = ("eager", "checkpoints")
WARM, ROUND, ROUNDS = 3, 4, 5
HEAD = (
    "model",
    "way",
    "planned, MiB",
    "measured",
    "reserved",
    "misses",
    "bits",
    "step, ms",
    "over eager",
    "prepared, s",
)
MARKS = ("---", "---", "---:", "---:", "---:", "---:", "---", "---:", "---:", "---:")


def _text(vocabulary: int, batch: int, length: int, number: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(number)
    ids = torch.randint(0, vocabulary, (batch, length), generator=g).cuda()
    return {"input_ids": ids, "labels": ids}


def _images(batch: int, number: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(number)
    labels = torch.randint(0, 1000, (batch,), generator=g).cuda()
    return {"pixel_values": torch.randn(batch, 3, 224, 224, generator=g).cuda(), "labels": labels}


def model_of(name: str) -> torch.nn.Module:
    """A model of a usual size, with random weights, in training mode on the device."""
    import transformers as t

    t.logging.set_verbosity_error()
    torch.manual_seed(0)
    model: Any
    if name == "gpt2":
        model = t.GPT2LMHeadModel(t.GPT2Config(use_cache=False))
    elif name == "bert":
        model = t.BertForMaskedLM(t.BertConfig())
    elif name == "vit":
        model = t.ViTForImageClassification(t.ViTConfig(num_labels=1000))
    elif name == "resnet50":
        model = t.ResNetForImageClassification(t.ResNetConfig(num_labels=1000))
    else:
        sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16}
        config = t.LlamaConfig(
            vocab_size=32000, num_attention_heads=16, num_key_value_heads=4, use_cache=False, **sizes
        )
        model = t.LlamaForCausalLM(config)
    return model.cuda().train()  # type: ignore[no-any-return]


BATCHES = {
    "gpt2": functools.partial(_text, 50257, 8, 1024),
    "bert": functools.partial(_text, 30522, 32, 512),
    "vit": functools.partial(_images, 64),
    "resnet50": functools.partial(_images, 64),
    "llama": functools.partial(_text, 32000, 8, 1024),
}


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        loss: torch.Tensor = model(**batch).loss
        return loss


def _timed(step: Callable[[dict[str, torch.Tensor]], torch.Tensor], batches: list[Any]) -> tuple[Any, float]:
    """Losses, and the seconds of a step: the median of rounds of several, after the first few."""
    losses: list[torch.Tensor] = []

    def run(count: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            k = len(losses)
            torch.manual_seed(k)
            losses.append(step(batches[k % len(batches)]).detach().clone())
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / count

    run(WARM)
    return losses, statistics.median(run(ROUND) for _ in range(ROUNDS))


def _trained(model: torch.nn.Module, batches: list[Any]) -> tuple[Any, float]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return _timed(step, batches)


def _wait() -> None:
    """Until the others have prepared and nobody else is timed."""
    print("ready", flush=True)
    sys.stdin.readline()


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(-(-t.nbytes // 512) * 512 for t in tensors)


def peer(name: str, kind: str) -> dict[str, Any]:
    """Eager training on PyTorch's own allocator, as it is or with a checkpoint around each block; what is planned is
    what `tightship.estimate` expects."""
    import tightship

    model = model_of(name)
    if kind == "checkpoints":
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    batches = [BATCHES[name](k) for k in range(ROUND)]
    optimizer = torch.optim.AdamW(model.parameters())
    needed = tightship.estimate(model, batches[0], optimizer, loss_of, "h100")
    square = torch.zeros(16, 16, device="cuda")
    torch.addmm(square[0], square, square)  # cuBLAS keeps its workspaces, which no estimate counts
    _wait()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_allocated() - _bytes(*model.state_dict().values(), *batches[0].values())
    _, seconds = _trained(model, batches)
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {
        "planned": needed.peak, "expected": needed.reserved, "measured": peak - others,
        "reserved": reserved - others, "misses": None, "bits": "",
        "seconds": seconds, "prepared": None,
    }  # fmt: skip


def one(name: str, way: str) -> dict[str, Any]:
    """A model trained within the budget, and by two twins in eager, on this process's device."""
    from tightship.execute import allocator

    allocator.load("cuda")  # before anything is put on the device
    import tightship

    budget, _, allow = way.partition(",")
    model = model_of(name)
    twins = [copy.deepcopy(model) for _ in range(2)]
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [BATCHES[name](k) for k in range(ROUND)]
    options: Any = {"seconds": 10.0, "cache": None, "allow": f"recompute,{allow}".rstrip(",")}
    began = time.perf_counter()
    step = tightship.fit(model, loss_of, optimizer, batches[0], budget, **options)
    prepared = time.perf_counter() - began
    misses = []

    def counted(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = step(batch)
        misses.append(step.last.misses if step.last else -1)
        return loss

    _wait()
    losses, seconds = _timed(counted, batches)
    measured = step.measure()
    found: dict[str, Any] = {
        "planned": measured["planned_peak"], "measured": measured["measured_peak"], "misses": sum(misses),
        "reserved": (measured["static"] or 0) + allocator.reserved("cuda"), "seconds": seconds,
        "prepared": prepared, "notes": list(step.notes),
    }  # fmt: skip
    ours = losses, [v.clone() for v in model.state_dict().values()]
    del optimizer, model
    eager = [(_trained(twin, batches)[0], list(twin.state_dict().values())) for twin in twins]

    def same(a: Any, b: Any) -> bool:
        return all(torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))

    found["bits"] = (
        "identical" if same(ours, eager[0]) else "DIFFERENT" if same(*eager) else "eager differs from itself"
    )
    return found


NAMES = str.maketrans("+%,", "---")


class Row:
    """A process that prepares, waits to be timed, and says what it found."""

    def __init__(self, name: str, way: str) -> None:
        self.name, self.way = name, way
        command = [sys.executable, __file__, "--one", name, way]
        pipe = subprocess.PIPE
        self.errors = open(f"/tmp/gpu-{name}-{way.translate(NAMES)}.err", "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self.errors, text=True, cwd=ROOT
        )

    def ready(self) -> None:
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()) and line.strip() != "ready":
            pass

    def go(self) -> dict[str, Any] | str:
        """What it found, or what it said last."""
        try:
            out, _ = self.process.communicate("go\n")
        except BrokenPipeError:
            out = ""
        if self.process.wait() == 0 and out.strip():
            found: dict[str, Any] = json.loads(out.splitlines()[-1])
            return found
        self.errors.seek(0)
        said = self.errors.read()
        print(f"{self.name} {self.way}: {said[-3000:]}", file=sys.stderr)
        return (said.strip().splitlines() or ["not finished"])[-1][:120].replace("|", "/")


def rows_of(name: str, ways: tuple[str, ...], jobs: int, until: float) -> list[tuple[str, ...]]:
    found: dict[str, dict[str, Any] | str] = {}
    for first in range(0, len(ways), jobs):
        rows = [Row(name, way) for way in ways[first : first + jobs]]
        stop = _killer(rows, until)
        for row in rows:
            row.ready()
        for row in rows:
            found[row.way] = row.go()
            print(json.dumps({"model": name, "way": row.way, "found": found[row.way]}), flush=True)
        stop()
    eager = found.get("eager")
    base = eager["seconds"] if isinstance(eager, dict) else None
    return [_cells(name, way, found[way], base) for way in ways]


def _killer(rows: list[Row], until: float) -> Any:
    def kill() -> None:
        for row in rows:
            row.process.kill()

    timer = threading.Timer(max(until - time.monotonic(), 1.0), kill)
    timer.daemon = True
    timer.start()
    return timer.cancel


def _cells(name: str, way: str, found: dict[str, Any] | str, eager: float | None) -> tuple[str, ...]:
    if isinstance(found, str):
        return (name, way, "", "", "", "", found, "", "", "")

    def mib(size: int | None) -> str:
        return "" if size is None else f"{size / 2**20:.1f}"

    expected = mib(found.get("expected"))
    reserved = mib(found["reserved"]) + (f" ({expected} expected)" if expected else "")
    over = "" if eager is None else f"{found['seconds'] / eager:.3f}"
    prepared = "" if found["prepared"] is None else f"{found['prepared']:.1f}"
    misses = "" if found["misses"] is None else str(found["misses"])
    return (
        name, way, mib(found["planned"]), mib(found["measured"]), reserved, misses, found["bits"],
        f"{1e3 * found['seconds']:.1f}", over, prepared,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="for all of it")
    parser.add_argument("--jobs", type=int, default=1, help="processes that prepare side by side")
    parser.add_argument("--models", default=",".join(BATCHES), help="separated by commas")
    parser.add_argument("--budgets", default=" ".join(BUDGETS), help="separated by spaces")
    parser.add_argument("--no-tests", action="store_true", help="the table alone")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to run; make dry-cuda checks what needs none", file=sys.stderr)
        return 2
    if args.one:
        name, way = args.one
        print(json.dumps(peer(name, way) if way in PEERS else one(name, way)))
        return 0
    until = time.monotonic() + 60 * args.minutes
    code, tests = 0, "not run"
    if not args.no_tests:
        more = ["-n", str(args.jobs)] if args.jobs > 1 else []
        code = subprocess.run(
            [sys.executable, "-m", "pytest", "-ra", "-m", "", *more, *TESTS], cwd=ROOT
        ).returncode
        tests = "passed" if code == 0 else "FAILED"
    ways = (*PEERS, *args.budgets.split())
    rows = [r for name in args.models.split(",") for r in rows_of(name, ways, args.jobs, until)]
    table = pages.table(HEAD, MARKS, rows)
    count = WARM + ROUND * ROUNDS
    said = (
        f"{time.strftime('%Y-%m-%d')}; {torch.cuda.get_device_name()}; PyTorch {torch.__version__}; {count} steps "
        f"each; tests {tests}; `make gpu`."
    )
    print(f"{said}\n\n{table}")
    if args.write:
        pages.put(PAGE, BEGIN, END, f"{said}\n\n{table}")
    return code


if __name__ == "__main__":
    sys.exit(main())
