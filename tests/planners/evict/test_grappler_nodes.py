"""Grappler's recompute rewrite on the nodes of TensorFlow's graphs, against what TensorFlow did (recorded)."""

# ruff: noqa: N802

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightship.baselines.grappler_nodes import (
    CLONE,
    SUMS,
    TRIGGER,
    accumulator,
    is_target,
    late_order,
    recomputed,
)
from tightship.errors import BadInput
from tightship.frontends.tensorflow.nodes import Node, Web, from_rows, name_of

DATA = Path(__file__).resolve().parents[2] / "data" / "grappler"
RECORDED = sorted(p.stem for p in DATA.glob("*.json"))


def recorded(name: str) -> tuple[list[Node], dict[str, dict[str, list[str]]]]:
    """Nodes of a real training graph, and by level what TensorFlow's Grappler added and changed."""
    found = json.loads((DATA / f"{name}.json").read_text())
    return from_rows(found["nodes"]), found["levels"]


def web(text: str) -> list[Node]:
    """Nodes written ``name Kind input input``, one a line."""
    return [
        Node(n, kind, tuple(reads))
        for n, kind, *reads in (line.split() for line in text.strip().splitlines())
    ]


CHAIN = web("""
x Placeholder
a MatMul x
b Relu a
c Mul b b
d MatMul c
gradients/d MatMul d c
gradients/c Mul gradients/d b
gradients/a MatMul gradients/c a
""")


@pytest.mark.parametrize("level", ["recompute", "manual"])
@pytest.mark.parametrize("name", RECORDED)
def test_G01_G02_G03_G04_G05_the_same_as_tensorflow_on_real_training_graphs(name: str, level: str) -> None:
    nodes, levels = recorded(name)
    mine = recomputed(nodes, heuristic=level != "manual")
    ours = {n.name: sorted(n.inputs) for n in mine.added} | {n: sorted(i) for n, i in mine.inputs.items()}
    assert ours == {n: sorted(i) for n, i in levels[level].items()}


def test_real_graphs_were_recorded() -> None:
    clones = {n: sum(k.startswith(CLONE) for k in recorded(n)[1]["recompute"]) for n in RECORDED}
    assert clones == {"cnn": 6, "mlp": 27, "mlp_ref": 27, "tanh_chain": 0, "transformer": 46}


def test_G02_what_is_fed_and_what_is_dear_stays_and_manual_takes_hints() -> None:
    assert set(recomputed(CHAIN).origin.values()) == {"b", "c"}
    assert set(recomputed(CHAIN, fed=["b"]).origin.values()) == {"c"}
    assert recomputed(CHAIN, heuristic=False).added == ()
    hinted = [Node(n.name, n.kind, n.inputs, hinted=n.name == "a") for n in CHAIN]
    assert set(recomputed(hinted, heuristic=False).origin.values()) == {"a"}


def test_G03_clones_keep_device_and_kind_and_read_clones() -> None:
    there = [Node(n.name, n.kind, n.inputs, "/gpu:1") for n in CHAIN]
    made = {n.name: n for n in recomputed(there).added}
    clone = made["Recomputed/c"]
    assert (clone.kind, clone.device) == ("Mul", "/gpu:1")
    assert clone.inputs == ("Recomputed/b", "Recomputed/b", "^RecomputeTrigger/c")


def test_G04_other_results_of_a_clone_stay_the_originals() -> None:
    nodes = [*CHAIN, Node("gradients/e", "Mul", ("c:1", "c", "^c"))]
    assert recomputed(nodes).inputs["gradients/e"] == ("c:1", "Recomputed/c", "^c")


def test_G05_triggers_form_a_chain_from_what_is_needed_first() -> None:
    made = {n.name: n.inputs for n in recomputed(CHAIN).added}
    assert made["RecomputeTrigger/c"] == ("^d",)  # gradients/d is served first, by c and by b through c
    assert made["RecomputeTrigger/b"] == () or "^RecomputeTrigger/c" in made["RecomputeTrigger/b"]


def test_G06_G07_sums_of_a_real_graph_as_accumulators_keep_name_readers_and_order() -> None:
    nodes, _ = recorded("cnn")
    web = Web(nodes)
    place = {n: i for i, n in enumerate(web.order)}
    sums = [n for n in nodes if n.kind in SUMS and len(n.inputs) > 2]
    assert sums
    for n in sums:
        found = accumulator(web, n.name, place)
        start, zeros, initial, *adds = found.added
        assert (start.kind, zeros.kind, initial.kind) == ("TemporaryVariable", "ZerosLike", "Assign")
        assert [a.inputs[1] for a in adds] == [i for i in n.inputs if not i.startswith("^")]
        assert all(a.inputs[0] == initial.name for a in adds)
        assert (found.result.name, found.result.device) == (n.name, n.device)
        assert set(found.result.inputs) >= {initial.name, *(f"^{a.name}" for a in adds)}
        Web(
            [*(m for m in nodes if m.name != n.name), *found.added, found.result]
        )  # no cycle, all inputs there


def test_G07_what_a_sum_waits_for_goes_before_the_first_value_or_to_the_end() -> None:
    nodes = web("""
early NoOp
a MatMul ^early
b MatMul a
late NoOp ^b
c MatMul b
s AddN a b c ^early ^late
""")
    names = Web(nodes)
    found = accumulator(names, "s", {n: i for i, n in enumerate(names.order)})
    assert found.added[0].inputs == ("^early", "^a") and "^late" in found.result.inputs
    assert "^early" not in found.result.inputs


def test_a_graph_that_was_rewritten_before_stays_as_it_is() -> None:
    assert recomputed(recomputed(CHAIN).applied(CHAIN)).added == ()
    with pytest.raises(BadInput, match="rewritten before"):
        recomputed([*CHAIN, Node("Recomputed/c", "Mul", ("b", "b"))])


def test_what_is_no_graph_is_an_error() -> None:
    with pytest.raises(BadInput, match="cycle through"):
        recomputed(web("a Relu b\nb Relu a"))
    with pytest.raises(BadInput, match="unknown input"):
        recomputed(web("a Relu b"))
    with pytest.raises(BadInput, match="duplicate node name"):
        recomputed(web("a Relu\na Relu"))


@st.composite
def nets(draw: st.DrawFn) -> list[Node]:
    """Nodes of cheap and dear kinds in a legal order, the later ones more likely targets."""
    count = draw(st.integers(2, 30))
    names: list[str] = []
    found = []
    for i in range(count):
        name = f"gradients/n{i}" if draw(st.integers(0, count)) < i else f"n{i}"
        reads = draw(st.lists(st.sampled_from(names), max_size=3)) if names else []
        waits = draw(st.lists(st.sampled_from(names), max_size=1)) if names else []
        kind = draw(st.sampled_from(["Relu", "Mul", "MatMul", "Reshape"]))
        found.append(Node(name, kind, (*reads, *(f"^{n}" for n in waits)), hinted=draw(st.booleans())))
        names.append(name)
    return found


@given(nets())
def test_G05_no_cycle_appears_and_only_targets_change(nodes: list[Node]) -> None:
    # The original's seeds read no target, but what they grow to may: such a graph is no training graph.
    rewrite = recomputed(nodes)
    after = rewrite.applied(nodes)
    targets = {n.name for n in nodes if is_target(n.name, "gradients/")}
    assert set(rewrite.inputs) <= targets
    kinds = {n.name: n.kind for n in nodes}
    for n in rewrite.added:
        if n.name.startswith(TRIGGER):
            assert n.kind == "NoOp" and all(i.startswith("^") for i in n.inputs)
        else:
            assert (
                n.kind == kinds[rewrite.origin[n.name]]
                and n.inputs[-1] == f"^{TRIGGER}{n.name[len(CLONE) :]}"
            )
    order = late_order(nodes, rewrite, {n.name: i for i, n in enumerate(nodes)}.__getitem__)
    assert sorted(order) == sorted(Web(after).order)
    place = {n: i for i, n in enumerate(order)}
    assert all(place[name_of(i)] < place[n.name] for n in after for i in n.inputs)
