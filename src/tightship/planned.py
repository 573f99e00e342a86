"""What the public functions give back, to be printed, saved, drawn and shown: a plan with its graph, a frontier."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tightship.graph import Graph
from tightship.plan import Plan
from tightship.planners import frontier

__all__ = ["Frontier", "Planned"]


def _cell(drawn: str, text: str) -> str:
    """A picture and text as a notebook shows them. The picture is an image: the styles of one that stands in the page
    would hold for all of it."""
    from base64 import b64encode
    from html import escape

    data = b64encode(drawn.encode()).decode()
    return f'<img alt="{escape(text)}" src="data:image/svg+xml;base64,{data}"><pre>{escape(text)}</pre>'


@dataclass(frozen=True, repr=False)
class Planned:
    """A plan together with the graph it is for: printed, saved, drawn and checked as one.

    The plan's own attributes (``peak``, ``budget``, ``met``, ``time``, …) can be read from here.
    """

    plan: Plan
    graph: Graph

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.plan, name)

    def __str__(self) -> str:
        from tightship.report.text import describe

        return describe(self.plan, self.graph)

    __repr__ = __str__

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write plan and graph as JSON; the file appears complete or not at all."""
        from tightship.serde import save_plan

        save_plan(self.plan, path, self.graph)

    def explain(self) -> str:
        """Who makes up the plan's peak: in words, then by kind, by module, by source line, one by one."""
        from tightship.report.numbers import peak_of
        from tightship.report.prose import peak_lines
        from tightship.report.text import peak_tables, rendered

        steps = self.plan.steps
        words = "\n".join(peak_lines(self.graph, steps))
        return rendered([words, "", *peak_tables(peak_of(self.graph, steps), title="peak")])

    def picture(self, path: str | os.PathLike[str] | None = None, *, title: str = "") -> str:
        """Memory over the step, before and after, as SVG; written to ``path`` if there is one."""
        from tightship.report.picture import picture
        from tightship.serde import write_file

        drawn = picture(self.graph, self.plan, title=title)
        if path is not None:
            write_file(path, drawn.encode())
        return drawn

    def report(self, path: str | os.PathLike[str], *, title: str = "") -> None:
        """One HTML page with everything on it: works offline, needs nothing beside it."""
        from tightship.report.pages.plan import plan_page
        from tightship.serde import write_file

        write_file(path, plan_page(self.graph, self.plan, title=title).encode())

    def trace(self, path: str | os.PathLike[str]) -> None:
        """A Chrome trace for Perfetto; compressed where the path ends in ``.gz``."""
        from tightship.report.trace import write_trace

        write_trace(self.graph, self.plan, path)

    def snapshot(self, path: str | os.PathLike[str]) -> None:
        """A memory snapshot that PyTorch's viewers read."""
        from tightship.report.snapshot import write_snapshot

        write_snapshot(self.graph, self.plan, path)

    def _repr_html_(self) -> str:
        """The picture and the numbers, for notebooks."""
        return _cell(self.picture(), str(self))


@dataclass(frozen=True, repr=False)
class Frontier(frontier.Frontier):
    """Plans for many budgets beside other policies: printed, drawn and shown as one."""

    def __str__(self) -> str:
        from tightship.report.frontier import frontier_tables
        from tightship.report.text import rendered

        return rendered(frontier_tables(self))

    __repr__ = __str__

    def picture(self, path: str | os.PathLike[str] | None = None) -> str:
        """Time against memory as SVG; written to ``path`` if there is one."""
        from tightship.report.frontier import frontier_picture
        from tightship.serde import write_file

        drawn = frontier_picture(self)
        if path is not None:
            write_file(path, drawn.encode())
        return drawn

    def report(self, path: str | os.PathLike[str], *, title: str = "") -> None:
        """One HTML page: time against memory, and memory over the steps of every plan; works offline."""
        from tightship.report.pages.frontier import frontier_page
        from tightship.serde import write_file

        write_file(path, frontier_page(self, title=title).encode())

    def _repr_html_(self) -> str:
        """The picture and the numbers, for notebooks."""
        return _cell(self.picture(), str(self))
