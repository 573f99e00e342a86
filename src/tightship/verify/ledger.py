"""Where violations are collected: all kinds of them, but of each kind only as many as a person reads."""

from __future__ import annotations

from collections import Counter

from tightship.violation import Violation

__all__ = ["PER_CODE", "Ledger"]

PER_CODE = 20
"""Violations kept of one code: a flood of one kind must not hide another."""


class Ledger:
    def __init__(self) -> None:
        self.found: list[Violation] = []
        self._counts: Counter[str] = Counter()

    def add(self, code: str, step: int, subjects: tuple[str, ...], message: str) -> None:
        self._counts[code] += 1
        if self._counts[code] <= PER_CODE:
            self.found.append(Violation(code, step, subjects, message))
