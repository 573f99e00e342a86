"""What the README and the documentation show is true: their code runs, their commands print what stands there, their
links lead somewhere, and the site has a page for everything that there is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.page_blocks import ROOT, Block, blocks, differences, marked

DOCS = ROOT / "docs"
ADDING = DOCS / "add-a-planner.md"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
QUICK = {"placement.md", "executorch.md"}
"""Pages whose blocks run within a few seconds, links of all of them aside; the others are slow tests."""
SPOKEN = {f: f.read_text(encoding="utf-8") for f in PAGES}
RUN = [f for f in PAGES if blocks(SPOKEN[f]) and f.parent != ROOT and f != ADDING]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def ran(page: Path, folder: Path, *modules: str, **variables: str) -> str:
    """Runs a page's blocks in ``folder``; returns what its blocks printed."""
    command = [
        sys.executable,
        str(ROOT / "tests" / "support" / "page_blocks.py"),
        str(page),
        str(folder),
        *modules,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "page", [pytest.param(f, marks=() if f.name in QUICK else pytest.mark.slow, id=name(f)) for f in RUN]
)
def test_every_block_of_a_page_runs_and_prints_what_it_shows(page, tmp_path):
    pytest.importorskip("torch")
    if "transformers" in SPOKEN[page]:
        pytest.importorskip("transformers")
    ran(page, tmp_path)


def test_a_planner_is_added_as_its_page_says(tmp_path):
    """The page's file goes into a folder of planners that lies elsewhere; the rest is done word for word."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    plugin = "import os\nimport tightship.planners.place as folder\n"
    plugin += "folder.__path__.append(os.path.abspath('src/tightship/planners/place'))\n"
    (tmp_path / "added_planner.py").write_text(plugin)
    (written,) = [b.title for b in blocks(SPOKEN[ADDING]) if b.title.endswith(".py")]
    assert not (ROOT / written).exists()
    found = {"PYTHONPATH": str(tmp_path), "PYTEST_ADDOPTS": "-p added_planner"}
    ran(ADDING, tmp_path, "added_planner", **found)


def test_what_is_not_run_says_why_and_is_little():
    left_out = [b for text in SPOKEN.values() for b in marked(text, "not run")]
    assert all(b.says("not run").strip() for b in left_out)
    assert len(left_out) <= 8


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings_that_exist(page):
    from_the_site = {"planners/index.md", "reference/cli.md", "changelog.md", "modules.md"}
    for target in re.findall(r"\]\(([^)]+)\)", SPOKEN[page]):
        path, _, heading = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        made = there.is_relative_to(DOCS) and there.relative_to(DOCS).as_posix() in from_the_site
        if target.startswith(("http://", "https://")) or made:
            continue
        assert there.exists(), f"{page.name} links to {target}"
        if heading:
            found = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.M)
            assert heading in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in found], target


def test_the_layout_names_every_part_of_the_package():
    """By file or folder: ``simulate.py``, ``serde/``; what is in the folders is listed in a page of its own."""
    text = SPOKEN[DOCS / "layout.md"]
    source = ROOT / "src" / "tightship"
    for path in sorted(source.iterdir()):
        if path.name in ("__pycache__", "py.typed") or path.suffix in (".so", ".pyi"):
            continue
        known = path.name + "/" if path.is_dir() else path.name
        assert f"`{known}" in text or f"`{known}`" in text, f"docs/layout.md does not name {known}"


def test_where_a_change_goes_names_files_and_names_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| You want to change |")[2].partition("\n\n")[0]
    source = ROOT / "src" / "tightship"
    for row in table.splitlines()[2:]:
        words = re.findall(r"`([^`]+)`", row)
        files = [
            (ROOT if w.startswith(("tests/", "cpp/")) else source) / w
            for w in words
            if "/" in w or w.endswith(".py")
        ]
        assert files and all(f.exists() for f in files), row
        spoken = "".join(f.read_text(encoding="utf-8") for f in files if f.is_file())
        assert all(w in spoken for w in words if w.isidentifier() and w != "Options"), row


def test_the_pages_speak_of_the_project_alone():
    for page, text in SPOKEN.items():
        for word in re.findall(r"/(?:work|tmp|home|root|opt)/[\w/]+", text):
            raise AssertionError(f"{page.name} has a path of one machine: {word}")


# --- the runner itself ---


def test_blocks_are_found_with_their_titles_and_marks():
    page = 'a\n```python title="m.py"\nX = 1\n```\n\n<!-- exit: 1 -->\n```console\n$ a b\nc\n```\n```text\nno\n```\n'
    page += "<!-- before:\ny = 2\n-->\n"
    assert blocks(page) == [
        Block(2, "python", "X = 1\n", "m.py"),
        Block(6, "console", "$ a b\nc\n", "", "exit: 1"),
        Block(14, "before", "y = 2\n"),
    ]


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        ("peak 1 B\n", "peak  1 B\n", True),
        ("peak 1 B\n", "peak 2 B\n", False),
        ("in 3 ms\n", "in 4.25 s\n", True),
        ("a\n…\nd\n", "a\nb\nc\nd\n", True),
        ("a\n…\nd\n", "a\nb\nc\n", False),
        ("a\n…\n", "a\n", True),
        ("a\n", "a\nb\n", False),
        ("a\nb\n", "a\n", False),
        ("x (…) y\n", "x (1, 2) y\n", True),
        ("x (…) y\n", "x 1 y\n", False),
        ("  9 MiB ┤ ▂█\n      │█\n", "  8 MiB ┤  █\n        │\n", True),
        ("  9 MiB ┤ ▂█\n", "  9 MiB   ▂█\n", False),
    ],
)
def test_what_is_printed_is_compared(expected, got, same):
    assert (differences(expected, got) == []) is same


def test_lines_that_vary_are_compared_by_their_heads():
    assert differences("peak 1 B\ndone 3\n", "peak 2 B\ndone 3\n", "peak: why") == []
    assert differences("peak 1 B\ndone 3\n", "peak 2 B\ndone 4\n", "peak: why") != []
    assert differences("peak 1 B\n", "nothing\n", "peak: why") != []


# --- the site ---


@pytest.fixture(scope="module")
def made():
    sys.path.insert(0, str(DOCS))
    try:
        import hooks
    finally:
        sys.path.remove(str(DOCS))
    return hooks.pages()


def test_every_planner_has_a_page_made_of_its_docstring(made):
    from tightship.planners import planners

    for info in planners().values():
        text = made["/".join(filter(None, ("planners", info.group, f"{info.name}.md")))]
        doc = info.documentation
        assert re.sub(r"\W+", "", doc) in re.sub(r"\W+", "", text), info.name
        assert f"## Options\n\n{'|' if info.options.__dataclass_fields__ else 'None.'}" in text


def test_every_module_is_listed_with_what_it_is(made):
    source = ROOT / "src" / "tightship"
    for path in source.rglob("*.py"):
        part = path.parent.relative_to(source).as_posix()
        title = "The package itself" if part == "." else f"`{part}/`"
        rows = made["modules.md"].partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        assert re.search(rf"^\| `{re.escape(path.name)}` \| \S.{{8,}} \|$", rows, re.M), path


def test_the_navigation_names_every_page():
    """mkdocs itself says so too (``omitted_files``), where it is installed."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    for page in DOCS.rglob("*.md"):
        assert page.relative_to(DOCS).as_posix() in nav, f"mkdocs.yml does not name {page.name}"


def test_every_verb_and_option_is_in_the_reference(made):
    from tightship.cli import parser

    text = made["reference/cli.md"]
    verbs = parser()._subparsers._group_actions[0].choices
    assert len(verbs) > 7
    for verb, options in verbs.items():
        assert f"\n## {verb}\n" in text
        part = text.partition(f"\n## {verb}\n")[2].partition("\n## ")[0]
        for action in options._actions:
            assert action.dest == "help" or all(
                f"`{o}" in part or f" {o}" in part for o in action.option_strings
            )
