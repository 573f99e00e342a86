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
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch

from tightship.errors import BadInput, Infeasible, TightshipError, Unsupported
from tightship.execute import allocator
from tightship.execute.graph_ranks import Turn, begin, failed_before
from tightship.execute.interpreter import Fallback
from tightship.frontends.torch import (
    compat,
    compat_compile,
    compat_ddp,
    compat_distributed,
    compat_dynamo,
    compat_gathered,
    compat_sending,
)
from tightship.integrations.accounting import Ledger, StepBytes
from tightship.integrations.optimizer_memory import StepMemory, measure_optimizers
from tightship.integrations.torch_compile_graph import CASTS, Compilation
from tightship.integrations.torch_inductor import CompiledGraph
from tightship.integrations.torch_partition import (
    CompileOptions,
    FrameArena,
    PlannedGraph,
    read_options,
)
from tightship.process_local import NotCopied

__all__ = [
    "Fallback",
    "backend",
    "compiled_notes",
    "compiled_plans",
    "compiled_session",
    "measured_step",
]


_BUCKETS = (
    "Dynamo cuts a model in DistributedDataParallel into a graph per bucket, which cannot be planned: set "
    "optimize_ddp = False before the first call (buckets are still reduced during the backward pass)"
)


_GATHERED = (
    "the optimizer has parts of parameters that the graph has whole, and no model of fully_shard is running, whose "
    "hooks would be counted: use tightship.fit, or leave optimizer= out (callbacks: optimizer=None) for a budget of "
    "each graph by itself"
)


_COPIED = (
    "comes in another layout than AOTAutograd expects, which copies it: sums over it may run in "
    "another order than in eager, with other last bits; for eager's bits compile the loss with the model"
)


def backend(
    gm: Any, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **more: Any
) -> Any:
    """What torch.compile calls with each graph. ``options`` as `CompileOptions` describes them.

    Errors reach the caller when the compiled model is called: ``Infeasible`` when no plan meets the budget,
    with the least peak reached and what makes it up; ``BadInput`` for bad options; ``Unsupported``, where
    ``eager_fallback`` is off, for what cannot be planned (otherwise `Fallback` is warned); ``PeerFailed`` where
    another rank, which runs the graph together with this one, cannot run it (`graph_ranks`).
    """
    compat.require_torch()
    code, frame = compat_dynamo.compiled_code(gm), compat_dynamo.python_frame()
    turn = begin(code, frame, compat_sending.ranks_around(gm))
    if turn is None:
        return _compiled(gm, example_inputs, options, more)
    try:
        compiled = _compiled(gm, example_inputs, options, more, turn)
    except BaseException:
        turn.withdraw()
        raise
    own: Exception | None = getattr(compiled, "error", None)
    error = turn.agreed(own)
    return compiled if error is None or error is own else _raise_when_called(error, compiled, own)


def _compiled(
    gm: Any, inputs: Sequence[Any], options: Mapping[str, Any] | None, more: Mapping[str, Any],
    turn: Turn | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """What is called in the graph's place: its plan, or what raises (`_raise_when_called`)."""
    try:
        if more:
            rule = f"unknown keywords {', '.join(more)}: the backend takes options= and nothing else"
            raise BadInput(rule, place="torch.compile")
        session = _session(options if options is not None else {})
    except TightshipError as error:
        return _raise_when_called(error)
    before = len(session.graphs)
    compiled = session.compile(gm, inputs)
    if turn is not None:
        for graph in session.graphs[before:]:
            graph.turn, turn.sends = turn, graph.sends
        if len(session.graphs) == before and not hasattr(compiled, "error"):
            return _counted(compiled, turn)
    return compiled


def _counted(unplanned: Callable[..., Any], turn: Turn) -> Callable[..., Any]:
    """What runs in eager, whose calls count as those of its plans on other ranks do."""

    def run(*args: Any) -> Any:
        turn.count()
        return unplanned(*args)

    return run


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
            "nothing is planned: what was compiled has not run yet, or has nothing that Dynamo compiles; of a model, "
            "torch.compile compiles forward alone: give it functions that call other methods",
        )
    return tuple(
        dict.fromkeys([*session.notes, *(f"graph {p.name}: {n}" for p in session.graphs for n in p.notes)])
    )


# --- sessions: what belongs to one call of torch.compile ----------------------------------------------------


_sessions: WeakValueDictionary[int, Session] = WeakValueDictionary()


def _session(options: Mapping[str, Any]) -> Session:
    """The options object stands for the call of torch.compile: it is the same for all graphs of a model. Modules of
    one model that are each compiled with equal options share a budget, as they share code."""
    session = (_sessions.get(id(options)) or _session_beside(options)) if options else None
    if session is None:
        chosen = read_options(options)
        step, outside = _step_memory(chosen)
        session = Session([options], chosen, Ledger(chosen.budget, step))
        if chosen.accumulate or (step is not None and step.existing_gradients()):
            session.ledger.accumulates()
        if outside:
            session.say(outside)
        if options:
            _sessions[id(options)] = session
    return session


def _session_beside(options: Mapping[str, Any]) -> Session | None:
    """That of equal options which another module of the same model is compiled with: theirs from now on, too."""
    known = (_sessions.get(id(theirs)) for theirs in compat_dynamo.options_beside(options))
    session = next(filter(None, known), None)
    if session is not None:
        session.given.append(options)
        _sessions[id(options)] = session
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
    options = compat_dynamo.compiled_options(compiled)
    if options is None and isinstance(compiled, torch.nn.parallel.DistributedDataParallel):
        compiled = compiled.module
        options = compat_dynamo.compiled_options(compiled)
    if options is None:
        rule = f"a {type(compiled).__name__} compiled without options: plans are found by torch.compile(options=…)"
        raise BadInput(rule, place="compiled_plans")
    session = _sessions.get(id(options))
    if session is None:
        others = (_sessions.get(id(x)) for x in compat_dynamo.equal_options(compiled))
        session = next(filter(None, others), None) or compat_dynamo.frame_session(compiled)
    return session or Session([options], CompileOptions(), Ledger(None))


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
    """Everything planned under one call of torch.compile, or several with equal options for modules of one model.
    ``given``: the options objects, which are kept, so that their identities are not given away."""

    given: list[Mapping[str, Any]]
    options: CompileOptions
    ledger: Ledger
    graphs: list[PlannedGraph | CompiledGraph] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    arenas: dict[int, FrameArena] = field(default_factory=dict)
    casts: dict[str, Any] = field(
        default_factory=dict
    )  # by parameter: in which autocast context it was cast last

    def compile(self, gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compat_dynamo.given_plain(self._compile(gm, inputs), inputs)

    def _compile(self, gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            symbolic = compat_dynamo.fixed_sizes(gm, inputs)
            self._check(gm)
            failed = None
            if self.options.mode == "compiled":
                compiled, failed = self._compiled(gm, inputs)
                if compiled is not None:
                    return compiled
            graph = Compilation(self, gm)
            if graph.stepped:
                return self._stepping(gm, graph.name)
            compiled = graph.run(gm, inputs, symbolic)
            if failed is not None:
                text = f"graph {graph.name} is not compiled and runs op by op, within the budget"
                self.say(f"{text}: {_why(failed)}")
            self._warn_of_recompile_limit()
            compiled = self._watching_casts(compiled, graph.cast) if graph.cast else compiled
            return self._watching_gradients(compiled, graph) if graph.tangents else compiled
        except (BadInput, Infeasible) as error:
            return _raise_when_called(error, self)
        except Exception as error:
            if compat_dynamo.is_control_flow(error):
                raise
            error = compat_dynamo.in_our_words(error)
            if not self.options.eager_fallback:
                return _raise_when_called(error, self)
            return self._eager(gm, error)

    def _compiled(self, gm: Any, inputs: Sequence[Any]) -> tuple[Callable[..., Any] | None, Exception | None]:
        """What Inductor makes of a graph; or why it makes nothing of it, where the graph may run otherwise."""
        try:
            compiled = Compilation(self, gm).compiled(gm, inputs)
        except (BadInput, Infeasible):
            raise
        except Exception as error:
            if compat_dynamo.is_control_flow(error) or not self.options.eager_fallback:
                raise
            return None, compat_dynamo.in_our_words(error)
        self._warn_of_recompile_limit()
        return compiled, None

    def _check(self, gm: Any) -> None:
        self.ledger.sends(compat_ddp.active_buckets())
        self.ledger.gathers(compat_gathered.running_hooks(compat_dynamo.trained_parameters(gm)))
        follows = compat_dynamo.graph_break(gm)
        if follows is not None and follows.by_ddp:
            raise BadInput(_BUCKETS, True, "torch._dynamo.config.optimize_ddp")
        if self._gathers(gm):
            raise BadInput(_GATHERED, place="torch.compile(options=…)")
        if follows is not None and follows.runs:
            what = f"what is called at {follows.place}, but for graphs of its own,"
            self.unplanned(what, f"Dynamo breaks the graph there ({follows.why})")

    def _gathers(self, gm: Any) -> bool:
        """Whether the optimizer has parts of parameters, and the graph whole ones that were made of them."""
        step = self.ledger.step
        if step is None or not step.in_parts():
            return False
        given = map(compat_distributed.own_part, compat_dynamo.trained_parameters(gm))
        known = {*step.parameters, *self.ledger.gathered()}
        return any(compat.storage_key(t) not in known for t in given)

    def _watching_casts(self, compiled: Callable[..., Any], name: str) -> Callable[..., Any]:
        """``compiled``, which casts the parameter of this name: says when it has been cast in the same context."""

        key = f"{compat_dynamo.frame()[0]} {name}"

        def run(*args: Any) -> Any:
            context = compat_compile.autocast_context()
            if context is not None and context is self.casts.get(key):
                self.say(f"{name} {CASTS}")
            self.casts[key] = context
            return compiled(*args)

        return run

    def _watching_gradients(self, compiled: Callable[..., Any], graph: Compilation) -> Callable[..., Any]:
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
        count = compat_dynamo.last_time()
        if count is None:
            return
        _, name = compat_dynamo.frame()
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

    def _stepping(self, gm: Any, name: str) -> Callable[..., Any]:
        """A graph that takes gradients of parameters, as eager runs it: captured, what it updates would be copied."""
        text = f"graph {name} is given gradients: it runs as in eager, as a part of the optimizer's step"
        self.notes += [] if text in self.notes else [text]
        return self._as_it_is(gm)

    def _eager(self, gm: Any, error: Exception) -> Callable[..., Any]:
        _, name = compat_dynamo.frame()
        self.say(f"graph {name} runs in eager, without a plan and outside the budget: {_why(error)}")
        return self._as_it_is(gm)

    def _as_it_is(self, gm: Any) -> Callable[..., Any]:
        def eager(
            *args: Any, _session: Session = self
        ) -> Any:  # notes live as long as the code they are about
            return gm(*args)

        return eager


def _why(error: Exception) -> str:
    """An error's text; of others than this package's, with its kind."""
    return str(error) if isinstance(error, TightshipError) else f"{type(error).__name__}: {error}"


def _raise_when_called(
    error: Exception, kept: object = None, cause: Exception | None = None
) -> Callable[..., Any]:
    """Raises ``error`` itself when the compiled model is called; from within a backend Dynamo would wrap
    it. What is ``kept`` lives on: the session, and with it what a percentage came to."""

    shown = copy.copy(error)  # without the frames that raised it, and all they hold

    def failed(*_args: Any, _kept: object = kept) -> Any:
        raise shown.with_traceback(None) from cause

    failed.error = error  # type: ignore[attr-defined]
    return failed


def _note_raised(module: Any, error: BaseException) -> None:
    """Dynamo has raised where it compiles a frame: ranks that compile it, too, wait for this one."""
    failed_before(compat_dynamo.python_frame(), compat_sending.ranks_around_module(module), error)


compat_dynamo.watch_frames(backend, _note_skipped, _note_raised)
