"""The public functions. Importing this file is light: torch is imported when a function needs it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightship.errors import BadInput, Unsupported, VerificationFailed
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.units import parse_budget

if TYPE_CHECKING:
    from tightship.execute.fit import TrainStep
    from tightship.violation import Violation

__all__ = ["Planned", "capture", "check", "fit", "load", "plan", "plan_graph", "read_onnx", "violations"]

Progress = Callable[[int, float, bool], bool]


@dataclass(frozen=True, repr=False)
class Planned:
    """A plan together with the graph it is for: printed, saved, drawn and checked as one.

    The plan's own attributes (``peak``, ``budget``, ``met``, ``time``, …) can be read from here.
    """

    plan: Plan
    graph: Graph

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.plan, name)

    def __str__(self) -> str:
        from tightship.report.text import describe

        return describe(self.plan, self.graph)

    __repr__ = __str__

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write plan and graph as JSON; the file appears complete or not at all."""
        from tightship.serde import save_plan

        save_plan(self.plan, path, self.graph)

    def explain(self) -> str:
        """Who makes up the plan's peak: by kind, by module, by source line, one by one."""
        from tightship.report.numbers import peak_of
        from tightship.report.text import peak_tables, rendered

        return rendered(peak_tables(peak_of(self.graph, self.plan.steps), title="peak"))

    def picture(self, path: str | os.PathLike[str] | None = None, *, title: str = "") -> str:
        """Memory over the step, before and after, as SVG; written to ``path`` if there is one."""
        from tightship.report.picture import picture
        from tightship.serde import write_file

        drawn = picture(self.graph, self.plan, title=title)
        if path is not None:
            write_file(path, drawn.encode())
        return drawn


def fit(
    model: Any, loss_fn: Any, optimizer: Any, sample_batch: Any, budget: Any = None, **options: Any
) -> TrainStep:
    """A training step of ``model`` that stays within ``budget``: see `tightship.execute.fit.fit`.

    ``step = fit(model, loss_fn, optimizer, batch, "6GiB")``, then ``loss = step(batch)`` for every batch.
    """
    from tightship.execute.fit import fit as made

    return made(model, loss_fn, optimizer, sample_batch, budget, **options)


def plan(
    model: Any,
    sample: Any = None,
    budget: Any = None,
    *,
    loss_fn: Any = None,
    optimizer: Any = None,
    train: bool = True,
    cache: Path | str | None = "default",
    progress: Progress | None = None,
    **options: Any,
) -> Planned:
    """Decide only: a verified plan for one step of ``model`` (or for a ``Graph``) within ``budget``.

    Without ``loss_fn`` and ``optimizer`` the step is the forward and backward pass on ``sample`` (``train``:
    in training mode); with them it is the step that `fit` would run. A model on the meta device, or of fake
    tensors, is planned with modelled times and without its weights ever existing; otherwise each op is
    measured once, on tensors made for it. ``budget`` is bytes, text (``6GiB``), or a percentage of the
    unplanned peak (``60%``). ``cache`` is the folder measurements are kept in, ``options`` are the default
    planner's.

    Raises ``Infeasible`` when no plan meets the budget, ``BadInput`` and ``Unsupported`` for what cannot be
    planned.
    """
    if budget is not None:
        budget = parse_budget(budget)
    graph = model
    if not isinstance(model, Graph):
        graph = capture(model, sample, loss_fn=loss_fn, optimizer=optimizer, train=train, cache=cache)
    elif sample is not None:
        raise BadInput("a graph is planned without a sample", type(sample).__name__, "sample")
    return plan_graph(graph, budget, progress=progress, **options)


def capture(
    model: Any,
    sample: Any,
    *,
    loss_fn: Any = None,
    optimizer: Any = None,
    train: bool = True,
    cache: Path | str | None = "default",
) -> Graph:
    """The graph of one step of ``model``, with times: measured, or modelled for models without data."""
    from tightship.execute import profile
    from tightship.frontends.torch import compat
    from tightship.frontends.torch.step import capture_loss, capture_step

    if loss_fn is None and optimizer is None:
        program = capture_loss(model, sample, train=train)
    else:
        program = capture_step(model, loss_fn, optimizer, sample)
    tensors = [*model.parameters(), *model.buffers()]
    if any(t.is_meta or compat.is_fake(t) for t in tensors):
        return profile.model(program).graph
    return profile.profile(program, cache=cache).graph


def read_onnx(path: str | os.PathLike[str], shape: Any = None, **options: Any) -> Any:
    """An ONNX model and its graph (``.graph``): see `tightship.frontends.onnx.lower.lower`.

    ``shape`` gives sizes to symbolic dimensions: ``batch=4,seq=128``, or a mapping. Weights are not loaded.
    """
    try:
        from tightship.frontends.onnx.load import read
        from tightship.frontends.onnx.lower import lower
    except ImportError as error:
        raise Unsupported(
            "reading ONNX", f"{error.name} is not installed", "pip install 'tightship[onnx]'"
        ) from error
    return lower(read(path), shape, **options)


def plan_graph(
    graph: Graph, budget: Any = None, *, progress: Progress | None = None, **options: Any
) -> Planned:
    """A verified plan for a graph that is there already; otherwise as `plan`.

    The results of a whole step leave the arena, as `fit` needs it. Those of a forward and backward pass alone, which
    are the gradients, are placed in it, unless ``hand_out`` says otherwise. A graph that only computes its results
    is searched for the order with the least peak.
    """
    from tightship.planners.default import Options
    from tightship.planners.default import plan as decide

    options = {"hand_out": any(op.phase == "update" for op in graph.ops), **options}
    if all(op.phase == "forward" for op in graph.ops):
        options = {"order": "beam", **options}
    try:
        chosen = Options(**options)
    except TypeError as error:
        rule = f"options are those of the default planner ({', '.join(Options.__dataclass_fields__)})"
        raise BadInput(rule, sorted(options), "plan") from error
    return Planned(decide(graph, budget, chosen, progress), graph)


def violations(planned: Planned | Plan, graph: Graph | None = None) -> list[Violation]:
    """Everything that is wrong with a plan; an empty list if nothing is."""
    from tightship.verify import verify

    made, graph = _parts(planned, graph)
    return verify(graph, made)


def check(planned: Planned | Plan, graph: Graph | None = None) -> None:
    """Raise ``VerificationFailed``, listing what is wrong, unless the plan is right.

    ``graph`` is needed where the plan does not come with its own.
    """
    found = violations(planned, graph)
    if found:
        raise VerificationFailed(found, place="check")


def load(path: str | os.PathLike[str]) -> Planned:
    """Read a plan that was saved with its graph. Nothing is executed or unpickled.

    Raises ``BadInput`` naming file and place if it is no plan, or was made for another graph than it carries.
    What the plan says is not checked: `check` does that.
    """
    from tightship.serde import load_plan

    made, graph = load_plan(path)
    if graph is None:
        raise BadInput("a plan's file carries the graph it was made for", "none", os.fspath(path))
    if graph.digest != made.digest:
        rule = f"a plan is for the graph in its file, whose digest is {graph.digest[:12]}"
        raise BadInput(rule, made.digest[:12], os.fspath(path))
    return Planned(made, graph)


def _parts(planned: Planned | Plan | Any, graph: Graph | None) -> tuple[Plan, Graph]:
    made = planned if isinstance(planned, Plan) else planned.plan
    graph = graph if graph is not None else getattr(planned, "graph", None)
    if graph is None:
        raise BadInput("a plan is checked against the graph it was made for", place="graph")
    return made, graph
