"""Every touch of private interfaces where torch.distributed.checkpoint saves from a thread, while steps send.

Of two threads that send over one group of gloo, either takes the other's messages for its own: in eager, too,
training hangs then, or its process is aborted.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import distributed as dist

__all__ = ["save_over_own_group"]


class _Own:
    """The group that saving has, and the default one that it stands for."""

    group: Any = None
    of: Any = None


def save_over_own_group() -> None:
    """From now on ``async_save`` over the default group has one of its own, which all ranks make at the first."""
    from torch.distributed.checkpoint import state_dict_saver as saver

    for kind in (saver._ThreadBasedAsyncCheckpointExecutor, saver._ProcessBasedAsyncCheckpointExecutor):
        executor: Any = kind
        if not hasattr(executor.execute_save, "__wrapped__"):
            executor.execute_save = _apart(executor.execute_save)


def _apart(save: Any) -> Any:
    @functools.wraps(save)
    def execute_save(*args: Any, process_group: Any = None, no_dist: bool = False, **kwargs: Any) -> Any:
        world = dist.group.WORLD if dist.is_initialized() else None
        if process_group in (None, world) and world is not None and not no_dist and dist.get_world_size() > 1:
            if _Own.of is not world:
                _Own.group, _Own.of = torch.distributed.new_group(backend="gloo"), world
            process_group = _Own.group
        return save(*args, process_group=process_group, no_dist=no_dist, **kwargs)

    return execute_save
