"""The direction of imports: a file imports only from layers above it, frameworks stay in their places, no module
is private to a package and imported from outside of it, and no modules import one another in a circle.

Imports inside functions count too: they hide a dependency, they do not remove it.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "tightship"
SOURCE = Path(__file__).resolve().parent.parent / "src" / PACKAGE

# In the order data flows; modules of one tuple may import one another.
LAYERS = (
    ("_core",),
    ("errors", "units", "options", "cached", "files", "notebook", "process_local", "garbage"),
    ("machine",),
    ("graph",),
    ("plan",),
    ("serde",),
    ("simulate",),
    ("verify",),
    ("analysis",),
    ("frontends",),
    ("planners", "hlo", "baselines", "diagnose"),
    ("execute",),
    ("report",),
    ("integrations",),
    ("result",),
    ("sources",),
    ("requests",),
    ("__init__", "__main__", "api", "cli", "demo", "jax"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

FRAMEWORKS = {
    "executorch",
    "torch",
    "onnx",
    "onnxruntime",
    "jax",
    "jaxlib",
    "lightning",
    "transformers",
    "networkx",
    "tensorflow",
}
MAY_IMPORT_FRAMEWORKS = {"frontends", "execute", "integrations", "demo"}

# The verifiers share no code with what they check.
VERIFIERS = {"verify"}
VERIFY_MAY_IMPORT = {"_core", "machine", "graph", "plan", "errors", "cached"}


def layer_of(module: str) -> str:
    """The layer of a dotted module name inside the package: "tightship.planners.order.dfs" -> "planners"."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Every (line, dotted name) that a file imports, relative names made absolute."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    typed = {id(n) for n in ast.walk(tree) if _for_types_alone(n) for n in ast.walk(n)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if id(node) not in typed or alias.name.split(".")[0] not in FRAMEWORKS:
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *filter(None, [node.module])])
            if name != PACKAGE:
                yield node.lineno, name
                continue
            for alias in node.names:  # "from tightship import graph" imports the layer, not the package
                yield node.lineno, f"{PACKAGE}.{alias.name}" if alias.name in RANK else PACKAGE
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).rpartition(".")[2]
            target = node.args[0].value
            if called in {"import_module", "__import__"} and isinstance(target, str):
                yield node.lineno, (f"{PACKAGE}{target}" if target.startswith(".") else target)


def _for_types_alone(node: ast.AST) -> bool:
    """``if TYPE_CHECKING:``, under which a framework may be named everywhere: nothing is imported when it runs."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def faults(source: str, module: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of one file, one line each."""
    layer = layer_of(module)
    if layer not in RANK:
        return [f"{module}: {layer!r} is in no layer; add it to LAYERS, where data reaches it"]
    found = []
    for line, name in imported(ast.parse(source), module, is_package):
        root = name.split(".")[0]
        target = layer_of(name)
        at = f"{module}:{line} imports {name}"
        if root in FRAMEWORKS and layer not in MAY_IMPORT_FRAMEWORKS:
            found.append(f"{at}: frameworks are imported only in {sorted(MAY_IMPORT_FRAMEWORKS)}")
        if root == PACKAGE and RANK.get(target, len(LAYERS)) > RANK[layer]:
            found.append(f"{at}: {target} comes after {layer}")
        if layer in VERIFIERS and target != layer and not verify_may_import(root, target):
            found.append(
                f"{at}: verify imports only {sorted(VERIFY_MAY_IMPORT)}, numpy and the standard library"
            )
    return found


def verify_may_import(root: str, target: str) -> bool:
    if root == PACKAGE:
        return target in VERIFY_MAY_IMPORT
    return root == "numpy" or root in sys.stdlib_module_names


def source_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", source_files(), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_a_file_imports_only_what_stands_above_it(path: Path) -> None:
    parts = list(path.relative_to(SOURCE.parent).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    assert faults(path.read_text(encoding="utf-8"), module, is_package) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tightship.graph", "import torch"),
        ("tightship.planners.order.dfs", "def f():\n    import networkx as nx"),
        ("tightship.planners.order.dfs", "import importlib\nimportlib.import_module('torch.fx')"),
        ("tightship.cli", "from torch import nn"),
        ("tightship.graph", "from tightship.plan import Plan"),
        ("tightship.graph", "from tightship import plan"),
        ("tightship.graph", "from . import plan"),
        ("tightship.graph", "from .plan import Plan"),
        ("tightship.plan", "from tightship import fit"),
        ("tightship.simulate", "def f():\n    import tightship.planners.place"),
        ("tightship.planners.place.best_fit", "from ...execute import arena"),
        ("tightship.errors", "from tightship.graph import Graph"),
        ("tightship.plan", "from tightship.serde import read"),
        ("tightship.verify", "from tightship.units import format_bytes"),
        ("tightship.verify", "from tightship.simulate import replay"),
        ("tightship.verify", "import msgspec"),
        ("tightship.integrations.hf", "from tightship.api import fit"),
        ("tightship.stray", ""),
    ],
)
def test_wrong_imports_are_found(module: str, source: str) -> None:
    assert len(faults(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tightship.errors", "def f():\n    from tightship.units import format_bytes"),
        ("tightship.verify", "import math\nimport numpy as np\nfrom tightship import errors, graph, plan"),
        ("tightship.simulate", "from tightship import _core\nfrom tightship.serde import read"),
        ("tightship.planners.order.dfs", "from .._base import Options\nfrom tightship.planners import base"),
        ("tightship.frontends.torch", "import torch\nfrom tightship.graph import Graph"),
        ("tightship.execute.torch", "import torch.fx\nfrom tightship.machine import measure"),
        ("tightship.demo", "import transformers\nimport tightship\nfrom tightship import api, fit"),
        (
            "tightship.cli",
            "from tightship.demo import main\nfrom tightship.integrations import torch_compile",
        ),
    ],
)
def test_right_imports_pass(module: str, source: str) -> None:
    assert faults(source, module) == []


def test_relative_imports_of_a_package_start_at_itself() -> None:
    assert faults("from . import dfs\nfrom .dfs import order", "tightship.planners", is_package=True) == []
    assert faults("from .cli import main", "tightship", is_package=True) == []
    assert len(faults("from ..execute import arena", "tightship.planners", is_package=True)) == 1


# --- privacy and circles ---


def module_of(path: Path) -> tuple[str, bool]:
    parts = list(path.relative_to(SOURCE.parent).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    return ".".join(parts[:-1] if is_package else parts), is_package


def graph_of_imports() -> dict[str, set[str]]:
    """Every module, and the modules of the package that it imports, inside of functions too."""
    modules = {module_of(path)[0]: path for path in source_files()}
    edges: dict[str, set[str]] = {}
    for module, path in modules.items():
        package = module.split(".") if module_of(path)[1] else module.split(".")[:-1]
        edges[module] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                edges[module] |= {alias.name for alias in node.names} & modules.keys()
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                source = ".".join([*base, *filter(None, [node.module])])
                for alias in node.names:
                    name = f"{source}.{alias.name}"
                    if name in modules or (source in modules and alias.name != "_core"):
                        edges[module].add(name if name in modules else source)
        edges[module].discard(module)
    return edges


IMPORTS = graph_of_imports()


def test_a_private_module_is_imported_only_within_its_package() -> None:
    found = [
        (module, target)
        for module, targets in IMPORTS.items()
        for target in targets
        for package, _, name in [target.rpartition(".")]
        if name.startswith("_") and not f"{module}.".startswith(f"{package}.")
    ]
    assert found == []


def test_no_modules_import_one_another_in_a_circle() -> None:
    left = {module: targets - TOLD_APART.get(module, set()) for module, targets in IMPORTS.items()}
    while free := [module for module, targets in left.items() if not targets & left.keys()]:
        for module in free:
            del left[module]
    ring = {m for m in left if any(m in left[other] for other in left)}
    assert not ring, sorted(ring)


TOLD_APART = {"tightship.errors": {"tightship.units"}}
"""Errors say bytes as units does, and units raises errors: the one import inside of a function."""
