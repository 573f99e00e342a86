"""Code of a step that looks at what other ranks take part in: behind a collective, at what follows from parameters in
parts, and where steps write buffers that rank 0 sends first. All ranks look there together, since what is looked at
needs what all of them send.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tightship.execute.ranks import Ranks
from tightship.frontends.torch import compat

__all__ = ["Looking"]


class _Row(NamedTuple):
    """What a rank says: whether it ``follows`` a plan, or captures its step; a ``digest`` of what is sent for what it
    looks at; and how many collectives the step has ``sent`` by now."""

    follows: bool
    digest: str
    sent: int


class Looking:
    """``synchronize`` makes buffers those of rank 0; None where nobody sends them. Its argument says whether the code
    has looked at something before, which it has found with this rank's."""

    writes = False
    """Whether some step of a rank has written buffers."""

    def __init__(self, ranks: Ranks, synchronize: Callable[[bool], None] | None) -> None:
        self._ranks, self._synchronize = ranks, synchronize
        self._sends_buffers = self.synchronized = self._looked = False

    def begin(self, *, buffers: bool) -> None:
        """The code of a step is about to run; ``buffers``: those that are sent go before it."""
        self._sends_buffers = buffers and self._synchronize is not None
        self.synchronized = self._looked = False

    def together(self, *, behind: bool, written: bool) -> bool:
        """Whether all ranks have to look; ``behind`` a collective, ``written``: buffers, before."""
        together = behind or (self._sends_buffers and (written or self.writes))
        self._looked = self._looked or not together
        return together

    @contextmanager
    def computing(self, place: str, sent: Sequence[str], *, behind: bool, written: bool) -> Iterator[None]:
        """Inside, a rank that captures a step computes what its code looks at, for which ``sent`` is sent. Raises
        ``PeerFailed`` where others need something else."""
        if not self.together(behind=behind, written=written):
            yield
            return
        own = _Row(False, hashlib.sha256("\n".join(sent).encode()).hexdigest()[:12], 0)
        told = self._told(place, own)
        while any(row.follows for row in told):  # these capture it then, too
            told = self._told(place, own)
        if len(set(told)) > 1:
            texts = [f"looks at what needs other collectives ({row.digest})" for row in told]
            raise self._ranks.differ(_at(place), texts)
        self._send_buffers()
        with self.sending():
            yield

    def follows(self, place: str, digest: str, sent: int, put_back: Callable[[], None]) -> bool:
        """Whether all ranks run their planned steps up to what they look at; ``digest``: of what these send for that,
        ``sent``: how many collectives they have by now. Otherwise all compute it. Where they have sent more on some
        ranks, ``put_back`` is called, and all begin anew."""
        told = self._told(place, _Row(True, digest, sent))
        if not all(row.follows for row in told) or len({row.digest for row in told}) > 1:
            return False
        if len({row.sent for row in told}) > 1:
            put_back()
        self._send_buffers()
        return True

    @contextmanager
    def sending(self) -> Iterator[None]:
        with self._ranks.sending(writing=False):
            yield

    def _told(self, place: str, own: _Row) -> list[_Row]:
        return [_Row(*row) for row in self._ranks.told(_at(place), own)]

    def _send_buffers(self) -> None:
        if not self._sends_buffers or self.synchronized:
            return
        assert self._synchronize is not None
        with self.sending(), compat.without_modes():
            self._synchronize(self._looked)
        self.synchronized = True


def _at(place: str) -> str:
    return (
        f"looking at what other ranks take part in at {place} (have all ranks look there, or hand it back as a "
        "result and look at it behind the step)"
    )
