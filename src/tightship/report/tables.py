"""Tables for people, in a module of their own: short commands need no more of the reports."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from tightship.units import visible

__all__ = ["new_table"]


class _Cells(Table):
    """A table of texts that are what they are: no name is markup, or begins a line of its own."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        shown = (Text(visible(c).replace("\n", "<U+000A>")) if isinstance(c, str) else c for c in cells)
        super().add_row(*shown, **options)


def new_table(*columns: str | tuple[str, int, int | None]) -> Table:
    """An empty table: columns of text are (heading, least width, most width), those of numbers a heading alone."""
    table = _Cells(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        if isinstance(column, str):
            table.add_column(column, justify="right", no_wrap=True)
        else:
            table.add_column(column[0], overflow="fold", min_width=column[1], max_width=column[2])
    return table
