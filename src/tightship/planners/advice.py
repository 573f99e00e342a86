"""What else would help when no plan meets a budget: with the bytes or the number it stands for."""

from __future__ import annotations

from collections import Counter

from tightship.analysis.bounds import lower_bound
from tightship.graph import Graph
from tightship.units import format_bytes

__all__ = ["advice", "batch_of"]


def batch_of(graph: Graph) -> int | None:
    """The size of the first dimension that most of the graph's inputs (of kind ``input``) share; None without."""
    sizes = [
        graph.values[v].shape[0]
        for v in graph.inputs
        if graph.values[v].shape and graph.storages[graph.values[v].storage].kind == "input"
    ]
    (best, _) = Counter(sizes).most_common(1)[0] if sizes else (0, 0)
    return best if best > 1 else None


def advice(graph: Graph, budget: int, best_peak: int) -> tuple[str, ...]:
    """What may help, most certain first. ``best_peak`` is the least peak that recomputation and order reached.

    That storages are moved or compressed is judged by a bound: no plan of that kind needs less. The batch is an
    estimate, linear in what is beyond the static set.
    """
    found = []
    everything = range(len(graph.storages))
    away = int(lower_bound(graph, least=dict.fromkeys(everything, 0)))
    if graph.static_bytes > budget:
        size = format_bytes(graph.static_bytes)
        return (f"nothing that a plan can do: parameters, state and inputs alone are {size}",)
    if away > budget:
        found.append(
            f"no offloading: an op, or the step's results, with the static set are {format_bytes(away)}"
        )
    else:
        found.append(f"offloading (allow=recompute,offload): no less than {format_bytes(away)} then")
        half = {s: x.size // 2 for s, x in enumerate(graph.storages) if s not in graph.static}
        packed = int(lower_bound(graph, least=half))
        if packed <= budget:
            text = (
                f"compression, to half the bytes where it is lossy: no less than {format_bytes(packed)} then"
            )
            found.append(text)
    batch, room = batch_of(graph), budget - graph.static_bytes
    used = best_peak - graph.static_bytes
    if batch is not None and used > 0:
        smaller = batch * room // used
        if 1 <= smaller < batch:
            found.append(
                f"a smaller batch: about {smaller} instead of {batch} (--max-batch finds the largest)"
            )
    return tuple(found)
