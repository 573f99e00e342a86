"""Updates of what is donated, or carried by a loop: they are written over it without a copy, and come early."""

import itertools
import re

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import tightship  # noqa: E402
from tightship.frontends.jax_function import on_values  # noqa: E402
from tightship.frontends.jax_in_place import early, writers, written_over  # noqa: E402
from tightship.frontends.jax_ops import Ops  # noqa: E402
from tightship.integrations.jax_bodies import program_of  # noqa: E402
from tightship.integrations.jax_compiled import compile_for, memory_of  # noqa: E402
from tightship.integrations.jax_levels import unplanned_bytes  # noqa: E402
from tightship.integrations.jax_search import Row, Search  # noqa: E402

KEY = jax.random.PRNGKey(0)
WIDE, DEEP, ROWS = 200, 6, 32
"""More bytes of parameters than of activations."""
ONE = 4 * WIDE * WIDE
COPIES = re.compile(rf"= f32\[{WIDE},{WIDE}\]\S* copy\(")


@pytest.fixture(autouse=True)
def _no_plans_on_disk(monkeypatch):
    monkeypatch.setenv("TIGHTSHIP_CACHE", "off")


def parameters():
    return [0.1 * jax.random.normal(k, (WIDE, WIDE)) for k in jax.random.split(KEY, DEEP)]


def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def descent(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value


def momentum(state, x):
    params, speed = state
    value, grads = jax.value_and_grad(loss)(params, x)
    speed = [0.9 * s + g for s, g in zip(speed, grads, strict=True)]
    return ([p - 0.1 * s for p, s in zip(params, speed, strict=True)], speed), value


def adam(state, x):
    params, first, second, count = state
    value, grads = jax.value_and_grad(loss)(params, x)
    count = count + 1
    first = [0.9 * m + 0.1 * g for m, g in zip(first, grads, strict=True)]
    second = [0.99 * v + 0.01 * g * g for v, g in zip(second, grads, strict=True)]
    scale = jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
    moved = [
        p - 0.1 * scale * m / (jnp.sqrt(v) + 1e-8) for p, m, v in zip(params, first, second, strict=True)
    ]
    return (moved, first, second, count), value


def clipped(params, x):
    """No update before all gradients are there."""
    value, grads = jax.value_and_grad(loss)(params, x)
    norm = jnp.sqrt(sum((g**2).sum() for g in grads))
    return [p - 0.1 * g / jnp.maximum(norm, 1.0) for p, g in zip(params, grads, strict=True)], value


def state_of(step):
    zeros = [jnp.zeros((WIDE, WIDE)) for _ in range(DEEP)]
    params = parameters()
    return {
        "momentum": (params, zeros),
        "adam": (params, zeros, [jnp.copy(z) for z in zeros], jnp.zeros(())),
    }.get(step.__name__, params)


X = jax.random.normal(KEY, (ROWS, WIDE))
STEPS = (descent, momentum, adam, clipped)


def program(step):
    traced = jax.jit(step, donate_argnums=0).trace(state_of(step), X)
    donated = range(len(jax.tree.leaves(state_of(step))))
    return program_of(traced.jaxpr), tuple(donated)


def fitted(step, args, times):
    """The step's fit to its arguments and results, and so many times a parameter; its values are the step's."""
    expected = jax.jit(step)(*args)
    before = memory_of(jax.jit(step, donate_argnums=0).lower(*args).compile())
    made = tightship.jax.fit(step, before.static + int(times * ONE), donate_argnums=0)
    for a, b in zip(jax.tree.leaves(made(*args)), jax.tree.leaves(expected), strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-5)
    (fit,) = made.fits
    assert fit.memory.total <= fit.budget < fit.before.total
    return fit


@pytest.mark.parametrize(("step", "times"), [(descent, 1.9), (momentum, 1.9), (adam, 2.1)])
def test_updates_take_places_without_a_copy(step, times) -> None:
    """Of parameters and gradients about one at a time is there beside the arguments."""
    assert fitted(step, (state_of(step), X), times).extra_flops < 0.15


def test_gradients_that_are_clipped_together_are_made_again() -> None:
    """All of them were there at once, and the parameters beside them in copies."""
    fit = fitted(clipped, (state_of(clipped), X), 0.6 * DEEP)
    assert 0 < fit.extra_flops < 0.5


def test_what_a_loop_carries_is_updated_without_a_copy() -> None:
    def train(params, xs):
        return jax.lax.scan(descent, params, xs)

    assert fitted(train, (parameters(), jnp.stack([X, X + 1])), 2.9).extra_flops < 0.1


@pytest.mark.parametrize("step", STEPS)
def test_an_early_update_is_no_other_program(step) -> None:
    """The same equations; each after those it reads, and what is written over an input after who reads it. It takes
    no more bytes by the model, and fewer where updates do not wait for one another."""
    given, donated = program(step)
    made = written_over(given, donated)
    assert sorted(map(id, (e.made for e in made.equations))) == sorted(
        map(id, (e.made for e in given.equations))
    )
    there = {*made.inputs, *made.constants}
    at = {v: i for i, e in enumerate(made.equations) for v in e.outputs}
    for e in made.equations:
        assert there.issuperset(e.read)
        there.update(e.outputs)
    for new, old in made.over.items():
        assert all(i <= at[new] for i, e in enumerate(made.equations) if old in e.read)
    assert len(made.over) == len(donated)
    fewer = unplanned_bytes(given) - unplanned_bytes(made)
    assert fewer >= (0 if step is clipped else (DEEP - 2) * ONE)


def test_early_updates_are_early_once() -> None:
    made = written_over(*program(descent))
    assert [e.outputs for e in early(made).equations] == [e.outputs for e in made.equations]


def test_a_cycle_is_left_to_xla() -> None:
    """Two parameters that change places: each would have to be written after the other one is read."""

    def swapped(a, b, x):
        value, (ga, gb) = jax.value_and_grad(lambda a, b: ((x @ a @ b) ** 2).mean(), (0, 1))(a, b)
        return b - 0.1 * gb, a - 0.1 * ga, value

    a, b = parameters()[:2]
    expected = jax.jit(swapped)(a, b, X)
    made = program_of(jax.jit(swapped).trace(a, b, X).jaxpr)
    ops = Ops(written_over(made, (0, 1)))
    steps = [(False, op) for op in range(len(ops.graph.ops))]
    compiled = compile_for(
        jax.jit(on_values(ops, steps, "select"), donate_argnums=(0, 1)).lower(a, b, X),
        memory=True,
        quick=True,
    )
    for got, want in zip(compiled(a, b, X), jax.tree.leaves(expected), strict=True):
        assert np.allclose(got, want, rtol=1e-4, atol=1e-5)


def test_steps_wait_for_those_that_read_what_they_write_over() -> None:
    """Whatever is made again: every reader of an input is one that the writer follows from, or that it waits for."""
    ops = Ops(written_over(*program(adam)))
    backward = next(op for op, x in enumerate(ops.graph.ops) if x.phase == "backward")
    forward = [op for op in range(backward) if not ops.graph.ops[op].effect]
    steps = [(False, op) for op in range(backward)]
    steps += [(True, op) for op in forward[:2]]
    steps += [(False, op) for op in range(backward, len(ops.graph.ops))]
    waits = writers(ops, steps)
    after = [set[int]() for _ in steps]
    last: dict[int, int] = {}
    for at, (_, op) in enumerate(steps):
        for k in (*(last[v] for v in ops.reads(ops.members[op]) if v in last), *waits.get(at, ())):
            after[at] |= after[k] | {k}
        last |= dict.fromkeys(ops.results[op], at)
    over = ops.program.over
    for at, (_, op) in enumerate(steps):
        for old in (over[v] for v in ops.results[op] if v in over and ops.program.avals[v].shape):
            readers = {k for k, (_, other) in enumerate(steps) if old in ops.reads(ops.members[other])}
            assert readers - {at} <= after[at]
    assert waits


def test_without_a_copy_by_xlas_own_text() -> None:
    made, donated = program(descent)
    args = [*parameters(), X]
    texts = []
    for of in (made, written_over(made, donated)):
        ops = Ops(of)
        run = on_values(ops, [(False, op) for op in range(len(ops.graph.ops))], "select")
        lowered = jax.jit(run, donate_argnums=donated).lower(*args)
        texts.append(compile_for(lowered, memory=True, quick=True))
    copies = [len(COPIES.findall(c.as_text())) for c in texts]
    if jax.default_backend() == "cpu":
        assert copies[1] == 0 < copies[0]
    assert memory_of(texts[1]).temporaries < memory_of(texts[0]).temporaries


def test_plans_of_the_step_as_it_is_traced_are_read_again() -> None:
    """Where nothing of the step with early updates is within the budget, the step as it is traced is planned, and a
    log on disk says of which of both it is."""
    made, donated = program(descent)
    programs = written_over(made, donated), made
    lowered = jax.jit(descent, donate_argnums=0).lower(state_of(descent), X)
    before = memory_of(compile_for(lowered, memory=False, quick=True))
    search = Search(programs, [*parameters(), X], donated, before.total, before, 0.0)
    for which in (0, 1):
        level = search.again(
            Row(0, 0, 1e300, True, [[[False, op] for op in range(len(Ops(made).graph.ops))]], (), which)
        )
        assert level.ops.program.over == programs[which].over
    order = [[e.outputs for e in p.equations] for p in programs]
    assert order[0] != order[1] and list(itertools.chain(*order[0])) != list(itertools.chain(*order[1]))
