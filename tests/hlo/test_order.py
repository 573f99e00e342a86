"""Orders from partial to total, and which buffers may interfere in them."""

import pytest

from support import hlo_data
from tightship.hlo import parse
from tightship.hlo.alias import Sharing
from tightship.hlo.dataflow import Buffer, Node, PointsTo, points_to
from tightship.hlo.liveness import Order, live_ranges, may_interfere, total

FORK = """\
HloModule fork, is_scheduled=true

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %a1 = f32[8]{0} negate(%x)
  %a2 = f32[8]{0} copy(%a1)
  %b1 = f32[8]{0} abs(%x)
  %b2 = f32[8]{0} reverse(%b1), dimensions={0}
  ROOT %sum = f32[8]{0} add(%a2, %b2)
}
"""


def named(points: PointsTo) -> dict[str, Node]:
    return {n.name: n for c in points.sequential for n in points.nodes[c.name]}


def test_L05_orders_are_partial_total_and_anything_between() -> None:  # noqa: N802
    points = points_to(parse(FORK))
    n = named(points)
    partial, streams = Order(points), Order(points, [["a1", "b1"], ["b2", "a2"]])
    assert partial.before(n["a1"], n["a2"]) and partial.before(n["x"], n["sum"])
    assert not partial.before(n["a1"], n["b1"]) and not partial.before(n["b1"], n["a1"])
    assert streams.before(n["a1"], n["b2"]) and not streams.before(n["a2"], n["b1"])
    assert streams.before(n["b2"], n["a2"])  # against the order of the text
    every = [n[i.name] for i in points.module.entry.instructions]
    line = total(points)
    assert all(line.before(p, q) == (k < m) for k, p in enumerate(every) for m, q in enumerate(every))


def test_L05_what_a_loop_runs_is_as_early_as_the_loop() -> None:  # noqa: N802
    points = points_to(hlo_data.module("cpu_control"))
    n, order = named(points), Order(points)
    assert order.before(n["tuple.28"], n["wrapped_tanh"])  # the loop's operand, and something in its body
    assert order.before(n["wrapped_tanh"], n["sort.0"]) and not order.before(n["sort.0"], n["wrapped_tanh"])


def test_L06_interference_depends_on_the_order_and_on_who_may_write_over_whom() -> None:  # noqa: N802
    points = points_to(parse(FORK))
    sharing = Sharing(points, "cpu")
    at: dict[str, Buffer] = {str(b): b for b in points.buffers}
    partial = Order(points)
    assert may_interfere(partial, sharing, at["a1"], at["b2"])  # may run at the same time
    assert not may_interfere(total(points), sharing, at["a1"], at["b2"])
    assert may_interfere(
        total(points), sharing, at["a1"], at["a2"]
    )  # a copy is never written over its operand
    assert may_interfere(total(points), sharing, at["b1"], at["b2"])  # reversed: needs other elements
    assert not may_interfere(total(points), sharing, at["a2"], at["sum"])
    assert may_interfere(total(points), sharing, at["x"], at["sum"])  # the caller's


@pytest.mark.parametrize("name", ["cpu_mlp", "gpu_mlp_35000000"])
def test_L07_liveness_answers_from_points_to_and_order_what_live_ranges_say(name: str) -> None:  # noqa: N802
    live = live_ranges(hlo_data.module(name))
    sharing, order = Sharing(live.points, name[:3]), total(live.points)
    out = live.points.live_out
    temporary = [b for b in live.ranges if b not in out and b.node.opcode not in ("parameter", "constant")]
    alone = {g.buffers[0] for g in live.sets if len(g.buffers) == 1}
    compared = 0
    for a in temporary:
        for b in temporary:
            r, s = live.ranges[a], live.ranges[b]
            if a is b or a not in alone or b not in alone or r.end == s.start or s.end == r.start:
                continue  # meeting at one instruction: a question of sharing, asked above
            assert may_interfere(order, sharing, a, b) == (r.start <= s.end and s.start <= r.end), (a, b)
            compared += 1
    assert compared > 1000
    stored = {
        k for k, v in vars(order).items() if isinstance(v, dict) and any(isinstance(x, Buffer) for x in v)
    }
    assert not stored
