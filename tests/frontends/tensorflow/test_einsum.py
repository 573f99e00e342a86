"""What Einsum needs beside its result, as TensorFlow's own allocator has it (CPU, TensorFlow 2.21, float32)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightship import sources
from tightship.frontends.tensorflow.einsum import einsum_scratch

SIZES = {"a": 16, "b": 24, "c": 32, "d": 40, "e": 48}
MEASURED = {
    "ab,bc->ac": 0, "ba,bc->ac": 0, "ab,bc->ca": 2048, "ab,cb->ca": 2048, "abc,cd->abd": 0, "abc,cde->abde": 0,
    "abcd,aecd->acbe": 5898240, "acbe,aecd->abcd": 5898240, "aecd,abcd->acbe": 8257536, "abcd,cd->ab": 0,
    "abc,bd->acd": 49152, "abc,acb->a": 49152, "bca,bcd->bad": 0, "acd,abd->bc": 146432, "abc,ade->bcde": 0,
    "ab,b->a": 0, "ab,ab->ba": 1536, "abc->cab": 0, "abc->ab": 0, "abc->b": 49152, "abc->ca": 49152,
    "cab->bc": 49152, "ab,cd->abcd": 0,
}  # fmt: skip


def shapes(equation: str) -> list[list[int]]:
    return [[SIZES[c] for c in labels] for labels in equation.split("->")[0].split(",")]


@pytest.mark.parametrize(("equation", "scratch"), MEASURED.items())
def test_copies_of_operands_and_of_the_product_are_counted(equation: str, scratch: int) -> None:
    assert einsum_scratch(equation, shapes(equation), 4) == scratch


@pytest.mark.parametrize(
    "equation", ["abcd,aecd->acbe", "ab,bc->ac"]
)  # attention's scores; a product of matrices
def test_a_graphs_peak_has_them(equation: str, tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    with tf.Graph().as_default() as graph:
        given = [tf.compat.v1.placeholder(tf.float32, shape) for shape in shapes(equation)]
        tf.raw_ops.Einsum(inputs=given, equation=equation, name="product")
    path = tmp_path / "graph.pb"
    path.write_bytes(graph.as_graph_def().SerializeToString())
    op = next(o for o in sources.read_graphdef(str(path)).graph.ops if o.target == "Einsum")
    assert op.workspace == MEASURED[equation]
