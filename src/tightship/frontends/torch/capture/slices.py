"""What computes a value: the part of a tape that a question to its data has to run."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tightship.errors import Unplannable
from tightship.frontends.torch.capture.forms import zeros_like
from tightship.frontends.torch.capture.known_truths import Reader, name_of
from tightship.frontends.torch.capture.tape import Origin, Record, Tape
from tightship.frontends.torch.collectives import Collective
from tightship.frontends.torch.program import Ref, substitute

__all__ = ["READS_DATA", "Slices", "unsupported"]

READS_DATA = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
"""Ops that hand the contents of a tensor to Python."""

_INSTEAD = {
    "aten::_local_scalar_dense": "keep the value in a tensor (torch.where, no .item()), or hand it back as a result",
    "aten::nonzero": "use a mask and torch.where, so that the shape does not depend on the data",
    "aten::masked_select": "multiply by the mask instead of selecting",
    "aten::index": "multiply by the mask (or torch.where) instead of selecting by it",
}

_DRAWS = {
    "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "uniform_", "normal_",
    "normal", "random_", "bernoulli", "bernoulli_", "exponential_", "native_dropout",
}  # fmt: skip
"""Random ops that take as many numbers of the CPU's generator whatever their arguments hold."""


@dataclass(frozen=True)
class Slices:
    """Of a tape that grows."""

    tape: Tape
    reader: Reader

    def of(
        self, wanted: Sequence[int], fn: Any, origin: Origin, *, trained: bool = False, sent: bool = False
    ) -> tuple[list[Record], list[tuple[int, str, Any]], list[int]]:
        """The records that compute ``wanted``, the caller's slots they start from, and those slots whose contents
        they do not read, as all of them are filled before. ``trained``: parameters may be among these slots, and
        with ``sent`` collectives among the records."""
        tape, touching = self.tape, self.reader.look().touching
        needed_storages: set[int] = set()
        begun: set[int] = set()  # storages that are read as they were before all records
        needed: list[int] = []
        later: list[int] = []  # records to look at, the last first
        known: set[int] = set()

        def need(storages: set[int], before: int) -> None:
            needed_storages.update(storages)
            for s in storages - begun:
                rows = touching.get(s, ())
                for k in reversed(rows[: bisect_left(rows, before)]):
                    if k in known:
                        break
                    known.add(k)
                    heapq.heappush(later, -k)
                    if self._fills(tape.records[k]) == s:
                        break
                else:
                    begun.add(s)

        need({tape.storage(v) for v in wanted}, len(tape.records))
        while later:
            k = -heapq.heappop(later)
            r = tape.records[k]
            effect = r.effect and not (sent and isinstance(r.fn, Collective))
            if effect or (r.random and not self._repeatable(r)):
                raise _made_by(r, fn, origin)
            needed.append(k)
            need({tape.storage(v) for v in r.reads} - {self._fills(r)}, k)
        sources, filled = list[tuple[int, str, Any]](), list[int]()
        for v, role, key in tape.slots_of(needed_storages):
            if tape.storage(v) not in begun:
                filled.append(v)
                continue
            if (role in ("parameter", "state") and not trained) or v not in tape.real:
                raise unsupported(fn, origin, f"its data comes from {role} {key}")
            sources.append((v, role, key))
        return self._with_draws(needed[::-1], fn, origin), sources, filled

    def _fills(self, r: Record) -> int:
        """The caller's storage of which a record sets every byte, whatever it held; -1 for all others."""
        target, number = (*r.args, None, None)[:2]
        if name_of(r) not in ("fill_", "zero_") or type(target) is not Ref or type(number) is Ref:
            return -1
        value = self.tape.values[target.value]
        storage, nbytes = self.tape.storages[value.storage], math.prod(value.shape) * value.dtype.itemsize
        return value.storage if storage.role and nbytes == storage.nbytes else -1

    def _repeatable(self, r: Record) -> bool:
        """Whether the record's random numbers can be drawn before the step, by a state that is put back."""
        return r.device == "cpu" and self._has_data and name_of(r) in _DRAWS

    def _with_draws(self, needed: Sequence[int], fn: Any, origin: Origin) -> list[Record]:
        """These records of the tape; what draws random numbers before one of them that does so draws them, too."""
        records, chosen = self.tape.records, set(needed)
        last = max((k for k in needed if records[k].random), default=-1)
        if last < 0:
            return [records[k] for k in needed]
        rows = []
        for k, r in enumerate(records[: needed[-1] + 1] if needed else ()):
            if k in chosen:
                rows.append(r)
            elif r.random and k < last:
                if not self._repeatable(r):
                    raise _made_by(r, fn, origin)
                rows.append(self._draw(r))
        return rows

    def _draw(self, r: Record) -> Record:
        """A record that draws as ``r`` does, and makes nothing."""
        values = self.tape.values

        def draw() -> tuple[()]:
            def blank(v: int) -> torch.Tensor:
                return zeros_like(values[v])

            r.fn(*substitute(r.args, blank), **substitute(r.kwargs, blank))
            return ()

        return Record(draw, r.target, (), {}, random=True)

    @property
    def _has_data(self) -> bool:
        """Whether the step is captured to be run on what it was captured of."""
        real = self.tape.real
        return any(v in real for v, role, _ in self.tape.slots if role != "constant")


def _made_by(r: Record, fn: Any, origin: Origin) -> Unplannable:
    why = f"its data comes from {r.target} at {r.origin}"
    return unsupported(fn, origin, why, random=r.random)


def unsupported(fn: Any, origin: Origin, why: str, *, random: bool = False) -> Unplannable:
    """The error for an op that needs data, with what to do instead."""
    instead = _INSTEAD.get(fn._schema.name, "use an op whose result and shape do not depend on the data")
    if random and fn._schema.name in READS_DATA:
        instead = "draw by torch.rand or Python's random on the CPU, or decide with torch.where"
    where = f" at {origin}" if str(origin) else ""
    return Unplannable(f"{fn}{where}", f"the ops of a step must not depend on data ({why})", instead)
