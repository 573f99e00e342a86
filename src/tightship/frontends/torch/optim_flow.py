"""Which parameters' numbers meet in an optimizer's step: a dispatch mode that follows them from op to op.

Comparing numbers finds a coupling only where it acts. A norm over all gradients is seen here whatever its limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tightship.frontends.torch import compat

__all__ = ["Flow"]

# What these make does not depend on the numbers of their tensor.
_EMPTY = (
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros",
    "new_ones", "new_full", "new_empty_strided",
)  # fmt: skip
_LEAVES = (
    "numpy",
    "tolist",
    "data_ptr",
    "untyped_storage",
    "storage",
    "__array__",
    "__dlpack__",
    "__reduce_ex__",
)

Owners = frozenset[int]


class _Follow(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.owners: dict[int, Owners] = {}
        self.held: list[Any] = []  # or a storage's key would be given to another
        self.met: list[str] = []

    def own(self, tensor: torch.Tensor, owners: Owners) -> None:
        if owners:
            self.owners[compat.storage_key(tensor)] = owners
            self.held.append(tensor.untyped_storage())

    def of(self, tree: Any) -> Owners:
        found: Owners = frozenset()
        for t in _tensors(tree):
            found |= self.owners.get(compat.storage_key(t), frozenset())
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.rpartition("::")[2]
        if name in _EMPTY:
            return out
        given = (*args, *kwargs.values())
        if name.startswith(("_foreach_", "_fused_")):
            self.listed(name, given, out)
            return out
        owners = self.of(given)
        if len(owners) > 1:
            self.met.append(f"{name} reads several")
        results = list(_tensors(out))
        if owners and not results and func._schema.returns:
            self.met.append(f"{name} makes a number of Python of one")
        written = [given[k] for k, _ in compat.written_arguments(func) if k < len(args)]
        for t in (*results, *_tensors(written)):
            self.own(t, owners)
        return out

    def listed(self, name: str, given: Sequence[Any], out: Any) -> None:
        """Ops on lists take the k-th of each list together."""
        lists = [x for x in (*given, out) if isinstance(x, (list, tuple)) and list(_tensors(x))]
        shared = self.of([x for x in given if isinstance(x, torch.Tensor)])
        for k in range(max(map(len, lists), default=0)):
            row = [x[k] for x in lists if k < len(x)]
            owners = self.of(row) | shared
            if len(owners) > 1:
                self.met.append(f"{name} reads several")
            for t in _tensors(row):
                self.own(t, owners)


class _Leaving(TorchFunctionMode):
    """Numbers that leave torch by a way no op sees."""

    def __init__(self, follow: _Follow) -> None:
        super().__init__()
        self.follow = follow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _LEAVES and args and isinstance(args[0], torch.Tensor):
            with torch._C.DisableTorchFunction():
                owned = self.follow.of([args[0]])
            if owned:
                self.follow.met.append(f"{name}() makes a number of Python of one")
        return func(*args, **(kwargs or {}))


class Flow:
    """``met`` says where, in what ran while `watching`, numbers of several owners met or became Python's."""

    def __init__(self) -> None:
        self._follow = _Follow()
        self.met = self._follow.met

    def own(self, owner: int, tensor: torch.Tensor) -> None:
        """Let the numbers in ``tensor`` be those of ``owner``."""
        self._follow.own(tensor, frozenset((owner,)))

    @contextmanager
    def watching(self) -> Iterator[None]:
        with self._follow, _Leaving(self._follow):
            yield


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for x in tree:
            yield from _tensors(x)
