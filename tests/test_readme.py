"""What the README shows is true: its Python runs, its commands succeed, its links lead somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALLER = {"n_layer=48, n_embd=1600, n_head=25": "n_layer=3, n_embd=1600, n_head=25", "40GiB": "90%"}


def blocks(language: str) -> list[str]:
    return re.findall(
        rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )


@pytest.mark.slow
def test_the_readmes_python_and_commands_run(tmp_path):
    pytest.importorskip("transformers")
    module, *others = blocks("python")
    assert module.startswith("# gpt.py")
    (tmp_path / "gpt.py").write_text(module)
    commands = [
        shlex.split(c)[1:] for text in blocks("console") for c in re.findall(r"^\$ (.*)$", text, re.M)
    ]
    assert len(others) == 3 and len(commands) == 3
    for long, short in SMALLER.items():
        others = [text.replace(long, short) for text in others]
    script = [*others, *(f"from tightship.cli import main\nassert main({c!r}) == 0" for c in commands)]
    (tmp_path / "all.py").write_text("\n\n".join(script))
    done = subprocess.run([sys.executable, "all.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "plan.json: nothing is wrong" in done.stdout and "made on line" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        path, _, heading = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}"
        if heading:
            found = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.M)
            assert heading in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in found], target
