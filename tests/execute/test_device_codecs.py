"""The codecs of a GPU, which are torch ops, on tensors of the CPU: the same bits come back, and what fits is told."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tightship.errors import BadInput, Unsupported
from tightship.execute.codecs import ON_DEVICE, check, compress_by_torch, decompress_by_torch
from tightship.machine import CODECS, INTEGERS

BITS = {"bits": 1, "bf16": 16, **{codec: bits for codec, (bits, _, _) in INTEGERS.items()}}


def there_and_back(codec, full):
    nbytes = -(-full.numel() * BITS[codec] // 8)
    room = -(-max(nbytes, 1) // 512) * 512
    packed = torch.full((room,), 0xA5, dtype=torch.uint8)  # not empty: what lay there before
    back = torch.full_like(full, 1)
    compress_by_torch(codec, full, packed)
    decompress_by_torch(codec, packed, back)
    assert (packed[nbytes:] == 0xA5).all()
    return back


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 70), st.integers(0, 2**32))
def test_booleans_of_any_number_come_back(count, seed):
    full = torch.rand(count, generator=torch.Generator().manual_seed(seed)) < 0.5
    check("bits", full)
    assert torch.equal(there_and_back("bits", full), full)


@pytest.mark.parametrize("codec", INTEGERS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_integers_come_back_to_both_ends_of_the_range(codec, dtype):
    bits, low, high = INTEGERS[codec]
    if bits >= 8 * dtype.itemsize:
        return
    full = torch.tensor([low, high, 0, 1, high - 1, low + 1, high // 2], dtype=dtype)
    check(codec, full, "here")
    assert torch.equal(there_and_back(codec, full), full)
    for beyond in (low - 1, high + 1):
        with pytest.raises(
            BadInput, match=f"here: .*cannot be compressed as {codec}, which holds {low} to {high}"
        ):
            check(codec, torch.tensor([0, beyond], dtype=dtype), "here")


def test_rounding_is_that_of_bfloat16():
    full = torch.randn(1000)
    assert torch.equal(there_and_back("bf16", full), full.to(torch.bfloat16).to(torch.float32))


def test_what_is_no_boolean_and_what_is_not_there_is_told():
    check("bits", torch.zeros(0, dtype=torch.bool))
    with pytest.raises(BadInput, match="holds 0 to 1"):
        check("bits", torch.tensor([0, 3], dtype=torch.uint8).view(torch.bool), "a mask")
    with pytest.raises(Unsupported, match="'mask' on a GPU"):
        check("mask", torch.zeros(8))
    assert set(CODECS) - set(ON_DEVICE) == {"mask"}
