"""What all patterns share: the folder in which they keep what was measured, and few objects to look through."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from support.harness import measurements

__all__ = ["measurements"]


@pytest.fixture(autouse=True, scope="module")
def _young_objects() -> Iterator[None]:
    """A capture looks for caches among all objects there are. Those of the modules imported so far are of no interest
    here, and take longer than the patterns."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
