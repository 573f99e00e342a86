"""Collectives as ops of a step: how they run so that every byte they need is asked for on the thread of the step.

gloo copies what it gathers and scatters inside of its own threads and lets go of the copies late, where no plan sees
them. Its all-reduce and broadcast work in place. So a gather is a broadcast of each part into its place, and a
reduce-scatter an all-reduce of a copy, of which the own part is kept: what gloo itself does, with the same bits. What
is handed to gloo does not own its bytes: its threads may let go of it whenever they like. Each message costs its
latency, so those that are ready together go as one, in one row (`messages`), as DistributedDataParallel's buckets do.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import distributed as dist

from tightship.errors import Unsupported
from tightship.frontends.torch import compat, compat_distributed

__all__ = [
    "Collective", "Division", "Figures", "average_now", "broadcast", "collective", "figures", "finish",
    "gathered", "messages", "no_split", "no_stream", "reduced", "running", "scattered_means", "sending",
    "sends", "sends_parts", "share", "summed", "unsent", "wait_for", "waiting",
]  # fmt: skip

Waiting = Callable[[Any], None]
"""Waits for a work of torch.distributed."""

_KNOWN: Final = {
    "all_gather_into_tensor": "gather",
    "all_gather_into_tensor_out": "gather",
    "all_gather_into_tensor_coalesced": "gather",
    "reduce_scatter_tensor": "reduce",
    "reduce_scatter_tensor_coalesced": "reduce",
    "all_reduce": "reduce",
    "all_reduce_": "reduce",
    "all_reduce_coalesced": "reduce",
    "all_reduce_coalesced_": "reduce",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "all_to_all_single": "exchange",
}
_OPS: Final = {"sum": "SUM", "avg": "AVG", "product": "PRODUCT", "min": "MIN", "max": "MAX"}


class Figures:
    """What sending costs: seconds for a message of no bytes, and for each byte. Measured by all ranks together."""

    latency: float = 1e-3
    per_byte: float = 1e-9


figures = Figures()


class _State:
    wait: Waiting = staticmethod(lambda work: work.wait())
    sends: bool = True


_state = _State()


@contextmanager
def sending(wait: Waiting) -> Iterator[None]:
    """Inside, ``wait`` waits for what is sent."""
    before, _state.wait = _state.wait, wait
    try:
        yield
    finally:
        _state.wait = before


def waiting(wait: Waiting) -> None:
    """From here on ``wait`` waits for what is sent outside of `sending`."""
    _state.wait = wait


def wait_for(work: Any) -> None:
    """Waits for a work, or what has its methods, as for what is sent."""
    _state.wait(work)


@contextmanager
def unsent() -> Iterator[None]:
    """Inside, collectives ask for their memory and send nothing; what their results hold means nothing."""
    before, _state.sends = _state.sends, False
    try:
        yield
    finally:
        _state.sends = before


def running(tensors: Sequence[Any], send: Callable[[Any], Any], group: Any) -> None:
    """Sends each of the tensors, changed in place, by ``send(alias)``, which returns a work, and waits for all."""
    Sent(tensors, send, group).result()


class Sent:
    """What is being sent among the ranks of ``group``: each of the tensors, changed in place, by ``send(alias)``,
    which returns a work."""

    def __init__(self, tensors: Sequence[Any], send: Callable[[Any], Any], group: Any) -> None:
        self.group: str = group.group_name
        self._held = [*tensors]  # is written to until all works have ended, whatever becomes of the step
        sent = (send(_alias(t)) for t in tensors) if _state.sends else ()
        _in_flight.add(self)
        self._works = [work for work in sent if work is not None]

    def result(self) -> None:
        """Waits for all."""
        for work in self._works:
            _state.wait(work)
        _in_flight.discard(self)
        self._held, self._works = [], []


_in_flight: set[Sent] = set()
"""What has not been waited for to its end."""


def finish() -> None:
    """Waits for all that has been begun."""
    for one in [*_in_flight]:
        one.result()


def _alias(tensor: Any) -> Any:
    """The bytes of a dense tensor in one row, which it does not own."""
    if tensor.device.type != "cpu":
        return tensor
    count = tensor.numel()
    if not count:
        return tensor.new_empty(0)
    raw = (ctypes.c_char * (count * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(raw, dtype=torch.uint8).view(tensor.dtype)


@functools.cache
def collective(fn: Any) -> Collective:
    """What runs in the place of a functional collective. Raises ``Unsupported`` for one that is not known."""
    return Collective(fn)


class Collective:
    """Runs a functional collective ``fn``, complete when it returns; ``kind``: gather, reduce, broadcast or so."""

    def __init__(self, fn: Any) -> None:
        self.fn, self.namespace = fn, fn.namespace
        self.name = fn._schema.name.partition("::")[2]
        kind = _KNOWN.get(self.name)
        if kind is None or fn.namespace != "_c10d_functional":
            raise Unsupported(
                f"the collective {fn} inside of a step", "how it runs with planned memory is not known",
                "use those of torch.distributed._functional_collectives (all_reduce, all_gather_single, "
                "reduce_scatter_single, broadcast), or call it outside of the step",
            )  # fmt: skip
        self.kind = kind

    @property
    def repeatable(self) -> bool:
        """Whether it may run again, if all ranks do it: it changes nothing, and gives the same each time."""
        return self.kind == "gather" and not self.name.endswith("_out")

    def __str__(self) -> str:
        return f"collective {self.fn}"

    __repr__ = __str__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return getattr(self, "_" + self.name.removesuffix("_"))(*args, **kwargs)

    def begun(self, *args: Any) -> tuple[Any, Sent]:
        """The result before it is there, and what waits until it is. Raises ``Unsupported`` for other ops than the
        gather of one tensor."""
        if self.name != "all_gather_into_tensor":
            raise Unsupported(
                f"{self} beside other ops", "only gathers of one tensor are begun ahead", "wait for it"
            )
        with torch.no_grad():
            x, size, group = args
            out = self._gathered_into(x, size)
            return out, self._sent_parts(self._own_part_in(out, x, size, group), group)

    # --- each of them ---

    def _all_gather_into_tensor(self, x: Any, size: int, group: Any) -> Any:
        return self._all_gather_into_tensor_out(x, size, group, out=self._gathered_into(x, size))

    @staticmethod
    def _gathered_into(x: Any, size: int) -> Any:
        return x.new_empty((x.shape[0] * size if x.dim() else size, *x.shape[1:]))

    def _all_gather_into_tensor_out(self, x: Any, size: int, group: Any, *, out: Any) -> Any:
        self._sent_parts(self._own_part_in(out, x, size, group), group).result()
        return out

    @staticmethod
    def _own_part_in(out: Any, x: Any, size: int, group: Any) -> Sequence[Any]:
        parts, own = out.chunk(size), dist.get_rank(resolved(group))
        parts[own].copy_(x.view(parts[own].shape) if x.is_contiguous() else x.reshape(parts[own].shape))
        return parts  # type: ignore[no-any-return]

    @staticmethod
    def _sent_parts(parts: Sequence[Any], group: Any) -> Sent:
        """Each rank's part, in place, as that rank has it."""
        group = resolved(group)
        ranks = iter(dist.get_process_group_ranks(group))
        return Sent(parts, lambda t: dist.broadcast(t, next(ranks), group=group, async_op=True), group)

    def _all_gather_into_tensor_coalesced(self, xs: Sequence[Any], size: int, group: Any) -> list[Any]:
        outs = [x.new_empty((x.shape[0] * size if x.dim() else size, *x.shape[1:])) for x in xs]
        counts = [x.numel() for x in xs]
        row = xs[0].new_empty(size * sum(counts))
        parts = row.chunk(size)
        torch.cat([x.reshape(-1) for x in xs], out=parts[dist.get_rank(resolved(group))])
        self._sent_parts(parts, group).result()
        for out, part in zip(outs, row.view(size, -1).split(counts, 1), strict=True):
            out.view(size, -1).copy_(part)
        return outs

    def _reduce_scatter_tensor(self, x: Any, op: str, size: int, group: Any) -> Any:
        whole = x.clone(memory_format=torch.contiguous_format)
        self._reduced(whole, op, group)
        return whole.chunk(size)[dist.get_rank(resolved(group))].clone()

    def _reduce_scatter_tensor_coalesced(
        self, xs: Sequence[Any], op: str, size: int, group: Any
    ) -> list[Any]:
        row, own = torch.cat([x.reshape(-1) for x in xs]), dist.get_rank(resolved(group))
        self._reduced(row, op, group)
        parts = row.split([x.numel() for x in xs])
        return [part.view(x.shape).chunk(size)[own].clone() for x, part in zip(xs, parts, strict=True)]

    def _all_reduce(self, x: Any, op: str, group: Any) -> Any:
        out = x if self.name.endswith("_") else x.clone(memory_format=torch.contiguous_format)
        if compat.is_dense(out):
            self._reduced(out, op, group)
        else:
            row = out.contiguous()
            self._reduced(row, op, group)
            out.copy_(row)
        return out

    def _all_reduce_coalesced(self, xs: Sequence[Any], op: str, group: Any) -> list[Any]:
        row = torch.cat([x.reshape(-1) for x in xs])
        self._reduced(row, op, group)
        outs = list(xs) if self.name.endswith("_") else [torch.empty_like(x) for x in xs]
        for out, part in zip(outs, row.split([x.numel() for x in xs]), strict=True):
            out.copy_(part.view(out.shape))
        return outs

    def _broadcast(self, x: Any, source: int, group: Any) -> Any:
        out = x if self.name.endswith("_") else x.clone(memory_format=torch.contiguous_format)
        row = out if compat.is_dense(out) else out.contiguous()
        group = resolved(group)
        running([row], lambda t: dist.broadcast(t, group_src=source, group=group, async_op=True), group)
        return out if row is out else out.copy_(row)

    def _all_to_all_single(self, x: Any, outs: Sequence[int], ins: Sequence[int], group: Any) -> Any:
        group, row = resolved(group), x.contiguous()
        out = x.new_empty((sum(outs), *x.shape[1:]))
        width = out[:1].numel() if sum(outs) else 1
        given, taken = ([n * width for n in sizes] for sizes in (ins, outs))
        running(
            [out],
            lambda t: dist.all_to_all_single(t, _alias(row), taken, given, group=group, async_op=True),
            group,
        )
        return out

    def _reduced(self, row: Any, op: str, group: Any) -> None:
        group, how = resolved(group), reduction(op)
        running([row], lambda t: dist.all_reduce(t, how, group=group, async_op=True), group)

    # --- what planning asks ---

    def describe(self, args: Sequence[Any], metadata: Callable[[Any], Any], among: object) -> str:
        """What all ranks of its group must agree on: what it is, ``among`` whom, with how many bytes. ``metadata``
        is called with each argument that stands for a tensor."""
        rest = [metadata(a) for a in args[:-1]]
        return f"{self.name}{rest} among {among}"

    def group(self, args: Sequence[Any]) -> tuple[int, ...]:
        """The ranks that take part."""
        return tuple(dist.get_process_group_ranks(resolved(args[-1])))

    def seconds(self, args: Sequence[Any], nbytes: int) -> float:
        """What sending takes for arguments of so many bytes."""
        return figures.latency + figures.per_byte * nbytes * (
            len(self.group(args)) if self.kind == "gather" else 2
        )


def sends(program: Any) -> bool:
    """Whether a program is one of several ranks that send."""
    return any(isinstance(call.fn, Collective) for call in program.calls)


def sends_parts(program: Any) -> bool:
    """Whether ranks have parts of parameters: gradients of whole ones are reduced behind the forward pass."""
    rows = zip(program.graph.ops, program.calls, strict=True)
    sent = ((op, call.fn) for op, call in rows if isinstance(call.fn, Collective))
    return any(op.phase == "forward" or fn.kind != "reduce" for op, fn in sent)


def no_split() -> Unsupported:
    """The error for ops in slices on several ranks."""
    return Unsupported(
        "splitting ops on several ranks", "one rank plans for all, and what was split is not told",
        "leave split out of allow",
    )  # fmt: skip


def no_stream() -> Unsupported:
    """The error for what streams where ranks have parts."""
    return Unsupported(
        "streaming where ranks have parts of parameters", "what gathers them reads them in memory",
        "leave stream out of allow, or give DataParallel(shard=False)",
    )  # fmt: skip


def resolved(group: Any) -> Any:
    """The process group that the argument of a collective names."""
    return compat_distributed.process_group(group) if isinstance(group, str) else group


def reduction(name: str) -> Any:
    """Raises ``Unsupported`` for a reduction that is not known."""
    known = _OPS.get(name.lower())
    if known is None:
        raise Unsupported(
            f"the reduction {name!r} inside of a step", "it is not known", "use sum, avg, min or max"
        )
    return getattr(dist.ReduceOp, known)


_LARGEST = 25 << 20
"""Bytes of a message at most, unless one tensor has more: those of DistributedDataParallel's buckets."""


def messages(sizes: Sequence[tuple[Any, int]], most: int | None = None) -> list[list[int]]:
    """Which of tensors, given as what sets them apart (type, device) and bytes, go as one message: neighbors of one
    kind with ``most`` bytes together, or one tensor of more. Without ``most`` it is an eighth of all bytes, at least
    the largest tensor's, at most 25 MiB: a message and the tensors in it take twice its bytes."""
    if most is None:
        largest = max((size for _, size in sizes), default=0)
        most = min(_LARGEST, max(largest, sum(size for _, size in sizes) // 8))
    rows: list[list[int]] = []
    open_: dict[Any, tuple[list[int], int]] = {}
    for k, (kind, size) in enumerate(sizes):
        row, filled = open_.get(kind, ([], most + 1))
        if filled + size > most:
            row, filled = [], 0
            rows.append(row)
        row.append(k)
        open_[kind] = row, filled + size
    return rows


def share(gradient: torch.Tensor, among: Division, *, own: bool) -> torch.Tensor:
    """This rank's part of the mean of a gradient, as DistributedDataParallel computes it: each rank's part first,
    then the sum. In place if its bytes are the gradient's ``own`` and lie without gaps; not if it is sent in another
    type, as the hooks do it that compress gradients."""
    if among.dtype not in (None, gradient.dtype):
        return gradient.to(among.dtype).div_(among.size)
    factor = 1.0 / among.size
    return gradient.mul_(factor) if own and compat.is_dense(gradient) else gradient.mul(factor)


class Division(NamedTuple):
    """Among whom tensors are divided: by name, the ``group`` of which each rank has one of ``size`` parts, this one
    part ``rank``; and the group of the ranks that have this part, too, if there are several."""

    group: str
    rank: int
    size: int
    copies: str | None = None
    replicas: int = 1
    dtype: torch.dtype | None = None
    """That gradients are sent in; None: their own."""

    @staticmethod
    def of(group: Any = None, dtype: torch.dtype | None = None) -> Division:
        """Among the ranks of a process group; None: all."""
        group = dist.group.WORLD if group is None else group
        return Division(group.group_name, dist.get_rank(group), dist.get_world_size(group), dtype=dtype)


def reduced(parts: Sequence[torch.Tensor], group: str | None = None) -> list[torch.Tensor]:
    """The sums of tensors over all ranks, or those of a group, in place and by one message."""
    ops, name = torch.ops._c10d_functional, group or dist.group.WORLD.group_name
    if len(parts) == 1:
        return [_waited(ops.all_reduce_, parts[0], "sum", name)]
    made: list[torch.Tensor] = _waited(ops.all_reduce_coalesced_, list(parts), "sum", name)
    return made


def _waited(packet: Any, given: Any, *how: Any) -> Any:
    """What a functional collective makes, as an op of a step that is captured, otherwise at once."""
    first = given[0] if isinstance(given, list) else given
    if not compat.is_fake(first) and not compat.in_dispatch_mode():
        return collective(packet.default)(given, *how)
    made = packet(given, *how)
    wait = torch.ops._c10d_functional.wait_tensor
    return [wait(t) for t in made] if isinstance(made, (list, tuple)) else wait(made)


def average_now(gradients: Sequence[torch.Tensor], among: Division) -> None:
    """Their means over ranks, in place, by one message, at once and outside of a captured step."""
    with torch.no_grad():
        parts = [share(g, among, own=True) for g in gradients]
        means = reduced(parts, among.group) if parts else ()
        for g, part, mean in zip(gradients, parts, means, strict=True):
            if part is not g:
                g.copy_(mean)


def summed(tensor: torch.Tensor, group: str | None = None) -> torch.Tensor:
    """In place and over all ranks, or those of a group."""
    return reduced([tensor], group)[0]


def broadcast(tensor: torch.Tensor, among: Division) -> None:
    """At once: the contents of the first rank's."""
    collective(torch.ops._c10d_functional.broadcast_.default)(tensor, 0, among.group)


def gathered(parts: Sequence[torch.Tensor], among: Division) -> list[torch.Tensor]:
    """Of each tensor the parts of all ranks, one after the other along the first dimension; by one message."""
    ops, name, size = torch.ops._c10d_functional, among.group, among.size
    given = [part.contiguous() for part in parts]
    if len(given) == 1:
        return [_waited(ops.all_gather_into_tensor, given[0], size, name)]
    made: list[torch.Tensor] = _waited(ops.all_gather_into_tensor_coalesced, given, size, name)
    return made


def scattered_means(
    gradients: Sequence[torch.Tensor], rows: Sequence[int], among: Division
) -> list[torch.Tensor]:
    """This rank's ``rows`` of the mean of each gradient over all ranks, filled up with zeros at its end; by one
    message, and one more where several ranks have the same rows."""
    made = _scattered(gradients, rows, among)
    return made if among.copies is None else reduced(made, among.copies)


def _scattered(gradients: Sequence[torch.Tensor], rows: Sequence[int], among: Division) -> list[torch.Tensor]:
    ops, name, size = torch.ops._c10d_functional, among.group, among.size
    given = []
    for gradient, own in zip(gradients, rows, strict=True):
        mean = gradient.mul(1.0 / (size * among.replicas)).contiguous()
        if mean.shape[0] != own * size:
            mean = torch.cat([mean, mean.new_zeros((own * size - mean.shape[0], *mean.shape[1:]))])
        given.append(mean)
    if len(given) == 1:
        return [_waited(ops.reduce_scatter_tensor, given[0], "sum", size, name)]
    made: list[torch.Tensor] = _waited(ops.reduce_scatter_tensor_coalesced, given, "sum", size, name)
    return made
