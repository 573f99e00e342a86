"""What PyTorch's optimizers do around a step: hooks, wrappers, what schedulers and scalers look for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from tightship.frontends.torch.compat import require_torch

require_torch()

from torch.autograd import function as _function  # noqa: E402
from torch.optim import optimizer as _optimizer  # noqa: E402

_watching: list[Any] = []
_node_hooks: list[int] = []


def found_infinite(scaler: Any, optimizer: Any) -> list[torch.Tensor]:
    """Where a GradScaler that has unscaled an optimizer's gradients notes, as 1.0, that some are not finite."""
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


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


def calls_compiled(run: Callable[[], Any]) -> bool:
    """Whether ``run()`` calls what torch.compile has made; it is called twice where that may be."""
    run()
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:  # nothing has been compiled in this process
        return False
    seen: list[Any] = []
    choose = frames._callback_from_stance

    def watched(callback: Any) -> Any:
        if callback not in (False, None):  # of code that is left to eager
            seen.append(callback)
        return choose(callback)

    vars(frames)["_callback_from_stance"] = watched
    try:
        run()
    finally:
        vars(frames)["_callback_from_stance"] = choose
    return bool(seen)


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


def accumulation_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """Hooks on the node of autograd that accumulates the tensor's gradient, which hang on no tensor: torch's
    ``_apply_optimizer_in_backward`` puts its steps there. They are found beside one that is put there for a moment:
    Python's search for garbage does not see them where C++ has the node as well (DistributedDataParallel)."""
    dense = (
        tensor.layout is torch.strided
    )  # of others, which are refused where they are read, torch finds no node
    if not (dense and tensor.is_leaf and tensor.requires_grad):
        return []
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    found: list[Callable[..., Any]] = []
    before = list(_node_hooks)
    for register in (node.register_prehook, node.register_hook):
        handle: Any = register(lambda *_: None)
        found += [fn for k, fn in handle.hooks_dict_ref().items() if k != handle.id]
        handle.remove()
    _node_hooks[:] = before  # these are nobody's
    return found


def node_hooks() -> int:
    """How many hooks have been put on nodes of autograd, as far as anybody has asked before."""
    mixin: Any = _function._HookMixin
    if not _node_hooks:
        own = mixin._register_hook

        def register(hooks: Any, hook: Any) -> Any:
            _node_hooks[0] += 1
            return own(hooks, hook)

        _node_hooks.append(0)
        mixin._register_hook = staticmethod(register)
    return _node_hooks[0]


@contextmanager
def ready_order(leaves: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """The names of leaves in the order in which a backward pass inside has their gradients."""
    seen: list[str] = []
    handles = [
        t.register_post_accumulate_grad_hook(lambda _, n=n: seen.append(n))  # type: ignore[misc]
        for n, t in leaves.items()
        if t.requires_grad
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def mark_stepped(optimizer: Any) -> None:
    """What ``optimizer.step()`` leaves behind for learning-rate schedulers, which warn without it."""
    for one in getattr(optimizer, "optimizers", (optimizer,)):
        one._opt_called = True


def go_through_lists_of(kind: type[torch.Tensor]) -> None:
    """Has optimizers treat parameters of this class as they treat others, on devices where they go through lists."""
    kinds = getattr(_optimizer, "_foreach_supported_types", None)
    if isinstance(kinds, list):
        kinds.append(kind)
