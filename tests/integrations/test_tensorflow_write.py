"""Plans of TensorFlow's graphs written back: they run with the same numbers, and are what Grappler writes."""

# ruff: noqa: N802

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed (pip install 'tightship[tensorflow]')", allow_module_level=True)

import numpy as np
import tensorflow as tf

from support.tensorflow_models import MODELS, branches, grappler, trained, v1
from tightship import api, sources
from tightship.cli import main
from tightship.errors import BadInput, Unsupported
from tightship.frontends.tensorflow.nodes import Node, Web
from tightship.integrations.tensorflow_write import accumulated, planned_graph, write_graph
from tightship.planners.default import plan_alone

TRAINED = ("cnn", "mlp", "mlp_ref", "transformer")


def program(folder: Path, name: str) -> Any:
    proto, fetch = MODELS[name]()
    path = folder / f"{name}.pb"
    path.write_bytes(proto.SerializeToString())
    return sources.read_graphdef(str(path), fetch=fetch)


def nodes_of(proto: Any) -> dict[str, Node]:
    return {n.name: Node(n.name, n.op, tuple(n.input), n.device) for n in proto.node}


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", TRAINED)
def test_G03_G04_G05_a_session_trains_the_rewritten_graph_to_the_same_bits(name: str, tmp_path: Path) -> None:
    source = program(tmp_path, name)
    made = api.plan_named(source.graph, "grappler", level="recompute").plan
    after = planned_graph(source, made)
    assert made.count("recompute") > 0 and len(after.node) > len(source.file.proto.node)
    assert same(trained(source.file.proto, source.fetch), trained(after, source.fetch))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_G01_G02_G03_G04_G05_the_same_nodes_as_tensorflows_own_grappler(name: str, tmp_path: Path) -> None:
    source = program(tmp_path, name)
    made = api.plan_named(source.graph, "grappler", level="recompute").plan
    ours = nodes_of(planned_graph(source, made))
    theirs = nodes_of(grappler(source.file.proto, source.fetch, "RECOMPUTATION_HEURISTICS"))
    assert ours.keys() == theirs.keys()
    for n, node in ours.items():
        assert (node.kind, node.device) == (theirs[n].kind, theirs[n].device)
        assert sorted(node.inputs) == sorted(theirs[n].inputs)


def swaps(before: Any, after: Any) -> list[tuple[Node, Node, list[str]]]:
    """Copy out, copy in, and who waits for the copy out; holds for every run of either Grappler."""
    nodes = nodes_of(after)
    Web([Node(n.name, n.kind, n.inputs) for n in nodes.values()])  # no cycle
    known = nodes_of(before)
    added = {n: node for n, node in nodes.items() if n not in known}
    outs = {n: node for n, node in added.items() if n.startswith("swap_out_")}
    ins = {n: node for n, node in added.items() if n.startswith("swap_in_")}
    views = {
        n for n, node in added.items() if n.startswith("Recomputed/") and node.kind in ("Identity", "Reshape")
    }
    assert len(outs) + len(ins) + len(views) == len(added) and len(outs) == len(ins) > 0
    found = []
    for n, node in outs.items():
        back = ins[n.replace("swap_out_", "swap_in_")]
        assert back.inputs[0] == n and len(back.inputs) == 2 and back.inputs[1].startswith("^")
        assert len(node.inputs) == 1
        found.append((node, back, [m for m, other in nodes.items() if f"^{n}" in other.inputs]))
    return found


@pytest.mark.parametrize("memory", [30 << 20, 60 << 20])
def test_G08_G09_G12_swaps_hold_what_grapplers_hold_in_every_run(memory: int, tmp_path: Path) -> None:
    source = program(tmp_path, "tanh_chain")
    before = source.file.proto
    made = api.plan_named(source.graph, "grappler", memory, level="swap").plan
    ours, theirs = planned_graph(source, made), grappler(before, source.fetch, "SWAPPING_HEURISTICS", memory)
    for after in (ours, theirs):
        for out, back, waiting in swaps(before, after):
            assert (out.kind, back.kind) == ("_CopyFromGpuToHost", "_CopyFromHostToGpu")
            assert "GPU" in out.device and out.device == back.device
            assert len(waiting) == 1
        classes = {n.name: list(n.attr["_class"].list.s) for n in after.node if n.name.startswith("swap_")}
        assert all(any(c.startswith(b"loc@") for c in row) for row in classes.values())
    largest = {tf.as_dtype(v.dtype).size * int(np.prod(v.shape)) for v in source.graph.values}
    assert max(largest) == 8 << 20  # a swapped tanh
    peak = made.peak_before
    assert made.peak < peak and made.met == (made.peak <= memory)


def test_G08_enough_memory_swaps_nothing_in_either(tmp_path: Path) -> None:
    source = program(tmp_path, "tanh_chain")
    made = api.plan_named(source.graph, "grappler", "1GiB", level="swap").plan
    after = grappler(source.file.proto, source.fetch, "SWAPPING_HEURISTICS", 1 << 30)
    assert made.count("offload") == 0 and len(after.node) == len(source.file.proto.node)


def test_G11_G13_an_input_named_by_hand_is_swapped_once(tmp_path: Path) -> None:
    source = program(tmp_path, "tanh_chain")
    consumer = next(op for op in source.graph.ops if op.name == "gradients/MatMul_2_grad/MatMul_1")
    made = api.plan_named(source.graph, "grappler", level="manual", swap_hints=f"{consumer.name}:0").plan
    found = swaps(source.file.proto, planned_graph(source, made))
    assert [out.name for out, _, _ in found] == [f"swap_out_{consumer.name}_0"]
    with pytest.raises(BadInput, match="swapped once"):
        hints = f"{consumer.name}:0,{consumer.name}:0"
        api.plan_named(source.graph, "grappler", level="manual", swap_hints=hints)


@pytest.mark.parametrize("many", [False, True])
def test_G11_the_attribute_of_a_consumer_names_its_inputs_as_for_tensorflow(
    many: bool, tmp_path: Path
) -> None:
    proto, fetch = MODELS["tanh_chain"]()
    name = "gradients/MatMul_2_grad/MatMul_1"
    said = v1.AttrValue(list=v1.AttrValue.ListValue(i=[0])) if many else v1.AttrValue(i=0)
    next(n for n in proto.node if n.name == name).attr["_swap_to_host"].CopyFrom(said)
    path = tmp_path / "hinted.pb"
    path.write_bytes(proto.SerializeToString())
    source = sources.read_graphdef(str(path), fetch=fetch)
    assert source.graph.meta["swaps"] == [f"{name}:0"]
    ours = planned_graph(source, api.plan_named(source.graph, "grappler", level="manual").plan)
    theirs = grappler(proto, fetch, "MANUAL")
    for after in (ours, theirs):
        assert [out.name for out, _, _ in swaps(proto, after)] == [f"swap_out_{name}_0"]
        reads = {n.name: list(n.input) for n in after.node}
        assert reads[name][0] == f"swap_in_{name}_0" and reads[f"swap_out_{name}_0"][0] == "Tanh_1"


def test_G06_G07_a_sum_that_is_crowded_becomes_an_accumulator(tmp_path: Path) -> None:
    proto, fetch = branches()
    path = tmp_path / "branches.pb"
    path.write_bytes(proto.SerializeToString())
    source = sources.read_graphdef(str(path), fetch=fetch)
    before = api.plan_named(source.graph, "grappler", level="none").plan.peak
    assert accumulated(source, 2 * before) is source  # the peak is below 80 % of that
    after = accumulated(source, before)
    assert api.plan_named(after.graph, "grappler", level="none").plan.peak < 0.6 * before
    nodes = nodes_of(after.file.proto)
    kinds = [n.kind for n in nodes.values() if n.name.startswith("total")]
    assert {k: kinds.count(k) for k in kinds} == {
        "TemporaryVariable": 1, "ZerosLike": 1, "Assign": 1, "AssignAdd": 6, "DestroyTemporaryVariable": 1,
    }  # fmt: skip
    readers = {n for n, node in nodes.items() if "total" in node.inputs}
    assert readers == {n for n, node in nodes_of(proto).items() if "total" in node.inputs}
    for one, other in zip(trained(proto, fetch), trained(after.file.proto, fetch), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    out = tmp_path / "out.pb"
    asked = ["plan", str(path), "--fetch", ",".join(fetch), "--planner", "grappler", "--level", "scheduling"]
    assert main([*asked, "--budget", "5MB", "--write", str(out), "--json"]) == 0
    assert "total/tmp_var" in nodes_of(v1.GraphDef.FromString(out.read_bytes()))


def test_swaps_run_on_the_host_by_identity_to_the_same_bits(tmp_path: Path) -> None:
    source = program(tmp_path, "transformer")
    made = api.plan_named(source.graph, "grappler", level="swap").plan
    after = planned_graph(source, made, "identity")
    kinds = {n.op for n in after.node if n.name.startswith("swap_")}
    assert kinds == {"Identity"} and made.count("offload") > 0
    assert same(trained(source.file.proto, source.fetch), trained(after, source.fetch))
    with pytest.raises(BadInput, match="--copies"):
        planned_graph(source, made, "teleport")


@pytest.mark.parametrize("name", TRAINED)
def test_our_own_plans_run_to_the_same_bits_in_their_order(name: str, tmp_path: Path) -> None:
    source = program(tmp_path, name)
    made = api.plan_graph(source.graph, "75%", work=2_000_000).plan
    after = planned_graph(source, made)
    assert same(trained(source.file.proto, source.fetch), trained(after, source.fetch))
    order = [n for n in Web(list(nodes_of(after).values())).order if n in {o.name for o in source.graph.ops}]
    planned = [source.graph.ops[s.op].name for s in made.steps if s.kind == "compute"]
    assert order == planned


def test_whole_buffers_and_offload_are_written_too(tmp_path: Path) -> None:
    source = program(tmp_path, "transformer")
    for made in (
        api.plan_named(source.graph, "memonger").plan,
        api.plan_graph(source.graph, "70%", allow="recompute,offload", work=2_000_000).plan,
    ):
        after = planned_graph(source, made, "identity")
        assert same(trained(source.file.proto, source.fetch), trained(after, source.fetch))
    packed = api.plan_graph(source.graph, "97%", allow="compress", work=100_000, lossy=True).plan
    if packed.count("compress"):
        with pytest.raises(Unsupported, match="no op for it"):
            planned_graph(source, packed)


def test_alone_keeps_options_in_the_plan(tmp_path: Path) -> None:
    source = program(tmp_path, "mlp")
    info = api.systems()["grappler"]
    made = plan_alone(source.graph, info, info.options(level="recompute"), "50%")
    assert made.meta["grappler"]["level"] == "recompute" and made.planner == "grappler"
    other = program(tmp_path, "cnn")
    with pytest.raises(BadInput, match="made for another graph"):
        planned_graph(other, made)


def test_the_command_line_reads_plans_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = program(tmp_path, "mlp")
    path, out = tmp_path / "mlp.pb", tmp_path / "out.pb"
    fetch = ",".join(source.fetch)
    asked = ["plan", str(path), "--fetch", fetch, "--planner", "grappler", "--write", str(out), "--json"]
    assert main(asked) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["written"] == str(out) and rows["recomputed"] > 0 and rows["planner"] == "grappler"
    assert rows["peak_after"] < rows["peak_before"]
    after = v1.GraphDef.FromString(out.read_bytes())
    assert same(trained(source.file.proto, source.fetch), trained(after, source.fetch))
    text = tmp_path / "out.pbtxt"
    write_graph(source, api.plan_named(source.graph, "grappler").plan, text)
    assert "Recomputed/" in text.read_text()
    for wrong in (["--views"], ["--fetch", "nobody"], ["--shape", "x=1x1"], ["--level", "some"]):
        assert main(["plan", str(path), "--planner", "grappler", *wrong]) == 2
        assert "Traceback" not in capsys.readouterr().err
    assert main(["plan", "no.onnx", "--fetch", "x"]) == 2
    assert "graph.pb" in capsys.readouterr().err


def test_a_written_graph_read_again_has_the_bytes_that_were_planned(tmp_path: Path) -> None:
    """Equal nodes are one, and those that nobody reads any more stay in the file, by their names: they are no
    results, unless they are fetched."""
    with v1.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, (1, 64), name="x")
        for k in range(3):
            wide = tf.reshape(
                tf.constant(np.zeros((1, 64), np.float32), name=f"zeros_{k}"), (64,), name=f"bias_{k}"
            )
            x = tf.nn.bias_add(tf.tanh(x, name=f"tanh_{k}"), wide, name=f"add_{k}")
            x = x + tf.exp(x, name=f"exp_{k}") * tf.exp(x, name=f"again_{k}")
    first, second = tmp_path / "first.pb", tmp_path / "second.pb"
    first.write_bytes(graph.as_graph_def().SerializeToString())
    given = sources.read_graphdef(str(first))
    plan = api.plan_graph(given.graph).plan
    write_graph(given, plan, second)
    written = sources.read_graphdef(str(second))
    assert written.graph.static_bytes == given.graph.static_bytes
    assert len(written.graph.ops) == len(given.graph.ops)
    assert api.plan_graph(written.graph).plan.peak == plan.peak
    names = {n.name for n in written.file.proto.node}
    assert {"again_1", "bias_2", "zeros_2"} <= names
    fetched = sources.read_graphdef(str(second), fetch="again_2")
    assert "again_2" in {op.name for op in fetched.graph.ops}
    feed = np.linspace(-1, 1, 64, dtype=np.float32)[None]
    results = []
    for path in (first, second):
        with v1.Graph().as_default(), v1.Session() as session:
            tf.import_graph_def(v1.GraphDef.FromString(path.read_bytes()), name="")
            last = next(n.name for n in reversed(graph.as_graph_def().node))
            results.append(session.run([f"{last}:0", "again_1:0"], {"x:0": feed}))
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))
