"""The verifier's first look, in the core, says what its rules say, and shares nothing with what it checks."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from support.lowering import costs
from support.strategies import graphs, plans, random_order
from tightship.errors import Infeasible, Violation
from tightship.graph import Graph
from tightship.machine import CODECS
from tightship.plan import FORMS, KINDS, Plan
from tightship.planners import default
from tightship.planners.layout import lay_out
from tightship.simulate import baseline
from tightship.verify import rules

CORE = Path(__file__).resolve().parents[2] / "cpp"


def by_rules(graph: Graph, plan: Plan) -> list[Violation]:
    """What the rules say, without the first look."""
    with mock.patch.object(rules, "sound", lambda *_: False):
        return rules.verify(graph, plan)


def known(plan: Plan) -> bool:
    """Whether the core's replay knows all that a plan does: not pools of a planner's own."""
    return not plan.inner and all(r.pool in ("device", "host", "out") for r in plan.residences)


def laid_out(graph: Graph, seed: int, hand_out: bool = False) -> Plan:
    steps = baseline(graph, random_order(graph, seed))
    made = lay_out(graph, steps, hand_out=hand_out)
    sums = costs(graph, steps)
    return Plan(graph.digest, steps, made.residences, arena=made.arena, handed=made.handed, **sums)


def recomputing(graph: Graph, allow: str = "recompute") -> Plan | None:
    try:
        return default.plan(graph, "75%", default.Options(work=20_000, seconds=5.0, allow=allow))
    except Infeasible:
        return None


@given(graphs(25), st.integers(0, 99), st.booleans())
def test_what_is_right_is_found_right_at_once(graph: Graph, seed: int, hand_out: bool) -> None:
    plan = laid_out(graph, seed, hand_out)
    assert rules.sound(graph, plan)
    assert by_rules(graph, plan) == []
    bare = replace(plan, residences=(), arena=0, handed=0)
    assert rules.sound(graph, bare)


@given(graphs(20, random=0.0))
def test_recomputing_and_writing_over_are_known(graph: Graph) -> None:
    plan = recomputing(graph)
    assert plan is None or rules.sound(graph, plan)


@given(plans(25), st.integers(0, 1 << 30))
def test_both_say_the_same_of_random_plans(case: tuple[Graph, Plan], seed: int) -> None:
    """They offload, pack, save random states and copy beside the ops."""
    graph, plan = case
    assert by_rules(graph, plan) == []
    assert rules.sound(graph, plan) is known(plan)
    for k in range(8):
        agree(graph, broken(plan, random.Random(seed + k)))


@given(graphs(25), st.integers(0, 1 << 30), st.booleans())
def test_both_say_the_same_of_plans_that_are_wrong_somewhere(graph: Graph, seed: int, hand_out: bool) -> None:
    for k in range(4):
        agree(graph, broken(laid_out(graph, seed % 99, hand_out), random.Random(seed + k)))


@given(graphs(20, random=0.0, overwrites=0.8), st.integers(0, 1 << 30))
def test_both_say_the_same_of_recomputation_that_is_wrong_somewhere(graph: Graph, seed: int) -> None:
    plan = recomputing(graph)
    for k in range(4) if plan else ():
        agree(graph, broken(plan, random.Random(seed + k)))


@given(
    graphs(20),
    st.sampled_from(("offload", "compress,redraw", "recompute,offload,compress,redraw")),
    st.integers(0, 1 << 30),
)
def test_both_say_the_same_of_what_leaves_memory_by_any_means(graph: Graph, allow: str, seed: int) -> None:
    plan = recomputing(graph, allow)
    if plan is None:
        return
    assert rules.sound(graph, plan) and by_rules(graph, plan) == []
    for k in range(8):
        agree(graph, broken(plan, random.Random(seed + k)))


def agree(graph: Graph, plan: Plan) -> None:
    wrong = by_rules(graph, plan)
    if rules.sound(graph, plan):
        assert wrong == []
    elif known(plan):
        assert wrong != []
    assert rules.verify(graph, plan) == wrong


def broken(plan: Plan, rng: random.Random) -> Plan:
    """The plan with something else in one place; now and then that is as right as before."""
    rows, name = (
        (plan.steps, "steps")
        if rng.random() < 0.5 or not plan.residences
        else (plan.residences, "residences")
    )
    made: list[Any] = list(rows)
    if not made:
        return plan
    at, other = rng.randrange(len(made)), rng.randrange(len(made))
    what = rng.choice(("gone", "twice", "swapped", "field"))
    if what == "gone":
        del made[at]
    elif what == "twice":
        made.insert(other, made[at])
    elif what == "swapped":
        made[at], made[other] = made[other], made[at]
    else:
        made[at] = changed(made[at], rng)
    return replace(plan, **{name: tuple(made)})


def changed(row: Any, rng: random.Random) -> Any:
    """A step or a residence with another number in one of its fields."""
    by = rng.choice((-64, -1, 1, 64))
    if rng.random() < 0.2:
        return worded(row, rng)
    numbers = [f for f in row.__dataclass_fields__ if type(getattr(row, f)) is int]
    tuples = [f for f in ("storages", "waits", "reuses") if getattr(row, f, ())]
    field = rng.choice([*numbers, *tuples])
    value = getattr(row, field)
    if field in tuples:
        return replace(row, **{field: rng.choice((value[1:], value[::-1], (*value, value[0])))})
    return replace(row, **{field: value + by})


def worded(row: Any, rng: random.Random) -> Any:
    """The same with another word, or the other answer."""
    words = {
        "kind": KINDS,
        "form": FORMS,
        "pool": ("device", "host", "out"),
        "codec": ("", *CODECS),
        "saves": (True, False),
    }
    field = rng.choice([f for f in words if hasattr(row, f)])
    return replace(row, **{field: rng.choice(words[field])})


@given(graphs(10))
def test_numbers_that_are_none_are_left_to_the_rules(graph: Graph) -> None:
    plan = laid_out(graph, 0)
    steps = (replace(plan.steps[0], op=plan.steps[0].op + 0.5), *plan.steps[1:])
    assert not rules.sound(graph, replace(plan, steps=steps))
    steps = (replace(plan.steps[0], op=1 << 70), *plan.steps[1:])
    assert not rules.sound(graph, replace(plan, steps=steps))


def test_the_verifiers_core_shares_no_code_with_planners() -> None:
    files = sorted(CORE.glob("verify*"))
    assert len(files) >= 2
    for path in files:
        included = re.findall(r'#include "([^"]+)"', path.read_text())
        assert all(name.startswith("verify") for name in included), path
    binding = re.findall(r'#include "([^"]+)"', (CORE / "bind_verify.cpp").read_text())
    assert {*binding} <= {"bind_alarm.h", "bind_arrays.h", "verify.h"}
