"""Every optimizer that is installed, trained in eager and by `fit`: what each comes to.

    python benchmarks/compat_optimizers.py [WORD ...]

`rows` yields the optimizers of torch, with their settings and what loops do to them between steps, and those of
timm, pytorch_optimizer, schedulefree, lion_pytorch, prodigyopt and transformers where these are installed; `run`
trains a small model with one of them, six steps in eager and six by `fit`, and compares after each step, bit by bit,
losses, parameters, buffers, random states and all that the optimizer keeps. WORDs: rows whose names have one of them.
"""

from __future__ import annotations

import collections
import copy
import importlib
import itertools
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler

import tightship
from tightship.errors import BadInput, TightshipError, Unsupported
from tightship.execute.interpreter import PeakMismatch

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.state import differences, snapshot

__all__ = ["Outcome", "Row", "rows", "run"]

STEPS = 6
_PARTS = ("state", "param_groups", "defaults", "_opt_called", "_need_device_dtype_check_for_fused")
"""Attributes of optimizers that are compared as their own entries, or that only say that it has stepped."""


# --- what is trained ------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Parameters of 0 to 4 dimensions, one frozen, one that some batches do not use; dropout, running statistics."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.words = nn.Embedding(12, 8)
        self.layer = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.2)
        self.extra = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 12)
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(1))
        self.frozen = nn.Parameter(torch.full((12,), 0.5), requires_grad=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor, words: torch.Tensor, more: bool) -> torch.Tensor:
        x = self.norm(self.conv(x)).relu().mean((2, 3)) + self.words(words)
        x = self.drop(self.mix(self.layer(x)).tanh()) * self.scale + self.shift
        return self.head(x + self.extra(x) if more else x) + self.frozen


class Matrices(nn.Module):
    """Trains matrices alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(108, 16), nn.Linear(16, 12)
        self.first.bias.requires_grad_(False)
        self.second.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, words: torch.Tensor, more: bool) -> torch.Tensor:
        return self.second(self.first(x.flatten(1)).tanh())


class Complex(nn.Module):
    """Complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(108, 12, dtype=torch.complex64) * 0.1)
        self.shift = nn.Parameter(torch.zeros(12, dtype=torch.complex64))

    def forward(self, x: torch.Tensor, words: torch.Tensor, more: bool) -> torch.Tensor:
        return (x.flatten(1).to(torch.complex64) @ self.turn + self.shift).abs()


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x, words, labels, more = batch
    return nn.functional.cross_entropy(model(x, words, more).float(), labels)


def batch_of(number: int, dtype: torch.dtype, more: bool = True) -> Any:
    g = torch.Generator().manual_seed(number)
    x = torch.randn(4, 3, 6, 6, generator=g).to(dtype)
    words, labels = (torch.randint(0, 12, (4,), generator=g) for _ in range(2))
    return x, words, labels, more


# --- rows -----------------------------------------------------------------------------------------------------

Make = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Row:
    """``make(model)`` is an optimizer, or a list of them. ``between(side, k)`` is what a loop does before step ``k``
    with `Side.optimizer`, and may keep in `Side.kept`. ``net`` makes the model; ``some``: one parameter has no
    gradient in some steps."""

    package: str
    name: str
    make: Make
    between: Callable[[Side, int], None] = lambda side, k: None
    net: Callable[[], nn.Module] = Net
    some: bool = False
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Outcome:
    """``kind``: identical, refused (in a sentence of tightship's), different, misplaced (requests or a peak that are
    not the planned ones), failed (any other error) or none (eager cannot step it, either); ``ops``: how many steps
    the parameters take."""

    kind: str
    text: str = ""
    ops: int = 0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ": ".join(x for x in (self.kind, self.text or (f"{self.ops} ops" if self.ops else "")) if x)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def plain(cls: Any, **settings: Any) -> Make:
    return lambda model: cls(trainable(model), **settings)


def two_groups(cls: Any, *, other: dict[str, Any] | None = None, **settings: Any) -> Make:
    """Matrices in one group, the rest in another that differs in its learning rate or in ``other``."""
    changed = other or {"lr": settings.get("lr", 1e-3) * 0.5}

    def make(model: nn.Module) -> Any:
        ps = list(model.parameters())  # the frozen one, too
        first, rest = [p for p in ps if p.dim() >= 2], [p for p in ps if p.dim() < 2]
        return cls([{"params": first}, {"params": rest, **changed}], **settings)

    return make


def of_torch() -> Iterator[Row]:
    o = torch.optim
    plain_ones = "Adadelta Adafactor Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop SGD".split()
    for name in plain_ones:
        cls = getattr(o, name)
        yield Row("torch", name, two_groups(cls, lr=0.01))
        yield Row("torch", f"{name}, a parameter without a gradient", plain(cls, lr=0.01), some=True)
        for settings in (
            {"foreach": True}, {"fused": True}, {"capturable": True}, {"maximize": True}, {"weight_decay": 0.1},
            {"amsgrad": True}, {"lr": torch.tensor(0.01)}, {"momentum": 0.9}, {"centered": True},
            {"decoupled_weight_decay": True, "weight_decay": 0.1}, {"momentum": 0.9, "nesterov": True},
            {"betas": (torch.tensor(0.9), torch.tensor(0.99)), "foreach": False},
            {"lr": torch.tensor(0.01), "fused": True},
        ):  # fmt: skip
            if set(settings) <= set(cls.__init__.__annotations__):
                said = ", ".join(f"{n}={x}" for n, x in settings.items())
                yield Row("torch", f"{name}({said})", plain(cls, **{"lr": 0.01, **settings}))
    for name in ("AdamW", "SGD", "Adafactor", "RMSprop"):
        cls = getattr(o, name)
        yield Row("torch", f"{name}, a tied weight", plain(cls, lr=0.01), net=lambda: Net(tied=True))
        half = torch.bfloat16
        yield Row("torch", f"{name}, bfloat16", plain(cls, lr=0.01), net=lambda: Net().bfloat16(), dtype=half)
        yield Row("torch", f"{name}, complex", plain(cls, lr=0.01), net=Complex)
    betas = {"betas": (0.8, 0.9), "weight_decay": 0.2, "eps": 1e-6}
    yield Row("torch", "AdamW, groups with other betas", two_groups(o.AdamW, lr=0.01, other=betas))
    yield Row("torch", "Muon", plain(o.Muon, lr=0.01), net=Matrices)
    yield Row("torch", "SparseAdam", plain(o.SparseAdam, lr=0.01))
    yield Row("torch", "LBFGS", plain(o.LBFGS, lr=0.01))
    yield Row("torch", "Muon and AdamW", muon_and_adamw)
    yield Row("torch", "SGD, then AdamW, on the same parameters", lambda m: [
        o.SGD(trainable(m), lr=0.01), o.AdamW(trainable(m), lr=0.01)])  # fmt: skip


def muon_and_adamw(model: nn.Module) -> Any:
    rest = [p for p in trainable(model) if p.dim() != 2]
    matrices = [p for p in trainable(model) if p.dim() == 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]


# --- what loops do between steps ---


def scheduled(make: Callable[[Any], Any]) -> Callable[[Side, int], None]:
    """A scheduler made before the first step, and stepped after each."""

    def between(side: Side, k: int) -> None:
        if k == 0:
            side.kept["scheduler"] = make(side.optimizer)
            return
        scheduler = side.kept["scheduler"]
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()

    return between


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, 0.001, 0.1, step_size_up=2, cycle_momentum="momentum" in o.defaults or "betas" in o.defaults
    ),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 0.0 if k == 0 else 1 / k),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.9),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=3),
}  # fmt: skip


def at(step: int, act: Callable[[Side], None]) -> Callable[[Side, int], None]:
    return lambda side, k: act(side) if k == step else None


def load(side: Side) -> None:
    side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))


def load_empty(side: Side) -> None:
    side.optimizer.load_state_dict(side.kept["empty"])


def edit_state(side: Side) -> None:
    for state in side.optimizer.state.values():
        for name, x in state.items():
            if isinstance(x, torch.Tensor) and name != "step":
                state[name] = x * 0.5


def forget_state(side: Side) -> None:
    side.optimizer.state = collections.defaultdict(dict)


def forget_one(side: Side) -> None:
    side.optimizer.state.pop(side.model.mix.weight, None)


def add_group(side: Side) -> None:
    side.optimizer.add_param_group({"params": [side.model.extra.weight], "lr": 0.03})


def copy_of_it(side: Side) -> None:
    """The loop goes on with a copy of model and optimizer."""
    model, optimizer = copy.deepcopy((side.model, side.optimizer))
    side.become(model, optimizer)


def other_settings(**values: Any) -> Callable[[Side], None]:
    return lambda side: [g.update(values) for g in side.optimizer.param_groups]  # type: ignore[func-returns-value]


def of_loops() -> Iterator[Row]:
    o = torch.optim
    classes = {
        "AdamW": plain(o.AdamW, lr=0.01),
        "SGD": plain(o.SGD, lr=0.01, momentum=0.9),
        "own": plain(Own, lr=0.01),
    }
    for (name, make), (which, scheduler) in itertools.product(classes.items(), SCHEDULERS.items()):
        yield Row("loops", f"{name} with {which}", make, scheduled(scheduler))
    acts = {
        "load_state_dict": load, "state edited": edit_state, "state dropped": forget_state,
        "state of one parameter dropped": forget_one, "deepcopy": copy_of_it,
        "weight_decay set": other_settings(weight_decay=0.1), "lr of zero": other_settings(lr=0.0),
        "lr as a tensor": lambda side: other_settings(lr=torch.tensor(0.02))(side),
        "maximize set": other_settings(maximize=True), "foreach set": other_settings(foreach=True),
    }  # fmt: skip
    tensors: Make = lambda model: o.AdamW(trainable(model), lr=torch.tensor(0.01))  # noqa: E731
    for (name, make), (what, act) in itertools.product(
        {**classes, "AdamW(lr=tensor)": tensors}.items(), acts.items()
    ):
        yield Row("loops", f"{name}, {what} in the middle", make, at(3, act))
    fill = at(3, lambda side: [g["lr"].fill_(0.5) for g in side.optimizer.param_groups])  # type: ignore[arg-type]
    yield Row("loops", "AdamW(lr=tensor), filled", tensors, fill)
    for name, cls in (("AdamW", o.AdamW), ("SGD", o.SGD), ("own", Own)):

        def without(model: nn.Module, cls: Any = cls) -> Any:
            return cls([p for p in trainable(model) if p is not model.extra.weight], lr=0.01)

        yield Row("loops", f"{name}, add_param_group in the middle", without, at(3, add_group))
        yield Row("loops", f"{name}, a parameter frozen in the middle", plain(cls, lr=0.01), at(3, freeze))
        yield Row("loops", f"{name}, a parameter frozen until the middle", plain(cls, lr=0.01), thawed)


def freeze(side: Side) -> None:
    side.model.mix.weight.requires_grad_(False)


def thawed(side: Side, k: int) -> None:
    side.model.mix.weight.requires_grad_(k >= 3)


class Own(torch.optim.Optimizer):
    """Somebody's own: momentum, and a count of its own."""

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["m"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["m"].mul_(group["momentum"]).add_(p.grad)
                p.sub_(group["lr"] / (1 + 0.01 * state["step"]) * state["m"])


# --- packages ---


def package(name: str) -> Any:
    """The module, or None where it is missing or does not load."""
    try:
        return importlib.import_module(name)
    except Exception:
        return None


def of_timm() -> Iterator[Row]:
    timm = package("timm.optim")
    if timm is None:
        return
    names = [n for n in timm.list_optimizers() if not n.startswith(("bnb", "fused"))]
    for name in [*names, *(f"lookahead_{n}" for n in names)]:

        def make(model: nn.Module, name: str = name) -> Any:
            return timm.create_optimizer_v2(model, opt=name, lr=0.01, weight_decay=0.05)

        yield Row("timm", name, make)


_NEEDED = {"ranger21": {"num_iterations": 10}, "a2grad": {}, "alig": {"max_lr": 0.1}, "bsam": {"num_data": 4}}
_MUON = {"adago", "adamuon", "distributedmuon", "muon", "muonclip", "normuon"}
_OF_MODEL = {"adalomo", "adammini", "lomo"}


def muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices by orthogonalized momentum, the rest as Adam does."""
    rows = {flag: [p for p in trainable(model) if (p.dim() == 2) is flag] for flag in (True, False)}
    return [{"params": ps, "use_muon": flag} for flag, ps in rows.items()]


def of_pytorch_optimizer() -> Iterator[Row]:
    found = package("pytorch_optimizer")
    if found is None:
        return
    for name in found.get_supported_optimizers():

        def make(model: nn.Module, name: str = name) -> Any:
            cls = found.load_optimizer(name)
            given = muon_groups(model) if name in _MUON else model if name in _OF_MODEL else trainable(model)
            return cls(given, **_NEEDED.get(name, {}))

        yield Row("pytorch_optimizer", name, make)
    for name in (
        "Lookahead", "SAM", "WSAM", "LookSAM", "FriendlySAM", "OrthoGrad", "PCGrad", "TRAC", "Magma",
        "ScheduleFreeWrapper",
    ):  # fmt: skip
        wrapper = getattr(found, name, None)
        if wrapper is None:
            continue

        def wrapped(model: nn.Module, wrapper: Any = wrapper, name: str = name) -> Any:
            if "SAM" in name:
                more = {"model": model} if name == "WSAM" else {}
                return wrapper(params=trainable(model), base_optimizer=torch.optim.AdamW, lr=0.01, **more)
            made = wrapper(torch.optim.AdamW(trainable(model), lr=0.01))
            if name == "ScheduleFreeWrapper":
                made.train()
            return made

        yield Row("pytorch_optimizer", f"{name} of AdamW", wrapped)


def train_mode(make: Make) -> Make:
    """Schedule-free optimizers are in one of two modes."""

    def made(model: nn.Module) -> Any:
        optimizer = make(model)
        optimizer.train()
        return optimizer

    return made


def evaluated(side: Side, k: int) -> None:
    """As loops evaluate between steps: parameters are others for a while."""
    if k == 3:
        side.optimizer.eval()
        side.optimizer.train()


def of_others() -> Iterator[Row]:
    free = package("schedulefree")
    for name in dir(free) if free is not None else ():
        cls = getattr(free, name)
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            continue
        if "Wrapper" in name:
            make: Make = lambda m, cls=cls: cls(torch.optim.AdamW(trainable(m), lr=0.01))  # noqa: E731
        else:
            make = plain(cls, lr=0.01)
        yield Row("schedulefree", name, train_mode(make))
        yield Row("schedulefree", f"{name}, evaluated in the middle", train_mode(make), evaluated)
        if "Wrapper" not in name and "foreach" in cls.__init__.__annotations__:
            yield Row(
                "schedulefree", f"{name}(foreach=False)", train_mode(plain(cls, lr=0.01, foreach=False))
            )
    lion, prodigy, hugging = (
        package("lion_pytorch"),
        package("prodigyopt"),
        package("transformers.optimization"),
    )
    if lion is not None:
        yield Row("lion_pytorch", "Lion", plain(lion.Lion, lr=0.01))
        yield Row("lion_pytorch", "Lion(decoupled)", plain(lion.Lion, lr=0.01, decoupled_weight_decay=True))
    if prodigy is not None:
        yield Row("prodigyopt", "Prodigy", plain(prodigy.Prodigy))
        yield Row("prodigyopt", "Prodigy(slice_p)", plain(prodigy.Prodigy, slice_p=2, safeguard_warmup=True))
    if hugging is not None:
        yield Row("transformers", "Adafactor", plain(hugging.Adafactor))
        fixed = {"lr": 0.01, "scale_parameter": False, "relative_step": False, "beta1": 0.9}
        yield Row("transformers", "Adafactor(fixed lr)", plain(hugging.Adafactor, **fixed))


def rows() -> Iterator[Row]:
    """Every optimizer that can be tried here."""
    for some in (of_torch, of_loops, of_timm, of_pytorch_optimizer, of_others):
        yield from some()


# --- running --------------------------------------------------------------------------------------------------


@dataclass
class Side:
    """A model in training; ``fitted`` is None in eager."""

    row: Row
    kept: dict[str, Any] = field(default_factory=dict)
    fitted: Any = None

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = self.row.net()
        self.optimizer = self.row.make(self.model)

    def become(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        if self.fitted is not None:
            self.fit(**self.options)

    def fit(self, **options: Any) -> None:
        self.options = options
        self.fitted = tightship.fit(
            self.model, loss_of, self.optimizer, batch_of(0, self.row.dtype), **options
        )

    @property
    def optimizers(self) -> list[Any]:
        return list(self.optimizer) if isinstance(self.optimizer, (list, tuple)) else [self.optimizer]

    def step(self, k: int) -> Any:
        self.row.between(self, k)
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(k)
        batch = batch_of(k, self.row.dtype, not (self.row.some and k in (1, 4)))
        if self.fitted is not None:
            return self.fitted(batch).detach()
        loss = loss_of(self.model, batch)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()  # fit leaves gradients alone
        return loss.detach()

    def taken(self, loss: Any) -> dict[str, Any]:
        """A copy of all that this step has left."""
        places = {id(p): k for k, p in enumerate(self.model.parameters())}
        kept: dict[str, Any] = {}
        for n, optimizer in enumerate(self.optimizers):
            own = {
                k: x
                for k, x in vars(optimizer).items()
                if k not in _PARTS and not k.startswith("_optimizer_")
            }
            kept[f"optimizer {n}"] = optimizer.state_dict()
            kept[f"attributes {n}"] = by_place(own, places)
            kept[f"state {n}"] = {places.get(id(p), type(p).__name__): s for p, s in optimizer.state.items()}
        return snapshot(self.model, None, loss=loss, **plain_tree(kept))


def by_place(tree: Any, places: dict[int, int]) -> Any:
    """Parameters' numbers for their ids, by which some optimizers keep things."""
    if isinstance(tree, dict):
        known = {k: f"parameter {places[k]}" for k in tree if type(k) is int and k in places}
        return {known.get(k, k) if type(k) is int else k: by_place(x, places) for k, x in tree.items()}
    return sorted(places.get(x, x) for x in tree) if isinstance(tree, set) and tree & places.keys() else tree


def plain_tree(tree: Any) -> Any:
    """Lists for deques."""
    if isinstance(tree, dict):
        return {k: plain_tree(x) for k, x in tree.items()}
    return [plain_tree(x) for x in tree] if isinstance(tree, (list, collections.deque)) else tree


def run(row: Row, folder: str | None = None, budget: Any = None) -> Outcome:
    """What ``row`` comes to within ``budget``; measurements are kept in ``folder``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager, why = _in_eager(row)
        if eager is None and row.net is Net:  # for matrices alone, perhaps
            row = replace(row, net=Matrices)
            eager, _ = _in_eager(row)
        if eager is None:
            return Outcome("none", why) if not _wants_closure(why) else _run(row, None, folder, budget)
        return _run(row, eager, folder, budget)


def _wants_closure(why: str) -> bool:
    return "closure" in why


def _in_eager(row: Row) -> tuple[list[dict[str, Any]] | None, str]:
    """What the eager loop leaves after each step, and the error that ended it."""
    try:
        side = Side(row)
        return [side.taken(side.step(k)) for k in range(STEPS)], ""
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _run(row: Row, eager: list[dict[str, Any]] | None, folder: str | None, budget: Any) -> Outcome:
    kind, text = "identical", ""
    try:
        side = Side(row)
        side.fit(budget=budget, cache=folder, seconds_per_op=0.0, seconds=2.0, work=20_000)
        updates = sum(op.phase == "update" for op in side.fitted.graph.ops)
        for k in range(STEPS):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = side.taken(side.step(k))
            wrong = differences(eager[k], found) if eager is not None else []
            if wrong:
                return Outcome("different", f"step {k}: {'; '.join(wrong[:3])}", updates)
            mismatch = [str(w.message) for w in said if issubclass(w.category, PeakMismatch)]
            if mismatch and kind == "identical":
                kind, text = "misplaced", f"step {k}: {mismatch[0][:300]}"
        return Outcome(kind, text, updates, side.fitted.notes)
    except (Unsupported, BadInput) as error:
        return Outcome("refused", str(error))
    except TightshipError as error:
        return Outcome("failed", f"{type(error).__name__}: {error}")
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(
            "failed", f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    count: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for row in rows():
            title = f"{row.package} {row.name}"
            if sys.argv[1:] and not any(word in title for word in sys.argv[1:]):
                continue
            outcome = run(row, folder)
            count[outcome.kind] += 1
            print(f"{title} | {outcome}", flush=True)
    print(dict(count))
