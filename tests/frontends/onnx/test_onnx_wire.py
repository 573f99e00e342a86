"""A model without its weights, and with them again: the same model, at no memory for weights."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("onnx")
import onnx
from onnx import TensorProto, helper

from support.graphs import made, node, saved, tensor, value
from tightship import api
from tightship.errors import BadInput
from tightship.frontends.onnx import load, wire
from tightship.frontends.onnx.load import read
from tightship.frontends.onnx.lower import lower
from tightship.integrations.onnx_write import write_model

LIMIT = 1 << 27


def rng_of(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def everywhere():
    """Large tensors wherever a model can have them."""
    weights = [tensor("raw", rng_of((128, 128))), tensor("small", rng_of((3, 3), 1))]
    weights.append(helper.make_tensor("floats", TensorProto.FLOAT, [100, 100], rng_of(10_000, 2).tolist()))
    weights.append(helper.make_tensor("longs", TensorProto.INT64, [9000], list(range(-4500, 4500))))
    inner = [
        node("Constant", [], ["k"], value=tensor("k", rng_of((128, 128), 3))),
        node("Add", ["x", "k"], ["t"]),
    ]
    then = helper.make_graph(inner, "then", [], [value("t", [128, 128])], [tensor("w", rng_of((90, 99), 4))])
    other = helper.make_graph([node("Neg", ["x"], ["t"])], "else", [], [value("t", [128, 128])])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("my", 1)]
    inside = [
        node("Constant", [], ["k"], value=tensor("k", rng_of((128, 128), 5))),
        node("Mul", ["a", "k"], ["b"]),
    ]
    scaled = helper.make_function("my", "Scaled", ["a"], ["b"], inside, opsets)
    nodes = [
        node("If", ["c"], ["y"], then_branch=then, else_branch=other),
        node("MatMul", ["y", "raw"], ["z"]),
    ]
    nodes += [node("Scaled", ["z"], ["s"], domain="my"), node("Scaled", ["s"], ["out"], domain="my")]
    ends = [value("x", [128, 128]), value("c", [], TensorProto.BOOL)], [value("out", [128, 128])]
    model = made(nodes, *ends, weights, functions=[scaled], opsets=opsets[1:])
    sparse = model.graph.sparse_initializer.add(dims=[100_000])
    sparse.values.CopyFrom(tensor("sparse", rng_of(9000, 6)))
    sparse.indices.CopyFrom(tensor("at", np.arange(9000)))
    return model


def joined(pieces, data):
    return b"".join(p if isinstance(p, bytes) else data[p.offset : p.offset + p.size] for p in pieces)


def test_there_and_back():
    data = everywhere().SerializeToString()
    slim = wire.slim(wire.from_bytes(data), len(data), LIMIT)
    sparse = 9000 * 12
    assert len(slim) - sparse < 4_000 < 10 * 36_000 < len(data)
    model = onnx.ModelProto.FromString(slim)
    assert [wire.held(t) is not None for t in model.graph.initializer] == [True, False, True, True]
    pieces = wire.fattened(model)
    assert onnx.ModelProto.FromString(joined(pieces, data)) == everywhere()
    left_out = sum(p.size for p in pieces if not isinstance(p, bytes))
    assert left_out > len(data) - sparse - 4_000


def test_a_model_without_large_tensors_stays_as_it_is():
    data = made([node("Neg", ["x"], ["y"])], [value("x", [1])], [value("y", None)]).SerializeToString()
    assert wire.slim(wire.from_bytes(data), len(data), LIMIT) == data
    assert joined(wire.fattened(onnx.ModelProto.FromString(data)), b"") == data


def test_less_is_kept_where_there_is_much(monkeypatch):
    weights = [tensor(f"w{k}", rng_of(1000, k)) for k in range(40)]
    model = made([node("Sum", [t.name for t in weights], ["y"])], [], [value("y", None)], weights)
    data = model.SerializeToString()
    assert len(wire.slim(wire.from_bytes(data), len(data), LIMIT)) == len(data)
    less = wire.slim(wire.from_bytes(data), len(data), 60_000)
    assert onnx.ModelProto.FromString(joined(wire.fattened(onnx.ModelProto.FromString(less)), data)) == model
    with pytest.raises(wire.TooLarge):
        wire.slim(wire.from_bytes(data), len(data), 3_000)


def test_a_mark_in_a_file_is_none(tmp_path):
    """A model written by another process cannot send the writer to places in a file."""
    away = tensor("w", rng_of((4, 4)))
    away.external_data.add(key="tightship.0123456789abcdef", value="0:64:9")
    assert wire.held(away) is None
    path = saved(tmp_path, made([node("Neg", ["w"], ["y"])], [], [value("y", None)], [away]))
    assert wire.held(read(path).proto.graph.initializer[0]) is None


def test_messages_nested_too_deep(tmp_path):
    inner = b""
    for _ in range(40):  # a graph in an attribute of a node of a graph
        for number in (6, 5, 1):
            inner = bytes([number << 3 | 2]) + _size(len(inner)) + inner
    (tmp_path / "m.onnx").write_bytes(b"\x3a" + _size(len(inner)) + inner)
    with pytest.raises(BadInput, match="nested more than 100 deep"):
        read(tmp_path / "m.onnx")


def _size(n):
    return bytes([n & 127 | 128, n >> 7]) if n > 127 else bytes([n])


def test_empty_messages_within_nodes_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "LARGEST_STRUCTURE", 100_000)
    attributes = b"\x2a\x00" * 5_000
    graph = b"\x0a" + _size(len(attributes)) + attributes
    (tmp_path / "m.onnx").write_bytes(b"\x3a" + _size(len(graph)) + graph)
    with pytest.raises(BadInput, match="a message counted as 64 at least"):
        read(tmp_path / "m.onnx")


# --- files ---


def test_what_is_written_is_the_model_s(tmp_path):
    ort = pytest.importorskip("onnxruntime")
    path = saved(tmp_path, everywhere())
    program = lower(read(path))
    assert program.graph.static_bytes > 4 * 128 * 128 * 4
    write_model(program, api.plan_graph(program.graph).plan, tmp_path / "out.onnx")
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "out.onnx"]
    feeds = {"x": rng_of((128, 128), 9), "c": np.array(True)}
    found = [ort.InferenceSession(p).run(None, feeds)[0] for p in (str(path), str(tmp_path / "out.onnx"))]
    assert np.array_equal(*found)


def test_a_model_may_be_written_over_itself(tmp_path):
    path = saved(tmp_path, everywhere())
    before = {t.name: t for t in onnx.load(path).graph.initializer}
    program = lower(read(path))
    write_model(program, api.plan_graph(program.graph).plan, path)
    assert {t.name: t for t in onnx.load(path).graph.initializer} == before


def test_a_model_that_has_changed_since_is_not_written(tmp_path):
    path = saved(tmp_path, everywhere())
    program = lower(read(path))
    path.write_bytes(path.read_bytes() + b"\x00")
    with pytest.raises(BadInput, match="has changed since"):
        write_model(program, api.plan_graph(program.graph).plan, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def sparse_file(path, size):
    """A model with ``size`` bytes of weights in its file, which take no room on the disk."""
    hole = b"\x00" * 4
    model = made(
        [node("MatMul", ["x", "w"], ["y"])], [value("x", [1, 4])], [value("y", None)],
        [TensorProto(name="w", data_type=1, dims=[4, size // 16], raw_data=hole)],
    )  # fmt: skip
    graph = model.graph
    weight = graph.initializer[0].SerializeToString()
    head, tail = weight[: weight.index(b"\x4a\x04") + 1], weight[weight.index(b"\x4a\x04") + 2 + len(hole) :]
    del graph.initializer[:]
    rest = graph.SerializeToString()
    model.ClearField("graph")
    inner = head + wire._varint_of(size)
    tensor_size = len(inner) + size + len(tail)
    opening = b"\x2a" + wire._varint_of(tensor_size) + inner
    graph_size = len(opening) + size + len(tail) + len(rest)
    with open(path, "wb") as file:
        file.write(model.SerializeToString() + b"\x3a" + wire._varint_of(graph_size) + opening)
        file.seek(size, 1)
        file.write(tail + rest)
    return path


_WITHOUT = "sys.modules['onnxruntime'] = None"
_LITTLE = (
    "import tightship.integrations.onnxruntime, tightship.integrations.onnx_compare\n"
    "tightship.integrations.onnxruntime._free_memory = lambda: 1 << 27"
)


def memory_of(*args, cwd, before=""):
    """The most memory that the command line used, above that of importing onnx; and what it printed. Without
    onnxruntime, whose sessions take weights into memory to optimize and to compare; ``before``: lines run first."""
    program = (
        "import resource, sys, onnx, onnx.inliner, onnx.reference, tightship.frontends.onnx.lower\n"
        f"{before or _WITHOUT}\n"
        "from tightship.cli import main\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "status = main(sys.argv[1:])\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(after - before, file=sys.stderr)\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stderr.splitlines()[-1]) * 1024, json.loads(done.stdout)


def test_weights_in_the_file_take_no_memory(tmp_path):
    sparse_file(tmp_path / "big.onnx", (1 << 31) - (1 << 20))
    used, rows = memory_of("plan", "big.onnx", "--json", cwd=tmp_path)
    assert rows["static"] == (1 << 31) - (1 << 20) + 64 and used < 64 << 20


def test_sessions_that_may_not_fit_in_memory_are_not_made(tmp_path):
    """The system would end the process; the file is written as planned, and the output says what was left out."""
    pytest.importorskip("onnxruntime")
    sparse_file(tmp_path / "big.onnx", 1 << 27)
    used, rows = memory_of("plan", "big.onnx", "--write", "out.onnx", "--json", cwd=tmp_path, before=_LITTLE)
    assert (tmp_path / "out.onnx").stat().st_size > 1 << 27 and used < 64 << 20
    said, free = rows["runtime"], "and 128.00 MiB are free"
    assert f"may need 512.00 MiB, {free}" in said["failure"] and not said["tried"]
    assert any(f"may need 256.00 MiB, {free}" in note for note in rows["notes"])


@pytest.mark.slow
def test_weights_in_the_file_take_no_memory_when_it_is_written(tmp_path):
    sparse_file(tmp_path / "big.onnx", 1 << 29)
    used, _ = memory_of("plan", "big.onnx", "--write", "out.onnx", "--json", cwd=tmp_path)
    assert (tmp_path / "out.onnx").stat().st_size > 1 << 29 and used < 128 << 20


def test_weights_beside_the_file_take_no_memory(tmp_path):
    with open(tmp_path / "w.bin", "wb") as file:
        file.truncate(3 << 30)
    away = TensorProto(name="w", data_type=1, dims=[4, 3 << 26], data_location=TensorProto.EXTERNAL)
    away.external_data.add(key="location", value="w.bin")
    saved(
        tmp_path, made([node("MatMul", ["x", "w"], ["y"])], [value("x", [1, 4])], [value("y", None)], [away])
    )
    used, rows = memory_of("plan", "model.onnx", "--write", "out.onnx", "--json", cwd=tmp_path)
    assert rows["static"] == (3 << 30) + 64 and used < 64 << 20 and (tmp_path / "out.onnx").exists()
