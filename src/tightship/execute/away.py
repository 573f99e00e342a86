"""Tensors of the caller's that are away: without memory between steps, their bytes in a host pool (a file without a
name on a CPU, pinned memory beside a GPU), and what moves them: `Fetch`, `Store`, and `Lent`, an update that works on
them. `stream` decides which, and when.

Whatever reads one that is away raises ``Unsupported``.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from tightship.errors import BadInput, Unsupported
from tightship.execute import allocator
from tightship.execute.host_pool import FilePool, HostPool, in_file, pool_beside
from tightship.frontends.torch import compat
from tightship.frontends.torch.optimizer.given import each
from tightship.frontends.torch.optimizer.updates import Updater, state_at
from tightship.frontends.torch.program import Slot, dtype_of, tensors_in
from tightship.frontends.torch.rerun.arguments import name_of
from tightship.graph import Value, aligned
from tightship.process_local import NotCopied

__all__ = ["Away", "Fetch", "FetchPiece", "Lent", "Store", "StorePiece", "Streams", "Turn"]

_METADATA = {
    "shape", "dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "ndim", "itemsize", "nbytes",
    "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "grad_fn", "_version", "names", "_backward_hooks",
    "_post_accumulate_grad_hooks", "output_nr", "retains_grad", "is_mkldnn", "is_mps", "is_xla", "is_xpu",
    "is_nested",
}  # fmt: skip
_METHODS = {
    "size", "dim", "numel", "nelement", "stride", "storage_offset", "element_size", "is_floating_point",
    "is_complex", "is_signed", "is_contiguous", "requires_grad_", "register_hook", "ndimension", "is_inference",
    "register_post_accumulate_grad_hook", "__hash__", "__len__", "get_device", "is_set_to", "dim_order",
}  # fmt: skip
_ATTRIBUTE = "_tightship_streamed"


def _refusing(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    name = name_of(func)
    attribute, _, how = name.partition(".__")
    if name in _METHODS or (how and attribute in _METADATA):
        with compat.without_overrides():
            return func(*args, **(kwargs or {}))
    known = (vars(t).get(_ATTRIBUTE) for t in tensors_in((args, kwargs or {})))
    whose = next(filter(None, known), "a tensor")
    raise Unsupported(
        f"{attribute} of {whose} between steps",
        "it is streamed (allow='stream'): its bytes are outside of memory until a step needs them",
        "do it inside of `with step.gathered():`, which brings everything back",
    )


@lru_cache
def _away_class(cls: Any) -> Any:
    """The class of a tensor of class ``cls`` while its bytes are away: metadata alone can be read."""

    def shown(self: torch.Tensor, *, tensor_contents: Any = None) -> str:
        return f"<{cls.__name__} of shape {tuple(self.shape)} and {self.dtype}, streamed: away between steps>"

    members = {"__torch_function__": classmethod(_refusing), "__repr__": shown, _ATTRIBUTE: ""}
    return type(cls)(cls.__name__, (cls,), members)


_PART = "rows (the update is done in part) of"
_COPIES = 1
"""The pool's stream: copies are made in the order in which they begin."""


class InFlight:
    """A copy that ``begin`` begins, with what it works on; ``ended`` is told of its error, and may raise. Without one
    it is over."""

    def __init__(
        self, begin: Callable[[], Any] | None = None, ended: Callable[[OSError | None], None] | None = None
    ) -> None:
        self._copied: Any = None
        self._error: OSError | None = None
        self._ended = ended
        try:
            self._copied = begin() if begin is not None else None
        except OSError as error:
            self._error = error.with_traceback(None)  # whose frames hold the tensor

    def result(self) -> None:
        """Waits for it, once."""
        copied, error, ended = self._copied, self._error, self._ended
        self._copied = self._error = self._ended = None
        if ended is None:
            return
        try:
            if copied is not None:
                copied.result()
        except OSError as failed:
            error = failed
        ended(error)


class Away:
    """One streamed tensor of the caller's, and its bytes in the pool.

    ``find`` gives the tensor that stands there now, None for optimizer state that was not made yet. ``like`` is the
    graph value with its metadata. ``there``: whether the pool has its contents. ``rescued`` are contents that could
    not be written, which would be lost otherwise.
    """

    def __init__(self, name: str, find: Callable[[], Any], like: Value, device: torch.device) -> None:
        self.name, self.find, self.like, self.device = name, find, like, device
        self.dtype = dtype_of(like.dtype)
        self.nbytes = self.dtype.itemsize
        for n in like.shape:
            self.nbytes *= n
        self.blank = torch.empty_strided(like.shape, like.stride, dtype=self.dtype, device=device)
        self.blank.untyped_storage().resize_(0)
        self.pool: HostPool | None = None
        self.offset = 0
        self.there = False
        self.rescued: torch.Tensor | None = None
        self.pieces: dict[int, torch.Tensor] = {}  # what could not be written of it, by its first byte
        self.tensor: Any = None  # that is without memory now
        self._cls: type | None = None

    def fetch(self) -> torch.Tensor:
        """A tensor with the contents, in memory that is asked for here; without contents if there are none."""
        made, copied = self.begin_fetch()
        copied.result()
        return made

    def begin_fetch(self) -> tuple[torch.Tensor, InFlight]:
        """`fetch`, whose contents are there when the copy has ended."""
        like = self.like
        made = torch.empty_strided(like.shape, like.stride, dtype=self.dtype, device=self.device)
        if self.rescued is not None:
            made.copy_(self.rescued)
        elif self.there:
            return made, self.read(made, 0, self.nbytes)
        return made, InFlight()

    def read(self, made: torch.Tensor, begin: int, size: int, what: str = "") -> InFlight:
        """Begins to copy ``size`` bytes from ``begin`` on into ``made``. What is given back raises ``OSError`` naming
        it, and ``what`` of it."""
        pool = self._in_pool()

        def ended(error: OSError | None) -> None:
            if error is not None:
                raise self._failed(f"reading {what}", error) from error
            flat = made.view(-1).view(torch.uint8) if self.pieces else made
            for at, piece in self.pieces.items():
                low, high = max(at, begin), min(at + len(piece), begin + size)
                if low < high:
                    flat[low - begin : high - begin] = piece[low - at : high - at]

        return InFlight(lambda: pool.read(_COPIES, made.data_ptr(), size, self.offset + begin), ended)

    def mapped(self) -> torch.Tensor:
        """A tensor in the file itself, where there is one: of no bytes in memory. Otherwise as `fetch`."""
        if self.rescued is not None or self.pieces or not isinstance(self.pool, FilePool):
            return self.fetch()
        return self.pool.tensor(self.offset, self.like.shape, self.like.stride, self.dtype)

    def at_home(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the file's own bytes."""
        if not isinstance(self.pool, FilePool):
            return False
        at = self.pool.address(self.offset)
        return at is not None and at == tensor.untyped_storage().data_ptr()

    def write(self, tensor: torch.Tensor) -> InFlight:
        """Begins to copy its contents from now on. What is given back raises ``OSError`` naming it; then they stay in
        memory, and nothing is lost."""
        pool = self._in_pool()

        def ended(error: OSError | None) -> None:
            self.rescued, self.there = None if error is None else self._rescue(tensor), True
            if error is not None:
                raise self._failed("writing", error) from error
            self.pieces.clear()

        return InFlight(lambda: pool.write(_COPIES, tensor.data_ptr(), self.nbytes, self.offset), ended)

    def write_piece(self, tensor: torch.Tensor, begin: int) -> InFlight:
        """As `write`, of the bytes from ``begin`` on."""
        pool = self._in_pool()
        size = tensor.numel() * tensor.itemsize

        def ended(error: OSError | None) -> None:
            self.there = True
            if error is not None:
                self.pieces[begin] = self._rescue(tensor).view(-1).view(torch.uint8)
                raise self._failed(f"writing {_PART}", error, kept=True) from error
            self.pieces.pop(begin, None)

        return InFlight(lambda: pool.write(_COPIES, tensor.data_ptr(), size, self.offset + begin), ended)

    def _rescue(self, tensor: torch.Tensor) -> torch.Tensor:
        with allocator.unplanned(str(self.device)):
            return tensor.detach().clone()

    def _in_pool(self) -> HostPool:
        assert self.pool is not None
        return self.pool

    def _failed(self, verb: str, error: OSError, *, kept: bool = False) -> OSError:
        said = "; its contents are kept in memory" if kept or self.rescued is not None else ""
        why = (error.strerror or str(error)).rpartition(" failed: ")[2]  # the core's begins with what it did
        return OSError(error.errno, f"{verb.strip()} the streamed {self.name} failed: {why}{said}")

    # --- the caller's tensor ---

    def put_away(self) -> None:
        """Writes what stands there to the pool, if it has memory, and takes the memory away."""
        tensor = self.find()
        if tensor is None or (tensor is self.tensor and tensor.untyped_storage().nbytes() == 0):
            return
        self._check(tensor)
        if not self.at_home(tensor):
            self.write(tensor).result()
        self.take_back()

    def _check(self, tensor: torch.Tensor) -> None:
        like = self.like
        if (tuple(tensor.shape), tensor.dtype, tuple(tensor.stride())) != (
            like.shape,
            self.dtype,
            like.stride,
        ):
            raise BadInput(
                f"{self.name} has another shape, type or layout than when it was planned: make a new step",
                tuple(tensor.shape), "stream",
            )  # fmt: skip

    def bring_back(self, *, mapped: bool = False) -> None:
        """Gives the caller's tensor memory and contents, or the bytes of the file."""
        tensor = self.find()
        if tensor is None or tensor is not self.tensor:
            return  # not made yet, or replaced by one that has memory
        tensor.data, self.tensor = self.mapped() if mapped else self.fetch(), None

    def lend(self, memory: torch.Tensor) -> None:
        """For an update that works on the caller's tensor."""
        tensor = self.find()
        if tensor is not None:
            tensor.data = memory

    def take_back(self) -> Any:
        """What the caller's tensor has in memory, as a tensor of its own; the caller's is without memory then."""
        tensor = self.find()
        if tensor is None:
            return None
        memory = tensor.detach()
        tensor.data, self.tensor = self.blank, tensor
        return memory

    def shut(self) -> None:
        """Reading it raises from now on."""
        tensor = self.tensor
        if tensor is not None and self._cls is None:
            cls: Any = type(tensor)
            self._cls, vars(tensor)[_ATTRIBUTE] = cls, self.name
            tensor.__class__ = _away_class(cls)

    def open(self) -> None:
        """To be called before anything else is done with it; undoes `shut`."""
        if self._cls is not None:
            self.tensor.__class__ = self._cls
            vars(self.tensor).pop(_ATTRIBUTE, None)
            self._cls = None


class Streams(NotCopied):
    """What of a model and its optimizer streams, by role and key as slots have them."""

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, folder: Any = None, pinned: int | None = None
    ) -> None:
        self.model, self.optimizer, self.folder, self.pinned = model, optimizer, folder, pinned
        self.items: dict[tuple[str, Any], Away] = {}
        self.gathered = False
        # Who lets go of the step keeps the model: without the step nobody else could fetch its contents.
        weakref.finalize(self, _bring_back, self.items).atexit = False

    def add(self, rows: Sequence[tuple[Slot, Value]]) -> None:
        """From now on these stream, too. Raises ``BadInput`` where there is no room for them."""
        fresh, size = [], 0
        for slot, like in rows:
            away = Away(_name_of(slot), self._finder(slot), like, self._device(slot))
            away.offset = size
            size += aligned(away.nbytes)
            fresh.append((slot, away))
        if not fresh:
            return
        device = fresh[0][1].device
        pool: HostPool = FilePool(size, self.folder)
        if device.type == "cuda":
            pool.close()
            pool = pool_beside(size, str(device), self.pinned, self.folder)
        for slot, away in fresh:
            away.pool = pool
            self.items[slot.role, slot.key] = away

    def shares(self, slot: Slot) -> bool:
        """Whether somebody else holds a view of it, which would no longer be one."""
        tensor = self._finder(slot)()
        return tensor is not None and not compat.is_alone(tensor)

    def _device(self, slot: Slot) -> torch.device:
        name = slot.key if slot.role == "parameter" else slot.key[0]
        owner, last = compat.tensor_home(self.model, "parameter", name)
        device: torch.device = owner[last].device
        return device

    def _finder(self, slot: Slot) -> Callable[[], Any]:
        name, key, which = (slot.key, None, 0) if slot.role == "parameter" else (*slot.key, 0)[:3]
        owner, last = compat.tensor_home(self.model, "parameter", name)
        if slot.role == "parameter":
            return lambda: owner[last]
        parameter, optimizer = owner[last], each(self.optimizer)[which]
        return lambda: state_at(optimizer.state[parameter], key) if parameter in optimizer.state else None

    def put_away(self) -> bool:
        """Takes the memory of all; returns whether any had some."""
        had = False
        for away in self.items.values():  # what lies in the place of another must not be written over
            tensor = away.find()
            if tensor is not None and in_file(tensor) and not away.at_home(tensor):
                tensor.data = tensor.detach().clone()
        for away in self.items.values():
            before = away.tensor
            away.put_away()
            had |= away.tensor is not before
        return had

    def bring_back(self, *, mapped: bool = False) -> None:
        """``mapped``: as bytes of the file, which take no memory."""
        _bring_back(self.items, mapped=mapped)

    def open(self) -> None:
        for away in self.items.values():
            away.open()

    def shut(self) -> None:
        for away in self.items.values():
            away.shut()

    @property
    def nbytes(self) -> int:
        return sum(aligned(a.nbytes) for a in self.items.values())


def _bring_back(items: Mapping[Any, Away], *, mapped: bool = False) -> None:
    """Also in the middle of somebody's capture, where the collector may come by."""
    with compat.without_modes(), torch.device("cpu"), torch.inference_mode(False):
        for away in items.values():
            away.open()
            away.bring_back(mapped=mapped)


def _name_of(slot: Slot) -> str:
    if slot.role == "parameter":
        return f"parameter {slot.key!r}"
    return f"state {slot.key[1]!r} of {slot.key[0]!r}"


# --- what runs in a step ---


class Fetch:
    """Makes a streamed tensor from the pool."""

    def __init__(self, away: Away) -> None:
        self.away = away

    def __call__(self) -> torch.Tensor:
        return self.away.fetch()

    def begun(self) -> tuple[torch.Tensor, InFlight]:
        return self.away.begin_fetch()


class Store:
    """Writes a streamed tensor to the pool."""

    def __init__(self, away: Away) -> None:
        self.away = away

    def __call__(self, tensor: torch.Tensor) -> None:
        self.away.write(tensor).result()

    def begun(self, tensor: torch.Tensor) -> tuple[None, InFlight]:
        return None, self.away.write(tensor)


class FetchPiece:
    """Makes rows of a streamed tensor from the pool."""

    def __init__(self, away: Away, like: Value, begin: int) -> None:
        self.away, self.like, self.begin = away, like, begin

    def __call__(self) -> torch.Tensor:
        made, copied = self.begun()
        copied.result()
        return made

    def begun(self) -> tuple[torch.Tensor, InFlight]:
        away, like = self.away, self.like
        made = torch.empty_strided(like.shape, like.stride, dtype=away.dtype, device=away.device)
        if away.rescued is not None:
            row = self.begin // (away.nbytes // away.like.shape[0])
            made.copy_(away.rescued[row : row + like.shape[0]])
        elif away.there:
            return made, away.read(made, self.begin, made.numel() * made.itemsize, _PART)
        return made, InFlight()


class StorePiece:
    """Writes rows of a streamed tensor to the pool."""

    def __init__(self, away: Away, begin: int) -> None:
        self.away, self.begin = away, begin

    def __call__(self, tensor: torch.Tensor) -> None:
        self.begun(tensor)[1].result()

    def begun(self, tensor: torch.Tensor) -> tuple[None, InFlight]:
        away = self.away
        if away.rescued is None:
            return None, away.write_piece(tensor, self.begin)
        row = self.begin // (away.nbytes // away.like.shape[0])  # the pool has not got the rest of it
        away.rescued[row : row + tensor.shape[0]] = tensor
        return None, InFlight()


class Lent(Updater):
    """An update of tensors that stream: they are lent their memory while it runs. ``lends``: the graph's values and
    what they are. ``rows``: of the parameter, where it is updated in pieces, one after the other in one step of the
    optimizer: ``turn`` is what they share."""

    lends: tuple[tuple[int, Away], ...] = ()
    rows: tuple[int, int] | None = None
    turn: Turn | None = None

    def step(self, gradients: list[torch.Tensor], sparse: Sequence[torch.Tensor] = ()) -> None:
        if self.rows is not None:
            gradients = [g[slice(*self.rows)] for g in gradients]
        super().step(gradients, sparse)

    def ready(self) -> None:
        """To be called before it is lent anything."""
        if self.turn is not None and self.rows is not None:
            self.turn.begin(self, first=self.rows[0] == 0)

    def of_rows(self, rows: tuple[int, int], turn: Turn) -> Lent:
        made = copy.copy(self)
        made.rows, made.turn = rows, turn
        return made

    @staticmethod
    def of(updater: Updater, lends: Sequence[tuple[int, Away]]) -> Lent:
        made: Lent = copy.copy(updater)  # type: ignore[assignment]
        made.__class__ = Lent
        made.lends = tuple(lends)
        return made


class Turn:
    """What the pieces of one update share: numbers of the optimizer's that count steps (``step``) are in each piece
    what they were in the first, and state that is made in its first step is made for each piece."""

    def __init__(self) -> None:
        self.fresh = False
        self.numbers: dict[Any, float] = {}

    def begin(self, update: Lent, *, first: bool) -> None:
        optimizer, param = update.optimizer, update.members[0].param
        if first:
            self.fresh = not update.materialized
            state = optimizer.state[param] if not self.fresh else {}
            self.numbers = {k: t.item() for k, t in state.items() if _is_number(t)}
        elif self.fresh:
            optimizer.state[param] = {}  # which these classes take for none
        else:
            for k, x in self.numbers.items():
                optimizer.state[param][k].fill_(x)


def _is_number(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim == 0
