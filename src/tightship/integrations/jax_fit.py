"""A JAX step within a budget in bytes, read off what XLA compiled: `tightship.jax.fit`.

    step = tightship.jax.fit(train_step, budget="4GiB", donate_argnums=0)
    state, loss = step(state, batch)        # planned and compiled at the first call for each kind of arguments

The step is traced with its gradients and its optimizer; no names, no policies, no change of the model. What the
forward pass leaves for the backward pass is planned as any graph is: kept, or made again. The program is written out
again with those repetitions, compiled, and XLA's own analysis read: arguments, results, temporaries of the program.
What is above the budget is planned again for less, until it is within it, or `Infeasible` says how near it came.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tightship.errors import BadInput, Infeasible, Unsupported
from tightship.frontends.jax_program import Ops, Program, inlined, on_values
from tightship.integrations.jax_scans import loops_of, with_bodies, with_saved
from tightship.planners import default
from tightship.simulate import baseline, replay
from tightship.units import Budget, BudgetLike, format_bytes, parse_budget

__all__ = ["Fit", "FittedStep", "Memory", "fit"]

_MEMORY_FIRST = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
"""XLA's order for CPUs is one for concurrency by default, in which what is recomputed runs as early as it can."""
_PLACE = "tightship.jax.fit"
_TRIES = 8
_NEAR = 0.97
"""A plan that needs at least this part of the budget's temporaries is not improved upon."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a compiled program on one device, by XLA's analysis (`memory_analysis`): what the caller gives, what
    it gets, how much of that lies in what was given (donated), and temporaries."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @property
    def static(self) -> int:
        """What is there whatever is planned."""
        return self.arguments + self.outputs - self.aliased

    @property
    def total(self) -> int:
        return self.static + self.temporaries


@dataclass(frozen=True, slots=True)
class Fit:
    """What was planned for one kind of arguments, and what XLA says of it. ``before``: of the step as it was given.
    ``repeated``: equations that run again; ``extra_flops`` is their part of the step's modeled operations.
    ``tried``: total bytes of each program that was compiled; ``seconds`` of planning and compiling."""

    budget: int
    memory: Memory
    before: Memory
    repeated: int
    extra_flops: float
    tried: tuple[int, ...]
    seconds: float

    def __str__(self) -> str:
        m, b = self.memory, self.before
        return (
            f"{format_bytes(m.total)} within {format_bytes(self.budget)}: arguments and results "
            f"{format_bytes(m.static)}, temporaries {format_bytes(m.temporaries)} "
            f"({format_bytes(b.temporaries)} before); "
            f"{self.repeated} operations run again, +{self.extra_flops:.1%} FLOPs"
        )


@dataclass(frozen=True)
class _Planned:
    """``call`` takes the dynamic arguments and their leaves."""

    call: Callable[[Any, list[Any]], Any]
    fit: Fit


_Held = dict[int, Any]
"""Leaves of a tree that are no arrays, by position."""


def _parted(tree: Any, keeps: Callable[[Any], bool]) -> tuple[Any, _Held]:
    """``tree`` with None for leaves that are no arrays, and those: equinox's modules have functions among theirs."""
    leaves, form = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    held = {k: x for k, x in enumerate(leaves) if x is not None and not keeps(x)}
    return jax.tree.unflatten(form, [None if k in held else x for k, x in enumerate(leaves)]), held


def _joined(tree: Any, held: _Held) -> Any:
    if not held:
        return tree
    leaves, form = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    return jax.tree.unflatten(form, [held.get(k, x) for k, x in enumerate(leaves)])


def _is_array(leaf: Any) -> bool:
    arrays = (jax.ShapeDtypeStruct, jax.Array, np.ndarray, np.generic)
    return isinstance(leaf, arrays) or hasattr(leaf, "aval") or hasattr(leaf, "__jax_array__")


def _is_traced(leaf: Any) -> bool:
    """Whether `jax.jit` takes a leaf as an argument."""
    return isinstance(leaf, (bool, int, float, complex)) or _is_array(leaf)


class _Around:
    """``step`` on arguments without the leaves that are ``held``: by position or name of the argument. What of its
    results is no array is in ``beside`` once it was traced."""

    def __init__(
        self, step: Callable[..., Any], held: dict[Any, _Held], keeps: Callable[[Any], bool]
    ) -> None:
        functools.update_wrapper(self, step)
        self._step, self._held, self._keeps = step, held, keeps
        self.beside: _Held = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self._step(
            *(_joined(x, self._held.get(k, {})) for k, x in enumerate(args)),
            **{name: _joined(x, self._held.get(name, {})) for name, x in kwargs.items()},
        )
        made, self.beside = _parted(out, self._keeps)
        return made


class FittedStep:
    """The step within its budget: call it as the step. ``fits`` has what was planned for each kind of arguments."""

    def __init__(
        self, step: Callable[..., Any], budget: BudgetLike, seconds: float, jit: dict[str, Any]
    ) -> None:
        self._budget, self._seconds = _read(budget), seconds
        _check_options(step, jit)
        given: Any = step
        self._given, self._jit, self._keeps = given, jit, _is_traced
        self._donates = (False, False)  # the first argument, and the rest, of equinox's
        self._nnx = _is_nnx(step)
        if type(given).__module__.startswith("equinox") and hasattr(given, "donate_first"):
            self._donates, self._keeps = (given.donate_first, given.donate_rest), _is_array
            given = given.__wrapped__
        self._step: Any = given.jitted_fn if self._nnx else given
        self._static = _StaticArguments(self._step, jit)
        self._kinds: dict[Hashable, _Planned] = {}

    @property
    def fits(self) -> tuple[Fit, ...]:
        return tuple(k.fit for k in self._kinds.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._takes_nnx(args, kwargs):
            planned, dynamic, leaves = self._planned(args, kwargs)
            return planned.call(dynamic, leaves)
        step = self._given
        with sys.modules["flax.nnx"].update_context(step):
            args, kwargs = step._get_pure_args_kwargs(args, kwargs)
            planned, dynamic, leaves = self._planned(args, kwargs)
            return step._get_non_pure_out(*planned.call(dynamic, leaves))

    def prepare(self, *args: Any, **kwargs: Any) -> Fit:
        """Plans for arguments such as these (arrays or `jax.ShapeDtypeStruct`), and runs nothing. Raises what `fit`
        says of a call."""
        if not self._takes_nnx(args, kwargs):
            return self._planned(args, kwargs)[0].fit
        with sys.modules["flax.nnx"].update_context(self._given):
            return self._planned(*self._given._get_pure_args_kwargs(args, kwargs))[0].fit

    def _takes_nnx(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether arguments have modules of flax.nnx, which the step changes: it then runs as `nnx.jit` runs it, for
        `jax.jit` would change copies."""
        nnx = sys.modules.get("flax.nnx")
        if self._nnx or nnx is None or self._given is not self._step:
            return self._nnx
        kinds = (nnx.Module, nnx.Optimizer, nnx.Rngs, nnx.Metric)
        found = jax.tree.leaves((args, kwargs), is_leaf=lambda x: isinstance(x, kinds))
        if any(isinstance(x, kinds) for x in found):
            if hasattr(self._step, "trace"):
                return False  # jitted by jax.jit: as the user has it
            self._given = nnx.jit(self._step, **{"keep_unused": True, **self._jit})
            self._nnx, self._jit = _is_nnx(self._given), {}
            if self._nnx:
                self._step = self._given.jitted_fn
                self._static = _StaticArguments(self._step, {})
        return self._nnx

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Planned, Any, list[Any]]:
        dynamic, static = self._static.divide(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            raise BadInput(
                "a fitted step was called inside of a transformation (jit, grad, vmap, scan); it is a compiled "
                "program: give the whole step to fit, and call it from outside",
                place=_PLACE,
            )
        around = None
        if not hasattr(self._step, "trace") and not all(map(self._keeps, leaves)):
            args, kwargs, around = self._without_others(args, kwargs)
            dynamic, static = self._static.divide(args, kwargs)
            others = tuple((k, *row.items()) for k, row in around._held.items() if row)
            static = (static, others)
            leaves, tree = jax.tree.flatten(dynamic)
        kind = (tree, tuple(map(_kind_of, leaves)), static)
        try:
            known = kind in self._kinds
        except TypeError:
            raise BadInput(
                "an argument has a leaf that is no array and cannot be hashed, so that it cannot be static",
                place=_PLACE,
            ) from None
        if not known:
            step = around or (
                _Around(self._step, {}, self._keeps) if self._keeps is _is_array else self._step
            )
            with warnings.catch_warnings():
                if any(self._donates):  # equinox donates what it can, and says nothing of the rest
                    warnings.filterwarnings("ignore", "Some donated buffers were not usable")
                self._kinds[kind] = self._plan(step, args, kwargs, tree, leaves)
        return self._kinds[kind], dynamic, leaves

    def _without_others(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], _Around]:
        """The arguments without leaves that are no arrays, which the step gets all the same."""
        held: dict[Any, _Held] = {}
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for key, x in given.items():
            if not self._static.has(key):
                given[key], held[key] = _parted(x, self._keeps)
        made = tuple(given[k] for k in range(len(args)))
        return made, {name: given[name] for name in kwargs}, _Around(self._step, held, self._keeps)

    def _jitted(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if hasattr(step, "trace"):
            return step
        first, rest = self._donates
        donated = [k for k in range(len(args)) if (rest if k else first)]
        more: dict[str, Any] = {"donate_argnums": donated} if donated else {}
        if rest and kwargs:
            more["donate_argnames"] = tuple(kwargs)
        return jax.jit(step, **{"keep_unused": True, **more, **self._jit})

    def _plan(
        self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tree: Any, leaves: list[Any]
    ) -> _Planned:
        began = time.perf_counter()
        traced = self._jitted(step, args, kwargs).trace(*args, **kwargs)
        beside = dict(step.beside) if isinstance(step, _Around) else {}
        if jax.tree.structure(traced.args_info) != tree:
            raise BadInput(
                "the step is a jitted function with static arguments: give the function itself, and "
                "static_argnums= to fit",
                place=_PLACE,
            )
        plain = traced.lower().compile()
        before = _memory(plain)
        limit = self._budget.resolve(before.total, static=before.static)
        if before.total <= limit:
            fit = Fit(limit, before, before, 0, 0.0, (before.total,), time.perf_counter() - began)
            return _Planned(lambda dynamic, leaves: _joined(plain(*dynamic[0], **dynamic[1]), beside), fit)
        donated = [k for k, info in enumerate(jax.tree.leaves(traced.args_info)) if info.donated]
        search = _Search(inlined(traced.jaxpr), leaves, donated, limit, before, began + self._seconds)
        best = search.run()
        results = jax.tree.structure(traced.out_info)
        seconds = time.perf_counter() - began
        fit = Fit(limit, best.memory, before, best.repeated, best.extra, tuple(search.tried), seconds)
        return _Planned(
            lambda dynamic, leaves: _joined(jax.tree.unflatten(results, best.compiled(*leaves)), beside), fit
        )


def _is_nnx(step: Any) -> bool:
    """Whether flax's `nnx.jit` has made it, in the way that is known here."""
    if not type(step).__module__.startswith("flax.nnx"):
        return False
    if all(hasattr(step, name) for name in ("jitted_fn", "_get_pure_args_kwargs", "_get_non_pure_out")):
        return True
    if hasattr(step, "trace"):
        raise Unsupported(
            "this form of nnx.jit",
            "tightship.jax.fit takes what nnx.jit(step) makes by default",
            "give the function itself, on what nnx.split makes of the modules, and return their new state",
        )
    return False


def _read(budget: BudgetLike) -> Budget:
    if budget is None:
        raise BadInput(
            "no budget is given; give bytes such as 4GiB, or a percentage such as 60%", place=_PLACE
        )
    return parse_budget(budget)


def _check_options(step: Any, jit: dict[str, Any]) -> None:
    if not callable(step):
        raise BadInput("a step is a function", step, _PLACE)
    unknown = next((name for name in jit if name not in inspect.signature(jax.jit).parameters), None)
    if unknown is not None:
        raise BadInput(
            f"unknown option {unknown!r}: options are budget, seconds, and those of jax.jit", place=_PLACE
        )
    if jit and hasattr(step, "trace"):
        raise BadInput(
            "the step is jitted already, and options of jax.jit are given; give the function itself",
            place=_PLACE,
        )


class _StaticArguments:
    """Which arguments are static, as `jax.jit` takes them: by number or by name."""

    def __init__(self, step: Callable[..., Any], jit: dict[str, Any]) -> None:
        numbers, names = jit.get("static_argnums"), jit.get("static_argnames")
        self._numbers = {numbers} if isinstance(numbers, int) else set(numbers or ())
        self._names = {names} if isinstance(names, str) else set(names or ())
        if not self._numbers and not self._names:
            return
        if hasattr(step, "trace"):
            raise BadInput(
                "static arguments of a function that is jitted; give the function itself", place=_PLACE
            )
        try:
            given = list(inspect.signature(step).parameters.values())
        except (TypeError, ValueError):
            return
        order = [p.name for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._numbers = {k % len(order) if k < 0 and order else k for k in self._numbers}
        self._names |= {order[k] for k in self._numbers if k < len(order)}
        self._numbers |= {k for k, name in enumerate(order) if name in self._names}

    def has(self, key: int | str) -> bool:
        """Whether an argument is static."""
        return key in self._numbers or key in self._names

    def divide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Hashable]:
        """The dynamic arguments, and the static ones with their places."""
        dynamic = (
            tuple(x for k, x in enumerate(args) if k not in self._numbers),
            {name: x for name, x in kwargs.items() if name not in self._names},
        )
        rows = [(k, x) for k, x in enumerate(args) if k in self._numbers]
        static = (*rows, *((n, kwargs[n]) for n in sorted(kwargs) if n in self._names))
        try:
            hash(static)
        except TypeError:
            raise BadInput(
                "a static argument cannot be hashed, which jax.jit asks for", place=_PLACE
            ) from None
        return dynamic, static


def _kind_of(leaf: Any) -> Hashable:
    """What a program is compiled for: shape, type, and where it lies."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        shape, dtype, weak = leaf.shape, leaf.dtype, bool(getattr(leaf, "weak_type", False))
    elif hasattr(leaf, "aval"):
        shape, dtype, weak = leaf.aval.shape, leaf.aval.dtype, leaf.aval.weak_type
    else:
        shape, dtype, weak = (
            np.shape(leaf),
            jax.dtypes.result_type(leaf),
            isinstance(leaf, (bool, int, float, complex)),
        )
    at = getattr(leaf, "sharding", None)
    return shape, str(dtype), weak, None if isinstance(at, jax.sharding.SingleDeviceSharding) else at


def _memory(compiled: Any) -> Memory:
    found = compiled.memory_analysis()
    if found is None:
        raise Unsupported(
            "planning for this backend", "XLA gives no analysis of its memory", "use CPU, GPU or TPU"
        )
    sizes = (found.argument_size_in_bytes, found.output_size_in_bytes, found.alias_size_in_bytes)
    return Memory(*sizes, found.temp_size_in_bytes)


@dataclass(frozen=True)
class _Candidate:
    compiled: Any
    memory: Memory
    repeated: int
    extra: float


class _Search:
    """Programs for a share of what the step takes, from 1 (nothing runs again) to 0, until XLA's total is within
    ``limit``: the more is kept, the more bytes and the fewer repetitions there are."""

    def __init__(
        self,
        program: Program,
        leaves: list[Any],
        donated: list[int],
        limit: int,
        before: Memory,
        until: float,
    ) -> None:
        self.program, self.leaves, self.donated = program, leaves, donated
        self.limit, self.before, self.until = limit, before, until
        self.loops = loops_of(program)
        self.flops = sum(e.flops for e in program.equations)
        graph = Ops(program).graph
        self.beyond = replay(graph, baseline(graph)).peak - graph.static_bytes
        self.tried: list[int] = []
        self.cpu = jax.default_backend() == "cpu"

    def run(self) -> _Candidate:
        """The program with the fewest repetitions among those within the limit. Raises ``Infeasible``."""
        found = [self.candidate(1.0)]
        low, high = 0.0, 1.0
        share = self._room / max(1, found[0].memory.temporaries)
        while not self._done(found, low, high):
            if share > 0:
                share = min(max(share, low + 0.1 * (high - low)), high - 0.1 * (high - low))
            share = 0.0 if share < 0.03 else share
            made = self.candidate(share)
            found.append(made)
            if made.memory.total <= self.limit:
                low = share
                share = (low + high) / 2
            else:
                high = share
                stuck = made.memory.temporaries > 0.99 * found[-2].memory.temporaries
                share *= self._room / max(1, made.memory.temporaries)
                if not any(c.memory.total <= self.limit for c in found) and (
                    stuck or time.perf_counter() > self.until
                ):
                    share = 0.0  # whether there is any
        fits = [c for c in found if c.memory.total <= self.limit]
        if fits:
            return min(fits, key=lambda c: (c.extra, c.repeated, c.memory.total))
        least = min(self.before.total, *(c.memory.total for c in found))
        raise Infeasible(budget=self.limit, lower_bound=self.before.static, best_peak=least, compiled=True)

    @property
    def _room(self) -> int:
        return max(0, self.limit - self.before.static)

    def _done(self, found: Sequence[_Candidate], low: float, high: float) -> bool:
        last = found[-1].memory
        near = last.total <= self.limit and (
            last.temporaries >= _NEAR * self._room or found[-1].repeated == 0
        )
        late = len(found) >= _TRIES or time.perf_counter() > self.until
        fits = any(c.memory.total <= self.limit for c in found)
        return (
            near
            or self._room == 0
            or high <= 0.0
            or (high - low < 0.02)
            or (late and fits)
            or len(found) >= 2 * _TRIES
        )

    def candidate(self, share: float) -> _Candidate:
        """Plan for ``share`` of what the step takes beyond its arguments, and compile."""
        chosen = [(loop, loop.saved(share)) for loop in self.loops] if share < 1 else []
        hold = "select" if self.cpu else "barrier"
        program, bodies = with_bodies(with_saved(self.program, chosen), share, _steps, hold)
        ops = Ops(program)
        steps = _steps(ops, int(share * self.beyond))
        run = on_values(ops, steps, hold)
        lowered = jax.jit(run, donate_argnums=tuple(self.donated), keep_unused=True).lower(*self.leaves)
        compiled = _compile(lowered, self.cpu)
        again = [op for repeats, op in steps if repeats]
        inside = bodies + sum(len(saved.again) for _, saved in chosen)
        flops = sum(ops.graph.ops[op].flops for _, op in steps)
        extra = max(0.0, flops / self.flops - 1) if self.flops else 0.0
        made = _Candidate(compiled, _memory(compiled), len(again) + inside, extra)
        self.tried.append(made.memory.total)
        return made


def _steps(ops: Ops, beyond: int) -> list[tuple[bool, int]]:
    """Which op runs when, and whether for the second time, so that the graph takes ``beyond`` bytes beyond the
    arguments; as near to that as plans come."""
    graph = ops.graph
    if replay(graph, baseline(graph)).peak <= graph.static_bytes + beyond:
        return [(False, op) for op in range(len(graph.ops))]
    options = default.Options(order="given", place=False, seconds=3.0)
    try:
        made = default.plan(graph, graph.static_bytes + beyond, options)
    except Infeasible as error:
        made = default.plan(graph, max(error.best_peak, error.lower_bound), options)
    return [(s.kind == "recompute", s.op) for s in made.steps if s.kind in ("compute", "recompute")]


def _compile(lowered: Any, cpu: bool) -> Any:
    if cpu:
        try:
            return lowered.compile(_MEMORY_FIRST)
        except Exception as error:
            if "xla_cpu_scheduler_type" not in str(error):
                raise
    return lowered.compile()


def fit(step: Callable[..., Any], budget: BudgetLike, *, seconds: float = 10.0, **jit: Any) -> FittedStep:
    """``step`` as a compiled step that stays within ``budget``: bytes, text such as ``"4GiB"``, or a percentage of
    what it takes as it is (``"60%"``; ``"static+60%"``: arguments and results, and that share of the temporaries).

    ``step``: any function that `jax.jit` takes, with its gradients inside (or a jitted one without static arguments).
    ``jit``: its keywords, such as ``donate_argnums`` and ``static_argnums``. ``seconds``: after which nothing better
    is looked for once a program is within the budget.

    What counts is XLA's analysis of the compiled program on one device: arguments + results − what lies in donated
    arguments + temporaries. A step within the budget is compiled as it is. A call raises ``Infeasible`` where no
    program within the budget was found, with the least that was reached; ``BadInput`` inside of transformations."""
    return FittedStep(step, budget, seconds, jit)
