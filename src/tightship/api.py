"""The public functions. Importing this file is light: torch is imported when a function needs it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightship.errors import BadInput, VerificationFailed
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.planned import Frontier, Planned
from tightship.sources import capture, captured, graph_at, need_torch, read_graphdef, read_onnx, torch_saved
from tightship.units import parse_budget, resolve_budget

if TYPE_CHECKING:
    from tightship.execute.fit import TrainStep
    from tightship.execute.infer import Inference
    from tightship.planners import PlannerInfo
    from tightship.planners.batch import MaxBatch
    from tightship.violation import Violation

__all__ = [
    "Frontier",
    "Planned",
    "capture",
    "check",
    "fit",
    "frontier",
    "frontier_of",
    "infer",
    "load",
    "max_batch",
    "plan",
    "plan_graph",
    "plan_named",
    "systems",
    "violations",
]

Progress = Callable[[int, float, bool], bool]


def fit(
    model: Any, loss_fn: Any, optimizer: Any, sample_batch: Any, budget: Any = None, **options: Any
) -> TrainStep:
    """A training step of ``model`` that stays within ``budget``: see `tightship.execute.fit.fit`.

    ``step = fit(model, loss_fn, optimizer, batch, "6GiB")``, then ``loss = step(batch)`` for every batch.
    """
    need_torch("training a model")
    from tightship.execute.fit import fit as made

    return made(model, loss_fn, optimizer, sample_batch, budget, **options)


def infer(model: Any, sample: Any, budget: Any = None, **options: Any) -> Inference:
    """A forward pass of ``model`` in one arena, within ``budget``: see `tightship.execute.infer.infer`.

    ``run = infer(model, x)``, then ``y = run(x)`` gives what ``model(x)`` gives in evaluation mode.
    """
    need_torch("running a model")
    from tightship.execute.infer import infer as made

    return made(model, sample, budget, **options)


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

    Without ``loss_fn`` and ``optimizer`` the step is the forward and backward pass on ``sample``, or, without
    ``train``, the forward pass in evaluation mode that `infer` would run, its results in the arena; with them it
    is the step that `fit` would run. A model on the meta device, or of fake tensors, is planned with modelled
    times and without its weights ever existing; otherwise each op is measured once, on tensors made for it. The
    path of an ONNX model or a TensorFlow graph is planned for the sizes that ``sample`` gives its dimensions
    (``batch=4,seq=128``, or a mapping). ``budget`` is bytes, text (``6GiB``), or a percentage of the
    unplanned peak (``60%``). ``cache`` is the folder measurements are kept in, ``options`` are the default
    planner's.

    Raises ``Infeasible`` when no plan meets the budget, ``BadInput`` and ``Unsupported`` for what cannot be
    planned.
    """
    if budget is not None:
        budget = parse_budget(budget)  # before the model is measured
    graph = model
    if isinstance(model, (str, os.PathLike)):
        tensorflow = os.fspath(model).endswith((".pb", ".pbtxt", ".meta"))
        graph = (read_graphdef if tensorflow else read_onnx)(model, sample).graph
    elif not isinstance(model, Graph):
        graph = capture(model, sample, loss_fn=loss_fn, optimizer=optimizer, train=train, cache=cache)
    elif sample is not None:
        raise BadInput("a graph is planned without a sample", type(sample).__name__, "sample")
    return plan_graph(graph, budget, progress=progress, **options)


def plan_graph(
    graph: Graph, budget: Any = None, *, progress: Progress | None = None, **options: Any
) -> Planned:
    """A verified plan for a graph that is there already; otherwise as `plan`.

    The results of a whole step leave the arena, as `fit` needs it. Those of a forward and backward pass alone, which
    are the gradients, are placed in it, unless ``hand_out`` says otherwise.
    """
    from tightship.diagnose.remedies import advised

    return Planned(advised(graph, budget, _options(graph, options), progress), graph)


def _options(graph: Graph, given: dict[str, Any]) -> Any:
    from tightship.planners.default import Options

    given = {"hand_out": any(op.phase == "update" for op in graph.ops), **given}
    try:
        return Options(**given)
    except TypeError as error:
        rule = f"options are those of the default planner ({', '.join(Options.__dataclass_fields__)})"
        raise BadInput(rule, sorted(given), "plan") from error


def frontier(
    model: Any,
    sample: Any = None,
    points: int = 9,
    *,
    loss_fn: Any = None,
    optimizer: Any = None,
    train: bool = True,
    cache: Path | str | None = "default",
    peers: bool = True,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Frontier:
    """Time against memory for one step of ``model`` (or for a ``Graph``): verified plans for ``points`` budgets, from
    the least that is reached to what keeping everything needs.

    Arguments as for `plan`; ``seconds`` and ``work`` among the options are for all budgets together. With ``peers``
    the result has what fixed policies come to on the same graph: checkpoints per block, selective ones, and, for a
    model, what PyTorch's ``activation_memory_budget`` would save.
    """
    if isinstance(model, Graph):
        if sample is not None:
            raise BadInput("a graph is planned without a sample", type(sample).__name__, "sample")
        return frontier_of(model, points, peers=peers, say=say, **options)
    program = captured(model, sample, loss_fn=loss_fn, optimizer=optimizer, train=train, cache=cache)
    return frontier_of(program.graph, points, program=program, peers=peers, say=say, **options)


def frontier_of(
    graph: Graph,
    points: int = 9,
    *,
    program: Any = None,
    peers: bool = True,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Frontier:
    """The frontier of a graph that is there already; ``program`` is what it was captured as, if it was."""
    from tightship.planners.frontier import frontier as found

    saved = {}
    if peers and program is not None:
        if say is not None:
            say("what torch's activation_memory_budget saves")
        saved = torch_saved(program)
    made = found(graph, points, _options(graph, options), saved, say, peers=peers)
    return Frontier(**{f.name: getattr(made, f.name) for f in fields(made)})


def max_batch(
    model: Any,
    sample: Any,
    budget: Any,
    *,
    loss_fn: Any = None,
    optimizer: Any = None,
    train: bool = True,
    dim: int = 0,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> MaxBatch:
    """The largest batch whose step fits ``budget`` bytes: ``.batch``, with its ``.plan`` and ``.graph``.

    ``sample`` is one batch of any size that runs; its size is that of dimension ``dim`` that most of its tensors
    share. Sizes at which the model does not run are left out (``.refused`` says why); where it runs at multiples of a
    number only, such are tried (``.unit``). Steps are captured without data and with modelled times, so neither model
    nor batch needs memory, and scratch that ops take from the allocator is not counted: leave some room. Each size
    tried has a quarter of ``seconds`` and ``work``.

    Raises ``Infeasible`` if no size fits, ``BadInput`` for a model that runs at no other size than the sample's.
    """
    need_torch("capturing a model")
    from tightship.frontends.torch.structure import batch_size
    from tightship.planners.batch import max_batch as found

    start = batch_size(sample, dim)

    def graph_of(batch: int) -> Graph:
        return graph_at(model, sample, batch, loss_fn=loss_fn, optimizer=optimizer, train=train, dim=dim)

    o = _options(graph_of(start), options)
    o = replace(o, seconds=o.seconds / 4, work=o.work // 4)
    return found(graph_of, budget, o, start=start, say=say)


def plan_named(graph: Graph, name: str, budget: Any = None, **options: Any) -> Planned:
    """The verified plan of a named planner alone, with options of its own (``memonger``, ``grappler``, …).

    Those that share memory decide without a budget, those that evict decide for it (without one, as for no memory at
    all); the plan says whether it meets ``budget``. Raises ``BadInput`` for names and options that there are not.
    """
    known = systems()
    if name not in known:
        rule = f"a planner that plans alone is one of {', '.join(sorted(known))}"
        raise BadInput(rule, name, "planner")
    info = known[name]
    try:
        chosen = info.options(**options)
    except TypeError as error:
        rule = f"options are those of {name!r} ({', '.join(info.options.__dataclass_fields__)})"
        raise BadInput(rule, sorted(options), "plan") from error
    if info.group == "evict":
        from tightship.planners.default import plan_alone

        return Planned(plan_alone(graph, info, chosen, budget), graph)
    made = info.plan(graph, chosen)
    return Planned(replace(made, budget=resolve_budget(budget, made.peak_before, static=made.static)), graph)


def systems() -> dict[str, PlannerInfo]:
    """The planners that take a graph as it is and plan alone, by the name that `planners` gives them."""
    from tightship.planners import planners

    groups = ("", "share", "evict")
    return {n: i for n, i in planners().items() if i.group in groups and n != "default"}


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
