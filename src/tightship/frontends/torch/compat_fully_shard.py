"""Every touch of ``fully_shard``'s private interfaces (FSDP2): what it has sharded and was told, and taking it back.

A part of ``compat``, under the same rule as `compat_distributed`.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch

from tightship.frontends.torch.compat_distributed import Layout, is_distributed, own_part, world_size

__all__ = [
    "REPLICAS", "FullySharded", "forward_methods", "fully_shard_casts", "fully_shard_options", "fully_sharded",
    "left_out", "left_to_their_caller", "sends_no_gradients", "sharding_stand_ins", "undo_fully_shard",
]  # fmt: skip


class FullySharded(NamedTuple):
    """A parameter that ``fully_shard`` has sharded: this rank's part, filled up to the size of the largest."""

    parameter: Any  # a DTensor
    gathered: torch.Size  # of what is gathered
    among: tuple[str, int, int, str | None, int]
    within: Layout | None  # of which what is gathered is a part, by tensor parallelism
    part: torch.Tensor
    places: tuple[tuple[torch.nn.Module, str], ...]
    dtype: torch.dtype | None  # that it is gathered in, where that is another one
    reduced: (
        torch.dtype | None
    )  # that its gradient is averaged in, where that is another one than it comes in
    stays: bool  # gathered from the forward to the backward pass
    outermost: bool  # of the model itself: gathered while any of its modules runs


def _fully_shard_states(model: torch.nn.Module) -> list[tuple[tuple[torch.nn.Module, ...], Any]]:
    """Of each call of ``fully_shard``: the modules that it was given, and what it keeps of them."""
    rows: dict[int, tuple[list[torch.nn.Module], Any]] = {}
    for module in model.modules():
        if _is_sharded(module):  # wrappers have the attributes of what is inside
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            rows.setdefault(id(state), ([], state))[0].append(module)
    return [(tuple(modules), state) for modules, state in rows.values()]


def _is_own(comm: Any) -> bool:
    return type(comm).__module__.startswith("torch.")


def fully_shard_options(model: torch.nn.Module) -> list[str]:
    """What of ``fully_shard`` changes numbers or places of a model's parameters, beside dividing their rows."""
    options: dict[str, None] = {}
    sizes: set[int] = set()
    for _, state in _fully_shard_states(model):
        for group in state._fsdp_param_groups:
            offloads = type(group.offload_policy).__name__ != "OffloadPolicy"
            if offloads and group.device.type != "cpu":  # where they are anyway
                options["offload_policy"] = None
            if group.gradient_divide_factor is not None:
                options["set_gradient_divide_factor"] = None
            if group._all_reduce_hook is not None:
                options["set_all_reduce_hook"] = None
            if group.reduce_scatter_unused_params:
                options["set_reduce_scatter_unused_params"] = None
            if not _is_own(group._all_gather_comm):
                options["set_custom_all_gather"] = None
            if not _is_own(group._reduce_scatter_comm):
                options["set_custom_reduce_scatter"] = None
            for one in group.fsdp_params:
                if one.fsdp_placement.dim != 0:
                    options[f"placements {tuple(one.sharded_param.placements)}"] = None
                elif one.mesh_info.shard_mesh_dim is None:
                    options[REPLICAS] = None
                elif one.mesh_info.is_spmd_mesh:
                    options["dp_mesh_dims"] = None
                sizes.add(one.sharded_param.device_mesh.size())
    if sizes and max(sizes) != world_size():
        options[f"a mesh of {max(sizes)} of {world_size()} ranks"] = None
    return list(options)


REPLICAS: Final = "a mesh that has nothing but replicas"

NO_SYNC: Final = "set_requires_gradient_sync(False)"


def sends_no_gradients(model: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` was told to send none (``NO_SYNC``)."""
    groups = [g for _, state in _fully_shard_states(model) for g in state._fsdp_param_groups]
    return any(not (g.reduce_grads and g.all_reduce_grads) for g in groups)


def left_to_their_caller(module: torch.nn.Module, *, traced: bool = True) -> Iterator[torch.nn.Module]:
    """The largest modules of torch's own classes in ``module`` whose caller's graph breaks at hooks of
    ``fully_shard``: Dynamo compiles none of them unless they are compiled by themselves. ``traced``: whether the code
    that calls ``module`` is traced."""
    forward = type(module).forward
    if forward is torch.nn.Module.forward or not forward.__module__.startswith("torch."):
        inside = True  # a list of modules, or code of the caller's
    else:
        broken = any(_is_sharded(m) for m in module.modules() if m is not module)
        if not broken and (_is_sharded(module) or not traced):
            yield module
            return
        inside = not broken
    for child in module.children():
        yield from left_to_their_caller(child, traced=inside)


def _is_sharded(module: torch.nn.Module) -> bool:
    return hasattr(type(module), "_get_fsdp_state")


def left_out(model: torch.nn.Module) -> list[str]:
    """Names of parameters that are trained, or are DTensors, and that ``fully_shard`` has not sharded."""
    states = _fully_shard_states(model)
    for modules, _ in states:  # where code has called unshard(), whole ones are in their places
        modules[0].reshard()  # type: ignore[operator]
    done = {id(p.sharded_param) for _, s in states for g in s._fsdp_param_groups for p in g.fsdp_params}
    return [
        n
        for n, p in model.named_parameters()
        if id(p) not in done and (p.requires_grad or is_distributed(type(p.data)))
    ]


def fully_sharded(model: torch.nn.Module) -> list[FullySharded]:
    """The parameters that ``fully_shard`` has sharded, none of which is gathered afterwards."""
    rows = []
    for modules, state in _fully_shard_states(model):
        modules[0].reshard()  # type: ignore[operator]
        root = model in modules and state._auto_reshard_after_forward  # known when it has run
        for group, one in ((g, p) for g in state._fsdp_param_groups for p in g.fsdp_params):
            info = one._module_info
            places = [(info.module, info.param_name)]
            places += zip(info.shared_modules, info.shared_param_names, strict=True)
            part = one._sharded_param_data.detach().view(one.padded_sharded_param_size)
            one.init_dtype_attrs(one.mp_policy)  # as its first forward pass does
            among, spec = _division(one.mesh_info), one._unsharded_dtensor_spec
            within = spec and Layout(spec.mesh, spec.placements, spec.shape, spec.stride, one._orig_size)
            rows.append(
                FullySharded(
                    one.sharded_param, one._orig_size, among, within, part, tuple(places), one.param_dtype,
                    one.reduce_dtype, bool(root) or group.post_forward_mesh_info is None, model in modules,
                )
            )  # fmt: skip
    return rows


@contextmanager
def sharding_stand_ins(model: torch.nn.Module) -> Iterator[None]:
    """Inside, ``fully_shard`` gathers the parameters that the model has now; afterwards all is as it was before."""
    kept: dict[int, tuple[Any, dict[str, Any]]] = {}
    groups = []
    for _, state in _fully_shard_states(model):
        groups += state._fsdp_param_groups
        for x in (state, state._state_ctx, state._comm_ctx):
            kept[id(x)] = x, _shallow(vars(x))
    for x in (x for group in groups for x in (group, *group.fsdp_params)):
        kept[id(x)] = x, _shallow(vars(x))
    try:
        for group in groups:
            for one in group.fsdp_params:
                info = one._module_info
                one.sharded_param = getattr(info.module, info.param_name)
                part = own_part(one.sharded_param.detach())
                one._sharded_param_data = part.as_strided((one.padded_sharded_param_size.numel(),), (1,))
            group._reset_sharded_params = True
        yield
    finally:
        for x, before in kept.values():
            vars(x).clear()
            vars(x).update(before)


def _shallow(attributes: dict[str, Any]) -> dict[str, Any]:
    return {k: copy.copy(x) if isinstance(x, (list, dict, set)) else x for k, x in attributes.items()}


def _division(info: Any) -> tuple[str, int, int, str | None, int]:
    """The group that has a parameter's parts, this rank among them, how many; the group with the same part, and of
    how many ranks."""
    replicas = info.mesh.size(info.replicate_mesh_dim) if info.replicate_mesh_dim is not None else 1
    copies = info.replicate_process_group.group_name if replicas > 1 else None
    return info.shard_process_group.group_name, info.shard_mesh_rank, info.shard_mesh_size, copies, replicas


def fully_shard_casts(
    model: torch.nn.Module,
) -> list[tuple[torch.nn.Module, torch.dtype | None, torch.dtype | None]]:
    """Modules whose floating-point inputs and outputs ``fully_shard`` casts, and to what."""
    rows = []
    for modules, state in _fully_shard_states(model):
        policy = state._mp_policy
        given = policy.param_dtype if policy.cast_forward_inputs else None
        if given is not None or policy.output_dtype is not None:
            rows += [(module, given, policy.output_dtype) for module in modules]
    return rows


def forward_methods(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """Methods that ``fully_shard`` was told of, beside ``forward`` (``register_fsdp_forward_method``)."""
    found = []
    for modules, state in _fully_shard_states(model):
        own = sys.modules[type(state).__module__].__package__
        for module in modules:
            for name, x in vars(module).items():
                made = isinstance(x, types.MethodType) and hasattr(x.__func__, "__wrapped__")
                if made and str(x.__func__.__globals__.get("__name__")).startswith(f"{own}."):
                    found.append((module, name))
    return found


def undo_fully_shard(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Takes the hooks and the class of ``fully_shard`` from a model whose parameters have been replaced; the modules
    that had them."""
    from torch.distributed._composable.contract import STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping

    undone = []
    for module, name in forward_methods(model):
        vars(module)[name] = vars(module)[name].__func__.__wrapped__
    for modules, state in _fully_shard_states(model):
        for group in state._fsdp_param_groups:
            handles = [
                *group._module_to_pre_save_state_dict_hook_handle.values(),
                *group._module_to_pre_load_state_dict_hook_handle.values(),
                *(one._post_load_hook_handle for one in group.fsdp_params),
            ]
            for handle in handles:
                handle.remove()
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        for module in modules:
            kind = type(module)
            kept = vars(module)[STATE_KEY]  # groups of processes, which are in no copy of a model
            for api in [a for a, s in kept.items() if s is state]:
                del kept[api]
            _module_state_mapping.pop(module, None)
            module.__class__ = kind.__mro__[kind._orig_cls_mro_index]  # type: ignore[attr-defined]
            undone.append(module)
    for module in model.modules():
        for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            vars(module).pop(name, None)
    return undone
