"""The tensors that an optimizer keeps, and where they stand in its state, groups and attributes."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tightship.frontends.torch import compat

__all__ = [
    "SCALARS",
    "Path",
    "inside",
    "kept_by_path",
    "kept_tensors",
    "moved_out",
    "parameters_of",
]


SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type)


class Path(tuple[tuple[str, Any], ...]):
    """Where a tensor stands inside something: attributes, keys and indices, and keys that are parameters or the ids
    of such (by their number), one after the other."""

    def __str__(self) -> str:
        return "".join(f".{key}" if how == "attribute" else f"[{key!r}]" for how, key in self)

    def find(self, tree: Any, params: Sequence[torch.Tensor] = ()) -> Any:
        """What stands there now; None if nothing does."""
        try:
            for how, key in self:
                if how == "attribute":
                    tree = vars(tree)[key]
                    continue
                at = params[key] if how != "key" else key
                at = id(at) if how == "id" else at
                if isinstance(tree, Mapping) and at not in tree:  # a defaultdict would make an entry
                    return None
                tree = tree[at]
        except (KeyError, IndexError, TypeError):
            return None
        return tree


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """Every parameter of every group, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def kept_by_path(optimizer: Any) -> dict[Path, torch.Tensor]:
    """The tensors in the optimizer's state, groups and attributes, parameters left out; each once."""
    params = parameters_of(optimizer)
    return dict(_walk(vars(optimizer), Path(), {id(p): k for k, p in enumerate(params)}, {*map(id, params)}))


def inside(tree: Any) -> dict[Path, torch.Tensor]:
    """The tensors inside what an optimizer keeps for a parameter: in lists, mappings and objects."""
    return dict(_walk(tree, Path(), {}, set()))


def kept_tensors(optimizer: Any) -> list[torch.Tensor]:
    """As `kept_by_path`, without the paths."""
    return list(kept_by_path(optimizer).values())


def _copy_of_storage(tensor: torch.Tensor) -> Any:
    """From torch's allocator, which a storage's own clone does not ask."""
    old = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return old.clone().untyped_storage()


def _walk(
    tree: Any, path: Path, numbers: Mapping[int, int], seen: set[int]
) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(tree, SCALARS) or id(tree) in seen:
        return
    seen.add(id(tree))
    if isinstance(tree, torch.Tensor):
        yield path, tree
        return
    rows: Iterable[tuple[tuple[str, Any], Any]] = ()
    if isinstance(tree, Mapping):
        rows = [(_step_to(k, numbers), x) for k, x in tree.items()]
    elif isinstance(tree, (list, tuple, deque)):
        rows = [(("key", k), x) for k, x in enumerate(tree)]
    elif hasattr(tree, "__dict__") and not isinstance(tree, _NOT_WALKED):
        rows = [(("attribute", k), x) for k, x in vars(tree).items()]
    for step, x in rows:
        yield from _walk(x, Path((*path, step)), numbers, seen)


def _step_to(key: Any, numbers: Mapping[int, int]) -> tuple[str, Any]:
    if id(key) in numbers:
        return "parameter", numbers[id(key)]
    return ("id", numbers[key]) if type(key) is int and key in numbers else ("key", key)


_NOT_WALKED = (type, types.ModuleType, types.FunctionType, types.MethodType, torch.nn.Module)


def moved_out(optimizer: Any) -> None:
    """Puts what the optimizer keeps into storages of its own, each tensor staying the object that it is."""
    params = parameters_of(optimizer)
    own = {compat.storage_key(p) for p in params}
    moved: dict[int, Any] = {}
    for t in kept_tensors(optimizer):
        key = compat.storage_key(t)
        if key not in own:
            if key not in moved:
                moved[key] = _copy_of_storage(t)
            blank = torch.empty(0, dtype=t.dtype, device=t.device)
            t.data = blank.set_(moved[key], t.storage_offset(), t.shape, t.stride())
