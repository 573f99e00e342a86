"""tightship fits a neural network's work into the memory there is.

    step = tightship.fit(model, loss_fn, optimizer, batch, budget="6GiB")  # train within a budget
    run = tightship.infer(model, sample)                                   # a forward pass in one arena
    plan = tightship.plan(model, sample, budget="60%")                     # decide only
    line = tightship.frontier(model, sample)                               # time against memory
    print(plan); plan.save("plan.json"); tightship.check(tightship.load("plan.json"))

`tightship.planners.planners()` lists the planners. Importing this package does not import torch.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from tightship.api import Frontier, Planned, check, fit, frontier, infer, load, max_batch, plan, tag
from tightship.errors import (
    BadInput,
    BudgetExceeded,
    Infeasible,
    PeerFailed,
    TightshipError,
    UnknownAlias,
    UnknownSize,
    Unsupported,
    VerificationFailed,
)
from tightship.graph import Graph
from tightship.plan import Plan

if TYPE_CHECKING:
    from tightship.execute.data_parallel import DataParallel
    from tightship.execute.weights import materialize
    from tightship.frontends.torch.structure import Pad

# ``plan`` is the function: `tightship.plan` as a module has been imported by now and takes the name no more.

__version__ = version("tightship")

__all__ = [
    "BadInput",
    "BudgetExceeded",
    "DataParallel",
    "Frontier",
    "Graph",
    "Infeasible",
    "Pad",
    "PeerFailed",
    "Plan",
    "Planned",
    "TightshipError",
    "UnknownAlias",
    "UnknownSize",
    "Unsupported",
    "VerificationFailed",
    "check",
    "fit",
    "frontier",
    "infer",
    "load",
    "materialize",
    "max_batch",
    "plan",
    "tag",
]


def __getattr__(name: str) -> Any:
    """What loads torch is there when it is asked for."""
    if name == "Pad":
        from tightship.frontends.torch.structure import Pad

        return Pad
    if name == "DataParallel":
        from tightship.execute.data_parallel import DataParallel

        return DataParallel
    if name == "materialize":
        from tightship.execute.weights import materialize

        return materialize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
