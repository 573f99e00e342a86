"""One graph that torch.compile gives the backend: joint graph, program, plan, and the two functions that run it."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tightship.errors import Infeasible, Unsupported
from tightship.execute.profile import profile
from tightship.frontends.torch import (
    compat,
    compat_capture,
    compat_compile,
    compat_distributed,
    compat_dynamo,
    compat_sending,
    eager_paths,
)
from tightship.frontends.torch.capture.joint import Joint, Primal, lower_joint, origin_of, pinned
from tightship.frontends.torch.program import Program, Ref
from tightship.graph import Graph
from tightship.integrations.accounting import Ledger
from tightship.integrations.graph_entries import Ahead, Entry
from tightship.integrations.graph_plans import GraphPlans, Owner, Whole
from tightship.integrations.graph_shares import Shares
from tightship.integrations.torch_inductor import CompiledGraph, compile_within
from tightship.integrations.torch_partition import (
    NOT_HELD,
    CompileOptions,
    Cut,
    FrameArena,
    PlannedGraph,
    cut,
)
from tightship.plan import Plan
from tightship.simulate import baseline, replay
from tightship.units import format_bytes

__all__ = ["CASTS", "Compilation"]


_HELD_BY_MODULES = r"\._(parameters|buffers)\["
"""In the sources of parameters and buffers."""


_DIVISIONS = 2
"""How many divisions of the bytes for several calls are tried in compiled mode, where each is a search."""


_RESOLVED = (
    "the budget is a percentage of the first training step: begin with the largest kind of batch, give bytes, or "
    "give models that are compiled apart options of their own"
)


CASTS = (
    "is used more than once under one autocast context: eager casts it once there and adds its gradients in the "
    "lower precision, here each use has a cast of its own and gradients are added in float32; leave the autocast "
    "context between calls for eager's bits"
)


_REENTRANT = (
    "is compiled while a backward pass runs, by a checkpoint with use_reentrant=True: other layers that run it have "
    "gradients and inputs that the budget does not count; give checkpoint use_reentrant=False"
)


@dataclass(frozen=True)
class _First:
    """What is known of a graph whose first plan is to be made again: bytes that no earlier graph has counted, and of
    what it saves, the storages that PyTorch does not look at for changes."""

    static: int
    whole: Whole
    unchecked: frozenset[int] = frozenset()


class Compilation:
    """One graph: joint graph -> program -> plan -> two functions."""

    def __init__(self, session: Owner, gm: Any) -> None:
        self.session, self.options = session, session.options
        self.frame, self.name = compat_dynamo.frame()
        self.place = session.ledger.place(self.frame)
        self.graph_break = compat_dynamo.graph_break(gm)
        self.followed = self.graph_break is not None or compat_dynamo.inner()  # as far as is known
        self.placeholders = gm.graph.find_nodes(op="placeholder")
        self.stepped = compat_distributed.storage_sizes(compat_dynamo.gradients_given(gm))
        self.attributes = compat_distributed.storage_sizes(compat_dynamo.attributes_of(gm))
        self.planned: PlannedGraph | None = None
        self.entry: Entry | None = None
        self.first: _First | None = None  # where it is to be planned again
        self.cast = ""  # a parameter that autocast casts
        self.began = time.perf_counter()
        self.tangents: dict[int, tuple[int, ...]] = {}  # strides of its results' gradients

    def run(self, gm: Any, inputs: Sequence[Any], symbolic: bool) -> Callable[..., Any]:
        with eager_paths.active(), compat_dynamo.called_instead(gm, eager_paths.as_in_eager):
            return compat_compile.compile_training(
                gm, inputs, partition=self.partition, forward=self.forward, backward=self.backward,
                inference=self.inference, symbolic=symbolic,
            )  # fmt: skip

    def compiled(self, gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiled mode: what Inductor makes of the graph."""
        session, last = self.session, self.graph_break is None
        if (n := compat_dynamo.sized_by_data(gm)) is not None:
            raise Unsupported(
                f"{getattr(n.target, '__name__', n.target)} at {origin_of(n)}, in compiled mode",
                "the size of its result follows from data",
                "leave torch._dynamo.config.capture_dynamic_output_shape_ops off, or use tightship.fit",
            )
        ahead = self._ahead()
        options = replace(self.options, arena=self.options.arena and not ahead.count)
        # Without optimizer= a budget counts no step of one, compiled or not.
        ledger = Ledger(None) if self.stepped and session.ledger.step is None else session.ledger
        shares = Shares(
            ledger, self.place, self._storages_in, self._given, last, ahead, self._passed_on(),
            inner=compat_dynamo.inner(), stepped=sum(self.stepped.values()),
        )  # fmt: skip
        arena = session.arenas.setdefault(self.frame, FrameArena())
        later = session.ledger.resolved_before(self.place, training=True)
        try:
            run, planned = self._divided(gm, inputs, options, arena, shares)
        except Infeasible as no:
            if not (shares.followed and not later if shares.percent else ahead.others):
                raise self._advised(no.with_budget(no.budget - shares.missing), later, ahead) from None
            shares = replace(shares, deferred=True)
            run, planned = compile_within(gm, inputs, options, arena, shares)
        session.graphs.append(planned)
        if self.graph_break is not None:
            planned.notes.append(
                f"a graph break follows at {self.graph_break.place}: the budget is shared with other graphs"
            )
        if self.options.on_plan is not None:
            self.options.on_plan(planned)

        def call(*args: Any, _session: Owner = session) -> Any:
            return run(*args)

        return call

    def _divided(
        self, gm: Any, inputs: Sequence[Any], options: CompileOptions, arena: FrameArena, shares: Shares
    ) -> tuple[Callable[..., Any], CompiledGraph]:
        """What is compiled in one of the first divisions of the bytes for it and the calls ahead; where it cannot be
        had otherwise, for calls that have no batches of their own."""
        tried: list[Infeasible] = []
        for known in shares.ahead.each():
            shares.ahead = known
            for shares.attempt in range(_DIVISIONS):
                try:
                    return compile_within(gm, inputs, options, arena, shares)
                except Infeasible as no:
                    tried.append(shares.of_all_calls(no))
                if shares.attempt + 1 >= shares.divisions:
                    break
            first = min(tried[:_DIVISIONS], key=lambda no: no.best_peak)
            if first.missing > known.batches:
                break
        raise first

    def partition(self, gm: Any, outputs: int, static: Sequence[int]) -> tuple[Any, Any]:
        self.tangents = compat_compile.tangent_strides(gm)
        primals = self._primals(gm, static)
        casts = compat_compile.casts(gm)
        named = {
            primals[k].name: n
            for k, n in casts.items()
            if k < len(primals) and primals[k].role == "parameter"
        }
        self.cast = next(iter(named), "")
        for name, count in named.items():
            if count > 1:
                self.session.say(f"{name} {CASTS}")
        joint = lower_joint(gm, outputs, primals, name=f"graph {self.name}")
        planned, nodes = self._plan_graph(joint)
        self.planned, planned.sends = planned, compat_sending.sent_by(gm)
        return compat_compile.split(gm, nodes, outputs)

    def forward(self, _gm: Any, _inputs: Any) -> Any:
        assert self.planned is not None
        return self._forward(self.planned)

    def backward(self, _gm: Any, _inputs: Any) -> Any:
        assert self.planned is not None
        compat_compile.never_donates()
        planned, run, ledger = self.planned, self.planned.backward, self.session.ledger

        def backward(args: list[Any]) -> list[Any]:
            assert self.entry is not None
            with planned.running(backward=True):
                ledger.settle()
                ledger.begin(self.entry, dict, backward=planned.mark(args))
                return run(args)

        return self._function(backward)

    def inference(self, gm: Any, _inputs: Any) -> Any:
        joint = lower_joint(gm, None, self._primals(gm, ()), name=f"graph {self.name}")
        planned, _ = self._plan_graph(joint)
        planned.sends = compat_sending.sent_by(gm)
        return self._forward(planned)

    def _forward(self, planned: PlannedGraph) -> Callable[[list[Any]], Any]:
        ledger = self.session.ledger

        def forward(args: list[Any]) -> list[Any]:
            assert self.entry is not None
            if self.first is not None and ledger.settled and not ledger.waits(self.entry):
                self._plan_again(planned, self.first)
            entry = self.entry
            with planned.running():
                elsewhere = compat_capture.saving_hooks()
                place = ledger.begin(entry, lambda: self._given(args), elsewhere=elsewhere)
                results = planned.forward(args)
                ledger.keeps(
                    place,
                    entry,
                    planned.made(results, saved=not elsewhere),
                    planned.mark(results[len(results) - len(planned.saved) :]),
                )
                return results

        return self._function(forward)

    def _function(self, run: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], Any]:
        def function(args: list[Any], _session: Owner = self.session) -> list[Any]:
            return run(args)

        return compat_compile.boxed(function)

    # --- inputs ---

    def _primals(self, gm: Any, static: Sequence[int]) -> list[Primal]:
        """Names and roles, from Dynamo's placeholders where AOTAutograd's are the same ones."""
        inputs = [n for n in gm.graph.find_nodes(op="placeholder") if not compat_compile.is_tangent(n)]
        if len(inputs) != len(self.placeholders):
            return [Primal("parameter" if k in static else "input", n.name) for k, n in enumerate(inputs)]
        rows = []
        for n, theirs in zip(inputs, self.placeholders, strict=True):
            source = compat_dynamo.source_name(theirs)
            role = next((r for r in ("parameter", "buffer") if f"._{r}s[" in source), "input")
            rows.append(Primal(role, _readable(source) or n.name))
        return rows

    def _given(self, args: Sequence[Any]) -> dict[int, int]:
        """Identity and bytes of what the graph is called with, but for what counts otherwise."""
        given = compat_distributed.storage_sizes(args)
        otherwise = self._counted(given)
        return {key: size for key, size in given.items() if key not in otherwise}

    def _counted(self, given: Iterable[int]) -> set[int]:
        """Of these storages, those that count otherwise than as inputs: what an earlier graph made and counts, the
        optimizer's state, and gradients in its step."""
        state, graphs = self.session.ledger.state(), self.session.graphs
        return {
            key for key in given
            if key in state or key in self.stepped or any(p.handed_out(key) for p in graphs)
        }  # fmt: skip

    def _storages(self, graph: Graph) -> dict[int, int]:
        return self._storages_in(graph.static_bytes)

    def _storages_in(self, static: int) -> dict[int, int]:
        """Identity and bytes of the caller's tensors, but for what counts otherwise; what is not known counts as
        itself. ``static``: bytes of all inputs."""
        given = compat_distributed.storage_sizes(map(compat_dynamo.example_of, self.placeholders))
        given = {**self.attributes, **given}
        handed = self._counted(given)
        storages = {key: size for key, size in given.items() if key not in handed}
        counted = sum(given[key] for key in handed)
        rest = static - sum(storages.values()) - counted
        return {**storages, -1 - self.frame: rest} if rest > 0 else storages

    # --- planning ---

    def _plan_graph(self, joint: Joint) -> tuple[PlannedGraph, list[Any]]:
        o = self.options
        self.began = time.perf_counter()
        with compat_compile.outside():
            program = profile(
                joint.program, cache=o.cache, seconds_per_op=o.seconds_per_op, seconds=o.planner.seconds
            )
        program = replace(program, notes=tuple(n for n in program.notes if "(tangents" not in n))
        program = pinned(joint, program, followed=self.graph_break is not None)
        plan, where = self._within_budget(joint, program)
        unchecked = _unchecked(joint)
        values = _saved(program, where, unchecked)
        self.first = self.first and replace(self.first, unchecked=unchecked)
        frame_arena = self.session.arenas.setdefault(self.frame, FrameArena())
        planned = PlannedGraph(
            replace(joint, nodes={}),
            program,
            plan,
            where,
            name=self.name,
            frame_arena=frame_arena,
            strict=o.strict,
            arena=o.arena,
            saved=values,
        )
        if self.graph_break is not None:
            planned.notes.append(
                f"a graph break follows at {self.graph_break.place}: the budget is shared with other graphs"
            )
        self.session.graphs.append(planned)
        if o.on_plan is not None:
            o.on_plan(planned)
        return planned, [joint.node_of(program.graph.values[v].storage) for v in values]

    def _within_budget(self, joint: Joint, program: Program) -> tuple[Plan, Cut]:
        graph, ledger = program.graph, self.session.ledger
        everything = replay(graph, baseline(graph))
        static = ledger.new_static(self.place, self._storages(graph))
        training, need = joint.boundary is not None, everything.peak - graph.static_bytes
        later = ledger.resolved_before(self.place, training)
        ahead = self._ahead() if training else Ahead()
        kept, handed = _kept(joint, program), _results(joint, graph)
        plans = GraphPlans(self.session, self.place, self.followed or ahead.others, self.began)
        whole = Whole(
            -1 if joint.boundary is None else joint.boundary, need,
            kept, handed, handed if ahead.elsewhere else kept, *self._gradients(joint, graph),
        )  # fmt: skip

        def entered(plan: Plan, *, current: bool = False) -> tuple[Plan, Cut]:
            where = cut(joint, program, plan)
            self.entry = self._entry(graph, plan, where, static, whole)
            entry = self.entry.elsewhere() if ahead.elsewhere else self.entry
            follow = bool(ahead.count) or plans.followed
            ledger.enter(self.place, entry, current=current, follow=follow)
            return plan, where

        def free(current: bool, ahead: Ahead = Ahead()) -> int | None:  # noqa: B008
            last = handed if self.graph_break is None else 0
            stay = (0, 0) if ledger.accumulate else (whole.gradients, whole.parameters)
            return ledger.available(
                self.place, static, need, training=training, current=current, results=last, gradients=stay[0],
                parameters=stay[1], rest=whole.rest, ahead=ahead,
            )  # fmt: skip

        try:
            room = free(False, ahead)
            if ahead.count and room is not None:
                if plans.followed and not ahead.elsewhere and not ledger.settled:
                    self.first = _First(static, whole)
                return entered(self._repeated(plans, graph, whole, ahead, partial(free, False)))
            if not ahead.elsewhere and (found := plans.first(graph, room, static, whole)) is not None:
                self.first = _First(static, whole)
                return entered(found)
            if (
                plans.followed
                and (found := plans.again(graph, ledger.part(self.place), room, whole)) is not None
            ):
                return entered(found)
            plan = plans.halved(graph, room, training)
            return entered(plans.resting(graph, plan, cut(joint, program, plan), static, whole))
        except Infeasible as no:
            if not ledger.binding(training):
                plan = plans.within(graph, None)
                return entered(replace(plan, notes=(*plan.notes, NOT_HELD)))
            unknown = ahead.others and not ledger.settled
            rest = None if ahead.count or unknown else free(True)
            if rest is not None and need <= rest:  # kept whole it fits beside what is in memory now
                return entered(plans.within(graph, graph.static_bytes + rest), current=True)
            found = None if later and training else plans.deferred(graph, static, whole, no.best_peak)
            if found is not None:
                return entered(found)
            raise self._advised(no, later, ahead) from None

    def _repeated(
        self, plans: GraphPlans, graph: Graph, whole: Whole, ahead: Ahead, free: Callable[[Ahead], int | None]
    ) -> Plan:
        """One plan for this call and those ahead; where there is none, one for calls that have no batches of
        their own: those that have are refused when they come."""
        tried: list[Infeasible] = []
        for known in ahead.each():
            try:
                return plans.repeated(graph, free(known) or 0, whole, known)
            except Infeasible as no:
                tried.append(no)
            if tried[0].missing > ahead.batches:
                break
        raise tried[0]

    def _entry(self, graph: Graph, plan: Plan, where: Cut, static: int, whole: Whole) -> Entry:
        ledger = self.session.ledger
        return Entry(
            static=static,
            dynamic=plan.peak - graph.static_bytes,
            rest=where.resident - graph.static_bytes,
            gradients=0 if ledger.accumulate else whole.gradients,
            unplanned=whole.need,
            unplanned_rest=whole.kept,
            results=whole.handed if self.graph_break is None else 0,
            handed=whole.handed,
            parameters=0 if ledger.accumulate else whole.parameters,
            forward=where.peaks[0] - graph.static_bytes,
            beside=ledger.beside_earlier(self.place, whole.boundary >= 0),
            place=self.place,
        )

    def _plan_again(self, planned: PlannedGraph, first: _First) -> None:
        """Within its part of the budget, now that all graphs of a training step are known."""
        self.first, ledger, program, old = None, self.session.ledger, planned.program, self.entry
        assert old is not None
        graph = program.graph
        plans = GraphPlans(self.session, self.place, self.followed, time.perf_counter())
        plan = plans.again(graph, ledger.part_of(old), None, first.whole)
        if plan is None:
            return
        where = planned.cut(plan)
        new = self._entry(graph, plan, where, first.static, first.whole)
        saved = _saved(program, where, first.unchecked)
        apart = [
            sum(graph.values[v].storage in first.unchecked for v in values)
            for values in (saved, planned.saved)
        ]
        if apart[0] == apart[1] and ledger.renew(old, new):  # AOTAutograd has counted those
            self.entry = new
            planned.replace(plan, where, saved)
            if self.options.on_plan is not None:
                self.options.on_plan(planned)

    def _gradients(self, joint: Joint, graph: Graph) -> tuple[int, int]:
        """Bytes of the gradients that the backward pass hands out and that stay, others being what an earlier graph's
        backward pass begins with; and of those of parameters among them."""
        given: list[Any] = [compat_dynamo.example_of(n) for n in self.placeholders]
        if len(given) != len(joint.backward):
            given = [None] * len(joint.backward)
        rows = [
            (graph.values[r.value].storage, t)
            for r, t in zip(joint.backward, given, strict=True)
            if isinstance(r, Ref) and (t is None or self._stays(t))
        ]
        stay = {s for s, _ in rows} - graph.static
        parameters = {s for s, t in rows if t is None or isinstance(t, torch.nn.Parameter)} & stay
        every, trained = (sum(graph.storages[s].size for s in found) for found in (stay, parameters))
        parts = self._own_gradients()
        return every + parts, trained + parts

    def _own_gradients(self) -> int:
        """Bytes of what stays of the gradients that hooks of ``fully_shard`` send: this rank's parts."""
        given = [t for t in map(compat_dynamo.example_of, self.placeholders) if t is not None]
        return self.session.ledger.own_gradients(t for t in given if t.requires_grad)

    def _stays(self, t: torch.Tensor) -> bool:
        """Whether the gradient of an input stays once it is handed out: others are what an earlier graph's backward
        pass begins with, or are sent by hooks of ``fully_shard``."""
        key = compat.storage_key(compat_distributed.own_part(t))
        return t.is_leaf and key not in self.session.ledger.gathered()

    def _passed_on(self) -> int:
        """Bytes of gradients that are handed out and do not stay, less what stays of them."""
        given = map(compat_dynamo.example_of, self.placeholders)
        passed = [t for t in given if t is not None and t.requires_grad and not self._stays(t)]
        return sum(compat_distributed.storage_sizes(passed).values()) - self._own_gradients()

    def _ahead(self) -> Ahead:
        """What is to run this code, too, before the first backward pass: modules that are compiled one by one, and as
        many calls as the caller says."""
        if compat_compile.in_backward():
            self.session.say(f"graph {self.name} {_REENTRANT}")
        modules, others = compat_dynamo.modules_beside()
        left = max(len(modules), self.options.calls) - 1 - self.place[1]
        if left <= 0 and not others:
            return Ahead()
        new, elsewhere = self._uncounted(modules), compat_capture.saving_hooks(traced=True)
        said = self.options.calls > len(modules)
        batches = max(left, 0) * self._inputs() if said else 0
        beside = self._taken_by(others)
        return Ahead(max(left, 0), new + batches, elsewhere, bool(others), beside, batches, said)

    def _inputs(self) -> int:
        """Bytes of the inputs, but for parameters, buffers and what earlier graphs have made."""
        rows = [n for n in self.placeholders if not re.search(_HELD_BY_MODULES, compat_dynamo.source_name(n))]
        given = compat_distributed.storage_sizes(map(compat_dynamo.example_of, rows))
        otherwise = self._counted(given)
        return sum(size for key, size in given.items() if key not in otherwise)

    def _uncounted(self, modules: Sequence[torch.nn.Module]) -> int:
        """Bytes of parameters and buffers of other modules that nobody has counted."""
        own = compat_distributed.storage_sizes(map(compat_dynamo.example_of, self.placeholders))
        theirs = compat_distributed.storage_sizes(
            t for m in modules for t in itertools.chain(m.parameters(), m.buffers())
        )
        return self.session.ledger.uncounted({k: n for k, n in theirs.items() if k not in own})

    def _taken_by(self, others: Sequence[torch.nn.Module]) -> int:
        """Bytes that parameters, buffers and gradients of other modules take of a budget in bytes."""
        ledger = self.session.ledger
        if ledger.budget is None or ledger.budget.bytes is None:
            return 0
        counted = ledger.accumulate or bool(ledger.gathered())
        trained = (p for m in others for p in m.parameters() if p.requires_grad and not counted)
        return self._uncounted(others) + sum(compat_distributed.storage_sizes(trained).values())

    def _advised(self, no: Infeasible, later: bool, ahead: Ahead = Ahead()) -> Infeasible:  # noqa: B008
        """``no`` of the whole budget, with what else of it is taken; ``later``: whether it was resolved before."""
        others = (
            f"{ahead.count} more calls of this graph share the budget, with {format_bytes(ahead.static)} of "
            "parameters and buffers of their own, their gradients, and what they keep for the backward pass"
        )
        no = self.session.ledger.of_the_whole(self.place, no)
        more = [_RESOLVED] * later + [others] * (ahead.count > 0)
        return no.with_advice((*no.advice, *more)) if more else no


def _kept(joint: Joint, program: Program) -> int:
    """Bytes beyond the inputs that stay between the passes if everything is kept."""
    graph = program.graph
    steps = baseline(graph)
    line = replay(graph, steps)
    at = next((k for k, s in enumerate(steps) if s.kind == "compute" and s.op == joint.boundary), len(steps))
    return (line.resident[at - 1] if at else graph.static_bytes) - graph.static_bytes


def _results(joint: Joint, graph: Graph) -> int:
    """Bytes that the forward pass hands out."""
    handed = {graph.values[r.value].storage for r in joint.forward if isinstance(r, Ref)} - graph.static
    return sum(graph.storages[s].size for s in handed)


def _unchecked(joint: Joint) -> frozenset[int]:
    """Storages that PyTorch saves without looking for later changes."""
    return frozenset(s for s, nodes in joint.nodes.items() if compat_compile.unchecked_saving(nodes[0]))


def _saved(program: Program, where: Cut, unchecked: frozenset[int]) -> list[int]:
    """What is saved between the passes, what is not looked at for changes last."""
    return sorted((*where.saved, *where.made), key=lambda v: program.graph.values[v].storage in unchecked)


def _readable(source: str) -> str:
    """``L['self']._modules['fc']._parameters['weight']`` -> ``fc.weight``; other expressions as they are."""
    parts = re.findall(r"_(?:modules|parameters|buffers)\['([^']*)'\]", source)
    return ".".join(parts) if parts else re.sub(r"^L\['(\w+)'\]", r"\1", source)
