"""Numbers that cannot be counted with are refused where a graph or plan is made, not by an overflow later on."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.chains import chain
from tightship.errors import BadInput, TightshipError
from tightship.graph import MOST_BYTES, Graph, Op, Request, Storage, Value
from tightship.plan import Plan, Residence, Step
from tightship.planners.default import Options, plan
from tightship.planners.evict.problem import EvictionProblem
from tightship.simulate import baseline, replay

SIZES = st.one_of(
    st.integers(-2, 200), st.sampled_from([2**31, 2**58, 2**59, 2**60, 2**61, 2**62, 2**63 - 1, 2**63, 2**64])
)
TIMES = st.sampled_from([0.0, 1.0, 1e-9, 1e300, 1.7e308, -1.0, -0.0, math.inf, -math.inf, math.nan])


def graph_of(sizes: list[int], times: list[float], workspace: int) -> Graph:
    """A chain with these sizes and times."""
    storages = tuple(Storage(f"s{k}", size) for k, size in enumerate(sizes))
    values = tuple(Value(f"v{k}", k) for k in range(len(sizes)))
    ops = tuple(
        Op(f"o{k}", "f", (k,), (k + 1,), time=times[k], workspace=workspace) for k in range(len(sizes) - 1)
    )
    return Graph(ops, values, storages, (0,), (len(sizes) - 1,))


@given(st.lists(SIZES, min_size=2, max_size=6), st.lists(TIMES, min_size=6, max_size=6), SIZES)
def test_what_a_graph_takes_can_be_counted_with(sizes: list[int], times: list[float], workspace: int) -> None:
    used = times[: len(sizes) - 1]
    fine = min(sizes) >= 0 and sum(sizes) <= MOST_BYTES and 0 <= workspace <= MOST_BYTES
    fine = fine and all(t >= 0 for t in used) and math.isfinite(sum(used))
    if not fine:
        with pytest.raises(BadInput):
            graph_of(sizes, times, workspace)
        return
    graph = graph_of(sizes, times, workspace)
    line = replay(graph, baseline(graph))
    found = EvictionProblem(graph, tuple(range(len(graph.ops)))).cost(np.zeros(0, np.uint8), 1 << 62)
    assert found.peak <= line.peak < 2**62
    try:
        assert plan(graph, None, Options(work=1000, seconds=1.0)).peak <= line.peak
    except TightshipError as error:
        assert "Traceback" not in str(error)


@pytest.mark.parametrize(
    "changes, rule",
    [
        ({"time": math.nan}, "an op's time is not negative"),
        ({"time": math.inf}, "an op's time is not negative"),
        ({"time": -1.0}, "an op's time is not negative"),
        ({"workspace": -1}, "an op's workspace is from 0 to"),
        ({"workspace": 2**62}, "an op's workspace is from 0 to"),
        ({"requests": (Request(2**63, -1, 0, 1),)}, "a request is for 0 to"),
        ({"requests": (Request(-64, -1, 0, 1),)}, "a request is for 0 to"),
        ({"random": True, "state": 2**62}, "random state has at most"),
    ],
)
def test_an_op_with_such_a_number_is_refused_by_name(changes: dict[str, Any], rule: str) -> None:
    graph = chain(3)
    wrong = replace(graph.ops[1], **changes)
    with pytest.raises(BadInput, match=f"op 'f1': .*{rule}"):
        graph.with_ops((graph.ops[0], wrong, *graph.ops[2:]))


@given(st.lists(st.integers(0, 9), max_size=4), st.lists(st.integers(0, 9), max_size=4))
def test_a_value_has_a_stride_for_each_dimension_or_none_at_all(shape: list[int], stride: list[int]) -> None:
    values = (Value("x", 0, shape=tuple(shape), stride=tuple(stride)),)
    if stride and len(stride) != len(shape):
        with pytest.raises(BadInput, match="value 'x': a value has a stride for each dimension"):
            Graph((), values, (Storage("s", 64),), (0,))
    else:
        Graph((), values, (Storage("s", 64),), (0,))


@pytest.mark.parametrize(
    "changes",
    [
        {"time": math.inf},
        {"time": math.nan},
        {"seconds": -1.0},
        {"steps": (Step("compress", -1, (0,), nbytes=2**63),)},
        {"residences": (Residence(0, 0, 1, 64, offset=2**63),)},
        {"residences": (Residence(0, 0, 1, 2**64),)},
    ],
)
def test_a_plan_with_such_a_number_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"Plan\.\w+"):
        Plan("", **({"steps": ()} | changes))


def test_a_graph_of_a_hundred_thousand_ops_is_checked_in_a_moment() -> None:
    graph = chain(50_000)
    began = time.process_time()
    replace(graph, name="again")
    assert time.process_time() - began < 2.0
