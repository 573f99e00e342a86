"""What of PyTorch (and transformers) is different while a step is captured, put back afterwards.

A part of ``compat``, under the same rule: nothing else in tightship may import private interfaces.
"""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from tightship.errors import Unsupported
from tightship.frontends.torch.compat import require_torch

require_torch()

from torch.nn.modules import module as _module  # noqa: E402
from torch.nn.utils import stateless as _stateless  # noqa: E402
from torch.utils import checkpoint as _checkpoint  # noqa: E402

__all__ = ["module_hooks", "quiet_capture", "reparametrised"]


# --- modules --------------------------------------------------------------------------------------------------


@contextmanager
def module_hooks(enter: Callable[[Any], None], leave: Callable[[], None]) -> Iterator[None]:
    """Call ``enter(module)`` and ``leave()`` around every module call, without touching any module."""
    pre = _module.register_module_forward_pre_hook(lambda m, _args: enter(m))
    post = _module.register_module_forward_hook(lambda _m, _args, _out: leave(), always_call=True)
    try:
        yield
    finally:
        pre.remove()
        post.remove()


@contextmanager
def reparametrised(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """Swap the model's parameters and buffers for ``tensors`` (tied ones together), and back."""
    with _stateless._reparametrize_module(model, tensors, tie_weights=True, strict=False):
        yield


# --- capture --------------------------------------------------------------------------------------------------


def _checkpoint_nothing(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


class _CallThrough:
    """Stands in for the autograd function of reentrant checkpointing: calls what it was to checkpoint."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        return function(*args)


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def quiet_capture(*, has_data: bool) -> Iterator[None]:
    """What has to be different while a step is captured, put back afterwards.

    Checkpointing is switched off (what to recompute is decided here, and its random state is not the step's).
    Where the data that decides the control flow is at hand (``has_data``), transformers is kept from noticing
    the fake tensors, so that it takes the path it takes in eager; otherwise it takes its tracing path.
    Distributions do not check their arguments: whether to raise is a question to the data.
    Setting random states raises ``Unsupported``, and so does converting a module.
    """
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(_patched(_checkpoint, "_checkpoint_without_reentrant_generator", _checkpoint_nothing))
        enter(_patched(_checkpoint, "CheckpointFunction", _CallThrough))
        enter(_patched(torch.nn.Module, "_apply", _apply_nothing))
        enter(torch.compiler.set_stance("force_eager"))
        enter(_patched(torch.distributions.Distribution, "_validate_args", False))
        enter(_emptied_caches())
        for owner, name in _SEEDING:
            enter(_patched(owner, name, _refuse_seed))
        if has_data and "transformers" in sys.modules:
            enter(_patched(importlib.import_module("transformers.utils.import_utils"), "is_fake_tensor", _no))
            # Reads the batch to warn about padding, which would make a guard of a warning.
            base = importlib.import_module("transformers.modeling_utils").PreTrainedModel
            enter(_patched(base, "warn_if_padding_and_no_attention_mask", _nothing))
        enter(torch.autograd.set_multithreading_enabled(False))
        # Logs the whole stack where a formula fails, also when the kernel is then asked instead.
        enter(_patched(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True))
        yield


@contextmanager
def _emptied_caches() -> Iterator[None]:
    """Empties every ``functools`` cache that grew meanwhile, or later calls would get tensors without data."""
    before = {id(c): c.cache_info().currsize for c in _caches()}
    try:
        yield
    finally:
        for c in _caches():
            if c.cache_info().currsize != before.get(id(c), 0):
                c.cache_clear()


def _caches() -> list[Any]:
    kind = type(_caches_probe)
    caches = [c for c in gc.get_objects() if type(c) is kind]
    return [c for c in caches if str(c.__module__).partition(".")[0] not in _WITHOUT_TENSORS]


_WITHOUT_TENSORS = {"torch", "tightship", "sympy", *sys.stdlib_module_names}


@functools.lru_cache
def _caches_probe() -> None:
    return None


_SEEDING = [
    (owner, name)
    for owner in (torch, torch.random, torch.cuda)
    for name in ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")
    if hasattr(owner, name)
]


def _refuse_seed(*_args: object, **_kwargs: object) -> None:
    raise Unsupported(
        "setting torch's random state in a step",
        "the captured ops draw from the state they find, in the order of the step",
        "seed before the step",
    )


def _apply_nothing(module: torch.nn.Module, fn: Callable[[torch.Tensor], Any], recurse: bool = True) -> Any:
    """``Module.to`` and its like in the middle of a step: nothing, if nothing has to be converted."""
    for name, t in [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]:
        if fn(t) is not t:
            raise Unsupported(
                f"converting {name!r} of a {type(module).__name__} in a step",
                "a step does not change what its parameters are",
                "convert the model before",
            )
    return module


def _nothing(*_args: object, **_kwargs: object) -> None:
    return None


def _no(_tensor: object) -> bool:
    return False
