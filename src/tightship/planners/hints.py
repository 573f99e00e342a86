"""Hints: what to do with the values of a module, by the pattern of its name; obeyed, or refused with a reason.

A hint is a pattern (as in a shell, over qualified module names, ``transformer.h.*.mlp``; modules inside are meant
too) and one of ``keep``, ``recompute``, ``compress``, ``offload``. It is about what the module's forward ops make
that is needed by the backward pass; the later of two hints about the same value holds. Source: Grappler's manual
levels, which go by attributes of nodes (behaviors G2, G11).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from tightship.analysis.bounds import replayable
from tightship.analysis.packing import packings
from tightship.errors import BadInput
from tightship.graph import Graph

__all__ = ["WAYS", "divide_hints", "matches", "parse_hints", "refusals", "resolve"]

WAYS = ("keep", "recompute", "compress", "offload")


_STATIC = {"stream": True, "resident": False}


def divide_hints(text: str) -> tuple[str, tuple[tuple[str, bool], ...]]:
    """Hints without those that are about parameters (``stream``, ``resident``), and these: patterns, and whether what
    they are about has to stream or must not."""
    parts = [part.strip() for part in text.split(",")]
    rows = [(part.rpartition("=")[0], part.rpartition("=")[2].strip(), part) for part in parts if part]
    static = tuple((pattern, _STATIC[way]) for pattern, way, _ in rows if pattern and way in _STATIC)
    return ",".join(part for pattern, way, part in rows if not (pattern and way in _STATIC)), static


def parse_hints(text: str) -> tuple[tuple[str, str], ...]:
    """``pattern=way`` pairs, between commas. Raises ``BadInput``."""
    rows = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        pattern, equals, way = part.partition("=")
        if not equals or not pattern or way not in WAYS:
            rule = f"malformed hint {part!r}: expected PATTERN=WAY, with one of {', '.join(WAYS)}"
            raise BadInput(rule, place="hints")
        rows.append((pattern, way))
    return tuple(rows)


def resolve(
    graph: Graph, hints: Sequence[tuple[str, str]], *, lossy: bool = False
) -> dict[int, tuple[str, ...]]:
    """For each storage that a hint is about, the ways that are left for it.

    Where only some of a module's values can leave memory in that way (a drawn random mask cannot be recomputed),
    the others are left to the planner. Raises ``BadInput`` for a hint that matches nothing, or nothing that could
    obey it, or that later ones undo for all that it is about, with the reason.
    """
    decided: dict[int, tuple[str, str]] = {}
    for pattern, way in hints:
        storages = list(_storages(graph, pattern))
        if not storages:
            near = _similar(graph, pattern)
            raise BadInput(
                f"unknown module {pattern!r}: no module of the forward pass matches{near}", place="hints"
            )
        refused = refusals(graph, storages, way, lossy)
        if len(refused) == len(storages):
            largest = max(storages, key=lambda s: graph.storages[s].size)
            raise BadInput(f"cannot {way} the values of {pattern!r}: {refused[largest]}", place="hints")
        decided |= {s: (pattern, way) for s in storages if s not in refused}
    for pattern, way in dict.fromkeys(hints):
        overruled = (pattern, way) not in decided.values()
        if overruled and any(decided.get(s, ("", way))[1] != way for s in _storages(graph, pattern)):
            rule = f"hint '{pattern}={way}' is undone by later ones: put the more general hint first"
            raise BadInput(rule, place="hints")
    return {s: (way,) for s, (_, way) in decided.items()}


def matches(graph: Graph, pattern: str) -> bool:
    """Whether a hint's pattern is about anything that the forward pass makes."""
    return next(_storages(graph, pattern), None) is not None


def _similar(graph: Graph, pattern: str) -> str:
    """Modules with names such as a pattern that matches none."""
    names = {op.module: None for op in graph.ops if op.phase == "forward" and op.module}
    near = get_close_matches(pattern, list(names), 3, 0.3) or list(names)[:3]
    return f" (such as {', '.join(near)})" if near else " (this graph has none)"


def _storages(graph: Graph, pattern: str) -> Iterator[int]:
    for k, op in enumerate(graph.ops):
        if op.phase != "forward" or not op.module:
            continue
        if fnmatchcase(op.module, pattern) or fnmatchcase(op.module, f"{pattern}.*"):
            yield from (s for s in graph.uses.defines[k] if graph.storages[s].size)


def refusals(graph: Graph, storages: Sequence[int], way: str, lossy: bool) -> Mapping[int, str]:
    """Why storages cannot leave memory in that way."""
    packed = packings(graph, lossy=lossy) if way == "compress" else {}
    reasons = {}
    for s in storages:
        name, ops = graph.storages[s].name, [graph.ops[w] for w in graph.uses.writers[s]]
        if way == "compress" and s not in packed:
            reasons[s] = f"no codec makes {name} smaller"
        elif way == "recompute" and not replayable(graph, s):
            random = next((o.name for o in ops if o.random), None)
            reasons[s] = (
                f"{random} draws random numbers" if random else f"an op that makes {name} cannot run again"
            )
    return reasons
