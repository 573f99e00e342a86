"""What of PyTorch (and transformers) is different while a step is captured, put back afterwards.

A part of ``compat``, under the same rule: nothing else in tightship may import private interfaces.
"""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from tightship.errors import Unplannable
from tightship.frontends.torch.compat import node_name, require_torch
from tightship.frontends.torch.refusals import told
from tightship.garbage import garbage_waits

require_torch()

from torch.distributions import constraints  # noqa: E402
from torch.nn.modules import module as _module  # noqa: E402
from torch.nn.utils import stateless as _stateless  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402
from torch.utils import checkpoint as _checkpoint  # noqa: E402

# --- modules --------------------------------------------------------------------------------------------------


@contextmanager
def module_hooks(enter: Callable[[Any], None], leave: Callable[[], None]) -> Iterator[None]:
    """Call ``enter(module)`` and ``leave()`` around every module call of this thread, without touching any module."""
    mine = threading.get_ident()

    def before(module: Any, _args: Any) -> None:
        if threading.get_ident() == mine:
            enter(module)

    def after(_module: Any, _args: Any, _out: Any) -> None:
        if threading.get_ident() == mine:
            leave()

    with nothing_compiled_elsewhere():
        pre = _module.register_module_forward_pre_hook(before)
        post = _module.register_module_forward_hook(after, always_call=True)
        try:
            yield
        finally:
            pre.remove()
            post.remove()


def running_modules() -> list[torch.nn.Module]:
    """The modules whose calls are running, outermost first."""
    found: list[torch.nn.Module] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found[::-1]


def in_a_module() -> bool:
    """Whether the call of a module is running."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return frame is not None


_CALL = torch.nn.Module._call_impl.__code__


@contextmanager
def reparametrized(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """Swap the model's parameters and buffers for ``tensors`` (tied ones together), and back."""
    with _stateless._reparametrize_module(model, tensors, tie_weights=True, strict=False):
        yield


# --- modes ----------------------------------------------------------------------------------------------------


class States:
    """Sets gradient and inference mode and autocast from call to call, as a trace's `ExecutionState` has them."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._known: Any = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Puts the modes back that there were; autocast forgets nothing meanwhile."""
        torch.autocast_increment_nesting()
        try:
            with self._stack:
                yield
        finally:
            self._stack.close()
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

    def set(self, state: Any) -> None:
        if state == self._known:
            return
        self._stack.close()
        self._known = state
        enter = self._stack.enter_context
        enter(torch.inference_mode(state.inference))
        enter(torch.set_grad_enabled(state.grad))
        on = {kind: (dtype, cache) for kind, dtype, cache in state.autocast}
        for kind in ("cpu", "cuda"):
            if kind in on:
                enter(torch.autocast(kind, dtype=on[kind][0], cache_enabled=on[kind][1]))
            elif torch.is_autocast_enabled(kind):
                enter(torch.autocast(kind, enabled=False))


@contextmanager
def modes_asked() -> Iterator[None]:
    """Dispatch modes see the ops that are called here, though the caller's C++ code has left them out, as
    constructors do (``torch.FloatTensor([x[0], x[1]])``) while they turn a tensor into a number."""
    left_out = torch._C._dispatch_tls_local_exclude_set()
    if not left_out.has(torch._C.DispatchKey.Python):
        yield
        return
    for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
        left_out = left_out.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out):
        yield


def has_missed_data(error: RuntimeError) -> bool:
    """Whether code that no mode has seen has looked for the data of a tensor without."""
    return "its data is not allocated yet" in str(error)


# --- capture --------------------------------------------------------------------------------------------------


_drawing_anew: ContextVar[bool] = ContextVar("in a checkpoint that draws anew", default=False)


def saving_hooks(*, traced: bool = False) -> bool:
    """Whether hooks for tensors that are saved for the backward pass are on (``saved_tensors_hooks``); ``traced``:
    also while a graph is traced, in which they are not called."""
    return torch._C._autograd._top_saved_tensors_default_hooks(traced) is not None


@contextmanager
def without_saving_hooks() -> Iterator[None]:
    """Without such hooks; they are on again afterwards."""
    held = []
    while (pair := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        held.append(pair)
    try:
        yield
    finally:
        for pair in reversed(held):
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)


class _Listed:
    """Whether who asks a model for its parameters is capture, and not the code of a step."""

    for_capture = False


_listed = _Listed()


@contextmanager
def listed_as_they_lie() -> Iterator[None]:
    """Inside, models list their parameters as they lie, whatever the code of a step is given."""
    before, _listed.for_capture = _listed.for_capture, True
    try:
        yield
    finally:
        _listed.for_capture = before


def lists_as_they_lie() -> bool:
    return _listed.for_capture


def draws_anew() -> bool:
    """Whether code runs in a checkpoint that in eager draws other random numbers when it recomputes."""
    return _drawing_anew.get()


@contextmanager
def _in_checkpoint(preserve: bool) -> Iterator[None]:
    before = draws_anew()
    _drawing_anew.set(before or (not preserve and torch.is_grad_enabled()))
    try:
        yield
    finally:
        _drawing_anew.set(before)


def _checkpoint_nothing(_fn: Any, preserve: bool = True, *_args: Any, **_kwargs: Any) -> Iterator[None]:
    with _in_checkpoint(preserve):
        yield


class _CallThrough:
    """Stands in for the autograd function of reentrant checkpointing: calls what it was to checkpoint. As there, no
    gradient goes into it unless one goes out to an argument, and what comes to an argument inside is added up
    first."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        _checkpoint.check_backward_validity(args)
        wanted = [isinstance(x, torch.Tensor) and x.requires_grad for x in args]
        given = [x.view_as(x) if own else x for x, own in zip(args, wanted, strict=True)]
        with _in_checkpoint(preserve) if any(wanted) else torch.no_grad():
            return function(*given)


def _refuse_checkpoint() -> bool:
    """What reentrant checkpoints of packages' own (fairscale, Megatron) ask in their backward pass."""
    raise told(
        Unplannable(
            "a reentrant checkpoint that is not torch's",
            "its backward pass runs one of its own, which adds to gradients",
            "use torch.utils.checkpoint, or none: what to recompute is planned",
        )
    )


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, ``owner`` has another function, class or value by that name; functions for this thread alone."""
    before = vars(owner)[name] if isinstance(owner, type) and name in vars(owner) else getattr(owner, name)
    with nothing_compiled_elsewhere():
        setattr(owner, name, only_here(before, value))
        try:
            yield
        finally:
            setattr(owner, name, before)


def nothing_compiled_elsewhere() -> AbstractContextManager[Any]:
    """Inside, no other thread compiles: Dynamo would trace into what is replaced meanwhile, though that is for this
    thread alone."""
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    lock: Any = getattr(frames, "compile_lock", None)  # there is none yet while it is imported
    return nullcontext() if lock is None else lock


def only_here(before: Any, value: Any) -> Any:
    """A function that is ``value`` on this thread, and ``before`` on all others; what is no function as it is."""
    if isinstance(value, classmethod) and isinstance(before, classmethod):
        return classmethod(only_here(before.__func__, value.__func__))
    if not isinstance(value, types.FunctionType) or not callable(before):
        return value
    mine = threading.get_ident()

    @functools.wraps(value)
    def here(*args: Any, **kwargs: Any) -> Any:
        return (value if threading.get_ident() == mine else before)(*args, **kwargs)

    return here


@contextmanager
def resizes_seen(seen: Callable[[int, int], None]) -> Iterator[None]:
    """Inside, ``seen`` is told of storages that get another size, and what that is: ``fully_shard`` frees and makes
    what it has gathered in this way."""
    owner: Any = torch.UntypedStorage
    before = owner.resize_

    def resize(self: Any, nbytes: int) -> Any:
        found = before(self, nbytes)
        seen(int(self._cdata), int(nbytes))
        return found

    with patched(owner, "resize_", resize):
        yield


@contextmanager
def quiet_capture(*, has_data: bool) -> Iterator[None]:
    """What has to be different while a step is captured, put back afterwards: ``python_for_stand_ins``, and caches
    that grew meanwhile are emptied."""
    grown = GrownCaches()
    try:
        with python_for_stand_ins(has_data=has_data), quiet_engine():
            yield
    finally:
        grown.empty()


@contextmanager
def python_for_stand_ins(*, has_data: bool, checkpoints: bool = False) -> Iterator[None]:
    """What has to be different while Python code runs on tensors without data, put back afterwards.

    Checkpointing is switched off (what to recompute is decided here, and its random state is not the step's).
    Where the data that decides the control flow is at hand (``has_data``), transformers is kept from noticing
    the fake tensors, so that it takes the path it takes in eager; otherwise it takes its tracing path.
    Attention asks for function modes, and takes a slower path under one: it is told of none.
    Without data, distributions do not check their arguments: whether to raise is a question to the data.
    Setting random states and converting a module raise ``Unplannable``, and so do TorchScript that gradients go
    through and higher-order ops where steps are to run as they do in eager (``has_data``). With
    ``checkpoints``, these recompute as in eager, and random states may be set.
    """
    with ExitStack() as stack:
        enter = stack.enter_context
        if has_data:
            for script in (torch._C.ScriptFunction, torch._C.ScriptMethod):
                enter(patched(script, "__call__", _without_gradients(script.__call__)))
            enter(patched(torch._ops.HigherOrderOperator, "__call__", _refuse_higher_order))
        _drawing_anew.set(False)  # code that failed in a checkpoint may have left it
        if not checkpoints:
            enter(patched(_checkpoint, "_checkpoint_without_reentrant_generator", _checkpoint_nothing))
            enter(patched(_checkpoint, "CheckpointFunction", _CallThrough))
            enter(patched(torch.autograd, "_is_checkpoint_valid", _refuse_checkpoint))
        enter(patched(torch.nn.Module, "_apply", _apply_nothing))
        enter(torch.compiler.set_stance("force_eager"))
        enter(patched(torch.overrides, "has_torch_function", _has_own_function))
        if not has_data:
            enter(patched(torch.distributions.Distribution, "_validate_args", False))
        for kind, check in _MATRICES:
            enter(patched(kind, "check", check))
        for owner, name in _SEEDING if not checkpoints else ():
            enter(patched(owner, name, _refuse_seed))
        if has_data and "transformers" in sys.modules:
            enter(patched(importlib.import_module("transformers.utils.import_utils"), "is_fake_tensor", _no))
            models = sys.modules.get(
                "transformers.modeling_utils"
            )  # other packages load transformers without it
            if models is not None:
                # Reads the batch to warn about padding, which would make a guard of a warning.
                enter(patched(models.PreTrainedModel, "warn_if_padding_and_no_attention_mask", _nothing))
        yield


_symmetric = constraints.symmetric.check
_MATRICES = (
    (
        type(constraints.positive_definite),
        lambda _, x: _symmetric(x) & torch.linalg.cholesky_ex(x).info.eq(0),
    ),
    (
        type(constraints.positive_semidefinite),
        lambda _, x: _symmetric(x) & torch.linalg.eigvalsh(x).ge(0).all(-1),
    ),
)
"""Checks of distributions that look at a first answer before they ask further: both at once."""


def _without_gradients(call: Callable[..., Any]) -> Callable[..., Any]:
    """Runs TorchScript that no gradients go through. Others are differentiated by formulas of its own, from about the
    third step on, once it has seen what it is called with: their last bits are not those of the ops before."""

    def checked(script: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = isinstance(script, torch._C.ScriptMethod) or any(
            x.requires_grad for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        )
        if tensors and torch.is_grad_enabled() and torch._C._get_graph_executor_optimize():
            raise scripted(script.name)
        return call(script, *args, **kwargs)

    return checked


def scripted(name: str) -> Unplannable:
    """The error for TorchScript that gradients go through."""
    return Unplannable(
        f"TorchScript ({name}) that gradients go through",
        "it computes other last bits once it has optimized itself, after some steps",
        "call the function without torch.jit.script, or all of the loop under "
        "torch.jit.optimized_execution(False)",
    )


@contextmanager
def random_states_seen(seen: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """``seen(state)`` of each state of the CPU's generator that torch's functions make, checkpoints among them."""

    def made(get: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def state() -> torch.Tensor:
            tensor = get()
            seen(tensor)
            return tensor

        return state

    with ExitStack() as stack:
        for owner in (torch, torch.random):
            stack.enter_context(patched(owner, "get_rng_state", made(torch.default_generator.get_state)))
        yield


@contextmanager
def recomputations_seen(begin: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    """``begin()`` and ``end()`` around what each checkpoint runs again, whose own graph is gone with its end."""
    hook = _checkpoint._recomputation_hook  # type: ignore[attr-defined]
    enter_hook, leave_hook = hook.__enter__, hook.__exit__

    def entered(self: Any) -> None:
        begin()
        enter_hook(self)

    def left(self: Any, *error: object) -> None:
        leave_hook(self, *error)
        end()

    with patched(hook, "__enter__", entered), patched(hook, "__exit__", left):
        yield


@contextmanager
def quiet_engine() -> Iterator[None]:
    """Backward passes of fake tensors on this thread, no logging of formulas that fail, and no search for garbage:
    a capture makes many objects and keeps them, which would be gone through again and again."""
    with garbage_waits(), ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        # Logs the whole stack where a formula fails, also when the kernel is then asked instead.
        stack.enter_context(patched(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True))
        yield


@contextmanager
def inside_backward(
    enter: Callable[[], AbstractContextManager[Any]], done: Callable[[int], None] | None = None
) -> Iterator[None]:
    """Code that runs in backward passes, of hooks and autograd functions, runs within what ``enter`` makes: put
    around the engine: function modes are off inside of the functions of ``torch.autograd``. ``done(number)`` is
    called when the formula of the node of autograd with that number in its sequence has run: what follows for it,
    sums of gradients, is the engine's own."""
    run: Any = vars(torch.autograd)["_engine_run_backward"]

    def engine(roots: Any, *args: Any, **kwargs: Any) -> Any:
        with enter(), _told(roots, done) if done is not None else nullcontext():
            return run(roots, *args, **kwargs)

    with patched(torch.autograd, "_engine_run_backward", engine):
        yield


@contextmanager
def _told(roots: Iterable[torch.Tensor], done: Callable[[int], None]) -> Iterator[None]:
    with ExitStack() as handles:
        todo, seen = [t.grad_fn for t in roots], set[Any]()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node_name(node) != _COMPILED:  # a hook would hold gradients that compiled code lets go of
                number = node._sequence_nr()
                handle = node.register_hook(lambda *_, number=number: done(number))
                handles.callback(handle.remove)
            todo += [following for following, _ in node.next_functions]
        yield


_COMPILED = "CompiledFunctionBackward"
"""The node of a graph that AOTAutograd has made, whose function is ours: it says itself when it has run."""


class GrownCaches:
    """The ``functools`` caches that have grown since: they hold tensors without data, which later calls would get."""

    def __init__(self) -> None:
        self._before = {id(c): c.cache_info().currsize for c in _caches()}

    def empty(self) -> tuple[Any, ...]:
        """Empties and returns them."""
        grown = tuple(c for c in _caches() if c.cache_info().currsize != self._before.get(id(c), 0))
        for c in grown:
            c.cache_clear()
        return grown


def _caches() -> list[Any]:
    kind = type(_caches_probe)
    caches = [c for c in gc.get_referrers(kind) if type(c) is kind]
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
    raise told(
        Unplannable(
            "setting torch's random state in a step",
            "the captured ops draw from the state they find, in the order of the step",
            "seed before the step",
        )
    )


def _refuse_higher_order(op: Any, *_args: object, **_kwargs: object) -> None:
    raise Unplannable(
        f"{op.name()}, a higher-order op,",
        "it traces the functions that it is given, and differentiates them by rules of its own",
        "write the loop or the branch in Python",
    )


def _apply_nothing(module: torch.nn.Module, fn: Callable[[torch.Tensor], Any], recurse: bool = True) -> Any:
    """``Module.to`` and its like in the middle of a step: nothing, if nothing has to be converted."""
    for name, t in [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]:
        if fn(t) is not t:
            raise told(
                Unplannable(
                    f"converting {name!r} of a {type(module).__name__} in a step",
                    "a step does not change what its parameters are",
                    "convert the model before",
                )
            )
    return module


def _has_own_function(tensors: Any) -> bool:
    """As ``torch.overrides.has_torch_function`` answers where no mode is active."""
    functions = [getattr(type(t), "__torch_function__", _PLAIN_FUNCTIONS[0]) for t in tensors]
    return any(f not in _PLAIN_FUNCTIONS for f in functions)


_PLAIN_FUNCTIONS = (torch.Tensor.__torch_function__, torch._C._disabled_torch_function_impl)


def _nothing(*_args: object, **_kwargs: object) -> None:
    return None


def _no(_tensor: object) -> bool:
    return False
