"""Is a planned ONNX model better where it runs? Sessions of onnxruntime side by side, and the file that is best.

A planned file is never slower than the model in a session with the runtime's own defaults, and never needs more
memory: runs take turns on one thread, the ratio of their processor times is the median over pairs of neighbors, so
that what else a machine does falls on both; memory is what nodes had requested at their ends, and what the arena
needed and holds, scratch within nodes included. Where the planned order is not so, not even with the runtime's own
ways to save time (one block for most values, reuse of buffers), the model is written as it was.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime

from tightship.errors import BadInput, Unsupported
from tightship.files import part_of, unreadable, unwritable
from tightship.frontends.onnx.lower import HALF, Program
from tightship.integrations.onnx_feeds import Draw, draws
from tightship.integrations.onnx_sessions import (
    AS_IT_IS,
    PLANNED,
    SECONDS,
    DoesNotRun,
    FileDoesNotRun,
    Sessions,
    Use,
    compared,
)
from tightship.integrations.onnx_write import bring_data, write_model
from tightship.integrations.onnxruntime import check_room, portable
from tightship.plan import Plan
from tightship.units import format_bytes, format_seconds

__all__ = ["Answer", "Sessions", "Use", "compared", "read_feeds", "write_best"]

_AT_ONCE: Final = 2
"""Sessions that take turns."""

_WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "planned": PLANNED,
    "block": {**PLANNED, "pattern": True},
    "reuse": {**PLANNED, "pattern": True, "reuse": True},
}
_CALLED: Final = {
    "planned": "the planned file",
    "block": "the planned file, one block for most values",
    "reuse": "the planned file, buffers reused",
}


@dataclass(frozen=True)
class Answer:
    """What was written (a way of `_WAYS` to run the planned order, or ``as it was``), how a session
    should run it, what was ``tried`` in that order, why nothing was compared, if nothing was, and the bytes that are
    ``planned`` at nodes' ends. ``cast``: there is float16, for which a session puts in casts whatever its options."""

    file: str
    session: Mapping[str, Any]
    portable: str
    tried: Mapping[str, Sessions]
    failure: str = ""
    planned: int | None = None
    cast: bool = False

    def rows(self) -> dict[str, Any]:
        """As the keys that other programs read (``--json``)."""
        rows: dict[str, Any] = {"name": f"onnxruntime {onnxruntime.__version__}", "file": self.file}
        rows |= {"session": dict(self.session), "portable": self.portable, "failure": self.failure or None}
        rows["planned"] = self.planned
        rows["tried"] = {
            name: asdict(s)
            | {"slower": s.slower, "larger": s.larger}
            | {"difference": s.difference if math.isfinite(s.difference) else "inf"}
            for name, s in self.tried.items()
        }
        return rows

    def lines(self) -> Iterator[str]:
        """In words."""
        name = f"onnxruntime {onnxruntime.__version__}"
        if self.failure:
            yield f"not compared in {name}: {self.failure}"
            return
        first = next(iter(self.tried.values()))
        yield f"{name}, default session of the model: {_use(first.default)}"
        for way, s in self.tried.items():
            said = "equal results" if s.difference == 0 else "results that differ"
            said += f" by up to {s.difference:.3g}" if 0 < s.difference < math.inf else ""
            yield f"{name}, {_CALLED[way]}: {_use(s.file)}; {100 * (s.ratio - 1):+.1f} % time, {said}"
        if 20 * first.file.scratch > first.file.arena:
            use = first.file
            size = format_bytes(use.scratch)
            yield f"the arena's peak is inside of {use.at!r}: {size} of scratch, which no order changes"
        best = self.tried.get(self.file)
        if best is None:
            yield "no order is better than the default session: the model was written as it was, for default options"
        elif not best.better:
            faults = [w for w, wrong in (("slower", best.slower), ("larger", best.larger)) if wrong]
            said = f", and is {' and '.join(faults)} than the default session" if faults else ""
            yield f"the file is written as planned{said}"
        else:
            yield "never slower than the default session, and never more memory by nodes or in its arena: checked"
        if best is not None and self.planned is not None and best.file.requested > self.planned:
            sizes = (
                f"{format_bytes(best.file.requested)} by nodes, and {format_bytes(self.planned)} were planned"
            )
            yield f"it takes {sizes}: a session makes other nodes of a file when it loads it"
            own = "" if self.cast else ", or run it with ORT_DISABLE_ALL and session.disable_quant_qdq=1"
            yield f"plan without --optimize, so that what runs is what is planned{own}"


def _use(use: Use) -> str:
    sizes = ", ".join(
        f"{format_bytes(n)} {what}"
        for n, what in ((use.requested, "by nodes"), (use.arena, "arena"), (use.holds, "held"))
    )
    return f"{format_seconds(use.time)}, {sizes}"


# --- what runs are given ---


def read_feeds(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Inputs by name from an .npz file. Raises ``BadInput``."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except OSError as error:
        raise unreadable(error, os.fspath(path)) from error
    except (ValueError, AttributeError, EOFError) as error:
        raise BadInput(f"not an .npz file of arrays: {error}", place=os.fspath(path)) from error


# --- the file that is best ---


def _left_to_do(program: Program) -> dict[str, Any]:
    """What a session does with a file when it loads it: nothing with one that is optimized in every way, so that what
    was planned is what runs, to the bit as the model does by default. A second time it would optimize further."""
    done = program.level
    return {
        "level": "disabled" if done == "all" else "all",
        "fuse_quantized": done not in ("extended", "all"),
    }


def write_best(
    program: Program,
    plan: Plan,
    original: Program,
    path: str | os.PathLike[str],
    feeds: Mapping[str, Any] | None = None,
    *,
    must: bool = False,
) -> Answer:
    """Write ``program`` as planned where that is no worse than ``original`` in a default session, and the model as it
    was where it is not; ``must``: as planned in any case, which a budget asks for. Raises as `write_model`."""
    brought: set[Path] = set()
    answer = None
    try:
        answer = _best(program, plan, original, Path(path), feeds, must, brought)
    except OSError as error:
        raise unwritable(error, os.fspath(path)) from error
    finally:
        if answer is None:  # nothing was written that reads them
            _remove(brought)
    return answer


def _remove(paths: set[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
    paths.clear()


def _best(
    program: Program,
    plan: Plan,
    original: Program,
    target: Path,
    feeds: Mapping[str, Any] | None,
    must: bool,
    brought: set[Path],
) -> Answer:
    """As `write_best`; ``brought``: the files of data that were made beside the file."""
    portability, planned = portable(program.model)[0], plan.peak - plan.static
    tried: dict[str, Sessions] = {}
    chances, failure = draws(original), ""
    with part_of(target, ".onnx") as part:
        for name, way in _WAYS.items():
            given = {**way, **_left_to_do(program)}
            brought.update(write_model(program, plan, part, given, named=target))
            try:
                check_room(original, _AT_ONCE)
                tried[name] = _on_inputs(original, part, given, feeds, chances)
            except Unsupported as error:
                os.replace(part, target)
                return Answer(name, given, portability, tried, str(error))
            except FileDoesNotRun as error:
                if must:
                    raise
                failure = f"{error}; the model was written as it was"
                break
            except BadInput as error:
                ours = feeds is None and isinstance(error, DoesNotRun)
                hint = "; give inputs it can run on with --inputs" if ours else ""
                os.replace(part, target)
                return Answer(name, given, portability, tried, f"{error}{hint}")
            if must or tried[name].better:
                os.replace(part, target)
                cast = HALF in program.notes
                return Answer(name, given, portability, tried, planned=planned, cast=cast)
    _remove(brought)
    brought.update(bring_data(original.model, target.parent))
    with part_of(target) as part:
        shutil.copyfile(original.model.path, part)
        os.replace(part, target)
    return Answer("as it was", AS_IT_IS, "any", tried, failure)


def _on_inputs(
    original: Program,
    file: Path,
    given: Mapping[str, Any],
    feeds: Mapping[str, Any] | None,
    chances: list[Draw],
) -> Sessions:
    """Compared on ``feeds``, or on the first random inputs of ``chances`` on which the model runs; those before them
    are taken out."""
    while feeds is None and len(chances) > 1:
        try:
            return _again_if_close(original, file, given, chances[0].feeds(original))
        except DoesNotRun:
            chances.pop(0)
    inputs = chances[0].feeds(original) if feeds is None else feeds
    return _again_if_close(original, file, given, inputs)


def _again_if_close(
    original: Program, file: Path, given: Mapping[str, Any], feeds: Mapping[str, Any]
) -> Sessions:
    """Compared, and once more for longer where time alone speaks against the file."""
    found = compared(original.model.path, file, given, feeds)
    if found.slower and not found.larger and found.ratio < 2:
        found = compared(original.model.path, file, given, feeds, 2 * SECONDS)
    return found
