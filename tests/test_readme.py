"""What the README shows is true: its files, snippets and commands run in order, and print what stands there."""

import pytest

from support.page_blocks import ROOT, marked
from test_docs import ran

README = ROOT / "README.md"


@pytest.mark.slow
def test_the_readmes_python_and_commands_run(tmp_path):
    pytest.importorskip("transformers")
    ran(README, tmp_path)
    written = {f.name for f in tmp_path.iterdir()}
    assert {"gpt.py", "plan.json"} <= written


def test_the_readme_shows_a_picture_that_the_tool_drew():
    text = README.read_text(encoding="utf-8")
    assert "(docs/gpt2.svg)" in text
    assert "<title>Memory over one step" in (ROOT / "docs" / "gpt2.svg").read_text(encoding="utf-8")


def test_what_the_readme_does_not_run_is_little():
    assert len(marked(README.read_text(encoding="utf-8"), "not run")) <= 3
