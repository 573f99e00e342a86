"""Random graphs, and random valid plans of them, for property tests.

Everything follows from a seed; the hypothesis strategies draw the seed and the number of ops, and so shrink
to small graphs.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from support.lowering import random_order, random_plan, random_steps
from tightship.graph import Graph, Op, Request, Storage, Value
from tightship.plan import Plan

__all__ = ["graphs", "plans", "random_graph", "random_order", "random_plan", "random_steps"]

LARGEST = 16
"""Sizes are up to this many times 64 bytes."""


class _Maker:
    """Ops appended one by one; any value made so far may be read."""

    def __init__(self, rng: random.Random, knobs: dict[str, Any]) -> None:
        self.rng, self.knobs = rng, knobs
        self.storages: list[Storage] = []
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.last_random = -1
        self.static: set[int] = set()

    def storage(self, name: str, kind: str = "activation") -> int:
        size = 0 if self.rng.random() < 0.03 else 64 * self.rng.randint(1, self.knobs["largest"])
        self.storages.append(Storage(name, size, kind))
        return len(self.storages) - 1

    def value(self, name: str, storage: int) -> int:
        kind, item = ("bool", 1) if storage % 3 == 0 else ("float32", 4)  # booleans can be packed
        self.values.append(Value(name, storage, kind, (self.storages[storage].size // item,), (1,)))
        return len(self.values) - 1

    def pick(self, most: int) -> tuple[int, ...]:
        """Values to read, mostly recent ones, so that chains appear; older ones make long live ranges."""
        n = len(self.values)
        near = lambda: max(0, n - 1 - int(self.rng.expovariate(0.4)))  # noqa: E731
        draw = lambda: self.rng.randrange(n) if self.rng.random() < 0.25 else near()  # noqa: E731
        return tuple(dict.fromkeys(draw() for _ in range(self.rng.randint(1, most))))

    def chance(self, knob: str) -> bool:
        return self.rng.random() < self.knobs[knob]

    def add(self, inputs: tuple[int, ...], outputs: tuple[int, ...], made: int, **fields: Any) -> None:
        k = len(self.ops)
        control = set(fields.pop("control", ()))
        if k and self.chance("control"):
            control.add(self.rng.randrange(k))
        scratch = self._scratch(outputs, made) if "workspace" not in fields else {}
        self.ops.append(
            Op(
                f"op{k}",
                "test",
                inputs,
                outputs,
                control=tuple(sorted(control)),
                time=float(self.rng.randint(1, 9)),
                source=f"model.py:{k}",
                **scratch,
                **fields,
            )
        )

    def _scratch(self, outputs: tuple[int, ...], made: int) -> dict[str, Any]:
        """A workspace as one number, or as the sequence of requests it comes from."""
        if not self.chance("workspace"):
            return {}
        size = 64 * self.rng.randint(1, self.knobs["largest"])
        new = list(dict.fromkeys(self.values[v].storage for v in outputs))
        if not made or not self.chance("requests"):
            return {"workspace": size}
        second = 64 * self.rng.randint(1, 4)
        rows = [Request(size, -1, 0, 2 + len(new)), Request(second, -1, 1 + len(new), 4 + len(new))]
        rows += [Request(self.storages[s].size, j, 1 + j, -1) for j, s in enumerate(new)]
        return {"workspace": size + second, "requests": tuple(rows)}

    def one(self) -> None:
        """One op of a random sort."""
        k, knobs = len(self.ops), self.knobs
        sorts = ("view", "inplace", "stats", "random", "effect", "calls", "plain")
        weights = [knobs[s] for s in sorts[:-1]]
        sort = self.rng.choices(sorts, [*weights, max(0.0, 1 - sum(weights))])[0]
        inputs = self.pick(3)
        first = self.values[inputs[0]].storage
        if sort == "view":
            self.add(inputs[:1], (self.value(f"v{k}", first),), 0, workspace=0)
        elif sort == "inplace" and (first not in self.static or knobs["static_writes"]):
            self.add(inputs, (self.value(f"m{k}", first),), 0, mutates=(first,))
        elif sort == "stats" and self.static:
            stat = self.rng.choice(sorted(self.static))
            keep = tuple(v for v in inputs if self.values[v].storage != stat)
            self.add(keep, self._new(k), 1, mutates=(stat,), updates=(stat,))
        elif sort == "random":
            chain = (self.last_random,) if self.last_random >= 0 else ()
            self.last_random = k
            self.add(inputs, self._new(k), 1, random=True, control=chain, state=64 * (k % 3))
        elif sort == "effect":
            self.add(inputs, self._new(k) if self.rng.random() < 0.5 else (), 1, effect=True)
        elif sort == "calls":
            called = random_graph(self.rng.randrange(1 << 30), self.rng.randint(1, 5), calls=0.0)
            self.add(inputs, self._new(k), 1, calls=(called,))
        elif self.chance("overwrites"):
            outputs, pairs = self._over(k, inputs)
            self.add(inputs, outputs, 1, overwrites=pairs)
        else:
            self.add(inputs, self._new(k), 1)

    def _over(self, k: int, inputs: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """New storages, the first of which may take the place of one of the inputs, or of any of them of its size."""
        outputs = self._new(k)
        made = list(dict.fromkeys(self.values[v].storage for v in outputs))
        read = list(dict.fromkeys(self.values[v].storage for v in inputs))
        size = self.storages[read[-1]].size
        for v in outputs:
            if self.values[v].storage == made[0]:
                value = self.values[v]
                self.values[v] = replace(value, shape=(size // (1 if value.dtype == "bool" else 4),))
        self.storages[made[0]] = replace(self.storages[made[0]], size=size)
        sizes = [s.size for s in self.storages]
        return outputs, tuple((a, b) for b in made for a in read if sizes[a] == sizes[b])

    def _new(self, k: int) -> tuple[int, ...]:
        """New storages, some with two values that alias one another."""
        count = 1 + (self.rng.random() < 0.25) + (self.rng.random() < 0.08)
        made = [self.storage(f"s{k}.{j}") for j in range(count)]
        extra = [made[0]] if self.rng.random() < 0.1 else []
        return tuple(self.value(f"o{k}.{j}", s) for j, s in enumerate([*made, *extra]))


def random_graph(seed: int, n_ops: int, **knobs: float) -> Graph:
    """A graph of ``n_ops`` ops (and a few updates of static inputs at its end).

    Knobs are probabilities: ``view``, ``inplace``, ``stats``, ``random``, ``effect``, ``calls`` (sorts of
    op), ``control``, ``workspace``, ``requests`` (features of an op); ``overwrites`` (of a plain op: a result may
    take an input's place); ``static_writes`` (0 or 1: in-place ops in the middle write the caller's storages
    too), ``updates`` (of each static input, at the end). ``largest``: sizes are up to this many times 64 bytes.
    """
    known = {
        "view": 0.1, "inplace": 0.12, "stats": 0.05, "random": 0.06, "effect": 0.03, "calls": 0.03,
        "control": 0.05, "workspace": 0.3, "requests": 0.5, "overwrites": 0.4, "static_writes": 0.0, "updates": 0.5,
        "largest": LARGEST,
    }  # fmt: skip
    assert set(knobs) <= set(known), f"knobs are {sorted(known)}"
    m = _Maker(random.Random(seed), known | knobs)
    inputs = []
    for j in range(m.rng.randint(1, 4)):
        s = m.storage(f"in{j}", m.rng.choice(("parameter", "input", "buffer")))
        m.static.add(s)
        inputs.append(m.value(f"in{j}", s))
    for _ in range(n_ops):
        m.one()
    for v in inputs:
        if m.chance("updates"):
            m.add((v, *m.pick(1)), (), 0, mutates=(m.values[v].storage,), phase="update", workspace=0)
    last = len(m.values) - 1
    outputs = dict.fromkeys([last, *m.rng.choices(range(len(m.values)), k=m.rng.randint(0, 2))])
    return Graph(
        tuple(m.ops),
        tuple(m.values),
        tuple(m.storages),
        tuple(inputs),
        tuple(outputs),
        f"random-{seed}-{n_ops}",
    )


def graphs(max_ops: int = 40, **knobs: float) -> st.SearchStrategy[Graph]:
    seeds, sizes = st.integers(0, 2**32 - 1), st.integers(1, max_ops)
    return st.builds(lambda seed, n: random_graph(seed, n, **knobs), seeds, sizes)


def plans(max_ops: int = 40, **knobs: Any) -> st.SearchStrategy[tuple[Graph, Plan]]:
    """Pairs of a graph and a valid plan of it."""
    seeds = st.integers(0, 2**32 - 1)
    return st.builds(lambda g, seed: (g, random_plan(g, seed, **knobs)), graphs(max_ops), seeds)
