"""How long planning takes as graphs grow, and what more of it gains.

    python benchmarks/growth.py [--layers 35,350,3500] [--models gpt24] [--write]

Graphs are stacks of equal layers, a training step's forward and backward of attention and a perceptron, some 36 ops
each, with modeled times; ``--models`` takes captured ones of budget.py instead. Budget: a quarter of the peak.
Seconds are those of the processor, searches are limited by work (ops simulated) or by their own end, so that the load
of the machine hardly matters; ``tightship plan`` does the same with a clock.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable, Iterator

from tightship.graph import Graph, Op, Storage, Value
from tightship.planners.default import Options, order_of
from tightship.planners.evict import anneal, greedy
from tightship.planners.evict.problem import Decision, EvictionProblem
from tightship.simulate import baseline, replay

WORK_OF_5_S, WORK_OF_60_S = 125_000_000, 1_500_000_000
"""Ops simulated in so many seconds on the machine of the docs when it is quiet."""
LARGE = 30_000
SHARE = 0.25


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


def timed(
    plan: Callable[..., Decision], frame: EvictionProblem, limit: int, o: object
) -> tuple[Decision, float]:
    began = time.process_time()
    return plan(frame, limit, o), time.process_time() - began


def rows(name: str, graph: Graph) -> Iterator[str]:
    before = replay(graph, baseline(graph)).peak
    limit = int(SHARE * before)
    began = time.process_time()
    frame = EvictionProblem(graph, order_of(graph, Options(), before))
    assert len(frame.gaps) and frame.rows  # what all searches begin with
    ready, once = time.process_time() - began, sum(op.time for op in graph.ops)

    def row(how: str, found: Decision, seconds: float) -> str:
        extra = f"+{100 * found.extra / once:.2f} %" if found.met else f"not met: {found.peak / before:.0%}"
        return f"| {name} | {len(graph.ops):,} | {how} | {ready + seconds:.1f} s | {extra} |"

    yield row("greedy", *timed(greedy.plan, frame, limit, greedy.Options(seconds=30.0)))
    if len(graph.ops) > LARGE:
        return
    for work in (WORK_OF_5_S, WORK_OF_60_S):
        if work == WORK_OF_60_S and len(graph.ops) > LARGE // 10:
            continue
        fresh = EvictionProblem(graph, frame.order)
        o = anneal.Options(work=work, seconds=60.0 if len(graph.ops) > 3_000 else 600.0)
        yield row(f"search, {work // 10**6} million", *timed(anneal.plan, fresh, limit, o))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default="35,350,3500", help="sizes of the stacks, with commas")
    parser.add_argument("--models", help="captured models of budget.py instead, by name, with commas")
    chosen = parser.parse_args()
    graphs: list[tuple[str, Graph]] = []
    if chosen.models:
        from budget import FULL, captured

        graphs = [(FULL[n][0], captured(FULL[n][1]).graph) for n in chosen.models.split(",")]
    else:
        graphs = [(f"{n} layers", stack(int(n))) for n in chosen.layers.split(",")]
    print(f"{datetime.date.today()}\n")
    print("| graph | ops | planner | seconds of the processor | extra time |")
    print("| --- | ---: | --- | ---: | ---: |")
    for name, graph in graphs:
        for row in rows(name, graph):
            print(row, flush=True)


if __name__ == "__main__":
    main()
