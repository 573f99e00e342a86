"""Hints: what to do with the values of a module, by the pattern of its name; obeyed, or refused with a reason.

A hint is a pattern (as in a shell, over qualified module names, ``transformer.h.*.mlp``; modules inside are meant
too) and one of ``keep``, ``recompute``, ``compress``, ``offload``. It is about what the module's forward ops make
that is needed by the backward pass; the later of two hints about the same value holds. Source: Grappler's manual
levels, which go by attributes of nodes (behaviours G2, G11).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from tightship.analysis.bounds import replayable
from tightship.analysis.packing import packings
from tightship.errors import BadInput
from tightship.graph import Graph

__all__ = ["WAYS", "matches", "parse_hints", "resolve"]

WAYS = ("keep", "recompute", "compress", "offload")


def parse_hints(text: str) -> tuple[tuple[str, str], ...]:
    """``pattern=way`` pairs, between commas. Raises ``BadInput``."""
    rows = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        pattern, equals, way = part.partition("=")
        if not equals or not pattern or way not in WAYS:
            raise BadInput(f"a hint is PATTERN=WAY, with one of {', '.join(WAYS)}", part, "hints")
        rows.append((pattern, way))
    return tuple(rows)


def resolve(
    graph: Graph, hints: Sequence[tuple[str, str]], *, lossy: bool = False
) -> dict[int, tuple[str, ...]]:
    """For each storage that a hint is about, the ways that are left for it.

    Where only some of a module's values can leave memory in that way (a drawn random mask cannot be made again),
    the others are left to the planner. Raises ``BadInput`` for a hint that matches nothing, or nothing that could
    obey it, or that later ones undo for all that it is about, with the reason.
    """
    only: dict[int, tuple[str, ...]] = {}
    said: dict[int, tuple[str, str]] = {}
    for pattern, way in hints:
        made = list(_made(graph, pattern))
        if not made:
            raise BadInput(
                f"a hint's pattern matches a module of the forward pass{_near(graph, pattern)}",
                pattern,
                "hints",
            )
        refused = _refusals(graph, made, way, lossy)
        if len(refused) == len(made):
            s = max(made, key=lambda s: graph.storages[s].size)
            raise BadInput(f"what a hint says can be done: {way}", pattern, f"hints, {refused[s]}")
        said |= {s: (pattern, way) for s in made if s not in refused}
        only |= {s: (way,) for s in made if s not in refused}
    for pattern, way in dict.fromkeys(hints):
        if (pattern, way) not in said.values() and not all(_obeyed(graph, only, pattern, way)):
            rule = "a hint is not undone by later ones: the general one comes first"
            raise BadInput(rule, f"{pattern}={way}", "hints")
    return only


def matches(graph: Graph, pattern: str) -> bool:
    """Whether a hint's pattern is about anything that the forward pass makes."""
    return next(_made(graph, pattern), None) is not None


def _obeyed(graph: Graph, only: Mapping[int, tuple[str, ...]], pattern: str, way: str) -> Iterator[bool]:
    return (only.get(s, (way,)) == (way,) for s in _made(graph, pattern))


def _near(graph: Graph, pattern: str) -> str:
    """Modules with names such as a pattern that matches none."""
    names = {op.module: None for op in graph.ops if op.phase == "forward" and op.module}
    near = get_close_matches(pattern, list(names), 3, 0.3) or list(names)[:3]
    return f" (such as {', '.join(near)})" if near else " (this graph has none)"


def _made(graph: Graph, pattern: str) -> Iterator[int]:
    for k, op in enumerate(graph.ops):
        if op.phase != "forward" or not op.module:
            continue
        if fnmatchcase(op.module, pattern) or fnmatchcase(op.module, f"{pattern}.*"):
            yield from (s for s in graph.uses.defines[k] if graph.storages[s].size)


def _refusals(graph: Graph, made: Sequence[int], way: str, lossy: bool) -> Mapping[int, str]:
    """Why storages cannot leave memory in that way."""
    packed = packings(graph, lossy=lossy) if way == "compress" else {}
    reasons = {}
    for s in made:
        name, ops = graph.storages[s].name, [graph.ops[w] for w in graph.uses.writers[s]]
        if way == "compress" and s not in packed:
            reasons[s] = f"no codec makes {name} smaller"
        elif way == "recompute" and not replayable(graph, s):
            random = next((o for o in ops if o.random), None)
            why = f"{random.name} draws random numbers" if random else "an op that makes it cannot run again"
            reasons[s] = f"{name} cannot be made again: {why}"
    return reasons
