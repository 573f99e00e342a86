"""Runs a page of the documentation as its reader would: block by block, from top to bottom, in an empty folder.

    python tests/support/page_blocks.py docs/placement.md FOLDER [MODULE to import first]

- ``python`` blocks share one namespace, like cells of a notebook; ``console`` blocks have commands (``$ …``) and what
  they print; ``sh`` blocks have commands alone. A block with ``title="file"`` is that file.
- What is printed is compared line by line, but for seconds, which differ from run to run, and what a chart draws.
  ``…`` stands for any text, alone on a line for any lines.
- A comment before a block says more: ``<!-- not run: why -->``; ``<!-- needs: module -->``, or it is left out;
  ``<!-- exit: 1 -->``; ``<!-- varies: peak, time: why -->`` for lines that begin so (``a/b``: so or so) and
  follow from measured times (``all``: only the exit status is looked at).
  ``<!-- before: … -->`` holds Python that the page does not show, such as a file the reader would bring.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Block", "blocks", "differences", "marked", "run"]

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = "100"
RUN = ("python", "console", "sh", "before")

_BLOCK = re.compile(
    r"^<!-- before:\n(?P<before>.*?)^-->$"
    r"|(?:^<!-- (?P<mark>(?:not run|needs|exit|varies): [^>]*) -->\n)?"
    r"^```(?P<language>\w+)(?P<info>[^\n]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_CHART = re.compile(r"^ *[\d.]*(?: [KMGT]?i?B)? [┤│] ?.*|^ +0 +[\d.]+ (?:ns|µs|ms|s|min)$")
_SECONDS = re.compile(r"\d[\d.]* (?:ns|µs|ms|s|min)\b|[+-]\d[\d.]* %|±0 %")


@dataclass(frozen=True)
class Block:
    """A block of a page: its ``line``, ``language``, ``text``, and the comment before it (``mark``)."""

    line: int
    language: str
    text: str
    title: str = ""
    mark: str = ""

    def says(self, what: str) -> str:
        """What the comment says of ``what``, or nothing."""
        name, _, rest = self.mark.partition(": ")
        return rest if name == what else ""


def blocks(page: str) -> list[Block]:
    """Every block of a page that is run or written, in order."""
    found = []
    for m in _BLOCK.finditer(page):
        line = page.count("\n", 0, m.start()) + 1
        if m["before"] is not None:
            found.append(Block(line, "before", m["before"]))
            continue
        title = re.search(r'title="([^"]+)"', m["info"])
        found.append(Block(line, m["language"], m["text"], title[1] if title else "", m["mark"] or ""))
    return [b for b in found if b.language in RUN or b.title]


def marked(page: str, what: str) -> list[Block]:
    return [b for b in blocks(page) if b.says(what)]


def differences(expected: str, got: str, varies: str = "") -> list[str]:
    """Lines of ``expected`` that ``got`` does not have in their places, and what stands there instead."""
    heads = tuple(w.strip() for w in varies.partition(":")[0].split(",") if w.strip())
    if heads == ("all",):
        return []

    def plain(text: str) -> list[str]:
        drawn = (_CHART.sub("(chart)", line) for line in text.splitlines())
        lines = (" ".join(_SECONDS.sub("#", line).split()) for line in drawn)
        known = (
            next((f"{h} #" for h in heads if line.startswith(tuple(h.split("/")))), line) for line in lines
        )
        return [line for line in known if line.strip("─ ")]

    wanted, have = plain(expected), plain(got)
    at, skipping, wrong = 0, False, []
    for line in wanted:
        if line == "…":
            skipping = True
            continue
        pattern = re.compile(".*".join(map(re.escape, line.split("…"))))
        places = range(at, len(have)) if skipping else range(at, min(at + 1, len(have)))
        hit = next((k for k in places if pattern.fullmatch(have[k])), None)
        if hit is None:
            wrong.append(f"- {line}\n+ {have[at] if at < len(have) else '(nothing)'}")
        at, skipping = (at if hit is None else hit) + 1, False
    if at < len(have) and not skipping and not wrong:
        wrong.append(f"- (nothing)\n+ {have[at]}")
    return wrong


# --- running ---


def run(page: Path) -> None:
    """Run a page in the current folder; raises ``AssertionError`` with the line of the block that is not true."""
    space: dict[str, Any] = {"__name__": "page", "root": ROOT}
    for block in blocks(page.read_text(encoding="utf-8")):
        at = f"{page.name}:{block.line}"
        if block.says("not run") or ((needed := block.says("needs")) and not _there(needed)):
            print(f"{at}: left out ({block.mark})")
        elif block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.language in ("python", "before"):
            try:
                exec(compile(block.text, at, "exec"), space)
            except Exception as error:
                raise AssertionError(f"{at}\n{traceback.format_exc(limit=-3)}") from error
        else:
            for command, expected in _commands(block):
                status, out, err = _executed(command)
                assert status == int(block.says("exit") or 0), f"{at}: $ {command}: {status}\n{out}{err}"
                if block.language == "console" and (
                    wrong := differences(expected, out + err * bool(status), block.says("varies"))
                ):
                    raise AssertionError("\n".join([f"{at}: $ {command}", *wrong, "", out]))


def _there(module: str) -> bool:
    return importlib.util.find_spec(module.strip()) is not None


def _commands(block: Block) -> Iterator[tuple[str, str]]:
    """(command, what it prints): lines after ``$``, or with ``sh`` every line."""
    if block.language == "sh":
        yield from ((line, "") for line in block.text.splitlines() if shlex.split(line, comments=True))
        return
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def _executed(command: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error. tightship's own commands run in this process, which has what they
    import by now."""
    words = shlex.split(command, comments=True)
    if words[0] == "tightship":
        from tightship.cli import main

        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(words[1:])
        return status, out.getvalue(), err.getvalue()
    if words[0] == "python":
        words[0] = sys.executable
    done = subprocess.run(words, capture_output=True, text=True, encoding="utf-8")
    return done.returncode, done.stdout, done.stderr


if __name__ == "__main__":
    shown, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    os.environ["COLUMNS"] = COLUMNS
    os.chdir(folder)
    sys.path.insert(0, str(folder.resolve()))
    for module in sys.argv[3:]:
        importlib.import_module(module)
    run(shown)
