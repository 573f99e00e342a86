"""Joint graphs whose convolutions take less memory: the same ops in another form, which Inductor lowers otherwise.

A part of ``compat``, under the same rule as `compat_inductor`: private interfaces of one version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node

from tightship.frontends.torch.compat_compile import mutates
from tightship.frontends.torch.compat_inductor_lines import AS_IT_IS
from tightship.frontends.torch.compat_inductor_partitions import copied, turns_to_channels_last

__all__ = ["lean_convolutions"]

_GROUPS: Final = {
    torch.ops.aten.convolution.default: (8, 1),
    torch.ops.aten.convolution_backward.default: (9, 2),
}
"""Of each op: which argument is the number of groups, and how many of the first ones are images."""


def lean_convolutions(joint: GraphModule) -> tuple[GraphModule, bool]:
    """A copy of a joint graph, or of a whole step's, in which a convolution's gradients are computed one after the
    other, that of its weights first: the same kernels give the same numbers, but what was read for the first, and
    what it took, may be gone when the second is made. That of its images is a transposed convolution where it can be:
    it does not read them. Images lie in channels-last where Inductor has convolutions so, and what is computed from
    them with them: no kernel writes one layout while it reads another. And whether that is another graph: it is not
    where no gradient of images is computed."""
    made = copied(joint)
    found = [n for n in made.graph.nodes if n.target is torch.ops.aten.convolution_backward.default]
    found = [n for n in found if any(u.args[1] == 0 for u in n.users)]
    if not found:
        return made, False
    if turns_to_channels_last(made):
        _images_in_channels_last(made)
    _slices_by_themselves(made, found)
    for n in found:
        _one_after_the_other(made, n)
    made.graph.lint()
    made.recompile()
    return made, True


def _one_after_the_other(gm: GraphModule, whole: Node) -> None:
    *rest, mask = whole.args
    transposed = _transposed(whole)
    parts = {k: [u for u in whole.users if u.args[1] == k] for k in range(3)}
    for wanted in ((False, *mask[1:]), (True, False, False)):  # type: ignore[index]
        if not any(parts[k] for k in range(3) if wanted[k]):
            continue
        with gm.graph.inserting_before(whole):
            if wanted[0] and transposed is not None:
                one = gm.graph.call_function(torch.ops.aten.convolution.default, transposed)
                one.meta = {**whole.meta, "val": whole.meta["val"][0]}
                for part in parts[0]:
                    part.replace_all_uses_with(one)
                    gm.graph.erase_node(part)
                continue
            one = gm.graph.call_function(whole.target, (*rest, list(wanted)), whole.kwargs)  # type: ignore[arg-type]
        values = tuple(v if w else None for v, w in zip(whole.meta["val"], wanted, strict=True))
        one.meta = {**whole.meta, "val": values}
        for part in [u for k in range(3) if wanted[k] for u in parts[k]]:
            part.args = (one, part.args[1])
            one.append(part)
    gm.graph.erase_node(whole)


def _transposed(whole: Node) -> tuple[Any, ...] | None:
    """The arguments of the transposed convolution that is the gradient of the images by the same kernel: it does not
    read the images, so that these may be gone by then. None where it would be another kernel, or copy its result."""
    grad, image, weight, _, stride, padding, dilation, transposed, _, groups, _ = whole.args
    x, w, g = (n.meta["val"] for n in (image, weight, grad))  # type: ignore[union-attr]
    known = (
        x.dim() == 4
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and torch._C._get_mkldnn_enabled()
    )
    if not known or transposed or groups != 1 or tuple(w.shape[2:]) == (1, 1):
        return None
    rest = zip(x.shape[2:], g.shape[2:], w.shape[2:], stride, padding, dilation, strict=True)
    more = [size - ((out - 1) * s - 2 * p + d * (k - 1) + 1) for size, out, k, s, p, d in rest]
    return grad, weight, None, stride, padding, dilation, True, more, groups


def _slices_by_themselves(gm: GraphModule, gradients: Sequence[Node]) -> None:
    """Gives a tensor of its own to each part of such a gradient that is read later than another part: a gradient of
    concatenated images would stay whole until the last of them is reached."""
    place = {n: k for k, n in enumerate(gm.graph.nodes)}
    for whole in [u for n in gradients for u in n.users if u.args[1] == 0]:
        parts = [u for u in whole.users if u.target is torch.ops.aten.slice.Tensor and u.users]
        parts.sort(key=lambda u: min(place[x] for x in u.users))
        for part in parts[1:] if len(parts) == len(whole.users) else ():
            _copy_of(gm, part, part.users, part.meta["val"].clone())


def _images_in_channels_last(gm: GraphModule) -> None:
    """Has what convolutions read, of images that lie otherwise when they are made, read by all in channels-last.
    Gradients of grouped convolutions would take many times the workspace then."""
    images: dict[Node, None] = {}
    for n in gm.graph.nodes:
        groups, count = _GROUPS.get(n.target, (0, 0))
        if count and n.args[groups] == 1:
            images.update((x, None) for x in n.args[:count] if _lies_otherwise(x))
    for image in images:
        readers = [u for u in image.users if u.op != "output" and not mutates(u)]
        value = image.meta["val"].contiguous(memory_format=torch.channels_last)
        _copy_of(gm, image, readers, value, memory_format=torch.channels_last)


def _lies_otherwise(image: Any) -> bool:
    val = image.meta.get("val") if isinstance(image, Node) else None
    if not isinstance(val, torch.Tensor) or val.dim() != 4 or any(map(mutates, image.users)):
        return False
    fused = image.op == "placeholder" or torch.Tag.pointwise in getattr(image.target, "tags", ())
    return fused and not val.is_contiguous(memory_format=torch.channels_last)


def _copy_of(gm: GraphModule, node: Node, readers: Iterable[Node], value: torch.Tensor, **how: Any) -> None:
    """Has ``readers`` read a copy of a node that is a tensor of its own."""
    among = set(readers)
    first = node if node.op != "placeholder" else [*gm.graph.find_nodes(op="placeholder")][-1]
    with gm.graph.inserting_after(first):
        own = gm.graph.call_function(torch.ops.aten.clone.default, (node,), how)
    own.meta = {**node.meta, AS_IT_IS: True, "val": value}
    own.meta.pop("desc", None)
    node.replace_all_uses_with(own, delete_user_cb=lambda u: u in among)
