"""Every touch of PyTorch Inductor's private interfaces, of one version: partition, lower without kernels, compile.

A part of ``compat``, under the same rule: nothing else in tightship may import Inductor. `require_inductor` looks
for every hook before anything is compiled and raises ``Unsupported`` naming the ones that are gone.

Inductor turns a graph into calls of kernels and, between them, lines that allocate, reuse and free buffers. `lower`
stops there, before any kernel is written or built; `compile_graph` goes on. Both give the lines as `Lowered`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, Protocol

import torch
from torch.fx import GraphModule, Node

from tightship.errors import TightshipError, Unsupported
from tightship.frontends.torch.compat import VERSION, require_torch
from tightship.frontends.torch.compat_inductor_caches import (
    Code,
    Outdated,
    caches,
    forget_strides,
    kept_lines,
    named,
    partitioner,
)  # fmt: skip
from tightship.frontends.torch.compat_inductor_convolutions import lean_convolutions
from tightship.frontends.torch.compat_inductor_lines import (
    AS_IT_IS,
    ORIGIN,
    SEGMENT,
    Event,
    Kernel,
    Lowered,
    calls_others,
    read_lines,
    sequence,
)
from tightship.frontends.torch.compat_inductor_partitions import (
    Pair,
    as_planned,
    copied,
    digest,
    draws,
    extract,
    is_view,
    mark_lean,
    origin,
    overwritten,
    overwritten_count,
    realize_as_is,
    results_of,
    runs_once,
    stock_pair,
    stock_saved,
    with_backward,
)  # fmt: skip
from tightship.frontends.torch.compat_inductor_tracing import failing
from tightship.frontends.torch.compiled_collectives import sending_ops

__all__ = [
    "AS_IT_IS",
    "HOOKS",
    "ORIGIN",
    "SEGMENT",
    "Code",
    "Event",
    "Kernel",
    "Lowered",
    "Outdated",
    "Pair",
    "Stopped",
    "calls_others",
    "compile_flat",
    "compile_graph",
    "digest",
    "draws",
    "dry_graph",
    "extract",
    "is_view",
    "lean_convolutions",
    "lower",
    "mark_lean",
    "origin",
    "overwritten",
    "overwritten_count",
    "realize_as_is",
    "require_inductor",
    "runs_once",
    "sequence",
    "stock_pair",
    "stock_saved",
    "with_backward",
]

_LEANED_ON: Final = {
    "torch._dynamo.exc": ("BackendCompilerFailed",),
    "torch._dynamo.external_utils": ("wrap_inline",),
    "torch._inductor.compile_fx": (
        "compile_fx", "compile_fx_inner", "compile_fx_forward", "compile_fx_backward",
        "create_compiler_config_extra", "get_num_model_outputs",
    ),
    "torch._inductor.config": (
        "allow_buffer_reuse", "cpp_wrapper", "custom_partitioner_fn", "fx_graph_cache", "fx_wrapper",
        "graph_partition", "inplace_buffers", "layout_optimization", "memory_planning", "post_grad_custom_pre_pass",
    ),
    "torch._inductor.decomposition": ("select_decomp_table",),
    "torch._inductor.custom_graph_pass": ("CustomGraphPass", "CustomPartitionerFn", "get_custom_graph_passes",),
    "torch._inductor.exc": ("InductorError",),
    "torch._inductor.graph": (
        "GraphLowering.decide_layout_opt", "GraphLowering.find_nodes_prefer_channels_last", "GraphLowering.run_node",
    ),
    "torch._inductor.output_code": ("CompiledFxGraph.post_compile",),
    "torch._inductor.choices": ("InductorChoices.can_fuse_horizontal",),
    "torch._inductor.codegen.cpp": (
        "CppKernelProxy.codegen_functions", "CppScheduling.codegen_node", "CppScheduling.kernel_proxy_cls",
        "CppScheduling.ready_to_flush",
        "OuterLoopFusedSchedulerNode", "KernelGroup.finalize_kernel", "TilingSelect.select_tiling", "LoopNest.tile",
    ),
    "torch._inductor.codegen.common": ("device_codegens", "init_backend_registration", "DeviceCodegen",),
    "torch._inductor.codegen.wrapper": (
        "PythonWrapperCodegen.run_wrapper_ir_passes", "PythonWrapperCodegen.create",
        "PythonWrapperCodegen.get_graph_outputs", "AllocateLine", "ReuseLine", "ReinterpretLine", "FreeLine",
        "FreeIfNotReusedLine", "ExternKernelAllocLine", "ExternKernelOutLine", "MultiOutputLine",
    ),
    "torch._inductor.virtualized": ("V.graph", "V.set_choices_handler"),
    "torch._inductor.select_algorithm": ("extern_kernels",),
    "torch._functorch.partitioners": (
        "min_cut_rematerialization_partition", "functionalize_rng_ops", "_extract_fwd_bwd_modules",
        "reordering_to_mimic_autograd_engine",
        "raise_getitems", "_has_tag_must_be_in_backward",
    ),
    "torch._functorch.config": (
        "activation_memory_budget", "force_non_lazy_backward_lowering", "enable_autograd_cache", "donated_buffer",
        "cse",
    ),
    "torch._functorch.compile_utils": ("fx_graph_cse",),
    "torch._functorch._aot_autograd.graph_compile": ("collect_fw_donated_buffer_idxs",),
    "torch._functorch._aot_autograd.descriptors": ("InputMutationAOTOutput",),
    "torch._guards": ("TracingContext.try_get",),
    "torch.fx.traceback": ("preserve_node_meta", "current_meta",),
    "torch.compiler": ("_compile_session_context",),
}  # fmt: skip

HOOKS: Final = tuple((module, name) for module, names in _LEANED_ON.items() for name in names)
"""What is leaned on: (module, name)."""


def require_inductor() -> None:
    """Raises ``Unsupported``, naming every hook of `HOOKS` that the installed PyTorch does not have."""
    require_torch()
    gone = [f"{module}.{name}" for module, name in HOOKS if not _has(module, name)]
    if not gone and not _realizes_as_is():
        gone = [f"node.meta[{AS_IT_IS!r}] in torch._inductor.graph.GraphLowering.run_node"]
    if gone:
        raise Unsupported(
            "compiled mode on this PyTorch",
            f"it leans on private interfaces of Inductor {VERSION} that are not here: {', '.join(gone)}",
            f'install an unmodified torch>={VERSION},<2.14, or use mode="exact"',
        )
    from torch._inductor import config

    for name in ("cpp_wrapper", "fx_wrapper"):
        if getattr(config, name):
            raise _refused(name, "the lines of such code are not those that are replayed")


def _refused(name: str, why: str) -> Unsupported:
    return Unsupported(
        f"torch._inductor.config.{name} in compiled mode", why, f'leave {name} as it is, or use mode="exact"'
    )


def _realizes_as_is() -> bool:
    """Whether Inductor reads `AS_IT_IS` of the nodes that it lowers."""
    from torch._inductor.graph import GraphLowering

    return AS_IT_IS in GraphLowering.run_node.__code__.co_consts


def _has(module: str, name: str) -> bool:
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            if isinstance(found, type) and part not in vars(found):  # what it inherits does something else
                return False
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return True


# --- hooks into a compilation ---


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
    early."""
    from torch._inductor.choices import InductorChoices

    class Choices(InductorChoices):
        @staticmethod
        def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            first, second = _segments(node1), _segments(node2)
            if first and second and first != second:
                return False
            return bool(InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score))

    return Choices


def _segments(node: Any) -> set[int]:
    """The last segment of each buffer that a scheduler's node makes."""
    found = set()
    for part in node.get_nodes():
        origins = part.node.get_origins() if part.node is not None else ()
        found.add(max((n.meta[SEGMENT] for n in origins if SEGMENT in n.meta), default=-1))
    return found - {-1}


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


# --- lowering and compiling ------------------------------------------------------------------------------------


class Partition(Protocol):
    def __call__(
        self,
        joint: GraphModule,
        inputs: Any,
        outputs: int,
        static: Sequence[int],
        lower: Callable[[Pair], Any],
    ) -> Pair: ...


Finished = Callable[[str, Lowered | None, Callable[[list[Any]], Any]], Callable[[list[Any]], Any]]


def lower(
    pair: Pair, static: Sequence[int] = (), *, orig_outputs: int, orig_inputs: int
) -> tuple[Lowered, Lowered]:
    """Both graphs of ``pair``, lowered as `compile_graph` would; no kernel is built, and the graphs stay as they
    are. Inside of a compilation only."""
    from torch._inductor import compile_fx

    made: list[Lowered] = []
    extra = compile_fx.create_compiler_config_extra(pair.forward)
    inputs = [n.meta.get("val") for n in pair.forward.graph.find_nodes(op="placeholder")]
    gm = copied(pair.forward)
    with _stopping(made), _foreseen(pair, static), as_planned(pair.forward, backward=False):
        compile_fx.compile_fx_forward(
            gm, inputs, num_orig_model_outputs=orig_outputs, num_example_inputs=orig_inputs,
            compiler_config_extra=extra, inner_compile=compile_fx.compile_fx_inner,
        )  # fmt: skip
    with _stopping(made), _foreseen(pair, static), as_planned(pair.backward, backward=True):
        compile_fx.compile_fx_backward(
            copied(pair.backward), _restrided(pair, made[0]), compiler_config_extra=extra,
            inner_compile=compile_fx.compile_fx_inner,
        )  # fmt: skip
    forward, backward = made
    return forward, backward


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


@contextmanager
def _stopping(made: list[Lowered]) -> Iterator[None]:
    from torch._inductor import config

    recording = _recording(stop=True)
    with (
        config.patch(fx_graph_cache=False),
        torch.no_grad(),
        torch._C._DisableAutocast(),
        _scalar_kernels(),
        recording as recorder,
        suppress(Stopped),
    ):
        yield
    if not recorder.found:
        raise Unsupported("a pass that computes nothing", "there is nothing to lower", "use Inductor for it")
    made.extend(recorder.found)


@contextmanager
def _foreseen(pair: Pair, static: Sequence[int]) -> Iterator[None]:
    """Inside, Inductor reads of AOTAutograd's metadata what it will when it compiles the pair: which results come
    first, and which saved tensors nobody else has."""
    from torch._functorch import config
    from torch._functorch._aot_autograd.graph_compile import collect_fw_donated_buffer_idxs
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is None:
        raise Unsupported(
            "lowering outside of a compilation", "Inductor keeps what it knows of a graph there"
        )
    ins = [n.meta.get("val") for n in pair.forward.graph.find_nodes(op="placeholder")]
    outs = [x.meta.get("val") if isinstance(x, Node) else None for x in results_of(pair.forward)]
    late = [x.meta.get("val") if isinstance(x, Node) else None for x in results_of(pair.backward)]
    donated = collect_fw_donated_buffer_idxs(ins, outs[: pair.outputs], late, outs[pair.outputs :])
    before = context.fw_metadata
    known: Any = SimpleNamespace(
        bw_donated_idxs=donated if config.donated_buffer else None,
        num_mutated_inp_runtime_indices=overwritten_count(pair),
        static_input_indices=list(static),
    )
    context.fw_metadata = known
    try:
        yield
    finally:
        context.fw_metadata = before


def _restrided(pair: Pair, forward: Lowered) -> list[Any]:
    """The backward graph's inputs, what is saved with the strides that the forward graph gives it."""
    values = [n.meta.get("val") for n in pair.backward.graph.nodes if n.op == "placeholder"]
    for k, stride in enumerate(forward.strides[pair.outputs :]):
        value = values[k]
        if isinstance(value, torch.Tensor) and stride is not None and tuple(value.stride()) != stride:
            values[k] = value.as_strided(value.size(), stride)
    return values


def compile_graph(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    partition: Partition,
    finished: Finished,
    code: Code | None = None,
) -> Callable[..., Any]:
    """Compiles a Dynamo graph with Inductor. ``partition`` cuts the joint graph, if there is a backward pass;
    ``finished(pass, lowered, function)`` gets each compiled pass (``forward``, ``backward``, ``inference``), which
    takes a list of arguments and empties it, and returns what is called instead. ``lowered`` is None where there is
    nothing to compute. Both passes are compiled before this returns. With ``code``, Inductor's and AOTAutograd's
    caches count: what they have is not partitioned, lowered or compiled again. Raises `Outdated` where they have
    passes whose lines nobody kept."""
    require_inductor()
    from torch._inductor import compile_fx, config

    if config.custom_partitioner_fn is not None:
        raise _refused("custom_partitioner_fn", "what is saved and what is recomputed is the plan")
    orig = (compile_fx.get_num_model_outputs(gm), len(inputs))

    def cut(joint: GraphModule, joint_inputs: Sequence[Any], **more: Any) -> Any:
        static = tuple(more.get("static_lifetime_input_indices") or ())

        def lowered(pair: Pair) -> tuple[Lowered, Lowered]:
            return lower(pair, static, orig_outputs=orig[0], orig_inputs=orig[1])

        pair = partition(joint, joint_inputs, int(more["num_fwd_outputs"]), static, lowered)
        return pair.forward, pair.backward

    made_here: list[Any] = []

    def inner(graph: GraphModule, example_inputs: Sequence[Any], **more: Any) -> Any:
        kind = (
            "backward" if more.get("is_backward") else "inference" if more.get("is_inference") else "forward"
        )
        made, lowered = _made(graph, example_inputs, more, kind, code)
        made_here.append(made)
        if lowered is None or not hasattr(made, "current_callable"):
            return _boxed(finished(kind, None, made))
        made.current_callable = finished(kind, lowered, made.current_callable)
        return made

    with caches(partitioner(code, cut), code, force_non_lazy_backward_lowering=True) as loaded:
        made: Callable[..., Any] = compile_fx.compile_fx(gm, inputs, inner_compile=inner)
    if code is not None and not made_here:
        if not loaded:
            raise Outdated("a pass was kept that computes nothing")
        kinds = ("inference",) if len(loaded) == 1 else ("forward", "backward")
        for kind, graph in zip(kinds, loaded, strict=True):
            lowered = kept_lines(graph, kind, code)
            graph.current_callable = finished(kind, lowered, graph.current_callable)
    return made


def _made(
    graph: GraphModule, inputs: Sequence[Any], more: dict[str, Any], kind: str, code: Code | None
) -> tuple[Any, Lowered | None]:
    """A pass compiled by Inductor, or from its cache, with its lines."""
    from torch._inductor import compile_fx, config
    from torch._inductor.custom_graph_pass import get_custom_graph_passes

    before = get_custom_graph_passes(config.post_grad_custom_pre_pass)
    key = None
    for cached in (code is not None and bool(config.fx_graph_cache), False):
        own: dict[str, Any] = {"fx_graph_cache": cached, "custom_partitioner_fn": None}
        if cached and code is not None:
            own["post_grad_custom_pre_pass"] = [*before, named(graph, code.version)]
        settings = as_planned(graph, backward=kind == "backward", **own)
        with settings, _recording(stop=False) as recorder:
            made = compile_fx.compile_fx_inner(graph, inputs, **more)
        key = key or getattr(made, "_fx_graph_cache_key", None)
        if recorder.found:
            if code is not None and key is not None:
                made._fx_graph_cache_key = key
                code.keep_lines(kind, key, recorder.found[0])
            return made, recorder.found[0]
        if key is None or code is None:
            return made, None
        with suppress(Outdated):
            return made, kept_lines(made, kind, code)
        forget_strides()
    raise AssertionError


# --- lines alone -------------------------------------------------------------------------------------------------


Emulated = Callable[[str, Lowered, GraphModule], Callable[[list[Any]], list[Any]]]


def dry_graph(gm: GraphModule, inputs: Sequence[Any], emulated: Emulated) -> Callable[..., Any]:
    """A Dynamo graph as Inductor compiles it by itself, with no kernel built.

    ``emulated(pass, lowered, graph)`` makes of each pass (``forward``, ``backward``, ``inference``) what is called in
    its place, with a list of arguments that it empties; ``graph`` is the pass before it was lowered. A pass that
    computes nothing is run as it is."""
    require_inductor()
    from torch._inductor import compile_fx, config

    def inner(graph: GraphModule, example_inputs: Sequence[Any], **more: Any) -> Any:
        kind = (
            "backward" if more.get("is_backward") else "inference" if more.get("is_inference") else "forward"
        )
        shown, made = copied(graph), None
        with _lowering_alone() as recorder:
            made = compile_fx.compile_fx_inner(graph, example_inputs, **more)
        if not recorder.found:
            return made
        _tell_strides(recorder.found[0])
        run = emulated(kind, recorder.found[0], shown)
        return _boxed(lambda args: run(args))

    with caches(config.custom_partitioner_fn, None, force_non_lazy_backward_lowering=True):
        made: Callable[..., Any] = compile_fx.compile_fx(gm, list(inputs), inner_compile=inner)
    return made


def _tell_strides(lowered: Lowered) -> None:
    """Says of a pass's results what Inductor does when it has compiled it: the backward pass is lowered for them."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        context.output_strides.extend(lowered.strides)


@contextmanager
def compiled_calls(model: torch.nn.Module, backend: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """What calls of the module are once ``backend`` has compiled it, sizes fixed. Errors of ours that Dynamo wraps
    into its own are raised; nothing that it has compiled for others is used or forgotten."""
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._dynamo.external_utils import wrap_inline

    # In a frame of its own, as torch.compile has it: those of torch.nn's classes are left alone.
    inner = wrap_inline(model._call_impl)
    made = torch.compile(inner, backend=backend, dynamic=False, isolate_recompiles=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return made(*args, **kwargs)
        except BackendCompilerFailed as wrapped:
            if isinstance(wrapped.inner_exception, TightshipError):
                raise wrapped.inner_exception from None
            raise

    before = model._compiled_call_impl
    model._compiled_call_impl = call  # type: ignore[assignment]
    try:
        yield call
    finally:
        model._compiled_call_impl = before


# --- a graph without a backward pass of its own ----------------------------------------------------------------


Lower = Callable[[GraphModule], Lowered]


def compile_flat(
    gm: GraphModule, inputs: Sequence[Any], choose: Callable[[GraphModule, Lower], GraphModule],
    code: Code | None = None,
) -> tuple[Callable[[list[Any]], Any], Lowered]:  # fmt: skip
    """Compiles a graph that computes gradients and updates by itself, and writes to its inputs. ``choose`` gets it as
    Inductor would compile it (without views that are written to; each write is an ``aten.copy_`` to an input, at
    the end), and what lowers such a graph without building kernels, and returns the graph that is compiled. Returns
    a function of a list of arguments, which it empties, and what it was lowered to; ``code`` as in
    `compile_graph`."""
    require_inductor()
    from torch._inductor import compile_fx

    _send_in_order()
    found: list[Any] = []

    def inner(graph: GraphModule, example_inputs: Sequence[Any], **more: Any) -> Any:
        def lowered(candidate: GraphModule) -> Lowered:
            with _lowering_alone() as recorder, as_planned(candidate, backward=False):
                compile_fx.compile_fx_inner(copied(candidate), example_inputs, **more)
            if not recorder.found:
                raise Unsupported("a step that computes nothing", "there is nothing to lower")
            return recorder.found[0]

        made, lines = _made(copied(choose(graph, lowered)), example_inputs, more, "step", code)
        found[:] = [made.current_callable, lines]
        return made

    with caches(partitioner(code, None), code) as loaded, torch.no_grad(), failing("compiling the step"):
        compile_fx.compile_fx(gm, list(inputs), inner_compile=inner)
    if not found:
        assert code is not None
        if len(loaded) != 1:
            raise Outdated("a step was kept that computes nothing")
        found[:] = [loaded[0].current_callable, kept_lines(loaded[0], "step", code)]
    call, lowered_ = found
    return call, lowered_


@functools.cache
def _send_in_order() -> None:
    """Has collectives run in the order that a graph has them in, on all ranks: nothing else would order two of
    them, and Inductor goes by sizes. None lives longer for it."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    def lowered(op: Any) -> Any:
        def lower(*args: Any) -> Any:
            known = len(V.graph.operations)
            made = ir.FallbackKernel.create(op, *args)
            last = vars(V.graph).get("_tightship_sent")
            for new in V.graph.operations[known:]:
                if isinstance(new, ir.FallbackKernel):
                    if last is not None:
                        V.graph.additional_buffer_deps[new.operation_name].add(last)
                    V.graph._tightship_sent = new.get_name()
            return made.wrap_for_lowering()

        return lower

    for op in sending_ops():
        lowering.register_lowering(op, type_promotion_kind=None)(lowered(op))


def _boxed(fn: Any) -> Any:
    fn._boxed_call = True
    return fn
