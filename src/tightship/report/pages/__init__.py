"""Pages: one HTML file each, without network, that draws what its data says. ``page_of`` puts data and script in one.

What a page shows is a list of sections, each a mapping with ``kind`` (a file's part in ``web/``: memory, arcs,
streams, arena, frontier, table) and ``heading``. ``summary`` holds the numbers that the command prints as JSON.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from tightship.files import to_json
from tightship.report.packing import COLORS as AGES
from tightship.report.packing import DARK as AGES_DARK
from tightship.report.picture import COLORS, DARK
from tightship.units import format_bytes, format_seconds, percent, visible

__all__ = ["ROWS", "Fact", "Section", "cut", "page_of", "table"]

Section = dict[str, Any]
Fact = tuple[str, Any, str]
"""A number at the top of a page: its name, its value, and how it is said (bytes, seconds, count, percent or text)."""

ROWS = 40
"""Rows of a table of storages; what is left out is summed up in one more."""

_SCRIPTS = ("base.js", "stage.js", "memory.js", "steps.js", "arena.js", "frontier.js", "whatif.js", "main.js")


def page_of(
    title: str, about: str, facts: Sequence[Fact], sections: Sequence[Section], summary: Mapping[str, Any]
) -> str:
    """The page's text."""
    web = files("tightship.report.pages").joinpath("web")
    shown = {"title": title, "about": about, "facts": facts, "sections": sections, "summary": summary}
    # Nothing of a model's names can end the script element.
    data = visible(to_json(shown).decode()).replace("</", "<\\/").replace("<!--", "<\\u0021--")
    style = web.joinpath("style.css").read_text(encoding="utf-8")
    style = style.replace("__LIGHT__", _variables(COLORS, AGES)).replace(
        "__DARK__", _variables(DARK, AGES_DARK)
    )
    script = "".join(web.joinpath(name).read_text(encoding="utf-8") for name in _SCRIPTS)
    parts = {"TITLE": html.escape(visible(title)), "STYLE": style, "SCRIPT": script, "DATA": data}
    parts["TABLES"] = _plain(title, about, facts, sections)
    text = web.joinpath("page.html").read_text(encoding="utf-8")
    head, *rest = text.split("__")  # once through, so that what is put in is not looked at again
    for name, literal in zip(rest[::2], rest[1::2], strict=True):
        head += parts[name] + literal
    return head


_SAID: dict[str, Callable[[Any], str]] = {
    "bytes": format_bytes,
    "seconds": format_seconds,
    "percent": lambda share: percent(1 + share, 1),
    "share": lambda share: f"{100 * share:.1f} %",
}


def _plain(title: str, about: str, facts: Sequence[Fact], sections: Sequence[Section]) -> str:
    """What a reader without scripts sees: the numbers and every table."""

    def said(value: Any, unit: str) -> str:
        # What is left out of the last row of a table that is cut is empty, whatever its column is.
        text = "" if value is None or value == "" else _SAID.get(unit, str)(value)
        return html.escape(visible(text))

    numbers = [[name, said(value, unit) or "none"] for name, value, unit in facts]
    rows = "".join(f"<tr><th>{html.escape(name)}</th><td>{value}</td></tr>" for name, value in numbers)
    parts = [f"<h1>{said(title, 'text')}</h1><p>{said(about, 'text')}</p><table>{rows}</table>"]
    for s in sections:
        if s["kind"] != "table":
            continue
        columns = s["columns"]
        head = "".join(f"<th>{said(name, 'text')}</th>" for name, _ in columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{said(v, c[1])}</td>" for v, c in zip(row, columns, strict=True)) + "</tr>"
            for row in s["rows"]
        )
        parts.append(f'<h2>{said(s["heading"], "text")}</h2><div class="wrap"><table>')
        parts.append(f"<tr>{head}</tr>{body}</table></div>")
    return "".join(parts)


def _variables(bands: Mapping[str, str], ages: Sequence[str]) -> str:
    named = [*bands.items(), *((f"age{k}", c) for k, c in enumerate(ages))]
    return " ".join(f"--{name}: {c};" for name, c in named)


def cut(rows: list[list[Any]], at: int) -> list[list[Any]]:
    """The first rows, and what the others come to in column ``at``."""
    rest = rows[ROWS:]
    if not rest:
        return rows
    last: list[Any] = [None] * len(rows[0])
    last[0], last[at] = f"({len(rest)} more)", sum(r[at] for r in rest)
    return [*rows[:ROWS], [v if v is not None else "" for v in last]]


def table(
    heading: str, columns: Iterable[tuple[str, str]], rows: Sequence[Sequence[Any]], *, fold: str = ""
) -> Section:
    """A table; columns are (name, how values are said); with ``fold`` it opens on request, under that text."""
    return {"kind": "table", "heading": heading, "columns": list(columns), "rows": rows, "folded": fold}
