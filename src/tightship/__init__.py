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

# `compat_distributed.launched_together`, which imports torch.
if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1"):
    from tightship.execute.early_end import watch

    watch()

from types import ModuleType
from typing import Any

if TYPE_CHECKING:
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
        CheckFailed,
        Infeasible,
        PeerFailed,
        TightshipError,
        UnknownAlias,
        UnknownSize,
        Unsupported,
        VerificationFailed,
    )
    from tightship.execute.data_parallel import DataParallel
    from tightship.execute.weights import materialize
    from tightship.frontends.torch.structure import Pad
    from tightship.graph import Graph
    from tightship.plan import Plan

    __version__: str

__all__ = [
    "BadInput",
    "BudgetExceeded",
    "CheckFailed",
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


_FROM = {
    "tightship.errors": (
        "BadInput", "BudgetExceeded", "CheckFailed", "Infeasible", "PeerFailed", "TightshipError", "UnknownAlias",
        "UnknownSize", "Unsupported", "VerificationFailed",
    ),
    "tightship.graph": ("Graph",),
    "tightship.plan": ("Plan",),
    "tightship.execute.data_parallel": ("DataParallel",),
    "tightship.execute.weights": ("materialize",),
    "tightship.frontends.torch.structure": ("Pad",),
}  # fmt: skip
_WHERE = dict.fromkeys(__all__, "tightship.api") | {
    n: module for module, names in _FROM.items() for n in names
}
"""The module that has a public name, which is imported when the name is asked for."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "jax":  # `tightship.jax.fit`
        return import_module("tightship.jax")
    if name == "__version__":
        from importlib.metadata import version

        globals()[name] = version("tightship")
        return globals()[name]
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_WHERE[name]), name)
    if name != "plan":
        globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """``tightship.plan`` is the function, also when the module of that name has been imported."""

    @property
    def plan(self) -> Any:
        return __getattr__("plan")

    @plan.setter
    def plan(self, module: ModuleType) -> None:
        pass


sys.modules[__name__].__class__ = _Package
