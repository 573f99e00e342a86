"""The written types of the C++ core, and what the core has."""

import ast
import inspect
from pathlib import Path

import tightship
from tightship import _core

STUB = ast.parse((Path(tightship.__file__).parent / "_core.pyi").read_text())


def written(body: list[ast.stmt]) -> dict[str, list[str]]:
    """Functions with the names of their parameters, without self."""
    functions = [f for f in body if isinstance(f, ast.FunctionDef) and f.name != "__init__"]
    every = {f.name: [a.arg for a in (*f.args.posonlyargs, *f.args.args)] for f in functions}
    return {name: [a for a in arguments if a != "self"] for name, arguments in every.items()}


def bound(owner: object) -> dict[str, list[str]]:
    """The same of the module or a class, as nanobind says it in the first line of its documentation."""
    found = {}
    for name, member in vars(owner).items():
        if name.startswith("__") or inspect.isclass(member):
            continue
        line = (member.__doc__ or "").partition("\n")[0]
        found[name] = parameters(line) if line.startswith(f"{name}(") else []
    return found


def parameters(signature: str) -> list[str]:
    names, depth, word = [], 0, ""
    for c in signature.partition("(")[2]:
        if depth == 0 and c in ",)":
            names.append(word.partition(":")[0].partition("=")[0].strip())
            word = ""
            if c == ")":
                break
            continue
        depth += (c in "([") - (c in ")]")
        word += c
    return [n for n in names if n and n not in ("self", "/")]


def test_functions_are_those_of_the_core() -> None:
    assert written(STUB.body) == bound(_core)


def test_classes_are_those_of_the_core() -> None:
    classes = {c.name: written(c.body) for c in STUB.body if isinstance(c, ast.ClassDef)}
    assert classes == {name: bound(c) for name, c in vars(_core).items() if inspect.isclass(c)}
