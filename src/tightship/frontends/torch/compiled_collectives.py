"""Collectives as ops that a compiler calls as they are: each makes its result anew, of one tensor, and is complete
when it returns.

What several tensors send together is put into one row by ops that a compiler fuses. ``number`` says which of a
program's collectives an op is, so that ranks can compare in which order compiled code sends. Graphs that Dynamo finds
have functional collectives and ops that wait for them: `decompositions` makes ours of them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import distributed as dist

from tightship.errors import Unsupported
from tightship.frontends.torch import compat_distributed
from tightship.frontends.torch.collectives import Collective, collective

__all__ = [
    "NAMESPACE", "as_ops", "decompositions", "is_collective", "is_gather", "is_wait", "number_of", "sending_ops",
    "sends_by_itself",
]  # fmt: skip

NAMESPACE: Final = "tightship"


def _functional(name: str) -> Any:
    return collective(getattr(torch.ops._c10d_functional, name).default)


@functools.cache
def _ops() -> dict[str, Any]:
    """The ops, registered at first use."""

    @torch.library.custom_op(f"{NAMESPACE}::all_reduce", mutates_args=())
    def all_reduce(x: torch.Tensor, how: str, group: str, number: int) -> torch.Tensor:
        return _functional("all_reduce")(x, how, group)  # type: ignore[no-any-return]

    @torch.library.custom_op(f"{NAMESPACE}::broadcast", mutates_args=())
    def broadcast(x: torch.Tensor, source: int, group: str, number: int) -> torch.Tensor:
        return _functional("broadcast")(x, source, group)  # type: ignore[no-any-return]

    @torch.library.custom_op(f"{NAMESPACE}::all_gather", mutates_args=())
    def all_gather(x: torch.Tensor, size: int, group: str, number: int) -> torch.Tensor:
        return _functional("all_gather_into_tensor")(x, size, group)  # type: ignore[no-any-return]

    @torch.library.custom_op(f"{NAMESPACE}::reduce_scatter", mutates_args=())
    def reduce_scatter(x: torch.Tensor, how: str, size: int, group: str, number: int) -> torch.Tensor:
        return _functional("reduce_scatter_tensor")(x, how, size, group)  # type: ignore[no-any-return]

    def like(x: torch.Tensor, *_: Any) -> torch.Tensor:
        return x.new_empty(x.shape)

    all_reduce.register_fake(like)
    broadcast.register_fake(like)
    all_gather.register_fake(lambda x, size, group, number: x.new_empty((x.shape[0] * size, *x.shape[1:])))
    reduce_scatter.register_fake(
        lambda x, how, size, group, number: x.new_empty((x.shape[0] // size, *x.shape[1:]))
    )
    names = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
    return {n: getattr(getattr(torch.ops, NAMESPACE), n).default for n in names}


def as_ops(fn: Collective) -> Callable[..., Any]:
    """What computes the same by ops for a compiler; its first argument is the op's number. Raises ``Unsupported`` for
    collectives that have none."""
    way = _WAYS.get(fn.name)
    if way is None:
        raise Unsupported(
            f"the collective {fn.fn} in compiled mode",
            "no op of it makes its result anew",
            'use mode="exact"',
        )
    return functools.partial(way, _ops())


def decompositions() -> dict[Any, Any]:
    """What the functional collectives of one graph, which is traced meanwhile, are made of: ops of ours, numbered as
    they come. They are complete when they return: what is left to wait for was sent before the graph. Nothing without
    ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    functional, numbers = torch.ops._c10d_functional, itertools.count()
    complete: list[torch.Tensor] = []

    def numbered(fn: Collective) -> Callable[..., Any]:
        def send(*args: Any) -> Any:
            sent = as_ops(fn)(next(numbers), *args)
            complete.extend(sent if isinstance(sent, (list, tuple)) else [sent])
            return sent

        return send

    def wait(x: torch.Tensor) -> Any:
        return x if any(x is t for t in complete) else NotImplemented

    names = (name for name in _WAYS if not name.endswith("_"))  # traced graphs have none that write in place
    made = {getattr(functional, n).default: numbered(_functional(n)) for n in names}
    return {**made, functional.wait_tensor.default: wait}


def sends_by_itself(op: Any) -> bool:
    """Whether an op is a collective of PyTorch's, which sends whenever it runs."""
    return compat_distributed.is_collective(op) and not is_wait(op)


def sending_ops() -> tuple[Any, ...]:
    """All of the ops."""
    return tuple(_ops().values())


def is_gather(target: object) -> bool:
    """Whether an op, of ours or of PyTorch's, may run again, if all ranks do it."""
    return str(target) in _GATHERS


_GATHERS: Final = (
    f"{NAMESPACE}.all_gather.default",
    "_c10d_functional.all_gather_into_tensor.default",
    "_c10d_functional.all_gather_into_tensor_coalesced.default",
)


def is_wait(target: object) -> bool:
    """Whether an op waits for a collective, whose result it hands on."""
    return str(target) == "_c10d_functional.wait_tensor.default"


def is_collective(target: object) -> bool:
    """Whether an op, of ours or of PyTorch's, sends."""
    ours = getattr(target, "namespace", "") == NAMESPACE and getattr(target, "_opname", "") in _ops()
    return ours or sends_by_itself(target)


def number_of(op: Any, args: Sequence[Any]) -> int | None:
    """Which of a program's collectives an op is; None for other ops."""
    name = getattr(op, "_opname", "")
    if getattr(op, "namespace", "") != NAMESPACE or name not in _ops():
        return None
    return int(args[-1])


# --- each of them ---


def _all_reduce(ops: Any, number: int, x: Any, how: str, group: str) -> Any:
    return ops["all_reduce"](x.contiguous(), how, group, number)


def _all_reduce_into(ops: Any, number: int, x: Any, how: str, group: str) -> Any:
    return x.copy_(_all_reduce(ops, number, x, how, group))


def _all_reduce_together(ops: Any, number: int, xs: Sequence[Any], how: str, group: str) -> list[Any]:
    row = ops["all_reduce"](torch.cat([x.reshape(-1) for x in xs]), how, group, number)
    parts = row.split([x.numel() for x in xs])
    return [part.view(x.shape) for x, part in zip(xs, parts, strict=True)]


def _all_reduce_together_into(ops: Any, number: int, xs: Sequence[Any], how: str, group: str) -> list[Any]:
    made = _all_reduce_together(ops, number, xs, how, group)
    return [x.copy_(new) for x, new in zip(xs, made, strict=True)]


def _broadcast(ops: Any, number: int, x: Any, source: int, group: str) -> Any:
    return ops["broadcast"](x.contiguous(), source, group, number)


def _broadcast_into(ops: Any, number: int, x: Any, source: int, group: str) -> Any:
    return x.copy_(_broadcast(ops, number, x, source, group))


def _all_gather(ops: Any, number: int, x: Any, size: int, group: str) -> Any:
    x = x.contiguous()
    return ops["all_gather"](x if x.dim() else x.view(1), size, group, number)


def _all_gather_together(ops: Any, number: int, xs: Sequence[Any], size: int, group: str) -> list[Any]:
    row = ops["all_gather"](torch.cat([x.reshape(-1) for x in xs]), size, group, number)
    parts = row.view(size, -1).split([x.numel() for x in xs], 1)
    shapes = [(x.shape[0] * size, *x.shape[1:]) if x.dim() else (size,) for x in xs]
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _reduce_scatter(ops: Any, number: int, x: Any, how: str, size: int, group: str) -> Any:
    return ops["reduce_scatter"](x.contiguous(), how, size, group, number)


def _reduce_scatter_together(
    ops: Any, number: int, xs: Sequence[Any], how: str, size: int, group: str
) -> list[Any]:
    """One row for each rank: what it gets of each tensor."""
    rows = torch.cat([x.reshape(size, -1) for x in xs], 1)
    own = ops["reduce_scatter"](rows, how, size, group, number).view(-1)
    shapes = [(x.shape[0] // size, *x.shape[1:]) for x in xs]
    parts = own.split([x.numel() // size for x in xs])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


_WAYS: Final[dict[str, Callable[..., Any]]] = {
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce_into,
    "all_reduce_coalesced": _all_reduce_together,
    "all_reduce_coalesced_": _all_reduce_together_into,
    "broadcast": _broadcast,
    "broadcast_": _broadcast_into,
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_coalesced": _all_gather_together,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_together,
}
