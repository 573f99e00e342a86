"""Graphs thousands of ops deep, planned on the smallest stack that a thread can have: nothing may recurse along them.

Each plan is made in a process of its own, since a stack that runs over ends the process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.chains import chain
from tightship.baselines.grappler import runs
from tightship.plan import Plan
from tightship.planners.evict.problem import EvictionProblem
from tightship.serde import dumps_plan, loads_plan
from tightship.simulate import baseline, replay
from tightship.verify import verify

TESTS = Path(__file__).parents[1]

PRELUDE = f"""
import sys, threading
sys.path.insert(0, {str(TESTS)!r})
import numpy as np
from support.chains import chain
from tightship import _core
from tightship.planners.default import Options, plan
from tightship.planners.evict.problem import EvictionProblem

def in_small_stack(work):
    raised = []
    def guarded():
        try:
            work()
        except BaseException as error:
            raised.append(error)
    threading.stack_size(32 * 1024)
    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
"""


def run(body: str) -> str:
    """What a script prints that works in a thread with a small stack."""
    done = subprocess.run([sys.executable, "-c", PRELUDE + body], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.parametrize("layers, evict, work", [(2_000, "anneal", 1_000_000), (20_000, "greedy", 4_000_000)])
def test_a_deep_chain_is_planned_on_the_smallest_stack(layers: int, evict: str, work: int) -> None:
    body = f"""
def work():
    options = Options(order="given", evict={evict!r}, work={work}, seconds=600, place=False)
    made = plan(chain({layers}), "75%", options)
    assert made.met
    print(made.count("recompute"))

in_small_stack(work)
"""
    assert int(run(body)) > 0


@pytest.mark.parametrize("layers", [2_000, 20_000])
def test_a_recipe_of_any_depth_is_made_again(layers: int) -> None:
    """With every activation evicted, the first op of the backward needs each op of the forward, one for another."""
    body = f"""
def work():
    graph = chain({layers})
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    cost = problem.engine.evaluate(np.ones(len(problem.gaps), np.uint8), 1 << 40)
    assert cost["valid"], cost
    print(cost["runs"])

in_small_stack(work)
"""
    assert int(run(body)) == layers - 1


def test_tree_searches_of_any_depth_are_made_on_the_smallest_stack() -> None:
    """Buffers that all meet, from a start with holes: the first placement found places one on top of the other."""
    body = """
def work():
    n = 4000
    one = np.ones(n, np.int64)
    placer = _core.Placer(0 * one, one, 64 * one, one, -one)
    offsets, bound, _ = placer.exact(np.arange(n) * 128, 0, 10**8, 60.0, 0, False, 2)
    assert bound == 64 * n and offsets.max() == 64 * (n - 1), (bound, offsets.max())
    n = 1000
    one, at = np.ones(n, np.int64), np.arange(n - 1)
    placer = _core.RelatedPlacer(64 * one, one, -one, at, at + 1, -64 * one[1:], 64 * one[1:])
    offsets, _ = placer.exhaust(np.arange(n) * 128, 10**6, 60.0, 64 * n)
    assert offsets.max() + 64 <= 64 * n
    print("done")

in_small_stack(work)
"""
    assert run(body) == "done\n"


def test_deep_chains_are_replayed_verified_and_written_without_recursion() -> None:
    graph = chain(4_000)
    steps = baseline(graph)
    line = replay(graph, steps)
    plan = Plan(graph.digest, steps, peak=line.peak, peak_before=line.peak)
    again, _ = loads_plan(dumps_plan(plan, graph))
    assert again.steps == steps
    assert not [v for v in verify(graph, again) if v.code == "stale"]


def test_clones_of_a_deep_chain_are_ordered_without_recursion() -> None:
    graph = chain(4_000)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    found = runs(problem, frozenset(range(4_000)), "b")
    assert [r.op for r in found if r.again] == list(range(4_000))
