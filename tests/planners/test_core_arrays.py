"""Wrong arrays never reach the searches of the core: each is refused with its name, or does no harm.

Valid calls of everything that is bound are recorded once. Then each argument of each call is replaced by each wrong
one, and the call is made: it has to raise an ordinary error or return. A crash ends the test run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from support.chains import chain
from support.strategies import random_graph, random_plan
from tightship import _core
from tightship.planners.evict.problem import EvictionProblem
from tightship.simulate import extras, step_columns
from tightship.verify import rules

ORDINARY = (ValueError, TypeError, OverflowError, MemoryError)


@dataclass(frozen=True)
class Call:
    """``make`` is called afresh with the arguments of each try, so that no try sees what another left."""

    name: str
    make: Callable[..., Any]
    arguments: dict[str, Any]

    def with_(self, name: str, value: Any) -> Any:
        return self.make(**(self.arguments | {name: value}))


def engine_arguments() -> dict[str, Any]:
    """What `EvictionProblem` hands to the engine for a graph with mutation, offload and packing."""
    recorded: dict[str, Any] = {}

    class Recorder:
        def __init__(self, **arguments: Any) -> None:
            recorded.update(arguments)

        gaps = (np.zeros(0, np.int32),) * 3

        def set_horizon(self, positions: int) -> None: ...

    graph = random_graph(7, 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "Engine", Recorder)
        _ = EvictionProblem(
            graph, tuple(range(len(graph.ops))), means=("recompute", "compress", "offload")
        ).engine
    return recorded


def engine_calls() -> Iterator[Call]:
    arguments = engine_arguments()
    real = _core.Engine

    def engine(**given: Any) -> Any:
        made = real(**given)
        gaps = len(made.gaps[0])
        for decision in range(6):  # what was let in is worked with
            made.emit(np.full(gaps, decision, np.uint8), 1 << 12)
        return made

    yield Call("Engine", engine, arguments)
    gaps = len(real(**arguments).gaps[0])
    assert gaps > 4
    keep = np.zeros(gaps, np.uint8)
    groups = (np.array([0, 2, gaps], np.int64), np.arange(gaps, dtype=np.int32))
    twins = (np.array([0, 2, 4], np.int64), np.array([0, 1, 2, -1], np.int32))
    numbers = {"limit": 1 << 10, "start": keep, "work": 20_000, "seconds": 1.0}
    anneal = numbers | {"groups": groups, "twins": twins, "families": np.array([0, 2]), "heat": 0.1}
    anneal |= {"span": 1000, "seed": 0, "progress": None}

    def method(name: str) -> Callable[..., Any]:
        return lambda **given: getattr(real(**arguments), name)(**given)

    def positional(name: str) -> Callable[..., Any]:
        return lambda **given: getattr(real(**arguments), name)(*given.values())

    yield Call("Engine.evaluate", positional("evaluate"), {"evict": keep, "limit": 1 << 10})
    yield Call("Engine.profile", positional("profile"), {"evict": keep})
    yield Call("Engine.emit", positional("emit"), {"evict": keep, "limit": 1 << 10})
    yield Call("Engine.greedy", method("greedy"), numbers | {"progress": None})
    yield Call("Engine.anneal", method("anneal"), anneal)
    yield Call("Engine.lazy_greedy", method("lazy_greedy"), numbers | {"rows": groups, "progress": None})
    yield Call("Engine.relax", method("relax"), numbers | {"groups": groups})
    yield Call("Engine.priced_cut", method("priced_cut"), {"boundary": 10, "bytes_per_second": 1e6})
    yield Call("Engine.set_horizon", method("set_horizon"), {"positions": 3})
    yield Call("Engine.set_host_limit", method("set_host_limit"), {"bytes": 1 << 20})


LIVES = {
    "lower": np.array([0, 0, 1, 2, 3, 4]),
    "upper": np.array([2, 4, 3, 5, 6, 6]),
}
SIZES = {
    "size": np.array([64, 128, 0, 64, 192, 64]),
    "alignment": np.array([1, 64, 64, 32, 64, 1]),
    "pinned": np.array([-1, -1, -1, 256, -1, -1]),
}
ORDER = np.array([4, 1, 0, 3, 2, 5])
PAIRS = {
    "one": np.array([0, 1, 3]),
    "two": np.array([1, 2, 4]),
    "low": np.array([-64, -128, -64]),
    "high": np.array([128, 64, 192]),
}
PARTS = {
    "owner": np.array([0, 1, 1, 3, 4, 5]),
    "since": np.array([0, 0, 3, 2, 3, 4]),
    "until": np.array([2, 2, 4, 5, 6, 6]),
    "low": np.array([0, 0, 64, 0, 0, 0]),
    "high": np.array([64, 128, 128, 64, 192, 64]),
    "one": np.array([0, 3]),
    "two": np.array([1, 5]),
    "below": np.array([-64, -64]),
    "above": np.array([128, 64]),
}


def packing_calls(name: str, placer: Callable[[], Any]) -> Iterator[Call]:
    def method(of: str) -> Callable[..., Any]:
        return lambda **given: getattr(placer(), of)(**given)

    start = np.array([0, 1024, 0, 2048, 3072, 4096])
    search = {"seed": 0, "work": 2_000, "seconds": 1.0}
    order = {"order": ORDER, "best_fit": True}
    yield Call(f"{name}.pack", method("pack"), order | {"cutoff": 1 << 40, "seconds": 1.0})
    yield Call(f"{name}.climb", method("climb"), order | search | {"bound": 0})
    if name == "Placer":
        exact = search | {"start": start, "goal": 0, "wanted": False, "threads": 1}
        yield Call("Placer.exact", method("exact"), exact)
        yield Call("Placer.windows", method("windows"), search | {"start": start, "goal": 0})
        yield Call("Placer.skyline", method("skyline"), {"rule": 0})
        return
    yield Call(f"{name}.fill", method("fill"), order | {"capacity": 512, "seconds": 1.0})
    hinted = {"order": ORDER, "hint": start, "cutoff": 1 << 40, "seconds": 1.0}
    yield Call(f"{name}.hinted", method("hinted"), hinted)


def placement_calls() -> Iterator[Call]:
    def packed(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(**given: Any) -> Any:
            placer = make(**given)
            n = len(given["size"])
            order = np.arange(n)
            start, _ = placer.pack(order, False)
            placer.climb(order, True, 0, 500, 1.0, 0)
            if hasattr(placer, "exact"):
                placer.exact(start, 0, 500, 1.0, 0, False, 1)
                placer.windows(start, 0, 500, 1.0, 0)
                placer.skyline(1)
            return placer.clash

        return call

    lives: dict[str, Any] = LIVES | SIZES
    yield Call("Placer", packed(_core.Placer), lives)
    yield Call("RelatedPlacer", packed(_core.RelatedPlacer), SIZES | PAIRS)
    yield Call("PartPlacer", packed(_core.PartPlacer), SIZES | PARTS)
    yield from packing_calls("Placer", lambda: _core.Placer(**lives))
    yield from packing_calls("RelatedPlacer", lambda: _core.RelatedPlacer(**SIZES, **PAIRS))
    yield from packing_calls("PartPlacer", lambda: _core.PartPlacer(**SIZES, **PARTS))
    exhaust = {"start": np.arange(6) * 1024, "work": 500, "seconds": 1.0, "goal": 0}
    related = lambda **given: _core.RelatedPlacer(**SIZES, **PAIRS).exhaust(**given)  # noqa: E731
    yield Call("RelatedPlacer.exhaust", related, exhaust)
    free = lives | {"pinned": np.full(6, -1)}
    sweep = lambda **given: _core.Placer(**free).sweep(**given)  # noqa: E731
    yield Call("Placer.sweep", sweep, {"order": np.arange(6), "seconds": 1.0})
    sets = LIVES | {"set": np.array([0, 1, 0, 1, 2, 2])}
    sets |= {
        "size": np.array([64, 128, 192]),
        "alignment": np.array([1, 64, 64]),
        "order": np.array([2, 0, 1]),
    }
    yield Call("pack_sets", _core.pack_sets, sets)
    yield Call("lower_bound", _core.lower_bound, LIVES | {"size": SIZES["size"]})


def cut_calls() -> Iterator[Call]:
    arguments = {"nodes": 4, "source": 0, "sink": 3, "capacity": np.array([3, 2, 4, 1])}
    edges = {"tail": np.array([0, 0, 1, 2], np.int32), "head": np.array([1, 2, 3, 3], np.int32)}
    yield Call("min_cut", _core.min_cut, arguments | edges | {"seconds": 1.0})
    reach = partial(_core.reached, np.array([0], np.int32))  # of which there may be any number
    yield Call("reached", reach, {"edges": (np.array([0, 1, 2, 2]), np.array([1, 2], np.int32))})


def graph_calls() -> Iterator[Call]:
    """Facts of a graph, what its steps cost, and the verifier's replay; columns of one call may have any length, as
    long as all agree."""
    graph = random_graph(11, 12, overwrites=1.0)
    plan = random_plan(graph, 1)
    c = graph.columns
    caller = np.zeros(len(graph.storages), np.uint8)
    caller[sorted(graph.static)] = 1
    facts = {name: getattr(c, name) for name in ("inputs", "outputs", "mutates", "control", "home", "size")}
    facts |= {"caller": caller, "random": c.random, "effect": c.effect}

    def found(**given: Any) -> Any:
        made = _core.Facts(**given)
        _ = made.reads, made.defines, made.needs, made.writers, made.readers, made.definer, made.maker
        return made.predecessors() if made.undefined[0] < 0 else made

    yield Call("Facts", found, facts)
    known = _core.Facts(**facts)
    before = known.predecessors()
    yield Call("Facts.sink", known.sink, {"before": before, "stays": caller})
    yield Call("successors", _core.successors, {"before": before})
    yield Call("tuples", _core.tuples, {"rows": before})
    steps = step_columns(graph, plan.steps)
    assert steps is not None
    costs: dict[str, Any] = {"extra": extras(graph), "state": c.state, "time": c.time, "save": 1e-5}
    costs |= {"updates": c.updates, "overwrites": c.overwrites}
    timeline = lambda **given: known.timeline(  # noqa: E731
        **{n: given[n] for n in costs}, steps={n: given[f"steps.{n}"] for n in steps}
    )
    yield Call("Facts.timeline", timeline, costs | {f"steps.{n}": column for n, column in steps.items()})
    taken: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "verified", lambda *given: taken.extend(given))
        rules.sound(graph, plan)
    numbers = {"move", "alignment", "arena", "host"}
    columns = {
        f"{side} {name}": value
        for side, given in zip(("graph", "plan"), taken, strict=True)
        for name, value in given.items()
        if isinstance(value, (np.ndarray, tuple)) or name in numbers
    }

    def verified(**given: Any) -> Any:
        sides = (
            {n.split()[1]: v for n, v in given.items() if n.startswith(side)} for side in ("graph", "plan")
        )
        return _core.verified(*sides)

    yield Call("verified", verified, columns)


CALLS = (*engine_calls(), *placement_calls(), *cut_calls())
HARMLESS = (*CALLS, *graph_calls())


def wrong(value: Any) -> Iterator[tuple[str, Any]]:
    """What may come instead of an argument, with a word for it."""
    if isinstance(value, tuple):
        for k, kind in enumerate(("starts", "items")):
            for word, other in wrong(value[k]):
                yield f"{kind} {word}", (other, value[1]) if k == 0 else (value[0], other)
        yield "one array", value[0]
    elif isinstance(value, np.ndarray):
        yield from wrong_arrays(value)
    elif isinstance(value, bool) or value is None:
        yield "an array", np.zeros(3)
    elif isinstance(value, int):
        for number in (-1, 0, -(2**31), 2**31 - 1, 2**62, 2**63 - 1, -(2**63), 2**64):
            yield f"{number}", number
    else:
        for real in (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e308):
            yield f"{real}", real


def wrong_arrays(array: np.ndarray) -> Iterator[tuple[str, Any]]:
    if not len(array):
        yield "too long", np.ones(1, array.dtype)
        return
    yield "empty", array[:0]
    yield "too short", array[:-1]
    yield "too long", np.append(array, array[-1:])
    yield "reversed", array[::-1]
    yield "of stride 2", np.repeat(array, 2)[::2]
    yield "of two dimensions", array[:, None]
    yield "of text", array.astype(str)
    yield "of another type", array.astype(np.float32)
    for special in (math.nan, math.inf, -1.0, 1e300):
        other = array.astype(np.float64)
        other[len(other) // 2] = special
        yield f"with {special}", other
    if array.dtype.kind in "iu":
        info = np.iinfo(array.dtype)
        numbers = {-1, 0, 1, len(array), 1000, 2**62, 2**61, info.max, info.min}
        for number in sorted(n for n in numbers if info.min <= n <= info.max):
            for at in (0, len(array) // 2, len(array) - 1):
                other = array.copy()
                other[at] = number
                yield f"with {number} at {at}", other
            yield f"all {number}", np.full_like(array, number)


@pytest.mark.parametrize("call", HARMLESS, ids=lambda call: call.name)
def test_a_valid_call_is_taken(call: Call) -> None:
    call.make(**call.arguments)


@pytest.mark.parametrize("call", HARMLESS, ids=lambda call: call.name)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
def test_a_wrong_argument_is_an_ordinary_error_or_does_no_harm(call: Call) -> None:
    for name, value in call.arguments.items():
        for word, other in wrong(value):
            try:
                call.with_(name, other)
            except ORDINARY as error:
                assert str(error), f"{name} {word}"


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_arrays_of_another_length_are_refused_by_name(call: Call) -> None:
    for name, value in call.arguments.items():
        if isinstance(value, np.ndarray):
            with pytest.raises(ValueError, match=r"entries|\] is |is empty"):
                call.with_(name, np.append(value, value))


@pytest.mark.parametrize(
    "name, at, value, fault",
    [
        ("size", 3, -1, r"size\[3\] is -1; must be from 0 to 2\^62"),
        ("size", 3, 2**62, r"size\[3\] is 4611686018427387904; must be from 0"),
        ("alignment", 1, 0, r"alignment\[1\] is 0; must be from 1"),
        ("pinned", 2, -7, r"pinned\[2\] is -7; must be from 0 to 2\^62, or -1"),
        ("upper", 2, 1, r"upper\[2\] is 1; a live range must end after it begins, here at 1"),
    ],
)  # fmt: skip
def test_a_fault_is_told_with_its_place_and_the_rule(name: str, at: int, value: int, fault: str) -> None:
    arguments = LIVES | SIZES
    wrong_one = arguments[name].copy()
    wrong_one[at] = value
    with pytest.raises(ValueError, match=fault):
        _core.Placer(**(arguments | {name: wrong_one}))


def test_sizes_that_add_up_beyond_64_bits_are_refused() -> None:
    one = np.ones(8, np.int64)
    with pytest.raises(ValueError, match=r"size\[3\] is .*; the sum of all sizes must be at most 2\^62"):
        _core.Placer(0 * one, one, one << 60, one, -one)


def test_copies_outside_of_a_file_are_refused() -> None:
    copier = _core.Copier(-1)
    for size, offset in ((-1, 0), (0, -1), (2**62, 0)):
        with pytest.raises(ValueError, match="must be from 0 to 2"):
            copier.begin(0, True, 0, size, offset, [])
    with pytest.raises((ValueError, TypeError)):
        copier.begin(0, True, 0, 1, 0, [None])  # type: ignore[list-item]
    copier.close()


def test_decisions_of_a_chain_are_one_per_gap() -> None:
    graph = chain(6)
    engine = EvictionProblem(graph, tuple(range(len(graph.ops)))).engine
    with pytest.raises(ValueError, match="decisions has 1 entries instead of"):
        engine.evaluate(np.zeros(1, np.uint8), 100)
