"""What loops hand on: how many searches it takes to say how much, and how little it may be."""

import math

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

from tightship.integrations.jax_bodies import program_of  # noqa: E402
from tightship.integrations.jax_levels import Planner, unplanned_bytes  # noqa: E402
from tightship.integrations.jax_pairs import crossing_bytes, pairs_of  # noqa: E402
from tightship.integrations.jax_schedules import plan_steps  # noqa: E402

KEY = jax.random.PRNGKey(0)


def _attention(x, w):
    """A layer whose scores are far larger than what it is given."""
    q, k, v = jnp.split(x @ w["in"], 3, -1)
    scores = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 4)
    x = x + (scores @ v) @ w["out"]
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None


@pytest.fixture(scope="module")
def program():
    shapes = {"in": (16, 48), "out": (16, 16), "up": (16, 64), "down": (64, 16)}
    w = {name: 0.1 * jax.random.normal(KEY, (8, *shape)) for name, shape in shapes.items()}
    x = jax.random.normal(KEY, (8, 64, 16))

    def loss(w, x):
        return (jax.lax.scan(_attention, x, w)[0] ** 2).mean()

    return program_of(jax.jit(jax.grad(loss)).trace(w, x).jaxpr)


@pytest.fixture
def searches(monkeypatch):
    """The bytes that each search was for."""
    asked = []

    def plan(graph, beyond, work):
        asked.append(beyond)
        return plan_steps(graph, beyond, work)

    monkeypatch.setattr("tightship.integrations.jax_schedules.plan_steps", plan)
    return asked


def test_parts_of_what_loops_hand_on_that_cannot_be_had_are_one_search(program, searches) -> None:
    """A layer hands on its input at least: less was searched for again for each part of what it may, with all that
    it made again to come near."""
    planner, (pair,) = Planner("select"), pairs_of(program)
    beyond = 0.5 * unplanned_bytes(pair.joined)
    planned = planner._halves(pair, beyond, 0.0)
    many = len(searches)
    assert planner._halves(pair, beyond, 0.01).second == planned.second
    assert planner._halves(pair, beyond, 0.02).second == planned.second and len(searches) == many


def test_the_least_that_loops_hand_on_is_little_more_than_what_they_must(program) -> None:
    """It was searched for to a part of bytes that no body takes: a tenth of all that may be handed on, and more."""
    planner, (pair,) = Planner("select"), pairs_of(program)
    ops = planner._ops_of(pair.joined)
    least = planner._least_crossing(ops, pair, 0.0)
    most = crossing_bytes(pair.joined, pair.cut, pair.begins)
    must = pair.joined.nbytes(pair.begins | pair.arrives)
    assert must <= least <= must + 0.02 * most


def test_fewer_bytes_begin_with_the_part_that_was_best_for_more(program, monkeypatch) -> None:
    planner, tried = Planner("select"), []
    kept = Planner._at

    def at(self, program, pairs, beyond, share, *rest):
        if not rest:
            tried.append((beyond, share))
        return kept(self, program, pairs, beyond, share, *rest)

    monkeypatch.setattr(Planner, "_at", at)
    whole = planner.unplanned(program)
    rows = [planner.level(program, part * whole) for part in (0.5, 0.4, 0.45)]
    first, second, third = ([s for of, s in tried if of == part * whole] for part in (0.5, 0.4, 0.45))
    assert len(first) > 1 and len(second) <= 4 and len(third) <= 5
    for part, level in zip((0.5, 0.4, 0.45), rows, strict=True):
        other = Planner("select").level(program, part * whole)
        assert level.peak <= part * whole and level.flops <= 1.01 * other.flops


def test_no_better_part_is_looked_for_after_the_limit(program, monkeypatch) -> None:
    """It was looked at between programs alone: 71 seconds for a limit of ten."""
    count = []
    for until in (math.inf, 0.0):
        planner, tried = Planner("select", until=until), []
        kept = planner._at.__func__

        def at(self, program, pairs, beyond, share, *rest, kept=kept, tried=tried):
            tried.extend([share] if not rest else [])
            return kept(self, program, pairs, beyond, share, *rest)

        with monkeypatch.context() as patched:
            patched.setattr(Planner, "_at", at)
            level = planner.level(program, 0.4 * planner.unplanned(program))
        count.append(len(tried))
        assert level.peak <= 0.4 * planner.unplanned(program)
    assert count[1] < count[0]
