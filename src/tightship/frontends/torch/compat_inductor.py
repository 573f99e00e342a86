"""Every touch of PyTorch Inductor's private interfaces, of one version: partition, lower without kernels, compile.

A part of ``compat``, under the same rule: nothing else in tightship may import Inductor. `require_inductor` looks
for every hook before anything is compiled and raises ``Unsupported`` naming the ones that are gone.

Inductor turns a graph into calls of kernels and, between them, lines that allocate, reuse and free buffers. `lower`
stops there, before any kernel is written or built; `compile_graph` goes on. Both give the lines as `Lowered`.
"""

from __future__ import annotations

import hashlib
import importlib
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, Protocol

import torch
from torch.fx import GraphModule, Node

from tightship.errors import TightshipError, Unsupported
from tightship.frontends.torch.compat import VERSION, require_torch
from tightship.frontends.torch.compat_inductor_lines import ORIGIN, Event, Kernel, Lowered, read_lines

__all__ = [
    "HOOKS",
    "ORIGIN",
    "Code",
    "Event",
    "Kernel",
    "Lowered",
    "Outdated",
    "Pair",
    "as_if_compiling",
    "compile_flat",
    "compile_graph",
    "digest",
    "draws",
    "dry_graph",
    "extract",
    "lower",
    "of_module",
    "origin",
    "overwritten_count",
    "require_inductor",
    "stock_pair",
    "stock_saved",
    "traced",
    "with_backward",
]

HOOKS: Final = (
    ("torch._inductor.compile_fx", "compile_fx"),
    ("torch._inductor.compile_fx", "compile_fx_inner"),
    ("torch._inductor.compile_fx", "compile_fx_forward"),
    ("torch._inductor.compile_fx", "compile_fx_backward"),
    ("torch._inductor.compile_fx", "create_compiler_config_extra"),
    ("torch._inductor.compile_fx", "get_num_model_outputs"),
    ("torch._inductor.config", "custom_partitioner_fn"),
    ("torch._inductor.config", "fx_graph_cache"),
    ("torch._inductor.config", "graph_partition"),
    ("torch._inductor.config", "memory_planning"),
    ("torch._inductor.custom_graph_pass", "CustomGraphPass"),
    ("torch._inductor.custom_graph_pass", "CustomPartitionerFn"),
    ("torch._inductor.custom_graph_pass", "get_custom_graph_passes"),
    ("torch._inductor.exc", "InductorError"),
    ("torch._inductor.output_code", "CompiledFxGraph"),
    ("torch._inductor.choices", "InductorChoices.can_fuse_horizontal"),
    ("torch._inductor.codegen.cpp", "CppKernelProxy.codegen_functions"),
    ("torch._inductor.codegen.cpp", "CppScheduling.kernel_proxy_cls"),
    ("torch._inductor.codegen.cpp", "OuterLoopFusedSchedulerNode"),
    ("torch._inductor.codegen.common", "device_codegens"),
    ("torch._inductor.codegen.common", "init_backend_registration"),
    ("torch._inductor.codegen.common", "DeviceCodegen"),
    ("torch._inductor.codegen.wrapper", "PythonWrapperCodegen.run_wrapper_ir_passes"),
    ("torch._inductor.codegen.wrapper", "PythonWrapperCodegen.create"),
    ("torch._inductor.codegen.wrapper", "PythonWrapperCodegen.get_graph_outputs"),
    ("torch._inductor.codegen.wrapper", "AllocateLine"),
    ("torch._inductor.codegen.wrapper", "ReuseLine"),
    ("torch._inductor.codegen.wrapper", "ReinterpretLine"),
    ("torch._inductor.codegen.wrapper", "FreeLine"),
    ("torch._inductor.codegen.wrapper", "FreeIfNotReusedLine"),
    ("torch._inductor.codegen.wrapper", "ExternKernelAllocLine"),
    ("torch._inductor.codegen.wrapper", "ExternKernelOutLine"),
    ("torch._inductor.codegen.wrapper", "MultiOutputLine"),
    ("torch._inductor.select_algorithm", "extern_kernels"),
    ("torch._functorch.partitioners", "min_cut_rematerialization_partition"),
    ("torch._functorch.partitioners", "_extract_fwd_bwd_modules"),
    ("torch._functorch.partitioners", "reordering_to_mimic_autograd_engine"),
    ("torch._functorch.partitioners", "raise_getitems"),
    ("torch._functorch.partitioners", "_has_tag_must_be_in_backward"),
    ("torch._functorch.config", "activation_memory_budget"),
    ("torch._functorch.config", "force_non_lazy_backward_lowering"),
    ("torch._functorch.config", "enable_autograd_cache"),
    ("torch._functorch.config", "donated_buffer"),
    ("torch._functorch._aot_autograd.graph_compile", "collect_fw_donated_buffer_idxs"),
    ("torch._functorch._aot_autograd.descriptors", "InputMutationAOTOutput"),
    ("torch._guards", "TracingContext.try_get"),
    ("torch.fx.traceback", "preserve_node_meta"),
    ("torch.fx.traceback", "current_meta"),
    ("torch.compiler", "_compile_session_context"),
)
"""What is leaned on: (module, name)."""


def require_inductor() -> None:
    """Raises ``Unsupported``, naming every hook of `HOOKS` that the installed PyTorch does not have."""
    require_torch()
    gone = [f"{module}.{name}" for module, name in HOOKS if not _has(module, name)]
    if gone:
        raise Unsupported(
            "compiled mode on this PyTorch",
            f"it leans on private interfaces of Inductor {VERSION} that are not here: {', '.join(gone)}",
            f'install an unmodified torch>={VERSION},<2.14, or use mode="exact"',
        )


def _has(module: str, name: str) -> bool:
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return True


# --- hooks into a compilation ---


class _Stopped(BaseException):
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
                raise _Stopped

    return Wrapper


SEGMENT: Final = "tightship_segment"
"""What a node's metadata says of its place in a planned pass: nodes of two segments are not computed side by side."""


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


# --- partitions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pair:
    """Forward and backward graph of a joint graph. ``saved``: how many results of the first the second takes."""

    forward: GraphModule
    backward: GraphModule
    outputs: int

    @property
    def saved(self) -> tuple[str, ...]:
        """What crosses the boundary, by name."""
        return tuple(x.name for x in _results(self.forward)[self.outputs :] if isinstance(x, Node))


def _results(gm: GraphModule) -> tuple[Any, ...]:
    (output,) = gm.graph.find_nodes(op="output")
    return tuple(output.args[0])


def draws(node: Node) -> bool:
    """Whether a node's result is another one when it runs again."""
    if node.op != "call_function":
        return False
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or "inductor_seeds" in str(node.target)


def overwritten_count(pair: Pair) -> int:
    """How many of the forward pass's results, the first ones, AOTAutograd copies into the caller's tensors and
    drops."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    (output,) = pair.forward.graph.find_nodes(op="output")
    return sum(isinstance(d, InputMutationAOTOutput) for d in output.meta.get("desc") or ())


def _copied(gm: GraphModule) -> GraphModule:
    graph = torch.fx.Graph()
    values: dict[Node, Node] = {}
    output = graph.graph_copy(gm.graph, values)
    (old,) = gm.graph.find_nodes(op="output")
    graph.output(output).meta = dict(old.meta)
    for node, new in values.items():
        new.meta = dict(node.meta)
    made = GraphModule(gm, graph)
    made.meta = dict(gm.meta)
    return made


def digest(joint: GraphModule, static: Sequence[int]) -> str:
    """Names everything that Inductor's lines for a joint graph depend on: the graph, with the sizes in it, which
    inputs stay where they are, and Inductor's settings."""
    from torch._functorch import config as aot_config
    from torch._inductor import config

    def sizes(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return tuple(x.shape), tuple(x.stride()), x.storage_offset(), str(x.dtype), str(x.device)
        return tuple(map(sizes, x)) if isinstance(x, (list, tuple)) else str(x)

    h = hashlib.sha256(repr((VERSION, torch.__version__, tuple(static))).encode())
    for n in joint.graph.nodes:
        row = (n.op, n.name, str(n.target), str(n.args), str(n.kwargs), sizes(n.meta.get("val")), draws(n))
        h.update(repr(row).encode())
    for settings in (config.save_config_portable(), aot_config.save_config_portable()):
        settings = {k: v for k, v in settings.items() if "partitioner_fn" not in k}
        h.update(repr(sorted((k, str(v)) for k, v in settings.items())).encode())
    return h.hexdigest()


def stock_pair(joint: GraphModule, inputs: Any, outputs: int, static: Sequence[int], budget: float) -> Pair:
    """What Inductor itself would choose at that ``activation_memory_budget``; where that draws random numbers twice,
    which would give wrong gradients, the same with those numbers saved."""
    from torch._functorch import config, partitioners

    with config.patch(activation_memory_budget=budget):
        forward, backward = partitioners.min_cut_rematerialization_partition(
            _copied(joint), inputs, num_fwd_outputs=outputs, static_lifetime_input_indices=list(static)
        )
    pair = Pair(forward, backward, outputs)
    try:
        return _checked(pair)
    except (
        Unsupported
    ):  # below a budget of 1 it draws dropout's seeds anew in the backward pass: here they are saved
        return extract(joint, outputs, pair.saved)


def stock_saved(gm: GraphModule, late: Collection[Node], outputs: int, budget: float) -> tuple[str, ...]:
    """What Inductor would save at that ``activation_memory_budget`` of a graph that computes gradients and updates by
    itself, by name. ``late``: the nodes that are of its backward pass or its update."""
    from torch._functorch import config, partitioners

    names = {n.name for n in late}
    joint = _copied(gm)
    written: tuple[list[Node], list[Node]] = [], []
    for n in list(joint.graph.nodes):
        if n.name in names:
            n.meta["partitioner_tag"] = "must_be_in_backward"
        if n.target is torch.ops.aten.copy_.default:
            written[n.args[1].name in names].append(n.args[1])
            n.replace_all_uses_with(n.args[0])
            joint.graph.erase_node(n)
    (end,) = joint.graph.find_nodes(op="output")
    first = [*_nodes(end.args[0][:outputs]), *written[False]]
    end.args = ((*first, *_nodes(end.args[0][outputs:]), *written[True]),)
    end.meta.pop("desc", None)
    with config.patch(activation_memory_budget=budget):
        forward, _ = partitioners.min_cut_rematerialization_partition(joint, (), num_fwd_outputs=len(first))
    return tuple(x.name for x in _nodes(_results(forward)[len(first) :]))


def _nodes(results: Sequence[Any]) -> list[Node]:
    return [x for x in results if isinstance(x, Node)]


def extract(joint: GraphModule, outputs: int, saved: Sequence[str]) -> Pair:
    """The partition that saves the nodes of these names, and what draws random numbers, and computes again whatever
    else the backward pass needs, each node right before its first use. Raises
    ``Unsupported`` where that would draw random numbers twice."""
    from torch._functorch import partitioners

    gm = _copied(joint)
    names = {*saved, *(part.name for n in gm.graph.nodes if draws(n) for part in [n, *_parts(n)])}
    nodes = [n for n in gm.graph.nodes if n.name in names]
    nodes.sort(key=lambda n: bool(n.meta.get("saved_tensor_with_no_vc_check", False)))
    forward, backward = partitioners._extract_fwd_bwd_modules(gm, nodes, [], num_fwd_outputs=outputs)
    backward = partitioners.reordering_to_mimic_autograd_engine(backward)
    pair = Pair(partitioners.raise_getitems(forward), partitioners.raise_getitems(backward), outputs)
    _inputs_in_order(pair)
    return _checked(pair)


def _parts(node: Node) -> list[Node]:
    return [u for u in node.users if u.target is operator.getitem]


def _inputs_in_order(pair: Pair) -> None:
    """Puts the backward graph's inputs as AOTAutograd gives them: what is saved, in the forward graph's order, then
    tangents. Reordering leaves inputs that are read late behind the tangents."""
    graph = pair.backward.graph
    given = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    rest = [name for name in given if name not in pair.saved]
    first = next(iter(graph.nodes))
    for name in (*pair.saved, *rest):
        if given[name] is first:
            first = first.next
        else:
            first.prepend(given[name])
    pair.backward.recompile()


def with_backward(pair: Pair, backward: torch.fx.Graph) -> Pair:
    """The pair with another backward graph, of the same inputs and results. Raises ``Unsupported`` as `extract`."""
    backward.lint()
    for node in backward.nodes:
        if node.op in ("call_function", "get_attr"):
            node.meta["autograd_backward"] = True
    module = GraphModule(pair.backward, backward)
    module.meta = dict(pair.backward.meta)
    return _checked(Pair(pair.forward, module, pair.outputs))


def origin(node: Node) -> str:
    """The name in the joint graph of what a node is a copy of."""
    return str(node.meta.get(ORIGIN, node.name))


def _checked(pair: Pair) -> Pair:
    first = {n.name for n in pair.forward.graph.nodes if draws(n)}
    given = [n.name for n in pair.backward.graph.nodes if n.op == "placeholder"]
    if tuple(given[: len(pair.saved)]) != pair.saved:
        raise Unsupported(
            "a partition whose backward pass takes what is saved in another order",
            "it would get other tensors",
            "report this",
        )
    late = [origin(n) for n in pair.backward.graph.nodes if draws(n)]
    twice = [name for k, name in enumerate(late) if name in first or name in late[:k]]
    if twice:
        raise Unsupported(
            f"drawing {', '.join(twice)} again in the backward pass",
            "the numbers would be others",
            "report this",
        )
    return pair


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
    gm = _copied(pair.forward)
    with _stopping(made), _foreseen(pair, static):
        compile_fx.compile_fx_forward(
            gm, inputs, num_orig_model_outputs=orig_outputs, num_example_inputs=orig_inputs,
            compiler_config_extra=extra, inner_compile=compile_fx.compile_fx_inner,
        )  # fmt: skip
    with _stopping(made), _foreseen(pair, static):
        compile_fx.compile_fx_backward(
            _copied(pair.backward), _restrided(pair, made[0]), compiler_config_extra=extra,
            inner_compile=compile_fx.compile_fx_inner,
        )  # fmt: skip
    forward, backward = made
    return forward, backward


@contextmanager
def _scalar_kernels() -> Iterator[None]:
    """Inside, C++ is written for one kind of each kernel, the first: what buffers it needs is decided there. Its
    vectorized kinds take as long again and change nothing of that. Loops fused on the outside are compared first."""
    from torch._inductor.codegen.cpp import CppKernelProxy, CppScheduling, OuterLoopFusedSchedulerNode

    whole, given = CppScheduling.codegen_node, CppScheduling.kernel_proxy_cls

    class Scalar(CppKernelProxy):
        def codegen_functions(self, fn_list: Any, var_sizes_list: Any) -> None:
            self.picked_vec_isa = None
            super().codegen_functions(fn_list, var_sizes_list)

    def codegen_node(self: Any, node: Any) -> None:
        self.kernel_proxy_cls = given if isinstance(node, OuterLoopFusedSchedulerNode) else Scalar
        try:
            whole(self, node)
        finally:
            del self.kernel_proxy_cls

    CppScheduling.codegen_node = codegen_node
    try:
        yield
    finally:
        CppScheduling.codegen_node = whole


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
        suppress(_Stopped),
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
    outs = [x.meta.get("val") if isinstance(x, Node) else None for x in _results(pair.forward)]
    late = [x.meta.get("val") if isinstance(x, Node) else None for x in _results(pair.backward)]
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
    from torch._inductor import compile_fx

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

    with _caches(_partitioner(code, cut), code, force_non_lazy_backward_lowering=True) as loaded:
        made: Callable[..., Any] = compile_fx.compile_fx(gm, inputs, inner_compile=inner)
    if code is not None and not made_here:
        if not loaded:
            raise Outdated("a pass was kept that computes nothing")
        kinds = ("inference",) if len(loaded) == 1 else ("forward", "backward")
        for kind, graph in zip(kinds, loaded, strict=True):
            lowered = _kept_lines(graph, kind, code)
            graph.current_callable = finished(kind, lowered, graph.current_callable)
    return made


def _partitioner(code: Code | None, cut: Callable[..., Any] | None) -> Any:
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
def _caches(partitioner: Any, code: Code | None, **aot: Any) -> Iterator[list[Any]]:
    """Inside, Inductor compiles for `compile_graph` and `compile_flat`, with its caches as ``code`` says. Lists every
    pass that it compiles or loads."""
    from torch._functorch import config as aot_config
    from torch._inductor import config

    own = {"custom_partitioner_fn": partitioner, "graph_partition": False, "memory_planning": False}
    if code is None:
        own["fx_graph_cache"] = False
    if code is None or not code.joint:
        aot["enable_autograd_cache"] = False
    _forget_strides()
    with config.patch(own), aot_config.patch(aot), _compiled_graphs() as loaded, _errors_unwrapped():
        yield loaded


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
            own["post_grad_custom_pre_pass"] = [*before, _named(graph, code.version)]
        with config.patch(own), _recording(stop=False) as recorder:
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
            return made, _kept_lines(made, kind, code)
        _forget_strides()
    raise AssertionError


def _forget_strides() -> None:
    """A forward pass is compiled anew: what one before has said of its results goes."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is not None and context.output_strides:
        context.output_strides.clear()


def _named(graph: GraphModule, version: str) -> Any:
    """A pass that does nothing, and has in its name what Inductor's key of a graph has not: where kernels may not be
    computed side by side, what the lines are called by, and which inputs the pass may write over."""
    from torch._guards import TracingContext
    from torch._inductor.custom_graph_pass import CustomGraphPass

    context = TracingContext.try_get()
    donated = None if context is None else getattr(context.fw_metadata, "bw_donated_idxs", None)
    rows = [(n.name, n.meta.get(SEGMENT), origin(n)) for n in graph.graph.nodes]
    name = hashlib.sha256(repr((version, rows, donated)).encode()).hexdigest()

    class Named(CustomGraphPass):  # type: ignore[misc]
        def __call__(self, _graph: torch.fx.Graph) -> None:
            """Changes nothing."""

        def uuid(self) -> str:
            return f"tightship {name}"

    return Named()


def _kept_lines(made: Any, kind: str, code: Code) -> Lowered:
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
        shown, made = _copied(graph), None
        recording = _recording(stop=True)
        with (
            config.patch(fx_graph_cache=False),
            _scalar_kernels(),
            recording as recorder,
            suppress(_Stopped),
        ):
            made = compile_fx.compile_fx_inner(graph, example_inputs, **more)
        if not recorder.found:
            return made
        _tell_strides(recorder.found[0])
        run = emulated(kind, recorder.found[0], shown)
        return _boxed(lambda args: run(args))

    with _caches(config.custom_partitioner_fn, None, force_non_lazy_backward_lowering=True):
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


def traced(fn: Callable[..., Any], inputs: Sequence[torch.Tensor], mode: Any) -> GraphModule:
    """The fx graph of the ops that a function calls on fake tensors of ``mode``."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with mode, torch.fx.traceback.preserve_node_meta():
        return make_fx(fn, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)


def of_module(path: str | None) -> None:
    """What is traced from here on is of the forward pass, in the module of that path and those around it; None: of
    the backward pass or the update."""
    parts = [] if path is None else ["model", *filter(None, path.split("."))]
    paths = [".".join(parts[: k + 1]) for k in range(len(parts))]
    torch.fx.traceback.current_meta["nn_module_stack"] = {p: (p, "") for p in paths}


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """PyTorch's own code does as it would for a compiler inside."""
    with torch.compiler._compile_session_context():
        yield


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
    from torch._inductor import compile_fx, config

    found: list[Any] = []

    def inner(graph: GraphModule, example_inputs: Sequence[Any], **more: Any) -> Any:
        def lowered(candidate: GraphModule) -> Lowered:
            recording = _recording(stop=True)
            with (
                config.patch(fx_graph_cache=False),
                _scalar_kernels(),
                recording as recorder,
                suppress(_Stopped),
            ):
                compile_fx.compile_fx_inner(_copied(candidate), example_inputs, **more)
            if not recorder.found:
                raise Unsupported("a step that computes nothing", "there is nothing to lower")
            return recorder.found[0]

        made, lines = _made(_copied(choose(graph, lowered)), example_inputs, more, "step", code)
        found[:] = [made.current_callable, lines]
        return made

    with _caches(_partitioner(code, None), code) as loaded, torch.no_grad():
        compile_fx.compile_fx(gm, list(inputs), inner_compile=inner)
    if not found:
        assert code is not None
        if len(loaded) != 1:
            raise Outdated("a step was kept that computes nothing")
        found[:] = [loaded[0].current_callable, _kept_lines(loaded[0], "step", code)]
    call, lowered_ = found
    return call, lowered_


def _boxed(fn: Any) -> Any:
    fn._boxed_call = True
    return fn
