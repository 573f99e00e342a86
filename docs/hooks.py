"""Pages made from the code when the site is built: one for each planner, one for the command line, the changelog.

mkdocs calls ``on_config`` and ``on_files``; the rest are functions from the package to Markdown text.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tightship.cli import parser
from tightship.options import help_of
from tightship.planners import PlannerInfo, planners
from tightship.verify import PLACEMENT_RULES, PLAN_RULES

ROOT = Path(__file__).resolve().parent.parent

GROUPS = {
    "": ("Whole plans", "tightship plan SOURCE --budget B{planner}"),
    "order": ("Order of the ops", "tightship plan SOURCE --budget B --order {name}"),
    "evict": ("What leaves memory", "tightship plan SOURCE --budget B --evict {name}"),
    "share": ("Whole buffers by name", "tightship plan SOURCE{planner}"),
    "place": ("Where every byte lies", "tightship pack PROBLEM.csv{planner}"),
    "assign": ("Buffers of HLO modules", "tightship assign MODULE.txt{planner}"),
    "remat": ("HLO modules to smaller ones", "tightship plan MODULE.txt --budget B{planner}"),
}
"""Folders of planners in the order in which decisions are taken: their title, and how a planner is asked for."""

LABELS = ("Problem", "Problem, measure and rules", "Minimized", "Measure", "Source", "Seeds", "Differences")
LABELS += ("Guarantee", "Complexity", "Known limits")


def pages() -> dict[str, str]:
    """Every generated page: its path within the site, and its text."""
    made = {"planners/index.md": planner_index(), "reference/cli.md": command_line()}
    made["modules.md"] = modules()
    made["contributing.md"] = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")
    made["reference/rules.md"] = rules()
    made["changelog.md"] = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return made | {planner_path(info): planner_page(info) for info in planners().values()}


# --- the verifier's rules ---


def rules() -> str:
    lines = ["# The verifier's rules", ""]
    lines += [
        "Every plan and every placement is checked against these before it is handed out; `tightship verify`"
    ]
    lines += [
        "checks a file. A violation has the rule's code, the step, the names concerned and a sentence.",
        "",
    ]
    for title, table in (("Plans", PLAN_RULES), ("Placements", PLACEMENT_RULES)):
        lines += [f"## {title}", "", "| code | what is wrong |", "| --- | --- |"]
        lines += [*(f"| `{rule.code}` | {cell(rule.sentence.replace('``', '`'))} |" for rule in table), ""]
    return "\n".join(lines)


# --- planners ---


def planner_path(info: PlannerInfo) -> str:
    return "/".join(filter(None, ("planners", info.group, f"{info.name}.md")))


def by_group() -> dict[str, list[PlannerInfo]]:
    every = list(planners().values())
    groups = dict.fromkeys([*GROUPS, *(info.group for info in every)])
    return {group: found for group in groups if (found := [i for i in every if i.group == group])}


def planner_index() -> str:
    lines = ["# Planners", ""]
    lines += ["One file each, grouped by the decision they take; `tightship planners` lists them, too.", ""]
    for group, found in by_group().items():
        lines += [f"## {GROUPS.get(group, (group, ''))[0]}", "", "| | |", "| --- | --- |"]
        links = [(f"[{i.name}]({planner_path(i).removeprefix('planners/')})", i.summary) for i in found]
        lines += [*(f"| {link} | {cell(summary)} |" for link, summary in links), ""]
    return "\n".join(lines)


def planner_page(info: PlannerInfo) -> str:
    module = sys.modules[info.plan.__module__]
    summary, _, rest = info.documentation.partition("\n")
    usage = GROUPS.get(info.group, ("", ""))[1]
    planner = "" if info.name == "default" else f" --planner {info.name}"
    lines = [f"# {info.name}", "", summary, "", *sections(rest.strip()), ""]
    if usage:
        lines += ["```sh", usage.format(planner=planner, name=info.name), "```", ""]
    file = "src/" + module.__name__.replace(".", "/") + ".py"
    return "\n".join([*lines, "## Options", "", *options_table(info.options), "", f"In `{file}`.", ""])


def sections(text: str) -> list[str]:
    """A planner's docstring with its parts (``Problem: …``) as paragraphs, each with its name in bold."""
    head = rf"(?:^|(?<=[.;)] ))({'|'.join(sorted(LABELS, key=len, reverse=True))}): "
    lines = []
    for paragraph in re.split(r"\n\s*\n", text):
        flat = " ".join(paragraph.split())
        lines += [re.sub(head, r"\n\n**\1.** ", flat).strip(), ""]
    return lines


def options_table(options: type[Any]) -> list[str]:
    fields = dataclasses.fields(options)
    if not fields:
        return ["None."]
    rows = [f"| `{f.name}` | {code(f.default)} | {cell(help_of(f))} |" for f in fields]
    return ["| Option | Default | |", "| --- | --- | --- |", *rows]


# --- modules ---


def modules() -> str:
    """Every module with the first sentence of its docstring, folders in the order in which `layout.md` has them."""
    layout = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
    folders: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src" / "tightship").rglob("*.py")):
        name = path.relative_to(ROOT / "src" / "tightship")
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        sentence = re.split(r"(?<=\.)\s", " ".join(said.split()), maxsplit=1)[0]
        row = f"| `{name.name}` | {cell(sentence)} |"
        folders.setdefault(name.parent.as_posix(), []).append(row)

    def place(folder: str) -> tuple[int, str]:
        at = layout.find(f"`{folder.split('/')[0]}/`")
        return (-1 if folder == "." else at if at >= 0 else len(layout)), folder

    lines = ["# Every module", "", "With its first sentence, in the order in which data flows.", ""]
    for folder in sorted(folders, key=place):
        title = "The package itself" if folder == "." else f"`{folder}/`"
        lines += [f"## {title}", "", "| | |", "| --- | --- |", *folders[folder], ""]
    return "\n".join(lines)


# --- the command line ---


def command_line() -> str:
    top = parser()
    verbs = next(a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    summary = {action.dest: action.help for action in verbs._choices_actions}
    lines = ["# Command line", "", top.description or "", "", "| Verb | |", "| --- | --- |"]
    lines += [f"| [`{name}`](#{name}) | {cell(summary[name] or '')} |" for name in verbs.choices]
    lines += ["", f"{(top.epilog or '').capitalize()}.", ""]
    for name, verb in verbs.choices.items():
        lines += [f"## {name}", "", f"{(summary[name] or '').capitalize()}.", "", *usage(verb)]
        for group in verb._action_groups:
            rows = [option(a) for a in group._group_actions if a.dest != "help"]
            if rows:
                title = {"positional arguments": "", "options": ""}.get(group.title or "", group.title or "")
                lines += ["", f"| {title} | |", "| --- | --- |", *rows]
        lines.append("")
    return "\n".join(lines)


def usage(verb: argparse.ArgumentParser) -> list[str]:
    verb.formatter_class = partial(argparse.HelpFormatter, width=100)  # type: ignore[assignment]
    return ["```text", verb.format_usage().strip(), "```"]


def option(action: argparse.Action) -> str:
    name = ", ".join(action.option_strings) or str(action.metavar)
    taken = "" if action.nargs == 0 or not action.option_strings else f" {action.metavar or ''}"
    if action.choices:
        taken = " " + " ".join(map(str, action.choices))
    said = (action.help or "").replace("%%", "%")
    return f"| `{name}{taken.rstrip()}` | {cell(said)} |"


def cell(text: str) -> str:
    """Text within a table."""
    return " ".join(text.split()).replace("|", "\\|")


def code(value: object) -> str:
    return "" if value is dataclasses.MISSING else f"`{value!r}`" if value != "" else ""


# --- what mkdocs calls ---


def on_config(config: Any) -> Any:
    """The planners' pages take their place in the navigation."""
    nav: list[Any] = ["planners/index.md"]
    for group, found in by_group().items():
        nav.append({GROUPS.get(group, (group, ""))[0]: [{i.name: planner_path(i)} for i in found]})
    config.nav = [{"Planners": nav} if entry == {"Planners": "planners"} else entry for entry in config.nav]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files that are no part of the site are text here; where the repository is read, they lead there."""
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)+(?:tests|src|benchmarks|examples)/[^)]*\)", r"\1", markdown)


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files
