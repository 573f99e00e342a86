"""Why a plan decides as it does, and how two plans differ: each number is what a plan made so comes to."""

import json

import pytest

import tightship
from support.chains import chain
from tightship import BadInput
from tightship.cli import main
from tightship.diagnose.decisions import difference, why
from tightship.planners.evict.problem import EVICT, KEEP, EvictionProblem
from tightship.planners.run import decision_plan
from tightship.simulate import replay


def planned(graph, evicted, budget=None):
    """A plan in which the gaps of some storages are evicted and all others kept."""
    from dataclasses import replace

    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    bits = problem.nothing()
    for g, (s, _, _) in enumerate(problem.gaps.tolist()):
        bits[g] = EVICT if graph.storages[s].name in evicted else KEEP
    steps = problem.lower(problem.cost(bits, 1 << 60))
    return replace(decision_plan(graph, steps, replay(graph, steps)), budget=budget)


def names(graph, count=2):
    problem = EvictionProblem(graph, tuple(range(len(graph.ops))))
    may = [s for g, (s, _, _) in enumerate(problem.gaps.tolist()) if problem.engine.allowed[g] >> EVICT & 1]
    return [graph.storages[s].name for s in dict.fromkeys(may)][:count]


def way(answer, name):
    return next(a for a in answer.alternatives if a.way == name)


def test_each_alternative_is_the_plan_made_so():
    graph = chain(8)
    one, two = names(graph)
    with_, without = planned(graph, {one}), planned(graph, set())
    answer = why(graph, with_, one)
    assert answer.exact and answer.way == "recompute"
    kept = way(answer, "keep")
    assert (kept.peak, kept.time) == (without.peak, without.time)
    assert (kept.more, kept.extra) == (without.peak - with_.peak, pytest.approx(without.time - with_.time))
    other = way(why(graph, without, one), "recompute")
    assert (other.peak, other.time) == (with_.peak, with_.time) and other.verdict in ("slower", "tie")
    both = way(why(graph, planned(graph, {two}), one), "recompute")
    assert both.peak == planned(graph, {one, two}).peak


def test_verdicts_of_budgets_and_of_what_cannot_be():
    graph = chain(8)
    one = names(graph, 1)[0]
    least = planned(graph, set(names(graph, 99)))
    if least.peak < planned(graph, set()).peak:
        held = planned(graph, set(names(graph, 99)), budget=least.peak)
        verdicts = {way(why(graph, held, n), "keep").verdict for n in names(graph, 99)}
        assert "over the budget" in verdicts
    owned = graph.storages[min(graph.static)].name
    answer = why(graph, planned(graph, set()), owned)
    assert "the caller owns it" in answer.alternatives[0].reason
    with pytest.raises(BadInput, match="unknown tensor 'nobody'"):
        why(graph, planned(graph, set()), "nobody")
    assert all(a.verdict for a in why(graph, planned(graph, {one}), one).alternatives)


def test_differences_of_two_plans():
    graph = chain(8)
    one = names(graph, 1)[0]
    first, second = planned(graph, {one}), planned(graph, set())
    found = difference((graph, first), (graph, second))
    (row,) = found.rows
    assert found.same and found.exact and not found.moved
    assert (row.what, row.one, row.two) == (one, "recompute", "keep")
    assert row.more == second.peak - first.peak and row.extra == pytest.approx(second.time - first.time)
    assert not difference((graph, first), (graph, first)).rows


def test_plans_of_two_machines_say_so():
    from dataclasses import replace

    from tightship.machine import Machine

    graph = chain(8)
    ops = tuple(replace(op, time=op.time / 4) for op in graph.ops)
    other = replace(graph, ops=ops, machine=Machine(offload=2e9))
    found = difference((graph, planned(graph, set())), (other, planned(other, set())))
    assert "take 0.25 of the seconds" in found.machines and "copies to the host 1.86 GiB/s" in found.machines
    assert "from the host" not in found.machines
    assert not difference((graph, planned(graph, set())), (graph, planned(graph, set()))).machines


def test_plans_of_different_graphs_are_matched_by_name():
    small, large = chain(6), chain(8)
    found = difference((small, planned(small, set())), (large, planned(large, set())))
    assert not found.same and found.matched and found.only_two and not found.rows


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_the_commands(tmp_path, monkeypatch, capsys, columns):
    graph = chain(10)
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    made = [tightship.plan(graph, None, budget, seconds=1.0) for budget in ("85%", None)]
    for plan, path in zip(made, paths, strict=True):
        plan.save(path)
    monkeypatch.setenv("COLUMNS", str(columns))
    name = names(graph, 1)[0]
    assert main(["explain", paths[0], "--why", name]) == 0
    assert "chosen" in capsys.readouterr().out
    assert main(["explain", paths[0], "--why", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == name
    assert main(["diff", *paths, "--report", str(tmp_path / "d.html")]) == 0
    tables = [line for line in capsys.readouterr().out.splitlines() if "─" in line]
    assert tables and max(map(len, tables)) <= columns
    assert main(["diff", *paths, "--json"]) == 0
    assert {"differences", "one", "two", "matched"} <= set(json.loads(capsys.readouterr().out))
    assert main(["explain", paths[0], "--why", "nobody"]) == 2
    assert main(["diff", paths[0], str(tmp_path / "none.json")]) == 2
    assert str(tightship.diff(*paths))
