"""The memory of a loop as it runs in eager, from what lives when: bytes at every op, the peak and who makes it up.

An op needs what lives before it, and what its kernel asks of the allocator while it runs: its results and, for a
while, temporaries of its own. These are known from running the kernel once on tensors made for it; where that is not
wanted, an op needs its results alone, and is counted as one whose temporaries are not known.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Final

import torch

from tightship.baselines.torch_allocator import CachingAllocator, OutOfMemory
from tightship.baselines.torch_allocator_settings import Settings
from tightship.execute import allocator
from tightship.execute.bench import sample_tensor
from tightship.execute.cache import DEFAULT, Cache, Measurement, folder_of, machine
from tightship.frontends.torch import compat, compat_distributed, compat_ops
from tightship.frontends.torch.capture.eager_loop import EagerLoop
from tightship.frontends.torch.capture.life_tape import Kind
from tightship.frontends.torch.capture.sparse import SparseCall
from tightship.frontends.torch.capture.tape import Record
from tightship.frontends.torch.optimizer.copy import random_untouched
from tightship.frontends.torch.program import Ref, refs_in, substitute
from tightship.graph import Value, aligned, alignment_of

__all__ = ["Emulated", "Kernels", "Peak", "Timeline"]

LARGEST: Final = 1 << 30
"""Bytes of arguments and results above which a kernel is not run for its temporaries."""

_REFUSES: Final = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)


@dataclass(frozen=True)
class Emulated:
    """In the place of a function: an op of compiled code, that holds ``most`` bytes at once, results among them, if
    that is ``known``."""

    most: int = 0
    known: bool = True


class Kernels:
    """What kernels ask of the allocator while they run, each kind of call run once; kept on disk for the next time.

    ``unknown`` counts the ops, by name, whose temporaries are not known.
    """

    def __init__(self, loop: EagerLoop, *, run: bool) -> None:
        self._tape, self._run = loop.tape, run and allocator.available("cpu")
        self._kept = Cache(folder_of(DEFAULT), machine(True)) if self._run else None
        self._known: dict[str, int] = {}
        self.unknown: Counter[str] = Counter()

    def most(self, r: Record, results: int, in_place: bool = False) -> int:
        """The most bytes that a call holds at once beyond those from before it; ``results``: those of its results.
        ``in_place``: a sum of gradients, as autograd adds them."""
        if in_place:
            return results
        if isinstance(r.fn, Emulated):
            if not r.fn.known:
                self.unknown[r.target] += 1
            return max(r.fn.most, results)
        runs = r.device == "cpu" and (hasattr(r.fn, "_schema") or isinstance(r.fn, SparseCall))
        if compat_distributed.is_collective(r.fn):  # gloo copies, and lets go of the copies when it likes
            runs = False
        if not self._run or self._kept is None or not runs:
            if self._may_ask(r):
                self.unknown[r.target] += 1
            return results
        key = self._key(r)
        if key not in self._known:
            found = self._kept.get(key)
            if found is None:
                measured = self._measured(r)
                found = None if measured is None else Measurement(0.0, measured)
                if found is not None:
                    self._kept.put(key, found)
            self._known[key] = -1 if found is None else found.workspace
        most = self._known[key]
        if most < 0:
            self.unknown[r.target] += 1
        return max(most, results)

    def save(self) -> None:
        if self._kept is not None:
            self._kept.save()

    def _may_ask(self, r: Record) -> bool:
        if isinstance(r.fn, SparseCall):
            return True
        return hasattr(r.fn, "tags") and torch.Tag.pointwise not in r.fn.tags

    def _key(self, r: Record) -> str:
        threads = torch.get_num_threads()
        if isinstance(r.fn, SparseCall):
            return hashlib.sha256(f"{r.fn.key}{threads}".encode()).hexdigest()[:32]
        values = list(dict.fromkeys(refs_in((r.args, r.kwargs))))
        number = {v: f"%{n}" for n, v in enumerate(values)}
        rows = []
        for v in values:
            x = self._tape.values[v]
            rows.append((str(x.dtype), x.shape, x.stride, x.offset * x.dtype.itemsize % 64))
        given = substitute((r.args, r.kwargs), number.__getitem__)
        samples = [(n, _contents(t)) for n, t in r.samples.items()]
        grad = isinstance(r.fn, compat_ops.WithGradMode)
        text = repr(("eager, workers too", r.target, given, rows, samples, grad, threads))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _measured(self, r: Record) -> int | None:
        """The most bytes at once; None for a call too large to make, or that does not run on made tensors."""
        if isinstance(r.fn, SparseCall):
            with compat.without_modes(), compat.plain_execution(), random_untouched():
                return _asked_by(r.fn.prepare)
        values = list(dict.fromkeys(refs_in((r.args, r.kwargs))))
        homes = {self._tape.storage(v) for v in (*values, *(v for v in r.results if v >= 0))}
        if sum(self._tape.storages[s].nbytes for s in homes) > LARGEST:
            return None
        for ones in (False, True):
            try:
                with compat.without_modes(), compat.plain_execution(), random_untouched():
                    return self._once(r, values, ones)
            except _REFUSES:
                continue
        return None

    def _once(self, r: Record, values: Sequence[int], ones: bool) -> int:
        made = {}
        for n, v in enumerate(values):
            x = self._tape.values[v]
            value = Value("", 0, str(x.dtype).removeprefix("torch."), x.shape, x.stride, x.offset)
            made[v] = sample_tensor(value, "cpu", r.samples.get(n), ones=ones)
        args, kwargs = (substitute(tree, made.__getitem__) for tree in (r.args, r.kwargs))
        return _asked_by(lambda: partial(compat_ops.direct(r.fn), *args, **kwargs))


def _asked_by(prepare: Callable[[], Callable[[], Any]]) -> int:
    prepare()()  # kernels have a first time
    call = prepare()
    with allocator.record("cpu") as recording:
        results = call()
    steps = [e.nbytes if e.kind == "alloc" else -e.nbytes for e in recording.events]
    del results
    return max(0, *accumulate(steps)) + recording.beside if steps else recording.beside


def _contents(tensor: torch.Tensor) -> Any:
    if tensor.dtype in (torch.bool, torch.uint8):
        return int(tensor.count_nonzero())
    return hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).hexdigest()


@dataclass(slots=True)
class Moment:
    """An op, by number (-1: none of the loop's), and the storages that begin to live with it and that end behind it;
    ``before`` is the one of ``ended`` whose bytes its result takes over, -1 for none."""

    op: int
    step: int
    made: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    before: int = -1


@dataclass(frozen=True)
class Peak:
    """The first moment with the most bytes: in all, inside of the op that runs then, and the storages that there are
    beside it."""

    nbytes: int
    inside: int
    op: int
    step: int
    live: tuple[int, ...]


class Timeline:
    """Bytes from op to op of a loop that has run. ``sizes`` are those of storages, as the allocator has them."""

    def __init__(self, loop: EagerLoop, kernels: Kernels, alignment: int = 0) -> None:
        tape = loop.tape
        self.lives, self.records = tape.lives, tape.records
        self.sizes = [aligned(s.nbytes, alignment or alignment_of(s.device)) for s in tape.storages]
        self._tape, self._kernels = tape, kernels
        self.flops = 0  # of the last step
        self.moments = self._moments()
        self.phases: dict[str, int] = {}

    def there(self) -> list[int]:
        """The storages that there are before the loop."""
        return [s for s, life in enumerate(self.lives) if life.made < 0]

    def requests(self) -> tuple[tuple[int, int], ...]:
        """What is asked of an allocator, in order: a storage with its bytes, or -1 where it ends."""
        nbytes = [s.nbytes for s in self._tape.storages]
        rows = [(s, nbytes[s]) for s in self.there()]
        rows += [
            (s, nbytes[s] if kind is Kind.ALLOC else -1)
            for kind, s in self._tape.events
            if kind in (Kind.ALLOC, Kind.FREE)
        ]
        return tuple(rows)

    def peak(self) -> Peak:
        level = sum(self.sizes[s] for s in self.there())
        most, at, inside_most, step = level, -1, 0, 0
        for k, m in enumerate(self.moments):
            level -= self.sizes[m.before] if m.before >= 0 else 0
            made = sum(self.sizes[s] for s in m.made)
            inside = made if m.op < 0 else self._kernels.most(self.records[m.op], made, m.before >= 0)
            if level + inside > most:
                most, at, inside_most = level + inside, k, inside
            if m.op >= 0:
                self.flops = self.records[m.op].flops + (self.flops if m.step == step else 0)
                step = m.step
                phase = self.records[m.op].phase
                self.phases[phase] = max(self.phases.get(phase, 0), level + inside)
            level += made - sum(self.sizes[s] for s in m.ended if s != m.before)
        self._kernels.save()
        live = set(self.there())
        for m in self.moments[: max(at, 0)]:
            live.update(m.made)
            live.difference_update(m.ended)
        if at < 0:
            return Peak(most, 0, -1, 0, tuple(sorted(live)))
        moment = self.moments[at]
        live.discard(moment.before)
        return Peak(most, inside_most, moment.op, moment.step, tuple(sorted(live)))

    def _moments(self) -> list[Moment]:
        moments, step = [Moment(-1, 0)], 0
        behind = False  # whether something has ended since the last op
        for kind, n in self._tape.events:
            if kind is Kind.STEP:
                step = n
            elif kind is Kind.OP:
                moments.append(Moment(n, step))
                behind = False
            elif kind is Kind.FREE:
                moments[-1].ended.append(n)
                behind = True
            else:
                if behind or moments[-1].op < 0:
                    moments.append(Moment(-1, step))
                    behind = False
                moments[-1].made.append(n)
        for m in moments:
            if m.op in self._tape.between_nodes:
                m.before = self._taken_over(m)
        return moments

    def _taken_over(self, m: Moment) -> int:
        """The storage of the one of two gradients, the first if both do, that autograd alone held: it adds the other
        in place, but for a dispatch mode that looks on (accumulate in torch/csrc/autograd/input_buffer.cpp). A view,
        as the gradient of a linear layer's weight is, has a base that holds the storage, too."""
        r = self.records[m.op]
        if r.target != "aten.add.Tensor" or len(m.made) != 1:
            return -1
        for ref in r.args[:2]:
            x = self._tape.values[ref.value] if type(ref) is Ref else None
            if x is None or x.storage not in m.ended or ref.value in self._tape.between_nodes[m.op]:
                continue
            whole = math.prod(x.shape) * x.dtype.itemsize == self._tape.storages[x.storage].nbytes
            if whole and self.sizes[x.storage] == self.sizes[m.made[0]]:
                return x.storage
        return -1


def reserved(
    requests: Sequence[tuple[int, int]], capacity: int | None = None, settings: Settings | None = None
) -> int | None:
    """The most that PyTorch's caching allocator takes of a GPU for `Timeline.requests`; None where it runs out of
    ``capacity``, all that is cached given back."""
    caching, at = CachingAllocator(settings or Settings(), capacity), dict[int, int]()
    try:
        for storage, nbytes in requests:
            if nbytes < 0:
                if storage in at:
                    caching.free(at.pop(storage))
            elif nbytes and storage not in at:
                at[storage] = caching.alloc(nbytes)
    except OutOfMemory:
        return None
    return caching.peak
