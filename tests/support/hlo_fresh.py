"""Compiles small training steps with JAX and dumps what XLA does with them: run as a script, in a process of its own.

``python hlo_fresh.py cpu FOLDER`` or ``cuda FOLDER MEMORY``; the latter needs no GPU, only JAX's CUDA plugin: the
device is described, with so many bytes of memory, from which XLA takes its limit. Its log goes to standard error.
"""

from __future__ import annotations

import os
import sys

KINDS = ("lstm", "scan", "unrolled")

A100 = """
gpu_device_info {
  cuda_compute_capability { major: 8 minor: 0 }
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  shared_memory_per_core: 167936  threads_per_core_limit: 2048  core_count: 108  fpus_per_core: 64
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 1555000000000  l2_cache_size: 41943040  clock_rate_ghz: 1.41
  device_memory_size: %d
  shared_memory_per_block_optin: 166912  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"  dnn_version_info { major: 9 minor: 1 }  device_description_str: "A100"
"""


def main(platform: str, folder: str, kind: str, memory: int) -> None:
    flags = [f"--xla_dump_to={folder}", "--xla_dump_hlo_as_text"]
    if platform == "cuda":
        flags += ["--xla_gpu_autotune_level=0", "--xla_dump_hlo_pass_re=.*remat.*"]
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        os.environ["TF_CPP_VMODULE"] = "hlo_rematerialization=1"
    os.environ["XLA_FLAGS"] = " ".join(flags)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
    import jax

    step, given = program(kind)
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.jit(step, donate_argnums=(0,)).lower(*given).compile()
        return
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    config = {"topology": "1x1x1", "target_config": A100 % memory}
    (device, *_) = topologies.get_topology_desc("", platform="cuda", **config).devices
    at = SingleDeviceSharding(device)
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), given)
    jax.jit(step, donate_argnums=(0,)).trace(*given).lower(lowering_platforms=("cuda",)).compile()


def program(kind: str):  # type: ignore[no-untyped-def]
    """A step of gradient descent and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    d, layers = 64, 4
    if kind == "lstm":

        def loss(p, x):  # type: ignore[no-untyped-def]
            def cell(carry, row):  # type: ignore[no-untyped-def]
                h, s = carry
                i, f, g, o = jnp.split(row @ p["x"] + h @ p["h"], 4, -1)
                s = jax.nn.sigmoid(f) * s + jax.nn.sigmoid(i) * jnp.tanh(g)
                h = jax.nn.sigmoid(o) * jnp.tanh(s)
                return (h, s), h

            zero = jnp.zeros((x.shape[1], d))
            return (jax.lax.scan(cell, (zero, zero), x)[1] ** 2).mean()

        params, x = {"x": shape(32, 4 * d), "h": shape(d, 4 * d)}, shape(24, 16, 32)
    else:

        def layer(x, w):  # type: ignore[no-untyped-def]
            a = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x @ w["q"], x @ w["k"]))
            x = x + jnp.einsum("bts,bsd->btd", a, x @ w["v"])
            return x + jax.nn.gelu(x @ w["a"]) @ w["b"]

        def loss(p, x):  # type: ignore[no-untyped-def]
            if kind == "scan":
                h = jax.lax.scan(lambda c, w: (layer(c, w), None), x, p)[0]
            else:
                h = x
                for n in range(layers):
                    h = layer(h, {k: w[n] for k, w in p.items()})
            return (h**2).mean()

        params = {k: shape(layers, d, d) for k in "qkv"}
        params |= {"a": shape(layers, d, 4 * d), "b": shape(layers, 4 * d, d)}
        x = shape(8, 96, d)

    def step(p, x):  # type: ignore[no-untyped-def]
        value, slope = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, slope), value

    return step, (params, x)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]) if len(sys.argv) > 4 else 0)
