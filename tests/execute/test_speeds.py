"""What copies and codecs cost is measured once, kept, and carried by the graph."""

from dataclasses import replace

import pytest

from execute.test_interpreter import Bound
from tightship.execute import speeds as module
from tightship.execute.cache import Cache
from tightship.execute.speeds import speeds
from tightship.machine import CODECS, MODELED, Machine
from tightship.serde import dumps_graph, loads_graph


def test_every_figure_is_measured_and_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_here", {})
    cache = Cache(tmp_path, "m")
    found = speeds(cache, tmp_path)
    rates = (found.offload, found.fetch, *found.pack, *found.unpack)
    assert found.measured and min(*rates, found.latency, found.state) > 0 <= found.begin
    assert 0 <= found.beside <= 1 / max(found.offload, found.fetch) * (1 + 1e-9)
    assert len(found.pack) == len(found.unpack) == len(CODECS)
    cache.save()
    monkeypatch.setattr(module, "_here", {})
    for name in ("_seconds", "_copies", "_taken", "_codecs"):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("measured again"))
    assert speeds(Cache(tmp_path, "m"), tmp_path) == found


def test_where_ops_have_every_core_they_lose_what_copies_take(monkeypatch):
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 1 << 20)
    assert module._share(0.0, 2.0) == 2.0
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 0)
    assert (module._share(0.5, 2.0), module._share(3.0, 2.0)) == (0.5, 2.0)


def test_a_folder_that_is_none_leaves_the_model(tmp_path):
    found = speeds(Cache(None, "m"), tmp_path / "missing")
    assert (found.offload, found.fetch) == (MODELED.offload, MODELED.fetch) and found.measured
    assert (found.begin, found.beside) == (0.0, 0.0)


def test_a_measured_graph_carries_its_machine_into_files_and_not_into_its_digest():
    graph = Bound().graph
    assert graph.machine.measured
    assert loads_graph(dumps_graph(graph)).machine == graph.machine
    assert replace(graph, machine=Machine(1.0)).digest == graph.digest
