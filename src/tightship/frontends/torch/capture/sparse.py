"""Sparse gradients of embeddings: two strided tensors, rows and what each gets, until the update puts them together.

Autograd makes such a gradient, adds several up and hands it to the parameter by a handful of ops
(torch/csrc/autograd/functions/accumulate_grad.h, torch/csrc/autograd/input_buffer.cpp). What makes the two parts is
recorded; sums, and leaving out rows of padding, after which the number of rows follows from data, are done with the
update. The copy that eager makes of a gradient that it cannot take over changes nothing.

A loop that is followed as it is (`LoopSparse`) has sparse tensors of its own instead: each op on one is run on zeros
in the rows that the batch names, which says how many rows its result has.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from tightship.errors import Unplannable
from tightship.frontends.torch import compat, compat_ops
from tightship.frontends.torch.program import map_tree, tensors_in

__all__ = ["LoopSparse", "Pair", "SparseCall", "SparseGradients", "parts_of"]

_aten = torch.ops.aten
_MAKE = _aten._sparse_coo_tensor_with_dims_and_tensors.default
_NOT, _SELECT = _aten.ne.Scalar, _aten.index.Tensor
_EMBEDDINGS = ("EmbeddingBackward0", "EmbeddingBagBackward0")


class Pair(NamedTuple):
    """``rows`` (1, n) says which rows of a table get the ``values`` (n, …), but ``padding``; rows may come several
    times."""

    rows: torch.Tensor
    values: torch.Tensor
    padding: int | None = None


class SparseGradients:
    """Those of one capture, by the fake tensor that stands for each; ``recording`` is the mode that records ops."""

    def __init__(self, recording: AbstractContextManager[Any]) -> None:
        self._recording = recording
        self._known: dict[int, tuple[torch.Tensor, tuple[Pair, ...]]] = {}
        self._parts: dict[int, tuple[torch.Tensor, tuple[Pair, ...]]] = {}
        """Stand-ins for the parts of a sum, or with padding, which autograd takes out and puts together again."""
        self._stays: tuple[torch.Tensor, int] | None = None
        """A stand-in for the mask of what is not padding, and the padding, of the gradient that is being made."""

    def terms(self, gradient: object) -> tuple[Pair, ...]:
        """What a sparse gradient is the sum of, each added to the sum of those behind it; empty for other tensors."""
        found = self._known.get(id(gradient))
        return () if found is None else found[1]

    def instead(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an op of the backward pass returns that makes or asks of a sparse gradient; ``NotImplemented`` for any
        other op, or one whose bits would be others."""
        if fn is _MAKE:
            sparse_dims, _, shape, rows, values = args[:5]
            padding, self._stays = self._stays and self._stays[1], None
            terms = self._parts[id(rows)][1] if id(rows) in self._parts else (Pair(rows, values, padding),)
            return self._made(shape, terms) if sparse_dims == 1 else NotImplemented
        if fn in (_NOT, _SELECT) and compat.backward_node() in _EMBEDDINGS:
            return self._unfiltered(fn, args)
        if any(id(x) in self._parts for x in args):
            if fn in _SAME:
                return args[0]
            raise Unplannable(
                f"{fn} on the parts of a sum of sparse gradients, or of one with padding",
                "which rows it has follows from data",
                "sparse=False in the embedding",
            )  # fmt: skip
        if fn is _aten._embedding_bag_backward.default and _is_sparse_bag(args, kwargs):
            with self._recording:
                return _sparse_bag(*args, **kwargs)
        given = [self.terms(x) for x in args if isinstance(x, torch.Tensor)]
        if not given or not all(given):
            return NotImplemented
        first, shape = given[0], args[0].shape
        if fn in (_aten.clone.default, *_SAME):
            return self._made(shape, first)
        if fn is _aten.add.Tensor and len(given) == 2 and len(first) == 1 and not kwargs:
            return self._made(shape, first + given[1])
        if fn in _PARTS:
            plain = len(first) == 1 and first[0].padding is None
            return first[0][_PARTS[fn]] if plain else self._part(first, _PARTS[fn])
        if len(first) > 1:
            return NotImplemented
        number = first[0].rows.shape[1]
        if first[0].padding is not None:
            return NotImplemented
        return {_aten._nnz.default: number, _aten.is_coalesced.default: number < 2}.get(fn, NotImplemented)

    def _unfiltered(self, fn: Any, args: tuple[Any, ...]) -> Any:
        """All rows, where ``embedding_sparse_backward`` leaves out those of padding."""
        if fn is _NOT:
            self._stays = torch.empty_like(args[0], dtype=torch.bool), args[1]
            return self._stays[0]
        given, (mask,) = args
        if self._stays is None or mask is not self._stays[0]:
            return NotImplemented
        with self._recording:
            return given.reshape(-1, *given.shape[mask.dim() :])

    def _made(self, shape: Any, terms: tuple[Pair, ...]) -> torch.Tensor:
        made = compat.sparse_tensor(shape, terms[0].rows, terms[0].values)
        self._known[id(made)] = made, terms  # kept, so that nothing else gets its id
        return made

    def _part(self, terms: tuple[Pair, ...], number: int) -> torch.Tensor:
        """A stand-in, of another size than the part has."""
        made = torch.empty_like(terms[0][number])
        self._parts[id(made)] = made, terms
        return made


_SAME = (_aten.detach.default, _aten.alias.default)

_PARTS = {
    _aten._indices.default: 0, _aten.indices.default: 0, _aten._values.default: 1, _aten.values.default: 1,
}  # fmt: skip


def _is_sparse_bag(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [a.name for a in _aten._embedding_bag_backward.default._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}["sparse"])


def _sparse_bag(
    grad: Any, indices: Any, offsets: Any, bags: Any, bag_size: Any, _most: Any, weights: int, scale: bool,
    mode: int, _sparse: bool, per_sample: Any, padding: int = -1,
) -> Any:  # fmt: skip
    """As the kernel (``_embedding_bag_backward`` in aten/src/ATen/native/EmbeddingBag.cpp), by the ops that it is
    made of; sums of integers are exact in any order."""
    if indices.numel() and not bags.numel():
        bags = torch.zeros(indices.shape[0] + 1, dtype=offsets.dtype, device=offsets.device)
        bags.index_add_(0, offsets, torch.ones_like(offsets))
        bags[:1] -= 1
        bags = bags.cumsum(0, dtype=offsets.dtype)[: indices.shape[0]]
    return _aten._embedding_bag_sparse_backward(
        grad, indices, offsets, bags, bag_size, weights, scale, mode, per_sample, padding
    )


# --- loops that are followed as they are ----------------------------------------------------------------------------


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors that hold a tensor's bytes."""
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)


class _Like(NamedTuple):
    """A strided argument, or the ``values`` of a sparse one, whose ``rows`` then say where they lie."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    rows: torch.Tensor | None = None
    whole: tuple[int, ...] = ()
    coalesced: bool = False

    def made(self) -> torch.Tensor:
        if self.rows is None:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        made = compat.sparse_tensor(self.whole, self.rows, torch.zeros(self.shape, dtype=self.dtype))
        return made._coalesced_(self.coalesced)


@dataclass(frozen=True)
class SparseCall:
    """In the place of a function: ``op`` on sparse tensors, with a description in the place of each tensor."""

    op: Any
    args: Any
    kwargs: Any

    @property
    def key(self) -> str:
        """From which it follows what it asks of the allocator."""

        def text(x: Any) -> Any:
            return (*x[:3], None if x.rows is None else x.rows.tolist(), *x[4:]) if type(x) is _Like else x

        return repr((str(self.op), _mapped(text, self.args), _mapped(text, self.kwargs)))

    def prepare(self) -> partial[Any]:
        """The call, on tensors made for it."""
        made = partial(_mapped, lambda x: x.made() if type(x) is _Like else x)
        return partial(compat_ops.direct(self.op), *made(self.args), **made(self.kwargs))


def _mapped(fn: Callable[[Any], Any], tree: Any) -> Any:
    """As `map_tree`, for which a description is a tuple like any other."""
    if type(tree) in (list, tuple):
        return type(tree)(_mapped(fn, x) for x in tree)
    if isinstance(tree, dict):
        return {k: _mapped(fn, x) for k, x in tree.items()}
    return fn(tree)


class LoopSparse(SparseGradients):
    """Sparse tensors of a loop without data. ``mode`` makes such tensors; ``contents(tensor, fn)`` is what the
    batch has in one. Which rows a sparse tensor has is known by the tensor that holds their numbers."""

    def __init__(
        self,
        recording: AbstractContextManager[Any],
        mode: Any,
        contents: Callable[[torch.Tensor, Any], torch.Tensor],
    ) -> None:
        super().__init__(recording)
        self._mode, self._contents = mode, contents
        self._rows: dict[int, tuple[Any, torch.Tensor]] = {}
        self._met = False

    def concerns(self, fn: Any, args: Any, kwargs: Any) -> bool:
        """Whether the call makes or takes a sparse tensor."""
        self._met = self._met or fn is _MAKE
        return (
            self._met
            and fn.namespace != "prim"
            and (fn is _MAKE or any(t.is_sparse for t in tensors_in((args, kwargs))))
        )

    def instead(self, fn: Any, args: Any, kwargs: Any) -> Any:
        """A bag's gradient by the ops that it is made of; rows of padding are left out, as in eager."""
        if fn is _aten._embedding_bag_backward.default and _is_sparse_bag(args, kwargs):
            with self._recording:
                return _sparse_bag(*args, **kwargs)
        return NotImplemented

    def asks(self, fn: Any, args: Any, kwargs: Any) -> Any:
        """What a call returns that asks of a sparse tensor, or makes one of the parts that there are, at no byte;
        ``NotImplemented`` for other calls."""
        if fn is _MAKE:
            self._knows_rows(args[3], fn, int(args[2][0]))
        elif fn is _aten.clone.default and compat.backward_node() == _ACCUMULATES:
            parts = parts_of(args[0])
            if not all(x.is_contiguous() for x in parts):
                return NotImplemented
            return compat.sparse_tensor(args[0].shape, *parts)  # taken over, where no mode looks on
        elif fn not in _ASKS:
            return NotImplemented
        return fn(*args, **kwargs)

    def run(
        self, fn: Any, args: Any, kwargs: Any
    ) -> tuple[SparseCall, list[torch.Tensor], Callable[[], Any]]:
        """The call, run on zeros: as it can be run again, new tensors without data for what it has made, and what it
        returns, to be asked for once these are known."""
        given = list(tensors_in((args, kwargs)))
        device, made, table = given[0].device, [], next(t.shape[0] for t in given if t.is_sparse)
        with compat.without_modes(), compat.plain_execution():
            touched = self._touched(given, table)
            like = partial(map_tree, partial(self._like, touched, table))
            call = SparseCall(fn, like(args), like(kwargs))
            ready = call.prepare()
            pairs = zip(given, tensors_in((ready.args, ready.keywords)), strict=True)
            parts = [
                pair for fake, real in pairs for pair in zip(parts_of(fake), parts_of(real), strict=True)
            ]
            known = {compat.storage_key(real): fake for fake, real in parts}
            result = ready()
            found = [(x, parts_of(x), x.is_sparse and x.is_coalesced()) for x in tensors_in(result)]
        stand_ins: dict[int, torch.Tensor] = {}
        for x, its, coalesced in found:
            fakes = []
            for part in its:
                fake = known.get(compat.storage_key(part))
                if fake is None:
                    nbytes = part.untyped_storage().nbytes()
                    home = compat.blank_like(self._mode, (nbytes,), (1,), 0, torch.uint8, device)
                    look = tuple(part.shape), part.stride(), int(part.storage_offset()), part.dtype, device
                    fake = compat.blank_like(self._mode, *look, home)
                    made.append(fake)
                fakes.append(fake)
            if x.is_sparse:
                self._knows(fakes[0], its[0] if touched is None else touched[its[0]])
                stand_ins[id(x)] = compat.sparse_tensor((table, *x.shape[1:]), *fakes)._coalesced_(coalesced)
            else:
                stand_ins[id(x)] = fakes[0]

        def returned() -> Any:
            if not fn._schema.is_mutable:
                return map_tree(lambda x: stand_ins.get(id(x), x), result)
            if args[0].is_sparse:
                args[0].data = stand_ins[id(result)]
            return args[0]

        return call, made, returned

    def _touched(self, given: list[torch.Tensor], table: int) -> torch.Tensor | None:
        """The rows that a call reads and writes, where it is run on these alone, as the table is too large."""
        if not any(_is_table(t, table) and t.nbytes > _LARGE for t in given):
            return None
        return torch.cat([self._numbers(t).flatten() for t in given if t.is_sparse]).unique()

    def _like(self, touched: torch.Tensor | None, table: int, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if not x.is_sparse:
            shape = tuple(x.shape)
            if touched is not None and _is_table(x, table):
                shape = (touched.numel(), *shape[1:])
            return _Like(shape, x.stride(), x.dtype)
        numbers, values, whole = self._numbers(x), x._values(), tuple(x.shape)
        if touched is not None:
            numbers, whole = torch.searchsorted(touched, numbers), (touched.numel(), *whole[1:])
        return _Like(tuple(values.shape), values.stride(), x.dtype, numbers, whole, x.is_coalesced())

    def _numbers(self, sparse: torch.Tensor) -> torch.Tensor:
        return self._rows[compat.storage_key(sparse._indices())][1]

    def _knows(self, rows: torch.Tensor, numbers: torch.Tensor) -> None:
        with compat.without_modes():
            self._rows[compat.storage_key(rows)] = compat.storage_reference(rows), numbers.clone()

    def _knows_rows(self, rows: torch.Tensor, fn: Any, most: int) -> None:
        if compat.storage_key(rows) in self._rows:
            return
        try:
            numbers = self._contents(rows, fn)
        except (Unplannable, NotImplementedError):  # a batch without data: as many rows as can be
            with compat.without_modes():
                numbers = torch.arange(rows.numel()).remainder_(most).view(rows.shape)
        self._knows(rows, numbers)


def _is_table(tensor: torch.Tensor, rows: int) -> bool:
    return not tensor.is_sparse and tensor.shape[:1] == (rows,) and tensor.is_contiguous()


_LARGE = 1 << 26
"""Bytes above which a table is not made to run a call on."""

_ACCUMULATES = "torch::autograd::AccumulateGrad"
_ASKS = (
    *_SAME, *_PARTS, _aten._nnz.default, _aten.is_coalesced.default, _aten._coalesced_.default,
    _aten.sparse_dim.default, _aten.dense_dim.default, _aten._dimI.default, _aten._dimV.default,
)  # fmt: skip
