"""Placeholder."""
from __future__ import annotations
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
__all__ = ["python_state_kept"]
@contextmanager
def python_state_kept(*roots: Any) -> Iterator[None]:
    yield
