"""Hints are obeyed, or refused with a reason (G2, G11)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chains import chain
from tightship.errors import BadInput
from tightship.graph import Graph
from tightship.planners.default import Options, plan
from tightship.planners.hints import parse_hints, resolve

QUICK = Options(work=300_000, seconds=30.0)


def layered(n: int) -> Graph:
    graph = chain(n)
    return graph.with_ops(
        tuple(replace(o, module=f"net.{k}" if o.phase == "forward" else "") for k, o in enumerate(graph.ops))
    )


def gone(graph: Graph, hints: str, kind: str, budget: str = "80%", **more: object) -> set[str]:
    made = plan(graph, budget, replace(QUICK, hints=hints, **more))
    return {graph.storages[s].name for step in made.steps if step.kind == kind for s in step.storages}


def test_G02_only_what_a_hint_names_must_be_recomputed() -> None:  # noqa: N802
    graph = layered(12)
    assert {"f2", "f3"} <= gone(graph, "net.2=recompute, net.3=recompute", "recompute", "100%")
    again = gone(graph, "net.2=keep,net.3=keep,net.4=keep", "recompute")
    assert again and not again & {"f2", "f3", "f4"}


def test_G11_what_a_hint_names_is_offloaded() -> None:  # noqa: N802
    assert gone(layered(12), "net.5=offload", "offload", "100%") == {"f5"}


def test_a_pattern_means_the_modules_inside_too() -> None:
    graph = layered(6)
    inner = graph.with_ops(tuple(replace(o, module=o.module and f"{o.module}.act") for o in graph.ops))
    assert set(resolve(inner, [("net.2", "keep")])) == {3}
    assert set(resolve(inner, [("net.*", "keep")])) == set(range(1, 7))


def test_G13_what_cannot_be_done_is_refused_with_the_reason() -> None:  # noqa: N802
    graph = layered(6)
    ops = (replace(graph.ops[0], random=True), *graph.ops[1:])
    with pytest.raises(BadInput, match="f0 draws random numbers"):
        resolve(graph.with_ops(ops), [("net.0", "recompute")])
    with pytest.raises(BadInput, match="no codec makes f1 smaller"):
        resolve(graph, [("net.1", "compress")])
    with pytest.raises(BadInput, match="matches a module"):
        resolve(graph, [("other.*", "keep")])
    with pytest.raises(BadInput, match="PATTERN=WAY"):
        parse_hints("net.0=forget")
    with pytest.raises(BadInput, match="recompute, compress, offload"):
        plan(graph, "80%", replace(QUICK, allow="magic"))
