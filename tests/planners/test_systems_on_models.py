"""Behaviors of the named systems on training steps of real models, where their own tests have made-up graphs."""

# ruff: noqa: N802

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from support.models import MODELS
from support.zoo import captured
from tightship import api
from tightship.baselines import grappler, memonger
from tightship.baselines import grappler as rewrites
from tightship.baselines.aitemplate import records
from tightship.baselines.memonger import Options as Sharing
from tightship.baselines.memonger import recycled
from tightship.errors import BadInput
from tightship.frontends.torch.capture.step import capture_loss
from tightship.graph import Graph, Op
from tightship.planners.evict import compress
from tightship.planners.evict.problem import EvictionProblem
from tightship.simulate import baseline, replay


@cache
def step(name: str) -> Graph:
    """The forward and backward pass of a model whose ops take a millisecond each."""
    model, _, batch = MODELS[name]()
    sample = batch(0)
    graph = capture_loss(model, sample[0] if isinstance(sample, tuple) else sample).graph
    return graph.with_ops(tuple(replace(op, time=1e-3) for op in graph.ops))


def problem(graph: Graph) -> EvictionProblem:
    return EvictionProblem(graph, tuple(range(len(graph.ops))))


def peak(graph: Graph) -> int:
    return replay(graph, baseline(graph)).peak


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_G01_G02_G04_candidates_of_a_model_are_cheap_or_hinted(name: str) -> None:
    graph = step(name)
    f, goals = problem(graph), rewrites.targets(graph, "gradients/")
    cheap = rewrites.clones(f, goals)
    assert cheap and {rewrites.kind(graph.ops[k].target) for k in cheap} <= rewrites.CHEAP
    dear = [k for k, op in enumerate(graph.ops) if "mm" in op.target or "convolution" in op.target]
    assert dear and cheap.isdisjoint(dear)
    hinted = [k for k in dear if rewrites.clones(f, goals, {k}, heuristic=False) == {k}]
    assert hinted and all(k in rewrites.clones(f, goals, {k}) for k in hinted)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_G08_G09_G10_swaps_of_a_model_are_ranked_and_meet_the_savings(name: str) -> None:
    graph = step(name)
    f, before = problem(graph), peak(graph)
    limit = graph.static_bytes + (before - graph.static_bytes) * 9 // 10
    made = grappler.plan(f, limit, grappler.Options(level="swap"))
    moved = [s for x in made.steps or () if x.kind == "offload" for s in x.storages]
    assert made.met and moved and made.peak < before
    at = replay(graph, baseline(graph)).peak_step
    position = sum(s.kind == "compute" for s in baseline(graph)[: at + 1]) - 1
    found = rewrites.ranked(f, position, set())
    assert all(graph.storages[a.storage].size > 1024 for a in found)
    assert all(a.storage not in graph.static | graph.kept and a.last < position < a.next for a in found)
    uses, order = graph.uses, {s: i for i, s in enumerate(a.storage for a in found)}

    def rank(s: int) -> float:  # in milliseconds, as every op takes one
        later = [k for k in uses.readers[s] if k > position]
        first = min((*uses.writers[s], *uses.readers[s]))
        return ((later[0] - position) / len(later)) ** 2 + (first - position) ** 2

    ranks = [rank(s) for s in sorted(order, key=order.__getitem__)]
    assert ranks == pytest.approx(sorted(ranks, reverse=True))


def test_G11_G13_an_input_of_a_models_op_is_swapped_by_name_and_once() -> None:
    graph = step("gpt2")
    f = problem(graph)
    found = rewrites.ranked(f, len(graph.ops) // 2, set())
    a = next(a for a in found if len(graph.uses.writers[a.storage]) == 1)
    consumer = graph.ops[f.order[a.next]]
    which = next(i for i, v in enumerate(consumer.inputs) if graph.values[v].storage == a.storage)
    hint = f"{consumer.name}:{which}"
    made = grappler.plan(f, 0, grappler.Options(level="manual", swap_hints=hint))
    assert [s for x in made.steps or () if x.kind == "offload" for s in x.storages] == [a.storage]
    with pytest.raises(BadInput, match="swapped once"):
        grappler.plan(f, 0, grappler.Options(level="manual", swap_hints=f"{hint},{hint}"))
    weight = next(v for v in consumer.inputs + graph.inputs if graph.values[v].storage in graph.static)
    reader = next(op for op in graph.ops if weight in op.inputs)
    with pytest.raises(BadInput, match="a reference, to TensorFlow"):
        hint = f"{reader.name}:{reader.inputs.index(weight)}"
        grappler.plan(f, 0, grappler.Options(level="manual", swap_hints=hint))


def test_G14_updates_of_a_model_are_marked_where_their_results_stay_on_the_device() -> None:
    graph = captured("gpt2")
    updates = {k for k, op in enumerate(graph.ops) if op.phase == "update"}
    assert updates and updates <= set(rewrites.relaxed(graph))
    written = next(k for k in updates if graph.uses.mutates[k])
    weight = next(v for v in graph.inputs if graph.values[v].storage in graph.uses.mutates[written])
    ops = (*graph.ops, Op("away", "send", (weight,), device="cuda:0", effect=True))
    assert written not in rewrites.relaxed(graph.with_ops(ops))
    assert set(rewrites.relaxed(graph.with_ops(ops))) >= updates - {written}


@pytest.mark.parametrize("name", ["gpt2", "resnet", "vit"])
def test_G15_one_cost_model_is_no_slower_than_rules_that_know_nothing_of_each_other(name: str) -> None:
    graph = step(name)
    theirs = api.plan_named(graph, "grappler", level="all").plan
    budget = max(theirs.peak, graph.static_bytes + theirs.arena + theirs.handed)
    ours = api.plan_graph(
        graph, budget, allow="recompute,compress,offload", work=3_000_000, seconds=60.0
    ).plan
    assert ours.met and max(ours.peak, ours.static + ours.arena + ours.handed) <= budget
    assert ours.time <= theirs.time * (1 + 1e-9)


@pytest.mark.parametrize("name", ["gpt2", "cnn"])
def test_R12_what_is_compressed_is_compact_from_after_a_use_to_before_the_next(name: str) -> None:
    graph = step(name)
    f = EvictionProblem(graph, tuple(range(len(graph.ops))), ("compress",), lossy=True)
    made = compress.plan(f, 0, compress.Options(lossy=True))
    steps = made.steps or f.steps(made.evict)
    packed = [(i, s) for i, s in enumerate(steps) if s.kind == "compress"]
    assert packed and made.peak < peak(graph)
    for i, s in packed:
        (storage,) = s.storages
        assert storage not in graph.kept | graph.static
        assert (
            0 < s.nbytes == f.packings[storage].nbytes < graph.storages[storage].size
        )  # known once, by storage
        back = next(
            j for j in range(i, len(steps)) if steps[j].kind == "decompress" and storage in steps[j].storages
        )
        readers = {k for k in graph.uses.readers[storage]}
        assert not readers & {x.op for x in steps[i:back] if x.kind == "compute"}


def test_R13_three_modes_recompute_compress_or_the_cheaper_of_both() -> None:
    graph = step("gpt2")
    found = {}
    for allow in ("recompute", "compress", "recompute,compress"):
        made = api.plan_graph(graph, "80%", allow=allow, lossy=True, work=2_000_000, seconds=60.0).plan
        found[allow] = made
        assert made.met
        assert "compress" in allow or not made.count("compress")
        assert "recompute" in allow or not made.count("recompute")
    assert found["recompute,compress"].time <= min(m.time for m in found.values()) * 1.02


@pytest.mark.parametrize("name", ["gpt2", "lstm"])
def test_A02_records_of_a_model_span_all_uses_of_all_views(name: str) -> None:
    graph = captured(name)
    uses = graph.uses
    viewed = 0
    for r in records(graph):
        touched = [*uses.writers[r.storage], *uses.readers[r.storage]]
        last = len(graph.ops) - 1 if r.storage in graph.kept else max(touched)
        assert (r.first, r.last) == (min(touched), last)
        viewed += len(r.views) > 1
    assert viewed > 0
    assert not {r.storage for r in records(graph)} & graph.static


@pytest.mark.parametrize("name", ["gpt2", "resnet", "lstm"])
def test_M05_ops_of_a_model_are_visited_once_and_after_what_they_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, order = captured(name), []
    visit = memonger._Walk.visit

    def noted(walk: memonger._Walk, k: int) -> None:
        order.append(k)
        visit(walk, k)

    monkeypatch.setattr(memonger._Walk, "visit", noted)
    recycled(graph, Sharing(any_order=True))
    place = {k: i for i, k in enumerate(order)}
    assert len(place) == len(order) == len(graph.ops)
    for k in order:
        made = [graph.uses.definer[s] for s in graph.uses.reads[k] if graph.uses.definer[s] not in (-1, k)]
        assert all(place[d] < place[k] for d in made)
    assert order != sorted(order)  # depth first, not in the graph's order
