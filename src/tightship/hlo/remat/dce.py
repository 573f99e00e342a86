"""Dead code of a rewritten body: what nobody uses goes, and so do results of fusions that nobody uses (R15).

Source: ``HloDCE`` of OpenXLA. A fusion of several results keeps those that are read; one that keeps one
result gives it without a tuple; parameters that are no longer read go with their operands.
"""

from __future__ import annotations

from dataclasses import replace

from tightship.hlo.module import Computation
from tightship.hlo.remat.body import Body, Node
from tightship.hlo.shape import Shape

__all__ = ["clean"]


def clean(body: Body, inside: dict[str, Computation]) -> None:
    """Remove what is dead from ``body``; ``inside`` has the computations that fusions call, changed ones too."""
    body.drop_dead()
    while any([_narrow(body, node, inside) for node in body if node.opcode == "fusion"]):
        body.drop_dead()


def _narrow(body: Body, node: Node, inside: dict[str, Computation]) -> bool:
    """Let a fusion give only what is read of it; whether that changed anything."""
    name = node.made.attribute("calls").lstrip("%")
    called = inside.get(name)
    if called is None or called.root.opcode != "tuple" or node is body.root or not node.users:
        return False
    if any(u.opcode != "get-tuple-element" or u is body.root for u in node.users):
        return False
    kept = sorted({u.made.tuple_index for u in node.users})
    if len(kept) == len(node.shape.parts) or node.made.has("output_to_operand_aliasing"):
        return False
    inside[name], used = _computation(called, kept)
    node.operands = _operands(node, used)
    if len(kept) > 1:
        node.shape = Shape("tuple", parts=tuple(node.shape.parts[k] for k in kept))
        for user in node.users:
            user.made = user.made.but(index=kept.index(user.made.tuple_index))
    else:
        _untuple(body, node, node.shape.parts[kept[0]])
    return True


def _operands(node: Node, used: list[int]) -> list[Node]:
    left = [node.operands[k] for k in used]
    for operand in dict.fromkeys(node.operands):
        if operand not in left:
            del operand.users[node]
    return left


def _untuple(body: Body, node: Node, shape: Shape) -> None:
    """The fusion itself takes the place of the get-tuple-elements of its only result."""
    node.shape = shape
    for part in list(node.users):
        del node.users[part]
        for user in list(part.users):
            for k, operand in enumerate(user.operands):
                if operand is part:
                    user.operands[k] = node
            node.users[user] = None
        part.users.clear()
        part.operands.clear()
        body.unlink(part)


def _computation(called: Computation, kept: list[int]) -> tuple[Computation, list[int]]:
    """A fused computation that gives only the results ``kept``, and the parameters it still reads."""
    results = [called.root.operands[k] for k in kept]
    need = set(results)
    for i in reversed(called.instructions):
        if i.name in need:
            need.update(i.operands)
    live = [i for i in called.instructions if i.name in need and i is not called.root]
    used = sorted(i.parameter_number for i in live if i.opcode == "parameter")
    rows = []
    for i in live:
        payload = str(used.index(i.parameter_number)) if i.opcode == "parameter" else i.payload
        rows.append(replace(i, payload=payload, root=len(kept) == 1 and i.name == results[0]))
    if len(kept) > 1:
        shape = Shape("tuple", parts=tuple(called.root.shape.parts[k] for k in kept))
        rows.append(replace(called.root, shape=shape, operands=tuple(results)))
    return replace(called, instructions=tuple(rows)), used
