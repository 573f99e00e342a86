"""What the core finds out about graphs and steps at once is what plain Python finds, op by op."""

from __future__ import annotations

import hashlib
import pickle
import random
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.strategies import graphs, plans, random_order
from tightship import _core, simulate
from tightship.analysis.order import predecessors
from tightship.errors import BadInput
from tightship.graph import Graph
from tightship.plan import Plan, Step
from tightship.planners.order import sink


def plain(graph: Graph) -> dict[str, object]:
    """`Uses`, by its words."""
    home = [v.storage for v in graph.values]
    alive, version = set(graph.static), [0] * len(graph.storages)
    definer, maker = [-1] * len(graph.storages), [-1] * len(home)
    writers: list[list[int]] = [[] for _ in graph.storages]
    readers: list[list[int]] = [[] for _ in graph.storages]
    reads, defines, mutates, needs = [], [], [], []
    for k, o in enumerate(graph.ops):
        made = tuple(dict.fromkeys(home[v] for v in o.outputs if home[v] not in alive))
        read = tuple(s for s in dict.fromkeys([*(home[v] for v in o.inputs), *o.mutates]) if s not in made)
        written = tuple(s for s in dict.fromkeys(o.mutates) if s not in made)
        needs.append(tuple(version[s] for s in read))
        for s in read:
            readers[s].append(k)
        for s in (*made, *written):
            writers[s].append(k)
            version[s] += 1
        for s in made:
            definer[s] = k
        for v in o.outputs:
            maker[v] = k
        alive |= set(made)
        reads.append(read)
        defines.append(made)
        mutates.append(written)
    rows = {"reads": reads, "defines": defines, "mutates": mutates, "needs": needs}
    lists = {
        "writers": map(tuple, writers),
        "readers": map(tuple, readers),
        "definer": definer,
        "maker": maker,
    }
    return {name: tuple(row) for name, row in (rows | lists).items()}


@given(graphs(40))
def test_uses_are_what_ops_and_values_say(graph: Graph) -> None:
    assert {name: getattr(graph.uses, name) for name in plain(graph)} == plain(graph)
    assert replace(graph, name="other").uses == graph.uses


@given(graphs(40))
def test_ops_wait_for_data_hazards_chains_and_control(graph: Graph) -> None:
    uses, last = graph.uses, {"random": -1, "effect": -1}
    write, readers = [-1] * len(graph.storages), [set[int]() for _ in graph.storages]
    for k, op in enumerate(graph.ops):
        before = {*op.control, *(uses.maker[v] for v in op.inputs), *(write[s] for s in uses.reads[k])}
        for s in (*uses.mutates[k], *uses.defines[k]):
            before |= readers[s]
            write[s], readers[s] = k, set()
        for s in set(uses.reads[k]) - set(uses.mutates[k]):
            readers[s].add(k)
        for chain in last:
            if getattr(op, chain):
                before.add(last[chain])
                last[chain] = k
        assert predecessors(graph)[k] == tuple(sorted(before - {-1})), k


@given(graphs(40, overwrites=0.7))
def test_a_digest_is_that_of_the_parts_as_text(graph: Graph) -> None:
    h = hashlib.sha256()
    for s in graph.storages:
        h.update(f"s{s.size},{s.pool};".encode())
    for v in graph.values:
        h.update(f"v{v.storage},{v.dtype},{v.shape},{v.stride},{v.offset};".encode())
    for o in graph.ops:
        parts = (o.target, o.inputs, o.outputs, o.mutates, o.updates, o.random, o.effect, o.control)
        again = f"r{o.state}" if o.state else ""
        over = f"w{o.overwrites}" if o.overwrites else ""
        h.update(f"o{parts}{tuple(g.digest for g in o.calls)}{again}{over};".encode())
    h.update(f"i{graph.inputs}o{graph.outputs}".encode())
    assert graph.digest == h.hexdigest()


@given(graphs(30))
def test_an_order_by_what_it_frees_is_that_of_a_plain_list_scheduler(graph: Graph) -> None:
    uses, size = graph.uses, [s.size for s in graph.storages]
    waiting = [len(row) for row in predecessors(graph)]
    left = [len(row) for row in uses.readers]
    stay, order = graph.static | graph.kept, list[int]()

    def frees(k: int) -> bool:
        freed = sum(size[s] for s in uses.reads[k] if s not in stay and left[s] == 1)
        return 0 < freed >= sum(size[s] for s in uses.defines[k])

    for first in range(len(graph.ops)):
        stack = [first]
        while stack:
            k = stack.pop()
            if k in order:
                continue
            order.append(k)
            for s in uses.reads[k]:
                left[s] -= 1
            ready = []
            for a in (a for a, row in enumerate(predecessors(graph)) if k in row):
                waiting[a] -= 1
                if not waiting[a] and a not in order:
                    ready.append(a)
            stack.extend(a for a in reversed(ready) if frees(a))
    assert sink.plan(graph) == tuple(order)


@given(graphs(30), st.integers(0, 99))
def test_many_steps_are_made_as_few_are(graph: Graph, seed: int) -> None:
    order = random_order(graph, seed)
    for some in (order, order[:-1], order[1:]):
        few = simulate.baseline(graph, some)
        with mock.patch.object(simulate, "MANY", 0):
            assert simulate.baseline(graph, some) == few


@given(plans(40), st.integers(0, 1 << 30))
def test_the_core_replays_as_the_reference_does(case: tuple[Graph, Plan], seed: int) -> None:
    graph, plan = case
    line = simulate.replay(graph, plan.steps)
    with mock.patch.object(simulate, "MANY", 0):
        assert simulate.replay(graph, plan.steps) == line
    rng = random.Random(seed)
    for _ in range(4):
        steps = list(plan.steps)
        at = rng.randrange(len(steps))
        steps[at] = other(steps[at], rng)
        refused(graph, tuple(steps))
        del steps[at]
        refused(graph, tuple(steps))


def other(step: Step, rng: random.Random) -> Step:
    name = rng.choice(("op", "storages", "form", "nbytes", "stream", "waits", "saves", "reuses", "kind"))
    values = {
        "op": step.op + rng.choice((-1, 1)), "storages": step.storages[1:] or (0,), "form": "host", "nbytes": 0,
        "stream": 1 - step.stream, "waits": (), "saves": not step.saves, "reuses": step.reuses[1:] or ((0, 1),),
        "kind": rng.choice(("compute", "recompute", "free", "fetch")),
    }  # fmt: skip
    return replace(step, **{name: values[name]})


def refused(graph: Graph, steps: tuple[Step, ...]) -> None:
    """Either both refuse some steps, for the same reason, or both say what they cost."""
    try:
        line = simulate.replay(graph, steps)
    except BadInput as fault:
        with mock.patch.object(simulate, "MANY", 0), pytest.raises(BadInput) as found:
            simulate.replay(graph, steps)
        assert str(found.value) == str(fault)
        return
    with mock.patch.object(simulate, "MANY", 0):
        assert simulate.replay(graph, steps) == line


@given(graphs(10))
def test_what_is_known_of_a_graph_is_not_pickled(graph: Graph) -> None:
    assert graph.uses.reads and simulate.unplanned(graph)
    again = pickle.loads(pickle.dumps(graph))
    assert again == graph and again.digest == graph.digest


def test_records_are_made_as_their_class_makes_them() -> None:
    made = simulate.make_steps(2, kind=["compute", "free"], op=np.array([3, -1]), storages=[(), (1, 2)])
    assert made == (Step("compute", 3), Step("free", -1, (1, 2)))
    with pytest.raises(ValueError, match="1 entries instead of 2"):
        simulate.make_steps(2, kind=["compute"])


def test_columns_refuse_what_is_no_number() -> None:
    with pytest.raises(TypeError):
        _core.integers((Step("compute", 1.5),), "op")  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        _core.rows((Step("free", storages=(1 << 40,)),), "storages")
    with pytest.raises(AttributeError):
        _core.integers((Step("free"),), "colour")
    assert _core.codes((Step("free"), Step("spill")), "kind", ("free",)).tolist() == [0, 255]
