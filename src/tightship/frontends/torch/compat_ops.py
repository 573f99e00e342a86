"""What PyTorch says of an op, and what it does not: what it writes, draws and asks for, and what it is made of."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch

from tightship.frontends.torch.compat import is_dense, require_torch

require_torch()

from torch._C import DispatchKey as _DispatchKey  # noqa: E402
from torch._prims_common import suggest_memory_format as suggest_memory_format  # noqa: E402
from torch.library import _scoped_library  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

LAZY_BITS = {
    torch.ops.aten._conj.default: torch.ops.aten._conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}
"""Ops that only set a bit of the tensor, and those that compute the same contents."""


class _Composed:
    """What is called in the place of ops that are made of others, and how many ask for it, by thread."""

    lock: Final = threading.RLock()
    asking: Final[dict[tuple[Any, int], int]] = {}
    libraries: Final[dict[Any, ExitStack]] = {}


@contextmanager
def composed_instead(op: Any, instead: Callable[..., Any]) -> Iterator[None]:
    """Inside, on this thread, an op that ATen makes of others is what ``instead`` makes of it, unless that is
    ``NotImplemented``: however it is called, with gradients or without. The same ``instead`` everywhere."""
    key = op, threading.get_ident()
    with _Composed.lock:
        _Composed.asking[key] = _Composed.asking.get(key, 0) + 1
        if op not in _Composed.libraries:
            _Composed.libraries[op] = _registered(op, instead)
    try:
        yield
    finally:
        with _Composed.lock:
            _Composed.asking[key] -= 1
            if not _Composed.asking[key]:
                del _Composed.asking[key]
            if not any(of is op for of, _ in _Composed.asking):
                _Composed.libraries.pop(op).close()


def _registered(op: Any, instead: Callable[..., Any]) -> ExitStack:
    def called(*args: Any, **kwargs: Any) -> Any:
        here = (op, threading.get_ident()) in _Composed.asking
        found = instead(*args, **kwargs) if here else NotImplemented
        if found is NotImplemented:
            return op._op_dk(_DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        return found

    namespace, name = op._schema.name.split("::")
    stack = ExitStack()
    stack.callback(
        op._dispatch_cache.clear
    )  # in which Python's dispatcher has what was there when it last looked
    op._dispatch_cache.clear()
    library = stack.enter_context(_scoped_library(namespace, "IMPL"))
    for key in _BACKENDS:
        library.impl(name, called, key)
    return stack


_BACKENDS: Final = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "AutogradMeta", "AutogradOther")


def asks_by_row(fn: Any) -> bool:
    """Whether what an op asks of the allocator, row by row and for temporaries alone, follows from the numbers that
    it is given: ``max_norm`` of embeddings asks for each row, and once more for each that is too long."""
    return fn is torch.ops.aten.embedding_renorm_.default


def reads_shape_alone(fn: Any) -> bool:
    """Whether an op asks what a tensor looks like, and not what is in it."""
    name = str(getattr(fn, "__name__", "")).partition(".")[0]
    return name.endswith("_like") or name.startswith("new_")


def grows_statistics(fn: Any, args: Sequence[Any]) -> bool:
    """Whether an op gives buffers that are empty so far their size: those of fake quantization by channel."""
    by_channel = fn is torch.ops.aten._fused_moving_avg_obs_fq_helper.default and args[11:12] == (True,)
    return by_channel and args[3].numel() == 0


def follows_metadata(fn: Any) -> bool:
    """Whether an op writes nothing and what its results look like follows from what its arguments look like."""
    return not (_DATA_TAGS & set(fn.tags) or fn._schema.is_mutable) and fn.namespace == "aten"


_DATA_TAGS: Final = {
    torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view,
}  # fmt: skip
_ASK_BY_DATA = ("aten::linalg_matrix_exp",)
ASKED_BY_DATA: Final = (
    "how much memory it asks for follows from its data",
    "use other ops (of torch.nn.utils.parametrizations.orthogonal: orthogonal_map='householder')",
)
"""Why what `asks_by_data` finds is not planned, and what to do."""
_UNDECLARED = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
}
_STATISTICS = {
    **_UNDECLARED,
    "aten::_native_batch_norm_legit": ("running_mean", "running_var"),
    "aten::_batch_norm_with_update": ("running_mean", "running_var"),
}
_WITHOUT_STATISTICS = {
    # These two overloads do not take None for the statistics; these calls compute the same results.
    "aten::_native_batch_norm_legit": "native_batch_norm",
}


@functools.cache
def written_arguments(fn: Any) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments the op's schema says it writes."""
    return tuple(
        (k, a.name)
        for k, a in enumerate(fn._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )


@functools.cache
def argument_positions(fn: Any) -> dict[str, int]:
    return {a.name: k for k, a in enumerate(fn._schema.arguments)}


def argument(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    """The argument of that name in a call of ``fn``; None if it is not given."""
    if name in kwargs:
        return kwargs[name]
    k = argument_positions(fn).get(name, -1)
    return args[k] if 0 <= k < len(args) else None


def asks_by_data(fn: Any) -> bool:
    """Whether how much memory a call asks for follows from its data: by norms, say, which choose a formula."""
    return getattr(fn, "_schema", None) is not None and fn._schema.name in _ASK_BY_DATA


def undeclared_writes(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of arguments a call writes without saying so in its schema (running statistics in training)."""
    names = _UNDECLARED.get(fn._schema.name, ())
    return names if names and argument(fn, args, kwargs, "training") else ()


def statistics_of(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of arguments a call updates although its results do not depend on them (training batch norm)."""
    names = _STATISTICS.get(fn._schema.name, ())
    if not names or ("training" in argument_positions(fn) and not argument(fn, args, kwargs, "training")):
        return ()
    return names


def without_statistics(
    fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The call with the same results that leaves running statistics alone; None where there is none."""
    name = fn._schema.name
    positions = argument_positions(fn)
    if name == "aten::_batch_norm_with_update":
        return None
    if name in _WITHOUT_STATISTICS:
        fn = getattr(torch.ops.aten, _WITHOUT_STATISTICS[name]).default
    drop = {positions[n] for n in _STATISTICS[name]}
    new_args = tuple(None if k in drop else a for k, a in enumerate(args))
    return fn, new_args, {k: None if k in _STATISTICS[name] else v for k, v in kwargs.items()}


class WithGradMode:
    """A kernel that looks at grad mode: run as in a forward pass, on tensors that record nothing."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __repr__(self) -> str:
        return f"{self.fn} with grad mode"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def detached(x: Any) -> Any:
            return x.detach() if isinstance(x, torch.Tensor) else x

        with torch.enable_grad():
            return self.fn(*map(detached, args), **{k: detached(v) for k, v in kwargs.items()})


def runnable(fn: Any) -> Callable[..., Any]:
    """What to call, with gradients off, to run the kernel that eager's forward or backward pass runs."""
    # oneDNN's recurrent layers save their workspace only when grad mode is on.
    return WithGradMode(fn) if fn._schema.name == "aten::mkldnn_rnn_layer" else fn


def is_random(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call draws from the random state."""
    if torch.Tag.nondeterministic_seeded not in fn.tags:
        return False
    # Attention kernels are tagged for their dropout and draw nothing without it.
    return not (
        "dropout_p" in argument_positions(fn) and argument(fn, args, kwargs, "dropout_p") in (0, None)
    )


def is_inplace_view(fn: Any) -> bool:
    """Whether the op changes only the metadata of its argument (``t_``, ``unsqueeze_``)."""
    return torch.Tag.inplace_view in fn.tags


def resizes_nothing(fn: Any, args: Sequence[Any]) -> bool:
    """Whether the call is ``resize_`` to the sizes that the tensor has, at which it stays as it is."""
    return fn is torch.ops.aten.resize_.default and tuple(args[1]) == tuple(args[0].shape)


def is_view(fn: Any) -> bool:
    """Whether autograd takes the result for a view of an argument, which it holds (``as_view`` in
    torch/csrc/autograd/VariableTypeUtils.h). Not so ``_unsafe_view`` and ``detach``."""
    shared = [r.alias_info is not None and not r.alias_info.is_write for r in fn._schema.returns]
    return bool(shared) and all(shared) and fn._schema.name != "aten::detach"


_INDEX_PUTS = torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default


def filled_by_mask(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The mask by which ``x[mask] = number`` fills ``x``, as its kernel does it, without asking where it is true;
    None for any other call."""
    if fn not in _INDEX_PUTS or len(args) != 3 or any(kwargs.values()):
        return None
    x, indices, value = args
    masks = [t for t in indices if t is not None]
    if (
        len(masks) != 1
        or masks[0].dtype is not torch.bool
        or value.numel() != 1
        or value.device.type != "cpu"
    ):
        return None
    first, mask = next(k for k, t in enumerate(indices) if t is not None), masks[0]
    last = first + mask.dim()
    if (
        mask.device != x.device
        or mask.shape != x.shape[first:last]
        or any(t is None for t in indices[first:])
    ):
        return None
    return mask[(..., *[None] * (x.dim() - last))]


def flops_of(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """The floating-point operations of a call by PyTorch's own formula; 0 if it has none, or one that knows no such
    shapes (attention with fewer heads for keys than for queries)."""
    count = flop_registry.get(fn.overloadpacket)
    try:
        return int(count(*args, **kwargs, out_val=out)) if count else 0
    except (AssertionError, TypeError, ValueError):
        return 0


def is_composite(fn: Any, device: str) -> bool:
    """Whether ``fn`` on ``device`` is nothing but a composition of other ops.

    Some ops are compositions with kernels of their own on some devices (``silu_backward``); taking those apart
    would give other bits than eager, which runs the kernel.
    """
    return bool(_composite(fn, device.partition(":")[0]))


@functools.cache
def _composite(fn: Any, device_type: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = (_DISPATCH_KEYS.get(device_type, "CPU"), "CompositeExplicitAutograd", *_NON_FUNCTIONAL)
    return has(fn.name(), "CompositeImplicitAutograd") and not any(has(fn.name(), k) for k in keys)


_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS", "xpu": "XPU"}
_NON_FUNCTIONAL = ("CompositeExplicitAutogradNonFunctional",)


_aten = torch.ops.aten
SCATTERS: Final = {
    _aten.slice_scatter.default: _aten.slice.Tensor,
    _aten.select_scatter.default: _aten.select.int,
    _aten.diagonal_scatter.default: _aten.diagonal.default,
    _aten.as_strided_scatter.default: _aten.as_strided.default,
}
"""Ops that copy a tensor and write another one into a part of it, and what gives that part."""


def scattered(fn: Any, whole: torch.Tensor, source: torch.Tensor, *where: Any, **more: Any) -> torch.Tensor:
    """One of `SCATTERS` by the ops that its kernel is made of. The kernel copies the whole storage that a tensor lies
    in, which shape inference does not see; here a tensor without gaps is copied by itself."""
    part = SCATTERS[fn]
    if any(n > 1 and not step for n, step in zip(whole.shape, whole.stride(), strict=True)) or (
        is_dense(whole) and part is not _aten.as_strided.default
    ):
        new = _aten.clone.default(whole)
    else:
        elements = whole.untyped_storage().nbytes() // whole.element_size()
        everything = _aten.clone.default(_aten.as_strided.default(whole, [elements], [1], 0))
        new = _aten.as_strided.default(everything, whole.shape, whole.stride(), whole.storage_offset())
    _aten.copy_.default(part(new, *where, **more), source)
    return new


def decompose(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a composite op as the ops it is made of."""
    return fn.decompose(*args, **kwargs)


def direct(fn: Any) -> Any:
    """What ``fn(*args)`` ends up calling, without the Python frame in between."""
    return fn._op if isinstance(fn, torch._ops.OpOverload) else fn


def returns_tensors(fn: Any) -> int:
    """How many tensors ``fn`` returns: 1 means the tensor itself, more a tuple; -1 for anything else."""
    if not isinstance(fn, torch._ops.OpOverload):
        return -1
    kinds = [str(r.type) for r in fn._schema.returns]
    return len(kinds) if kinds and all(k == "Tensor" for k in kinds) else -1
