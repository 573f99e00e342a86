"""All named planners on the models of the tests: peak, arena and extra time, and ours in the same bytes.

    python benchmarks/planners.py [KIND ...] [--write]

Kinds: training (one step of a model of PyTorch's), inference (its forward pass), onnx (a file), tensorflow (a
GraphDef of a training step, where TensorFlow is installed), hlo (scheduled modules of XLA's). Times are modeled
from FLOPs and bytes, so that nothing here depends on the machine. ``--write`` puts the tables into
docs/planners-compared.md; kinds that were not asked for stay as they are there. Takes about three minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pages
from rich.console import Console

from tightship import api, sources
from tightship.analysis.bounds import lower_bound
from tightship.errors import Infeasible, TightshipError
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.simulate import baseline, replay

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "planners-compared.md"
TRAINING = ("bert", "convnext", "gpt2", "llama", "lstm", "resnet", "swin", "torch_transformer", "unet", "vit")
INFERENCE = ("bert", "gpt2", "resnet", "unet", "vit")
SEARCH = {"work": 30_000_000, "seconds": 60.0}


@dataclass(frozen=True)
class Way:
    """A planner with options, as the table calls it; ``evicts``: it is given the budget."""

    label: str
    name: str
    options: Mapping[str, Any]
    evicts: bool = False


SHARING = (
    Way("`memonger`", "memonger", {}),
    Way("`memonger --any-order`", "memonger", {"any_order": True}),
    Way("`aitemplate`", "aitemplate", {}),
    Way("`aitemplate --streams 4`", "aitemplate", {"streams": 4}),
)
EVICTING = (
    Way("`grappler --level recompute`", "grappler", {"level": "recompute"}, evicts=True),
    Way("`grappler --level swap`", "grappler", {"level": "swap"}, evicts=True),
    Way("`evict/xla --policy xla`", "evict/xla", {"policy": "xla"}, evicts=True),
    Way("`checkpoint`", "checkpoint", {}, evicts=True),
)


def rows(name: str, graph: Graph, *, evict: bool) -> Iterator[list[str]]:
    """The rows of one model: who shares, and, for a training step, who evicts and ours in the same budget."""
    before = replay(graph, baseline(graph))
    yield [name, "none", f"{before.peak:,}", f"{made_bytes(graph):,}", "", ""]
    for way in SHARING:
        yield row(name, way.label, graph, lambda way=way: api.plan_named(graph, way.name, **way.options).plan)
    yield row(name, "**ours**", graph, lambda: api.plan_graph(graph, **SEARCH).plan)
    if not evict:
        return
    budget = (int(lower_bound(graph)) + before.peak) // 2
    yield [name, "*the budget*", f"{budget:,}", "", "", ""]
    for way in EVICTING:
        yield row(
            name, way.label, graph,
            lambda way=way: api.plan_named(graph, way.name, budget, **way.options).plan,
            budget,
        )  # fmt: skip
    yield row(
        name, "**ours, in the budget**", graph,
        lambda: api.plan_graph(graph, budget, **SEARCH).plan,
        budget,
    )  # fmt: skip
    yield row(
        name, "**ours, with offload**", graph,
        lambda: api.plan_graph(graph, budget, allow="recompute,compress,offload", **SEARCH).plan,
        budget,
    )  # fmt: skip


def row(
    name: str, label: str, graph: Graph, made: Callable[[], Plan], budget: int | None = None
) -> list[str]:
    try:
        plan = made()
    except Infeasible as error:
        best = max(error.best_peak, error.placed or 0)
        return [name, label, f"{error.best_peak:,}", "", "", f"no, {best / error.budget - 1:+.1%}"]
    except TightshipError as error:
        return [name, label, "", "", "", type(error).__name__]
    extra = plan.time / plan.time_before - 1 if plan.time_before else 0.0
    placed = max(plan.peak, graph.static_bytes + plan.arena + plan.handed)
    verdict = "" if budget is None else "yes" if placed <= budget else f"no, {placed / budget - 1:+.1%}"
    time = f"{100 * extra:+.1f} %" if abs(extra) >= 5e-4 else "0"
    return [name, label, f"{plan.peak:,}", f"{plan.arena + plan.handed:,}", time, verdict]


def made_bytes(graph: Graph) -> int:
    """What all that a graph makes takes side by side."""
    return sum(s.size for k, s in enumerate(graph.storages) if k not in graph.static)


# --- models ---


def of_torch(names: Iterable[str], capture: str, *, evict: bool) -> Iterator[list[str]]:
    from support.models import MODELS
    from tightship.execute import profile
    from tightship.frontends.torch.capture import step

    for name in names:
        model, _, batch = MODELS[name]()
        sample = batch(0)
        program = getattr(step, capture)(model, sample[0] if isinstance(sample, tuple) else sample)
        yield from rows(name, profile.model(program).graph, evict=evict)


def training() -> Iterator[list[str]]:
    yield from of_torch(TRAINING, "capture_loss", evict=True)


def inference() -> Iterator[list[str]]:
    yield from of_torch(INFERENCE, "capture_forward", evict=False)


def onnx() -> Iterator[list[str]]:
    from support.onnx_models import MODELS, exported

    with tempfile.TemporaryDirectory() as folder:
        for name, model in MODELS.items():
            program = sources.read_onnx(exported(name, Path(folder)), model.shape or None)
            yield from rows(name, program.graph, evict=False)


def tensorflow() -> Iterator[list[str]]:
    if importlib.util.find_spec("tensorflow") is None:
        raise SystemExit("TensorFlow is not installed (pip install 'tightship[tensorflow]')")
    from support.tensorflow_models import MODELS

    with tempfile.TemporaryDirectory() as folder:
        for name, make in MODELS.items():
            proto, fetch = make()
            path = Path(folder) / f"{name}.pb"
            path.write_bytes(proto.SerializeToString())
            yield from rows(name, sources.read_graphdef(path, fetch=fetch).graph, evict=True)


def hlo() -> Iterator[list[str]]:
    """Rematerialization of GPU modules in the limit XLA had, then buffer assignment of all."""
    from support import hlo_data
    from tightship.hlo.remat.cost import work_of
    from tightship.hlo.remat.peak import module_peak
    from tightship.planners import planner

    for name in hlo_data.GPU:
        module = hlo_data.module(name, hlo_data.BEFORE)
        limit = int(float(re.search(r"memory limit of ([\d.]+)MiB", hlo_data.log(name))[1]) * 2**20)  # type: ignore[index]
        yield [name, "none", f"{module_peak(module):,}", "", "", ""]
        flops = work_of(module).flops[module.entry.name]
        total = sum(flops.values())
        for label, who in (("`xla`", "xla"), ("**ours** (`search`)", "search")):
            made = planner(who, "remat").plan(module, limit)
            again = sum(flops.get(made.origin.get(i.name, i.name), 0) for i in made.module.entry.instructions)
            extra = f"{100 * (again / total - 1):+.2f} % FLOPs" if total else ""
            yield [name, label, f"{made.peak_after:,}", "", extra, "yes" if made.met else "no"]
    for name in (*hlo_data.CPU, *hlo_data.GPU):
        module = hlo_data.module(name)
        for label, who in (("`assign --planner xla`", "xla"), ("**ours** (`assign`)", "tight")):
            yield [name, label, "", f"{planner(who, 'assign').plan(module).total:,}", "", ""]


KINDS: dict[str, Callable[[], Iterator[list[str]]]] = {
    "training": training,
    "inference": inference,
    "onnx": onnx,
    "tensorflow": tensorflow,
    "hlo": hlo,
}
HEAD = ("model", "planner", "peak", "arena", "extra time", "in the budget")
MARKS = ("---", "---", "---:", "---:", "---:", "---")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--write", action="store_true", help=f"write the tables to {PAGE.name}")
    chosen = parser.parse_args()
    if unknown := [k for k in chosen.kinds if k not in KINDS]:
        parser.error(f"a kind is one of {', '.join(KINDS)}, got {unknown[0]!r}")
    sys.path.insert(0, str(TESTS))
    console = Console(stderr=True)
    for kind in chosen.kinds or KINDS:
        found, last = [], ""
        for cells in KINDS[kind]():
            if cells[0] != last:
                console.print(f"{kind}: {cells[0]}")
            found.append([cells[0] if cells[0] != last else "", *cells[1:]])
            last = cells[0]
        table = pages.table(HEAD, MARKS, found)
        print(f"\n{kind}\n\n{table}")
        if chosen.write:
            begin, end = (f"<!-- {kind}: {which} -->" for which in ("begin", "end"))
            pages.put(PAGE, begin, end, table)


if __name__ == "__main__":
    main()
