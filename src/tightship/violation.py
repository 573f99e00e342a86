"""Violation: one thing that a verifier found wrong."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Violation"]


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken invariant: its ``code``, the ``step`` at which it breaks (-1: none in particular), the names of
    the ops, storages or buffers concerned (the offending one first), and a sentence for people."""

    code: str
    step: int
    subjects: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        where = f" at step {self.step}" if self.step >= 0 else ""
        return f"{self.code}{where}: {self.message}"
