"""Builds the dry CUDA runtime for the torch that is installed, and runs programs on it."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BEFORE = f"""import os, sys; sys.path.insert(0, {str(HERE.parent)!r})
from tightship.execute import allocator, native as extension; extension.runtime = lambda: os.environ["DRY_CUDA"]
"""
"""torch is linked with the runtime; the allocator looks its runtime up by name, and finds the real one."""


def why_not() -> str | None:
    import torch

    if not torch.version.cuda:
        return "torch has been built without CUDA"
    if torch.cuda.is_available():
        return "there is a GPU: nothing has to be pretended"
    missing = [c for c in ("gcc", "nm") if shutil.which(c) is None]
    return f"no {missing[0]}" if missing else None


def build(folder: Path) -> dict[str, str]:
    """The environment in which torch finds the dry runtime instead of CUDA's."""
    root = Path(importlib.util.find_spec("torch").origin).parent
    packages = root.parent
    includes = [*packages.glob("nvidia/*/include"), *packages.glob("nvidia/cuda_runtime/include")]
    includes.append(packages / "triton/backends/nvidia/include")
    flags = [f for path in includes for f in ("-I", str(path))]
    runtime, driver = folder / "libdry.so", folder / "libcuda.so.1"
    source = (HERE / "dry_cuda.c").read_text()
    have = set(re.findall(r"\b(_*cu[a-zA-Z]\w+)\(", source))
    rest = folder / "rest.c"
    for target, names, extra in (
        (runtime, _undefined(root, r"(__cuda|cuda[A-Z]|cublas[A-Z]|cudnn[A-Z])\w+"), ()),
        (driver, _undefined(root, r"cu[A-Z]\w+") | _looked_up(root), ("-DDRIVER", f"-Wl,-soname,{driver.name}")),
    ):  # fmt: skip
        rest.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(names - have)))
        command = [
            "gcc",
            "-shared",
            "-fPIC",
            "-O1",
            "-w",
            *extra,
            *flags,
            HERE / "dry_cuda.c",
            rest,
            "-o",
            target,
        ]
        subprocess.run(list(map(str, command)), check=True)
    return {"LD_PRELOAD": str(runtime), "LD_LIBRARY_PATH": str(folder), "DRY_CUDA": str(runtime)}


def _undefined(root: Path, pattern: str) -> set[str]:
    """Functions of that name that torch's libraries expect of others."""
    libraries = sorted((root / "lib").glob("*.so"))
    listed = subprocess.run(["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True)
    names = {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines() if line.strip()}
    return {n for n in names if re.fullmatch(pattern, n)}


def _looked_up(root: Path) -> set[str]:
    """Functions of the driver that torch looks up by name."""
    data = (root / "lib/libc10_cuda.so").read_bytes()
    return {m.decode() for m in re.findall(rb"\0(cu[A-Z]\w{3,60})(?=\0)", data)}


def run(environment: dict[str, str], program: str) -> str:
    """What a program prints that runs on the dry runtime."""
    command = [sys.executable, "-c", BEFORE + program]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()
