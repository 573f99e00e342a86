"""Every touch of the private interfaces behind ``torch.compile``: Dynamo and AOTAutograd, of one version.

The other half of ``compat``, under the same rule: nothing else in tightship may import them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)  # fmt: skip

from tightship.errors import Unsupported
from tightship.frontends.torch.compat import require_torch
from tightship.frontends.torch.compat_capture import scripted
from tightship.frontends.torch.compat_distributed import is_distributed
from tightship.frontends.torch.compat_inductor_masks import masked_writes

require_torch()

from torch import _decomp  # noqa: E402
from torch._dynamo import config as _dynamo_config  # noqa: E402
from torch._dynamo import convert_frame as _convert_frame  # noqa: E402
from torch._dynamo import utils as _utils  # noqa: E402
from torch._dynamo.backends.common import aot_autograd as _aot_autograd  # noqa: E402
from torch._dynamo.eval_frame import _debug_get_cache_entry_list as _entries  # noqa: E402
from torch._dynamo.exc import TorchDynamoException  # noqa: E402
from torch._dynamo.exc import unimplemented as _unimplemented  # noqa: E402
from torch._dynamo.variables import functions as _functions  # noqa: E402
from torch._functorch import config as _config  # noqa: E402
from torch._functorch import partitioners as _partitioners  # noqa: E402
from torch._functorch._aot_autograd import descriptors as _descriptors  # noqa: E402
from torch._guards import CompileContext, TracingContext  # noqa: E402
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException  # noqa: E402
from torch.fx import Graph, GraphModule, Node  # noqa: E402
from torch.fx._lazy_graph_module import _make_graph_module  # noqa: E402
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols as _free_unbacked_symbols  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

Compiler = Callable[[GraphModule, Sequence[Any]], Callable[[list[Any]], Any]]


# --- compiling ----------------------------------------------------------------------------------------------


def compile_training(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    partition: Callable[..., tuple[GraphModule, GraphModule]],
    forward: Compiler,
    backward: Compiler,
    inference: Compiler,
    symbolic: bool = False,
) -> Callable[..., Any]:
    """AOTAutograd on a Dynamo graph. ``partition(joint, number of forward outputs, static inputs)`` cuts the
    joint graph; the compilers return boxed functions (`boxed`). ``symbolic``: sizes of ``inputs`` are symbols."""

    def partition_fn(joint: GraphModule, _inputs: Any, *, num_fwd_outputs: int, **more: Any) -> Any:
        return partition(joint, num_fwd_outputs, tuple(more.get("static_lifetime_input_indices") or ()))

    compiler = _aot_autograd(
        fw_compiler=forward, bw_compiler=backward, inference_compiler=inference, partition_fn=partition_fn,
        decompositions=masked_writes(),
    )  # fmt: skip
    own = {"functionalize_rng_ops": False, "enable_autograd_cache": False, "backward_pass_autocast": "off"}
    with _config.patch(own), _as_eager(symbolic):
        made: Callable[..., Any] = compiler(gm, inputs)
    return made


@contextmanager
def _as_eager(symbolic: bool) -> Iterator[None]:
    """What AOTAutograd traces in here is what eager would run.

    Left alone it takes Python's decompositions of some ops (upsampling, recurrent layers) for eager's own kernels,
    which leave other last bits. Symbolic sizes need them. Dropout's stays: it saves a mask of bytes (`lower_joint`
    makes of it what eager computes).
    """
    taken = {} if symbolic else _decompositions()
    for op, key in taken:
        del op.py_kernels[key]
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for (op, key), kernel in taken.items():
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


def _decompositions() -> dict[tuple[Any, Any], Any]:
    """What Python's dispatcher runs in the place of the kernels above or at autograd, by op and key."""
    keys = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)
    ops = [op for op in _decomp.decomposition_table if isinstance(op, torch._ops.OpOverload)]
    dropout = torch.ops.aten.dropout.default
    return {(o, k): o.py_kernels[k] for o in ops if o is not dropout for k in keys if k in o.py_kernels}


def boxed(fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Marks a function that takes one list of arguments and empties it, so that nothing outlives its last
    use."""
    fn._boxed_call = True  # type: ignore[attr-defined]
    return fn


def never_donates() -> None:
    """Called while a backward pass is compiled: its saved tensors may be used again (``retain_graph``)."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def graph_is_kept() -> bool:
    """Whether the backward pass being run leaves what was saved alive (``retain_graph``,
    ``create_graph``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def graph_is_built() -> bool:
    """Whether the backward pass being run is to be differentiated again (``create_graph``), which AOTAutograd
    refuses only when that happens."""
    frame = sys._getframe() if graph_is_kept() else None
    while frame is not None:
        if frame.f_code.co_name == "_double_backward":
            return True
        frame = frame.f_back
    return False


@contextmanager
def outside() -> Iterator[None]:
    """Run on tensors of one's own in the middle of a compilation: no modes, no autograd, no Python
    kernels."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C._DisablePythonDispatcher())
        stack.enter_context(torch._C._DisableAutocast())
        yield


@contextmanager
def without_alias_check() -> Iterator[None]:
    """Inside, PyTorch does not look at what each op returns, as it does when compiled code runs for the first time,
    to find ops of others that return what they were given. It makes tensors of numbers on the way."""
    if type(_get_current_dispatch_mode()).__name__ == "_AnalyzeCustomOpInputOutputMode":
        with _pop_mode_temporarily():
            yield
    else:
        yield


# --- joint graphs -------------------------------------------------------------------------------------------


def is_tangent(node: Node) -> bool:
    return bool(_partitioners._is_tangent(node))


def tangent_strides(joint: GraphModule) -> dict[int, tuple[int, ...]]:
    """The strides that the gradient of each result was traced with, by the result's number. AOTAutograd copies those
    that come in others, and sums over them may be added up in another order. Nothing where sizes are symbols."""
    found = {}
    for n in joint.graph.find_nodes(op="placeholder"):
        output = getattr(n.meta.get("desc"), "output", None)
        if is_tangent(n) and isinstance(output, _descriptors.PlainAOTOutput):
            found[output.idx] = tuple(n.meta["val"].stride())
    return found if all(type(s) is int for row in found.values() for s in row) else {}


def watch_tangents(
    results: Any, wanted: Mapping[int, tuple[int, ...]], copied: Callable[[int, bool], None]
) -> None:
    """Calls ``copied`` with the number of a result of a compiled function whose gradient comes in other strides than
    those ``wanted``, and whether it is one number for all (a sum's), before the backward pass."""
    flat, rows, node = pytree.tree_leaves(results), [], None
    for k, strides in wanted.items():
        tensor = flat[k] if k < len(flat) else None
        if isinstance(tensor, torch.Tensor) and type(tensor.grad_fn).__name__ == "CompiledFunctionBackward":
            node = tensor.grad_fn
            rows.append((k, tensor.output_nr, tensor.shape, strides))

    def before(gradients: tuple[torch.Tensor | None, ...]) -> None:
        for k, number, shape, strides in rows:
            given = gradients[number]
            if given is None or given.layout is not torch.strided:
                continue
            if any(n > 1 and a != b for n, a, b in zip(shape, given.stride(), strides, strict=True)):
                copied(k, not any(given.stride()))

    if node is not None:
        node.register_prehook(before)


def is_backward(node: Node) -> bool:
    """Whether the node was traced in the backward pass."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


@contextmanager
def phases_marked(graph: GraphModule) -> Iterator[list[Node]]:
    """The nodes that a graph of forward pass, loss and backward pass says are of the backward pass, by its own marks
    (``custom["phase"]``, or ``autograd_backward``); meanwhile `is_backward` knows them."""
    nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
    named = [n for n in nodes if n.meta.get("custom", {}).get("phase") == "backward"]
    found = named or [n for n in nodes if n.meta.get("autograd_backward", False)]
    before = [n.meta.get("partitioner_tag") for n in found]
    for n in found:
        n.meta["partitioner_tag"] = "is_backward"
    try:
        yield found
    finally:
        for n, tag in zip(found, before, strict=True):
            if tag is None:
                del n.meta["partitioner_tag"]
            else:
                n.meta["partitioner_tag"] = tag


def mutates(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def result_node(node: Node, k: int) -> Node:
    """The node of the ``k``-th tensor that ``node`` gives; made if nobody has asked for it yet."""
    val = node.meta.get("val")
    if not isinstance(val, (list, tuple)):
        return node
    if not (k < len(val) and isinstance(val[k], torch.Tensor)):
        raise Unsupported(f"{node.target}", "its results are nested")
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == k:
            return user
    with node.graph.inserting_after(node):
        new = node.graph.call_function(operator.getitem, (node, k))
    new.meta = {**node.meta, "val": val[k]}
    return new


def wanted_by_forward(node: Node) -> bool:
    """Whether the node changes one of the caller's tensors in the forward pass."""
    return mutates(node) and not is_backward(node)


def split(joint: GraphModule, saved: Sequence[Node], outputs: int) -> tuple[GraphModule, GraphModule]:
    """Forward and backward graph of a joint graph of which ``saved`` cross the boundary, for AOTAutograd's
    wrappers.

    They have the inputs and outputs that the two passes have, with their metadata, and one call in between:
    what a plan does there cannot be said as two graphs (it runs some ops in both, and others in another
    form).
    """
    fw_out, bw_out, fw_desc, bw_desc = _partitioners._extract_fwd_bwd_outputs(joint, num_fwd_outputs=outputs)
    placeholders = joint.graph.find_nodes(op="placeholder")
    primals = [n for n in placeholders if _partitioners._is_primal(n)]
    tangents = [n for n in placeholders if is_tangent(n)]
    if len(primals) + len(tangents) != len(placeholders):
        raise Unsupported(
            "an input that is neither the caller's nor a tangent", "nobody knows what it is for"
        )
    saved_desc = [_descriptors.SavedForBackwardsAOTOutput(i) for i in range(len(saved))]
    forward = _one_call(primals, [*fw_out, *saved], [*fw_desc, *saved_desc])
    backward = _one_call([*saved, *tangents], bw_out, bw_desc)
    return _make_graph_module(joint, forward), _make_graph_module(joint, backward)


def saved_values(joint: GraphModule, budgets: Sequence[float]) -> dict[float, list[Node]]:
    """The nodes that PyTorch's partitioner saves at each ``activation_memory_budget``; the graph's first result is
    the forward pass's only one, and nodes of the backward pass are tagged."""
    with _disable_current_modes():
        info = _partitioners.classify_nodes(joint, [], 1)
        for node in reversed(joint.graph.nodes):  # what the partitioner notes on nodes before it chooses
            far = int(1e9)
            if node.op != "output" and not info.is_required_fw(node):
                far = 0
            elif node.op != "output":
                far = min([far, *(user.dist_from_bw + 1 for user in node.users)])
            node.dist_from_bw = far
        choose = _partitioners.choose_saved_values_set
        return {b: list(choose(joint.graph, info, memory_budget=b)) for b in budgets}


def planned_pass(*_tensors: Any) -> Any:
    """Stands in an fx graph for the steps of a plan; never called."""
    raise RuntimeError("a planned pass is run by its plan")


def _one_call(inputs: Sequence[Node], outputs: Sequence[Any], descs: Sequence[Any]) -> Graph:
    graph = Graph()
    for n in inputs:
        graph.placeholder(n.name).meta = dict(n.meta)
    call = graph.call_function(planned_pass, tuple(graph.nodes))
    given: list[Any] = []
    for k, x in enumerate(outputs):
        if isinstance(x, Node):
            new = graph.call_function(operator.getitem, (call, k))
            new.meta = dict(x.meta)
            given.append(new)
        else:
            given.append(x)
    output = graph.output(tuple(given))
    output.meta["desc"] = list(descs)
    return graph


def casts(joint: GraphModule) -> dict[int, int]:
    """How often the forward pass casts an input from float32 to a lower precision, by the input's position."""
    found: dict[int, int] = {}
    for k, n in enumerate(joint.graph.find_nodes(op="placeholder")):
        val = n.meta.get("val")
        lower = [
            u for u in n.users
            if u.target is torch.ops.aten._to_copy.default and not is_backward(u)
            and u.kwargs.get("dtype") in (torch.bfloat16, torch.float16)
        ]  # fmt: skip
        if lower and isinstance(val, torch.Tensor) and val.dtype is torch.float32:
            found[k] = len(lower)
    return found


_weight: Any = None


def autocast_context() -> Any:
    """What stands for the autocast context on the CPU or GPU that the caller is in: another object in another
    context, None outside of any and where nothing is cached. Autocast keeps a weight's cast as long as it lasts."""
    global _weight
    kind = next((d for d in ("cuda", "cpu") if torch.is_autocast_enabled(d)), None)
    if kind is None or not torch.is_autocast_cache_enabled():
        return None
    if _weight is None or _weight.device.type != kind:
        _weight = torch.nn.Parameter(torch.zeros(1, 1, device=kind))
    with torch.enable_grad():
        return torch.mm(_weight.detach(), _weight).grad_fn.next_functions[1][0]


def overwritten_inputs(joint: GraphModule) -> list[Node]:
    """Placeholders whose tensors AOTAutograd's wrapper overwrites between the two passes, with results of the
    forward graph. Raises ``Unsupported`` for one that cannot be found."""
    (output,) = joint.graph.find_nodes(op="output")
    by_desc = {n.meta.get("desc"): n for n in joint.graph.find_nodes(op="placeholder")}
    found = []
    for desc in output.meta.get("desc") or ():
        if isinstance(desc, _descriptors.InputMutationAOTOutput):
            node = by_desc.get(desc.mutated_input)
            if node is None:
                raise Unsupported(
                    f"writing to {desc.mutated_input.expr()}", "it is not an input of the graph"
                )
            found.append(node)
    return found


def unchecked_saving(node: Node) -> bool:
    """Whether PyTorch saves the node's tensor without looking for later changes; such ones come last."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


# --- what Dynamo knows --------------------------------------------------------------------------------------


def frame() -> tuple[int, str]:
    """Number of the Python frame being compiled, and the name of this compilation of it (``0/1``)."""
    found = CompileContext.current_compile_id()
    if found is None:
        return -1, "graph"
    number = found.frame_id
    return (-1 if number is None else int(number)), str(found)


def last_time() -> int | None:
    """How often Dynamo has compiled this Python frame now, if it will not do so again; else None.

    What then misses all guards runs in eager, and no backend is asked.
    """
    found = CompileContext.current_compile_id()
    if found is None or found.frame_compile_id is None:
        return None
    count = found.frame_compile_id + 1
    limit = min(_dynamo_config.recompile_limit, _dynamo_config.accumulated_recompile_limit)
    return count if count == limit else None


@dataclass(frozen=True, slots=True)
class Break:
    """Where the caller's code goes on after a graph, to be compiled on its own, and why Dynamo could not go on.

    ``runs``: whether ops may run there, outside of all graphs. ``by_ddp``: whether there was no need, but for the
    buckets of DistributedDataParallel.
    """

    place: str
    why: str
    runs: bool
    by_ddp: bool


_RUNS_NOTHING: Final = (
    "Call to `torch._dynamo.graph_break()`",
    "logging.Logger method",
    "generic_jump",  # a branch on data: a number is read
    "Unsupported Tensor.item()",
)


def graph_break(gm: GraphModule) -> Break | None:
    """What follows the graph; None if it is the last of its frame."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    stack = reason.user_stack or []
    place = f"{stack[-1].filename.rpartition('/')[2]}:{stack[-1].lineno}" if stack else "an unknown place"
    text = str(reason.reason)
    runs = not text.startswith(_RUNS_NOTHING) and "builtin operator `print`" not in text
    why = _last_break() if text == "step_unsupported" else _first_line(text)
    return Break(place, why, runs, text.startswith("DDPOptimizer"))


def _last_break() -> str:
    """Why Dynamo gave up the rest of a function: it says so only where it counts its graph breaks."""
    reasons = list(_utils.counters["graph_break"])
    said = _first_line(reasons[-1]) if reasons else "it does not trace that call"
    return f"{said}; the rest of that function is left out, too"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].rstrip(".")


_LEFT: Final = (
    "Dynamo leaves torch's own modules to their caller, which is not compiled: torch.compile(module, …) of this one "
    "compiles all of it, which module.compile(…) does not"
)

Skipped = Callable[[Any, dict[str, Any] | None, str, str, bool], object]


def watch_frames(backend: Any, skipped: Skipped) -> None:
    """Calls ``skipped(session, options, what, why, first)`` when Dynamo gives up a frame that was to be compiled with
    ``backend`` and runs it as it is, before it does, and for each of torch's modules that is then called by itself
    (``first`` is False). What it returns is the next call's ``session``, and lives as long as the compiled code.

    Dynamo asks no backend then, has no hook for it, and passes over that code from then on, in other models too: here
    only in this one.
    """
    wrapper = _convert_frame.CatchErrorsWrapper
    original = getattr(wrapper.__call__, "_tightship_original", wrapper.__call__)

    def call(self: Any, frame: Any, cache_entry: Any, state: Any) -> Any:
        kwargs = _kwargs_of(self, backend)
        if kwargs is None:
            return original(self, frame, cache_entry, state)
        given_up = self.__dict__.setdefault("_tightship_given_up", {})
        if frame.f_code in given_up:
            return given_up[frame.f_code]
        before = _utils.get_compilation_metrics()[-1:]
        # Each size is compiled anew in any case.
        with _dynamo_config.patch(automatic_dynamic_shapes=False), _scripts_left_out():
            found = original(self, frame, cache_entry, state)
        last = _utils.get_compilation_metrics()[-1:]
        why = last[0].fail_reason if last and last != before else None
        module = _module_passed_over(frame, found)
        if found.guarded_code is None and (why or module):
            what = _where(frame.f_code) if why else module
            why = _first_line(why or _LEFT)
            known = getattr(self, "_tightship_session", None)
            self._tightship_session = skipped(known, kwargs.get("options"), what, why, not module)
            found.apply_to_code = False
            given_up[frame.f_code] = found
        return found

    call._tightship_original = original  # type: ignore[attr-defined]
    wrapper.__call__ = call


@contextmanager
def _scripts_left_out() -> Iterator[None]:
    """Dynamo breaks the graph at TorchScript that gradients go through. It would trace the Python code that was
    scripted, whose last bits are others once TorchScript has optimized itself."""
    owner = _functions.WrapperUserFunctionVariable
    original = owner.call_function

    def call(self: Any, *args: Any) -> Any:
        script = isinstance(self.wrapper_obj, torch._C.ScriptFunction)
        if script and torch.is_grad_enabled() and torch._C._get_graph_executor_optimize():
            error = scripted(str(self.wrapper_obj.name))
            _unimplemented(gb_type=str(error.what), context="", explanation=error.why, hints=[])
        return original(self, *args)

    owner.call_function = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        owner.call_function = original  # type: ignore[method-assign]


def _where(code: Any) -> str:
    file = code.co_filename.rpartition("/")[2]
    if file == "external_utils.py":  # Dynamo's own wrapper around a module of torch's
        return "the compiled module"
    return f"{code.co_name} ({file}:{code.co_firstlineno})"


def _module_passed_over(frame: Any, found: Any) -> str:
    """Which of torch's own modules is called outside of all graphs: Dynamo compiles those with callers.

    DistributedDataParallel is none of them: it calls its module, which is compiled by itself, and sends.
    """
    code = frame.f_code
    if code.co_name != "forward" or "skipfiles" not in (found.skip_reason or "") or not code.co_argcount:
        return ""
    module = frame.f_locals.get(code.co_varnames[0])
    calls = isinstance(module, torch.nn.Module) and not isinstance(
        module, torch.nn.parallel.DistributedDataParallel
    )
    return f"{type(module).__name__}.forward" if calls else ""


def frame_session(compiled: Any) -> Any:
    """What `watch_frames` keeps for a compiled module or function, None if no frame of it was given up."""
    for callback in _callbacks(compiled):
        found = getattr(callback, "_tightship_session", None)
        if found is not None:
            return found
    return None


def _kwargs_of(callback: Any, backend: Any) -> dict[str, Any] | None:
    """What ``backend`` is given by torch.compile, if it is what ``callback`` compiles with."""
    while callback is not None:
        if getattr(callback, "compiler_fn", None) is backend:
            kwargs = getattr(callback, "kwargs", None)
            return kwargs if isinstance(kwargs, dict) else {}
        callback = getattr(callback, "_torchdynamo_orig_backend", None)
    return None


def source_name(node: Node) -> str:
    """The Python expression of a Dynamo placeholder's tensor
    (``L['self']._modules['fc']._parameters['weight']``)."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def cut_at_buckets(how: Any) -> Any:
    """Whether Dynamo cuts a model in DistributedDataParallel into a graph a bucket, from here on; returns whether it
    did."""
    before, _dynamo_config.optimize_ddp = _dynamo_config.optimize_ddp, how
    return before


def trained_parameters(gm: GraphModule) -> list[torch.Tensor]:
    """The parameters that a graph has gradients for, but those that are DTensors."""
    found = [example_of(n) for n in gm.graph.find_nodes(op="placeholder")]
    return [
        t
        for t in found
        if isinstance(t, torch.nn.Parameter) and t.requires_grad and not is_distributed(type(t.data))
    ]


def example_of(node: Node) -> torch.Tensor | None:
    """The caller's tensor that a Dynamo placeholder stood for when it was traced, if it is still there."""
    found = getattr(node.meta.get("grapharg"), "example", None)
    return found if isinstance(found, torch.Tensor) else None


def is_control_flow(error: BaseException) -> bool:
    """Whether an exception is Dynamo's way of starting over, and none of a backend's business."""
    return isinstance(error, TorchDynamoException)


def sized_by_data(gm: GraphModule) -> Node | None:
    """The first node of a Dynamo graph whose result has a size that follows from data."""
    for n in gm.graph.nodes:
        value = n.meta.get("example_value")
        if isinstance(value, torch.Tensor) and _free_unbacked_symbols(value):
            return n
    return None


def in_our_words(error: Exception) -> Exception:
    """``error``; where PyTorch's says no more than that an op's result follows from data, with what to do."""
    if not isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return error
    return Unsupported(
        f"{error} in a graph or its gradient",
        "its result has a size or a number that follows from data, as gradients of what x[mask] = v writes have, and "
        "sparse ones",
        "write torch.where(mask, v, x), keep it out of the compiled region, or use tightship.fit",
    )


def fixed_sizes(gm: GraphModule, inputs: Sequence[Any]) -> bool:
    """Makes every symbolic size of the graph's inputs the number it is now; whether there were any.

    Dynamo guards on what was asked, so that other sizes are compiled anew.
    """
    symbolic = False
    for x in inputs:
        if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            symbolic = True
            int(x) if isinstance(x, torch.SymInt) else bool(x) if isinstance(x, torch.SymBool) else float(x)
        elif isinstance(x, torch.Tensor):
            for n in (*x.shape, *x.stride(), x.storage_offset()):
                if isinstance(n, torch.SymInt):
                    symbolic = True
                    int(n)
    return symbolic


def compiled_options(compiled: Any) -> dict[str, Any] | None:
    """The ``options`` a module or function was given to ``torch.compile`` with, the same object; None if
    none."""
    for callback in _callbacks(compiled):
        kwargs = getattr(callback, "kwargs", None)
        if isinstance(kwargs, dict) and hasattr(callback, "compiler_fn"):
            return kwargs.get("options")
    return None


def equal_options(compiled: Any) -> list[Mapping[str, Any]]:
    """The ``options`` of other calls of torch.compile whose code Dynamo runs for ``compiled``, too: it keeps code by
    function, and takes backends with equal options for one."""
    own = next((c for c in _callbacks(compiled) if not hasattr(c, "_torchdynamo_orig_backend")), None)
    apart = {getattr(c, "_isolate_recompiles_id", -1) for c in _contexts(compiled)}
    found: list[Mapping[str, Any]] = []
    for code in _codes(compiled):
        for entry in _entries(code):
            made_by = entry.backend
            if made_by is own or made_by != own or entry.isolate_recompiles_id not in apart:
                continue
            options = made_by.kwargs.get("options")
            found += [] if any(options is x for x in found) else [options]
    return found


def _codes(compiled: Any) -> set[Any]:
    """The code objects that Dynamo compiles for a module or function."""
    module = getattr(compiled, "_orig_mod", compiled)
    outer = (compiled, getattr(compiled, "forward", None), getattr(compiled, "_compiled_call_impl", None))
    called = [getattr(f, "_torchdynamo_orig_callable", None) for f in outer]
    found = (getattr(f, "__code__", None) for f in (*called, getattr(module, "forward", None)))
    return {code for code in found if code is not None}


def _callbacks(compiled: Any) -> Iterator[Any]:
    """From what Dynamo calls with each frame down to what torch.compile was given."""
    for context in _contexts(compiled):
        callback = getattr(context, "callback", None)
        while callback is not None:
            yield callback
            callback = getattr(callback, "_torchdynamo_orig_backend", None)


def _contexts(compiled: Any) -> Iterator[Any]:
    implementation = getattr(compiled, "_compiled_call_impl", None)  # Module.compile
    for thing in (compiled, implementation, getattr(implementation, "__wrapped__", None)):
        if (context := getattr(thing, "dynamo_ctx", None)) is not None:
            yield context
        for cell in getattr(thing, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "callback"):
                yield cell.cell_contents
