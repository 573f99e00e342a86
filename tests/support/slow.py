"""Which tests `make test` leaves out: the longest, until the others fit into so many seconds of one core.

    make test-all TEST_REPORT=build/tests.xml && python tests/support/slow.py build/tests.xml [SECONDS]

Of the cases of one test function the shortest counts as a quarter of its time: it stands for the others, and where
it is left out, too, nothing does. What was slow before and is not in the report stays so. Tests that carry the marker
``slow`` in the code stay slow whatever is measured here.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
BUDGET = 840.0
"""Seconds of one core: seven minutes on two."""
TOGETHER = "tests/distributed/"
"""Tests of these files look at what ranks have done once for all of them: to leave one out gains nothing. They are in
nobody's budget; what takes long there carries the marker."""


def measured(report: Path) -> dict[str, float]:
    """The seconds of each test in a JUnit report, by its id."""
    found: dict[str, float] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        parts = case.get("classname", "").split(".")
        files = [k for k in range(1, len(parts) + 1) if (TESTS.parent / f"{'/'.join(parts[:k])}.py").exists()]
        if not files:  # a whole module that was skipped
            continue
        depth = files[-1]
        name = "::".join([f"{'/'.join(parts[:depth])}.py", *parts[depth:], case.get("name", "")])
        if "\n" not in name:
            found[name] = found.get(name, 0.0) + float(case.get("time", 0.0))
    return found


def longest(seconds: dict[str, float], budget: float) -> list[str]:
    """The tests to leave out so that the others take ``budget`` seconds."""
    seconds = {name: took for name, took in seconds.items() if not name.startswith(TOGETHER)}
    shortest: dict[str, str] = {}
    for name in sorted(seconds, key=lambda name: (seconds[name], name)):
        shortest.setdefault(name.partition("[")[0], name)
    stands = set(shortest.values())
    left = sum(seconds.values())
    slow = []
    for name in sorted(seconds, key=lambda name: -seconds[name] / (4 if name in stands else 1)):
        if left <= budget:
            break
        slow.append(name)
        left -= seconds[name]
    return slow


def main() -> None:
    budget = float(sys.argv[2]) if len(sys.argv) > 2 else BUDGET
    seconds = measured(Path(sys.argv[1]))
    table = TESTS / "slow.txt"
    unknown = set(table.read_text(encoding="utf-8").splitlines()) - seconds.keys()
    slow = sorted({*longest(seconds, budget), *unknown})
    table.write_text("".join(f"{name}\n" for name in slow), encoding="utf-8")
    print(f"{len(slow)} tests are slow")


if __name__ == "__main__":
    main()
