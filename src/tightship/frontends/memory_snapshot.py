"""PyTorch's memory snapshots, read without unpickling: what ``torch.cuda.memory._dump_snapshot`` writes, and those of
``torch.xpu`` and ``torch.mtia``, which have the same structure.

The core reads the opcodes of plain values alone (numbers, texts, lists, dicts, tuples); a file that has any other,
such as one that calls a function, is refused. What a snapshot must have is checked with its place in it; keys that
some versions of PyTorch do not write may be absent: torch 1.12 and 1.13 wrote the list of segments alone, those and
2.0 put stacks and requested bytes of a block into its ``history``, and settings came with 2.1. Source:
``torch/cuda/memory.py`` (the structure), ``torch/csrc/cuda/memory_snapshot.cpp`` and ``torch/csrc/cuda/Module.cpp``
(the two writers), of torch 1.12 to 2.13.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tightship import _core
from tightship.errors import BadInput
from tightship.files import PathLike, begins_with, read_bytes

__all__ = [
    "ACTIONS", "ALLOCATED", "INACTIVE", "MAX_FILE", "NO_STACK", "PENDING", "Blocks", "Device", "Events", "Segments",
    "Snapshot", "Stacks", "is_snapshot", "read_snapshot",
]  # fmt: skip

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
Bools = NDArray[np.bool_]

FRAMES = 30
"""Lines of a stack that are said, at most."""

MAX_FILE = 1 << 32
"""Bytes of a file that is read."""

ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "oom", "snapshot",
)  # fmt: skip
"""What an event may be, by its code; others have the code ``len(ACTIONS)``."""

INACTIVE, ALLOCATED, PENDING = range(3)
"""States of a block: free; in use; freed, but another stream may still use it."""
_STATES = {
    "inactive": INACTIVE,
    "active_allocated": ALLOCATED,
    "active_pending_free": PENDING,
    "active_awaiting_free": PENDING,
}

_MOST_BYTES = 1 << 62
_DEVICES = 1 << 10
_MISSING, _NONE, _BOOLEAN, _INTEGER, _REAL, _TEXT, _LIST, _DICT, _TUPLE = range(9)
_KINDS = ("missing", "None", "a boolean", "an integer", "a float", "a text", "a list", "a dict", "a tuple")
_ENDINGS = (".pickle", ".pkl")
_PACKED = {b"\x1f\x8b": "a gzip file", b"PK\x03\x04": "a zip archive", b"\x28\xb5\x2f\xfd": "a zstd file"}


# --- what a snapshot says ---


@dataclass(frozen=True)
class Events:
    """What one device's allocator did, in its order. ``address`` wraps around beyond 2^63; of an ``oom`` it is the
    bytes that the device had free. ``time``: microseconds (0: not recorded); ``stack``: a number for `Stacks`, -1
    without one; ``private``: of a pool of its own, such as a CUDA graph's."""

    action: U8
    address: I64
    size: I64
    stream: I64
    time: I64
    private: Bools
    stack: I64

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True)
class Segments:
    """What the allocator holds of the device at the end: ``size`` bytes from ``address``."""

    address: I64
    size: I64
    stream: I64
    small: Bools
    private: Bools
    expandable: Bools

    def __len__(self) -> int:
        return len(self.size)


@dataclass(frozen=True)
class Blocks:
    """The blocks of segments at the end; ``requested`` is what was asked for, ``size`` what is taken."""

    segment: I64
    address: I64
    size: I64
    requested: I64
    state: U8
    stack: I64


@dataclass(frozen=True)
class Device:
    """One device: its number, what happened, and what there is at the end."""

    number: int
    events: Events
    segments: Segments
    blocks: Blocks


class Stacks:
    """Call stacks by number, innermost frame first."""

    def __init__(self, tree: _core.PlainPickle) -> None:
        self._tree = tree
        self._frames: dict[int, tuple[int, str]] = {}

    def lines(self, stacks: I64) -> tuple[I64, list[str]]:
        """For each stack the number of a line in the list: the innermost line of the user's code, else of any Python
        code outside torch, else of any code."""
        different, which = np.unique(stacks, return_inverse=True)
        found = np.full(len(different), -1, dtype=np.int64)
        for first in range(0, len(different), _AT_ONCE):
            some = different[first : first + _AT_ONCE]
            found[first : first + _AT_ONCE][some >= 0] = self._innermost(some[some >= 0])
        frames, row = np.unique(found, return_inverse=True)
        names = [self._frame(int(f))[1] if f >= 0 else NO_STACK for f in frames]
        texts = {name: k for k, name in enumerate(dict.fromkeys(names))}
        number = np.array([texts[name] for name in names], dtype=np.int64)
        return number[row][which] if len(number) else which, list(texts)

    def frames(self, stack: int) -> tuple[str, ...]:
        """A stack's lines, innermost first: those of Python code outside torch, else all that have one."""
        kinds, numbers = self._tree.items(stack) if stack >= 0 else (_NO[0], _NONE64)
        ranked = [self._frame(n) for n in numbers[kinds == _DICT].tolist()]
        best = 3 if any(rank >= 3 for rank, _ in ranked) else 1
        return tuple(text for rank, text in ranked if rank >= best)[:FRAMES] or (NO_STACK,)

    def _innermost(self, stacks: I64) -> I64:
        """The frame that stands for each stack; -1 for an empty one."""
        start, (kinds, numbers) = self._tree.rows(stacks)
        frame = np.where(kinds == _DICT, numbers, -1)
        different, which = np.unique(frame, return_inverse=True)
        rank = np.array([self._frame(int(f))[0] if f >= 0 else 0 for f in different], dtype=np.int64)
        found = np.full(len(stacks), -1, dtype=np.int64)
        for least in (1, 2, 3, 4):  # what is best is looked for last
            at = np.flatnonzero(rank[which] >= least) if len(rank) else which
            first = np.searchsorted(at, start[:-1])
            there = first < np.searchsorted(at, start[1:])
            found[there] = frame[at[first[there]]]
        return found

    def _frame(self, number: int) -> tuple[int, str]:
        """How well a frame says where something was made (4: the user's code; 0: not at all), and its line."""
        if number not in self._frames:
            kinds, numbers = self._tree.items(number)
            found: dict[str, Any] = {}
            for at in range(0, len(kinds), 2):
                kind, value = kinds[at + 1], int(numbers[at + 1])
                if kinds[at] == _TEXT and kind in (_TEXT, _INTEGER):
                    plain = _text(self._tree, value) if kind == _TEXT else value
                    found[_text(self._tree, int(numbers[at]))] = plain
            self._frames[number] = _line(*(found.get(key, "") for key in ("filename", "line", "name")))
        return self._frames[number]


@dataclass(frozen=True)
class Snapshot:
    """A snapshot: devices that were used, the allocator's settings where they are plain, and call stacks."""

    devices: tuple[Device, ...]
    settings: dict[str, object]
    stacks: Stacks


_NONE64 = np.zeros(0, np.int64)
_NO = (_NONE64.astype(np.uint8), _NONE64.astype(bool))
_NO_EVENTS = Events(_NO[0], _NONE64, _NONE64, _NONE64, _NONE64, _NO[1], _NONE64)
_NOTHING = (
    Segments(_NONE64, _NONE64, _NONE64, _NO[1], _NO[1], _NO[1]),
    Blocks(_NONE64, _NONE64, _NONE64, _NONE64, _NO[0], _NONE64),
)
"""What a snapshot without segments says of them."""


# --- lines ---

NO_STACK = "(no stack recorded)"
_AT_ONCE = 1 << 16
"""Stacks that are looked at together."""
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3")
_TORCH = ("/torch/", "<eval_with_key>", "<frozen")


def _line(file: object, line: object, name: object) -> tuple[int, str]:
    path = str(file).replace("\\", "/")
    python = path.endswith(".py") or path.startswith("<") or "ipykernel" in path
    torch = any(part in path for part in _TORCH) or path.startswith("torch/")
    library = any(part in path for part in _LIBRARIES)
    where = f"{'/'.join(path.rsplit('/', 2)[-2:])}:{line}" if path not in ("", "??") else ""
    text = " ".join(f"{where} {str(name)[:60]}".split())
    return (1 + python + (python and not torch) + (python and not torch and not library) if text else 0), text


# --- reading ---


def is_snapshot(text: str) -> bool:
    """Whether a SOURCE is meant to be a memory snapshot: by its ending, or by how it begins."""
    return text.endswith(_ENDINGS) or begins_with(text, 1) == b"\x80"


def read_snapshot(path: PathLike) -> Snapshot:
    """Read a snapshot's file. Nothing in it is run.

    Raises ``BadInput`` for what cannot be read, is incomplete, has any opcode but those of plain values, or is no
    memory snapshot; the message names the byte, or the place in the snapshot.
    """
    name = os.fspath(path)
    data = read_bytes(path, MAX_FILE, "a snapshot")
    if not data:
        raise BadInput("the file is empty", place=name)
    for begin, what in _PACKED.items():
        if data.startswith(begin):
            raise BadInput(f"not a memory snapshot of PyTorch's: it is {what}: unpack it first", place=name)
    try:
        tree = _core.PlainPickle(data)
    except ValueError as error:
        raise BadInput(f"not a memory snapshot of PyTorch's: {error}", place=name) from None
    return _Reading(tree, name, len(data)).snapshot()


@dataclass(frozen=True)
class _Reading:
    tree: _core.PlainPickle
    file: str
    most: int
    """Entries that a file of its size may have: each takes at least a byte. Lists that are named again and again
    would have more."""

    def snapshot(self) -> Snapshot:
        kind, root = self.tree.root
        if kind not in (_DICT, _LIST) or (kind == _LIST and not len(self.tree.items(root)[0])):
            held = "an empty list" if kind == _LIST else _KINDS[kind]
            raise self._fault(
                f"it holds {held}, and a snapshot is a dict with 'segments' and 'device_traces'"
            )
        top = {"segments": (kind, root)} if kind == _LIST else self._members(root)
        if not {"segments", "device_traces"} & set(top):
            raise self._fault("a snapshot has 'segments' or 'device_traces', and this has neither")
        segments = self._list(top["segments"], "segments") if "segments" in top else None
        events, left = [], self.most
        if "device_traces" in top:
            traces = self._list(top["device_traces"], "device_traces")
            for k, entry in enumerate(zip(*self.tree.items(traces), strict=True)):
                place = f"device_traces[{k}]"
                rows = self._list((int(entry[0]), int(entry[1])), place)
                left = self._less(left, len(self.tree.items(rows)[0]), place)
                events.append(self._events(rows, place))
        return Snapshot(self._devices(segments, events), self._settings(top), Stacks(self.tree))

    def _less(self, left: int, count: int, place: str) -> int:
        if count > left:
            raise self._fault(f"more than {self.most} entries in a file of so many bytes", place=place)
        return left - count

    def _devices(self, segments: int | None, events: list[Events]) -> tuple[Device, ...]:
        """Those that hold memory or have a history; numbers of devices are those of their traces."""
        if segments is None:
            return tuple(Device(k, e, *_NOTHING) for k, e in enumerate(events) if len(e))
        owner = self._integers(segments, "device", "segments", 0, least=0)
        most = max(len(events), int(owner.max(initial=-1)) + 1)
        if most > _DEVICES:
            raise self._fault(f"device {most - 1} is beyond what there may be", place="segments")
        every, blocks = self._segments(segments)
        found = []
        there = {*np.unique(owner).tolist(), *(k for k, e in enumerate(events) if len(e))}
        for number in sorted(there):
            mine = np.flatnonzero(owner == number)
            held = Segments(*(getattr(every, n)[mine] for n in Segments.__dataclass_fields__))
            events_ = events[number] if number < len(events) else _NO_EVENTS
            inside = np.isin(blocks.segment, mine)
            rows = {n: getattr(blocks, n)[inside] for n in Blocks.__dataclass_fields__}
            rows["segment"] = np.searchsorted(mine, rows["segment"])
            self._check_apart(held, mine)
            found.append(Device(number, events_, held, Blocks(**rows)))
        return tuple(found)

    def _check_apart(self, held: Segments, which: I64) -> None:
        """No two segments of a device share bytes."""
        start = held.address.view(np.uint64)
        order = np.lexsort((held.size, start))
        end = start[order] + held.size[order].view(np.uint64)
        for k in np.flatnonzero(end[:-1] > start[order][1:]).tolist():
            one, two = sorted((int(which[order[k]]), int(which[order[k + 1]])))
            raise self._fault(f"it overlaps segments[{one}]", place=f"segments[{two}]")

    def _events(self, rows: int, place: str) -> Events:
        action = self._codes(rows, "action", {name: k for k, name in enumerate(ACTIONS)}, place)
        oom = action == ACTIONS.index("oom")
        # A snapshot's own event, and events of no kind we know, may have neither an address nor a size.
        about = action < ACTIONS.index("oom")
        address = self._integers(rows, "addr", place, 0, needed=about)
        free = self._integers(rows, "device_free", place, 0, least=0)
        size = self._integers(rows, "size", place, 0, least=0, needed=about | oom)
        self._check_sum(size, place)
        return Events(
            action,
            np.where(oom, free, address),
            size,
            self._integers(rows, "stream", place, 0),
            self._integers(rows, "time_us", place, 0),
            self._private(rows, "pool_id"),
            self._stacks(rows),
        )

    def _segments(self, rows: int) -> tuple[Segments, Blocks]:
        place = "segments"
        kinds, lists = self.tree.column(rows, "blocks")
        for k in np.flatnonzero(kinds != _LIST).tolist():
            raise self._fault(f"'blocks' is {_KINDS[kinds[k]]}, and must be a list", place=f"{place}[{k}]")
        size = self._integers(rows, "total_size", place, None, least=0)
        self._check_sum(size, place)
        found = Segments(
            self._integers(rows, "address", place, None),
            size,
            self._integers(rows, "stream", place, 0),
            self._codes(rows, "segment_type", {"large": 0, "small": 1}, place) == 1,
            self._private(rows, "segment_pool_id"),
            self._flags(rows, "is_expandable"),
        )
        blocks, left = [], self._less(self.most, len(lists), place)
        for k, row in enumerate(lists.tolist()):
            left = self._less(left, len(self.tree.items(row)[0]), f"{place}[{k}]")
            blocks.append(self._blocks(row, k, int(found.address[k]), int(size[k])))
        names = tuple(Blocks.__dataclass_fields__)
        none = np.zeros(0, np.int64)
        return found, Blocks(*(np.concatenate([none, *(getattr(b, n) for b in blocks)]) for n in names))

    def _blocks(self, rows: int, segment: int, address: int, total: int) -> Blocks:
        place = f"segments[{segment}].blocks"
        size = self._integers(rows, "size", place, None, least=0)
        self._check_sum(size, place)
        before = np.cumsum(size) - size
        if int(size.sum()) != total:
            fault = f"blocks of {int(size.sum())} bytes in a segment of {total}"
            raise self._fault(f"{fault}; they must be the same", place=place)
        said = self._integers(rows, "address", place, 0)
        wrong = (said != address + before) & (self.tree.column(rows, "address")[0] == _INTEGER)
        for k in np.flatnonzero(wrong).tolist():
            fault = f"'address' is {said[k]}, and the blocks before it end at {address + int(before[k])}"
            raise self._fault(fault, place=f"{place}[{k}]")
        requested = self._integers(rows, "requested_size", place, -1)
        past, stack = self._history(rows)
        requested = np.where(requested < 0, past, requested)
        state = self._codes(rows, "state", _STATES, place)
        for k in np.flatnonzero(state >= len(_STATES) - 1).tolist():
            raise self._fault(
                "unknown state of a block: not one of " + ", ".join(_STATES), place=f"{place}[{k}]"
            )
        asked = np.where((requested < 0) | (requested > size), size, requested)
        stack = np.where(stack < 0, self._stacks(rows), stack)
        return Blocks(np.full(len(size), segment), address + before, size, asked, state, stack)

    def _history(self, rows: int) -> tuple[I64, I64]:
        """Requested bytes and stack of each block out of its ``history``, whose first entry is the last request; -1
        where it has none."""
        kinds, lists = self.tree.column(rows, "history")
        asked, stack = np.full(len(kinds), -1, np.int64), np.full(len(kinds), -1, np.int64)
        for k in np.flatnonzero(kinds == _LIST).tolist():
            entries = self.tree.column(int(lists[k]), "real_size")
            if len(entries[0]) and entries[0][0] == _INTEGER:
                asked[k] = entries[1][0]
                stack[k : k + 1] = self._stacks(int(lists[k]))[:1]
        return asked, stack

    # --- columns ---

    def _integers(
        self,
        rows: int,
        key: str,
        place: str,
        default: int | None,
        *,
        least: int | None = None,
        needed: Bools | None = None,
    ) -> I64:
        """An integer of each entry; ``default`` where it is absent, unless it is ``needed`` there."""
        kinds, numbers = self.tree.column(rows, key)
        absent = kinds == _MISSING
        wrong = (kinds != _INTEGER) & ~(absent if default is not None else False)
        if needed is not None:
            wrong |= needed & absent
        for k in np.flatnonzero(wrong).tolist():
            raise self._fault(f"{key!r} is {_KINDS[kinds[k]]}, and must be an integer", place=f"{place}[{k}]")
        found: I64 = np.where(absent, default or 0, numbers)
        if least is not None:
            for k in np.flatnonzero(found < least).tolist():
                raise self._fault(
                    f"{key!r} is {found[k]}, and must be at least {least}", place=f"{place}[{k}]"
                )
        return found

    def _check_sum(self, size: I64, place: str) -> None:
        if size.astype(np.float64).sum() >= _MOST_BYTES:
            raise self._fault("sizes add up to more than 2^62 bytes", place=place)

    def _codes(self, rows: int, key: str, known: dict[str, int], place: str) -> U8:
        """The code of each entry's text; for those that are not known, one more than the highest code."""
        kinds, numbers = self.tree.column(rows, key)
        for k in np.flatnonzero(kinds != _TEXT).tolist():
            raise self._fault(f"{key!r} is {_KINDS[kinds[k]]}, and must be a text", place=f"{place}[{k}]")
        different, which = np.unique(numbers, return_inverse=True)
        other = max(known.values()) + 1
        codes = np.array([known.get(_text(self.tree, int(n)), other) for n in different], dtype=np.uint8)
        return codes[which] if len(codes) else np.zeros(0, np.uint8)

    def _private(self, rows: int, key: str) -> Bools:
        """Whether entries are of another pool than (0, 0), the common one; None and absent mean that one."""
        kinds, numbers = self.tree.column(rows, key)
        found = np.zeros(len(kinds), dtype=bool)
        tuples = np.isin(kinds, (_TUPLE, _LIST))
        different, which = np.unique(numbers[tuples], return_inverse=True)
        other = [
            any(n or k != _INTEGER for k, n in zip(*self.tree.items(int(t)), strict=True)) for t in different
        ]
        found[tuples] = np.array(other, dtype=bool)[which] if other else False
        return found

    def _flags(self, rows: int, key: str) -> Bools:
        kinds, numbers = self.tree.column(rows, key)
        return (kinds == _BOOLEAN) & (numbers == 1)

    def _stacks(self, rows: int) -> I64:
        kinds, numbers = self.tree.column(rows, "frames")
        return np.where(np.isin(kinds, (_LIST, _TUPLE)), numbers, -1)

    # --- single values ---

    def _members(self, container: int) -> dict[str, tuple[int, int]]:
        kinds, numbers = (column.tolist() for column in self.tree.items(container))
        pairs = zip(kinds[::2], numbers[::2], kinds[1::2], numbers[1::2], strict=True)
        return {_text(self.tree, key): (kind, value) for k, key, kind, value in pairs if k == _TEXT}

    def _list(self, value: tuple[int, int], place: str) -> int:
        if value[0] != _LIST:
            raise self._fault(f"{_KINDS[value[0]]}, and must be a list", place=place)
        return value[1]

    def _settings(self, top: dict[str, tuple[int, int]]) -> dict[str, object]:
        kind, number = top.get("allocator_settings", (_MISSING, 0))
        plain: dict[str, object] = {}
        for name, (k, n) in (self._members(number) if kind == _DICT else {}).items():
            if k == _DICT:
                inner = self._members(n).items()
                plain[name] = {key: value for key, (of, value) in inner if of == _INTEGER}
            elif k in (_INTEGER, _BOOLEAN):
                plain[name] = n if k == _INTEGER else bool(n)
            elif k in (_REAL, _TEXT):
                plain[name] = self.tree.real(n) if k == _REAL else _text(self.tree, n)
        return plain

    def _fault(self, fault: str, *, place: str = "") -> BadInput:
        where = f", {place}" if place else ""
        return BadInput(f"not a memory snapshot of PyTorch's: {fault}", place=self.file + where)


def _text(tree: _core.PlainPickle, number: int) -> str:
    return tree.text(number).decode(errors="replace")
