"""Every touch of PyTorch's private interfaces, for one version; nothing else in tightship may import them.

The other files called ``compat_…`` are further parts of it, under the same rule.

``require_torch`` raises ``Unsupported`` on another version, before anything private is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from torch._tensor_str import _add_suffixes  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.nn.modules import module as _module  # noqa: E402
from torch.utils._device import DeviceContext  # noqa: E402

DATA_ERRORS: tuple[type[Exception], ...] = (
    _fake.DataDependentOutputException,
    _fake.DynamicOutputShapeException,
)
"""What a fake tensor raises when an op needs the data it does not have."""


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


NESTED: Final = (
    "a nested tensor", "its bytes are those of several tensors",
    "pad it (to_padded_tensor), or hand in its values and lengths",
)  # fmt: skip
"""What a nested tensor is called, why it cannot be planned, and what to do."""
_KNOWN_KINDS = "torch._subclasses", "torch.distributed", "torch.nn.parameter", "tightship."
"""Modules of classes of tensors that are like plain ones, or looked at by themselves."""


def is_own_class(kind: type) -> bool:
    """Whether what ops do with tensors of a class may be what it says, rather than torch."""
    return kind is not torch.Tensor and not kind.__module__.startswith(_KNOWN_KINDS)


def has_own_ops(kind: type) -> bool:
    """Whether a class of tensors says itself what ops do with them."""
    return getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__


def has_own_functions(kind: type) -> bool:
    """Whether a class of tensors says itself what functions of torch, or ops, do with them."""
    function = getattr(kind, "__torch_function__", None)
    plain = torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl
    return is_own_class(kind) and (has_own_ops(kind) or getattr(function, "__func__", function) not in plain)


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


def sparse_tensor(shape: Sequence[int], rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A sparse tensor of ``rows`` (1, n), which may come several times, and the ``values`` (n, …) of each."""
    make = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default
    made: torch.Tensor = make(
        1, values.dim() - 1, shape, rows, values,
        dtype=values.dtype, layout=torch.sparse_coo, device=values.device,
    )  # fmt: skip
    return made


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
    return node_name(node) == f"{_Gone.__name__}Backward"


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
    return isinstance(value, (*kinds, torch._C.ScriptFunction)) or _is_of_enumeration(value)


def _is_of_enumeration(value: object) -> bool:
    """Whether this is one of an enumeration of torch's, in Python or C++, as kinds of reductions are."""
    home = type(value).__module__.partition(".")[0]
    return home == "torch" and isinstance(getattr(type(value), "__members__", None), Mapping)


def has_global_hooks() -> bool:
    """Whether something of the caller's is called with every module that is."""
    m = torch.nn.modules.module
    kinds = (
        m._global_forward_hooks, m._global_forward_pre_hooks, m._global_backward_hooks,
        m._global_backward_pre_hooks,
    )  # fmt: skip
    hooks = (fn for kind in kinds for fn in kind.values())
    return any(not str(getattr(fn, "__module__", "")).startswith("tightship.") for fn in hooks)


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


def graph_shown(tensor: torch.Tensor) -> str:
    """What PyTorch calls the node that has made a tensor where it prints it; empty for one without."""
    if not tensor.requires_grad or tensor.grad_fn is None:
        return ""
    kind = type(tensor.grad_fn).__name__
    return tensor.grad_fn.name().rsplit("::", 1)[-1] if kind == "CppFunction" else kind


def of_contents(func: Any, contents: torch.Tensor, args: Any, kwargs: Any, graph: str) -> Any:
    """What ``func`` says of its first argument, a tensor without data whose ``contents`` these are; ``graph`` as
    `graph_shown` has it."""
    name, trained = getattr(func, "__name__", ""), args[0].requires_grad
    if name in ("__repr__", "__str__") or (name == "__format__" and contents.dim()):
        if not graph:
            return repr(contents.detach().requires_grad_(trained))
        return _add_suffixes(repr(contents)[:-1], [f"grad_fn=<{graph}>"], len("tensor("), False)
    contents = contents.detach()
    if trained and (contents.is_floating_point() or contents.is_complex()):
        contents.requires_grad_()
    return func(contents, *args[1:], **kwargs)


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


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor lie one after the other, in whatever order, without gaps."""
    return torch.ops.aten.is_non_overlapping_and_dense(tensor)


# --- random numbers -------------------------------------------------------------------------------------------

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


def thinkable(device: str) -> str:
    """``device``, unless autograd would end the process at the first tensor there, fake or not."""
    if torch.device(device).type == "cuda" and not torch.version.cuda:
        raise Unsupported(
            f"a step thought of on {device}", "this PyTorch has been built without CUDA",
            "plan for the CPU, or install PyTorch with CUDA",
        )  # fmt: skip
    return device


def generators() -> list[torch.Generator]:
    """Torch's own generators of random numbers, as they are in a capture as well, where setting states is refused."""
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *devices]


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


# --- autograd -------------------------------------------------------------------------------------------------


def forward_sequence() -> int:
    """Sequence number of the autograd node of the op being dispatched (the last one made)."""
    return int(torch.autograd._get_sequence_nr()) - 1


def backward_node() -> str:
    """Name of the autograd node being run in the backward pass, or nothing."""
    node = _current_autograd_node()
    return "" if node is None else node_name(node)


def node_name(node: Any) -> str:
    """Name of an autograd node; a function's own ``ctx.name`` is something else."""
    own = isinstance(node, torch._C._FunctionBase)
    return str(torch._C._FunctionBase.name(node) if own else node.name())


def backward_sequence() -> int:
    """Sequence number of the autograd node being run in the backward pass, or -1."""
    node = _current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


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


def _excluded() -> Any:
    return torch._C._dispatch_tls_local_exclude_set()


with torch._C._AutoDispatchBelowAutograd():
    _AUTOGRAD: Final = _excluded()
_AUTOGRAD_KEYS: Final = _AUTOGRAD - _excluded()


@contextmanager
def code_of_others() -> Iterator[None]:
    """Inside `plain_execution`, for Python code that is not ours (an optimizer's step): composite ops come apart and
    classes of tensors are asked as where it is called by itself. Gradients stay off."""
    include = torch._C._dispatch_tls_local_include_set()
    with (
        torch._C._ForceDispatchKeyGuard(include, _excluded() - _AUTOGRAD_KEYS),
        torch._C._EnableTorchFunction(),
    ):
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
