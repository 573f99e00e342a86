"""Whether ranks that each step all parameters by themselves still have the same ones after their first update."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable
from typing import Final

import torch

from tightship.execute.ranks import Ranks
from tightship.frontends.torch import compat_distributed

__all__ = ["Divergence"]

_SAMPLE: Final = 1 << 14
"""Elements of a parameter that are compared, from its beginning: gradients that differ do so nearly everywhere."""
_LOOKS: Final = 64
"""Steps within which an update is waited for."""


class Divergence:
    """Of a step that has collectives in it, and of which nobody has said how ranks train together. Where ranks begin
    with the same parameters and have others after their first update, it warns, once: gradients that are not averaged
    make a model of each rank's own, in eager as here. Ranks that begin with others (parts of their own making) mean
    it."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._first, self._looks = "", 0

    def look(self, parameters: Iterable[torch.Tensor], level: int) -> None:
        """Compares all ranks' parameters, before a step; all ranks call it. ``level`` is the caller's distance from
        the code to be warned."""
        if self._looks >= _LOOKS:
            return
        self._looks += 1
        _, told = self._ranks.agreed("comparing parameters", lambda: _digest(parameters), lambda text: text)
        alike = len({*told}) == 1
        self._first = self._first or told[0]
        if alike and told[0] == self._first:
            return
        if not alike and self._looks > 1:
            warnings.warn(_DIFFERENT, stacklevel=level + 1)
        self._looks = _LOOKS


_DIFFERENT: Final = (
    "ranks had the same parameters before the first update and have others after it, as in eager: nobody averages "
    "their gradients. Give fit parallel=tightship.DataParallel() to train one model (or the model in "
    "DistributedDataParallel); independent=True, if each rank is to train its own"
)


def _digest(parameters: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for p in parameters:
        own = compat_distributed.own_part(p.detach())
        some = own.reshape(-1)[:_SAMPLE].cpu() if own.is_contiguous() else own.flatten()[:_SAMPLE].cpu()
        digest.update(some.contiguous().view(torch.uint8).numpy().tobytes() if some.numel() else b"")
    return digest.hexdigest()[:16]
