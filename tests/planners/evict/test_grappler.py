"""Grappler's behaviors by number, on small graphs where each can be seen, and on captured training steps."""

# ruff: noqa: N802

from __future__ import annotations

from dataclasses import replace

import pytest

from support.chains import chain
from support.lowering import costs
from support.models import MODELS
from tightship.baselines import grappler
from tightship.baselines import grappler as rewrites
from tightship.baselines.grappler import Options
from tightship.errors import BadInput
from tightship.frontends.torch.capture.step import capture_loss
from tightship.graph import Graph, Op, Storage, Value
from tightship.plan import Plan, Step
from tightship.planners.evict.problem import Decision, EvictionProblem
from tightship.simulate import baseline, replay
from tightship.verify import verify

REAL = ("gpt2", "resnet", "bert", "vit", "cnn")


def build(*rows: tuple[str, str, tuple[str, ...]], size: int = 4096, seconds: float = 0.01) -> Graph:
    """Ops (name, target, what they read) on an input ``x``; each makes one storage of its name. The last is the
    result; ops under ``gradients/`` are targets."""
    names = ["x", *(name for name, _, _ in rows)]
    values = tuple(Value(n, i) for i, n in enumerate(names))
    storages = tuple(Storage(n, size, "input" if n == "x" else "activation") for n in names)
    ops = tuple(
        Op(name, target, tuple(names.index(r) for r in reads), (names.index(name),), time=seconds)
        for name, target, reads in rows
    )
    return Graph(ops, values, storages, (0,), (len(names) - 1,))


def diamond() -> Graph:
    """x -> a (mm) -> b (relu) -> c (mul) -> d (mm), and gradients that read c and b."""
    return build(
        ("a", "aten.mm.default", ("x",)),
        ("b", "aten.relu.default", ("a",)),
        ("c", "aten.mul.Tensor", ("b",)),
        ("d", "aten.mm.default", ("c",)),
        ("gradients/d", "aten.mm.default", ("d", "c")),
        ("gradients/c", "aten.mul.Tensor", ("gradients/d", "b")),
        ("gradients/a", "aten.mm.default", ("gradients/c", "a")),
    )


def problem(graph: Graph) -> EvictionProblem:
    return EvictionProblem(graph, tuple(range(len(graph.ops))))


def named(graph: Graph, ops: frozenset[int]) -> set[str]:
    return {graph.ops[k].name for k in ops}


def steps_of(f: EvictionProblem, d: Decision) -> tuple[Step, ...]:
    return d.steps or f.steps(d.evict)


def checked(f: EvictionProblem, d: Decision) -> tuple[Step, ...]:
    steps = steps_of(f, d)
    line = replay(f.graph, steps)
    assert line.peak == d.peak
    assert verify(f.graph, Plan(f.graph.digest, steps, **costs(f.graph, steps))) == []
    return steps


def recomputed(graph: Graph, steps: tuple[Step, ...]) -> list[str]:
    return [graph.ops[s.op].name for s in steps if s.kind == "recompute"]


def test_G01_targets_stand_under_a_scope_also_when_it_is_nested() -> None:
    graph = diamond()
    assert named(graph, rewrites.targets(graph, "gradients/")) == {
        "gradients/a",
        "gradients/c",
        "gradients/d",
    }
    ops = tuple(replace(o, name=f"tower/{o.name}") for o in graph.ops)
    assert len(rewrites.targets(graph.with_ops(ops), "gradients/")) == 3
    assert rewrites.targets(graph, "other/") == frozenset()
    backward = chain(3)
    assert {backward.ops[k].phase for k in rewrites.targets(backward, "gradients/")} == {"backward"}


def test_G02_candidates_are_cheap_or_hinted_and_manual_takes_hints_alone() -> None:
    graph = diamond()
    f, goals = problem(graph), rewrites.targets(graph, "gradients/")
    assert named(graph, rewrites.clones(f, goals)) == {"b", "c"}
    assert named(graph, rewrites.clones(f, goals, {0})) == {"a", "b", "c"}
    assert named(graph, rewrites.clones(f, goals, {1}, heuristic=False)) == {"b"}
    assert rewrites.clones(f, goals, heuristic=False) == frozenset()
    random = graph.with_ops(tuple(replace(o, random=o.name == "b") for o in graph.ops))
    assert named(random, rewrites.clones(problem(random), goals)) == {"c"}


def test_G03_only_the_part_that_feeds_a_target_is_cloned_and_reads_clones_inside() -> None:
    graph = build(
        ("a", "aten.mm.default", ("x",)),
        ("b", "aten.relu.default", ("a",)),
        ("aside", "aten.relu.default", ("b",)),  # cheap, joined to the set, but feeds no target
        ("c", "aten.mul.Tensor", ("b",)),
        ("d", "aten.mm.default", ("c", "aside")),
        ("gradients/d", "aten.mm.default", ("d", "c")),
        ("late", "aten.relu.default", ("gradients/d",)),  # reads a target: no candidate
        ("gradients/e", "aten.mm.default", ("late", "d")),
    )
    f, goals = problem(graph), rewrites.targets(graph, "gradients/")
    assert named(graph, rewrites.clones(f, goals)) == {"b", "c"}
    steps = checked(f, grappler.plan(f, 0, Options(level="recompute")))
    assert recomputed(graph, steps) == ["b", "c"]


def test_G04_only_targets_read_clones() -> None:
    graph = diamond()
    f = problem(graph)
    steps = checked(f, grappler.plan(f, 0, Options(level="recompute")))
    first = next(i for i, s in enumerate(steps) if s.kind == "recompute")
    before = {graph.ops[s.op].name for s in steps[:first] if s.kind == "compute"}
    assert before == {"a", "b", "c", "d"}  # what is no target runs on the originals
    freed = {graph.storages[s].name for step in steps[:first] if step.kind == "free" for s in step.storages}
    assert {"b", "c"} <= freed


def test_G05_clones_wait_for_the_other_inputs_of_the_targets_they_serve() -> None:
    graph = diamond()
    f = problem(graph)
    order = [
        graph.ops[s.op].name for s in checked(f, grappler.plan(f, 0, Options(level="recompute"))) if s.op >= 0
    ]
    assert order.index("b", 2) > order.index("d") and order.count("b") == order.count("c") == 2
    assert order[-5:] == ["b", "c", "gradients/d", "gradients/c", "gradients/a"]


def test_G08_swaps_only_when_the_peak_is_above_the_memory_and_until_the_savings_are_met() -> None:
    graph = long_chain()
    f = problem(graph)
    base = replay(graph, baseline(graph)).peak
    assert grappler.plan(f, base, Options(level="swap")).steps is None
    counts = []
    for spare in (1, 3, 6):
        d = grappler.plan(f, base - spare * 4096, Options(level="swap"))
        counts.append(sum(len(s.storages) for s in checked(f, d) if s.kind == "offload"))
        assert d.met and all(s.kind != "recompute" for s in steps_of(f, d))
    assert 0 < counts[0] < counts[1] < counts[2]


def long_chain(size: int = 4096, seconds: float = 0.01) -> Graph:
    graph = chain(16, size=size)
    return graph.with_ops(tuple(replace(o, time=seconds) for o in graph.ops))


def test_G09_small_short_lived_and_persistent_values_stay() -> None:
    for graph in (long_chain(size=1024), long_chain(seconds=1e-5)):
        assert rewrites.ranked(problem(graph), 15, set()) == []
    graph = long_chain()
    found = rewrites.ranked(problem(graph), 15, set())
    assert found and all(a.storage not in graph.static | graph.kept and a.last < 15 < a.next for a in found)
    assert len(rewrites.ranked(problem(graph), 15, {found[0].storage})) == len(found) - 1


def test_G10_long_made_before_and_long_needed_after_the_peak_ranks_first() -> None:
    found = rewrites.ranked(problem(long_chain()), 15, set())
    stays = [a.next - a.last for a in found]
    assert stays == sorted(stays, reverse=True) and stays[0] > stays[-1]


def test_G11_an_input_named_by_hand_is_swapped() -> None:
    graph = long_chain()
    f = problem(graph)
    d = grappler.plan(f, 0, Options(level="manual", swap_hints="b1:1, b3:1"))
    moved = [graph.storages[s].name for x in checked(f, d) if x.kind == "offload" for s in x.storages]
    assert sorted(moved) == ["f1", "f3"]


def test_G12_copies_go_out_at_once_and_come_back_in_time_but_late() -> None:
    graph = long_chain()
    f = problem(graph)
    a = rewrites.ranked(f, 15, set())[0]
    timed = rewrites.triggered(f, a)
    assert timed is not None and timed.freed == a.last and a.last < timed.restored <= a.next
    assert a.next - timed.restored <= 2
    slow = replace(graph, machine=replace(graph.machine, to_device=4096 / 0.05)) if _slow(graph) else None
    if slow is not None:
        early = rewrites.triggered(problem(slow), a)
        assert early is not None and early.restored < timed.restored


def _slow(graph: Graph) -> bool:
    return hasattr(graph.machine, "to_device")


def test_G13_without_a_trigger_a_value_is_skipped_and_wrong_hints_are_errors() -> None:
    graph = long_chain()
    f = problem(graph)
    a = rewrites.ranked(f, 15, set())[-1]
    assert rewrites.triggered(f, replace(a, next=a.last + 1)) is None
    for hints in ("b1", "nobody:0", "b1:7", "b1:1, b1:1", "f0:0"):
        with pytest.raises(BadInput):
            grappler.plan(f, 0, Options(level="manual", swap_hints=hints))
    with pytest.raises(BadInput, match="level"):
        grappler.plan(f, 0, Options(level="some"))


def test_G14_updates_whose_results_stay_on_their_device_are_marked() -> None:
    graph = diamond()
    update = Op("w", "update", (0, 7), (), mutates=(0,), phase="update")
    graph = replace(graph, ops=(*graph.ops, update, Op("send", "send", (0,), (), effect=True)))
    assert rewrites.relaxed(graph) == (7,)
    away = graph.with_ops((*graph.ops[:-1], replace(graph.ops[-1], device="cuda:0")))
    assert rewrites.relaxed(away) == ()
    beside = graph.with_ops((replace(graph.ops[0], device="cuda:0"), *graph.ops[1:]))
    assert rewrites.relaxed(beside) == (7,)


def test_levels() -> None:
    f = problem(diamond())
    assert grappler.plan(f, 0, Options(level="none")).runs == 0
    assert grappler.plan(f, 0, Options(level="manual", recompute_hints="b")).runs == 1
    best = grappler.plan(f, 0, Options(level="all"))
    for level in ("recompute", "swap"):
        assert not grappler.plan(f, 0, Options(level=level)).beats(best)


@pytest.mark.parametrize("name", REAL)
def test_G03_G05_G12_on_captured_training_steps(name: str) -> None:
    model, _, batch = MODELS[name]()
    sample = batch(0)
    graph = capture_loss(model, sample[0] if isinstance(sample, tuple) else sample).graph
    graph = graph.with_ops(tuple(replace(op, time=1e-3) for op in graph.ops))
    f = problem(graph)
    goals = rewrites.targets(graph, "gradients/")
    again = rewrites.clones(f, goals)
    assert again and all(graph.ops[k].phase == "forward" for k in again)
    steps = checked(f, grappler.plan(f, 0, Options(level="recompute")))
    ran = [s.op for s in steps if s.kind == "recompute"]
    assert len(ran) == len(set(ran)) and set(ran) <= again
    checked(f, grappler.plan(f, 0, Options(level="swap")))
