"""Planned files whose results differ, or that do not run at all."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
import onnx

from support.graphs import made, node, saved, value
from tightship.cli import main
from tightship.integrations import onnx_compare, onnx_sessions
from tightship.integrations.onnx_compare import Answer, Sessions, Use
from tightship.integrations.onnx_sessions import PLANNED


def test_results_differ_by_any_bit():
    """Also where the first result is equal, and the second has no number to say it."""
    one, nan = np.ones(3, np.float32), np.full(3, np.nan, np.float32)
    differ = onnx_sessions._difference
    assert differ([one, nan], [one, one]) == np.inf
    assert differ(np.array([1, np.nan]), np.array([1.5, 1])) == np.inf
    assert differ(nan, -nan) == differ([{1: 0.5}], [{1: 0.5}]) == differ([{1: np.nan}], [{1: np.nan}]) == 0
    assert 0 < differ(0 * one, -0.0 * one) < 1e-40
    assert differ(np.array([1, np.inf]), np.array([1.5, np.inf])) == 0.5
    assert differ([{1: 0.5}], [{1: 0.75}]) == 0.25
    assert differ(np.array([1 + 1j]), np.array([1 + 2j])) == 1
    assert differ(one, 2.0) == differ(np.array([1]), np.array([2])) == np.inf


def test_whole_numbers_that_differ_are_said_in_json(tmp_path, capsys, monkeypatch):
    """Infinity is no number that JSON has."""
    path = saved(tmp_path, made([node("Neg", ["x"], ["y"])], [value("x", [4])], [value("y", None)]))
    use = Use(1.0, 1, 1, 1)
    monkeypatch.setattr(onnx_compare, "compared", lambda *args: Sessions(use, use, 1.0, np.inf))
    assert (
        main(["plan", str(path), "--write", str(tmp_path / "out.onnx"), "--optimize", "none", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["runtime"]["tried"]["planned"]["difference"] == "inf"


@pytest.mark.parametrize("level", ["none", "all"])
def test_a_file_that_the_runtime_does_not_load_is_not_written(tmp_path, capsys, monkeypatch, level):
    path, out = (
        saved(tmp_path, made([node("Neg", ["x"], ["y"])], [value("x", [4])], [value("y", None)])),
        tmp_path / "out.onnx",
    )

    def wrong(program, plan, to, *args, **kwargs):
        made_ = onnx.load(path)
        made_.graph.node[0].op_type = "Unknown"
        onnx.save(made_, to)
        return set()

    monkeypatch.setattr(onnx_compare, "write_model", wrong)
    status = main(["plan", str(path), "--write", str(out), "--optimize", level, "--json"])
    rows = json.loads(capsys.readouterr().out)
    if level == "none":  # as planned, or not at all
        assert status == 2
        assert (
            "onnxruntime runs it, and not the planned file: onnxruntime does not" in rows["error"]["message"]
        )
        assert not out.exists()
    else:
        assert status == 0
        assert rows["runtime"]["file"] == "as it was"
        assert "runs it, and not the planned file" in rows["runtime"]["failure"]
        assert out.read_bytes() == path.read_bytes()


def test_a_session_that_takes_more_than_was_planned_is_said():
    """Of a file that was planned with its own nodes the session makes others when it loads it."""
    use = Use(1.0, 2048, 4096, 4096)
    tried = {"planned": Sessions(use, use, 1.0, 0.0)}
    for planned, said in ((1024, True), (2048, False), (None, False)):
        answer = Answer("planned", PLANNED, "any", tried, planned=planned)
        text = "\n".join(answer.lines())
        assert ("2.00 KiB by nodes, and 1.00 KiB were planned" in text) is said
        assert ("ORT_DISABLE_ALL and session.disable_quant_qdq=1" in text) is said
        assert answer.rows()["planned"] == planned
    said = "\n".join(Answer("planned", PLANNED, "any", tried, planned=1024, cast=True).lines())
    assert "plan without --optimize" in said and "ORT_DISABLE_ALL" not in said  # casts are put in there, too
