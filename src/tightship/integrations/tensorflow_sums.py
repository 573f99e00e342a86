"""Sums of a TensorFlow graph as accumulators (G6, G7): a GraphDef -> a GraphDef, planned anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tensorflow as tf

from tightship.frontends.tensorflow.lower import Program, lower
from tightship.frontends.tensorflow.nodes import Node, Web, name_of
from tightship.planners.evict._grappler_sums import accumulator, crowded_sums

__all__ = ["accumulated"]


def accumulated(program: Program, memory: int) -> Program:
    """The program whose sums are accumulators where its peak is above 80 % of ``memory``; itself, if there is no such
    sum. Names, and what reads them, stay."""
    web = Web(program.nodes)
    sums = crowded_sums(program.graph, web, memory)
    if not sums:
        return program
    proto = type(program.file.proto).FromString(program.file.proto.SerializeToString())
    nodes = {n.name: n for n in proto.node}
    at = {n.name: (i, 0) for i, n in enumerate(proto.node)}
    made = {v.name: v for v in program.graph.values}
    place = {n: i for i, n in enumerate(web.order)}
    for name in sums:
        found, value = accumulator(web, name, place), made[name]
        kind = tf.dtypes.as_dtype(value.dtype).as_datatype_enum
        for node in found.added:
            _described(proto.node.add(), node, kind, value.shape, f"{name}/tmp_var")
            i, k = max(at[name_of(i)] for i in node.inputs)
            at[node.name] = i, k + 1  # in the file it stands as soon as it can be run
        target = nodes[name]
        target.Clear()
        _described(target, found.result, kind, value.shape, f"{name}/tmp_var")
    ordered = sorted(proto.node, key=lambda n: at[n.name])
    whole = type(proto)(node=ordered, library=proto.library, versions=proto.versions)
    file = replace(program.file, proto=whole)
    return lower(file, fetch=program.fetch, feed=program.graph.meta["fed"])


def _described(proto: Any, node: Node, kind: int, shape: tuple[int, ...], variable: str) -> None:
    """Fill in a node of an accumulator."""
    proto.name, proto.op, proto.device = node.name, node.kind, node.device
    proto.input.extend(node.inputs)
    proto.attr["dtype" if node.kind == "TemporaryVariable" else "T"].type = kind
    if node.kind == "TemporaryVariable":
        proto.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
    if node.kind in ("TemporaryVariable", "DestroyTemporaryVariable"):
        proto.attr["var_name"].s = variable.encode()
    if node.kind in ("Assign", "AssignAdd"):
        proto.attr["use_locking"].b = node.kind == "AssignAdd"
    if node.kind == "Assign":
        proto.attr["validate_shape"].b = False
