"""How a step's ops are called so that Inductor can compile them: on stand-ins, laid out as in eager.

A part of ``compat``, under the same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from tightship.errors import TightshipError, Unsupported

__all__ = [
    "as_if_compiling",
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
