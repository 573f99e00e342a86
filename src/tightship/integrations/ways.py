"""Two ways below a step's floor, for plans that are made and not run: ops in slices, and parameters and optimizer
state that stream. Each makes another graph of a captured program, taken where a budget asks for it or gains by it.
PyTorch is asked for where a model of its own is changed: ONNX files are split without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tightship.analysis.bounds import lower_bound
from tightship.cached import cached_property
from tightship.errors import Infeasible, Unsupported
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.planners.default import EXACT, STREAM, Options
from tightship.planners.hints import divide_hints
from tightship.simulate import baseline, replay
from tightship.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tightship.execute.split import Splitting

__all__ = ["Made", "Ways"]

Planning = Callable[[Graph, int, Options], Plan]
Timed = Callable[[Any], Any]


@dataclass(frozen=True)
class Made:
    """A plan, and the program that it is of where that is another one: ``how``, in a few words. As it was given it
    needs ``peak`` bytes unplanned, and ``time`` seconds."""

    plan: Plan
    program: Any
    peak: int
    time: float
    how: str = ""


class Ways:
    """How plans of ``graph`` may change what runs: ``mode`` of slices (``split``, ``split-rounding`` or empty), and
    whether its static set ``streams``. ``program``: what it was captured as, measured; ``timed`` measures
    another one; ``plan_of`` plans a graph within a limit.

    What is found out about slices holds for every limit. ``reached``: the least bytes that a search ended at which
    did not meet its limit, 0 without one. Raises ``Unsupported`` for what cannot be changed so.
    """

    def __init__(
        self, graph: Graph, program: Any, timed: Timed | None, mode: str, options: Options, plan_of: Planning, *,
        streams: bool = False,
    ) -> None:  # fmt: skip
        self.graph, self.program, self._timed, self.mode = graph, program, timed, mode
        self.streams, self._plan_of = streams, plan_of
        self.is_onnx = program is not None and graph.meta.get("source") == "onnx"
        rest, self._hints = divide_hints(options.hints) if streams else (options.hints, ())
        self.options = replace(options, hints=rest)
        self.moves = "offload" in options.allow or "compress" in options.allow
        self.reached = 0
        self._whole: dict[str, Any] = {}
        trains = any(op.phase == "update" for op in graph.ops)
        if streams and (program is None or timed is None or not trains):
            raise Unsupported(
                f"allow={STREAM} for {graph.name}", "parameters and optimizer state stream in training steps alone",
                "leave it out, or give a model of PyTorch's with its optimizer",
            )  # fmt: skip
        if not streams and not self.is_onnx and (program is None or timed is None):
            raise Unsupported(
                f"allow={mode} for {graph.name}",
                "ops are split in models of PyTorch's, ONNX files and modules of HLO",
                "leave it out, or give the model",
            )  # fmt: skip
        if not self.is_onnx:
            _check_ranks(program, mode, streams=streams)

    def plan(self, limit: int, options: Options | None = None) -> Made:
        """The plan within ``limit`` bytes, changed as far as that asks for. Raises ``Infeasible``."""
        self.reached, self._whole = 0, {}
        chosen = self.options if options is None else replace(options, hints=self.options.hints)

        def plan_of(other: Graph) -> Plan:
            whole = other is self.graph or (self.program is not None and other is self.program.graph)
            try:
                plan = self._plan_of(other, limit, chosen)
            except Infeasible as no:
                found = max(no.best_peak, no.placed or 0)
                self.reached = min(self.reached or found, found)
                if whole:
                    proved = no.lower_bound > limit
                    self._whole = {"peak": no.lower_bound if proved else found, "searched": not proved}
                raise
            if whole:
                self._whole = {"peak": plan.peak, "time": plan.time, "searched": True}
            return plan

        if self.is_onnx:
            from tightship.integrations.onnx_split import planned as in_rows

            made, plan = in_rows(self.program, limit, plan_of, exact=self.mode == EXACT)
            return self._answer(
                plan, made, ["in slices of rows"] if made is not self.program else [], (), limit
            )
        from tightship.execute.split import Choice, Decision
        from tightship.execute.stream import Streaming

        streaming = Streaming(plan_of, limit, moves=self.moves, hints=self._hints)
        if self.mode:
            assert self._timed is not None
            choose = streaming.choose if self.streams else lambda made: Choice(made, plan_of(made.graph))
            found = self.splitting.plan(self.program, choose, self._timed, limit)
        else:
            found = streaming.choose(self.program)
        if not found.changes:
            return self._answer(found.plan, self.program, [], (), limit)
        said = (n for n in found.program.notes if n.startswith("split: "))
        how = [f"in {c.most} slices" for c in found.changes if isinstance(c, Decision)]
        if size := streaming.moved(found)[1]:
            how.append(f"{format_bytes(size)} streamed")
        most = max((c.most for c in found.changes if isinstance(c, Decision)), default=0)
        notes = (*said, *streaming.notes(found))
        return self._answer(found.plan, found.program, how, notes, limit, most, streaming.moved(found))

    def _answer(
        self, plan: Plan, made: Any, how: list[str], notes: tuple[str, ...], limit: int, most: int = 0,
        streamed: tuple[int, int] = (0, 0),
    ) -> Made:  # fmt: skip
        if made is self.program:
            return Made(plan, None, 0, 0.0)
        if split := self._split(made.graph, limit, most):
            plan = replace(plan, meta=plan.meta | {"split": split})
        if streamed[0]:
            row = {"tensors": streamed[0], "bytes": streamed[1]}
            plan = replace(plan, meta=plan.meta | {"streamed": row})
        whole = replay(self.graph, baseline(self.graph))
        said = f"in one piece and in memory {format_bytes(whole.peak)} and {format_seconds(whole.time)}, unplanned"
        meta = plan.meta | {"in_one_piece": {"peak": whole.peak, "time": whole.time}}
        plan = replace(plan, notes=(*plan.notes, *notes, said), meta=meta)
        return Made(plan, made, whole.peak, whole.time, ", ".join(how))

    def _split(self, made: Graph, limit: int, most: int) -> dict[str, Any]:
        """What is there in slices, each with the name and the bytes of its whole, and what was found out of fewer
        slices, or none: what `why` answers with. Empty where nothing is."""
        found = _slices(self.graph, made)
        if not found:
            return {}
        bound = int(lower_bound(self.graph)) if self.is_onnx else self.splitting.least_of(self.program)
        whole = {"peak": bound, "searched": False} if bound > limit else self._whole
        rows = [] if self.is_onnx else self.splitting.tried
        least: dict[tuple[int, bool], int] = {}
        for count, needs, searched in rows:
            least[count, searched] = min(needs, least.get((count, searched), needs))
        tried = [{"slices": n, "needs": needs, "searched": how} for (n, how), needs in sorted(least.items())]
        nbytes = sum(dict(found.values()).values())
        return {"slices": most, "bytes": nbytes, "storages": found, "whole": whole, "tried": tried}

    @cached_property
    def splitting(self) -> Splitting:
        from tightship.execute.split import Splitting

        least = self._streamed_least if self.streams else None
        return Splitting(self.program, self.mode, moves=self.moves, least_of=least)

    def least(self) -> int:
        """Bytes that no plan goes below which these ways make, as far as that is known without planning."""
        if self.is_onnx:
            from tightship.integrations.onnx_split import finder

            choice = finder(self.program).least()
            return 0 if choice is None else choice.peak
        if not self.mode:
            return self._streamed_least(self.program)
        return self.splitting.floor(self.program)

    def _streamed_least(self, program: Any) -> int:
        from tightship.execute.stream import Streaming

        nothing: Any = None  # is planned
        return Streaming(nothing, 0, moves=self.moves, hints=self._hints).least(program)


def _check_ranks(program: Any, mode: str, *, streams: bool) -> None:
    """Raise ``Unsupported`` for what a captured model sends over ranks, and may not be changed."""
    from tightship.frontends.torch.collectives import no_split, no_stream, sends, sends_parts

    if mode and sends(program):
        raise no_split()
    if streams and sends_parts(program):
        raise no_stream()


def _slices(whole: Graph, made: Graph) -> dict[str, list[Any]]:
    """The name and bytes in one piece of each storage that is a slice, by what the slice is called: made like the
    whole on its line, or called like it."""
    known = {(s.name, s.size) for s in whole.storages}
    there = {(s.name, s.size) for s in made.storages}
    by_name: dict[str, tuple[int, str]] = {}
    by_maker: dict[Any, list[tuple[int, str]]] = {}
    for s, storage in enumerate(whole.storages):
        if (storage.name, storage.size) not in there and (op := whole.uses.definer[s]) >= 0:
            by_name[storage.name] = row = storage.size, storage.name
            by_maker.setdefault(_maker(whole, op), []).append(row)
    found = {}
    for s, storage in enumerate(made.storages):
        op = made.uses.definer[s]
        if op < 0 or (storage.name, storage.size) in known:
            continue
        rows = by_maker.get(_maker(made, op), []) if made.ops[op].source else []
        base = by_name.get(storage.name.partition("__rows")[0])
        larger = [row for row in (*rows, *([base] if base else [])) if row[0] > storage.size]
        if larger:
            size, name = min(larger)
            found[storage.name] = [name, size]
    return found


def _maker(graph: Graph, op: int) -> tuple[str, str, str, str]:
    made = graph.ops[op]
    return made.target, made.module, made.source, made.phase
