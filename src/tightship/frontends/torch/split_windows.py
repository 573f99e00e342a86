"""Which rows (indices of dimension 2) of its operands an op needs for rows of its result, and how a slice is called:
one table for convolutions, pooling, padding and whatever goes element by element. What is not in it ends a region.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tightship.analysis.patches import DIM, Take, Window
from tightship.frontends.torch.capture.lower import elementwise
from tightship.frontends.torch.program import Program, Ref, refs_in
from tightship.frontends.torch.split_rules import ELEMENTWISE, in_place, is_aten, name_of

__all__ = ["slice_args", "windows"]

aten = torch.ops.aten


@dataclass(frozen=True)
class _Rule:
    """``window``: from the arguments, shapes in the place of tensors, and the result's shape; None where it does not
    apply. ``args``: a slice's arguments from those of the whole. The first argument is cut."""

    window: Callable[[Sequence[Any], torch.Size], Window | None]
    args: Callable[[list[Any], Take], list[Any]]


def windows(program: Program, k: int) -> Mapping[int, Window] | None:
    """The windows of an op by the storages that it reads in rows; None where it cannot be computed in rows."""
    graph, call, op = program.graph, program.calls[k], program.graph.ops[k]
    values, storages = graph.values, graph.storages
    if op.random or op.effect or op.updates or k in program.replays or program.samples.get(k):
        return None
    if not is_aten(call.fn) or list(refs_in(call.kwargs)):
        return None
    made = [v for v in call.results if v >= 0 and storages[values[v].storage].size]
    written = [values[x.value].storage for x in call.args[:1] if isinstance(x, Ref)] if op.mutates else []
    if (written != list(op.mutates)) or (not made and not written) or (written and made):
        return None
    out = values[made[0]] if made else values[call.args[0].value]
    if len(out.shape) <= DIM:
        return None
    cut = _cut(program, k, torch.Size(out.shape))
    if cut is None:
        return None
    for v in cut:
        whole = program.bases[values[v].storage] == v
        if not whole and values[v].storage not in graph.static:
            return None
    every = list(refs_in(call.args))
    homes = {values[v].storage: window for v, window in cut.items()}
    return homes if all((values[v].storage in homes) == (v in cut) for v in every) else None


def _cut(program: Program, k: int, out: torch.Size) -> dict[int, Window] | None:
    """The windows of an op by the values that it reads in rows."""
    call, values = program.calls[k], program.graph.values
    name = name_of(call.fn)
    rule, shapes = _RULES.get(name), [_shape(program, x) for x in call.args]
    if rule is not None:
        window = rule.window(shapes, out) if isinstance(call.args[0], Ref) else None
        return None if window is None else {call.args[0].value: window}
    if not (elementwise(call.fn) or name in ELEMENTWISE or name == "cat" or in_place(call.fn)):
        return None
    if name == "cat" and (call.args[1] if len(call.args) > 1 else 0) % len(out) == DIM:
        return None
    cut = {}
    for v in refs_in(call.args):
        shape = values[v].shape
        own = DIM - len(out) + len(shape)
        if own >= 0 and shape[own] == out[DIM]:
            if own != DIM:
                return None
            cut[v] = Window(out[DIM], out[DIM])
    return cut or None


def slice_args(program: Program, k: int, args: list[Any], take: Take) -> list[Any]:
    """The arguments of a slice, in which tensors are cut already."""
    name = name_of(program.calls[k].fn)
    return _RULES[name].args(args, take) if name in _RULES else args


def _shape(program: Program, x: Any) -> Any:
    return torch.Size(program.graph.values[x.value].shape) if isinstance(x, Ref) else x


def _convolution(args: Sequence[Any], out: torch.Size) -> Window | None:
    shape, kernel, _, stride, padding, dilation, transposed = args[:7]
    if transposed or len(shape) != len(kernel) or len(shape) <= DIM:
        return None
    return Window(shape[DIM], out[DIM], kernel[DIM], stride[0], padding[0], padding[0], dilation[0])


def _padded(position: int) -> Callable[[list[Any], Take], list[Any]]:
    """Padding in the argument of that position, at both ends alike."""

    def args(given: list[Any], take: Take) -> list[Any]:
        if position < len(given):
            rest = list(given[position]) or [0]
            rest = rest * (given[0].dim() - DIM if len(rest) == 1 else 1)
            given[position] = [take.before, *rest[1:]]
        return given

    return args


def _pooling(dilates: bool) -> Callable[[Sequence[Any], torch.Size], Window | None]:
    def window(args: Sequence[Any], out: torch.Size) -> Window | None:
        shape, kernel = args[0], args[1]
        stride = args[2] if len(args) > 2 and args[2] else kernel
        padding = args[3] if len(args) > 3 else [0]
        dilation = args[4] if dilates and len(args) > 4 else [1]
        ceil = args[5 if dilates else 4] if len(args) > (5 if dilates else 4) else False
        if ceil or len(shape) != len(out) or len(shape) != len(kernel) + 2:
            return None
        return Window(shape[DIM], out[DIM], kernel[0], stride[0], padding[0], padding[0], dilation[0])

    return window


def _batch_norm(position: int | None) -> Callable[[Sequence[Any], torch.Size], Window | None]:
    """``position``: of the argument that says whether the batch's own statistics are used."""

    def window(args: Sequence[Any], out: torch.Size) -> Window | None:
        if (position is not None and args[position]) or len(out) <= DIM:
            return None
        return Window(out[DIM], out[DIM])

    return window


def _constant_pad(args: Sequence[Any], out: torch.Size) -> Window | None:
    place = 2 * (len(out) - 1 - DIM)
    before, after = (*args[1], *(0,) * (2 * len(out)))[place : place + 2]
    if before < 0 or after < 0:
        return None
    return Window(args[0][DIM], out[DIM], before=before, after=after, even=False)


def _constant_pad_args(given: list[Any], take: Take) -> list[Any]:
    place = 2 * (given[0].dim() - 1 - DIM)
    pads = [*given[1], *(0,) * max(0, place + 2 - len(given[1]))]
    pads[place : place + 2] = take.before, take.after
    given[1] = pads
    return given


def _dense(given: list[Any], take: Take) -> list[Any]:
    """Rows that lie apart go through another kernel, which gives other bits."""
    x = given[0]
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    if not x.is_contiguous() and not last:
        given[0] = aten.clone.default(x)
    return given


_RULES = {
    "convolution": _Rule(_convolution, _padded(4)),
    "max_pool2d_with_indices": _Rule(_pooling(True), _padded(3)),
    "max_pool3d_with_indices": _Rule(_pooling(True), _padded(3)),
    "avg_pool2d": _Rule(_pooling(False), _padded(3)),
    "avg_pool3d": _Rule(_pooling(False), _padded(3)),
    "native_batch_norm": _Rule(_batch_norm(5), _dense),
    "_native_batch_norm_legit": _Rule(_batch_norm(5), _dense),
    "_native_batch_norm_legit_no_training": _Rule(_batch_norm(None), _dense),
    "constant_pad_nd": _Rule(_constant_pad, _constant_pad_args),
}
