"""The graph that a front end builds: storages, values and ops in order, sizes aligned and checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tightship.errors import BadInput
from tightship.graph import Graph, Op, Storage, Value, aligned
from tightship.units import MAX_BYTES

__all__ = ["GraphBuilder", "UniqueNames", "bounded", "trace_line"]


class UniqueNames:
    """``name``, ``name#2``, ``name#3``, …, none of them twice, and none of those that are ``taken``."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._seen = dict.fromkeys(taken, 1)

    def __call__(self, name: str) -> str:
        n = self._seen[name] = self._seen.get(name, 0) + 1
        if n == 1:
            return name
        while (numbered := f"{name}#{n}") in self._seen:
            n = self._seen[name] = n + 1
        self._seen[numbered] = 1
        return numbered


@dataclass
class GraphBuilder:
    """``inputs`` are the values of the caller, in the order in which they were met."""

    storages: list[Storage] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    op_name: UniqueNames = field(default_factory=UniqueNames)

    def storage(self, name: str, nbytes: int, kind: str = "activation") -> int:
        self.storages.append(Storage(name, aligned(nbytes), kind))
        return len(self.storages) - 1

    def value(self, name: str, storage: int, dtype: str = "", shape: tuple[int, ...] = ()) -> int:
        """A value of a storage that is there: the whole of it, or an alias."""
        self.values.append(Value(name, storage, dtype, shape))
        return len(self.values) - 1

    def tensor(
        self, name: str, nbytes: int, dtype: str = "", shape: tuple[int, ...] = (), kind: str = "activation"
    ) -> int:
        """A value with a storage of its own."""
        return self.value(name, self.storage(name, nbytes, kind), dtype, shape)

    def op(self, op: Op) -> int:
        """An op that calls graphs draws random numbers, or has effects, if one of theirs does."""
        if inside := [run for g in op.calls for run in g.ops]:
            random, effect = any(run.random for run in inside), any(run.effect for run in inside)
            op = replace(op, random=op.random or random, effect=op.effect or effect)
        self.ops.append(op)
        return len(self.ops) - 1

    def storage_of(self, value: int) -> int:
        return self.values[value].storage

    def graph(self, outputs: Iterable[int], name: str, meta: dict[str, Any] | None = None) -> Graph:
        parts = (tuple(self.ops), tuple(self.values), tuple(self.storages), tuple(self.inputs))
        return Graph(*parts, tuple(outputs), name, {} if meta is None else meta)


def bounded(nbytes: int, place: str) -> int:
    """The size of a tensor. Raises ``BadInput`` for one that no machine can address."""
    if nbytes > MAX_BYTES:
        raise BadInput(f"tensor of {nbytes} bytes; the largest size is {MAX_BYTES} (2^63-1)", place=place)
    return nbytes


def trace_line(stack_trace: str) -> str:
    """``file.py:line`` of the innermost frame of a printed stack trace, as exporters and fx keep them."""
    source = ""
    for line in stack_trace.splitlines():
        if line.strip().startswith('File "'):
            path, _, rest = line.strip()[6:].partition('", line ')
            source = f"{path.rsplit('/', 1)[-1]}:{rest.split(',')[0]}"
    return source
