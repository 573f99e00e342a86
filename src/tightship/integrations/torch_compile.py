"""Backend for torch.compile: ``torch.compile(model, backend="tightship", options={"budget": "6GiB"})``.

Each graph that Dynamo finds is planned as one, forward and backward pass together, and run op by op on ATen:
losses and gradients are bit-identical to eager's. What AOTAutograd would trace otherwise is put right
(`compat_compile.compile_training`, `lower_joint`); where it cannot be, a `Fallback` is warned. A budget counts the
graphs' inputs (parameters, buffers, batch), everything they make, and their gradients; with ``optimizer`` it is of
the whole step (`accounting`). It does not count what the caller's own code makes between graphs. A percentage is
resolved to bytes once per call of torch.compile (per ``options`` object): it is of what all graphs of the first
training step (and the optimizer's step) need together, and holds for other batches, modes and evaluation (`Ledger`).

Sizes are fixed: a batch of another size is planned anew, and kept. Dynamo compiles a function eight times and no
more (``torch.compile(recompile_limit=…)``); batches of further sizes then run in eager, unplanned, which the
eighth plan warns of (`Fallback`). Graph breaks cost plans their overview and are said in the notes:
transformers' loss functions cause one unless ``model.loss_type`` is set.
"""

from __future__ import annotations

import copy
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

import torch

from tightship.errors import BadInput, Infeasible, TightshipError, Unsupported
from tightship.execute import allocator
from tightship.execute.heap import faster_on_heap, plan_on_heap
from tightship.execute.interpreter import Fallback
from tightship.execute.profile import profile
from tightship.frontends.torch import compat, compat_compile, compat_ddp
from tightship.frontends.torch.capture.joint import Joint, Primal, lower_joint, origin_of, pinned
from tightship.frontends.torch.program import Program, Ref
from tightship.graph import Graph, aligned
from tightship.integrations.accounting import Entry, Ledger, StepBytes, StepMemory, measure_optimizers
from tightship.integrations.torch_inductor import CompiledGraph, Shares, compile_within
from tightship.integrations.torch_partition import (
    NOT_HELD,
    CompileOptions,
    Cut,
    FrameArena,
    PlannedGraph,
    cut,
    read_options,
)
from tightship.plan import Plan
from tightship.planners.default import Options as PlannerOptions
from tightship.planners.default import plan as default_plan
from tightship.planners.default import seconds_left
from tightship.planners.hints import matches, parse_hints
from tightship.process_local import NotCopied
from tightship.simulate import baseline, replay

__all__ = [
    "Fallback",
    "backend",
    "compiled_notes",
    "compiled_plans",
    "compiled_session",
    "measured_step",
]


_RESOLVED = (
    "the budget is a percentage of the first training step: begin with the largest kind of batch, give bytes, or "
    "give models that are compiled apart options of their own"
)


_BUCKETS = (
    "Dynamo cuts a model in DistributedDataParallel into a graph per bucket, which cannot be planned: set "
    "optimize_ddp = False before the first call (buckets are still reduced during the backward pass)"
)


_GATHERED = (
    "parameters of fully_shard are gathered, sent and freed by hooks, between graphs, where no plan counts them: use "
    "tightship.fit, which takes the model as it is, or leave optimizer= out (callbacks: optimizer=None) for "
    "a budget of each graph by itself"
)


_COPIED = (
    "comes in another layout than AOTAutograd expects, which copies it: sums over it may run in "
    "another order than in eager, with other last bits; for eager's bits compile the loss with the model"
)


_CASTS = (
    "is used more than once under one autocast context: eager casts it once there and adds its gradients in the "
    "lower precision, here each use has a cast of its own and gradients are added in float32; leave the autocast "
    "context between calls for eager's bits"
)


def backend(
    gm: Any, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **more: Any
) -> Any:
    """What torch.compile calls with each graph. ``options`` as `CompileOptions` describes them.

    Errors reach the caller when the compiled model is called: ``Infeasible`` when no plan meets the budget,
    with the least peak reached and what makes it up; ``BadInput`` for bad options; ``Unsupported``, where
    ``eager_fallback`` is off, for what cannot be planned (otherwise `Fallback` is warned).
    """
    compat.require_torch()
    try:
        if more:
            rule = f"unknown keywords {', '.join(more)}: the backend takes options= and nothing else"
            raise BadInput(rule, place="torch.compile")
        session = _session(options if options is not None else {})
    except TightshipError as error:
        return _raise_when_called(error)
    return session.compile(gm, example_inputs)


def compiled_plans(compiled: Any) -> tuple[PlannedGraph | CompiledGraph, ...]:
    """The planned graphs of a compiled module or function, in the order they were planned (empty before its
    first call). Plans are found by the ``options`` given to torch.compile: raises ``BadInput`` if there were
    none. Dynamo runs one code for models of one class that are compiled with equal options (so are copies): they
    share its plans."""
    return tuple(compiled_session(compiled).graphs)


def measured_step(compiled: Any) -> AbstractContextManager[StepBytes]:
    """Measures a training step: ``with measured_step(compiled) as step:`` around everything from the forward pass to
    ``zero_grad``, the batch made before; then ``step.planned`` and ``step.measured``.

    Both count what a budget counts (`accounting`), the measured bytes also what the caller's own code makes. They are
    None where a graph was planned meanwhile. Raises ``NoCompiler`` where nothing can be measured.
    """
    session = compiled_session(compiled)
    kinds = {allocator.kind_of(p.device) for p in session.graphs}
    return StepBytes().measuring(session.ledger, session.graphs, "cuda" if "cuda" in kinds else "cpu")


def compiled_notes(compiled: Any) -> tuple[str, ...]:
    """What a user should know: what runs unplanned, and every graph's notes."""
    session = compiled_session(compiled)
    if not session.graphs and not session.notes:
        return (
            "nothing is planned: the model has not run yet, had no plan, or has nothing that Dynamo compiles",
        )
    return tuple(
        dict.fromkeys([*session.notes, *(f"graph {p.name}: {n}" for p in session.graphs for n in p.notes)])
    )


# --- sessions: what belongs to one call of torch.compile ----------------------------------------------------


_sessions: WeakValueDictionary[int, Session] = WeakValueDictionary()


def _session(options: Mapping[str, Any]) -> Session:
    """The options object stands for the call of torch.compile: it is the same for all graphs of a model."""
    session = _sessions.get(id(options)) if options else None
    if session is None:
        chosen = read_options(options)
        step, outside = _step_memory(chosen)
        session = Session(options, chosen, Ledger(chosen.budget, step))
        if chosen.accumulate or (step is not None and step.existing_gradients()):
            session.ledger.accumulates()
        if outside:
            session.say(outside)
        if options:
            _sessions[id(options)] = (
                session  # the session keeps the object, so its identity is not given away
            )
    return session


def _step_memory(chosen: CompileOptions) -> tuple[StepMemory | None, str]:
    """What the optimizer takes; or why that is not known and outside of the budget, where that is allowed."""
    if chosen.optimizer is None:
        return None, ""
    try:
        return measure_optimizers(chosen.optimizer), ""
    except Unsupported as error:
        if not chosen.eager_fallback:
            raise
        return None, f"the optimizer's state and step are outside the budget: {error}"


def compiled_session(compiled: Any) -> Session:
    """What is kept of a compiled module or function, be it in DistributedDataParallel. Raises ``BadInput`` if it was
    given no options."""
    options = compat_compile.compiled_options(compiled)
    if options is None and isinstance(compiled, torch.nn.parallel.DistributedDataParallel):
        compiled = compiled.module
        options = compat_compile.compiled_options(compiled)
    if options is None:
        rule = f"a {type(compiled).__name__} compiled without options: plans are found by torch.compile(options=…)"
        raise BadInput(rule, place="compiled_plans")
    session = _sessions.get(id(options))
    if session is None:
        others = (_sessions.get(id(x)) for x in compat_compile.equal_options(compiled))
        session = next(filter(None, others), None) or compat_compile.frame_session(compiled)
    return session or Session(options, CompileOptions(), Ledger(None))


def _note_skipped(
    session: Session | None, options: Mapping[str, Any] | None, what: str, why: str, first: bool
) -> Session:
    """Something that Dynamo leaves to eager without asking the backend; unless ``first``, because of something else,
    which has been said where it is known."""
    session = session or _session(options if options is not None else {})
    if first or not session.notes:
        session.unplanned(f"{what} and what it calls", f"Dynamo could not compile it ({why})")
    return session


@dataclass(eq=False)
class Session(NotCopied):
    """Everything planned under one call of torch.compile."""

    given: Mapping[str, Any]
    options: CompileOptions
    ledger: Ledger
    graphs: list[PlannedGraph | CompiledGraph] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    arenas: dict[int, FrameArena] = field(default_factory=dict)
    casts: dict[str, Any] = field(
        default_factory=dict
    )  # by parameter: in which autocast context it was cast last

    def compile(self, gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            symbolic = compat_compile.fixed_sizes(gm, inputs)
            self.ledger.sends(compat_ddp.active_buckets())
            follows = compat_compile.graph_break(gm)
            if follows is not None and follows.by_ddp:
                raise BadInput(_BUCKETS, True, "torch._dynamo.config.optimize_ddp")
            if self._gathers(gm):
                raise BadInput(_GATHERED, place="torch.compile(options=…)")
            if follows is not None and follows.runs:
                what = f"what is called at {follows.place}, but for graphs of its own,"
                self.unplanned(what, f"Dynamo breaks the graph there ({follows.why})")
            graph = _Compilation(self, gm)
            if self.options.mode == "compiled":
                compiled = graph.compiled(gm, inputs)
                self._warn_of_recompile_limit()
                return compiled
            compiled = graph.run(gm, inputs, symbolic)
            self._warn_of_recompile_limit()
            compiled = self._watching_casts(compiled, graph.cast) if graph.cast else compiled
            return self._watching_gradients(compiled, graph) if graph.tangents else compiled
        except (BadInput, Infeasible) as error:
            return _raise_when_called(error, self)
        except Exception as error:
            if compat_compile.is_control_flow(error):
                raise
            error = compat_compile.in_our_words(error)
            if not self.options.eager_fallback:
                return _raise_when_called(error, self)
            return self._eager(gm, error)

    def _gathers(self, gm: Any) -> bool:
        """Whether the optimizer has parts of parameters, and the graph whole ones that were made of them."""
        step = self.ledger.step
        if step is None or not step.in_parts():
            return False
        keys = map(compat.storage_key, compat_compile.trained_parameters(gm))
        return any(key not in step.parameters for key in keys)

    def _watching_casts(self, compiled: Callable[..., Any], name: str) -> Callable[..., Any]:
        """``compiled``, which casts the parameter of this name: says when it has been cast in the same context."""

        key = f"{compat_compile.frame()[0]} {name}"

        def run(*args: Any) -> Any:
            context = compat_compile.autocast_context()
            if context is not None and context is self.casts.get(key):
                self.say(f"{name} {_CASTS}")
            self.casts[key] = context
            return compiled(*args)

        return run

    def _watching_gradients(self, compiled: Callable[..., Any], graph: _Compilation) -> Callable[..., Any]:
        """``compiled``: says when the gradient of a result is copied first."""

        def copied(k: int, summed: bool) -> None:
            text = f"the gradient of result {k} of graph {graph.name} {_COPIED}"
            if not summed:
                self.say(text)
            elif text not in self.notes:
                self.notes.append(text)

        def run(*args: Any) -> Any:
            results = compiled(*args)
            compat_compile.watch_tangents(results, graph.tangents, copied)
            return results

        return run

    def _warn_of_recompile_limit(self) -> None:
        count = compat_compile.last_time()
        if count is None:
            return
        _, name = compat_compile.frame()
        text = (
            f"graph {name} is the last of its function's: Dynamo compiles a function {count} times, and what is "
            "new after that, such as batches of other sizes, runs in eager, without a plan and outside the "
            "budget; sizes seen so far stay planned. Give torch.compile a larger recompile_limit, or pad batches"
        )
        self.say(text)

    def unplanned(self, what: str, why: str) -> None:
        """Says that something runs outside of all graphs. Raises ``Unsupported`` unless that is allowed."""
        if not self.options.eager_fallback:
            instead = "change the model so that Dynamo compiles it whole, or allow it (strict=False)"
            raise Unsupported(f"{what} outside of planned graphs", why, instead)
        self.say(f"{what} runs in eager, without a plan and outside the budget: {why}")

    def say(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            warnings.warn(text, Fallback, stacklevel=3)

    def _eager(self, gm: Any, error: Exception) -> Callable[..., Any]:
        _, name = compat_compile.frame()
        kind = "" if isinstance(error, TightshipError) else f"{type(error).__name__}: "
        text = f"graph {name} runs in eager, without a plan and outside the budget: {kind}{error}"
        self.say(text)

        def eager(
            *args: Any, _session: Session = self
        ) -> Any:  # notes live as long as the code they are about
            return gm(*args)

        return eager


def _raise_when_called(error: Exception, session: Session | None = None) -> Callable[..., Any]:
    """Raises ``error`` itself when the compiled model is called; from within a backend Dynamo would wrap
    it. The session lives on, and with it what a percentage came to."""

    shown = copy.copy(error)  # without the frames that raised it, and all they hold

    def failed(*_args: Any, _session: Session | None = session) -> Any:
        raise shown.with_traceback(None) from None

    return failed


# --- compiling one graph ------------------------------------------------------------------------------------


class _Compilation:
    """One graph: joint graph -> program -> plan -> two functions."""

    def __init__(self, session: Session, gm: Any) -> None:
        self.session, self.options = session, session.options
        self.frame, self.name = compat_compile.frame()
        self.graph_break = compat_compile.graph_break(gm)
        self.placeholders = gm.graph.find_nodes(op="placeholder")
        self.planned: PlannedGraph | None = None
        self.entry: Entry | None = None
        self.cast = ""  # a parameter that autocast casts
        self.began = time.perf_counter()
        self.tangents: dict[int, tuple[int, ...]] = {}  # strides of its results' gradients

    def run(self, gm: Any, inputs: Sequence[Any], symbolic: bool) -> Callable[..., Any]:
        return compat_compile.compile_training(
            gm, inputs, partition=self.partition, forward=self.forward, backward=self.backward,
            inference=self.inference, symbolic=symbolic,
        )  # fmt: skip

    def compiled(self, gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiled mode: what Inductor makes of the graph."""
        session, last = self.session, self.graph_break is None
        if (n := compat_compile.sized_by_data(gm)) is not None:
            raise Unsupported(
                f"{getattr(n.target, '__name__', n.target)} at {origin_of(n)}, in compiled mode",
                "the size of its result follows from data",
                "leave torch._dynamo.config.capture_dynamic_output_shape_ops off, or use tightship.fit",
            )
        shares = Shares(session.ledger, self.frame, self._storages_in, last)
        arena = session.arenas.setdefault(self.frame, FrameArena())
        later = session.ledger.resolved_before(self.frame, training=True)
        try:
            run, planned = compile_within(gm, inputs, self.options, arena, shares)
        except Infeasible as no:
            raise self._advised(no, later) from None
        session.graphs.append(planned)
        if self.graph_break is not None:
            planned.notes.append(
                f"a graph break follows at {self.graph_break.place}: the budget is shared with other graphs"
            )
        if self.options.on_plan is not None:
            self.options.on_plan(planned)

        def call(*args: Any, _session: Session = session) -> Any:
            return run(*args)

        return call

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
                self.session.say(f"{name} {_CASTS}")
        joint = lower_joint(gm, outputs, primals, name=f"graph {self.name}")
        planned, nodes = self._plan_graph(joint)
        self.planned = planned
        return compat_compile.split(gm, nodes, outputs)

    def forward(self, _gm: Any, _inputs: Any) -> Any:
        assert self.planned is not None
        return self._forward(self.planned)

    def backward(self, _gm: Any, _inputs: Any) -> Any:
        assert self.planned is not None
        compat_compile.never_donates()
        run, ledger, frame, entry = self.planned.backward, self.session.ledger, self.frame, self.entry
        assert entry is not None

        def backward(args: list[Any]) -> list[Any]:
            ledger.settle()
            ledger.begin(frame, entry, backward=True)
            return run(args)

        return self._function(backward)

    def inference(self, gm: Any, _inputs: Any) -> Any:
        joint = lower_joint(gm, None, self._primals(gm, ()), name=f"graph {self.name}")
        return self._forward(self._plan_graph(joint)[0])

    def _forward(self, planned: PlannedGraph) -> Callable[[list[Any]], Any]:
        assert self.entry is not None
        ledger, frame, entry = self.session.ledger, self.frame, self.entry

        def forward(args: list[Any]) -> list[Any]:
            ledger.begin(frame, entry)
            return planned.forward(args)

        return self._function(forward)

    def _function(self, run: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], Any]:
        def function(args: list[Any], _session: Session = self.session) -> list[Any]:
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
            source = compat_compile.source_name(theirs)
            role = next((r for r in ("parameter", "buffer") if f"._{r}s[" in source), "input")
            rows.append(Primal(role, _readable(source) or n.name))
        return rows

    def _storages(self, graph: Graph) -> dict[int, int]:
        return self._storages_in(graph.static_bytes)

    def _storages_in(self, static: int) -> dict[int, int]:
        """Identity and bytes of the caller's tensors, without those that an earlier graph made and counts;
        what is not known counts as itself. ``static``: bytes of all inputs."""
        storages: dict[int, int] = {}
        counted = 0
        for n in self.placeholders:
            real = compat_compile.example_of(n)
            if real is None:
                continue
            key, size = compat.storage_key(real), aligned(real.numel() * real.element_size())
            if any(p.handed_out(key) for p in self.session.graphs):
                counted += size
            else:
                storages[key] = max(storages.get(key, 0), size)
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
        program = pinned(joint, program)
        plan, where = self._within_budget(joint, program)
        values = sorted((*where.saved, *where.made), key=lambda v: _unchecked(joint, program, v))
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
        static = ledger.new_static(self.frame, self._storages(graph))
        training, need = joint.boundary is not None, everything.peak - graph.static_bytes
        later = ledger.resolved_before(self.frame, training)

        def entered(plan: Plan, *, current: bool = False) -> tuple[Plan, Cut]:
            where = cut(joint, program, plan)
            last = self.graph_break is None
            self.entry = _entry(
                joint, program, plan, where, static, everything.peak, last=last, accumulate=ledger.accumulate,
                beside=ledger.beside_earlier(self.frame, training),
            )  # fmt: skip
            ledger.enter(self.frame, self.entry, current=current)
            return plan, where

        def free(current: bool) -> int | None:
            last = _results(joint, graph) if self.graph_break is None else 0
            return ledger.available(
                self.frame, static, need, training=training, current=current, results=last
            )

        try:
            return entered(self._plan(graph, free(False), training))
        except Infeasible as no:
            if not ledger.binding(training):
                plan = self._plan_within(graph, None)
                return entered(replace(plan, notes=(*plan.notes, NOT_HELD)))
            rest = free(True)
            if rest is not None and need <= rest:  # kept whole it fits beside what is in memory now
                return entered(self._plan_within(graph, graph.static_bytes + rest), current=True)
            raise self._advised(no, later) from None

    def _advised(self, no: Infeasible, later: bool) -> Infeasible:
        """``no`` with what else of the budget is taken; ``later``: whether the budget was resolved before."""
        more = [text for text in (_RESOLVED if later else "", self.session.ledger.beside()) if text]
        return no.with_advice((*no.advice, *more)) if more else no

    def _plan(self, graph: Graph, free: int | None, training: bool) -> Plan:
        """A plan that needs at most ``free`` bytes beyond the inputs. Where more graphs are to come, and
        nobody knows yet what they need: at most half of that or, if that is too little, about the least
        possible."""
        if free is None:
            return self._plan_within(graph, None)
        whole = max(graph.static_bytes + free, 0)
        budget, ledger = self.session.ledger.budget, self.session.ledger
        known = budget is not None and budget.bytes is not None
        if self.graph_break is not None and (known or ledger.resolved_before(self.frame, training)):
            limit = graph.static_bytes + max(free, 0) // 2
            for _ in range(2):
                try:
                    return self._plan_within(graph, limit)
                except Infeasible as error:
                    limit = error.best_peak
                if limit >= whole:
                    break
        return self._plan_within(graph, whole)

    def _plan_within(self, graph: Graph, limit: int | None) -> Plan:
        """With an arena, unless one (and results beside it) needs more than the budget although the peak
        does not, or, on the CPU, only fits with more recomputation."""
        options, notes = self._planner_options_here(graph)
        arena = self.options.arena

        def now(place: bool) -> PlannerOptions:
            # Where a pass runs on the heap, for its arena is taken, no result lies over an input.
            left = seconds_left(options.seconds, time.perf_counter() - self.began)
            return replace(options, reuse=False, seconds=left, place=place)

        try:
            plan = default_plan(graph, limit, now(arena))
        except Infeasible as error:
            if error.impossible or not arena:
                raise
            plan = plan_on_heap(graph, limit, now(False))
        else:
            if limit is not None:
                plan = faster_on_heap(graph, limit, plan, lambda: default_plan(graph, limit, now(False)))
        return replace(plan, notes=(*plan.notes, *notes))

    def _planner_options_here(self, graph: Graph) -> tuple[PlannerOptions, tuple[str, ...]]:
        """The options without hints that are about other graphs of a model with graph breaks; a note of those."""
        options = self.options.planner
        if self.graph_break is None and not self.session.graphs:
            return options, ()
        here = {h: matches(graph, h[0]) for h in parse_hints(options.hints)}
        notes = tuple(
            f"no module of this graph is meant by the hint {a}={b}" for (a, b), yes in here.items() if not yes
        )
        return replace(options, hints=",".join(f"{a}={b}" for (a, b), yes in here.items() if yes)), notes


def _entry(
    joint: Joint,
    program: Program,
    plan: Plan,
    where: Cut,
    static: int,
    unplanned: int,
    *,
    last: bool,
    accumulate: bool,
    beside: bool,
) -> Entry:
    graph = program.graph
    given = {graph.values[r.value].storage for r in joint.backward if isinstance(r, Ref)} - graph.static
    keep = cut(joint, program, replace(plan, steps=baseline(graph)))
    return Entry(
        static=static,
        dynamic=plan.peak - graph.static_bytes,
        rest=where.resident - graph.static_bytes,
        gradients=0 if accumulate else sum(graph.storages[s].size for s in given),
        unplanned=unplanned - graph.static_bytes,
        unplanned_rest=keep.resident - graph.static_bytes,
        results=_results(joint, graph) if last else 0,
        forward=where.peaks[0] - graph.static_bytes,
        beside=beside,
    )


def _results(joint: Joint, graph: Graph) -> int:
    """Bytes that the forward pass hands out."""
    handed = {graph.values[r.value].storage for r in joint.forward if isinstance(r, Ref)} - graph.static
    return sum(graph.storages[s].size for s in handed)


def _unchecked(joint: Joint, program: Program, value: int) -> bool:
    nodes = joint.nodes.get(program.graph.values[value].storage)
    return nodes is not None and compat_compile.unchecked_saving(nodes[0])


def _readable(source: str) -> str:
    """``L['self']._modules['fc']._parameters['weight']`` -> ``fc.weight``; other expressions as they are."""
    parts = re.findall(r"_(?:modules|parameters|buffers)\['([^']*)'\]", source)
    return ".".join(parts) if parts else re.sub(r"^L\['(\w+)'\]", r"\1", source)


compat_compile.watch_frames(backend, _note_skipped)
