"""What ranks tell one another of a compiled step: one of those with the same ops decides, and all compile the same.

Collectives are ops of the compiled graph, in an order that follows from what was decided and how Inductor schedules.
Each rank says in which order its code sends, before it runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from tightship.execute.cache import Partition, Unplanned
from tightship.execute.ranks import Ranks, Told, told_of
from tightship.files import from_json, to_json
from tightship.frontends.torch.capture.flat import NoFormula
from tightship.frontends.torch.program import Program

__all__ = [
    "Decision",
    "apart",
    "check_apart",
    "check_resolved",
    "decision",
    "read_decision",
    "told_of_compiled",
]


class Decision(msgspec.Struct, frozen=True):
    """Within how many bytes a step is compiled (None: any), what Inductor's own takes, and what was chosen."""

    limit: int | None
    unplanned: Unplanned
    chosen: Partition


def decision(limit: int | None, unplanned: Unplanned, chosen: Partition) -> str:
    """As other ranks are told of it."""
    return to_json(Decision(limit, unplanned, chosen)).decode()


def read_decision(text: str) -> Decision:
    """What `decision` has made."""
    return from_json(text.encode(), Decision)


_APART: Final = "apart"


def apart(no: NoFormula) -> str:
    """In the place of a decision: the update cannot be compiled."""
    return _APART + json.dumps([no.what, no.why])


def check_apart(texts: Sequence[str]) -> None:
    """Raises the ``NoFormula`` that a rank had."""
    for text in texts:
        if text.startswith(_APART):
            raise NoFormula(*json.loads(text.removeprefix(_APART)))


def check_resolved(ranks: Ranks, told: Sequence[Any], *, resolved: bool) -> None:
    """Raises ``PeerFailed`` where a percentage would be of another step on each rank."""
    rows = [Told.of(row) for row in told]
    if not resolved and len({row.ops for row in rows}) > 1:
        place = "a budget in percent of other first steps (give bytes, or begin with batches of one shape)"
        raise ranks.differ(place, [f"a step of {row.ops[:8]}" for row in rows])


def told_of_compiled(captured: Program, sends: Sequence[int]) -> Told:
    """What a rank says of its step when it is compiled, which ``sends`` the program's collectives in that order."""
    digest = hashlib.sha256(repr(tuple(sends)).encode()).hexdigest()[:32]
    return told_of(captured)._replace(plan=(len(sends), digest))
