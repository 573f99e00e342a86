"""What else would help when no plan meets a budget: with the bytes or the number it stands for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tightship.analysis.bounds import lower_bound
from tightship.errors import Least
from tightship.graph import Graph

__all__ = ["advice", "batch_of", "smaller_batch"]

_FILES = ("onnx", "tensorflow", "tflite")
"""Sources that have no factory to be asked for another batch."""


def batch_of(graph: Graph) -> int | None:
    """The size of the first dimension that most of the graph's inputs (of kind ``input``) share; None without."""
    sizes = [
        graph.values[v].shape[0]
        for v in graph.inputs
        if graph.values[v].shape and graph.storages[graph.values[v].storage].kind == "input"
    ]
    (best, _) = Counter(sizes).most_common(1)[0] if sizes else (0, 0)
    return best if best > 1 else None


def advice(graph: Graph, budget: int, at_peak: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    """What may help, most certain first. ``at_peak`` are the storages (below 0: workspace) that make up the least
    peak reached, and their bytes.

    That storages are moved or compressed is judged by a bound: no plan of that kind needs less (`remedies` tries).
    The batch is an estimate: see `smaller_batch`.
    """
    texts: list[str] = []
    everything = range(len(graph.storages))
    away = int(lower_bound(graph, least=dict.fromkeys(everything, 0)))
    if graph.static_bytes > budget:
        text = "nothing that a plan can do: parameters, state and inputs alone are {}"
        texts.append(Least(text, graph.static_bytes))
    elif away > budget:
        texts.append(Least("no offloading: an op, or the step's results, with the static set are {}", away))
    else:
        texts.append(Least("offloading (allow=recompute,offload): no less than {} then", away))
        half = {s: x.size // 2 for s, x in enumerate(graph.storages) if s not in graph.static}
        packed = int(lower_bound(graph, least=half))
        if packed <= budget:
            text = "compression, to half the bytes where it is lossy: no less than {} then"
            texts.append(Least(text, packed))
    smaller, batch = smaller_batch(graph, budget, at_peak), batch_of(graph)
    if smaller:
        how = "" if graph.meta.get("source") in _FILES else " (--max-batch finds the largest)"
        texts.append(f"a smaller batch: about {smaller} instead of {batch}{how}")
    return tuple(texts)


def smaller_batch(graph: Graph, budget: int, at_peak: Iterable[tuple[int, int]]) -> int | None:
    """The batch whose least peak would be within the budget if everything grew with it but parameters, their state
    and their gradients; None if that is no smaller batch."""
    batch, storages = batch_of(graph), graph.storages
    static = sum(storages[s].size for s in graph.static if storages[s].kind != "input")
    gradients = {
        s
        for s in graph.kept - graph.static
        for w in graph.uses.writers[s]
        if graph.ops[w].phase == "backward"
    }
    whole = fixed = 0
    for s, nbytes in at_peak:
        whole += nbytes
        fixed += nbytes if s in gradients or (s in graph.static and storages[s].kind != "input") else 0
    if batch is None or whole <= fixed or static + sum(storages[s].size for s in gradients) > budget:
        return None
    smaller = batch * (budget - fixed) // (whole - fixed)
    return smaller if 1 <= smaller < batch else None
