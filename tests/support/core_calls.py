"""Valid calls of everything that the C++ core binds, and wrong arguments for them.

Arguments are recorded from what planners hand to the core, or made as small as they can be. A call is made afresh
with the arguments of each try, so that no try sees what another left.
"""

from __future__ import annotations

import math
import os
import pickle
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from support.strategies import random_graph, random_plan
from tightship import _core
from tightship.analysis.order import csr
from tightship.plan import KINDS, Residence
from tightship.planners.evict import states
from tightship.planners.evict.problem import EvictionProblem
from tightship.simulate import extras, step_columns
from tightship.verify import rules

__all__ = ["CALLS", "HARMLESS", "LIVES", "ORDINARY", "SIZES", "Call", "deep", "hostile_call", "wrong"]

ORDINARY = (
    ValueError, TypeError, OverflowError, MemoryError, AttributeError, IndexError, RecursionError, OSError
)  # fmt: skip


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
        allowed = np.zeros(0, np.uint8)

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
        for decision in range(7):  # what was let in is worked with
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
    anneal |= {"span": 1000, "exchanges": 0.1, "seed": 0, "progress": None}

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
    yield Call("Engine.cover", method("cover"), numbers | {"progress": None})
    decisions = {"decisions": [keep, keep], "limit": 1 << 10}
    yield Call("Engine.walk", method("walk"), decisions)
    yield from state_calls()
    yield Call("Engine.set_horizon", method("set_horizon"), {"positions": 3})
    yield Call("Engine.set_host_limit", method("set_host_limit"), {"bytes": 1 << 20})


def state_calls() -> Iterator[Call]:
    """The search through all states, of a graph of few ops."""
    graph = random_graph(5, 6)  # whose ops ask for temporaries
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    size, first, last, rows, defined = states._requests(problem.graph)
    given = {
        "before": csr(states._before(problem)), "temporaries": csr(rows), "size": np.array(size, np.int64),
        "first": np.array(first, np.int32), "last": np.array(last, np.int32), "defined": csr(defined),
        "limit": 1 << 10, "place": True, "hand_out": True, "work": 500, "seconds": 1.0, "cutoff": math.inf,
    }  # fmt: skip
    engine = lambda **to: problem.engine.states(**to)  # noqa: E731
    yield Call("Engine.states", engine, given)


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


def refused_calls() -> Iterator[Call]:
    """What is there by inheritance alone, and refused whatever it is given."""

    def exhaust(**given: Any) -> None:
        with pytest.raises(ORDINARY):
            _core.PartPlacer(**SIZES, **PARTS).exhaust(**given)

    numbers = {"work": 500, "seconds": 1.0, "goal": 0}
    yield Call("PartPlacer.exhaust", exhaust, {"start": np.arange(6) * 1024} | numbers)


def free_calls() -> Iterator[Call]:
    """Edges, and runs of ops, of which there may be any number."""
    one = np.array([0], np.int32)
    cuts = _core.Cuts(nodes=2, tail=one, head=one + 1, capacity=np.array([3]), source=0, sink=1, switches=1)
    yield Call("Cuts.value", partial(cuts.value, np.array([], np.uint8)), {"free": np.array([0])})
    arguments = engine_arguments()
    ops = np.tile(arguments["order"], 2)
    numbers = {"limit": 1000, "heat": 0.1, "span": 1000, "work": 1000, "seconds": 1.0, "seed": 0}
    yield Call("Engine.resequence", _core.Engine(**arguments).resequence, {"ops": ops, **numbers})


def cut_calls() -> Iterator[Call]:
    arguments = {"nodes": 4, "source": 0, "sink": 3, "capacity": np.array([3, 2, 4, 1])}
    edges = {"tail": np.array([0, 0, 1, 2], np.int32), "head": np.array([1, 2, 3, 3], np.int32)}
    yield Call("min_cut", _core.min_cut, arguments | edges | {"seconds": 1.0})
    yield Call("Cuts", _core.Cuts, arguments | edges | {"switches": 3})
    cuts = _core.Cuts(**arguments, **edges, switches=3)  # whose last edge is a switch
    opened = partial(cuts.value, free=np.array([0]))
    yield Call("Cuts.value", opened, {"open": np.array([1], np.uint8)})
    program = {name: np.ones(2) for name in ("cost", "low", "high")} | {"limit": np.ones(1)}
    entries = {"rows": (np.array([0, 2]), np.array([0, 1], np.int32)), "coefficient": np.ones(2)}
    yield Call(
        "linear_bound", _core.linear_bound, entries | program | {"rounds": 40, "enough": 1.0, "seconds": 1.0}
    )
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
    asked = {"state": c.state, "block": extras(graph), "requests": c.requests, "size": c.request_size}
    asked |= {"storage": c.request_storage, "begin": c.request_start, "end": c.request_end}
    residences = lambda **given: known.residences(  # noqa: E731
        **{n: given[n] for n in asked}, steps={n: given[f"steps.{n}"] for n in steps}
    )
    yield Call("Facts.residences", residences, asked | {f"steps.{n}": column for n, column in steps.items()})
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


def record_calls() -> Iterator[Call]:
    """Columns of Python's objects, and objects of columns: what is wrong with the objects is met there."""
    graph = random_graph(11, 12, overwrites=1.0)
    ops, steps = graph.ops, random_plan(graph, 1).steps
    for name, attribute in (("integers", "state"), ("numbers", "time"), ("flags", "random")):
        yield Call(name, getattr(_core, name), {"records": ops, "name": attribute})
    yield Call("rows", _core.rows, {"records": ops, "name": "overwrites"})
    yield Call("lengths", _core.lengths, {"records": ops, "name": "calls"})
    yield Call("codes", _core.codes, {"records": steps, "name": "kind", "known": KINDS})
    words = {"begin": "o", "names": ("target", "inputs", "random"), "between": ",", "end": ";"}
    yield Call("text", _core.text, {"records": ops, **words, "quoted": True})
    columns = {"storage": np.arange(3), "start": np.arange(3), "end": np.arange(3), "pool": "device"}
    made = lambda **given: _core.records(  # noqa: E731
        given.pop("type"), given.pop("count"), {**columns, **given}
    )
    yield Call("records", made, {"type": Residence, "count": 3, "size": np.arange(3), "form": ["full"] * 3})


def pickle_calls() -> Iterator[Call]:
    tree = {"a": [1, 2.5, "x", None, (True, -7)], "b": [{"k": 1}, {"k": 2}]}
    data = pickle.dumps(tree, protocol=4)
    read = _core.PlainPickle(data)
    _, values = read.items(read.root[1])
    lists = np.array([values[1]])  # what a is: a list

    def opened(data: bytes) -> Any:
        found = _core.PlainPickle(data)
        kind, number = found.root
        return found.items(number) if kind in CONTAINERS else number

    containers = [k for k in range(16) if not _raises(read.items, k)]
    CONTAINERS.update((read.root[0],))
    yield Call("PlainPickle", opened, {"data": data})
    yield Call("PlainPickle.items", read.items, {"container": containers[0]})
    yield Call("PlainPickle.column", read.column, {"container": read.root[1], "key": "k"})
    yield Call("PlainPickle.rows", read.rows, {"which": lists[:0]})
    text = next(k for k in range(16) if not _raises(read.text, k))
    yield Call("PlainPickle.text", read.text, {"k": text})
    yield Call("PlainPickle.real", read.real, {"k": next(k for k in range(16) if not _raises(read.real, k))})


CONTAINERS: set[int] = set()


def _raises(call: Callable[[int], Any], k: int) -> bool:
    try:
        call(k)
    except ORDINARY:
        return True
    return False


def copy_calls() -> Iterator[Call]:
    """Copies between memory and a file; an address is taken for what it is, and as many bytes behind it as are asked
    for, so all are of memory that there is."""
    memory = np.zeros(4096, np.uint8)
    descriptor, path = tempfile.mkstemp()  # open for as long as the process lives
    os.write(descriptor, bytes(4096))
    os.unlink(path)

    def there(given: dict[str, Any]) -> dict[str, Any]:
        size = given["size"]
        inside = not isinstance(size, int) or not memory.nbytes < size < 2**63
        return given if inside else given | {"size": memory.nbytes}

    def moved(file: int, **given: Any) -> Any:
        copier, given = _core.Copier(file), there(given)
        first = copier.begin(0, True, memory.ctypes.data, 64, 0, [])
        given["after"] = [first, *given["after"]]
        copy = copier.begin(address=memory.ctypes.data, **given)
        copier.drain()
        _ = copy.done
        try:
            copy.result()
        finally:
            copier.close()

    def staged(file: int, **given: Any) -> Any:
        made = _core.Staged(file)
        made.job(address=memory.ctypes.data, **there(given))
        made.settle()

    size = {"size": 64, "offset": 128}
    yield Call("Copier.begin", moved, {"file": descriptor, "stream": 1, "out": True, **size, "after": []})
    yield Call("Staged.job", staged, {"file": descriptor, "out": True, **size})


CALLS = (*engine_calls(), *placement_calls(), *cut_calls())
HARMLESS = (
    *CALLS,
    *refused_calls(),
    *free_calls(),
    *graph_calls(),
    *record_calls(),
    *pickle_calls(),
    *copy_calls(),
)


def wrong_texts(value: str | bytes) -> Iterator[tuple[str, Any]]:
    for text in ("", "\x00", "\ud800", "__class__", "__dict__", "\U0001f600" * 3, "x" * 70_000):
        yield repr(text)[:20], text if isinstance(value, str) else text.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        for at in range(len(value)):
            yield f"cut at {at}", value[:at]
            yield f"changed at {at}", value[:at] + bytes([value[at] ^ 0x55]) + value[at + 1 :]
    yield "none", None


class Odd:
    """An object whose attributes are anything, and raise."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def deep(levels: int) -> tuple[Any, ...]:
    made: tuple[Any, ...] = ()
    for _ in range(levels):
        made = (made,)
    return made


def wrong_records() -> Iterator[tuple[str, Any]]:
    values = (
        None,
        2**70,
        -(2**63),
        1.5,
        math.nan,
        "x",
        (1, "x"),
        ((1, 2), 3),
        [2**40],
        {},
        object(),
        deep(200_000),
    )
    for value in (*values, ValueError("no"), TypeError("no")):
        yield f"{type(value)}", (Odd(value),)
    yield "of nothing", (None,)
    yield "endless", [Odd(0)] * 70_000
    yield "no tuple", 5


def wrong(value: Any) -> Iterator[tuple[str, Any]]:
    """What may come instead of an argument, with a word for it."""
    if isinstance(value, tuple) and not (len(value) == 2 and isinstance(value[0], np.ndarray)):
        yield from wrong_records()
        yield from (("none", ()), ("names", ("x", None)), ("many", ("kind",) * 300))
    elif isinstance(value, tuple):
        for k, kind in enumerate(("starts", "items")):
            for word, other in wrong(value[k]):
                yield f"{kind} {word}", (other, value[1]) if k == 0 else (value[0], other)
        yield "one array", value[0]
    elif isinstance(value, np.ndarray):
        yield from wrong_arrays(value)
    elif isinstance(value, (str, bytes)):
        yield from wrong_texts(value)
    elif isinstance(value, (list, type)):
        for other in (None, 0, [], [None], [0] * 3, object, int, dict, np.ndarray, Exception):
            yield f"{other}", other
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


def any_wrong(value: Any, rng: random.Random) -> Any:
    """A wrong one of all, or one in which several numbers are changed at once."""
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(x, np.ndarray) for x in value):
        k = rng.randrange(2)
        other = any_wrong(value[k], rng)
        return (other, value[1]) if k == 0 else (value[0], other)
    if isinstance(value, np.ndarray) and len(value) and value.dtype.kind in "iuf" and rng.random() < 0.7:
        other = value.copy()
        near = sorted({-1, 0, 1, len(value) - 1, len(value), *value.tolist()[:5]})
        info = np.iinfo(value.dtype) if value.dtype.kind in "iu" else np.finfo(value.dtype)
        for _ in range(rng.choice((1, 1, 2, len(value)))):
            number = rng.choice((*near, info.max, info.min))
            other[rng.randrange(len(other))] = min(max(number, info.min), info.max)
        return other
    return rng.choice([other for _, other in wrong(value)])


def hostile_call(call: Call, seed: int) -> str:
    """A call with about two wrong arguments: which ones, and the error, if it is an ordinary one. A search has little
    time, whatever else it is told, and who asks for its progress may raise."""
    rng = random.Random(f"{call.name} {seed}")
    chosen = [n for n in call.arguments if n != "seconds" and rng.random() < 2 / len(call.arguments)]
    given = {name: any_wrong(call.arguments[name], rng) for name in chosen}
    if "seconds" in call.arguments:
        given["seconds"] = 0.02
    if "progress" in call.arguments:
        given["progress"] = rng.choice((None, lambda *_: 1 / 0, lambda *_: None, print))
    try:
        call.make(**(call.arguments | given))
    except (*ORDINARY, ZeroDivisionError) as error:
        return f"{', '.join(chosen)}: {type(error).__name__}"
    return f"{', '.join(chosen)}: taken"
