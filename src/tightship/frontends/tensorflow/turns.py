"""How many turns a ``While`` takes at most, where it counts them, and what it carries after so many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tightship.frontends.tensorflow.functions import Body
from tightship.frontends.tensorflow.nodes import name_of

__all__ = ["Shape", "grown", "most_turns", "turns_until"]

Shape = tuple[int, ...]


def most_turns(condition: Body, body: Body, begins: Callable[[int], Any]) -> int | None:
    """The turns until a counter that the loop carries is no longer below a limit: of several conditions that all
    must hold the first that fails. ``begins``: what is known of what the loop is given."""
    inside = {n.name: n for n in condition.proto.node}
    found: list[int | None] = []
    work = [condition.results[0]]
    while work and len(found) + len(work) <= len(inside):
        node = inside[name_of(condition.origin(work.pop()) or condition.results[0])]
        if node.op == "LogicalAnd":
            work += node.input[:2]
        elif node.op == "Less":
            found.append(_counted(node, condition, body, begins))
    return min((n for n in found if n is not None), default=None)


def _counted(less: Any, condition: Body, body: Body, begins: Callable[[int], Any]) -> int | None:
    counter = name_of(condition.origin(less.input[0]))
    limit = _number(condition, less.input[1], body, begins)
    if counter not in condition.arguments or limit is None:
        return None
    at = condition.arguments.index(counter)
    nodes = {n.name: n for n in body.proto.node}
    step = nodes.get(name_of(body.origin(body.results[at])))
    start = begins(at)
    if step is None or step.op not in ("Add", "AddV2") or start is None or not _is_whole(start):
        return None
    own, more = (step.input[0], step.input[1])
    if name_of(body.origin(own)) != body.arguments[at]:
        own, more = more, own
    by = _number(body, more, body, begins)
    if name_of(body.origin(own)) != body.arguments[at] or by is None or by <= 0:
        return None
    return max(0, -(-(limit - int(start.reshape(-1)[0])) // by))


def _number(within: Body, text: str, body: Body, begins: Callable[[int], Any]) -> int | None:
    """A whole number that is the same in every turn."""
    name = name_of(within.origin(text))
    node = next((n for n in within.proto.node if n.name == name), None)
    value = None
    if node is not None and node.op == "Const":
        value = tf.make_ndarray(node.attr["value"].tensor)
    elif name in within.arguments:
        at = within.arguments.index(name)
        if name_of(body.origin(body.results[at])) == body.arguments[at]:
            value = begins(at)
    return int(value.reshape(-1)[0]) if value is not None and _is_whole(value) else None


def _is_whole(value: Any) -> bool:
    """Whether this array is one whole number."""
    return bool(value.size == 1 and value.dtype.kind in "iu")


def grown(before: Sequence[Shape], after: Sequence[Shape], turns: int) -> list[Shape]:
    """Shapes of what is carried after so many turns that each add what the first one does."""
    return [
        tuple(max(0, x + (y - x) * turns) for x, y in zip(a, b, strict=True))
        if len(a) == len(b)
        else (b if turns else a)
        for a, b in zip(before, after, strict=True)
    ]


def turns_until(before: Shape, after: Shape, ends: Shape) -> int | None:
    """The turns that lead from a shape to the one that it ``ends`` as, if any do, where the first one led to
    ``after``."""
    by = [(end - a, b - a) for a, b, end in zip(before, after, ends, strict=False) if a != b]
    turns = by[0][0] // by[0][1] if by else 0
    return (
        turns
        if turns >= 0 and len(after) == len(ends) and grown([before], [after], turns) == [ends]
        else None
    )
