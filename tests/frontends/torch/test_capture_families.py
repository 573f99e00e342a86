"""Breadth: many families of models train to the bit as in eager."""

import pytest
from test_capture import compare

from families import FAMILIES


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAMILIES))
def test_bit_identical(name):
    compare(FAMILIES[name], "adamw", steps=2)
