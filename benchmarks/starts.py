"""What it costs to start compiled code: cold, and from what an earlier process has left on disk.

    python benchmarks/starts.py [--models gpt,…] [--budget 60%] [--times 5] [--json]
    python benchmarks/starts.py --commands [--times 5] [--json]

Seconds of the processor, of a process and those that it starts, from ``torch.compile`` to the end of the first
backward pass: stock Inductor, and tightship in compiled mode within ``--budget``. Each start is a process of its
own; each way has caches of its own, empty at first (cold) and filled by the process before (warm). Warm ones take
turns; a row has their medians.

With ``--commands`` what the command line takes: all of a process, the median after a first one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy
import torch
from compiled_models import MODELS

STOCK = "Inductor"
OURS = "tightship compiled"


def started(name: str, budget: str) -> float:
    """Seconds of the first step; an empty budget is stock Inductor."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    before = _seconds()
    if budget:
        options = {"mode": "compiled", "budget": budget, "strict": True}
        compiled = torch.compile(model, backend="tightship", options=options)
    else:
        compiled = torch.compile(model, dynamic=False)
    compiled(*batch).backward()
    return _seconds() - before


def _seconds() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def rows_of(name: str, budget: str, times: int) -> list[dict[str, Any]]:
    """The rows of both ways of a model."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, list[float]] = {STOCK: [], OURS: []}
        for _ in range(1 + times):
            for way, seconds in found.items():
                seconds.append(
                    _in_a_process(name, budget if way == OURS else "", Path(folder) / way.replace(" ", "-"))
                )
    rows = []
    for way, (cold, *warm) in found.items():
        row = {"model": name, "way": way, "budget": budget if way == OURS else None}
        row |= {"cold": round(cold, 2), "warm": round(statistics.median(warm), 2)}
        row["cold_ratio"] = round(cold / found[STOCK][0], 3)
        row["warm_ratio"] = round(statistics.median(warm) / statistics.median(found[STOCK][1:]), 3)
        rows.append(row)
    return rows


def commands(times: int) -> list[dict[str, Any]]:
    """A row for each command, with the seconds of the processor of its whole process."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "small.onnx"
        _small(model)
        calls = {
            "tightship --version": ["--version"],
            "tightship plan --help": ["plan", "--help"],
            "tightship planners": ["planners"],
            "tightship plan small.onnx": ["plan", str(model), "--budget", "100%"],
        }
        environment = _with_bytecode(Path(folder))
        rows = []
        for title, arguments in calls.items():
            seconds = []
            for _ in range(1 + times):
                before = _seconds()
                command = [sys.executable, "-m", "tightship", *arguments]
                subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=environment)
                seconds.append(_seconds() - before)
            rows.append({"command": title, "seconds": round(statistics.median(seconds[1:]), 2)})
    return rows


def _small(path: Path) -> None:
    """Writes a perceptron of eight layers as an ONNX file."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weights, nodes, value = [], [], "x"
    for k in range(8):
        weights.append(numpy_helper.from_array(numpy.zeros((64, 64), numpy.float32), f"w{k}"))
        nodes += [
            helper.make_node("MatMul", [value, f"w{k}"], [f"m{k}"]),
            helper.make_node("Relu", [f"m{k}"], [f"y{k}"]),
        ]
        value = f"y{k}"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 64])
    y = helper.make_tensor_value_info(value, TensorProto.FLOAT, [8, 64])
    graph = helper.make_graph(nodes, "small", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), str(path))


def _with_bytecode(folder: Path) -> dict[str, str]:
    """The environment with the bytecode of Python's files at hand, as that of an installed package is."""
    rest = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return rest | {"PYTHONPYCACHEPREFIX": str(folder / "bytecode")}


def _in_a_process(name: str, budget: str, caches: Path) -> float:
    environment = _with_bytecode(caches) | {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TIGHTSHIP_CACHE": str(caches / "tightship"),
    }
    command = [sys.executable, __file__, "--models", name, "--budget", budget, "--start"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="gpt", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--budget", default="60%", help="of stock Inductor's peak, or bytes")
    parser.add_argument("--times", type=int, default=5, help="warm starts of each way")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--commands", action="store_true", help="what the command line takes")
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.models.split(",")
    if unknown := [n for n in names if n not in MODELS]:
        parser.error(f"no model {unknown[0]!r}: {', '.join(MODELS)}")
    if given.start:
        print(started(names[0], given.budget))
        return
    rows = commands(given.times) if given.commands else []
    for row in rows if not given.json else ():
        print(" | ".join(str(x) for x in row.values()))
    for name in names if not given.commands else ():
        for row in rows_of(name, given.budget, given.times):
            rows.append(row)
            if not given.json:
                print(" | ".join(str(x) for x in row.values()), flush=True)
    if given.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
