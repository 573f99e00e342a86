"""What stands in a page."""

from __future__ import annotations

import json
import re
from typing import Any


def in_page(text: str) -> dict[str, Any]:
    """The data that a page draws."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found[1])


def part(text: str, kind: str) -> dict[str, Any]:
    """The first section of a kind."""
    return next(s for s in in_page(text)["sections"] if s["kind"] == kind)
