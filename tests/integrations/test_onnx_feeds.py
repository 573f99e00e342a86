"""Random inputs that models run on: whole numbers that choose a branch are what the model compares them with."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper

from support.graphs import made, node, saved, tensor, value
from tightship import api
from tightship.frontends.onnx.load import read
from tightship.frontends.onnx.lower import lower
from tightship.integrations.onnx_compare import write_best
from tightship.integrations.onnx_feeds import Draw, draws

INT = TensorProto.INT64


def rates(*, inner=False):
    """A model for one sample rate, which does not run at any other: it needs more rows than there are; ``inner``:
    asked for within a branch, after a cast."""
    then = helper.make_graph([node("Neg", ["x"], ["t"])], "then", [], [value("t", None)])
    deny = helper.make_graph([node("Gather", ["x", "beyond"], ["e"])], "else", [], [value("e", None)])
    given = [tensor("beyond", np.array([99] * 4)), tensor("rate", np.array([16000.0], np.float32))]
    asked = [node("Cast", ["sr"], ["f"], to=TensorProto.FLOAT), node("Equal", ["rate", "f"], ["p"])]
    choice = node("If", ["p"], ["y"], then_branch=then, else_branch=deny)
    if inner:
        within = helper.make_graph([*asked, node("If", ["p"], ["z"], then_branch=then, else_branch=deny)], "in", [],
                                   [value("z", None)])  # fmt: skip
        other = helper.make_graph([node("Abs", ["x"], ["o"])], "other", [], [value("o", None)])
        asked, given = [], [*given, tensor("yes", np.array([True]))]
        choice = node("If", ["yes"], ["y"], then_branch=within, else_branch=other)
    return made(
        [*asked, choice], [value("x", [4]), value("sr", [1], INT)], [value("y", None)], given, opset=17
    )


@pytest.mark.parametrize("inner", [False, True], ids=["outside", "in a branch"])
def test_what_a_model_compares_an_input_with_is_tried(tmp_path, inner):
    program = lower(read(saved(tmp_path, rates(inner=inner))))
    assert draws(program)[-1] == Draw(chosen=(("sr", 16000),))
    plan = api.plan_graph(program.graph).plan
    answer = write_best(program, plan, program, tmp_path / "out.onnx", must=True)
    assert not answer.failure and answer.tried["planned"].difference == 0


def test_constants_are_tried_one_after_the_other(tmp_path):
    """Of several inputs at once; numbers with a fraction, and rows of numbers, are none that choose."""
    nodes = [node("Equal", ["a", k], [f"p{k}"]) for k in "uv"] + [node("Less", ["w", "b"], ["q"])]
    nodes += [node("Cast", ["b"], ["f"], to=TensorProto.FLOAT), node("Greater", ["f", "h"], ["r"])]
    nodes += [node("Equal", ["a", "row"], ["s"])]
    given = [tensor("u", 7), tensor("v", 9), tensor("w", -3), tensor("h", np.float32(0.5))]
    given.append(tensor("row", np.array([1, 2])))
    ends = [value(n, None, TensorProto.BOOL) for n in ("pu", "pv", "q", "r", "s")]
    path = saved(tmp_path, made(nodes, [value("a", [], INT), value("b", [], INT)], ends, given, opset=17))
    program = lower(read(path))
    assert [d.chosen for d in draws(program)[3:]] == [(("a", 7), ("b", -3)), (("a", 9), ("b", -3))]
    assert [int(draws(program)[4].feeds(program)[n]) for n in "ab"] == [9, -3]
