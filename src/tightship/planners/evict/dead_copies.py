"""Copies out that gain nothing: the storage is still there when it is used next, and its copy is thrown away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tightship.plan import Step

__all__ = ["without_idle_copies"]


def without_idle_copies(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The same steps without copies to the host that are freed before they are fetched.

    A search begins such a copy where it would not be over before the next use, and then keeps the storage. The
    peak on the device stays, on the host it falls, and nothing takes longer.
    """
    begun: dict[int, int] = {}  # storage -> the step that copies it out
    idle: dict[int, list[int]] = {}  # step -> storages it names in vain
    for i, step in enumerate(steps):
        for s in step.storages:
            if step.kind == "offload":
                begun[s] = i
            elif step.kind == "fetch":
                begun.pop(s, None)
            elif step.kind == "free" and step.form == "host" and s in begun:
                for at in (begun.pop(s), i):
                    idle.setdefault(at, []).append(s)
    if not idle:
        return tuple(steps)
    out: list[Step] = []
    place: list[int] = []  # where each step is now, -1 if it is gone
    for i, step in enumerate(steps):
        left = tuple(s for s in step.storages if s not in idle.get(i, ()))
        if i in idle and not left:
            place.append(-1)
            continue
        place.append(len(out))
        out.append(replace(step, storages=left, waits=tuple(place[w] for w in step.waits if place[w] >= 0)))
    return tuple(out)
