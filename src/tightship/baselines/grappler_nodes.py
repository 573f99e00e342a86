"""Grappler's rewrites of a TensorFlow graph's nodes: recomputation (G1-G5) and sums (G6, G7), and what runs when.

What is read from a file are `Node`s, what comes out are the nodes to add and to change; no messages are known here.
The numbers that keep cycles out (G5) are those of the original: places in a first-come order of ready nodes.

``AddN`` holds all its inputs until the last is made. Instead an accumulator is allocated and set to zero when the
first one is there, each input is added to it in place as it comes, and the sum is read out and the accumulator
destroyed under the sum's own name, so that its readers stay as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TypeVar

from tightship.errors import BadInput
from tightship.frontends.tensorflow.nodes import Node, Web, from_rows, in_order, name_of
from tightship.graph import Graph
from tightship.planners.evict.lowering import Run
from tightship.planners.evict.problem import EvictionProblem
from tightship.simulate import unplanned

__all__ = [
    "CHEAP",
    "CLONE",
    "CROWDED",
    "SUMS",
    "TRIGGER",
    "Accumulator",
    "Group",
    "Rewrite",
    "accumulator",
    "cloned",
    "crowded_sums",
    "groups",
    "hinted",
    "is_target",
    "late_order",
    "node_runs",
    "recomputed",
    "rewritten",
]

K = TypeVar("K")

CLONE, TRIGGER = "Recomputed/", "RecomputeTrigger/"

CHEAP = frozenset(
    "Add AddN BiasAdd Cast Fill FloorDiv FloorMod FusedBatchNorm LeakyRelu Mul Neg RealDiv Reciprocal Relu Relu6 "
    "Reshape Rsqrt Sigmoid Sqrt Square SquaredDifference Sub Tile Transpose".split()
)
"""Kinds that TensorFlow's Grappler runs again without asking what they cost: found by asking it about each (2.21)."""


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that are cloned together, and the targets that read the clones, both in topological order."""

    sources: tuple[str, ...]
    goals: tuple[str, ...]


@dataclass(frozen=True)
class Rewrite:
    """``added``: triggers and clones; ``inputs``: the new inputs of targets by name; ``origin``: of a clone the node
    it runs again."""

    groups: tuple[Group, ...] = ()
    added: tuple[Node, ...] = ()
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)

    def applied(self, nodes: Sequence[Node]) -> list[Node]:
        return [
            replace(n, inputs=self.inputs[n.name]) if n.name in self.inputs else n
            for n in (*nodes, *self.added)
        ]


def is_target(name: str, scope: str) -> bool:
    """G1: under the scope, also where it is nested."""
    return name.startswith(scope) or f"/{scope}" in name


def recomputed(
    nodes: Sequence[Node], scope: str = "gradients/", fed: Collection[str] = (), *, heuristic: bool = True
) -> Rewrite:
    """The rewrite; ``fed`` are the names that a user feeds, ``heuristic`` false: hinted nodes only. Raises
    ``BadInput`` for names that there are not, or twice, and for cycles."""
    web = Web(nodes)
    found = groups(web, scope, fed, heuristic=heuristic)
    place = {n: i for i, n in enumerate(web.order)}
    inputs = {n.name: n.inputs for n in nodes}
    before = dict(inputs)
    added: list[Node] = []
    origin: dict[str, str] = {}
    for group in found:
        serves = _served(web, group, place)
        triggers = _triggers(web, group, place, serves, inputs)
        added += triggers.values()
        again = {s: CLONE + s for s in group.sources}
        for s in group.sources:
            node = web.nodes[s]
            reads = (*(again.get(i, i) for i in before[s]), f"^{triggers[s].name}")
            added.append(Node(again[s], node.kind, reads, node.device, node.hinted))
            origin[again[s]] = s
        for goal in group.goals:  # G4: redirected by its full name; other results stay the original's
            inputs[goal] = tuple(again.get(i, i) for i in inputs[goal])
    _check_names(web, added)
    changed = {n: now for n, now in inputs.items() if now != before[n]}
    return Rewrite(tuple(found), tuple(added), changed, origin)


def groups(web: Web, scope: str, fed: Collection[str] = (), *, heuristic: bool = True) -> list[Group]:
    """G2, G3: the sets that are cloned. A seed feeds a target and reads none; it grows to all candidates that hang
    together with it, of which those stay that finally feed a target."""
    goals = {n for n in web.order if is_target(n, scope)}
    likely = {
        n for n in web.order
        if n not in goals and n not in fed and not n.startswith(CLONE)  # of a rewrite before
        and (web.nodes[n].hinted or (heuristic and web.nodes[n].kind in CHEAP))
    }  # fmt: skip
    place = {n: i for i, n in enumerate(web.order)}
    found = []
    for part in cloned(web.order, likely, goals, web.read, web.readers):
        served = {m for n in part for m in web.readers[n] if m in goals}
        rows = (tuple(sorted(names, key=place.__getitem__)) for names in (part, served))
        found.append(Group(*rows))
    return found


def cloned(
    order: Iterable[K],
    likely: Collection[K],
    goals: Collection[K],
    read: Mapping[K, Collection[K]],
    readers: Mapping[K, Collection[K]],
) -> Iterator[set[K]]:
    """The rule itself, of candidates and targets by name or number, with what each reads and who reads it."""
    seen: set[K] = set()

    def feeds(n: K) -> bool:
        return any(m in goals for m in readers[n])

    for seed in order:
        if seed not in likely or seed in seen or not feeds(seed) or any(m in goals for m in read[seed]):
            continue
        whole = _grown([seed], lambda n: [m for m in (*read[n], *readers[n]) if m in likely])
        seen |= whole
        yield _grown(filter(feeds, whole), lambda n: [m for m in read[n] if m in likely])


def _grown(start: Iterable[K], near: Callable[[K], list[K]]) -> set[K]:
    stack = list(start)
    found = set(stack)
    while stack:
        for m in near(stack.pop()):
            if m not in found:
                found.add(m)
                stack.append(m)
    return found


def _served(web: Web, group: Group, place: Mapping[str, int]) -> dict[str, int]:
    """Of each source, where the first target stands that it or a clone which reads it feeds."""
    goals = set(group.goals)
    found: dict[str, int] = {}
    for s in reversed(group.sources):
        ends = [place[m] for m in web.readers[s] if m in goals]
        ends += [found[m] for m in web.readers[s] if m in found]
        found[s] = min(ends)
    return found


def _triggers(
    web: Web,
    group: Group,
    place: Mapping[str, int],
    serves: Mapping[str, int],
    inputs: Mapping[str, tuple[str, ...]],
) -> dict[str, Node]:
    """G5: of each source the node its clone waits for. They form a chain from what is needed first to what is
    needed last; each waits for those inputs of the targets that stand before all that its clone serves."""
    again = set(group.sources)
    others = {
        name_of(i) for goal in group.goals for i in inputs[goal]
        if name_of(i) in web.nodes and name_of(i) not in again
    }  # fmt: skip
    waiting = deque(sorted(others, key=place.__getitem__))
    found: dict[str, Node] = {}
    last = ""
    for s in sorted(sorted(group.sources, reverse=True), key=serves.__getitem__):
        reads = [f"^{last}"] if last else []
        while waiting and place[waiting[0]] < serves[s]:
            reads.append(f"^{waiting.popleft()}")
        last = TRIGGER + s
        found[s] = Node(last, "NoOp", tuple(reads), web.nodes[s].device)
    return found


def _check_names(web: Web, added: Sequence[Node]) -> None:
    for n in added:
        if n.name in web.nodes:
            raise BadInput(f"duplicate node name {n.name!r}: was the graph rewritten before?", place="nodes")


def late_order(nodes: Sequence[Node], rewrite: Rewrite, after: Callable[[str], int]) -> list[str]:
    """An order of the rewritten nodes: originals by ``after`` (their places in some order), clones as late as what
    reads them allows."""
    every = rewrite.applied(nodes)
    web = Web(every)
    key: dict[str, tuple[int, int]] = {}
    for n in reversed(web.order):
        if n in rewrite.origin or n.startswith(TRIGGER):
            mine = min((key[m] for m in web.readers[n]), default=(len(every), 0))
            key[n] = (mine[0], mine[1] - 1)
        else:
            key[n] = (after(n), 0)
    return in_order(web.read, key.__getitem__)


def hinted(graph: Graph, patterns: Sequence[str]) -> list[Node]:
    """The nodes that a graph was read from; those whose names match a pattern carry the hint."""
    nodes = from_rows(graph.meta["nodes"])
    return [replace(n, hinted=n.hinted or any(fnmatchcase(n.name, p) for p in patterns)) for n in nodes]


def rewritten(graph: Graph, level: str, scope: str, hints: Sequence[str] = ()) -> Rewrite:
    """The recompute rewrite of the nodes a graph was read from (``Graph.meta``); ``level`` manual: hints alone."""
    if level in ("none", "swap"):
        return Rewrite()
    fed = [*graph.meta.get("fed", ()), *(graph.values[v].name for v in graph.inputs)]
    return recomputed(hinted(graph, hints), scope, fed, heuristic=level != "manual")


def node_runs(problem: EvictionProblem, rewrite: Rewrite) -> list[Run]:
    """What runs when: ops in the problem's order, clones as late as their readers allow. Of clones those count that
    something in the graph reads, and that make bytes."""
    graph = problem.graph
    op_of = {op.name: k for k, op in enumerate(graph.ops)}
    at = {k: i for i, k in enumerate(problem.order)}
    nodes = from_rows(graph.meta["nodes"])
    there = {graph.values[v].name for v in graph.inputs} | op_of.keys()
    wanted = _wanted(rewrite, there)
    mine = [n for n in nodes if n.name in there]
    part = Rewrite(
        added=tuple(n for n in rewrite.added if n.name in wanted or n.name.startswith(TRIGGER)),
        inputs={n: row for n, row in rewrite.inputs.items() if n in there},
        origin={c: o for c, o in rewrite.origin.items() if c in wanted},
    )
    kept = there | {n.name for n in part.added}
    part = replace(part, added=tuple(_only(n, kept) for n in part.added))
    mine = [_only(n, kept) for n in mine]
    runs = []
    for name in late_order(mine, part, lambda n: at[op_of[n]] if n in op_of else -1):
        if name in op_of:
            runs.append(Run(op_of[name]))
        elif name in part.origin:
            op = op_of[part.origin[name]]
            stays = (s for s in graph.uses.defines[op] if s not in graph.kept and graph.storages[s].size)
            if back := tuple(stays):
                runs.append(Run(op, True, back))
    return runs


def _wanted(rewrite: Rewrite, there: set[str]) -> set[str]:
    """The clones of ops of the graph that its targets read, through other clones too."""
    inputs = {n.name: n.inputs for n in rewrite.added}
    stack = [name_of(i) for n, row in rewrite.inputs.items() if n in there for i in row]
    found: set[str] = set()
    while stack:
        n = stack.pop()
        if n in rewrite.origin and n not in found and rewrite.origin[n] in there:
            found.add(n)
            stack += map(name_of, inputs[n])
    return found


def _only(node: Node, kept: set[str]) -> Node:
    return replace(node, inputs=tuple(i for i in node.inputs if name_of(i) in kept))


# --- sums (G6, G7) ---

SUMS = ("AddN", "AccumulateNV2")
CROWDED = 0.8
"""The part of a device's memory above which sums are rewritten."""


@dataclass(frozen=True, slots=True)
class Accumulator:
    """What takes the place of the sum ``name``: the nodes to add, and the sum's node as it is then."""

    name: str
    added: tuple[Node, ...]
    result: Node


def crowded_sums(graph: Graph, web: Web, memory: int) -> list[str]:
    """G6: sums of more than two values where the peak is above `CROWDED` of the memory and at least one of the values
    is alive then. Values of other devices do not count."""
    line = unplanned(graph)
    if line.peak <= CROWDED * memory:
        return []
    alive = {s for s, size in line.at_peak if size}
    op_of = {op.name: op for op in graph.ops}
    at = {graph.values[v].name: graph.values[v].storage for op in graph.ops for v in op.outputs}
    found = []
    for n in web.order:
        node = web.nodes[n]
        if node.kind not in SUMS or n not in op_of:
            continue
        given = [i for i in node.inputs if not i.startswith("^")]
        here = [i for i in given if web.nodes[name_of(i)].device == node.device]
        known = all(graph.values[v].dtype for v in op_of[n].outputs)  # G7
        if len(given) > 2 and known and any(at.get(i.removesuffix(":0"), -1) in alive for i in here):
            found.append(n)
    return found


def accumulator(web: Web, name: str, place: dict[str, int]) -> Accumulator:
    """G6, G7: the nodes instead of a sum. What it waited for and can be there before the first value comes first, the
    rest is waited for at the end."""
    node = web.nodes[name]
    given = [i for i in node.inputs if not i.startswith("^")]
    waits = [i for i in node.inputs if i.startswith("^")]
    first = min(given, key=lambda i: place[name_of(i)])
    before = [i for i in waits if place[name_of(i)] < place[name_of(first)]]
    start = Node(
        f"{name}/tmp_var", "TemporaryVariable", (*_once([*before, f"^{name_of(first)}"]),), node.device
    )
    zeros = Node(f"{name}/tmp_var_zeros", "ZerosLike", (first,), node.device)
    set_ = Node(f"{name}/tmp_var_initializer", "Assign", (start.name, zeros.name), node.device)
    adds = [
        Node(f"{name}/tmp_var_accum_{k}", "AssignAdd", (set_.name, i), node.device)
        for k, i in enumerate(given)
    ]
    after = [f"^{a.name}" for a in adds] + [i for i in waits if i not in before]
    result = Node(name, "DestroyTemporaryVariable", (set_.name, *_once(after)), node.device)
    return Accumulator(name, (start, zeros, set_, *adds), result)


def _once(names: Collection[str]) -> list[str]:
    return list(dict.fromkeys(names))
