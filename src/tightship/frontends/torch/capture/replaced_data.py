"""Data that a step's code puts in the place of what its caller owns: ``p.data = …`` of a parameter, a buffer or a
constant (a target network's weights).

On stand-ins this is what it is in eager: ops that come after it read the new bytes, and so does what autograd has
saved of the parameter itself. The caller's tensor stays where it lies. When gradients are there, so that nobody reads
what it held before, the new bytes are written into it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from tightship.errors import Unplannable
from tightship.frontends.torch import compat
from tightship.frontends.torch.capture.tape import Tape, TapeValue

__all__ = ["ReplacedData"]


class _Owned(NamedTuple):
    name: str
    fake: torch.Tensor
    storage: Any
    value: TapeValue


class ReplacedData:
    """The stand-ins ``named`` of what the caller owns, each an input of ``tape``, and where they lie."""

    def __init__(self, tape: Tape, mode: Any, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tape, self._mode = tape, mode
        self._owned: list[_Owned] = []
        # Storages of which eager has another after the step, or that it has given.
        self._written: set[int] = set()
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
        self._written = {*homes, *given}
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

    def written(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Takes in what is written behind the backward pass: the caller's value, and what goes there.

        Raises ``Unplannable`` where one tensor goes to several places, which in eager are one from then on.
        """
        rows = [(self._tape.storage(own), self._tape.storage(now)) for own, now in pairs]
        if len({now for _, now in rows}) < len({*rows}):
            raise Unplannable(
                "one tensor in the place of several buffers or parameters",
                "in eager they share bytes from then on, and each would follow what is written to the others",
                "put a copy there (clone())",
            )  # fmt: skip
        self._written |= {own for own, _ in rows}

    def check_handed_back(self, values: Iterable[int]) -> None:
        """Raises ``Unplannable`` where the step hands back, or keeps, a tensor in bytes that it has put in the place
        of others, or in those that were there: what is written there would be seen otherwise than in eager."""
        if any(self._tape.storage(v) in self._written for v in values):
            raise Unplannable(
                "a tensor handed back in the bytes of what the step replaces (p.data = …, a buffer), or puts there,",
                "what is written there would be seen otherwise than in eager", "hand back a copy (clone())",
            )  # fmt: skip


def check_data(name: str, own: TapeValue, data: torch.Tensor) -> None:
    """Raises ``Unplannable`` for data that cannot be written where the caller's tensor lies."""
    if (own.shape, own.dtype) != (tuple(data.shape), data.dtype):
        what = f"{data.dtype} {tuple(data.shape)} in the place of {own.dtype} {tuple(own.shape)}"
    elif any(a != b for n, a, b in zip(own.shape, own.stride, data.stride(), strict=True) if n > 1):
        what = f"with strides {tuple(data.stride())} instead of {own.stride}"
    else:
        return
    raise Unplannable(f"the data of {name!r}, set in a step,", f"they are {what}", "set it before the step")
