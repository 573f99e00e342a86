"""Every touch of PyTorch's private interfaces, for one version; nothing else in tightship may import them.

``compat_capture``, ``compat_compile``, ``compat_inductor`` and ``compat_distributed`` are further parts of it, under
the same rule.

``require_torch`` raises ``Unsupported`` on another version, before anything private is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

from tightship.errors import Unsupported
from tightship.graph import CUDA_ALIGNMENT
from tightship.process_local import NotCopied

VERSION = "2.13"


def require_torch() -> None:
    """Raises ``Unsupported`` if the installed PyTorch is not the one these interfaces were written for."""
    if not str(torch.__version__).startswith(VERSION + "."):
        raise Unsupported(
            f"PyTorch {torch.__version__}",
            f"capture uses private interfaces of PyTorch {VERSION}",
            f"install torch>={VERSION},<2.14",
        )


require_torch()

from torch._C import _current_autograd_node  # noqa: E402
from torch._subclasses import fake_tensor as _fake  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.nn.modules import module as _module  # noqa: E402
from torch.optim import optimizer as _optimizer  # noqa: E402
from torch.utils._device import DeviceContext  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

DATA_ERRORS: tuple[type[Exception], ...] = (
    _fake.DataDependentOutputException,
    _fake.DynamicOutputShapeException,
)
"""What a fake tensor raises when an op needs the data it does not have."""

LAZY_BITS = {
    torch.ops.aten._conj.default: torch.ops.aten._conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}
"""Ops that only set a bit of the tensor, and those that compute the same contents."""


# --- fake tensors and storages --------------------------------------------------------------------------------


def fake_mode(*, cached: bool = False) -> Any:
    """A mode in which tensors have shapes and no data; every shape is static. ``cached``: code that is compiled for
    such tensors may be kept by PyTorch's caches, which ask for what is known of symbolic shapes."""
    if not cached:
        return _fake.FakeTensorMode(allow_non_fake_inputs=True)
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    known = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return _fake.FakeTensorMode(allow_non_fake_inputs=True, shape_env=known, static_shapes=True)


def is_fake(tensor: object) -> bool:
    """Whether there are no bytes: a fake tensor, or a DTensor around one."""
    return isinstance(getattr(tensor, "_local_tensor", tensor), _fake.FakeTensor)


def another(fake: torch.Tensor) -> torch.Tensor:
    """Another fake tensor that looks the same; a leaf."""
    mode: Any = getattr(fake, "fake_mode", None)
    if is_plain_fake(fake, mode) and not torch.is_inference(fake):
        offset, device = int(fake.storage_offset()), device_of_fake(fake)
        new = blank_like(mode, tuple(fake.shape), fake.stride(), offset, fake.dtype, device, fake)
    else:
        with without_modes(), torch.no_grad():
            new = fake.detach()
    return new.requires_grad_() if fake.requires_grad else new


def asks_by_row(fn: Any) -> bool:
    """Whether what an op asks of the allocator, row by row and for temporaries alone, follows from the numbers that
    it is given: ``max_norm`` of embeddings asks for each row, and once more for each that is too long."""
    return fn is torch.ops.aten.embedding_renorm_.default


def sparse_tensor(shape: Sequence[int], rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A sparse tensor of ``rows`` (1, n), which may come several times, and the ``values`` (n, …) of each."""
    make = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default
    made: torch.Tensor = make(
        1, values.dim() - 1, shape, rows, values,
        dtype=values.dtype, layout=torch.sparse_coo, device=values.device,
    )  # fmt: skip
    return made


def reads_shape_alone(fn: Any) -> bool:
    """Whether an op asks what a tensor looks like, and not what is in it."""
    name = str(getattr(fn, "__name__", "")).partition(".")[0]
    return name.endswith("_like") or name.startswith("new_")


def grows_statistics(fn: Any, args: Sequence[Any]) -> bool:
    """Whether an op gives buffers that are empty so far their size: those of fake quantization by channel."""
    by_channel = fn is torch.ops.aten._fused_moving_avg_obs_fq_helper.default and args[11:12] == (True,)
    return by_channel and args[3].numel() == 0


def become(stand_in: torch.Tensor, real: torch.Tensor, *, given: bool) -> None:
    """``stand_in``, wherever it is held, is from now on a tensor in the bytes of ``real``. Where it requires a
    gradient it is a leaf if ``given``, otherwise made by a graph that is gone: `is_of_the_past`."""
    with torch._C.DisableTorchFunctionSubclass(), without_modes(), torch.enable_grad():
        required, new = stand_in.requires_grad, real.detach()
        if required:
            new.requires_grad_()
            new = new if given else _Gone.apply(new)  # type: ignore[no-untyped-call]
        torch._C._swap_tensor_impl(stand_in, new)
        stand_in.__class__ = torch.Tensor
        vars(stand_in).clear()


class _Gone(torch.autograd.Function):
    """The end of a graph that a backward pass has freed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "Trying to backward through a graph that an earlier step's backward pass has freed"
        )


def backward_nodes(*first: Any) -> set[Any]:
    """The nodes of the graphs that begin with these."""
    seen: set[Any] = set()
    todo = list(first)
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [n for n, _ in node.next_functions]
    return seen


def is_of_the_past(node: Any) -> bool:
    """Whether a node stands for a graph that an earlier step has made: `become`."""
    return bool(node.name() == f"{_Gone.__name__}Backward")


def blank_like(
    mode: Any, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype, device: Any,
    source: torch.Tensor | torch.UntypedStorage | None = None,
) -> torch.Tensor:  # fmt: skip
    """A fake tensor of ``mode`` in a storage of its own, or in ``source`` (that of a tensor, or itself): what a
    dispatched op would return, at a tenth of what it takes to dispatch one."""
    with torch._C._DisableTorchDispatch():
        elem = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    if source is not None:
        storage = source.untyped_storage() if isinstance(source, torch.Tensor) else source
        with _fake.in_kernel_invocation_manager(mode):
            elem.set_(storage, offset, shape, stride)  # type: ignore[call-overload]
    states: dict[Any, dict[str, Any]] = mode.__dict__.setdefault("_states_of_blanks", {})
    if (state := states.get(device)) is None:
        first = _fake.FakeTensor(mode, elem, device)
        states[device] = dict(first.__dict__)
        return first
    # What the class's constructor does, which checks its arguments for most of its time.
    new: torch.Tensor = torch.Tensor._make_subclass(
        _fake.FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_throw_on_mutable_data_ptr(new)
    new.__dict__.update(state)
    return new


def as_parameter(fake: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """A fake tensor that nobody else has as a parameter: what ``torch.nn.Parameter`` makes of one, without asking for
    another."""
    fake._is_param = True  # type: ignore[attr-defined]
    return fake.requires_grad_(requires_grad)


def is_plain_fake(tensor: torch.Tensor, mode: Any) -> bool:
    """Whether a tensor is a fake one of ``mode`` that is its metadata and nothing else."""
    return (
        isinstance(tensor, _fake.FakeTensor)
        and tensor.fake_mode is mode
        and tensor.constant is None
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def device_of_fake(tensor: Any) -> torch.device:
    """Where a fake tensor is thought to be, without dispatching the question."""
    device: torch.device = tensor.fake_device
    return device


def follows_metadata(fn: Any) -> bool:
    """Whether an op writes nothing and what its results look like follows from what its arguments look like."""
    return not (_DATA_TAGS & set(fn.tags) or fn._schema.is_mutable) and fn.namespace == "aten"


_DATA_TAGS: Final = {
    torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view,
}  # fmt: skip


def is_foreign_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in memory of NumPy's or of somebody else's."""
    return tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()


def is_fixed(value: object) -> bool:
    """Whether a value of torch's can neither change nor hold what can."""
    kinds = (
        torch._ops.OpOverload,
        torch._ops.OpOverloadPacket,
        torch.dtype,
        torch.device,
        torch.memory_format,
    )
    return isinstance(value, (*kinds, torch._C.ScriptFunction))


def is_functorch(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a wrapper of a functional transform (vmap, grad)."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def fake_mode_of(tensors: Any) -> Any:
    """The mode the fake tensors among ``tensors`` belong to, or None."""
    for t in tensors:
        if is_fake(t):
            return t.fake_mode
    return None


@contextmanager
def without_modes() -> Iterator[None]:
    """Run on real tensors in the middle of a capture."""
    with _disable_current_modes():
        yield


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the tensor's storage: equal for tensors that share bytes, fake ones too. A sparse tensor is one of
    its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return int(tensor._cdata)


def is_borrowed(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies in memory that torch's allocator has not made: an array of NumPy's, a mapped file."""
    return not tensor.untyped_storage().resizable()


class _StorageReference(NotCopied, StorageWeakRef):  # type: ignore[misc]
    """A weak count of a storage, given back once: a copy would give it back again."""


def storage_reference(tensor: torch.Tensor) -> Any:
    """Keeps ``storage_key`` from being given to another storage, without keeping the storage in use.

    A strong reference would change what autograd does: it adds gradients in place when nobody else holds them.
    """
    return _StorageReference(tensor.untyped_storage())


# --- what an op declares --------------------------------------------------------------------------------------

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


_RANDOM_STATES: Final = {"cpu": torch.get_rng_state().numel(), "cuda": CUDA_ALIGNMENT}


def random_state(device: str) -> int:
    """Bytes that a saved state of the device's generator takes there; 0 where none can be saved. On the CPU those
    that ``torch.get_rng_state`` makes. CUDA's, a seed and an offset, are 16 bytes of the host: a plan, which counts
    saved states on the device, has the smallest block for each."""
    return _RANDOM_STATES.get(device.partition(":")[0], 0)


any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on, whatever the device."""


def generator_of(device: str) -> torch.Generator:
    """torch's own random generator of ``cpu`` or ``cuda:0``."""
    if device == "cpu":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.device(device).index or 0]


def is_random(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call draws from the random state."""
    if torch.Tag.nondeterministic_seeded not in fn.tags:
        return False
    # Attention kernels are tagged for their dropout and draw nothing without it.
    return not (
        "dropout_p" in argument_positions(fn) and argument(fn, args, kwargs, "dropout_p") in (0, None)
    )


def thinkable(device: str) -> str:
    """``device``, unless autograd would end the process at the first tensor there, fake or not."""
    if torch.device(device).type == "cuda" and not torch.version.cuda:
        raise Unsupported(
            f"a step thought of on {device}", "this PyTorch has been built without CUDA",
            "plan for the CPU, or install PyTorch with CUDA",
        )  # fmt: skip
    return device


@contextmanager
def random_states_kept(devices: Iterable[str]) -> Iterator[None]:
    """Draws inside leave the random states of these devices (``cpu``, ``cuda:0``) as they were."""
    generators = [generator_of(d) for d in devices]
    states = [g.get_state() for g in generators]
    try:
        yield
    finally:
        for g, state in zip(generators, states, strict=True):
            g.set_state(state)


def is_inplace_view(fn: Any) -> bool:
    """Whether the op changes only the metadata of its argument (``t_``, ``unsqueeze_``)."""
    return torch.Tag.inplace_view in fn.tags


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor lie one after the other, in whatever order, without gaps."""
    return torch.ops.aten.is_non_overlapping_and_dense(tensor)


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


def found_infinite(scaler: Any, optimizer: Any) -> list[torch.Tensor]:
    """Where a GradScaler that has unscaled an optimizer's gradients notes, as 1.0, that some are not finite."""
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


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


def decompose(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a composite op as the ops it is made of."""
    return fn.decompose(*args, **kwargs)


# --- autograd -------------------------------------------------------------------------------------------------


def forward_sequence() -> int:
    """Sequence number of the autograd node of the op being dispatched (the last one made)."""
    return int(torch.autograd._get_sequence_nr()) - 1


def backward_node() -> str:
    """Name of the autograd node being run in the backward pass, or nothing."""
    node = _current_autograd_node()
    return "" if node is None else str(node.name())


def backward_sequence() -> int:
    """Sequence number of the autograd node being run in the backward pass, or -1."""
    node = _current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


# --- optimizers -----------------------------------------------------------------------------------------------


def plain_step(optimizer_class: type) -> Callable[..., Any]:
    """The class's ``step`` without the wrapper that runs hooks and profiling around it."""
    step: Any = optimizer_class.step  # type: ignore[attr-defined]
    return step.__wrapped__ if getattr(step, "hooked", False) else step


@contextmanager
def fused_on_meta() -> Iterator[None]:
    """Fused optimizers take parameters on the meta device, too: torch knows the shapes of Adam's and AdamW's kernels
    there, but has not the device in its list."""
    known = _optimizer._get_fused_kernels_supported_devices
    vars(_optimizer)["_get_fused_kernels_supported_devices"] = lambda: [*known(), "meta"]
    try:
        yield
    finally:
        vars(_optimizer)["_get_fused_kernels_supported_devices"] = known


def optimizer_hooks(optimizer: Any) -> bool:
    """Whether somebody asked to be called around the optimizer's step, or around that of every optimizer. Wrappers
    that are made without ``Optimizer.__init__`` have no hooks of their own."""
    own = any(getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post"))
    every = [h for h in _optimizer._global_optimizer_pre_hooks.values() if h not in _watching]
    return bool(own or every or _optimizer._global_optimizer_post_hooks)


_watching: list[Any] = []


def watch_steps(see: Callable[[Any, Any], None]) -> None:
    """``see(optimizer, closure)`` before any optimizer steps, from now on. Hooks of ours do not count as such."""

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        see(optimizer, args[1] if len(args) > 1 else kwargs.get("closure"))

    if not _watching:
        _watching.append(hook)
        _optimizer.register_optimizer_step_pre_hook(hook)


def replaced_step(optimizer: Any) -> Any:
    """The ``step`` among the optimizer's attributes; None if there is none, or one that only counts calls for a
    learning-rate scheduler."""
    step = vars(optimizer).get("step")
    if step is None or not getattr(step, "_wrapped_by_lr_sched", False):
        return step
    inner, usual = getattr(step, "__wrapped__", None), type(optimizer).step
    return None if inner in (usual, getattr(usual, "__wrapped__", usual)) else step


@contextmanager
def step_called(optimizer: Any, step: Callable[..., Any]) -> Iterator[None]:
    """``optimizer.step`` is ``step``: for whoever calls it, such as a ``GradScaler``."""
    before = vars(optimizer).get("step")
    optimizer.step = step
    try:
        yield
    finally:
        if before is None:
            del optimizer.step
        else:
            optimizer.step = before


def step_replaced(optimizer: Any, step: Callable[[], None]) -> AbstractContextManager[None]:
    """As `step_called`, without the arguments."""
    return step_called(optimizer, lambda *args, **kwargs: step())


@contextmanager
def steps_seen(see: Callable[[Any], None]) -> Iterator[None]:
    """``see(optimizer)`` before any optimizer steps."""
    handle = _optimizer.register_optimizer_step_pre_hook(lambda optimizer, *_: see(optimizer))
    try:
        yield
    finally:
        handle.remove()


def gradient_hooks(tensor: torch.Tensor) -> list[tuple[bool, Callable[..., Any]]]:
    """What somebody asked to be called when the tensor gets its gradient; true where that is when it is there."""
    late = getattr(tensor, "_post_accumulate_grad_hooks", None)
    if not tensor._backward_hooks and not late:
        return []
    early = tensor._backward_hooks or {}
    return [*((False, fn) for fn in early.values()), *((True, fn) for fn in (late or {}).values())]


def generators() -> list[torch.Generator]:
    """Torch's own generators of random numbers, as they are in a capture as well, where setting states is refused."""
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *devices]


# --- running ops ----------------------------------------------------------------------------------------------


@contextmanager
def plain_execution() -> Iterator[None]:
    """Ops do what their kernels do: no autograd, no autocast, no function or dispatch modes of the caller."""
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(torch.no_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                enter(torch.autocast(device, enabled=False))
        enter(torch._C.DisableTorchFunction())
        if in_dispatch_mode():
            enter(_disable_current_modes())
        enter(torch._C._AutoDispatchBelowAutograd())
        yield


def in_dispatch_mode() -> bool:
    """Whether a dispatch mode of the caller is there to see, or to change, each op."""
    return bool(torch._C._len_torch_dispatch_stack())


def in_function_mode() -> bool:
    """Whether a function mode of the caller is there to see, or to change, each function; the one of a default device
    only says where tensors are made."""
    stack = (torch._C._get_function_stack_at(k) for k in range(torch._C._len_torch_function_stack()))
    return any(not isinstance(mode, DeviceContext) for mode in stack)


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether no other tensor, and nothing else, holds the storage of this one."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) <= 2)  # the tensor, and the line above


def without_overrides() -> Any:
    """A context in which the ``__torch_function__`` of tensor classes is not asked."""
    return torch._C.DisableTorchFunctionSubclass()


def direct(fn: Any) -> Any:
    """What ``fn(*args)`` ends up calling, without the Python frame in between."""
    return fn._op if isinstance(fn, torch._ops.OpOverload) else fn


def returns_tensors(fn: Any) -> int:
    """How many tensors ``fn`` returns: 1 means the tensor itself, more a tuple; -1 for anything else."""
    if not isinstance(fn, torch._ops.OpOverload):
        return -1
    kinds = [str(r.type) for r in fn._schema.returns]
    return len(kinds) if kinds and all(k == "Tensor" for k in kinds) else -1


# --- where tensors live ---------------------------------------------------------------------------------------


def tensor_home(model: torch.nn.Module, role: str, name: str) -> tuple[dict[str, Any], str]:
    """The mapping, and the key in it, where a parameter or buffer of that qualified name stands."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if role == "parameter" else module._buffers), last


def members(module: torch.nn.Module) -> tuple[Mapping[str, Any], ...]:
    """A module's own parameters, buffers and children, as the mappings that change when they are replaced."""
    return module._parameters, module._buffers, module._modules


def backward_hooks(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether somebody asked to be called in the backward pass of one of the modules, or of all."""
    every = _module._global_backward_hooks or _module._global_backward_pre_hooks
    return bool(every) or any(m._backward_hooks or m._backward_pre_hooks for m in modules)


def process_settings() -> tuple[Any, ...]:
    """What of the process decides which kernels and types ops have: types and devices by default, attention."""
    backends = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch.get_float32_matmul_precision(),
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(),
        backends.cudnn_sdp_enabled(),
    )


def mark_stepped(optimizer: Any) -> None:
    """What ``optimizer.step()`` leaves behind for learning-rate schedulers, which warn without it."""
    for one in getattr(optimizer, "optimizers", (optimizer,)):
        one._opt_called = True
