"""Graphs inside nodes, and what nodes read, also by these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["all_names", "bodies", "label", "read_by"]


def bodies(node: Any) -> Iterator[Any]:
    """The graphs among a node's attributes."""
    for a in node.attribute:
        if a.HasField("g"):
            yield a.g
        yield from a.graphs


def read_by(node: Any) -> Iterator[str]:
    yield from node.input
    for inner in bodies(node):
        yield from all_names(inner)


def all_names(graph: Any) -> Iterator[str]:
    """What the nodes of a graph, and of those inside it, read, and what it hands out."""
    yield from (o.name for o in graph.output)
    for node in graph.node:
        yield from read_by(node)


def label(node: Any, k: int) -> str:
    """What messages and plans call a node."""
    return node.name or f"{node.op_type}_{k}"
