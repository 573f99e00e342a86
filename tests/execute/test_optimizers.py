"""Optimizers under `fit` whose steps differ, that keep more than they did, draw, or come several at once: as in
eager, with every request where it was planned."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest
import torch
from torch import nn

from support import plans
from support.state import differences, snapshot
from tightship.errors import BadInput, Unsupported
from tightship.execute.fit import fit
from tightship.frontends.torch.optimizer.updates import updaters


class Own(torch.optim.Optimizer):
    """Gradient descent; classes below change ``direction``."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.direction(p, self.state[p]))

    def direction(self, p, state):
        return p.grad


class Rectifies(Own):
    """From the fifth step on it needs more."""

    def direction(self, p, state):
        state["step"] = state.get("step", 0) + 1
        return (p.grad.abs() + 1).sqrt() * p.grad.sign() if state["step"] > 4 else p.grad


class Looks(Own):
    """What it needs depends on the gradient."""

    def direction(self, p, state):
        return p.grad[p.grad > 0].sum() * p.sign() if p.grad.sum() > 0 else p.grad


class Reads(Own):
    """Its rate and a table of its own are tensors, as those of optimizers in few bits are."""

    def __init__(self, params):
        super().__init__(params)
        self.param_groups[0]["lr"] = torch.tensor(0.05)
        self.tables = {"few": torch.linspace(-1, 1, 16)}

    def direction(self, p, state):
        return self.tables["few"][(p.grad.sign() + 1).long()]


class WritesItsTable(Reads):
    def direction(self, p, state):
        return p.grad * self.tables["few"].mul_(0.9)[-1]


class ReplacesItsTable(Reads):
    def direction(self, p, state):
        self.tables["few"] = self.tables["few"] * 0.9
        return p.grad * self.tables["few"][-1]


class WritesItsRate(Reads):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.param_groups[0]["lr"].mul_(0.9)


class Halved(torch.Tensor):
    """Kept in bfloat16; like most classes of quantized tensors it knows few ops, and none that are made of others."""

    @staticmethod
    def __new__(cls, kept):
        return torch.Tensor._make_wrapper_subclass(cls, kept.shape, dtype=torch.float32, device=kept.device)

    def __init__(self, kept):
        self.kept = kept

    def __tensor_flatten__(self):
        return ["kept"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _context, _size, _stride):
        return cls(inner["kept"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func is aten.detach.default:
            return cls(args[0].kept.detach())
        if func in (aten.clone.default, aten._to_copy.default):
            return cls(args[0].kept.clone())
        if func is aten.lerp.Scalar:
            return torch.lerp(args[0].kept.float(), *args[1:])
        if func is aten.copy_.default:
            args[0].kept.copy_(args[1])
            return args[0]
        raise NotImplementedError(f"{func} of {cls.__name__}")


class InFewBits(Own):
    def direction(self, p, state):
        if "m" not in state:
            state["m"] = Halved(torch.zeros_like(p, dtype=torch.bfloat16)).to(p.device, dtype=torch.float32)
        mean = torch.lerp(state["m"], p.grad, 0.1)
        state["m"].copy_(mean)
        return mean


@torch.compile(backend="aot_eager", fullgraph=True)
def squared(gradient):
    return gradient.square() * gradient.sign()


class Compiles(Own):
    def direction(self, p, state):
        return squared(p.grad)


class Replaces(Own):
    def direction(self, p, state):
        state["m"] = state.get("m", torch.zeros_like(p)) * 0.9 + p.grad
        return state["m"]


class ReplacesSometimes(Own):
    def direction(self, p, state):
        state.setdefault("m", torch.zeros_like(p)).add_(p.grad)
        if self.steps % 3 == 0:
            state["m"] = state["m"] * 0.5
        return state["m"]


class Lists(Own):
    """Tensors in lists and mappings."""

    def direction(self, p, state):
        if not state:
            state["m"] = [torch.zeros_like(p), {"slow": torch.zeros_like(p)}]
        state["m"][0].mul_(0.9).add_(p.grad)
        state["m"][1]["slow"].lerp_(p.grad, 0.1)
        return state["m"][0] + state["m"][1]["slow"]


class Takes(Own):
    """Keeps the gradient itself."""

    def direction(self, p, state):
        before, state["last"] = state.get("last", p.grad), p.grad
        return before


class Late(Own):
    """Slow weights that are made in the third step, and taken over in every third."""

    every = 3

    def direction(self, p, state):
        if self.steps % self.every == 0:
            slow = state.setdefault("slow", p.clone())
            slow.lerp_(p, 0.5)
            p.copy_(slow)
        return p.grad


class Begins(Own):
    """Its first step needs more than all later ones."""

    def direction(self, p, state):
        if not state:
            state["scale"] = (p.flatten()[:, None] * p.flatten()[None, :]).abs().sum(1).view_as(p).sqrt()
        return p.grad / (1 + state["scale"])


class Becomes(Own):
    """A number of Python's in its state, and one in its group, become tensors."""

    def direction(self, p, state):
        (group,) = self.param_groups
        group["most"] = max(group.get("most", 1e-6), p.grad.abs().max())
        state["mean"] = state.get("mean", 0.0) * 0.9 + p.grad.mean()
        return p.grad / (group["most"] + state["mean"].abs())


class Every(Own):
    """Needs more every so many steps, which it counts from 0 or from 1, for itself or for each parameter."""

    def __init__(self, params, lr=0.05, every=33, first=0, own=False):
        super().__init__(params, lr)
        self.every, self.first, self.own = every, first, own

    def direction(self, p, state):
        state["step"] = state.get("step", self.first - 1) + 1
        counted = self.steps - 1 + self.first if self.own else state["step"]
        if counted % self.every:
            return p.grad
        return p.grad * (p.flatten()[:, None] * p.flatten()[None, :]).cos().abs().sum().rsqrt()


class VeryLate(Late):
    every = 17


class Around(torch.optim.Optimizer):
    """Another optimizer with its own state, and tensors of its own."""

    def __init__(self, params, lr=0.05):
        self.inner = torch.optim.AdamW(params, lr=lr)
        super().__init__(self.inner.param_groups, {})
        self.sums = {p: torch.zeros_like(p) for g in self.param_groups for p in g["params"]}

    @torch.no_grad()
    def step(self, closure=None):
        for p, total in self.sums.items():
            if p.grad is not None:
                total.add_(p.grad)
        self.inner.step()


class AroundBare(torch.optim.Optimizer):
    """As Lookahead is written in most repositories: without ``Optimizer.__init__``."""

    def __init__(self, params, lr=0.05):
        self.inner, self.steps, self.state = torch.optim.AdamW(params, lr=lr), 0, defaultdict(dict)
        for p in (p for group in self.inner.param_groups for p in group["params"]):
            self.state[p]["slow"] = p.detach().clone()

    @property
    def param_groups(self):
        return self.inner.param_groups

    def step(self, closure=None):
        self.inner.step(closure)
        self.steps += 1
        if self.steps % 3 == 0:
            for p, kept in self.state.items():
                p.data.lerp_(kept["slow"], 0.5)
                kept["slow"].copy_(p.data)


class AroundInPlaces(AroundBare):
    """Its groups and defaults are the other's own."""

    param_groups = None

    def __init__(self, params, lr=0.05):
        self.param_groups = (inner := torch.optim.AdamW(params, lr=lr)).param_groups
        self.inner, self.defaults, self.steps, self.state = inner, inner.defaults, 0, defaultdict(dict)
        for p in self.param_groups[0]["params"]:
            self.state[p]["slow"] = p.detach().clone()


class UnderAName(Own):
    """State that is no parameter's, under a name, made where it is not there (as in MADGRAD, TRAC)."""

    def step(self, closure=None):
        if "all" not in self.state:
            self.state["all"] = {
                "count": torch.zeros(1),
                **{p: p.detach().clone() for p in self.param_groups[0]["params"]},
            }
        self.state["all"]["count"] += 1
        super().step()

    def direction(self, p, state):
        return p.grad + (p - self.state["all"][p]) / self.state["all"]["count"]


class ById(Own):
    """What it keeps is found by the id of a parameter (as in Magma)."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.sums, self.left_out = {}, {id(self.param_groups[0]["params"][1])}

    def direction(self, p, state):
        if id(p) in self.left_out:
            return p.grad
        return self.sums.setdefault(id(p), {"sum": torch.zeros_like(p)})["sum"].mul_(0.9).add_(p.grad)


class Draws(Own):
    """Random numbers of torch, Python and NumPy."""

    def direction(self, p, state):
        return p.grad + torch.randn_like(p) * random.random() * np.random.rand()


class DrawsByItself(Own):
    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.generator = torch.Generator().manual_seed(3)

    def direction(self, p, state):
        return p.grad * torch.rand((), generator=self.generator)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batch_of(number):
    g = torch.Generator().manual_seed(number)
    return torch.randn(5, 6, generator=g), torch.randint(0, 3, (5,), generator=g)


class Trained:
    def __init__(self, make, **options):
        self.model = net()
        self.optimizer = make(self.model)
        self.step = None
        if options:
            self.step = fit(self.model, loss_of, self.optimizer, batch_of(0), **options)

    def run(self, k):
        """What step ``k`` leaves."""
        torch.manual_seed(k)
        random.seed(k)
        np.random.seed(k)
        several = self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]
        if self.step is not None:
            loss = self.step(batch_of(k))
        else:
            loss = loss_of(self.model, batch_of(k))
            loss.backward()
            for optimizer in several:
                optimizer.step()
            self.model.zero_grad()
        numbers = {id(p): n for n, p in self.model.named_parameters()}
        kept = {
            f"{type(o).__name__} {n}": (
                [(numbers.get(id(p), p), named(s, numbers)) for p, s in o.state.items()],
                [{k: x for k, x in g.items() if k != "params"} for g in o.param_groups],
                {a: named(x, numbers) for a, x in vars(o).items() if a in ("steps", "sums", "inner")},
            )
            for n, o in enumerate(several)
        }  # fmt: skip
        return snapshot(self.model, None, loss=loss.detach(), **kept)


def named(tree, numbers):
    """Parameters, and their ids, by their names."""
    if not isinstance(tree, dict):
        return tree
    return {numbers.get(k if type(k) is int else id(k), k): named(x, numbers) for k, x in tree.items()}


def check(make, tmp_path, steps=8, **options):
    given = {"planner": plans.keep, "strict": True, "cache": tmp_path, "seconds_per_op": 0.0} | options
    theirs = Trained(make)
    expected = [theirs.run(k) for k in range(steps)]
    ours = Trained(make, **given)
    for k in range(steps):
        assert not differences(expected[k], ours.run(k)), k
        measured = ours.step.measure()
        if ours.step.last.exact:
            assert (measured["misses"], measured["measured_peak"]) == (0, measured["planned_peak"])
    assert ours.step.last.exact  # all state is there
    return ours


def of(cls, **settings):
    return lambda model: cls(model.parameters(), **settings)


@pytest.mark.parametrize(
    "cls",
    [
        Rectifies,
        Looks,
        Replaces,
        ReplacesSometimes,
        Takes,
        Lists,
        Becomes,
        Late,
        Around,
        AroundBare,
        AroundInPlaces,
        UnderAName,
        ById,
        Draws,
        DrawsByItself,
        Reads,
        WritesItsTable,
        ReplacesItsTable,
        WritesItsRate,
        Compiles,
    ],
)
def test_what_differs_from_step_to_step_is_as_in_eager_and_as_planned(cls, tmp_path):
    check(of(cls), tmp_path)


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (Reads, ""),
        (WritesItsTable, "its step changes the tensor in 'tables'"),
        (ReplacesItsTable, "its step changes the tensor in 'tables'"),
        (WritesItsRate, "its step changes the tensor in 'lr'"),
        (Compiles, "its step calls code that torch.compile makes"),
    ],
)
def test_tensors_that_steps_only_read_let_parameters_be_stepped_one_at_a_time(cls, why, tmp_path):
    ours = check(of(cls), tmp_path, steps=2)
    found = [n for n in ours.step.notes if "steps all parameters at once" in n]
    assert [why in n for n in found] == [True] * bool(why)


def test_code_of_an_optimizer_runs_as_it_does_by_itself(tmp_path):
    """A class of tensors is given the ops that it is given in eager, not those that are made of them."""
    theirs, ours = net(), net()
    optimizers = [InFewBits(m.parameters()) for m in (theirs, ours)]
    step = fit(
        ours, loss_of, optimizers[1], batch_of(0), planner=plans.keep, cache=tmp_path, seconds_per_op=0.0
    )
    for k in range(3):
        torch.manual_seed(k)
        loss = loss_of(theirs, batch_of(k))
        loss.backward()
        optimizers[0].step()
        theirs.zero_grad()
        torch.manual_seed(k)
        assert torch.equal(loss, step(batch_of(k)))
        assert all(map(torch.equal, theirs.parameters(), ours.parameters()))
        measured = step.measure()
        assert measured["planned_peak"] is not None
        assert (
            measured["measured_peak"] == measured["planned_peak"] or not k
        )  # its state comes in the first step
    assert not step.notes


@pytest.mark.parametrize("cls", [torch.optim.RAdam, torch.optim.Rprop, torch.optim.ASGD, torch.optim.NAdam])
@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"maximize": True}])
def test_so_do_torchs_own_whose_first_steps_are_others(cls, settings, tmp_path):
    check(of(cls, lr=0.01, **settings), tmp_path)


def test_an_update_that_always_asks_for_the_same_is_planned_request_by_request(tmp_path):
    ours = check(of(torch.optim.Adagrad, foreach=True), tmp_path, steps=3)
    asked = [len(op.requests) for op in ours.step.graph.ops if op.phase == "update"]
    assert min(asked) > 1
    other = check(of(Rectifies), tmp_path)
    assert {len(op.requests) for op in other.step.graph.ops if op.phase == "update"} == {1}


def test_state_that_comes_late_counts_from_the_start(tmp_path):
    late, plain = (check(of(cls), tmp_path).step.graph for cls in (Late, Own))
    sizes = sum(-(-p.numel() * 4 // 64) * 64 for p in net().parameters())
    assert late.static_bytes == plain.static_bytes + sizes


def test_a_first_update_that_needs_more_than_later_ones_is_within_the_budget(tmp_path):
    first = check(of(Begins), tmp_path, steps=3, budget="100%")

    def begun(model):
        """As a loop does that goes on where another has ended."""
        optimizer = Begins(model.parameters())
        for p in model.parameters():
            optimizer.state[p]["scale"] = torch.ones_like(p)
        return optimizer

    second = check(begun, tmp_path, steps=3, budget="100%")
    most = max(p.numel() for p in net().parameters())
    assert first.step.measure()["planned_peak"] > most**2 * 4 > second.step.measure()["planned_peak"]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("own", [False, True])
def test_an_update_that_needs_more_every_so_many_steps_is_within_the_budget(first, own, tmp_path):
    check(of(Every, first=first, own=own), tmp_path, steps=36, budget="100%")


def test_state_that_comes_later_than_was_tried_lies_outside_the_arena(tmp_path):
    ours = check(of(VeryLate), tmp_path, steps=20)
    state = ours.optimizer.state
    assert all("slow" in state[p] for p in ours.model.parameters())
    (variant,) = ours.step._variants
    assert variant.executor.arena.live == sum(-(-p.numel() * 4 // 64) * 64 for p in ours.model.parameters())


def test_what_an_optimizer_keeps_beside_its_state_is_counted(tmp_path):
    graph = check(of(Around), tmp_path).step.graph
    assert sum(s.kind == "state" for s in graph.storages) == 6 * (3 + 1)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, Lists])
def test_state_comes_in_the_order_of_eagers_whatever_the_order_of_updates(cls, tmp_path):
    """`check` compares it; here updates do not run in the order of the parameters."""
    check(of(cls), tmp_path, steps=2, planner=backwards)


def backwards(graph, budget):
    first = [k for k, op in enumerate(graph.ops) if op.phase != "update"]
    last = [k for k, op in enumerate(graph.ops) if op.phase == "update"]
    steps = plans.with_frees(graph, [plans.Step("compute", op=k) for k in (*first, *reversed(last))])
    return plans.placed(graph, steps, budget)


# --- several --------------------------------------------------------------------------------------------------


def muon_and_adamw(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [
        torch.optim.Muon(matrices, lr=0.01),
        torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=0.01),
    ]


def one_after_the_other(model):
    return [
        torch.optim.AdamW(model.parameters(), lr=0.01),
        torch.optim.SGD(model.parameters(), lr=0.1),
        Late(model.parameters()),
    ]


def same_class(model):
    return [torch.optim.AdamW(model.parameters(), lr=0.01), torch.optim.AdamW(model.parameters(), lr=0.1)]


@pytest.mark.parametrize("make", [muon_and_adamw, one_after_the_other, same_class, lambda m: [of(Own)(m)]])
def test_several_optimizers_step_in_turn(make, tmp_path):
    check(make, tmp_path, verify_every=2)


def test_a_schedule_of_one_of_several_is_seen(tmp_path):
    def make(model):
        found = muon_and_adamw(model)
        scheduler = torch.optim.lr_scheduler.StepLR(found[1], 1, 0.5)
        found[1].register_step_post_hook = None
        found[1].scheduler = scheduler
        return found

    theirs, ours = Trained(make), Trained(make, planner=plans.keep, strict=True, cache=tmp_path)
    for k in range(3):
        assert not differences(theirs.run(k), ours.run(k)), k
        for side in (theirs, ours):
            side.optimizer[1].scheduler.step()


def test_no_optimizer_in_a_list_is_refused(tmp_path):
    with pytest.raises(BadInput, match="an empty list of optimizers"):
        fit(net(), loss_of, [], batch_of(0), cache=tmp_path)


class OfTuples:
    """As torchopt's."""

    def __init__(self, parameters):
        self.param_groups = [tuple(parameters)]

    def step(self):
        pass


@pytest.mark.parametrize("several", [False, True])
def test_an_optimizer_with_groups_of_another_form_is_refused_with_what_to_do(several):
    model = nn.Linear(4, 4)
    optimizer = OfTuples(model.parameters())
    with pytest.raises(
        Unsupported, match=r"OfTuples is not supported: its param_groups are not dicts .* fit None"
    ):
        given = [optimizer, torch.optim.SGD(model.parameters())] if several else optimizer
        fit(model, lambda m, x: m(x).sum(), given, torch.ones(2, 4), cache=None)


def test_a_scaler_and_several_optimizers_are_refused(tmp_path):
    model = net()
    with pytest.raises(Unsupported, match="GradScaler with several optimizers"):
        fit(
            model,
            loss_of,
            muon_and_adamw(model),
            batch_of(0),
            cache=tmp_path,
            scaler=torch.amp.GradScaler("cpu"),
        )


# --- trying changes nothing; refusals -------------------------------------------------------------------------


def test_trying_an_optimizer_draws_no_numbers(tmp_path):
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    model = net()
    made = Draws(model.parameters())
    torch.set_rng_state(before[0])
    fit(model, loss_of, made, batch_of(0), planner=plans.keep, cache=tmp_path)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (random.getstate(), str(np.random.get_state())) == before[1:]


def test_what_a_check_against_eager_draws_is_drawn_again(tmp_path):
    check(of(Draws), tmp_path, steps=3, verify_every=1)


def test_a_check_against_eager_knows_what_the_optimizer_keeps_in_attributes(tmp_path):
    check(of(Around), tmp_path, steps=3, verify_every=1)


class Asks(Own):
    def step(self, closure=None):
        if closure is None:
            raise RuntimeError("Asks requires closure")
        closure()


@pytest.mark.parametrize("cls", [torch.optim.LBFGS, Asks])
def test_an_optimizer_that_runs_the_model_is_refused_with_what_to_do(cls):
    model = net()
    with pytest.raises(Unsupported, match=r"needs a closure .* calls step.backward\(batch\)"):
        updaters(cls(model.parameters()), dict(model.named_parameters()))
