"""Argument trees of calls, compiled to getters that fetch a call's arguments from the environment at once.

The environment is one flat list: a place for every value of the graph, then one for every constant argument.
With the constants in it, nearly every argument tuple is one ``itemgetter`` call, and no template ever holds a
tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from tightship.frontends.torch.program import Call, Ref, refs_in

__all__ = ["Environment", "Getter", "constants_of", "keywords", "positional"]

Getter = Callable[[list[Any]], Any]


def _has_refs(tree: Any) -> bool:
    return next(refs_in(tree), None) is not None


class Environment:
    """The layout of the environment and what it holds before a run: constants, and None for every value."""

    def __init__(self, values: int) -> None:
        self.initial: list[Any] = [None] * values

    def constant(self, value: Any) -> int:
        self.initial.append(value)
        return len(self.initial) - 1


def constants_of(call: Call) -> list[Any]:
    """What the getters of the call's arguments put into the environment, in order."""
    environment = Environment(0)
    positional(call, environment)
    keywords(call.kwargs, environment)
    return environment.initial


def _flat(tree: Any, environment: Environment) -> int | None:
    """The place of an argument in the environment; None if it has to be put together."""
    if isinstance(tree, Ref):
        return tree.value
    return None if _has_refs(tree) else environment.constant(tree)


def _tree(tree: Any, environment: Environment) -> Getter:
    place = _flat(tree, environment)
    if place is not None:
        return itemgetter(place)
    if isinstance(tree, dict):
        return keywords(tree, environment) or (lambda env: {})
    parts = [_flat(x, environment) for x in tree]
    if len(parts) > 1 and None not in parts:
        get = itemgetter(*parts)  # type: ignore[arg-type]
        return get if isinstance(tree, tuple) else lambda env: list(get(env))
    getters = [_tree(x, environment) for x in tree]
    if isinstance(tree, tuple):
        return lambda env: tuple([get(env) for get in getters])
    return lambda env: [get(env) for get in getters]


def positional(call: Call, environment: Environment) -> Getter:
    """Fetches the tuple of the call's positional arguments."""
    if not call.args:
        return lambda env: ()
    if len(call.args) == 1:
        get = _tree(call.args[0], environment)
        return lambda env: (get(env),)
    # A tuple subclass would be rebuilt as itself by nobody; calls take plain tuples.
    return _tree(tuple(call.args), environment)


def keywords(tree: dict[str, Any], environment: Environment) -> Getter | None:
    """Fetches the dict of keyword arguments; None if there are none."""
    if not tree:
        return None
    if not _has_refs(tree):
        return itemgetter(environment.constant(dict(tree)))
    names = tuple(tree)
    getters = [_tree(x, environment) for x in tree.values()]
    return lambda env: {name: get(env) for name, get in zip(names, getters, strict=True)}
