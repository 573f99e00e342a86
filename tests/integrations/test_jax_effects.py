"""JAX steps that print, call back and write into references (`jax.new_ref`): planned as others, loops that do so
inside, too; all of it happens as often, and in the order, of the step itself."""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import tightship  # noqa: E402

LAYERS, BATCH, WIDE = 4, 256, 64
KEY = jax.random.PRNGKey(0)
X = jax.random.normal(KEY, (BATCH, WIDE))
W = 0.1 * jax.random.normal(KEY, (LAYERS, WIDE, WIDE))


@pytest.fixture(autouse=True)
def _no_plans_on_disk(monkeypatch):
    monkeypatch.setenv("TIGHTSHIP_CACHE", "off")


def layer(x, w):
    return x + jax.nn.gelu(x @ w)


def loss_in_a_row(ws, x):
    for w in ws:
        x = layer(x, w)
    return (x**2).mean()


def seen(what):
    def see(v):
        what.append(round(float(v), 6))

    return see


def prints_in_a_scan(what):
    def step(w, x):
        def body(x, w):
            y = layer(x, w)
            jax.debug.callback(seen(what), jax.lax.stop_gradient(y).mean(), ordered=True)
            return y, None

        return jax.value_and_grad(lambda w: (jax.lax.scan(body, x, w)[0] ** 2).mean())(w)

    return step


def prints_while_it_accumulates(what):
    def step(w, x):
        def part(total, x):
            value, grads = jax.value_and_grad(loss_in_a_row)(list(w), x)
            jax.debug.callback(seen(what), value, ordered=True)
            return jax.tree.map(jnp.add, total, grads), value

        return jax.lax.scan(part, [jnp.zeros_like(x) for x in w], x.reshape(2, -1, WIDE))

    return step


def steps_that_print(what):
    def step(w, x):
        def one(k, ws):
            value, grads = jax.value_and_grad(loss_in_a_row)(ws, x)
            jax.debug.callback(seen(what), value, ordered=True)
            return [a - 0.1 * b for a, b in zip(ws, grads, strict=True)]

        return jax.lax.fori_loop(0, 3, one, list(w))

    return step


def accumulates_in_references(what):
    def step(w, x):
        sums = [jax.new_ref(jnp.zeros_like(x)) for x in w]
        for rows in x.reshape(2, -1, WIDE):
            for total, grad in zip(sums, jax.grad(loss_in_a_row)(list(w), rows), strict=True):
                total[...] += grad
        return [total[...] for total in sums]

    return step


def accumulates_in_references_in_a_loop(what):
    def step(w, x):
        sums = [jax.new_ref(jnp.zeros_like(x)) for x in w]

        def part(k, x):
            for total, grad in zip(sums, jax.grad(loss_in_a_row)(list(w), x), strict=True):
                total[...] += grad
            return k, None

        jax.lax.scan(part, 0, x.reshape(2, -1, WIDE))
        return [total[...] for total in sums]

    return step


def statistics_of_layers(what):
    def step(w, x):
        means = jax.new_ref(jnp.zeros(WIDE))

        def body(x, w):
            y = layer(x, w)
            means[...] = 0.9 * means[...] + jax.lax.stop_gradient(y).mean(0)
            return y, None

        found = jax.value_and_grad(lambda w: (jax.lax.scan(body, x, w)[0] ** 2).mean())(w)
        return found, means[...]

    return step


def reads_what_changes(what):
    def step(w, x):
        scale = jax.new_ref(jnp.ones((BATCH, WIDE)))

        def loss(ws):
            y = x
            for a in ws:
                y = layer(y, a) * scale[...]
                scale[...] = 0.5 * scale[...]
            return (y**2).mean()

        return jax.value_and_grad(loss)(list(w)), scale[...]

    return step


STEPS = [
    prints_in_a_scan, prints_while_it_accumulates, steps_that_print, accumulates_in_references,
    accumulates_in_references_in_a_loop, statistics_of_layers, reads_what_changes,
]  # fmt: skip


@pytest.mark.parametrize("of", STEPS, ids=lambda of: of.__name__)
def test_what_a_step_does_beside_its_results_is_done_as_often_and_in_its_order(of) -> None:
    what: list[float] = []
    step = of(what)
    wanted = jax.tree.leaves(jax.jit(step)(W, X))
    jax.effects_barrier()
    plain = list(what)
    what.clear()
    fitted = tightship.jax.fit(step, "static+70%")
    got = jax.tree.leaves(fitted(W, X))
    jax.effects_barrier()
    fit = fitted.fits[0]
    assert fit.memory.total <= fit.budget
    assert fit.repeated > 0
    assert np.allclose(what, plain, rtol=1e-5)
    assert len(what) == len(plain)
    assert all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(got, wanted, strict=True))
