"""Planners: graph and budget to a plan, one file each, in folders named after the decision they take.

A module is a planner when it has a function ``plan`` and a dataclass ``Options``; its file name, with ``-``
for ``_``, is its name. Nothing is registered anywhere: putting the file into a folder is all there is to
do.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tightship.errors import BadInput

__all__ = ["PlannerInfo", "planner", "planners"]


@dataclass(frozen=True, slots=True)
class PlannerInfo:
    """A planner: its ``name``, the ``group`` (folder) it stands in ("" for none), what it does in one line,
    the dataclass of its ``options`` and the function ``plan`` that takes them last."""

    name: str
    group: str
    summary: str
    options: type[Any]
    plan: Callable[..., Any]


def planners(group: str | None = None) -> dict[str, PlannerInfo]:
    """All planners by name, or those of one group (``order``, ``evict``, ``place``, …; ``""``: in no group).

    Names are unique within a group; without ``group``, one that stands in several is given as ``group/name``.
    """
    found = [info for name, at in _modules() if group in (None, at) for info in _planner(name, at)]
    names = [info.name for info in found]
    return {
        f"{info.group}/{info.name}" if info.group and names.count(info.name) > 1 else info.name: info
        for info in sorted(found, key=lambda info: (info.group, info.name))
    }


def planner(name: str, group: str | None = None) -> PlannerInfo:
    """The planner called ``name`` on the command line."""
    known = planners(group)
    if name not in known:
        raise BadInput(f"a planner is one of {', '.join(known)}", name, "planner")
    return known[name]


def _modules() -> Iterator[tuple[str, str]]:
    """(dotted name, group) of every module that may be a planner."""
    for entry in pkgutil.iter_modules(__path__):
        if entry.name.startswith("_"):
            continue
        if not entry.ispkg:
            yield f"{__name__}.{entry.name}", ""
            continue
        folder = importlib.import_module(f"{__name__}.{entry.name}")
        for inner in pkgutil.iter_modules(folder.__path__):
            if not inner.name.startswith("_"):
                yield f"{__name__}.{entry.name}.{inner.name}", entry.name


def _planner(module_name: str, group: str) -> Iterator[PlannerInfo]:
    module = importlib.import_module(module_name)
    plan, options = getattr(module, "plan", None), getattr(module, "Options", None)
    if not callable(plan) or not isinstance(options, type):
        return  # a part that several planners share
    summary = (module.__doc__ or "").strip().partition("\n")[0]
    yield PlannerInfo(module_name.rpartition(".")[2].replace("_", "-"), group, summary, options, plan)
