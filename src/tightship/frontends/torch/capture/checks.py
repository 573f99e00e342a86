"""What a step that is captured may not do, and what a model may not be: each is refused in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tightship.errors import BadInput, Unplannable, Unsupported
from tightship.frontends.torch import compat, compat_distributed, compat_optimizers
from tightship.frontends.torch.capture.state_restore import Change
from tightship.frontends.torch.program import Program

__all__ = [
    "DATA_PARALLEL",
    "check_accumulation",
    "check_changes",
    "check_held",
    "check_hooks",
    "check_model",
    "check_replaced",
    "check_same",
    "checked_leaf",
    "shared_buffer",
    "shared_storages",
]

DATA_PARALLEL = (
    'train DistributedDataParallel(torch.compile(model, backend="tightship", options={"budget": …})), with '
    "torch._dynamo.config.optimize_ddp = False"
)
"""What trains one model on several ranks."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type)


def check_model(model: Any, *, hooks: bool = False, shards: bool = False) -> None:
    """``hooks``, and what ``fully_shard`` has made (``shards``): they are taken care of."""
    compat.require_torch()
    if not isinstance(model, torch.nn.Module):
        raise BadInput(f"object of type {type(model).__name__}; give a torch.nn.Module", place="model")
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(t):
            rule = (
                f"{name!r} gets its shape from the first batch (lazy): run the model once on a batch before"
            )
            raise BadInput(rule, place="model")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise Unsupported(
            "a model in DistributedDataParallel", "its hooks run outside the step",
            "give its .module (tightship.fit on several ranks takes the model as it is, or its .module and "
            f"parallel=tightship.DataParallel()); or {DATA_PARALLEL}",
        )  # fmt: skip
    by = compat_distributed.distributed_by(model)
    if by and not (shards and by in ("fully_shard", "DTensor")):
        raise Unsupported(
            f"a model whose parameters are distributed by {by}",
            "its parts are gathered outside of what a plan sees",
            "give fit the plain model and parallel=tightship.DataParallel(shard=True)",
        )
    check_accumulation(model.named_parameters())
    if not hooks:
        check_hooks(model.named_parameters(), model.modules())


def check_accumulation(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ``Unsupported`` for hooks on nodes of autograd, which a planned step does not run."""
    for n, p in parameters:
        for fn in compat_optimizers.accumulation_hooks(p):
            name = getattr(fn, "__qualname__", type(fn).__name__)
            raise Unsupported(
                f"a hook ({name}) on the node that accumulates the gradient of {n!r}",
                "a planned step has no such node, and would leave out what the hook does",
                "register it on the parameter (register_post_accumulate_grad_hook); in the place of optimizers that "
                "step in the backward pass (_apply_optimizer_in_backward) give fit the optimizer: it updates each "
                "parameter at its gradient",
            )  # fmt: skip


def check_hooks(parameters: Iterable[tuple[str, torch.Tensor]], modules: Iterable[torch.nn.Module]) -> None:
    """Raises ``Unsupported`` for hooks on parameters and for backward hooks of modules, which the captured backward
    pass would not run."""
    if compat.backward_hooks(modules):
        raise Unplannable(
            "a backward hook on a module", "the captured backward pass does not run hooks",
            "remove it, or hook the tensor in the forward pass (tensor.register_hook)",
        )  # fmt: skip
    for n, p in parameters:
        if compat_optimizers.gradient_hooks(p):
            raise Unsupported(
                f"a hook on the parameter {n!r}",
                "this capture runs none",
                "remove it; tightship.fit takes it along",
            )


def check_held(held: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]) -> None:
    """Raises ``Unsupported`` where a hook has put something else in the place of a gradient that was added to."""
    for n, g in held.items():
        now = gradients.get(n)
        if now is None or compat.storage_key(now) != compat.storage_key(g):
            raise Unsupported(
                f"a hook on {n!r} that replaces or clears a gradient which earlier batches have added to",
                "a planned step adds to it where it lies", "change it in place (grad.mul_(…)), or clear it first",
            )  # fmt: skip


def shared_buffer(name: str) -> Unsupported:
    """The error for a buffer in whose place a step puts the bytes of a parameter, or of another buffer."""
    return Unsupported(
        f"a buffer that a step makes share bytes with {name!r}",
        "in eager it would follow every change of that",
        "put a copy there (clone())",
    )


def check_replaced(name: str, buffer: torch.Tensor, now: torch.Tensor | None) -> None:
    """Raises ``Unsupported`` for a buffer in whose place a step puts something that cannot be written back into it:
    later steps would find it otherwise than in eager."""
    if now is None or (now.shape, now.dtype, now.device) != (buffer.shape, buffer.dtype, buffer.device):
        what = "a tensor of another size or type"
    elif _strides(now) != _strides(buffer):
        what = f"a tensor with strides {tuple(now.stride())} instead of {tuple(buffer.stride())}"
    else:
        return
    raise Unsupported(
        f"the buffer {name!r}", f"the step replaces it by {what}",
        "write into it with copy_(), or run the model once before capturing it",
    )  # fmt: skip


def _strides(tensor: torch.Tensor) -> list[int]:
    return [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


def checked_leaf(x: Any) -> Any:
    """What may be handed back beside tensors; raises ``Unsupported`` for anything else."""
    if isinstance(x, _PLAIN):
        return x
    raise Unsupported(
        f"a {type(x).__name__} among the results of a step",
        "tensors inside it cannot be found",
        "return its tensors in lists, tuples, dicts or dataclasses",
    )


# --- steps that change what the next one does -----------------------------------------------------------------


def check_changes(changes: Sequence[Change], program: Program) -> None:
    """A tensor that the step reads and replaces would be read as it is now for ever."""
    for c in changes:
        if isinstance(c.old, torch.Tensor) and any(c.old is t for t in program.constants):
            raise Unsupported(
                f"the tensor {c}", "the step reads it and puts another in its place",
                "make it a buffer (register_buffer)",
            )  # fmt: skip


def check_same(first: Program, second: Program, changes: Sequence[Change]) -> None:
    """What the model counts and keeps in plain attributes must make no difference to the next step's ops."""
    alike = (
        first.graph.digest == second.graph.digest
        and all(
            repr((a.args, a.kwargs)) == repr((b.args, b.kwargs))
            for a, b in zip(first.calls, second.calls, strict=True)
        )
        and len(first.constants) == len(second.constants)
        and all(a is b or torch.equal(a, b) for a, b in zip(first.constants, second.constants, strict=True))
    )
    if not alike:
        names = ", ".join(str(c) for c in changes if c.is_plain)
        raise Unsupported(
            f"a step that changes {names}", "the next step would run other ops or with other numbers",
            "keep it in a buffer and compute with tensors, or run the model once before capturing it",
        )  # fmt: skip


def shared_storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The storages in which several of the tensors lie."""
    count = Counter(
        compat.storage_key(t) for t in tensors if t.layout is torch.strided and not compat.is_fake(t)
    )
    return {s for s, n in count.items() if n > 1}
