"""Faults drawn from a seed, injected into one of two ranks: what hangs, and what goes wrong in silence.

    python benchmarks/rank_faults.py [--faults N] [--seed S] [--first K]

Kills (-9), errors in capture, profile, plan, verification, reservation, the step's code, its messages, its update and
state dicts; other budgets, batches, versions, models and optimizers on one rank. Every rank that is left has to raise
the same error within five seconds, with the rank that failed in it; where parameters have changed, it has to say so.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.rank_faults import judged, pairs


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    tried: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    longest, numbers = 0.0, list(range(options.first, options.first + options.faults))
    while numbers:
        row = next(pairs(options.seed, numbers))
        found = judged(options.seed, row)
        numbers = numbers[len(found) :]  # of a pair that ended too early the rest is tried again
        for number, (fault, wrong, seconds) in found.items():
            tried[fault.what] += 1
            failed[fault.what] += bool(wrong)
            longest = max(longest, seconds)
            print(
                f"{number} {fault.what} {fault.where} on rank {fault.rank}: {wrong or 'right'} ({seconds:.1f} s)"
            )
            sys.stdout.flush()
    for what in sorted(tried):
        print(f"{what}: {tried[what]} tried, {failed[what]} failed")
    print(
        f"{tried.total()} tried, {failed.total()} failed; after {longest:.1f} s at most all ranks had ended"
    )
    return bool(failed.total())


if __name__ == "__main__":
    sys.exit(main())
