"""Breadth: many families of models train to the bit as in eager."""

import pytest

from frontends.torch.test_capture import compare
from support.families import FAMILIES


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAMILIES))
def test_bit_identical(name):
    compare(FAMILIES[name], "adamw", steps=2)
