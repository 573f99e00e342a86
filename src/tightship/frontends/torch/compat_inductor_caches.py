"""Inductor's and AOTAutograd's caches, with what is kept of compiled passes beside them.

A part of ``compat``, under the same rule as `compat_inductor`: private interfaces of one version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from tightship.errors import TightshipError
from tightship.frontends.torch.compat_inductor_lines import EARLY, EXISTS, LEAN, SEGMENT, Lowered
from tightship.frontends.torch.compat_inductor_partitions import origin
from tightship.frontends.torch.compat_inductor_units import several_kernels_a_unit

__all__ = ["Code", "Outdated", "caches", "forget_strides", "kept_lines", "named", "partitioner"]


class Code(Protocol):
    """What is kept of compiled passes beside Inductor's own caches, whose keys it goes by. ``name``: of everything
    that a partition depends on besides the graph; ``version``: of what reads lines. ``joint``: whether partitions
    that AOTAutograd keeps count, too."""

    name: str
    version: str
    joint: bool

    def lines(self, kind: str, key: str) -> Lowered | None: ...

    def keep_lines(self, kind: str, key: str, lowered: Lowered) -> None: ...


class Outdated(TightshipError):
    """What was kept of an earlier run does not hold: everything is made again."""


def partitioner(code: Code | None, cut: Callable[..., Any] | None) -> Any:
    """What Inductor calls in the place of its own partitioner, known to caches by the name of ``code``."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):  # type: ignore[misc]
        def uuid(self) -> Any:
            return None if code is None else f"tightship {code.name}"

        def __reduce__(self) -> Any:  # caches' keys have Inductor's settings in them
            return str, (self.uuid(),)

        def __call__(self, *args: Any, **more: Any) -> Any:
            assert cut is not None
            return cut(*args, **more)

    return Partitioner()


@contextmanager
def caches(partitioner: Any, code: Code | None, **aot: Any) -> Iterator[list[Any]]:
    """Inside, Inductor compiles for `compile_graph` and `compile_flat`, with its caches as ``code`` says. Lists every
    pass that it compiles or loads."""
    from torch._functorch import config as aot_config
    from torch._inductor import config

    own = {"custom_partitioner_fn": partitioner, "graph_partition": False, "memory_planning": False}
    if code is None:
        own["fx_graph_cache"] = False
    if code is None or not code.joint:
        aot["enable_autograd_cache"] = False
    forget_strides()
    settings = config.patch(own), aot_config.patch(aot)
    with (
        settings[0],
        settings[1],
        several_kernels_a_unit(),
        _compiled_graphs() as loaded,
        _errors_unwrapped(),
    ):
        yield loaded


def forget_strides() -> None:
    """A forward pass is compiled anew: what one before has said of its results goes."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is not None and context.output_strides:
        context.output_strides.clear()


def named(graph: GraphModule, version: str) -> Any:
    """A pass that does nothing, and has in its name what Inductor's key of a graph has not: where kernels may not be
    computed side by side and where they end, what is a tensor, what the lines are called by, and which inputs the
    pass may write over."""
    from torch._guards import TracingContext
    from torch._inductor.custom_graph_pass import CustomGraphPass

    context = TracingContext.try_get()
    donated = None if context is None else getattr(context.fw_metadata, "bw_donated_idxs", None)
    rows = [(n.name, *map(n.meta.get, (SEGMENT, LEAN, EXISTS, EARLY)), origin(n)) for n in graph.graph.nodes]
    name = hashlib.sha256(repr((version, rows, donated)).encode()).hexdigest()

    class Named(CustomGraphPass):  # type: ignore[misc]
        def __call__(self, _graph: torch.fx.Graph) -> None:
            """Changes nothing."""

        def uuid(self) -> str:
            return f"tightship {name}"

    return Named()


def kept_lines(made: Any, kind: str, code: Code) -> Lowered:
    """The lines of a pass from Inductor's cache. Raises `Outdated`."""
    key = getattr(made, "_fx_graph_cache_key", None)
    lowered = None if key is None else code.lines(kind, key)
    if lowered is None:
        raise Outdated(f"the lines of a {kind} pass were not kept")
    return lowered


@contextmanager
def _compiled_graphs() -> Iterator[list[Any]]:
    """Inside, every pass that Inductor compiles, or loads from its cache, is listed."""
    from torch._inductor.output_code import CompiledFxGraph

    found: list[Any] = []
    before = CompiledFxGraph.post_compile

    def post_compile(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        found.append(self)

    CompiledFxGraph.post_compile = post_compile
    try:
        yield found
    finally:
        CompiledFxGraph.post_compile = before


@contextmanager
def _errors_unwrapped() -> Iterator[None]:
    """Whatever is raised while code is made is wrapped into one error of Inductor's: inside, ours is raised."""
    from torch._inductor.exc import InductorError

    try:
        yield
    except InductorError as wrapped:
        if isinstance(wrapped.inner_exception, TightshipError):
            raise wrapped.inner_exception from None
        raise
