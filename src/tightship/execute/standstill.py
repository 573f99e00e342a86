"""Ranks that wait for one another at different places: one in a step, another in a collective of the caller's own.

A rank that has had fewer batches, and goes to a barrier, never comes to the step in which the others wait for it, and
they never come to the barrier. Nobody fails there, so a thread of each process looks, when asked, where the caller's
code stands: in a collective of torch.distributed, of which group, and how many of it there were; or where a group is
made. If who asks, in a step, has not begun as many of that group, or has not made it, neither can go on.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Final, NamedTuple

from tightship.execute.roll_call import RollCall
from tightship.frontends.torch import compat_distributed
from tightship.frontends.torch.collectives import Sent

__all__ = ["GATHER", "STEPS", "Lookout", "Standing", "call_in", "place_of", "standing"]

GATHER: Final = "a gather of parameters outside of a step"
"""What a rank waits in that evaluates parameters in parts."""

_POLL: Final = 0.4
"""Seconds between two looks."""
_PATIENCE: Final = 0.8
"""Seconds that a rank waits for others until it asks where they are."""
_STANDS: Final = 1.0
"""Seconds in one call after which a rank is taken to stand there; three times as many if its group is not known."""


class Standing(NamedTuple):
    """Where a rank stands: ``call``, which ``place`` in the caller's code makes; the name of the group, and how many
    collectives of it this rank has begun."""

    call: str
    place: str
    group: str
    begun: int
    known: bool
    """Whether the group is that of the call, or taken to be the default one."""
    inner: Any
    """Which call it is."""
    size: int = 0
    """Bytes of the tensors that the call has, at most."""
    makes: Sequence[int] | None = None
    """The ranks that it makes the group of, where it does."""

    @property
    def in_fit(self) -> bool:
        """Whether it waits for others to call fit; ``begun`` counts how often they have."""
        return self.group == _FIT


class Lookout:
    """Of one process, beside a control group. ``store`` and ``key`` are the same on all ranks."""

    def __init__(self, store: Any, key: str, rank: int, size: int) -> None:
        self._store, self._key, self._rank, self._size = store, f"{key}/look", rank, size
        self._looks_in = compat_distributed.other_connection(store)
        limit = compat_distributed.seconds_of_timeout()
        self.roll_call = RollCall(store, self._looks_in, key, rank, size, limit)
        self._ended, self._asks, self._stood = threading.Event(), False, False
        self._followed = threading.get_ident()
        self.meetings = 0  # how often all ranks have called fit
        self.broken = False  # whether ranks have gone apart, as this one knows
        self._thread = threading.Thread(target=self._look, name="tightship-lookout", daemon=True)
        self._thread.start()

    def follow(self) -> None:
        """This thread is the one that calls steps."""
        self._followed = threading.get_ident()

    def end(self) -> None:
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2)

    # --- the rank that waits in a step ---

    def asked(self, seconds: float, where: str = "a step") -> dict[int, str]:
        """To be called now and then by a rank that has waited for so many ``seconds`` in a step, or so: the ranks
        that stand where they wait for this one, and in what. Raises ``RuntimeError`` where the store is gone."""
        if seconds < _PATIENCE:
            return {}
        self._asks = True
        if not self._store.check([f"{self._key}/asked"]):
            self._store.set(f"{self._key}/asked", b"1")
        if not self._store.check([f"{self._key}/any"]):
            return {}
        found = {}
        for r in range(self._size):
            if r == self._rank or not self._store.check([f"{self._key}/{r}"]):
                continue
            told = Standing(*json.loads(self._store.get(f"{self._key}/{r}")))
            if not self._has_come(told):
                rule = STEPS if told.makes is None else _GROUPS
                found[r] = (
                    f"waits in {told.call} ({told.place}), to which rank {self._rank}, in {where}, does not come: "
                    f"{rule}"
                )
        return found

    def _has_come(self, told: Standing) -> bool:
        """Whether this rank has begun what another one stands in."""
        if told.makes is not None:
            return self._rank not in told.makes or compat_distributed.is_group(told.group)
        begun = compat_distributed.collectives_begun
        mine = self.meetings if told.in_fit else begun(told.group)
        return mine is None or mine >= told.begun

    def heard(self) -> None:
        """To be called when the others have come, if they were asked for. Raises ``RuntimeError`` as `asked`."""
        if self._asks:
            self._asks = False
            self._store.delete_key(f"{self._key}/asked")

    def leave(self) -> None:
        """To be called by a rank that ends, as others do not come: what it has sent to them is still there."""
        self.broken = True
        self._store.set(f"{self._key}/left", b"1")

    # --- the rank that is looked at ---

    @property
    def left(self) -> bool:
        """Whether others have left while this rank stood elsewhere, so that they are not to be met any more, or this
        rank has been told already that they have gone apart."""
        try:
            return self.broken or (self._stood and bool(self._store.check([f"{self._key}/left"])))
        except RuntimeError:  # the store is gone, as will be found
            return False

    def _look(self) -> None:
        """Ends with the store or the process group, or when told."""
        seen: Any = None
        since, told = 0.0, False
        with suppress(RuntimeError):
            while not self._ended.wait(_POLL) and compat_distributed.world_size() > 1:
                self.roll_call.answer()
                if not self._looks_in.check([f"{self._key}/asked"]):
                    continue
                # No frame is kept, which would keep what its code has let go.
                now = standing(self._followed, self.meetings + 1)
                if now is None or now != seen:
                    seen, since = now, monotonic()
                    if told:
                        self._looks_in.delete_key(f"{self._key}/{self._rank}")
                    told = False
                elif not told and monotonic() - since >= (_STANDS if now.known else 3 * _STANDS):
                    self._stood = True
                    self._looks_in.set(f"{self._key}/{self._rank}", json.dumps(now))
                    self._looks_in.set(f"{self._key}/any", b"1")
                    told = True


def standing(thread: int, meeting: int) -> Standing | None:
    """Where a thread is that sends outside of a step, or waits for others in its call of fit, the ``meeting``-th;
    None where it does not."""
    frame: Any = sys._current_frames().get(thread)
    inner = None if frame is None else (id(frame), frame.f_lasti)
    call, group, makes, size = "", None, None, 0
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == _RANKS and frame.f_code.co_name == "wait":
            return None  # in a step itself
        if module == _MEETING and frame.f_code.co_name == "met":
            call, group, inner = "tightship.fit", _FIT, None
        if frame.f_code is Sent.result.__code__:
            call, group = GATHER, frame.f_locals["self"].group
        elif (kind := compat_distributed.call_of(frame)) is not None:
            if (new := compat_distributed.new_group_of(frame)) is not None:
                group, makes = new
            call, group = kind[0], group or kind[1]
            size = max(size, compat_distributed.bytes_in(frame))
        if _is_callers(frame):
            break
        frame = frame.f_back
    name = group or compat_distributed.name_of_all()
    begun = meeting if name == _FIT else 1 if makes else compat_distributed.collectives_begun(name)
    if not call or frame is None or begun is None:
        return None
    return Standing(call, _place(frame), name, begun, group is not None, inner, size, makes)


def call_in(thread: int) -> Any:
    """Which call of a collective a thread is in; None where it is in none. Nothing is asked that frames have: who
    looks at a frame's variables has it keep them to its end."""
    frame: Any = sys._current_frames().get(thread)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.f_back
    there = frame is not None and frame.f_globals.get("__name__") == _COLLECTIVES
    return (id(frame), frame.f_lasti) if there else None


def place_of(thread: int) -> str:
    """Where a thread is in the caller's own code; empty where it is not there."""
    frame: Any = sys._current_frames().get(thread)
    while frame is not None and not _is_callers(frame):
        frame = frame.f_back
    return "" if frame is None else _place(frame)


def _is_callers(frame: Any) -> bool:
    """Code that torch has written has no name of a module."""
    module = frame.f_globals.get("__name__", "torch")
    return module.partition(".")[0] not in _LIBRARIES


def _place(frame: Any) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


STEPS: Final = "all ranks take as many steps (drop_last=True, or the least number of batches), and send alike"
_GROUPS: Final = "all ranks make the same groups, between the same steps"
_FIT: Final = "tightship.fit"
"""In the place of a group's name."""
_PACKAGE: Final = f"{__package__.partition('.')[0]}."
_COLLECTIVES: Final = "torch.distributed.distributed_c10d"
_RANKS: Final = f"{__package__}.ranks"
_MEETING: Final = f"{__package__}.meeting"
_LIBRARIES: Final = ("torch", "tightship", "typing_extensions", "contextlib", "functools")
"""Whose code is not the caller's own."""
