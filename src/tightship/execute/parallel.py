"""Independent ops on several threads, all values in one arena that is right for any order, or for steps.

The placement has to hold for every order the dependencies allow (``planners.lifetimes.in_any_order``): which ops run
at the same time is decided while they run. With steps, the ops of one step run at the same time, and a step begins
when the one before it has ended: then the placement has to hold for these (``lifetimes.in_steps``). An op's results
are made on the heap and moved to their places, so what is shown here is that places are right, not how fast they
can be reached.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from tightship.analysis.concurrency import touching
from tightship.analysis.order import predecessors, successors
from tightship.errors import BadInput
from tightship.frontends.torch import compat
from tightship.frontends.torch.program import Program, derive, flat, substitute
from tightship.process_local import NotCopied

__all__ = ["ParallelExecutor"]

_POISON = 0xA5


class ParallelExecutor(NotCopied):
    """Runs ``program`` on ``threads`` threads; storage s lies at ``offsets[s]`` of an arena of ``arena`` bytes.

    Storages of the caller have no offset. With ``poison`` the bytes of a storage are overwritten when its last
    user has ended, so that a place which is not right shows. ``steps``: the step of each op
    (``concurrency.waves``). Raises ``BadInput`` for a storage without a place, and for steps that are not legal.
    """

    def __init__(
        self,
        program: Program,
        offsets: dict[int, int],
        arena: int,
        *,
        threads: int = 2,
        poison: bool = False,
        steps: Sequence[int] | None = None,
    ) -> None:
        if threads < 1:
            raise BadInput("no thread to run ops: give at least one thread", threads, "threads")
        graph = program.graph
        for s, storage in enumerate(graph.storages):
            if s in graph.static or not storage.size:
                continue
            if not 0 <= offsets.get(s, -1) <= arena - storage.size:
                rule = f"offset {offsets.get(s)} is not a place within the arena of {arena} bytes"
                raise BadInput(rule, place=storage.name)
        self.program, self.offsets, self.threads, self.poison = program, offsets, threads, poison
        self.bytes = torch.zeros(arena, dtype=torch.uint8)
        self.waits = predecessors(graph)
        self.after = successors(self.waits)
        self.users = [bits.bit_count() for bits in touching(graph)]
        self.steps = tuple(steps) if steps is not None else (0,) * len(graph.ops)
        late = steps is not None and any(
            self.steps[w] >= self.steps[k] for k, row in enumerate(self.waits) for w in row
        )
        if late or len(self.steps) != len(graph.ops):
            rule = "an op before one it waits for: its step comes after those of all it waits for"
            raise BadInput(rule, place="steps")

    def run(self, inputs: Sequence[Any], seed: int | None = None) -> list[Any]:
        """The tensors of ``program.results``, copied out of the arena. ``seed``: of the choice among ops that are
        ready; without one, the first in the graph's order."""
        if len(inputs) != len(self.program.slots):
            count = len(self.program.slots)
            rule = f"{len(inputs)} inputs for {count} slots: give an input for each slot"
            raise BadInput(rule, place="ParallelExecutor.run")
        return _Run(self, inputs, None if seed is None else random.Random(seed)).result()


class _Run:
    """One run: what is ready, what is there, and how many users each storage still has."""

    def __init__(self, executor: ParallelExecutor, inputs: Sequence[Any], rng: random.Random | None) -> None:
        self.executor, self.program, self.rng = executor, executor.program, rng
        graph = self.graph = self.program.graph
        self.held: dict[int, Any] = {}
        for slot, tensor in reversed(list(zip(self.program.slots, inputs, strict=True))):
            self.held[graph.values[slot.value].storage] = tensor  # of several the first is the base
        self.users = list(executor.users)
        self.waiting = [len(w) for w in executor.waits]
        self.ready = [k for k, n in enumerate(self.waiting) if not n]
        self.left = len(graph.ops)
        self.in_step = Counter(executor.steps)
        self.step = min(executor.steps, default=0)

    def result(self) -> list[Any]:
        """Threads only call ops; what is next, and what is over, is decided here."""
        count = self.executor.threads
        running: dict[Future[None], int] = {}
        with ThreadPoolExecutor(count) as pool:
            while self.left:
                while len(running) < count and (ready := self.of_step()):
                    k = min(ready) if self.rng is None else self.rng.choice(ready)
                    self.ready.remove(k)
                    running[pool.submit(self.call, k)] = k
                for ended in wait(running, return_when=FIRST_COMPLETED).done:
                    ended.result()
                    self.ended(running.pop(ended))
        with compat.plain_execution():
            return [self.read(v).clone() for v in self.program.results]

    def of_step(self) -> list[int]:
        """Ops that are ready and whose step it is."""
        steps = self.executor.steps
        return [k for k in self.ready if steps[k] == self.step]

    def ended(self, k: int) -> None:
        uses = self.graph.uses
        for s in {*uses.reads[k], *uses.defines[k], *uses.mutates[k]}:
            self.users[s] -= 1
            if not self.users[s] and s not in self.graph.static | self.graph.kept:
                self.dead(s)
        for a in self.executor.after[k]:
            self.waiting[a] -= 1
            if not self.waiting[a]:
                self.ready.append(a)
        self.left -= 1
        self.in_step[self.executor.steps[k]] -= 1
        while self.left and not self.in_step[self.step]:
            self.step += 1

    def dead(self, s: int) -> None:
        size = self.graph.storages[s].size
        self.held.pop(s, None)
        if self.executor.poison and size:
            start = self.executor.offsets[s]
            self.executor.bytes[start : start + size] = _POISON

    def call(self, k: int) -> None:
        call = self.program.calls[k]
        defined = set(self.graph.uses.defines[k])
        with compat.plain_execution():
            out = call.fn(*substitute(call.args, self.read), **substitute(call.kwargs, self.read))
            for v, tensor in zip(call.results, flat(out), strict=True):
                s = self.graph.values[v].storage if v >= 0 else -1
                if s in defined and v == self.program.bases[s]:
                    self.held[s] = self.moved(s, tensor)

    def moved(self, s: int, tensor: Any) -> Any:
        """The same tensor in its place of the arena."""
        source = tensor.untyped_storage()
        count = source.nbytes()
        if not count or not self.graph.storages[s].size:
            return tensor
        start = self.executor.offsets[s]
        raw = torch.empty(0, dtype=torch.uint8).set_(source, 0, (count,), (1,))
        self.executor.bytes[start : start + count].copy_(raw)
        offset = start // tensor.element_size() + tensor.storage_offset()
        there = torch.empty(0, dtype=tensor.dtype)
        return there.set_(self.executor.bytes.untyped_storage(), offset, tensor.shape, tensor.stride())

    def read(self, v: int) -> Any:
        value = self.graph.values[v]
        tensor = self.held[value.storage]
        base = self.graph.values[self.program.bases[value.storage]]
        return tensor if tensor is None else derive(tensor, base, value)
