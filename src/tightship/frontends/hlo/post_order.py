"""The orders in which XLA numbers instructions and computations; ties between equal buffers follow them."""

from __future__ import annotations

from tightship.frontends.hlo.module import Computation, Module

__all__ = ["computations_in_post_order", "post_order"]


def post_order(c: Computation) -> list[str]:
    """Names with operands before users, depth first from the instructions nobody uses."""
    done: set[str] = set()
    found: list[str] = []
    by_name, users = c.by_name, c.users
    for i in c.instructions:
        if users[i.name]:
            continue
        stack = [(i.name, False)]
        while stack:
            name, ready = stack.pop()
            if name in done:
                continue
            if ready:
                done.add(name)
                found.append(name)
                continue
            stack.append((name, True))
            at = by_name[name]
            stack += [(o, False) for o in reversed(at.operands) if o not in done]
            stack += [(p, False) for p in at.control_predecessors if p not in done]
    return found


def computations_in_post_order(module: Module) -> list[Computation]:
    """Those the entry reaches, callees before callers, the entry last; then those nobody calls."""
    found: list[Computation] = []
    seen: set[str] = set()
    called = {n for i in module.instructions for n in i.called}
    for first in (module.entry, *(c for c in module.computations if c.name not in called)):
        if first.name in seen:
            continue
        seen.add(first.name)
        stack = [(first, iter(first.instructions))]
        while stack:
            c, rest = stack[-1]
            i = next((i for i in rest if i.called), None)
            if i is None:
                stack.pop()
                found.append(c)
                continue
            callees = [n for n in i.called if n not in seen]
            for n in callees if i.opcode == "while" else reversed(callees):
                seen.add(n)
                stack.append((module.by_name[n], iter(module.by_name[n].instructions)))
    return found
