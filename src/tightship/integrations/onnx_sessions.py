"""Sessions of onnxruntime: how they are made, what they say that they used, and two of them side by side.

onnxruntime keeps the order of a file's nodes only with ``ExecutionOrder.PRIORITY_BASED`` (of the nodes that could
run next, the first in the file; ``DEFAULT`` walks back from the results, depth first), frees what is dead only with
``enable_mem_reuse`` off, and keeps cloned nodes only where a session is told `MERGING` among its
``disabled_optimizers``, or does not optimize.

`optimized_file` and `compared` run in a process of their own (`own_process`): some models crash the runtime. Nothing
else of tightship is imported there, so that such a process takes under half a second of the processor.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime

from tightship.errors import BadInput, TightshipError
from tightship.files import scratch_folder
from tightship.integrations.own_process import Crashed, TooLong, own_process

__all__ = [
    "AS_IT_IS",
    "LEVELS",
    "MERGING",
    "PLANNED",
    "SECONDS",
    "Arena",
    "DoesNotRun",
    "FileDoesNotRun",
    "Measured",
    "Sessions",
    "Use",
    "arena",
    "compared",
    "measure",
    "optimized_file",
    "session_options",
    "started",
]

_LEVEL: Final = {"disabled": "ORT_DISABLE_ALL"} | {
    level: f"ORT_ENABLE_{level.upper()}" for level in ("basic", "extended", "all")
}
LEVELS: Final = tuple(_LEVEL)

MERGING: Final = "CommonSubexpressionElimination"
"""The optimizer that makes one node of equal ones: of a node and its clone, too."""


AS_IT_IS: Final[Mapping[str, Any]] = {
    "keep_order": False, "level": "all", "reuse": True, "pattern": True, "fuse_quantized": True,
}  # fmt: skip
PLANNED: Final[Mapping[str, Any]] = {**AS_IT_IS, "keep_order": True, "reuse": False, "pattern": False}
"""What a session does by default, and how a planned file runs best: arguments of `session_options`."""
_UNFUSED: Final = "session.disable_quant_qdq"

_SLOWER: Final = 1.03
"""A ratio of times from which on a file is called slower: medians of runs on a busy machine differ by less."""
SECONDS, _ROUNDS, _LEAST = 3.0, 25, 5
"""Time for rounds, and how many there are at most and at least."""


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


# --- what runs say ---


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


@dataclass(frozen=True)
class Use:
    """What a session takes for a run: seconds of a processor, and bytes: ``requested`` at the end of a node at most,
    ``arena`` at any moment, ``scratch`` of it within the node ``at``, and what the arena ``holds`` in the end."""

    time: float
    requested: int
    arena: int
    holds: int
    scratch: int = 0
    at: str = ""


@dataclass(frozen=True)
class Sessions:
    """A model with the runtime's defaults beside a file with options of its own; ``ratio`` of their times, the file's
    to the default's, and the largest ``difference`` between results (0: they are bit-identical; infinite: of other
    shapes, or where no number says how far apart)."""

    default: Use
    file: Use
    ratio: float
    difference: float

    @property
    def slower(self) -> bool:
        return self.ratio > _SLOWER

    @property
    def larger(self) -> bool:
        pairs = ("requested", "arena", "holds")
        return any(getattr(self.file, k) > getattr(self.default, k) for k in pairs)

    @property
    def better(self) -> bool:
        """Not slower, not larger, and equal."""
        return not self.slower and not self.larger and self.difference == 0


# --- sessions side by side ---


class DoesNotRun(BadInput):
    """A model that loads, and does not run on the inputs that it was given."""


class FileDoesNotRun(BadInput):
    """A written file that the runtime does not load or run, although it runs the model on the same inputs."""


def compared(
    model: str | os.PathLike[str],
    file: str | os.PathLike[str],
    given: Mapping[str, Any],
    feeds: Mapping[str, Any],
    seconds: float = SECONDS,
) -> Sessions:
    """``model`` in a default session, and ``file`` with options ``given``, on the same inputs, in their own process.

    Raises ``BadInput`` where the runtime does not load or run one of them, or crashes.
    """
    try:
        return own_process(_compared, os.fspath(model), os.fspath(file), dict(given), dict(feeds), seconds)
    except Crashed as error:
        raise _crash(error, "running", model) from error


def _compared(
    model: str, file: str, given: Mapping[str, Any], feeds: Mapping[str, Any], seconds: float
) -> Sessions:
    try:
        first = _sides(model, AS_IT_IS, feeds)
    except TightshipError:
        raise
    except Exception as error:  # the runtime's classes have no common one
        said = " ".join(str(error).split())
        raise DoesNotRun(f"onnxruntime does not run it: {said}", place=model) from error
    try:
        second = _sides(file, given, feeds)
    except Exception as error:
        said = error.rule if isinstance(error, BadInput) else " ".join(str(error).split())
        raise FileDoesNotRun(f"onnxruntime runs it, and not the planned file: {said}", place=model) from error
    with_profile, arenas, running = zip(first, second, strict=True)
    times = _times([lambda s=s: s.run(None, dict(feeds)) for s in running], seconds)
    uses = [
        Use(statistics.median(t), run.peak, held.peak, held.holds, held.scratch, held.node)
        for t, run, held in zip(times, with_profile, arenas, strict=True)
    ]
    ratio = statistics.median(b / max(a, 1e-9) for a, b in zip(*times, strict=True))
    one, other = (run.outputs for run in with_profile)
    return Sessions(uses[0], uses[1], ratio, max(map(_difference, one, other), default=0.0))


def _sides(path: str, given: Mapping[str, Any], feeds: Mapping[str, Any]) -> tuple[Measured, Arena, Any]:
    """A run, what its arena needs, and a session that has run once."""
    merge = not given["keep_order"]
    run = measure(path, feeds, **given, merge=merge)
    held = arena(path, feeds, _quiet(given), merge=merge)
    running = started(path, _quiet(given), merge=merge)
    running.run(None, dict(feeds))
    return run, held, running


def _quiet(given: Mapping[str, Any]) -> Any:
    options = session_options(**given)
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return options


def _times(runs: Sequence[Any], seconds: float) -> list[list[float]]:
    """Times of runs that take turns, in an order that changes from round to round."""
    for run in runs:
        run()
        run()
    times: list[list[float]] = [[] for _ in runs]
    began = time.perf_counter()
    while len(times[0]) < _LEAST or (len(times[0]) < _ROUNDS and time.perf_counter() - began < seconds):
        turn = list(enumerate(runs))
        for k, run in turn if len(times[0]) % 2 else turn[::-1]:
            start = time.process_time()
            run()
            times[k].append(time.process_time() - start)
    return times


def _difference(a: Any, b: Any) -> float:
    """The most that results differ by: 0 where they have the same bits, infinite where no number says it."""
    if not isinstance(a, np.ndarray):
        same = isinstance(a, list) and isinstance(b, list) and len(a) == len(b)
        return max(map(_difference, a, b), default=0.0) if same else _of_others(a, b)
    if not isinstance(b, np.ndarray) or a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if a.dtype.kind not in "fc":
        return 0.0 if np.array_equal(a, b) else math.inf
    if a.tobytes() == b.tobytes():
        return 0.0
    other = (a != b) & ~(np.isnan(a) & np.isnan(b))  # of NaN the bits are nobody's
    signs = (np.signbit(a) != np.signbit(b)) & (a == 0) if a.dtype.kind == "f" else np.zeros_like(other)
    if not other.any():
        return float(np.finfo(a.dtype).smallest_subnormal) if signs.any() else 0.0
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        most = float(np.max(np.abs(a[other].astype(wide) - b[other].astype(wide))))
    return math.inf if math.isnan(most) else most


def _of_others(a: Any, b: Any) -> float:
    """Maps, numbers, text, or nothing."""
    if isinstance(a, dict) and isinstance(b, dict):
        same = a.keys() == b.keys()
        return max((_of_others(a[k], b[k]) for k in a), default=0.0) if same else math.inf
    if isinstance(a, float) and isinstance(b, float):
        return _difference(np.array(a), np.array(b))
    return 0.0 if a == b else math.inf


# --- the optimizer ---


def optimized_file(
    source: str | os.PathLike[str], path: str | os.PathLike[str], level: str, entries: Mapping[str, str]
) -> None:
    """Write what the optimizer makes of a model to ``path``; ``entries`` of a session's configuration. Raises
    ``BadInput`` where the runtime does not load it, or crashes."""
    try:
        own_process(_optimized_file, os.fspath(source), os.fspath(path), level, dict(entries))
    except Crashed as error:
        raise _crash(error, "optimizing", source) from error


def _optimized_file(source: str, path: str, level: str, entries: Mapping[str, str]) -> None:
    options = session_options(keep_order=False, level=level, reuse=True)
    options.log_severity_level = 4
    options.optimized_model_filepath = path
    for name, value in entries.items():
        options.add_session_config_entry(name, value)
    started(source, options, merge=True)


def _crash(error: Crashed, doing: str, path: str | os.PathLike[str]) -> BadInput:
    runtime = f"onnxruntime {onnxruntime.__version__}"
    said = f"{runtime} crashed ({error}) {doing} it, as it does without tightship"
    if isinstance(error, TooLong):
        said = f"{runtime} gave {error} {doing} it: look for a loop without an end, or give smaller inputs"
    return BadInput(said, place=os.fspath(path))
