"""Whether a storage can be packed with a codec: its values are what the codec takes, and come back as they were.

Ranges are followed here apart from ``analysis.packing``: a planner's claim must not be its own proof.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from math import prod

from tightship.graph import Graph, Value, aligned
from tightship.machine import CODECS, INTEGERS, LOSSY
from tightship.verify.facts import Facts

__all__ = ["Codecs"]

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "int32": 4, "int16": 2}
_INDEX_OF_PLANE = {"max_pool2d_with_indices": 2, "adaptive_max_pool2d": 2, "max_pool3d_with_indices": 3}
_INDEX_OF_DIM = {"sort", "topk", "max", "min", "median", "mode", "kthvalue", "argsort"}
_INDEX_OF_ALL = {"argmax", "argmin"}
_INDEXED = {"embedding", "gather", "index_select"}
_SCALED = {"div_.Scalar", "mul_.Scalar", "div.Scalar", "mul.Scalar"}


def _aten(target: str) -> str:
    return target.removeprefix("aten.") if target.startswith("aten.") else ""


class Codecs:
    """``fault(s, codec, nbytes)`` says why a packed form of storage ``s`` is not one; nothing if it is."""

    def __init__(self, graph: Graph, facts: Facts) -> None:
        self.graph, self.facts = graph, facts
        self._two_values, self._tops = cache(self._drawn), cache(self._limits)  # asked more than once
        self.values: dict[int, list[Value]] = defaultdict(list)
        for v in graph.values:
            self.values[v.storage].append(v)
        self.writers: dict[int, list[int]] = defaultdict(list)
        self.readers: dict[int, list[int]] = defaultdict(list)
        for k in range(len(graph.ops)):
            for s in (*facts.makes[k], *facts.writes[k]):
                self.writers[s].append(k)
            for s in facts.sees[k]:
                self.readers[s].append(k)

    def fault(self, s: int, codec: str, nbytes: int, lossy: bool) -> str:
        if codec not in CODECS:
            return f"a codec is one of {', '.join(CODECS)}, not {codec!r}"
        if codec in LOSSY and not lossy:
            return f"{codec} does not give back the same bits, and the plan allows no such codec"
        kinds = {v.dtype for v in self.values[s]}
        kind = kinds.pop() if len(kinds) == 1 else ""
        count = max((_extent(v) for v in self.values[s]), default=0)
        per_item = {"bits": "bool", "bf16": "float32"}.get(codec)
        if (per_item and kind != per_item) or not count:
            return f"{codec} packs {per_item or 'numbers'}"
        if codec in ("bits", "mask"):
            number = 0 if codec == "bits" else _BYTES.get(kind, 0)
            size = -(-count // 8) + number
            if codec == "mask" and not ("float" in kind and self._two_values(s, 0)):
                return "nothing says that it holds zeros and one other number only"
        else:
            bits = 16 if codec == "bf16" else INTEGERS[codec][0]
            size = -(-count * bits // 8)
            if codec != "bf16" and not (kind.startswith("int") and self._within(s, codec)):
                return f"nothing says that it is of integers within {codec}"
        whole = aligned(size, self.facts.alignment)
        if nbytes != whole:
            return f"{codec} packs it to {whole} bytes, not {nbytes}"
        return ""

    def _drawn(self, s: int, depth: int) -> bool:
        """A draw of zeros and ones, perhaps scaled since."""
        drawn = False
        for k in self.writers[s]:
            op = self.graph.ops[k]
            name = _aten(op.target)
            if not op.inputs:
                drawn = False
            elif name.split(".")[0] in ("bernoulli", "bernoulli_"):
                drawn = name.startswith("bernoulli.") or self._whole(s, op.inputs[0])
            elif name in _SCALED and name[3] == ".":
                source = self.graph.values[op.inputs[0]].storage
                drawn = depth < 8 and source != s and self._two_values(source, depth + 1)
            elif name not in _SCALED or not self._whole(s, op.inputs[0]):
                drawn = False
        return drawn

    def _whole(self, s: int, value: int) -> bool:
        shape, extent = self.graph.values[value].shape, max(_extent(v) for v in self.values[s])
        return self.graph.values[value].storage == s and prod(shape) == extent

    def _within(self, s: int, codec: str) -> bool:
        _, _, most = INTEGERS[codec]
        return any(top <= most + 1 for top in self._tops(s, 0))

    def _limits(self, s: int, depth: int) -> frozenset[int]:
        """Numbers that everything in ``s`` is below (and at least 0), each for a reason."""
        graph, tops = self.graph, list[int]()
        if depth > 8 or len(self.writers[s]) > 1 or (s in self.facts.static and self.writers[s]):
            return frozenset()
        for k in self.writers[s]:
            op = graph.ops[k]
            name = _aten(op.target).split(".")[0]
            if not op.inputs:
                continue
            shape = graph.values[op.inputs[0]].shape
            if name in _INDEX_OF_PLANE:
                tops.append(prod(shape[-_INDEX_OF_PLANE[name] :]))
            elif name in _INDEX_OF_DIM:
                tops.append(max(shape, default=1))
            elif name in _INDEX_OF_ALL:
                tops.append(prod(shape))
            elif name in ("clone", "_to_copy"):
                tops += self._tops(graph.values[op.inputs[0]].storage, depth + 1)
        for k in self.readers[s]:
            op = graph.ops[k]
            name, inputs = _aten(op.target).split(".")[0], [graph.values[v] for v in op.inputs]
            if name not in _INDEXED or len(inputs) != 2 or not inputs[0].shape:
                continue
            if inputs[1].storage == s and inputs[0].storage != s:
                same = prod(inputs[1].shape) == max(_extent(v) for v in self.values[s])
                if same:  # every element is used as an index, so none lies outside
                    tops.append(
                        inputs[0].shape[0] if name == "embedding" else max(inputs[0].shape, default=1)
                    )
        return frozenset(tops)


def _extent(v: Value) -> int:
    """Elements of a storage that a value reaches over: side by side where no strides are known, 0 where strides and
    shape do not fit together."""
    if not v.stride:
        return v.offset + prod(v.shape) if 0 not in v.shape else 0
    if 0 in v.shape or len(v.shape) != len(v.stride):
        return 0
    return v.offset + 1 + sum((n - 1) * s for n, s in zip(v.shape, v.stride, strict=True))
