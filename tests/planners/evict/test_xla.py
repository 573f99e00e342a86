"""XLA's greedy rematerialization, behavior by behavior, on graphs small enough to count by hand.

Sizes are in units of 64 bytes (``U``). ``build`` takes one row per op; a value is named after what makes it.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chains import chain
from support.strategies import graphs
from support.xla_trackers import check
from tightship.analysis.bounds import lower_bound
from tightship.baselines import xla
from tightship.baselines.xla_pick import Rescan
from tightship.baselines.xla_tracker import Item, Tracker, recomputable
from tightship.graph import Graph, Op, Storage, Value
from tightship.planners.evict.lowering import lower
from tightship.planners.evict.problem import Decision, EvictionProblem
from tightship.planners.order import sink
from tightship.simulate import baseline, replay

U = 64
Row = tuple[str, str, dict[str, Any]]


def build(rows: list[Row], outputs: str = "", static: str = "x") -> Graph:
    """Rows are (results with sizes "a:2 b:1", operands "x a", fields of the op). "v=a" makes ``v`` a view of ``a``,
    "v=a!" writes in place. ``control`` names ops by their first result."""
    storages = [Storage(n, U, "parameter") for n in static.split()]
    values = [Value(n, i) for i, n in enumerate(static.split())]
    at = {n: i for i, n in enumerate(static.split())}
    ops: list[Op] = []
    first: dict[str, int] = {}
    for made, reads, fields in rows:
        outs, writes = [], []
        for word in made.split():
            name, _, size = word.partition(":")
            name, _, base = name.partition("=")
            if base:
                s = values[at[base.rstrip("!")]].storage
                writes += [s] if base.endswith("!") else []
            else:
                storages.append(Storage(name, U * int(size)))
                s = len(storages) - 1
            values.append(Value(name, s))
            at[name] = len(values) - 1
            outs.append(at[name])
            first.setdefault(name, len(ops))
        given = dict(fields)
        given["control"] = tuple(first[n] for n in given.get("control", ()))
        given["mutates"] = tuple(writes) + tuple(values[at[n]].storage for n in given.get("mutates", ()))
        given["updates"] = tuple(values[at[n]].storage for n in given.get("updates", ()))
        given = {"target": "t", "time": 1.0} | given
        ops.append(
            Op(made.split(":")[0], inputs=tuple(at[n] for n in reads.split()), outputs=tuple(outs), **given)
        )
    last = tuple(at[n] for n in outputs.split())
    return Graph(tuple(ops), tuple(values), tuple(storages), tuple(range(len(static.split()))), last)


def frame(graph: Graph) -> EvictionProblem:
    return EvictionProblem(graph, tuple(range(len(graph.ops))))


def tracker(graph: Graph) -> Tracker:
    return Tracker(graph, range(len(graph.ops)), [s.size for s in graph.storages], graph.static_bytes)


def at(t: Tracker, *ops: int, run: int | None = None) -> list[Item]:
    """Items of ``ops`` after the walk has begun op ``run``."""
    items = [i for i in t.usage if isinstance(i, Item)]
    if run is not None:
        for item in items[: run + 1]:
            if not item.placed:
                t.begin(item)
    return [items[k] for k in ops]


def names(graph: Graph, d: Decision) -> str:
    """The schedule as op names; a prime marks a recomputation."""
    assert d.steps is not None
    steps = [s for s in d.steps if s.op >= 0]
    return " ".join(graph.ops[s.op].name + ("'" if s.kind == "recompute" else "") for s in steps)


def plan(graph: Graph, units: int, **options: Any) -> Decision:
    found = xla.plan(frame(graph), units * U, xla.Options(**options))
    assert found.steps is not None
    assert replay(graph, found.steps).peak == found.peak
    return found


def peak(graph: Graph) -> int:
    return replay(graph, baseline(graph)).peak // U


ROWS: list[Row] = [("a:4", "x", {}), ("m:8", "a", {}), ("n:1", "m", {}), ("z:1", "a n", {})]
BIG = build(ROWS, "z")
"""a is used before and after m; 1 (x) + 4 + 8 + 1 = 14 at n, 13 at m."""


def test_R01_results_are_charged_when_an_op_begins_and_operands_released_when_it_ends() -> None:  # noqa: N802
    g = build([("a:2", "x", {}), ("b:1 c:4", "a", {"workspace": U}), ("d:1", "b", {})], "d")
    t = tracker(g)
    assert [t.usage.value(i) // U for i in at(t, 0, 1, 2)] == [3, 1 + 2 + 1 + 4 + 1, 1 + 1 + 1]
    steps = baseline(g)
    ran = zip(steps, replay(g, steps).during, strict=True)
    assert [t.usage.value(i) for i in t.usage] == [now for step, now in ran if step.op >= 0]


def test_R02_a_buffer_knows_its_definer_size_users_and_whether_it_is_live_out() -> None:  # noqa: N802
    g = build([("a:2", "x", {}), ("v=a", "a", {}), ("b:1", "v", {}), ("c:1", "a b", {})], "c")
    t = tracker(g)
    items = at(t, 0, 1, 2, 3, run=2)
    (b,) = items[0].made
    assert (b.item, b.size, b.users, b.remaining, b.live_out) == (items[0], 2 * U, items[1:], 1, False)
    assert t.indirect == [False, True, False, False], "op 2 reads a through v"
    assert items[3].made[0].live_out


def test_R03_xla_takes_the_module_s_result_off_the_limit_and_counts_it_zero_inside() -> None:  # noqa: N802
    walk = xla.Walk(BIG, range(4), 14 * U, xla.Options("xla"))
    assert walk.base == 2 * U, "x and z, the caller's"
    assert [walk.tracker.usage.value(i) // U for i in walk.tracker.usage] == [6, 14, 15, 7]
    assert plan(BIG, 14, policy="ours").runs == 0, "tightship counts z from where it is made"
    assert plan(BIG, 14, policy="xla").runs == 1
    assert plan(BIG, 15, policy="xla").runs == 0


def test_R04_a_loop_defines_nothing_its_result_is_its_operand_s_buffer() -> None:  # noqa: N802
    body = build([("p:3", "x", {}), ("q:1", "p", {})], "q")
    g = build(
        [("a:2", "x", {}), ("r=a!", "a", {"calls": (body,), "target": "while"}), ("b:1", "r", {})], "r b"
    )
    t = tracker(g)
    items = at(t, 0, 1, 2)
    assert items[1].made == [] and not t.may[1]
    assert t.indirect[1] and items[0].made[0].live_out
    assert t.usage.value(items[1]) == (1 + 2 + 4) * U, "and what the body needs beyond its inputs"


def test_R05_steps_are_taken_until_under_the_limit_or_out_of_candidates() -> None:  # noqa: N802
    rows = [(f"a{i}:3", "x", {}) for i in range(3)]
    uses = [
        ("u:1", "a0 a1 a2", {}),
        ("m:8", "u", {}),
        ("n:1", "m", {}),
        *((f"z{i}:1", f"a{i}", {}) for i in range(3)),
    ]
    g = build([*rows, *uses], "n z0 z1 z2")
    assert peak(g) == 1 + 9 + 1 + 8
    assert names(g, plan(g, 16)) == "a0 a1 a2 u m n a0' z0 z1 z2"
    assert names(g, plan(g, 13)) == "a0 a1 a2 u m n a0' z0 a1' z1 z2"
    last = plan(g, 9)
    assert (last.met, last.peak, last.runs) == (False, 11 * U, 3), "u needs all three"


@pytest.mark.parametrize(
    ("fields", "may"),
    [
        ({}, True),
        ({"target": "constant"}, False),
        ({"target": "custom-call"}, False),
        ({"target": "all-reduce"}, False),
        ({"target": "copy"}, False),
        ({"calls": (chain(1),)}, False),
        ({"random": True}, False),
        ({"effect": True}, False),
        ({"mutates": ("x",)}, False),
        ({"mutates": ("x",), "updates": ("x",)}, True),
    ],
)
def test_R06_what_is_never_recomputed(fields: dict[str, Any], may: bool) -> None:  # noqa: N802
    g = build([("a:4", "x", fields), ("m:8", "a", {}), ("n:1", "m", {}), ("z:1", "a n", {})], "z")
    assert recomputable(g, 0) is may
    for policy in ("ours", "xla"):
        assert (plan(g, 13, policy=policy).runs > 0) is may


def test_R06_results_that_are_written_again_or_made_of_what_is_are_not_recomputed() -> None:  # noqa: N802
    g = build([("a:4", "x", {}), ("b:1", "a", {}), ("w=a!", "a", {}), ("z:1", "a b", {})], "z")
    assert [recomputable(g, k) for k in range(4)] == [False, False, False, True]


def test_R07_the_gain_is_what_is_live_and_idle_less_operands_that_are_dead() -> None:  # noqa: N802
    g = build(
        [("a:3", "x", {}), ("b:5", "a", {}), ("m:8", "b", {}), ("n:1", "m", {}), ("z:1", "b n", {})], "z"
    )
    t = tracker(g)
    a, b = at(t, 0, 1, run=2)
    r = Rescan(t, 1, 100)
    assert r.gain([b]) == 0 - 3 * U, "b is in use at m; a is dead"
    at(t, run=3)
    assert r.gain([b]) == (5 - 3) * U
    assert r.gain([a]) == 0
    assert names(g, plan(g, 14, policy="xla")) == "a b m n b' z"
    split = t.split(b)
    assert split.clone.reads == (1,) and t.buffer_at(1, split.clone).users[-1] is split.clone
    assert t.usage.value(at(t, 2)[0]) == (1 + 5 + 8 + 3) * U, "a lives on across m"


def test_R07_a_result_with_indirect_users_gives_xla_no_gain() -> None:  # noqa: N802
    g = build(
        [("a:4", "x", {}), ("v=a", "a", {}), ("m:8", "v", {}), ("n:1", "m", {}), ("z:1", "v n", {})], "z"
    )
    assert plan(g, 13, policy="xla").runs == 0
    assert plan(g, 13, policy="ours").runs == 1, "a plan restores the storage, and its views with it"


DEEP = build(
    [("a:4", "x", {}), ("b:4", "a", {}), ("m:8", "b", {}), ("n:1", "m", {}), ("z:1", "b n", {})], "z"
)


def test_R08_in_a_group_an_operand_made_in_the_group_costs_nothing() -> None:  # noqa: N802
    t = tracker(DEEP)
    a, b = at(t, 0, 1, run=3)
    r = Rescan(t, 2, 100)
    assert (r.gain([b]), r.gain([a, b])) == (0, 4 * U)
    assert plan(DEEP, 13, policy="xla", block=1).runs == 0
    for policy in ("xla", "ours"):
        found = plan(DEEP, 13, policy=policy, block=2)
        assert names(DEEP, found) == "a b m n a' b' z"
        assert found.met and found.peak == 13 * U


def test_R09_the_cost_is_limit_over_gain_and_a_move_costs_nothing() -> None:  # noqa: N802
    g = build(
        [("e:1", "x", {}), ("a:4", "x", {}), ("m:8", "a", {}), ("n:1", "m", {}), ("z:1", "a e n", {})], "z"
    )
    t = tracker(g)
    e, a = at(t, 0, 1, run=3)
    r = Rescan(t, 1, 100 * U)
    assert (r.cost([a], 4 * U), r.cost([e], U)) == (25, 0)
    assert names(g, plan(g, 14, policy="xla")) == "a m n e a' z", "the move first, although it gains less"
    found = plan(g, 13, policy="ours")
    assert (names(g, found), found.extra) == ("a m n e a' z", 1.0)


def test_R10_the_clone_goes_before_the_earliest_remaining_use_and_serves_all() -> None:  # noqa: N802
    g = build([*ROWS, ("y:1", "a z", {})], "y")
    found = plan(g, 13)
    assert names(g, found) == "a m n a' z y"
    assert found.steps is not None
    freed = [s.storages for s in found.steps if s.kind == "free"]
    assert freed[0] == (1,) and sum(1 in f for f in freed) == 2


def test_R10_what_is_moved_twice_is_not_moved_again() -> None:  # noqa: N802
    bumps = [row for i in range(3) for row in ((f"m{i}:8", "x", {}), (f"n{i}:1", f"m{i}", {}))]
    g = build([("e:4", "x", {}), *bumps, ("z:1", "e n0 n1 n2", {})], "z")
    t = tracker(g)
    (e,) = at(t, 0, run=2)
    one = t.split(e)
    assert t.settle(one) and e.gone and one.clone.moved and not one.clone.denied
    assert names(g, plan(g, 12, policy="xla")).split()[-2:] == ["e", "z"], "one move is enough"
    t.end()
    t.begin(one.clone)
    at(t, run=len(list(t.usage)) - 3)
    two = t.split(one.clone)
    assert t.settle(two) and two.clone.denied
    t.end()
    t.begin(two.clone)
    t.end()
    assert not t.candidate(two.clone)


def test_R11_no_candidate_once_a_control_successor_has_run() -> None:  # noqa: N802
    for where, may in (("m", False), ("z", True)):
        rows = [(r, o, f | ({"control": ("a",)} if r[0] == where else {})) for r, o, f in ROWS]
        for policy in ("ours", "xla"):
            assert (plan(build(rows, "z"), 13, policy=policy).runs > 0) is may


def test_R11_a_clone_stays_ahead_of_the_original_s_control_successors() -> None:  # noqa: N802
    rows = [*ROWS[:3], ("c:1", "n", {"control": ("a",)}), ("z:1", "a n c", {})]
    for policy in ("ours", "xla"):
        assert names(build(rows, "z"), plan(build(rows, "z"), 13, policy=policy)) == "a m n a' c z"


def test_R11_a_write_to_what_the_caller_owns_holds_its_readers_back() -> None:  # noqa: N802
    after = build([*ROWS[:3], ("w=x!", "x n", {}), ("z:1", "a w", {})], "z")
    assert names(after, plan(after, 13)) == "a m n a' w=x! z"
    before = build([*ROWS[:2], ("w=x!", "x", {}), *ROWS[2:]], "z")
    assert plan(before, 13).runs == 0


def test_R15_the_decision_says_what_was_done_and_whether_the_limit_was_reached() -> None:  # noqa: N802
    found = plan(BIG, 13)
    assert (found.met, found.peak, found.runs) == (True, 13 * U, 1)
    found = plan(BIG, 12)
    assert (found.met, found.peak) == (False, 13 * U) and lower_bound(BIG) == 13 * U


def test_R15_what_nobody_uses_any_more_is_removed() -> None:  # noqa: N802
    g = build(
        [("p:1", "x", {}), ("e:4", "p", {}), ("m:8", "x", {}), ("n:1", "m", {}), ("z:1", "e n", {})], "z"
    )
    found = plan(g, 11)
    assert names(g, found) == "m n p e z", "moved, and what only the original needed with it"
    assert (found.runs, found.extra, found.peak) == (0, 0.0, 10 * U)


def test_R09_what_makes_a_view_of_another_storage_too_is_not_moved_behind_its_readers() -> None:  # noqa: N802
    rows: list[Row] = [("p:1", "x", {}), ("e:4 v=p", "p", {}), ("m:8", "v", {}), ("n:1", "m", {})]
    g = build([*rows, ("z:1", "e n", {})], "z")
    for policy in ("ours", "xla"):
        found = plan(g, 12, policy=policy)
        assert names(g, found) == "p e m n e' z" and found.runs == 1


class Checked(xla.Walk):
    """A walk that checks the tracker after every step."""

    def take(self, group: list[Item]) -> bool:
        before = self.tracker.usage.peak()
        done = super().take(group)
        check(self.tracker, self.base)
        assert not self.ours or self.tracker.usage.peak() <= before
        return done


@settings(max_examples=60)
@given(
    graphs(50, static_writes=1.0), st.floats(0.2, 0.95), st.sampled_from(["ours", "xla"]), st.integers(1, 6)
)
def test_R16_the_tracker_is_right_after_every_step(g: Graph, part: float, policy: str, block: int) -> None:  # noqa: N802
    base = replay(g, baseline(g))
    limit = g.static_bytes + int(part * (base.peak - g.static_bytes))
    for order in (tuple(range(len(g.ops))), sink.plan(g)):
        walk = Checked(g, order, limit, xla.Options(policy, block))
        check(walk.tracker, walk.base)
        before = walk.peak
        walk.run()
        check(walk.tracker, walk.base)
        steps = lower(walk.tracker.graph, (), xla.runs(walk.tracker))
        line = replay(g, steps)
        if policy == "ours":
            assert line.peak == walk.peak <= before == replay(g, baseline(g, order)).peak
        else:
            assert line.peak <= walk.peak
        again = xla.plan(EvictionProblem(g, order), limit, xla.Options(policy, block))
        assert again.steps == steps and again.peak == line.peak
        assert (again.runs == 0) == all(s.kind != "recompute" for s in steps)


def test_R16_the_checker_finds_what_is_wrong() -> None:  # noqa: N802
    def spoil_users(t: Tracker) -> None:
        at(t, 0)[0].made[0].users.pop()

    def spoil_count(t: Tracker) -> None:
        at(t, 0)[0].made[0].done += 1

    def spoil_bytes(t: Tracker) -> None:
        t.usage.add(*at(t, 0, 2), 1)

    for spoil in (spoil_users, spoil_count, spoil_bytes):
        t = tracker(BIG)
        check(t, U)
        spoil(t)
        with pytest.raises(AssertionError):
            check(t, U)


def test_R18_ours_goes_by_seconds_per_byte_where_xla_goes_by_bytes() -> None:  # noqa: N802
    rows = [
        ("a:4", "x", {"time": 9.0}),
        ("b:3", "x", {}),
        ("u:1", "a b", {}),
        ("m:8", "u", {}),
        ("n:1", "m", {}),
    ]
    g = build([*rows, ("z:1", "a b n", {})], "z")
    assert names(g, plan(g, 15, policy="xla")) == "a b u m n a' z"
    found = plan(g, 15, policy="ours")
    assert (names(g, found), found.extra) == ("a b u m n b' z", 1.0)
    free = [(made, reads, fields | {"time": 0.0}) for made, reads, fields in rows]
    g = build([*free, ("z:1", "a b n", {"time": 0.0})], "z")
    assert names(g, plan(g, 15)) == "a b u m n a' z", "without times: bytes read and made, per byte gained"


def test_R19_ours_refuses_what_raises_the_peak_at_an_earlier_op() -> None:  # noqa: N802
    rows = [("t:3", "x", {}), ("y:4", "t", {}), ("m:1", "y", {"workspace": 8 * U}), ("q:1", "m", {})]
    g = build([*rows, ("k:1", "q", {"workspace": 9 * U}), ("z:1", "k y", {})], "z")
    assert peak(g) == 1 + 4 + 1 + 1 + 9
    theirs = plan(g, 16, policy="xla")
    assert names(g, theirs) == "t y m q k y' z"
    assert theirs.peak == (1 + 4 + 3 + 1 + 8) * U, "t lives on across m"
    found = plan(g, 15, policy="ours", block=1)
    assert (found.runs, found.peak) == (0, 16 * U)
    assert plan(g, 15, policy="ours").met, "with t in the group nothing lives on"


def test_R20_groups_walks_and_a_bound() -> None:  # noqa: N802
    g = chain(200)
    base = peak(g)
    runs = {block: plan(g, base // 8, block=block) for block in (1, 8)}
    assert not plan(g, base // 8, policy="xla").met
    assert runs[8].met
    bound = lower_bound(g)
    assert bound <= runs[8].peak
    assert plan(g, 1).peak >= bound
