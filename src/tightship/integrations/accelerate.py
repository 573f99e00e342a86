"""accelerate's ``find_executable_batch_size``, which estimates or plans instead of running out of memory.

    @find_executable_batch_size(step=make_step, budget="20GiB")
    def train(batch_size, epochs): ...

    train(3)  # once, with the largest batch that fits

Two ways to say what fits: the loop as it is, in eager (``planned=False``: `tightship.estimate`), or the step that
`tightship.fit` would run within the budget (``planned=True``), which holds more.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from tightship.errors import BadInput
from tightship.execute import profile
from tightship.execute.estimate import estimate
from tightship.frontends.torch.capture.step import capture_step, module_of
from tightship.frontends.torch.structure import batch_size, resized
from tightship.planners import default
from tightship.planners.batch import LARGEST, max_batch
from tightship.units import BudgetLike, format_bytes, parse_budget

__all__ = ["find_executable_batch_size"]

P = ParamSpec("P")
R = TypeVar("R")
Step = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

_KEYS = ("model", "sample", "optimizer", "loss_fn")
_LOG = logging.getLogger("tightship.batch")


@dataclass(frozen=True)
class _Parts:
    """What one training step is made of."""

    model: Any
    sample: Any
    optimizer: Any = None
    loss_fn: Any = None


def find_executable_batch_size(
    function: None = None,
    *,
    step: Step,
    budget: BudgetLike = None,
    planned: bool = False,
    starting_batch_size: int = LARGEST,
    device: str | None = None,
    seconds: float = 20.0,
) -> Callable[[Callable[Concatenate[int, P], R]], Callable[P, R]]:
    """A decorator that calls a function once, with the largest batch that fits as its first argument.

    ``step``: the parts of one training step, ``{"model": …, "sample": …, "optimizer": …, "loss_fn": …}``, or a
    function without arguments that makes them, as for the command line; a model on the meta device takes no memory.
    They are asked for at the first call, and the answer is kept (``train.batch_size()``). ``budget`` is bytes or text
    such as ``20GiB``; with ``device`` (a name such as ``h100``) its context is counted, and its memory is the budget
    where none is given. ``starting_batch_size`` is the most, as in accelerate. ``planned``: the largest batch of a
    step of ``tightship.fit`` within the budget; ``seconds`` are for planning.

    Raises ``Infeasible`` where not even a batch of 1 fits, ``BadInput`` for arguments that make no sense.
    """
    if function is not None:  # used without parentheses
        raise BadInput(
            "the step is needed: @find_executable_batch_size(step=…, budget=…)", place="batch size"
        )
    if not isinstance(starting_batch_size, int) or starting_batch_size < 1:
        raise BadInput(
            "starting_batch_size must be a whole number, at least 1", starting_batch_size, "batch size"
        )
    if budget is None and (planned or device is None):
        raise BadInput("the largest batch needs a budget in bytes, such as 20GiB", place="batch size")
    if budget is not None and parse_budget(budget).bytes is None:
        raise BadInput(
            f"{budget}: the largest batch needs a budget in bytes, such as 20GiB", place="batch size"
        )

    @functools.cache
    def size() -> int:
        parts = _parts_of(step)
        if planned:
            found = _planned(parts, budget, starting_batch_size, seconds)
        else:
            answer = estimate(parts.model, parts.sample, parts.optimizer, parts.loss_fn, device)
            found = answer.largest_batch(budget, most=starting_batch_size)
        _LOG.info("largest batch: %d", found)
        return found

    def decorate(inner: Callable[Concatenate[int, P], R]) -> Callable[P, R]:
        @functools.wraps(inner)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return inner(size(), *args, **kwargs)

        call.batch_size = size  # type: ignore[attr-defined]
        return call

    return decorate


def _parts_of(step: Step) -> _Parts:
    made = step() if callable(step) else step
    if not isinstance(made, Mapping):
        rule = "a step is a mapping with model, sample, optimizer and loss_fn"
        raise BadInput(rule, type(made).__name__, "batch size")
    unknown = [k for k in made if k not in _KEYS]
    missing = [k for k in ("model", "sample") if k not in made]
    if unknown or missing:
        what = f"unknown {', '.join(map(str, unknown))}" if unknown else f"{', '.join(missing)} missing"
        raise BadInput(f"{what}: a step has {', '.join(_KEYS)}", place="batch size")
    return _Parts(**made)


def _planned(parts: _Parts, budget: BudgetLike, most: int, seconds: float) -> int:
    """The largest batch of a planned step. Sizes above ``most`` are refused, so that the search stays below."""
    model = module_of(parts.model)

    def graph_of(n: int) -> Any:
        if n > most:
            raise BadInput(f"a batch of {n} is above {most}", place="batch size")
        program = capture_step(model, parts.loss_fn, parts.optimizer, resized(parts.sample, n, 0))
        return profile.model(program).graph

    assert budget is not None
    start = min(batch_size(parts.sample), most)
    options = default.read_options({"seconds": seconds, "hand_out": True}, "batch size")
    found = max_batch(graph_of, budget, options, start=start)
    _LOG.info("planned: %s of %s", format_bytes(found.plan.peak), budget)
    return found.batch
