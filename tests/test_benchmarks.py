"""Every benchmark starts: its imports are there, and what it takes of modules beside it and of the tests, too."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
PARTS = {"activations", "compat", "executed", "page", "pages"}
"""Modules that others import; the tables ``compat_*`` are, too."""

_HELP = """
import contextlib, io, runpy, sys
sys.path[:0] = [sys.argv[1]]
for path in sys.argv[2:]:
    sys.argv = [path, "--help"]
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            assert not end.code, (path, end.code)
        except ModuleNotFoundError as missing:
            assert missing.name in ("equinox", "flax", "optax"), (path, missing)
"""


def scripts() -> list[Path]:
    return sorted(p for p in FOLDER.glob("*.py") if p.stem not in PARTS and not p.stem.startswith("compat_"))


@pytest.mark.slow
def test_every_benchmark_says_how_to_call_it():
    pytest.importorskip("transformers")
    command = [sys.executable, "-W", "ignore", "-c", _HELP, str(FOLDER), *map(str, scripts())]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda p: p.stem)
def test_what_benchmarks_take_of_modules_beside_them_exists(path):
    """Without running anything: `pages.put` must be a name of benchmarks/pages.py, `support.x` a module of tests."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    beside: dict[str, set[str]] = {}  # modules by the name they are used by here
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in (a.name for a in node.names if (FOLDER / f"{a.name}.py").exists()):
                beside[name] = _names(FOLDER / f"{name}.py")
        elif isinstance(node, ast.ImportFrom) and node.module == "support":
            for name in (a.name for a in node.names):
                beside[name] = _names(FOLDER.parent / "tests" / "support" / f"{name}.py")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tightship":
            for name in (a.name for a in node.names):
                found = _ours(str(node.module), name)
                assert found is not None, f"{path.name}:{node.lineno}: no {name} in {node.module}"
                if isinstance(found, ModuleType):
                    beside[name] = set(dir(found))
        elif isinstance(node, ast.ImportFrom) and node.module:
            source = _source(node.module)
            if source is not None:
                assert {a.name for a in node.names} <= _names(source), f"{path.name}:{node.lineno}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in beside:
            assert node.attr in beside[node.value.id], (
                f"{path.name}:{node.lineno}: {node.value.id}.{node.attr}"
            )


def _ours(module: str, name: str) -> object:
    """A name of a module of tightship's, which may be a module itself; None: there is none."""
    found = getattr(importlib.import_module(module), name, None)
    if found is None and importlib.util.find_spec(f"{module}.{name}") is not None:
        return importlib.import_module(f"{module}.{name}")
    return found


def _source(module: str) -> Path | None:
    """The file of a module beside the benchmarks or in the tests; None for packages that are installed."""
    for folder in (FOLDER, FOLDER.parent / "tests"):
        path = folder / f"{module.replace('.', '/')}.py"
        if path.exists():
            return path
    assert not module.startswith("support."), f"no module {module} in tests"
    return None


def _names(path: Path) -> set[str]:
    """What a module defines or imports at its top."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {a.asname or a.name.partition(".")[0] for a in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_what_is_timed_while_a_step_is_prepared_is_called_there():
    pytest.importorskip("transformers")
    code = (
        f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import prepare\n"
        "missing = [(o.__name__, n) for _, o, n in prepare.PARTS if not hasattr(o, n)]\n"
        "assert not missing, missing"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]


def test_compiled_goes_on_after_the_rows_of_a_file_that_was_cut_off(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("compiled")
    path = tmp_path / "rows.jsonl"
    labels = [module.REFERENCE, *(label for label, _ in module.ways(0, ["80%"]))]
    for label in labels[:-2]:
        module.write(path, {"model": "unet", "way": label})
    path.write_text(path.read_text() + '{"model": "un')
    run: list[str] = []

    def prepared(name: str, label: str, make: object) -> object:
        run.append(label)
        way = module.Way.__new__(module.Way)
        way.name, way.note, way.peak, way.budget, way.least = label, "", 100, None, None
        return way

    monkeypatch.setattr(module, "prepared", prepared)
    monkeypatch.setattr(
        module,
        "row_of",
        lambda name, way, base, timing, peer: {"model": name, "way": way.name, "new": True},
    )
    rows = module.rows_of("unet", ["80%"], None, module.read(path), lambda row: module.write(path, row))
    assert [r["way"] for r in rows] == labels
    assert run == [module.REFERENCE, *labels[-2:]]  # what others are timed beside runs again
    assert [r["way"] for r in module.read(path)] == labels
    assert module.rows_of("unet", ["80%"], None, module.read(path), lambda row: None) == module.read(path)
    assert run[3:] == []


def test_compiled_is_timed_beside_each_peer_whose_peak_is_the_budget(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("compiled")
    made = {
        module.REFERENCE: (100, 1.0),
        "eager": (150, 0.8),
        "Inductor 0.5": (60, 1.1),
        "Inductor 0.1": (90, 1.2),
    }
    ran: list[str] = []

    def prepared(name: str, label: str, make: object) -> object:
        ran.append(label)
        way = module.Way.__new__(module.Way)
        peak, step = made.get(label, (1000, 5.0))
        way.name, way.peak, way.step = label, peak, lambda clock: step
        way.note, way.budget, way.least, way.planned, way.first = "", None, None, peak, 1.0
        return way

    monkeypatch.setattr(module, "prepared", prepared)
    rows: list[dict] = []
    timing = module.Timing(3, lambda: 0.0)
    found = module.rows_of("unet", [module.PEERS], timing, [], rows.append)
    ours = [(r["peer"], r["peer_ratio"]) for r in found if r["peer"]]
    assert ours == [
        ("eager", 6.25),
        (module.REFERENCE, 5.0),
        ("Inductor 0.5", 4.545),
    ]  # the others are beaten
    ran.clear()
    again = module.rows_of("unet", [module.PEERS], timing, rows[:-1], lambda row: None)
    assert again == found
    assert ran == [
        module.REFERENCE,
        "Inductor 0.5",
        "tightship compiled, as Inductor 0.5",
    ]  # what was cut off
