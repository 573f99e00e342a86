"""Containers are put back past what their classes make of reading and writing."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

import tightship
from tightship.frontends.torch.containers import contents, refill
from tightship.frontends.torch.python_state import python_state_kept


class Registry(collections.OrderedDict):  # type: ignore[type-arg]
    """Makes an object each time it is read, as transformers' ``ACT2FN``."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key)()


class Plain(dict):  # type: ignore[type-arg]
    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key)()

    def items(self) -> Any:
        return [(k, self[k]) for k in self]


class Recent(collections.OrderedDict):  # type: ignore[type-arg]
    """What is read moves to the end."""

    def __getitem__(self, key: Any) -> Any:
        self.move_to_end(key)
        return super().__getitem__(key)


class Sealed(dict):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("read only")

    update = clear = __setitem__  # type: ignore[assignment]


class Doubled(list):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([x for x in list.__iter__(self) for _ in range(2)])


def raw(x: Any) -> Any:
    if isinstance(x, collections.OrderedDict):
        return list(collections.OrderedDict.items(x))
    return list(dict.items(x)) if isinstance(x, dict) else x[:]


@pytest.mark.parametrize("cls", [Registry, Plain, Recent, Sealed, dict, collections.OrderedDict])
def test_what_a_dict_holds_is_put_back_as_it_was(cls: type) -> None:
    x = cls({"a": int, "b": str, "c": list})
    before = raw(x)
    with python_state_kept(lambda: x):
        pass
    assert raw(x) == before
    with python_state_kept(lambda: x):
        dict.__setitem__(x, "a", float) if cls is not collections.OrderedDict else x.update(a=float)
        assert raw(x) != before
    assert raw(x) == before and type(x) is cls


@pytest.mark.parametrize(
    "x, change",
    [
        (Doubled([1, 2]), lambda x: list.append(x, 3)),
        ([1, 2], lambda x: x.pop()),
        (collections.deque([1, 2, 3], maxlen=3), lambda x: x.append(4)),
        ({1, 2}, lambda x: x.add(3)),
        (bytearray(b"ab"), lambda x: x.extend(b"c")),
        (collections.defaultdict(list, {1: [1]}), lambda x: x[2]),
        (collections.Counter("ab"), lambda x: x.update("a")),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_others_hold_is_put_back(x: Any, change: Any) -> None:
    held = contents(x)
    change(x)
    assert contents(x) != held
    refill(x, held)
    assert contents(x) == held


def test_nothing_is_written_where_nothing_changed() -> None:
    """Somebody may be iterating."""
    x = Registry(a=int)
    walk = iter(x)
    refill(x, contents(x))
    assert next(walk) == "a"


class Missing:
    """Stands for a module that is not installed, as lazily imported ones do."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"{name} of a module that is not installed")


class Slotted:
    __slots__ = ("__weakref__", "count")

    def __getattr__(self, name: str) -> Any:
        raise ImportError(name)


def test_what_is_not_installed_is_left_alone():
    missing, slotted, empty = Missing(), Slotted(), Slotted()
    slotted.count = 1

    def code() -> Any:
        return missing, slotted, empty

    with python_state_kept(code):
        slotted.count = 2
    assert slotted.count == 1


def test_a_step_that_knows_what_is_not_installed():
    model, missing = torch.nn.Linear(4, 3), Missing()
    model.missing = missing

    def loss(net: Any, batch: torch.Tensor) -> torch.Tensor:
        return net(batch).square().mean() if missing is not None else missing.loss

    step = tightship.fit(model, loss, torch.optim.SGD(model.parameters(), 0.1), torch.ones(2, 4), cache=None)
    assert step(torch.ones(2, 4)).isfinite()
