"""Program: a Graph together with what PyTorch needs to run it.

View ops are not ops of the graph: a view is a *value*, derived from its storage's current tensor by metadata
(dtype, shape, stride, offset), so that a storage that was recomputed somewhere else serves its views too. A view
value counts as an output of the op that defines its storage (or as a graph input, for storages of the caller).

A view op is never recomputed: `derivation` prepares, before the step runs, how a view comes from its storage's
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tightship.errors import BadInput
from tightship.graph import Graph, Request, aligned, alignment_of
from tightship.process_local import NotCopied

__all__ = [
    "Apart",
    "Call",
    "Program",
    "Ref",
    "Slot",
    "derivation",
    "derive",
    "dtype_of",
    "evaluate",
    "flat",
    "leaves_in",
    "map_tree",
    "mismatch",
    "refs_in",
    "substitute",
    "tensors_in",
]


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands in an argument tree for the tensor of a graph value."""

    value: int


@dataclass(frozen=True, slots=True)
class Call:
    """How to run one op: ``fn(*args, **kwargs)`` with every ``Ref`` replaced by its tensor.

    ``results`` holds, for each element of the flattened result, the graph value it is, or -1 when nobody needs
    it (None results, or the mutated argument handed back).
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a graph input's tensor comes from.

    ``role``: parameter, buffer, gradient (that a parameter has before the run), state (of the optimizer), input (of
    the batch), constant. ``key`` finds it: the qualified name for parameters and buffers, the parameter's for
    gradients, (parameter name, state key) for state (of the optimizer of a third number, where there are several, and
    without a parameter at a path in it), the number among the batch's tensors for inputs,
    the index into ``Program.constants`` for constants.
    """

    value: int
    role: str
    key: Any


class Metadata(Protocol):
    """Shape, stride and offset (elements) of a value; ``dtype`` is a ``torch.dtype`` or its name."""

    @property
    def dtype(self) -> Any: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Apart:
    """A tensor of the caller's in whose place the step puts another: in eager it lies elsewhere from then on, and
    what was there stays as it was for those who hold it.

    ``slot`` is its index among the program's. ``before`` are the results in the bytes that were there. ``now`` is a
    result in the bytes that eager has there from then on (-1 if none of them is handed back), and ``placed`` how it
    lies in them. Where the program ``writes`` it, it writes it into the bytes that were there; otherwise it only
    hands it back. ``changes``: the step writes into these before that, or others of the caller's lie in them, or in
    those that come in their place.
    """

    slot: int
    before: tuple[int, ...]
    now: int
    placed: Metadata
    writes: bool
    changes: bool


@dataclass(frozen=True)
class Program(NotCopied):
    """``calls[i]`` runs ``graph.ops[i]``; ``replays[i]`` runs it as a recomputation where that differs (an op
    with running statistics computes its results without touching them).

    ``bases[s]`` is the value that spans storage ``s`` the way its defining op returns it (or, for an input, the
    caller's tensor): the one from which the other values of ``s`` are derived. ``slots`` are the graph's input
    values (one per distinct caller tensor, views of it excluded). ``results`` are the values the step hands
    back, in order; ``result_spec`` (a ``structure.Results``) puts them back into the caller's structure.
    ``asked[i]`` is the call of a torch function from which ``calls[i]`` follows, by its number in the step's trace,
    -1 where that is not known. ``replay_requests[i]`` are the measured requests of ``replays[i]`` where they differ
    from those of the op.
    ``gradients`` are the parameters whose gradients are the last of the results; before these, and before the norm of
    gradients, stand ``extra`` ones that nobody sees. ``apart`` are the slots that in eager lie elsewhere after the
    step. ``ready``, where asked for, are parameters in the order in which autograd has their gradients.
    ``batch`` (a ``structure.BatchSpec``) says what a batch must look like, and each of ``guards`` (a
    ``data_guards.Guard``) what must be true of its data, for the captured ops to be the ones eager would run.
    ``samples[i]`` are contents on which ``calls[i]`` is measured, where zeros would not do, by the number of the
    value in the order of its arguments; `forget_samples` lets go of them.
    """

    graph: Graph
    calls: tuple[Call, ...]
    replays: dict[int, Call]
    bases: tuple[int, ...]
    slots: tuple[Slot, ...]
    results: tuple[int, ...]
    result_spec: Any = None
    constants: tuple[Any, ...] = ()
    notes: tuple[str, ...] = field(default=())
    guards: tuple[Any, ...] = ()
    batch: Any = None
    replay_requests: dict[int, tuple[Request, ...]] = field(default_factory=dict)
    asked: tuple[int, ...] = ()
    gradients: tuple[str, ...] = ()
    apart: tuple[Apart, ...] = ()
    extra: int = 0
    ready: tuple[str, ...] = ()
    samples: dict[int, dict[int, Any]] = field(default_factory=dict)

    def forget_samples(self) -> None:
        """To be called when the ops are measured: no memory stays taken beside the plan's."""
        for tensors in self.samples.values():
            tensors.clear()


def derive(tensor: torch.Tensor, base: Metadata, value: Metadata) -> torch.Tensor:
    """The tensor of ``value``, given the tensor of ``base``, another value of the same storage.

    Offsets are taken relative to the base: the caller's tensor may start elsewhere in its storage than it did
    when the program was captured (a slice of a data set).
    """
    alike = base.dtype == value.dtype and base.shape == value.shape
    if alike and base.stride == value.stride and base.offset == value.offset:
        return tensor
    view: torch.Tensor = derivation(value, base, movable=True)(tensor)
    return view


def map_tree(fn: Callable[[Any], Any], tree: Any) -> Any:
    """An argument tree with ``fn`` applied to whatever is no list, tuple or dict."""
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tree(fn, x) for x in tree)
    if isinstance(tree, dict):
        return {k: map_tree(fn, x) for k, x in tree.items()}
    return fn(tree)


def substitute(tree: Any, read: Callable[[int], Any]) -> Any:
    """An argument tree with ``read(value)`` in place of every ``Ref``."""
    if type(tree) is Ref:
        return read(tree.value)
    if isinstance(tree, (list, tuple)):
        return type(tree)(substitute(x, read) for x in tree)
    if isinstance(tree, dict):
        return {k: substitute(x, read) for k, x in tree.items()}
    return tree


def flat(out: Any) -> list[Any]:
    """A call's result as a flat list, in the order of ``Call.results``."""
    if isinstance(out, (list, tuple)):
        return [x for o in out for x in flat(o)]
    return [out]


def last_uses(records: Iterable[Any], values: Any, wanted: Iterable[int]) -> dict[int, list[int]]:
    """The storages that nothing needs behind each of ``records``, by its index, where ``wanted`` values stay."""
    last: dict[int, int] = {}
    for k, r in enumerate(records):
        used = (*refs_in((r.args, r.kwargs)), *(v for v in r.results if v >= 0))
        last |= dict.fromkeys((values[v].storage for v in used), k)
    kept = {values[v].storage for v in wanted}
    found: dict[int, list[int]] = {}
    for s, k in last.items():
        if s not in kept:
            found.setdefault(k, []).append(s)
    return found


def evaluate(
    records: Iterable[Any],
    values: Any,
    bases: Mapping[int, int],
    tensors: Mapping[int, torch.Tensor],
    wanted: Iterable[int],
    done: Mapping[int, Sequence[int]],
) -> list[torch.Tensor]:
    """Run ``records`` in order on ``tensors`` (by value) and return the tensors of the values ``wanted``.

    ``values`` are indexed by value and have a ``storage``; ``bases`` gives each storage's base value, and ``done``
    (`last_uses`) what is let go of behind each record.
    """
    held: dict[int, torch.Tensor] = {values[v].storage: t for v, t in tensors.items()}
    base = {values[v].storage: v for v in tensors} | {s: b for s, b in bases.items() if s not in held}

    def read(v: int) -> torch.Tensor:
        s = values[v].storage
        return derive(held[s], values[base[s]], values[v])

    with torch.no_grad():
        for k, r in enumerate(records):
            out = r.fn(*substitute(r.args, read), **substitute(r.kwargs, read))
            for v, t in zip(r.results, flat(out), strict=True):
                if v >= 0:
                    held[values[v].storage] = t
            del out
            for s in done.get(k, ()):
                held.pop(s, None)
        return [read(v) for v in wanted]


def leaves_in(tree: Any) -> Iterator[Any]:
    """Whatever is no list, tuple or dict in an argument tree, in order."""
    found: list[Any] = []
    _gather(tree, found.append)
    return iter(found)


def _gather(tree: Any, take: Callable[[Any], None]) -> None:
    """No generator: every call of a capture asks several times."""
    if isinstance(tree, (list, tuple)):
        for x in tree:
            if type(x) is Ref:  # most of them
                take(x)
            else:
                _gather(x, take)
    elif isinstance(tree, dict):
        for x in tree.values():
            _gather(x, take)
    else:
        take(tree)


def refs_in(tree: Any) -> Iterator[int]:
    """Values an argument tree refers to, in order."""
    return (x.value for x in leaves_in(tree) if type(x) is Ref)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of an argument tree, in order. Written out, because every step asks it of every call."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for x in tree:
            yield from tensors_in(x)
    elif isinstance(tree, dict):
        for x in tree.values():
            yield from tensors_in(x)
    elif isinstance(tree, slice):
        yield from tensors_in((tree.start, tree.stop, tree.step))


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    """The dtype that a graph value names (``float32``). Raises ``BadInput``."""
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise BadInput(f"unknown dtype {name!r}: a value's dtype is one of PyTorch's", place="Value.dtype")
    return dtype


def derivation(value: Metadata, base: Metadata, *, movable: bool = False) -> Callable[[Any], Any]:
    """A function from the tensor of ``base`` to the tensor of ``value``, which shares its storage.

    ``movable`` tensors (the caller's) may start elsewhere in their storage than they did at capture.
    """
    shape, stride, offset = value.shape, value.stride, value.offset
    as_strided = torch.as_strided
    dtype, known = dtype_of(value.dtype), base.offset * dtype_of(base.dtype).itemsize

    def reinterpreted(tensor: Any) -> Any:
        moved = (tensor.storage_offset() * tensor.element_size() - known) // dtype.itemsize
        empty = torch.empty(0, dtype=dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), offset + moved, shape, stride)

    def moved(tensor: Any) -> Any:
        return as_strided(tensor, shape, stride, tensor.storage_offset() + offset - base.offset)

    def fixed(tensor: Any) -> Any:
        return as_strided(tensor, shape, stride, offset)

    if value.dtype != base.dtype:
        return reinterpreted
    return moved if movable else fixed


def mismatch(program: Program, value: int, tensor: Any, *, storage: bool = True) -> str | None:
    """How a tensor differs from the metadata of the value it is to be; None if it does not.

    Strides of dimensions of size 1 mean nothing and may differ. ``storage``: whether offset and size count
    too.
    """
    info = program.graph.values[value]
    if not isinstance(tensor, torch.Tensor):
        return f"type {type(tensor).__name__}"
    if tensor.dtype != dtype_of(info.dtype):
        return f"dtype {tensor.dtype} instead of {info.dtype}"
    if tuple(tensor.shape) != info.shape:
        return f"shape {tuple(tensor.shape)} instead of {info.shape}"
    strides = zip(tensor.shape, tensor.stride(), info.stride, strict=True)
    if tensor.numel() and any(n != 1 and now != known for n, now, known in strides):
        return f"stride {tuple(tensor.stride())} instead of {info.stride}"
    planned = program.graph.storages[info.storage]
    if not storage or planned.pool == "host":
        return None
    if tensor.storage_offset() != info.offset:
        return f"storage offset {tensor.storage_offset()} instead of {info.offset}"
    size = tensor.untyped_storage().nbytes()
    whole = aligned(size, alignment_of(str(tensor.device)))
    return None if whole == planned.size else f"a storage of {size} bytes instead of {planned.size}"
