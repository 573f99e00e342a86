"""How long planning takes, in how much memory, and how far from the bound, as graphs grow.

    python benchmarks/growth.py [--layers 35,350,3500,34500] [--shares 25,50] [--irregular 1000,10000,100000]
                                [--irregular-shares 70] [--seconds S] [--write]

Graphs are stacks of equal layers, a training step's forward and backward of attention and a perceptron, 29 ops each,
with modeled times; and training steps of ops that are all unlike one another, three in ten of which read a result
from anywhere before. A row is `default.plan` in a process of its own: seconds of the processor and of the clock from
the graph to the verified plan with all offsets, the most memory that the process had, and how far the plan is above
the time that none within the budget is below. ``--seconds`` is the limit of the clock; by default one that hardly
matters, so that the load of the machine does not either. ``--write`` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import random
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
HEAD = (
    "graph", "ops", "budget", "seconds of the processor", "of the clock", "memory", "above the bound", "ended by",
)  # fmt: skip
MARKS = ("---", "---:", "---:", "---:", "---:", "---:", "---:", "---")


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
    return Graph(
        tuple(ops), values, tuple(storages), tuple(inputs), (loss, *grads), name=f"{layers:,} layers"
    )


def irregular(ops: int, seed: int = 0) -> Graph:
    """A training step without layers: no two ops are alike, and three in ten read a result from anywhere before."""
    rng = random.Random(seed)
    storages, made, forward = [Storage("batch", 1 << 20, "input")], list[Op](), list[tuple[int, ...]]()

    def op(reads: tuple[int, ...], size: int, seconds: float, phase: str) -> int:
        storages.append(Storage(f"{phase}.{len(made)}", size))
        out, inputs = len(storages) - 1, tuple(dict.fromkeys(reads))
        made.append(Op(storages[out].name, "any", inputs, (out,), time=seconds, phase=phase))
        return out

    for k in range(ops // 2):
        forward.append((k, rng.randrange(k + 1)) if rng.random() < 0.3 else (k,))
        op(forward[-1], 64 * rng.randint(1, 16_000), rng.random() * 1e-3, "forward")
    grads = {ops // 2: op((ops // 2,), 64, 1e-6, "forward")}
    for k in reversed(range(ops // 2)):
        reads = (*forward[k], k + 1) if rng.random() < 0.5 else forward[k]
        for s in filter(None, dict.fromkeys(forward[k])):
            earlier = (grads[s],) if s in grads else ()
            grads[s] = op((grads[k + 1], *reads, *earlier), storages[s].size, rng.random() * 2e-3, "backward")
    values = tuple(Value(s.name, n) for n, s in enumerate(storages))
    results = (made[ops // 2].outputs[0], made[-1].outputs[0])
    return Graph(tuple(made), values, tuple(storages), (0,), results, name="irregular")


def row(graph: Graph, share: float, seconds: float) -> list[str]:
    """One row of the table; results stay in the arena, since gradients are most of what a stack hands out."""
    began, since = time.process_time(), time.perf_counter()
    made = plan(graph, f"{share:g}%", Options(seconds=seconds, hand_out=False))
    spent, passed = time.process_time() - began, time.perf_counter() - since
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    gap = made.time / made.time_bound - 1
    took = f"{spent:.1f}", f"{passed:.1f}", f"{most / 2**20:,.0f} MiB"
    return [graph.name, f"{len(graph.ops):,}", f"{share:g} %", *took, f"{100 * gap:.2f} %", made.termination]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default="35,350,3500,34500", help="sizes of the stacks, with commas")
    parser.add_argument(
        "--shares", default="25,50", help="budgets in percent of the unplanned peak, with commas"
    )
    parser.add_argument(
        "--irregular", default="1000,10000,100000", help="ops of irregular graphs, with commas"
    )
    parser.add_argument("--irregular-shares", default="70", help="their budgets")
    parser.add_argument("--seconds", type=float, default=3600.0, help="limit of the clock for each plan")
    parser.add_argument(
        "--alone", default="", metavar="KIND,SIZE,SHARE", help="one row, in this process, as JSON"
    )
    parser.add_argument("--write", action="store_true", help=f"put the table into docs/{PAGE.name}")
    chosen = parser.parse_args()
    if chosen.alone:
        kind, size, share = chosen.alone.split(",")
        graph = (stack if kind == "stack" else irregular)(int(size))
        print(json.dumps(row(graph, float(share), chosen.seconds)))
        return
    cases = [
        (kind, size, share)
        for kind, sizes, shares in (
            ("stack", chosen.layers, chosen.shares),
            ("irregular", chosen.irregular, chosen.irregular_shares),
        )
        for size in filter(None, sizes.split(","))
        for share in shares.split(",")
    ]
    rows = []
    for case in cases:
        own = ["--alone", ",".join(case), "--seconds", str(chosen.seconds)]
        ran = subprocess.run([sys.executable, __file__, *own], stdout=subprocess.PIPE, check=True, text=True)
        rows.append(json.loads(ran.stdout))
        print(rows[-1], flush=True)
    table = pages.table(HEAD, MARKS, rows)
    print(table)
    if chosen.write:
        pages.put(PAGE, BEGIN, END, table)


if __name__ == "__main__":
    main()
