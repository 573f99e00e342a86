"""Banks: verified by hand, the optimum by brute force on small problems, bounds that hold on larger ones."""

from __future__ import annotations

import itertools
import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest

from support.chains import chain, fan
from support.commands import as_json, run
from tightship.cli import main
from tightship.errors import BadInput
from tightship.plan import Buffer, Pool, Problem
from tightship.planners.bank_sweep import sweep
from tightship.planners.banks import Banked, assign_banks, parse_banks, problem_of, traffic_of
from tightship.planners.packing import Search
from tightship.requests import PlanRequest
from tightship.serde import save_graph

SEARCH = Search(seconds=20.0)
FAST, SLOW = Pool("fast", 10, speed=4), Pool("slow", speed=1)


def drawn(seed: int, count: int, most: int = 20) -> tuple[Buffer, ...]:
    rng, rows = random.Random(seed), []
    for k in range(count):
        first = rng.randrange(count)
        rows.append(Buffer(
            f"b{k}", first, first + rng.randint(1, 4), 4 * rng.randint(1, most), rng.choice((1, 4, 16)),
            pools=rng.choice(((), (), ("f", "s"), ("s",))), traffic=rng.choice((None, rng.randint(0, 300))),
        ))  # fmt: skip
    return tuple(rows)


def meet(a: Buffer, b: Buffer) -> bool:
    return a.lower < b.upper and b.lower < a.upper


def placeable(buffers: list[Buffer], capacity: int | None) -> bool:
    """Whether some order of first fit keeps within the capacity: of any placement, that by offset does."""
    if capacity is None or not buffers:
        return True
    for order in itertools.permutations(buffers):
        put: list[tuple[Buffer, int]] = []
        for b in order:
            taken = [(x, x + o.size) for o, x in put if meet(o, b)]
            starts = sorted({0, *(-(-end // b.alignment) * b.alignment for _, end in taken)})
            at = next(x for x in starts if all(x + b.size <= low or high <= x for low, high in taken))
            if at + b.size > capacity:
                break
            put.append((b, at))
        else:
            return True
    return False


def least_cost(problem: Problem) -> float:
    """By trying every pool for every buffer, and every order of placing each pool."""
    fastest, best = max(pool.speed for pool in problem.pools), math.inf
    for chosen in itertools.product(problem.pools, repeat=len(problem.buffers)):
        rows = list(zip(problem.buffers, chosen, strict=True))
        cost = sum(traffic_of(b) * fastest / pool.speed for b, pool in rows)
        if cost >= best or any(b.pools and pool.name not in b.pools for b, pool in rows):
            continue
        if all(placeable([b for b, p in rows if p is pool], pool.capacity) for pool in problem.pools):
            best = cost
    return best


def check_by_hand(problem: Problem, banked: Banked) -> None:
    """Pools, capacities, alignment, overlaps and cost, from the answer alone."""
    rows = list(zip(problem.buffers, banked.solution.offsets, banked.solution.homes, strict=True))
    speed = {pool.name: pool.speed for pool in problem.pools}
    cost = sum(traffic_of(b) * max(speed.values()) / speed[name] for b, _, (name, _) in rows)
    assert cost == pytest.approx(banked.cost) and banked.bound <= banked.cost * (1 + 1e-9)
    for b, x, (name, _) in rows:
        assert x % b.alignment == 0 and (not b.pools or name in b.pools)
    for (a, x, home), (b, y, other) in itertools.combinations(rows, 2):
        assert home != other or not meet(a, b) or x + a.size <= y or y + b.size <= x
    for pool in problem.pools:
        top = max((x + b.size for b, x, (name, _) in rows if name == pool.name), default=0)
        assert not banked.met or pool.capacity is None or top <= pool.capacity
    assert banked.traffic == {
        pool.name: sum(traffic_of(b) for b, _, (name, _) in rows if name == pool.name)
        for pool in problem.pools
    }


@pytest.mark.parametrize("seed", range(40))
def test_the_optimum_is_found_or_the_bound_says_by_how_much_it_is_missed(seed):
    rng = random.Random(1000 + seed)
    pools = (
        Pool("f", rng.randint(10, 120), speed=8),
        *([Pool("m", rng.randint(20, 160), speed=rng.choice((2, 3, 8)))] if seed % 3 == 0 else []),
        Pool("s", rng.choice((None, None, 200)), speed=1),
    )
    problem = Problem(drawn(seed, rng.randint(1, 6)), pools=pools)
    banked, least = assign_banks(problem, search=SEARCH), least_cost(problem)
    check_by_hand(problem, banked)
    assert banked.met == (least < math.inf)
    if banked.met:
        assert banked.bound <= least * (1 + 1e-9)
        assert banked.cost == pytest.approx(least) if banked.optimal else banked.cost >= least * (1 - 1e-9)
        assert banked.cost <= least * (1 + banked.gap) * (1 + 1e-9)


@pytest.mark.parametrize("count", [40, 150])
def test_larger_problems_are_placed_near_a_bound(count):
    buffers = tuple(replace(b, pools=()) for b in drawn(count, count))
    problem = Problem(buffers, pools=(Pool("f", 150, speed=8), Pool("m", 150, speed=3), Pool("s", speed=1)))
    banked = assign_banks(problem, search=SEARCH)
    check_by_hand(problem, banked)
    assert banked.met and banked.bound > 0 and banked.gap < 0.25


@pytest.mark.parametrize("seed", range(20))
def test_a_sweep_finds_the_cheapest_choice_whose_bytes_fit(seed) -> None:
    """Of all choices, by the bytes in each pool at each moment; units may have holes, and pools that are closed."""
    rng = random.Random(seed)
    count, pools = rng.randint(1, 6), rng.randint(1, 3)
    parts = []
    for _ in range(count):
        a, b, c, d = sorted(rng.sample(range(10), 4))
        parts.append([(a, b, rng.randint(0, 9)), (c, d, rng.randint(1, 9))][rng.randint(0, 1) :])
    cost = np.array([[rng.choice((1.0, 2.0, 5.0, math.inf)) for _ in range(pools)] for _ in parts])
    cost[:, -1] = 8.0
    capacity = [rng.randint(0, 20) for _ in range(pools)]

    def fits(choice):
        return all(
            sum(n for k, p in enumerate(choice) for a, b, n in parts[k] if p == q and a <= t < b)
            <= capacity[q]
            for t in range(10)
            for q in range(pools)
        )

    def total(choice):
        return sum(cost[k, p] for k, p in enumerate(choice))

    found = sweep(parts, cost, capacity, cost, math.inf, lambda: False)
    every = [c for c in itertools.product(range(pools), repeat=count) if total(c) < math.inf and fits(c)]
    if not every:
        assert found == []
        return
    least = min(map(total, every))
    assert found is not None and fits(found) and total(found) == least
    assert sweep(parts, cost, capacity, cost, least, lambda: False) == []  # none that adds less
    assert sweep(parts, cost, capacity, cost, math.inf, lambda: True) is None


@pytest.mark.parametrize("count", [20, 60])
def test_what_few_buffers_at_a_time_cost_is_proved(count) -> None:
    """Prices alone leave up to a third between the cost and the bound of such: large buffers, small fast memory."""
    for seed in range(4):
        rng, rows = random.Random(seed), []
        for k in range(count):
            until = k + rng.choice((1, 2, 2, 2, 3, 8))
            rows.append(Buffer(f"b{k}", k, until, rng.choice((1024, 4096, 8192, 16384, 12544, 50176)), 16))
        most = max(sum(b.size for b in rows if b.lower <= t < b.upper) for t in range(count))
        pools = Pool("f", most // 4, speed=8), Pool("m", most // 2, speed=2), Pool("s")
        made = assign_banks(Problem(tuple(rows), pools=pools), search=SEARCH)
        assert made.met and made.optimal


def test_more_at_a_time_than_a_sweep_keeps_is_searched_otherwise() -> None:
    rows = tuple(Buffer(f"b{k}", 0, 2, 16 * (40 + k), 16, traffic=997 * k % 1013) for k in range(24))
    pools = Pool("f", 4000, speed=8), Pool("m", 7000, speed=2), Pool("s")
    made = assign_banks(Problem(rows, pools=pools), search=Search(work=2_000, seconds=20.0))
    assert made.met and made.bound <= made.cost
    parts, costs = [[(0, 2, 1)] for _ in range(24)], np.ones((24, 2))
    assert sweep(parts, costs, [20, 20], 0 * costs, math.inf, lambda: False) is None


def test_buffers_of_one_group_lie_together_and_fast_memory_goes_to_traffic():
    rows = (
        Buffer("a", 0, 2, 8, group="g", traffic=10), Buffer("b", 2, 4, 8, group="g", traffic=10),
        Buffer("c", 0, 4, 8, traffic=19),
    )  # fmt: skip
    banked = assign_banks(Problem(rows, pools=(FAST, SLOW)), search=SEARCH)
    assert [name for name, _ in banked.solution.homes] == ["fast", "fast", "slow"]
    assert (banked.cost, banked.optimal) == (20 + 4 * 19, True)
    banked = assign_banks(
        Problem((*rows[:2], replace(rows[2], traffic=21)), pools=(FAST, SLOW)), search=SEARCH
    )
    assert banked.cost == 21 + 4 * 20 and banked.optimal


def test_what_no_bank_holds_is_said():
    banked = assign_banks(Problem((Buffer("a", 0, 1, 20),), pools=(FAST, Pool("slow", 10))), search=SEARCH)
    assert not banked.met and not banked.optimal


@pytest.mark.parametrize(
    ("texts", "fault"),
    [
        (["a b=1"], "is not NAME"), (["a", "a"], "new name"), (["a=1@x"], "no number"), (["a=1@0"], "positive"),
        (["a=1@2", "b"], "or none"), (["a=1 parsec"], "parsec"), (["=1"], "is not NAME"),
    ],
)  # fmt: skip
def test_banks_that_are_none_are_refused(texts, fault):
    with pytest.raises(BadInput, match=fault):
        parse_banks(texts)


def test_banks_are_read():
    assert parse_banks(["s=2KiB@8", "d@1.5"]) == (Pool("s", 2048, speed=8.0), Pool("d", None, speed=1.5))
    assert [pool.speed for pool in parse_banks(["a=1", "b=2", "c"])] == [1.0, 0.5, 0.25]


# --- of plans ---


@pytest.mark.parametrize("graph", [chain(5), fan(4)], ids=["chain", "fan"])
def test_traffic_is_each_read_and_write_of_each_op(graph):
    plan = PlanRequest(graph).solve().plan
    problem = problem_of(graph, plan, (FAST, SLOW))
    want = 0
    for op in graph.ops:
        touched = [{graph.values[v].storage for v in values} for values in (op.inputs, op.outputs)]
        want += sum(graph.storages[s].size for part in touched for s in part if s not in graph.static)
    placed = sum(traffic_of(b) for b in problem.buffers)
    out = {r.storage for r in plan.residences if r.pool == "out"}
    handed = sum(
        graph.storages[s].size
        for op in graph.ops
        for values in (op.inputs, op.outputs)
        for s in {graph.values[v].storage for v in values} & out
    )
    assert placed + handed == want > 0


def test_a_graph_is_planned_into_banks_and_a_header_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_graph(fan(4), tmp_path / "g.json")
    given = ["plan", "g.json", "--bank", "sram=2KiB@8", "--bank", "dram@1"]
    status, rows = as_json(*given, "--arena-header", "net.h", capsys=capsys)
    assert status == 0 and rows["banks_met"] and rows["cost_bound"] <= rows["cost"] * (1 + 1e-9)
    assert [(b["name"], b["speed"]) for b in rows["banks"]] == [("sram", 8.0), ("dram", 1.0)]
    assert rows["banks"][0]["arena"] <= 2048 and sum(b["traffic"] for b in rows["banks"]) > 0
    text = (tmp_path / "net.h").read_text()
    assert re.search(r"#define G_SRAM_SIZE (\d+)u", text) and "G_DRAM_SIZE" in text
    assert {"0", "1"} >= set(re.findall(r"_BANK (\d+)u", text)) != set()
    status, out = run(*given, capsys=capsys)[:2]
    assert status == 0
    assert "no choice costs less" in out or "above the least" in out


def test_a_problem_is_packed_into_banks_and_verified(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.csv").write_text("id,lower,upper,size,traffic\na,0,4,10,5\nb,0,4,10,\nc,4,8,10,7\n")
    banks = ["--bank", "fast=10@4", "--bank", "slow@1"]
    status, rows = as_json("pack", "p.csv", *banks, "-o", "out.csv", capsys=capsys)
    assert (status, rows["cost"], rows["cost_optimal"]) == (0, 20 + 7 + 4 * 5, True)
    status, rows = as_json("verify", "out.csv", "--pool", "fast=10", "--pool", "slow", capsys=capsys)
    assert (status, rows["violations"]) == (0, [])
    status, of_banks = as_json("verify", "out.csv", *banks, capsys=capsys)
    assert status == 0 and of_banks["violations"] == [] and of_banks["arena"] == rows["arena"]
    status, less = as_json("verify", "out.csv", "--bank", "fast=9", "--bank", "slow", capsys=capsys)
    assert status == 1 and less["violations"]
    assert run("verify", "out.csv", *banks, "--pool", "fast", capsys=capsys)[0] == 2
    status, _ = as_json(
        "pack", "p.csv", "--bank", "fast=10", "--bank", "slow=4", "-o", "no.csv", capsys=capsys
    )
    assert status == 1 and not (tmp_path / "no.csv").exists()
    assert run("pack", "p.csv", *banks, "--capacity", "9", capsys=capsys)[0] == 2


def test_a_bank_that_is_too_small_is_said_to_be(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "g.csv").write_text("id,lower,upper,size\na,0,3,100\nb,1,4,200\nc,3,6,300\n")
    given = ["pack", str(tmp_path / "g.csv"), "--bank", "fast=100"]
    assert main([*given, "--bank", "slow=100"]) == 1
    assert "500 B of 100 B, NOT within it, 2 buffers" in capsys.readouterr().out
    assert main([*given, "--bank", "slow"]) == 0
    assert "NOT within" not in capsys.readouterr().out


def test_every_buffer_that_fits_in_none_of_its_banks_is_named(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    """Those that are bound to a bank, and those that are not; not what has room somewhere."""
    rows = "id,lower,upper,size,pool\nw,0,9,40,fast\nc1,1,3,70,\nc2,3,5,60,\nb,0,9,8,fast\n"
    (tmp_path / "p.csv").write_text(rows)
    given = ["pack", str(tmp_path / "p.csv"), "--bank", "fast=32", "--bank", "slow=64"]
    status, found = as_json(*given, capsys=capsys)
    assert status == 1 and not found["met"]
    assert found["too_large"] == [{"id": "w", "bytes": 40}, {"id": "c1", "bytes": 70}]
    status, out = run(*given, capsys=capsys)[:2]
    assert status == 1 and "w alone needs 40 B, c1 alone needs 70 B" in out and "c2" not in out
    status, found = as_json(*given[:2], "--bank", "fast=40", "--bank", "slow=70", capsys=capsys)
    assert found["too_large"] == []


def test_a_plan_says_which_tensors_fit_in_no_bank(tmp_path, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    save_graph(fan(4), tmp_path / "g.json")
    given = ["plan", "g.json", "--bank", "sram=64@8", "--bank", "dram=65@1"]
    status, rows = as_json(*given, capsys=capsys)
    assert status == 1 and not rows["banks_met"] and rows["too_large"]
    assert all(row["bytes"] > 65 for row in rows["too_large"])
    out = run(*given, capsys=capsys)[1]
    assert f"{rows['too_large'][0]['id']} alone needs" in out
