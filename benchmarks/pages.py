"""Tables of benchmarks in pages of the documentation: between two comments, nothing else is touched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["between", "put", "table"]


def table(head: Sequence[str], marks: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; ``marks`` align its columns (``---:``)."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, marks, *rows))


def between(page: Path, begin: str, end: str) -> tuple[str, str, str]:
    """What stands before ``begin``, between it and ``end``, and after that. Ends the program where one is missing."""
    text = page.read_text(encoding="utf-8")
    before, found, rest = text.partition(begin)
    inside, also, after = rest.partition(end)
    if not (found and also):
        raise SystemExit(f"{page}: no {begin if not found else end}")
    return before, inside, after


def put(page: Path, begin: str, end: str, text: str) -> None:
    """Puts ``text`` between the two marks."""
    before, _, after = between(page, begin, end)
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}", encoding="utf-8")
