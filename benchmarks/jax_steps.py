"""JAX steps of other packages (flax, equinox, optax) within budgets, beside jax.checkpoint's policies.

    python benchmarks/jax_steps.py [--only NAMES] [--budgets static+80%,static+60%,…] [--json] [--write]

Of each step: what XLA says that the program takes as it is, with each stock policy (`jax.checkpoint` around each
block of the model; the better of XLA's default order and its order for memory), fitted to the bytes of each policy
that saves any (and 0.1 % more), and fitted to each budget; with floating-point operations over those of the step as
it is, as XLA counts them (the body of a loop once), also for fitted steps. Values are compared with the step's. Needs
flax, equinox and optax. ``--write`` puts the table into docs/benchmarks.md; ``--read`` takes rows that runs with
``--json`` printed, for several steps at a time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pages
from flax import nnx

import tightship
from tightship.errors import Infeasible

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- begin: benchmarks/jax_steps.py -->", "<!-- end: benchmarks/jax_steps.py -->"
KEY = jax.random.PRNGKey(0)
POLICIES = ("dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")
MEMORY_FIRST = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
Wrap = Callable[[Any], Any]
Made = tuple[Callable[..., Any], tuple[Any, ...]]


def _plain(f: Any) -> Any:
    return f


def _trained(loss: Any, optimizer: Any, params: Any, *data: Any) -> Made:
    """A step of ``loss(params, *data)``."""

    def step(params: Any, state: Any, *data: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *data)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), *data)


def cnn(wrap: Wrap) -> Made:
    class Block(nn.Module):
        channels: int

        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(2):
                x = nn.relu(nn.GroupNorm(8)(nn.Conv(self.channels, (3, 3))(x)))
            return nn.max_pool(x, (2, 2), (2, 2))

    class CNN(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            block = wrap(Block)
            for c in (16, 32, 64):
                x = block(c)(x)
            return nn.Dense(10)(x.mean((1, 2)))

    model, x = CNN(), jax.random.normal(KEY, (16, 32, 32, 3))

    def loss(p: Any, x: Any) -> Any:
        labels = jnp.arange(16) % 10
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(p, x), labels).mean()

    return _trained(loss, optax.adamw(1e-3), model.init(KEY, x), x)


def _gpt(wrap: Wrap, scan: bool, remat: bool = False) -> Made:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any = None) -> Any:
            h, mask = nn.LayerNorm()(x), nn.make_causal_mask(jnp.ones(x.shape[:2]))
            attend = nn.MultiHeadDotProductAttention(num_heads=4, dropout_rate=0.1, deterministic=False)
            x = x + attend(h, h, mask=mask)
            h = nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))
            x = x + nn.Dropout(0.1, deterministic=False)(h)
            return (x, None) if scan else x

    class GPT(nn.Module):
        @nn.compact
        def __call__(self, t: Any) -> Any:
            x = nn.Embed(256, 64)(t) + self.param("pos", nn.initializers.normal(0.02), (t.shape[1], 64))
            block = nn.remat(Block) if remat else wrap(Block)
            if scan:
                split = {"params": True, "dropout": True}
                x, _ = nn.scan(block, variable_axes={"params": 0}, split_rngs=split, length=6)()(x, None)
            else:
                for _ in range(4):
                    x = block()(x)
            return nn.Dense(256)(nn.LayerNorm()(x))

    model, tokens = GPT(), jax.random.randint(KEY, (8, 64), 0, 256)

    def loss(p: Any, t: Any, key: Any) -> Any:
        logits = model.apply(p, t, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], t[:, 1:]).mean()

    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(1e-3, 100))
    )
    return _trained(loss, optimizer, model.init({"params": KEY, "dropout": KEY}, tokens), tokens, KEY)


def mlp(wrap: Wrap) -> Made:
    model = eqx.nn.MLP(32, 10, 256, 8, key=KEY)
    params, rest = eqx.partition(model, eqx.is_array)

    def loss(p: Any, x: Any) -> Any:
        labels, net = jnp.arange(len(x)) % 10, eqx.combine(p, rest)
        layer = wrap(lambda weight, bias, x: jax.nn.relu(x @ weight.T + bias))
        for row in net.layers[:-1]:
            x = layer(row.weight, row.bias, x)
        logits = jax.vmap(net.layers[-1])(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return _trained(loss, optax.lion(1e-4), params, jax.random.normal(KEY, (1024, 32)))


def lstm(wrap: Wrap) -> Made:
    cell, head = eqx.nn.LSTMCell(16, 64, key=KEY), eqx.nn.Linear(64, 1, key=KEY)
    params, rest = eqx.partition((cell, head), eqx.is_array)

    def loss(p: Any, x: Any) -> Any:
        cell, head = eqx.combine(p, rest)
        body = wrap(lambda h, x: (cell(x, h), None))

        def one(x: Any) -> Any:
            (h, _), _ = jax.lax.scan(body, (jnp.zeros(64), jnp.zeros(64)), x)
            return head(h)

        return ((jax.vmap(one)(x) - 1) ** 2).mean()

    return _trained(loss, optax.sgd(0.1, momentum=0.9), params, jax.random.normal(KEY, (32, 100, 16)))


def unet(wrap: Wrap) -> Made:
    class UNet(nnx.Module):
        def __init__(self, r: Any) -> None:
            self.a, self.b = nnx.Conv(3, 32, (3, 3), rngs=r), nnx.Conv(32, 64, (3, 3), strides=2, rngs=r)
            self.c, self.n = nnx.Conv(64, 64, (3, 3), rngs=r), nnx.GroupNorm(32, num_groups=8, rngs=r)
            self.d = nnx.ConvTranspose(64, 32, (2, 2), strides=2, rngs=r)
            self.e = nnx.Conv(64, 3, (3, 3), rngs=r)

        def __call__(self, x: Any) -> Any:
            a = wrap(lambda x: nnx.silu(self.n(self.a(x))))(x)
            b = wrap(lambda a: nnx.silu(self.c(nnx.silu(self.b(a)))))(a)
            return wrap(lambda a, b: self.e(jnp.concatenate([nnx.silu(self.d(b)), a], -1)))(a, b)

    definition, state = nnx.split(UNet(nnx.Rngs(0)))

    def loss(p: Any, x: Any) -> Any:
        return ((nnx.merge(definition, p)(x) - x) ** 2).mean()

    return _trained(loss, optax.adam(1e-3), state, jax.random.normal(KEY, (8, 32, 32, 3)))


def sharded(wrap: Wrap) -> Made:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    spec = jax.sharding.PartitionSpec

    def forward(w: Any, x: Any) -> Any:
        layer = wrap(lambda x, w: (x + jax.nn.gelu(x @ w), None))
        return jax.lax.psum((jax.lax.scan(layer, x, w)[0] ** 2).mean(), "data")

    loss = jax.shard_map(forward, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec())
    weights = 0.1 * jax.random.normal(KEY, (8, 128, 128))
    return _trained(loss, optax.adamw(1e-3), weights, jax.random.normal(KEY, (512, 128)))


STEPS: dict[str, Callable[[Wrap], Made]] = {
    "CNN (linen)": cnn,
    "GPT (linen)": lambda w: _gpt(w, scan=False),
    "GPT, nn.scan": lambda w: _gpt(w, scan=True),
    "GPT, nn.scan, nn.remat": lambda w: _gpt(w, scan=True, remat=True),
    "MLP (equinox)": mlp,
    "LSTM (equinox)": lstm,
    "U-Net (nnx)": unet,
    "shard_map, scan": sharded,
}


def _numbers(compiled: Any) -> tuple[int, int, float]:
    """Total bytes, temporaries, and floating-point operations, as XLA says."""
    m = compiled.memory_analysis()
    total = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
    return total, m.temp_size_in_bytes, float(compiled.cost_analysis()["flops"])


def _peers(make: Callable[[Wrap], Made], modules: bool) -> Iterator[tuple[str, int, int, float]]:
    for name in POLICIES:
        policy = getattr(jax.checkpoint_policies, name)
        wrap = (
            (lambda f, p=policy: nn.remat(f, policy=p))
            if modules
            else (lambda f, p=policy: jax.checkpoint(f, policy=p))
        )
        step, args = make(wrap)
        lowered = jax.jit(step).lower(*args)
        yield name, *min(_numbers(lowered.compile(options)) for options in (None, MEMORY_FIRST))


def rows(name: str, budgets: list[str]) -> Iterator[dict[str, Any]]:
    make = STEPS[name]
    step, args = make(_plain)
    plain = jax.jit(step).lower(*args).compile()
    total, temporaries, flops = _numbers(plain)
    # Without the parameters: Adam's first step turns the noise of gradients that are nothing into whole steps.
    expected = jax.tree.leaves(plain(*args)[1:])

    def fitted(budget: str | int, called: str) -> dict[str, Any]:
        made = tightship.jax.fit(step, budget, cache=None)
        row: dict[str, Any] = {"step": name, "budget": called, "how": "fit"}
        began = time.process_time()
        try:
            fit = made.prepare(*args)
        except Infeasible as error:
            found = {"total": error.best_peak, "limit": error.budget, "flops": None, "met": False}
            found["temporaries"] = error.best_peak - total + temporaries
            took = time.process_time() - began
            return {**row, **found, "seconds": took, "beyond": took}
        took, got = time.process_time() - began, jax.tree.leaves(made(*args)[1:])
        close = all(np.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(got, expected, strict=True))
        return {
            **row, "total": fit.memory.total, "temporaries": fit.memory.temporaries, "limit": fit.budget,
            "flops": fit.operations / flops, "met": fit.memory.total <= fit.budget, "close": close,
            "programs": len(fit.tried), "seconds": took, "beyond": took - fit.compiling,
        }  # fmt: skip

    yield {
        "step": name, "budget": "", "how": "as it is", "total": total, "temporaries": temporaries, "flops": 1.0
    }  # fmt: skip
    known: list[int] = []
    for policy, found, temporary, counted in _peers(make, name.startswith(("CNN", "GPT"))):
        row = {"step": name, "budget": "", "how": policy, "total": found, "temporaries": temporary}
        yield {**row, "flops": counted / flops}
        if found < total and not any(abs(found - other) < 0.001 * found for other in known):
            known.append(found)
            mine = fitted(int(1.001 * found), f"{policy}'s")
            yield {**mine, "ahead": mine["met"] and mine["flops"] <= 1.002 * counted / flops}
    for budget in budgets:
        yield fitted(budget, budget)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names of steps, with commas; parts of them will do")
    parser.add_argument("--budgets", default="static+80%,static+60%,static+40%,static+35%")
    parser.add_argument("--read", nargs="*", type=Path, default=[], help="files of rows, instead of a run")
    parser.add_argument("--json", action="store_true", help="a row in each line")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    o = parser.parse_args()
    wanted = [n for n in STEPS if not o.only or any(part in n for part in o.only.split(","))]
    found = []
    for path in o.read:
        found += map(json.loads, path.read_text().splitlines())
    found.sort(key=lambda row: list(STEPS).index(row["step"]))
    for name in wanted if not o.read else ():
        for row in rows(name, o.budgets.split(",")):
            found.append(row)
            print(json.dumps(row) if o.json else row, flush=True)
    head = [
        "step",
        "how",
        "budget",
        "temporaries",
        "total",
        "operations",
        "programs",
        "seconds of the processor",
        "beyond the compile of the program that runs",
    ]
    cells = [
        [
            r["step"], r["how"], r["budget"], f"{r['temporaries'] / 2**20:.2f}",
            f"{r['total'] / 2**20:.2f}" + ("" if r.get("met", True) else ", not met"),
            "" if r["flops"] is None else f"{r['flops']:.3f}", str(r.get("programs", "")),
            f"{r['seconds']:.0f}" if "seconds" in r else "",
            f"{r['beyond']:.1f}" if "beyond" in r else "",
        ]
        for r in found
    ]  # fmt: skip
    text = pages.table(head, ["---"] * 3 + ["---:"] * 6, cells)
    if not o.json:
        print(text)
    if o.write:
        pages.put(PAGE, BEGIN, END, text)


if __name__ == "__main__":
    main()
