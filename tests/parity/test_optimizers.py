"""Optimizers of torch and of packages, trained in eager and by ``fit``: bit-identical in all they keep, or refused.

Run as a script it prints the table of what each becomes.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from support import plans
from support.state import differences, snapshot
from tightship.errors import Unsupported
from tightship.execute.fit import fit
from tightship.execute.interpreter import PeakMismatch

STEPS, RESUMED = 8, 4  # the checkpoint is written and read after so many steps

Make = Callable[[list[Any]], torch.optim.Optimizer]


class Net(nn.Module):
    """Parameters of 0 to 4 dimensions; one that gets no gradient, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        return self.head(self.mix(x).tanh() * self.scale) + self.frozen


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batch_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(number)
    return torch.randn(4, 3, 6, 6, generator=g), torch.randint(0, 4, (4,), generator=g)


def two_groups(cls: Any, **settings: Any) -> Make:
    """Matrices in one group, with another learning rate than the rest."""

    def make(params: list[Any]) -> torch.optim.Optimizer:
        lr = settings.get("lr", 1e-3)
        first, rest = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
        return cls([{"params": first}, {"params": rest, "lr": lr * 0.5}], **settings)

    return make


def one_group(cls: Any, dims: tuple[int, ...] = (0, 1, 2, 4), **settings: Any) -> Make:
    return lambda params: cls([p for p in params if p.dim() in dims], **settings)


def training(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Schedule-free optimizers are in one of two modes."""
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    return optimizer


# --- which there are ------------------------------------------------------------------------------------------


def of_torch() -> Iterator[tuple[str, Make]]:
    o = torch.optim
    plain = "Adadelta Adafactor Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop SGD".split()
    for name in plain:
        yield f"torch {name}", two_groups(getattr(o, name), lr=0.01)
    yield "torch Muon", one_group(o.Muon, dims=(2,), lr=0.01)
    yield "torch LBFGS", one_group(o.LBFGS)
    yield "torch AdamW fused", two_groups(o.AdamW, lr=0.01, fused=True)
    yield "torch AdamW foreach", two_groups(o.AdamW, lr=0.01, foreach=True)
    yield "torch Adam amsgrad maximize", two_groups(o.Adam, lr=0.01, amsgrad=True, maximize=True)
    yield "torch AdamW with a tensor as lr", one_group(o.AdamW, lr=torch.tensor(0.01))
    yield "torch Adam capturable", one_group(o.Adam, lr=0.01, capturable=True)
    yield "torch SGD nesterov", two_groups(o.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1)
    yield "torch RMSprop centered", two_groups(o.RMSprop, lr=0.01, momentum=0.9, centered=True)
    yield "torch SGD fused", two_groups(o.SGD, lr=0.01, momentum=0.9, fused=True)


PACKAGES = {
    "schedulefree": "AdamWScheduleFree AdamWScheduleFreePaper AdamWScheduleFreeReference RAdamScheduleFree "
    "SGDScheduleFree SGDScheduleFreeReference AdamWScheduleFreeClosure",
    "lion_pytorch": "Lion",
    "prodigyopt": "Prodigy",
    "pytorch_optimizer": "AdaBelief AdaBound AdaFactor AdamP Adan ADOPT AdEMAMix CAME DAdaptAdam Lamb LARS Lion "
    "MADGRAD NovoGrad Prodigy QHAdam Ranger ScheduleFreeAdamW Shampoo SignSGD SOAP StableAdamW Tiger Yogi "
    "Lookahead SAM GrokFastAdamW Kron",
}
"""Modules and the names of the classes of theirs that are tried."""


def of_packages() -> Iterator[tuple[str, Make | str]]:
    for module, names in PACKAGES.items():
        for name in names.split():
            yield f"{module} {name}", f"{module}:{name}"


def maker(found: Make | str) -> Make:
    """The factory of an optimizer; skips where its package is missing."""
    if not isinstance(found, str):
        return found
    module, name = found.split(":")
    package = pytest.importorskip(module, reason=f"{module} is not installed")
    cls = getattr(package, name)
    if name == "SAM":
        return lambda params: cls(params, torch.optim.AdamW, lr=0.01)
    if name == "Lookahead":
        return lambda params: cls(torch.optim.AdamW(params, lr=0.01), k=3)
    return one_group(cls)


ALL: dict[str, Make | str] = {**dict(of_torch()), **dict(of_packages())}


# --- training -------------------------------------------------------------------------------------------------


class Trained:
    """A model and its optimizer, stepped in eager or by ``fit``; ``step`` is None until something is fitted."""

    def __init__(self, make: Make) -> None:
        torch.manual_seed(0)
        self.make = make
        self.model = Net()
        self.optimizer = training(make(list(self.model.parameters())))
        self.fitted: Any = None

    def fit(self, **options: Any) -> None:
        self.fitted = fit(self.model, loss_of, self.optimizer, batch_of(0), **options)

    def step(self, number: int) -> Any:
        torch.manual_seed(number)
        if self.fitted is not None:
            loss = self.fitted(batch_of(number))
        else:
            loss = loss_of(self.model, batch_of(number))
            loss.backward()
            self.optimizer.step()
            self.model.zero_grad()  # fit leaves gradients alone
        return loss.detach()

    def resumed(self) -> Trained:
        """Another one that has read this one's checkpoint."""
        other = Trained(self.make)
        other.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        training(other.optimizer)
        return other


def trained(make: Make, cache: Any) -> str:
    """``identical`` with what `fit` notes, or ``refused`` and why. Raises ``AssertionError`` for any difference."""
    options = {"planner": plans.keep, "cache": cache, "seconds_per_op": 0.0}
    ours, theirs = Trained(make), Trained(make)
    try:
        ours.fit(**options)
    except Unsupported as error:
        assert not differences(snapshot(theirs.model, theirs.optimizer), snapshot(ours.model, ours.optimizer))
        return f"refused: {error}"
    for number in range(STEPS):
        if number == RESUMED:
            ours, theirs = ours.resumed(), theirs.resumed()
            ours.fit(**options)
        a, b = theirs.step(number), ours.step(number)
        left, right = (
            snapshot(theirs.model, theirs.optimizer, loss=a),
            snapshot(ours.model, ours.optimizer, loss=b),
        )
        for taken in (left, right):
            for memo in ("_opt_called", "_need_device_dtype_check_for_fused"):
                taken["attributes"].pop(memo, None)
        wrong = differences(left, right)
        assert not wrong, f"step {number}: {wrong[:5]}"
    how = [n for n in ours.fitted.notes if "steps all parameters at once" in n]
    again = [n for n in ours.fitted.notes if "captured again" in n]
    return "; ".join(["identical", *how, *again])


@pytest.fixture(scope="module")
def kept(tmp_path_factory: Any) -> Any:
    return tmp_path_factory.mktemp("measurements")


REFUSED = {
    "torch LBFGS": "needs a closure",
    "torch Adam capturable": "capturable=True",
    "schedulefree AdamWScheduleFreeClosure": "needs a closure",
    "pytorch_optimizer SAM": "needs a closure",
}
TOGETHER = {
    "prodigyopt Prodigy",
    *(
        f"pytorch_optimizer {n}"
        for n in "AdamP DAdaptAdam Kron Lamb LARS MADGRAD Prodigy Shampoo Lookahead".split()
    ),
}


@pytest.mark.filterwarnings("ignore::tightship.execute.interpreter.PeakMismatch")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * n.startswith("pytorch_optimizer")) for n in ALL]
)
def test_an_optimizer_is_bit_identical_or_refused(name: str, kept: Any) -> None:
    outcome = trained(maker(ALL[name]), kept)
    if name in REFUSED:
        assert outcome.startswith("refused: ") and REFUSED[name] in outcome
    else:
        assert outcome.startswith("identical") and ("at once" in outcome) == (name in TOGETHER)


@pytest.mark.parametrize(
    "name",
    [
        "prodigyopt Prodigy",  # keeps a copy of a parameter that is not zero
        pytest.param("pytorch_optimizer Prodigy", marks=pytest.mark.slow),
        pytest.param(
            "pytorch_optimizer DAdaptSGD", marks=pytest.mark.slow
        ),  # keeps nothing where gradients are zero
        pytest.param("pytorch_optimizer DAdaptAdam", marks=pytest.mark.slow),
    ],
)
def test_state_that_follows_from_the_numbers_is_counted_before_the_first_step(name: str, kept: Any) -> None:
    package, kind = name.split()
    takes_what_was_planned(getattr(pytest.importorskip(package), kind), kept)


class ByNorm(torch.optim.Optimizer):
    """Steps by the gradients' norm, which it keeps in the place of the last step's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        group["norm"] = torch.stack([p.grad.norm() for p in group["params"]]).norm()[None]
        for p in group["params"]:
            p.sub_(p.grad / group["norm"], alpha=group["lr"])


def test_what_a_step_replaces_from_before_is_not_counted_twice(kept: Any) -> None:
    """The end of what is older than the log is not in it: later steps had no plan within the first one's peak."""
    takes_what_was_planned(ByNorm, kept)


def takes_what_was_planned(make: Callable[[Any], torch.optim.Optimizer], kept: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    step = fit(
        model, lambda m, x: m(x).square().mean(), make(model.parameters()), torch.randn(16, 32), "100%",
        strict=True, cache=kept,
    )  # fmt: skip
    for number in range(3):
        step(torch.randn(16, 32))
        used = step.measure()
        assert used["misses"] == 0 and used["measured_peak"] <= used["planned_peak"] <= used["budget"]
        assert number == 0 or used["measured_peak"] == used["planned_peak"]


def table() -> Iterator[str]:
    """A row for each optimizer that is installed: its name, and what `trained` says of it."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", PeakMismatch)
        for name, found in ALL.items():
            try:
                yield f"| {name} | {trained(maker(found), folder)} |"
            except pytest.skip.Exception as missing:
                yield f"| {name} | not tried: {missing} |"


if __name__ == "__main__":
    print("\n".join(["| Optimizer | Under fit |", "| --- | --- |", *table()]))
