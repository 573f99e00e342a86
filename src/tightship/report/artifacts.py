"""Ways to look at a plan that the command line writes."""

from __future__ import annotations

__all__ = ["SHOWN"]

SHOWN = {
    "picture": "drawn in",
    "report": "shown in",
    "trace": "traced in",
    "snapshot": "memory snapshot in",
}
"""By option and by method of ``Planned``, and how they are announced."""
