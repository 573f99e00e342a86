"""A training loop run twice in lockstep, in eager and by ``fit``, and compared after every step in all that it keeps.

A pattern is a function that builds a `Loop`. `identical` and `refused` make a test of it:

    @identical(plans=1)
    def test_a_number_in_a_closure():
        ...
        return Loop(model, loss_fn, optimizer)
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import random
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from support import plans
from support.state import differences, snapshot
from tightship.errors import BadInput, Unsupported
from tightship.execute.fit import fit
from tightship.execute.interpreter import PeakMismatch

__all__ = [
    "Loop",
    "Verdict",
    "adam",
    "identical",
    "mlp",
    "namespace",
    "pairs",
    "raises",
    "refused",
    "run",
    "sgd",
]


# --- what patterns are made of --------------------------------------------------------------------------------


def pairs(number: int) -> Any:
    """A batch of six rows of four numbers, each with one of three classes."""
    g = torch.Generator().manual_seed(number)
    return torch.randn(6, 4, generator=g), torch.randint(0, 3, (6,), generator=g)


@dataclass
class Loop:
    """``before(k)`` and ``after(k, out)`` run around step ``k`` of ``steps``, which runs inside ``around(k)``.

    ``watched()`` is what the loop keeps beside model and optimizer. ``others``: further losses and their optimizers,
    each trained on the same batch after the first.
    """

    model: nn.Module
    loss_fn: Callable[[Any, Any], Any]
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], Any] = pairs
    before: Callable[[int], None] = lambda _k: None
    after: Callable[[int, Any], None] = lambda _k, _out: None
    around: Callable[[int], contextlib.AbstractContextManager[Any]] = lambda _k: contextlib.nullcontext()
    watched: Callable[[], Any] = lambda: None
    others: Sequence[tuple[Callable[[Any, Any], Any], torch.optim.Optimizer]] = ()
    steps: int = 7


def mlp(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9} | options)


def adam(model: nn.Module, **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), **{"lr": 0.01} | options)


def namespace(source: str) -> types.ModuleType:
    """The code as a module of its own: what is global in it is shared with no other run."""
    module = types.ModuleType("user_code")
    vars(module).update(torch=torch, nn=nn, F=nn.functional, np=np, random=random)
    exec(compile(source, "user_code.py", "exec"), vars(module))
    return module


# --- the two sides --------------------------------------------------------------------------------------------


class _Side:
    """A loop with random states of its own."""

    def __init__(self, build: Callable[[], Loop]) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.loop = build()
        self._keep_random()

    def _keep_random(self) -> None:
        self._random = torch.get_rng_state(), random.getstate(), np.random.get_state()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        torch.set_rng_state(self._random[0])
        random.setstate(self._random[1])
        np.random.set_state(self._random[2])
        try:
            yield
        finally:
            self._keep_random()

    def kept(self) -> dict[str, Any]:
        """All that the next step depends on. Gradients are not among it: ``fit`` leaves none."""
        loop = self.loop
        taken = snapshot(loop.model, loop.optimizer)
        taken |= {f"optimizer {k}": snapshot(None, o)["optimizer"] for k, (_, o) in enumerate(loop.others, 2)}
        taken["watched"] = copy.deepcopy(_detached(loop.watched()))
        taken.pop("gradients")
        taken["attributes"].pop(
            "_opt_called", None
        )  # read by schedulers alone, and set where there is none, too
        return taken

    def eager(self, number: int) -> Any:
        loop = self.loop
        return self._step(number, [functools.partial(_eager, loop.model, f, o) for f, o in self.parts])

    def fitted(self, number: int, steps: Sequence[Any]) -> Any:
        return self._step(number, steps)

    def _step(self, number: int, steps: Sequence[Any]) -> Any:
        loop = self.loop
        with self.turn():
            loop.before(number)
            batch = loop.batch(number)
            with loop.around(number):
                outs = [_detached(step(batch)) for step in steps]
            loop.after(number, outs[0])
        return outs

    @property
    def parts(self) -> list[tuple[Any, torch.optim.Optimizer]]:
        return [(self.loop.loss_fn, self.loop.optimizer), *self.loop.others]


def _eager(model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    optimizer.zero_grad(set_to_none=True)
    out = loss_fn(model, batch)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    optimizer.step()
    return out


def _detached(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, Mapping):
        return {k: _detached(v) for k, v in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(_detached, tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(_detached, tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {f.name: _detached(getattr(tree, f.name)) for f in dataclasses.fields(tree)}
    return tree


# --- a run ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """``kind``: identical, refused, raises (as eager does), or different. ``step`` is where it ended, -1 for ``fit``
    itself; ``plans`` is how often something was planned."""

    kind: str
    step: int
    plans: int
    sentence: str = ""

    def __str__(self) -> str:
        where = "in fit" if self.step < 0 else f"after step {self.step}"
        return f"{self.kind} {where} ({self.plans} plans): {self.sentence}"


def run(build: Callable[[], Loop], cache: Any, **more: Any) -> Verdict:
    """Runs the pattern on both sides; ``more`` goes to ``fit``. Errors that are neither refusals nor eager's own are
    raised."""
    planned: list[int] = []

    def planner(graph: Any, budget: Any) -> Any:
        planned.append(len(graph.ops))
        return plans.keep(graph, budget)

    options = {"planner": planner, "strict": True, "cache": cache, "seconds_per_op": 0.0} | more
    eager, fitted = _Side(build), _Side(build)
    before = fitted.kept()
    steps = []
    try:
        with fitted.turn():
            batch = fitted.loop.batch(0)
            with fitted.loop.around(0):
                for loss_fn, optimizer in fitted.parts:
                    steps.append(fit(fitted.loop.model, loss_fn, optimizer, batch, **options))
    except (Unsupported, BadInput) as refusal:
        _check_refused(before, fitted, batch)
        return Verdict("refused", -1, len(planned), str(refusal))
    wrong = differences(before, fitted.kept(), "after fit")
    if wrong:
        return Verdict("different", -1, len(planned), "; ".join(wrong[:6]))
    for number in range(fitted.loop.steps):
        verdict = _both(number, eager, fitted, steps)
        if verdict:
            return dataclasses.replace(verdict, plans=len(planned))
    return Verdict("identical", fitted.loop.steps - 1, len(planned))


def _both(number: int, eager: _Side, fitted: _Side, steps: Sequence[Any]) -> Verdict | None:
    """One step of each; None where nothing differs."""
    error: Exception | None = None
    try:
        expected = eager.eager(number)
    except Exception as e:
        error = e
    before = fitted.kept()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PeakMismatch)
        try:
            got = fitted.fitted(number, steps)
        except (Unsupported, BadInput) as refusal:
            _check_refused(before, fitted, fitted.loop.batch(number))
            return Verdict("refused", number, 0, str(refusal))
        except Exception as e:
            if error is None or type(e) is not type(error) or str(e) != str(error):
                raise
            return Verdict("raises", number, 0, f"{type(e).__name__}: {e}")
    if error is not None:
        raise AssertionError(f"step {number} raises in eager alone") from error
    wrong = differences(expected, got, "results") + differences(eager.kept(), fitted.kept(), "after the step")
    wrong += [f"{n} has a gradient" for n, p in fitted.loop.model.named_parameters() if p.grad is not None]
    return Verdict("different", number, 0, "; ".join(wrong[:6])) if wrong else None


def _check_refused(before: dict[str, Any], side: _Side, batch: Any) -> None:
    """A refused step has trained nothing and left no tensor without data behind: eager can go on."""
    now = side.kept()
    rows = ("parameters", "buffers", "optimizer")
    wrong = [d for n in rows for d in differences(before[n], now[n], n)]
    assert not wrong, f"a refused step has changed {wrong}"
    fakes = [
        n for n, t in {**now["parameters"], **now["buffers"]}.items() if type(t).__name__ == "FakeTensor"
    ]
    assert not fakes, f"a refused step has left {fakes} without data"


# --- tests of patterns ----------------------------------------------------------------------------------------

Pattern = Callable[[], Loop]


@pytest.fixture(scope="session")
def measurements(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("measurements")


def _test(build: Pattern, check: Callable[[Verdict], None], **options: Any) -> Callable[[Any], None]:
    def test(measurements: Any) -> None:
        check(run(build, measurements, **options))

    test.__name__, test.__qualname__, test.__module__ = build.__name__, build.__qualname__, build.__module__
    test.__doc__ = build.__doc__
    return test


def identical(plans: int | None = 1, **options: Any) -> Callable[[Pattern], Callable[[Any], None]]:
    """The pattern trains as in eager, with so many plans at most (None: however many). ``options`` go to ``fit``."""

    def check(verdict: Verdict) -> None:
        assert verdict.kind == "identical", verdict
        assert plans is None or verdict.plans <= plans, verdict

    return lambda build: _test(build, check, **options)


def refused(
    sentence: str, step: int | None = None, **options: Any
) -> Callable[[Pattern], Callable[[Any], None]]:
    """The pattern is refused with an error that holds ``sentence``, in that step if it is given (-1: by ``fit``)."""

    def check(verdict: Verdict) -> None:
        assert verdict.kind == "refused" and sentence in verdict.sentence, verdict
        assert step is None or verdict.step == step, verdict

    return lambda build: _test(build, check, **options)


def raises(sentence: str) -> Callable[[Pattern], Callable[[Any], None]]:
    """The pattern's own error comes out in the step in which eager raises it."""

    def check(verdict: Verdict) -> None:
        assert verdict.kind == "raises" and sentence in verdict.sentence, verdict

    return lambda build: _test(build, check)
