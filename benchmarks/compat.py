"""What the tables of docs/compatibility.md are made of: a row, what came of it, and a training loop run twice.

A table is a module ``compat_NAME.py`` beside this file with a ``TITLE`` and ``rows()``, which yields `Row`s; the
command ``benchmarks/compatibility.py`` finds it by its name, and runs each row in a process of its own. A row's
``run`` imports what it needs itself and returns an `Outcome`; an error that it raises is a row that has failed.

Most rows run one loop: `trained` takes what builds a `Training`. Loops of another form make two `Side`s, one of them
fitted, and hand them to `lockstep`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import tightship
from tightship.errors import BadInput, Infeasible, Unsupported
from tightship.execute.eager import bit_identical
from tightship.execute.interpreter import Fallback, PeakMismatch
from tightship.integrations.torch_compile import compiled_notes, compiled_plans

__all__ = [
    "BUDGET",
    "COMPILED",
    "GOOD",
    "Outcome",
    "Row",
    "Side",
    "Training",
    "adamw",
    "compiled",
    "fitted",
    "hugging_face",
    "lockstep",
    "through_backend",
    "trained",
]

BUDGET = "static+60%"
QUICK = {"cache": None, "seconds_per_op": 0.001, "seconds": 3.0}
"""What else `tightship.fit` is told: nothing kept, and little time for measuring and planning."""
STEPS = 4
COMPILED = "80%"
"""The budget of compiled steps, of what they take without one."""
CLOSE = 1e-3
"""How far a compiled step's results may be from eager's, over the greater of them and 1."""
AS_EXACT = 3
"""How many times as far from double precision as eager they may be where that is more."""
RAN = ("identical", "close")
GOOD = ("identical", "close", "eager", "refused")
"""Kinds of outcomes that are no fault; the others are ``different``, ``mismatch`` and ``failed``."""


@dataclass(frozen=True)
class Outcome:
    """What came of a row: ``kind`` is ``identical`` (to eager, with planned = measured and no miss), ``eager``
    (nothing can be planned: steps run in eager, after a warning), ``refused`` (``sentence`` says why, of these two),
    ``close`` (of compiled steps: results near eager's, where eager draws no random numbers, planned = measured),
    ``different``, ``mismatch`` (of memory) or ``failed``. Peaks are bytes, ``seconds`` those of the processor that
    preparing took."""

    kind: str
    sentence: str = ""
    unplanned: int = 0
    planned: int = 0
    budget: int = 0
    seconds: float = 0.0
    steps: int = 0


@dataclass(frozen=True)
class Row:
    """A line of a table: what it is called, the modules it imports, and what runs it."""

    name: str
    packages: tuple[str, ...]
    run: Callable[[], Outcome]


# --- a loop that is run twice ---------------------------------------------------------------------------------


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass
class Training:
    """``loss_fn`` is as `tightship.fit` takes it, ``batch(k)`` the batch of step k; ``optimizer`` makes one
    of parameters.

    ``others``: further losses with their parameters, each trained on the same batch after the first (a GAN's
    generator after its discriminator).
    """

    model: nn.Module
    loss_fn: Any
    batch: Callable[[int], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    parameters: Callable[[nn.Module], Any] = nn.Module.parameters
    others: Sequence[tuple[Any, Callable[[nn.Module], Any]]] = ()
    steps: int = STEPS


def trained(build: Callable[[], Training], budget: str = BUDGET, **options: Any) -> Outcome:
    """The loop that ``build`` makes, once in eager and once within ``budget``; ``options`` go to `tightship.fit`."""
    eager, ours = _side(build), _side(build)
    loop = ours.loop
    losses = [(loop.loss_fn, loop.parameters), *loop.others]
    try:
        steps, began = [], time.process_time()
        with ours.turn():
            for (loss_fn, _), optimizer in zip(losses, ours.optimizers, strict=True):
                steps.append(fitted(loop.model, loss_fn, optimizer, loop.batch(0), budget, **options))
        seconds = time.process_time() - began
    except (Unsupported, BadInput) as refusal:
        return Outcome("refused", str(refusal))
    ours.fitted = steps
    ours.step = lambda k: [step(ours.loop.batch(k)) for step in steps]
    return dataclasses.replace(lockstep(eager, ours, loop.steps), seconds=seconds)


def compiled(build: Callable[[], Training], _budget: str = "", **options: Any) -> Outcome:
    """As `trained`, in compiled mode within `COMPILED`, whatever budget a row has in exact mode: as near to eager as
    fused code is, where it draws no random numbers (Inductor draws others); finite in any case."""
    eager, ours = _side(build), _side(build)
    loop, more = ours.loop, {"mode": "compiled", "seconds": 10.0, **options}
    losses = [(loop.loss_fn, loop.parameters), *loop.others]
    try:
        began = time.process_time()
        with ours.turn():
            steps = [
                fitted(loop.model, loss_fn, optimizer, loop.batch(0), COMPILED, **more)
                for (loss_fn, _), optimizer in zip(losses, ours.optimizers, strict=True)
            ]
        seconds = time.process_time() - began
        ours.step = lambda k: [step(loop.batch(k)) for step in steps]
        found = near(build, eager, ours)
    except (Unsupported, BadInput) as refusal:
        return Outcome("refused", str(refusal))
    if found.kind != "close":
        return found
    measured = [step.measure() for step in steps]
    if any(m["planned_peak"] is None for m in measured):
        return Outcome("eager", "; ".join(note for step in steps for note in step.notes))
    if any(m["misses"] or m["measured_peak"] != m["planned_peak"] for m in measured):
        return Outcome("mismatch", str(measured))
    tops = [max(m[k] or 0 for m in measured) for k in ("unplanned_peak", "planned_peak", "budget")]
    return Outcome("close", found.sentence, *tops, seconds, loop.steps)


def near(build: Callable[[], Training], eager: Side, ours: Side) -> Outcome:
    """Both sides step by step: ``close`` where results of ``ours``, which runs fused code, stay near eager's, or as
    near to double precision as these, up to the first step that draws random numbers."""
    drawn = False
    for k in range(ours.loop.steps):
        before = eager.random[0]
        with eager.turn():
            expected = eager.step(k)
        drawn |= not torch.equal(before, eager.random[0])
        with ours.turn(), warnings.catch_warnings():
            warnings.simplefilter("ignore", PeakMismatch)
            got = ours.step(k)
        pairs = zip(_leaves(expected, "result"), _leaves(got, "result"), strict=True)
        most = math.inf if drawn else CLOSE
        distances = [(name, _distance(a, b)) for (name, a), (_, b) in pairs]
        far = [f"{name} {d:.2g}" for name, d in distances if not (d <= most and d < math.inf)]
        if far and not drawn and _as_exact(build, k, expected, got):
            return Outcome("close", "eager is as far from double precision")
        if far:
            return Outcome("different", f"in step {k}: {', '.join(far[:6])}")
    return Outcome("close", "draws random numbers" if drawn else "")


def through_backend(
    build: Callable[[], Training], _budget: str = "", *, mode: str = "exact", **_options: Any
) -> Outcome:
    """The loop as people write it around torch.compile with tightship's backend, within `COMPILED` (or what
    `Infeasible` says would do), against eager bit by bit. Code that torch.compile itself runs otherwise than eager
    (what asks whether it is compiled, say) is compared with its backend ``aot_eager``."""
    within: Any = COMPILED
    refused = 0
    while True:
        try:
            return _through_backend(build, {"budget": within, "mode": mode, "seconds": 3.0})
        except Infeasible as no:
            if (refused := refused + 1) > 4:
                raise
            within = max(no.placed or 0, no.best_peak)
        except Exception as error:
            if (theirs := _raised_by_dynamo(build)) is None or type(theirs) is not type(error):
                raise
            return Outcome("refused", f"torch.compile itself raises {type(theirs).__name__}: {theirs}")


def _raised_by_dynamo(build: Callable[[], Training]) -> Exception | None:
    """What the loop raises with torch.compile and a backend that runs every graph as it is."""
    try:
        _recorded(build, backend="eager")
    except Exception as error:
        return error
    return None


def _through_backend(build: Callable[[], Training], options: dict[str, Any]) -> Outcome:
    torch._dynamo.reset()
    eager, ours = _side(build), _side(build)
    model = _compile(ours, backend="tightship", options=options)
    fused, began = options["mode"] == "compiled", time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Fallback)
        found = near(build, eager, ours) if fused else lockstep(eager, ours, ours.loop.steps)
    seconds = time.process_time() - began
    graphs, notes = compiled_plans(model), [*compiled_notes(model)]
    if found.kind == "different" and not fused and _as_aot_eager(build, options):
        notes.insert(0, f"the bits of aot_eager, which are not eager's ({found.sentence})")
        found = Outcome("close")
    said = "; ".join([found.sentence, *notes] if found.sentence else notes)
    if found.kind not in RAN:
        return dataclasses.replace(found, sentence=said)
    if not graphs:
        return Outcome("eager", said)
    ran = [g for g in graphs if g.last is not None]
    wrong = [
        f"{g.name} planned {g.last.planned_peak}, measured {g.last.measured_peak}"
        for g in ran
        if not g.last.as_planned
    ]
    if wrong:
        return Outcome("mismatch", "; ".join((*wrong, said)))
    tops = [max(g.plan.peak_before for g in graphs), max((g.last.planned_peak or 0 for g in ran), default=0)]
    return Outcome(found.kind, said, *tops, max(g.plan.budget or 0 for g in graphs), seconds, ours.loop.steps)


def _as_aot_eager(build: Callable[[], Training], options: dict[str, Any]) -> bool:
    """Whether the loop has the bits that it has with torch.compile's own backend ``aot_eager``."""
    try:
        theirs = _recorded(build, backend="aot_eager")
    except RuntimeError:  # it views what eager copies
        return False
    ours = _recorded(build, backend="tightship", options=dict(options))
    return all(
        list(a) == list(b) and all(_same(a[n], b[n]) for n in a) for a, b in zip(theirs, ours, strict=True)
    )


def _recorded(build: Callable[[], Training], **options: Any) -> list[dict[str, Any]]:
    """What each step of the loop leaves, run by itself: Dynamo keeps one code for both sides of a comparison."""
    torch._dynamo.reset()
    side = _side(build)
    _compile(side, **options)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Fallback)
        for k in range(side.loop.steps):
            with side.turn():
                left = dict(_leaves(side.step(k), "result"))
            rows = {**left, **side.state()}
            found.append({n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in rows.items()})
    return found


def _compile(side: Side, **options: Any) -> Any:
    """Gives the model of ``side`` to torch.compile; its steps run what comes back."""
    model = torch.compile(side.loop.model, **options)
    losses = [side.loop.loss_fn, *(loss_fn for loss_fn, _ in side.loop.others)]

    def step(k: int) -> list[Any]:
        return [
            _eager(model, loss_fn, o, side.loop.batch(k))
            for loss_fn, o in zip(losses, side.optimizers, strict=True)
        ]

    side.step = step
    return model


def _as_exact(build: Callable[[], Training], last: int, expected: Any, got: Any) -> bool:
    """Whether what a compiled step gave after step ``last`` is about as near to a run in double precision as what
    eager gave: some models make much of roundings within a few steps (norms of few numbers, Adam)."""
    exact = _side(build)
    exact.loop.model.double()
    batch = exact.loop.batch
    exact.loop.batch = lambda k: _doubled(batch(k))
    with exact.turn():
        results = [exact.step(k) for k in range(last + 1)]
    rows = zip(*(_leaves(x, "result") for x in (results[-1], expected, got)), strict=True)
    distances = [(_distance(a, b), _distance(a, c)) for (_, a), (_, b), (_, c) in rows]
    return all(ours <= max(CLOSE, AS_EXACT * theirs) for theirs, ours in distances)


def _doubled(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.double() if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {k: _doubled(x) for k, x in tree.items()}
    return type(tree)(map(_doubled, tree)) if type(tree) in (list, tuple) else tree


def _distance(a: Any, b: Any) -> float:
    """Between two results, over the greater of the first and 1; of what are no real numbers, 0."""
    if not (
        isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.is_floating_point() and a.numel()
    ):
        return 0.0
    return float(((a - b).abs() / a.abs().clamp(min=1)).max())


def hugging_face(
    name: str, head: str, settings: dict[str, Any], batch: Callable[[int], Any], **more: Any
) -> Row:
    """A row for the class ``name + head`` of transformers, which computes its own loss; ``settings`` are its
    configuration's, ``more`` may have a ``loss_fn`` and the row's ``title``."""

    def build() -> Training:
        import transformers

        config = getattr(transformers, name + "Config")(**settings)
        model = getattr(transformers, name + head)(config)
        return Training(model.train(), more.get("loss_fn"), batch)

    return Row(
        more.get("title", name + head), ("transformers",), partial(trained, build, more.get("budget", BUDGET))
    )


def fitted(model: nn.Module, loss_fn: Any, optimizer: Any, batch: Any, budget: str, **options: Any) -> Any:
    """`tightship.fit` within ``budget``, or within what it says would do where nothing meets that."""
    within: Any = budget
    for _ in range(4):
        try:
            return tightship.fit(model, loss_fn, optimizer, batch, within, **QUICK | options)
        except Infeasible as no:
            within = max(no.placed or 0, no.best_peak)
    return tightship.fit(model, loss_fn, optimizer, batch, within, **QUICK | options)


class Side:
    """One of the two runs of a loop, with random states of its own: ``step(k)`` runs step k and returns its results.

    ``fitted`` are the steps that `tightship.fit` made, of the side that has them; ``more()`` is what else must be
    equal.
    """

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[Any], step: Callable[[int], Any],
        fitted: Sequence[Any] = (), more: Callable[[], Any] = lambda: None,
    ) -> None:  # fmt: skip
        self.models, self.optimizers, self.step = models, optimizers, step
        self.fitted, self.more = fitted, more
        self.loop: Any = None
        self._keep_random()

    def _keep_random(self) -> None:
        self.random = torch.get_rng_state(), random.getstate(), np.random.get_state()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """With the random states of this side."""
        torch.set_rng_state(self.random[0])
        random.setstate(self.random[1])
        np.random.set_state(self.random[2])
        try:
            yield
        finally:
            self._keep_random()

    def state(self) -> dict[str, Any]:
        """All that a step leaves behind but its results."""
        rows: dict[str, Any] = {"torch's random state": self.random[0]}
        rows |= {"Python's random state": repr(self.random[1]), "NumPy's random state": repr(self.random[2])}
        for m, model in enumerate(self.models):
            rows |= {f"parameter {n!r} of model {m}": p for n, p in model.named_parameters()}
            rows |= {f"buffer {n!r} of model {m}": b for n, b in model.named_buffers()}
        for o, optimizer in enumerate(self.optimizers):
            rows |= dict(_leaves(optimizer.state_dict(), f"optimizer {o}"))
        return rows | dict(_leaves(self.more(), "more"))


def lockstep(eager: Side, ours: Side, steps: int) -> Outcome:
    """Both sides step by step, compared bit by bit after each; and what each fitted step measured."""
    for k in range(steps):
        with eager.turn():
            expected = eager.step(k)
        try:
            with ours.turn(), warnings.catch_warnings():
                warnings.simplefilter("ignore", PeakMismatch)  # what was measured is looked at below
                got = ours.step(k)
        except (Unsupported, BadInput) as refusal:
            return Outcome("refused", f"in step {k}: {refusal}")
        a, b = ({**dict(_leaves(r, "result")), **s.state()} for r, s in ((expected, eager), (got, ours)))
        names = [n for n in dict.fromkeys((*a, *b)) if n not in a or n not in b or not _same(a[n], b[n])]
        del a, b  # state that the next step replaces would be there beside the new
        if names:
            return Outcome("different", f"after step {k}: {', '.join(names[:6])}")
        for step in ours.fitted:
            measured = step.measure()
            if measured["planned_peak"] is None:
                continue  # it runs in eager
            if measured["measured_peak"] is None:
                return Outcome("failed", f"nothing was measured: {'; '.join(step.notes)}")
            if measured["misses"] or not step.last.peak_as_planned:
                return Outcome("mismatch", f"in step {k}: {measured}; {', '.join(step.last.first_misses)}")
    for step in ours.fitted:
        if step.measure()["planned_peak"] is None:
            return Outcome("eager", "; ".join(step.notes))
    measured = [step.measure() for step in ours.fitted]
    if any(m["measured_peak"] != m["planned_peak"] for m in measured):
        return Outcome("mismatch", str(measured))
    tops = {
        k: max(((m[k] or 0) for m in measured), default=0)
        for k in ("unplanned_peak", "planned_peak", "budget")
    }
    return Outcome("identical", "", tops["unplanned_peak"], tops["planned_peak"], tops["budget"], 0.0, steps)


def _side(build: Callable[[], Training]) -> Side:
    torch.manual_seed(0)
    loop = build()
    torch.manual_seed(0)
    random.seed(0)  # packages that `build` is the first to import may have drawn
    np.random.seed(0)
    groups = [loop.parameters, *(parameters for _, parameters in loop.others)]
    optimizers = [loop.optimizer(parameters(loop.model)) for parameters in groups]
    losses = [loop.loss_fn, *(loss_fn for loss_fn, _ in loop.others)]

    def step(k: int) -> list[Any]:
        pairs = zip(losses, optimizers, strict=True)
        return [_eager(loop.model, loss_fn, o, loop.batch(k)) for loss_fn, o in pairs]

    side = Side([loop.model], optimizers, step)
    side.loop = loop
    return side


def _eager(model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    if loss_fn is None:
        out = model(**batch).loss
    elif isinstance(loss_fn, nn.Module):
        out = loss_fn(model(batch[0]), batch[1])
    else:
        out = loss_fn(model, batch)
    (out[0] if isinstance(out, tuple) else out).backward()
    optimizer.step()
    for group in model.parameters():
        group.grad = None
    return out


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Tensors (as they are now) and other values of a tree, by name."""
    if isinstance(tree, torch.Tensor):
        yield name, tree.detach()
    elif isinstance(tree, dict):
        for k, x in tree.items():
            yield from _leaves(x, f"{name}[{k!r}]")
    elif isinstance(tree, list | tuple):
        for k, x in enumerate(tree):
            yield from _leaves(x, f"{name}[{k}]")
    else:
        yield name, repr(tree)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return bit_identical(a, b)
    return type(a) is type(b) and bool(a == b)


def torchvision_loads() -> None:
    """PyPI's torchvision for Linux has its own ops for CUDA builds of torch alone; beside another, the names of two
    that its Python code registers things for let that be imported. Its models need its ops for boxes alone."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.origin:
        return
    try:
        torch.ops.load_library(str(Path(spec.origin).parent / "_C.so"))
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )


torchvision_loads()
