"""infer: a model's forward pass within a budget, in one arena, as a function of the model's arguments."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tightship import simulate
from tightship.errors import BadInput, Unsupported
from tightship.execute.allocator import Arena
from tightship.execute.binding import Binding, Identity
from tightship.execute.interpreter import Executor, RunStats
from tightship.execute.profile import profile
from tightship.frontends.torch.program import Program
from tightship.frontends.torch.step import capture_forward, module_of
from tightship.frontends.torch.structure import flatten
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.planners.default import Options
from tightship.planners.default import plan as default_plan
from tightship.planners.layout import lay_out
from tightship.units import Budget, format_bytes, parse_budget
from tightship.verify import check

__all__ = ["Inference", "infer"]

Planner = Callable[[Graph, int | None], Plan]


def infer(
    model: Any,
    sample: Any,
    budget: Any = None,
    *,
    dynamic: bool = False,
    fresh: bool = True,
    strict: bool = False,
    cache: Path | str | None = "default",
    seconds_per_op: float = 0.01,
    variants: int = 8,
    **options: Any,
) -> Inference:
    """The forward pass of ``model`` in evaluation mode, planned, in one arena that is reserved once.

    ``run = infer(model, x)`` and then ``y = run(x)`` give what ``model.eval()(x)`` gives under ``torch.no_grad``,
    to the bit. ``model`` may be a module or what ``torch.export.export`` made of one; ``sample`` is a mapping of
    keyword arguments, a tuple of positional ones, or the one argument.

    ``budget`` (bytes, text, or a percentage of the unplanned peak) counts weights, inputs and everything the pass
    makes; None: the order with the least peak, nothing recomputed. ``fresh``: results are tensors of their own;
    without, they lie in the arena, nothing is requested outside of it, and the next run overwrites them.
    ``dynamic``: the sample's batch is the largest there will be; anything smaller runs in the same arena,
    planned when it is first met (``variants`` kinds are kept). ``strict`` as for `Executor`, ``cache`` and
    ``seconds_per_op`` as for `profile`; ``options`` are the default planner's.

    Raises ``Infeasible`` when no plan meets the budget, ``Unsupported`` for what cannot be captured or run
    exactly, ``BadInput`` for arguments that make no sense.
    """
    module = module_of(model)
    try:
        chosen = Options(**{"order": "beam", "hand_out": fresh, **options})
    except TypeError as error:
        rule = f"options are those of the default planner ({error})"
        raise BadInput(rule, sorted(options), "infer") from error
    if chosen.hand_out != fresh:
        raise BadInput("whether results leave the arena is said by fresh", chosen.hand_out, "infer")
    if variants < 1:
        raise BadInput("at least one kind of batch is kept", variants, "infer(variants=…)")
    wanted = None if budget is None else parse_budget(budget)
    measuring = {"cache": cache, "seconds_per_op": seconds_per_op}
    made = Inference(module, wanted, chosen, measuring, dynamic=dynamic, strict=strict, variants=variants)
    made.prepare(dict(sample) if isinstance(sample, Mapping) else sample)
    return made


@dataclass
class _Variant:
    """What was captured and planned for one kind of batch; ``windows`` are its results in the arena."""

    program: Program
    executor: Executor
    binding: Binding
    modes: tuple[Any, ...]
    windows: list[Any] | None = None


@dataclass
class _Most:
    """The largest batch: its leaves, and the bytes reserved for it."""

    batch: Any
    rows: int
    shapes: tuple[tuple[int, ...] | None, ...]
    budget: int | None = None
    variant: _Variant | None = field(default=None, repr=False)


class Inference:
    """Made by `infer`: called with the model's arguments, in the form of the sample, it returns its output."""

    def __init__(
        self,
        model: torch.nn.Module,
        budget: Budget | None,
        options: Options,
        measuring: dict[str, Any],
        *,
        dynamic: bool,
        strict: bool,
        variants: int,
    ) -> None:
        self.model, self.budget, self.options = model, budget, options
        self._measuring, self._dynamic, self._strict, self._kept = measuring, dynamic, strict, variants
        self._identity = Identity(model, None)
        self._variants: list[_Variant] = []  # the one used last first
        self._most: _Most | None = None
        self._arena: Arena | None = None
        self._busy = threading.Lock()
        self._notes: list[str] = []

    # --- running ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``model(*args, **kwargs)``, without gradients. Results of a pass that is not ``fresh`` are overwritten by
        the next. Raises ``BadInput`` for a batch that was not planned for."""
        if not self._busy.acquire(blocking=False):
            raise Unsupported("two passes in one arena at once", "one would overwrite the other", "make two")
        try:
            batch = self._batch(args, kwargs)
            variant, tensors = self._find(batch, flatten(batch))
            results = variant.executor.run(tensors)
            if not self.options.hand_out:
                results = self._windows(variant, results)
        finally:
            self._busy.release()
        return variant.program.result_spec.unflatten(results)

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._most is not None
        known = self._most.batch
        if isinstance(known, Mapping):
            if args or set(kwargs) != set(known):
                rule = f"arguments are given by name, as in the sample ({', '.join(known)})"
                raise BadInput(rule, sorted(kwargs) if not args else len(args), "infer")
            return {name: kwargs[name] for name in known}
        if kwargs:
            raise BadInput("arguments are given by position, as in the sample", sorted(kwargs), "infer")
        if isinstance(known, (tuple, list)):
            return type(known)(args)
        if len(args) != 1:
            raise BadInput("the sample was one argument", len(args), "infer")
        return args[0]

    def _windows(self, variant: _Variant, results: list[Any]) -> list[Any]:
        """Results as views of the arena's bytes, which outlive the blocks that the pass requested for them."""
        if variant.windows is None:
            arena = variant.executor.arena
            variant.windows = [_window(arena, r) for r in results]
        return [r if w is None else w.detach() for w, r in zip(variant.windows, results, strict=True)]

    # --- what there is ---

    @property
    def program(self) -> Program:
        """Of the kind of batch used last, like ``plan``, ``graph`` and ``last``."""
        return self._variants[0].program

    @property
    def plan(self) -> Plan:
        return self._variants[0].executor.plan

    @property
    def graph(self) -> Graph:
        return self.program.graph

    @property
    def last(self) -> RunStats | None:
        """What the last pass used; None before the first and where nothing can be measured."""
        return self._variants[0].executor.last

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know: whether the arena grew, and which guarantees do not hold here."""
        now = self._variants[0]
        return tuple(
            dict.fromkeys([*self._notes, *now.program.notes, *now.executor.notes, *now.executor.plan.notes])
        )

    @property
    def reserved(self) -> int:
        """Bytes of the arena."""
        return self._arena.size if self._arena is not None else 0

    def measure(self) -> dict[str, int | None]:
        """Bytes of the last pass against its plan; None where nothing was measured (yet)."""
        last, plan = self.last, self.plan
        return {
            "budget": plan.budget,
            "static": plan.static,
            "arena": plan.arena,
            "reserved": self.reserved,
            "unplanned_peak": plan.peak_before,
            "planned_peak": plan.peak,
            "measured_peak": last.measured_peak if last else None,
            "outside": last.heap if last else None,
            "misses": last.misses if last else None,
        }

    # --- finding what to run ---

    def prepare(self, batch: Any) -> Plan:
        """Captures and plans for batches like this one, if that has not been done; runs nothing."""
        return self._find(batch, flatten(batch))[0].executor.plan

    def _find(self, batch: Any, leaves: list[Any]) -> tuple[_Variant, list[Any]]:
        if self._identity.changed() is not None:
            self._variants.clear()
            self._identity = Identity(self.model, None)
        modes = self._identity.modes()[1:]  # captured in evaluation mode, whatever the model is in
        for k, variant in enumerate(self._variants):
            if variant.modes != modes or variant.program.batch.misfit(batch) is not None:
                continue
            tensors = variant.binding.tensors(leaves)
            if variant.binding.broken_guard(tensors) is None:
                if k:
                    self._variants.insert(0, self._variants.pop(k))
                return variant, tensors
        if self._most is not None:
            self._check_fits(batch, leaves)
        variant = self._made(batch, modes)
        if self._most is None:
            rows = next((int(x.shape[0]) for x in leaves if isinstance(x, torch.Tensor) and x.dim()), 0)
            shapes = tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in leaves)
            self._most = _Most(batch, rows, shapes, variant.executor.plan.budget, variant)
        self._variants.insert(0, variant)
        del self._variants[self._kept :]
        self._reserve(variant.executor.extent)
        return variant, variant.binding.tensors(leaves)

    def _reserve(self, need: int) -> None:
        """One arena for all kinds of batches. Only a pass with another control flow can need a larger one."""
        if need > self.reserved:
            if len(self._variants) > 1:
                said = f"from {format_bytes(self.reserved)} to {format_bytes(need)}"
                self._notes.append(f"the arena grew {said}: data took another path through the model")
            for v in self._variants:
                v.executor.arena = v.windows = None
            self._arena = None  # given back before the larger one is taken
            self._arena = Arena(need)
        for v in self._variants:
            v.executor.arena = self._arena

    def _check_fits(self, batch: Any, leaves: list[Any]) -> None:
        """Raise ``BadInput`` unless the batch is the sample with fewer rows."""
        assert self._most is not None
        most = self._most
        tensors = [x.shape if isinstance(x, torch.Tensor) else None for x in leaves]
        if len(tensors) != len(most.shapes) or [t is None for t in tensors] != [
            s is None for s in most.shapes
        ]:
            raise BadInput("a batch has the structure of the sample", type(batch).__name__, "infer")
        rows = {}
        for k, (now, known) in enumerate(zip(tensors, most.shapes, strict=True)):
            if now is None or known is None or tuple(now) == known:
                continue
            place = f"infer: leaf {k} of the batch"
            if len(now) != len(known) or tuple(now[1:]) != known[1:] or known[0] != most.rows:
                raise BadInput(f"it was planned for the shape {known}", tuple(now), place)
            if not self._dynamic:
                rule = f"it was planned for a batch of {most.rows} alone; dynamic=True takes smaller ones"
                raise BadInput(rule, int(now[0]), place)
            if now[0] > most.rows:
                raise BadInput(
                    f"the largest batch that was planned for has {most.rows} rows", int(now[0]), place
                )
            rows[k] = int(now[0])
        if len(set(rows.values())) > 1:
            raise BadInput("all tensors of a batch have as many rows", sorted(set(rows.values())), "infer")

    def _made(self, batch: Any, modes: tuple[Any, ...]) -> _Variant:
        program = profile(capture_forward(self.model, batch), **self._measuring)
        graph = program.graph
        budget = self._most.budget if self._most is not None else None
        if self._most is None and self.budget is not None:
            unplanned = simulate.replay(graph, simulate.baseline(graph)).peak
            budget = self.budget.resolve(unplanned)
        plan = default_plan(graph, budget, self.options)
        executor = self._executor(program, plan)
        if self._most is not None and executor.extent > self.reserved:
            executor = self._executor(program, self._like_most(graph, plan))
        return _Variant(program, executor, Binding(program, self.model, None), modes)

    def _executor(self, program: Program, plan: Plan) -> Executor:
        check(program.graph, plan)
        return Executor(program, plan, strict=self._strict, hand_out=self.options.hand_out)

    def _like_most(self, graph: Graph, plan: Plan) -> Plan:
        """The steps of the largest batch's plan, where the ops are the same; otherwise ``plan``."""
        assert self._most is not None and self._most.variant is not None
        other = self._most.variant
        if [o.target for o in graph.ops] != [o.target for o in other.program.graph.ops]:
            return plan
        steps = other.executor.plan.steps
        try:
            line = simulate.replay(graph, steps)
        except BadInput:
            return plan
        layout = lay_out(graph, steps, hand_out=self.options.hand_out)
        return replace(
            plan, steps=steps, residences=layout.residences, arena=layout.arena, handed=layout.handed,
            peak=line.peak, time=line.time, planner=f"{plan.planner}, steps of the largest batch",
        )  # fmt: skip


def _window(arena: Arena | None, tensor: Any) -> Any:
    """The same elements as ``tensor``, as a view of the arena's memory; None if they do not lie there."""
    size = tensor.untyped_storage().nbytes()
    start = tensor.untyped_storage().data_ptr()
    if arena is None or not size or not arena.base <= start < arena.base + arena.size:
        return None
    held: Any = (ctypes.c_ubyte * size).from_address(start)
    held.arena = arena  # which the tensor thereby keeps
    flat = torch.frombuffer(held, dtype=torch.uint8)
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
