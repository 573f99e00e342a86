"""Why a JAX program needs so much memory, and what `jax.checkpoint` would change: read from what XLA compiled.

    python examples/jax_program.py        # some seconds, on the CPU; needs jax

Writes the compiled modules into the current folder and reads them as `tightship assign` and `explain` do.
"""

import sys
from pathlib import Path

from tightship.cli import main as tightship

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    sys.exit("this example needs jax: pip install jax")

LAYERS, WIDTH, BATCH = 8, 128, 512


def block(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, None]:
    return x + jnp.tanh(jnp.tanh(x @ weights) @ weights.T), None


def step(weights: jax.Array, x: jax.Array, checkpoint: bool) -> jax.Array:
    body = jax.checkpoint(block) if checkpoint else block

    def loss(weights: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(body, x, weights)[0] ** 2)

    return weights - 1e-3 * jax.grad(loss)(weights)


def main() -> None:
    weights, x = jnp.zeros((LAYERS, WIDTH, WIDTH)), jnp.zeros((BATCH, WIDTH))
    for name, checkpoint in (("step.txt", False), ("checkpointed.txt", True)):
        lowered = jax.jit(step, static_argnums=2, donate_argnums=0).lower(weights, x, checkpoint)
        Path(name).write_text(lowered.compile().as_text())
        print(f"\n{name}")
        assert tightship(["assign", name]) == 0
    assert tightship(["explain", "step.txt", "--top", "3"]) == 0


if __name__ == "__main__":
    main()
