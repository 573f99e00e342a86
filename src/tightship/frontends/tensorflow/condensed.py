"""Loops of Enter and Exit as one node each: what reads them, and what they read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tightship.frontends.tensorflow.functions import Frame
from tightship.frontends.tensorflow.nodes import SWITCHES, Node, name_of

__all__ = ["condensed", "loop_node", "merge_of", "renamed"]


def merge_of(entries: Mapping[str, Any], leaving: str) -> str:
    """The Merge whose value an Exit hands out."""
    switch = entries[name_of(entries[leaving].input[0])]
    return name_of(switch.input[0]) if switch.op in SWITCHES else ""


def condensed(
    proto: Any, frames: Mapping[str, Frame], within: str
) -> tuple[dict[str, Frame], dict[str, tuple[str, int]], set[str]]:
    """Of the nodes in the loop ``within`` (no loop): the loops right inside it, by a name that is free; their Exits;
    and the nodes that are in none of them."""
    taken = {n.name for n in proto.node}
    loops: dict[str, Frame] = {}
    for frame in frames.values():
        if frame.parent != within:
            continue
        name, k = frame.name.rpartition("\n")[2], 1
        while name in taken:
            k += 1
            name = f"{frame.name.rpartition(chr(10))[2]}_{k}"
        taken.add(name)
        inside = [m for f in frames.values() if f.name.startswith(frame.name + "\n") for m in f.members]
        loops[name] = replace(frame, members=(*frame.members, *inside))
    alias = {e: (name, k) for name, f in loops.items() for k, e in enumerate(f.exits)}
    deeper = {m for f in loops.values() for m in f.members}
    own = frames[within].members if within else [n.name for n in proto.node]
    leaving = set(frames[within].exits) if within else set()
    return loops, alias, {n for n in own if n not in deeper and n not in leaving}


def renamed(text: str, alias: Mapping[str, tuple[str, int]]) -> str:
    """An input where loops are one node."""
    name = name_of(text)
    if name not in alias:
        return text
    loop, k = alias[name]
    return f"^{loop}" if text.startswith("^") else f"{loop}:{k}" if k else loop


def loop_node(
    name: str, frame: Frame, entries: Mapping[str, Any], alias: Mapping[str, tuple[str, int]]
) -> Node:
    """A loop as one node: it reads what its Enters read."""
    given = [renamed(i, alias) for e in frame.enters for i in entries[e].input]
    data = [i for i in given if not i.startswith("^")]
    waits = dict.fromkeys(i for i in given if i.startswith("^"))
    return Node(name, "Frame", (*data, *waits), entries[frame.enters[0]].device)
