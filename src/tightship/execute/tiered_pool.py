"""The host pool of a plan run on a GPU, in two levels: pinned memory, and beyond it a file.

Offsets below ``pinned`` are memory, as in `Pinned`; those from there on are a file without a name in a folder of the
user's choice, as in `spill`. Between device and file bytes go through a piece of pinned memory of the copy's stream,
one after the other: CUDA calls the core in the order of the stream to write or read the file, so that here, too, the
host waits for nothing while the step runs. At its end it does, to hear of errors.

It has run on PyTorch's CUDA build over a runtime that computes nothing, and **not yet on a GPU**.
"""

from __future__ import annotations

import os
from typing import Any, Final

import torch

from tightship import _core
from tightship.execute.file_pool import Spill
from tightship.execute.pinned_pool import TO_HOST, Pinned

__all__ = ["Staged", "host_pool"]

PIECE: Final = 1 << 23
"""Bytes between device and file at a time."""


def host_pool(
    size: int, device: str, pinned: int | None = None, folder: str | os.PathLike[str] | None = None
) -> Pinned:
    """``size`` bytes beside a GPU: pinned memory, of which there is no more than ``pinned`` bytes if that is said."""
    return Pinned(size, device) if pinned is None else Staged(size, device, pinned, folder)


class Staged(Pinned):
    """``size`` bytes beside ``device``, the first ``pinned`` of them in pinned memory, the others in ``folder``
    (default: the system's for temporary files). A piece of pinned memory more for each stream that copies.

    As `Pinned`; also raises ``BadInput`` naming the folder when there is no such folder or no room in it. `drain`
    raises ``OSError`` where a file could not be written or read.
    """

    def __init__(
        self, size: int, device: str, pinned: int, folder: str | os.PathLike[str] | None = None
    ) -> None:
        self.limit, self.folder = pinned, folder
        self._pieces: dict[int, Pinned] = {}
        self._file: Spill | None = None
        super().__init__(size, device)

    def _open(self, size: int) -> None:
        self.pinned = min(size, self.limit)
        self._file = Spill(size - self.pinned, self.folder)
        self._staged = _core.Staged(self._file.descriptor)
        super()._open(self.pinned)
        self.size = size

    def _shut(self) -> None:
        super()._shut()
        if self._file is not None:
            self._file.close()

    def _move(self, copies: Any, stream: int, kind: int, address: int, offset: int, size: int) -> None:
        inside = max(0, min(size, self.pinned - offset))
        if inside:
            super()._move(copies, stream, kind, address, offset, inside)
        for done in range(inside, size, PIECE):
            n = min(PIECE, size - done)
            self._through(copies, self._piece(stream), kind, address + done, offset + done - self.pinned, n)

    def _through(self, copies: Any, piece: Pinned, kind: int, address: int, offset: int, size: int) -> None:
        function, job = self._staged.job(kind == TO_HOST, piece.base, size, offset)
        if kind == TO_HOST:
            self._runtime.copy(piece.base, address, size, kind, copies.cuda_stream)
            self._runtime.call(copies.cuda_stream, function, job)
        else:
            self._runtime.call(copies.cuda_stream, function, job)
            self._runtime.copy(address, piece.base, size, kind, copies.cuda_stream)

    def _piece(self, stream: int) -> Pinned:
        if stream not in self._pieces:
            self._pieces[stream] = Pinned(PIECE, str(self.device))
        return self._pieces[stream]

    def drain(self) -> None:
        """Waits for every copy, here and on the device."""
        super().drain()
        torch.cuda.current_stream(self.device).synchronize()
        self._staged.settle()

    def close(self) -> None:
        """Waits for what is running, here and on the device, and gives memory and file back."""
        super().close()
        for piece in self._pieces.values():
            piece.close()
