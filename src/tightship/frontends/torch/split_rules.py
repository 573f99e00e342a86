"""Along which dimensions an op may be computed in slices, and how the results of its slices combine: one table.

An `Axis` of a call says which arguments are cut along which of their dimensions, which are given whole to every
slice, and for each result either the dimension along which the slices lie side by side, or `SUM`: the slices' results
add up to it. An op that is not in the table is never split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tightship.frontends.torch import compat
from tightship.frontends.torch.capture.lower import elementwise

__all__ = ["ELEMENTWISE", "SUM", "Axis", "Shape", "added_wide", "axes", "in_place", "most_index", "name_of"]

SUM = -1
"""In the place of a result's dimension: the results of the slices add up to it."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """``args``: the dimension along which the argument of a position is cut; others are the same for every slice.
    ``results``: by position, a dimension or `SUM`. ``sizes``: the argument that lists sizes, of which the one of
    this dimension is a slice's own (position, dimension)."""

    args: dict[int, int]
    results: dict[int, int]
    sizes: tuple[int, int] | None = None
    counted: bool = field(default=False)
    """Of a loss: what the mean divides by is counted over the whole before the first slice."""


_Rule = Callable[[Sequence[Any], Sequence[Shape | None]], Iterator[Axis]]
"""From a call's arguments, with a `Shape` in the place of each tensor, and the shapes of its results."""


def name_of(fn: Any) -> str:
    """An op's name without namespace and overload."""
    return str(fn._schema.name.removeprefix("aten::"))


def axes(fn: Any, args: Sequence[Any], results: Sequence[Shape | None]) -> list[Axis]:
    """The ways in which a call may be cut. ``args`` have a ``torch.Size`` in the place of each tensor; ``results``
    are the shapes of the results, None for what is no tensor."""
    if not isinstance(fn, torch._ops.OpOverload) or fn.namespace != "aten":
        return []
    name = name_of(fn)
    rule = _RULES.get(name)
    if rule is None and (elementwise(fn) or name in ELEMENTWISE or in_place(fn)):
        rule = _map
    return [] if rule is None else list(rule(args, results))


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
    return 0


def _is_shape(x: Any) -> bool:
    return isinstance(x, torch.Size)


def in_place(fn: Any) -> bool:
    """Whether an op maps its first argument element by element, in place."""
    written = compat.written_arguments(fn)
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
        cut = {}
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
        cut = {0: own} if own >= 0 and bias[own] == out[d] and out[d] > 1 else {}
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
        each = {0: own} if args[4] == 0 else {}
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


def _convolution(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    yield Axis({0: 0}, {0: 0})


def _convolution_backward(args: Sequence[Any], results: Sequence[Shape | None]) -> Iterator[Axis]:
    yield Axis({0: 0, 1: 0}, {0: 0, 1: SUM, 2: SUM})


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
}
"""Matrix products along rows, columns and what is summed; reductions and softmax along what they do not reduce;
losses over what they are summed or averaged over."""
