"""A small graph with a bit of everything, a good plan of it, and ways to break it, for tests of the verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from support.strategies import random_plan
from tightship.graph import Graph, Op, Request, Storage, Value
from tightship.plan import Plan, Step
from tightship.verify import verify

W, A, B, C, D, E = range(6)
F, G, SCALE, H, MARK, DRAW, REDRAW, UPDATE = range(8)


def small() -> Graph:
    """w is the caller's; b is written in place; d and e are random; w is updated last; e is the result. All hold
    booleans, so that they can be packed; d can be drawn again from a saved state."""
    storages = tuple(Storage(n, 128, "parameter" if n == "w" else "activation") for n in "wabcde")
    values = tuple(
        Value(n, s, "bool", (128,), (1,)) for n, s in zip("wabcdeB", (W, A, B, C, D, E, B), strict=True)
    )
    ops = (
        Op("f", "f", (0,), (1,)),
        Op("g", "g", (1,), (2,), workspace=64),
        Op("scale", "mul_", (2, 1), (6,), mutates=(B,)),
        Op("h", "h", (6, 1), (3,), workspace=192, requests=(Request(192, -1, 0, 2), Request(128, 0, 1, -1))),
        Op("mark", "mark", (0,), (), effect=True, control=(G,)),
        Op("draw", "dropout", (3,), (4,), random=True, state=64),
        Op("redraw", "dropout", (3,), (5,), random=True),
        Op("update", "add_", (0, 3), (), mutates=(W,), phase="update"),
    )
    return Graph(ops, values, storages, (0,), (5,), "small")


def run(*ops: int) -> list[Step]:
    return [Step("compute", op=k) for k in ops]


def free(*storages: int, form: str = "full", waits: tuple[int, ...] = ()) -> Step:
    return Step("free", storages=storages, form=form, waits=waits)


def good() -> list[Step]:
    """a is recomputed and packed, c goes to the host and back on a stream of its own."""
    return [
        *run(F, G, SCALE),  # 0, 1, 2
        free(A),  # 3
        Step("recompute", op=F, storages=(A,)),  # 4
        *run(H, MARK),  # 5, 6
        Step("compress", storages=(A,), nbytes=64, codec="bits"),  # 7
        free(A, B),  # 8
        *run(DRAW),  # 9
        free(A, form="packed"),  # 10
        Step("offload", storages=(C,), stream=1, waits=(9,)),  # 11
        free(C, waits=(11,)),  # 12
        Step("fetch", storages=(C,), stream=1, waits=(12,)),  # 13
        free(C, form="host", waits=(13,)),  # 14
        replace(run(REDRAW)[0], waits=(13,)),  # 15
        *run(UPDATE),  # 16
        free(C, D),  # 17
    ]


def decided(steps: Sequence[Step], graph: Graph | None = None) -> Plan:
    """A decision without placement; the peak is left for the verifier to refuse, since steps may be wrong."""
    graph = graph or small()
    return Plan(graph.digest, tuple(steps), static=graph.static_bytes)


def codes(plan: Plan, graph: Graph | None = None) -> set[str]:
    return {v.code for v in verify(graph or small(), plan)}


def step_codes(steps: Sequence[Step], graph: Graph | None = None) -> set[str]:
    return codes(decided(steps, graph), graph) - {"peak-mismatch", "time-mismatch"}


def placed(**changes: object) -> Plan:
    plan = random_plan(small(), 2, tuple(good()))
    return replace(plan, **changes)  # type: ignore[arg-type]


def at(index: int, *new: Step) -> list[Step]:
    """Good steps with the one at ``index`` replaced; later ones keep their waits, so use it with care."""
    steps = good()
    return [*steps[:index], *new, *steps[index + 1 :]]


def plain(*extra: Step, order: Sequence[int] = range(8)) -> list[Step]:
    """Nothing evicted, nothing freed before the end."""
    return [*run(*order), *extra, free(A, B, C, D)]
