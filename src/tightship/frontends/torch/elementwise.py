"""Which ops of torch do with each element what they would do without the others."""

from __future__ import annotations

from typing import Any, Final

import torch

__all__ = ["goes_by_elements"]

_ALSO: Final = (
    "abs", "alias", "clone", "copy", "detach", "fill", "lift_fresh", "masked_fill", "t", "to", "_to_copy", "view",
    "_unsafe_view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "view_as_real", "view_as_complex",
    "zero", "empty_like", "zeros_like", "ones_like", "full_like", "_fused_adam", "_fused_adamw", "_fused_sgd",
    "_fused_adagrad",
)  # fmt: skip
"""Beside those that torch tags as pointwise."""
_EACH_TENSOR: Final = "_foreach_norm", "_foreach_max", "_foreach_powsum"
"""Those that answer for each tensor of a list, though a function of that name goes by elements."""


def goes_by_elements(func: Any) -> bool:
    name = func._schema.name.rpartition("::")[2].removesuffix("_")
    if torch.Tag.data_dependent_output in func.tags:  # equal, which is tagged as pointwise, too
        return False
    if torch.Tag.pointwise in func.tags or name in _ALSO:
        return True
    packet = getattr(torch.ops.aten, name.removeprefix("_foreach_"), None)
    if not name.startswith("_foreach_") or name in _EACH_TENSOR or packet is None:
        return False
    plain = name.removeprefix("_foreach_")
    tags = (torch.Tag.pointwise in getattr(packet, n).tags for n in packet.overloads())
    return plain in _ALSO or any(tags)
