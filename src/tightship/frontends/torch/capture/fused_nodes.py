"""Kinds of nodes of an fx graph, as a fusing compiler tells them apart."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from tightship.frontends.builder import trace_line
from tightship.frontends.torch import compat_compile, compat_inductor

__all__ = [
    "INDEXED", "arguments", "bytes_of", "is_created", "is_pointwise", "is_reduction", "lies_otherwise", "like",
    "masks_of", "place_of", "tensors_of",
]  # fmt: skip

_LIKE_POINTWISE = (
    "prims.convert_element_type.default", "prims.inductor_lookup_seed.default", "prims.inductor_random.default",
    "prims.inductor_lookup_seed", "prims.inductor_random", "inductor_lookup_seed", "inductor_random",
    "aten.clone.default", "aten.embedding.default", "aten.index.Tensor", "aten.gather.default",
    "aten.constant_pad_nd.default", "aten._to_copy.default",
)  # fmt: skip


INDEXED = (
    "aten.embedding.default", "aten.index.Tensor", "aten.gather.default", "aten.constant_pad_nd.default",
)  # fmt: skip
"""Of those, what reads elements at other places than it writes to."""


def is_created(n: Node) -> bool:
    return not n.all_input_nodes and not compat_inductor.draws(n) and not compat_compile.mutates(n)


def is_pointwise(n: Node) -> bool:
    if compat_inductor.draws(n) or compat_compile.mutates(n):
        return False
    return torch.Tag.pointwise in getattr(n.target, "tags", ()) or str(n.target) in _LIKE_POINTWISE


def lies_otherwise(n: Node) -> bool:
    """Whether a pointwise result does not lie in the order of its sizes: what Inductor makes of it by itself does,
    and is copied for each kernel of somebody else's that reads it through a view."""
    return is_pointwise(n) and any(t.dim() > 1 and not t.is_contiguous() for t in tensors_of(n))


def is_reduction(n: Node) -> bool:
    return torch.Tag.reduction in getattr(n.target, "tags", ()) or str(n.target).split(".")[1:2] in (
        ["sum"], ["mean"], ["amax"], ["amin"], ["var_mean"], ["var"], ["prod"], ["any"], ["argmax"], ["_softmax"],
    )  # fmt: skip


def tensors_of(n: Node) -> list[torch.Tensor]:
    val = n.meta.get("val")
    return [val] if isinstance(val, torch.Tensor) else []


def like(a: Node, b: Node) -> bool:
    """Whether two nodes' tensors are of one type and as many bytes."""
    rows = [[(t.dtype, bytes_of(t)) for t in tensors_of(n)] for n in (a, b)]
    return rows[0] == rows[1]


def lies_as(a: Node, b: Node) -> bool:
    """Whether the elements of ``a``, if it is of the shape of ``b``, lie in the order of those of ``b``. Where they
    do not, as of a matrix that is read transposed, code that computes ``b`` from it cannot write over it. Images may:
    whether their channels come last Inductor decides."""
    for x in tensors_of(a):
        for y in tensors_of(b):
            rows = zip(x.shape, x.stride(), y.stride(), strict=False)
            otherwise = x.shape == y.shape and any(n > 1 and s != r for n, s, r in rows)
            if otherwise and not (_is_image(x) and _is_image(y)):
                return False
    return True


def _is_image(t: torch.Tensor) -> bool:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(t.dim())
    return last is not None and (t.is_contiguous() or t.is_contiguous(memory_format=last))


def bytes_of(t: torch.Tensor) -> int:
    if not t.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return int((last + 1) * t.element_size())


def arguments(n: Node) -> tuple[Any, Any]:
    args, kwargs = torch.fx.node.map_arg((n.args, n.kwargs), lambda a: a.meta.get("val"))
    return args, kwargs


def place_of(n: Node) -> str:
    return trace_line(n.meta.get("stack_trace") or "") or n.name


def masks_of(late: set[Node], after: set[Node]) -> tuple[set[Node], set[Node]]:
    """What a backward pass (``late``) makes elementwise of the forward pass's values alone, and is smaller than they
    are: where a ReLU's result is positive takes a quarter of it, and can be saved in its place. And the nodes of the
    backward pass that such masks are made by, they among them. ``after``: what it makes of gradients. What draws
    random numbers, or may run once alone, stays where it is."""
    masks: set[Node] = set()
    early: set[Node] = set()
    for n in late:
        if n in after or not is_pointwise(n) or not _is_smaller(n):
            continue
        made_by: set[Node] = set()
        stack = [n]
        while stack:
            m = stack.pop()
            if m in late and m not in made_by:
                made_by.add(m)
                stack.extend(m.all_input_nodes)
        if not any(compat_inductor.runs_once(m) for m in made_by):
            masks.add(n)
            early |= made_by
    return masks, early


def _is_smaller(n: Node) -> bool:
    """Whether a node's tensor, of more than one element, is smaller than one that it is made of."""
    made = [t for t in tensors_of(n) if t.numel() > 1]
    read = [bytes_of(t) for a in n.all_input_nodes for t in tensors_of(a)]
    return bool(made and read) and bytes_of(made[0]) < max(read)
