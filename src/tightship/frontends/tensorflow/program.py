"""A GraphDef as it is planned: its graph, and what runs inside of the graph's ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tightship.frontends.tensorflow.load import GraphFile
from tightship.frontends.tensorflow.nodes import Node
from tightship.graph import Graph

__all__ = ["Loop", "Program", "Turn"]


@dataclass(frozen=True)
class Turn:
    """What an op runs inside: ``order`` has its nodes as they run, ``loops`` those of them that are loops of
    Enter and Exit, ``functions`` by name the turns of what its nodes call."""

    order: tuple[str, ...]
    loops: Mapping[str, Loop] = field(default_factory=dict)
    functions: Mapping[str, Turn] = field(default_factory=dict)


@dataclass(frozen=True)
class Loop:
    """A loop of Enter and Exit as one op: the nodes it waits with, those that wait for it, and what it runs."""

    enters: tuple[str, ...]
    exits: tuple[str, ...]
    turn: Turn


@dataclass(frozen=True)
class Program:
    """A file and its graph, calls inlined. An op's name is its node's; a value's is ``node:port``. ``fetch``: the
    nodes that are run, none: all. ``turn``: what runs inside ops."""

    file: GraphFile
    graph: Graph
    nodes: tuple[Node, ...]
    fetch: tuple[str, ...] = ()
    turn: Turn = Turn(())
