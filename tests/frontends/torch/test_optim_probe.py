"""What a class of optimizer couples its parameters by is found, and it then steps them all in one op."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict

import pytest
import torch
from torch import nn

from support import plans
from support.state import differences, snapshot
from tightship.errors import Unsupported
from tightship.execute.fit import fit
from tightship.frontends.torch.optimizer.given import _INDEPENDENT, independent
from tightship.frontends.torch.optimizer.probe import why_together

pytestmark = pytest.mark.filterwarnings("ignore::tightship.execute.interpreter.PeakMismatch")


class Plain(torch.optim.Optimizer):
    """Stochastic gradient descent with momentum; subclasses say what is wrong with them."""

    def __init__(self, params, lr=0.1, **more):
        super().__init__(params, {"lr": lr, **more})

    def begin(self):
        return True

    def direction(self, group, p, state):
        return state["m"].mul_(0.9).add_(p.grad)

    @torch.no_grad()
    def step(self, closure=None):
        if not self.begin():
            return
        for group in self.param_groups:
            self.enter(group)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                p.sub_(self.direction(group, p, state), alpha=group["lr"])

    def enter(self, group):
        pass

    def grads(self):
        return [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]


# --- those that couple parameters


class ClipsByGlobalNorm(Plain):
    """With a limit that no gradient of any trial reaches."""

    def begin(self):
        norm = torch.stack([g.norm() for g in self.grads()]).norm()
        scale = (1e30 / (norm + 1e-6)).clamp(max=1.0)
        for g in self.grads():
            g.mul_(scale)
        return True


class ClipsByForeachNorm(Plain):
    def begin(self):
        norms = torch._foreach_norm(self.grads())
        torch._foreach_mul_(self.grads(), (0.5 / (torch.stack(norms).norm() + 1e-6)).clamp(max=1.0))
        return True


class ClipsFiniteNorms(Plain):
    """No trial's numbers show it: its limit is beyond them, and it leaves what is not finite alone."""

    def begin(self):
        norm = torch.stack([g.norm() for g in self.grads()]).norm()
        scale = torch.where(norm.isfinite(), (1e18 / (norm + 1e-6)).clamp(max=1.0), 1.0)
        for g in self.grads():
            g.mul_(scale)
        return True


class SkipsLargeSums(Plain):
    """The same with a number of Python."""

    def begin(self):
        total = sum(g.abs().sum().item() for g in self.grads())
        return not 1e18 < total < float("inf")


class SkipsNonFinite(Plain):
    def begin(self):
        return all(bool(g.isfinite().all()) for g in self.grads())


class SkipsLargeByNumpy(Plain):
    def begin(self):
        return all(float(abs(g.numpy()).max(initial=0)) < 1e30 for g in self.grads())


class SkipsLargeByList(Plain):
    def begin(self):
        return max(max(g.reshape(-1).tolist()) for g in self.grads()) < 1e30


class CountsParametersInItself(Plain):
    def __init__(self, params, **more):
        super().__init__(params, **more)
        self.seen = 0

    def direction(self, group, p, state):
        self.seen += 1
        return p.grad / self.seen


class CountsParametersInGroup(Plain):
    def direction(self, group, p, state):
        group["seen"] = group.get("seen", 0) + 1
        return p.grad / group["seen"]


class ReadsTheFirstParameter(Plain):
    def direction(self, group, p, state):
        return p.grad + 0.01 * self.param_groups[0]["params"][0].mean()


class SharesState(Plain):
    def begin(self):
        shared = self.state["all"]
        shared["sum"] = shared.get("sum", torch.zeros(())) + sum(g.sum() for g in self.grads())
        return True

    def direction(self, group, p, state):
        return p.grad + 0.01 * self.state["all"]["sum"]


class CouplesEveryHundredthStep(Plain):
    def enter(self, group):
        group["step"] = group.get("step", 0) + 1
        if group["step"] % 100 == 0:
            total = sum(g.sum() for g in self.grads())
            for g in self.grads():
                g.add_(total)


class CouplesWhenAStateSaysSo(Plain):
    def direction(self, group, p, state):
        state["step"] = state.get("step", torch.zeros(())) + 1
        if state["step"].item() == 1000:
            return p.grad + sum(g.mean() for g in self.grads())
        return p.grad


class CouplesWarmUp(Plain):
    """From the tenth step on."""

    def __init__(self, params, **more):
        super().__init__(params, **more)
        self.done = 0

    def begin(self):
        self.done += 1
        if self.done > 9:
            self.param_groups[0]["params"][0].grad = self.grads()[0] + self.grads()[-1].mean()
        return True


class CountsGradients(Plain):
    """A Python number that depends on which parameters have one."""

    def enter(self, group):
        group["present"] = sum(p.grad is not None for p in group["params"])

    def direction(self, group, p, state):
        return p.grad / group["present"]


class CouplesMatrices(Plain):
    """Only parameters of two dimensions."""

    def begin(self):
        several = [g for g in self.grads() if g.dim() == 2]
        for g in several:
            g.add_(sum(x.mean() for x in several))
        return True


class HoldsATensor(Plain):
    def __init__(self, params, **more):
        super().__init__(params, **more)
        self.scale = torch.ones(())

    def begin(self):
        self.scale.mul_(0.99)
        return True

    def direction(self, group, p, state):
        return p.grad * self.scale


class ClippingAdam(torch.optim.Adam):
    def step(self, closure=None):
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        nn.utils.get_total_norm(grads).clamp(max=1e30)
        norm = torch.stack([g.norm() for g in grads]).norm()
        for g in grads:
            g.div_(norm.clamp(min=1e-3))
        return super().step(closure)


class PeekingAdam(torch.optim.Adam):
    def _init_group(self, group, params_with_grad, grads, *more):
        found = super()._init_group(group, params_with_grad, grads, *more)
        grads[:] = [g + len(grads) for g in grads]
        return found


class Around(torch.optim.Optimizer):
    """Slow weights around another optimizer, as Lookahead has them."""

    def __init__(self, params, **more):
        super().__init__(params, more)
        self.inner = torch.optim.AdamW(self.param_groups, **more)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None and self.count % 3 == 0:
                    slow = self.state[p].setdefault("slow", p.clone())
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)


TOGETHER = [
    ClipsByGlobalNorm, ClipsByForeachNorm, ClipsFiniteNorms, SkipsLargeSums, SkipsNonFinite,
    SkipsLargeByNumpy, SkipsLargeByList,
    CountsParametersInItself, CountsParametersInGroup, ReadsTheFirstParameter, SharesState,
    CouplesEveryHundredthStep, CouplesWhenAStateSaysSo, CouplesWarmUp, CountsGradients, CouplesMatrices,
    HoldsATensor, ClippingAdam, PeekingAdam, Around,
]  # fmt: skip


# --- those that do not


class CountsInGroup(Plain):
    def enter(self, group):
        group["step"] = group.get("step", 0) + 1

    def direction(self, group, p, state):
        return p.grad * min(1.0, group["step"] / 10)


class CountsInItself(Plain):
    def __init__(self, params, **more):
        super().__init__(params, **more)
        self._done = 0

    def begin(self):
        self._done += 1
        return True

    def direction(self, group, p, state):
        return p.grad * 0.9**self._done


class WritesGradients(Plain):
    def direction(self, group, p, state):
        return p.grad.div_(2.0)


class CountsInState(Plain):
    def direction(self, group, p, state):
        state["step"] = state.get("step", 0) + 1
        return p.grad / state["step"]


class ReplacesState(Plain):
    def direction(self, group, p, state):
        state["m"] = state["m"] * 0.9 + p.grad
        return state["m"]


class Mine(torch.optim.AdamW):
    pass


IN_TURNS = [Plain, CountsInGroup, CountsInItself, WritesGradients, CountsInState, ReplacesState, Mine]


def net():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 4))
    made.register_parameter("offset", nn.Parameter(torch.zeros(())))
    return made


def groups(model):
    ps = [p for p in model.parameters() if p.dim()]
    return [{"params": ps[:3], "lr": 0.05}, {"params": ps[3:]}]


def loss_of(model, batch):
    return (model(batch[0]) * batch[1]).square().mean()


def batch_of(number):
    g = torch.Generator().manual_seed(number)
    return torch.randn(2, 3, 6, 6, generator=g), torch.ones(())


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("measurements")


class Two:
    """One trained in eager, one by ``fit``."""

    def __init__(self, make, kept, **options):
        self.model = net()
        self.twin = copy.deepcopy(self.model)
        self.optimizer, self.other = make(groups(self.model)), make(groups(self.twin))
        options = {"planner": plans.keep, "strict": True, "cache": kept, "seconds_per_op": 0.0} | options
        self.step = fit(self.model, loss_of, self.optimizer, batch_of(0), **options)

    def both(self, change):
        for optimizer in (self.optimizer, self.other):
            change(optimizer)

    def compare(self, number, batch=None):
        batch = batch_of(number) if batch is None else batch
        loss = self.step(batch)
        self.other.zero_grad()
        expected = loss_of(self.twin, batch)
        expected.backward()
        self.other.step()
        self.twin.zero_grad()
        expected = snapshot(self.twin, self.other, loss=expected.detach())
        found = snapshot(self.model, self.optimizer, loss=loss)
        for taken in (expected, found):
            taken["attributes"].pop("_opt_called", None)
        assert not differences(expected, found)


@pytest.mark.parametrize("cls", TOGETHER)
def test_a_class_that_couples_parameters_steps_them_together_and_as_eager(cls, kept):
    assert why_together(cls(groups(net()), lr=0.1)) is not None
    two = Two(lambda groups: cls(groups, lr=0.01), kept, strict=False)
    assert any("steps all parameters at once" in note for note in two.step.notes)
    assert sum(o.phase == "update" for o in two.step.graph.ops) == 1
    for number in range(4):
        two.compare(number)


@pytest.mark.parametrize("cls", IN_TURNS)
def test_a_class_that_does_not_takes_turns_and_keeps_what_eager_keeps(cls, kept):
    assert why_together(cls(groups(net()), lr=0.1)) is None
    two = Two(lambda groups: cls(groups, lr=0.01), kept, strict=cls is not ReplacesState)
    assert sum(o.phase == "update" for o in two.step.graph.ops) == 6
    for number in range(12):
        two.compare(number)
    saved = two.optimizer.state_dict()
    two.both(lambda o: o.load_state_dict(copy.deepcopy(saved)))
    two.compare(12)


@pytest.mark.parametrize("cls", [SkipsNonFinite, ClipsByGlobalNorm, Plain, CountsInGroup])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30, 0.0])
def test_gradients_that_are_not_finite(cls, value, kept):
    two = Two(lambda groups: cls(groups, lr=0.01), kept, strict=False)
    two.compare(0)
    two.compare(1, (batch_of(1)[0], torch.tensor(value)))
    two.compare(2)


def test_a_probe_leaves_the_optimizer_as_it_is():
    model = net()
    for cls in (*TOGETHER, *IN_TURNS):
        optimizer = cls(groups(model), lr=0.1)
        before = snapshot(model, optimizer)
        why_together(optimizer)
        assert not differences(before, snapshot(model, optimizer)), cls


# --- those of torch, and what is named like them


def shapes(name):
    return [(5, 3), (3, 4), (4, 4)] if name == "Muon" else [(), (5,), (4, 3), (2, 2, 3, 3)]


@pytest.mark.parametrize(
    "name", [n for n in _INDEPENDENT if n != "SparseAdam"]
)  # which takes no dense gradient
def test_the_trusted_classes_pass_every_trial(name):
    """A copy of the class that is not torch's own is tried like any other."""
    cls = getattr(torch.optim, name)
    params = [nn.Parameter(torch.ones(s)) for s in shapes(name)]
    for settings in ({}, {"weight_decay": 0.1}, {"foreach": True}):
        if not settings.keys() <= inspect.signature(cls).parameters.keys():
            continue
        assert independent(cls(params, lr=0.1, **settings))
        why = why_together(cls(params, lr=0.1, **settings)) or "it makes a number of Python of one"
        assert why.endswith("makes a number of Python of one"), why


@pytest.mark.parametrize("cls", [ClippingAdam, PeekingAdam, Mine])
def test_subclasses_of_trusted_classes_are_tried(cls):
    for made in (cls, type("Adam", (cls,), {"__module__": "torch.optim.adam"})):
        assert not independent(made([nn.Parameter(torch.ones(2))]))


# --- refused


class CountsInItsClass(Plain):
    count = 0

    def begin(self):
        type(self).count += 1
        return True


_count = 0


class CountsGlobally(Plain):
    @torch.no_grad()
    def step(self, closure=None):
        global _count
        _count += 1


class Asks(Plain):
    def step(self, closure=None):
        closure()


def _hook(*_):
    pass


def _replace(optimizer):
    optimizer.step = lambda closure=None: None


REFUSED = {
    "class": (CountsInItsClass, None, "its step changes CountsInItsClass.count"),
    "global": (CountsGlobally, None, "its step changes .*_count"),
    "closure": (Asks, None, "does not run on copies"),
    "hook": (torch.optim.SGD, lambda o: o.register_step_post_hook(_hook), "step hooks"),
    "replaced": (torch.optim.SGD, _replace, "another step in its attributes"),
    "differentiable": (
        torch.optim.SGD, lambda o: o.param_groups[0].update(differentiable=True), "not differentiable",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, kept):
    cls, change, text = REFUSED[case]

    def make(groups):
        made = cls(groups, lr=0.1)
        if change:
            change(made)
        return made

    with pytest.raises(Unsupported, match=text):
        Two(make, kept)
    assert _count == 0 and CountsInItsClass.count == 0


class InMode(Plain):
    """As schedule-free ones: it steps in its mode for training alone."""

    training = False

    def train(self):
        self.training = True

    def step(self, closure=None):
        if not self.training:
            raise RuntimeError("not in train mode")


def test_an_optimizer_with_modes_is_told_of_its_own(kept):
    with pytest.raises(Unsupported, match=r"not in train mode\); instead, call its \.train\(\) before fit"):
        Two(lambda groups: InMode(groups, lr=0.1), kept)


@pytest.mark.parametrize("case", ["hook", "replaced", "differentiable"])
def test_what_is_refused_is_refused_when_it_comes_later(case, kept):
    cls, change, text = REFUSED[case]
    two = Two(lambda groups: cls(groups, lr=0.1), kept)
    two.compare(0)
    change(two.optimizer)
    with pytest.raises(Unsupported, match=text):
        two.step(batch_of(1))


# --- changes from outside, between steps


def _load(optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _reset(optimizer):
    optimizer.state = defaultdict(dict)


def _set(**values):
    return lambda optimizer: [g.update(values) for g in optimizer.param_groups]


def _scheduler(optimizer):
    torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


CHANGES = {
    "load_state_dict": (_load, ()),
    "state reset": (_reset, ()),
    "lr": (_set(lr=0.03), ()),
    "lr of zero": (_set(lr=0.0), ()),
    "scheduler": (_scheduler, ()),
    "weight decay": (_set(weight_decay=0.1), (torch.optim.AdamW, torch.optim.SGD)),
    "momentum": (_set(momentum=0.9), (torch.optim.SGD,)),
    "amsgrad": (lambda o: (_reset(o), _set(amsgrad=True)(o)), (torch.optim.AdamW,)),
    "maximize": (_set(maximize=True), (torch.optim.AdamW, torch.optim.SGD)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, CountsInGroup, ClipsByGlobalNorm])
def test_changes_between_steps_are_seen(cls, change, kept):
    act, only = CHANGES[change]
    if only and cls not in only:
        pytest.skip(f"{cls.__name__} has no such setting")
    two = Two(lambda groups: cls(groups, lr=0.01), kept)
    two.compare(0)
    two.both(act)
    for number in range(1, 4):
        two.compare(number)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, CountsInGroup, ClipsByGlobalNorm])
@pytest.mark.parametrize("after_loading", [False, True])
def test_a_group_that_is_added_is_seen(cls, after_loading, kept):
    def loss(model, batch):
        return loss_of(model, batch) + model.offset.square() + model.offset

    two = Two(lambda groups: cls(groups, lr=0.01), kept)
    two.step = fit(two.model, loss, two.optimizer, batch_of(0), planner=plans.keep, cache=kept)

    def compare(number):
        found = two.step(batch_of(number))
        two.other.zero_grad()
        two.twin.zero_grad()
        expected = loss(two.twin, batch_of(number))
        expected.backward()
        two.other.step()
        two.twin.zero_grad()
        left, right = snapshot(two.twin, two.other, loss=expected.detach()), snapshot(
            two.model, two.optimizer, loss=found
        )  # fmt: skip
        for taken in (left, right):
            taken["attributes"].pop("_opt_called", None)
        assert not differences(left, right)

    compare(0)
    if after_loading:
        two.both(_load)
        compare(1)
    two.optimizer.add_param_group({"params": [two.model.offset], "lr": 0.5})
    two.other.add_param_group({"params": [two.twin.offset], "lr": 0.5})
    compare(2)
    compare(3)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, Plain, ClipsByGlobalNorm])
def test_complex_parameters(cls):
    class Turn(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.ones(3, dtype=torch.complex64) * k) for k in (1 + 1j, 2j))

        def forward(self, x):
            return torch.view_as_real(self.a * x + self.b).square().mean()

    model = Turn()
    twin = copy.deepcopy(model)
    ours, theirs = (cls(m.parameters(), lr=0.1) for m in (model, twin))
    try:
        step = fit(model, lambda m, x: m(x), ours, torch.randn(3), planner=plans.keep, cache=None)
    except Unsupported:
        return
    for number in range(3):
        x = torch.full((3,), 0.5 + number)
        step(x)
        theirs.zero_grad()
        twin(x).backward()
        theirs.step()
        twin.zero_grad()
        assert not differences(snapshot(twin, theirs)["optimizer"], snapshot(model, ours)["optimizer"])
        assert not differences(snapshot(twin)["parameters"], snapshot(model)["parameters"])
