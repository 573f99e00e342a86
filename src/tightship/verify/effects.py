"""Which ops others notice, told by their names alone: what a graph says of its ops comes from those who plan with it.

Names are HLO's opcodes, jax's primitives (with underscores for hyphens) and PyTorch's ops.
"""

from __future__ import annotations

__all__ = ["has_effects"]

_BETWEEN_RANKS = (
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all",
    "reduce-scatter", "psum", "pmax", "pmin", "ppermute", "pbroadcast", "pgather",
)  # fmt: skip
_WITH_THE_HOST = ("infeed", "outfeed", "send", "recv", "after-all")
_HALVES = ("async", "copy")
"""Ops only by what follows their names: ``-start``, ``-update``, ``-done``."""
_DRAWS = ("rng", "rng-get-and-update-state")
_PARTS = ("-start", "-update", "-done")
_NAMESPACES = ("c10d.", "_c10d_functional.", "c10d_functional.")


def has_effects(target: str) -> bool:
    """Whether an op of this name is noticed by other ranks, the host or a later draw, or is half of a pair."""
    if target.startswith(_NAMESPACES):
        return True
    name = target.replace("_", "-")
    whole = name
    for part in _PARTS:
        whole = whole.removesuffix(part)
    if whole != name and whole in _HALVES:
        return True
    return whole in _BETWEEN_RANKS or whole in _WITH_THE_HOST or name in _DRAWS
