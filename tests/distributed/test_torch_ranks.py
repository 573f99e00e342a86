"""Models that torch itself has made parallel: the bits of its own eager steps, each rank within its budget."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.ranks import Rows, as_planned, asked, run

TOGETHER = (
    "fully_sharded", "fully_sharded_tied", "fully_sharded_later", "fully_sharded_clipped", "in_ddp", "accumulated",
    "checkpoints", "after_infeasible", "refused", "compiled", "fully_sharded_groups", "in_hand", "resumed",
    "fully_sharded_other_shapes", "ddp_in_hand", "penalties", "hooked", "around_ddp", "around_fully_sharded",
    "not_given", "averaged",
)  # fmt: skip


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Rows:
    return run(*asked(request, *TOGETHER), worker="torch_worker.py")


def same(row: dict[str, Any]) -> None:
    for what, eager in row["eager"].items():
        assert row["fit"][what] == eager, what


@pytest.mark.parametrize(
    "how",
    [
        "fully_sharded", "fully_sharded_tied", "fully_sharded_later", "fully_sharded_groups",
        "fully_sharded_clipped", "fully_sharded_other_shapes", "in_ddp", "around_ddp", "around_fully_sharded",
    ],
)  # fmt: skip
def test_steps_leave_what_torchs_own_leave_and_measure_what_was_planned(rows: Rows, how: str) -> None:
    for row in rows[how]:
        same(row)
        as_planned(row["fit"]["measure"])
    again = [row["fit"]["recomputed"] > 0 for row in rows[how]]
    assert all(again) or (any(again) and how == "fully_sharded_other_shapes")  # a short batch may do without


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("hand", "calls the DistributedDataParallel of its model, which fit was not given"),
        ("beside", "the parameter 'more.weight' beside it"),
        ("two", "and 2 of them"),
        ("metric", "whose gradients depend on no collective"),
    ],
)
def test_gradients_that_a_ddp_would_average_and_a_step_would_not_are_refused(
    rows: Rows, how: str, words: str
) -> None:
    for row in rows["not_given"]:
        assert row[how]["type"] == "Unsupported"
        assert words in row[how]["text"]


def test_code_that_has_the_ddp_in_hand_trains_and_evaluates_as_in_eager(rows: Rows) -> None:
    for row in rows["ddp_in_hand"]:
        same(row)


def test_weights_are_averaged_in_a_copy_that_is_made_after_fit(rows: Rows) -> None:
    for row in rows["averaged"]:
        assert row["fit"] == row["eager"]


@pytest.mark.slow
def test_a_loss_over_the_models_parameters_is_of_whole_ones(rows: Rows) -> None:
    for row in rows["penalties"]:
        same(row["fully_shard"])
        for what in ("losses", "model"):
            assert row["shard"]["fit"][what] == row["shard"]["eager"][what]


def test_hooks_on_parameters_in_parts_are_refused_where_eager_calls_them(rows: Rows) -> None:
    for row in rows["hooked"]:
        assert row.pop("fully_shard False")["type"] == ""  # fully_shard calls none of these
        for how, error in row.items():
            assert error["type"] == "Unsupported", how
            assert "a hook on the parameter '0.weight'" in error["text"]


def test_state_dicts_of_a_model_and_its_optimizer_have_dtensors_under_the_models_names(rows: Rows) -> None:
    kinds = rows["fully_sharded"][0]["fit"]["kinds"]
    assert kinds["0.weight"] == kinds["13.bias"] == "DTensor"
    assert kinds["12.running_mean"] == "Tensor"


def test_accumulation_scaler_and_norm_over_all_ranks_are_torchs(rows: Rows) -> None:
    for row in rows["accumulated"]:
        same(row)
        assert min(row["fit"]["scales"]) < 8.0  # gradients that were not finite on one rank: all have skipped
    assert len({row["fit"]["norms"] for row in rows["accumulated"]}) == 1


def test_gradients_of_a_backward_pass_by_itself_are_averages_and_norms_are_of_all_ranks(rows: Rows) -> None:
    assert len({row["norm"] for row in rows["in_hand"]}) == 1
    for row in rows["in_hand"]:
        same(row)
        assert row["kinds"] == ["Tensor"]


def test_a_step_that_has_not_run_yet_resumes_with_its_optimizers_state(rows: Rows) -> None:
    for row in rows["resumed"]:
        for shard in ("True", "False"):
            ahead, losses = row[shard]
            assert losses == ahead
            assert row[f"fresh {shard} 0"] == 0
            assert row[f"fresh {shard} 1"] > 0


def test_torchs_checkpoints_go_from_eager_to_planned_steps_and_back(rows: Rows) -> None:
    for row in rows["checkpoints"]:
        first, *others = row.values()
        assert len(others) == 2
        assert all(other == first for other in others)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_checkpoints_are_loaded_by_other_numbers_of_ranks(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHECKPOINTS", str(tmp_path))
    saved = run("saved_for_others", worker="torch_worker.py")["saved_for_others"][0]
    loaded = run("loaded_by_others", ranks=ranks, ends=(0,) * ranks, worker="torch_worker.py")
    first = loaded["loaded_by_others"][0]
    assert [*first] == ["shard", "fully_shard"]
    for how, (digest, loss) in first.items():
        assert digest == saved[how] != ""
        assert loss == loss


def test_what_torch_has_divided_among_one_rank_trains_as_in_eager() -> None:
    (row,) = run("of_one_rank", ranks=1, ends=(0,), worker="torch_worker.py")["of_one_rank"]
    for one in row.values():
        as_planned(one["fit"].pop("measure"))
        assert one["fit"] == one["eager"]
        assert "DTensor" in one["fit"]["kinds"].values()
        assert one["again"][0] > one["again"][1]  # which has taken one step more
        assert one["error"]["type"] == "TypeError"


def test_a_model_is_taken_again_after_a_budget_that_nothing_meets(rows: Rows) -> None:
    for row, other in zip(rows["after_infeasible"], rows["fully_sharded"], strict=True):
        assert row["no"]["type"] == "Infeasible"
        assert row["losses"] == other["eager"]["losses"][:3]
        assert row["evaluates"]


def test_the_backend_counts_buckets_and_says_only_what_it_leaves_out(rows: Rows) -> None:
    for row in rows["compiled"]:
        assert row["inside"]["digest"] == row["around"]["digest"] == row["eager"]["digest"]
        assert row["inside"]["said"] == row["around"]["said"] == []
        for what in ("planned", "measured"):
            more = row["inside"][what] - row["alone"][what]
            assert more == sum(-(-n // 64) * 64 for n in row["inside"]["buckets"])
        assert row["layers"]["error"]["type"] == ""  # its own hooks count, with the optimizer


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("columns", "Shard(dim=1)"),
        ("alone", "a mesh of 1 of 2 ranks"),
        ("partly", "'2.weight', which fully_shard has left out"),
        ("recurrent", "recurrent module '0'"),
        ("comm_hook", "the communication hook powerSGD_hook and sparse gradients"),
        ("static", "the communication hook powerSGD_hook and static_graph after its first step"),
        ("custom", "set_custom_reduce_scatter"),
        ("unused", "set_reduce_scatter_unused_params"),
        ("replicate", "or parallel=tightship.DataParallel()"),
        ("scripted", "the TorchScript module '0' with sharded parameters"),
        ("parallel", "leave parallel out"),
        ("taken", "call the step that fit has returned"),
        ("sparse", "the sparse gradient of 'weight', which several ranks average"),
        ("sparse, plain", "the sparse gradient of 'weight', which several ranks average"),
    ],
)
def test_what_is_not_taken_over_is_refused_with_what_to_do(rows: Rows, how: str, words: str) -> None:
    for row in rows["refused"]:
        assert row[how]["type"] in ("Unsupported", "Unplannable", "BadInput")
        assert words in row[how]["text"]


@pytest.mark.slow
def test_policies_of_mixed_precision_cast_as_torch_does() -> None:
    for row in run("mixed_precision", worker="torch_worker.py")["mixed_precision"]:
        for policy in row.values():
            same(policy)
            as_planned(policy["fit"]["measure"])


FACTORIES = """
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def plain():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        sample = torch.zeros(32, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, lambda m, x: m(x).pow(2).mean(), optimizer, sample


def sharded():
    model, loss, _, sample = plain()
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, loss, torch.optim.AdamW(model.parameters()), sample


def columns():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, loss, _, sample = plain()
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, loss, torch.optim.AdamW(model.parameters()), sample


def experts():
    model, loss, _, sample = plain()
    with torch.device("meta"):
        model[1] = torch.nn.Bilinear(256, 256, 4, bias=False)  # a row for each expert
    model.forward = lambda x: model[1](h := model[0](x), h) @ model[2].weight[:4]
    return model, loss, torch.optim.AdamW(model.parameters()), sample


def matrices():
    model, loss, _, sample = plain()
    model[0].bias = model[2].bias = None
    return model, loss, torch.optim.Muon(model.parameters()), sample


def replicated():
    model = plain()[0].to_empty(device="cpu")
    return DistributedDataParallel(model), plain()[1], torch.optim.SGD(model.parameters()), torch.zeros(32, 64)
"""


def imagined(folder: Path, source: str, *given: str, verb: str = "plan") -> Any:
    (folder / "factories.py").write_text(FACTORIES)
    command = [
        sys.executable,
        "-m",
        "tightship",
        verb,
        source if "." in source else f"factories:{source}",
        *given,
        "--json",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 2), done.stderr
    return json.loads(done.stdout) if not done.returncode else done.stderr


def test_one_machine_plans_for_a_rank_of_many(tmp_path: Path) -> None:
    alone = imagined(tmp_path, "plain")
    rows = {ranks: imagined(tmp_path, "plain", "--ranks", ranks, "--rank", "1") for ranks in ("2", "64")}
    batch = 32 * 64 * 4
    kept = alone["static"] - batch
    for ranks, row in rows.items():
        assert row["static"] - batch < kept / int(ranks) * 1.2  # small tensors are filled up
    assert imagined(tmp_path, "sharded", "--ranks", "64")["peak_after"] == rows["64"]["peak_after"]
    whole = 3 * 64 * 4  # of the second bias, and of its moments
    assert (
        imagined(tmp_path, "columns", "--ranks", "64")["static"] - batch < (kept - whole) / 64 * 1.2 + whole
    )


def test_parameters_that_stay_whole_on_each_rank_are_said(tmp_path: Path) -> None:
    """Those of fewer rows than there are ranks where they take something; those whose optimizer needs all of them."""
    notes = imagined(tmp_path, "experts", "--ranks", "8")["notes"]
    assert "fewer rows than there are ranks (8): 1.weight (4)" in " ".join(notes)
    assert "fewer rows" not in " ".join(imagined(tmp_path, "experts", "--ranks", "4")["notes"])
    row = imagined(tmp_path, "matrices", "--ranks", "8")
    assert "parameters of Muon stay whole on each rank" in " ".join(row["notes"])
    assert row["static"] > 2 * 64 * 256 * 4 * 2  # both matrices, with a momentum each


@pytest.mark.slow
def test_frontier_and_explain_of_a_rank_and_what_makes_no_sense(tmp_path: Path) -> None:
    assert imagined(tmp_path, "replicated", "--ranks", "4", verb="explain")
    assert imagined(tmp_path, "plain", "--ranks", "4", "--points", "2", verb="frontier")
    assert "--rank requires --ranks" in imagined(tmp_path, "plain", "--rank", "1")
    assert "no such rank" in imagined(tmp_path, "plain", "--ranks", "2", "--rank", "2")
    assert "requires module:factory" in imagined(tmp_path, "factories.json", "--ranks", "2")


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("split", "splitting ops on several ranks"),
        pytest.param("stream", "streaming where", marks=pytest.mark.slow),
    ],
)
def test_no_way_is_advised_that_ranks_refuse(tmp_path: Path, way: str, words: str) -> None:
    (tmp_path / "factories.py").write_text(FACTORIES.replace("32, 64)", "2048, 64)"))
    said = {}
    for ranks in ([], ["--ranks", "4"]):
        command = [
            sys.executable,
            "-m",
            "tightship",
            "plan",
            "factories:plain",
            "--budget",
            "static+5%",
            *ranks,
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 1
        said[bool(ranks)] = done.stderr
    assert "splitting (allow" in said[False]
    assert "splitting (allow" not in said[True]
    assert "streaming (allow" not in said[True]
    assert words in imagined(
        tmp_path, "plain", "--ranks", "4", "--budget", "60%", "--allow", f"recompute,{way}"
    )
