"""Training loops as people write them, on several ranks: the bits of eager's, each rank within its budget."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.ranks import Rows, as_planned, asked, run, seconds_to_error

OF_STEPS = (
    "losses_that_send", "by_nobody", "written_in_steps", "other_branches", "put_and_found", "compressed",
    "added_up_apart", "kept_states",
)  # fmt: skip
TOGETHER = (
    "trained_by_a_callback", "fewer_batches", "grouped_by_one", "logged", "adversaries",
    "held_elsewhere", "written_between_steps", "trained_apart",
)  # fmt: skip


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Rows:
    return run(*asked(request, *TOGETHER), worker="loop_worker.py")


@pytest.fixture(scope="module")
def steps(request: pytest.FixtureRequest) -> Rows:
    """Of what the code of steps does."""
    return run(*asked(request, *OF_STEPS), worker="loop_worker.py")


def test_losses_send_as_their_code_says_it(steps: Rows) -> None:
    for row in steps["losses_that_send"]:
        refused = row.pop("send")
        assert "torch.distributed.send inside of a step is not supported" in refused["text"]
        log = row.pop("log")
        assert log[:3] == log[3:6]
        assert log[6:9] == log[9:]
        assert len(row) == 9
        for name, one in row.items():
            for what, eager in one["eager"].items():
                assert one["fit"][what] == eager, (name, what)
            as_planned(one["fit"]["measure"])
            assert one["fit"]["captures"][1:] == [0, 0], name


def test_ranks_that_drift_apart_are_told_once(steps: Rows) -> None:
    """As in eager, where each rank then trains a model of its own without a word."""
    for row in steps["by_nobody"]:
        assert all(not one["error"] for one in row.values())
        (said,) = row["alike"]["said"]
        assert said.startswith("loop_worker.py ranks had the same parameters before the first update")
        assert "parallel=tightship.DataParallel()" in said
        assert not any(row[how]["said"] for how in ("parts", "by hand", "independent", "averaged"))


def test_gradients_are_averaged_in_the_type_that_torchs_hooks_send(steps: Rows) -> None:
    for row in steps["compressed"]:
        for how in ("plain", "half", "built in"):
            for what, eager in row[how]["eager"].items():
                assert row[how]["fit"][what] == eager, (how, what)
            as_planned(row[how]["fit"]["measure"])
        for how in ("shard=False", "shard=True"):
            as_planned(row[how].pop("measure"))
            assert row[how] == row["eager"]
        assert row["eager"]["losses"] != row["whole"]  # or nothing was sent in another type


def test_no_sync_leaves_each_rank_its_own_gradients(steps: Rows) -> None:
    for row in steps["added_up_apart"]:
        assert row["fit"] == row["eager"]


def test_callbacks_of_trainers_plan_the_graphs_of_fully_shard(rows: Rows) -> None:
    for row in rows["trained_by_a_callback"]:
        assert row["fit"] == row["eager"]
        assert row["graphs"] > 0
        assert not row["warned"]  # what its hooks hold counts
        assert "are planned by themselves" in row["notes"][0]
        assert row["strict"]["type"] == "Unsupported"


def test_a_rank_that_waits_elsewhere_ends_the_steps_of_the_others_within_seconds(rows: Rows) -> None:
    stepping, waiting = rows["fewer_batches"]
    assert waiting["error"]["type"] == ""  # when the other has come
    text = stepping["error"]["text"]
    assert "rank 1: waits in torch.distributed.barrier (loop_worker.py:" in text
    assert "to which rank 0, in a step, does not come" in text
    assert seconds_to_error(stepping["error"]) < 5
    assert stepping["again"] == waiting["again"] == text
    for row in (stepping, waiting):
        assert row["unchanged"]
        assert row["digest"] == stepping["digest"]
        for where in ("joined", "in join"):
            assert "Join around a DistributedDataParallel" in row[where]["text"]
            assert "take as many steps on all ranks" in row[where]["text"]
    grouping, stepping = rows["grouped_by_one"]
    assert grouping["type"] == ""
    assert "rank 0: waits in torch.distributed.new_group (worker.py:" in stepping["text"]
    assert "all ranks make the same groups" in stepping["text"]
    assert seconds_to_error(stepping) < 5


def test_a_rank_that_evaluates_parts_alone_ends_with_the_others_within_seconds() -> None:
    rows = run("evaluated_by_one", worker="loop_worker.py")["evaluated_by_one"]
    assert seconds_to_error(*(row["error"] for row in rows)) < 5
    for row in rows:
        assert row["error"]["type"] == "PeerFailed"
        assert (
            "rank 0: waits in a gather of parameters outside of a step (loop_worker.py:"
            in row["error"]["text"]
        )
        assert row["again"]["text"] == row["error"]["text"]
        assert "start the ranks again" in row["fit"]["text"]


def test_a_rank_that_fits_alone_is_told_of_the_others_within_seconds() -> None:
    fitting, stepping = run("fitted_by_one", worker="loop_worker.py")["fitted_by_one"]
    assert "others have ended a step while this rank waited elsewhere" in fitting["step"]["text"]
    assert "rank 0: waits in tightship.fit (loop_worker.py:" in stepping["step"]["text"]
    assert "rank 1 waits in torch.distributed.barrier (worker.py:" in fitting["barrier"]["text"]
    assert seconds_to_error(*(row[how] for row in (fitting, stepping) for how in ("step", "barrier"))) < 5
    for row in (fitting, stepping):
        assert row["both"]["type"] == row["again"]["type"] == ""


def test_a_rank_whose_step_has_failed_ends_while_the_others_wait_for_it() -> None:
    (row,) = run("left_alone", worker="loop_worker.py", most=100)["left_alone"]
    assert row["type"] == "RuntimeError"


@pytest.mark.parametrize(("scenario", "rank"), [("raised_by_the_first", 0), ("raised_by_the_second", 1)])
def test_an_error_between_steps_is_told_to_the_others_before_its_process_ends(
    scenario: str, rank: int
) -> None:
    (row,) = run(scenario, worker="loop_worker.py", ends=tuple(int(r == rank) for r in range(2)))[scenario]
    assert row["type"] == "PeerFailed"
    assert f"rank {rank}: ValueError: the loader has no more" in row["text"]
    assert seconds_to_error(row) < 5


SPAWNED = """
import os, sys, tempfile
import torch, torch.distributed as dist, torch.multiprocessing as mp
import tightship

def train(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    m, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    o = torch.optim.SGD(m.parameters(), 0.1)
    step = tightship.fit(m, lambda m, b: m(b).pow(2).mean(), o, x, "100%", parallel=tightship.DataParallel())
    for k in range(3):
        if k == 2 and rank == 1:
            raise ValueError("the loader has no more")
        step(x)

if __name__ == "__main__":
    mp.spawn(train, (sys.argv[1],), nprocs=2)
"""


def test_the_error_that_ends_a_spawned_rank_is_what_its_parent_raises(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNED)
    command = [sys.executable, "-W", "ignore", str(tmp_path / "train.py"), str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert ended.returncode == 1
    assert "ValueError: the loader has no more" in ended.stderr
    assert "does not answer any more" not in ended.stderr


@pytest.mark.slow
def test_a_parameter_that_one_rank_alone_has_frozen_is_not_half_trained(rows: Rows) -> None:
    for name, one in rows["trained_apart"][0].items():
        other = rows["trained_apart"][1][name]
        for mine, theirs in zip(one, other, strict=True):
            assert mine["type"] == theirs["type"] == "PeerFailed", name
            assert mine["text"] == theirs["text"]
            assert mine["unchanged"] and theirs["unchanged"]
            assert seconds_to_error(mine, theirs) < 5
            assert mine["then"] == theirs["then"]
        assert len({row["then"] for row in one}) == 2
    text = rows["trained_apart"][0]["placed, split=False"][0]["text"]
    assert "rank 0: trains 20 parameters, among them '2.weight'" in text


def test_norms_for_a_log_are_those_of_all_ranks_and_parts_are_said(rows: Rows) -> None:
    for row in rows["logged"]:
        for how in ("sharded", "placed"):
            assert row[how]["fit"] == row[how]["eager"]
            quiet, _, text = row[how]["said"]  # once
            assert quiet == 0
            assert text.startswith("loop_worker.py parameters() gives this rank's parts")


def test_two_models_in_distributed_data_parallel_call_one_another(rows: Rows) -> None:
    for row in rows["adversaries"]:
        assert row["fit"] == row["eager"]


def test_a_part_that_code_has_from_elsewhere_is_not_taken_for_the_parameter(rows: Rows) -> None:
    for row in rows["held_elsewhere"]:
        assert "the parameter 'scale' in the code of a step, read otherwise" in row["list"]["text"]
        assert row["attribute"]["type"] == ""


def test_other_branches_behind_parameters_that_were_read_are_planned_anew(steps: Rows) -> None:
    for row in steps["other_branches"]:
        for how in ("DDP", "fully_shard", "columns"):
            assert {k: row[how]["fit"][k] for k in row[how]["eager"]} == row[how]["eager"], how
            as_planned(row[how]["fit"]["measure"])
        assert row["shard"] == row["DDP"]["eager"]["losses"]


def test_what_code_puts_into_the_place_of_parts_is_read_as_it_is(steps: Rows) -> None:
    for row in steps["put_and_found"]:
        assert row["shard=True"] == row["shard=False"]
        assert "a DTensor in the place of a parameter" in row["fully_shard"]["text"]
        assert {k: row["behind"]["fit"][k] for k in row["behind"]["eager"]} == row["behind"]["eager"]


def test_what_a_step_would_write_to_copies_of_parameters_is_refused(steps: Rows) -> None:
    for row in steps["written_in_steps"]:
        for how in ("in place", "view", "data", "listed", "op"):
            shard, fully = row[how]
            assert "which writes to a parameter of which each rank has a part" in shard["text"], how
            # what torch's own gathers have is lost in eager, too, and read by nobody else
            assert fully["type"] == ("" if how in ("op", "view") else "Unsupported"), how
        for how in ("in place, whole", "op, whole", "moves, DistributedDataParallel", "moves, fully_shard"):
            assert {k: row[how]["fit"][k] for k in row[how]["eager"]} == row[how]["eager"]


def test_what_code_writes_to_a_modules_parameters_between_steps_is_written(rows: Rows) -> None:
    for row in rows["written_between_steps"]:
        assert row["shard"] == row["eager"]
        assert row["fully_shard"] == row["eager of it"]


def test_what_ranks_keep_of_states_that_steps_replace_is_eagers(steps: Rows) -> None:
    for row in steps["kept_states"]:
        assert row["fit"] == row["eager"]
