"""A placement as a C header: the bytes of each arena, and where in it each tensor lies, as constants.

Nothing but the preprocessor is needed; compilers that have ``static_assert`` check that each tensor lies within its
arena. Names are made of the tensors' names: whatever a file calls them, no two are the same, and none is reserved.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tightship.errors import BadInput
from tightship.graph import Graph
from tightship.plan import Plan, Problem, Residence, Solution
from tightship.units import visible

__all__ = ["Place", "c_header", "header_of_packing", "header_of_plan"]


@dataclass(frozen=True)
class Place:
    """``size`` bytes of a tensor at ``offset`` of ``arena``, in use in ``[first, end)`` of the schedule."""

    name: str
    arena: str
    offset: int
    size: int
    first: int
    end: int


_CHECK = """#if defined(__cplusplus) && __cplusplus >= 201103L
#define {p}_CHECK(is) static_assert(is, #is)
#elif defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
#define {p}_CHECK(is) _Static_assert(is, #is)
#else
#define {p}_CHECK(is) struct {p}_unchecked
#endif
"""


def c_header(title: str, arenas: Mapping[str, int], alignment: int, places: Iterable[Place]) -> str:
    """The header's text: ``arenas`` are names with bytes, all aligned to ``alignment``; of several, each
    tensor has the number of its own."""
    prefix = _word(title) or "MODEL"
    prefix = f"MODEL_{prefix}" if prefix[0].isdigit() else prefix
    used: set[str] = {"CHECK", "AT", "H"}
    number = {name: k for k, name in enumerate(arenas)}
    words = {name: _unique(_word(name) or "ARENA", used) for name in arenas}
    lines = [
        f"/* Where each tensor of {_comment(title)} lies. Made by tightship; do not edit.",
        "   Declare the memory once, aligned to the arena's ALIGNMENT and with its SIZE; then",
        f"   {prefix}_AT(memory, NAME) is where the tensor NAME lies. A tensor that is made again has a place for",
        "   each stay, and comments say in which steps: [first, end). */",
        f"#ifndef {prefix}_H", f"#define {prefix}_H", "", _CHECK.format(p=prefix),
        f"#define {prefix}_AT(arena, name) ((void *)((unsigned char *)(arena) + {prefix}_##name##_OFFSET))", "",
    ]  # fmt: skip
    for name, nbytes in arenas.items():
        word = f"{prefix}_{words[name]}"
        lines += [f"#define {word}_SIZE {_number(nbytes)}", f"#define {word}_ALIGNMENT {alignment}u", ""]
    for place in places:
        if place.offset < 0 or place.offset + place.size > arenas[place.arena]:
            raise BadInput(
                "a header says where placed tensors lie, and this one lies outside of its arena",
                f"{place.name!r} at {place.offset}", "--arena-header",
            )  # fmt: skip
        word = f"{prefix}_{_unique(_word(place.name) or 'TENSOR', used)}"
        within = f"{word}_OFFSET + {word}_SIZE <= {prefix}_{words[place.arena]}_SIZE"
        lines += [
            f"/* {_comment(place.name)} [{place.first}, {place.end}){_within(place, arenas)} */",
            f"#define {word}_OFFSET {_number(place.offset)}", f"#define {word}_SIZE {_number(place.size)}",
            *([f"#define {word}_BANK {number[place.arena]}u"] if len(arenas) > 1 else []),
            f"{prefix}_CHECK({within});", "",
        ]  # fmt: skip
    return "\n".join([*lines, f"#endif /* {prefix}_H */", ""])


def header_of_plan(graph: Graph, plan: Plan, title: str, alignment: int) -> str:
    """As `c_header`, of a plan's arena, and of the host's where something is offloaded. Results that leave the arena
    for the caller are not in it, nor is the static set. Raises ``BadInput`` for a plan that is not placed."""
    arenas = {"arena": plan.arena} | ({"host": plan.host} if plan.host else {})
    pools = {"device": "arena", "host": "host"}
    stays = [r for r in plan.residences if r.pool in pools and r.size]
    if plan.arena and not stays:
        raise BadInput("a header says where tensors lie, and this plan does not", title, "--arena-header")
    places = (
        Place(_called(graph, plan, r), pools[r.pool], r.offset, r.size, r.start, r.end)
        for r in sorted(stays, key=lambda r: (r.pool, r.start, r.offset))
    )
    return c_header(title, arenas, alignment, places)


def header_of_packing(problem: Problem, solution: Solution, title: str) -> str:
    """As `c_header`, of a packing: one arena, or one for each heap of each pool."""
    homes = solution.homes or (("arena", 0),) * len(problem.buffers)
    ends = dict.fromkeys((pool.name for pool in problem.pools if pool.heap is None), 0)
    places = []
    heaps = {home for home in homes if home[1]}
    for b, offset, (pool, heap) in zip(problem.buffers, solution.offsets, homes, strict=True):
        name = f"{pool} {heap}" if any(p == pool for p, _ in heaps) else pool
        ends[name] = max(ends.get(name, 0), offset + b.size)
        if b.size:
            places.append(Place(b.id, name, offset, b.size, b.lower, b.upper))
    alignment = max((b.alignment for b in problem.buffers), default=1)
    return c_header(title, ends or {"arena": 0}, alignment, places)


def _called(graph: Graph, plan: Plan, r: Residence) -> str:
    if r.storage >= 0:
        name = graph.storages[r.storage].name
        return name if r.form == "full" else f"{name} {r.form}"
    op = plan.steps[r.start].op
    return f"{graph.ops[op].name} {'state' if r.form == 'state' else 'scratch'}"


def _word(name: str) -> str:
    return re.sub(r"[^A-Z0-9]+", "_", name.upper()).strip("_")


def _unique(word: str, used: set[str]) -> str:
    found, k = word, 1
    # What is made of a word, such as X_SIZE, must not be another word either.
    while (made := {found, *(f"{found}_{end}" for end in _ENDS)}) & used:
        k += 1
        found = f"{word}_{k}"
    used |= made
    return found


_ENDS = ("SIZE", "OFFSET", "ALIGNMENT", "BANK")


def _within(place: Place, arenas: Mapping[str, int]) -> str:
    return f" in {_comment(place.arena)}" if len(arenas) > 1 else ""


def _comment(name: str) -> str:
    """A name that ends no comment and begins none."""
    return visible(" ".join(name.split())).replace("*/", "* /").replace("/*", "/ *").replace("\\", "/")


def _number(value: int) -> str:
    return f"{value}u" if value < 1 << 32 else f"{value}ull"
