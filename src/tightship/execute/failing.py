"""How a run that fails ends: everything it made is freed, and a refusal of the arena is told in the plan's words."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from tightship.errors import BudgetExceeded

__all__ = ["freed"]

_EXCEEDED: Final = re.compile(r"tightship: budget exceeded at step (\d+): asked (\d+)")


@contextmanager
def freed(env: list[Any], exceeded: Callable[[int, int], BudgetExceeded]) -> Iterator[None]:
    """Empties ``env`` if what is run inside fails; frames of the traceback keep nothing either.

    ``exceeded`` makes the error of (step of the script, bytes asked for) where the arena refused a request.
    """
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        env.clear()
        found = _EXCEEDED.search(str(error)) if isinstance(error, RuntimeError) else None
        if found is None:
            raise
        raise exceeded(int(found[1]), int(found[2])) from error
