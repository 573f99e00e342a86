"""What modules of ``fully_shard`` answer once they are plain ones: training loops go on calling their methods.

Those that say when parameters are gathered and gradients sent say nothing any more, as that is the plan's. Those that
say what is computed would be passed over in silence, so they are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tightship.errors import Unsupported
from tightship.frontends.torch.compat_fully_shard import NO_SYNC

__all__ = ["METHODS", "sends_nothing"]

_SYNC: Final = "_tightship_gradient_sync"


class _Gathered:
    """What ``unshard(async_op=True)`` returns."""

    def wait(self) -> None:
        """Nothing is waited for."""


def _unshard(module: Any, async_op: bool = False) -> _Gathered | None:
    return _Gathered() if async_op else None


def _passed_over(module: Any, *args: Any, **kwargs: Any) -> None:
    return None


def _sync(module: Any, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    for m in module.modules() if recurse else (module,):
        vars(m)[_SYNC] = requires_gradient_sync


def sends_nothing(module: Any) -> str:
    """What a loop said when it told a module that was one of ``fully_shard``'s to send no gradients for now, or an
    empty text."""
    return "" if vars(module).get(_SYNC, True) else NO_SYNC


def _refusing(name: str) -> Callable[..., Any]:
    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        raise Unsupported(
            f"{name} of a model that tightship.fit has taken over from fully_shard",
            "what is computed and sent follows from what the model was when fit was called",
            "leave it out",
        )

    return called


_WHEN: Final = (
    "reshard", "reset_iter_state", "set_is_last_backward", "set_requires_all_reduce",
    "set_reshard_after_forward", "set_reshard_after_backward", "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch", "set_post_optim_event", "set_reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group", "set_unshard_in_backward",
    "set_allocate_memory_from_process_group_for_comm", "set_symm_mem_for_comm",
)  # fmt: skip
_WHAT: Final = (
    "set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook", "set_reduce_scatter_divide_factor",
    "set_gradient_divide_factor", "set_force_sum_reduction_for_comms", "set_reduce_scatter_unused_params",
)  # fmt: skip

METHODS: Final[dict[str, Callable[..., Any]]] = {
    "unshard": _unshard,
    "set_requires_gradient_sync": _sync,
    **{name: _passed_over for name in _WHEN},
    **{name: _refusing(name) for name in _WHAT},
}
