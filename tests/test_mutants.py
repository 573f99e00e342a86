"""Valid plans, each broken in one way: the verifier reports every mutant by the rule it breaks, and never raises."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import mutation
from support.lowering import costs, random_plan
from support.strategies import graphs, plans, random_graph
from tightship.graph import CUDA_ALIGNMENT, Graph, Op, Storage, Value
from tightship.hlo.opcodes import OPCODES
from tightship.plan import Plan, Residence, Step
from tightship.planners.layout import lay_out
from tightship.simulate import baseline
from tightship.verify import verify
from tightship.verify.codecs import Codecs
from tightship.verify.facts import facts_of
from tightship.verify.rules import PLAN_RULES


def found(graph: Graph, plan: Plan) -> set[str]:
    return {v.code for v in verify(graph, plan)}


def laid_out(graph: Graph) -> Plan:
    steps = baseline(graph)
    made = lay_out(graph, steps, hand_out=False)
    return Plan(graph.digest, steps, made.residences, arena=made.arena, host=made.host, **costs(graph, steps))


# ---- what a plan says of itself

CLAIMS: dict[str, tuple[str, Callable[[Plan], dict[str, Any]]]] = {
    "less time": ("time-mismatch", lambda p: {"time": p.time * 0.999}),
    "more time": ("time-mismatch", lambda p: {"time": p.time * 1.001 + 1e-6}),
    "time before": ("time-mismatch", lambda p: {"time_before": p.time_before * 2 + 1.0}),
    "peak": ("peak-mismatch", lambda p: {"peak": p.peak - 1}),
    "peak before": ("peak-mismatch", lambda p: {"peak_before": p.peak_before + 64}),
    "static": ("peak-mismatch", lambda p: {"static": p.static + 64}),
    "handed": ("peak-mismatch", lambda p: {"handed": p.handed + 64}),
    "bytes of nothing": ("peak-mismatch", lambda p: {"residences": (), "arena": 64, "handed": 0, "host": 0}),
    "moved": ("count-mismatch", lambda p: {"moved": -1}),
    "moved too many": ("count-mismatch", lambda p: {"moved": len(p.steps) + 1}),
    "bound": ("bound", lambda p: {"lower_bound": p.peak + 1}),
    "time bound": ("bound", lambda p: {"time_bound": p.time * 1.01 + 1e-3}),
    "time bound behind a false time": (
        "bound", lambda p: {"time": p.time * 9 + 1.0, "time_bound": p.time * 2 + 1e-3},
    ),
    "budget": ("over-budget", lambda p: {"budget": p.peak - 1}),
    "another graph": ("unknown", lambda p: {"digest": "0" * 64}),
}  # fmt: skip


@pytest.mark.parametrize("what", CLAIMS)
@given(case=plans(25))
def test_what_a_plan_says_of_itself_is_true(what: str, case: tuple[Graph, Plan]) -> None:
    graph, plan = case
    assert found(graph, plan) == set()
    code, change = CLAIMS[what]
    if what == "less time" and not plan.time:
        return
    assert code in found(graph, replace(plan, **change(plan)))


@given(plans(25))
def test_bytes_on_the_host_are_counted_without_their_word(case: tuple[Graph, Plan]) -> None:
    graph, plan = case
    if plan.count("offload") and plan.host:
        bare = replace(plan, residences=(), arena=0, handed=0, host=0, budget=None)
        assert found(graph, replace(bare, host_budget=0)) == {"over-budget"}


# ---- steps


def without(plan: Plan, at: int) -> Plan:
    """The plan without one of its steps, and without places."""

    def moved(w: int) -> int:
        return w - (w > at)

    steps = [
        replace(s, waits=tuple(moved(w) for w in s.waits if w != at))
        for i, s in enumerate(plan.steps)
        if i != at
    ]
    return replace(plan, steps=tuple(steps), residences=(), arena=0, handed=0, host=0, budget=None)


_GONE = {"not-resident", "foreign-free", "lost-output"}
LOST = {
    "compute": {"missing-op"},
    "free": {"leak", "already-resident"},
    "fetch": _GONE,
    "decompress": _GONE,
    "offload": {"not-resident"},
    "compress": {"not-resident"},
    "recompute": {*_GONE, "use-before-definition"},
}


@given(plans(25), st.data())
def test_no_step_can_be_left_out(case: tuple[Graph, Plan], data: st.DataObject) -> None:
    graph, plan = case
    at = data.draw(st.integers(0, len(plan.steps) - 1))
    codes = found(graph, without(plan, at))
    step = plan.steps[at]
    if step.kind == "recompute" and not step.storages and not graph.uses.mutates[step.op]:
        return  # it brings nothing back
    assert codes & LOST[step.kind] or "stale" in codes, (step, codes)


@given(graphs(25, view=0.4), st.data())
def test_no_view_is_left_out_or_comes_late(graph: Graph, data: st.DataObject) -> None:
    uses = graph.uses
    views = [k for k, op in enumerate(graph.ops) if op.outputs and not (uses.defines[k] or uses.mutates[k])]
    read = {uses.maker[v]: k for k in reversed(range(len(graph.ops))) for v in graph.ops[k].inputs}
    views = [k for k in views if k in read]
    if not views:
        return
    view = data.draw(st.sampled_from(views))
    order = [k for k in range(len(graph.ops)) if k != view]
    late = [*order[: read[view]], view, *order[read[view] :]]
    bare = Plan(graph.digest, baseline(graph, late), static=graph.static_bytes)
    assert "use-before-definition" in found(graph, bare)
    gone = replace(bare, steps=baseline(graph, order))
    assert {"use-before-definition", "missing-op"} <= found(graph, gone)


@pytest.mark.parametrize(
    "opcode",
    sorted({*(n for n, row in OPCODES.items() if row.effect), "_c10d_functional.all_reduce.default", "psum"}),
)
def test_no_effect_runs_again_whatever_the_graph_says_of_it(opcode: str) -> None:
    storages = tuple(Storage(n, 64) for n in "xyzw")
    values = tuple(Value(s.name, k) for k, s in enumerate(storages))

    def graph(target: str) -> Graph:
        ops = (Op("a", target, (0,), (1,)), Op("b", "b", (1,), (2,)), Op("c", "c", (1, 2), (3,)))
        return Graph(ops, values, storages, (0,), (3,))

    one, again, free = (
        Step("compute", op=0),
        Step("recompute", op=0, storages=(1,)),
        Step("free", storages=(1,)),
    )
    steps = (one, Step("compute", op=1), free, again, Step("compute", op=2), Step("free", storages=(1, 2)))
    for target, codes in (("negate", set()), (opcode, {"impure-recompute"})):
        made = graph(target)
        assert found(made, Plan(made.digest, steps, **costs(made, steps))) == codes


# ---- places


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_place_is_aligned_as_the_device_asks_for(seed: int, device: str) -> None:
    graph = random_graph(seed, 20, calls=0.0, requests=0.0)
    graph = graph.with_ops(tuple(replace(op, device=device) for op in graph.ops))
    plan = laid_out(graph)
    assert found(graph, plan) == set()
    step = graph.alignment // 2
    assert graph.alignment == (CUDA_ALIGNMENT if device != "cpu" else 64)
    for k, r in enumerate(plan.residences):
        if r.size and r.pool == "device":
            rows = (*plan.residences[:k], replace(r, offset=r.offset + step), *plan.residences[k + 1 :])
            assert "misaligned" in found(graph, replace(plan, residences=rows, arena=plan.arena + step))
    shifted = tuple(replace(r, offset=r.offset + 64) if r.size else r for r in plan.residences)
    codes = found(graph, replace(plan, residences=shifted, arena=plan.arena + 64))
    assert codes == ({"misaligned"} if device != "cpu" else set())


# ---- nothing makes it raise


def test_a_residence_that_is_never_given_back_meets_others_on_another_stream() -> None:
    storages = tuple(Storage(n, 64) for n in "xab")
    values = tuple(Value(s.name, k, "float32", (16,), (1,)) for k, s in enumerate(storages))
    graph = Graph((Op("a", "a", (0,), (1,)), Op("b", "b", (0,), (2,))), values, storages, (0,), (2,))
    steps = (Step("compute", op=0), Step("compute", op=1, stream=1))
    rows = (Residence(1, 0, 1, 64), Residence(2, 1, 2, 64))
    plan = Plan(graph.digest, steps, rows, arena=64, **costs(graph, steps))
    assert found(graph, plan) >= {"leak", "wrong-residence"}


@pytest.mark.parametrize("strides", [(), (1, 8)])
@pytest.mark.parametrize(
    "target", ["aten.bernoulli_.float", "aten.div_.Scalar", "aten.embedding.default", "aten.argmax"]
)
def test_a_codec_is_judged_whatever_the_values_look_like(target: str, strides: tuple[int, ...]) -> None:
    storages = tuple(Storage(n, 256) for n in "xab")
    table = Value("x", 0, "float32", (), ())
    a = Value("a", 1, "int64" if "argmax" in target or "clone" in target else "float32", (4, 8), strides)
    b = Value("b", 2, "float32", (8, 8), (8, 1))
    ops = (Op("a", target, (), (1,)), Op("e", "aten.embedding.default", (0, 1), (2,)))
    graph = Graph(ops, (table, a, b), storages, (0,), (2,))
    for codec in ("bits", "mask", "uint8", "int32", "bf16"):
        steps = (
            Step("compute", op=0), Step("compress", storages=(1,), nbytes=64, codec=codec),
            Step("free", storages=(1,), form="packed"), Step("compute", op=1), Step("free", storages=(1,)),
        )  # fmt: skip
        assert "codec" in found(graph, Plan(graph.digest, steps, static=graph.static_bytes))


@given(graphs(15), st.integers(0, 2**32 - 1))
def test_any_change_of_any_field_gives_a_list(graph: Graph, seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(graph, seed)
    steps, rows = list(plan.steps), list(plan.residences)
    number = lambda: rng.choice((-2, -1, 0, 1, len(graph.ops), len(steps), 1 << 40))  # noqa: E731
    for _ in range(3):
        k = rng.randrange(len(steps))
        change: dict[str, Any] = rng.choice(
            (
                {"op": number()}, {"storages": (number(),)}, {"waits": (number(),)}, {"stream": abs(number())},
                {"kind": rng.choice(("compute", "recompute", "free", "fetch", "offload", "jump"))},
                {"form": rng.choice(("full", "host", "packed", "state", "gone"))}, {"saves": True},
                {"reuses": ((number(), number()),)}, {"codec": "bits", "kind": "compress", "nbytes": number()},
            )
        )  # fmt: skip
        steps[k] = replace(steps[k], **change)
        if rows:
            k = rng.randrange(len(rows))
            name = rng.choice(("storage", "start", "end", "size", "offset", "request", "first", "last"))
            rows[k] = replace(rows[k], **{name: number()})
            if rng.random() < 0.2:
                rows[k] = replace(rows[k], form=rng.choice(("state", "host", "packed")))
    assert isinstance(verify(graph, replace(plan, steps=tuple(steps), residences=tuple(rows))), list)


def test_chains_of_masks_are_followed_once() -> None:
    """Every mask is written seven times from the one before it: sevenfold paths at every step, one storage."""
    n = 60
    storages = tuple(Storage(f"s{k}", 256) for k in range(n + 1))
    values = tuple(Value(s.name, k, "float32", (64,), (1,)) for k, s in enumerate(storages))
    ops = [Op(f"o{k}", "aten.div.Scalar", (k,), (k + 1,)) for k in range(n)]
    ops += [Op(f"w{k}", "aten.div.Scalar", (k,), (), (k + 1,)) for k in range(n) for _ in range(6)]
    graph = Graph(tuple(ops), values, storages, (0,), (n,))
    facts = facts_of(graph)
    asked = Codecs(graph, facts)
    began = time.perf_counter()
    assert all(asked.fault(s, "mask", 64, lossy=False) for s in range(1, n))
    assert time.perf_counter() - began < 5


def test_calls_within_calls_are_counted_once() -> None:
    storages = (Storage("a", 64), Storage("b", 64))
    values = tuple(Value(s.name, k) for k, s in enumerate(storages))
    graph = Graph((Op("o", "t", (0,), (1,)),), values, storages, (0,), (1,))
    for _ in range(31):
        graph = Graph((Op("o", "t", (0,), (1,), calls=(graph,)),), values, storages, (0,), (1,))
    began = time.perf_counter()
    plan = laid_out(graph)
    assert plan.peak == 64 * 33 and found(graph, plan) == set()
    assert time.perf_counter() - began < 5


# ---- by an oracle that shares no code with the verifier


def test_all_that_the_oracle_refuses_is_refused_and_every_rule_is_needed_for_some_of_it() -> None:
    """Mutants that no other rule finds, by rule; docs/reliability.md has the counts of a campaign."""
    alone, missed = set(), []
    for seed in range(2_000):
        graph, plan = mutation.case(seed, 1 + seed % 12)
        kind, mutant = mutation.mutant(graph, plan, random.Random(seed))
        wrong, codes = mutation.verdict(graph, mutant)
        if wrong and not codes:
            missed.append((seed, kind, wrong[0]))
        if wrong and len(codes) == 1:
            alone |= codes
    assert missed == []
    assert alone == {rule.code for rule in PLAN_RULES}


def test_a_plan_before_its_change_is_right_to_both() -> None:
    for seed in range(300):
        assert mutation.verdict(*mutation.case(seed, 1 + seed % 12)) == ([], set())
