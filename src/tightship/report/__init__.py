"""Reports: a plan to something to look at. Nothing here decides or measures; every number is the plan's."""

import random

# rich draws one of Python's random numbers when it is imported, which may be in the middle of somebody's training.
_state = random.getstate()
import rich.style  # noqa: E402, F401

random.setstate(_state)
