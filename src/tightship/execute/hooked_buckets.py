"""Gradients that go through a communication hook of DistributedDataParallel, between backward pass and update: the
hook is called once for each bucket, in the order and with the buckets that DistributedDataParallel itself has."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from threading import Event
from time import monotonic
from typing import Any, Final

import torch

from tightship.errors import BadInput, Unsupported
from tightship.execute.held_tensors import bytes_held
from tightship.frontends.torch.collectives import wait_for
from tightship.frontends.torch.compat_ddp import Future, HookOfDdp, bucket_order
from tightship.frontends.torch.grad_bucket import GradBucket
from tightship.process_local import NotCopied

__all__ = ["HookedBuckets"]

_PATIENCE: Final = 1.0
"""Seconds that a bucket's future is waited for before the hook is called for the next one: each takes its bytes until
its future is done, and one that waits for later buckets must not be waited for."""


class HookedBuckets(NotCopied):
    """The buckets of a DistributedDataParallel, which all ranks make these from, and its hook."""

    def __init__(self, given: HookOfDdp, names: Mapping[int, str]) -> None:
        self.name, self._hook, self._state = given.name, given.hook, given.state
        self._lacks = bool(given.ddp.find_unused_parameters or given.ddp.static_graph)
        order = bucket_order(given.ddp)
        self.rows = tuple(tuple(names[id(p)] for p in row) for row in order.buckets)
        self._left, self._made_anew = order.left, order.made_anew
        self._next: list[str] | None = None
        self.kept = 0
        """Bytes that the hook and its state hold from one step to the next."""

    @property
    def asks_order(self) -> bool:
        """Whether `order` has to be told before the next `average`."""
        return self._left == 1

    def order(self, names: Sequence[str]) -> None:
        """The order in which the first rank has had gradients, by which buckets are made after this step. Those that
        none came for stand behind, as in eager."""
        known = [n for row in self.rows for n in row]
        own = [n for n in names if n in {*known}]
        self._next = [*own, *(n for n in known if n not in {*own})]

    def average(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Has the hook change gradients, in place, once they are checked. What it raises is raised."""
        self._run(parameters)
        grads = [p.grad for p in parameters.values() if p.grad is not None]
        self.kept = bytes_held(self._hook, self._state, beside=[*parameters.values(), *grads])
        if self._left == 1:
            assert self._next is not None
            rows = self._made_anew([parameters[n] for n in self._next])
            names = {id(p): n for n, p in parameters.items()}
            self.rows = tuple(tuple(names[id(p)] for p in row) for row in rows)
        self._left = max(0, self._left - 1)

    def check(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Raises ``Unsupported`` where a gradient is not there that eager would wait for."""
        lacking = [n for row in self.rows for n in row if n not in parameters or parameters[n].grad is None]
        if lacking and not self._lacks:
            raise Unsupported(
                f"a step without a gradient of {lacking[0]!r} ({len(lacking)} in all), and the communication hook "
                f"{self.name}",
                "its bucket is sent once all gradients in it are there, which eager would wait for",
                "call DistributedDataParallel with find_unused_parameters=True, or freeze it before",
            )  # fmt: skip

    @torch.no_grad()
    def _run(self, parameters: Mapping[str, torch.Tensor]) -> None:
        sent: deque[tuple[GradBucket, Any]] = deque()
        for k, names in enumerate(self.rows):
            bucket = GradBucket(k, [parameters[n] for n in names], last=k == len(self.rows) - 1)
            future = self._hook(self._state, bucket)
            if not isinstance(future, Future):
                rule = "a communication hook returns a torch.futures.Future"
                raise BadInput(rule, type(future).__name__, self.name)
            sent.append((bucket, future))
            del bucket, future
            while sent and _done(sent[0][1], _PATIENCE):
                self._hand_back(*sent.popleft())
        while sent:
            _done(sent[0][1], None)
            self._hand_back(*sent.popleft())

    def _hand_back(self, bucket: GradBucket, future: Any) -> None:
        bucket.hand_back(future.wait(), self.name)


def _done(future: Any, seconds: float | None) -> bool:
    """Whether a future is done, within so many seconds. Raises ``PeerFailed`` where another rank has failed."""
    if not future.done():
        wait_for(_Work(future, seconds))
    return bool(future.done())


class _Work:
    """A future, as collectives are waited for; complete when it is done, or ``seconds`` have gone by."""

    def __init__(self, future: Any, seconds: float | None) -> None:
        self._done = Event()
        self._end = None if seconds is None else monotonic() + seconds
        future.add_done_callback(lambda _, done=self._done: done.set())

    def is_completed(self) -> bool:
        return self._done.is_set() or (self._end is not None and monotonic() > self._end)

    def wait(self, turn: timedelta | None = None) -> None:
        """Raises ``RuntimeError``, as torch's works do, if it takes longer."""
        rows = [x for x in (None if turn is None else turn.total_seconds(), self._left()) if x is not None]
        self._done.wait(min(rows) if rows else None)
        if turn is not None and not self.is_completed():
            raise RuntimeError("not done yet")

    def _left(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - monotonic())
