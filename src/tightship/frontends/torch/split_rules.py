"""Along which dimensions an op may be computed in slices, and how the results of its slices combine: one table.

An `Axis` of a call says which arguments are cut along which of their dimensions, which are given whole to every
slice, and for each result either the dimension along which the slices lie side by side, or `SUM`: the slices' results
add up to it. An op that is not in the table is never split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any, TypeVar

import torch

from tightship.frontends.torch import compat_ops
from tightship.frontends.torch.capture.lower import elementwise
from tightship.frontends.torch.capture.tape import TapeValue
from tightship.frontends.torch.program import Ref
from tightship.graph import Value

__all__ = [
    "ELEMENTWISE", "SUM", "Axis", "Place", "Shape", "added_wide", "axes", "cut_size", "from_behind", "in_place",
    "is_aten", "mapped", "merged", "merges", "most_index", "name_of",
]  # fmt: skip

SUM = -1
"""In the place of a result's dimension: the results of the slices add up to it."""

Shape = tuple[int, ...]

Place = int | tuple[int, int] | str
"""Of an argument: its position, one of a list's at a position (position, index), or its keyword."""


@dataclass(frozen=True)
class Axis:
    """``args``: the dimension along which the argument of a place is cut; others are the same for every slice.
    ``results``: by position, a dimension or `SUM`. ``sizes``: the argument that lists sizes, of which the one of
    this dimension is a slice's own (position, dimension); it may be a single size."""

    args: dict[Place, int]
    results: dict[int, int]
    sizes: tuple[int, int] | None = None
    counted: bool = field(default=False)
    """Of a loss: what the mean divides by is counted over the whole before the first slice."""
    normalizes: bool = field(default=False)
    """Of a batch norm: the results of its slices follow from what is added up over all of them (`split_norm`)."""
    merge: int = 1
    """So many dimensions, the first ones, are taken for one: dimensions are counted behind that (`merged`)."""
    coarse: dict[Place, int] = field(default_factory=dict)
    """Of arguments with one row for so many rows of that one: a slice is given the row that it lies in."""

    def row(self, place: Place, start: int, length: int) -> int:
        """The row of a coarse argument for a slice; ``ValueError`` where the slice needs several."""
        factor = self.coarse[place]
        if start // factor != (start + length - 1) // factor:
            raise ValueError("a slice needs several rows of what is the same for all of them")
        return start // factor


_Rule = Callable[[Sequence[Any], Sequence[Shape | None]], Iterator[Axis]]
"""From a call's arguments, with a `Shape` in the place of each tensor, and the shapes of its results."""


def is_aten(fn: Any) -> bool:
    """Whether the rules can know a call: not an update, a check, or an op under a grad mode of its own."""
    return isinstance(fn, torch._ops.OpOverload) and fn.namespace == "aten"


def name_of(fn: Any) -> str:
    """An op's name without namespace and overload."""
    return str(fn._schema.name.removeprefix("aten::"))


def axes(
    fn: Any, args: Sequence[Any], results: Sequence[Shape | None], kwargs: Mapping[str, Any] | None = None
) -> list[Axis]:
    """The ways in which a call may be cut. ``args`` have a ``torch.Size`` in the place of each tensor, as have
    ``kwargs``; ``results`` are the shapes of the results, None for what is no tensor."""
    if not is_aten(fn):
        return []
    name, named = name_of(fn), kwargs or {}
    if name in _NAMED:
        return list(_NAMED[name](args, results, named))
    if any(_is_shape(x) for x in named.values()):
        return []
    rule = _RULES.get(name)
    if rule is None and _each(fn):
        rule = _map
    return [] if rule is None else list(rule(args, results))


def _each(fn: Any) -> bool:
    """Whether an op maps element by element."""
    return elementwise(fn) or name_of(fn) in ELEMENTWISE or in_place(fn)


def mapped(
    args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[Place, Any], Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments, each put through ``change`` with its place; of lists that hold tensors, each of theirs."""

    def one(p: int, x: Any) -> Any:
        listed = isinstance(x, list | tuple) and not _is_shape(x)
        if listed and any(isinstance(y, Ref | Value | torch.Tensor | torch.Size) for y in x):
            return [change((p, j), y) for j, y in enumerate(x)]
        return change(p, x)

    return [one(p, x) for p, x in enumerate(args)], {n: change(n, x) for n, x in kwargs.items()}


def cut_size(sizes: Any, d: int, length: Callable[[int], int]) -> Any:
    """An argument that lists sizes, or is one, with that of a slice for dimension ``d``."""
    if isinstance(sizes, int):
        return length(sizes)
    return [length(n) if e == d else n for e, n in enumerate(sizes)]


# --- several dimensions as one ---

_ALONG = {
    "_softmax": 1, "_log_softmax": 1, "_safe_softmax": 1,
    "_softmax_backward_data": 2, "_log_softmax_backward_data": 2,
    "native_layer_norm": -1, "native_layer_norm_backward": -1,
}  # fmt: skip
"""Ops besides the elementwise ones to which the first dimensions are one, and the argument that names a dimension."""


def merges(
    fn: Any, args: Mapping[Place, Any], lead: int, dims: int, *, fine: bool
) -> dict[Place, int] | None:
    """Whether the first ``lead`` of ``dims`` dimensions may be taken for one in all arguments, by their place, with
    values for tensors: scores of images and heads of attention are so cut into those of each head. None if not, or
    the arguments of which several rows need the same, as an `Axis` has them: if ``fine``, those that are broadcast
    along the last of these dimensions."""
    along = 0 if _each(fn) else _ALONG.get(name_of(fn))
    if along is None or (along > 0 and args[along] % dims < lead):
        return None
    if along < 0 and dims - len(args[1 if name_of(fn) == "native_layer_norm" else 2]) < lead:
        return None
    given = {p: x for p, x in args.items() if isinstance(x, Value) and len(x.shape) > dims - lead}
    if any(len(x.shape) != dims for x in given.values()):
        return None
    full = next((x.shape[:lead] for x in given.values() if _varies(x, lead) == lead), None)
    coarse = dict[Place, int]()
    for p, x in given.items():
        varies = _varies(x, lead)
        if full is None or varies is None or x.shape[:varies] != full[:varies]:
            return None
        if 0 < varies < lead:
            coarse[p] = prod(full[varies:])
    return coarse if fine or not coarse else None


def _varies(x: Value | TapeValue, lead: int) -> int | None:
    """Along how many of the first dimensions a value is not broadcast, the others following; None if they do not."""
    same = [n == 1 or s == 0 for n, s in zip(x.shape[:lead], x.stride[:lead], strict=True)]
    if all(same):
        return 0
    last = lead - same[::-1].index(False)
    return (
        None if any(n > 1 and s == 0 for n, s in zip(x.shape[:last], x.stride[:last], strict=True)) else last
    )


_V = TypeVar("_V", Value, TapeValue)


def merged(x: _V, lead: int, dims: int) -> _V | None:
    """A value of ``dims`` dimensions with the first ``lead`` as one, others as they are; None where its strides do
    not allow that. What is broadcast has a row for each that differs."""
    if lead == 1 or len(x.shape) < dims:
        return x
    own = [(n, s) for n, s in zip(x.shape[:lead], x.stride[:lead], strict=True) if n > 1 and s != 0]
    if any(s != m * t for (_, s), (m, t) in pairwise(own)):
        return None
    stride = own[-1][1] if own else 0
    return replace(x, shape=(prod(n for n, _ in own), *x.shape[lead:]), stride=(stride, *x.stride[lead:]))


def from_behind(fn: Any, args: Sequence[Any], dims: int) -> list[Any]:
    """Arguments for tensors whose first dimensions are one: the dimension that is named, counted from the last."""
    along = 0 if _each(fn) else _ALONG[name_of(fn)]
    return [x % dims - dims if along > 0 and p == along else x for p, x in enumerate(args)]


def added_wide(fn: Any, kwargs: Any, dtype: torch.dtype) -> bool:
    """Whether slices of a sum in 16 bits are computed and added in float32 and rounded once, as one kernel does."""
    return dtype in (torch.bfloat16, torch.float16) and not kwargs and fn in _WIDE


_WIDE = (
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.sum.default,
    torch.ops.aten.sum.dim_IntList,
)


def most_index(fn: Any, args: Sequence[Any], position: int) -> int:
    """How many different indices an integer argument may hold; 0 where it is no index. ``args`` as for `axes`."""
    name = name_of(fn)
    if name.startswith("nll_loss") and position == (1 if name.endswith("forward") else 2):
        scores = args[position - 1]
        return int(scores[1]) if len(scores) > 1 else int(scores[0])
    if name == "embedding" and position == 1:
        return int(args[0][0])
    if name == "gather" and position == 2:
        return int(args[0][args[1]])
    if name == "max_pool2d_with_indices_backward" and position == 7:
        return int(args[1][-1] * args[1][-2])
    return 0


def _is_shape(x: Any) -> bool:
    return isinstance(x, torch.Size)


def in_place(fn: Any) -> bool:
    """Whether an op maps its first argument element by element, in place."""
    written = compat_ops.written_arguments(fn)
    name = fn._schema.name
    if len(written) != 1 or written[0][0] != 0:
        return False
    return torch.Tag.pointwise in fn.tags or name in _ALSO_IN_PLACE


_ALSO_IN_PLACE = ("aten::copy_", "aten::fill_", "aten::zero_", "aten::masked_fill_")
ELEMENTWISE = (
    "clone", "_to_copy", "zeros_like", "ones_like", "empty_like", "full_like", "masked_fill",
    "native_dropout_backward",
)  # fmt: skip


def _map(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    """Element by element, with broadcasting."""
    shapes = {k: x for k, x in enumerate(args) if _is_shape(x)}
    out = results[0] if results and results[0] is not None else shapes.get(0)
    if out is None:
        return
    for d, n in enumerate(out):
        cut: dict[Place, int] = {}
        for k, shape in shapes.items():
            own = d - len(out) + len(shape)
            if own >= 0 and shape[own] == n and n > 1:
                cut[k] = own
        yield Axis(cut, {0: d})


def _mm(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    yield Axis({0: 0}, {0: 0})
    yield Axis({1: 1}, {0: 1})
    yield Axis({0: 1, 1: 0}, {0: SUM})


def _addmm(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    out, bias = results[0], args[0]
    if out is None:
        return
    for d in range(2):
        own = d - 2 + len(bias)
        cut: dict[Place, int] = {0: own} if own >= 0 and bias[own] == out[d] and out[d] > 1 else {}
        yield Axis({**cut, 1 + d: d}, {0: d})


def _bmm(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    yield Axis({0: 0, 1: 0}, {0: 0})
    yield Axis({0: 1}, {0: 1})
    yield Axis({1: 2}, {0: 2})
    yield Axis({0: 2, 1: 1}, {0: SUM})


def _rows(count: int, dim: int) -> _Rule:
    """Of an op that works along the dimension in argument ``dim``: cut along any other, in ``count`` arguments."""

    def rule(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
        along = args[dim] % max(1, len(args[0]))
        for d in range(len(args[0])):
            if d != along:
                yield Axis(dict.fromkeys(range(count), d), {0: d})

    return rule


def _reduction(sums: bool) -> _Rule:
    """Reductions over the dimensions in the second argument; ``sums``: those of slices add up."""

    def rule(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
        shape = args[0]
        given = args[1] if len(args) > 1 else None
        dims = [given] if isinstance(given, int) else list(given or range(len(shape)))
        gone = {d % max(1, len(shape)) for d in dims}
        keep = bool(args[2]) if len(args) > 2 else False
        for d in range(len(shape)):
            own = d if keep else d - sum(1 for g in gone if g < d)
            if d not in gone:
                yield Axis({0: d}, dict.fromkeys(range(len(results)), own))
            elif sums:
                yield Axis({0: d}, {0: SUM})

    return rule


def _sum(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    for d in range(len(args[0])):
        yield Axis({0: d}, {0: SUM})


def _nll_loss(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    if len(args[0]) < 2:
        return
    if args[3] == 0:  # a loss for each
        for d, own in ((0, 0), *((d, d - 1) for d in range(2, len(args[0])))):
            yield Axis({0: d, 1: own}, {0: own, 1: SUM})
        return
    for d, own in ((0, 0), *((d, d - 1) for d in range(2, len(args[0])))):
        yield Axis({0: d, 1: own}, {0: SUM, 1: SUM}, counted=True)


def _nll_loss_backward(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    if len(args[1]) < 2:
        return
    for d, own in ((0, 0), *((d, d - 1) for d in range(2, len(args[1])))):
        each: dict[Place, int] = {0: own} if args[4] == 0 else {}
        yield Axis({1: d, 2: own, **each}, {0: d})


def _layer_norm(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    for d in range(len(args[0]) - len(args[1])):
        yield Axis({0: d}, {0: d, 1: d, 2: d})


def _layer_norm_backward(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    for d in range(len(args[1]) - len(args[2])):
        yield Axis({0: d, 1: d, 3: d, 4: d}, {0: d, 1: SUM, 2: SUM})


def _embedding(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    for d in range(len(args[1])):
        yield Axis({1: d}, {0: d})


def _gather(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    along = args[1] % max(1, len(args[0]))
    for d in range(len(args[0])):
        if d != along and args[0][d] == args[2][d]:
            yield Axis({0: d, 2: d}, {0: d})


def _slice_backward(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    along = args[2] % len(args[1])
    for d in range(len(args[1])):
        if d != along and len(args[0]) == len(args[1]):
            yield Axis({0: d}, {0: d}, sizes=(1, d))


def _select_backward(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    along = args[2] % len(args[1])
    for d in range(len(args[1])):
        if d != along:
            yield Axis({0: d - (d > along)}, {0: d}, sizes=(1, d))


def _factory(position: int) -> _Rule:
    """New tensors of sizes that are an argument."""

    def rule(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
        for d in range(len(args[position])):
            yield Axis({}, {0: d}, sizes=(position, d))

    return rule


def _cat(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    parts = args[0]
    along = (args[1] if len(args) > 1 else 0) % max(1, len(parts[0]))
    for d in range(len(parts[0])):
        if d != along and all(_is_shape(x) and len(x) == len(parts[0]) for x in parts):
            yield Axis({(0, j): d for j in range(len(parts))}, {0: d})


def _images(cut: Sequence[int], results: Sequence[int], sizes: int | None = None) -> _Rule:
    """Of an op that treats what lies along the first dimension independently: these of its arguments are cut along
    it, and the results; argument ``sizes`` has its size."""

    def rule(args: Sequence[Any], shapes: Sequence[Shape | None]) -> Iterator[Axis]:
        own = None if sizes is None else (sizes, 0)
        yield Axis(dict.fromkeys(cut, 0), dict(enumerate(results)), sizes=own)

    return rule


def _pad(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    for d in range(len(args[0]) - len(args[1]) // 2):
        yield Axis({0: d}, {0: d})


def _attention(
    args: Sequence[Any], results: Sequence[Shape | None], kwargs: Mapping[str, Any]
) -> Iterator[Axis]:
    """By images, heads, and queries where none of them is masked by its place."""
    if args[3:4] and args[3]:
        return
    for d, cut in _attended(args[0], args[1:3], bool(args[4:5] and args[4])):
        yield from _masked(Axis({0: d, **{1 + p: d for p in cut}}, {0: d, 1: d}), d, args[0], kwargs)


def _attention_backward(
    args: Sequence[Any], results: Sequence[Shape | None], kwargs: Mapping[str, Any]
) -> Iterator[Axis]:
    if args[6]:
        return
    for d, cut in _attended(args[1], args[2:4], bool(args[7])):
        own: dict[Place, int] = {0: d, 1: d, 4: d, 5: d, **{2 + p: d for p in cut}}
        keys = d if cut else SUM
        yield from _masked(Axis(own, {0: d, 1: keys, 2: keys}), d, args[1], kwargs)


def _attended(query: Shape, others: Sequence[Shape], causal: bool) -> Iterator[tuple[int, Sequence[int]]]:
    """Dimensions of attention, and which of keys and values are cut along them."""
    for d in (0, 1):
        if all(x[d] == query[d] for x in others):
            yield d, (0, 1)
    if not causal:
        yield 2, ()


def _masked(axis: Axis, d: int, query: Shape, kwargs: Mapping[str, Any]) -> Iterator[Axis]:
    """The axis, with the mask cut where it is not the same for all."""
    mask = kwargs.get("attn_mask")
    if mask is None:
        yield axis
    else:
        own = d - 4 + len(mask)
        cut: dict[Place, int] = {"attn_mask": own} if own >= 0 and mask[own] == query[d] > 1 else {}
        yield replace(axis, args=axis.args | cut)


def _convolution(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    yield Axis({0: 0}, {0: 0})


def _convolution_backward(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    yield Axis({0: 0, 1: 0}, {0: 0, 1: SUM, 2: SUM})


def _batch_norm(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    if args[5]:
        yield Axis({0: 0}, {0: 0, 1: SUM, 2: SUM}, normalizes=True)


def _batch_norm_backward(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    if args[7]:
        yield Axis({0: 0, 1: 0}, {0: 0, 1: SUM, 2: SUM}, normalizes=True)


_RULES: dict[str, _Rule] = {
    "mm": _mm,
    "addmm": _addmm,
    "bmm": _bmm,
    "_softmax": _rows(1, 1),
    "_log_softmax": _rows(1, 1),
    "_softmax_backward_data": _rows(2, 2),
    "_log_softmax_backward_data": _rows(2, 2),
    "_safe_softmax": _rows(1, 1),
    "logsumexp": _reduction(False),
    "sum": lambda args, results: (_reduction(True) if len(args) > 1 else _sum)(args, results),
    "mean": lambda args, results: _reduction(False)(args, results) if len(args) > 1 and args[1] else iter(()),
    "amax": _reduction(False),
    "amin": _reduction(False),
    "nll_loss_forward": _nll_loss,
    "nll_loss2d_forward": _nll_loss,
    "nll_loss_backward": _nll_loss_backward,
    "nll_loss2d_backward": _nll_loss_backward,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "embedding": _embedding,
    "gather": _gather,
    "slice_backward": _slice_backward,
    "select_backward": _select_backward,
    "zeros": _factory(0),
    "ones": _factory(0),
    "full": _factory(0),
    "new_zeros": _factory(1),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "cat": _cat,
    "constant_pad_nd": _pad,
    "native_group_norm": _images((0,), (0, 0, 0), sizes=3),
    "native_group_norm_backward": _images((0, 1, 2, 3), (0, SUM, SUM), sizes=5),
    "max_pool2d_with_indices": _images((0,), (0, 0)),
    "max_pool2d_with_indices_backward": _images((0, 1, 7), (0,)),
    "avg_pool2d": _images((0,), (0,)),
    "avg_pool2d_backward": _images((0, 1), (0,)),
    "_adaptive_avg_pool2d": _images((0,), (0,)),
    "_adaptive_avg_pool2d_backward": _images((0, 1), (0,)),
    "upsample_nearest2d": _images((0,), (0,)),
    "upsample_nearest2d_backward": _images((0,), (0,), sizes=2),
    "upsample_bilinear2d": _images((0,), (0,)),
    "upsample_bilinear2d_backward": _images((0,), (0,), sizes=2),
}
"""Matrix products along rows, columns and what is summed; reductions and softmax along what they do not reduce;
losses over what they are summed or averaged over."""

_NAMED: dict[str, Callable[[Sequence[Any], Sequence[Shape | None], Mapping[str, Any]], Iterator[Axis]]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
"""Those with tensors among their keywords."""
