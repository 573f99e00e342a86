"""infer: a model's forward pass within a budget, in one arena, as a function of the model's arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, SupportsIndex, Unpack

import torch

from tightship import simulate
from tightship.errors import BadInput, Unsupported
from tightship.execute.allocator import Arena
from tightship.execute.binding import Attributes
from tightship.execute.cache import KeptPlans, folder_of
from tightship.execute.interpreter import Executor
from tightship.execute.prepared import Prepared, Variant
from tightship.execute.replaced import Knows, Replaced
from tightship.execute.script import device_of
from tightship.execute.settings import Settings, Silent, Stages
from tightship.frontends.torch.capture.step import capture_forward, module_of
from tightship.frontends.torch.program import Program
from tightship.frontends.torch.structure import flatten, map_leaves
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.planners.default import PlanOptions, divide_allow, read_options
from tightship.planners.layout import lay_out
from tightship.units import Budget, parse_budget

__all__ = ["Inference", "infer"]


def infer(
    model: Any,
    sample: Any,
    budget: Budget | str | SupportsIndex | None = None,
    *,
    dynamic: bool = False,
    fresh: bool = True,
    strict: bool = False,
    cache: Path | str | None = "default",
    seconds_per_op: float = 0.01,
    variants: int = 8,
    progress: Stages | None = None,
    **options: Unpack[PlanOptions],
) -> Inference:
    """The forward pass of ``model`` in evaluation mode, planned, in one arena that is reserved once.

    ``run = infer(model, x)`` and then ``y = run(x)`` give, bit-identically, what ``model.eval()(x)`` gives under
    ``torch.no_grad``. ``model`` is a module or the result of ``torch.export.export``; ``sample`` is a mapping of
    keyword arguments, a tuple of positional ones, or the one argument.

    ``budget`` (bytes, text, or a percentage of the sample's unplanned peak, resolved to bytes once) counts weights,
    inputs and everything the pass makes; None: the order with the least peak, nothing recomputed. ``fresh``: results
    are tensors of their own; without, they lie in the arena, nothing is requested outside of it, and the next run
    overwrites them.
    ``dynamic``: the sample is the largest there will be, in every dimension; anything smaller runs in the same arena,
    planned when it is first met (``variants`` kinds are kept); a batch of one is planned ahead, as some ops ask for
    more scratch there. ``strict`` as for `Executor`, ``cache`` and ``seconds_per_op`` as for `profile`; ``options``
    are the default planner's; ``allow="recompute,split"`` computes convolutions, and what lies between them, in
    slices of rows where the budget asks for it. ``progress`` hears which stage preparing is in.

    Raises ``Infeasible`` when no plan meets the budget, ``Unsupported`` for what cannot be captured or run
    exactly, ``BadInput`` for arguments that make no sense.
    """
    if variants < 1:
        raise BadInput("no kind of batch would be kept: variants must be at least 1", variants, "infer")
    chosen = read_options({"hand_out": fresh, **options}, "infer")
    if chosen.hand_out != fresh:
        raise BadInput(
            f"hand_out={chosen.hand_out} contradicts fresh={fresh}: leave hand_out out", place="infer"
        )
    wanted = None if budget is None else parse_budget(budget)
    measuring = {"cache": cache, "seconds_per_op": seconds_per_op, "seconds": chosen.seconds}
    chosen, splitting = divide_allow(chosen)
    planner, heard = KeptPlans(folder_of(cache), chosen), progress or Silent()
    settings = Settings(wanted, planner, measuring, strict, variants, fresh, heard, splitting)
    inference = Inference(module_of(model), settings, dynamic=dynamic)
    sample = dict(sample) if isinstance(sample, Mapping) else sample
    inference.prepare(sample)
    if dynamic and variants > 1:
        inference.prepare_one(sample)
    return inference


@dataclass(frozen=True)
class _Largest:
    """The largest batch: its containers, without its tensors, and its plan."""

    structure: Any
    rows: int
    shapes: tuple[tuple[int, ...] | None, ...]
    variant: Variant


class Inference(Prepared):
    """Made by `infer`: called with the model's arguments, in the form of the sample, it returns its output. Kinds of
    batches are kept as `Prepared` says."""

    def __init__(self, model: torch.nn.Module, settings: Settings, *, dynamic: bool) -> None:
        super().__init__(model, None, settings)
        self._attributes = Attributes(model)
        self._dynamic = dynamic
        self._largest: _Largest | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``model(*args, **kwargs)``, without gradients. Results of a pass that is not ``fresh`` are overwritten by
        the next. Raises ``BadInput`` for a batch that was not planned for."""
        with self._exclusive():
            batch = self._batch(args, kwargs)
            variant, tensors = self._find(batch, flatten(batch))
            if not self.settings.hand_out:
                self._check_outside(tensors)
            replaced = self._replacing(variant.program, tensors)
            results = variant.executor.run(tensors)
            if not self.settings.hand_out:
                results = self._windows(variant, results)
            if replaced is not None:
                replaced.finish(results)
            return variant.program.result_spec.unflatten(results, batch)

    def _replacing(self, program: Program, tensors: list[Any]) -> Replaced | None:
        if not program.apart:
            return None
        known: tuple[Knows, ...] = (self._identity, *(v.binding for v in self._variants))
        return Replaced(
            program, tensors, self.model, known, self._streams.items, hand_out=self.settings.hand_out
        )

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._largest is not None
        known = self._largest.structure
        if isinstance(known, Mapping):
            if args or set(kwargs) != set(known):
                given = f"{len(args)} by position" if args else f"by name: {', '.join(sorted(kwargs))}"
                rule = f"arguments {given}; give them by name, as in the sample: {', '.join(known)}"
                raise BadInput(rule, place="infer")
            return {name: kwargs[name] for name in known}
        if kwargs:
            rule = f"arguments by name ({', '.join(kwargs)}): give them by position, as in the sample"
            raise BadInput(rule, place="infer")
        if isinstance(known, (tuple, list)):
            return type(known)(args)
        if len(args) != 1:
            raise BadInput(f"{len(args)} arguments: the sample was one argument", place="infer")
        return args[0]

    def _check_outside(self, tensors: list[Any]) -> None:
        """Raise ``BadInput`` for what lies where this pass will write: results of the pass before."""
        arena = self._arena
        if arena is None:
            return
        for slot, t in zip(self.program.slots, tensors, strict=True):
            if slot.role == "input" and arena.base <= t.data_ptr() < arena.base + arena.size:
                rule = f"leaf {slot.key} lies in the arena, where this pass writes: clone() results, or fresh=True"
                raise BadInput(rule, place="infer")

    def _executor(self, program: Program, plan: Plan) -> Executor:
        device = device_of(program.graph)
        if not self.settings.hand_out and device is not None and device != "cpu":
            raise Unsupported(
                f"fresh=False on {device}", "tensors can be put over memory of the CPU only", "leave fresh=True",
            )  # fmt: skip
        return super()._executor(program, plan)

    def _windows(self, variant: Variant, results: list[Any]) -> list[Any]:
        """Results as views of the arena's bytes, which outlive the blocks that the pass requested for them."""
        if variant.windows is None:
            arena = variant.executor.arena
            variant.windows = [_window(arena, r) for r in results]
        return [r if w is None else w.detach() for w, r in zip(variant.windows, results, strict=True)]

    # --- finding what to run ---

    def prepare_one(self, sample: Any) -> None:
        """Plans for the first row of the sample as well, if it has more and the model takes one alone: with one
        thread, PyTorch's convolutions ask for more scratch there than for a few rows."""
        assert self._largest is not None
        rows = self._largest.rows

        def first(x: Any) -> Any:
            return x[:1] if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == rows else x

        if rows > 1:
            try:
                self.prepare(map_leaves(first, sample))
                self._notes.clear()  # that the arena grew: nobody has seen it yet
            except Exception as error:  # the model's own, too: it may not be made for one row
                said = " ".join(str(error).split())[:200]
                self._notes.append(f"a batch of one was not planned ahead: {type(error).__name__}: {said}")
            self.prepare(sample)

    def _capture(self, batch: Any) -> Program:
        return capture_forward(self.model, batch)

    def _renew(self) -> None:
        super()._renew()
        why = self._attributes.changed()
        if why is not None:
            self._notes.append(f"captured again: {why} has changed")
            self._variants.clear()
            self._attributes = Attributes(self.model)

    def _on_replaced(self) -> None:
        self._attributes = Attributes(self.model)

    def _modes(self) -> tuple[Any, ...]:
        return self._identity.settings()  # captured in evaluation mode, whatever the model is in

    def _check_new(self, batch: Any, leaves: list[Any]) -> None:
        """Raise ``BadInput`` unless the batch is the sample, or where that is allowed, no larger in any dimension."""
        largest = self._largest
        if largest is None:
            return
        tensors = [x.shape if isinstance(x, torch.Tensor) else None for x in leaves]
        if [t is None for t in tensors] != [s is None for s in largest.shapes]:
            raise BadInput("the batch has another structure than the sample", type(batch).__name__, "infer")
        rows = set()
        for k, (now, known) in enumerate(zip(tensors, largest.shapes, strict=True)):
            if now is None or known is None or tuple(now) == known:
                continue
            place = f"infer: leaf {k} of the batch"
            if len(now) != len(known) or (tuple(now[1:]) != known[1:] and not self._dynamic):
                raise BadInput(f"shape {tuple(now)}, but planned for {known}", place=place)
            if not self._dynamic:
                rule = f"{now[0]} rows, but planned for {known[0]}: dynamic=True takes smaller batches"
                raise BadInput(rule, place=place)
            if known[0] == largest.rows and now[0] > largest.rows:
                rule = f"{now[0]} rows, but the largest batch that was planned for has {largest.rows}"
                raise BadInput(rule, place=place)
            if any(n > m for n, m in zip(now, known, strict=True)):
                rule = f"shape {tuple(now)}, but the largest shape that was planned for is {known}"
                raise BadInput(rule, place=place)
            if known[0] == largest.rows:
                rows.add(int(now[0]))
        if len(rows) > 1:
            raise BadInput("tensors of one batch have different numbers of rows", sorted(rows), "infer")

    def _capture_variant(self, batch: Any, modes: tuple[Any, ...]) -> Variant:
        variant = super()._capture_variant(batch, modes)
        if self._largest is None:
            leaves = flatten(batch)
            rows = next((int(x.shape[0]) for x in leaves if isinstance(x, torch.Tensor) and x.dim()), 0)
            shapes = tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in leaves)
            self._largest = _Largest(map_leaves(lambda _: None, batch), rows, shapes, variant)
        elif variant.executor.extent > self.reserved:
            plan = self._steps_of_largest(variant.program.graph, variant.executor.plan)
            variant.executor = self._executor(variant.program, plan)
        return variant

    def _steps_of_largest(self, graph: Graph, plan: Plan) -> Plan:
        """The steps of the largest batch's plan, where the ops are the same; otherwise ``plan``."""
        assert self._largest is not None
        other = self._largest.variant
        if [o.target for o in graph.ops] != [o.target for o in other.program.graph.ops]:
            return plan
        steps = other.executor.plan.steps
        try:
            line = simulate.replay(graph, steps)
        except BadInput:
            return plan
        layout = lay_out(graph, steps, hand_out=self.settings.hand_out)
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
