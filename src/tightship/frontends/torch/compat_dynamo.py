"""Every touch of Dynamo's private interfaces: what it knows of the frame it compiles, and what it keeps of a compiled
module or function.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import torch

from tightship.errors import Unsupported
from tightship.frontends.torch.compat import NESTED, has_own_ops, is_own_class, require_torch
from tightship.frontends.torch.compat_capture import scripted
from tightship.frontends.torch.compat_distributed import is_distributed

require_torch()

from torch._dynamo import config as _dynamo_config  # noqa: E402
from torch._dynamo import convert_frame as _convert_frame  # noqa: E402
from torch._dynamo import eval_frame as _eval_frame  # noqa: E402
from torch._dynamo import utils as _utils  # noqa: E402
from torch._dynamo.eval_frame import OptimizedModule as _OptimizedModule  # noqa: E402
from torch._dynamo.eval_frame import _debug_get_cache_entry_list as _entries  # noqa: E402
from torch._dynamo.exc import TorchDynamoException  # noqa: E402
from torch._dynamo.exc import unimplemented as _unimplemented  # noqa: E402
from torch._dynamo.variables import functions as _functions  # noqa: E402
from torch._guards import CompileContext  # noqa: E402
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException  # noqa: E402
from torch.fx import GraphModule, Node  # noqa: E402
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols as _free_unbacked_symbols  # noqa: E402

_TORCH: Final = torch.__file__.rpartition("__init__")[0]
_CALLS: Final = ("_wrapped_call_impl", "_call_impl")


def frame() -> tuple[int, str]:
    """Number of the Python frame being compiled, and the name of this compilation of it (``0/1``)."""
    found = CompileContext.current_compile_id()
    if found is None:
        return -1, "graph"
    number = found.frame_id
    return (-1 if number is None else int(number)), str(found)


def compiled_code(gm: GraphModule) -> str:
    """Which code of the caller's a graph is of, in words: the function, and the line where the graph ends."""
    stack = getattr(getattr(gm, "compile_subgraph_reason", None), "user_stack", None)
    if not stack:
        return f"graph {frame()[1]}"
    file = stack[0].filename.rpartition("/")[2]
    return f"{stack[0].name} ({file}:{stack[0].lineno})"


def last_time() -> int | None:
    """How often Dynamo has compiled this Python frame now, if it will not do so again; else None.

    What then misses all guards runs in eager, and no backend is asked.
    """
    found = CompileContext.current_compile_id()
    if found is None or found.frame_compile_id is None:
        return None
    count = found.frame_compile_id + 1
    limit = min(_dynamo_config.recompile_limit, _dynamo_config.accumulated_recompile_limit)
    return count if count == limit else None


@dataclass(frozen=True, slots=True)
class Break:
    """Where the caller's code goes on after a graph, to be compiled on its own, and why Dynamo could not go on.

    ``runs``: whether ops may run there, outside of all graphs. ``by_ddp``: whether there was no need, but for the
    buckets of DistributedDataParallel.
    """

    place: str
    why: str
    runs: bool
    by_ddp: bool


_RUNS_NOTHING: Final = (
    "Call to `torch._dynamo.graph_break()`",
    "logging.Logger method",
    "generic_jump",  # a branch on data: a number is read
    "Unsupported Tensor.item()",
)


def graph_break(gm: GraphModule) -> Break | None:
    """What follows the graph; None if it is the last of its frame."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    stack = reason.user_stack or []
    place = f"{stack[-1].filename.rpartition('/')[2]}:{stack[-1].lineno}" if stack else "an unknown place"
    text = str(reason.reason)
    runs = not text.startswith(_RUNS_NOTHING) and "builtin operator `print`" not in text
    why = _last_break() if text == "step_unsupported" else _first_line(text)
    return Break(place, why, runs, text.startswith("DDPOptimizer"))


def _last_break() -> str:
    """Why Dynamo gave up the rest of a function: it says so only where it counts its graph breaks."""
    reasons = list(_utils.counters["graph_break"])
    said = _first_line(reasons[-1]) if reasons else "it does not trace that call"
    return f"{said}; the rest of that function is left out, too"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].rstrip(".")


_LEFT: Final = (
    "Dynamo leaves torch's own modules to their caller, which is not compiled: torch.compile(module, …) of this one "
    "compiles all of it, which module.compile(…) does not"
)

_BROKEN: Final = (
    "Dynamo leaves torch's own modules to their caller, whose graph breaks there: {}; "
    "TORCH_LOGS=graph_breaks says where"
)

Skipped = Callable[[Any, dict[str, Any] | None, str, str, bool], object]
Raised = Callable[[Any, BaseException], None]


class _Compiling:
    """The Python frame of the caller's that Dynamo compiles with the watched backend, in words; whether code of the
    caller's that was to be compiled, too, calls it."""

    frame: str = ""
    called: bool = False


def python_frame() -> str:
    """Which Python frame is being compiled, in words, wherever its graph ends."""
    return _Compiling.frame


def inner() -> bool:
    """Whether the frame that is being compiled is called by other code that was to be compiled with it, where the
    graph breaks: more graphs may follow."""
    return _Compiling.called


def watch_frames(backend: Any, skipped: Skipped, raised: Raised) -> None:
    """Calls ``skipped(session, options, what, why, first)`` when Dynamo gives up a frame that was to be compiled with
    ``backend`` and runs it as it is, before it does, and for each of torch's modules that is then called by itself
    (``first`` is False, unless it is the first that is known of what was to be compiled). What it returns is the next
    call's ``session``, and lives as long as the compiled code. Calls ``raised`` with the module whose frame it is, if
    it is one's, and the error, where Dynamo raises one.

    Dynamo asks no backend then, has no hook for it, and passes over that code from then on, in other models too: here
    only in this one.
    """
    wrapper = _convert_frame.CatchErrorsWrapper
    original = getattr(wrapper.__call__, "_tightship_original", wrapper.__call__)

    def call(self: Any, frame: Any, cache_entry: Any, state: Any) -> Any:
        kwargs = _kwargs_of(self, backend)
        if kwargs is None:
            return original(self, frame, cache_entry, state)
        given_up = self.__dict__.setdefault("_tightship_given_up", {})
        if frame.f_code in given_up:
            return given_up[frame.f_code]
        before, broken = _utils.get_compilation_metrics()[-1:], _utils.counters["graph_break"].copy()
        graphs = _utils.counters["stats"]["unique_graphs"]
        # Each size is compiled anew in any case.
        outer = _Compiling.frame, _Compiling.called
        _Compiling.frame, _Compiling.called = (
            f"the frame of {_where(frame.f_code)}",
            _called(sys._getframe(1)),
        )
        try:
            with _dynamo_config.patch(automatic_dynamic_shapes=False), _scripts_left_out():
                found = original(self, frame, cache_entry, state)
        except Exception as error:
            raised(_first_argument(frame), error)
            raise
        finally:
            _Compiling.frame, _Compiling.called = outer
        last = _utils.get_compilation_metrics()[-1:]
        why = last[0].fail_reason if last and last != before else None
        if _utils.counters["stats"]["unique_graphs"] > graphs:
            self._tightship_graphs = True
        for reason in _utils.counters["graph_break"] - broken:
            self._tightship_broken = reason
        module = _module_passed_over(frame, found)
        if found.guarded_code is None and (why or module):
            what = _where(frame.f_code) if why else module
            broke = getattr(self, "_tightship_broken", None)
            why = _first_line(why or (_LEFT if broke is None else _BROKEN.format(_first_line(broke))))
            known = getattr(self, "_tightship_session", None)
            alone = known is None and not getattr(self, "_tightship_graphs", False)
            self._tightship_session = skipped(known, kwargs.get("options"), what, why, not module or alone)
            found.apply_to_code = False
            given_up[frame.f_code] = found
        return found

    call._tightship_original = original  # type: ignore[attr-defined]
    wrapper.__call__ = call


@contextmanager
def _scripts_left_out() -> Iterator[None]:
    """Dynamo breaks the graph at TorchScript that gradients go through. It would trace the Python code that was
    scripted, whose last bits are others once TorchScript has optimized itself."""
    owner = _functions.WrapperUserFunctionVariable
    original = owner.call_function

    def call(self: Any, *args: Any) -> Any:
        script = isinstance(self.wrapper_obj, torch._C.ScriptFunction)
        if script and torch.is_grad_enabled() and torch._C._get_graph_executor_optimize():
            error = scripted(str(self.wrapper_obj.name))
            _unimplemented(gb_type=str(error.what), context="", explanation=error.why, hints=[])
        return original(self, *args)

    owner.call_function = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        owner.call_function = original  # type: ignore[method-assign]


def _called(caller: FrameType | None) -> bool:
    """Whether code that is not torch's is between ``caller`` and what torch.compile put around it."""
    found = False
    while caller is not None and caller.f_code.co_filename != _eval_frame.__file__:
        found = found or not caller.f_code.co_filename.startswith(_TORCH)
        caller = caller.f_back
    return found and caller is not None


def _where(code: Any) -> str:
    file = code.co_filename.rpartition("/")[2]
    if file == "external_utils.py":  # Dynamo's own wrapper around a module of torch's
        return "the compiled module"
    return f"{code.co_name} ({file}:{code.co_firstlineno})"


def _module_passed_over(frame: Any, found: Any) -> str:
    """Which of torch's own modules is called outside of all graphs: Dynamo compiles those with callers.

    DistributedDataParallel is none of them: it calls its module, which is compiled by itself, and sends.
    """
    code = frame.f_code
    if code.co_name != "forward" or "skipfiles" not in (found.skip_reason or "") or not code.co_argcount:
        return ""
    module = _first_argument(frame)
    calls = isinstance(module, torch.nn.Module) and not isinstance(
        module, torch.nn.parallel.DistributedDataParallel
    )
    return f"{type(module).__name__}.forward" if calls else ""


def modules_beside() -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """The modules that are compiled by themselves, with equal options, within the outermost module that runs, and
    are of the compiled one's class, itself included: one after the other, they are likely to run the code that is
    compiled now. And those of other classes. So of modules that a compiled one calls where its graph breaks. Empty
    where nothing is known."""
    running, within = _running()
    if not running:
        return [], []
    if inner() and within and within[0] is not within[-1]:
        return _beside_within(within[0], within[-1])
    compiled = _compiled_in(running[-1])
    own, options = next((compiled[id(m)] for m in running if id(m) in compiled), (None, None))
    sharing = [m for m, theirs in compiled.values() if theirs == options]
    alike = [m for m in sharing if type(m) is type(own)]
    return alike, [] if own is None else [m for m in sharing if type(m) is not type(own)]


def options_beside(options: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Options equal to these that modules within the outermost one that runs are compiled with: one for each where
    every one was given its own."""
    running, _ = _running()
    rows = _compiled_in(running[-1]).values() if running else ()
    return [theirs for _, theirs in rows if theirs is not options and theirs == options]


def _running() -> tuple[list[torch.nn.Module], list[torch.nn.Module] | None]:
    """The modules that run, the innermost first; and of these, up to what torch.compile was given."""
    running: list[torch.nn.Module] = []
    within: list[torch.nn.Module] | None = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if within is None and frame.f_code.co_filename == _eval_frame.__file__:
            within = running.copy()
        module = frame.f_locals.get("self") if frame.f_code.co_name in _CALLS else None
        if isinstance(module, torch.nn.Module):
            running.append(_inside(module))
        frame = frame.f_back
    return running, within


def _compiled_in(root: torch.nn.Module) -> dict[int, tuple[torch.nn.Module, Any]]:
    """The modules of ``root`` that are compiled by themselves, by identity, with their options."""
    compiled: dict[int, tuple[torch.nn.Module, Any]] = {}
    for m in root.modules():
        runs = (getattr(m, "_compiled_call_impl", None), m.__dict__.get("forward"))
        if isinstance(m, _OptimizedModule):
            compiled[id(_inside(m))] = _inside(m), compiled_options(m)
        elif any(hasattr(f, "_torchdynamo_orig_callable") for f in runs):
            compiled[id(m)] = m, compiled_options(m if runs[0] is not None else runs[1])
    return compiled


def _beside_within(
    own: torch.nn.Module, root: torch.nn.Module
) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """The modules of ``root`` that are built as ``own`` is; and the smallest ones that are no part of these."""
    shapes = [p.shape for p in own.parameters()]
    alike = [
        m for m in root.modules() if type(m) is type(own) and [p.shape for p in m.parameters()] == shapes
    ]
    inside = {id(part) for m in alike for part in m.modules()}
    return alike, [m for m in root.modules() if id(m) not in inside and not any(True for _ in m.children())]


def _inside(module: torch.nn.Module) -> torch.nn.Module:
    """What ``torch.compile(module)`` was given; others may have attributes of the same name."""
    return module._orig_mod if isinstance(module, _OptimizedModule) else module


def _first_argument(frame: Any) -> Any:
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return frame.f_locals.get(names[0]) if names else None


def frame_session(compiled: Any) -> Any:
    """What `watch_frames` keeps for a compiled module or function, None if no frame of it was given up."""
    for callback in _callbacks(compiled):
        found = getattr(callback, "_tightship_session", None)
        if found is not None:
            return found
    return None


def _kwargs_of(callback: Any, backend: Any) -> dict[str, Any] | None:
    """What ``backend`` is given by torch.compile, if it is what ``callback`` compiles with."""
    while callback is not None:
        if getattr(callback, "compiler_fn", None) is backend:
            kwargs = getattr(callback, "kwargs", None)
            return kwargs if isinstance(kwargs, dict) else {}
        callback = getattr(callback, "_torchdynamo_orig_backend", None)
    return None


def source_name(node: Node) -> str:
    """The Python expression of a Dynamo placeholder's tensor
    (``L['self']._modules['fc']._parameters['weight']``)."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def cut_at_buckets(how: Any) -> Any:
    """Whether Dynamo cuts a model in DistributedDataParallel into a graph a bucket, from here on; returns whether it
    did."""
    before, _dynamo_config.optimize_ddp = _dynamo_config.optimize_ddp, how
    return before


def trained_parameters(gm: GraphModule) -> list[torch.Tensor]:
    """The parameters that a graph has gradients for, but those that are DTensors."""
    found = [example_of(n) for n in gm.graph.find_nodes(op="placeholder")]
    return [
        t
        for t in found
        if isinstance(t, torch.nn.Parameter) and t.requires_grad and not is_distributed(type(t.data))
    ]


def attributes_of(gm: GraphModule) -> list[torch.Tensor]:
    """The caller's tensors that a graph reads without being given them: parameters and state of an optimizer whose
    step is compiled."""
    names = {str(n.target) for n in gm.graph.find_nodes(op="get_attr")}
    found = [
        functools.reduce(lambda at, part: getattr(at, part, None), name.split("."), gm) for name in names
    ]
    return [t for t in found if isinstance(t, torch.Tensor)]


def gradients_given(gm: GraphModule) -> list[torch.Tensor]:
    """What a graph is given that tensors have in ``grad``, where no result of it is differentiated: it is a part of a
    training step behind the backward pass, such as clipping and the optimizer's step."""
    results = (n.meta.get("example_value") for n in gm.graph.output_node().all_input_nodes)
    if any(isinstance(t, torch.Tensor) and t.requires_grad for t in results):
        return []
    given = (example_of(n) for n in gm.graph.find_nodes(op="placeholder") if source_name(n).endswith(".grad"))
    return [t for t in given if t is not None]


@contextmanager
def called_instead(gm: GraphModule, instead: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, a Dynamo graph and those within it call what ``instead`` says in the place of functions and methods."""
    changed: list[tuple[Node, str, Any]] = []
    graphs = [m for m in gm.modules() if isinstance(m, GraphModule)]
    for n in [n for m in graphs for n in m.graph.nodes if n.op in ("call_function", "call_method")]:
        known = n.target if n.op == "call_function" else getattr(torch.Tensor, str(n.target), None)
        if (now := instead(known)) is not known:
            changed.append((n, n.op, n.target))
            n.op, n.target = "call_function", now
    _recompile(graphs if changed else ())
    try:
        yield
    finally:
        for n, op, target in changed:
            n.op, n.target = op, target
        _recompile(graphs if changed else ())


def _recompile(graphs: Sequence[GraphModule]) -> None:
    for graph in graphs:
        graph.recompile()


def example_of(node: Node) -> torch.Tensor | None:
    """The caller's tensor that a Dynamo placeholder stood for when it was traced, if it is still there."""
    found = getattr(node.meta.get("grapharg"), "example", None)
    return found if isinstance(found, torch.Tensor) else None


def is_control_flow(error: BaseException) -> bool:
    """Whether an exception is Dynamo's way of starting over, and none of a backend's business."""
    return isinstance(error, TorchDynamoException)


def sized_by_data(gm: GraphModule) -> Node | None:
    """The first node of a Dynamo graph whose result has a size that follows from data."""
    for n in gm.graph.nodes:
        value = n.meta.get("example_value")
        if isinstance(value, torch.Tensor) and _free_unbacked_symbols(value):
            return n
    return None


def in_our_words(error: Exception) -> Exception:
    """``error``; where PyTorch's says no more than that an op's result follows from data, with what to do."""
    if not isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return error
    return Unsupported(
        f"{error} in a graph or its gradient",
        "its result has a size or a number that follows from data, as gradients of what x[mask] = v writes have, and "
        "sparse ones",
        "write torch.where(mask, v, x), keep it out of the compiled region, or use tightship.fit",
    )


def fixed_sizes(gm: GraphModule, inputs: Sequence[Any]) -> bool:
    """Makes every symbolic size of the graph's inputs the number it is now; whether there were any.

    Dynamo guards on what was asked, so that other sizes are compiled anew; those too that are marked as dynamic
    (``torch._dynamo.mark_dynamic``), of which it would raise that they have become numbers. Raises ``Unsupported``
    for nested tensors, whose rows' sizes are data.
    """
    symbols: list[Any] = []
    if any(isinstance(x, torch.Tensor) and x.is_nested for x in inputs):
        raise Unsupported(*NESTED)
    for x in inputs:
        if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            symbols.append(x)
            int(x) if isinstance(x, torch.SymInt) else bool(x) if isinstance(x, torch.SymBool) else float(x)
        elif isinstance(x, torch.Tensor):
            sizes = [n for n in (*x.shape, *x.stride(), x.storage_offset()) if isinstance(n, torch.SymInt)]
            symbols += sizes
            for n in sizes:
                int(n)
    tracked = {id(t): t for n in symbols for t in n.node.shape_env.tracked_fakes or ()}
    for t in tracked.values():  # what `mark_dynamic` asks for, of tensors alone
        for asked in ("constraint_sizes", "constraint_strides"):
            rows = getattr(t.symbolic_context, asked, None) or []
            rows[:] = [None] * len(rows)
    return bool(symbols)


def given_plain(compiled: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
    """``compiled``, of a graph with such ``inputs``, which takes those of classes with functions of their own as
    plain tensors: Dynamo has traced such functions, and AOTAutograd's wrapper knows no such class."""
    classes = [type(x) if isinstance(x, torch.Tensor) else torch.Tensor for x in inputs]
    own = [k for k, kind in enumerate(classes) if is_own_class(kind) and not has_own_ops(kind)]

    def run(*given: Any) -> Any:
        plain = list(given)
        with torch._C.DisableTorchFunctionSubclass():
            for k in own:
                plain[k] = plain[k].as_subclass(torch.Tensor)
        return compiled(*plain)

    return run if own else compiled


def compiled_options(compiled: Any) -> dict[str, Any] | None:
    """The ``options`` a module or function was given to ``torch.compile`` with, the same object; None if
    none."""
    for callback in _callbacks(compiled):
        kwargs = getattr(callback, "kwargs", None)
        if isinstance(kwargs, dict) and hasattr(callback, "compiler_fn"):
            return kwargs.get("options")
    return None


def equal_options(compiled: Any) -> list[Mapping[str, Any]]:
    """The ``options`` of other calls of torch.compile whose code Dynamo runs for ``compiled``, too: it keeps code by
    function, and takes backends with equal options for one."""
    own = next((c for c in _callbacks(compiled) if not hasattr(c, "_torchdynamo_orig_backend")), None)
    apart = {getattr(c, "_isolate_recompiles_id", -1) for c in _contexts(compiled)}
    found: list[Mapping[str, Any]] = []
    for code in _codes(compiled):
        for entry in _entries(code):
            made_by = entry.backend
            if made_by is own or made_by != own or entry.isolate_recompiles_id not in apart:
                continue
            options = made_by.kwargs.get("options")
            found += [] if any(options is x for x in found) else [options]
    return found


def _codes(compiled: Any) -> set[Any]:
    """The code objects that Dynamo compiles for a module or function."""
    module = getattr(compiled, "_orig_mod", compiled)
    outer = (compiled, getattr(compiled, "forward", None), getattr(compiled, "_compiled_call_impl", None))
    called = [getattr(f, "_torchdynamo_orig_callable", None) for f in outer]
    found = (getattr(f, "__code__", None) for f in (*called, getattr(module, "forward", None)))
    return {code for code in found if code is not None}


def _callbacks(compiled: Any) -> Iterator[Any]:
    """From what Dynamo calls with each frame down to what torch.compile was given."""
    for context in _contexts(compiled):
        callback = getattr(context, "callback", None)
        while callback is not None:
            yield callback
            callback = getattr(callback, "_torchdynamo_orig_backend", None)


def _contexts(compiled: Any) -> Iterator[Any]:
    implementation = getattr(compiled, "_compiled_call_impl", None)  # Module.compile
    for thing in (compiled, implementation, getattr(implementation, "__wrapped__", None)):
        if (context := getattr(thing, "dynamo_ctx", None)) is not None:
            yield context
        for cell in getattr(thing, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "callback"):
                yield cell.cell_contents
