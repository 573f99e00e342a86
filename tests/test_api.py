"""The public functions: light to import, one object for a plan and its graph."""

import importlib.metadata
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tightship
from support.chains import chain
from tightship import api
from tightship.graph import Graph
from tightship.planners.default import PlanOptions

QUICK = {"work": 200_000, "seconds": 2.0}


def test_importing_is_light_and_the_function_is_not_hidden_by_the_module():
    code = (
        "import sys, tightship, tightship.plan, tightship.planners.default\n"
        "assert callable(tightship.plan) and tightship.Plan.__module__ == 'tightship.plan'\n"
        "import tightship.cli\n"
        "found = {'torch', 'transformers', 'networkx'} & set(sys.modules)\n"
        "assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_everything_exported_is_there():
    assert all(hasattr(tightship, name) for name in tightship.__all__)


REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "api.md"


OPTIONAL = ("lightning",)
"""Packages of extras that the tests do without, by which the modules that need them are named."""


def reference() -> set[str]:
    """Every name that the reference documents, dotted."""
    names = set()
    for page in re.split(r"^::: ", REFERENCE.read_text(encoding="utf-8"), flags=re.M)[1:]:
        name = page.partition("\n")[0]
        members = re.search(r"members: \[(.*?)\]", page)
        names |= {f"{name}.{m.strip()}" for m in members[1].split(",")} if members else {name}
    return names


def test_what_is_public_is_in_the_reference_and_the_reference_exists():
    assert set(tightship.__all__) <= {name.rpartition(".")[2] for name in reference()}
    for name in reference():
        package = next((p for p in OPTIONAL if p in name.split(".")), "")
        if not package or importlib.util.find_spec(package) is not None:
            assert pkgutil.resolve_name(name) is not None


def test_the_version_is_the_projects():
    project = tomllib.loads((REFERENCE.parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert tightship.__version__ == importlib.metadata.version("tightship") == project["version"]


def test_the_keywords_of_the_public_functions_are_those_of_what_they_call():
    from tightship.execute import fit, infer

    for typed, called in ((api.FitOptions, fit.fit), (api.InferOptions, infer.infer)):
        keywords = [p.name for p in inspect.signature(called).parameters.values() if p.kind is p.KEYWORD_ONLY]
        assert typed.__annotations__.keys() == {*keywords, *PlanOptions.__annotations__} - {"progress"}
    for public in (api.fit, api.infer):  # who hears of it is made there
        assert inspect.signature(public).parameters["progress"].default is True


@pytest.mark.parametrize("name", ["fit", "infer", "plan", "frontier", "max_batch"])
def test_options_are_typed(name):
    parameters = inspect.signature(getattr(tightship, name)).parameters.values()
    assert not [p.name for p in parameters if "Any" in str(p.annotation)]
    assert "Unpack[" in str(list(parameters)[-1].annotation)


def test_a_plan_knows_its_graph(tmp_path):
    graph = chain(20)
    made = tightship.plan(graph, budget="60%", **QUICK)
    assert made.met and made.peak <= made.budget == made.plan.budget
    assert made.graph is graph
    assert "within the budget" in str(made)
    assert "largest" in made.explain()
    tightship.check(made)
    tightship.check(made.plan, graph)
    made.save(tmp_path / "plan.json")
    again = tightship.load(tmp_path / "plan.json")
    assert again.plan == made.plan and again.graph.digest == graph.digest
    tightship.check(again)
    assert made.picture(tmp_path / "a.svg") == (tmp_path / "a.svg").read_text(encoding="utf-8")
    with pytest.raises(AttributeError):
        _ = made.nothing_like_this


def test_the_same_plan_each_time():
    graph = chain(20)
    first, second = (tightship.plan(graph, budget="60%", **QUICK) for _ in range(2))
    assert first.steps == second.steps and first.residences == second.residences


def test_a_plan_needs_its_graph_to_be_checked():
    made = tightship.plan(chain(5), **QUICK)
    with pytest.raises(tightship.BadInput, match="the graph is missing"):
        tightship.check(made.plan)
    with pytest.raises(tightship.VerificationFailed, match="another graph"):
        tightship.check(made.plan, chain(6))


def test_bad_arguments_are_named():
    with pytest.raises(tightship.BadInput, match="unknown option 'sped'"):
        tightship.plan(chain(5), sped=3)
    with pytest.raises(tightship.BadInput, match="invalid budget"):
        tightship.plan(chain(5), budget="lots")
    with pytest.raises(tightship.BadInput, match="a graph takes no sample"):
        tightship.plan(chain(5), 3)
    with pytest.raises(tightship.Infeasible):
        tightship.plan(chain(5), budget=70, **QUICK)


def test_a_plan_without_its_graph_or_for_another_is_not_loaded(tmp_path):
    from dataclasses import replace

    from tightship.serde import save_plan

    made = tightship.plan(chain(5), **QUICK)
    save_plan(made.plan, tmp_path / "alone.json")
    with pytest.raises(tightship.BadInput, match="does not carry its graph"):
        tightship.load(tmp_path / "alone.json")
    made.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    other = replace(made.plan, digest="0" * 64)
    assert made.digest in text
    (tmp_path / "other.json").write_text(text.replace(made.digest, other.digest))
    with pytest.raises(tightship.BadInput, match="the plan is for another graph: its digest is"):
        tightship.load(tmp_path / "other.json")


def test_a_model_is_planned_by_measuring_it(tmp_path):
    from support.models import MODELS

    model, loss_fn, batch = MODELS["mlp"]()
    made = tightship.plan(model, batch(0)[0], budget="100%", cache=tmp_path, **QUICK)
    assert made.met and made.time_before > 0 and isinstance(made.graph, Graph)
    whole = tightship.plan(model, batch(0), loss_fn=loss_fn, cache=tmp_path, **QUICK)
    assert whole.graph.digest != made.graph.digest


def test_a_model_on_the_meta_device_is_planned_without_its_weights():
    import torch

    with torch.device("meta"):
        layers = [torch.nn.Linear(1 << 15, 1 << 15) for _ in range(4)]  # 16 GiB
        model, x = torch.nn.Sequential(*layers), torch.empty(64, 1 << 15)
    made = tightship.plan(model, x, **QUICK)
    assert made.static > 16 << 30
    assert made.time_before > 0


def test_without_pytorch_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for call in (
        lambda: tightship.fit(None, None, None, None),
        lambda: tightship.infer(None, None),
        lambda: tightship.plan(None, None),
        lambda: tightship.frontier(None, None),
        lambda: tightship.max_batch(None, None, "1MiB"),
    ):
        with pytest.raises(tightship.Unsupported, match=r"PyTorch is not installed.*tightship\[torch\]"):
            call()
