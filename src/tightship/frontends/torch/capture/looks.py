"""What results look like: metadata of fake tensors as the kernels give it.

PyTorch derives the metadata of fake results from formulas that now and then differ from what the kernel does (other
strides for sizes of one, other types of saved statistics, results that are not there). One wrong stride changes the
ops that follow, and so the bits. Each call with new metadata is therefore run once, on zeros, and believed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch

from tightship.errors import Unsupported
from tightship.frontends.torch import compat, compat_distributed, compat_ops
from tightship.frontends.torch.capture.forms import form_of, made_of, zeros_like
from tightship.frontends.torch.program import leaves_in, map_tree, tensors_in

__all__ = ["LOOKS", "Look", "Looks", "Prober", "is_laid_out", "is_strided", "is_whole"]

_MATRIX_PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")

_RESHAPES = ("aten::view", "aten::_reshape_alias", "aten::_unsafe_view", "aten::alias")

_DEAR_FORMULAS = (
    "aten::native_batch_norm", "aten::native_batch_norm_backward", "aten::native_group_norm",
    "aten::native_group_norm_backward", "aten::native_layer_norm", "aten::native_layer_norm_backward",
)  # fmt: skip
"""Ops whose formula takes many times what the run on zeros takes that decides; results are as large as arguments."""


def is_laid_out(tensor: torch.Tensor) -> bool:
    """Whether strides say where its elements lie, and nothing else does."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor is a strided part of its storage and nothing else."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain and is_laid_out(tensor) and not (tensor.is_conj() or tensor.is_neg())


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor is all of its storage, so that its shape and strides say everything."""
    if not is_strided(tensor) or tensor.storage_offset():
        return False
    return tensor.untyped_storage().nbytes() == _extent(tensor) * tensor.itemsize


def _extent(tensor: torch.Tensor) -> int:
    """How many elements lie from its first to its last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 if tensor.numel() else 0


class _Result(NamedTuple):
    """What one tensor among an op's results looks like. ``source``: which of the tensors given to the op lies in the
    same storage, by number; -1 for a storage of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    source: int


Look = tuple[str, list[tuple[tuple[int, ...], tuple[int, ...], int, str, int] | None]]
"""A call's results as JSON has them: the container (``tuple``, ``list`` or none), and the fields of each tensor's
`_Result` but the device, which is the CPU."""


class Looks:
    """What the results of calls on the CPU look like, by a digest of the call: of this process, and of earlier ones
    on the same machine. ``count`` grows with each new one; beyond ``most`` the oldest are forgotten."""

    def __init__(self, most: int = 50_000) -> None:
        self.most = most
        self.known: dict[str, Look] = {}
        self.count = 0

    def put(self, name: str, look: Look) -> None:
        self.known[name] = look
        self.count += 1
        if len(self.known) > self.most:
            del self.known[next(iter(self.known))]

    def learn(self, others: dict[str, Look]) -> None:
        """Adds what others have found."""
        for name, look in islice(others.items(), max(0, len(others) - self.most), None):
            self.known.setdefault(name, look)


LOOKS = Looks()
"""Of the process."""


def _settings() -> tuple[Any, ...]:
    """What kernels on the CPU go by, beside their arguments."""
    backend = torch.backends.mkldnn
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    exact = torch.are_deterministic_algorithms_enabled()
    return str(torch.__version__), backend.is_available() and backend.enabled, threads, precision, exact


_PLAIN = (
    int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


class Prober:
    """``correct`` replaces fake results by ones with the metadata the kernel gives. Remembers what it has seen.
    ``limit``: bytes of arguments and results above which the formula is believed, so that capture stays light."""

    def __init__(self, fake: Any, looks: Looks = LOOKS, limit: int = 1 << 28) -> None:
        self._fake, self.limit = fake, limit
        self._looks, self._settings = looks, _settings()
        self._seen: dict[Any, Any] = {}
        self._known: dict[Any, Any] = {}
        self.corrected: dict[str, int] = {}

    def results(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Results of a call that look like the kernel's. A call like one before is not dispatched: layers repeat, and
        making a fake tensor takes a fraction of asking for one."""
        given: list[torch.Tensor] = []
        key = self._key(fn, args, kwargs, given)
        known = None if key is None else self._known.get(key)
        name = "" if known is not None or key is None else self._name(key)
        if name and (look := self._looks.known.get(name)) is not None:
            known = self._known[key] = _read_look(look, given)
        if known is not None:
            container, rows = known
            made = [None if r is None else self._made(r, given) for r in rows]
            return made[0] if container is None else container(made)
        out = self.made_up(fn, args, kwargs) if fn._schema.name in _DEAR_FORMULAS else None
        if out is None:
            out = self.correct(fn, args, kwargs, fn(*args, **kwargs))
        if key is not None:
            self._remember(key, given, out, name)
        return out

    def _name(self, key: tuple[Any, ...]) -> str:
        """The same for the same call in every process; empty where there is none, or not for the CPU alone."""
        plain = all(isinstance(x, (*_PLAIN, type, tuple)) for x in key[1:])
        if not plain or any(isinstance(x, torch.device) and x.type != "cpu" for x in key[1:]):
            return ""
        return hashlib.sha256(repr((str(key[0]), key[1:], self._settings)).encode()).hexdigest()[:32]

    def _key(self, fn: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        """What the looks of the results follow from, None where that is not all; ``given`` gets the tensors."""
        if not _follows_metadata(fn) or torch.is_inference_mode_enabled():
            return None
        key: list[Any] = [fn, torch.is_grad_enabled(), torch.get_default_dtype(), *kwargs]
        for x in leaves_in((args, tuple(kwargs.values()))):
            if isinstance(x, torch.Tensor):
                if not compat.is_plain_fake(x, self._fake):
                    return None
                given.append(x)
                nbytes, device = x.untyped_storage().nbytes(), compat.device_of_fake(x)
                key += (x.dtype, x.shape, x.stride(), x.storage_offset(), nbytes, device)
            else:  # 1, 1.0 and True are equal, and give other results
                key += (type(x), x)
        key.append(tuple(len(x) if isinstance(x, (list, tuple)) else -1 for x in args))
        return tuple(key) if given else None

    def _remember(self, key: Any, given: list[torch.Tensor], out: Any, name: str) -> None:
        """Takes down what results look like that can be made again from that alone; by ``name``, for later too."""
        container = type(out) if type(out) in (tuple, list) else None
        rows: list[_Result | None] = []
        sources = {compat.storage_key(t): n for n, t in enumerate(given)}
        seen: set[int] = set()
        for x in out if container is not None else (out,):
            if x is None:
                rows.append(None)
                continue
            if not isinstance(x, torch.Tensor) or not compat.is_plain_fake(x, self._fake):
                return
            home = compat.storage_key(x)
            n, shape, stride, offset = (
                sources.get(home, -1),
                tuple(x.shape),
                x.stride(),
                int(x.storage_offset()),
            )
            whole = 0 if 0 in shape else 1 + sum((d - 1) * s for d, s in zip(shape, stride, strict=True))
            fresh = (
                not offset and home not in seen and x.untyped_storage().nbytes() == whole * x.dtype.itemsize
            )
            if any(x is t for t in given) or (not fresh if n < 0 else len(given) > 1):
                return
            seen.add(home)
            rows.append(_Result(shape, stride, offset, x.dtype, compat.device_of_fake(x), n))
        self._known[key] = container, tuple(rows)
        if name and all(r is None or r.device.type == "cpu" for r in rows):
            plain = [
                r and (r.shape, r.stride, r.offset, str(r.dtype).removeprefix("torch."), r.source)
                for r in rows
            ]
            self._looks.put(name, (container.__name__ if container else "", plain))

    def _made(self, r: _Result, given: list[torch.Tensor]) -> torch.Tensor:
        source = given[r.source] if r.source >= 0 else None
        return compat.blank_like(self._fake, r.shape, r.stride, r.offset, r.dtype, r.device, source)

    def correct(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """``out``, or results like the real ones.

        Raises ``Unsupported`` if a real result shares bytes with an argument and the fake one does not.
        """
        tensors, fresh = list(tensors_in((args, kwargs))), list(tensors_in(out))
        if any(t.layout is not torch.strided for t in fresh):
            return out  # refused where it is recorded
        if not fresh or _believable(fn, tensors, fresh):
            return out
        if len(tensors) == len(fresh) == 1 and fn._schema.name in _RESHAPES:
            return self._reshaped(fn, args, kwargs, tensors[0], out)
        if not _probable(fn, args, kwargs, tensors, fresh, self.limit):
            return out
        key = (fn, form_of(args), form_of(kwargs))
        if key not in self._seen:
            self._seen[key] = self._real(fn, args, kwargs, out)
        real, apart = self._seen[key]
        if real is not None and apart and not _apart(fresh):  # as the formula of an LSTM's biases' gradients
            out = self._separate(out, set())
        if real is None or real == form_of(out):
            return out
        self.corrected[str(fn)] = self.corrected.get(str(fn), 0) + 1
        return self._like(real, out)

    def _reshaped(
        self, fn: Any, args: Any, kwargs: Any, given: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """A view with the strides that it has: the formula gives dimensions of size 1 others, by which convolutions
        take their inputs for channels-last."""
        if 1 not in out.shape or not compat.is_plain_fake(given, self._fake):
            return out

        def plain(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            whole = torch.empty(int(x.storage_offset()) + _extent(x), dtype=x.dtype, device="meta")
            return whole.as_strided(x.shape, x.stride(), x.storage_offset())

        with compat.without_modes(), torch.no_grad():
            real = fn(*map_tree(plain, args), **map_tree(plain, kwargs))
        if real.stride() == out.stride():
            return out
        self.corrected[str(fn)] = self.corrected.get(str(fn), 0) + 1
        look = _Result(
            tuple(real.shape), real.stride(), int(real.storage_offset()), real.dtype, compat.device_of_fake(given), 0
        )  # fmt: skip
        return self._made(look, [given])

    def made_up(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Results like the real ones where there is no formula or it fails; None if the op cannot be run."""
        tensors = list(tensors_in((args, kwargs)))
        if not tensors or not _probable(fn, args, kwargs, tensors, [], self.limit):
            return None
        key = (fn, form_of(args), form_of(kwargs))
        if key not in self._seen:
            self._seen[key] = self._real(fn, args, kwargs, None)
        real, _ = self._seen[key]
        return None if real is None else made_of(real)

    def _real(self, fn: Any, args: Any, kwargs: Any, out: Any) -> tuple[Any, bool]:
        """The metadata of the real results, None if the op cannot be run on zeros; and whether each result lies in a
        storage of its own."""
        run = compat_ops.runnable(fn) if torch.is_grad_enabled() else fn
        draws = compat_ops.is_random(fn, args, kwargs)
        devices = {"cpu", *(str(t.device) for t in tensors_in((args, kwargs, out)))} if draws else ()
        with compat.without_modes(), torch.no_grad(), compat.random_states_kept(devices):
            try:
                given, named = map_tree(_zeros, args), map_tree(_zeros, kwargs)
                real = run(*given, **named)
            except Exception:
                return None, False
            keys = {compat.storage_key(t) for t in tensors_in((given, named))}
            if any(compat.storage_key(t) in keys for t in tensors_in(real)):
                raise Unsupported(
                    str(fn), "its result shares bytes with an argument, which its formula hides"
                )
            return form_of(real), _apart(list(tensors_in(real)))

    def _separate(self, out: Any, seen: set[int]) -> Any:
        """Results that the formula puts into one storage, each in a storage of its own."""
        if isinstance(out, (list, tuple)):
            return type(out)(self._separate(x, seen) for x in out)
        if not isinstance(out, torch.Tensor):
            return out
        home = compat.storage_key(out)
        if home in seen:
            return form_of(out).blank()
        seen.add(home)
        return out

    def _like(self, key: Any, out: Any) -> Any:
        if isinstance(out, (list, tuple)):
            return type(out)(self._like(k, o) for k, o in zip(key[1], out, strict=True))
        if not isinstance(out, torch.Tensor):
            return made_of(key)  # some kernels make a gradient that nobody asks for
        return out if key == form_of(out) else made_of(key)


def _read_look(look: Look, given: Sequence[torch.Tensor]) -> Any:
    """What `Prober` knows of a call, as JSON has it; None where that makes no sense."""
    container = {"": None, "tuple": tuple, "list": list}.get(look[0], look)
    rows: list[_Result | None] = []
    for row in look[1]:
        if row is None:
            rows.append(None)
            continue
        shape, stride, offset, name, source = row
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype) or not -1 <= source < len(given) or len(shape) != len(stride):
            return None
        rows.append(_Result(shape, stride, offset, dtype, torch.device("cpu"), source))
    return None if container is look or not rows else (container, tuple(rows))


def _apart(tensors: list[torch.Tensor]) -> bool:
    return len({compat.storage_key(t) for t in tensors}) == len(tensors)


@cache
def _follows_metadata(fn: Any) -> bool:
    return compat_ops.follows_metadata(fn)


def _believable(fn: Any, tensors: list[torch.Tensor], fresh: list[torch.Tensor]) -> bool:
    """Whether formula and kernel are one: matrix products, and element-wise ops on like tensors."""
    if fn._schema.name in _MATRIX_PRODUCTS:
        return True
    if torch.Tag.pointwise not in fn.tags or not tensors:
        return False
    full = [t for t in tensors if t.dim()]
    alike = all(t.shape == fresh[0].shape and t.is_contiguous() for t in (*full, *fresh))
    return bool(alike and all(d != 1 for d in fresh[0].shape))


def _probable(
    fn: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], fresh: list[torch.Tensor], limit: int
) -> bool:
    """Whether the op may be run on zeros: it writes nothing, makes new tensors of moderate size."""
    if compat_ops.written_arguments(fn) or compat_distributed.is_collective(fn):
        return False
    storages = {compat.storage_key(t) for t in tensors}
    if any(compat.storage_key(t) in storages for t in fresh):
        return False
    if any(t.device.type not in ("cpu", "cuda") for t in (*tensors, *fresh)):
        return False
    if any(t.is_cuda for t in (*tensors, *fresh)) and not torch.cuda.is_available():
        return False
    return sum(t.untyped_storage().nbytes() for t in (*tensors, *fresh)) <= limit


def _zeros(x: Any) -> Any:
    return zeros_like(x, x.device) if isinstance(x, torch.Tensor) else x
