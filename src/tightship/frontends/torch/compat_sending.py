"""Every touch of private interfaces that say among which ranks a graph of torch.compile is run: by collectives in it,
or by what sends around it (DistributedDataParallel, ``fully_shard``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule

from tightship.frontends.torch import compat_distributed, compat_dynamo
from tightship.frontends.torch.compiled_collectives import is_collective

__all__ = ["ranks_around", "ranks_around_module", "sent_by"]


def ranks_around(gm: GraphModule) -> tuple[int, ...]:
    """Ranks that run the Dynamo graph together, this one among them: those of the DistributedDataParallel and of the
    ``fully_shard`` whose forward passes are running, of its DTensors, and of its collectives."""
    return tuple(sorted({*_of_ddp(), *_of_fully_shard(), *_of_graph(gm)}))


def ranks_around_module(module: Any) -> tuple[int, ...]:
    """As `ranks_around`, where there is no graph of a module's frame yet, or it is no module's."""
    tensors = module.parameters() if isinstance(module, torch.nn.Module) else ()
    return tuple(sorted({*_of_ddp(), *_of_fully_shard(), *_of_dtensors(tensors)}))


def _of_ddp() -> list[int]:
    """A forward pass that is not trained sends nothing of its own accord but buffers: ranks may do it alone."""
    ddp = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if ddp is None or not torch.is_grad_enabled():
        return []
    return list(torch.distributed.get_process_group_ranks(ddp.process_group))


def _of_fully_shard() -> Iterator[int]:
    from torch.distributed._composable_state import _module_state_mapping as states

    for state in [s for reference in states.values() if (s := reference()) is not None]:
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups and getattr(state, "_training_state", None) is not None and _runs(state):
            for group in groups:
                yield from group.mesh_info.mesh.mesh.flatten().tolist()


def _runs(state: Any) -> bool:
    name: str = state._training_state.name
    return name == "FORWARD"


def _of_graph(gm: GraphModule) -> Iterator[int]:
    inputs = [compat_dynamo.example_of(n) for n in gm.graph.find_nodes(op="placeholder")]
    yield from _of_dtensors(x for x in inputs if x is not None)
    for n in gm.graph.nodes:
        if n.op == "call_function" and compat_distributed.is_collective(n.target):
            names = [x for x in (*n.args, *n.kwargs.values()) if isinstance(x, str)]
            for name in filter(compat_distributed.is_group, names):
                group = compat_distributed.process_group(name)
                yield from torch.distributed.get_process_group_ranks(group)


def _of_dtensors(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    for t in tensors:
        if (layout := compat_distributed.layout_of(t)) is not None:
            yield from layout.device_mesh.mesh.flatten().tolist()


def sent_by(graph: GraphModule) -> list[str]:
    """What a traced graph sends, in order: each collective with the size and type of what it sends."""
    rows = []
    for n in graph.graph.nodes:
        if n.op != "call_function" or not is_collective(n.target):
            continue
        tensors = [x.meta.get("val") for x in n.all_input_nodes]
        given = [f"{list(t.shape)} {t.dtype}" for t in tensors if isinstance(t, torch.Tensor)]
        rows.append(f"{n.target} {' '.join(given)}")
    return rows
