"""Phis that can only ever be one buffer are that buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tightship.frontends.hlo.buffers import Buffer

__all__ = ["meant"]


def meant(phis: Sequence[Buffer]) -> Callable[[Buffer], Buffer]:
    """What stands for each buffer: itself, or the only one it can be. The inputs of the phis that stay are brought
    up to date."""
    same: dict[Buffer, Buffer] = {}

    def real(buffer: Buffer) -> Buffer:
        while buffer in same:
            buffer = same[buffer]
        return buffer

    changed = True
    while changed:
        changed = False
        seen: set[Buffer] = set()
        for phi in phis:
            if phi in same:
                continue
            phi.inputs = [b for b in dict.fromkeys(map(real, phi.inputs)) if b is not phi]
            if len(phi.inputs) == 1:
                same[phi] = phi.inputs[0]
                changed = True
            elif phi not in seen and _one(phi, real, seen, same):
                changed = True
    return real


def _one(
    phi: Buffer, real: Callable[[Buffer], Buffer], seen: set[Buffer], same: dict[Buffer, Buffer]
) -> bool:
    """Whether the phis reachable from ``phi`` join no more than one real buffer; they are it, then."""
    work, closure, only = [phi], {phi}, None
    while work:
        todo = work.pop()
        if not todo.phi:
            if only is not None and only is not todo:
                return False
            only = todo
            continue
        seen.add(todo)
        for b in map(real, todo.inputs):
            if b not in closure:
                closure.add(b)
                work.append(b)
    if only is None:
        return False
    same.update((b, only) for b in closure if b.phi)
    return True
