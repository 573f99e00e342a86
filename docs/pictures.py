"""Draws the pictures of the documentation anew, each by the command that its page names: `make pictures`.

    python docs/pictures.py [--demo]        # --demo: the README's picture, too; trains two models, some minutes

Plans follow from measured times, so that pictures differ a little from machine to machine.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from tightship.cli import main

DOCS = Path(__file__).resolve().parent
DRAWN = DOCS / "pictures"


def command(*words: str) -> None:
    print("tightship", *words)
    assert main(list(words)) == 0, words


def draw(demo: bool) -> None:
    """All of them; the working folder is an empty one."""
    page = (DOCS / "tutorials" / "placement.md").read_text(encoding="utf-8")
    (problem,) = re.findall(r'```csv title="problem.csv"\n(.*?)```', page, re.DOTALL)
    Path("problem.csv").write_text(problem)
    shutil.copy(DOCS.parent / "examples" / "training.py", "training.py")
    sys.path.insert(0, "")
    command("pack", "problem.csv", "--svg", str(DRAWN / "packing.svg"))
    command("pack", str(DOCS / "placement.csv"), "--svg", str(DOCS / "placement.svg"))
    command("plan", "training:step", "--budget", "45%", "--picture", str(DRAWN / "step.svg"))
    allowed = "recompute,compress,offload"
    offloaded = str(DRAWN / "offload.svg")
    command("plan", "training:step", "--budget", "38%", "--allow", allowed, "--picture", offloaded)
    command("frontier", "training:step", "--points", "7", "--svg", str(DRAWN / "frontier.svg"))
    if demo:
        command("demo", "--out", "demo-out")
        shutil.copy("demo-out/gpt2.svg", DOCS / "gpt2.svg")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        draw("--demo" in sys.argv[1:])
        os.chdir(DOCS)
