"""Data that a step's code puts in the place of what its caller owns: ``p.data = …`` of a parameter, a buffer or a
constant (a target network's weights).

On stand-ins this is what it is in eager: ops that come after it read the new bytes, and so does what autograd has
saved of the parameter itself. The caller's tensor stays where it lies. When gradients are there, so that nobody reads
what it held before, the new bytes are written into it. What was there is then somebody else's, if anybody holds it:
`execute.replaced` sees to that, by what `ReplacedData.apart` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tightship.errors import Unplannable
from tightship.frontends.torch import compat
from tightship.frontends.torch.capture.tape import Tape, TapeValue
from tightship.frontends.torch.program import Apart, Slot

__all__ = ["ReplacedData"]


class _Owned(NamedTuple):
    name: str
    fake: torch.Tensor
    storage: Any
    value: TapeValue


Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class _Row:
    """What lies ``now`` in the place of the slot that has the storage ``own`` to itself, as `Apart` has it."""

    stand_in: torch.Tensor
    own: int
    now: TapeValue
    role: str = ""
    key: Any = None
    writes: bool = True
    changes: bool = False


class ReplacedData:
    """The stand-ins ``named`` of what the caller owns, each an input of ``tape``, and where they lie."""

    def __init__(self, tape: Tape, mode: Any, named: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        self._tape, self._mode = tape, mode
        self._owned: list[_Owned] = []
        self._rows: list[_Row] = []
        for name, fake in named:
            self.own(name, fake)

    def own(self, name: str, fake: torch.Tensor) -> None:
        if compat.is_plain_fake(fake, self._mode):
            value = self._tape.values[self._tape.value(fake, name)]
            self._owned.append(_Owned(name, fake, fake.untyped_storage(), value))

    def restored(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Those whose data are others now, as they lay before, and what is to be written there: from here on the
        stand-ins lie where they lay.

        Raises ``Unplannable`` where in eager they would share bytes from then on.
        """
        rows = [one for one in self._owned if compat.storage_key(one.fake) != int(one.storage._cdata)]
        homes = {one.value.storage: one.name for one in rows}
        pairs = []
        with compat.without_modes(), torch.no_grad():
            for one in rows:
                v, now = one.value, compat.another(one.fake)
                check_data(one.name, v, now)
                device = compat.device_of_fake(one.fake)
                home = compat.blank_like(
                    self._mode, v.shape, v.stride, v.offset, v.dtype, device, one.storage
                )
                one.fake.data = home
                pairs.append((home, now))
        given = [self._tape.storage(self._tape.value(now)) for _, now in pairs]
        self._check_apart(homes, given)
        return pairs

    def _check_apart(self, homes: Mapping[int, str], given: list[int]) -> None:
        slots = self._tape.storages
        count = Counter(given)
        for (home, name), s in zip(homes.items(), given, strict=True):
            other = slots[s].name if slots[s].role and s not in homes else ""
            if count[s] > 1 or other or len(self._tape.slots_of({home})) > 1:
                with_ = f" with {other!r}" if other else ""
                raise Unplannable(
                    f"the data of {name!r}, set in a step,", f"they would share bytes{with_} from then on",
                    "set a copy (clone()), or write with .data.copy_(…)",
                )  # fmt: skip

    def taken(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Takes in what goes in the place of what, ``pairs`` of the caller's own stand-in and another, when gradients
        are there and nothing is written yet. Returns those that are to be written there.

        A buffer whose bytes the step also writes, or that others share, is not written: who holds these bytes would
        see otherwise than in eager what was written, and when. So it is with one that becomes a tensor of the batch,
        whose bytes the next batch may be written to. All buffers are handed back then.

        Raises ``Unplannable`` where one tensor goes to several places, which in eager are one from then on.
        """
        tape, changed = self._tape, {s for r in self._tape.records for s in (*r.writes, *r.updates)}
        rows = [
            _Row(own, tape.values[tape.value(own)].storage, tape.values[tape.value(now)])
            for own, now in pairs
        ]
        if len({r.now.storage for r in rows}) < len({(r.own, r.now.storage) for r in rows}):
            raise Unplannable(
                "one tensor in the place of several buffers or parameters",
                "in eager they share bytes from then on, and each would follow what is written to the others",
                "put a copy there (clone())",
            )  # fmt: skip
        rows = [r for r in rows if r.own != r.now.storage]
        for r in rows:
            (_, r.role, r.key), *others = tape.slots_of({r.own})
            of_batch = tape.storages[r.now.storage].role == "input"
            r.changes = r.own in changed or bool(others) or of_batch
        handed = any(r.changes and r.role == "buffer" for r in rows)
        for r in rows:
            r.writes = not (handed and r.role == "buffer")
        self._rows = rows
        left = {id(r.stand_in) for r in rows if not r.writes}
        return [(own, now) for own, now in pairs if id(own) not in left]

    def extra(self) -> list[int]:
        """Values to be handed back behind all results: what goes in the place of what is not written."""
        return [self._tape.intern(r.now) for r in self._rows if not r.writes]

    def apart(self, results: Sequence[int], slots: Sequence[Slot]) -> tuple[Apart, ...]:
        """For the program that hands back the values ``results``, `extra` among them.

        Raises ``Unplannable`` for a result in bytes that the step writes in two ways, which would be seen otherwise
        than in eager."""
        homes = [self._tape.storage(v) for v in results]
        number = {(s.role, s.key): k for k, s in enumerate(slots)}
        found = []
        for r in self._rows:
            before = tuple(k for k, s in enumerate(homes) if s == r.own)
            if before and r.changes and r.writes:
                raise Unplannable(
                    "a tensor handed back in bytes that a step writes, and then sets to others (p.data = …),",
                    "what is written there would be seen otherwise than in eager", "hand back a copy (clone())",
                )  # fmt: skip
            now = homes.index(r.now.storage) if r.now.storage in homes else -1
            found.append(
                Apart(number[r.role, r.key], before if r.writes else (), now, r.now, r.writes, r.changes)
            )
        return tuple(found)


def check_data(name: str, own: TapeValue, data: torch.Tensor) -> None:
    """Raises ``Unplannable`` for data that cannot be written where the caller's tensor lies."""
    if (own.shape, own.dtype) != (tuple(data.shape), data.dtype):
        what = f"{data.dtype} {tuple(data.shape)} in the place of {own.dtype} {tuple(own.shape)}"
    elif any(a != b for n, a, b in zip(own.shape, own.stride, data.stride(), strict=True) if n > 1):
        what = f"with strides {tuple(data.stride())} instead of {own.stride}"
    else:
        return
    raise Unplannable(f"the data of {name!r}, set in a step,", f"they are {what}", "set it before the step")
