"""A peak in sentences: the bytes add up, the lines are the model's."""

import json
from dataclasses import replace

import pytest

from support.chains import chain
from tightship.analysis.structure import pattern
from tightship.cli import main
from tightship.diagnose.changes import Change
from tightship.report.numbers import makers
from tightship.report.text import change_lines, peak_lines
from tightship.serde import save_graph
from tightship.simulate import baseline, replay


def test_names_that_differ_in_numbers_are_one() -> None:
    assert pattern(["h.0.mlp:gelu", "h.1.mlp:gelu"]) == "h.*.mlp:gelu"
    assert pattern(["h.0.mlp:gelu.1", "h.1.mlp:gelu.1"]) == "h.*.mlp:gelu.1"
    assert pattern(["a", "b", "c"]) == "a and 2 more"
    assert pattern(["h.0:mul", "h.0:mul#2", "h.1:mul", "h.1:mul#2"]) == "h.*:mul and 2 more"
    assert pattern(["only.7"]) == "only.7"


def test_what_makes_up_a_peak_adds_up_to_it() -> None:
    graph = chain(9)
    line = replay(graph, baseline(graph))
    found = makers(graph, baseline(graph), line)
    assert sum(m.bytes for m in found) == line.peak
    assert (found[0].what, found[0].count) == ("f*", 9)
    assert [m.bytes for m in found] == sorted((m.bytes for m in found), reverse=True)


def test_a_peak_is_said_with_what_makes_it_up() -> None:
    graph = chain(9, 1 << 20)
    head, first, *_ = peak_lines(graph, baseline(graph))
    assert head == "The peak of 11.00 MiB is reached while b8 runs. It is made up of:"
    assert first == "  9.00 MiB (82 %): 9 × f*"


def test_a_change_is_said_with_its_effect() -> None:
    change = Change("offload", 12, "h.*:add", "model.py:9", 1 << 30, 0.03, 1 << 30, 1.03)
    before = replace(replay(chain(1), baseline(chain(1))), time=1.0, peak=2 << 30)
    _, first, last = change_lines([change], before)
    assert first == "  offload of 12 × h.*:add, made on model.py:9: −1.00 GiB, +3.0 % time"
    assert last == "  together: 2.00 GiB to 1.00 GiB, +3.0 % time"
    assert "No single change" in change_lines([], before)[0]


def test_explain_says_both(tmp_path, capsys) -> None:
    save_graph(chain(12, 1 << 20), tmp_path / "g.json")
    assert main(["explain", str(tmp_path / "g.json"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert sum(m["bytes"] for m in rows["makers"]) == rows["before"]["bytes"]
    assert len(rows["changes"]) == 3
    assert rows["changes"][-1]["peak"] == rows["before"]["bytes"] - sum(c["saves"] for c in rows["changes"])
    assert main(["explain", str(tmp_path / "g.json")]) == 0
    out = capsys.readouterr().out
    assert "12 × f*" in out
    assert "on top of those before it" in out


MODULE = """HloModule m, is_scheduled=true

ENTRY %e (p: f32[]) -> f32[1024] {
  %p = f32[] parameter(0)
  %wide = f32[1024]{0} broadcast(%p), dimensions={}, metadata={op_name="wide" source_file="m.py" source_line=3}
  %a = f32[2048]{0} broadcast(%p), dimensions={}
  %b = f32[2048]{0} negate(%a)
  %c = f32[1024]{0} slice(%b), slice={[0:1024]}
  ROOT %d = f32[1024]{0} add(%c, %wide)
}
"""


def test_a_module_s_changes_are_simulated_too(tmp_path, capsys) -> None:
    (tmp_path / "m.txt").write_text(MODULE)
    assert main(["explain", str(tmp_path / "m.txt"), "--json"]) == 0
    (change,) = json.loads(capsys.readouterr().out)["changes"]
    assert (change["way"], change["what"], change["source"]) == ("recompute", "wide", "m.py:3")
    assert change["saves"] == 4096


def test_a_plan_s_peak_is_said_too(tmp_path, capsys) -> None:
    save_graph(chain(12, 1 << 20), tmp_path / "g.json")
    assert main(["explain", str(tmp_path / "g.json"), "--budget", "60%", "--work", "200000", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert sum(m["bytes"] for m in rows["planned_makers"]) == rows["plan"]["peak_after"]


def test_an_onnx_model_s_changes_are_simulated_too(tmp_path, capsys) -> None:
    """Two wide branches that need not be there at once: another order, or one of them made again."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    from onnx import TensorProto, helper

    def info(name: str, n: int) -> object:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [n])

    def concat(name: str) -> object:
        return helper.make_node("Concat", ["x"] * 8, [name], f"make_{name}", axis=0)

    nodes = [concat("a"), concat("b")]
    nodes += [helper.make_node("ReduceSum", [n], [f"sum_{n}"], f"sum_of_{n}", keepdims=1) for n in "ab"]
    nodes.append(helper.make_node("Add", ["sum_a", "sum_b"], ["y"], "add"))
    graph = helper.make_graph(nodes, "branches", [info("x", 1024)], [info("y", 1)])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "m.onnx")
    assert main(["explain", str(tmp_path / "m.onnx"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    (change,) = rows["changes"]
    assert (change["way"], change["saves"]) == ("order", 8 * 4096 - 64)  # the first sum is there instead
    assert change["peak"] == rows["before"]["bytes"] - change["saves"]
