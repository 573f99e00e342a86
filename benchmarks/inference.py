"""Inference before shipping: orders, bounds and arenas of real models, and what runtimes really use.

    python benchmarks/inference.py [--quick] [--models bert,…] [--cache DIR] [--write]

ONNX: models exported from PyTorch with random weights, for one input each. Bytes are what nodes make, results
included; weights and inputs are not counted. ``file order`` is the plan of the exporter's order, ``ours`` of the
order found, ``bound`` a peak that no order goes below (computed, or proved by a search that left nothing out),
``arena`` the bytes in which everything is placed. Then what onnxruntime says it used
(``mem_bytes_requested_in_use``): ``runtime`` in its own order and with its own reuse of buffers, ``file there`` in
the file's order, ``ours there`` our file; results are compared to the bit. Then the least peak that recomputation is
found to reach, with the ``bound`` that no plan goes below, and the nodes that run again.

PyTorch: ``tightship.infer`` against the eager model at batch 1 on one thread: passes take turns, times are medians of
processor time. ``--write`` puts the tables into docs/inference.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

import pages  # noqa: E402

import tightship  # noqa: E402
from support.onnx_models import MODELS, exported  # noqa: E402
from tightship import api  # noqa: E402
from tightship.analysis.bounds import lower_bound  # noqa: E402
from tightship.errors import Infeasible  # noqa: E402
from tightship.frontends.onnx.load import read  # noqa: E402
from tightship.frontends.onnx.lower import lower  # noqa: E402
from tightship.graph import Graph  # noqa: E402
from tightship.integrations.onnx_write import write_model  # noqa: E402
from tightship.integrations.onnxruntime import measure, random_feeds  # noqa: E402
from tightship.plan import Plan  # noqa: E402
from tightship.planners.order.best import order_bound  # noqa: E402
from tightship.units import format_bytes  # noqa: E402

PAGE = ROOT / "docs" / "inference.md"


def onnx_rows(names: list[str], cache: Path, *, small: bool) -> Iterator[tuple[str, ...]]:
    for name in names:
        path = exported(name, cache, small=small)
        started = time.perf_counter()
        program = lower(read(path), MODELS[name].shape)
        graph = program.graph
        plan = api.plan_graph(graph).plan
        seconds = time.perf_counter() - started
        inputs = [graph.values[i] for i in graph.inputs]
        feeds = random_feeds(path, {v.name: v.shape for v in inputs})
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.onnx"
            write_model(program, plan, out)
            theirs = measure(path, feeds, keep_order=False, reuse=True)
            file = measure(path, feeds)
            ours = measure(out, feeds)
        equal = all(
            np.array_equal(a, b, equal_nan=True) for a, b in zip(file.outputs, ours.outputs, strict=True)
        )
        bound = order_bound(graph) - graph.static_bytes
        before, after = plan.peak_before - plan.static, plan.peak - plan.static
        yield (
            name,
            MODELS[name].shape,
            str(len(graph.ops)),
            *(format_bytes(n) for n in (before, after, bound, plan.arena)),
            *(format_bytes(n) for n in (theirs.peak, file.peak, ours.peak)),
            f"{100 * (ours.peak / theirs.peak - 1):+.1f} %",
            "equal" if equal else "DIFFERENT",
            f"{seconds:.1f} s",
        )


HEAD = (
    "model", "input", "nodes", "file order", "ours", "bound", "arena", "runtime", "file there", "ours there",
    "change", "results", "planned in",
)  # fmt: skip


def least_rows(names: list[str], cache: Path, *, small: bool) -> Iterator[tuple[str, ...]]:
    for name in names:
        path = exported(name, cache, small=small)
        program = lower(read(path), MODELS[name].shape)
        graph = program.graph
        alone = api.plan_graph(graph).plan
        plan, seconds = least(graph)
        inputs = [graph.values[i] for i in graph.inputs]
        feeds = random_feeds(path, {v.name: v.shape for v in inputs})
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.onnx"
            write_model(program, plan, out)
            file, ours = measure(path, feeds), measure(out, feeds)
        equal = all(
            np.array_equal(a, b, equal_nan=True) for a, b in zip(file.outputs, ours.outputs, strict=True)
        )
        bound = int(lower_bound(graph)) - graph.static_bytes
        yield (
            name,
            *(
                format_bytes(n)
                for n in (alone.peak - alone.static, plan.peak - plan.static, ours.peak, bound)
            ),
            str(plan.count("recompute")),
            f"{100 * (plan.time / alone.time - 1):+.1f} %",
            "equal" if equal else "DIFFERENT",
            f"{seconds:.1f} s",
        )


def least(graph: Graph) -> tuple[Plan, float]:
    """The plan with the least peak that is found, and the seconds it took: asked for what cannot be, then for what
    was reached."""
    started = time.perf_counter()
    budget = graph.static_bytes
    while True:
        try:
            return api.plan_graph(graph, budget, seconds=10.0).plan, time.perf_counter() - started
        except Infeasible as error:
            budget = max(error.best_peak, error.placed or 0, budget + 1)


LEAST_HEAD = (
    "model", "order alone", "least", "ours there", "bound", "nodes again", "modeled time", "results", "planned in",
)  # fmt: skip


def torch_rows(names: list[str], rounds: int) -> Iterator[tuple[str, ...]]:
    for name in names:
        module, args, _ = MODELS[name].make(True)
        module.eval()
        args = _first(args)
        runs: dict[str, Callable[[], Any]] = {"eager": lambda m=module, a=args: m(*a)}
        kinds = {}
        for fresh in (True, False):
            kinds[fresh] = tightship.infer(module, args, fresh=fresh, strict=True)
            runs[f"fresh={fresh}"] = lambda r=kinds[fresh], a=args: r(*a)
        times: dict[str, list[float]] = {k: [] for k in runs}
        with torch.no_grad():
            want = torch.utils._pytree.tree_leaves(runs["eager"]())
            for run in runs.values():
                got = torch.utils._pytree.tree_leaves(run())
                assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), name
            for _ in range(rounds):
                for key, run in runs.items():
                    start = time.process_time()
                    run()
                    times[key].append(time.process_time() - start)
        median = {k: statistics.median(v) for k, v in times.items()}
        used = kinds[False].measure()
        yield (
            name,
            str(len(kinds[False].graph.ops)),
            *(
                format_bytes(used[k] - used["static"])
                for k in ("unplanned_peak", "planned_peak", "measured_peak")
            ),
            format_bytes(used["outside"]),
            f"{1e3 * median['eager']:.2f} ms",
            f"{median['fresh=True'] / median['eager']:.2f}",
            f"{median['fresh=False'] / median['eager']:.2f}",
        )


TORCH_HEAD = (
    "model", "ops", "eager's order", "planned", "measured", "outside the arena", "eager", "fresh", "in the arena",
)  # fmt: skip


def _first(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree[:1]
    return type(tree)(_first(x) for x in tree)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return pages.table(head, ("---",) + ("---:",) * (len(head) - 1), rows)


def written(mark: str, text: str) -> None:
    pages.put(PAGE, f"<!-- begin: {mark} -->", f"<!-- end: {mark} -->", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "tightship" / "onnx-models")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen.cache.mkdir(parents=True, exist_ok=True)
    names = chosen.models.split(",")
    for mark, head, rows in (
        ("onnx", HEAD, onnx_rows(names, chosen.cache, small=chosen.quick)),
        ("least", LEAST_HEAD, least_rows(names, chosen.cache, small=chosen.quick)),
        ("torch", TORCH_HEAD, torch_rows(names, chosen.rounds)),
    ):
        text = table(head, list(rows))
        print(text, flush=True)
        if chosen.write:
            written(mark, text)


if __name__ == "__main__":
    main()
