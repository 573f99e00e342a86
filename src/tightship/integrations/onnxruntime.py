"""A model as onnxruntime makes it and runs it.

What the runtime's optimizer makes of a model is another graph, of fewer values and ops of its own: `optimized` has it
written, so that it can be planned, and a session of that file finds nothing left to change. `session` runs a planned
file as it should run (`onnx_sessions`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime

from tightship.errors import BadInput, Unsupported
from tightship.frontends.onnx.load import Model, external, fixed_weights, has_sparse, read, tensors
from tightship.frontends.onnx.lower import HALF, Program, lower
from tightship.frontends.onnx.nested import bodies
from tightship.integrations.onnx_sessions import (
    AS_IT_IS,
    LEVELS,
    MERGING,
    PLANNED,
    Arena,
    Measured,
    arena,
    measure,
    optimized_file,
    session_options,
    started,
)
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
    found = _optimized(model.path, folder / f"{model.path.stem}.onnx", level, program)
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
    return replace(made, notes=(*kept, *notes), level=level)


def _optimized(source: Path, path: Path, level: str, program: Program) -> Model:
    """What a session makes of the model at ``source``, in a file at ``path``."""
    model, entries = program.model, dict[str, str]()
    if program.graph.static_bytes > _INLINE or any(external(t) for t in tensors(model.proto)):
        entries["session.optimized_model_external_initializers_file_name"] = _DATA
        entries["session.optimized_model_external_initializers_min_size_in_bytes"] = "1024"
    optimized_file(source, path, level, entries)
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


# --- inputs ---


def random_feeds(
    path: str | os.PathLike[str], sizes: Mapping[str, tuple[int, ...]], seed: int = 0, below: int = 4
) -> dict[str, Any]:
    """Inputs for a model: normal numbers, whole numbers from 0 to ``below`` (as text for strings), or true, of the
    given shapes; of a sequence as many tensors as its size says, of the shapes of ``name[0]``, ``name[1]``, …"""
    rng = np.random.default_rng(seed)
    graph = read(path, convert=False).proto.graph
    weights = {t.name for t in graph.initializer}
    feeds: dict[str, Any] = {}
    for i in (i for i in graph.input if i.name not in weights):
        kind = i.type.optional_type.elem_type if i.type.WhichOneof("value") == "optional_type" else i.type
        if kind.WhichOneof("value") != "sequence_type":
            feeds[i.name] = _random(kind, sizes[i.name], rng, below)
            continue
        kind, (count,) = kind.sequence_type.elem_type, sizes[i.name]
        feeds[i.name] = [_random(kind, sizes[f"{i.name}[{k}]"], rng, below) for k in range(count)]
    return feeds


def _random(tensor: Any, shape: tuple[int, ...], rng: np.random.Generator, below: int) -> Any:
    kind = onnx.TensorProto.DataType.Name(tensor.tensor_type.elem_type)
    if kind.startswith(("FLOAT", "BFLOAT", "DOUBLE")):
        dtype = {"FLOAT16": np.float16, "DOUBLE": np.float64}.get(kind, np.float32)
        return np.asarray(rng.standard_normal(shape)).astype(dtype)
    if kind == "BOOL":
        return np.ones(shape, dtype=bool)
    if kind == "STRING":
        return rng.integers(0, below, shape).astype(str)
    return np.asarray(rng.integers(0, below, shape)).astype(kind.lower())
