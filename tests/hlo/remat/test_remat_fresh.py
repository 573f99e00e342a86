"""Modules that JAX compiles here and now: what XLA did with them, what we do."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.hlo_fresh import KINDS
from tightship.baselines import xla_remat
from tightship.hlo import Module, parse, to_text
from tightship.hlo.remat import search
from tightship.hlo.remat.as_plan import as_plan
from tightship.hlo.remat.lower import bound
from tightship.hlo.remat.peak import module_peak
from tightship.verify import verify

SCRIPT = Path(__file__).parents[2] / "support" / "hlo_fresh.py"
QUICK = search.Options(seconds=60.0, work=6_000_000)
BEFORE, FINAL = "*jit_step*before_rematerialization.txt", "*jit_step.cpu_after_optimizations.txt"
pytestmark = pytest.mark.slow


def compiled(folder: Path, *given: str) -> str:
    """The log of compiling into ``folder``."""
    pytest.importorskip("jax", reason="jax is not installed")
    found = subprocess.run(
        [sys.executable, str(SCRIPT), given[0], str(folder), *given[1:]], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stderr


def dumped(folder: Path, pattern: str) -> Module:
    (path,) = folder.glob(pattern)
    return parse(path.read_text(), path.name)


def judged(m: Module, limit: int, theirs: int) -> xla_remat.Result:
    """Ours at a limit: met, or proved impossible, or less than XLA leaves; verified, and accepted by XLA's parser."""
    made = search.plan(m, limit, QUICK)
    assert made.peak_after == module_peak(made.module)
    assert made.met or bound(m) > limit or made.peak_after < theirs
    assert made.met or made.peak_after <= 1.0001 * theirs
    assert verify(*as_plan(m, made, "search")) == []
    hlo = pytest.importorskip("jaxlib._hlo")
    hlo.hlo_module_from_text(to_text(made.module)).schedule().verify()
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_modules_for_cpu(kind: str, tmp_path: Path) -> None:
    compiled(tmp_path, "cpu", kind)
    m = dumped(tmp_path, FINAL)
    for share in (0.9, 0.6):
        limit = int(share * module_peak(m))
        theirs = xla_remat.plan(m, limit)
        assert verify(*as_plan(m, theirs, "xla")) == []
        made = judged(m, limit, module_peak(theirs.module))
        if theirs.met:
            assert made.met


@pytest.mark.parametrize(
    ("kind", "memory"), [("lstm", 1_700_000), ("scan", 12_000_000), ("unrolled", 15_000_000)]
)
def test_R20_modules_for_gpu_against_what_xla_says_it_did(kind: str, memory: int, tmp_path: Path) -> None:  # noqa: N802
    parts = ("jax_plugins", "jax_plugins.xla_cuda12")  # without the first, asking for the second raises
    if any(importlib.util.find_spec(name) is None for name in parts):
        pytest.skip("jax-cuda12-plugin is not installed; no GPU is needed")
    log = compiled(tmp_path, "cuda", kind, str(memory))
    m = dumped(tmp_path, BEFORE)
    (limit,) = map(_bytes, re.findall(r"memory limit of ([\d.]+\w+)", log))
    ends = re.findall(r"module now .*\((\d+) bytes\), was .*\((\d+) bytes\)", log)
    if not ends:
        pytest.skip("XLA met the limit without rematerialization")
    after, before = map(int, ends[-1])
    if exact := re.search(r"use below .*?\((\d+) bytes\)", log):
        limit = int(exact[1])
    theirs = xla_remat.plan(m, limit)
    assert theirs.recomputed == tuple(re.findall(r"recomputation: \{([^}]*)\}", log))
    assert (theirs.peak_before, theirs.peak_after) == (before, after)
    judged(m, limit, after)


def _bytes(text: str) -> int:
    number, unit = re.fullmatch(r"([\d.]+)(\w*)", text).groups()  # type: ignore[union-attr]
    return int(float(number) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}.get(unit, 1))
