"""Every touch of PyTorch Inductor's private interfaces, of one version: partition, lower without kernels, compile.

A part of ``compat``, under the same rule: nothing else in tightship may import Inductor. `require_inductor` looks
for every hook before anything is compiled and raises ``Unsupported`` naming the ones that are gone.

Inductor turns a graph into calls of kernels and, between them, lines that allocate, reuse and free buffers. `lower`
stops there, before any kernel is written or built; `compile_graph` goes on. Both give the lines as `Lowered`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, Final, Protocol

import torch
from torch.fx import GraphModule, Node

from tightship.errors import TightshipError, Unsupported
from tightship.frontends.torch.compat import VERSION, require_torch
from tightship.frontends.torch.compat_compile import never_donates
from tightship.frontends.torch.compat_inductor_caches import (
    Code,
    Outdated,
    caches,
    kept_lines,
    partitioner,
)  # fmt: skip
from tightship.frontends.torch.compat_inductor_code import Ahead, NotLowered, Stopped, compiled_pass, lines_of
from tightship.frontends.torch.compat_inductor_convolutions import lean_convolutions
from tightship.frontends.torch.compat_inductor_lines import (
    AS_IT_IS,
    EARLY,
    EXISTS,
    ORIGIN,
    SEGMENT,
    Event,
    Kernel,
    Lowered,
    calls_others,
    sequence,
)
from tightship.frontends.torch.compat_inductor_masks import decompositions
from tightship.frontends.torch.compat_inductor_partitions import (
    Pair,
    after_tangents,
    copied,
    digest,
    draws,
    effect_of,
    extract,
    is_view,
    mark_lean,
    merged,
    origin,
    overwritten,
    overwritten_count,
    realize_as_is,
    results_of,
    runs_once,
    sent,
    stock_pair,
    stock_saved,
    with_backward,
    without_tokens,
)  # fmt: skip
from tightship.frontends.torch.compat_inductor_tracing import failing
from tightship.frontends.torch.compiled_collectives import decompositions as collective_decompositions
from tightship.frontends.torch.compiled_collectives import sending_ops

__all__ = [
    "AS_IT_IS",
    "EARLY",
    "EXISTS",
    "HOOKS",
    "ORIGIN",
    "SEGMENT",
    "Code",
    "Event",
    "Kernel",
    "Lower",
    "LowerPair",
    "Lowered",
    "NotLowered",
    "Outdated",
    "Pair",
    "Stopped",
    "after_tangents",
    "calls_others",
    "compile_flat",
    "compile_graph",
    "compiling",
    "digest",
    "draws",
    "dry_graph",
    "effect_of",
    "extract",
    "is_view",
    "lean_convolutions",
    "lower",
    "mark_lean",
    "merged",
    "origin",
    "overwritten",
    "overwritten_count",
    "realize_as_is",
    "require_inductor",
    "runs_once",
    "sent",
    "sequence",
    "stock_pair",
    "stock_saved",
    "with_backward",
    "without_tokens",
]

_LEANED_ON: Final = {
    "torch._dynamo.convert_frame": ("compile_lock",),
    "torch._dynamo.exc": ("BackendCompilerFailed",),
    "torch._dynamo.external_utils": ("wrap_inline",),
    "torch._inductor.compile_fx": (
        "compile_fx", "compile_fx_inner", "compile_fx_forward", "compile_fx_backward",
        "create_compiler_config_extra", "get_num_model_outputs",
    ),
    "torch._inductor.config": (
        "allow_buffer_reuse", "cpp_wrapper", "custom_partitioner_fn", "force_disable_caches", "fx_graph_cache",
        "fx_wrapper", "graph_partition", "inplace_buffers", "layout_optimization",
        "max_fusion_buffer_group_pairwise_attempts", "memory_planning",
        "post_grad_custom_pre_pass",
    ),
    "torch._inductor.decomposition": ("select_decomp_table",),
    "torch._inductor.custom_graph_pass": ("CustomGraphPass", "CustomPartitionerFn", "get_custom_graph_passes",),
    "torch._inductor.exc": ("InductorError",),
    "torch._inductor.graph": (
        "GraphLowering.decide_layout_opt", "GraphLowering.find_nodes_prefer_channels_last", "GraphLowering.run_node",
    ),
    "torch._inductor.ir": ("FallbackKernel.create",),
    "torch._inductor.lowering": ("register_lowering",),
    "torch._inductor.pattern_matcher": ("compute_mutation_region_ids",),
    "torch._inductor.output_code": ("CompiledFxGraph.post_compile",),
    "torch._inductor.async_compile": ("AsyncCompile.cpp_pybinding", "AsyncCompile.wait", "get_compile_threads"),
    "torch._inductor.codecache": (
        "PyCodeCache.load_by_key_path", "CppPythonBindingsCodeCache.load_pybinding_async",
        "CppPythonBindingsCodeCache.extra_parse_arg", "CppPythonBindingsCodeCache.call_entry_function",
    ),
    "torch._inductor.choices": ("InductorChoices.can_fuse_horizontal", "InductorChoices.can_fuse_vertical"),
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
        "cse", "unsafe_treat_script_objects_as_zero_size",
    ),
    "torch._functorch.compile_utils": ("fx_graph_cse",),
    "torch._functorch._aot_autograd.graph_compile": ("collect_fw_donated_buffer_idxs",),
    "torch._functorch._aot_autograd.descriptors": ("InputMutationAOTOutput",),
    "torch._functorch._aot_autograd.utils": ("unlift_tokens",),
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


# --- lowering and compiling ------------------------------------------------------------------------------------


class Partition(Protocol):
    def __call__(
        self,
        joint: GraphModule,
        inputs: Any,
        outputs: int,
        static: Sequence[int],
        lower: LowerPair,
    ) -> Pair: ...


class LowerPair(Protocol):
    """What both passes are lowered to. ``likely`` as in `Lower`."""

    def __call__(self, pair: Pair, *, likely: bool = True) -> tuple[Lowered, Lowered]: ...


Finished = Callable[[str, Lowered | None, Callable[[list[Any]], Any]], Callable[[list[Any]], Any]]


def lower(
    pair: Pair, static: Sequence[int] = (), *, orig_outputs: int, orig_inputs: int, ahead: Ahead | None = None
) -> tuple[Lowered, Lowered]:
    """Both graphs of ``pair``, lowered as `compile_graph` would; no kernel is built, and the graphs stay as they
    are. Inside of a compilation only. ``ahead`` as in `lines_of`."""
    from torch._inductor import compile_fx

    made: list[Lowered] = []
    pair = without_tokens(pair)
    extra = compile_fx.create_compiler_config_extra(pair.forward)
    inputs = [n.meta.get("val") for n in pair.forward.graph.find_nodes(op="placeholder")]
    gm = copied(pair.forward)
    with _stopping(made, "forward", ahead) as inner, _foreseen(pair, static):
        compile_fx.compile_fx_forward(
            gm, inputs, num_orig_model_outputs=orig_outputs, num_example_inputs=orig_inputs,
            compiler_config_extra=extra, inner_compile=inner,
        )  # fmt: skip
    with _stopping(made, "backward", ahead) as inner, _foreseen(pair, static):
        compile_fx.compile_fx_backward(
            copied(pair.backward), _restrided(pair, made[0]), compiler_config_extra=extra, inner_compile=inner
        )
    forward, backward = made
    return forward, backward


@contextmanager
def _stopping(made: list[Lowered], kind: str, ahead: Ahead | None) -> Iterator[Callable[..., Any]]:
    """What is called inside in the place of Inductor's inner compiler: it adds a pass's lines, and ends there."""

    def inner(graph: GraphModule, inputs: Sequence[Any], **more: Any) -> Any:
        lines = lines_of(graph, inputs, _as_inductor_says(more), kind, ahead)
        if lines is None:
            raise Unsupported(f"a {kind} pass", "Inductor lowers it to nothing", "use Inductor for it")
        made.append(lines)
        raise Stopped

    with torch.no_grad(), torch._C._DisableAutocast(), suppress(Stopped):
        yield inner


def _as_inductor_says(more: Mapping[str, Any]) -> dict[str, Any]:
    """What its inner compiler is given, with its own table of decompositions: it is part of the keys of caches, and
    what ours has besides is decomposed by then."""
    from torch._inductor.decomposition import select_decomp_table

    return {**more, "get_decomp_fn": select_decomp_table}


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

    ahead = None if code is None else Ahead(code)

    def cut(joint: GraphModule, joint_inputs: Sequence[Any], **more: Any) -> Any:
        static = tuple(more.get("static_lifetime_input_indices") or ())

        def lowered(pair: Pair, *, likely: bool = True) -> tuple[Lowered, Lowered]:
            return lower(
                pair, static, orig_outputs=orig[0], orig_inputs=orig[1], ahead=ahead if likely else None
            )

        pair = partition(joint, joint_inputs, int(more["num_fwd_outputs"]), static, lowered)
        return pair.forward, pair.backward

    made_here: list[Any] = []

    def inner(graph: GraphModule, example_inputs: Sequence[Any], **more: Any) -> Any:
        kind = (
            "backward" if more.get("is_backward") else "inference" if more.get("is_inference") else "forward"
        )
        made, lowered = compiled_pass(graph, example_inputs, _as_inductor_says(more), kind, code, ahead)
        made_here.append(made)
        if (
            kind == "backward"
        ):  # PyTorch would refuse to keep the graph; who runs the pass keeps what it writes over
            never_donates()
        if not hasattr(made, "current_callable"):  # there is nothing to compile
            return _boxed(finished(kind, lowered, made))
        made.current_callable = finished(kind, lowered, made.current_callable)
        return made

    collectives = _collectives()
    with caches(partitioner(code, cut), code, force_non_lazy_backward_lowering=True) as loaded:
        made: Callable[..., Any] = compile_fx.compile_fx(
            gm, inputs, inner_compile=inner, decompositions={**decompositions(), **collectives}
        )
    if code is not None and not made_here:
        if not loaded:
            raise Outdated("a pass was kept that computes nothing")
        kinds = ("inference",) if len(loaded) == 1 else ("forward", "backward")
        for kind, graph in zip(kinds, loaded, strict=True):
            lowered = kept_lines(graph, kind, code)
            graph.current_callable = finished(kind, lowered, graph.current_callable)
    return made


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
        more = _as_inductor_says(more)
        lines = lines_of(graph, example_inputs, more, kind)
        if lines is None:
            return compile_fx.compile_fx_inner(graph, example_inputs, **more)
        _tell_strides(lines)
        run = emulated(kind, lines, graph)
        return _boxed(lambda args: run(args))

    collectives = _collectives()
    with caches(config.custom_partitioner_fn, None, force_non_lazy_backward_lowering=True):
        made: Callable[..., Any] = compile_fx.compile_fx(
            gm, list(inputs), inner_compile=inner, decompositions={**decompositions(), **collectives}
        )
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


def compiling() -> Any:
    """Inside, no other thread compiles: what of Inductor is replaced meanwhile would count for its code, too."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


_PAIRS = 8
"""Of kernels that read one tensor, so many that follow are looked at to be fused with each: all updates read the same
learning rate, and Inductor's 64 take an eighth of its time on a GPT-2 of twelve layers, for the same kernels."""


class Lower(Protocol):
    """What a graph is lowered to. ``likely``: it may well be the one that is compiled, so that its code is written,
    too."""

    def __call__(self, graph: GraphModule, *, likely: bool = True) -> Lowered: ...


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
    from torch._inductor import compile_fx, config

    _send_in_order()
    found: list[Any] = []

    def inner(given: GraphModule, example_inputs: Sequence[Any], **more: Any) -> Any:
        ahead = None if code is None else Ahead(code)

        def lowered(graph: GraphModule, *, likely: bool = True) -> Lowered:
            lines = lines_of(graph, example_inputs, more, "step", ahead if likely else None)
            if lines is None:
                raise Unsupported("a step that computes nothing", "there is nothing to lower")
            return lines

        made, lines = compiled_pass(choose(given, lowered), example_inputs, more, "step", code, ahead)
        found[:] = [made.current_callable, lines]
        return made

    pairs = min(_PAIRS, config.max_fusion_buffer_group_pairwise_attempts)
    with (
        config.patch(max_fusion_buffer_group_pairwise_attempts=pairs),
        caches(partitioner(code, None), code) as loaded,
        torch.no_grad(),
        failing("compiling the step"),
    ):
        compile_fx.compile_fx(gm, list(inputs), inner_compile=inner)
    if not found:
        assert code is not None
        if len(loaded) != 1:
            raise Outdated("a step was kept that computes nothing")
        found[:] = [loaded[0].current_callable, kept_lines(loaded[0], "step", code)]
    call, lowered_ = found
    return call, lowered_


def _collectives() -> dict[Any, Any]:
    """How a graph that is traced now is to send."""
    made = collective_decompositions()
    if made:
        _send_in_order()
    return made


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
