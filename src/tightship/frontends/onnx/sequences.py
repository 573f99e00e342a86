"""Sequences that only hand tensors on, taken out of a graph: values of a graph are tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import onnx

from tightship.frontends.onnx.nested import all_names, bodies

__all__ = ["listed", "sliced"]

_PARTS: Final = 1024
"""Elements of constants that say how a tensor is cut into parts, at most."""


# --- the parts of a tensor ---


def sliced(graph: Any) -> int:
    """Read parts of a tensor as slices of it where a sequence only hands them on, as exporters write a split that
    nobody has optimized. Returns how many."""
    whole = {
        n.output[0]: n
        for n in graph.node
        if n.op_type == "SplitToSequence" and _standard(n) and n.input and len(n.output) == 1
    }
    outside = {o.name for o in graph.output}
    outside |= {i for n in graph.node for b in bodies(n) for i in all_names(b)}
    found: dict[str, list[tuple[int, list[int]]]] = {n: [] for n in whole if n not in outside}
    known = _whole_numbers(graph) if whole else {}
    for k, node in enumerate(graph.node):
        for name in {n for n in node.input if n in found}:
            part = _part(whole[name], node, known)
            if part is None:
                del found[name]
            else:
                found[name].append((k, part))
    taken = _taken(graph)
    for name, rows in found.items():
        axis = next((a.i for a in whole[name].attribute if a.name == "axis"), 0)
        for k, bounds in rows:
            node, given = graph.node[k], [whole[name].input[0]]
            for what, number in zip(("start", "end", "axis"), (*bounds, axis), strict=True):
                text = _fresh(f"{node.output[0]}/{what}", taken)
                graph.initializer.append(onnx.numpy_helper.from_array(np.array([number], np.int64), text))
                given.append(text)
            node.op_type, node.input[:] = "Slice", given
    for k in [k for k, n in enumerate(graph.node) if n.output and n.output[0] in found][::-1]:
        del graph.node[k]
    return sum(map(len, found.values()))


def _part(whole: Any, node: Any, known: Mapping[str, list[int]]) -> list[int] | None:
    """Where the part of a tensor that a node takes out of a sequence begins and ends, if that is known."""
    if node.op_type != "SequenceAt" or len(node.input) != 2 or len(node.output) != 1:
        return None
    where, keep = known.get(node.input[1]), [a.i for a in whole.attribute if a.name == "keepdims"]
    sizes = (
        known.get(whole.input[1]) if len(whole.input) > 1 and whole.input[1] else None if keep == [0] else [1]
    )
    if not where or where[0] < 0 or not sizes or min(sizes) < 1:
        return None
    if len(sizes) == 1:
        bounds = [where[0] * sizes[0], (where[0] + 1) * sizes[0]]
    else:
        bounds = [sum(sizes[: where[0]]), sum(sizes[: where[0] + 1])]
    return bounds if bounds[0] < bounds[1] < 1 << 62 else None


# --- sequences that are lists of tensors ---

_MAKERS: Final = frozenset({"SequenceEmpty", "SequenceConstruct", "SequenceInsert", "SequenceErase"})
_READERS: Final = frozenset({"SequenceAt", "SequenceLength", "ConcatFromSequence"})


def listed(graph: Any) -> int:
    """Read the tensors of a sequence that is made one by one, at known places, as themselves: as exporters write
    lists that nobody has optimized. Returns how many nodes do; a graph with any other use of its sequences, or of
    optionals, stays as it is."""
    known = _whole_numbers(graph) if any(n.op_type in _MAKERS for n in graph.node) else {}
    lists: dict[str, list[str]] = {}
    made: list[tuple[int, list[Any]]] = []
    taken = _taken(graph)
    for k, node in enumerate(graph.node):
        if not _standard(node) or node.op_type not in _MAKERS | _READERS:
            continue
        if node.op_type in _MAKERS:
            found = _list(node, lists, known)
            if found is None:
                return 0
            lists[node.output[0]] = found
            continue
        items = lists.get(node.input[0]) if node.input else None
        nodes = None if items is None else _reading(node, items, known, taken)
        if nodes is None:
            return 0
        made.append((k, nodes))
    others = {i for n in graph.node if n.op_type not in _MAKERS | _READERS for i in n.input}
    others |= {i for n in graph.node for b in bodies(n) for i in all_names(b)}
    results = {o.name for o in graph.output}
    if not lists or lists.keys() & others or any(not lists.get(n, [n]) for n in results):
        return 0
    for k, node in enumerate(graph.node):
        if node.op_type in _MAKERS and node.output[0] in results:  # of tensors that the graph knows by then
            items = lists[node.output[0]]
            made.append((k, [onnx.helper.make_node("SequenceConstruct", items, node.output, name=node.name)]))
    if all(graph.node[k].op_type == "SequenceConstruct" for k, _ in made):
        return 0  # nothing is read of a sequence
    new = dict(made)
    kept = [
        onnx.NodeProto.FromString(x.SerializeToString())
        for k, n in enumerate(graph.node)
        for x in new.get(k, [] if n.op_type in _MAKERS else [n])
    ]
    del graph.node[:]
    graph.node.extend(kept)
    return len(made)


def _list(node: Any, lists: Mapping[str, list[str]], known: Mapping[str, list[int]]) -> list[str] | None:
    """The tensors of the sequence that a node makes, if they are known."""
    if node.op_type in ("SequenceEmpty", "SequenceConstruct"):
        return list(node.input)
    items = lists.get(node.input[0]) if node.input else None
    if items is None:
        return None
    insert = node.op_type == "SequenceInsert"
    at = node.input[1 + insert] if len(node.input) > 1 + insert else ""
    where = [len(items) - (not insert)] if not at else known.get(at)
    if not where or not -len(items) <= where[0] < len(items) + insert:
        return None
    place = where[0] if where[0] >= 0 else where[0] + len(items)
    return [*items[:place], *([node.input[1]] if insert else []), *items[place + (not insert) :]]


def _reading(
    node: Any, items: list[str], known: Mapping[str, list[int]], taken: set[str]
) -> list[Any] | None:
    """Nodes that make of the tensors of a sequence what a node makes of it."""
    if node.op_type == "SequenceLength":
        length = onnx.numpy_helper.from_array(np.array(len(items), np.int64))
        return [onnx.helper.make_node("Constant", [], node.output, name=node.name, value=length)]
    if node.op_type == "SequenceAt":
        where = known.get(node.input[1])
        if not where or not -len(items) <= where[0] < len(items):
            return None
        return [onnx.helper.make_node("Identity", [items[where[0]]], node.output, name=node.name)]
    about = {a.name: a.i for a in node.attribute}
    if not items or "axis" not in about:
        return None
    nodes, parts = [], items
    if about.get("new_axis"):
        axis = onnx.numpy_helper.from_array(np.array([about["axis"]], np.int64))
        name = _fresh(f"{node.output[0]}/axis", taken)
        parts = [_fresh(f"{node.output[0]}/{k}", taken) for k in range(len(items))]
        nodes = [onnx.helper.make_node("Constant", [], [name], value=axis)]
        nodes += [
            onnx.helper.make_node("Unsqueeze", [x, name], [y]) for x, y in zip(items, parts, strict=True)
        ]
    joined = onnx.helper.make_node("Concat", parts, node.output, name=node.name, axis=about["axis"])
    return [*nodes, joined]


def _taken(graph: Any) -> set[str]:
    return {i.name for i in graph.initializer} | {i for n in graph.node for i in (*n.input, *n.output)}


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


# --- both ---


def _whole_numbers(graph: Any) -> dict[str, list[int]]:
    """Constants of a graph that are a few whole numbers."""
    made = [(t.name, t) for t in graph.initializer]
    made += [
        (n.output[0], a.t)
        for n in graph.node
        if n.op_type == "Constant" and n.output
        for a in n.attribute
        if a.HasField("t")
    ]
    small = [(n, t) for n, t in made if t.data_type == onnx.TensorProto.INT64 and sum(t.dims) <= _PARTS]
    found = {}
    for name, t in small:
        if not t.external_data and len(t.dims) <= 1:
            # What is wrong with it is said where it is needed.
            with contextlib.suppress(ValueError, TypeError, RuntimeError):
                found[name] = onnx.numpy_helper.to_array(t).ravel().tolist()
    return found


def _standard(node: Any) -> bool:
    return node.domain in ("", "ai.onnx")
