"""A rank that ends between graphs of torch.compile, where torch's collectives wait: the others raise in seconds."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import ranks as started_ranks
from support.ranks import started

run = functools.partial(started_ranks.run, worker="ended_worker.py", forked=False)
"""Each rank is a process of its own from its beginning to its end, which is what is looked at."""
SECONDS = 15.0
"""Within which the others raise, on a machine that other tests share: the process has to end before."""
WORDS = {
    "raises": (1, "rank 1: ValueError: injected"),
    "interrupted": (-2, "rank 1: KeyboardInterrupt"),
    "exits": (3, "rank 1: has ended, or does not answer any more"),
    "killed": (-9, "rank 1: has ended, or does not answer any more"),
}
"""How the process ends, and what the others say of it."""
ALL = [
    (way, place, fault)
    for way in ("ddp", "fully_shard")
    for place in ("break", "loss", "loader", "update")
    for fault in WORDS
]
QUICK = {("ddp", "loss", "killed"), ("fully_shard", "loader", "interrupted")}


def ends(
    way: str, place: str, fault: str, rank: int = 1, visit: int = 3, ranks: int = 2, seconds: float = SECONDS
) -> None:
    status, words = WORDS[fault]
    name = f"{way} {place} {fault} {rank} {visit}"
    statuses = tuple(status if r == rank else 0 for r in range(ranks))
    rows = run(name, ranks=ranks, ends=statuses)[name]
    (ended,) = [row["ended"] for row in rows if "ended" in row]
    left = [row for row in rows if "ended" not in row]
    assert len(left) == ranks - 1
    texts = {row["error"]["text"] for row in left}
    assert len(texts) == 1
    for row in left:
        assert row["error"]["type"] == "PeerFailed"
        assert row["later"]["type"] in (
            "PeerFailed",
            "RuntimeError",
        )  # where fully_shard has half of a step behind it
        assert words.replace("rank 1", f"rank {rank}") in row["error"]["text"]
        assert row["error"]["at"] - ended < seconds + row["error"]["without_processor"]


@pytest.mark.parametrize(
    ("way", "place", "fault"),
    [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in ALL],
)
def test_a_rank_that_ends_between_graphs_ends_the_others(way: str, place: str, fault: str) -> None:
    """In code at a graph break, in the loss, before the next batch, before the update."""
    ends(way, place, fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", list(WORDS))
def test_a_rank_that_ends_while_others_compile_ends_them(fault: str) -> None:
    """As long as compiling takes them, a rank that has not begun to may come."""
    ends("ddp", "loader", fault, visit=1, seconds=60.0)
    ends("ddp", "break", fault, visit=1, seconds=60.0)


@pytest.mark.parametrize("fault", ["raises", pytest.param("killed", marks=pytest.mark.slow)])
def test_the_rank_that_has_the_store_may_be_the_one_that_ends(fault: str) -> None:
    ends("ddp", "loss", fault, rank=0)


@pytest.mark.parametrize(("fault", "rank", "fits"), [("raises", 1, 0), ("exits", 0, 1)])
def test_a_rank_that_ends_before_it_calls_fit_ends_those_that_wait_there_for_it(
    fault: str, rank: int, fits: int
) -> None:
    words = {
        "raises": "ValueError: injected",
        "exits": "has ended, and called fit less often than the others",
    }
    name = f"before_fit {fault} {rank} {fits}"
    statuses = tuple(WORDS[fault][0] if r == rank else 0 for r in range(2))
    rows = run(name, ends=statuses, most=100)[name]
    (ended,) = [row["ended"] for row in rows if "ended" in row]
    (left,) = [row["error"] for row in rows if "error" in row]
    assert left["type"] == "PeerFailed"
    assert f"rank {rank}: {words[fault]}" in left["text"]
    assert left["at"] - ended < 5 + left["without_processor"]


def test_ranks_in_fit_say_who_had_the_store_when_it_is_gone() -> None:
    name = "before_fit killed 0 0"
    rows = run(name, ends=(-9, 0), most=100)[name]
    (left,) = [row["error"] for row in rows if "error" in row]
    assert left["type"] == "PeerFailed"
    assert "rank 0: has ended, or does not answer any more" in left["text"]


def test_a_rank_that_fails_without_a_store_says_its_error_and_ends() -> None:
    processes, read = started("after_the_store", worker="ended_worker.py")
    try:
        assert [p.wait(100) for p in processes] == [0, 1]  # it tried to reach the store for minutes
    finally:
        for p in processes:
            p.kill()
    _, words = read()
    assert "ValueError: injected" in words[1]


@pytest.mark.slow
def test_processes_of_multiprocessing_say_their_errors_too(tmp_path: Path) -> None:
    name = f"child {tmp_path}"
    (*_, row) = run(name, ranks=1, ends=(0,))[name]
    assert row["statuses"] == [0, 1]
    assert row["error"]["type"] == "PeerFailed"
    assert "rank 1: ValueError: injected" in row["error"]["text"]


@pytest.mark.parametrize(("size", "watched"), [("1", False), ("2", True)])
def test_only_where_there_may_be_other_ranks_are_errors_watched_that_nobody_catches(
    size: str, watched: bool
) -> None:
    code = (
        "import sys; hook = sys.excepthook; import tightship.integrations.torch_compile; "
        "print(sys.excepthook is not hook)"
    )
    env = os.environ | {"WORLD_SIZE": size}
    done = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True, check=True)
    assert done.stdout.split() == [str(watched)]


@pytest.mark.slow
@pytest.mark.parametrize("fault", list(WORDS))
def test_all_ranks_that_are_left_raise_the_same(fault: str) -> None:
    ends("ddp", "loss", fault, ranks=3)


@pytest.mark.parametrize(
    "way",
    ["parallelize_module", *[pytest.param(w, marks=pytest.mark.slow) for w in ("ddp", "fully_shard")]],
)
def test_a_rank_whose_code_dynamo_cannot_trace_ends_the_step_on_all(way: str) -> None:
    """And, where the caller has caught that, no step after it."""
    name = f"{way} untraceable caught"
    first, second = run(name)[name]
    assert first["error"]["type"] == "PeerFailed"
    assert "rank 1: Unsupported: Call to `torch._dynamo.graph_break()`" in first["error"]["text"]
    assert second["error"]["type"] == "Unsupported"
    assert first["error"]["at"] - second["error"]["at"] < SECONDS + first["error"]["without_processor"]
    assert [row["later"]["type"] for row in (first, second)] == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fully_shard", "parallelize_module"])
def test_a_rank_that_ends_because_dynamo_cannot_trace_its_code_ends_the_others(way: str) -> None:
    name = f"{way} untraceable raises"
    first, second = run(name, ends=(0, 1))[name]
    assert first["error"]["type"] == "PeerFailed"
    assert "rank 1: Unsupported: Call to `torch._dynamo.graph_break()`" in first["error"]["text"]
    assert first["error"]["at"] - second["ended"] < SECONDS + first["error"]["without_processor"]


@pytest.mark.parametrize(
    ("way", "where", "ranks"),
    [
        ("ddp", "caught", 2),
        *[
            pytest.param(*c, marks=pytest.mark.slow)
            for c in (
                ("ddp", "fewer", 3),
                ("fully_shard", "caught", 3),
                ("fully_shard", "fewer", 2),
                ("parallelize_module", "caught", 2),
            )
        ],
    ],
)
def test_a_rank_that_waits_in_a_barrier_of_its_own_while_others_go_on_ends_all(
    way: str, where: str, ranks: int
) -> None:
    """Nobody fails, and gloo would wait for the group's timeout."""
    name = f"{way} waits {where}"
    rows = run(name, ranks=ranks, ends=(0,) * ranks)[name]
    (text,) = {row["error"]["text"] for row in rows}
    assert "rank 1: waits in torch.distributed.barrier (ended_worker.py:" in text
    assert "rank 0 is elsewhere (" in text
    for row in rows:
        assert row["error"]["type"] == row["later"]["type"] == "PeerFailed"
        assert row["error"]["at"] - row["since"] < SECONDS + row["error"]["without_processor"]


def test_ranks_that_come_late_to_a_collective_are_waited_for() -> None:
    name = "ddp patient"
    first, second = run(name)[name]
    assert first["error"]["type"] == second["error"]["type"] == ""
    assert first["sum"] == second["sum"] == 6.0
