"""Lower bounds on what a module needs, counted as XLA's rematerialisation counts it, however it is ordered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tightship.hlo.module import Module
from tightship.hlo.remat.cost import work_of
from tightship.hlo.remat.lower import counted
from tightship.hlo.remat.peak import result_bytes, sequential_order

__all__ = ["bound", "bounds"]


def bound(module: Module, allow: Sequence[str] = ("recompute",), *, lossy: bool = False) -> int:
    """Bytes that the module needs however it is ordered and repeated, called computations at their least, where
    arrays may wait in the ways of ``allow`` (recompute, compress, offload)."""
    return bounds(module, allow, lossy=lossy)[module.entry.name] + result_bytes(module)


def bounds(
    module: Module, allow: Sequence[str] = ("recompute",), *, lossy: bool = False
) -> Mapping[str, int]:
    """The same of each computation that is run in sequence, beyond its parameters and its result."""
    work = work_of(module)
    least: dict[str, int] = {}
    for name in sequential_order(module):
        c = counted(module, name, least, work)
        least[name] = c.least(allow, lossy=lossy)
    return least
