"""The simplest graphs: a chain forward and back, wide layers, a fan of branches."""

from __future__ import annotations

import random

from tightship.graph import Graph, Op, Storage, Value
from tightship.simulate import baseline, replay


def chain(n: int, size: int = 64) -> Graph:
    """x -> f1 -> … -> fn, and a backward that reads every f in reverse."""
    storages = [Storage("x", size, "input")]
    values = [Value("x", 0)]
    ops = []
    for k in range(n):
        storages.append(Storage(f"f{k}", size))
        values.append(Value(f"f{k}", len(storages) - 1))
        ops.append(Op(f"f{k}", "f", (k,), (k + 1,), time=1.0))
    last = n
    for k in reversed(range(n)):
        storages.append(Storage(f"b{k}", size, "gradient"))
        values.append(Value(f"b{k}", len(storages) - 1))
        ops.append(Op(f"b{k}", "b", (last, k + 1), (len(values) - 1,), time=1.0, phase="backward"))
        last = len(values) - 1
    return Graph(tuple(ops), tuple(values), tuple(storages), (0,), (last,))


def wide_layers(layers: int) -> Graph:
    """Layers x -> w -> x' whose w is large and made of x alone, and a backward that reads all of them in reverse."""
    storages, ops = [Storage("x0", 64, "input")], []

    def op(name: str, size: int, reads: tuple[int, ...], phase: str) -> int:
        storages.append(Storage(name, size))
        ops.append(Op(name, name[0], reads, (len(storages) - 1,), time=1.0, phase=phase))
        return len(storages) - 1

    x, made = 0, []
    for k in range(layers):
        w = op(f"w{k}", 256, (x,), "forward")
        made.append((x, w))
        x = op(f"x{k + 1}", 64, (x, w), "forward")
    last = loss = x
    for k, (x, w) in reversed(list(enumerate(made))):
        last = op(f"b{k}", 64, (last, x, w), "backward")
    values = tuple(Value(s.name, k) for k, s in enumerate(storages))
    return Graph(tuple(ops), values, tuple(storages), (0,), (loss, last))


def fan(branches: int, large: int = 1024, small: int = 64) -> Graph:
    """Branches that make much and keep little, all the large first."""
    values, storages, ops = [Value("x", 0)], [Storage("x", 64)], []

    def made(name: str, size: int, inputs: tuple[int, ...]) -> int:
        storages.append(Storage(name, size))
        values.append(Value(name, len(storages) - 1))
        ops.append(Op(name, "op", inputs, (len(values) - 1,)))
        return len(values) - 1

    big = [made(f"large{k}", large, (0,)) for k in range(branches)]
    end = made("end", 64, tuple(made(f"small{k}", small, (b,)) for k, b in enumerate(big)))
    return Graph(tuple(ops), tuple(values), tuple(storages), (0,), (end,))


def limit_of(graph: Graph, part: float) -> int:
    base = replay(graph, baseline(graph)).peak
    return graph.static_bytes + int(part * (base - graph.static_bytes))


def trained(seed: int) -> Graph:
    """A small network with skips, ops in place and gradients that stay, forward and back."""
    rng = random.Random(seed)
    storages, ops, results = [Storage("x", 64, "input")], [], []

    def stored(name: str) -> int:
        storages.append(Storage(name, 64 * rng.randint(1, 4)))
        return len(storages) - 1

    def seconds() -> float:
        return float(rng.randint(1, 5))

    made = [0]
    for k in range(rng.choice((3, 4))):
        reads = {made[-1], *rng.sample(made, rng.random() < 0.4)}
        made.append(stored(f"f{k}"))
        ops.append(
            Op(
                f"f{k}",
                "f",
                tuple(sorted(reads)),
                (made[-1],),
                time=seconds(),
                workspace=64 * rng.randint(0, 1),
            )
        )
        if rng.random() < 0.2:
            ops.append(Op(f"m{k}", "m", (made[-1],), (), mutates=(made[-1],), time=seconds()))
    last = made[-1]
    for k in reversed(range(1, len(made))):
        reads = {last, made[k], *rng.sample(made, rng.random() < 0.5)}
        goes_on = stored(f"b{k}")
        writes = (goes_on, *(stored(f"w{k}") for _ in range(rng.random() < 0.5)))
        results += writes[1:]
        same = [(a, goes_on) for a in sorted(reads) if a and storages[a].size == storages[goes_on].size]
        ops.append(
            Op(
                f"b{k}",
                "b",
                tuple(sorted(reads)),
                writes,
                time=seconds(),
                phase="backward",
                overwrites=tuple(same[:1]),
            )
        )
        last = goes_on
    values = tuple(Value(s.name, k) for k, s in enumerate(storages))
    return Graph(tuple(ops), values, tuple(storages), (0,), (*results, last))
