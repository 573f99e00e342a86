"""tightship fits a neural network's work into the memory there is.

    step = tightship.fit(model, loss_fn, optimizer, batch, budget="6GiB")  # train within a budget
    run = tightship.infer(model, sample)                                   # a forward pass in one arena
    need = tightship.estimate(model, batch, optimizer, loss_fn)            # what it needs as it is: will it fit?
    plan = tightship.plan(model, sample, budget="60%")                     # decide only
    line = tightship.frontier(model, sample)                               # time against memory
    print(plan); plan.save("plan.json"); tightship.check(tightship.load("plan.json"))
    print(tightship.explain("snapshot.pickle"))                            # why a GPU was full

`tightship.planners.planners()` lists the planners. Importing this package does not import torch.
"""

# ruff: noqa: E402 - Ctrl-C is looked after before anything that takes long is imported
from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType


def _on_error(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """Ctrl-C while the command line is still being imported ends it as it does later: a word, and status 130."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, where)
        return
    if "--json" in sys.argv:
        print('{"error": {"type": "Interrupted", "message": "interrupted"}}', flush=True)
    print("tightship: interrupted", file=sys.stderr, flush=True)
    os._exit(130)


if os.path.basename(sys.argv[0]) == "tightship" or sys.orig_argv[1:3] == ["-m", "tightship"]:
    sys.excepthook = _on_error

from importlib.metadata import version
from typing import Any

from tightship.api import (
    Frontier,
    Planned,
    check,
    diff,
    estimate,
    explain,
    fit,
    frontier,
    infer,
    load,
    max_batch,
    plan,
    tag,
)
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
    "diff",
    "estimate",
    "explain",
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
    """What loads torch or jax is there when it is asked for."""
    if name == "Pad":
        from tightship.frontends.torch.structure import Pad

        return Pad
    if name == "DataParallel":
        from tightship.execute.data_parallel import DataParallel

        return DataParallel
    if name == "jax":  # `tightship.jax.fit`
        from importlib import import_module

        return import_module("tightship.integrations.jax")
    if name == "materialize":
        from tightship.execute.weights import materialize

        return materialize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
