"""The reference replay on graphs small enough to count by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.chains import chain
from tightship.errors import BadInput
from tightship.graph import Graph, Op, Storage, Value
from tightship.machine import Machine
from tightship.plan import Step
from tightship.simulate import baseline, extra_bytes, replay


def small(**extra: object) -> Graph:
    """x (owned, 64) -> a (128) -> b (256); c (64) reads a and b."""
    storages = (Storage("x", 64), Storage("a", 128), Storage("b", 256), Storage("c", 64))
    values = tuple(Value(s.name, i) for i, s in enumerate(storages))
    ops = (
        Op("a", "t", (0,), (1,), time=1.0),
        Op("b", "t", (1,), (2,), time=2.0, workspace=512),
        Op("c", "t", (1, 2), (3,), time=4.0),
    )
    return Graph(ops, values, storages, (0,), (3,))


def test_bytes_and_time_of_keeping_everything() -> None:
    line = replay(small(), baseline(small()))
    assert line.during == (64 + 128, 64 + 128 + 256 + 512, 64 + 128 + 256 + 64, 64 + 128 + 256 + 64)
    assert line.resident[-1] == 64 + 64
    assert (line.peak, line.peak_step) == (960, 1)
    assert line.time == line.compute_time == 7.0
    assert line.at_peak == ((0, 64), (1, 128), (2, 256), (-1, 512))


def test_recomputation_costs_its_op_again() -> None:
    steps = (
        Step("compute", op=0),
        Step("compute", op=1),
        Step("free", storages=(1,)),
        Step("recompute", op=0, storages=(1,)),
        Step("compute", op=2),
        Step("free", storages=(1, 2)),
    )
    line = replay(small(), steps)
    assert line.time == 8.0 and line.peak == 960


def test_recomputation_that_keeps_nothing_takes_memory_while_it_runs() -> None:
    steps = (*baseline(small())[:2], Step("recompute", op=0), *baseline(small())[2:])
    line = replay(small(), steps)
    assert line.during[2] == 64 + 128 + 256 + 128
    assert line.resident[2] == line.resident[1]


def test_called_graphs_add_their_peak_beyond_inputs() -> None:
    inner = small()
    op = Op("loop", "while", calls=(inner,), workspace=64)
    assert extra_bytes(op) == 64 + 960 - 64


def test_copies_run_beside_compute_and_are_waited_for() -> None:
    steps = (
        Step("compute", op=0),
        Step("offload", storages=(1,), stream=1, waits=(0,)),
        Step("compute", op=1),
        Step("free", storages=(1,), waits=(1,)),
        Step("fetch", storages=(1,), stream=2, waits=(1,)),
        Step("compute", op=2, waits=(4,)),
        Step("free", storages=(1, 2)),
        Step("free", storages=(1,), form="host"),
    )
    line = replay(replace(small(), machine=Machine(128 / 3, 128 / 3, 0.0)), steps)
    # a 0-1, copy out 1-4 beside b 1-3, copy in 4-7, c 7-11
    assert line.time == 11.0 and line.compute_time == 7.0 and line.host_peak == 128


def test_packed_form_is_charged_in_place_of_the_full_one() -> None:
    steps = (
        Step("compute", op=0),
        Step("compress", storages=(1,), nbytes=64),
        Step("free", storages=(1,)),
        Step("decompress", storages=(1,)),
        Step("free", storages=(1,), form="packed"),
        *baseline(small())[1:],
    )
    line = replay(small(), steps)
    assert line.resident[:5] == (192, 256, 128, 256, 192)


def test_a_copy_holds_what_was_copied_not_what_was_written_since() -> None:
    graph = small()
    write = Op("write", "t", (1,), (), (1,))
    graph = Graph((graph.ops[0], write, *graph.ops[1:]), graph.values, graph.storages, (0,), (3,))
    steps = (
        Step("compute", op=0),
        Step("offload", storages=(1,)),
        Step("compute", op=1),
        Step("free", storages=(1,)),
        Step("fetch", storages=(1,)),
        Step("compute", op=2),
    )
    with pytest.raises(BadInput, match="contents it saw at first"):
        replay(graph, steps)


@pytest.mark.parametrize(
    ("steps", "rule"),
    [
        ((Step("compute", op=1),), "inputs are resident"),
        ((Step("compute", op=0), Step("compute", op=0)), "computed once"),
        ((Step("recompute", op=0),), "computed once"),
        ((Step("free", storages=(0,)),), "caller's storages"),
        ((Step("free", storages=(1,)),), "only what is resident"),
        ((Step("compute", op=0), Step("fetch", storages=(1,))), "needs the form"),
        ((Step("dance"),), "kind is one of"),
        ((Step("compute", op=9),), "index of Graph.ops"),
        ((Step("free", storages=(-1,)),), "indices of Graph.storages"),
        ((Step("compute", op=0, waits=(3,)),), "waits for earlier"),
    ],
)
def test_broken_steps_are_named(steps: tuple[Step, ...], rule: str) -> None:
    with pytest.raises(BadInput, match=rule) as caught:
        replay(small(), steps)
    assert f"step {len(steps) - 1}" in str(caught.value)


def test_long_chain_is_linear() -> None:
    graph = chain(20_000)
    assert replay(graph, baseline(graph)).peak == 64 * 20_003 - 64


def test_a_random_op_is_run_again_from_the_state_it_was_saved_with() -> None:
    graph = small()
    drawn = replace(graph.ops[0], random=True, state=320)
    graph = replace(graph, ops=(drawn, *graph.ops[1:]), machine=Machine(state=0.25))
    steps = (
        Step("compute", op=0, saves=True),
        Step("compute", op=1),
        Step("free", storages=(1,)),
        Step("recompute", op=0, storages=(1,)),
        Step("free", op=0, form="state"),
        Step("compute", op=2),
        Step("free", storages=(1, 2)),
    )
    line = replay(graph, steps)
    assert line.during[:4] == (
        64 + 320 + 128,
        192 + 320 + 256 + 512,
        192 + 320 + 256,
        64 + 256 + 320 + 128 + 320,
    )
    assert line.resident[:5] == (512, 768, 640, 768, 448)
    assert line.time == 8.0 + 0.25 * 4
    with pytest.raises(BadInput, match="state is not saved"):
        replay(graph, (Step("compute", op=0), *steps[1:]))
    with pytest.raises(BadInput, match="only what is resident is freed"):
        replay(graph, (*steps, steps[4]))
    with pytest.raises(BadInput, match="a state is saved"):
        replay(graph, (steps[0], replace(steps[1], saves=True)))


def test_a_copy_costs_what_others_wait_for_it() -> None:
    graph = replace(small(), machine=Machine(offload=128.0, fetch=64.0, latency=0.5))
    steps = [
        Step("compute", op=0),  # 0 to 1
        Step("offload", storages=(1,), stream=1, waits=(0,)),  # 1 to 2.5, beside b
        Step("compute", op=1),  # 1 to 3
        Step("free", storages=(1,), waits=(1,)),  # 3
        Step("fetch", storages=(1,), stream=1, waits=(3,)),  # 3 to 5.5
        Step("compute", op=2, waits=(4,)),  # 5.5 to 9.5
    ]
    assert replay(graph, steps).time == 9.5
    steps[4] = replace(steps[4], waits=())  # no sooner, since stream 0 begins it after what stands before it
    assert replay(graph, steps).time == 9.5
    alone = [replace(s, stream=0, waits=()) for s in steps]
    assert replay(graph, alone).time == 7.0 + 1.5 + 2.5


def test_a_copy_costs_what_it_takes_from_the_ops_beside_it() -> None:
    """A quarter of a second to begin each, and another one for 128 bytes."""
    machine = Machine(offload=128.0, fetch=64.0, latency=0.5, begin=0.25, beside=1 / 512)
    graph = replace(small(), machine=machine)
    steps = [
        Step("compute", op=0),  # 0 to 1
        Step("offload", storages=(1,), stream=1, waits=(0,)),  # 1 to 2.5
        Step("compute", op=1),  # 1.5 to 3.5
        Step("free", storages=(1,), waits=(1,)),  # 3.5
        Step(
            "fetch", storages=(1,), stream=1, waits=(3,)
        ),  # 3.5 to 6: what is lost meanwhile nobody waits for
        Step("compute", op=2, waits=(4,)),  # 6 to 10
    ]
    line = replay(graph, steps)
    assert line.time == 10.0 and line.compute_time == 7.0 + 0.5 + 0.5
    assert [line.spans[i] for i in (1, 2, 4, 5)] == [(1.0, 2.5), (1.5, 3.5), (3.5, 6.0), (6.0, 10.0)]
    alone = [replace(s, stream=0, waits=()) for s in steps]
    assert replay(graph, alone).time == 7.0 + 1.5 + 2.5
