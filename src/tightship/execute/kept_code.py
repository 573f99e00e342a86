"""What is known of compiled code that Inductor keeps: its lines, and what was decided when it was made.

Inductor's caches hold compiled passes by a key of their graph. A file of ours beside each key has the lines that the
pass was read as, with what its kernels ask for by themselves; one for each pair of passes has the choice that made
them. The next process loads both and traces, lowers and compiles nothing. A file that cannot be read, or is of
another version, machine or pair, is as good as none: everything is made again. What runs is measured against the
lines in every step, as always.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec

from tightship.errors import Unsupported
from tightship.execute.cache import UNREADABLE, Unplanned, made_here, write_kept
from tightship.execute.compiled import Asked, Measured, StepReplay
from tightship.files import from_json, to_json
from tightship.frontends.torch.compat_inductor import Event, Kernel, Lowered
from tightship.graph import MOST_BYTES

__all__ = ["Choice", "KeptCode"]

_Bytes = Annotated[int, msgspec.Meta(ge=0, le=MOST_BYTES)]


class Choice(msgspec.Struct, frozen=True):
    """What was decided for a graph, and what its bytes follow from: bytes of the caller's tensors (``given`` by the
    graph as Dynamo hands it over, ``static`` as the forward pass takes them) and of tangents, how many results are
    the caller's, how many of them are copied into tensors of the caller's, the names of what is ``saved``."""

    given: _Bytes
    static: _Bytes
    tangents: _Bytes
    outputs: int
    written: int
    saved: tuple[str, ...]
    budget: int | None
    unplanned: Unplanned
    peak: int
    recomputed: int
    seconds: float
    source: str
    lowered: int
    notes: tuple[str, ...]


class _Event(msgspec.Struct, array_like=True):
    kind: str
    name: str
    nbytes: _Bytes
    source: str
    path: tuple[int | str, ...]
    kernel: str | None
    given: tuple[str, ...]
    origin: str


class _Pass(msgspec.Struct):
    events: list[_Event]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    strides: tuple[tuple[int, ...] | None, ...]
    constants: tuple[tuple[str, _Bytes], ...]
    asked: dict[str, tuple[tuple[tuple[int, int], ...], Any, _Bytes]]


class _File(msgspec.Struct):
    key: str
    digest: str
    body: msgspec.Raw


_KINDS = frozenset(("make", "alias", "drop", "call", "item"))


class KeptCode:
    """Lines and choices in ``folder``. ``made_from``: what a choice depends on besides the graph, the machine and
    tightship's code. ``name`` says which choices these are, ``version`` whose lines; ``joint``: whether a choice that
    is kept is taken without looking at the joint graph; ``keys``: those of the passes at hand, by kind."""

    def __init__(self, folder: Path, made_from: object, measured: Measured, *, joint: bool = True) -> None:
        self.folder, self.measured, self.joint = folder, measured, joint
        self.version = _digest(made_here(), measured.kind, measured.recorded)
        self.name = _digest(self.version, made_from)
        self.keys: dict[str, str] = {}

    # --- lines of one pass ---

    def lines(self, kind: str, key: str) -> Lowered | None:
        """The lines of the pass that Inductor keeps by ``key``, which is one of those at hand from here on."""
        self.keys[kind] = key
        found = self._read(("pass", key), _Pass)
        if found is None or any(e.kind not in _KINDS for e in found.events):
            return None
        kernels = {k: Kernel(k, _gone) for k in found.asked}
        try:
            events = tuple(
                Event(
                    e.kind, e.name, e.nbytes, e.source, e.path, _kernel(e.kernel, kernels), e.given, e.origin
                )
                for e in found.events
            )
            self.measured.learn(
                {k: Asked(rows, _tree(made), n) for k, (rows, made, n) in found.asked.items()}
            )
            lowered = Lowered(events, found.inputs, found.outputs, found.strides, found.constants)
            StepReplay(0, self.measured, 1).run(lowered, [None] * len(lowered.inputs))
        except (KeyError, IndexError, TypeError, AssertionError):  # lines of nothing
            return None
        return lowered

    def keep_lines(self, kind: str, key: str, lowered: Lowered) -> None:
        """Takes note of the key and the lines of a pass. What its kernels ask for is measured, if it is not yet."""
        self.keys[kind] = key
        kernels = {e.kernel.key: e.kernel for e in lowered.events if e.kernel is not None}
        asked = {k: astuple(self.measured(kernel)) for k, kernel in kernels.items()}
        events = [
            _Event(
                e.kind, e.name, e.nbytes, e.source, e.path, e.kernel.key if e.kernel else None, e.given, e.origin
            )
            for e in lowered.events
        ]  # fmt: skip
        body = _Pass(
            events, lowered.inputs, lowered.outputs, lowered.strides, lowered.constants,
            asked,
        )  # fmt: skip
        self._write(("pass", key), body)

    # --- choices ---

    def choice(self) -> Choice | None:
        """What was decided when the passes at hand were made."""
        return self._read(("choice", self.name, sorted(self.keys.items())), Choice)

    def keep_choice(self, choice: Choice) -> None:
        if self.keys:
            self._write(("choice", self.name, sorted(self.keys.items())), choice)

    def forget(self) -> None:
        """Removes what does not hold any more of the passes at hand."""
        for what in (
            ("choice", self.name, sorted(self.keys.items())),
            *(("pass", k) for k in self.keys.values()),
        ):
            with contextlib.suppress(OSError):
                self._path(self._key(what)).unlink()
        self.keys.clear()

    # --- files ---

    def _key(self, what: Sequence[Any]) -> str:
        return _digest(self.version, what)

    def _path(self, key: str) -> Path:
        return self.folder / f"plan-code-{key[:32]}.json"

    def _read(self, what: Sequence[Any], kind: type[Any]) -> Any:
        key = self._key(what)
        path = self._path(key)
        try:
            file = from_json(path.read_bytes(), _File)
            if file.key != key or file.digest != hashlib.sha256(file.body).hexdigest():
                return None
            found = from_json(bytes(file.body), kind)
        except UNREADABLE:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the oldest go first
        return found

    def _write(self, what: Sequence[Any], body: Any) -> None:
        key, data = self._key(what), to_json(body)
        file = _File(key, hashlib.sha256(data).hexdigest(), msgspec.Raw(data))
        write_kept(self._path(key), to_json(file))


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _kernel(key: str | None, kernels: Mapping[str, Kernel]) -> Kernel | None:
    return None if key is None else kernels[key]


def _tree(result: Any) -> Any:
    if isinstance(result, list):
        return tuple(map(_tree, result))
    if isinstance(result, int):
        return result
    raise TypeError(result)


def _gone(_number: float, _index: int) -> NoReturn:
    raise Unsupported("a kernel of kept code", "what it asks for is kept with it", "report this")
