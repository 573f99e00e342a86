"""What no op of the backward reads may stay for what is recomputed from it, as the inputs of concatenations do."""

import numpy as np
import pytest

from tightship.diagnose.decisions import why
from tightship.graph import Graph, Op, Storage, Value
from tightship.planners import default
from tightship.planners.evict.problem import EVICT, KEEP, STAY, EvictionProblem
from tightship.planners.run import decision_plan
from tightship.simulate import baseline, replay

MADE, JOINED = 10.0, 1.0


def dense(layers: int, size: int = 1024) -> Graph:
    """DenseNet in little: each layer joins all that was made before and makes one more of it, and its backward reads
    what was joined."""
    storages, ops = [Storage("x", size, "input")], []

    def op(name: str, reads: tuple[int, ...], nbytes: int, time: float, phase: str = "forward") -> int:
        storages.append(Storage(name, nbytes))
        ops.append(Op(name, name.rstrip("0123456789"), reads, (len(storages) - 1,), time=time, phase=phase))
        return len(storages) - 1

    made, joined = [0], []
    for k in range(layers):
        joined.append(op(f"join{k}", tuple(made), size * len(made), JOINED))
        made.append(op(f"make{k}", (joined[-1],), size, MADE))
    gradient = made[-1]
    for k in reversed(range(layers)):
        gradient = op(f"back{k}", (gradient, joined[k]), size, MADE, "backward")
    values = tuple(Value(s.name, i) for i, s in enumerate(storages))
    return Graph(tuple(ops), values, tuple(storages), (0,), (gradient,))


def test_inputs_of_concatenations_stay_and_these_are_joined_again() -> None:
    graph = dense(12)
    before = replay(graph, baseline(graph))
    budget = graph.static_bytes + (before.peak - graph.static_bytes) // 3
    plan = default.plan(graph, budget)
    again = {graph.ops[s.op].target for s in plan.steps if s.kind == "recompute"}
    assert again == {"join"}
    assert plan.peak <= budget and plan.time - before.time <= 12 * JOINED


def test_it_leaves_with_its_last_use_unless_that_is_decided() -> None:
    graph = dense(4)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    names = [graph.storages[s].name for s in problem.gaps[problem.stays, 0]]
    assert names == ["make0", "make1"]  # what the last two make is hardly used twice
    assert problem.cost(problem.nothing(), 1 << 60).peak == replay(graph, baseline(graph)).peak
    bits = np.where(problem.stays, STAY, KEEP).astype(np.uint8)
    first = next(k for k, op in enumerate(graph.ops) if op.phase == "backward")
    lines = replay(graph, problem.steps(bits)), replay(graph, baseline(graph))
    there, without = (dict(zip((s.op for s in x.steps), x.levels, strict=True)) for x in lines)
    assert there[first] == without[first] + 2 * 1024


@pytest.mark.parametrize("kept", [frozenset(), frozenset({"make0"})])
def test_results_and_what_is_larger_than_all_that_is_made_of_it_have_no_such_choice(
    kept: frozenset[str],
) -> None:
    graph = dense(4)
    outputs = (*graph.outputs, *(i for i, s in enumerate(graph.storages) if s.name in kept))
    graph = Graph(graph.ops, graph.values, graph.storages, graph.inputs, outputs)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    names = {graph.storages[s].name for s in problem.gaps[problem.stays, 0]}
    assert names == {"make0", "make1"} - kept
    wide = [Storage(s.name, 1 << 20 if s.name == "make1" else s.size, s.kind) for s in graph.storages]
    graph = Graph(graph.ops, graph.values, tuple(wide), graph.inputs, outputs)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    assert {graph.storages[s].name for s in problem.gaps[problem.stays, 0]} == {"make0"} - kept


def test_why_a_plan_is_so_knows_what_stays() -> None:
    """The decisions read from a plan's steps are those that it was made by."""
    graph = dense(12)
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    joined = np.array([graph.storages[s].name.startswith("join") for s in problem.gaps[:, 0]])
    bits = np.where(problem.stays, STAY, joined * EVICT).astype(np.uint8)
    steps = problem.steps(bits)
    plan = decision_plan(graph, steps, replay(graph, steps))
    assert why(graph, plan, "join3").exact
    other = problem.steps((joined * EVICT).astype(np.uint8))
    assert why(graph, decision_plan(graph, other, replay(graph, other)), "join3").exact


def test_bytes_that_are_counted_many_times_over_stay_within_numbers() -> None:
    """Each op reads all results before it, of which the last one alone is read by the backward."""
    n = 90
    storages = [Storage("x", 64, "input"), *(Storage(f"a{k}", 64) for k in range(n)), Storage("end", 64)]
    ops = [Op(f"a{k}", "a", tuple(range(k + 1)), (k + 1,), time=1.0) for k in range(n)]
    ops += [Op("loss", "l", (0,), (n + 1,), time=1.0)]
    storages.append(Storage("back", 64))
    ops += [Op("back", "b", (n, n + 1), (n + 2,), time=1.0, phase="backward")]
    values = tuple(Value(s.name, i) for i, s in enumerate(storages))
    graph = Graph(tuple(ops), values, tuple(storages), (0,), (n + 2,))
    problem = EvictionProblem(graph, tuple(range(len(ops))))
    names = [graph.storages[s].name for s in problem.gaps[problem.stays, 0]]
    assert names == [f"a{k}" for k in range(n - 2)]
