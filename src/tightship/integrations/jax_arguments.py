"""Arguments of a JAX step: which of them and of their leaves are static, and what a program is compiled for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from tightship.errors import BadInput

__all__ = ["Around", "Held", "StaticArguments", "is_array", "is_traced", "joined", "kind_of", "parted"]

PLACE = "tightship.jax.fit"

Held = dict[int, Any]
"""Leaves of a tree that are no arrays, by position."""


def parted(tree: Any, keeps: Callable[[Any], bool]) -> tuple[Any, Held]:
    """``tree`` with None for leaves that are no arrays, and those: equinox's modules have functions among theirs."""
    leaves, form = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    held = {k: x for k, x in enumerate(leaves) if x is not None and not keeps(x)}
    return jax.tree.unflatten(form, [None if k in held else x for k, x in enumerate(leaves)]), held


def joined(tree: Any, held: Held) -> Any:
    if not held:
        return tree
    leaves, form = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    return jax.tree.unflatten(form, [held.get(k, x) for k, x in enumerate(leaves)])


def is_array(leaf: Any) -> bool:
    arrays = (jax.ShapeDtypeStruct, jax.Array, np.ndarray, np.generic)
    return isinstance(leaf, arrays) or hasattr(leaf, "aval") or hasattr(leaf, "__jax_array__")


def is_traced(leaf: Any) -> bool:
    """Whether `jax.jit` takes a leaf as an argument."""
    return isinstance(leaf, (bool, int, float, complex)) or is_array(leaf)


class Around:
    """``step`` on arguments without the leaves that are ``held``: by position or name of the argument. What of its
    results is no array is in ``beside`` once it was traced."""

    def __init__(self, step: Callable[..., Any], held: dict[Any, Held], keeps: Callable[[Any], bool]) -> None:
        functools.update_wrapper(self, step)
        self._step, self.held, self._keeps = step, held, keeps
        self.beside: Held = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self._step(
            *(joined(x, self.held.get(k, {})) for k, x in enumerate(args)),
            **{name: joined(x, self.held.get(name, {})) for name, x in kwargs.items()},
        )
        made, self.beside = parted(out, self._keeps)
        return made


class StaticArguments:
    """Which arguments are static, as `jax.jit` takes them: by number or by name."""

    def __init__(self, step: Callable[..., Any], jit: dict[str, Any]) -> None:
        numbers, names = jit.get("static_argnums"), jit.get("static_argnames")
        self._numbers = {numbers} if isinstance(numbers, int) else set(numbers or ())
        self._names = {names} if isinstance(names, str) else set(names or ())
        if not self._numbers and not self._names:
            return
        if hasattr(step, "trace"):
            raise BadInput(
                "static arguments of a function that is jitted; give the function itself", place=PLACE
            )
        try:
            given = list(inspect.signature(step).parameters.values())
        except (TypeError, ValueError):
            return
        order = [p.name for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._numbers = {k % len(order) if k < 0 and order else k for k in self._numbers}
        self._names |= {order[k] for k in self._numbers if k < len(order)}
        self._numbers |= {k for k, name in enumerate(order) if name in self._names}

    def has(self, key: int | str) -> bool:
        """Whether an argument is static."""
        return key in self._numbers or key in self._names

    def divide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Hashable]:
        """The dynamic arguments, and the static ones with their places."""
        dynamic = (
            tuple(x for k, x in enumerate(args) if k not in self._numbers),
            {name: x for name, x in kwargs.items() if name not in self._names},
        )
        rows = [(k, x) for k, x in enumerate(args) if k in self._numbers]
        static = (*rows, *((n, kwargs[n]) for n in sorted(kwargs) if n in self._names))
        try:
            hash(static)
        except TypeError:
            raise BadInput(
                "a static argument cannot be hashed, which jax.jit asks for", place=PLACE
            ) from None
        return dynamic, static


def kind_of(leaf: Any) -> Hashable:
    """What a program is compiled for: shape, type, and where it lies."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        shape, dtype, weak = leaf.shape, leaf.dtype, bool(getattr(leaf, "weak_type", False))
    elif hasattr(leaf, "aval"):
        shape, dtype, weak = leaf.aval.shape, leaf.aval.dtype, leaf.aval.weak_type
    else:
        shape, dtype, weak = (
            np.shape(leaf),
            jax.dtypes.result_type(leaf),
            isinstance(leaf, (bool, int, float, complex)),
        )
    at = getattr(leaf, "sharding", None)
    return shape, str(dtype), weak, None if isinstance(at, jax.sharding.SingleDeviceSharding) else at
