"""A model run in onnxruntime as a plan needs it, and the memory the runtime itself says it used.

onnxruntime keeps the order of a file's nodes only with ``ExecutionOrder.PRIORITY_BASED``, frees what is dead only
with ``enable_mem_reuse`` off, and keeps cloned nodes only without graph optimization, or with ``ORT_ENABLE_BASIC``
where a session is told `MERGING` among its ``disabled_optimizers`` (higher levels also change numbers).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime

__all__ = ["LEVELS", "MERGING", "Measured", "measure", "random_feeds", "session_options"]

_LEVEL: Final = {"disabled": "ORT_DISABLE_ALL"} | {
    level: f"ORT_ENABLE_{level.upper()}" for level in ("basic", "extended", "all")
}
LEVELS: Final = tuple(_LEVEL)

MERGING: Final = "CommonSubexpressionElimination"
"""The optimizer that makes one node of equal ones: of a node and its clone, too."""


@dataclass(frozen=True)
class Measured:
    """One run: its results, the nodes in the order they ran, and bytes.

    ``peak`` is the most that the runtime had requested at the end of a node (``mem_bytes_requested_in_use``) above
    what it held before the first: what nodes made, results included; weights and inputs are not, nor is scratch
    that a node gives back before it ends.
    """

    outputs: tuple[Any, ...]
    order: tuple[str, ...]
    peak: int
    peak_node: str


def session_options(*, keep_order: bool = True, level: str = "disabled", reuse: bool = False) -> Any:
    """Options with which onnxruntime runs a planned model's nodes in the file's order, clones included, and frees
    what is dead (from ``basic`` on clones stay with ``InferenceSession(…, disabled_optimizers=[MERGING])`` alone).

    ``keep_order`` false is the runtime's default order. ``reuse`` is its default, too: a dead buffer is then kept
    for the next value of the same shape, which costs more memory than it saves; views and results written over an
    input do not need it.
    """
    options = onnxruntime.SessionOptions()
    order = onnxruntime.ExecutionOrder
    options.execution_order = order.PRIORITY_BASED if keep_order else order.DEFAULT
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, _LEVEL[level])
    options.enable_mem_reuse = reuse
    return options


def measure(
    path: str | os.PathLike[str],
    feeds: Mapping[str, Any],
    *,
    keep_order: bool = True,
    level: str = "disabled",
    reuse: bool = False,
    merge: bool = False,
) -> Measured:
    """Run a model once to warm up and once measured, on one thread; the options are those of `session_options`.
    ``merge``: equal nodes may be made one (`MERGING`), as the runtime does by default from ``basic`` on."""
    options = session_options(keep_order=keep_order, level=level, reuse=reuse)
    options.enable_profiling = True
    options.intra_op_num_threads = 1
    options.enable_mem_pattern = False  # or one block is reserved for all, and nodes request nothing
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = onnxruntime.InferenceSession(
            os.fspath(path),
            options,
            ["CPUExecutionProvider"],
            disabled_optimizers=None if merge else [MERGING],
        )
        session.run(None, dict(feeds))
        outputs = session.run(None, dict(feeds))
        events = json.loads(Path(session.end_profiling()).read_text())
    return _read(events, outputs)


def _read(events: list[dict[str, Any]], outputs: Any) -> Measured:
    runs: list[list[dict[str, Any]]] = [[]]
    for e in sorted(events, key=lambda e: e["ts"]):
        if e.get("name") == "model_run":
            runs.append([])
        elif e.get("cat") == "Node" and "mem_bytes_requested_in_use" in e.get("args", {}):
            runs[-1].append(e)
    nodes = max((r for r in runs if r), key=lambda r: r[0]["ts"], default=[])
    if not nodes:
        return Measured(tuple(outputs), (), 0, "")
    held = [int(e["args"]["mem_bytes_requested_in_use"]) for e in nodes]
    start = held[0] - int(nodes[0]["args"]["mem_requested_in_use_delta"])
    top = max(range(len(held)), key=held.__getitem__)
    names = tuple(str(e["name"]).removesuffix("_kernel_time") for e in nodes)
    return Measured(tuple(outputs), names, held[top] - start, names[top])


def random_feeds(
    path: str | os.PathLike[str], sizes: Mapping[str, tuple[int, ...]], seed: int = 0
) -> dict[str, Any]:
    """Inputs for a model: normal numbers, small whole numbers, or true, of the given shapes."""
    rng = np.random.default_rng(seed)
    session = onnxruntime.InferenceSession(
        os.fspath(path), session_options(), providers=["CPUExecutionProvider"]
    )
    feeds: dict[str, Any] = {}
    for i in session.get_inputs():
        shape = sizes[i.name]
        if "float" in i.type or "double" in i.type:
            dtype = {"tensor(float16)": np.float16, "tensor(double)": np.float64}.get(i.type, np.float32)
            feeds[i.name] = rng.standard_normal(shape).astype(dtype)
        elif "bool" in i.type:
            feeds[i.name] = np.ones(shape, dtype=bool)
        else:
            feeds[i.name] = rng.integers(0, 4, shape).astype(i.type[len("tensor(") : -1])
    return feeds
