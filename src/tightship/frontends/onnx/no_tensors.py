"""Results of a model that are no tensors: sequences, optionals and maps at its end, as onnxruntime has them.

A sequence or an optional is made of copies of the tensors that go into it, and maps lie outside of the arena of
onnxruntime (1.32, its CPU, by the bytes its nodes request). Between nodes such values stay unknown: what reads them
has sizes that depend on data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tightship.frontends.onnx.nested import read_by
from tightship.frontends.onnx.types import NO_TENSOR, TensorType, nbytes_of

__all__ = ["handed_out", "made_of"]

_COPIED: Final = {
    ("", "SequenceConstruct"): slice(None),
    ("", "SplitToSequence"): slice(1),
    ("", "Optional"): slice(1),
    ("ai.onnx.ml", "ZipMap"): slice(0),
}
"""Inputs whose bytes a result takes, by the op that makes it."""


def handed_out(graph: Any) -> frozenset[str]:
    """Results of a graph that are made by such ops and that no node reads."""
    read = {n for node in graph.node for n in read_by(node)}
    made = {n for node in graph.node if _key(node) in _COPIED for n in node.output}
    return frozenset(made & {o.name for o in graph.output} - read)


def made_of(node: Any, inputs: Sequence[TensorType], place: str) -> TensorType:
    """The type of such a result, from those of the node's inputs: its bytes as its one dimension, ``""`` while these
    are unknown."""
    copied = inputs[_COPIED[_key(node)]]
    known = all(t.known for t in copied)
    return TensorType(NO_TENSOR, (sum(nbytes_of(t, place) for t in copied) if known else "",))


def _key(node: Any) -> tuple[str, str]:
    return "" if node.domain == "ai.onnx" else node.domain, node.op_type
