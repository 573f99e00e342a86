"""What hooks of ``fully_shard`` take of a budget that graphs share, beside this rank's parts (`accounting`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tightship.frontends.torch.compat_gathered import HookMemory

__all__ = ["GatheredMemory"]


@dataclass
class GatheredMemory:
    """Bytes that hooks hold while graphs run: ``passes`` is the most that they have been expected to, or seen to."""

    hooks: HookMemory | None = None
    passes: int = 0

    def note(self) -> bool:
        """Takes note of what hooks hold now, or will as they are set; whether it has become more."""
        if self.hooks is None:
            return False
        before, self.passes = self.passes, max(self.passes, self.hooks.passes(), self.hooks.now())
        return self.passes > before

    @property
    def gradients(self) -> int:
        """Of this rank's parts of them."""
        return 0 if self.hooks is None else self.hooks.gradients

    def own_gradients(self, given: Iterable[torch.Tensor]) -> int:
        """Of the parts of gradients of those among the tensors that are gathered."""
        return 0 if self.hooks is None else self.hooks.own_gradients(given)

    def last(self) -> int:
        """Bytes after a step's last backward pass, gradients included."""
        return 0 if self.hooks is None else self.hooks.last()

    def whole(self) -> frozenset[int]:
        """The identities of storages that hooks fill and free."""
        return frozenset() if self.hooks is None else self.hooks.whole()
