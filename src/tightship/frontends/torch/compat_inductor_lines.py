"""The lines between the kernels of what Inductor lowers a graph to, read as events of memory.

A part of ``compat``, under the same rule as `compat_inductor`: private interfaces of one version of Inductor. A line
of a kind that is not known raises ``Unsupported``: it might take memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from tightship.errors import Unsupported
from tightship.frontends.builder import trace_line
from tightship.frontends.torch import compat_ops
from tightship.frontends.torch.compat_inductor_masks import is_mask, set_by_values
from tightship.frontends.torch.compiled_collectives import NAMESPACE, number_of, sends_by_itself

__all__ = [
    "AS_IT_IS",
    "EARLY",
    "EXISTS",
    "LEAN",
    "ORIGIN",
    "SEGMENT",
    "Event",
    "Kernel",
    "Lowered",
    "read_lines",
    "sequence",
]


# --- what a lowered graph asks of memory -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that Inductor calls and has not written: it may ask for memory by itself. ``key`` is equal for calls
    that ask the same; ``prepare`` makes tensors like its inputs, ``nbytes`` of them, filled with the number that it
    gets for floats and the one for all others, and returns the call on them. ``foreign``: the op, where it is none
    of PyTorch's; ``sends``: which of the program's collectives it is, if it is one."""

    key: str
    prepare: Callable[[float, int], Callable[[], Any]]
    nbytes: int = 0
    foreign: str = ""
    sends: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a lowered graph that concerns memory, about the variable ``name``.

    make   the variable gets ``nbytes`` of its own.
    alias  it shares the memory of ``source``.
    drop   it is deleted; memory that no variable has any more is given back.
    call   ``kernel`` runs, and its result, if there is a name, is the variable's; ``given``: variables whose memory
           the result shares.
    item   it is the part of the result ``source`` at ``path``.

    ``origin``: the fx node that it was made for, where there is one.
    """

    kind: str
    name: str
    nbytes: int = 0
    source: str = ""
    path: tuple[Any, ...] = ()
    kernel: Kernel | None = None
    given: tuple[str, ...] = ()
    origin: str = ""


@dataclass(frozen=True)
class Lowered:
    """What a graph has become: variables in (``inputs``) and out (``outputs``, empty for what is no tensor), and the
    lines in between. ``strides`` of the outputs, where known; ``constants``: bytes of tensors that the code owns."""

    events: tuple[Event, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    strides: tuple[tuple[int, ...] | None, ...]
    constants: tuple[tuple[str, int], ...]


# --- reading the lines -----------------------------------------------------------------------------------------

_SILENT: Final = (
    "KernelCallLine", "KernelDefinitionLine", "CommentLine", "LineContext", "AssertSizeStrideLine", "NullLine",
    "AssertDivByZeroLine", "EnterDeviceContextManagerLine", "ExitDeviceContextManagerLine",
    "EnterDeviceContextManagerWithStreamInfoLine", "ExitDeviceContextManagerWithStreamInfoLine",
    "SymbolicCallArgLine", "UnbackedSymbolDefsLine",
)  # fmt: skip
"""Lines that neither take nor give back memory."""

_SILENT_TEXT: Final = re.compile(
    r"$|#|assert_alignment\(|\w+ = (None|get_raw_stream\(\d+\))$|if not \(|raise RuntimeError\("
)
"""The same, of the lines that Inductor writes as plain text."""


def read_lines(wrapper: Any) -> Lowered:
    """What the code that Inductor's wrapper is about to write does with memory. Raises ``Unsupported``."""
    from torch._inductor.virtualized import V

    graph = V.graph
    events = tuple(event for line in wrapper.lines for event in _events_of(line, graph))
    results = list(wrapper.get_graph_outputs())
    return Lowered(
        events,
        tuple(graph.graph_input_names),
        tuple(_output_name(x) for x in results),
        tuple(_strides(x) for x in results),
        tuple((name, t.untyped_storage().nbytes()) for name, t in graph.constants.items()),
    )


def _output_name(node: Any) -> str:
    return (
        ""
        if type(node).__name__ in ("NoneAsConstantBuffer", "ShapeAsConstantBuffer")
        else str(node.get_name())
    )


def _strides(node: Any) -> tuple[int, ...] | None:
    try:
        return tuple(int(s) for s in node.get_stride())
    except (NotImplementedError, AttributeError, TypeError):
        return None


def _events_of(line: Any, graph: Any) -> Iterator[Event]:
    kind = type(line).__name__
    if kind in _SILENT or (isinstance(line, str) and _SILENT_TEXT.match(line.strip())):
        return
    read = _READERS.get(kind)
    if read is None and (node := _written_by(line, graph)) is not None:
        yield Event("call", "", kernel=_kernel(node), origin=_origin(node, graph))
        return
    if read is None:
        shown = f"the line {line!r}" if isinstance(line, str) else f"a {kind}"
        raise Unsupported(f"{shown} of Inductor's in compiled mode", "nobody knows what memory it takes")
    yield from read(line, graph)


def _allocate(line: Any, graph: Any) -> Iterator[Event]:
    if line.comm_buffer or line.node.get_is_pinned():
        raise Unsupported(
            "a communication or pinned buffer in compiled mode", "it is not in the device's memory"
        )
    nbytes = _nbytes(line.node, graph.get_allocation_size(line.node))
    yield Event("make", line.node.get_name(), nbytes=nbytes, origin=_origin(line.node, graph))


ORIGIN: Final = "tightship_origin"
"""What a node's metadata says of the joint graph's node that it is a copy of, by name."""


SEGMENT: Final = "tightship_segment"
"""What a node's metadata says of its place in a planned pass: nodes of two segments are not computed side by side,
and in a pass that is written for memory in no kernel together."""


EXISTS: Final = "tightship_exists"
"""What a node's metadata says of a planned pass: its value is a tensor of its own in the plan."""


EARLY: Final = "tightship_early"
"""What a node's metadata says of a planned pass: its value is computed before more of the plan runs. It is smaller
than what it is computed from, which ends there."""


AS_IT_IS: Final = "inductor_realize_to_strides"
"""What a node's metadata says to Inductor: its value is a tensor, with the strides of the node's."""


LEAN: Final = "tightship_lean"
"""What a node's metadata says of a pass that is written for memory: Inductor writes loops one after the other into
one kernel, and gives back what they read when all of it has run; where so many bytes are dead, the kernel ends."""


def _origin(buffer: Any, graph: Any) -> str:
    """The fx node whose value a buffer is: where Inductor names none, the last of those that went into it."""
    node = buffer.get_origin_node()
    if node is None:
        among = set(buffer.get_origins())
        node = next((n for n in reversed(graph.module.graph.nodes) if n in among), None) if among else None
    return "" if node is None else str(node.meta.get(ORIGIN, node.name))


def _place(node: Any) -> str:
    """The line of the user's code that a kernel is of."""
    nodes = [n for n in (node.get_origin_node(), *node.get_origins()) if n is not None]
    lines = (trace_line(n.meta.get("stack_trace") or "") for n in nodes)
    return next(filter(None, lines), str(nodes[0].name) if nodes else str(node.get_kernel_name()))


def _nbytes(node: Any, shape: Any = None) -> int:
    sizes = [int(n) for n in (node.get_size() if shape is None else shape)]
    if 0 in sizes:
        return 0
    last = sum((n - 1) * int(s) for n, s in zip(sizes, node.get_stride(), strict=True))
    return (last + 1) * int(node.get_dtype().itemsize)


def _reuse(line: Any, graph: Any) -> Iterator[Event]:
    old = line.node.get_name()
    yield Event("alias", line.reused_as.get_name(), source=old, origin=_origin(line.reused_as, graph))
    if line.delete_old and old not in graph.get_output_names():
        yield Event("drop", old)


def _reinterpret(line: Any, graph: Any) -> Iterator[Event]:
    if line.reused_as.get_name() not in graph.removed_buffers:
        yield Event("alias", line.reused_as.get_name(), source=line.node.get_name())


def _free(line: Any, _graph: Any) -> Iterator[Event]:
    yield Event("drop", line.node.get_name())


def _free_unless_reused(line: Any, graph: Any) -> Iterator[Event]:
    if not line.is_reused:
        yield from _free(line, graph)


def _item(line: Any, _graph: Any) -> Iterator[Event]:
    yield Event("item", line.result_name, source=line.arg_name, path=tuple(i for _, i in line.indices))


def _extern(line: Any, graph: Any) -> Iterator[Event]:
    node = line.node
    named = type(line).__name__ == "ExternKernelAllocLine" and type(node.layout).__name__ != "NoneLayout"
    given = tuple(node.get_inputs_that_alias_output()) if named else ()
    yield Event(
        "call",
        node.get_name() if named else "",
        kernel=_kernel(node),
        given=given,
        origin=_origin(node, graph),
    )


def _written_by(line: Any, graph: Any) -> Any:
    """The node that writes this line, a call of a kernel that changes a tensor that is there: a copy into one of
    another type (float to complex), what is drawn into it (masks of whole channels)."""
    if not isinstance(line, str) or "=" in line.partition("(")[0]:
        return None
    of = {"InplaceCopyFallback": _copy_line, "InplaceBernoulliFallback": _draw_line}
    for node in graph.operations:
        written = of.get(type(node).__name__)
        if written is not None and line.strip() == written(node):
            return node
    return None


def _copy_line(node: Any) -> str:
    to, source, non_blocking = node.codegen_args()
    return f"{to}.copy_({source}, {non_blocking})"


def _draw_line(node: Any) -> str:
    given = [x.codegen_reference() for x in node.inputs], map(repr, node.constant_args)
    return f"{node.get_kernel_name()}({', '.join(x for row in given for x in row)})"


_READERS: Final[dict[str, Callable[[Any, Any], Iterator[Event]]]] = {
    "AllocateLine": _allocate,
    "ReuseLine": _reuse,
    "ReinterpretLine": _reinterpret,
    "FreeLine": _free,
    "FreeIfNotReusedLine": _free_unless_reused,
    "MultiOutputLine": _item,
    "ExternKernelAllocLine": _extern,
    "ExternKernelOutLine": _extern,
    "IndexPutFallbackLine": _extern,
    "ScatterFallbackLine": _extern,
}


# --- kernels that Inductor does not write ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Like:
    """Stands for a tensor of such metadata; ``lazily``: what its readers have to do with it first. ``storage``: the
    bytes that it lies among, where a kernel looks at all of them."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    lazily: tuple[str, ...] = ()
    storage: int = 0
    set_to: int = -1  # of a mask: at how many places it holds, where that is known

    @property
    def nbytes(self) -> int:
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return 0 if 0 in self.shape else (last + 1) * self.dtype.itemsize


_OF_PYTORCH: Final = frozenset(
    f"aten prim prims inductor rngprims higher_order quantized mkldnn mkl onednn _c10d_functional {NAMESPACE}".split()
)
"""Namespaces of ops that do nothing but compute their results."""


_RANDOM_STATE: Final = "a state of the random generator"
"""Stands for one: zeros are none."""


def _like(node: Any) -> _Like:
    """Sizes that Inductor has no numbers for (of random states) are those of the tensors it compiles for."""
    from torch._inductor.virtualized import V

    hint = V.graph.sizevars.optimization_hint
    shape, stride = (tuple(int(hint(n)) for n in row) for row in (node.get_size(), node.get_stride()))
    return _Like(shape, stride, node.get_dtype(), str(node.get_device()), _lazily(node))


_CLONES_STORAGE: Final = tuple(
    f"aten.{name}.default"
    for name in ("copy", "as_strided_scatter", "slice_scatter", "select_scatter", "diagonal_scatter")
)
"""Ops whose result is a copy of the whole storage that their first argument lies in."""


def _in_storage(node: Any) -> _Like:
    """A tensor with what else there is in its storage."""
    like, value = _like(node), _value(node)
    if isinstance(value, torch.Tensor):
        nbytes = int(value.untyped_storage().nbytes())
    else:
        nbytes = _like(node).nbytes
    return replace(like, storage=nbytes)


def _value(node: Any) -> Any:
    """What is known of a tensor that a kernel of PyTorch's own has made, or that the graph is given, as what another
    pass has saved is."""
    from torch._inductor.virtualized import V

    while type(node).__name__ in ("TensorBox", "StorageBox", "ReinterpretView"):
        node = node.data
    kind, origin = type(node).__name__, None
    if kind in ("FallbackKernel", "MultiOutput"):
        origin = node.get_origin_node()
    elif kind in ("InputBuffer", "DonatedBuffer"):
        given, name = V.graph.module.graph.find_nodes(op="placeholder"), node.get_name()
        origin = next((n for n in given if n.name == name), None)
    return None if origin is None else origin.meta.get("val")


def _lazily(node: Any) -> tuple[str, ...]:
    """What a view by PyTorch itself (`aten._conj`, `aten._neg_view`) leaves to the readers of its result; views of
    Inductor's keep it."""
    value = _value(node)
    if not isinstance(value, torch.Tensor):
        return ()
    return ("_conj",) * value.is_conj() + ("_neg_view",) * value.is_neg()


def _kernel(node: Any) -> Kernel:
    """The kernel as Inductor's line would call it, on tensors of the same metadata."""
    kind, op = type(node).__name__, getattr(node, "op_overload", None)
    if compat_ops.asks_by_data(op):
        raise Unsupported(f"{op} at {_place(node)}", *compat_ops.ASKED_BY_DATA)
    if sends_by_itself(op):
        raise Unsupported(
            f"the collective {op} at {_place(node)}, in compiled mode",
            "what memory it asks for is not known unless it sends, and nothing orders it among others",
            'use all_reduce, all_gather, reduce_scatter or broadcast, or mode="exact"',
        )
    tensors: list[Any] = [_like(x) for x in node.inputs]
    if op is torch.ops.higher_order.run_with_rng_state:
        tensors[0] = _RANDOM_STATE
    kwargs = {k: _constant(v) for k, v in node.kwargs.items()}
    given = [_constant(x) for x in node.constant_args]
    if kind == "IndexPutFallback":
        rest = iter(tensors[2:])
        indices = _counted(node, [None if x is None else next(rest) for x in node.indices], tensors)
        args: list[Any] = [tensors[0], indices, tensors[1], *given]
    elif kind == "ScatterFallback":
        dim, *value = given
        args = [tensors[0], dim, *tensors[1:], *value]
        name = str(node.get_kernel_name())
        kwargs = (
            kwargs if "scatter_reduce" in name else {k: v for k, v in kwargs.items() if k == "reduce" and v}
        )
    elif hasattr(node, "unflatten_args"):
        args, more = node.unflatten_args(tensors, given)
        kwargs = {**kwargs, **more}
    else:
        args = [*tensors, *given]
    if kind in ("ExternKernelOut", "RandomSeeds") or "ExternKernelOut" in (
        c.__name__ for c in type(node).__mro__
    ):
        kwargs["out"] = _like(node)
    name = str(op or node.get_kernel_name())
    if name in _CLONES_STORAGE:
        args = [_in_storage(node.inputs[0]), *args[1:]]
    call = _callable(node)

    def prepare(number: float, index: int) -> Callable[[], Any]:
        a, k = _sampled(args, number, index), _sampled(kwargs, number, index)
        return lambda: call(*a, **k)

    nbytes = sum(like.nbytes for like in _likes((args, kwargs)))
    foreign = str(op) if getattr(op, "namespace", "aten") not in _OF_PYTORCH else ""
    key = repr((name, node.get_kernel_name(), args, kwargs))
    return Kernel(key, prepare, nbytes, foreign, number_of(op, args))


def _counted(node: Any, indices: list[_Like | None], tensors: Sequence[_Like]) -> list[_Like | None]:
    """A mask among the indices of a write, with the number of places that what is written says. Raises
    ``Unsupported`` where nothing does: the kernel asks for as much as the mask has places."""
    given = [(k, i) for k, i in enumerate(indices) if i is not None]
    if not any(is_mask(i.dtype) for _, i in given):
        return indices
    ((at, mask), *others) = given
    x, values = tensors[:2]
    count = None if others else set_by_values(x.shape, at, len(mask.shape), values.shape)
    if count is None:
        raise Unsupported(
            f"a write under a mask at {_place(node)}, in compiled mode",
            "what memory it asks for follows from how much of the mask is set",
            "write torch.where(mask, values, x), or use tightship.fit, which compares that in each step",
        )
    return [replace(mask, set_to=count) if k == at else None for k in range(len(indices))]


def sequence(lowered: Lowered) -> tuple[int, ...]:
    """Which of the program's collectives run, in order."""
    kernels = (e.kernel for e in lowered.events)
    return tuple(k.sends for k in kernels if k is not None and k.sends is not None)


def calls_others(lowered: Lowered) -> bool:
    """Whether there are ops of other libraries among the kernels."""
    names = (e.kernel.key[2:].partition("'")[0] for e in lowered.events if e.kernel is not None)
    return any(n.partition(".")[0] not in {*_OF_PYTORCH, "extern_kernels"} for n in names)


def _likes(tree: Any) -> Iterator[_Like]:
    if isinstance(tree, _Like):
        yield tree
    elif isinstance(tree, (list, tuple, dict)):
        for x in tree.values() if isinstance(tree, dict) else tree:
            yield from _likes(x)


def _constant(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(_constant(y) for y in x)
    if hasattr(x, "get_stride") and hasattr(x, "get_dtype"):
        return _like(x)
    if type(x).__module__.startswith("sympy"):
        return int(x)
    return x


def _sampled(tree: Any, number: float, index: int) -> Any:
    """Zero is an index that nearly every op takes; a probability may have to be more."""
    if isinstance(tree, _Like):
        new = torch.empty_strided(tree.shape, tree.stride, dtype=tree.dtype, device=tree.device)
        if tree.storage > new.untyped_storage().nbytes():
            whole = torch.empty(tree.storage // tree.dtype.itemsize, dtype=tree.dtype, device=tree.device)
            new = whole.as_strided(tree.shape, tree.stride)
        new.fill_(number if new.is_floating_point() else index)
        if tree.set_to >= 0:
            new.copy_((torch.arange(new.numel(), device=new.device) < tree.set_to).view(new.shape))
        for view in tree.lazily:
            new = getattr(torch.ops.aten, view).default(new)
        return new
    if tree is _RANDOM_STATE:
        return torch.get_rng_state()
    if isinstance(tree, (list, tuple)):
        return type(tree)(_sampled(x, number, index) for x in tree)
    if isinstance(tree, dict):
        return {k: _sampled(x, number, index) for k, x in tree.items()}
    return tree


def _callable(node: Any) -> Callable[..., Any]:
    """What the line's kernel name means where Inductor's code runs."""
    from torch._inductor.select_algorithm import extern_kernels

    name = str(node.get_kernel_name())
    roots: dict[str, Any] = {"extern_kernels": extern_kernels, "torch": torch, "aten": torch.ops.aten}
    root, _, rest = name.partition(".")
    try:
        found = roots[root]
        for part in rest.split("."):
            found = getattr(found, part)
    except (KeyError, AttributeError):
        raise Unsupported(f"the kernel {name} in compiled mode", "it cannot be called by itself") from None
    return found  # type: ignore[no-any-return]
