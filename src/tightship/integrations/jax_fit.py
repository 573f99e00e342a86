"""A JAX step within a budget in bytes, read off what XLA compiled: `tightship.jax.fit`.

    step = tightship.jax.fit(train_step, budget="4GiB", donate_argnums=0)
    state, loss = step(state, batch)        # planned and compiled at the first call for each kind of arguments

The step is traced with its gradients and its optimizer; no names, no policies, no change of the model. What the
forward pass leaves for the backward pass is planned as any graph is: kept, or made again. The program is written out
again with those repetitions, compiled, and XLA's own analysis read: arguments, results, temporaries of the program.
What is above the budget is planned again for less, until it is within it, or `Infeasible` says how near it came.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np

from tightship.errors import BadInput, Infeasible, Unsupported
from tightship.files import DEFAULT, folder_of, from_json, to_json, write_file
from tightship.frontends.jaxpr import flops_of
from tightship.integrations.jax_levels import Level
from tightship.integrations.jax_regions import program_of
from tightship.integrations.jax_search import Memory, Search, compile_for, memory_of, operations_of, placed_as
from tightship.planners import default
from tightship.units import Budget, BudgetLike, format_bytes, parse_budget

__all__ = ["Fit", "FittedStep", "Memory", "fit"]

_PLACE = "tightship.jax.fit"
_LAST = 2.5
"""Time that XLA takes for the program that will run, over that for a first look at the step."""
_KEPT = 500
"""Plans that are kept on disk; those not read for longest are removed."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What was planned for one kind of arguments, and what XLA says of it. ``before``: of the step as it was.
    ``repeated``: equations that run again; ``extra_flops``: modeled operations over the step's, less than 0 where the
    step's own checkpoints make more again than need be. ``operations``: XLA's own count, with the body of a loop
    once, and ``operations_before`` that of the step as it was given. ``tried``: total bytes of each program that was
    compiled (none for a plan that was kept); ``seconds`` of the processor for planning and compiling."""

    budget: int
    memory: Memory
    before: Memory
    repeated: int
    extra_flops: float
    tried: tuple[int, ...]
    seconds: float
    operations: float = 0.0
    operations_before: float = 0.0

    def __str__(self) -> str:
        m, b = self.memory, self.before
        return (
            f"{format_bytes(m.total)} within {format_bytes(self.budget)}: arguments and results "
            f"{format_bytes(m.static)}, temporaries {format_bytes(m.temporaries)} "
            f"({format_bytes(b.temporaries)} before); "
            f"{self.repeated} operations run again, {self.extra_flops:+.1%} FLOPs"
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
        self,
        step: Callable[..., Any],
        budget: BudgetLike,
        seconds: float,
        jit: dict[str, Any],
        cache: Path | str | None = None,
    ) -> None:
        self._budget, self._seconds = _read(budget), seconds
        self._folder = folder_of(cache)
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
        began = time.process_time()
        jitted = self._jitted(step, args, kwargs)
        traced, results = jitted.trace(*args, **kwargs), None
        try:
            same = jax.tree.structure(traced.args_info) == tree
        except (
            Exception
        ):  # a node of the caller's that takes arrays only, where JAX puts what it knows of them
            traced, results = self._by_leaves(jitted, args, kwargs, tree, leaves)
            same = True
        beside = dict(step.beside) if isinstance(step, _Around) else {}
        if not same:
            raise BadInput(
                "the step is a jitted function with static arguments: give the function itself, and "
                "static_argnums= to fit",
                place=_PLACE,
            )
        planning = _Planning(traced, leaves, self._budget, self._folder, began + self._seconds)
        compiled, fit = planning.kept() or planning.searched()
        fit = replace(fit, seconds=time.process_time() - began)
        if planning.as_it_is and results is None:
            return _Planned(lambda dynamic, leaves: _joined(compiled(*dynamic[0], **dynamic[1]), beside), fit)
        made = traced.out_tree if results is None else results
        return _Planned(
            lambda dynamic, leaves: _joined(jax.tree.unflatten(made, compiled(*leaves)), beside), fit
        )

    def _by_leaves(
        self, jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tree: Any, leaves: list[Any]
    ) -> tuple[Any, Any]:
        """The trace of a jitted step as a function of its leaves, with its donations, and the tree of its results."""
        results: list[Any] = []

        def flat(*leaves: Any) -> list[Any]:
            row, named = jax.tree.unflatten(tree, leaves)
            given = iter(row)
            whole = [x if self._static.has(k) else next(given) for k, x in enumerate(args)]
            out, made = jax.tree.flatten(jitted(*whole, **{**kwargs, **named}))
            results[:] = [made]
            return out

        jaxpr = jax.make_jaxpr(flat)(*leaves).jaxpr
        inputs = {x: k for k, x in enumerate(jaxpr.invars)}
        donated = {
            inputs[x]
            for e in jaxpr.eqns
            for x, gives in zip(e.invars, e.params.get("donated_invars", ()), strict=False)
            if gives and not hasattr(x, "val") and x in inputs
        }
        traced = jax.jit(flat, donate_argnums=tuple(sorted(donated)), keep_unused=True).trace(*leaves)
        return traced, results[0]


class _Kept(msgspec.Struct):
    """A plan on disk."""

    limit: int
    before: tuple[int, int, int, int]
    operations_before: float
    beyond: float
    order: bool
    log: list[Any]


class _Planning:
    """What is planned for one kind of arguments: a program of XLA's, and what is said of it."""

    def __init__(
        self, traced: Any, leaves: list[Any], budget: Budget, folder: Path | None, until: float
    ) -> None:
        self.traced, self.leaves, self.budget, self.until = traced, leaves, budget, until
        self.program = program_of(traced.jaxpr)
        info = jax.tree.leaves(traced.args_info)
        self.donated = tuple(k for k, x in enumerate(info) if x.donated)
        self.flops = sum(map(flops_of, traced.jaxpr.eqns))
        self.as_it_is = False
        # Given to `jax.jit` by the caller; JAX has no public name for it.
        self.compiler_options = dict(getattr(traced, "_params", {}).get("compiler_options_kvs", ()))
        # Where arguments lie on several devices is not in the trace.
        alone = len(jax.devices()) == 1 and not self.compiler_options
        self.path = None if folder is None or not alone else folder / f"jax-{self._digest()}.json"

    def _digest(self) -> str:
        """Of everything that a plan depends on; addresses of functions in the jaxpr's text are none of it."""
        text = re.sub(r"0x[0-9a-f]+", "", str(self.traced.jaxpr))
        places = [str(getattr(x, "sharding", "")) for x in self.leaves]
        device = jax.devices()[0]
        of = (text, places, self.donated, repr(self.budget), device.device_kind, len(jax.devices()))
        made_by = (jax.__version__, version("jaxlib"), version("tightship"))
        return hashlib.sha256(repr((of, made_by, str(default.Options()))).encode()).hexdigest()[:32]

    def searched(self) -> tuple[Any, Fit]:
        lowered = self.traced.lower()
        began = time.process_time()
        first = compile_for(lowered, memory=False, quick=True)
        until = self.until - _LAST * (time.process_time() - began)
        before, operations = memory_of(first), operations_of(first)
        limit = self.budget.resolve(before.total, static=before.static)
        drops = "differentiated=True" in str(self.traced.jaxpr)  # checkpoints that make something again
        if before.total <= limit and not drops:
            return self._given(lowered, limit, operations)
        placed = placed_as(first, self.leaves)
        if self.compiler_options:
            placed["compiler_options"] = self.compiler_options
        search = Search(self.program, self.leaves, self.donated, limit, before, until, operations, placed)
        try:
            best, compiled = search.run()
        except Infeasible:
            if before.total <= limit:
                return self._given(lowered, limit, operations)
            raise
        if before.total <= limit and best.level.flops >= self.flops:
            return self._given(lowered, limit, operations)
        fit = self._fit(compiled, best.level, limit, before, operations, tuple(search.tried))
        if self.path is not None:
            sizes = (before.arguments, before.outputs, before.aliased, before.temporaries)
            row = _Kept(limit, sizes, operations, min(best.beyond, 1e300), best.order, best.log)
            _keep(self.path, to_json(row))
        return compiled, fit

    def _given(self, lowered: Any, limit: int, operations: float) -> tuple[Any, Fit]:
        """The step as it is."""
        self.as_it_is = True
        compiled = compile_for(lowered, memory=False, quick=False)
        memory = memory_of(compiled)
        return compiled, Fit(limit, memory, memory, 0, 0.0, (memory.total,), 0.0, operations, operations)

    def kept(self) -> tuple[Any, Fit] | None:
        """The program of a plan on disk, if there is one and XLA says the same of it."""
        try:
            if self.path is None:
                return None
            row = from_json(self.path.read_bytes(), _Kept)
            beyond = math.inf if row.beyond >= 1e300 else row.beyond
            before = Memory(*row.before)
            search = Search(self.program, self.leaves, self.donated, row.limit, before, self.until)
            level = search.again(beyond, row.log)
            compiled = compile_for(search.lower(level), memory=row.order, quick=False)
            with contextlib.suppress(OSError):
                os.utime(self.path)
        except _NO_PLAN:
            return None
        fit = self._fit(compiled, level, row.limit, before, row.operations_before, ())
        return (compiled, fit) if fit.memory.total <= row.limit else None

    def _fit(
        self,
        compiled: Any,
        level: Level,
        limit: int,
        before: Memory,
        operations: float,
        tried: tuple[int, ...],
    ) -> Fit:
        extra = level.flops / self.flops - 1 if self.flops else 0.0
        memory = memory_of(compiled)
        return Fit(limit, memory, before, level.again, extra, tried, 0.0, operations_of(compiled), operations)


_NO_PLAN = (
    OSError, msgspec.MsgspecError, ValueError, TypeError, KeyError, IndexError, StopIteration, RecursionError,
)  # fmt: skip
"""What reading a file and planning by what it says raises, if it holds something else."""


def _keep(path: Path, data: bytes) -> None:
    """Writes a plan, if that is possible, and removes the oldest ones."""
    with contextlib.suppress(OSError, BadInput):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)
        others = sorted(path.parent.glob("jax-*.json"), key=lambda p: p.stat().st_mtime)
        for old in others[:-_KEPT]:
            old.unlink()


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


def fit(
    step: Callable[..., Any],
    budget: BudgetLike,
    *,
    seconds: float = 10.0,
    cache: Path | str | None = DEFAULT,
    **jit: Any,
) -> FittedStep:
    """``step`` as a compiled step that stays within ``budget``: bytes, text such as ``"4GiB"``, or a percentage of
    what it takes as it is (``"60%"``; ``"static+60%"``: arguments and results, and that share of the temporaries).

    ``step``: any function that `jax.jit` takes, with its gradients inside (or a jitted one without static
    arguments).
    ``jit``: its keywords, such as ``donate_argnums`` and ``static_argnums``. ``seconds`` of the processor, after
    which nothing better is looked for. ``cache``: folder of plans, which are read again for the same step, budget and
    versions (default: tightship's in the user's cache folder), None for none.

    What counts is XLA's analysis of the compiled program on one device: arguments + results − what lies in donated
    arguments + temporaries. A step within the budget is compiled as it is, or with less of what its own checkpoints
    make again, where there is room. A call raises ``Infeasible`` where no
    program within the budget was found, with the least that was reached; ``BadInput`` inside of transformations."""
    return FittedStep(step, budget, seconds, jit, cache)
