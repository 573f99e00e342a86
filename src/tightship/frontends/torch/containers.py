"""What dicts, lists, sets and deques hold, read and written past whatever their classes make of it.

A registry may make an object each time it is read (as transformers' ``ACT2FN``), a cache may move what is read to its
end, and both may refuse what is written: who puts back what there was wants none of that.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any, Final

__all__ = ["CONTAINERS", "contents", "refill"]

CONTAINERS: Final = (dict, list, set, collections.deque, bytearray)


def _items(mapping: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """A dict's keys and values, in its order."""
    ordered = isinstance(mapping, collections.OrderedDict)
    return collections.OrderedDict.items(mapping) if ordered else dict.items(mapping)  # type: ignore[arg-type]


def contents(container: Any) -> Any:
    """A copy of what one of `CONTAINERS` holds: a plain dict, list, set or bytearray. A list of what a tuple or a
    frozen set holds."""
    if isinstance(container, dict):
        return dict(_items(container))
    if isinstance(container, list):
        return list(list.__iter__(container))
    if isinstance(container, set):
        return set(set.__iter__(container))
    if isinstance(container, (tuple, frozenset)):
        base: Any = tuple if isinstance(container, tuple) else frozenset
        return list(base.__iter__(container))
    if isinstance(container, collections.deque):
        return list(collections.deque.__iter__(container))
    return bytearray(bytearray.__iter__(container))


def refill(container: Any, held: Any) -> None:
    """Makes the container hold what `contents` gave of it, if it holds anything else."""
    now = contents(container)
    if now == held if isinstance(now, (set, bytearray)) else _same_objects(now, held):
        return
    if isinstance(container, dict):
        ordered = isinstance(container, collections.OrderedDict)
        base: Any = collections.OrderedDict if ordered else dict
        base.clear(container)
        for k, v in held.items():
            base.__setitem__(container, k, v)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, held)
    elif isinstance(container, collections.deque):
        collections.deque.clear(container)
        collections.deque.extend(container, held)
    else:
        base = list if isinstance(container, list) else bytearray
        base.__setitem__(container, slice(None), held)


def _same_objects(a: Any, b: Any) -> bool:
    """Whether two dicts or two sequences hold the same objects in the same places; never compares what they hold."""
    left, right = (list(_items(x)) if isinstance(x, dict) else list(enumerate(x)) for x in (a, b))
    return len(left) == len(right) and all(
        (k is j or k == j) and v is w for (k, v), (j, w) in zip(left, right, strict=True)
    )
