"""What the public functions give back, to be printed, saved, drawn and shown: a plan with its graph, a frontier,
what a memory snapshot says."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from tightship.files import PathLike, write_file
from tightship.graph import ALIGNMENT, Graph, alignment_of
from tightship.notebook import Shown
from tightship.plan import Plan
from tightship.planners import frontier
from tightship.serde import save_plan

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tightship.diagnose.decisions import Differences, Why
    from tightship.diagnose.snapshot import DeviceReport
    from tightship.planners.batch import BatchSize

__all__ = ["Compared", "Explained", "Frontier", "Planned", "SplitPlanned"]


def _written(text: str, path: PathLike | None) -> str:
    if path is not None:
        write_file(path, text.encode())
    return text


class _Printed(Shown):
    """Printed where it is looked at."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, repr=False)
class Planned(_Printed):
    """A plan together with the graph it is for: printed, saved, drawn and checked as one.

    The plan's own attributes (``peak``, ``budget``, ``met``, ``time``, …) can be read from here.
    """

    plan: Plan
    graph: Graph
    batches: tuple[BatchSize, ...] = field(default=(), kw_only=True)
    """What was looked at to find the largest batch."""
    frontier: frontier.Frontier | None = field(default=None, kw_only=True)
    """Plans for other budgets, for the page."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.plan, name)

    def __str__(self) -> str:
        from tightship.report.text import describe

        return describe(self.plan, self.graph)

    def rows(self) -> dict[str, Any]:
        """The plan's numbers as the keys that other programs read (``--json``)."""
        from tightship.report.numbers import plan_rows

        more = {"batches": [asdict(b) for b in self.batches]} if self.batches else {}
        return plan_rows(self.plan, self.graph) | more

    @property
    def drawn(self) -> Plan:
        """The plan as pictures and viewers show it."""
        return self.plan

    def changed(self, **values: Any) -> Planned:
        """The same with other fields of the plan."""
        return replace(self, plan=replace(self.plan, **values))

    def save(self, path: PathLike) -> None:
        """Write plan and graph as JSON; the file appears complete or not at all."""
        save_plan(self.plan, path, self.graph)

    def explain(self) -> str:
        """Who makes up the plan's peak: in words, then by kind, by module, by source line, one by one."""
        from tightship.report.numbers import peak_of
        from tightship.report.text import peak_lines, peak_tables, rendered

        steps = self.plan.steps
        words = "\n".join(peak_lines(self.graph, steps))
        return rendered([words, "", *peak_tables(peak_of(self.graph, steps), title="peak")])

    def why(self, name: str) -> Why:
        """Why the plan does what it does with the tensor called ``name``, and what else would cost: simulated."""
        from tightship.diagnose.decisions import why

        return why(self.graph, self.plan, name)

    def picture(self, path: PathLike | None = None, *, title: str = "") -> str:
        """Memory over the step, before and after, as SVG; written to ``path`` if there is one."""
        from tightship.report.picture import picture

        return _written(picture(self.graph, self.drawn, title=title), path)

    def report(self, path: PathLike, *, title: str = "") -> None:
        """One HTML page with everything on it: works offline, needs nothing beside it."""
        from tightship.report.pages.plan import plan_page

        page = plan_page(self.graph, self.plan, title=title, batches=self.batches, frontier=self.frontier)
        write_file(path, page.encode())

    def arena_header(self, path: PathLike, *, title: str = "") -> None:
        """A C header with the arena's size and each tensor's offset, for devices. Raises ``BadInput`` for a plan
        that is not placed."""
        from tightship.report.c_header import header_of_plan

        alignment = max((alignment_of(op.device) for op in self.graph.ops), default=ALIGNMENT)
        text = header_of_plan(self.graph, self.plan, title or self.graph.name or "model", alignment)
        write_file(path, text.encode())

    def trace(self, path: PathLike) -> None:
        """A Chrome trace for Perfetto; compressed where the path ends in ``.gz``."""
        from tightship.report.viewers import write_trace

        write_trace(self.graph, self.drawn, path)

    def snapshot(self, path: PathLike) -> None:
        """A memory snapshot that PyTorch's viewers read."""
        from tightship.report.viewers import write_snapshot

        write_snapshot(self.graph, self.drawn, path)


@dataclass(frozen=True, repr=False)
class SplitPlanned(Planned):
    """A plan of ``program``, in which ops run in slices, or parameters stream: ``how``, in a few words. In one piece
    and in memory it needs ``peak_whole`` bytes unplanned, and ``time_whole`` seconds."""

    program: Any
    peak_whole: int
    time_whole: float
    how: str = ""

    def rows(self) -> dict[str, Any]:
        """As `Planned.rows`; what was before is the program in one piece."""
        return super().rows() | {"peak_before": self.peak_whole, "time_before": self.time_whole}


@dataclass(frozen=True, repr=False)
class Frontier(_Printed, frontier.Frontier):
    """Plans for many budgets beside other policies: printed, drawn and shown as one."""

    @classmethod
    def of(cls, other: frontier.Frontier) -> Frontier:
        return cls(**{f.name: getattr(other, f.name) for f in fields(other)})

    def tables(self) -> list[RenderableType]:
        """The plans from the least memory up, and the other policies."""
        from tightship.report.text import frontier_tables

        return frontier_tables(self)

    def __str__(self) -> str:
        from tightship.report.text import rendered

        return rendered(self.tables())

    def rows(self) -> dict[str, Any]:
        """The frontier's numbers as the keys that other programs read (``--json``)."""
        from tightship.report.numbers import frontier_rows

        return frontier_rows(self)

    def picture(self, path: PathLike | None = None) -> str:
        """Time against memory as SVG; written to ``path`` if there is one."""
        from tightship.report.picture import frontier_picture

        return _written(frontier_picture(self), path)

    def report(self, path: PathLike, *, title: str = "") -> None:
        """One HTML page: time against memory, and memory over the steps of every plan; works offline."""
        from tightship.report.pages.plan import frontier_page

        write_file(path, frontier_page(self, title=title).encode())


@dataclass(frozen=True, repr=False)
class Explained(_Printed):
    """What a memory snapshot of PyTorch's says, for each device: printed, as JSON's keys, and as a page."""

    name: str
    devices: tuple[DeviceReport, ...]

    def tables(self, top: int = 10) -> list[RenderableType]:
        """In words, tables of at most ``top`` rows, and a chart."""
        from tightship.report.snapshot import snapshot_tables

        return snapshot_tables(self.name, self.devices, top)

    def __str__(self) -> str:
        from tightship.report.text import rendered

        return rendered(self.tables())

    def rows(self) -> dict[str, Any]:
        """As the keys that other programs read (``--json``)."""
        from tightship.report.snapshot import snapshot_rows

        return snapshot_rows(self.name, self.devices)

    def report(self, path: PathLike, *, title: str = "") -> None:
        """One HTML page: bytes over the record, and every table; works offline."""
        from tightship.report.snapshot import snapshot_page

        write_file(path, snapshot_page(self.name, self.devices, title=title).encode())


@dataclass(frozen=True, repr=False)
class Compared(_Printed):
    """Two plans and what they do differently: printed, as JSON's keys, and as a page."""

    one: Planned
    two: Planned
    differences: Differences

    def tables(self, top: int = 10) -> list[RenderableType]:
        """In words, and tables of at most ``top`` rows."""
        from tightship.report.decisions import difference_tables

        return difference_tables(self.one.plan, self.two.plan, self.differences, top)

    def __str__(self) -> str:
        from tightship.report.text import rendered

        return rendered(self.tables())

    def rows(self) -> dict[str, Any]:
        """As the keys that other programs read (``--json``)."""
        from tightship.report.decisions import difference_rows

        return difference_rows(self.one.plan, self.two.plan, self.differences)

    def report(self, path: PathLike, *, title: str = "") -> None:
        """One HTML page; works offline."""
        from tightship.report.decisions import difference_page

        page = difference_page(self.one.plan, self.two.plan, self.differences, title=title)
        write_file(path, page.encode())
