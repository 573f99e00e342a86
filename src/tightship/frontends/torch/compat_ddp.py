"""Every touch of DistributedDataParallel's private interfaces: buckets, hooks, options, calls inside of a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch.utils import _pytree as pytree

from tightship.errors import Unsupported

NO_SYNC: Final = "no_sync()"


class _LetGo:
    """In the place of what DistributedDataParallel sends with: it lets forward passes by, and no backward pass. It
    holds the nodes that accumulate gradients as that did, so that hooks on them are found, and not gone at once."""

    def __init__(self, nodes: Sequence[Any] = ()) -> None:
        self._nodes = nodes

    def __reduce__(self) -> tuple[type[_LetGo], tuple[()]]:
        return _LetGo, ()  # autograd's nodes are not copied

    def _nothing(self, *_: Any) -> bool:
        return False

    set_runtime_stats_and_log = prepare_for_forward = prepare_for_backward = _rebuild_buckets = _nothing

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a question of what it is, as ``hasattr`` and ``copy`` ask it
            raise AttributeError(name)
        raise _no_training()


def _no_training() -> Unsupported:
    return Unsupported(
        "a backward pass through a DistributedDataParallel that tightship.fit has taken over",
        "its buckets are no more, so that they take no memory beside the budget",
        "call the step that fit has returned, or put the module into a new DistributedDataParallel",
    )


def _ends_backward(ddp: Any, _: Any, out: Any) -> None:
    """Behind a forward pass outside of a step: gradients that come to what it returns would not be averaged."""

    def refused(_: Any) -> None:
        raise _no_training()

    if torch.is_grad_enabled() and not _inside.a_step:
        for t in pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.requires_grad:
                t.register_hook(refused)


class _Inside:
    """Whether the code of a step runs."""

    a_step = False


_inside = _Inside()


class Buckets(NamedTuple):
    """What a DistributedDataParallel sends gradients in: the bytes of each, and whether gradients lie there."""

    sizes: tuple[int, ...]
    views: bool


def active_buckets() -> Buckets | None:
    """Of the DistributedDataParallel whose forward pass is running; None where there is none."""
    ddp = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
    return None if ddp is None else buckets_of(ddp)


def buckets_of(ddp: Any) -> Buckets:
    """Of a DistributedDataParallel."""
    known = ddp._get_ddp_logging_data()
    sizes = known.get("rebuilt_bucket_sizes") or known["bucket_sizes"]
    return Buckets(tuple(int(x) for x in str(sizes).split(",")), bool(ddp.gradient_as_bucket_view))


@contextmanager
def sending_nothing(model: torch.nn.Module) -> Iterator[None]:
    """Inside, a DistributedDataParallel calls its module and does nothing else."""
    names = ("require_backward_grad_sync", "require_forward_param_sync")
    before = {n: vars(model).get(n) for n in names}
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        vars(model).update(dict.fromkeys(names, False))
    try:
        yield
    finally:
        vars(model).update({n: x for n, x in before.items() if x is not None})


@contextmanager
def modules_in_ddp() -> Iterator[None]:
    """Inside of a step, a DistributedDataParallel calls its module and does nothing else: that of the step's model,
    which the code may have in hand, and others, whose gradients are none of this step's."""
    kind = torch.nn.parallel.DistributedDataParallel
    known, before = kind.forward, _inside.a_step

    def forward(ddp: Any, *args: Any, **kwargs: Any) -> Any:
        buffers_change(ddp)
        return ddp.module(*args, **kwargs)

    kind.forward, _inside.a_step = forward, True  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.forward, _inside.a_step = known, before  # type: ignore[method-assign]


@contextmanager
def none_in_ddp(trained: Collection[int]) -> Iterator[None]:
    """Inside of a step that averages nothing by itself: raises ``Unsupported`` where a DistributedDataParallel is
    called that would average gradients of ``trained`` (ids of parameters). Others call their modules."""
    kind = torch.nn.parallel.DistributedDataParallel
    known = kind.forward

    def forward(ddp: Any, *args: Any, **kwargs: Any) -> Any:
        if any(id(p) in trained for p in ddp.parameters()):
            raise Unsupported(
                "a step that calls the DistributedDataParallel of its model, which fit was not given,",
                "it averages gradients in a backward pass that is not run",
                "give fit the DistributedDataParallel, or the plain model and parallel=tightship.DataParallel()",
            )
        return ddp.module(*args, **kwargs)

    kind.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.forward = known  # type: ignore[method-assign]


def buffers_change(ddp: Any) -> None:
    """Has a DistributedDataParallel send its buffers with the next forward pass, as after a training step of its
    own; evaluation sends them once."""
    ddp.require_forward_param_sync = True


def ddps_of(model: torch.nn.Module) -> list[Any]:
    """The model itself if it is a DistributedDataParallel, and those inside of it."""
    return [m for m in model.modules() if isinstance(m, torch.nn.parallel.DistributedDataParallel)]


def let_go_of_buckets(ddp: Any) -> None:
    """Frees the buckets of a DistributedDataParallel, a copy of its parameters; its forward passes are as before."""
    trained = [p for p in ddp.parameters() if p.requires_grad]
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in trained]
    ddp.reducer = ddp.logger = _LetGo(nodes)
    ddp.join_hook = _no_join
    ddp.register_forward_hook(_ends_backward)


def check_no_join(ddp: Any) -> None:
    """Raises ``Unsupported`` inside of ``Join``."""
    if ddp._join_config.enable:
        _no_join()


def _no_join(**_: Any) -> None:
    raise Unsupported(
        "Join around a DistributedDataParallel that tightship.fit takes over",
        "a rank without batches would have to send what the plan of the others sends",
        "take as many steps on all ranks: those of the rank with the least batches (n = torch.tensor(len(loader)); "
        "dist.all_reduce(n, op=dist.ReduceOp.MIN); for batch in itertools.islice(loader, n.item())), or deal samples "
        "out evenly, as DistributedSampler does, which repeats some",
    )


def sends_no_gradients(ddp: Any) -> bool:
    """Whether the caller is in ``no_sync()`` of a DistributedDataParallel."""
    return not ddp.require_backward_grad_sync


def own_ddp_options(ddp: Any) -> list[str]:
    """What of a DistributedDataParallel changes numbers, beside averaging over the ranks of its group."""
    options = []
    if ddp.mixed_precision is not None:
        options.append("mixed_precision")
    if hook := _refused_hook(ddp):
        options.append(f"the communication hook {hook}")
    if ddp.parameters_to_ignore or ddp._delay_all_reduce_params:
        options.append("parameters that it leaves to others")
    if hasattr(ddp, "buffer_hook"):
        options.append("a buffer hook")
    return options


def type_that_hook_sends(ddp: Any) -> torch.dtype | None:
    """The type that a communication hook averages gradients in, where that is not their own."""
    return _HOOKS.get(_hook_of(ddp))


def _hook_of(ddp: Any) -> str:
    """The name of a DistributedDataParallel's communication hook; those built in stand in its log alone."""
    name: str = ddp._get_ddp_logging_data().get("comm_hook") or ""
    return name.removeprefix("BuiltinCommHookType.")


_HOOKS = {
    "": None, "allreduce_hook": None, "ALLREDUCE": None, "fp16_compress_hook": torch.float16,
    "FP16_COMPRESS": torch.float16, "bf16_compress_hook": torch.bfloat16,
}  # fmt: skip
"""What of torch's hooks averages as DistributedDataParallel does, and in which type, if not their own."""


def _unknown_hook(ddp: Any) -> str:
    """The name of a hook that does something else; empty if there is none."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    name = _hook_of(ddp)
    for hook, group in ddp._comm_hooks:
        own = hook is getattr(default_hooks, name, None)
        if not own or group not in (None, ddp.process_group):
            return name
    return "" if name in _HOOKS else name


def _refused_hook(ddp: Any) -> str:
    """The name of a hook that nobody could call as DistributedDataParallel does, with why; empty if there is none."""
    hook = _unknown_hook(ddp)
    if not hook:
        return ""
    if len(ddp._comm_hooks) != 1:
        return f"{hook}, which is none of Python's"
    if any(ddp._build_params_for_reducer()[1]):
        return f"{hook} and sparse gradients"
    if ddp.skip_all_reduce_unused_params or ddp._use_python_reducer:
        return f"{hook} and buckets that come and go"
    if ddp.static_graph and not _is_rebuilt(ddp) and _forward_passes(ddp):
        return f"{hook} and static_graph after its first step (call fit before that, or after the third)"
    return ""


def _forward_passes(ddp: Any) -> int:
    """How many forward passes have been, of the first ten."""
    ddp.logger.set_runtime_stats_and_log()
    return int(ddp._get_ddp_logging_data()["iteration"])


def _is_rebuilt(ddp: Any) -> bool:
    return bool(ddp._has_rebuilt_buckets)


Future: Final = torch._C.Future
"""What hooks return: those of ``torch.futures``, and those of works."""


class HookOfDdp(NamedTuple):
    """A communication hook that does something else than average, with its state, and the DistributedDataParallel
    in whose buckets it is called."""

    name: str
    hook: Callable[[Any, Any], Any]
    state: Any
    ddp: Any


def hook_to_call(ddp: Any) -> HookOfDdp | None:
    """The hook that gradients of a DistributedDataParallel have to go through; None for those that average."""
    name = _unknown_hook(ddp)
    hook, state = ddp._comm_hooks[0] if name else (None, None)
    return HookOfDdp(name, hook, state, ddp) if hook is not None else None


class BucketOrder(NamedTuple):
    """The buckets of a DistributedDataParallel, as parameters, in the order in which they are sent; in how many
    steps from now on they are made anew, 0 for never, and what makes them, of parameters in the order in which
    their gradients are there."""

    buckets: list[list[torch.Tensor]]
    left: int
    made_anew: Callable[[list[torch.Tensor]], list[list[torch.Tensor]]]


def bucket_order(ddp: Any) -> BucketOrder:
    """To be called by all ranks: buckets that the next forward pass would make anew are, which sends."""
    rebuilt = ddp.reducer._rebuild_buckets() or _is_rebuilt(ddp)
    buckets = [list(b.parameters()) for b in ddp.reducer._get_zeros_like_grad_buckets()]
    changes = ddp.static_graph or not ddp.find_unused_parameters
    left = 0 if rebuilt or not changes else 2 if ddp.static_graph else 1
    config = ddp._bucket_config
    limits = [*config.per_bucket_bytes_caps] or [config.first_bucket_bytes_cap, config.bucket_bytes_cap]

    def made_anew(order: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        small_last = os.environ.get("DDP_SET_LAST_BUCKET_CAP") == "1"
        given = order[::-1] if small_last else order
        rows, _ = torch.distributed._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
            given, limits, [False] * len(given), [*range(len(given))]
        )
        made = [[given[k] for k in row] for row in rows]
        return made[::-1] if small_last else made

    return BucketOrder(buckets, left, made_anew)


def taken_apart(ddp: Any) -> bool:
    """Whether a DistributedDataParallel takes DTensors of tensor parallelism apart around each forward pass."""
    return any(hasattr(p, "_st_info") for p in ddp.module.parameters())
