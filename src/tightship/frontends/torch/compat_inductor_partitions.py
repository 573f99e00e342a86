"""Partitions of a joint graph: Inductor's own, and those that save what they are told to.

A part of ``compat``, under the same rule as `compat_inductor`: private interfaces of one version.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node

from tightship.errors import Unsupported
from tightship.frontends.torch.compat import VERSION
from tightship.frontends.torch.compat_compile import (
    is_backward,
    is_tangent,
    mutates,
    overwritten_inputs,
    wanted_by_forward,
)
from tightship.frontends.torch.compat_inductor_lines import AS_IT_IS, EARLY, EXISTS, LEAN, ORIGIN
from tightship.frontends.torch.compat_inductor_tracing import failing
from tightship.frontends.torch.compat_ops import is_random
from tightship.frontends.torch.compiled_collectives import is_wait, number_of

__all__ = [
    "Pair", "after_tangents", "as_planned", "copied", "digest", "draws", "effect_of", "extract", "is_view",
    "mark_lean", "merged", "origin", "overwritten", "overwritten_count", "realize_as_is", "results_of", "runs_once",
    "sent", "stock_pair", "stock_saved", "turns_to_channels_last", "with_backward", "without_tokens",
]  # fmt: skip


_REGION: Final = "mutation_region_id"
"""Where Inductor notes of a node how many writes come before it (`compute_mutation_region_ids`): what has as many
before it may be fused."""


@dataclass(frozen=True, eq=False)
class Pair:
    """Forward and backward graph of a joint graph. ``saved``: how many results of the first the second takes."""

    forward: GraphModule
    backward: GraphModule
    outputs: int

    @property
    def saved(self) -> tuple[str, ...]:
        """What crosses the boundary, by name."""
        return tuple(x.name for x in results_of(self.forward)[self.outputs :] if isinstance(x, Node))


def results_of(gm: GraphModule) -> tuple[Any, ...]:
    (output,) = gm.graph.find_nodes(op="output")
    return tuple(output.args[0])


def draws(node: Node) -> bool:
    """Whether a node's result is another one when it runs again."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload) and is_random(node.target, node.args, node.kwargs):
        return True
    return "inductor_seeds" in str(node.target)


def effect_of(node: Node) -> Any:
    """The op that a node runs for its effect (it checks, prints, …), in the order that tokens keep: the first of what
    the node takes, and of what it gives; None of any other node."""
    return node.args[1] if node.target is torch.ops.higher_order.with_effects else None


def runs_once(node: Node) -> bool:
    """Whether a node may not run again: it draws, writes into what there is, or is seen from outside. fx takes what
    may draw random numbers for impure, also where it draws none, as attention without dropout does; and what waits
    for a collective."""
    once = draws(node) or mutates(node) or effect_of(node) is not None
    return once or (node.is_impure(impure_random=False) and not is_wait(node.target))


_LIKE_VIEWS = ("aten._unsafe_view.default", "aten.reshape.default", "_c10d_functional.wait_tensor.default")


def is_view(n: Node) -> bool:
    """Whether a node's result lies in the memory of what it reads."""
    schema = getattr(n.target, "_schema", None)
    if str(n.target) in _LIKE_VIEWS or schema is None:
        return str(n.target) in _LIKE_VIEWS
    return not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


def overwritten(gm: GraphModule) -> set[Node]:
    """The inputs of a joint or forward graph that are written to once the forward pass has run, and their views:
    the backward pass would read other numbers there."""
    written = [n.args[0] for n in gm.graph.nodes if wanted_by_forward(n)]
    found = {
        *overwritten_inputs(gm),
        *(n for n in written if isinstance(n, Node) and n.op == "placeholder"),
    }
    for n in gm.graph.nodes if found else ():
        if is_view(n) and any(a in found for a in n.all_input_nodes):
            found.add(n)
    return found


def _only_forward(gm: GraphModule) -> tuple[set[str], set[str]]:
    """Of a joint graph: what the backward pass may not be given, and what has to be saved for it where it reads it,
    by name. Nothing that draws, has an effect, or reads what is overwritten, may run again."""
    gone, late = overwritten(gm), after_tangents(gm)

    def must_be_saved(n: Node) -> bool:
        if draws(n):
            return n not in late
        if effect_of(n) is not None:
            return not is_backward(n)
        return n not in gone and not mutates(n) and any(a in gone for a in n.all_input_nodes)

    once = filter(must_be_saved, gm.graph.nodes)
    return {n.name for n in gone}, {part.name for n in once for part in [n, *_parts(n)]}


def after_tangents(gm: GraphModule) -> set[Node]:
    """The nodes of a joint graph that only a backward pass can compute."""
    late: set[Node] = set()
    for n in gm.graph.nodes:
        if is_tangent(n) or any(a in late for a in n.all_input_nodes):
            late.add(n)
    return late


def overwritten_count(pair: Pair) -> int:
    """How many of the forward pass's results, the first ones, AOTAutograd copies into the caller's tensors and
    drops."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    (output,) = pair.forward.graph.find_nodes(op="output")
    return sum(isinstance(d, InputMutationAOTOutput) for d in output.meta.get("desc") or ())


def without_tokens(pair: Pair) -> Pair:
    """The pair as AOTAutograd has it compiled: the tokens that keep ops with effects in order are none of its inputs
    and results."""
    from torch._functorch._aot_autograd.utils import unlift_tokens

    first, late = (
        {n.args[0] for n in gm.graph.nodes if effect_of(n) is not None and n.args[0].op == "placeholder"}
        for gm in (pair.forward, pair.backward)
    )
    if not first and not late:
        return pair
    forward, backward = copied(pair.forward), copied(pair.backward)
    known: Any = SimpleNamespace(tokens=dict.fromkeys(first), num_backward_tokens=len(late))
    settings: Any = SimpleNamespace(enable_log=False)
    unlift_tokens(forward, known, settings, backward)
    return Pair(forward, backward, pair.outputs - len(first))


def copied(gm: GraphModule) -> GraphModule:
    """A graph of its own, with what is known of its nodes, but for what Inductor noted of where the graph writes: a
    plan has writes elsewhere, and what reads what they write over would be fused into what comes after them."""
    graph = torch.fx.Graph()
    values: dict[Node, Node] = {}
    output = graph.graph_copy(gm.graph, values)
    (old,) = gm.graph.find_nodes(op="output")
    graph.output(output).meta = dict(old.meta)
    for node, new in values.items():
        new.meta = {k: x for k, x in node.meta.items() if k != _REGION}
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
        ours = ("partitioner_fn", "enable_autograd_cache")  # what caches count says nothing of the lines
        settings = {k: v for k, v in settings.items() if not any(name in k for name in ours)}
        h.update(repr(sorted((k, str(v)) for k, v in settings.items())).encode())
    return h.hexdigest()


_OBJECTS: Final = {"unsafe_treat_script_objects_as_zero_size": True}
"""What is no tensor (the mesh of DTensors) is there already and takes nothing; what a partition takes is replayed."""


def stock_pair(joint: GraphModule, inputs: Any, outputs: int, static: Sequence[int], budget: float) -> Pair:
    """What Inductor itself would choose at that ``activation_memory_budget``; where that draws random numbers twice,
    which would give wrong gradients, the same with those numbers saved. ``Unsupported`` where it fails."""
    from torch._functorch import config, partitioners

    own = config.patch(activation_memory_budget=budget, **_OBJECTS)
    with own, _rng_as_it_is(), failing(f"partitioning at activation_memory_budget {budget}"):
        forward, backward = partitioners.min_cut_rematerialization_partition(
            copied(joint), inputs, num_fwd_outputs=outputs, static_lifetime_input_indices=list(static)
        )
    pair = Pair(forward, backward, outputs)
    try:
        return _checked(pair)
    except (
        Unsupported
    ):  # below a budget of 1 it draws dropout's seeds, and reads overwritten inputs, in the backward pass
        return extract(merged(joint), outputs, pair.saved)


def sent(gm: GraphModule) -> tuple[str, ...]:
    """The nodes of a graph that send to other ranks, by the names that they have in the joint graph, in order."""
    return tuple(origin(n) for n in gm.graph.nodes if number_of(n.target, n.args) is not None)


def merged(joint: GraphModule) -> GraphModule:
    """The joint graph as PyTorch partitions it: without dead nodes, and equal ones are one. What it saves is named
    after those: one that both passes compute alike is read by the backward pass, too."""
    from torch._functorch import compile_utils, config

    made = copied(joint)
    made.graph.eliminate_dead_code()
    if config.cse:
        made.graph = compile_utils.fx_graph_cse(made.graph)
    made.recompile()
    return made


@contextmanager
def _rng_as_it_is() -> Iterator[None]:
    """Inside, random ops under a checkpoint stay themselves, where PyTorch would wrap them into ops that keep the
    generator's state: what really draws is saved, so that nothing draws twice; attention without dropout draws
    nothing, and runs again as it is."""
    from torch._functorch import partitioners

    before = partitioners.functionalize_rng_ops

    def unchanged(_joint: Any, forward: GraphModule, backward: GraphModule, _symbols: int) -> Any:
        return forward, backward

    partitioners.functionalize_rng_ops = unchanged
    try:
        yield
    finally:
        partitioners.functionalize_rng_ops = before


def stock_saved(gm: GraphModule, late: Collection[Node], outputs: int, budget: float) -> tuple[str, ...]:
    """What Inductor would save at that ``activation_memory_budget`` of a graph that computes gradients and updates by
    itself, by name. ``late``: the nodes that are of its backward pass or its update."""
    from torch._functorch import config, partitioners

    names = {n.name for n in late}
    joint = copied(gm)
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
    with config.patch(activation_memory_budget=budget, **_OBJECTS), _rng_as_it_is():
        forward, _ = partitioners.min_cut_rematerialization_partition(joint, (), num_fwd_outputs=len(first))
    return tuple(x.name for x in _nodes(results_of(forward)[len(first) :]))


def _nodes(results: Sequence[Any]) -> list[Node]:
    return [x for x in results if isinstance(x, Node)]


def extract(joint: GraphModule, outputs: int, saved: Sequence[str], needed: Collection[str] = ()) -> Pair:
    """The partition that saves the nodes of these names, what draws random numbers and what reads inputs that are
    overwritten, and computes again whatever else the backward pass needs, each node right before its first use. What
    is ``needed`` of it is saved where this backward pass does not read it, too: another one will. Raises
    ``Unsupported`` where that would draw random numbers twice."""
    from torch._functorch import partitioners

    gm = copied(joint)
    more = _also_returned(gm, needed)
    gone, once = _only_forward(gm)
    _check_reads(gm, gone)
    names = ({*saved} - gone) | once
    nodes = [n for n in gm.graph.nodes if n.name in names]
    nodes.sort(key=lambda n: bool(n.meta.get("saved_tensor_with_no_vc_check", False)))
    forward, backward = partitioners._extract_fwd_bwd_modules(gm, nodes, [], num_fwd_outputs=outputs)
    _not_returned(backward, more)
    backward = partitioners.reordering_to_mimic_autograd_engine(backward)
    pair = Pair(partitioners.raise_getitems(forward), partitioners.raise_getitems(backward), outputs)
    for node in (*pair.forward.graph.nodes, *pair.backward.graph.nodes):
        node.meta[ORIGIN] = origin(node)
    _inputs_in_order(pair)
    return _checked(pair)


def _also_returned(gm: GraphModule, names: Collection[str]) -> int:
    """Makes the nodes of these names results of the backward pass, the last ones, and gives their number."""
    (end,) = gm.graph.find_nodes(op="output")
    nodes = [n for n in gm.graph.nodes if n.name in names]
    end.args = ((*end.args[0], *nodes),)
    if end.meta.get("desc") is not None:
        end.meta["desc"] = [*end.meta["desc"], *[None] * len(nodes)]
    return len(nodes)


def _not_returned(gm: GraphModule, count: int) -> None:
    """Takes the last results of a pass away."""
    if not count:
        return
    (end,) = gm.graph.find_nodes(op="output")
    end.args = (end.args[0][:-count],)
    if end.meta.get("desc") is not None:
        end.meta["desc"] = end.meta["desc"][:-count]
    gm.recompile()


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


def realize_as_is(gm: GraphModule, names: Collection[str]) -> None:
    """The values of these nodes of the joint graph become tensors that lie as in the graph."""
    for n in gm.graph.nodes:
        if origin(n) in names:
            n.meta[AS_IT_IS] = True


def turns_to_channels_last(forward: GraphModule) -> bool:
    """Whether Inductor will have the convolutions of a forward pass in channels-last."""
    from torch._inductor.graph import GraphLowering

    return bool(GraphLowering.decide_layout_opt(forward, is_inference=False))


@contextmanager
def as_planned(graph: GraphModule, *, backward: bool, **more: Any) -> Iterator[None]:
    """Inside, Inductor has the settings ``more``, and those for a graph of ours. It gives buffers back as soon as
    nobody reads them: Inductor keeps them for later ones of the same size as far as its own estimate of the peak
    allows; an arena has places for all. Inputs that are saved are handed on as they lie: Inductor would turn those of
    convolutions to channels-last first, and keep the copies until the backward pass. Where a convolution of the
    forward pass is computed again in the backward pass, Inductor would turn the inputs of all of them to
    channels-last, as it does not in a backward pass without one: for gradients of depthwise convolutions oneDNN then
    takes many times the workspace. Layouts stay there. What the plan computes early (`EARLY`) is a tensor, not
    computed where it is read, in the kernel that reads it.

    In a lean pass (`mark_lean`) C++ kernels end where much is dead; what the plan has as a tensor (`EXISTS`) is one:
    Inductor would compute what reads little where it is read, again in each kernel, and what it reads would stay; and
    what follows the last convolution lies as it does: Inductor would lay out anew what is saved of it, and kernels of
    the backward pass would read both layouts.
    """
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.graph import GraphLowering

    ours = any(ORIGIN in n.meta for n in graph.graph.nodes)
    settings = {"allow_buffer_reuse": False, **({"layout_optimization": False} if backward else {})}
    before = GraphLowering.find_nodes_prefer_channels_last

    def but_inputs(self: Any) -> Any:
        found = before(self)
        if worth is not None:
            found |= _after(self.module, found)
        found -= {n for n in found if n.op == "placeholder"}
        return found

    worth = min((n.meta[LEAN] for n in graph.graph.nodes if LEAN in n.meta), default=None)
    given = {n.name for n in graph.graph.find_nodes(op="placeholder") if LEAN in n.meta}
    ready, run_node = CppScheduling.ready_to_flush, GraphLowering.run_node

    def realized(self: Any, n: Node) -> Any:
        result = run_node(self, n)
        if EARLY in n.meta or (worth is not None and EXISTS in n.meta):
            result.realize()
        return result

    def ends(self: Any) -> bool:
        return bool(ready(self)) or (worth is not None and _dead(self.scheduler, given) >= worth)

    with config.patch({**more, **(settings if ours else {})}):
        if ours:
            GraphLowering.find_nodes_prefer_channels_last = but_inputs
            CppScheduling.ready_to_flush = ends
            GraphLowering.run_node = realized
        try:
            yield
        finally:
            GraphLowering.run_node = run_node
            CppScheduling.ready_to_flush = ready
            GraphLowering.find_nodes_prefer_channels_last = before


def mark_lean(gm: GraphModule, nbytes: int, given: Collection[str] = ()) -> GraphModule:
    """The graph, to be written for memory: kernels end where ``nbytes`` are dead. ``given``: which of its inputs
    nobody else has, by name."""
    for n in gm.graph.nodes:
        if n.op == "call_function" or n.name in given:
            n.meta[LEAN] = nbytes
    return gm


def _after(gm: GraphModule, found: Collection[Node]) -> set[Node]:
    """The nodes of images that are computed from those ``found``."""
    more: set[Node] = set()
    for n in gm.graph.nodes:
        val = n.meta.get("val")
        if isinstance(val, torch.Tensor) and val.dim() == 4:
            more |= {n} if any(a in found or a in more for a in n.all_input_nodes) else set()
    return more


def _dead(scheduler: Any, given: Collection[str]) -> int:
    """Bytes that could be given back if the kernel that is being written ended. Of the inputs, those ``given``."""
    from torch._inductor.virtualized import V

    graph, total = V.graph, 0
    for name in scheduler.buffer_names_to_free - graph.removed_buffers - graph.wrapper_code.freed:
        if name in scheduler.name_to_buf:
            buf = scheduler.name_to_buf[name]
            node = buf.node if buf.can_free() else None
        else:
            node = graph.graph_inputs.get(name) if name in given else None
        if node is not None and hasattr(node, "get_size"):
            with suppress(NotImplementedError):  # a kernel with several results has bytes in those alone
                total += int(graph.sizevars.optimization_hint(node.get_numel())) * node.get_dtype().itemsize
    return total


def _check_reads(gm: GraphModule, gone: Collection[str]) -> None:
    for n in gm.graph.nodes if gone else ():
        if is_backward(n) and not mutates(n) and any(a.name in gone for a in n.all_input_nodes):
            raise Unsupported(
                f"{n.name} in compiled mode",
                "the backward pass reads an input that the forward pass overwrites",
                "write to a copy of the input",
            )


def _checked(pair: Pair) -> Pair:
    gone = overwritten(pair.forward)
    if late := {n.name for n in gone}.intersection(pair.saved):
        raise Unsupported(
            f"saving {', '.join(sorted(late))}", "the forward pass overwrites it, and the numbers would be others",
            "report this",
        )  # fmt: skip
    first = {n.name for n in pair.forward.graph.nodes if draws(n) or effect_of(n) is not None}
    given = [n.name for n in pair.backward.graph.nodes if n.op == "placeholder"]
    if tuple(given[: len(pair.saved)]) != pair.saved:
        raise Unsupported(
            "a partition whose backward pass takes what is saved in another order",
            "it would get other tensors",
            "report this",
        )
    again = [origin(n) for n in pair.backward.graph.nodes if draws(n) or effect_of(n) is not None]
    twice = [name for k, name in enumerate(again) if name in first or name in again[:k]]
    if twice:
        raise Unsupported(
            f"running {', '.join(twice)} again in the backward pass",
            "it draws other numbers, or has its effect a second time",
            "report this",
        )
    return pair
