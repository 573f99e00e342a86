"""How few programs are looked at for a JAX step without loops, and which."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import tightship  # noqa: E402
from tightship.integrations import jax_compiled  # noqa: E402
from tightship.integrations.jax_bodies import program_of  # noqa: E402
from tightship.integrations.jax_compiled import Memory, look_at  # noqa: E402
from tightship.integrations.jax_schedules import fused_peak  # noqa: E402
from tightship.integrations.jax_search import Search  # noqa: E402

KEY = jax.random.PRNGKey(0)


@pytest.fixture(autouse=True)
def _no_plans_on_disk(monkeypatch):
    monkeypatch.setenv("TIGHTSHIP_CACHE", "off")


def attention(params, x):
    """Layers of 8 sequences of 64 and 4 heads."""
    for up, down in params:
        y = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
        q, k, v, _ = jnp.moveaxis((y @ up).reshape(8, 64, 4, 4, 16), 2, 0)
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(512, 64)
        x = x + jax.nn.gelu(x @ up) @ down
    return x


def layers(params, x):
    for up, down in params:
        x = x + jax.nn.gelu(x @ up) @ down
    return x


def dense(params, x):
    for up, down in params:
        x = jax.nn.relu(jax.nn.relu(x @ up) @ up.T @ down.T) @ down
    return x


def step_of(forward):
    def step(params, x):
        loss, grads = jax.value_and_grad(lambda p: (forward(p, x) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def given(many=8):
    up, down = (0.1 * jax.random.normal(KEY, shape) for shape in ((64, 256), (256, 64)))
    return [(up, down)] * many, jax.random.normal(KEY, (512, 64))


def search_of(forward):
    params, x = given()
    traced = jax.jit(step_of(forward), keep_unused=True).trace(params, x)
    leaves = jax.tree.leaves((params, x))
    return Search((program_of(traced.jaxpr),), leaves, (), 1 << 40, Memory(0, 0, 0, 0), 1e9)


def test_what_policies_make_again_is_counted_as_xla_fuses_it() -> None:
    """Element by element, into what reads it: `Ops` fuses what is read once in the step as it is only."""
    search = search_of(layers)
    level = search.planner.by_policy(search.program, "dots_saveable", np.inf)
    made = look_at(search.lower(level), memory=True)[0].temporaries
    assert abs(level.fused_peak / made - 1) < 0.05 < level.peak / made - 1
    assert level.fused_peak == fused_peak(level.ops, level.steps)
    plain = search.planner.level(search.program, np.inf)
    assert plain.fused_peak == plain.peak  # nothing is made again


@pytest.mark.parametrize(("share", "most"), [(80, 1), (60, 2)])
def test_where_less_memory_costs_next_to_nothing_it_is_asked_for_at_once(share, most) -> None:
    """XLA makes more of plans of attention than the model."""
    fitted = tightship.jax.fit(step_of(attention), f"static+{share}%")
    fit = fitted.prepare(*given())
    assert fit.memory.total <= fit.budget and fit.extra_flops <= 0.005
    assert len(fit.tried) <= most


@pytest.mark.parametrize("share", [40, 30])
def test_policies_that_are_far_above_the_budget_are_not_looked_at(monkeypatch, share) -> None:
    """By the model, and by what XLA made of the programs before."""
    looks, in_order = [], Search._look_in

    def look_in(self, order, of):
        looks.append(in_order(self, order, of))
        return looks[-1]

    monkeypatch.setattr(Search, "_look_in", look_in)
    fit = tightship.jax.fit(step_of(dense), f"static+{share}%").prepare(*given())
    room = fit.budget - fit.memory.static
    assert fit.memory.temporaries <= room and looks
    assert all(made.memory.temporaries <= 1.3 * room for made in looks)


@dataclass
class _Plan:
    flops: int


def test_plans_with_as_many_operations_as_the_best_are_passed_over(monkeypatch) -> None:
    """Between 4 bytes that are within the budget and 8 that are not: from 7 bytes on a plan has fewer operations."""
    search, asked = search_of(layers), []

    def level(beyond):
        asked.append(beyond)
        return _Plan(flops=9 if beyond >= seven else 10)

    monkeypatch.setattr(search, "_level", level)
    monkeypatch.setattr(search, "fitting", lambda: [SimpleNamespace(level=_Plan(10))])
    seven = 7.0
    assert search._with_fewer_operations(4.0, 5.0, 8.0) == (6.5, 7.25)
    seven = 9.0  # nowhere between
    low, following = search._with_fewer_operations(4.0, 5.0, 8.0)
    assert low == following < 8 and len(asked) < 12
    assert search._with_fewer_operations(4.0, 5.0, np.inf) == (
        4.0,
        5.0,
    )  # looked at: it may show where more begins


def recurrences(params, x):
    """Four layers that mix along 256 places by `associative_scan`, of whose small arrays XLA makes far more than the
    model has."""

    def along(a, b):
        return a[0] * b[0], a[1] * b[0] + b[1]

    for gate, up, down in params:
        decay = jax.nn.sigmoid(x @ gate)
        x = x + jax.nn.gelu(jax.lax.associative_scan(along, (decay, x @ up), axis=1)[1]) @ down
    return x


def test_policies_come_before_more_plans_where_the_model_is_far_from_what_xla_makes() -> None:
    """As it is planned, a second plan and those after it cost more of the processor than all looks together."""

    def step(params, means, squares, x):
        loss, grads = jax.value_and_grad(lambda p: (recurrences(p, x) ** 2).mean())(params)
        means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, grads)
        squares = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, squares, grads)
        made = jax.tree.map(lambda p, m, v: p - 0.1 * m / (jnp.sqrt(v) + 1e-8), params, means, squares)
        return made, means, squares, loss

    keys = jax.random.split(KEY, 12)
    params = [tuple(0.1 * jax.random.normal(k, (32, 32)) for k in keys[i : i + 3]) for i in range(0, 12, 3)]
    means, squares = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    x = jax.random.normal(KEY, (4, 256, 32))
    fitted = tightship.jax.fit(step, "60%", donate_argnums=(0, 1, 2))
    fit = fitted.prepare(params, means, squares, x)
    assert fit.memory.total <= fit.budget
    assert len(fit.tried) <= 6


def test_what_makes_up_the_peak_is_read_of_the_program_that_was_looked_at(monkeypatch) -> None:
    """Not of one that XLA compiles once more: each look is one compilation, and there is no other."""
    compiled = []
    real = jax_compiled.compile_for
    monkeypatch.setattr(jax_compiled, "compile_for", lambda *a, **k: compiled.append(1) or real(*a, **k))
    searched = []
    run = Search.run
    monkeypatch.setattr(Search, "run", lambda self: searched.append(self) or run(self))
    with pytest.raises(tightship.Infeasible) as error:
        tightship.jax.fit(step_of(layers), "static+1%", cache=None).prepare(*given(2))
    assert error.value.top[1:]
    assert len(compiled) == 1 + len(searched[0].tried) > 1  # the step as it is, and each program
