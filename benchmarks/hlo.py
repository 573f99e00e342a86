"""Rematerialization of HLO modules: XLA's own results, its algorithm, and our search, module by module.

The modules and XLA's logs are those of tests/data/hlo, compiled by jaxlib 0.10.2 for GPU; XLA's figures are read from
its logs. Peaks are counted anew on the modules written, the same way for all: results, without parameters. FLOPs
are those of repeated instructions. The last columns give our search XLA's own result as its limit.
"""

from __future__ import annotations

import argparse
import datetime
import lzma
import platform
import re
import time
from pathlib import Path

import pages

from tightship.baselines import xla_remat
from tightship.baselines.xla_remat import Result
from tightship.hlo import Module, parse
from tightship.hlo.remat import search
from tightship.hlo.remat.cost import work_of
from tightship.hlo.remat.lower import bound
from tightship.hlo.remat.peak import module_peak, sequential_order

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "hlo"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
BEFORE = "0001.remat-pipeline.after_pipeline-start.before_rematerialization.txt.xz"
BEGIN, END = "<!-- begin: benchmarks/hlo.py -->", "<!-- end: benchmarks/hlo.py -->"
MIB = 2**20


def text(path: Path) -> str:
    return lzma.decompress(path.read_bytes()).decode()


def flops(module: Module, made: Result) -> int:
    """FLOPs that the module made has more than the module had, loops and branches counted once."""
    work, names = work_of(module), sequential_order(module)
    return made.flops(work, names) - sum(sum(work.flops[name].values()) for name in names)


def row(folder: Path, options: search.Options) -> str:
    log = text(folder / "remat_log.txt.xz")
    module = parse(text(folder / BEFORE))
    limit = int(re.findall(r"memory limit of ([\d.]+)MiB", log)[0].replace(".", "")) * MIB // 100
    after, _ = map(int, re.findall(r"module now .*\((\d+) bytes\), was .*\((\d+) bytes\)", log)[-1])
    theirs = xla_remat.plan(module, limit)
    chosen = tuple(re.findall(r"recomputation: \{([^}]*)\}", log))
    same = "yes" if (theirs.recomputed, theirs.peak_after) == (chosen, after) else "no"
    began = time.perf_counter()
    ours = search.plan(module, limit, options)
    seconds = time.perf_counter() - began
    equal = search.plan(module, max(after, limit if theirs.met else after), options)
    least = bound(module)
    verdict = "met" if ours.met else "cannot be met (bound)" if least > limit else "not met"
    total = sum(work_of(module).flops[module.entry.name].values())
    share = [f"{flops(module, made) / total:+.2%}" for made in (theirs, ours, equal)]
    cells = [
        folder.name,
        f"{limit / MIB:.2f}",
        f"{module_peak(module) / MIB:.2f}",
        f"{after / MIB:.2f}, {'met' if theirs.met else 'not met'}",
        f"{len(chosen)}, {share[0]}",
        same,
        f"{ours.peak_after / MIB:.2f}, {verdict}",
        f"{len(ours.recomputed)}, {share[1]}",
        f"{least / MIB:.2f}",
        f"{equal.peak_after / MIB:.2f}: {len(equal.recomputed)}, {share[2]}",
        f"{seconds:.1f} s",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of search, at most, for each computation"
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    chosen = parser.parse_args()
    head = (
        "module | limit, MiB | before | XLA, after | XLA repeats, FLOPs | ours as xla does the same | "
        "our search | repeats, FLOPs | bound | at XLA's peak | planned in"
    )
    lines = [
        f"{datetime.date.today().isoformat()}, {platform.machine()}, two cores.",
        "",
        f"| {head} |",
        "| --- " + "| ---: " * head.count("|") + "|",
    ]
    options = search.Options(seconds=chosen.seconds)
    lines += [row(folder, options) for folder in sorted(DATA.glob("gpu_*"))]
    table = "\n".join(lines)
    print(table)
    if chosen.write:
        pages.put(PAGE, BEGIN, END, table)


if __name__ == "__main__":
    main()
