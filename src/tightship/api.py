"""The public functions. Importing this file is light: torch is imported when a function needs it.

Each function fills in a request, the same that the command line parses its arguments into, and solves it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightship.errors import BadInput, VerificationFailed, Violation
from tightship.graph import Graph
from tightship.plan import Plan
from tightship.planners.batch import MaxBatch
from tightship.planners.default import (
    PlanOptions,
    read_options,
)
from tightship.requests import (
    BatchRequest,
    FrontierRequest,
    PlanRequest,
    Progress,
    Say,
    SnapshotRequest,
    systems,
)
from tightship.result import Compared, Explained, Frontier, Planned
from tightship.sources import ModelStep, need_torch, read_model
from tightship.units import BudgetLike, parse_budget

if TYPE_CHECKING:
    from typing import TypeAlias, Unpack

    import torch

    from tightship.execute.data_parallel import DataParallel
    from tightship.execute.estimate import Estimate, EstimateOptions
    from tightship.execute.infer import Inference
    from tightship.execute.settings import Planner
    from tightship.execute.train_step import TrainStep
    from tightship.frontends.torch.structure import LossFn, Pad
    from tightship.report.progress import Preparing

    Model: TypeAlias = torch.nn.Module | torch.export.ExportedProgram
    Loss: TypeAlias = LossFn | torch.nn.Module

__all__ = [
    "Compared", "Explained", "FitOptions", "Frontier", "InferOptions", "Planned", "check", "diff", "estimate",
    "explain", "fit", "frontier", "infer", "load", "max_batch", "plan", "plan_graph", "plan_named", "systems",
    "tag", "violations",
]  # fmt: skip


# --- running ---


class FitOptions(PlanOptions, total=False):
    """What `fit` takes by keyword, the default planner's options among them."""

    planner: Planner | None
    strict: bool
    cache: Path | str | None
    seconds_per_op: float
    variants: int
    folder: Path | str | None
    pinned: int | str | None
    prepare: bool
    verify_every: int
    independent: bool
    parallel: DataParallel | None
    accumulate: int
    clip_norm: float | None
    clip_value: float | None
    scaler: torch.amp.GradScaler | None
    skip_nonfinite: bool
    split: bool
    pad_to: Pad | Sequence[Pad] | None
    mode: str


class InferOptions(PlanOptions, total=False):
    """What `infer` takes by keyword, the default planner's options among them."""

    dynamic: bool
    fresh: bool
    strict: bool
    cache: Path | str | None
    seconds_per_op: float
    variants: int


def fit(
    model: torch.nn.Module,
    loss_fn: Loss | None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    sample_batch: object,
    budget: BudgetLike = None,
    *,
    progress: bool = True,
    **options: Unpack[FitOptions],
) -> TrainStep:
    """A training step of ``model`` that stays within ``budget``: see `tightship.execute.fit.fit`.

    ``step = fit(model, loss_fn, optimizer, batch, "6GiB")``, then ``loss = step(batch)`` for every batch. Where
    preparing takes longer than a second or two, a line on standard error says what it does, if that is a terminal,
    and the log ``tightship`` (INFO) otherwise; ``progress=False``: neither.
    """
    need_torch("training a model")
    from tightship.execute.fit import fit as prepare

    return prepare(model, loss_fn, optimizer, sample_batch, budget, progress=_preparing(progress), **options)


def infer(
    model: Model,
    sample: object,
    budget: BudgetLike = None,
    *,
    progress: bool = True,
    **options: Unpack[InferOptions],
) -> Inference:
    """A forward pass of ``model`` in one arena, within ``budget``: see `tightship.execute.infer.infer`.

    ``run = infer(model, x)``, then ``y = run(x)`` gives what ``model(x)`` gives in evaluation mode. ``progress`` as
    for `fit`.
    """
    need_torch("running a model")
    from tightship.execute.infer import infer as prepare

    return prepare(model, sample, budget, progress=_preparing(progress), **options)


def _preparing(shown: bool) -> Preparing | None:
    from tightship.report.progress import Preparing

    return Preparing() if shown else None


def estimate(
    model: Model,
    sample: object,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    loss_fn: Loss | None = None,
    device: str | None = None,
    **options: Unpack[EstimateOptions],
) -> Estimate:
    """What a loop needs as it is, nothing allocated: see `tightship.execute.estimate.estimate`.

    ``estimate(model, batch, optimizer, loss_fn, device="h100")``, then ``.fits("24GiB")``, or print it.
    """
    need_torch("an estimate")
    from tightship.execute.estimate import estimate as run

    return run(model, sample, optimizer, loss_fn, device, **options)


def tag(
    joint: torch.fx.GraphModule,
    budget: BudgetLike,
    *,
    outputs: int | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Tags for PyTorch's partitioners on any joint fx graph: see `tightship.integrations.torchtitan.tag`.

    ``tag(joint, "6GiB")`` writes a ``CheckpointPolicy`` into each ``node.meta["recompute"]``.
    """
    need_torch("tagging a joint graph")
    from tightship.integrations.torchtitan import tag as write

    return write(joint, budget, outputs=outputs, **options)


# --- planning ---


def plan(
    model: Model | Graph | str | os.PathLike[str],
    sample: object = None,
    budget: BudgetLike = None,
    *,
    loss_fn: Loss | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    train: bool = True,
    cache: Path | str | None = "default",
    progress: Progress | None = None,
    **options: Unpack[PlanOptions],
) -> Planned:
    """Decide only: a verified plan for one step of ``model`` (or for a ``Graph``) within ``budget``.

    Without ``loss_fn`` and ``optimizer`` the step is the forward and backward pass on ``sample``, or, without
    ``train``, the forward pass in evaluation mode that `infer` would run, its results in the arena; with them it
    is the step that `fit` would run. A model on the meta device, or of fake tensors, is planned with modeled
    times and without its weights ever existing; otherwise each op is measured once, on tensors made for it. The
    path of an ONNX model or a TensorFlow graph is planned for the sizes that ``sample`` gives its dimensions
    (``batch=4,seq=128``, or a mapping). ``budget`` is bytes, text (``6GiB``), or a percentage of the
    unplanned peak (``60%``). ``cache`` is the folder measurements and plans are kept in,
    ``options`` are the default planner's.

    Raises ``Infeasible`` when no plan meets the budget, ``BadInput`` and ``Unsupported`` for what cannot be
    planned.
    """
    if budget is not None:
        budget = parse_budget(budget)  # before the model is measured
    if isinstance(model, (str, os.PathLike)):
        read: Any = read_model(model, sample)
        return PlanRequest(read.graph, budget, options=options, program=read).solve(progress)
    if isinstance(model, Graph):
        return plan_graph(_alone(model, sample), budget, progress=progress, **options)
    seconds = read_options(options, "plan").seconds
    step, began = ModelStep(model, sample, loss_fn, optimizer, train), time.perf_counter()
    program = step.program(cache, seconds)
    took = time.perf_counter() - began
    request = PlanRequest(program.graph, budget, None, options, cache, took, program, step)
    return request.solve(progress)


def plan_graph(
    graph: Graph,
    budget: BudgetLike = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[PlanOptions],
) -> Planned:
    """A verified plan for a graph that is there already; otherwise as `plan`.

    The results of a whole step leave the arena, as `fit` needs it. Those of a forward and backward pass alone, which
    are the gradients, are placed in it, unless ``hand_out`` says otherwise.
    """
    return PlanRequest(graph, budget, options=options).solve(progress)


def plan_named(graph: Graph, name: str, budget: BudgetLike = None, **options: object) -> Planned:
    """The verified plan of a named planner alone, with options of its own (``memonger``, ``grappler``, …).

    Those that share memory decide without a budget, those that evict decide for it (without one, as for no memory at
    all); the plan says whether it meets ``budget``. Raises ``BadInput`` for names and options that there are not.
    """
    return PlanRequest(graph, budget, name, options).solve()


def frontier(
    model: Model | Graph,
    sample: object = None,
    points: int = 9,
    *,
    loss_fn: Loss | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    train: bool = True,
    cache: Path | str | None = "default",
    peers: bool = True,
    say: Say | None = None,
    **options: Unpack[PlanOptions],
) -> Frontier:
    """Time against memory for one step of ``model`` (or for a ``Graph``): verified plans for ``points`` budgets, from
    the least that is reached to what keeping everything needs.

    Arguments as for `plan`; ``seconds`` and ``work`` among the options are for all budgets together. With ``peers``
    the result has what fixed policies come to on the same graph: checkpoints per block, selective ones, and, for a
    model, what PyTorch's ``activation_memory_budget`` would save. With ``split`` or ``stream`` in ``allow`` it goes
    on below what one graph reaches, and ``.graph_of(plan)`` is the graph that a plan is for.
    """
    if isinstance(model, Graph):
        return FrontierRequest(_alone(model, sample), points, None, peers, options).solve(say)
    step = ModelStep(model, sample, loss_fn, optimizer, train)
    program = step.program(cache)
    return FrontierRequest(program.graph, points, program, peers, options, step).solve(say)


def max_batch(
    model: Model,
    sample: object,
    budget: BudgetLike,
    *,
    loss_fn: Loss | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    train: bool = True,
    dim: int = 0,
    say: Say | None = None,
    **options: Unpack[PlanOptions],
) -> MaxBatch:
    """The largest batch whose step fits ``budget`` bytes: ``.batch``, with its ``.plan`` and ``.graph``.

    ``sample`` is one batch of any size that runs; its size is that of dimension ``dim`` that most of its tensors
    share. Sizes at which the model does not run are left out (``.refused`` says why); where it runs at multiples of a
    number only, such are tried (``.unit``). Steps are captured without data and with modeled times, so neither model
    nor batch needs memory, and workspace that ops take from the allocator is not counted: leave some room. Each size
    tried has a quarter of ``seconds`` and ``work``.

    Raises ``Infeasible`` if no size fits, ``BadInput`` for a model that runs at no other size than the sample's.
    """
    step = ModelStep(model, sample, loss_fn, optimizer, train)
    return BatchRequest(step, budget, dim, options).solve(say)


def _alone(graph: Graph, sample: object) -> Graph:
    """A graph that was given in place of a model."""
    if sample is not None:
        raise BadInput(f"a graph takes no sample, got one of type {type(sample).__name__}", place="sample")
    return graph


# --- what is there already ---


def explain(
    path: str | os.PathLike[str], *, seconds: float = 10.0, alloc_conf: str | None = None
) -> Explained:
    """Why a device was full: what a memory snapshot of PyTorch's says (``torch.cuda.memory._dump_snapshot``).

    Says which lines make up the peak, which bytes lie idle and what keeps them, and what ``empty_cache``, settings of
    the allocator or a planned arena would have saved. ``seconds``: what the search for the least arena may take of
    each device; ``alloc_conf``: settings to try, as ``PYTORCH_ALLOC_CONF`` has them. The file is not unpickled:
    nothing in it is run.

    Raises ``BadInput`` for what is no such snapshot, incomplete, or has anything but plain values.
    """
    return SnapshotRequest(path, seconds, alloc_conf).solve()


def violations(planned: Planned | Plan, graph: Graph | None = None) -> list[Violation]:
    """Everything that is wrong with a plan; an empty list if nothing is."""
    from tightship.verify import verify

    plan = planned if isinstance(planned, Plan) else planned.plan
    graph = graph if graph is not None else getattr(planned, "graph", None)
    if graph is None:
        raise BadInput("the graph is missing: check(plan, graph) takes the graph that the plan was made for")
    return verify(graph, plan)


def check(planned: Planned | Plan, graph: Graph | None = None) -> None:
    """Raise ``VerificationFailed``, listing what is wrong, unless the plan is right.

    ``graph`` is needed where the plan does not come with its own.
    """
    if faults := violations(planned, graph):
        raise VerificationFailed(faults, place="check")


def load(path: str | os.PathLike[str]) -> Planned:
    """Read a plan that was saved with its graph. Nothing is executed or unpickled.

    Raises ``BadInput`` naming file and place if it is no plan, or was made for another graph than it carries.
    What the plan says is not checked: `check` does that.
    """
    from tightship.serde import load_plan

    plan, graph = load_plan(path)
    if graph is None:
        raise BadInput("the plan's file does not carry its graph: save it with one", place=os.fspath(path))
    check_digest(plan, graph, os.fspath(path))
    return Planned(plan, graph)


def diff(one: Planned | str | os.PathLike[str], two: Planned | str | os.PathLike[str]) -> Compared:
    """What two plans (or plans' files) do differently, and what each difference costs in bytes and seconds.

    Each difference is simulated in the first plan, alone. Plans of different graphs are matched by the names of
    tensors; what has no match is listed. Raises ``BadInput`` for a file that is no plan with its graph.
    """
    from tightship.diagnose.decisions import difference

    a, b = (x if isinstance(x, Planned) else load(x) for x in (one, two))
    return Compared(a, b, difference((a.graph, a.plan), (b.graph, b.plan)))


def check_digest(plan: Plan, graph: Graph, place: str) -> None:
    """Raise ``BadInput`` where a plan was made for another graph than the one beside it."""
    if plan.digest != graph.digest:
        rule = (
            f"the plan is for another graph: its digest is {plan.digest[:12]}, that of the graph in the file "
        )
        raise BadInput(f"{rule}{graph.digest[:12]}", place=place)
