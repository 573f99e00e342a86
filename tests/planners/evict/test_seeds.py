"""What the default search begins with: nobody's policy is faster than a plan for as much memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.chains import chain, wide_layers
from tightship.baselines import checkpoint, min_cut
from tightship.graph import Graph, Op, Storage, Value
from tightship.planners.evict import anneal
from tightship.planners.evict.problem import EvictionProblem, _horizon
from tightship.planners.frontier import others

HUGE = 1 << 60


def layered(layers: int, ops: int) -> EvictionProblem:
    """A chain in numbered modules, whose first op in each is dear and whose second is large."""
    graph: Graph = chain(layers * ops)
    made = []
    for k, op in enumerate(graph.ops):
        place = int(op.name[1:])
        target = "aten.mm.default" if place % ops == 0 else "f"
        made.append(
            replace(op, module=f"net.{place // ops}", target=target, time=9.0 if target != "f" else 1.0)
        )
        assert made[k].name == op.name
    storages = [replace(s, size=s.size * (4 if k % ops == 2 else 1)) for k, s in enumerate(graph.storages)]
    graph = replace(graph.with_ops(tuple(made)), storages=tuple(storages))
    return EvictionProblem(graph, tuple(range(len(graph.ops))))


@pytest.mark.parametrize("layers", [4, 12])
def test_a_plan_is_never_slower_than_any_policy_at_its_peak(layers: int) -> None:
    """With next to no work left for annealing, and without being told what the policies save."""
    problem = layered(layers, 4)
    dear = frozenset(
        s for s, k in enumerate(problem.graph.uses.definer) if k >= 0 and problem.graph.ops[k].time > 1
    )
    for other in others(problem, {"dear": dear, "none": frozenset()}):
        fresh = layered(layers, 4)
        best = anneal.plan(fresh, other.peak, anneal.Options(work=300_000, seconds=60.0))
        once = sum(op.time for op in problem.graph.ops)
        assert best.met and best.extra <= other.time - once + 1e-9, other.name


def test_what_leaves_by_a_policy_is_what_its_steps_recompute() -> None:
    problem = layered(6, 4)
    for o in (checkpoint.Options(), checkpoint.Options(selective=True)):
        bits, steps = checkpoint.dropped(problem, o), checkpoint.plan(problem, 0, o).steps or ()
        gone = {s for step in steps if step.kind == "recompute" for s in step.storages}
        assert bits.any() and set(problem.gaps[bits > 0, 0].tolist()) <= gone
    assert not checkpoint.dropped(problem, checkpoint.Options(depth=2)).any()


def wide(layers: int) -> EvictionProblem:
    graph = wide_layers(layers)
    return EvictionProblem(graph, tuple(range(len(graph.ops))))


def test_between_two_saved_sets_are_some_layers_of_each() -> None:
    """All layers change sides at one price: the hull of saved sets has nothing between none of them and all."""
    problem = wide(12)
    hull = {int((d.evict[problem.gaps[:, 0] % 2 == 1] > 0).sum()) for d in min_cut.family(problem, HUGE)}
    assert hull == {0, 11}  # the twelfth is read at once
    everything = problem.cost(problem.nothing(), HUGE).peak
    met = [d for d in min_cut.between(problem, everything - 5 * 256) if d.met]
    assert len(met) == 6 and {d.extra for d in met} == {5.0}


def test_equal_tensors_that_one_op_reads_together_do_not_make_layers_of_no_length() -> None:
    """How long a restored tensor stays for its next use is counted in layers (`_horizon`)."""
    storages = [Storage("x", 64, "input")]
    ops = []
    for k in range(40):
        storages += [Storage(f"a{k}", 64), Storage(f"b{k}", 64)]
        ops.append(Op(f"f{k}", "f", (2 * k,), (2 * k + 1, 2 * k + 2), time=1.0))
    last = 80
    for k in reversed(range(40)):
        storages.append(Storage(f"g{k}", 64))
        reads = (last, 2 * k + 1, 2 * k + 2)
        ops.append(Op(f"g{k}", "g", reads, (len(storages) - 1,), time=1.0, phase="backward"))
        last = len(storages) - 1
    values = tuple(Value(s.name, k) for k, s in enumerate(storages))
    graph = Graph(tuple(ops), values, tuple(storages), (0,), (last,))
    problem = EvictionProblem(graph, tuple(range(len(ops))))
    assert _horizon(problem.engine, problem.order, graph) == 1


@pytest.mark.parametrize("dear", [True, False])
def test_dear_seeds_are_left_out_where_that_is_asked(monkeypatch, dear: bool) -> None:
    asked = []
    monkeypatch.setattr(anneal, "_dear_seeds", lambda search: asked.append(search) or ())
    problem = EvictionProblem(chain(40), tuple(range(len(chain(40).ops))))
    anneal.plan(problem, 1, anneal.Options(work=20_000, dear=dear))
    assert bool(asked) == dear


@pytest.mark.parametrize("layers", [6, 12])
def test_two_plans_are_joined_where_each_is_the_better_one(layers: int) -> None:
    """One evicts too much in the first layers, the other one in the last ones."""
    problem = layered(layers, 4)
    limit = int(0.6 * problem.kept.peak)
    good = anneal.plan(problem, limit, anneal.Options(work=4_000_000, gap=0.0))
    assert good.met
    middle = problem.begins[len(problem.begins) // 2]
    far = problem.crossing & (good.evict == 0)
    halves = []
    for part in (problem.gaps[:, 1] < middle, problem.gaps[:, 1] >= middle):
        bits = good.evict.copy()
        bits[far & part] = 1
        halves.append(problem.cost(bits, HUGE))
    first, second = (problem.cost(d.evict, limit) for d in halves)
    limit = max(limit, first.peak, second.peak)
    first, second = (problem.cost(d.evict, limit) for d in halves)
    assert first.extra > good.extra < second.extra
    found = min_cut.joined(problem, limit, first, [second.evict], 10_000_000)
    assert found.met and found.extra <= good.extra
    assert 0 < found.work <= 10_000_000 + 4 * len(problem.order)
    assert min_cut.joined(problem, limit, first, [second.evict], 0).extra == first.extra


def test_annealing_gives_one_tensor_of_a_layer_what_another_one_has() -> None:
    """By exchanges alone: what is dear to make again stays instead of what is not."""
    problem = layered(8, 4)
    storages = tuple(replace(s, size=64) for s in problem.graph.storages)
    problem = EvictionProblem(replace(problem.graph, storages=storages), problem.order)
    definer = problem.graph.uses.definer
    dear = [problem.graph.ops[definer[s]].time > 1 for s in problem.gaps[:, 0].tolist()]
    start = problem.cost((problem.crossing & dear).astype("uint8"), HUGE)
    found = {}
    for exchanges in (0.0, 1.0):
        run = problem.engine.anneal(
            problem.groups, *problem.isomorphic_layers, start.peak, start.evict, 0.001, 100_000, 400_000, 10.0,
            exchanges, 0, None,
        )  # fmt: skip
        found[exchanges] = problem.decision(run)
    assert found[1.0].met
    assert found[1.0].extra < 0.5 * start.extra
    evicted = found[1.0].evict[problem.crossing & dear]
    assert int((evicted > 0).sum()) < len(evicted) / 2
