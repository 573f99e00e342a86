"""Gathers that begin ahead: faster by what was computed meanwhile, within the budget, and waited for."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from support.strategies import random_graph
from tightship import simulate
from tightship.graph import Graph, Op, Storage, Value
from tightship.plan import Plan, Step
from tightship.planners import search
from tightship.planners.ahead import COPIES, STREAM, begun_ahead
from tightship.planners.default import Options, plan
from tightship.planners.layout import lay_out
from tightship.planners.run import decision_plan
from tightship.simulate import baseline, replay
from tightship.verify import verify

LAYERS, WHOLE, PART = 6, 4096, 1024
SENDS, COMPUTES = 2.0, 3.0
GATHER = "_c10d_functional.all_gather_into_tensor.default"
FETCH, STORE = "tightship.fetch", "tightship.store"
QUICK = Options(work=50_000, seconds=20.0, hand_out=False)


def layers(target: str = GATHER, writes: int = -1) -> Graph:
    """Each layer multiplies by a parameter of which ranks have parts; the part of layer ``writes`` is written to
    before that layer, when all before it has run."""
    storages, ops = [Storage("x", WHOLE, kind="input")], []
    for k in range(LAYERS):
        storages += [
            Storage(f"part{k}", PART, kind="parameter"),
            Storage(f"whole{k}", WHOLE),
            Storage(f"y{k}", WHOLE),
        ]
        part, whole, out = 3 * k + 1, 3 * k + 2, 3 * k + 3
        if k == writes:
            ops.append(Op("write", "add_", (part, 3 * k), (), mutates=(part,), time=1.0))
        ops.append(Op(f"gather{k}", target, (part,), (whole,), time=SENDS))
        ops.append(Op(f"mm{k}", "mm", (3 * k, whole), (out,), time=COMPUTES))
    values = tuple(Value(s.name, i) for i, s in enumerate(storages))
    inputs = tuple(i for i, s in enumerate(storages) if s.kind != "activation")
    return Graph(tuple(ops), values, tuple(storages), inputs, (len(storages) - 1,), "layers")


def planned(graph: Graph, extra: int) -> Plan:
    """With so many bytes beyond the least that a step at a time needs."""
    made = plan(graph, graph.static_bytes + 3 * WHOLE + extra, QUICK)
    assert verify(graph, made) == []
    assert made.met
    return made


def test_gathers_begin_while_the_layer_before_computes_where_bytes_allow_it() -> None:
    graph = layers()
    serial = LAYERS * (SENDS + COMPUTES)
    assert planned(graph, 0).time == pytest.approx(serial - SENDS)  # the input leaves room for a second one
    made = planned(graph, WHOLE)
    ahead = [s for s in made.steps if s.stream == STREAM]
    assert ahead
    assert all(graph.ops[s.op].target == GATHER for s in ahead)
    assert made.time == pytest.approx(SENDS + LAYERS * COMPUTES)  # all but the first are hidden
    assert made.time == pytest.approx(replay(graph, made.steps).time)


def there_and_back(seed: int, count: int = 24) -> Graph:
    """Layers of a model in parts: what is gathered is read again on the way back."""
    rng, ops = random.Random(seed), []
    storages = [Storage("y", WHOLE, kind="input")]
    for k in range(count):
        size = rng.choice((WHOLE, 2 * WHOLE))
        storages += [
            Storage(f"part{k}", PART, kind="parameter"),
            Storage(f"whole{k}", size),
            Storage(f"y{k}", WHOLE),
        ]
        ops.append(Op(f"gather{k}", GATHER, (3 * k + 1,), (3 * k + 2,), time=rng.uniform(1, 4)))
        ops.append(Op(f"mm{k}", "mm", (3 * k, 3 * k + 2), (3 * k + 3,), time=rng.uniform(1, 4)))
    for k in reversed(range(count)):
        made = len(storages)
        storages.append(Storage(f"gradient{k}", WHOLE))
        ops.append(Op(f"back{k}", "mm", (made - 1, 3 * k, 3 * k + 2), (made,), time=rng.uniform(1, 4)))
    values = tuple(Value(s.name, i) for i, s in enumerate(storages))
    inputs = tuple(i for i, s in enumerate(storages) if s.kind != "activation")
    return Graph(tuple(ops), values, tuple(storages), inputs, (len(storages) - 1,), "there and back")


@pytest.mark.parametrize("seed", [0, 2])
def test_a_plan_follows_from_work_and_not_from_how_fast_a_machine_is(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for slower in (1.0, 1e6):  # from where the first gathers are begun ahead on
        graph, clock = there_and_back(seed), Clock()
        monkeypatch.setattr(time, "perf_counter", clock)
        monkeypatch.setattr(search, "begun_ahead", clock.runs(slower, begun_ahead))
        extra = int((replay(graph, baseline(graph)).peak - graph.static_bytes) * 0.4)
        row = plan(graph, graph.static_bytes + extra, replace(QUICK, work=20_000, seconds=1e9, place=False))
        made.append((row.steps, row.residences))
    assert any(step.stream == STREAM for step in made[0][0])
    assert made[0] == made[1]


class Clock:
    """The seconds of a machine that others come to use, too."""

    def __init__(self, real: Callable[[], float] = time.perf_counter) -> None:
        self.real, self.speed, self.before, self.since = real, 1.0, 0.0, real()

    def __call__(self) -> float:
        return self.before + (self.real() - self.since) * self.speed

    def runs(self, speed: float, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, from which on seconds go by faster."""

        def called(*given: Any) -> Any:
            self.before, self.since, self.speed = self(), self.real(), speed
            return call(*given)

        return called


def made_parts() -> Graph:
    """What is gathered is made from the layer before, as sequence parallelism has it, and ends behind the gather."""
    storages, ops = [Storage("y", WHOLE, kind="input"), Storage("z", WHOLE, kind="input")], []
    for k in range(LAYERS):
        storages += [
            Storage(f"{n}{k}", size)
            for n, size in (("part", PART), ("whole", WHOLE), ("y", WHOLE), ("z", WHOLE))
        ]
        part, whole, y, z = range(4 * k + 2, 4 * k + 6)
        ops += [
            Op(f"part{k}", "slice", (part - 2,), (part,), time=1.0),
            Op(f"gather{k}", GATHER, (part,), (whole,), time=SENDS),
            Op(f"beside{k}", "mul", (z - 4,), (z,), time=COMPUTES),
            Op(f"mm{k}", "mm", (part - 2, whole), (y,), time=COMPUTES),
        ]
    values = tuple(Value(s.name, i) for i, s in enumerate(storages))
    last = len(storages) - 1
    return Graph(tuple(ops), values, tuple(storages), (0, 1), (last - 1, last), "made parts")


@pytest.mark.parametrize("extra", [1, 2, 20])
def test_what_a_gather_reads_ends_when_the_gather_has_ended(extra: int) -> None:
    graph = made_parts()
    order = [4 * k + n for k in range(LAYERS) for n in (0, 2, 1, 3)]
    line = replay(graph, baseline(graph, order))
    steps = begun_ahead(graph, line, line.peak + extra * WHOLE)
    assert steps is not None
    assert sum(s.stream == STREAM for s in steps) == LAYERS
    found = replay(graph, steps)
    assert found.time < line.time
    assert verify(graph, decision_plan(graph, steps, found)) == []


def sending(seed: int) -> Graph:
    """A random graph, half of whose ops gather or fetch, as far as these are like them; some of what it makes is
    stored at the end."""
    rng = random.Random(seed)
    graph = random_graph(
        seed, rng.randint(4, 40), updates=rng.choice((0.0, 0.2)), static_writes=rng.choice((0.0, 1.0))
    )
    beside = [rng.random() < 0.5 and not (op.mutates or op.random or op.effect) for op in graph.ops]
    ops = [
        replace(op, target=rng.choice((GATHER, FETCH)), workspace=0) if b else op
        for b, op in zip(beside, graph.ops, strict=True)
    ]
    values, storages, inputs = [*graph.values], [*graph.storages], [*graph.inputs]
    for made in {op.outputs[0] for op in ops if op.outputs and rng.random() < 0.3}:
        away = len(values)
        inputs.append(away)
        values.append(Value(f"away{made}", len(storages)))
        storages.append(Storage(f"away{made}", 0, kind="parameter"))
        written = (len(storages) - 1,)
        ops.append(Op(f"store{made}", STORE, (made, away), (), mutates=written, time=rng.random()))
    return replace(
        graph, ops=tuple(ops), values=tuple(values), storages=tuple(storages), inputs=tuple(inputs)
    )


def test_random_graphs_are_right_whatever_begins_ahead() -> None:
    ahead = {STREAM: 0, COPIES: 0}
    stored = 0
    for seed in range(60):
        graph = sending(seed)
        line = replay(graph, baseline(graph))
        for share in (0.05, 5.0):
            limit = int(line.peak * (1 + share))
            steps = begun_ahead(graph, line, limit)
            if steps is None:
                continue
            found, layout = replay(graph, steps), lay_out(graph, steps, hand_out=False, seconds=1.0, work=500)
            made = decision_plan(graph, steps, found)
            places = {"residences": layout.residences, "arena": layout.arena, "handed": layout.handed}
            made = replace(made, **places)
            assert verify(graph, made) == [], seed
            assert found.peak <= limit
            for step in steps:
                if step.stream:
                    ahead[step.stream] += 1
                    stored += graph.ops[step.op].target == STORE
    assert min(*ahead.values(), stored) > 50


def test_the_core_replays_gathers_on_their_stream_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = layers()
    made = planned(graph, WHOLE)
    slow = replay(graph, made.steps)
    monkeypatch.setattr(simulate, "MANY", 1)
    fast = replay(graph, made.steps)
    assert (slow.time, slow.peak) == (fast.time, fast.peak)
    assert [*slow.begins] == [*fast.begins]


def test_only_gathers_of_one_tensor_begin_ahead() -> None:
    for target in (
        "_c10d_functional.reduce_scatter_tensor.default",
        "_c10d_functional.all_gather_into_tensor_coalesced.default",
        "mul",
    ):
        assert all(not s.stream for s in planned(layers(target), 4 * WHOLE).steps)


def test_a_gather_does_not_begin_before_its_part_is_written() -> None:
    graph = layers(writes=3)
    steps = planned(graph, 4 * WHOLE).steps
    at = {graph.ops[s.op].name: i for i, s in enumerate(steps) if s.op >= 0 and s.kind == "compute"}
    assert at["write"] < at["gather3"]
    assert at["gather2"] < at["mm1"]


def changed(made: Plan, steps: list[Step]) -> Plan:
    return replace(made, steps=tuple(steps))


def test_the_verifier_wants_waits_and_sees_what_is_written_in_flight() -> None:
    graph = layers(writes=3)
    made = planned(graph, 4 * WHOLE)
    for i, step in enumerate(made.steps):
        if step.waits and not step.stream:
            steps = [*made.steps]
            steps[i] = replace(step, waits=())
            assert "lane" in {v.code for v in verify(graph, changed(made, steps))}
    written = next(i for i, s in enumerate(made.steps) if s.op >= 0 and graph.ops[s.op].name == "write")
    gather = next(i for i, s in enumerate(made.steps) if s.op >= 0 and graph.ops[s.op].name == "gather3")
    steps = [*made.steps]
    steps[written], steps[gather] = replace(steps[gather], waits=()), steps[written]
    assert {"hazard", "lane", "stale"} & {v.code for v in verify(graph, changed(made, steps))}


def test_the_verifier_lets_nothing_else_run_on_other_streams() -> None:
    graph = layers()
    made = planned(graph, WHOLE)
    i, j = next(
        (a, b)
        for a, b in pairwise(range(len(made.steps)))
        if made.steps[a].kind == "compute" and graph.ops[made.steps[a].op].target == "mm"
    )
    steps = [*made.steps]
    steps[i] = replace(steps[i], stream=STREAM)
    steps[j] = replace(steps[j], waits=tuple(sorted({*steps[j].waits, i})))
    found = [v for v in verify(graph, changed(made, steps)) if v.code == "lane"]
    assert any("only gathers and copies may" in v.message for v in found)
