"""infer: a model's forward pass within a budget, in one arena, as a function of the model's arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch

from tightship import simulate
from tightship.diagnose.remedies import advised
from tightship.errors import BadInput, Unsupported
from tightship.execute.allocator import Arena
from tightship.execute.binding import Attributes
from tightship.execute.interpreter import Executor
from tightship.execute.prepared import Prepared, Settings, Variant
from tightship.execute.script import device_of
from tightship.frontends.torch.program import Program
from tightship.frontends.torch.step import capture_forward, module_of
from tightship.frontends.torch.structure import flatten, map_leaves
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.planners.default import PlanOptions, read_options
from tightship.planners.layout import lay_out
from tightship.units import parse_budget

__all__ = ["Inference", "infer"]


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
    **options: Unpack[PlanOptions],
) -> Inference:
    """The forward pass of ``model`` in evaluation mode, planned, in one arena that is reserved once.

    ``run = infer(model, x)`` and then ``y = run(x)`` give what ``model.eval()(x)`` gives under ``torch.no_grad``,
    to the bit. ``model`` may be a module or what ``torch.export.export`` made of one; ``sample`` is a mapping of
    keyword arguments, a tuple of positional ones, or the one argument.

    ``budget`` (bytes, text, or a percentage of the sample's unplanned peak, resolved to bytes once) counts weights,
    inputs and everything the pass makes; None: the order with the least peak, nothing recomputed. ``fresh``: results
    are tensors of their own; without, they lie in the arena, nothing is requested outside of it, and the next run
    overwrites them.
    ``dynamic``: the sample is the largest there will be, in every dimension; anything smaller runs in the same arena,
    planned when it is first met (``variants`` kinds are kept); a batch of one is planned ahead, as some ops ask for
    more scratch there. ``strict`` as for `Executor`, ``cache`` and ``seconds_per_op`` as for `profile`; ``options``
    are the default planner's.

    Raises ``Infeasible`` when no plan meets the budget, ``Unsupported`` for what cannot be captured or run
    exactly, ``BadInput`` for arguments that make no sense.
    """
    if variants < 1:
        raise BadInput("at least one kind of batch is kept", variants, "infer(variants=…)")
    chosen = read_options({"hand_out": fresh, **options}, "infer")
    if chosen.hand_out != fresh:
        raise BadInput(
            f"hand_out={chosen.hand_out} contradicts fresh={fresh}: leave hand_out out", place="infer"
        )
    wanted = None if budget is None else parse_budget(budget)
    measuring = {"cache": cache, "seconds_per_op": seconds_per_op}
    settings = Settings(wanted, partial(advised, options=chosen), measuring, strict, variants, fresh)
    made = Inference(module_of(model), settings, dynamic=dynamic)
    sample = dict(sample) if isinstance(sample, Mapping) else sample
    made.prepare(sample)
    if dynamic and variants > 1:
        made.prepare_one(sample)
    return made


@dataclass(frozen=True)
class _Most:
    """The largest batch: its containers, without its tensors, and its plan."""

    form: Any
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
        self._most: _Most | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``model(*args, **kwargs)``, without gradients. Results of a pass that is not ``fresh`` are overwritten by
        the next. Raises ``BadInput`` for a batch that was not planned for."""
        with self._alone():
            batch = self._batch(args, kwargs)
            variant, tensors = self._find(batch, flatten(batch))
            if not self.settings.hand_out:
                self._check_outside(tensors)
            results = variant.executor.run(tensors)
            if not self.settings.hand_out:
                results = self._windows(variant, results)
            return variant.program.result_spec.unflatten(results, batch)

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._most is not None
        known = self._most.form
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

    def _check_outside(self, tensors: list[Any]) -> None:
        """Raise ``BadInput`` for what lies where this pass will write: results of the pass before."""
        arena = self._arena
        if arena is None:
            return
        for slot, t in zip(self.program.slots, tensors, strict=True):
            if slot.role == "input" and arena.base <= t.data_ptr() < arena.base + arena.size:
                rule = "an input does not lie in the arena: clone() results of a pass, or make them fresh"
                raise BadInput(rule, f"leaf {slot.key}", "infer")

    def _executor(self, program: Program, plan: Plan) -> Executor:
        device = device_of(program.graph)
        if not self.settings.hand_out and device is not None and device != "cpu":
            raise Unsupported(
                f"results that stay in an arena on {device}", "tensors can be put over memory of the CPU only",
                "let them be fresh",
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
        assert self._most is not None
        rows = self._most.rows

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

    def _renewed(self) -> None:
        self._attributes = Attributes(self.model)

    def _modes(self) -> tuple[Any, ...]:
        return self._identity.settings()  # captured in evaluation mode, whatever the model is in

    def _check_new(self, batch: Any, leaves: list[Any]) -> None:
        """Raise ``BadInput`` unless the batch is the sample, or where that is allowed, no larger in any dimension."""
        most = self._most
        if most is None:
            return
        tensors = [x.shape if isinstance(x, torch.Tensor) else None for x in leaves]
        if [t is None for t in tensors] != [s is None for s in most.shapes]:
            raise BadInput("a batch has the structure of the sample", type(batch).__name__, "infer")
        rows = set()
        for k, (now, known) in enumerate(zip(tensors, most.shapes, strict=True)):
            if now is None or known is None or tuple(now) == known:
                continue
            place = f"infer: leaf {k} of the batch"
            if len(now) != len(known) or (tuple(now[1:]) != known[1:] and not self._dynamic):
                raise BadInput(f"it was planned for the shape {known}", tuple(now), place)
            if not self._dynamic:
                rule = f"it was planned for a batch of {known[0]} alone; dynamic=True takes smaller ones"
                raise BadInput(rule, int(now[0]), place)
            if known[0] == most.rows and now[0] > most.rows:
                rule = f"the largest batch that was planned for has {most.rows} rows"
                raise BadInput(rule, int(now[0]), place)
            if any(n > m for n, m in zip(now, known, strict=True)):
                raise BadInput(f"the largest shape that was planned for is {known}", tuple(now), place)
            if known[0] == most.rows:
                rows.add(int(now[0]))
        if len(rows) > 1:
            raise BadInput("all tensors of a batch have as many rows", sorted(rows), "infer")

    def _made(self, batch: Any, modes: tuple[Any, ...]) -> Variant:
        made = super()._made(batch, modes)
        if self._most is None:
            leaves = flatten(batch)
            rows = next((int(x.shape[0]) for x in leaves if isinstance(x, torch.Tensor) and x.dim()), 0)
            shapes = tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in leaves)
            self._most = _Most(map_leaves(lambda _: None, batch), rows, shapes, made)
        elif made.executor.extent > self.reserved:
            made.executor = self._executor(
                made.program, self._like_most(made.program.graph, made.executor.plan)
            )
        return made

    def _like_most(self, graph: Graph, plan: Plan) -> Plan:
        """The steps of the largest batch's plan, where the ops are the same; otherwise ``plan``."""
        assert self._most is not None
        other = self._most.variant
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
