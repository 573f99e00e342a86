"""Nodes as a TensorFlow graph has them, free of its messages: names, kinds, inputs by name, and who reads whom.

A node's inputs are ``name`` or ``name:port``, then those it only waits for, as ``^name``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tightship.errors import BadInput

__all__ = ["Node", "Web", "from_rows", "name_of", "to_rows"]


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a TensorFlow graph; ``hinted``: it carries ``_recompute_hint``."""

    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    device: str = ""
    hinted: bool = False


def name_of(given: str) -> str:
    """The node that an input comes from: of ``^a`` and of ``a:1`` it is ``a``."""
    return given.lstrip("^").partition(":")[0]


def to_rows(nodes: Iterable[Node]) -> list[list[Any]]:
    """The nodes as JSON has them, for ``Graph.meta``."""
    return [[n.name, n.kind, list(n.inputs), n.device, n.hinted] for n in nodes]


def from_rows(rows: Iterable[Sequence[Any]]) -> list[Node]:
    """What `to_rows` wrote. Raises ``BadInput``."""
    found = []
    for row in rows:
        match row:
            case [str(name), str(kind), [*inputs], str(device), bool(hinted)]:
                found.append(Node(name, kind, tuple(map(str, inputs)), device, hinted))
            case _:
                raise BadInput("a node is [name, kind, inputs, device, hinted]", row, "meta")
    return found


class Web:
    """Nodes by name, what each of them reads, who reads it, and the first-come order of ready nodes.

    Raises ``BadInput`` for names that there are not, or twice, and for cycles."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = {n.name: n for n in nodes}
        if len(self.nodes) != len(nodes):
            twice = next(n.name for k, n in enumerate(nodes) if n.name in {m.name for m in nodes[:k]})
            raise BadInput("a node's name is its own", twice, "nodes")
        self.read: dict[str, tuple[str, ...]] = {}
        readers: dict[str, dict[str, None]] = {n.name: {} for n in nodes}
        for n in nodes:
            self.read[n.name] = tuple(dict.fromkeys(map(name_of, n.inputs)))
            for m in self.read[n.name]:
                if m not in readers:
                    raise BadInput("an input is a node's", m, f"node {n.name!r}")
                readers[m][n.name] = None
        self.readers = {n: tuple(r) for n, r in readers.items()}
        self.order = self._first_come()

    def _first_come(self) -> list[str]:
        missing = {n: len(r) for n, r in self.read.items()}
        ready = deque(n for n, count in missing.items() if not count)
        order = []
        while ready:
            n = ready.popleft()
            order.append(n)
            for m in self.readers[n]:
                missing[m] -= 1
                if not missing[m]:
                    ready.append(m)
        if len(order) < len(self.nodes):
            stuck = next(n for n, count in missing.items() if count)
            raise BadInput("what a node reads does not wait for the node", stuck, "nodes")
        return order
