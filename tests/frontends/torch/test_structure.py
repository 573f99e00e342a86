"""Batches and results: containers and leaves."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from tightship.errors import BadInput
from tightship.frontends.torch.program import Ref
from tightship.frontends.torch.structure import BatchSpec, Results, flatten, map_leaves

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Data:
    a: object
    b: object


TREES = [
    (3, [3]),
    ([1, (2, 3)], [1, 2, 3]),
    ({"b": 1, "a": [2]}, [2, 1]),  # by name: the order in which names were put in does not matter
    (OrderedDict(b=1, a=2), [2, 1]),
    (UserDict(b=1, a={"c": 2}), [2, 1]),
    ({"b": 1, 3: 2}, [1, 2]),
    (Point(1, Point(2, 3)), [1, 2, 3]),
    (Data(1, [Data(2, 3)]), [1, 2, 3]),
    ([], []),
    (None, [None]),
    ("text", ["text"]),
]


@pytest.mark.parametrize(("tree", "leaves"), TREES)
def test_leaves_in_order(tree, leaves):
    assert flatten(tree) == leaves
    copied = map_leaves(lambda x: x, tree)
    assert copied == tree and type(copied) is type(tree)


@pytest.mark.parametrize(("tree", "leaves"), TREES)
def test_results_are_put_back(tree, leaves):
    numbers = iter(range(100))
    spec, values = Results.of_refs(map_leaves(lambda _: Ref(next(numbers)), tree))
    assert values == list(range(len(leaves)))
    assert spec.unflatten(leaves) == tree


def test_results_keep_what_is_not_a_tensor():
    spec, values = Results.of_refs({"a": Ref(7), "b": "text", "c": (Ref(3), None)})
    assert values == [7, 3]
    assert spec.unflatten([1, 2]) == {"a": 1, "b": "text", "c": (2, None)}
    with pytest.raises(BadInput, match="result 1 is missing"):
        spec.unflatten([1])


def test_model_outputs():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    out = outputs.CausalLMOutput(loss=torch.ones(()), logits=torch.zeros(2))
    back = map_leaves(lambda t: t + 1, out)
    assert type(back) is type(out) and torch.equal(back.logits, torch.ones(2)) and back.loss == 2
    assert BatchSpec.of(out).fits(out)


def test_batch_encodings():
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.ones(2, 3)})
    back = map_leaves(lambda t: t * 2, batch)
    assert type(back) is type(batch) and torch.equal(back["input_ids"], torch.full((2, 3), 2.0))


def test_what_a_spec_notices():
    spec = BatchSpec.of({"x": torch.ones(2, 3), "n": 1, "f": True})
    assert spec.misfit({"x": torch.ones(2, 3), "n": 1, "f": True}) is None
    assert "leaf 0" in str(spec.misfit({"x": torch.ones(2, 3), "n": 1, "f": 1}))
    assert "leaf 2" in str(spec.misfit({"x": torch.ones(3, 2).t(), "n": 1, "f": True}))
    assert "leaf 2" in str(spec.misfit({"x": None, "n": 1, "f": True}))
    assert "structure" in str(spec.misfit({"x": [torch.ones(2, 3)], "n": 1, "f": True}))
    assert spec.misfit({"n": 1, "x": torch.ones(2, 3), "f": True}) is None
