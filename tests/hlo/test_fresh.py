"""Modules compiled on the spot, against what XLA dumps of them. Skipped without jax."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import hlo_dumps
from tightship.baselines import xla_assign
from tightship.hlo import parse, to_text
from tightship.hlo.assign import tight
from tightship.hlo.assign.order import reordered

PROGRAMS = """
import jax, jax.numpy as jnp
from jax import lax
S = lambda *s, d=jnp.float32: jax.ShapeDtypeStruct(s, d)
def make(f, *a, donate=()): jax.jit(f, donate_argnums=donate).lower(*a).compile()
def scan(x, w): return lax.scan(lambda c, wi: (jnp.tanh(c @ wi), c.sum(1)), x, w)
make(scan, S(64, 128), S(5, 128, 128))
make(jax.grad(lambda x, w: scan(x, w)[0].sum(), argnums=(0, 1)), S(64, 128), S(5, 128, 128))
make(lambda x, n: lax.while_loop(lambda c: (c[1] < n) & (c[0].sum() < 9), lambda c: (c[0] @ c[0], c[1] + 1), (x, 0)),
     S(96, 96), S(d=jnp.int32))
make(lambda p, x, y: lax.cond(p, lambda a, b: (a @ b, b + 1), lambda a, b: (a - b, b * 2), x, y),
     S(d=jnp.bool_), S(50, 50), S(50, 50))
make(lambda i, x: lax.switch(i, [lambda a: jnp.sort(a, 0), lambda a: a[::-1] * 2, lambda a: jnp.cumsum(a, 0)], x),
     S(d=jnp.int32), S(100, 7))
make(lambda x, i, u: (x.at[i].add(u), x.at[i].set(0.0)), S(300, 16), S(40, d=jnp.int32), S(40, 16))
make(lambda x, u, i: (lambda y: (y, (y @ y.T).sum()))(lax.dynamic_update_slice(x, u, (i, 0))),
     S(64, 32), S(4, 32), S(d=jnp.int32), donate=(0,))
make(lambda x: (jnp.argsort(x, axis=1), lax.top_k(x, 5)), S(60, 90))
def conv(x, w):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return (lax.reduce_window(jax.nn.relu(y), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") ** 2).mean()
make(jax.value_and_grad(conv, argnums=1), S(4, 32, 32, 3), S(3, 3, 3, 16))
def mlp(ps, x, y):
    for w, b in ps: x = jax.nn.gelu(x @ w + b)
    return -(jax.nn.log_softmax(x) * y).sum()
def sgd(ps, x, y):
    l, g = jax.value_and_grad(mlp)(ps, x, y)
    return l, jax.tree.map(lambda p, q: p - 0.1 * q, ps, g)
ps = [(S(40, 128), S(128)), (S(128, 10), S(10))]
make(sgd, ps, S(32, 40), S(32, 10))
make(sgd, ps, S(32, 40), S(32, 10), donate=(0,))
make(lambda a: jnp.linalg.cholesky(a @ a.T + jnp.eye(24)), S(24, 24))
make(lambda a, b: (a, b, a + b), S(7), S(7), donate=(0,))
make(lambda k, x: (jax.random.permutation(k, x), jax.random.normal(k, (9, 9))), S(2, d=jnp.uint32), S(200, 3))
make(lambda a: jnp.fft.irfft2(jnp.fft.rfft2(a) * 2), S(32, 32))
half = jnp.bfloat16
make(jax.grad(lambda w, x: jnp.tanh(x @ w).astype(jnp.float32).sum()), S(64, 96, d=half), S(8, 64, d=half))
import numpy as np
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("d", "m"))
def on(*names): return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*names))
def T(*s, at=()): return jax.ShapeDtypeStruct(s, jnp.float32, sharding=on(*at))
weights = [T(64, 32, at=(None, "m")), T(32, 16, at=("m",))]
make(jax.grad(lambda w, x: (jnp.tanh(x @ w[0]) @ w[1]).mean()), weights, T(8, 64, at=("d",)))
make(lambda x: jnp.sort(x, 0), T(800, 16, at=("m",)))
def ring(x):
    turn = [(0, 1), (1, 2), (2, 3), (3, 0)]
    step = lambda c, _: (lax.ppermute(c, "m", turn) + lax.axis_index("m"), lax.pmax(c.sum(), "m"))
    return lax.scan(step, x, None, length=5)
spec = jax.sharding.PartitionSpec
here = spec("d", "m")
make(jax.shard_map(ring, mesh=mesh, in_specs=here, out_specs=(here, spec()), check_vma=False), S(8, 64))
"""


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("jax")
    folder = tmp_path_factory.mktemp("dump")
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", PROGRAMS], env=environment, check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_fresh_modules_are_assigned_as_xla_assigned_them(dumped: Path) -> None:
    hlo = pytest.importorskip("jaxlib._hlo")
    files = sorted(dumped.glob("*_after_optimizations.txt"))
    assert len(files) >= 19
    for file in files:
        part = file.name.removesuffix(".txt")
        text = file.read_text()
        module = parse(text, file.name)
        assert to_text(module).rstrip() == text.rstrip(), part
        made = xla_assign.plan(module)
        theirs = {k: (dumped / f"{part}-{k}.txt").read_text() for k in ("buffer-assignment", "live-range")}
        listed = hlo_dumps.values((dumped / f"{part}-buffer-assignment-values.txt").read_text())
        assert hlo_dumps.our_values(made.live.points) == listed, part
        assert hlo_dumps.our_ranges(made.live) == hlo_dumps.ranges(theirs["live-range"]), part
        assert {"total": made.total, "temp": made.temp} == hlo_dumps.total(theirs["buffer-assignment"]), part
        assert tight.plan(module, tight.Options(seconds=120.0, work=2_000)).total <= made.total, part
        other, _ = reordered(module)
        hlo.hlo_module_from_text(to_text(other)).schedule().verify()
