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

from tightship.errors import BadInput, Infeasible, Unsupported
from tightship.files import DEFAULT, folder_of, from_json, to_json, write_file
from tightship.frontends.jax_in_place import written_over
from tightship.frontends.jaxpr import flops_of
from tightship.integrations.jax_arguments import (
    PLACE,
    Around,
    Held,
    StaticArguments,
    is_array,
    is_traced,
    joined,
    kind_of,
    parted,
)
from tightship.integrations.jax_bodies import program_of
from tightship.integrations.jax_compiled import (
    Memory,
    compile_for,
    look_at,
    memory_of,
    operations_of,
    placed_as,
)
from tightship.integrations.jax_levels import Level
from tightship.integrations.jax_search import Archive, Candidate, Search
from tightship.planners import default
from tightship.units import Budget, BudgetLike, format_bytes, parse_budget

__all__ = ["Fit", "FittedStep", "Memory", "fit"]

_LAST = 5.0
"""Time that XLA takes for the program that will run, over that for a first look at the step, or more."""
_DROPPED = (
    "the step offloads values to the host, and XLA for this backend ({}) keeps them on the device: no byte is saved; "
    "without offloads, fit decides what is made again"
)
_KEPT = 500
"""Plans that are kept on disk; those not read for longest are removed."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What was planned for one kind of arguments, and what XLA says of it. ``before``: of the step as it was.
    ``repeated``: equations that run again; ``extra_flops``: modeled operations over the step's, less than 0 where the
    step's own checkpoints make more again than need be. ``operations``: XLA's own count, with the body of a loop
    once, and ``operations_before`` that of the step as it was given. ``tried``: total bytes of each program that was
    looked at (none for a plan that was kept); ``seconds`` of the processor for planning and compiling, of which
    ``compiling`` for the program that runs. ``notes``: what the step asks for and XLA does not do."""

    budget: int
    memory: Memory
    before: Memory
    repeated: int
    extra_flops: float
    tried: tuple[int, ...]
    seconds: float
    operations: float = 0.0
    operations_before: float = 0.0
    notes: tuple[str, ...] = ()
    compiling: float = 0.0

    def __str__(self) -> str:
        m, b = self.memory, self.before
        return (
            f"{format_bytes(m.total)} within {format_bytes(self.budget)}: arguments and results "
            f"{format_bytes(m.static)}, temporaries {format_bytes(m.temporaries)} "
            f"({format_bytes(b.temporaries)} before); "
            f"{self.repeated} operations run again, {self.extra_flops:+.1%} FLOPs"
            + "".join(f"; {note}" for note in self.notes)
        )


@dataclass(frozen=True)
class _Planned:
    """``call`` takes the dynamic arguments and their leaves."""

    call: Callable[[Any, list[Any]], Any]
    fit: Fit


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
        self._given, self._jit, self._keeps = given, jit, is_traced
        self._donates = (False, False)  # the first argument, and the rest, of equinox's
        self._nnx = _is_nnx(step)
        if type(given).__module__.startswith("equinox") and hasattr(given, "donate_first"):
            self._donates, self._keeps = (given.donate_first, given.donate_rest), is_array
            given = given.__wrapped__
        self._step: Any = given.jitted_fn if self._nnx else given
        self._static = StaticArguments(self._step, jit)
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
                self._static = StaticArguments(self._step, {})
        return self._nnx

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Planned, Any, list[Any]]:
        dynamic, static = self._static.divide(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            raise BadInput(
                "a fitted step was called inside of a transformation (jit, grad, vmap, scan); it is a compiled "
                "program: give the whole step to fit, and call it from outside",
                place=PLACE,
            )
        around = None
        if not hasattr(self._step, "trace") and not all(map(self._keeps, leaves)):
            args, kwargs, around = self._without_others(args, kwargs)
            dynamic, static = self._static.divide(args, kwargs)
            others = tuple((k, *row.items()) for k, row in around.held.items() if row)
            static = (static, others)
            leaves, tree = jax.tree.flatten(dynamic)
        kind = (tree, tuple(map(kind_of, leaves)), static)
        try:
            known = kind in self._kinds
        except TypeError:
            raise BadInput(
                "an argument has a leaf that is no array and cannot be hashed, so that it cannot be static",
                place=PLACE,
            ) from None
        if not known:
            step = around or (Around(self._step, {}, self._keeps) if self._keeps is is_array else self._step)
            with warnings.catch_warnings():
                if any(self._donates):  # equinox donates what it can, and says nothing of the rest
                    warnings.filterwarnings("ignore", "Some donated buffers were not usable")
                self._kinds[kind] = self._plan(step, args, kwargs, tree, leaves)
        return self._kinds[kind], dynamic, leaves

    def _without_others(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Around]:
        """The arguments without leaves that are no arrays, which the step gets all the same."""
        held: dict[Any, Held] = {}
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for key, x in given.items():
            if not self._static.has(key):
                given[key], held[key] = parted(x, self._keeps)
        made = tuple(given[k] for k in range(len(args)))
        return made, {name: given[name] for name in kwargs}, Around(self._step, held, self._keeps)

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
        beside = dict(step.beside) if isinstance(step, Around) else {}
        if not same:
            raise BadInput(
                "the step is a jitted function with static arguments: give the function itself, and "
                "static_argnums= to fit",
                place=PLACE,
            )
        planning = _Planning(traced, leaves, self._budget, self._folder, began + self._seconds)
        compiled, fit = planning.kept() or planning.searched()
        took, notes = time.process_time() - began, planning.notes(compiled)
        fit = replace(fit, seconds=took, compiling=planning.compiling, notes=notes)
        for note in fit.notes:
            warnings.warn(note, stacklevel=4)
        if planning.as_it_is and results is None:
            return _Planned(lambda dynamic, leaves: joined(compiled(*dynamic[0], **dynamic[1]), beside), fit)
        made = traced.out_tree if results is None else results
        return _Planned(
            lambda dynamic, leaves: joined(jax.tree.unflatten(made, compiled(*leaves)), beside), fit
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


class _Planning:
    """What is planned for one kind of arguments: a program of XLA's, and what is said of it."""

    def __init__(
        self, traced: Any, leaves: list[Any], budget: Budget, folder: Path | None, until: float
    ) -> None:
        self.traced, self.leaves, self.budget, self.until = traced, leaves, budget, until
        info = jax.tree.leaves(traced.args_info)
        self.donated = tuple(k for k, x in enumerate(info) if x.donated)
        traced_program = program_of(traced.jaxpr)
        over = written_over(traced_program, self.donated)
        self.programs = (over, traced_program) if over.over else (traced_program,)
        self.flops = sum(map(flops_of, traced.jaxpr.eqns))
        self.text, self.as_it_is = str(traced.jaxpr), False
        # Given to `jax.jit` by the caller; JAX has no public name for it.
        given = getattr(traced, "_params", {})
        self.told: dict[str, Any] = {"keep_unused": bool(given.get("keep_unused", True))}
        options = dict(given.get("compiler_options_kvs", ()))
        self.told |= {"compiler_options": options} if options else {}
        alone = len(jax.devices()) == 1  # where arguments lie on several devices is not in the trace
        self.path = None if folder is None or not alone else folder / f"jax-{self._digest()}.json"
        self.known: Archive | None = None
        self.compiling = 0.0

    def _digest(self) -> str:
        """Of everything that a plan depends on; addresses of functions in the jaxpr's text are none of it."""
        text = re.sub(r"0x[0-9a-f]+", "", self.text)
        places = [str(getattr(x, "sharding", "")) for x in self.leaves]
        device = jax.devices()[0]
        of = (
            text,
            places,
            self.donated,
            sorted(self.told.items()),
            device.device_kind,
            len(jax.devices()),
        )
        made_by = (jax.__version__, version("jaxlib"), version("tightship"))
        return hashlib.sha256(repr((of, made_by, str(default.Options()))).encode()).hexdigest()[:32]

    def notes(self, compiled: Any) -> tuple[str, ...]:
        """What the step asks for and XLA does not do: CPUs have no memory of a host beside their own, and XLA drops
        what is moved there."""
        found = compiled.memory_analysis()
        sizes = ("argument", "output", "alias", "temp")
        held = sum(getattr(found, f"host_{name}_size_in_bytes", 0) for name in sizes)
        return () if "<host>" not in self.text or held else (_DROPPED.format(jax.default_backend()),)

    def searched(self) -> tuple[Any, Fit]:
        lowered = self.traced.lower()
        began = time.process_time()
        if len(jax.devices()) > 1:  # where arguments and results lie is in a compiled program
            first = compile_for(lowered, memory=False, quick=True)
            before, operations = memory_of(first), operations_of(first)
            placed = placed_as(first)
        else:
            (before, operations, _), placed = look_at(lowered, memory=False), {}
        until = self.until - _LAST * (time.process_time() - began)
        limit = self.budget.resolve(before.total, static=before.static)
        drops = "differentiated=True" in self.text  # checkpoints that make something again
        if before.total <= limit and not drops:
            return self._given(lowered, limit, operations)
        told = {**self.told, **placed}
        search = Search(self.programs, self.leaves, self.donated, limit, before, until, operations, told)
        rows = self.known.rows if self.known else []
        search.least = min((row.total for row in rows), default=math.inf)
        within = [row for row in rows if row.total <= limit]
        if within:
            row = min(within, key=lambda row: row.flops)
            with contextlib.suppress(*_NO_PLAN):
                search.seed(row)
        best = None
        try:
            best, compiled = search.run()
        except Infeasible:
            if before.total <= limit:
                return self._given(lowered, limit, operations)
            raise
        finally:
            self._keep(search, best)
        if before.total <= limit and best.level.flops >= self.flops:
            return self._given(lowered, limit, operations)
        self.compiling = search.compiling
        return compiled, self._fit(compiled, best.level, limit, before, operations, tuple(search.tried))

    def _keep(self, search: Search, best: Candidate | None) -> None:
        if self.path is not None:
            _keep(self.path, to_json(search.archive(self.known, best, repr(self.budget))))

    def _given(self, lowered: Any, limit: int, operations: float) -> tuple[Any, Fit]:
        """The step as it is."""
        self.as_it_is = True
        compiled = self._compile(lowered, memory=False)
        memory = memory_of(compiled)
        return compiled, Fit(limit, memory, memory, 0, 0.0, (memory.total,), 0.0, operations, operations)

    def _compile(self, lowered: Any, *, memory: bool) -> Any:
        began = time.process_time()
        compiled = compile_for(lowered, memory=memory, quick=False)
        self.compiling = time.process_time() - began
        return compiled

    def kept(self) -> tuple[Any, Fit] | None:
        """The program of a plan on disk, if there is one for this budget and XLA says the same of it."""
        try:
            if self.path is None:
                return None
            self.known = from_json(self.path.read_bytes(), Archive)
            row = next(x for x in self.known.rows if repr(self.budget) in x.budgets)
            before = Memory(*self.known.before)
            limit = self.budget.resolve(before.total, static=before.static)
            search = Search(
                self.programs, self.leaves, self.donated, limit, before, self.until, told=self.told
            )
            level = search.again(row)
            compiled = self._compile(search.lower(level), memory=row.order)
            with contextlib.suppress(OSError):
                os.utime(self.path)
        except _NO_PLAN:
            return None
        fit = self._fit(compiled, level, limit, before, self.known.operations_before, ())
        return (compiled, fit) if fit.memory.total <= limit else None

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
            "no budget is given; give bytes such as 4GiB, or a percentage such as 60%", place=PLACE
        )
    return parse_budget(budget)


def _check_options(step: Any, jit: dict[str, Any]) -> None:
    if not callable(step):
        raise BadInput("a step is a function", step, PLACE)
    unknown = next((name for name in jit if name not in inspect.signature(jax.jit).parameters), None)
    if unknown is not None:
        raise BadInput(
            f"unknown option {unknown!r}: options are budget, seconds, and those of jax.jit", place=PLACE
        )
    if jit and hasattr(step, "trace"):
        raise BadInput(
            "the step is jitted already, and options of jax.jit are given; give the function itself",
            place=PLACE,
        )


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
