"""Plans and measurements that are kept on disk: found again, verified, bounded, moved and switched off."""

import concurrent.futures
import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support import zoo
from support.chains import chain
from support.models import MODELS
from tightship.execute import cache as cache_module
from tightship.execute.cache import Cache, KeptLooks, KeptPlans, Measurement, folder_of, write_kept
from tightship.execute.fit import fit
from tightship.execute.profile import profile
from tightship.frontends.torch.capture import looks
from tightship.frontends.torch.capture.step import capture_step
from tightship.planners import default


def captured():
    model, loss, batch = MODELS["mlp"]()
    return capture_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch(0))


@pytest.fixture
def searches(monkeypatch):
    """The budgets that were searched for."""
    seen = []

    def advised(graph, budget=None, options=None, progress=None, like=(), least=None):
        seen.append(budget)
        return default.plan(graph, budget, options, progress)

    monkeypatch.setattr(cache_module, "advised", advised)
    return seen


def plan_again(graph, folder, budget="97%", **options):
    return KeptPlans(folder, default.Options(work=100_000, **options))(graph, budget)


def test_a_plan_is_searched_once_and_read_afterwards(tmp_path, searches) -> None:
    graph = zoo.measured("mlp")
    first = plan_again(graph, tmp_path)
    assert plan_again(graph, tmp_path) == first and len(searches) == 1
    assert not first.notes
    renamed = replace(graph, ops=tuple(replace(o, source=f"{o.source}0") for o in graph.ops))
    assert plan_again(renamed, tmp_path) == first and len(searches) == 1, "a line of the script has moved"


@pytest.mark.parametrize("what", ["budget", "option", "time", "request", "torch", "code"])
def test_a_plan_for_something_else_is_searched_anew(tmp_path, searches, monkeypatch, what) -> None:
    graph = zoo.measured("mlp")
    plan_again(graph, tmp_path)
    budget, options, ops = "97%", {}, list(graph.ops)
    if what == "budget":
        budget = "99%"
    elif what == "option":
        options = {"seed": 1}
    elif what == "time":
        ops[0] = replace(ops[0], time=ops[0].time + 1e-9)
    elif what == "request":
        ops[0] = replace(ops[0], workspace=ops[0].workspace + 64)
    elif what == "torch":
        monkeypatch.setattr(torch, "__version__", "2.13.99")
    else:
        monkeypatch.setattr(cache_module, "_planner_code", lambda: "another")
    plan_again(graph.with_ops(tuple(ops)), tmp_path, budget, **options)
    assert len(searches) == 2


def spoiled_plan(data: bytes, how: str) -> bytes:
    if how == "cut":
        return data[: len(data) // 2]
    document = json.loads(data)
    if how == "steps":
        for column in document["plan"]["steps"].values():
            column.pop()
    elif how == "offsets":
        document["plan"]["residences"]["offset"] = [0] * len(document["plan"]["residences"]["offset"])
    elif how == "budget":
        document["plan"]["budget"] *= 2
    else:
        document["key"] = "another"
    return json.dumps(document).encode()


@pytest.mark.parametrize("how", ["cut", "steps", "offsets", "budget", "key"])
def test_a_kept_plan_that_is_damaged_is_noted_and_made_again(tmp_path, searches, how) -> None:
    graph = zoo.measured("mlp")
    first = plan_again(graph, tmp_path)
    (path,) = tmp_path.glob("plan-*.json")
    good = path.read_bytes()
    path.write_bytes(spoiled_plan(good, how))
    again = plan_again(graph, tmp_path)
    assert len(searches) == 2 and again.steps == first.steps
    assert len(again.notes) == 1 and "is made again" in again.notes[0] and path.name in again.notes[0]
    assert not plan_again(graph, tmp_path).notes and len(searches) == 2, "the file is whole again"


def test_a_folder_that_cannot_be_written_costs_a_note(tmp_path, searches) -> None:
    (tmp_path / "file").write_text("")
    made = plan_again(zoo.measured("mlp"), tmp_path / "file")
    assert "could not be kept" in made.notes[-1] or "cannot be read" in made.notes[-1]


def test_plans_that_were_not_read_for_longest_go_first(tmp_path, searches, monkeypatch) -> None:
    graph = zoo.measured("mlp")
    plan_again(graph, tmp_path)
    (first,) = tmp_path.glob("plan-*.json")
    os.utime(first, ns=(1, 1))
    monkeypatch.setattr(cache_module, "MOST_PLAN_BYTES", first.stat().st_size * 3 // 2)
    plan_again(graph, tmp_path, "99%")
    (left,) = tmp_path.glob("plan-*.json")
    assert left != first


def test_of_many_measurements_the_oldest_are_forgotten(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cache_module, "MOST_MEASUREMENTS", 3)
    for k in range(5):
        cache = Cache(tmp_path, "m")
        cache.put(str(k), Measurement(1.0))
        cache.save()
    found = Cache(tmp_path, "m")
    assert [k for k in range(5) if found.get(str(k))] == [2, 3, 4]


def keep_plans(folder: str) -> list[str]:
    return [note for _ in range(5) for note in plan_again(chain(6), Path(folder), None).notes]


@pytest.mark.slow
def test_processes_that_keep_a_plan_at_once_find_it_whole(tmp_path) -> None:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        assert list(pool.map(keep_plans, [str(tmp_path)] * 4)) == [[], [], [], []]
    assert len(list(tmp_path.iterdir())) == 1


def test_the_environment_moves_the_cache_and_switches_it_off(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("TIGHTSHIP_CACHE", raising=False)
    assert folder_of("default") == tmp_path / "xdg" / "tightship"
    monkeypatch.setenv("TIGHTSHIP_CACHE", str(tmp_path / "mine"))
    assert folder_of("default") == tmp_path / "mine" and folder_of("other") == Path("other")
    monkeypatch.setenv("TIGHTSHIP_CACHE", "off")
    assert folder_of("default") is None and folder_of(None) is None
    profile(captured(), seconds_per_op=0.0)
    assert list(tmp_path.iterdir()) == []


def test_the_second_fit_reads_measurements_and_plan(tmp_path, searches) -> None:
    def plan():
        model, loss, batch = MODELS["mlp"]()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return fit(model, loss, sgd, batch(0), "90%", cache=tmp_path, work=100_000, seconds_per_op=0.0).plan

    assert plan() == plan() and len(searches) == 1
    assert len(list(tmp_path.glob("profile-*.json"))) == len(list(tmp_path.glob("plan-*.json"))) == 1


# --- what results look like ---


@pytest.fixture
def asked(monkeypatch):
    """Ops whose results a formula or a run on zeros was asked for; no process has captured anything before."""
    seen = []
    correct, made_up = looks.Prober.correct, looks.Prober.made_up

    def corrected(self, fn, args, kwargs, out):
        seen.append(str(fn))
        return correct(self, fn, args, kwargs, out)

    def made(self, fn, args, kwargs):
        seen.append(str(fn))
        return made_up(self, fn, args, kwargs)

    monkeypatch.setattr(looks.Prober, "correct", corrected)
    monkeypatch.setattr(looks.Prober, "made_up", made)
    monkeypatch.setattr(looks.LOOKS, "known", {})
    return seen


def captured_anew(name, folder):
    """What a process of its own would capture that finds this folder."""
    looks.LOOKS.known.clear()
    kept = KeptLooks(folder)
    model, loss, batch = MODELS[name]()
    program = capture_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch(0))
    kept.keep()
    return program, kept


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_what_results_look_like_is_found_out_once(tmp_path, asked, name) -> None:
    first, _ = captured_anew(name, tmp_path)
    once = len(asked)
    second, kept = captured_anew(name, tmp_path)
    assert second.graph.digest == first.graph.digest and not kept.note
    assert len(asked) - once < once / 3, asked[once:]


@pytest.mark.parametrize("how", ["damaged", "of another machine", "nonsense"])
def test_looks_that_cannot_be_read_are_found_out_again(tmp_path, asked, how) -> None:
    first, _ = captured_anew("mlp", tmp_path)
    once = len(asked)
    (file,) = tmp_path.glob("looks-*.json")
    text = json.loads(file.read_text())
    if how == "of another machine":
        text["machine"] = "another"
    if how == "nonsense":
        text["looks"] = {k: ["tuple", [[[1], [], 0, "gone", 7]]] for k in text["looks"]}
    file.write_text(json.dumps(text)[: 40 if how == "damaged" else None])
    second, kept = captured_anew("mlp", tmp_path)
    assert second.graph.digest == first.graph.digest
    assert len(asked) == 2 * once
    assert bool(kept.note) == (how == "damaged")


def test_numbers_that_are_equal_and_of_other_types_are_other_calls() -> None:
    prober = looks.Prober(None)
    add = torch.ops.aten.add.Tensor
    names = {prober._name((add, kind, x)) for kind, x in ((int, 1), (float, 1.0), (bool, True))}
    assert len(names) == 3 and "" not in names
    assert prober._name((add, object, object())) == "" == prober._name((add, torch.device("cuda")))


def test_fit_keeps_and_reads_them(tmp_path, asked) -> None:
    def step():
        torch.manual_seed(0)
        model, loss, batch = MODELS["mlp"]()
        made = fit(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch(0), cache=tmp_path)
        return made(batch(0))

    first = step()
    once = len(asked)
    looks.LOOKS.known.clear()
    assert torch.equal(step(), first) and len(asked) - once < once / 3
    assert len(list(tmp_path.glob("looks-*.json"))) == 1


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path, caplog):
    (tmp_path / "taken").write_text("a file")
    for name in ("plan-1.json", "plan-2.json"):
        write_kept(tmp_path / "taken" / name, b"{}")
    assert [r.getMessage() for r in caplog.records if "could not be kept" in r.getMessage()] == [
        caplog.records[0].getMessage()
    ]
