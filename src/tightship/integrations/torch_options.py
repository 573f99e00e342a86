"""The options of the torch.compile backend, and the rules for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tightship.errors import BadInput
from tightship.planners.default import Options as PlannerOptions
from tightship.planners.hints import parse_hints
from tightship.units import Budget, parse_budget

__all__ = ["CompileOptions", "read_options"]

_PLACE = "torch.compile(options=…)"
_PLANNER = tuple(f for f in fields(PlannerOptions) if f.name not in ("hand_out", "place"))
"""Without two: results always leave the arena, and ``arena`` says whether there is one."""


@dataclass(frozen=True)
class CompileOptions:
    """``budget``: of all graphs of the model together, in bytes (``6GiB``, an int) or as a percentage of the
    first training step's unplanned peak (``60%``, ``static+60%``), resolved to bytes once; none: keep
    everything, in the better order. ``arena``: serve requests from an arena at planned offsets. ``strict``: raise
    when a step did not go as planned. ``eager_fallback``: run in eager, with a warning, what cannot be planned and
    what Dynamo leaves out of its graphs (unless strict, by default); else raise. ``on_plan(piece)`` is told of every
    graph planned. ``cache`` and ``seconds_per_op``: as for `execute.profile`. ``planner``: the default planner's own
    options."""

    budget: Budget | None = None
    arena: bool = True
    strict: bool = False
    eager_fallback: bool = True
    on_plan: Callable[[Any], object] | None = None
    cache: Any = "default"
    seconds_per_op: float = 0.01
    planner: PlannerOptions = field(default_factory=PlannerOptions)


def read_options(given: Mapping[str, Any]) -> CompileOptions:
    """Raises ``BadInput`` for unknown options, with the list of them, and for values of the wrong kind."""
    own = {f.name for f in fields(CompileOptions)} - {"planner"}
    planner = {f.name for f in _PLANNER}
    for name in given:
        if name not in own | planner:
            raise BadInput(f"an option is one of {', '.join(sorted(own | planner))}", name, _PLACE)
    chosen: dict[str, Any] = {"eager_fallback": not given.get("strict", False)}
    for name in ("arena", "strict", "eager_fallback"):
        if name in given:
            chosen[name] = _of_kind(name, given[name], bool, "True or False")
    if given.get("budget") is not None:
        chosen["budget"] = parse_budget(given["budget"], _PLACE)
    if given.get("on_plan") is not None and not callable(given["on_plan"]):
        raise BadInput("on_plan is a function of one argument", given["on_plan"], _PLACE)
    chosen |= {k: given[k] for k in ("on_plan", "cache") if k in given}
    if "seconds_per_op" in given:
        chosen["seconds_per_op"] = _of_kind(
            "seconds_per_op", given["seconds_per_op"], float, "a number of seconds"
        )
    return CompileOptions(**chosen, planner=_planner_options(given))


def _planner_options(given: Mapping[str, Any]) -> PlannerOptions:
    from tightship.planners import planner

    chosen: dict[str, Any] = {}
    for f in _PLANNER:
        if f.name in given:
            kind = type(f.default)
            chosen[f.name] = _of_kind(f.name, given[f.name], kind, f"a {kind.__name__} such as {f.default!r}")
    _recomputing(chosen)
    for folder in ("order", "evict"):
        if chosen.get(folder, "given") != "given":
            planner(chosen[folder], folder)
    return PlannerOptions(**{"allow": "recompute", **chosen})


def _recomputing(chosen: Mapping[str, Any]) -> None:
    """Between forward and backward it is autograd that holds what is saved, and only as the tensors it knows."""
    ways = {way.strip() for way in chosen.get("allow", "").split(",")} - {""}
    ways |= {way for _, way in parse_hints(chosen.get("hints", ""))} - {"keep"}
    if chosen.get("lossy") or ways - {"recompute"}:
        found = "lossy" if chosen.get("lossy") else sorted(ways - {"recompute"})[0]
        raise BadInput(
            "this backend recomputes; tightship.fit packs, copies out and draws again, too", found, _PLACE
        )


def _of_kind(name: str, value: Any, kind: type, rule: str) -> Any:
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool) or (kind in (int, float) and value < 0):
        raise BadInput(f"{name} is {rule}", value, _PLACE)
    return value
