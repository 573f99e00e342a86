"""A model run in onnxruntime as a plan needs it, and the memory the runtime itself says it used.

onnxruntime keeps the order of a file's nodes only with ``ExecutionOrder.PRIORITY_BASED`` (of the nodes that could
run next, the first in the file; ``DEFAULT`` walks back from the results, depth first), frees what is dead only with
``enable_mem_reuse`` off, and keeps cloned nodes only where a session is told `MERGING` among its
``disabled_optimizers``, or does not optimize. What its optimizer makes of a model is another graph, of fewer values
and ops of its own: `optimized` has it written, so that it can be planned, and a session of that file finds nothing
left to change.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime

from tightship.errors import BadInput, Unsupported
from tightship.files import scratch_folder
from tightship.frontends.onnx.load import Model, external, fixed_weights, has_sparse, read, tensors
from tightship.frontends.onnx.lower import HALF, Program, lower
from tightship.frontends.onnx.nested import bodies
from tightship.integrations.onnx_write import KEY_PLAN, KEY_SESSION, data_name, rename_data
from tightship.units import format_bytes

__all__ = [
    "AS_IT_IS",
    "LEVELS",
    "MERGING",
    "PLANNED",
    "Arena",
    "Measured",
    "arena",
    "check_room",
    "measure",
    "optimized",
    "portable",
    "random_feeds",
    "session",
    "session_options",
    "started",
]  # fmt: skip

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


AS_IT_IS: Final[Mapping[str, Any]] = {
    "keep_order": False, "level": "all", "reuse": True, "pattern": True, "fuse_quantized": True,
}  # fmt: skip
PLANNED: Final[Mapping[str, Any]] = {**AS_IT_IS, "keep_order": True, "reuse": False, "pattern": False}
"""What a session does by default, and how a planned file runs best: arguments of `session_options`."""
_UNFUSED: Final = "session.disable_quant_qdq"


def session_options(
    *,
    keep_order: bool = True,
    level: str = "all",
    reuse: bool = False,
    pattern: bool = False,
    fuse_quantized: bool = True,
) -> Any:
    """Options with which onnxruntime runs a planned model's nodes in the file's order and frees what is dead (clones
    stay with ``InferenceSession(…, disabled_optimizers=[MERGING])`` alone, unless ``level`` is ``disabled``).

    ``keep_order`` false is the runtime's default order. ``reuse`` is its default, too: a dead buffer is then kept
    for the next value of the same shape, which costs more memory than it saves; views and results written over an
    input do not need it. ``pattern`` is so as well: from the second run of a shape on the runtime takes one block for
    most values, beside all that the arena has held since the first. ``fuse_quantized``: nodes between
    DequantizeLinear and QuantizeLinear become quantized ones, before which every DequantizeLinear of several readers
    is doubled, whatever the ``level``; in an optimized model nothing is left to fuse, and it would be doubled still.
    """
    options = onnxruntime.SessionOptions()
    order = onnxruntime.ExecutionOrder
    options.execution_order = order.PRIORITY_BASED if keep_order else order.DEFAULT
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, _LEVEL[level])
    options.enable_mem_reuse = reuse
    options.enable_mem_pattern = pattern
    if not fuse_quantized:
        options.add_session_config_entry(_UNFUSED, "1")
    return options


def session(path: str | os.PathLike[str], providers: Sequence[Any] = ("CPUExecutionProvider",)) -> Any:
    """An ``onnxruntime.InferenceSession`` that runs a file that ``tightship plan --write`` wrote as it should run;
    any other file runs as it does by default.

    Raises ``BadInput`` for a file that onnxruntime does not load.
    """
    kept = _kept(path)
    try:
        given = json.loads(kept[KEY_SESSION]) if KEY_SESSION in kept else PLANNED if kept else AS_IT_IS
        given = {"fuse_quantized": True, **given}  # files of earlier versions do not say it
        options = session_options(**{k: given[k] for k in AS_IT_IS})
    except (ValueError, KeyError, TypeError) as error:
        fault = f"its metadata {KEY_SESSION!r} is not what `tightship plan --write` writes"
        raise BadInput(fault, place=os.fspath(path)) from error
    return started(path, options, merge=not given["keep_order"], providers=providers)


def _kept(path: str | os.PathLike[str]) -> dict[str, str]:
    """What a planned file says of itself; nothing for any other file. The model, plan and all, is gone again before a
    session takes memory of its own."""
    props = read(path, convert=False).proto.metadata_props
    return {e.key: e.value if e.key == KEY_SESSION else "" for e in props if e.key in (KEY_SESSION, KEY_PLAN)}


def started(
    path: str | os.PathLike[str],
    options: Any,
    *,
    merge: bool,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
) -> Any:
    """A session; ``merge``: equal nodes may become one. Raises ``BadInput`` for what the runtime does not load."""
    try:
        return onnxruntime.InferenceSession(
            os.fspath(path), options, list(providers), disabled_optimizers=None if merge else [MERGING]
        )
    except Exception as error:  # the runtime has a dozen classes of its own, without a common one
        said = " ".join(str(error).split())
        raise BadInput(f"onnxruntime does not load it: {said}", place=os.fspath(path)) from error


# --- room for sessions ---

_PREPARED: Final = 2
"""A session's bytes over its weights', at most: the weights, and what kernels make of them when they are loaded."""


def check_room(program: Program, sessions: int) -> None:
    """Raise ``Unsupported`` where ``sessions`` of a model at once may need more memory than is free, so that none of
    them ends this process."""
    weights = max(program.graph.static_bytes, *program.model.stamp[:1])  # trees are in the file alone
    need, free = sessions * _PREPARED * weights, _free_memory()
    if need <= free:
        return
    what = "a session of this size" if sessions == 1 else f"running {sessions} sessions of this size"
    sizes = f"{format_bytes(need)}, and {format_bytes(int(free))} are free"
    fault = f"weights, and what kernels make of them, may need {sizes}"
    raise Unsupported(what, fault, "use a machine with more memory")


def _free_memory() -> float:
    """Bytes that a process can have before the system takes some back; infinite where the system does not say."""
    found = math.inf
    with contextlib.suppress(OSError, StopIteration, ValueError):
        line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
        found = 1024.0 * int(line.split()[1])
    for folder, most, now, cache in _LIMITS:
        with contextlib.suppress(OSError, StopIteration, ValueError):
            rows = (x.split() for x in (Path(folder) / "memory.stat").read_text().splitlines())
            dropped = next(int(n) for name, n in rows if name == cache)
            limit, used = (int((Path(folder) / name).read_text()) for name in (most, now))
            found = min(found, max(0, limit - used + dropped))
    return found


_LIMITS: Final = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Where a container's limit stands (cgroups 2 and 1), what is in use, and which of it is files that can go."""


# --- the graph that the runtime makes of a model ---

_PASSES: Final = 4
"""Times that float16 models are optimized at most, until nothing changes: casts are put in last, and then join."""
_DATA: Final = "weights.data"
_INLINE: Final = 1 << 30
"""Bytes of a model's weights up to which those of the optimized one are written into its file."""


def optimized(
    program: Program, folder: Path, sizes: Any = None, level: str = "all", *, target: Path | None = None
) -> Program:
    """What onnxruntime's optimizer makes of a model, written into ``folder`` and read for the same ``sizes``. Nodes
    that are the same for every run are computed once, others fused or laid out anew. Data beside it has a name that
    is free beside the ``target`` to be written, where one is given.

    Raises ``BadInput`` where the runtime does not load the model, ``Unsupported`` for sparse weights, and as `lower`.
    """
    model = program.model
    source, found = model.path, None
    for again in range(_PASSES if HALF in program.notes else 1):
        within = folder / str(again)  # each with its data, which a session of the one before reads meanwhile
        within.mkdir()
        path = within / f"{model.path.stem}.onnx"
        before = found
        found = _optimized(source, path, level, program)
        if before is not None and _kinds(before) == _kinds(found):
            break
        source = path
    assert found is not None
    if has_sparse(found.proto):
        fault = "onnxruntime writes its sparse weights as onnx does not allow"
        raise Unsupported(str(model.path), fault, "plan with --optimize none")
    if target is not None and (data := found.path.with_name(_DATA)).exists():
        rename_data(found, data, data_name(target, data))
    fixed_weights(found.proto, {i.name for i in model.proto.graph.input})
    meta = program.graph.meta
    notes = (
        f"planned after onnxruntime {onnxruntime.__version__}'s optimization ({level}): {portable(found)[1]}",
    )
    made = lower(found, sizes, views=bool(meta["views"]), in_place=str(meta["in_place"]))
    kept = (n for n in made.notes if n != HALF)
    return replace(made, notes=(*kept, *notes), fused=level in ("extended", "all"))


def _kinds(model: Model) -> list[str]:
    return sorted(n.op_type for n in model.proto.graph.node)


def _optimized(source: Path, path: Path, level: str, program: Program) -> Model:
    """What a session makes of the model at ``source``, in a file at ``path``."""
    model = program.model
    options = session_options(keep_order=False, level=level, reuse=True)
    options.log_severity_level = 4
    options.optimized_model_filepath = os.fspath(path)
    if program.graph.static_bytes > _INLINE or any(external(t) for t in tensors(model.proto)):
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", _DATA)
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_min_size_in_bytes", "1024"
        )
    started(source, options, merge=True)
    return read(path, convert=False)


def portable(model: Model) -> tuple[str, str]:
    """Where an optimized model runs, as one word and as a sentence's end."""
    domains, work = set(), [model.proto.graph]
    while work:
        for node in work.pop().node:
            work += bodies(node)
            domains.add(node.domain)
    if "com.microsoft.nchwc" in domains:
        said = "its layout is this processor's kind's; where the model should run elsewhere, give --optimize extended"
        return "processor", said
    if any(d.startswith("com.microsoft") for d in domains):
        return "onnxruntime", "it has onnxruntime's own ops, which other runtimes have not"
    return "any", "it has onnx's ops alone, for any runtime"


# --- measuring ---


def measure(
    path: str | os.PathLike[str],
    feeds: Mapping[str, Any],
    *,
    keep_order: bool = True,
    level: str = "disabled",
    reuse: bool = False,
    pattern: bool = False,
    fuse_quantized: bool = True,
    merge: bool = False,
) -> Measured:
    """Run a model once to warm up and once measured, on one thread; the options are those of `session_options`, but
    there is never a ``pattern``. ``merge``: equal nodes may be made one (`MERGING`), as the runtime does by default
    from ``basic`` on."""
    del pattern  # with it one block is reserved for all, and nodes request nothing
    options = session_options(keep_order=keep_order, level=level, reuse=reuse, fuse_quantized=fuse_quantized)
    options.intra_op_num_threads = 1
    return _read(*_profiled(path, options, feeds, runs=2, merge=merge))


@dataclass(frozen=True)
class Arena:
    """What a session's arena needed at most (``peak``), with ``scratch`` bytes of it inside ``node``, which gave them
    back before it ended, and what the arena ``holds`` in the end."""

    peak: int
    holds: int
    scratch: int = 0
    node: str = ""


def arena(path: str | os.PathLike[str], feeds: Mapping[str, Any], options: Any, *, merge: bool) -> Arena:
    """What runs of a session take of its arena: values, nodes' scratch, and what nodes have made of weights; in the
    way that runs go on (the runtime reserves one block for most values from the second run of a shape on)."""
    events, _ = _profiled(path, options, feeds, runs=4, merge=merge)
    found = Arena(0, 0)
    for e in sorted(events, key=lambda e: e["ts"]):
        if e.get("cat") == "Node" and "mem_arena_held" in (said := e.get("args", {})):
            peak, holds = int(said["mem_in_use_peak"]), max(found.holds, int(said["mem_arena_held"]))
            if peak > found.peak:
                name = str(e["name"]).removesuffix("_kernel_time")
                found = Arena(peak, holds, peak - int(said["mem_bytes_in_use"]), name)
            found = replace(found, holds=holds)
    return found


def _profiled(
    path: str | os.PathLike[str], options: Any, feeds: Mapping[str, Any], *, runs: int, merge: bool
) -> tuple[list[dict[str, Any]], Any]:
    """Events of a session's profile, and results of its last run."""
    options.enable_profiling = True
    options.log_severity_level = 3
    with scratch_folder() as folder:
        options.profile_file_prefix = str(folder / "profile")
        running = started(path, options, merge=merge)
        for _ in range(runs):
            outputs = running.run(None, dict(feeds))
        return json.loads(Path(running.end_profiling()).read_text()), outputs


def _read(events: list[dict[str, Any]], outputs: Any) -> Measured:
    runs: list[list[dict[str, Any]]] = [[]]
    for e in sorted(
        events, key=lambda e: (e["ts"], e.get("name") != "model_run")
    ):  # written when it has ended
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
    path: str | os.PathLike[str], sizes: Mapping[str, tuple[int, ...]], seed: int = 0, below: int = 4
) -> dict[str, Any]:
    """Inputs for a model: normal numbers, whole numbers from 0 to ``below`` (as text for strings), or true, of the
    given shapes."""
    rng = np.random.default_rng(seed)
    options = session_options(level="disabled")
    options.log_severity_level = 3
    feeds: dict[str, Any] = {}
    for i in started(path, options, merge=True).get_inputs():
        shape = sizes[i.name]
        if "float" in i.type or "double" in i.type:
            dtype = {"tensor(float16)": np.float16, "tensor(double)": np.float64}.get(i.type, np.float32)
            feeds[i.name] = rng.standard_normal(shape).astype(dtype)
        elif "bool" in i.type:
            feeds[i.name] = np.ones(shape, dtype=bool)
        elif "string" in i.type:
            feeds[i.name] = rng.integers(0, below, shape).astype(str)
        else:
            feeds[i.name] = rng.integers(0, below, shape).astype(i.type[len("tensor(") : -1])
    return feeds
