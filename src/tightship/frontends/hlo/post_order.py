"""The orders in which XLA numbers instructions and computations; ties between equal buffers follow them."""

from __future__ import annotations

from collections.abc import Sequence

from tightship.frontends.hlo.buffers import Node
from tightship.frontends.hlo.module import Computation, Module

__all__ = ["computations_in_post_order", "post_order"]


def post_order(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Those of one computation, operands before users, depth first from the instructions nobody uses."""
    named = {n.name: n for n in nodes}
    done: set[Node] = set()
    found: list[Node] = []
    for node in nodes:
        if node.users:
            continue
        stack = [node]
        while stack:
            last = stack[-1]
            if last in done:
                stack.pop()
                continue
            before = [o for o in reversed(last.operands) if o not in done]
            if last.instruction.has("control-predecessors"):
                waits = (named[p] for p in last.instruction.control_predecessors)
                before += [p for p in waits if p not in done]
            if before:
                stack += before
            else:
                done.add(last)
                found.append(last)
                stack.pop()
    return tuple(found)


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
