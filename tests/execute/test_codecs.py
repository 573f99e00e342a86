"""Codecs give back every bit, use only the bytes planned, and refuse what they cannot give back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tightship.errors import BadInput
from tightship.execute.codecs import CHUNK, compress, decompress
from tightship.machine import INTEGERS

SIZES = (1, 7, 8, 63, 1000, CHUNK, CHUNK + 1, 3 * CHUNK + 5)


def there_and_back(codec, full, nbytes):
    packed = torch.full((nbytes + 64,), 0xAB, dtype=torch.uint8)
    compress(codec, full, packed[:nbytes], "t")
    assert (packed[nbytes:] == 0xAB).all()
    back = torch.full((full.numel(),), 1, dtype=full.dtype)
    decompress(codec, packed[:nbytes], back)
    return back


def same(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("n", SIZES)
def test_booleans(n):
    full = torch.rand(n) < 0.5
    assert same(there_and_back("bits", full, -(-n // 8)), full)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("p", [0.0, 0.1, 1.0])
def test_masks(n, dtype, p):
    full = torch.empty(n, dtype=dtype).bernoulli_(1 - p).div_(max(1 - p, 0.3))
    assert same(there_and_back("mask", full, -(-n // 8) + full.itemsize), full)


@given(st.lists(st.integers(0, 255), min_size=1, max_size=50))
def test_integers(numbers):
    full = torch.tensor(numbers)
    for codec, (bits, _, high) in INTEGERS.items():
        fitting = full.clamp(max=high)
        assert torch.equal(there_and_back(codec, fitting, -(-bits * len(numbers) // 8)), fitting)


@pytest.mark.parametrize("codec", INTEGERS)
def test_integers_beyond_the_range_are_refused_and_the_ends_are_not(codec):
    bits, low, high = INTEGERS[codec]
    assert high - low == (1 << bits) - 1
    full = torch.tensor([low, 0, high])
    assert torch.equal(there_and_back(codec, full, -(-3 * bits // 8)), full)
    for wrong in (low - 1, high + 1):
        with pytest.raises(BadInput, match=f"t: .*cannot be compressed as {codec}, which holds"):
            there_and_back(codec, torch.tensor([0, wrong]), -(-2 * bits // 8))


@pytest.mark.parametrize("others", [[0.0, 1.0, 2.0], [0.0, 1.0, float("nan")], [-0.0, 0.0, 1.0]])
@pytest.mark.parametrize("before", [0, CHUNK])
def test_a_mask_of_more_than_two_numbers_is_refused(others, before):
    with pytest.raises(BadInput, match="zeros and one other"):
        there_and_back("mask", torch.tensor([0.0] * before + others), 4 + before // 8 + 1)


def test_booleans_that_are_none_are_refused():
    odd = torch.tensor([0, 1, 2], dtype=torch.uint8).view(torch.bool)
    with pytest.raises(BadInput, match="0 or 1"):
        there_and_back("bits", odd, 1)


def test_bfloat16_is_torchs_rounding():
    full = torch.randn(1001)
    assert torch.equal(there_and_back("bf16", full, 2002), full.bfloat16().float())
