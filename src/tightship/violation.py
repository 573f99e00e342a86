"""A rule of a verifier, and a violation: one thing that breaks a rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Rule", "Violation"]


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule: its ``code``, the ``step`` at which it breaks (-1: none in particular), the names of
    the ops, storages or buffers concerned (the offending one first), and a sentence for people."""

    code: str
    step: int
    subjects: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        where = f" at step {self.step}" if self.step >= 0 else ""
        return f"{self.code}{where}: {self.message}"


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of a verifier's table: the ``code`` of its violations, what they mean in a ``sentence``, and the function
    that finds them. One ``check`` may find violations of several rules; it runs once."""

    code: str
    sentence: str
    check: Callable[[Any], Any]
