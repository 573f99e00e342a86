"""Collectives that a step's own code calls, which write to what they are given (``torch.distributed.all_reduce``), as
functional ones, of which a plan knows what they ask for.

Autograd sees neither: a tensor that is reduced in place keeps the gradient that it had, as in eager. The bits are
those of the original: reductions are the same calls of the backend, and whatever else is sent moves bits.
"""

from __future__ import annotations

from typing import Any

import torch

from tightship.errors import Unsupported
from tightship.frontends.torch import compat_distributed

__all__ = ["functional"]

_ops = torch.ops._c10d_functional


def functional(fn: Any, args: tuple[Any, ...]) -> Any:
    """What an op of ``c10d`` returns, done by functional collectives. Raises ``Unsupported`` for what has no
    functional counterpart with the same bits on all ranks."""
    name = fn._schema.name.removeprefix("c10d::")
    lower = _LOWERED.get(name)
    if lower is None:
        raise Unsupported(
            f"{_CALLS.get(name, name)} inside of a step", "ranks would run other ops, or have other bits",
            "use collectives (all_reduce, all_gather, broadcast, all_to_all, …), or call it outside of the step",
        )  # fmt: skip
    out = lower(*args)
    work = compat_distributed.ended_work()
    return work if out is None else (out, work)


_CALLS = {
    "send": "torch.distributed.send", "recv_": "torch.distributed.recv",
    "recv_any_source_": "torch.distributed.recv", "barrier": "torch.distributed.barrier",
    "monitored_barrier_": "torch.distributed.monitored_barrier",
}  # fmt: skip


def _all_reduce(tensors: Any, group: Any, how: Any, sparse: Any = None, *_: Any) -> Any:
    if sparse is not None:
        raise Unsupported(
            "all_reduce of a sparse tensor inside of a step", "its bytes are more than one storage",
            "use dense tensors",
        )  # fmt: skip
    (tensor,) = tensors
    _ops.all_reduce_(tensor, compat_distributed.reduction_name(how), compat_distributed.name_of_group(group))
    return tensors


def _all_reduce_coalesced(tensors: Any, group: Any, how: Any, *_: Any) -> None:
    name, kind = compat_distributed.name_of_group(group), compat_distributed.reduction_name(how)
    _ops.all_reduce_coalesced_(tensors, kind, name)


def _reduce(tensors: Any, group: Any, how: Any, *_: Any) -> None:
    """All ranks have the sum: what those have for whom it is not meant is left open, and in gloo parts of it."""
    _all_reduce(tensors, group, how)


def _gather(outs: Any, given: Any, group: Any, root: int, *_: Any) -> None:
    """All ranks run what the one does for whom it is meant, so that they run the same ops."""
    size = compat_distributed.process_group(compat_distributed.name_of_group(group)).size()
    (part,) = given
    _all_gather(outs or [[torch.empty_like(part) for _ in range(size)]], given, group)


def _scatter(outs: Any, given: Any, group: Any, root: int, *_: Any) -> Any:
    """All ranks get the parts of all."""
    name = compat_distributed.name_of_group(group)
    ranks = compat_distributed.process_group(name)
    (out,) = outs
    rows = given[0] if given else [torch.empty_like(out) for _ in range(ranks.size())]
    whole = torch.stack([t.reshape(-1) for t in rows])
    _ops.broadcast_(whole, root, name)
    out.copy_(whole[ranks.rank()].view(out.shape))
    return outs


def _broadcast(tensors: Any, group: Any, root: int, *_: Any) -> Any:
    (tensor,) = tensors
    _ops.broadcast_(tensor, root, compat_distributed.name_of_group(group))
    return tensors


def _all_gather(outs: Any, given: Any, group: Any, *_: Any) -> Any:
    (rows,), (part,) = outs, given
    whole = _ops.all_gather_into_tensor(
        part.contiguous().unsqueeze(0), len(rows), compat_distributed.name_of_group(group)
    )
    for row, made in zip(rows, whole.unbind(), strict=True):
        row.copy_(made.view(row.shape))
    return outs


def _all_gather_base(out: Any, given: Any, group: Any, *_: Any) -> Any:
    size = out.numel() // max(given.numel(), 1)
    whole = _ops.all_gather_into_tensor(
        given.contiguous().unsqueeze(0), size, compat_distributed.name_of_group(group)
    )
    out.copy_(whole.view(out.shape))
    return out


def _reduce_scatter_base(out: Any, given: Any, group: Any, how: Any, *_: Any) -> Any:
    size = given.numel() // max(out.numel(), 1)
    name, kind = compat_distributed.name_of_group(group), compat_distributed.reduction_name(how)
    part = _ops.reduce_scatter_tensor(given.contiguous().view(size, -1), kind, size, name)
    out.copy_(part.view(out.shape))
    return out


def _all_to_all_base(out: Any, given: Any, group: Any, taken: Any, sent: Any, *_: Any) -> None:
    name = compat_distributed.name_of_group(group)
    size = compat_distributed.process_group(name).size()
    rows = given.shape[0] if given.dim() else 0
    sent, taken = sent or [rows // size] * size, taken or [out.shape[0] // size] * size
    out.copy_(_ops.all_to_all_single(given.contiguous(), taken, sent, name))


def _all_to_all(outs: Any, given: Any, group: Any, *_: Any) -> Any:
    row = torch.cat([t.reshape(-1) for t in given])
    taken, sent = ([t.numel() for t in tensors] for tensors in (outs, given))
    made = _ops.all_to_all_single(row, taken, sent, compat_distributed.name_of_group(group))
    for out, part in zip(outs, made.split(taken), strict=True):
        out.copy_(part.view(out.shape))
    return outs


_LOWERED = {
    "allreduce_": _all_reduce, "allreduce_coalesced_": _all_reduce_coalesced, "broadcast_": _broadcast,
    "allgather_": _all_gather, "_allgather_base_": _all_gather_base, "_reduce_scatter_base_": _reduce_scatter_base,
    "alltoall_base_": _all_to_all_base, "alltoall_": _all_to_all, "reduce_": _reduce, "gather_": _gather,
    "scatter_": _scatter,
}  # fmt: skip
