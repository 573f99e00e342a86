"""Ops that a compiled step calls whole, through one op of ours: what no compiler knows of results is told.

Inductor takes an op's stand-in at its word: a recurrent layer has no workspace there, products of groups have no
single precision, and of sizes that numbers in tensors say nothing is known. A captured program knows what its results
look like, and compares in every step what data say of them. So the op of ours is told that, and runs the kernel that
eager runs. What that asks for is measured on what the program was captured of (`measured_on_samples`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import torch

from tightship.errors import Unsupported
from tightship.frontends.torch import compat
from tightship.frontends.torch.compat_ops import WithGradMode
from tightship.frontends.torch.program import Call, dtype_of, flat, map_tree, refs_in, substitute
from tightship.graph import Value

__all__ = ["Told", "called_whole", "is_whole", "measured_on_samples", "told_by"]

_ATEN: Final = torch.ops.aten
_AS_THEY_ARE: Final = (_ATEN.mkldnn_rnn_layer.default, _ATEN._grouped_mm.default)
_SHAPED_BY_DATA: Final = (
    _ATEN.nonzero.default, _ATEN.masked_select.default, _ATEN.repeat_interleave.Tensor, _ATEN._unique2.default,
    _ATEN.unique_consecutive.default, _ATEN.unique_dim.default, _ATEN.bincount.default, _ATEN._ctc_loss.Tensor,
    _ATEN._pack_padded_sequence.default,
)  # fmt: skip
_INDEXED: Final = (
    _ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default,
    _ATEN._unsafe_index_put.default,
)  # fmt: skip
_MASKS: Final = (torch.bool, torch.uint8)

Samples = Mapping[int, torch.Tensor]
Read = Callable[[int], torch.Tensor]


def _op(fn: Any) -> Any:
    return fn.fn if isinstance(fn, WithGradMode) else fn


def is_whole(fn: Any) -> bool:
    """Whether a program's call may be called whole."""
    return _op(fn) in (*_AS_THEY_ARE, *_SHAPED_BY_DATA, *_INDEXED)


def called_whole(
    call: Call, likes: Sequence[Value | None], told: Told, read: Read
) -> Callable[[], Any] | None:
    """What runs ``call`` on the tensors of ``read``, as ops to be compiled; None where Inductor has the op
    itself. ``likes``: the values that its results are, None where nobody needs one. ``told``: what is known of the
    contents of its arguments (`told_by`)."""
    fn = _op(call.fn)
    args, kwargs = substitute((call.args, call.kwargs), read)
    if fn in _INDEXED:
        return _by_masks(fn, call, args, kwargs, told)
    if fn is _ATEN._grouped_mm.default and args[0].dtype == torch.bfloat16:
        return None
    if fn not in (*_AS_THEY_ARE, *_SHAPED_BY_DATA) or (fn in _SHAPED_BY_DATA and not told.key):
        return None
    order = list(dict.fromkeys(refs_in((call.args, call.kwargs))))
    tensors = [read(v) for v in order]
    tree = substitute((call.args, call.kwargs), lambda v: _Place(order.index(v)))
    forms = [None if v is None else (dtype_of(v.dtype), v.shape, v.stride) for v in likes]
    return lambda: _whole(fn, tensors, tree, forms, told.key)


class _Place(int):
    """Stands for the tensor of that number in a call's arguments."""


_Form = tuple[torch.dtype, Sequence[int], Sequence[int]]


def _whole(
    fn: Any, tensors: list[torch.Tensor], tree: Any, forms: Sequence[_Form | None], key: int
) -> list[torch.Tensor | None]:
    given = json.dumps(map_tree(_to_json, tree))
    looks = json.dumps([f and (str(f[0]).removeprefix("torch."), *map(list, f[1:])) for f in forms])
    made = iter(_ours()(tensors, str(fn), given, looks, key))
    return [None if f is None else next(made) for f in forms]


def _to_json(x: Any) -> Any:
    if isinstance(x, _Place):
        return {"tensor": int(x)}
    if isinstance(x, torch.dtype):
        return {"dtype": str(x).removeprefix("torch.")}
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    raise Unsupported(
        f"{x!r} among the arguments of an op in compiled mode", "it cannot be written into code"
    )


@cache
def _ours() -> Any:
    def run(tensors: list[torch.Tensor], op: str, given: str, looks: str, key: int) -> list[torch.Tensor]:
        if _measuring and key:
            samples, at = _SAMPLES.get(key, ({}, {}))
            if not samples:
                raise RuntimeError(f"the data that {op} was captured of are gone")
            for place, k in at.items():
                tensors[place] = samples[k]
        args, kwargs = json.loads(given, object_hook=lambda x: _from_json(x, tensors))
        _, name, overload = op.split(".")
        with torch.enable_grad():
            made = flat(WithGradMode(getattr(getattr(_ATEN, name), overload))(*args, **kwargs))
        return [t.detach() for t, form in zip(made, json.loads(looks), strict=True) if form]

    def blank(tensors: list[torch.Tensor], op: str, given: str, looks: str, key: int) -> list[torch.Tensor]:
        return [
            torch.empty_strided(shape, stride, dtype=dtype_of(dtype), device=tensors[0].device)
            for dtype, shape, stride in filter(None, json.loads(looks))
        ]

    schema = "(Tensor[] tensors, str op, str given, str looks, int key) -> Tensor[]"
    made = torch.library.custom_op("tightship::whole", run, mutates_args=(), schema=schema)
    made.register_fake(blank)
    return made


def _from_json(x: Any, tensors: list[torch.Tensor]) -> Any:
    if "tensor" in x:
        return tensors[x["tensor"]]
    return dtype_of(x["dtype"]) if "dtype" in x else x


# --- masks ------------------------------------------------------------------------------------------------------


def _by_masks(fn: Any, call: Call, args: Any, kwargs: Any, told: Told) -> Callable[[], Any] | None:
    """Indexing by masks as indexing by the places where they hold, as many as the program was captured with."""
    order = list(dict.fromkeys(refs_in((call.args, call.kwargs))))
    refs, indices = call.args[1], args[1]
    if not any(t is not None and t.dtype in _MASKS for t in indices):
        return None
    masks = {
        k: order.index(refs[k].value) for k, t in enumerate(indices) if t is not None and t.dtype in _MASKS
    }
    if not all(place in told.places for place in masks.values()):
        return None

    def run() -> Any:
        by_place: list[torch.Tensor | None] = []
        for k, t in enumerate(indices):
            if k not in masks:
                by_place.append(t)
                continue
            key, form = told.places[masks[k]]
            (places,) = _whole(_ATEN.nonzero.default, [t], ([_Place(0)], {}), [form], key)
            assert places is not None
            by_place += places.unbind(1)
        return fn(args[0], by_place, *args[2:], **kwargs)

    return run


# --- measuring --------------------------------------------------------------------------------------------------

_SAMPLES: Final[dict[int, tuple[Samples, Mapping[int, int]]]] = {}
_measuring: list[None] = []


@dataclass(frozen=True)
class Told:
    """What is known of the contents of a call's arguments: ``key``, the number under which they are held to measure
    on (0: nothing); ``places``, of each mask, by its number among the arguments, the number of it alone, and what its
    places look like as `nonzero` gives them."""

    key: int = 0
    places: Mapping[int, tuple[int, _Form]] = field(default_factory=dict)


def told_by(samples: Samples) -> Told:
    """Of contents by the number of a tensor among the arguments (`Program.samples`), which are held as long as the
    program holds them."""
    for key in [k for k, held in _SAMPLES.items() if not held[0]]:
        del _SAMPLES[key]
    if not samples:
        return Told()
    places: dict[int, tuple[int, _Form]] = {}
    with compat.without_modes():
        for k, t in samples.items():
            if t.dtype in _MASKS:
                known = t.nonzero()
                form = torch.int64, tuple(known.shape), known.stride()
                places[k] = _keep(samples, {0: k}), form
        return Told(_keep(samples, {k: k for k in samples}), places)


def _keep(samples: Samples, at: Mapping[int, int]) -> int:
    """Holds those samples for the tensors of these numbers, under a number that follows from their contents."""
    found = hashlib.sha256()
    for place, k in sorted(at.items()):
        t = samples[k]
        found.update(repr((place, t.dtype, tuple(t.shape))).encode())
        found.update(t.cpu().contiguous().numpy().tobytes())
    key = int.from_bytes(found.digest()[:7], "big")
    _SAMPLES[key] = samples, at
    return key


@contextlib.contextmanager
def measured_on_samples() -> Iterator[None]:
    """Inside, ops that are called whole run on the contents that their program was captured of."""
    _measuring.append(None)
    try:
        yield
    finally:
        _measuring.pop()
