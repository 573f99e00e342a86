"""Types of the C++ core, as `python -m nanobind.stubgen -m tightship._core` finds them; a test compares the two."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
F64 = NDArray[np.float64]

def min_cut(
    nodes: int, tail: I32, head: I32, capacity: I64, source: int, sink: int, seconds: float = ...
) -> tuple[Any, ...]: ...
def reached(start: I32, edges: tuple[I64, I32]) -> Any: ...

class Copy:
    @property
    def done(self) -> bool: ...
    def result(self) -> None: ...

class Copier:
    def __init__(self, file: int) -> None: ...
    def begin(
        self, stream: int, out: bool, address: int, size: int, offset: int, after: Sequence[Copy]
    ) -> Copy: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...

class Staged:
    def __init__(self, file: int) -> None: ...
    def job(self, out: bool, address: int, size: int, offset: int) -> tuple[int, int]: ...
    def settle(self) -> None: ...

class Placer:
    def __init__(self, lower: I64, upper: I64, size: I64, alignment: I64, pinned: I64) -> None: ...
    @property
    def peak(self) -> int: ...
    @property
    def clash(self) -> int: ...
    @property
    def work(self) -> int: ...
    @property
    def interrupted(self) -> bool: ...
    def pack(
        self, order: I64, best_fit: bool, cutoff: int = ..., seconds: float = ...
    ) -> tuple[I64, int]: ...
    def climb(
        self, order: I64, best_fit: bool, seed: int, work: int, seconds: float, bound: int
    ) -> tuple[I64, int]: ...
    def exact(
        self, start: I64, seed: int, work: int, seconds: float, goal: int, wanted: bool, threads: int
    ) -> tuple[I64, int, I64]: ...
    def sweep(self, order: I64, seconds: float = ...) -> tuple[I64, bool]: ...
    def skyline(self, rule: int) -> I64: ...
    def windows(self, start: I64, seed: int, work: int, seconds: float, goal: int) -> I64: ...

def pack_sets(lower: I64, upper: I64, set: I64, size: I64, alignment: I64, order: I64) -> tuple[I64, int]: ...
def lower_bound(lower: I64, upper: I64, size: I64) -> int: ...

class RelatedPlacer:
    def __init__(
        self, size: I64, alignment: I64, pinned: I64, one: I64, two: I64, low: I64, high: I64
    ) -> None: ...
    @property
    def clash(self) -> int: ...
    @property
    def work(self) -> int: ...
    @property
    def interrupted(self) -> bool: ...
    def pack(
        self, order: I64, best_fit: bool, cutoff: int = ..., seconds: float = ...
    ) -> tuple[I64, int]: ...
    def hinted(self, order: I64, hint: I64, cutoff: int, seconds: float = ...) -> tuple[I64, int]: ...
    def fill(self, order: I64, best_fit: bool, capacity: int, seconds: float = ...) -> I64: ...
    def climb(
        self, order: I64, best_fit: bool, seed: int, work: int, seconds: float, bound: int
    ) -> tuple[I64, int]: ...
    def exhaust(self, start: I64, work: int, seconds: float, goal: int) -> tuple[I64, bool]: ...

class PartPlacer(RelatedPlacer):
    def __init__(
        self,
        size: I64,
        alignment: I64,
        pinned: I64,
        owner: I64,
        since: I64,
        until: I64,
        low: I64,
        high: I64,
        one: I64,
        two: I64,
        below: I64,
        above: I64,
    ) -> None: ...

class Engine:
    def __init__(
        self,
        reads: tuple[I64, I32],
        needs: tuple[I64, I32],
        defines: tuple[I64, I32],
        mutates: tuple[I64, I32],
        updates: tuple[I64, I32],
        extra: I64,
        time: F64,
        pure: U8,
        fixed: U8,
        size: I64,
        owned: U8,
        kept: U8,
        order: I32,
        packed: I64,
        pack: F64,
        unpack: F64,
        offload: F64,
        fetch: F64,
        lost: F64,
        may: U8,
        must: U8,
        boundary: int,
        overwrites: tuple[I64, I32],
    ) -> None: ...
    @property
    def gaps(self) -> tuple[Any, ...]: ...
    @property
    def base_time(self) -> float: ...
    @property
    def allowed(self) -> Any: ...
    def set_host_limit(self, bytes: int) -> None: ...
    def set_horizon(self, positions: int) -> None: ...
    def evaluate(self, arg0: U8, arg1: int, /) -> dict[str, Any]: ...
    def profile(self, arg: U8, /) -> Any: ...
    def emit(self, arg0: U8, arg1: int, /) -> tuple[Any, ...]: ...
    def states(
        self,
        before: tuple[I64, I32],
        temporaries: tuple[I64, I32],
        size: I64,
        first: I32,
        last: I32,
        defined: tuple[I64, I32],
        limit: int,
        place: bool,
        hand_out: bool,
        work: int,
        seconds: float,
        cutoff: float,
    ) -> tuple[Any, ...]: ...
    def greedy(self, limit: int, start: U8, work: int, seconds: float, progress: Any) -> tuple[Any, ...]: ...
    def anneal(
        self,
        groups: tuple[I64, I32],
        twins: tuple[I64, I32],
        families: I64,
        limit: int,
        start: U8,
        heat: float,
        span: int,
        work: int,
        seconds: float,
        seed: int,
        progress: Any,
    ) -> tuple[Any, ...]: ...
    def lazy_greedy(
        self, rows: tuple[I64, I32], limit: int, start: U8, work: int, seconds: float, progress: Any
    ) -> tuple[Any, ...]: ...
    def priced_cut(self, boundary: int, bytes_per_second: float, seconds: float = ...) -> Any: ...
    def relax(
        self, groups: tuple[I64, I32], limit: int, start: U8, work: int, seconds: float
    ) -> tuple[Any, ...]: ...
