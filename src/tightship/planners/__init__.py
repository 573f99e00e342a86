"""Planners: graph and budget to a plan, one file each, in folders named after the decision they take.

A module is a planner when it has a function ``plan`` and a dataclass ``Options``; its file name, with ``-``
for ``_``, is its name, and its folder its group. Putting the file into a folder is all there is to do. The
systems tightship answers to stand in ``tightship.baselines`` and say group and name in ``PLANNER``; a package
of somebody else's adds planners through the entry-point group ``tightship.planners`` (``group/name``). A module
with several planners, such as rows of one table, lists them in ``PLANNERS``, a tuple of ``PlannerInfo``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from tightship.errors import BadInput

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["PlannerInfo", "planner", "planners"]

PACKAGES = ("tightship.planners", "tightship.hlo", "tightship.baselines")
"""Where our own planners stand."""

ENTRY_POINTS = "tightship.planners"
"""The entry-point group through which other packages add planners; an entry's name is ``group/name``."""


@dataclass(frozen=True, slots=True)
class PlannerInfo:
    """A planner: its ``name``, the ``group`` (folder) it stands in ("" for none), what it does in one line,
    the dataclass of its ``options``, the function ``plan`` that takes them last, and its whole ``documentation``."""

    name: str
    group: str
    summary: str
    options: type[Any]
    plan: Callable[..., Any]
    documentation: str = ""


def planners(group: str | None = None) -> dict[str, PlannerInfo]:
    """All planners by name, or those of one group (``order``, ``evict``, ``place``, …; ``""``: in no group).

    Names are unique within a group; without ``group``, one that stands in several is given as ``group/name``.
    """
    return dict(_by_name(group, _import_path()))


def planner(name: str, group: str | None = None) -> PlannerInfo:
    """The planner called ``name`` on the command line."""
    if group and name.replace("-", "_").isidentifier():  # its file says where it is: no other one is imported
        module = f"{PACKAGES[0]}.{group}.{name.replace('-', '_')}"
        if importlib.util.find_spec(f"{PACKAGES[0]}.{group}") and importlib.util.find_spec(module):
            for info in _ours(module, group):
                if info.name == name:
                    return info
    known = planners(group)
    if name not in known:
        raise BadInput(f"a planner is one of {', '.join(known)}", name, "planner")
    return known[name]


def _modules_in(package: str, group: str) -> Iterator[tuple[str, str]]:
    """(dotted name, group) of every module that may be a planner."""
    for entry in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if entry.name.startswith("_"):
            continue
        if entry.ispkg:
            yield from _modules_in(f"{package}.{entry.name}", entry.name)
        else:
            yield f"{package}.{entry.name}", group


@lru_cache(maxsize=16)
def _by_name(group: str | None, path: tuple[tuple[str, int], ...]) -> dict[str, PlannerInfo]:
    found = [info for info in (*_all_ours(), *_of_others(path)) if group in (None, info.group)]
    names = Counter(info.name for info in found)
    return {
        f"{info.group}/{info.name}" if info.group and names[info.name] > 1 else info.name: info
        for info in sorted(found, key=lambda info: (info.group, info.name))
    }


@cache
def _all_ours() -> tuple[PlannerInfo, ...]:
    modules = (row for package in PACKAGES for row in _modules_in(package, ""))
    return tuple(info for module, group in modules for info in _ours(module, group))


def _import_path() -> tuple[tuple[str, int], ...]:
    """Where packages are looked for, with the time at which each folder last changed: while all of that is the same,
    so are the planners of others, and reading what every package says of itself takes longer than a small plan."""

    def changed(folder: str) -> int:
        try:
            return os.stat(folder or ".").st_mtime_ns
        except OSError:  # none, or a file that is no folder
            return 0

    return tuple((os.path.abspath(folder), changed(folder)) for folder in sys.path)


@lru_cache(maxsize=1)
def _of_others(_: tuple[tuple[str, int], ...]) -> tuple[PlannerInfo, ...]:
    """Planners of other packages. One that cannot be imported is reported by name, not skipped."""
    from importlib.metadata import entry_points  # takes longer than all of a short command's own modules

    return tuple(_other(entry) for entry in entry_points(group=ENTRY_POINTS))


def _other(entry: EntryPoint) -> PlannerInfo:
    group, _, name = entry.name.rpartition("/")
    try:
        module = entry.load()
    except Exception as error:
        raise BadInput(
            f"cannot load planner {entry.name!r} from {entry.value!r}: {error}; repair or uninstall its package"
        ) from error
    made = _planner_of(module, name, group)
    if made is None:
        raise BadInput(
            f"planner {entry.name!r} ({entry.value}) has no function plan or no dataclass Options; "
            "see docs/add-a-planner.md"
        )
    return made


def _ours(module_name: str, group: str) -> tuple[PlannerInfo, ...]:
    module = importlib.import_module(module_name)
    if rows := getattr(module, "PLANNERS", ()):
        return tuple(rows)
    said = getattr(module, "PLANNER", None)
    if said is not None:
        group, _, name = said.rpartition("/")
    else:
        name = module_name.rpartition(".")[2].replace("_", "-")
    made = _planner_of(module, name, group)
    return () if made is None else (made,)


def _planner_of(module: object, name: str, group: str) -> PlannerInfo | None:
    plan, options = getattr(module, "plan", None), getattr(module, "Options", None)
    if not callable(plan) or not isinstance(options, type):
        return None  # a part that several planners share
    text = (module.__doc__ or "").strip()
    return PlannerInfo(name, group, text.partition("\n")[0], options, plan, text)
