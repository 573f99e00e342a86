"""Policies for jax.checkpoint: the values are the same, what XLA takes for temporaries is less."""

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.ad_checkpoint import checkpoint_name  # noqa: E402

from tightship.errors import BadInput, Infeasible, Unsupported  # noqa: E402
from tightship.frontends.jaxpr import lower  # noqa: E402
from tightship.integrations.jax import plan_policies, plan_policy, temp_bytes  # noqa: E402

LAYERS, BATCH, WIDE, INNER = 6, 128, 32, 128


def block(x, w):
    up = checkpoint_name(x @ w["a"], "up")
    act = checkpoint_name(jax.nn.gelu(up), "act")
    return x + act @ w["b"], None


def loss_of(body):
    return lambda weights, x: (jax.lax.scan(body, x, weights)[0] ** 2).sum()


@pytest.fixture(scope="module")
def given():
    key = jax.random.PRNGKey(0)
    a, b = (0.05 * jax.random.normal(key, (LAYERS, *s)) for s in ((WIDE, INNER), (INNER, WIDE)))
    return {"a": a, "b": b}, jax.random.normal(key, (BATCH, WIDE))


@pytest.fixture(scope="module")
def traced(given):
    return jax.jit(jax.value_and_grad(loss_of(block))).trace(*given)


def test_policies_give_the_same_values_for_less_memory(given, traced) -> None:
    """Every policy, compiled under lax.scan: equal to the bit, and XLA's temporaries in the order of the plans."""
    policies = plan_policies(traced)
    assert [p.names for p in policies[:2]] == [(), ("up",)] and policies[-1].everything
    temps, values = [], []
    for p in policies:
        body = jax.checkpoint(block, policy=p.policy)
        compiled = jax.jit(jax.value_and_grad(loss_of(body))).lower(*given).compile()
        temps.append(temp_bytes(compiled))
        values.append([np.asarray(v) for v in jax.tree.leaves(compiled(*given))])
    plain = traced.lower().compile()
    eager = [np.asarray(v) for v in jax.tree.leaves(plain(*given))]
    for found in values:
        assert all(np.array_equal(a, b) for a, b in zip(eager, found, strict=True))
    assert temps == sorted(temps)
    assert temps[0] < 0.3 * temp_bytes(plain)
    assert [p.peak for p in policies] == sorted(p.peak for p in policies)
    assert [p.time for p in policies] == sorted((p.time for p in policies), reverse=True)


def test_the_fastest_within_the_budget_is_chosen(traced) -> None:
    policies = plan_policies(traced)
    for p in policies:
        assert plan_policy(traced, p.peak).names == p.names
    assert plan_policy(traced, "100%").everything
    with pytest.raises(Infeasible) as error:
        plan_policy(traced, policies[0].peak - 1)
    assert error.value.best_peak == policies[0].peak


def test_gradients_that_are_accumulated_have_a_policy(given) -> None:
    """A loop over micro-batches has a forward and a backward pass in each turn; what leaves between them is the
    same as without the loop, and so are policies, and what XLA makes of them."""

    def accumulated(body):
        def step(weights, x):
            def turn(total, part):
                grads = jax.grad(loss_of(body))(weights, part)
                return jax.tree.map(jnp.add, total, grads), None

            return jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, weights), x.reshape(2, BATCH // 2, WIDE))[
                0
            ]

        return step

    plain = jax.jit(accumulated(block))
    policies = plan_policies(plain.trace(*given))
    assert [p.names for p in policies[:2]] == [(), ("up",)] and policies[-1].everything
    chosen = plan_policy(plain.trace(*given), "60%")
    assert chosen.peak <= 0.6 * chosen.peak_before and not chosen.everything
    fitted = jax.jit(accumulated(jax.checkpoint(block, policy=chosen.policy))).lower(*given).compile()
    whole = plain.lower(*given).compile()
    assert temp_bytes(fitted) < 0.6 * temp_bytes(whole)
    for a, b in zip(jax.tree.leaves(fitted(*given)), jax.tree.leaves(whole(*given)), strict=True):
        assert np.array_equal(a, b)


def test_more_names_than_sets_can_be_tried_are_left_out_one_by_one(given) -> None:
    def body(x, w):
        h = x @ w["a"]
        for k in range(10):
            h = checkpoint_name(jnp.sin(h), f"s{k}")
        return x + h @ w["b"], None

    rows = plan_policies(jax.jit(jax.grad(loss_of(body))).trace(*given))
    assert rows[-1].everything and len(rows) > 2
    assert rows[0].peak < rows[-1].peak


def test_without_names_or_a_backward_pass_there_is_nothing_to_choose(given, traced) -> None:
    with pytest.raises(BadInput, match="checkpoint_name"):
        plan_policies(
            jax.jit(jax.grad(loss_of(lambda x, w: (jnp.sin(x @ w["a"]) @ w["b"], None)))).trace(*given)
        )
    with pytest.raises(BadInput, match="backward"):
        plan_policies(jax.jit(loss_of(block)).trace(*given))


class TestLowering:
    def test_a_loop_is_written_out_and_its_slices_are_storages(self, traced) -> None:
        found = lower(traced)
        graph = found.graph
        assert sum(op.target == "dot_general" for op in graph.ops) == 6 * LAYERS
        assert len(found.names["up"]) == len(found.names["act"]) == LAYERS
        assert {graph.storages[s].size for s in found.names["up"]} == {BATCH * INNER * 4}
        assert len(found.carried) == LAYERS
        assert {op.module for op in graph.ops if op.phase == "backward"} >= {
            f"scan.{k}" for k in range(LAYERS)
        }

    def test_contractions_cost_their_flops_and_say_their_line(self, traced) -> None:
        op = next(op for op in lower(traced).graph.ops if op.target == "dot_general")
        assert op.flops == 2 * BATCH * WIDE * INNER
        assert "test_jax.py:" in op.source

    def test_the_backward_pass_takes_what_the_forward_pass_made(self, traced) -> None:
        """A slice that one iteration saves is read by the backward pass of that iteration and by no other."""
        graph = lower(traced).graph
        for s in lower(traced).names["act"]:
            modules = {graph.ops[k].module for k in graph.uses.readers[s]}
            assert modules == {graph.ops[graph.uses.definer[s]].module}

    def test_calls_are_inlined_and_other_control_flow_is_one_op(self) -> None:
        def f(x):
            y = jax.jit(jnp.sin)(x)
            return jax.lax.cond(y.sum() > 0, jnp.cos, jnp.tan, y)

        targets = [op.target for op in lower(jax.jit(f).trace(jnp.ones(8))).graph.ops]
        assert "sin" in targets and "cond" in targets and "cos" not in targets

    def test_a_loop_too_long_to_write_out_is_refused(self) -> None:
        def f(x):
            return jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=10**6)[0]

        with pytest.raises(Unsupported, match="written out"):
            lower(jax.jit(f).trace(jnp.ones(8)))
