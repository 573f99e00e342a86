"""Which results may be written over which inputs: ops that look at one element of each input at a time.

PyTorch marks such ops with a tag, and runs them with one kernel whether the result is new, ``out=`` or the input
itself. Their results are as before where input and result are laid out alike and all the op reads of that storage is
this one value: then each element is read before it is written, and never again. What is claimed here is tried before
it is used: the profile runs each such op with its result laid over the input.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch

from tightship.frontends.torch.tape import Record, Tape, TapeValue

__all__ = ["elementwise", "overwrites"]

_MORE = (
    "elu_backward", "hardsigmoid_backward", "hardswish", "hardswish_backward", "hardtanh_backward",
    "leaky_relu_backward", "mish_backward", "softplus_backward",
)  # fmt: skip
"""Elementwise in the same way, without the tag."""
_NOT = ("clone", "frexp", "ldexp", "mvlgamma")
"""With the tag, but made of several kernels, or copies."""


def elementwise(fn: Any) -> bool:
    """Whether an op makes one new tensor, each element of it from the elements at the same place of its inputs."""
    if not isinstance(fn, torch._ops.OpOverload) or fn.namespace != "aten" or fn._schema.is_mutable:
        return False
    name = fn._schema.name.removeprefix("aten::")
    if len(fn._schema.returns) != 1 or name in _NOT:
        return False
    return torch.Tag.pointwise in fn.tags or name in _MORE


def overwrites(tape: Tape, r: Record) -> tuple[tuple[int, int], ...]:
    """``Op.overwrites`` of a record, in storages of the tape."""
    if not elementwise(r.fn) or r.writes or r.random or r.effect or len(r.results) != 1 or r.results[0] < 0:
        return ()
    if r.device.startswith("cuda"):  # torch's pluggable allocator takes two tensors at one address for one
        return ()
    made = tape.values[r.results[0]]
    if not _whole(tape, made):
        return ()
    home = tape.storages[made.storage]
    pairs = []
    for s in dict.fromkeys(tape.storage(v) for v in r.reads):
        there = tape.storages[s]
        alike = all(tape.values[v] == replace(made, storage=s) for v in r.reads if tape.storage(v) == s)
        if alike and not there.role and (there.nbytes, there.device) == (home.nbytes, home.device):
            pairs.append((s, made.storage))
    return tuple(pairs)


def _whole(tape: Tape, v: TapeValue) -> bool:
    """Whether a value is all of its storage, without gaps."""
    count = prod(v.shape)
    extent = 1 + sum((n - 1) * s for n, s in zip(v.shape, v.stride, strict=True))
    return (
        count > 0
        and not v.offset
        and count == extent
        and count * v.dtype.itemsize == tape.storages[v.storage].nbytes
    )
