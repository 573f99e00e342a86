"""How a step's ops are called so that Inductor can compile them: on stand-ins, laid out as in eager.

A part of ``compat``, under the same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from tightship.errors import TightshipError, Unsupported
from tightship.frontends.torch.compat import WithGradMode
from tightship.graph import Value

__all__ = [
    "as_if_compiling",
    "called_whole",
    "compiled_strides",
    "failing",
    "of_module",
    "traced",
]


def traced(fn: Callable[..., Any], inputs: Sequence[torch.Tensor], mode: Any) -> GraphModule:
    """The fx graph of the ops that a function calls on fake tensors of ``mode``."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with mode, torch.fx.traceback.preserve_node_meta():
        return make_fx(fn, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)


@contextmanager
def failing(what: str) -> Iterator[None]:
    """What PyTorch's compiler cannot do is ``Unsupported``, in its own words."""
    try:
        yield
    except (TightshipError, MemoryError):
        raise
    except Exception as error:
        words = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
            words = f"what {words} gives follows from numbers in tensors"
        raise Unsupported(f"{what} in compiled mode", words, 'use mode="exact"') from error


def called_whole(fn: Any) -> Callable[..., Any] | None:
    """For an op that Inductor cannot call as it is, what to call in its place: an op of ours that runs it, told of
    ``likes``, the values that its results are (None: not needed). None for all others."""
    op = fn.fn if isinstance(fn, WithGradMode) else fn
    return _WHOLE.get(op)


def _grouped_mm(likes: Sequence[Value | None], *args: Any, **kwargs: Any) -> Any:
    """``aten._grouped_mm``: on the CPU it multiplies single precision as well, which its stand-in refuses."""
    if args[0].dtype == torch.bfloat16:
        return torch.ops.aten._grouped_mm.default(*args, **kwargs)
    names = ("offs", "bias", "out_dtype")
    offs, bias, dtype = (args[2 + k] if len(args) > 2 + k else kwargs.get(n) for k, n in enumerate(names))
    if bias is not None or dtype not in (None, args[0].dtype):
        raise Unsupported(
            f"a grouped product of {args[0].dtype} with a bias or into another type in compiled mode",
            "PyTorch's compiler takes bfloat16 alone there",
            'use mode="exact"',
        )
    (like,) = likes
    assert like is not None
    return _grouped_mm_op()(list(args[:2]), offs, list(like.shape), list(like.stride))


@cache
def _grouped_mm_op() -> Any:
    def run(args: list[torch.Tensor], offs: torch.Tensor | None, shape: Any, stride: Any) -> torch.Tensor:
        return torch._grouped_mm(args[0], args[1], offs=offs)

    def blank(args: list[torch.Tensor], offs: Any, shape: list[int], stride: list[int]) -> torch.Tensor:
        return args[0].new_empty_strided(shape, stride)

    schema = "(Tensor[] args, Tensor? offs, int[] shape, int[] stride) -> Tensor"
    op = torch.library.custom_op("tightship::grouped_mm", run, mutates_args=(), schema=schema)
    op.register_fake(blank)
    return op


def _recurrent_layer(likes: Sequence[Value | None], *args: Any) -> Any:
    """``aten.mkldnn_rnn_layer``, which saves its workspace only where grad mode is on, and whose stand-in has none.
    Its workspace, the last result, is bytes, of which only a run says how many."""
    tensors, settings = args[:_TENSORS], args[_TENSORS:]
    space = likes[-1]
    return _recurrent_op()(list(tensors), *settings, 0 if space is None else space.shape[0])


_TENSORS: Final = 7
"""Arguments of a recurrent layer that are tensors: the first ones."""


@cache
def _recurrent_op() -> Any:
    layer = torch.ops.aten.mkldnn_rnn_layer.default

    def run(tensors: list[torch.Tensor], *settings: Any) -> tuple[torch.Tensor, ...]:
        y, hy, cy, space = WithGradMode(layer)(*tensors, *settings[:-1])
        return y, hy, cy, space if settings[-1] else space.new_empty(0)

    def blank(tensors: list[torch.Tensor], *settings: Any) -> tuple[torch.Tensor, ...]:
        y, hy, cy, space = layer(*tensors, *settings[:-1])
        return y, hy, cy, space.new_empty(settings[-1])

    schema = (
        "(Tensor[] tensors, bool reverse, int[] batch_sizes, int mode, int hidden_size, int num_layers, "
        "bool has_biases, bool bidirectional, bool batch_first, bool train, int space) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    )
    op = torch.library.custom_op("tightship::mkldnn_rnn_layer", run, mutates_args=(), schema=schema)
    op.register_fake(blank)
    return op


_WHOLE: Final[dict[Any, Callable[..., Any]]] = {
    torch.ops.aten._grouped_mm.default: _grouped_mm,
    torch.ops.aten.mkldnn_rnn_layer.default: _recurrent_layer,
}


def compiled_strides(fn: Any, args: Any, kwargs: Any) -> list[tuple[int, ...]] | None:
    """The strides of an op's results where it is compiled, as what Inductor decomposes it to; None where it does not,
    or nothing can be said."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

    table = select_decomp_table()
    if fn not in table or fn._schema.is_mutable:
        return None
    leaves, spec = tree_flatten((args, kwargs))

    def op(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        filled = [next(given) if isinstance(x, torch.Tensor) else x for x in leaves]
        a, k = tree_unflatten(filled, spec)
        return fn(*a, **k)

    with disable_proxy_modes_tracing():
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        blank = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]
        try:
            made = make_fx(op, decomposition_table=table, tracing_mode="real")(*blank)
        except Exception:  # what cannot be decomposed by itself is not
            return None
    (out,) = made.graph.find_nodes(op="output")
    results = out.args[0] if isinstance(out.args[0], (list, tuple)) else [out.args[0]]
    return [n.meta["val"].stride() if isinstance(n, Node) else () for n in results]


def of_module(path: str | None) -> None:
    """What is traced from here on is of the forward pass, in the module of that path and those around it; None: of
    the backward pass or the update."""
    parts = [] if path is None else ["model", *filter(None, path.split("."))]
    paths = [".".join(parts[: k + 1]) for k in range(len(parts))]
    torch.fx.traceback.current_meta["nn_module_stack"] = {p: (p, "") for p in paths}


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """PyTorch's own code does as it would for a compiler inside."""
    with torch.compiler._compile_session_context():
        yield
