"""Recycling of whole buffers (M1 to M10), on graphs made for it, on random ones and on real models."""

# ruff: noqa: N802

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.strategies import graphs, random_order
from support.zoo import captured, measured, on_devices
from tightship.analysis.concurrency import interference
from tightship.analysis.order import is_legal, predecessors
from tightship.baselines.memonger import Options, mapping, plan, recycled, renamed
from tightship.cli import main
from tightship.errors import BadInput
from tightship.graph import Graph, Op, Storage, Value
from tightship.plan import Problem
from tightship.planners import planner
from tightship.planners.layout import in_any_order
from tightship.planners.packing import Search, pack
from tightship.serde import dumps_graph, dumps_plan, loads_plan
from tightship.verify import verify

ANY = Options(any_order=True)
REAL = ("gpt2", "resnet", "lstm")


def net(edges: str, sizes: dict[str, int] | None = None, **fields: object) -> Graph:
    """Ops written ``a b > c; c > d``: each reads and defines storages; ``in`` is the caller's, ``out`` is kept."""
    rows = [[side.split() for side in op.split(">")] for op in edges.split(";")]
    names = list(dict.fromkeys(["in", *(n for row in rows for side in row for n in side)]))
    storages = tuple(Storage(n, (sizes or {}).get(n, 64)) for n in names)
    values = tuple(Value(n, k, "uint8", (64,), (1,)) for k, n in enumerate(names))
    at = {n: k for k, n in enumerate(names)}
    ops = tuple(
        Op(f"op{k}", "test", tuple(at[n] for n in reads), tuple(at[n] for n in makes))
        for k, (reads, makes) in enumerate(rows)
    )
    outputs = tuple(at[n] for n in names if n.startswith("out"))
    return replace(Graph(ops, values, storages, (0,), outputs), **fields)


def shared(graph: Graph, options: Options) -> set[frozenset[str]]:
    """The sets of names that share a buffer."""
    sets: dict[str, set[str]] = {}
    for old, new in mapping(graph, options).items():
        sets.setdefault(new, set()).add(old)
    return {frozenset(names) for names in sets.values()}


def clashes(graph: Graph, options: Options, order: list[int]) -> list[tuple[int, int]]:
    """Pairs of storages of one buffer that are both alive when the ops run in this order."""
    found, _ = recycled(graph, options)
    at = {k: i for i, k in enumerate(order)}
    uses = graph.uses
    spans = {
        s: (at[uses.definer[s]], max(at[k] for k in (*uses.writers[s], *uses.readers[s])))
        for s in found.of
        if graph.storages[s].size
    }
    stay = graph.kept
    pairs = [(s, t) for s in spans for t in spans if s < t and found.of[s] == found.of[t]]
    ends = {s: len(order) if s in stay else end for s, (_, end) in spans.items()}
    return [(s, t) for s, t in pairs if max(spans[s][0], spans[t][0]) <= min(ends[s], ends[t])]


# --- the original's behaviors ---


def test_M01_graphs_with_control_flow_are_left_as_they_are_with_a_message() -> None:
    inner = net("in > x; x > out")
    graph = net("in > a; a > b; b > c; c > out")
    loop = graph.with_ops((replace(graph.ops[0], calls=(inner,)), *graph.ops[1:]))
    made = plan(loop)
    assert made.meta["memonger"]["mapping"] == {}
    assert "op 'op0' runs graphs of its own" in made.notes[0]
    assert plan(graph).meta["memonger"]["mapping"] != {}


def test_M01_names_that_are_static_are_never_recycled() -> None:
    graph = net("in > a; a > b; b > c; c > d; d > out")
    assert shared(graph, Options()) == {frozenset("ac"), frozenset("bd")}
    assert shared(graph, Options(never="c")) == {frozenset("bd")}
    real = captured("gpt2")
    names = [old for old in mapping(real)][:3]
    assert not set(names) & set(mapping(real, Options(never=",".join(names))))


def test_M02_an_output_takes_the_buffer_released_last_but_none_of_its_own_op() -> None:
    # a and b die at op 2, b last; what op 2 makes cannot take them, what op 3 makes takes b.
    graph = net("in > a; in > b; a b > c; c > d; d > e; e > out")
    assert shared(graph, Options()) == {frozenset("bd"), frozenset("ce")}


@pytest.mark.parametrize("name", REAL)
def test_M02_on_real_models_no_two_that_are_alive_share(name: str) -> None:
    graph = captured(name)
    made = plan(graph)
    assert verify(graph, made) == []
    assert clashes(graph, Options(), list(range(len(graph.ops)))) == []
    assert made.meta["memonger"]["saved"] > 0


def test_M03_a_graph_that_was_recycled_before_is_detected() -> None:
    graph = captured("resnet")
    names = mapping(graph)
    again = renamed(graph, names)
    assert {s.name for s in again.storages} & set(names.values())
    assert not {s.name for s in again.storages} & set(names)
    made = plan(again)
    assert "recycled before" in made.notes[0] and made.meta["memonger"]["mapping"] == {}
    assert plan(again, ANY).meta["memonger"]["mapping"] == {}


def test_M04_heads_ops_names_and_scope_are_given() -> None:
    graph = net("in > a; a > b; b > c; c > d; d > out")
    assert shared(graph, ANY) == {frozenset("ac"), frozenset("bd")}
    assert shared(graph, replace(ANY, share="a,b,c")) == {frozenset("ac")}
    assert shared(graph, replace(ANY, never="a")) == {frozenset("bd")}
    assert shared(graph, replace(ANY, ops="op3")) == {frozenset("bd")}
    assert shared(graph, replace(ANY, scope="no")) == set()
    two = net("in > a; a > b; b > c; c > out", inputs=(0,))
    assert shared(two, replace(ANY, heads="in")) == {frozenset("ac")}
    assert shared(two, replace(ANY, heads="b")) == set()  # nothing that waits for none reads it
    with pytest.raises(BadInput, match="unknown storage 'nobody'"):
        plan(graph, replace(ANY, share="nobody"))
    with pytest.raises(BadInput, match="unknown op 'nobody'"):
        plan(graph, replace(ANY, ops="nobody"))


def test_M04_a_scope_of_a_real_model() -> None:
    graph = captured("gpt2")
    scope = next(name for name in mapping(graph, ANY))[:5]
    names = mapping(graph, replace(ANY, scope=scope))
    assert names and all(name.startswith(scope) for name in names)


def test_M05_an_op_is_visited_when_all_it_waits_for_has_been_made() -> None:
    # Depth first: the branch over a goes down to c before b is made, then c waits for d.
    graph = net("in > a; a > c; in > b; b > d; c d > e; e > f; f > out")
    assert shared(graph, ANY) == {frozenset("af")} or clashes(graph, ANY, [0, 1, 2, 3, 4, 5, 6]) == []
    for order in ([0, 1, 2, 3, 4, 5, 6], [2, 3, 0, 1, 4, 5, 6], [0, 2, 1, 3, 4, 5, 6]):
        assert is_legal(graph, order) and clashes(graph, ANY, order) == []
    assert len(shared(graph, ANY)) > 0


def test_M06_branches_do_not_share_and_what_joins_them_may() -> None:
    graph = net("in > a; a > b; a > c; b > d; c > e; d e > f; f > g; g > out")
    sets = shared(graph, ANY)
    one, other = set("bd"), set("ce")
    assert not any(names & one and names & other and len(names) == 2 and "f" not in names for names in sets)
    assert any(names & {"f", "g"} for names in sets)  # f and g come after both branches
    # The linear form does share between the branches, which is wrong for other orders.
    assert clashes(graph, Options(), [0, 1, 3, 2, 4, 5, 6, 7]) or shared(graph, Options()) != sets


@given(graphs(max_ops=40, calls=0.0), st.booleans(), st.integers(0, 2**32))
@settings(max_examples=150)
def test_M06_sharing_holds_in_every_legal_order(graph: Graph, sizes: bool, seed: int) -> None:
    options = replace(ANY, sizes=sizes)
    made = plan(graph, options)
    assert verify(graph, made) == []
    rows = interference(graph, predecessors(graph))
    found, _ = recycled(graph, options)
    for s, buffer in found.of.items():
        for t, other in found.of.items():
            if s < t and buffer == other and graph.storages[s].size and graph.storages[t].size:
                assert not rows[s] >> t & 1
    order = list(random_order(graph, seed))
    assert clashes(graph, options, order) == []


@pytest.mark.parametrize("name", REAL)
def test_M06_on_real_models_in_random_legal_orders(name: str) -> None:
    graph = captured(name)
    assert plan(graph, ANY).meta["memonger"]["saved"] > 0
    for seed in range(20):
        order = list(random_order(graph, seed))
        assert clashes(graph, ANY, order) == []
    # The linear form is safe in its own order only.
    if name != "lstm":
        assert any(clashes(graph, Options(), list(random_order(graph, s))) for s in range(20))


@pytest.mark.parametrize("options", [Options(), ANY, replace(ANY, sizes=False)])
def test_M07_devices_never_share(options: Options) -> None:
    graph = on_devices(captured("gpt2"), "cuda:0", "cuda:1", "cpu")
    found, _ = recycled(graph, options)
    devices: dict[int, set[str]] = {}
    for s, buffer in found.of.items():
        devices.setdefault(buffer, set()).add(graph.ops[graph.uses.definer[s]].device)
    assert all(len(there) == 1 for there in devices.values())
    assert max(found.shares) > 1


def test_M07_what_is_copied_to_the_host_lies_there() -> None:
    graph = net("in > a; a > b; b > c; c > d; d > out")
    targets = {1: "CopyGPUToCPU"}
    there = graph.with_ops(
        tuple(
            replace(op, device="cuda:0", target=targets.get(k, op.target)) for k, op in enumerate(graph.ops)
        )
    )
    for options in (Options(), ANY):  # b, the copy, shares with nothing of the device; a and c do
        assert not any("b" in names for names in shared(there, options))
        assert any({"a", "c"} <= names for names in shared(there, options))


def test_M08_without_sizes_the_least_shared_with_sizes_the_best_fit() -> None:
    # big and small are both free when x is made; before that, p and q have shared big twice.
    edges = "in > big; big > m; m > p; p > n; n > small; small big2 > k; k > x; x > out"
    graph = net(edges.replace("small big2", "small"), {"big": 640, "m": 64, "p": 640, "n": 64, "x": 64})
    fitted, plain = recycled(graph, ANY)[0], recycled(graph, replace(ANY, sizes=False))[0]
    assert sum(fitted.sizes) <= sum(plain.sizes)
    assert max(plain.shares) - min(s for s in plain.shares if s > 1) <= 1  # evenly shared
    for name in REAL:
        real = captured(name)
        made = plan(real, ANY)
        alone = sum(s.size for k, s in enumerate(real.storages) if k not in real.static)
        saved = made.meta["memonger"]["saved"]
        assert f"{saved} bytes saved" in made.notes[0]
        assert saved == alone - sum(recycled(real, ANY)[0].sizes)
        assert saved > plan(real, replace(ANY, sizes=False)).meta["memonger"]["saved"]


def test_M09_renames_reach_into_graphs_that_ops_run_with_their_own_mapping() -> None:
    cell = captured("lstm")  # a real model as the step net of a recurrent op
    first = next(s for s in sorted(cell.static) if cell.storages[s].size)
    storages = tuple(replace(s, name="b" if k == first else s.name) for k, s in enumerate(cell.storages))
    step_net = replace(cell, storages=storages)
    graph = net("in > a; a > b; b > c; c > d; d > out")
    recurrent = graph.with_ops((*graph.ops[:2], replace(graph.ops[2], calls=(step_net,)), *graph.ops[3:]))
    names = mapping(recurrent, ANY)
    assert "b" in names
    after = renamed(recurrent, names)
    inner = after.ops[2].calls[0]
    assert inner.storages[first].name == names["b"]
    assert inner.meta["memonger"] == {"b": names["b"]}
    assert [s.name for s in after.storages if s.name in names.values()]
    assert (inner.digest, after.uses) == (step_net.digest, recurrent.uses)
    assert verify(recurrent, plan(recurrent, ANY)) == []


@pytest.mark.parametrize("name", REAL)
def test_M10_the_same_safety_takes_a_smaller_arena_with_offsets(name: str) -> None:
    graph = measured(name) if name == "resnet" else captured(name)
    life = in_any_order(graph)
    packed = pack(life.problem, search=Search(work=20_000, seconds=20.0))
    by_name, naive = plan(graph, ANY).arena, pack(life.problem, "naive").arena
    assert packed.lower_bound <= packed.arena < by_name <= naive
    greedy = pack(life.problem, "greedy-by-size")
    assert packed.arena <= greedy.arena < naive


# --- as a planner ---


def test_the_mapping_is_part_of_the_plans_json() -> None:
    graph = captured("gpt2")
    made = plan(graph, ANY)
    back, _ = loads_plan(dumps_plan(made, graph))
    assert back.meta["memonger"]["mapping"] == mapping(graph, ANY)
    assert made.planner == "memonger" == planner("memonger", "share").name


@given(graphs(max_ops=40))
@settings(max_examples=60)
def test_every_plan_is_verified_and_no_larger_than_naive(graph: Graph) -> None:
    for options in (Options(), ANY):
        made = plan(graph, options)
        assert verify(graph, made) == []
        assert made.meta["memonger"]["saved"] >= 0
        assert plan(graph, options).residences == made.residences


def test_an_empty_graph() -> None:
    graph = Graph((), (), ())
    assert plan(graph).arena == plan(graph, ANY).arena == 0
    assert pack(in_any_order(graph).problem).arena == 0
    assert in_any_order(graph).problem == Problem(())


# --- from the command line ---


def asked(capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, object]:
    assert main(["plan", *given, "--planner", "memonger", "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def written(folder: Path, graph: Graph) -> str:
    path = folder / "graph.json"
    path.write_bytes(dumps_graph(graph))
    return str(path)


def test_M01_M03_M07_as_the_command_line_says_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = captured("gpt2")
    rows = asked(capsys, written(tmp_path, graph))
    assert rows["meta"]["memonger"]["mapping"] == mapping(graph)  # type: ignore[index]
    assert "bytes saved" in rows["notes"][0]  # type: ignore[index]
    again = asked(capsys, written(tmp_path, renamed(graph, mapping(graph))))
    assert "recycled before" in again["notes"][0]  # type: ignore[index]
    loop = graph.with_ops((replace(graph.ops[0], calls=(net("in > x; x > out"),)), *graph.ops[1:]))
    left = asked(capsys, written(tmp_path, loop))
    assert "runs graphs of its own" in left["notes"][0]  # type: ignore[index]
    assert left["meta"]["memonger"]["mapping"] == {}  # type: ignore[index]
    apart = on_devices(graph, "cuda:0", "cuda:1")
    shared_names = asked(capsys, written(tmp_path, apart))["meta"]["memonger"]["mapping"]  # type: ignore[index]
    device = {
        apart.storages[s].name: apart.ops[k].device for k, d in enumerate(apart.uses.defines) for s in d
    }
    by_buffer: dict[str, set[str]] = {}
    for old, new in shared_names.items():
        by_buffer.setdefault(new, set()).add(device[old])
    assert by_buffer and all(len(there) == 1 for there in by_buffer.values())
