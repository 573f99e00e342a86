"""One pass as Inductor compiles it: its lines, its code, and its kernels.

A part of ``compat``, under the same rule as `compat_inductor`: private interfaces of one version.

Inductor writes the code of a pass, puts it into its cache, and loads it, which builds the kernels. `lines_of` looks
at a candidate and stops before the last of these; what is chosen (`compiled_pass`) then is in the cache already, and
only its kernels are left to build.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tightship.errors import TightshipError, Unsupported
from tightship.frontends.torch.compat_inductor_caches import Code, Outdated, forget_strides, kept_lines, named
from tightship.frontends.torch.compat_inductor_lines import EARLY, LEAN, SEGMENT, Lowered, read_lines
from tightship.frontends.torch.compat_inductor_partitions import as_planned, copied

__all__ = ["Ahead", "NotLowered", "Stopped", "compiled_pass", "lines_of"]

# --- hooks into a compilation ---


class NotLowered(Unsupported):
    """Inductor fails at a graph of ours, or at a partition of its own: others may do."""


@contextmanager
def _lowerable() -> Iterator[None]:
    """Inside, an error of Inductor's own is `NotLowered`, in its words."""
    from torch._inductor.exc import InductorError

    try:
        yield
    except InductorError as wrapped:
        if isinstance(wrapped.inner_exception, (TightshipError, MemoryError)):
            raise
        words = str(wrapped.inner_exception).partition("\n")[0] or type(wrapped.inner_exception).__name__
        raise NotLowered(
            "a way to write the graph in compiled mode", f"Inductor fails at it ({words})"
        ) from wrapped


class Stopped(BaseException):
    """Ends a compilation where no more is wanted; no ``Exception``, which Inductor would wrap."""


@dataclass
class _Recorder:
    stop: bool
    found: list[Lowered] = field(default_factory=list)


_recorders: list[_Recorder] = []


def _wrapper_class() -> Any:
    """Inductor's class that writes the calls of kernels, which tells the recorder what it has planned."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    class Wrapper(PythonWrapperCodegen):
        @staticmethod
        def create(is_subgraph: bool, *args: Any, **kwargs: Any) -> Any:
            if is_subgraph:
                raise Unsupported("a graph within the graph in compiled mode", "its lines are not replayed")
            return Wrapper()

        def run_wrapper_ir_passes(self, is_inference: bool) -> None:
            super().run_wrapper_ir_passes(is_inference)
            recorder = _recorders[-1]
            recorder.found.append(read_lines(self))
            if recorder.stop:
                raise Stopped

    return Wrapper


def _choices_class() -> Any:
    """Inductor's class that chooses what to fuse. Kernels that only share what they read are computed together, where
    the first of them is: of a planned pass only where the plan has nothing in between, or memory is taken too
    early. In one that is written for memory a kernel is not put off to the one that reads what it makes, either, nor
    anywhere one that is to be early (`EARLY`): what it reads would stay until then."""
    from torch._inductor.choices import InductorChoices

    known: dict[Any, int] = {}  # the last segment of each buffer that a part of a scheduler's node makes

    def segments(node: Any) -> set[int]:
        found = set()
        for part in node.get_nodes():
            if part not in known:
                origins = part.node.get_origins() if part.node is not None else ()
                known[part] = max((n.meta[SEGMENT] for n in origins if SEGMENT in n.meta), default=-1)
            found.add(known[part])
        return found - {-1}

    def marked(node: Any, mark: str) -> bool:
        parts = (part.node for part in node.get_nodes())
        return any(mark in n.meta for node in parts if node is not None for n in node.get_origins())

    def apart(node1: Any, node2: Any) -> bool:
        first, second = segments(node1), segments(node2)
        return bool(first and second and first != second)

    class Choices(InductorChoices):
        @staticmethod
        def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            if apart(node1, node2) and (marked(node1, LEAN) or marked(node1, EARLY)):
                return False
            return bool(InductorChoices.can_fuse_vertical(scheduler, node1, node2, shared_data_score))

        @staticmethod
        def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            if apart(node1, node2):
                return False
            return bool(InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score))

    return Choices


@contextmanager
def _recording(*, stop: bool) -> Iterator[_Recorder]:
    """Inductor writes with `_wrapper_class` inside, on every device."""
    from torch._inductor.codegen import common
    from torch._inductor.virtualized import V

    common.init_backend_registration()
    before = dict(common.device_codegens)
    wrapper = _wrapper_class()
    for device, codegen in before.items():
        if device in ("cpu", "cuda"):
            common.device_codegens[device] = common.DeviceCodegen(
                codegen.scheduling, wrapper, codegen.cpp_wrapper_codegen, codegen.fx_wrapper_codegen
            )
    _recorders.append(_Recorder(stop))
    try:
        with V.set_choices_handler(_choices_class()()):
            yield _recorders[-1]
    finally:
        _recorders.pop()
        common.device_codegens.clear()
        common.device_codegens.update(before)


@contextmanager
def _scalar_kernels() -> Iterator[None]:
    """Inside, C++ is written for one kind of each kernel, the first, without its loops: what buffers it needs is
    decided there. Its vectorized kinds take as long again and change nothing of that, but for how loops are tiled:
    those fused on the outside are compared by it."""
    from torch._inductor import config
    from torch._inductor.codegen.cpp import (
        CppKernelProxy,
        CppScheduling,
        KernelGroup,
        OuterLoopFusedSchedulerNode,
        TilingSelect,
    )  # fmt: skip

    whole, finalize = CppScheduling.codegen_node, KernelGroup.finalize_kernel

    class Scalar(CppKernelProxy):
        def codegen_functions(self, fn_list: Any, var_sizes_list: Any) -> None:
            self.picked_vec_isa = None
            super().codegen_functions(fn_list, var_sizes_list)

    class Tiled(CppKernelProxy):
        def codegen_functions(self, fn_list: Any, var_sizes_list: Any) -> None:
            vectorized = bool(getattr(self, "picked_vec_isa", None))
            self.picked_vec_isa = None
            super().codegen_functions(fn_list, var_sizes_list)
            if vectorized and self.itervars:
                with config.patch(inplace_buffers=False):
                    factors, levels, _ = TilingSelect().select_tiling(fn_list, var_sizes_list)
                for level in levels:
                    self.loop_nest.tile(level, factor=factors[0])

    def codegen_node(self: Any, node: Any) -> None:
        self.kernel_proxy_cls = Tiled if isinstance(node, OuterLoopFusedSchedulerNode) else Scalar
        try:
            whole(self, node)
        finally:
            del self.kernel_proxy_cls

    def finalize_kernel(self: Any, _kernel: Any, nodes: Any) -> None:
        self.scheduled_nodes += nodes

    CppScheduling.codegen_node, KernelGroup.finalize_kernel = codegen_node, finalize_kernel
    try:
        yield
    finally:
        CppScheduling.codegen_node, KernelGroup.finalize_kernel = whole, finalize


@contextmanager
def _lowering_alone() -> Iterator[_Recorder]:
    """Inside, Inductor ends where it would write kernels."""
    from torch._inductor import config

    recording = _recording(stop=True)
    with config.patch(fx_graph_cache=False), _scalar_kernels(), recording as recorder, suppress(Stopped):
        yield recorder


# --- one pass ---


@dataclass
class Ahead:
    """Passes whose code was written ahead of what is chosen: it is in Inductor's cache, as ``code`` has it, without
    kernels. ``lines`` by Inductor's key."""

    code: Code
    lines: dict[str, Lowered] = field(default_factory=dict)


def lines_of(
    graph: GraphModule, inputs: Sequence[Any], more: Mapping[str, Any], kind: str, ahead: Ahead | None = None
) -> Lowered | None:
    """What a pass (``forward``, ``backward``, ``inference``, ``step``) is lowered to, None where nobody knows.
    No kernel is built, and ``graph`` stays as it is. With ``ahead``, its code is written as well, where caches have
    room for it. Raises `NotLowered`."""
    from torch._inductor import compile_fx, config

    if (nothing := _no_lines(graph)) is not None:
        return nothing
    if ahead is not None and config.fx_graph_cache and not config.force_disable_caches:
        with _lowerable():
            lines = _written(graph, inputs, more, kind, ahead)
        if lines is not None:
            return lines
    with _lowerable(), _lowering_alone() as recorder, as_planned(graph, backward=kind == "backward"):
        compile_fx.compile_fx_inner(copied(graph), inputs, **more)
    return recorder.found[0] if recorder.found else None


def _written(
    graph: GraphModule, inputs: Sequence[Any], more: Mapping[str, Any], kind: str, ahead: Ahead
) -> Lowered | None:
    """The lines of a pass whose code goes into Inductor's cache; None where it is there already and nobody here
    knows its lines."""
    from torch._inductor import compile_fx

    with _settings(graph, kind, ahead.code), _recording(stop=False) as recorder, _without_kernels() as keys:
        compile_fx.compile_fx_inner(copied(graph), inputs, **more)
    lines = recorder.found[0] if recorder.found else None
    for key in keys:
        if lines is not None:
            ahead.lines[key] = lines
        lines = ahead.lines.get(key)
    return lines


def _no_lines(graph: GraphModule) -> Lowered | None:
    """The lines of a pass that computes nothing and hands out what it is given, which Inductor leaves alone."""
    nodes = list(graph.graph.nodes)
    if any(n.op not in ("placeholder", "output") for n in nodes):
        return None
    names: list[str] = []
    strides: list[tuple[int, ...] | None] = []
    for n in nodes[-1].args[0]:
        value = n.meta.get("val") if isinstance(n, Node) else None
        names.append(n.name if isinstance(value, torch.Tensor) else "")
        strides.append(tuple(value.stride()) if isinstance(value, torch.Tensor) else None)
    return Lowered((), tuple(n.name for n in nodes[:-1]), tuple(names), tuple(strides), ())


def compiled_pass(
    graph: GraphModule, inputs: Sequence[Any], more: Mapping[str, Any], kind: str, code: Code | None,
    ahead: Ahead | None = None,
) -> tuple[Any, Lowered | None]:  # fmt: skip
    """A pass compiled by Inductor, or from its cache, with its lines."""
    from torch._inductor import compile_fx, config

    if (nothing := _no_lines(graph)) is not None:
        return compile_fx.compile_fx_inner(copied(graph), inputs, **more), nothing
    key = None
    for kept in (code if config.fx_graph_cache else None, None):
        with _settings(graph, kind, kept), _recording(stop=False) as recorder:
            made = compile_fx.compile_fx_inner(copied(graph), inputs, **more)
        key = key or getattr(made, "_fx_graph_cache_key", None)
        lines = recorder.found[0] if recorder.found else None
        if lines is None and ahead is not None and key is not None:
            lines = ahead.lines.get(key)
        if lines is not None:
            if code is not None and key is not None:
                made._fx_graph_cache_key = key
                code.keep_lines(kind, key, lines)
            return made, lines
        if key is None or code is None:
            return made, None
        with suppress(Outdated):
            return made, kept_lines(made, kind, code)
        forget_strides()
    raise AssertionError


@contextmanager
def _settings(graph: GraphModule, kind: str, code: Code | None) -> Iterator[None]:
    """Inside, Inductor compiles a pass of ours; its cache counts if ``code`` is there."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import get_custom_graph_passes

    own: dict[str, Any] = {"fx_graph_cache": code is not None, "custom_partitioner_fn": None}
    if code is not None:
        before = get_custom_graph_passes(config.post_grad_custom_pre_pass)
        own["post_grad_custom_pre_pass"] = [*before, named(graph, code.version)]
    with as_planned(graph, backward=kind == "backward", **own):
        yield


@contextmanager
def _without_kernels() -> Iterator[list[str]]:
    """Inside, Inductor writes the code of a pass and puts it into its cache, and ends where it would build kernels.
    Lists the pass's key there, if it has one."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.output_code import CompiledFxGraph

    keys: list[str] = []
    load, finish = vars(PyCodeCache)["load_by_key_path"], CompiledFxGraph.post_compile

    def unloaded(_key: str, path: str, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(__file__=path, call=None)

    def ended(made: Any, *_: Any, **__: Any) -> None:
        key = getattr(made, "_fx_graph_cache_key", None)
        keys.extend([] if key is None else [key])
        raise Stopped

    PyCodeCache.load_by_key_path = staticmethod(unloaded)
    CompiledFxGraph.post_compile = ended
    try:
        with suppress(Stopped):
            yield keys
    finally:
        PyCodeCache.load_by_key_path = load
        CompiledFxGraph.post_compile = finish
