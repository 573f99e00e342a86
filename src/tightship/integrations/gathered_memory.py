"""What hooks of ``fully_shard`` take of a budget that graphs share, beside this rank's parts (`accounting`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from tightship.frontends.torch.compat_gathered import HookMemory

__all__ = ["GatheredMemory"]


@dataclass
class GatheredMemory:
    """Bytes that hooks hold while graphs run: ``passes`` is the most that they have been expected to, or seen to;
    ``hooks`` are those of each model that shares the budget."""

    hooks: dict[int, HookMemory] = field(default_factory=dict)
    passes: int = 0

    def note(self) -> bool:
        """Takes note of what hooks hold now, or will as they are set; whether it has become more."""
        before = self.passes
        self.passes = max(before, sum(max(h.passes(), h.now()) for h in self.hooks.values()))
        return self.passes > before

    @property
    def gradients(self) -> int:
        """Of this rank's parts of them."""
        return sum(h.gradients for h in self.hooks.values())

    def own_gradients(self, given: Iterable[torch.Tensor]) -> int:
        """Of the parts of gradients of those among the tensors that are gathered."""
        tensors = list(given)
        return sum(h.own_gradients(tensors) for h in self.hooks.values())

    def last(self) -> int:
        """Bytes after a step's last backward pass, gradients included."""
        return sum(h.last() for h in self.hooks.values())

    def whole(self) -> frozenset[int]:
        """The identities of storages that hooks fill and free."""
        return frozenset().union(*(h.whole() for h in self.hooks.values()))
