"""Every touch of private interfaces where torch's own collectives wait outside of graphs: the backward pass, the
forward passes of DistributedDataParallel and of ``fully_shard``, and collectives of the caller's own. An error in
them may be that another rank has ended.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.eval_frame import skip_code

from tightship.frontends.torch.compat_distributed import is_of_connection

__all__ = ["watch_waits"]

Lost = Callable[[RuntimeError], BaseException | None]


class _Watched:
    """Who is asked what to raise in the place of an error; None until it is needed."""

    lost: Lost | None = None


def watch_waits(lost: Lost) -> None:
    """From now on what ``lost`` returns, unless it is None, is raised in the place of errors of connections."""
    if _Watched.lost is None:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        ddp = torch.nn.parallel.DistributedDataParallel
        engine = _told(torch.autograd.graph._engine_run_backward)
        torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward = engine
        for owner, name in (
            (ddp, "_pre_forward"),
            (ddp, "_post_forward"),
            (FSDPParamGroup, "pre_forward"),
            (FSDPParamGroup, "post_forward"),
        ):
            setattr(owner, name, _told(getattr(owner, name)))
        work: Any = torch.distributed.Work
        work.wait = _told(work.wait, but_with_arguments=True)
    _Watched.lost = lost


def _told(call: Callable[..., Any], but_with_arguments: bool = False) -> Any:
    """``but_with_arguments``: a wait with a limit of its own is its caller's, who may wait again."""

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            lost = None if but_with_arguments and (args[1:] or kwargs) else _Watched.lost
            found = lost(error) if lost is not None and is_of_connection(error) else None
            if found is None:
                raise
            raise found from error

    watching: Any = run
    skip_code(watching.__code__)  # Dynamo leaves it out, and compiles what it calls
    return watching
