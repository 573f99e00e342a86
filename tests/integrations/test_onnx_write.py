"""Planned ONNX models: the checker accepts them, onnxruntime gives equal bits, and needs the planned memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
import onnx
from onnx import TensorProto, helper

import tightship
from support.graphs import made, node, saved, tensor, value
from tightship import api
from tightship.cli import main
from tightship.errors import BadInput
from tightship.frontends.onnx.load import read
from tightship.frontends.onnx.lower import lower
from tightship.integrations.onnx_write import KEY_OFFSETS, KEY_PLAN, write_model
from tightship.integrations.onnxruntime import measure, random_feeds
from tightship.plan import Plan, Step
from tightship.serde import loads_plan
from tightship.simulate import baseline, replay
from tightship.verify import check

torch = pytest.importorskip("torch")
ROUNDING = 63
"""Bytes by which a planned storage may be larger than what the runtime requests for it."""


@pytest.fixture(scope="session")
def folder(request) -> Path:
    return request.config.cache.mkdir("onnx-models")


def feeds_of(program):
    graph = program.graph
    inputs = [
        graph.values[i] for i in graph.inputs if graph.storages[graph.values[i].storage].kind == "input"
    ]
    return random_feeds(program.model.path, {v.name: v.shape for v in inputs})


def same(a, b):
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(a.outputs, b.outputs, strict=True))


def run_both(program, plan, path):
    """The model as it was and as planned, run in onnxruntime; memory is as planned."""
    write_model(program, plan, path)
    feeds = feeds_of(program)
    before, after = measure(program.model.path, feeds), measure(path, feeds)
    graph = program.graph
    for run, steps in ((before, baseline(graph)), (after, plan.steps)):
        planned = replay(graph, steps).peak - graph.static_bytes
        assert planned - ROUNDING * len(graph.storages) <= run.peak <= planned
    assert same(before, after)
    return before, after


# --- real models ---


SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in ("bert", "resnet50", "llama", "densenet", "hrnet")]


@pytest.mark.parametrize("name", ["inception", "unet", *SLOW])
def test_real_models_run_as_planned(name, folder, tmp_path):
    pytest.importorskip("onnxscript")
    if name in ("bert", "resnet50", "llama"):
        pytest.importorskip("transformers")
    from support.onnx_models import MODELS, exported

    program = lower(read(exported(name, folder)), MODELS[name].shape)
    plan = api.plan_graph(program.graph).plan
    before, after = run_both(program, plan, tmp_path / "out.onnx")
    assert after.peak <= before.peak
    if name == "inception":
        assert after.peak < 0.8 * before.peak
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check=True)


def test_a_real_model_of_every_opset(folder, tmp_path):
    pytest.importorskip("onnxscript")
    from onnx import version_converter

    from support.onnx_models import MODELS, exported

    model = onnx.load(exported("unet", folder))
    shape, peaks = MODELS["unet"].shape, {}
    for version in range(14, onnx.defs.onnx_opset_version() + 1):  # the converter does not go below
        path = saved(tmp_path, version_converter.convert_version(model, version))
        graph = lower(read(path), shape).graph
        peaks[version] = replay(graph, baseline(graph)).peak - graph.static_bytes
    assert set(peaks.values()) == {4 * 8 * 32 * 32 * 4}, peaks


@pytest.mark.slow
def test_recomputation_in_a_real_model_saves_what_was_planned(folder, tmp_path):
    pytest.importorskip("onnxscript")
    from support.onnx_models import MODELS, exported

    program = lower(read(exported("densenet", folder)), MODELS["densenet"].shape)
    free = api.plan_graph(program.graph).plan
    plan = api.plan_graph(program.graph, free.static + int(0.95 * (free.peak - free.static))).plan
    assert plan.met and plan.count("recompute")
    before, after = run_both(program, plan, tmp_path / "out.onnx")
    assert after.peak <= 0.95 * before.peak
    assert len(after.order) > len(before.order)  # clones ran


@pytest.mark.slow
def test_bert_on_the_command_line(folder, tmp_path, capsys):
    pytest.importorskip("onnxscript")
    pytest.importorskip("transformers")
    from support.onnx_models import exported

    path, out = exported("bert", folder), tmp_path / "out.onnx"
    given = ("--shape", "batch=1,seq=128", "--write", out, "--optimize", "none", "--json")
    status, text, _ = run(capsys, "plan", path, *given)
    rows = json.loads(text)
    assert status == 0 and {"peak_before", "peak_after", "arena", "lower_bound"} <= set(rows)
    assert rows["lower_bound"] <= rows["peak_after"] <= rows["peak_before"]
    onnx.checker.check_model(str(out), full_check=True)
    feeds = feeds_of(lower(read(path), "batch=1,seq=128"))
    planned, theirs = measure(out, feeds), measure(path, feeds, keep_order=False, reuse=True)
    assert same(planned, theirs)
    assert planned.peak <= rows["peak_after"] - rows["static"] and planned.peak < theirs.peak


# --- models made by hand ---


def wide(n=6, size=32):
    """``n`` branches that each make a large value and then a small one, in the worst order."""
    nodes = [node("MatMul", ["x", f"w{k}"], [f"large{k}"]) for k in range(n)]
    nodes += [node("ReduceMax", [f"large{k}", "axes"], [f"small{k}"]) for k in range(n)]
    nodes.append(node("Concat", [f"small{k}" for k in range(n)], ["out"], axis=1))
    rng = np.random.default_rng(0)
    weights = [tensor(f"w{k}", rng.standard_normal((size, size)).astype(np.float32)) for k in range(n)]
    weights.append(tensor("axes", np.array([1])))
    return made(nodes, [value("x", ["n", size])], [value("out", None)], weights)


def test_the_best_order_is_written(tmp_path):
    program = lower(read(saved(tmp_path, wide())), "n=32")
    plan = api.plan_graph(program.graph).plan
    unit = 32 * 32 * 4
    assert (plan.peak_before - plan.static, plan.peak - plan.static) == (6 * unit + 128, unit + 6 * 128)
    before, after = run_both(program, plan, tmp_path / "out.onnx")
    assert after.peak == unit + 6 * 128 and before.peak == 6 * unit + 128
    out = onnx.load(tmp_path / "out.onnx")
    notes = {e.key: e.value for e in out.metadata_props}
    found, _ = loads_plan(notes[KEY_PLAN].encode())
    check(program.graph, found)
    table = json.loads(notes[KEY_OFFSETS])
    assert table["arena"] == plan.arena and set(table["values"]) == {
        n for x in out.graph.node for n in x.output
    }
    for offset, size, start, end in table["values"].values():
        assert offset >= 0 and offset + size <= plan.arena and 0 <= start < end <= len(out.graph.node)


def stacked(depth=6):
    """A chain with long skips: a U without recomputation in it."""
    nodes, last = [node("Transpose", ["x"], ["t0"])], "t0"
    for k in range(depth):
        nodes.append(node("Exp", [last], [f"e{k}"]))
        nodes.append(node("Reshape", [f"e{k}", "flat"], [f"v{k}"]))
        nodes.append(node("Sin", [f"e{k}"], [f"t{k + 1}"]))
        last = f"t{k + 1}"
    nodes.append(node("Reshape", [last, "flat"], ["u"]))
    for k in reversed(range(depth)):
        nodes.append(node("Add", ["u" if k == depth - 1 else f"u{k + 1}", f"v{k}"], [f"u{k}"]))
    nodes.append(node("Neg", ["u0"], ["out"]))
    weights = [tensor("flat", np.array([-1], dtype=np.int64))]
    return made(nodes, [value("x", [64, 64])], [value("out", None)], weights)


def test_recomputation_is_written_as_clones_with_their_views(tmp_path):
    program = lower(read(saved(tmp_path, stacked())))
    free = api.plan_graph(program.graph).plan
    plan = api.plan_graph(program.graph, f"{free.peak - 2 * 16384}").plan
    assert plan.count("recompute") and plan.peak < free.peak
    before, after = run_both(program, plan, tmp_path / "out.onnx")
    assert after.peak < before.peak
    again = [n.name for n in onnx.load(tmp_path / "out.onnx").graph.node if "__again" in n.name]
    assert any("Reshape" in n for n in again) and len(again) > plan.count("recompute")


def test_clones_survive_the_runtime_s_basic_optimization_when_it_may_not_merge_them(tmp_path):
    program = lower(read(saved(tmp_path, stacked())))
    free = api.plan_graph(program.graph).plan
    plan = api.plan_graph(program.graph, f"{free.peak - 2 * 16384}").plan
    write_model(program, plan, tmp_path / "out.onnx")
    feeds = feeds_of(program)
    apart, kept, merged = (
        measure(tmp_path / "out.onnx", feeds, level=level, merge=merge)
        for level, merge in (("disabled", False), ("basic", False), ("basic", True))
    )
    assert plan.peak - plan.static == apart.peak == kept.peak < merged.peak
    assert same(apart, kept) and same(apart, merged)


def steps(*rows):
    return tuple(Step(kind, op=op) if kind == "compute" else Step(kind, op, s) for kind, op, s in rows)


def test_a_result_made_twice_keeps_its_name(tmp_path):
    nodes = [node("Exp", ["x"], ["a"]), node("Neg", ["a"], ["b"])]
    program = lower(
        read(saved(tmp_path, made(nodes, [value("x", [64])], [value("a", None), value("b", None)])))
    )
    a, b = (next(v.storage for v in program.graph.values if v.name == n) for n in "ab")
    rows = (("compute", 0, ()), ("compute", 1, ()), ("free", -1, (a,)), ("recompute", 0, (a,)))
    plan = Plan(program.graph.digest, steps(*rows))
    write_model(program, plan, tmp_path / "out.onnx")
    feeds = feeds_of(program)
    assert same(measure(program.model.path, feeds), measure(tmp_path / "out.onnx", feeds))
    made_last = onnx.load(tmp_path / "out.onnx").graph.node[-1]
    assert list(made_last.output) == ["a"] and b


def test_graphs_inside_nodes_read_what_was_made_again(tmp_path):
    then = helper.make_graph([node("Add", ["a", "x"], ["t"])], "then", [], [value("t", None)])
    other = helper.make_graph([node("Sub", ["a", "x"], ["e"])], "else", [], [value("e", None)])
    nodes = [node("Exp", ["x"], ["a"]), node("Neg", ["a"], ["b"])]
    nodes += [node("If", ["c"], ["d"], then_branch=then, else_branch=other), node("Add", ["b", "d"], ["out"])]
    ends = [value("x", [64]), value("c", [], TensorProto.BOOL)], [value("out", None)]
    program = lower(read(saved(tmp_path, made(nodes, *ends))))
    of = {v.name: v.storage for v in program.graph.values}
    rows = [("compute", 0, ()), ("compute", 1, ()), ("free", -1, (of["a"],)), ("recompute", 0, (of["a"],))]
    rows += [
        ("compute", 2, ()),
        ("free", -1, (of["a"],)),
        ("compute", 3, ()),
        ("free", -1, (of["b"], of["d"])),
    ]
    write_model(program, Plan(program.graph.digest, steps(*rows)), tmp_path / "out.onnx")
    inner = onnx.load(tmp_path / "out.onnx").graph.node[3].attribute[0].g
    assert inner.node[0].input[0] == "a__again1"
    feeds = feeds_of(program)
    assert same(measure(program.model.path, feeds), measure(tmp_path / "out.onnx", feeds))


# --- files ---


def with_external(folder, name="model.onnx"):
    folder.mkdir(exist_ok=True)
    onnx.save_model(wide(), folder / name, save_as_external_data=True, location="w.bin", size_threshold=64)
    return lower(read(folder / name), "n=32")


def test_external_data_is_found_from_the_new_file(tmp_path):
    program = with_external(tmp_path / "a")
    plan = api.plan_graph(program.graph).plan
    (tmp_path / "b").mkdir()
    for path in (tmp_path / "a" / "out.onnx", tmp_path / "b" / "out.onnx"):
        run_both(program, plan, path)
    assert (tmp_path / "b" / "w.bin").read_bytes() == (tmp_path / "a" / "w.bin").read_bytes()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "w.bin").write_text("mine")
    with pytest.raises(BadInput, match="another file"):
        write_model(program, plan, tmp_path / "c" / "out.onnx")
    assert (tmp_path / "c" / "w.bin").read_text() == "mine" and not (tmp_path / "c" / "out.onnx").exists()


@pytest.mark.parametrize("opset", [8, 13])
@pytest.mark.parametrize("listed", [(), ("w",), ("w", "b")])
def test_weights_that_the_oldest_format_wants_among_the_inputs_need_not_be_there(opset, listed, tmp_path):
    """onnxruntime loads such files; onnx's converter and checker refuse them."""
    weights = [tensor(n, np.full((8, 8), k, np.float32)) for k, n in enumerate("wb")]
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "b"], ["y"])]
    given = [value("x", [8, 8]), *(value(n, [8, 8]) for n in listed)]
    model = made(nodes, given, [value("y", [8, 8])], weights, opset=opset)
    model.ir_version = 3
    program = lower(read(saved(tmp_path, model)))
    run_both(program, api.plan_graph(program.graph).plan, tmp_path / "out.onnx")
    written = onnx.load(tmp_path / "out.onnx").graph
    assert [i.name for i in written.input if i.name not in listed] == ["x"]


def test_a_model_that_the_checker_refuses_is_not_written(tmp_path, monkeypatch):
    program = lower(read(saved(tmp_path, wide())), "n=32")

    def refuse(path):
        raise onnx.checker.ValidationError("no")

    monkeypatch.setattr(onnx.checker, "check_model", refuse)
    with pytest.raises(BadInput, match="checker"):
        write_model(program, api.plan_graph(program.graph).plan, tmp_path / "out.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx"]


def test_the_model_read_is_left_as_it_was(tmp_path):
    program = lower(read(saved(tmp_path, wide())), "n=32")
    before = program.model.proto.SerializeToString(deterministic=True)
    write_model(program, api.plan_graph(program.graph).plan, tmp_path / "out.onnx")
    assert program.model.proto.SerializeToString(deterministic=True) == before
    with pytest.raises(BadInput, match="made for"):
        write_model(program, Plan("other", ()), tmp_path / "out.onnx")


# --- the command line ---


def run(capsys, *args):
    status = main([str(a) for a in args])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_plan_writes_and_prints_what_others_read(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, wide())
    args = ("plan", "model.onnx", "--shape", "n=32", "--write", "out.onnx", "-o", "plan.json", "--json")
    status, out, _ = run(capsys, *args)
    rows = json.loads(out)
    assert status == 0 and rows["peak_after"] < rows["peak_before"]
    assert {"arena", "lower_bound", "static", "budget", "met", "planner", "recomputed"} <= set(rows)
    assert (
        rows["order_bound"] == rows["peak_after"]
    )  # one large value and all small ones: no order does with less
    assert (tmp_path / "out.onnx").exists()
    assert run(capsys, "verify", "plan.json")[0] == 0
    assert run(capsys, "verify", "plan.json", "--source", "model.onnx", "--shape", "n=32")[0] == 0
    assert run(capsys, "verify", "plan.json", "--source", "model.onnx", "--shape", "n=16")[0] == 1
    status, out, _ = run(capsys, "explain", "model.onnx", "--shape", "n=32", "--json")
    assert status == 0 and json.loads(out)["before"]["by_kind"][0]["name"] in ("activation", "constant")


def test_a_path_is_planned_in_python_too(tmp_path):
    path = saved(tmp_path, wide())
    planned = tightship.plan(path, {"n": 32})
    assert planned.peak == tightship.plan(str(path), "n=32").peak < planned.peak_before
    tightship.check(planned)
    with pytest.raises(BadInput, match="n=N"):
        tightship.plan(path)


def test_R14_called_graphs_are_listed_with_their_peaks(tmp_path, capsys):  # noqa: N802
    then = helper.make_graph(
        [node("Exp", ["x"], ["t"]), node("Neg", ["t"], ["r"])], "then", [], [value("r", [256])]
    )
    other = helper.make_graph([node("Neg", ["x"], ["r"])], "else", [], [value("r", [256])])
    choice = node("If", ["c"], ["out"], name="choice", then_branch=then, else_branch=other)
    ends = [value("x", [256]), value("c", [], TensorProto.BOOL)], [value("out", [256])]
    status, out, _ = run(capsys, "plan", saved(tmp_path, made([choice], *ends)), "--json")
    assert status == 0 and json.loads(out)["called"] == [
        {"op": "choice", "graph": "then", "peak": 1024},
        {"op": "choice", "graph": "else", "peak": 0},
    ]


def test_wrong_commands_are_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, wide())
    status, _, err = run(capsys, "plan", "model.onnx")
    assert status == 2 and "--shape n=N" in err and "Traceback" not in err
    assert run(capsys, "plan", "none.onnx", "--shape", "n=1")[0] == 2
    assert run(capsys, "plan", "model.onnx", "--shape", "n=32", "--write", "no/out.onnx")[0] == 2
    status, _, err = run(capsys, "plan", "json:loads", "--shape", "n=32")
    assert status == 2 and "requires a model.onnx" in err
    status, _, err = run(
        capsys, "plan", "model.onnx", "--shape", "n=32", "--budget", "1KiB", "--write", "out.onnx"
    )
    assert status == 1 and not (tmp_path / "out.onnx").exists()


def test_a_plan_that_reads_a_view_too_early_is_refused_by_name(tmp_path):
    rows = (("Relu", ["x"], "a"), ("Reshape", ["a", "shape"], "v"), ("Exp", ["v"], "y"))
    nodes = [node(kind, inputs, [output]) for kind, inputs, output in rows]
    ends = [value("x", (4, 4))], [value("y", (16,))]
    path = saved(tmp_path, made(nodes, *ends, [tensor("shape", np.array([16]))]))
    program = lower(read(path))
    make, view, use = range(3)
    steps = baseline(program.graph, (make, use, view))
    with pytest.raises(BadInput, match="'v' is read before the op that computes it"):
        write_model(program, Plan(program.graph.digest, steps), tmp_path / "out.onnx")
