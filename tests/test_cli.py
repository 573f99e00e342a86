"""The command line: the JSON contract, exit statuses, and that no bad input ends in a traceback."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.chains import chain
from support.commands import as_json, run
from support.strategies import random_graph
from tightship import cli, sources
from tightship.cli import verbs
from tightship.options import help_of
from tightship.planners import planners
from tightship.report.progress import Line
from tightship.serde import save_graph

QUICK = ["--work", "200000", "--seconds", "2"]
TOY = """
import os
import torch

print("imported")

def net(width=64):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width) if k % 2 else torch.nn.GELU() for k in range(9)]
    return torch.nn.Sequential(*layers)

def two():
    print("made")
    os.write(1, b"from below\\n")
    return net(), torch.randn(256, 64)

def three():
    return net(), torch.nn.CrossEntropyLoss(), (torch.randn(256, 64), torch.zeros(256, dtype=torch.long))

def four():
    model, loss, sample = three()
    return model, loss, torch.optim.AdamW(model.parameters()), sample

def named():
    return dict(zip(("model", "loss_fn", "optimizer", "sample"), four()))

def forward():
    return {"model": net(), "sample": torch.randn(256, 64), "train": False}

def exported():
    return {**forward(), "model": torch.export.export(net().eval(), (torch.randn(256, 64),))}

def trained():
    return {**forward(), "train": "no"}

def raises():
    raise KeyError("nothing here")

def leaves():
    raise SystemExit(7)

def misfit():
    return net(), torch.randn(3, 5)

def no_module():
    return "a model", torch.randn(3)

def one():
    return net()

def other_keys():
    return {"model": net(), "batch": 3}

value = 3
"""


@pytest.fixture
def there(tmp_path, monkeypatch):
    """A folder with a graph.json and a module toy.py, which is the current one."""
    save_graph(chain(20), tmp_path / "graph.json")
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "broken.py").write_text("x = (\n")
    (tmp_path / "needs.py").write_text("import no_such_thing_at_all\n")
    for name in (
        "model.ort",
        "weights.safetensors",
        "weights.gguf",
        "step.mlir",
        "step.hlo.pb",
        "model.mlmodel",
        "text",
    ):
        (tmp_path / name).write_bytes(b"\x18\0\0\0what others read")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("toy", "broken", "needs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    sys.modules.pop("toy", None)


# --- plan ---


def test_plan_prints_the_keys_that_programs_read(there, capsys):
    status, rows = as_json("plan", "graph.json", "--budget", "60%", *QUICK, capsys=capsys)
    assert status == 0
    assert rows["met"] is True
    assert rows["lower_bound"] <= rows["peak_after"] <= rows["budget"] < rows["peak_before"]
    assert rows["static"] + rows["arena"] + rows["handed"] <= rows["budget"]
    assert rows["recomputed"] > 0 == rows["offloaded"] == rows["compressed"]
    assert rows["time_after"] > rows["time_before"] > 0
    assert isinstance(rows["planner"], str) and rows["seconds"] > 0 and rows["moved"] >= 0


def test_what_may_leave_memory_how_is_said_and_counted(there, capsys):
    args = ("plan", "graph.json", "--budget", "60%", *QUICK, "--allow", "offload", "--host", "1000000")
    status, rows = as_json(*args, "-o", "out.json", capsys=capsys)
    assert status == 0 and rows["met"] and rows["recomputed"] == 0 < rows["offloaded"]
    assert 0 < rows["host"] <= rows["host_budget"] == 1000000 and not rows["lossy"] and rows["codecs"] == {}
    assert as_json("verify", "out.json", capsys=capsys)[1]["violations"] == []
    status, rows = as_json("plan", "graph.json", "--allow", "zip", capsys=capsys)
    assert status == 2 and "zip" in rows["error"]["message"]


def test_plan_for_people_fits_a_narrow_terminal(there, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    status, out, _ = run("plan", "graph.json", "-b", "60%", *QUICK, capsys=capsys)
    assert status == 0
    assert "within the budget" in out and "recomputed" in out
    assert "\x1b" not in out


def test_a_plan_is_written_verified_explained_and_planned_again(there, capsys):
    assert run("plan", "graph.json", "-b", "60%", "-o", "p.json", *QUICK, capsys=capsys)[0] == 0
    saved = json.loads((there / "p.json").read_text())
    assert saved["command"].startswith("tightship plan graph.json -b 60% -o p.json")
    assert saved["source"] == "graph.json"
    assert as_json("verify", "p.json", capsys=capsys)[1]["violations"] == []
    assert run("verify", "p.json", "--source", "graph.json", capsys=capsys)[0] == 0
    status, rows = as_json("explain", "p.json", capsys=capsys)
    assert status == 0
    assert rows["planned"]["bytes"] == saved["peak"] == rows["plan"]["peak_after"]
    assert rows["before"]["bytes"] == saved["peak_before"]
    assert as_json("plan", "p.json", "-b", "80%", *QUICK, capsys=capsys)[1]["met"]


def test_a_picture_is_drawn(there, capsys):
    assert run("plan", "graph.json", "--picture", "a.svg", *QUICK, capsys=capsys)[0] == 0
    assert (there / "a.svg").read_text().startswith("<svg")


def test_without_a_budget_everything_is_kept(there, capsys):
    status, rows = as_json("plan", "graph.json", *QUICK, capsys=capsys)
    assert (status, rows["budget"], rows["recomputed"], rows["met"]) == (0, None, 0, True)


def test_the_planners_options_are_the_command_lines(there, capsys):
    args = ["plan", "graph.json", "-b", "60%", "--evict", "blocks", "--order", "given", "--seed", "3"]
    status, rows = as_json(*args, capsys=capsys)
    assert status == 0 and rows["planner"].startswith("given+blocks")


def test_the_same_arguments_give_the_same_plan(there, capsys):
    for name in ("a", "b"):
        run("plan", "graph.json", "-b", "50%", "-o", f"{name}.json", *QUICK, capsys=capsys)
    first, second = (json.loads((there / f"{n}.json").read_text()) for n in "ab")
    assert first["steps"] == second["steps"] and first["residences"] == second["residences"]


def test_an_infeasible_budget_says_how_far_it_is(there, capsys):
    status, rows = as_json("plan", "graph.json", "-b", "100B", "-o", "p.json", *QUICK, capsys=capsys)
    assert status == 1
    assert rows["met"] is False and rows["error"]["type"] == "Infeasible"
    assert rows["budget"] == 100 < rows["lower_bound"] <= rows["best_peak"]
    assert rows["top"][0].keys() == {"name", "bytes", "place"}
    assert not (there / "p.json").exists()
    status, out, err = run("plan", "graph.json", "-b", "100B", *QUICK, capsys=capsys)
    assert (status, out) == (1, "") and "no plan can meet the budget" in err


# --- explain, verify, planners ---


def test_explain_says_who_makes_up_the_peak(there, capsys):
    status, out, _ = run("explain", "graph.json", "--budget", "60%", *QUICK, capsys=capsys)
    assert status == 0
    assert "Peak before planning" in out and "Peak of the plan" in out and "activation" in out
    assert max(map(len, out.splitlines())) <= 100


def test_explain_explains_also_what_cannot_be_met(there, capsys):
    status, rows = as_json("explain", "graph.json", "--budget", "100B", *QUICK, capsys=capsys)
    assert status == 1 and rows["error"]["type"] == "Infeasible"
    assert sum(r["bytes"] for r in rows["before"]["by_kind"]) == rows["before"]["bytes"]


def test_verify_says_what_is_wrong_and_where(there, capsys):
    run("plan", "graph.json", "-b", "60%", "-o", "p.json", *QUICK, capsys=capsys)
    saved = json.loads((there / "p.json").read_text())
    saved["peak"] += 64
    (there / "wrong.json").write_text(json.dumps(saved))
    status, rows = as_json("verify", "wrong.json", capsys=capsys)
    assert status == 1
    assert [v["code"] for v in rows["violations"]] == ["peak-mismatch"]
    assert rows["violations"][0].keys() == {"code", "step", "subjects", "message"}
    assert "peak-mismatch" in run("verify", "wrong.json", capsys=capsys)[1]


def test_a_plan_for_another_graph_is_found_out(there, capsys):
    run("plan", "graph.json", "-o", "p.json", *QUICK, capsys=capsys)
    save_graph(chain(7), there / "other.json")
    status, rows = as_json("verify", "p.json", "--source", "other.json", capsys=capsys)
    assert status == 1 and "another graph" in rows["violations"][0]["message"]
    saved = json.loads((there / "p.json").read_text())
    saved["digest"] = "0" * 64
    (there / "wrong.json").write_text(json.dumps(saved))
    assert as_json("verify", "wrong.json", capsys=capsys)[0] == 1
    status, rows = as_json("explain", "wrong.json", capsys=capsys)
    assert status == 2 and "digest" in rows["error"]["message"]


def test_planners_are_listed(capsys):
    status, rows = as_json("planners", capsys=capsys)
    assert status == 0
    names = {r["name"] for r in rows["planners"]}
    assert {"default", "anneal", "portfolio"} <= names
    assert all(r["summary"] and isinstance(r["options"], list) for r in rows["planners"])
    status, out, _ = run("planners", capsys=capsys)
    assert all(name in out for name in names)


@pytest.mark.parametrize("name", planners())
def test_every_option_of_a_planner_has_help(name):
    fields = dataclasses.fields(planners()[name].options)
    assert [f.name for f in fields if not help_of(f)] == []


def test_help_is_a_whole_sentence_with_the_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = run("plan", "--help", capsys=capsys)[1]
    assert "--allow MEANS,…" in text and "seed of random moves (default: 0)" in text
    assert "; (default" not in text


# --- module:factory ---


@pytest.mark.parametrize("name", ["two", "three", "four", "named"])
def test_every_form_of_factory(there, capsys, name):
    status, rows = as_json("plan", f"toy:{name}", "-b", "100%", *QUICK, capsys=capsys)
    assert status == 0 and rows["met"] and rows["ops"] > 9


@pytest.mark.parametrize("name", ["forward", "exported"])
def test_a_factory_may_ask_for_the_forward_pass_alone(there, capsys, name):
    status, rows = as_json("plan", f"toy:{name}", *QUICK, capsys=capsys)
    assert status == 0 and rows["ops"] < 20 and rows["recomputed"] == 0
    held, side = 256 * 64 * 4, 64 * 64 * 4 + 64 * 4
    assert rows["static"] == held + 4 * side and rows["peak_after"] == rows["static"] + 2 * held
    if name == "forward":
        budget = str(4 * side + 3 * 100 * 64 * 4)  # weights, and a hundred rows coming, being made and made
        status, rows = as_json("plan", f"toy:{name}", "--max-batch", "-b", budget, *QUICK, capsys=capsys)
        assert status == 0 and rows["batch"] == 100


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("toy:trained", "it must be True or False"),
        ("toy:raises", "the factory raised KeyError: 'nothing here', at toy.py:"),
        ("toy:leaves", "the factory raised SystemExit: 7"),
        ("toy:misfit", "running the model on its sample raised RuntimeError"),
        ("toy:no_module", "give a torch.nn.Module"),
        ("toy:one", "the factory returned a Sequential: factory() returns (model, sample)"),
        ("toy:other_keys", "the factory's mapping has unknown keys 'batch'"),
        ("toy:value", "'value' is no function but of type int"),
        ("toy:nobody", "'toy' has no attribute 'nobody'"),
        ("toy.inner:two", "no module 'toy.inner' in "),
        ("broken:x", "importing 'broken' raised SyntaxError"),
        ("needs:x", "raised ModuleNotFoundError: No module named 'no_such_thing_at_all', at needs.py:1"),
        ("nowhere_at_all:x", "no module 'nowhere_at_all' in "),
        ("toy:", "unknown source 'toy:': a source is module:factory"),
        ("toy", "a source is module:factory"),
        ("", "a source is module:factory"),
        ("missing.json", "cannot read 'missing.json': No such file or directory"),
        ("toy.py", "name a factory in it, such as toy:step"),
        ("model.pt2", "cannot open a file that may hold code: load it in a factory()"),
        (".", "not a regular file"),
        ("model.ort", "give the model.onnx that it was made of"),
        ("weights.safetensors", "load them in a factory() and name that"),
        ("weights.gguf", "weights without a model"),
        ("step.mlir", "MLIR, such as StableHLO, is not read"),
        ("step.hlo.pb", "an HLO module is read as text"),
        ("model.mlmodel", "unknown kind of file: a source is module:factory"),
        ("text", "unknown kind of file: a source is module:factory"),
    ],
)
def test_a_bad_source_is_said_to_be_one(there, capsys, source, said):
    status, _, err = run("plan", source, "--budget", "50%", capsys=capsys)
    assert (status, said in err) == (2, True), err
    assert "Traceback" not in err
    status, rows = as_json("plan", source, "--budget", "50%", capsys=capsys)
    assert status == 2 and said in rows["error"]["message"]


def test_a_kind_of_file_is_one_row(there, capsys, monkeypatch):
    graph = random_graph(3, 10)
    rows = {
        ".toy": sources._FileKind(lambda path, shape=None: SimpleNamespace(graph=graph), ("shape",), "a .toy")
    }
    monkeypatch.setattr(sources, "_ENDINGS", sources._ENDINGS | rows)
    status, rows = as_json("plan", "x.toy", "--shape", "a=1", *QUICK, capsys=capsys)
    assert status == 0 and rows["ops"] == len(graph.ops)
    assert "--fetch requires a graph.pb" in run("plan", "x.toy", "--fetch", "a", capsys=capsys)[2]
    assert sources.read_model("x.toy", "a=1").graph is graph


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-b", "6XB"], "unknown unit 'XB'"),
        (["-b", "-5"], "invalid budget"),
        (["-b=-5MB"], "invalid budget"),
        (["-b", "0%"], "it must be above 0%"),
        (["-b", ""], "invalid budget"),
        (["--seconds", "-1"], "--seconds must not be negative, got -1.0"),
        (["--seconds", "nan"], "--seconds must not be negative"),
        (["--seed", "x"], "invalid int value"),
        (["--evict", "nobody"], "nobody"),
        (["--order", "portfolio"], "portfolio"),
        (["-o", "no/such/folder/p.json"], "directory 'no/such/folder' does not exist"),
        (["-o", "."], "'.' is a directory, not a file"),
        (["-o", "x" * 300], "cannot write 'xxx"),
        (["--picture", "x" * 300], "File name too long"),
        (["--seed", str(2**63)], "at most 2^63-1"),
        (["--frobnicate"], "unrecognized arguments"),
    ],
)
def test_bad_arguments_are_said_to_be_bad(there, capsys, args, said):
    before = set(os.listdir(there))
    status, out, err = run("plan", "graph.json", "-b", "60%", *args, capsys=capsys)
    assert (status, out) == (2, ""), err
    assert said in err and "Traceback" not in err
    status, rows = as_json("plan", "graph.json", "-b", "60%", *args, capsys=capsys)
    assert status == 2 and said in rows["error"]["message"]
    assert set(os.listdir(there)) == before


@pytest.mark.parametrize("args", [[], ["frob"], ["plan"], ["explain", "a", "b"], ["verify"]])
def test_bad_usage(capsys, args):
    status, out, err = run(*args, capsys=capsys)
    assert (status, out) == (2, "") and "usage:" not in err and "--help" in err
    assert len(err.splitlines()) == 1
    assert as_json(*args, capsys=capsys)[1]["error"]["type"] == "Usage"


@pytest.mark.parametrize(
    "content", ["", "{", '{"format": "tightship-plan", "version": 1, "dig', "[]", "7", "\x00"]
)
def test_what_is_no_plan_is_said_to_be_none(there, capsys, content):
    (there / "p.json").write_text(content)
    for verb in ("verify", "explain", "plan"):
        status, rows = as_json(verb, "p.json", capsys=capsys)
        assert status == 2 and "p.json" in rows["error"]["message"]


def test_a_graph_is_not_verified(there, capsys):
    status, rows = as_json("verify", "graph.json", capsys=capsys)
    assert status == 2 and "cannot verify a graph" in rows["error"]["message"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_output_is_said_before_the_work(there, capsys):
    (there / "locked").mkdir(mode=0o500)
    status, _, err = run("plan", "graph.json", "-o", "locked/p.json", capsys=capsys)
    assert status == 2 and "Permission denied" in err


def test_help_and_version(capsys):
    assert run("--help", capsys=capsys)[0] == 0
    assert run("plan", "--help", capsys=capsys)[0] == 0
    status, out, _ = run("--version", capsys=capsys)
    assert status == 0 and out.startswith("tightship ")


# --- as a program ---


def program(*args, cwd, **kwargs):
    command = [sys.executable, "-m", "tightship", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, **kwargs)


def test_nothing_but_one_object_on_standard_output(there):
    done = program("plan", "toy:two", "-b", "100%", "--json", *QUICK, cwd=there)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["met"] is True
    assert all(word in done.stderr for word in ("imported", "made", "from below"))


def test_an_interrupt_prints_and_writes_the_best_plan_so_far(there, capsys, monkeypatch):
    save_graph(chain(60), there / "large.json")
    heard = []

    def planning(_line, peak, _extra, met):
        if met and not heard:
            heard.append(peak)
            signal.raise_signal(signal.SIGINT)
        return False

    monkeypatch.setattr(Line, "planning", planning)
    args = ["plan", "large.json", "-b", "50%", "-o", "p.json", "--seconds", "300", "--work", str(10**12)]
    status, rows = as_json(*args, capsys=capsys)
    assert status == 130
    assert (rows["interrupted"], rows["met"]) == (True, True)
    assert len(heard) == 1
    assert cli.main(["verify", str(there / "p.json")]) == 0


def test_a_reader_that_leaves_early_is_no_error_of_ours(there):
    command = [sys.executable, "-m", "tightship", "planners"]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=there)
    job.stdout.close()
    err = job.stderr.read()
    job.stderr.close()
    job.wait()
    assert b"Traceback" not in err, err


# --- named systems ---


def test_a_named_system_plans_with_its_own_options(there, capsys):
    status, rows = as_json("plan", "graph.json", "--planner", "memonger", "--any-order", capsys=capsys)
    assert status == 0 and rows["planner"] == "memonger" and rows["arena"] > 0
    assert (
        run("plan", "graph.json", "--planner=aitemplate", "--streams", "2", "-o", "p.json", capsys=capsys)[0]
        == 0
    )
    assert run("verify", "p.json", capsys=capsys)[0] == 0
    status, rows = as_json("plan", "graph.json", "--planner", "aitemplate", "-b", "50%", capsys=capsys)
    assert status == 1 and rows["met"] is False  # it does not evict, and says so


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--planner", "nobody"], "unknown planner 'nobody': those that plan alone are aitemplate"),
        (["--planner"], "--planner"),
        (["--planner", "memonger", "--seconds", "3"], "--seconds"),
        (["--any-order"], "--any-order"),
        (["--planner", "memonger", "--share", "nobody"], "unknown storage 'nobody'"),
        (["--planner", "aitemplate", "--streams", "0"], "at least one op runs at a time"),
    ],
)
def test_a_named_system_that_there_is_not_is_refused(there, capsys, options, said):
    status, out, err = run("plan", "graph.json", *options, capsys=capsys)
    assert (status, out) == (2, "") and said in err


# --- planners of other packages ---

LAST_FIRST = '''"""Frees nothing, keeps everything: a planner of another package."""

from dataclasses import dataclass

from tightship.options import option
from tightship.planners.evict import keep


@dataclass(frozen=True)
class Options:
    times: int = option(1, "how often it decides the same")


def plan(problem, budget, options=None, progress=None):
    return keep.plan(problem, budget)
'''


def installed(folder, monkeypatch, source: str) -> None:
    """A package in ``folder`` whose metadata names a planner, found as an installed one is."""
    (folder / "house_planner.py").write_text(source)
    about = folder / "house_planner-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: house-planner\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[tightship.planners]\nevict/house = house_planner\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "house_planner", raising=False)


def test_another_package_adds_a_planner(there, capsys, monkeypatch):
    installed(there, monkeypatch, LAST_FIRST)
    row = next(r for r in as_json("planners", capsys=capsys)[1]["planners"] if r["name"] == "house")
    assert (row["group"], row["options"][0]["help"]) == ("evict", "how often it decides the same")
    status, rows = as_json("plan", "graph.json", "--planner", "house", "--times", "2", capsys=capsys)
    assert (status, rows["planner"], rows["meta"]) == (0, "house", {"house": {"times": 2}})
    status, rows = as_json("plan", "graph.json", "--evict", "house", *QUICK, capsys=capsys)
    assert status == 0 and rows["planner"].startswith("best+house")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_thing_at_all", "cannot load planner 'evict/house' from 'house_planner'"),
        ("x = 1", "planner 'evict/house' (house_planner) has no function plan"),
    ],
)
def test_another_packages_planner_that_cannot_be_loaded_is_reported(there, capsys, monkeypatch, source, said):
    installed(there, monkeypatch, source)
    status, _, err = run("planners", capsys=capsys)
    assert status == 2 and said in err and "Traceback" not in err


# --- what starts with it ---


@pytest.mark.parametrize(("given", "without"), [
    (["--version"], ("numpy", "rich", "msgspec", "tightship.api")),
    (["--help"], ("numpy", "rich", "msgspec", "tightship.api", "importlib.metadata")),
    (["verify", "missing.json"], ("torch", "onnx", "jax", "tightship.hlo.remat.search", "importlib.metadata")),
    (["planners"], ("torch", "onnx", "jax", "tightship.report.text", "tightship.report.numbers")),
])  # fmt: skip
def test_a_command_imports_what_it_needs(given, without):
    code = (
        "import sys; from tightship import cli; cli.main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, check=True)
    assert not {*without} & {*done.stderr.split()}


def test_the_reference_evaluator_is_imported_where_something_is_worked_out(there):
    onnx = pytest.importorskip("onnx")
    x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [2, 3]) for n in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)]), "m.onnx")
    code = (
        "import sys; from tightship import cli; cli.main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    )
    given = ["plan", "m.onnx"]
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, check=True)
    assert not {"onnx.reference", "torch"} & {*done.stderr.split()}


@pytest.mark.parametrize(("given", "most"), [
    (["--version"], 8), (["--help"], 8), (["verify", "plan.json"], 32), (["pack", "problem.csv"], 40),
    (["verify", "packed.csv"], 40), (["plan", "graph.json", "--budget", "80%"], 91),
])  # fmt: skip
def test_a_short_command_imports_few_modules(there, given, most):
    """What a command costs is mostly what it imports, and modules can be counted on a busy machine."""
    save_graph(chain(4), "graph.json")
    Path("problem.csv").write_text("id,lower,upper,size\na,0,2,8\nb,1,3,8\n")
    assert cli.main(["pack", "problem.csv", "-o", "packed.csv"]) == 0
    assert cli.main(["plan", "graph.json", "--budget", "80%", "-o", "plan.json", *QUICK]) == 0
    code = (
        "import sys; from tightship import cli; assert cli.main(sys.argv[1:]) == 0; "
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, check=True)
    there_are = done.stderr.split()
    ours = [name for name in there_are if name.split(".")[0] == "tightship"]
    assert len(ours) <= most, sorted(ours)
    assert "numpy.ma" not in there_are  # numpy.unique and numpy.median bring it
    if given[0] != "plan":  # which draws a chart
        assert "rich.console" not in there_are and "tightship.planners.default" not in there_are


def test_the_function_plan_stays_when_the_module_of_its_name_is_imported():
    same = "plan is tightship.plan is tightship.api.plan"
    code = f"import tightship.plan, tightship; from tightship import plan; print({same})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


# --- what nobody foresaw ---


@pytest.mark.parametrize(("raised", "said"), [
    (KeyError("a"), "internal error: KeyError: 'a'"), (RecursionError(), "internal error: RecursionError."),
    (MemoryError(), "out of memory (MemoryError)"),
])  # fmt: skip
def test_an_error_of_our_own_is_a_sentence_with_a_status_of_its_own(there, capsys, monkeypatch, raised, said):
    def fails(*_args, **_options):
        raise raised

    monkeypatch.setattr(verbs, "verify", fails)
    assert cli.main(["verify", "p.json"]) == 3
    err = capsys.readouterr().err
    assert said in " ".join(err.split())
    assert "Traceback" not in err
    assert cli.main(["verify", "p.json", "--debug"]) == 3
    assert "in fails" in capsys.readouterr().err
    status, rows = as_json("verify", "p.json", capsys=capsys)
    assert (status, rows["error"]["type"]) == (3, "InternalError")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "words", [["planners"], ["planners", "--json"], ["--help"], ["--version"], ["plan", "--help"]]
)
def test_a_full_disk_under_standard_output_is_a_sentence(there, words):
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "tightship", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, cwd=there, check=False)
    assert done.returncode == 2
    assert (
        done.stderr.decode().strip() == "tightship: cannot write 'standard output': No space left on device"
    )
