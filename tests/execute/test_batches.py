"""What of a batch reaches no op costs nothing: neither a capture nor a plan."""

import collections
import collections.abc
import copy
import dataclasses
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tightship
from support.chains import chain
from tightship import errors
from tightship.execute.prepared import Thrashing
from tightship.frontends.torch.capture.incremental import StepCapture
from tightship.planners import default, floor


@pytest.fixture
def count(monkeypatch):
    """Captures and plans so far."""
    seen = collections.Counter()
    begin = StepCapture.__init__

    def counted(self, *args, **kwargs):
        seen["captures"] += 1
        begin(self, *args, **kwargs)

    monkeypatch.setattr(StepCapture, "__init__", counted)
    return seen


def planning(count):
    def planner(graph, budget):
        count["plans"] += 1
        return default.plan(graph, budget, default.Options(work=1000))

    return planner


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def trained(count, loss_fn, batch_fn, steps=6):
    """Counts of captures and plans after the first one; every step is compared with eager's."""
    model, other = net(), net()
    optimizer, eager = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    step = tightship.fit(model, loss_fn, optimizer, batch_fn(0), "100%", planner=planning(count))
    first = count.copy()
    for i in range(1, 1 + steps):
        loss = step(batch_fn(i))
        want = loss_fn(other, batch_fn(i))
        want.backward()
        eager.step()
        eager.zero_grad()
        assert torch.equal(loss, want)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    return dict(count - first)


def xy(i):
    g = torch.Generator().manual_seed(i)
    return torch.randn(8, 16, generator=g), torch.randint(0, 4, (8,), generator=g)


def named(i, **more):
    x, y = xy(i)
    return {"x": x, "y": y, **more}


def by_name(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def by_position(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def by_attribute(model, batch):
    return F.cross_entropy(model(batch.x), batch.y)


Named = collections.namedtuple("Named", "x y weight name")


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor
    y: torch.Tensor
    name: str


class Data:
    """An object with tensors, as graph libraries have them: what it holds is found by name."""

    def __init__(self, i):
        self.__dict__["store"] = named(i, name=f"graph {i}")

    def __getattr__(self, name):
        if name == "store":
            raise AttributeError(name)
        return self.store[name]


class Own(dict):
    def __init__(self, i, name):
        super().__init__(named(i, name=name))


def backwards(i):
    return dict(reversed(named(i).items())) if i % 2 else named(i)


def user_dict(i):
    return collections.UserDict(named(i, id=f"image {i}"))


KINDS = {
    "a number": (by_name, lambda i: named(i, weight=0.1 * i, count=i, flag=i % 2 == 0)),
    "NaN": (by_name, lambda i: named(i, weight=float("nan"))),
    "text": (by_name, lambda i: named(i, id=f"image {i}")),
    "more text": (by_name, lambda i: named(i, ids=[f"image {i}"] * (i + 1))),
    "names": (by_name, lambda i: named(i, by_id={f"image {i}": i})),
    "one more": (by_name, lambda i: named(i, **({"extra": i} if i % 2 else {}))),
    "None or text": (by_name, lambda i: named(i, text=None if i % 2 else "a")),
    "objects": (by_name, lambda i: named(i, any=object(), size=torch.Size([i, 3]), kind=torch.float32)),
    "arrays": (by_name, lambda i: named(i, a=np.arange(i + 1), b=np.float32(i), c=np.int64(i))),
    "nested": (by_name, lambda i: named(i, meta=[{"size": (i, i + 1)} for _ in range(i + 1)])),
    "other order": (by_name, backwards),
    "lists and tuples": (by_position, lambda i: list(xy(i)) if i % 2 else xy(i)),
    "namedtuple": (by_attribute, lambda i: Named(*xy(i), 0.5 * i, f"image {i}")),
    "dataclass": (by_attribute, lambda i: Sample(*xy(i), f"image {i}")),
    "slots": (by_attribute, lambda i: Slotted(*xy(i), f"image {i}")),
    "namespace": (by_attribute, lambda i: types.SimpleNamespace(**named(i, name=f"image {i}"))),
    "object": (by_attribute, Data),
    "UserDict": (by_name, user_dict),
    "defaultdict": (by_name, lambda i: collections.defaultdict(list, named(i, name=i))),
    "OrderedDict": (by_name, lambda i: collections.OrderedDict(named(i, name=i))),
    "mapping": (by_name, lambda i: types.MappingProxyType(named(i, name=i))),
    "a dict of its own": (by_name, lambda i: Own(i, f"image {i}")),
    "unread tensors": (by_name, lambda i: named(i, boxes=torch.ones(i + 1, 4), extra=torch.ones(3) * i)),
    "other strides of what is unread": (by_name, lambda i: named(i, m=torch.ones(2, 3).t()[: i + 1])),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_reaches_no_op_is_captured_once(kind, count):
    assert trained(count, *KINDS[kind]) == {}


NUMBERS = {
    "float": lambda i: 0.1 * i + 0.3,
    "int": lambda i: i + 2,
    "NumPy's double": lambda i: np.float64(0.1 * i + 0.3),
    "NumPy's float": lambda i: np.float32(0.1 * i + 0.3),
    "NumPy's int": lambda i: np.int64(i + 2),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_number_that_reaches_ops_is_taken_over(kind, count):
    def weighted(model, batch):
        return by_name(model, batch) * batch["weight"]

    assert trained(count, weighted, lambda i: named(i, weight=NUMBERS[kind](i))) == {}


def test_code_that_takes_turns_is_captured_once_for_each(count):
    def weighted(model, batch):
        loss = by_name(model, batch)
        return loss if batch["weight"] is None else loss * batch["weight"]

    found = trained(count, weighted, lambda i: named(i, weight=None if i % 2 else 0.5 * i + 0.1))
    assert found == {"captures": 1, "plans": 1}


def test_code_that_takes_turns_by_what_is_in_the_batch(count):
    def loss_fn(model, batch):
        out = model(batch["x"])
        if bool((batch["y"] == 0).all()):
            return out.square().mean() * batch["weight"]
        return F.cross_entropy(out, batch["y"]) * batch["weight"]

    def batch(i):
        made = named(i, weight=0.5 * i + 0.1)
        return {**made, "y": made["y"] * 0} if i % 3 == 1 else made

    assert trained(count, loss_fn, batch, steps=9) == {"captures": 1, "plans": 1}


def test_a_tensor_that_is_asked_later_has_its_own_shape(count):
    def loss_fn(model, batch):
        loss = by_name(model, batch)
        return loss * batch["extra"].shape[0] if batch["use"] else loss

    found = trained(count, loss_fn, lambda i: named(i, extra=torch.ones(i + 1), use=i == 4))
    assert found["captures"] == 1


def test_a_tensor_that_code_inside_of_a_call_reaches_counts_as_asked():
    def loss_fn(model, batch):
        logits = torch.func.vmap(lambda row: row * batch["extra"].shape[0])(model(batch["x"]))
        return F.cross_entropy(logits, batch["y"])

    trained(collections.Counter(), loss_fn, lambda i: named(i, extra=torch.ones(i % 2 + 1)), steps=3)


class Rows(collections.abc.MutableMapping):
    """As tensordict's: a mapping of tensors that iterates by rows, as a tensor does, and has no truth."""

    def __init__(self, **tensors):
        self.tensors = tensors

    def __getitem__(self, key):
        return (
            self.tensors[key]
            if isinstance(key, str)
            else Rows(**{k: t[key] for k, t in self.tensors.items()})
        )

    def __setitem__(self, key, value):
        self.tensors[key] = value

    def __delitem__(self, key):
        del self.tensors[key]

    def __len__(self):
        return len(self.tensors["x"])

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __bool__(self):
        raise RuntimeError("no truth value")

    __lt__ = __gt__ = lambda self, other: self


def test_mappings_of_tensordict_are_read_where_the_code_reads_them(count, monkeypatch):
    known = types.SimpleNamespace(is_tensor_collection=lambda x: isinstance(x, Rows))
    monkeypatch.setitem(sys.modules, "tensordict", known)

    def loss_fn(model, batch):
        return by_name(model, batch["inner"]) * len(batch["inner"])

    assert trained(count, loss_fn, lambda i: {"inner": Rows(**named(i))}) == {}


def test_an_unread_tensor_takes_none_of_the_budget():
    def fitted(**more):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return tightship.fit(model, by_name, optimizer, named(0, **more), "100%")

    assert fitted(extra=torch.ones(1 << 16)).plan.static == fitted().plan.static


def test_a_batch_is_left_as_it_is():
    batch = named(0, sizes=torch.Size([2, 3]), more=collections.defaultdict(list, a=[1]))
    before = copy.copy(batch)
    model = net()
    step = tightship.fit(model, by_name, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    step(batch)
    assert list(batch) == list(before) and all(batch[k] is before[k] for k in batch)


def test_an_error_before_the_code_runs_is_the_one_that_is_raised(monkeypatch):
    """What a broken package raises when the capture begins."""

    def broken(self, *args, **kwargs):
        raise RuntimeError("operator does not exist")

    monkeypatch.setattr(StepCapture, "__init__", broken)
    model = net()
    with pytest.raises(RuntimeError, match="operator does not exist"):
        tightship.fit(model, by_name, torch.optim.SGD(model.parameters(), lr=0.1), named(0))


def rows(n):
    return torch.randn(n, 16), torch.randint(0, 4, (n,))


def fitted(budget="100%", **options):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    return tightship.fit(model, by_position, optimizer, rows(16), budget, work=10_000, **options)


def test_kinds_that_take_turns_beyond_what_is_kept_warn_once():
    step = fitted(variants=2)
    sizes = [1 + i % 4 for i in range(6)]
    for n in sizes:
        step(rows(n))
    with pytest.warns(Thrashing, match=r"5 kinds of batches.*variants=2.*Give variants=5") as found:
        step(rows(3))
    for n in sizes:
        step(rows(n))
    assert len([w for w in found if w.category is Thrashing]) == 1
    assert any("take turns" in n for n in step.notes)


def test_kinds_that_are_kept_and_kinds_that_never_return_do_not_warn():
    step = fitted(variants=4)
    for n in (*[1 + i % 3 for i in range(9)], *range(5, 13)):
        step(rows(n))
    assert not any("take turns" in n for n in step.notes)


def test_a_percentage_below_the_static_set_says_what_to_say_instead():
    with pytest.raises(errors.Infeasible, match=r'more than 20% of the unplanned peak.*"static\+60%"'):
        fitted("20%")
    static = fitted("static+90%").plan
    assert static.peak <= static.budget
    with pytest.raises(errors.Infeasible) as found:
        fitted(1000)
    assert "static+" not in str(found.value)


def test_a_similar_graph_s_plan_is_where_the_search_begins():
    """Chains of the same ops in other sizes."""
    first = chain(24, 1024)
    known = default.plan(first, "50%", default.Options(work=3_000_000))
    assert known.count("recompute")
    other = chain(24, 704)
    assert floor.same_ops(first, other) and not floor.same_ops(first, chain(23, 704))
    again = default.plan(other, "50%", default.Options(work=3_000_000), like=[(first, known)])
    assert again.peak <= again.budget and again.digest == other.digest
    assert again.time / again.time_bound <= max(1.001, known.time / known.time_bound)
    assert (
        again.steps
        == default.plan(other, "50%", default.Options(work=3_000_000), like=[(first, known)]).steps
    )


def test_what_a_plan_does_is_read_off_its_steps():
    graph = chain(24, 1024)
    known = default.plan(graph, "50%", default.Options(work=3_000_000))
    problem = default.problem_of(graph, floor.order_in(known), default.Options())
    floor.seed(problem, known)
    (found,) = problem.archive.found
    assert found.peak <= known.budget and found.runs == known.count("recompute")
