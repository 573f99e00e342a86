"""Every touch of AOTAutograd's private interfaces, from which torch.compile has forward and backward passes."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)  # fmt: skip

from tightship.errors import Unsupported
from tightship.frontends.torch.compat import require_torch
from tightship.frontends.torch.compat_inductor_masks import masked_writes

require_torch()

from torch._dynamo.backends.common import aot_autograd as _aot_autograd  # noqa: E402
from torch._functorch import config as _config  # noqa: E402
from torch._functorch import partitioners as _partitioners  # noqa: E402
from torch._functorch._aot_autograd import descriptors as _descriptors  # noqa: E402
from torch._guards import TracingContext  # noqa: E402
from torch.fx import Graph, GraphModule, Node  # noqa: E402
from torch.fx._lazy_graph_module import _make_graph_module  # noqa: E402
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
        decompositions=masked_writes(), keep_inference_input_mutations=True,
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
    return {(o, k): o.py_kernels[k] for o in _decomposed() for k in keys if k in o.py_kernels}


@functools.cache
def _decomposed() -> tuple[Any, ...]:
    """ATen's ops that may have such kernels, whether they are in a table or not. Not those without which sizes follow
    from data."""
    aten, found = torch.ops.aten, []
    left = {aten.dropout.default, aten.one_hot.default, aten.tensor_split.tensor_indices_or_sections}
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(aten, base, None), overload or "default", None) if "aten::" in name else None
        if isinstance(op, torch._ops.OpOverload) and op not in left:
            found.append(op)
    return tuple(found)


def boxed(fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Marks a function that takes one list of arguments and empties it, so that nothing outlives its last
    use."""
    fn._boxed_call = True  # type: ignore[attr-defined]
    return fn


def never_donates() -> None:
    """Called while a backward pass is compiled: its saved tensors may be used again (``retain_graph``), or those are
    written over that PyTorch would let it write over, by copies of them alone."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def graph_is_kept() -> bool:
    """Whether the backward pass being run leaves what was saved alive (``retain_graph``,
    ``create_graph``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def in_backward() -> bool:
    """Whether a backward pass is running."""
    return int(torch._C._current_graph_task_id()) != -1


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
    kernels. What runs is not told that it is compiled: optimizers step otherwise then."""
    with ExitStack() as stack:
        stack.callback(setattr, torch.compiler, "_is_compiling_flag", torch.compiler._is_compiling_flag)
        torch.compiler._is_compiling_flag = False
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
