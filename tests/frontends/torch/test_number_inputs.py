"""Ops that take tensors for their numbers give what they give with the numbers themselves."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tightship.frontends.torch.capture.number_inputs import OpNumber, computed, takes
from tightship.frontends.torch.program import Call, Ref
from tightship.frontends.torch.rerun.numbers import numbers_of

aten = torch.ops.aten

CASES = [
    (aten.mul.Tensor, ["x", 0.3]),
    (aten.mul.Scalar, ["x", 0.3]),
    (aten.mul_.Tensor, ["x", 0.3]),
    (aten.div.Tensor, ["x", 63]),
    (aten.div_.Tensor, ["x", 1.7]),
    (aten.add.Tensor, ["x", 0.7]),
    (aten.add.Tensor, ["x", "y"], {"alpha": 0.3}),
    (aten.add_.Tensor, ["x", "y"], {"alpha": 0.3}),
    (aten.sub.Tensor, ["x", 0.7]),
    (aten.rsub.Scalar, ["x", 1.7]),
    (aten.rsub.Scalar, ["x", 1.7, 0.3]),
    (aten.pow.Tensor_Scalar, ["positive", 1.3]),
    (aten.pow.Scalar, [1.3, "x"]),
    (aten.lerp.Scalar, ["x", "y", 0.3]),
    (aten.lerp_.Scalar, ["x", "y", 0.8]),
    (aten.addcmul.default, ["x", "y", "y"], {"value": 0.3}),
    (aten.addcdiv.default, ["x", "y", "positive"], {"value": 0.3}),
    (aten.masked_fill.Scalar, ["x", "mask", 0.3]),
    (aten.masked_fill_.Scalar, ["x", "mask", -1e9]),
    (aten.clamp.default, ["x", -0.3, 0.4]),
    (aten.clamp.default, ["x", None, 0.4]),
    (aten.clamp_min.default, ["x", 0.1]),
    (aten.clamp_max.default, ["x", 0.1]),
    (aten.fill.Scalar, ["x", 0.3]),
    (aten.fill_.Scalar, ["x", 0.3]),
    (aten.full_like.default, ["x", 0.3]),
    (aten.full.default, [[3, 2], 0.3]),
    (aten.gt.Scalar, ["x", 0.1]),
    (aten.le.Scalar, ["x", 0.1]),
]


def tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(shape, generator=g).to(dtype) for _ in range(2))
    return {"x": x, "y": y, "positive": x.abs() + 0.5, "mask": y > 0}


def program(call: Call, given: list[torch.Tensor]) -> Any:
    values = [SimpleNamespace(dtype=str(t.dtype).removeprefix("torch.")) for t in given]
    return SimpleNamespace(calls=(call,), graph=SimpleNamespace(values=values))


def both(case: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The op's own result, and the one with every number a tensor, on copies."""
    fn, args, kwargs = (*case, {})[:3]
    tree = tuple(a if not isinstance(a, str) else Ref(list(given).index(a)) for a in args)
    kwargs = {k: x if not isinstance(x, str) else Ref(list(given).index(x)) for k, x in kwargs.items()}
    call = Call(fn, tree, kwargs, (9,))
    numbers = numbers_of(call)
    places = [n for n in range(len(numbers)) if takes(program(call, list(given.values())), OpNumber(0, n))]
    assert places
    copies = [[t.clone() for t in given.values()] for _ in range(2)]
    own = fn(
        *(copies[0][a.value] if isinstance(a, Ref) else a for a in tree),
        **{k: copies[0][x.value] if isinstance(x, Ref) else x for k, x in kwargs.items()},
    )
    inputs = {n: torch.tensor(numbers[n], dtype=torch.float64) for n in places}
    return own, computed(call, inputs, own.dtype, lambda v: copies[1][v])


@pytest.mark.parametrize("shape", [(4, 5), ()], ids=["a matrix", "one number"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_a_number_as_a_tensor_is_no_further_from_the_exact_result(case, dtype, shape):
    given = tensors(dtype, shape)
    own, made = both(case, given)
    exact, _ = both(case, {n: t.double() if t.is_floating_point() else t for n, t in given.items()})
    off = [(t.double() - exact.double()).abs() for t in (own, made)]
    rounded = (exact.double().abs() + 1) * torch.finfo(dtype).eps
    assert (off[1] <= off[0] + rounded).all()
    assert made.dtype == own.dtype and made.stride() == own.stride()


def test_whole_numbers_stay_whole():
    given = {"x": torch.arange(6), "y": torch.arange(6)}
    for case in ((aten.mul.Tensor, ["x", 3]), (aten.add.Tensor, ["x", 5]), (aten.div.Tensor, ["x", 3])):
        own, made = both(case, given)
        assert torch.equal(own, made) and own.dtype == made.dtype


@pytest.mark.parametrize(
    "call",
    [
        Call(aten.mul.Tensor, (Ref(0), 2**60), {}, (9,)),  # no double
        Call(aten.sum.dim_IntList, (Ref(0), [1]), {}, (9,)),  # a dimension
        Call(aten.gt.Scalar, (Ref(1), 0.5), {}, (9,)),  # of whole numbers
        Call(aten.full.default, ([7], True), {}, (9,)),  # a size
        Call(len, (3,), {}, (9,)),
    ],
    ids=str,
)
def test_numbers_that_are_more_than_a_number_are_not_taken(call):
    given = [torch.ones(4, 4), torch.arange(4)]
    assert not takes(program(call, given), OpNumber(0, 0))


def test_a_batch_norm_moves_its_statistics_by_a_tensor():
    x, mean, var = torch.randn(8, 3, 4), torch.randn(3), torch.rand(3)
    others = [mean.clone(), var.clone()]
    fn = aten.native_batch_norm.default
    own = fn(x, None, None, mean, var, True, 0.3, 1e-5)
    call = Call(fn, (Ref(0), None, None, Ref(1), Ref(2), True, 0.3, 1e-5), {}, (3, 4, 5))
    assert takes(program(call, [x, *others]), OpNumber(0, 0))
    made = computed(call, {0: torch.tensor(0.3, dtype=torch.float64)}, x.dtype, lambda v: [x, *others][v])
    for a, b in zip((*own, mean, var), (*made, *others), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
