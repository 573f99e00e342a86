"""How long planning takes, in how much memory, and how far from the bound, as graphs grow.

    python benchmarks/growth.py [--layers 35,350,3500,34500] [--shares 25,50] [--seconds S] [--write]

Graphs are stacks of equal layers, a training step's forward and backward of attention and a perceptron, 29 ops each,
with modeled times. A row is `default.plan` in a process of its own: seconds of the processor from the graph to the
verified plan with all offsets, the most memory that the process had, and how far the plan is above the time that none
within the budget is below. ``--seconds`` is the limit of the clock; by default one that hardly matters, so that the
load of the machine does not either. ``--write`` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pages

from tightship.graph import Graph, Op, Storage, Value
from tightship.planners.default import Options, plan

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- begin: benchmarks/growth.py -->", "<!-- end: benchmarks/growth.py -->"
HEAD = ("layers", "ops", "budget", "seconds of the processor", "memory", "above the bound", "ended by")
MARKS = ("---:", "---:", "---:", "---:", "---:", "---:", "---")


def stack(layers: int, width: int = 256, tokens: int = 1024) -> Graph:
    """A transformer-like training step: parameters are the caller's, every op's result has a storage of its own."""
    storages: list[Storage] = []
    ops: list[Op] = []
    wide, plain, square = 4 * width * tokens * 4, width * tokens * 4, width * tokens * 4

    def own(name: str, size: int, kind: str) -> int:
        storages.append(Storage(name, size, kind))
        return len(storages) - 1

    def op(name: str, size: int, reads: tuple[int, ...], phase: str, module: str, flops: int = 0) -> int:
        out = own(name, size, "activation")
        moved = size + sum(storages[r].size for r in reads)
        seconds = flops / 50e9 + moved / 10e9 + 5e-6
        target = "aten.mm.default" if flops else f"aten.{name.split('.')[0]}.default"
        ops.append(Op(name, target, reads, (out,), time=seconds, flops=flops, phase=phase, module=module))
        return out

    x = own("batch", plain, "input")
    inputs, tape, grads = [x], [], []
    mm = 2 * width * width * tokens
    for k in range(layers):
        weights = [own(f"w{j}.{k}", 4 * width * width * f, "parameter") for j, f in enumerate((1, 1, 4, 4))]
        inputs += weights
        module = f"h.{k}"
        chain = [x]
        kinds: list[tuple[str, int, int | None]] = [
            ("norm", plain, None), ("q", plain, 0), ("score", square, None), ("soft", square, None),
            ("mix", plain, 1), ("add", plain, None), ("norm2", plain, None), ("up", wide, 2),
            ("pow", wide, None), ("tanh", wide, None), ("gate", wide, None), ("down", plain, 3),
        ]  # fmt: skip
        for name, size, weight in kinds:
            reads = (chain[-1],) if weight is None else (chain[-1], weights[weight])
            flops = mm * (4 if size == wide or name == "down" else 1) if weight is not None else 0
            chain.append(op(f"{name}.{k}", size, reads, "forward", module, flops))
        x = op(f"residual.{k}", plain, (chain[-1], chain[6]), "forward", module)
        tape.append((module, weights, chain, kinds))
    grad = loss = op("loss", 64, (x,), "forward", "")
    for k, (module, weights, chain, kinds) in reversed(list(enumerate(tape))):
        for j in reversed(range(len(kinds))):
            name, _, weight = kinds[j]
            size = storages[chain[j]].size
            if weight is None:
                grad = op(f"d{name}.{k}", size, (grad, chain[j]), "backward", module)
                continue
            flops = mm * (4 if "up" in name or "down" in name else 1)
            w = weights[weight]
            grads.append(op(f"dw{name}.{k}", storages[w].size, (grad, chain[j]), "backward", module, flops))
            grad = op(f"d{name}.{k}", size, (grad, w), "backward", module, flops)
    values = tuple(Value(s.name, n) for n, s in enumerate(storages))
    return Graph(tuple(ops), values, tuple(storages), tuple(inputs), (loss, *grads), name=f"{layers} layers")


def row(layers: int, share: float, seconds: float) -> list[str]:
    """One row of the table; results stay in the arena, since gradients are most of what a stack hands out."""
    graph = stack(layers)
    began = time.process_time()
    made = plan(graph, f"{share:g}%", Options(seconds=seconds, hand_out=False))
    spent = time.process_time() - began
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    gap = made.time / made.time_bound - 1
    return [
        f"{layers:,}", f"{len(graph.ops):,}", f"{share:g} %", f"{spent:.1f}", f"{most / 2**20:,.0f} MiB",
        f"{100 * gap:.2f} %", made.termination,
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default="35,350,3500,34500", help="sizes of the stacks, with commas")
    parser.add_argument(
        "--shares", default="25,50", help="budgets in percent of the unplanned peak, with commas"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="limit of the clock for each plan")
    parser.add_argument("--alone", action="store_true", help="one row, in this process, as JSON")
    parser.add_argument("--write", action="store_true", help=f"put the table into docs/{PAGE.name}")
    chosen = parser.parse_args()
    sizes = [(int(n), float(share)) for n in chosen.layers.split(",") for share in chosen.shares.split(",")]
    if chosen.alone:
        print(json.dumps(row(*sizes[0], chosen.seconds)))
        return
    rows = []
    for layers, share in sizes:
        own = ["--alone", "--layers", str(layers), "--shares", str(share), "--seconds", str(chosen.seconds)]
        ran = subprocess.run([sys.executable, __file__, *own], stdout=subprocess.PIPE, check=True, text=True)
        rows.append(json.loads(ran.stdout))
        print(rows[-1], flush=True)
    table = pages.table(HEAD, MARKS, rows)
    print(table)
    if chosen.write:
        pages.put(PAGE, BEGIN, END, table)


if __name__ == "__main__":
    main()
