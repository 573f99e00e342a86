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

GATHER = "_c10d_functional.all_gather_into_tensor.default"
REDUCE = "_c10d_functional.all_reduce.default"

EVERYTHING: dict[str, float] = {
    "collective": 0.03, "gather": 0.04, "slices": 0.03, "streams": 0.03, "host": 0.03,
}  # fmt: skip
"""Knobs, 0 unless they are given, of what only some models have: collectives, ops in slices, streamed parameters,
storages of the host."""


class _Maker:
    """Ops appended one by one; any value made so far may be read."""

    def __init__(self, rng: random.Random, knobs: dict[str, Any], count: int) -> None:
        self.rng, self.knobs, self.count = rng, knobs, count
        self.storages: list[Storage] = []
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.last_random = -1
        self.static: set[int] = set()
        self.device, self.unit = ("cuda:0", 512) if knobs["cuda"] else ("cpu", 64)
        self.begin: list[int] = []
        self.away: dict[int, int] = {}  # what streams: value that was fetched, and the one in the pool

    def storage(self, name: str, kind: str = "activation") -> int:
        size = 0 if self.rng.random() < 0.03 else self.unit * self.rng.randint(1, self.knobs["largest"])
        pool = "host" if self.knobs["host"] and self.chance("host") else "device"
        self.storages.append(Storage(name, size, kind, pool))
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
        mirrored = [self._mirrored()] if self.knobs["mirror"] else []
        return tuple(dict.fromkeys([draw() for _ in range(self.rng.randint(1, most))] + mirrored))

    def _mirrored(self) -> int:
        """What a backward pass reads: the later the op, the earlier the value."""
        far = min(1.0, len(self.ops) / max(self.count, 1))
        return int(min(far, 1 - far) * (len(self.values) - 1)) if far > 0.5 else len(self.values) - 1

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
                fields.pop("target", "test"),
                inputs,
                outputs,
                control=tuple(sorted(control)),
                time=float(self.rng.randint(1, 9)),
                source=f"model.py:{k}",
                device=self.device,
                **scratch,
                **fields,
            )
        )

    def _scratch(self, outputs: tuple[int, ...], made: int) -> dict[str, Any]:
        """A workspace as one number, or as the sequence of requests it comes from."""
        if not self.chance("workspace"):
            return {}
        size = self.unit * self.rng.randint(1, self.knobs["largest"])
        new = list(dict.fromkeys(self.values[v].storage for v in outputs))
        if not made or not self.chance("requests"):
            return {"workspace": size}
        second = self.unit * self.rng.randint(1, 4)
        rows = [Request(size, -1, 0, 2 + len(new)), Request(second, -1, 1 + len(new), 4 + len(new))]
        rows += [Request(self.storages[s].size, j, 1 + j, -1) for j, s in enumerate(new)]
        return {"workspace": size + second, "requests": tuple(rows)}

    def one(self) -> None:
        """One op of a random sort."""
        k, knobs = len(self.ops), self.knobs
        sorts = ("view", "inplace", "stats", "random", "effect", "calls", *EVERYTHING, "plain")
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
            called = random_graph(
                self.rng.randrange(1 << 30), self.rng.randint(1, 5), calls=self.knobs["nested"]
            )
            self.add(inputs, self._new(k), 1, calls=(called,))
        elif sort == "collective":
            self.add(inputs, self._new(k), 1, effect=True, target=REDUCE)
        elif sort == "gather":
            made = (self.value(f"g{k}", self.storage(f"g{k}")),)
            self.ops.append(
                Op(
                    f"op{k}",
                    GATHER,
                    inputs[:1],
                    made,
                    time=float(self.rng.randint(1, 30)),
                    device=self.device,
                )
            )
        elif sort == "slices":
            self._slices(k, inputs)
        elif sort == "streams":
            self._streams(k)
        elif self.chance("overwrites"):
            outputs, pairs = self._over(k, inputs)
            self.add(inputs, outputs, 1, overwrites=pairs)
        else:
            self.add(inputs, self._new(k), 1)

    def _slices(self, k: int, inputs: tuple[int, ...]) -> None:
        """An op in slices: each reads a view of the first input, and all but the first write into what that made."""
        whole, first = self.storage(f"s{k}"), self.values[inputs[0]].storage
        for j in range(self.rng.randint(2, 3)):
            part = self.value(f"p{k}.{j}", first)
            self.add(inputs[:1], (part,), 0, workspace=0)
            result = (self.value(f"o{k}.{j}", whole),)
            if not j:
                self.add((part, *inputs[1:]), result, 1)
            else:
                self.add((part, *inputs[1:], len(self.values) - 3), result, 0, mutates=(whole,))

    def _streams(self, k: int) -> None:
        """A parameter that lies in a file or on the host: no bytes of it are there but between a fetch and its end,
        and what is updated goes back."""
        if self.away and self.rng.random() < 0.5:
            fetched, pool = self.rng.choice(sorted(self.away.items()))
            inside = self.values[pool].storage
            self.add((fetched, pool), (), 0, mutates=(inside,), phase="update", workspace=0)
            return
        if not self.away or self.rng.random() < 0.5:
            self.storages.append(Storage(f"away{k}", 0, "parameter"))
            self.static.add(len(self.storages) - 1)
            self.values.append(Value(f"away{k}", len(self.storages) - 1, "uint8", (0,), (1,)))
            self.begin.append(len(self.values) - 1)
            pool = len(self.values) - 1
        else:
            pool = self.rng.choice(list(self.away.values()))
        fetched = self.value(f"f{k}", self.storage(f"f{k}", "parameter"))
        self.add((pool,), (fetched,), 1, workspace=0)
        self.away[fetched] = pool

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
    too), ``updates`` (of each static input, at the end). ``largest``: sizes are up to this many times 64 bytes, or
    512 with ``cuda`` (0 or 1). ``nested``: ``calls`` of called graphs. ``mirror`` (0 or 1): the second half of the
    ops reads what the first half made, last made first. More sorts are in `EVERYTHING`.
    """
    known = {
        "view": 0.1, "inplace": 0.12, "stats": 0.05, "random": 0.06, "effect": 0.03, "calls": 0.03,
        "control": 0.05, "workspace": 0.3, "requests": 0.5, "overwrites": 0.4, "static_writes": 0.0, "updates": 0.5,
        "largest": LARGEST, "nested": 0.0, "cuda": 0, "mirror": 0, **dict.fromkeys(EVERYTHING, 0.0),
    }  # fmt: skip
    assert set(knobs) <= set(known), f"knobs are {sorted(known)}"
    m = _Maker(random.Random(seed), known | knobs, n_ops)
    inputs = m.begin
    for j in range(m.rng.randint(1, 4)):
        s = m.storage(f"in{j}", m.rng.choice(("parameter", "input", "buffer")))
        m.static.add(s)
        inputs.append(m.value(f"in{j}", s))
    for _ in range(n_ops):
        m.one()
    for v in [v for v in inputs if v not in m.away.values()]:
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
