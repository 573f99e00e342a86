"""Batches and results: nested containers to flat tensors, and back; and batches filled up to few lengths."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import Counter, UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tightship.errors import BadInput
from tightship.frontends.torch import compat, compat_distributed
from tightship.frontends.torch.program import Ref

__all__ = [
    "BatchSpec",
    "Given",
    "LossFn",
    "Pad",
    "Results",
    "TensorLeaf",
    "batch_size",
    "batched",
    "caches",
    "called",
    "checked_loss",
    "flatten",
    "loss_function",
    "map_leaves",
    "padded",
    "resized",
    "summed_output",
    "tensor_leaves",
]


@dataclass(frozen=True)
class Given:
    """Stands among results for cache number ``index`` of the batch: the caller's own object."""

    index: int


def map_leaves(fn: Callable[[Any], Any], tree: Any, whole: Callable[[Any], bool] = lambda x: False) -> Any:
    """A copy of ``tree`` with ``fn`` applied to its leaves, visited in a fixed order: mappings by name, however they
    are ordered.

    Containers are lists, tuples (named ones too), mappings (``BatchEncoding`` and other ``UserDict``s,
    ``ModelOutput``), dataclasses, and the caches of transformers with their layers; everything else is a leaf, and
    so is what ``whole`` is true of.
    """

    if isinstance(tree, (torch.Tensor, Ref, Given, Results.Position)) or _is_opaque(tree) or whole(tree):
        return fn(tree)
    if isinstance(tree, UserDict):
        whose = copy.copy(tree)
        whose.data = map_leaves(fn, tree.data, whole)
        return whose
    if isinstance(tree, Mapping):
        by_name = {k: map_leaves(fn, tree[k], whole) for k in _names(tree)}
        items = {k: by_name[k] for k in tree}
        if type(tree) is dict:
            return items
        if isinstance(tree, dict) and not _is_dataclass(tree):
            new = copy.copy(tree)  # what else it has, such as the factory of a ``defaultdict``
            dict.update(new, items)
            return new
        return type(tree)(**items) if _is_dataclass(tree) else type(tree)(items)  # type: ignore[call-arg]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)._make(map_leaves(fn, x, whole) for x in tree)  # type: ignore[attr-defined]
    if isinstance(tree, (list, tuple)) and type(tree) is not torch.Size:
        return type(tree)(map_leaves(fn, x, whole) for x in tree)
    if _is_cache(tree) or _is_dataclass(tree):
        new = copy.copy(tree)
        for name, x in _attributes(tree):
            object.__setattr__(new, name, map_leaves(fn, x, whole))
        return new
    return fn(tree)


def _names(tree: Mapping[Any, Any]) -> list[Any]:
    try:
        return sorted(tree)
    except TypeError:  # names of several types
        return list(tree)


def _attributes(x: Any) -> list[tuple[str, Any]]:
    """Names and values of what a dataclass or a cache holds, in a fixed order."""
    if _is_cache(x):
        return sorted(vars(x).items())
    return [(f.name, getattr(x, f.name)) for f in dataclasses.fields(x)]


def _is_dataclass(x: Any) -> bool:
    return dataclasses.is_dataclass(x) and not isinstance(x, type)


def _is_opaque(x: Any) -> bool:
    """Whether this is a mapping that is not made of its names again: tensordict's have a shape of their own, by whose
    rows they iterate. What they hold is found where the code reads it, as in any other object."""
    known = getattr(sys.modules.get("tensordict"), "is_tensor_collection", None)
    return known is not None and bool(known(x))


def _is_cache(x: Any) -> bool:
    """Whether this is a cache of keys and values, or a layer of one: objects that are containers of tensors."""
    known = sys.modules.get("transformers.cache_utils")  # who has made one has imported it
    if known is None:
        return False
    kinds = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin")
    return isinstance(x, tuple(getattr(known, kind) for kind in kinds if hasattr(known, kind)))


def caches(tree: Any) -> list[Any]:
    """The caches in ``tree``, outermost ones only. A model writes into those that it is given."""
    if _is_cache(tree):
        return [tree]
    if _is_opaque(tree):
        return []
    if isinstance(tree, Mapping):
        return [c for x in tree.values() for c in caches(x)]
    if isinstance(tree, (list, tuple)):
        return [c for x in tree for c in caches(x)]
    if _is_dataclass(tree):
        return [c for _, x in _attributes(tree) for c in caches(x)]
    return []


def _renewed(old: Any, new: Any) -> Any:
    """``new``, in the objects that ``old`` is made of: whoever holds the cache finds there what a run has put in."""
    if _is_cache(old) and type(old) is type(new):
        vars(old).update([(k, _renewed(vars(old).get(k), v)) for k, v in vars(new).items()])
        return old
    if type(old) is list and type(new) is list:
        old[:] = [_renewed(a, b) for a, b in zip(old, new, strict=False)] + new[len(old) :]
        return old
    return new


def _shape_of(tree: Any) -> Any:
    """The containers of ``tree`` without its leaves, comparable by equality."""
    if isinstance(tree, torch.Tensor) or _is_opaque(tree):
        return None
    if isinstance(tree, Mapping):
        return type(tree).__qualname__, tuple((k, _shape_of(tree[k])) for k in _names(tree))
    if isinstance(tree, (list, tuple)) and type(tree) is not torch.Size:
        return type(tree).__qualname__, tuple(_shape_of(x) for x in tree)
    if _is_cache(tree) or _is_dataclass(tree):
        return type(tree).__qualname__, tuple((n, _shape_of(v)) for n, v in _attributes(tree))
    return None


def flatten(tree: Any) -> list[Any]:
    """The leaves of ``tree``; ``Slot.key`` of inputs counts the tensors among them."""
    leaves: list[Any] = []
    map_leaves(leaves.append, tree)
    return leaves


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    return [x for x in flatten(tree) if isinstance(x, torch.Tensor)]


@dataclass(frozen=True)
class BatchSpec:
    """What a batch must look like to be given to a captured step.

    ``leaves`` holds a `TensorLeaf` for each tensor and the value itself for everything else.
    """

    containers: Any
    leaves: tuple[Any, ...]

    @staticmethod
    def of(batch: Any) -> BatchSpec:
        return BatchSpec(_shape_of(batch), tuple(_described(x) for x in flatten(batch)))

    def fits(self, batch: Any) -> bool:
        return self.misfit(batch) is None

    def misfit(self, batch: Any, leaves: Sequence[Any] | None = None) -> str | None:
        """What is different about ``batch``, or None if a captured step can take it; ``leaves`` are its own, where
        they are known."""
        if _shape_of(batch) != self.containers:
            return "the batch's structure"
        leaves = flatten(batch) if leaves is None else leaves
        for k, (leaf, known) in enumerate(zip(leaves, self.leaves, strict=True)):
            now = _described(leaf)
            if type(now) is not type(known) or now != known:
                return f"leaf {k} of the batch: {now} instead of {known}"
        return None


@dataclass(frozen=True)
class TensorLeaf:
    """What a captured step can ask about a tensor of the batch without its contents."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    requires_grad: bool
    has_graph: bool = False
    own_class: type | None = None

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorLeaf:
        strided = tensor.layout is torch.strided and not tensor.is_nested
        return TensorLeaf(
            tensor.dtype, () if tensor.is_nested else tuple(tensor.shape),
            tuple(tensor.stride()) if strided else (), str(tensor.device), tensor.requires_grad,
            tensor.grad_fn is not None, type(tensor) if compat.is_own_class(type(tensor)) else None,
        )  # fmt: skip


def _described(leaf: Any) -> Any:
    return TensorLeaf.of(leaf) if isinstance(leaf, torch.Tensor) else leaf


@dataclass(frozen=True)
class Results:
    """How a program's results are put together: ``tree`` has a position where a result goes; ``after`` are the caches
    of the batch as the run leaves them, in that form, too. A ``layout`` is that of the DTensor of which a result
    is this rank's part."""

    tree: Any
    after: tuple[Any, ...] = ()

    @dataclass(frozen=True)
    class Position:
        index: int
        layout: compat_distributed.Layout | None = None

    @staticmethod
    def of_refs(tree: Any, after: Sequence[Any] = ()) -> tuple[Results, list[int]]:
        """Both hold ``Ref``s; returns the spec and the values in order."""
        values: list[int] = []

        def leaf(x: Any) -> Any:
            if type(x) is not Ref:
                return x
            values.append(x.value)
            return Results.Position(len(values) - 1)

        return Results(map_leaves(leaf, tree), tuple([map_leaves(leaf, c) for c in after])), values

    def unflatten(self, tensors: Any, batch: Any = None) -> Any:
        """The caller's structure with ``tensors`` in their places; caches of ``batch`` get what the run has put into
        them. Raises ``BadInput`` if there are too few tensors."""
        given = caches(batch) if self.after else []

        def leaf(x: Any) -> Any:
            if type(x) is Given:
                return given[x.index]
            if type(x) is not Results.Position:
                return x
            if x.index >= len(tensors):
                raise BadInput(f"result {x.index} is missing: the program handed back {len(tensors)}")
            return compat_distributed.laid_out(tensors[x.index], x.layout)

        for cache, after in zip(given, self.after, strict=True):
            _renewed(cache, map_leaves(leaf, after))
        return map_leaves(leaf, self.tree)


def batch_size(sample: Any, dim: int = 0) -> int:
    """The size of dimension ``dim`` that most of the sample's tensors share. Raises ``BadInput`` if none has it."""
    sizes = [x.shape[dim] for x in flatten(sample) if isinstance(x, torch.Tensor) and x.dim() > dim]
    if not sizes:
        which = "first dimension" if not dim else f"dimension {dim}"
        fault = f"no tensor in a sample of type {type(sample).__name__} has a {which} for the batch"
        raise BadInput(fault, place="sample")
    return int(Counter(sizes).most_common(1)[0][0])


def batched(sample: Any, dim: int = 0) -> tuple[int, int]:
    """How many of the sample's tensors have the batch as a dimension, and how many tensors there are."""
    was, tensors = batch_size(sample, dim), [x for x in flatten(sample) if isinstance(x, torch.Tensor)]
    return sum(_at(x, was, dim) is not None for x in tensors), len(tensors)


def resized(sample: Any, batch: int, dim: int = 0) -> Any:
    """The sample with ``batch`` in place of its batch size wherever that is dimension ``dim`` of a tensor, or the
    first one of a tensor that has no such dimension; all tensors on the meta device."""
    was = batch_size(sample, dim)

    def leaf(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        at, shape = _at(x, was, dim), list(x.shape)
        if at is not None:
            shape[at] = batch
        return torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)

    return map_leaves(leaf, sample)


def _at(x: torch.Tensor, was: int, dim: int) -> int | None:
    """Which dimension of a tensor is the batch."""
    if x.dim() > dim:
        return dim if x.shape[dim] == was else None
    return 0 if x.dim() and x.shape[0] == was else None


LossFn = Callable[[Any, Any], Any]


def loss_function(loss_fn: Any, batch: Any) -> LossFn:
    """``loss_fn`` as a function of (model, batch). Raises ``BadInput`` where it does not fit the batch."""
    if isinstance(loss_fn, torch.nn.Module):
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
            fault = f"batch of type {type(batch).__name__} for a loss module; give (inputs, targets)"
            raise BadInput(fault, place="batch")
        return lambda model, pair: loss_fn(model(pair[0]), pair[1])
    if loss_fn is not None:
        if not callable(loss_fn):
            fault = f"loss_fn of type {type(loss_fn).__name__}; give a function of (model, batch) or a module"
            raise BadInput(fault, place="loss_fn")
        return loss_fn
    if not isinstance(batch, Mapping):
        fault = (
            f"batch of type {type(batch).__name__} without loss_fn; give a mapping of the model's arguments"
        )
        raise BadInput(fault, place="batch")
    return _own_loss


def _own_loss(model: Any, batch: Any) -> Any:
    out = model(**batch)
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise BadInput(
            f"no loss in the model's output of type {type(out).__name__}; give loss_fn", place="loss_fn"
        )
    return loss


def called(model: Any, sample: Any) -> Any:
    """The model's results for a mapping of keyword arguments, a tuple of positional ones, or the one argument."""
    if isinstance(sample, Mapping):
        return model(**sample)
    return model(*sample) if isinstance(sample, (tuple, list)) else model(sample)


def summed_output(model: Any, sample: Any) -> Any:
    """The output's ``loss``, otherwise the sum of its ``logits`` or of its first floating-point tensor."""
    out = called(model, sample)
    for key in ("loss", "logits"):
        found = out.get(key) if isinstance(out, Mapping) else getattr(out, key, None)
        if isinstance(found, torch.Tensor):
            return found if key == "loss" and found.dim() == 0 else found.sum()
    for t in flatten(out):
        if isinstance(t, torch.Tensor) and t.requires_grad:
            return t.sum()
    fault = f"the model's output of type {type(out).__name__} does not depend on its parameters"
    raise BadInput(fault, place="model")


def checked_loss(out: Any) -> torch.Tensor:
    """The loss among what a loss function returned. Raises ``BadInput`` unless it is one number with a gradient."""
    loss = out[0] if isinstance(out, tuple) and out else out
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        shown = f"of type {type(loss).__name__}"
        if isinstance(loss, torch.Tensor):
            shown = f"a {loss.dtype} tensor of shape {tuple(loss.shape)}"
        raise BadInput(
            f"the loss is {shown}; return a floating-point tensor with one element", place="loss_fn"
        )
    if not loss.requires_grad:
        raise BadInput("the loss depends on no parameter that requires a gradient", place="loss_fn")
    return loss


# --- batches of varying length ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pad:
    """How batches of varying length are filled up to few lengths, each of which is captured and planned once.

    ``Pad({"input_ids": 0, "attention_mask": 0, "labels": -100}, to=(128, 256, 512))`` fills each of these tensors up
    along ``dim`` with its number, at the end, to the least of the lengths that holds the batch. ``fill`` is built as
    the batch is: a mapping by name (for objects with named fields, too), a sequence by position, inside of one
    another, or one number for a batch that is one tensor. What it does not name, what it says None of, and what has
    no dimension ``dim`` stays as it is. All that is filled has one length.

    ``multiple``, instead of ``to``: lengths are rounded up to multiples of it, of which ``most`` is the largest.

    Raises ``BadInput`` for lengths that make no sense.
    """

    fill: Any
    to: int | Sequence[int] = ()
    dim: int = 1
    multiple: int | None = None
    most: int | None = None

    def __post_init__(self) -> None:
        lengths = (self.to,) if isinstance(self.to, int) else tuple(self.to)
        given = [*lengths, *(x for x in (self.multiple, self.most) if x is not None)]
        for n in given:
            if isinstance(n, bool) or not isinstance(n, int) or n < 1:
                raise BadInput("a length is a whole number, 1 or more", n, "Pad")
        if bool(lengths) == (self.multiple is not None):
            which = "both to and multiple are" if lengths else "neither to nor multiple is"
            raise BadInput(f"{which} given: say the lengths, or what they are multiples of", place="Pad")
        if self.most is not None and (self.multiple is None or self.most < self.multiple):
            raise BadInput(
                "most is the largest multiple there may be: it requires a multiple", self.most, "Pad"
            )
        object.__setattr__(self, "to", tuple(sorted(set(lengths))))

    @property
    def lengths(self) -> Sequence[int] | None:
        """All lengths there may be, the least first; None where there is no largest."""
        if self.multiple is None:
            return self.to  # type: ignore[return-value]
        return None if self.most is None else range(self.multiple, self.most + 1, self.multiple)

    def length(self, n: int) -> int:
        """The least length that holds ``n``. Raises ``BadInput`` if none does."""
        lengths = self.lengths
        if lengths is None:
            assert self.multiple is not None
            return max(1, -(-n // self.multiple)) * self.multiple
        found = next((x for x in lengths if x >= n), None)
        if found is None:
            raise BadInput(
                f"a batch of length {n} at dimension {self.dim}, and the largest length is {lengths[-1]}: "
                f"truncate longer batches, or give a Pad with a larger length",
                place="pad_to",
            )
        return found


def padded(batch: Any, pads: Sequence[Pad], *, largest: bool = False, whole: bool = False) -> Any:
    """The batch, filled up as each of ``pads`` says; to the ``largest`` length there is, if that is wanted and known.
    ``whole``: a tensor that is not named and has the batch's length is an error.

    Raises ``BadInput`` for a batch that is too long or not as a ``Pad`` describes it.
    """
    named: set[tuple[Any, ...]] = set()
    lengths = []
    for pad in pads:
        rows = _paths(batch)
        fills = {path: _fill_of(pad.fill, path) for path, _ in rows}
        _check_names(pad.fill, [path for path, x in rows if isinstance(x, torch.Tensor)])
        named |= {path for path, (is_named, _) in fills.items() if is_named}
        filled = {
            path: x for path, x in rows
            if fills[path][1] is not None and isinstance(x, torch.Tensor) and -x.dim() <= pad.dim < x.dim()
        }  # fmt: skip
        n = _common_length(filled, pad.dim)
        lengths.append((pad.dim, n))
        now = pad.lengths[-1] if largest and pad.lengths is not None else 0
        length = max(now, pad.length(n))
        made = iter([
            _grown(x, pad.dim, length, fills[path][1], _name(path)) if path in filled else x for path, x in rows
        ])  # fmt: skip
        if any(x.shape[pad.dim] != length for x in filled.values()):
            batch = map_leaves(lambda _: next(made), batch)  # noqa: B023
    if whole:
        _check_whole(batch, named, lengths)
    return batch


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """The leaves in the order of `map_leaves`, each with the names and positions that lead to it."""
    if isinstance(tree, UserDict):
        return _paths(tree.data, path)
    if isinstance(tree, Mapping):
        inner = [(k, tree[k]) for k in _names(tree)]
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        inner = list(zip(tree._fields, tree, strict=True))
    elif isinstance(tree, (list, tuple)) and type(tree) is not torch.Size:
        inner = list(enumerate(tree))
    elif _is_cache(tree) or _is_dataclass(tree):
        inner = _attributes(tree)
    else:
        return [(path, tree)]
    return [row for k, x in inner for row in _paths(x, (*path, k))]


def _fill_of(fill: Any, path: tuple[Any, ...]) -> tuple[bool, Any]:
    """Whether ``fill`` says something of the leaf at ``path``, and what."""
    for key in path:
        if isinstance(fill, Mapping):
            if key not in fill:
                return False, None
            fill = fill[key]
        elif isinstance(fill, tuple) and hasattr(fill, "_fields"):
            fill = getattr(fill, str(key), None)
        elif isinstance(fill, (list, tuple)):
            if not isinstance(key, int) or key >= len(fill):
                return False, None
            fill = fill[key]
        else:
            return fill is None, None  # of all that is inside
    return True, fill if isinstance(fill, (bool, int, float, complex)) else None


def _check_names(fill: Any, paths: list[tuple[Any, ...]]) -> None:
    """Raises ``BadInput`` for what is said of no tensor of the batch."""
    known = set(paths)
    for path, value in _paths(fill):
        if value is None or path in known:
            if value is not None and not isinstance(value, (bool, int, float, complex)):
                raise BadInput(f"what fills {_name(path)} is no number", value, "pad_to")
            continue
        there = ", ".join(_name(p) for p in paths[:12]) or "none"
        raise BadInput(f"the batch has no tensor {_name(path)}: its tensors are {there}", place="pad_to")


def _name(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key!r}]" for key in path) or "batch"


def _common_length(filled: Mapping[tuple[Any, ...], torch.Tensor], dim: int) -> int:
    if not filled:
        raise BadInput(f"no tensor that is to be filled has a dimension {dim}", place="pad_to")
    sizes = {path: int(x.shape[dim]) for path, x in filled.items()}
    first = next(iter(sizes))
    other = next((path for path, n in sizes.items() if n != sizes[first]), None)
    if other is not None:
        raise BadInput(
            f"the lengths at dimension {dim} differ: {sizes[first]} of {_name(first)}, {sizes[other]} of "
            f"{_name(other)}; give a Pad for each length, pad_to=[Pad(…), Pad(…)]",
            place="pad_to",
        )
    return sizes[first]


def _grown(x: torch.Tensor, dim: int, length: int, value: Any, name: str) -> torch.Tensor:
    """The tensor up to ``length``, its end filled with ``value``; itself if it has that length."""
    if x.layout is not torch.strided or x.is_nested:
        raise BadInput(f"{name} is no dense tensor: pad it before", str(x.layout), "pad_to")
    if x.shape[dim] == length:
        return x
    _check_value(value, x.dtype, name)
    shape = list(x.shape)
    shape[dim] = length
    last = x.dim() in (4, 5) and not x.is_contiguous()
    kinds = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = last and x.is_contiguous(memory_format=kinds[x.dim()])
    layout = kinds[x.dim()] if last else torch.contiguous_format
    grown = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
    n = x.shape[dim]
    with torch.no_grad():
        grown.narrow(dim, 0, n).copy_(x)
        grown.narrow(dim, n, length - n).fill_(value)
    return grown.requires_grad_(x.requires_grad)


def _check_value(value: Any, dtype: torch.dtype, name: str) -> None:
    """Raises ``BadInput`` for a number that a tensor of this type would hold as another."""
    if dtype.is_complex or (dtype.is_floating_point and not isinstance(value, complex)):
        return
    low, high = (0, 1) if dtype == torch.bool else (0, -1)
    if dtype != torch.bool and not dtype.is_floating_point:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    whole = not isinstance(value, complex) and (isinstance(value, int) or value.is_integer())
    if not whole or not low <= value <= high:
        raise BadInput(f"{name} is of type {dtype}, which cannot hold what is to fill it", value, "pad_to")


def _check_whole(batch: Any, named: set[tuple[Any, ...]], lengths: list[tuple[int, int]]) -> None:
    for path, x in _paths(batch):
        if not isinstance(x, torch.Tensor) or path in named:
            continue
        for dim, n in lengths:
            if -x.dim() <= dim < x.dim() and x.shape[dim] == n and n > 1:
                raise BadInput(
                    f"{_name(path)} has length {n} at dimension {dim} as well, and nothing is said of it: say what "
                    "fills it, or None to leave it as it is",
                    place="pad_to",
                )
