"""Every touch of private interfaces that say what ``fully_shard``'s hooks hold while a model runs (FSDP2): this
rank's parts, whole parameters and gradients, and buffers for what is sent.

A part of ``compat``, under the same rule as `compat_fully_shard`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tightship.frontends.torch.compat import storage_key
from tightship.frontends.torch.compat_distributed import own_part, storage_sizes
from tightship.graph import aligned

__all__ = ["HookMemory", "running_hooks"]


@dataclass(frozen=True)
class _Group:
    """Parameters that are gathered and sent together, in bytes: ``whole`` as they are gathered, with what copies of
    another type or layout take in ``cast``; whole ``gradients`` as the backward pass leaves them, and ``reduced`` as
    they are sent; this rank's part of these (``sent``) and of the gradients that stay (``part``). ``outermost``: of
    the model itself, whose gradients are sent when the backward pass is over."""

    group: Any
    whole: int
    cast: int
    gradients: int
    reduced: int
    sent: int
    part: int
    outermost: bool

    @property
    def stays(self) -> bool:
        """Whether it is whole from the forward to the backward pass."""
        return self.group.post_forward_mesh_info is None or not self.group.reshard_after_backward

    @property
    def adds_up(self) -> bool:
        """Whether whole gradients are added up, and not sent."""
        return not self.group.reduce_grads

    def between(self) -> int:
        """Bytes of the parts that lie elsewhere than the rank's own from the forward to the backward pass
        (``reshard_after_forward`` as a number)."""
        info = self.group.post_forward_mesh_info
        if info is None or info == self.group.mesh_info:
            return 0
        return -(-self.whole // info.shard_mesh_size)


class HookMemory:
    """What the hooks of a model's ``fully_shard`` hold, in bytes.

    `passes` and `last` are upper bounds that follow from the order in which hooks gather, free and send: while the
    graph of one group runs, its parameters are whole, a next group may be gathered already, and the gradients of the
    group before are being sent. Gloo has a copy of what it sends, which a thread of its own frees later.
    """

    def __init__(self, states: Sequence[Any]) -> None:
        self.model = id(states)
        self._states = list(states)
        self._groups = [
            _measured(group, outermost=bool(state._is_root))
            for state in self._states
            for group in state._fsdp_param_groups
        ]
        self.gradients = sum(g.part for g in self._groups)

    def own_gradients(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of this rank's parts of the gradients of those among the tensors that hooks have gathered."""
        keys = {storage_key(own_part(t)) for t in tensors}
        params = (p for g in self._groups for p in g.group.fsdp_params)
        return sum(_part_of_gradient(p) for p in params if _whole_key(p) in keys)

    def parts(self) -> dict[int, int]:
        """Identity and bytes of the storages of this rank's parts."""
        return storage_sizes(p._sharded_param_data for g in self._groups for p in g.group.fsdp_params)

    def whole(self) -> frozenset[int]:
        """The identities of the storages in which parameters have been whole; these stay, whether or not bytes are in
        them."""
        keys = (_whole_key(p) for g in self._groups for p in g.group.fsdp_params)
        return frozenset(key for key in keys if key is not None)

    def passes(self) -> int:
        """The most that is there beside the parts, and those of gradients, while graphs run."""
        groups = self._groups
        inner = [g for g in groups if not g.outermost]
        gathered = _most(g.whole + g.cast for g in groups)
        sending = _most(g.reduced for g in inner)
        return (
            self._all_along()
            + _most(g.whole for g in groups if not g.stays)
            + (self._ahead() + 1) * gathered  # one of them gloo's
            + (self._unsent() + 1) * sending
            + _most(max(g.sent + g.part - g.whole, 0) for g in inner)  # when they are made it is freed
        )

    def last(self) -> int:
        """The most beside the parts, with those of gradients, when the backward pass is over and what is left is
        sent."""
        groups = self._groups
        return (
            self.gradients
            + self._all_along()
            + _most(g.whole + g.gradients for g in groups if not g.outermost)
            + (self._unsent() + 1) * _most(g.reduced for g in groups)
            + _most(g.sent + g.part for g in groups)
        )

    def _all_along(self) -> int:
        groups = self._groups
        copies = sum(g.sent for g in groups if getattr(g.group, "_is_hsdp", False))
        return (
            copies
            + sum(g.whole for g in groups if g.stays)
            + sum(g.between() for g in groups if not g.stays)
            + sum(max(g.reduced, g.gradients) for g in groups if g.outermost or g.adds_up)
        )

    def _ahead(self) -> int:
        """How many groups may be gathered that are not read yet."""
        lists = (
            len(named)
            for s in self._states
            for named in (s._states_to_forward_prefetch, s._states_to_backward_prefetch)
        )
        return max(1, *lists) if self._states else 1

    def _unsent(self) -> int:
        return max((g.group.reduce_scatter_max_input_buffers for g in self._groups), default=1)

    def now(self) -> int:
        """What is there now beside the parts and those of gradients, but for what is no tensor of the hooks' (gloo's
        copies)."""
        total, contexts = 0, {id(g.group.comm_ctx): g.group.comm_ctx for g in self._groups}
        for g in self._groups:
            total += g.whole if g.group.is_unsharded else 0
            total += _in_buffer(g.group._all_gather_result)
            if g.group.is_unsharded or g.adds_up:
                total += sum(map(_bytes, _whole_gradients(g.group)))
        for context in contexts.values():
            kept = getattr(context, "all_gather_state", None)
            total += _in_buffer(kept and kept.all_gather_result)
            states = getattr(context, "reduce_scatter_states", None) or ()
            total += sum(_bytes(s.reduce_scatter_input) for s in states)
        return total


def running_hooks(given: Iterable[torch.Tensor]) -> HookMemory | None:
    """Of the model of ``fully_shard`` that is in its forward or backward pass and has gathered some of these; where
    none has, of the only one that is. A model that has raised an error in a pass seems to be in it ever after."""
    from torch.distributed._composable_state import _module_state_mapping as known

    keys, found = {storage_key(own_part(t)) for t in given}, {}
    for state in [s for reference in known.values() if (s := reference()) is not None]:
        if getattr(state, "_fsdp_param_groups", None) is None or state._is_root is None:
            continue
        if state._training_state.name != "IDLE":
            states = state._state_ctx.all_states
            found[id(states)] = HookMemory(states)
    having = [one for one in found.values() if one.whole() & keys] or list(found.values())
    return having[0] if len(having) == 1 else None


def _measured(group: Any, outermost: bool) -> _Group:
    ranks = getattr(group.mesh_info, "shard_mesh_size", 1)
    whole = cast = gradients = reduced = part = 0
    for p in group.fsdp_params:
        count = p.padded_sharded_param_size.numel()
        gathered = p.param_dtype or p.orig_dtype
        size = aligned(count * ranks * gathered.itemsize)
        whole += size
        cast += count * gathered.itemsize if gathered != p.orig_dtype else 0
        cast += size if p.fsdp_placement.dim else 0
        if p.sharded_param.requires_grad:
            gradients += size
            sent = p.reduce_dtype or gathered
            reduced += aligned(count * ranks * sent.itemsize)
            part += _part_of_gradient(p)
    return _Group(group, whole, cast, gradients, reduced, -(-reduced // ranks), part, outermost)


def _part_of_gradient(param: Any) -> int:
    if not param.sharded_param.requires_grad:
        return 0
    return aligned(param.padded_sharded_param_size.numel() * param.orig_dtype.itemsize)


def _whole_key(param: Any) -> int | None:
    """The identity of the storage in which a parameter is whole; it stays, whether or not bytes are in it."""
    whole = getattr(param, "_unsharded_param", None)
    return None if whole is None else storage_key(own_part(whole))


def _whole_gradients(group: Any) -> Iterator[Any]:
    for p in group.fsdp_params:
        yield p.unsharded_accumulated_grad
        yield getattr(getattr(p, "_unsharded_param", None), "grad", None)


def _in_buffer(result: Any) -> int:
    return 0 if result is None else _bytes(result.all_gather_output)


def _bytes(tensor: Any) -> int:
    tensor = own_part(tensor)
    return int(tensor.untyped_storage().nbytes()) if isinstance(tensor, torch.Tensor) else 0


def _most(sizes: Iterable[int]) -> int:
    return max(sizes, default=0)
