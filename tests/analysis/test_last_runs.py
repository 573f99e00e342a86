"""The bound from the last runs of large ops: never above the best plan of graphs small enough to try every plan, and
more than single moments show where gradients pile up."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from support.chains import chain
from support.optimum import optimum
from support.strategies import random_graph
from tightship import _core
from tightship.analysis import last_runs
from tightship.analysis.bounds import Relaxation, lower_bound
from tightship.analysis.last_runs import last_run_bound
from tightship.graph import Graph, Op, Storage, Value
from tightship.simulate import baseline, replay


def gradients(layers: int, large: int, small: int) -> Graph:
    """Layers that each make something large of something small, and a gradient of it in the backward pass."""
    storages = [Storage("x0", small, "input"), *(Storage(f"x{k + 1}", small) for k in range(layers))]
    ops: list[Op] = []

    def add(name: str, reads: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
        made = tuple(range(len(storages), len(storages) + len(sizes)))
        storages.extend(Storage(f"{name}.{k}", size) for k, size in enumerate(sizes))
        ops.append(Op(name, name[0], reads, made, time=1.0))
        return made

    x, hidden = [0], []
    for k in range(layers):
        hidden += add(f"h{k}", (x[-1],), (large,))
        ops.append(Op(f"x{k}", "x", (hidden[-1],), (k + 1,), time=1.0))
        x.append(k + 1)
    (g,) = add("g", (x[-1],), (small,))
    results = []
    for k in reversed(range(layers)):
        (wide,) = add(f"w{k}", (g, hidden[k]), (large,))
        results += add(f"d{k}", (wide, x[k]), (small,))
        (g,) = add(f"b{k}", (wide,), (small,))
    values = tuple(Value(s.name, k) for k, s in enumerate(storages))
    return Graph(tuple(ops), values, tuple(storages), (0,), tuple(results))


@pytest.mark.parametrize("in_place", [False, True])
def test_no_plan_needs_less(in_place: bool) -> None:
    surpassed = tried = 0
    for seed in range(150):
        graph = random_graph(seed, 3 + seed % 4, calls=0.0, updates=0.2)
        if not in_place:
            graph = graph.with_ops(tuple(replace(op, overwrites=()) for op in graph.ops))
        try:
            best = min(p.nbytes for p in optimum(graph))
        except RuntimeError:  # too many states
            continue
        found, _ = last_run_bound(Relaxation(graph, in_place=in_place), graph.static_bytes)
        assert found <= best
        tried += 1
        surpassed += found > graph.static_bytes
    assert tried > 100 and surpassed > tried // 2


def test_gradients_that_pile_up_are_seen_and_a_plan_gets_there() -> None:
    graph = gradients(2, 256, 64)
    best = min(p.nbytes for p in optimum(graph, most=400_000))
    bound = lower_bound(graph)
    assert graph.static_bytes + 2 * 256 < bound <= best
    deep = gradients(8, 256, 64)
    assert lower_bound(deep) >= 64 + 2 * 256 + 7 * 64  # all gradients but those of the last layer to run
    assert deep.ops[lower_bound(deep).op].name[0] in "wh"


def test_what_can_wait_elsewhere_weakens_it() -> None:
    graph = gradients(8, 256, 64)
    away = dict.fromkeys(range(len(graph.storages)), 0)
    found, at = last_run_bound(Relaxation(graph, away), 0)
    assert at >= 0 and found <= 64 + 2 * 256 + 2 * 64 < last_run_bound(Relaxation(graph), 0)[0]


def test_a_larger_number_that_is_known_stays_and_no_result_means_no_more() -> None:
    graph = chain(12)
    peak = replay(graph, baseline(graph)).peak
    assert last_run_bound(Relaxation(graph), peak) == (peak, -1)
    assert last_run_bound(Relaxation(graph), 0)[0] <= lower_bound(graph)


def test_ops_that_run_once_leave_what_they_drew() -> None:
    graph = gradients(4, 256, 64)
    drawn = graph.with_ops(tuple(replace(op, random=True) if op.name[0] == "h" else op for op in graph.ops))
    found = [last_run_bound(Relaxation(g, redraw=False), 0)[0] for g in (graph, drawn)]
    assert found[1] > found[0]


def wired(*rows: tuple[str, tuple[str, ...], dict[str, int]], results: str, inputs: str = "x") -> Graph:
    """Ops by name, the storages that each reads (``s!``: and writes), and those that it makes, with their bytes."""
    names, sizes = [inputs], [64]
    for _, _, made in rows:
        names += made
        sizes += made.values()
    at = {name: k for k, name in enumerate(names)}
    ops = tuple(
        Op(
            name,
            name,
            tuple(at[r.rstrip("!")] for r in reads),
            tuple(at[m] for m in made),
            mutates=tuple(at[r[:-1]] for r in reads if r.endswith("!")),
            time=1.0,
        )
        for name, reads, made in rows
    )
    storages = tuple(
        Storage(n, b, "input" if n == inputs else "temporary") for n, b in zip(names, sizes, strict=True)
    )
    values = tuple(Value(n, k) for k, n in enumerate(names))
    return Graph(ops, values, storages, (0,), tuple(at[r] for r in results.split()))


def test_what_an_op_reads_had_to_be_made_beside_the_rest() -> None:
    graph = wired(
        ("a", ("x",), {"a": 256}), ("b", ("a",), {"b": 256}), ("h", ("x",), {"h": 256}),
        ("g", ("h",), {"g": 256}), ("k", ("b", "g"), {"k": 16}), results="k",
    )  # fmt: skip
    best = min(p.nbytes for p in optimum(graph))
    assert last_run_bound(Relaxation(graph), 0)[0] == best == 64 + 3 * 256


def test_an_earlier_version_is_not_made_of_the_last() -> None:
    """Each result needs another version of what is added to in place, and something large."""
    rows: list[tuple[str, tuple[str, ...], dict[str, int]]] = [("r", ("x",), {"r": 32})]
    for k in range(3):
        rows += [(f"w{k}", ("r",), {f"w{k}": 256}), (f"d{k}", (f"w{k}",), {f"d{k}": 32})]
        rows += [(f"v{k}", (f"w{k}",), {f"v{k}": 32}), (f"r{k}", ("r!", f"v{k}"), {})]
    graph = wired(*rows, results="d0 d1 d2 r")
    best = min(p.nbytes for p in optimum(graph, most=300_000))
    found, _ = last_run_bound(Relaxation(graph), 0)
    assert 64 + 32 + 256 + 2 * 32 <= found <= best


def test_cuts_of_a_network_of_which_little_changes_are_those_from_scratch() -> None:
    compared = 0
    for seed in range(300):
        rng = random.Random(seed)
        nodes, edges = rng.randint(3, 14), rng.randint(1, 40)
        switches = rng.randint(0, edges)
        tail, head = (np.array([rng.randrange(nodes) for _ in range(edges)], np.int32) for _ in range(2))
        capacity = np.array(
            [rng.choice((0, 1, 2, 3, 7)) if e < switches else 0 for e in range(edges)], np.int64
        )
        cuts = _core.Cuts(nodes, tail, head, capacity, 0, 1, switches)
        for _ in range(8):
            opened = np.array([rng.random() < 0.5 for _ in range(edges - switches)], np.uint8)
            free = np.array(sorted(rng.sample(range(switches), min(switches, rng.randint(0, 4)))), np.int64)
            now = capacity.copy()
            now[switches:][opened > 0] = 1 << 60
            now[free] = 0
            want = int(_core.min_cut(nodes, tail, head, now, 0, 1)[0])
            if want < 1 << 59:
                assert cuts.value(opened, free) == want
                compared += want > 0
    assert compared > 500


def test_sums_over_many_steps_take_few_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two results is a sum over steps, added to in place: the last addend lies beside both. That no addition
    of the chain can be the last is seen in one go, not once more for each."""
    rows: list[tuple[str, tuple[str, ...], dict[str, int]]] = [("f0", ("x",), {"f0": 8})]
    rows += [(f"f{t + 1}", (f"f{t}",), {f"f{t + 1}": 8}) for t in range(40)]
    rows += [(r, ("f0",), {r: 256}) for r in "ab"]
    for t in range(1, 40):
        for r in "ab":
            rows += [(f"{r}{t}", (f"f{t}",), {f"{r}{t}": 256}), (f"+{r}{t}", (f"{r}!", f"{r}{t}"), {})]
    graph = wired(*rows, results="a b")
    cuts, cut = [], last_runs._LastRuns.cut
    monkeypatch.setattr(last_runs._LastRuns, "cut", lambda *args: cuts.append(1) or cut(*args))
    assert last_run_bound(Relaxation(graph), 0)[0] >= 64 + 3 * 256
    assert len(cuts) < 12 * len(graph.ops)
